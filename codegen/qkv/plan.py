"""Which lowering a QKV problem takes, and why: decided from data, without a GPU.

Three lowerings compute `fused_qkv_paged`:

    swapped    one kernel, weight rows on the M side: few tokens
    tiled      one kernel, tokens on the M side, TMA: many tokens
    library    library GEMMs (one where the three weights are rows of one tensor), then
               `qkv_epilogue` over their results

A norm of x is a part of `swapped`; before the others x is normed by itself.

Times come from the measured table where it has the problem's dims (`measured_qkv.json`, written by
`benchmarks/tune_qkv.py`), else from the model of `qkv_time`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.qkv.kernels import (
    EpilogueConfig,
    SwappedConfig,
    TiledConfig,
    dequantize_statics,
    epilogue_statics,
    order_statics,
    swapped_statics,
    tiled_statics,
    tiles_per_head,
)
from tilewright.codegen.qkv.problem import (
    HeadEpilogue,
    QkvProblem,
    heads_fit,
    swapped_obstacle,
    tiled_obstacle,
)
from tilewright.codegen.qkv.quantized_plan import (
    quantized_configs,
    quantized_fits,
    quantized_obstacle,
    quantized_row,
)
from tilewright.codegen.qkv.time import Config, estimate, library_estimate, shared_bytes
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# Up to so many tokens the few-token kernel norms x itself. On an H200 a layer of Llama-3-8B takes
# 1.5 us less than behind a norm that Inductor compiled with one token; with 4, 8 and 16 tokens 0.9,
# 0.6 and 4.5 us more. The same for a layer norm, of which that is modelled, not measured.
MOST_NORMED_TOKENS = 1

# Upper ends of the token counts that share a kernel where the count is known at run time only.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Where a choice's time is from; the first that is there decides.
HERE, TABLE, MODEL = ("measured here", "shipped table", "model")
_WORDS = {HERE: "measured here", TABLE: "measured (shipped table)", MODEL: "modelled"}


@dataclass(frozen=True)
class LoweringChoice:
    """One lowering for up to `max_tokens` tokens (None: any number).

    name: "swapped", "tiled" or "library". reason: a sentence for reports. config: the tiles of the
    fused kernel; None for the library. epilogue: the tiles of "library".
    seconds: expected time; source: where that is from, HERE, TABLE or MODEL. norms_x: the kernel
    has the problem's norm of x in it. statics: the constants of the fused kernel, then those of
    `order_x`, if it runs; or those of the epilogue, then for each weight of codes those of
    `dequantize_weight`.
    """

    name: str
    reason: str
    max_tokens: int | None
    config: Config | None
    epilogue: EpilogueConfig | None
    seconds: float
    source: str
    norms_x: bool = False
    statics: tuple[Statics, ...] = field(default=(), compare=False, repr=False)

    @property
    def measured(self) -> bool:
        return self.source != MODEL


@dataclass(frozen=True)
class LoweringPlan:
    """Choices in rising order of `max_tokens`; a static problem has one."""

    problem: QkvProblem
    target: str
    choices: tuple[LoweringChoice, ...]

    def choice(self, num_tokens: int) -> LoweringChoice:
        """The choice for a run-time token count."""
        for choice in self.choices:
            if choice.max_tokens is None or num_tokens <= choice.max_tokens:
                return choice
        raise ValueError(f"num_tokens: no lowering planned for {num_tokens} tokens")

    def __str__(self) -> str:
        return "\n".join(
            f"<= {c.max_tokens} tokens: {c.reason}" if c.max_tokens else f"more: {c.reason}"
            for c in self.choices
        )


def plan_fused_qkv(problem: QkvProblem, target: Target, packed: bool = False) -> LoweringPlan:
    """The lowerings of a problem on a target; for a chip without TMA, that of the library.

    packed: the weights are rows of one tensor.
    """

    def pick(num_tokens: int) -> LoweringChoice:
        return choose(problem, num_tokens, target, packed)

    if problem.epilogue.num_tokens is not None:
        choices = [pick(problem.epilogue.num_tokens)]
    else:
        choices = [replace(pick(tokens), max_tokens=tokens) for tokens in TOKEN_BUCKETS]
        choices.append(pick(2 * TOKEN_BUCKETS[-1]))
    return LoweringPlan(problem, target.name, tuple(choices))


def choose(
    problem: QkvProblem, num_tokens: int, target: Target, packed: bool = False
) -> LoweringChoice:
    """The fastest lowering at one token count; of x that is to be normed, the one that would be the
    fastest without, which has the norm in it where that can be."""
    if problem.input_norm is not None:
        chosen = choose(problem.after_norm, num_tokens, target, packed)
        apart = replace(chosen, reason=f"x is normed, then {chosen.reason}")
        return _with_norm(problem, num_tokens, target, chosen) or apart
    if not target.has("tma"):
        return library_choice(problem, num_tokens, target, packed, None)
    row = measured_row(problem, num_tokens, target)
    fused = _fused_choice(problem, num_tokens, target, row)
    library = library_choice(problem, num_tokens, target, packed, row)
    if fused is None:
        return library
    if library.seconds < fused.seconds and library.measured == fused.measured:
        slower = f"{library.reason}; the fused kernel would take {_us(fused.seconds)}"
        return replace(library, reason=slower)
    return fused


def takes_norm(kind: str, num_tokens: int, columns: int) -> bool:
    """Whether the few-token kernel norms so many rows itself. kind: as in `RowNorm`."""
    return 0 < num_tokens <= MOST_NORMED_TOKENS and takes_columns(kind, columns)


def _with_norm(
    problem: QkvProblem, num_tokens: int, target: Target, chosen: LoweringChoice
) -> LoweringChoice | None:
    """What is chosen once x is normed, with the norm in it; None where it cannot be."""
    norm = problem.input_norm
    assert norm is not None
    if chosen.name != "swapped" or not takes_norm(norm.kind, num_tokens, problem.hidden):
        return None
    row = measured_row(problem, num_tokens, target)
    fused = _fused_choice(problem, num_tokens, target, row)
    if fused is None or fused.config is None or norm.follows:
        return fused
    # What was measured had no statistics to take first.
    seconds = estimate(problem, fused.config, num_tokens, target)
    return fused_choice(problem, fused.config, target, seconds, measured=False)


def _fused_choice(
    problem: QkvProblem, num_tokens: int, target: Target, row: dict | None
) -> LoweringChoice | None:
    if row is not None:
        config = read_config(row["config"])
        if config in candidates(problem, num_tokens, target, [config]):
            return fused_choice(problem, config, target, row["fused_us"] * 1e-6, measured=True)
    ranked = sorted(
        (estimate(problem, config, num_tokens, target), str(config), config)
        for config in candidates(problem, num_tokens, target)
    )
    if not ranked:
        return None
    return fused_choice(problem, ranked[0][2], target, ranked[0][0], measured=False)


def _name(config: Config) -> str:
    return "tiled" if isinstance(config, TiledConfig) else "swapped"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def fused_choice(
    problem: QkvProblem, config: Config, target: Target, seconds: float, measured: bool
) -> LoweringChoice:
    source = TABLE if measured else MODEL
    norms_x = problem.input_norm is not None
    kernel = "one fused kernel that norms x" if norms_x else "one fused kernel"
    reason = f"{kernel}, {config}: {_us(seconds)} {_WORDS[source]}"
    statics = _fused_statics(problem, config)
    return LoweringChoice(
        _name(config), reason, None, config, None, seconds, source, norms_x, statics
    )


def _fused_statics(problem: QkvProblem, config: Config) -> tuple[Statics, ...]:
    if isinstance(config, TiledConfig):
        return (tiled_statics(problem, config),)
    statics = swapped_statics(problem, config)
    return (statics, order_statics(problem, config)) if config.ordered_x else (statics,)


def library_choice(
    problem: QkvProblem, num_tokens: int, target: Target, packed: bool, row: dict | None
) -> LoweringChoice:
    config = epilogue_config(problem.epilogue, num_tokens, target)
    statics = [epilogue_statics(problem.epilogue, config)]
    measured = None if row is None else row["packed_library_us" if packed else "library_us"]
    source = MODEL if measured is None else TABLE
    if measured is not None:
        seconds = measured * 1e-6
    else:
        seconds = library_estimate(problem, num_tokens, target, packed)
    gemms = "one library GEMM" if packed else f"{problem.epilogue.kinds} library GEMMs"
    if problem.quantization is None:
        obstacle = swapped_obstacle(problem)
    else:
        gemms = f"weights as {problem.number_dtype} numbers, {gemms}"
        there = [index for index, weight in enumerate(problem.weights) if weight is not None]
        statics += [dequantize_statics(problem, index) for index in there]
        obstacle = quantized_obstacle(problem)
    reason = f"{gemms}, then {config}: {_us(seconds)} {_WORDS[source]}"
    if obstacle is not None:
        reason = f"{reason}; no fused kernel: {obstacle}"
    made = tuple(statics)
    return LoweringChoice("library", reason, None, None, config, seconds, source, statics=made)


def epilogue_config(epilogue: HeadEpilogue, num_tokens: int, target: Target) -> EpilogueConfig:
    """Programs of about 4096 elements, fewer where that would leave SMs idle."""
    width = 2 * next_power_of_2(epilogue.pairs_per_head)
    if epilogue.row_norm:
        heads = next_power_of_2(max(epilogue.num_heads, epilogue.num_kv_heads))
        return EpilogueConfig(1, heads, num_warps=max(4, min(heads * width // 512, 16)))
    counts = [epilogue.num_heads, epilogue.num_kv_heads][epilogue.num_heads == 0 :]
    counts += [epilogue.gate_run]  # gcd(n, 0) is n
    heads = math.gcd(*counts) & -math.gcd(*counts)
    heads = max(min(heads, 2, 4096 // width), 1)
    block_t = max(4096 // (width * heads), 1)
    while block_t > 1 and cdiv(num_tokens, block_t) * epilogue.heads_in_all // heads < (
        2 * target.num_sms
    ):
        block_t //= 2
    return EpilogueConfig(block_t, heads, num_warps=4 if block_t * heads * width >= 1024 else 1)


# --- candidates ---------------------------------------------------------------------------------


def candidates(
    problem: QkvProblem,
    num_tokens: int,
    target: Target,
    configs: list[Config] | None = None,
) -> list[Config]:
    """The configs (by default all that are worth a try) that this problem and target can take."""
    tried = configs if configs is not None else list(_configs(problem, num_tokens, target))
    return [config for config in tried if fits(problem, config, target)]


def _configs(problem: QkvProblem, num_tokens: int, target: Target) -> Iterator[Config]:
    """What was worth its while on an H200, in any problem measured."""
    if problem.quantization is not None:
        yield from quantized_configs(problem, num_tokens)
        return
    whole = next_power_of_2(problem.epilogue.pairs_per_head)
    if num_tokens <= 128:
        block_t = max(16, next_power_of_2(num_tokens))
        for block_p in sorted({32, whole}):
            for block_k, stages in ((128, 6), (128, 5), (128, 4), (256, 4), (64, 8), (64, 5)):
                warps = 8 if block_p * block_t >= 64 * 64 else 4
                for split_k in (1,) if block_p <= 32 else (1, 2, 4):
                    yield SwappedConfig(block_p, block_t, block_k, warps, stages, split_k)
    for heads in (1, 2, 4, 8):
        yield from _tiled_configs(heads, heads * problem.epilogue.head_dim, num_tokens, target)


def _tiled_configs(
    heads: int, width: int, num_tokens: int, target: Target
) -> Iterator[TiledConfig]:
    """Tiles of `heads` heads, `width` columns; persistent loops on every chip, and the warps
    specialised where the accumulator is in tensor memory."""
    walk = {"persistent": True, "flatten": True, "warp_specialize": target.has("tcgen05")}
    if 32 < num_tokens <= 1024 and width <= 128:
        yield TiledConfig(64, heads, 128, 4, 4)
        for stages in (3, 4, 6):
            yield TiledConfig(64, heads, 64, 4, stages)
    if num_tokens > 64 and width <= 128:
        yield TiledConfig(128, heads, 64, 8, 6, epilogue_parts=2)
        yield TiledConfig(128, heads, 64, 8, 5, **walk)
        yield TiledConfig(128, heads, 64, 8, 4, **walk)
    if num_tokens > 64 and width == 256:
        yield TiledConfig(64, heads, 64, 8, 5)
        parts = 4 if target.has("tcgen05") else 2
        yield TiledConfig(128, heads, 64, 8, 4, epilogue_parts=parts, **walk)
        if not target.has("tcgen05"):
            yield TiledConfig(128, heads, 64, 8, 4, **walk)
            yield TiledConfig(128, heads, 64, 8, 4, epilogue_parts=2, pairs_first=True, **walk)
    if num_tokens > 64 and not target.has("tcgen05"):
        # Two programs per SM: the epilogue of one runs beside the other's tensor cores.
        if width == 128:
            for parts in (2, 4):
                pair = TiledConfig(128, heads, 64, 4, 3, epilogue_parts=parts, **walk)
                yield replace(pair, programs_per_sm=2)
            yield TiledConfig(128, heads, 64, 8, 6, epilogue_parts=2, **walk)
            yield TiledConfig(256, heads, 64, 8, 4, epilogue_parts=4, **walk)
        if width == 256:
            pair = TiledConfig(64, heads, 32, 4, 5, epilogue_parts=4, **walk)
            yield replace(pair, programs_per_sm=2)


def fits(problem: QkvProblem, config: Config, target: Target) -> bool:
    """Whether a config is legal for the problem and within the target's limits."""
    if problem.quantization is not None:
        return isinstance(config, SwappedConfig) and quantized_fits(problem, config, target)
    heads = problem.epilogue
    if shared_bytes(problem, config) > target.max_shared_bytes - 2048:
        return False
    if isinstance(config, SwappedConfig):
        if swapped_obstacle(problem) is not None or not config.block_p >= 8:
            return False
        if config.block_p > next_power_of_2(heads.pairs_per_head):
            return False
        steps = cdiv(problem.hidden, config.block_k)
        if config.split_k > 1 and steps < 2 * config.split_k:
            return False
        return not heads.has_norm or tiles_per_head(problem, config) == 1
    if tiled_obstacle(problem) is not None:
        return False
    width = config.heads_per_tile * heads.head_dim
    accumulator = config.block_m * width
    # Twelve warps have 168 registers each: too few for 256 columns and a heavy epilogue.
    crowded = config.warp_specialize and width == 256 and (heads.has_norm or heads.interleaved)
    # Neighbours in registers besides: pairs that part, weights that are not transposed for them.
    if width == 256 and heads.interleaved and (heads.halves or not problem.k_major):
        crowded = crowded or config.epilogue_parts < 4
    if heads.norm_after != "none" and config.pair_parts > 1:
        return False
    return (
        heads_fit(problem, config.heads_per_tile)
        and 64 <= width <= 256
        and accumulator <= 128 * 32 * config.num_warps
        and config.epilogue_parts <= width // 32
        and not crowded
    )


# --- the measured table -------------------------------------------------------------------------

MEASURED_FILE = Path(__file__).with_name("measured_qkv.json")


@cache
def measured_table() -> tuple[dict, ...]:
    """Rows of the measured table, shipped with the package."""
    return tuple(json.loads(MEASURED_FILE.read_text("utf-8"))["rows"])


def measured_row(problem: QkvProblem, num_tokens: int, target: Target) -> dict | None:
    """The row for the problem's dims at the smallest measured token count that is not below."""
    if problem.quantization is not None:
        return quantized_row(problem, num_tokens, target)
    heads = problem.epilogue
    if not problem.k_major or heads.group or not heads.writes_v:
        return None
    same = [
        row
        for row in measured_table()
        if row["target"] == target.name
        and row["dtype"] in ("bf16", "fp16")
        and heads.dtype in ("bf16", "fp16")
        and row["hidden"] == problem.hidden
        and row["num_heads"] == heads.num_heads
        and row["num_kv_heads"] == heads.num_kv_heads
        and row["head_dim"] == heads.head_dim
        and row["norm"] == heads.has_norm
    ]
    above = [row for row in same if row["num_tokens"] >= num_tokens]
    return min(above, key=lambda row: row["num_tokens"], default=None)


def write_config(config: Config) -> dict:
    """A config as the table holds it."""
    return {"kind": _name(config), **asdict(config)}


def read_config(values: dict) -> Config:
    """The inverse of `write_config`."""
    fields = {key: value for key, value in values.items() if key != "kind"}
    return TiledConfig(**fields) if values["kind"] == "tiled" else SwappedConfig(**fields)
