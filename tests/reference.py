"""A second oracle, written from the specification alone: one value at a time, in exact arithmetic.

Numbers are Python floats, ints and fractions; where the specification says fp32, ``numpy.float32``. A code is found by
looking for the nearest value of its table. It is slow and obvious, and shares nothing with ``mxkv.numerics`` or with a
backend: of ``mxkv`` it reads the fields of a ``Format`` and nothing else.
"""

from __future__ import annotations

import bisect
import functools
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mxkv.formats import Element, Format, Placement, Scale

Rows = np.ndarray[Any, np.dtype[np.float32]]  # [n, d]
Pages = np.ndarray[Any, np.dtype[np.uint8]]  # [num_blocks, page bytes]

TWO = Fraction(2)
ROPE = 64


def _e4m3_magnitude(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    return mantissa * TWO**-9 if exponent == 0 else (8 + mantissa) * TWO ** (exponent - 10)


E2M1_TABLE = [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]
E4M3_TABLE = [_e4m3_magnitude(code) for code in range(0x7F)]  # 0x7f is NaN
TABLES = {Element.E2M1: E2M1_TABLE, Element.E4M3: E4M3_TABLE}
SIGN_BIT = {Element.E2M1: 8, Element.E4M3: 0x80}
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127, "float32": (2 - 2.0**-23) * 2.0**127}


# Numbers and their codes.


def float_of(bits: int) -> float:
    """The value of an fp32 bit pattern."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def bits_of(value: float) -> int:
    """The bit pattern of a value that fp32 holds."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def next_up(value: float) -> float:
    """The fp32 number above a finite, non-negative one."""
    return float_of(bits_of(value) + 1)


def next_down(value: float) -> float:
    """The fp32 number below a positive one."""
    return float_of(bits_of(value) - 1)


def negative(x: float) -> bool:
    """Whether the sign bit is set."""
    return math.copysign(1.0, x) < 0


@functools.cache
def nearest_code(element: Element, magnitude: float) -> int:
    """The code of the nearest value of the table, the even one of two equally near; the last one saturates."""
    table = TABLES[element]
    exact = Fraction(magnitude) if math.isfinite(magnitude) else table[-1]
    above = bisect.bisect_left(table, exact)
    near = [code for code in (above - 1, above) if 0 <= code < len(table)]
    return min(near, key=lambda code: (abs(table[code] - exact), code % 2))


def encode(element: Element, x: float) -> int:
    """The code of a number; NaN is E4M3's 0x7f."""
    if math.isnan(x):
        assert element is Element.E4M3
        return 0x7F
    return nearest_code(element, abs(x)) | (SIGN_BIT[element] if negative(x) else 0)


def decode(element: Element, code: int) -> float:
    """The value of a code; NaN for E4M3's 0x7f and 0xff."""
    magnitude = code & ~SIGN_BIT[element]
    if element is Element.E4M3 and magnitude == 0x7F:
        return math.nan
    return math.copysign(float(TABLES[element][magnitude]), -1.0 if code & SIGN_BIT[element] else 1.0)


def decode_e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def encode_bf16(x: float) -> int:
    """The bits of the nearest bf16, ties to even; every NaN is 0x7fc0."""
    if math.isnan(x):
        return 0x7FC0
    bits = bits_of(x)
    high, low = bits >> 16, bits & 0xFFFF
    return high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1))


def decode_bf16(bits: int) -> float:
    return float_of(bits << 16)


def round_to(x: float, dtype: str) -> float:
    """An fp32 number in another dtype, finite values saturating at its largest."""
    if math.isnan(x) or math.isinf(x):
        return x
    x = max(-LARGEST[dtype], min(LARGEST[dtype], x))
    if dtype == "bfloat16":
        return decode_bf16(encode_bf16(x))
    return float(np.float16(x)) if dtype == "float16" else x


# Scales.


@functools.cache
def _reach(element: Element) -> list[Fraction]:
    """What each E8M0 byte's scale times the element's largest value reaches."""
    return [TWO ** (byte - 127) * TABLES[element][-1] for byte in range(255)]


def e8m0_scale(amax: float, element: Element) -> int:
    """The smallest byte whose scale lets no element clamp; 127 for a group of zeros."""
    if amax == 0:
        return 127
    return bisect.bisect_left(_reach(element), Fraction(amax))


def e4m3_scale(amax: float, element: Element) -> int:
    quotient = np.float32(amax) / np.float32(float(TABLES[element][-1]))
    return encode(Element.E4M3, float(min(max(quotient, np.float32(2.0**-9)), np.float32(448))))


def finite_limit(format: Format) -> float:
    """The largest magnitude that does not count as infinite."""
    if format.element is Element.E2M1:
        return 1.5 * 2.0**127
    return 1.75 * 2.0**127 if format.scale is Scale.E8M0 else LARGEST["float32"]


def encode_group(group: Sequence[float], format: Format, nonfinite: str) -> tuple[list[int], int]:
    """The codes of one group, and its scale byte."""
    limit = finite_limit(format)
    if nonfinite == "sanitize":
        group = [0.0 if math.isnan(x) else max(-limit, min(limit, x)) for x in group]
    elif any(math.isnan(x) or abs(x) > limit for x in group):
        return [0] * len(group), 255 if format.scale is Scale.E8M0 else 0x7F
    amax = max(abs(x) for x in group)
    if format.amax_floor:
        amax = max(amax, float(np.float32(format.amax_floor)))
    if format.scale is Scale.E8M0:
        byte = e8m0_scale(amax, format.element)
        return [encode(format.element, x / 2.0 ** (byte - 127)) for x in group], byte  # exact: fp64 holds the quotient
    byte = e4m3_scale(amax, format.element)
    scale = np.float32(decode(Element.E4M3, byte))
    return [encode(format.element, float(np.float32(x) / scale)) for x in group], byte


# Records.


def pack(codes: Sequence[int], element: Element) -> bytes:
    """One byte for each code, or for two: the even one in the low nibble."""
    if element is Element.E4M3:
        return bytes(codes)
    return bytes(codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2))


def unpack(values: bytes, element: Element) -> list[int]:
    if element is Element.E4M3:
        return list(values)
    return [code for byte in values for code in (byte % 16, byte // 16)]


def encode_bf16_element(x: float, nonfinite: str) -> bytes:
    if nonfinite == "sanitize":
        largest = LARGEST["bfloat16"]
        x = 0.0 if math.isnan(x) else max(-largest, min(largest, x))
    return encode_bf16(x).to_bytes(2, "little")


def encode_fp8_element(x: float, nonfinite: str, cache_scale: float) -> int:
    x = decode_bf16(encode_bf16(x))
    if math.isinf(x):
        return (0xFE if negative(x) else 0x7E) if nonfinite == "sanitize" else 0x7F
    if math.isnan(x) and nonfinite == "sanitize":
        x = 0.0
    with np.errstate(over="ignore", divide="ignore"):
        scaled = np.float32(x) * (np.float32(1) / np.float32(cache_scale))
    return encode(Element.E4M3, float(scaled))


def encode_row(
    row: Sequence[float], format: Format, nonfinite: str = "propagate", cache_scale: float = 1.0
) -> tuple[bytes, bytes]:
    """The bytes of one row's values and of its scales."""
    if format.element is Element.BF16:
        return b"".join(encode_bf16_element(x, nonfinite) for x in row), b""
    if format.scale is Scale.TENSOR:
        return bytes(encode_fp8_element(x, nonfinite, cache_scale) for x in row), b""
    values, scales = b"", b""
    body = len(row) - format.tail
    for start in range(0, body, format.group):
        codes, scale = encode_group(row[start : start + format.group], format, nonfinite)
        values += pack(codes, format.element)
        scales += bytes([scale])
    values += b"".join(encode_bf16_element(x, nonfinite) for x in row[body:])
    return values, scales + bytes(format.scale_padding)


def decode_row(
    values: bytes, scales: bytes, format: Format, dtype: str = "float32", cache_scale: float = 1.0
) -> list[float]:
    """The row that a record holds, in ``dtype``."""
    if format.element is Element.BF16:
        return [round_to(decode_bf16(b), dtype) for b in np.frombuffer(values, "<u2").tolist()]
    if format.scale is Scale.TENSOR:
        return [_scaled(format.element, code, cache_scale, dtype) for code in values]
    tail = values[len(values) - 2 * format.tail :]
    codes = unpack(values[: len(values) - 2 * format.tail], format.element)
    scale_of = decode_e8m0 if format.scale is Scale.E8M0 else functools.partial(decode, Element.E4M3)
    row = [_scaled(format.element, code, scale_of(scales[i // format.group]), dtype) for i, code in enumerate(codes)]
    return row + [round_to(decode_bf16(b), dtype) for b in np.frombuffer(tail, "<u2").tolist()]


@functools.lru_cache(maxsize=1 << 16)
def _product(magnitude: float, scale: float, dtype: str) -> float:
    with np.errstate(over="ignore"):
        product = float(np.float32(magnitude) * np.float32(scale))
    return LARGEST[dtype] if math.isinf(product) else abs(round_to(product, dtype))


def _scaled(element: Element, code: int, scale: float, dtype: str) -> float:
    value = decode(element, code)
    if math.isnan(value) or math.isnan(scale):
        return math.nan
    sign = -1.0 if negative(value) != negative(scale) else 1.0
    return math.copysign(_product(abs(value), abs(scale), dtype), sign)


# RoPE.


def rotate(row: Rows, cos_sin: Rows) -> Rows:
    """The last 64 values of a row, rotated in adjacent pairs; each product rounded to fp32 by itself."""
    rotated = np.array(row, np.float32)
    start = len(row) - ROPE
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(ROPE // 2):
            x, y = row[start + 2 * i], row[start + 2 * i + 1]
            c, s = cos_sin[i], cos_sin[ROPE // 2 + i]
            rotated[start + 2 * i] = np.float32(x * c) - np.float32(y * s)
            rotated[start + 2 * i + 1] = np.float32(y * c) + np.float32(x * s)
    return rotated


# Pages.


def value_bytes(format: Format, d: int) -> int:
    bits = {Element.E2M1: 4, Element.E4M3: 8, Element.BF16: 16}[format.element]
    return (d - format.tail) * bits // 8 + 2 * format.tail


def scale_bytes(format: Format, d: int) -> int:
    if format.placement is Placement.NONE:
        return 0
    return (d - format.tail) // format.group + format.scale_padding


def record_bytes(format: Format, d: int) -> int:
    return value_bytes(format, d) + scale_bytes(format, d)


def offsets(format: Format, d: int, block_size: int, position: int) -> tuple[int, int]:
    """Where a position's values, and its scales, start in a contiguous page."""
    values, scales = value_bytes(format, d), scale_bytes(format, d)
    if format.placement is Placement.PAGE:
        return position * values, block_size * values + position * scales
    return position * (values + scales), position * (values + scales) + values


def store(
    pages: Pages,
    rows: Rows,
    slots: Sequence[int],
    format: Format,
    *,
    positions: Sequence[int] | None = None,
    cos_sin: Rows | None = None,
    compress_ratio: int = 1,
    cache_scale: float = 1.0,
    nonfinite: str = "propagate",
) -> None:
    """Store rows one after another into ``pages`` [num_blocks, page bytes], in place."""
    num_blocks, page = pages.shape
    d = rows.shape[1]
    block_size = page // record_bytes(format, d)
    for token, slot in enumerate(slots):
        if not 0 <= slot < num_blocks * block_size:
            continue
        row = rows[token]
        if positions is not None:
            position = positions[token]
            if position < 0 or (position + 1) % compress_ratio != 0:
                continue
            if cos_sin is not None:
                if position >= len(cos_sin):
                    continue
                row = rotate(row, cos_sin[position // compress_ratio * compress_ratio])
        values, scales = encode_row(row.tolist(), format, nonfinite, cache_scale)
        at_values, at_scales = offsets(format, d, block_size, slot % block_size)
        block = pages[slot // block_size]
        block[at_values : at_values + len(values)] = np.frombuffer(values, np.uint8)
        block[at_scales : at_scales + len(scales)] = np.frombuffer(scales, np.uint8)


def load(
    pages: Pages, slots: Sequence[int], format: Format, d: int, dtype: str = "float32", cache_scale: float = 1.0
) -> Rows:
    """The rows of some slots, in numbers that ``dtype`` holds; zeros for slots that do not exist."""
    num_blocks, page = pages.shape
    block_size = page // record_bytes(format, d)
    rows = np.zeros((len(slots), d), np.float32)
    for i, slot in enumerate(slots):
        if 0 <= slot < num_blocks * block_size:
            at_values, at_scales = offsets(format, d, block_size, slot % block_size)
            block = pages[slot // block_size].tobytes()
            values = block[at_values : at_values + value_bytes(format, d)]
            scales = block[at_scales : at_scales + scale_bytes(format, d)]
            rows[i] = decode_row(values, scales, format, dtype, cache_scale)
    return rows


# Attention.


def attend(
    q: Any,
    keys: Any,
    selected: Sequence[Sequence[int]],
    *,
    scale: float | None = None,
    sink: Sequence[float] | None = None,
    value_dim: int | None = None,
) -> tuple[Any, Any]:
    """Attention in fp64.

    Args:
        q: [queries, heads, d].
        keys: The rows of every slot [slots, d].
        selected: Each query's slots; those that do not exist are skipped.
        scale: Of the logits.
        sink: A logit of each head.
        value_dim: How many of a row's first values are summed up.

    Returns:
        [queries, heads, value_dim], and the logarithms [queries, heads].
    """
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    queries, heads, d = q.shape
    out = np.zeros((queries, heads, value_dim or d))
    lse = np.full((queries, heads), -np.inf)
    for i, slots in enumerate(selected):
        rows = keys[[slot for slot in slots if 0 <= slot < len(keys)]]
        if not len(rows):
            continue
        for head in range(heads):
            logits = rows @ q[i, head] * (d**-0.5 if scale is None else scale)
            top = max(logits.max(), -np.inf if sink is None else sink[head])
            weights = np.exp(logits - top)
            divisor = weights.sum() + (0.0 if sink is None else np.exp(sink[head] - top))
            out[i, head] = weights @ rows[:, : value_dim or d] / divisor
            lse[i, head] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    return out, lse
