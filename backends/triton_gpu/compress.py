"""Pool the tokens of groups, normalise, quantize, save ring rows: one kernel for compress_norm and compress_store.

    grid      one program for TOKENS consecutive tokens, which it takes one after another
    reads     of every token: position, slot, request, that request's bounds, near a chunk's ends its first token
              of a token that closes a group: its row and its predecessor's   [1, lines, pairs] x 4, 8 KiB at ratio 2
    writes    of a token that closes a group: a bf16 row, or a record of the cache, or both
              of a chunk's last tokens: 4 KiB to the request's ring

A tile is one whole row, as pairs of neighbours, with a line for each group of the format: a thread loads 16 bytes at a
time, RoPE's pairs need no shuffle, and all of a record is encoded from that tile. (Where the pairs of a format's group
are no power of two, each region pools its part of the rows again, in a tile of its own: each element's arithmetic is
fixed, so its bits are the same.)

Loads that wait for one another are what takes long: position, slot and request, then that request's bounds, near a
chunk's ends its first token, then the rows. All but the last are of all tokens of a program at once; weights and
cosines are asked for before the rows, and so come with them.

Who writes a ring. A request reads at most one ring row, the predecessor of its first token, and the program of that
token reads it. Each token's own program saves the token's row, unless it would go where that predecessor is: such a row
is left to the program of the first token, which writes it behind a barrier that its read comes before. So no program
writes what another one reads, and the order in which programs run does not matter.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mxkv import numerics
from mxkv.backends.triton_gpu import addressing, codec
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.store import StoreTask, encode_group_pairs, encode_plain_pairs, store_values

DIM = tl.constexpr(512)
RING_DIM = tl.constexpr(1024)
ROPE_DIM = tl.constexpr(64)
MOST_TOKENS = tl.constexpr(32)  # of a program: a bit of a number for each
LOG2_E = tl.constexpr(numerics.LOG2_E)
INTEGERS = tl.constexpr(numerics.INTEGERS)
INTEGERS_BITS = tl.constexpr(numerics.INTEGERS_BITS)
MOST_HALVINGS = tl.constexpr(numerics.MOST_HALVINGS)
C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in numerics.EXP2_COEFFICIENTS)


class Rows(NamedTuple):
    """Rows, or indices (rows of one element).

    Attributes:
        ptr: The first one's.
        stride: From one to the next, in elements.
    """

    ptr: Any
    stride: Any


class Requests(NamedTuple):
    """Which tokens are a request's.

    Attributes:
        starts: int32 or int64 [requests + 1].
        starts_stride: Of it.
        of_token: int32 or int64 [tokens].
        of_token_stride: Of it.
    """

    starts: Any
    starts_stride: Any
    of_token: Any
    of_token_stride: Any


class Ring(NamedTuple):
    """Ring rows. (The stride from a row to the next is a constant.)

    Attributes:
        ptr: The first one's.
        block_stride: From a ring to the next, in elements.
        slots: Rows of all rings.
    """

    ptr: Any
    block_stride: Any
    slots: Any


class Previous(NamedTuple):
    """Predecessors from other ranks.

    Attributes:
        ptr: fp32 [rows, 1024], or None.
        stride: From a row to the next, in elements.
        rows: How many there are.
        indices: int32 or int64 [requests], or None.
        indices_stride: Of it.
    """

    ptr: Any
    stride: Any
    rows: Any
    indices: Any
    indices_stride: Any


class Target(NamedTuple):
    """The cache that latents are stored in, and how.

    Attributes:
        cache: Its first byte, or None.
        block_stride: From a page to the next, in bytes.
        num_slots: Its slots.
        slots: int32 or int64 [tokens].
        slot_stride: Of it.
        cos_sin: [max_position, 64], or None.
        table_stride: Of it.
        max_position: Rows of it.
        scale: The per-tensor scale, or None.
    """

    cache: Any
    block_stride: Any
    num_slots: Any
    slots: Any
    slot_stride: Any
    cos_sin: Any
    table_stride: Any
    max_position: Any
    scale: Any


class Standing(NamedTuple):
    """What is to be done for a token, or for each of [tokens].

    Attributes:
        makes: Whether it closes a group whose rows are there.
        begins: Whether it is its chunk's first.
        saved: Whether its row is saved in its slot of the ring.
        rest: Whether the row that it read is then to be written.
        slot: Its slot of the ring.
        kept: The slot that its chunk's first token reads, or -1.
        rank_row: The row of another rank that precedes it, or -1.
        begin, end: Of its chunk.
        request: That it names.
    """

    makes: Any
    begins: Any
    saved: Any
    rest: Any
    slot: Any
    kept: Any
    rank_row: Any
    begin: Any
    end: Any
    request: Any


@dataclasses.dataclass(frozen=True, eq=False)  # one object for each task: Triton hashes it at every launch
class CompressTask:
    """What a compression kernel is compiled for.

    Attributes:
        ratio: 1, or 2: pool the two tokens of a group.
        capacity: Rows of a ring.
        ring_stride: From a ring's row to the next, in elements.
        previous: Whether there are rows of other ranks.
        lines, pairs: The tile of a row: 256 pairs.
        whole: Whether each region of a record is encoded from that tile, which has been rotated.
        aligned: Whether fp32 rows are aligned to 16 bytes.
        words_out: Whether pairs of bf16 rows are aligned to 4 bytes.
        store: What the cache's records need, or None.
        paths: The target's instructions.
    """

    ratio: int
    capacity: int
    ring_stride: int
    previous: bool
    lines: int
    pairs: int
    whole: bool
    aligned: bool
    words_out: bool
    store: StoreTask | None
    paths: Paths

    @property
    def addresses(self) -> bool:
        return self.paths.register == "v"

    @property
    def regions(self) -> int:
        return 0 if self.store is None else len(self.store.regions)


@triton.jit
def _row(pointer, TASK: tl.constexpr):
    return tl.multiple_of(pointer, 16) if TASK.aligned else pointer


@triton.jit
def _address(pointer, TASK: tl.constexpr):
    """What a branch may give: AMD's compiler has no pointer that comes from one of several tensors."""
    return pointer.to(tl.int64) if TASK.addresses else pointer


@triton.jit
def _tile(TASK: tl.constexpr):
    """A row's lines [1, lines] and its pairs [1, lines, pairs]."""
    group = tl.arange(0, TASK.lines)[None, :]
    pair = group[:, :, None] * TASK.pairs + tl.arange(0, TASK.pairs)[None, None, :]
    # A thread takes two pairs, 16 bytes, at a time. For wider stores it would take more, and threads that read beside
    # each other would stand further apart.
    return group, tl.max_contiguous(pair, [1, 1, 2])


@triton.jit
def _pairs_of(row, pair, mask):
    """Pairs of a row's fp32 as two tiles."""
    both = tl.load(row.to(tl.pointer_type(tl.int64)) + pair, mask=mask)
    return codec.float_of(both.to(tl.int32)), codec.float_of((both >> 32).to(tl.int32))


@triton.jit
def softmax_of_two(first, second, PATHS: tl.constexpr):
    """The weights of two scores; :func:`mxkv.numerics.softmax_of_two`, operation by operation."""
    difference = second - first
    halvings = tl.abs(difference) * LOG2_E
    rounded = halvings + INTEGERS
    fraction = (rounded - INTEGERS) - halvings
    power = fraction * C5 + C4
    power = power * fraction + C3
    power = power * fraction + C2
    power = power * fraction + C1
    power = power * fraction + 1.0
    scale = codec.float_of((0 - codec.bits_of(rounded) + (INTEGERS_BITS + 127)) << 23)
    smaller = tl.where(halvings >= MOST_HALVINGS, 0.0, power * scale)
    large = _reciprocal(smaller + 1.0, PATHS)
    small = smaller * large
    rises = difference >= 0
    return tl.where(rises, small, large), tl.where(rises, large, small)


@triton.jit
def _reciprocal(x, PATHS: tl.constexpr):
    """1 / x for x in [1, 2], correctly rounded.

    It is what the correctly rounded instruction does where nothing over- or underflows, without its branches.
    """
    if PATHS.pairs != "none":
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 near, rest;
            rcp.approx.ftz.f32 near, $1;
            fma.rn.f32 rest, near, $1, 0fBF800000;
            neg.f32 rest, rest;
            fma.rn.f32 $0, near, rest, near;
            }""",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _pooled(first, second, pair, mask, TASK: tl.constexpr):
    """Pairs of a group's values before they are normalised."""
    if TASK.ratio == 2:
        PATHS: tl.constexpr = TASK.paths
        first_x, first_y = _pairs_of(first, pair, mask)
        first_score_x, first_score_y = _pairs_of(first + DIM, pair, mask)
        x, y = _pairs_of(second, pair, mask)
        score_x, score_y = _pairs_of(second + DIM, pair, mask)
        first_weight, weight = softmax_of_two(first_score_x, score_x, PATHS)
        x = first_x * first_weight + x * weight
        first_weight, weight = softmax_of_two(first_score_y, score_y, PATHS)
        y = first_y * first_weight + y * weight
        return x, y
    else:
        return _pairs_of(second, pair, mask)


@triton.jit
def _halves(values):
    """[2 n] to [n]."""
    return tl.sum(tl.reshape(values, [2, values.shape[0] // 2]), 0)


@triton.jit
def _sum_of_squares(x, y):
    """A number from [1, lines, pairs] twice; :func:`mxkv.numerics.sum_of_squares`. Sums of two need no order."""
    squares = tl.reshape(x * x + y * y, [DIM // 2])
    squares = _halves(_halves(squares))
    squares = tl.sum(tl.reshape(squares, [DIM // 16, 2]), 1)
    return tl.sum(_halves(_halves(_halves(_halves(squares)))), 0)


@triton.jit
def _weights_of(weight, pair, mask):
    """Pairs of bf16, in words."""
    return tl.load(weight.to(tl.pointer_type(tl.int32)) + pair, mask=mask)


@triton.jit
def _normalised(x, y, factor, weights, TASK: tl.constexpr):
    """Pairs of the latent's bf16, the even one in the low half."""
    PATHS: tl.constexpr = TASK.paths
    x = x * factor * codec.float_of(weights << 16)
    y = y * factor * codec.float_of(weights & -65536)
    return codec.bf16_pair(x, y, PATHS)


@triton.jit
def _table_row(position, target, TASK: tl.constexpr):
    """Where a group's cosines begin."""
    return (position - position % TASK.ratio).to(tl.int64) * target.table_stride


@triton.jit
def _angles(pair, position, stored, target, TASK: tl.constexpr):
    """Which pairs of a row RoPE turns, their cosines and their sines."""
    angle = pair - (DIM - ROPE_DIM) // 2
    turned = angle >= 0
    at = target.cos_sin + _table_row(position, target, TASK) + angle
    asked = (turned & stored) != 0  # Triton 3.9 interprets a tile and a number as integers
    cos = tl.load(at, mask=asked, other=1.0).to(tl.float32)
    sin = tl.load(at + ROPE_DIM // 2, mask=asked, other=0.0).to(tl.float32)
    return turned, cos, sin


@triton.jit
def _store_region(
    x, y, first, second, factor, weight, target, at, values_at, scales_at, reciprocal,
    INDEX: tl.constexpr, TASK: tl.constexpr,
):  # fmt: skip
    """Encode a region of a latent's record, and store it; ``x`` and ``y`` are the whole row."""
    STORE: tl.constexpr = TASK.store
    REGION: tl.constexpr = STORE.regions[INDEX]
    if TASK.whole:
        group, at_row = _tile(TASK)
        group = group - REGION.first // (2 * TASK.pairs)
        pair = at_row - REGION.first // 2
        inside = (pair >= 0) & (pair < REGION.all_pairs)
    else:
        group = tl.arange(0, REGION.groups_padded)[None, :]
        inner = tl.arange(0, REGION.pairs_padded)[None, None, :]
        pair = group[:, :, None] * REGION.pairs + inner
        inside = (group < REGION.groups)[:, :, None] & (inner < REGION.pairs) & (pair < REGION.all_pairs)
        at_row = pair + REGION.first // 2
        x, y = _pooled(first, second, at_row, inside, TASK)
        words = _normalised(x, y, factor, _weights_of(weight, at_row, inside), TASK)
        x, y = codec.float_of(words << 16), codec.float_of(words & -65536)
    if REGION.scale == "e8m0" or REGION.scale == "e4m3":
        values, byte = encode_group_pairs(x, y, at_row, inside, target.cos_sin, at, REGION, STORE)
        scales = scales_at + REGION.first_scale + group
        tl.store(scales, byte.to(tl.uint8), mask=(group >= 0) & (group < REGION.groups))
    else:
        values = encode_plain_pairs(x, y, at_row, inside, target.cos_sin, at, reciprocal, REGION, STORE)
    store_values(values_at + REGION.value_offset, pair, values, inside, REGION, STORE)


@triton.jit
def _store_record(words, angles, first, second, factor, weight, position, slot, target, TASK: tl.constexpr):
    """Store a latent in its slot of the cache."""
    STORE: tl.constexpr = TASK.store
    page, place = addressing.place_of(slot, target.block_stride, STORE)
    page = target.cache.to(tl.pointer_type(tl.uint8)) + page
    values_at = page + place * STORE.value_stride
    scales_at = page + STORE.scale_offset + place * STORE.scale_stride
    x, y = codec.float_of(words << 16), codec.float_of(words & -65536)
    at = position.to(tl.int64) * 0
    if target.cos_sin is not None:
        if TASK.whole:
            turned, cos, sin = angles
            x, y = tl.where(turned, x * cos - y * sin, x), tl.where(turned, y * cos + x * sin, y)
        else:
            at = _table_row(position, target, TASK)
    reciprocal = tl.full([1, 1, 1], 1.0, tl.float32)
    if target.scale is not None:
        reciprocal = tl.math.div_rn(reciprocal, tl.load(target.scale + tl.arange(0, 1))[:, None, None])
    for index in tl.static_range(tl.constexpr(TASK.regions)):
        _store_region(
            x, y, first, second, factor, weight, target, at, values_at, scales_at, reciprocal, index, TASK
        )  # fmt: skip
    for extra in tl.static_range(tl.constexpr(STORE.pad_scales)):
        tl.store(scales_at + STORE.num_scales + extra, tl.zeros([], tl.uint8))


@triton.jit
def _make_latent(before, token, rows, positions, weight, eps, out, target, TASK: tl.constexpr):
    """The latent of a group whose rows are a token's and that at ``before``: where it is asked for."""
    first = _row(before.to(tl.pointer_type(tl.float32)) if TASK.addresses else before, TASK)
    second = _row(rows.ptr + token * rows.stride, TASK)
    position = tl.load(positions.ptr + token * positions.stride)
    _group, pair = _tile(TASK)
    slot, stored, angles = position, position >= 0, (pair, pair, pair)
    if target.cache is not None:
        slot = tl.load(target.slots + token * target.slot_stride)
        stored = stored & (slot >= 0) & (slot < target.num_slots)
        if target.cos_sin is not None:
            stored = stored & (position < target.max_position)
    # Asked for before the rows, weights and cosines are not waited for after them.
    weights = _weights_of(weight, pair, None)
    if TASK.whole and target.cos_sin is not None:
        angles = _angles(pair, position, stored, target, TASK)
    x, y = _pooled(first, second, pair, None, TASK)
    # A number, not a tile of one: from that the compiler would take the others' layout.
    factor = tl.math.div_rn(1.0, tl.math.sqrt_rn(_sum_of_squares(x, y) * (1.0 / DIM) + eps))
    words = _normalised(x, y, factor, weights, TASK)
    if out.ptr is not None:
        row = out.ptr + token * out.stride
        latent = codec.canonical_bf16(words)
        if TASK.words_out:
            tl.store(row.to(tl.pointer_type(tl.int32)) + pair, latent)
        else:
            halves = row.to(tl.pointer_type(tl.int16)) + 2 * pair
            tl.store(halves, latent.to(tl.int16))
            tl.store(halves + 1, (latent >> 16).to(tl.int16))
    if target.cache is not None:
        if stored:
            _store_record(words, angles, first, second, factor, weight, position, slot, target, TASK)


@triton.jit
def _ring_row(slot, ring, TASK: tl.constexpr):
    """The row of a slot that exists."""
    block = (slot // TASK.capacity).to(tl.int64)
    return _row(ring.ptr + block * ring.block_stride + (slot % TASK.capacity).to(tl.int64) * TASK.ring_stride, TASK)


@triton.jit
def _save_row(row, slot, ring, TASK: tl.constexpr):
    at = tl.arange(0, RING_DIM)
    tl.store(_ring_row(slot, ring, TASK) + at, tl.load(row + at))


@triton.jit
def _standing(
    token, positions, slots, requests, ring, previous, tokens, num_requests, TASK: tl.constexpr
):  # fmt: skip
    """What has to be done for a token, or for each of [tokens]."""
    given = token < tokens
    slot = tl.load(slots.ptr + token * slots.stride, mask=given, other=-1)
    position = tl.load(positions.ptr + token * positions.stride, mask=given, other=-1)
    named = tl.load(requests.of_token + token * requests.of_token_stride, mask=given, other=-1)
    known_request = (named >= 0) & (named < num_requests)
    request = tl.where(known_request, named, 0).to(tl.int64)
    begin = tl.maximum(tl.load(requests.starts + request * requests.starts_stride).to(tl.int64), 0)
    end = tl.load(requests.starts + (request + 1) * requests.starts_stride).to(tl.int64)
    end = tl.minimum(end, tokens)
    inside = known_request & (begin <= token) & (token < end)
    begin = tl.minimum(begin, token)
    late = token >= end - TASK.capacity
    # A chunk's first token is asked after by few others, which do not make the rest wait.
    asks = inside & (begin < token) & ((token - begin <= 1) | late)
    first_slot = tl.load(slots.ptr + begin * slots.stride, mask=asks, other=slot)
    first_position = tl.load(positions.ptr + begin * positions.stride, mask=asks, other=position)
    first_request = tl.load(requests.of_token + begin * requests.of_token_stride, mask=asks, other=named)
    # The slot of the ring row that the chunk's first token reads; -1 if it reads none.
    reads = (first_position > 0) & (first_position % 2 == 1) & (first_slot >= 0) & (first_slot < ring.slots)
    reads = reads & (first_request == named)
    kept = first_slot // TASK.capacity * TASK.capacity + (first_position - 1) % TASK.capacity
    kept = tl.where(reads, kept, -1)
    closes = (position > 0) & (position % 2 == 1) & (slot >= 0) & ((token - begin > 1) | (first_slot >= 0))
    begins = inside & (token == begin)
    known = (token > begin) | reads
    rank_row = begin * 0 - 1
    if TASK.previous:
        at = previous.indices + request * previous.indices_stride
        rank_row = tl.load(at, mask=begins & closes, other=-1).to(tl.int64)
        known = tl.where(rank_row >= 0, rank_row < previous.rows, known)
    saved = inside & (slot >= 0) & (slot < ring.slots) & (first_slot >= 0) & late & (slot != kept)
    return Standing(inside & closes & known, begins, saved, begins & reads, slot, kept, rank_row, begin, end, named)


@triton.jit
def _first_row(standing, before, ring, previous, TASK: tl.constexpr):
    """The address of the row before that of a chunk's first token."""
    if standing.kept >= 0:
        before = _address(_ring_row(standing.kept, ring, TASK), TASK)
    if TASK.previous:
        if standing.rank_row >= 0:
            before = _address(previous.ptr + standing.rank_row * previous.stride, TASK)
    return before


@triton.jit
def _save_rows(standing, token, rows, slots, requests, ring, TASK: tl.constexpr):
    """Save a token's row, and that which goes where a chunk's first token has read."""
    if standing.saved:
        _save_row(_row(rows.ptr + token * rows.stride, TASK), standing.slot, ring, TASK)
    begin, end = standing.begin, standing.end
    last = begin + (end - begin) // TASK.capacity * TASK.capacity - 1
    if standing.rest & (last >= begin):
        last_request = tl.load(requests.of_token + last * requests.of_token_stride)
        if (tl.load(slots.ptr + last * slots.stride) == standing.kept) & (last_request == standing.request):
            tl.debug_barrier()  # every thread has read what was there
            _save_row(_row(rows.ptr + last * rows.stride, TASK), standing.kept, ring, TASK)


@triton.jit
def _flags(which):
    """One bit for each of [tokens]."""
    return tl.sum(which.to(tl.int32) << tl.arange(0, which.shape[0]), 0)


@triton.jit
def _take_tokens(
    program, rows, positions, slots, requests, ring, previous, weight, out, target, eps, tokens, num_requests,
    TASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Everything that has to be done for TOKENS tokens, at ratio 2."""
    if TOKENS == 1:
        mine = _standing(program, positions, slots, requests, ring, previous, tokens, num_requests, TASK)
        if mine.makes:
            before = _address(rows.ptr + tl.maximum(program - 1, 0) * rows.stride, TASK)
            if mine.begins:
                before = _first_row(mine, before, ring, previous, TASK)
            _make_latent(before, program, rows, positions, weight, eps, out, target, TASK)
        if not TASK.previous:
            _save_rows(mine, program, rows, slots, requests, ring, TASK)
    else:
        # What has to be done is found out for all at once, and is then one bit each. Of the few tokens at the ends of
        # chunks all else is found out again: kept, it would take the others' registers.
        index = tl.arange(0, MOST_TOKENS)
        theirs = tl.where(index < TOKENS, program + index, tokens)
        all = _standing(theirs, positions, slots, requests, ring, previous, tokens, num_requests, TASK)
        make, begin, save = _flags(all.makes), _flags(all.makes & all.begins), _flags(all.saved | all.rest)
        for i in range(TOKENS):
            token = program + i
            if (make >> i) & 1 != 0:
                before = _address(rows.ptr + tl.maximum(token - 1, 0) * rows.stride, TASK)
                if (begin >> i) & 1 != 0:
                    mine = _standing(token, positions, slots, requests, ring, previous, tokens, num_requests, TASK)
                    before = _first_row(mine, before, ring, previous, TASK)
                _make_latent(before, token, rows, positions, weight, eps, out, target, TASK)
            if not TASK.previous:
                if (save >> i) & 1 != 0:
                    mine = _standing(token, positions, slots, requests, ring, previous, tokens, num_requests, TASK)
                    _save_rows(mine, token, rows, slots, requests, ring, TASK)


@triton.jit(do_not_specialize=["tokens", "num_requests"])
def compress_kernel(
    rows, positions, slots, requests, ring, previous, weight, out, target, eps, tokens, num_requests,
    TASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64) * TOKENS
    if TASK.ratio == 2:
        _take_tokens(
            program, rows, positions, slots, requests, ring, previous, weight, out, target, eps, tokens, num_requests,
            TASK, TOKENS,
        )  # fmt: skip
    else:
        for i in range(TOKENS):
            token = program + i
            if token < tokens:
                slot = tl.load(slots.ptr + token * slots.stride)
                if slot >= 0:
                    _make_latent(rows.ptr, token, rows, positions, weight, eps, out, target, TASK)


@triton.jit(do_not_specialize=["tokens"])
def save_kernel(rows, slots, ring, tokens, TASK: tl.constexpr, TOKENS: tl.constexpr):
    """Rows to ring slots: one program for TOKENS rows, one after another; reads and writes 4 KiB a row."""
    program = tl.program_id(0).to(tl.int64) * TOKENS
    for i in range(TOKENS):
        token = program + i
        if token < tokens:
            slot = tl.load(slots.ptr + token * slots.stride)
            if (slot >= 0) & (slot < ring.slots):
                _save_row(_row(rows.ptr + token * rows.stride, TASK), slot, ring, TASK)
