"""Refuses sites on devices for which the fused op has no kernels.

On such a device an op would run as its PyTorch reference, which is slower than the graph as it was
written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from tilewright.ops.contract import FusedOp, get_op
from tilewright.patterns.language import Match, Miss, Pattern, Stage

HINT = (
    "`tilewright inspect` shows what is fused on a GPU; "
    'options={"everywhere": True} or TILEWRIGHT_EVERYWHERE=1 fuses on this device, too, which is '
    "slower"
)


def with_kernels(matches: Sequence[Match]) -> tuple[list[Match], list[Miss]]:
    """Returns two lists: the matches on devices for which their ops have kernels, and a miss
    NO_KERNELS for each other device."""
    fused: list[Match] = []
    left: dict[torch.device, list[Match]] = defaultdict(list)
    for match in matches:
        device = match.anchor.device
        if _runs_on(match.op, device):
            fused.append(match)
        else:
            left[device].append(match)
    return fused, [_no_kernels(device, sites) for device, sites in left.items()]


def lost_nowhere(misses: Iterable[Miss], patterns: Iterable[Pattern]) -> list[Miss]:
    """Gives misses on devices without kernels the weight "advice", because a match there would not
    be fused either. Internal failures keep their weight."""
    ops = {pattern.name: pattern.op for pattern in patterns}
    return [
        replace(miss, weight="advice") if _was_idle(miss, ops.get(miss.pattern)) else miss
        for miss in misses
    ]


def _was_idle(miss: Miss, op: str | None) -> bool:
    device = _device_of(miss.nodes[0]) if miss.nodes else None
    if op is None or device is None or miss.code == "INTERNAL":
        return False
    return not _runs_on(op, device)


def _device_of(node: fx.Node) -> torch.device | None:
    held = node.meta.get("example_value")
    return held.device if isinstance(held, torch.Tensor) else None


def _runs_on(name: str, device: torch.device) -> bool:
    op = _op(name)
    return op is None or op.has_lowering_on(device)


def _op(name: str) -> FusedOp | None:
    """Returns the op, or None if it is not registered. The rewrite reports an op that is not
    registered."""
    try:
        return get_op(name)
    except KeyError:
        return None


def _no_kernels(device: torch.device, sites: Sequence[Match]) -> Miss:
    counts = Counter(match.pattern for match in sites)
    listed = ", ".join(f"{pattern} x{n}" for pattern, n in sorted(counts.items()))
    what = "1 site stays" if len(sites) == 1 else f"{len(sites)} sites stay"
    message = f"{what} as written, because there are no kernels for {_named(device)}: {listed}"
    nodes = tuple(match.anchor.node for match in sites)
    covers = tuple(dict.fromkeys(node for match in sites for node in match.nodes))
    return Miss(
        "tilewright", "NO_KERNELS", Stage.CAPABILITY, message, nodes, HINT, len(sites), None, covers
    )


def _named(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the {device.type.upper()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
