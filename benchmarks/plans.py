"""Compares the planner's tiles with the fastest of the tiles around them.

    python benchmarks/plans.py [--ops linear qkv attention latents mla experts lora]
        [--cases TEXT ...] [--unfitted] [--most 16] [--seconds 90] [--list] [--out DIR]

Each row is one call of an op at the sizes of a published model. The op runs with the tiles that
the planner chooses, and with others. For linears, attention, experts and LoRA these are the plan's
tiles with one or two of their numbers changed: sizes and splits halved or doubled, warps halved or
doubled, one pipeline stage or program more or less; at most `--most` of them. Linears try the
planner's tilings first, and rounded latents try several numbers of parts and warps. For the QKV
projection the others are the configs that `tune` measures, and the library. For MLA they are
attention to the latents themselves, and to expanded keys in several tiles. Tiles that do not
compile, or whose result differs from the plan's by more than rounding, are left out.

Times are microseconds of CUDA graphs with a cold L2 cache: all tiles in three rounds, then the plan
and the fastest five in fifteen. ratio: the time of the plan over that of the fastest. us: the time
of each. fitted: whether a rule of the planner was fitted to a measurement of this call; the other
rows test the rules. Results go to results/plans.json. --cases selects the rows whose name contains
one of the texts, and --unfitted those that no rule was fitted to. After --seconds no further row is
measured. --list prints the rows and the number of their tiles, and needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compiling import compile_quietly, processes
from moe_layers import BY_NAME as EXPERTS
from moe_layers import MoeShape, make_experts
from moe_layers import arguments as expert_arguments
from qkv_shapes import COLD_BYTES, DEVICE, Shape, fused_arguments, make_layer, normal, paged_cache
from timing import capture, interleaved_us, keep
from triton.runtime.errors import OutOfResources

from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.mlp.plan import LONG_STEPS, SHORT_STEPS, WIDE_TILES, linear_config
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.row_rounding import RowRounding
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.attention.operands import RopePart
from tilewright.ops.lora.lowering import shrink_steps
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.mla.arguments import MlaPrefillArguments
from tilewright.ops.mla.attention import lowering as attention_lowering
from tilewright.ops.mla.decode import lowering as decode_lowering
from tilewright.ops.mla.prefill.lowering import prefill_steps
from tilewright.ops.mlp.arguments import LinearActivationArguments, LinearResidualArguments
from tilewright.ops.mlp.lowering import linear_activation_steps, linear_residual_steps
from tilewright.ops.mlp.operands import activation_problem, residual_problem
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.qkv.choices import choice_steps
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, Steps, drive

PLAN = "plan"
MOST_SETS, FLUSH_BYTES = 60, 2**28
# A result farther from the plan's, relative in the norm, is wrong and not only rounded otherwise.
WRONG = 2.0**-6
FINALISTS = 5
#: Numbers of tiles that are halved or doubled, and those that are counted.
DOUBLED = ("block_n", "block_k", "block_m", "columns", "split_k", "splits", "num_warps", "prefetch")
COUNTED = ("num_stages", "programs_per_sm")


@dataclass(frozen=True)
class Row:
    """A call to measure. make: makes the arguments of a call. steps: the steps of a call with
    tiles; None for the plan's. tried: the other tiles. read: bytes that a call reads. fitted:
    whether a rule of the planner was fitted to a measurement of this call."""

    op: str
    case: str
    make: Callable[[], Any]
    steps: Callable[[Any, Any], Steps]
    tried: Sequence[Any]
    read: float
    fitted: bool = False

    @property
    def sets(self) -> int:
        """The number of argument sets that keep the L2 cache cold."""
        return max(2, min(MOST_SETS, -(-int(COLD_BYTES) // int(self.read))))


@dataclass(frozen=True)
class Case:
    """A row that is not made yet. make: makes the row from its name and the most tiles to try."""

    name: str
    make: Callable[[str, int], Row]
    fitted: bool = False

    def row(self, most: int) -> Row:
        return replace(self.make(self.name, most), fitted=self.fitted)


def neighbours(config: Any, most: int) -> list[Any]:
    """Returns tiles that differ from `config` in one number, followed by tiles that differ in
    two."""
    changes = [
        (field.name, changed)
        for field in fields(config)
        for changed in _changed(field.name, getattr(config, field.name))
    ]
    chosen = [dict([change]) for change in changes]
    pairs = (pair for pair in combinations(changes, 2) if pair[0][0] != pair[1][0])
    chosen += [dict(pair) for pair in pairs]
    made = (replace(config, **change) for change in chosen)
    return list(dict.fromkeys(made))[:most]


def _changed(name: str, value: Any) -> tuple[int, ...]:
    if name in DOUBLED and value:
        most = 16 if name == "num_warps" else 2 * value
        return tuple(v for v in (value // 2, 2 * value) if 1 <= v <= most)
    if name in COUNTED:
        return tuple(v for v in (value - 1, value + 1) if v >= 1)
    return ()


def planned(a: Any, steps: Callable[[Any, Any], Steps]) -> Any:
    """Returns the plan's tiles of a call."""
    return drive(steps(a, None), Planner(SM90)).outcome.reason


# --- rows -----------------------------------------------------------------------------------------


#: The hidden and inner sizes of models.
FITTED_LINEARS = {
    "llama3-8b": (4096, 14336),
    "qwen3-4b": (2560, 9728),
    "qwen3-8b": (4096, 12288),
    "llama3-70b": (8192, 28672),
    "qwen3-0.6b": (1024, 3072),
}
OTHER_LINEARS = {
    "qwen3-14b": (5120, 17408),
    "gemma2-9b": (3584, 14336),
    "qwen3-32b": (5120, 25600),
}
#: Tilings that are tried before the tiles around the plan's.
TILINGS = (SHORT_STEPS, LONG_STEPS, WIDE_TILES, replace(WIDE_TILES, num_warps=8))


def linear_cases() -> Iterator[Case]:
    for models, counts in (
        (FITTED_LINEARS, (1, 4, 16, 32, 64, 128)),
        (OTHER_LINEARS, (1, 8, 32, 64)),
    ):
        for (name, (hidden, inner)), tokens in product(models.items(), counts):
            fitted = models is FITTED_LINEARS
            up = partial(_linear, tokens, inner, hidden, True)
            down = partial(_linear, tokens, hidden, inner, False)
            yield Case(f"{name} gate and up, {tokens}", up, fitted)
            yield Case(f"{name} down, {tokens}", down, fitted)


def _linear(tokens: int, rows: int, columns: int, gated: bool, case: str, most: int) -> Row:
    def make() -> Any:
        weights = [normal(rows, columns, scale=columns**-0.5) for _ in range(1 + gated)]
        x = normal(tokens, columns)
        if not gated:
            return LinearResidualArguments(x, weights[0], normal(tokens, rows))
        return LinearActivationArguments(x, *weights, rms_norm=True, norm_weight=normal(columns))

    function = linear_activation_steps if gated else linear_residual_steps

    def steps(a: Any, config: Any) -> Steps:
        return function(a, SM90, config)

    a = make()
    problem = activation_problem(a) if gated else residual_problem(a)
    # Where the plan takes a library's product, the kernel's own tiles are the others.
    config = linear_config(problem, tokens, SM90)
    tilings = [linear_config(problem, tokens, SM90, tiling) for tiling in TILINGS]
    tried = list(dict.fromkeys((config, *tilings, *neighbours(config, most))))[:most]
    return Row("linear", case, make, steps, tried, 2.0 * rows * columns * (1 + gated))


#: Numbers of sequences and keys.
FITTED_SEQUENCES = (
    *((1, 2048), (1, 16384), (16, 2048), (64, 1024), (1, 4096), (4, 2048)),
    *((8, 2048), (8, 8192), (32, 1024), (32, 4096)),
)
OTHER_SEQUENCES = ((1, 8192), (2, 2048), (2, 8192), (4, 16384), (24, 1024), (48, 2048))


def attention_cases() -> Iterator[Case]:
    for batch, keys in FITTED_SEQUENCES + OTHER_SEQUENCES:
        for heads, kv_heads, width in ((32, 8, 128), (32, 4, 128), (32, 8, 64)):
            fitted = (batch, keys) in FITTED_SEQUENCES
            wide = "" if width == 128 else f" of {width} columns"
            case = f"{batch} x {keys} keys, {heads} heads of {kv_heads}{wide}"
            yield Case(case, partial(_attention_row, batch, keys, heads, kv_heads, width), fitted)


def _attention_row(
    batch: int, keys: int, heads: int, kv_heads: int, width: int, case: str, most: int
) -> Row:
    make = partial(_attention, batch, keys, heads, kv_heads, width)
    tried = neighbours(planned(make(), _attention_steps), most)
    read = 4.0 * batch * keys * kv_heads * width
    return Row("attention", case, make, _attention_steps, tried, read)


def _attention(batch: int, keys: int, heads: int, kv_heads: int, width: int) -> AttentionArguments:
    pools = [normal(batch, keys, kv_heads, width) for _ in "kv"]
    place = torch.full((1,), keys - 1, device=DEVICE)
    q = normal(batch, heads, width)
    return AttentionArguments(q, *pools, positions=place, scale=width**-0.5, num_sequences=batch)


def _attention_steps(a: AttentionArguments, config: Any) -> Steps:
    return attention_steps(a, SM90, config)


#: The rounding of DeepSeek's checkpoints in float8 blocks.
ROUNDING = RowRounding(group=128, zero_scale=0.0, least=0.0, least_divisor=1e-12)
#: Numbers of parts and warps that are tried for rounded latents, before those around the plan's.
ROUNDED_PARTS, ROUNDED_WARPS = (1, 2, 4, 8, 16), (4, 8)


@dataclass(frozen=True)
class LatentCall:
    """The sizes of a call of attention to latents. seen: how many latents of a sequence its query
    attends to; 0 for all."""

    batch: int
    latents: int
    heads: int
    rounded: bool = False
    seen: int = 0

    def __str__(self) -> str:
        seen = f"{self.seen} of " if self.seen else ""
        kind = "rounded latents" if self.rounded else "latents"
        return f"{self.batch} x {seen}{self.latents} {kind}, {self.heads} heads"


FITTED_LATENTS = (
    *(
        LatentCall(*size, heads)
        for size in ((1, 2048), (8, 2048), (64, 1024))
        for heads in (16, 128)
    ),
    *(LatentCall(*size, 16) for size in ((4, 4096), (16, 1024), (32, 2048))),
    *(LatentCall(batch, keys, 16, True) for batch in (1, 8, 16, 64) for keys in (1024, 2048)),
    *(LatentCall(batch, 2048, 16, True, seen=1000) for batch in (1, 16, 64)),
)
OTHER_LATENTS = (
    *(LatentCall(*size, 16) for size in ((2, 2048), (48, 1024), (128, 1024))),
    *(LatentCall(*size, 16, True) for size in ((2, 2048), (4, 1024), (32, 1024), (128, 1024))),
    *(LatentCall(*size, 128) for size in ((4, 2048), (32, 1024))),
)


def latent_cases() -> Iterator[Case]:
    for call in FITTED_LATENTS + OTHER_LATENTS:
        yield Case(str(call), partial(_latent_row, call), call in FITTED_LATENTS)


def _latent_row(call: LatentCall, case: str, most: int) -> Row:
    make = partial(_latents, call)
    plan = planned(make(), _latent_steps)
    tried = neighbours(plan, most)
    if call.rounded:
        parts = [
            replace(plan, splits=splits, num_warps=warps)
            for splits in ROUNDED_PARTS
            for warps in ROUNDED_WARPS
        ]
        tried = list(dict.fromkeys((*parts, *tried)))[:most]
    read = 2.0 * call.batch * (call.seen or call.latents) * 576
    return Row("latents", case, make, _latent_steps, tried, read)


def _latents(call: LatentCall) -> tuple[AttentionArguments, RopePart]:
    batch, keys, heads = call.batch, call.latents, call.heads
    latent = normal(batch, keys, 512).unsqueeze(2)
    place = torch.full((1,), (call.seen or keys) - 1, device=DEVICE)
    given = {"positions": place, "scale": 192**-0.5, "num_sequences": batch}
    a = AttentionArguments(normal(batch, heads, 512), latent, latent, **given)
    rounding = ROUNDING if call.rounded else None
    return a, RopePart(normal(batch, heads, 64), normal(batch, keys, 64), rounding)


def _latent_steps(a: tuple[AttentionArguments, RopePart], config: Any) -> Steps:
    return attention_steps(a[0], SM90, config, a[1])


@dataclass(frozen=True)
class Latents:
    """Sizes of a model's latent attention."""

    heads: int
    nope: int
    rope: int
    v_dim: int
    rank: int


MINICPM3, DEEPSEEK = Latents(40, 64, 32, 64, 256), Latents(16, 128, 64, 128, 512)
#: Tiles of attention to expanded keys; None stands for the plan's.
EXPANDED = (
    None,
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 64, 4, 3, one_loop=True),
    PrefillConfig(64, 64, 8, 2),
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 4),
    PrefillConfig(32, 64, 4, 2),
    PrefillConfig(32, 64, 4, 3),
    PrefillConfig(32, 32, 4, 3),
    PrefillConfig(16, 64, 4, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 64, 8, 3),
)


def mla_cases() -> Iterator[Case]:
    """Yields calls of new tokens behind cached latents, with a mask. Attention is to the latents
    themselves, or to keys that are computed from them."""
    sizes = ((2, 64), (1, 64), (8, 64), (2, 16), (2, 32), (2, 128), (2, 256))
    for name, model in (("minicpm3", MINICPM3), ("deepseek-v2-lite", DEEPSEEK)):
        for batch, queries in sizes:
            case = f"{name}, {batch} x {queries} behind 1900"
            yield Case(case, partial(_mla_row, model, batch, queries), fitted=True)


def _mla_row(model: Latents, batch: int, queries: int, case: str, most: int) -> Row:
    tried = [Absorbed(), *(Expanded(tiles) for tiles in EXPANDED)][:most]
    read = 2.0 * batch * 2048 * (model.rank + model.rope)
    return Row("mla", case, partial(_mla, model, batch, queries), _mla_steps, tried, read)


@dataclass(frozen=True)
class Absorbed:
    """Attention to the latents."""


@dataclass(frozen=True)
class Expanded:
    """Attention to expanded keys. tiles: None for the plan's."""

    tiles: PrefillConfig | None


def _mla(model: Latents, batch: int, queries: int, present: int = 1900) -> MlaPrefillArguments:
    room, width = 2048, model.nope + model.rope
    keys = torch.arange(room, device=DEVICE)
    place = present + torch.arange(queries, device=DEVICE)
    padding = torch.arange(batch, device=DEVICE) * present // (2 * batch)
    mask = (keys <= place[:, None]) & (keys >= padding[:, None, None])
    return MlaPrefillArguments(
        normal(batch * queries, model.heads, width),
        normal(batch * room, model.rank),
        normal(batch * room, model.rope),
        normal(model.heads * (model.nope + model.v_dim), model.rank, scale=model.rank**-0.5),
        v_dim=model.v_dim,
        scale=width**-0.5,
        num_sequences=batch,
        mask="none",
        attn_mask=mask[:, None].contiguous(),
    )


def _mla_steps(a: MlaPrefillArguments, way: Absorbed | Expanded | None) -> Steps:
    if way is None:
        return (yield from prefill_steps(a, SM90))
    tiles = getattr(way, "tiles", None)
    with ExitStack() as replaced:
        absorbs = isinstance(way, Absorbed)
        replaced.enter_context(patch.object(decode_lowering, "is_faster", lambda **sizes: absorbs))
        if tiles is not None:
            own = patch.object(attention_lowering, "attention_config", lambda *given: tiles)
            replaced.enter_context(own)
        return (yield from prefill_steps(a, SM90))


def expert_cases() -> Iterator[Case]:
    for name in ("qwen3-30b-a3b", "mixtral-8x7b"):
        for tokens in (1, 16, 64, 512):
            yield Case(f"{name}, {tokens}", partial(_experts, EXPERTS[name], tokens), fitted=True)


def _experts(shape: MoeShape, tokens: int, case: str, most: int) -> Row:
    layers: list[Any] = []

    def make() -> Any:
        if not layers:  # each call has its own routes over the same weights
            layers.append(make_experts(shape, device=DEVICE))
        return expert_arguments(shape, layers[0], tokens, device=DEVICE)

    def steps(a: Any, plan: MoePlan | None) -> Steps:
        return fused_moe_steps(a, SM90, plan)

    sizes = expert_arguments(shape, make_experts(shape, device="meta"), tokens, device="meta")
    plan = plan_moe(moe_problem(sizes), tokens, SM90)
    tried = [replace(plan, up=up) for up in neighbours(plan.up, most // 2)]
    tried += [replace(plan, down=down) for down in neighbours(plan.down, most // 2)]
    share = 1 - (1 - shape.num_slots / shape.num_experts) ** tokens
    read = 2.0 * share * shape.num_experts * shape.expert_elements
    return Row("experts", case, make, steps, tried, read)


#: Ranks and numbers of tokens.
FITTED_RANKS = (
    *((16, 1), (16, 64), (64, 64), (16, 1024), (64, 1024)),
    *product((8, 128), (16, 64, 256, 1024)),
    *product((16, 64), (16, 256)),
)
OTHER_RANKS = (*product((8, 16, 64), (128, 512)), *product((32,), (1, 16, 64, 256, 1024)))


def lora_cases() -> Iterator[Case]:
    for rank, tokens in FITTED_RANKS + OTHER_RANKS:
        fitted = (rank, tokens) in FITTED_RANKS
        case = f"8 adapters of rank {rank}, {tokens}"
        yield Case(case, partial(_lora_row, rank, tokens), fitted)


def _lora_row(rank: int, tokens: int, case: str, most: int) -> Row:
    make = partial(_lora, rank, tokens)
    tried = neighbours(planned(make(), _lora_steps), most)
    read = 2.0 * 4096 * (tokens + 3 * rank * min(8, tokens))
    return Row("lora", case, make, _lora_steps, tried, read)


def _lora(rank: int, tokens: int) -> ShrinkArguments:
    ends = torch.arange(9, device=DEVICE) * tokens // 8
    weights = normal(8, 3 * rank, 4096, scale=1 / 64)
    return ShrinkArguments(normal(tokens, 4096), weights, ends.to(torch.int32))


def _lora_steps(a: ShrinkArguments, config: Any) -> Steps:
    return shrink_steps(a, SM90, config)


FITTED_QKV = (
    Shape("llama3-8b", 4096, 32, 8),
    Shape("qwen3-4b", 2560, 32, 8, norm=True),
    Shape("qwen3-1.7b", 2048, 16, 8, norm=True),
)
#: Models that are not in the shipped table.
OTHER_QKV = (
    Shape("mistral-nemo", 5120, 32, 8),
    Shape("qwen3-0.6b", 1024, 16, 8, norm=True),
)


def qkv_cases() -> Iterator[Case]:
    for shape in FITTED_QKV + OTHER_QKV:
        for tokens in (1, 16, 64, 256):
            case = f"{shape.name}, {tokens}"
            yield Case(case, partial(_qkv, shape, tokens), shape in FITTED_QKV)


def _qkv(shape: Shape, tokens: int, case: str, most: int) -> Row:
    cache = paged_cache(shape, 0.05)

    def make() -> Any:
        made = fused_arguments(shape, make_layer(shape, tokens), cache)
        return replace(made, static_tokens=True)

    problem = prepare(make()).problem
    plan = qkv_plan.choose(problem, tokens, SM90, False)
    tried = [qkv_plan.fused_choice(problem, one, 0.0) for one in candidates(problem, tokens, SM90)]
    tried.append(qkv_plan.library_choice(problem, tokens, SM90, False, None))

    def steps(a: Any, choice: Any) -> Steps:
        return choice_steps(prepare(a), choice or plan, SM90)

    return Row("qkv", case, make, steps, tried, shape.weight_bytes)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "linear": linear_cases,
    "attention": attention_cases,
    "latents": latent_cases,
    "mla": mla_cases,
    "experts": expert_cases,
    "lora": lora_cases,
    "qkv": qkv_cases,
}


def chosen_cases(ops: Sequence[str], texts: Sequence[str], unfitted: bool) -> list[Case]:
    """Returns the cases of these ops whose name contains one of the texts. Without texts, it
    returns all. unfitted: whether to leave out the cases that a rule was fitted to."""
    cases = [case for op in ops for case in CASES[op]()]
    named = [case for case in cases if not texts or any(text in case.name for text in texts)]
    return [case for case in named if not (unfitted and case.fitted)]


# --- measuring ------------------------------------------------------------------------------------


def named(row: Row) -> dict[str, Any]:
    """Returns the tiles to try by their names, the plan first."""
    return {PLAN: None} | {_name(one): one for one in row.tried}


def _name(one: Any) -> str:
    if isinstance(one, MoePlan):
        return f"up {one.up}, down {one.down}"
    if isinstance(one, Absorbed | Expanded):
        return type(one).__name__.lower() + f" {getattr(one, 'tiles', None) or ''}".rstrip()
    return str(getattr(one, "config", one) or "library")


def specs_of(row: Row, a: Any, config: Any) -> tuple[KernelSpec, ...]:
    """Returns the kernels of a call with these tiles. Returns none if the op refuses the tiles."""
    try:
        return drive(row.steps(a, config), Planner(SM90), keep=True).specs
    except Exception:  # any error of the emitter says that these tiles are not of the op's space
        return ()


def compiled(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """Compiles the kernels of all rows, and returns the tiles of each row that compile. Raises
    RuntimeError for a row whose op refuses all tiles but the plan's."""
    kernels = {}
    for row in rows:
        a = row.make()
        made = {name: (one, specs_of(row, a, one)) for name, one in named(row).items()}
        if not any(specs for name, (_, specs) in made.items() if name != PLAN):
            raise RuntimeError(f"{row.op} {row.case}: the op refuses all tiles but the plan's")
        kernels[row.op, row.case] = made
    specs = {spec for tried in kernels.values() for _, made in tried.values() for spec in made}
    ordered = sorted(specs, key=lambda spec: spec.name)
    with processes() as pool:
        outcomes = dict(zip(ordered, pool.map(compile_quietly, ordered, chunksize=4), strict=True))
    print(f"{len(ordered)} kernels, {sum(map(bool, outcomes.values()))} do not compile", flush=True)
    return {
        key: {
            name: one
            for name, (one, made) in tried.items()
            if name == PLAN or (made and not any(outcomes[spec] for spec in made))
        }
        for key, tried in kernels.items()
    }


def result_of(row: Row, a: Any, config: Any) -> torch.Tensor:
    made = drive(row.steps(a, config), machine_of(torch.device("cuda", 0))).outcome.result
    assert isinstance(made, torch.Tensor)
    return made


def measured(row: Row, tried: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of results."""
    sets = [row.make() for _ in range(row.sets)]
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    wanted = result_of(row, sets[0], None).double()
    for name, config in tried.items():
        try:
            made = result_of(row, sets[0], config).double()
            if not float((made - wanted).norm() / wanted.norm()) < WRONG:
                print(f"{row.case}: {name} differs", flush=True)
                continue
            calls = [partial(result_of, row, a, config) for a in sets]
            graphs[name] = capture(calls, warmup=1)
        except (RuntimeError, ValueError, NotImplementedError, OutOfResources) as error:
            print(f"{row.case}: {name}: {str(error).splitlines()[0][:120]}", flush=True)
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    timed = partial(interleaved_us, replays=1, before_round=flushed.zero_)
    first = timed(graphs, row.sets, rounds=3)
    finalists = sorted(first, key=lambda name: first[name])[:FINALISTS]
    final = {name: graphs[name] for name in dict.fromkeys((PLAN, *finalists))}
    us = timed(final, row.sets, rounds=15)
    best = min(us, key=lambda name: us[name])
    return {
        "op": row.op,
        "case": row.case,
        "fitted": row.fitted,
        "tried": len(graphs),
        "plan": round(us[PLAN], 2),
        "best": round(us[best], 2),
        "ratio": round(us[PLAN] / us[best], 3),
        "plan_tiles": str(drive(row.steps(sets[0], None), Planner(SM90)).outcome.reason),
        "best_tiles": best,
        "us": {name: round(time, 2) for name, time in (first | us).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--cases", nargs="+", metavar="TEXT", default=[])
    parser.add_argument("--unfitted", action="store_true")
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    cases = chosen_cases(given.ops, given.cases, given.unfitted)
    rows = [case.row(given.most) for case in cases]
    if given.list:
        for row in rows:
            a = row.make()
            made = [specs_of(row, a, one) for one in named(row).values()]
            print(f"{row.op:>10} {row.case:<40} {sum(map(bool, made))} of {len(made)} tiles")
        return
    tried, results = compiled(rows), []
    gc.freeze()  # shortens the garbage collection of every capture
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for row in rows:
        if time.monotonic() - started > given.seconds:
            print("out of time", flush=True)
            break
        results.append(measured(row, tried[row.op, row.case]))
        print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
        keep("plans", results, given.out)
    for which in (True, False):
        ratios = [one["ratio"] for one in results if one["fitted"] == which]
        near, whose = sum(ratio <= 1.05 for ratio in ratios), "fitted" if which else "other"
        print(f"{near} of {len(ratios)} {whose} rows within 5 % of the best", flush=True)


if __name__ == "__main__":
    main()
