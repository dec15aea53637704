"""Tests that captures for timing share no stream with the user's captures."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tilewright.ops.runtime import timing


class Stream:
    def __init__(self, device: int = 0) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def captures(monkeypatch):
    """Replaces torch.cuda, and returns a list of the stream of each capture."""
    streams: list[Stream | None] = []

    def graph(made, stream=None, **mode):
        streams.append(stream)
        return nullcontext()

    cuda = SimpleNamespace(
        Stream=Stream, CUDAGraph=object, graph=graph, stream=lambda stream: nullcontext(),
        current_stream=Stream, current_device=lambda: 0, synchronize=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    timing._streams.cache_clear()
    yield streams
    timing._streams.cache_clear()


def test_all_captures_are_on_one_stream_that_is_given(captures):
    """All captures for timing are on one given stream. Without it, torch.cuda.graph would use the
    stream of the user's captures. With a new stream for each capture, this would happen after 32
    captures, since PyTorch has 32 streams."""
    calls: list[int] = []
    for _ in range(3):
        timing.capture([lambda: calls.append(1)], warmup=2)
    assert len(calls) == 9
    assert captures[0] is not None
    assert captures == [captures[0]] * 3
    warmed = timing._streams(0)[0]
    assert warmed is not captures[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_capture_by_hand_is_on_another_stream():
    x, seen = torch.zeros(4, device="cuda"), []

    def call() -> None:
        seen.append(torch.cuda.current_stream())
        x.add_(1)

    timing.capture([call], warmup=1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()
    assert seen[2] not in seen[:2]
