"""Work on the GPU that must not see what surrounds the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """The function's result, from a thread of its own without gradients.

    Streams, memory pools (those of a CUDA graph's warm-up) and dispatch modes belong to a thread:
    the function sees none of the caller's, and what it allocates outlives the caller's pool.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                outcome.append(function())
        except BaseException as error:  # handed to the caller
            failure.append(error)

    thread = threading.Thread(target=run, name="tilewright-apart")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
