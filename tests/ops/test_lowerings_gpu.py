"""The CUDA lowerings at real sizes, each forced in turn, against the reference in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tilewright.codegen.qkv_plan import candidates, fused_choice, library_choice, plan_fused_qkv
from tilewright.ops import kernel_launch, qkv_cache
from tilewright.ops.lowerings import device_target, prepare, run
from tilewright.ops.qkv_cache import FusedQkvArguments
from tilewright.ops.samples import AttentionCase

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


def samples(case: AttentionCase) -> FusedQkvArguments:
    return qkv_cache.OP.sample_inputs(case, device="cuda")


def in_float64(a: FusedQkvArguments) -> FusedQkvArguments:
    wide = {
        f.name: value.double()
        for f in fields(a)
        if isinstance(value := getattr(a, f.name, None), torch.Tensor) and value.is_floating_point()
    }
    return replace(a, **wide)


def with_fresh_caches(a: FusedQkvArguments) -> FusedQkvArguments:
    caches = {"k_cache": a.k_cache.clone()}
    if a.v_cache is not None:
        caches["v_cache"] = a.v_cache.clone()
    return replace(a, **caches)


def results(a: FusedQkvArguments, choice: Any) -> list[torch.Tensor]:
    call = prepare(a)
    call.q.fill_(torch.nan)
    run(call, choice)
    return [call.q, a.k_cache, *([] if a.v_cache is None else [a.v_cache])]


def check_all_lowerings(arguments: FusedQkvArguments) -> list[str]:
    """Every lowering is right and repeats itself bit for bit; their names."""
    exact = in_float64(arguments)
    want = [qkv_cache.reference(exact), exact.k_cache, exact.v_cache]
    target = device_target(arguments.x.device)
    assert target is not None
    call = prepare(arguments)
    tokens = arguments.x.shape[0]
    choices = [
        fused_choice(call.problem, config, target, 0.0, measured=False)
        for config in candidates(call.problem, tokens, target)
    ]
    choices.append(library_choice(call.problem, tokens, target, call.rows is not None, None))
    tolerance = qkv_cache.OP.tolerances[arguments.x.dtype]
    for choice in choices:
        first = results(with_fresh_caches(arguments), choice)
        second = results(with_fresh_caches(arguments), choice)
        for got, again, right in zip(first, second, want, strict=False):
            if choice.name == "library":
                # It rounds between its GEMM and the epilogue, as the unfused graph does.
                assert (got - right).norm() < 2.0**-8 * right.norm(), choice.reason
            else:
                assert tolerance.problem(got, right) is None, choice.reason
            assert torch.equal(got, again), choice.reason
    return [choice.name for choice in choices]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_lowering_is_right_and_repeats_itself(case: AttentionCase) -> None:
    arguments = samples(case)
    assert (prepare(arguments).rows is not None) == (case.projection != "separate")
    assert len(check_all_lowerings(arguments)) > 3 or case.head_dim == 80


def test_graphs_of_split_k_launches_may_run_side_by_side() -> None:
    """Two graphs captured on one stream, replayed on two at once: counters are not shared."""
    arguments = samples(replace(LLAMA, num_tokens=16, qk_norm=True, hidden=4096))
    target = device_target(arguments.x.device)
    assert target is not None
    call = prepare(arguments)
    config = next(
        c
        for c in candidates(call.problem, 16, target)
        if getattr(c, "split_k", 1) == 4 and c.num_stages >= 4
    )
    choice = fused_choice(call.problem, config, target, 0.0, measured=False)
    right = results(with_fresh_caches(arguments), choice)[0].clone()
    torch.cuda.synchronize()
    calls, graphs = [], []
    for _ in range(2):
        calls.append([prepare(with_fresh_caches(arguments)) for _ in range(20)])
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for captured in calls[-1]:
                run(captured, choice)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for captured in (call for batch in calls for call in batch):
            assert torch.equal(captured.q, right)
            captured.q.fill_(torch.nan)
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
    """Unaligned x goes elsewhere than TMA, unaligned tables and slots are read as they are."""
    arguments = samples(replace(LLAMA, hidden=1024, num_tokens=100))

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        moved = flat[1:].view(tensor.shape)
        return moved.copy_(tensor)

    names = ("x", "cos", "sin", "slot_mapping")
    odd = replace(arguments, **{name: shifted(getattr(arguments, name)) for name in names})
    assert odd.x.data_ptr() % 16
    assert set(check_all_lowerings(odd)) == {"swapped", "library"}
