"""The Numba backend on a GPU, against the copy ceiling and against Triton on the same tensors.

    python benchmarks/bench_numba_gpu.py --check --out DIR     compare with the torch backend, then time
    python benchmarks/bench_numba_gpu.py --out DIR --sweep     also time every launch configuration

How it measures is the store and load benchmark's and the attention benchmark's: graph replays of calls over sets of
buffers larger than twice the L2, medians. Also shown: what compiling took (cold) and what a call costs the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import bench_attend_gpu as attends
import bench_store_load_gpu as rows
import torch
from measuring import in_processes

import mxkv
from mxkv import checks
from mxkv.backends.numba_cuda import attention, compiler, latents
from mxkv.backends.numba_cuda.config import AttendConfig, LaunchConfig

ROWS = (
    rows.Shape("store", "mxfp4", 1 << 20, wanted_fraction=0.5),
    rows.Shape("store", "mxfp4", 1 << 20, random_slots=True),
    rows.Shape("store", "mxfp4", 1 << 16),
    rows.Shape("store", "mxfp8", 1 << 18, rope=True),
    rows.Shape("store", "nvfp4", 1 << 18, rope=True),
    rows.Shape("store", "dsv4", 1 << 18, rope=True),
    rows.Shape("store", "bf16", 1 << 18, rope=True),
    rows.Shape("store", "fp8", 1 << 18, rope=True),
    rows.Shape("store", "mxfp4", 4096),
    rows.Shape("load", "mxfp4", 1 << 20, wanted_fraction=0.5),
    rows.Shape("load", "nvfp4", 1 << 18),
    rows.Shape("load", "mxfp8", 1 << 18),
    rows.Shape("load", "dsv4", 1 << 18),
    rows.Shape("load", "fp8", 1 << 18),
    rows.Shape("load", "bf16", 1 << 18),
)
ATTENDS = tuple(
    attends.Shape(queries, heads, name) for queries, heads in attends.SIZES for name in ("mxfp4", "bf16", "dsv4")
)
OPERATIONS = ("store", "load")
MOST_TIMES_TRITON = 6.0
SAMPLES, SWEPT_SAMPLES = 9, 3


def check(workers: int) -> list[str]:
    """What differs from the torch backend, in every kind of call that is timed and more; compiles, in processes."""
    formats = list(mxkv.FORMATS)
    todo: list[rows.Shape | attends.Shape] = [
        *(dataclasses.replace(shape, tokens=4096) for shape in ROWS),
        *(rows.Shape(operation, name, 4096, rope=operation == "store") for name in formats for operation in OPERATIONS),
        *(dataclasses.replace(shape, queries=5, topk=300, pool=1 << 14) for shape in ATTENDS),
        *(attends.Shape(5, heads, name, 300, 1 << 14) for name in formats for heads in (1, 40)),
    ]
    todo = list(dict.fromkeys(todo))
    return [found for _, found in in_processes(workers, checked, todo) if found]


def checked(shape: rows.Shape | attends.Shape) -> str:
    """In a worker process: what is wrong with a call, an exception included."""
    try:
        if isinstance(shape, rows.Shape):
            right = rows.is_right(shape, functools.partial(rows.Buffers.run, backend="numba"))
            return "" if right else f"{shape.name}: other bytes"
        call = attends.call_of(shape, 0)
        run_attend(call)
        error = call.error()
        return "" if error <= attends.MOST_ERROR else f"attend {shape.name}: error {error}"
    except Exception as failure:
        return f"{shape.name}: {type(failure).__name__}: {str(failure)[:600]}"


def compile_ahead(shapes: list[attends.Shape], workers: int) -> None:
    """Compile every configuration of some attentions, in processes."""
    jobs = {}
    for shape in shapes:
        small = dataclasses.replace(shape, queries=1, topk=300, pool=1 << 14)
        for config in attention.tunable(attends.spec_of(attends.call_of(small, 0))).space:
            jobs[small, dataclasses.replace(config, blocks_per_unit=1)] = None
    list(in_processes(workers, compile_config, list(jobs)))


def compile_config(job: tuple[attends.Shape, AttendConfig]) -> None:
    shape, config = job
    attention.compile(attends.spec_of(attends.call_of(shape, 0)), config)


def run_attend(call: attends.Call, config: AttendConfig | None = None, backend: str = "numba") -> None:
    """An attention, or the backend's launch in one configuration."""
    cache, scale = attends.pool_of(call.shape.format, call.shape.pool)
    if config is None:
        mxkv.attend(
            call.q, cache, indices=call.indices, format=call.shape.format, cache_scale=scale, out=call.out,
            backend=backend,
        )  # fmt: skip
        return
    attention.prepare(attends.spec_of(call))(
        call.q, cache, call.out, call.indices, None, scale, None, None, None, attends.DIM**-0.5, None, config=config
    )


def run_rows(buffers: rows.Buffers, config: LaunchConfig) -> None:
    """A store or load in one configuration."""
    if buffers.shape.operation == "store":
        spec: Any = checks.store_spec(
            buffers.cache, buffers.rows, buffers.slots, buffers.shape.format, buffers.positions, buffers.table, 1,
            buffers.scale, "propagate",
        )  # fmt: skip
        tensors = (buffers.cache, buffers.rows, buffers.slots, buffers.positions, buffers.table, buffers.scale)
    else:
        spec = checks.load_spec(
            buffers.cache, buffers.slots, buffers.shape.format, rows.DIM, buffers.rows.dtype, buffers.scale,
            buffers.rows,
        )  # fmt: skip
        tensors = (buffers.cache, buffers.slots, buffers.rows, buffers.scale)
    latents.prepare(spec)(*tensors, config=config)


def measure_rows(shape: rows.Shape, ceiling: float, sweep: bool) -> dict[str, Any]:
    sets = rows.sets_for(shape)
    found: dict[str, Any] = {"name": shape.name, "bytes": shape.nbytes, "wanted_fraction": shape.wanted_fraction}
    for backend in ("numba", "triton"):
        calls = rows.repeated([functools.partial(b.run, backend) for b in sets])
        found[f"{backend}_us"], _ = rows.replayed(calls, SAMPLES)
    found["fraction_of_copy"] = shape.nbytes / found["numba_us"] * 1e6 / ceiling
    if sweep:
        found["sweep"] = {}
        for config in latents.configurations():
            if not rows.is_right(shape, functools.partial(run_rows, config=config)):
                print(f"    REFUSED {config}: other bytes", flush=True)
                continue
            calls = rows.repeated([functools.partial(run_rows, b, config) for b in sets])
            found["sweep"][str(config)], _ = rows.replayed(calls, SWEPT_SAMPLES)
    return shown(found)


def measure_attend(shape: attends.Shape, sweep: bool) -> dict[str, Any]:
    calls = attends.calls_of(shape)
    run_attend(calls[0])
    found: dict[str, Any] = {"name": shape.name, "error": calls[0].error()}
    for backend in ("numba", "triton"):
        found[f"{backend}_us"], _ = timed(calls, None, backend)
    found["times_triton"] = found["numba_us"] / found["triton_us"]
    if sweep:
        space = attention.tunable(attends.spec_of(calls[0])).space
        splits = {}  # of configurations that launch the same, one is timed
        for config in space:
            blocks = attends_splits(calls[0], config)
            splits.setdefault((dataclasses.replace(config, blocks_per_unit=1), blocks), config)
        found["sweep"] = {}
        for config in splits.values():
            calls[0].out.fill_(torch.nan)
            run_attend(calls[0], config)
            error = calls[0].error()
            if error <= attends.MOST_ERROR:
                found["sweep"][str(config)], _ = timed(calls, config, samples=SWEPT_SAMPLES)
            else:
                print(f"    REFUSED {config}: error {error}", flush=True)
    return shown(found)


def attends_splits(call: attends.Call, config: AttendConfig) -> int:
    return attention.prepare(attends.spec_of(call)).splits(call.q.shape[0], call.indices, None, config)


def timed(
    calls: list[attends.Call], config: AttendConfig | None, backend: str = "numba", samples: int = SAMPLES
) -> tuple[float, list[float]]:
    runs = [functools.partial(run_attend, call, config, backend) for call in calls]
    least = attends.LEAST_CALLS if calls[0].shape.queries < attends.MANY_QUERIES else 1
    return attends.replayed(runs * -(-least // len(runs)), samples)


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """What was measured of a call, said at once."""
    best = sorted(found.get("sweep", {}).items(), key=lambda item: item[1])[:6]
    print(f"{found['name']:60} {found['numba_us']:9.1f} us, Triton {found['triton_us']:9.1f}", flush=True)
    for config, us in best:
        print(f"    {us:.1f} us {config}", flush=True)
    return found


def host_us(calls: int = 200, rounds: int = 15) -> float:
    """What a small store costs the host."""
    buffers = rows.make(rows.Shape("store", "mxfp4", 64))
    buffers.run("numba")
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            buffers.run("numba")
        times.append((time.perf_counter() - begun) / calls * 1e6)
    return statistics.median(times)


def lines_of(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    where = found["environment"]
    lines = [
        f"{where['device']}, {found['compiler']}, torch {where['torch']}, Triton {where['triton']}, "
        f"{where['date'][:10]}; copy {where['copy_tb_per_s']:.2f} TB/s; "
        f"a call costs the host {found['host_us']:.1f} µs.",
        "",
        "| call | Numba µs | of copy | Triton µs |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        wanted = "" if row["wanted_fraction"] is None else f" (wanted {row['wanted_fraction']})"
        lines.append(
            f"| {row['name']} | {row['numba_us']:.1f} | {row['fraction_of_copy']:.2f}{wanted} "
            f"| {row['triton_us']:.1f} |"
        )
    lines += ["", "| attention | Numba µs | Triton µs | times | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['numba_us']:.1f} | {row['triton_us']:.1f} | {row['times_triton']:.2f} "
        f"(at most {MOST_TIMES_TRITON:g}) | {row['error']:.1e} |"
        for row in found["attends"]
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="where the JSON goes")
    parser.add_argument("--check", action="store_true", help="compare with the torch backend first")
    parser.add_argument("--only-check", action="store_true", help="compare and stop")
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration")
    parser.add_argument("--match", default="", help="only calls whose name has this in it")
    parser.add_argument("--workers", type=int, default=14, help="processes that check and compile")
    arguments = parser.parse_args()
    before = {kernel["checksum"] for kernel in compiler.kept()}
    if arguments.check or arguments.only_check:
        begun = time.perf_counter()
        wrong = check(arguments.workers)
        print(f"check and compilation: {time.perf_counter() - begun:.0f} s", flush=True)
        print("\n".join(wrong) or "check: all as the torch backend has it", flush=True)
        if arguments.only_check:
            return bool(wrong)
    if arguments.sweep:
        begun = time.perf_counter()
        compile_ahead([shape for shape in ATTENDS if arguments.match in f"attend {shape.name}"], arguments.workers)
        print(f"compilation for the sweep: {time.perf_counter() - begun:.0f} s", flush=True)
    ceiling = rows.copy_ceiling()
    found: dict[str, Any] = {
        "environment": rows.environment(ceiling), "compiler": compiler.version(), "host_us": host_us(),
        "rows": [], "attends": [], "kernels": [],
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)

    def add(what: str, measured: dict[str, Any]) -> None:
        """Keep what is known: a run that is stopped loses nothing."""
        found[what].append(measured)
        found["kernels"] = [kernel for kernel in compiler.kept() if kernel["checksum"] not in before]
        (arguments.out / "numba.json").write_text(json.dumps(found, indent=1) + "\n")

    for shape in ROWS:
        if arguments.match in shape.name:
            add("rows", measure_rows(shape, ceiling, arguments.sweep))
    for attend in ATTENDS:
        if arguments.match in f"attend {attend.name}":
            add("attends", measure_attend(attend, arguments.sweep))
    print("\n".join(lines_of(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
