"""What a block of the attention kernel makes of a tile: logits, weights; and how its threads share the sums."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from numba import types

from mxkv.backends.numba_cuda.primitives import (
    bits_of,
    cuda,
    device,
    exp2,
    fetch_float,
    float_of,
    fma,
    i32,
    i64,
    log2,
    mul,
    put128,
    shared_fetch,
    shared_fetch64,
    shared_fetch128,
    shared_fetch_four_words,
    shared_fetch_pair,
    shared_fetch_words,
    shared_put,
    shared_put128,
    shuffle_xor,
    sub,
    unrolled,
)
from mxkv.backends.numba_cuda.rows import ELEMENT_BYTES, element_writer, encoder, pair_putter
from mxkv.backends.numba_cuda.shared import VECTOR, Shared

MINUS_INFINITY = -0x800000
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


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


def logit_summer(task: Attention):
    """A function by which a block sums its logits up, but for what its warps are to add: [partials, HEADS, ROWS].

    A head's rows stand in an order of their own there: see :func:`softmax`.
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


def softmax(task: Attention):
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
                        logits[i + j] = logits[i + j] + some[j] if part > 0 else some[j]
        for i in range(each):
            logits[i] = mul(logits[i], scale)
            if not whole:
                other = row + i // my_rows + i % my_rows * row_step
                if shared_fetch64(places + 16 * other) == 0:
                    logits[i] = float_of(MINUS_INFINITY)
            raised = larger(logits[i], raised)
        for stage in range(stages):
            raised = larger(shuffle_xor(raised, 1 << stage), raised)
        shift = raised
        if raised == float_of(MINUS_INFINITY):  # no row yet: -inf less -inf is NaN
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


@device
def logarithm_of(top, total):
    """The binary logarithm of a head's sum of exponentials, of which the largest is taken out; -inf of no row."""
    logarithm = float_of(MINUS_INFINITY)
    if total > 0 or total != total:
        logarithm = top + log2(total)
    return logarithm


def divider(sinked: bool):
    """A function that gives what a head's sums are divided by: the sum of its weights, and of its sink's if any."""

    @device
    def divisor_of(top, total, sink, head):
        if sinked and total > 0:
            total += exp2(sub(mul(fetch_float(sink + 4 * head), LOG2E), top))
        return total if total != 0 else float_of(0x3F800000)

    return divisor_of


def columns_writer(width: int, value_dim: int, dtype: str):
    """A function that writes ``width`` of a thread's sums, times a number, as a dtype, as far as there are columns.

    Fp32 is at addresses that are multiples of four columns' bytes where so many make a head.
    """
    wide, put_pair = width == VECTOR and value_dim % VECTOR == 0, pair_putter(8)
    write, encode, size, narrow = element_writer(dtype), encoder(dtype), ELEMENT_BYTES[dtype], dtype != "fp32"

    @device
    def write_columns(address, sums, first, factor, left):
        if wide:
            a, b = mul(sums[first], factor), mul(sums[first + 1], factor)
            c, d = mul(sums[first + 2], factor), mul(sums[first + 3], factor)
            if not narrow:
                put128(address, bits_of(a), bits_of(b), bits_of(c), bits_of(d))
            elif address % 8 == 0:
                put_pair(address, encode(a) | (encode(b) << 16), encode(c) | (encode(d) << 16))
            else:
                write(address, a)
                write(address + size, b)
                write(address + 2 * size, c)
                write(address + 3 * size, d)
        else:
            for i in range(width):
                if i < left:
                    write(address + i * size, mul(sums[first + i], factor))

    return write_columns
