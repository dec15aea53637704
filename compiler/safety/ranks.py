"""Ranks that fuse a sum over ranks all do, or none does.

A fused sum waits for the same kernel on every rank; beside a rank that calls the library's
collective in its place it would wait for ever. So each rank says in the group's store what it
compiled, and the first to know all (or to have waited in vain) says there what holds for all.
While a rank compiles, it says so every few seconds: one that takes long is waited for, one that
is gone or never comes is not.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of
from tilewright.compiler.report import GraphReport
from tilewright.ops.runtime.peers import group_named

#: The pattern whose op the ranks run together.
SHARED = "all_reduce_residual_norm"
#: How long a rank may say nothing: all go on without it then.
WAIT_S = 20.0
#: How long one that still compiles is waited for: as long as NCCL waits in a collective.
COMPILING_S = 600.0
#: How often one says that it compiles.
BEAT_S = 4.0
_LOOK_S = 0.05
_UNFUSED = "unfused"


@dataclass
class RankSums:
    """The sums of a group in one graph, equal on all its ranks. place: in the store. of: the group
    itself. life: of how many groups of this name and these ranks that store has heard from this
    rank. compiled: how often this rank has, in this one. said: what held for all at last."""

    group: str
    place: str
    of: Any
    life: int
    compiled: int = 0
    said: str = ""

    @property
    def now(self) -> str:
        """Where ranks speak of this compilation."""
        return f"{self.place}/{self.life}/{self.compiled}"

    def alive(self, rank: int) -> str:
        """Where a rank counts that it still compiles."""
        return f"{self.now}/alive/{rank}"


# By place.
_known: dict[str, RankSums] = {}


@contextmanager
def compiling(gm: fx.GraphModule) -> Iterator[list[RankSums]]:
    """Yields the sums of each group in a graph while it is compiled. If the block raises, the other
    ranks need not wait for this one."""
    shared = _shared_of(gm.graph)
    try:
        with _telling(shared):
            yield shared
    except BaseException:
        for one in shared:
            _decided(one, _UNFUSED)
        raise


def disagreement(shared: Sequence[RankSums], report: GraphReport) -> str | None:
    """Why this rank must not run the sums over ranks that the report has fused; None where all
    ranks have fused the same. Waits for ranks that compile, COMPILING_S seconds at most, and
    WAIT_S for one that says nothing.

    Raises RuntimeError where the others run them fused, and this rank cannot."""
    for one in shared:
        plan = _plan_of(report, one.group)
        one.said = _heard(one, plan) if plan else _decided(one, _UNFUSED)
        if one.said not in (plan, _UNFUSED):
            raise RuntimeError(
                f"the other ranks of group {one.group} sum with {SHARED}, and this one cannot as "
                f"they do: compile all of them with options={{'patterns': ['-{SHARED}']}}"
            )
        if plan and one.said != plan:
            return f"not all ranks of group {one.group} have compiled the same"
    return None


def _shared_of(graph: fx.Graph) -> list[RankSums]:
    """Returns the sums of each group in a graph that is compiled now."""
    found = []
    for group, said in _sums(graph).items():
        text = "\n".join([group, str(_members(group)), *said])
        place = f"tilewright/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        shared, of = _known.get(place), group_named(group)
        if shared is None or shared.of is not of:  # another group has the name by now
            # The store may be the same, with all that ranks of the last one said.
            life = _compat.store().add(f"{place}/lives/{dist.get_rank()}", 1)
            shared = _known[place] = RankSums(group, place, of, life)
        shared.compiled += 1
        found.append(shared)
    return found


def _sums(graph: fx.Graph) -> dict[str, list[str]]:
    """The collectives of each group, with the shapes that they give; none under torch's fake group,
    whose other ranks are not there."""
    found: dict[str, list[str]] = {}
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return found
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            made = [str(tuple(t.shape)) for t in _compat.tensors_of(node)]
            found.setdefault(group, []).append(f"{name_of(node)} {made}")
    return found


def _members(group: str) -> list[int]:
    return dist.get_process_group_ranks(group_named(group))


def _group_of(node: fx.Node) -> str | None:
    """The group of a functional collective, or of a DTensor's way to another placement."""
    if "c10d_functional" in str(node.target):
        names = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
        return names[-1] if names else None
    if name_of(node) in ("redistribute", "full_tensor") and node.all_input_nodes:
        mesh = getattr(node.all_input_nodes[0].meta.get("example_value"), "device_mesh", None)
        return str(mesh.get_group().group_name) if mesh is not None and mesh.ndim == 1 else None
    return None


def _plan_of(report: GraphReport, group: str) -> str:
    """Describes the fused sums of a group; empty without any."""
    facts = [s.shapes for s in report.matches if s.pattern == SHARED and s.shapes["group"] == group]
    return f"{torch.__version__} {[sorted(f.items()) for f in facts]}" if facts else ""


def _heard(shared: RankSums, plan: str) -> str:
    """Waits for the decision that holds for all ranks, and returns it. Where a rank does not come,
    this one may have been alone to compile again: the former decision then stays."""
    store, place = _compat.store(), shared.now
    votes = {rank: f"{place}/{rank}" for rank in _members(shared.group)}
    store.set(f"{place}/{dist.get_rank()}", plan)
    silent = _silence(shared, votes)
    while not store.check([f"{place}/all"]):
        if store.check(list(votes.values())):
            same = all(store.get(vote).decode() == plan for vote in votes.values())
            return _decided(shared, plan if same else _UNFUSED)
        if next(silent):
            return _decided(shared, plan if shared.said == plan else _UNFUSED)
        time.sleep(_LOOK_S)
    return _text(store.get(f"{place}/all"))


def _silence(shared: RankSums, votes: dict[int, str]) -> Iterator[bool]:
    """Whether a rank that has not said what it compiled says nothing at all for too long."""
    store, started = _compat.store(), time.monotonic()
    heard = dict.fromkeys(votes, (0, started))
    looked, lost = started, False
    while True:
        now = time.monotonic()
        if now - looked > min(1.0, WAIT_S / 4):
            looked = now
            for rank, vote in votes.items():
                beats = store.add(shared.alive(rank), 0)
                if beats != heard[rank][0] or store.check([vote]):
                    heard[rank] = beats, now
            lost = any(now - at > WAIT_S for _, at in heard.values())
        yield lost or now - started > COMPILING_S


@contextmanager
def _telling(shared: Sequence[RankSums]) -> Iterator[None]:
    """While the block runs, says every BEAT_S seconds that this rank compiles."""
    if not shared:
        yield
        return
    store, rank, done = _compat.store(), dist.get_rank(), threading.Event()

    def tell() -> None:
        while True:
            for one in shared:
                store.add(one.alive(rank), 1)
            if done.wait(BEAT_S):
                return

    def until_it_is_gone() -> None:
        with suppress(RuntimeError):  # the store, with the rank that keeps it
            tell()

    thread = threading.Thread(target=until_it_is_gone, name="tilewright-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(BEAT_S)


def _decided(shared: RankSums, what: str) -> str:
    """Returns the decision that holds for all, which is the first one made."""
    return _text(_compat.store().compare_set(f"{shared.now}/all", "", what))


def _text(said: Any) -> str:
    return str(said.decode())
