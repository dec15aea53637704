"""Methods of one model's class that are tilewright's, while the model's own class stays.

`generate()` and `generate_batch()` look some methods up on the class of the model. A model is given
a subclass of its class, with these methods; several changes of one model are one subclass, and any
of them can be taken back first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.generation import utils

#: A change's name, and its methods by name.
Change = tuple[str, tuple[tuple[str, Callable[..., Any]], ...]]

#: The attribute of a subclass that holds the class it was made of, and its changes.
_MADE_OF = "_class_before_tilewright"


def with_generate(model: Any) -> Any:
    """Returns the model itself of one that `torch.compile` wraps.

    Raises TypeError for what is no model of transformers with `generate()`.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, utils.GenerationMixin):
        raise TypeError(
            "model: expected a model of transformers with generate(), got "
            f"{type(model).__name__}; of a PEFT model, its get_base_model()"
        )
    return model


def original_class(model: nn.Module) -> type:
    """Returns the class of the model without the changes, and without what others made of a changed
    class."""
    made = _made_classes(model)
    return vars(made[-1])[_MADE_OF][0] if made else type(model)


def has_change(model: nn.Module, name: str) -> bool:
    """Whether the class of the model has the change of this name, or inherits it."""
    return any(name in dict(vars(made)[_MADE_OF][1]) for made in _made_classes(model))


def _made_classes(model: nn.Module) -> list[type]:
    """Returns the subclasses that were made here, the latest first: several where others changed
    the class in between."""
    return [one for one in type(model).__mro__ if _MADE_OF in vars(one)]


def change_class(model: nn.Module, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Gives the model, of which `name` is no change yet, a subclass with these methods."""
    original, changes = vars(type(model)).get(_MADE_OF, (type(model), ()))
    model.__class__ = _changed(original, (*changes, (name, tuple(methods.items()))))


def change_class_back(model: nn.Module, name: str, function: str) -> None:
    """Takes the change of this name back; does nothing where there is none.

    function: what takes it back, for the message. Raises RuntimeError where the class of the model
    was changed by others since.
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
        # Later protocols insist on the class that the object has.
        function, (_, *arguments), *state = original.__reduce_ex__(self, 1)
        return function, (original, *arguments), *state

    # transformers looks some things up by the name of the class.
    same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"__reduce_ex__": __reduce_ex__, _MADE_OF: (original, changes)}
    for _, methods in changes:
        own.update(methods)
    return type(original.__name__, (original,), same | own)
