"""Attention over pages of keys and values, straight from their packed bytes: one kernel for every format.

    grid      one warp for QUERIES rows (a row is one head of one query) of one cache head, and one split of the tokens
    reads     q              [QUERIES, dim]              once, kept
              keys           [TOKENS, key bytes]         a tile, loaded a tile ahead
              values         [TOKENS, value bytes]       likewise
              fp16 numbers   [fields, TOKENS]            likewise
    writes    out            [QUERIES, dim]              where one split is enough
              partial        [QUERIES, dim] fp32         else, with a logarithm for each row

Both products have tokens or dims as their rows and the queries as their columns, so that few queries fill the matrix
units as far as they can. Codes are loaded by the threads that the products want them in, and become operands in
registers. Thread (t, g) of 4 × 8 holds, of keys, a quarter of the dims of token g; of values, an eighth of the dims of
tokens 4 t to 4 t + 3. Which dims these are is a matter of order: queries are loaded in the keys' order, and results are
put back from the values'.

Nothing is done to an element but its look-up: a key's norm multiplies its finished score; a value is scale · code +
zero, so the scale goes into the weight, and the zero is summed once for each token. FP8 keys and centroids are taken as
fp16, and so are queries, scaled by a power of two; weights and values' codes, less their middle, as bf16.

Logits are kept in base 2: the softmax's scale comes with a factor of log2(e).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mxkv.backends.triton_gpu import codec, kv_codec
from mxkv.backends.triton_gpu.attend import LN2, LOG2E
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.kv_codec import KVTask

_FACTORS = 1024  # between 1 and 2


class Sequences(NamedTuple):
    """What sequences there are, inside a kernel: their blocks, lengths and queries."""

    table: Any
    table_stride: Any
    table_step: Any
    lengths: Any
    lengths_step: Any
    starts: Any
    starts_step: Any


@dataclasses.dataclass(frozen=True)
class KVChunk:
    """A part of a head whose width is a power of two of at least 16.

    Attributes:
        first: The first dim.
        size: Dims.
    """

    first: int
    size: int


def kv_chunks(dim: int) -> tuple[KVChunk, ...]:
    """A head's chunks, the widest first."""
    found, first = [], 0
    while first < dim:
        size = 1 << ((dim - first).bit_length() - 1)
        found.append(KVChunk(first, size))
        first += size
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class AttendKVTask(KVTask):
    """What an attention kernel is compiled for.

    Attributes:
        chunks: The head's chunks.
        query_heads: Heads of a query.
        packed: Whether sequences have several queries.
        windowed: Whether a query sees the last tokens only.
        whole: Whether one split is all: results are written, not partials.
        block_queries: Rows of queries of a program.
        block_tokens: Tokens of a tile.
        halves: The centroids times a factor, as numbers that fp16 holds; empty where the call has its own.
        lanes_first: Whether tiles of codes are [t, g, R, n], else [R, g, t, n]: as the compiler's choice of layout has
            it, a warp's threads are along t, then g.
    """

    chunks: tuple[KVChunk, ...] = ()
    query_heads: int = 1
    packed: bool = False
    windowed: bool = False
    whole: bool = True
    block_queries: int = 8
    block_tokens: int = 32
    halves: tuple[float, ...] = ()
    lanes_first: bool = True

    @property
    def group(self) -> int:
        """Query heads of a cache head."""
        return self.query_heads // self.heads

    @property
    def whole_tiles(self) -> bool:
        """Whether a tile's tokens are of one page."""
        return self.block_size % self.block_tokens == 0

    @property
    def middle(self) -> int:
        """What is taken off a value's code."""
        return 1 << (self.value_bits - 1)

    @property
    def centroids_assembly(self) -> str:
        return _centroids_assembly(self)

    @property
    def codes_assembly(self) -> str:
        return _codes_assembly(self)


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceTask:
    """What the kernel that merges partials is compiled for; see :class:`attend.AttendTask`."""

    heads: int
    value_dim: int
    paths: Paths


def halves_of_table(table: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Centroids times a factor as numbers that fp16 holds, and the factor: one under which they lose little.

    A centroid's rounding is the same for all tokens: unlike others it does not average out.
    """

    def rounded(factor: float) -> tuple[float, ...]:
        return tuple(_float_of_half(_half(c * factor)) for c in table)

    def loss(factor: float) -> float:
        return sum((half / factor - c) ** 2 for half, c in zip(rounded(factor), table, strict=True))

    best = min((2 ** (i / _FACTORS) for i in range(_FACTORS)), key=loss)
    return rounded(best), best


# Assembly. The portable twins are in the kernels.


def _float_of_half(bits: int) -> float:
    value: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    return value


def _half(x: float) -> int:
    bits: int = struct.unpack("<H", struct.pack("<e", x))[0]
    return bits


def _bytes(halves: list[int], upper: bool) -> tuple[str, str]:
    """The upper or the lower bytes of eight halves as two words."""
    words = [0, 0]
    for i, half in enumerate(halves):
        words[i // 4] |= ((half >> 8) if upper else (half & 0xFF)) << (8 * (i % 4))
    return f"0x{words[0]:08x}", f"0x{words[1]:08x}"


def _centroids_assembly(task: AttendKVTask) -> str:
    """PTX from a run of eight codes to their centroids as four words of two fp16, in order.

    A half's upper and lower byte are looked up in tables of eight, four codes at a time. Of 16 symmetric centroids the
    table has the magnitudes: the code of a negative one mirrors that of its magnitude, and a third look-up, for which a
    code's last bit means zero, gives its sign.
    """
    lines = [".reg .b32 codes, index, upper, lower, minus;"]
    if task.key_bits == 4:
        halves = [_half(c) for c in task.halves[8:]]
        lines += [
            "shr.u32 index, $4, 3;",
            "not.b32 index, index;",
            "and.b32 index, index, 0x11111111;",
            "mul.lo.u32 index, index, 7;",
            "xor.b32 index, index, $4;",
            "and.b32 index, index, 0x77777777;",
            "mov.b32 codes, $4;",
        ]
    else:
        halves = [_half(c) for c in task.halves]
        lines += [  # codes of three bits, each to four bits of its own
            "shl.b32 codes, $4, 4;",
            "and.b32 codes, codes, 0x0fff0000;",
            "and.b32 index, $4, 0x00000fff;",
            "or.b32 codes, codes, index;",
            "and.b32 index, codes, 0x00070007;",
        ]
        for shift, mask in ((1, 0x00700070), (2, 0x07000700), (3, 0x70007000)):
            lines += [
                f"shl.b32 lower, codes, {shift};",
                f"and.b32 lower, lower, 0x{mask:08x};",
                "or.b32 index, index, lower;",
            ]
    upper, lower = _bytes(halves, True), _bytes(halves, False)
    for half in range(2):
        if half:
            lines.append("shr.u32 index, index, 16;")
        lines += [f"prmt.b32 upper, {upper[0]}, {upper[1]}, index;", f"prmt.b32 lower, {lower[0]}, {lower[1]}, index;"]
        if task.key_bits == 4:
            if half:
                lines.append("shr.u32 codes, codes, 16;")
            lines += ["prmt.b32 minus, 0x40404040, 0x40404040, codes;", "mad.lo.u32 upper, minus, 2, upper;"]
        lines += [
            f"prmt.b32 ${2 * half}, lower, upper, 0x5140;",
            f"prmt.b32 ${2 * half + 1}, lower, upper, 0x7362;",
        ]
    return "{ " + " ".join(lines) + " }"


def _codes_assembly(task: AttendKVTask) -> str:
    """PTX from runs of eight codes of two tokens to eight words of two bf16: a dim's codes less their middle.

    Or-ing n under an exponent makes 128 + n of it.
    """
    mask, minus = f"0x{((1 << task.value_bits) - 1) * 0x00010001:08x}", f"0x{(0xC300 + task.middle) * 0x00010001:08x}"
    lines = [".reg .b32 x, y, one, minus;", "mov.b32 one, 0x3f803f80;", f"mov.b32 minus, {minus};"]
    if task.value_bits == 4:
        sources = [("x", 4 * j) for j in range(4)] * 2
        lines += ["prmt.b32 x, $8, $9, 0x5410;", "prmt.b32 y, $8, $9, 0x7632;"]
        sources[4:] = [("y", shift) for _, shift in sources[4:]]
    else:  # x has bits 0 to 15 of each run, y has bits 8 to 23
        lines += ["prmt.b32 x, $8, $9, 0x5410;", "prmt.b32 y, $8, $9, 0x6521;"]
        sources = [("x", 3 * j) if j < 5 else ("y", 3 * j - 8) for j in range(8)]
    for j, (source, shift) in enumerate(sources):
        lines += [
            f"shr.u32 ${j}, {source}, {shift};",
            f"and.b32 ${j}, ${j}, {mask};",
            f"or.b32 ${j}, ${j}, 0x43004300;",
            f"fma.rn.bf16x2 ${j}, ${j}, one, minus;",
        ]
    return "{ " + " ".join(lines) + " }"


# What a thread loads of a row: its lane's codes, in words, half words or bytes.


@triton.constexpr_function
def _pieces(count, bits, alignment):
    """How codes of a lane are loaded: (bytes of a load's element, elements of a load, loads)."""
    total = count * bits
    if bits != 3 and total % 32 == 0 and alignment >= 4:
        vector = min(4, total // 32, alignment // 4)
        return 4, vector, total // 32 // vector
    if bits != 3:
        size = 2 if total % 16 == 0 else 1
        return size, 1, total // 8 // size
    if total % 32 == 0 and alignment >= 4:
        return 4, 1, total // 32
    if total % 16 == 0:
        return 2, 1, total // 16
    return (1, 1, total // 8) if total % 8 == 0 else (1, 1, 2)


@triton.jit
def _load_lane(codes, lane, exists, COUNT: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """A lane's codes as they stand in memory: a tuple of tiles [t, g, R, n] (or [R, g, t, n]: see the task).

    Args:
        codes: Pointers to rows' codes, of a shape that spreads to [t, g, R].
        lane: Which part of the row a thread has, likewise.
        exists: Whether the rows do, likewise.
        COUNT: Codes of a lane.
        LANES: Lanes of a row.
        BITS: Of a code.
        ALIGN: Bytes to which the rows are aligned.
    """
    SIZE: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[0]
    VECTOR: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[1]
    LOADS: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[2]
    codes = tl.multiple_of(codes, (ALIGN, ALIGN, ALIGN))
    base = codes.to(tl.pointer_type(tl.int32 if SIZE == 4 else (tl.uint16 if SIZE == 2 else tl.uint8)))
    mask = exists[:, :, :, None]
    raw = ()
    for i in tl.static_range(LOADS):
        at = lane[:, :, :, None]
        inside = mask
        if BITS != 3:  # what the lanes load together stands together
            at = (i * LANES + at) * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
        elif COUNT * BITS % 8 == 0:
            at = at * LOADS + i
        else:  # 12 or 6 bits: two bytes, the second where the codes reach into it
            inside = mask & (at * COUNT * BITS % 8 + COUNT * BITS > 8 * i)
            at = at * COUNT * BITS // 8 + i
        raw = raw + (tl.load(base[:, :, :, None] + at, mask=inside, other=0),)
    return raw


@triton.jit
def _column(x):
    """[t, g, R, 1] as int32 [t, g, R]."""
    return tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2]]).to(tl.int32)


@triton.jit
def _columns_of(x, COUNT: tl.constexpr):
    """A tile [t, g, R, COUNT] as a tuple of int32 [t, g, R]."""
    if COUNT == 1:
        return (_column(x),)
    elif COUNT == 2:
        a, b = tl.split(x)
        return (a.to(tl.int32), b.to(tl.int32))
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return (a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32))


@triton.jit
def _runs(raw, lane, COUNT: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """What was loaded as runs of eight codes (four, of 8 bits; all, where a lane has fewer) in int32 [t, g, R]."""
    SIZE: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[0]
    VECTOR: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[1]
    LOADS: tl.constexpr = _pieces(COUNT, BITS, ALIGN)[2]
    runs = ()
    if BITS != 3:
        for i in tl.static_range(LOADS):
            runs = runs + _columns_of(raw[i], VECTOR)
        if SIZE == 2 and LOADS > 1:
            words = ()
            for i in tl.static_range(LOADS // 2):
                words = words + (runs[2 * i] | (runs[2 * i + 1] << 16),)
            runs = words
    elif SIZE == 4:
        for i in tl.static_range(LOADS // 3):
            runs = runs + kv_codec.four_runs(_column(raw[3 * i]), _column(raw[3 * i + 1]), _column(raw[3 * i + 2]))
    elif SIZE == 2:
        for i in tl.static_range(LOADS // 3):
            runs = runs + kv_codec.two_runs(_column(raw[3 * i]), _column(raw[3 * i + 1]), _column(raw[3 * i + 2]))
    elif LOADS == 3:
        runs = (_column(raw[0]) | (_column(raw[1]) << 8) | (_column(raw[2]) << 16),)
    else:
        runs = ((_column(raw[0]) | (_column(raw[1]) << 8)) >> (lane * COUNT * BITS % 8),)
    return runs


@triton.constexpr_function
def _order_of_codes(count, bits, alignment, lanes):
    """How a lane's codes stand in the row, as (codes of a piece, codes from a piece to the next)."""
    if bits == 3:
        return count, count
    size, vector, loads = _pieces(count, bits, alignment)
    each = count // loads if vector > 1 or loads == 1 else 8 * size // bits
    return each, each * lanes


@triton.jit
def _dim_of(lane, index, COUNT: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr):
    """The dim of a lane's code of an index."""
    EACH: tl.constexpr = _order_of_codes(COUNT, BITS, ALIGN, LANES)[0]
    STEP: tl.constexpr = _order_of_codes(COUNT, BITS, ALIGN, LANES)[1]
    return index // EACH * STEP + lane * EACH + index % EACH


@triton.constexpr_function
def _aligned(task, chunk, value):
    """Bytes to which a chunk's codes are aligned."""
    offset = chunk.first * (task.value_bits if value else task.key_bits) // 8
    if value:
        offset += task.key_bytes
    found = task.alignment
    while offset % found:
        found //= 2
    return found


# From codes to operands.


@triton.jit
def _tile_of(words):
    """Words [t, g, R] of two halves, a power of two of them in a tuple, as one tile of words [t, g, R, n]."""
    COUNT: tl.constexpr = len(words)
    if COUNT == 1:
        return words[0][:, :, :, None]
    elif COUNT == 2:
        return tl.join(words[0], words[1])
    else:
        even = ()
        odd = ()
        for i in tl.static_range(COUNT // 2):
            even = even + (words[2 * i],)
            odd = odd + (words[2 * i + 1],)
        both = tl.join(_tile_of(even), _tile_of(odd))
        return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], COUNT])


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """Words [.., n] as halves [.., n, 2]."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _small_halves(word):
    """Two E4M3 bytes, each the upper one of its half word, as two fp16 of their value times 2**-8: exact."""
    nan = (((word & 0x7F007F00) + 0x01000100) >> 15) & 0x00010001
    return (word & -2147450880) | ((word >> 1) & 0x3F803F80) | (nan * 0x7FFF)


@triton.jit
def _key_words(run, table, COUNT: tl.constexpr, TASK: tl.constexpr):
    """A run of codes as words of two fp16, in order; without a conversion, E4M3 comes times 2**-8."""
    PATHS: tl.constexpr = TASK.paths
    words = ()
    if TASK.key_bits == 8:
        if PATHS.e4m3 == "cvt":
            for pair in tl.static_range(2):
                word = tl.inline_asm_elementwise(
                    "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }",
                    "=r,r", [(run >> (16 * pair)) & 0xFFFF], dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
                words = words + (word,)
        else:
            words = (
                _small_halves(((run & 0xFF) << 8) | ((run & 0xFF00) << 16)),
                _small_halves(((run >> 8) & 0xFF00) | (run & -16777216)),
            )
    elif PATHS.pairs != "none" and COUNT == 8 and (TASK.symmetric or (TASK.key_bits == 3 and len(TASK.table) > 0)):
        words = tl.inline_asm_elementwise(
            TASK.centroids_assembly, "=&r,=&r,=&r,=&r,r", [run],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for pair in tl.static_range(COUNT // 2):
            x = kv_codec.look_up(run >> (2 * TASK.key_bits * pair), table, TASK.key_bits)
            y = kv_codec.look_up(run >> (2 * TASK.key_bits * pair + TASK.key_bits), table, TASK.key_bits)
            words = words + (codec.fp16_pair(x, y),)
    return words


@triton.jit
def _keys(raw, lane, table, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of a tile's keys as fp16 [TOKENS, size], dims in the order of :func:`_key_dims`."""
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    TOKENS: tl.constexpr = TASK.block_tokens
    COUNT: tl.constexpr = SIZE // 4
    ALIGN: tl.constexpr = _aligned(TASK, TASK.chunks[INDEX], False)
    runs = _runs(raw, lane, COUNT, TASK.key_bits, ALIGN)
    words = ()
    for i in tl.static_range(tl.constexpr(len(runs))):
        words = words + _key_words(runs[i], table, COUNT if COUNT < 8 else 8, TASK)
    halves = _halves(_tile_of(words), tl.float16)
    if TASK.lanes_first:
        halves = tl.permute(tl.reshape(halves, [4, 8, TOKENS // 8, SIZE // 16, 4]), (2, 1, 3, 0, 4))
    else:
        halves = tl.permute(tl.reshape(halves, [TOKENS // 8, 8, 4, SIZE // 16, 4]), (0, 1, 3, 2, 4))
    return tl.reshape(halves, [TOKENS, SIZE])


@triton.jit
def _key_dims(INDEX: tl.constexpr, TASK: tl.constexpr):
    """The dims [size] of a chunk's keys in the order of their operand."""
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    ALIGN: tl.constexpr = _aligned(TASK, TASK.chunks[INDEX], False)
    at = tl.arange(0, SIZE)
    return TASK.chunks[INDEX].first + _dim_of(at % 16 // 4, at // 16 * 4 + at % 4, SIZE // 4, TASK.key_bits, ALIGN, 4)


@triton.jit
def _value_words(first, second, COUNT: tl.constexpr, TASK: tl.constexpr):
    """Runs of codes of two tokens as words of two bf16, one for each dim."""
    PATHS: tl.constexpr = TASK.paths
    words = ()
    if PATHS.pairs != "none" and COUNT == 8:
        words = tl.inline_asm_elementwise(
            TASK.codes_assembly, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [first, second],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        MASK: tl.constexpr = (1 << TASK.value_bits) - 1
        for j in tl.static_range(COUNT):
            x = ((first >> (TASK.value_bits * j)) & MASK) - TASK.middle
            y = ((second >> (TASK.value_bits * j)) & MASK) - TASK.middle
            word = ((codec.bits_of(x.to(tl.float32)) >> 16) & 0xFFFF) | (codec.bits_of(y.to(tl.float32)) & -65536)
            words = words + (word,)
    return words


@triton.jit
def _values(even, odd, lane, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of a tile's values' codes, less their middle, as bf16 [size, TOKENS], dims in an order of their own."""
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    TOKENS: tl.constexpr = TASK.block_tokens
    COUNT: tl.constexpr = SIZE // 8
    ALIGN: tl.constexpr = _aligned(TASK, TASK.chunks[INDEX], True)
    first = _runs(even, lane, COUNT, TASK.value_bits, ALIGN)
    second = _runs(odd, lane, COUNT, TASK.value_bits, ALIGN)
    words = ()
    for i in tl.static_range(tl.constexpr(len(first))):
        words = words + _value_words(first[i], second[i], COUNT if COUNT < 8 else 8, TASK)
    halves = _halves(_tile_of(words), tl.bfloat16)
    if TASK.lanes_first:
        halves = tl.permute(tl.reshape(halves, [4, 8, TOKENS // 16, 2, COUNT, 2]), (4, 1, 2, 0, 3, 5))
    else:
        halves = tl.permute(tl.reshape(halves, [TOKENS // 16, 2, 8, 4, COUNT, 2]), (4, 2, 0, 3, 1, 5))
    return tl.reshape(halves, [SIZE, TOKENS])


@triton.jit
def _in_order(sums, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk's sums [size, QUERIES], in the order of the values' operand, as [QUERIES, size] in that of the dims."""
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    QUERIES: tl.constexpr = TASK.block_queries
    COUNT: tl.constexpr = SIZE // 8
    ALIGN: tl.constexpr = _aligned(TASK, TASK.chunks[INDEX], True)
    EACH: tl.constexpr = _order_of_codes(COUNT, TASK.value_bits, ALIGN, 8)[0]
    parts = tl.reshape(sums, [COUNT // EACH, EACH, 8, QUERIES])
    return tl.reshape(tl.permute(parts, (3, 0, 2, 1)), [QUERIES, SIZE])


# Products.


@triton.jit
def _product(a, b, acc, PATHS: tl.constexpr):
    """acc + a b. The interpreter multiplies the bits of bf16, so there the operands are fp32."""
    if PATHS.interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _parity(x):
    """Whether integers below 512 have an odd number of ones, as 0 or 1."""
    x = x ^ (x >> 8)
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return (x ^ (x >> 1)) & 1


@triton.jit
def _queries(q, row, exists, rotation, INDEX: tl.constexpr, TASK: tl.constexpr):
    """A chunk of the queries [size, QUERIES], rotated where keys are, fp32; the rotation's factor is left out.

    Args:
        q: The queries' pointer.
        row: Where each row starts [QUERIES].
        exists: Whether it does.
    """
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    QUERIES: tl.constexpr = TASK.block_queries
    PATHS: tl.constexpr = TASK.paths
    DTYPE: tl.constexpr = q.dtype.element_ty
    dim = _key_dims(INDEX, TASK)
    if TASK.key_bits == 8:
        return tl.load(q + row[None, :] + dim[:, None], mask=exists[None, :], other=0.0).to(tl.float32)
    else:
        turned = tl.zeros([SIZE, QUERIES], tl.float32)
        for start in tl.static_range(0, tl.constexpr(TASK.dim), 16):
            at = start + tl.arange(0, 16)
            some = tl.load(q + row[None, :] + at[:, None], mask=exists[None, :], other=0.0)  # [16, QUERIES]
            if TASK.rotated:
                matrix = tl.load(rotation + dim[:, None] * TASK.dim + at[None, :])  # [size, 16]
                high = matrix.to(DTYPE)
                low = (matrix - high.to(tl.float32)).to(DTYPE)
                turned = _product(high, some, _product(low, some, turned, PATHS), PATHS)
            else:
                # A sign is that of the last four bits of row and column times that of the others: the first is one
                # matrix for every step, the others are one sign for a row.
                signs = 1 - 2 * _parity((dim[:, None] & 15) & (at[None, :] & 15))
                part = _product(signs.to(tl.float32).to(DTYPE), some, tl.zeros([SIZE, QUERIES], tl.float32), PATHS)
                inside = dim // TASK.block == start // TASK.block
                sign = 1 - 2 * _parity((dim % TASK.block // 16) & (start % TASK.block // 16))
                turned += tl.where(inside, sign.to(tl.float32), 0.0)[:, None] * part
        return turned


@triton.jit
def _powers_for_fp16(top):
    """Powers of two that bring magnitudes up to ``top`` to at most 2**15, and their reciprocals."""
    exponent = tl.minimum(tl.maximum((codec.bits_of(top) >> 23) & 0xFF, 16), 254)
    return codec.float_of((268 - exponent) << 23), codec.float_of((exponent - 14) << 23)


# Tokens.


@triton.jit
def _page_of(kv_cache, sequences, row, at, exists, num_blocks, block_stride, TASK: tl.constexpr):
    """Pages (pointers) of tokens ``at`` of a sequence, and whether they exist; one page where a tile is inside of one.

    Args:
        row: The sequence's row of the table.
        at: Tokens, of any shape; a scalar: the tile's first.
        exists: Whether the sequence has them.
    """
    entry = sequences.table + row + (at // TASK.block_size) * sequences.table_step
    block = tl.load(entry, mask=exists, other=-1).to(tl.int64)
    known = exists & (block >= 0) & (block < num_blocks)
    return kv_cache + tl.where(known, block, 0) * block_stride, known


@triton.jit
def _tokens(kv_cache, sequences, row, at, tile, begin, end, num_blocks, block_stride, TASK: tl.constexpr):
    """Pages, places and existence of a tile's tokens ``at`` (any shape) less its first."""
    first = tile * TASK.block_tokens
    if TASK.whole_tiles:
        page, known = _page_of(kv_cache, sequences, row, first, first < end, num_blocks, block_stride, TASK)
        end = tl.where(known, end, 0)
        return page, first % TASK.block_size + at, (first + at >= begin) & (first + at < end)
    else:
        inside = (first + at >= begin) & (first + at < end)
        page, known = _page_of(kv_cache, sequences, row, first + at, inside, num_blocks, block_stride, TASK)
        return page, (first + at) % TASK.block_size, known


@triton.jit
def _lanes(TASK: tl.constexpr):
    """The threads t and g, and the runs of eight tokens r, along the dims of tiles of codes."""
    R: tl.constexpr = TASK.block_tokens // 8
    g = tl.arange(0, 8)[None, :, None]
    if TASK.lanes_first:
        return tl.arange(0, 4)[:, None, None], g, tl.arange(0, R)[None, None, :]
    else:
        return tl.arange(0, 4)[None, None, :], g, tl.arange(0, R)[:, None, None]


@triton.jit
def _fetch_codes(page, place, head, known, lane, INDEX: tl.constexpr, VALUE: tl.constexpr, TASK: tl.constexpr):
    """A chunk of rows' keys or values, each lane's part of it, as they stand in memory."""
    BITS: tl.constexpr = TASK.value_bits if VALUE else TASK.key_bits
    LANES: tl.constexpr = 8 if VALUE else 4
    START: tl.constexpr = TASK.chunks[INDEX].first * BITS // 8 + (TASK.key_bytes if VALUE else 0)
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    codes = page + (place.to(tl.int64) * TASK.token_bytes + head * TASK.head_bytes + START)
    return _load_lane(codes, lane, known, SIZE // LANES, LANES, BITS, _aligned(TASK, TASK.chunks[INDEX], VALUE))


@triton.jit
def _fetch(kv_cache, sequences, row, head, tile, begin, end, num_blocks, block_stride, TASK: tl.constexpr):
    """A tile as it stands in memory: keys, values (of even and of odd tokens) of each chunk; the fp16 numbers."""
    TOKENS: tl.constexpr = TASK.block_tokens
    t, g, r = _lanes(TASK)
    page, place, known = _tokens(
        kv_cache, sequences, row, 8 * r + g, tile, begin, end, num_blocks, block_stride, TASK
    )  # of each g and r
    keys = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        keys = keys + (_fetch_codes(page, place, head, known, t + 0 * g, index, False, TASK),)
    values = ()
    for odd in tl.static_range(2):
        page, place, known = _tokens(
            kv_cache, sequences, row, r // 2 * 16 + 4 * t + r % 2 * 2 + odd, tile, begin, end, num_blocks,
            block_stride, TASK,
        )  # fmt: skip  # of each t and r
        some = ()
        for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
            some = some + (_fetch_codes(page, place, head, known, g + 0 * t, index, True, TASK),)
        values = values + (some,)
    page, place, known = _tokens(
        kv_cache, sequences, row, tl.arange(0, TOKENS), tile, begin, end, num_blocks, block_stride, TASK
    )
    numbers = ()
    for field in tl.static_range(tl.constexpr(TASK.fields)):
        offset = TASK.meta_offset + 2 * ((head * TASK.fields + field) * TASK.block_size + place.to(tl.int64))
        pointer = (page + offset).to(tl.pointer_type(tl.float16))
        numbers = numbers + (tl.load(pointer, mask=known, other=0.0),)
    return keys, values, numbers, known


@triton.jit
def _accumulate(carry, queries, factor, position, raw, tile, window, table, TASK: tl.constexpr):
    """One tile of the softmax: the largest logit, the sum of exponentials, of zeros and of codes so far."""
    top, total, zeros, sums = carry
    keys, values, numbers, known = raw
    PATHS: tl.constexpr = TASK.paths
    TOKENS: tl.constexpr = TASK.block_tokens
    QUERIES: tl.constexpr = TASK.block_queries
    t, g, _r = _lanes(TASK)
    logits = tl.zeros([TOKENS, QUERIES], tl.float32)
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        logits = _product(_keys(keys[index], t + 0 * g, table, index, TASK), queries[index], logits, PATHS)
    logits = logits * factor[None, :]
    if TASK.normed:
        logits = logits * numbers[0].to(tl.float32)[:, None]
    seen = known[:, None]
    if TASK.packed:
        at = tile * TOKENS + tl.arange(0, TOKENS)
        seen = seen & (at[:, None] <= position[None, :])
        if TASK.windowed:
            seen = seen & (at[:, None] > position[None, :] - window)
    logits = tl.where(seen, logits, float("-inf"))
    raised = tl.maximum(top, tl.max(logits, 0))
    shift = tl.where(raised == float("-inf"), 0.0, raised)  # no token yet: -inf less -inf is NaN
    weights = tl.exp2(logits - shift[None, :])
    shrink = tl.exp2(top - shift)
    scale = numbers[TASK.fields - 2].to(tl.float32)
    zero = numbers[TASK.fields - 1].to(tl.float32) + scale * TASK.middle
    scaled, shifted = weights * scale[:, None], weights * zero[:, None]
    if TASK.packed:  # a number that some query does not see may be NaN
        scaled, shifted = tl.where(seen, scaled, 0.0), tl.where(seen, shifted, 0.0)
    total = total * shrink + tl.sum(weights, 0)
    zeros = zeros * shrink + tl.sum(shifted, 0)
    scaled = codec.round_to_bf16(scaled, PATHS)
    summed = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        operand = _values(values[0][index], values[1][index], g + 0 * t, index, TASK)
        summed = summed + (_product(operand, scaled, sums[index] * shrink[None, :], PATHS),)
    return raised, total, zeros, summed


@triton.jit
def _no_sums(INDEX: tl.constexpr, TASK: tl.constexpr):
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    QUERIES: tl.constexpr = TASK.block_queries
    return tl.zeros([SIZE, QUERIES], tl.float32)


@triton.jit
def _sequence_of(sequences, tile, count, queries, TASK: tl.constexpr):
    """A tile of queries: its sequence (``count`` for padding), that one's first query, how many, and its first row.

    Sequence i's tiles start at (its first query's row) // QUERIES + i: so many tiles are enough for all before it.
    """
    QUERIES: tl.constexpr = TASK.block_queries
    if TASK.packed:
        low = count * 0
        high = count
        while low < high:  # the last sequence whose tiles start at or before this one
            middle = (low + high + 1) // 2
            start = tl.load(sequences.starts + middle.to(tl.int64) * sequences.starts_step).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), queries)
            if start * TASK.group // QUERIES + middle <= tile:
                low = middle
            else:
                high = middle - 1
        start = tl.load(sequences.starts + low.to(tl.int64) * sequences.starts_step).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), queries)
        after = tl.load(
            sequences.starts + (low + 1).to(tl.int64) * sequences.starts_step, mask=low < count, other=0x7FFFFFFF
        )
        stop = tl.minimum(tl.maximum(after.to(tl.int64), start), queries)
        return low, start, (stop - start), (tile - start * TASK.group // QUERIES - low) * QUERIES
    else:
        TILES: tl.constexpr = (TASK.group + QUERIES - 1) // QUERIES
        sequence = tile // TILES
        return sequence, sequence.to(tl.int64), tl.full([], 1, tl.int64), (tile % TILES).to(tl.int64) * QUERIES


@triton.jit(do_not_specialize=["count", "queries_count", "num_blocks", "capacity", "splits", "window"])
def attend_kv_kernel(
    q, kv_cache, sequences, result, lse, sink, centroids, rotation, scale, count, queries_count, num_blocks,
    block_stride, capacity, splits, window, TASK: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = TASK.block_queries
    TOKENS: tl.constexpr = TASK.block_tokens
    program = tl.program_id(0)
    head = program % TASK.heads
    part = program // TASK.heads
    split = part % splits
    sequence, start, many, first_row = _sequence_of(sequences, part // splits, count, queries_count, TASK)
    length = tl.load(sequences.lengths + sequence.to(tl.int64) * sequences.lengths_step, mask=sequence < count, other=0)
    length = tl.minimum(tl.maximum(length.to(tl.int64), 0), capacity)
    row = first_row + tl.arange(0, QUERIES)
    exists = row < many * TASK.group
    query = start + row // TASK.group
    query_head = head * TASK.group + (row % TASK.group).to(tl.int32)
    position = (length - many + row // TASK.group).to(tl.int32)
    # The tokens that any of these queries sees.
    last_row = tl.minimum(first_row + QUERIES, many * TASK.group) - 1
    end = tl.where(last_row >= first_row, tl.maximum(length - many + last_row // TASK.group + 1, 0), 0).to(tl.int32)
    begin = end * 0
    if TASK.windowed:
        begin = tl.maximum(length - many + first_row // TASK.group - window + 1, 0).to(tl.int32)
    first_tile = begin // TOKENS
    tiles = tl.maximum((end + TOKENS - 1) // TOKENS - first_tile, 0)
    share = (tiles + splits - 1) // splits
    first = first_tile + split * share
    last = tl.minimum(first + share, first_tile + tiles)
    end = tl.minimum(end, last * TOKENS)  # nothing of the next split is loaded ahead
    table = ()
    if TASK.normed:
        for i in tl.static_range(tl.constexpr(1 << TASK.key_bits)):
            if centroids is not None:
                table = table + (tl.load(centroids + i),)
            else:
                table = table + (TASK.halves[i],)
    at = query * q.query_stride + query_head.to(tl.int64) * q.head_stride
    rotated = ()
    top = tl.zeros([QUERIES], tl.float32)
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        rotated = rotated + (_queries(q.ptr, at, exists, rotation, index, TASK),)
        top = tl.maximum(top, tl.max(tl.abs(rotated[index]), 0))
    up, down = _powers_for_fp16(top)
    queries = ()
    sums = ()
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        queries = queries + ((rotated[index] * up[None, :]).to(tl.float16),)
        sums = sums + (_no_sums(index, TASK),)
    factor = down * scale
    nothing = tl.zeros([QUERIES], tl.float32)
    carry = (tl.full([QUERIES], float("-inf"), tl.float32), nothing, nothing, sums)
    blocks = sequence.to(tl.int64) * sequences.table_stride
    if TASK.paths.interpreted:
        tile = first
        while tile < last:  # the interpreter has no range of what a kernel computes
            raw = _fetch(kv_cache, sequences, blocks, head, tile, begin, end, num_blocks, block_stride, TASK)
            carry = _accumulate(carry, queries, factor, position, raw, tile, window, table, TASK)
            tile += 1
    else:
        raw = _fetch(kv_cache, sequences, blocks, head, first, begin, end, num_blocks, block_stride, TASK)
        for tile in tl.range(first, last, num_stages=1):
            ahead = _fetch(kv_cache, sequences, blocks, head, tile + 1, begin, end, num_blocks, block_stride, TASK)
            carry = _accumulate(carry, queries, factor, position, raw, tile, window, table, TASK)
            raw = ahead
    top, total, zeros, sums = carry
    logarithm = top + tl.log2(total)
    if TASK.whole:
        divisor = total
        if sink is not None:
            extra = tl.load(sink + query_head, mask=exists, other=float("-inf")) * LOG2E
            divisor = total + tl.where(total == 0, 0.0, tl.exp2(extra - top))
        divisor = tl.where(total == 0, 1.0, divisor)
        result_row = query * result.query_stride + query_head.to(tl.int64) * result.head_stride
        if lse is not None:
            tl.store(lse + query * TASK.query_heads + query_head, logarithm * LN2, mask=exists)
    else:
        # [queries, heads, splits, dim], and logarithms [queries, heads, splits].
        divisor = tl.where(total == 0, 1.0, total)
        result_row = ((query * TASK.query_heads + query_head) * splits + split) * TASK.dim
        tl.store(lse + (query * TASK.query_heads + query_head) * splits + split, logarithm, mask=exists)
    for index in tl.static_range(tl.constexpr(len(TASK.chunks))):
        rows = _in_order((sums[index] + zeros[None, :]) / divisor[None, :], index, TASK)
        _write(result, result_row, exists, rows, index, TASK)


@triton.jit
def _write(result, row, exists, rows, INDEX: tl.constexpr, TASK: tl.constexpr):
    SIZE: tl.constexpr = TASK.chunks[INDEX].size
    PATHS: tl.constexpr = TASK.paths
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    pointer = result.ptr + row[:, None] + TASK.chunks[INDEX].first + tl.arange(0, SIZE)[None, :]
    tl.store(pointer, codec.round_to(rows, DTYPE, PATHS), mask=exists[:, None])
