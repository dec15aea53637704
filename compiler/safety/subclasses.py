"""What a tensor subclass is, and what to do where an op needs the plain tensors inside of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Kind:
    """Classes of one library. package: where they are defined."""

    package: str
    what: str
    hint: str


_CODES = (
    "call `tilewright.compiler.prepare(model)` when the model is loaded: its linears then decode "
    "the codes in the graph, which is fused, or it says why one stays; that one's weight may be "
    "replaced by what it stands for (`module.weight = nn.Parameter(module.weight.dequantize())`)"
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
    """(what a subclass is, what to do about it), by the library that its class is from."""
    classes = [cls.__module__ for cls in type(tensor).__mro__]
    kind = next((k for k in _KINDS if any(_is_of(name, k.package) for name in classes)), _ANY)
    return f"a {type(tensor).__name__}, {kind.what}", kind.hint


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
