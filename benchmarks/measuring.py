"""How the GPU benchmarks measure: replays of CUDA graphs, the copy ceiling, and where all that was.

Calls over several sets of buffers, together larger than twice the L2, are captured in one CUDA graph; a sample is a
replay's time over its calls; the median of the samples is reported. Copies are timed in the same way.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import multiprocessing
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

import mxkv
from mxkv import devices

DEVICE = "cuda"
SAMPLES, WARM_REPLAYS, MOST_SETS = 25, 3, 64
MIB, GIB = 1 << 20, 1 << 30

Job, Found = TypeVar("Job"), TypeVar("Found")


def captured(calls: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """All calls in one graph, captured on the current stream."""
    for call in calls:  # compiles, outside of the capture
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()  # torch.cuda.graph() would collect garbage first, which takes longer than all the rest
    for call in calls:
        call()
    graph.capture_end()
    return graph


def replayed(
    calls: Sequence[Callable[[], None]], samples: int = SAMPLES, replays: int = 1
) -> tuple[float, list[float]]:
    """Microseconds a call: the median over samples of ``replays`` replays of a graph of all calls, and every sample,
    in order."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    times = []
    with torch.cuda.stream(stream):
        graph = captured(calls)
        for i in range(samples + WARM_REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            if i >= WARM_REPLAYS:
                times.append(begin.elapsed_time(end) * 1e3 / len(calls) / replays)
    torch.cuda.synchronize()
    times.sort()
    return statistics.median(times), times


def repeated(calls: Sequence[Callable[[], None]], at_least: int = 8) -> list[Callable[[], None]]:
    """The calls, over and over, until there are so many."""
    return list(calls) * -(-at_least // len(calls))


def sets_needed(nbytes: int, least: int = 2) -> int:
    """How many sets of so many bytes are together larger than twice the L2."""
    l2 = max(devices.describe(torch.device(DEVICE, torch.cuda.current_device())).l2_bytes, 60 * MIB)
    return min(MOST_SETS, max(least, -(-2 * l2 // nbytes) + 1))


def copy_ceiling() -> float:
    """Bytes a second (read and written) of a large device-to-device copy."""
    best = 0.0
    for size in (256 * MIB, GIB, 2 * GIB):
        source = torch.randint(0, 255, (2, size), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        pairs = [functools.partial(target[i].copy_, source[i]) for i in range(2)]
        us, _ = replayed(repeated(pairs, 4))
        best = max(best, 2 * size / us * 1e6)
    return best


@triton.jit
def empty_kernel(pointer):
    return


def against_copy(shape: Any, us: float, samples: list[float], ceiling: float) -> dict[str, Any]:
    """What is reported of a shape (with ``name``, ``nbytes``, ``wanted_fraction`` and ``wanted_us``).

    Args:
        shape: It.
        us: The median of a call.
        samples: All samples, in order.
        ceiling: Of a copy, in bytes a second.
    """
    fraction = shape.nbytes / (us * 1e-6) / ceiling
    met = [fraction >= shape.wanted_fraction] if shape.wanted_fraction is not None else []
    met += [us <= shape.wanted_us] if shape.wanted_us is not None else []
    return {
        "name": shape.name, "us": us, "p20": samples[len(samples) // 5], "p80": samples[-len(samples) // 5],
        "bytes": shape.nbytes, "floor_us": shape.nbytes / ceiling * 1e6, "fraction_of_copy": fraction,
        "wanted_fraction": shape.wanted_fraction, "wanted_us": shape.wanted_us, "met": all(met) if met else None,
    }  # fmt: skip


def in_processes(workers: int, function: Callable[[Job], Found], jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
    """Each job with what a function finds of it, in worker processes: what they compile is in Triton's cache then."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from zip(jobs, pool.map(function, jobs), strict=True)


def environment(ceiling: float | None = None, **more: Any) -> dict[str, Any]:
    """Where and with what this measures, and the copy ceiling where it was measured."""
    device = devices.describe(torch.device(DEVICE, torch.cuda.current_device()))
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    found = {
        "device": device.name, "target": devices.target_of(device.device).name, "compute_units": device.compute_units,
        "l2_bytes": device.l2_bytes, "torch": torch.__version__, "triton": triton.__version__,
        DEVICE: torch.version.cuda, "python": platform.python_version(), "mxkv": mxkv.__version__,
        "revision": revision.stdout.strip() or None, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
    }  # fmt: skip
    return found | ({} if ceiling is None else {"copy_tb_per_s": ceiling / 1e12}) | more


def launched(sets: Iterable[Any]) -> None:
    """A few launches, for a profiler to look at."""
    for buffers in sets:
        buffers.run()
        buffers.run()
    torch.cuda.synchronize()
