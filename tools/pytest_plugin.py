"""Defines a pytest plugin. A test that uses its fixture `tilewright` fails if the matches of a
model change.

    def test_fusions(tilewright):
        tilewright.check(model, (input_ids,), cache_argument(model, cache))

This test compares the matches and misses with a snapshot file next to the test, which has one line
for each kind of site. `pytest --tilewright-update` writes the file. The comparison traces the model
and runs nothing.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tilewright.codegen.names import did_you_mean
from tilewright.tools.files import write_whole

if TYPE_CHECKING:  # every pytest run loads this file, so torch is not imported here
    from tilewright.compiler import Lowered
    from tilewright.tools.report.snapshot import Change

FOLDER = "tilewright_snapshots"
#: The parameters of `lower` that are not options.
_CALL = ("model", "args", "kwargs")
UPDATE = "--tilewright-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilewright")
    group.addoption(UPDATE, action="store_true", help="write tilewright's snapshot files anew")


@pytest.fixture
def tilewright(request: pytest.FixtureRequest) -> Matches:
    """Checks which matches and misses tilewright finds in a model; see :class:`Matches`."""
    return Matches(
        folder=request.path.parent / FOLDER / request.path.stem,
        name=_test_name(request),
        update=request.config.getoption(UPDATE),
    )


def _test_name(request: pytest.FixtureRequest) -> str:
    """Returns the name of the test and of its class as a file name."""
    parts = [request.cls.__name__] if request.cls else []
    return re.sub(r"[^\w.-]+", "_", ".".join([*parts, request.node.name])).strip("_")


class Matches:
    """The checks of the fixture. Each check lowers a model once. The arguments may be meta tensors.

    model, args, kwargs: the model and the arguments of its call.
    options: options of tilewright.compiler.lower (`patterns`, `dynamic`, `target`).

    If a check fails, its message lists the sites and misses that differ.
    """

    def __init__(self, folder: Path, name: str, update: bool) -> None:
        self._folder, self._name, self._update = folder, name, update
        self._checks = 0

    def check(
        self,
        model: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        **options: Any,
    ) -> Lowered:
        """Compares the model's matches and misses with its snapshot file. Returns the report.

        `name` is the name of the file. By default it is the name of the test, with a number from
        the second check on.
        """
        from tilewright.tools.report.snapshot import compare, snapshot_lines, snapshot_text

        lowered = _lower(model, args, kwargs, options)
        lines = snapshot_lines(lowered)
        path = self._folder / f"{name or self._next_name()}.snapshot"
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, snapshot_text(lines))
            return lowered
        changes = compare(_stored(path), lines)
        if changes:
            pytest.fail(_message(path, changes, lowered), pytrace=False)
        return lowered

    def assert_matches(
        self,
        model: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **counts: int,
    ) -> Lowered:
        """Checks the number of sites of each named pattern: `assert_matches(model, args,
        qkv_cache=32)`."""
        _check_names(counts, "qkv_cache=32")
        _check_counts(counts)
        lowered = _lower(model, args, kwargs, options or {})
        found = Counter(site.pattern for site in lowered.matches)
        wrong = [
            f"{n}: {found[n]}, expected {count}" for n, count in counts.items() if found[n] != count
        ]
        return _agreed(lowered, wrong)

    def assert_misses(
        self,
        model: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        code: str | None = None,
        options: Mapping[str, Any] | None = None,
        **codes: str,
    ) -> Lowered:
        """Checks that each named pattern has no match, and has a miss with the given code.

        If only `code` is given, as in `assert_misses(model, args, code="ESCAPES")`, at least one
        pattern must have a miss with this code, and the patterns that have such a miss must have no
        match.
        """
        if codes or code is None:
            _check_names(codes, 'qkv_cache="ESCAPES"')
        _check_codes([*codes.values(), *([] if code is None else [code])])
        lowered = _lower(model, args, kwargs, options or {})
        found = {site.pattern for site in lowered.matches}
        missed = _missed(lowered)
        missing_so = {miss.pattern for miss in lowered.misses if miss.code == code}
        wrong = [f"{n} matches, expected none" for n in sorted({*codes, *missing_so} & found)]
        wrong += [f"{n}: no miss {c}" for n, c in codes.items() if (n, c) not in missed]
        wrong += [f"no miss {code}"] if code is not None and not missing_so else []
        return _agreed(lowered, wrong)

    def _next_name(self) -> str:
        self._checks += 1
        return self._name if self._checks == 1 else f"{self._name}-{self._checks}"


def _lower(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Lowered:
    from tilewright.compiler import lower

    known = [name for name in inspect.signature(lower).parameters if name not in _CALL]
    if unknown := sorted(set(options) - set(known)):
        near = did_you_mean(unknown[0], known)
        raise ValueError(f"options: unknown {unknown}; expected some of {known}{near}")
    with _untraced():
        return lower(model, args, kwargs, **options)


@contextmanager
def _untraced() -> Iterator[None]:
    """Keeps torch's own trace out of pytest's log handlers, because pytest would print it with a
    failure.

    pytest adds handlers to the root logger, and to each logger that does not propagate.
    """
    trace, root = logging.getLogger("torch.__trace"), logging.getLogger()
    propagated, trace.propagate = trace.propagate, False
    taken = [handler for handler in trace.handlers if handler in root.handlers]
    for handler in taken:
        trace.removeHandler(handler)
    try:
        yield
    finally:
        trace.propagate = propagated
        for handler in taken:
            trace.addHandler(handler)


def _check_names(expected: Mapping[str, Any], example: str) -> None:
    """Raises ValueError if a name is not that of a pattern, or if no pattern is named."""
    from tilewright.patterns.language import registered

    known = sorted(pattern.name for pattern in registered())
    unknown = sorted(set(expected) - set(known))
    if not expected or unknown:
        got = f"unknown {unknown}{did_you_mean(unknown[0], known)}" if unknown else "none"
        raise ValueError(f"expected patterns ({example}) out of {known}, got {got}")


def _check_counts(counts: Mapping[str, Any]) -> None:
    """Raises TypeError for a count that is not an int of at least 0."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise TypeError(f"{name}: expected a number of sites, got {count!r}")


def _missed(lowered: Lowered) -> set[tuple[str, str]]:
    """Returns (pattern, code) of each miss. A miss that speaks for several patterns yields a pair
    for each of them."""
    from tilewright.patterns.language import spoken_for

    return {(name, miss.code) for miss in lowered.misses for name in spoken_for(miss.pattern)}


def _check_codes(codes: Iterable[str]) -> None:
    from tilewright.patterns.language import CODES

    unknown = sorted({str(code) for code in codes} - set(CODES))
    if unknown:
        near = did_you_mean(unknown[0], CODES)
        raise ValueError(f"no miss codes {unknown} (`tilewright explain` lists them){near}")


def _stored(path: Path) -> Sequence[Any]:
    from tilewright.tools.report.snapshot import SnapshotError, read_lines

    if not path.is_file():
        pytest.fail(f"no snapshot {path}; write it with pytest {UPDATE}", pytrace=False)
    problem: Exception | None = None
    try:
        return read_lines(path)
    except SnapshotError as error:
        problem = error  # raising an error in this block would print the whole chain of exceptions
    pytest.fail(f"{problem}; write it anew with pytest {UPDATE}", pytrace=False)


def _message(path: Path, changes: Sequence[Change], lowered: Lowered) -> str:
    head = f"the matches differ from {path}:"
    tail = f"if this change is intended: pytest {UPDATE}"
    return "\n".join([head, *(f"  {change}" for change in changes), *_misses(lowered), tail])


def _agreed(lowered: Lowered, wrong: Sequence[str]) -> Lowered:
    """Returns the report. If `wrong` has lines, fails the test with them."""
    if wrong:
        pytest.fail("\n".join([*wrong, *_misses(lowered)]), pytrace=False)
    return lowered


def _misses(lowered: Lowered) -> list[str]:
    """Returns a line for each kind of miss. After these, each code of a lost match has a line that
    says where the code is explained."""
    from tilewright.compiler.report import collapse_misses

    lines = [f"missed {miss.pattern}: {miss}" for miss, _, _ in collapse_misses(lowered.misses)]
    codes = sorted({miss.code for miss in lowered.misses if miss.is_lost})
    return lines + [f"what to do: tilewright explain {code}" for code in codes]
