"""Attention over cached rows on a GPU: bf16 rows and packed ones in one run, medians, bytes, flops.

    python benchmarks/bench_attend_gpu.py --out DIR            the table
    python benchmarks/bench_attend_gpu.py --out DIR --sweep    also times launch configurations
    python benchmarks/bench_attend_gpu.py --check              only compares with the torch backend, many shapes
    python benchmarks/bench_attend_gpu.py --once mxfp4         a few launches, for a profiler

How it measures: see measuring.py; calls select different rows of one pool, and the merging of splits is included.
Before anything is timed, a part of its result is compared with the torch backend's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, SAMPLES, environment, in_processes, repeated, replayed, sets_needed

import mxkv
from mxkv import checks, devices
from mxkv.backends.triton_gpu import attention
from mxkv.backends.triton_gpu.config import AttendConfig, attend_configurations

DIM, BLOCK_SIZE, TOPK, POOL = 512, 64, 2048, 1 << 20
LEAST_CALLS = 8
MANY_QUERIES = 1024  # a call takes milliseconds
FORMATS = ("bf16", "mxfp4", "nvfp4", "nvfp4-inline", "mxfp8", "mxfp8-inline", "dsv4", "fp8")
SIZES = ((8, 16), (64, 16), (256, 16), (64, 64), (64, 128), (4096, 64))  # queries, heads
WANTED_TB_PER_S = {(256, 16): 3.4}  # of the bf16 rows
WANTED_RATIO = 0.5  # of the packed rows' speed to the bf16 rows'


@dataclasses.dataclass(frozen=True)
class Shape:
    """One thing to time."""

    queries: int
    heads: int
    format: str
    topk: int = TOPK
    pool: int = POOL

    @property
    def name(self) -> str:
        return f"{self.format}, {self.queries} queries, {self.heads} heads, {self.topk} of {self.pool} rows"

    @property
    def row_bytes(self) -> int:
        return mxkv.FORMATS[self.format].record_bytes(DIM)

    @property
    def nbytes(self) -> int:
        """Bytes of the selected rows; queries, slots and results are not counted."""
        return self.queries * self.topk * self.row_bytes

    @property
    def flops(self) -> int:
        return 4 * self.queries * self.topk * self.heads * DIM


@functools.lru_cache(maxsize=2)
def pool_of(format: str, slots: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A full cache, and its scale."""
    g = torch.Generator(DEVICE).manual_seed(0)
    cache = mxkv.empty_cache(format, slots // BLOCK_SIZE, BLOCK_SIZE, DIM, DEVICE)
    scale = torch.full((1,), 0.02, device=DEVICE) if mxkv.FORMATS[format].scale is mxkv.Scale.TENSOR else None
    for part in torch.arange(slots, device=DEVICE).split(1 << 17):
        rows = torch.randn(len(part), DIM, device=DEVICE, generator=g).bfloat16()
        mxkv.store(cache, rows, part, format=format, cache_scale=scale, backend="triton")
    return cache, scale


@dataclasses.dataclass
class Call:
    """One call's tensors."""

    shape: Shape
    q: torch.Tensor
    indices: torch.Tensor
    out: torch.Tensor

    def run(self, config: AttendConfig | None = None) -> None:
        """The public call, or the backend's launch in one configuration."""
        cache, scale = pool_of(self.shape.format, self.shape.pool)
        if config is None:
            mxkv.attend(
                self.q, cache, indices=self.indices, format=self.shape.format, cache_scale=scale, out=self.out,
                backend="triton",
            )  # fmt: skip
            return
        spec = checks.attend_spec(
            self.q, cache, self.out, self.indices, None, None, None, self.shape.format, scale, None, None, None, None
        )
        attention.prepare(spec)(
            self.q, cache, self.out, self.indices, None, scale, None, None, None, DIM**-0.5, None, config=config
        )

    def error(self, most: int = 6) -> float:
        """The largest difference of some queries' results from the torch backend's, relative to the largest value."""
        cache, scale = pool_of(self.shape.format, self.shape.pool)
        some = torch.linspace(0, len(self.q) - 1, min(most, len(self.q)), device=DEVICE).long()
        want = mxkv.attend(
            self.q[some], cache, indices=self.indices[some], format=self.shape.format, cache_scale=scale,
            backend="torch",
        ).float()  # fmt: skip
        difference = (self.out[some].float() - want).abs().max() / want.abs().max()
        return float(difference.nan_to_num(torch.inf))


MOST_ERROR = 2.0**-6


def call_of(shape: Shape, seed: int) -> Call:
    g = torch.Generator(DEVICE).manual_seed(seed)
    q = torch.randn(shape.queries, shape.heads, DIM, device=DEVICE, generator=g).bfloat16()
    indices = torch.randint(shape.pool, (shape.queries, shape.topk), device=DEVICE, generator=g, dtype=torch.int32)
    return Call(shape, q, indices, torch.full_like(q, torch.nan))


def calls_of(shape: Shape) -> list[Call]:
    """Calls that together read more than twice the L2."""
    return [call_of(shape, seed) for seed in range(sets_needed(shape.nbytes, least=1))]


def timed(calls: Sequence[Call], config: AttendConfig | None, samples: int) -> tuple[float, list[float]]:
    runs = [functools.partial(call.run, config) for call in calls]
    least = LEAST_CALLS if calls[0].shape.queries < MANY_QUERIES else 1
    return replayed(repeated(runs, least), samples)


def measure(shape: Shape) -> dict[str, Any]:
    calls = calls_of(shape)
    calls[0].run()
    error = calls[0].error()
    us, samples = timed(calls, None, SAMPLES if shape.queries < MANY_QUERIES else 7)
    config = attention.prepare(spec_of(calls[0])).choose(shape.queries, shape.topk)
    return {
        "name": shape.name, "format": shape.format, "queries": shape.queries, "heads": shape.heads, "us": us,
        "p20": samples[len(samples) // 5], "p80": samples[-1 - len(samples) // 5], "calls": len(calls),
        "tb_per_s": shape.nbytes / us / 1e6, "tflop_per_s": shape.flops / us / 1e6, "error": error,
        "right": error <= MOST_ERROR, "config": dataclasses.asdict(config),
    }  # fmt: skip


def spec_of(call: Call) -> Any:
    cache, scale = pool_of(call.shape.format, call.shape.pool)
    return checks.attend_spec(
        call.q, cache, call.out, call.indices, None, None, None, call.shape.format, scale, None, None, None, None
    )


# Configurations.


def compile_config(job: tuple[Shape, AttendConfig]) -> str:
    """In a worker process: compile a configuration into Triton's cache, and compare what it gives. What is wrong."""
    shape, config = job
    try:
        for topk in (config.block_rows - 3, 5 * config.block_rows + 1):  # one split, and several
            call = call_of(dataclasses.replace(shape, queries=3, topk=topk, pool=1024), 0)
            call.run(config)
            error = call.error()
            if not error <= MOST_ERROR:
                return f"is off by {error}"
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:200]}"
    return ""


def sweep(shapes: Sequence[Shape], workers: int, budget_s: float, samples: int = 5) -> list[dict[str, Any]]:
    """Every configuration of every shape: its median, if its results are right."""
    target = devices.target_of(torch.device(DEVICE, torch.cuda.current_device()))
    spaces = {
        (shape.heads, shape.format): attend_configurations(
            spec_of(call_of(dataclasses.replace(shape, queries=1, topk=1, pool=1024), 0)), target
        )
        for shape in shapes
    }
    kinds: dict[Any, tuple[Shape, AttendConfig]] = {}
    for shape in shapes:
        for config in spaces[shape.heads, shape.format]:
            kinds.setdefault((shape.heads, shape.format, compiled_as(config)), (shape, config))
    begun = time.monotonic()
    found = in_processes(workers, compile_config, list(kinds.values()))
    verdicts = {key: verdict for key, (_, verdict) in zip(kinds, found, strict=True)}
    print(f"sweep: {len(kinds)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for key, verdict in verdicts.items():
        if verdict:
            print(f"  REFUSED {key}: {verdict}", flush=True)
    deadline = time.monotonic() + budget_s
    results = []
    for number, shape in enumerate(shapes):
        share = (deadline - time.monotonic()) / (len(shapes) - number)
        until = time.monotonic() + share
        calls = calls_of(shape)
        tried: list[tuple[float, AttendConfig]] = []
        for config in spaces[shape.heads, shape.format]:
            if time.monotonic() > until:
                print(f"  out of time in {shape.name} before {short(config)}")
                break
            if not verdicts[shape.heads, shape.format, compiled_as(config)]:
                tried.append((timed(calls, config, samples)[0], config))
        tried.sort(key=lambda pair: pair[0])
        again = sorted((timed(calls, config, 3 * samples)[0], config) for _, config in tried[:3])
        default = timed(calls, None, 3 * samples)[0]
        best = ", ".join(f"{short(config)} {us:.1f}" for us, config in again + tried[3:8])
        print(f"{shape.name}: default {default:.1f}; {best}", flush=True)
        results.append(
            {
                "name": shape.name, "default_us": default,
                "configs": [dataclasses.asdict(config) | {"us": us} for us, config in tried],
            }
        )  # fmt: skip
        torch.cuda.empty_cache()
    return results


def compiled_as(config: AttendConfig) -> AttendConfig:
    """A configuration, less what its code does not depend on."""
    return dataclasses.replace(config, programs_per_unit=1)


def short(config: AttendConfig) -> str:
    return "/".join(str(value) for value in dataclasses.astuple(config))


# Comparison.


def cases() -> Iterator[dict[str, Any]]:
    """Calls of many kinds."""
    for name, (dim, value_dim) in itertools.product(
        FORMATS, ((512, 512), (64, 64), (96, 80), (192, 192), (320, 256), (576, 512))
    ):
        if mxkv.FORMATS[name].accepts_dim(dim):
            for heads, splits in ((16, None), (1, 1), (40, 3), (128, None)):
                yield {"format": name, "dim": dim, "value_dim": value_dim, "heads": heads, "num_splits": splits}
    for name, selection, dtype in itertools.product(
        ("bf16", "mxfp4", "mxfp8"), ("ragged", "pages"), (torch.bfloat16, torch.float16)
    ):
        yield {"format": name, "dim": 512, "value_dim": 512, "heads": 16, "selection": selection, "dtype": dtype}
    for heads in (1, 7, 17, 33, 64, 65, 256):
        yield {"format": "mxfp4", "dim": 512, "value_dim": 512, "heads": heads}


def compare(
    format: str,
    dim: int,
    value_dim: int,
    heads: int,
    num_splits: int | None = None,
    selection: str = "dense",
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """What is wrong with one call; nothing, or a sentence."""
    g = torch.Generator(DEVICE).manual_seed(dim + heads)
    blocks, queries, most = 20, 5, 300
    cache = mxkv.empty_cache(format, blocks, BLOCK_SIZE, dim, DEVICE)
    scale = torch.full((1,), 0.02, device=DEVICE) if format == "fp8" else None
    slots = blocks * BLOCK_SIZE
    mxkv.store(
        cache, torch.randn(slots, dim, device=DEVICE, generator=g), torch.arange(slots, device=DEVICE), format=format,
        cache_scale=scale,
    )  # fmt: skip

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=DEVICE, generator=g)

    q = torch.randn(queries, heads, dim, device=DEVICE, generator=g).to(dtype)
    if selection == "dense":
        rows = {"indices": integers(-5, slots + 5, queries, most)}
    elif selection == "ragged":
        indptr = torch.cat((integers(0, 1, 1), integers(0, most, queries))).cumsum(0)
        rows = {"indices": integers(-5, slots + 5, int(indptr[-1])).int(), "indptr": indptr.int()}
    else:
        rows = {"block_table": integers(-1, blocks + 1, queries, 5), "seq_lens": integers(0, 5 * BLOCK_SIZE, queries)}
    arguments: dict[str, Any] = {
        "format": format, "cache_scale": scale, "value_dim": value_dim, "return_lse": True,
        "sink": torch.randn(heads, device=DEVICE, generator=g), **rows,
    }  # fmt: skip
    want, want_lse = mxkv.attend(q, cache, backend="torch", **arguments)
    got, lse = mxkv.attend(q, cache, num_splits=num_splits, backend="triton", **arguments)
    error = float((got.float() - want.float()).abs().max().nan_to_num(torch.inf) / want.float().abs().max())
    off = float((lse - want_lse).nan_to_num(0).abs().max())
    empty = torch.equal(lse.isinf(), want_lse.isinf())
    return "" if error <= MOST_ERROR and off < 1e-3 and empty else f"error {error}, lse {off}, empty {empty}"


def compare_bits(dim: int, heads: int, splits: int) -> str:
    """Whether the same values in two formats give the same bits, on one configuration."""
    g = torch.Generator(DEVICE).manual_seed(dim)
    packed = mxkv.empty_cache("mxfp4", 16, BLOCK_SIZE, dim, DEVICE)
    plain = mxkv.empty_cache("bf16", 16, BLOCK_SIZE, dim, DEVICE)
    slots = torch.arange(1024, device=DEVICE)
    mxkv.store(packed, torch.randn(1024, dim, device=DEVICE, generator=g), slots, format="mxfp4")
    mxkv.store(plain, mxkv.load(packed, slots, format="mxfp4", latent_dim=dim), slots, format="bf16")
    q = torch.randn(4, heads, dim, device=DEVICE, generator=g).bfloat16()
    indices = torch.randint(-5, 1029, (4, 500), device=DEVICE, generator=g)
    config = AttendConfig(min(heads, 64), 32, 1, 8, 2)
    found = []
    for name, cache in (("mxfp4", packed), ("bf16", plain)):
        out = torch.empty_like(q)
        spec = checks.attend_spec(q, cache, out, indices, None, None, None, name, None, None, None, None, None)
        attention.prepare(spec)(q, cache, out, indices, None, None, None, None, None, dim**-0.5, splits, config=config)
        found.append(out)
    return "" if torch.equal(*found) else f"{int((found[0] != found[1]).sum())} values have other bits"


def checked(case: dict[str, Any]) -> str:
    """In a worker process: what is wrong with a call, an exception included."""
    try:
        return compare_bits(**case) if "splits" in case else compare(**case)
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:300]}"


def check(workers: int) -> int:
    todo = [*cases()]
    for dim, heads, splits in itertools.product((96, 512, 576), (16, 64), (1, 4)):
        todo.append({"dim": dim, "heads": heads, "splits": splits})
    begun, wrong = time.monotonic(), 0
    for case, found in in_processes(workers, checked, todo):
        wrong += bool(found)
        if found:
            print("WRONG", {k: str(v) for k, v in case.items()}, found, flush=True)
    print(f"check: {len(todo)} calls, {wrong} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


# Results.


def table(where: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown: microseconds, and the speed relative to bf16 rows."""
    lines = [
        f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, {where['date'][:10]}; d = {DIM}, "
        f"{TOPK} of {POOL} rows. Microseconds (speed relative to bf16 rows).",
        "",
        "| queries, heads | bf16 | TB/s | TFLOP/s | " + " | ".join(FORMATS[1:]) + " | met | right |",
        "|---" * (len(FORMATS) + 5) + "|",
    ]
    for queries, heads in SIZES:
        row = {r["format"]: r for r in results if (r["queries"], r["heads"]) == (queries, heads)}
        if "bf16" not in row:
            continue
        base = row["bf16"]
        wanted = WANTED_TB_PER_S.get((queries, heads))
        ratios = {name: base["us"] / row[name]["us"] for name in FORMATS[1:] if name in row}
        met = (wanted is None or base["tb_per_s"] >= wanted) and all(r >= WANTED_RATIO for r in ratios.values())
        cells = [f"{row[name]['us']:.1f} ({ratios[name]:.2f})" if name in row else "" for name in FORMATS[1:]]
        right = all(r["right"] for r in row.values())
        lines.append(
            f"| {queries}, {heads} | {base['us']:.1f} | {base['tb_per_s']:.2f} | {base['tflop_per_s']:.0f} | "
            f"{' | '.join(cells)} | {'yes' if met else 'NO'} | {'yes' if right else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def once(name: str, queries: int, heads: int) -> None:
    """A few launches of one shape, for a profiler to look at."""
    call = call_of(Shape(queries, heads, name), 0)
    for _ in range(3):
        call.run()
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="where JSON and tables go")
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration first")
    parser.add_argument("--sweep-seconds", type=float, default=200, help="time for the sweep's measurements")
    parser.add_argument("--formats", default=",".join(FORMATS), help="only these formats, with commas")
    parser.add_argument("--no-table", action="store_true", help="stop after the sweep")
    parser.add_argument("--sizes", default="", help="only these sizes: queries x heads, with commas (64x16,256x16)")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--check", action="store_true", help="compare with the torch backend and stop")
    parser.add_argument("--once", metavar="FORMAT", help="launch one format's kernel a few times and stop")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU, and torch finds none")
    formats = arguments.formats.split(",")
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes.split(",") if size] or list(SIZES)
    if arguments.check:
        return check(arguments.workers)
    if arguments.once:
        once(arguments.once, *sizes[0])
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    where = environment(dim=DIM, topk=TOPK, pool=POOL, block_size=BLOCK_SIZE, samples=SAMPLES)
    shapes = [Shape(*size, name) for name in formats for size in sizes]
    if arguments.sweep:
        found = sweep(shapes, arguments.workers, arguments.sweep_seconds)
        (arguments.out / "attend_sweep.json").write_text(json.dumps({"environment": where, "sweep": found}, indent=1))
    if arguments.no_table:
        return 0
    results = []
    for shape in shapes:
        results.append(measure(shape))
        r = results[-1]
        print(
            f"{r['name']:60} {r['us']:9.1f} us {r['tb_per_s']:6.2f} TB/s {r['tflop_per_s']:6.0f} TFLOP/s "
            f"error {r['error']:.4f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    (arguments.out / "attend.json").write_text(json.dumps({"environment": where, "shapes": results}, indent=1) + "\n")
    text = table(where, results)
    (arguments.out / "attend.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
