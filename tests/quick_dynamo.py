"""Leaves out what Dynamo does for its log, and does other things of its in fewer steps.

Most of the time of the tests goes into tracing. Nothing here changes what is traced. Each change is
made where the attribute that it replaces exists, since other versions of torch have others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


def quicken_dynamo() -> None:
    """Makes the changes to those modules of torch that are loaded, once for each module."""
    for name, change in CHANGES.items():
        module = sys.modules.get(name)
        if module is not None and module not in _CHANGED:
            _CHANGED.append(module)
            change(module)


_CHANGED: list[Any] = []


def _put(module: Any, name: str, replacement: Any) -> None:
    if hasattr(module, name):
        setattr(module, name, replacement)


def _guards(module: Any) -> None:
    """Guards are not timed with cold caches for the log, a tenth of what compiling a small model
    costs, nor is the line of the model shown beside each."""
    _put(module, "profile_guard_manager", lambda *arguments: 0.0)
    _put(module, "get_verbose_code_part", lambda code_part, guard: code_part)


def _settings_of_log(module: Any) -> None:
    """All settings of Dynamo and Inductor are not written into the log of each compilation."""
    for name in ("_scrubbed_inductor_config_for_logging", "_get_dynamo_config_for_logging"):
        _put(module, name, lambda: None)


def _side_effects(module: Any) -> None:
    """Changes of objects are not logged with all places that made them."""
    _put(module, "side_effect_replay_policy", "silent")


def _function_names(module: Any) -> None:
    """No name of a function is looked up beside each call, for which whole files are read."""
    _put(module, "get_funcname", lambda filename, lineno: None)


def _settings(module: Any) -> None:
    kind = module.ConfigModule
    kind.__getattr__ = _read_quickly(module._UNSET_SENTINEL, kind.__getattr__)


def _read_quickly(unset: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's settings, of which Dynamo reads one at every instruction: where nothing but the
    default and a value that was set decide one, nothing else is asked."""
    known: dict[tuple[Any, str], Any] = {}

    def decides_itself(entry: Any) -> bool:
        return (
            isinstance(getattr(entry, "user_override", None), ContextVar)
            and isinstance(entry.default, (bool, int, float, str, type(None)))
            and (entry.alias, entry.justknob) == (None, None)
            and not getattr(entry, "deprecated", True)
            and entry.env_value_force is unset
            and entry.env_value_default is unset
        )

    def read(self: Any, name: str) -> Any:
        entry = known.get((self, name))
        if entry is not None and not entry.hide:
            value = entry.user_override.get()
            return entry.default if value is unset else value
        value = original(self, name)
        if decides_itself(self._config[name]):
            known[self, name] = self._config[name]
        return value

    return read


def _traced_files(module: Any) -> None:
    """Whether a file is traced is decided once, and again where what decides it has changed."""
    if not all(hasattr(module, name) for name in ("_as_posix_path", "check_file", "SKIP_DIRS_RE")):
        return
    module._as_posix_path = functools.cache(module._as_posix_path)
    decided = functools.cache(
        lambda filename, inlined, *deciding: original(filename, inlined)  # deciding: of the key
    )
    original = module.check_file

    def check_file(filename: str | None, is_inlined_call: bool = False) -> Any:
        unittest = getattr(module.torch._dynamo.config, "enable_trace_unittest", None)
        forced = len(module.FORCE_SKIP_FILES)
        return decided(filename, is_inlined_call, module.SKIP_DIRS_RE, unittest, forced)

    module.check_file = check_file


def _events(module: Any) -> None:
    """Calls on a ShapeEnv go straight to its methods, unless torch is set to record them."""
    recording = sys.modules.get("torch.fx.experimental.recording")
    if recording is None or getattr(module.config, "translation_validation", True):
        return
    for name, method in list(vars(module.ShapeEnv).items()):
        code = getattr(method, "__code__", None)
        inner = getattr(method, "__wrapped__", None)
        if inner is not None and code is not None and code.co_filename == recording.__file__:
            setattr(module.ShapeEnv, name, inner)


def _fake_tensors(module: Any) -> None:
    """The key of a fake tensor in the cache of calls has the same parts, gathered in one pass."""
    dense, sparse = module.torch.strided, module.is_sparse_any
    _put(module, "is_sparse_any", lambda t: getattr(t, "layout", None) is not dense and sparse(t))
    kind = getattr(module, "TensorMetadata", None)
    if kind is None or not hasattr(kind, "_flatten_into"):
        return
    names = tuple(kind.__dataclass_fields__)
    symbol, sizes, original = module.SymInt, (module.torch.Size, tuple), kind._flatten_into

    def flatten_into(self: Any, result: list[Any], mode: Any, state: Any) -> None:
        parts: list[Any] = []
        for name in names:
            value = getattr(self, name)
            if type(value) in sizes:
                parts += (type(value), f"length_{len(value)}")
                for number in value:
                    if type(number) is not int:
                        return original(self, result, mode, state)
                    parts += (int, number)
            elif isinstance(value, symbol):
                return original(self, result, mode, state)
            else:
                parts.append(value)
        result += parts
        return None

    kind._flatten_into = flatten_into


#: What is changed in each module of torch.
CHANGES: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.guards": _guards,
    "torch._dynamo.utils": _settings_of_log,
    "torch._dynamo.config": _side_effects,
    "torch._dynamo.symbolic_convert": _function_names,
    "torch._dynamo.trace_rules": _traced_files,
    "torch.utils._config_module": _settings,
    "torch.fx.experimental.symbolic_shapes": _events,
    "torch._subclasses.fake_tensor": _fake_tensors,
}
