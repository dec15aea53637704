"""An independent implementation of the attention ops, in float64, token by token and element by
element.

It uses no code of tilewright. `outcome` returns the result that a call must have, and the elements
of the caches that it may write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tilewright.ops.contract import Tolerance


@dataclass
class Outcome:
    """The result of a call: q in float64 (None for a store), the caches in float64 by name, and
    masks of the written elements."""

    q: torch.Tensor | None
    caches: dict[str, torch.Tensor]
    touched: dict[str, torch.Tensor]
    twice: bool = False


def outcome(a, rounds_x=False):
    """Computes the result of `fused_qkv_paged` or `paged_kv_store` for these arguments.

    `rounds_x` says whether a normalised x is rounded to its dtype before the product, as in
    kernels.
    """
    if hasattr(a, "x"):
        x = activations(a)
        if rounds_x and (a.input_rms_norm or a.input_layer_norm):
            x = x.to(a.x.dtype).double()
        q, k = (projected(a, x, letter) for letter in "qk")
        v = None if a.v_weight is None else projected(a, x, "v")
        if v is not None and a.v_norm:
            v = normalised(a, v)
        turned, k = normed_and_rotated(a, q, "q"), normed_and_rotated(a, k, "k")
        gates = [a.gate_run > 0 and head // a.gate_run % 2 == 1 for head in range(q.shape[1])]
        q = torch.stack([(q if g else turned)[:, h] for h, g in enumerate(gates)], dim=1)
        repeat = a.kv_repeat
    else:
        q, k, v, repeat = None, rotated(a, a.k.double()), a.v, 1
    names = ["k_cache"] if a.v_cache is None else ["k_cache", "v_cache"]
    result = Outcome(
        q,
        {name: strided_copy(getattr(a, name)) for name in names},
        {name: strided_copy(getattr(a, name)).zero_().bool() for name in names},
    )
    places = list(token_places(a, k.shape[0]))
    written = [place for place in places if place is not None]
    result.twice = len(set(written)) != len(written)
    store(a, result, "k_cache", a.k_window, k, a.k_cache_scale, repeat, places)
    if v is not None:
        name = "k_cache" if a.v_cache is None else "v_cache"
        store(a, result, name, a.v_window, v.double(), a.v_cache_scale, repeat, places)
    return result


def strided_copy(tensor):
    """Returns a float64 copy with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float64)
    return copy.copy_(tensor.double().cpu())


def activations(a):
    x = a.x.double()
    if a.input_rms_norm or a.input_layer_norm:
        norm = F.layer_norm if a.input_layer_norm else F.rms_norm
        x = norm(x, x.shape[-1:], eps=a.input_norm_eps)
        if a.input_norm_weight is not None:
            x = x * (a.input_norm_offset + a.input_norm_weight.double())
        if a.input_norm_bias is not None:
            x = x + a.input_norm_bias.double()
    if a.x_scale is None:
        return x
    tokens, columns = torch.meshgrid(*map(torch.arange, x.shape), indexing="ij")
    rows, blocks = a.x_scale.shape
    scale = a.x_scale.double()
    return x * scale[tokens if rows != 1 else 0, columns // 128 if blocks > 1 else 0]


def projected(a, x, letter):
    weight, bias = getattr(a, f"{letter}_weight"), getattr(a, f"{letter}_bias")
    if weight.dim() == 4:
        weight = weight.reshape(-1, *weight.shape[2:])
        bias = None if bias is None else bias.reshape(-1, bias.shape[-1])
    weight = decoded(a, weight, letter)
    out = torch.stack([F.linear(x, rows) for rows in weight], dim=1)
    if bias is not None:
        out = out + bias.double()
    if a.delta is not None:
        first = {"q": 0, "k": heads(a, "q"), "v": heads(a, "q") + heads(a, "k")}[letter]
        by_head = a.delta.double().unflatten(1, (-1, out.shape[2]))
        out = out + by_head[:, first : first + out.shape[1]]
    if a.clip:
        limit = torch.tensor(a.clip, dtype=torch.float64)
        out = torch.minimum(torch.maximum(out, -limit), limit)
    return out


def heads(a, letter):
    return getattr(a, f"{letter}_weight").shape[:-2].numel()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])
# The numbers that the QLoRA paper gives.
NF4 = torch.tensor(
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    dtype=torch.float64,
)  # fmt: skip
# The numbers are in fp32, as in bitsandbytes: multiples of 1 / 192.
FP4 = (torch.tensor([0.0, 1, 128, 192, 64, 96, 32, 48]) / 192).double()
FP4 = torch.cat([FP4, -FP4])
#: Maps a format to the numbers that its codes stand for.
NUMBERS = {"nvfp4": E2M1, "mxfp4": E2M1, "nf4": NF4, "fp4": FP4}


def decoded(a, weight, letter):
    """Decodes a weight to [H, D, K] in float64, with codes gathered element by element."""
    if a.weight_format == "dense":
        return weight.double()
    heads, dim, hidden = weight.shape
    per = {torch.uint8: 2, torch.int32: 8}.get(weight.dtype, 1)
    packs_columns = a.weight_format in ("int4_k", "int4_k_offset", *NUMBERS)
    if packs_columns:
        hidden *= per
    if a.weight_format == "int4_n":
        dim *= per
    h, d, k = torch.meshgrid(*map(torch.arange, (heads, dim, hidden)), indexing="ij")
    if packs_columns:
        codes = nibble(weight[h, d, k // per], k % per, a.nibble_order)
    elif a.weight_format == "int4_n":
        codes = nibble(weight[h, d // per, k], d % per, a.nibble_order)
    else:
        codes = weight.double()
    if a.weight_format in NUMBERS:
        codes = NUMBERS[a.weight_format][codes.long()]
    bn, bk = a.scale_block
    row, group = (h * dim + d) // bn, k // bk
    zero = torch.full_like(codes, a.zero_point)
    given = getattr(a, f"{letter}_zero")
    scale = getattr(a, f"{letter}_scale")
    if a.weight_format == "mxfp4":
        scale = 2.0 ** (scale.double() - 127)
    factor = 1.0 if a.factors is None else a.factors["qkv".index(letter)].double()
    if a.weight_format == "int4_k_offset" and given is not None:
        shift = given.double()[row, group]
        return ((codes - zero) * scale.double()[row, group] + shift) * factor
    if given is not None and given.shape[0] == scale.shape[0]:
        zero = zero + given.double()[row, group]
    elif given is not None:
        zero = zero + nibble(given[row // 8, group], row % 8, a.nibble_order)
    return (codes - zero) * scale.double()[row, group] * factor


def nibble(words, j, order):
    """Returns nibble j of each word in float64."""
    table = torch.tensor(list(order) or list(range(8)))
    unsigned = words.long() % 2**32
    return (unsigned // 16 ** table[j] % 16).double()


def normed_and_rotated(a, x, letter):
    if a.norm_after_rope:
        return normed(a, rotated(a, x), letter)
    return rotated(a, normed(a, x, letter))


def normed(a, x, letter):
    weight = getattr(a, f"{letter}_norm_weight")
    if weight is None and not a.weightless_norm:
        return x
    out = normalised(a, x)
    if weight is not None:
        out = out * (a.norm_offset + weight.double())
    bias = getattr(a, f"{letter}_norm_bias")
    return out if bias is None else out + bias.double()


def normalised(a, x):
    wide = x.flatten(1) if a.norm_width == "row" else x
    if a.norm_kind == "rms":
        out = F.rms_norm(wide, wide.shape[-1:], None, a.norm_eps)
    else:
        out = F.layer_norm(wide, wide.shape[-1:], None, None, a.norm_eps)
    return out.view(x.shape)


def rotated(a, x):
    """Rotates as Hugging Face does, by x * cos + rotate_half(x) * sin, or by its interleaved
    forms."""
    if a.rope_style == "none" or x.shape[0] == 0:
        return x
    rows = torch.arange(x.shape[0]) % a.cos.shape[0]
    cos, sin = a.cos.double()[rows, None], a.sin.double()[rows, None]
    turned, rest = x[..., : a.rotary_dim], x[..., a.rotary_dim :]
    if a.rope_style == "interleaved":
        if cos.shape[-1] != a.rotary_dim:
            cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        swapped = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((turned * cos + swapped * sin, rest), dim=-1)
    if cos.shape[-1] != a.rotary_dim:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if a.rope_style == "interleaved_to_half":
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def token_places(a, num_tokens):
    """Returns (page, offset) of each token, or None for a token without a place."""
    pages, size = a.k_window[0], a.k_window[1]
    for token in range(num_tokens):
        if a.slots == "per_sequence":
            page, index = divmod(token, len(a.slot_mapping))
            offset = int(a.slot_mapping[index])
            offset += size if offset < 0 and a.indexing == "torch" else 0
            yield (page, offset) if offset >= 0 else None
            continue
        slot = int(a.slot_mapping[token]) if a.slots == "flat" else table_slot(a, token, size)
        slot += pages * size if slot < 0 and a.indexing == "torch" else 0
        yield divmod(slot, size) if slot >= 0 else None


def table_slot(a, token, size):
    """Returns the flat slot that the block table names, or -1 for none."""
    if a.slots == "block_table":
        sequence, position = int(a.sequence_ids[token]), int(a.positions[token])
        if a.indexing == "paged" and (sequence < 0 or position < 0):
            return -1
    else:
        offsets = [int(offset) for offset in a.row_offsets]
        sequence = next(b for b in range(len(offsets) - 1) if offsets[b] <= token < offsets[b + 1])
        position = int(a.cache_lengths[sequence]) + token - offsets[sequence]
    return int(a.lookup_table[sequence, position // size]) * size + position % size


def store(a, result, name, window, values, scale, repeat, places):
    """Writes one token after the other. Each head is written `repeat` times."""
    shape, strides, offset = window[:4], window[4:8], window[8]
    cache, touched = (
        torch.as_strided(base[name], shape, strides, offset)
        for base in (result.caches, result.touched)
    )
    for token, place in enumerate(places):
        if place is None:
            continue
        for head in range(shape[2]):
            value = values[token, head // repeat]
            if scale is not None:
                factor = scale.double().flatten()
                factor = factor[head // repeat if len(factor) > 1 else 0]
                value = value * factor if a.cache_scale_multiplies else value / factor
            cache[place][head], touched[place][head] = value, True


#: A library GEMM rounds its result before the epilogue, as the replaced graph does.
LIBRARY = {
    torch.bfloat16: Tolerance(relative=2.0**-7, of_rms=2.0**-6),
    torch.float16: Tolerance(relative=2.0**-10, of_rms=2.0**-9),
    torch.float32: Tolerance(relative=2.0**-16, of_rms=2.0**-16),
    torch.float8_e4m3fn: Tolerance(relative=2.0**-3, of_rms=2.0**-6, absolute=2.0**-9),
    torch.float8_e5m2: Tolerance(relative=2.0**-2, of_rms=2.0**-6, absolute=2.0**-16),
}


def rounds_operands(a):
    """Whether kernels round an operand of the product to 16 bits.

    This operand is x times its norm's weight, or a weight whose codes stand for numbers of a table.
    The replaced graphs round the normalised x and the weight, too. Also true for fp8 codes on a
    GPU, because tensor cores align their products to some 14 bits before they add them.
    """
    x = getattr(a, "x", None)
    if x is not None and x.is_cuda and x.dtype == torch.float8_e4m3fn:
        return True
    normed = any(getattr(a, f"input_{kind}_norm", False) for kind in ("rms", "layer"))
    return normed or getattr(a, "weight_format", "") in ("nf4", "fp4")


GUARD = 256


def guarded(a, op):
    """Returns the arguments with each cache inside a larger buffer of random bits. Also returns a
    function that checks that only the elements in `touched` have changed, in the cache and in the
    buffer around it."""
    checks, caches = [], {}
    for name in op.mutated:
        cache = getattr(a, name)
        if cache is None:
            continue
        span = 1 + sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True))
        size = cache.element_size()
        noise = torch.randint(0, 256, ((span + 2 * GUARD) * size,), dtype=torch.uint8)
        buffer = noise.to(cache.device).view(cache.dtype)
        caches[name] = buffer.as_strided(cache.shape, cache.stride(), GUARD)
        checks.append((name, buffer, buffer.clone()))

    def problems(touched):
        for name, buffer, before in checks:
            mask = torch.zeros(buffer.shape, dtype=torch.bool)
            there = touched[name]
            mask.as_strided(there.shape, there.stride(), GUARD).copy_(there)
            changed = bits(buffer) != bits(before)
            if bool((changed.cpu() & ~mask).any()):
                yield f"{name}: an element that no token names has changed"

    return replace(a, **caches), problems


def bits(tensor):
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def mismatches(op, a, q, expected, tolerances=None):
    """Returns sentences that describe differences between the result of a call and `expected`. `a`
    has the caches that the call wrote."""
    tolerances = tolerances or op.tolerances
    if expected.q is not None:
        problem = tolerances[q.dtype].problem(q, expected.q)
        if problem:
            yield f"q: {problem}"
    for name, exact in expected.caches.items():
        cache, touched = getattr(a, name), expected.touched[name]
        problem = tolerances[cache.dtype].problem(cache.cpu()[touched], exact[touched])
        if problem:
            yield f"{name}: {problem}"


def on_cpu(a):
    """Returns the arguments on the CPU, with unchanged strides."""
    moved = {}
    for name, tensor in vars(a).items():
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            moved[name] = copy.copy_(tensor)
    return replace(a, **moved)
