"""Compiles the kernels that a benchmark will time, before it times them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor

from tilewright.codegen.spec import KernelSpec
from tilewright.ops.runtime.launch import compiled_kernel


def compile_quietly(spec: KernelSpec) -> str:
    """Compiles a kernel into Triton's cache. Returns the text of the error, or "" if there is
    none."""
    try:
        compiled_kernel(spec, 0)
    except Exception as error:  # the error is the result
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def processes() -> ProcessPoolExecutor:
    """Returns a pool of new processes, one for each core."""
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))


def failures_of(specs: Collection[KernelSpec]) -> dict[str, str]:
    """Compiles kernels in parallel, prints the failures, and returns them by kernel name."""
    with processes() as pool:
        outcomes = list(pool.map(compile_quietly, specs, chunksize=2))
    failed = {spec.name: why for spec, why in zip(specs, outcomes, strict=True) if why}
    print(f"{len(specs)} kernels, {len(failed)} do not compile", flush=True)
    for name, why in failed.items():
        print(f"    {name}: {why}", flush=True)
    return failed
