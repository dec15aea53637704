"""GPU work that is isolated from the caller's stream, memory pool and modes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """Runs a function in a separate thread without gradients, and returns its result.

    Streams, memory pools (such as the pool of a CUDA graph's warm-up) and dispatch modes belong to
    a thread. Therefore the function does not use the caller's streams, pools and modes, and its
    allocations outlive the caller's pool.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                outcome.append(function())
        except BaseException as error:  # it is raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="tilewright-apart")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
