"""Latencies for `deployment.py`: of calls that take turns, in torch, in a CUDA graph, in ONNX Runtime."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], object]
LEAST_S = 5e-3
"""Seconds that a group of calls takes together at least, so that the clock's own time does not count."""


@dataclass(frozen=True)
class Latency:
    """Seconds of a call, one number for each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def times_faster(self, other: Latency) -> tuple[float, float, float]:
        """How many times faster this is than another, by the rounds they shared: median, and a 95% interval of it.

        The interval is that of order statistics, which assumes nothing of how the times are spread.
        """
        ratios = sorted(b / a for a, b in zip(self.seconds, other.seconds, strict=True))
        outside = _outside(len(ratios))
        return statistics.median(ratios), ratios[outside], ratios[-1 - outside]


def _outside(n: int) -> int:
    """How many of n values lie outside the 95% interval of the median, on each side; 0 where n is too small for it."""
    total, count, chance = 0.0, 0, 1.0
    while True:
        total += chance * 2.0 ** (-n)
        if 2.0 * total > 0.05:
            return max(count - 1, 0)
        chance *= (n - count) / (count + 1)
        count += 1


def in_turns(calls: list[Call], rounds: int, wait: Callable[[], object] = lambda: None) -> list[Latency]:
    """The latency of each call; within a round they take turns, each waited for before the next."""
    for call in calls:
        for _ in range(3):
            call()
            wait()
    counts = [_count(call, wait) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for seconds, call, count in zip(found, calls, counts, strict=True):
            wait()
            began = time.perf_counter()
            for _ in range(count):
                call()
                wait()
            seconds.append((time.perf_counter() - began) / count)
    return [Latency(seconds) for seconds in found]


def _count(call: Call, wait: Callable[[], object]) -> int:
    began = time.perf_counter()
    call()
    wait()
    return max(1, min(200, round(LEAST_S / max(time.perf_counter() - began, 1e-6))))


@torch.inference_mode()
def eager(models: list[nn.Module], x: Tensor, rounds: int) -> list[Latency]:
    """Calls from Python until the result is there."""
    wait: Call = torch.cuda.synchronize if x.is_cuda else lambda: None
    return in_turns([lambda model=model: model(x) for model in models], rounds, wait)  # type: ignore[misc]


@torch.inference_mode()
def graphs(models: list[nn.Module], x: Tensor, rounds: int) -> list[Latency | None]:
    """Replays of a CUDA graph, by the GPU's own clock: what is left without Python and the launches.

    None for a model that cannot be captured.
    """
    captured = [_capture(model, x) for model in models]
    counts = [0 if graph is None else max(1, min(200, round(LEAST_S / _replay(graph, 3)))) for graph in captured]
    found: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for seconds, graph, count in zip(found, captured, counts, strict=True):
            if graph is not None:
                seconds.append(_replay(graph, count))
    return [Latency(seconds) if seconds else None for seconds in found]


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of one replay, the mean over replays that follow each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3 / count
    return max(seconds, 1e-9)


def _capture(model: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph | None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries set themselves up before the capture
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            model(x)
    except RuntimeError as error:
        print(f"{type(model).__name__} cannot be captured as a CUDA graph: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return None
    return graph


class Session:
    """A model in ONNX Runtime."""

    def __init__(self, file: bytes, threads: int, provider: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(file, options, providers=[provider])
        self.input = self.session.get_inputs()[0].name

    def __call__(self, x: Any) -> Any:
        (output,) = self.session.run(None, {self.input: x})
        return output


def provider_for(device: torch.device) -> str | None:
    """ONNX Runtime's provider for a device; None where it has none."""
    try:
        import onnxruntime
    except ImportError:
        return None
    wanted = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    return wanted if wanted in onnxruntime.get_available_providers() else None
