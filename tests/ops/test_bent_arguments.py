"""Tests that an op with a bent argument never fails without saying why, and never writes before it
fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops import bent_arguments
from tilewright.ops import ArgumentError, contract

SCRIPT = Path(bent_arguments.__file__)
CALLS = 350


def test_bent_calls_are_refused_clearly_or_work():
    """The calls run in a separate process, because a call that takes too much memory must not end
    this process."""
    command = [sys.executable, str(SCRIPT), "--calls", str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["calls"] > 0.9 * CALLS
    assert summary["accepted"] > 0.05 * CALLS
    assert not summary["failures"]


def test_every_argument_of_every_op_is_bent_at_every_entry():
    # Other tests in the same process register ops of their own.
    ours = [op for op in contract.all_ops() if op.namespace == "tilewright"]
    for op in ours:
        case = op.cases[0]
        arguments = op.sample_inputs(case)
        bents = list(bent_arguments.bent_calls(op, case, arguments))
        schema = torch._C.parse_schema(op.declaration)
        names = {argument.name for argument in schema.arguments}
        assert bent_arguments.kinds(op).keys() == names, op.name
        for entry in ("torch.ops", "fake"):
            assert {bent.argument for bent in bents if bent.entry == entry} == names


@pytest.mark.parametrize(
    ("name", "result", "kind"),
    [
        ("unclear", AttributeError("'NoneType' object has no attribute 'dim'"), "unclear error"),
        ("writes", ArgumentError("paged_kv_store", "slots", "one", "none"), "a write before"),
        ("writes", None, "a write to another place"),
        ("slow", None, "took too long"),
    ],
)
def test_the_judge_sees_what_is_wrong(monkeypatch, name, result, kind):
    """The control: the judge reports an op that is wrong in one of these ways."""
    op = contract.get_op("paged_kv_store")
    case = op.cases[0]
    arguments = op.sample_inputs(case)
    monkeypatch.setattr(bent_arguments, "SECONDS", 0.05)

    def broken(bent, values):
        if name == "writes":
            values["k"].zero_()
        while name == "slow":
            pass
        if result is not None:
            raise result

    monkeypatch.setattr(bent_arguments, "invoke", broken)
    bent = next(
        bent for bent in bent_arguments.bent_calls(op, case, arguments) if bent.argument == "slots"
    )
    tally = bent_arguments.Tally()
    bent_arguments.signal.signal(bent_arguments.signal.SIGALRM, bent_arguments.alarmed)
    bent_arguments.judge(bent, arguments, tally)
    assert any(found.startswith(kind) for found in tally.failures), tally.failures


def call(name, **bent):
    op = contract.get_op(name)
    arguments = vars(op.sample_inputs(op.cases[0])) | bent
    return op.torch_op(**arguments)


@pytest.mark.parametrize(
    ("name", "bent", "argument"),
    [
        ("fused_qkv_paged", {"x": None}, "x"),
        ("fused_moe", {"weight_format": "int5"}, "weight_format"),
        ("fused_moe", {"gate_weight": torch.zeros(2, 3).bfloat16()}, "gate_weight"),
        (
            "grouped_matmul_dynamic_scaled_nvfp4",
            {"group_offsets": torch.zeros(0, dtype=torch.int32)},
            "group_offsets",
        ),
        ("mla_prefill", {"num_sequences": 2**62}, "num_sequences"),
        ("mla_prefill_plan", {"max_chunks": 2**31 - 1}, "max_chunks"),
        ("mla_prefill", {"latent_scale_cap": 1e308}, "latent_scale_cap"),
        ("mla_prefill_plan", {"cache_lengths": torch.tensor([2**62, -1])}, "cache_lengths"),
    ],
)
def test_what_was_found_by_bending_names_its_argument(name, bent, argument):
    with pytest.raises(ArgumentError) as caught:
        call(name, **bent)
    assert (caught.value.op, caught.value.argument) == (name, argument)


@pytest.mark.parametrize(
    "positions", [torch.zeros(13), torch.zeros(2, dtype=torch.int64)], ids=["float32", "misshapen"]
)
def test_positions_of_a_ragged_latent_store_are_checked(positions):
    op = contract.get_op("mla_latent_store")
    case = next(
        case
        for case in op.cases
        if (a := op.sample_inputs(case)).slots == "ragged" and a.rope_by_position
    )
    arguments = vars(op.sample_inputs(case))
    before = arguments["latent_cache"].clone()
    with pytest.raises(ArgumentError, match=r"mla_latent_store: positions: expected"):
        op.torch_op(**arguments | {"positions": positions})
    assert torch.equal(arguments["latent_cache"], before)
