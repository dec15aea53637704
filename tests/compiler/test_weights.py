"""Tests which misses are lost and which are advice, that one site has one miss, and writes to
inputs of the graph."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.compiler.running import build, compiled, copies
from tests.found import matches_of, misses_of, patterns_in
from tilewright.compiler import StrictError, lower, reports
from tilewright.compiler.options import Options
from tilewright.compiler.safety.subclasses import described
from tilewright.patterns import codes, language
from tilewright.patterns.language import CODES, WEIGHTS, Miss, Stage, reject

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


#: The patterns of tests that look at a whole report: the log, the printed text and written files.
OWN = ["tests_doubts"]


@dataclass(frozen=True)
class Doubts:
    """A pattern that misses every linear. The misses have a weight of their own (lost or
    advice)."""

    weight: str | None
    name: str = "tests_doubts"
    op: str = "fused_qkv_paged"

    def anchors(self, flow):
        return [value for value in flow.values if value.op == "aten.linear"]

    def match(self, anchor, flow):
        reject("HEADS", Stage.GUARDS, "a doubt", anchor, weight=self.weight)


@pytest.fixture
def doubts():
    known = []

    def register(weight):
        known.append(language.register(Doubts(weight)))

    yield register
    for pattern in known:
        language.unregister(pattern.name)


def test_a_weight_goes_by_code_unless_the_miss_says():
    assert Miss("p", "HEADS", Stage.GUARDS, "m").weight == "lost"
    assert Miss("p", "NO_GAIN", Stage.GUARDS, "m").weight == "advice"
    assert Miss("p", "NO_GAIN", Stage.GUARDS, "m", weight="lost").is_lost
    with pytest.raises(ValueError, match=r"expected one of .*'lost', 'advice'.*got 'some'"):
        Miss("p", "HEADS", Stage.GUARDS, "m", weight="some")
    assert set(WEIGHTS) <= set(CODES)


def test_a_code_of_ones_own_has_a_weight(monkeypatch):
    for name, known in {"CODES": dict(CODES), "WEIGHTS": dict(WEIGHTS)}.items():
        monkeypatch.setattr(codes, name, known)
        monkeypatch.setattr(language, name, known)
    language.register_code("TESTS_DOUBT", "a doubt", weight="advice")
    language.register_code("TESTS_DOUBT", "a doubt", weight="advice")
    assert Miss("p", "TESTS_DOUBT", Stage.GUARDS, "m").weight == "advice"
    with pytest.raises(ValueError, match="is already 'advice', got 'lost'"):
        language.register_code("TESTS_DOUBT", "a doubt", weight="lost")
    with pytest.raises(ValueError, match="weight: expected"):
        language.register_code("TESTS_OTHER", "a doubt", weight="heavy")


@pytest.mark.parametrize("weight", ["lost", "advice", None])
def test_strict_and_warnings_go_by_weight(weight, doubts, caplog):
    doubts(weight)
    model, x = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4)
    lost = weight != "advice"
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model, patterns=OWN)(x)
    assert [r.getMessage()[:28] for r in caplog.records] == ["nothing was fused (HEADS x1)"] * lost
    (miss,) = misses_of(reports()[-1], "tests_doubts")
    assert miss.weight == (weight or "lost")
    lowered = lower(model, (x,), patterns=OWN)
    assert [m.weight for m in misses_of(lowered, "tests_doubts")] == [miss.weight]
    assert bool(lowered.lost) == lost
    data = json.loads(lowered.to_json())
    assert [m["weight"] for m in data["misses"]] == [miss.weight]
    assert str(lowered).startswith("missed" if lost else "advice")
    torch._dynamo.reset()
    if lost:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a doubt"):
            compiled(model, strict=True, patterns=OWN)(x)
    else:
        compiled(model, strict=True, patterns=OWN)(x)


def test_strict_takes_names_of_patterns(doubts):
    doubts(None)
    model, x = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4)
    lower(model, (x,), strict=["qkv_cache", "capture"])
    lower(model, (x,), strict=())
    with pytest.raises(StrictError, match="a doubt"):
        lower(model, (x,), strict=["tests_doubts"])
    with pytest.raises(ValueError, match=r"strict.*names among .*'moe'.*got \['mo'\]"):
        Options(strict=["mo"])
    with pytest.raises(ValueError, match="strict"):
        Options(strict="moe")


# --- one site, one miss ---------------------------------------------------------------------------


class Mixture(nn.Module):
    """A mixture for T tokens. The weights of each token's experts are gathered."""

    def __init__(self, top_k, hidden=16, inner=24, experts=4):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.norm = nn.RMSNorm(hidden)
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(experts, *shape) * 0.1))

    def forward(self, x):
        rows = self.norm(x)
        scores, ids = self.router(rows).softmax(-1).topk(self.top_k, -1)
        gate = F.silu(torch.einsum("th,tsih->tsi", rows, self.gate[ids]))
        up = torch.einsum("th,tsih->tsi", rows, self.up[ids])
        out = torch.einsum("tsi,tshi->tsh", self.between(gate * up), self.down[ids])
        return x + torch.einsum("tsh,ts->th", out, scores)

    def between(self, inner):
        return inner


class Bent(Mixture):
    """The mixture with an activation that the op does not know, as a near miss."""

    def between(self, inner):
        return inner.cumsum(-1)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_way_from_one_mixture_to_the_next_is_no_mixture(top_k):
    model = nn.Sequential(*(Mixture(top_k) for _ in range(3))).bfloat16().requires_grad_(False)
    x = torch.randn(3, 16).bfloat16()
    lowered = lower(model, (x,), strict=True)
    assert patterns_in(lowered, "fused_moe") == ["moe"] * 3
    assert misses_of(lowered, "fused_moe") == []
    bent = nn.Sequential(Mixture(2), Bent(2)).bfloat16().requires_grad_(False)
    lowered = lower(bent, (x,))
    missed = misses_of(lowered, "fused_moe")
    assert [m.code for m in missed] == ["EXPERT_ACTIVATION"]
    assert "aten.cumsum" in missed[0].message


# --- what the graph is given ----------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.step = step

    def forward(self, x, *rest):
        return self.step(*(layer(x).view(-1, 2, 8) for layer in (self.q, self.k, self.v)), *rest)


def arguments():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    return x, torch.zeros(9, 2, 8), torch.zeros(9, 2, 8), torch.tensor([2, 7, 0, 5])


def broken(q, k, v, k_cache, v_cache, slots):
    torch._dynamo.graph_break()
    k_cache[slots] = k * 2
    v_cache[slots] = v
    return q


def whole(q, k, v, k_cache, v_cache, slots):
    k_cache[slots] = k
    v_cache[slots] = v
    return q


def test_a_write_behind_a_break_is_fused_and_told():
    model = Attention(broken).requires_grad_(False)
    lowered = lower(model, arguments())
    assert patterns_in(lowered, "qkv") == ["cache_store"]
    assert [(m.code, m.weight) for m in misses_of(lowered, "qkv", "capture")] == [
        ("EARLIER_GRAPH", "advice"),
        ("GRAPH_BREAK", "lost"),
    ]
    assert "break" in misses_of(lowered, "qkv", "capture")[0].hint
    torch._dynamo.reset()
    eager, ours = copies(arguments()), copies(arguments())
    expected, actual = model(*eager), compiled(model)(*ours)
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()
    assert misses_of(lower(Attention(whole).requires_grad_(False), arguments()), "qkv") == []


def copy_pages(k_cache, v_cache, to, of):
    k_cache[to] = k_cache[of]
    v_cache[to] = v_cache[of]


def fill(k_cache, v_cache, to, of):
    k_cache.copy_(v_cache)
    v_cache[to] = 0.0


@pytest.mark.parametrize("buffers", [copy_pages, fill])
def test_other_writes_into_buffers_are_not_spoken_of(buffers):
    caches = (torch.zeros(9, 4, 2, 8) for _ in range(2))
    lowered = lower(buffers, (*caches, torch.arange(2), torch.arange(2, 4)))
    assert (matches_of(lowered, "qkv"), misses_of(lowered, "qkv")) == ([], [])


def test_a_store_of_given_heads_passes_strict_as_ever():
    def store(k, v, k_cache, v_cache, slots):
        k_cache[slots] = k
        v_cache[slots] = v

    _, k_cache, v_cache, slots = arguments()
    heads = (torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    lowered = lower(store, (*heads, k_cache, v_cache, slots), strict=True)
    assert patterns_in(lowered, "qkv") == ["cache_store"]


# --- subclasses, sizes from data, growing ---------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "what", "why", "hint"),
    [
        ("torchao.quantization", "torchao's quantised weight", "another Int8Tensor", "dequantize"),
        ("optimum.quanto.tensor", "quanto's quantised weight", "does not read", "dequantize()"),
        ("torch.distributed.tensor", "a tensor that is spread over ranks", "", "to_local()"),
        ("torchaox", "a class that wraps other tensors", "", "plain tensors inside"),
    ],
)
def test_what_to_do_about_a_subclass_goes_by_its_library(package, what, why, hint, monkeypatch):
    class Int8Tensor(TwoTensor):
        """Stands for a quantised weight of a library."""

    monkeypatch.setattr(Int8Tensor, "__module__", package)
    said = described(Int8Tensor(torch.zeros(2), torch.zeros(2)))
    is_said = f"a Int8Tensor, {what} (" if why else f"a Int8Tensor, {what}"
    assert said[0].startswith(is_said) if why else said[0] == is_said
    assert why in said[0]
    assert hint in said[1]


@pytest.mark.parametrize("wrapped", ["cache", "weight"])
def test_a_tensor_subclass_is_told(wrapped):
    model, args = Attention(whole).requires_grad_(False), list(arguments())
    if wrapped == "cache":
        args[1:3] = (TwoTensor(torch.zeros(9, 2, 8), torch.zeros(9, 2, 8)) for _ in range(2))
    else:
        weight = model.k.weight
        model.k.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()), False)
    lowered = lower(model, args)
    assert not matches_of(lowered, "qkv_cache")
    miss = next(m for m in misses_of(lowered, "qkv") if m.code == "SUBCLASS")
    assert "is a TwoTensor" in miss.message
    assert miss.hint
    assert not any(m.code == "INTERNAL" for m in misses_of(lowered, "qkv"))


def test_a_dtensor_cache_is_told(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))

        def wrap(tensor):
            return DTensor.from_local(tensor, mesh, [Replicate()])

        def step(q, k, v, k_cache, v_cache, slots):
            k_cache[:4].copy_(wrap(k))
            v_cache[:4].copy_(wrap(v))
            return q

        x, k_cache, v_cache, slots = arguments()
        model = Attention(step).requires_grad_(False)
        lowered = lower(model, (x, wrap(k_cache), wrap(v_cache), slots))
    finally:
        torch.distributed.destroy_process_group()
    assert matches_of(lowered, "qkv") == []
    assert "SUBCLASS" in [m.code for m in misses_of(lowered, "qkv")]
    assert "INTERNAL" not in [m.code for m in misses_of(lowered, "qkv")]


def test_a_growing_cache_of_two_dimensions_is_told():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Linear(8, 8, bias=False)

        def forward(self, x, past):
            past = torch.cat([past, self.k(x)])
            return (x @ past.t()).softmax(-1), past

    model = Grows().requires_grad_(False)
    (miss,) = misses_of(lower(model, (torch.ones(1, 8), torch.ones(5, 8))), "qkv")
    assert miss.code == "GROWING_CACHE"

    def features(x, y):
        return torch.cat([y, F.linear(x, model.k.weight)], -1)

    assert misses_of(lower(features, (torch.ones(5, 8), torch.ones(5, 8))), "qkv") == []


def test_the_schema_knows_the_weight():
    from importlib.resources import files

    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra 'dev'")
    schema = json.loads(files("tilewright.tools").joinpath("schemas/inspect.json").read_text())
    item = schema["properties"]["misses"]["items"]
    model, args = build("out_of_place")
    (miss,) = json.loads(lower(model, args, patterns=["cache_absent"]).to_json())["misses"]
    jsonschema.validate(miss, item)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**miss, "weight": "heavy"}, item)
