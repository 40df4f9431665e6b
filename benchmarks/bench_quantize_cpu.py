"""mxfp4 quantisation on this CPU: our torch backend and torchao's ``to_mx``, side by side in one process.

    python benchmarks/bench_quantize_cpu.py        # writes benchmarks/results/cpu/quantize.json, docs/benchmarks_cpu.md

Both turn the same [16384, 512] bf16 into E2M1 codes with E8M0 scales of 32 values, rounded up so that nothing clamps.
Ours also scatters the records into a paged cache. Runs alternate, and medians are compared; the temporary memory is
the peak of what the allocator held at once, less what it held before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

import mxkv

ROOT = Path(__file__).resolve().parent.parent
ROWS, WIDTH = 16384, 512


def cpu_model() -> str:
    """The CPU's name, as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "mxkv": mxkv.__version__,
    }


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that a run held at once beyond what was there before, its result included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        keep = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del keep
    return peak


def agree(cache: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> float:
    """The share of record bytes that are equal (the two treat the sign of zero and a few scales in their own way)."""
    theirs = torch.cat((codes.view(torch.uint8).reshape(ROWS, -1), scales.view(torch.uint8).reshape(ROWS, -1)), -1)
    return float((cache.view(ROWS, -1) == theirs).float().mean())


def measure(rounds: int) -> dict[str, Any]:
    """Medians in ms of alternating runs, and peaks of memory."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache, slots = mxkv.empty_cache("mxfp4", ROWS // 64, 64, WIDTH), torch.arange(ROWS)

    def ours() -> None:
        mxkv.store(cache, x, slots, backend="torch")

    def theirs() -> object:
        return to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)

    contenders: dict[str, Callable[[], object]] = {"mxkv": ours, "torchao": theirs}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    scales, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    ours()
    input_bytes = x.numel() * x.element_size()
    result: dict[str, Any] = {
        "shape": [ROWS, WIDTH],
        "input_bytes": input_bytes,
        "rounds": rounds,
        "equal_bytes": agree(cache, scales, codes),
    }
    for name, run in contenders.items():
        peak = peak_bytes(run)
        result[name] = {
            "median_ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "peak_bytes": peak,
            "peak_over_input": peak / input_bytes,
        }
    result["speedup"] = result["torchao"]["median_ms"] / result["mxkv"]["median_ms"]
    return result


def markdown(where: dict[str, Any], found: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {label} | {found[name]['median_ms']:.1f} | {found[name]['min_ms']:.1f} "
        f"| {found[name]['peak_bytes'] / 2**20:.0f} | {found[name]['peak_over_input']:.1f} |"
        for name, label in (("mxkv", "mxkv, `torch` backend"), ("torchao", "torchao `to_mx`, round-up scales"))
    )
    return f"""# Benchmarks on a CPU

mxfp4 quantisation of [{ROWS}, {WIDTH}] bf16 ({found["input_bytes"] / 2**20:.0f} MiB), both in one process, alternating,
{found["rounds"]} rounds. mxkv's time includes the scatter into a paged cache; its memory includes all temporaries.

| | median ms | best ms | peak memory, MiB | peak / input |
|---|---|---|---|---|
{rows}

torchao takes {found["speedup"]:.2f} times as long as mxkv; {found["equal_bytes"]:.2%} of the record bytes are equal.

{where["date"]}, {where["cpu"]}, {where["threads"]} thread(s), Python {where["python"]}, torch {where["torch"]},
torchao {where["torchao"]}, mxkv {where["mxkv"]}. Measured by `benchmarks/bench_quantize_cpu.py`; the numbers behind the
table are in `benchmarks/results/cpu/quantize.json`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="mxfp4 quantisation on this CPU against torchao")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="print the results; write no file")
    parser.add_argument("--threads", type=int, default=0, help="threads of both (0: torch's own choice)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    where, found = environment(), measure(arguments.rounds)
    text = markdown(where, found)
    print(text)
    if not arguments.dry_run:
        target = ROOT / "benchmarks/results/cpu/quantize.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"environment": where, **found}, indent=2) + "\n")
        (ROOT / "docs/benchmarks_cpu.md").write_text(text)


if __name__ == "__main__":
    main()
