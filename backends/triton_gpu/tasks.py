"""From a call's spec to the constants that its kernel is compiled for."""

from __future__ import annotations

import math

import torch

from mxkv import numerics
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.load import LoadTask
from mxkv.backends.triton_gpu.regions import Region, regions_of
from mxkv.backends.triton_gpu.store import StoreTask
from mxkv.contracts import ROPE_DIM, LoadSpec, StoreSpec
from mxkv.formats import Element, Scale

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LEAST_FLOOR = 2.0**-110  # of groups whose ties bf16 holds as even numbers: see codec.odd_pair


def store_task(
    spec: StoreSpec, paths: Paths, row_alignment: int, address: int, one_warp: bool, merge: bool = True
) -> StoreTask:
    """A store kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        row_alignment: Bytes to which the rows are known to be aligned: 16, a pair's or an element's.
        address: Of the cache, or its last two bits.
        one_warp: Whether a program has one warp.
        merge: Whether the groups that RoPE rotates may be in one region with the others.
    """
    format, dim = spec.format, spec.latent_dim
    merge = merge and row_alignment == 16 and _fit_one_tile(spec, paths)
    regions = regions_of(format, dim, dim - ROPE_DIM if spec.rotate else dim, merge)
    top = numerics.float_bits(format.element.max)
    return StoreTask(
        regions=regions,
        share=_share(regions, spec.latent_dtype.itemsize),
        dim=dim,
        dtype=_DTYPES[spec.latent_dtype],
        **_places(spec),
        row_alignment=row_alignment,
        alignment=_alignment(spec, address),
        limit=numerics.float_bits(format.finite_limit),
        top_exponent=(top >> numerics.EXPONENT_SHIFT) - 127,
        top_mantissa=top & numerics.MANTISSA_MASK,
        element_max=format.element.max,
        element_inverse=_two_parts(1 / format.element.max),
        amax_floor=format.amax_floor,
        pad_scales=format.scale_padding,
        sanitize=spec.nonfinite == "sanitize",
        compress_ratio=spec.compress_ratio,
        one_warp=one_warp,
        paths=paths,
    )


def _fit_one_tile(spec: StoreSpec, paths: Paths) -> bool:
    """Whether all groups are encoded in one tile, two bf16 at a time, those that RoPE rotates in lanes that would idle.

    That is where they fill a tile together. The interpreter does likewise, to test it.
    """
    format, groups = spec.format, spec.latent_dim // spec.format.group if spec.format.grouped else 0
    if not (spec.rotate and format.grouped) or format.tail or groups & (groups - 1):
        return False
    eights = format.scale is Scale.E8M0 and (paths.e4m3 == "cvt" or paths.interpreted)
    eights = eights and format.amax_floor >= _LEAST_FLOOR
    packed = (paths.pairs != "none" or paths.interpreted) and (format.element is Element.E2M1 or eights)
    whole = ROPE_DIM % format.group == 0 and format.group % 8 == 0
    return packed and whole and spec.latent_dtype == torch.bfloat16 and spec.nonfinite == "propagate"


def programs(tokens: int, block_tokens: int, share: int) -> int:
    """How many programs a store takes."""
    if not share:
        return -(-tokens // block_tokens)
    return -(-tokens // (block_tokens * share)) * (share + 1)


def _share(regions: tuple[Region, ...], element_size: int) -> int:
    """How many programs take the first region for each that takes the others; 0 where there is one region.

    As many as fit the others' tile into the first one's, but not so many that such a program has too few registers;
    the limit is what was fastest on an H200.
    """
    if len(regions) < 2:
        return 0
    first, *others = (region.groups_padded * region.pairs_padded for region in regions)
    fitting = max(1, min(first // sum(others), 8 // (regions[0].pair_bytes * element_size)))
    return 1 << (fitting.bit_length() - 1)  # a tile has a power of two of tokens


def _two_parts(x: float) -> tuple[float, float]:
    """A number as a sum of two that are (the second nearly) fp32."""
    high = torch.tensor(x, dtype=torch.float32).item()
    return high, x - high


def load_task(spec: LoadSpec, paths: Paths, address: int, rows_aligned: bool) -> LoadTask:
    """A load kernel's constants; see :func:`store_task`. ``rows_aligned``: whether each row starts at a pair."""
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
