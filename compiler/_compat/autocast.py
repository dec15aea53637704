"""Autocast, as it is where a node of a graph stands."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast


def autocast_in_force(node: fx.Node) -> dict[str, torch.dtype | None]:
    """The dtype of autocast where a node stands, None where it is off, for each device type for
    which the graph itself sets another than there is around it."""
    found: dict[str, torch.dtype | None] = {}
    for entry in node.graph.find_nodes(op="call_function", target=_enter_autocast):
        # Its other users are none: what is entered is left by a node that is given it.
        if entry < node and not any(leave < node for leave in entry.users):
            device, dtype, enabled, *_ = entry.args
            chosen = (dtype or torch.get_autocast_dtype(device)) if enabled else None
            found[device] = chosen
    return {device: dtype for device, dtype in found.items() if dtype != autocast_dtype(device)}


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast for a type of device, as it is now; None where it is off."""
    try:
        on = torch.is_autocast_enabled(device)
    except RuntimeError:  # of the meta device torch does not say
        return None
    return torch.get_autocast_dtype(device) if on else None


def autocast_at_devices(node: fx.Node, devices: Iterable[str]) -> frozenset[Any]:
    """The dtypes of autocast, where it is on, for some types of devices where a node stands."""
    known = autocast_in_force(node)
    now = {device: known.get(device, autocast_dtype(device)) for device in devices}
    return frozenset((device, dtype) for device, dtype in now.items() if dtype is not None)


def autocast_at(node: fx.Node) -> AbstractContextManager[Any]:
    """Within, autocast is as where a node stands in its graph."""
    stack = ExitStack()
    for device, dtype in autocast_in_force(node).items():
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
    return stack
