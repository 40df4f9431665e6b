"""Gather rows from pages and dequantize them: one kernel for every format.

    grid      blocks of [tokens, steps]: a thread takes some of a row's steps (8 elements, or 2), which stand a block's
              width apart
    reads     values         4 to 16 bytes a step, once
              scales         1 byte, with the other threads of the group
    writes    rows           16 or 32 bytes a step

Neighbouring threads write neighbouring 16 bytes. A row whose slot is negative or past the end reads nothing and is
written as zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from mxkv.backends.numba_cuda import codec
from mxkv.backends.numba_cuda.addressing import place_finder
from mxkv.backends.numba_cuda.primitives import (
    device,
    fetch8,
    fetch16,
    fetch128,
    fetch_float,
    fetch_index,
    float_of,
    i32,
    i64,
    mul,
    put16,
    put32,
    u32,
)
from mxkv.backends.numba_cuda.rows import (
    ELEMENT_BYTES,
    encoder,
    float_of_bf16,
    halves_of,
    octet_writer,
    quad_putter,
    upper_halves,
    word_fetcher,
)
from mxkv.backends.numba_cuda.tasks import WIDEST, LoadTask, Record

_PAIR = 2
_PACKED_E2M1, _PACKED_E4M3 = 252, 134  # E8M0 bytes, at most: 6 * 2**125 is of bf16's range; 2**120 * 2**7 is of fp32's


class Decoder(NamedTuple):
    """How a step of a record is read: functions of the record's addresses and an element. Words are four int32.

    Attributes:
        fetch_body, fetch_tail: The words of a step, of the body and of a bf16 tail.
        decode_body: From the body's words and the factor of a scale for the whole cache to a tuple of fp32.
        decode_tail: From the tail's words to one.
        is_plain: Of the body's words, whether bf16 holds every product as it is, neither rounded nor saturated.
        packs: Of the body's words of eight, whether they are as they nearly always are, so that ``pack`` is right.
        pack: From them to the products as bf16, two to a word.
    """

    fetch_body: Any
    fetch_tail: Any
    decode_body: Any
    decode_tail: Any
    is_plain: Any
    packs: Any
    pack: Any


def step_decoder(record: Record, tensor_scaled: bool) -> Decoder:
    """What reads a record's steps."""
    element, alignment, step = record.element, record.alignment, record.step
    group, body, body_bytes = record.group, record.body, record.body_bytes
    grouped, e8m0 = record.grouped, record.scale == "e8m0"
    fetch_word = word_fetcher(alignment)
    decode_scale = codec.decode_e8m0 if e8m0 else codec.decode_e4m3
    whole_words = alignment >= 16
    least, most = _plain_scales(record)

    @device
    def fetch_scale(scales_at, at):
        return fetch8(scales_at + u32(at) // group) if grouped else i32(0)

    @device
    def factor_of(scale, factor):
        return decode_scale(scale) if grouped else factor

    @device
    def times(x, factor):
        return mul(x, factor) if grouped or tensor_scaled else x

    @device
    def fetch_e2m1(values_at, scales_at, at):
        return fetch_word(values_at + u32(at) // 2), i32(0), i32(0), fetch_scale(scales_at, at)

    @device
    def e2m1_octet(word, scale):
        return (
            mul(codec.decode_e2m1(word), scale), mul(codec.decode_e2m1(word >> 4), scale),
            mul(codec.decode_e2m1(word >> 8), scale), mul(codec.decode_e2m1(word >> 12), scale),
            mul(codec.decode_e2m1(word >> 16), scale), mul(codec.decode_e2m1(word >> 20), scale),
            mul(codec.decode_e2m1(word >> 24), scale), mul(codec.decode_e2m1(word >> 28), scale),
        )  # fmt: skip

    @device
    def e2m1_eight(words, factor):
        return e2m1_octet(words[0], factor_of(words[3], factor))

    @device
    def packed(x):
        return (
            upper_halves(x[0], x[1]), upper_halves(x[2], x[3]), upper_halves(x[4], x[5]), upper_halves(x[6], x[7]),
        )  # fmt: skip

    @device
    def packs_e2m1(words):
        return not e8m0 or (words[3] >= 2 and words[3] <= _PACKED_E2M1)

    @device
    def pack_e2m1(words):
        if e8m0:
            return codec.scaled_e2m1_octet(words[0], words[3])
        return packed(e2m1_octet(words[0], factor_of(words[3], float_of(0x3F800000))))

    @device
    def fetch_e4m3(values_at, scales_at, at):
        return fetch_word(values_at + at), fetch_word(values_at + at + 4), i32(0), fetch_scale(scales_at, at)

    @device
    def e4m3_octet(a, b, scale):
        return (
            times(codec.decode_e4m3(a), scale), times(codec.decode_e4m3(a >> 8), scale),
            times(codec.decode_e4m3(a >> 16), scale), times(codec.decode_e4m3(a >> 24), scale),
            times(codec.decode_e4m3(b), scale), times(codec.decode_e4m3(b >> 8), scale),
            times(codec.decode_e4m3(b >> 16), scale), times(codec.decode_e4m3(b >> 24), scale),
        )  # fmt: skip

    @device
    def e4m3_eight(words, factor):
        return e4m3_octet(words[0], words[1], factor_of(words[3], factor))

    @device
    def packs_e4m3(words):
        if grouped and not e8m0:
            return True
        finite = not codec.has_e4m3_nan(words[0]) and not codec.has_e4m3_nan(words[1])
        return finite and (not e8m0 or (words[3] >= least and words[3] <= _PACKED_E4M3))

    @device
    def pack_e4m3(words):
        a, b = words[0], words[1]
        if grouped and not e8m0:
            return packed(e4m3_octet(a, b, factor_of(words[3], float_of(0x3F800000))))
        factor = float_of((words[3] + 120) << 23) if e8m0 else float_of(247 << 23)  # a scale, or 1, times 2**120
        return packed((
            codec.scaled_e4m3(a << 24, factor), codec.scaled_e4m3(a << 16, factor),
            codec.scaled_e4m3(a << 8, factor), codec.scaled_e4m3(a, factor),
            codec.scaled_e4m3(b << 24, factor), codec.scaled_e4m3(b << 16, factor),
            codec.scaled_e4m3(b << 8, factor), codec.scaled_e4m3(b, factor),
        ))  # fmt: skip

    @device
    def fetch_bf16(address):
        if whole_words:
            return fetch128(address)
        return fetch_word(address), fetch_word(address + 4), fetch_word(address + 8), fetch_word(address + 12)

    @device
    def fetch_plain(values_at, scales_at, at):
        return fetch_bf16(values_at + 2 * at)

    @device
    def plain_eight(words, factor):
        return halves_of(words)

    @device
    def packs_bf16(words):
        return True

    @device
    def pack_bf16(words):
        return words

    @device
    def fetch_tail(values_at, at):
        return fetch_bf16(values_at + body_bytes + 2 * (at - body))

    @device
    def fetch_half(address):
        if alignment % 2 == 0:
            return fetch16(address)
        return i32(fetch8(address) | (fetch8(address + 1) << 8))

    @device
    def fetch_halves(address, first):
        half = i32(0)
        if first:
            half = fetch_half(address)
        return half, fetch_half(address + 2), i32(0), i32(0)

    @device
    def bf16_two(words):
        return float_of_bf16(words[0]), float_of_bf16(words[1])

    @device
    def fetch_e2m1_pair(values_at, scales_at, at):
        return fetch8(values_at + u32(at) // 2), i32(0), i32(0), fetch_scale(scales_at, at)

    @device
    def e2m1_two(words, factor):
        byte, scale = words[0], factor_of(words[3], factor)
        return mul(codec.decode_e2m1(byte), scale), mul(codec.decode_e2m1(byte >> 4), scale)

    @device
    def fetch_e4m3_pair(values_at, scales_at, at):
        byte = i32(0)
        if at >= 0:
            byte = fetch8(values_at + at)
        return byte, fetch8(values_at + at + 1), i32(0), fetch_scale(scales_at, at)

    @device
    def e4m3_two(words, factor):
        scale = factor_of(words[3], factor)
        return times(codec.decode_e4m3(words[0]), scale), times(codec.decode_e4m3(words[1]), scale)

    @device
    def fetch_plain_pair(values_at, scales_at, at):
        return fetch_halves(values_at + 2 * at, at >= 0)

    @device
    def plain_two(words, factor):
        return bf16_two(words)

    @device
    def fetch_tail_pair(values_at, at):
        return fetch_halves(values_at + body_bytes + 2 * (at - body), True)

    @device
    def is_plain(words):
        if not e8m0:
            return not tensor_scaled
        return words[3] >= least and words[3] <= most

    if step == _PAIR:
        pairs = {
            "e2m1": (fetch_e2m1_pair, e2m1_two),
            "e4m3": (fetch_e4m3_pair, e4m3_two),
            "bf16": (fetch_plain_pair, plain_two),
        }
        fetch, decode = pairs[element]
        return Decoder(fetch, fetch_tail_pair, decode, bf16_two, is_plain, None, None)
    octets = {
        "e2m1": (fetch_e2m1, e2m1_eight, packs_e2m1, pack_e2m1),
        "e4m3": (fetch_e4m3, e4m3_eight, packs_e4m3, pack_e4m3),
        "bf16": (fetch_plain, plain_eight, packs_bf16, pack_bf16),
    }
    fetch, decode, packs, pack = octets[element]
    return Decoder(fetch, fetch_tail, decode, halves_of, is_plain, packs, pack)


def _plain_scales(record: Record) -> tuple[int, int]:
    """The E8M0 bytes whose products with any code bf16 holds."""
    if record.element == "e2m1":
        return 0, 252  # 6 * 2**125
    return 3, 246  # 2**-9 * 2**-124, 448 * 2**119


def load_kernel(task: LoadTask):
    """The kernel for a task, as a Python function of addresses and numbers; strides are in bytes."""
    record = task.record
    dim, step, body = record.dim, record.step, record.body
    lines, skipped = load_lines(task), dim % 2 if step == _PAIR else 0
    index_bytes, scaled, largest, size = task.index_bytes, task.scaled, task.dtype_max, ELEMENT_BYTES[task.dtype]
    plain_bf16, to_bf16 = record.element == "bf16", task.dtype == "bf16"
    place_of = place_finder(record)
    fetch_body, fetch_tail, decode_body, decode_tail, is_plain, _, _ = step_decoder(record, scaled)
    encode, put = encoder(task.dtype), put32 if task.dtype == "fp32" else put16
    put_octet = octet_writer(task.dtype, task.aligned)
    put_words = quad_putter(WIDEST if task.aligned else 2)

    @device
    def put_eight(address, x, keep_infinite, first):
        a, b = codec.saturated(x[0], largest, keep_infinite), codec.saturated(x[1], largest, keep_infinite)
        c, d = codec.saturated(x[2], largest, keep_infinite), codec.saturated(x[3], largest, keep_infinite)
        e, f = codec.saturated(x[4], largest, keep_infinite), codec.saturated(x[5], largest, keep_infinite)
        g, h = codec.saturated(x[6], largest, keep_infinite), codec.saturated(x[7], largest, keep_infinite)
        put_octet(address, (a, b, c, d, e, f, g, h))

    @device
    def put_two(address, x, keep_infinite, first):
        if first:
            put(address, encode(codec.saturated(x[0], largest, keep_infinite)))
        put(address + size, encode(codec.saturated(x[1], largest, keep_infinite)))

    @device
    def put_bf16(address, x):
        """What bf16 holds as it is."""
        put_words(
            address,
            upper_halves(x[0], x[1]), upper_halves(x[2], x[3]), upper_halves(x[4], x[5]), upper_halves(x[6], x[7]),
        )  # fmt: skip

    @device
    def zero_eight(address):
        zero = float_of(0)
        put_octet(address, (zero, zero, zero, zero, zero, zero, zero, zero))

    @device
    def zero_two(address, first):
        if first:
            put(address, 0)
        put(address + size, 0)

    pairs = step == _PAIR
    cheap = to_bf16 and not pairs
    put_step = put_two if pairs else put_eight

    def kernel(cache, slots, out, cache_scale, tokens, num_slots, block_stride, slot_stride, out_stride):
        factor = float_of(0x3F800000)
        if scaled:
            factor = fetch_float(cache_scale)
        token = i64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        while token < tokens:
            slot = fetch_index(slots + token * slot_stride, index_bytes)
            known = slot >= 0 and slot < num_slots
            if not known:
                slot = i64(0)
            values_at, scales_at = place_of(cache, slot, num_slots, block_stride)
            line = i32(cuda.threadIdx.x)
            while line < lines:
                at = i32(line * step - skipped)
                address, first = out + token * out_stride + at * size, at >= 0
                if not known:
                    if pairs:
                        zero_two(address, first)
                    else:
                        zero_eight(address)
                elif at >= body:
                    if cheap:
                        put_bf16(address, decode_tail(fetch_tail(values_at, at)))
                    else:
                        put_step(address, decode_tail(fetch_tail(values_at, at)), True, first)
                else:
                    words = fetch_body(values_at, scales_at, at)
                    x = decode_body(words, factor)
                    if cheap and is_plain(words):
                        put_bf16(address, x)
                    else:
                        put_step(address, x, plain_bf16, first)
                line = i32(line + cuda.blockDim.x)
            token += i64(cuda.gridDim.x) * cuda.blockDim.y

    return kernel


def load_lines(task: LoadTask) -> int:
    """Into how many steps a row is taken."""
    return -(-task.record.dim // task.record.step)
