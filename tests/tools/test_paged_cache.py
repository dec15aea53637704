"""Tests `PagedCache` under `generate()`: it must give the same tokens as a dynamic cache."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch

pytest.importorskip("transformers", reason="PagedCache is a cache of transformers")

import transformers
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

from tilewright.compiler import reports
from tilewright.tools.paged_cache import PagedCache, kv_scales

WIDTHS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
MODELS = {
    "Llama": {},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, **EXPERTS},
    # Every second layer sees 6 tokens, but keeps all of them.
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "DeepseekV2": {**LATENT, **EXPERTS, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}
PROMPT, NEW, PAGE = 13, 19, 4


def built(name: str, layers: int = 2) -> transformers.PreTrainedModel:
    """Returns a tiny model. Its weights are so large that its tokens differ from each other."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=layers, **WIDTHS | MODELS[name]
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


def prompts(batch: int = 3) -> dict[str, torch.Tensor]:
    """Returns prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WIDTHS["vocab_size"], (batch, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(batch):
        mask[b, : 3 * b] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model, cache, inputs=None, **how) -> torch.Tensor:
    torch.manual_seed(2)
    settings = {"do_sample": False, "max_new_tokens": NEW} | how
    given = prompts() if inputs is None else inputs
    return model.generate(**given, past_key_values=cache, **settings)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 4},
    "sampled-beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "chunks-of-prompt": {"prefill_chunk_size": 5},
}


#: The first model runs in every way. The other models have kinds of layers that it lacks.
GENERATED = [(name, way) for name in MODELS for way in (WAYS if name == "Llama" else ("beams",))]


@pytest.mark.parametrize(("name", "way"), GENERATED)
def test_tokens_are_those_of_a_dynamic_cache(name, way):
    model = built(name)
    want = generated(model, DynamicCache(config=model.config), **WAYS[way])
    assert len(want.unique()) > 8
    cache = PagedCache(model.config, page_size=PAGE)
    assert torch.equal(generated(model, cache, **WAYS[way]), want)
    assert int(cache.get_seq_length()) == PROMPT + NEW - 1


def test_an_assistant_s_rejected_tokens_are_cropped():
    model, assistant = built("Llama"), built("Llama")
    assistant.lm_head.weight.data.normal_()
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    want = generated(model, DynamicCache(config=model.config), inputs)
    cache = PagedCache(model.config, page_size=PAGE)
    assert torch.equal(generated(model, cache, inputs, assistant_model=assistant), want)


def test_a_conversation_goes_on_with_its_cache():
    model = built("Llama")
    caches = [DynamicCache(config=model.config), PagedCache(model.config, page_size=PAGE)]
    turns = [generated(model, cache) for cache in caches]
    ids = torch.cat([turns[0], prompts()["input_ids"][:, :5]], dim=1)
    mask = torch.cat([prompts()["attention_mask"], ids.new_ones(3, NEW + 5)], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    want, found = (generated(model, cache, inputs) for cache in caches)
    assert torch.equal(found, want)


def test_a_copy_of_a_prompt_s_cache_goes_its_own_way():
    model = built("Llama")
    cache = PagedCache(model.config, page_size=PAGE)
    inputs = {"input_ids": prompts()["input_ids"].clamp(min=1)}
    model(inputs["input_ids"][:, :-2], past_key_values=cache)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    first, second = (generated(model, each, inputs) for each in copies)
    assert torch.equal(first, second)
    assert torch.equal(first, generated(model, DynamicCache(config=model.config), inputs))
    assert int(cache.get_seq_length()) == PROMPT - 2


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_memory_goes_by_the_tokens_present():
    """The memory grows with the number of tokens: a quarter may be free, and one page belongs to no
    sequence."""
    model = built("Llama")
    cache = PagedCache(model.config, page_size=PAGE)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(cache.layers[1].keys.shape))
    generated(model, cache)
    for step, (num_pages, *of_a_page) in enumerate(seen):
        present = 3 * pages_for(PROMPT + step)
        assert present < num_pages <= 1 + 1.25 * present + 1
        assert of_a_page == [PAGE, 2, 8]
    assert len(set(seen)) > 2


def test_beams_share_the_pages_of_their_prompt():
    model = built("Llama")
    cache = PagedCache(model.config, page_size=PAGE)
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    generated(model, cache, inputs, num_beams=4)
    full = PROMPT // PAGE
    assert cache.pages.block_table.shape[0] == 4
    assert (cache.pages.block_table[:, :full] == cache.pages.block_table[:1, :full]).all()
    last = cache.pages.block_table[:, cache.pages.columns - 1]
    assert len(last.unique()) == 4


def states(batch: int, tokens: int, start: int = 0) -> torch.Tensor:
    """Returns keys or values [batch, 2, tokens, 8] that show to which sequence and token they
    belong."""
    marks = 1000.0 * torch.arange(batch).view(-1, 1, 1, 1) + start + torch.arange(tokens)[:, None]
    return marks.expand(batch, 2, tokens, 8).clone()


def filled(batch: int, tokens: int, **options) -> PagedCache:
    cache = PagedCache(built("Llama").config, page_size=PAGE, **options)
    for layer in range(2):
        cache.update(states(batch, tokens), -states(batch, tokens), layer)
    return cache


def held(cache: PagedCache) -> list[torch.Tensor]:
    """Returns the present tokens of each layer: [batch, tokens] of one head and dimension."""
    length = int(cache.get_seq_length())
    pools = [pool for layer in cache.layers for pool in (layer.keys, layer.values)]
    table = cache.pages.block_table
    return [pool[table].flatten(1, 2)[:, :length, 0, 0].abs() for pool in pools]


def appended(cache: PagedCache, batch: int, tokens: int, start: int) -> None:
    for layer in range(2):
        cache.update(states(batch, tokens, start), states(batch, tokens, start), layer)


@pytest.mark.parametrize("tokens", [3, 4, 6, 8])
@pytest.mark.parametrize(
    ("change", "sources"),
    [
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 1])), [1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ],
    ids=["reorder", "repeat", "select", "mask"],
)
def test_sequences_that_share_pages_write_into_their_own(change, sources, tokens):
    """Sequences that share pages write into pages of their own. The last page is full, partly
    filled, or not allocated yet. One case crops into a full page."""
    cache = filled(3, tokens)
    change(cache)
    batch = len(sources)
    assert cache.batch_size == batch
    old = states(3, tokens)[sources, 0, :, 0]
    assert all(torch.equal(found, old) for found in held(cache))
    cache.crop(-2)
    appended(cache, batch, 5, 500)
    want = torch.cat([old[:, :-2], states(batch, 5, 500)[:, 0, :, 0]], dim=1)
    assert all(torch.equal(found, want) for found in held(cache))


@pytest.mark.parametrize("seed", range(8))
def test_any_row_of_changes_leaves_what_plain_tensors_would_hold(seed):
    random = Random(seed)
    cache, want, start = filled(2, 5), states(2, 5)[:, 0, :, 0], 100
    for _ in range(40):
        batch, length = want.shape
        sources = [random.randrange(batch) for _ in range(random.randint(1, 5))]
        match random.choice(["append", "append", "reorder", "repeat", "select", "crop"]):
            case "append":
                tokens = random.randint(1, 6)
                appended(cache, batch, tokens, start)
                want = torch.cat([want, states(batch, tokens, start)[:, 0, :, 0]], dim=1)
                start += tokens
            case "reorder":
                beams = [random.choice(sources) for _ in range(batch)]
                cache.reorder_cache(torch.tensor(beams))
                want = want[beams]
            case "repeat":
                times = random.randint(1, 2) if batch < 6 else 1
                cache.batch_repeat_interleave(times)
                want = want.repeat_interleave(times, dim=0)
            case "select":
                cache.batch_select_indices(torch.tensor(sources))
                want = want[sources]
            case "crop":
                removed = random.randint(0, min(length - 1, 9))
                cache.crop(-removed)
                want = want[:, : length - removed]
        assert all(torch.equal(found, want) for found in held(cache))
        used = {page for row in cache.pages.rows for page in row}
        assert sorted([*used, *cache.pages.free]) == list(range(1, cache.num_pages))


def test_crop_gives_pages_back_and_reset_all_of_them():
    cache = filled(3, 9)
    cache.crop(-6)
    assert int(cache.get_seq_length()) == 3
    assert len(cache.pages.free) == cache.num_pages - 1 - 3
    cache.crop(-40)
    cache.crop(0)
    assert int(cache.get_seq_length()) == 0
    cache.reset()
    assert len(cache.pages.free) == cache.num_pages - 1
    assert not cache.layers[1].keys.any()
    appended(cache, 2, 5, 0)
    assert all(torch.equal(found, states(2, 5)[:, 0, :, 0]) for found in held(cache))


@pytest.mark.parametrize("backend", ["tilewright", "aot_eager"])
def test_generate_compiles_its_steps_once_and_once_for_all_sizes(backend):
    """`generate()` compiles its steps once for the first size, and once for all sizes. Prompts run
    eagerly, and a step is one graph."""
    torch._dynamo.reset()
    model = built("Llama", layers=2 if backend == "tilewright" else 1)
    want = generated(model, DynamicCache(config=model.config))
    options = {"inner": "eager"} if backend == "tilewright" else None
    how = CompileConfig(backend=backend, mode=None, options=options, fullgraph=True)
    how._compile_all_devices = True
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        cache = PagedCache(model.config, page_size=PAGE)
        assert torch.equal(generated(model, cache, compile_config=how), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    if backend == "tilewright":
        found = [(match.op, match.shapes.get("page")) for match in reports()[-1].matches]
        assert sorted(found) == [("cache_attention", PAGE)] * 2 + [("fused_qkv_paged", None)] * 2


def test_options_beside_the_mode_that_a_config_has_are_told_apart():
    """Options in addition to a config's mode are reported. If they are given in place of the mode,
    they do the same as the mode."""
    model = built("Llama")
    options = {"inner_options": torch._inductor.list_mode_options("reduce-overhead")}
    with pytest.raises(RuntimeError, match="Either mode or options"):
        model.get_compiled_call(CompileConfig(backend="tilewright", options=options))
    assert options == {"inner_options": {"triton.cudagraphs": True}}
    assert model.get_compiled_call(CompileConfig(backend="tilewright", mode=None, options=options))


def test_a_model_compiled_as_a_whole_breaks_its_graph_where_it_takes_pages():
    torch._dynamo.reset()
    model = built("Llama", layers=1)
    ids = prompts()["input_ids"]
    want = model(ids, use_cache=False).logits
    compiled = torch.compile(model, backend="eager")
    cache = PagedCache(model.config, page_size=PAGE)
    parts = [compiled(part, past_key_values=cache).logits for part in ids.split([6, 1, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)


def test_a_whole_graph_writes_where_its_caller_took_pages():
    torch._dynamo.reset()
    model = built("Llama", layers=1)
    ids = prompts()["input_ids"]
    want = model(ids, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache = PagedCache(model.config, page_size=PAGE)
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    cache.reserve(PROMPT + 4)
    num_pages = cache.num_pages
    parts = [compiled(part, past_key_values=cache).logits for part in ids.split([6, 1, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    assert cache.num_pages == num_pages
    # No page was allocated for these tokens. The next call from outside the graph raises the error.
    for token in ids.split(1, 1)[:8]:
        compiled(token, past_key_values=cache)
    with pytest.raises(
        RuntimeError,
        match=r"wrote token 21 of a sequence, but its pages had room "
        r"for only 20",
    ):
        cache.crop(-1)


def test_room_for_all_tokens_keeps_every_shape():
    model = built("Llama")
    cache = PagedCache(model.config, page_size=PAGE, max_cache_len=PROMPT + NEW)
    assert cache.get_max_length() == PROMPT + NEW
    shapes = set()
    model.register_forward_hook(lambda *_: shapes.add(cache.pages.block_table.shape))
    generated(model, cache)
    assert shapes == {(3, pages_for(PROMPT + NEW))}
    reserved = PagedCache(model.config, page_size=PAGE)
    reserved.reserve(PROMPT + NEW)
    pools = set()
    model.register_forward_hook(lambda *_: pools.add(reserved.layers[0].keys.data_ptr()))
    generated(model, reserved)
    assert len(pools) == 1


@pytest.mark.parametrize("page_size", [0, -4, 3, 16.0, "16"])
def test_a_bad_page_size_is_named(page_size):
    with pytest.raises(ValueError, match=r"page_size: expected a power of two.*got"):
        PagedCache(built("Llama").config, page_size=page_size)


@pytest.mark.parametrize("name", ["max_cache_len", "max_pages"])
def test_a_bad_limit_is_named(name):
    with pytest.raises(ValueError, match=rf"{name}: expected None or an int of at least 1, got 0"):
        PagedCache(built("Llama").config, **{name: 0})


def test_limits_are_told_before_anything_is_written():
    cache = filled(3, 8, max_pages=7)
    with pytest.raises(RuntimeError, match=r"3 sequences need 9 pages.*max_pages is 7"):
        appended(cache, 3, 1, 8)
    assert all(torch.equal(found, states(3, 8)[:, 0, :, 0]) for found in held(cache))
    cache = filled(3, 6, max_pages=7)
    with pytest.raises(RuntimeError, match=r"7 sequences need 10 pages.*max_pages is 7"):
        cache.batch_select_indices(torch.tensor([0, 0, 0, 1, 1, 2, 2]))
    cache = filled(3, 8, max_cache_len=9)
    appended(cache, 3, 1, 8)
    with pytest.raises(
        ValueError, match=r"9 tokens and needs room for 1 more.* max_cache_len is 9"
    ):
        appended(cache, 3, 1, 9)


def test_another_batch_is_told():
    cache = filled(3, 8)
    with pytest.raises(ValueError, match=r"8 tokens of 3 sequences, but got keys of 2"):
        appended(cache, 2, 1, 8)


def test_another_device_is_told():
    cache = PagedCache(built("Llama").config, page_size=PAGE)
    cache.update(states(3, 8), states(3, 8), 0)
    with pytest.raises(ValueError, match=r"on one device, got keys on meta and on cpu"):
        cache.update(states(3, 8).to("meta"), states(3, 8).to("meta"), 1)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused():
    config = transformers.LlamaConfig(**WIDTHS, num_hidden_layers=2, layer_types=["hybrid"] * 2)
    assert len(StaticCache(config, max_cache_len=8)) == 2
    with pytest.raises(
        ValueError, match=r"this model needs LinearAttentionAndStaticFullAttentionLayer"
    ):
        PagedCache(config)


def test_generate_takes_no_second_cache():
    """If two caches are requested, transformers raises its own error."""
    model = built("Llama")
    with pytest.raises(ValueError, match="cache_implementation"):
        generated(
            model,
            PagedCache(model.config),
            generation_config=GenerationConfig(cache_implementation="static", pad_token_id=0),
        )


# --- eight bits ---------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


class Rounded(DynamicCache):
    """A dynamic cache that rounds keys and values to float8 before it stores them."""

    def __init__(self, config, dtype, scales):
        super().__init__(config=config)
        self.rounds_to, self.scales = dtype, scales

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        sides = zip((key_states, value_states), self.scales[layer_idx], strict=True)
        rounded = (
            (states.float() / scale.reshape(-1, 1, 1).float()).to(self.rounds_to).to(states.dtype)
            * scale.reshape(-1, 1, 1)
            for states, scale in sides
        )
        return super().update(*rounded, layer_idx, *args, **kwargs)


def with_scales(model, by_head=False, of_linears=False):
    """Returns a model with a checkpoint's scales of keys and values, which differ."""
    for number, layer in enumerate(model.model.layers):
        for name, size in (("k", 0.02), ("v", 0.03)):
            attention = layer.self_attn
            holder = getattr(attention, f"{name}_proj") if of_linears else attention
            scale = torch.tensor([size, size / 2] if by_head else [size]) * (number + 1)
            scale = torch.nn.Parameter(scale, requires_grad=False)
            holder.register_parameter(f"{name}_scale", scale)
    return model


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    ("dtype", "by_head", "of_linears"),
    [(E4M3, False, True), (E4M3, True, False), (torch.float8_e5m2, False, False)],
)
def test_eight_bits_are_the_codes_of_a_cache_that_rounds(dtype, by_head, of_linears, compiles):
    model = with_scales(built("Llama"), by_head, of_linears)
    scales = kv_scales(model)
    way: dict = {} if compiles else {"num_beams": 2}
    want = generated(model, Rounded(model.config, dtype, scales), **way)
    if compiles:
        torch._dynamo.reset()
        how = CompileConfig(backend="tilewright", mode=None, options={"inner": "eager"})
        how._compile_all_devices = True
        way = {"compile_config": how}
    cache = PagedCache(model.config, page_size=PAGE, dtype=dtype, scales=scales)
    assert torch.equal(generated(model, cache, **way), want)
    assert all(pool.dtype == dtype for pool in cache._pools())
    if compiles:
        name = str(dtype).removeprefix("torch.")
        found = [(match.op, match.shapes["cache"]) for match in reports()[-1].matches]
        assert found.count(("cache_attention", name)) == 2
        assert sum(op == "fused_qkv_paged" for op, _ in found) == 2


def test_eight_bits_without_scales_saturate():
    model = built("Llama")
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1e4)
    cache = PagedCache(model.config, page_size=PAGE, dtype=E4M3)
    generated(model, cache)
    pool = cache.paged[0].values.float()
    assert pool.isfinite().all()
    assert pool.abs().amax() == 448


def test_scales_are_read_where_checkpoints_keep_them():
    with pytest.raises(
        ValueError, match="expected an attention module with k_scale and v_scale, found none"
    ):
        kv_scales(built("Llama"))
    scales = kv_scales(with_scales(built("Llama")))
    assert {number: float(k) for number, (k, _) in scales.items()} == pytest.approx(
        {0: 0.02, 1: 0.04}
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": torch.int8}, "dtype: expected None or one of"),
        ({"scales": {}}, "scales: expected"),
    ],
)
def test_what_pools_cannot_be_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        PagedCache(built("Llama").config, **given)
