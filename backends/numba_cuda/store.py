"""Quantize rows and scatter them into pages: one kernel for every format.

    grid      blocks of [tokens, lines]: a thread takes one line of a row, then those that its block's width is short of
    line      a group; where no scale says how long that is, and in a bf16 tail, one step: 8 elements, or 2
    reads     latent rows    2 or 4 bytes a value, 16 at a time where rows are aligned to that
              slots          once for each line
    writes    values         up to 16 bytes at a time
              scales         1 byte a group

A thread reads its line twice: for the largest magnitude, then to encode. Lines are short and rows are never written
here, so the compiler keeps what it read in registers. Neighbouring threads' lines stand side by side, so that a warp's
accesses fill whole sectors.
"""

from __future__ import annotations

from numba import cuda

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.addressing import place_finder
from mxkv.backends.numba_cuda.primitives import (
    add,
    bits_of,
    device,
    div,
    fetch_float,
    fetch_index,
    float_of,
    i32,
    i64,
    mul,
    put8,
    put16,
    sub,
    u32,
)
from mxkv.backends.numba_cuda.rows import (
    ELEMENT_BYTES,
    element_reader,
    octet_reader,
    pair_putter,
    quad_putter,
    word_putter,
)
from mxkv.backends.numba_cuda.tasks import StoreTask
from mxkv.formats import Scale
from mxkv.numerics import E4M3_NAN, float_bits, scale_nan

_BF16_MAX = 0x7F7F0000
_PAIR = 2
_HALF_TABLE = 32  # cosines of a table's row, then as many sines


def _step_reader(task: StoreTask, limit: int):
    """A function that reads a step of a row, rotated and sanitized (to ``limit``): a tuple of fp32.

    Where a row has an odd number of elements, its first step begins one before it, so that RoPE's pairs are steps.
    """
    size, step, rotated, sanitize = ELEMENT_BYTES[task.dtype], task.record.step, task.rotated, task.sanitize
    rotates, table_size = bool(task.table), ELEMENT_BYTES[task.table] if task.table else 0
    read_angle = element_reader(task.table) if task.table else element_reader("fp32")
    read = element_reader(task.dtype)
    read_octet = octet_reader(task.dtype, task.aligned)

    @device
    def rotate(x, y, angle):
        cos, sin = read_angle(angle), read_angle(angle + _HALF_TABLE * table_size)
        return sub(mul(x, cos), mul(y, sin)), add(mul(y, cos), mul(x, sin))

    @device
    def tidy(x):
        return codec.sanitized(x, limit) if sanitize else x

    @device
    def read_pair(row, at, angles):
        x = float_of(0)
        if at >= 0:
            x = read(row + at * size)
        y = read(row + (at + 1) * size)
        if rotates and at >= rotated:
            x, y = rotate(x, y, angles + (at - rotated) // 2 * table_size)
        return tidy(x), tidy(y)

    @device
    def read_eight(row, at, angles):
        a, b, c, d, e, f, g, h = read_octet(row + at * size)
        if rotates and at >= rotated:
            angle = angles + (at - rotated) // 2 * table_size
            a, b = rotate(a, b, angle)
            c, d = rotate(c, d, angle + table_size)
            e, f = rotate(e, f, angle + 2 * table_size)
            g, h = rotate(g, h, angle + 3 * table_size)
        return tidy(a), tidy(b), tidy(c), tidy(d), tidy(e), tidy(f), tidy(g), tidy(h)

    return read_pair if step == _PAIR else read_eight


def _group_scale(task: StoreTask):
    """A function from twice the bits of a group's largest magnitude to its scale byte, its factor, and if it is lost.

    The factor is the reciprocal of an E8M0 scale, exact, or an E4M3 scale itself, to divide by. A lost group, one that
    holds what its record cannot, is taken as zeros.
    """
    limit, floor, sanitize = task.limit, task.amax_floor, task.sanitize
    e8m0 = task.record.scale == "e8m0"
    element_max = task.element_max
    top = float_bits(element_max)
    top_exponent, top_mantissa = (top >> 23) - 127, top & codec.MANTISSA

    @device
    def scale_of(doubled):
        amax = i32(doubled >> 1)
        lost = amax > limit and not sanitize
        if lost:
            amax = i32(0)
        amax = i32(max(amax, floor))
        if e8m0:
            byte = codec.e8m0_scale(amax, top_exponent, top_mantissa)
            factor = float_of((254 - byte) << 23)
        else:
            byte = codec.e4m3_scale(amax, element_max)
            factor = codec.decode_e4m3(byte)
        return byte, factor, lost

    return scale_of


def _step_putter(task: StoreTask):
    """A function that encodes a step of a group and writes it."""
    record = task.record
    alignment, e2m1, e8m0 = record.alignment, record.element == "e2m1", record.scale == "e8m0"
    put_word, put_pair = word_putter(alignment), pair_putter(alignment)

    @device
    def scaled(x, factor):
        return mul(x, factor) if e8m0 else div(x, factor)

    @device
    def e4m3_word(x, at, factor, keep):
        a, b = codec.encode_e4m3(scaled(x[at], factor)), codec.encode_e4m3(scaled(x[at + 1], factor))
        c, d = codec.encode_e4m3(scaled(x[at + 2], factor)), codec.encode_e4m3(scaled(x[at + 3], factor))
        return (a | (b << 8) | (c << 16) | (d << 24)) & keep

    @device
    def put_eight(address, x, factor, keep):
        if e2m1 and e8m0:
            put_word(address, codec.encode_e2m1_octet(x, factor) & keep)
        elif e2m1:
            word = 0
            for i in range(8):
                word |= codec.encode_e2m1(div(x[i], factor), 1.0, 0.5, 0.25) << (4 * i)
            put_word(address, word & keep)
        else:
            put_pair(address, e4m3_word(x, 0, factor, keep), e4m3_word(x, 4, factor, keep))

    @device
    def put_two(address, x, factor, keep):
        if e2m1:
            a, b = x
            if e8m0:
                low, high = mul(factor, 0.5), mul(factor, 0.25)
                codes = codec.encode_e2m1(a, factor, low, high) | (codec.encode_e2m1(b, factor, low, high) << 4)
            else:
                codes = codec.encode_e2m1(div(a, factor), 1.0, 0.5, 0.25)
                codes |= codec.encode_e2m1(div(b, factor), 1.0, 0.5, 0.25) << 4
            put8(address, codes & keep)
        else:
            put8(address, codec.encode_e4m3(scaled(x[0], factor)) & keep)
            put8(address + 1, codec.encode_e4m3(scaled(x[1], factor)) & keep)

    return put_two if record.step == _PAIR else put_eight


def _plain_encoder(task: StoreTask):
    """A function from fp32 to an element without a group's scale: bf16, or E4M3 of bf16(x) * reciprocal."""
    sanitize = task.sanitize

    @device
    def encode_e4m3(x, reciprocal):
        x = codec.float_of(codec.encode_bf16(x) << 16)
        bits = bits_of(x)
        magnitude = bits & codec.MAGNITUDE
        if magnitude > codec.INFINITY:
            return i32(0) if sanitize else i32(E4M3_NAN)
        if magnitude == codec.INFINITY:
            return i32(0x7E | ((bits >> 24) & 0x80)) if sanitize else i32(E4M3_NAN)
        scaled = mul(x, reciprocal)
        if (bits_of(scaled) & codec.MAGNITUDE) > codec.INFINITY:
            return i32(E4M3_NAN)
        return codec.encode_e4m3(scaled)

    @device
    def encode_bf16(x, reciprocal):
        return codec.encode_bf16(x)

    return encode_e4m3 if task.record.element == "e4m3" and not task.record.grouped else encode_bf16


def _plain_putter(task: StoreTask):
    """A function that encodes a step of plain elements (or of a bf16 tail) and writes it."""
    record = task.record
    alignment, step = record.alignment, record.step
    bytes_each = record.element == "e4m3" and not record.grouped
    encode = _plain_encoder(task)
    put_pair, put_quad = pair_putter(alignment), quad_putter(alignment)

    @device
    def put_half(address, value):
        if alignment % 2 == 0:
            put16(address, value)
        else:
            put8(address, value & 0xFF)
            put8(address + 1, value >> 8)

    @device
    def put_two(address, x, first, reciprocal):
        """``first``: whether the step's first element is one of the row."""
        if bytes_each:
            if first:
                put8(address, encode(x[0], reciprocal))
            put8(address + 1, encode(x[1], reciprocal))
        else:
            if first:
                put_half(address, encode(x[0], reciprocal))
            put_half(address + 2, encode(x[1], reciprocal))

    @device
    def put_eight(address, x, first, reciprocal):
        a, b = encode(x[0], reciprocal), encode(x[1], reciprocal)
        c, d = encode(x[2], reciprocal), encode(x[3], reciprocal)
        e, f = encode(x[4], reciprocal), encode(x[5], reciprocal)
        g, h = encode(x[6], reciprocal), encode(x[7], reciprocal)
        if bytes_each:
            put_pair(address, a | (b << 8) | (c << 16) | (d << 24), e | (f << 8) | (g << 16) | (h << 24))
        else:
            put_quad(address, a | (b << 16), c | (d << 16), e | (f << 16), g | (h << 16))

    return put_two if step == _PAIR else put_eight


def _group_writer(task: StoreTask):
    """A function that stores one group: its values and its scale."""
    record = task.record
    group, step, bits = record.group, record.step, record.bits
    steps = group // step
    group_bytes, step_bytes = group * bits // 8, step * bits // 8
    lost_byte = scale_nan(Scale(record.scale)) if record.grouped else 0
    read, scale_of, put = _step_reader(task, task.limit), _group_scale(task), _step_putter(task)
    # Four steps of E2M1 are 16 bytes: one access.
    quads = record.element == "e2m1" and record.scale == "e8m0" and record.alignment == 16 and group % 32 == 0
    put_quad = quad_putter(16)

    @device
    def store_group(row, angles, values_at, scales_at, index):
        first = index * group
        largest = u32(0)
        for i in range(steps):
            x = read(row, first + i * step, angles)
            for j in range(step):
                largest = codec.larger(x[j], largest)
        byte, factor, lost = scale_of(largest)
        keep = i32(0) if lost else i32(-1)
        address = values_at + index * group_bytes
        if quads:
            for i in range(steps // 4):
                at = first + 4 * i * step
                a = codec.encode_e2m1_octet(read(row, at, angles), factor)
                b = codec.encode_e2m1_octet(read(row, at + step, angles), factor)
                c = codec.encode_e2m1_octet(read(row, at + 2 * step, angles), factor)
                d = codec.encode_e2m1_octet(read(row, at + 3 * step, angles), factor)
                put_quad(address + 16 * i, a & keep, b & keep, c & keep, d & keep)
        else:
            for i in range(steps):
                put(address + i * step_bytes, read(row, first + i * step, angles), factor, keep)
        put8(scales_at + index, lost_byte if lost else byte)

    return store_group


def store_kernel(task: StoreTask):
    """The kernel for a task, as a Python function of addresses and numbers; strides are in bytes."""
    record = task.record
    step, dim, body, groups = record.step, record.dim, record.body, record.groups
    grouped, padding, body_bytes = record.grouped, record.padding, record.body_bytes
    skipped = dim % 2 if step == _PAIR else 0  # see _step_reader
    plain_from = body if grouped else -skipped
    lines = store_lines(task)
    plain_bytes = 1 if record.element == "e4m3" and not grouped else 2
    index_bytes, position_bytes = task.index_bytes, task.position_bytes
    rotates, scaled, ratio = bool(task.table), task.scaled, task.compress_ratio
    place_of = place_finder(record)
    plain_start = body_bytes if grouped else -skipped * plain_bytes
    read_plain, put_plain = _step_reader(task, _BF16_MAX), _plain_putter(task)

    @device
    def no_group(row, angles, values_at, scales_at, index):
        pass

    store_group = _group_writer(task) if grouped else no_group

    def kernel(
        cache, latent, slots, positions, cos_sin, cache_scale,
        tokens, num_slots, max_position, block_stride, latent_stride, slot_stride, position_stride, table_stride,
    ):  # fmt: skip
        reciprocal = float_of(0x3F800000)
        if scaled:
            reciprocal = div(1.0, fetch_float(cache_scale))
        token = i64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        while token < tokens:
            slot = fetch_index(slots + token * slot_stride, index_bytes)
            stored = slot >= 0 and slot < num_slots
            angles = cos_sin
            if position_bytes:
                position = fetch_index(positions + token * position_stride, position_bytes)
                stored = stored and position >= 0 and position % ratio == ratio - 1
                if rotates:
                    stored = stored and position < max_position
                    angles = cos_sin + (position - position % ratio) * table_stride
            if stored:
                row = latent + token * latent_stride
                values_at, scales_at = place_of(cache, slot, num_slots, block_stride)
                line = i32(cuda.threadIdx.x)
                while line < lines:
                    if grouped and line < groups:
                        store_group(row, angles, values_at, scales_at, line)
                    else:
                        at = (line - groups) * step
                        x = read_plain(row, plain_from + at, angles)
                        put_plain(values_at + plain_start + at * plain_bytes, x, plain_from + at >= 0, reciprocal)
                    line = i32(line + cuda.blockDim.x)
                if padding and cuda.threadIdx.x == 0:
                    for i in range(padding):
                        put8(scales_at + groups + i, 0)
            token += i64(cuda.gridDim.x) * cuda.blockDim.y

    return kernel


def store_lines(task: StoreTask) -> int:
    """Into how many lines a row is taken."""
    record = task.record
    plain = record.dim - record.groups * record.group if record.grouped else record.dim
    return record.groups + -(-plain // record.step)
