"""Tests `cache_attention` as an engine calls it.

The keys of all layers are in the rows of one tensor, and a table gives the pages. Ragged prompts
are padded at the end, and decode steps have padding sequences. A table is as wide as the longest
sequence may become. Some entries are needed by no key, and name a page that no sequence owns:
padding (-1), which is clamped to 0, and pages before a window, which were freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
import torch.nn.functional as F

from tests.attention_cases import performed
from tests.interpreted import Interpreter
from tilewright.codegen.attention.kernels import DecodeConfig
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.attention.cache_attention import OP, AttentionArguments
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.runtime.program import Launch, Planner, drive

HEADS, KV_HEADS, WIDTH, LAYERS, COLUMNS = 4, 2, 32, 2, 32
# Plans for a few multiprocessors split the keys into fewer parts.
FEW = replace(SM90, num_sms=16)
TARGETS = pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)


@dataclass(frozen=True)
class Batch:
    """A batch.

    queries, keys: the number of each sequence's queries and keys.
    tail: the number of queries behind all others that belong to no sequence.
    window: the size of the window, or 0. Pages wholly behind it are given back.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tail: int = 0
    page: int = 16
    window: int = 0
    sinks: bool = False
    ragged: bool = True


def call(batch: Batch) -> AttentionArguments:
    """Returns a call of one layer. Everything except the layer's keys is NaN, including page 0,
    which no sequence owns."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    size, count = batch.page, len(batch.keys)
    table = torch.full((count, COLUMNS), -1, dtype=torch.int32)
    owned = iter((1 + torch.randperm(sum(-(-n // size) for n in batch.keys) + 3)).tolist())
    for b, (queries, keys) in enumerate(zip(batch.queries, batch.keys, strict=True)):
        seen_from = max(keys - queries + 1 - batch.window, 0) if batch.window else 0
        for column in range(-(-keys // size)):
            table[b, column] = next(owned) if column >= seen_from // size else 0
    blocks = int(table.max()) + 2
    rows = torch.full((blocks * LAYERS * 2 * size, KV_HEADS, WIDTH), torch.nan).bfloat16()
    pages = rows.view(blocks, LAYERS, 2, size, KV_HEADS, WIDTH)
    for b, keys in enumerate(batch.keys):
        for key in range(keys):
            if (block := int(table[b, key // size])) > 0:
                pages[block, 1, :, key % size] = normal(2, KV_HEADS, WIDTH)
    queries = torch.tensor(batch.queries)
    past = torch.tensor(batch.keys) - queries
    given = {
        "block_table": table.clamp(min=0), "key_lengths": torch.tensor(batch.keys),
        "cache_lengths": past.clamp(min=0), "scale": WIDTH**-0.5,
    }  # fmt: skip
    tokens = sum(batch.queries) + batch.tail
    if batch.ragged:
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0)))
        offsets[-1] = tokens  # the last sequence has the tail
        given["row_offsets"] = offsets.int()
    else:
        given["num_sequences"] = count
    if batch.window:
        given |= {"mask": "sliding_window", "window": batch.window}
    if batch.sinks:
        given["sinks"] = normal(HEADS)
    q = normal(tokens, HEADS, WIDTH)
    return AttentionArguments(q, pages[:, 1, 0], pages[:, 1, 1], **given)


def by_sdpa(a: AttentionArguments, batch: Batch) -> torch.Tensor:
    """Computes PyTorch's attention in float64, for each sequence separately. The tail gets
    zeros."""
    out, first = a.q.new_zeros(a.q.shape, dtype=torch.float64), 0
    for b, (queries, keys) in enumerate(zip(batch.queries, batch.keys, strict=True)):
        place = torch.arange(keys)
        page = a.block_table[b, place // batch.page].long()
        k, v = (x[page, place % batch.page].double() for x in (a.k, a.v))
        position = keys - queries + torch.arange(queries)[:, None]
        seen = place <= position
        if batch.window:
            seen = seen & (place > position - batch.window)
        k, v = (torch.where(seen.any(0)[:, None, None], x, 0.0) for x in (k, v))
        if batch.sinks:  # a key of zeros: its logit is added, and its value is zero
            seen = torch.cat((seen, torch.ones(queries, 1, dtype=torch.bool)), 1)
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        mask = torch.zeros(HEADS, *seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        if batch.sinks:
            mask[..., -1] = a.sinks.double()[:, None]
        own = a.q[first : first + queries].double().transpose(0, 1)[None]
        heads = {"attn_mask": mask[None], "scale": a.scale, "enable_gqa": True}
        if queries and keys:
            made = F.scaled_dot_product_attention(
                own, *(x.transpose(0, 1)[None] for x in (k, v)), **heads
            )
            out[first : first + queries] = made[0].transpose(0, 1)
        first += queries
    return out


PROMPTS = {
    "prompts and decodes": Batch((20, 1, 1, 40), (20, 33, 90, 50)),
    "padding sequences": Batch((17, 5, 0, 0, 0), (17, 70, 0, 0, 0), tail=42),
    "one prompt and plateau": Batch((50,) + (0,) * 13, (66,) + (0,) * 13, tail=14),
    "a token each": Batch((1,) * 12 + (0,) * 4, tuple(range(1, 13)) + (0,) * 4, tail=52),
    "window": Batch((20, 1, 1, 40, 0), (20, 80, 33, 90, 0), tail=3, window=20),
    "sinks": Batch((9, 1, 0), (25, 40, 0), tail=6, sinks=True),
    "pages of 256": Batch((3, 30, 0), (300, 30, 0), tail=31, page=256),
}
TILES = {
    "plan": None,
    "decode": DecodeConfig(8, 2, 16, 1),
    "decode, split": DecodeConfig(4, 2, 16, 3),
    "prefill": PrefillConfig(32, 32, 4, 2),
}


@pytest.mark.parametrize(
    ("tiles", "name"),
    [
        (tiles, name)
        for number, name in enumerate(PROMPTS)
        for tiles in ("plan", ("decode", "decode, split")[number % 2], "prefill")
    ],
)
def test_ragged_prompts_by_table_are_what_each_sequence_gives_alone(tiles, name):
    """Every second batch is split by the decode kernel."""
    batch = PROMPTS[name]
    a = call(batch)
    want = by_sdpa(a, batch)
    got = performed(attention_steps(a, FEW, TILES[tiles]), Interpreter(FEW)).result
    assert OP.tolerances[torch.bfloat16].problem(got, want) is None
    assert OP.tolerances[torch.bfloat16].problem(OP.reference(a), want) is None


STEPS = {
    "one": Batch((1,), (300,), page=256, ragged=False),
    "padding": Batch((1,) * 4, (257, 1, 0, 0), page=256, ragged=False),
    "eight": Batch((1,) * 8, (*range(253, 259), 0, 0), page=256, ragged=False),
    "window": Batch((1,) * 4, (600, 30, 256, 0), page=256, window=70, ragged=False),
    "sinks": Batch((1,) * 4, (300, 30, 256, 0), page=256, sinks=True, ragged=False),
}


@pytest.mark.parametrize("name", STEPS)
@TARGETS
def test_a_decode_step_by_table_is_what_each_sequence_gives_alone(name, target):
    """A padding sequence has a key length of 0, and a table of pages that no sequence owns."""
    batch = STEPS[name]
    a = call(batch)
    want, target = by_sdpa(a, batch), replace(target, num_sms=FEW.num_sms)
    for tiles in (None, DecodeConfig(1, 2, 16, 4)):
        got = performed(attention_steps(a, target, tiles), Interpreter(target)).result
        assert OP.tolerances[torch.bfloat16].problem(got, want) is None


# --- plans --------------------------------------------------------------------------------------


def planned(tokens, sequences, columns, target, heads=(32, 8, 128), ragged=True):
    """Returns the launches of a call on meta tensors, with pages of 256."""
    query_heads, kv_heads, width = heads

    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    pages = meta(1 << 16, kv_heads, width, dtype=torch.bfloat16)
    pages = pages.view(-1, 4, 2, 256, kv_heads, width)
    given = {"block_table": meta(sequences, columns), "scale": width**-0.5}
    given |= {"key_lengths": meta(sequences), "cache_lengths": meta(sequences)}
    if ragged:
        given["row_offsets"] = meta(sequences + 1)
    else:
        given["num_sequences"] = sequences
    q = meta(tokens, query_heads, width, dtype=torch.bfloat16)
    a = AttentionArguments(q, pages[:, 1, 0], pages[:, 1, 1], **given)
    program = drive(attention_steps(a, target), Planner(target), keep=True)
    return [step for step, _ in program.steps if isinstance(step, Launch)]


@TARGETS
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize(
    ("tokens", "sequences"), [(64, 64), (1024, 1024), (8192, 1024), (8192, 64), (8192, 1)]
)
def test_programs_follow_the_tokens_and_not_what_any_sequence_might_have(
    tokens, sequences, columns, target
):
    """The number of programs follows the number of tokens. An engine does not say how the tokens
    are divided, so one sequence may have all of them. There are enough programs for this case, and
    at most one incomplete tile for each sequence."""
    (first, *_) = planned(tokens, sequences, columns, target)
    # The tiles have at least 64 rows, which are 16 tokens of 4 heads that share keys.
    assert prod(first.grid) <= (tokens // 16 + sequences) * 8 * (
        1 if first.spec.kernel == "attention_decode" else 4
    )


@TARGETS
@pytest.mark.parametrize("sequences", [1, 2, 8, 32, 64, 128, 256])
def test_a_decode_step_fills_the_chip(sequences, target):
    """A few sequences are split over the multiprocessors, as far as their table reaches."""
    (first, *rest) = planned(sequences, sequences, 32, target, ragged=False)
    assert first.spec.kernel == "attention_decode"
    assert prod(first.grid) >= 0.85 * target.num_sms
    assert bool(rest) == (sequences * 8 < target.num_sms / 2)
