"""Linear layers with quantised weights, as checkpoints and their loaders write them.

A form is a function `(layer, dtype) -> weight [N, K]` that computes the weight from the layer's
buffers. `QuantizedLinear` makes buffers with random codes that suit the form.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen import formats

GROUP = 16
BLOCK = 32
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


class QuantizedLinear(nn.Module):
    """A linear from x [..., K] to [..., N]. It has the buffers that `form` needs, by its entry in
    `STORED`, or, for a form that a test defines, by its attribute `stored`."""

    def __init__(self, form, hidden: int, width: int, seed: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.form, self.hidden, self.width = form, hidden, width
        generator = torch.Generator().manual_seed(seed)
        stored = getattr(form, "stored", None) or (STORED | OTHER_LAYERS)[form]
        for name, tensor in stored(width, hidden, generator).items():
            self.register_buffer(name, tensor)
        if bias:
            values = torch.randn(width, generator=generator).bfloat16()
            self.bias = nn.Parameter(values, requires_grad=False)
        else:
            self.bias = None

    def forward(self, x):
        if self.form in WHOLE or self.form in OTHER_LAYERS:
            return self.form(self, x)
        return F.linear(x, self.form(self, x.dtype), self.bias)


def words(generator, *shape):
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def scales(generator, *shape, dtype=torch.bfloat16):
    return (0.02 * (0.5 + torch.rand(shape, generator=generator))).to(dtype)


# --- two nibbles in a byte ------------------------------------------------------------------------


def nibble_buffers(rows, hidden, generator):
    packed = torch.randint(0, 256, (rows, hidden // 2), generator=generator).to(torch.uint8)
    return {
        "packed": packed,
        "scale": scales(generator, rows, hidden // GROUP),
        "by_column": scales(generator, rows // GROUP, hidden),
    }


def grouped(layer, codes, dtype, zero=8):
    by_group = codes.view(layer.width, -1, GROUP).to(dtype) - zero
    return (by_group * layer.scale[:, :, None].to(dtype)).view(layer.width, layer.hidden)


def nibbles_low_first(layer, dtype):
    low, high = layer.packed & 0xF, layer.packed >> 4
    return grouped(layer, torch.stack((low, high), dim=-1).view(layer.width, -1), dtype)


def nibbles_high_first(layer, dtype):
    low, high = torch.bitwise_and(layer.packed, 15), torch.bitwise_right_shift(layer.packed, 4)
    return grouped(layer, torch.stack((high, low), dim=-1).flatten(-2), dtype)


def nibbles_by_division(layer, dtype):
    low, high = layer.packed % 16, layer.packed // 16
    return grouped(layer, torch.stack((low, high), dim=-1).flatten(-2), dtype)


def nibbles_in_flat_groups(layer, dtype):
    low, high = layer.packed & 0xF, layer.packed >> 4
    codes = torch.stack((low, high), dim=-1).view(-1, GROUP).to(torch.int8) - 8
    return (codes.to(dtype) * layer.scale.view(-1, 1).to(dtype)).view(layer.width, -1)


def nibbles_scaled_apart(layer, dtype):
    """Converts both halves of each byte to numbers before it interleaves them."""
    scale = layer.scale[:, :1].to(dtype)
    low, high = (n.to(dtype) - 8 for n in (layer.packed & 0xF, layer.packed >> 4))
    return torch.stack((low * scale, high * scale), dim=-1).flatten(-2)


def nibbles_scaled_by_column(layer, dtype):
    """Uses a scale for each column and a group of rows (groups along the other axis)."""
    low, high = layer.packed & 0xF, layer.packed >> 4
    codes = torch.stack((low, high), dim=-1).flatten(-2).to(dtype) - 8
    return codes * layer.by_column.repeat_interleave(GROUP, dim=0).to(dtype)


TABLE = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
TABLE += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def of_table(layer, dtype, numbers, first=4):
    """Decodes codes by a table. `first` is the lowest bit of a byte's first code."""
    table = torch.tensor(numbers, device=layer.packed.device)
    pair = (layer.packed >> first, layer.packed >> (4 - first))
    codes = torch.stack([part & 0xF for part in pair], dim=-1).view(-1, GROUP)
    values = table[codes.int()] * layer.scale.view(-1, 1).float()
    return values.view(layer.width, -1).to(dtype)


def nf4(layer, dtype):
    """Decodes codes by sixteen numbers of a normal distribution. The first code is in the high
    nibble."""
    return of_table(layer, dtype, formats.TABLES["nf4"])


def fp4(layer, dtype):
    """Decodes bitsandbytes' FP4 codes, each of which is an index into a table of 16 numbers."""
    return of_table(layer, dtype, formats.TABLES["fp4"])


def nf4_of_the_next_block(layer, dtype):
    """Uses the scale of the next block for each block. The graph computes this order of the
    scales."""
    table = torch.tensor(formats.TABLES["nf4"], device=layer.packed.device)
    codes = torch.stack((layer.packed >> 4, layer.packed & 0xF), dim=-1).flatten(-2)
    blocks = table[codes.int()].unflatten(-1, (-1, GROUP))
    return (blocks * layer.scale.roll(1, -1).unsqueeze(-1)).flatten(-2).to(dtype)


def nf4_low_first(layer, dtype):
    """Reads the even element from the low nibble, which no format does."""
    return of_table(layer, dtype, formats.TABLES["nf4"], first=0)


def nf4_of_a_buffer(layer, x):
    """Uses a table that is a buffer of the model."""
    codes = torch.stack((layer.packed >> 4, layer.packed & 0xF), dim=-1).view(-1, GROUP)
    values = layer.table[codes.int()] * layer.scale.view(-1, 1).float()
    return F.linear(x, values.view(layer.width, -1).to(x.dtype), layer.bias)


def table_buffers(rows, hidden, generator):
    table = torch.tensor(formats.TABLES["nf4"])
    return {"table": table, **nibble_buffers(rows, hidden, generator)}


def nf4_rounded(layer, dtype):
    """Uses a table whose numbers are almost those of the format."""
    return of_table(layer, dtype, TABLE)


def nvfp4(layer, dtype):
    """Decodes floats of four bits, with an 8-bit scale for every 16 of them and one factor for
    all."""
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    blocks = table[codes.int()].view(layer.width, -1, GROUP) * layer.scale.float()[:, :, None]
    return (blocks * layer.factor).view(layer.width, -1).to(dtype)


def nvfp4_divided(layer, dtype):
    """Decodes as compressed-tensors does: with a table of magnitudes, the scale in bfloat16, and
    the factor as a divisor."""
    codes = torch.stack((layer.packed & 0xF, (layer.packed & 0xF0) >> 4), dim=-1).flatten(-2)
    table = torch.tensor(E2M1, device=codes.device)
    signs = torch.where((codes & 8).to(torch.bool), -1.0, 1.0)
    values = (table[(codes & 7).long()] * signs).to(torch.bfloat16)
    scale = layer.scale.to(torch.bfloat16) / layer.divisor
    blocks = values.unflatten(-1, (-1, GROUP)).to(scale.dtype) * scale.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def nvfp4_unscaled(layer, dtype):
    """Has no factor for the whole weight, and reads the scales as they are stored."""
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    blocks = table[codes.int()].view(layer.width, -1, GROUP) * layer.scale.float()[:, :, None]
    return blocks.view(layer.width, -1).to(dtype)


def nvfp4_high_first(layer, dtype):
    """Reads the even element from the high nibble, which no format does."""
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], device=layer.packed.device)
    codes = torch.stack((layer.packed >> 4, layer.packed & 0xF), dim=-1).flatten(-2)
    blocks = table[codes.int()].view(layer.width, -1, GROUP) * layer.scale.float()[:, :, None]
    return (blocks * layer.factor).view(layer.width, -1).to(dtype)


def mxfp4(layer, dtype):
    """Decodes floats of four bits, with a power of two for every 32."""
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    values = table.to(dtype)[codes.int()].view(layer.width, -1, BLOCK)
    exponents = layer.exponents.to(torch.int32) - 127
    return torch.ldexp(values, exponents[:, :, None]).view(layer.width, -1).to(dtype)


def mxfp4_power(layer, dtype):
    """Decodes as compressed-tensors does."""
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    values = table[codes.int()].to(torch.bfloat16).view(layer.width, -1, BLOCK)
    scale = 2.0 ** (layer.exponents.to(torch.int32) - 127).to(torch.bfloat16)
    return (values * scale[:, :, None]).view(layer.width, -1).to(dtype)


def mxfp4_buffers(rows, hidden, generator):
    packed = nibble_buffers(rows, hidden, generator)["packed"]
    exponents = torch.randint(117, 122, (rows, hidden // BLOCK), generator=generator)
    return {"packed": packed, "exponents": exponents.to(torch.uint8)}


def nvfp4_buffers(rows, hidden, generator):
    nibbles = nibble_buffers(rows, hidden, generator)
    scale = (64 * nibbles["scale"].float()).to(torch.float8_e4m3fn)
    factor = {"factor": torch.tensor(1 / 64), "divisor": torch.tensor([64.0])}
    return {"packed": nibbles["packed"], "scale": scale, **factor}


# --- eight nibbles in an int32 --------------------------------------------------------------------


def awq_buffers(rows, hidden, generator):
    return {
        "packed": words(generator, hidden, rows // 8),
        "zeros": words(generator, hidden // GROUP, rows // 8),
        "scale": scales(generator, hidden // GROUP, rows),
    }


def spread(packed):
    """Spreads words [R, C] to numbers [R, 8 C], which are not masked yet."""
    shifts = torch.arange(0, 32, 4, device=packed.device)
    wide = torch.bitwise_right_shift(packed[:, :, None], shifts[None, None, :]).to(torch.int8)
    return wide.view(packed.shape[0], -1)


def awq(layer, dtype):
    """Decodes columns that are in AWQ's order. An index that the graph computes puts them in
    order."""
    codes, zeros = spread(layer.packed), spread(layer.zeros)
    order = torch.arange(codes.shape[-1], dtype=torch.int32, device=codes.device)
    order = order.view(-1, 8)[:, AWQ_ORDER].view(-1)
    codes, zeros = (torch.bitwise_and(c[:, order], 15) for c in (codes, zeros))
    zeros = zeros.repeat_interleave(GROUP, dim=0)
    scale = layer.scale.repeat_interleave(GROUP, dim=0)
    return ((codes - zeros).to(dtype) * scale.to(dtype)).t()


def awq_plain(layer, dtype):
    codes, zeros = (spread(packed) & 15 for packed in (layer.packed, layer.zeros))
    codes = codes.view(-1, GROUP, layer.width).to(dtype)
    weight = (codes - zeros[:, None].to(dtype)) * layer.scale[:, None].to(dtype)
    return weight.reshape(layer.hidden, layer.width).t()


def awq_listed(layer, dtype):
    """Decodes AWQ's order by the order of the shifts."""
    shifts = torch.tensor(AWQ_ORDER, device=layer.packed.device) * 4
    codes, zeros = (
        ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)
        for packed in (layer.packed, layer.zeros)
    )
    codes = codes.view(-1, GROUP, layer.width) - zeros[:, None]
    return (codes.to(dtype) * layer.scale[:, None].to(dtype)).flatten(0, 1).t()


def awq_other_zeros(layer, dtype):
    """Unpacks zeros in another order than codes. The op must use the order of the graph."""
    shifts = torch.tensor(AWQ_ORDER, device=layer.packed.device) * 4
    codes = ((layer.packed.unsqueeze(-1) >> shifts) & 15).flatten(-2).view(-1, GROUP, layer.width)
    zeros = spread(layer.zeros) & 15
    return ((codes - zeros[:, None]).to(dtype) * layer.scale[:, None].to(dtype)).flatten(0, 1).t()


def gptq_buffers(rows, hidden, generator):
    return {
        "packed": words(generator, hidden // 8, rows),
        "zeros": words(generator, hidden // GROUP, rows // 8),
        "scale": scales(generator, hidden // GROUP, rows),
        "g_idx": torch.arange(hidden, dtype=torch.int32) // GROUP,
    }


def gptq_codes(layer):
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=layer.packed.device)
    codes = (layer.packed[:, None, :] >> shifts[None, :, None]) & 15
    zeros = ((layer.zeros[:, :, None] >> shifts[None, None, :]) & 15) + 1
    return codes.view(layer.hidden, layer.width), zeros.view(-1, layer.width)


def gptq(layer, dtype):
    """Has groups of adjacent columns. Zeros are stored minus one."""
    codes, zeros = gptq_codes(layer)
    codes = codes.view(-1, GROUP, layer.width) - zeros[:, None]
    return (layer.scale[:, None].to(dtype) * codes.to(dtype)).view(layer.hidden, layer.width).t()


def gptq_indexed(layer, dtype):
    """Looks up the group of every row by indices that the graph computes."""
    codes, zeros = gptq_codes(layer)
    group = torch.arange(layer.hidden, device=codes.device) // GROUP
    return (layer.scale[group].to(dtype) * (codes - zeros[group]).to(dtype)).t()


def gptq_act_order(layer, dtype):
    """Looks up groups by indices in a buffer, which may have any values."""
    codes, zeros = gptq_codes(layer)
    return (layer.scale[layer.g_idx].to(dtype) * (codes - zeros[layer.g_idx]).to(dtype)).t()


# --- eight bits -----------------------------------------------------------------------------------


def int8_buffers(rows, hidden, generator):
    codes = torch.randint(-128, 128, (rows, hidden), generator=generator).to(torch.int8)
    zeros = torch.randint(-20, 20, (rows, 1), generator=generator).to(torch.int8)
    scale = scales(generator, rows, dtype=torch.float32) / 8
    return {"codes": codes, "scale": scale, "zeros": zeros}


def int8(layer, dtype):
    return (layer.codes.to(layer.scale.dtype) * layer.scale[:, None]).to(dtype)


def int8_with_zeros(layer, dtype):
    return (layer.codes.to(dtype) - layer.zeros.to(dtype)) * layer.scale[:, None].to(dtype)


def int8_after(layer, x):
    """Scales the sums, not the weight."""
    out = F.linear(x, layer.codes.to(x.dtype)) * layer.scale.to(x.dtype)
    return out if layer.bias is None else out + layer.bias


def int8_after_in_float32(layer, x):
    """Scales the sums by a float32 scale, as torchao does."""
    out = (F.linear(x, layer.codes.to(x.dtype)) * layer.scale).to(x.dtype)
    return out if layer.bias is None else out + layer.bias


def byte_buffers(rows, hidden, generator):
    """Makes buffers with unsigned codes, and with the same codes as words of four."""
    codes = torch.randint(0, 256, (rows, hidden), generator=generator).to(torch.uint8)
    zeros = 128 + 20 * torch.randn(rows, hidden // GROUP, generator=generator).bfloat16()
    words, scale = codes.view(torch.int32), scales(generator, rows, hidden // GROUP) / 8
    return {"codes": codes, "packed": words.clone(), "scale": scale, "zeros": zeros}


def int8_unsigned(layer, dtype):
    """Subtracts 128 from unsigned codes."""
    return grouped(layer, layer.codes, dtype, zero=128)


def int8_in_words(layer, dtype):
    """Decodes four codes in a word, which is seen as bytes (compressed-tensors)."""
    return grouped(layer, layer.packed.view(torch.uint8), dtype, zero=128)


def int8_unsigned_with_zeros(layer, dtype):
    """Decodes with a float zero for each group (HQQ)."""
    return grouped(layer, layer.codes, dtype, zero=layer.zeros[:, :, None].to(dtype))


def nibbles_of_words(layer, dtype):
    """Decodes eight codes in a word, which is seen as bytes of two codes (compressed-tensors)."""
    words = layer.packed.view(torch.uint8)
    codes = torch.stack((words & 0xF, words >> 4), dim=-1).flatten(-2)
    return grouped(layer, codes.view(torch.int8) - 8, dtype, zero=0)


def word_buffers(rows, hidden, generator):
    buffers = nibble_buffers(rows, hidden, generator)
    return {**buffers, "packed": buffers["packed"].view(torch.int32)}


def fp8_codes(rows, hidden, generator):
    return torch.randn(rows, hidden, generator=generator).to(torch.float8_e4m3fn)


def fp8_tensor_buffers(rows, hidden, generator):
    scale = scales(generator, dtype=torch.float32)
    return {"codes": fp8_codes(rows, hidden, generator), "scale": scale}


def fp8_channel_buffers(rows, hidden, generator):
    scale = scales(generator, rows, 1, dtype=torch.float32)
    return {"codes": fp8_codes(rows, hidden, generator), "scale": scale}


def fp8_block_buffers(rows, hidden, generator):
    scale = scales(generator, -(-rows // BLOCK), -(-hidden // BLOCK), dtype=torch.float32)
    return {"codes": fp8_codes(rows, hidden, generator), "scale": scale}


def fp8_tensor(layer, dtype):
    return (layer.codes.to(layer.scale.dtype) * layer.scale).to(dtype)


def fp8_channel(layer, dtype):
    return (layer.codes.to(layer.scale.dtype) * layer.scale).to(dtype)


def fp8_blocks_repeated(layer, dtype):
    """Repeats scales by blocks. The last block of rows or columns may be incomplete."""
    scale = layer.scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    scale = scale[: layer.width, : layer.hidden]
    return (layer.codes.to(layer.scale.dtype) * scale).to(dtype)


def fp8_blocks_viewed(layer, dtype):
    tiles = layer.codes.to(dtype).view(layer.width // BLOCK, BLOCK, layer.hidden // BLOCK, BLOCK)
    return (tiles * layer.scale[:, None, :, None].to(dtype)).view(layer.width, layer.hidden)


def fp8_blocks_expanded(layer, dtype):
    rows, columns = layer.scale.shape
    scale = layer.scale[:, None, :, None].expand(rows, BLOCK, columns, BLOCK)
    return layer.codes.to(dtype) * scale.reshape(layer.width, layer.hidden).to(dtype)


def quantized_product(codes, weight, scale_a, scale_b, bias, dtype):
    """Computes `_scaled_mm`, or the same product if the codes have been converted to a wider
    dtype."""
    if codes.dtype == weight.dtype == torch.float8_e4m3fn:
        return torch._scaled_mm(
            codes, weight.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype
        )
    out = (codes.to(dtype) * scale_a) @ (weight.to(dtype) * scale_b.reshape(-1, 1)).t()
    return out if bias is None else out + bias


def scaled_mm_tensor(layer, x):
    """Quantises the activation with one scale for all."""
    rows = x.reshape(-1, layer.hidden)
    scale = rows.abs().amax().to(layer.scale.dtype) / 448
    codes = (rows.to(layer.scale.dtype) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = quantized_product(codes, layer.codes, scale, layer.scale, layer.bias, x.dtype)
    return out.view(*x.shape[:-1], layer.width)


def scaled_mm_token(layer, x):
    """Has one scale for every token, and one for every output feature."""
    rows = x.reshape(-1, layer.hidden).to(layer.scale.dtype)
    scale = rows.abs().amax(dim=-1, keepdim=True) / 448
    codes = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = quantized_product(codes, layer.codes, scale, layer.scale.t(), layer.bias, x.dtype)
    return out.view(*x.shape[:-1], layer.width)


@torch.library.custom_op("quantized_tests::linear", mutates_args=())
def linear_operator(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Stands for a library's operator. The graph does not show what it computes."""
    return F.linear(x, (codes.to(scale.dtype) * scale[:, None]).to(x.dtype))


@linear_operator.register_fake
def _(x, codes, scale):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@torch.library.custom_op("quantized_tests::linear_out", mutates_args=("out",))
def linear_out_operator(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    out.copy_(F.linear(x, (codes.to(scale.dtype) * scale[:, None]).to(x.dtype)))


def by_operator(layer, x):
    return linear_operator(x, layer.codes, layer.scale)


def by_operator_in_place(layer, x):
    out = x.new_empty(*x.shape[:-1], layer.width)
    linear_out_operator(x, layer.codes, layer.scale, out)
    return out


def scaled_mm_v2_token(layer, x):
    """Calls `F.scaled_mm`, with scales by row on both sides."""
    rows = x.reshape(-1, layer.hidden).to(layer.scale.dtype)
    scale = rows.abs().amax(dim=-1, keepdim=True) / 448
    codes = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    if layer.codes.dtype != torch.float8_e4m3fn:
        out = quantized_product(codes, layer.codes, scale, layer.scale.t(), None, x.dtype)
    else:
        by_row = F.ScalingType.RowWise
        out = F.scaled_mm(
            codes, layer.codes.t(), scale, by_row, layer.scale.t(), by_row, output_dtype=x.dtype
        )
    return out.view(*x.shape[:-1], layer.width)


def buffer_einsum(layer, x):
    return torch.einsum("...k,nk->...n", x, layer.dense)


def dense_buffers(rows, hidden, generator):
    return {"dense": (torch.randn(rows, hidden, generator=generator) / 8).bfloat16()}


#: Maps each layer that has tests of its own to its buffers.
OTHER_LAYERS = {
    by_operator: int8_buffers,
    by_operator_in_place: int8_buffers,
    scaled_mm_v2_token: fp8_channel_buffers,
    buffer_einsum: dense_buffers,
    nf4_of_a_buffer: table_buffers,
}

#: Maps each form to its buffers. Random programs draw from these forms.
STORED = MappingProxyType(
    {
        nibbles_low_first: nibble_buffers,
        nibbles_high_first: nibble_buffers,
        nibbles_by_division: nibble_buffers,
        nibbles_in_flat_groups: nibble_buffers,
        nibbles_scaled_apart: nibble_buffers,
        nibbles_scaled_by_column: nibble_buffers,
        nf4: nibble_buffers,
        fp4: nibble_buffers,
        nf4_of_the_next_block: nibble_buffers,
        nf4_low_first: nibble_buffers,
        nf4_rounded: nibble_buffers,
        nvfp4: nvfp4_buffers,
        nvfp4_divided: nvfp4_buffers,
        nvfp4_unscaled: nvfp4_buffers,
        nvfp4_high_first: nvfp4_buffers,
        mxfp4: mxfp4_buffers,
        mxfp4_power: mxfp4_buffers,
        awq: awq_buffers,
        awq_plain: awq_buffers,
        awq_listed: awq_buffers,
        awq_other_zeros: awq_buffers,
        gptq: gptq_buffers,
        gptq_indexed: gptq_buffers,
        gptq_act_order: gptq_buffers,
        int8: int8_buffers,
        int8_with_zeros: int8_buffers,
        int8_after: int8_buffers,
        int8_after_in_float32: int8_buffers,
        int8_unsigned: byte_buffers,
        int8_in_words: byte_buffers,
        int8_unsigned_with_zeros: byte_buffers,
        nibbles_of_words: word_buffers,
        fp8_tensor: fp8_tensor_buffers,
        fp8_channel: fp8_channel_buffers,
        fp8_blocks_repeated: fp8_block_buffers,
        fp8_blocks_viewed: fp8_block_buffers,
        fp8_blocks_expanded: fp8_block_buffers,
        scaled_mm_tensor: fp8_tensor_buffers,
        scaled_mm_token: fp8_channel_buffers,
    }
)

#: forms that are a whole layer `(layer, x) -> x @ weight^T + bias`, not a weight
_WHOLE = (int8_after, int8_after_in_float32, scaled_mm_tensor, scaled_mm_token)
WHOLE = {form: form for form in _WHOLE}
