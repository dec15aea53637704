"""What the machine code of a kernel does, read from its PTX and SASS, and rules it must keep.

Triton neither reports nor enforces any of this: it compiles kernels that spill, that need more
shared or tensor memory than there is, that are a single trap, or that silently use a slower
tensor-core path.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.codegen.audit.sass import MMA_OPCODES, count_opcodes, section
from tilewright.codegen.dead_barriers import count_dead_barriers
from tilewright.codegen.targets import Target

SPILL_OPCODES = frozenset({"LDL", "STL"})
# Bytes of spilled registers per thread that are a note where no loop repeats their accesses.
FEW_SPILLED_BYTES = 16
# A real kernel has more registers: the whole body was replaced by a trap.
TRAP_REGISTERS = 16

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
# Buffers that are allocated empty, for loads; one with an operand holds a tensor of registers.
_POOLED = re.compile(
    r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x((?:\d+x)+)([a-zA-Z][a-zA-Z0-9]*)"
)
_BITS = re.compile(r"\d+")
# The left operand's columns, and how many of a row each of the four threads holds that share it.
_PRODUCT = re.compile(
    r"tt\.dot .* : tensor<(?:\d+x)+?(\d+)x[a-z]\w*, [^>]*opIdx = 0, [^>]*kWidth = (\d+)"
)


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
        opcodes: how often each SASS opcode (without modifiers) occurs in the kernel.
        main_loop: the same for the innermost loop with tensor-core arithmetic.
        looped_spills: loads and stores of spilled registers that a loop, of any kind, repeats.
        mma_kinds: PTX spellings of the tcgen05 instructions.
        staged_bytes: shared memory of multi-stage load buffers, what a block has in flight.
        dead_barriers: barriers that nothing waits for, in memory that is used for data as well.
        repeating_products: products of fewer columns than the threads of a row hold, which count
            some of them several times and others not at all.
        is_trap: the whole kernel is a trap.
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
    looped_spills: int
    mma_kinds: tuple[str, ...]
    staged_bytes: int
    dead_barriers: int
    repeating_products: int
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
        return _spills_among(self.opcodes)

    def blocks_per_sm(self, target: Target) -> int:
        """Blocks that fit an SM at once, by registers, shared memory, TMEM and threads."""
        threads = self.num_warps * target.warp_size
        limits = [target.blocks_per_sm, target.threads_per_sm // threads]
        limits.append(target.registers_per_sm // max(1, threads * (-(-self.registers // 8) * 8)))
        if self.shared_bytes:
            # Each block also takes 1 KiB of the SM's.
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
    counts = count_opcodes(section(sass, str(metadata["name"])))
    threads = re.search(r"^\.reqntid\s+(\d+)", ptx, re.MULTILINE)
    registers, stack = map(int, usage.groups())
    instructions = counts.whole.total() - counts.whole["NOP"]
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
        opcodes=dict(sorted(counts.whole.items())),
        main_loop=dict(sorted(counts.main_loop.items())),
        looped_spills=_spills_among(counts.in_loops),
        mma_kinds=tuple(sorted(set(re.findall(r"tcgen05\.mma[\w.:]*", ptx)))),
        staged_bytes=staged_bytes(ttgir),
        dead_barriers=count_dead_barriers(ttgir),
        repeating_products=repeating_products(ttgir),
        is_trap=registers <= TRAP_REGISTERS and instructions < 32,
    )


def _spills_among(opcodes: Mapping[str, int]) -> int:
    return sum(opcodes.get(name, 0) for name in SPILL_OPCODES)


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


def repeating_products(ttgir: str) -> int:
    """How many products out of registers (mma.sync) have fewer columns than four threads hold."""
    return sum(int(columns) < 4 * int(held) for columns, held in _PRODUCT.findall(ttgir))


@dataclass(frozen=True)
class Expectations:
    """What a kernel is expected to do, for `check`.

    Attributes:
        mma: operand dtype of its GEMM, None for a kernel without one.
        legacy_mma_reason: why this GEMM may use an older tensor-core path, "" where it may not.
        tma_loads: operands come by TMA. tma_stores: outputs leave by TMA.
        warp_specialized: producers and consumers are different warps.
        stack_bytes: allowed; warp specialisation takes up to 8 bytes.
        memory_bound: its loads in flight must cover the memory latency.
        blocks_per_sm: blocks of it that must fit an SM at once.
        row_scales_reason: why the block scales of one operand pass through registers, "" where all
            scales go from shared to tensor memory.
        fresh_sums_reason: why each step of the main loop starts an accumulator at zero and reads
            it, "" where one accumulator stays in tensor memory.
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


def _unless(holds: object, problem: str) -> str | None:
    return None if holds else problem


def _limit(actual: int, what: str, most: int) -> str | None:
    return _unless(actual <= most, f"{actual} {what}".rstrip() + f", at most {most}")


def _mma_present(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma is None or expected.legacy_mma_reason:
        return None
    opcode = target.mma_opcode(expected.mma)
    found = audit.mma or "no tensor-core opcode"
    return _unless(audit.count(opcode), f"expected {opcode} for {expected.mma}, found {found}")


def _no_legacy_mma(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma is None or expected.legacy_mma_reason:
        return None
    found = {k: n for k, n in (audit.main_loop or audit.opcodes).items() if k in target.legacy_mma}
    return _unless(not found, f"older tensor-core opcodes in the main loop: {found}")


def _block_scaled(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if expected.mma != "nvfp4" or not target.has("block_scaled_mma"):
        return None
    kinds = [k for k in audit.mma_kinds if "block_scale" in k and "mxf4nvf4" in k]
    if not kinds:
        return f"no kind::mxf4nvf4.block_scale instruction: {list(audit.mma_kinds)}"
    if not audit.count("UTCCP"):
        return "no copy of scales from shared to tensor memory (UTCCP)"
    by_registers = audit.main_loop.get("STTM", 0) and not expected.row_scales_reason
    problem = "scales are copied to tensor memory through registers (STTM in the main loop)"
    return _unless(not by_registers, problem)


def _accumulator(audit: Audit, target: Target, expected: Expectations) -> str | None:
    # Before triton 3.9 an accumulator that two dots share goes through registers, and is wrong.
    both = audit.main_loop.get("LDTM", 0) and audit.main_loop.get("STTM", 0)
    return _unless(
        expected.fresh_sums_reason or not both,
        "the accumulator is read from tensor memory and written back in the main loop",
    )


def _spills(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if not audit.main_loop:
        return _limit(audit.spills, "", 0)
    return _limit(_spills_among(audit.main_loop), "in the main loop", 0)


def _stack(audit: Audit, target: Target, expected: Expectations) -> str | None:
    if _spills_once(audit):
        return None
    return _limit(audit.stack_bytes, "bytes", expected.stack_bytes)


def _spills_once(audit: Audit) -> bool:
    """Whether all that is on the stack is a few registers, spilled around the main loop.

    Each is stored once and loaded once for a thread, which costs less than one step of the loop.
    """
    few = audit.stack_bytes <= FEW_SPILLED_BYTES
    return bool(few and audit.main_loop and audit.spills and not audit.looped_spills)


def _stack_note(audit: Audit, target: Target, expected: Expectations) -> str | None:
    told = audit.stack_bytes > expected.stack_bytes and _spills_once(audit)
    problem = f"{audit.stack_bytes} bytes of registers are spilled, outside of every loop"
    return _unless(not told, f"{problem} ({audit.spills} loads and stores)")


def _in_flight(audit: Audit, target: Target, expected: Expectations) -> str | None:
    has, needs = audit.bytes_in_flight(target), target.bytes_in_flight_per_sm
    return _unless(not expected.memory_bound or has >= needs, f"{has} per SM, at least {needs}")


def _occupancy(audit: Audit, target: Target, expected: Expectations) -> str | None:
    has, needs = audit.blocks_per_sm(target), expected.blocks_per_sm
    return _unless(has >= needs, f"{has} blocks per SM, at least {needs}")


#: Name to what gives a sentence where the rule is not kept, else None.
RULES: Mapping[str, Callable[[Audit, Target, Expectations], str | None]] = {
    "target": lambda a, t, e: _unless(
        a.sm_target == t.sm_name, f"built for {a.sm_target}, not {t.sm_name}"
    ),
    "body": lambda a, t, e: _unless(not a.is_trap, "Triton replaced the whole kernel by a trap"),
    "tensor core": _mma_present,
    "no legacy tensor core": _no_legacy_mma,
    "block scales": _block_scaled,
    "accumulator": _accumulator,
    "stack": _stack,
    "spills": _spills,
    "registers": lambda a, t, e: _limit(a.registers, "", t.max_registers),
    "shared": lambda a, t, e: _limit(a.shared_bytes, "bytes", t.max_shared_bytes),
    "tmem": lambda a, t, e: _limit(a.tmem_columns, "columns", t.tmem_columns),
    "occupancy": _occupancy,
    "tma loads": lambda a, t, e: _unless(
        not e.tma_loads or a.count("UTMALDG"), "no TMA load (UTMALDG)"
    ),
    "tma stores": lambda a, t, e: _unless(
        not e.tma_stores or a.count("UTMASTG"), "no TMA store (UTMASTG)"
    ),
    "warp specialisation": lambda a, t, e: _unless(
        not e.warp_specialized or a.warp_specialized, "the warps are not specialised"
    ),
    "bytes in flight": _in_flight,
    "barriers": lambda a, t, e: _limit(a.dead_barriers, "that nothing waits for", 0),
    "products": lambda a, t, e: _limit(a.repeating_products, "that repeat columns", 0),
}


#: Name to what gives a sentence where there is something to know that breaks no rule, else None.
NOTES: Mapping[str, Callable[[Audit, Target, Expectations], str | None]] = {"stack": _stack_note}


def check(audit: Audit, target: Target, expectations: Expectations | None = None) -> list[str]:
    """Lists the rules that a kernel breaks, as `rule: sentence`; empty where it keeps all."""
    return _told(RULES, audit, target, expectations)


def notes(audit: Audit, target: Target, expectations: Expectations | None = None) -> list[str]:
    """Lists what else is to know of a kernel, as `rule: sentence`; no note breaks a rule."""
    return _told(NOTES, audit, target, expectations)


def _told(
    rules: Mapping[str, Callable[[Audit, Target, Expectations], str | None]],
    audit: Audit,
    target: Target,
    expectations: Expectations | None,
) -> list[str]:
    expected = expectations or Expectations()
    found = ((name, rule(audit, target, expected)) for name, rule in rules.items())
    return [f"{name}: {sentence}" for name, sentence in found if sentence]
