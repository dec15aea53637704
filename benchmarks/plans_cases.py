"""Lists the calls of ops that `plans.py` measures, each with the tiles to try.

Each op has a function that yields its cases. FITTED_* lists the calls to which a rule of the
planner was fitted, and OTHER_* lists the calls that test the rules. SEEN has the calls of OTHER_*
that were slow when they first tested the rules, so that a rule was changed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import torch
from moe_layers import BY_NAME as EXPERTS
from moe_layers import MoeShape, make_experts
from moe_layers import arguments as expert_arguments
from qkv_shapes import COLD_BYTES, DEVICE, Shape, fused_arguments, make_layer, normal, paged_cache

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.mlp.plan import LONG_STEPS, SHORT_STEPS, WIDE_TILES, linear_config
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.row_rounding import RowRounding
from tilewright.codegen.targets import SM90, detect_target
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
from tilewright.ops.runtime.program import Planner, Steps, drive

#: The chip for which the calls are planned: the GPU of this machine. Without a GPU, it is an H200.
TARGET = detect_target() or SM90
MOST_SETS = 60
#: DOUBLED lists the fields of a config that are halved or doubled. COUNTED lists the fields that
#: are changed by one.
DOUBLED = ("block_n", "block_k", "block_m", "columns", "split_k", "splits", "num_warps", "prefetch")
COUNTED = ("num_stages", "programs_per_sm")

SEEN = frozenset({
    "qwen3-14b gate and up, 1", "qwen3-14b gate and up, 8", "qwen3-14b down, 64",
    "qwen3-32b down, 64", "gemma2-9b down, 32", "8 adapters of rank 8, 128",
    "8 adapters of rank 16, 128", "8 adapters of rank 32, 64",
})  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A call to measure. make: a function that makes the arguments of a call. steps: a function
    that yields the steps of a call with given tiles, or with the plan's tiles for None. tried: the
    other tiles. read: the bytes that a call reads. fitted: whether a rule of the planner was fitted
    to a measurement of this call."""

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
    """A row that is not made yet. make: a function that makes the row from its name and the largest
    number of tiles to try."""

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
        tried = (value // 2, 2 * value, *([cdiv(2 * value, 3)] if name == "splits" else []))
        return tuple(v for v in tried if 1 <= v <= most)
    if name in COUNTED:
        return tuple(v for v in (value - 1, value + 1) if v >= 1)
    return ()


def planned(a: Any, steps: Callable[[Any, Any], Steps]) -> Any:
    """Returns the plan's tiles of a call."""
    return drive(steps(a, None), Planner(TARGET)).outcome.reason


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
#: Tilings that are tried before the tiles that differ from the plan's in one or two numbers.
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
        return function(a, TARGET, config)

    a = make()
    problem = activation_problem(a) if gated else residual_problem(a)
    # If the plan uses a library's product, the other tiles are those of the kernel.
    config = linear_config(problem, tokens, TARGET)
    tilings = [linear_config(problem, tokens, TARGET, tiling) for tiling in TILINGS]
    tried = list(dict.fromkeys((config, *tilings, *neighbours(config, most))))[:most]
    return Row("linear", case, make, steps, tried, 2.0 * rows * columns * (1 + gated))


#: Pairs (number of sequences, number of keys).
FITTED_SEQUENCES = (
    *((1, 2048), (1, 16384), (16, 2048), (64, 1024), (1, 4096), (4, 2048)),
    *((8, 2048), (8, 8192), (32, 1024), (32, 4096)),
    *((1, 8192), (2, 2048), (2, 8192), (4, 16384), (24, 1024), (48, 2048)),
)


def attention_cases() -> Iterator[Case]:
    for batch, keys in FITTED_SEQUENCES:
        for heads, kv_heads, width in ((32, 8, 128), (32, 4, 128), (32, 8, 64)):
            wide = "" if width == 128 else f" of {width} columns"
            case = f"{batch} x {keys} keys, {heads} heads of {kv_heads}{wide}"
            yield Case(case, partial(_attention_row, batch, keys, heads, kv_heads, width), True)


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
    return attention_steps(a, TARGET, config)


#: The rounding of DeepSeek's checkpoints in float8 blocks.
ROUNDING = RowRounding(group=128, zero_scale=0.0, least=0.0, least_divisor=1e-12)
#: ROUNDED_PARTS and ROUNDED_WARPS are numbers of parts and of warps. For rounded latents they are
#: tried before the tiles that differ from the plan's in one or two numbers.
ROUNDED_PARTS, ROUNDED_WARPS = (1, 2, 4, 8, 16), (4, 8)


@dataclass(frozen=True)
class LatentCall:
    """The sizes of a call of attention to latents. seen: the number of latents of a sequence that
    the query of the sequence attends to; 0 for all latents."""

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
    *(LatentCall(*size, 16) for size in ((2, 2048), (48, 1024), (128, 1024))),
    *(LatentCall(*size, 16, True) for size in ((2, 2048), (4, 1024), (32, 1024), (128, 1024))),
    *(LatentCall(*size, 128) for size in ((4, 2048), (32, 1024))),
)


def latent_cases() -> Iterator[Case]:
    for call in FITTED_LATENTS:
        yield Case(str(call), partial(_latent_row, call), True)


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
    return attention_steps(a[0], TARGET, config, a[1])


@dataclass(frozen=True)
class Latents:
    """Sizes of a model's latent attention."""

    heads: int
    nope: int
    rope: int
    v_dim: int
    rank: int


MINICPM3, DEEPSEEK = Latents(40, 64, 32, 64, 256), Latents(16, 128, 64, 128, 512)
#: Tiles of attention to expanded keys. None stands for the plan's tiles.
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
    """Yields calls of new tokens after cached latents, with a mask. The queries attend to the
    latents themselves, or to keys that are computed from the latents."""
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
        return (yield from prefill_steps(a, TARGET))
    tiles = getattr(way, "tiles", None)
    with ExitStack() as replaced:
        absorbs = isinstance(way, Absorbed)
        replaced.enter_context(patch.object(decode_lowering, "is_faster", lambda **sizes: absorbs))
        if tiles is not None:
            own = patch.object(attention_lowering, "attention_config", lambda *given: tiles)
            replaced.enter_context(own)
        return (yield from prefill_steps(a, TARGET))


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
        return fused_moe_steps(a, TARGET, plan)

    sizes = expert_arguments(shape, make_experts(shape, device="meta"), tokens, device="meta")
    plan = plan_moe(moe_problem(sizes), tokens, TARGET)
    tried = [replace(plan, up=up) for up in neighbours(plan.up, most // 2)]
    tried += [replace(plan, down=down) for down in neighbours(plan.down, most // 2)]
    share = 1 - (1 - shape.num_slots / shape.num_experts) ** tokens
    read = 2.0 * share * shape.num_experts * shape.expert_elements
    return Row("experts", case, make, steps, tried, read)


#: Pairs (rank, number of tokens).
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
    return shrink_steps(a, TARGET, config)


FITTED_QKV = (
    Shape("llama3-8b", 4096, 32, 8),
    Shape("qwen3-4b", 2560, 32, 8, norm=True),
    Shape("qwen3-1.7b", 2048, 16, 8, norm=True),
)
#: Models that are not in the table of measured times that the package ships.
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
    plan = qkv_plan.choose(problem, tokens, TARGET, False)
    tried = [
        qkv_plan.fused_choice(problem, one, 0.0) for one in candidates(problem, tokens, TARGET)
    ]
    tried.append(qkv_plan.library_choice(problem, tokens, TARGET, False, None))

    def steps(a: Any, choice: Any) -> Steps:
        return choice_steps(prepare(a), choice or plan, TARGET)

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
    """Returns the cases of the ops `ops` whose names contain one of the texts `texts`. Without
    texts, returns all cases of these ops. unfitted: whether to leave out the cases to which a rule
    was fitted."""
    cases = [case for op in ops for case in CASES[op]()]
    cases = [replace(case, fitted=case.fitted or case.name in SEEN) for case in cases]
    named = [case for case in cases if not texts or any(text in case.name for text in texts)]
    return [case for case in named if not (unfitted and case.fitted)]
