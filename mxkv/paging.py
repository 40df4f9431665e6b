"""A cache tensor and its slots: where each record's bytes stand. No launch code."""

from __future__ import annotations

import dataclasses

import torch

from mxkv.formats import Format, Placement


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Where the records of a cache stand, in elements of the cache's dtype (bytes for every packed format).

    Slot ``s`` is position ``p = s % block_size`` of block ``b = s // block_size``. Its values start at
    ``b * block_stride + p * value_stride`` and its scales at ``b * block_stride + scale_offset + p * scale_stride``.
    """

    num_blocks: int
    block_size: int
    block_stride: int
    value_stride: int
    scale_offset: int
    scale_stride: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


def layout_of(cache: torch.Tensor, format: Format, latent_dim: int) -> PageLayout:
    """The page layout of a cache tensor.

    Args:
        cache: ``[num_blocks, block_size, width]`` or, where the scales do not stand at the end of a page,
            ``[num_slots, width]``, or any contiguous tensor that can be viewed so.
        format: The format of its records.
        latent_dim: Values of one record.

    Raises:
        TypeError: The cache's dtype is not the format's.
        ValueError: The width or the strides do not fit.
    """
    width = format.record_width(latent_dim)
    shape, strides = tuple(cache.shape), cache.stride()
    if cache.dtype != format.cache_dtype:
        raise TypeError(f"a {format.name} cache has dtype {format.cache_dtype}, got {cache.dtype}")
    paged = format.placement is Placement.PAGE
    if paged and cache.dim() != 3:
        raise ValueError(
            f"format {format.name!r} keeps its scales at the end of each page: expected a 3-D cache "
            f"[num_blocks, block_size, {width}], got shape {list(shape)}"
        )
    if cache.dim() not in (2, 3) or shape[-1] != width:
        if paged or cache.dim() in (2, 3) or not cache.is_contiguous() or cache.numel() % width:
            raise ValueError(
                f"a {format.name} cache of latent_dim {latent_dim} has shape [num_blocks, block_size, {width}]"
                f"{'' if paged else f' or [num_slots, {width}], or is contiguous and can be viewed so'}; "
                f"got shape {list(shape)}, strides {list(strides)}"
            )
        shape, strides = (cache.numel() // width, width), (width, 1)
    if len(shape) == 2:  # rows: blocks of one slot
        shape, strides = (shape[0], 1, width), (strides[0], width, 1)
    num_blocks, block_size, _ = shape
    block_stride, row_stride, unit = strides
    if block_size == 1:
        row_stride = width
    if num_blocks == 1:
        block_stride = block_size * row_stride
    if width == 1:
        unit = 1
    occupied = num_blocks > 0 and block_size > 0
    if occupied and (unit != 1 or row_stride < width or block_stride < (block_size - 1) * row_stride + width):
        raise ValueError(
            f"the records of a cache must not overlap and must be contiguous (last stride 1, row stride at least "
            f"{width}, blocks one after another); got shape {list(cache.shape)}, strides {list(cache.stride())}"
        )
    if occupied and paged and row_stride != width:
        raise ValueError(
            f"format {format.name!r} keeps its scales at the end of each page, so a page's {block_size} records must "
            f"be contiguous: expected row stride {width}, got {row_stride}"
        )
    values = format.value_bytes(latent_dim) // cache.element_size()
    scales = format.scale_bytes(latent_dim)
    if paged:
        return PageLayout(num_blocks, block_size, block_stride, values, block_size * values, scales)
    return PageLayout(num_blocks, block_size, block_stride, row_stride, values, row_stride)


def value_rows(cache: torch.Tensor, layout: PageLayout, width: int) -> torch.Tensor:
    """The values of every slot as a view ``[num_blocks, block_size, width]`` of the cache."""
    return cache.as_strided(
        (layout.num_blocks, layout.block_size, width),
        (layout.block_stride, layout.value_stride, 1),
        cache.storage_offset(),
    )


def scale_rows(cache: torch.Tensor, layout: PageLayout, width: int) -> torch.Tensor:
    """The scales of every slot as a view ``[num_blocks, block_size, width]`` of the cache."""
    return cache.as_strided(
        (layout.num_blocks, layout.block_size, width),
        (layout.block_stride, layout.scale_stride, 1),
        cache.storage_offset() + layout.scale_offset,
    )


def contiguous_layout(format: Format, latent_dim: int, num_blocks: int, block_size: int) -> PageLayout:
    """The layout that :func:`mxkv.empty_cache` gives."""
    shape = (num_blocks, block_size, format.record_width(latent_dim))
    return layout_of(torch.empty(shape, dtype=format.cache_dtype, device="meta"), format, latent_dim)
