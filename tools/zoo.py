"""Contains the built-in zoo: published configurations, each with the arguments of a step.

The models are Hugging Face classes on the meta device, and their caches are there, too. Therefore a
graph with the true sizes takes no memory. :func:`load_model` also loads the MODEL of a user's
function. transformers and peft are an optional extra, `models`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from tilewright.codegen.names import did_you_mean
from tilewright.tools.models.checkpoint import folder_of
from tilewright.tools.models.loading import LoadedModel as LoadedModel
from tilewright.tools.models.loading import ModelError as ModelError
from tilewright.tools.models.loading import load_function, place_of

if TYPE_CHECKING:  # the zoo's names are needed without torch, which is imported with a model
    import torch

FORMS = "a zoo name, module:function, file.py:function or a folder with a config.json"

PREFILL = "-prefill"
PREFILL_TOKENS = 1024
PAGED = "-paged"
LORA = "-lora"
PAGE_SIZE = 16
LORA_RANK = 16
FORMS_OF_A_MODEL = (
    "names except deepseek's may have the suffix -paged (a paged cache) or -lora (adapters on q, k "
    f"and v), and all names may have {PREFILL} ({PREFILL_TOKENS} tokens instead of one)"
)


@dataclass(frozen=True)
class ZooModel:
    """A published configuration: a transformers config class and its fields.

    `forms` has the suffixes of the other forms of the model, such as `-paged`.
    """

    config_class: str
    fields: Mapping[str, Any]
    forms: tuple[str, ...] = (PAGED, LORA)


# The names that the columns of `_DIMS` have in every config class.
_COLUMNS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_DIMS = {
    #                   vocab   hidden  mlp   layers heads kv  head  positions  eps
    "llama3-8b":        (128256, 4096, 14336,   32,   32,   8,  128,   8192,   1e-5),
    "llama3-70b":       (128256, 8192, 28672,   80,   64,   8,  128,   8192,   1e-5),
    "qwen3-8b":         (151936, 4096, 12288,   36,   32,   8,  128,  40960,   1e-6),
    "qwen3-30b-a3b":    (151936, 2048,  6144,   48,   32,   4,  128,  40960,   1e-6),
    "qwen3-235b-a22b":  (151936, 4096, 12288,   94,   64,   4,  128,  40960,   1e-6),
    "mixtral-8x7b":     ( 32000, 4096, 14336,   32,   32,   8,  128,  32768,   1e-5),
    "gpt-oss-20b":      (201088, 2880,  2880,   24,   64,   8,   64, 131072,   1e-5),
    "gpt-oss-120b":     (201088, 2880,  2880,   36,   64,   8,   64, 131072,   1e-5),
    "deepseek-v2-lite": (102400, 2048, 10944,   27,   16,  16,   64, 163840,   1e-6),
    "deepseek-v3":      (129280, 7168, 18432,   61,  128, 128,   64, 163840,   1e-6),
}  # fmt: skip


def _model(
    name: str, config_class: str, rope: Mapping[str, Any], **fields: Any
) -> tuple[str, ZooModel]:
    """Makes a model of `_DIMS`. `rope` holds the model's rope_parameters, and `fields` holds
    further fields of its config class."""
    dims = dict(zip(_COLUMNS, _DIMS[name], strict=True))
    common = {"rope_parameters": rope, "tie_word_embeddings": False}
    # Models that cache latents have no paged form and no LoRA form here.
    forms = () if "kv_lora_rank" in fields else (PAGED, LORA)
    return name, ZooModel(config_class, dims | common | fields, forms)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _yarn(theta: float, factor: float, **more: Any) -> dict[str, Any]:
    long = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0}
    known = {"original_max_position_embeddings": 4096}
    return _rope(theta) | {"rope_type": "yarn"} | long | known | more


def _qwen3_moe(name: str, inner: int) -> tuple[str, ZooModel]:
    routing = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    rope = _rope(1000000.0)
    return _model(name, "Qwen3MoeConfig", rope, **routing, moe_intermediate_size=inner)


def _gpt_oss(name: str, experts: int) -> tuple[str, ZooModel]:
    rope = _yarn(150000.0, factor=32.0, truncate=False)
    routing = {"num_local_experts": experts, "num_experts_per_tok": 4}
    return _model(name, "GptOssConfig", rope, **routing, sliding_window=128)


def _deepseek(name: str, config_class: str, mscale: float, **fields: Any) -> tuple[str, ZooModel]:
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    rope = _yarn(10000.0, factor=40.0, mscale=mscale, mscale_all_dim=mscale)
    return _model(name, config_class, rope, **latents, v_head_dim=128, **fields)


#: The values come from the published config.json of each model.
ZOO: Mapping[str, ZooModel] = MappingProxyType(dict((
    _model("llama3-8b", "LlamaConfig", _rope(500000.0)),
    _model("llama3-70b", "LlamaConfig", _rope(500000.0)),
    _model("qwen3-8b", "Qwen3Config", _rope(1000000.0)),
    _qwen3_moe("qwen3-30b-a3b", inner=768),
    _qwen3_moe("qwen3-235b-a22b", inner=1536),
    _model("mixtral-8x7b", "MixtralConfig", _rope(1000000.0), num_local_experts=8,
           num_experts_per_tok=2, sliding_window=None),
    _gpt_oss("gpt-oss-20b", experts=32),
    _gpt_oss("gpt-oss-120b", experts=128),
    _deepseek("deepseek-v2-lite", "DeepseekV2Config", mscale=0.707, moe_intermediate_size=1408,
              q_lora_rank=None, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
              n_group=1, topk_group=1, first_k_dense_replace=1),
    _deepseek("deepseek-v3", "DeepseekV3Config", mscale=1.0, moe_intermediate_size=2048,
              q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
              n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5,
              norm_topk_prob=True),
)))  # fmt: skip

#: The names that config classes use for the number of routed experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def zoo_names() -> tuple[str, ...]:
    """Returns every zoo name that `load_model` knows. Each form of each model has a name for its
    decode step and a name for its prefill."""
    return tuple(
        name + form + tokens
        for name, model in ZOO.items()
        for form in ("", *model.forms)
        for tokens in ("", PREFILL)
    )


def is_zoo_name(spec: str) -> bool:
    return spec in zoo_names()


def zoo_facts(name: str) -> dict[str, Any]:
    """Returns the row of a model in the list of models: its transformers config class and main
    sizes."""
    fields = ZOO[name].fields
    return {
        "config": ZOO[name].config_class,
        "layers": fields["num_hidden_layers"],
        "hidden": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv heads": fields["num_key_value_heads"],
        "experts": next((fields[field] for field in EXPERT_COUNTS if field in fields), 0),
    }


def load_model(spec: str, **options: Any) -> LoadedModel:
    """Loads the model that `spec` names, with its arguments.

    `spec` has one of these forms:

    - a zoo name, such as "llama3-8b" (one token per sequence, batch 1) or "llama3-8b-prefill" (1024
      tokens);
    - "module:function" or "file.py:function", where the function returns (model, args, kwargs);
    - the folder of a checkpoint, or its config.json.

    `options` go to `build_zoo_model`, to `build_checkpoint_model` or to the function. Raises
    ModelError.
    """
    if is_zoo_name(spec):
        return build_zoo_model(spec, **options)
    folder = folder_of(spec)
    if folder is not None:
        return build_checkpoint_model(folder, **options)
    place, function = place_of(spec)
    if not place or not function:
        hint = _of_the_hub(spec) or did_you_mean(spec, zoo_names())
        known = f"{', '.join(ZOO)}; {FORMS_OF_A_MODEL}"
        raise ModelError(f"{spec!r} is not {FORMS}; the zoo has {known}{hint}")
    return load_function(spec, place, function, options)


def _of_the_hub(spec: str) -> str:
    """Returns a hint on how to get a model of Hugging Face's Hub, given as `owner/model`. Returns
    "" for any other spec."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec) or Path(spec).exists():
        return ""
    folder = spec.partition("/")[2]
    return (
        f"; nothing is downloaded: `hf download {spec} config.json --local-dir {folder}` gets the "
        f"configuration, then MODEL is {folder}"
    )


def build_zoo_model(
    name: str,
    *,
    tokens: int | None = None,
    batch: int = 1,
    layers: int | None = None,
    experts: int | None = None,
    cache_length: int = 2048,
    dtype: torch.dtype | None = None,
    device: str = "meta",
) -> LoadedModel:
    """Builds a zoo model with `tokens` new tokens for each of `batch` sequences.

    `layers` and `experts` limit the number of layers, and the number of experts of each MoE layer.
    `cache_length` is the number of tokens per sequence for which the cache has room. `dtype` is
    bfloat16 by default. On devices other than meta, the weights are random. Raises ModelError.
    """
    import torch

    if name not in zoo_names():
        raise ModelError(f"{name!r} is not in the zoo: {', '.join(ZOO)}; {FORMS_OF_A_MODEL}")
    form = name.removesuffix(PREFILL)
    entry = ZOO[form.removesuffix(PAGED).removesuffix(LORA)]
    if tokens is None:
        tokens = PREFILL_TOKENS if name.endswith(PREFILL) else 1
    for option, value in (
        ("tokens", tokens),
        ("batch", batch),
        ("layers", layers),
        ("experts", experts),
    ):
        if value is not None and value < 1:
            raise ModelError(f"{name}: {option}: expected at least 1, got {value}")
    if tokens > cache_length:
        most = f"at most cache_length = {cache_length}"
        raise ModelError(f"{name}: tokens: expected {most}, got {tokens}")
    transformers = _imported("transformers", name)
    fields = dict(entry.fields)
    if layers is not None:
        fields["num_hidden_layers"] = layers
    for field in EXPERT_COUNTS if experts is not None else ():
        if field in fields:
            fields[field] = min(fields[field], experts)
    config = getattr(transformers, entry.config_class)(**fields)
    dtype = dtype or torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        model.requires_grad_(False)
        adapted = _with_adapters(name, model) if form.endswith(LORA) else model
        cache = _cache(transformers, config, form.endswith(PAGED), cache_length)
        args, kwargs = _step(model, cache, (batch, tokens))
    return LoadedModel(adapted, args, kwargs)


def build_checkpoint_model(
    folder: Path, *, tokens: int = 1, batch: int = 1, cache_length: int = 2048
) -> LoadedModel:
    """Builds the model of a checkpoint's config.json on the meta device, without loading its
    weights.

    The weights have the formats that the configuration names. The arguments have `tokens` new
    tokens for each of `batch` sequences, and a static cache. Raises ModelError.
    """
    import torch

    from tilewright.tools.models.checkpoint import model_of

    transformers = _imported("transformers", str(folder))
    model = model_of(folder)
    with torch.device("meta"):
        cache = _cache(transformers, model.config, False, cache_length)
        return LoadedModel(model, *_step(model, cache, (batch, tokens)))


def _step(
    model: Any, cache: Any, size: tuple[int, int]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Returns the arguments of a step of `size` (batch, tokens) on torch's default device.
    Allocates the tensors of the cache."""
    import torch

    from tilewright.compiler.model_cache import cache_argument

    input_ids = torch.zeros(size, dtype=torch.int64)
    kwargs = cache_argument(model, cache)
    if "cache_position" in inspect.signature(model.forward).parameters:
        # generate() passes this argument, too. Models without the parameter take the position from
        # the cache.
        kwargs["cache_position"] = torch.arange(size[1])
    config = model.config
    heads, head_dim = (getattr(config, n, None) for n in ("num_key_value_heads", "head_dim"))
    if hasattr(config, "kv_lora_rank") or heads is None or head_dim is None:
        _allocate_as_cached(cache, model, input_ids, kwargs)
    else:
        cache.early_initialization(size[0], heads, head_dim, model.dtype, input_ids.device)
    return (input_ids,), kwargs


def _cache(transformers: ModuleType, config: Any, paged: bool, length: int) -> Any:
    """Returns the model's static or paged cache, without its tensors."""
    if not paged:
        return transformers.StaticCache(config=config, max_cache_len=length)
    from tilewright.tools.paged_cache import PagedCache

    cache = PagedCache(config, PAGE_SIZE, max_cache_len=length)
    cache.reserve(length)
    return cache


class _Cached(Exception):
    """Raised with the keys and values that a layer was about to cache."""

    def __init__(self, keys: Any, values: Any) -> None:
        super().__init__()
        self.keys, self.values = keys, values


def _allocate_as_cached(cache: Any, model: Any, input_ids: Any, kwargs: Mapping[str, Any]) -> None:
    """Allocates the tensors of all layers of a cache, with the shapes that the first layer of the
    model caches.

    A layer with latent attention caches either latents and rope keys, or the keys and values that
    it computes from them. The configuration does not tell which. Therefore the model runs until its
    first layer calls `update`, and nothing is cached.
    """
    import torch

    from tilewright.compiler._compat.tracing import autocast_off_on_meta

    def update(keys: Any, values: Any, *_: Any, **__: Any) -> None:
        raise _Cached(keys, values)

    cache.update = update
    try:
        with torch.no_grad(), autocast_off_on_meta():
            model(input_ids, **kwargs)
    except _Cached as given:
        for layer in cache.layers:
            layer.lazy_initialization(given.keys[:, :, :0], given.values[:, :, :0])
    finally:
        del cache.update


def _with_adapters(name: str, model: Any) -> Any:
    """Returns the model with a LoRA adapter on each q, k and v projection, made by PEFT."""
    peft = _imported("peft", name)
    config = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=["q_proj", "k_proj", "v_proj"]
    )
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted.eval().requires_grad_(False)


def _imported(library: str, model: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        message = f"{model} is built with {library}, which does not import here ({error})"
        raise ModelError(f"{message}: pip install {library}") from error
