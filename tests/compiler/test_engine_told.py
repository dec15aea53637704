"""Tests models and calls that continuous batching refuses. The error or the warning says why, and
the model runs as before."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

import transformers
from transformers.generation.continuous_batching import cache as memory
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from tests.compiler.engine_models import MODELS, PAGE, SIZES, built, generated, plain
from tests.compiler.engine_steps import batch
from tilewright.codegen.targets import get_target
from tilewright.compiler.serving import allocators, disable, enable, paged_attention
from tilewright.compiler.serving import relied_on as relied

pytestmark = pytest.mark.usefixtures("heap_before")


@pytest.mark.parametrize("name", ["attention_mask", "position_bias"])
def test_what_the_attention_would_not_read_raises(name):
    cache = object.__new__(PagedAttentionCache)
    states, given = torch.zeros(1, 2, 3, 8), {"attention_mask": None, name: torch.zeros(1)}
    with pytest.raises(ValueError, match=f"{name}: expected None"):
        paged_attention.attention(
            None, states, states, states, tilewright_memory=cache, tilewright_plan={}, **given
        )


@pytest.mark.parametrize("given", [{"s_aux": torch.zeros(4)}, {"softcap": 2.0}])
def test_sinks_of_latents_raise(given):
    config = built("DeepseekV3").config
    owner = allocators.LatentPages(0, config, 4, torch.float32, PAGE, [0], True)
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: owner}
    module, states = type("Attention", (), {"layer_idx": 0}), torch.zeros(1, 4, 3, 24)
    with pytest.raises(ValueError, match="neither s_aux nor softcap"):
        paged_attention.attention(
            module,
            states,
            states,
            states,
            None,
            tilewright_memory=cache,
            tilewright_plan={},
            **given,
        )


def window_pages(window):
    config = copy.copy(built("Mistral").config)
    config.sliding_window = window
    return allocators.WindowPages(
        index=0, config=config, num_key_value_heads=2, cache_dtype=torch.float32, page_size=PAGE,
        layer_indices=[0], allow_block_sharing=True,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 5])
def test_pages_before_a_window_are_not_kept(window):
    """Tests the smallest window, in which a token sees only itself."""
    owner = window_pages(window)
    for past in range(3 * PAGE):
        seen = [position for position in range(past + 1) if past - position < window]
        assert owner.kept(past) == seen[0] // PAGE


@pytest.mark.parametrize("window", [0, None])
def test_a_window_without_tokens_raises(window):
    with pytest.raises(ValueError, match="sliding_window: expected a positive integer"):
        window_pages(window)


def test_keys_of_another_size_raise(enabled):
    owner = allocators.FullPages(0, built("Llama").config, 2, torch.float32, PAGE, [0], True)
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: owner}
    module = type("Attention", (), {"layer_idx": 0})
    states = torch.zeros(1, 2, 3, 5)
    with pytest.raises(ValueError, match="expected 2 heads of 8 numbers"):
        paged_attention.attention(
            module, states, states, states, None, tilewright_memory=cache, tilewright_plan={}
        )


def told(model: Any, caplog: Any) -> str:
    """Returns the one warning about a model that stays as it is."""
    caplog.clear()
    original = type(model)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert enable(model) is False
    assert type(model) is original
    assert not model._forward_pre_hooks
    (message,) = caplog.messages
    return message


def another_signature(monkeypatch):
    def get_seqlen_k(self, request_id, past_length): ...

    monkeypatch.setattr(FullAttentionCacheAllocator, "get_seqlen_k", get_seqlen_k)
    return "FullAttentionCacheAllocator.get_seqlen_k of transformers"


def no_function(monkeypatch):
    monkeypatch.delattr(FullAttentionCacheAllocator, "_compute_blocks_needed")
    return "has no function FullAttentionCacheAllocator._compute_blocks_needed"


def another_order(monkeypatch):
    original = FullAttentionCacheAllocator.register_cache_tensor

    def register(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        original(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        self._kv_token_views = {n: (v, k) for n, (k, v) in self._kv_token_views.items()}

    monkeypatch.setattr(FullAttentionCacheAllocator, "register_cache_tensor", register)
    return "has the pages of layer 0 elsewhere"


def no_argument(monkeypatch):
    monkeypatch.setattr(relied, "STEP", (*relied.STEP, "tables"))
    return "has no tables"


def own_method(monkeypatch):
    monkeypatch.setattr(
        type(built("Llama")), "init_continuous_batching", lambda self: None, raising=False
    )
    return "LlamaForCausalLM has a method init_continuous_batching of its own"


def no_table(monkeypatch):
    monkeypatch.setattr(memory, "ATTN_TYPE_TO_ALLOCATOR", {})
    return "KeyError"


@pytest.mark.parametrize(
    "change", [another_signature, no_function, another_order, no_argument, own_method, no_table]
)
def test_where_transformers_has_changed_the_model_stays_as_it_is(monkeypatch, caplog, change):
    said = change(monkeypatch)
    assert said in told(built("Llama"), caplog)


def on_meta(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


def test_models_whose_memory_is_another_are_told(caplog):
    latents = MODELS["DeepseekV3"][1]
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[1].self_attn.indexer = torch.nn.Linear(2, 2)
    assert "keeps an indexer's keys beside latents" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[0].self_attn = torch.nn.Identity()
    assert "others have not" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[0].self_attn.kv_b_proj.to(torch.bfloat16)
    assert "is not a linear in torch.float32" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[1].self_attn.forward = lambda hidden_states, latents=None: None
    assert f"has no argument {paged_attention.CACHE}" in told(model, caplog)
    chunks = on_meta("Llama", layer_types=["full_attention", "full_attention"])
    chunks.config.layer_types = ["chunked_attention", "full_attention"]
    assert "Invalid layer type: chunked_attention" in told(chunks, caplog)
    other = on_meta("Bloom")
    assert "does not take another attention" in told(other, caplog)


def test_latents_that_are_expanded_otherwise_are_told(caplog, monkeypatch):
    model = on_meta("DeepseekV3", **MODELS["DeepseekV3"][1])
    kind = type("Attention", (type(model.model.layers[0].self_attn),), {})
    kind.expand_kv = lambda self, latent, rope: (latent, rope)
    model.model.layers[0].self_attn.__class__ = kind
    assert "Attention does not expand latents as DeepSeek's" in told(model, caplog)


def test_models_without_generate_are_refused():
    for change in (enable, disable):
        with pytest.raises(TypeError, match=r"model of transformers with generate\(\), got Linear"):
            change(torch.nn.Linear(2, 2))


def test_a_model_without_kernels_runs_as_before(enabled, monkeypatch, caplog):
    model = enabled("Llama")
    monkeypatch.setattr(relied, "missing_kernel", lambda model: "no kernel for torch.float32")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        found = batch(model, plain(max_blocks_per_request=0), lengths=(20, 5))
    assert found == generated("Llama", (20, 5))
    assert caplog.messages == [
        "enable: continuous batching runs without tilewright: no kernel for torch.float32"
    ]
    disable(model)
    assert "no kernel for torch.float32" in told(model, caplog)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_attention_take_halves(enabled, name):
    config, target = enabled(name).config, get_target("sm90")
    assert relied.kernel_obstacle(config, torch.bfloat16, target) is None
    reason = relied.kernel_obstacle(config, torch.float32, target)
    assert "no kernel for torch.float32" in reason
