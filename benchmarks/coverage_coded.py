"""Combines every quantised format with every model of the tests, for `coverage.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.coded import FORMATS, MODELS, build_coded

#: Models with experts. The formats of stacked experts are combined only with these models.
MIXTURES = ("deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss")
OF_EXPERTS = ("mxfp4",)


def combinations() -> list[str]:
    """Returns a name such as "llama+awq" for each model and each format that it can have."""
    return [
        f"{model}+{form}"
        for model in MODELS
        for form in FORMATS
        if form not in OF_EXPERTS or model in MIXTURES
    ]


def coded_case(name: str, phase: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns the model of a name such as "llama+awq", and the keyword arguments of its step.

    The model has two layers with weights of the format.
    """
    model, form = name.split("+")
    case = build_coded(model, [form, form], phase, seed)
    return case.model, {"input_ids": case.args[0], **case.kwargs}
