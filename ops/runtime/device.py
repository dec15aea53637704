"""Finds the target of a call, which is the record of the chip that the call's kernels are made
for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.targets import SM90, Target, detect_target


@cache
def device_target(device: torch.device) -> Target | None:
    """Returns the target of a CUDA device, with the device's own number of multiprocessors. Returns
    None for a chip that has no target."""
    return detect_target(device.index)


def emits_for(device: torch.device) -> bool:
    """Whether kernels are emitted for a device. They are emitted for a CUDA device that has a
    target. On a machine without a GPU, they are emitted for any CUDA device, because tensors on
    such a device are fake tensors of a graph that is planned but not run."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or device_target(device) is not None


def target_at(device: torch.device, planned: Target | None) -> Target | None:
    """Returns the target of a GPU of this machine. Tensors on other devices stand for tensors of
    the planned GPU, so the result for them is `planned`."""
    if device.type == "cuda" and torch.cuda.is_available():
        return device_target(device)
    return planned


@cache
def target_of(device: torch.device) -> Target:
    """Returns the target of a CUDA device. For a chip that has no target, returns the target of
    SM90 without the features of SM90."""
    target = device_target(device)
    if target is not None:
        return target
    properties = torch.cuda.get_device_properties(device)
    return replace(SM90, features=frozenset(), num_sms=properties.multi_processor_count)
