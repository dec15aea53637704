"""Mixture-of-experts problems as plain data, and the kernel specs of the `moe_*` templates.

Nothing here touches torch or a GPU: a problem is what is static about one call site, a config is a
choice of tiles, and the two give a KernelSpec and a launch grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.qkv_heads import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

# TMA: strides and base addresses in whole 16 bytes.
TMA_BYTES = 16
# format -> (type of a stored element, None for the activations'; weights in it).
STORED: dict[str, tuple[str | None, int]] = {
    "dense": (None, 1),
    "fp8": ("fp8e4nv", 1),
    "int4": ("u8", 2),
    "nvfp4": ("u8", 2),
    "mxfp4": ("u8", 2),
}
# A program compares its routes with each other: the square of this many.
MAX_CHUNK = 512


@dataclass(frozen=True)
class ExpertLayout:
    """A weight [E, N, K] in memory; strides in elements.

    n_major: N is the contiguous dim and row_stride leads from one k to the next; else K is, and it
    leads from one row to the next.
    """

    expert_stride: int
    row_stride: int
    n_major: bool


@dataclass(frozen=True)
class MoeProblem:
    """The static part of a `fused_moe` call.

    format, scale_block, scale_dtype, scale_strides: of the weights, see ops.formats.expert_weight;
    strides (expert, row block, column block) for gate, up, down. factors: whether gate, up and
    down have one more factor per expert. gated: there is an up weight. interleaved: its rows lie
    between gate's, in one tensor; else `distance` elements from gate's, None where they are two
    tensors. up_first: up lies at the lower address. biases: (expert stride, column stride) or None
    for gate, up, down; all of one dtype.
    """

    dtype: str
    id_dtype: str
    weight_dtype: str
    num_experts: int
    num_slots: int
    hidden: int
    inner: int
    x_stride: int
    weight_strides: tuple[int, int]
    gate_up: ExpertLayout
    down: ExpertLayout
    gated: bool
    interleaved: bool
    distance: int | None
    up_first: bool
    activation: str
    alpha: float
    limit: float
    format: str = "dense"
    scale_block: tuple[int, int] = (1, 1)
    scale_dtype: str = "fp32"
    scale_strides: tuple[tuple[int, int, int], ...] = ((0, 0, 0),) * 3
    factors: tuple[bool, ...] = (False, False, False)
    biases: tuple[tuple[int, int] | None, ...] = (None, None, None)
    bias_dtype: str = "bf16"
    unaligned: tuple[str, ...] = ()

    @property
    def per_byte(self) -> int:
        """Weights in one stored element."""
        return STORED[self.format][1]

    @property
    def stored_type(self) -> str:
        """Triton's type of a stored element."""
        return STORED[self.format][0] or self.dtype

    @property
    def experts(self) -> int:
        return next_power_of_2(self.num_experts)


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped GEMM: block_m routes, block_n columns, block_k of the inner dim."""

    block_m: int
    block_n: int
    block_k: int
    swapped: bool
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    flatten: bool = False
    warp_specialize: bool = False

    def __str__(self) -> str:
        kind = "swapped " if self.swapped else ""
        more = f" p{self.programs_per_sm}" + ("f" if self.flatten else "")
        more += " ws" if self.warp_specialize else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{kind}{tile} w{self.num_warps} s{self.num_stages}{more}"


@dataclass(frozen=True)
class OrderConfig:
    """Routes per program of the counting sort, and how it loads what it compares them with."""

    chunk: int
    num_warps: int = 16
    chunks_per_load: int = 16
    routes_per_step: int = 16


@dataclass(frozen=True)
class CombineConfig:
    block_t: int
    block_h: int
    num_warps: int = 4


def order_config(problem: MoeProblem, num_routes: int) -> OrderConfig:
    """One chunk for few routes; else chunks of which each program can read all counts."""
    return OrderConfig(chunk=min(max(next_power_of_2(num_routes), 16), MAX_CHUNK))


def count_spec(problem: MoeProblem, config: OrderConfig, target: str) -> KernelSpec:
    arguments = {"ids_ptr": f"*{problem.id_dtype}", "counts_ptr": "*i32", "num_routes": "i32"}
    constants = _sort_constants(problem, config)
    return _spec("moe_order", "moe_count", problem, constants, arguments, config.num_warps, target)


def order_spec(
    problem: MoeProblem, config: OrderConfig, target: str, *, counted: bool
) -> KernelSpec:
    """counted: `moe_count` ran before, as there is more than one chunk."""
    arguments = {
        "ids_ptr": f"*{problem.id_dtype}",
        "counts_ptr": "*i32" if counted else None,
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "num_routes": "i32",
        "num_chunks": "i32",
    }
    constants = {
        **_sort_constants(problem, config),
        "CHUNKS_PER_LOAD": config.chunks_per_load,
        "ROUTES_PER_STEP": config.routes_per_step,
    }
    return _spec("moe_order", "moe_order", problem, constants, arguments, config.num_warps, target)


def _sort_constants(problem: MoeProblem, config: OrderConfig) -> dict[str, Constant]:
    return {
        "NUM_EXPERTS": problem.num_experts,
        "EXPERTS": problem.experts,
        "CHUNK": config.chunk,
    }


def up_spec(problem: MoeProblem, config: GemmConfig, target: str) -> KernelSpec:
    layout = problem.gate_up
    arguments: dict[str, str | None] = {
        "x_ptr": f"*{problem.dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "weight_ptr": f"*{problem.stored_type}",
        "gate_scale_ptr": _scale_type(problem),
        "up_scale_ptr": _scale_type(problem) if problem.gated else None,
        "gate_factor_ptr": "*fp32" if problem.factors[0] else None,
        "up_factor_ptr": "*fp32" if problem.factors[1] else None,
        "gate_bias_ptr": _bias_type(problem, 0),
        "up_bias_ptr": _bias_type(problem, 1),
        "hidden_ptr": f"*{problem.dtype}",
        "distance": "i64",
    }
    strides = [stride for bias in problem.biases[:2] for stride in (bias or (0, 0))]
    constants: dict[str, Constant] = {
        **_gemm_constants(problem, config, layout),
        "NUM_SLOTS": problem.num_slots,
        "X_STRIDE": problem.x_stride,
        "GATED": problem.gated,
        "INTERLEAVED": problem.interleaved,
        "UP_FIRST": problem.up_first,
        "GATE_SCALE_STRIDES": problem.scale_strides[0],
        "UP_SCALE_STRIDES": problem.scale_strides[1],
        "ACTIVATION": problem.activation,
        "ALPHA": problem.alpha,
        "LIMIT": problem.limit,
        "BIAS_STRIDES": tuple(strides),
    }
    return _spec(
        "moe_gemm", "moe_up", problem, constants, arguments, config.num_warps, target,
        config.num_stages,
    )  # fmt: skip


def down_spec(problem: MoeProblem, config: GemmConfig, target: str) -> KernelSpec:
    arguments: dict[str, str | None] = {
        "hidden_ptr": f"*{problem.dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "weight_ptr": f"*{problem.stored_type}",
        "scale_ptr": _scale_type(problem),
        "factor_ptr": "*fp32" if problem.factors[2] else None,
        "bias_ptr": _bias_type(problem, 2),
        "y_ptr": f"*{problem.dtype}",
        "num_routes": "i32",
    }
    constants: dict[str, Constant] = {
        **_gemm_constants(problem, config, problem.down),
        "SCALE_STRIDES": problem.scale_strides[2],
        "BIAS_STRIDES": problem.biases[2] or (0, 0),
    }
    return _spec(
        "moe_gemm", "moe_down", problem, constants, arguments, config.num_warps, target,
        config.num_stages,
    )  # fmt: skip


def _gemm_constants(
    problem: MoeProblem, config: GemmConfig, layout: ExpertLayout
) -> dict[str, Constant]:
    return {
        "NUM_EXPERTS": problem.num_experts,
        "EXPERTS": problem.experts,
        "HIDDEN": problem.hidden,
        "INNER": problem.inner,
        "EXPERT_STRIDE": layout.expert_stride,
        "ROW_STRIDE": layout.row_stride,
        "N_MAJOR": layout.n_major,
        "FORMAT": problem.format,
        "PER_BYTE": problem.per_byte,
        "SCALE_BLOCK": problem.scale_block,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWAPPED": config.swapped,
        "FLATTEN": config.flatten,
        "WARP_SPECIALIZE": config.warp_specialize,
    }


def combine_spec(problem: MoeProblem, config: CombineConfig, target: str) -> KernelSpec:
    arguments: dict[str, str | None] = {
        "y_ptr": f"*{problem.dtype}",
        "ids_ptr": f"*{problem.id_dtype}",
        "weights_ptr": f"*{problem.weight_dtype}",
        "out_ptr": f"*{problem.dtype}",
        "num_tokens": "i32",
    }
    constants: dict[str, Constant] = {
        "NUM_SLOTS": problem.num_slots,
        "HIDDEN": problem.hidden,
        "WEIGHT_STRIDES": problem.weight_strides,
        "BLOCK_T": config.block_t,
        "BLOCK_H": config.block_h,
    }
    return _spec(
        "moe_combine", "moe_combine", problem, constants, arguments, config.num_warps, target
    )


def _scale_type(problem: MoeProblem) -> str | None:
    return None if problem.format == "dense" else f"*{problem.scale_dtype}"


def _bias_type(problem: MoeProblem, which: int) -> str | None:
    return None if problem.biases[which] is None else f"*{problem.bias_dtype}"


def _spec(
    template: str,
    kernel: str,
    problem: MoeProblem,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    num_warps: int,
    target: str,
    num_stages: int = 2,
) -> KernelSpec:
    """Absent tensors and a static distance become constants, the rest is the signature."""
    fixed = dict(constants)
    known = {} if problem.distance is None else {"distance": problem.distance}
    signature: dict[str, str] = {}
    for name, type_name in arguments.items():
        if type_name is None:
            fixed[name] = None
        elif name in known:
            fixed[name] = known[name]
        else:
            signature[name] = type_name
    return KernelSpec.make(
        template,
        kernel,
        fixed,
        signature,
        divisible16=[
            name
            for name, type_name in signature.items()
            if (type_name.startswith("*") or name == "distance") and name not in problem.unaligned
        ],
        ranges={name: (1, 2**31 - 1) for name in ("num_chunks",) if name in signature},
        num_warps=num_warps,
        num_stages=num_stages,
        target=target,
    )


def gemm_obstacle(problem: MoeProblem) -> str | None:
    """Why TMA cannot reach the operands; None where it can. From metadata alone."""
    size = ELEMENT_BYTES[problem.dtype]
    weight_size = size if problem.format == "dense" else 1
    strides = {
        "gate_weight": (problem.gate_up.expert_stride, problem.gate_up.row_stride),
        "down_weight": (problem.down.expert_stride, problem.down.row_stride),
        "up_weight": (problem.distance or 0,),
    }
    for name, steps in strides.items():
        if any(step * weight_size % TMA_BYTES for step in steps):
            return f"{name}: strides {steps} are not whole {TMA_BYTES} bytes"
    if problem.inner * size % TMA_BYTES:
        return f"{problem.inner} inner columns are not whole {TMA_BYTES} bytes"
    if problem.format != "dense" and (problem.gate_up.n_major or problem.down.n_major):
        return f"{problem.format} weights are not contiguous along the inner dimension"
    return None


def gemm_grid(config: GemmConfig, num_sms: int) -> tuple[int]:
    """Persistent: the tiles are known on the device only."""
    return (num_sms * config.programs_per_sm,)


def order_grid(config: OrderConfig, num_routes: int) -> tuple[int]:
    return (cdiv(num_routes, config.chunk),)


def combine_grid(problem: MoeProblem, config: CombineConfig, num_tokens: int) -> tuple[int, int]:
    return (cdiv(num_tokens, config.block_t), cdiv(problem.hidden, config.block_h))
