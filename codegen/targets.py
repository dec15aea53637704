"""Capability records of the chips that kernels are emitted for.

Every difference between chips is a field of these records. No other module asks for the name of the
chip.

The rates are rates that good kernels reach, and not the peaks of data sheets. Therefore a measured
rate divided by the record's rate is a meaningful number. For the H200, a copy reaches 4.3 TB/s, and
a bf16 GEMM reaches 790 TFLOP/s. Both were measured with random data. The H200's fp8 rate is the
rate of public fp8 GEMMs. For the B200, the rates are those that cuBLAS and public memory-bound
kernels report. The rate of a link is four fifths of NVLink's rate in each direction (450 GB/s for
the H200, 900 GB/s for the B200). The latency of a collective is the latency of vLLM's one-stage
all-reduce (7 us for 0.5 MB on two H100). The rates of links and collectives were not measured for
this project.

The records of the other chips come from data sheets and the CUDA programming guide. Their rates are
0.88 of the data sheet's memory rate and 0.65 of its dense tensor-core peaks. H200 and B200 reach
about these fractions. Each record describes one product: sm80 is the A100 (80 GB), sm86 the A10,
sm89 the L40S, sm90 the H200, sm100 the B200, sm103 the B300, and sm120 the RTX 5090. PRODUCTS has
the records of other products, which run the same kernels. `detect_target` fills in the number of
multiprocessors and the memory rate of the present GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tilewright.codegen.names import did_you_mean

FEATURES = frozenset(
    {"tma", "wgmma", "tcgen05", "tma_gather", "block_scaled_mma", "dependent_launch", "fp8"}
)
#: The folders of `codegen/` that have kernels.
FAMILIES = frozenset({"attention", "collective", "grouped", "lora", "mla", "mlp", "moe", "qkv"})
Rates = tuple[tuple[str, float], ...]
# The families of dense layers.
_DENSE = frozenset({"attention", "mlp", "qkv"})
# The fraction of a data sheet's memory rate that good kernels reach.
_OF_MEMORY = 0.88
# The fraction of a data sheet's peaks of the tensor cores that good kernels reach.
_OF_TENSOR_CORES = 0.65
# If a device's own memory rate differs from the rate in its record by at most this fraction, the
# rate in the record is used.
SAME_RATE = 0.05


@dataclass(frozen=True)
class Target:
    """The properties of one chip that code generation and the cost model use.

    Attributes:
        name: A key of TARGETS, such as "sm100".
        product: The product whose rates these are, such as "B200"; "" for the interpreter.
        capability: The CUDA compute capability (major, minor); (0, 0) for the interpreter.
        warp_size: The number of threads of a warp.
        max_shared_bytes: The shared memory that one block may use. An SM has 1 KiB more.
        tmem_columns: The columns of tensor memory of an SM, each of 128 lanes x 4 bytes; 0 if the
            chip has no tensor memory.
        num_sms: The number of streaming multiprocessors.
        max_registers: The largest number of registers of a thread.
        registers_per_sm: The number of 32-bit registers of an SM.
        hbm_bytes_per_s: The memory rate that a good streaming kernel reaches.
        l2_bytes: The size of the L2 cache.
        flops: Pairs (dtype, dense tensor-core FLOP/s that a good GEMM reaches). The dtypes are
            Triton names.
        bytes_in_flight_per_sm: How many bytes of loads an SM must have in flight to saturate the
            memory (Little's law: rate x ~700 ns of latency / num_sms).
        launch_s: The time of an empty kernel inside a CUDA graph.
        link_bytes_per_s: The rate at which a chip can send to the other chips of its host; 0 if
            there are no links.
        collective_s: The shortest time of a collective, whatever its size.
        sm_name: The name of the target in the machine code.
        mma_opcodes: Pairs (operand dtype, SASS opcode of the tensor-core path for it).
        legacy_mma: The SASS opcodes of older, slower tensor-core paths.
        features: A subset of FEATURES. "fp8" means that the chip has e4m3 numbers.
        families: The families of FAMILIES whose kernels are audited for the chip. Sites of other
            families are not rewritten.
        measured: Whether kernels have run on the chip, so that plans use measured times. If not,
            all times come from the cost model.
        threads_per_sm, blocks_per_sm: The largest number of threads, and the largest number of
            blocks, that an SM holds at the same time.
    """

    name: str
    capability: tuple[int, int]
    warp_size: int
    max_shared_bytes: int
    tmem_columns: int
    num_sms: int
    max_registers: int
    registers_per_sm: int
    hbm_bytes_per_s: float
    l2_bytes: int
    flops: Rates
    bytes_in_flight_per_sm: int
    launch_s: float
    features: frozenset[str]
    product: str = ""
    link_bytes_per_s: float = 0.0
    collective_s: float = 0.0
    sm_name: str = ""
    mma_opcodes: tuple[tuple[str, str], ...] = ()
    legacy_mma: frozenset[str] = frozenset()
    families: frozenset[str] = FAMILIES
    measured: bool = False
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32

    def __post_init__(self) -> None:
        unknown = self.features - FEATURES
        if unknown:
            raise ValueError(
                f"features: expected names out of {sorted(FEATURES)}, got {sorted(unknown)}"
            )
        if self.families - FAMILIES:
            raise ValueError(
                f"families: expected names out of {sorted(FAMILIES)}, got {sorted(self.families)}"
            )

    @property
    def arch(self) -> int:
        """The capability as a number, as in Triton's GPUTarget, such as 90 or 100."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def is_gpu(self) -> bool:
        return self.capability != (0, 0)

    @property
    def complete(self) -> bool:
        """Whether the chip has kernels of every family and every dtype."""
        return self.families == FAMILIES and "fp8" in self.features

    @property
    def scales_blocks(self) -> bool:
        """Whether cuBLAS multiplies float8 codes that have a scale for each block. Only Hopper
        can."""
        return "wgmma" in self.features

    @property
    def multiplies_registers(self) -> bool:
        """Whether the tensor cores read both operands of a product from registers (mma.sync)."""
        return ("bf16", "HMMA") in self.mma_opcodes

    def has(self, feature: str) -> bool:
        """Whether the chip has `feature`. Raises ValueError if the name is not in FEATURES."""
        if feature not in FEATURES:
            raise ValueError(f"feature: expected one of {sorted(FEATURES)}, got {feature!r}")
        return feature in self.features

    def mma_opcode(self, dtype: str) -> str:
        """Returns the SASS opcode that a GEMM of `dtype` should use. Raises ValueError if the chip
        has none."""
        for name, opcode in self.mma_opcodes:
            if name == dtype:
                return opcode
        known = [name for name, _ in self.mma_opcodes]
        raise ValueError(f"dtype: target {self.name} multiplies {known}, got {dtype!r}")

    def flops_per_s(self, dtype: str) -> float:
        """Returns the dense tensor-core FLOP/s for operands of `dtype` ("bf16", "fp8e4nv", "nvfp4",
        ...). Raises ValueError if the target has no rate for it."""
        for name, rate in self.flops:
            if name == dtype:
                return rate
        known = [name for name, _ in self.flops]
        raise ValueError(f"dtype: target {self.name} has rates for {known}, got {dtype!r}")


def _flops(bf16: float, fp32: float, fp8: float = 0.0, nvfp4: float = 0.0) -> Rates:
    """Returns pairs of dtype and FLOP/s. There is one rate for both 16-bit floats, and one for both
    8-bit floats. A rate of 0 means that the chip cannot multiply the dtype."""
    rates = {"bf16": bf16, "fp16": bf16, "fp32": fp32, "fp8e4nv": fp8, "fp8e5": fp8, "nvfp4": nvfp4}
    return tuple((dtype, rate) for dtype, rate in rates.items() if rate)


def _of_sheet(**peaks: float) -> Rates:
    """Returns the rates that good kernels reach, computed from the peaks of a data sheet."""
    return _flops(**{dtype: _OF_TENSOR_CORES * peak for dtype, peak in peaks.items()})


SM100 = Target(
    name="sm100",
    product="B200",
    capability=(10, 0),
    warp_size=32,
    max_shared_bytes=232448,
    tmem_columns=512,
    num_sms=148,
    max_registers=255,
    registers_per_sm=65536,
    hbm_bytes_per_s=7.2e12,
    l2_bytes=126 * 1024 * 1024,
    flops=_flops(bf16=1.4e15, fp32=0.7e15, fp8=2.6e15, nvfp4=5.2e15),
    bytes_in_flight_per_sm=43 * 1000,
    launch_s=2.5e-6,
    features=frozenset(
        {"tma", "tcgen05", "tma_gather", "block_scaled_mma", "dependent_launch", "fp8"}
    ),
    link_bytes_per_s=720e9,
    collective_s=6e-6,
    sm_name="sm_100a",
    mma_opcodes=(
        ("bf16", "UTCHMMA"),
        ("fp16", "UTCHMMA"),
        ("fp8e4nv", "UTCQMMA"),
        ("fp8e5", "UTCQMMA"),
        ("nvfp4", "UTCOMMA"),
    ),
    legacy_mma=frozenset({"HMMA", "QMMA", "IMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA"}),
)

SM90 = Target(
    name="sm90",
    product="H200",
    capability=(9, 0),
    warp_size=32,
    max_shared_bytes=232448,
    tmem_columns=0,
    num_sms=132,
    max_registers=255,
    registers_per_sm=65536,
    hbm_bytes_per_s=4.3e12,
    l2_bytes=50 * 1024 * 1024,
    flops=_flops(bf16=0.79e15, fp32=0.39e15, fp8=1.45e15),
    bytes_in_flight_per_sm=25 * 1000,
    launch_s=2.5e-6,
    features=frozenset({"tma", "wgmma", "dependent_launch", "fp8"}),
    measured=True,
    link_bytes_per_s=360e9,
    collective_s=6e-6,
    sm_name="sm_90a",
    mma_opcodes=(
        ("bf16", "HGMMA"),
        ("fp16", "HGMMA"),
        ("fp8e4nv", "QGMMA"),
        ("fp8e5", "QGMMA"),
    ),
    legacy_mma=frozenset({"HMMA", "QMMA", "IMMA", "OMMA"}),
)

SM103 = replace(
    SM100,
    name="sm103",
    product="B300",
    capability=(10, 3),
    flops=_of_sheet(bf16=2.25e15, fp32=1.1e15, fp8=4.5e15, nvfp4=13.5e15),
    sm_name="sm_103a",
)

# The opcodes for 16-bit floats of chips whose newest tensor-core instruction is mma.sync.
_HALVES_BY_MMA_SYNC = (("bf16", "HMMA"), ("fp16", "HMMA"))
# The opcodes for 16-bit and 8-bit floats of chips whose newest tensor-core instruction is mma.sync.
# sm120 also has mma.sync for NVFP4, which tilewright does not emit.
_FP8_BY_MMA_SYNC = (*_HALVES_BY_MMA_SYNC, ("fp8e4nv", "QMMA"), ("fp8e5", "QMMA"))

SM120 = Target(
    name="sm120",
    product="RTX 5090",
    capability=(12, 0),
    warp_size=32,
    max_shared_bytes=101376,
    tmem_columns=0,
    num_sms=170,
    max_registers=255,
    registers_per_sm=65536,
    hbm_bytes_per_s=_OF_MEMORY * 1.792e12,
    l2_bytes=96 * 1024 * 1024,
    flops=_of_sheet(bf16=209.5e12, fp32=104.8e12, fp8=419e12),
    bytes_in_flight_per_sm=7 * 1000,
    launch_s=2.5e-6,
    features=frozenset({"tma", "dependent_launch", "fp8"}),
    link_bytes_per_s=0.8 * 64e9,
    collective_s=6e-6,
    sm_name="sm_120a",
    mma_opcodes=_FP8_BY_MMA_SYNC,
    families=_DENSE,
    threads_per_sm=1536,
    blocks_per_sm=24,
)

SM89 = replace(
    SM120,
    name="sm89",
    product="L40S",
    capability=(8, 9),
    num_sms=142,
    hbm_bytes_per_s=_OF_MEMORY * 864e9,
    flops=_of_sheet(bf16=362e12, fp32=183e12, fp8=733e12),
    bytes_in_flight_per_sm=4 * 1000,
    features=frozenset({"fp8"}),
    link_bytes_per_s=0.8 * 32e9,
    sm_name="sm_89",
)

SM86 = replace(
    SM89,
    name="sm86",
    product="A10",
    capability=(8, 6),
    num_sms=72,
    hbm_bytes_per_s=_OF_MEMORY * 600e9,
    l2_bytes=6 * 1024 * 1024,
    flops=_of_sheet(bf16=125e12, fp32=62.5e12),
    bytes_in_flight_per_sm=6 * 1000,
    features=frozenset(),
    sm_name="sm_86",
    mma_opcodes=_HALVES_BY_MMA_SYNC,
    blocks_per_sm=16,
)

SM80 = replace(
    SM86,
    name="sm80",
    product="A100 80 GB",
    capability=(8, 0),
    max_shared_bytes=166912,
    num_sms=108,
    hbm_bytes_per_s=_OF_MEMORY * 2.039e12,
    l2_bytes=40 * 1024 * 1024,
    flops=_of_sheet(bf16=312e12, fp32=156e12),
    bytes_in_flight_per_sm=13 * 1000,
    link_bytes_per_s=0.8 * 300e9,
    sm_name="sm_80",
    threads_per_sm=2048,
    blocks_per_sm=32,
)

# Triton's interpreter, which runs on the CPU. The record has no rates, so the cost model refuses
# it. The record has few SMs, so that each program of a persistent loop computes several tiles.
INTERPRET = Target(
    name="interpret",
    capability=(0, 0),
    warp_size=32,
    max_shared_bytes=232448,
    tmem_columns=0,
    num_sms=4,
    max_registers=255,
    registers_per_sm=65536,
    hbm_bytes_per_s=0.0,
    l2_bytes=0,
    flops=(),
    bytes_in_flight_per_sm=0,
    launch_s=0.0,
    features=frozenset({"tma", "fp8"}),
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (SM100, SM103, SM120, SM90, SM89, SM86, SM80, INTERPRET)}
)

_BY_CAPABILITY = {target.capability: target for target in TARGETS.values()}


def _with_rate(target: Target, rate: float, num_sms: int) -> Target:
    """Returns the record with another memory rate, in bytes/s. num_sms: the number of SMs that
    share this rate. The result has the record's own number of SMs."""
    share = rate / num_sms / (target.hbm_bytes_per_s / target.num_sms)
    flying = round(target.bytes_in_flight_per_sm * share)
    return replace(target, hbm_bytes_per_s=rate, bytes_in_flight_per_sm=flying)


def _product(target: Target, name: str, num_sms: int, memory: float, **changes: Any) -> Target:
    """Returns the record of another product of a target. memory: the memory rate in the product's
    data sheet, in bytes/s. changes: other fields."""
    record = _with_rate(target, _OF_MEMORY * memory, num_sms)
    return replace(record, product=name, num_sms=num_sms, **changes)


#: Maps the name of each product to its record.
PRODUCTS: Mapping[str, Target] = MappingProxyType({
    "b200": SM100, "gb200": SM100, "b300": SM103, "gb300": SM103, "rtx5090": SM120,
    "h200": SM90, "l40s": SM89, "a10": SM86, "a100": SM80,
    "h100": _product(SM90, "H100", 132, 3.35e12),
    "gh200": _product(SM90, "GH200 96 GB", 132, 4.0e12),
    "l4": _product(
        SM89, "L4", 58, 300e9, l2_bytes=48 * 1024 * 1024,
        flops=_of_sheet(bf16=121e12, fp32=60e12, fp8=242e12),
    ),
    "l40": _product(
        SM89, "L40", 142, 864e9, flops=_of_sheet(bf16=181e12, fp32=90.5e12, fp8=362e12)
    ),
    "rtx4090": _product(
        SM89, "RTX 4090", 128, 1008e9, l2_bytes=72 * 1024 * 1024,
        flops=_of_sheet(bf16=165e12, fp32=82.6e12, fp8=330e12),
    ),
    "rtx3090": _product(
        SM86, "RTX 3090", 82, 936e9, flops=_of_sheet(bf16=71e12, fp32=35.6e12)
    ),
})  # fmt: skip


def find_target(name: object) -> Target | None:
    """Returns the target with a name as users write it, such as `sm90`, `SM_90a` or `H100`. For the
    name of a product, the result has the rates of this product.

    Returns None if the name is unknown.
    """
    if not isinstance(name, str):
        return None
    plain = "".join(character for character in name.lower() if character.isalnum())
    return PRODUCTS.get(plain) or TARGETS.get(plain) or TARGETS.get(plain.removesuffix("a"))


def key_of(target: Target) -> str:
    """Returns a name for which :func:`get_target` returns the rates of `target`.

    This is the target's name or the key of a product. The record of a present GPU may equal no
    product's record. The result then names a product with as many SMs and about the same memory
    rate (see SAME_RATE), or else the target.
    """
    records = {target.name: TARGETS[target.name]} | dict(PRODUCTS)
    same = [name for name, record in records.items() if record == target]
    near = [name for name, record in records.items() if _is_near(record, target)]
    return (*same, *near, target.name)[0]


def _is_near(record: Target, target: Target) -> bool:
    sizes = (record.name, record.num_sms) == (target.name, target.num_sms)
    return sizes and _has_rate(record, target.hbm_bytes_per_s)


def _has_rate(record: Target, rate: float) -> bool:
    """Whether a memory rate, in bytes/s, differs from the record's by at most SAME_RATE."""
    return abs(rate - record.hbm_bytes_per_s) <= SAME_RATE * record.hbm_bytes_per_s


def get_target(name: str) -> Target:
    """Returns the target with a name that :func:`find_target` knows. Raises ValueError for other
    names."""
    target = find_target(name)
    if target is None:
        raise ValueError(f"target: {not_a_target(name, sorted(TARGETS))}")
    return target


def not_a_target(name: object, known: Iterable[str]) -> str:
    """Returns a message about an unknown name, with the known names and a suggestion."""
    near = did_you_mean(name, (*known, *PRODUCTS))
    return f"expected one of {list(known)} or a product such as 'h100', got {name!r}{near}"


def sm_rate(target: Target) -> float:
    """Returns the share of the memory rate that one multiprocessor has, in bytes/s. The interpreter
    has the share of an H200, so that plans for the interpreter are plans for a chip."""
    chip = target if target.hbm_bytes_per_s else SM90
    return chip.hbm_bytes_per_s / chip.num_sms


def gpu_targets() -> list[Target]:
    """Returns the targets that are GPUs."""
    return [target for target in TARGETS.values() if target.is_gpu]


def detect_target(device: int | None = None) -> Target | None:
    """Returns the target of the current CUDA device, with the device's own number of SMs and memory
    rate. Returns None if no device can be used.

    The result is also None if there is no record for the GPU's compute capability, or if torch uses
    the GPU through ROCm. No kernels are emitted for such a GPU.
    """
    try:
        import torch
    except ImportError:  # the worker and the audit run where torch is not installed
        return None
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    )
    target = _BY_CAPABILITY.get((properties.major, properties.minor))
    return None if target is None else _with_properties(target, properties)


def _with_properties(target: Target, properties: Any) -> Target:
    """Returns the record with the number of SMs and the memory rate of a device. The record keeps
    its own memory rate if the device's rate is within SAME_RATE of it, or if torch does not know
    the device's rate."""
    # torch gives the clock in kHz and the width of the bus in bits. The memory transfers data twice
    # in each cycle.
    clock = 1e3 * getattr(properties, "memory_clock_rate", 0)
    rate = _OF_MEMORY * 2 * clock * getattr(properties, "memory_bus_width", 0) / 8
    if not rate or _has_rate(target, rate):
        rate = target.hbm_bytes_per_s
    record = _with_rate(target, rate, target.num_sms)
    return replace(record, num_sms=properties.multi_processor_count)
