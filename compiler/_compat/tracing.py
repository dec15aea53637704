"""The surroundings of a compilation by Dynamo: its limits, and traces on the meta device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx


def compile_isolated(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile with a recompile limit of its own, where this torch offers that."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(model, **options)
    return compiled


_REPLACING = threading.Lock()


#: What was there before, and how many contexts want something else there, by owner and name.
_REPLACED: dict[tuple[Any, str], tuple[Any, int]] = {}


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `make` makes of it. Contexts of several threads may overlap in
    any order: the first puts it there, and the last takes it away."""
    with _REPLACING:
        before, count = _REPLACED.get((owner, name), (getattr(owner, name), 0))
        _REPLACED[owner, name] = before, count + 1
        if count == 0:
            setattr(owner, name, make(before))
    try:
        yield
    finally:
        with _REPLACING:
            before, count = _REPLACED.pop((owner, name))
            if count > 1:
                _REPLACED[owner, name] = before, count - 1
            else:
                setattr(owner, name, before)


def autocast_off_on_meta() -> AbstractContextManager[None]:
    """Within, torch says of the meta device that autocast is off, where it raises otherwise.

    Models ask of the device of their arguments before they compute in fp32, transformers 5.0 of
    any; there is no autocast of what computes nothing.
    """

    def make(asked: Callable[..., bool]) -> Callable[..., bool]:
        def is_autocast_enabled(*device_type: str) -> bool:
            return device_type != ("meta",) and asked(*device_type)

        return is_autocast_enabled

    return _replaced(torch, "is_autocast_enabled", make)


def numbers_fake_on_meta() -> AbstractContextManager[None]:
    """Within, what Dynamo traces on the meta device is fake as on any other.

    `torch.tensor(0.0, device="meta")` makes a plain tensor under fake tensors too, which the next
    call of them refuses. On other devices it makes a fake one.
    """

    def make(run_node: Callable[..., Any]) -> Callable[..., Any]:
        def run_node_faked(tracer: Any, node: fx.Node, *rest: Any) -> Any:
            made = run_node(tracer, node, *rest)
            plain = node.op == "call_function" and type(made) is torch.Tensor and made.is_meta
            mode = torch._guards.detect_fake_mode() if plain else None
            # Its sizes are those of a literal, no symbols.
            return made if mode is None else mode.from_tensor(made, static_shapes=True)

        return run_node_faked

    return _replaced(torch._dynamo.utils, "run_node", make)


def unlimited_compiles() -> Any:
    """A context without recompile limits: Dynamo never gives up and runs the model uncompiled."""
    many = 1 << 30
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
