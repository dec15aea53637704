"""Memory that every rank of a group reaches, and ranks that agree on it.

torch's symmetric memory: each rank allocates, and all learn the addresses. A kernel through it
waits for the other ranks, so that all take it or none: one that cannot (another backend, GPUs that
do not reach each other, a kernel that does not compile) says so to the others first.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("tilewright")

# (addresses, sent, rank) of a `ops.runtime.program.PeerMemory`.
Memory = tuple[int, int, int]


class RankFailedError(RuntimeError):
    """This rank cannot do what the other ranks of its group do now. Raised: they wait for it, and
    nothing that it might do alone is what they wait for."""

    def __init__(self, group: str, error: Exception) -> None:
        super().__init__(
            f"this rank failed in what all ranks of group {group} do together, and the "
            f"others wait for it: {type(error).__name__}: {error}"
        )


@dataclass
class _Shared:
    """What ranks made for one form. group: itself, since another may have its name later. kinds:
    of calls, and whether all ranks have compiled their kernels."""

    group: Any
    memory: Memory | None
    kinds: dict[str, bool] = field(default_factory=dict)


# By group, device and form.
_shared: dict[tuple[str, int, str], _Shared] = {}
# What keeps the memory of `_shared` allocated, graphs that were captured with it, too.
_kept: list[Any] = []


# Looked up once: `is_group` is asked at every call of every sum. None where torch has no groups.
_resolve: Any = getattr(getattr(dist, "distributed_c10d", None), "_resolve_process_group", None)


def group_named(name: str) -> Any:
    """A process group by the name that functional collectives have. Raises what torch does for one
    that is not there."""
    return _resolve(name)


def is_group(name: str, group: Any) -> bool:
    """Whether a group still has this name."""
    try:
        return _resolve(name) is group
    except (RuntimeError, ValueError):  # there is none
        return False


def group_size(name: str) -> int | None:
    """How many ranks a group has; None where there is none of that name."""
    try:
        return int(group_named(name).size())
    except (RuntimeError, ValueError, TypeError):
        return None


def obstacle(name: str) -> str | None:
    """Why a group's ranks can never reach each other's memory, the same on all; None where they may
    (torch's fake groups, which plans are made with, too)."""
    backend = dist.get_backend(group_named(name))
    if "nccl" in backend or backend in ("fake", "undefined"):
        return None
    return f"the ranks of group {name} talk through {backend}: there is no symmetric memory"


def peer_memory(
    wanted: Any, index: int, compiled: Callable[[], Any], apart: Callable[..., Any], watch: Any
) -> Memory | None:
    """The memory of a step, a `Peers`, on the device of this index: made at the first call of its
    form on all ranks; None where they do without, for this form or for this kind of call. A call
    whose launches are captured asks nobody: the ranks would wait for each other in the graph.

    compiled: compiles the kernel. apart: calls a function out of sight of the caller's stream.
    watch: `ops.runtime.watch`.
    """
    key, group = (wanted.group, index, wanted.form), group_named(wanted.group)
    known = _shared.get(key)
    if known is not None and known.group is not group:
        known = None
    if known is not None and (known.memory is None or wanted.kind in known.kinds):
        return known.memory if known.kinds.get(wanted.kind) else None
    if torch.cuda.is_current_stream_capturing():
        return None
    if known is None:
        made = apart(partial(_agreed_memory, wanted, group, index, compiled, watch))
        known = _shared[key] = _Shared(group, made)
        known.kinds[wanted.kind] = made is not None
    else:
        agreed = partial(_agreed_kernel, wanted, group, index, compiled)
        known.kinds[wanted.kind] = apart(agreed)
    return known.memory if known.kinds[wanted.kind] else None


def _agreed_kernel(wanted: Any, group: Any, index: int, compiled: Callable[[], Any]) -> bool:
    """Whether every rank compiles its kernel for another kind of call."""
    with torch.cuda.device(index):
        _, why = _attempt(compiled)
        return _agreed(why, wanted, group, index)


def _agreed_memory(
    wanted: Any, group: Any, index: int, compiled: Callable[[], Any], watch: Any
) -> Memory | None:
    """What all ranks have made, or None on all."""
    with torch.cuda.device(index):
        own, why = _attempt(partial(_allocated, wanted.nbytes, compiled, index))
        if not _agreed(why, wanted, group, index):
            return None
        meeting, why = _attempt(partial(_met, own, wanted.group))
        if not _agreed(why, wanted, group, index):
            return None
        addresses = torch.tensor(meeting.buffer_ptrs, dtype=torch.int64, device=own.device)
        sent = torch.zeros(wanted.programs, dtype=torch.int32, device=own.device)
        torch.cuda.current_stream().synchronize()
        # Together: a rank that fails here must not go on to the next collective alone.
        processes = _gathered(watch.this_process(dist.get_rank()), group, own.device)
        _, why = _attempt(partial(_watch_ranks, wanted, watch, meeting, processes, own))
    if why is not None:
        log.warning("that a rank of group %s ends is not noticed here: %s", wanted.group, why)
    _kept.append((own, meeting, addresses, sent))
    return addresses.data_ptr(), sent.data_ptr(), meeting.rank


def _agreed(why: str | None, wanted: Any, group: Any, index: int) -> bool:
    """Whether all ranks can; else it is logged. why: this one cannot."""
    if _all_can(why is None, f"{wanted.form} {wanted.kind}", group, index):
        return True
    why = why or "another rank cannot, or has other releases"
    log.warning("no symmetric memory in group %s, NCCL instead: %s", wanted.group, why)
    return False


def _attempt(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """(What it gives, why it failed)."""
    try:
        return step(), None
    except Exception as error:  # told to the other ranks, and logged
        return None, f"{type(error).__name__}: {error}"


def _allocated(nbytes: int, compiled: Callable[[], Any], index: int) -> torch.Tensor:
    """This rank's memory, once the kernel compiles."""
    from torch.distributed import _symmetric_memory

    compiled()
    own = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    own.zero_()
    torch.cuda.current_stream().synchronize()  # before another rank writes
    return own


def _met(own: torch.Tensor, group: str) -> Any:
    """What has the addresses of the other ranks' memory."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(own, group)  # type: ignore[arg-type]


def _all_can(can: bool, form: str, group: Any, index: int) -> bool:
    """Whether every rank can, with kernels of the same form and releases; waits for all of them."""
    import triton

    text = f"{form} {torch.__version__} {triton.__version__}"
    mark = zlib.crc32(text.encode())
    answers = torch.tensor([int(can), mark, -mark], dtype=torch.int64, device=f"cuda:{index}")
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=group)
    all_can, least, most = answers.tolist()
    return bool(all_can) and least == -most


# --- ranks that end -------------------------------------------------------------------------------

# In memory that a copy has not reached yet. No flag is this.
_NOT_YET = -(1 << 63)
# Callers work on streams of higher numbers, and may be capturing on them.
_PRIORITY = -3
# Copies that are not done by then are asked for once more.
_AGAIN_S = 1.0


@dataclass(frozen=True)
class _Waits:
    """Whether a kernel of this rank waits for another one, whose process has ended: it has sent a
    row there and got none back, which can come no more.

    The copies go by a stream of their own, and in the CPU's memory it is seen that they are done:
    nothing waits for the caller's work, or asks what is forbidden while someone captures. there,
    here: the flags in the other's memory and in this one's. copies: of both, pinned.
    """

    rank: int
    other: int
    there: torch.Tensor
    here: torch.Tensor
    copies: tuple[torch.Tensor, torch.Tensor]
    stream: Any

    def __call__(self) -> bool:
        for copy in self.copies:
            copy.fill_(_NOT_YET)
        self._copy()
        begun = time.monotonic()
        while any(bool((copy == _NOT_YET).any()) for copy in self.copies):
            time.sleep(0.01)
            if time.monotonic() - begun > _AGAIN_S:
                begun = time.monotonic()
                self._copy()  # raises where the GPU has failed since, and no copy comes
        there, here = self.copies
        ahead = there[..., self.rank] - here[..., self.other]
        return bool((ahead.to(torch.int32) > 0).any())  # rows are counted in 32 bits

    def _copy(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for copy, flags in zip(self.copies, (self.there, self.here), strict=True):
                copy.copy_(flags, non_blocking=True)


def _watch_ranks(
    wanted: Any, watch: Any, meeting: Any, processes: Sequence[Sequence[int]], own: torch.Tensor
) -> None:
    """Ends this process where it waits for a rank that has ended. processes: of all ranks."""
    stream = torch.cuda.Stream(own.device, priority=_PRIORITY)
    here = own[: 8 * math.prod(wanted.flags)].view(torch.int64).view(wanted.flags)
    others = []
    for rank, process in enumerate(processes):
        if rank != meeting.rank:
            there = meeting.get_buffer(rank, wanted.flags, torch.int64)
            copies = _pinned(wanted.flags), _pinned(wanted.flags)
            waits = _Waits(meeting.rank, rank, there, here, copies, stream)
            others.append((process, waits))
    watch.watch(others, dist.get_rank())


def _pinned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)


def _gathered(numbers: Sequence[int], group: Any, device: torch.device) -> list[list[int]]:
    """The numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    told = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(told, own, group=group)
    return [one.tolist() for one in told]
