"""From slots to addresses, inside kernels: 64-bit throughout."""

from __future__ import annotations

from mxkv.backends.numba_cuda.primitives import device, u32
from mxkv.backends.numba_cuda.tasks import Record


def place_finder(record: Record):
    """A function from a cache, a slot in range and the blocks' stride to where its values and its scales stand."""
    block_size, value_stride = record.block_size, record.value_stride
    scale_offset, scale_stride = record.scale_offset, record.scale_stride

    @device
    def place_of(cache, slot, num_slots, block_stride):
        if num_slots <= 0x7FFFFFFF:  # divisions of 32 bits take a quarter of the instructions
            block = u32(slot) // block_size
        else:
            block = slot // block_size
        page = cache + block * block_stride
        place = slot - block * block_size
        return page + place * value_stride, page + scale_offset + place * scale_stride

    return place_of
