"""compress_norm, compress_store and save_ring_rows on a GPU against the copy ceiling: medians, bytes, fractions.

    python benchmarks/bench_compress_gpu.py --out DIR            the table
    python benchmarks/bench_compress_gpu.py --out DIR --sweep    also times configurations (--only-sweep: only them)
    python benchmarks/bench_compress_gpu.py --check              only compares with the torch backend
    python benchmarks/bench_compress_gpu.py --once mxfp8         a few launches, for a profiler ("norm": compress_norm)

How it measures: see measuring.py. Before anything is timed, its bytes are compared with the torch backend's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
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
from mxkv import compression_checks
from mxkv.backends.triton_gpu import compression
from mxkv.backends.triton_gpu.config import CompressConfig
from mxkv.contracts import Packed

DIM, RING_DIM, CAPACITY, BLOCK_SIZE, MAX_POSITION, EPS = 512, 1024, 8, 64, 1 << 16, 1e-6
WORKERS = 14  # that compile


@dataclasses.dataclass(frozen=True)
class Shape:
    """One thing to time: so many requests, each with a chunk of so many tokens, stored in a format if there is one."""

    requests: int
    chunk: int
    format: str | None = None
    ratio: int = 2
    first: int = 0
    latents: bool = False
    save: bool = False
    two: bool = False
    wanted_fraction: float | None = None
    wanted_us: float | None = None

    @property
    def tokens(self) -> int:
        return self.requests * self.chunk

    @property
    def groups(self) -> int:
        """Tokens that give a latent."""
        return self.tokens if self.ratio == 1 else self.requests * ((self.first + self.chunk) // 2 - self.first // 2)

    @property
    def name(self) -> str:
        if self.save:
            return f"save_ring_rows, {self.tokens} rows"
        what = "compress_norm" if self.format is None else f"compress_store {self.format}"
        what += " in two calls" * self.two + " and latents" * self.latents
        return f"{what}, r = {self.ratio}, {self.requests} x {self.chunk} tokens from position {self.first}"

    @property
    def nbytes(self) -> int:
        """Bytes of rows read, and of rows, records and ring rows written, each moved once; indices are not counted."""
        if self.save:
            return 2 * 4 * RING_DIM * self.tokens
        read = 4 * DIM * self.ratio * self.tokens
        if self.ratio == 2:  # ring rows: read where a chunk begins inside of a group, saved at its end
            read += 4 * RING_DIM * self.requests * (self.first % 2)
            read += 4 * RING_DIM * self.requests * min(self.chunk, CAPACITY)
        record = 0 if self.format is None else mxkv.FORMATS[self.format].record_bytes(DIM)
        return read + self.groups * (record + 2 * DIM * (self.format is None or self.latents))


SHAPES = (
    Shape(16, 16384, wanted_fraction=0.95),
    Shape(16, 16384, ratio=1),
    Shape(16, 16384, "mxfp8", wanted_us=285),
    Shape(16, 16384, "mxfp8", two=True),
    Shape(16, 16384, "mxfp8", latents=True),
    Shape(16, 16384, "mxfp4"),
    Shape(16, 16384, "nvfp4"),
    Shape(16, 16384, "dsv4"),
    Shape(16, 16384, "bf16"),
    Shape(16, 16384, "mxfp8", ratio=1),
    Shape(1024, 255, first=1),
    Shape(4096, 1, first=4097),
    Shape(4096, 1, "mxfp8", first=4097),
    Shape(1, 4096),
    Shape(65536, 1, save=True),
)
SMALL = (
    Shape(1, 64, wanted_us=3),
    Shape(64, 1, first=4097, wanted_us=3),
    Shape(1, 64, "mxfp8", wanted_us=3),
    Shape(64, 1, "mxfp8", first=4097, wanted_us=3),
)
SWEEP = (
    *SMALL,
    Shape(16, 16384),
    Shape(16, 16384, "mxfp8"),
    Shape(16, 16384, "mxfp4"),
    Shape(16, 16384, "nvfp4"),
    Shape(4096, 1, "mxfp8", first=4097),
    Shape(1, 4096),
)


@dataclasses.dataclass
class Buffers:
    """One set of tensors of a shape."""

    shape: Shape
    packed: Packed
    out: torch.Tensor
    cache: torch.Tensor | None
    cache_slots: torch.Tensor
    table: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.packed.rows.nbytes + self.out.nbytes

    def norm(self, backend: str) -> None:
        p = self.packed
        mxkv.compress_norm(
            p.rows, p.positions, p.ring, p.slots, p.query_start, p.token_to_request, p.weight, p.eps, self.shape.ratio,
            self.out, backend=backend,
        )  # fmt: skip

    def run(self, backend: str = "triton") -> None:
        """The public call."""
        p, shape = self.packed, self.shape
        if shape.save:
            mxkv.save_ring_rows(p.rows, p.slots, p.ring, backend=backend)
        elif self.cache is None:
            self.norm(backend)
        elif shape.two:
            self.norm(backend)
            mxkv.store(
                self.cache, self.out, self.cache_slots, format=shape.format, positions=p.positions, cos_sin=self.table,
                compress_ratio=shape.ratio, backend=backend,
            )  # fmt: skip
        else:
            mxkv.compress_store(
                p.rows, p.positions, p.ring, p.slots, p.query_start, p.token_to_request, p.weight, p.eps, shape.ratio,
                self.cache, self.cache_slots, out=self.out if shape.latents else None, format=shape.format,
                cos_sin=self.table, backend=backend,
            )  # fmt: skip

    def launch(self) -> tuple[Any, tuple[Any, ...]]:
        """The backend's launch, and what it is called with."""
        p, shape = self.packed, self.shape
        if shape.save:
            spec: Any = compression_checks.save_ring_spec(p.rows, p.slots, p.ring)
            return compression.prepare(spec), (p.rows, p.slots, p.ring)
        if self.cache is None:
            spec = compression_checks.compress_spec(p, shape.ratio, self.out)
            return compression.prepare(spec), (p, self.out)
        asked = self.out if shape.latents else None
        spec = compression_checks.compress_store_spec(
            p, shape.ratio, self.cache, self.cache_slots, asked, shape.format, self.table, None, "propagate"
        )
        return compression.prepare(spec), (p, self.cache, self.cache_slots, self.table, None, asked)

    def run_as(self, config: CompressConfig | None) -> None:
        """The backend's launch in one configuration; without one, the public call."""
        if config is None:
            return self.run()
        launch, arguments = self.launch()
        launch(*arguments, config=config)

    def outcome(self) -> list[torch.Tensor]:
        """What the call may write, as bytes."""
        written = [self.out, self.packed.ring, *([] if self.cache is None else [self.cache])]
        return [tensor.view(torch.uint8) for tensor in written if tensor is not None]


def make(shape: Shape, seed: int = 0) -> Buffers:
    g = torch.Generator(DEVICE).manual_seed(seed)
    tokens = shape.tokens
    rows = torch.randn(tokens, DIM * (2 if shape.save else shape.ratio), device=DEVICE, generator=g)
    request = torch.arange(shape.requests, device=DEVICE).repeat_interleave(shape.chunk)
    positions = torch.arange(shape.chunk, device=DEVICE).repeat(shape.requests) + shape.first
    starts = torch.arange(shape.requests + 1, device=DEVICE) * shape.chunk
    slots = request * CAPACITY + positions % CAPACITY
    ring = torch.randn(shape.requests, CAPACITY, RING_DIM, device=DEVICE, generator=g)
    weight = (1 + 0.1 * torch.randn(DIM, device=DEVICE, generator=g)).bfloat16()
    out = torch.empty(tokens, DIM, dtype=torch.bfloat16, device=DEVICE)
    cache = None
    if shape.format is not None:
        pages = -(-shape.groups // BLOCK_SIZE)
        cache = mxkv.empty_cache(shape.format, pages, BLOCK_SIZE, DIM, DEVICE)
    closes = torch.ones_like(positions) if shape.ratio == 1 else positions % 2
    cache_slots = torch.where(closes == 1, closes.cumsum(0) - 1, -1)
    angle = torch.rand(MAX_POSITION, 32, device=DEVICE, generator=g) * 6.28
    table = torch.cat((angle.cos(), angle.sin()), -1)
    packed = Packed(rows, positions, slots, starts, request, ring, None, None, weight, EPS)
    return Buffers(shape, packed, out, cache, cache_slots, table)


def smaller(shape: Shape) -> Shape:
    """A few of a shape's requests: two of many, so that Triton does not see other numbers of slots than it will."""
    requests = min(shape.requests, max(2, 4096 // shape.chunk))
    return dataclasses.replace(shape, requests=requests, chunk=min(shape.chunk, 4133))


def outcome_of(shape: Shape, run: Callable[[Buffers], None]) -> list[torch.Tensor]:
    """What a run leaves of rows of many magnitudes."""
    buffers = make(shape, seed=1)
    g = torch.Generator(DEVICE).manual_seed(2)
    exponent = torch.randint(-12, 13, (shape.tokens, 1), device=DEVICE, generator=g)
    buffers.packed.rows[:, :DIM].mul_(2.0**exponent)
    buffers.out.fill_(-7.0)
    run(buffers)
    return [tensor.clone() for tensor in buffers.outcome()]


@functools.lru_cache(maxsize=1)
def oracle_of(shape: Shape) -> list[torch.Tensor]:
    """What the torch backend leaves."""
    return outcome_of(shape, functools.partial(Buffers.run, backend="torch"))


def is_right(shape: Shape, run: Callable[[Buffers], None]) -> bool:
    """Whether a run gives the torch backend's bytes."""
    small = smaller(shape)
    return all(torch.equal(*pair) for pair in zip(outcome_of(small, run), oracle_of(small), strict=True))


def configs_of(shape: Shape) -> tuple[CompressConfig, ...]:
    """What a call of a shape may be launched with, its default first."""
    launch, _ = make(smaller(shape)).launch()
    default = launch.choose(shape.tokens)
    return default, *(config for config in compression.tunable(launch.spec).space if config != default)


def verdict_of(job: tuple[Shape, CompressConfig | None]) -> str:
    """What is wrong with a configuration's bytes; compiles it."""
    shape, config = job
    try:
        right = is_right(shape, functools.partial(Buffers.run_as, config=config))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if right else "wrong bytes"


def verdicts_of(jobs: Sequence[tuple[Shape, CompressConfig | None]]) -> dict[tuple[Shape, CompressConfig | None], str]:
    """What is wrong with each, found in processes: what they compile is in Triton's cache then."""
    begun = time.monotonic()
    verdicts = dict(in_processes(WORKERS, verdict_of, jobs))
    for (shape, config), wrong in verdicts.items():
        if wrong:
            print(f"REFUSED: {shape.name}{f', {short(config)}' * bool(config)}: {wrong}")
    print(f"{len(jobs)} compiled and checked in {time.monotonic() - begun:.0f} s", flush=True)
    return verdicts


def sets_for(shape: Shape) -> list[Buffers]:
    """Sets of buffers that together are larger than twice the L2."""
    first = make(shape)
    return [first, *(make(shape, seed) for seed in range(1, sets_needed(first.nbytes)))]


@triton.jit
def baseline_kernel(rows, positions, slots, weight, out, eps, DIM: tl.constexpr):
    """The usual one: a program a token, the library's exponential, no ring, no look at requests."""
    token = tl.program_id(0).to(tl.int64)
    if (tl.load(positions + token) % 2 == 1) & (tl.load(slots + token) >= 0):
        at = tl.arange(0, DIM)
        row = rows + token * 2 * DIM
        first, second = tl.load(row - 2 * DIM + at), tl.load(row + at)
        first_score, second_score = tl.load(row - DIM + at), tl.load(row + DIM + at)
        top = tl.maximum(first_score, second_score)
        a, b = tl.exp(first_score - top), tl.exp(second_score - top)
        x = (first * a + second * b) / (a + b)
        x = x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * tl.load(weight + at).to(tl.float32)
        tl.store(out + token * DIM + at, x.to(tl.bfloat16))


def run_baseline(buffers: Buffers) -> None:
    p = buffers.packed
    baseline_kernel[(buffers.shape.tokens,)](p.rows, p.positions, p.slots, p.weight, buffers.out, EPS, DIM, num_warps=4)


def measure(shape: Shape, ceiling: float, right: bool) -> dict[str, Any]:
    sets = sets_for(shape)
    us, samples = replayed(repeated([b.run for b in sets]))
    result = against_copy(shape, us, samples, ceiling) | {"bytes_equal_oracle": right, "sets": len(sets)}
    if shape.format is None and shape.ratio == 2 and not shape.first % 2 and not shape.save:
        result["baseline_us"], _ = replayed(repeated([functools.partial(run_baseline, b) for b in sets]))
    return result


def measure_small(shape: Shape, right: bool, calls: int = 200) -> dict[str, Any]:
    """A few tokens in a graph, beside an empty kernel before and after, so that both see the same clocks."""
    buffers = make(shape)
    nothing = functools.partial(empty_kernel[(1,)], torch.zeros(1, device=DEVICE), num_warps=1)
    before, _ = replayed([nothing] * calls)
    us, _ = replayed([buffers.run] * calls)
    after, _ = replayed([nothing] * calls)
    return {
        "name": f"{shape.name}, one graph of many", "us": us, "empty_kernel_us": (before + after) / 2,
        "wanted_us": shape.wanted_us, "met": shape.wanted_us is None or us <= shape.wanted_us,
        "bytes_equal_oracle": right,
    }  # fmt: skip


def short(config: CompressConfig) -> str:
    """A configuration in few letters: tokens/registers, and warps where there are several."""
    return f"{config.block_tokens}/{config.most_registers}" + f"/{config.num_warps} warps" * (config.num_warps > 1)


def sweep(ceiling: float, match: str) -> list[dict[str, Any]]:
    """Every configuration of some shapes: its median, if its bytes are right."""
    begun = time.monotonic()
    configs = {shape: configs_of(shape) for shape in SWEEP if match in shape.name}
    verdicts = verdicts_of([(shape, config) for shape, found in configs.items() for config in found])
    nothing = functools.partial(empty_kernel[(1,)], torch.zeros(1, device=DEVICE), num_warps=1)
    results = []
    for shape, found in configs.items():
        small = shape in SMALL
        sets, calls = [make(shape)] if small else sets_for(shape), 200 if small else 8
        empty = replayed([nothing] * calls)[0] if small else 0.0
        tried = []
        for config in found:
            if not verdicts[shape, config]:
                runs = repeated([functools.partial(b.run_as, config) for b in sets], calls)
                tried.append((replayed(runs, samples=9)[0], config))
        tried.sort(key=lambda pair: pair[0])
        listed = ", ".join(f"{short(config)} {us:.{2 if small else 1}f}" for us, config in tried)
        floor = shape.nbytes / ceiling * 1e6
        reference = f"empty kernel {empty:.2f}" if small else f"floor {floor:.1f}"
        print(f"{shape.name}: {reference}, default {short(found[0])}; {listed}", flush=True)
        results.append(
            {
                "name": shape.name, "floor_us": floor, "empty_kernel_us": empty,
                "default": dataclasses.asdict(found[0]),
                "configs": [dataclasses.asdict(config) | {"us": us} for us, config in tried],
            }
        )  # fmt: skip
        torch.cuda.empty_cache()
    print(f"sweep: {time.monotonic() - begun:.0f} s", flush=True)
    return results


def table(where: dict[str, Any], shapes: list[dict[str, Any]], small: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, {where['date'][:10]}; "
        f"copy {where['copy_tb_per_s']:.2f} TB/s read and written; rings of {CAPACITY} rows.",
        "",
        "| what | µs | floor | of copy | the usual kernel | wanted | met | bytes equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    met = {True: "yes", False: "NO", None: ""}
    for r in shapes:
        wanted = f"≥ {r['wanted_fraction']:.2f}" if r["wanted_fraction"] else ""
        wanted += f"≤ {r['wanted_us']:.0f} µs" if r["wanted_us"] else ""
        base = f"{r['baseline_us']:.1f}" if "baseline_us" in r else ""
        lines.append(
            f"| {r['name']} | {r['us']:.1f} | {r['floor_us']:.1f} | {r['fraction_of_copy']:.3f} | {base} | {wanted} "
            f"| {met[r['met']]} | {'yes' if r['bytes_equal_oracle'] else 'NO'} |"
        )
    lines += ["", "| 64 tokens | µs | empty kernel | wanted | met | bytes equal |", "|---|---|---|---|---|---|"]
    for r in small:
        lines.append(
            f"| {r['name']} | {r['us']:.2f} | {r['empty_kernel_us']:.2f} | ≤ {r['wanted_us']} | {met[r['met']]} "
            f"| {'yes' if r['bytes_equal_oracle'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def check() -> int:
    """Every shape and configuration against the torch backend."""
    jobs = [(shape, config) for shape in (*SHAPES, *SMALL) for config in ((None,) if shape.two else configs_of(shape))]
    return sum(map(bool, verdicts_of(jobs).values()))


def once(name: str) -> None:
    """A few launches, for a profiler to look at."""
    launched(sets_for(Shape(16, 16384, None if name == "norm" else name))[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="where JSON and tables go")
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration first")
    parser.add_argument("--only-sweep", action="store_true", help="and nothing after it")
    parser.add_argument("--match", default="", help="only shapes whose name has this in it")
    parser.add_argument("--check", action="store_true", help="compare with the torch backend and stop")
    parser.add_argument("--once", metavar="FORMAT", help="launch one format's kernel a few times and stop")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU, and torch finds none")
    if arguments.check:
        return 1 if check() else 0
    if arguments.once:
        once(arguments.once)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceiling = copy_ceiling()
    where = environment(ceiling, dim=DIM, block_size=BLOCK_SIZE, samples=SAMPLES)
    print(f"copy {ceiling / 1e12:.3f} TB/s", flush=True)
    swept = sweep(ceiling, arguments.match) if arguments.sweep or arguments.only_sweep else []
    if arguments.only_sweep:
        (arguments.out / "compress.json").write_text(
            json.dumps({"environment": where, "sweep": swept}, indent=1) + "\n"
        )
        return 0
    wanted = [shape for shape in (*SMALL, *SHAPES) if arguments.match in shape.name]
    jobs = {shape: (shape, None if shape.two else configs_of(shape)[0]) for shape in wanted}
    verdicts = verdicts_of([*jobs.values()])
    shapes, small = [], []
    for shape in wanted:
        right = not verdicts[jobs[shape]]
        if shape in SMALL:
            small.append(measure_small(shape, right))
            print(f"{shape.name:70} {small[-1]['us']:9.2f} us", flush=True)
        else:
            shapes.append(measure(shape, ceiling, right))
            print(f"{shape.name:70} {shapes[-1]['us']:9.1f} us  {shapes[-1]['fraction_of_copy']:.3f}", flush=True)
            torch.cuda.empty_cache()
    found = {"environment": where, "shapes": shapes, "small": small, "sweep": swept}
    (arguments.out / "compress.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(where, shapes, small)
    (arguments.out / "compress.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
