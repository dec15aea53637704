"""Compares the emitted QKV kernels with the op's reference in float64, on Triton's interpreter.

The interpreter runs exactly the source that is emitted for SM100. Caches start as random numbers
and q starts as NaN, so that a stray or missing store shows.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.agreement import in_float64
from tests.interpreted import Interpreter
from tests.ops.qkv import plain
from tilewright.codegen.emit import emit
from tilewright.codegen.qkv.kernels import (
    EPILOGUE,
    Config,
    EpilogueConfig,
    SwappedConfig,
    TiledConfig,
    epilogue_grid,
    epilogue_statics,
)
from tilewright.codegen.qkv.plan import LoweringChoice, epilogue_config, fused_choice
from tilewright.codegen.qkv.problem import (
    QkvProblem,
    heads_fit,
    swapped_obstacle,
    tiled_obstacle,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM100, get_target
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.qkv import cache_store, choices, qkv_cache
from tilewright.ops.qkv.arguments import FusedQkvArguments, KvStoreArguments
from tilewright.ops.qkv.library import project, project_packed
from tilewright.ops.qkv.operands import (
    StoreCall,
    input_strides,
    prepare,
    prepare_store,
    result_buffer,
)
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Launch, SplitK, drive

LLAMA = AttentionCase(
    "llama",
    num_tokens=5,
    hidden=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    page_size=16,
    num_pages=4,
    rope_style="half",
    rotary_dim=32,
)
STATIC = replace(
    LLAMA,
    num_tokens=6,
    num_pages=3,
    layout="static_cache",
    slots="per_sequence",
    indexing="torch",
    tokens_per_row=3,
)

# The cases have empty sequences, a page that is filled to its end, and pages that are crossed
# inside the new tokens.
TABLE = replace(
    LLAMA,
    num_tokens=22,
    page_size=8,
    num_pages=12,
    new_tokens=(0, 3, 0, 9, 8, 2, 0),
    cached_tokens=(4, 5, 0, 15, 0, 14, 8),
)

# Maps the name of a case to what it adds to the plain Llama case.
CASES = {
    "half": LLAMA,
    "half, table of half width": replace(LLAMA, table_width="half", table_dtype=torch.bfloat16),
    "one token": replace(LLAMA, num_tokens=1),
    "past a tile of 16": replace(LLAMA, num_tokens=37),
    "a page to its last slot": replace(LLAMA, num_tokens=16, num_pages=1),
    "no rope": replace(LLAMA, rope_style="none", rotary_dim=0),
    "interleaved": replace(LLAMA, rope_style="interleaved", layout="vllm_pair"),
    "interleaved, partial": replace(LLAMA, rope_style="interleaved", rotary_dim=8),
    "partial": replace(LLAMA, rotary_dim=16),
    "partial, no divisor of the head": replace(LLAMA, rotary_dim=12, bias=True),
    "head_dim 80": replace(LLAMA, head_dim=80, rotary_dim=32, hidden=40),
    "head_dim 96, interleaved": replace(
        LLAMA, head_dim=96, rope_style="interleaved", rotary_dim=48, hidden=40
    ),
    "norm": replace(LLAMA, qk_norm=True),
    "norm, head_dim 24": replace(LLAMA, head_dim=24, rotary_dim=24, qk_norm=True),
    "bias": replace(LLAMA, bias=True, dtype=torch.float16),
    "skipped tokens": replace(LLAMA, num_tokens=7, skipped=3),
    "negative slots wrap": replace(LLAMA, num_tokens=7, skipped=3, indexing="torch"),
    "32-bit slots": replace(LLAMA, slot_dtype=torch.int32),
    "packed": replace(LLAMA, projection="packed", layout="max_pair"),
    "per head": replace(LLAMA, num_kv_heads=4, projection="per_head", bias=True),
    "head-major pages": replace(LLAMA, layout="head_major"),
    "static cache": STATIC,
    "static cache, norm and bias": replace(STATIC, qk_norm=True, bias=True),
}
# Each of these cases runs with one config of one or both fused kernels, because the kernels share
# their helper functions.
OPTIONS = {
    "grouped q": replace(LLAMA, projection="grouped", bias=True),
    "n-major": replace(LLAMA, projection="n_major", bias=True),
    "n-major, interleaved": replace(LLAMA, projection="n_major", rope_style="interleaved"),
    "kv heads repeated": replace(LLAMA, kv_repeat=3, bias=True, layout="head_major"),
    "clipped": replace(LLAMA, bias=True, clip=0.7),
    "gates": replace(LLAMA, gate_run=1, qk_norm=True, norm_offset=1.0, bias=True),
    "gates behind": replace(LLAMA, gate_run=2, qk_norm=True, norm_after_rope=True),
    "delta": replace(LLAMA, bias=True, delta=True, qk_norm=True),
    "delta, interleaved": replace(LLAMA, delta=True, rope_style="interleaved", writes_v=False),
    "layer norm": replace(LLAMA, qk_norm=True, norm_kind="layer"),
    "layer norm, head_dim 24": replace(
        LLAMA, head_dim=24, rotary_dim=24, qk_norm=True, norm_kind="layer", norm_per_head=True
    ),
    "norm after rope": replace(
        LLAMA, qk_norm=True, norm_after_rope=True, norm_offset=1.0, norm_per_head=True
    ),
    "no norm weights": replace(LLAMA, weightless_norm=True, norm_after_rope=True, rotary_dim=16),
    "norm of q alone": replace(LLAMA, qk_norm=True, normed="q", norm_offset=1.0),
    "k's norm without weight": replace(LLAMA, qk_norm=True, normed="q", weightless_norm=True),
    "interleaved to half": replace(LLAMA, rope_style="interleaved_to_half"),
    "interleaved to half, partial, normed": replace(
        LLAMA,
        rope_style="interleaved_to_half",
        rotary_dim=16,
        table_width="half",
        qk_norm=True,
        norm_after_rope=True,
    ),
    "norm bias": replace(LLAMA, qk_norm=True, norm_kind="layer", norm_bias=True, rotary_dim=16),
    "norm bias after rope": replace(
        LLAMA, qk_norm=True, norm_bias=True, normed="q", norm_after_rope=True, norm_per_head=True
    ),
    "norm of v": replace(LLAMA, qk_norm=True, norm_offset=1.0, v_norm=True),
    "norm of v alone": replace(LLAMA, v_norm=True, norm_kind="layer", bias=True),
    "norm of rows": replace(LLAMA, qk_norm=True, norm_width="row", bias=True, v_norm=True),
    "layer norm of rows": replace(
        LLAMA,
        num_heads=6,
        qk_norm=True,
        norm_width="row",
        norm_kind="layer",
        norm_bias=True,
        head_dim=24,
        rotary_dim=24,
        bias=True,
        cache_dtype=torch.float8_e4m3fn,
        cache_scale="head",
        norm_after_rope=True,
    ),
    "fp8 cache": replace(
        LLAMA, cache_dtype=torch.float8_e4m3fn, cache_scale="head", clip=0.5, kv_repeat=2
    ),
    "fp8 cache that saturates": replace(
        LLAMA,
        rope_style="interleaved",
        cache_dtype=torch.float8_e5m2,
        cache_scale="scalar",
        cache_scale_multiplies=True,
    ),
    "no v": replace(LLAMA, writes_v=False, projection="packed"),
    "block table": replace(TABLE, slots="block_table", skipped=1),
    "block table that wraps": replace(
        TABLE, slots="block_table", skipped=1, indexing="torch", slot_dtype=torch.int32
    ),
    "ragged": replace(TABLE, slots="ragged", slot_dtype=torch.uint32),
    "ragged, many sequences": replace(
        TABLE,
        slots="ragged",
        num_tokens=6,
        num_pages=140,
        new_tokens=(0,) * 127 + (2, 0, 1, 0, 0, 3),
        cached_tokens=(5,) * 133,
        layout="vllm_pair",
    ),
}

# Cases that run with every kernel, because they concern the addresses of weights and stores.
EVERYWHERE = (
    *("grouped q", "n-major", "n-major, interleaved", "fp8 cache", "ragged", "no v"),
    *("gates", "gates behind"),
)
OPTION_RUNS = [
    (name, kernel)
    for index, name in enumerate(OPTIONS)
    for turn, kernel in enumerate(("swapped", "tiled"))
    if name in EVERYWHERE or index % 2 == turn
]
FINISHED_APART = {
    name: case
    for name, case in OPTIONS.items()
    if name in EVERYWHERE or case.norm_width == "row" or "repeated" in name
}

SWAPPED = {
    "slices of a head": SwappedConfig(8, 16, 32, 4, 2),
    "whole heads": SwappedConfig(64, 16, 32, 4, 2),
    "split K": SwappedConfig(64, 16, 32, 4, 2, split_k=3),
}
TILED = {
    "one head": TiledConfig(16, 1, 32, 4, 2),
    "two heads, persistent": TiledConfig(
        16, 2, 64, 4, 2, group_m=2, epilogue_parts=2, persistent=True, flatten=True
    ),
    "pairs first": TiledConfig(16, 2, 64, 4, 2, epilogue_parts=2, pairs_first=True),
}


def in_turn(configs: dict[str, Any]) -> list[Any]:
    """Returns each case with one of the configs in turn."""
    return [
        pytest.param(case, config, id=f"{case_name}-{name}")
        for number, (case_name, case) in enumerate(CASES.items())
        for turn, (name, config) in enumerate(configs.items())
        if number % len(configs) == turn
    ]


def problem_of(a: FusedQkvArguments) -> QkvProblem:
    return prepare(a).problem


def choice_of(a: FusedQkvArguments, config: Config) -> LoweringChoice:
    return fused_choice(problem_of(a), config, 0.0)


def fused_spec(a: FusedQkvArguments, config: Config, target: str = "sm100") -> KernelSpec:
    """Returns the kernel that projects, for a fused lowering with this config."""
    chip = get_target(target)
    return choices.specs_of(prepare(a), choice_of(a, config), chip)[-1]


def run_fused(a: FusedQkvArguments, config: Config) -> torch.Tensor:
    """Computes q by a fused kernel with this config. New memory holds NaN."""
    machine = Interpreter(replace(SM100, num_sms=3))
    choice = choice_of(a, config)
    program = drive(choices.choice_steps(prepare(a), choice, machine.target), machine)
    counters = [answer[1] for step, answer in program.steps if isinstance(step, SplitK)]
    assert not any(t.any() for t in counters), "the next launch would find counters in use"
    return program.outcome.result


def run_epilogue(a: FusedQkvArguments) -> torch.Tensor:
    """Runs the epilogue after GEMMs in fp32, so that its rounding is the only one."""
    machine, call = Interpreter(SM100), prepare(a)
    q = machine.perform(result_buffer(a))
    weights = [weight for weight in (a.q_weight, a.k_weight, a.v_weight) if weight is not None]
    rows = weight_rows(*weights)
    if rows is not None:
        # The weights are converted in place, so that they remain rows of one tensor.
        base = a.q_weight._base
        assert base is not None
        wide = base.float()
        weights = [wide.as_strided(w.shape, w.stride(), w.storage_offset()) for w in weights]
        inputs = made(project_packed(a.x.float(), weights, rows), machine)
    else:
        inputs = [made(project(a.x.float(), w.float()), machine) for w in weights]
    q_in, k_in, v_in = (*inputs, None)[:3]
    call.values.update(q_out=q, q=q_in, k=k_in, v=v_in)
    config = EpilogueConfig(4, 1 if call.epilogue.gate_run == 1 else 2, 4)
    if call.epilogue.row_norm:
        config = epilogue_config(call.epilogue, a.x.shape[0], SM100)
    machine.perform(epilogue_launch(call, config))
    return q


def epilogue_launch(call: StoreCall, config: EpilogueConfig) -> Launch:
    q, k, v = (call.values[name] for name in "qkv")
    grid = epilogue_grid(call.epilogue, config, call.values["num_tokens"])
    statics, known = epilogue_statics(call.epilogue, config), call.known | input_strides(q, k, v)
    return launch(EPILOGUE, SM100, grid, call.values, statics, **known)


def made(steps: Any, machine: Interpreter) -> Any:
    """Returns the result of some of the steps of a call."""
    return drive(steps, machine).outcome


def check(op: Any, a: Any, run_kernel: Any, tolerances: Any = None) -> None:
    """Compares the result and the caches with the reference in float64, and untouched slots bit for
    bit."""
    tolerances = tolerances or op.tolerances
    exact = in_float64(a)
    want = op.reference(exact)
    before = {name: getattr(a, name).clone() for name in op.mutated if getattr(a, name) is not None}
    got = run_kernel(a)
    if want is not None:
        assert tolerances[got.dtype].problem(got, want) is None
    for name, old in before.items():
        new, exact_new = getattr(a, name), getattr(exact, name)
        assert tolerances[new.dtype].problem(new, exact_new) is None, name
        untouched = exact_new == old.double()
        assert torch.equal(new.double()[untouched], old.double()[untouched]), name
        assert not untouched.all(), f"{name}: the case writes nothing"


@pytest.mark.parametrize(("case", "config"), in_turn(SWAPPED))
def test_swapped(case: AttentionCase, config: SwappedConfig) -> None:
    if case.qk_norm and config.block_p < 64:
        with pytest.raises(ValueError, match="whole heads"):
            run_fused(qkv_cache.OP.sample_inputs(case), config)
        return
    check(qkv_cache.OP, qkv_cache.OP.sample_inputs(case), lambda a: run_fused(a, config))


BY_KERNEL: dict[str, Any] = {
    "swapped": lambda a: run_fused(a, SWAPPED["whole heads"]),
    "tiled": lambda a: run_fused(a, TILED["one head"]),
    "epilogue": run_epilogue,
}


@pytest.mark.parametrize("kernel", BY_KERNEL)
@pytest.mark.parametrize("alone", "qkv")
def test_one_projection_alone_has_a_bias(alone: str, kernel: str) -> None:
    """In Whisper, for example, the keys have no bias and the two others have one."""
    a = qkv_cache.OP.sample_inputs(replace(LLAMA, bias=True))
    a = replace(a, **{f"{letter}_bias": None for letter in "qkv" if letter != alone})
    check(qkv_cache.OP, a, BY_KERNEL[kernel])


@pytest.mark.parametrize("kernel", BY_KERNEL)
@pytest.mark.parametrize("wide", "qkv")
def test_one_bias_is_of_another_dtype(wide: str, kernel: str) -> None:
    """The three biases cannot be read by one load, because one of them has another dtype."""
    a = qkv_cache.OP.sample_inputs(replace(LLAMA, bias=True))
    a = replace(a, **{f"{wide}_bias": getattr(a, f"{wide}_bias").float()})
    check(qkv_cache.OP, a, BY_KERNEL[kernel])


NORMS_OF_X: dict[str, dict[str, Any]] = {
    "rms": {"input_norm": "rms", "num_tokens": 37, "bias": True, "delta": True, "hidden": 200},
    "weightless": {"input_norm": "weightless", "projection": "n_major"},
    "offset": {"input_norm": "rms", "input_norm_offset": 1.0, "num_tokens": 1, "clip": 2.0},
    "layer": {"input_norm": "layer", "num_tokens": 5, "bias": True, "hidden": 200},
    "layer offset": {
        "input_norm": "layer_unbiased",
        "input_norm_offset": 1.0,
        "projection": "n_major",
    },
    "layer bare": {"input_norm": "layer_bare", "num_tokens": 1, "dtype": torch.float16},
}


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        pytest.param(changes, config, id=f"{name}-{kind}")
        for row, (name, changes) in enumerate(NORMS_OF_X.items())
        for column, (kind, config) in enumerate(SWAPPED.items())
        if name == "layer" or row % len(SWAPPED) == column
    ],
)
def test_swapped_norms_x(changes: dict[str, Any], config: SwappedConfig) -> None:
    """x is multiplied by the norm's weight and rounded before the product, as in the graph."""
    a = qkv_cache.OP.sample_inputs(replace(LLAMA, **changes))
    check(qkv_cache.OP, a, lambda a: run_fused(a, config), plain.LIBRARY)


@pytest.mark.parametrize(("case", "config"), in_turn(TILED))
def test_tiled(case: AttentionCase, config: TiledConfig) -> None:
    arguments = qkv_cache.OP.sample_inputs(case)
    obstacle = tiled_obstacle(problem_of(arguments))
    awkward = case.head_dim not in (32, 64, 128) or case.rotary_dim == 12
    assert (obstacle is not None) == awkward, obstacle
    if not awkward:
        check(qkv_cache.OP, arguments, lambda a: run_fused(a, config))


@pytest.mark.parametrize(("name", "kernel"), OPTION_RUNS)
def test_options(name: str, kernel: str) -> None:
    case = OPTIONS[name]
    arguments = qkv_cache.OP.sample_inputs(case)
    problem = problem_of(arguments)
    obstacle = {"swapped": swapped_obstacle, "tiled": tiled_obstacle}[kernel](problem)
    if case.norm_width == "row":
        assert "all heads" in (obstacle or "")
    elif kernel == "swapped":
        assert obstacle is None
        check(qkv_cache.OP, arguments, lambda a: run_fused(a, SWAPPED["whole heads"]))
    elif case.head_dim == 24:
        assert "head_dim 24" in (obstacle or "")
    else:
        assert obstacle is None
        several = heads_fit(problem, 2)
        assert several == (case.projection != "grouped" and case.gate_run != 1)
        config = TILED["two heads, persistent" if several else "one head"]
        check(qkv_cache.OP, arguments, lambda a: run_fused(a, config))


@pytest.mark.parametrize("case", (CASES | FINISHED_APART).values(), ids=CASES | FINISHED_APART)
def test_epilogue(case: AttentionCase) -> None:
    check(qkv_cache.OP, qkv_cache.OP.sample_inputs(case), run_epilogue)


def run_store(a: KvStoreArguments) -> None:
    Interpreter(SM100).perform(epilogue_launch(prepare_store(a), EpilogueConfig(2, 1, 4)))


@pytest.mark.parametrize(
    "case",
    [
        LLAMA,
        replace(LLAMA, writes_v=False),
        replace(LLAMA, head_dim=80, rotary_dim=32, dtype=torch.float32),
        replace(STATIC, rope_style="interleaved"),
    ],
    ids=["llama", "k alone", "fp32, head_dim 80", "static cache"],
)
def test_store(case: AttentionCase) -> None:
    check(cache_store.OP, cache_store.OP.sample_inputs(case), run_store)


#: Numbers that fit, ties and numbers that overflow in both formats, with both signs.
EDGES = (0.0, 3.3, 440.0, 448.0, 464.0, 464.1, 480.0, 5e4, 57344.0, 61439.0, 61440.0, 7e4, 1e30)
BEYOND = torch.tensor([*EDGES, torch.inf, torch.nan, *(-x for x in EDGES), -torch.inf, 1.0, 2.0])


@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_an_8_bit_cache_cannot_hold(dtype: torch.dtype, saturates: bool) -> None:
    """Tests numbers beyond the range of an 8-bit cache. The kernel stores the largest number, or
    the result of IEEE rounding: infinity, or NaN if the format has no infinity."""
    case = replace(LLAMA, rope_style="none", rotary_dim=0, cache_dtype=dtype, dtype=torch.float32)
    arguments = replace(cache_store.OP.sample_inputs(case), cache_saturates=saturates)
    arguments.k.copy_(BEYOND.repeat(8)[: arguments.k[0].numel()].view(arguments.k[0].shape))
    ours, reference = (
        replace(arguments, k_cache=arguments.k_cache.clone(), v_cache=arguments.v_cache.clone())
        for _ in range(2)
    )
    run_store(ours)
    cache_store.reference(reference)
    limit, last = torch.finfo(dtype).max, 464.0 if dtype == torch.float8_e4m3fn else 61439.0
    held = BEYOND.clamp(-limit, limit)
    lost = torch.nan if dtype == torch.float8_e4m3fn else torch.inf
    wanted = held if saturates else held.where(~(BEYOND.abs() > last), lost * BEYOND.sign())
    wanted = wanted.to(dtype).float()
    for cache in (ours.k_cache, reference.k_cache):
        page, slot = divmod(int(arguments.slot_mapping[0]), case.page_size)
        written = cache[page, slot].float().flatten()[: len(BEYOND)]
        torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float8_e5m2 and not saturates:  # every release of torch does so
        torch.testing.assert_close(BEYOND.to(dtype).float(), wanted, rtol=0, atol=0, equal_nan=True)


def test_store_takes_any_strides() -> None:
    arguments = cache_store.OP.sample_inputs(LLAMA)
    turned = arguments.k.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert turned.stride(-1) != 1
    check(cache_store.OP, replace(arguments, k=turned), run_store)


def with_rows_apart(case: AttentionCase, stride: int) -> FusedQkvArguments:
    """Returns a call without memory whose rows of x are `stride` elements apart."""
    a = qkv_cache.OP.sample_inputs(case, "meta")
    return replace(a, x=a.x.as_strided(a.x.shape, (stride, 1)))


@pytest.mark.parametrize("far", [False, True])
def test_rows_and_heads_far_apart_are_counted_in_64_bits(far: bool) -> None:
    source = emit(
        fused_spec(with_rows_apart(LLAMA, 2**24 if far else 2**15), SWAPPED["whole heads"])
    )
    (line,) = [line for line in source.splitlines() if "x_ptrs =" in line]
    assert ("int64" in line) == far
    store = cache_store.OP.sample_inputs(LLAMA, "meta")
    token, _, dim = store.k.stride()
    heads = store.k.as_strided(store.k.shape, (token, 2**24 if far else 2**23, dim))
    call = prepare_store(replace(store, k=heads))
    before = emit(epilogue_launch(call, EpilogueConfig(4, 2, 4)).spec).partition("tl.load(")[0]
    assert bool(re.search(r"\bheads\w*\.to\(tl\.int64\)", before)) == far


def test_tables_of_two_dtypes_are_left_to_the_reference() -> None:
    arguments = qkv_cache.OP.sample_inputs(LLAMA)
    for one in (arguments, cache_store.OP.sample_inputs(LLAMA)):
        op = qkv_cache.OP if one is arguments else cache_store.OP
        choice = op.choose("cuda", replace(one, sin=one.sin.float(), cos=one.cos.bfloat16()))
        assert choice.lowering.name == "reference"
        assert "cos is torch.bfloat16, but sin is torch.float32" in choice.rejected[0][1]


@pytest.mark.parametrize("static_tokens", [False, True])
def test_static_counts_are_baked(static_tokens: bool) -> None:
    arguments = replace(qkv_cache.OP.sample_inputs(STATIC), static_tokens=static_tokens)
    spec = fused_spec(arguments, SWAPPED["whole heads"])
    assert (("num_tokens", 6) in spec.constants) == static_tokens
    check(qkv_cache.OP, arguments, lambda a: run_fused(a, SWAPPED["whole heads"]))


@pytest.mark.parametrize("runner", ["swapped", "tiled"])
def test_out_of_range_slots_are_masked(runner: str) -> None:
    """A GPU cannot raise an error for such a slot. The token is left out, and nothing else is
    written."""
    arguments = qkv_cache.OP.sample_inputs(LLAMA)
    outside = arguments.slot_mapping.clone()
    capacity = LLAMA.num_pages * LLAMA.page_size
    outside[1], outside[3] = capacity, 2**40
    legal = arguments.slot_mapping.clone()
    legal[1] = legal[3] = -1
    wrong = replace(
        arguments,
        slot_mapping=outside,
        k_cache=arguments.k_cache.clone(),
        v_cache=arguments.v_cache.clone(),
    )
    skipping = replace(arguments, slot_mapping=legal)
    for a in (wrong, skipping):
        run_fused(a, SWAPPED["split K"] if runner == "swapped" else TILED["one head"])
    assert torch.equal(wrong.k_cache, skipping.k_cache)
    assert torch.equal(wrong.v_cache, skipping.v_cache)


def test_infinities_stay_where_they_are() -> None:
    """V is not rotated, so an infinity in one dim must not turn another dim into NaN."""
    arguments = qkv_cache.OP.sample_inputs(replace(LLAMA, dtype=torch.float16))
    arguments.v_weight[:, 0] = 60000.0
    arguments.x.abs_().add_(1.0)
    run_fused(arguments, SWAPPED["slices of a head"])
    pages, offsets = arguments.slot_mapping // 16, arguments.slot_mapping % 16
    rows = arguments.v_cache[pages, offsets]
    assert rows[..., 0].isinf().all()
    assert rows[..., 1:].isfinite().all()


def test_fp32_has_no_fused_kernel() -> None:
    problem = problem_of(qkv_cache.OP.sample_inputs(replace(LLAMA, dtype=torch.float32)))
    assert "fp32" in (tiled_obstacle(problem) or "")
    assert "fp32" in (swapped_obstacle(problem) or "")


def test_a_norm_after_the_rotation_wants_whole_heads() -> None:
    arguments = qkv_cache.OP.sample_inputs(OPTIONS["norm after rope"])
    with pytest.raises(ValueError, match="whole heads"):
        fused_spec(arguments, TILED["pairs first"])
