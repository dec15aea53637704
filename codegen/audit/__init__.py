"""What the machine code of a kernel does, read from its PTX and SASS, and rules it must keep.

Triton reports none of this and enforces none of it: it emits kernels that spill, that want more
shared or tensor memory than there is, whose body is one trap, or that quietly use a slower
tensor-core path.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.codegen.audit.sass import MMA_OPCODES, count_opcodes, section
from tilewright.codegen.dead_barriers import count_dead_barriers
from tilewright.codegen.targets import Target

SPILL_OPCODES = frozenset({"LDL", "STL"})
# Fewer registers than any real kernel has: the whole body was replaced by a trap.
TRAP_REGISTERS = 16

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
# Allocated empty, to be filled by loads; an operand would be a tensor on its way elsewhere.
_POOLED = re.compile(
    r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x((?:\d+x)+)([a-zA-Z][a-zA-Z0-9]*)"
)
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Audit:
    """Facts about one compiled kernel.

    Attributes:
        kernel, sm_target, triton, ptxas: names and versions.
        instructions: SASS instructions without NOPs.
        registers: per thread, as ptxas allots them; stack_bytes: of local memory per thread.
        shared_bytes: dynamic shared memory per block; tmem_columns: of tensor memory.
        num_warps: warps launched, those of warp specialisation included.
        warp_specialized: whether producers and consumers are different warps.
        global_scratch_bytes: per block, for descriptors made on the device.
        opcodes: SASS opcode (without modifiers) to how often it stands in the kernel.
        main_loop: the same for the innermost loop that holds tensor-core arithmetic.
        mma_kinds: PTX spellings of the tcgen05 instructions.
        staged_bytes: shared memory of multi-stage load buffers, what a block has in flight.
        dead_barriers: barriers that nothing waits for, in memory that something else has as well.
        is_trap: the body is nothing but a trap.
    """

    kernel: str
    sm_target: str
    triton: str
    ptxas: str
    instructions: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tmem_columns: int
    num_warps: int
    warp_specialized: bool
    global_scratch_bytes: int
    opcodes: dict[str, int]
    main_loop: dict[str, int]
    mma_kinds: tuple[str, ...]
    staged_bytes: int
    dead_barriers: int
    is_trap: bool

    def count(self, opcode: str) -> int:
        return self.opcodes.get(opcode, 0)

    @property
    def mma(self) -> dict[str, int]:
        """Tensor-core opcodes and their counts."""
        return {name: n for name, n in sorted(self.opcodes.items()) if name in MMA_OPCODES}

    @property
    def spills(self) -> int:
        """Loads and stores of spilled registers."""
        return sum(self.count(name) for name in SPILL_OPCODES)

    def blocks_per_sm(self, target: Target) -> int:
        """Blocks that fit an SM at once, by registers, shared memory, TMEM and threads."""
        threads = self.num_warps * target.warp_size
        limits = [32, 2048 // threads]
        limits.append(target.registers_per_sm // max(1, threads * (-(-self.registers // 8) * 8)))
        if self.shared_bytes:
            # Each block also takes 1 KiB of the 228 KiB of an SM.
            limits.append((target.max_shared_bytes + 1024) // (self.shared_bytes + 1024))
        if self.tmem_columns:
            limits.append(target.tmem_columns // self.tmem_columns)
        return max(0, min(limits))

    def bytes_in_flight(self, target: Target) -> int:
        """Bytes of loads one SM can have outstanding through its staging buffers."""
        return self.staged_bytes * self.blocks_per_sm(target)

    def summary(self) -> str:
        """One line for a snapshot: what a compiler upgrade would change."""
        mma = " ".join(f"{name}={n}" for name, n in self.mma.items()) or "no mma"
        tma = f"UTMALDG={self.count('UTMALDG')} UTMASTG={self.count('UTMASTG')}"
        return (
            f"{mma} {tma} regs={self.registers} stack={self.stack_bytes} "
            f"shared={self.shared_bytes} tmem={self.tmem_columns} warps={self.num_warps}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Audit:
        data = json.loads(text)
        data["mma_kinds"] = tuple(data["mma_kinds"])
        return cls(**data)


def audit_folder(folder: Path) -> Audit:
    """Audit what worker.py wrote, with the disassembler of the triton that compiled it."""
    metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
    tools, cubin = Path(metadata["tools"]), folder / "kernel.cubin"
    sass = _run(tools / "nvdisasm", "-c", str(cubin))
    resources = _run(tools / "cuobjdump", "-res-usage", str(cubin))
    ptx = (folder / "kernel.ptx").read_text("utf-8")
    ttgir = (folder / "kernel.ttgir").read_text("utf-8")
    return read_audit(metadata, sass, resources, ptx, ttgir, cubin.read_bytes())


def _run(tool: Path, *arguments: str) -> str:
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed: {done.stderr.strip()}")
    return done.stdout


def read_audit(
    metadata: Mapping[str, Any], sass: str, resources: str, ptx: str, ttgir: str, cubin: bytes
) -> Audit:
    """Put an audit together from a compiler's outputs."""
    usage = _RESOURCES.search(resources.partition(f"Function {metadata['name']}:")[2])
    target = re.search(r"^\.target\s+(\S+)", ptx, re.MULTILINE)
    if usage is None or target is None:
        raise ValueError("resource usage and target are missing from the compiler's outputs")
    version = _PTXAS.search(cubin)
    opcodes, main_loop = count_opcodes(section(sass, str(metadata["name"])))
    threads = re.search(r"^\.reqntid\s+(\d+)", ptx, re.MULTILINE)
    registers, stack = map(int, usage.groups())
    instructions = sum(opcodes.values()) - opcodes["NOP"]
    return Audit(
        kernel=str(metadata["name"]),
        sm_target=target.group(1),
        triton=str(metadata["triton"]),
        ptxas=version.group(1).decode() if version else "unknown",
        instructions=instructions,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=int(metadata["shared"] or 0),
        tmem_columns=int(metadata["tmem_size"] or 0),
        num_warps=int(threads.group(1)) // 32 if threads else int(metadata["num_warps"]),
        warp_specialized="ttg.warp_specialize(" in ttgir,
        global_scratch_bytes=int(metadata["global_scratch_size"] or 0),
        opcodes=dict(sorted(opcodes.items())),
        main_loop=dict(sorted(main_loop.items())),
        mma_kinds=tuple(sorted(set(re.findall(r"tcgen05\.mma[\w.:]*", ptx)))),
        staged_bytes=staged_bytes(ttgir),
        dead_barriers=count_dead_barriers(ttgir),
        is_trap=registers <= TRAP_REGISTERS and instructions < 32,
    )


def staged_bytes(ttgir: str) -> int:
    """Bytes of all multi-stage load buffers: local_alloc of rank 3 and more, stages first."""
    total = 0
    for stages, dims, element in _POOLED.findall(ttgir):
        extents = [int(extent) for extent in dims.rstrip("x").split("x")]
        bits = _BITS.search(element)
        if len(extents) < 2 or bits is None:  # barriers are one-dimensional
            continue
        elements = int(stages)
        for extent in extents:
            elements *= extent
        total += elements * int(bits.group()) // 8
    return total


@dataclass(frozen=True)
class Expectations:
    """What a kernel claims of itself, so that `check` can hold it to that.

    Attributes:
        mma: operand dtype of its GEMM, None for a kernel without one.
        legacy_mma_reason: why this GEMM may use an older tensor-core path, "" where it may not.
        tma_loads: operands come by TMA. tma_stores: outputs leave by TMA.
        warp_specialized: producers and consumers are different warps.
        stack_bytes: allowed; warp specialisation keeps up to 8 bytes of its own.
        memory_bound: its loads in flight must cover the memory latency.
        blocks_per_sm: blocks of it that must fit an SM at once.
        row_scales_reason: why the block scales of one operand pass through registers, "" where all
            scales go from shared to tensor memory.
        fresh_sums_reason: why each step of the main loop starts a sum at zero and reads it out, ""
            where one accumulator stays in tensor memory.
    """

    mma: str | None = None
    legacy_mma_reason: str = ""
    tma_loads: bool = False
    tma_stores: bool = False
    warp_specialized: bool = False
    stack_bytes: int = 0
    memory_bound: bool = False
    blocks_per_sm: int = 1
    row_scales_reason: str = ""
    fresh_sums_reason: str = ""


@dataclass(frozen=True)
class Rule:
    """A named demand; `problem` gives a sentence where it is not met, else None."""

    name: str
    problem: Callable[[Audit, Target, Expectations], str | None]


def _limit(what: str, actual: int, most: int) -> str | None:
    return f"{what}: {actual}, at most {most}" if actual > most else None


def _mma_present(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma is None or expected.legacy_mma_reason:
        return None
    opcode = target.mma_opcode(expected.mma)
    if audit.count(opcode):
        return None
    return f"expected {opcode} for {expected.mma}, found {audit.mma or 'no tensor-core opcode'}"


def _no_legacy_mma(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma is None or expected.legacy_mma_reason:
        return None
    found = {k: n for k, n in (audit.main_loop or audit.opcodes).items() if k in target.legacy_mma}
    return f"older tensor-core opcodes in the main loop: {found}" if found else None


def _block_scaled(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma != "nvfp4" or not target.has("block_scaled_mma"):
        return None
    kinds = [k for k in audit.mma_kinds if "block_scale" in k and "mxf4nvf4" in k]
    if not kinds:
        return f"no kind::mxf4nvf4.block_scale instruction: {list(audit.mma_kinds)}"
    if not audit.count("UTCCP"):
        return "scales do not reach tensor memory by UTCCP"
    by_hand = audit.main_loop.get("STTM", 0) and not expected.row_scales_reason
    return "scales reach tensor memory by registers (STTM in the main loop)" if by_hand else None


def _round_trip(audit: Audit, target: Target, expected: Expectations) -> str | None:
    # Before triton 3.9 an accumulator that two dots share goes through registers, and is wrong.
    if expected.fresh_sums_reason:
        return None
    both = audit.main_loop.get("LDTM", 0) and audit.main_loop.get("STTM", 0)
    return "the accumulator leaves and re-enters tensor memory in the main loop" if both else None


def _in_flight(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if not expected.memory_bound:
        return None
    has, needs = audit.bytes_in_flight(target), target.bytes_in_flight_per_sm
    return f"bytes in flight per SM: {has}, at least {needs}" if has < needs else None


def _expects(flag: bool, present: object, message: str) -> str | None:
    return message if flag and not present else None


RULES: Sequence[Rule] = (
    Rule(
        "target",
        lambda a, t, e: (
            None if a.sm_target == t.sm_name else f"built for {a.sm_target}, not {t.sm_name}"
        ),
    ),
    Rule("body", lambda a, t, e: "the body is nothing but a trap" if a.is_trap else None),
    Rule("tensor core", _mma_present),
    Rule("no legacy tensor core", _no_legacy_mma),
    Rule("block scales", _block_scaled),
    Rule("accumulator", _round_trip),
    Rule("stack", lambda a, t, e: _limit("stack bytes", a.stack_bytes, e.stack_bytes)),
    Rule(
        "spills",
        lambda a, t, e: (
            _limit("spills in the main loop", sum(a.main_loop.get(k, 0) for k in SPILL_OPCODES), 0)
            if a.main_loop
            else _limit("spills", a.spills, 0)
        ),
    ),
    Rule("registers", lambda a, t, e: _limit("registers", a.registers, t.max_registers)),
    Rule("shared", lambda a, t, e: _limit("shared bytes", a.shared_bytes, t.max_shared_bytes)),
    Rule("tmem", lambda a, t, e: _limit("TMEM columns", a.tmem_columns, t.tmem_columns)),
    Rule(
        "occupancy",
        lambda a, t, e: (
            f"blocks per SM: {a.blocks_per_sm(t)}, at least {e.blocks_per_sm}"
            if a.blocks_per_sm(t) < e.blocks_per_sm
            else None
        ),
    ),
    Rule(
        "tma loads",
        lambda a, t, e: _expects(e.tma_loads, a.count("UTMALDG"), "no TMA load (UTMALDG)"),
    ),
    Rule(
        "tma stores",
        lambda a, t, e: _expects(e.tma_stores, a.count("UTMASTG"), "no TMA store (UTMASTG)"),
    ),
    Rule(
        "warp specialisation",
        lambda a, t, e: _expects(
            e.warp_specialized, a.warp_specialized, "the warps are not specialised"
        ),
    ),
    Rule("bytes in flight", _in_flight),
    Rule("barriers", lambda a, t, e: _limit("barriers used for nothing", a.dead_barriers, 0)),
)


def check(audit: Audit, target: Target, expectations: Expectations | None = None) -> list[str]:
    """Problems of a kernel, as `rule: sentence`; empty where it keeps every rule."""
    expected = expectations or Expectations()
    found = ((rule.name, rule.problem(audit, target, expected)) for rule in RULES)
    return [f"{name}: {problem}" for name, problem in found if problem]
