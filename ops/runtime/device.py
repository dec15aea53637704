"""Which record of capabilities the kernels of a call are made for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.targets import SM90, Target, detect_target


@cache
def device_target(device: torch.device) -> Target | None:
    """The target of a CUDA device, with its own number of multiprocessors; None for a chip without
    a record."""
    return detect_target(device.index)


def emits_for(device: torch.device) -> bool:
    """Whether kernels are emitted for a device: a CUDA device with a target. Where there is no GPU,
    tensors on one are fakes, of a graph that is planned and does not run."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or device_target(device) is not None


def target_at(device: torch.device, planned: Target | None) -> Target | None:
    """The target of a GPU at hand; for tensors elsewhere, which stand for a GPU's, the one that is
    planned for."""
    if device.type == "cuda" and torch.cuda.is_available():
        return device_target(device)
    return planned


@cache
def target_of(device: torch.device) -> Target:
    """The same; a chip without a record has that of SM90 without its features."""
    target = device_target(device)
    if target is not None:
        return target
    properties = torch.cuda.get_device_properties(device)
    return replace(SM90, features=frozenset(), num_sms=properties.multi_processor_count)
