"""What a launch hands to its kernel, without a GPU: the kernel of the plan, and every argument."""

import pytest
import torch

from tilewright.codegen.targets import TARGETS
from tilewright.ops.contract import get_op
from tilewright.ops.qkv import launch as launches
from tilewright.ops.qkv import lowering as lowerings
from tilewright.ops.qkv import ragged_lowering

LAUNCHERS = {
    "fused_qkv_paged": launches.launch_fused_qkv_paged,
    "paged_kv_store": launches.launch_paged_kv_store,
    "fused_qkv_matmul_kv_cache_paged_ragged": ragged_lowering.launch,
}


@pytest.fixture
def launched(monkeypatch):
    """Records (spec, values) of launches on a pretended H200."""
    found = []
    monkeypatch.setattr(lowerings, "device_target", lambda device: TARGETS["sm90"])
    monkeypatch.setattr(
        lowerings, "launch", lambda spec, grid, values, device: found.append((spec, values))
    )
    scratch = (torch.empty(1), torch.empty(1, dtype=torch.int32))
    monkeypatch.setattr(lowerings, "split_k_scratch", lambda *a: scratch)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: type("P", (), {"multi_processor_count": 132})
    )
    return found


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launch_takes_the_planned_kernel_and_gives_it_all_it_asks_for(name, launched):
    op = get_op(name)
    seen = 0
    for case in op.cases:
        a = op.sample_inputs(case)
        if op.choose("cuda", a).lowering.name == "reference":
            continue
        launched.clear()
        args, kwargs = op.split(a)
        LAUNCHERS[name](*args, **kwargs)
        if not launched:
            continue  # no tokens: nothing to launch
        ((spec, values),) = launched
        assert spec in op.plan_for(a, "sm90").specs, case
        missing = {argument for argument, _ in spec.signature} - set(values)
        assert not missing, case
        seen += 1
    assert seen >= 5
