"""Attention: one kernel for every format, for latent rows and for keys and values, in fp32 throughout.

    grid      one block for (query, HEADS of its heads, one split of its rows); then, if there are several splits, one
              for (query, head), which merges them (:mod:`.attend_merge`)
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

from numba import cuda, types

from mxkv.backends.numba_cuda.attend_sums import (
    LN2,
    MINUS_INFINITY,
    Attention,
    columns_of,
    columns_writer,
    divider,
    logarithm_of,
    logit_summer,
    softmax,
    value_fetcher,
)
from mxkv.backends.numba_cuda.attend_tiles import Source
from mxkv.backends.numba_cuda.primitives import (
    address_of,
    anew,
    device,
    div,
    fetch_float,
    float_of,
    fma,
    i32,
    i64,
    mul,
    put_float,
    shared_fetch,
    shared_fetch64,
    shared_put,
    shared_put16,
    shared_put64,
    shared_put128,
    unrolled,
)
from mxkv.backends.numba_cuda.rows import ELEMENT_BYTES, element_reader, octet_reader
from mxkv.backends.numba_cuda.shared import VECTOR
from mxkv.backends.numba_cuda.tasks import OCTET

_QUERIES_UNDER_WAY = 8  # octets of queries that a thread reads at a time


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
    factors_at, places_at, bounds_at = shared.factors, shared.places, shared.bounds
    lanes = rows // shared.each
    lookups, step_rows, my_rows, row_step = -(-rows // threads), 16 * rows, shared.tile_rows, rows // shared.tile_rows
    scaled, sinked, whole, q_bytes = task.scaled, task.sinked, task.whole, ELEMENT_BYTES[task.dtype]
    read_query = element_reader(task.dtype)
    read_aligned, read_octet = octet_reader(task.dtype, True), octet_reader(task.dtype, False)
    bounds_of, entry_of, place_of, words_of, ahead, fetch_tile, fetch_more, load_tile, prepare = source
    sum_logits, weigh, divisor_of = logit_summer(task), softmax(task), divider(sinked)
    width, my_heads, turns = columns_of(value_dim, heads, threads, value_bytes)
    column_threads, my_columns, all_sums = threads * my_heads // heads, turns * width, turns * my_heads * width
    last_column, run, all_values = -(-value_dim // width) - 1, min(my_heads, VECTOR), my_rows * my_columns
    out_dtype = task.dtype if whole else "fp32"
    out_bytes, write_columns = ELEMENT_BYTES[out_dtype], columns_writer(width, value_dim, out_dtype)

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
    def entry_at(rows_of, table_row, at, count, begin):
        """What the selection says of a row; -1 behind the last one."""
        return entry_of(rows_of, table_row, at, begin) if at < count else i64(-1)

    @device
    def put_place(target, entry, at, begin, cache, cache_head, num_slots, block_stride):
        """Where a row stands, to shared memory; 1 if there is one, else 0."""
        place, other = place_of(entry, at, begin, cache, cache_head, num_slots, block_stride)
        shared_put64(target, place)
        shared_put64(target + 8, other)
        return i32(0) if place == 0 else i32(1)

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

    put_octets = unrolled(put_octet, min(max(-(-heads * octets // threads), 1), _QUERIES_UNDER_WAY))

    @device
    def load_octets(q, query, first_head, last_head, shared_at, thread):
        aligned = (q[0] | q[1] | q[2]) % 16 == 0
        for turn in range(0, -(-heads * octets // threads), _QUERIES_UNDER_WAY):
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
    def write_head(i, sums, base, head_stride, factors, first_head, last_head, my_first, my_column):
        head = first_head + my_first + i
        if head < last_head:
            scaling = shared_fetch(factors + 4 * (my_first + i))
            for turn in range(turns):
                at = width * (my_column + turn * column_threads)
                if at < value_dim:
                    address = base + head * head_stride + at * out_bytes
                    write_columns(address, sums, (turn * my_heads + i) * width, scaling, value_dim - at)

    write_heads = unrolled(write_head, my_heads)

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
        if thread == 0:  # the loop takes them from there, so that they are in no registers
            shared_put64(memory + bounds_at, count)
            shared_put64(memory + bounds_at + 8, begin)
            shared_put64(memory + bounds_at + 16, table_row)
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
        top, total = float_of(MINUS_INFINITY), float_of(0)
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
                entry = entry_at(rows_of, table_row, at, count, begin)
                first_there &= put_place(here + 16 * row, entry, at, begin, cache, cache_head, num_slots, block_stride)
                at += rows
                entry = entry_at(rows_of, table_row, at, count, begin)
                there &= put_place(coming + 16 * row, entry, at, begin, cache, cache_head, num_slots, block_stride)
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
                    at = (i64(tile) + 2) * rows + row
                    entries[i] = entry_at(
                        rows_of, shared_fetch64(memory + bounds_at + 16), at, shared_fetch64(memory + bounds_at),
                        shared_fetch64(memory + bounds_at + 8),
                    )  # fmt: skip
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
                    at = (i64(tile) + 2) * rows + row
                    first = shared_fetch64(memory + bounds_at + 8)
                    there &= put_place(
                        after + 16 * row, i64(entries[i]), at, first, cache, cache_head, num_slots, block_stride
                    )
            here, coming, after = coming, after, here
            whole_tile = whole_next
            tile = i32(tile + 1)
        cuda.syncthreads()
        thread = again(thread)
        query, split, cache_head, first_head, last_head = work_of(anew(cuda.blockIdx.x), splits)
        if thread % lanes == 0 and thread < heads * lanes:
            block_head = thread // lanes
            head = first_head + block_head
            logarithm = logarithm_of(top, total)
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
        write_heads(sums, base, result[2], memory + factors_at, first_head, last_head, my_first, my_column)

    return kernel
