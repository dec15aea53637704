"""Listens for graph breaks: where Dynamo ended a graph or gave up on a function, and why.

Dynamo's own counter misses branches on data, and whole functions on which Dynamo gives up. A break
leaves two traces. One is the reason why a graph ended, which is on the graph and in
`graph_break_reasons`. The other is the exception with which Dynamo gave up on a frame. Python still
handles that exception when the frame's compilation ends.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import fx

from tilewright.compiler._compat import (
    Unsupported,
    UserError,
    callback_handler,
    convert_frame,
    graph_break_reasons,
)
from tilewright.patterns.dataflow import innermost_outside_torch

log = logging.getLogger("tilewright")

#: A function that is called with the texts of the breaks in one frame and the backend's options. It
#: returns whether the breaks must be an error, which is possible only where Dynamo gave up on the
#: frame.
Listener = Callable[[list[str], Mapping[str, Any]], bool]

_BRANCH = (
    "a branch depends on the data of a tensor",
    "compute both sides and choose with torch.where, or use torch.cond",
)
_IN_PYTHON = "give the model a Python number in its place"
# Dynamo's own hint, `capture_scalar_outputs`, makes Dynamo fail if the number ends a slice.
_NUMBER = (
    "this line needs a tensor's value as a Python number, as an index, as a length or from .item()",
    "compute with the tensor itself: write a cache by cache.index_copy_(dim, positions, k) and "
    f"mask by torch.arange(length) <= positions[:, None]; or {_IN_PYTHON}",
)

# The words and the hint of a miss for each reason that Dynamo gives, by the beginning of the
# reason. Dynamo's own hints name settings of Dynamo.
_REASONS = {
    "generic_jump": _BRANCH,
    "Data-dependent branching": _BRANCH,
    "step_unsupported": (
        "Dynamo does not know this statement",
        "write this line with tensor operations alone, or move it out of the model, before the "
        "call; torch.compile(..., fullgraph=True) shows Dynamo's message about it",
    ),
    "Unsupported Tensor.item() call": _NUMBER,
    "Data dependent operator": _NUMBER,
    "Consider annotating your code": (
        "a branch depends on a number that only the data decides: {unknown}",
        f"{_IN_PYTHON}, or state with torch._check(...) which bounds this number keeps",
    ),
    "TypeError when making fake tensor call": (
        "a call fails while it is traced: {error}",
        "SymInt and SymBool stand for sizes that change from call to call: give this graph sizes "
        "that are fixed numbers, for example with torch.compile(..., dynamic=False)",
    ),
    "Attempted to call function marked as skipped": (
        "Dynamo cannot trace {called}",
        "call it outside the compiled function; torch.library.custom_op can make an operator of a "
        "computation in C or C++; if an earlier break names this line, fix that break first",
    ),
}
# For the words in braces above, the regular expression that finds their values in Dynamo's text.
_NAMED = {
    "{called}": re.compile(r"module: (?:<.*?>|(.*?)), qualname: (.*?), skip reason"),
    "{error}": re.compile(r"context: TypeError <.*?>: (.*)"),
    "{unknown}": re.compile(r"data-dependent expression (.*?) \(unhinted"),
}

# Reasons for graph breaks that a Python loop over experts causes. Dynamo's hints for these breaks
# lead to graphs that are not fused.
_SIZED_BY_DATA = (
    "Dynamic shape operator", "Data dependent operator", "Consider annotating your code",
)  # fmt: skip
_EXPERTS_HINT = (
    "in a loop over experts, keep their weights in one tensor [E, N, K] and multiply with "
    "torch._grouped_mm, with the rows sorted by expert (transformers: "
    "experts_implementation='grouped_mm')"
)

_PREPARE = (
    "call tilewright.compiler.prepare(model) when the model is loaded: it replaces the library's "
    "linears by linears that decode the same codes in the graph, or says why a linear stays as it "
    "is"
)
# Libraries with breaks in their own code. A user cannot follow Dynamo's hint for such a break.
_LIBRARIES = {
    "peft": "merge the adapters into the weights before compiling (model.merge_and_unload()); LoRA "
    "without use_dora is fused as it is",
    "compressed_tensors": _PREPARE,
    "gptqmodel": _PREPARE,
    "bitsandbytes": _PREPARE,
}

_GIVEN_UP = "; Dynamo gives up "

_listeners: dict[Any, Listener] = {}
# The ids of the reasons that the backend has reported already, because they ended its own graphs.
_known: set[int] = set()
# The last item of `graph_break_reasons` at the time when a frame ended. torch._dynamo.reset()
# empties that list.
_latest: Any = None


def why_graph_ended(gm: fx.GraphModule) -> list[str]:
    """Returns the text of the break that ended a Dynamo graph. Returns an empty list if no break
    ended it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return []
    _known.add(id(reason))
    return [_break_text(reason.reason, reason.user_stack)]


def listen_for_breaks(backend: Any, listener: Listener) -> None:
    """Registers `listener` for breaks in frames that are compiled with the function `backend`."""
    _listeners[backend] = listener
    if not isinstance(callback_handler.end_callbacks, _Callbacks):
        callback_handler.end_callbacks = _Callbacks(callback_handler.end_callbacks)
    if _frame_ended not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_frame_ended)


@contextmanager
def noting_breaks(backend: Any) -> Iterator[list[str]]:
    """Yields a list to which the texts of breaks are added while the block runs. The breaks are
    those in frames of `backend`.

    Each text is Dynamo's own, with `(file:line)` of the user's code after its first line if the
    place is known. Several breaks at one place give one text.
    """
    places: set[str] = set()
    texts: list[str] = []

    def note(found: list[str], options: Mapping[str, Any]) -> bool:
        for text in found:
            # Dynamo often compiles a frame again by itself, and then gives up on it for the same
            # reason.
            place = text.partition("\n")[0].partition(_GIVEN_UP)[0]
            if place not in places:
                places.add(place)
                texts.append(text)
        return False

    listen_for_breaks(backend, note)
    try:
        yield texts
    finally:
        del _listeners[backend]


class _Callbacks(list[Any]):
    """Dynamo's list of callbacks. Our callback stays in the list after `torch._dynamo.reset()`, as
    registered backends do."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback is _frame_ended]


def _frame_ended(_: Any) -> None:
    """Reports the breaks of a frame when Dynamo ends the frame. An error in our code is logged,
    because it must not stop the user's model."""
    try:
        _report_breaks()
    except Exception:
        log.exception("graph breaks of a frame could not be reported")


def _report_breaks() -> None:
    """Calls the frame's listener for breaks that the backend has not reported."""
    global _latest
    error = sys.exc_info()[1]
    known = next((i for i, r in enumerate(graph_break_reasons, 1) if r is _latest), 0)
    ended = [r for r in graph_break_reasons[known:] if id(r) not in _known]
    _latest = graph_break_reasons[-1] if graph_break_reasons else None
    _known.clear()
    gave_up = isinstance(error, (Unsupported, UserError))
    if not _listeners or not (ended or gave_up):
        return
    listener, options, frame = _listener_of_frame()
    if listener is None or (gave_up and frame.get("one_graph")):
        return
    texts = [_break_text(r.reason, r.user_stack) for r in ended]
    if gave_up:
        name = getattr(frame.get("code"), "co_name", "a function")
        stack = getattr(error, "real_stack", ())
        first, newline, rest = _break_text(getattr(error, "msg", str(error)), stack).partition("\n")
        texts.append(f"{first}{_GIVEN_UP}{name}() and runs it as plain Python{newline}{rest}")
    tracer = getattr(error, "_torch_dynamo_tracer_output", None)
    if listener(texts, options) and tracer is not None:
        tracer.error_on_graph_break = True  # as under torch._dynamo.error_on_graph_break


def _listener_of_frame() -> tuple[Listener | None, Mapping[str, Any], Mapping[str, Any]]:
    """Returns (listener, the backend's options, the local variables of Dynamo's frame) of the
    compilation that is ending. The listener is None if its backend has none."""
    place: FrameType | None = sys._getframe()
    while place is not None:
        if place.f_code.co_filename == convert_frame.__file__ and "compiler_fn" in place.f_locals:
            backend, options = _unwrapped(place.f_locals["compiler_fn"])
            try:
                return _listeners.get(backend), options, place.f_locals
            except TypeError:  # a backend that cannot be a key is not ours
                return None, {}, {}
        place = place.f_back
    return None, {}, {}


def _unwrapped(compiler: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the function and the options given to torch.compile, without Dynamo's wrappers."""
    options: Mapping[str, Any] = {}
    for _ in range(4):
        options = getattr(compiler, "kwargs", {}).get("options") or options
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(compiler, "compiler_fn", None)
        if inner is None:
            break
        compiler = inner
    return compiler, options


def _break_text(reason: str, stack: Sequence[traceback.FrameSummary]) -> str:
    first, newline, rest = reason.partition("\n")
    known = (_REASONS[start] for start in _REASONS if first.startswith(start))
    words, hint = next(known, (first, ""))
    words = _filled(words, reason)
    if first.startswith(_SIZED_BY_DATA) and _is_among_experts(stack):
        hint, rest = _EXPERTS_HINT, ""
    elif words == _BRANCH[0] and _is_among_experts(stack):
        hint, rest = f"{hint}; {_EXPERTS_HINT}", ""
    elif library := _LIBRARIES.get(_library(stack)):
        hint, rest = library, ""
    rest = f"Hint: {hint}\n{rest}" if hint else rest  # our hint comes first
    return f"{words}{_place(stack)}{newline or (rest and chr(10))}{rest.lstrip(chr(10))}"


def _filled(words: str, reason: str) -> str:
    """Returns the words, in which values from Dynamo's text replace the braces."""
    for place, named in _NAMED.items():
        if place in words:
            found = named.search(reason)
            names = [] if found is None else [name for name in found.groups() if name]
            words = words.replace(place, ".".join(names) or "it does not say what")
    return words


def _is_among_experts(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether names in the user's code at a break contain "expert" or "moe". This is certain enough
    for a hint."""
    words = " ".join(f"{os.path.basename(f.filename)} {f.name} {f.line}" for f in stack).lower()
    return "expert" in words or "moe" in words


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    found = _innermost(stack)
    return f" ({os.path.basename(found[0])}:{found[1]})" if found else ""


def _library(stack: Sequence[traceback.FrameSummary]) -> str:
    """Returns the package below `site-packages` in which the break lies. Returns an empty text for
    other code."""
    found = _innermost(stack)
    _, _, inside = (found[0] if found else "").rpartition(f"site-packages{os.sep}")
    return inside.partition(os.sep)[0]


def _innermost(stack: Sequence[traceback.FrameSummary]) -> tuple[str, int] | None:
    return innermost_outside_torch([(f.filename, f.lineno or 0) for f in stack])
