"""Compares the cost model of sm100 with times of other projects' kernels that were published.

    python benchmarks/published.py

The measurements are from a B200, on which no kernel of tilewright has run. Each row is a figure
that a public thread states, with the thread's address. If the thread gives a rate, the time is the
product's FLOPs divided by this rate. The modelled time is that of a part of a step with this shape
(`compiler/report/times.py`). Results go to benchmarks/results/published_b200.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from timing import keep

from tilewright.codegen.targets import get_target
from tilewright.compiler.report.bars import percent_of
from tilewright.compiler.report.times import spent_of
from tilewright.compiler.report.traffic import Unit
from tilewright.compiler.report.work import reached
from tilewright.ops.cache.read import CacheRead

SM100 = get_target("sm100")
#: For each format, the bytes of a number. For nvfp4 they include the number's share of a scale.
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8e4nv": 1.0, "nvfp4": 0.5625}
VLLM_GEMM = "https://github.com/vllm-project/vllm/pull/19566"
CUTLASS_LINEAR = "https://github.com/NVIDIA/cutlass/issues/2923"
FLASHINFER_FP4 = "https://github.com/flashinfer-ai/flashinfer/issues/1732"
FLASHINFER_CUDNN = "https://github.com/flashinfer-ai/flashinfer/pull/1979"
FLASHINFER_MOE = "https://github.com/flashinfer-ai/flashinfer/pull/3976"
SGLANG_DECODE = "https://github.com/sgl-project/sglang/issues/32787"
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/pull/2280"


@dataclass(frozen=True)
class Published:
    """A published figure.

    what: what was measured.
    us: the published time, or the time that follows from the published rate.
    units: the parts whose modelled times are added.
    """

    source: str
    kind: Literal["product", "mixture", "attention"]
    what: str
    shape: str
    us: float
    units: tuple[Unit, ...]

    @property
    def modelled_us(self) -> float:
        return sum(spent_of(unit, 0, None, SM100).us for unit in self.units)


def unit(kind: Literal["fused", "library"], **given: Any) -> Unit:
    """Returns a unit that stands alone."""
    plain: dict[str, Any] = dict.fromkeys(("scope", "name", "node"), "")
    plain |= dict.fromkeys(("weights", "caches", "activations", "flops", "scratch"), 0)
    plain |= {"nodes": 1, "launches": 1, "flop_rate": SM100.flops_per_s("bf16")}
    empty: dict[str, Any] = dict.fromkeys(("cache_reads", "symbols", "kernels", "members"), ())
    return Unit(**{"kind": kind, **plain, **empty, **given})


def product(m: int, n: int, k: int, dtype: str) -> Unit:
    """Returns a library's product [m, k] x [n, k] with a 16-bit result."""
    return unit(
        "library",
        weights=int(BYTES[dtype] * n * k),
        activations=int(BYTES[dtype] * m * k + 2 * m * n),
        flops=2 * m * n * k,
        flop_rate=SM100.flops_per_s(dtype),
    )


def of_rate(
    source: str, what: str, size: tuple[int, int, int], dtype: str, tflops: float
) -> Published:
    """Returns a product whose rate was published."""
    m, n, k = size
    us = 2 * m * n * k / (1e6 * tflops)
    return Published(source, "product", what, f"{m} x {n} x {k}", us, (product(m, n, k, dtype),))


def mixture(tokens: int, us: float) -> Published:
    """Returns DeepSeek-V3's mixture in NVFP4 on one chip, with tokens spread evenly over
    experts."""
    experts, slots, hidden, inner = 256, 8, 7168, 2048
    read = experts * reached(tokens, slots / experts) * 3 * hidden * inner
    one = unit(
        "fused",
        family="moe",
        codes="fp8",  # the tensor cores of a B200 multiply NVFP4 codes, so nothing is decoded
        launches=4,
        weights=int(BYTES["nvfp4"] * read),
        activations=2 * 2 * tokens * hidden,
        flops=2 * tokens * slots * 3 * hidden * inner,
        flop_rate=SM100.flops_per_s("nvfp4"),
    )
    shape = f"{tokens} tokens, {experts} experts, {slots} each, {hidden} x {inner}"
    return Published(
        FLASHINFER_MOE, "mixture", "NVFP4 mixture, TensorRT-LLM's kernels", shape, us, (one,)
    )


def attention(causal: bool, us: float) -> Published:
    """Returns attention of 4 sequences of 8192 tokens, with 16 heads of 128 columns."""
    batch, tokens, heads, width = 4, 8192, 16, 128
    pairs = 2 * heads * 2 * width
    # Without a mask a query sees every key, which takes twice the FLOPs of the causal half.
    read = CacheRead((), 0, batch, tokens, queries=tokens, pair_flops=pairs * (1 if causal else 2))
    one = unit("fused", cache_reads=(read,), activations=4 * 2 * batch * tokens * heads * width)
    what = f"attention, {'causal' if causal else 'no mask'}, FlashAttention-4"
    shape = f"{batch} x {tokens}, {heads} heads of {width}"
    return Published(FLASH_ATTENTION, "attention", what, shape, us, (one,))


def published() -> Iterator[Published]:
    """Yields every figure as its source states it."""
    square = (4096, 4096)
    torch_bf16 = {
        1: 2.735701,
        16: 72.857795,
        64: 286.303008,
        128: 561.330810,
        256: 892.904450,
        512: 1335.789318,
        1024: 1362.674710,
    }
    for m, rate in torch_bf16.items():
        yield of_rate(VLLM_GEMM, "bf16 product, torch", (m, *square), "bf16", rate)
    for m, rate in {64: 367.518648, 512: 1832.046345, 1024: 2076.664305}.items():
        yield of_rate(VLLM_GEMM, "fp8 product, CUTLASS", (m, *square), "fp8e4nv", rate)
    for m, rate in {128: 1045.85, 256: 1386.12, 512: 1891.02}.items():
        yield of_rate(VLLM_GEMM, "fp8 product, CUTLASS", (m, 6144, 4096), "fp8e4nv", rate)
    for m, us in {8: 5.02, 128: 5.06, 512: 5.92, 1024: 7.14}.items():
        one = product(m, 2048, 1024, "fp16")
        shape = f"{m} x 2048 x 1024"
        yield Published(CUTLASS_LINEAR, "product", "fp16 linear, torch", shape, us, (one,))
    yield of_rate(FLASHINFER_CUDNN, "NVFP4 product, cuDNN", (1024, 7168, 4608), "nvfp4", 3797.932)
    codes = 0.5 * 8192 * 8192
    one = product(1, 8192, 8192, "nvfp4")
    what = "NVFP4 product, CUTLASS"
    yield Published(FLASHINFER_FP4, "product", what, "1 x 8192 x 8192", codes / 1.78e6, (one,))
    layers, sizes = 80, ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
    of_all = tuple(product(1, n, k, "fp8e4nv") for n, k in sizes) * layers
    what = "fp8 products of Llama-70B, a rank of 8, GB200, CUTLASS"
    yield Published(SGLANG_DECODE, "product", what, "1 token, 80 layers of 4", 3605.0, of_all)
    milliseconds = {1: 0.060, 2: 0.095, 4: 0.147, 8: 0.239, 16: 0.391, 32: 0.603, 64: 0.819}
    yield from (mixture(tokens, 1000 * ms) for tokens, ms in milliseconds.items())
    yield attention(False, 1433.0)
    yield attention(True, 775.0)


def row_of(one: Published) -> dict[str, Any]:
    """Returns a row of the results."""
    modelled = one.modelled_us
    return {
        "source": one.source,
        "kind": one.kind,
        "what": one.what,
        "shape": one.shape,
        "published_us": round(one.us, 1),
        "modelled_us": round(modelled, 1),
        "ratio": round(modelled / one.us, 2),
    }


def main() -> None:
    rows = [row_of(one) for one in published()]
    for row in rows:
        print(f"{row['ratio']:.2f}  {row['published_us']:8.1f}  {row['what']}, {row['shape']}")
    ratios = [row["ratio"] for row in rows if row["kind"] != "attention"]
    print(f"median {statistics.median(ratios):.2f}, nine of ten within {percent_of(ratios)} %")
    keep("published_b200", rows)


if __name__ == "__main__":
    main()
