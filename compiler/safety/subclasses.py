"""Describes tensor subclasses, and how users get the plain tensors that an op needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.compiler.quantised import tensor_subclasses


@dataclass(frozen=True)
class _Kind:
    """The tensor classes of one library.

    package: the package that defines the classes.
    what: the words that say what such a class is.
    hint: the words that say what users can do about it.
    """

    package: str
    what: str
    hint: str


# Hints for a weight that holds codes. _CODES is for a weight that `prepare` reads, and _UNREAD for
# a weight that it does not read.
_CODES = (
    "call `tilewright.compiler.prepare(model)` when the model is loaded: it replaces each linear "
    "that has such a weight by a linear that decodes the codes in PyTorch"
)
_UNREAD = (
    "quantise only the weights, with a class that `tilewright.compiler.prepare(model)` reads; or "
    f"{tensor_subclasses.INSTEAD}"
)
_KINDS = (
    _Kind(
        "torch.distributed",
        "a tensor that is spread over ranks",
        "pass the plain tensor inside (`to_local()`), or compile the computation before the "
        "tensor is wrapped",
    ),
    _Kind("torchao", "torchao's quantised weight", _CODES),
    _Kind("optimum.quanto", "quanto's quantised weight", _CODES),
)
_ANY = _Kind(
    "",
    "a class that wraps other tensors",
    "pass the plain tensors inside, or pass weights as codes and scales that the graph decodes",
)


def described(tensor: Any) -> tuple[str, str]:
    """Returns two texts about a subclass: what it is, and what the user can do about it. The
    library that defines the class decides them."""
    classes = [cls.__module__ for cls in type(tensor).__mro__]
    kind = next((k for k in _KINDS if any(_is_of(name, k.package) for name in classes)), _ANY)
    what = f"a {type(tensor).__name__}, {kind.what}"
    if kind.hint is not _CODES:
        return what, kind.hint
    why, is_read = tensor_subclasses.obstacle(tensor)
    return f"{what} ({why})" if why else what, _CODES if is_read else _UNREAD


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
