"""Which lowering a QKV problem takes, and why: decided from data, without a GPU.

Four lowerings compute `fused_qkv_paged`:

    dots       one kernel without tensor cores, weights of codes: one token
    swapped    one kernel, weight rows on the M side: few tokens
    tiled      one kernel, tokens on the M side, TMA: many tokens
    library    library GEMMs (one where the three weights are rows of one tensor), then
               `qkv_epilogue` over their results

A norm of x is a part of `dots` and, of weights that are no codes, of `swapped`; before the others x
is normed by itself.

Times come from the measured tables where they have the problem's dims, else from the model of
`time`. `dots` goes before `swapped` where `dots_config` has tiles, whatever the time of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.qkv.candidates import candidates, dots_config, fits
from tilewright.codegen.qkv.kernels import (
    Config,
    DotsConfig,
    EpilogueConfig,
    SwappedConfig,
    TiledConfig,
    dequantize_statics,
    epilogue_statics,
    order_statics,
    swapped_statics,
    tiled_statics,
)
from tilewright.codegen.qkv.measured import measured_row, read_config
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem, swapped_obstacle
from tilewright.codegen.qkv.time import estimate, library_estimate
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# Up to so many tokens the few-token kernel norms x itself. On an H200 a layer of Llama-3-8B takes
# 1.5 us less than behind a norm that Inductor compiled with one token; with 4, 8 and 16 tokens 0.9,
# 0.6 and 4.5 us more. The same for a layer norm, of which that is modelled, not measured.
MOST_NORMED_TOKENS = 1

# How much faster than a kernel that was measured the library's products of codes, which were not,
# have to be by the model.
MARGIN = 1.25

# Upper ends of the token counts that share a kernel where the count is known at run time only.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Where a choice's time is from; the first that is there decides.
HERE, TABLE, MODEL = ("measured here", "shipped table", "model")
_WORDS = {HERE: "measured here", TABLE: "measured (shipped table)", MODEL: "modelled"}


@dataclass(frozen=True)
class LoweringChoice:
    """One lowering for up to `max_tokens` tokens (None: any number).

    name: "dots", "swapped", "tiled" or "library". reason: a sentence for reports. config: the tiles
    of the fused kernel; None for the library. epilogue: the tiles of "library".
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
    alike = library.measured == fused.measured
    needed = library.seconds * (1.0 if alike else MARGIN)
    if needed < fused.seconds and (alike or problem.multiplies_codes(target)):
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
    if chosen.name not in ("dots", "swapped") or not takes_norm(
        norm.kind, num_tokens, problem.hidden
    ):
        return None
    row = measured_row(problem, num_tokens, target)
    fused = _fused_choice(problem, num_tokens, target, row)
    if fused is None or fused.config is None or norm.follows:
        return fused
    # What was measured had no statistics to take first.
    seconds = estimate(problem, fused.config, num_tokens, target)
    return fused_choice(problem, fused.config, seconds)


def _fused_choice(
    problem: QkvProblem, num_tokens: int, target: Target, row: dict | None
) -> LoweringChoice | None:
    dots = dots_config(problem, num_tokens, target)
    if row is not None:
        config = read_config(row["config"])
        other = dots is not None and not isinstance(config, DotsConfig)
        if not other and fits(problem, config, target):
            return fused_choice(problem, config, row["fused_us"] * 1e-6, measured=True)
    if dots is not None:
        return fused_choice(problem, dots, estimate(problem, dots, num_tokens, target))
    best = ranked(problem, num_tokens, target)[:1]
    return fused_choice(problem, best[0][1], best[0][0]) if best else None


def ranked(problem: QkvProblem, num_tokens: int, target: Target) -> list[tuple[float, Config]]:
    """The candidates with their modelled seconds, fastest first."""
    timed = [
        (estimate(problem, config, num_tokens, target), config)
        for config in candidates(problem, num_tokens, target)
    ]
    return sorted(timed, key=lambda one: (one[0], str(one[1])))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def fused_choice(
    problem: QkvProblem, config: Config, seconds: float, measured: bool = False
) -> LoweringChoice:
    source = TABLE if measured else MODEL
    norms_x = problem.input_norm is not None
    kernel = "one fused kernel that norms x" if norms_x else "one fused kernel"
    reason = f"{kernel}, {config}: {_us(seconds)} {_WORDS[source]}"
    statics = _fused_statics(problem, config)
    return LoweringChoice(
        config.kind, reason, None, config, None, seconds, source, norms_x, statics
    )


def _fused_statics(problem: QkvProblem, config: Config) -> tuple[Statics, ...]:
    if isinstance(config, TiledConfig):
        return (tiled_statics(problem, config),)
    statics = swapped_statics(problem, config)
    if isinstance(config, SwappedConfig) and config.ordered_x:
        return (statics, order_statics(problem, config))
    return (statics,)


def library_choice(
    problem: QkvProblem, num_tokens: int, target: Target, packed: bool, row: dict | None
) -> LoweringChoice:
    config = epilogue_config(problem.epilogue, num_tokens, target)
    statics = [epilogue_statics(problem.epilogue, config)]
    codes = problem.multiplies_codes(target)
    # The measured library made numbers of the weights first.
    measured = None
    if row is not None and not codes:
        measured = row["packed_library_us" if packed else "library_us"]
    source = MODEL if measured is None else TABLE
    if measured is not None:
        seconds = measured * 1e-6
    else:
        seconds = library_estimate(problem, num_tokens, target, packed)
    packed = packed and not codes
    gemms = "one library GEMM" if packed else f"{problem.epilogue.kinds} library GEMMs"
    if codes:
        gemms = f"{problem.epilogue.kinds} library GEMMs of codes, scaled by {problem.scaled_by}"
    elif problem.quantization is not None:
        gemms = f"weights as {problem.number_dtype} numbers, {gemms}"
        there = [index for index, weight in enumerate(problem.weights) if weight is not None]
        statics += [dequantize_statics(problem, index) for index in there]
    obstacle = swapped_obstacle(problem)
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
