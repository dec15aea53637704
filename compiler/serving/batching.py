"""The settings of continuous batching by tilewright."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers import CompileConfig, ContinuousBatchingConfig

import tilewright.compiler.backend  # noqa: F401  registers it where the package is not installed

#: The name of an attribute that `BatchingConfig.of` adds to the settings. It marks settings whose
#: block tables stay on.
_TABLES = "_keeps_tables"
#: The name of an attribute that `BatchingConfig.of` adds to the settings. It holds the requested
#: width of the block tables.
_COLUMNS = "_wanted_columns"


def compile_config(options: dict[str, Any] | None = None) -> CompileConfig:
    """Returns the configuration with which tilewright compiles a step of the engine.

    options: the options of the backend, as in `torch.compile(..., backend="tilewright",
    options=options)`.

    The mode is None and options are always set, so that transformers captures its own CUDA graphs
    of the compiled steps. With its default mode, "reduce-overhead", transformers would capture
    none.
    """
    options = {"inner": "inductor"} | (options or {})
    return CompileConfig(backend="tilewright", mode=None, dynamic=None, options=options)


@dataclass
class BatchingConfig(ContinuousBatchingConfig):
    """A `ContinuousBatchingConfig` of transformers whose steps tilewright compiles.

    options: the options of the backend, for both kinds of steps. All other settings are those of
    transformers. `varlen_compile_config` and `decode_compile_config` take precedence if they are
    given.

    For a model that `enable` has changed, `max_blocks_per_request` keeps its value. For any
    attention except transformers' own flash attention, transformers would set
    `max_blocks_per_request` to 0. This value would turn off block tables, and with them decode
    steps, in which each sequence has one token.
    """

    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compile()

    def _compile(self) -> None:
        if self.default_compile_level > 0:
            return
        for name in ("varlen_compile_config", "decode_compile_config"):
            if getattr(self, name) is None:
                setattr(self, name, compile_config(self.options))

    @classmethod
    def of(cls, config: ContinuousBatchingConfig | None) -> BatchingConfig:
        """Returns the given settings, which may be None, as a `BatchingConfig` for a model that
        `enable` has changed. The given settings do not change."""
        made: Any = cls() if config is None else copy.copy(config)
        if not isinstance(made, cls):
            made.__class__ = cls
            made.options = None
            made._compile()
        # transformers warns if settings ask for block tables that it turns off.
        own = made.__dict__
        own |= {_TABLES: True, _COLUMNS: made.max_blocks_per_request}
        if made.max_blocks_per_request:
            own["max_blocks_per_request"] = None
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name == "max_blocks_per_request" and own.get(_TABLES):
            if own.get(_COLUMNS) is not None:
                value = own[_COLUMNS]
            elif value == 0 and own.get(name):
                return
        super().__setattr__(name, value)
