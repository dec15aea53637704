"""Reads Inductor's settings, and adds to torch's cache artifacts and traces."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_origin

import torch
from torch._logging import trace_structured


def mode_patches(mode: str | None) -> dict[str, Any] | None:
    """Returns the settings of Inductor for a `torch.compile` mode. Returns None if no mode is
    given. Raises RuntimeError for an unknown mode."""
    return torch._inductor.list_mode_options(mode) if mode else None


def modes() -> list[str]:
    """Returns the names of `torch.compile`'s modes."""
    return list(torch._inductor.list_mode_options())


def option_problem(options: Mapping[str, Any]) -> str | None:
    """Returns what was expected in place of the first bad option. An option is bad if Inductor does
    not have it, or if its value has another type. Returns None if all options are good."""
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            return f"settings of Inductor; it has no {name!r} (similar names: {near})"
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):
            return f"a value of type {kind.__name__} for {name!r}"
    return None


def register_artifacts(
    kind: str, populate: Callable[[str, bytes], Any]
) -> Callable[[str, bytes], None] | None:
    """Makes `kind` a type of torch's cache artifacts. torch calls `populate(key, content)` for each
    artifact of this type that it loads.

    Returns the function that records an artifact. Returns None if this torch has another interface.
    """
    try:
        from torch.compiler._cache import (
            CacheArtifact,
            CacheArtifactFactory,
            CacheArtifactManager,
        )

        class Artifact(CacheArtifact):
            def populate_cache(self) -> None:
                populate(self.key, self.content)

            @staticmethod
            def type() -> str:
                return kind

        CacheArtifactFactory.register(Artifact)
        return partial(CacheArtifactManager.record_artifact, kind)
    except (ImportError, AttributeError, TypeError, AssertionError):
        return None


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Adds a text to torch's structured trace (TORCH_TRACE), which tlparse shows with the
    compilation.

    `payload` is called only if a trace is written. `encoding` is "string" or "json".
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )
