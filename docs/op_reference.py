"""Writes docs/op-reference.md from what each op declares: schema, docstrings, lowerings, errors.

    python docs/op_reference.py

The line of an op in the index is the first paragraph of its file's docstring: the op's name, a
colon, and what the op does. Its formula is the docstring of its reference: a sentence, then the
formula, indented. A test fails if the page differs from the code.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import tilewright.ops  # noqa: F401  registers the ops
from tilewright.ops.contract import FusedOp, all_ops
from tilewright.ops.groups import OptionalGroup

PAGE = Path(__file__).with_name("op-reference.md")
HEAD = """# Op reference

This page lists every fused op as its code declares it; `python docs/op_reference.py` writes it.
Exported programs and callers outside the package rely on these schemas. [ops.md](ops.md) says how
ops are called, and which arguments they refuse.
"""


def page() -> str:
    """Returns the whole page."""
    ops = [op for op in all_ops() if op.namespace == "tilewright"]
    index = "\n".join(f"- [`{op.name}`](#{op.name}): {purpose(op)}" for op in ops)
    return "\n\n".join([HEAD.rstrip(), index, *map(section, ops)]) + "\n"


def purpose(op: FusedOp) -> str:
    """Returns what an op does, in the words of the file that declares it.

    Raises ValueError if the file's docstring does not begin with the op's name and a colon.
    """
    files = [sys.modules[part.__module__] for part in (op.validate, op.sample_inputs)]
    firsts = [_text(file.__doc__).partition("\n\n")[0].replace("\n", " ") for file in files]
    for name, _, said in (first.partition(": ") for first in firsts):
        if name == f"`{op.name}`":
            return said
    file = files[0].__file__
    raise ValueError(f"{file}: its docstring must begin with `{op.name}`: and what the op does")


def section(op: FusedOp) -> str:
    """Returns the section of one op."""
    lowerings = ", ".join(
        f"`{way.name}` ({'/'.join(sorted(way.device_types))})" for way in op.lowerings
    )
    parts = [
        f"## {op.name}",
        f"```\n{op.declaration}\n```",
        _text(op.arguments.__doc__),
        *_groups(op),
        f"**Formula.** {_text(op.reference.__doc__)}",
        f"**Writes.** {', '.join(f'`{name}`' for name in op.mutated) or 'Nothing'}.",
        f"**Lowerings.** {lowerings or 'None'}. The reference computes all other calls.",
        f"**Error.** {op.error_model}",
    ]
    return "\n\n".join(part for part in parts if part)


def _groups(op: FusedOp) -> list[str]:
    """Returns the docstrings of the groups among an op's arguments, each once."""
    groups = (item for item in vars(op.arguments).values() if isinstance(item, OptionalGroup))
    return [f"**{name}.** {_text(text)}" for name, text in dict(g.text for g in groups).items()]


def _text(docstring: str | None) -> str:
    """Returns a docstring as Markdown; indented parts stay as they are."""
    return inspect.cleandoc(docstring or "")


if __name__ == "__main__":
    PAGE.write_text(page())
