"""From slots to addresses, inside kernels: in 32 bits wherever they suffice, which takes fewer instructions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(index, count):
    """Whether integers are in [0, count)."""
    if index.dtype == tl.int32 and count.dtype == tl.int32:
        return index.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)
    else:
        return index.to(tl.int64).to(tl.uint64, bitcast=True) < count.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def known(index, inside, count):
    """Those of the indices that are inside [0, count), 0 for the others; as wide as the count."""
    return tl.where(inside, index, 0).to(count.dtype)


@triton.jit
def place_of(slot, block_stride, TASK: tl.constexpr):
    """A slot's (not negative) offset to its page in bytes, as int64, and its position in it."""
    if slot.dtype == tl.int32:
        unsigned = slot.to(tl.uint32, bitcast=True)
        block = (unsigned // TASK.block_size).to(tl.int32, bitcast=True)
        return block.to(tl.int64) * block_stride, (unsigned % TASK.block_size).to(tl.int32, bitcast=True)
    else:
        unsigned = slot.to(tl.uint64, bitcast=True)
        block = (unsigned // TASK.block_size).to(tl.int64, bitcast=True)
        return block * block_stride, (unsigned % TASK.block_size).to(tl.int32)
