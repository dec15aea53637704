"""Runs one rank of several ranks that share one device.

    python -m tests.ops.collective.one_device DEVICE RANKS RANK FOLDER PORT

On the CPU, a rank is a fork of the process that runs the tests, which has imported everything.

On a GPU, torch's symmetric memory lets ranks share a device if an environment variable is set, and
gloo carries what NCCL would. The ranks take turns on the GPU, so only results count, not times. On
the CPU, a mapped file of each rank is its memory, and kernels run in Triton's interpreter. The
package's own code makes the ranks meet, agree and watch each other, on both devices.

Each rank writes what it found in a part to FOLDER/PART-RANK.json. In the last part rank 1 kills
itself, and the other ranks wait for it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory

from tests.interpreted import Interpreter, wait_idly
from tilewright.codegen.collective.plan import most_tokens
from tilewright.ops import calls
from tilewright.ops.collective import all_reduce_residual_norm as op
from tilewright.ops.collective.cases import sample_reduce
from tilewright.ops.runtime import peers, watch
from tilewright.ops.runtime.isolation import apart
from tilewright.ops.runtime.program import PeerMemory, Peers
from tilewright.ops.runtime.timing import capture
from tilewright.ops.sampling import RowsCase

#: How many seconds gloo waits for a rank.
PATIENCE_S = 60
#: The environment of ranks that share a GPU.
ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
_HALF = torch.float16
_CASES = {
    "cpu": (
        RowsCase("strided", num_tokens=5, n=72, stride=80),
        RowsCase("weightless", num_tokens=1, norm="weightless", norm_offset=1.0, dtype=_HALF),
    ),
    "cuda": (
        RowsCase("one token", num_tokens=1, n=8192),
        RowsCase("strided", num_tokens=5, n=4096, stride=4352),
        RowsCase("gemma", num_tokens=17, n=2880, norm_offset=1.0, dtype=_HALF),
        RowsCase("weightless", num_tokens=3, n=1032, norm="weightless"),
        RowsCase("wide weight", num_tokens=9, n=5120, norm_dtype=torch.float32),
        RowsCase("widest", num_tokens=2, n=16384),
        # Each program has several rows. Two ranks sum this many tokens through memory that they
        # share. With more ranks, the library sums them.
        RowsCase("many tokens", num_tokens=600, n=1024),
    ),
}
_REPEATS = {"cpu": 3, "cuda": 6}
_DELAYED = {"cpu": 6, "cuda": 100}

Call = Callable[[Any], Any]


# --- the CPU in place of a GPU --------------------------------------------------------------------


@dataclass(frozen=True)
class _Meeting:
    """Stands for torch's handle of symmetric memory. It gives the memory of all ranks."""

    rank: int
    memories: list[torch.Tensor]

    @property
    def buffer_ptrs(self) -> list[int]:
        return [memory.data_ptr() for memory in self.memories]

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memories[rank].view(dtype)[: torch.Size(shape).numel()].view(shape)


class _Machine(Interpreter):
    """Runs kernels in the interpreter, with the memory that the ranks agreed on."""

    def perform(self, step: Any) -> Any:
        if not isinstance(step, Peers):
            return super().perform(step)
        made = peers.peer_memory(step, 0, lambda: None, apart, watch)
        kept = {table.data_ptr(): (table, sent) for _, _, table, sent in peers._kept}
        return None if made is None else PeerMemory(*kept[made[0]], made[2])


def _replace_gpu(rank: int, ranks: int, folder: Path) -> None:
    """Replaces the functions by which `peers` and `calls` use CUDA."""
    made: list[int] = []

    def mapped(of: int, nbytes: int) -> torch.Tensor:
        file = str(folder / f"memory-{len(made)}-{of}")
        return torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8)

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return mapped(rank, nbytes)

    def met(own: torch.Tensor, group: Any) -> _Meeting:
        dist.barrier()
        return _Meeting(rank, [own if of == rank else mapped(of, made[-1]) for of in range(ranks)])

    wait_idly()
    machine = _Machine()
    changed: list[tuple[Any, str, Any]] = [
        (_symmetric_memory, "empty", empty),
        (_symmetric_memory, "rendezvous", met),
        (torch.cuda, "device", lambda index: nullcontext()),
        (torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)),
        (torch.cuda, "Stream", lambda device, priority: None),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (peers, "_device", lambda index: torch.device("cpu")),
        (peers, "_pinned", lambda shape: torch.empty(shape, dtype=torch.int64)),
        (calls, "machine_of", lambda device: machine),
    ]
    for module, name, value in changed:
        setattr(module, name, value)
    watch._watch = watch.Watch(every_s=0.2)


# --- what a rank does -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """One rank. call: the op, called in this device's way."""

    device: str
    rank: int
    ranks: int
    folder: Path
    call: Call

    @property
    def cases(self) -> list[RowsCase]:
        """The cases whose tokens this number of ranks sends through memory."""
        limits = [(case, most_tokens(case.n, self.ranks)) for case in _CASES[self.device]]
        return [case for case, most in limits if most is None or case.num_tokens <= most]

    def arguments(self, case: RowsCase, rank: int | None = None) -> Any:
        """Returns the arguments of a rank, by default this rank, in a case. All ranks have the same
        residual and norm."""
        seed = 1 + (self.rank if rank is None else rank)
        x = sample_reduce(case, self.device, seed)["x"]
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        whole = op.sample_inputs(case, self.device)
        return replace(whole, x=x, group=group, num_ranks=self.ranks)

    def problems(self, case: RowsCase, results: Any, factor: float = 1.0) -> list[str]:
        """Returns how results differ, in float64, from the sum of all ranks' x times `factor`."""
        parts = [self.arguments(case, rank) for rank in range(self.ranks)]
        total = sum(part.x.double() * factor for part in parts)
        residual = parts[0].residual.double()
        exact = op.reference(replace(parts[0], x=total, residual=residual, group="", num_ranks=1))
        tolerance = op.OP.tolerances[case.dtype]
        found = [tolerance.problem(*pair) for pair in zip(results, exact, strict=True)]
        return [f"{case.name} x{factor}: {problem}" for problem in found if problem is not None]

    def delay(self, generator: torch.Generator) -> None:
        """Delays a tenth of this rank's calls."""
        if int(torch.randint(0, 10, (1,), generator=generator)) == 0:
            late = int(torch.randint(1, 30, (1,), generator=generator))
            if self.device == "cuda":
                torch.cuda._sleep(100_000 * late)
            else:
                time.sleep(1e-3 * late)


def bits(results: Any) -> str:
    """Returns a hash of the results' bits."""
    flat = [one.contiguous().view(torch.uint8).cpu().numpy().tobytes() for one in results]
    return hashlib.sha256(b"".join(flat)).hexdigest()[:16]


def eager(of: Rank) -> dict[str, Any]:
    """Calls each case several times with other numbers, so that slots are written again. The third
    call has addresses of an earlier call, and so repeats its launches."""
    said, wrong = [], []
    for case in of.cases:
        a = of.arguments(case)
        first = a.x.clone()
        for call in range(_REPEATS[of.device]):
            a.x.copy_(first * 2**call)
            results = of.call(a)
            wrong += of.problems(case, results, 2.0**call)
            said.append(bits(results))
    return {"wrong": wrong, "bits": said, "memory": memories(of)}


def memories(of: Rank) -> bool:
    """Whether the ranks made memory for each form of row."""
    made = [one.memory is not None for one in peers._shared.values()]
    return len(made) == len({(case.n, case.dtype) for case in of.cases}) and all(made)


def delayed(of: Rank) -> dict[str, Any]:
    """Feeds the results of each call to the next call, with random delays on either rank. A wrong
    bit would stay until the end."""
    a = of.arguments(of.cases[1])
    x, residual = a.x.clone(), a.residual.clone()
    generator = torch.Generator().manual_seed(of.rank)
    for _ in range(_DELAYED[of.device]):
        of.delay(generator)
        total, normed = of.call(replace(a, x=x, residual=residual))
        x, residual = normed * (1.0 + 0.5 * of.rank), total * 0.5
    return {
        "wrong": [] if residual.isfinite().all() else ["not finite"],
        "bits": [bits([residual])],
    }


def captured(of: Rank) -> dict[str, Any]:
    """Replays a CUDA graph of two calls. The second call reads the sum of the first."""
    case = of.cases[1]
    a = of.arguments(case)
    first, kept = a.x.clone(), []

    def step() -> None:
        once = of.call(a)
        kept[:] = [*once, *of.call(replace(a, residual=once[0]))]

    graph = capture([step])
    said, wrong = [], []
    for replay in range(_REPEATS[of.device]):
        a.x.copy_(first * 2**replay)
        graph.replay()
        wrong += of.problems(case, kept[:2], 2.0**replay)
        again = replace(a, residual=kept[0])
        wrong += [] if bits(of.call(again)) == bits(kept[2:]) else [f"replay {replay}: second call"]
        said.append(bits(kept))
    return {"wrong": wrong, "bits": said}


def layer(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Any:
    total = residual + functional.all_reduce(F.linear(x, weight), "sum", dist.group.WORLD)
    return total, F.rms_norm(total, total.shape[-1:], None, 1e-5)


def compiled(of: Rank, **options: Any) -> dict[str, Any]:
    """Compiles a linear whose columns the ranks divide, with the sum and norm after it."""
    from tilewright.compiler import reports

    torch._dynamo.reset()
    before = len(reports())
    made = [torch.randn(8, 512), torch.randn(1024, 512) / 16, torch.randn(8, 1024)]
    generator = torch.Generator().manual_seed(of.rank)
    made[0].normal_(generator=generator)
    for tensor in made[1:]:
        tensor.normal_(generator=generator.manual_seed(99))
    x, weight, residual = (tensor.to(of.device).bfloat16() for tensor in made)
    step: Any = torch.compile(layer, backend="tilewright", **options)
    exact = x.double() @ weight.double().t()
    dist.all_reduce(exact)
    exact += residual.double()
    said, wrong = [], []
    for call in range(5):
        results = [one.clone() for one in step(x, weight, residual)]
        normed = F.rms_norm(exact, exact.shape[-1:], None, 1e-5)
        for result, one in zip(results, (exact, normed), strict=True):
            error = ((result.double() - one).norm() / one.norm()).item()
            wrong += [] if error < 2.0**-7 else [f"call {call}: {error:.1e} from float64"]
        said.append(bits(results))
    fused = [match.op for report in reports()[before:] for match in report.matches]
    notes = [str(note) for report in reports()[before:] for note in report.notes]
    wrong += [] if op.NAME in fused else [f"{op.NAME} is not fused: {fused} {notes}"]
    return {"wrong": wrong, "bits": said}


def compiled_graphs(of: Rank) -> dict[str, Any]:
    """Does the same as `compiled`, in the CUDA graphs of torch.compile."""
    return compiled(of, mode="reduce-overhead")


def bereft(of: Rank) -> None:
    """Kills rank 1 before a call, or with four ranks on a GPU before a replay, and waits for the
    other ranks to notice."""
    a = of.arguments(of.cases[1])
    graph = capture([lambda: of.call(a)]) if of.device == "cuda" and of.ranks > 2 else None
    of.call(a)
    torch.cuda.synchronize()
    dist.barrier()
    if of.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (of.folder / f"waits-{of.rank}").write_text(str(time.time()))
    if graph is not None:
        graph.replay()
    else:
        of.call(a)
    torch.cuda.synchronize()
    (of.folder / f"went-on-{of.rank}").write_text("")


PARTS: dict[str, tuple[Callable[[Rank], dict[str, Any]], ...]] = {
    "cpu": (eager, delayed),
    "cuda": (eager, delayed, captured, compiled, compiled_graphs),
}


def be_rank(device: str, ranks: int, rank: int, folder: Path, port: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # aborted ranks leave no dump of memory
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    op.obstacle = lambda name: None  # gloo is in NCCL's place
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        _replace_gpu(rank, ranks, folder)
    run = calls.Calls(op.OP, "cuda")

    def call(a: Any) -> Any:
        args, kwargs = op.OP.split(a)
        return run(*args, **kwargs)

    of = Rank(device, rank, ranks, folder, call)
    with torch.no_grad():
        for part in PARTS[device]:
            started = time.monotonic()
            try:
                found = part(of)
            except Exception:
                found = {"wrong": [traceback.format_exc()], "bits": []}
            found["seconds"] = round(time.monotonic() - started, 1)
            (folder / f"{part.__name__}-{rank}.json").write_text(json.dumps(found))
            dist.barrier()  # a rank that failed alone ends here, and those that wait for it end too
        if watch.this_process(rank) != watch.UNKNOWN:
            bereft(of)


def be_fork(errors: Path, *rank: Any) -> None:
    """Runs a rank in a fork, without pytest's handlers and the parent's knowledge of ranks."""
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    sys.stdout = sys.stderr = errors.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stderr.fileno(), descriptor)
    os.environ |= ENVIRONMENT
    peers._shared.clear()
    peers._kept.clear()
    be_rank(*rank)


if __name__ == "__main__":
    _device, _ranks, _rank, _folder, _port = sys.argv[1:]
    be_rank(_device, int(_ranks), int(_rank), Path(_folder), int(_port))
