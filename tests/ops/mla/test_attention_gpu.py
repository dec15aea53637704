"""Compares the MLA attention core on a GPU with float64, in CUDA graphs and at real sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.attention_cases import (
    FP8,
    Case,
    attend,
    call_of,
    exact,
    offsets,
    performed,
    prefix,
    with_options,
)
from tilewright.codegen.targets import SM90
from tilewright.ops.mla.attention.lowering import attention_steps, merge_steps, query_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.reference.rope import RopeTables, apply_rope
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, drive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

REAL = Case("real", (300, 129), (300, 129), 3, 128, 64, 128, torch.bfloat16)
LATER = replace(REAL, name="prefix", queries=(77, 1, 200), keys=(400, 257, 333))
BYTES = replace(LATER, name="e4m3", dtype=FP8, v_by_key=True)
WIDE = replace(LATER, name="wide heads", nope=192, v_dim=256)
MANY = replace(REAL, name="many sequences", queries=tuple(range(70)), keys=tuple(range(3, 213, 3)))
DENSE = Case("dense", (257,) * 2, (257,) * 2, 4, 128, 64, 128, torch.bfloat16, dense=True)
CASES = [
    with_options(REAL, mask="none"),
    with_options(LATER, **prefix(LATER)),
    with_options(BYTES, **prefix(BYTES)),
    with_options(replace(BYTES, name="e4m3 by row", v_by_key=False), **prefix(BYTES)),
    with_options(WIDE, **prefix(WIDE)),
    with_options(MANY, **prefix(MANY)),
    with_options(replace(LATER, name="window"), mask="sliding_window", window=100, **prefix(LATER)),
    with_options(replace(LATER, name="chunks"), mask="chunked", window=128, **prefix(LATER)),
    with_options(replace(LATER, name="odd", nope=40, rope=24, v_dim=72), **prefix(LATER)),
    replace(DENSE, name="dense causal"),
    with_options(replace(DENSE, dtype=torch.float16), mask="none"),
    with_options(DENSE, query_positions=torch.randint(0, 257, (257,))),
    with_options(DENSE, mask="none", attn_mask=torch.rand(2, 1, 257, 257) < 0.5),
    with_options(DENSE, attn_mask=torch.randn(1, 4, 257, 257).bfloat16()),
    with_options(
        replace(LATER, name="many long", queries=(40,) * 20, keys=(2100,) * 20),
        query_starts=torch.full((20,), 2060),
    ),
    # There are many tiles. The last case is long enough for the library.
    with_options(replace(LATER, name="long", queries=(300, 257), keys=(2300, 2111)),
                 query_starts=torch.tensor([2000, 1854])),
    with_options(replace(REAL, name="long", queries=(2200,), keys=(2200,)), mask="none"),
    with_options(replace(LATER, name="long window", queries=(3000,), keys=(3000,)),
                 mask="sliding_window", window=1500),
    replace(DENSE, name="library", queries=(1100,), keys=(1100,), heads=128),
]  # fmt: skip


def on_gpu(case: Case) -> AttentionCall:
    return call_of(case, device="cuda")


def tolerance(case: Case) -> float:
    return {torch.float16: 4e-3, torch.bfloat16: 3e-2, FP8: 0.15}[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.options.get('mask', '')}")
def test_attention_is_that_of_float64(case):
    case = with_options(case, out_dtype=torch.bfloat16 if case.dtype == FP8 else case.dtype)
    case = with_options(case, scale=0.1)
    a = on_gpu(case)
    out, lse = attend(a)
    want, want_lse = exact(a)
    bound = tolerance(case)
    torch.testing.assert_close(out.double(), want, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)
    again, _ = attend(a)
    assert torch.equal(out, again)


def test_every_call_gives_the_same_bits():
    """Every call must give the same bits. The longest sequences run with specialised warps. While
    Triton's unused barrier was in a tile's memory, one of ten calls gave numbers that were not
    finite."""
    lengths = (3072, 512, 256, 64)
    long = Case("long and short", lengths, lengths, 64, 128, 64, 128, torch.bfloat16)
    a = on_gpu(with_options(long, scale=0.1, out_dtype=torch.bfloat16))
    first, _ = attend(a)
    assert torch.isfinite(first).all()
    others = sum((attend(a)[0] != first).any() for _ in range(300))
    assert int(others) == 0


@pytest.mark.parametrize("case", [LATER, BYTES], ids=lambda c: c.name)
def test_a_graph_follows_its_offsets(case):
    """One captured graph serves other lengths, if their sum is not larger."""
    a = on_gpu(with_options(case, out_dtype=torch.bfloat16, scale=0.1, **prefix(case)))
    attend(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(a)
    other = replace(case, queries=(100, 150, 28), keys=(340, 400, 200))
    a.query_offsets.copy_(offsets(other.queries))
    a.key_offsets.copy_(offsets(other.keys))
    a.query_starts.copy_(prefix(other)["query_starts"])
    graph.replay()
    rows, keys = sum(other.queries), sum(other.keys)
    cut = replace(
        a, q=a.q[:rows], q_rope=a.q_rope[:rows], k=a.k[:keys], v=a.v[:keys], k_rope=a.k_rope[:keys]
    )
    want, want_lse = exact(cut)
    bound = tolerance(case)
    torch.testing.assert_close(out[:rows].double(), want, rtol=bound, atol=bound)
    torch.testing.assert_close(lse[:rows].double(), want_lse, rtol=1e-3, atol=2e-3)


def test_chunks_merge():
    case = replace(REAL, queries=(200,), keys=(1000,))
    a = on_gpu(with_options(case, scale=0.1, query_starts=torch.tensor([800])))
    want, _ = exact(a)
    parts = []
    for first, last in ((0, 333), (333, 700), (700, 1000)):
        chunk = replace(
            a, k=a.k[first:last], v=a.v[first:last], k_rope=a.k_rope[first:last],
            key_offsets=offsets((last - first,)).cuda(), key_starts=torch.tensor([first]).cuda(),
            out_dtype=torch.float32,
        )  # fmt: skip
        parts.append(attend(chunk))
    outs, lses = zip(*parts, strict=True)
    machine = machine_of(a.q.device)
    steps = merge_steps(outs, lses, torch.bfloat16, machine.target)
    out = performed(steps, machine).result
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_queries_are_rotated_on_the_way(dtype):
    case = replace(DENSE, dtype=dtype, v_by_key=False)
    a = on_gpu(with_options(case, scale=0.1, out_dtype=torch.bfloat16))
    q = torch.randn(2, 257, 4, 192, device="cuda").bfloat16()
    angles = torch.rand(300, 32, device="cuda") * 6
    rope = RopeTables(angles.cos(), angles.sin(), "interleaved", rope_by_position=True)
    scale = torch.tensor(0.02, device="cuda") if dtype == FP8 else None
    out, _ = attend(replace(a, q=q, q_rope=None, tables=rope, q_scale=scale))
    table = [t[:257].double() for t in (rope.cos, rope.sin)]
    turned = apply_rope(q.flatten(0, 1)[..., 128:].double(), *table, 64, "interleaved")
    want, _ = exact(replace(a, q=q[..., :128], q_rope=turned.view(2, 257, 4, 64)))
    bound = 0.2 if dtype == FP8 else 3e-2
    torch.testing.assert_close(out.double(), want, rtol=bound, atol=bound)
    assert math.isfinite(float(out.float().sum()))


ROTATED = {
    "ragged, starts": with_options(LATER, **prefix(LATER)),
    "ragged, positions": with_options(
        LATER, query_positions=torch.cat([torch.arange(k - q, k) for q, k in
                                          zip(LATER.queries, LATER.keys, strict=True)]),
    ),
    "dense": DENSE,
    "dense, positions": with_options(DENSE, query_positions=torch.randint(0, 257, (2, 257))),
    "long tiles": with_options(
        replace(DENSE, queries=(1100,) * 2, keys=(1100,) * 2),
        query_starts=torch.tensor([0, 7], dtype=torch.int32),
    ),
    "dense, no mask, fp16": with_options(replace(DENSE, dtype=torch.float16), mask="none"),
}  # fmt: skip


# (positions, style and form of the tables, whether a position selects a row of them)
ROTATIONS = [
    *(("ragged, starts", style, True) for style in ("half", "interleaved, paired", "half, full")),
    *(("dense", style, False) for style in ("half", "interleaved, paired", "half, full")),
    *(("long tiles", style, True) for style in ("half", "interleaved, paired")),
    ("ragged, starts", "interleaved", False),
    ("ragged, positions", "interleaved_to_half", True),
    ("dense, positions", "interleaved", True),
    ("dense, no mask, fp16", "interleaved_to_half, full", True),
]


@pytest.mark.parametrize(("name", "style", "by_position"), ROTATIONS)
def test_rotated_inside_is_rotated_before_bit_by_bit(name, style, by_position):
    case = with_options(ROTATED[name], scale=0.1, out_dtype=torch.bfloat16)
    a = on_gpu(case)
    q = torch.randn(*a.q.shape[:-1], 192, device="cuda").to(case.dtype)
    style, _, form = style.partition(", ")
    rows = 2000 if by_position else a.q.shape[-3]
    angles = torch.rand(rows, 32, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    if form == "paired":
        both = torch.stack((cos, sin), -1).flatten(-2).to(case.dtype)
        cos, sin = both[:, ::2], both[:, 1::2]
    if form == "full":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    a = replace(a, q=q, q_rope=None, tables=RopeTables(cos, sin, style, by_position))
    planned = drive(attention_steps(a, SM90), Planner(SM90)).specs
    assert [spec.kernel for spec in planned] == ["mla_attention"]
    machine = machine_of(q.device)
    queries = performed(query_steps(a, machine.target), machine)
    inside = attend(a)
    before = attend(replace(a.with_queries(*queries), tables=None))
    for got, want in zip(inside, before, strict=True):
        assert torch.equal(got, want)
    assert math.isfinite(float(inside[0].float().sum()))
