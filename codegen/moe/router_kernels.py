"""The two kernels of a router. One kernel computes the product and then the choice of experts, and
the other kernel computes only the choice."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Kernel

ROUTER = Kernel(
    "moe.router",
    "moe_router",
    {"WEIGHT_STRIDES": (("weight", 0), ("weight", 1))},
    ranges=("num_tokens",),
    unaligned=("counters",),  # counters are a part of a larger allocation, at any address
)
# Chooses experts from logits that the product stored in its workspace, or from given logits.
CHOOSE = Kernel("moe.router", "moe_choose", ranges=("num_tokens",))


@dataclass(frozen=True)
class RouterProblem:
    """The static part of a router with E experts and K columns, in which each token chooses S
    experts (slots).

    The fields that are not listed here are the arguments of the op.

    Attributes:
        x, weight: The dtypes of x and of the weight. weight is "" if x contains the logits.
        corrected: Whether a correction is added to the scores before the choice.
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
        """Whether the product is computed in fp32. It then does not use tensor cores."""
        return self.weight != "" and (self.x != self.weight or self.x == "fp32")

    @property
    def by_logits(self) -> bool:
        """Whether the kernel may choose experts by their logits, because scores have the same order
        as logits."""
        of_one = self.group_top == 1 or self.top_groups == self.num_groups
        return not self.corrected and of_one

    @property
    def groups(self) -> int:
        return next_power_of_2(self.num_groups)

    @property
    def group(self) -> int:
        """The number of columns of a group, rounded up to a power of two."""
        return next_power_of_2(self.num_experts // self.num_groups)

    @property
    def slots(self) -> int:
        return next_power_of_2(self.num_slots)

    @property
    def columns(self) -> int:
        """The number of columns of a row of logits, including columns that pad the groups."""
        return self.groups * self.group


@dataclass(frozen=True)
class ChoiceConfig:
    """The tile sizes of `moe_choose`. rows: the number of tokens that a program chooses for at the
    same time."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class RouterConfig:
    """The tile sizes of a router.

    Attributes:
        block_t: The number of tokens that a program of the product multiplies.
        block_e: The number of experts that a program of the product multiplies.
        block_k: The number of columns of a step.
        splits: The number of parts that the columns are split into. A program multiplies one part.
        rows: The number of tokens that a program chooses for at the same time.
        num_warps, num_stages: Triton's options.
        chooses: Whether the last program of a tile of tokens chooses. If not, a separate launch
            with choose_warps warps chooses.
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
        """The tile sizes of the separate launch that chooses."""
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
