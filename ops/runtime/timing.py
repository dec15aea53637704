"""Measures the times of variants of GPU work. Each variant is captured in a CUDA graph, and the
graphs are replayed in turn.

A variant is a list of calls that are captured in one CUDA graph. All variants are timed in every
round, so that they have the same clocks and temperatures. The result is the median over rounds. For
a cold L2 cache, the calls of a graph use different sets of arguments, which together are larger
than the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

Call = Callable[[], Any]


def capture(calls: Sequence[Call], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Captures all calls in one CUDA graph. Before that, runs each call `warmup` times without
    capturing it."""
    stream, capturing = _streams(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU during the capture.
    with torch.cuda.graph(graph, stream=capturing, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


@cache
def _streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns the streams of warm-ups and of captures, the same for each call.

    All captures on one stream share cuBLAS's workspace, which is allocated in the memory of the
    first captured graph. Therefore this file does not capture on the default stream of
    `torch.cuda.graph`. Otherwise, graphs that the user captures later would use a workspace that
    PyTorch may free when the graphs of this file are gone.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def interleaved_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph],
    calls_per_graph: int,
    rounds: int = 7,
    replays: int = 5,
    before_round: Call | None = None,
) -> dict[str, float]:
    """Returns the median time of a call of each variant in microseconds. All variants are timed in
    each round.

    The order of the variants rotates and reverses from round to round, because the variant after
    the hottest one has the lowest clocks. (With a fixed order, the last of three variants was 3 %
    slower on an H200.)
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_number in range(rounds + 1):
        for name in _order(list(graphs), round_number):
            graph = graphs[name]
            if before_round is not None:
                before_round()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_number:  # the first round is a warm-up
                times[name].append(1e3 * start.elapsed_time(end) / (replays * calls_per_graph))
    return {name: statistics.median(values) for name, values in times.items()}


def _order(names: list[str], round_number: int) -> list[str]:
    shift = round_number // 2 % len(names)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if round_number % 2 else turned
