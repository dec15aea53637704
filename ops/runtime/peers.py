"""Memory that every rank of a group can access, and how ranks agree to use it.

The memory is torch's symmetric memory: each rank allocates, and all ranks exchange the addresses. A
kernel that uses this memory waits for the other ranks, so either all ranks use it or no rank does.
A rank may be unable to use the memory: because of another backend, GPUs without peer access, or a
kernel that does not compile. Therefore the ranks tell each other first whether they can use it.
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

# The fields (addresses, sent, rank) of an `ops.runtime.program.PeerMemory`.
Memory = tuple[int, int, int]


class RankFailedError(RuntimeError):
    """Raised when this rank fails in an operation that the other ranks of its group wait for. There
    is no fallback, because this rank alone cannot release the other ranks."""

    def __init__(self, group: str, error: Exception) -> None:
        super().__init__(
            f"this rank failed in an operation that all ranks of group {group} perform together, "
            f"and the other ranks wait for it: {type(error).__name__}: {error}"
        )


@dataclass
class _Shared:
    """The memory that the ranks allocated for one form of kernels.

    Attributes:
        group: The group itself, because a later group may have the same name.
        memory: The memory; None if the ranks share none.
        kinds: Maps each kind of call to whether all ranks could compile their kernels for it.
    """

    group: Any
    memory: Memory | None
    kinds: dict[str, bool] = field(default_factory=dict)


# The memory that was agreed on. The keys are (group name, device index, form).
_shared: dict[tuple[str, int, str], _Shared] = {}
# Keeps the memory of `_shared` allocated. CUDA graphs that were captured with this memory need it,
# too.
_kept: list[Any] = []


# torch's function that finds a process group by name; None if torch has no process groups. The
# function is looked up only once, because every sum over ranks calls `is_group`.
_resolve: Any = getattr(getattr(dist, "distributed_c10d", None), "_resolve_process_group", None)


def group_named(name: str) -> Any:
    """Returns the process group with a name, as functional collectives use it. Raises torch's error
    if there is no such group."""
    return _resolve(name)


def is_group(name: str, group: Any) -> bool:
    """Whether a group still has this name."""
    try:
        return _resolve(name) is group
    except (RuntimeError, ValueError):  # there is no such group
        return False


def group_size(name: str) -> int | None:
    """Returns the number of ranks in a group; None if there is no such group."""
    try:
        return int(group_named(name).size())
    except (RuntimeError, ValueError, TypeError):
        return None


def obstacle(name: str) -> str | None:
    """Returns why the ranks of a group can never access each other's memory; None if they may be
    able to. The answer is the same on all ranks. It is None for torch's fake groups, which are used
    for planning."""
    backend = dist.get_backend(group_named(name))
    if "nccl" in backend or backend in ("fake", "undefined"):
        return None
    return f"the ranks of group {name} talk through {backend}, which has no symmetric memory"


def peer_memory(
    wanted: Any, index: int, compiled: Callable[[], Any], apart: Callable[..., Any], watch: Any
) -> Memory | None:
    """Returns the memory of a `Peers` step on the device with this index. Returns None if the ranks
    use no shared memory for this form, or for this kind of call.

    All ranks allocate the memory at the first call of its form. During a CUDA graph capture,
    nothing is allocated or agreed on, because the ranks would wait for each other inside the graph.

    compiled: a function that compiles the kernel. apart: a function that calls another function
    isolated from the caller's stream. watch: the module `ops.runtime.watch`.
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
    """Whether every rank can compile its kernel for a new kind of call."""
    with torch.cuda.device(index):
        _, why = _attempt(compiled)
        return _agreed(why, wanted, group, index)


def _agreed_memory(
    wanted: Any, group: Any, index: int, compiled: Callable[[], Any], watch: Any
) -> Memory | None:
    """Allocates memory and exchanges addresses with the other ranks. Returns the memory. If one of
    the ranks fails, returns None on all ranks."""
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
        # This is a collective operation: a rank that fails here must not continue to the next
        # collective alone.
        processes = _gathered(watch.this_process(dist.get_rank()), group, own.device)
        _, why = _attempt(partial(_watch_ranks, wanted, watch, meeting, processes, own))
    if why is not None:
        log.warning("cannot notice the end of a rank of group %s: %s", wanted.group, why)
    _kept.append((own, meeting, addresses, sent))
    return addresses.data_ptr(), sent.data_ptr(), meeting.rank


def _device(index: int) -> torch.device:
    """Returns the GPU of this index."""
    return torch.device("cuda", index)


def _agreed(why: str | None, wanted: Any, group: Any, index: int) -> bool:
    """Whether all ranks succeeded. Logs a warning if one did not. why: this rank's error, or
    None."""
    if _all_can(why is None, f"{wanted.form} {wanted.kind}", group, index):
        return True
    why = why or "another rank failed, or has other releases of torch or Triton"
    log.warning("group %s has no symmetric memory and uses NCCL instead: %s", wanted.group, why)
    return False


def _attempt(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """Runs a step. Returns (result, None), or (None, error message)."""
    try:
        return step(), None
    except Exception as error:  # the other ranks are told that there is an error, and it is logged
        return None, f"{type(error).__name__}: {error}"


def _allocated(nbytes: int, compiled: Callable[[], Any], index: int) -> torch.Tensor:
    """Compiles the kernel, and then returns this rank's memory, set to zero."""
    from torch.distributed import _symmetric_memory

    compiled()
    own = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=_device(index))
    own.zero_()
    torch.cuda.current_stream().synchronize()  # before another rank writes
    return own


def _met(own: torch.Tensor, group: str) -> Any:
    """Exchanges addresses with the other ranks. Returns torch's handle to their memory."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(own, group)  # type: ignore[arg-type]


def _all_can(can: bool, form: str, group: Any, index: int) -> bool:
    """Whether every rank succeeded, and all ranks have the same `form` and the same releases of
    torch and Triton. Waits for all ranks."""
    import triton

    text = f"{form} {torch.__version__} {triton.__version__}"
    mark = zlib.crc32(text.encode())
    answers = torch.tensor([int(can), mark, -mark], dtype=torch.int64, device=_device(index))
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=group)
    all_can, least, most = answers.tolist()
    return bool(all_can) and least == -most


# --- ranks that end -------------------------------------------------------------------------------

# Marks a copy that has not arrived yet. No flag has this value.
_NOT_YET = -(1 << 63)
# The priority of the stream that copies flags. The caller's streams have a lower priority (a higher
# number), and may be being captured.
_PRIORITY = -3
# If copies have not arrived after this time (seconds), they are issued again.
_AGAIN_S = 1.0


@dataclass(frozen=True)
class _Waits:
    """A callable that returns whether a kernel of this rank waits for a rank whose process has
    ended. The kernel waits if this rank has sent a row to the other rank and has received no row
    from that rank.

    The flags of both ranks are copied on a separate stream into pinned memory, where the CPU polls
    for their arrival. Therefore nothing waits for the caller's work, and no call is made that is
    forbidden during a capture.

    Attributes:
        rank: This rank.
        other: The rank whose process has ended.
        there: The flags in the memory of the other rank.
        here: The flags in the memory of this rank.
        copies: The pinned copies of `there` and `here`.
        stream: The stream on which the flags are copied.
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
                self._copy()  # raises if the GPU has failed, in which case no copy arrives
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
    """Makes threads that watch the processes of the other ranks. A thread ends this process if this
    rank waits for a rank whose process has ended. processes: the processes of all ranks."""
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
    """Returns the `numbers` that each rank passes to this function. Waits for all ranks."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    told = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(told, own, group=group)
    return [one.tolist() for one in told]
