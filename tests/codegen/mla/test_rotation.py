"""Queries rotated by the attention kernel that loads them, on Triton's interpreter, against the
launch of its own that rotates them before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.attention_cases import exact, offsets
from tests.interpreted_launches import interpret_launches
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.mla import attention_lowering as mla_attention
from tilewright.ops.mla import query_lowering as mla_queries
from tilewright.ops.mla.attention_lowering import AttentionCall, QueryRope, attend, attention_plan
from tilewright.ops.reference.rope import apply_rope

NOPE, V_DIM, HEADS = 16, 16, 2
LONGEST = 50


@dataclass(frozen=True)
class Where:
    """Where queries stand. lengths: of each sequence; rows: of the tables, 0 for one a position."""

    name: str
    lengths: tuple[int, ...] = (7, 0, 20)
    dense: bool = False
    rows: int = 0
    tensors: tuple[str, ...] = ()


PLACES = [
    Where("ragged"),
    Where("ragged, starts", tensors=("query_starts",)),
    Where("ragged, positions", tensors=("query_positions",)),
    Where("ragged, by row", rows=27),
    Where("dense", (9, 9), dense=True),
    Where("dense, starts", (9, 9), dense=True, tensors=("query_starts",)),
    Where("dense, positions", (9, 9), dense=True, tensors=("query_positions",)),
    Where("dense, by row", (9, 9), dense=True, rows=9),
]


@pytest.fixture
def launches(monkeypatch):
    """Launches go to the interpreter; the kernels' names are noted."""
    return interpret_launches(monkeypatch, mla_attention, mla_queries)


def operands(where: Where, rope: int, dtype: torch.dtype):
    """(q, k, v, k_rope, options) of a call without a rotation; keys are 4 more than queries."""
    torch.manual_seed(0)
    rows, keys = sum(where.lengths), sum(n + 4 for n in where.lengths)
    q = torch.randn(rows, HEADS, NOPE + rope).to(dtype)
    kv = torch.randn(keys, HEADS, NOPE + V_DIM).to(dtype)
    parts = [q, kv[..., :NOPE], kv[..., NOPE:], torch.randn(keys, rope).to(dtype)]
    options: dict[str, Any] = {"scale": 0.3, "return_lse": True}
    batch = len(where.lengths)
    if where.dense:
        parts = [part.unflatten(0, (batch, -1)) for part in parts]
    else:
        options["query_offsets"] = offsets(where.lengths)
        options["key_offsets"] = offsets(tuple(n + 4 for n in where.lengths))
    given = {
        "query_starts": torch.arange(batch, dtype=torch.int32) + 2,
        "query_positions": torch.randint(0, LONGEST, (batch, 9) if where.dense else (rows,)),
    }
    options |= {name: given[name] for name in where.tensors}
    return parts, options


def tables(
    form: str, rows: int, rope: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each pair: apart, one after the other in one table, or twice in a row."""
    angles = torch.rand(rows, rope // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if form == "paired":
        both = torch.stack((cos, sin), -1).flatten(-2)
        return both[:, ::2], both[:, 1::2]
    if form == "full":
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotated_in_float64(q, where: Where, rope: QueryRope, options, width: int) -> torch.Tensor:
    """q's rope part, flat, by the definition of the rotation."""
    starts = options.get("query_starts")
    if where.rows:
        places = torch.arange(sum(where.lengths)) % where.rows
    elif "query_positions" in options:
        places = options["query_positions"].flatten()
    else:
        places = torch.cat(
            [torch.arange(n) + (0 if starts is None else int(starts[b]))
             for b, n in enumerate(where.lengths)]
        )  # fmt: skip
    flat = q.double().reshape(-1, HEADS, NOPE + width)[..., NOPE:]
    cos, sin = (table[places].double() for table in (rope.cos, rope.sin))
    return apply_rope(flat, cos, sin, width, rope.style)


STYLES = ["interleaved", "half", "interleaved_to_half"]


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.name)
def test_one_kernel_gives_the_bits_of_two(where, launches):
    """And attention over queries rotated in float64; what is planned is what is launched."""
    number = PLACES.index(where)
    style, form = STYLES[number % 3], ("apart", "paired", "full")[(number + number // 3) % 3]
    dtype = torch.bfloat16 if number % 2 else torch.float16
    parts, options = operands(where, 16, dtype)
    table = tables(form, where.rows or LONGEST, 16, torch.float32 if number % 4 else dtype)
    rope = QueryRope(*table, style, by_position=not where.rows)
    out, lse = attend(*parts, **options, q_rope=rope)
    assert launches == ["mla_attention"]
    planned, _ = attention_plan(*parts, **options, q_rope=rope, target=SM90)
    assert [spec.kernel for spec in planned] == launches

    q, k, v, k_rope = parts
    plain = AttentionCall(q, None, k, v, k_rope, **options)
    _, turned = mla_queries.finished_queries(plain, rope)
    before, before_lse = attend(*parts, **options, q_rope=turned)
    assert launches[1:] == ["mla_query", "mla_attention"]
    assert torch.equal(out, before)
    assert torch.equal(lse, before_lse)

    want = rotated_in_float64(q, where, rope, options, 16).view(turned.shape)
    call = AttentionCall(q[..., :NOPE], want, k, v, k_rope, **options)
    torch.testing.assert_close(out.double(), exact(call)[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["apart", "paired", "full"])
def test_every_style_takes_every_table(style, form, launches):
    """A position without a row of the tables gives zeros, in both ways."""
    where = PLACES[5]
    parts, options = operands(where, 16, torch.bfloat16)
    rope = QueryRope(*tables(form, 8, 16, torch.float32), style, by_position=True)
    out, _ = attend(*parts, **options, q_rope=rope)
    plain = AttentionCall(parts[0], None, *parts[1:], **options)
    _, turned = mla_queries.finished_queries(plain, rope)
    assert not turned[0, 6:].any()
    assert turned[:, :5].all(-1).any()
    assert torch.equal(out, attend(*parts, **options, q_rope=turned)[0])
    assert launches == ["mla_attention", "mla_query", "mla_attention"]


def test_what_the_kernel_cannot_rotate_is_rotated_before(launches):
    """Pairs that do not fill their tile; descriptors; 8 bits."""
    parts, options = operands(PLACES[4], 24, torch.bfloat16)
    rope = QueryRope(*tables("apart", LONGEST, 24, torch.float32), "half", by_position=True)
    out, _ = attend(*parts, **options, q_rope=rope)
    assert launches == ["mla_query", "mla_attention"]
    want = rotated_in_float64(parts[0], PLACES[4], rope, options, 24).view(2, 9, HEADS, 24)
    call = AttentionCall(parts[0][..., :NOPE], want, *parts[1:], **options)
    torch.testing.assert_close(out.double(), exact(call)[0], rtol=3e-2, atol=3e-2)

    def planned(target, **more):
        parts, options = operands(PLACES[4], 16, torch.bfloat16)
        q, *rest = parts
        rest = [part.to(more.get("dtype", torch.bfloat16)) for part in rest]
        table = tables("apart", LONGEST, 16, torch.float32)
        specs, _ = attention_plan(
            q, *rest, **options, q_rope=QueryRope(*table, "half", True), target=target
        )
        return [spec.kernel for spec in specs]

    assert planned(SM90) == ["mla_attention"]
    assert planned(SM100) == ["mla_query", "mla_attention"]
    assert planned(SM90, dtype=torch.float8_e4m3fn) == ["mla_query", "mla_attention"]
    assert math.isfinite(float(out.float().sum()))
