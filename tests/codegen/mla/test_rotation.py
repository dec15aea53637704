"""Compares two ways to rotate queries: in the attention kernel, when it loads them, and in a
separate launch before. The tests run on Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.attention_cases import attend, exact, offsets, performed
from tests.interpreted import Interpreter
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.mla.attention.lowering import attention_steps, query_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.reference.rope import RopeTables, apply_rope
from tilewright.ops.runtime.program import Planner, drive

NOPE, V_DIM, HEADS = 16, 16, 2
STYLES = ["interleaved", "half", "interleaved_to_half"]
LONGEST = 50


@dataclass(frozen=True)
class Where:
    """The positions of queries.

    lengths: the number of queries of each sequence.
    rows: the number of rows of the tables; 0 for one row for each position.
    """

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


def call_at(where: Where, rope: int, dtype: torch.dtype) -> AttentionCall:
    """Returns a call without a rotation. It has 4 more keys than queries."""
    torch.manual_seed(0)
    rows, keys = sum(where.lengths), sum(n + 4 for n in where.lengths)
    q = torch.randn(rows, HEADS, NOPE + rope).to(dtype)
    kv = torch.randn(keys, HEADS, NOPE + V_DIM).to(dtype)
    parts = [q, kv[..., :NOPE], kv[..., NOPE:], torch.randn(keys, rope).to(dtype)]
    options: dict[str, Any] = {"scale": 0.3, "return_lse": True, "out_dtype": dtype}
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
    q, *keys = parts
    return AttentionCall(q, None, *keys, **options)


def tables(
    form: str, rows: int, rope: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of each pair. They are two tables, follow each other in one table, or are
    repeated for the second half of the columns."""
    angles = torch.rand(rows, rope // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if form == "paired":
        both = torch.stack((cos, sin), -1).flatten(-2)
        return both[:, ::2], both[:, 1::2]
    if form == "full":
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotated_in_float64(a: AttentionCall, where: Where) -> AttentionCall:
    """Returns the call with queries that are rotated by the definition of the rotation."""
    starts, width, rope = a.query_starts, a.rope, a.tables
    if where.rows:
        places = torch.arange(sum(where.lengths)) % where.rows
    elif a.query_positions is not None:
        places = a.query_positions.flatten()
    else:
        places = torch.cat(
            [torch.arange(n) + (0 if starts is None else int(starts[b]))
             for b, n in enumerate(where.lengths)]
        )  # fmt: skip
    flat = a.q.double().reshape(-1, HEADS, NOPE + width)[..., NOPE:]
    cos, sin = (table[places].double() for table in (rope.cos, rope.sin))
    turned = apply_rope(flat, cos, sin, width, rope.rope_style)
    return a.with_queries(a.q[..., :NOPE], turned.view(*a.q.shape[:-1], width))


def rotated_before(a: AttentionCall, machine: Interpreter) -> AttentionCall:
    """Returns the call with queries that a separate launch rotates."""
    queries = performed(query_steps(a, machine.target), machine)
    return replace(a.with_queries(*queries), tables=None)


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.name)
def test_one_kernel_gives_the_bits_of_two(where):
    """The attention kernel that rotates gives the same bits as two kernels. Both also agree with
    attention over queries that are rotated in float64."""
    number = PLACES.index(where)
    style, form = STYLES[number % 3], ("apart", "paired", "full")[(number + number // 3) % 3]
    dtype = torch.bfloat16 if number % 2 else torch.float16
    table = tables(form, where.rows or LONGEST, 16, torch.float32 if number % 4 else dtype)
    rope = RopeTables(*table, style, rope_by_position=not where.rows)
    a = replace(call_at(where, 16, dtype), tables=rope)
    machine = Interpreter(SM90)
    out, lse = attend(a, machine)
    assert machine.kernels == ["mla_attention"]
    before, before_lse = attend(rotated_before(a, machine), machine)
    assert machine.kernels[1:] == ["mla_query", "mla_attention"]
    assert torch.equal(out, before)
    assert torch.equal(lse, before_lse)
    want, _ = exact(rotated_in_float64(a, where))
    torch.testing.assert_close(out.double(), want, rtol=3e-2, atol=3e-2)


# `PLACES` contains eight of the nine pairs of a style and a form. This test has the ninth pair.
@pytest.mark.parametrize(
    ("style", "form"), zip(STYLES, ("apart", "full", "paired"), strict=True), ids=str
)
def test_a_position_without_a_row_of_the_tables_gives_zeros(style, form):
    rope = RopeTables(*tables(form, 8, 16, torch.float32), style, rope_by_position=True)
    a = replace(call_at(PLACES[5], 16, torch.bfloat16), tables=rope)
    machine = Interpreter(SM90)
    out, _ = attend(a, machine)
    before = rotated_before(a, machine)
    assert not before.q_rope[0, 6:].any()
    assert before.q_rope[:, :5].all(-1).any()
    assert torch.equal(out, attend(before, machine)[0])
    assert machine.kernels == ["mla_attention", "mla_query", "mla_attention"]


def test_what_the_kernel_cannot_rotate_is_rotated_before():
    """Tests rotations that the attention kernel cannot do: pairs that do not fill their tile,
    descriptors, and 8 bits. A launch before it rotates the queries."""
    rope = RopeTables(*tables("apart", LONGEST, 24, torch.float32), "half", rope_by_position=True)
    a = replace(call_at(PLACES[4], 24, torch.bfloat16), tables=rope)
    machine = Interpreter(SM90)
    out, _ = attend(a, machine)
    assert machine.kernels == ["mla_query", "mla_attention"]
    want, _ = exact(rotated_in_float64(a, PLACES[4]))
    torch.testing.assert_close(out.double(), want, rtol=3e-2, atol=3e-2)

    def planned(target, dtype=torch.bfloat16):
        a = call_at(PLACES[4], 16, torch.bfloat16)
        keys = {name: getattr(a, name).to(dtype) for name in ("k", "v", "k_rope")}
        rope = RopeTables(*tables("apart", LONGEST, 16, torch.float32), "half", True)
        steps = attention_steps(replace(a, **keys, tables=rope), target)
        return [spec.kernel for spec in drive(steps, Planner(target)).specs]

    assert planned(SM90) == ["mla_attention"]
    assert planned(SM100) == ["mla_query", "mla_attention"]
    assert planned(SM90, torch.float8_e4m3fn) == ["mla_query", "mla_attention"]
    assert math.isfinite(float(out.float().sum()))
