"""What is fused in the zoo, kept as snapshots with the project's own plugin.

`pytest tests/tools/test_zoo_snapshots.py --tilewright-update` writes them anew; read the diff.
"""

from __future__ import annotations

import operator

import pytest
import torch

from tilewright.tools.zoo import ZOO, build_zoo_model

pytest.importorskip("transformers", reason="the zoo needs transformers")

#: Enough for each kind of layer: DeepSeek-V3's first three are dense.
LAYERS = {"deepseek-v3": 4}


#: The larger of two models of the same layers is asked for one phase.
PHASES = {"decode": 1, "prefill": 16}
LARGER = {"llama3-70b": "decode", "gpt-oss-120b": "prefill"}
CASES = [
    pytest.param(name, tokens, id=f"{name}-{phase}")
    for name in [*ZOO, "llama3-8b-paged", "llama3-8b-lora"]
    for phase, tokens in PHASES.items()
    if phase == LARGER.get(name, phase)
]


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_the_zoo_is_fused_as_it_was(tilewright, name, tokens):
    torch._dynamo.reset()
    layers = LAYERS.get(name, 2)
    model, args, kwargs = build_zoo_model(name, tokens=tokens, layers=layers)
    lowered = tilewright.check(model, args, kwargs)
    (graph,) = lowered.graphs
    assert not lowered.graph_breaks
    spelled = (operator.setitem if "-paged" in name else "index_copy_",)
    writes = [node for node in graph.before.graph.nodes if node.target in spelled]
    assert len(writes) == 2 * layers
    if tokens == 1 or name == "gpt-oss-120b":  # a prefill has the same points
        assert lowered.census.unaccounted == ()
