"""Makes the shared models importable as `tests.models` wherever pytest is started."""

import functools
import gc
import logging
import os
import sys
from contextvars import ContextVar
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


def pytest_collection_finish(session):
    """Modules and tests stay: a tenth of a second less for every collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    quicken_dynamo()


def quicken_dynamo():
    """Dynamo times the guards of each compilation with cold caches, for its log, a tenth of what
    compiling a small model costs; writes all of its and Inductor's settings into it, each change
    of an object with all places that made it, the function's name beside each call, for which it
    reads whole files, and the line of the model beside each guard."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *arguments: 0.0
    if hasattr(guards, "get_verbose_code_part"):
        guards.get_verbose_code_part = lambda code_part, guard: code_part
    utils = sys.modules.get("torch._dynamo.utils")
    for name in ("_scrubbed_inductor_config_for_logging", "_get_dynamo_config_for_logging"):
        if hasattr(utils, name):
            setattr(utils, name, lambda: None)
    settings = sys.modules.get("torch.utils._config_module")
    if settings is not None and settings.ConfigModule.__getattr__.__name__ != "read":
        kind = settings.ConfigModule
        kind.__getattr__ = _read_quickly(settings._UNSET_SENTINEL, kind.__getattr__)
    config = sys.modules.get("torch._dynamo.config")
    if hasattr(config, "side_effect_replay_policy"):
        config.side_effect_replay_policy = "silent"
    translator = sys.modules.get("torch._dynamo.symbolic_convert")
    if hasattr(translator, "get_funcname"):
        translator.get_funcname = lambda filename, lineno: None


def _read_quickly(unset, original):
    """Torch's settings, of which Dynamo reads one at every instruction: where nothing but the
    default and a value that was set decide one, nothing else is asked."""
    known = {}

    def decides_itself(entry):
        return (
            isinstance(getattr(entry, "user_override", None), ContextVar)
            and isinstance(entry.default, (bool, int, float, str, type(None)))
            and (entry.alias, entry.justknob) == (None, None)
            and not getattr(entry, "deprecated", True)
            and entry.env_value_force is unset
            and entry.env_value_default is unset
        )

    def read(self, name):
        entry = known.get((self, name))
        if entry is not None and not entry.hide:
            value = entry.user_override.get()
            return entry.default if value is unset else value
        value = original(self, name)
        if decides_itself(self._config[name]):
            known[self, name] = self._config[name]
        return value

    return read


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
