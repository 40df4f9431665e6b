"""Launches the store and load kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it.

What a kind of call decides once (:class:`StoreLaunch`, :class:`LoadLaunch`) is kept with its plan; a call adds what
depends on its tensors' addresses and on how many tokens there are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from mxkv import devices, settings
from mxkv.autotune_cache.sources import source_hash
from mxkv.backends.triton_gpu.config import LaunchConfig, configurations, default_config
from mxkv.backends.triton_gpu.launch import Launch, Launcher
from mxkv.backends.triton_gpu.load import LoadTask, load_kernel
from mxkv.backends.triton_gpu.store import StoreTask, store_kernel
from mxkv.backends.triton_gpu.tasks import load_task, programs, store_task
from mxkv.contracts import ROPE_DIM, LoadSpec, Spec, StoreSpec, Tunable

_SOURCES = {
    "store": tuple(f"{__package__}.{name}" for name in ("store:store_kernel", "tasks:store_task", "tasks:programs")),
    "load": tuple(f"{__package__}.{name}" for name in ("load:load_kernel", "tasks:load_task")),
}

# What Triton specializes on: pointers and integers that are multiples of 16, integers that need 64 bits.
_POINTER_MASK = 15
_STRIDE_STEP = 16
_MOST_INT32 = (1 << 31) - 1
_NO_TENSOR = (None, 0, 0)
_ANY_COUNT = 2  # a count that is not specialized on


class _RowsLaunch(Launch):
    """What stores and loads have in common."""

    spec: StoreSpec | LoadSpec

    def __init__(self, spec: StoreSpec | LoadSpec, kernel: Any, element_size: int) -> None:
        super().__init__(spec, tunable(spec))
        self.launcher = Launcher(kernel, spec.device)
        self.dim = spec.latent_dim
        self.pair_mask = 2 * element_size - 1


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """What Triton specializes on in a tensor of indices or a table, and its stride."""
    if tensor is None:
        return _NO_TENSOR
    return tensor.dtype, tensor.stride(0), tensor.data_ptr() & _POINTER_MASK


class StoreLaunch(_RowsLaunch):
    """Quantizes rows and scatters them. See :func:`mxkv.store`."""

    spec: StoreSpec

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec, store_kernel, spec.latent_dtype.itemsize)

    def __call__(
        self,
        cache: torch.Tensor,
        latent: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        cos_sin: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        config: LaunchConfig | None = None,
    ) -> None:
        max_position, table_stride = (0, 0) if cos_sin is None else (cos_sin.shape[0], cos_sin.stride(0))
        if not self.num_slots or (cos_sin is not None and not max_position):
            return  # no slot, or no position, is in range
        tokens = slots.shape[0]
        if config is None:
            config = self.choose(tokens)
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        row_stride = latent.stride(0) if tokens > 1 else self.dim
        cache_at, latent_at = cache.data_ptr() & _POINTER_MASK, latent.data_ptr() & _POINTER_MASK
        slot_kind, position_kind = _kind(slots), _kind(positions)
        task = self.task(cache_at, latent_at, row_stride, config)
        key = (
            config.block_tokens, config.num_warps, task, cache_at, latent_at, row_stride, tokens > _MOST_INT32,
            slot_kind, position_kind, None if cos_sin is None else (_kind(cos_sin), max_position > _MOST_INT32),
            None if cache_scale is None else cache_scale.data_ptr() & _POINTER_MASK,
        )  # fmt: skip
        with self.guard():
            self.launcher(
                key, programs(tokens, config.block_tokens, task.share), config.num_warps,
                cache, latent, slots, positions, cos_sin, cache_scale,
                tokens, self.num_slots, max_position, self.block_stride, row_stride, slot_kind[1], position_kind[1],
                table_stride, task, config.block_tokens,
            )  # fmt: skip

    def task(self, cache_at: int, latent_at: int, row_stride: int, config: LaunchConfig) -> StoreTask:
        """The kernel's constants for tensors at addresses of which only the last bits are given."""
        if not latent_at and not row_stride % _STRIDE_STEP:
            row_alignment = _POINTER_MASK + 1
        else:
            pair = not latent_at & self.pair_mask and not row_stride & 1
            row_alignment = (self.pair_mask + 1) >> (not pair)
        kind = (row_alignment, cache_at & 3, config.num_warps == 1)
        found = self.tasks.get(kind)
        if found is None:
            found = self.tasks[kind] = store_task(self.spec, self.paths, *kind)
        return found

    def compile(self, config: LaunchConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        indices = torch.empty(1, dtype=torch.int64, device=self.spec.device)
        floats = torch.empty(1, dtype=torch.float32, device=self.spec.device)
        rows = floats.view(self.spec.latent_dtype)
        bytes = floats.view(torch.uint8 if self.as_bytes else self.spec.format.cache_dtype)
        positioned, rotate = self.spec.positioned, self.spec.rotate
        with self.guard():
            store_kernel.warmup(
                bytes, rows, indices, indices if positioned else None, floats if rotate else None,
                floats if self.spec.scaled else None,
                1, self.num_slots, _ANY_COUNT if rotate else 0, self.block_stride, self.dim, 1, int(positioned),
                ROPE_DIM if rotate else 0, self.task(0, 0, self.dim, config), config.block_tokens,
                grid=(1,), num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip


class LoadLaunch(_RowsLaunch):
    """Gathers rows and dequantizes them. See :func:`mxkv.load`."""

    spec: LoadSpec

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, load_kernel, spec.out_dtype.itemsize)

    def __call__(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        cache_scale: torch.Tensor | None,
        config: LaunchConfig | None = None,
    ) -> None:
        tokens = slots.shape[0]
        if config is None:
            config = self.choose(tokens)
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        row_stride = out.stride(0) if tokens > 1 else self.dim
        cache_at, out_at = cache.data_ptr() & _POINTER_MASK, out.data_ptr() & _POINTER_MASK
        slot_kind = _kind(slots)
        task = self.task(cache_at, out_at, row_stride)
        key = (
            config.block_tokens, config.num_warps, task, cache_at, out_at, row_stride, tokens > _MOST_INT32, slot_kind,
            None if cache_scale is None else cache_scale.data_ptr() & _POINTER_MASK,
        )  # fmt: skip
        with self.guard():
            self.launcher(
                key, -(-tokens // config.block_tokens), config.num_warps,
                cache, slots, out, cache_scale,
                tokens, self.num_slots, self.block_stride, slot_kind[1], row_stride,
                task, config.block_tokens,
            )  # fmt: skip

    def task(self, cache_at: int, out_at: int, row_stride: int) -> LoadTask:
        """The kernel's constants for tensors at addresses of which only the last bits are given."""
        aligned = (cache_at & 3, not out_at & self.pair_mask and not row_stride & 1)
        found = self.tasks.get(aligned)
        if found is None:
            found = self.tasks[aligned] = load_task(self.spec, self.paths, *aligned)
        return found

    def compile(self, config: LaunchConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        indices = torch.empty(1, dtype=torch.int64, device=self.spec.device)
        floats = torch.empty(1, dtype=torch.float32, device=self.spec.device)
        bytes = floats.view(torch.uint8 if self.as_bytes else self.spec.format.cache_dtype)
        with self.guard():
            load_kernel.warmup(
                bytes, indices, floats.view(self.spec.out_dtype), floats if self.spec.scaled else None,
                1, self.num_slots, self.block_stride, 1, self.dim,
                self.task(0, 0, self.dim), config.block_tokens,
                grid=(1,), num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def prepare(spec: StoreSpec | LoadSpec) -> StoreLaunch | LoadLaunch:
    """What runs one kind of call."""
    return StoreLaunch(spec) if isinstance(spec, StoreSpec) else LoadLaunch(spec)


def tunable(spec: Spec) -> Tunable:
    """The launch configurations of one kind of call."""
    compute_units = devices.describe(spec.device).compute_units
    return Tunable(
        LaunchConfig,
        configurations(spec),
        functools.partial(default_config, spec, compute_units=compute_units),
        target=devices.target_of(spec.device).name,
        source=source_hash(*_SOURCES[spec.operation], within=(__package__,)),
        compiler=f"triton {triton.__version__}",
    )


def compile(spec: Spec, config: LaunchConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    if not settings.triton_interpret():
        prepare(spec).compile(config)


def store(spec: StoreSpec, *tensors: torch.Tensor | None, config: LaunchConfig | None = None) -> None:
    """Quantize rows and scatter them, with a launch configuration of the caller's."""
    run: Any = prepare(spec)
    run(*tensors, config=config)


def load(spec: LoadSpec, *tensors: torch.Tensor | None, config: LaunchConfig | None = None) -> None:
    """Gather rows and dequantize them, with a launch configuration of the caller's."""
    run: Any = prepare(spec)
    run(*tensors, config=config)
