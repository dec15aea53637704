"""Tests continuous batching with compiled steps: which graphs are compiled and when, what is fused
in them, and that every call has a kernel."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from transformers.generation.continuous_batching import continuous_api

from tests.compiler.engine_models import (
    ENGINE,
    LENGTHS,
    ONE_LAYER,
    SMALL,
    WIDE,
    built,
    generated,
    generated_by,
    greedy,
    made,
    plain,
    prompts,
)
from tests.compiler.engine_steps import FOUR, Replayed, batch, tokens
from tilewright.codegen.build import compile_for
from tilewright.compiler import backend, reports
from tilewright.compiler.serving import BatchingConfig, disable, enable
from tilewright.ops import calls

pytestmark = pytest.mark.usefixtures("heap_before")


def test_a_compiled_model_in_steps_that_are_not_padded_sees_all_pages():
    """The engine pads only steps that it compiles itself, and does not know of this compiler. The
    first request is the last one to end."""
    model, lengths = made("Llama", ONE_LAYER), (100, 20, 3, 9)
    want = generated_by(model, lengths)
    assert enable(model)
    model.compile(backend="eager", dynamic=True)
    assert batch(model, plain(), lengths=lengths) == want
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def compiled():
    """Returns a function from models to the graphs and tokens of their compiled engine.

    A graph is described by how often it calls each op, by how many plain writes change the engine's
    memory, and by the codes of its misses.
    """
    kept: dict[str, tuple[list[Any], list[list[int]]]] = {}

    def compile_once(name: str) -> tuple[list[Any], list[list[int]]]:
        if name not in kept:
            kept[name] = _compiled(name)
        return kept[name]

    yield compile_once
    torch._dynamo.reset()


def _writes_memory(node: torch.fx.Node) -> bool:
    if not any(name in str(node.target) for name in ("setitem", "index_put", "index_copy")):
        return False
    base = node.args[0]
    while base.op != "placeholder" and base.args:
        base = base.args[0]
    return base.name.endswith("pool_rows")


def _compiled(name: str) -> tuple[list[Any], list[list[int]]]:
    torch._dynamo.reset()
    graphs = []

    def keep(report: Any) -> None:
        nodes = list(report.after.graph.nodes)
        ops = Counter(str(n.target).removeprefix("tilewright.").partition(".")[0] for n in nodes)
        graphs.append((ops, sum(map(_writes_memory, nodes)), {m.code for m in report.misses}))

    model = built(name)
    assert enable(model)
    config = BatchingConfig(**SMALL, options={"inner": "eager"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_trace", keep)
        found = batch(model, config, lengths=FOUR)
    disable(model)
    return graphs, found


#: Engines with several graphs: settings, whether decode steps are dynamic, whether steps are
#: replayed as by CUDA graphs, and the fewest graphs. Each pair of the two choices occurs.
STEPS_OF_64 = {"max_batch_tokens": 64, "max_requests_per_batch": 64, "q_padding_interval_size": 16}

WARMED = {
    "numbers of tokens, static": (STEPS_OF_64, False, False, 9),
    "numbers of keys alone": ({}, None, True, 4),
    "numbers of keys alone, static": ({}, False, True, 5),
    "more tokens than requests": (STEPS_OF_64 | {"max_requests_per_batch": 40}, None, False, 4),
}


def failed_frames() -> int:
    """Returns how many frames Dynamo has given up on in this process."""
    frames = torch._dynamo.utils.counters["frames"]
    return frames["total"] - frames["ok"]


@pytest.mark.parametrize("engine", WARMED)
def test_nothing_is_compiled_after_the_warm_up(fresh_dynamo, request, engine):
    """Nothing is compiled after the warm-up, although static decode steps need a graph for each
    power of two, which are more graphs than Dynamo keeps by default."""
    settings, dynamic, replays, fewest = WARMED[engine]
    if replays:
        request.getfixturevalue("replayed")
    config = BatchingConfig(**SMALL | {"num_blocks": 200} | settings, options={"inner": "eager"})
    config.decode_compile_config.dynamic = dynamic
    failed = failed_frames()
    model = made("Llama", ONE_LAYER)
    assert enable(model)
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=config
    ) as manager:
        warm = len(reports())
        found = []
        for lengths in ((5,), LENGTHS, (3,) * 20):
            names = manager.add_requests(prompts(lengths), max_new_tokens=4)
            left = set(names)
            while left:
                result = manager.get_result(timeout=60)
                assert result.error is None
                left -= {result.request_id}
            found.append(len(reports()))
    disable(model)
    assert found == [warm] * 3
    assert warm >= fewest
    assert (Replayed.count > 10) == replays
    assert failed_frames() == failed


@pytest.mark.skipif(
    "use_inference_mode"
    not in inspect.signature(
        continuous_api.ContinuousBatchingManager._run_generation_loop
    ).parameters,
    reason="before transformers 5.24 the engine's thread was never in inference mode",
)
@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_in_inference_mode_the_graphs_of_the_warm_up_are_used(fresh_dynamo, enabled, name):
    config = BatchingConfig(**SMALL, options={"inner": "eager"})
    with (
        torch.inference_mode(),
        enabled(name).continuous_batching_context_manager(
            generation_config=greedy(), continuous_batching_config=config
        ) as manager,
    ):
        warm = len(reports())
        names, found = manager.add_requests(prompts(FOUR)), {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            found[result.request_id] = result
    assert tokens({one: found[one] for one in names}) == generated(name, FOUR)
    assert len(reports()) == warm > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "DeepseekV3"])
def test_every_call_of_a_step_has_a_kernel(fresh_dynamo, replayed, monkeypatch, name):
    """A CUDA graph cannot record the reference. The kernels that merge parts are compiled too.
    Llama's layers are alike, so it has one."""
    found: dict[str, set[str]] = {}
    merges = set()
    planned = {}  # calls with the same metadata and alignment have the same plan
    perform = calls.Calls._performed

    def performed(self, kind, arguments, args, kwargs, seen):
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        key = (id(kind), *(tensor.data_ptr() % 16 for tensor in tensors))
        if key not in planned:
            report = self.op.plan_for(arguments, "sm90")
            found.setdefault(self.op.name, set()).add(report.name)
            merges.update(spec for spec in report.specs if spec.kernel == "attention_merge")
            planned[key] = kind
        return perform(self, kind, arguments, args, kwargs, seen)

    monkeypatch.setattr(calls.Calls, "_performed", performed)
    alike = ONE_LAYER if name == "Llama" else {}
    model = made(name, WIDE | alike).to(torch.bfloat16)
    assert enable(model)
    config = BatchingConfig(**ENGINE, options={"inner": "eager"})
    warmup = name == "DeepseekV3"  # runs steps with the most keys
    batch(model, config, lengths=FOUR, max_new_tokens=20, warmup=warmup)
    disable(model)
    assert Replayed.count > 10
    assert not {op for op, names in found.items() if "reference" in names}
    attention = {"mla_decode", "mla_latent_store"} if name == "DeepseekV3" else {"cache_attention"}
    assert attention < found.keys()
    assert merges or name != "DeepseekV3"
    for spec in merges:
        compile_for(spec)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "Gemma3", "GptOss", "DeepseekV3"])
def test_compiled_steps_are_two_graphs_with_each_layer_fused(compiled, name):
    graphs, found = compiled(name)
    assert found == generated(name, FOUR)
    assert len(graphs) == 2
    write, attend = (
        ("mla_latent_store", "mla_decode")
        if name == "DeepseekV3"
        else ("fused_qkv_paged", "cache_attention")
    )
    for ops, plain_writes, misses in graphs:
        assert (ops[write], ops[attend]) == (2, 2)
        assert plain_writes == 0
        assert "GRAPH_BREAK" not in misses
