"""Pool two tokens, normalise, and save rows to rings, in the arithmetic that every backend rounds alike.

    norm    blocks of [tokens, 32 threads]: a thread takes four quads of a row, 128 values apart, which is the order in
            which the specification adds squares; the threads' sums meet in shared memory
    save    blocks of [tokens, threads]: a thread copies quads of a row

Rows are saved by a kernel of their own, after every row has been read: a ring's row may be read and overwritten by
tokens of different blocks.
"""

from __future__ import annotations

import dataclasses

from numba import cuda, types

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.primitives import (
    add,
    address_of,
    bits_of,
    device,
    div,
    fetch16,
    fetch128,
    fetch_float,
    fetch_index,
    float_of,
    i32,
    i64,
    mul,
    put16,
    put64,
    put128,
    put_float,
    shared_fetch,
    shared_put,
    sqrt,
    sub,
)
from mxkv.backends.numba_cuda.rows import float_of_bf16
from mxkv.contracts import COMPRESS_DIM, RING_DIM
from mxkv.numerics import EXP2_COEFFICIENTS, LOG2_E

LANES = 32  # partial sums of a row
_QUADS = COMPRESS_DIM // (4 * LANES)  # of one partial sum
_BETWEEN = 4 * LANES  # values from one of its quads to the next
_C1, _C2, _C3, _C4, _C5 = EXP2_COEFFICIENTS
_INTEGERS = 12582912.0  # 1.5 * 2**23: added to a small fp32, it rounds it to an integer
_INTEGERS_BITS = 0x4B400000
_MOST_HALVINGS = 126.0
_MEAN = 1.0 / COMPRESS_DIM


@dataclasses.dataclass(frozen=True)
class CompressTask:
    """What the kernels are compiled for.

    Attributes:
        ratio: 1, or 2: pool the two tokens of each group.
        capacity: Rows of a ring.
        row_stride: From one row of a ring to the next, in bytes.
        previous: Whether the call has rows of other ranks.
        marks: Whether the slots of those tokens that close a group are asked for, in the cache that they go to.
        aligned: Whether every row of fp32 starts at a multiple of 16 bytes.
        position_bytes, slot_bytes, start_bytes, request_bytes, previous_bytes, cache_slot_bytes: Of the indices.
        threads: Of a token; at most 32.
        tokens: Of a block.
    """

    ratio: int
    capacity: int
    row_stride: int
    previous: bool
    marks: bool
    aligned: bool
    position_bytes: int
    slot_bytes: int
    start_bytes: int
    request_bytes: int
    previous_bytes: int
    cache_slot_bytes: int
    threads: int
    tokens: int


def _quad_reader(aligned):
    """A function that reads four fp32."""
    if not aligned:

        @device
        def read_quad(address):
            return fetch_float(address), fetch_float(address + 4), fetch_float(address + 8), fetch_float(address + 12)

    else:

        @device
        def read_quad(address):
            a, b, c, d = fetch128(address)
            return float_of(a), float_of(b), float_of(c), float_of(d)

    return read_quad


def _quad_copier(aligned):
    """A function that copies four fp32."""

    @device
    def copy_quad(source, target):
        if aligned:
            a, b, c, d = fetch128(source)
            put128(target, a, b, c, d)
        else:
            for i in range(4):
                put_float(target + 4 * i, fetch_float(source + 4 * i))

    return copy_quad


@device
def pooled(x, y, x_score, y_score):
    """Two values, weighed by the softmax of their scores; see :func:`mxkv.numerics.softmax_of_two`."""
    difference = sub(y_score, x_score)
    halvings = mul(float_of(bits_of(difference) & codec.MAGNITUDE), LOG2_E)
    rounded = add(halvings, _INTEGERS)
    fraction = sub(sub(rounded, _INTEGERS), halvings)
    power = add(mul(_C5, fraction), _C4)
    power = add(mul(power, fraction), _C3)
    power = add(mul(power, fraction), _C2)
    power = add(mul(power, fraction), _C1)
    power = add(mul(power, fraction), 1.0)
    smaller = mul(power, float_of((_INTEGERS_BITS + 127 - bits_of(rounded)) << 23))
    if halvings >= _MOST_HALVINGS:
        smaller = float_of(0)
    large = div(1.0, add(smaller, 1.0))
    small = mul(smaller, large)
    if difference >= 0:
        return add(mul(x, small), mul(y, large))
    return add(mul(x, large), mul(y, small))


def _request_finder(task: CompressTask):
    """A function from a token to whether it is one of its request's, and where that begins and ends."""
    start_bytes, request_bytes = task.start_bytes, task.request_bytes

    @device
    def request_of(token, tokens, starts, of_token, requests):
        request = fetch_index(of_token[0] + token * of_token[1], request_bytes)
        if request < 0 or request >= requests:
            return False, i64(0), i64(0), i64(0)
        at = starts[0] + request * starts[1]
        begin = min(max(fetch_index(at, start_bytes), 0), tokens)
        end = min(max(fetch_index(at + starts[1], start_bytes), 0), tokens)
        return begin <= token and token < end, request, begin, end

    return request_of


def norm_kernel(task: CompressTask):
    """The kernel that pools and normalises, as a Python function of addresses and numbers; strides are in bytes.

    Tuples are (address, stride), ``ring`` is (address, stride of blocks, slots), ``previous`` (address, stride, rows,
    address and stride of their indices), ``marks`` (address and stride of the tokens' slots in a cache, and the address
    of those that the closing tokens have, int64, -1 for the others).
    """
    pools, previous, capacity, row_stride = task.ratio == 2, task.previous, task.capacity, task.row_stride
    slot_bytes, position_bytes, previous_bytes = task.slot_bytes, task.position_bytes, task.previous_bytes
    threads, block_tokens, marked, cache_slot_bytes = task.threads, task.tokens, task.marks, task.cache_slot_bytes
    turns = LANES // threads
    read_quad, request_of = _quad_reader(task.aligned), _request_finder(task)
    score = 4 * COMPRESS_DIM

    @device
    def predecessor(token, tokens, rows, positions, slots, starts, of_token, ring, others, requests, slot):
        """The address of the row before a token's, if the token closes a group; else 0."""
        inside, request, begin, _ = request_of(token, tokens, starts, of_token, requests)
        position = fetch_index(positions[0] + token * positions[1], position_bytes)
        if not inside or position < 0 or position % 2 == 0:
            return i64(0)
        if token - begin <= 1 and fetch_index(slots[0] + begin * slots[1], slot_bytes) < 0:
            return i64(0)  # the first group hangs on the first token's slot
        if token > begin:
            return rows[0] + (token - 1) * rows[1]
        if previous:
            index = fetch_index(others[3] + request * others[4], previous_bytes)
            if index >= others[2]:
                return i64(0)
            if index >= 0:
                return others[0] + index * others[1]
        if slot >= ring[2]:
            return i64(0)
        return ring[0] + slot // capacity * ring[1] + (position - 1) % capacity * row_stride

    @device
    def quad_of(row, before, at):
        """Four values of a token's latent, before it is normalised."""
        x = read_quad(row + 4 * at)
        if not pools:
            return x
        y = read_quad(before + 4 * at)
        x_score, y_score = read_quad(row + score + 4 * at), read_quad(before + score + 4 * at)
        return (
            pooled(y[0], x[0], y_score[0], x_score[0]), pooled(y[1], x[1], y_score[1], x_score[1]),
            pooled(y[2], x[2], y_score[2], x_score[2]), pooled(y[3], x[3], y_score[3], x_score[3]),
        )  # fmt: skip

    @device
    def squares_of(row, before, at):
        """The sums of the squares of two pairs."""
        a, b, c, d = quad_of(row, before, at)
        return add(mul(a, a), mul(b, b)), add(mul(c, c), mul(d, d))

    def kernel(rows, positions, slots, starts, of_token, ring, others, weight, out, marks, eps, tokens, requests):
        memory = address_of(cuda.shared.array(0, types.float64)) + 4 * LANES * cuda.threadIdx.y
        token = i64(cuda.blockIdx.x) * block_tokens + cuda.threadIdx.y
        row, before = i64(0), i64(0)
        if token < tokens:
            slot = fetch_index(slots[0] + token * slots[1], slot_bytes)
            if slot >= 0:
                row = rows[0] + token * rows[1]
                if pools:
                    before = predecessor(
                        token, tokens, rows, positions, slots, starts, of_token, ring, others, requests, slot
                    )
                    if before == 0:
                        row = i64(0)
            if marked and cuda.threadIdx.x == 0:
                chosen = i64(-1)
                if row != 0:
                    chosen = fetch_index(marks[0] + token * marks[1], cache_slot_bytes)
                put64(marks[2] + 8 * token, chosen)
        if row != 0:
            for turn in range(turns):
                lane = i32(cuda.threadIdx.x + turn * threads)
                a, b = squares_of(row, before, 4 * lane)
                c, d = squares_of(row, before, 4 * lane + _BETWEEN)
                e, f = squares_of(row, before, 4 * lane + 2 * _BETWEEN)
                g, h = squares_of(row, before, 4 * lane + 3 * _BETWEEN)
                shared_put(memory + 4 * lane, add(add(add(a, e), add(c, g)), add(add(b, f), add(d, h))))
        cuda.syncthreads()
        width = LANES // 2
        while width > 0:
            # Halves are added by the threads of the first half; the others' sums are not read again.
            lane = i32(cuda.threadIdx.x)
            while lane < width and row != 0:
                at = memory + 4 * lane
                shared_put(at, add(shared_fetch(at), shared_fetch(at + 4 * width)))
                lane = i32(lane + threads)
            cuda.syncthreads()
            width = width // 2
        if row != 0:
            root = sqrt(add(mul(shared_fetch(memory), _MEAN), eps))
            reciprocal = div(1.0, root)
            for turn in range(turns):
                lane = i32(cuda.threadIdx.x + turn * threads)
                for i in range(_QUADS):
                    at = 4 * lane + i * _BETWEEN
                    x = quad_of(row, before, at)
                    for j in range(4):
                        factor = float_of_bf16(fetch16(weight + 2 * (at + j)))
                        value = mul(mul(x[j], reciprocal), factor)
                        put16(out[0] + token * out[1] + 2 * (at + j), codec.encode_bf16(value))

    return kernel


def save_kernel(task: CompressTask):
    """The kernel that saves each chunk's last rows to its ring; see :func:`norm_kernel`."""
    capacity, row_stride, slot_bytes, block_tokens = task.capacity, task.row_stride, task.slot_bytes, task.tokens
    threads = task.threads
    copy_quad, request_of = _quad_copier(task.aligned), _request_finder(task)

    def kernel(rows, slots, starts, of_token, ring, tokens, requests):
        token = i64(cuda.blockIdx.x) * block_tokens + cuda.threadIdx.y
        if token < tokens:
            slot = fetch_index(slots[0] + token * slots[1], slot_bytes)
            inside, _, begin, end = request_of(token, tokens, starts, of_token, requests)
            saved = inside and token >= end - capacity and slot >= 0 and slot < ring[2]
            if saved and fetch_index(slots[0] + begin * slots[1], slot_bytes) >= 0:
                source = rows[0] + token * rows[1]
                target = ring[0] + slot // capacity * ring[1] + slot % capacity * row_stride
                at = i32(4 * cuda.threadIdx.x)
                while at < RING_DIM:
                    copy_quad(source + 4 * at, target + 4 * at)
                    at = i32(at + 4 * threads)

    return kernel


def scatter_kernel(task: CompressTask):
    """The kernel that saves rows to ring slots as it is told."""
    capacity, row_stride, slot_bytes, block_tokens = task.capacity, task.row_stride, task.slot_bytes, task.tokens
    threads, copy_quad = task.threads, _quad_copier(task.aligned)

    def kernel(rows, slots, ring, tokens):
        token = i64(cuda.blockIdx.x) * block_tokens + cuda.threadIdx.y
        if token < tokens:
            slot = fetch_index(slots[0] + token * slots[1], slot_bytes)
            if slot >= 0 and slot < ring[2]:
                target = ring[0] + slot // capacity * ring[1] + slot % capacity * row_stride
                at = i32(4 * cuda.threadIdx.x)
                while at < RING_DIM:
                    copy_quad(rows[0] + token * rows[1] + 4 * at, target + 4 * at)
                    at = i32(at + 4 * threads)

    return kernel
