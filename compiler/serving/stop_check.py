"""Lets `generate()` run at the GPU's pace.

    from tilewright.compiler.serving import defer_stop_check

    defer_stop_check(model)
    model.generate(**inputs)

After every token, `generate()` of transformers asks the GPU whether all sequences have ended, and
waits for the answer before it launches the next step. transformers also has a check that reads the
answer one step late, but uses it only on MPS. This module makes one model use that check on CUDA.
Needs transformers.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.generation import logits_process, utils
from transformers.generation import stopping_criteria as criteria

from tilewright.compiler.model_cache import cache_in
from tilewright.compiler.serving.classes import (
    change_class,
    change_class_back,
    has_change,
    with_generate,
)

log = logging.getLogger("tilewright")

#: Types of devices on which the check is deferred, in addition to those of transformers.
DEVICES = ("cuda",)

#: Maps functions of transformers' `generation.utils` to the parameters that they must have.
RELIED_ON = {
    ("GenerationMixin", "_sample"): "self input_ids logits_processor stopping_criteria "
    "generation_config synced_gpus streamer model_kwargs",
    ("DeferredStopCheck", "__init__"): "self input_ids max_length cache cache_is_returned streamer",
    ("DeferredStopCheck", "__call__"): "self unfinished_sequences tokens length",
    ("DeferredStopCheck", "finish"): "self",
    ("DeferredStopCheck", "is_supported"): "device cache cache_is_returned is_assistant",
}

#: Processors and criteria of transformers that keep no state between calls. Processors and criteria
#: that a caller writes may count calls, or reject a token after the last one.
WITHOUT_MEMORY = {
    getattr(module, name)
    for module, names in {
        logits_process: (
            "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper "
            "RepetitionPenaltyLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor "
            "TopPLogitsWarper TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper "
            "TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper NoRepeatNGramLogitsProcessor "
            "EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
            "NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor "
            "ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor "
            "ExponentialDecayLengthPenalty LogitNormalization SuppressTokensLogitsProcessor "
            "SuppressTokensAtBeginLogitsProcessor"
        ),
        criteria: "MaxLengthCriteria MaxTimeCriteria EosTokenCriteria StopStringCriteria",
    }.items()
    for name in names.split()
    if hasattr(module, name)
}

#: The name of this change of the class.
_CHANGE = "defer_stop_check"


def defer_stop_check(model: nn.Module) -> bool:
    """Makes `generate()` of this model read one step late whether to stop, on CUDA.

    model: a model of transformers with `generate()`, on any device. Returns whether the model was
    changed. If transformers or the model's class lacks something that the deferred check needs, the
    model stays as it is, and a warning names what is missing. Raises TypeError for other models.

    Tokens, scores, returned caches and the state of the device's random generator are the same as
    with a check at every step. After an EOS or a stop string the model runs once more, and what
    that run wrote is removed; a stop at `max_length` costs nothing. A streamer gets each token one
    step later. The check is not deferred with processors or stopping criteria of the caller,
    `synced_gpus`, beams, or assisted decoding. The check is not deferred either for calls that can
    end before `max_length` and return a cache from which a step cannot be removed, such as a
    `StaticCache` with sliding windows.

    Changes the class of the model to a subclass of it, so a compiled model compiles again. Copies
    and pickles have the original class. `undefer_stop_check` undoes the change.
    """
    changed = with_generate(model)
    if has_change(changed, _CHANGE):
        return True
    reason = _missing(type(changed))
    if reason is not None:
        log.warning("defer_stop_check: generate() of this model stays as it is: %s", reason)
        return False
    sample = _deferring(utils.GenerationMixin._sample, utils.DeferredStopCheck)
    change_class(changed, _CHANGE, {"_sample": sample})
    return True


def undefer_stop_check(model: nn.Module) -> None:
    """Undoes `defer_stop_check`. Does nothing if the model is unchanged.

    Raises TypeError as `defer_stop_check` does, and RuntimeError if other code has changed the
    model's class since.
    """
    change_class_back(with_generate(model), _CHANGE, "undefer_stop_check")


def _missing(model_class: type) -> str | None:
    """Returns what `model_class` or transformers lacks; None if nothing is missing."""
    release = f"transformers {transformers.__version__}"
    for (owner, name), expected in RELIED_ON.items():
        function = getattr(getattr(utils, owner, None), name, None)
        if not isinstance(function, FunctionType):
            return f"{release} has no function {owner}.{name}"
        found = " ".join(inspect.signature(function).parameters)
        if found != expected:
            return f"{owner}.{name} of {release} takes ({found}), expected ({expected})"
    sample = utils.GenerationMixin._sample
    if "DeferredStopCheck" not in sample.__code__.co_names or sample.__closure__:
        return f"GenerationMixin._sample of {release} does not look up DeferredStopCheck"
    if getattr(model_class, "_sample", None) is not sample:
        return f"{model_class.__name__} has a method _sample of its own"
    return None


@functools.cache
def _deferring(sample: Any, library: Any) -> Any:
    """Returns a method `_sample` that defers the check where that is safe. `generate()` looks
    `_sample` up on the class."""
    check = _check_for_cuda(library)
    check_of_length = _check_of_length(check)

    @functools.wraps(sample)
    def _sample(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        used = library
        if synced_gpus or not _without_memory([*logits_processor, *stopping_criteria]):
            pass
        elif _ends_by_length(stopping_criteria):
            used = check_of_length
        elif _takes_one_more(self, input_ids, stopping_criteria, generation_config, model_kwargs):
            used = check
        chosen = sample if used is library else _with_global(sample, "DeferredStopCheck", used)
        return chosen(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            **model_kwargs,
        )

    return _sample


def _with_global(function: FunctionType, name: str, value: Any) -> Callable[..., Any]:
    """Returns a copy of the function in which one global name has another value. Its other global
    names keep their present values."""
    names = {**function.__globals__, name: value}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _without_memory(called: Iterable[Any]) -> bool:
    """Whether none of these processors and criteria keeps state between calls."""
    return all(type(one) in WITHOUT_MEMORY for one in called)


def _ends_by_length(stopping: Any) -> bool:
    """Whether only `max_length`, which the host knows, ends the call."""
    return [type(one) for one in stopping] == [criteria.MaxLengthCriteria]


def _takes_one_more(
    model: Any, input_ids: torch.Tensor, stopping: Any, config: Any, model_kwargs: dict[str, Any]
) -> bool:
    """Whether the model can run once more after the last token, whichever token is the last."""
    text = model.config.get_text_config(decoder=True)
    # A sequence that has ended continues with padding, which the last step has not been given yet.
    pad = config.pad_token_id
    padded = input_ids.shape[0] > 1 and pad is not None
    if padded and not 0 <= pad < getattr(text, "vocab_size", 0):
        return False
    embeds = model_kwargs.get("inputs_embeds")
    tokens = math.inf if stopping.max_length is None else stopping.max_length - 1
    tokens += 0 if embeds is None else embeds.shape[1]
    _, cache = cache_in(model_kwargs)
    limits = (
        getattr(text, "max_position_embeddings", None),
        _most_tokens(cache, input_ids.shape[0]),
    )
    return all(limit is None or tokens <= limit for limit in limits)


def _most_tokens(cache: Any, batch_size: int) -> int | None:
    """Returns the most tokens of a sequence that the cache may hold; None if it has no limit."""
    if _is_static(cache):
        return min(layer.max_cache_len for layer in cache.layers)
    most_tokens = getattr(cache, "most_tokens", None)
    return None if most_tokens is None else most_tokens(batch_size)


def _is_static(cache: Any) -> bool:
    """Whether `_remove_last` can remove a step from this cache: it must be a static cache without
    windows, and no part of it may be offloaded to the host."""
    return (
        type(cache) is StaticCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) is StaticLayer for layer in cache.layers)
    )


def _remove_last(cache: StaticCache) -> None:
    """Removes the last token from a cache with static layers. The token's place holds zeros
    again."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(1)
        last = layer.cumulative_length.view(1)
        layer.keys.index_fill_(2, last, 0)
        layer.values.index_fill_(2, last, 0)


def _check_for_cuda(library: Any) -> Any:
    """Returns a subclass of transformers' deferred check that also works on CUDA."""

    class DeferredStopCheck(library):
        """A deferred check that also undoes the additional step: its random draws, and its writes
        to a static cache."""

        def __init__(
            self,
            input_ids: torch.Tensor,
            max_length: int,
            cache: Any,
            cache_is_returned: bool,
            streamer: Any = None,
        ) -> None:
            self._static = cache if cache_is_returned and _is_static(cache) else None
            cache_is_returned = cache_is_returned and self._static is None
            super().__init__(input_ids, max_length, cache, cache_is_returned, streamer)
            self._generator = _generator(input_ids.device)
            self._states: deque[torch.Tensor] = deque(maxlen=2)

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
        ) -> bool:
            if device.type not in DEVICES:
                return library.is_supported(device, cache, cache_is_returned, is_assistant)
            if not cache_is_returned or _is_static(cache):  # a dropped cache can be of any kind
                cache = None
            elif cache is not None and not hasattr(cache, "layers"):  # `finish` reads the layers
                return False
            # Asks transformers as if the device were MPS, on which transformers itself defers the
            # check.
            mps = torch.device("mps")
            return library.is_supported(mps, cache, cache_is_returned, is_assistant)

        def __call__(self, *args: Any, **kwargs: Any) -> bool:
            if self._generator is not None:
                self._states.append(self._generator.get_state())
            return super().__call__(*args, **kwargs)

        def finish(self) -> int:
            steps = super().finish()
            if steps and self._generator is not None:
                self._generator.set_state(self._states[-1 - steps])
            if steps and self._static is not None:
                _remove_last(self._static)
            return steps

    return DeferredStopCheck


def _check_of_length(check: Any) -> Any:
    """Returns a subclass of the check for CUDA, for calls that only `max_length` ends. Such calls
    run no additional step, so their cache can be of any kind."""

    class DeferredStopCheck(check):
        """A deferred check that undoes nothing."""

        def __init__(
            self,
            input_ids: torch.Tensor,
            max_length: int,
            cache: Any,
            cache_is_returned: bool,
            streamer: Any = None,
        ) -> None:
            super().__init__(input_ids, max_length, None, False, streamer)
            self._generator = None

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
        ) -> bool:
            if device.type in DEVICES:
                cache_is_returned = False
            return bool(check.is_supported(device, cache, cache_is_returned, is_assistant))

    return DeferredStopCheck


def _generator(device: torch.device) -> torch.Generator | None:
    """Returns the generator that draws tokens on this device; None if its state is not on the
    host."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return None
