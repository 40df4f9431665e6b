"""Launches the store and load kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it.

What a kind of call decides once (:class:`StoreLaunch`, :class:`LoadLaunch`) is kept with its plan; a call adds what
depends on its tensors' addresses and on how many tokens there are.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch

from mxkv import devices, numerics
from mxkv.backends.triton_gpu.codec import Paths, paths_of
from mxkv.backends.triton_gpu.config import LaunchConfig, default_config
from mxkv.backends.triton_gpu.load import LoadTask, load_kernel
from mxkv.backends.triton_gpu.regions import regions_of
from mxkv.backends.triton_gpu.store import StoreTask, store_kernel
from mxkv.contracts import ROPE_DIM, LoadSpec, Spec, StoreSpec

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NO_GUARD = contextlib.nullcontext()


class _Launch:
    """What every launch for one spec has in common."""

    def __init__(self, spec: Spec, element_size: int) -> None:
        self.spec = spec
        self.paths = paths_of(devices.target_of(spec.device))
        self.compute_units = devices.describe(spec.device).compute_units
        self.num_slots = spec.layout.num_slots
        self.block_stride = spec.layout.block_stride * spec.format.cache_dtype.itemsize
        self.dim = spec.latent_dim
        self.pair_mask = 2 * element_size - 1
        # Not every target has the dtype fp8: kernels see its bytes.
        self.as_bytes = spec.format.cache_dtype == torch.float8_e4m3fn
        self.device_index = None if spec.device.type == "cpu" else spec.device.index
        self.tasks: dict[tuple[int, int], Any] = {}
        self.configs: dict[int, LaunchConfig] = {}

    def config(self, tokens: int) -> LaunchConfig:
        bucket = (tokens - 1).bit_length()
        found = self.configs.get(bucket)
        if found is None:
            found = self.configs[bucket] = default_config(self.spec, 1 << bucket, self.compute_units)
        return found

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Triton launches on the current device: make it the tensors'."""
        if self.device_index is None or self.device_index == torch.cuda.current_device():
            return _NO_GUARD
        return torch.cuda.device(self.device_index)


class StoreLaunch(_Launch):
    """Quantizes rows and scatters them. See :func:`mxkv.store`."""

    spec: StoreSpec

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec, spec.latent_dtype.itemsize)

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
        if not self.num_slots or (cos_sin is not None and not cos_sin.shape[0]):
            return  # no slot, or no position, is in range
        tokens = slots.shape[0]
        row_stride = latent.stride(0) if tokens > 1 else self.dim
        aligned = (not latent.data_ptr() & self.pair_mask and not row_stride & 1, cache.data_ptr() & 3)
        task = self.tasks.get(aligned)
        if task is None:
            task = self.tasks[aligned] = store_task(self.spec, self.paths, *aligned)
        if config is None:
            config = self.config(tokens)
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        max_position, table_stride = (0, 0) if cos_sin is None else (cos_sin.shape[0], cos_sin.stride(0))
        with self.guard():
            store_kernel[(-(-tokens // config.block_tokens),)](
                cache, latent, slots, positions, cos_sin, cache_scale,
                tokens, self.num_slots, max_position, self.block_stride, row_stride, slots.stride(0),
                0 if positions is None else positions.stride(0), table_stride,
                task, config.block_tokens, num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip


class LoadLaunch(_Launch):
    """Gathers rows and dequantizes them. See :func:`mxkv.load`."""

    spec: LoadSpec

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, spec.out_dtype.itemsize)

    def __call__(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        cache_scale: torch.Tensor | None,
        config: LaunchConfig | None = None,
    ) -> None:
        tokens = slots.shape[0]
        row_stride = out.stride(0) if tokens > 1 else self.dim
        aligned = (cache.data_ptr() & 3, not out.data_ptr() & self.pair_mask and not row_stride & 1)
        task = self.tasks.get(aligned)
        if task is None:
            task = self.tasks[aligned] = load_task(self.spec, self.paths, *aligned)
        if config is None:
            config = self.config(tokens)
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        with self.guard():
            load_kernel[(-(-tokens // config.block_tokens),)](
                cache, slots, out, cache_scale,
                tokens, self.num_slots, self.block_stride, slots.stride(0), row_stride,
                task, config.block_tokens, num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def prepare(spec: StoreSpec | LoadSpec) -> StoreLaunch | LoadLaunch:
    """What runs one kind of call."""
    return StoreLaunch(spec) if isinstance(spec, StoreSpec) else LoadLaunch(spec)


def store(spec: StoreSpec, *tensors: torch.Tensor | None, config: LaunchConfig | None = None) -> None:
    """Quantize rows and scatter them, with a launch configuration of the caller's."""
    run: Any = prepare(spec)
    run(*tensors, config=config)


def load(spec: LoadSpec, *tensors: torch.Tensor | None, config: LaunchConfig | None = None) -> None:
    """Gather rows and dequantize them, with a launch configuration of the caller's."""
    run: Any = prepare(spec)
    run(*tensors, config=config)


def store_task(spec: StoreSpec, paths: Paths, rows_aligned: bool, address: int) -> StoreTask:
    """A store kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        rows_aligned: Whether each row starts at a multiple of two elements.
        address: Of the cache, or its last two bits.
    """
    format, dim = spec.format, spec.latent_dim
    regions = regions_of(format, dim, dim - ROPE_DIM if spec.rotate else dim)
    top = numerics.float_bits(format.element.max)
    return StoreTask(
        regions=regions,
        dim=dim,
        dtype=_DTYPES[spec.latent_dtype],
        **_places(spec),
        wide_loads=rows_aligned and dim % 2 == 0,
        alignment=_alignment(spec, address),
        limit=numerics.float_bits(format.finite_limit),
        top_exponent=(top >> numerics.EXPONENT_SHIFT) - 127,
        top_mantissa=top & numerics.MANTISSA_MASK,
        element_max=format.element.max,
        amax_floor=format.amax_floor,
        pad_scales=format.scale_padding,
        sanitize=spec.nonfinite == "sanitize",
        compress_ratio=spec.compress_ratio,
        paths=paths,
    )


def load_task(spec: LoadSpec, paths: Paths, address: int, rows_aligned: bool) -> LoadTask:
    """A load kernel's constants; the arguments are those of :func:`store_task`."""
    dim = spec.latent_dim
    return LoadTask(
        regions=regions_of(spec.format, dim, dim),
        dim=dim,
        dtype=_DTYPES[spec.out_dtype],
        dtype_max=torch.finfo(spec.out_dtype).max,
        **_places(spec),
        alignment=_alignment(spec, address),
        wide_stores=rows_aligned and dim % 2 == 0,
        paths=paths,
    )


def _places(spec: StoreSpec | LoadSpec) -> dict[str, int]:
    """The page layout in bytes, less what is passed at run time."""
    layout, size = spec.layout, spec.format.cache_dtype.itemsize
    return {
        "block_size": layout.block_size,
        "value_stride": layout.value_stride * size,
        "scale_offset": layout.scale_offset * size,
        "scale_stride": layout.scale_stride * size,
    }


def _alignment(spec: StoreSpec | LoadSpec, address: int) -> int:
    """The widest access (1, 2 or 4 bytes) to which every pair of every record is aligned, in a cache at an address."""
    layout, size = spec.layout, spec.format.cache_dtype.itemsize
    regions = regions_of(spec.format, spec.latent_dim, spec.latent_dim)
    widest = 4 if spec.latent_dim % 2 == 0 else size  # the last pair of an odd row has one element only
    places = (layout.value_stride * size, layout.block_stride * size, *(region.value_offset for region in regions))
    return math.gcd(widest, address, *places)
