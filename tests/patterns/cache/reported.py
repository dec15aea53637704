"""Compiles a layer, and reads the matches and misses of its cache writes in the last report."""

from __future__ import annotations

import torch

from tests.found import codes_of, patterns_in
from tilewright.compiler import reports


def run(layer, *args, **options):
    """Runs the layer compiled with the inner compiler eager. The last report is then its report."""
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"}, **options)
    return compiled(*args)


def patterns():
    return patterns_in(reports()[-1], "qkv")


def codes():
    return codes_of(reports()[-1], "qkv")
