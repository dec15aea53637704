"""Compares a recorded step with sums that were computed by hand. Kernels are named as Triton,
Inductor and cuBLAS name them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.tools.schemas import schema_checked
from tilewright.compiler.report.step import Amounts, Part, Step
from tilewright.tools.step.profile import Launch, Profile, Row, TraceError, profile_of
from tilewright.tools.step.tables import render_profile, render_step

QKV = "qkv_projection_swapped_f883e048c496"
DECODE, MERGE = "attention_decode_cbc8982150cb", "attention_merge_d0fdcc67786e"
NORM = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0"
HEAD = "nvjet_tst_64x8_64x16_1x4_h_bz_TNT"
EAGER = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, "
    "std::array<char*, 1ul> >(int, at::native::FillFunctor<long>, std::array<char*, 1ul>)"
)
FILL = "Memset (Device)"


def fused(layer, name, *kernels, floor=10.0):
    amounts = Amounts(weights=43 * 10**6, launches=len(kernels), floor_us=floor, modelled_us=12.5)
    return Part(f"model.layers.{layer}", "fused", name, f"{name}_{layer}", amounts, (), kernels)


STEP = Step(
    "sm90",
    1000,
    (
        fused(0, "qkv_cache", QKV),
        fused(0, "cache_attention", DECODE, MERGE, floor=1.0),
        fused(1, "qkv_cache", QKV),
        fused(1, "cache_attention", DECODE, MERGE, floor=1.0),
        Part("", "inductor", "pow, mean", "pow_1", Amounts(launches=1, modelled_us=2.5)),
        Part("", "library", "linear", "logits", Amounts(launches=1, floor_us=50.0)),
    ),
)
# The name, start and duration of each launch of one step. MERGE waits for DECODE and starts before
# DECODE ends.
LAUNCHES = (
    (QKV, 0, 14),
    (DECODE, 15, 5),
    (MERGE, 18, 4),
    (QKV, 22, 16),
    (DECODE, 38, 5),
    (MERGE, 42, 3),
    (FILL, 45, 1),
    (EAGER, 46, 2),
    (NORM, 50, 3),
    (HEAD, 53, 60),
)


def trace_of(*launches, steps=1, length=200.0):
    """Returns a trace in the form of torch.profiler, reduced to a few of its fields. The last
    events come first."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 9.5,
         "pid": 77, "tid": 77, "args": {"cbid": 311, "correlation": 42}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 42, "ts": 1, "pid": 77, "tid": 77},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 999},
    ]  # fmt: skip
    for i in range(steps):
        for name, start, duration in launches:
            kind = "gpu_memset" if name == FILL else "kernel"
            at = 1000.5 + i * length + start
            events.append(
                {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 7, "ts": at,
                 "dur": duration, "args": {"device": 0, "stream": 7, "correlation": 42,
                                           "grid": [132, 1, 1], "block": [128, 1, 1]}}
            )  # fmt: skip
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": events[::-1]}


def times(profile):
    return {(row.kind, row.name, row.scope): row.us for row in profile.rows}


def test_every_microsecond_of_a_step_is_somebodys():
    profile = profile_of(trace_of(*LAUNCHES), STEP)
    assert times(profile) == {
        ("fused", "qkv_cache", "model.layers.0"): 14,
        # Only the part of MERGE after the end of DECODE counts.
        ("fused", "cache_attention", "model.layers.0"): 5 + 2,
        ("fused", "qkv_cache", "model.layers.1"): 16,
        ("fused", "cache_attention", "model.layers.1"): 5 + 2,
        ("copy", FILL, ""): 1,
        ("torch", EAGER, ""): 2,
        ("inductor", NORM, ""): 3,
        ("library", HEAD, ""): 60,
        ("gap", "nothing running", ""): 1 + 2,
    }
    assert profile.us == 113 == sum(row.us for row in profile.rows)
    assert profile.of("fused") == 44
    assert profile.of("gap") == 3
    assert profile.floor_us == STEP.total.floor_us == 72
    assert profile.of_floor == pytest.approx(72 / 113)


def test_the_furthest_from_its_floor_comes_first_with_equal_layers_as_one():
    folded = profile_of(trace_of(*LAUNCHES), STEP).folded()
    head, attention, qkv = folded[:3]
    assert (head.name, head.floor_us, head.distance_us) == (HEAD, None, 60)
    assert (attention.name, attention.count, attention.floor_us) == ("cache_attention", 4, 2)
    assert attention.kernels == (DECODE, MERGE)
    expected = ("qkv_cache", "model.layers.*", 2, 30, 20)
    assert (qkv.name, qkv.scope, qkv.count, qkv.us, qkv.floor_us) == expected
    assert [row.distance_us for row in folded] == sorted(
        (row.distance_us for row in folded), reverse=True
    )


def test_steps_are_told_from_our_kernels_and_the_time_between_them_is_nobodys():
    profile = profile_of(trace_of(*LAUNCHES, steps=3), STEP)
    assert profile.steps == 3
    assert times(profile) == times(profile_of(trace_of(*LAUNCHES), STEP))
    assert profile.us == 113
    assert {row.count for row in profile.rows if row.name == HEAD} == {1}


def test_sites_that_launch_one_kernel_twice_share_its_launches():
    twice = [(QKV, 0, 1), (QKV, 1, 2), (QKV, 3, 4), (QKV, 7, 8)]
    profile = profile_of(trace_of(*twice), STEP, steps=1)
    assert times(profile) == {
        ("fused", "qkv_cache", "model.layers.0"): 3,
        ("fused", "qkv_cache", "model.layers.1"): 12,
    }


def test_two_sites_of_a_pattern_in_a_layer_stay_apart():
    out, down = "streamed_linear_1884023b2bb6", "streamed_linear_9d24db569090"
    step = Step("sm90", None, (fused(0, "linear_residual", out), fused(0, "linear_residual", down)))
    profile = profile_of(trace_of((out, 0, 11), (down, 11, 33)), step)
    assert sorted((row.kernels, row.us) for row in profile.rows) == [((out,), 11), ((down,), 33)]
    assert len(profile.folded()) == 2


def test_a_kernel_of_ours_that_the_report_does_not_know_is_ours_still():
    profile = profile_of(trace_of(("streamed_linear_000000000000", 0, 5)), STEP)
    (row,) = profile.rows
    assert (row.kind, row.floor_us) == ("fused", None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (QKV, "fused"),
        ("triton_tem_fused_mm_3", "inductor"),
        ("triton_poi_fused_add_0_1a2b3c4d5e6f", "inductor"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "library"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(Params)", "library"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>()", "library"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>()", "library"),
        ("void at_cuda_detail::cub::DeviceScanKernel<int>()", "torch"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert Launch(name, "kernel", 0.0, 1.0).kind == kind


@pytest.mark.parametrize(
    ("trace", "steps", "said"),
    [
        ({"traceEvents": []}, None, "no kernels"),
        ({}, None, "no kernels"),
        ({"traceEvents": [3]}, None, "no kernels"),
        (trace_of(*LAUNCHES), 3, "10 launches cannot be divided into 3 equal steps"),
        (trace_of(*LAUNCHES[:4]), None, "not have a whole number of steps"),
        (trace_of((QKV, 0, 1)), None, "not have a whole number of steps"),
        (trace_of((NORM, 0, 1), (HEAD, 1, 1)), 2, "launch different kernels"),
    ],
)
def test_what_are_no_steps_of_the_model_is_said(trace, steps, said):
    with pytest.raises(TraceError, match=said):
        profile_of(trace, STEP, steps)


def shown(table):
    from rich.console import Console

    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_tables():
    profile = profile_of(trace_of(*LAUNCHES), STEP)
    text = shown(render_profile(profile, STEP))
    assert "A step of 113.0 us, of which the floor of 72.0 us on sm90 is 64 % (mean of 1)" in text
    assert "qkv_cache" in text
    many = tuple(Row("torch", f"kernel {i}", "", (), 1, float(i)) for i in range(30))
    assert "6 more" in shown(render_profile(Profile(1, 435.0, 72.0, many), STEP))
    step = shown(render_step(STEP))
    assert "model.layers.0 … 1 (2 layers)" in step
    assert "left to Inductor: 2.5 µs in 2 kernels" in step
    assert "--present" not in step


def test_a_trace_from_elsewhere_is_read_without_a_gpu(command, tmp_path):
    report = command("inspect", "mine.py:make", "--json", "--no-kernels", "--target", "sm90")
    names = [kernel["name"] for kernel in json.loads(report.stdout)["kernels"]]
    launches = [(name, 20 * i, 10) for i, name in enumerate(names * 2)]
    (tmp_path / "trace.json").write_text(json.dumps(trace_of(*launches, steps=2)))
    read = ("bench", "--profile", "mine.py:make", "--trace", "trace.json", "--target", "sm90")
    done = command(*read, "--json")
    assert done.exit_code == 0, done.stderr
    profile = schema_checked("bench", done.stdout)["profile"]
    assert (profile["steps"], profile["kinds"]["fused"]) == (2, 20 * len(names))
    assert profile["floor_us"] > 0
    assert "furthest from the floor" in command(*read).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "none.json", "--target", "sm90"), "--trace: cannot read none.json"),
        (("--trace", "mine.py"), "--trace needs --target"),
        pytest.param(
            (),
            "--profile needs an NVIDIA GPU, and there is none here; --trace FILE --target",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_what_cannot_be_profiled_is_one_line(command, arguments, said):
    done = command("bench", "--profile", "mine.py:make", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == ""
