"""Tests that the examples run, and show what they are meant to show."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.interpreted import interpret
from tilewright import lower, reports
from tilewright.codegen.audit import check
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import SM100
from tilewright.compiler.rewrite import normal
from tilewright.ops import contract
from tilewright.patterns import language

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def load(name: str):
    """Loads an example as `tilewright inspect` names it, because an op can be registered only once
    in a process, from one module."""
    name_here = f"tilewright_model_{name}"
    spec = importlib.util.spec_from_file_location(name_here, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def registered_example(name: str, pattern: str):
    """Yields the module of an example. Its pattern and codes are removed afterwards."""
    codes = dict(language.CODES)
    yield load(name)
    language.unregister(pattern)
    for code in set(language.CODES) - set(codes):
        del language.CODES[code]


@pytest.fixture(scope="module")
def swiglu():
    yield from registered_example("swiglu_pattern", "swiglu")


@pytest.fixture(scope="module")
def post_norm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)  # as for `python examples/post_norm_pattern.py`
        yield from registered_example("post_norm_pattern", "add_rms_norm")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def test_the_document_shows_what_the_pattern_example_prints(swiglu, capsys):
    swiglu.main()
    document = (ROOT / "docs" / "adding-a-pattern.md").read_text("utf-8")
    *shown, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("eager ")
    assert "\n".join(shown) in document


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_op_keeps_its_tolerance(swiglu, dtype):
    op = swiglu.contract.get_op("examples::swiglu")
    (case,) = (case for case in op.cases if case.dtype is dtype)
    arguments = op.sample_inputs(case)
    wide = swiglu.SwigluArguments(*(t.double() for t in vars(arguments).values()))
    problem = op.tolerances[dtype].problem(op.call(arguments), op.reference(wide))
    assert problem is None


def test_the_op_says_what_is_wrong_with_an_argument(swiglu):
    a = swiglu.sample_inputs(swiglu.SwigluCase("bf16"))
    with pytest.raises(ValueError, match=r"swiglu: up_weight: expected shape \[N, K\]"):
        torch.ops.examples.swiglu(a.x, a.gate_weight, a.up_weight[:3])


class Variant(torch.nn.Module):
    """A gated MLP with one change."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate, self.up = (torch.nn.Linear(16, 24, bias=how == "bias") for _ in range(2))

    def forward(self, x):
        gate, up = self.gate(x), self.up(x + 1 if self.how == "another x" else x)
        if self.how == "clamped":
            gate = gate.clamp(max=7.0)
        product = torch.nn.functional.silu(gate) * up
        return (product, up) if self.how == "escapes" else product


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("as it should be", None),
        ("bias", "SWIGLU_BIAS"),
        ("another x", "ACTIVATION"),
        ("clamped", "SWIGLU_PATH"),
        ("escapes", "ESCAPES"),
    ],
)
def test_a_match_or_the_reason_why_not(swiglu, how, code):
    with torch.device("meta"):
        model, x = Variant(how).requires_grad_(False), torch.randn(3, 16)
    lowered = lower(model, (x,), patterns=["swiglu"])
    assert [m.code for m in lowered.misses] == ([] if code is None else [code])
    assert [m.op for m in lowered.matches] == (["examples::swiglu"] if code is None else [])


def test_the_fused_model_is_as_good_through_inductor(swiglu):
    model, (x,), _ = swiglu.gated_mlp(device="cpu")
    compiled = torch.compile(model, backend="tilewright")
    with torch.no_grad():
        fused, eager, exact = compiled(x), model(x), model.double()(x.double())
    assert len(swiglu.reports()[-1].matches) == 3
    errors = [swiglu.error_against(exact, result) for result in (fused, eager)]
    assert errors[0] <= errors[1] + 2.0**-8


class Sublayer(torch.nn.Module):
    """A layer with a norm of values that no projection made. `how` says what is normalised, and
    how."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, y, x):
        y, how = y * 2, self.how
        early = y if how == "read" else None
        if how != "one value":
            y = y + x if how == "out of place" else y.add_(x)
        if how == "layer":
            return torch.nn.functional.layer_norm(y, (16,), self.weight)
        if how == "bias":
            return torch.nn.functional.rms_norm(y, (16,), self.weight) + self.weight
        wide = y.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        out = self.weight * normed.float()
        return out if early is None else (out, early)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("in place", None),
        ("out of place", None),
        ("layer", "UNSUPPORTED"),
        ("one value", "POST_NORM_SUM"),
        ("read", "ESCAPES"),
    ],
)
def test_a_norm_of_any_value_is_matched_or_missed(post_norm, how, code):
    model = Sublayer(how).requires_grad_(False)
    inputs = [torch.randn(2, 3, 16) for _ in range(2)]
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    fused, eager = compiled(*inputs), model(*inputs)
    (report,) = post_norm.reports()[-1:]
    assert [m.code for m in report.misses] == ([] if code is None else [code])
    assert [m.pattern for m in report.matches] == (["add_rms_norm"] if code is None else [])
    torch.testing.assert_close(fused, eager, rtol=1e-6, atol=1e-6)


def test_a_norm_with_a_bias_is_no_anchor(post_norm):
    model, y, x = Sublayer("bias").requires_grad_(False), *torch.randn(2, 3, 16)
    lowered = lower(model, (y, x), patterns=["add_rms_norm"])
    # The bias is added to the result of a fused norm.
    assert [m.pattern for m in lowered.matches] == ["add_rms_norm"]
    assert "add" in [node.name for node in lowered.graphs[0].after.graph.nodes]


def test_the_weight_of_a_norm_is_computed_where_the_graph_has_none(post_norm):
    model, args, _ = post_norm.post_norm("cpu")
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    assert torch.dist(compiled(*args), model(*args)) < 1e-5
    (report,) = lower(model, args).graphs
    nodes = [n for n in report.after.graph.nodes if "add_rms_norm" in str(n.target)]
    weights = [n.args[2] if len(n.args) > 2 else n.kwargs["weight"] for n in nodes]
    assert [w.op for w in weights] == ["placeholder", "call_function", "call_function"]
    before, after = ([str(n.target) for n in g.graph.nodes] for g in (report.before, report.after))
    assert any("iadd" in target for target in before)
    assert not any("iadd" in target or "clone" in target for target in after)


def test_the_example_with_a_norm_runs(post_norm, capsys):
    post_norm.main()
    said = capsys.readouterr().out
    assert "* x3  add_rms_norm  y=[10, 64] eps=1e-06  [norm kernel]" in said
    assert "3 sites; error " in said


@pytest.mark.parametrize("hidden", [64, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_an_example_computes_its_op(post_norm, dtype, hidden):
    op, generator = contract.get_op("examples::add_rms_norm"), torch.Generator().manual_seed(0)
    y, s = (torch.randn(7, 2 * hidden, generator=generator).to(dtype)[:, :hidden] for _ in "ys")
    a = op.arguments(y, s, torch.rand(hidden, generator=generator).to(dtype), 1e-6)
    out = interpret(op, a).outcome.result
    wide = op.arguments(*(t.double() for t in (a.y, a.s, a.weight)), a.eps)
    problem = op.tolerances[dtype].problem(out, op.reference(wide))
    assert problem is None, problem


def test_the_kernel_of_an_example_passes_the_audit(post_norm):
    from add_rms_norm_kernel import CLAIMS

    op = contract.get_op("examples::add_rms_norm")
    (spec,) = op.plan_for(op.sample_inputs(torch.bfloat16), "sm100").specs
    assert check(compile_for(spec).audit, SM100, CLAIMS) == []


def test_an_argument_that_scratch_writes_is_refused(post_norm, monkeypatch):
    match = post_norm.AddRmsNorm.match

    def careless(self, anchor, flow):
        found = match(self, anchor, flow)
        (store,) = found.scratch
        return replace(found, arguments=found.arguments | {"y": store.whole})

    monkeypatch.setattr(post_norm.AddRmsNorm, "match", careless)
    stays = tuple(one for one in normal._PASSES if one is not normal.make_arithmetic_new)
    monkeypatch.setattr(normal, "_PASSES", stays)  # the sum stays in place
    model, args, _ = post_norm.post_norm()
    found = lower(model, args, patterns=["add_rms_norm"])
    assert found.matches == []
    assert {miss.code for miss in found.misses} == {"INTERNAL"}
    assert "argument 'y' is memory that scratch writes fill" in found.misses[0].message


def test_generate_gives_eager_s_tokens_and_says_what_is_fused(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="the example needs transformers")
    example = load("generate")
    assert example.main(["--new", "4", "--cache", "paged", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert "100 % of tokens are those of eager" in said
    assert "self_attn x2  qkv_cache" in said
    assert "page=64" in said
    monkeypatch.setattr(example, "timed", lambda model, inputs, new, **options: torch.zeros(1))
    monkeypatch.setattr(example, "reports", tuple)
    assert example.main(["--new", "4"]) == 1


def test_a_model_of_one_s_own_is_fused_whole(monkeypatch, capsys):
    example = load("own_model")
    assert example.main() == 0
    assert "blocks.*.attention x2  cache_attention" in capsys.readouterr().out
    own = ("qkv_cache", "cache_attention", "linear_activation", "linear_residual")
    lowered = lower(*example.decode(), patterns=own)  # and no pattern of another example
    found = [site.pattern for site in lowered.matches]
    assert [found.count(name) for name in own] == [2, 2, 2, 4]
    assert lowered.lost == []
    monkeypatch.setattr(example, "error", lambda made, exact: float(made is not exact))
    monkeypatch.setattr(example, "reports", lambda: [replace(reports()[-1], matches=())])
    assert example.main() == 1


def test_a_declared_operator_is_fused(monkeypatch, capsys):
    example = load("custom_op")
    assert example.main() == 0
    said = capsys.readouterr().out
    assert said.index("K_PATH") < said.index("['fused_qkv_paged']")
    torch._dynamo.reset()
    monkeypatch.setattr(example, "rotate_meaning", lambda x, cos, sin: x * cos[:, None])
    assert example.main() == 1


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("transformers", reason="the demo needs transformers")
    return load("demo")


def test_the_demo_fails_where_a_layer_is_not_fused(demo, monkeypatch, capsys):
    monkeypatch.setattr(
        demo, "lower", lambda *args, **kwargs: lower(*args, **kwargs, patterns=["cache_store"])
    )
    monkeypatch.setattr(demo, "load_model", lambda name: load_small(name))
    checks = demo.Checks()
    demo.fuse_llama("llama3-8b", checks)
    assert "FAIL 0 of 2 layers fused (llama3-8b)" in capsys.readouterr().out
    assert checks.failed


def test_the_demo_shows_the_loop_and_not_a_sentence_of_the_docstring(demo):
    source = '"""One scale\n\n    for each token.\n"""\n\ndef f(n):\n    for i in range(n):\n'
    source += "        g(i)\n\n        h(i)\n    return 1\n"
    shown = demo.emitted_loop(SimpleNamespace(source=source))
    assert shown == "    for i in range(n):\n        g(i)\n\n        h(i)"


def load_small(name: str):
    from tilewright.tools.zoo import build_zoo_model

    return build_zoo_model(name, layers=2)


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.02, False)])
def test_the_demo_compares_errors_against_float64(demo, factor, good, capsys):
    exact = torch.randn(64, dtype=torch.float64)
    checks = demo.Checks()
    demo.compare("x", (exact * factor).bfloat16(), exact.bfloat16(), exact, checks)
    assert (checks.failed == []) is good


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_the_demo_s_exit_status_is_that_of_its_checks(demo, monkeypatch, good, status, capsys):
    monkeypatch.setattr(demo, "fuse_llama", lambda name, checks: [])
    monkeypatch.setattr(demo, "audit", lambda kernels, checks: None)
    monkeypatch.setattr(demo, "run_small", lambda checks: checks.expect(good, "it works"))
    assert demo.main() == status
    said = capsys.readouterr()
    assert ("DEMO PASSED: all 1 checks" in said.out) is good
    assert ("DEMO FAILED: 1 of 1 checks" in said.err) is not good


@pytest.fixture(scope="module")
def batching():
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    return load("continuous_batching")


def test_the_example_of_continuous_batching_fuses_each_layer(batching, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(batching.ON_A_CPU, "max_requests_per_batch", 1)  # one decode graph
    assert batching.main(["--requests", "2", "--new-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("qkv_cache x2") >= 2  # in each graph
    assert "0 of 2 requests have other tokens" in said


def test_the_example_of_continuous_batching_fails_where_a_layer_is_not_fused(batching, capsys):
    class Graph:
        matches = ()

    assert not batching.show([Graph()], 2)
    assert not batching.show([], 2)
