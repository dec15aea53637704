"""`mla_prefill_dense`: `mla_prefill` of latents from the graph, without a cache.

The op has the same arguments, results and kernels as `mla_prefill`. It is a separate op because it
writes nothing: Inductor does not support an op whose written arguments are all None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilewright.ops.checks import check_absent
from tilewright.ops.contract import register
from tilewright.ops.mla.arguments import MlaPrefillArguments
from tilewright.ops.mla.prefill.checks import check_prefill, check_prefill_values
from tilewright.ops.mla.prefill.prefill import OP as PREFILL

NAME = "mla_prefill_dense"


@dataclass(frozen=True)
class MlaDenseArguments(MlaPrefillArguments):
    """The arguments of `mla_prefill` (MlaPrefillArguments). latent_cache and rope_cache are
    None."""

    latent_cache: torch.Tensor | None = None
    rope_cache: torch.Tensor | None = None


def validate(a: MlaPrefillArguments) -> None:
    """Checks the arguments like `mla_prefill`, and that there is no cache. Raises ArgumentError."""
    check_absent(NAME, a, ("latent_cache", "rope_cache"), "a cache is for mla_prefill")
    check_prefill(NAME, a)


def validate_values(a: MlaPrefillArguments) -> None:
    check_prefill_values(NAME, a)


OP = register(
    replace(
        PREFILL,
        name=NAME,
        without_writes="",
        arguments=MlaDenseArguments,
        validate=validate,
        validate_values=validate_values,
        cases=tuple(case for case in PREFILL.cases if case.keys == "given"),
    )
)
