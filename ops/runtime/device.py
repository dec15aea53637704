"""Finds the target of a call: the record of the chip for which the call's kernels are made."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.targets import SM90, Target, detect_target


@cache
def device_target(device: torch.device) -> Target | None:
    """Returns the target of a CUDA device, with the device's own number of multiprocessors; None
    for a chip without a target."""
    return detect_target(device.index)


def emits_for(device: torch.device) -> bool:
    """Whether kernels are emitted for a device: a CUDA device with a target. Without a GPU, tensors
    on a CUDA device are fake tensors of a graph that is planned but not run."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or device_target(device) is not None


def target_at(device: torch.device, planned: Target | None) -> Target | None:
    """Returns the target of a GPU in this machine. For tensors elsewhere, which stand for tensors
    of the planned GPU, returns `planned`."""
    if device.type == "cuda" and torch.cuda.is_available():
        return device_target(device)
    return planned


@cache
def target_of(device: torch.device) -> Target:
    """Returns the target of a CUDA device; for a chip without one, SM90's target without its
    features."""
    target = device_target(device)
    if target is not None:
        return target
    properties = torch.cuda.get_device_properties(device)
    return replace(SM90, features=frozenset(), num_sms=properties.multi_processor_count)
