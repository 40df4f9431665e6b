"""Attention over rows of pages, straight from their packed bytes: one kernel for every format, and one that merges.

    grid      one program for HEADS heads of one query and one split of its rows
    reads     q              [HEADS, d]                  once, kept
              slots          [ROWS]                      a tile
              values         [ROWS, d]                   a tile, in 16 bytes where rows are aligned so
              scales         [ROWS, groups]              a tile
    writes    out            [HEADS, value_dim]          where one split is enough
              partial        [HEADS, value_dim] fp32     else, with a logarithm for each head

A tile's rows become bf16 once and enter two products: with q over the dims, and with the weights over the rows. A width
that is no power of two is taken in chunks that are. What plain bf16 rows go through is a load, which the compiler
pipelines; packed rows are loaded a tile ahead, as words in registers.

    reduce    one program for one head of one query
    reads     partial        [splits, value_dim] fp32
    writes    out            [value_dim]

Logits are kept in base 2: the softmax's scale comes with a factor of log2(e).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mxkv.backends.triton_gpu import codec
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.formats import Element, Format, Scale

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Heads(NamedTuple):
    """A tensor [queries, heads, values] inside a kernel; values are contiguous."""

    ptr: Any
    query_stride: Any
    head_stride: Any


class Rows(NamedTuple):
    """What selects rows inside a kernel: slots or blocks, and what bounds each query's.

    ``ptr`` has a row for each query (one for all where rows are ragged), whose entries are ``step`` apart. From one row
    to the next is an argument of its own: no kernel is compiled anew for it.
    """

    ptr: Any
    step: Any
    bounds: Any
    bounds_step: Any


_NARROWEST = 16  # dims of a product's operand
_PLAIN_GROUP = 16  # values of a group where no scale says how many


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a row whose width is a power of two.

    Attributes:
        first: The first element.
        size: Elements.
        width: Elements of the tile: the size, rounded up to a power of two of at least 16.
        group: Elements that share a scale (of packed values).
        element: "e2m1", "e4m3" or "bf16".
        scale: "e8m0", "e4m3", "tensor" or "none".
        value_offset: Where its values start in a record, in bytes.
        first_scale: Which of the record's scales is its first.
    """

    first: int
    size: int
    width: int
    group: int
    element: str
    scale: str
    value_offset: int
    first_scale: int

    @property
    def bits(self) -> int:
        return {"e2m1": 4, "e4m3": 8, "bf16": 16}[self.element]

    @property
    def groups(self) -> int:
        return -(-self.size // self.group)

    @property
    def groups_padded(self) -> int:
        return self.width // self.group

    @property
    def words(self) -> int:
        """Words of four bytes of the tile's row."""
        return self.width * self.bits // 32

    @property
    def bytes(self) -> int:
        return self.size * self.bits // 8


def chunks_of(format: Format, dim: int, most: int) -> tuple[Chunk, ...]:
    """A row's chunks, in order: each of a power of two of values, at most ``most`` (but a whole group at least).

    Formats of one width have the same chunks, unless a bf16 tail or a wide group ends some: their products sum up in
    the same order.
    """
    body = dim - format.tail
    bits = 4 if format.element is Element.E2M1 else 8
    group = format.group if format.grouped else _PLAIN_GROUP
    element, scale = format.element.value, format.scale.value
    found = []
    for first, size in _powers(0, body, max(_NARROWEST, group), max(most, group)):
        width = max(size, _NARROWEST) if size & (size - 1) == 0 else _NARROWEST
        offset = first * 2 if format.element is Element.BF16 else first * bits // 8
        found.append(Chunk(first, size, width, group, element, scale, offset, first // group))
    for first, size in _powers(body, dim, _NARROWEST, most):
        width = max(size, _NARROWEST) if size & (size - 1) == 0 else _NARROWEST
        offset = body * bits // 8 + 2 * (first - body)
        found.append(Chunk(first, size, width, _PLAIN_GROUP, Element.BF16.value, Scale.NONE.value, offset, 0))
    return tuple(found)


def _powers(begin: int, end: int, least: int, most: int) -> list[tuple[int, int]]:
    """A range as parts of powers of two up to ``most``, the largest first; what is less than ``least`` is one part."""
    parts = []
    while begin < end:
        rest = end - begin
        size = min(most, 1 << (rest.bit_length() - 1)) if rest >= least else rest
        parts.append((begin, size))
        begin += size
    return parts


@dataclasses.dataclass(frozen=True, eq=False)  # one object for each task: Triton hashes it at every launch
class AttendTask:
    """What an attention kernel is compiled for.

    Attributes:
        chunks: The row's chunks.
        heads: Heads of a query.
        dim: Values of a row.
        value_dim: How many of them are summed up.
        dtype: Of the queries and of what comes out: "bf16" or "fp16".
        selection: "ragged", "dense" or "pages".
        block_size, value_stride, scale_offset, scale_stride: The page layout, in bytes.
        alignment: Bytes (1 to 16) to which every record's values are aligned.
        narrow: Whether every slot fits 32 bits.
        whole: Whether one split is all: results are written, not partials.
        block_heads: Heads of a program.
        block_rows: Rows of a tile.
        num_stages: How many tiles of plain rows are under way.
        paths: The target's instructions.
    """

    chunks: tuple[Chunk, ...]
    heads: int
    dim: int
    value_dim: int
    dtype: str
    selection: str
    block_size: int
    value_stride: int
    scale_offset: int
    scale_stride: int
    alignment: int
    narrow: bool
    whole: bool
    block_heads: int
    block_rows: int
    num_stages: int
    paths: Paths

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // self.block_heads)

    @property
    def value_chunks(self) -> int:
        """How many chunks hold values that are summed up."""
        return sum(chunk.first < self.value_dim for chunk in self.chunks)

    @property
    def packed(self) -> bool:
        return any(chunk.element != "bf16" for chunk in self.chunks)

    @property
    def aligned_heads(self) -> bool:
        return self.heads % self.block_heads == 0


@triton.jit
def _product(a, b, acc, TASK: tl.constexpr):
    """acc + a b. The interpreter multiplies the bits of bf16, so there the operands are fp32."""
    PATHS: tl.constexpr = TASK.paths
    if PATHS.interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _load_queries(q, query, head, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of the queries: a tuple of bf16 tiles [HEADS, width] whose sum they are."""
    CHUNK: tl.constexpr = TASK.chunks[INDEX]
    at = tl.arange(0, CHUNK.width)
    mask = (head < TASK.heads)[:, None] & (at < CHUNK.size)[None, :]
    pointer = q.ptr + query * q.query_stride + head[:, None].to(tl.int64) * q.head_stride + CHUNK.first + at[None, :]
    x = tl.load(pointer, mask=mask, other=0.0)
    if TASK.dtype == "bf16":
        return (x,)
    else:
        high = x.to(tl.bfloat16)
        return (high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _bounds(rows, query, length, TASK: tl.constexpr):
    """Where a query's rows begin among ragged ones, and how many it has."""
    if TASK.selection == "dense":
        return query * 0, length
    elif TASK.selection == "ragged":
        begin = tl.load(rows.bounds + query * rows.bounds_step).to(tl.int64)
        end = tl.load(rows.bounds + (query + 1) * rows.bounds_step).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), length)
        end = tl.minimum(tl.maximum(end, 0), length)
        return begin, tl.maximum(end - begin, 0)
    else:
        count = tl.load(rows.bounds + query * rows.bounds_step).to(tl.int64)
        return query * 0, tl.minimum(tl.maximum(count, 0), length)


@triton.jit
def _locate(rows, entries, begin, count, tile, num_slots, TASK: tl.constexpr):
    """A tile's rows: their blocks, their places in them, and whether they exist [ROWS]; ``entries`` select them."""
    ROWS: tl.constexpr = TASK.block_rows
    at = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = at < count
    if TASK.selection == "pages":
        entry = entries + (at // TASK.block_size) * rows.step
        block = tl.load(entry, mask=exists, other=-1).to(tl.int64)
        place = (at % TASK.block_size).to(tl.int32)
        exists = exists & (block >= 0) & (block < num_slots // TASK.block_size)
        return tl.where(exists, block, 0), place, exists
    else:
        slot = tl.load(entries + (begin + at) * rows.step, mask=exists, other=-1).to(tl.int64)
        exists = (slot >= 0) & (slot < num_slots)
        slot = tl.where(exists, slot, 0)
        if TASK.narrow:
            slot = slot.to(tl.int32)
        return slot // TASK.block_size, (slot % TASK.block_size).to(tl.int32), exists


@triton.jit
def _load_words(record, word, mask, CHUNK: tl.constexpr, TASK: tl.constexpr):
    """Four bytes of a record at each word, as int32; zeros for what is past the chunk."""
    if TASK.alignment >= 4:
        return tl.load(record.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    else:
        SIZE: tl.constexpr = TASK.alignment
        narrow = record.to(tl.pointer_type(tl.core.get_int_dtype(8 * SIZE, False)))
        words = tl.zeros(mask.shape, tl.int32)
        for part in tl.static_range(tl.constexpr(4 // SIZE)):
            inside = mask & (4 * word + SIZE * part < CHUNK.bytes)
            piece = tl.load(narrow + word * (4 // SIZE) + part, mask=inside, other=0).to(tl.int32)
            words = words | (piece << (8 * SIZE * part))
        return words


@triton.jit
def _fetch_chunk(values_at, scales_at, exists, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of a tile as it stands in memory: a tuple of its values and its scales."""
    CHUNK: tl.constexpr = TASK.chunks[INDEX]
    if CHUNK.element == "bf16":
        at = tl.arange(0, CHUNK.width)
        mask = exists[:, None] & (at < CHUNK.size)[None, :]
        record = (values_at + CHUNK.value_offset)[:, None]
        if TASK.alignment >= 2:
            values = tl.load(record.to(tl.pointer_type(tl.bfloat16)) + at[None, :], mask=mask, other=0.0)
        else:
            low = tl.load(record + 2 * at[None, :], mask=mask, other=0).to(tl.uint16)
            values = low | (tl.load(record + 2 * at[None, :] + 1, mask=mask, other=0).to(tl.uint16) << 8)
            values = values.to(tl.bfloat16, bitcast=True)
        return (values,)
    else:
        word = tl.arange(0, CHUNK.words)
        mask = exists[:, None] & (4 * word < CHUNK.bytes)[None, :]  # [ROWS, words]
        values = _load_words((values_at + CHUNK.value_offset)[:, None], word[None, :], mask, CHUNK, TASK)
        if CHUNK.scale == "tensor":
            return (values,)
        else:
            group = tl.arange(0, CHUNK.groups_padded)
            known = exists[:, None] & (group < CHUNK.groups)[None, :]  # [ROWS, groups]
            scales = tl.load(scales_at[:, None] + CHUNK.first_scale + group[None, :], mask=known, other=0)
            return (values, scales.to(tl.int32))


@triton.jit
def _fetch(cache, block, place, exists, block_stride, TASK: tl.constexpr):
    """A tile as it stands in memory: a tuple for each chunk."""
    ALIGNMENT: tl.constexpr = TASK.alignment
    page = cache.to(tl.pointer_type(tl.uint8)) + block.to(tl.int64) * block_stride
    values_at = tl.multiple_of(page + place.to(tl.int64) * TASK.value_stride, ALIGNMENT)  # [ROWS]
    scales_at = page + TASK.scale_offset + place.to(tl.int64) * TASK.scale_stride
    raw = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        raw = raw + (_fetch_chunk(values_at, scales_at, exists, index, TASK),)
    return raw


@triton.jit
def _decode_chunk(raw, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of a tile as bf16 [ROWS, width]."""
    CHUNK: tl.constexpr = TASK.chunks[INDEX]
    PATHS: tl.constexpr = TASK.paths
    if CHUNK.element == "bf16":
        return raw[0]
    else:
        if CHUNK.scale == "tensor":
            pairs = codec.decode_e4m3_quads(raw[0], None, CHUNK, PATHS)
        elif CHUNK.element == "e4m3":
            pairs = codec.decode_e4m3_quads(raw[0], raw[1], CHUNK, PATHS)
        else:
            pairs = codec.decode_e2m1_octets(raw[0], raw[1], CHUNK, PATHS)
        return codec.halves_of(pairs, PATHS)


@triton.jit
def _accumulate(carry, queries, raw, exists, scale, TASK: tl.constexpr):
    """One tile of the softmax: the largest logit, the sum of exponentials, and the sums of values so far."""
    top, total, sums = carry
    keys = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        keys = keys + (_decode_chunk(raw[index], index, TASK),)
    PATHS: tl.constexpr = TASK.paths
    HEADS: tl.constexpr = TASK.block_heads
    ROWS: tl.constexpr = TASK.block_rows
    logits = tl.zeros([HEADS, ROWS], tl.float32)
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        for part in tl.static_range(tl.constexpr(1 if TASK.dtype == "bf16" else 2)):
            logits = _product(queries[index][part], tl.trans(keys[index]), logits, TASK)
    logits = tl.where(exists[None, :], logits * scale, float("-inf"))
    raised = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(raised == float("-inf"), 0.0, raised)  # no row yet: -inf less -inf is NaN
    weights = tl.exp2(logits - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, 1)
    weights = codec.round_to_bf16(weights, PATHS)
    summed = ()
    for index in tl.static_range(tl.constexpr(TASK.value_chunks)):
        summed = summed + (_product(weights, keys[index], sums[index] * shrink[:, None], TASK),)
    return raised, total, summed


@triton.jit
def _divisor(top, total, sink, head, TASK: tl.constexpr):
    """What the sums are divided by."""
    if sink is not None:
        extra = tl.load(sink + head, mask=head < TASK.heads, other=float("-inf")) * LOG2E
        total = total + tl.where(total == 0, 0.0, tl.exp2(extra - top))
    return tl.where(total == 0, 1.0, total)


@triton.jit
def _no_sums(INDEX: tl.constexpr, TASK: tl.constexpr):
    HEADS: tl.constexpr = TASK.block_heads
    WIDTH: tl.constexpr = TASK.chunks[INDEX].width
    return tl.zeros([HEADS, WIDTH], tl.float32)


@triton.jit
def _write(result, row, head, sums, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of sums to [HEADS, value_dim] rows."""
    CHUNK: tl.constexpr = TASK.chunks[INDEX]
    PATHS: tl.constexpr = TASK.paths
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    at = tl.arange(0, CHUNK.width)
    mask = (head < TASK.heads)[:, None] & (at < CHUNK.size)[None, :] & (CHUNK.first + at < TASK.value_dim)[None, :]
    pointer = result.ptr + row + head[:, None].to(tl.int64) * result.head_stride + CHUNK.first + at[None, :]
    tl.store(pointer, codec.round_to(sums, DTYPE, PATHS), mask=mask)


@triton.jit(do_not_specialize=["row_stride", "num_slots", "length", "splits"])
def attend_kernel(
    q, cache, rows, row_stride, result, lse, sink, cache_scale, scale, num_slots, block_stride, length, splits,
    TASK: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = TASK.block_heads
    program = tl.program_id(0)
    part = program // TASK.head_blocks
    query = (part // splits).to(tl.int64)
    split = part % splits
    head = (program % TASK.head_blocks) * HEADS + tl.arange(0, HEADS)
    entries = rows.ptr + query * row_stride
    begin, count = _bounds(rows, query, length, TASK)
    tiles = ((count + TASK.block_rows - 1) // TASK.block_rows).to(tl.int32)
    share = (tiles + splits - 1) // splits
    first = split * share
    last = tl.minimum(first + share, tiles)
    count = tl.minimum(count, last.to(tl.int64) * TASK.block_rows)  # nothing of the next split is loaded ahead
    value_scale = 1.0
    if cache_scale is not None:  # the same for every value: it stays out of the products
        value_scale = tl.load(cache_scale)
        scale = scale * value_scale
    queries = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        queries = queries + (_load_queries(q, query, head, index, TASK),)
    sums = ()
    for index in tl.static_range(tl.constexpr(TASK.value_chunks)):
        sums = sums + (_no_sums(index, TASK),)
    carry = (tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32), sums)
    if TASK.paths.interpreted:
        tile = first
        while tile < last:  # the interpreter has no range of what a kernel computes
            block, place, exists = _locate(rows, entries, begin, count, tile, num_slots, TASK)
            raw = _fetch(cache, block, place, exists, block_stride, TASK)
            carry = _accumulate(carry, queries, raw, exists, scale, TASK)
            tile += 1
    elif TASK.packed:
        block, place, exists = _locate(rows, entries, begin, count, first, num_slots, TASK)
        raw = _fetch(cache, block, place, exists, block_stride, TASK)
        block, place, coming = _locate(rows, entries, begin, count, first + 1, num_slots, TASK)
        for tile in tl.range(first, last, num_stages=1):
            ahead = _fetch(cache, block, place, coming, block_stride, TASK)
            block, place, after = _locate(rows, entries, begin, count, tile + 2, num_slots, TASK)
            carry = _accumulate(carry, queries, raw, exists, scale, TASK)
            raw = ahead
            exists = coming
            coming = after
    else:
        for tile in tl.range(first, last, num_stages=TASK.num_stages):
            block, place, exists = _locate(rows, entries, begin, count, tile, num_slots, TASK)
            raw = _fetch(cache, block, place, exists, block_stride, TASK)
            carry = _accumulate(carry, queries, raw, exists, scale, TASK)
    top, total, sums = carry
    logarithm = top + tl.log2(total)
    if TASK.whole:
        row = query * result.query_stride
        factor = value_scale / _divisor(top, total, sink, head, TASK)
        if lse is not None:
            tl.store(lse + query * TASK.heads + head, logarithm * LN2, mask=head < TASK.heads)
    else:
        # [queries, heads, splits, value_dim], and logarithms [queries, heads, splits].
        row = query * result.query_stride + split * TASK.value_dim
        factor = value_scale / tl.where(total == 0, 1.0, total)
        tl.store(lse + (query * TASK.heads + head) * splits + split, logarithm, mask=head < TASK.heads)
    for index in tl.static_range(tl.constexpr(TASK.value_chunks)):
        _write(result, row, head, sums[index] * factor[:, None], index, TASK)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    partial, logs, out, lse, sink, splits, SPLITS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    TASK: tl.constexpr,
):  # fmt: skip
    PATHS: tl.constexpr = TASK.paths
    DTYPE: tl.constexpr = out.ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    query, head = program // TASK.heads, (program % TASK.heads).to(tl.int32)
    logs += program * splits
    partial += program * splits * TASK.value_dim
    all_splits = tl.arange(0, SPLITS)
    log = tl.load(logs + all_splits, mask=all_splits < splits, other=float("-inf"))
    top = tl.max(log, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(log - shift), 0)
    factor = 1.0 / _divisor(shift, total, sink, head, TASK)
    at = tl.arange(0, WIDTH)
    summed = tl.zeros((WIDTH,), tl.float32)
    for step in tl.static_range(tl.constexpr(SPLITS // TILE)):
        split = step * TILE + tl.arange(0, TILE)
        weights = tl.exp2(tl.load(logs + split, mask=split < splits, other=float("-inf")) - shift)
        mask = (split < splits)[:, None] & (at < TASK.value_dim)[None, :]
        sums = tl.load(partial + split[:, None] * TASK.value_dim + at[None, :], mask=mask, other=0.0)
        summed += tl.sum(sums * weights[:, None], 0)
    pointer = out.ptr + query * out.query_stride + head.to(tl.int64) * out.head_stride + at
    tl.store(pointer, codec.round_to(summed * factor, DTYPE, PATHS), mask=at < TASK.value_dim)
    if lse is not None:
        tl.store(lse + program, (shift + tl.log2(total)) * LN2)
