"""Makes Dynamo faster in tests, which spend most of their time on tracing.

The changes turn off parts of Dynamo that only write its log, and replace slow functions by faster
ones with the same results. No change alters what is traced. A change is skipped if this version of
torch lacks the attribute that the change would replace.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


def quicken_dynamo() -> None:
    """Changes each module of `CHANGES` once, as soon as it is loaded."""
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
    """Turns off two things: the timing of guards with cold caches, which takes a tenth of the time
    to compile a small model, and the line of the model's code next to each guard."""
    _put(module, "profile_guard_manager", lambda *arguments: 0.0)
    _put(module, "get_verbose_code_part", lambda code_part, guard: code_part)


def _settings_of_log(module: Any) -> None:
    """Keeps the settings of Dynamo and Inductor out of the log of each compilation."""
    for name in ("_scrubbed_inductor_config_for_logging", "_get_dynamo_config_for_logging"):
        _put(module, name, lambda: None)


def _side_effects(module: Any) -> None:
    """Turns off the log of changed objects and of the places that changed them."""
    _put(module, "side_effect_replay_policy", "silent")


def _function_names(module: Any) -> None:
    """Turns off the names of functions next to calls in the log, for which Dynamo reads whole
    files."""
    _put(module, "get_funcname", lambda filename, lineno: None)


def _settings(module: Any) -> None:
    """Reads torch's settings faster, since Dynamo reads one at every instruction."""
    kind = module.ConfigModule
    kind.__getattr__ = _read_quickly(module._UNSET_SENTINEL, kind.__getattr__)


def _read_quickly(unset: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a faster `ConfigModule.__getattr__`. If only the default and a value set by the user
    decide a setting, the function looks at nothing else."""
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
    """Decides once for each file whether Dynamo traces it. If Dynamo's rules change, it decides
    again."""
    if not all(hasattr(module, name) for name in ("_as_posix_path", "check_file", "SKIP_DIRS_RE")):
        return
    module._as_posix_path = functools.cache(module._as_posix_path)
    decided = functools.cache(
        # `deciding` is part of the key.
        lambda filename, inlined, *deciding: original(filename, inlined)
    )
    original = module.check_file

    def check_file(filename: str | None, is_inlined_call: bool = False) -> Any:
        unittest = getattr(module.torch._dynamo.config, "enable_trace_unittest", None)
        forced = len(module.FORCE_SKIP_FILES)
        return decided(filename, is_inlined_call, module.SKIP_DIRS_RE, unittest, forced)

    module.check_file = check_file


def _wrapped_values(module: Any) -> None:
    """Looks first for the function that wraps values of a type. Dynamo would first import five
    modules and define three classes, for every value."""
    kind = module.VariableBuilder
    if not all(hasattr(kind, name) for name in ("_wrap", "_type_dispatch", "_id_dispatch")):
        return
    original = kind._wrap

    def wrap(self: Any, value: Any) -> Any:
        found = self._type_dispatch().get(type(value)) or self._id_dispatch().get(id(value))
        return original(self, value) if found is None else found(self, value)

    kind._wrap = wrap


def _events(module: Any) -> None:
    """Removes the recorder around the methods of ShapeEnv, unless torch is set to record calls."""
    recording = sys.modules.get("torch.fx.experimental.recording")
    if recording is None or getattr(module.config, "translation_validation", True):
        return
    for name, method in list(vars(module.ShapeEnv).items()):
        code = getattr(method, "__code__", None)
        inner = getattr(method, "__wrapped__", None)
        if inner is not None and code is not None and code.co_filename == recording.__file__:
            setattr(module.ShapeEnv, name, inner)


def _fake_tensors(module: Any) -> None:
    """Computes the key of a fake tensor for the cache of calls with fewer Python calls. The key is
    the same."""
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


#: The changes in each module of torch.
CHANGES: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.guards": _guards,
    "torch._dynamo.utils": _settings_of_log,
    "torch._dynamo.config": _side_effects,
    "torch._dynamo.symbolic_convert": _function_names,
    "torch._dynamo.trace_rules": _traced_files,
    "torch._dynamo.variables.builder": _wrapped_values,
    "torch.utils._config_module": _settings,
    "torch.fx.experimental.symbolic_shapes": _events,
    "torch._subclasses.fake_tensor": _fake_tensors,
}
