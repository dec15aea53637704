"""Tests the rows that `benchmarks/steps.py` measures: how many there are, and which are held
out."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import steps
import steps_models
import timing
from predicted_rows import row_of, step_behind
from predictions import predicted

PLANNED = [(name, case) for name in steps_models.WIDTHS for case in steps_models.cases_of(name)]
H100 = "NVIDIA H100 80GB HBM3"


def test_enough_rows_of_every_kind_are_held_out():
    assert len(PLANNED) > 180
    held = Counter(steps_models.is_held_out(name, c.batch, c.tokens) for name, c in PLANNED)
    assert held[True] >= 0.45 * len(PLANNED)
    assert held[False] >= 80
    assert set(steps_models.WIDTHS) > steps_models.HELD_OUT
    starts = {(case.batch, case.start) for _, case in PLANNED if case.is_decode}
    assert starts >= {(batch, 1000) for batch in (1, 4, 16, 64, 128)}


def test_a_run_that_ends_early_has_rows_of_held_out_models_and_of_others():
    for wave in steps.waves(list(steps_models.WIDTHS), 13):
        held = sum(name in steps_models.HELD_OUT for name in wave)
        assert 3 <= held <= len(wave) - 3


def test_no_cache_is_larger_than_a_process_may_have():
    for name, case in PLANNED:
        size = case.batch * case.capacity * steps_models.token_bytes(name)
        assert size <= steps_models.MOST_CACHE
        assert case.start + case.tokens <= case.capacity


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt-oss-20b"])
def test_a_row_is_modelled_without_a_gpu(name):
    case = steps_models.cases_of(name)[0]
    row = predicted(row_of(name, case, H100, 500.0))
    assert row["class"] == f"decode, {'mixture' if name.startswith('gpt') else 'dense'}"
    assert 100 < row["modelled_us"] < 2000
    assert row["ratio"] == pytest.approx(row["modelled_us"] / 500.0, abs=1e-3)


@pytest.mark.parametrize("name", ["llama3.2-1b-lora-qv", "qwen3-8b-loras"])
def test_a_step_with_adapters_reads_them(name):
    """The step of a model with adapters is of a class of its own, and longer than without them."""
    pytest.importorskip("peft")
    case = steps_models.cases_of(name)[0]
    adapted = predicted(row_of(name, case, H100, 500.0))
    plain = predicted(row_of(name.partition("-lora")[0], case, H100, 500.0))
    assert (adapted["class"], plain["class"]) == ("decode, adapters", "decode, dense")
    assert 1.02 * plain["modelled_us"] < adapted["modelled_us"] < 1.5 * plain["modelled_us"]


def test_adapters_have_the_dtype_of_their_model():
    pytest.importorskip("peft")
    for name in ("llama3-8b-lora", "llama3-8b-loras"):
        parameters = list(steps_models.build(name, "meta").parameters())
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        assert {p.device.type for p in parameters} == {"meta"}


def test_the_list_of_a_masks_blocks_is_started_once():
    """The list of a mask's blocks counts as one start of a kernel: attention names the kernel that
    makes the list, but a separate node starts it."""
    step = step_behind(row_of("qwen3-0.6b", steps_models.cases_of("qwen3-0.6b")[0], H100, 500.0))
    attention = [part for part in step.parts if part.name == "cache_attention"]
    assert len(attention) == steps_models.WIDTHS["qwen3-0.6b"].layers
    for part in attention:
        own = [name for name in part.kernels if not name.startswith("mask_blocks")]
        assert part.amounts.launches == len(own) < len(part.kernels)
    assert [part.amounts.launches for part in step.parts if part.name == "mask_blocks"] == [1]


def test_a_kept_command_names_no_folder(monkeypatch):
    words = ["benchmarks/steps.py", "--out", "/a/folder", "--jobs", "2", "--hold=/another"]
    monkeypatch.setattr(sys, "argv", words)
    assert timing.environment()["command"] == "python benchmarks/steps.py --jobs 2"
