"""Store and load of keys and values: one kernel each, for every format.

    grid      one program for ROWS rows (a row is one head of one token), of keys and values, several times; or, where
              a thread has much of a row, once, of either
    reads     keys, values   [ROWS, dim]                 once, in 16 bytes for a thread
    writes    codes          [ROWS, key bytes]
              fp16 numbers   [ROWS, fields]

A thread has a whole row in registers, or a part of one: the norm, the butterfly, the codes and their packing need few
others. Of 16-bit keys a matrix product takes the butterfly's first stages, and those between threads. An explicit
rotation is a matrix product, row tile by row tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxkv.backends.triton_gpu import codec, kv_codec

_ROTATED_STEP = tl.constexpr(32)  # columns of a matrix product at a time


@triton.jit
def _as_fp32(x, TASK: tl.constexpr):
    """Elements as fp32; what is not finite made so if asked for."""
    x = x.to(tl.float32)
    if TASK.sanitize:
        x = tl.where(x != x, 0.0, x)
        x = tl.where(x == float("inf"), kv_codec.FP16_MAX, x)
        x = tl.where(x == float("-inf"), -kv_codec.FP16_MAX, x)
    return x


@triton.jit
def _is_lost(x):
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def _load_rows(rows, token, head, exists, TASK: tl.constexpr):
    """Rows as tiles."""
    raw = ()
    for i in tl.static_range(tl.constexpr(TASK.tiles)):
        pointer = kv_codec.elements_at(rows, token, head, i, TASK)
        tile = tl.load(pointer, mask=kv_codec.spread_mask(exists, TASK), other=0.0)
        raw = raw + (kv_codec.in_order(tile, TASK),)
    return raw


@triton.jit
def _any_lost(raw, TASK: tl.constexpr):
    """Whether rows hold what is not finite [ROWS]."""
    found = _is_lost(raw[0].to(tl.float32)).to(tl.int32)
    for i in tl.static_range(1, tl.constexpr(TASK.tiles)):
        found = found | _is_lost(raw[i].to(tl.float32)).to(tl.int32)
    return tl.max(tl.max(found, 2), 1) != 0


@triton.jit
def _store_fp8_keys(raw, head, exists, page, place, TASK: tl.constexpr):
    PATHS: tl.constexpr = TASK.paths
    runs = ()
    for i in tl.static_range(tl.constexpr(TASK.octets)):
        columns = kv_codec.octet_of(raw, i, TASK.width)
        for quad in tl.static_range(2):
            word = tl.zeros(columns[0].shape, tl.int32)
            for pair in tl.static_range(2):
                x = _as_fp32(columns[4 * quad + 2 * pair], TASK)
                y = _as_fp32(columns[4 * quad + 2 * pair + 1], TASK)
                if PATHS.e4m3 == "cvt":
                    # NaN where it is not finite, else itself: the conversion saturates infinities.
                    x, y = tl.fma(x, 0.0, x), tl.fma(y, 0.0, y)
                    both = codec.encode_e4m3_pair(x, y, PATHS) & 0xFFFF
                else:
                    first = tl.where(_is_lost(x), 0x7F, codec.encode_e4m3(tl.where(_is_lost(x), 0.0, x)))
                    second = tl.where(_is_lost(y), 0x7F, codec.encode_e4m3(tl.where(_is_lost(y), 0.0, y)))
                    both = first | (second << 8)
                word = word | (both << (16 * pair))
            runs = runs + (word,)
    kv_codec.store_codes(kv_codec.codes_at(page, place, head, False, TASK), runs, exists, 8, TASK)


@triton.jit
def _squares_of_rows(raw, TASK: tl.constexpr):
    """The sums of rows' squares [ROWS]."""
    x = _as_fp32(raw[0], TASK)
    squares = x * x
    for i in tl.static_range(1, tl.constexpr(TASK.tiles)):
        x = _as_fp32(raw[i], TASK)
        squares = tl.fma(x, x, squares)
    return tl.sum(tl.sum(squares, 2), 1)


@triton.jit
def _turned_by_products(raw, signs, TASK: tl.constexpr):
    """Rows through the butterfly, as columns, octet after octet; and the sums of rows' squares [ROWS].

    The squares of what is turned are those of the key, times a power of two.
    """
    octets = ()
    squares = tl.zeros([raw[0].shape[0], raw[0].shape[1]], tl.float32)
    for block in tl.static_range(tl.constexpr(TASK.blocks)):
        tiles = ()
        for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
            tiles = tiles + (raw[block * TASK.block_tiles + i],)
        columns = kv_codec.turned_by_products(tiles, signs, TASK)
        for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
            octet = ()
            for j in tl.static_range(8):
                octet = octet + (columns[8 * i + j],)
                squares = tl.fma(octet[j], octet[j], squares)
            octets = octets + (octet,)
    SCALE: tl.constexpr = kv_codec.products_scale(TASK)
    return octets, tl.sum(squares, 1) * (1 / (TASK.block * SCALE * SCALE))


@triton.jit
def _turned(raw, divisor, TASK: tl.constexpr):
    """Rows, divided, through the butterfly, as columns, octet after octet."""
    PATHS: tl.constexpr = TASK.paths
    octets = ()
    for block in tl.static_range(tl.constexpr(TASK.blocks)):
        tiles = ()
        for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
            x = _as_fp32(raw[block * TASK.block_tiles + i], TASK)
            tiles = tiles + (kv_codec.divide(x, divisor[:, None, None], PATHS),)
        tiles = kv_codec.butterfly(tiles, TASK)
        for i in tl.static_range(tl.constexpr(TASK.octets // TASK.blocks)):
            octets = octets + (kv_codec.octet_of(tiles, i, TASK.width),)
    return octets


@triton.jit
def _store_keys(raw, key, token, head, valid, exists, page, place, centroids, signs, TASK: tl.constexpr):
    table = kv_codec.table_of(centroids, TASK)
    if TASK.products:
        octets, squares = _turned_by_products(raw, signs, TASK)
    else:
        squares = _squares_of_rows(raw, TASK)
    # A sum that is not finite may be an overflow: then, and only then, is every element looked at.
    unsure = (squares != squares) | (squares == float("inf"))
    lost = squares != squares
    if not TASK.sanitize:
        if tl.max(unsure.to(tl.int32), 0) != 0:
            lost = _any_lost(_load_rows(key, token, head, valid, TASK), TASK)  # again: registers are few
    # A direction whose norm overflowed is zero.
    squares = tl.where(unsure, tl.where(lost, 0.0, float("inf")), squares)
    norm = tl.sqrt_rn(squares)
    divisor = norm + kv_codec.NORM_FLOOR
    factor = tl.full(norm.shape, kv_codec.scale_of_rotation(TASK), tl.float32)
    if TASK.products:  # sums, and what they are multiplied by, may have any order: a division for each row is enough
        factor = tl.math.div_rn(factor * (1 / kv_codec.products_scale(TASK)), divisor)
    else:
        octets = _turned(raw, divisor, TASK)
    runs = ()
    sums = kv_codec.no_squares(octets[0][0].shape, TASK)
    flat = tl.where(lost, 0, kv_codec.word_of_zeros(table, TASK))[:, None]
    for i in tl.static_range(tl.constexpr(TASK.octets)):
        word, sums = kv_codec.encode_octet(octets[i], factor[:, None], sums, table, TASK)
        runs = runs + (tl.where(unsure[:, None], flat, word),)
    if TASK.corrected:
        chosen = kv_codec.squares_of(sums, TASK) + kv_codec.CORRECTION_FLOOR
        norm = norm * tl.math.div_rn(1.0, tl.sqrt_rn(chosen))
    norm = tl.where(squares == float("inf"), kv_codec.FP16_MAX, norm)
    kv_codec.store_codes(kv_codec.codes_at(page, place, head, False, TASK), runs, exists, TASK.key_bits, TASK)
    tl.store(kv_codec.field_at(page, place, head, 0, TASK), kv_codec.fp16_bits(norm, lost), mask=exists)


@triton.jit
def _store_values(raw, head, exists, page, place, TASK: tl.constexpr):
    PATHS: tl.constexpr = TASK.paths
    MOST: tl.constexpr = (1 << TASK.value_bits) - 1
    least, most = _extreme_of_rows(raw, False, TASK), _extreme_of_rows(raw, True, TASK)  # [ROWS]
    lost = (least != least) | (least == float("-inf")) | (most == float("inf"))
    low = tl.minimum(tl.maximum(tl.where(lost, 0.0, least), -kv_codec.FP16_MAX), kv_codec.FP16_MAX) + 0.0
    high = tl.minimum(tl.maximum(tl.where(lost, 0.0, most), -kv_codec.FP16_MAX), kv_codec.FP16_MAX)
    scale = tl.maximum(tl.math.div_rn(high - low, tl.full(low.shape, MOST, tl.float32)), kv_codec.SCALE_FLOOR)
    tiles = ()
    for i in tl.static_range(tl.constexpr(TASK.tiles)):
        tiles = tiles + (_as_fp32(raw[i], TASK) - low[:, None, None],)
    if TASK.dtype != "fp16":
        # Elements may be beyond what low and high can be; and a quotient that overflows is NaN.
        if tl.max(((least < -kv_codec.FP16_MAX) | (most > kv_codec.FP16_MAX)).to(tl.int32), 0) != 0:
            inside = ()
            for i in tl.static_range(tl.constexpr(TASK.tiles)):
                steps = tl.minimum(tl.maximum(tiles[i], 0.0), (scale * (MOST + 0.25))[:, None, None])
                inside = inside + (steps,)
            tiles = inside
    quotients = ()
    for i in tl.static_range(tl.constexpr(TASK.tiles)):
        quotients = quotients + (kv_codec.divide(tiles[i], scale[:, None, None], PATHS) + 0.5,)
    runs = ()
    for i in tl.static_range(tl.constexpr(TASK.octets)):
        word = kv_codec.pack_values(kv_codec.octet_of(quotients, i, TASK.width), TASK)
        runs = runs + (tl.where(lost[:, None], 0, word),)
    kv_codec.store_codes(kv_codec.codes_at(page, place, head, True, TASK), runs, exists, TASK.value_bits, TASK)
    FIELD: tl.constexpr = TASK.fields - 2
    tl.store(kv_codec.field_at(page, place, head, FIELD, TASK), kv_codec.fp16_bits(scale, lost), mask=exists)
    tl.store(kv_codec.field_at(page, place, head, FIELD + 1, TASK), kv_codec.fp16_bits(low, lost), mask=exists)


@triton.jit
def _extreme_of_rows(raw, MOST: tl.constexpr, TASK: tl.constexpr):
    """The largest, or the smallest, element of rows [ROWS]; NaN where there is one."""
    PATHS: tl.constexpr = TASK.paths
    x = _as_fp32(raw[0], TASK) if TASK.sanitize else raw[0]
    for i in tl.static_range(1, tl.constexpr(TASK.tiles)):
        x = kv_codec.extreme(x, _as_fp32(raw[i], TASK) if TASK.sanitize else raw[i], MOST, PATHS)
    found = kv_codec.extreme_of_columns(x, MOST, PATHS)
    if PATHS.interpreted:  # a reduction by a function is slow there
        for stage in tl.static_range(6):
            if 1 << stage < TASK.parts:
                a, b = tl.split(tl.reshape(found, [found.shape[0], found.shape[1] // 2, 2]))
                found = kv_codec.extreme(a, b, MOST, PATHS)
        return tl.reshape(found, [found.shape[0]])
    elif MOST:
        return tl.reduce(found, 1, _larger)
    else:
        return tl.reduce(found, 1, _smaller)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_rotated_keys(
    key, token, head, exists, page, place, centroids, rotation, ROWS: tl.constexpr, TASK: tl.constexpr
):
    """As :func:`_store_keys`, with a rotation of the call's own: rows as tiles [ROWS, dim], padded."""
    WIDTH: tl.constexpr = TASK.padded
    table = kv_codec.table_of(centroids, TASK)
    at = tl.arange(0, WIDTH)
    row = key.ptr + token * key.query_stride + head.to(tl.int64) * key.head_stride
    x = _as_fp32(tl.load(row[:, None] + at[None, :], mask=exists[:, None] & (at < TASK.dim)[None, :], other=0.0), TASK)
    lost = tl.max(_is_lost(x).to(tl.int32), 1) != 0
    norm = tl.sqrt_rn(tl.where(lost, 0.0, tl.sum(x * x, 1)))
    divisor = norm + kv_codec.NORM_FLOOR
    turned = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.static_range(0, tl.constexpr(TASK.dim), _ROTATED_STEP):
        step = start + tl.arange(0, _ROTATED_STEP)
        some = tl.load(row[:, None] + step[None, :], mask=exists[:, None] & (step < TASK.dim)[None, :], other=0.0)
        some = tl.where(lost[:, None], 0.0, _as_fp32(some, TASK))
        some = tl.math.div_rn(some, tl.broadcast_to(divisor[:, None], some.shape))
        inside = (at < TASK.dim)[None, :] & (step < TASK.dim)[:, None]
        matrix = tl.load(rotation + at[None, :] * TASK.dim + step[:, None], mask=inside, other=0.0)
        turned = tl.dot(some, matrix, turned, input_precision="ieee")
    code, centroid = kv_codec.bucketize(turned, table, TASK)
    code = tl.where(lost[:, None], 0, code)
    if TASK.corrected:
        chosen = tl.sum(tl.where((at < TASK.dim)[None, :], centroid * centroid, 0.0), 1)
        norm = norm * tl.math.div_rn(1.0, tl.sqrt_rn(chosen + kv_codec.CORRECTION_FLOOR))
    # Eight codes are three or four bytes.
    OCTETS: tl.constexpr = WIDTH // 8
    octet = tl.arange(0, OCTETS)
    shift = TASK.key_bits * (tl.arange(0, WIDTH) % 8)
    runs = tl.sum(tl.reshape(code << shift[None, :], [ROWS, OCTETS, 8]), 2)
    mask = exists[:, None] & (8 * octet < TASK.dim)[None, :]
    codes = kv_codec.codes_at(page, place, head, False, TASK)
    for byte in tl.static_range(tl.constexpr(TASK.key_bits)):
        pointer = codes[:, None] + octet[None, :] * TASK.key_bits + byte
        tl.store(pointer, (runs >> (8 * byte)).to(tl.uint8), mask=mask)
    tl.store(kv_codec.field_at(page, place, head, 0, TASK), kv_codec.fp16_bits(norm, lost), mask=exists)


@triton.jit
def _store_tile(
    kv_cache, key, value, slots, centroids, rotation, signs, tokens, num_slots, block_stride, slot_stride, tile, turn,
    TASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, head, valid = kv_codec.rows_of(tile, tokens, ROWS, TASK)
    if TASK.together:
        # Rows whose slots do not exist are read in vain, and the others without waiting for their slots.
        keys = _load_rows(key, token, head, valid, TASK)
        values = _load_rows(value, token, head, valid, TASK)
    slot = tl.load(slots + token * slot_stride, mask=valid, other=-1)
    page, place, exists = kv_codec.pages_of(kv_cache, slot, valid, num_slots, block_stride, TASK)
    if TASK.together:
        if TASK.key_bits == 8:
            _store_fp8_keys(keys, head, exists, page, place, TASK)
        else:
            _store_keys(keys, key, token, head, valid, exists, page, place, centroids, signs, TASK)
        _store_values(values, head, exists, page, place, TASK)
    elif turn == 1:
        _store_values(_load_rows(value, token, head, exists, TASK), head, exists, page, place, TASK)
    else:
        if TASK.key_bits == 8:
            _store_fp8_keys(_load_rows(key, token, head, exists, TASK), head, exists, page, place, TASK)
        elif TASK.rotated:
            _store_rotated_keys(key, token, head, exists, page, place, centroids, rotation, ROWS, TASK)
        else:
            keys = _load_rows(key, token, head, exists, TASK)
            _store_keys(keys, key, token, head, exists, exists, page, place, centroids, signs, TASK)


@triton.jit(do_not_specialize=["tokens", "num_slots", "steps"])
def store_kv_kernel(
    kv_cache, key, value, slots, centroids, rotation, tokens, num_slots, block_stride, slot_stride, steps,
    TASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    PATHS: tl.constexpr = TASK.paths
    program = tl.program_id(0)
    signs = None
    if TASK.products:
        signs = kv_codec.signs_of_products(key.ptr.dtype.element_ty, TASK)
    if not TASK.together:
        _store_tile(
            kv_cache, key, value, slots, centroids, rotation, signs, tokens, num_slots, block_stride, slot_stride,
            program // 2, program % 2, TASK, ROWS,
        )  # fmt: skip
    else:
        tile = program * steps
        last = tile + steps
        if PATHS.interpreted:
            while tile < last:  # the interpreter has no range of what a kernel computes
                _store_tile(
                    kv_cache, key, value, slots, centroids, rotation, signs, tokens, num_slots, block_stride,
                    slot_stride, tile, 0, TASK, ROWS,
                )  # fmt: skip
                tile += 1
        else:
            for each in tl.range(tile, last, num_stages=1):
                _store_tile(
                    kv_cache, key, value, slots, centroids, rotation, signs, tokens, num_slots, block_stride,
                    slot_stride, each, 0, TASK, ROWS,
                )  # fmt: skip


@triton.jit
def _write_rows(rows, tiles, token, head, valid, exists, TASK: tl.constexpr):
    """Tiles of fp32 to a tensor's rows, saturated; zeros where a slot does not exist."""
    PATHS: tl.constexpr = TASK.paths
    for i in tl.static_range(tl.constexpr(TASK.tiles)):
        x = codec.saturate(tiles[i], TASK, False)
        x = tl.where(exists[:, None, None], x, 0.0)
        pointer = kv_codec.elements_at(rows, token, head, i, TASK)
        x = kv_codec.in_order(codec.round_to(x, rows.ptr.dtype.element_ty, PATHS), TASK)
        tl.store(pointer, x, mask=kv_codec.spread_mask(valid, TASK))


@triton.jit
def _load_keys(
    key, token, head, valid, exists, page, place, centroids, rotation, ROWS: tl.constexpr, TASK: tl.constexpr
):
    PATHS: tl.constexpr = TASK.paths
    codes = kv_codec.codes_at(page, place, head, False, TASK)
    runs = kv_codec.load_codes(codes, exists, TASK.key_bits, TASK)
    tiles = ()
    if TASK.key_bits == 8:
        for i in tl.static_range(tl.constexpr(TASK.octets)):
            columns = ()
            for half in tl.static_range(4):
                x, y = codec.decode_e4m3_pair((runs[2 * i + half // 2] >> (16 * (half % 2))) & 0xFFFF, PATHS)
                columns = columns + (x, y)
            tiles = tiles + kv_codec.tiles_of(columns, TASK)
    else:
        table = kv_codec.table_of(centroids, TASK)
        norm = tl.load(kv_codec.field_at(page, place, head, 0, TASK), mask=exists, other=0)
        norm = norm.to(tl.float16, bitcast=True).to(tl.float32)
        for i in tl.static_range(tl.constexpr(TASK.octets)):
            columns = ()
            for j in tl.static_range(8):
                c = kv_codec.look_up(runs[i] >> (TASK.key_bits * j), table, TASK.key_bits)
                columns = columns + (norm[:, None] * c,)
            tiles = tiles + kv_codec.tiles_of(columns, TASK)
        turned = ()
        for block in tl.static_range(tl.constexpr(TASK.blocks)):
            some = ()
            for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
                some = some + (tiles[block * TASK.block_tiles + i],)
            some = kv_codec.butterfly(some, TASK)
            for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
                turned = turned + (some[i] * kv_codec.scale_of_rotation(TASK),)
        tiles = turned
    _write_rows(key, tiles, token, head, valid, exists, TASK)


@triton.jit
def _load_rotated_keys(
    key, token, head, valid, exists, page, place, centroids, rotation, ROWS: tl.constexpr, TASK: tl.constexpr
):
    """As :func:`_load_keys`, with a rotation of the call's own: rows as tiles [ROWS, dim], padded."""
    PATHS: tl.constexpr = TASK.paths
    WIDTH: tl.constexpr = TASK.padded
    table = kv_codec.table_of(centroids, TASK)
    codes = kv_codec.codes_at(page, place, head, False, TASK)
    norm = tl.load(kv_codec.field_at(page, place, head, 0, TASK), mask=exists, other=0)
    norm = norm.to(tl.float16, bitcast=True).to(tl.float32)
    at = tl.arange(0, WIDTH)
    turned = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.static_range(0, tl.constexpr(TASK.dim), _ROTATED_STEP):
        step = start + tl.arange(0, _ROTATED_STEP)
        known = exists[:, None] & (step < TASK.dim)[None, :]
        bit = step * TASK.key_bits
        low = tl.load(codes[:, None] + (bit // 8)[None, :], mask=known, other=0).to(tl.int32)
        further = known & (bit % 8 + TASK.key_bits > 8)[None, :]
        high = tl.load(codes[:, None] + (bit // 8 + 1)[None, :], mask=further, other=0).to(tl.int32)
        c = kv_codec.look_up((low | (high << 8)) >> (bit % 8)[None, :], table, TASK.key_bits)
        some = tl.where(known, norm[:, None] * c, 0.0)
        inside = (step < TASK.dim)[:, None] & (at < TASK.dim)[None, :]
        matrix = tl.load(rotation + step[:, None] * TASK.dim + at[None, :], mask=inside, other=0.0)
        turned = tl.dot(some, matrix, turned, input_precision="ieee")
    x = tl.where(exists[:, None], codec.saturate(turned, TASK, False), 0.0)
    pointer = (key.ptr + token * key.query_stride + head.to(tl.int64) * key.head_stride)[:, None] + at[None, :]
    mask = valid[:, None] & (at < TASK.dim)[None, :]
    tl.store(pointer, codec.round_to(x, key.ptr.dtype.element_ty, PATHS), mask=mask)


@triton.jit
def _load_values(value, token, head, valid, exists, page, place, TASK: tl.constexpr):
    FIELD: tl.constexpr = TASK.fields - 2
    codes = kv_codec.codes_at(page, place, head, True, TASK)
    runs = kv_codec.load_codes(codes, exists, TASK.value_bits, TASK)
    scale = tl.load(kv_codec.field_at(page, place, head, FIELD, TASK), mask=exists, other=0)
    zero = tl.load(kv_codec.field_at(page, place, head, FIELD + 1, TASK), mask=exists, other=0)
    scale = scale.to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    zero = zero.to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    tiles = ()
    for i in tl.static_range(tl.constexpr(TASK.octets)):
        columns = ()
        for j in tl.static_range(8):
            code = (runs[i] >> (TASK.value_bits * j)) & ((1 << TASK.value_bits) - 1)
            columns = columns + (code.to(tl.float32) * scale + zero,)
        tiles = tiles + kv_codec.tiles_of(columns, TASK)
    _write_rows(value, tiles, token, head, valid, exists, TASK)


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def load_kv_kernel(
    kv_cache, key, value, slots, centroids, rotation, tokens, num_slots, block_stride, slot_stride,
    TASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token, head, valid = kv_codec.rows_of(program // 2, tokens, ROWS, TASK)
    slot = tl.load(slots + token * slot_stride, mask=valid, other=-1)
    page, place, exists = kv_codec.pages_of(kv_cache, slot, valid, num_slots, block_stride, TASK)
    if program % 2 == 1:
        _load_values(value, token, head, valid, exists, page, place, TASK)
    else:
        if TASK.rotated:
            _load_rotated_keys(key, token, head, valid, exists, page, place, centroids, rotation, ROWS, TASK)
        else:
            _load_keys(key, token, head, valid, exists, page, place, centroids, rotation, ROWS, TASK)
