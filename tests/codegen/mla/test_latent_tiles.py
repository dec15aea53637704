"""Tests that no bit written by the kernel of latents depends on its tiles, on the layout of tables,
or on which program meets a new token. The tests run on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import performed
from tests.interpreted import Interpreter
from tests.ops.test_contract import clone
from tilewright.codegen.mla.key_kernels import LatentConfig
from tilewright.codegen.mla.plan import latent_config
from tilewright.codegen.targets import SM100
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.cases import PrefillCase
from tilewright.ops.mla.keys import buffer_rows, row_key_offsets
from tilewright.ops.mla.latents.latent_store import OP as STORE
from tilewright.ops.mla.latents.lowering import latent_calls, latent_launch
from tilewright.ops.mla.latents.operands import Chunk, key_buffers, latent_call
from tilewright.ops.mla.prefill.prefill import OP as PREFILL

ONE_ROW = LatentConfig(1, 4)
TILES = [LatentConfig(2, 1), LatentConfig(4, 2, checked=4)]
KEYS = [
    PrefillCase("values", norm_dtype=torch.float32),
    PrefillCase("halves", rope_style="half", table_width="full", pool="pair", by_position=True),
    PrefillCase("de-interleaved", rope_style="interleaved_to_half", table_width="full"),
    PrefillCase("codes", weight="quantized", rank=256, magnitude=3000.0),
    PrefillCase("8-bit core", weight="quantized", rank=128, attention_dtype=FP8),
    PrefillCase("slots", keys="slots", ragged_keys=False),
]


def case_of(op, name):
    return next(case for case in op.cases if case.name == name)


def written(a, chunk, config):
    """Returns every byte that the latents' kernels of a call write with the given tiles."""
    a, made, machine = clone(a), (), Interpreter(SM100)
    if chunk is None:
        calls = [latent_call(a, store=True)]
    else:
        buffers = performed(key_buffers(a, chunk), machine)
        made = tuple(getattr(buffers, name) for name in buffers.made)
        if "latent" in buffers.made and buffers.scale is not None:
            made += (buffers.scale,)
        for buffer in made:
            buffer.view(torch.uint8).fill_(0)
        calls = latent_calls(a, chunk, buffers)
    for call in calls:
        machine.perform(latent_launch(call, SM100, config))
    tensors = [t for t in (*made, a.latent_cache, a.rope_cache) if t is not None]
    return [t.contiguous().view(torch.uint8) for t in tensors]


def assert_same(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("case", KEYS, ids=lambda case: case.name)
def test_keys_do_not_depend_on_tiles(case):
    """Tests programs that process cached rows, new rows or both. A sequence has no new token, or
    one."""
    a = PREFILL.sample_inputs(case)
    chunk = Chunk(buffer_rows(a), row_key_offsets(a))
    expected = written(a, chunk, ONE_ROW)
    for config in TILES:
        assert_same(written(a, chunk, config), expected)


@pytest.mark.parametrize("name", ["joint", "static", "block_table"])
def test_a_store_does_not_depend_on_tiles(name):
    a = STORE.sample_inputs(case_of(STORE, name))
    expected = written(a, None, ONE_ROW)
    for config in TILES:
        assert_same(written(a, None, config), expected)


def test_new_tokens_that_are_no_keys_do_not_depend_on_tiles():
    """Every other sequence's new tokens are keys."""
    a = PREFILL.sample_inputs(PrefillCase("some", new_tokens=(3, 5, 9, 1)))
    counts = a.cache_lengths + torch.tensor([3, 0, 4, 0])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    a = replace(a, key_offsets=offsets, num_keys=int(offsets[-1]))
    chunk = Chunk(a.num_keys, offsets)
    expected = written(a, chunk, ONE_ROW)
    for config in TILES:
        assert_same(written(a, chunk, config), expected)


@pytest.mark.parametrize("by_position", [False, True])
def test_a_table_of_complex_numbers_gives_what_two_tables_give(by_position):
    a = PREFILL.sample_inputs(PrefillCase("tables", by_position=by_position))
    apart = replace(a, cos=a.cos.contiguous(), sin=a.sin.contiguous())
    paired = torch.stack((apart.cos, apart.sin), dim=-1)
    together = replace(a, cos=paired[..., 0], sin=paired[..., 1])
    chunk = Chunk(buffer_rows(a), row_key_offsets(a))
    for config in (ONE_ROW, TILES[by_position]):
        assert_same(written(together, chunk, config), written(apart, chunk, config))


@pytest.mark.parametrize("name", ["paged", "static_cache", "quantized"])
def test_planned_tiles_are_of_one_warp_for_any_number_of_rows(name):
    """A program has one warp for any number of rows. So a norm always adds its numbers in one
    order, and chunks give the same bits as the whole."""
    a = PREFILL.sample_inputs(case_of(PREFILL, name))
    chunk = Chunk(buffer_rows(a), row_key_offsets(a))
    buffers = performed(key_buffers(a, chunk), Interpreter(SM100))
    for call in latent_calls(a, chunk, buffers):
        tiles = [latent_config(call.problem, 2**step) for step in range(18)]
        assert {config.num_warps for config in tiles} == {1}
        assert all(config.checked >= config.block_t for config in tiles)
