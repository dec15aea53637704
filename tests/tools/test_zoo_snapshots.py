"""Tests what is fused in the zoo, and in small models with quantised weights. The results are
stored as snapshots with the project's own plugin.

`pytest tests/tools/test_zoo_snapshots.py --tilewright-update` writes the snapshots again; read the
diff.
"""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch

from tests.models.coded import build_coded, outcome_by_layer
from tilewright.compiler import lower
from tilewright.tools.pytest_plugin import FOLDER, UPDATE
from tilewright.tools.zoo import ZOO, build_zoo_model

pytest.importorskip("transformers", reason="the zoo needs transformers")

#: The number of layers is large enough for each kind of layer. The first three layers of
#: DeepSeek-V3 are dense.
LAYERS = {"deepseek-v3": 4}


#: If two models have the same layers, the larger one is tested in one phase only.
PHASES = {"decode": 1, "prefill": 16}
LARGER = {"llama3-70b": "decode", "gpt-oss-120b": "prefill", "qwen3-235b-a22b": "decode"}
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


#: Unmodified models, with a layer of each format. `benchmarks/coverage.py` has all combinations.
CODED = {
    "llama": ("int8", "gptq"),
    "qwen2": ("fp8_block",),
    "phi": ("int4",),
    "gpt2": ("int8_after",),
    "gpt_neox": ("fp8_row",),
    "deepseek_v3": ("fp8_tensor", "awq"),
    "qwen3_moe": ("nvfp4",),
    "gpt_oss": ("mxfp4",),
}
CODED_FOLDER = Path(__file__).parent / FOLDER / "coded"


@pytest.mark.parametrize("name", CODED)
def test_quantised_weights_are_fused_as_they_were(name, request):
    """For each format, the snapshot has a line with the matches of its layer, and with the misses
    by their code."""
    torch._dynamo.reset()
    case = build_coded(name, CODED[name])
    with torch.no_grad():
        report = lower(case.model, case.args, case.kwargs)
    lines = [f"{form}: {said}" for form, said in outcome_by_layer(report, CODED[name]).items()]
    path = CODED_FOLDER / f"{name}.snapshot"
    if request.config.getoption(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    stored = path.read_text("utf-8").splitlines()
    assert lines == stored, f"if this change is intended: pytest {UPDATE}; " + "; ".join(
        map(str, report.misses)
    )
