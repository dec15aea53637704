"""Plans of a QKV problem: the chosen lowering and the reason. A plan is made from data, without a
GPU.

Four lowerings compute `fused_qkv_paged`:

    dots       one kernel without tensor cores, for quantised weights and one token
    swapped    one kernel with weight rows on the M side, for few tokens
    tiled      one kernel with tokens on the M side and TMA, for many tokens
    library    library GEMMs (one GEMM if the three weights are rows of one tensor), then
               `qkv_epilogue` on their results

`dots` can include a norm of x, and so can `swapped` if weights are not quantised. For the other
lowerings, a separate kernel normalises x first.

Times come from the measured tables if the tables have the problem's dims. If not, times come from
the cost model in `codegen.qkv.time`. If `dots_config` returns tiles, `dots` takes precedence over
`swapped`, whatever their times are.
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
    TiledConfig,
    decoding_statics,
    epilogue_statics,
    swapped_statics,
    tiled_statics,
)
from tilewright.codegen.qkv.measured import measured_row, read_config
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem, swapped_obstacle
from tilewright.codegen.qkv.time import estimate, library_estimate
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# The largest number of tokens for which the kernel for few tokens normalises x itself. Compared
# with a norm that Inductor compiled, a layer of Llama-3-8B on an H200 takes 1.5 us less for one
# token, and 0.9, 0.6 and 4.5 us more for 4, 8 and 16 tokens. The same limit holds for a layer norm.
# The limit for a layer norm was modelled, not measured.
MOST_NORMED_TOKENS = 1

# The library's products of quantised operands are chosen only if they are modelled to be faster
# than a measured kernel by this factor.
MARGIN = 1.25

# The largest number of tokens of each bucket. If the number of tokens is known only at run time,
# all numbers in a bucket share a kernel.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# The three sources from which the time of a choice may come. The first source that has a time is
# used.
HERE, TABLE, MODEL = ("measured here", "shipped table", "model")
# The words for each source in reports.
_WORDS = {HERE: "measured here", TABLE: "measured (shipped table)", MODEL: "modelled"}


@dataclass(frozen=True)
class LoweringChoice:
    """One lowering for up to `max_tokens` tokens, or for any number of tokens if `max_tokens` is
    None.

    Attributes:
        name: "dots", "swapped", "tiled" or "library".
        reason: A sentence for reports.
        config: The tiles of the fused kernel; None for the library.
        epilogue: For "library", the tiles of the epilogue; None for the other lowerings.
        seconds: The expected time.
        source: Where the time comes from: HERE, TABLE or MODEL.
        norms_x: Whether the kernel includes the problem's norm of x.
        statics: The constants of the fused kernel. For the library, the constants of the epilogue,
            and then the constants of `dequantize_weight` for each quantised weight.
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
    """The choices for a problem, in ascending order of `max_tokens`. A problem with a static number
    of tokens has one choice."""

    problem: QkvProblem
    target: str
    choices: tuple[LoweringChoice, ...]

    def choice(self, num_tokens: int) -> LoweringChoice:
        """Returns the choice for a number of tokens at run time. Raises ValueError if the plan has
        no such choice."""
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
    """Returns the lowerings of a problem on a target. On a chip without TMA, the only lowering is
    "library".

    packed: whether the weights are rows of one tensor.
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
    """Returns the fastest lowering for a number of tokens.

    If the problem has a norm of x, the result is the lowering that is the fastest without the norm.
    This lowering includes the norm if it can.
    """
    if problem.input_norm is not None:
        chosen = choose(problem.after_norm, num_tokens, target, packed)
        apart = replace(chosen, reason=f"x is normalised first, then {chosen.reason}")
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
    """Whether the kernel for few tokens normalises x itself. kind: the kind of norm, as in
    `RowNorm`."""
    return 0 < num_tokens <= MOST_NORMED_TOKENS and takes_columns(kind, columns)


def _with_norm(
    problem: QkvProblem, num_tokens: int, target: Target, chosen: LoweringChoice
) -> LoweringChoice | None:
    """Returns the fused choice that includes the norm of x; None if there is no such choice.
    chosen: the choice for an x that has already been normalised."""
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
    # The kernel that was measured did not compute the statistics of x first, so its time does not
    # apply here.
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
    """Returns the candidates with their modelled times in seconds. The fastest candidate is first.

    Candidates that are modelled to take the same time keep the order of `candidates`, which follows
    measurements of weights that are not quantised. For quantised weights, and on chips on which
    nothing was measured, such candidates are ordered by name.
    """
    in_order = target.measured and problem.quantization is None
    timed = [
        (estimate(problem, config, num_tokens, target), config)
        for config in candidates(problem, num_tokens, target)
    ]
    return sorted(timed, key=lambda one: (one[0], "" if in_order else str(one[1])))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def fused_choice(
    problem: QkvProblem, config: Config, seconds: float, measured: bool = False
) -> LoweringChoice:
    source = TABLE if measured else MODEL
    norms_x = problem.input_norm is not None
    kernel = "one fused kernel that normalises x" if norms_x else "one fused kernel"
    reason = f"{kernel}, {config}: {_us(seconds)} {_WORDS[source]}"
    statics = _fused_statics(problem, config)
    return LoweringChoice(
        config.kind, reason, None, config, None, seconds, source, norms_x, statics
    )


def _fused_statics(problem: QkvProblem, config: Config) -> tuple[Statics, ...]:
    if isinstance(config, TiledConfig):
        return (tiled_statics(problem, config),)
    return (swapped_statics(problem, config),)


def library_choice(
    problem: QkvProblem, num_tokens: int, target: Target, packed: bool, row: dict | None
) -> LoweringChoice:
    config = epilogue_config(problem.epilogue, num_tokens, target)
    statics = [epilogue_statics(problem.epilogue, config)]
    codes = problem.multiplies_codes(target)
    # The measured time of the library includes the time to dequantise the weights.
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
        statics += [decoding_statics(problem, index) for index in there]
    obstacle = swapped_obstacle(problem)
    reason = f"{gemms}, then {config}: {_us(seconds)} {_WORDS[source]}"
    if obstacle is not None:
        reason = f"{reason}; no fused kernel: {obstacle}"
    made = tuple(statics)
    return LoweringChoice("library", reason, None, None, config, seconds, source, statics=made)


def epilogue_config(epilogue: HeadEpilogue, num_tokens: int, target: Target) -> EpilogueConfig:
    """Returns tiles of about 4096 elements, or of fewer if such tiles would leave SMs without
    work."""
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
