"""The steps of the MLA prefill ops: one launch that computes latents, then the up-projection, then
attention."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.mla.key_kernels import up_obstacle
from tilewright.codegen.mla.plan import uses_library
from tilewright.codegen.mla.query_kernels import TMA_BYTES
from tilewright.codegen.targets import Target, get_target
from tilewright.ops.attention.positions import sequences
from tilewright.ops.cache.read import CacheRead, Work
from tilewright.ops.checks import given
from tilewright.ops.contract import LoweringReport
from tilewright.ops.mla.arguments import (
    FP8,
    MlaBranchArguments,
    MlaDecodeArguments,
    MlaPrefillArguments,
    rotates_queries,
    widths,
)
from tilewright.ops.mla.attention.cudnn import library_wanted
from tilewright.ops.mla.attention.lowering import attention_steps, merge_steps, query_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.mla.decode.decode import work as absorbed_work
from tilewright.ops.mla.decode.lowering import absorbed_call, absorbed_steps, with_lengths
from tilewright.ops.mla.keys import buffer_rows, row_key_offsets
from tilewright.ops.mla.latents.lowering import (
    Keys,
    joined_shape,
    key_steps,
    latent_calls,
    latent_launch,
    split_joined,
)
from tilewright.ops.mla.latents.operands import Buffers, Chunk, up_problem
from tilewright.ops.mla.prefill.branch import as_mla_prefill
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import (
    Buffer,
    Library,
    NotRepeatable,
    Outcome,
    Planner,
    Step,
    Steps,
    drive,
)

NAME = "mla prefill"


def prefill_steps(a: MlaPrefillArguments, target: Target) -> Steps:
    """Performs the steps of a call of `mla_prefill`."""
    return (yield from _one_chunk(a, Chunk(buffer_rows(a), row_key_offsets(a)), target))


def branch_steps(a: MlaBranchArguments, target: Target) -> Steps:
    """Performs the steps of a call of `mla_prefill_branch_fp8`."""
    chunks, given = _branch_chunks(a), as_mla_prefill(a)
    if not chunks:
        return (yield from _no_keys(given))
    if len(chunks) == 1:
        return (yield from _one_chunk(given, chunks[0], target))
    return (yield from _several_chunks(given, chunks, target))


def plan_branch(a: MlaBranchArguments, target: str) -> LoweringReport:
    """Returns the kernels that a call will run on a target. Each kernel is listed once, even if it
    runs for several chunks."""
    planner = Planner(get_target(target))
    program = drive(branch_steps(a, planner.target), planner, keep=True)
    specs = tuple(dict.fromkeys(program.specs))
    return LoweringReport(program.outcome.name, str(program.outcome.reason), specs)


def work(a: MlaPrefillArguments) -> Work:
    """Returns the Work of a call of `mla_prefill`.

    If the call is computed like a call of `mla_decode`, returns the Work of that call. Otherwise,
    the keys of all heads are computed from every latent, written, and read again.
    """
    batch, rows = max(sequences(a), 1), buffer_rows(a)
    given_keys = a.keys == "given"
    known = ("latent", "k_rope") if given_keys else ("latent_cache", "rope_cache")
    names = tuple(name for name in known if getattr(a, name) is not None)
    absorbed = absorbed_call(a)
    if absorbed is not None:
        done = absorbed_work(absorbed)
        assert done.cache is not None
        return replace(done, cache=replace(done.cache, names=names))
    (tokens, heads, _), (nope, rope, v_dim), rank = a.q.shape, widths(a), a.kv_b_weight.shape[1]
    size = a.q.element_size()
    read = CacheRead(
        names,
        (rank + rope) * size,
        batch,
        rows // batch,
        whole=True,
        queries=tokens // batch,
        pair_flops=2 * heads * (nope + rope + v_dim),
    )
    columns = heads * (nope + v_dim)
    return Work(read, flops=2 * rows * rank * columns, scratch=2 * rows * columns * size)


def _branch_chunks(a: MlaBranchArguments) -> list[Chunk]:
    """Returns the chunks that have keys."""
    count, batch = len(a.buffer_length), a.lookup_table.shape[0]
    offsets = a.buffer_row_offsets.reshape(count, batch + 1)
    starts = a.cache_offsets.reshape(count, -1)[:, :batch]
    used = [chunk for chunk, length in enumerate(a.buffer_length) if length > 0]
    return [
        Chunk(a.buffer_length[chunk], offsets[chunk], starts[chunk], first=chunk == used[0])
        for chunk in used
    ]


def _no_keys(a: MlaPrefillArguments) -> Steps:
    """Performs attention without keys, whose result is zeros."""
    out = yield Buffer((a.q.shape[0], a.q.shape[1], a.v_dim), a.q.dtype)
    if out.numel():
        yield Library(torch.Tensor.zero_, (out,))
    return Outcome(out, "nothing", "there are no keys, so the result is zeros")


def _one_chunk(a: MlaPrefillArguments, chunk: Chunk, target: Target) -> Steps:
    """Performs attention to all keys at once. The result is [T, H, V]."""
    if a.q.numel() == 0:
        return (yield from _no_keys(a))
    if chunk.rows == 0:
        for call in latent_calls(a, chunk, None):
            yield latent_launch(call, target)
        return (yield from _no_keys(a))
    absorbed = absorbed_call(a)
    if absorbed is not None:
        return (yield from _absorbed(a, absorbed, chunk, target))
    done = yield from _attended(_aligned(a), chunk, target)
    (out,) = _tensors(done)
    return replace(done, result=out if out.dim() == 3 else out.flatten(0, 1))


def _several_chunks(a: MlaPrefillArguments, chunks: Sequence[Chunk], target: Target) -> Steps:
    """Performs attention to one chunk after another. Each chunk gives a partial result in fp32 with
    its log-sum-exp, and the partial results are merged exactly."""
    # A recorded program would keep the buffers of all chunks allocated.
    yield NotRepeatable("there are several chunks")
    if a.q.numel() == 0:
        return (yield from _no_keys(a))
    a, parts = _aligned(a), []
    for chunk in chunks:
        parts.append((yield from _attended(a, chunk, target, part=True)))
    outs, lses = zip(*map(_tensors, parts), strict=True)
    merged = yield from merge_steps(outs, lses, a.q.dtype, target)
    return Outcome(merged.result, NAME, f"{len(chunks)} chunks of {parts[0].reason}; merged")


def _tensors(done: Outcome) -> tuple[torch.Tensor, ...]:
    assert isinstance(done.result, tuple)
    return done.result


def _attended(a: MlaPrefillArguments, chunk: Chunk, target: Target, *, part: bool = False) -> Steps:
    """Performs attention to the keys of a chunk. part: whether there are several chunks. If there
    are, the result is in fp32, and the log-sum-exp is returned too."""
    joins = None if part else partial(_joins_keys, a, chunk, target)
    keys, how = yield from key_steps(a, chunk, target, joins)
    call = yield from _core_call(a, chunk, keys)
    if part:
        call = replace(call, out_dtype=torch.float32, return_lse=True)
    joined = keys.joined
    if joined is not None:
        joined = joined.unflatten(0, (call.q.shape[0], -1))
    done = yield from attention_steps(call, target, joined)
    return Outcome(done.result, NAME, f"{how}, {done.reason}")


def _absorbed(
    a: MlaPrefillArguments, call: MlaDecodeArguments, chunk: Chunk, target: Target
) -> Steps:
    """Writes the new tokens, rotates the queries, and performs `call`, the equivalent call of
    `mla_decode`."""
    for latents in latent_calls(a, chunk, None) if a.keys != "given" else ():
        yield latent_launch(latents, target)
    (tokens, heads, _), (nope, rope, v_dim) = a.q.shape, widths(a)
    q_nope, q_rope = a.q[..., :nope], a.q[..., nope:]
    if rotates_queries(a):
        # The rotation of the queries needs only the widths of the keys, so meta tensors suffice.
        sizes = ((chunk.rows, heads, nope), (chunk.rows, heads, v_dim), (chunk.rows, rope))
        keys = Keys(*(torch.empty(size, dtype=a.q.dtype, device="meta") for size in sizes))
        _, turned = yield from query_steps((yield from _core_call(a, chunk, keys)), target)
        q_rope = turned.view(tokens, heads, rope)
    call = yield from with_lengths(call, a)
    done = yield from absorbed_steps(call, q_nope, q_rope, target)
    return replace(done, name=NAME)


def _aligned(a: MlaPrefillArguments) -> MlaPrefillArguments:
    """Returns the call. If TMA cannot read the weight from its address, a copy replaces the weight.
    The same applies to latents that are passed as codes."""
    if not is_aligned(a.kv_b_weight):
        a = replace(a, kv_b_weight=a.kv_b_weight.clone())
    if a.latent_scale is not None and not is_aligned(given(a.latent)):
        a = replace(a, latent=given(a.latent).clone())
    return a


def _joins_keys(a: MlaPrefillArguments, chunk: Chunk, target: Target, buffers: Buffers) -> bool:
    """Whether a call computes keys and values as one joined tensor. The call does so if cuDNN
    computes the attention to all keys at once, if there are as many queries as keys, and if the
    queries have to be rotated first."""
    if chunk.rows != a.q.shape[0] or a.attention_dtype == FP8 or a.positions is not None:
        return False
    if _dense_batch(a, chunk) is None or not rotates_queries(a):
        return False
    if any(width * a.q.element_size() % TMA_BYTES for width in widths(a)):
        return False
    problem = up_problem(a, buffers, joined=True)
    if not uses_library(problem, chunk.rows, target) and up_obstacle(problem) is not None:
        return False
    shape, dtype = joined_shape(a, chunk.rows)
    joined = torch.empty(shape, dtype=dtype, device="meta")  # only its strides are used
    return library_wanted(_call(a, chunk, split_joined(a, joined, buffers)).in_parts(), target)


def _core_call(
    a: MlaPrefillArguments, chunk: Chunk, keys: Keys
) -> Generator[Step, Any, AttentionCall]:
    """Returns the call of attention for one chunk. Allocates and fills the tensors that it
    needs."""
    call, made = _call(a, chunk, keys), {}
    if _dense_batch(a, chunk) is None:
        rows = {"query_offsets": a.q.shape[0], "key_offsets": chunk.rows}
        for name in (name for name in rows if getattr(call, name) is None):
            made[name] = yield Buffer((sequences(a) + 1,), torch.int32)
            yield Library(partial(_multiples, rows[name] // sequences(a)), (made[name],))
    if a.attention_dtype == FP8:
        scales = {"q_scale": a.q_scale, "k_scale": a.k_scale, "v_scale": a.v_scale}
        for name, value in scales.items():
            if value != 1.0:  # without a scale, the kernel does not multiply
                made[name] = yield Buffer((), torch.float32)
                yield Library(partial(_fill, value), (made[name],))
    return replace(call, **made)


def _multiples(step: int, out: torch.Tensor) -> None:
    torch.arange(0, out.shape[0] * step, step, out=out) if step else out.zero_()


def _fill(value: float, out: torch.Tensor) -> None:
    out.fill_(value)


def _call(a: MlaPrefillArguments, chunk: Chunk, keys: Keys) -> AttentionCall:
    """Returns the call of attention for one chunk. It is dense if all sequences have the same
    number of queries and keys. If not, it has the given offsets."""
    batch, one, positions = _dense_batch(a, chunk), _one_run(a, chunk), a.positions
    parts = (a.q, keys.k, keys.v, keys.k_rope)
    if batch is not None:
        parts = tuple(part.unflatten(0, (batch, -1)) for part in parts)
    if positions is not None:
        of_all = positions.shape[0] == a.q.shape[0]  # else they are the same for every sequence
        if batch is None and not of_all:
            positions = positions.repeat(sequences(a))
        elif batch is not None and batch > 1 and of_all:
            positions = positions.unflatten(0, (batch, -1))
    q, k, v, k_rope = parts
    return AttentionCall(
        q,
        None,
        k,
        v,
        k_rope,
        scale=a.scale,
        query_offsets=a.row_offsets if batch is None else None,
        key_offsets=chunk.offsets if batch is None else None,
        query_starts=None if one else a.cache_lengths,
        key_starts=None if one else chunk.starts,
        key_lengths=a.key_lengths,
        query_positions=positions,
        mask=a.mask,
        window=a.window,
        attn_mask=a.attn_mask,
        mask_blocks=a.mask_blocks,
        out_dtype=a.q.dtype,
        tables=a.rope if rotates_queries(a) else None,
    )


def _dense_batch(a: MlaPrefillArguments, chunk: Chunk) -> Any:
    """Returns the number of sequences if all of them have the same number of queries and keys; None
    if they are ragged."""
    if _one_run(a, chunk):
        return 1
    return sequences(a) if a.row_offsets is None and chunk.offsets is None else None


def _one_run(a: MlaPrefillArguments, chunk: Chunk) -> bool:
    """Whether a call has one sequence whose keys are exactly its new tokens. The lengths then
    follow from shapes, and nothing has to be read from the device."""
    if a.row_offsets is None or a.row_offsets.shape[0] != 2 or a.attention_dtype == FP8:
        return False
    written = a.slots == "ragged" and a.keys == "table" and a.positions is None
    return written and a.key_lengths is None and chunk.rows == a.q.shape[0]
