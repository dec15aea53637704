"""Replaces methods of one model, through a subclass of the model's class.

`generate()` and `generate_batch()` look some methods up on the class of the model. To change them,
the functions here give the model a subclass of its class that has the new methods; the class itself
is not modified. Several changes of a model share one subclass, and can be undone in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.generation import utils

#: A change's name, and its methods by name.
Change = tuple[str, tuple[tuple[str, Callable[..., Any]], ...]]

#: The attribute of a subclass that holds the original class and the changes.
_MADE_OF = "_class_before_tilewright"


def with_generate(model: Any) -> Any:
    """Returns the model itself, or the model that `torch.compile` has wrapped.

    Raises TypeError if `model` is not a model of transformers with `generate()`.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, utils.GenerationMixin):
        raise TypeError(
            "model: expected a model of transformers with generate(), got "
            f"{type(model).__name__}; for a PEFT model, pass model.get_base_model()"
        )
    return model


def original_class(model: nn.Module) -> type:
    """Returns the class that the model had before the first change. Classes that others derived
    from a changed class are skipped too."""
    made = _made_classes(model)
    return vars(made[-1])[_MADE_OF][0] if made else type(model)


def has_change(model: nn.Module, name: str) -> bool:
    """Whether the class of the model, or a class that it derives from, has the change of this
    name."""
    return any(name in dict(vars(made)[_MADE_OF][1]) for made in _made_classes(model))


def _made_classes(model: nn.Module) -> list[type]:
    """Returns the subclasses made by this module among the model's class and its bases, the latest
    first. There are several if other code changed the class between two changes."""
    return [one for one in type(model).__mro__ if _MADE_OF in vars(one)]


def change_class(model: nn.Module, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Gives the model a subclass with these methods. The model must not have the change `name`
    yet."""
    original, changes = vars(type(model)).get(_MADE_OF, (type(model), ()))
    model.__class__ = _changed(original, (*changes, (name, tuple(methods.items()))))


def change_class_back(model: nn.Module, name: str, function: str) -> None:
    """Undoes the change of this name; does nothing if the model does not have it.

    function: the name of the calling function, for the message. Raises RuntimeError if other code
    has changed the class of the model since.
    """
    if not has_change(model, name):
        return
    original, changes = vars(type(model)).get(_MADE_OF, (type(model), ()))
    if name not in dict(changes):
        raise RuntimeError(
            f"{function}: the class of the model became {original.__name__} after {name}; "
            "undo that first"
        )
    left = tuple(change for change in changes if change[0] != name)
    model.__class__ = _changed(original, left) if left else original


@functools.cache
def _changed(original: Any, changes: tuple[Change, ...]) -> Any:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Protocols from 2 on require the object's own class.
        function, (_, *arguments), *state = original.__reduce_ex__(self, 1)
        return function, (original, *arguments), *state

    # transformers looks up some things by the class's name.
    same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"__reduce_ex__": __reduce_ex__, _MADE_OF: (original, changes)}
    for _, methods in changes:
        own.update(methods)
    return type(original.__name__, (original,), same | own)
