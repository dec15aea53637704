"""Tests the argument for a model's cache, whose name changed in transformers 5.24."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tilewright import cache_argument
from tilewright.compiler.model_cache import cache_in, name_in
from tilewright.compiler.quantised import compressed_tensors

CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


class Old(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None): ...


class New(torch.nn.Module):
    def forward(self, input_ids, cache=None): ...


@pytest.mark.parametrize(("kind", "name"), [(Old, "past_key_values"), (New, "cache")])
def test_its_name_is_that_of_the_model(kind, name):
    cache = object()
    assert cache_argument(kind(), cache) == {name: cache}
    assert cache_argument(torch.compile(kind(), backend="eager"), cache) == {name: cache}
    assert name_in(kind().forward) == name


def test_a_model_of_transformers_takes_it_without_a_warning():
    model, cache, tokens = LlamaForCausalLM(CONFIG).eval(), DynamicCache(), torch.ones(1, 3).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model(tokens, **cache_argument(model, cache))
        assert cache.get_seq_length() == 3
        model.generate(tokens, **cache_argument(model, DynamicCache()), max_new_tokens=1)


def test_a_peft_model_has_the_argument_of_its_base():
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM(CONFIG)
    wanted = cache_argument(model, None)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert name_in(adapted.forward) is None  # else this tests nothing
    assert cache_argument(adapted, None) == wanted
    assert next(iter(wanted)) in inspect.signature(model.forward).parameters


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(TypeError, match=r"takes past_key_values or cache, got Linear"):
        cache_argument(torch.nn.Linear(2, 2), object())


def test_arguments_in_the_wrong_order_are_named():
    with pytest.raises(TypeError, match=r"^model: expected a model.*got object"):
        cache_argument(object(), torch.nn.Linear(2, 2))


def test_the_cache_among_arguments_is_not_the_memory_of_an_engine():
    """Before transformers 5.24, a step of continuous batching has both arguments."""
    assert cache_in({"past_key_values": None, "cache": 1}) == ("past_key_values", None)
    assert cache_in({"cache": 1}) == ("cache", 1)
    assert cache_in({"past_key_values": 1, "x": 2}) == ("past_key_values", 1)
    assert cache_in({})[1] is None


class Kept:
    """A cache that keeps its arguments. layers: the layers that a cache of transformers would have,
    if it has any."""

    def __init__(self, **layers):
        self.__dict__ |= layers

    def update(self, keys, values, *others, **named):
        self.given = keys, values
        return keys, values


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("layers", [{"layers": []}, {}], ids=["of-a-cache", "of-an-engine"])
def test_keys_and_values_are_rounded_by_either_name(name, layers):
    """Keys and values are rounded to float8 with one scale, under the argument's old and new name.
    The configurations are those of compressed-tensors."""
    how = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    how |= {"group_size": None, "scale_dtype": None, "symmetric": True}
    module, kept = torch.nn.Linear(2, 2), Kept(**layers)
    module.kv_cache = torch.nn.Identity()
    module.quantization_scheme = SimpleNamespace(input_activations=SimpleNamespace(**how))
    module.layer_idx, module.k_scale, module.v_scale = 0, torch.tensor(0.5), torch.tensor(2.0)
    _, given = compressed_tensors._rounds_keys_and_values(module, (), {name: kept, "mask": None})
    assert set(given) == {name, "mask"}
    numbers = torch.tensor([1.0, 1.01, 300.0])
    given[name].update(numbers, numbers, 0)
    assert kept.given[0].tolist() == [1.0, 1.0, 224.0]  # the largest float8 number is 448
    assert kept.given[1].tolist() == [1.0, 1.0, 288.0]
    _, given = compressed_tensors._rounds_keys_and_values(module, (), {name: None})
    assert given == {name: None}
