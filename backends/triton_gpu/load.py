"""Gather rows from pages and dequantize them: one kernel for every format.

    grid      one program for TOKENS slots
    reads     values         [TOKENS, groups, pairs]     1, 2 or 4 bytes a pair, once
              scales         [TOKENS, groups]            1 byte a group
    writes    rows           [TOKENS, groups, pairs]     2 or 4 bytes a value

The tile is the store kernel's. A row whose slot is negative or past the end reads nothing: its values and scales are
zero bytes, which decode to zeros.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from mxkv.backends.triton_gpu import addressing, codec
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.regions import Region


@dataclasses.dataclass(frozen=True, eq=False)  # one object for each task: Triton hashes it at every launch
class LoadTask:
    """What a load kernel is compiled for.

    Attributes:
        regions: The row's regions.
        dim: Values of a row.
        dtype: Of the rows that come out: "bf16", "fp16" or "fp32".
        dtype_max: The largest finite value of that dtype.
        block_size, value_stride, scale_offset, scale_stride: The page layout, in bytes.
        alignment: Bytes (1, 2 or 4) to which every pair of every record is aligned.
        wide_stores: Whether the rows that come out are aligned to a pair.
        paths: The target's instructions.
    """

    regions: tuple[Region, ...]
    dim: int
    dtype: str
    dtype_max: float
    block_size: int
    value_stride: int
    scale_offset: int
    scale_stride: int
    alignment: int
    wide_stores: bool
    paths: Paths


@triton.jit
def _load_values(record, pair, mask, REGION: tl.constexpr, TASK: tl.constexpr):
    """A region's values, a pair in an int32."""
    BITS: tl.constexpr = 8 * REGION.pair_bytes
    second = mask & (2 * pair + 1 < REGION.size)
    if REGION.pair_bytes <= TASK.alignment:
        pointer = record.to(tl.pointer_type(tl.core.get_int_dtype(BITS, False)))
        return tl.load(pointer + pair, mask=mask, other=0).to(tl.int32, bitcast=BITS == 32)
    elif TASK.alignment == 2:
        halves = record.to(tl.pointer_type(tl.uint16))
        low = tl.load(halves + 2 * pair, mask=mask, other=0).to(tl.int32)
        return low | (tl.load(halves + 2 * pair + 1, mask=second, other=0).to(tl.int32) << 16)
    else:
        values = tl.zeros(pair.shape, tl.int32)
        for byte in tl.static_range(tl.constexpr(REGION.pair_bytes)):
            known = mask if 2 * byte < REGION.pair_bytes else second
            part = tl.load(record + REGION.pair_bytes * pair + byte, mask=known, other=0).to(tl.int32)
            values = values | (part << (8 * byte))
        return values


@triton.jit
def _store_words(row, pair, words, mask, TASK: tl.constexpr):
    """Pairs of 16-bit values."""
    if TASK.wide_stores:
        tl.store(row.to(tl.pointer_type(tl.int32)) + pair, words, mask=mask)
    else:
        halves = row.to(tl.pointer_type(tl.uint16))
        tl.store(halves + 2 * pair, words.to(tl.uint16), mask=mask)
        tl.store(halves + 2 * pair + 1, (words >> 16).to(tl.uint16), mask=mask & (2 * pair + 1 < TASK.dim))


@triton.jit
def _store_pairs(row, pair, x, y, mask, KEEP_INFINITE: tl.constexpr, TASK: tl.constexpr):
    """Pairs of fp32, rounded to the rows' dtype."""
    PATHS: tl.constexpr = TASK.paths
    if TASK.dtype == "bf16" and PATHS.pairs != "none":  # never of a bf16 element: that is copied
        words = codec.saturate_words(codec.bf16_pair(x, y, PATHS), PATHS)
        _store_words(row, pair, words, mask, TASK)
        return
    x = codec.saturate(x, TASK, KEEP_INFINITE)
    y = codec.saturate(y, TASK, KEEP_INFINITE)
    if TASK.dtype == "bf16":
        _store_words(row, pair, codec.bf16_pair(x, y, PATHS), mask, TASK)
    elif TASK.dtype == "fp16":
        _store_words(row, pair, codec.fp16_pair(x, y), mask, TASK)
    elif TASK.wide_stores:
        low = codec.bits_of(x).to(tl.int64) & 0xFFFFFFFF
        both = low | (codec.bits_of(y).to(tl.int64) << 32)
        tl.store(row.to(tl.pointer_type(tl.int64)) + pair, both, mask=mask)
    else:
        tl.store(row + 2 * pair, x, mask=mask)
        tl.store(row + 2 * pair + 1, y, mask=mask & (2 * pair + 1 < TASK.dim))


@triton.jit
def _load_region(
    out, cache_scale, token, written, valid, out_stride, values_at, scales_at, INDEX: tl.constexpr, TASK: tl.constexpr
):
    REGION: tl.constexpr = TASK.regions[INDEX]
    PATHS: tl.constexpr = TASK.paths
    group = tl.arange(0, REGION.groups_padded)
    inner = tl.arange(0, REGION.pairs_padded)
    inside = (group < REGION.groups)[None, :, None] & (inner < REGION.pairs)[None, None, :]
    pair = group[None, :, None] * REGION.pairs + inner[None, None, :]
    inside = inside & (pair < REGION.all_pairs)
    row = (out + token * out_stride)[:, None, None]
    at = pair + REGION.first // 2
    record = (values_at + REGION.value_offset)[:, None, None]
    values = _load_values(record, pair, valid[:, None, None] & inside, REGION, TASK)
    mask = written[:, None, None] & inside
    if REGION.scale == "e8m0" or REGION.scale == "e4m3":
        known = valid[:, None] & (group < REGION.groups)[None, :]
        byte = tl.load(scales_at[:, None] + REGION.first_scale + group[None, :], mask=known, other=0).to(tl.int32)
        if REGION.element == "e2m1" and TASK.dtype == "bf16" and TASK.paths.pairs != "none":
            scale = tl.broadcast_to(codec.scale_word(byte, REGION)[:, :, None], values.shape)
            words = codec.decode_e2m1_words(values, scale, PATHS, REGION.scale == "e8m0")
            _store_words(row, at, words, mask, TASK)
        else:
            if REGION.scale == "e8m0":
                factor = codec.decode_e8m0(byte)
            else:
                factor = codec.decode_e4m3(byte)
            if REGION.element == "e2m1":
                x, y = codec.decode_e2m1_pair(values, PATHS)
            else:
                x, y = codec.decode_e4m3_pair(values, PATHS)
            _store_pairs(row, at, x * factor[:, :, None], y * factor[:, :, None], mask, False, TASK)
    elif REGION.element == "bf16":
        if TASK.dtype == "bf16":
            _store_words(row, at, values, mask, TASK)
        else:
            x, y = codec.float_of(values << 16), codec.float_of(values & -65536)
            _store_pairs(row, at, x, y, mask, True, TASK)
    else:
        x, y = codec.decode_e4m3_pair(values, PATHS)
        if cache_scale is not None:
            factor = tl.load(cache_scale)
            x, y = x * factor, y * factor
        _store_pairs(row, at, x, y, mask, False, TASK)


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def load_kernel(
    cache, slots, out, cache_scale,
    tokens, num_slots, block_stride, slot_stride, out_stride,
    TASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    written = token < tokens
    slot = tl.load(slots + token * slot_stride, mask=written, other=-1)
    valid = addressing.within(slot, num_slots)
    page, place = addressing.place_of(addressing.clamped(slot, num_slots), block_stride, TASK)
    page = cache.to(tl.pointer_type(tl.uint8)) + page
    values_at = page + place * TASK.value_stride  # [TOKENS]
    scales_at = page + TASK.scale_offset + place * TASK.scale_stride
    for index in tl.static_range(tl.constexpr(len(TASK.regions))):
        _load_region(out, cache_scale, token, written, valid, out_stride, values_at, scales_at, index, TASK)
