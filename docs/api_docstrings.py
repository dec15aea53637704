"""Turns docstrings into Markdown for docs/api.md. This module is an extension of griffe that
mkdocs.yml names.

A paragraph whose lines begin with names of arguments ("model, args: as the model is called.")
becomes a list. A reference such as :class:`Lowered` becomes the name as code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_REFERENCE = re.compile(r":\w+:(`[^`]+`)")
# "name: text" or "name, other: text", at the start of a line or after the end of a sentence.
_ARGUMENT = re.compile(r"(?:^|(?<=\. )|(?<=\.\n))(\w+(?:, \w+)*): (?=\S)", re.MULTILINE)
# A sentence after the arguments that says what a function returns or raises.
_AFTER = re.compile(r"(?<=\.)\s(?=(?:Returns|Raises) )")


class Markdown(Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Returns the docstring with its arguments as lists."""
    paragraphs = re.split(r"\n{2,}", _REFERENCE.sub(r"\1", docstring))
    return "\n\n".join(_as_list(text) for text in paragraphs)


def _as_list(paragraph: str) -> str:
    """Returns a paragraph as a list if it begins with an argument, and unchanged otherwise."""
    if not _ARGUMENT.match(paragraph):
        return paragraph
    text, *after = _AFTER.split(paragraph, maxsplit=1)
    parts = _ARGUMENT.split(text)[1:]
    items = zip(parts[::2], parts[1::2], strict=True)
    made = "\n".join(f"- **{name}**: {' '.join(said.split())}" for name, said in items)
    return "\n\n".join([made, *after])
