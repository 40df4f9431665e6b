"""Attention over latent rows, keys and values at once: what :mod:`.attend_core`'s kernel needs to read them."""

from __future__ import annotations

import dataclasses

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.attend_core import attention_kernel
from mxkv.backends.numba_cuda.attend_tiles import Source, Steps, tile_loader
from mxkv.backends.numba_cuda.load import step_decoder
from mxkv.backends.numba_cuda.primitives import device, fetch_index, float_of, i32, i64, shared_put16, shared_put_words
from mxkv.backends.numba_cuda.shared import Shared, latent_shared
from mxkv.backends.numba_cuda.tasks import OCTET, Record

_BF16_MAX = 0x7F7F0000
_PAIR = 2


@dataclasses.dataclass(frozen=True)
class AttendTask:
    """What the attention kernels are compiled for.

    Attributes:
        record: The cache's.
        heads: Heads of a query.
        value_dim: How many of a row's first values are summed up.
        dtype: Of the queries and of what comes out: "bf16" or "fp16".
        selection: "ragged", "dense" or "pages".
        index_bytes: Of a slot or block.
        bounds_bytes: Of a bound; 0 where there are none.
        scaled: Whether there is a scale for the whole cache.
        sinked: Whether a logit for each head joins the denominator.
        whole: Whether one split is all.
        threads, block_heads, block_rows, tile_heads, ahead, resident: See
            :class:`~mxkv.backends.numba_cuda.config.AttendConfig`.
    """

    record: Record
    heads: int
    value_dim: int
    dtype: str
    selection: str
    index_bytes: int
    bounds_bytes: int
    scaled: bool
    sinked: bool
    whole: bool
    threads: int
    block_heads: int
    block_rows: int
    tile_heads: int
    ahead: bool
    resident: int

    @property
    def group(self) -> int:
        """Heads of a query that read the same rows."""
        return self.heads

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // self.block_heads)

    @property
    def shared(self) -> Shared:
        return latent_shared(self.record.dim, self.threads, self.block_heads, self.block_rows, self.tile_heads)

    @property
    def bounds(self) -> tuple[int, int]:
        """A block's threads, and how many blocks a multiprocessor is to hold."""
        return self.threads, self.resident


def latent_source(task: AttendTask) -> Source:
    """Latent rows: they are keys and values at once."""
    ragged, pages = task.selection == "ragged", task.selection == "pages"
    index_bytes, bounds_bytes, record = task.index_bytes, task.bounds_bytes, task.record
    block_size, value_stride = record.block_size, record.value_stride
    scale_offset, scale_stride = record.scale_offset, record.scale_stride

    @device
    def bounds_of(rows, query, length):
        begin, end = i64(0), i64(length)
        if ragged:
            at = rows[3] + query * rows[4]
            begin = min(max(fetch_index(at, bounds_bytes), 0), length)
            end = min(max(fetch_index(at + rows[4], bounds_bytes), 0), length)
        elif pages:
            end = min(max(fetch_index(rows[3] + query * rows[4], bounds_bytes), 0), length)
        return begin, max(end - begin, 0), query

    @device
    def entry_of(rows, row, at, begin):
        if pages:
            return fetch_index(rows[0] + row * rows[1] + at // block_size * rows[2], index_bytes)
        return fetch_index(rows[0] + row * rows[1] + (begin + at) * rows[2], index_bytes)

    @device
    def place_of(entry, at, begin, cache, cache_head, num_slots, block_stride):
        block, place, most = entry, at % block_size, num_slots // block_size
        if not pages:
            block, place, most = entry // block_size, entry % block_size, num_slots
        if entry < 0 or entry >= most:
            return i64(0), i64(0)
        page = cache + block * block_stride
        return page + place * value_stride, page + scale_offset + place * scale_stride

    @device
    def prepare(memory, rows, thread):
        pass

    loader = tile_loader(latent_steps(task), task.block_rows, task.threads, task.ahead)
    return Source(bounds_of, entry_of, place_of, *loader, prepare)


def latent_steps(task: AttendTask) -> Steps:
    """A latent row's: what a load to bf16 gives."""
    record, step, dim, body = task.record, task.record.step, task.record.dim, task.record.body
    size, keys_at, as_is = task.shared.row, task.shared.keys, task.record.element == "bf16"
    pairs = step == _PAIR
    skipped = dim % 2 if pairs else 0
    fetch_body, fetch_tail, decode_body, _, _, packs, pack = step_decoder(record, False)

    @device
    def tidy(x):
        return codec.encode_bf16(codec.saturated(x, _BF16_MAX, False))

    @device
    def is_tail(line):
        return line * step - skipped >= body

    @device
    def fetch(values_at, scales_at, line, of_tail):
        at = line * step - skipped
        if of_tail:
            return fetch_tail(values_at, at)
        return fetch_body(values_at, scales_at, i32(at))

    @device
    def is_plain(words, of_tail):
        return of_tail or pairs or packs(words)

    @device
    def put_four(address, words):
        shared_put_words(address, words[0], words[1], words[2], words[3])

    @device
    def put_eight(memory, row, line, words, of_tail, plain):
        address = memory + keys_at + row * size + 2 * OCTET * line
        if of_tail:
            put_four(address, words)
        elif plain or packs(words):
            put_four(address, pack(words))
        else:
            x = decode_body(words, float_of(0x3F800000))
            shared_put_words(
                address,
                i32(tidy(x[0]) | tidy(x[1]) << 16), i32(tidy(x[2]) | tidy(x[3]) << 16),
                i32(tidy(x[4]) | tidy(x[5]) << 16), i32(tidy(x[6]) | tidy(x[7]) << 16),
            )  # fmt: skip

    @device
    def clear_eight(memory, row, line):
        zero = i32(0)
        shared_put_words(memory + keys_at + row * size + 2 * OCTET * line, zero, zero, zero, zero)

    @device
    def put_halves(memory, row, line, x, y):
        at = line * step - skipped
        address = memory + keys_at + row * size + 2 * at
        if at >= 0:
            shared_put16(address, x)
        shared_put16(address + 2, y)

    @device
    def put_two(memory, row, line, words, of_tail, plain):
        if of_tail or as_is:
            put_halves(memory, row, line, words[0], words[1])
        else:
            x = decode_body(words, float_of(0x3F800000))
            put_halves(memory, row, line, tidy(x[0]), tidy(x[1]))

    @device
    def clear_two(memory, row, line):
        put_halves(memory, row, line, i32(0), i32(0))

    put, clear = (put_two, clear_two) if pairs else (put_eight, clear_eight)
    return Steps(-(-dim // step), 4, body < dim, is_tail, fetch, is_plain, put, clear)


def attend_kernel(task: AttendTask):
    """The kernel that attends to latent rows; see :func:`attention_kernel`.

    ``rows_of`` is (address, query stride, step, bounds' address, bounds' step).
    """
    return attention_kernel(task, latent_source(task))
