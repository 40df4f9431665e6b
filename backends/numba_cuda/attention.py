"""Launches the attention kernels. Nothing here synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from mxkv import devices, splitting
from mxkv.backends.numba_cuda import compiler
from mxkv.backends.numba_cuda.attend import AttendTask, attend_kernel
from mxkv.backends.numba_cuda.attend_merge import reduce_kernel
from mxkv.backends.numba_cuda.config import AttendConfig, attend_configurations, guess, splits_of
from mxkv.backends.numba_cuda.launch import Launch, address, kernel_of
from mxkv.backends.numba_cuda.tasks import DTYPES, WIDEST, record_of
from mxkv.contracts import YES, AttendSpec, Tunable, Verdict

ATTEND_ARGUMENTS, REDUCE_ARGUMENTS = "3i53iiifiiii", "ii3iii"


def supports(spec: AttendSpec) -> Verdict:
    """Whether the kernel takes a call."""
    target = devices.target_of(spec.device)
    if attend_configurations(spec, target):
        return YES
    kilobytes = target.shared_memory >> 10
    reason = f"a tile of rows of {spec.latent_dim} values does not fit the {kilobytes} KiB that a block has"
    return Verdict((reason,), "backend='torch' runs every call")


class AttendLaunch(Launch):
    """Attends to selected rows. See :func:`mxkv.attend`."""

    spec: AttendSpec

    def __init__(self, spec: AttendSpec) -> None:
        super().__init__(spec, tunable(spec))
        self.compute_units = devices.describe(spec.device).compute_units

    def splits(self, queries: int, rows: torch.Tensor, num_splits: int | None, config: AttendConfig | None) -> int:
        """Into how many parts each query's rows are split: shapes and the configuration say it, no tensor's values."""
        if num_splits is not None:
            return num_splits
        _, each = splitting.rows_of(self.spec, queries, rows)
        config = config or self.choose(queries, each)
        return splits_of(config, self.spec, queries, each, self.compute_units)

    def workspace_bytes(
        self, queries: int, rows: torch.Tensor, num_splits: int | None = None, config: AttendConfig | None = None
    ) -> int:
        """What the splits of a call leave to be merged: sums and a logarithm for each head, fp32."""
        splits = self.splits(queries, rows, num_splits, config) if queries else 1
        return 4 * self.numbers(queries, splits)

    def compile(self, config: AttendConfig) -> None:
        """Compile for tensors at aligned addresses and 32-bit indices, one split and several, and launch nothing."""
        bounds_bytes = 0 if self.spec.selection == "dense" else 4
        for whole in (True, False):
            self.kernel(0, 4, bounds_bytes, whole, config)

    def __call__(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        rows: torch.Tensor,
        bounds: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        sink: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
        scale: float,
        num_splits: int | None,
        config: AttendConfig | None = None,
    ) -> None:
        spec, queries = self.spec, q.shape[0]
        length, each = splitting.rows_of(self.spec, queries, rows)
        if config is None:
            config = self.choose(queries, each)
        splits = self.splits(queries, rows, num_splits, config)
        numbers = self.numbers(queries, splits)
        partial = splitting.partials(numbers, workspace, spec.device) if numbers else None
        cache_at, index_bytes = cache.data_ptr(), rows.element_size()
        run, merge, head_blocks, shared = self.kernel(
            cache_at % WIDEST, index_bytes, 0 if bounds is None else bounds.element_size(), splits == 1, config
        )
        stride, step = (0, rows.stride(0)) if spec.selection == "ragged" else rows.stride()
        bounds_step = 0 if bounds is None else bounds.stride(0) * bounds.element_size()
        selected = (rows.data_ptr(), stride * index_bytes, step * index_bytes, address(bounds), bounds_step)
        heads_out = _heads(out)
        result, logs = heads_out, address(lse)
        if partial is not None:
            each_head = 4 * splits * spec.value_dim
            result = (partial.data_ptr(), each_head * spec.heads, each_head)
            logs = partial.data_ptr() + each_head * spec.heads * queries
        run(
            queries * splits * head_blocks, (config.threads, 1), shared,
            _heads(q), cache_at, selected, result, logs, address(sink), address(cache_scale),
            scale / math.log(2), self.num_slots, self.block_stride, length, splits,
        )  # fmt: skip
        if partial is not None:
            merge(
                queries * spec.heads, (config.threads, 1), 0,
                partial.data_ptr(), logs, heads_out, address(lse), address(sink), splits,
            )  # fmt: skip

    def kernel(self, *kind: Any) -> tuple[Any, Any, int, int]:
        """What launches the kernel for tensors of a kind (see :func:`attend_task`), and the one that merges its splits
        if there are several; how many blocks a query's heads take, and the shared memory of one."""
        found = self.kernels.get(kind)
        if found is None:
            task, device = attend_task(self.spec, *kind), self.spec.device
            run = kernel_of(task, attend_kernel, ATTEND_ARGUMENTS, device)
            merge = None if task.whole else kernel_of(task, reduce_kernel, REDUCE_ARGUMENTS, device)
            found = self.kernels[kind] = run, merge, task.head_blocks, task.shared.bytes
        return found

    def numbers(self, queries: int, splits: int) -> int:
        """How many fp32 numbers the splits of a call leave."""
        return splitting.partial_numbers(queries, self.spec.heads, splits, self.spec.value_dim)


def _heads(rows: torch.Tensor) -> tuple[int, int, int]:
    """The address of [queries, heads, ...], and the strides of the two in bytes."""
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size


def attend_task(
    spec: AttendSpec, cache_at: int, index_bytes: int, bounds_bytes: int, whole: bool, config: AttendConfig
) -> AttendTask:
    """An attention kernel's constants; see :class:`AttendTask`."""
    return AttendTask(
        record=record_of(spec, cache_at),
        heads=spec.heads,
        value_dim=spec.value_dim,
        dtype=DTYPES[spec.q_dtype],
        selection=spec.selection,
        index_bytes=index_bytes,
        bounds_bytes=bounds_bytes,
        scaled=spec.scaled,
        sinked=spec.sinked,
        whole=whole,
        threads=config.threads,
        block_heads=config.block_heads,
        block_rows=config.block_rows,
        tile_heads=config.tile_heads,
        ahead=config.ahead,
        resident=config.resident,
    )


@functools.lru_cache(maxsize=1024)
def prepare(spec: AttendSpec) -> AttendLaunch:
    """What runs one kind of call."""
    return AttendLaunch(spec)


def tunable(spec: AttendSpec) -> Tunable:
    """The launch configurations of one kind of call."""
    target = devices.target_of(spec.device)
    found = attend_configurations(spec, target)
    return Tunable(
        AttendConfig,
        found,
        lambda queries, rows: guess(found, spec, queries, rows, devices.describe(spec.device).compute_units),
        sizes=("queries", "rows"),
        target=target.name,
        source=compiler.source(),
        compiler=compiler.version(),
    )


def compile(spec: AttendSpec, config: AttendConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    prepare(spec).compile(config)
