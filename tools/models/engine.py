"""Arguments for the steps of transformers' continuous batching, on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.codegen.libraries import imported
from tilewright.tools.models.loading import ModelError

#: SEQUENCES is the number of sequences of a step. TOKENS is the number of tokens of a varlen step,
#: and KEYS is the number of cached keys that precede these tokens.
SEQUENCES, TOKENS, KEYS = 8, 512, 2048
#: The sizes that the engine uses by default. PAGE_SIZE is the number of tokens of a page, and
#: COLUMNS the number of pages of a sequence in the block table.
PAGE_SIZE, COLUMNS = 256, 32


def one_step(model: Any, step: dict[str, Any]) -> Any:
    """Calls the model as the engine does. A trace of this function also contains the forward
    pre-hook of the model."""
    return model(**step).logits


@contextmanager
def engine_steps(model: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Yields the arguments of a decode step and of a varlen step, for :func:`one_step`.

    Raises ModelError for an object that is not a model of transformers, and for a model that the
    engine cannot run.
    """
    try:
        imported("transformers", "--engine")
    except ImportError as error:
        raise ModelError(str(error)) from error
    try:
        from tilewright.compiler.serving import steps
        from tilewright.compiler.serving.memory import memory_of
    except ImportError as error:
        raise ModelError(f"--engine: transformers has no continuous batching: {error}") from error
    said = _Said()
    logger = logging.getLogger("tilewright")
    logger.addHandler(said)
    try:
        with steps.in_engine(model) as can:
            logger.removeHandler(said)
            if not can:
                raise ModelError(f"--engine: {said.text}")
            memory = memory_of(
                model.config.get_text_config(), model.dtype,
                page_size=PAGE_SIZE, num_blocks=SEQUENCES, tokens=TOKENS, columns=COLUMNS,
            )  # fmt: skip
            yield {
                "decode": steps.decode_step(memory, SEQUENCES),
                "varlen": steps.varlen_step(memory, SEQUENCES, TOKENS, KEYS),
            }
    except TypeError as error:
        raise ModelError(f"--engine: {error}") from error
    finally:
        logger.removeHandler(said)


class _Said(logging.Handler):
    """A log handler that keeps the last warning."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
