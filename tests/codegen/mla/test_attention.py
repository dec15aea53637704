"""Tests the emitted MLA attention kernels against attention in float64, on Triton's interpreter.
The interpreter runs exactly the sources that are emitted for SM100 and SM90."""

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
from tests.interpreted import Interpreter, interpreted
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.targets import SM90, SM100, get_target
from tilewright.ops.attention import mask_blocks
from tilewright.ops.attention.block_lists import MaskBlocksArguments
from tilewright.ops.mla.attention.cudnn import join_launch
from tilewright.ops.mla.attention.lowering import core_launch, merge_steps, query_steps
from tilewright.ops.mla.attention.operands import (
    AttentionCall,
    attention_problem,
    check_call,
)
from tilewright.ops.reference.rope import RopeTables, apply_rope

TWO_LOOPS = PrefillConfig(32, 16, 4, 2, tma=True, chained=False)
ONE_LOOP = PrefillConfig(16, 32, 4, 2, tma=True, one_loop=True, promote=True)
POINTERS = PrefillConfig(16, 16, 4, 2)


def run(a: AttentionCall, config: PrefillConfig, target: str = "sm100", group: int = 2):
    """Returns (out, lse) of the emitted kernel. Their memory holds NaN before the call."""
    check_call(a)
    if a.attn_mask is not None:
        a = replace(a, mask_blocks=mask_blocks.reference(MaskBlocksArguments(a.attn_mask)))
    problem = attention_problem(a)
    assert problem.tma or not config.tma
    out = torch.full((*a.q.shape[:-1], a.v.shape[-1]), math.nan, dtype=a.out_dtype)
    lse = torch.full(a.q.shape[:-1], math.nan)
    made = core_launch(a, problem, (out, lse), get_target(target), config, head_group=group)
    interpreted(made.spec)[made.grid](*made.given)
    return out, lse


def assert_agrees(a: AttentionCall, got, tolerance: float) -> None:
    out, lse = got
    want, want_lse = exact(a)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3, equal_nan=True)


RAGGED = Case("ragged", (5, 0, 33, 1), (5, 0, 70, 40))
SHIFTED = Case("with prefix", (20, 35), (45, 35))
BYTES = Case("e4m3", (20, 35, 9), (45, 37, 30), dtype=FP8, rope=32, v_by_key=True)
CASES = [
    Case("causal", (50,), (50,), dense=True),
    with_options(RAGGED, mask="none"),
    with_options(RAGGED, **prefix(RAGGED)),
    with_options(replace(RAGGED, name="window"), mask="sliding_window", window=9, **prefix(RAGGED)),
    with_options(replace(RAGGED, name="chunks"), mask="chunked", window=24, **prefix(RAGGED)),
    with_options(replace(SHIFTED, name="bf16", dtype=torch.bfloat16), **prefix(SHIFTED)),
    # Queries that come before all keys of the buffer see none of them.
    with_options(
        replace(SHIFTED, name="a later chunk of keys"),
        query_starts=torch.tensor([30, 10]), key_starts=torch.tensor([40, 25], dtype=torch.int32),
        key_lengths=torch.tensor([60, 50]),
    ),
    Case("wider keys", (20,) * 2, (40,) * 2, nope=40, rope=24, v_dim=48, dense=True),
    Case("no rope", (20,), (40,), rope=0, dense=True),
    with_options(BYTES, **prefix(BYTES)),
    with_options(BYTES, mask="none"),
    with_options(BYTES, mask="sliding_window", window=12, **prefix(BYTES)),
]  # fmt: skip


def tolerance(case: Case) -> float:
    return {torch.float16: 4e-3, torch.bfloat16: 3e-2, FP8: 0.12}[case.dtype]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=f"{case.name} {case.options.get('mask', '')}-{config}")
        for row, case in enumerate(CASES)
        for column, config in enumerate((TWO_LOOPS, ONE_LOOP, POINTERS))
        if case.name == CASES[0].name or row % 3 == column
    ],
)
def test_kernel_is_attention(case, config):
    """Compares the kernel with attention. The first case runs with each kind of loop, and the other
    cases take the kinds in turn."""
    a = call_of(case)
    assert_agrees(a, run(a, config), tolerance(case))


def test_positions_and_masks_of_a_dense_batch():
    """Tests positions that are a tensor in any order, and masks that have strides, that are
    broadcast, and that differ between heads."""
    case = Case("dense", (17,) * 2, (45,) * 2, dense=True)
    positions = torch.randint(0, 45, (2, 17))
    bias = torch.randn(2, 1, 17, 48)[..., :45].masked_fill(
        torch.rand(2, 1, 17, 45) < 0.3, -math.inf
    )
    flags = torch.rand(1, 2, 1, 45) < 0.5
    for options in (
        {"query_positions": positions},
        {"query_positions": positions[1]},
        {"mask": "none", "attn_mask": bias},
        {"attn_mask": bias.half(), "query_starts": torch.tensor([28, 28])},
        {"mask": "none", "attn_mask": flags},
    ):
        a = call_of(with_options(case, **options))
        assert_agrees(a, run(a, TWO_LOOPS), 4e-3)
        assert_agrees(a, run(a, ONE_LOOP), 4e-3)


@pytest.mark.parametrize("queries", [1, 130])
def test_blocks_of_the_lowest_number_are_not_read(queries):
    """A call that makes the list of its mask's blocks does not read hidden blocks, so NaN in them
    changes no bit of the result. If a query has only the lowest number, all blocks are read."""
    lowest = torch.finfo(torch.float16).min
    bias = torch.full((2, 1, queries, 300), lowest, dtype=torch.float16)
    bias[0, ..., :70] = bias[1, ..., 60:64] = 0
    options = {"mask": "none", "attn_mask": bias, "scale": 0.2}
    a = call_of(Case("dense", (queries,) * 2, (300,) * 2, dense=True, options=options))
    clean = attend(a, Interpreter())
    assert_agrees(a, clean, 4e-3)
    blind = bias.clone()
    blind[1, 0, 0] = lowest
    blind = replace(a, attn_mask=blind)
    assert attend(blind, Interpreter())[0].isfinite().all()
    for tensor in (a.k, a.v, a.k_rope):
        tensor[0, 128:] = tensor[1, 64:] = math.nan
    for got, want in zip(attend(a, Interpreter()), clean, strict=True):
        assert torch.equal(got, want)
    assert attend(blind, Interpreter())[0][1, :128].isnan().all()


def test_finite_masks_do_not_hide():
    """If the lowest finite number masks a whole row, the result is a plain softmax of the row."""
    bias = torch.zeros(1, 1, 9, 20)
    bias[..., 3, :] = torch.finfo(torch.float32).min / 4
    case = Case("dense", (9,), (20,), dense=True, options={"mask": "none", "attn_mask": bias})
    a = call_of(case)
    out, _ = run(a, TWO_LOOPS)
    want = a.v[0].double().mean(0)
    torch.testing.assert_close(out[0, 3].double(), want, rtol=4e-3, atol=4e-3)


def test_scales_of_8_bit_operands_multiply():
    case = with_options(BYTES, **prefix(BYTES))
    scales = {n: torch.tensor(s) for n, s in (("q_scale", 0.5), ("k_scale", 1.5), ("v_scale", 2.0))}
    a = call_of(with_options(case, **scales))
    assert_agrees(a, run(a, ONE_LOOP), 0.25)
    # If the numbers of a value are contiguous, the result is the same.
    rows = replace(a, v=a.v.contiguous())
    torch.testing.assert_close(run(rows, ONE_LOOP)[0], run(a, ONE_LOOP)[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("sequences", [1, 3])
def test_order_of_tiles_does_not_matter(sequences):
    """Groups of heads of any size are tested, also an incomplete last group. The sequences are
    sorted by length, or there are too many to sort."""
    case = Case("ragged", (18, 3, 40)[:sequences], (18, 3, 40)[:sequences], heads=3)
    a = call_of(case)
    results = [run(a, ONE_LOOP, group=group) for group in (1, 2, 3)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("config", [TWO_LOOPS, ONE_LOOP, POINTERS], ids=str)
@pytest.mark.parametrize("mask", ["sliding_window", "chunked"])
def test_a_window_over_no_keys_reads_none(mask, config):
    """Tests a window that begins after the last key. The last sequence has no keys in a chunk, and
    its queries come later. The memory after the keys may hold anything, and must not reach the
    result."""
    case = Case("a chunk", (3, 5), (20, 0), options={"mask": mask, "window": 6})
    a = call_of(with_options(case, query_starts=torch.tensor([17, 30])))

    def cut(tensor):
        behind = torch.full((16, *tensor.shape[1:]), math.nan, dtype=tensor.dtype)
        return torch.cat((tensor, behind))[:20]

    a = replace(a, k=cut(a.k), v=cut(a.v), k_rope=cut(a.k_rope))
    assert_agrees(a, run(a, config), 4e-3)


def test_merged_chunks_are_the_whole():
    case = with_options(Case("whole", (24,), (50,)), query_starts=torch.tensor([26]))
    a = call_of(replace(case, options={**case.options, "out_dtype": torch.float32}))
    whole, _ = run(a, ONE_LOOP)
    parts = []
    for first, last in ((0, 20), (20, 20), (20, 50)):
        chunk = replace(
            a, k=a.k[first:last], v=a.v[first:last], k_rope=a.k_rope[first:last],
            key_offsets=offsets((last - first,)), key_starts=torch.tensor([first]),
        )  # fmt: skip
        parts.append(run(chunk, ONE_LOOP))
    outs, lses = zip(*parts, strict=True)
    steps = merge_steps(outs, lses, torch.float32, SM100)
    out = performed(steps, Interpreter()).result
    torch.testing.assert_close(out, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["rotated", "cast too"])
def test_queries_are_rotated_and_cast(style, dtype):
    heads, nope, rope, run_of = 3, 20, 8, 6
    q = torch.randn(2, run_of, heads, nope + rope).bfloat16()
    cos, sin = (f(torch.rand(40, rope // 2) * 6) for f in (torch.cos, torch.sin))
    scale = torch.tensor(0.25)
    k = torch.zeros(2, 4, heads, nope, dtype=dtype)
    call = AttentionCall(
        q, None, k, k, torch.zeros(2, 4, rope, dtype=dtype), scale=1.0, q_scale=scale,
        query_starts=torch.tensor([3, 11]), tables=RopeTables(cos, sin, style, True),
    )  # fmt: skip
    machine = Interpreter(SM100)
    own, turned = performed(query_steps(call, SM100), machine)
    places = torch.cat([start + torch.arange(run_of) for start in (3, 11)])
    flat = q.flatten(0, 1).double()
    want = apply_rope(flat[..., nope:], cos[places].double(), sin[places].double(), rope, style)
    over = float(scale) if dtype == FP8 else 1.0
    bound = 0.08 if dtype == FP8 else 1e-2
    turned, own = turned.flatten(0, 1).double() * over, own.flatten(0, 1).double() * over
    torch.testing.assert_close(turned, want, rtol=bound, atol=bound)
    torch.testing.assert_close(own, flat[..., :nope], rtol=bound, atol=bound / 8)
    assert machine.kernels == ["mla_query"]


def test_joined_keys_are_both_parts_side_by_side():
    case = Case("join", (1,) * 2, (21,) * 2, heads=3, nope=24, rope=8, dense=True)
    a = call_of(case)
    out = torch.full((2, 21, 3, 32), math.nan, dtype=case.dtype)
    made = join_launch(a, out, SM90)
    interpreted(made.spec)[made.grid](*made.given)
    rope = a.k_rope.unsqueeze(2).expand(-1, -1, 3, -1)
    assert torch.equal(out, torch.cat((a.k, rope), -1))


def holes(sequences, heads, queries, keys, seed=0):
    """Returns a mask with padding at the left, later keys, blocks that no query sees, and one query
    that sees nothing."""
    torch.manual_seed(seed)
    seen = torch.ones(sequences, heads, queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries - 70)
    seen[0, ..., :100] = False
    seen[..., 130:260] &= torch.rand(sequences, heads, queries, 130) < 0.3
    seen[..., 192:256] = False
    seen[:, :, 1] = False
    return seen


LISTED = Case("listed", (150,) * 2, (400,) * 2, dense=True, nope=16, v_dim=16)
LISTED_TILES = [
    PrefillConfig(64, 32, 4, 2, tma=True, chained=False),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(64, 64, 4, 2, tma=True, one_loop=True),
]


LISTED_OPTIONS = [
    {"mask": "none"},
    {"mask": "none", "key_lengths": torch.tensor([310, 0])},
    {"mask": "causal", "query_starts": torch.tensor([250, 100])},
    {"mask": "sliding_window", "window": 90, "query_starts": torch.tensor([250, 40])},
    {"mask": "chunked", "window": 128, "query_starts": torch.tensor([250, 0])},
]
#: Tiles and options in all pairs. Each pair has one of the two kinds of mask.
LISTED_CASES = [
    pytest.param(
        config, options, (row + column) % 2 == 1,
        id=f"{' '.join(options)} {options['mask']}-{config}",
    )
    for row, config in enumerate(LISTED_TILES)
    for column, options in enumerate(LISTED_OPTIONS)
]  # fmt: skip


@pytest.mark.parametrize(("config", "options", "added"), LISTED_CASES)
def test_blocks_on_a_masks_list(config, options, added):
    """The list has whole blocks and other blocks, with gaps between them, and positions hide keys,
    too. The cases cover all pairs of tiles, options and kinds of mask (booleans or numbers), but
    not all triples."""
    seen = holes(2, 1, 150, 400)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf) if added else seen
    a = call_of(with_options(LISTED, attn_mask=mask, **options))
    assert_agrees(a, run(a, config), 4e-3)


@pytest.mark.parametrize("config", LISTED_TILES, ids=str)
def test_keys_of_blocks_that_nobody_sees_may_hold_anything(config):
    """The keys, values and rope keys of hidden blocks are NaN. Hidden keys in other blocks are NaN,
    too."""
    seen = holes(1, 1, 150, 400)[:, :, :128]
    a = call_of(with_options(LISTED, mask="none", attn_mask=seen))
    a = replace(a, q=a.q[:1, :128], q_rope=a.q_rope[:1, :128], k=a.k[:1], v=a.v[:1])
    a = replace(a, k_rope=a.k_rope[:1])
    want = run(a, config)
    unseen = ~seen[0, 0].any(0)
    blocks = torch.nn.functional.pad(unseen, (0, 48), value=True).unflatten(0, (-1, 64)).all(1)
    assert 1 < blocks.sum() < len(blocks) - 1
    hidden = blocks.repeat_interleave(64)[:400]
    parts = {name: getattr(a, name).clone() for name in ("k", "v", "k_rope")}
    for name, part in parts.items():
        part[:, hidden if name == "v" else unseen] = math.nan
    for got, expected in zip(run(replace(a, **parts), config), want, strict=True):
        assert torch.equal(got, expected)


def test_a_list_of_more_entries_than_are_looked_at_together():
    """The first whole blocks come so late in the list that a program does not load their entries
    first."""
    keys = 64 * 310
    case = Case("long", (2,), (keys,), heads=1, nope=16, v_dim=16, dense=True)
    seen = torch.ones(1, 1, 2, keys, dtype=torch.bool)
    seen[..., :100], seen[..., 64 * 300 + 5] = False, False
    a = call_of(with_options(case, mask="none", attn_mask=seen))
    config = PrefillConfig(16, 64, 4, 2)
    assert_agrees(a, run(a, config), 4e-3)


def test_one_list_serves_all_that_its_mask_does():
    """One list serves every sequence or head that shares its mask. Lists are separate for each
    sequence or head, or shared, and have any strides."""
    case = Case("shared", (140,) * 2, (280,) * 2, dense=True, nope=16, v_dim=16)
    config = PrefillConfig(64, 64, 4, 2)
    for shape in ((2, 2), (1, 2), (2, 1), (1, 1)):
        for queries in (1, 140):
            seen = holes(*shape, 140, 280, seed=sum(shape))[:, :, -queries:]
            seen = seen.mT.contiguous().mT
            a = call_of(with_options(case, mask="none", attn_mask=seen))
            assert_agrees(a, run(a, config), 4e-3)
