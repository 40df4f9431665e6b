"""Launches the attention kernels. Nothing here synchronises, so a CUDA graph can capture it.

What a kind of call decides once (:class:`AttendLaunch`) is kept with its plan; a call adds what depends on its tensors'
addresses and on how many queries and rows there are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton

from mxkv import devices, settings, splitting
from mxkv.autotune_cache.sources import source_hash
from mxkv.backends.triton_gpu.attend import AttendTask, Heads, Rows, attend_kernel, chunks_of, reduce_kernel
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.config import AttendConfig, attend_configurations, attend_default, splits_of
from mxkv.backends.triton_gpu.launch import Launch
from mxkv.contracts import YES, AttendSpec, Tunable, Verdict

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SOURCES = tuple(
    f"{__package__}.{name}" for name in ("attend:attend_kernel", "attend:reduce_kernel", "attention:attend_task")
)
_WIDEST_ACCESS = 16
_REDUCED_SPLITS = 16  # at a time
_MOST_DIM = 4096
_ALL_REGISTERS = 255
_LEAST_GROUP = 8  # of E2M1: a word of four bytes


def supports(spec: AttendSpec) -> Verdict:
    """Whether the kernel takes a call."""
    reasons = []
    group = spec.format.group
    if spec.format.grouped and (group < _LEAST_GROUP or group & (group - 1)):
        reasons.append(f"it attends to groups of a power of two of at least {_LEAST_GROUP} values, got {group}")
    if spec.latent_dim > _MOST_DIM:
        reasons.append(f"it attends to rows of at most {_MOST_DIM} values, got {spec.latent_dim}")
    return Verdict(tuple(reasons), "backend='torch' runs every call") if reasons else YES


class AttendLaunch(Launch):
    """Attends to selected rows. See :func:`mxkv.attend`.

    Args:
        spec: The call.
        paths: The instructions to use, instead of the target's; each choice gives the same values.
    """

    spec: AttendSpec

    def __init__(self, spec: AttendSpec, paths: Paths | None = None) -> None:
        super().__init__(spec, tunable(spec), paths)
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

    def options(self, config: AttendConfig) -> dict[str, Any]:
        """The compiler's options."""
        options = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        if self.target.vendor == "nvidia" and config.most_registers < _ALL_REGISTERS:
            options["maxnreg"] = config.most_registers
        return options

    def compile(self, config: AttendConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, one split and several, and launch nothing."""
        spec = self.spec
        floats = torch.empty(1, dtype=torch.float32, device=spec.device)
        index = torch.empty(1, dtype=torch.int32, device=spec.device)
        heads = spec.heads
        values = floats.view(torch.uint8 if self.as_bytes else spec.format.cache_dtype)
        rows = Rows(index, 1, None if spec.selection == "dense" else index, 0 if spec.selection == "dense" else 1)
        for whole in (True, False):
            out = floats.view(spec.q_dtype) if whole else floats
            task = self.task(0, whole, config)
            lse = floats if spec.lse or not whole else None
            with self.guard():
                attend_kernel.warmup(
                    Heads(floats.view(spec.q_dtype), heads * spec.latent_dim, spec.latent_dim), values, rows, 0,
                    Heads(out, heads * spec.value_dim, spec.value_dim), lse, floats if spec.sinked else None,
                    floats if spec.scaled else None, 1.5, self.num_slots, self.block_stride, 2, 1, task,
                    grid=(1,), **self.options(config),
                )  # fmt: skip

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
        task = self.task(cache.data_ptr() % _WIDEST_ACCESS, splits == 1, config)
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        stride, step = (0, rows.stride(0)) if spec.selection == "ragged" else rows.stride()
        selected = Rows(rows, step, bounds, 0 if bounds is None else bounds.stride(0))
        heads_out = Heads(out, out.stride(0), out.stride(1))
        result, logs = heads_out, lse
        if partial is not None:
            sums = queries * spec.heads * splits * spec.value_dim
            result = Heads(partial, spec.heads * splits * spec.value_dim, splits * spec.value_dim)
            logs = partial[sums:]
        with self.guard():
            attend_kernel[(queries * splits * task.head_blocks,)](
                Heads(q, q.stride(0), q.stride(1)), cache, selected, stride, result, logs, sink, cache_scale,
                scale / math.log(2), self.num_slots, self.block_stride, length, splits, task, **self.options(config),
            )  # fmt: skip
            if partial is None:
                return
            padded = triton.next_power_of_2(splits)
            reduce_kernel[(queries * spec.heads,)](
                partial, logs, heads_out, lse, sink, splits, padded, min(padded, _REDUCED_SPLITS),
                triton.next_power_of_2(spec.value_dim), task, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def task(self, address: int, whole: bool, config: AttendConfig) -> AttendTask:
        """The kernel's constants for a cache at an address of which the last bits are given."""
        key = math.gcd(_WIDEST_ACCESS, address), whole, config
        found = self.tasks.get(key)
        if found is None:
            found = self.tasks[key] = attend_task(self.spec, self.paths, *key)
        return found

    def numbers(self, queries: int, splits: int) -> int:
        """How many fp32 numbers the splits of a call leave."""
        return splitting.partial_numbers(queries, self.spec.heads, splits, self.spec.value_dim)


@functools.lru_cache(maxsize=1024)
def prepare(spec: AttendSpec) -> AttendLaunch:
    """What runs one kind of call."""
    return AttendLaunch(spec)


def tunable(spec: AttendSpec) -> Tunable:
    """The launch configurations of one kind of call."""
    target = devices.target_of(spec.device)
    return Tunable(
        AttendConfig,
        attend_configurations(spec, target),
        functools.partial(attend_default, spec, target),
        sizes=("queries", "rows"),
        target=target.name,
        source=source_hash(*_SOURCES, within=(__package__,)),
        compiler=f"triton {triton.__version__}",
    )


def compile(spec: AttendSpec, config: AttendConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    if not settings.triton_interpret():
        prepare(spec).compile(config)


def attend_task(spec: AttendSpec, paths: Paths, address: int, whole: bool, config: AttendConfig) -> AttendTask:
    """An attention kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        address: Of the cache, or its last four bits.
        whole: Whether one split is all.
        config: How it is launched.
    """
    layout, size, dim = spec.layout, spec.format.cache_dtype.itemsize, spec.latent_dim
    chunks = chunks_of(spec.format, dim, config.block_dims)
    starts = (chunk.value_offset for chunk in chunks)
    sizes = (chunk.bytes for chunk in chunks if chunk.element != "bf16")
    return AttendTask(
        chunks=chunks,
        heads=spec.heads,
        dim=dim,
        value_dim=spec.value_dim,
        dtype=_DTYPES[spec.q_dtype],
        selection=spec.selection,
        block_size=layout.block_size,
        value_stride=layout.value_stride * size,
        scale_offset=layout.scale_offset * size,
        scale_stride=layout.scale_stride * size,
        alignment=math.gcd(
            _WIDEST_ACCESS, address, layout.value_stride * size, layout.block_stride * size, *starts,
            *(math.gcd(4, nbytes) * 4 for nbytes in sizes),
        ),
        narrow=layout.num_slots < 1 << 31,
        whole=whole,
        block_heads=config.block_heads,
        block_rows=config.block_rows,
        num_stages=config.num_stages,
        paths=paths,
    )  # fmt: skip
