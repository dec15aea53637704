"""Fixtures of the tests of continuous batching. Each imports what it needs, because some releases
of transformers lack it."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch


@pytest.fixture
def heap_before():
    """Excludes objects older than the test from garbage collection, because an engine collects
    garbage twice when it stops."""
    gc.freeze()


@pytest.fixture
def enabled():
    """Returns a function from names to models that are enabled for the test."""
    from tests.compiler.engine_models import built
    from tilewright.compiler.serving import disable, enable

    models = []

    def make(name):
        models.append(built(name))
        assert enable(models[-1])
        return models[-1]

    yield make
    for model in models:
        disable(model)


@pytest.fixture
def padded(monkeypatch):
    """Pads steps as for a compiler, without compiling them."""
    from tilewright.compiler.serving import paged_attention

    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(paged_attention, "is_compiling", lambda: True)


@pytest.fixture
def two_at_once(monkeypatch):
    """Makes the engine prepare a step before the tokens of the previous step are known, as on a
    GPU."""
    from transformers.generation.continuous_batching import (
        continuous_api,
        input_outputs,
        model_runner,
        offloading_manager,
    )

    from tests.compiler.engine_steps import HostStream

    kind = input_outputs.ContinuousBatchingAsyncIOs
    monkeypatch.setattr(kind, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(input_outputs, "create_device_stream", HostStream)
    monkeypatch.setattr(torch, "Event", HostStream)
    for module in (input_outputs, model_runner, offloading_manager, continuous_api):
        monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext())


@pytest.fixture
def replayed(monkeypatch, two_at_once):
    """Makes the engine replay steps of a shape that it has run before."""
    from transformers.generation.continuous_batching import initialization, model_runner

    from tests.compiler.engine_steps import Replayed

    def capture(self, forward, stream, *arguments):
        forward(*arguments)
        self.inputs_and_outputs.set_graph(Replayed(partial(forward, *arguments)))

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(Replayed, "count", 0)
