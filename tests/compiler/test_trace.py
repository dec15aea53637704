"""Tests what other tools see of a compilation: the artifacts in torch's trace, and the origin of
each node."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

from tilewright.compiler import lower

SCRIPT = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkv":
            setattr(self, name, torch.nn.Linear(64, 64, bias=False))
        self.register_buffer("k_cache", torch.zeros(32, 2, 32))
        self.register_buffer("v_cache", torch.zeros(32, 2, 32))

    def forward(self, x, slots):
        self.k_cache[slots] = self.k(x).view(-1, 2, 32)
        self.v_cache[slots] = self.v(x).view(-1, 2, 32)
        return self.q(x).relu()

step = Step().requires_grad_(False)
inputs = torch.randn(3, 64), torch.tensor([1, 2, 3])
"""
RUN = SCRIPT + 'torch.compile(step, backend="tilewright", options={"inner": "eager"})(*inputs)\n'


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Returns the payload of each artifact by name, from a run under TORCH_TRACE."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    environment["TORCH_TRACE"] = str(folder)
    subprocess.run([sys.executable, "-c", RUN], env=environment, check=True)
    (log,) = folder.glob("*.log")
    found, name = {}, None
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if name is not None:
                found.setdefault(name, []).append(line[1:])
            continue
        record = json.loads(line[line.index("{") :])
        name = record.get("artifact", {}).get("name") if "has_payload" in record else None
    return {name: "\n".join(lines) for name, lines in found.items()}


def test_torchs_own_trace_carries_the_report_and_the_rewritten_graph(artifacts):
    report = json.loads(artifacts["tilewright_report"])
    assert [match["pattern"] for match in report["matches"]] == ["qkv_cache"]
    assert "qkv_cache" in artifacts["tilewright_report_text"]
    assert "torch.ops.tilewright.fused_qkv_paged" in artifacts["tilewright_graph"]


def test_a_fused_node_says_what_it_replaces_and_where_that_was_written(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(SCRIPT)
    scope = runpy.run_path(str(path))
    torch._dynamo.reset()
    (graph,) = lower(scope["step"], scope["inputs"]).graphs
    (node,) = (n for n in graph.after.graph.nodes if "tilewright" in n.meta)
    provenance = node.meta["tilewright"]
    assert provenance["pattern"] == "qkv_cache"
    names = {n.name for n in graph.before.graph.nodes}
    assert set(provenance["absorbed"]) | set(provenance["stores"]) <= names
    assert provenance["stores"]
    assert str(path) in node.meta["stack_trace"]
