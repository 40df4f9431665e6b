"""Attention over latent rows: one kernel for every format and way to select rows, in fp32 throughout.

    grid      one block for (query, HEADS of its heads, one split of its rows); then, if there are several splits, one
              for (query, head), which merges them
    tile      ROWS rows in shared memory [ROWS, dim], as bf16, which holds them (keys and values as fp32); a query's
              heads stay there too [HEADS, dim], as fp32
    logits    a thread sums 8 heads x 4 rows (fewer where there are no more) over a part of the dims; the lanes of a
              warp add their parts up by shuffles, the warps theirs in shared memory
    weights   neighbouring lanes have a head's rows, and find its largest logit and their sum by shuffles
    sums      a thread has 4 neighbouring dims (or 2, or 1) of several heads, 64 sums where there are enough
    reads     selected records, once for each HEADS heads; of the next tile while this one is added up

There are no tensor cores here: 2 * HEADS operations a value are what the time goes into. What they read of shared
memory is read in 16 bytes (four values of bf16, for the sums, in 8) and takes part in several of them. Lanes that read
the same are neighbours: 16 bytes for each of 32 lanes are four accesses of 128 bytes, and two where they are pairs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

from numba import cuda, types

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.config import VECTOR, Shared
from mxkv.backends.numba_cuda.load import step_decoder
from mxkv.backends.numba_cuda.primitives import (
    address_of,
    anew,
    bits_of,
    device,
    div,
    exp2,
    fetch_float,
    fetch_index,
    float_of,
    fma,
    i32,
    i64,
    log2,
    mul,
    put128,
    put_float,
    shared_fetch,
    shared_fetch64,
    shared_fetch128,
    shared_fetch_four_words,
    shared_fetch_pair,
    shared_fetch_words,
    shared_put,
    shared_put16,
    shared_put64,
    shared_put128,
    shared_put_words,
    shuffle_xor,
    sub,
    unrolled,
)
from mxkv.backends.numba_cuda.rows import (
    ELEMENT_BYTES,
    element_reader,
    element_writer,
    encoder,
    octet_reader,
    pair_putter,
)
from mxkv.backends.numba_cuda.tasks import OCTET, Record

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
_BF16_MAX = 0x7F7F0000
_MINUS_INFINITY = -0x800000
_PAIR = 2
_UNDER_WAY = 4  # steps that a thread reads at a time
_MOST_AHEAD = 8  # steps that it reads before it adds a tile up
_MORE_AHEAD = 4  # and behind that, while it waits for the others


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
        return Shared(self.record.dim, self.threads, self.block_heads, self.block_rows, self.tile_heads, value_bytes=2)

    @property
    def bounds(self) -> tuple[int, int]:
        """A block's threads, and how many blocks a multiprocessor is to hold."""
        return self.threads, self.resident


class Attention(Protocol):
    """What the kernels read of a task."""

    @property
    def heads(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def head_blocks(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scaled(self) -> bool: ...
    @property
    def sinked(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def block_heads(self) -> int: ...
    @property
    def block_rows(self) -> int: ...
    @property
    def shared(self) -> Shared: ...


@device
def larger(x, y):
    """The larger number; where one is NaN, that one or the other."""
    return x if x > y else y


@device
def fetch_one(address):
    return (shared_fetch(address),)


class Source(NamedTuple):
    """What an attention reads, as functions that its kernel calls.

    Attributes:
        bounds_of: From the selection, a query and a length to where the query's rows begin, how many they are, and the
            row of a table that names them.
        entry_of: From a row to what the table says of it; negative where there is no such row.
        place_of: From that to two addresses, the first one 0 where there is no such row.
        words: int32 of a thread's that fetch_tile and fetch_more fill.
        ahead: Whether a thread reads its bytes of a tile before its turn comes.
        fetch_tile: By it a thread reads some of them, of a tile of which it is told whether all rows exist.
        fetch_more: By it, some more.
        load_tile: By it a block decodes a tile's rows into shared memory; it is told whether all of them exist, and
            where the words were read ahead, takes those.
        prepare: What a block does to its queries, in shared memory, before it begins.
    """

    bounds_of: Any
    entry_of: Any
    place_of: Any
    words: int
    ahead: bool
    fetch_tile: Any
    fetch_more: Any
    load_tile: Any
    prepare: Any


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
    def entry_of(rows, row, at, count, begin):
        if at >= count:
            return i64(-1)
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


class Steps(NamedTuple):
    """How a row is read, step by step: a row has so many ``lines`` of them.

    Attributes:
        lines: Steps of a row.
        words: int32 of a step's bytes and scales.
        tailed: Whether some steps are of a tail, which is read in another way.
        is_tail: Whether a line is.
        fetch: From a row's two addresses and a line (and whether it is of the tail) to its words.
        is_plain: Whether words are as they nearly always are, so that the cheap way of decoding is right.
        put: By it a thread decodes words into shared memory, whose address comes first, then the row: as bf16, two of
            them to a word, or as fp32. The last two arguments are whether they are of the tail, and whether they are
            plain.
        clear: By it a thread puts zeros there.
    """

    lines: int
    words: int
    tailed: bool
    is_tail: Any
    fetch: Any
    is_plain: Any
    put: Any
    clear: Any


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


def tile_loader(steps: Steps, rows: int, threads: int, ahead: bool) -> tuple[int, bool, Any, Any, Any]:
    """What a block reads its tiles with: see the last fields but one of :class:`Source`."""
    lines, count, tailed, is_tail, fetch, is_plain, put, clear = steps
    items = rows * lines
    turns = -(-items // threads)
    early = min(turns, _MOST_AHEAD) if ahead else 0  # the first steps of a tile
    late = min(turns - early, _MORE_AHEAD) if ahead else 0  # the next ones
    held = early + late
    rest = turns - held
    batch = min(rest, _UNDER_WAY)
    every = max(batch, 1)
    even = items % threads == 0 and rest % every == 0  # else several threads do the last item, so that all have one
    regular = threads % lines == 0  # a thread's items all have the same line
    mixed = tailed and not regular

    @device
    def item_of(thread, turn):
        """A row and a line of it."""
        if regular:
            row, line = thread // lines + turn * (threads // lines), thread % lines
            if not even:
                row = min(row, rows - 1)
        else:
            item = thread + turn * threads
            if not even:
                item = min(item, items - 1)
            row = item // lines
            line = item - row * lines
        return row, line

    @device
    def fetch_item(turn, words, start, places, thread, first, of_tail):
        row, line = item_of(thread, first + turn)
        values_at, scales_at = shared_fetch64(places + 16 * row), shared_fetch64(places + 16 * row + 8)
        some = fetch(values_at, scales_at, line, of_tail or (mixed and is_tail(line)))
        for i in range(count):
            words[start + count * turn + i] = some[i]

    @device
    def put_fetched(turn, memory, words, start, thread, first, of_tail):
        row, line = item_of(thread, first + turn)
        put(memory, row, line, words_of(words, start + count * turn), of_tail or (mixed and is_tail(line)), True)

    @device
    def note_plain(turn, plain, words, start, thread, first, of_tail):
        _, line = item_of(thread, first + turn)
        if not is_plain(words_of(words, start + count * turn), of_tail or (mixed and is_tail(line))):
            plain[0] = 0

    @device
    def word(words, at):
        return i32(i64(words[at]))

    @device
    def four_words(words, at):
        return word(words, at), word(words, at + 1), word(words, at + 2), word(words, at + 3)

    @device
    def six_words(words, at):
        return (
            word(words, at), word(words, at + 1), word(words, at + 2),
            word(words, at + 3), word(words, at + 4), word(words, at + 5),
        )  # fmt: skip

    words_of = {4: four_words, 6: six_words}[count]

    @device
    def all_tail(thread):
        return tailed and regular and is_tail(thread % lines)

    @device
    def load_slowly(memory, places, thread, first, end):
        """Step by step, whatever they are."""
        turn = i32(first)
        while turn < end:
            row, line = item_of(thread, turn)
            values_at, scales_at = shared_fetch64(places + 16 * row), shared_fetch64(places + 16 * row + 8)
            if values_at == 0:
                clear(memory, row, line)
            elif tailed and is_tail(line):
                put(memory, row, line, fetch(values_at, scales_at, line, True), True, False)
            else:
                put(memory, row, line, fetch(values_at, scales_at, line, False), False, False)
            turn = i32(turn + 1)

    def batch_of(size):
        """Functions by which a thread reads so many steps into its words, and by which it decodes those."""
        fetch_items, put_items = unrolled(fetch_item, max(size, 1)), unrolled(put_fetched, max(size, 1))
        note_items = unrolled(note_plain, max(size, 1))

        @device
        def fetch_batch(words, start, places, thread, first):
            if all_tail(thread):
                fetch_items(words, start, places, thread, first, True)
            else:
                fetch_items(words, start, places, thread, first, False)

        @device
        def put_some(memory, words, start, places, thread, first, of_tail):
            plain = cuda.local.array(1, types.int32)
            plain[0] = 1
            note_items(plain, words, start, thread, first, of_tail)
            if plain[0] != 0:
                put_items(memory, words, start, thread, first, of_tail)
            else:
                load_slowly(memory, places, thread, first, first + size)

        @device
        def put_batch(memory, words, start, places, thread, first):
            if all_tail(thread):
                put_some(memory, words, start, places, thread, first, True)
            else:
                put_some(memory, words, start, places, thread, first, False)

        @device
        def nothing(*arguments):
            pass

        return (fetch_batch, put_batch) if size else (nothing, nothing)

    (fetch_early, put_early), (fetch_late, put_late) = batch_of(early), batch_of(late)
    fetch_batch, put_batch = batch_of(batch)

    @device
    def forget_word(i, words, start):
        """Where nothing is read ahead: without it, registers would keep the last tile's words all the way round."""
        words[start + i] = 0

    forget_early, forget_late = (
        unrolled(forget_word, max(count * early, 1)),
        unrolled(forget_word, max(count * late, 1)),
    )

    @device
    def fetch_tile(words, places, thread, whole):
        if whole:
            fetch_early(words, 0, places, thread, 0)
        elif early > 0:
            forget_early(words, 0)

    @device
    def fetch_more(words, places, thread, whole):
        if whole:
            fetch_late(words, count * early, places, thread, early)
        elif late > 0:
            forget_late(words, count * early)

    @device
    def load_tile(memory, places, words, thread, whole):
        if not whole:
            load_slowly(memory, places, thread, 0, turns)
            return
        # Without branches, so that several reads are on their way at a time.
        fetch_batch(words, count * held, places, thread, held)
        put_early(memory, words, 0, places, thread, 0)
        put_late(memory, words, count * early, places, thread, early)
        put_batch(memory, words, count * held, places, thread, held)
        for first in range(held + batch, turns, every):
            fetch_batch(words, 0, places, thread, first)
            put_batch(memory, words, 0, places, thread, first)

    return count * (held + batch), ahead, fetch_tile, fetch_more, load_tile


def value_fetcher(value_bytes: int, count: int):
    """A function from an address of a tile's row to so many of its values (1, 2 or 4; 2 or 4 of bf16)."""
    if value_bytes == 4:
        return {1: fetch_one, 2: shared_fetch_pair, 4: shared_fetch128}[count]

    @device
    def fetch_two(address):
        word = bits_of(shared_fetch(address))
        return float_of(word << 16), float_of(word & -0x10000)

    @device
    def fetch_four(address):
        a, b = shared_fetch_words(address)
        return float_of(a << 16), float_of(a & -0x10000), float_of(b << 16), float_of(b & -0x10000)

    return {2: fetch_two, 4: fetch_four}[count]


def _logit_summer(task: Attention):
    """A function by which a block sums its logits up, but for what its warps are to add: [partials, HEADS, ROWS].

    A head's rows stand in an order of their own there: see :func:`_softmax`.
    """
    shared = task.shared
    size, query, parts, vectors = shared.row, shared.query, shared.parts, shared.padded // shared.vector
    heads, rows, my_heads, my_rows = task.block_heads, task.block_rows, shared.tile_heads, shared.tile_rows
    head_step, row_step, tile_threads = heads // my_heads, rows // my_rows, shared.tile_threads
    all_sums, wide, warp_parts = my_heads * my_rows, VECTOR * my_rows, shared.warp_parts
    turns, rest, runs_of_four = vectors // parts, vectors % parts, shared.vector // VECTOR
    query_vector = 4 * shared.vector
    square, halved = head_step > 1 and row_step > 1, max(row_step // 2, 1)
    mixed = parts % 8 == 0 and shared.value_bytes == 4  # else they are too few, or the rows are far enough apart
    turned = {2: 1, 4: 2}.get(row_step, 0)
    last = max(all_sums // warp_parts, 1)  # sums that a thread is left with
    stages = warp_parts.bit_length() - 1
    turns_of_heads = min(stages, my_heads.bit_length() - 1)
    runs = 1 << turns_of_heads
    run_heads = my_heads // runs
    last_heads, last_rows = max(last // my_rows, 1), min(last, my_rows)

    @device
    def head_and_row(lane):
        """A thread's first head and row. Neighbouring lanes have the same head, and those two apart the same row:
        what they read is then one read."""
        if square:
            quad = lane >> 2
            return i32(((lane >> 1) & 1) | (quad // halved << 1)), i32((lane & 1) | (quad % halved << 1))
        return i32(lane // row_step), i32(lane % row_step)

    @device
    def vector_of(part):
        """A part's first vector. Lanes read neighbouring rows, 16 bytes apart in the banks: their parts are as far
        apart as these reach."""
        if mixed:
            low = part & 7
            return i32((part & -8) | (((low << turned) | (low >> (3 - turned))) & 7))
        return i32(part)

    @device
    def dot(q, k, j, total):
        return fma(q[3], k[j + 3], fma(q[2], k[j + 2], fma(q[1], k[j + 1], fma(q[0], k[j], total))))

    # Two lanes that have parts of the same sums each give the other half of theirs. Which half a lane keeps differs,
    # but not in which registers it is: each lane takes its heads in an order of its own.
    @device
    def own_run(run, lane_part):
        """Which heads, in runs, a lane takes as one of its runs."""
        turned = i32(0)
        for stage in range(turns_of_heads):
            turned = i32(turned | ((lane_part >> stage) & 1) << (turns_of_heads - 1 - stage))
        return i32(run ^ turned)

    @device
    def set_run(run, q_at, start, lane_part):
        q_at[run] = i64(start + own_run(run, lane_part) * (run_heads * head_step * query))

    @device
    def move_run(run, q_at):
        q_at[run] = i64(q_at[run] + query_vector * parts)

    @device
    def add_head(i, sums, k, q_at, at):
        q = shared_fetch128(i64(q_at[i // run_heads]) + i % run_heads * head_step * query + at)
        for j in range(my_rows):
            sums[i * my_rows + j] = dot(q, k, 4 * j, sums[i * my_rows + j])

    add_heads = unrolled(add_head, my_heads)
    set_runs, move_runs = unrolled(set_run, runs), unrolled(move_run, runs)

    @device
    def add_four(part, sums, k, words, q_at):
        """Four values of each row, of those that are in ``words``."""
        for j in range(my_rows):
            if packed:
                a, b = i64(words[4 * j + 2 * part]), i64(words[4 * j + 2 * part + 1])
                k[4 * j], k[4 * j + 1] = float_of(i32(a << 16)), float_of(i32(a & -0x10000))
                k[4 * j + 2], k[4 * j + 3] = float_of(i32(b << 16)), float_of(i32(b & -0x10000))
            else:
                for i in range(VECTOR):
                    k[4 * j + i] = float_of(i32(i64(words[4 * j + i])))
        add_heads(sums, k, q_at, 16 * part)

    add_fours, packed = unrolled(add_four, runs_of_four), shared.value_bytes == 2

    @device
    def add_vector(sums, k, words, q_at, k_at):
        for j in range(my_rows):
            x = shared_fetch_four_words(k_at + j * row_step * size)
            words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = x[0], x[1], x[2], x[3]
        add_fours(sums, k, words, q_at)

    @device
    def exchange_heads(sums, count, mask):
        for i in range(count // 2):
            sums[i] = sums[i] + shuffle_xor(sums[count // 2 + i], mask)

    @device
    def exchange_rows(sums, count, upper, mask):
        for i in range(count // 2):
            mine, other = sums[i], sums[count // 2 + i]
            if upper:
                mine, other = other, mine
            sums[i] = mine + shuffle_xor(other, mask)

    @device
    def sum_logits(queries, keys, partial, thread):
        sums = cuda.local.array(all_sums, types.float32)
        k = cuda.local.array(wide, types.float32)
        words = cuda.local.array(wide, types.int32)
        q_at = cuda.local.array(runs, types.int64)
        head, row = head_and_row(thread % tile_threads)
        part = thread // tile_threads
        for i in range(all_sums):
            sums[i] = 0
        vector = vector_of(part)
        lane_part, first = part % warp_parts, i32(0)
        set_runs(q_at, queries + head * query + query_vector * vector, lane_part)
        k_at = keys + row * size + 16 * vector
        turn = i32(0)
        while turn < turns:
            add_vector(sums, k, words, q_at, k_at)
            move_runs(q_at)
            k_at += 16 * parts
            turn = i32(turn + 1)
        if rest > 0:
            if vector < rest:
                add_vector(sums, k, words, q_at, k_at)
        for stage in range(stages):
            mask, count = tile_threads << stage, all_sums >> stage
            upper = (lane_part >> stage) & 1
            if count > 1:
                if stage < turns_of_heads:
                    exchange_heads(sums, count, mask)
                else:
                    exchange_rows(sums, count, upper != 0, mask)
                first = i32(first + upper * (count // 2))
            else:
                sums[0] = sums[0] + shuffle_xor(sums[0], mask)
        head = head + first // my_rows * head_step
        at = partial + 4 * ((part // warp_parts * heads + head) * rows + row * my_rows + first % my_rows)
        for i in range(last_heads):
            if last_rows == VECTOR:
                shared_put128(
                    at + 4 * i * head_step * rows,
                    sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3],
                )  # fmt: skip
            else:
                for j in range(last_rows):
                    shared_put(at + 4 * (i * head_step * rows + j), sums[i * last_rows + j])

    return sum_logits


def _softmax(task: Attention):
    """A function by which a block's threads turn a tile's logits into weights [HEADS, ROWS], and the largest logit so
    far of a head, which its threads have, into the next one.

    A thread has ``each`` rows of one head, and the next ones are its neighbours'. Rows stand in the order 0, step,
    2 step, ..., 1, 1 + step, ... The weights take the place of the first warp's part of the logits: of those, a thread
    reads no others.
    """
    shared, heads, rows = task.shared, task.block_heads, task.block_rows
    each, partials, my_rows = shared.each, shared.partials, shared.tile_rows
    lanes, row_step, run = rows // each, rows // my_rows, min(each, VECTOR)
    partial_at, factors_at, last_head = shared.partial, shared.factors, heads - 1
    busy = heads * lanes  # threads that have logits
    all_busy = busy == task.threads
    fetch_run = value_fetcher(4, run)
    stages = lanes.bit_length() - 1

    @device
    def weigh(memory, places, whole, scale, top, thread):
        """The new top, by what the weights so far shrink, and the sum of the head's new weights."""
        logits = cuda.local.array(each, types.float32)
        head, lane = thread // lanes if all_busy else min(thread // lanes, last_head), thread % lanes
        first = lane * each
        row = first // my_rows + first % my_rows * row_step
        raised = top
        for i in range(0, each, run):
            for j in range(run):
                logits[i + j] = 0
            if all_busy or thread < busy:
                for part in range(partials):
                    some = fetch_run(memory + partial_at + 4 * ((part * heads + head) * rows + first + i))
                    for j in range(run):
                        logits[i + j] = logits[i + j] + some[j]
        for i in range(each):
            logits[i] = mul(logits[i], scale)
            if not whole:
                other = row + i // my_rows + i % my_rows * row_step
                if shared_fetch64(places + 16 * other) == 0:
                    logits[i] = float_of(_MINUS_INFINITY)
            raised = larger(logits[i], raised)
        for stage in range(stages):
            raised = larger(shuffle_xor(raised, 1 << stage), raised)
        shift = raised
        if raised == float_of(_MINUS_INFINITY):  # no row yet: -inf less -inf is NaN
            shift = float_of(0)
        shrink, added = exp2(sub(top, shift)), float_of(0)
        for i in range(each):
            logits[i] = exp2(sub(logits[i], shift))
            added = added + logits[i]
        if all_busy or thread < busy:
            at = memory + partial_at + 4 * (head * rows + first)
            for i in range(0, each, run):
                if run == VECTOR:
                    shared_put128(at + 4 * i, logits[i], logits[i + 1], logits[i + 2], logits[i + 3])
                else:
                    for j in range(run):
                        shared_put(at + 4 * (i + j), logits[i + j])
        for stage in range(stages):
            added = added + shuffle_xor(added, 1 << stage)
        if lane == 0 and (all_busy or thread < busy):
            shared_put(memory + factors_at + 4 * head, shrink)
        return raised, shrink, added

    return weigh


class Columns(NamedTuple):
    """Which sums a thread has: ``width`` neighbouring columns of ``heads`` neighbouring heads, in each of ``turns``.

    Attributes:
        width: 1, 2 or 4.
        heads: A power of two.
        turns: A thread's columns stand so many threads apart.
    """

    width: int
    heads: int
    turns: int


def columns_of(value_dim: int, heads: int, threads: int, value_bytes: int) -> Columns:
    """The way to share a block's sums in which a row takes the least time: that of its products, four warps' at once,
    or that of what they read of shared memory, 128 bytes at a time."""
    found = []
    packed = value_bytes == 2
    for width in (4, 2) if packed else (4, 2, 1):
        groups = 1
        while groups <= min(heads, threads):
            mine, turns = heads // groups, -(-value_dim // (width * (threads // groups)))
            reads, values = turns + mine / VECTOR, turns * width
            issued, moved = values * mine + reads + packed * values, values * value_bytes / 4 + mine / VECTOR
            found.append((max(issued / 4, moved), issued, Columns(width, mine, turns)))
            groups *= 2
    return min(found)[2]


def attend_kernel(task: AttendTask):
    """The kernel that attends to latent rows; see :func:`attention_kernel`.

    ``rows_of`` is (address, query stride, step, bounds' address, bounds' step).
    """
    return attention_kernel(task, latent_source(task))


def attention_kernel(task: Attention, source: Source):
    """The kernel for a task, as a Python function of addresses and numbers; strides are in bytes.

    ``q`` and ``result`` are (address, query stride, head stride); ``rows_of`` says how a query's rows are selected.
    """
    shared = task.shared
    heads, rows, threads = task.block_heads, task.block_rows, task.threads
    all_heads, group, value_dim, dim = task.heads, task.group, task.value_dim, shared.dim
    size, query_size, value_bytes = shared.row, shared.query, shared.value_bytes
    head_blocks, group_blocks, last_thread = task.head_blocks, -(-group // heads), threads - 1
    padded, octets = shared.padded, dim // OCTET
    keys_at, values_at, partial_at = shared.keys, shared.values, shared.partial
    factors_at, places_at, lanes = shared.factors, shared.places, rows // shared.each
    lookups, step_rows, my_rows, row_step = -(-rows // threads), 16 * rows, shared.tile_rows, rows // shared.tile_rows
    scaled, sinked, whole, q_bytes = task.scaled, task.sinked, task.whole, ELEMENT_BYTES[task.dtype]
    read_query = element_reader(task.dtype)
    read_aligned, read_octet = octet_reader(task.dtype, True), octet_reader(task.dtype, False)
    bounds_of, entry_of, place_of, words_of, ahead, fetch_tile, fetch_more, load_tile, prepare = source
    sum_logits, weigh = _logit_summer(task), _softmax(task)
    width, my_heads, turns = columns_of(value_dim, heads, threads, value_bytes)
    column_threads, my_columns, all_sums = threads * my_heads // heads, turns * width, turns * my_heads * width
    last_column, run, all_values = -(-value_dim // width) - 1, min(my_heads, VECTOR), my_rows * my_columns
    out_dtype = task.dtype if whole else "fp32"
    out_bytes, write, encode = ELEMENT_BYTES[out_dtype], element_writer(out_dtype), encoder(out_dtype)
    wide, put_pair = width == VECTOR and value_dim % VECTOR == 0, pair_putter(8)

    fetch_values, fetch_factors = value_fetcher(value_bytes, width), value_fetcher(4, run)
    fetch_weights = value_fetcher(4, my_rows)

    @device
    def again(thread):
        """A thread's number, from which a turn of the loop derives its addresses anew: registers are few."""
        return i32(anew(thread) & last_thread)

    @device
    def work_of(block, splits):
        """A block's query and split, its head of the cache, its first head and the one that ends its group."""
        item = block // head_blocks
        head_block = i32(block - item * head_blocks)
        cache_head = i32(head_block // group_blocks)
        first_head = cache_head * group + (head_block - cache_head * group_blocks) * heads
        query = item // splits
        return query, item - query * splits, cache_head, first_head, cache_head * group + group

    @device
    def put_octet(turn, q, query, first_head, last_head, shared_at, thread, aligned):
        item = min(thread + turn * threads, heads * octets - 1)
        head = item // octets
        at = OCTET * (item - head * octets)
        address = q[0] + query * q[1] + min(first_head + head, last_head - 1) * q[2] + at * q_bytes
        x = read_aligned(address) if aligned else read_octet(address)
        if first_head + head >= last_head:
            nothing = float_of(0)
            x = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        target = shared_at + head * query_size + 4 * at
        shared_put128(target, x[0], x[1], x[2], x[3])
        shared_put128(target + 16, x[4], x[5], x[6], x[7])

    put_octets = unrolled(put_octet, min(max(-(-heads * octets // threads), 1), _MOST_AHEAD))

    @device
    def load_octets(q, query, first_head, last_head, shared_at, thread):
        aligned = (q[0] | q[1] | q[2]) % 16 == 0
        for turn in range(0, -(-heads * octets // threads), _MOST_AHEAD):
            if aligned:
                put_octets(q, query, first_head, last_head, shared_at, thread + turn * threads, True)
            else:
                put_octets(q, query, first_head, last_head, shared_at, thread + turn * threads, False)

    @device
    def load_elements(q, query, first_head, last_head, shared_at, thread):
        item = i32(thread)
        while item < heads * padded:
            head = item // padded
            at = item - head * padded
            x = float_of(0)
            if first_head + head < last_head and at < dim:
                x = read_query(q[0] + query * q[1] + (first_head + head) * q[2] + at * q_bytes)
            shared_put(shared_at + head * query_size + 4 * at, x)
            item = i32(item + threads)

    load_queries = load_octets if dim % OCTET == 0 else load_elements

    @device
    def divisor_of(top, total, sink, head):
        if sinked and total > 0:
            total += exp2(sub(mul(fetch_float(sink + 4 * head), LOG2E), top))
        return total if total != 0 else float_of(0x3F800000)

    @device
    def columns_at(thread):
        """A thread's first column, in units of ``width``, and its first head."""
        return i32(thread % column_threads), i32(thread // column_threads * my_heads)

    @device
    def shrink_sums(sums, factors):
        for some in range(0, my_heads, run):
            shrink = fetch_factors(factors + 4 * some)
            for turn in range(turns):
                for i in range(run):
                    for column in range(width):
                        at = (turn * my_heads + some + i) * width + column
                        sums[at] = mul(sums[at], shrink[i])

    @device
    def fetch_row(row, x, values, column):
        """A thread's values of a row, as [turns, width]."""
        for turn in range(turns):
            at = value_bytes * width * min(column + turn * column_threads, last_column)
            value = fetch_values(values + row * row_step * size + at)
            for i in range(width):
                x[row * my_columns + turn * width + i] = value[i]

    @device
    def add_head(head, sums, x, weights):
        """Some rows' values times a head's weights, to a thread's sums [turns, my_heads, width]."""
        weight = fetch_weights(weights + 4 * head * rows)
        for row in range(my_rows):
            for turn in range(turns):
                for i in range(width):
                    at = (turn * my_heads + head) * width + i
                    sums[at] = fma(weight[row], x[row * my_columns + turn * width + i], sums[at])

    fetch_rows, add_heads = unrolled(fetch_row, my_rows), unrolled(add_head, my_heads)

    @device
    def write_columns(address, sums, first, scaling, left):
        """A head's sums from one of a thread's columns on, as far as there are columns."""
        if wide:
            a, b = mul(sums[first], scaling), mul(sums[first + 1], scaling)
            c, d = mul(sums[first + 2], scaling), mul(sums[first + 3], scaling)
            if not whole:
                put128(address, bits_of(a), bits_of(b), bits_of(c), bits_of(d))
            elif address % 8 == 0:
                put_pair(address, encode(a) | (encode(b) << 16), encode(c) | (encode(d) << 16))
            else:
                write(address, a)
                write(address + out_bytes, b)
                write(address + 2 * out_bytes, c)
                write(address + 3 * out_bytes, d)
        else:
            for i in range(width):
                if i < left:
                    write(address + i * out_bytes, mul(sums[first + i], scaling))

    # Four barriers a tile. What each of them keeps apart:
    #   1  the last tile's sums, which read values, weights and factors, from this tile's rows, which take the place of
    #      those values. It also shows all threads where the next tile's rows stand (written after the last barrier 4),
    #      and tells whether all of them exist.
    #   2  a tile's rows as they are written, from the logits that read them.
    #   3  the partial sums as they are written, from the softmax that reads them and puts weights in the place of some
    #      (those which the same thread has read): the next ones come after the next tile's barriers 1 and 2.
    #   4  weights and factors as they are written, from the sums that read them: the next ones come after the next
    #      tile's barriers 1 and 2 too. It also tells whether any head's largest logit was raised.
    # Where rows stand is kept for three tiles: a tile's softmax reads its own (before barrier 4), threads that read
    # ahead the next one's (after barrier 1), and those of the tile after it are written behind barrier 4, in the place
    # of the last tile's, whose softmax all threads have left then.
    def kernel(q, cache, rows_of, result, lse, sink, cache_scale, scale, num_slots, block_stride, length, splits):
        memory = address_of(cuda.shared.array(0, types.float64))
        sums = cuda.local.array(all_sums, types.float32)
        x = cuda.local.array(all_values, types.float32)
        words = cuda.local.array(words_of, types.int32)
        entries = cuda.local.array(lookups, types.int64)
        thread = i32(cuda.threadIdx.x & last_thread)
        query, split, cache_head, first_head, last_head = work_of(i32(cuda.blockIdx.x), splits)
        begin, count, table_row = bounds_of(rows_of, query, length)
        tiles = (count + rows - 1) // rows
        share = (tiles + splits - 1) // splits
        tile, last = i32(split * share), i32(min(split * share + share, tiles))
        count = min(count, i64(last) * rows)
        factor = float_of(0x3F800000)
        if scaled:  # the same for every value: it stays out of the products
            factor = fetch_float(cache_scale)
            scale = mul(scale, factor)
        load_queries(q, query, first_head, last_head, memory, thread)
        prepare(memory, rows_of, thread)
        for i in range(all_sums):
            sums[i] = 0
        for i in range(words_of):
            words[i] = 0
        top, total = float_of(_MINUS_INFINITY), float_of(0)
        column = i32(dim + thread)
        while column < padded:  # what a vector reads behind a row
            for row in range(rows):
                if value_bytes == 2:
                    shared_put16(memory + keys_at + row * size + 2 * column, i32(0))
                else:
                    shared_put(memory + keys_at + row * size + 4 * column, float_of(0))
            column = i32(column + threads)
        here = memory + places_at
        coming, after = here + step_rows, here + 2 * step_rows
        first_there, there = i32(1), i32(1)
        for i in range(lookups):
            row = thread + i * threads
            if row < rows:
                at = i64(tile) * rows + row
                entry = entry_of(rows_of, table_row, at, count, begin)
                place, other = place_of(entry, at, begin, cache, cache_head, num_slots, block_stride)
                if place == 0:
                    first_there = i32(0)
                shared_put64(here + 16 * row, place)
                shared_put64(here + 16 * row + 8, other)
                at += rows
                entry = entry_of(rows_of, table_row, at, count, begin)
                place, other = place_of(entry, at, begin, cache, cache_head, num_slots, block_stride)
                if place == 0:
                    there = i32(0)
                shared_put64(coming + 16 * row, place)
                shared_put64(coming + 16 * row + 8, other)
        whole_tile = cuda.syncthreads_and(first_there) != 0
        if ahead:
            fetch_tile(words, here, thread, whole_tile)
            fetch_more(words, here, thread, whole_tile)
        while tile < last:
            whole_next = cuda.syncthreads_and(there) != 0  # 1
            load_tile(memory, here, words, thread, whole_tile)
            for i in range(lookups):
                row = thread + i * threads
                entries[i] = i64(-1)
                if row < rows:
                    entries[i] = entry_of(rows_of, table_row, (i64(tile) + 2) * rows + row, count, begin)
            cuda.syncthreads()  # 2
            sum_logits(memory, memory + keys_at, memory + partial_at, again(thread))
            if ahead:
                fetch_tile(words, coming, thread, whole_next)
            cuda.syncthreads()  # 3
            raised, shrink, added = weigh(memory, here, whole_tile, scale, top, again(thread))
            total = fma(total, shrink, added)
            grown = i32(0)
            if raised > top:
                grown = i32(1)
            top = raised
            my_column, my_first = columns_at(thread)
            if cuda.syncthreads_or(grown) != 0:  # 4
                shrink_sums(sums, memory + factors_at + 4 * my_first)
            values, weights = memory + values_at, memory + partial_at + 4 * my_first * rows
            row = i32(0)
            while row < row_step:
                fetch_rows(x, values, my_column)
                add_heads(sums, x, weights)
                row = i32(row + 1)
                values += size
                weights += 4 * my_rows
            if ahead:
                fetch_more(words, coming, thread, whole_next)
            there = i32(1)
            for i in range(lookups):
                row = thread + i * threads
                if row < rows:
                    place, other = place_of(
                        i64(entries[i]), (i64(tile) + 2) * rows + row, begin, cache, cache_head, num_slots, block_stride
                    )
                    if place == 0:
                        there = i32(0)
                    shared_put64(after + 16 * row, place)
                    shared_put64(after + 16 * row + 8, other)
            here, coming, after = coming, after, here
            whole_tile = whole_next
            tile = i32(tile + 1)
        cuda.syncthreads()
        thread = again(thread)
        query, split, cache_head, first_head, last_head = work_of(anew(cuda.blockIdx.x), splits)
        if thread % lanes == 0 and thread < heads * lanes:
            block_head = thread // lanes
            head = first_head + block_head
            logarithm = float_of(_MINUS_INFINITY)
            if total > 0 or total != total:
                logarithm = top + log2(total)
            if head < last_head:
                if whole:
                    shared_put(memory + factors_at + 4 * block_head, div(factor, divisor_of(top, total, sink, head)))
                    if lse != 0:
                        put_float(lse + 4 * (query * all_heads + head), mul(logarithm, LN2))
                else:
                    shared_put(
                        memory + factors_at + 4 * block_head, div(factor, total if total != 0 else float_of(0x3F800000))
                    )
                    put_float(lse + 4 * ((query * all_heads + head) * splits + split), logarithm)
        cuda.syncthreads()
        my_column, my_first = columns_at(thread)
        base = result[0] + query * result[1]
        if not whole:
            base += split * value_dim * out_bytes
        for i in range(my_heads):
            head = first_head + my_first + i
            if head < last_head:
                scaling = shared_fetch(memory + factors_at + 4 * (my_first + i))
                for turn in range(turns):
                    at = width * (my_column + turn * column_threads)
                    if at < value_dim:
                        address = base + head * result[2] + at * out_bytes
                        write_columns(address, sums, (turn * my_heads + i) * width, scaling, value_dim - at)

    return kernel


def reduce_kernel(task: Attention):
    """The kernel that merges a task's splits, as a Python function: sums [queries, heads, splits, value_dim] and
    logarithms [queries, heads, splits]."""
    heads, value_dim, sinked, threads = task.heads, task.value_dim, task.sinked, task.threads
    out_bytes, write = ELEMENT_BYTES[task.dtype], element_writer(task.dtype)

    def kernel(partial, logs, out, lse, sink, splits):
        block = i64(cuda.blockIdx.x)
        query = block // heads
        head = block - query * heads
        logs += 4 * block * splits
        partial += 4 * block * splits * value_dim
        top = float_of(_MINUS_INFINITY)
        for split in range(splits):
            top = larger(fetch_float(logs + 4 * split), top)
        if top == float_of(_MINUS_INFINITY):
            top = float_of(0)
        total = float_of(0)
        for split in range(splits):
            total += exp2(sub(fetch_float(logs + 4 * split), top))
        divisor = total
        if sinked and total > 0:
            divisor += exp2(sub(mul(fetch_float(sink + 4 * head), LOG2E), top))
        if divisor == 0:
            divisor = float_of(0x3F800000)
        at = i32(cuda.threadIdx.x)
        while at < value_dim:
            summed = float_of(0)
            for split in range(splits):
                weight = exp2(sub(fetch_float(logs + 4 * split), top))
                summed = fma(fetch_float(partial + 4 * (split * value_dim + at)), weight, summed)
            write(out[0] + query * out[1] + head * out[2] + at * out_bytes, div(summed, divisor))
            at = i32(at + threads)
        if lse != 0 and cuda.threadIdx.x == 0:
            logarithm = float_of(_MINUS_INFINITY)
            if total > 0 or total != total:
                logarithm = top + log2(total)
            put_float(lse + 4 * block, mul(logarithm, LN2))

    return kernel
