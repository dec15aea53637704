"""The shipped templates: emitted and template give the same bits, in every lowering."""

import importlib
from dataclasses import replace

import pytest
import torch

from tilewright.codegen.addressing import Addressing
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.problem import EpilogueProblem, HeadEpilogue, Norm, QkvProblem, Rope
from tilewright.codegen.qkv.specs import (
    EpilogueConfig,
    SwappedConfig,
    TiledConfig,
    epilogue_grid,
    epilogue_spec,
    swapped_grid,
    swapped_spec,
    tiled_grid,
    tiled_spec,
)

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 21, 64, 2, 1, 32
PAGES, PAGE_SIZE = 3, 16
ROWS = HEADS + 2 * KV_HEADS
CACHE = Operand("bf16", (PAGE_SIZE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1))
CACHES = Operand("bf16", (2 * PAGE_SIZE * KV_HEADS * DIM, 2 * KV_HEADS * DIM, DIM, 1))
SLOTS, WEIGHT = Operand("i64", (1,)), Operand("bf16", (0,))
FLAT = Addressing("flat", SLOTS)
PLAIN = HeadEpilogue(Operand("bf16"), HEADS, KV_HEADS, DIM, PAGE_SIZE, CACHE, CACHE, FLAT)
FULL = replace(
    PLAIN,
    rope=Rope("half", 16, True, *(Operand("bf16", (16,)),) * 2),
    biases=(Operand("bf16", (DIM,)),) * 3,
    norm=Norm((WEIGHT, WEIGHT)),
)
TURNED = replace(
    PLAIN,
    rope=Rope("interleaved", DIM, True, *(Operand("fp32", (DIM,)),) * 2),
    addressing=replace(FLAT, wrap_negative=True),
)
OPTIONS = replace(
    FULL,
    rope=Rope("interleaved_to_half", 16, True, *(Operand("bf16", (16,)),) * 2),
    k_cache=CACHES,
    v_cache=CACHES,
    kv_repeat=2,
    clip=0.5,
    norm=Norm((WEIGHT, WEIGHT), "layer", after_rope=True, offset=1.0),
    cache_scales=(Operand("fp32", (1,)), Operand("fp32", (0,))),
    addressing=Addressing("ragged", SLOTS, SLOTS, SLOTS, search_steps=2),
)
EPILOGUES = {"plain": PLAIN, "full": FULL, "interleaved": TURNED, "options": OPTIONS}


def case(kind, epilogue):
    """(spec, grid) of one lowering."""
    weight = Operand("bf16", (0, DIM * HIDDEN, HIDDEN, 1))
    problem = QkvProblem(HIDDEN, Operand("bf16", (HIDDEN,)), (weight,) * 3, epilogue)
    if kind == "tiled":
        config = TiledConfig(16, 1, 32, 4, 2, group_m=2, persistent=True, flatten=True)
        return tiled_spec(problem, config, "sm100"), (tiled_grid(problem, config, TOKENS, 2),)
    if kind == "swapped":
        config = SwappedConfig(16, 16, 32, 4, 2, split_k=2)
        return swapped_spec(problem, config, "sm100"), swapped_grid(problem, config, TOKENS)
    given = Operand("bf16", (ROWS * DIM, 0, DIM, 1))
    problem = EpilogueProblem(given, given, given, epilogue)
    config = EpilogueConfig(8, 1)
    spec = epilogue_spec(problem, config, "sm100")
    return spec, epilogue_grid(problem, config, TOKENS)


def arguments(epilogue):
    """Every run-time argument any kernel of the family takes, outputs poisoned."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=rng).bfloat16()

    weight, bias, norm = random(ROWS, DIM, HIDDEN), random(ROWS, DIM), random(2, DIM)
    width = epilogue.rope.rotary_dim if epilogue.rope else 2
    table = {"bf16": torch.bfloat16, "fp32": torch.float32}
    cos, sin = random(TOKENS, width), random(TOKENS, width)
    if epilogue.rope:
        cos, sin = (t.to(table[epilogue.rope.cos.dtype]) for t in (cos, sin))
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=rng)[:TOKENS]
    slots[2] = -1
    qkv = random(TOKENS, ROWS, DIM)
    poison = torch.full((TOKENS, HEADS, DIM), float("nan")).bfloat16()
    cache = random(PAGES, PAGE_SIZE, KV_HEADS * epilogue.kv_repeat, DIM)
    values = {"x_ptr": random(TOKENS, HIDDEN), "weight_ptr": weight, "q_out_ptr": poison}
    values |= {"k_cache_ptr": cache, "v_cache_ptr": cache.clone(), "slots_ptr": slots}
    values |= {"cos_ptr": cos, "sin_ptr": sin, "num_tokens": TOKENS, "rope_tokens": TOKENS}
    values |= {"sequence_tokens": TOKENS, "num_pages": PAGES, "q_place": 0, "k_place": 1}
    values |= {"v_place": 2, "second_distance": HEADS * DIM * HIDDEN}
    values |= {"third_distance": (HEADS + KV_HEADS) * DIM * HIDDEN}
    starts = {"q": 0, "k": HEADS, "v": HEADS + KV_HEADS}
    for letter, start in starts.items():
        values[f"{letter}_weight_ptr"] = weight[start:]
        values[f"{letter}_bias_ptr"] = bias[start:]
        values[f"{letter}_ptr"] = qkv[:, start:]
    values |= {"q_norm_ptr": norm[0], "k_norm_ptr": norm[1]}
    if epilogue.addressing.form == "ragged":
        # Two sequences; the second begins in the middle of a page and fills the next.
        values["slots_ptr"] = torch.tensor([[2, -1], [0, 1]])
        values |= {"sequences_ptr": torch.tensor([0, 1, TOKENS]), "lookup_columns": 2}
        values |= {"positions_ptr": torch.tensor([15, 12]), "lookup_stride": 2}
        values |= {"num_sequences": 2, "k_cache_scale_ptr": torch.tensor([2.0])}
        values["v_cache_scale_ptr"] = torch.tensor([0.5])
    values["workspace_ptr"] = torch.zeros(1 << 16)
    values["counters_ptr"] = torch.zeros(64, dtype=torch.int32)
    return values


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("kind", ["tiled", "swapped", "epilogue"])
def test_emitted_and_template_agree(kind, epilogue):
    spec, grid = case(kind, EPILOGUES[epilogue])
    template = interpret(getattr(importlib.import_module(spec.module), spec.kernel))
    outcomes = []
    for kernel, constants in ((load_interpreted(spec), {}), (template, dict(spec.constants))):
        values = arguments(EPILOGUES[epilogue])
        given = {name: values[name] for name, _ in spec.signature}
        kernel[grid](**given, **constants)
        outputs = [given[name] for name in ("q_out_ptr", "k_cache_ptr", "v_cache_ptr")]
        outcomes.append([out.view(torch.int16) for out in outputs])
    for emitted, expected in zip(*outcomes, strict=True):
        assert torch.equal(emitted, expected)
    assert not values["q_out_ptr"].isnan().any()
    before = arguments(EPILOGUES[epilogue])["k_cache_ptr"]
    assert (values["k_cache_ptr"] != before).any(-1).sum() >= TOKENS - 1
