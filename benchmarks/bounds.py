"""Measures the memory rates of one GPU. They are upper bounds, with which the other benchmarks
compare their rates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from timing import Call, capture, interleaved_us

COPY_BYTES = 2**31
BLOCK = 16384


def copy_bytes_per_s() -> float:
    """Measures how many bytes per second an elementwise kernel over 2 GiB reads and writes."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    graph = capture([lambda: torch.mul(source, 2.0, out=target)])
    microseconds = interleaved_us({"copy": graph}, 1)["copy"]
    return 2 * COPY_BYTES / (1e-6 * microseconds)


@triton.jit
def read_all(pointer, out_ptr, num_elements, BLOCK: tl.constexpr):
    """Reads a tensor and stores nothing: a lower bound on the time of any kernel over it."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(pointer + offsets, mask=offsets < num_elements, other=0.0))
    if total == float("inf"):
        tl.store(out_ptr, total)


def reader(tensors: list[torch.Tensor]) -> list[Call]:
    """Returns a function for each tensor. A call of the function reads its tensor once."""
    out = torch.zeros(1, device="cuda")

    def read(tensor: torch.Tensor) -> None:
        grid = (triton.cdiv(tensor.numel(), BLOCK),)
        read_all[grid](tensor, out, tensor.numel(), BLOCK=BLOCK, num_warps=8)

    return [lambda tensor=tensor: read(tensor) for tensor in tensors]
