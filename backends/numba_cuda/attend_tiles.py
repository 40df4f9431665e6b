"""How a block of the attention kernel reads a tile of rows into shared memory, step by step, and ahead of its turn."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from mxkv.backends.numba_cuda.primitives import cuda, device, i32, i64, shared_fetch64, unrolled

_UNDER_WAY = 4  # steps that a thread reads at a time
_MOST_AHEAD = 8  # steps that it reads before it adds a tile up
_MOST_WORDS_AHEAD = 72  # int32, those that it reads behind that among them, while it waits for the others


class Source(NamedTuple):
    """What an attention reads, as functions that its kernel calls.

    Attributes:
        bounds_of: From the selection, a query and a length to where the query's rows begin, how many they are, and the
            row of a table that names them.
        entry_of: From a row that there is to what the table says of it; negative for one to skip.
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


def tile_loader(steps: Steps, rows: int, threads: int, ahead: bool) -> tuple[int, bool, Any, Any, Any]:
    """What a block reads its tiles with: see the last fields but one of :class:`Source`."""
    lines, count, tailed, is_tail, fetch, is_plain, put, clear = steps
    items = rows * lines
    turns = -(-items // threads)
    early = min(turns, _MOST_AHEAD) if ahead else 0  # the first steps of a tile
    late = min(turns, _MOST_WORDS_AHEAD // count) - early if ahead else 0  # the next ones
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
