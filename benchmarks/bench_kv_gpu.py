"""Keys and values on a GPU: stores against a copy, attention against bf16, medians, bytes.

    python benchmarks/bench_kv_gpu.py --out DIR            the tables
    python benchmarks/bench_kv_gpu.py --out DIR --sweep    also times launch configurations
    python benchmarks/bench_kv_gpu.py --only stores        stores alone; or attends
    python benchmarks/bench_kv_gpu.py --check              only compares with the torch backend, many shapes
    python benchmarks/bench_kv_gpu.py --once NAME          a few launches, for a profiler

How it measures is the other GPU benchmarks': graph replays of calls on tensors that together are larger than twice the
L2, medians, the merging of splits included. Two baselines attend in bf16: torch's scaled_dot_product_attention over
contiguous tensors, and a plain kernel of one program for each query head and split.
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
import triton
import triton.language as tl
from measuring import DEVICE, SAMPLES, copy_ceiling, environment, in_processes, repeated, replayed, sets_needed

import mxkv
from mxkv import kv_checks
from mxkv.backends.triton_gpu import kv

HEADS, QUERY_HEADS, DIM, BLOCK_SIZE = 8, 32, 128, 64
STORED = 65_536
SWEPT_SAMPLES = 9
FORMATS = tuple(mxkv.KV_FORMATS)
SIZES = ((64, 8192), (8, 32_768), (1, 32_768))  # sequences, tokens of each
WANTED_ATTEND_US = {
    "turboquant-k8v4": 300.0,
    "turboquant-4bit-nc": 330.0,
    "turboquant-k3v4-nc": 330.0,
    "turboquant-3bit-nc": 330.0,
}
WANTED_STORE_US = {"turboquant-4bit-nc": 120.0}
WANTED_STORE_RATIO = {"turboquant-k8v4": 0.90}  # of a copy's bandwidth
MOST_ERROR = 2.0**-6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=g, dtype=torch.bfloat16)


# Stores.


@dataclasses.dataclass
class StoreCall:
    """One store's tensors."""

    format: str
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor

    @property
    def nbytes(self) -> int:
        """What must be read and written."""
        return (
            self.key.nbytes
            + self.value.nbytes
            + self.key.shape[0] * HEADS * mxkv.KV_FORMATS[self.format].slot_bytes(DIM)
        )

    def run(self, config: kv.KVConfig | None = None) -> None:
        if config is None:
            mxkv.store_kv(self.cache, self.key, self.value, self.slots, format=self.format, backend="triton")
            return
        spec = kv_checks.store_kv_spec(
            self.cache, self.key, self.value, self.slots, self.format, None, None, "propagate"
        )
        kv.prepare(spec)(self.cache, self.key, self.value, self.slots, None, None, config=config)


def store_calls(format: str, tokens: int, ordered: bool) -> list[StoreCall]:
    made: list[StoreCall] = []
    while not made or len(made) < sets_needed(made[0].nbytes):
        seed = len(made)
        slots = torch.arange(tokens, device=DEVICE) if ordered else torch.randperm(tokens, device=DEVICE)
        cache = mxkv.empty_kv_cache(format, tokens // BLOCK_SIZE, BLOCK_SIZE, HEADS, DIM, DEVICE)
        rows = [random(tokens, HEADS, DIM, seed=2 * seed + i) for i in range(2)]
        made.append(StoreCall(format, *rows, slots, cache))
    return made


def store_configs() -> list[kv.KVConfig]:
    """Configurations to compare: rows and warps of a program, and how often it goes on."""
    return [
        kv.KVConfig(rows, warps, 4, steps)
        for rows, warps in ((8, 1), (16, 1), (16, 2), (32, 4))
        for steps in (1, 2, 4, 8)
    ]


def measure_store(format: str, tokens: int, ordered: bool, ceiling: float, sweep: bool) -> dict[str, Any]:
    calls = store_calls(format, tokens, ordered)
    us, samples = replayed(repeated([call.run for call in calls]), SAMPLES)
    found: dict[str, Any] = {
        "name": f"store {format}, {tokens} tokens, {'ordered' if ordered else 'random'} slots", "format": format,
        "tokens": tokens, "ordered": ordered, "us": us, "p20": samples[len(samples) // 5],
        "p80": samples[-1 - len(samples) // 5], "tb_per_s": calls[0].nbytes / us / 1e6,
        "of_copy": calls[0].nbytes / us / 1e6 / ceiling,
    }  # fmt: skip
    if sweep:
        oracle = calls[0].cache.clone()
        found["configs"] = []
        for config in store_configs():
            calls[0].cache.zero_()
            try:
                calls[0].run(config)
                right = torch.equal(calls[0].cache, oracle)
                time_us = replayed(repeated([functools.partial(call.run, config) for call in calls]), SWEPT_SAMPLES)[0]
            except Exception as failure:
                print(f"  {config}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
                continue
            found["configs"].append(dataclasses.asdict(config) | {"us": time_us, "right": right})
            print(f"  {dataclasses.astuple(config)}: {time_us:.1f} us{'' if right else ' WRONG'}", flush=True)
    return found


# Attention.


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention to time."""

    sequences: int
    tokens: int
    format: str

    @property
    def name(self) -> str:
        return f"attend {self.format}, {self.sequences} sequences of {self.tokens} tokens"

    @property
    def nbytes(self) -> int:
        return self.sequences * self.tokens * HEADS * mxkv.KV_FORMATS[self.format].slot_bytes(DIM)


@dataclasses.dataclass
class AttendCall:
    """One attention's tensors."""

    shape: Shape
    q: torch.Tensor
    cache: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor

    def run(self, config: kv.AttendKVConfig | None = None) -> None:
        if config is None:
            mxkv.attend_kv(
                self.q, self.cache, self.blocks, self.lengths, format=self.shape.format, out=self.out, backend="triton"
            )
            return
        spec = kv_checks.attend_kv_spec(
            self.q, self.cache, self.out, self.blocks, self.lengths, self.shape.format, None, None, None, None, None,
            None, None, None,
        )  # fmt: skip
        kv.prepare(spec)(
            self.q, self.cache, self.out, self.blocks, self.lengths, None, None, None, None, None, None, DIM**-0.5,
            None, None, config=config,
        )  # fmt: skip

    def error(self) -> float:
        """The largest difference of two sequences' results from the torch backend's, relative to the largest value."""
        some = torch.tensor([0, self.shape.sequences - 1], device=DEVICE)
        want = mxkv.attend_kv(
            self.q[some], self.cache, self.blocks[some], self.lengths[some], format=self.shape.format, backend="torch"
        ).float()
        return float(((self.out[some].float() - want).abs().max() / want.abs().max()).nan_to_num(torch.inf))


@functools.lru_cache(maxsize=1)
def pool_of(format: str, blocks: int) -> torch.Tensor:
    """A full cache."""
    cache = mxkv.empty_kv_cache(format, blocks, BLOCK_SIZE, HEADS, DIM, DEVICE)
    for part in torch.arange(blocks * BLOCK_SIZE, device=DEVICE).split(1 << 16):
        rows = [random(len(part), HEADS, DIM, seed=int(part[0]) + i) for i in range(2)]
        mxkv.store_kv(cache, *rows, part, format=format, backend="triton")
    return cache


def attend_calls(shape: Shape) -> list[AttendCall]:
    each = shape.tokens // BLOCK_SIZE
    count = sets_needed(shape.nbytes)
    cache = pool_of(shape.format, count * shape.sequences * each)
    g = torch.Generator(DEVICE).manual_seed(1)
    order = torch.randperm(len(cache), device=DEVICE, generator=g).int().view(count, shape.sequences, each)
    lengths = torch.full((shape.sequences,), shape.tokens, device=DEVICE, dtype=torch.int32)
    made = []
    for i in range(count):
        q = random(shape.sequences, QUERY_HEADS, DIM, seed=100 + i)
        made.append(AttendCall(shape, q, cache, order[i], lengths, torch.full_like(q, torch.nan)))
    return made


def compile_config(job: tuple[str, kv.AttendKVConfig]) -> str:
    """In a worker process: compile a configuration into Triton's cache. What went wrong."""
    format, config = job
    try:
        small = mxkv.empty_kv_cache(format, 128, BLOCK_SIZE, HEADS, DIM, DEVICE).zero_()
        sequences, tokens = SIZES[0]
        blocks = torch.zeros(sequences, tokens // BLOCK_SIZE, device=DEVICE, dtype=torch.int32)
        lengths = torch.full((sequences,), 3, device=DEVICE, dtype=torch.int32)
        q = random(sequences, QUERY_HEADS, DIM)
        AttendCall(Shape(*SIZES[0], format), q, small, blocks, lengths, torch.empty_like(q)).run(config)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:200]}"
    return ""


def attend_configs() -> list[kv.AttendKVConfig]:
    """Configurations to compare: tokens of a tile, registers, programs."""
    return [
        kv.AttendKVConfig(8, tokens, programs, 1, registers)
        for tokens, (programs, registers) in itertools.product(
            (32, 64, 16), ((16, 255), (16, 128), (12, 168), (8, 255), (32, 128), (24, 80))
        )
    ]


def measure_attend(shape: Shape, sweep: bool) -> dict[str, Any]:
    calls = attend_calls(shape)
    calls[0].run()
    error = calls[0].error()
    us, samples = replayed(repeated([call.run for call in calls]), SAMPLES)
    found: dict[str, Any] = {
        "name": shape.name, "format": shape.format, "sequences": shape.sequences, "tokens": shape.tokens, "us": us,
        "p20": samples[len(samples) // 5], "p80": samples[-1 - len(samples) // 5], "tb_per_s": shape.nbytes / us / 1e6,
        "error": error, "right": error <= MOST_ERROR,
    }  # fmt: skip
    if sweep:
        found["configs"] = []
        for config in attend_configs():
            calls[0].out.fill_(torch.nan)
            try:
                calls[0].run(config)
                right = calls[0].error() <= MOST_ERROR
                time_us = replayed(repeated([functools.partial(call.run, config) for call in calls]), SWEPT_SAMPLES)[0]
            except Exception as failure:
                print(f"  {config}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
                continue
            found["configs"].append(dataclasses.asdict(config) | {"us": time_us, "right": right})
            print(f"  {dataclasses.astuple(config)}: {time_us:.1f} us{'' if right else ' WRONG'}", flush=True)
    return found


# Baselines, in bf16.


def measure_sdpa(sequences: int, tokens: int) -> dict[str, Any]:
    """torch's attention over contiguous bf16 keys and values, grouped queries."""
    nbytes = 4 * sequences * tokens * HEADS * DIM
    calls = []
    for i in range(min(2, sets_needed(nbytes))):
        key, value = (random(sequences, HEADS, tokens, DIM, seed=2 * i + j) for j in range(2))
        q = random(sequences, QUERY_HEADS, 1, DIM, seed=50 + i)
        calls.append(
            functools.partial(torch.nn.functional.scaled_dot_product_attention, q, key, value, enable_gqa=True)
        )
    us, _ = replayed(repeated(calls, 4), SWEPT_SAMPLES)
    return {
        "name": f"torch SDPA bf16, {sequences} sequences of {tokens} tokens",
        "us": us,
        "tb_per_s": nbytes / us / 1e6,
    }


@triton.jit
def plain_kernel(
    q, key, value, partial, logs, tokens, splits, scale, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr
):
    program = tl.program_id(0)
    row, split = program // splits, program % splits
    at, n = tl.arange(0, D), tl.arange(0, N)
    x = tl.load(q + row * D + at).to(tl.float32)
    head = (row // GROUP).to(tl.int64) * tokens * D
    share = (tokens + splits - 1) // splits
    top, total = float("-inf"), 0.0
    summed = tl.zeros([D], tl.float32)
    for start in range(split * share, min(split * share + share, tokens), N):
        mask = (start + n < tokens)[:, None]
        k = tl.load(key + head + (start + n)[:, None] * D + at[None, :], mask=mask, other=0.0).to(tl.float32)
        logits = tl.where(start + n < tokens, tl.sum(k * x[None, :], 1) * scale, float("-inf"))
        raised = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp2(logits - raised)
        v = tl.load(value + head + (start + n)[:, None] * D + at[None, :], mask=mask, other=0.0).to(tl.float32)
        shrink = tl.exp2(top - raised)
        summed = summed * shrink + tl.sum(v * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = raised
    tl.store(partial + program * D + at, summed / total)
    tl.store(logs + program, top + tl.log2(total))


def measure_plain(sequences: int, tokens: int, splits: int = 8) -> dict[str, Any]:
    """A plain kernel over contiguous bf16 keys and values: one program for each query head and split, then a merge."""
    rows = sequences * QUERY_HEADS
    key, value = (random(sequences, HEADS, tokens, DIM, seed=j) for j in range(2))
    q = random(sequences, QUERY_HEADS, DIM, seed=9)
    partial = torch.empty(rows, splits, DIM, device=DEVICE)
    logs = torch.empty(rows, splits, device=DEVICE)

    def run() -> torch.Tensor:
        plain_kernel[(rows * splits,)](
            q, key, value, partial, logs, tokens, splits, DIM**-0.5 * 1.4426950408889634, QUERY_HEADS // HEADS, DIM, 64
        )
        weights = torch.softmax(logs * 0.6931471805599453, 1)
        return (weights[..., None] * partial).sum(1).to(q.dtype)

    us, _ = replayed(repeated([run], 4), SWEPT_SAMPLES)
    return {"name": f"plain Triton bf16, {sequences} sequences of {tokens} tokens", "us": us}


# Comparison.


def cases() -> Iterator[dict[str, Any]]:
    """Calls of many kinds."""
    for name, dim in itertools.product(FORMATS, (16, 32, 64, 80, 96, 128, 192, 256)):
        for heads, group, block_size, splits in ((8, 4, 16, None), (1, 1, 64, 1), (2, 16, 32, 3)):
            yield {
                "format": name,
                "dim": dim,
                "heads": heads,
                "group": group,
                "block_size": block_size,
                "splits": splits,
            }
        yield {"format": name, "dim": dim, "heads": 2, "group": 3, "block_size": 24, "splits": None, "packed": True}


def compare(
    format: str, dim: int, heads: int, group: int, block_size: int, splits: int | None, packed: bool = False
) -> str:
    """What is wrong with a store, a load and an attention of one kind; nothing, or a sentence."""
    fmt = mxkv.KV_FORMATS[format]
    blocks, sequences = 20, 5
    g = torch.Generator(DEVICE).manual_seed(dim + heads)
    slots = torch.randperm(blocks * block_size, device=DEVICE, generator=g)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        key, value = (torch.randn(len(slots), heads, dim, device=DEVICE, generator=g).to(dtype) for _ in range(2))
        key[3, 0, 1], value[4, 0, 2], value[5], key[6] = torch.nan, torch.inf, 0, 0
        caches = []
        for backend in ("torch", "triton"):
            caches.append(mxkv.empty_kv_cache(format, blocks, block_size, heads, dim, DEVICE))
            mxkv.store_kv(caches[-1], key, value, slots, format=format, backend=backend)
        different = int((caches[0] != caches[1]).sum())
        if different > (3 + caches[0].numel() // 10**4 if fmt.normed else 0):  # norms' last bits, codes on midpoints
            found.append(f"{dtype}: {different} of {caches[0].numel()} bytes differ")
        loaded = [
            mxkv.load_kv(caches[0], slots, format=format, head_dim=dim, dtype=dtype, backend=b)
            for b in ("torch", "triton")
        ]
        if not all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(*loaded, strict=True)):
            found.append(f"{dtype}: loaded rows differ")
    key, value = (torch.randn(len(slots), heads, dim, device=DEVICE, generator=g) for _ in range(2))
    mxkv.store_kv(caches[0], key, value, slots, format=format, backend="torch")
    queries = 40 if packed else sequences
    q = torch.randn(queries, heads * group, dim, device=DEVICE, generator=g).bfloat16()
    arguments: dict[str, Any] = {
        "format": format,
        "return_lse": True,
        "sink": torch.randn(heads * group, device=DEVICE),
    }
    if packed:
        arguments["query_start"] = torch.tensor([0, 1, 1, 20, 35, 39], device=DEVICE)
        arguments["window"] = 50
    table = torch.randint(-1, blocks + 1, (sequences, 9), device=DEVICE, generator=g)
    lengths = torch.randint(0, 9 * block_size, (sequences,), device=DEVICE, generator=g)
    want, logs = mxkv.attend_kv(q, caches[0], table, lengths, backend="torch", **arguments)
    got, lse = mxkv.attend_kv(q, caches[0], table, lengths, backend="triton", num_splits=splits, **arguments)
    error = float(
        (got.float() - want.float()).abs().max().nan_to_num(torch.inf) / want.float().abs().max().clamp(min=1e-9)
    )
    off = float((lse - logs).nan_to_num(0, 0, 0).abs().max())
    if error > MOST_ERROR or off > 1e-2 or not torch.equal(lse.isinf(), logs.isinf()):
        found.append(f"attention is off by {error}, logarithms by {off}")
    return "; ".join(found)


def checked(case: dict[str, Any]) -> str:
    """In a worker process: what is wrong with a kind of call, an exception included."""
    try:
        return compare(**case)
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:300]}"


def check(workers: int) -> int:
    todo = [*cases()]
    begun, wrong = time.monotonic(), 0
    for case, found in in_processes(workers, checked, todo):
        wrong += bool(found)
        if found:
            print("WRONG", case, found, flush=True)
    print(f"check: {len(todo)} kinds of calls, {wrong} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


# Results.


def table(where: dict[str, Any], stores: Sequence[dict[str, Any]], attends: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, {where['date'][:10]}; {HEADS} heads "
        f"of {DIM}, {QUERY_HEADS} query heads, pages of {BLOCK_SIZE}.",
        "", "| store | us | TB/s | of a copy | met |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in stores:
        met = ""
        if f"{STORED} tokens, ordered" in r["name"] and r["format"] in (*WANTED_STORE_US, *WANTED_STORE_RATIO):
            fast = r["us"] <= WANTED_STORE_US.get(r["format"], torch.inf)
            met = "yes" if fast and r["of_copy"] >= WANTED_STORE_RATIO.get(r["format"], 0) else "NO"
        lines.append(f"| {r['name']} | {r['us']:.1f} | {r['tb_per_s']:.2f} | {r['of_copy']:.2f} | {met} |")
    lines += ["", "| attention | us | TB/s | right | met |", "|---|---|---|---|---|"]
    for r in attends:
        wanted = WANTED_ATTEND_US.get(r.get("format", "")) if r.get("sequences") == SIZES[0][0] else None
        met = "" if wanted is None else "yes" if r["us"] <= wanted else "NO"
        right = {True: "yes", False: "NO"}.get(r.get("right", ""), "")
        speed = f"{r['tb_per_s']:.2f}" if r.get("tb_per_s") else ""
        lines.append(f"| {r['name']} | {r['us']:.1f} | {speed} | {right} | {met} |")
    return "\n".join(lines) + "\n"


def once(format: str) -> None:
    """A few launches, for a profiler to look at."""
    for _ in range(3):
        store_calls(format, STORED, True)[0].run()
        attend_calls(Shape(*SIZES[0], format))[0].run()
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="where JSON and tables go")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations too")
    parser.add_argument("--only", choices=("stores", "attends"), help="measure these alone")
    parser.add_argument("--formats", default=",".join(FORMATS), help="only these formats, with commas")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--check", action="store_true", help="compare with the torch backend and stop")
    parser.add_argument("--once", metavar="FORMAT", help="launch one format's kernels a few times and stop")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU, and torch finds none")
    if arguments.check:
        return check(arguments.workers)
    if arguments.once:
        once(arguments.once)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    formats = arguments.formats.split(",")
    if arguments.sweep and arguments.only != "stores":
        begun = time.monotonic()
        jobs = list(itertools.product(formats, attend_configs()))
        for job, failure in in_processes(arguments.workers, compile_config, jobs):
            if failure:
                print(*job, failure, flush=True)
        print(f"compilation for the sweep: {len(jobs)} kernels, {time.monotonic() - begun:.0f} s", flush=True)
    where = environment(
        copy_ceiling(), heads=HEADS, query_heads=QUERY_HEADS, dim=DIM, block_size=BLOCK_SIZE, samples=SAMPLES
    )
    print(f"copy: {where['copy_tb_per_s']:.2f} TB/s", flush=True)
    stores, attends = [], []
    for format in formats if arguments.only != "attends" else ():
        for tokens, ordered in ((STORED, True), (STORED, False), (4096, True)):
            sweep = arguments.sweep and ordered and tokens == STORED
            stores.append(measure_store(format, tokens, ordered, where["copy_tb_per_s"], sweep))
            r = stores[-1]
            print(
                f"{r['name']:60} {r['us']:9.1f} us {r['tb_per_s']:6.2f} TB/s {r['of_copy']:.2f} of a copy", flush=True
            )
            torch.cuda.empty_cache()
    sizes = SIZES if arguments.only != "stores" else ()
    for sequences, tokens in sizes:
        for measured in (measure_sdpa, measure_plain):
            attends.append(measured(sequences, tokens))
            print(f"{attends[-1]['name']:60} {attends[-1]['us']:9.1f} us", flush=True)
            torch.cuda.empty_cache()
    for format, size in itertools.product(formats, sizes):
        attends.append(measure_attend(Shape(*size, format), arguments.sweep and size == SIZES[0]))
        r = attends[-1]
        print(f"{r['name']:60} {r['us']:9.1f} us {r['tb_per_s']:6.2f} TB/s error {r['error']:.4f}", flush=True)
        pool_of.cache_clear()
        torch.cuda.empty_cache()
    name = "kv" if arguments.only is None else f"kv_{arguments.only}"
    found = {"environment": where, "stores": stores, "attends": attends}
    (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(where, stores, attends)
    (arguments.out / f"{name}.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
