"""Makes the shared models importable as `tests.models` wherever pytest is started."""

import functools
import gc
import logging
import os
import sys
from pathlib import Path
from traceback import StackSummary

import pytest

# The process that hands out the tests to workers imports no torch: they start earlier.
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: more threads are in each other's way
    import torch

    torch.set_num_threads(1)
    # Many tests start processes, which compile all that they import where no byte code is kept.
    sys.dont_write_bytecode = False
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The ops' references are tested here, on the CPU.
os.environ.setdefault("TILEWRIGHT_EVERYWHERE", "1")

# Inductor compiles a program for each instruction set that the processor says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Dynamo makes many short-lived objects beside a large heap, which the collector reads each time,
# and which Dynamo has it read after each compilation.
gc.set_threshold(100_000, 20, 20)
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# pytest listens to every logger that does not propagate; one that listens to this has torch write
# each graph and guard of each compilation as JSON.
logging.getLogger("torch.__trace").propagate = True

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.quick_dynamo import quicken_dynamo  # noqa: E402  on the path now


def pytest_collection_finish(session):
    """Modules and tests stay: a tenth of a second less for every collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    quicken_dynamo()


def _kept_by_place(original):
    """How a line of code is shown, kept for the nodes of graphs, of which each shows its stack."""
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


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled, nothing reported, no gradients."""
    import torch

    from tilewright.compiler import backend

    torch._dynamo.reset()
    backend._REPORTS.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def graphs_kept(monkeypatch):
    """Reports of compilations keep their graphs, so that one trace is both run and looked at."""
    from tilewright.compiler.report import GraphReport

    monkeypatch.setattr(GraphReport, "without_graphs", lambda report: report)
