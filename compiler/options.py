"""The backend's options. They are checked when they are given."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tilewright.patterns  # noqa: F401  registers the families
from tilewright.codegen.names import did_you_mean
from tilewright.codegen.targets import TARGETS, find_target, key_of, not_a_target
from tilewright.compiler._compat import inductor
from tilewright.ops.checks import is_on
from tilewright.patterns.language import CAPTURE, Miss, registered, spoken_for

INNER = ("inductor", "eager")
EVERYWHERE = "TILEWRIGHT_EVERYWHERE"


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(model, backend="tilewright", options={...})`.

    inner: the compiler that compiles the rewritten graph, `inductor` or `eager`.
    patterns: the names of the patterns to use. A name with a leading `-` leaves the pattern out.
        None stands for all patterns.
    target: the chip for which reports plan kernels. None stands for the GPU of this machine or,
        without a GPU, for sm100. A kernel that runs is always planned for the GPU on which it runs.
    verify: in the first call, run the rewritten graph next to the original on copies of the inputs.
        If the results differ, report the difference and run the original from then on. With
        `verify`, sums over ranks are not fused, because no rank may return to the original alone.
    strict: raise an error for a lost miss, a graph break or an internal error instead of reporting
        it. With True, this applies to every pattern. With a list of names, it applies only to these
        patterns; the name `capture` stands for graph breaks. A graph break before the first
        operation of a function is only reported. A cache that grows is also a miss of `qkv_cache`,
        because that pattern can then match no write.
    fuel: apply only the first `fuel` rewrites. Use it to find a wrong rewrite by bisection.
    only: the paths of the modules whose sites are rewritten. A path may have wildcards (`*`). None
        stands for all modules.
    report: a file to which the report of each compiled graph is appended as one line of JSON.
    tune: measure the lowerings of each fused op on the GPU of this machine when a bucket of token
        counts is first needed. The times are kept on disk, and the report says what was measured.
    everywhere: rewrite graphs also on devices for which the ops have no kernels, such as the CPU.
        There the ops run as their PyTorch references. With None, the environment variable
        TILEWRIGHT_EVERYWHERE decides.
    inner_options: Inductor's own settings by their dotted names, such as {"triton.cudagraphs":
        True}. They are allowed only with inner="inductor".
    """

    inner: str = "inductor"
    patterns: tuple[str, ...] | None = None
    target: str | None = None
    verify: bool = False
    strict: bool | tuple[str, ...] = False
    fuel: int | None = None
    only: tuple[str, ...] | None = None
    report: str | None = None
    tune: bool = False
    everywhere: bool | None = None
    inner_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _one_of("inner", self.inner, INNER)
        if self.everywhere is None:
            object.__setattr__(self, "everywhere", is_on(os.environ.get(EVERYWHERE, "")))
        for name in ("verify", "tune", "everywhere"):
            _expect(name, isinstance(getattr(self, name), bool), "a bool", getattr(self, name))
        for name in ("patterns", "only"):
            given = getattr(self, name)
            listed = given is None or (
                isinstance(given, Collection)
                and not isinstance(given, str)
                and all(isinstance(item, str) for item in given)
            )
            _expect(name, listed, "a list of strings or None", given)
            if given is not None:
                object.__setattr__(self, name, tuple(given))
        registered(self.patterns)  # raises ValueError for an unknown name
        self._check_strict(self.strict)
        if self.target is not None:
            object.__setattr__(self, "target", _target(self.target))
        fuel = self.fuel
        good = fuel is None or (isinstance(fuel, int) and not isinstance(fuel, bool) and fuel >= 0)
        _expect("fuel", good, "a number of rewrites, 0 or more, or None", fuel)
        if self.report is not None:
            _expect("report", isinstance(self.report, (str, os.PathLike)), "a path", self.report)
            path = Path(self.report).resolve()
            good = path.parent.is_dir() and not path.is_dir()
            _expect("report", good, "a path of a file in an existing folder", self.report)

        if self.inner_options is not None:
            self._check_inner_options(self.inner_options)

    def _check_strict(self, given: Any) -> None:
        if isinstance(given, bool):
            return
        listed = isinstance(given, Collection) and not isinstance(given, str)
        expected = "a bool or a list of names of patterns"
        _expect("strict", listed, expected, given)
        known = sorted([CAPTURE, *(pattern.name for pattern in registered())])
        unknown = [name for name in given if name not in known]
        near = did_you_mean(unknown[0], known) if unknown else ""
        _expect("strict", not unknown, f"names among {known}", given, near)
        object.__setattr__(self, "strict", tuple(given))

    def raises_for(self, miss: Miss) -> bool:
        """Whether `strict` raises for a miss. It raises for a lost miss of a pattern that the
        option names, or for a lost miss that stands for misses of such a pattern."""
        if isinstance(self.strict, bool):
            return self.strict and miss.is_lost
        return miss.is_lost and not spoken_for(miss.pattern).isdisjoint(self.strict)

    def _check_inner_options(self, given: Any) -> None:
        _expect("inner_options", isinstance(given, Mapping), "a dictionary or None", given)
        _expect(
            "inner_options",
            self.inner == "inductor",
            'inner="inductor" together with it',
            self.inner,
        )
        problem = inductor.option_problem(given)
        _expect("inner_options", problem is None, problem or "", given)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """Returns options from a dictionary. Raises ValueError, which names the option, the
        expected values and the given value."""
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"options: expected a dictionary or None, got {given!r}")
        given = dict(given or {})
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(given) - known))
        if unknown:
            near = did_you_mean(unknown[0], known)
            raise ValueError(f"options: unknown {unknown}; expected some of {sorted(known)}{near}")
        return cls(**given)


def check_mode(mode: Any) -> None:
    """Raises ValueError for a mode that Inductor does not have. None stands for its default."""
    known = inductor.modes()
    if mode is not None and mode not in known:
        near = did_you_mean(mode, known)
        raise ValueError(f"mode: expected None or one of {known}, got {mode!r}{near}")


def without(options: Options, pattern: str) -> Options:
    """Returns the options with a pattern left out."""
    left = tuple(one.name for one in registered(options.patterns) if one.name != pattern)
    return replace(options, patterns=left) if left else replace(options, fuel=0)


def _target(given: Any) -> str:
    """Returns the name of the target or product that `given` means, as `key_of` returns it. Raises
    ValueError for an unknown name."""
    target = find_target(given)
    if target is None:
        raise ValueError(f"options['target']: {not_a_target(given, TARGETS)}")
    return key_of(target)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    good = isinstance(value, str) and value in allowed
    near = "" if good else did_you_mean(value, allowed)
    _expect(name, good, f"one of {list(allowed)}", value, near)


def _expect(name: str, good: bool, expected: str, actual: Any, near: str = "") -> None:
    if not good:
        raise ValueError(f"options[{name!r}]: expected {expected}, got {actual!r}{near}")
