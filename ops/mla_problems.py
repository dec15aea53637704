"""From the arguments of MLA ops to the static problems of their kernels."""

from __future__ import annotations

from typing import Any


def store_obstacle(a: Any) -> str | None:
    """Why no kernel takes a `mla_latent_store` call; None where one does. Metadata only."""
    return f"no kernel for {a.latent.dtype}"


def prefill_obstacle(a: Any) -> str | None:
    """Why no kernels take a `mla_prefill` call; None where they do. Metadata only."""
    return f"no kernel for {a.q.dtype}"


def branch_obstacle(a: Any) -> str | None:
    """Why no kernels take a `mla_prefill_branch_fp8` call; None where they do. Metadata only."""
    return f"no kernel for {a.q.dtype}"
