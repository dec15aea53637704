"""The steps that compute keys and values from latents: one kernel that normalises and rotates
latents, and one up-projection."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.mla import key_kernels as kernels
from tilewright.codegen.mla.key_kernels import LatentConfig, UpConfig, UpProblem
from tilewright.codegen.mla.plan import latent_config, up_config, uses_library
from tilewright.codegen.targets import Target
from tilewright.ops.attention.positions import sequences
from tilewright.ops.mla.arguments import (
    FP8,
    LatentStoreArguments,
    MlaPrefillArguments,
    UpArguments,
    widths,
)
from tilewright.ops.mla.keys import row_key_offsets
from tilewright.ops.mla.latents.operands import (
    Buffers,
    Chunk,
    LatentCall,
    dequantizes,
    key_buffers,
    latent_call,
    up_problem,
)
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.products import multiply, multiply_batch
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps

# If a sequence has at least this many more keys than queries, the keys past the last position of
# the queries are not computed.
SPARE_KEYS = 256


@dataclass(frozen=True)
class Keys:
    """The keys and values that attention reads: k [rows, H, N], v [rows, H, V] and the rope columns
    [rows, R].

    joined: a tensor [rows, H, R + N + V], of which k and v are views, or None. The launch that
    rotates the queries also writes the rope columns of this tensor.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_rope: torch.Tensor
    joined: torch.Tensor | None = None


def latent_store_steps(a: LatentStoreArguments, target: Target) -> Steps:
    """Performs the steps of a call of `mla_latent_store`."""
    if a.latent.shape[0] == 0:
        return Outcome(None, "nothing", "there are no tokens")
    yield latent_launch(latent_call(a, store=True), target)
    return Outcome(None, "store", "one kernel normalises, rotates and writes the named slots")


def latent_calls(
    a: MlaPrefillArguments, chunk: Chunk, buffers: Buffers | None
) -> Iterator[LatentCall]:
    """Yields the calls that fill a chunk's buffers and, before the first chunk, write the new
    tokens. One launch does both if it can distinguish new keys from cached keys. buffers: None if
    nothing has to be filled."""
    store = chunk.first and a.slots != "none" and a.latent is not None and a.latent.shape[0] > 0
    makes = buffers is not None and bool(buffers.made)
    if a.keys == "given":
        if store or makes:
            yield latent_call(a, chunk, buffers, store=store)
        return
    by_places = a.rope_by_position and a.positions is not None
    fused = store and makes and a.slots == "ragged" and a.keys == "table" and not by_places
    if store and not fused:
        yield latent_call(a, store=True)
    if makes:
        yield latent_call(a, chunk, buffers, store=fused, gather=True)


def latent_launch(call: LatentCall, target: Target, config: LatentConfig | None = None) -> Launch:
    """Returns the launch of a call. config: tile sizes to use instead of the plan's."""
    problem, tokens, rows = call.problem, call.values["num_tokens"], call.values["num_rows"]
    if config is None:
        config = latent_config(problem, next_power_of_2(tokens + rows))
    grid = kernels.latent_grid(problem, config, tokens, rows)
    values = call.values | {"row_programs": kernels.row_programs(problem, config, rows)}
    checked = max(config.checked, config.block_t)
    records = (call.rotation, problem, config)
    return launch(kernels.LATENTS, target, (grid,), values, *records, CHECKED=checked)


def key_steps(
    a: MlaPrefillArguments,
    chunk: Chunk,
    target: Target,
    joins: Callable[[Buffers], bool] | None = None,
) -> Generator[Step, Any, tuple[Keys, str]]:
    """Writes the new tokens (before the first chunk), and computes a chunk's keys and values.
    Returns the keys and values, and a description of their up-projection.

    joins: a function that returns whether the keys are joined. If it is None, they are not.
    """
    buffers = yield from key_buffers(a, chunk)
    for call in latent_calls(a, chunk, buffers):
        yield latent_launch(call, target)
    joined = joins is not None and joins(buffers)
    return (yield from _up_project(a, chunk, buffers, target, joined=joined))


def _up_project(
    a: MlaPrefillArguments, chunk: Chunk, buffers: Buffers, target: Target, *, joined: bool
) -> Generator[Step, Any, tuple[Keys, str]]:
    """Computes keys and values from a chunk's latents. joined: whether to leave room for rope
    columns before the keys of each head."""
    rows = chunk.rows
    limit = yield from _last_position(a, chunk)
    problem = up_problem(a, buffers, limited=limit is not None, joined=joined)
    if limit is not None and kernels.up_obstacle(problem) is not None:
        problem = replace(problem, limited=False)
    weight = (yield from dequantized(a, target)) if dequantizes(a) else a.kv_b_weight
    if joined:
        keys = split_joined(a, (yield Buffer(*joined_shape(a, rows))), buffers)
    else:
        keys = Keys(*(yield from empty_keys(a, rows)), buffers.k_rope)
    if uses_library(problem, rows, target):
        yield _library_product(buffers.latent[:, : problem.rank], weight, keys)
        return keys, "library GEMM"
    given = (keys.k, keys.v)
    step, config = up_launch(a, problem, buffers, weight, given, target, rows=rows, limit=limit)
    yield step
    return keys, f"up-projection {config}"


@cache
def _up_kernel(
    problem: UpProblem, num_rows: int, target: Target, config: UpConfig | None
) -> tuple[UpConfig, Statics]:
    """Returns the tile sizes (`config`, if it is given) and the constants of the kernel, for up to
    `num_rows` rows."""
    config = config or up_config(problem, num_rows, target)
    return config, kernels.up_statics(problem, config)


def up_launch(
    a: Any,
    problem: UpProblem,
    buffers: Buffers,
    weight: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    target: Target,
    *,
    rows: int,
    limit: torch.Tensor | None = None,
    config: UpConfig | None = None,
) -> tuple[Launch, UpConfig]:
    """Returns the launch of the up-projection of `rows` latents to keys and values, and the tile
    sizes of the kernel. config: tile sizes to use instead of the plan's."""
    k, v = keys
    config, statics = _up_kernel(problem, next_power_of_2(rows), target, config)
    coded = problem.scale_block is not None
    values = {
        "latent": buffers.latent,
        "weight": weight,
        "latent_scale": buffers.scale,
        "weight_scale": a.kv_b_scale if coded else None,
        "k": k,
        "v": None if problem.joint else v,
        "limit": limit if problem.limited else None,
        "num_rows": rows,
        "run": max(rows // max(sequences(a), 1), 1),
        "scale_stride": buffers.scale_strides[0],
    }
    grid = kernels.up_grid(problem, config, rows, target.num_sms)
    scale = buffers.scale_strides[1]
    return launch(
        kernels.UP_PROJECTION, target, grid, values, statics, LATENT_SCALE_STRIDE=scale
    ), config


def _library_product(latent: torch.Tensor, weight: torch.Tensor, keys: Keys) -> Library:
    """Returns the step that multiplies latents [rows, L] by the weight and fills k and v."""
    if keys.joined is None:
        rows, heads, nope = keys.k.shape
        width = heads * (nope + keys.v.shape[2])
        return Library(multiply, (keys.k.as_strided((rows, width), (width, 1)), latent, weight))
    own = keys.joined[..., keys.k_rope.shape[1] :]
    return Library(multiply_batch, by_head(latent, weight, own))


def by_head(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x [rows, L], weight [H * W, L] and out [rows, H, W] as operands of multiply_batch.
    The library writes rows of any stride in place, if their columns are contiguous."""
    heads, width = out.shape[1:]
    weights = weight.unflatten(0, (heads, width)).mT
    return out.transpose(0, 1), x.expand(heads, *x.shape), weights


def joined_shape(a: MlaPrefillArguments, rows: int) -> tuple[tuple[int, int, int], torch.dtype]:
    """Returns the shape [rows, H, R + N + V] and the dtype of the joined tensor, which has the rope
    columns, the keys and the values."""
    return (rows, a.q.shape[1], sum(widths(a))), a.q.dtype


def split_joined(a: MlaPrefillArguments, joined: torch.Tensor, buffers: Buffers) -> Keys:
    """Returns keys and values as views of the tensor `joined`."""
    nope, rope_dim, v_dim = widths(a)
    _, k, v = joined.split((rope_dim, nope, v_dim), dim=-1)
    return Keys(k, v, buffers.k_rope, joined)


def empty_keys(
    a: MlaPrefillArguments, rows: int
) -> Generator[Step, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Allocates k [rows, H, N] and v [rows, H, V], in most cases as views of one buffer. For the
    8-bit attention kernel, k and v have separate buffers. In this case, v has stride 1 from key to
    key, and the number of keys is padded to a multiple of 16."""
    nope, _, v_dim = widths(a)
    heads = a.q.shape[1]
    if a.attention_dtype != FP8:
        kv = yield Buffer((rows, heads, nope + v_dim), a.q.dtype)
        return kv[..., :nope], kv[..., nope:]
    k = yield Buffer((rows, heads, nope), FP8)
    # The kernel sets the values past the last key to zero. Attention multiplies them by weights of
    # zero, and zero times NaN would be NaN.
    v = yield Buffer((heads, v_dim, -(-max(rows, 1) // 16) * 16), FP8)
    return k, v.permute(2, 0, 1)[:rows]


def _last_position(
    a: MlaPrefillArguments, chunk: Chunk
) -> Generator[Step, Any, torch.Tensor | None]:
    """Returns the last position of the queries, int64 [1], if keys past it need not be computed;
    else None."""
    batch, num_tokens = sequences(a), a.q.shape[0]
    if a.positions is None or a.mask == "none" or row_key_offsets(a) is not None or not batch:
        return None
    run = chunk.rows // batch
    if run % 128 or run < num_tokens // batch + SPARE_KEYS:
        return None
    positions = a.positions.to(torch.int64)
    if positions.shape[0] == 1:
        return positions
    last = yield Buffer((1,), torch.int64)
    yield Library(_greatest, (positions, last))
    return last


def _greatest(numbers: torch.Tensor, out: torch.Tensor) -> None:
    torch.amax(numbers, 0, keepdim=True, out=out)


def dequantized(a: UpArguments, target: Target) -> Generator[Step, Any, torch.Tensor]:
    """Performs the steps that dequantise kv_b_weight to q's dtype, [rows, L]."""
    weight = a.kv_b_weight
    out = yield Buffer(weight.shape, a.q.dtype)
    rows, rank = weight.shape
    block_n, block_k = kernels.DEQUANTIZE_TILE
    yield launch(
        kernels.WEIGHT_NUMBERS,
        target,
        kernels.dequantize_grid(rows, rank),
        {"weight": weight, "weight_scale": a.kv_b_scale, "out": out},
        ROWS=rows,
        RANK=rank,
        SCALE_BLOCK=(a.scale_block[0], a.scale_block[1]),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out
