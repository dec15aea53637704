"""Tests cache windows: every layout has the same four axes, and the check whether two windows are
disjoint is exact."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tilewright.ops.cache.addressing import resolve_slots
from tilewright.ops.formats.paged_cache import CacheWindow, strided_disjoint

P, S, H, D, L = 3, 4, 2, 8, 3


def numbered(*shape):
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count).view(shape)


LAYOUTS = {
    "page_major": (
        numbered(P, S, H, D),
        CacheWindow.page_major,
        lambda base, p, s, h, d: base[p, s, h, d],
    ),
    "head_major": (
        numbered(P, H, S, D),
        CacheWindow.head_major,
        lambda base, p, s, h, d: base[p, h, s, d],
    ),
    "vllm_v": (
        numbered(2, P, S, H, D),
        lambda base: CacheWindow.vllm_pair(base)[1],
        lambda base, p, s, h, d: base[1, p, s, h, d],
    ),
    "max_k": (
        numbered(P, 2, L, S, H, D),
        lambda base: CacheWindow.max_pair(base, layer=2)[0],
        lambda base, p, s, h, d: base[p, 0, 2, s, h, d],
    ),
    "max_v": (
        numbered(P, 2, L, S, H, D),
        lambda base: CacheWindow.max_pair(base, layer=1)[1],
        lambda base, p, s, h, d: base[p, 1, 1, s, h, d],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_shows_the_layouts_own_elements(layout):
    base, window_of, element = LAYOUTS[layout]
    window = window_of(base)
    view = window.view(base)
    assert view.shape == (P, S, H, D)
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    for index in itertools.product(range(P), range(S), range(H), range(D)):
        assert view[index] == element(base, *index)
    assert window.capacity == P * S
    assert CacheWindow.from_ints(window.to_ints()) == window


def test_the_offset_is_relative_to_the_base_wherever_it_starts_in_its_storage():
    storage = numbered(5, P, S, H, D)
    base = storage[2]
    window = CacheWindow.page_major(base)
    assert window.offset == 0
    assert torch.equal(window.view(base), base)
    assert torch.equal(CacheWindow.of(storage[3], base).view(base), storage[3])


def test_nine_integers_or_an_error():
    with pytest.raises(ValueError, match=r"9 integers .*got 4"):
        CacheWindow.from_ints([1, 2, 3, 4])
    with pytest.raises(ValueError, match="view: expected 4 axes"):
        CacheWindow.of(torch.zeros(2, 3), torch.zeros(2, 3))


def addresses(shape, strides, start):
    steps = [[i * stride for i in range(size)] for size, stride in zip(shape, strides, strict=True)]
    return {start + sum(step) for step in itertools.product(*steps)}


def test_disjointness_agrees_with_counting_addresses():
    rng = random.Random(0)
    met = 0
    for _ in range(600):
        shapes, strides = [], []
        for _ in range(2):
            inner = rng.choice([1, 1, 2])
            shape = [rng.randint(1, 3) for _ in range(3)]
            step, stride = inner, []
            for size in reversed(shape):
                stride.append(step)
                step *= size + rng.randint(0, 2)
            shapes.append(shape)
            strides.append(stride[::-1])
        apart = rng.randint(-25, 25)
        meets = bool(addresses(shapes[0], strides[0], 0) & addresses(shapes[1], strides[1], apart))
        met += meets
        assert strided_disjoint(shapes[0], strides[0], shapes[1], strides[1], apart) != meets
    assert 100 < met < 500  # both answers occurred


def test_k_and_v_of_one_base_share_nothing():
    both = torch.zeros(2, P, S, H, D)
    k, v = CacheWindow.vllm_pair(both)
    assert k.provably_disjoint(v)
    assert v.provably_disjoint(k)
    blocks = torch.zeros(P, 2, L, S, H, D)
    windows = [w for layer in range(L) for w in CacheWindow.max_pair(blocks, layer)]
    for a, b in itertools.combinations(windows, 2):
        assert a.provably_disjoint(b)
    assert windows[0].overlaps(windows[0])
    assert CacheWindow.of(blocks[:, 0, 0], blocks).overlaps(
        CacheWindow.of(blocks[:2, 0, 0], blocks)
    )


def test_a_symbolic_page_count_is_still_disjoint_where_strides_prove_it():
    """[P, 2, L, S, H, D] keeps K and V apart for every P, and [2, P, S, H, D] does so, too."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())

    def dynamic(tensor, axis):
        sizes = [DimDynamic.STATIC] * tensor.dim()
        sizes[axis] = DimDynamic.DYNAMIC
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))

    blocks = dynamic(torch.zeros(P, 2, L, S, H, D), 0)
    k, v = CacheWindow.max_pair(blocks, 1)
    assert not isinstance(k.num_pages, int)
    assert k.provably_disjoint(v)
    assert k.overlaps(k)
    k, v = CacheWindow.vllm_pair(dynamic(torch.zeros(2, P, S, H, D), 1))
    assert not isinstance(v.offset, int)
    assert k.provably_disjoint(v)
    assert not mode.shape_env.guards


def resolved(slots, form, indexing):
    window = CacheWindow(P, S, H, D, S * H * D, H * D, D, 1, 0)
    page, offset, written = resolve_slots(torch.tensor(slots), window, form, indexing)
    return [(int(p), int(o)) if w else None for p, o, w in zip(page, offset, written, strict=True)]


def test_flat_slots_count_through_the_pages():
    assert resolved([0, 5, 11], "flat", "paged") == [(0, 0), (1, 1), (2, 3)]


def test_a_negative_slot_is_skipped_or_wraps_once():
    assert resolved([-1, 5, -12], "flat", "paged") == [None, (1, 1), None]
    assert resolved([-1, 5, -12], "flat", "torch") == [(2, 3), (1, 1), (0, 0)]


def test_a_slot_outside_the_cache_is_never_written():
    assert resolved([12, 3, 100], "flat", "paged") == [None, (0, 3), None]
    assert resolved([12, -13, 0], "flat", "torch") == [None, None, (0, 0)]


def test_per_sequence_slots_repeat_on_every_page():
    assert resolved([2, 0], "per_sequence", "paged") == [
        (0, 2), (0, 0), (1, 2), (1, 0), (2, 2), (2, 0)
    ]  # fmt: skip
    assert resolved([-1], "per_sequence", "torch") == [(0, 3), (1, 3), (2, 3)]
    assert resolved([-1], "per_sequence", "paged") == [None, None, None]
