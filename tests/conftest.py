"""Has the settings and fixtures of all tests. Makes the shared models importable as
`tests.models`."""

import ast
import functools
import gc
import inspect
import logging
import os
import sys
from pathlib import Path
from traceback import StackSummary

import pytest

# pytest-xdist's main process does not import torch, so that its workers start earlier.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    # There is a worker for each core. The processes that tests start read the variable.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Many tests start processes. Without byte code, each would compile everything that it imports.
    sys.dont_write_bytecode = False
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The tests run the ops' references on the CPU.
os.environ.setdefault("TILEWRIGHT_EVERYWHERE", "1")

# Without this, Inductor compiles a test program for each vector instruction set of the processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Dynamo makes many short-lived objects beside a large heap. By default, the garbage collector would
# read the whole heap often, and Dynamo would start it after each compilation, too. With this
# threshold, most objects of a test are freed before the next million is made. The others take some
# 100 MB.
gc.set_threshold(1_000_000, 20, 20)
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# pytest adds a handler to every logger that does not propagate. With a handler on this logger,
# torch would write each graph and guard of each compilation as JSON.
logging.getLogger("torch.__trace").propagate = True

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.quick_dynamo import quicken_dynamo  # noqa: E402  on the path now


def pytest_collection_finish(session):
    """Excludes modules and tests from garbage collection, which makes every collection a tenth of a
    second shorter."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    quicken_dynamo()


def _kept_by_place(original):
    """Returns `format_frame_summary` with a cache. Each node of a graph formats its whole stack,
    and most nodes have the same frames."""
    known = {}

    @functools.wraps(original)
    def format_frame_summary(self, frame, **options):
        if options or frame.locals:
            return original(self, frame, **options)
        key = (
            *frame,
            *(getattr(frame, name, None) for name in ("colno", "end_lineno", "end_colno")),
        )
        if key not in known:
            known[key] = original(self, frame)
        return known[key]

    return format_frame_summary


StackSummary.format_frame_summary = _kept_by_place(StackSummary.format_frame_summary)


def _parsed(original):
    """Returns `getblock` with a parser in place of a tokenizer in Python. Triton calls it for each
    kernel that it loads."""

    @functools.wraps(original)
    def getblock(lines):
        begin = next((i for i, line in enumerate(lines) if line.startswith("def ")), len(lines))
        rest = range(begin + 1, len(lines))
        end = next(
            (i for i in rest if lines[i][0] == "@" or lines[i][0].isidentifier()), len(lines)
        )
        try:
            last = ast.parse("".join(lines[:end])).body[0].end_lineno
        except (SyntaxError, IndexError):
            return original(lines)
        commented = any(line[0].isspace() and line.strip() for line in lines[last:end])
        return original(lines) if commented else lines[:last]

    return getblock


inspect.getblock = _parsed(inspect.getblock)


@pytest.fixture
def fresh_dynamo():
    """Starts a test without compiled graphs and reports, and under `no_grad`."""
    import torch

    from tilewright.compiler import backend

    torch._dynamo.reset()
    backend._REPORTS.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def graphs_kept(monkeypatch):
    """Makes reports of compilations keep their graphs, so that a test can both run a model and look
    at its graph with one trace."""
    from tilewright.compiler.report import GraphReport

    monkeypatch.setattr(GraphReport, "without_graphs", lambda report: report)
