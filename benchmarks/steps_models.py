"""Defines the models and cases of `steps.py`. The models have published widths, few layers, a small
vocabulary and random weights.

HELD_OUT and HELD_OUT_CASES name the rows to which no constant of the cost model may be fitted.
Both were written down before any row was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from steps_adapters import QKV, Adapters, with_adapters

VOCABULARY = 8192
#: The names of `Widths.dims` in most config classes.
_COLUMNS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Widths:
    """The published widths of a model.

    family: the prefix of its classes in transformers, such as "Qwen3" for Qwen3Config.
    dims: the hidden size, the MLP size, the heads, and the heads of keys and values.
    fields: further fields of its config.
    layers: the number of layers that are built. There is at least one layer of each kind, and the
        weights of all layers together exceed the L2 cache.
    config: the family of its config class, if it differs from `family`.
    adapters: its adapters (LoRA), if it has any.
    """

    family: str
    dims: tuple[int, int, int, int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    config: str = ""
    adapters: Adapters | None = None


def _rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _kinds(*kinds: str, window: int) -> dict[str, Any]:
    """Returns the fields that give each layer its kind of attention."""
    return {"layer_types": [f"{kind}_attention" for kind in kinds], "sliding_window": window}


def _experts(names: str, experts: int, each: int, width: int, **more: Any) -> dict[str, Any]:
    """Returns the fields of a mixture.

    `names` has the names of the fields for the number of experts, for the number of experts of a
    token, and for the width of an expert.
    """
    return dict(zip(names.split(), (experts, each, width), strict=True)) | more


_QWEN = "num_experts num_experts_per_tok moe_intermediate_size"
_LOCAL = "num_local_experts num_experts_per_tok intermediate_size"
_ROUTED = "n_routed_experts num_experts_per_tok moe_intermediate_size"
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_FIRST = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_TWO = ("sliding", "full")
_BOTH = {"sliding_attention": _rope(), "full_attention": _rope(1000000.0)}

WIDTHS: dict[str, Widths] = {
    # Dense models with fewer heads of keys and values than of queries.
    "llama3-8b": Widths("Llama", (4096, 14336, 32, 8), {"head_dim": 128}),
    "qwen3-8b": Widths("Qwen3", (4096, 12288, 32, 8), {"head_dim": 128}),
    "qwen3-32b": Widths("Qwen3", (5120, 25600, 64, 8), {"head_dim": 128}),
    "gemma2-9b": Widths(
        "Gemma2", (3584, 14336, 16, 8), {"head_dim": 256, **_kinds(*_TWO, window=4096)}
    ),
    "gemma3-12b": Widths(
        "Gemma3",
        (3840, 15360, 16, 8),
        {"head_dim": 256, "rope_parameters": _BOTH, **_kinds(*_TWO, window=1024)},
        config="Gemma3Text",
    ),
    "llama3-70b": Widths("Llama", (8192, 28672, 64, 8), {"head_dim": 128}),
    "mistral-small-24b": Widths(
        "Mistral", (5120, 32768, 32, 8), {"head_dim": 128, "sliding_window": None}
    ),
    "mistral-7b": Widths(
        "Mistral", (4096, 14336, 32, 8), {"head_dim": 128, "sliding_window": None}
    ),
    "llama3.2-1b": Widths("Llama", (2048, 8192, 32, 8), {"head_dim": 64}),
    "qwen3-0.6b": Widths("Qwen3", (1024, 3072, 16, 8), {"head_dim": 128}, layers=4),
    "qwen2.5-7b": Widths("Qwen2", (3584, 18944, 28, 4)),
    "phi-4": Widths("Phi3", (5120, 17920, 40, 10)),
    "phi-3-mini": Widths("Phi3", (3072, 8192, 32, 32)),
    "olmo2-7b": Widths("Olmo2", (4096, 11008, 32, 32)),
    "granite-3.3-8b": Widths("Granite", (4096, 12800, 32, 8)),
    "smollm3-3b": Widths("SmolLM3", (2048, 11008, 16, 4), layers=4),
    "exaone4-32b": Widths(
        "Exaone4", (5120, 27392, 40, 8), {"head_dim": 128, **_kinds(*_TWO, window=4096)}
    ),
    "glm4-9b": Widths(
        "Glm4",
        (4096, 13696, 32, 2),
        {"head_dim": 128, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    ),
    "seed-oss-36b": Widths("SeedOss", (5120, 27648, 80, 8), {"head_dim": 128}),
    # Dense models with layer norms, biases, or attention parallel to the MLP.
    "starcoder2-7b": Widths("Starcoder2", (4608, 18432, 36, 4), {"sliding_window": None}),
    "command-r": Widths("Cohere", (8192, 22528, 64, 64)),
    "command-r7b": Widths(
        "Cohere2", (4096, 14336, 32, 8), {"head_dim": 128, **_kinds(*_TWO, window=4096)}
    ),
    "phi-2": Widths(
        "Phi", (2560, 10240, 32, 32), {"rope_parameters": _rope(partial_rotary_factor=0.4)}
    ),
    "gpt-neox-20b": Widths(
        "GPTNeoX",
        (6144, 24576, 64, 64),
        {"rope_parameters": _rope(partial_rotary_factor=0.25)},
    ),
    "nemotron-15b": Widths("Nemotron", (6144, 24576, 48, 8), {"head_dim": 128}),
    # Models with mixtures of experts.
    "mixtral-8x7b": Widths(
        "Mixtral",
        (4096, 14336, 32, 8),
        _experts(_LOCAL, 8, 2, 14336, head_dim=128, sliding_window=None),
    ),
    "qwen3-30b-a3b": Widths(
        "Qwen3Moe",
        (2048, 6144, 32, 4),
        _experts(_QWEN, 128, 8, 768, head_dim=128, norm_topk_prob=True),
    ),
    "gpt-oss-20b": Widths(
        "GptOss",
        (2880, 2880, 64, 8),
        _experts(_LOCAL, 32, 4, 2880, head_dim=64, rope_parameters=_rope(150000.0))
        | _kinds(*_TWO, window=128),
    ),
    "glm-4.5-air": Widths(
        "Glm4Moe",
        (4096, 10944, 96, 8),
        _experts(_ROUTED, 128, 8, 1408, n_shared_experts=1, head_dim=128, norm_topk_prob=True)
        | _FIRST
        | {"attention_bias": True, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    ),
    "olmoe-7b": Widths("Olmoe", (2048, 1024, 16, 16), {"num_experts": 64}),
    "granite-moe-3b": Widths(
        "GraniteMoe", (1536, 512, 24, 8), _experts(_LOCAL, 40, 8, 512), layers=4
    ),
    "ernie4.5-21b": Widths(
        "Ernie4_5_Moe",
        (2560, 12288, 20, 4),
        {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
        | {"moe_num_shared_experts": 2, "head_dim": 128},
    ),
    "dots1": Widths(
        "Dots1",
        (4096, 10944, 32, 32),
        _experts(_ROUTED, 128, 6, 1408, n_shared_experts=2, head_dim=128, norm_topk_prob=True)
        | _FIRST,
    ),
    "hunyuan-a13b": Widths(
        "HunYuanMoEV1",
        (4096, 3072, 32, 8),
        {"num_experts": 64, "moe_topk": 8, "head_dim": 128},
        layers=1,
    ),
    "qwen1.5-moe": Widths(
        "Qwen2Moe",
        (2048, 5632, 16, 16),
        _experts(_QWEN, 60, 4, 1408, shared_expert_intermediate_size=5632),
    ),
    # Models with latent attention.
    "deepseek-v2-lite": Widths(
        "DeepseekV2",
        (2048, 10944, 16, 16),
        _experts(_ROUTED, 64, 6, 1408, n_shared_experts=2, q_lora_rank=None) | _LATENT | _FIRST,
    ),
    "deepseek-v3-dense": Widths(
        "DeepseekV3", (7168, 18432, 128, 128), {"q_lora_rank": 1536, **_LATENT}
    ),
}


def _adapted(name: str, targets: tuple[str, ...] | str, rank: int = 16, several: int = 0) -> Widths:
    """Returns the widths of a model that is already in WIDTHS, with adapters."""
    return replace(WIDTHS[name], adapters=Adapters(rank, targets, several))


#: The linears of attention, which most users of PEFT give adapters.
_ATTENTION = (*QKV, "o_proj")
#: A name with "lora" stands for one adapter, a name with "loras" for eight adapters in one batch.
WIDTHS |= {
    "qwen3-8b-lora": _adapted("qwen3-8b", _ATTENTION),
    "llama3-8b-lora": _adapted("llama3-8b", _ATTENTION),
    "mistral-7b-lora": _adapted("mistral-7b", _ATTENTION),
    "llama3-8b-lora-all": _adapted("llama3-8b", "all-linear"),
    "gemma2-9b-lora-all": _adapted("gemma2-9b", "all-linear"),
    "llama3-8b-loras": _adapted("llama3-8b", QKV, several=8),
    "qwen3-8b-loras": _adapted("qwen3-8b", QKV, several=8),
    "qwen3-30b-a3b-lora": _adapted("qwen3-30b-a3b", _ATTENTION),
    "llama3.2-1b-lora-qv": _adapted("llama3.2-1b", ("q_proj", "v_proj"), rank=8),
}

#: Models whose rows are all held out. They were chosen before any row was measured.
HELD_OUT = frozenset(
    {
        "qwen3-32b",
        "gemma3-12b",
        "mistral-small-24b",
        "llama3.2-1b",
        "phi-3-mini",
        "granite-3.3-8b",
        "exaone4-32b",
        "seed-oss-36b",
        "command-r7b",
        "phi-2",
        "gpt-neox-20b",
        "qwen3-30b-a3b",
        "glm-4.5-air",
        "granite-moe-3b",
        "dots1",
        "qwen1.5-moe",
        "deepseek-v3-dense",
        "qwen3-8b-lora",
        "mistral-7b-lora",
        "llama3.2-1b-lora-qv",
        "gemma2-9b-lora-all",
        "qwen3-8b-loras",
        "qwen3-30b-a3b-lora",
    }
)


@dataclass(frozen=True)
class Case:
    """A pass over `tokens` new tokens of each of `batch` sequences. The cache holds `start` tokens
    of each sequence, and has room for `capacity`."""

    batch: int
    tokens: int
    start: int
    capacity: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


#: Cases whose rows are held out for all models: decode steps of four sequences, and prompts of 256
#: tokens. They were chosen before any row was measured.
HELD_OUT_CASES = frozenset({(4, 1), (1, 256)})


def is_held_out(model: str, batch: int, tokens: int) -> bool:
    """Whether a row is held out."""
    return model in HELD_OUT or (batch, tokens) in HELD_OUT_CASES


def _decode(batch: int, *starts: int) -> list[Case]:
    """Returns decode steps of one batch size. They share a cache and, in models without windows,
    all kernels."""
    capacity = 4096 if max(starts) > 2000 else 2048
    return [Case(batch, 1, start, capacity) for start in starts]


def _prompt(batch: int, tokens: int) -> list[Case]:
    return [Case(batch, tokens, 0, 2048)]


#: Lists of cases. The first model has the cases of the first list, the second model those of the
#: second list, and so on in turn. Each list has every kind of case, so that a run that ends early
#: is still balanced.
PLANS: tuple[list[Case], ...] = (
    [*_decode(1, 1000, 4000), *_prompt(1, 1024), *_decode(128, 200, 1000), *_decode(16, 200)],
    [*_decode(64, 200, 1000), *_prompt(4, 1024), *_decode(4, 200, 4000), *_decode(1, 200)],
    [*_decode(16, 1000, 4000), *_prompt(1, 256), *_decode(1, 200, 4000), *_decode(64, 1000)],
    [*_decode(4, 200, 1000), *_prompt(1, 1024), *_decode(64, 1000, 4000), *_prompt(4, 1024)],
)
#: The cases of models with adapters.
ADAPTED_PLAN = [
    *_decode(1, 1000), *_prompt(1, 1024), *_decode(16, 1000), *_decode(64, 1000),
    *_prompt(1, 256), *_prompt(8, 1024),
]  # fmt: skip
#: The largest number of bytes of a model's cache. A larger batch is replaced by the largest batch
#: that fits.
MOST_CACHE = 2.5e9


def cases_of(name: str, tiny: bool = False) -> list[Case]:
    """Returns the cases of a model. Cases that matter most to a balanced sample come first. With
    `tiny`, they have an eighth of the tokens."""
    number = list(WIDTHS).index(name)
    plan = ADAPTED_PLAN if WIDTHS[name].adapters else PLANS[number % len(PLANS)]
    cases = dict.fromkeys(_fitting(name, case) for case in plan)
    return [_smaller(case) for case in cases] if tiny else list(cases)


def _smaller(case: Case) -> Case:
    tokens = max(case.tokens // 8, 1)
    return Case(min(case.batch, 4), tokens, case.start // 8, case.capacity // 8)


def _fitting(name: str, case: Case) -> Case:
    batch = case.batch
    while batch > 1 and batch * case.capacity * token_bytes(name) > MOST_CACHE:
        batch //= 2
    return Case(batch, case.tokens, case.start, case.capacity)


def token_bytes(name: str) -> int:
    """Returns the number of bytes of a token in the caches of all layers, computed with the most
    frequent sizes of a layer's cache."""
    widths = WIDTHS[name]
    hidden, _, heads, kv_heads = widths.dims
    rank = widths.fields.get("kv_lora_rank")
    columns = 2 * kv_heads * widths.fields.get("head_dim", hidden // heads)
    if rank is not None:
        columns = rank + widths.fields["qk_rope_head_dim"]
    return 2 * columns * widths.layers


def config_of(name: str, tiny: bool = False) -> Any:
    """Returns the config of a model. With `tiny`, it has small widths, to try a benchmark on a
    CPU."""
    widths = WIDTHS[name]
    fields = dict(zip(_COLUMNS, widths.dims, strict=True)) | dict(widths.fields)
    fields |= {"num_hidden_layers": widths.layers, "vocab_size": VOCABULARY}
    fields |= {"max_position_embeddings": 8192, "pad_token_id": 0}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    if tiny:
        fields |= _tiny(fields)
    return getattr(transformers, f"{widths.config or widths.family}Config")(**fields)


def _tiny(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns small values for the fields that hold widths."""
    small: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
    small |= {"num_attention_heads": 4, "vocab_size": 256}
    kv_heads = fields["num_key_value_heads"]
    small["num_key_value_heads"] = 4 if kv_heads == fields["num_attention_heads"] else 2
    small |= {"head_dim": 32, "sliding_window": (fields.get("sliding_window") or 0) // 8 or None}
    small |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    small |= {"moe_num_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2}
    small |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
    small |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    if fields.get("q_lora_rank") is not None:
        small["q_lora_rank"] = 48
    return {name: value for name, value in small.items() if name in fields or name == "hidden_size"}


def build(name: str, device: str, tiny: bool = False) -> Any:
    """Returns the model in bfloat16, with random weights, except on the meta device."""
    config = config_of(name, tiny)
    torch.manual_seed(0)
    mixture = any("expert" in field for field in WIDTHS[name].fields)
    experts = {"experts_implementation": "grouped_mm"} if mixture else {}
    with torch.device(device):
        made = getattr(transformers, f"{WIDTHS[name].family}ForCausalLM")._from_config(
            config, dtype=torch.bfloat16, **experts
        )
    adapters = WIDTHS[name].adapters
    if adapters is not None:
        made = with_adapters(made, adapters)
    made = made.eval().requires_grad_(False)
    if device != "meta":
        _fill(made)
    return made


def _fill(model: Any) -> None:
    """Fills all parameters, because some releases of transformers leave some of them
    uninitialised."""
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.02)
