"""Tests `generate()` with the deferred stop check. Tokens, states and caches must be the same as
without it."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

pytest.importorskip("transformers", reason="the stop check is one of transformers")

import transformers
from transformers import CompileConfig, DynamicCache, StoppingCriteria
from transformers.generation import LogitsProcessor, TemperatureLogitsWarper, utils
from transformers.generation.streamers import BaseStreamer

from tests.found import patterns_in
from tilewright.compiler import reports
from tilewright.compiler.serving import defer_stop_check, stop_check, undefer_stop_check
from tilewright.tools.paged_cache import PagedCache
from tilewright.tools.pages import Pages

pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="transformers has no deferred check"
)

VOCABULARY, PROMPT, NEW = 61, 7, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",  # which returns attentions
}
MODELS = {
    "Llama": {},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},  # one layer in two, past its window
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
ALL = {"return_dict_in_generate": True} | dict.fromkeys(
    ("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True
)


class HostEvent:
    """Stands for a CUDA event. Copies from CPU to CPU are finished when they return."""

    def __init__(self, *args, **kwargs) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def on_cpu(monkeypatch):
    """Defers the stop check on the CPU, which otherwise happens only on CUDA."""
    monkeypatch.setattr(stop_check, "DEVICES", ("cpu",))
    monkeypatch.setattr(torch, "Event", HostEvent)


def built(name: str = "Llama") -> transformers.PreTrainedModel:
    """Returns a tiny model. Its weights are so large that its tokens differ from each other."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    return filled(getattr(transformers, f"{name}ForCausalLM")(config))


def filled(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.data.normal_(std=0.3)
    return model


def prompts(batch: int = 3) -> dict[str, torch.Tensor]:
    """Makes prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(batch):
        mask[b, : 2 * b] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model, **how):
    torch.manual_seed(2)
    settings = prompts() | {"do_sample": False, "max_new_tokens": NEW, "use_cache": True} | how
    return model.generate(**settings)


def ends(model, *steps: int, **how) -> list[int]:
    """Yields tokens to use as EOS. Each ends every sequence at one of these new tokens, in turn, or
    earlier."""
    tokens = generated(model, **how)[:, -NEW:]
    return [int(row[steps[b % len(steps)]]) for b, row in enumerate(tokens)]


class Calls:
    """How often a model runs."""

    def __init__(self, model) -> None:
        self.count = 0
        model.register_forward_pre_hook(self)

    def __call__(self, *args) -> None:
        self.count += 1

    def during(self, function, *args, **kwargs) -> tuple[object, int]:
        before = self.count
        return function(*args, **kwargs), self.count - before


def both(model, **how):
    """Returns the results without and with the deferred check, and how many more steps the latter
    took. Checks that the random generator ends in the same state."""
    calls = Calls(model)
    want, steps = calls.during(generated, model, **how)
    state = torch.get_rng_state()
    assert defer_stop_check(model)
    found, deferred = calls.during(generated, model, **how)
    assert torch.equal(torch.get_rng_state(), state)
    undefer_stop_check(model)
    return want, found, deferred - steps


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "processors": {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
    },
    "several-of-a-prompt": {"do_sample": True, "num_return_sequences": 2},
    "static-cache": {"cache_implementation": "static", "disable_compile": True},
    "chunks-of-prompt": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_up_to_the_length_are_the_same_in_as_many_steps(on_cpu, way):
    want, found, more = both(built(), **WAYS[way])
    assert len(want.unique()) > 8
    assert torch.equal(found, want)
    assert more == 0


@pytest.mark.parametrize("way", WAYS)
def test_after_the_last_eos_one_more_step_leaves_no_trace(on_cpu, way):
    model = built()
    eos = ends(model, 3, 7, 5, **WAYS[way])
    want, found, more = both(model, eos_token_id=eos, **WAYS[way])
    assert PROMPT + 1 < want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert more == 1


def test_sequences_that_end_before_others_are_padded(on_cpu):
    model = built()
    want, found, more = both(model, eos_token_id=ends(model, 4)[0])
    assert (want[:, -1] == 0).any()
    assert want.shape[1] == PROMPT + NEW
    assert torch.equal(found, want)
    assert more == 0


@pytest.mark.parametrize("more", [0, 1])
def test_an_eos_beside_the_length_is_kept(on_cpu, more):
    """An EOS is one of the last two tokens that fit. If it is the last but one, the additional step
    reaches the length, too."""
    model = built()
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    tokens = generated(model, **inputs)[0, PROMPT:].tolist()
    last = max(step for step, token in enumerate(tokens[:-1]) if token not in tokens[:step])
    assert last > 2
    how = {"eos_token_id": tokens[last], "max_new_tokens": last + 1 + more}
    want, found, steps = both(model, **how, **inputs)
    assert want.shape[1] == PROMPT + last + 1
    assert torch.equal(found, want)
    assert steps == more


def test_the_next_call_draws_the_same_numbers(on_cpu):
    model = built()
    how = {"do_sample": True, "max_new_tokens": NEW}
    eos = ends(model, 3, 7, 5, do_sample=True)

    def twice():
        first = generated(model, eos_token_id=eos, **how)
        return first, model.generate(**prompts(), **how)

    want = twice()
    assert want[0].shape[1] < PROMPT + NEW
    defer_stop_check(model)
    for one, other in zip(twice(), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ended", [False, True])
def test_a_dictionary_holds_the_same(on_cpu, name, ended):
    model = built(name)
    eos = ends(model, 3, 9, 8) if ended else None
    want, found, more = both(model, eos_token_id=eos, **ALL)
    assert more == ended
    assert list(found) == list(want)
    for key in ("scores", "logits", "attentions", "hidden_states"):
        assert same(found[key], want[key]), key
    assert torch.equal(found.sequences, want.sequences)
    assert_same_cache(found.past_key_values, want.past_key_values)


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


def assert_same_cache(found: DynamicCache, want: DynamicCache) -> None:
    assert int(found.get_seq_length()) == int(want.get_seq_length())
    for one, other in zip(found.layers, want.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "pages": lambda model: PagedCache(model.config, page_size=4),
    "pages-with-limits": lambda model: PagedCache(
        model.config, page_size=4, max_cache_len=PROMPT + NEW + 2, max_pages=18
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CACHES)
def test_a_conversation_goes_on_with_its_cache(on_cpu, kind, name):
    model = built(name)
    eos = ends(model, 3, 9, 8)
    calls = Calls(model)

    def turns():
        cache = CACHES[kind](model)
        first, steps = calls.during(generated, model, past_key_values=cache, eos_token_id=eos)
        length = int(cache.get_seq_length())
        ids = torch.cat([first, prompts()["input_ids"][:, :2]], dim=1)
        mask = torch.cat([prompts()["attention_mask"], ids.new_ones(3, ids.shape[1] - PROMPT)], 1)
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
        return first, length, generated(model, max_new_tokens=2, **inputs), steps

    first, length, second, steps = turns()
    defer_stop_check(model)
    found = turns()
    assert length == first.shape[1] - 1 < PROMPT + NEW - 1
    assert torch.equal(found[0], first)
    assert found[1] == length
    assert torch.equal(found[2], second)
    assert found[3] == steps + 1


def test_pages_are_cropped_by_nothing_without_a_wait(monkeypatch):
    model = built()
    cache = PagedCache(model.config, page_size=4)
    model(**prompts(), past_key_values=cache)
    waits = []
    present = Pages.present
    monkeypatch.setattr(Pages, "present", lambda pages: waits.append(pages) or present(pages))
    cache.crop(0)
    assert waits == []
    cache.crop(-1)
    assert waits != []
    assert int(cache.get_seq_length()) == PROMPT - 1


def with_static_cache(model, **how) -> dict[str, object]:
    cache = transformers.StaticCache(model.config, max_cache_len=PROMPT + NEW)
    return {"past_key_values": cache, "disable_compile": True, **how}


def test_a_static_cache_of_the_caller_loses_what_one_more_step_wrote(on_cpu):
    model = built()
    eos = ends(model, 3, 9, 8)
    how, other = (with_static_cache(model, eos_token_id=eos) for _ in range(2))
    calls = Calls(model)
    want, steps = calls.during(generated, model, **how)
    defer_stop_check(model)
    found, deferred = calls.during(generated, model, **other)
    assert want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert deferred == steps + 1
    caches = other["past_key_values"], how["past_key_values"]
    assert int(caches[0].get_seq_length()) == want.shape[1] - 1
    assert_same_cache(*caches)
    kept = [layer.keys.data_ptr() for layer in caches[0].layers]
    follow = torch.cat([want, prompts()["input_ids"][:, :2]], dim=1)
    mask = torch.cat([prompts()["attention_mask"], follow.new_ones(3, follow.shape[1] - PROMPT)], 1)
    inputs = {"input_ids": follow, "attention_mask": mask, "disable_compile": True}
    one, two = (
        generated(model, max_new_tokens=2, past_key_values=cache, **inputs) for cache in caches
    )
    assert torch.equal(one, two)
    assert kept == [layer.keys.data_ptr() for layer in caches[0].layers]


def test_a_static_cache_with_windows_is_checked_at_every_step(on_cpu):
    model = built("Gemma2")
    eos = ends(model, 3, 9, 8)
    how, other = (with_static_cache(model, eos_token_id=eos) for _ in range(2))
    calls = Calls(model)
    want, steps = calls.during(generated, model, **how)
    defer_stop_check(model)
    found, deferred = calls.during(generated, model, **other)
    assert want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert deferred == steps
    assert_same_cache(other["past_key_values"], how["past_key_values"])


class Checks:
    """Counts how often `generate()` waits for the answer whether to stop."""

    def __init__(self, monkeypatch) -> None:
        self.count = 0
        call = utils.StopCheck.__call__

        def counted(check, *args, **kwargs):
            self.count += 1
            return call(check, *args, **kwargs)

        monkeypatch.setattr(utils.StopCheck, "__call__", counted)


@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_only_its_length_ends_waits_for_nothing_with_any_cache(
    on_cpu, monkeypatch, name
):
    model = built(name)
    how, other = (with_static_cache(model) for _ in range(2))
    checks, calls = Checks(monkeypatch), Calls(model)
    want, steps = calls.during(generated, model, **how)
    assert checks.count == NEW
    defer_stop_check(model)
    found, deferred = calls.during(generated, model, **other)
    assert checks.count == NEW
    assert torch.equal(found, want)
    assert deferred == steps
    assert_same_cache(other["past_key_values"], how["past_key_values"])


def test_an_encoder_s_cache_is_given_back_the_same(on_cpu):
    torch.manual_seed(0)
    config = transformers.T5Config(
        **T5, vocab_size=VOCABULARY, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0
    )
    model = filled(transformers.T5ForConditionalGeneration(config))
    tokens = generated(model, eos_token_id=None)
    eos = [int(row[step]) for row, step in zip(tokens, (3, 7, 5), strict=True)]
    want, found, more = both(model, eos_token_id=eos)
    assert want.shape[1] < tokens.shape[1]
    assert torch.equal(found, want)
    assert more == 1
    want, found, more = both(model, eos_token_id=eos, return_dict_in_generate=True)
    assert torch.equal(found.sequences, want.sequences)
    assert more == 0  # transformers cannot remove the step from such a cache
    kept = (result.past_key_values.self_attention_cache for result in (found, want))
    assert_same_cache(*kept)


class Words:
    """What a streamer was given."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def put(self, value: torch.Tensor) -> None:
        self.log.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.log.append("end")


@pytest.mark.parametrize("ended", [False, True])
def test_a_streamer_gets_every_token_once_and_the_end(on_cpu, ended):
    model = built()
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    how = inputs | {"eos_token_id": ends(model, 6)[0] if ended else None}
    streamers = [type("Streamer", (Words, BaseStreamer), {})() for _ in range(2)]
    generated(model, streamer=streamers[0], **how)
    defer_stop_check(model)
    _, steps = Calls(model).during(generated, model, streamer=streamers[1], **how)
    want, found = (streamer.log for streamer in streamers)
    assert found == want
    assert want[-1] == "end"
    assert steps == len(want) - 2 + ended  # the prompt, and "end"


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers", reason="a part of transformers")
    # The criterion looks at what each token adds to "abcdef".
    words = {f"w{number}.": number for number in range(VOCABULARY)} | {"abcdef": VOCABULARY}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0."))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="w0.", unk_token="w0."
    )


def test_stop_strings_stop_at_the_same_token(on_cpu):
    model = built()
    strings = [f"w{token}." for token in ends(model, 3, 7, 5)]
    want, found, more = both(model, stop_strings=strings, tokenizer=tokenizer())
    assert PROMPT + 1 < want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert more == 1


def test_a_time_that_is_over_stops_after_one_token(on_cpu):
    want, found, more = both(built(), max_time=-1.0)
    assert want.shape[1] == PROMPT + 1
    assert torch.equal(found, want)
    assert more == 1


class Counting(StoppingCriteria):
    """A stopping criterion that stops after `most` calls, which it counts."""

    def __init__(self, most: int) -> None:
        self.calls, self.most = 0, most

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full(input_ids.shape[:1], self.calls >= self.most, dtype=torch.bool)


class Adding(LogitsProcessor):
    """A processor that prefers the next higher token at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % VOCABULARY] += 3.0
        return scores


class Warmer(TemperatureLogitsWarper):
    """A caller's subclass of a processor of transformers."""


@pytest.mark.parametrize(
    "own",
    [
        lambda: {"stopping_criteria": [Counting(5)]},
        lambda: {"logits_processor": [Adding()]},
        lambda: {"logits_processor": [Warmer(0.5)]},
        lambda: {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(VOCABULARY))},
    ],
    ids=["criterion", "processor", "subclass", "function"],
)
def test_what_the_caller_wrote_is_called_as_often_as_before(on_cpu, own):
    model = built()
    eos = ends(model, 3, 7, 9, **own())
    given = [own(), own()]
    calls = Calls(model)
    want, steps = calls.during(generated, model, eos_token_id=eos, **given[0])
    defer_stop_check(model)
    found, deferred = calls.during(generated, model, eos_token_id=eos, **given[1])
    assert want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert deferred == steps
    counts = [[getattr(one, "calls", 0) for one in lists_of(each)] for each in given]
    assert counts[0] == counts[1]


def lists_of(own: dict) -> list[object]:
    return [one for value in own.values() if isinstance(value, list) for one in value]


@pytest.mark.parametrize(
    "how",
    [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"prompt_lookup_num_tokens": 2}],
    ids=["beams", "sampled-beams", "assisted"],
)
def test_other_loops_stay_as_they_are(on_cpu, how):
    model = built()
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    eos = int(generated(model, **inputs)[0, PROMPT + 6])
    want, found, more = both(model, eos_token_id=eos, **inputs, **how)
    assert torch.equal(found, want)
    assert more == 0


def test_an_assistant_is_checked_at_every_step(on_cpu):
    model, assistant = built(), built()
    assistant.lm_head.weight.data.normal_()
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    calls = Calls(assistant)
    want, steps = calls.during(generated, model, assistant_model=assistant, **inputs)
    assert defer_stop_check(assistant)
    found, deferred = calls.during(generated, model, assistant_model=assistant, **inputs)
    assert torch.equal(found, want)
    assert deferred == steps > 0


#: Calls in which one more step does not fit, each with a call in which it just fits.
ROOM = {
    "pad_token_id": (VOCABULARY, VOCABULARY - 1),
    "max_position_embeddings": (PROMPT + NEW - 2, PROMPT + NEW - 1),
    "max_cache_len": (PROMPT + NEW - 2, PROMPT + NEW - 1),
    "max_pages": (14, 15),
    "static": (PROMPT + NEW - 2, PROMPT + NEW - 1),
}


@pytest.mark.parametrize("enough", [False, True])
@pytest.mark.parametrize("what", ROOM)
def test_a_step_is_added_only_where_it_fits(on_cpu, what, enough):
    model = built()
    # All sequences are equal, so that none is padded before the others end.
    ids = prompts()["input_ids"][:1].expand(3, -1)
    how = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    how["eos_token_id"] = ends(model, 3, **how)
    limit = {what: ROOM[what][enough]}
    if what in ("max_cache_len", "max_pages"):
        how["past_key_values"] = PagedCache(model.config, page_size=4, **limit)
    elif what == "static":
        cache = transformers.StaticCache(model.config, max_cache_len=ROOM[what][enough])
        how |= {"past_key_values": cache, "disable_compile": True}
    elif what == "max_position_embeddings":
        model.config.max_position_embeddings = limit[what]
    else:
        how |= limit
    calls = Calls(model)
    defer_stop_check(model)
    tokens, steps = calls.during(generated, model, **how)
    assert tokens.shape[1] < PROMPT + NEW
    assert steps == tokens.shape[1] - PROMPT + enough


def test_on_the_cpu_it_changes_nothing():
    model = built()
    want, found, more = both(model, eos_token_id=ends(model, 3, 7, 5))
    assert want.shape[1] < PROMPT + NEW
    assert torch.equal(found, want)
    assert more == 0


def test_steps_that_generate_compiles_are_fused_all_the_same(on_cpu, fresh_dynamo):
    model = built()
    eos = ends(model, 3, 7, 5)
    how = CompileConfig(
        backend="tilewright", mode=None, options={"everywhere": True, "inner": "eager"}
    )
    how._compile_all_devices = True
    cache = {"cache_implementation": "static", "compile_config": how}
    want, found, more = both(model, eos_token_id=eos, **cache)
    assert torch.equal(found, want)
    assert torch.equal(found, generated(model, eos_token_id=eos))
    assert more == 1
    assert patterns_in(reports()[-1], "qkv_cache") == ["qkv_cache"] * 2


def test_one_model_is_changed_and_taken_back(on_cpu):
    class Local(transformers.LlamaForCausalLM): ...

    model, other = (Local(built().config) for _ in range(2))
    original, functions = type(model), (utils.GenerationMixin._sample, utils.DeferredStopCheck)
    assert defer_stop_check(model)
    assert defer_stop_check(model)  # again: nothing
    assert type(model) is not original
    assert isinstance(model, original)
    assert str(type(model)) == str(original)  # by which transformers looks things up
    assert type(other) is original
    assert (utils.GenerationMixin._sample, utils.DeferredStopCheck) == functions
    undefer_stop_check(model)
    undefer_stop_check(model)
    assert type(model) is original


def test_copies_and_pickles_have_the_original_class(on_cpu):
    model = built()
    original = type(model)
    defer_stop_check(model)
    for made in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is original
        assert torch.equal(generated(made), generated(model))


def test_a_compiled_model_s_own_is_changed():
    model = built()
    compiled = torch.compile(model, backend="eager")
    assert defer_stop_check(compiled)
    assert type(model).__mro__[1] is transformers.LlamaForCausalLM
    undefer_stop_check(compiled)
    assert type(model) is transformers.LlamaForCausalLM


def test_a_class_that_was_changed_since_is_not_guessed():
    model = built()
    defer_stop_check(model)
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.raises(RuntimeError, match="became Sharded after defer_stop_check"):
        undefer_stop_check(model)


def test_models_without_generate_are_refused():
    for change in (defer_stop_check, undefer_stop_check):
        with pytest.raises(TypeError, match=r"model of transformers with generate\(\), got Linear"):
            change(torch.nn.Linear(2, 2))


class OwnSample(transformers.LlamaForCausalLM):
    def _sample(self, *args, **kwargs):
        return super()._sample(*args, **kwargs)


def left(model, caplog) -> str:
    """Returns the warning about a model that stays as it is."""
    original = type(model)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert defer_stop_check(model) is False
    assert type(model) is original
    return caplog.messages[-1]


def test_a_class_with_a_sample_of_its_own_stays_as_it_is(caplog):
    model = OwnSample(built().config)
    assert "OwnSample has a method _sample of its own" in left(model, caplog)


def without_the_check(monkeypatch):
    monkeypatch.delattr(utils, "DeferredStopCheck")
    return "has no function DeferredStopCheck.__init__"


def with_other_parameters(monkeypatch):
    def is_supported(device, cache): ...

    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(is_supported))
    return "DeferredStopCheck.is_supported of transformers"


def with_another_sample(monkeypatch):
    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ): ...

    monkeypatch.setattr(utils.GenerationMixin, "_sample", _sample)
    return "does not look up DeferredStopCheck"


@pytest.mark.parametrize("change", [without_the_check, with_other_parameters, with_another_sample])
def test_where_transformers_has_changed_the_model_stays_as_it_is(monkeypatch, caplog, change):
    model = built()
    said = change(monkeypatch)
    assert said in left(model, caplog)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_on_a_gpu_tokens_and_random_numbers_are_the_same(do_sample, static):
    model = built().cuda()
    calls = Calls(model)
    inputs = {name: tensor.cuda() for name, tensor in prompts().items()}
    tokens = generated(model, do_sample=do_sample, **inputs)
    eos = [int(tokens[b, PROMPT + step]) for b, step in enumerate((3, 7, 5))]
    how = {"do_sample": do_sample, "eos_token_id": eos, **inputs}
    caches = [with_static_cache(model) if static else {} for _ in range(2)]
    want, steps = calls.during(generated, model, **how, **caches[0])
    state = torch.cuda.get_rng_state()
    defer_stop_check(model)
    found, deferred = calls.during(generated, model, **how, **caches[1])
    assert torch.equal(found, want)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert deferred == steps + 1
    if static:
        assert_same_cache(*(one["past_key_values"] for one in caches))
