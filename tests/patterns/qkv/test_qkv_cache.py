"""Tests every idiom of "project, write the cache, attend": it is matched and right, or has a named
miss.

A matched idiom is compared with eager and float64. Outputs and caches are no less accurate than
eager's, and slots that nothing writes keep every bit.
"""

import pytest
import torch

from tests.agreement import cloned
from tests.found import codes_of, matches_of, misses_of, patterns_in, patterns_of
from tests.models.qkv_idioms import IDIOMS, TOLD_APART, VARIANTS, axes_of, build
from tests.patterns.running import check_against_eager
from tilewright.compiler import lower, reports

#: For idioms that no op supports: the code, and the text that the message must contain.
MISSED = {
    "custom_op": ("OPAQUE_WRITE", "tilewright_models::store"),
    "out_of_place": ("FUNCTIONAL_WRITE", "return a new tensor"),
    "masked": ("GRAPH_BREAK", "what runs between graphs is not fused"),
}

#: For idioms of which only the write is fused: the reason why the projection is not.
STORED = {"vllm_v1": "CACHE_LAYOUT"}

#: Forms of the projection that read dimensions of x. These forms are tested with rows and with
#: batches [B, S, K]. The other forms are tested with one of the two, in turn. Rows have a rotation.
#: Batches have one only if the query cannot be recognised without it.
BY_DIMENSION = ("einsum", "conv", "unsqueezed", "matmul", "bmm", "from_the_right")
ASKED_ALREADY = [
    name
    for number, form in enumerate(TOLD_APART)
    for name in (
        *(f"p_{form}_no_rope_paged", f"p_{form}_static"),
        *([] if form.startswith(BY_DIMENSION) else
          [f"p_{form}_paged" if number % 2 else f"p_{form}_no_rope_static"]),
    )
]  # fmt: skip

#: A variant that is no form of the projection is tested with one kind of write, in turn.
_IN_TURN = [axis for axis in VARIANTS if not axis.startswith("p_")]
ASKED_ALREADY += [
    f"{axis}_{'static' if number % 2 else 'paged'}" for number, axis in enumerate(_IN_TURN)
]

FUSED = [name for name in IDIOMS if name not in {*MISSED, *STORED, *ASKED_ALREADY}]

#: For each form, the kind of slots that the pattern recognises.
SLOTS = {
    "setitem_on_view": "flat",
    "scatter": "flat",
    "where": "flat",
    "page_offset": "block_table",
    "gathered_page": "block_table",
    "shifted": "block_table",
    "slots_computed": "block_table",
    "batched_rows": "block_table",
    "head_major": "block_table",
    "head_index": "block_table",
    "stacked": "block_table",
    "heads_joined": "block_table",
    "max_blocks": "block_table",
    "layer_after_page": "block_table",
    "static_cache": "per_sequence",
    "llama_reference": "slice",
    "narrow_copy": "slice",
    "fp8_stacked": "block_table",
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("name", FUSED)
def test_fused_and_no_worse_than_eager(name):
    module, args = build(name)
    check_against_eager(name, module, args, ["qkv_cache"] * axes_of(name).num_layers)
    if name in SLOTS:
        assert {site.shapes["slots"] for site in matches_of(reports()[-1], "qkv")} == {SLOTS[name]}


def test_every_form_of_slots_is_asked():
    assert SLOTS.keys() <= set(FUSED)


@pytest.mark.parametrize("name", STORED)
def test_the_write_alone_is_taken(name):
    module, args = build(name)
    check_against_eager(name, module, args, ["cache_store"])
    assert STORED[name] in codes_of(reports()[-1], "qkv")


@pytest.mark.parametrize("name", MISSED)
def test_missed_with_a_reason_and_still_right(name):
    code, phrase = MISSED[name]
    module, args = build(name)
    lowered = lower(module, args)
    assert matches_of(lowered, "qkv") == []
    found = [m for m in misses_of(lowered, "qkv", "capture") if m.code == code]
    assert found, [str(m) for m in misses_of(lowered, "qkv", "capture")]
    assert phrase in found[0].message
    if name == "masked":
        return  # on a CPU, both use eager masks with nonzero, and no fused op runs
    eager, ours = cloned(args), cloned(args)
    expected = module(*eager)
    torch._dynamo.reset()
    options = {"inner": "eager", "patterns": sorted(patterns_of("qkv"))}
    compiled = torch.compile(module, backend="tilewright", options=options)
    assert torch.equal(compiled(*ours), expected)
    for a, b in zip(ours, eager, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_mask_inside_the_graph_is_missed_by_name():
    module, args = build("masked")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        codes = codes_of(lower(module, args), "qkv")
    assert "MASKED_WRITE" in codes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["page_offset", "static_cache", "norm_rms_spelled_static"])
def test_other_dtypes(name, dtype):
    module, args = build(name, dtype=dtype)
    check_against_eager(name, module, args, ["qkv_cache"])


def test_a_token_count_that_changes_does_not_lose_the_match():
    """:func:`test_caches_of_symbolic_size` tests other kinds of writes with a symbolic number of
    tokens."""
    module, args = build("setitem_on_view")
    check_against_eager("setitem_on_view", module, args, ["qkv_cache"], dynamic=True)


def test_a_negative_slot_means_what_pytorch_means():
    """`cache[slot] = k` wraps a negative slot. A rewrite must not skip it."""
    module, args = build("setitem_on_view")
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    slots = args[4]
    slots[0] = -1
    check_against_eager("setitem_on_view", module, args, ["qkv_cache"])


@pytest.mark.parametrize("name", ["max_blocks", "static_cache", "layered_slots"])
def test_caches_of_symbolic_size(name):
    """Every size of every cache is a separate symbol. Guards check that page sizes are equal."""
    module, args = build(name)
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 2 and tensor.is_floating_point():
            for dim in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    check_against_eager(name, module, args, ["qkv_cache"], dynamic=True)


class ExplicitHeads(torch.nn.Module):
    """A tensor indexes the heads: `cache[page, heads, offset] = k` on [P, H, S, D]."""

    def __init__(self, heads):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(n, 64, generator=generator) for n in (128, 64, 64)]
        self.q, self.k, self.v = (torch.nn.Parameter(w, requires_grad=False) for w in weights)
        self.heads = heads

    def forward(self, x, page, offset, k_cache, v_cache):
        linear = torch.nn.functional.linear
        k, v = linear(x, self.k).view(-1, 2, 32), linear(x, self.v).view(-1, 2, 32)
        index = (page[:, None], self.heads()[None, :], offset[:, None])
        k_cache[index] = k
        v_cache[index] = v
        return linear(x, self.q).view(-1, 4, 32) * 2


def explicit_heads_args():
    page, offset = torch.tensor([0, 0, 1, 2]), torch.tensor([3, 4, 0, 7])
    return torch.randn(4, 64), page, offset, torch.randn(3, 2, 8, 32), torch.randn(3, 2, 8, 32)


def test_heads_in_order_are_matched():
    check_against_eager(
        "heads", ExplicitHeads(lambda: torch.arange(2)), explicit_heads_args(), ["qkv_cache"]
    )


@pytest.mark.parametrize(
    "heads",
    [
        lambda: torch.arange(1, -1, -1),
        lambda: torch.arange(-1, 1),
        lambda: torch.arange(0, 4, 2) // 2,
        lambda: torch.arange(4)[2:] - 2,
        lambda: torch.arange(2).flip(0),
    ],
)
def test_heads_in_another_order_are_left_alone(heads):
    module, args = ExplicitHeads(heads), explicit_heads_args()
    check_against_eager("heads", module, args, [])
    assert codes_of(reports()[-1], "qkv") == {"SLOT_INDEX"}


def test_writes_to_different_slots_are_taken_one_by_one():
    """Writes to different slots are fused one by one: K and V at different slots are no pair."""

    class Apart(ExplicitHeads):
        def forward(self, x, page, offset, k_cache, v_cache):
            linear = torch.nn.functional.linear
            k, v = linear(x, self.k).view(-1, 2, 32), linear(x, self.v).view(-1, 2, 32)
            k_cache[page, :, offset] = k
            v_cache[page, :, 7 - offset] = v
            return linear(x, self.q)

    args = explicit_heads_args()
    check_against_eager("apart", Apart(None), args, ["cache_store", "cache_store"])
    assert codes_of(reports()[-1], "qkv") == {"LONE_WRITE"}


class PageAndOffset(torch.nn.Module):
    """Writes `cache[page, offset] = k`. Nothing shows that the offsets are inside their page."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(n, 64, generator=generator) for n in (128, 64, 64)]
        self.q, self.k, self.v = (torch.nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x, page, offset, k_cache, v_cache):
        linear = torch.nn.functional.linear
        k_cache[page, offset] = linear(x, self.k).view(-1, 2, 32)
        v_cache[page, offset] = linear(x, self.v).view(-1, 2, 32)
        return linear(x, self.q).view(-1, 4, 32) * 2


def page_and_offset_args(offsets):
    page = torch.tensor([0, 0, -1, 1])
    caches = (torch.randn(3, 8, 2, 32), torch.randn(3, 8, 2, 32))
    return torch.randn(4, 64), page, torch.tensor(offsets), *caches


def test_offsets_count_from_their_page_s_end_as_in_pytorch():
    args = page_and_offset_args([3, -1, 0, -8])
    check_against_eager("page and offset", PageAndOffset(), args, ["qkv_cache"])


@pytest.mark.parametrize("offset", [8, -9, 100])
def test_an_offset_outside_its_page_is_refused_and_nothing_is_written(offset):
    args = page_and_offset_args([3, 1, 0, offset])
    before = cloned(args)
    compiled = torch.compile(PageAndOffset(), backend="tilewright", options={"inner": "eager"})
    with pytest.raises(ValueError, match="slot_mapping"):
        compiled(*args)
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
