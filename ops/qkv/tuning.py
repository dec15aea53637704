"""Measures the lowerings of `fused_qkv_paged` on the GPU of this machine, on scratch arguments.

Tuning runs when a call or a report with tune=True needs a choice. A case is measured once for each
GPU and set of versions, in a separate thread, and `codegen/qkv/tune.py` stores the times on disk.
Nothing is measured while the caller's stream is being captured. A captured call uses the times on
disk or, if there are none, the plan's choice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import triton

from tilewright.codegen.build.cache import cache_dir
from tilewright.codegen.qkv.plan import LoweringChoice
from tilewright.codegen.qkv.tune import Case, Machine, bucket, name_of, tuned
from tilewright.codegen.targets import Target, get_target
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.choices import run
from tilewright.ops.qkv.operands import FusedCall
from tilewright.ops.qkv.scratch import argument_bytes, scratch_arguments
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.isolation import apart
from tilewright.ops.runtime.launch import Gpu
from tilewright.ops.runtime.program import Buffer, Step
from tilewright.ops.runtime.timing import capture, interleaved_us

log = logging.getLogger("tilewright")

# The calls of one CUDA graph together read this many times the size of the L2 cache, so that each
# call starts with a cold cache.
_COLD_L2_SIZES = 3
# The largest number of sets of arguments that the calls of one CUDA graph use.
_MAX_SETS = 64
# If norm(error) / norm(result) is larger than this, the result is wrong, and not only rounded
# differently.
_WRONG = 2.0**-5

_known: dict[tuple[Case, int], LoweringChoice | None] = {}


@cache
def machine(index: int) -> Machine:
    """Returns the GPU and the versions that the times on this machine depend on."""
    properties = torch.cuda.get_device_properties(index)
    gpu = f"{properties.name}, {properties.multi_processor_count} SMs"
    cuda = str(torch.version.cuda)
    return Machine(
        gpu, (("triton", triton.__version__), ("torch", torch.__version__), ("cuda", cuda))
    )


def case_of(call: FusedCall, target: Target) -> Case:
    """Returns the case that is measured for a call: its problem with the largest number of tokens
    of its bucket."""
    tokens = call.problem.epilogue.num_tokens or bucket(call.a.x.shape[0])
    return Case(call.problem, tokens, target, call.rows is not None)


def measured_lowering(call: FusedCall, target: Target) -> LoweringChoice | None:
    """Returns the fastest lowering that was measured on the call's GPU. Measures it now if this is
    possible and necessary."""
    index = gpu_index(call.a.x.device)
    if index is None or not target.has("tma"):
        return None
    return measured_choice(call.a, case_of(call, target), index)


def gpu_index(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def measured_choice(
    a: FusedQkvArguments, case: Case, index: int, measure: bool = True
) -> LoweringChoice | None:
    """Returns the fastest lowering of a case on CUDA device `index`; None if no lowering was
    measured.

    a: the arguments of the case, of which only metadata is read. measure: whether to measure a case
    that is not on disk yet. Nothing is measured while the current stream is captured.
    """
    known = _known.get((case, index))
    if known is not None or (case, index) in _known:
        return known
    if not measure or torch.cuda.is_current_stream_capturing():
        return tuned(case, machine(index), None)
    try:
        timer = partial(_time, a, case, index)
        chosen = apart(partial(tuned, case, machine(index), timer))
    except Exception as error:  # tuning is optional: whatever error stops it, the plan is used
        log.warning(
            "tune: nothing was measured, and the plan is kept: %s: %s", type(error).__name__, error
        )
        chosen = None
    _known[case, index] = chosen
    return chosen


def device_for(target: str) -> int | None:
    """Returns the index of the current GPU if it is a GPU of this target, so that tuning can
    measure on it."""
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    found = device_target(torch.device("cuda", index))
    return index if found is not None and found.name == get_target(target).name else None


def describe(target: str) -> str:
    """Returns a line for reports: the GPU that tuning measures on, or why it cannot measure."""
    index = device_for(target)
    if index is None:
        return (
            f"tune: there is no {target} GPU here to measure on; the shipped table and the cost "
            "model choose the lowerings"
        )
    kept = cache_dir() / "tuned"
    gpu = machine(index).gpu
    return f"tune: lowerings are measured on {gpu} when first needed; {kept} keeps the times"


def _time(
    a: FusedQkvArguments, case: Case, index: int, choices: Sequence[LoweringChoice]
) -> list[float]:
    """Returns the time of each choice in seconds; infinity for a choice that fails or computes a
    wrong result."""
    log.info("tune: measuring %d lowerings for %d tokens", len(choices), case.num_tokens)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    with torch.cuda.device(index):
        sets = _argument_sets(a, case, torch.device("cuda", index))
        want = _results(sets[0], None)
        for choice in choices:
            name = name_of(choice)
            try:
                if not _agrees(_results(sets[0], choice), want):
                    raise ArithmeticError("its result is wrong")
                graphs[name] = capture([partial(run, s, choice) for s in sets], warmup=1)
            except Exception as error:  # Triton may raise any type for a kernel that it refuses
                log.warning("tune: %s is left out: %s: %s", name, type(error).__name__, error)
        times = interleaved_us(graphs, len(sets), rounds=9, replays=3) if graphs else {}
    return [1e-6 * times.get(name_of(choice), math.inf) for choice in choices]


def _argument_sets(
    a: FusedQkvArguments, case: Case, device: torch.device
) -> list[FusedQkvArguments]:
    first = scratch_arguments(a, case.num_tokens, device)
    cold = _COLD_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
    count = min(max(-(-cold // argument_bytes(first)), 2), _MAX_SETS)
    more = [scratch_arguments(a, case.num_tokens, device, seed) for seed in range(1, count)]
    return [first, *more]


def _results(a: FusedQkvArguments, choice: LoweringChoice | None) -> list[torch.Tensor]:
    """Returns the result of a lowering on scratch arguments: q and both caches. choice: None for
    the reference."""
    caches = [a.k_cache, *([] if a.v_cache is None else [a.v_cache])]
    for written in caches:
        written.zero_()
    reference = get_op("fused_qkv_paged").reference
    q = reference(a) if choice is None else run(a, choice, NanMemory(a.x.device))
    return [t.float() for t in (q, *caches)]


class NanMemory(Gpu):
    """A GPU whose new memory holds NaN. If a lowering does not write an element, the element is
    NaN."""

    def perform(self, step: Step) -> Any:
        answer = super().perform(step)
        return answer.fill_(torch.nan) if isinstance(step, Buffer) else answer


def _agrees(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(bool((a - b).norm() <= _WRONG * b.norm()) for a, b in zip(got, want, strict=True))
