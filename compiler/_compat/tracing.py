"""Changes the conditions of a compilation by Dynamo: its limits, and traces on the meta device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx


def compile_isolated(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns the model compiled by torch.compile. If this release of torch has recompile limits
    for single functions, the compiled model gets a limit of its own."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(model, **options)
    return compiled


_REPLACING = threading.Lock()


#: For each owner and name, the original attribute, and the number of contexts that replace it now.
_REPLACED: dict[tuple[Any, str], tuple[Any, int]] = {}


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` by `make(owner.name)` inside this context. Contexts of several threads
    may overlap in any order: the first replaces the attribute, and the last restores it."""
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


def at_least_graphs(count: int) -> AbstractContextManager[Any]:
    """Makes Dynamo keep at least `count` graphs of a function in this thread inside this context.
    If the user has set a larger number, that number stays. Before torch 2.13, threads share the
    setting."""
    config: Any = torch._dynamo.config
    setting = config._config["recompile_limit"]
    if isinstance(getattr(setting, "user_override", None), ContextVar):
        limit = max(count, config.recompile_limit)
        changed: AbstractContextManager[Any] = config.patch(recompile_limit=limit)
        return changed
    return _replaced(config, "recompile_limit", lambda limit: max(count, limit))


def autocast_off_on_meta() -> AbstractContextManager[None]:
    """Makes torch say inside this context that autocast is off for the meta device, where torch
    otherwise raises an error.

    Models ask for the autocast mode of their arguments' device before they compute in fp32, and
    transformers 5.0 asks for any device. The meta device computes nothing, and so has no autocast.
    """

    def make(asked: Callable[..., bool]) -> Callable[..., bool]:
        def is_autocast_enabled(*device_type: str) -> bool:
            return device_type != ("meta",) and asked(*device_type)

        return is_autocast_enabled

    return _replaced(torch, "is_autocast_enabled", make)


def numbers_fake_on_meta() -> AbstractContextManager[None]:
    """Makes Dynamo, inside this context, replace a plain tensor on the meta device by a fake tensor
    if a call that it traces returns the plain tensor.

    Under fake tensors, `torch.tensor(0.0, device="meta")` still makes a plain tensor, which the
    next call on fake tensors refuses. On other devices, `torch.tensor` makes a fake tensor.
    """

    def make(run_node: Callable[..., Any]) -> Callable[..., Any]:
        def run_node_faked(tracer: Any, node: fx.Node, *rest: Any) -> Any:
            made = run_node(tracer, node, *rest)
            plain = node.op == "call_function" and type(made) is torch.Tensor and made.is_meta
            mode = torch._guards.detect_fake_mode() if plain else None
            # The sizes of this tensor come from a literal, so they are not symbols.
            return made if mode is None else mode.from_tensor(made, static_shapes=True)

        return run_node_faked

    return _replaced(torch._dynamo.utils, "run_node", make)


def unlimited_compiles() -> Any:
    """Returns a context without recompile limits. In this context Dynamo never gives up and never
    runs the model uncompiled."""
    many = 1 << 30
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
