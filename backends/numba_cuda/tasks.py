"""From a call's spec to the constants that its kernel is compiled for."""

from __future__ import annotations

import dataclasses
import math

import torch

from mxkv import numerics
from mxkv.contracts import ROPE_DIM, AttendSpec, LoadSpec, StoreSpec
from mxkv.formats import Element

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WIDEST = 16  # bytes of an access
OCTET = 8  # elements that are taken together wherever a format allows it


@dataclasses.dataclass(frozen=True)
class Record:
    """Where a row's bytes stand, and what they mean.

    Attributes:
        dim: Values of a row.
        element: "e2m1", "e4m3" or "bf16": the code of the values before the tail.
        scale: "e8m0", "e4m3", "tensor" or "none".
        group: Values that share a scale.
        body: How many values stand before the bf16 tail.
        padding: Zero bytes behind a record's scales.
        block_size, value_stride, scale_offset, scale_stride: The page layout, in bytes.
        step: Elements that are taken together: 8, or 2 where the widths are no multiples of it.
        alignment: Bytes (1 to 16) to which the values of every step, and of every record, are aligned.
    """

    dim: int
    element: str
    scale: str
    group: int
    body: int
    padding: int
    block_size: int
    value_stride: int
    scale_offset: int
    scale_stride: int
    step: int
    alignment: int

    @property
    def grouped(self) -> bool:
        return self.scale in ("e8m0", "e4m3")

    @property
    def bits(self) -> int:
        return {"e2m1": 4, "e4m3": 8, "bf16": 16}[self.element]

    @property
    def groups(self) -> int:
        return self.body // self.group if self.grouped else 0

    @property
    def body_bytes(self) -> int:
        return self.body * self.bits // 8


def record_of(spec: StoreSpec | LoadSpec | AttendSpec, address: int) -> Record:
    """The record of a call whose cache stands at an address (its last four bits are enough)."""
    format, layout, dim = spec.format, spec.layout, spec.latent_dim
    size = format.cache_dtype.itemsize
    body = dim - format.tail
    whole = dim % OCTET == 0 and format.tail % OCTET == 0 and (not format.grouped or format.group % OCTET == 0)
    starts = layout.value_stride * size, layout.block_stride * size, address, body * format.element.bits // 8
    return Record(
        dim=dim,
        element=format.element.value,
        scale=format.scale.value,
        group=format.group,
        body=body,
        padding=format.scale_padding,
        block_size=layout.block_size,
        value_stride=layout.value_stride * size,
        scale_offset=layout.scale_offset * size,
        scale_stride=layout.scale_stride * size,
        step=OCTET if whole else 2,
        alignment=math.gcd(WIDEST, *starts),
    )


@dataclasses.dataclass(frozen=True)
class StoreTask:
    """What a store kernel is compiled for.

    Attributes:
        record: The cache's.
        dtype: Of the rows: "bf16", "fp16" or "fp32".
        aligned: Whether each row starts at a multiple of 16 bytes.
        index_bytes: Of a slot.
        position_bytes: Of a position; 0 where there are none.
        table: dtype of the cosines and sines; "" where there are none.
        scaled: Whether there is a scale for the whole cache.
        compress_ratio: Tokens whose (position + 1) is a multiple of it are stored.
        limit: The largest magnitude that counts as finite, as fp32 bits.
        element_max: The element's largest value.
        amax_floor: A group's largest magnitude is at least this, as fp32 bits.
        sanitize: Whether NaN and infinities are replaced.
    """

    record: Record
    dtype: str
    aligned: bool
    index_bytes: int
    position_bytes: int
    table: str
    scaled: bool
    compress_ratio: int
    limit: int
    element_max: float
    amax_floor: int
    sanitize: bool

    @property
    def rotated(self) -> int:
        """From this element of the row on RoPE rotates; the row's width where it does not."""
        return self.record.dim - ROPE_DIM if self.table else self.record.dim


def store_task(
    spec: StoreSpec, address: int, aligned: bool, index_bytes: int, position_bytes: int, table: str
) -> StoreTask:
    """A store kernel's constants; see :class:`StoreTask`."""
    format = spec.format
    return StoreTask(
        record=record_of(spec, address),
        dtype=DTYPES[spec.latent_dtype],
        aligned=aligned,
        index_bytes=index_bytes,
        position_bytes=position_bytes,
        table=table,
        scaled=spec.scaled,
        compress_ratio=spec.compress_ratio,
        limit=numerics.float_bits(format.finite_limit if format.grouped else Element.BF16.max),
        element_max=format.element.max,
        amax_floor=numerics.float_bits(format.amax_floor),
        sanitize=spec.nonfinite == "sanitize",
    )


@dataclasses.dataclass(frozen=True)
class LoadTask:
    """What a load kernel is compiled for.

    Attributes:
        record: The cache's.
        dtype: Of the rows that come out: "bf16", "fp16" or "fp32".
        dtype_max: The largest finite value of that dtype, as fp32 bits.
        aligned: Whether each row starts at a multiple of 16 bytes.
        index_bytes: Of a slot.
        scaled: Whether there is a scale for the whole cache.
    """

    record: Record
    dtype: str
    dtype_max: int
    aligned: bool
    index_bytes: int
    scaled: bool


def load_task(spec: LoadSpec, address: int, aligned: bool, index_bytes: int) -> LoadTask:
    """A load kernel's constants; see :class:`LoadTask`."""
    largest = torch.finfo(spec.out_dtype).max
    return LoadTask(
        record=record_of(spec, address),
        dtype=DTYPES[spec.out_dtype],
        dtype_max=numerics.float_bits(largest),
        aligned=aligned,
        index_bytes=index_bytes,
        scaled=spec.scaled,
    )
