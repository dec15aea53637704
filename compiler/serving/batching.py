"""The settings of continuous batching that go with tilewright."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers import CompileConfig, ContinuousBatchingConfig

#: Attributes of a copy that is in use, which are no settings.
_TABLES, _COLUMNS = "_keeps_tables", "_wanted_columns"


def compile_config(options: dict[str, Any] | None = None) -> CompileConfig:
    """Returns how tilewright compiles a step of the engine.

    options: of the backend, as in `torch.compile(..., backend="tilewright", options=options)`.

    The mode is None, and options are there in any case: transformers then makes its own CUDA graphs
    of the compiled steps, which it does not of a step with the mode "reduce-overhead", its default.
    """
    options = {"inner": "inductor"} | (options or {})
    return CompileConfig(backend="tilewright", mode=None, dynamic=None, options=options)


@dataclass
class BatchingConfig(ContinuousBatchingConfig):
    """A `ContinuousBatchingConfig` of transformers whose steps tilewright compiles.

    options: of the backend, for both kinds of steps. All other settings are those of transformers,
    and `varlen_compile_config` and `decode_compile_config` that are given take precedence.

    For a model that `enable` has changed, `max_blocks_per_request` stays as it is wanted:
    transformers would put 0 there for any attention but its flash attention, which turns off block
    tables, and with them the steps in which each sequence has one token.
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
        """Returns a copy of any settings for a model that `enable` has changed."""
        made: Any = cls() if config is None else copy.copy(config)
        if not isinstance(made, cls):
            made.__class__ = cls
            made.options = None
            made._compile()
        # transformers warns where tables are asked for that it would turn off.
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
