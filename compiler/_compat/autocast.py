"""Finds the autocast modes that are on at a node of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast


def autocast_in_force(node: fx.Node) -> dict[str, torch.dtype | None]:
    """Returns the dtype of autocast at a node, by device type. None means that autocast is off. The
    function leaves out the types for which the graph itself does not change the current dtype."""
    found: dict[str, torch.dtype | None] = {}
    for entry in node.graph.find_nodes(op="call_function", target=_enter_autocast):
        # The only user of an enter node is the exit node that takes it.
        if entry < node and not any(leave < node for leave in entry.users):
            device, dtype, enabled, *_ = entry.args
            chosen = (dtype or torch.get_autocast_dtype(device)) if enabled else None
            found[device] = chosen
    return {device: dtype for device, dtype in found.items() if dtype != autocast_dtype(device)}


def autocast_dtype(device: str) -> torch.dtype | None:
    """Returns the current dtype of autocast for a device type. Returns None if autocast is off."""
    try:
        on = torch.is_autocast_enabled(device)
    except RuntimeError:  # torch does not say for the meta device
        return None
    return torch.get_autocast_dtype(device) if on else None


def autocast_at_devices(node: fx.Node, devices: Iterable[str]) -> frozenset[Any]:
    """Returns pairs (device type, dtype) for the `devices` for which autocast is on at a node."""
    known = autocast_in_force(node)
    now = {device: known.get(device, autocast_dtype(device)) for device in devices}
    return frozenset((device, dtype) for device, dtype in now.items() if dtype is not None)


def autocast_at(node: fx.Node) -> AbstractContextManager[Any]:
    """Returns a context in which autocast has the same mode as at the node in its graph."""
    stack = ExitStack()
    for device, dtype in autocast_in_force(node).items():
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
    return stack
