"""Store and load of keys and values per head.

    grid      blocks of [rows, threads], a row being one head of one token: first its key, then its value
    reads     a row's elements once, into shared memory [D] (load: its codes)
    writes    8 codes at a time: 3, 4 or 8 bytes; 2 or 3 fp16 numbers (load: elements)

The rotation is done in shared memory, stage by stage in the order of the specification, so that it rounds as the torch
backend's does. Only the sums of squares have an order of their own.
"""

from __future__ import annotations

import dataclasses

from numba import cuda, types

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.primitives import (
    add,
    address_of,
    barrier,
    bits_of,
    device,
    div,
    fetch8,
    fetch16,
    fetch_float,
    fetch_index,
    float_of,
    float_of_half,
    half_of_float,
    i32,
    i64,
    mul,
    put8,
    put16,
    shared_fetch,
    shared_put,
    sqrt,
    sub,
    truncated,
)
from mxkv.backends.numba_cuda.rows import ELEMENT_BYTES, element_reader, element_writer, word_fetcher, word_putter
from mxkv.numerics import E4M3_NAN, float_bits

TABLE = 16  # centroids of a key's code, at most
OCTET = 8
_FP16_MAX = float_bits(65504.0)
_FP16_NAN = 0x7E00
_NORM_FLOOR = 1e-8
_SCALE_FLOOR = float_bits(1e-8)
_CORRECTION_FLOOR = 1e-16


@dataclasses.dataclass(frozen=True)
class KVRecord:
    """Where a head's bytes stand in a page, and what they mean.

    Attributes:
        dim: Elements of a key, and of a value.
        key_bits: 8: E4M3; 3 or 4: a norm, and codes of the rotated direction.
        value_bits: 3 or 4.
        table: The centroids of a key's code, as fp32 bits; none where the caller has their own, or there are none.
        rotated: Whether the caller has a rotation of their own.
        heads: Of the cache.
        block_size, token_bytes, head_bytes, key_bytes, meta_offset, fields: The page layout.
        alignment: Bytes (1, 2 or 4) to which every eight codes of 4 bits are aligned.
    """

    dim: int
    key_bits: int
    value_bits: int
    table: tuple[int, ...]
    rotated: bool
    heads: int
    block_size: int
    token_bytes: int
    head_bytes: int
    key_bytes: int
    meta_offset: int
    fields: int
    alignment: int

    @property
    def normed(self) -> bool:
        return self.key_bits < 8

    @property
    def block(self) -> int:
        """The size of the rotation's diagonal blocks."""
        return self.dim & -self.dim


@dataclasses.dataclass(frozen=True)
class KVTask:
    """What the store and load kernels are compiled for.

    Attributes:
        record: The cache's.
        dtype: Of keys and values: "bf16", "fp16" or "fp32".
        dtype_max: The largest finite value of that dtype, as fp32 bits.
        corrected: Whether a key's norm is divided by that of its quantized direction.
        sanitize: Whether NaN and infinities are replaced.
        index_bytes: Of a slot.
        threads: Of a row.
        rows: Of a block.
    """

    record: KVRecord
    dtype: str
    dtype_max: int
    corrected: bool
    sanitize: bool
    index_bytes: int
    threads: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """A row's shared memory: two rows of elements, a number for each thread, centroids and their midpoints."""
        return 4 * (2 * self.record.dim + self.threads + 2 * TABLE)

    @property
    def bytes(self) -> int:
        return self.row_bytes * self.rows


def place_finder(record: KVRecord):
    """A function from a block and a place in it to where a head's codes and its fp16 numbers stand."""
    block_size, fields, meta_offset = record.block_size, record.fields, record.meta_offset
    token_bytes, head_bytes = record.token_bytes, record.head_bytes

    @device
    def place_of(cache, block, place, head, block_stride):
        page = cache + block * block_stride
        codes = page + place * token_bytes + head * head_bytes
        return codes, page + meta_offset + 2 * (head * fields * block_size + place)

    return place_of


def code_fetcher(bits, alignment):
    """A function from where a row's codes start and a multiple of 8 to eight codes of 3 or 4 bits, in an int32."""
    fetch_word = word_fetcher(alignment)

    @device
    def fetch_codes(codes, at):
        if bits == 4:
            return fetch_word(codes + at // 2)
        start = codes + at // OCTET * 3
        return i32(fetch8(start) | (fetch8(start + 1) << 8) | (fetch8(start + 2) << 16))

    return fetch_codes


def _code_putter(bits, alignment):
    """The inverse of :func:`code_fetcher`."""
    put_word = word_putter(alignment)

    @device
    def put_codes(codes, at, word):
        if bits == 4:
            put_word(codes + at // 2, word)
        else:
            start = codes + at // OCTET * 3
            for i in range(3):
                put8(start + i, (word >> (8 * i)) & 0xFF)

    return put_codes


def table_filler(record: KVRecord, threads: int):
    """A function by which a row's threads put the centroids into shared memory."""
    constants, count = record.table or (0,), 1 << record.key_bits if record.normed else 0
    given = not record.table

    @device
    def fill_table(table, centroids, thread):
        i = i32(thread)
        while i < count:
            if given:
                shared_put(table + 4 * i, fetch_float(centroids + 4 * i))
            else:
                shared_put(table + 4 * i, float_of(constants[i]))
            i = i32(i + threads)

    return fill_table


def rotator(record: KVRecord, rows: int, stride: int, threads: int, back: bool):
    """A function by which a block rotates rows in shared memory; ``spare`` has room for one. It begins and ends in
    step. All of the block's threads call it.

    Args:
        record: The cache's.
        rows: How many rows, for each caller.
        stride: From one to the next, in bytes.
        threads: Of each caller.
        back: Whether to undo the rotation.
    """
    dim, block, given = record.dim, record.block, record.rotated
    half_dim, factor = dim // 2, float_bits(float(block) ** -0.5)

    @device
    def butterfly(start, thread):
        half = 1
        while half < block:
            item = i32(thread)
            while item < rows * half_dim:
                row = item // half_dim
                pair = item - row * half_dim
                first = pair // half * (2 * half) + pair % half
                at = start + row * stride + 4 * first
                x, y = shared_fetch(at), shared_fetch(at + 4 * half)
                shared_put(at, add(x, y))
                shared_put(at + 4 * half, sub(x, y))
                item = i32(item + threads)
            barrier()
            half = 2 * half
        item = i32(thread)
        while item < rows * dim:
            row = item // dim
            at = start + row * stride + 4 * (item - row * dim)
            shared_put(at, mul(shared_fetch(at), float_of(factor)))
            item = i32(item + threads)
        barrier()

    @device
    def multiply(start, spare, rotation, thread):
        for row in range(rows):
            i = i32(thread)
            while i < dim:
                total = float_of(0)
                for j in range(dim):
                    entry = rotation + 4 * (j * dim + i) if back else rotation + 4 * (i * dim + j)
                    total = add(total, mul(fetch_float(entry), shared_fetch(start + row * stride + 4 * j)))
                shared_put(spare + 4 * i, total)
                i = i32(i + threads)
            barrier()
            i = i32(thread)
            while i < dim:
                shared_put(start + row * stride + 4 * i, shared_fetch(spare + 4 * i))
                i = i32(i + threads)
            barrier()

    @device
    def rotate(start, spare, rotation, thread):
        barrier()
        if given:
            multiply(start, spare, rotation, thread)
        else:
            butterfly(start, thread)

    return rotate


def _gatherer(threads):
    """Functions that give each thread of a row the sum, or the largest, of what all have; they end in step."""

    @device
    def total_of(scratch, x, thread):
        shared_put(scratch + 4 * thread, x)
        barrier()
        total = float_of(0)
        for i in range(threads):
            total = add(total, shared_fetch(scratch + 4 * i))
        barrier()
        return total

    @device
    def largest_of(scratch, x, thread):
        shared_put(scratch + 4 * thread, x)
        barrier()
        largest = shared_fetch(scratch)
        for i in range(threads):
            other = shared_fetch(scratch + 4 * i)
            if other > largest:
                largest = other
        barrier()
        return largest

    return total_of, largest_of


@device
def _fp16(x, lost):
    """fp32 clamped to fp16's finite range, as bits; NaN where it is lost."""
    if lost:
        return i32(_FP16_NAN)
    return half_of_float(codec.saturated(x, _FP16_MAX, False))


@device
def _negative(x):
    return float_of(bits_of(x) ^ -0x80000000)


def store_kv_kernel(task: KVTask):
    """The kernel that stores, as a Python function of addresses and numbers; strides are in bytes.

    ``key`` and ``value`` are (address, token stride, head stride), ``slots`` (address, stride).
    """
    record, threads, rows = task.record, task.threads, task.rows
    dim, heads, normed, key_bits, value_bits = (
        record.dim,
        record.heads,
        record.normed,
        record.key_bits,
        record.value_bits,
    )
    row_bytes, index_bytes, sanitize, corrected = task.row_bytes, task.index_bytes, task.sanitize, task.corrected
    size, read = ELEMENT_BYTES[task.dtype], element_reader(task.dtype)
    block_size, key_bytes = record.block_size, record.key_bytes
    field, last_code, last_value = 2 * block_size, (1 << key_bits) - 1, float((1 << value_bits) - 1)
    scale_field = (record.fields - 2) * field
    spare_at, scratch_at = 4 * dim, 8 * dim
    table_at = scratch_at + 4 * threads
    place_of, rotate = place_finder(record), rotator(record, 1, 0, threads, False)
    fill_table = table_filler(record, threads)
    total_of, largest_of = _gatherer(threads)
    put_key = _code_putter(key_bits if normed else 4, record.alignment)
    put_value = _code_putter(value_bits, record.alignment)
    put_word = word_putter(record.alignment)

    @device
    def load_row(memory, row, active, thread):
        """A row's elements into shared memory; whether one of this thread's is not finite."""
        lost = float_of(0)
        i = i32(thread)
        while i < dim:
            x = float_of(0)
            if active:
                x = read(row + size * i)
                if (bits_of(x) & codec.MAGNITUDE) >= codec.INFINITY:
                    if sanitize:
                        x = codec.sanitized(x, _FP16_MAX)
                    else:
                        lost = float_of(0x3F800000)
            shared_put(memory + 4 * i, x)
            i = i32(i + threads)
        return lost

    @device
    def clear(memory, thread):
        i = i32(thread)
        while i < dim:
            shared_put(memory + 4 * i, float_of(0))
            i = i32(i + threads)

    @device
    def e4m3_of(x):
        if (bits_of(x) & codec.MAGNITUDE) >= codec.INFINITY:
            return i32(E4M3_NAN)
        return codec.encode_e4m3(x)

    @device
    def store_e4m3(memory, codes, thread):
        at = i32(4 * thread)
        while at < dim:
            a, b = e4m3_of(shared_fetch(memory + 4 * at)), e4m3_of(shared_fetch(memory + 4 * at + 4))
            c, d = e4m3_of(shared_fetch(memory + 4 * at + 8)), e4m3_of(shared_fetch(memory + 4 * at + 12))
            put_word(codes + at, a | (b << 8) | (c << 16) | (d << 24))
            at = i32(at + 4 * threads)

    @device
    def index_of(x, table):
        """How many midpoints of neighbouring centroids are at most a number."""
        index = i32(0)
        for i in range(last_code):
            middle = mul(add(shared_fetch(table + 4 * i), shared_fetch(table + 4 * i + 4)), 0.5)
            if middle <= x:
                index = i32(index + 1)
        return index

    @device
    def store_direction(memory, codes, numbers, active, lost, centroids, rotation, thread):
        table, scratch = memory + table_at, memory + scratch_at
        fill_table(table, centroids, thread)
        lost = largest_of(scratch, lost, thread) > 0
        if lost:
            clear(memory, thread)
        squares = float_of(0)
        i = i32(thread)
        while i < dim:
            x = shared_fetch(memory + 4 * i)
            squares = add(squares, mul(x, x))
            i = i32(i + threads)
        norm = sqrt(total_of(scratch, squares, thread))
        divisor = add(norm, _NORM_FLOOR)
        i = i32(thread)
        while i < dim:
            shared_put(memory + 4 * i, div(shared_fetch(memory + 4 * i), divisor))
            i = i32(i + threads)
        rotate(memory, memory + spare_at, rotation, thread)
        squares = float_of(0)
        at = i32(OCTET * thread)
        while at < dim:
            word = 0
            for i in range(OCTET):
                index = index_of(shared_fetch(memory + 4 * (at + i)), table)
                centroid = shared_fetch(table + 4 * index)
                squares = add(squares, mul(centroid, centroid))
                word |= index << (key_bits * i)
            if active:
                put_key(codes, at, 0 if lost else word)
            at = i32(at + OCTET * threads)
        if corrected:
            length = sqrt(add(total_of(scratch, squares, thread), _CORRECTION_FLOOR))
            norm = mul(norm, div(1.0, length))
        if active and thread == 0:
            put16(numbers, _fp16(norm, lost))

    @device
    def store_value(memory, codes, numbers, active, lost, thread):
        scratch = memory + scratch_at
        lost = largest_of(scratch, lost, thread) > 0
        if lost:
            clear(memory, thread)
        barrier()
        low = high = shared_fetch(memory)
        i = i32(thread)
        while i < dim:
            x = shared_fetch(memory + 4 * i)
            if x > high:
                high = x
            if x < low:
                low = x
            i = i32(i + threads)
        high = largest_of(scratch, high, thread)
        low = _negative(largest_of(scratch, _negative(low), thread))
        high, low = codec.saturated(high, _FP16_MAX, False), codec.saturated(low, _FP16_MAX, False)
        low = add(low, 0.0)  # a zero of either sign may be the least: it is stored as +0
        scale = div(sub(high, low), last_value)
        scale = float_of(max(bits_of(scale), _SCALE_FLOOR))
        at = i32(OCTET * thread)
        while at < dim:
            word = 0
            for i in range(OCTET):
                steps = add(div(sub(shared_fetch(memory + 4 * (at + i)), low), scale), 0.5)
                if not steps > 0.0:
                    steps = float_of(0)
                if steps > last_value:
                    steps = float_of(bits_of(last_value))
                word |= truncated(steps) << (value_bits * i)
            if active:
                put_value(codes, at, word)
            at = i32(at + OCTET * threads)
        if active and thread == 0:
            put16(numbers, _fp16(scale, lost))
            put16(numbers + field, _fp16(low, lost))

    @device
    def store_key(memory, codes, numbers, active, lost, centroids, rotation, thread):
        if normed:
            store_direction(memory, codes, numbers, active, lost, centroids, rotation, thread)
        elif active:
            store_e4m3(memory, codes, thread)

    def kernel(cache, key, value, slots, centroids, rotation, tokens, num_slots, block_stride):
        memory = address_of(cuda.shared.array(0, types.float64)) + row_bytes * cuda.threadIdx.y
        thread = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * rows + cuda.threadIdx.y
        token = row // heads
        head = row - token * heads
        active = False
        codes, numbers = i64(0), i64(0)
        if token < tokens:
            slot = fetch_index(slots[0] + token * slots[1], index_bytes)
            if slot >= 0 and slot < num_slots:
                active = True
                block = slot // block_size
                codes, numbers = place_of(cache, block, slot - block * block_size, head, block_stride)
        lost = load_row(memory, key[0] + token * key[1] + head * key[2], active, thread)
        barrier()
        store_key(memory, codes, numbers, active, lost, centroids, rotation, thread)
        barrier()
        lost = load_row(memory, value[0] + token * value[1] + head * value[2], active, thread)
        barrier()
        store_value(memory, codes + key_bytes, numbers + scale_field, active, lost, thread)

    return kernel


def load_kv_kernel(task: KVTask):
    """The kernel that loads; see :func:`store_kv_kernel`."""
    record, threads, rows = task.record, task.threads, task.rows
    dim, heads, normed, key_bits, value_bits = (
        record.dim,
        record.heads,
        record.normed,
        record.key_bits,
        record.value_bits,
    )
    row_bytes, index_bytes, largest = task.row_bytes, task.index_bytes, task.dtype_max
    size, write = ELEMENT_BYTES[task.dtype], element_writer(task.dtype)
    block_size, key_bytes = record.block_size, record.key_bytes
    field, most = 2 * block_size, (1 << value_bits) - 1
    scale_field = (record.fields - 2) * field
    spare_at, table_at = 4 * dim, 8 * dim + 4 * threads
    place_of, rotate = place_finder(record), rotator(record, 1, 0, threads, True)
    fill_table = table_filler(record, threads)
    fetch_key = code_fetcher(key_bits if normed else 4, record.alignment)
    fetch_value = code_fetcher(value_bits, record.alignment)
    last_code = (1 << key_bits) - 1

    @device
    def read_key(memory, codes, numbers, known, centroids, rotation, thread):
        """A key into shared memory."""
        if normed:
            fill_table(memory + table_at, centroids, thread)
            barrier()
            norm = float_of(0)
            if known:
                norm = float_of_half(fetch16(numbers))
            at = i32(OCTET * thread)
            while at < dim:
                word = i32(0)
                if known:
                    word = fetch_key(codes, at)
                for i in range(OCTET):
                    centroid = shared_fetch(memory + table_at + 4 * ((word >> (key_bits * i)) & last_code))
                    shared_put(memory + 4 * (at + i), mul(norm, centroid))
                at = i32(at + OCTET * threads)
            rotate(memory, memory + spare_at, rotation, thread)
        else:
            i = i32(thread)
            while i < dim:
                x = float_of(0)
                if known:
                    x = codec.decode_e4m3(fetch8(codes + i))
                shared_put(memory + 4 * i, x)
                i = i32(i + threads)
            barrier()

    def kernel(cache, key, value, slots, centroids, rotation, tokens, num_slots, block_stride):
        memory = address_of(cuda.shared.array(0, types.float64)) + row_bytes * cuda.threadIdx.y
        thread = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * rows + cuda.threadIdx.y
        token = row // heads
        head = row - token * heads
        known = False
        codes, numbers = i64(0), i64(0)
        if token < tokens:
            slot = fetch_index(slots[0] + token * slots[1], index_bytes)
            if slot >= 0 and slot < num_slots:
                known = True
                block = slot // block_size
                codes, numbers = place_of(cache, block, slot - block * block_size, head, block_stride)
        read_key(memory, codes, numbers, known, centroids, rotation, thread)
        if token < tokens:
            target = key[0] + token * key[1] + head * key[2]
            i = i32(thread)
            while i < dim:
                x = float_of(0)
                if known:
                    x = codec.saturated(shared_fetch(memory + 4 * i), largest, False)
                write(target + size * i, x)
                i = i32(i + threads)
            scale, zero = float_of(0), float_of(0)
            if known:
                scale = float_of_half(fetch16(numbers + scale_field))
                zero = float_of_half(fetch16(numbers + scale_field + field))
            target = value[0] + token * value[1] + head * value[2]
            at = i32(OCTET * thread)
            while at < dim:
                word = i32(0)
                if known:
                    word = fetch_value(codes + key_bytes, at)
                for i in range(OCTET):
                    x = add(mul(float_of_code((word >> (value_bits * i)) & most), scale), zero)
                    write(target + size * (at + i), codec.saturated(x, largest, False))
                at = i32(at + OCTET * threads)

    return kernel


@device
def float_of_code(code):
    """A small integer as fp32: put under the exponent of 2**23, less that."""
    return sub(float_of(0x4B000000 | code), 8388608.0)
