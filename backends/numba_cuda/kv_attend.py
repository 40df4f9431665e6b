"""Attention over pages of keys and values per head: what :mod:`.attend`'s kernel needs to read them.

A block takes the heads of one query that share a head of the cache. Queries of the same sequence read its rows each for
itself. Keys are kept as they were rotated; the queries are rotated instead.
"""

from __future__ import annotations

import dataclasses

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.attend import Source, attention_kernel
from mxkv.backends.numba_cuda.config import Shared
from mxkv.backends.numba_cuda.kv_rows import (
    OCTET,
    TABLE,
    KVRecord,
    code_fetcher,
    float_of_code,
    place_finder,
    rotator,
    table_filler,
)
from mxkv.backends.numba_cuda.primitives import (
    add,
    barrier,
    device,
    fetch8,
    fetch16,
    fetch_index,
    float_of,
    float_of_half,
    i32,
    i64,
    mul,
    shared_fetch,
    shared_fetch64,
    shared_put,
)


@dataclasses.dataclass(frozen=True)
class AttendKVTask:
    """What the kernels are compiled for.

    Attributes:
        record: The cache's.
        heads: Heads of a query.
        dtype: Of the queries and of what comes out: "bf16" or "fp16".
        packed: Whether it is said where each sequence's queries start.
        windowed: Whether a query sees the last rows only.
        table_bytes, length_bytes, start_bytes: Of blocks, of lengths, of where queries start.
        sinked: Whether a logit for each head joins the denominator.
        whole: Whether one split is all.
        threads, block_heads, block_rows, tile_heads, resident: See
            :class:`~mxkv.backends.numba_cuda.config.AttendConfig`.
    """

    record: KVRecord
    heads: int
    dtype: str
    packed: bool
    windowed: bool
    table_bytes: int
    length_bytes: int
    start_bytes: int
    sinked: bool
    whole: bool
    threads: int
    block_heads: int
    block_rows: int
    tile_heads: int
    resident: int

    @property
    def scaled(self) -> bool:
        return False

    @property
    def value_dim(self) -> int:
        return self.record.dim

    @property
    def group(self) -> int:
        return self.heads // self.record.heads

    @property
    def head_blocks(self) -> int:
        return self.record.heads * -(-self.group // self.block_heads)

    @property
    def shared(self) -> Shared:
        return shared_of(self.record.dim, self.threads, self.block_heads, self.block_rows, self.tile_heads)

    @property
    def bounds(self) -> tuple[int, int]:
        """A block's threads, and how many blocks a multiprocessor is to hold."""
        return self.threads, self.resident


def shared_of(dim: int, threads: int, block_heads: int, block_rows: int, tile_heads: int) -> Shared:
    """A block's shared memory."""
    return Shared(dim, threads, block_heads, block_rows, tile_heads, apart=True, table=TABLE)


def kv_source(task: AttendKVTask) -> Source:
    """Pages of keys and values.

    ``rows_of`` is the table's address, its stride and step; the lengths' address and step; the starts' address and
    step; how many sequences and queries there are; the window; the addresses of centroids and of the rotation.
    """
    record, shared, threads, rows = task.record, task.shared, task.threads, task.block_rows
    packed, windowed, normed = task.packed, task.windowed, record.normed
    table_bytes, length_bytes, start_bytes = task.table_bytes, task.length_bytes, task.start_bytes
    block_size, dim, size = record.block_size, record.dim, shared.row
    key_bits, value_bits, key_bytes = record.key_bits, record.value_bits, record.key_bytes
    last_code, most = (1 << key_bits) - 1, (1 << value_bits) - 1
    field = 2 * block_size
    scale_field = (record.fields - 2) * field
    keys_at, values_at, table_at = shared.keys, shared.values, shared.tables
    octets = dim // OCTET
    turns = -(-rows * octets // threads)
    find_place = place_finder(record)
    fetch_key = code_fetcher(key_bits if normed else 4, record.alignment)
    fetch_value = code_fetcher(value_bits, record.alignment)
    fill_table = table_filler(record, threads)
    rotate = rotator(record, task.block_heads, size, threads, False)

    @device
    def start_of(rows_of, sequence):
        return min(max(fetch_index(rows_of[5] + sequence * rows_of[6], start_bytes), 0), rows_of[8])

    @device
    def bounds_of(rows_of, query, length):
        sequence, first, count = i64(query), i64(query), i64(1)
        if packed:
            sequence = rows_of[7] - 1
            while sequence >= 0:
                first = start_of(rows_of, sequence)
                end = start_of(rows_of, sequence + 1)
                count = end - first
                if first <= query and query < end:
                    break
                sequence -= 1
            if sequence < 0:
                return i64(0), i64(0), i64(0)
        known = min(max(fetch_index(rows_of[3] + sequence * rows_of[4], length_bytes), 0), length)
        last = query + known - first - count
        begin = i64(0)
        if windowed:
            begin = max(begin, last - rows_of[9] + 1)
        return begin, max(min(known, last + 1) - begin, 0), sequence

    @device
    def entry_of(rows_of, sequence, at, count, begin):
        if at >= count:
            return i64(-1)
        return fetch_index(rows_of[0] + sequence * rows_of[1] + (begin + at) // block_size * rows_of[2], table_bytes)

    @device
    def place_of(block, at, begin, cache, cache_head, num_blocks, block_stride):
        if block < 0 or block >= num_blocks:
            return i64(0), i64(0)
        return find_place(cache, block, (begin + at) % block_size, cache_head, block_stride)

    @device
    def put_key(memory, target, codes, numbers, at):
        if normed:
            norm, word = float_of_half(fetch16(numbers)), fetch_key(codes, at)
            for i in range(OCTET):
                centroid = shared_fetch(memory + table_at + 4 * ((word >> (key_bits * i)) & last_code))
                shared_put(target + 4 * i, mul(norm, centroid))
        else:
            for i in range(OCTET):
                shared_put(target + 4 * i, codec.decode_e4m3(fetch8(codes + at + i)))

    @device
    def put_value(target, codes, numbers, at):
        scale, zero = float_of_half(fetch16(numbers)), float_of_half(fetch16(numbers + field))
        word = fetch_value(codes, at)
        for i in range(OCTET):
            shared_put(target + 4 * i, add(mul(float_of_code((word >> (value_bits * i)) & most), scale), zero))

    @device
    def fetch_tile(words, places, thread):
        pass

    @device
    def load_tile(memory, places, words, thread, whole):
        for turn in range(turns):
            item = i32(thread + turn * threads)
            if item < rows * octets:
                row = item // octets
                at = (item - row * octets) * OCTET
                codes, numbers = shared_fetch64(places + 16 * row), shared_fetch64(places + 16 * row + 8)
                key, value = memory + keys_at + row * size + 4 * at, memory + values_at + row * size + 4 * at
                if codes != 0:
                    put_key(memory, key, codes, numbers, at)
                    put_value(value, codes + key_bytes, numbers + scale_field, at)
                else:
                    for i in range(OCTET):
                        shared_put(key + 4 * i, float_of(0))
                        shared_put(value + 4 * i, float_of(0))

    @device
    def prepare(memory, rows_of, thread):
        if normed:
            fill_table(memory + table_at, rows_of[10], thread)
            rotate(memory, memory + keys_at, rows_of[11], thread)
            barrier()

    return Source(bounds_of, entry_of, place_of, 1, False, fetch_tile, load_tile, prepare)


def attend_kv_kernel(task: AttendKVTask):
    """The kernel for a task; see :func:`~mxkv.backends.numba_cuda.attend.attention_kernel`."""
    return attention_kernel(task, kv_source(task))
