"""A LoRA call at the addresses of an earlier one: the same launches, over new results and scratch.

The implementation for CUDA runs here on CPU tensors, its launches noted instead of made.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.runtime.test_repeats import split_scratch
from tilewright.codegen.lora.shrink_specs import TiledShrink
from tilewright.codegen.targets import SM90
from tilewright.ops import contract
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import lowering as lora_lowerings
from tilewright.ops.lora import shrink as lora_shrink
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.runtime import replay
from tilewright.ops.runtime.recording import note_launch

OPS = {"shrink": lora_shrink.OP, "expand": lora_expand.OP}
ROWS = LoraCase("rows", num_rows=6, none_every=3)


@pytest.fixture
def log(monkeypatch):
    """The values of every launch, by parameter, on a pretended H200."""
    found = []

    class Launcher:
        def __init__(self, names):
            self.names = names

        def __call__(self, values):
            addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            found.append(dict(zip(self.names, addresses, strict=True)))

    def launch(spec, grid, values, device):
        launcher = Launcher(tuple(name for name, _ in spec.signature))
        given = tuple(values[name] for name in launcher.names)
        launcher(given)
        note_launch(launcher, given)

    monkeypatch.setattr(lora_lowerings, "device_target", lambda device: SM90)
    monkeypatch.setattr(lora_lowerings, "launch", launch)
    for module in (lora_lowerings, replay):
        monkeypatch.setattr(module, "split_k_scratch", split_scratch)
    return found


def implementation(op, checks):
    def validate_values(arguments):
        checks.append(arguments)

    return contract._implementation(replace(op, validate_values=validate_values), "cuda")


def twice(op, a, change=lambda a: a):
    """Results of two calls, and how many went the whole way."""
    checks = []
    run = implementation(op, checks)
    results = []
    for arguments in (a, change(a)):
        args, kwargs = op.split(arguments)
        made = run(*args, **kwargs)
        results.append(made if isinstance(made, tuple) else (made,))
    return *results, len(checks)


#: What a call makes for itself; its memory may be that which an earlier call gave back.
OWN = {"order_ptr", "ends_ptr", "offsets_ptr", "workspace_ptr", "counters_ptr"}


def written(names):
    return {name for name in names if "out_ptr" in name}


CASES = {
    "rows": ROWS,
    "groups": LoraCase("groups", "groups", sizes=(2, 3), ids=(1, -1), spare=2),
    "sequences": replace(ROWS, rows="sequences", num_rows=1280, num_sequences=10),
    "sorted": replace(ROWS, num_rows=600),
    "single": LoraCase("single", "single", num_rows=3, num_adapters=1),
    "only_v": LoraCase("only_v", "single", num_rows=3, num_adapters=1, ranks=(0, 0, 9)),
    "packed": replace(ROWS, packed=True, bases="packed", base_rows=2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", OPS)
def test_the_second_call_makes_the_launches_of_the_first(op, name, log):
    a = OPS[op].sample_inputs(CASES[name])
    first, second, checks = twice(OPS[op], a)
    assert checks == 1
    half = len(log) // 2
    assert half == (2 if name == "sorted" else 1)
    moved = {}
    for one, other in zip(log[:half], log[half:], strict=True):
        assert one.keys() == other.keys()
        changed = {n for n in one if one[n] != other[n]}
        assert written(one) <= changed <= written(one) | OWN
        for parameter in changed:
            # Whatever was at one place before is at one place now.
            assert moved.setdefault(one[parameter], other[parameter]) == other[parameter]
    for old, new in zip(first, second, strict=True):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        if old.numel():
            assert moved[old.data_ptr()] == new.data_ptr()


def test_split_k_scratch_is_new(log, monkeypatch):
    config = TiledShrink(16, 64, 2, 4, 2)
    monkeypatch.setattr(lora_lowerings.lora_plan, "plan_shrink", lambda *_: config)
    made = []

    def scratch(tiles, elements, device):
        made.append((tiles, elements))
        return split_scratch(tiles, elements, device)

    for module in (lora_lowerings, replay):
        monkeypatch.setattr(module, "split_k_scratch", scratch)
    lora_lowerings.chosen_shrink.cache_clear()
    try:
        _, _, checks = twice(OPS["shrink"], OPS["shrink"].sample_inputs(CASES["single"]))
    finally:
        lora_lowerings.chosen_shrink.cache_clear()
    assert checks == 1
    assert made == [(1, 2 * 16 * 64), (1, 2 * 16 * 64)]


def test_other_addresses_go_the_whole_way(log):
    op = OPS["shrink"]
    *_, checks = twice(op, op.sample_inputs(ROWS), lambda a: replace(a, a=a.a.clone()))
    assert checks == 2


def test_ids_that_are_copied_are_copied_again(log):
    """A kernel reads contiguous ids: of others it gets a copy, which is of that call alone."""
    op = OPS["shrink"]
    a = op.sample_inputs(ROWS)
    wide = torch.stack((a.expert_ids, a.expert_ids), 1)
    *_, checks = twice(op, replace(a, expert_ids=wide[:, 0]))
    assert checks == 2
