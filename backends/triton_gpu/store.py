"""Quantize rows and scatter them into pages: one kernel for every format.

    grid      one program for TOKENS consecutive rows; where RoPE or a bf16 tail makes several regions of a row, SHARE
              programs take the first region of their rows, then one the other regions of all those rows
    reads     latent rows    [TOKENS, groups, pairs]     2 or 4 bytes a value, once
              slots          [TOKENS]
    writes    values         [TOKENS, groups, pairs]     1, 2 or 4 bytes a pair
              scales         [TOKENS, groups]            1 byte a group

A tile has one line for each group, so that the largest magnitude of a group is found inside a few lanes and nothing
changes its layout between the load and the store. A row is taken in up to three regions, each with its own element
code: the quantized groups that no rotation touches, those that RoPE rotates, and a bf16 tail. The first is most of the
row, and the others cost most: programs of their own do not make it wait. RoPE's pairs are the very pairs that a tile
holds: it needs no shuffle. Where all groups of a row fill a tile and are encoded two bf16 at a time, they are one
region: those that RoPE rotates are rotated in a tile of their own and then put in their places, and no lane idles.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from mxkv.backends.triton_gpu import addressing, codec
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.regions import Region


@dataclasses.dataclass(frozen=True, eq=False)  # one object for each task: Triton hashes it at every launch
class StoreTask:
    """What a store kernel is compiled for.

    Attributes:
        regions: The row's regions (up to three).
        share: Where a row has several regions: how many programs take the first one of their tokens for each that takes
            the others, of the tokens of all of them. 0 where it has one.
        dim: Values of a row.
        dtype: Of the rows: "bf16", "fp16" or "fp32".
        block_size, value_stride, scale_offset, scale_stride: The page layout, in bytes.
        row_alignment: Bytes to which rows are known to be aligned: 16, those of a pair, or those of an element.
        alignment: Bytes (1, 2 or 4) to which every pair of every record is aligned.
        limit: The largest magnitude that counts as finite, as fp32 bits.
        top_exponent, top_mantissa: Of the element's largest value, as fp32 has them (exponent without bias).
        element_max: The element's largest value.
        element_inverse: 1 / element_max as a sum of two fp32.
        amax_floor: A group's largest magnitude is at least this.
        pad_scales: Zero bytes behind a record's scales.
        sanitize: Whether NaN and infinities are replaced.
        compress_ratio: Tokens whose (position + 1) is a multiple of it are stored.
        one_warp: Whether a program has one warp.
        paths: The target's instructions.
    """

    regions: tuple[Region, ...]
    share: int
    dim: int
    dtype: str
    block_size: int
    value_stride: int
    scale_offset: int
    scale_stride: int
    row_alignment: int
    alignment: int
    limit: int
    top_exponent: int
    top_mantissa: int
    element_max: float
    element_inverse: tuple[float, float]
    amax_floor: float
    pad_scales: int
    sanitize: bool
    compress_ratio: int
    one_warp: bool
    paths: Paths

    @property
    def wide_loads(self) -> bool:
        return self.dim % 2 == 0 and self.row_alignment >= {"bf16": 4, "fp16": 4, "fp32": 8}[self.dtype]

    @property
    def propagate(self) -> bool:
        return not self.sanitize

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Which regions a program takes: the first, or (of more tokens) those behind it."""
        return ((0, 1), (1, len(self.regions))) if self.share else ((0, len(self.regions)),)

    @property
    def num_scales(self) -> int:
        return sum(r.groups for r in self.regions if r.scale in ("e8m0", "e4m3"))


@triton.jit
def _both(one, other):
    """Two masks as one; None has everything."""
    if one is None:
        return other
    elif other is None:
        return one
    else:
        return one & other


@triton.jit
def _read(pointers, mask):
    """What is there, or zeros; without a mask, which costs registers and instructions, everything."""
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_words(rows, pair, mask, TASK: tl.constexpr):
    """Pairs of 16-bit elements, the even one in the low half."""
    if TASK.wide_loads:
        return _read(rows.to(tl.pointer_type(tl.int32)) + pair, mask)
    else:
        halves = rows.to(tl.pointer_type(tl.int16))
        low = tl.load(halves + 2 * pair, mask=mask, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(halves + 2 * pair + 1, mask=mask & (2 * pair + 1 < TASK.dim), other=0).to(tl.int32)
        return low | (high << 16)


@triton.jit
def _load_pairs(rows, pair, mask, TASK: tl.constexpr):
    """Pairs of elements as fp32, exactly."""
    if TASK.dtype == "bf16":
        words = _load_words(rows, pair, mask, TASK)
        return codec.float_of(words << 16), codec.float_of(words & -65536)
    elif TASK.dtype == "fp16":
        words = _load_words(rows, pair, mask, TASK)
        low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, high
    elif TASK.wide_loads:
        both = _read(rows.to(tl.pointer_type(tl.int64)) + pair, mask)
        return codec.float_of(both.to(tl.int32)), codec.float_of((both >> 32).to(tl.int32))
    else:
        low = tl.load(rows + 2 * pair, mask=mask, other=0)
        return low, tl.load(rows + 2 * pair + 1, mask=mask & (2 * pair + 1 < TASK.dim), other=0)


@triton.jit
def _rotate(x, y, pair, mask, table, at, REGION: tl.constexpr, TASK: tl.constexpr):
    """RoPE on the pairs from REGION.rotated on; products and sums are rounded one by one."""
    angle = pair - REGION.rotated // 2
    turned = _both(mask, angle >= 0) if REGION.turned == "some" else mask
    cos = _read(table + at + angle, turned).to(tl.float32)
    sin = _read(table + at + angle + 32, turned).to(tl.float32)
    if REGION.turned == "some":
        return tl.where(turned, x * cos - y * sin, x), tl.where(turned, y * cos + x * sin, y)
    else:
        return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _sanitize(x, largest):
    """NaN to 0, magnitudes above the largest to it."""
    return tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -largest), largest))


@triton.jit
def _group_scale(amax_bits, REGION: tl.constexpr, TASK: tl.constexpr):
    """From the bits of a group's largest magnitude (fp32): its scale byte; is the group lost?"""
    PATHS: tl.constexpr = TASK.paths
    if TASK.sanitize:
        lost = amax_bits < 0
    else:
        lost = amax_bits > TASK.limit  # as integers, NaN and infinity are the largest
    amax_bits = tl.where(lost, 0, amax_bits)
    if TASK.amax_floor > 0:
        floor = tl.full(amax_bits.shape, TASK.amax_floor, tl.float32)
        amax_bits = tl.maximum(amax_bits, codec.bits_of(floor))
    if REGION.scale == "e8m0":
        byte = codec.e8m0_scale(amax_bits, TASK)
    else:
        byte = codec.e4m3_scale(codec.float_of(amax_bits), TASK, PATHS)
    return byte, lost


@triton.jit
def _lost_byte(byte, lost, REGION: tl.constexpr):
    return tl.where(lost, 255 if REGION.scale == "e8m0" else 0x7F, byte)


@triton.constexpr_function
def _is_packed(region, task):
    """Whether a region's groups are encoded two bf16 at a time, without taking them to fp32.

    Their assembly takes up to four words with the scale of the first: each thread must hold whole runs of four words,
    which it does where it loads 16 bytes at a time. RoPE gives fp32: for E4M3 elements in a region of their own, making
    bf16 of them costs more than it saves.
    """
    runs = task.row_alignment == 16 and region.pairs % 4 == 0 and region.first % 8 == 0
    plain = task.dtype == "bf16" and task.propagate and task.paths.pairs != "none" and region.turned != "some"
    eights = region.scale == "e8m0" and task.paths.e4m3 == "cvt" and region.turned != "all"
    return runs and plain and (region.element == "e2m1" or eights)


@triton.jit
def _turned_words(rows, pair, mask, table, at, REGION: tl.constexpr, TASK: tl.constexpr):
    """Pairs that RoPE rotates, as words whose groups are encoded as the fp32 would be: see :func:`codec.odd_pair`."""
    PATHS: tl.constexpr = TASK.paths
    x, y = _load_pairs(rows, pair, mask, TASK)
    x, y = _rotate(x, y, pair, mask, table, at, REGION, TASK)
    return codec.odd_pair(x, y, PATHS)


@triton.jit
def _merged_words(rows, pair, read, table, at, REGION: tl.constexpr, TASK: tl.constexpr):
    """As :func:`_turned_words` for a region whose last groups RoPE rotates; ``read``: which rows are read.

    A small tile has those groups alone, so that every lane takes part in rotating them; shuffles bring them over what
    would be in their place.
    """
    first = REGION.rotated // 2
    rest = _both(read, pair < first)
    words = tl.load(rows.to(tl.pointer_type(tl.int32)) + pair, mask=rest)  # elsewhere anything: it is not used
    # Without a barrier the compiler has these loads wait for the positions, as those of the table must.
    tl.debug_barrier()
    GROUPS: tl.constexpr = (REGION.end - REGION.rotated) // REGION.group
    turned = tl.arange(0, GROUPS)[None, :, None] * REGION.pairs + tl.arange(0, REGION.pairs)[None, None, :]
    turned = _turned_words(rows, first + turned, read, table, at, REGION, TASK)  # [TOKENS, GROUPS, pairs]
    REPEATED: tl.constexpr = (turned.shape[0], REGION.groups // GROUPS, GROUPS, REGION.pairs)
    turned = tl.reshape(tl.broadcast_to(turned[:, None, :, :], REPEATED), words.shape)
    return tl.where(pair < first, words, turned)


@triton.jit
def _encode_packed(words, REGION: tl.constexpr, TASK: tl.constexpr):
    """The values of a region's groups, two at a time, and their scale bytes."""
    PATHS: tl.constexpr = TASK.paths
    byte, lost = _group_scale(codec.largest_half(words, PATHS), REGION, TASK)
    if REGION.element == "e2m1":
        values = codec.encode_e2m1_words(words, byte, lost, tl.constexpr(REGION.scale), PATHS)
    else:
        values = codec.encode_e4m3_words(words, byte, lost, PATHS)
    return values, _lost_byte(byte, lost, REGION)


@triton.jit
def _encode_group(rows, pair, mask, read, table, at, REGION: tl.constexpr, TASK: tl.constexpr):
    """The values of a region's groups, a pair in an integer, and their scale bytes."""
    if REGION.turned == "groups":
        words = _merged_words(rows, pair, read, table, at, REGION, TASK)
        if _is_packed(REGION, TASK):
            return _encode_packed(words, REGION, TASK)
        else:  # in the interpreter
            return _encode_floats(codec.float_of(words << 16), codec.float_of(words & -65536), REGION, TASK)
    elif _is_packed(REGION, TASK):
        if REGION.turned == "all":
            words = _turned_words(rows, pair, mask, table, at, REGION, TASK)
        else:
            words = _load_words(rows, pair, mask, TASK)
        return _encode_packed(words, REGION, TASK)
    else:
        x, y = _load_pairs(rows, pair, mask, TASK)
        return encode_group_pairs(x, y, pair, mask, table, at, REGION, TASK)


@triton.jit
def encode_group_pairs(x, y, pair, mask, table, at, REGION: tl.constexpr, TASK: tl.constexpr):
    """From the even and odd elements of a region's groups (fp32): their values, a pair in an int32, and scale bytes.

    Args:
        x, y: [.., groups, pairs].
        pair: Which pair of the row each is.
        mask: Which exist.
        table: Cosines and sines, or None.
        at: Where in the table the tokens' begin.
    """
    if REGION.rotated < REGION.end:
        x, y = _rotate(x, y, pair, mask, table, at, REGION, TASK)
    return _encode_floats(x, y, REGION, TASK)


@triton.jit
def _encode_floats(x, y, REGION: tl.constexpr, TASK: tl.constexpr):
    """As :func:`encode_group_pairs`, after RoPE."""
    PATHS: tl.constexpr = TASK.paths
    if TASK.sanitize:
        largest = codec.float_of(tl.full([1, 1, 1], TASK.limit, tl.int32))
        x, y = _sanitize(x, largest), _sanitize(y, largest)
    byte, lost = _group_scale(codec.largest_magnitude(x, y), REGION, TASK)
    if REGION.scale == "e8m0":
        reciprocal = codec.float_of((254 - byte) << 23)[:, :, None]
        scaled_x, scaled_y = x * reciprocal, y * reciprocal
    else:
        scale = codec.decode_e4m3_scale(byte, PATHS)[:, :, None]
        if REGION.element == "e2m1":
            scaled_x, scaled_y = codec.quotients_for_e2m1(x, y, scale, PATHS)
        else:
            scale = tl.broadcast_to(scale, x.shape)
            scaled_x, scaled_y = tl.math.div_rn(x, scale), tl.math.div_rn(y, scale)
    if REGION.element == "e2m1":
        values = codec.encode_e2m1_pair(scaled_x, scaled_y, x, y, REGION.scale != "e8m0")
    else:
        values = codec.encode_e4m3_pair(scaled_x, scaled_y, PATHS)
    # A lost group's codes are zeros, whatever came out of what is not finite.
    return values & codec.spread(tl.where(lost, 0, -1), values), _lost_byte(byte, lost, REGION)


@triton.jit
def _encode_plain(rows, pair, mask, table, at, reciprocal, REGION: tl.constexpr, TASK: tl.constexpr):
    """Values without group scales: bf16, or E4M3 of bf16(x) / (the cache's scale)."""
    if TASK.dtype == "bf16" and REGION.rotated >= REGION.end and (TASK.propagate or REGION.element == "e4m3"):
        return _plain_values(_load_words(rows, pair, mask, TASK), reciprocal, REGION, TASK)
    else:
        x, y = _load_pairs(rows, pair, mask, TASK)
        return encode_plain_pairs(x, y, pair, mask, table, at, reciprocal, REGION, TASK)


@triton.jit
def encode_plain_pairs(x, y, pair, mask, table, at, reciprocal, REGION: tl.constexpr, TASK: tl.constexpr):
    """As :func:`encode_group_pairs`, without group scales. ``reciprocal``: that of the cache's scale."""
    PATHS: tl.constexpr = TASK.paths
    if REGION.rotated < REGION.end:
        x, y = _rotate(x, y, pair, mask, table, at, REGION, TASK)
    if TASK.sanitize and REGION.element == "bf16":
        largest = codec.float_of(tl.full([1, 1, 1], codec.BF16_MAX_BITS << 16, tl.int32))
        x, y = _sanitize(x, largest), _sanitize(y, largest)
    return _plain_values(codec.bf16_pair(x, y, PATHS), reciprocal, REGION, TASK)


@triton.jit
def _plain_values(words, reciprocal, REGION: tl.constexpr, TASK: tl.constexpr):
    """From two bf16 in a word."""
    PATHS: tl.constexpr = TASK.paths
    if REGION.element == "bf16":
        return codec.canonical_bf16(words)
    x, y = codec.float_of(words << 16), codec.float_of(words & -65536)
    finite_x, finite_y = tl.abs(x) < float("inf"), tl.abs(y) < float("inf")
    codes = codec.encode_e4m3_pair(
        tl.where(finite_x, x * reciprocal, 0.0), tl.where(finite_y, y * reciprocal, 0.0), PATHS
    )
    low = tl.where(finite_x, codes & 0xFF, _not_finite(x, TASK))
    return low | (tl.where(finite_y, (codes >> 8) & 0xFF, _not_finite(y, TASK)) << 8)


@triton.jit
def _not_finite(x, TASK: tl.constexpr):
    """The E4M3 byte of NaN or an infinity."""
    if TASK.sanitize:
        return tl.where(x != x, 0, 0x7E | codec.sign_of(x, 7))
    else:
        return tl.full(x.shape, 0x7F, tl.int32)


@triton.jit
def store_values(record, pair, values, mask, REGION: tl.constexpr, TASK: tl.constexpr):
    """A region's values, in the widest pieces that the records' alignment allows."""
    BITS: tl.constexpr = 8 * REGION.pair_bytes
    if REGION.pair_bytes <= TASK.alignment:
        pointer = record.to(tl.pointer_type(tl.core.get_int_dtype(BITS, False)))
        tl.store(pointer + pair, values.to(tl.core.get_int_dtype(BITS, False)), mask=mask)
    elif TASK.alignment == 2:
        halves = record.to(tl.pointer_type(tl.uint16))
        second = mask & (2 * pair + 1 < REGION.size)
        tl.store(halves + 2 * pair, values.to(tl.uint16), mask=mask)
        tl.store(halves + 2 * pair + 1, (values >> 16).to(tl.uint16), mask=second)
    else:
        second = mask & (2 * pair + 1 < REGION.size)
        for byte in tl.static_range(tl.constexpr(REGION.pair_bytes)):
            part = (values >> (8 * byte)).to(tl.uint8)
            tl.store(
                record + REGION.pair_bytes * pair + byte, part, mask=mask if 2 * byte < REGION.pair_bytes else second
            )


@triton.jit
def _store_region(
    latent, cos_sin, token, read, stored, at, latent_stride, values_at, scales_at, reciprocal,
    INDEX: tl.constexpr, TASK: tl.constexpr,
):  # fmt: skip
    REGION: tl.constexpr = TASK.regions[INDEX]
    group = tl.arange(0, REGION.groups_padded)
    inner = tl.arange(0, REGION.pairs_padded)
    here = stored[:, None] & (group < REGION.groups)[None, :]  # [TOKENS, groups]
    inside = (group < REGION.groups)[None, :, None] & (inner < REGION.pairs)[None, None, :]
    pair = group[None, :, None] * REGION.pairs + inner[None, None, :]
    rows = (latent + token * latent_stride)[:, None, None]
    record = (values_at + REGION.value_offset)[:, None, None]
    read = None if read is None else read[:, None, None]
    if REGION.scale == "e8m0" or REGION.scale == "e4m3":
        mask = read if REGION.fills_tile and TASK.wide_loads else _both(read, inside)
        values, byte = _encode_group(
            rows, pair + REGION.first // 2, mask, read, cos_sin, at[:, None, None], REGION, TASK
        )
        scales = scales_at[:, None] + REGION.first_scale + group[None, :]
        if INDEX > 0 and TASK.one_warp:
            # Few: stored byte by byte they need no exchange between threads, which was faster on an H200.
            scales = tl.max_contiguous(scales, [1, 1])
        tl.store(scales, byte.to(tl.uint8), mask=here)
    else:
        inside = inside & (pair < REGION.all_pairs)
        mask = _both(read, inside)
        values = _encode_plain(
            rows, pair + REGION.first // 2, mask, cos_sin, at[:, None, None], reciprocal, REGION, TASK
        )
    store_values(record, pair, values, stored[:, None, None] & inside, REGION, TASK)


@triton.jit
def _store_part(
    first, cache, latent, slots, positions, cos_sin, reciprocal,
    tokens, num_slots, max_position, block_stride, latent_stride, slot_stride, position_stride, table_stride,
    TASK: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some of the regions of TOKENS rows, from row ``first`` on."""
    # In place of rows behind the last one it is read again, and not stored: masks would cost every program more.
    last = tl.minimum(tokens - 1 - first, TOKENS - 1).to(tl.int32)
    token = tl.minimum(tl.arange(0, TOKENS), last).to(tl.int64)
    latent += first * latent_stride
    slot = tl.load(slots + first * slot_stride + token * slot_stride)
    stored = addressing.within(slot, num_slots) & (tl.arange(0, TOKENS) <= last)
    at = token * 0
    # Rows are read before their slots are known: the two loads' latencies overlap, and padding is rare.
    read = None
    if positions is not None:
        position = tl.load(positions + first * position_stride + token * position_stride)
        if TASK.compress_ratio > 1:
            stored = stored & (position % TASK.compress_ratio == TASK.compress_ratio - 1)  # of a negative one: never
            read = stored  # half of the rows are not stored: reading them would cost more
        if cos_sin is not None:
            stored = stored & addressing.within(position, max_position)
            position = addressing.clamped(position, max_position)
            at = (position - position % TASK.compress_ratio).to(tl.int64) * table_stride
        else:
            stored = stored & (position >= 0)
    slot = addressing.clamped(slot, num_slots)
    page, place = addressing.place_of(slot, block_stride, TASK)
    page = cache.to(tl.pointer_type(tl.uint8)) + page
    values_at = page + place * TASK.value_stride  # [TOKENS]
    scales_at = page + TASK.scale_offset + place * TASK.scale_stride
    for index in tl.static_range(tl.constexpr(TASK.parts[PART][0]), tl.constexpr(TASK.parts[PART][1])):
        _store_region(
            latent, cos_sin, token, read, stored, at, latent_stride, values_at, scales_at, reciprocal, index, TASK
        )
    if PART == 0:
        for extra in tl.static_range(tl.constexpr(TASK.pad_scales)):
            tl.store(scales_at + TASK.num_scales + extra, tl.zeros([TOKENS], tl.uint8), mask=stored)


@triton.jit(do_not_specialize=["tokens", "num_slots", "max_position"])
def store_kernel(
    cache, latent, slots, positions, cos_sin, cache_scale,
    tokens, num_slots, max_position, block_stride, latent_stride, slot_stride, position_stride, table_stride,
    TASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if cache_scale is not None:
        one = tl.full([1], 1.0, tl.float32)
        reciprocal = tl.math.div_rn(one, tl.load(cache_scale + tl.arange(0, 1)))[:, None, None]
    else:
        reciprocal = tl.full([1, 1, 1], 1.0, tl.float32)
    if TASK.share == 0:
        _store_part(
            program * TOKENS, cache, latent, slots, positions, cos_sin, reciprocal, tokens, num_slots, max_position,
            block_stride, latent_stride, slot_stride, position_stride, table_stride, TASK, 0, TOKENS,
        )  # fmt: skip
    else:
        round = program // (TASK.share + 1)
        turn = program % (TASK.share + 1)
        if turn < TASK.share:
            _store_part(
                (round * TASK.share + turn) * TOKENS, cache, latent, slots, positions, cos_sin, reciprocal,
                tokens, num_slots, max_position,
                block_stride, latent_stride, slot_stride, position_stride, table_stride, TASK, 0, TOKENS,
            )  # fmt: skip
        else:
            _store_part(
                round * TASK.share * TOKENS, cache, latent, slots, positions, cos_sin, reciprocal,
                tokens, num_slots, max_position,
                block_stride, latent_stride, slot_stride, position_stride, table_stride,
                TASK, 1, TASK.share * TOKENS,
            )  # fmt: skip
