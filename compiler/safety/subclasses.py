"""Describes tensor subclasses, and how users get the plain tensors that an op needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.compiler.quantised import tensor_subclasses


@dataclass(frozen=True)
class _Kind:
    """The classes of one library. package: the package that defines them. what: what such a class
    is. hint: what users can do about it."""

    package: str
    what: str
    hint: str


# Advice for a weight that holds codes: _CODES if `prepare` reads it, _UNREAD if not.
_CODES = (
    "call `tilewright.compiler.prepare(model)` when the model is loaded: it replaces linears with "
    "such a weight by linears that decode the codes in PyTorch"
)
_UNREAD = (
    "quantise the weights alone, by a class that `tilewright.compiler.prepare(model)` reads; or "
    f"{tensor_subclasses.INSTEAD}"
)
_KINDS = (
    _Kind(
        "torch.distributed",
        "a part of a tensor that ranks share",
        "give the plain tensor inside (`to_local()`), or fuse before it is wrapped",
    ),
    _Kind("torchao", "torchao's quantised weight", _CODES),
    _Kind("optimum.quanto", "quanto's quantised weight", _CODES),
)
_ANY = _Kind(
    "",
    "a class that wraps other tensors",
    "give the plain tensors inside, or weights as codes and scales that the graph decodes",
)


def described(tensor: Any) -> tuple[str, str]:
    """Returns (what a subclass is, what to do about it), by the library that defines its class."""
    classes = [cls.__module__ for cls in type(tensor).__mro__]
    kind = next((k for k in _KINDS if any(_is_of(name, k.package) for name in classes)), _ANY)
    what = f"a {type(tensor).__name__}, {kind.what}"
    if kind.hint is not _CODES:
        return what, kind.hint
    why, is_read = tensor_subclasses.obstacle(tensor)
    return f"{what} ({why})" if why else what, _CODES if is_read else _UNREAD


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
