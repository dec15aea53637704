"""Tests MODEL on the command line: zoo names, the user's functions, and errors in them."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
import torch

from tilewright.compiler.model_cache import cache_in
from tilewright.tools.zoo import ModelError, build_zoo_model, load_model

GOOD = """
    import torch
    from neighbour import WIDTH

    def make(batch=1):
        model = torch.nn.Linear(WIDTH, 2)
        return model, (torch.ones(batch, WIDTH),), {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)

    def write(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def test_a_function_of_a_file(folder):
    folder("mine.py", GOOD)
    loaded = load_model("mine.py:make", batch=5)
    assert loaded.model(*loaded.args, **loaded.kwargs).shape == (5, 2)


def test_a_function_of_a_module(folder):
    folder("users_module.py", GOOD)
    model, args, kwargs = load_model("users_module:make")
    assert model(*args, **kwargs).shape == (1, 2)


def test_a_file_hides_no_module_of_the_same_name(folder):
    folder("textwrap.py", GOOD)
    load_model("textwrap.py:make")
    assert sys.modules["textwrap"] is textwrap


WRONG = [
    ("llama3_8b", None, r"; the zoo has .*; did you mean 'llama3-8b'\?$"),
    ("nonsense", None, "; the zoo has llama3-8b, llama3-70b"),
    ("missing.py:make", None, "missing.py: no such file"),
    ("no_such_module:make", None, "importing no_such_module failed: ModuleNotFoundError"),
    ("mine.py:other", GOOD, "other is not there in mine.py; it defines make"),
    ("mine.py:x", "x = 1", "x is not callable in mine.py; it defines no function"),
    ("mine.py:make", "import no_such_package", r"No module named 'no_such_package' .*mine.py:1\)"),
    ("mine.py:make", "def make(:", "importing mine.py failed: SyntaxError"),
    ("mine.py:make", "def make(): return 1 / 0", r"calling .* ZeroDivisionError.*mine.py:1\)"),
    ("mine.py:make", "def make(): return 3", r"expected \(model, args, kwargs\), got int"),
    ("mine.py:make", "def make(): return print, ()", "got tuple of 2"),
    ("mine.py:make", "def make(): return 1, (), {}", "model: expected a callable, got int"),
    ("mine.py:make", "def make(): return print, 1, {}", "args: expected a tuple or list, got int"),
    ("mine.py:make", "def make(): return print, (), ()", "kwargs: expected a dict .* got tuple"),
    ("mine.py:make", "def make(): return print, (), {1: 2}", "kwargs: expected a dict"),
    (
        "mine.py:make",
        "def make(size): return 1",
        r"make\(size\) cannot be called with no arguments",
    ),
]


@pytest.mark.parametrize(("spec", "text", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_what_goes_wrong_is_said(folder, spec, text, message):
    if text is not None:
        folder("mine.py", text)
    with pytest.raises(ModelError, match=message):
        load_model(spec)


def test_an_option_the_function_does_not_take(folder):
    folder("mine.py", GOOD)
    with pytest.raises(ModelError, match=r"make\(batch=1\) cannot be called with layers=2"):
        load_model("mine.py:make", layers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens: expected at least 1, got 0"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"batch": -1}, "batch: expected at least 1, got -1"),
        ({"tokens": 99, "cache_length": 64}, "at most cache_length = 64, got 99"),
    ],
)
def test_zoo_options_are_checked(options, message):
    with pytest.raises(ModelError, match=message):
        build_zoo_model("llama3-8b", **options)


def test_without_transformers_the_zoo_says_what_to_install(monkeypatch):
    def without(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ModelError, match="pip install transformers"):
        load_model("llama3-8b")


@pytest.mark.parametrize(
    ("name", "billions", "heads"),
    [
        ("llama3-8b", 8.03, 8),
        ("llama3-70b", 70.6, 8),
        ("qwen3-8b", 8.19, 8),
        ("qwen3-30b-a3b", 30.5, 4),
        ("deepseek-v2-lite", 15.7, 1),
        ("deepseek-v3", 671.0, 1),
    ],
)
def test_zoo_models_have_their_published_size_and_no_memory(name, billions, heads):
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    model, args, kwargs = load_model(name)
    parameters = list(model.parameters())
    routers = {id(gate.weight) for gate in model.modules() if "Router" in type(gate).__name__}
    assert all(parameter.device.type == "meta" for parameter in parameters)
    # Since transformers 5.24 DeepSeek's routers are in float32.
    dtypes = {parameter.dtype for parameter in parameters if id(parameter) not in routers}
    assert dtypes == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in parameters) / 1e9 == pytest.approx(
        billions, rel=2e-3
    )
    assert args[0].shape == (1, 1)
    layer = cache_in(kwargs)[1].layers[-1]
    latent = name.startswith("deepseek")
    assert layer.keys.shape == (1, heads, 2048, 512 if latent else 128)
    assert layer.values.shape == (1, heads, 2048, 64 if latent else 128)
    assert layer.keys.device.type == "meta"


@pytest.mark.parametrize("name", ["llama3-8b-prefill", "qwen3-8b-paged"])
def test_a_zoo_model_of_two_sequences_is_one_graph(name):
    """test_zoo_snapshots.py checks the same for one sequence."""
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    torch._dynamo.reset()
    model, args, kwargs = load_model(name, layers=2, batch=2)
    assert args[0].shape == (2, 1024 if name.endswith("-prefill") else 1)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        out = torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    assert out.logits.shape == (2, args[0].shape[1], model.config.vocab_size)
    assert len(graphs) == 1
