"""Facts about a kernel's machine code, read from the PTX and SASS, and rules for these facts.

Triton does not check these rules. For example, Triton compiles kernels that spill registers,
kernels that need more shared or tensor memory than the chip has, kernels that consist of a single
trap instruction, and kernels that silently use a slower tensor-core path.
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
# If a thread spills at most this many bytes of registers outside of loops, the audit has a note
# about the spills, and no rule is broken.
FEW_SPILLED_BYTES = 16
# If a kernel has at most this many registers, Triton may have replaced the kernel's body by a trap.
TRAP_REGISTERS = 16

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
# Matches load buffers, which are allocated without an operand. A buffer with an operand holds a
# tensor that comes from registers.
_POOLED = re.compile(
    r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x((?:\d+x)+)([a-zA-Z][a-zA-Z0-9]*)"
)
_BITS = re.compile(r"\d+")
# Matches a product (tt.dot). Group 1: the columns of its left operand. Group 2: the columns of one
# row that each thread holds (kWidth); four threads share a row.
_PRODUCT = re.compile(
    r"tt\.dot .* : tensor<(?:\d+x)+?(\d+)x[a-z]\w*, [^>]*opIdx = 0, [^>]*kWidth = (\d+)"
)


@dataclass(frozen=True)
class Audit:
    """Facts about one compiled kernel.

    Attributes:
        kernel, sm_target: The names of the kernel and of its target.
        triton, ptxas: The versions of Triton and of ptxas.
        instructions: The number of SASS instructions, without NOPs.
        registers: The number of registers that ptxas allocates for a thread.
        stack_bytes: The local memory of a thread.
        shared_bytes: The dynamic shared memory of a block.
        tmem_columns: The columns of tensor memory of a block.
        num_warps: The number of launched warps, including warps that warp specialisation adds.
        warp_specialized: Whether producers and consumers are different warps.
        global_scratch_bytes: The scratch memory of a block, for descriptors that are made on the
            device.
        opcodes: How often each SASS opcode (without modifiers) occurs in the kernel.
        main_loop: How often each opcode occurs in the innermost loop with tensor-core arithmetic.
        looped_spills: The number of instructions in loops that load or store spilled registers.
        mma_kinds: The names of the tcgen05 instructions in PTX.
        staged_bytes: The shared memory of the multi-stage load buffers. This is how many bytes of
            loads a block has in flight.
        dead_barriers: The number of barriers on which no instruction waits.
        repeating_products: The number of matrix products whose left operand has fewer columns than
            the four threads of a row hold together. Such a product counts some columns several
            times and omits other columns.
        is_trap: Whether the whole kernel is a trap.
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
        """How often each tensor-core opcode occurs."""
        return {name: n for name, n in sorted(self.opcodes.items()) if name in MMA_OPCODES}

    @property
    def spills(self) -> int:
        """The number of instructions that load or store spilled registers."""
        return _spills_among(self.opcodes)

    def blocks_per_sm(self, target: Target) -> int:
        """Returns how many blocks fit on an SM at the same time, limited by registers, shared
        memory, tensor memory and threads."""
        threads = self.num_warps * target.warp_size
        limits = [target.blocks_per_sm, target.threads_per_sm // threads]
        limits.append(target.registers_per_sm // max(1, threads * (-(-self.registers // 8) * 8)))
        if self.shared_bytes:
            # Each block also takes 1 KiB of the SM's shared memory.
            limits.append((target.max_shared_bytes + 1024) // (self.shared_bytes + 1024))
        if self.tmem_columns:
            limits.append(target.tmem_columns // self.tmem_columns)
        return max(0, min(limits))

    def bytes_in_flight(self, target: Target) -> int:
        """Returns the number of bytes of loads that one SM can have in flight through its load
        buffers."""
        return self.staged_bytes * self.blocks_per_sm(target)

    def summary(self) -> str:
        """Returns one line for a snapshot, with the facts that a compiler upgrade may change."""
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
    """Audits the files that worker.py wrote for a kernel. Uses the disassembler of the Triton that
    compiled the kernel. Raises RuntimeError if the disassembler fails."""
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
    """Builds an audit from the outputs of a compilation.

    metadata: the content of metadata.json. sass: the output of nvdisasm. resources: the output of
    cuobjdump. Raises ValueError if resource usage or target is missing.
    """
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
    """Returns the number of bytes of all multi-stage load buffers: the `local_alloc` operations of
    rank 3 or more, whose first dimension is the stage."""
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
    """Counts the products (mma.sync) whose left operand is so narrow that the four threads of a row
    hold some of its columns more than once."""
    return sum(int(columns) < 4 * int(held) for columns, held in _PRODUCT.findall(ttgir))


@dataclass(frozen=True)
class Expectations:
    """Expected properties of a kernel, for `check`.

    Attributes:
        mma: The operand dtype of the kernel's GEMM; None for a kernel without a GEMM.
        legacy_mma_reason: Why this GEMM may use an older tensor-core path; "" if it must not.
        tma_loads, tma_stores: Whether TMA loads the operands, and whether TMA stores the outputs.
        warp_specialized: Whether producers and consumers must be different warps.
        stack_bytes: How much local memory a thread may have. Warp specialisation takes up to 8
            bytes.
        memory_bound: Whether the loads in flight must cover the memory latency.
        blocks_per_sm: The number of blocks that must fit on an SM at the same time.
        row_scales_reason: Why the block scales of one operand pass through registers; "" if all
            scales must be copied directly from shared memory to tensor memory.
        fresh_sums_reason: Why each step of the main loop starts a new accumulator at zero and then
            reads it; "" if one accumulator must stay in tensor memory.
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
    return _unless(actual <= most, f"{actual} {what}".rstrip() + f", expected at most {most}")


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
    # Before triton 3.9, an accumulator that two dots share passes through registers, and then has a
    # wrong value.
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
    """Whether the stack holds only a few registers, which are spilled outside of every loop.

    Each thread stores and loads such a register once, which takes less time than one step of the
    loop.
    """
    few = audit.stack_bytes <= FEW_SPILLED_BYTES
    return bool(few and audit.main_loop and audit.spills and not audit.looped_spills)


def _stack_note(audit: Audit, target: Target, expected: Expectations) -> str | None:
    told = audit.stack_bytes > expected.stack_bytes and _spills_once(audit)
    problem = f"{audit.stack_bytes} bytes of registers are spilled, outside of every loop"
    return _unless(not told, f"{problem} ({audit.spills} loads and stores)")


def _in_flight(audit: Audit, target: Target, expected: Expectations) -> str | None:
    has, needs = audit.bytes_in_flight(target), target.bytes_in_flight_per_sm
    return _unless(
        not expected.memory_bound or has >= needs, f"{has} per SM, expected at least {needs}"
    )


def _occupancy(audit: Audit, target: Target, expected: Expectations) -> str | None:
    has, needs = audit.blocks_per_sm(target), expected.blocks_per_sm
    return _unless(has >= needs, f"{has} blocks fit an SM, expected at least {needs}")


#: Maps the name of each rule to its function, which returns a sentence if the kernel breaks the
#: rule, else None.
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
    "barriers": lambda a, t, e: _limit(a.dead_barriers, "that no instruction waits for", 0),
    "products": lambda a, t, e: _limit(a.repeating_products, "that repeat columns", 0),
}


#: Maps the name of each note to its function, which returns a sentence if the note applies, else
#: None. A note breaks no rule.
NOTES: Mapping[str, Callable[[Audit, Target, Expectations], str | None]] = {"stack": _stack_note}


def check(audit: Audit, target: Target, expectations: Expectations | None = None) -> list[str]:
    """Lists the rules that a kernel breaks, each as `rule: sentence`."""
    return _told(RULES, audit, target, expectations)


def notes(audit: Audit, target: Target, expectations: Expectations | None = None) -> list[str]:
    """Lists the notes about a kernel, each as `name of the note: sentence`. A note breaks no
    rule."""
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
