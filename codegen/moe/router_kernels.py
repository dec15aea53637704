"""The kernels of a router: the product with the choice behind it, and the choice alone."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Kernel

ROUTER = Kernel(
    "moe.router",
    "moe_router",
    {"WEIGHT_STRIDES": (("weight", 0), ("weight", 1))},
    ranges=("num_tokens",),
    unaligned=("counters",),  # one of a slab's: it lies anywhere
)
# The choice of logits in the product's workspace, or of logits that are given.
CHOOSE = Kernel("moe.router", "moe_choose", ranges=("num_tokens",))


@dataclass(frozen=True)
class RouterProblem:
    """What is static about a router: E experts, K columns, S slots.

    x, weight: dtypes; weight "" where x has the logits. corrected: scores are corrected before the
    choice. Numbers as the op has them.
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
    x: str
    weight: str
    corrected: bool

    @property
    def widened(self) -> bool:
        """Whether the product is one of fp32 numbers: the tensor core is not for these."""
        return self.weight != "" and (self.x != self.weight or self.x == "fp32")

    @property
    def by_logits(self) -> bool:
        """Whether the experts' scores, and so a group's largest, have the order of the logits."""
        of_one = self.group_top == 1 or self.top_groups == self.num_groups
        return not self.corrected and of_one

    @property
    def groups(self) -> int:
        return next_power_of_2(self.num_groups)

    @property
    def group(self) -> int:
        """Columns of a group."""
        return next_power_of_2(self.num_experts // self.num_groups)

    @property
    def slots(self) -> int:
        return next_power_of_2(self.num_slots)

    @property
    def columns(self) -> int:
        """Columns of a row of logits, those that stand for no expert among them."""
        return self.groups * self.group


@dataclass(frozen=True)
class ChoiceConfig:
    """Tokens that a program chooses for at once."""

    rows: int
    num_warps: int


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

    @property
    def stages(self) -> int:
        return self.num_stages

    @property
    def choice(self) -> ChoiceConfig:
        """The tiles of the launch that chooses alone."""
        return ChoiceConfig(self.rows, self.choose_warps)

    def __str__(self) -> str:
        tile = f"{self.block_t}x{self.block_e}x{self.block_k}"
        own = "" if self.chooses else ", choice apart"
        return f"{tile} split {self.splits} w{self.num_warps} s{self.num_stages}{own}"


def expert_tiles(problem: RouterProblem, config: RouterConfig) -> int:
    return cdiv(problem.num_experts, config.block_e)


def router_grid(problem: RouterProblem, config: RouterConfig, num_tokens: int) -> tuple[int]:
    tiles = cdiv(num_tokens, config.block_t) * expert_tiles(problem, config)
    return (tiles * config.splits,)
