"""Launches the kernels on pages of keys and values. Nothing here synchronises, so a CUDA graph can capture it.

What a kind of call decides once is kept with its plan; a call adds what depends on its tensors' addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from mxkv import devices, lloyd_max, splitting
from mxkv.backends.triton_gpu.attend import Heads, reduce_kernel
from mxkv.backends.triton_gpu.codec import Paths, paths_of
from mxkv.backends.triton_gpu.kv_attend import (
    AttendKVTask,
    ReduceTask,
    Sequences,
    attend_kv_kernel,
    halves_of_table,
    kv_chunks,
)
from mxkv.backends.triton_gpu.kv_codec import PRODUCT_PARTS, KVTask
from mxkv.backends.triton_gpu.kv_store import load_kv_kernel, store_kv_kernel
from mxkv.backends.triton_gpu.launch import DeviceGuard
from mxkv.contracts import YES, AttendKVSpec, KVSpec, LoadKVSpec, StoreKVSpec, Verdict
from mxkv.kv_formats import hadamard_block

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_WIDEST_ACCESS = 16
_MOST_DIM = 512
_BUSY = 16  # programs of a compute unit that are enough
_WIDEST_BLOCK = 256
# Of a load's dims that nothing else orders, Triton 3.6 takes the first for a warp's threads, 3.9 the last.
_LANES_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
_MOST_TOKENS = (1 << 31) - (1 << 16)
_REDUCED_SPLITS = 16  # at a time
# Elements that one of a row's threads takes together in a store. The order of a norm's sum goes by it, and so do last
# bits of what is stored: it is the same for all configurations.
_STORED_SPAN = 16
_E4M3_IN_SOFTWARE = 2.0**-8  # what E4M3 keys come times


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """How a store or load of keys and values is launched.

    Attributes:
        block_rows: Rows (of one head of one token) of a program, a power of two.
        num_warps: Warps of a program, a power of two.
        row_threads: Threads of a row, a power of two, as far as its width allows: several read what stands together,
            and need fewer registers; one keeps a rotation to itself.
        steps: How many times a program that stores both keys and values goes on, where there are enough rows for all
            compute units.
    """

    block_rows: int
    num_warps: int
    row_threads: int = 1
    steps: int = 1


def supports(spec: KVSpec) -> Verdict:
    """Whether the kernels take a call."""
    reasons = []
    if spec.head_dim > _MOST_DIM:
        reasons.append(f"its heads have at most {_MOST_DIM} elements, got head_dim {spec.head_dim}")
    elif spec.format.normed and hadamard_block(spec.head_dim) > _WIDEST_BLOCK:
        reasons.append(f"it rotates at most {_WIDEST_BLOCK} elements at a time, got head_dim {spec.head_dim}")
    return Verdict(tuple(reasons), "backend='torch' runs every call") if reasons else YES


def rows_default(spec: StoreKVSpec | LoadKVSpec, target: devices.Target, paths: Paths) -> KVConfig:
    """One warp. The interpreter's time goes by programs: it gets few.

    A rotation of the call's own is a matrix product, of few rows.
    """
    if spec.rotated:
        return KVConfig(16, 4)
    if paths.interpreted:
        return KVConfig(128, 1)
    if isinstance(spec, StoreKVSpec) and not spec.format.normed:
        return KVConfig(2 * target.warp_size // PRODUCT_PARTS, 2, PRODUCT_PARTS)
    if takes_products(spec, paths):
        return KVConfig(target.warp_size // PRODUCT_PARTS, 1, PRODUCT_PARTS, 4)
    if not spec.format.normed:
        return KVConfig(target.warp_size // 2, 1, 8)
    threads = max(2 if target.vendor == "amd" else 1, hadamard_block(spec.head_dim) // 128)
    return KVConfig(max(4, target.warp_size // threads), 1, threads)


def takes_products(spec: KVSpec, paths: Paths) -> bool:
    """Whether matrix products take a part of a store's rotation: of 16-bit elements, as they come.

    A thread's part of a block must have whole tiles, and codes that end with a byte pair.
    """
    part = hadamard_block(spec.head_dim) // PRODUCT_PARTS
    return (
        isinstance(spec, StoreKVSpec)
        and spec.format.normed
        and not spec.rotated
        and spec.nonfinite == "propagate"
        and spec.dtype != torch.float32
        and part >= (16 if 3 in (spec.format.key.bits, spec.format.value_bits) else 8)
        and (paths.pairs != "none" or paths.interpreted)
    )


class RowsLaunch:
    """Stores or loads keys and values. See :func:`mxkv.store_kv` and :func:`mxkv.load_kv`.

    Args:
        spec: The call.
        paths: The instructions to use, instead of the target's; each choice gives the same bytes, but for keys that
            fall on a midpoint.
    """

    def __init__(self, spec: StoreKVSpec | LoadKVSpec, paths: Paths | None = None) -> None:
        self.spec = spec
        self.target = devices.target_of(spec.device)
        self.paths = paths or paths_of(self.target)
        self.config = rows_default(spec, self.target, self.paths)
        self.compute_units = devices.describe(spec.device).compute_units
        self.tasks: dict[tuple[int, int], KVTask] = {}
        self.guard = DeviceGuard(spec.device)

    def __call__(self, *tensors: Any, config: KVConfig | None = None) -> None:
        if isinstance(self.spec, StoreKVSpec):
            kv_cache, key, value, slots, centroids, rotation = tensors
        else:
            kv_cache, slots, key, value, centroids, rotation = tensors
        if not self.spec.layout.num_slots:
            if isinstance(self.spec, LoadKVSpec):
                key.zero_()
                value.zero_()
            return
        config = config or self.config
        tokens = slots.shape[0]
        tiles = -(-tokens * self.spec.layout.heads // config.block_rows)
        arguments = (
            kv_cache, Heads(key, key.stride(0), key.stride(1)), Heads(value, value.stride(0), value.stride(1)), slots,
            centroids, rotation, tokens, self.spec.layout.num_slots, self.spec.layout.block_stride, slots.stride(0),
        )  # fmt: skip
        task = self.task(kv_cache.data_ptr(), config)
        options: dict[str, Any] = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        with self.guard():
            if isinstance(self.spec, StoreKVSpec):
                steps = max(1, min(config.steps, tiles // (_BUSY * self.compute_units)))
                programs = -(-tiles // steps) if task.together else 2 * tiles
                store_kv_kernel[(programs,)](*arguments, steps, task, config.block_rows, **options)
            else:
                load_kv_kernel[(2 * tiles,)](*arguments, task, config.block_rows, **options)

    def task(self, address: int, config: KVConfig) -> KVTask:
        """The kernels' constants for a cache at an address."""
        key = math.gcd(_WIDEST_ACCESS, address), config.row_threads
        found = self.tasks.get(key)
        if found is None:
            found = self.tasks[key] = kv_task(self.spec, self.paths, *key)
        return found


def kv_task(spec: KVSpec, paths: Paths, address: int, row_threads: int = 1) -> KVTask:
    """A kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        address: Of the cache, or its last four bits.
        row_threads: Threads that a row is to have.
    """
    layout, dim, products = spec.layout, spec.head_dim, takes_products(spec, paths)
    table: tuple[float, ...] = ()
    if spec.format.normed and not spec.tabled:
        table = lloyd_max.centroids(dim, spec.format.key.bits)
    return KVTask(
        key_bits=spec.format.key.bits,
        value_bits=spec.format.value_bits,
        corrected=spec.format.norm_correction,
        dim=dim,
        heads=layout.heads,
        block=hadamard_block(dim),
        dtype=_DTYPES[spec.dtype],
        dtype_max=torch.finfo(spec.dtype).max,
        table=table,
        rotated=spec.rotated,
        sanitize=isinstance(spec, StoreKVSpec) and spec.nonfinite == "sanitize",
        block_size=layout.block_size,
        token_bytes=layout.token_bytes,
        head_bytes=layout.head_bytes,
        key_bytes=layout.key_bytes,
        meta_offset=layout.meta_offset,
        fields=layout.fields,
        alignment=math.gcd(_WIDEST_ACCESS, address, layout.block_stride, layout.key_bytes, layout.value_bytes),
        narrow=layout.num_slots < 1 << 31,
        paths=paths,
        row_threads=row_threads,
        row_span=_STORED_SPAN if products or (isinstance(spec, StoreKVSpec) and not spec.format.normed) else 0,
        products=products,
        # A butterfly between threads is better off where they stand apart.
        parts_first=_LANES_FIRST and (products or not spec.format.normed),
    )


@dataclasses.dataclass(frozen=True)
class AttendKVConfig:
    """How an attention over keys and values is launched.

    Attributes:
        block_queries: Rows of queries (a head of a query is one) of a program, a power of two of at least 8.
        block_tokens: Tokens of a tile, a power of two of at least 16.
        programs_per_unit: How many programs a compute unit is to have: a sequence's tokens are split where there are
            fewer.
        num_warps: Warps of a program, a power of two.
        most_registers: Registers of a thread; 255 limits nothing (and so does any number on AMD).
    """

    block_queries: int
    block_tokens: int
    programs_per_unit: int
    num_warps: int = 1
    most_registers: int = 255


_LEAST_TILES = 4  # of a split


def attend_kv_default(spec: AttendKVSpec, target: devices.Target) -> AttendKVConfig:
    """A configuration that is good without tuning: one warp, so that operands stay in its registers.

    Few queries leave registers: on an H200 tiles of 64 tokens are faster for codes that come in words, and 12 programs
    of 168 registers for the others.
    """
    group = spec.query_heads // spec.layout.heads
    most = 32 if spec.packed else 16
    queries = 16 if target.vendor == "amd" else 8
    while queries < most and (spec.packed or queries < group):
        queries *= 2
    if target.vendor == "nvidia" and queries == 8 and spec.head_dim <= 128:
        small = spec.format.key.bits < 8 and spec.format.value_bits == 4
        if small and spec.layout.block_size % 64 == 0:
            return AttendKVConfig(queries, 64, 8)
        return AttendKVConfig(queries, 32, 12, most_registers=168)
    return AttendKVConfig(queries, 32, 16 if spec.head_dim <= 128 else 8)


class AttendKVLaunch:
    """Attends to pages of keys and values. See :func:`mxkv.attend_kv`.

    Args:
        spec: The call.
        paths: The instructions to use, instead of the target's; each choice gives the same values.
    """

    def __init__(self, spec: AttendKVSpec, paths: Paths | None = None) -> None:
        self.spec = spec
        self.target = devices.target_of(spec.device)
        self.paths = paths or paths_of(self.target)
        self.config = attend_kv_default(spec, self.target)
        self.compute_units = devices.describe(spec.device).compute_units
        self.halves: tuple[float, ...] = ()
        self.key_factor = 1.0
        if not spec.format.normed and self.paths.e4m3 != "cvt":
            self.key_factor = _E4M3_IN_SOFTWARE
        if spec.format.normed and not spec.tabled:
            self.halves, self.key_factor = halves_of_table(lloyd_max.centroids(spec.head_dim, spec.format.key.bits))
        self.tasks: dict[tuple[Any, ...], AttendKVTask] = {}
        self.reduce_task = ReduceTask(spec.query_heads, spec.head_dim, self.paths)
        self.guard = DeviceGuard(spec.device)

    def tiles(self, queries: int, sequences: int, config: AttendKVConfig) -> int:
        """How many programs take the queries of one cache head, for one split."""
        group = self.spec.query_heads // self.spec.layout.heads
        if self.spec.packed:
            return queries * group // config.block_queries + sequences + 1
        return sequences * -(-group // config.block_queries)

    def splits(
        self, queries: int, table: torch.Tensor, num_splits: int | None, config: AttendKVConfig | None = None
    ) -> int:
        """Into how many parts tokens are split: shapes and the configuration say it, no tensor's values."""
        if num_splits is not None:
            return num_splits
        config = config or self.config
        # Sequences of several queries share a tile's programs: what is packed takes the least that there can be.
        groups = self.spec.query_heads // self.spec.layout.heads
        rows = max(queries * groups // config.block_queries, table.shape[0]) if self.spec.packed else 0
        programs = (rows or self.tiles(queries, table.shape[0], config)) * self.spec.layout.heads
        tiles = -(-table.shape[1] * self.spec.layout.block_size // config.block_tokens)
        wanted = min(config.programs_per_unit * self.compute_units // max(programs, 1), tiles // _LEAST_TILES)
        return splitting.parts_of(tiles, wanted)

    def workspace_bytes(self, queries: int, table: torch.Tensor, num_splits: int | None = None) -> int:
        """What the splits of a call leave to be merged: sums and a logarithm for each head, fp32."""
        splits = self.splits(queries, table, num_splits) if queries else 1
        return 4 * self.numbers(queries, splits)

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor | None,
        sink: torch.Tensor | None,
        centroids: torch.Tensor | None,
        rotation: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
        scale: float,
        window: int | None,
        num_splits: int | None,
        config: AttendKVConfig | None = None,
    ) -> None:
        spec, queries, sequences = self.spec, q.shape[0], seq_lens.shape[0]
        config = config or self.config
        splits = self.splits(queries, block_table, num_splits, config)
        numbers = self.numbers(queries, splits)
        partial = splitting.partials(numbers, workspace, spec.device) if numbers else None
        heads_out = Heads(out, out.stride(0), out.stride(1))
        result, logs = heads_out, lse
        if partial is not None:
            result = Heads(partial, 0, 0)
            logs = partial[queries * spec.query_heads * splits * spec.head_dim :]
        table_stride, table_step = block_table.stride()
        starts_step = 0 if query_start is None else query_start.stride(0)
        table = Sequences(block_table, table_stride, table_step, seq_lens, seq_lens.stride(0), query_start, starts_step)
        task = self.task(kv_cache.data_ptr(), splits == 1, config)
        factor = scale / math.log(2) / self.key_factor
        if spec.format.normed and not spec.rotated:
            factor *= task.block**-0.5
        capacity = min(block_table.shape[1] * spec.layout.block_size, _MOST_TOKENS)
        options: dict[str, Any] = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        if self.target.vendor == "nvidia" and config.most_registers < 255:
            options["maxnreg"] = config.most_registers
        with self.guard():
            attend_kv_kernel[(self.tiles(queries, sequences, config) * splits * spec.layout.heads,)](
                Heads(q, q.stride(0), q.stride(1)), kv_cache, table, result, logs, sink if partial is None else None,
                centroids, rotation, factor, sequences, queries, spec.layout.num_blocks, spec.layout.block_stride,
                capacity, splits, window or 0, task, **options,
            )  # fmt: skip
            if partial is None:
                return
            padded = triton.next_power_of_2(splits)
            reduce_kernel[(queries * spec.query_heads,)](
                partial, logs, heads_out, lse, sink, splits, padded, min(padded, _REDUCED_SPLITS),
                triton.next_power_of_2(spec.head_dim), self.reduce_task, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def task(self, address: int, whole: bool, config: AttendKVConfig) -> AttendKVTask:
        """The kernel's constants for a cache at an address."""
        key = math.gcd(_WIDEST_ACCESS, address), whole, config
        found = self.tasks.get(key)
        if found is None:
            spec = self.spec
            base = kv_task(spec, self.paths, key[0])
            found = self.tasks[key] = AttendKVTask(
                **{field.name: getattr(base, field.name) for field in dataclasses.fields(base)},
                chunks=kv_chunks(spec.head_dim),
                query_heads=spec.query_heads,
                packed=spec.packed,
                windowed=spec.windowed,
                whole=whole,
                block_queries=config.block_queries,
                block_tokens=config.block_tokens,
                halves=self.halves,
                lanes_first=_LANES_FIRST,
            )
        return found

    def numbers(self, queries: int, splits: int) -> int:
        """How many fp32 numbers the splits of a call leave."""
        return splitting.partial_numbers(queries, self.spec.query_heads, splits, self.spec.head_dim)


@functools.lru_cache(maxsize=1024)
def prepare(spec: KVSpec) -> Callable[..., None]:
    """What runs one kind of call."""
    return AttendKVLaunch(spec) if isinstance(spec, AttendKVSpec) else RowsLaunch(spec)
