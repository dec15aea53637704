"""Reads the rows that `predictions.py` compares with the cost model, and builds their steps.

A row is an entry of a results file of whole forward passes in CUDA graphs. Its model is built from
its configuration on the meta device, without weights and GPU. Equal layers are built once or twice,
and counted as often as the row's model has them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import steps_models
import torch
import transformers
from decode_cache import generate_inputs, layer_widths, new_cache, rewind, widths
from end_to_end_models import MODELS, config_of
from quantised_step import CONFIGS
from steps_models import Case
from transformers import StaticCache

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler import lower
from tilewright.compiler.report.step import Step, step_of
from tilewright.tools.models.checkpoint import model_of

RESULTS = Path(__file__).resolve().parent / "results"
QUANTISED = "quantised_step.json"
#: The file with the rows of `steps.py`, whose models are keys of `steps_models.WIDTHS`.
STEPS = "steps.json"
#: CAPACITY is the capacity of a cache in tokens. The next constant is the number of tokens in the
#: cache before a decode step. Both are as in `end_to_end.py`.
CAPACITY = 2048
START = 1000
#: The number of layers that are built. The first layers may differ from the layers after them.
BUILT = 4

#: For each chip, by its name in results files, the rate of a copy in bytes per second. The rate of
#: the H100 is from docs/quantised-performance.md. None stands for the target's own rate.
COPY_RATES = {"NVIDIA H200": None, "NVIDIA H100 80GB HBM3": 3.0e12}

#: The modules that the makers of a format leave dense. The last one has columns that are not whole
#: blocks.
_LEFT_DENSE = ["lm_head", "gate", "model.layers.0.mlp.down_proj"]
#: For each format other than those of compressed-tensors, its `quantization_config`.
_STATED: dict[str, dict[str, Any]] = {
    "finegrained-fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "mxfp4-gpu": {"quant_method": "mxfp4"},
    "bitsandbytes-nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    },
}
#: For each format of compressed-tensors, the name of its scheme and the name of its packing of
#: codes.
_SCHEMES = {
    "ct-w4a16": ("W4A16", "pack-quantized"),
    "ct-fp8-dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "ct-fp8-block": ("FP8_BLOCK", "float-quantized"),
    "ct-nvfp4a16": ("NVFP4A16", "nvfp4-pack-quantized"),
    "ct-mxfp4a16": ("MXFP4A16", "mxfp4-pack-quantized"),
}


@dataclass(frozen=True)
class Row:
    """One measured forward pass.

    source: the results file.
    model: a key of `end_to_end_models.MODELS`, of `quantised_step.CONFIGS` or of
        `steps_models.WIDTHS`.
    form: the format of the weights, "bf16" or a format of `quantised_step.py`.
    tokens: the number of new tokens of each sequence.
    masked: whether a mask was given.
    us: the measured time in microseconds.
    start: the number of tokens in the cache before the pass.
    capacity: the capacity of the cache.
    """

    source: str
    gpu: str
    model: str
    form: str
    layers: int
    batch: int
    tokens: int
    masked: bool
    us: float
    start: int = START
    capacity: int = CAPACITY

    @property
    def present(self) -> int:
        """The number of tokens of each sequence in the cache when attention reads it."""
        return self.start + 1 if self.tokens == 1 else self.tokens

    @property
    def case(self) -> str:
        kinds = [f"{self.start} present"] * (self.tokens == 1 and self.start != START)
        kinds += ["no mask"] * (not self.masked)
        return ", ".join([f"{self.batch} x {self.tokens}", *kinds])

    @property
    def target(self) -> Target:
        """The chip on which the row was measured, at its own memory rate."""
        sm90, rate = get_target("sm90"), COPY_RATES[self.gpu]
        return sm90 if rate is None else replace(sm90, hbm_bytes_per_s=rate)


def measured_rows() -> list[Row]:
    """Returns the rows of the results files of steps. If several rows have equal model, form and
    case, only the first is returned."""
    rows = [*_dense_rows(), *_quantised_rows(), *_step_rows()]
    first = {(r.source, r.model, r.form, r.case): r for r in reversed(rows)}
    return [row for row in rows if row in first.values()]


def _dense_rows() -> Iterator[Row]:
    names = {model.title: name for name, model in MODELS.items()}
    for path in sorted(RESULTS.glob("*_end_to_end.json")):
        kept = json.loads(path.read_text("utf-8"))
        for r in kept["rows"]:
            if "present" in r:
                continue  # prompts after cached tokens are not predicted
            case = r["batch"], r["tokens"], r["kind"] != "nomask"
            yield Row(
                path.name, kept["gpu"], names[r["model"]], "bf16", r["layers"], *case,
                r["tilewright"],
            )  # fmt: skip


def _quantised_rows() -> Iterator[Row]:
    """Yields the rows of quantised models, and of the dense model that was measured next to each
    format."""
    kept = json.loads((RESULTS / QUANTISED).read_text("utf-8"))
    for r in kept["rows"]:
        batch, tokens = map(int, r["case"].split("x"))
        layers = CONFIGS[r["model"]][1]["num_hidden_layers"]
        start = START if tokens == 1 else 0
        for variant, form in (("tilewright", r["format"]), ("bf16", "bf16")):
            if r.get(variant):
                sizes = layers, batch, tokens, True, r[variant], start
                yield Row(QUANTISED, kept["gpu"], r["model"], form, *sizes)


def _step_rows() -> Iterator[Row]:
    kept = json.loads((RESULTS / STEPS).read_text("utf-8"))
    for r in kept["rows"]:
        if "tilewright" in r:
            case = Case(r["batch"], r["tokens"], r["start"], r["capacity"])
            yield row_of(r["model"], case, kept["gpu"], r["tilewright"])


def row_of(model: str, case: Case, gpu: str, us: float) -> Row:
    """Returns the row of a case of `steps_models.py`."""
    layers = steps_models.WIDTHS[model].layers
    size, room = (case.batch, case.tokens), (case.start, case.capacity)
    return Row(STEPS, gpu, model, "bf16", layers, *size, True, us, *room)


# --- steps ----------------------------------------------------------------------------------------


def step_behind(row: Row) -> Step:
    """Returns the modelled step of a row on sm90, with only the layers that are built. Raises
    ImportError if the library of a format is not installed."""
    torch._dynamo.reset()
    if row.source == STEPS:
        model = steps_models.build(row.model, "meta")
        call = _generated(model, row, layer_widths(model))
    elif row.source == QUANTISED:
        call = _generated(_coded(row), row)
    else:
        call = _inputs(_dense(row), row)
    return step_of(lower(*call, target="sm90"), row.present, row.target)


def counts(step: Step, layers: int) -> list[int]:
    """Returns how often each part of a step runs in a model of `layers` layers."""
    alike: Sequence[str] = max((layer.scopes for layer in step.layers if layer.scope), key=len)
    built = sum(len(layer.scopes) for layer in step.layers if layer.scope)
    return [1 + (layers - built) * (part.scope == alike[0]) for part in step.parts]


def _dense(row: Row) -> Any:
    known = MODELS[row.model]
    config = config_of(known, min(row.layers, BUILT))
    experts = {"experts_implementation": "grouped_mm"} if known.experts > 1 else {}
    with torch.device("meta"):
        made = getattr(transformers, known.model_class)._from_config(
            config, dtype=torch.bfloat16, **experts
        )
    return made.eval().requires_grad_(False)


def _coded(row: Row) -> Any:
    """Returns the model of a row of `quantised_step.py`, with the layers that are built."""
    made, fields = CONFIGS[row.model]
    config = made(**fields | {"num_hidden_layers": min(row.layers, BUILT)})
    data = config.to_dict() | {"dtype": "bfloat16"}
    data["architectures"] = [made.__name__.replace("Config", "ForCausalLM")]
    if row.form != "bf16":
        data["quantization_config"] = _stated(row.form)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(data, default=str), "utf-8")
        return model_of(path.parent)


def _stated(form: str) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint in a format."""
    if form in _STATED:
        return _STATED[form] | {"modules_to_not_convert": _LEFT_DENSE}
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    name, packed = _SCHEMES[form]
    scheme = preset_name_to_scheme(name, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=packed,
        quantization_status="compressed",
    )
    return json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors"}


def _inputs(model: Any, row: Row) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the model and the arguments of a row's step, on the meta device."""
    size, capacity = (row.batch, row.tokens), max(CAPACITY, row.tokens)
    with torch.device("meta"):
        cache = StaticCache(config=model.config, max_cache_len=capacity)
        heads, *columns = widths(model.config)
        for layer in cache.layers:
            parts = (torch.empty(row.batch, heads, 0, c, dtype=model.dtype) for c in columns)
            layer.lazy_initialization(*parts)
        ids = torch.zeros(size, dtype=torch.int64)
        given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if row.masked:
            seen = row.batch, 1, row.tokens, capacity
            given |= {"attention_mask": torch.ones(seen, dtype=torch.bool), "position_ids": ids}
    return model, (ids,), given


def _generated(
    model: Any, row: Row, layers: Sequence[tuple[int, int, int]] = ()
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the model and the arguments that `generate()` passes, on the meta device.

    `layers` gives the extents of each layer's cache, as for `new_cache`. A mask depends only on the
    lengths of a cache, so it is made on the CPU with a cache of one column.
    """
    cache = new_cache(model, row.batch, row.capacity, layers)
    thin = StaticCache(config=model.config, max_cache_len=row.capacity)
    column = torch.empty((row.batch, 1, 0, 1), dtype=model.dtype)
    for layer in thin.layers:
        layer.lazy_initialization(column, column)
    ids = torch.zeros((row.batch, row.tokens), dtype=torch.int64)
    given = generate_inputs(model, thin, ids, row.start, padded=False)
    rewind(cache, row.start)
    cached = {"past_key_values": cache, "use_cache": True}
    return model, (ids.to("meta"),), cached | _on_meta(given)


def _on_meta(value: Any) -> Any:
    """Returns the value with its tensors moved to the meta device."""
    if isinstance(value, dict):
        return {name: _on_meta(one) for name, one in value.items()}
    return value.to("meta") if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    sys.exit("run predictions.py")
