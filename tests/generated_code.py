"""Captures the code that Inductor generates, without compiling its C++ loops, each of which would
take 2 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code


class _NotCompiledError(Exception):
    """A loop of the generated code was called."""


def _not_compiled(*arguments: Any, **options: Any) -> Callable[..., None]:
    def loop(*arguments: Any) -> None:
        raise _NotCompiledError

    return loop


def generated_code(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Returns the Python code that Inductor generates for one call of a compiled function. The
    loops are not compiled, so the call ends at the first loop, or normally if there is none."""
    call = function

    def until_a_loop(*arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except _NotCompiledError:
            return

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", _not_compiled),
        mock.patch("torch._inductor.config.fx_graph_cache", False),
    ):
        _, codes = run_and_get_code(until_a_loop, *arguments, **options)
    return "\n".join(codes)
