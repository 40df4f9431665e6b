"""Codes of keys and values inside kernels.

A row (one head of one token) is taken as tiles [ROWS, parts, width] of 16 bytes of the tensor that it is read from or
written to, so that one thread holds all of a row, or a part of each of its rotation's blocks: rotating and packing then
move little or nothing between threads. Functions that hold inline assembly have a portable twin; see :mod:`codec`.
"""

from __future__ import annotations

import dataclasses
import struct

import triton
import triton.language as tl

from mxkv import lloyd_max
from mxkv.backends.triton_gpu.codec import Paths

FP16_MAX = tl.constexpr(65504.0)
NORM_FLOOR = tl.constexpr(1e-8)
SCALE_FLOOR = tl.constexpr(1e-8)
CORRECTION_FLOOR = tl.constexpr(1e-16)

_WIDEST_ACCESS = 16
_MOST_OF_A_THREAD = 128  # elements of a rotation's block: registers
_LEAST_OF_A_THREAD = 16
_OCTET = 8
_MOST_TOGETHER = 32  # elements of a thread
PRODUCT_PARTS = 4  # the lanes that share a row of a matrix product's operand
_COMPANDING = {3: (0.786, 3.19), 4: (0.62, 7.35)}  # of a normal distribution
_RADIX = 255 * 256  # of a square's first digit
_FIRST_DIGIT = tl.constexpr(float(_RADIX))


@dataclasses.dataclass(frozen=True, eq=False)  # one object for each task: Triton hashes it at every launch
class KVTask:
    """What a kernel on pages of keys and values is compiled for.

    Attributes:
        key_bits: Bits of a key's element: 8 (E4M3), 4 or 3.
        value_bits: Bits of a value's element: 4 or 3.
        corrected: Whether norms are divided by those of the quantized directions.
        dim: Elements of a key, and of a value.
        heads: Heads of the cache.
        block: The size of the rotation's diagonal blocks, a power of two.
        dtype: Of the keys and values that come or go: "bf16", "fp16" or "fp32".
        dtype_max: Its largest finite number.
        table: The centroids, fp32; empty where the call has its own.
        rotated: Whether the call has a rotation of its own.
        sanitize: Whether what is not finite is made so.
        block_size, token_bytes, head_bytes, key_bytes, meta_offset, fields: The page layout (:class:`KVLayout`).
        alignment: Bytes (2 to 16) to which every row's codes are aligned.
        narrow: Whether every slot fits 32 bits.
        paths: The target's instructions.
        row_threads: Threads that a row is to have, as far as its width allows.
        row_span: Elements that one of several takes together, as far as its codes and its width allow; 0 for all of
            its part of a block.
        products: Whether a matrix product takes four stages of the rotation: a row then has four threads.
        parts_first: Whether a tile's pointers are [parts, ROWS, width], else [ROWS, parts, width]: as the compiler's
            choice of layout has it, a row's threads are neighbours.
    """

    key_bits: int
    value_bits: int
    corrected: bool
    dim: int
    heads: int
    block: int
    dtype: str
    dtype_max: float
    table: tuple[float, ...]
    rotated: bool
    sanitize: bool
    block_size: int
    token_bytes: int
    head_bytes: int
    key_bytes: int
    meta_offset: int
    fields: int
    alignment: int
    narrow: bool
    paths: Paths
    row_threads: int = 1
    row_span: int = 0
    products: bool = False
    parts_first: bool = False

    @property
    def normed(self) -> bool:
        return self.key_bits != 8

    @property
    def parts(self) -> int:
        """Threads of a row: each has a part of every block."""
        if self.products:
            return PRODUCT_PARTS
        return max(1, self.block // _MOST_OF_A_THREAD, min(self.row_threads, self.block // _LEAST_OF_A_THREAD))

    @property
    def width(self) -> int:
        """Elements of a tile's row in one thread: 16 bytes."""
        return _WIDEST_ACCESS // (4 if self.dtype == "fp32" else 2)

    @property
    def block_tiles(self) -> int:
        """Tiles of a block."""
        return self.block // (self.parts * self.width)

    @property
    def blocks(self) -> int:
        return self.dim // self.block

    @property
    def tiles(self) -> int:
        return self.blocks * self.block_tiles

    @property
    def octets(self) -> int:
        """Runs of eight elements of a row in one thread."""
        return self.dim // (8 * self.parts)

    @property
    def span(self) -> int:
        """Elements of a thread that stand together."""
        if self.parts == 1:
            return self.dim
        least = _LEAST_OF_A_THREAD if 3 in (self.key_bits, self.value_bits) else _OCTET
        return min(max(self.row_span, least), self.block // self.parts) if self.row_span else self.block // self.parts

    @property
    def together(self) -> bool:
        """Whether a program stores both keys and values: where a thread's parts of both fit its registers."""
        return (self.products or not self.normed) and self.dim <= _MOST_TOGETHER * self.parts

    @property
    def padded(self) -> int:
        return 1 << (self.dim - 1).bit_length()

    @property
    def symmetric(self) -> bool:
        """Whether the centroids are known, and mirror themselves."""
        return len(self.table) > 0 and all(a == -b for a, b in zip(self.table, self.table[::-1], strict=True))

    @property
    def positive(self) -> tuple[float, ...]:
        """The upper half of symmetric centroids."""
        return self.table[len(self.table) // 2 :]

    @property
    def positive_edges(self) -> tuple[int, ...]:
        """The bits of the midpoints between them."""
        return tuple(struct.unpack("<i", struct.pack("<f", edge))[0] for edge in lloyd_max.midpoints(self.positive))

    @property
    def companding(self) -> tuple[float, float]:
        """Numbers k and a: a tanh(k e), rounded, is the number of an edge e from the middle one, and far from the next.

        Edges are the midpoints between centroids, which are alike for each width but for a factor.
        """
        k, a = _COMPANDING[self.key_bits]
        return _fp32(k * self.dim**0.5), a

    @property
    def assembled(self) -> bool:
        """Whether inline assembly makes a key's codes."""
        return self.symmetric and self.paths.pairs != "none"

    @property
    def square_unit(self) -> float:
        """What a square of a centroid is a multiple of, nearly: the largest has 24 bits."""
        return self.positive[-1] ** 2 / (255 * _RADIX)

    @property
    def bucketize_assembly(self) -> str:
        return _bucketize_assembly(self)

    @property
    def pack_values_assembly(self) -> str:
        return _pack_assembly(self.value_bits)


def _fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def _bits_of(x: float) -> str:
    """A number as PTX writes an fp32."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _squares_lines(task: KVTask) -> list[str]:
    """PTX from eight codes in the nibbles of ``word`` to their centroids' squares, added to two sums.

    A square is an integer (:attr:`KVTask.square_unit`) of three digits: the first is summed apart, the others weigh 255
    and 1. Integers have the same sum in any order.
    """
    squares = [round(c * c / task.square_unit) for c in task.table]
    lines = ["mov.b32 b, word;"]
    if task.key_bits == 4:
        squares = squares[8:]
        lines = [
            "shr.u32 b, word, 3;",  # a code below 8 mirrors one above
            "not.b32 b, b;",
            "and.b32 b, b, 0x11111111;",
            "mul.lo.u32 b, b, 7;",
            "xor.b32 b, b, word;",
            "and.b32 b, b, 0x77777777;",
        ]
    lines.append("shr.u32 c, b, 16;")
    digits = [[n // _RADIX for n in squares], [n % _RADIX // 255 for n in squares], [n % _RADIX % 255 for n in squares]]
    before = {"$1": "$12", "$2": "$13"}
    for digit, into, weight in zip(digits, ("$1", "$2", "$2"), (1, 255, 1), strict=True):
        low, high = (sum(digit[4 * half + i] << (8 * i) for i in range(4)) for half in range(2))
        for selector in ("b", "c"):
            lines += [
                f"prmt.b32 looked, 0x{low:08x}, 0x{high:08x}, {selector};",
                f"dp4a.u32.u32 {into}, looked, 0x{weight * 0x01010101:08x}, {before[into]};",
            ]
            before[into] = into
    return lines


def _bucketize_assembly(task: KVTask) -> str:
    """PTX from eight elements and the factor they come times to packed codes, and to sums of their centroids' squares.

    Of a symmetric table. A rounded tanh gives the number of an edge beside which the element is: between the edges
    before and after it. Whether the element is past that edge is then exact: each lane of the warp holds one edge, and
    a shuffle gets it. With the factor come elements times k of :func:`_companding`, as edges do. The sums come as
    operands (:func:`_squares_lines`).
    """
    k, most = task.companding
    edges = lloyd_max.midpoints(task.table)
    middle = len(edges) // 2
    columns, factor = (3, "$11") if task.corrected else (1, "$9")
    lines = [".reg .f32 x, t, e, p, edge;", ".reg .b32 word, b, c, looked;", ".reg .pred this;"]
    lines += ["mov.u32 b, %laneid;", f"sub.s32 b, b, {middle};", "abs.s32 c, b;", "mov.f32 edge, 0f00000000;"]
    for away in range(1, middle + 1):
        lines += [f"setp.eq.s32 this, c, {away};", f"selp.f32 edge, {_bits_of(k * edges[middle + away])}, edge, this;"]
    lines += ["mov.b32 x, b;", "copysign.f32 edge, x, edge;", "mov.b32 word, 0;"]
    first = 1.5 * 2**23 + middle  # its last bits are the number of the middle edge
    for j in reversed(range(8)):
        lines += [
            f"mul.rn.f32 x, ${columns + j}, {factor};",
            "tanh.approx.f32 t, x;",
            f"fma.rn.f32 t, t, {_bits_of(most)}, {_bits_of(first)};",
            "mov.b32 b, t;",
            "shfl.sync.idx.b32 e, edge, b, 31, 0xffffffff;",
            "set.ge.f32.f32 p, x, e;",
            "add.rn.f32 t, t, p;",
            "mov.b32 b, t;",
            "mad.lo.u32 word, word, 16, b;",
        ]
    excess = 0x4B400000 * 0x11111111 & 0xFFFFFFFF
    lines.append(f"sub.u32 word, word, 0x{excess:08x};")
    if task.corrected:
        lines += _squares_lines(task)
    if task.key_bits == 3:  # nibbles to six bits in bytes, to 12 in halves, to 24
        for shift, low, high in ((1, 0x07070707, 0x38383838), (2, 0x003F003F, 0x0FC00FC0), (4, 0xFFF, 0xFFF000)):
            lines += [
                f"shr.u32 b, word, {shift};",
                f"and.b32 b, b, 0x{high:08x};",
                f"and.b32 word, word, 0x{low:08x};",
                "or.b32 word, word, b;",
            ]
    return "{ " + " ".join([*lines, "mov.b32 $0, word;"]) + " }"


def _pack_assembly(bits: int) -> str:
    """PTX from eight fp32 in [0, 2**bits) to their integer parts, packed."""
    lines = [".reg .f32 x;", ".reg .b32 b;", "mov.b32 $0, 0;"]
    for j in reversed(range(8)):
        # Rounded towards zero, 2**23 + x has the integer in its last bits; its exponent is taken away at the end.
        lines += [
            f"add.rz.f32 x, ${1 + j}, {_bits_of(2.0**23)};",
            "mov.b32 b, x;",
            f"mad.lo.u32 $0, $0, {1 << bits}, b;",
        ]
    excess = 0x4B000000 * sum(1 << (bits * j) for j in range(8)) & 0xFFFFFFFF
    lines.append(f"sub.u32 $0, $0, 0x{excess:08x};")
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def word_bytes(task, bits):
    """Bytes of what a row's codes are stored as: words where they fill them and stand at multiples of them."""
    return 4 if task.alignment >= 4 and task.span * bits % 32 == 0 else 2


@triton.constexpr_function
def vector(task, bits):
    """How many such words one access takes."""
    size = word_bytes(task, bits)
    count = task.span * bits // 8 // size
    return min(count & -count, task.alignment // size, _WIDEST_ACCESS // size)


@triton.constexpr_function
def stored_together(task, bits):
    """How many words of a thread are stored at once: all, as far as a power of two goes, so that accesses coalesce."""
    count = task.span * bits // 8 // word_bytes(task, bits)
    return count & -count


@triton.constexpr_function
def tile_start(task, index):
    """The first element of a tile (of its first part)."""
    return index * task.width // task.span * task.span * task.parts + index * task.width % task.span


@triton.constexpr_function
def scale_of_rotation(task):
    return task.block**-0.5


@triton.constexpr_function
def products_scale(task):
    """A power of two near the rotation's factor: squares of columns that come times it overflow where the key's do."""
    return 0.5 ** ((task.block.bit_length()) // 2)


# Places.


@triton.jit
def rows_of(program, tokens, ROWS: tl.constexpr, TASK: tl.constexpr):
    """A program's rows: their tokens (int64), their heads, and whether they exist [ROWS]."""
    first = program.to(tl.int64) * ROWS
    local = (first % TASK.heads).to(tl.int32) + tl.arange(0, ROWS)
    token = first // TASK.heads + local // TASK.heads
    return token, local % TASK.heads, token < tokens


@triton.jit
def pages_of(kv_cache, slot, exists, num_slots, block_stride, TASK: tl.constexpr):
    """Slots' pages (pointers to bytes), places in them, and whether they exist [ROWS]."""
    slot = slot.to(tl.int64)
    exists = exists & (slot >= 0) & (slot < num_slots)
    slot = tl.where(exists, slot, 0)
    if TASK.narrow:
        unsigned = slot.to(tl.uint32)
    else:
        unsigned = slot.to(tl.uint64)
    page = kv_cache + (unsigned // TASK.block_size).to(tl.int64) * block_stride
    return page, (unsigned % TASK.block_size).to(tl.int64), exists


@triton.jit
def codes_at(page, place, head, VALUE: tl.constexpr, TASK: tl.constexpr):
    """Where rows' codes stand: pointers to bytes."""
    ALIGNMENT: tl.constexpr = TASK.alignment
    offset = place * TASK.token_bytes + head * TASK.head_bytes + (TASK.key_bytes if VALUE else 0)
    return tl.multiple_of(page + offset, ALIGNMENT)


@triton.jit
def field_at(page, place, head, FIELD: tl.constexpr, TASK: tl.constexpr):
    """Where rows' fp16 numbers stand: pointers to 16 bits."""
    offset = TASK.meta_offset + 2 * ((head * TASK.fields + FIELD).to(tl.int64) * TASK.block_size + place)
    return (page + offset).to(tl.pointer_type(tl.uint16))


@triton.jit
def elements_at(rows, token, head, INDEX: tl.constexpr, TASK: tl.constexpr):
    """Pointers to a tile's elements in a tensor [tokens, heads, dim], as :func:`spread` has them."""
    PARTS: tl.constexpr = TASK.parts
    WIDTH: tl.constexpr = TASK.width
    START: tl.constexpr = tile_start(TASK, INDEX)
    part = tl.arange(0, PARTS) * TASK.span
    row = rows.ptr + token * rows.query_stride + head.to(tl.int64) * rows.head_stride
    return spread(row, part, TASK) + (START + tl.arange(0, WIDTH)[None, None, :])


@triton.jit
def spread(row, part, TASK: tl.constexpr):
    """Pointers to rows [ROWS], and where their parts begin [parts], as [ROWS, parts, 1], or [parts, ROWS, 1]."""
    if TASK.parts_first:
        return row[None, :, None] + part[:, None, None]
    else:
        return row[:, None, None] + part[None, :, None]


@triton.jit
def spread_mask(exists, TASK: tl.constexpr):
    """Rows' masks [ROWS] for such pointers."""
    if TASK.parts_first:
        return exists[None, :, None]
    else:
        return exists[:, None, None]


@triton.jit
def in_order(tile, TASK: tl.constexpr):
    """What such pointers read, or are to write, from one order of dims to the other: [ROWS, parts, n] in kernels."""
    if TASK.parts_first:
        return tl.permute(tile, (1, 0, 2))
    else:
        return tile


# Columns: a tile's row, or two tiles', as eight tensors [ROWS, parts].


@triton.jit
def halves_of_columns(x):
    """The even and the odd columns of [ROWS, parts, n]."""
    ROWS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = x.shape[2] // 2
    return tl.split(tl.reshape(x, [ROWS, PARTS, HALF, 2]))


@triton.jit
def _quad(x):
    """[ROWS, parts, 4] as four columns."""
    even, odd = halves_of_columns(x)
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return (c0, c1, c2, c3)


@triton.jit
def octet_of(tiles, INDEX: tl.constexpr, WIDTH: tl.constexpr):
    """The eight columns of a run of eight elements, of tiles of so many columns."""
    if WIDTH == 4:
        return _quad(tiles[2 * INDEX]) + _quad(tiles[2 * INDEX + 1])
    else:
        even, odd = halves_of_columns(tiles[INDEX])
        c0, c2, c4, c6 = _quad(even)
        c1, c3, c5, c7 = _quad(odd)
        return (c0, c1, c2, c3, c4, c5, c6, c7)


@triton.jit
def _joined(even, odd):
    """[ROWS, parts, n] twice to [ROWS, parts, 2 n], alternating."""
    ROWS: tl.constexpr = even.shape[0]
    PARTS: tl.constexpr = even.shape[1]
    WIDTH: tl.constexpr = even.shape[2] * 2
    return tl.reshape(tl.join(even, odd), [ROWS, PARTS, WIDTH])


@triton.jit
def _tile_of_four(c0, c1, c2, c3):
    return _joined(tl.join(c0, c2), tl.join(c1, c3))


@triton.jit
def tiles_of(columns, TASK: tl.constexpr):
    """Eight columns as tiles: the inverse of :func:`octet_of`."""
    if TASK.width == 4:
        return (
            _tile_of_four(columns[0], columns[1], columns[2], columns[3]),
            _tile_of_four(columns[4], columns[5], columns[6], columns[7]),
        )
    else:
        even = _tile_of_four(columns[0], columns[2], columns[4], columns[6])
        odd = _tile_of_four(columns[1], columns[3], columns[5], columns[7])
        return (_joined(even, odd),)


# Rotation.


@triton.jit
def _within(x, HALF: tl.constexpr):
    """A stage of the butterfly between columns of a tile."""
    ROWS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    pairs = tl.reshape(x, [ROWS, PARTS, WIDTH // (2 * HALF), 2, HALF])
    a, b = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 2, 4, 3)), [ROWS, PARTS, WIDTH])


@triton.jit
def _between_parts(x, HALF: tl.constexpr):
    """A stage of the butterfly between a row's threads."""
    ROWS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    pairs = tl.reshape(x, [ROWS, PARTS // (2 * HALF), 2, HALF, WIDTH])
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 4, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 4, 2, 3)), [ROWS, PARTS, WIDTH])


@triton.jit
def butterfly(tiles, TASK: tl.constexpr):
    """The tiles of one block through the stages 1, 2, 4 … of the butterfly; the factor is left to the caller."""
    TILES: tl.constexpr = TASK.block_tiles
    WIDTH: tl.constexpr = TASK.width
    done = ()
    for i in tl.static_range(TILES):
        x = tiles[i]
        x = _within(x, 1)
        x = _within(x, 2)
        if WIDTH == 8:
            x = _within(x, 4)
        done = done + (x,)
    for stage in tl.static_range(10):
        if 1 << stage < TILES:
            turned = ()
            for i in tl.static_range(TILES):
                if i & (1 << stage):
                    turned = turned + (done[i - (1 << stage)] - done[i],)
                else:
                    turned = turned + (done[i] + done[i + (1 << stage)],)
            done = turned
    for stage in tl.static_range(6):
        if 1 << stage < TASK.parts:
            turned = ()
            for i in tl.static_range(TILES):
                turned = turned + (_between_parts(done[i], 1 << stage),)
            done = turned
    return done


@triton.jit
def signs_of_products(dtype: tl.constexpr, TASK: tl.constexpr):
    """The Hadamard matrix of 16, times what :func:`products_scale` says, as an operand [16, 16]."""
    both = tl.arange(0, 16)[:, None] & tl.arange(0, 16)[None, :]
    both = both ^ (both >> 2)
    odd = ((both ^ (both >> 1)) & 1) != 0
    return tl.where(odd, -products_scale(TASK), products_scale(TASK)).to(dtype)


@triton.jit
def _product_of_tile(x, signs, TASK: tl.constexpr):
    """A tile [ROWS, 4, 8] after four stages: those of the elements' bits 0 and 2, and those between the threads.

    Eight rows and the elements' bit 1 are an operand's 16 rows: it then stands as it was read, each lane with elements
    of its own row, and so does the product.
    """
    PATHS: tl.constexpr = TASK.paths
    ROWS: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, [ROWS // 8, 8, 4, 2, 2, 2]), (0, 4, 1, 3, 2, 5))
    x = tl.reshape(x, [2 * ROWS, 16])
    if PATHS.interpreted:  # it multiplies the bits of bf16
        x = tl.dot(x.to(tl.float32), signs.to(tl.float32), input_precision="ieee")
    else:
        x = tl.dot(x, signs)
    x = tl.permute(tl.reshape(x, [ROWS // 8, 2, 8, 2, 4, 2]), (0, 2, 4, 3, 1, 5))
    return tl.reshape(x, [ROWS, 4, 8])


@triton.jit
def turned_by_products(tiles, signs, TASK: tl.constexpr):
    """The tiles of one block, as they were read, through the butterfly's stages: their columns, octet after octet.

    The first stages are a matrix product, whose sums are fp32. The columns come times a power of two.
    """
    done = ()
    for i in tl.static_range(tl.constexpr(TASK.block_tiles)):
        done = done + octet_of((_product_of_tile(tiles[i], signs, TASK),), 0, 8)
    for stage in tl.static_range(1, 10):
        if stage != 2 and 1 << stage < 8 * TASK.block_tiles:
            turned = ()
            for i in tl.static_range(tl.constexpr(8 * TASK.block_tiles)):
                if i & (1 << stage):
                    turned = turned + (done[i - (1 << stage)] - done[i],)
                else:
                    turned = turned + (done[i] + done[i + (1 << stage)],)
            done = turned
    return done


@triton.jit
def divide(x, divisor, PATHS: tl.constexpr):
    """Finite fp32 [ROWS, ..] / positive fp32 [ROWS, 1, ..], correctly rounded unless it underflows.

    A quotient by the correctly rounded reciprocal, corrected once by its exact remainder (Markstein). An infinite
    divisor gives zero. A quotient that overflows may be NaN.
    """
    if PATHS.pairs != "none":
        reciprocal = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
        minus = tl.broadcast_to(tl.where(divisor == float("inf"), 0.0, 0.0 - divisor), x.shape)
        reciprocal = tl.broadcast_to(reciprocal, x.shape)
        quotient = x * reciprocal
        return tl.fma(tl.fma(quotient, minus, x), reciprocal, quotient)
    else:
        return tl.math.div_rn(x, tl.broadcast_to(divisor, x.shape))


# Keys: from rotated elements to codes.


@triton.jit
def bucketize(x, table, TASK: tl.constexpr):
    """Rotated fp32 to codes (int32) and their centroids: the number of midpoints up to each."""
    code = tl.zeros(x.shape, tl.int32)
    centroid = tl.zeros(x.shape, tl.float32) + table[0]
    for i in tl.static_range(tl.constexpr((1 << TASK.key_bits) - 1)):
        past = x >= (table[i] + table[i + 1]) * 0.5
        code += past.to(tl.int32)
        centroid = tl.where(past, table[i + 1], centroid)
    return code, centroid


@triton.jit
def _bucketize_symmetric(x, TASK: tl.constexpr):
    """As :func:`bucketize` for symmetric centroids: codes, and the squares of the centroids."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    bits += bits >> 31  # a negative element must be past a midpoint, not on it
    magnitude = bits & 0x7FFFFFFF
    count = tl.zeros(x.shape, tl.int32)
    square = tl.full(x.shape, TASK.positive[0] * TASK.positive[0], tl.float32)
    for i in tl.static_range(tl.constexpr((1 << (TASK.key_bits - 1)) - 1)):
        past = magnitude >= TASK.positive_edges[i]
        count += past.to(tl.int32)
        square = tl.where(past, TASK.positive[i + 1] * TASK.positive[i + 1], square)
    HALF: tl.constexpr = 1 << (TASK.key_bits - 1)
    return tl.where(bits < 0, HALF - 1 - count, HALF + count), square


@triton.jit
def encode_octet(columns, factor, sums, table, TASK: tl.constexpr):
    """Eight columns, to be multiplied by a factor [ROWS, 1], to packed codes and sums of their centroids' squares."""
    if TASK.assembled:
        factor = tl.broadcast_to(factor * TASK.companding[0], columns[0].shape)
        if TASK.corrected:
            word, first, second = tl.inline_asm_elementwise(
                TASK.bucketize_assembly, "=&r,=&r,=&r" + ",f" * 9 + ",r,r",
                [columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], columns[7], factor,
                 sums[0], sums[1]],
                dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            return word, (first, second)
        else:
            word = tl.inline_asm_elementwise(
                TASK.bucketize_assembly, "=&r" + ",f" * 9,
                [columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], columns[7],
                 factor],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            return word, sums
    else:
        word = tl.zeros(columns[0].shape, tl.int32)
        squares = tl.zeros(columns[0].shape, tl.float32)
        for j in tl.static_range(8):
            if TASK.symmetric:
                code, square = _bucketize_symmetric(columns[j] * factor, TASK)
            else:
                code, centroid = bucketize(columns[j] * factor, table, TASK)
                square = centroid * centroid
            word = word | (code << (TASK.key_bits * j))
            squares += square
        return word, (sums[0] + squares,)


@triton.jit
def no_squares(SHAPE: tl.constexpr, TASK: tl.constexpr):
    """The sums of :func:`encode_octet` before the first eight."""
    if TASK.assembled:
        return (tl.zeros(SHAPE, tl.int32), tl.zeros(SHAPE, tl.int32))
    else:
        return (tl.zeros(SHAPE, tl.float32),)


@triton.jit
def squares_of(sums, TASK: tl.constexpr):
    """The sums of :func:`encode_octet` [ROWS, parts] as one for each row, fp32 [ROWS]."""
    if TASK.assembled:
        whole = sums[0].to(tl.float32) * _FIRST_DIGIT + sums[1].to(tl.float32)
        return tl.sum(whole, 1) * TASK.square_unit
    else:
        return tl.sum(sums[0], 1)


@triton.jit
def word_of_zeros(table, TASK: tl.constexpr):
    """The packed codes of eight zeros."""
    code, _ = bucketize(tl.zeros([1], tl.float32), table, TASK)
    return code * (0x11111111 if TASK.key_bits == 4 else 0o11111111)


@triton.jit
def table_of(centroids, TASK: tl.constexpr):
    """The centroids: numbers, or what the call has of its own."""
    table = ()
    for i in tl.static_range(tl.constexpr(1 << TASK.key_bits)):
        if centroids is not None:
            table = table + (tl.load(centroids + i),)
        else:
            table = table + (TASK.table[i],)
    return table


@triton.jit
def look_up(code, table, BITS: tl.constexpr):
    """The table's entries for codes (of which the last bits count)."""
    level = table
    for bit in tl.static_range(BITS):
        odd = ((code >> bit) & 1) != 0
        above = ()
        for i in tl.static_range(tl.constexpr(1 << (BITS - 1 - bit))):
            above = above + (tl.where(odd, level[2 * i + 1], level[2 * i]),)
        level = above
    return level[0]


# Values: from elements to codes.


@triton.jit
def extreme(a, b, MOST: tl.constexpr, PATHS: tl.constexpr):
    """The larger, or the smaller, of elements; NaN where one is."""
    if PATHS.pairs != "none" and a.dtype.primitive_bitwidth == 16:  # two at a time
        KIND: tl.constexpr = ("max" if MOST else "min") + (".NaN.bf16x2" if a.dtype == tl.bfloat16 else ".NaN.f16x2")
        return tl.inline_asm_elementwise(KIND + " $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)
    elif PATHS.interpreted and a.dtype.primitive_bitwidth == 16:  # Triton 3.9 compares the bits of bf16
        return extreme(a.to(tl.float32), b.to(tl.float32), MOST, PATHS).to(a.dtype)
    elif MOST:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _extreme_of_halves(x, MOST: tl.constexpr, PATHS: tl.constexpr):
    """The larger, or the smaller, of the two halves of a thread's elements, neighbours kept together."""
    ROWS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = x.shape[2] // 2
    a, b = tl.split(tl.permute(tl.reshape(x, [ROWS, PARTS, 2, HALF]), (0, 1, 3, 2)))
    return extreme(a, b, MOST, PATHS)


@triton.jit
def extreme_of_columns(x, MOST: tl.constexpr, PATHS: tl.constexpr):
    """The largest, or the smallest, of a thread's elements of a tile [ROWS, parts, width], fp32 [ROWS, parts]."""
    if x.shape[2] == 8:
        x = _extreme_of_halves(x, MOST, PATHS)
    a, b = tl.split(_extreme_of_halves(x, MOST, PATHS))
    return extreme(a.to(tl.float32), b.to(tl.float32), MOST, PATHS)


@triton.jit
def pack_values(columns, TASK: tl.constexpr):
    """Eight columns of fp32 in [0, 2**value_bits) to their integer parts, packed in an int32."""
    PATHS: tl.constexpr = TASK.paths
    if PATHS.pairs != "none":
        return tl.inline_asm_elementwise(
            TASK.pack_values_assembly, "=&r" + ",f" * 8,
            [columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], columns[7]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.zeros(columns[0].shape, tl.int32)
        for j in tl.static_range(8):
            word = word | (columns[j].to(tl.int32) << (TASK.value_bits * j))
        return word


@triton.jit
def fp16_bits(x, lost):
    """fp32 clamped to fp16's finite range, as bits; NaN where it is lost."""
    clamped = tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)
    return tl.where(lost, tl.full(x.shape, 0x7E00, tl.uint16), clamped.to(tl.uint16, bitcast=True))


# Packed codes of a row, in a tuple of runs of eight elements, to and from memory.


@triton.jit
def _words_of(runs, BITS: tl.constexpr, TASK: tl.constexpr):
    """Runs of eight codes (int32) as the words in which a row's codes are stored, in order."""
    RUNS: tl.constexpr = TASK.octets
    words = ()
    if word_bytes(TASK, BITS) == 4:
        if BITS == 8:
            for i in tl.static_range(2 * RUNS):
                words = words + (runs[i],)
        elif BITS == 4:
            for i in tl.static_range(RUNS):
                words = words + (runs[i],)
        else:
            for i in tl.static_range(RUNS // 4):
                r0, r1, r2, r3 = runs[4 * i], runs[4 * i + 1], runs[4 * i + 2], runs[4 * i + 3]
                words = words + (r0 | (r1 << 24), ((r1 >> 8) & 0xFFFF) | (r2 << 16), ((r2 >> 16) & 0xFF) | (r3 << 8))
    else:
        if BITS == 8:
            for i in tl.static_range(2 * RUNS):
                words = words + (runs[i].to(tl.uint16), (runs[i] >> 16).to(tl.uint16))
        elif BITS == 4:
            for i in tl.static_range(RUNS):
                words = words + (runs[i].to(tl.uint16), (runs[i] >> 16).to(tl.uint16))
        else:
            for i in tl.static_range(RUNS // 2):
                r0, r1 = runs[2 * i], runs[2 * i + 1]
                words = words + (r0.to(tl.uint16), ((r0 >> 16) | (r1 << 8)).to(tl.uint16), (r1 >> 8).to(tl.uint16))
    return words


@triton.jit
def _gathered(words, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Some words [ROWS, parts] as one tile [ROWS, parts, COUNT]."""
    if COUNT == 1:
        return words[FIRST][:, :, None]
    elif COUNT == 2:
        return tl.join(words[FIRST], words[FIRST + 1])
    else:
        HALF: tl.constexpr = COUNT // 2
        even = ()
        odd = ()
        for i in tl.static_range(HALF):
            even = even + (words[FIRST + 2 * i],)
            odd = odd + (words[FIRST + 2 * i + 1],)
        return _joined(_gathered(even, 0, HALF), _gathered(odd, 0, HALF))


@triton.constexpr_function
def _part_words(task, bits):
    """Words of one thread's part of a row."""
    return task.dim // task.parts * bits // 8 // word_bytes(task, bits)


@triton.constexpr_function
def _span_words(task, bits):
    return task.span * bits // 8 // word_bytes(task, bits)


@triton.jit
def _words_at(codes, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, TASK: tl.constexpr):
    """Pointers to some words of each part, as :func:`spread` has them."""
    SIZE: tl.constexpr = word_bytes(TASK, BITS)
    PARTS: tl.constexpr = TASK.parts
    SPAN: tl.constexpr = _span_words(TASK, BITS)
    START: tl.constexpr = FIRST // SPAN * SPAN * PARTS + FIRST % SPAN
    base = codes.to(tl.pointer_type(tl.int32 if SIZE == 4 else tl.uint16))
    return spread(base, tl.arange(0, PARTS) * SPAN, TASK) + (START + tl.arange(0, COUNT)[None, None, :])


@triton.jit
def store_codes(codes, runs, exists, BITS: tl.constexpr, TASK: tl.constexpr):
    """Write rows' codes, given as runs of eight; runs of four (int32) where they have 8 bits."""
    COUNT: tl.constexpr = stored_together(TASK, BITS)
    words = _words_of(runs, BITS, TASK)
    for i in tl.static_range(tl.constexpr(_part_words(TASK, BITS) // COUNT)):
        tile = _gathered(words, i * COUNT, COUNT)
        pointer = _words_at(codes, i * COUNT, COUNT, BITS, TASK)
        tl.store(pointer, in_order(tile, TASK), mask=spread_mask(exists, TASK))


@triton.jit
def _scattered(tile, COUNT: tl.constexpr):
    """A tile [ROWS, parts, COUNT] as columns."""
    if COUNT == 1:
        return (tl.reshape(tile, [tile.shape[0], tile.shape[1]]),)
    elif COUNT == 2:
        a, b = tl.split(tile)
        return (a, b)
    else:
        HALF: tl.constexpr = COUNT // 2
        even, odd = halves_of_columns(tile)
        evens = _scattered(even, HALF)
        odds = _scattered(odd, HALF)
        columns = ()
        for i in tl.static_range(HALF):
            columns = columns + (evens[i], odds[i])
        return columns


@triton.jit
def four_runs(w0, w1, w2):
    """Three words of 32 codes of 3 bits as four runs of eight."""
    return (w0, ((w0 >> 24) & 0xFF) | (w1 << 8), ((w1 >> 16) & 0xFFFF) | (w2 << 16), w2 >> 8)


@triton.jit
def two_runs(h0, h1, h2):
    """Three half words of 16 codes of 3 bits as two runs of eight."""
    return (h0 | (h1 << 16), (h1 >> 8) | (h2 << 8))


@triton.jit
def load_codes(codes, exists, BITS: tl.constexpr, TASK: tl.constexpr):
    """Rows' codes as runs of eight in an int32 (of four where they have 8 bits); bits above a run are arbitrary."""
    COUNT: tl.constexpr = vector(TASK, BITS)
    RUNS: tl.constexpr = TASK.octets
    words = ()
    for i in tl.static_range(tl.constexpr(_part_words(TASK, BITS) // COUNT)):
        tile = tl.load(_words_at(codes, i * COUNT, COUNT, BITS, TASK), mask=spread_mask(exists, TASK), other=0)
        words = words + _scattered(in_order(tile.to(tl.int32), TASK), COUNT)
    runs = ()
    if word_bytes(TASK, BITS) == 4:
        if BITS == 3:
            for i in tl.static_range(RUNS // 4):
                runs = runs + four_runs(words[3 * i], words[3 * i + 1], words[3 * i + 2])
        else:
            runs = words
    elif BITS == 3:
        for i in tl.static_range(RUNS // 2):
            runs = runs + two_runs(words[3 * i], words[3 * i + 1], words[3 * i + 2])
    else:
        for i in tl.static_range(tl.constexpr(RUNS * BITS // 4)):
            runs = runs + (words[2 * i] | (words[2 * i + 1] << 16),)
    return runs
