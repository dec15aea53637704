"""Tests the pattern `cache_attention` on models that are written as public reference code is.

Every style is found and its mask is recognised. No result is less accurate than eager's, and
nothing hidden is read.
"""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import codes_of, matches_of, misses_of
from tests.models import cached_styles as styles
from tests.models.cached_styles import START, STYLES, build
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CAUSAL = "causal by position"
#: The mask that the pattern reads in each style. If the mask for one token differs, it is given,
#: too.
MASKS = {
    "window_of_table": "sliding_window(4) by position",
    "local_chunks": "chunked(4) by position",
    "rolled_ring": "none",
    "roll_and_copy": "none",
    "modulo_ring": "tensor",
}
ONE_TOKEN = {"added_triangle": "none"}
#: Styles whose cache write is a miss of another pattern.
MOVED = {styles.rolled_ring, styles.roll_and_copy}
#: Styles that hide slots after the slot of the last token.
HIDING = [s for s in STYLES if "ring" not in s.__name__ and s is not styles.roll_and_copy]

CASES = [
    pytest.param(style, phase, id=f"{style.__name__}-{phase}")
    for style, (_, _, phases) in STYLES.items()
    for phase in phases
]


def check(style, phase, hidden=False, **options):
    """Runs a layer and returns its report. The result must be no less accurate than eager's. With
    `hidden`, slots after the last token hold NaN, which the layer must not read."""
    layer, args = build(style, phase)
    with torch.no_grad():
        expected, exact = layer(*cloned(args)), upcast(layer)(*map(upcast, args))
        run = torch.compile(layer, backend="tilewright", options={"inner": "eager"}, **options)
        actual = run(*cloned(args))
        assert_no_worse(actual, expected, exact, f"{style.__name__}, {phase}")
        if hidden:
            dim = 1 if STYLES[style][0] == styles.BY_TOKEN else 2
            for cache in args[1:3]:
                cache.narrow(dim, START + 1, styles.LENGTH - START - 1).fill_(float("nan"))
            assert torch.equal(run(*args), actual)
    (report,) = reports()
    return report


def mask_of(style, phase):
    name = style.__name__
    own = ONE_TOKEN.get(name) if phase == "decode" else None
    return own or MASKS.get(name, CAUSAL)


@pytest.mark.parametrize(("style", "phase"), CASES)
def test_styles(style, phase):
    """Each style is fused, and a decode step reads no slot that it hides."""
    report = check(style, phase, hidden=style in HIDING and phase == "decode")
    (site,) = matches_of(report, "attention")
    assert site.shapes["heads"] == f"{styles.HEADS}/{styles.KV_HEADS}x{styles.WIDTH}"
    assert site.shapes["mask"] == mask_of(style, phase)
    assert misses_of(report, "attention") == []
    assert codes_of(report, "qkv") == ({"MOVED_CACHE"} if style in MOVED else set())


@pytest.mark.parametrize("style", [styles.table_mask, styles.added_triangle])
def test_counts_that_are_symbols(style):
    report = check(style, "prefill", dynamic=True)
    (site,) = matches_of(report, "attention")
    assert (site.shapes["queries"], site.shapes["mask"]) == ("T", CAUSAL)
