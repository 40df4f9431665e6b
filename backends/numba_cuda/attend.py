"""Attention over latent rows: one kernel for every format and way to select rows, in fp32 throughout.

    grid      one block for (query, HEADS of its heads, one split of its rows); then, if there are several splits, one
              for (query, head), which merges them
    tile      ROWS rows, decoded into shared memory [ROWS, dim]; a query's heads stay there too [HEADS, dim]
    logits    a thread sums 4 heads x 4 rows (2 where there are no more) over a part of the dims; the parts meet in
              shared memory
    sums      a thread holds some of the dims for all HEADS
    reads     selected records, once for each HEADS heads

There are no tensor cores here: 2 * HEADS operations a value are what the time goes into, and what they read of shared
memory is read in 16 bytes and takes part in several of them.
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
    put_float,
    shared_fetch,
    shared_fetch64,
    shared_fetch128,
    shared_put,
    shared_put64,
    shared_put128,
    sub,
)
from mxkv.backends.numba_cuda.rows import ELEMENT_BYTES, element_reader, element_writer, float_of_bf16
from mxkv.backends.numba_cuda.tasks import Record

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
_BF16_MAX = 0x7F7F0000
_MINUS_INFINITY = -0x800000
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
        threads, block_heads, block_rows: See :class:`~mxkv.backends.numba_cuda.config.AttendConfig`.
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

    @property
    def group(self) -> int:
        """Heads of a query that read the same rows."""
        return self.heads

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // self.block_heads)

    @property
    def shared(self) -> Shared:
        return Shared(self.record.dim, self.threads, self.block_heads, self.block_rows)


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


class Source(NamedTuple):
    """What an attention reads, as functions that its kernel calls.

    Attributes:
        bounds_of: From the selection, a query and a length to where the query's rows begin, how many they are, and the
            row of a table that names them.
        place_of: From a row to two addresses, the first one 0 where there is no such row.
        load_tile: By it a block decodes a tile's rows into shared memory; it is told whether all of them exist.
        prepare: What a block does to its queries, in shared memory, before it begins.
    """

    bounds_of: Any
    place_of: Any
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
    def place_of(rows, row, at, count, begin, cache, cache_head, num_slots, block_stride):
        if at >= count:
            return i64(0), i64(0)
        if pages:
            block = fetch_index(rows[0] + row * rows[1] + at // block_size * rows[2], index_bytes)
            place = at % block_size
            if block < 0 or block >= num_slots // block_size:
                return i64(0), i64(0)
        else:
            slot = fetch_index(rows[0] + row * rows[1] + (begin + at) * rows[2], index_bytes)
            if slot < 0 or slot >= num_slots:
                return i64(0), i64(0)
            block, place = slot // block_size, slot % block_size
        page = cache + block * block_stride
        return page + place * value_stride, page + scale_offset + place * scale_stride

    @device
    def prepare(memory, rows, thread):
        pass

    return Source(bounds_of, place_of, _tile_loader(task), prepare)


def _tile_loader(task: AttendTask):
    """A function by which a block decodes a tile's rows into shared memory."""
    record, rows, threads = task.record, task.block_rows, task.threads
    step, dim, body, size, keys_at = record.step, record.dim, record.body, task.shared.row, task.shared.keys
    skipped = dim % 2 if step == _PAIR else 0
    steps = -(-dim // step)
    items, tailed = rows * steps, body < dim  # a last item is done by several threads, so that all have one
    turns = -(-items // threads)
    in_step = tailed and threads % steps == 0  # a thread's items are all of the body, or all of the tail
    mixed = tailed and not in_step
    decode_body, decode_tail, is_plain = step_decoder(record, False)
    octets = step != _PAIR

    @device
    def tidy(x):
        """What a load to bf16 gives."""
        return float_of_bf16(codec.encode_bf16(codec.saturated(x, _BF16_MAX, False)))

    @device
    def put_eight(address, x, first):
        shared_put128(address, x[0], x[1], x[2], x[3])
        shared_put128(address + 16, x[4], x[5], x[6], x[7])

    @device
    def put_two(address, x, first):
        if first:
            shared_put(address, x[0])
        shared_put(address + 4, x[1])

    @device
    def tidy_eight(x):
        return tidy(x[0]), tidy(x[1]), tidy(x[2]), tidy(x[3]), tidy(x[4]), tidy(x[5]), tidy(x[6]), tidy(x[7])

    @device
    def tidy_two(x):
        return tidy(x[0]), tidy(x[1])

    @device
    def zeros_eight():
        zero = float_of(0)
        return zero, zero, zero, zero, zero, zero, zero, zero

    @device
    def zeros_two():
        return float_of(0), float_of(0)

    put, tidy_step, zeros = (put_eight, tidy_eight, zeros_eight) if octets else (put_two, tidy_two, zeros_two)

    @device
    def item_of(places, item):
        """A row and an element of it, and the addresses of its values and scales."""
        row = min(item, items - 1) // steps
        at = i32((min(item, items - 1) - row * steps) * step - skipped)
        return row, at, shared_fetch64(places + 16 * row), shared_fetch64(places + 16 * row + 8)

    @device
    def decoded(values_at, scales_at, at, tailed):
        """A step, and whether bf16 holds it as it is."""
        if tailed and at >= body:
            return decode_tail(values_at, at), True
        return decode_body(values_at, scales_at, at, float_of(0x3F800000)), is_plain(scales_at, at)

    @device
    def put_item(memory, row, at, x, plain):
        if not plain:
            x = tidy_step(x)
        put(memory + keys_at + row * size + 4 * at, x, at >= 0)

    @device
    def load_whole(memory, places, thread):
        """All rows exist: reads need no branch, so that four of them are on their way at a time."""
        for turn in range(0, turns, 4):
            item = i32(thread + turn * threads)
            a_row, a_at, a_values_at, a_scales_at = item_of(places, item)
            b_row, b_at, b_values_at, b_scales_at = item_of(places, i32(item + threads))
            c_row, c_at, c_values_at, c_scales_at = item_of(places, i32(item + 2 * threads))
            d_row, d_at, d_values_at, d_scales_at = item_of(places, i32(item + 3 * threads))
            if in_step and a_at >= body:
                a, b, a_plain, b_plain = decode_tail(a_values_at, a_at), decode_tail(b_values_at, b_at), True, True
                c, d, c_plain, d_plain = decode_tail(c_values_at, c_at), decode_tail(d_values_at, d_at), True, True
            else:
                a, a_plain = decoded(a_values_at, a_scales_at, a_at, mixed)
                b, b_plain = decoded(b_values_at, b_scales_at, b_at, mixed)
                c, c_plain = decoded(c_values_at, c_scales_at, c_at, mixed)
                d, d_plain = decoded(d_values_at, d_scales_at, d_at, mixed)
            put_item(memory, a_row, a_at, a, a_plain)
            put_item(memory, b_row, b_at, b, b_plain)
            put_item(memory, c_row, c_at, c, c_plain)
            put_item(memory, d_row, d_at, d, d_plain)

    @device
    def load_tile(memory, places, thread, whole):
        if whole:
            load_whole(memory, places, thread)
            return
        for turn in range(turns):
            row, at, values_at, scales_at = item_of(places, i32(thread + turn * threads))
            x, plain = zeros(), True
            if values_at != 0:
                x, plain = decoded(values_at, scales_at, at, tailed)
            put_item(memory, row, at, x, plain)

    return load_tile


def _logit_summer(task: Attention):
    """A function by which a thread sums its part of some heads x some rows."""
    shared = task.shared
    size, parts, vectors = shared.row, shared.parts, shared.padded // VECTOR
    heads, rows, my_heads, my_rows = task.block_heads, task.block_rows, shared.tile_heads, shared.tile_rows
    head_step, row_step = heads // my_heads, rows // my_rows
    count, wide = my_heads * my_rows, VECTOR * my_rows
    mixed = parts % 8 == 0  # else they are too few

    @device
    def dot(q, k, j, total):
        return fma(q[3], k[j + 3], fma(q[2], k[j + 2], fma(q[1], k[j + 1], fma(q[0], k[j], total))))

    @device
    def sum_logits(queries, keys, partial, thread):
        sums = cuda.local.array(count, types.float32)
        k = cuda.local.array(wide, types.float32)
        row = thread % row_step
        head = thread // row_step % head_step
        part = thread // (row_step * head_step)
        for i in range(count):
            sums[i] = 0
        vector = i32(part)
        if mixed:  # neighbouring parts read 64 bytes apart, neighbouring rows are 16: other banks
            vector = i32((part & -8) | ((part & 1) << 2) | ((part >> 1) & 3))
        q_at, k_at = queries + head * size, keys + row * size
        while vector < vectors:
            at = 16 * vector
            for j in range(my_rows):
                x = shared_fetch128(k_at + j * row_step * size + at)
                k[4 * j], k[4 * j + 1], k[4 * j + 2], k[4 * j + 3] = x[0], x[1], x[2], x[3]
            for i in range(my_heads):
                q = shared_fetch128(q_at + i * head_step * size + at)
                for j in range(my_rows):
                    sums[i * my_rows + j] = dot(q, k, 4 * j, sums[i * my_rows + j])
            vector = i32(vector + parts)
        at = partial + 4 * (part * heads * rows + head * rows + row)
        for i in range(my_heads):
            for j in range(my_rows):
                shared_put(at + 4 * (i * head_step * rows + j * row_step), sums[i * my_rows + j])

    return sum_logits


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
    heads, rows, threads, parts = task.block_heads, task.block_rows, task.threads, shared.parts
    all_heads, group, value_dim, dim, size = task.heads, task.group, task.value_dim, shared.dim, shared.row
    head_blocks, group_blocks = task.head_blocks, -(-group // heads)
    padded, columns = shared.padded, -(-value_dim // threads)
    last_column, all_sums = padded - 1, heads * columns
    keys_at, partial_at, logits_at, weights_at = shared.keys, shared.partial, shared.logits, shared.weights
    values_at = shared.values
    tops_at, factors_at, places_at = shared.tops, shared.factors, shared.places
    scaled, sinked, whole, q_bytes = task.scaled, task.sinked, task.whole, ELEMENT_BYTES[task.dtype]
    read_query = element_reader(task.dtype)
    bounds_of, place_of, load_tile, prepare = source
    sum_logits = _logit_summer(task)
    out_dtype = task.dtype if whole else "fp32"
    out_bytes, write = ELEMENT_BYTES[out_dtype], element_writer(out_dtype)

    together = min(heads, VECTOR)  # weights of a row that are read at once

    @device
    def two_weights(address):
        return shared_fetch(address), shared_fetch(address + 4)

    fetch_weights = shared_fetch128 if together == VECTOR else two_weights

    @device
    def load_queries(q, query, first_head, last_head, shared_at, thread):
        item = i32(thread)
        while item < heads * padded:
            head = item // padded
            at = item - head * padded
            x = float_of(0)
            if first_head + head < last_head and at < dim:
                x = read_query(q[0] + query * q[1] + (first_head + head) * q[2] + at * q_bytes)
            shared_put(shared_at + head * size + 4 * at, x)
            item = i32(item + threads)

    @device
    def divisor_of(top, total, sink, head):
        if sinked and total > 0:
            total += exp2(sub(mul(fetch_float(sink + 4 * head), LOG2E), top))
        return total if total != 0 else float_of(0x3F800000)

    def kernel(q, cache, rows_of, result, lse, sink, cache_scale, scale, num_slots, block_stride, length, splits):
        memory = address_of(cuda.shared.array(0, types.float64))
        accumulated = cuda.local.array(all_sums, types.float32)
        value = cuda.local.array(columns, types.float32)
        thread = cuda.threadIdx.x
        block = i64(cuda.blockIdx.x)
        item = block // head_blocks
        head_block = i32(block - item * head_blocks)
        cache_head = head_block // group_blocks
        first_head = cache_head * group + (head_block - cache_head * group_blocks) * heads
        last_head = cache_head * group + group
        query = item // splits
        split = item - query * splits
        begin, count, table_row = bounds_of(rows_of, query, length)
        tiles = (count + rows - 1) // rows
        share = (tiles + splits - 1) // splits
        tile, last = split * share, min(split * share + share, tiles)
        count = min(count, last * rows)
        factor = float_of(0x3F800000)
        if scaled:  # the same for every value: it stays out of the products
            factor = fetch_float(cache_scale)
            scale = mul(scale, factor)
        load_queries(q, query, first_head, last_head, memory, thread)
        prepare(memory, rows_of, thread)
        for i in range(all_sums):
            accumulated[i] = 0
        total = float_of(0)
        if thread < heads:
            shared_put(memory + tops_at + 4 * thread, float_of(_MINUS_INFINITY))
        column = i32(dim + thread)
        while column < padded:  # what a vector reads behind a row
            for row in range(rows):
                shared_put(memory + keys_at + row * size + 4 * column, float_of(0))
            column = i32(column + threads)
        turn, there = i32(0), i32(1)
        for i in range(-(-rows // threads)):
            row = thread + i * threads
            if row < rows:
                at = tile * rows + row
                place, other = place_of(
                    rows_of, table_row, at, count, begin, cache, cache_head, num_slots, block_stride
                )
                if place == 0:
                    there = i32(0)
                shared_put64(memory + places_at + 16 * row, place)
                shared_put64(memory + places_at + 16 * row + 8, other)
        while tile < last:
            places = memory + places_at + 16 * rows * turn
            whole_tile = cuda.syncthreads_and(there) != 0
            load_tile(memory, places, thread, whole_tile)
            there = i32(1)
            cuda.syncthreads()
            sum_logits(memory, memory + keys_at, memory + partial_at, thread)
            cuda.syncthreads()
            for i in range(-(-heads * rows // threads)):
                at = i32(thread + i * threads)
                if at < heads * rows:
                    logit = float_of(_MINUS_INFINITY)
                    if shared_fetch64(places + 16 * (at % rows)) != 0:
                        logit = float_of(0)
                        for part in range(parts):
                            logit += shared_fetch(memory + partial_at + 4 * (part * heads * rows + at))
                        logit = mul(logit, scale)
                    shared_put(memory + logits_at + 4 * at, logit)
            cuda.syncthreads()
            for i in range(-(-heads * rows // threads)):
                at = i32(thread + i * threads)
                if at < heads * rows:
                    head = at // rows
                    row = at - head * rows
                    top = shared_fetch(memory + tops_at + 4 * (heads * turn + head))
                    raised = top
                    for other in range(rows):
                        raised = larger(shared_fetch(memory + logits_at + 4 * (head * rows + other)), raised)
                    shift = raised
                    if raised == float_of(_MINUS_INFINITY):  # no row yet: -inf less -inf is NaN
                        shift = float_of(0)
                    weight = exp2(sub(shared_fetch(memory + logits_at + 4 * at), shift))
                    shared_put(memory + weights_at + 4 * (row * heads + head), weight)
                    if row == 0:
                        shared_put(memory + tops_at + 4 * (heads * (1 - turn) + head), raised)
                        shared_put(memory + factors_at + 4 * head, exp2(sub(top, shift)))
            for i in range(-(-rows // threads)):
                row = thread + i * threads
                if row < rows:
                    at = (tile + 1) * rows + row
                    place, other = place_of(
                        rows_of, table_row, at, count, begin, cache, cache_head, num_slots, block_stride
                    )
                    if place == 0:
                        there = i32(0)
                    shared_put64(memory + places_at + 16 * (rows * (1 - turn) + row), place)
                    shared_put64(memory + places_at + 16 * (rows * (1 - turn) + row) + 8, other)
            cuda.syncthreads()
            for head in range(heads):
                shrink = shared_fetch(memory + factors_at + 4 * head)
                for column in range(columns):
                    accumulated[head * columns + column] = mul(accumulated[head * columns + column], shrink)
            for row in range(rows):
                for column in range(columns):
                    at = min(thread + column * threads, last_column)
                    value[column] = shared_fetch(memory + values_at + row * size + 4 * at)
                for some in range(heads // together):
                    weights = fetch_weights(memory + weights_at + 4 * (row * heads + some * together))
                    for i in range(together):
                        for column in range(columns):
                            at = (some * together + i) * columns + column
                            accumulated[at] = fma(weights[i], value[column], accumulated[at])
            if thread < heads:
                total = mul(total, shared_fetch(memory + factors_at + 4 * thread))
                for row in range(rows):
                    total += shared_fetch(memory + weights_at + 4 * (row * heads + thread))
            turn = i32(1 - turn)
            tile += 1
        cuda.syncthreads()
        if thread < heads:
            head = first_head + thread
            top = shared_fetch(memory + tops_at + 4 * (heads * turn + thread))
            logarithm = float_of(_MINUS_INFINITY)
            if total > 0 or total != total:
                logarithm = top + log2(total)
            if head < last_head:
                if whole:
                    shared_put(memory + factors_at + 4 * thread, div(factor, divisor_of(top, total, sink, head)))
                    if lse != 0:
                        put_float(lse + 4 * (query * all_heads + head), mul(logarithm, LN2))
                else:
                    shared_put(
                        memory + factors_at + 4 * thread, div(factor, total if total != 0 else float_of(0x3F800000))
                    )
                    put_float(lse + 4 * ((query * all_heads + head) * splits + split), logarithm)
        cuda.syncthreads()
        base = result[0] + query * result[1]
        if not whole:
            base += split * value_dim * out_bytes
        for head in range(heads):
            if first_head + head < last_head:
                scaling = shared_fetch(memory + factors_at + 4 * head)
                for column in range(columns):
                    at = thread + column * threads
                    if at < value_dim:
                        x = mul(accumulated[head * columns + column], scaling)
                        write(base + (first_head + head) * result[2] + at * out_bytes, x)

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
