"""The settings of the attention ops that their tests run: together they reach every option."""

from __future__ import annotations

import torch

from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv.samples import AttentionCase

FP8 = torch.float8_e4m3fn

ATTENTION_CASES = (
    AttentionCase("plain"),
    AttentionCase("half_rope", rope_style="half", rotary_dim=32, slot_dtype=torch.int32),
    AttentionCase("half_table", rope_style="half", rotary_dim=32, table_width="half",
                  layout="head_major"),
    AttentionCase("interleaved", rope_style="interleaved", rotary_dim=32, layout="vllm_pair"),
    AttentionCase("interleaved_half_table", rope_style="interleaved", rotary_dim=32,
                  table_width="half", table_dtype=torch.bfloat16, projection="packed",
                  layout="max_pair"),
    AttentionCase("partial_rope", rope_style="half", rotary_dim=12, bias=True, skipped=2),
    AttentionCase("neox", num_kv_heads=4, projection="per_head", bias=True, rope_style="half",
                  rotary_dim=8),
    AttentionCase("static_cache", num_tokens=6, num_pages=3, layout="static_cache",
                  slots="per_sequence", indexing="torch", rope_style="half", rotary_dim=32,
                  tokens_per_row=3, qk_norm=True),
    AttentionCase("negative_wraps", indexing="torch", skipped=1, dtype=torch.float32),
    AttentionCase("no_tokens", num_tokens=0, rope_style="half", rotary_dim=32),
    AttentionCase("half_precision", dtype=torch.float16, qk_norm=True, projection="packed"),
    AttentionCase("double", dtype=torch.float64, table_dtype=torch.float64, qk_norm=True,
                  bias=True),
    AttentionCase("halves_out", rope_style="interleaved_to_half", rotary_dim=16,
                  layout="head_major"),
    AttentionCase("halves_out_half_table", rope_style="interleaved_to_half", rotary_dim=32,
                  table_width="half"),
    AttentionCase("fp8_cache", cache_dtype=FP8, rope_style="half", rotary_dim=32),
    AttentionCase("fp8_cache_scaled", cache_dtype=FP8, cache_scale="scalar", layout="vllm_pair"),
    AttentionCase("fp8_cache_multiplied", cache_dtype=torch.float8_e5m2, cache_scale="head",
                  cache_scale_multiplies=True, dtype=torch.float16, layout="head_major"),
    AttentionCase("scaled_cache", cache_scale="one", dtype=torch.float32),
    AttentionCase("block_table", num_tokens=7, slots="block_table", new_tokens=(3, 0, 4),
                  cached_tokens=(6, 2, 0), skipped=1, rope_style="half", rotary_dim=32),
    AttentionCase("block_table_of_a_model", num_tokens=4, slots="block_table", indexing="torch",
                  slot_dtype=torch.int32, new_tokens=(1, 1, 1, 1), cached_tokens=(0, 8, 3, 7),
                  layout="max_pair"),
    AttentionCase("ragged", num_tokens=11, slots="ragged", slot_dtype=torch.int32,
                  new_tokens=(0, 9, 0, 2, 0), cached_tokens=(4, 5, 0, 7, 1), layout="max_pair",
                  cache_dtype=FP8, cache_scale="one", num_pages=9),
    AttentionCase("ragged_uint32", num_tokens=3, slots="ragged", slot_dtype=torch.uint32,
                  new_tokens=(1, 2), cached_tokens=(7, 15)),
)  # fmt: skip

PROJECTION_CASES = (
    AttentionCase("grouped", projection="grouped", bias=True, rope_style="half", rotary_dim=32),
    AttentionCase("n_major", projection="n_major", bias=True, head_dim=16),
    AttentionCase("kv_repeat", kv_repeat=2, bias=True, layout="vllm_pair"),
    AttentionCase("clip", clip=0.7, projection="packed", bias=True, rope_style="half",
                  rotary_dim=32),
    AttentionCase("delta", delta=True, bias=True, clip=1.5, qk_norm=True, rope_style="half",
                  rotary_dim=16, num_kv_heads=4),
    AttentionCase("delta_grouped", delta=True, projection="grouped", rope_style="interleaved",
                  rotary_dim=32),
    AttentionCase("delta_int8", delta=True, weight_format="int8", scale_block=(1, 64)),
    AttentionCase("gates", gate_run=1, qk_norm=True, norm_offset=1.0, rope_style="half",
                  rotary_dim=16, clip=1.5),
    AttentionCase("gates_behind", gate_run=2, num_kv_heads=1, bias=True, weightless_norm=True,
                  norm_after_rope=True, rope_style="interleaved", rotary_dim=32, num_tokens=1),
    AttentionCase("one_query_many_heads", num_kv_heads=1, projection="packed", num_tokens=1),
)  # fmt: skip

NORM_CASES = (
    AttentionCase("q_norm_alone", qk_norm=True, normed="q", rope_style="half", rotary_dim=32),
    AttentionCase("k_norm_alone", qk_norm=True, normed="k"),
    AttentionCase("weightless_norm", weightless_norm=True, norm_after_rope=True),
    AttentionCase("norm_after_rope", qk_norm=True, norm_after_rope=True, norm_per_head=True,
                  rope_style="half", rotary_dim=32),
    AttentionCase("offset_norm", qk_norm=True, norm_offset=1.0, rope_style="half", rotary_dim=32),
    AttentionCase("layer_norm", qk_norm=True, norm_kind="layer", norm_per_head=True, bias=True),
    AttentionCase("norm_bias", qk_norm=True, norm_bias=True, norm_kind="layer", rope_style="half",
                  rotary_dim=16),
    AttentionCase("norm_bias_of_q", qk_norm=True, norm_bias=True, normed="q", norm_per_head=True,
                  norm_after_rope=True, rope_style="interleaved_to_half", rotary_dim=16),
    AttentionCase("v_norm", qk_norm=True, norm_offset=1.0, v_norm=True, rope_style="half",
                  rotary_dim=32),
    AttentionCase("v_norm_alone", v_norm=True, norm_kind="layer", bias=True),
    AttentionCase("row_norm", qk_norm=True, norm_width="row", rope_style="half", rotary_dim=32,
                  num_tokens=3),
    AttentionCase("row_layer_norm", qk_norm=True, norm_width="row", norm_kind="layer"),
    AttentionCase("weightless_row_norm", weightless_norm=True, norm_width="row", kv_repeat=2),
)  # fmt: skip

INPUT_NORM_CASES = (
    AttentionCase("input_norm", input_norm="rms", rope_style="half", rotary_dim=32),
    AttentionCase("input_norm_uneven", input_norm="rms", input_norm_offset=1.0, num_tokens=1,
                  hidden=1096, qk_norm=True, projection="packed", bias=True),
    AttentionCase("input_norm_weightless", input_norm="weightless", projection="n_major",
                  num_tokens=3),
    AttentionCase("input_norm_half", input_norm="rms", dtype=torch.float16, delta=True),
    AttentionCase("input_norm_many", input_norm="rms", num_tokens=18, num_pages=3),
    AttentionCase("input_layer_norm", input_norm="layer", num_tokens=1, hidden=1096,
                  projection="packed", bias=True, rope_style="half", rotary_dim=32),
    AttentionCase("input_layer_norm_half", input_norm="layer_bare", num_tokens=1,
                  dtype=torch.float16, projection="n_major"),
    AttentionCase("input_layer_norm_some", input_norm="layer_unbiased", input_norm_offset=1.0,
                  num_tokens=3),
    AttentionCase("input_norm_int8", input_norm="rms", weight_format="int8", scale_block=(1, 64)),
)  # fmt: skip

CODE_CASES = (
    AttentionCase("int8", weight_format="int8", scale_block=(1, 64), bias=True),
    AttentionCase("int8_zeros", weight_format="int8", scale_block=(1, 32), zeros="int",
                  zero_point=1, projection="packed", dtype=torch.float16),
    AttentionCase("int8_unsigned", weight_format="int8", words=torch.uint8, zero_point=128,
                  scale_block=(1, 64)),
    AttentionCase("int8_tensor", weight_format="int8", scale_block=(128, 64), transposed=True),
    AttentionCase("int4_k_bytes", weight_format="int4_k", words=torch.uint8, nibble_order=(1, 0),
                  scale_block=(1, 32), zero_point=8, projection="packed", rope_style="half",
                  rotary_dim=32),
    AttentionCase("gptq", weight_format="int4_k", transposed=True, scale_block=(1, 16),
                  zeros="packed", zero_point=1, projection="packed", dtype=torch.float16),
    AttentionCase("awq", weight_format="int4_n", transposed=True, nibble_order=AWQ_ORDER,
                  scale_block=(1, 32), zeros="packed", bias=True, qk_norm=True, rope_style="half",
                  rotary_dim=32),
    AttentionCase("int4_n_bytes", weight_format="int4_n", words=torch.uint8, scale_block=(1, 64),
                  zeros="float", cache_dtype=FP8, cache_scale="head"),
    AttentionCase("fp8", weight_format="fp8", scale_block=(1, 64), projection="packed"),
    AttentionCase("fp8_blocks", weight_format="fp8", scale_block=(32, 32), hidden=80, bias=True,
                  rope_style="half", rotary_dim=32),
    AttentionCase("fp8_codes", weight_format="fp8", scale_block=(128, 64), codes=True),
    AttentionCase("fp8_codes_tensor", weight_format="fp8", scale_block=(128, 64), codes=True,
                  x_scale="tensor", dtype=torch.float16),
    AttentionCase("fp8_codes_token", weight_format="fp8", scale_block=(1, 64), codes=True,
                  x_scale="token", bias=True, projection="packed"),
    AttentionCase("fp8_codes_block", weight_format="fp8", scale_block=(128, 128), num_heads=8,
                  num_kv_heads=4, hidden=256, codes=True, x_scale="block", qk_norm=True,
                  cache_dtype=FP8),
)  # fmt: skip

QKV_CASES = (
    *ATTENTION_CASES, *PROJECTION_CASES, *NORM_CASES, *INPUT_NORM_CASES, *CODE_CASES,
)  # fmt: skip
