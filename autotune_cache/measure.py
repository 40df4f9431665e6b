"""Timing: what one call takes, and which of several candidates is the fastest.

A GPU's calls are captured in one graph over several sets of buffers, and a sample is a replay's time over its calls; a
CPU's are a loop. Candidates take turns, so that a clock that drifts drifts for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mxkv.autotune_cache.trials import Tensors

TIE = 1.02
"""Candidates within this ratio of the fastest are equally fast: the one that was declared first wins."""

FEWEST = 3
"""Samples with which a candidate counts as measured."""

_MOST_CALLS = 512  # of a graph: capturing one takes some microseconds
_REPLAY_US = 300.0
_PAUSE_CYCLES = 150_000
_GPU_WARM_S, _IDLE_S = 0.25, 1.0
_CPU_SAMPLE_US = 2000.0
_DROP = 2.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """The statistics of a candidate's samples, in microseconds a call."""

    median_us: float
    p20_us: float
    p80_us: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))

    @property
    def error(self) -> float:
        """How far off the median may be (a standard error, from the middle 60 % of the samples), relative to it."""
        spread = (self.p80_us - self.p20_us) / 1.68
        return 1.25 * spread / math.sqrt(self.count) / self.median_us


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
        first: Samples before candidates are dropped.
        least, most: Samples of those that remain; fewer than ``most`` once the fastest three are sure to ``sure``.
        finalists: How many are timed again, and so ``last`` samples at most, until sure to ``final``.
        seconds: Once it took so long, no sample is taken that is not needed.
    """

    first: int = FEWEST
    least: int = 7
    most: int = 15
    finalists: int = 3
    last: int = 40
    sure: float = 0.006
    final: float = 0.0025
    seconds: float = 10.0


class OutOfTime(Exception):
    """The budget is spent."""


def race(
    samplers: Sequence[Callable[[], float]],
    *,
    plan: Plan = Plan(),
    budget_s: float = math.inf,
    on_turn: Callable[[int], None] = lambda index: None,
    on_timing: Callable[[int, Timing], None] = lambda index, timing: None,
    on_failure: Callable[[int, Exception], None] | None = None,
) -> tuple[dict[int, Timing], bool]:
    """Time candidates in turns.

    Args:
        samplers: What takes a sample of each candidate, in microseconds a call.
        plan: How long.
        budget_s: Seconds after which to stop with what there is.
        on_turn: Called with a candidate's index before each of its samples.
        on_timing: Called with a candidate's statistics when it counts as measured, and when it is dropped or done.
        on_failure: Called where a sampler raises; that candidate is out. None lets the error through.

    Returns:
        The statistics of each candidate with at least :data:`FEWEST` samples, and whether the race was run to its end.
    """
    started = time.monotonic()
    samples: dict[int, list[float]] = {index: [] for index in range(len(samplers))}

    def spent() -> float:
        return time.monotonic() - started

    def turns(indices: Sequence[int]) -> None:
        for index in indices:
            if spent() > budget_s:
                raise OutOfTime
            on_turn(index)
            try:
                samples[index].append(samplers[index]())
            except Exception as error:
                if on_failure is None:
                    raise
                samples.pop(index)
                on_failure(index, error)

    def timings(indices: Sequence[int]) -> dict[int, Timing]:
        found = {i: Timing.of(samples[i]) for i in indices if len(samples.get(i, ())) >= FEWEST}
        return dict(sorted(found.items(), key=lambda pair: pair[1].median_us))

    def rounds(indices: list[int], start: int, least: int, most: int, sure: float, *, drop: bool) -> list[int]:
        for number in range(start, most):
            # Neither always in one order: a candidate's neighbour leaves its heat and its cache behind.
            turns(indices if number % 2 else indices[::-1])
            indices = [i for i in indices if i in samples]
            found = timings(indices)
            if not found:
                continue
            fastest = next(iter(found.values())).median_us
            if drop and number == start:  # from now on each of them counts as measured
                for index, timing in found.items():
                    on_timing(index, timing)
            if drop:
                # By its best sample: a burst of something else must not cost a candidate its place.
                for index in [i for i in indices if i in found and min(samples[i]) > _DROP * fastest]:
                    indices.remove(index)
                    on_timing(index, found[index])
            leaders = list(timings(indices).values())[: plan.finalists]
            if spent() > plan.seconds or (number + 1 >= least and all(t.error <= sure for t in leaders)):
                break
        return indices

    finished = True
    try:
        left = list(samples)
        for _ in range(plan.first - 1):
            turns(left)
            left = [i for i in left if i in samples]
        left = rounds(left, plan.first - 1, plan.least, plan.most, plan.sure, drop=True)
        finalists = list(timings(left))[: plan.finalists]
        for index, timing in timings(left).items():
            on_timing(index, timing)
        if len(finalists) > 1 and plan.last > plan.most:
            rounds(finalists, 0, plan.first, plan.last - plan.most, plan.final, drop=False)
        for index, timing in timings(finalists).items():
            on_timing(index, timing)
    except OutOfTime:
        finished = False
        for index, timing in timings(list(samples)).items():
            on_timing(index, timing)
    return timings(list(samples)), finished


def winner(medians: Sequence[float | None], default: int | None = None) -> int | None:
    """The index of the best of candidates in declared order (None: not timed, or rejected).

    Of those that are hardly apart it is the one that is taken without tuning, else the first.
    """
    timed = [median for median in medians if median is not None]
    if not timed:
        return None
    tied = [i for i, median in enumerate(medians) if median is not None and median <= TIE * min(timed)]
    return default if default in tied else tied[0]


class Timer:
    """Takes samples of candidates on one device.

    Args:
        device: Where the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last_used = 0.0
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self) -> None:
        """Bring a GPU that was idle to its clocks."""
        if self.device.type != "cuda" or time.monotonic() - self._last_used < _IDLE_S:
            return
        a = torch.randn(2048, 2048, device=self.device)
        until = time.monotonic() + _GPU_WARM_S
        while time.monotonic() < until:
            for _ in range(16):
                a = (a @ a).clamp_(-1, 1)
            torch.cuda.synchronize(self.device)

    def used(self) -> None:
        """Note that the device is warm."""
        self._last_used = time.monotonic()

    def first_calls(self, call: Callable[[Tensors], None], sets: Sequence[Tensors]) -> None:
        """Compile and warm a candidate up; where it fails, it fails here."""
        for tensors in sets[:2]:
            call(tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sampler(
        self, call: Callable[[Tensors], None], sets: Sequence[Tensors], calls: int | None
    ) -> tuple[Callable[[], float], int]:
        """What takes a sample of a candidate.

        Args:
            call: Makes the candidate's call on a set of tensors.
            sets: The sets.
            calls: Of a sample; None chooses it, for this candidate and those that follow.

        Returns:
            The function, and the number of calls.
        """
        if self.device.type == "cuda":
            return self._gpu_sampler(call, sets, calls)
        return _cpu_sampler(call, sets, calls)

    def _gpu_sampler(
        self, call: Callable[[Tensors], None], sets: Sequence[Tensors], calls: int | None
    ) -> tuple[Callable[[], float], int]:
        if calls is None:
            fewest = max(2, len(sets))
            sample = self._replays(call, sets, fewest)
            sample()
            us = min(sample(), sample())
            calls = max(fewest, min(math.ceil(_REPLAY_US / us), _MOST_CALLS))
            if calls == fewest:
                return sample, calls
        sample = self._replays(call, sets, calls)
        sample()
        return sample, calls

    def _replays(self, call: Callable[[Tensors], None], sets: Sequence[Tensors], calls: int) -> Callable[[], float]:
        """A sample is a replay of a graph of so many calls."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        # (torch.cuda.graph would collect garbage and empty torch's cache at each capture.)
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for i in range(calls):
                    call(sets[i % len(sets)])
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        pause: Callable[[int], None] = torch.cuda._sleep

        def sample() -> float:
            pause(_PAUSE_CYCLES)  # so that the graph is there when the first event is past
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / calls

        return sample


class LoopTimer(Timer):
    """Times calls that no graph captures: they synchronise."""

    def sampler(
        self, call: Callable[[Tensors], None], sets: Sequence[Tensors], calls: int | None
    ) -> tuple[Callable[[], float], int]:
        def run(tensors: Tensors) -> None:
            call(tensors)
            torch.cuda.synchronize(self.device)

        return _cpu_sampler(run, sets, calls)


def _cpu_sampler(
    call: Callable[[Tensors], None], sets: Sequence[Tensors], calls: int | None
) -> tuple[Callable[[], float], int]:
    turn: Iterator[Any] = _endless(sets)

    def sample(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call(next(turn))
        return (time.perf_counter() - begun) * 1e6 / count

    chosen = calls or max(1, math.ceil(_CPU_SAMPLE_US / max(sample(1), 0.1)))
    return lambda: sample(chosen), chosen


def _endless(sets: Sequence[Tensors]) -> Iterator[Tensors]:
    while True:
        yield from sets
