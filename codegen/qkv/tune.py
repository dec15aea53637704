"""Chooses a lowering by measuring. This module determines which candidates to measure, and stores
the measured times on disk.

This module does not use a GPU: a caller that has a GPU passes a `Timer`. The times of all
candidates are stored in the kernel cache, under a key of everything that affects the times: the
machine, the problem, and all sources that the candidates' kernels are emitted from. Times that were
measured on this machine take precedence over the shipped table, and the table takes precedence over
the cost model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType

from tilewright.codegen import emit
from tilewright.codegen.build.cache import Entry, KernelCache, key_of
from tilewright.codegen.emit import source
from tilewright.codegen.qkv.kernels import KERNELS
from tilewright.codegen.qkv.plan import (
    HERE,
    TOKEN_BUCKETS,
    LoweringChoice,
    choose,
    fused_choice,
    library_choice,
    ranked,
)
from tilewright.codegen.qkv.problem import QkvProblem
from tilewright.codegen.spec import module_of
from tilewright.codegen.targets import Target

#: The largest number of fused kernels that are measured. These are the kernels that the cost model
#: ranks best. Most of the time of tuning is spent on compiling them.
MAX_FUSED = 8

_FORMAT = "1"
_FILE = "times.json"

#: A function that returns the seconds of each choice, in order. For a choice that fails or gives
#: wrong results, it returns infinity.
Timer = Callable[[Sequence[LoweringChoice]], Sequence[float]]


class NothingMeasuredError(RuntimeError):
    """Raised when no candidate could be timed."""


@dataclass(frozen=True)
class Machine:
    """The machine that times depend on: the name of the GPU, and the versions of libraries."""

    gpu: str
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    """One problem with one number of tokens. packed: whether the weights are rows of one tensor."""

    problem: QkvProblem
    num_tokens: int
    target: Target
    packed: bool


def bucket(num_tokens: int) -> int:
    """Returns the largest number of tokens that shares a kernel with `num_tokens`."""
    return next((b for b in TOKEN_BUCKETS if num_tokens <= b), 2 * TOKEN_BUCKETS[-1])


@lru_cache(maxsize=256)
def trials(case: Case) -> Mapping[str, LoweringChoice]:
    """Returns the choices to measure, by name. They are the choice that a plan makes without
    measuring on this machine, the configs that the cost model ranks best, and the library.

    Each choice has the form of a plan's choice for up to `case.num_tokens` tokens.
    """
    problem, tokens, target = case.problem, case.num_tokens, case.target
    chosen = choose(problem, tokens, target, case.packed)
    if not chosen.norms_x:
        problem = problem.after_norm
    found = [chosen]
    found += [
        fused_choice(problem, config, seconds)
        for seconds, config in ranked(problem, tokens, target)[:MAX_FUSED]
    ]
    if problem.input_norm is None:
        found.append(library_choice(problem, tokens, target, case.packed, None))
    named: dict[str, LoweringChoice] = {}
    for choice in found:
        named.setdefault(name_of(choice), choice)
    return MappingProxyType(named)


def name_of(choice: LoweringChoice) -> str:
    """Returns the name of a choice. The name is unique among the trials of a case."""
    return choice.name if choice.config is None else f"{choice.name} {choice.config}"


def tuned(
    case: Case, machine: Machine, timer: Timer | None, store: KernelCache | None = None
) -> LoweringChoice | None:
    """Returns the fastest trial of a case on this machine.

    If no times are stored, this function measures the trials. If there is only one trial, this
    function returns that trial without measuring. Without a timer, it returns the fastest trial
    according to the stored times, or None if no valid times are stored.

    If several processes call this function at the same time, one process measures and the others
    wait. Raises NothingMeasuredError if no trial could be timed. Errors of the timer propagate. If
    there is an error, nothing is stored.
    """
    tried = trials(case)
    if len(tried) == 1:
        return _only(tried)
    store, key = store or KernelCache(), _key(case, machine, tried)
    if timer is None:
        entry = store.find("tuned", key)
    else:
        measure = partial(_measured, tried, machine, timer)
        entry = store.get_or_make("tuned", key, measure, lambda found: _times(found, tried) != {})
    times = {} if entry is None else _times(entry, tried)
    return _fastest(tried, times) if times else None


def _measured(
    tried: Mapping[str, LoweringChoice], machine: Machine, timer: Timer
) -> dict[str, bytes]:
    """Measures the trials and returns the files of their cache entry."""
    times = zip(tried, map(float, timer(tuple(tried.values()))), strict=True)
    good = {name: seconds for name, seconds in times if 0 < seconds < math.inf}
    if not good:
        raise NothingMeasuredError(f"none of {len(tried)} lowerings could be timed")
    return {_FILE: json.dumps({"machine": machine.gpu, "seconds": good}, indent=1).encode()}


def _only(tried: Mapping[str, LoweringChoice]) -> LoweringChoice:
    (choice,) = tried.values()
    return replace(
        choice, reason=(f"{choice.reason}; there is no other lowering to compare it with")
    )


def _key(case: Case, machine: Machine, tried: Mapping[str, LoweringChoice]) -> str:
    facts = (repr(case.problem), str(case.num_tokens), case.target.name, str(case.packed))
    return key_of(_FORMAT, repr(machine), *facts, *tried, *_sources())


def _sources() -> Iterator[str]:
    """Yields fingerprints of the sources of kernels: the templates, the emitter, and the modules of
    this folder and of `codegen/` that convert a problem to constants."""
    yield emit.emitter_fingerprint()
    for kernel in KERNELS:
        yield source.fingerprint(module_of(kernel.template))
    yield _constants_fingerprint()


@cache
def _constants_fingerprint() -> str:
    here = Path(__file__).parent
    modules = [*sorted(here.glob("*.py")), *sorted(here.parent.glob("*.py"))]
    return key_of(*(module.read_text("utf-8") for module in modules))


def _times(entry: Entry, tried: Mapping[str, LoweringChoice]) -> dict[str, float]:
    """Returns the times of a cache entry. If these are not the times of `tried`, returns an empty
    dict."""
    try:
        seconds = json.loads(entry.files[_FILE])["seconds"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(seconds, dict) or not set(seconds) <= set(tried):
        return {}
    numbers = all(isinstance(s, float) and 0 < s < math.inf for s in seconds.values())
    return seconds if numbers else {}


def _fastest(tried: Mapping[str, LoweringChoice], seconds: Mapping[str, float]) -> LoweringChoice:
    best = min(seconds, key=lambda name: seconds[name])
    chosen = tried[best]
    what = str(chosen.config) if chosen.config else "library GEMMs and an epilogue"
    reason = f"{what}: {seconds[best] * 1e6:.1f} us {HERE}, best of {len(seconds)}"
    unfused = seconds.get("library")
    if unfused is not None and best != "library":
        reason += f" (library {unfused * 1e6:.1f} us)"
    return replace(chosen, reason=reason, seconds=seconds[best], source=HERE)
