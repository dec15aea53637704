"""Runs a model by tilewright inside transformers' continuous batching.

    from tilewright.compiler.serving import BatchingConfig, enable

    enable(model)
    model.generate_batch(prompts, continuous_batching_config=BatchingConfig())

The engine, its scheduler and its memory stay those of transformers. While a manager of this model
lives, tilewright provides the attention and the allocators of pages.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from tilewright.compiler.serving.classes import (
    change_class,
    change_class_back,
    has_change,
    original_class,
    with_generate,
)

log = logging.getLogger("tilewright")

_CHANGE = "enable"
#: The attention that each model had before it got a manager.
_BEFORE: MutableMapping[Any, Any] = WeakKeyDictionary()
#: The latest manager of each model.
_MANAGERS: MutableMapping[Any, Any] = WeakKeyDictionary()


def enable(model: nn.Module) -> bool:
    """Makes tilewright run continuous batching of this model: `generate_batch()` and managers.

    model: a model of transformers with `generate()`, on any device. Returns whether the model was
    changed. If transformers or the model lacks something that tilewright needs, the model stays as
    it is, and one warning gives the reason. Raises TypeError for other models. Raises RuntimeError
    if an earlier manager of this model is kept; `destroy_cached_continuous_batching_manager` ends
    it.

    Tokens are those of transformers' own continuous batching, up to rounding. `generate()` and
    `forward()` work as before, but raise while a manager lives. The engine accepts any settings;
    tilewright compiles its steps if the settings are a `BatchingConfig` or if none are given.

    Changes the class of the model to a subclass of it and adds a forward pre-hook. `disable` undoes
    both. Copies and pickles have the original class: disable the model before you copy it.
    """
    changed = with_generate(model)
    if has_change(changed, _CHANGE):
        return True
    _refuse_kept_manager(changed, "enable")
    reason = _reason_against(changed)
    if reason is not None:
        log.warning("enable: continuous batching of this model stays as it is: %s", reason)
        return False
    from tilewright.compiler.serving import paged_attention

    paged_attention.register()
    _remove_plans(changed)  # a copy of an enabled model still has the hook
    changed.register_forward_pre_hook(paged_attention.add_plan, with_kwargs=True)
    change_class(changed, _CHANGE, {"init_continuous_batching": init_continuous_batching})
    return True


def disable(model: nn.Module) -> None:
    """Undoes `enable`; does nothing if the model is not enabled.

    Raises TypeError as `enable` does. Raises RuntimeError while a manager of the model runs or is
    kept, or if other code has changed the model's class since.
    """
    changed = with_generate(model)
    if not has_change(changed, _CHANGE):
        return
    _refuse_kept_manager(changed, "disable")
    manager = _MANAGERS.get(changed, lambda: None)()
    if manager is not None and manager.is_running():
        raise RuntimeError("disable: a manager of this model runs; call its stop() first")
    change_class_back(changed, _CHANGE, "disable")
    _remove_plans(changed)
    give_attention_back(changed)  # a manager that was never started has not given it back


def _remove_plans(model: Any) -> None:
    """Removes the forward pre-hooks that add plans. A copy of a model has the hook, but not the
    handle that removes it."""
    from tilewright.compiler.serving.paged_attention import add_plan

    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is add_plan]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def is_enabled(model: nn.Module) -> bool:
    """Whether `enable` has changed the model. Raises TypeError as `enable` does."""
    return has_change(with_generate(model), _CHANGE)


def _refuse_kept_manager(model: Any, function: str) -> None:
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise RuntimeError(
            f"{function}: a manager of this model is kept from before; call "
            "model.destroy_cached_continuous_batching_manager() first"
        )


def _reason_against(model: Any) -> str | None:
    try:
        from tilewright.compiler.serving.relied_on import reason_against
    except (ImportError, AttributeError) as error:
        import transformers

        return f"transformers {transformers.__version__}: {error}"
    return reason_against(model)


def init_continuous_batching(
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Returns a manager, as transformers' method does. Until the manager is stopped, the model has
    tilewright's attention. If the model's device or dtype has no kernels, returns transformers' own
    manager, and a warning says why."""
    from tilewright.compiler.serving.batching import BatchingConfig
    from tilewright.compiler.serving.manager import Manager
    from tilewright.compiler.serving.relied_on import missing_kernel

    original: Any = original_class(self)
    reason = missing_kernel(self)  # the model may have moved since `enable`
    if reason is not None:
        log.warning("enable: continuous batching runs without tilewright: %s", reason)
        return original.init_continuous_batching(
            self, generation_config, continuous_batching_config, workload_hints
        )
    settings = continuous_batching_config
    if settings is None:  # transformers reads the settings from there, too
        settings = getattr(generation_config, "continuous_batching_config", None)
    taken = not is_taken(self)
    before = take_attention(self)
    try:
        manager = original.init_continuous_batching(
            self, generation_config, BatchingConfig.of(settings), workload_hints
        )
    except BaseException:
        if taken:  # otherwise, an earlier manager still uses the attention
            give_attention_back(self)
        raise
    manager._original_attn_impl = before  # the manager sets this again when it stops
    manager.__class__ = Manager
    _MANAGERS[self] = ref(manager)
    return manager


def take_attention(model: Any) -> str | dict[str, str]:
    """Gives a model the attention of the engine. Returns the implementation that its configuration
    had before."""
    from tilewright.compiler.serving.allocators import ATTENTION

    config, text = model.config, model.config.get_text_config()
    if not is_taken(model):  # no manager of this model lives
        _BEFORE[model] = _attention(config, text)
    for one in (config, text):
        one._attn_implementation = {"": ATTENTION}  # for this config alone, not for a vision tower
    return _BEFORE[model]


def is_taken(model: Any) -> bool:
    """Whether a model has the attention of the engine."""
    from tilewright.compiler.serving.allocators import ATTENTION

    return bool(model.config.get_text_config()._attn_implementation == ATTENTION)


def give_attention_back(model: Any) -> None:
    """Undoes `take_attention`, unless the model has been given another attention since."""
    before = _BEFORE.pop(model, None)
    if before is not None and is_taken(model):
        model.config._attn_implementation = before


def _attention(config: Any, text: Any) -> str | dict[str, str]:
    if text is config:
        return config._attn_implementation
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    own = dict.fromkeys(names, text._attn_implementation)
    return {"": config._attn_implementation} | own
