"""Runs all tests of `torch.library.opcheck` on every sample of every op.

    python tests/ops/opcheck_samples.py [--only NAME]

Two parts of opcheck are replaced. test_schema compares arguments before and after a call by
`torch.allclose`, which multiplies, and PyTorch has no product of 8-bit floats on the CPU. Therefore
such tensors are compared byte by byte, which is stricter. opcheck also copies its arguments with a
function that fails for an empty tensor whose row stride is larger than its row length. Therefore
such tensors are made contiguous. Nothing else in opcheck or in the checked op is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import tilewright.ops  # noqa: F401  registers the ops
from tilewright.ops import contract

TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def eight_bits(value: Any) -> bool:
    """Whether a value is a tensor of 8-bit floats."""
    tensor = isinstance(value, torch.Tensor)
    return tensor and value.is_floating_point() and value.element_size() == 1


def without_gaps(value: Any) -> Any:
    """Returns a contiguous tensor in place of a tensor without elements."""
    empty = isinstance(value, torch.Tensor) and value.numel() == 0
    return value.new_empty(value.shape) if empty else value


@contextmanager
def comparable_bytes() -> Iterator[None]:
    allclose = torch.allclose

    def compare(one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if eight_bits(one) and one.dtype == other.dtype:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return allclose(one, other, *args, **kwargs)

    with mock.patch.object(torch, "allclose", compare):
        yield


def failures(op: contract.FusedOp, case: Any) -> dict[str, str]:
    """Returns the message of each test that fails on a sample."""
    args, kwargs = op.split(op.sample_inputs(case))
    args = [without_gaps(value) for value in args]
    kwargs = {name: without_gaps(value) for name, value in kwargs.items()}
    with comparable_bytes():
        outcome = torch.library.opcheck(
            op.torch_op, args, kwargs, test_utils=TESTS, raise_exception=False
        )
    assert set(outcome) == set(TESTS)
    return {test: str(said) for test, said in outcome.items() if said != "SUCCESS"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ops whose name has this")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    start, samples, failed = time.perf_counter(), 0, {}
    for op in contract.all_ops():
        for case in op.cases if only in op.name else ():
            samples += 1
            for test, said in failures(op, case).items():
                failed[f"{op.name} {case.name} {test}"] = said[:500]
    seconds = round(time.perf_counter() - start)
    tests = samples * len(TESTS)
    print(json.dumps({"samples": samples, "tests": tests, "failed": failed, "seconds": seconds}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
