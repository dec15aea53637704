"""Describes an exception from a user's code in one line, with the reason and the place in the
user's files."""

from __future__ import annotations

import re
import traceback


def one_line(error: Exception) -> str:
    """Returns a line such as `TypeError: the reason (model.py:12)`. Dynamo's long messages are cut
    to the error that Dynamo met."""
    message = str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    reason = lines[0]
    if (detail := _detail(message)) and detail not in reason:
        reason += f": {detail}"
    return f"{type(error).__name__}: {reason}{_place(error)}"


def _detail(message: str) -> str:
    """Returns the error that Dynamo met, as the explanation in Dynamo's message quotes it. Returns
    the whole explanation if it quotes no error, and "" if the message has no explanation."""
    explained = re.search(r"^\s*Explanation: (.*)$", message, re.MULTILINE)
    if explained is None:
        return ""
    met = re.search(r": got (\w+\(.*\))$", explained[1])
    return met[1] if met else explained[1].strip()


def _place(error: Exception) -> str:
    """Returns ` (file:line)` of the innermost frame in the user's own code, or "" if none is
    known."""
    from tilewright.patterns.dataflow import frames_of, innermost_outside_torch

    frames = frames_of(str(error).partition("from user code")[2]) or _frames_below_ours(error)
    found = innermost_outside_torch(frames)
    return f" ({found[0]}:{found[1]})" if found else ""


def _frames_below_ours(error: Exception) -> list[tuple[str, int]]:
    """Returns (file, line) of each frame of the traceback that this package called, directly or
    through torch."""
    frames: list[tuple[str, int]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "tilewright":
            frames.clear()
        elif package != "importlib" and not frame.f_code.co_filename.startswith("<"):
            frames.append((frame.f_code.co_filename, line))
    return frames
