"""Turns exceptions inside a pattern, an op or a rewrite into misses, so that each exception costs
only one site."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.options import Options
from tilewright.compiler.report.repro import write_repro
from tilewright.patterns.language import Match, Miss, internal_miss

log = logging.getLogger("tilewright")

# The number of sites of one pattern that may fail after the graph has changed. Each of these
# failures costs another copy of the graph. After this number, the pattern is left out.
MAX_RESTARTS = 4


class StrictError(RuntimeError):
    """Raised under `strict` for a lost site, a graph break or an internal error."""


def raise_strictly(misses: Iterable[Miss], options: Options) -> None:
    """Raises StrictError with the misses for which `strict` asks for an error. Does nothing if
    there are no such misses."""
    raised = [str(miss) for miss in misses if options.raises_for(miss)]
    if raised:
        raise StrictError("\n".join(raised))


@dataclass(eq=False)
class Failures:
    """Turns an exception at a site of the graph `gm` into a miss INTERNAL.

    Raises StrictError instead if `strict` asks for it. Raises Dynamo's own exceptions again,
    because Dynamo restarts its analysis by raising them.
    """

    gm: fx.GraphModule
    options: Options
    _refused: dict[tuple[str, str], Miss] = field(default_factory=dict)
    _restarts: Counter[str] = field(default_factory=Counter)

    def __call__(
        self, pattern: str, doing: str, error: Exception, nodes: tuple[fx.Node, ...]
    ) -> Miss:
        if isinstance(error, _compat.DynamoError):
            raise error
        miss = internal_miss(pattern, doing, error, nodes)
        if self.repro is not None:
            miss = replace(miss, hint=f"{self.repro} reproduces it: attach the file to a report")
        if self.options.raises_for(miss):
            raise StrictError(str(miss)) from error
        log.error("%s", miss, exc_info=error)
        return miss

    def refuse(self, match: Match, doing: str, error: Exception) -> None:
        """Records a failure, so that :meth:`earlier` has a miss for this site in the next copy."""
        if _key(match) in self._refused:
            raise error  # it failed again although refused: another copy would not help
        self._refused[_key(match)] = self(match.pattern, doing, error, (match.anchor.node,))
        self._restarts[match.pattern] += 1

    def earlier(self, match: Match) -> Miss | None:
        """Returns the miss of a site that failed in an earlier copy of the graph, or whose pattern
        failed there too often. Returns None for other sites."""
        miss = self._refused.get(_key(match))
        if miss is None and self._restarts[match.pattern] > MAX_RESTARTS:
            miss = next(m for (name, _), m in self._refused.items() if name == match.pattern)
        return None if miss is None else replace(miss, nodes=(match.anchor.node,))

    @contextmanager
    def of_the_graph(self) -> Iterator[None]:
        """Writes a repro file if the block raises. An exception of the block belongs to no single
        site."""
        try:
            yield
        except (_compat.DynamoError, StrictError):
            raise
        except Exception:
            _ = self.repro
            raise

    @cached_property
    def repro(self) -> Path | None:
        """The file that reproduces the failure. The first access writes it. It is None if
        TILEWRIGHT_REPRO is not set, or if the file cannot be written."""
        return write_repro(self.gm, self.options)


def _key(match: Match) -> tuple[str, str]:
    """Returns a key that consists of names. Names are the same in every copy of a graph, and nodes
    are not."""
    return match.pattern, match.anchor.node.name
