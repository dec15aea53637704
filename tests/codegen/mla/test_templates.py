"""Tests the emitted kernels of latents and of the up-projection against the ops' reference, on
Triton's interpreter. The interpreter runs exactly the source that is emitted for SM100."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import performed
from tests.interpreted import Interpreter
from tests.ops.test_contract import clone
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.mla.key_kernels import UpConfig
from tilewright.codegen.targets import SM100
from tilewright.ops.attention.positions import positions_of
from tilewright.ops.formats import fp8_block
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.cases import PrefillCase
from tilewright.ops.mla.keys import buffer_rows, gathered_keys, row_key_offsets
from tilewright.ops.mla.latents.latent_store import OP as STORE
from tilewright.ops.mla.latents.lowering import key_steps, latent_calls, latent_launch, up_launch
from tilewright.ops.mla.latents.operands import Chunk, key_buffers, latent_call, up_problem
from tilewright.ops.mla.latents.reference import finished_latents
from tilewright.ops.mla.prefill.branch import OP as BRANCH
from tilewright.ops.mla.prefill.branch import as_mla_prefill, with_all_keys
from tilewright.ops.mla.prefill.prefill import OP as PREFILL
from tilewright.ops.mla.reference import _key_latents, _up_projected, up_weight


def case_of(op, name):
    return next(case for case in op.cases if case.name == name)


@pytest.fixture
def machine():
    return Interpreter(SM100)


def make_keys(a, chunk, machine):
    return performed(key_steps(a, chunk, SM100), machine)[0]


def assert_near(actual, expected, places=2.0**-7):
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= places * expected.double().abs().clamp(min=1.0)).all()), error.max()


def expected_keys(a):
    """Returns (k, v, k_rope) from the reference's arguments after its call."""
    if a.keys == "given":
        by_position = positions_of(a) if a.rope_by_position else None
        latent, rope = finished_latents(a, by_position)
    else:
        latent, rope = gathered_keys(a)
    kv = _up_projected(a, _key_latents(a, latent, torch.float32), up_weight(a, torch.float32))
    nope = a.q.shape[2] - rope.shape[1]
    return kv[..., :nope], kv[..., nope:], rope


@pytest.mark.parametrize(
    "name", ["joint", "layers", "pair", "static", "block_table", "plain", "odd"]
)
def test_a_store_writes_what_the_reference_writes(name, machine):
    a = STORE.sample_inputs(case_of(STORE, name))
    expected = clone(a)
    STORE.reference(expected)
    machine.perform(latent_launch(latent_call(a, store=True), SM100))
    for cache in ("latent_cache", "rope_cache"):
        if getattr(a, cache) is not None:
            assert_near(getattr(a, cache), getattr(expected, cache))


PREFILLS = {
    "paged": 1, "no_cache": 1, "static_cache": 1, "key_slots": 2, "whole_table": 2,
    "fp8_weight": 2, "quantized": 2, "codes": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), PREFILLS.items(), ids=PREFILLS)
def test_keys_and_values_are_those_of_the_reference(name, count, machine):
    """Compares keys and values with the reference. `count` is the number of kernels. If the
    operands are stored as values, the library's GEMM runs, too."""
    a = PREFILL.sample_inputs(case_of(PREFILL, name))
    expected = clone(a)
    PREFILL.reference(expected)
    chunk = Chunk(buffer_rows(a), row_key_offsets(a))
    made = make_keys(a, chunk, machine)
    for cache in ("latent_cache", "rope_cache"):
        if getattr(a, cache) is not None:
            assert_near(getattr(a, cache), getattr(expected, cache))
    for got, want in zip((made.k, made.v, made.k_rope), expected_keys(expected), strict=True):
        assert_near(got, want)
    assert len(machine.kernels) == count


def test_new_tokens_that_are_no_keys_are_written_too(machine):
    """Only cached tokens are keys here, so no program that makes keys processes a new token."""
    a = PREFILL.sample_inputs(case_of(PREFILL, "paged"))
    offsets = torch.nn.functional.pad(a.cache_lengths.cumsum(0), (1, 0))
    a = replace(a, key_offsets=offsets, num_keys=int(offsets[-1]))
    expected = clone(a)
    PREFILL.reference(expected)
    made = make_keys(a, Chunk(a.num_keys, offsets), machine)
    assert_near(a.latent_cache, expected.latent_cache)
    assert_near(made.k, expected_keys(expected)[0])
    assert len(machine.kernels) == 1


@pytest.mark.parametrize("name", ["chunks", "page_chunks", "fine_scales", "large"])
def test_chunks_hold_the_keys_of_the_whole(name, machine):
    a = BRANCH.sample_inputs(case_of(BRANCH, name))
    expected = clone(a)
    BRANCH.reference(expected)
    full = with_all_keys(expected)
    wanted = expected_keys(full)
    offsets = a.buffer_row_offsets.reshape(len(a.buffer_length), -1)
    starts = a.cache_offsets.reshape(len(a.buffer_length), -1)
    for index, length in enumerate(a.buffer_length):
        if length <= 0:
            continue
        own = Chunk(length, offsets[index], starts[index], first=index == 0)
        keys = make_keys(as_mla_prefill(a), own, machine)
        for b, start in enumerate(starts[index, : a.lookup_table.shape[0]].tolist()):
            row, last = offsets[index, b : b + 2].tolist()
            first, end = full.key_offsets[b : b + 2].tolist()
            count = min(last - row, end - first - start)
            if count > 0:
                place = slice(first + start, first + start + count)
                for got, want in zip((keys.k, keys.v, keys.k_rope), wanted, strict=True):
                    assert_near(got[row : row + count], want[place])
    assert_near(a.blocks, expected.blocks)


@pytest.mark.parametrize("weight", ["dense", "quantized"])
def test_the_8_bit_core_gets_keys_of_8_bits(weight, machine):
    case = PrefillCase("narrow", weight=weight, rank=128, attention_dtype=FP8)
    a = replace(PREFILL.sample_inputs(case), k_scale=0.5, v_scale=2.0)
    expected = clone(a)
    PREFILL.reference(expected)
    made = make_keys(a, Chunk(buffer_rows(a), row_key_offsets(a)), machine)
    assert made.v.stride(0) == 1
    rows = made.v.shape[0]
    padded = made.v.as_strided((-(-rows // 16) * 16, *made.v.shape[1:]), made.v.stride())
    assert not padded[rows:].float().any()
    scales = (0.5, 2.0, 0.5)
    wanted = expected_keys(expected)
    for got, want, scale in zip((made.k, made.v, made.k_rope), wanted, scales, strict=True):
        assert got.dtype == FP8
        assert_near(got.float() * scale, want, 2.0**-3)


def test_rows_past_the_last_position_are_left_out(machine):
    case = PrefillCase(
        "limited", keys="pages", pool="static", slots="per_sequence", runs=True,
        new_tokens=(5, 5), cached_tokens=(130, 130), page_size=640, dtype=torch.float16,
    )  # fmt: skip
    a = PREFILL.sample_inputs(case)
    expected = clone(a)
    PREFILL.reference(expected)
    made = make_keys(a, Chunk(buffer_rows(a), None), machine)
    k, v, _ = expected_keys(expected)
    for got, want in ((made.k, k), (made.v, v)):
        got, want = got.unflatten(0, (2, 640)), want.unflatten(0, (2, 640))
        assert_near(got[:, :256], want[:, :256])
    assert machine.kernels == ["mla_latents", "mla_up_projection"]


@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_of_rows_past_the_limit_are_not_written(block_m):
    """The limit counts the rows of each sequence, from the first row of that sequence."""
    case = PrefillCase(
        "limited", keys="pages", pool="static", slots="per_sequence", runs=True,
        new_tokens=(5, 5), cached_tokens=(30, 30), page_size=160, dtype=torch.float16,
    )  # fmt: skip
    a = PREFILL.sample_inputs(case)
    buffers = performed(key_buffers(a, Chunk(buffer_rows(a), None)), Interpreter(SM100))
    buffers.latent.copy_(torch.randn(buffers.latent.shape))
    problem = up_problem(a, buffers, limited=True)
    out = torch.full((320, problem.rows), float("nan"), dtype=torch.float16)
    limit, config = torch.tensor([40]), UpConfig(block_m, 64, 64, 4, 2)
    made, _ = up_launch(
        a, problem, buffers, a.kv_b_weight, (out, out), SM100, rows=320, limit=limit, config=config
    )
    load_interpreted(made.spec)[made.grid](*made.given)
    wanted = buffers.latent.float() @ a.kv_b_weight.float().T
    for sequence in range(2):
        rows = slice(sequence * 160, sequence * 160 + 40)
        assert_near(out[rows], wanted[rows])
        # The tile with the last row of a sequence may also cover rows of the next sequence.
        past = slice(rows.stop - rows.stop % block_m + block_m, (sequence + 1) * 160 - block_m)
        assert out[past].isnan().all()


@pytest.mark.parametrize("config", [UpConfig(64, 32, 32, 4, 2), UpConfig(64, 64, 64, 4, 2)])
def test_the_emitted_up_projection_of_values(config):
    a = PREFILL.sample_inputs(PrefillCase("values", dtype=torch.float16))
    chunk = Chunk(buffer_rows(a), row_key_offsets(a))
    buffers = performed(key_buffers(a, chunk), Interpreter(SM100))
    buffers.latent.copy_(torch.randn(buffers.latent.shape))
    problem = up_problem(a, buffers)
    rows = buffers.latent.shape[0]
    out = torch.full((rows, problem.rows), float("nan"), dtype=torch.float16)
    weight, keys = a.kv_b_weight, (out, out)
    made, _ = up_launch(a, problem, buffers, weight, keys, SM100, rows=rows, config=config)
    load_interpreted(made.spec)[(3,)](*made.given)
    assert_near(out, buffers.latent.float() @ a.kv_b_weight.float().T)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_the_up_projection_ends_at_the_last_row(rows):
    """The last tile may have a single row."""
    a = PREFILL.sample_inputs(PrefillCase("values", dtype=torch.float16))
    buffers = performed(key_buffers(a, Chunk(buffer_rows(a), None)), Interpreter(SM100))
    buffers.latent.copy_(torch.randn(buffers.latent.shape))
    problem = up_problem(a, buffers)
    out = torch.full((len(buffers.latent), problem.rows), float("nan"), dtype=torch.float16)
    config = UpConfig(16, 64, 64, 4, 2)
    made, _ = up_launch(
        a, problem, buffers, a.kv_b_weight, (out, out), SM100, rows=rows, config=config
    )
    load_interpreted(made.spec)[(3,)](*made.given)
    assert_near(out[:rows], buffers.latent[:rows].float() @ a.kv_b_weight.float().T)
    assert out[rows:].isnan().all()


def test_zero_and_denormal_rows_have_defined_codes(machine):
    case = case_of(PREFILL, "quantized")
    a = PREFILL.sample_inputs(case)
    a.latent_cache.zero_()
    a.latent_cache[1] = 1e-40
    a.latent_cache[2] = 5000.0
    chunk = Chunk(buffer_rows(a), row_key_offsets(a), first=False)
    buffers = performed(key_buffers(a, chunk), machine)
    for call in latent_calls(a, chunk, buffers):
        machine.perform(latent_launch(call, SM100))
    latent, _ = gathered_keys(a)
    codes, scales = fp8_block.quantize_rows(latent, 128, 1200.0)
    assert torch.equal(buffers.latent.float(), codes.float())
    assert torch.equal(buffers.scale[:, : len(latent)].T, scales)
    assert float(buffers.latent.float().abs().max()) <= 448.0
