"""Kernels without a GPU, and which lowerings the calls of a test took."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted_launches import interpret_launches
from tilewright.codegen.targets import TARGETS
from tilewright.ops.qkv import lowering as lowerings


@pytest.fixture
def chosen(monkeypatch):
    """Names of the lowerings that calls take, in order."""
    names, run = [], lowerings.run

    def noted(call, choice):
        names.append(choice.name)
        return run(call, choice)

    monkeypatch.setattr(lowerings, "run", noted)
    return names


@pytest.fixture
def interpreted(monkeypatch):
    """Launches run the emitted source on the CPU; memory not written holds NaN."""

    def scratch(tiles, elements, device):
        return torch.full((tiles * elements,), torch.nan), torch.zeros(tiles, dtype=torch.int32)

    interpret_launches(monkeypatch, lowerings)
    monkeypatch.setattr(lowerings, "split_k_scratch", scratch)
    monkeypatch.setattr(lowerings, "device_target", lambda device: TARGETS["sm90"])
    few = type("Properties", (), {"multi_processor_count": 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
