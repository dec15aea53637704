"""Replaces modules of quantisation libraries by modules that decode their codes in plain PyTorch.

    prepared = prepare(model)
    print(prepared)
    compiled = torch.compile(model, backend="tilewright")

Some libraries break the graph at every linear, or hide their codes in an object that no graph
shows, or store codes in an order that kernels read slowly. The new modules hold the library's own
tensors, except for codes that are laid out again. They compute the same function as the library's
modules. Patterns then fuse the decoding with the product.
"""

from __future__ import annotations

import copy as copying
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilewright.compiler.quantised import (
    bitsandbytes,
    compressed_tensors,
    gpt_oss,
    gptqmodel,
    hqq,
    nvfp4,
    tensor_subclasses,
)
from tilewright.compiler.quantised.coded_linear import (
    CodedLinear,
    put_factors_together,
    share_equal_scales,
)

#: A library's reader of a module. It returns the new module that takes the place of the library's
#: module, or the reason why the library's module stays, or None for a module of another library.
Reader = Callable[[nn.Module], nn.Module | str | None]

READERS: tuple[Reader, ...] = (
    bitsandbytes.replacement,
    compressed_tensors.replacement,
    gpt_oss.replacement,
    gptqmodel.replacement,
    hqq.replacement,
    nvfp4.replacement,
    tensor_subclasses.replacement,
)


#: The attributes of a module that hold hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True)
class Replaced:
    """A module that was replaced, with its name in the model and its replacement (`module`)."""

    name: str
    original: nn.Module
    module: nn.Module


@dataclass(frozen=True)
class Left:
    """A library's module that stays as it is, and the reason."""

    name: str
    original: nn.Module
    reason: str


@dataclass
class Prepared:
    """The result of `prepare`.

    model: the given model or its copy.
    replaced: the modules that were replaced.
    left: the modules that stay as they are.

    `undo()` puts the original modules back; a second call does nothing. The object keeps the
    originals. Most replacements hold the same tensors as their originals, so that memory holds the
    codes only once. This is also true for GPTQ and AWQ if `prepare` worked in place: the original
    of a GPTQ linear shares the codes of its replacement until `undo()`, and the original of an AWQ
    linear holds no codes. Memory holds the codes twice for HQQ, and wherever `prepare` put codes of
    torchao, quanto or gpt-oss in another order.
    """

    model: nn.Module
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _hooks: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _lent: list[tuple[nn.Module, CodedLinear]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Puts back the original modules, the hooks that were taken off the model, and the codes in
        the library's order."""
        for one in self.replaced:
            _put(self.model, one.name, one.original)
        for original, module in self._lent:
            module.return_to(original)
        for restore in self._hooks:
            restore()
        self.replaced, self._lent, self._hooks = [], [], []

    def _lend(self, original: nn.Module, module: nn.Module | str | None) -> None:
        """Makes an original module share the codes of its replacement or give up its own codes,
        until `undo`."""
        if isinstance(module, CodedLinear):
            module.lend_to(original)
            self._lent.append((original, module))

    def __str__(self) -> str:
        if not self.replaced and not self.left:
            return "prepare: no module needs to be replaced"
        lines = [f"prepare: {len(self.replaced)} replaced, {len(self.left)} left as they are"]
        forms = Counter(f"{_called(r.original)}: {_described(r.module)}" for r in self.replaced)
        lines += [f"  {count} x {form}" for form, count in forms.items()]
        reasons = Counter(f"{_called(one.original)} stays: {one.reason}" for one in self.left)
        lines += [f"  {count} x {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


def prepare(model: nn.Module, *, copy: bool = False) -> Prepared:
    """Replaces, in place, modules of quantisation libraries whose codes a graph cannot show.

    `model` is any module; a model without such modules stays as it is. With `copy`, the function
    works on a copy of the modules, which shares the original's tensors, and the original stays as
    it is.

    The function reads linears of bitsandbytes, HQQ (4 bits), compressed-tensors, GPTQ and AWQ
    (gptqmodel), torchao, quanto and transformers' own NVFP4, and mixtures of gpt-oss in MXFP4. The
    new modules round activations as the library rounds them. The names in `state_dict` stay as they
    are for compressed-tensors, GPTQ and transformers' NVFP4. For gpt-oss they are the names in the
    file. For the other libraries they change.

    Codes of GPTQ and AWQ are laid out again, once, so that the codes in a row of a weight are
    contiguous. That needs temporary memory for one linear's codes at a time, N * K / 2 bytes. With
    copy=True, the copy has separate codes, in addition to the codes of the original. Linears
    in NVFP4 hold the reciprocal of `weight_global_scale`; `load_state_dict` computes it again.

    Raises TypeError if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if copy:
        model = _shared_copy(model)
    prepared = Prepared(model)
    known: dict[nn.Module, nn.Module | str | None] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module not in known:
            known[module] = _taking_place(module, is_root=not name)
            if not copy:
                prepared._lend(module, known[module])
        found = known[module]
        if isinstance(found, str):
            prepared.left.append(Left(name, module, found))
        elif found is not None:
            _put(model, name, found)
            prepared.replaced.append(Replaced(name, module, found))
    linears = {one.name: one.module for one in prepared.replaced}
    share_equal_scales(linears)
    put_factors_together(linears)
    if any(compressed_tensors.is_compressed(one.original) for one in prepared.replaced):
        left = any(compressed_tensors.is_compressed(one.original) for one in prepared.left)
        if not left:
            prepared._hooks += compressed_tensors.without_decompression(model)
            prepared._hooks += compressed_tensors.with_plain_rounding(model)
    return prepared


def _taking_place(module: nn.Module, is_root: bool) -> nn.Module | str | None:
    """Returns the answer of the first reader that knows a module, or None if no reader knows it.
    Returns the reason if the module cannot be replaced. A new module gets the mode and the hooks of
    the module that it replaces."""
    answers = (reader(module) for reader in READERS)
    found = next((answer for answer in answers if answer is not None), None)
    if not isinstance(found, nn.Module):
        return found
    if is_root:
        return "it is the model itself and not a part of one, so it cannot be replaced in place"
    if any(hasattr(part, "_hf_hook") for part in module.modules()):
        return "accelerate moves its tensors at each call; load the whole model on one device"
    for hooks in _HOOKS:
        # Shares the dictionaries themselves, so that the handles of hooks still remove them.
        setattr(found, hooks, getattr(module, hooks))
    return found.train(module.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    # Sets the module in `_modules`, because a container may name modules by number, and a library
    # may override __setattr__.
    model.get_submodule(parent)._modules[own] = module


def _shared_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of the modules that shares the tensors of the model."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        return copying.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _called(module: nn.Module) -> str:
    return type(module).__name__


def _described(module: nn.Module) -> str:
    return f"{_called(module)}({module.extra_repr()})"
