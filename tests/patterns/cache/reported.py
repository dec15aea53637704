"""A layer that is compiled, and what the last report says of its cache writes."""

from __future__ import annotations

import torch

from tests.found import codes_of, patterns_in
from tilewright.compiler import reports


def run(layer, *args, **options):
    """The layer compiled by tilewright alone; its report is the last one."""
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"}, **options)
    return compiled(*args)


def patterns():
    return patterns_in(reports()[-1], "qkv")


def codes():
    return codes_of(reports()[-1], "qkv")
