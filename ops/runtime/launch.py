"""The machine that performs the steps of a call on a GPU: it compiles and launches kernels, and
allocates memory, including the scratch memory of kernels that split K."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tilewright.codegen.build import (
    find_triton_a_cache,
    install_allocator,
    keep_ttgir,
    load_jit,
)
from tilewright.codegen.build.travel import note_triton
from tilewright.codegen.build.worker import source_of
from tilewright.codegen.dead_barriers import compile_without_dead_barriers
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.runtime import watch
from tilewright.ops.runtime.device import target_of
from tilewright.ops.runtime.isolation import apart
from tilewright.ops.runtime.peers import group_named, is_group, peer_memory
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    Machine,
    PeerMemory,
    Peers,
    SplitK,
    Step,
)

# The number of counters in a slab. A slab is a zeroed tensor of counters on a device, from which
# launches take their counters.
_SLAB_COUNTERS = 1 << 18
# The smallest number of counters that a stream takes at a time.
_STREAM_COUNTERS = 1024
# If a slab has fewer counters left than this, an uncaptured launch, such as the warm-up before a
# capture, replaces the slab. No slab can be made during a capture, and a captured graph that gets
# no counters from a slab must set its own counters to zero at each replay.
_ENOUGH_COUNTERS = _SLAB_COUNTERS // 2

_counters_lock = threading.Lock()
_counters: dict[tuple[int, int], torch.Tensor] = {}
_slabs: dict[int, torch.Tensor] = {}
# All slabs are kept: a captured launch does not keep its counters alive, and it may be replayed
# after its slab is used up.
_every_slab: list[torch.Tensor] = []


@dataclass(frozen=True)
class Gpu:
    """Performs steps on the current stream of a CUDA device."""

    device: torch.device

    @property
    def target(self) -> Target:
        return target_of(self.device)

    def perform(self, step: Step) -> Any:
        match step:
            case Launch(spec, grid) if 0 not in grid:
                made = launcher(spec, grid, self.device)
                made(step.given)
                return made
            case Buffer(shape, dtype):
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
            case SplitK(num_tiles, elements):
                return _split_k_scratch(num_tiles, elements, self.device)
            case Peers():
                return self._peer_memory(step)
            case Library(function, tensors):
                return function(*tensors)
        return None

    def _peer_memory(self, step: Peers) -> PeerMemory | None:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        made = peer_memory(step, index, partial(compiled_kernel, step.spec, index), apart, watch)
        if made is None:
            return None
        return PeerMemory(*made, partial(is_group, step.group, group_named(step.group)))

    def maker(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        # PyTorch parses separate sizes faster than a tuple of sizes.
        sizes = tuple(buffer.shape) or ((),)
        return partial(torch.empty, *sizes, dtype=buffer.dtype, device=self.device)


def machine_of(device: torch.device) -> Machine:
    """Returns the machine that performs the steps of calls on a device."""
    return Gpu(device)


@dataclass(frozen=True)
class Launcher:
    """One kernel on one grid."""

    runner: Callable[..., None]
    device_index: int
    makes_descriptors: bool

    def __call__(self, values: Sequence[Any]) -> None:
        """Runs the kernel on the current stream of its device. values: a tensor, an address or a
        number for each run-time parameter."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(values)
        if self.makes_descriptors:
            # Triton's allocator is set for each thread (a ContextVar), but all threads of the
            # process share the kernel.
            install_allocator()
        self.runner(*values)
        return None


def launcher(spec: KernelSpec, grid: Sequence[int], device: torch.device) -> Launcher:
    """Returns a launcher of a spec's kernel on a grid, compiled for `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        kernel = compiled_kernel(spec, index)
        full_grid = (*grid, *(1,) * (3 - len(grid)))
        return Launcher(kernel[full_grid], index, bool(kernel.metadata.global_scratch_size))


@cache
def compiled_kernel(spec: KernelSpec, device_index: int) -> Any:
    """Returns Triton's compiled kernel, exactly as the spec describes it.

    This bypasses the JIT's own dispatch, which would compile the kernel again for an integer that
    is 1 or divisible by 16, and would inspect every argument at every launch.
    """
    import triton

    launchable = load_jit(spec)
    find_triton_a_cache()
    source = source_of(launchable.function, dict(spec.signature), spec.divisible16)
    target = triton.runtime.driver.active.get_current_target()
    options = dict(launchable.options)
    return compile_without_dead_barriers(source, target, options, keep_ttgir, note_triton)


def _split_k_scratch(
    num_tiles: int, elements_per_tile: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (fp32 workspace, zeroed counters) for one launch of a split-K kernel.

    The workspace comes from the caching allocator, which orders the reuse of memory by stream.
    Every launch sets its counters back to zero, so a stream uses its counters again. A captured
    launch gets separate counters, because its graph may be replayed on any stream.
    """
    workspace = torch.empty(num_tiles * elements_per_tile, dtype=torch.float32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    capturing = _is_capturing(index)
    with _counters_lock:
        if capturing:
            return workspace, _captured_counters(num_tiles, index)
        slab = _slabs.get(index)
        if slab is not None and slab.numel() < _ENOUGH_COUNTERS:
            _slabs[index] = _kept_slab(_SLAB_COUNTERS, index)
        key = (index, torch.cuda.current_stream(index).cuda_stream)
        counters = _counters.get(key)
        if counters is None or counters.numel() < num_tiles:
            counters = _counters[key] = _taken(max(num_tiles, _STREAM_COUNTERS), index)
        return workspace, counters[:num_tiles]


def _is_capturing(index: int) -> bool:
    """Whether the current stream of a device is being captured, whichever device is current."""
    if torch.cuda.current_device() == index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _captured_counters(count: int, index: int) -> torch.Tensor:
    slab = _slabs.get(index)
    if slab is None or slab.numel() < _whole_lines(count):
        # Nothing may run before the capture, so setting the counters to zero becomes a part of the
        # graph.
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
    return _taken(count, index)


def _taken(count: int, index: int) -> torch.Tensor:
    """Takes counters that no other launch uses from the slab. Outside of a capture, makes a new
    slab if the slab is used up."""
    used = _whole_lines(count)
    slab = _slabs.get(index)
    if slab is None or slab.numel() < used:
        slab = _kept_slab(max(used, _SLAB_COUNTERS), index)
    _slabs[index] = slab[used:]
    return slab[:count]


def _whole_lines(count: int) -> int:
    """Rounds a number of counters up to whole cache lines, because launches must not share a cache
    line."""
    return -(-count // 32) * 32


def _kept_slab(count: int, index: int) -> torch.Tensor:
    """Makes a slab that is never freed.

    The caller may be allocating from the memory pool of a CUDA graph's warm-up. `apart` makes the
    slab outside of this pool, so that it outlives the pool. The slab is zero before any stream
    reads it.
    """
    slab = apart(partial(_new_slab, count, index))
    _every_slab.append(slab)
    return slab


def _new_slab(count: int, index: int) -> torch.Tensor:
    with torch.cuda.device(index):
        slab = torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.current_stream().synchronize()
    return slab
