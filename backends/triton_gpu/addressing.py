"""From slots to addresses, inside kernels: in 32 bits wherever they suffice, which takes fewer instructions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(index, count):
    """Whether integers are in [0, count)."""
    if index.dtype == tl.int32 and count.dtype == tl.int32:
        return index.to(tl.uint32) < count.to(tl.uint32)
    else:
        return index.to(tl.int64).to(tl.uint64) < count.to(tl.int64).to(tl.uint64)


@triton.jit
def clamped(index, count):
    """Indices, as wide as the count; for one outside of [0, count) some index inside.

    (A select by :func:`within` would do, but Triton 3.6 fails to compile it in some configurations of several warps.)
    """
    WIDTH = tl.core.get_int_dtype(count.dtype.primitive_bitwidth, False)
    return tl.minimum(index.to(count.dtype).to(WIDTH), count.to(WIDTH) - 1).to(count.dtype)


@triton.constexpr_function
def _is_large(task):
    """Whether a page's bytes need more than 31 bits to be counted."""
    return task.block_size * max(task.value_stride, task.scale_stride) >= 2**31


@triton.jit
def place_of(slot, block_stride, TASK: tl.constexpr):
    """A slot's (not negative) offset to its page in bytes, as int64, and its position in it.

    The position is as wide as its product with the strides between records must be.
    """
    if slot.dtype == tl.int32:
        unsigned = slot.to(tl.uint32)
        page = (unsigned // TASK.block_size).to(tl.int32).to(tl.int64) * block_stride
    else:
        unsigned = slot.to(tl.uint64)
        page = (unsigned // TASK.block_size).to(tl.int64) * block_stride
    place = (unsigned % TASK.block_size).to(tl.int32)
    if _is_large(TASK):
        return page, place.to(tl.int64)
    else:
        return page, place
