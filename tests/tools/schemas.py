"""Compares the JSON that commands print with its published schema."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest


def schema_checked(command: str, text: str) -> dict:
    """Returns the JSON that a command printed, after a check against its published schema."""
    data = json.loads(text)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra 'dev'")
    schema = json.loads(files("tilewright.tools").joinpath(f"schemas/{command}.json").read_text())
    jsonschema.validate(data, schema)
    return data
