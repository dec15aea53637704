"""Makes either all ranks fuse a sum over ranks, or none of them.

A fused sum waits for the same kernel on every rank. If one rank called the library's collective
instead, the others would wait for ever. Therefore each rank writes to the group's store what it
compiled. The first rank that has read all entries, or has waited in vain, writes the decision for
all ranks. While a rank compiles, it reports this every few seconds. The other ranks therefore wait
for a rank that takes long, but not for a rank that has ended or never starts.
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

#: The pattern whose op all ranks must run together.
SHARED = "all_reduce_residual_norm"
#: The number of seconds that a rank may be silent before all ranks go on without fused sums.
WAIT_S = 20.0
#: The number of seconds to wait for a rank that still compiles. It is the time for which NCCL waits
#: in a collective.
COMPILING_S = 600.0
#: The number of seconds after which a rank reports again that it compiles.
BEAT_S = 4.0
_LOOK_S = 0.05
_UNFUSED = "unfused"


@dataclass
class RankSums:
    """The sums of a group in one graph. They are equal on all ranks of the group.

    place: the prefix of the keys of these sums in the store.
    of: the group itself.
    life: the number of groups with this name and these ranks that this rank has had, as counted in
        the store.
    compiled: the number of times that this rank has compiled the sums in this group.
    said: the decision for all ranks, once it is known.
    """

    group: str
    place: str
    of: Any
    life: int
    compiled: int = 0
    said: str = ""

    @property
    def now(self) -> str:
        """The prefix of the store's keys for this compilation."""
        return f"{self.place}/{self.life}/{self.compiled}"

    def alive(self, rank: int) -> str:
        """Returns the key under which a rank counts up while it still compiles."""
        return f"{self.now}/alive/{rank}"


# The sums of each group, by `RankSums.place`.
_known: dict[str, RankSums] = {}


@contextmanager
def compiling(gm: fx.GraphModule) -> Iterator[list[RankSums]]:
    """Yields the sums of each group in a graph while the graph is compiled. If the block raises,
    the other ranks do not wait for this rank."""
    shared = _shared_of(gm.graph)
    try:
        with _telling(shared):
            yield shared
    except BaseException:
        for one in shared:
            _decided(one, _UNFUSED)
        raise


def disagreement(shared: Sequence[RankSums], report: GraphReport) -> str | None:
    """Returns why this rank must not run the report's fused sums over ranks. Returns None if all
    ranks have fused the same sums, or if this rank has fused none and the others run none.

    The function waits at most COMPILING_S seconds for ranks that compile, and WAIT_S seconds for a
    silent rank. Raises RuntimeError if the other ranks run fused sums and this rank cannot.
    """
    for one in shared:
        plan = _plan_of(report, one.group)
        one.said = _heard(one, plan) if plan else _decided(one, _UNFUSED)
        if one.said not in (plan, _UNFUSED):
            raise RuntimeError(
                f"the other ranks of group {one.group} compute their sums with {SHARED}, and this "
                "rank cannot: compile the model on all ranks with "
                f"options={{'patterns': ['-{SHARED}']}}"
            )
        if plan and one.said != plan:
            return f"the ranks of group {one.group} have not all compiled the same sums"
    return None


def _shared_of(graph: fx.Graph) -> list[RankSums]:
    """Returns the sums of each group in a graph that is being compiled."""
    found = []
    for group, said in _sums(graph).items():
        text = "\n".join([group, str(_members(group)), *said])
        place = f"tilewright/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        shared, of = _known.get(place), group_named(group)
        if shared is None or shared.of is not of:  # a new group has the name of the former one
            # The store may still hold entries that ranks wrote for the former group.
            life = _compat.store().add(f"{place}/lives/{dist.get_rank()}", 1)
            shared = _known[place] = RankSums(group, place, of, life)
        shared.compiled += 1
        found.append(shared)
    return found


def _sums(graph: fx.Graph) -> dict[str, list[str]]:
    """Returns, for each group, its collectives with the shapes of their results. Leaves out torch's
    fake group, because its other ranks do not exist."""
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
    """Returns the group of a functional collective, or of a call that redistributes a DTensor.
    Returns None for other nodes."""
    if "c10d_functional" in str(node.target):
        names = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
        return names[-1] if names else None
    if name_of(node) in ("redistribute", "full_tensor") and node.all_input_nodes:
        mesh = getattr(node.all_input_nodes[0].meta.get("example_value"), "device_mesh", None)
        return str(mesh.get_group().group_name) if mesh is not None and mesh.ndim == 1 else None
    return None


def _plan_of(report: GraphReport, group: str) -> str:
    """Returns a text that describes the fused sums of a group. The text is empty if there are
    none."""
    facts = [s.shapes for s in report.matches if s.pattern == SHARED and s.shapes["group"] == group]
    return f"{torch.__version__} {[sorted(f.items()) for f in facts]}" if facts else ""


def _heard(shared: RankSums, plan: str) -> str:
    """Waits for the decision that holds for all ranks, and returns it. If another rank stays
    silent, perhaps only this rank compiles again. The former decision then stays if it agrees with
    this rank's plan."""
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
    """Yields whether to stop waiting.

    It yields True once COMPILING_S seconds have passed, or once a rank that has not reported its
    result has been silent for WAIT_S seconds.
    """
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
    """Reports every BEAT_S seconds, while the block runs, that this rank compiles."""
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
        with suppress(RuntimeError):  # the store is gone once the rank that hosts it has ended
            tell()

    thread = threading.Thread(target=until_it_is_gone, name="tilewright-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(BEAT_S)


def _decided(shared: RankSums, what: str) -> str:
    """Writes a decision unless there is one already. Returns the decision that holds for all ranks,
    which is the first one written."""
    return _text(_compat.store().compare_set(f"{shared.now}/all", "", what))


def _text(said: Any) -> str:
    return str(said.decode())
