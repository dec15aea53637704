"""Parts of layers whose weights are codes: how codes lie in words, zeros, scales, spellings,
activations, parts and near misses, each drawn on its own.

    weight[n, k] = (code[n, k] - zero[n, k]) * scale[n, k]

What is nearly a known format, another order of nibbles or the scale of the next group, is one more
entry of a table here: eager says what a program means, whatever it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import finegrained, mla_idioms, moe_coded, moe_dequant, ropes
from tests.models.cache_writes import old_tokens

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 64, 4, 2, 16, 12
KV_WIDTH = KV_HEADS * HEAD_DIM
Tensors = dict[str, torch.Tensor]

# --- codes ----------------------------------------------------------------------------------------

COUNTING, AWQ = tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)


def nibbles(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """[R, W] words -> [R, W * len(order)] codes, the word's nibbles in an order."""
    if spelling == "shifts":
        shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
        found = (words.unsqueeze(-1) >> shifts) & 15
    elif spelling == "divided":
        found = torch.stack([words // 16**n % 16 for n in order], -1)
    elif spelling == "of_a_list":
        shifts = torch.arange(0, 4 * len(order), 4, device=words.device)
        found = torch.bitwise_right_shift(words[:, :, None], shifts).to(torch.int8)
        found = torch.bitwise_and(found[..., list(order)], 0xF)
    else:
        parts = [torch.bitwise_and(words >> 4 * n, 15) for n in order]
        if spelling == "cat":
            return torch.cat([part.unsqueeze(2) for part in parts], 2).view(words.shape[0], -1)
        found = torch.stack(parts, dim=-1)
    return found.flatten(-2)


def with_sign(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Bytes of two's-complement nibbles."""
    if spelling == "divided":
        return (nibbles(words, order, spelling).to(torch.int8) ^ 8) - 8
    parts = [(words << 4) >> 4, words >> 4]
    return torch.stack([parts[n] for n in order], -1).flatten(-2)


def in_halves(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Row n in one nibble, row n + N / 2 in the other (HQQ)."""
    parts = [words & 15, words >> 4]
    return torch.cat([parts[n] for n in order], 0)


@dataclass(frozen=True)
class Packing:
    """stored: the dtype of the words, of which [N, K] codes are [N / rows, K / columns] for
    per = (rows, columns), transposed where `turned`. codes: the codes of words, by an order and a
    spelling. order: how many nibbles have one. size: about how large a code is."""

    stored: torch.dtype
    codes: Callable[[torch.Tensor, tuple[int, ...], str], torch.Tensor]
    per: tuple[int, int] = (1, 1)
    turned: bool = False
    order: int = 0
    size: float = 70.0

    @property
    def is_float(self) -> bool:
        return self.size == FLOATS["size"]


def turned(codes: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda words, order, spelling: codes(words, order, spelling).t()


def along_rows(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """GPTQ's: words [K / 8, N]."""
    return nibbles(words.t(), order, spelling)


def as_bytes(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    return nibbles(words.view(torch.uint8), order, spelling)


def as_they_are(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    return words


I32, U8, I8, E4M3 = torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn
FLOATS, TWO, EIGHT = {"size": 1.0}, {"order": 2, "size": 5.0}, {"order": 8, "size": 5.0}
PACKINGS = {
    "int4 bytes": Packing(U8, nibbles, (1, 2), **TWO),
    "int4 signed": Packing(I8, with_sign, (1, 2), **TWO),
    "int4 halves": Packing(U8, in_halves, (2, 1), **TWO),
    "int4 words": Packing(I32, nibbles, (1, 8), **EIGHT),
    "int4 gptq": Packing(I32, along_rows, (1, 8), turned=True, **EIGHT),
    "int4 awq": Packing(I32, turned(nibbles), (8, 1), turned=True, **EIGHT),
    "int4 of words": Packing(I32, as_bytes, (1, 8), **TWO),
    "int8": Packing(I8, as_they_are),
    "int8 turned": Packing(I8, turned(as_they_are), turned=True),
    "uint8": Packing(U8, as_they_are),
    "uint8 of words": Packing(I32, lambda words, *_: words.view(U8), (1, 4)),
    "int8 of words": Packing(I32, lambda words, *_: words.view(I8), (1, 4)),
    "e4m3": Packing(E4M3, as_they_are, **FLOATS),
    "e4m3 turned": Packing(E4M3, turned(as_they_are), turned=True, **FLOATS),
}
#: What comes half as often.
ODD = {
    "signed as unsigned": Packing(I8, lambda words, *_: words.view(U8)),
    "unsigned as signed": Packing(U8, lambda words, *_: words.view(I8)),
    "e5m2": Packing(torch.float8_e5m2, as_they_are, **FLOATS),
    "e4m3 of bytes": Packing(U8, lambda words, *_: words.view(E4M3), **FLOATS),
}
_PACKINGS = (*PACKINGS, *PACKINGS, *ODD)
PACKINGS |= ODD
ORDERS = {2: ((0, 1), (0, 1), (1, 0)), 8: (COUNTING, COUNTING, AWQ, AWQ, COUNTING[::-1])}
SPELLINGS = ("stack", "stack", "shifts", "divided", "of_a_list", "cat")

# --- a number for every code ----------------------------------------------------------------------

#: (rows, columns) that share a number; None: all of them.
BLOCKS = {
    "tensor": (None, None),
    "row": (1, None),
    "group": (1, 16),
    "wide group": (1, 32),
    "uneven group": (1, 24),
    "block": (32, 32),
    "uneven block": (24, 32),
    "column": (None, 1),
    "group of rows": (16, 1),
}
WEIGHED = ("tensor", "row", "row", "group", "group", "group", "wide group", "block", *BLOCKS)


def repeated(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    for dim in range(2):
        t = t.repeat_interleave(block[dim], dim) if block[dim] > 1 else t
    return t[: shape[0], : shape[1]]


def expanded(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    (rows, columns), (a, b) = t.shape, block
    wide = t[:, None, :, None].expand(rows, a, columns, b).reshape(rows * a, columns * b)
    return wide[: shape[0], : shape[1]]


def looked_up(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    for dim in range(2):
        if block[dim] > 1:
            t = t.index_select(dim, torch.arange(shape[dim], device=t.device) // block[dim])
    return t


def in_tiles(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Not neighbours share a number."""
    return t.repeat(*block)[: shape[0], : shape[1]]


SPREADS = {"repeated": repeated, "expanded": expanded, "looked_up": looked_up, "tiles": in_tiles}
#: By which a number gets to its codes; broadcast: by arithmetic itself, grouped: of a view of them.
_SPREADS = ("repeated", "expanded", "looked_up", "grouped", "broadcast") * 4 + ("tiles",)
#: How a scale or zero is taken wrongly: of a neighbour, or changed.
BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "next group": lambda t: t.roll(1, -1),
    "next row": lambda t: t.roll(1, 0),
    "backwards": lambda t: t.flip(-1),
    "negated": lambda t: -t,
    "doubled": lambda t: t * 2,
}


def at_every(
    op: Callable[..., torch.Tensor], codes: torch.Tensor, t: torch.Tensor, axes: Weight
) -> torch.Tensor:
    """op(codes [N, K], t [N / rows, K / columns]), with t's number of its block at every code."""
    sizes = zip(codes.shape, t.shape, BLOCKS[axes.block], strict=True)
    block = tuple(-(-n // have) if b is None else b for n, have, b in sizes)
    even = all(b * have == n for b, n, have in zip(block, codes.shape, t.shape, strict=True))
    if axes.spread == "broadcast" and all(1 in pair for pair in zip(block, t.shape, strict=True)):
        return op(codes, t)
    if axes.spread in ("grouped", "broadcast") and even:
        (rows, columns), (a, b) = t.shape, block
        tiles = codes.reshape(rows, a, columns, b)
        return op(tiles, t[:, None, :, None]).reshape(codes.shape)
    return op(codes, SPREADS.get(axes.spread, repeated)(t, block, codes.shape))


# --- a linear -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """What a linear of codes is. order, spelling: of nibbles. zero: none, a number, or a key of
    ZEROS. block: a key of BLOCKS. spread: how a number gets to its codes. within: the dtype in
    which they are scaled, None for x's. scaled: how, a key of SCALINGS. place: of the scale. bent:
    of the scale, a key of BENT or empty. rounded: of x."""

    packing: str = "int8"
    order: tuple[int, ...] = ()
    spelling: str = "stack"
    zero: Any = None
    block: str = "row"
    spread: str = "repeated"
    scale: torch.dtype = torch.float32
    within: torch.dtype | None = None
    scaled: str = "codes * scale"
    place: str = "inside"
    bent: str = ""
    zero_bent: str = ""
    product: str = "linear"
    bias: bool = False
    rounded: Rounded | None = None


SCALINGS: dict[str, Callable[..., torch.Tensor]] = {
    "codes * scale": lambda codes, scale: codes * scale,
    "scale * codes": lambda codes, scale: scale * codes,
    "in place": lambda codes, scale: codes.clone().mul_(scale),
    "over": lambda codes, scale: codes / scale,
    "twice": lambda codes, scale: codes * scale * scale,
    "not": lambda codes, scale: codes * 1.0,
    "negated": lambda codes, scale: -codes * scale,
}
_SCALINGS = ("codes * scale",) * 20 + ("scale * codes",) * 10 + tuple(SCALINGS)
#: Zeros by block: as whole numbers, floats, or nibbles of words.
ZEROS = ("int", "float", "words", "words of awq", "words less one", "behind")
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w, bias: plus(x @ w.t(), bias),
    "turned": lambda x, w, bias: plus(torch.matmul(x, w.mT.contiguous()), bias),
    "einsum": lambda x, w, bias: plus(torch.einsum("...k,nk->...n", x, w), bias),
    "rows": lambda x, w, bias: F.linear(x.reshape(-1, x.shape[-1]), w, bias).view(
        *x.shape[:-1], -1
    ),
    "addmm": lambda x, w, bias: (
        F.linear(x, w)
        if bias is None
        else torch.addmm(bias, x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1)
    ),
}


def plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


def random_words(shape: tuple[int, ...], dtype: torch.dtype, generator: Any) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, generator=generator).to(dtype)


class Linear(nn.Module):
    """x [..., K] -> [..., N]."""

    def __init__(self, axes: Weight, rows: int, columns: int, dtype: torch.dtype, seed: int):
        super().__init__()
        self.axes, self.shape = axes, (rows, columns)
        generator = torch.Generator().manual_seed(seed)
        packing = PACKINGS[axes.packing]
        shape = rows // packing.per[0], columns // packing.per[1]
        shape = shape[::-1] if packing.turned else shape
        self.codes = self.held(random_words(shape, packing.stored, generator))
        block = BLOCKS[axes.block]
        grid = tuple(1 if b is None else -(-n // b) for n, b in zip(self.shape, block, strict=True))
        size = columns**-0.5 / packing.size
        scale = size * (0.5 + torch.rand(grid, generator=generator))
        self.scale = self.held((1 / scale if axes.scaled == "over" else scale).to(axes.scale))
        self.zero = self.held(self.zeros(grid, size, generator))
        bias = torch.randn(rows, generator=generator).to(dtype) if axes.bias else None
        self.bias = self.held(bias)
        self.step = self.held(torch.tensor(0.02)) if axes.rounded is not None else None

    def held(self, tensor: torch.Tensor | None) -> nn.Parameter | None:
        return None if tensor is None else nn.Parameter(tensor, requires_grad=False)

    def zeros(self, grid: tuple[int, int], size: float, generator: Any) -> torch.Tensor | None:
        zero, dtype = self.axes.zero, self.axes.scale
        if zero not in ZEROS:
            return None
        if zero == "words":
            return random_words((-(-grid[0] // 8), grid[1]), I32, generator)
        if zero.startswith("words"):
            return random_words((grid[1], -(-grid[0] // 8)), I32, generator)
        if zero == "int":
            return torch.randint(0, 16, grid, generator=generator).to(I8)
        spread = torch.randn(grid, generator=generator)
        return (spread * size if zero == "behind" else 8 + 3 * spread).to(dtype)

    def of_words(self, grid: torch.Size) -> torch.Tensor:
        """Zeros [N / rows, K / columns], unpacked."""
        zero, axes = self.axes.zero, self.axes
        if zero == "words":
            return nibbles(self.zero.t(), COUNTING, axes.spelling).t()[: grid[0]]
        own = axes.order if len(axes.order) == 8 else COUNTING
        order = AWQ if zero == "words of awq" else own
        found = nibbles(self.zero, order, axes.spelling).t()[: grid[0]]
        return found + 1 if zero == "words less one" else found

    def shifted(self, codes: torch.Tensor, within: torch.dtype) -> torch.Tensor:
        """Codes less their zero, in the dtype in which they are scaled."""
        axes, zero = self.axes, self.axes.zero
        if zero is None or zero == "behind":
            return codes.to(within)
        if isinstance(zero, tuple):
            number, early = zero
            return (codes.to(early) - number).to(within)
        if zero in ("int", "float"):
            points = self.zero.to(within)
        else:
            points = self.of_words(self.scale.shape)
        points = BENT[axes.zero_bent](points) if axes.zero_bent else points
        codes = codes if not points.dtype.is_floating_point else codes.to(within)
        return at_every(lambda c, t: c - t, codes, points, axes).to(within)

    def decoded(self, within: torch.dtype) -> torch.Tensor:
        """(code - zero) [N, K]."""
        packing = PACKINGS[self.axes.packing]
        return self.shifted(packing.codes(self.codes, self.axes.order, self.axes.spelling), within)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        axes, within = self.axes, self.axes.within or dtype
        scale = self.scale_of(within)
        weight = at_every(SCALINGS[axes.scaled], self.decoded(within), scale, axes)
        if axes.zero == "behind":
            weight = at_every(lambda w, t: w + t, weight, self.zero.to(within), axes)
        return weight.to(dtype)

    def scale_of(self, dtype: torch.dtype) -> torch.Tensor:
        return (BENT[self.axes.bent](self.scale) if self.axes.bent else self.scale).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axes, product = self.axes, PRODUCTS[self.axes.product]
        if axes.rounded is not None:
            x = axes.rounded(x, self.step)
        if axes.place == "inside":
            return product(x, self.weight(x.dtype), self.bias)
        scale = self.scale_of(axes.within or x.dtype)
        if axes.place == "front":  # right for a tensor's alone
            x = (x * scale.flatten()[:1]).to(x.dtype)
            return product(x, self.decoded(x.dtype), self.bias)
        y = product(x, self.decoded(x.dtype), None)
        if axes.place == "behind":
            scaled = SCALINGS[axes.scaled](y, scale.flatten())
            return plus(scaled.to(x.dtype), self.bias)
        return (plus(y, self.bias) * scale.flatten()).to(x.dtype)  # the bias is scaled, too


PLACES = ("inside",) * 7 + ("behind",) * 4 + ("front", "behind the bias")

# --- activations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """How x is rounded to codes and decoded. block: "row", "tensor", "static" or a number of
    columns. most: the code of the largest number. by: "over", or "times" the reciprocal."""

    block: str | int = "row"
    codes: torch.dtype = torch.float8_e4m3fn
    most: float = 448.0
    least: float = 1e-6
    by: str = "over"
    clamped: bool = True
    wide: bool = False

    def __call__(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        dtype, shape = x.dtype, x.shape
        y = x.float() if self.wide else x
        y = y.unflatten(-1, (-1, self.block)) if isinstance(self.block, int) else y
        scale = self.scale(y, step)
        z = y * (1 / scale) if self.by == "times" else y / scale
        if not self.codes.is_floating_point:
            z = z.round()
        z = z.clamp(-self.limit, self.limit) if self.clamped else z
        return (z.to(self.codes).to(y.dtype) * scale).reshape(shape).to(dtype)

    @property
    def limit(self) -> float:
        return 448.0 if self.codes.is_floating_point else 127.0

    def scale(self, y: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if self.block == "static":
            return step.to(y.dtype)
        size = y.abs()
        size = size.amax() if self.block == "tensor" else size.amax(-1, keepdim=True)
        return size.clamp(min=self.least) / self.most


def draw_rounded(draw: random.Random) -> Rounded | None:
    if draw.random() < 0.6:
        return None
    codes = draw.choice((torch.float8_e4m3fn, torch.float8_e4m3fn, torch.int8))
    whole = codes == torch.int8
    return Rounded(
        block=draw.choice(("row", "row", "tensor", "static", 32, 16)),
        codes=codes,
        most=draw.choice((127.0, 127.5) if whole else (448.0, 448.0, 240.0)),
        least=draw.choice((1e-6, 1e-4, 1e-12)),
        by=draw.choice(("over", "times")),
        clamped=whole or draw.random() < 0.7,
        wide=draw.random() < 0.5,
    )


# --- draws ----------------------------------------------------------------------------------------


def draw_weight(draw: random.Random) -> Weight:
    packing = draw.choice(_PACKINGS)
    nibbles = PACKINGS[packing].order
    number = 8 if nibbles else 128
    early = draw.choice((torch.int8, torch.int32, torch.float32, torch.bfloat16, torch.int16))
    number = draw.choice((number, number, number, number, number - 1))
    if PACKINGS[packing].is_float:
        zero = draw.choice((None,) * 12 + ("float",))
    else:
        zero = draw.choice((None, None, *[(number, early)] * 5, *ZEROS))
    block = draw.choice(WEIGHED)
    place = draw.choice(PLACES) if block in ("tensor", "row") and zero != "behind" else "inside"
    return Weight(
        packing=packing,
        order=draw.choice(ORDERS[nibbles]) if nibbles else (),
        spelling=draw.choice(SPELLINGS),
        zero=zero,
        block=block,
        spread=draw.choice(_SPREADS),
        scale=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        within=draw.choice((None, None, torch.float32, torch.bfloat16)),
        scaled=draw.choice(_SCALINGS),
        place=place,
        bent=draw.choice(("",) * 24 + tuple(BENT)),
        zero_bent=draw.choice(("",) * 24 + tuple(BENT)),
        product=draw.choice(("linear", "linear", *PRODUCTS)),
        bias=draw.random() < 0.2,
        rounded=draw_rounded(draw),
    )


#: What one of several linears may have of its own.
APART: dict[str, Callable[[random.Random], Any]] = {
    "rounded": draw_rounded,
    "spelling": lambda draw: draw.choice(SPELLINGS),
    "bent": lambda draw: draw.choice(tuple(BENT)),
    "zero_bent": lambda draw: draw.choice(tuple(BENT)),
    "block": lambda draw: draw.choice(("group", "wide group", "row")),
    "product": lambda draw: draw.choice(tuple(PRODUCTS)),
    "scaled": lambda draw: draw.choice(_SCALINGS),
    "bias": lambda draw: True,
    "place": lambda draw: "inside",
    "within": lambda draw: draw.choice((torch.float32, torch.bfloat16)),
}


def draw_linears(
    draw: random.Random, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> list[Linear]:
    """Linears of one format, of which one may differ, or have what belongs to another."""
    axes = [draw_weight(draw)] * len(shapes)
    if draw.random() < 0.3:
        name, one = draw.choice(tuple(APART)), draw.randrange(len(axes))
        axes[one] = replace(axes[one], **{name: APART[name](draw)})
    made = [
        Linear(a, *shape, dtype, draw.randrange(1 << 20))
        for a, shape in zip(axes, shapes, strict=True)
    ]
    if len(made) > 1 and draw.random() < 0.15:
        name = draw.choice(("scale", "zero", "codes"))
        one, other = draw.sample(made, 2)
        given, old = getattr(one, name), getattr(other, name)
        if given is not None and old is not None and given.shape == old.shape:
            setattr(other, name, given)
    if draw.random() < 0.8:  # a static scale of what they read
        for linear in made[1:-1]:
            linear.step = made[0].step
    return made


# --- parts of a layer -----------------------------------------------------------------------------


class Part(nn.Module):
    """Some linears, and a write into the codes or scales of one of them before another runs."""

    def __init__(self, linears: Sequence[nn.Module], drawn: dict[str, Any]) -> None:
        super().__init__()
        self.linears, self.drawn = nn.ModuleList(linears), drawn

    def ran(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The result of a linear, and, where it is drawn, a write behind it."""
        y = self.linears[number](x)
        written = self.drawn["written"]
        if written is not None and written[0] == number:
            _, other, name = written
            tensor = getattr(self.linears[other], name)
            if tensor.dtype.itemsize > 1 and tensor.dtype.is_floating_point:
                tensor.mul_(2.0)
            else:
                tensor.copy_(tensor.flip(0))
        return y


def draw_written(draw: random.Random, count: int) -> tuple[int, int, str] | None:
    if draw.random() > 0.1:
        return None
    return draw.randrange(count), draw.randrange(count), draw.choice(("codes", "scale"))


class Attention(Part):
    """Q, K and V, a write to the cache, attention to it, and a residual sum."""

    def forward(self, x, residual, positions, k_cache, v_cache):
        drawn = self.drawn
        q, k, v = self.projected(x)
        if drawn["norm"]:
            q, k = (F.rms_norm(t, (HEAD_DIM,), eps=1e-6) for t in (q, k))
        if drawn["rope"] is not None:
            steps = torch.arange(HEAD_DIM // 2) / HEAD_DIM
            angles = (positions[:, None] * 100.0**-steps)[:, None]
            cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            q, k = (drawn["rope"](t, cos, sin) for t in (q, k))
        for cache, new in ((k_cache, k), (v_cache, v)):
            if drawn["write"] == "index_copy":
                cache.index_copy_(0, positions, new)
            else:
                cache[positions] = new
        keys, values = (cache.transpose(0, 1)[None] for cache in (k_cache, v_cache))
        seen = torch.arange(SLOTS) <= positions[:, None]
        q = q.transpose(0, 1)[None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return residual + self.ran(-1, y[0].transpose(0, 1).flatten(1))

    def projected(self, x):
        joined = self.drawn["joined"]
        if joined == "one":
            parts = self.ran(0, x).split([HIDDEN, KV_WIDTH, KV_WIDTH], -1)
        elif joined == "k and v":
            parts = (self.ran(0, x), *self.ran(1, x).chunk(2, -1))
        else:
            parts = [self.ran(i, x) for i in range(3)]
        return [part.unflatten(-1, (-1, HEAD_DIM)) for part in parts]


JOINED = {"": (HIDDEN, KV_WIDTH, KV_WIDTH), "k and v": (HIDDEN, 2 * KV_WIDTH)}
JOINED["one"] = (HIDDEN + 2 * KV_WIDTH,)


def attention(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    dtype, tokens = draw.choice(DTYPES), draw.choice((1, 3, 5))
    joined = draw.choice(("", "", "", *JOINED))
    shapes = [(width, HIDDEN) for width in (*JOINED[joined], HIDDEN)]
    drawn = {
        "joined": joined,
        "norm": draw.random() < 0.4,
        "rope": draw.choice((None, ropes.half, ropes.half, ropes.interleaved)),
        "write": draw.choice(("index_copy", "setitem")),
        "written": draw_written(draw, len(shapes)),
    }
    linears = draw_linears(draw, shapes, dtype)
    x, residual = normal(draw, dtype, tokens, HIDDEN), normal(draw, dtype, tokens, HIDDEN)
    caches = [old_tokens(SLOTS, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    first = draw.randrange(SLOTS - tokens)
    args = (x, residual, torch.arange(first, first + tokens), *caches)
    return Attention(linears, drawn), args, told(linears, drawn, dtype)


class Gated(Part):
    def forward(self, x, residual):
        if self.drawn["joined"]:
            gate, up = self.ran(0, x).chunk(2, -1)
        else:
            gate, up = self.ran(0, x), self.ran(1, x)
        return residual + self.ran(-1, self.drawn["activation"](gate) * up)


def gated(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    dtype, tokens, joined = draw.choice(NARROW), draw.choice((1, 3)), draw.random() < 0.3
    inner = draw.choice((64, 96))
    shapes = [(2 * inner, HIDDEN)] if joined else [(inner, HIDDEN)] * 2
    shapes += [(HIDDEN, inner)]
    drawn = {
        "joined": joined,
        "activation": draw.choice((F.silu, F.silu, F.gelu)),
        "written": draw_written(draw, len(shapes)),
    }
    linears = draw_linears(draw, shapes, dtype)
    args = tuple(normal(draw, dtype, tokens, HIDDEN) for _ in range(2))
    return Gated(linears, drawn), args, told(linears, drawn, dtype)


def latents(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    """The up-projection of latents."""
    dtype = draw.choice(DTYPES)
    changes = {
        "kv_rank": 64, "num_heads": 4, "nope": 16, "v_dim": 16, "rotated": 16, "hidden": 32,
        "num_tokens": draw.choice((1, 4)), "dtype": dtype, "q_lora": False,
        "attention": draw.choice(("masked", "causal", "eager", "einsum", "masked_float")),
        "concat": draw.choice(tuple(mla_idioms.CONCATS)),
    }  # fmt: skip
    module, args = mla_idioms.build("plain", **changes)
    (module.kv_b,) = linears = draw_linears(draw, [(128, 64)], dtype)
    return module, args, told(linears, changes, dtype)


# --- products of codes ----------------------------------------------------------------------------


class Product(nn.Module):
    """x, rounded to e4m3, by e4m3 codes [N, K]. form: a key of FORMS."""

    def __init__(self, form: str, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        self.form, self.width = form, rows
        generator = torch.Generator().manual_seed(seed)
        grid = FORMS[form][0](rows, columns)
        values = (
            random_words((rows, columns), E4M3, generator),
            torch.rand(grid, generator=generator),
        )
        self.codes = nn.Parameter(values[0], requires_grad=False)
        # Blocks differ by more than any rounding.
        scale = (0.01 + values[1] ** 4) * columns**-0.5
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.step = nn.Parameter(torch.tensor([0.01]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form][1](self, x)


def scaled_mm(by_row: bool) -> Callable[..., torch.Tensor]:
    """`torch._scaled_mm` with a scale for each row of both sides, or for all."""

    def run(layer: Product, x: torch.Tensor) -> torch.Tensor:
        size = x.float().abs()
        size = size.amax(-1, keepdim=True) if by_row else size.amax()
        codes = (x.float() / (size / 448)).clamp(-448, 448).to(E4M3)
        scale = layer.scale.t() if by_row else layer.scale
        return torch._scaled_mm(
            codes, layer.codes.t(), scale_a=size / 448, scale_b=scale, out_dtype=x.dtype
        )

    return run


def by_block(layer: Product, x: torch.Tensor) -> torch.Tensor:
    return finegrained.block_dynamic(x, layer.codes, layer.scale, finegrained.BLOCK, x.dtype)


def by_tensor(layer: Product, x: torch.Tensor) -> torch.Tensor:
    return finegrained.tensor_dynamic(x, layer.codes, layer.scale, x.dtype)


def static(layer: Product, x: torch.Tensor) -> torch.Tensor:
    given = layer.codes, layer.scale, layer.step, finegrained.BLOCK, x.dtype
    return finegrained.block_static(x, *given)


#: Of each form the grid of scales, and what it computes.
FORMS: dict[str, tuple[Callable[..., tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "scaled_mm by rows": (lambda n, k: (n, 1), scaled_mm(True)),
    "scaled_mm": (lambda n, k: (), scaled_mm(False)),
    "blocks": (lambda n, k: (-(-n // 128), -(-k // 128)), by_block),
    "library's tensor": (lambda n, k: (), by_tensor),
    "static blocks": (lambda n, k: (-(-n // 128), -(-k // 128)), static),
}


def products(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    """A gated MLP whose linears multiply codes by codes."""
    hidden, inner = draw.choice((128, 192, 256)), draw.choice((64, 128, 192, 256, 448))
    joined, form = draw.random() < 0.3, draw.choice(tuple(FORMS))
    shapes = [(2 * inner, hidden)] if joined else [(inner, hidden)] * 2
    shapes += [(hidden, inner)]
    forms = [form if draw.random() < 0.9 else draw.choice(tuple(FORMS)) for _ in shapes]
    drawn = {
        "joined": joined,
        "activation": draw.choice((F.silu, F.gelu)),
        "written": draw_written(draw, len(shapes)),
    }
    made = [
        Product(f, *shape, draw.randrange(1 << 20)) for f, shape in zip(forms, shapes, strict=True)
    ]
    if draw.random() < 0.8:
        for layer in made[1:-1]:
            layer.step = made[0].step
    tokens = draw.choice((1, 3))
    dtype = torch.bfloat16 if "_mm" in "".join(forms) else torch.float16
    args = tuple(normal(draw, dtype, tokens, hidden) for _ in range(2))
    return Gated(made, drawn), args, f"{forms} {shapes} {drawn}"


class Experts(moe_coded.CodedMoe):
    """spelled: of each weight (format, function of `moe_dequant`), or None for e4m3 in blocks."""

    def __init__(self, rows, hidden, spelled: dict[str, Any], seed: int) -> None:
        super().__init__(rows, hidden)
        self.spelled = spelled
        for name, (form, _) in spelled.items():
            shape = getattr(self, name).shape
            parts = moe_dequant.stored(form, seed, shape)
            for part, tensor in zip(("codes", "scales", "factor"), parts, strict=True):
                self.register_buffer(f"{name}_{part}", tensor)

    def weight(self, name):
        if name not in self.spelled:
            return super().weight(name)
        _, decode = self.spelled[name]
        return decode(*(getattr(self, f"{name}_{part}") for part in ("codes", "scales", "factor")))


_EXPERTS = [*moe_dequant.SPELLINGS.values()]
_EXPERTS += [
    (form, function)
    for function, (form, _) in moe_dequant.NEAR_MISSES.items()
    if "stacked" not in function.__name__ and form != "fp8"
]


def unrounded(rows):
    return rows


def experts(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    known = (*moe_coded.SPELLINGS.values(),)
    rows = hidden = draw.choice((unrounded, unrounded, *known, *moe_coded.NEAR_MISSES))
    if draw.random() < 0.2:
        hidden = draw.choice((unrounded, *known, *moe_coded.NEAR_MISSES))
    spelled = {}
    if draw.random() < 0.7:
        spelled = dict.fromkeys(("gate_up", "down"), draw.choice(_EXPERTS))
        if draw.random() < 0.2:
            spelled[draw.choice(tuple(spelled))] = draw.choice(_EXPERTS)
    names = {name: function.__name__ for name, (_, function) in spelled.items()}
    module = Experts(rows, hidden, spelled, draw.randrange(1 << 20))
    args = (moe_coded.tokens(draw.randrange(1 << 20)),)
    return module, args, f"experts {names} {rows.__name__} {hidden.__name__}"


DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16,) * 6 + (torch.float16,) * 3 + (torch.float32,)
PARTS = (attention, attention, attention, gated, gated, latents, experts)


def normal(draw: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    return torch.randn(shape, generator=generator).to(dtype)


def told(linears: list[Linear], drawn: dict[str, Any], dtype: torch.dtype) -> str:
    return f"{[linear.axes for linear in linears]} {drawn} {dtype}"


def build(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    return draw.choice(PARTS)(draw)
