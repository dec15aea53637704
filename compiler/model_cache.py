"""The argument in which models of transformers take their cache.

The name of this argument differs between releases of transformers, and between models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

#: The names of the argument: `past_key_values` before transformers 5.24, then `cache`. The old name
#: comes first, because before 5.24 continuous batching also passes an argument `cache`, which
#: is its own memory.
NAMES = ("past_key_values", "cache")


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Returns a cache as the keyword argument of a model, such as `{"past_key_values": cache}`.

    `model` is a model of transformers or a PEFT model, compiled by `torch.compile` or not. Raises
    TypeError if the model takes no cache.

        model(input_ids, **cache_argument(model, cache))
        model.generate(input_ids, **cache_argument(model, cache))
    """
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", lambda: model)()
    name = name_in(base.forward) if hasattr(base, "forward") else None
    if name is None:
        raise TypeError(
            f"model: expected a model whose forward() takes {' or '.join(NAMES)}, got "
            f"{type(base).__name__}"
        )
    return {name: cache}


def name_in(function: Callable[..., Any]) -> str | None:
    """Returns the name of the cache among a function's parameters, or None if it takes no cache."""
    parameters = inspect.signature(function).parameters
    return next((name for name in NAMES if name in parameters), None)


def cache_in(arguments: dict[str, Any]) -> tuple[str, Any]:
    """Returns the name of the cache among keyword arguments, and the cache.

    The cache is None if the arguments have no cache.
    """
    for name in NAMES:
        if name in arguments:
            return name, arguments[name]
    return NAMES[0], None
