"""Tests the shipped templates: the emitted kernel and the template give the same bits in every
lowering."""

import importlib
from dataclasses import replace

import pytest
import torch

from tests.codegen.qkv.test_templates import choice_of
from tests.interpreted import Interpreter
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.qkv.kernels import SwappedConfig, TiledConfig
from tilewright.codegen.qkv.plan import library_choice
from tilewright.codegen.targets import SM100
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.choices import choice_steps
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import Launch, drive

TOKENS = 21
PLAIN = AttentionCase(
    "plain",
    num_tokens=TOKENS,
    hidden=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_pages=3,
    page_size=16,
    skipped=1,
    table_dtype=torch.bfloat16,
    indexing="torch",
    projection="packed",
)
FULL = replace(PLAIN, indexing="paged", rope_style="half", rotary_dim=16, bias=True, qk_norm=True)
CASES = {
    "plain": replace(PLAIN, indexing="paged"),
    "full": FULL,
    "interleaved": replace(
        PLAIN, rope_style="interleaved", rotary_dim=32, table_dtype=torch.float32
    ),
    # There are two sequences. The second begins in the middle of a page and fills the next page.
    "options": replace(
        FULL,
        rope_style="interleaved_to_half",
        kv_repeat=2,
        clip=0.5,
        norm_kind="layer",
        norm_after_rope=True,
        norm_offset=1.0,
        cache_scale="head",
        slots="ragged",
        skipped=0,
        new_tokens=(1, TOKENS - 1),
        cached_tokens=(15, 12),
    ),
}
WRITTEN = ("q_out_ptr", "k_cache_ptr", "v_cache_ptr", "workspace_ptr", "counters_ptr")
CONFIGS = {
    "tiled": TiledConfig(16, 1, 32, 4, 2, group_m=2, persistent=True, flatten=True),
    "swapped": SwappedConfig(16, 16, 32, 4, 2, split_k=2),
}


def launch_of(kind, case):
    """Returns the last launch of a lowering, without performing it."""
    a, machine = qkv_cache.OP.sample_inputs(case), Interpreter(replace(SM100, num_sms=2))
    machine.runs = False
    call = prepare(a)
    if kind == "epilogue":
        choice = library_choice(call.problem, TOKENS, SM100, call.rows is not None, None)
    else:
        choice = choice_of(a, CONFIGS[kind])
    steps = drive(choice_steps(call, choice, machine.target), machine).steps
    return [step for step, _ in steps if isinstance(step, Launch)][-1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [*CONFIGS, "epilogue"])
def test_emitted_and_template_agree(kind, case):
    launch = launch_of(kind, CASES[case])
    spec, before = launch.spec, dict(zip(dict(launch.spec.signature), launch.given, strict=True))
    template = interpret(getattr(importlib.import_module(spec.module), spec.kernel))
    outcomes = []
    for kernel, constants in ((load_interpreted(spec), {}), (template, dict(spec.constants))):
        given = before | {n: before[n].clone() for n in WRITTEN if n in before}
        kernel[tuple(launch.grid)](**given, **constants)
        outputs = [given[name] for name in WRITTEN[:3]]
        outcomes.append([out.view(torch.int16) for out in outputs])
    for emitted, expected in zip(*outcomes, strict=True):
        assert torch.equal(emitted, expected)
    assert not given["q_out_ptr"].isnan().any()
    written = (given["k_cache_ptr"] != before["k_cache_ptr"]).any(-1).sum()
    assert written >= TOKENS - CASES[case].skipped
