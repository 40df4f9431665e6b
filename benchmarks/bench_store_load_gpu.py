"""Store and load on a GPU against the copy ceiling: medians, bytes, fractions.

    python benchmarks/bench_store_load_gpu.py --out DIR            the issue's shapes
    python benchmarks/bench_store_load_gpu.py --out DIR --sweep    also tries launch configurations
    python benchmarks/bench_store_load_gpu.py --once mxfp4         a few launches, for a profiler

How it measures: see measuring.py. Before anything is timed, its bytes are compared with the torch backend's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from measuring import (
    DEVICE,
    SAMPLES,
    against_copy,
    copy_ceiling,
    empty_kernel,
    environment,
    in_processes,
    launched,
    repeated,
    replayed,
    sets_needed,
)

import mxkv
from mxkv import checks
from mxkv.backends.triton_gpu import latents
from mxkv.backends.triton_gpu.config import LaunchConfig

DIM, BLOCK_SIZE, MAX_POSITION, ROPE_DIM = 512, 64, 8192, 64
HOST_ROUNDS, HOST_CALLS = 30, 100


@dataclasses.dataclass(frozen=True)
class Shape:
    """One thing to time."""

    operation: str
    format: str
    tokens: int
    rope: bool = False
    random_slots: bool = False
    dtype: torch.dtype = torch.bfloat16
    wanted_fraction: float | None = None
    wanted_us: float | None = None

    @property
    def name(self) -> str:
        extras = " rope" * self.rope + " random slots" * self.random_slots
        extras += "" if self.dtype == torch.bfloat16 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.operation} {self.format}{extras}, {self.tokens} tokens"

    @property
    def nbytes(self) -> int:
        """Bytes of rows and records, each moved once; slots and positions are not counted."""
        record = mxkv.FORMATS[self.format].record_bytes(DIM)
        return self.tokens * (DIM * self.dtype.itemsize + record)


SHAPES = (
    Shape("store", "mxfp4", 1 << 20, wanted_fraction=0.95),
    Shape("store", "mxfp4", 1 << 20, random_slots=True, wanted_fraction=0.80),
    Shape("store", "mxfp4", 1 << 16, wanted_us=28),
    Shape("store", "mxfp8", 1 << 18, rope=True, wanted_fraction=0.92),
    Shape("store", "nvfp4", 1 << 18, rope=True, wanted_fraction=0.92),
    Shape("store", "nvfp4", 1 << 18),
    Shape("store", "mxfp4", 1 << 18, rope=True),
    Shape("store", "dsv4", 1 << 18, rope=True, wanted_fraction=0.92),
    Shape("store", "mxfp8-inline", 1 << 18, rope=True),
    Shape("store", "nvfp4-inline", 1 << 18, rope=True),
    Shape("store", "bf16", 1 << 18, rope=True),
    Shape("store", "fp8", 1 << 18, rope=True),
    Shape("store", "mxfp4", 1 << 18, dtype=torch.float16),
    Shape("store", "mxfp4", 1 << 18, dtype=torch.float32),
    Shape("store", "nvfp4", 1 << 18, dtype=torch.float32),
    Shape("store", "mxfp4", 4096),
    Shape("load", "mxfp4", 1 << 20, wanted_fraction=0.90),
    Shape("load", "nvfp4", 1 << 20, wanted_fraction=0.90),
    Shape("load", "mxfp4", 1 << 20, random_slots=True),
    Shape("load", "mxfp8", 1 << 18),
    Shape("load", "dsv4", 1 << 18),
    Shape("load", "fp8", 1 << 18),
    Shape("load", "bf16", 1 << 18),
    Shape("load", "mxfp4", 4096),
)
SWEEP = tuple(
    Shape(operation, name, tokens, rope=operation == "store" and name != "mxfp4")
    for operation in ("store", "load")
    for name in ("mxfp4", "mxfp8", "nvfp4", "dsv4", "bf16", "fp8")
    for tokens in (1 << 18, 1 << 14, 1 << 10)
)
CONFIGS = tuple(LaunchConfig(t, w) for t in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8) if 64 <= t * DIM // w // 4 <= 1024)


@dataclasses.dataclass
class Buffers:
    """One set of tensors of a shape."""

    shape: Shape
    cache: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor | None
    table: torch.Tensor | None
    scale: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.rows.nbytes

    def run(self, backend: str = "triton") -> None:
        """The public call."""
        if self.shape.operation == "store":
            mxkv.store(
                self.cache, self.rows, self.slots, format=self.shape.format, positions=self.positions,
                cos_sin=self.table, cache_scale=self.scale, backend=backend,
            )  # fmt: skip
        else:
            mxkv.load(
                self.cache, self.slots, format=self.shape.format, out=self.rows, cache_scale=self.scale, backend=backend
            )

    def run_as(self, config: LaunchConfig) -> None:
        """The backend's launch in one configuration."""
        if self.shape.operation == "store":
            spec = checks.store_spec(
                self.cache, self.rows, self.slots, self.shape.format, self.positions, self.table, 1, self.scale,
                "propagate",
            )  # fmt: skip
            latents.store(
                spec, self.cache, self.rows, self.slots, self.positions, self.table, self.scale, config=config
            )
        else:
            load_spec = checks.load_spec(
                self.cache, self.slots, self.shape.format, DIM, self.rows.dtype, self.scale, self.rows
            )
            latents.load(load_spec, self.cache, self.slots, self.rows, self.scale, config=config)

    def outcome(self) -> torch.Tensor:
        """What the call wrote, as bytes."""
        written = self.cache if self.shape.operation == "store" else self.rows
        return written.view(torch.uint8)


def make(shape: Shape, seed: int = 0) -> Buffers:
    g = torch.Generator(DEVICE).manual_seed(seed)
    tokens = shape.tokens
    format = mxkv.FORMATS[shape.format]
    cache = mxkv.empty_cache(shape.format, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, DIM, DEVICE)
    rows = torch.randn(tokens, DIM, device=DEVICE, dtype=shape.dtype, generator=g)
    order = (
        torch.randperm(tokens, device=DEVICE, generator=g)
        if shape.random_slots
        else torch.arange(tokens, device=DEVICE)
    )
    positions = table = None
    if shape.rope:
        positions = torch.randint(MAX_POSITION, (tokens,), device=DEVICE, generator=g)
        angle = torch.rand(MAX_POSITION, ROPE_DIM // 2, device=DEVICE, generator=g) * 6.28
        table = torch.cat((angle.cos(), angle.sin()), -1)
    scale = torch.full((1,), 0.37, device=DEVICE) if format.scale is mxkv.Scale.TENSOR else None
    made = Buffers(shape, cache, rows, order, positions, table, scale)
    if shape.operation == "load":
        mxkv.store(cache, rows, order, format=shape.format, cache_scale=scale, backend="triton")
    return made


def is_right(shape: Shape, run: Callable[[Buffers], None]) -> bool:
    """Whether a run gives the torch backend's bytes, on rows of many magnitudes."""
    buffers = make(dataclasses.replace(shape, tokens=min(shape.tokens, 4096) + 37), seed=1)
    g = torch.Generator(DEVICE).manual_seed(2)
    if shape.operation == "store":
        exponent = torch.randint(-20, 14, (buffers.rows.shape[0], DIM // 16, 1), device=DEVICE, generator=g)
        buffers.rows.unflatten(-1, (-1, 16)).mul_(2.0**exponent)
        buffers.rows[::19, 100] = float("nan")
        buffers.rows[::23, 200] = 0.0
    buffers.outcome().fill_(0xA5) if shape.operation == "store" else buffers.rows.fill_(float("nan"))
    run(buffers)
    have = buffers.outcome().clone()
    buffers.outcome().fill_(0xA5)
    buffers.run("torch")
    return torch.equal(have, buffers.outcome())


def sets_for(shape: Shape) -> list[Buffers]:
    """Sets of buffers that together are larger than twice the L2."""
    first = make(shape)
    return [first, *(make(shape, seed) for seed in range(1, sets_needed(first.nbytes)))]


@triton.jit
def baseline_kernel(cache, latent, slots, DIM: tl.constexpr):
    """The usual mxfp4 quantiser: one program a token, seven comparisons an element, plain fp32."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        GROUPS: tl.constexpr = DIM // 32
        record = cache + slot * (DIM // 2 + GROUPS)
        x = tl.load(latent + token * DIM + tl.arange(0, DIM)).to(tl.float32)
        x = tl.reshape(x, (GROUPS, 32))
        amax = tl.max(tl.abs(x), 1)
        bits = amax.to(tl.int32, bitcast=True)
        byte = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
        byte = tl.where(bits == 0, 127, tl.maximum(byte, 0))
        y = x * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        a = tl.abs(y)
        code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
        code = code + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
        code = code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
        low, high = tl.split(tl.reshape(code, (GROUPS, 16, 2)))
        packed = (low | (high << 4)).to(tl.uint8)
        at = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(record + at, packed)
        tl.store(record + DIM // 2 + tl.arange(0, GROUPS), byte.to(tl.uint8))


def run_baseline(buffers: Buffers) -> None:
    baseline_kernel[(buffers.shape.tokens,)](buffers.cache, buffers.rows, buffers.slots, DIM, num_warps=4)


def measure(shape: Shape, ceiling: float) -> dict[str, Any]:
    right = is_right(shape, Buffers.run)
    sets = sets_for(shape)
    us, samples = replayed(repeated([b.run for b in sets]))
    result = against_copy(shape, us, samples, ceiling)
    result |= {"bytes_equal_oracle": right, "sets": len(sets), "dtype": str(shape.dtype)}
    if shape.operation == "store" and shape.format == "mxfp4" and shape.dtype == torch.bfloat16:
        base, _ = replayed(repeated([functools.partial(run_baseline, b) for b in sets]))
        result |= {"baseline_us": base, "times_faster": base / us}
    return result


def small_calls(tokens: int = 64, calls: int = 200) -> dict[str, Any]:
    """A few tokens in a graph against an empty kernel, and what a call costs the host."""
    sink = torch.zeros(1, device=DEVICE)
    results: dict[str, Any] = {}
    for name, rope in (("mxfp4", False), ("mxfp8", True), ("nvfp4", True), ("dsv4", True)):
        buffers = make(Shape("store", name, tokens, rope=rope))
        nothing = functools.partial(empty_kernel[(1,)], sink, num_warps=1)
        # The empty kernel before and after, so that both see the same clocks.
        for kind, count, replays in (("one graph of many", calls, 1), ("a graph of one, replayed", 1, calls)):
            before, _ = replayed([nothing] * count, replays=replays)
            us, _ = replayed([buffers.run] * count, replays=replays)
            after, _ = replayed([nothing] * count, replays=replays)
            empty = (before + after) / 2
            results[f"{name}, {kind}"] = {
                "us": us, "empty_kernel_us": empty, "ratio": us / empty, "met": us <= 1.1 * empty,
            }  # fmt: skip
    buffers = make(Shape("store", "mxfp4", tokens))
    bare = bare_launch(buffers)
    public = functools.partial(mxkv.store, buffers.cache, buffers.rows, buffers.slots)
    times: dict[str, list[float]] = {"store": [], "bare launch": []}
    for _ in range(HOST_ROUNDS):
        for label, call in (("store", public), ("bare launch", bare)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            times[label].append((time.perf_counter() - begun) * 1e6 / HOST_CALLS)
    store, launch = (statistics.median(times[label]) for label in ("store", "bare launch"))
    results["host"] = {
        "store_us": store,
        "bare_launch_us": launch,
        "overhead_us": store - launch,
        "met": store - launch <= 10,
    }
    return results


def bare_launch(buffers: Buffers) -> Callable[[], None]:
    """A launch by Triton's JIT of the very kernel that the public call launches, with the arguments ready."""
    recorded: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *a, **k: recorded.update(grid=grid, arguments=a, options=k)

    spec = checks.store_spec(
        buffers.cache, buffers.rows, buffers.slots, None, None, None, 1, None, "propagate"
    )  # fmt: skip
    once = latents.StoreLaunch(spec)
    kernel, once.launcher.kernel = once.launcher.kernel, Recorder()
    once(buffers.cache, buffers.rows, buffers.slots, None, None, None)
    launch = kernel[recorded["grid"]]
    return lambda: launch(*recorded["arguments"], **recorded["options"])


def try_config(job: tuple[Shape, LaunchConfig]) -> bool:
    """In a worker process: compile one configuration into Triton's cache, and check its bytes."""
    shape, config = job
    return is_right(dataclasses.replace(shape, tokens=256), lambda b: b.run_as(config))


def sweep(ceiling: float, workers: int, budget_s: float) -> list[dict[str, Any]]:
    """Every configuration of every shape: its median, if its bytes are right."""
    kinds = {(s.operation, s.format): s for s in SWEEP}
    jobs = [(shape, config) for shape in kinds.values() for config in CONFIGS]
    right = {(s.operation, s.format, c): found for (s, c), found in in_processes(workers, try_config, jobs)}
    deadline = time.monotonic() + budget_s
    results = []
    for shape in SWEEP:
        if time.monotonic() > deadline:
            print(f"sweep: out of time before {shape.name}")
            break
        sets = sets_for(shape)
        tried: list[tuple[float, LaunchConfig]] = []
        for config in CONFIGS:
            if not right[shape.operation, shape.format, config]:
                print(f"WRONG BYTES: {shape.name} {config}")
                continue
            us, _ = replayed(repeated([functools.partial(b.run_as, config) for b in sets]), samples=9)
            tried.append((us, config))
        default, _ = replayed(repeated([b.run for b in sets]), samples=9)
        tried.sort(key=lambda pair: pair[0])
        best = ", ".join(f"{c.block_tokens}x{c.num_warps}w {us:.1f}" for us, c in tried[:4])
        floor = shape.nbytes / ceiling * 1e6
        print(f"{shape.name:38} floor {floor:7.1f}  default {default:7.1f}  best {best}", flush=True)
        results.append(
            {
                "name": shape.name, "floor_us": floor, "default_us": default,
                "configs": [{"block_tokens": c.block_tokens, "num_warps": c.num_warps, "us": us} for us, c in tried],
            }
        )  # fmt: skip
    return results


def table(environment: dict[str, Any], shapes: list[dict[str, Any]], small: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"{environment['device']}, torch {environment['torch']}, Triton {environment['triton']}, "
        f"{environment['date'][:10]}; copy {environment['copy_tb_per_s']:.2f} TB/s read and written; d = {DIM}.",
        "",
        "| what | µs | floor | of copy | baseline | wanted | met | bytes equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in shapes:
        wanted = (
            f"≥ {r['wanted_fraction']:.2f}"
            if r["wanted_fraction"]
            else f"≤ {r['wanted_us']:.0f} µs"
            if r["wanted_us"]
            else ""
        )
        base = f"{r['baseline_us']:.0f} ({r['times_faster']:.1f}×)" if "baseline_us" in r else ""
        met = {True: "yes", False: "NO", None: ""}[r["met"]]
        lines.append(
            f"| {r['name']} | {r['us']:.1f} | {r['floor_us']:.1f} | {r['fraction_of_copy']:.3f} | {base} | {wanted} "
            f"| {met} | {'yes' if r['bytes_equal_oracle'] else 'NO'} |"
        )
    lines += ["", "| 64 tokens | µs | against | met |", "|---|---|---|---|"]
    for name, r in small.items():
        if name == "host":
            what = f"bare launch {r['bare_launch_us']:.2f}: {r['overhead_us']:+.2f}"
            lines.append(f"| host time of a call | {r['store_us']:.2f} | {what} | {'yes' if r['met'] else 'NO'} |")
        else:
            what = f"empty kernel {r['empty_kernel_us']:.2f}: {r['ratio']:.2f}×"
            lines.append(f"| {name} | {r['us']:.2f} | {what} | {'yes' if r['met'] else 'NO'} |")
    return "\n".join(lines) + "\n"


def once(name: str, operation: str, tokens: int, rope: bool) -> None:
    """A few launches of one shape, for a profiler to look at."""
    launched(sets_for(Shape(operation, name, tokens, rope=rope))[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="where JSON and tables go")
    parser.add_argument("--sweep", action="store_true", help="try every launch configuration")
    parser.add_argument("--sweep-seconds", type=float, default=240, help="time for the sweep's measurements")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile for the sweep")
    parser.add_argument("--match", default="", help="only shapes whose name has this in it")
    parser.add_argument("--once", metavar="FORMAT", help="launch one format's kernel a few times and stop")
    parser.add_argument("--operation", default="store", choices=("store", "load"), help="for --once")
    parser.add_argument("--tokens", type=int, default=1 << 18, help="for --once")
    parser.add_argument("--plain", action="store_true", help="for --once: a store without RoPE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU, and torch finds none")
    if arguments.once:
        rope = arguments.operation == "store" and not arguments.plain
        once(arguments.once, arguments.operation, arguments.tokens, rope)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceiling = copy_ceiling()
    where = environment(ceiling, dim=DIM, block_size=BLOCK_SIZE, samples=SAMPLES)
    print(f"copy {ceiling / 1e12:.3f} TB/s", flush=True)
    if arguments.sweep:
        results = sweep(ceiling, arguments.workers, arguments.sweep_seconds)
        (arguments.out / "sweep.json").write_text(json.dumps({"environment": where, "sweep": results}, indent=1))
    shapes = []
    for shape in SHAPES:
        if arguments.match in shape.name:
            shapes.append(measure(shape, ceiling))
            print(f"{shape.name:44} {shapes[-1]['us']:9.1f} us  {shapes[-1]['fraction_of_copy']:.3f}", flush=True)
            torch.cuda.empty_cache()
    small = small_calls()
    results_json = {"environment": where, "shapes": shapes, "small": small}
    (arguments.out / "store_load.json").write_text(json.dumps(results_json, indent=1) + "\n")
    text = table(where, shapes, small)
    (arguments.out / "store_load.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
