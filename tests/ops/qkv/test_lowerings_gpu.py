"""Compares the CUDA lowerings at real sizes with the reference in float64. Each lowering is forced
in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.agreement import in_float64, with_fresh_caches
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.plan import fused_choice, library_choice, plan_fused_qkv, ranked
from tilewright.ops.formats.fp8 import SATURATED_BY_TORCH
from tilewright.ops.qkv import cache_store, qkv_cache
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.choices import run
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.qkv.tuning import NanMemory
from tilewright.ops.runtime import launch as kernel_launch
from tilewright.ops.runtime.device import device_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

LLAMA = AttentionCase(
    "llama",
    num_tokens=37,
    hidden=1000,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    num_pages=200,
    page_size=16,
    rope_style="half",
    rotary_dim=128,
)
CASES = {
    "one token": replace(LLAMA, num_tokens=1),
    "37 tokens": LLAMA,
    "300 tokens": replace(LLAMA, num_tokens=300),
    "1500 tokens": replace(LLAMA, num_tokens=1500),
    "packed": replace(LLAMA, projection="packed", num_tokens=130),
    "per head": replace(LLAMA, projection="per_head", num_kv_heads=8, bias=True),
    "norm": replace(LLAMA, qk_norm=True, num_tokens=70),
    "input norm": replace(LLAMA, input_norm="rms", num_tokens=9),
    "input layer norm": replace(LLAMA, input_norm="layer", num_tokens=1),
    "input norm, norm": replace(LLAMA, input_norm="rms", qk_norm=True, num_tokens=1),
    "interleaved": replace(LLAMA, rope_style="interleaved", rotary_dim=64, num_tokens=70),
    "head_dim 64": replace(LLAMA, head_dim=64, rotary_dim=64, num_tokens=140),
    "head_dim 80": replace(LLAMA, head_dim=80, rotary_dim=32, num_tokens=140),
    "static cache": replace(
        LLAMA,
        num_tokens=96,
        num_pages=4,
        page_size=64,
        layout="static_cache",
        slots="per_sequence",
        indexing="torch",
        tokens_per_row=4,
        dtype=torch.float16,
    ),
}


NORMED = replace(LLAMA, qk_norm=True, norm_per_head=True)
TABLE = replace(LLAMA, num_tokens=300, new_tokens=(0, 1, 0, 215, 64, 20, 0), num_pages=60)
TABLE = replace(TABLE, cached_tokens=(40, 5, 0, 17, 0, 300, 8))
FP8 = replace(LLAMA, cache_dtype=torch.float8_e4m3fn, cache_scale="head")
OPTIONS = {
    "grouped q": replace(LLAMA, projection="grouped", bias=True),
    "n-major": replace(LLAMA, projection="n_major", bias=True),
    "n-major, interleaved": replace(LLAMA, projection="n_major", rope_style="interleaved"),
    "kv heads repeated, clipped": replace(LLAMA, kv_repeat=4, bias=True, clip=0.7),
    "layer norm": replace(NORMED, norm_kind="layer"),
    "norm after rope": replace(NORMED, norm_after_rope=True, norm_offset=1.0),
    "no norm weights": replace(LLAMA, weightless_norm=True),
    "interleaved to half": replace(LLAMA, rope_style="interleaved_to_half", rotary_dim=64),
    "norm of rows": replace(NORMED, norm_width="row", bias=True),
    "layer norm of rows": replace(NORMED, norm_width="row", norm_kind="layer"),
    "fp8 cache": FP8,
    "fp8 cache, multiplied": replace(
        FP8, cache_dtype=torch.float8_e5m2, cache_scale="scalar", cache_scale_multiplies=True
    ),
    "no v": replace(LLAMA, writes_v=False, projection="packed"),
    "block table": replace(TABLE, slots="block_table", skipped=3),
    "ragged": replace(TABLE, slots="ragged", slot_dtype=torch.uint32, layout="max_pair"),
}


def samples(case: AttentionCase) -> FusedQkvArguments:
    return qkv_cache.OP.sample_inputs(case, device="cuda")


def results(a: FusedQkvArguments, choice: Any) -> list[torch.Tensor]:
    q = run(a, choice, NanMemory(a.x.device))
    return [q, a.k_cache, *([] if a.v_cache is None else [a.v_cache])]


def check_lowerings(arguments: FusedQkvArguments, best: int | None = None) -> list[str]:
    """Checks that every lowering (the `best` of each kind) is right and gives the same bits again.
    Returns the names."""
    exact = in_float64(arguments)
    want = [qkv_cache.reference(exact), exact.k_cache, exact.v_cache]
    target = device_target(arguments.x.device)
    assert target is not None
    call = prepare(arguments)
    tokens = arguments.x.shape[0]
    choices = [
        fused_choice(call.problem, config, seconds)
        for seconds, config in ranked(call.problem, tokens, target)
    ]
    choices.sort(key=lambda choice: choice.seconds)
    for name in ("swapped", "tiled") if best is not None else ():
        for choice in [choice for choice in choices if choice.name == name][best:]:
            choices.remove(choice)
    choices.append(library_choice(call.problem, tokens, target, call.rows is not None, None))
    for choice in choices:
        first = results(with_fresh_caches(arguments), choice)
        second = results(with_fresh_caches(arguments), choice)
        for got, again, right in zip(first, second, want, strict=False):
            rounded_twice = choice.name == "library" or choice.norms_x
            check_result(got, right, rounded_twice, what=choice.reason)
            assert torch.equal(got.view(torch.uint8), again.view(torch.uint8)), choice.reason
    return [choice.name for choice in choices]


def check_result(got: torch.Tensor, right: torch.Tensor, rounded_twice: bool, what: str) -> None:
    tolerance = qkv_cache.OP.tolerances[got.dtype]
    if not rounded_twice:
        assert tolerance.problem(got, right) is None, what
        return
    # The library rounds between its GEMM and the epilogue. A kernel that computes the norm of x
    # rounds before its product, as the unfused graph does.
    if got.dtype.itemsize == 1:
        right = right.clamp(-torch.finfo(got.dtype).max, torch.finfo(got.dtype).max)
    allowed = max(2.0**-8, tolerance.relative)
    assert (got.double() - right).norm() <= allowed * right.norm(), what


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_lowering_is_right_and_repeats_itself(case: AttentionCase) -> None:
    arguments = samples(case)
    assert (prepare(arguments).rows is not None) == (case.projection != "separate")
    assert len(check_lowerings(arguments)) > 3 or case.head_dim == 80


@pytest.mark.parametrize("tokens", [20, 300])
@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_right_lowerings(case: AttentionCase, tokens: int) -> None:
    if not case.new_tokens:
        case = replace(case, num_tokens=tokens)
    names = set(check_lowerings(samples(case), best=3))
    fused = "swapped" if case.num_tokens <= 128 else "tiled"
    assert names >= {"library"} | ({fused} if case.norm_width == "head" else set())


SAMPLES = {case.name: case for case in qkv_cache.OP.cases if case.dtype != torch.float64}


@pytest.mark.parametrize("case", SAMPLES.values(), ids=SAMPLES)
def test_no_sample_falls_back_to_the_reference(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")  # a failure raises an error
    arguments = samples(case)
    assert qkv_cache.OP.choose("cuda", arguments).lowering.name == "emitted_kernel"
    exact, written = in_float64(arguments), with_fresh_caches(arguments)
    want = [qkv_cache.reference(exact), exact.k_cache, exact.v_cache]
    got = [qkv_cache.OP.call(written), written.k_cache, written.v_cache]
    for actual, right in zip(got, want, strict=True):
        if actual is not None:
            check_result(actual, right, rounded_twice=True, what=case.name)


@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_an_8_bit_cache_cannot_hold(dtype: torch.dtype, saturates: bool) -> None:
    """Tests numbers beyond the range of an 8-bit cache. The kernel gives the reference's bits.
    Without saturation, it gives the bits of PyTorch's cast, unless this cast saturates."""
    case = replace(LLAMA, rope_style="none", rotary_dim=0, cache_dtype=dtype, dtype=torch.float32)
    arguments = cache_store.OP.sample_inputs(case, device="cuda")
    edges = (448.0, 464.0, 464.1, 500.0, 57344.0, 61439.0, 61440.0, 7e4, 1e30, torch.inf, torch.nan)
    values = torch.tensor([*edges, *(-x for x in edges), -0.0, 3.3], device="cuda")
    arguments.k.copy_(values.repeat(100)[: arguments.k[0].numel()].view_as(arguments.k[0]))
    arguments = replace(arguments, cache_saturates=saturates)
    ours, expected = with_fresh_caches(arguments), with_fresh_caches(arguments)
    assert cache_store.OP.choose("cuda", ours).lowering.name == "emitted_kernel"
    cache_store.OP.call(ours)
    cache_store.reference(expected)
    got, want = (a.k_cache.float() for a in (ours, expected))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if not saturates and dtype not in SATURATED_BY_TORCH:
        cast = values.to(dtype).float()
        page, slot = divmod(int(arguments.slot_mapping[0]), case.page_size)
        written = got[page, slot].flatten()[: len(values)]
        torch.testing.assert_close(written, cast, rtol=0, atol=0, equal_nan=True)


STORES = {case.name: case for case in cache_store.OP.cases if case.dtype != torch.float64}


@pytest.mark.parametrize("case", STORES.values(), ids=STORES)
def test_stores(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    arguments = cache_store.OP.sample_inputs(case, device="cuda")
    exact, written = in_float64(arguments), with_fresh_caches(arguments)
    cache_store.reference(exact)
    cache_store.OP.call(written)
    for name in ("k_cache", "v_cache"):
        if getattr(written, name) is not None:
            actual, right = getattr(written, name), getattr(exact, name)
            check_result(actual, right, rounded_twice=False, what=name)


def test_graphs_of_split_k_launches_may_run_side_by_side() -> None:
    """Two graphs of split-K launches are captured on one stream and replayed on two streams at
    once. They must not share counters."""
    arguments = samples(replace(LLAMA, num_tokens=16, qk_norm=True, hidden=4096))
    target = device_target(arguments.x.device)
    assert target is not None
    call = prepare(arguments)
    config = next(
        c
        for c in candidates(call.problem, 16, target)
        if getattr(c, "split_k", 1) == 4 and c.num_stages >= 4
    )
    choice = fused_choice(call.problem, config, 0.0)
    right = results(with_fresh_caches(arguments), choice)[0].clone()
    torch.cuda.synchronize()
    made, graphs, calls = [], [], []
    for _ in range(2):
        calls.append([with_fresh_caches(arguments) for _ in range(20)])
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            made.append([run(captured, choice) for captured in calls[-1]])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for q in (q for batch in made for q in batch):
            assert torch.equal(q, right)
            q.fill_(torch.nan)
        torch.cuda.synchronize()


def test_no_kernel_is_compiled_for_a_token_count() -> None:
    arguments = samples(replace(LLAMA, num_tokens=60))
    target = device_target(arguments.x.device)
    assert target is not None

    def call(tokens: int) -> None:
        part = replace(
            arguments,
            x=arguments.x[:tokens],
            slot_mapping=arguments.slot_mapping[:tokens],
            cos=arguments.cos[:tokens],
            sin=arguments.sin[:tokens],
        )
        qkv_cache.OP.call(part)

    plan = plan_fused_qkv(prepare(arguments).problem, target)
    assert plan.choice(33) is plan.choice(60)
    call(33)
    before = kernel_launch.compiled_kernel.cache_info().currsize
    for tokens in (34, 48, 50, 60):
        call(tokens)
    assert kernel_launch.compiled_kernel.cache_info().currsize == before


def test_tensors_off_the_16_byte_grid() -> None:
    """Tests unaligned tensors: an unaligned x is not loaded by TMA, and unaligned tables and slots
    are read as they are."""
    arguments = samples(replace(LLAMA, hidden=1024, num_tokens=100))

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        moved = flat[1:].view(tensor.shape)
        return moved.copy_(tensor)

    names = ("x", "cos", "sin", "slot_mapping")
    odd = replace(arguments, **{name: shifted(getattr(arguments, name)) for name in names})
    assert odd.x.data_ptr() % 16
    assert set(check_lowerings(odd)) == {"swapped", "library"}
