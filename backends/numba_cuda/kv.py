"""Launches the kernels on pages of keys and values. Nothing here synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from mxkv import devices, lloyd_max, numerics, settings, splitting
from mxkv.backends.numba_cuda.attend_merge import reduce_kernel
from mxkv.backends.numba_cuda.config import MOST_SHARED, SIMULATED_THREADS, AttendConfig
from mxkv.backends.numba_cuda.kv_attend import AttendKVTask, attend_kv_kernel, shared_of
from mxkv.backends.numba_cuda.kv_rows import KVRecord, KVTask, load_kv_kernel, store_kv_kernel
from mxkv.backends.numba_cuda.launch import address, kernel_of
from mxkv.backends.numba_cuda.tasks import DTYPES, WIDEST
from mxkv.contracts import YES, AttendKVSpec, KVSpec, LoadKVSpec, StoreKVSpec, Verdict

ROWS_ARGUMENTS, ATTEND_ARGUMENTS, REDUCE_ARGUMENTS = "i332iiiii", "3ic3iiifiiii", "ii3iii"
_LEAST_TILES = 4  # of a split
_WORD = 4


def supports(spec: KVSpec) -> Verdict:
    """Whether the kernels take a call."""
    if not isinstance(spec, AttendKVSpec) or _configurations(spec):
        return YES
    reason = f"a tile of rows of {spec.head_dim} values does not fit a block's shared memory"
    return Verdict((reason,), "backend='torch' runs every call")


class RowsLaunch:
    """Stores or loads keys and values. See :func:`mxkv.store_kv` and :func:`mxkv.load_kv`."""

    def __init__(self, spec: StoreKVSpec | LoadKVSpec) -> None:
        self.spec = spec
        # Blocks of one warp for each row, several rows; in the simulator a few threads.
        self.threads, self.rows = (2, 2) if settings.numba_simulated() else (32, 4)
        self.kernels: dict[tuple[int, int], tuple[Any, int]] = {}

    def __call__(self, *tensors: Any) -> None:
        spec, layout = self.spec, self.spec.layout
        if isinstance(spec, StoreKVSpec):
            kv_cache, key, value, slots, centroids, rotation = tensors
        else:
            kv_cache, slots, key, value, centroids, rotation = tensors
        run, shared = self.kernel(kv_cache.data_ptr() % WIDEST, slots.element_size())
        tokens = slots.shape[0]
        run(
            -(-tokens * layout.heads // self.rows), (self.threads, self.rows), shared,
            kv_cache.data_ptr(), _heads(key), _heads(value), (slots.data_ptr(), slots.stride(0) * slots.element_size()),
            address(centroids), address(rotation), tokens, layout.num_slots, layout.block_stride,
        )  # fmt: skip

    def kernel(self, address: int, index_bytes: int) -> tuple[Any, int]:
        """What launches the kernel for tensors of a kind, and a block's shared memory."""
        kind = address, index_bytes
        found = self.kernels.get(kind)
        if found is None:
            spec = self.spec
            stores = isinstance(spec, StoreKVSpec)
            task = KVTask(
                record=record_of(spec, address),
                dtype=DTYPES[spec.dtype],
                dtype_max=numerics.float_bits(torch.finfo(spec.dtype).max),
                corrected=spec.format.norm_correction,
                sanitize=isinstance(spec, StoreKVSpec) and spec.nonfinite == "sanitize",
                index_bytes=index_bytes,
                threads=self.threads,
                rows=self.rows,
            )
            factory = store_kv_kernel if stores else load_kv_kernel
            found = self.kernels[kind] = kernel_of(task, factory, ROWS_ARGUMENTS, spec.device), task.bytes
        return found


class AttendKVLaunch:
    """Attends to pages of keys and values. See :func:`mxkv.attend_kv`."""

    def __init__(self, spec: AttendKVSpec) -> None:
        self.spec = spec
        self.config = _configurations(spec)[0]
        self.compute_units = devices.describe(spec.device).compute_units
        self.kernels: dict[tuple[Any, ...], tuple[Any, Any, int, int]] = {}

    def splits(self, queries: int, table: torch.Tensor, num_splits: int | None) -> int:
        """Into how many parts each query's rows are split: shapes and the configuration say it, no tensor's values."""
        if num_splits is not None:
            return num_splits
        spec, config = self.spec, self.config
        group = spec.query_heads // spec.layout.heads
        blocks = queries * spec.layout.heads * -(-group // config.block_heads)
        tiles = -(-table.shape[1] * spec.layout.block_size // config.block_rows)
        wanted = min(config.blocks_per_unit * self.compute_units // max(blocks, 1), tiles // _LEAST_TILES)
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
    ) -> None:
        spec, config, queries = self.spec, self.config, q.shape[0]
        splits = self.splits(queries, block_table, num_splits)
        numbers = self.numbers(queries, splits)
        partial = splitting.partials(numbers, workspace, spec.device) if numbers else None
        run, merge, head_blocks, shared = self.kernel(
            kv_cache.data_ptr() % WIDEST, block_table.element_size(), seq_lens.element_size(),
            8 if query_start is None else query_start.element_size(), splits == 1,
        )  # fmt: skip
        size = block_table.element_size()
        selected = (
            block_table.data_ptr(), block_table.stride(0) * size, block_table.stride(1) * size,
            *_indices(seq_lens), *_indices(query_start), seq_lens.shape[0], queries, window or 0,
            address(centroids), address(rotation),
        )  # fmt: skip
        heads_out = _heads(out)
        result, logs = heads_out, address(lse)
        if partial is not None:
            each_head = 4 * splits * spec.head_dim
            result = (partial.data_ptr(), each_head * spec.query_heads, each_head)
            logs = partial.data_ptr() + each_head * spec.query_heads * queries
        run(
            queries * splits * head_blocks, (config.threads, 1), shared,
            _heads(q), kv_cache.data_ptr(), selected, result, logs, address(sink), 0,
            scale / math.log(2), spec.layout.num_blocks, spec.layout.block_stride,
            block_table.shape[1] * spec.layout.block_size, splits,
        )  # fmt: skip
        if partial is not None:
            merge(
                queries * spec.query_heads, (config.threads, 1), 0,
                partial.data_ptr(), logs, heads_out, address(lse), address(sink), splits,
            )  # fmt: skip

    def kernel(
        self, address: int, table_bytes: int, length_bytes: int, start_bytes: int, whole: bool
    ) -> tuple[Any, Any, int, int]:
        """What launches the kernel for tensors of a kind, and the one that merges its splits if there are several; how
        many blocks a query's heads take, and the shared memory of one."""
        kind = address, table_bytes, length_bytes, start_bytes, whole
        found = self.kernels.get(kind)
        if found is None:
            spec, config = self.spec, self.config
            task = AttendKVTask(
                record_of(spec, address), spec.query_heads, DTYPES[spec.dtype], spec.packed, spec.windowed,
                table_bytes, length_bytes, start_bytes, spec.sinked, whole,
                config.threads, config.block_heads, config.block_rows, config.tile_heads, config.ahead,
                config.resident,
            )  # fmt: skip
            run = kernel_of(task, attend_kv_kernel, ATTEND_ARGUMENTS, spec.device)
            merge = None if whole else kernel_of(task, reduce_kernel, REDUCE_ARGUMENTS, spec.device)
            found = self.kernels[kind] = run, merge, task.head_blocks, task.shared.bytes
        return found

    def numbers(self, queries: int, splits: int) -> int:
        """How many fp32 numbers the splits of a call leave."""
        return splitting.partial_numbers(queries, self.spec.query_heads, splits, self.spec.head_dim)


def record_of(spec: KVSpec, address: int) -> KVRecord:
    """The record of a call whose cache stands at an address (its last four bits are enough)."""
    layout, format = spec.layout, spec.format
    table: tuple[int, ...] = ()
    if format.normed and not spec.tabled:
        table = tuple(map(numerics.float_bits, lloyd_max.centroids(spec.head_dim, format.key.bits)))
    return KVRecord(
        dim=spec.head_dim,
        key_bits=format.key.bits,
        value_bits=format.value_bits,
        table=table,
        rotated=spec.rotated,
        heads=layout.heads,
        block_size=layout.block_size,
        token_bytes=layout.token_bytes,
        head_bytes=layout.head_bytes,
        key_bytes=layout.key_bytes,
        meta_offset=layout.meta_offset,
        fields=layout.fields,
        alignment=math.gcd(_WORD, address, layout.block_stride, layout.key_bytes, layout.value_bytes),
    )


@functools.lru_cache(maxsize=1024)
def _configurations(spec: AttendKVSpec) -> tuple[AttendConfig, ...]:
    """The configurations that fit a block's shared memory; the best guess comes first."""
    group = spec.query_heads // spec.layout.heads
    heads = 2
    while heads < min(group, 8):
        heads *= 2
    if settings.numba_simulated():
        return (AttendConfig(SIMULATED_THREADS, min(heads, 4), 4, 1, 4),)
    most = min(devices.target_of(spec.device).shared_memory, MOST_SHARED)
    found = [
        AttendConfig(128, *tile, 4, 4, False, 4) for tile in ((heads, 32), (heads, 16), (heads, 8), (4, 4), (2, 2))
    ]
    return tuple(
        config
        for config in found
        if shared_of(spec.head_dim, config.threads, config.block_heads, config.block_rows, config.tile_heads).bytes
        <= most
    )


def _heads(rows: torch.Tensor) -> tuple[int, int, int]:
    """The address of [tokens, heads, ...], and the strides of the two in bytes."""
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size


def _indices(tensor: torch.Tensor | None) -> tuple[int, int]:
    """The address of a tensor of indices, and its stride in bytes."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


@functools.lru_cache(maxsize=1024)
def prepare(spec: KVSpec) -> RowsLaunch | AttendKVLaunch:
    """What runs one kind of call."""
    return AttendKVLaunch(spec) if isinstance(spec, AttendKVSpec) else RowsLaunch(spec)
