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


@pytest.mark.parametrize("tokens", [1, 16], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", [*ZOO, "llama3-8b-paged", "llama3-8b-lora"])
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
