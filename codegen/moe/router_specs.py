"""The kernel specs of a router: the product with the choice behind it, and the choice alone."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of


@dataclass(frozen=True)
class RouterProblem:
    """What is static about a router: E experts, K columns, S slots.

    x: strides (row,), of the logits where there is no weight. weight: strides (expert, column).
    bias, correction: strides (expert,). weights: the result. Numbers as the op has them.
    """

    num_experts: int
    hidden: int
    num_slots: int
    scores: str
    num_groups: int
    top_groups: int
    group_top: int
    normalise: bool
    norm_eps: float
    norm_min: float
    scaling: float
    x: Operand
    weight: Operand | None
    bias: Operand | None
    correction: Operand | None
    weights: Operand

    @property
    def widened(self) -> bool:
        """Whether the product is one of fp32 numbers: the tensor core is not for these."""
        return self.weight is not None and (
            self.x.dtype != self.weight.dtype or self.x.dtype == "fp32"
        )

    @property
    def by_logits(self) -> bool:
        """Whether the experts' scores, and so a group's largest, have the order of the logits."""
        of_one = self.group_top == 1 or self.top_groups == self.num_groups
        return self.correction is None and of_one

    @property
    def group_block(self) -> int:
        """Columns of a group."""
        return next_power_of_2(self.num_experts // self.num_groups)

    @property
    def columns(self) -> int:
        """Columns of a row of logits, those that stand for no expert among them."""
        return next_power_of_2(self.num_groups) * self.group_block


@dataclass(frozen=True)
class RouterConfig:
    """Tiles of a router.

    A program of the product multiplies block_t tokens with block_e experts over a `splits`-th of
    the columns, block_k at a time. rows: tokens that a program chooses for at once. chooses: the
    last program of a token tile chooses; else a launch of its own does, with choose_warps.
    """

    block_t: int
    block_e: int
    block_k: int
    splits: int
    rows: int
    num_warps: int
    num_stages: int
    chooses: bool = True
    choose_warps: int = 1

    def __str__(self) -> str:
        tile = f"{self.block_t}x{self.block_e}x{self.block_k}"
        own = "" if self.chooses else ", choice apart"
        return f"{tile} split {self.splits} w{self.num_warps} s{self.num_stages}{own}"


def expert_tiles(problem: RouterProblem, config: RouterConfig) -> int:
    return cdiv(problem.num_experts, config.block_e)


def row_of_logits(problem: RouterProblem, config: RouterConfig) -> int:
    """Elements from a token's logits to the next one's in the product's workspace."""
    return expert_tiles(problem, config) * config.block_e


def router_spec(problem: RouterProblem, config: RouterConfig, target: str) -> KernelSpec:
    """The product, with the choice where the config has it so."""
    p = problem
    assert p.weight is not None
    blocks = cdiv(p.hidden, config.block_k)
    constants: dict[str, Constant] = {
        **_choice_constants(p),
        **constants_of(p, "hidden", "widened"),
        "X_STRIDE": p.x.strides[0],
        "WEIGHT_STRIDES": p.weight.strides,
        **constants_of(config, "block_t", "block_e", "block_k", "splits", "rows", "chooses"),
        "EXPERT_TILES": expert_tiles(p, config),
        "STEPS": cdiv(blocks, config.splits),
        "STAGES": config.num_stages,
    }
    chosen = config.chooses
    return KernelSpec.of(
        "moe.router", "moe_router", constants,
        {
            **operands_of(p, "x", "weight"),
            "bias_ptr": p.bias if chosen else None,
            "correction_ptr": p.correction if chosen else None,
            "weights_ptr": p.weights if chosen else None,
            "ids_ptr": Operand("i64") if chosen else None,
            "workspace_ptr": Operand("fp32"),
            # One of a slab's: it lies anywhere.
            "counters_ptr": Operand("i32", aligned=False) if chosen else None,
            "num_tokens": "i32",
        },
        target=target, num_warps=config.num_warps, num_stages=config.num_stages,
        ranges=("num_tokens",), dependent=True,
    )  # fmt: skip


def router_grid(problem: RouterProblem, config: RouterConfig, num_tokens: int) -> tuple[int]:
    tiles = token_tiles(config, num_tokens)
    return (tiles * expert_tiles(problem, config) * config.splits,)


def token_tiles(config: RouterConfig, num_tokens: int) -> int:
    return cdiv(num_tokens, config.block_t)


def parts_size(problem: RouterProblem, config: RouterConfig) -> int:
    """fp32 numbers of the workspace for each token tile."""
    return config.splits * config.block_t * row_of_logits(problem, config)


def choose_spec(problem: RouterProblem, config: RouterConfig, target: str) -> KernelSpec:
    """The choice of logits in the product's workspace; of a problem without a weight, of its x."""
    p = problem
    logits, parts = p.x, (1, 1, p.x.strides[0])
    if p.weight is not None:
        logits = Operand("fp32")
        parts = (config.splits, config.block_t, row_of_logits(p, config))
    constants = _choice_constants(p) | {
        "SPLITS": parts[0],
        "RUN": parts[1],
        "ROW": parts[2],
        "ROWS": config.rows,
    }
    return KernelSpec.of(
        "moe.router", "moe_choose", constants,
        {
            "logits_ptr": logits,
            **operands_of(p, "bias", "correction", "weights"),
            "ids_ptr": Operand("i64"),
            "num_tokens": "i32",
        },
        target=target, num_warps=config.choose_warps, ranges=("num_tokens",), dependent=True,
    )  # fmt: skip


def choose_grid(config: RouterConfig, num_tokens: int) -> tuple[int]:
    return (cdiv(num_tokens, config.rows),)


def _choice_constants(p: RouterProblem) -> dict[str, Constant]:
    return {
        **constants_of(p, "num_experts", "num_slots", "scores", "by_logits", "num_groups"),
        **constants_of(p, "top_groups", "group_top", "normalise", "norm_eps", "norm_min"),
        **constants_of(p, "scaling"),
        "BIAS_STRIDE": p.bias.strides[0] if p.bias else 0,
        "CORRECTION_STRIDE": p.correction.strides[0] if p.correction else 0,
        "GROUPS": next_power_of_2(p.num_groups),
        "GROUP": p.group_block,
        "SLOTS": next_power_of_2(p.num_slots),
    }
