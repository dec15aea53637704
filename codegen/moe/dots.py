"""Plans and kernels that compute the experts of a few tokens without tensor cores.

For one token, the kernels with tensor cores wait for the sort of the routes, for the quantisation
of rows, and for tiles that pass through shared memory. With few routes, most weights are read only
once in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, INT32_MAX, cdiv, next_power_of_2
from tilewright.codegen.formats import E2M1_BYTES, WEIGHT_FORMATS
from tilewright.codegen.grouped.kernels import all_strides
from tilewright.codegen.grouped.problem import WORD_BYTES, WeightOperands
from tilewright.codegen.grouped.tiles import SCALED_K
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.moe.problem import MoeProblem
from tilewright.codegen.spec import Constant

UP_DOTTED = Kernel(
    "moe.dotted",
    "moe_up_dotted",
    {
        "GATE_STRIDES": all_strides("gate_weight", 2),
        "UP_STRIDES": all_strides("up_weight", 2),
        "GATE_SCALE_STRIDES": all_strides("gate_scale", 3),
        "UP_SCALE_STRIDES": all_strides("up_scale", 3),
        "BIAS_STRIDES": (*all_strides("gate_bias", 2), *all_strides("up_bias", 2)),
    },
    num_stages=1,
    role="reads experts by token",
)
DOWN_DOTTED = Kernel(
    "moe.dotted",
    "moe_down_dotted",
    {
        "DOWN_STRIDES": all_strides("down_weight", 2),
        "DOWN_SCALE_STRIDES": all_strides("down_scale", 3),
        "BIAS_STRIDES": all_strides("down_bias", 2),
        "WEIGHTS_STRIDES": all_strides("weights", 2),
    },
    num_stages=1,
)

# The largest number of tokens for each format. Formats without an entry never use these kernels.
# The times below were measured on an H100, in us, for 1, 2, 4 and 8 tokens; in parentheses are the
# times of the kernels that use tensor cores. Experts of Qwen3-30B-A3B: bfloat16 31, 53 and 101 (39,
# 63, 108); float8 16, 30, 57 and 107 (33, 43, 68, 107); int4 13, 20, 35 and 66 (17, 29, 45, 70);
# NVFP4 16, 27, 48 and 90 (19, 34, 51, 81). Experts of gpt-oss-20b: MXFP4 34, 63, 115 and 222 (81,
# 110, 172, 272).
MOST_TOKENS = {"dense": 4, "fp8": 4, "int4": 8, "nvfp4": 4, "mxfp4": 8}
# How often the kernels may read an expert's weight, on average over the experts that they read. A
# program computes one token, so two tokens with the same expert read its weight twice. The average
# assumes that tokens choose experts at random. A step of Mixtral with four tokens, each with two of
# eight experts (1.46 reads), took as long with these kernels as a step of 64 tokens that reads each
# weight once.
MOST_READS = 1.3
# Maps a format to the limit that replaces MOST_READS. With MXFP4 and 1.53 reads, these kernels were
# still faster than the kernels that use tensor cores.
MOST_READS_OF = {"mxfp4": 1.6}
# How many bytes of a row a thread loads at once.
LOAD_BYTES = 16
# How many bytes a line of memory has.
LINE_BYTES = 128
# The possible numbers of bytes of a row in a step.
STEP_BYTES = (2048, 1024, 512, 256, 128)
# The fixed cost of a step, as a fraction of the time of a row.
STEP_COST = 0.08
# The largest number of columns of x that a program holds, over all slots (the experts that a token
# chose).
MOST_COLUMNS = 2048
# The limit that replaces MOST_COLUMNS for codes that are multiplied as floats, except in short
# steps.
MOST_FLOAT_COLUMNS = 1024
# The tiles of gate and up, as (rows of each weight, warps), for formats that are not in UP_TILES.
UP_TILE = (8, 4)
# Maps a format to its tiles of gate and up, the fastest that were measured.
UP_TILES = {"fp8": (4, 4), "int4": (8, 2)}
# The tiles of down, as (rows, whether programs prefetch weights), for formats that are not in
# DOWN_TILES.
DOWN_TILE = (8, True)
# Maps a format to its tiles of down, the fastest that were measured.
DOWN_TILES = {"int4": (4, False), "nvfp4": (4, False)}
# The largest number of columns of a step over float8 codes for which a program has eight warps.
SHORT_STEP = 256
# The largest number of slots that the second kernel multiplies at the same time.
MOST_SLOTS = 8


@dataclass(frozen=True)
class DotTiles:
    """The tile sizes of a kernel of dot products.

    Attributes:
        block_n: The number of rows of a weight in a tile.
        block_k: The number of columns of a step.
        num_warps: The number of warps of a program.
        block_s: The number of slots, the experts that a token chose, in a step.
        early: Whether the first kernel allows the second kernel to start early. The second kernel
            then prefetches its weights before it waits for the first kernel.
    """

    block_n: int
    block_k: int
    num_warps: int
    block_s: int = 1
    early: bool = True

    def __str__(self) -> str:
        slots = f"{self.block_s}x" if self.block_s > 1 else ""
        return f"{self.block_n}x{slots}{self.block_k} w{self.num_warps}{' early' * self.early}"


@dataclass(frozen=True)
class DotsPlan:
    """The tiles of the two kernels, and a reason for reports."""

    up: DotTiles
    down: DotTiles
    reason: str


def codes_a_word(weight: WeightOperands) -> int:
    """Returns the number of columns in a word of the weight, as the kernels read it."""
    form = WEIGHT_FORMATS.get(weight.format)
    return 1 if form is None else 8 * WORD_BYTES // form.bits


def multiplies_integers(weight: WeightOperands) -> bool:
    """Whether codes are multiplied as integers. If not, they are multiplied as fp32 numbers."""
    return codes_a_word(weight) == 8


def word_bytes(weight: WeightOperands) -> int:
    """Returns the number of bytes of a word, as the kernels read it."""
    return WORD_BYTES if codes_a_word(weight) > 1 else int(ELEMENT_BYTES[weight.data.dtype])


def run_of(weight: WeightOperands) -> int:
    """Returns the number of words whose products are added to one sum before the sum is scaled.
    These words take 16 bytes, or fewer bytes if a scale covers fewer."""
    whole = LOAD_BYTES // word_bytes(weight)
    if weight.scale is None:
        return whole
    return min(whole, max(weight.scale_block[1] // codes_a_word(weight), 1))


def dots_obstacle(problem: MoeProblem, num_tokens: int) -> str | None:
    """Returns why the kernels are not used for a call; None if the kernels can compute the call and
    are faster."""
    most = MOST_TOKENS.get(problem.format, 0)
    if num_tokens > most:
        return f"more than {most} tokens"
    reads = _reads(problem, num_tokens)
    if reads > MOST_READS_OF.get(problem.format, MOST_READS):
        return f"{num_tokens} tokens would read an expert {reads:.1f} times on average"
    weights = {"gate": problem.gate, "up": problem.up, "down": problem.down}
    for name, weight in weights.items():
        rows, columns = problem.inner, problem.hidden
        if name == "down":
            rows, columns = columns, rows
        obstacle = weight and _weight_obstacle(weight, rows, columns)
        if obstacle:
            return f"{name}_weight: {obstacle}"
    return None


def _reads(problem: MoeProblem, num_tokens: int) -> float:
    """Returns how often the kernels read an expert, averaged over the experts that at least one
    token chose. The average assumes that each token chooses its experts at random."""
    chosen = problem.num_slots / problem.num_experts
    return num_tokens * chosen / (1 - (1 - chosen) ** num_tokens)


def _weight_obstacle(weight: WeightOperands, rows: int, columns: int) -> str | None:
    per, run = codes_a_word(weight), run_of(weight)
    expert, row, _ = weight.data.strides
    if weight.n_major:
        return "the weight is contiguous along N, not along K"
    if rows * row > INT32_MAX:
        return "the rows of an expert are too many for 32-bit offsets"
    if columns % per or (per > 1 and (expert % WORD_BYTES or row % WORD_BYTES)):
        return "rows do not fill whole words"
    width = weight.scale_block[1]
    if weight.scale is not None and width < columns and width % (per * run):
        return f"the number of columns that share a scale is {width}"
    if run & (run - 1):
        return f"runs of {run} words, whose number is not a power of two"
    return None


def plan_dots(problem: MoeProblem, num_tokens: int) -> DotsPlan | None:
    """Returns the tiles for a call; None if other kernels compute it."""
    if dots_obstacle(problem, num_tokens) is not None:
        return None
    up, down = up_tiles(problem), down_tiles(problem)
    return DotsPlan(up, down, f"dot products of {num_tokens} tokens: up {up}, down {down}")


def up_tiles(problem: MoeProblem) -> DotTiles:
    """Returns the tiles of gate and up. If rows are short, a step covers whole rows, so that all
    loads of a program are in flight at once."""
    rows, warps = UP_TILES.get(problem.format, UP_TILE)
    return DotTiles(rows, step_of(problem.gate, problem.hidden), warps)


def down_tiles(problem: MoeProblem) -> DotTiles:
    """Returns the tiles of down. For each row of a tile and each slot of a step, a program keeps a
    part of the sum."""
    rows, early = DOWN_TILES.get(problem.format, DOWN_TILE)
    block_k = step_of(problem.down, problem.inner)
    short = problem.format == "fp8" and block_k <= SHORT_STEP
    columns = MOST_COLUMNS if short or multiplies_integers(problem.down) else MOST_FLOAT_COLUMNS
    slots = min(next_power_of_2(problem.num_slots), MOST_SLOTS, max(columns // block_k, 1))
    warps = 8 if short else 4
    return DotTiles(rows, block_k, warps, slots, early)


def step_of(weight: WeightOperands, columns: int) -> int:
    """Returns the number of columns of a step. The result is a compromise between few steps and few
    columns past the end of the rows."""
    per, size = codes_a_word(weight), word_bytes(weight)
    steps = [per * taken // size for taken in STEP_BYTES]
    return min(steps, key=lambda step: cdiv(columns, step) * (step / columns + STEP_COST))


def up_dots(problem: MoeProblem, tiles: DotTiles) -> tuple[Kernel, Statics]:
    """Returns the first kernel with its constants."""
    return UP_DOTTED, Statics(
        tiles, problem, lets_in=tiles.early, **_constants(problem, problem.gate)
    )


def down_dots(problem: MoeProblem, tiles: DotTiles) -> tuple[Kernel, Statics]:
    """Returns the second kernel with its constants."""
    line = LINE_BYTES // word_bytes(problem.down)
    lines = cdiv(problem.inner, line * codes_a_word(problem.down)) if tiles.early else 0
    own: dict[str, Constant] = {"LINE": line, "LINES": lines and next_power_of_2(lines)}
    return DOWN_DOTTED, Statics(tiles, problem, **own, **_constants(problem, problem.down))


def _constants(problem: MoeProblem, weight: WeightOperands) -> dict[str, Constant]:
    form = WEIGHT_FORMATS.get(weight.format)
    twice = form is not None and form.number == "e2m1"
    return {
        "SCALE_BLOCK": weight.scale_block,
        "PER": codes_a_word(weight),
        "INTEGERS": multiplies_integers(weight),
        "BYTES": E2M1_BYTES if twice else (),
        "ZERO": 0 if form is None else form.expert_zero,
        "RUN": run_of(weight),
        "CODED": problem.coded_rows,
        "GROUP": SCALED_K,
    }


def up_dots_grid(problem: MoeProblem, tiles: DotTiles, num_routes: int) -> tuple[int, int]:
    return cdiv(problem.inner, tiles.block_n), num_routes


def down_dots_grid(problem: MoeProblem, tiles: DotTiles, num_tokens: int) -> tuple[int, int]:
    return cdiv(problem.hidden, tiles.block_n), num_tokens
