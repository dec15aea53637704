"""Random settings of the attention ops over their whole option space, for hypothesis."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.ops.qkv.plain import NUMBERS
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv.samples import AttentionCase

LAYOUTS = ("page_major", "head_major", "static_cache", "vllm_pair", "max_pair")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def bounded(examples):
    """Returns hypothesis settings that draw `examples` examples, the same ones in each run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def attention_cases(draw, kernels=False):
    """Draws an AttentionCase of `fused_qkv_paged`. With `kernels`, draws only sizes that emitted
    kernels support."""
    options = {**draw(shapes(kernels)), **draw(dtypes(kernels))}
    options |= draw(weights(options))
    options |= draw(norms(options)) | draw(ropes(options)) | draw(caches(options))
    options |= draw(input_norms(options))
    options |= draw(addresses(options))
    alone = options.get("norm_width") != "row" and not options.get("v_norm")
    if options["num_heads"] % 2 == 0 and alone:
        options["gate_run"] = draw(st.sampled_from((0, 0, 1, options["num_heads"] // 2)))
    if options["slots"] in ("flat", "block_table", "ragged"):
        divisors = [n for n in range(1, 5) if options["num_tokens"] % n == 0]
        options["tokens_per_row"] = draw(st.sampled_from(divisors))
    return AttentionCase("random", **options)


@st.composite
def shapes(draw, kernels):
    num_kv_heads = draw(st.integers(1, 3))
    return {
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from((16, 32, 64) if kernels else (8, 16, 24, 32))),
        "hidden": draw(st.sampled_from((64, 128, 192) if kernels else (16, 48, 64, 136))),
        "kv_repeat": draw(st.sampled_from((1, 1, 2, 3))),
        "bias": draw(st.booleans()),
        "delta": draw(st.booleans()),
        "clip": draw(st.sampled_from((0.0, 0.0, 0.5))),
        "writes_v": draw(st.sampled_from((True, True, True, False))),
    }


@st.composite
def dtypes(draw, kernels):
    dtype = draw(st.sampled_from(FLOATS if kernels else (*FLOATS, torch.float64)))
    cache = draw(st.sampled_from((None, *(() if dtype == torch.float64 else FP8))))
    return {
        "dtype": dtype,
        "cache_dtype": cache,
        "cache_scale": draw(st.sampled_from(("none", "scalar", "one", "head"))),
        "cache_scale_multiplies": draw(st.booleans()),
    }


@st.composite
def weights(draw, chosen):
    formats = ["dense", "dense", "dense", "int8", "fp8", "fp8", "int4_k", "int4_n", *NUMBERS]
    weight_format = draw(st.sampled_from(formats))
    if weight_format == "dense":
        projections = ["separate", "packed", "grouped", "n_major"]
        if chosen["num_heads"] == chosen["num_kv_heads"]:
            projections += ["per_head"] * 3
        return {"projection": draw(st.sampled_from(projections))}
    options = {
        "weight_format": weight_format,
        "projection": draw(st.sampled_from(("separate", "packed"))),
        "transposed": draw(st.booleans()),
    }
    options |= draw(blocks(weight_format, chosen))
    options["factor"] = draw(st.booleans())
    if weight_format == "fp8" and chosen["dtype"] != torch.float64:
        options["codes"] = draw(st.booleans())
        options["x_scale"] = draw(st.sampled_from(("none", "tensor", "token", "block")))
    return options


@st.composite
def blocks(draw, weight_format, chosen):
    """Draws the options of a quantised weight's scales, zeros and words."""
    hidden, rows = chosen["hidden"], chosen["num_heads"] * chosen["head_dim"]
    groups = [g for g in (8, 16, 32, 64, 128, hidden) if hidden % g == 0]
    if weight_format in ("int8", "fp8"):
        columns = draw(st.sampled_from((*groups, 40, 128)))
        options = {"scale_block": (draw(st.sampled_from((1, 8, 20, 128, rows))), columns)}
        if weight_format == "int8":
            options["zeros"] = draw(st.sampled_from(("none", "float", "int")))
            options["zero_point"] = draw(st.integers(-3, 3))
        return options
    if weight_format in NUMBERS:
        dtypes = {"nvfp4": (None, torch.float32), "mxfp4": (None,)}
        return {
            "words": torch.uint8,
            "nibble_order": () if weight_format in dtypes else (1, 0),
            "scale_block": (1, draw(st.sampled_from(groups))),
            "scale_dtype": draw(st.sampled_from(dtypes.get(weight_format, (torch.float32,)))),
        }
    words = draw(st.sampled_from((torch.uint8, torch.int32)))
    zeros = draw(st.sampled_from(("none", "float", "int", "packed")))
    orders = [(), AWQ_ORDER] if words == torch.int32 else [(), (1, 0)]
    packed_apart = zeros == "packed" and words == torch.uint8
    rows = 1 if zeros == "packed" else draw(st.sampled_from((1, 1, 8)))
    return {
        "words": words,
        "zeros": zeros,
        "nibble_order": () if packed_apart else draw(st.sampled_from(orders)),
        "zero_point": draw(st.integers(0, 8)),
        "scale_block": (rows, draw(st.sampled_from(groups))),
    }


@st.composite
def norms(draw, chosen):
    kind = draw(st.sampled_from(("none", "none", "weights", "weightless")))
    if kind == "none":
        return {}
    return {
        "qk_norm": kind == "weights",
        "weightless_norm": kind == "weightless" or draw(st.booleans()),
        "normed": draw(st.sampled_from(("qk", "q", "k"))),
        "norm_kind": draw(st.sampled_from(("rms", "layer"))),
        "norm_width": draw(st.sampled_from(("head", "head", "row"))),
        "norm_per_head": draw(st.booleans()),
        "norm_after_rope": draw(st.booleans()),
        "norm_offset": draw(st.sampled_from((0.0, 1.0))),
        "norm_bias": draw(st.booleans()),
        "v_norm": draw(st.booleans()),
    }


@st.composite
def input_norms(draw, chosen):
    if chosen.get("codes"):
        return {}
    return {
        "input_norm": draw(
            st.sampled_from(
                ("", "", "", "rms", "weightless", "layer", "layer_unbiased", "layer_bare")
            )
        ),
        "input_norm_offset": draw(st.sampled_from((0.0, 1.0))),
    }


@st.composite
def ropes(draw, chosen):
    styles = ("none", "half", "interleaved", "interleaved_to_half")
    style = draw(st.sampled_from(styles))
    if style == "none":
        return {}
    head_dim = chosen["head_dim"]
    table = draw(st.sampled_from((torch.float32, chosen["dtype"])))
    return {
        "rope_style": style,
        "rotary_dim": draw(st.sampled_from((2, head_dim // 2, head_dim))),
        "table_width": draw(st.sampled_from(("full", "half"))),
        "table_dtype": table,
    }


@st.composite
def caches(draw, chosen):
    return {
        "layout": draw(st.sampled_from(LAYOUTS)),
        "page_size": draw(st.sampled_from((1, 4, 8, 16))),
    }


@st.composite
def addresses(draw, chosen):
    form = draw(st.sampled_from(("flat", "per_sequence", "block_table", "ragged")))
    integer = st.sampled_from((torch.int32, torch.int64))
    if form in ("block_table", "ragged"):
        return draw(tables(form, chosen["page_size"]))
    options = {"slots": form, "slot_dtype": draw(integer)}
    options["num_pages"] = draw(st.integers(1, 4))
    options["indexing"] = draw(st.sampled_from(("paged", "torch")))
    limit = chosen["page_size"]
    if form == "flat":
        limit *= options["num_pages"]
    count = draw(st.integers(0, min(limit, 9)))
    # A slot that counts from the end may equal the slot of another token, which is not allowed. A
    # skipped token has no slot.
    most = count if options["indexing"] == "paged" else 0
    options["skipped"] = draw(st.integers(0, min(most, 3)))
    repeats = options["num_pages"] if form == "per_sequence" else 1
    return {**options, "num_tokens": count * repeats}


@st.composite
def tables(draw, form, page_size):
    sequences = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=4))
    new, cached = (tuple(pair[i] for pair in sequences) for i in range(2))
    pages = sum(-(-(n + c) // page_size) for n, c in sequences)
    dtypes = (torch.int32, torch.int64)
    indexing = "paged" if form == "ragged" else draw(st.sampled_from(("paged", "torch")))
    most = sum(new) if (form, indexing) == ("block_table", "paged") else 0
    return {
        "slots": form,
        "slot_dtype": draw(st.sampled_from((*dtypes, *([torch.uint32] * (form == "ragged"))))),
        "indexing": indexing,
        "new_tokens": new,
        "cached_tokens": cached,
        "num_tokens": sum(new),
        "num_pages": pages + draw(st.integers(1, 2)),
        "skipped": draw(st.integers(0, min(most, 2))),
    }
