"""Attention over pages of keys and values per head: what :mod:`.attend_core`'s kernel needs to read them.

A block takes the heads of one query that share a head of the cache. Queries of the same sequence read its rows each for
itself. Keys are kept as they were rotated; the queries are rotated instead.
"""

from __future__ import annotations

import dataclasses

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.attend_core import attention_kernel
from mxkv.backends.numba_cuda.attend_tiles import Source, Steps, tile_loader
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
    fetch16,
    fetch_index,
    float_of,
    float_of_half,
    i32,
    i64,
    mul,
    shared_fetch,
    shared_put128,
)
from mxkv.backends.numba_cuda.rows import word_fetcher
from mxkv.backends.numba_cuda.shared import Shared


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
        threads, block_heads, block_rows, tile_heads, ahead, resident: See
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
    ahead: bool
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
    record, shared, threads = task.record, task.shared, task.threads
    packed, windowed, normed = task.packed, task.windowed, record.normed
    table_bytes, length_bytes, start_bytes = task.table_bytes, task.length_bytes, task.start_bytes
    block_size, dim, size = record.block_size, record.dim, shared.row
    key_bits, value_bits, key_bytes = record.key_bits, record.value_bits, record.key_bytes
    last_code, most = (1 << key_bits) - 1, (1 << value_bits) - 1
    field = 2 * block_size
    scale_field = (record.fields - 2) * field
    keys_at, values_at, table_at = shared.keys, shared.values, shared.tables
    find_place = place_finder(record)
    fetch_word = word_fetcher(record.alignment)
    fetch_key = code_fetcher(key_bits if normed else 4, record.alignment)
    fetch_value = code_fetcher(value_bits, record.alignment)
    fill_table = table_filler(record, threads)
    rotate = rotator(record, task.block_heads, shared.query, threads, False)

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
    def entry_of(rows_of, sequence, at, begin):
        return fetch_index(rows_of[0] + sequence * rows_of[1] + (begin + at) // block_size * rows_of[2], table_bytes)

    @device
    def place_of(block, at, begin, cache, cache_head, num_blocks, block_stride):
        if block < 0 or block >= num_blocks:
            return i64(0), i64(0)
        return find_place(cache, block, (begin + at) % block_size, cache_head, block_stride)

    @device
    def is_tail(line):
        return False

    @device
    def fetch(codes, numbers, line, of_tail):
        """The words of eight elements: of the key and its norm, of the value, its scale and its zero."""
        at = line * OCTET
        value_codes, value_numbers = codes + key_bytes, numbers + scale_field
        value, scale, zero = fetch_value(value_codes, at), fetch16(value_numbers), fetch16(value_numbers + field)
        if normed:
            return fetch_key(codes, at), i32(0), fetch16(numbers), value, scale, zero
        return fetch_word(codes + at), fetch_word(codes + at + 4), i32(0), value, scale, zero

    @device
    def is_plain(words, of_tail):
        return True

    @device
    def put_eight(address, x):
        shared_put128(address, x[0], x[1], x[2], x[3])
        shared_put128(address + 16, x[4], x[5], x[6], x[7])

    @device
    def put(memory, row, line, words, of_tail, plain):
        at = row * size + 4 * OCTET * line
        a, b, norm, value, scale, zero = words
        if normed:
            put_eight(memory + keys_at + at, directed(memory + table_at, a, float_of_half(norm)))
        else:
            put_eight(memory + keys_at + at, e4m3_octet(a, b))
        put_eight(memory + values_at + at, spread(value, float_of_half(scale), float_of_half(zero)))

    @device
    def centroid(table, word, i, norm):
        return mul(norm, shared_fetch(table + 4 * ((word >> (key_bits * i)) & last_code)))

    @device
    def directed(table, word, norm):
        return (
            centroid(table, word, 0, norm), centroid(table, word, 1, norm), centroid(table, word, 2, norm),
            centroid(table, word, 3, norm), centroid(table, word, 4, norm), centroid(table, word, 5, norm),
            centroid(table, word, 6, norm), centroid(table, word, 7, norm),
        )  # fmt: skip

    @device
    def e4m3_octet(a, b):
        return (
            codec.decode_e4m3(a), codec.decode_e4m3(a >> 8), codec.decode_e4m3(a >> 16), codec.decode_e4m3(a >> 24),
            codec.decode_e4m3(b), codec.decode_e4m3(b >> 8), codec.decode_e4m3(b >> 16), codec.decode_e4m3(b >> 24),
        )  # fmt: skip

    @device
    def level(word, i, scale, zero):
        return add(mul(float_of_code((word >> (value_bits * i)) & most), scale), zero)

    @device
    def spread(word, scale, zero):
        return (
            level(word, 0, scale, zero), level(word, 1, scale, zero), level(word, 2, scale, zero),
            level(word, 3, scale, zero), level(word, 4, scale, zero), level(word, 5, scale, zero),
            level(word, 6, scale, zero), level(word, 7, scale, zero),
        )  # fmt: skip

    @device
    def clear(memory, row, line):
        at, nothing = row * size + 4 * OCTET * line, float_of(0)
        zeros = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        put_eight(memory + keys_at + at, zeros)
        put_eight(memory + values_at + at, zeros)

    steps = Steps(dim // OCTET, 6, False, is_tail, fetch, is_plain, put, clear)

    @device
    def prepare(memory, rows_of, thread):
        if normed:
            fill_table(memory + table_at, rows_of[10], thread)
            rotate(memory, memory + keys_at, rows_of[11], thread)
            barrier()

    loader = tile_loader(steps, task.block_rows, threads, task.ahead)
    return Source(bounds_of, entry_of, place_of, *loader, prepare)


def attend_kv_kernel(task: AttendKVTask):
    """The kernel for a task; see :func:`~mxkv.backends.numba_cuda.attend_core.attention_kernel`."""
    return attention_kernel(task, kv_source(task))
