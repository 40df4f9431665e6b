"""A second oracle of keys and values, written from the specification alone: one row at a time, in numpy's fp32.

It shares nothing with ``mxkv.numerics`` or with a backend: of ``mxkv`` it reads the fields of a ``KVFormat``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mxkv import Element
from mxkv.kv_formats import KeyCode, KVFormat
from tests import reference

Array = np.ndarray[Any, Any]
F32 = np.float32
MAX16 = F32(65504)
NEAR = 1e-6


@dataclasses.dataclass
class Row:
    """One head of one token: codes, and fp16 numbers as bits.

    ``near`` says which of a key's elements are so near to a midpoint that another order of sums may pass it.
    """

    key: list[int]
    value: list[int]
    numbers: list[int]
    near: list[bool] = dataclasses.field(default_factory=list)


def pack(codes: Sequence[int], bits: int) -> bytes:
    total = sum(code << (bits * i) for i, code in enumerate(codes))
    return total.to_bytes(len(codes) * bits // 8, "little")


def unpack(data: bytes, bits: int) -> list[int]:
    total = int.from_bytes(data, "little")
    return [(total >> (bits * i)) & ((1 << bits) - 1) for i in range(len(data) * 8 // bits)]


def butterfly(row: Array) -> Array:
    """fp32 times the orthonormal Hadamard matrix, block by block."""
    row = row.astype(F32).copy()
    block = len(row) & -len(row)
    half = 1
    while half < block:
        for i in range(len(row)):
            if not i & half:
                row[i], row[i + half] = row[i] + row[i + half], row[i] - row[i + half]
        half *= 2
    return row * F32(block**-0.5)


def half_bits(x: float) -> int:
    if math.isnan(x):
        return 0x7E00
    return int(np.float16(max(-MAX16, min(MAX16, F32(x)))).view(np.uint16))


def half_of(bits: int) -> np.float32:
    return F32(np.uint16(bits).view(np.float16))


def midpoints(table: Sequence[float]) -> list[np.float32]:
    return [F32((float(a) + float(b)) / 2) for a, b in itertools.pairwise(table)]


def clean(row: Array) -> Array:
    row = np.where(np.isnan(row), F32(0), row)
    return np.where(np.isinf(row), np.copysign(MAX16, row), row).astype(F32)


def encode_key(
    row: Array, format: KVFormat, table: Sequence[float], rotation: Array | None, nonfinite: str
) -> tuple[list[int], list[int], list[bool]]:
    row = row.astype(F32)
    nowhere = [False] * len(row)
    if nonfinite == "sanitize":
        row = clean(row)
    if format.key is KeyCode.FP8:
        return [0x7F if not math.isfinite(x) else reference.encode(Element.E4M3, float(x)) for x in row], [], nowhere
    if not np.isfinite(row).all():
        return [0] * len(row), [0x7E00], nowhere
    with np.errstate(over="ignore"):
        norm = np.sqrt(F32(math.fsum(float(x) ** 2 for x in row)))
        direction = (row / (norm + F32(1e-8))).astype(F32)
    turned = butterfly(direction) if rotation is None else (rotation.astype(np.float64) @ direction).astype(F32)
    edges = midpoints(table)
    codes = [sum(bool(edge <= y) for edge in edges) for y in turned]
    near = [min(abs(float(edge) - float(y)) for edge in edges) < NEAR for y in turned]
    if format.norm_correction:
        squares = F32(math.fsum(float(table[code]) ** 2 for code in codes))
        with np.errstate(over="ignore"):
            norm = norm * (F32(1) / np.sqrt(squares + F32(1e-16)))
    return codes, [half_bits(float(norm))], near


def encode_value(row: Array, bits: int, nonfinite: str) -> tuple[list[int], list[int]]:
    row = row.astype(F32)
    if nonfinite == "sanitize":
        row = clean(row)
    if not np.isfinite(row).all():
        return [0] * len(row), [0x7E00, 0x7E00]
    low, high = (max(-MAX16, min(MAX16, x)) + F32(0) for x in (row.min(), row.max()))
    most = (1 << bits) - 1
    scale = max(F32(1e-8), (high - low) / F32(most))
    with np.errstate(over="ignore"):
        steps = (row - low) / scale + F32(0.5)
    return [int(min(max(step, F32(0)), F32(most))) for step in steps], [half_bits(float(scale)), half_bits(float(low))]


def encode(
    key: Array, value: Array, format: KVFormat, table: Sequence[float], rotation: Array | None, nonfinite: str
) -> Row:
    codes, norm, near = encode_key(key, format, table, rotation, nonfinite)
    values, numbers = encode_value(value, format.value_bits, nonfinite)
    return Row(codes, values, norm + numbers, near)


def places(format: KVFormat, d: int, heads: int, block_size: int, position: int, head: int) -> tuple[int, list[int]]:
    """Where a row's codes start in a page, and where each of its numbers does."""
    data = (d * format.key.bits + d * format.value_bits) // 8
    meta = block_size * heads * data
    fields = 3 if format.key is not KeyCode.FP8 else 2
    numbers = [meta + 2 * ((head * fields + field) * block_size + position) for field in range(fields)]
    return (position * heads + head) * data, numbers


def write(
    page: Array, row: Row, format: KVFormat, d: int, heads: int, block_size: int, position: int, head: int
) -> None:
    """Write a row into a page's bytes, in place."""
    start, numbers = places(format, d, heads, block_size, position, head)
    data = pack(row.key, format.key.bits) + pack(row.value, format.value_bits)
    page[start : start + len(data)] = np.frombuffer(data, np.uint8)
    for at, bits in zip(numbers, row.numbers, strict=True):
        page[at : at + 2] = (bits & 0xFF, bits >> 8)


def read(page: Array, format: KVFormat, d: int, heads: int, block_size: int, position: int, head: int) -> Row:
    """The row that a page holds."""
    start, numbers = places(format, d, heads, block_size, position, head)
    key_bytes, value_bytes = d * format.key.bits // 8, d * format.value_bits // 8
    return Row(
        unpack(page[start : start + key_bytes].tobytes(), format.key.bits),
        unpack(page[start + key_bytes : start + key_bytes + value_bytes].tobytes(), format.value_bits),
        [int(page[at]) | int(page[at + 1]) << 8 for at in numbers],
    )


def decode(row: Row, format: KVFormat, table: Sequence[float], rotation: Array | None) -> tuple[Array, Array]:
    """The key and the value, fp32, of a row's codes."""
    if format.key is KeyCode.FP8:
        key = np.array([reference.decode(Element.E4M3, code) for code in row.key], F32)
    else:
        turned = np.array([half_of(row.numbers[0]) * F32(table[code]) for code in row.key], F32)
        key = butterfly(turned) if rotation is None else (rotation.T.astype(np.float64) @ turned).astype(F32)
    scale, zero = half_of(row.numbers[-2]), half_of(row.numbers[-1])
    return key, np.array([F32(code) * scale + zero for code in row.value], F32)


def attend(
    q: Array, keys: Array, values: Array, *, scale: float, sink: Sequence[float] | None = None
) -> tuple[Array, Array]:
    """One query [heads, d] over rows [n, cache heads, d], in fp64: the result, and the logarithms."""
    group = q.shape[0] // keys.shape[1]
    out, logs = np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    if not len(keys):
        return out, logs
    for head in range(q.shape[0]):
        logits = keys[:, head // group].astype(np.float64) @ q[head].astype(np.float64) * scale
        top = logits.max()
        weights = np.exp(logits - top)
        logs[head] = top + math.log(weights.sum())
        total = weights.sum() + (0.0 if sink is None else math.exp(sink[head] - top))
        out[head] = weights @ values[:, head // group].astype(np.float64) / total
    return out, logs
