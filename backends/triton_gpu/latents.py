"""Launches the store and load kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import contextlib
import functools

import torch

from mxkv import devices, numerics
from mxkv.backends.triton_gpu.codec import paths_of
from mxkv.backends.triton_gpu.config import LaunchConfig, default_config, token_bucket
from mxkv.backends.triton_gpu.load import LoadTask, load_kernel
from mxkv.backends.triton_gpu.regions import regions_of
from mxkv.backends.triton_gpu.store import StoreTask, store_kernel
from mxkv.contracts import ROPE_DIM, LoadSpec, StoreSpec

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NO_GUARD = contextlib.nullcontext()


def store(
    spec: StoreSpec,
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    cache_scale: torch.Tensor | None,
    config: LaunchConfig | None = None,
) -> None:
    """Quantize rows and scatter them. See :func:`mxkv.store`."""
    tokens, layout = slots.shape[0], spec.layout
    if not layout.num_slots:
        return
    row_stride = latent.stride(0) if tokens > 1 else spec.latent_dim
    task, compute_units = _store_task(
        spec,
        _aligned(latent.data_ptr(), row_stride, latent.element_size()),
        cache.data_ptr() % 4 == 0,
    )
    if config is None:
        config = default_config(token_bucket(tokens), spec.latent_dim, compute_units)
    block_stride = layout.block_stride * cache.element_size()
    if cache.dtype == torch.float8_e4m3fn:  # not every target has the dtype: kernels see bytes
        cache = cache.view(torch.uint8)
    with _current(cache.device):
        store_kernel[(-(-tokens // config.block_tokens),)](
            cache, latent, slots, positions, cos_sin, cache_scale,
            tokens, layout.num_slots, 0 if cos_sin is None else cos_sin.shape[0],
            block_stride, row_stride, slots.stride(0),
            0 if positions is None else positions.stride(0), 0 if cos_sin is None else cos_sin.stride(0),
            task, config.block_tokens, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def load(
    spec: LoadSpec,
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    cache_scale: torch.Tensor | None,
    config: LaunchConfig | None = None,
) -> None:
    """Gather rows and dequantize them. See :func:`mxkv.load`."""
    tokens, layout = slots.shape[0], spec.layout
    row_stride = out.stride(0) if tokens > 1 else spec.latent_dim
    task, compute_units = _load_task(
        spec,
        cache.data_ptr() % 4 == 0,
        _aligned(out.data_ptr(), row_stride, out.element_size()),
    )
    if config is None:
        config = default_config(token_bucket(tokens), spec.latent_dim, compute_units)
    block_stride = layout.block_stride * cache.element_size()
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    with _current(cache.device):
        load_kernel[(-(-tokens // config.block_tokens),)](
            cache, slots, out, cache_scale,
            tokens, layout.num_slots, block_stride, slots.stride(0), row_stride,
            task, config.block_tokens, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _store_task(spec: StoreSpec, rows_aligned: bool, cache_aligned: bool) -> tuple[StoreTask, int]:
    """What to compile for a call, and the device's compute units."""
    return store_task(spec, paths_of(devices.target_of(spec.device)), rows_aligned, cache_aligned), _units(spec.device)


@functools.lru_cache(maxsize=1024)
def _load_task(spec: LoadSpec, cache_aligned: bool, rows_aligned: bool) -> tuple[LoadTask, int]:
    return load_task(spec, paths_of(devices.target_of(spec.device)), cache_aligned, rows_aligned), _units(spec.device)


def store_task(spec: StoreSpec, paths: object, rows_aligned: bool, cache_aligned: bool) -> StoreTask:
    """A store kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        rows_aligned: Whether each row starts at a multiple of two elements.
        cache_aligned: Whether the cache starts at a multiple of 4 bytes.
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
        wide_stores=cache_aligned and _records_aligned(spec),
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


def load_task(spec: LoadSpec, paths: object, cache_aligned: bool, rows_aligned: bool) -> LoadTask:
    """A load kernel's constants; the arguments are those of :func:`store_task`."""
    dim = spec.latent_dim
    return LoadTask(
        regions=regions_of(spec.format, dim, dim),
        dim=dim,
        dtype=_DTYPES[spec.out_dtype],
        dtype_max=torch.finfo(spec.out_dtype).max,
        **_places(spec),
        wide_loads=cache_aligned and _records_aligned(spec),
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


def _records_aligned(spec: StoreSpec | LoadSpec) -> bool:
    """Whether each record's pairs are aligned, if the cache is."""
    layout, size = spec.layout, spec.format.cache_dtype.itemsize
    regions = regions_of(spec.format, spec.latent_dim, spec.latent_dim)
    pair_bytes = max(region.pair_bytes for region in regions)
    places = (layout.value_stride * size, layout.block_stride * size, *(region.value_offset for region in regions))
    return all(place % pair_bytes == 0 for place in places) and spec.latent_dim % 2 == 0


def _aligned(address: int, row_stride: int, element_size: int) -> bool:
    return address % (2 * element_size) == 0 and row_stride % 2 == 0


def _units(device: torch.device) -> int:
    return devices.describe(device).compute_units


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device: make it the tensors'."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)
