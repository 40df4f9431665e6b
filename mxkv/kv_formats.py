"""Formats of pages that hold keys and values per head, as data.

A format says how one key and one value of a head become bytes: the key's code, the bits of a value, and whether a key's
norm is corrected for what its directions lost. Kernels read these fields; none knows a format by name. A page holds the
data of all its slots, then their metadata: fp16 numbers of each head, a slot's beside the next slot's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mxkv.formats import FORMATS

DIM_STEP = 16
"""The width of a head is a multiple of this."""

VALUE_BITS = (3, 4)


class KeyCode(enum.Enum):
    """The code of a key."""

    FP8 = "fp8"  # E4M3 of its elements
    MSE3 = "mse3"  # its norm, and 3 bits for each element of its direction, rotated
    MSE4 = "mse4"  # likewise, 4 bits

    @property
    def bits(self) -> int:
        """Bits that one element takes."""
        return {KeyCode.FP8: 8, KeyCode.MSE3: 3, KeyCode.MSE4: 4}[self]


_ROWS: dict[str, KVFormat] = {}  # filled once, below; KV_FORMATS is its read-only face


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How keys and values of a head become bytes.

    Args:
        name: What errors and tables call it.
        key: The code of a key.
        value_bits: Bits of a value's element, 3 or 4; a value also has a scale and a zero.
        norm_correction: Whether a key's norm is divided by that of its quantized direction. Not of FP8 keys.

    Raises:
        TypeError: A field of another type.
        ValueError: The fields contradict each other.
    """

    name: str
    key: KeyCode
    value_bits: int = 4
    norm_correction: bool = False
    spec: str = dataclasses.field(init=False, repr=False, compare=False)
    """The format as one string that :func:`parse_kv_format` reads back: its name where that names this very format."""

    def __post_init__(self) -> None:
        for name, kind in (("name", str), ("key", KeyCode), ("value_bits", int), ("norm_correction", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"a KVFormat's {name} must be {kind.__name__}, got {type(value).__name__}")
        if not self.name or any(c in ";=" or c.isspace() for c in self.name):
            raise ValueError(f"a format's name must be non-empty without ';', '=' or blanks, got {self.name!r}")
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"format {self.name!r}: value_bits must be 3 or 4, got {self.value_bits}")
        if self.norm_correction and not self.normed:
            raise ValueError(
                f"format {self.name!r}: norm_correction belongs to mse3 and mse4 keys, got {self.key.value}"
            )
        spec = f"name={self.name};key={self.key.value};value_bits={self.value_bits}"
        spec += f";norm_correction={self.norm_correction}"
        object.__setattr__(self, "spec", self.name if _ROWS.get(self.name) == self else spec)

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def normed(self) -> bool:
        """Whether a key is a norm and a direction."""
        return self.key is not KeyCode.FP8

    @property
    def fields(self) -> int:
        """fp16 numbers of one slot and head: the key's norm where it has one, the value's scale and zero."""
        return 3 if self.normed else 2

    def check_dim(self, head_dim: int) -> None:
        """Raise ValueError unless heads of ``head_dim`` elements fit the format."""
        if head_dim < DIM_STEP or head_dim % DIM_STEP:
            raise ValueError(f"format {self.name!r}: head_dim must be a multiple of {DIM_STEP}, got {head_dim}")

    def key_bytes(self, head_dim: int) -> int:
        """Bytes of one key's codes."""
        return head_dim * self.key.bits // 8

    def value_bytes(self, head_dim: int) -> int:
        """Bytes of one value's codes."""
        return head_dim * self.value_bits // 8

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of one slot of one head, the metadata included; even.

        Raises:
            ValueError: ``head_dim`` does not fit the format.
        """
        self.check_dim(head_dim)
        used = self.key_bytes(head_dim) + self.value_bytes(head_dim) + 2 * self.fields
        return used + used % 2


KV_FORMATS: Mapping[str, KVFormat] = MappingProxyType(_ROWS)
"""The named formats."""

for _row in (
    KVFormat("turboquant-k8v4", KeyCode.FP8, 4),
    KVFormat("turboquant-4bit-nc", KeyCode.MSE4, 4, norm_correction=True),
    KVFormat("turboquant-k3v4-nc", KeyCode.MSE3, 4, norm_correction=True),
    KVFormat("turboquant-3bit-nc", KeyCode.MSE3, 3, norm_correction=True),
):
    _ROWS[_row.name] = _row
    object.__setattr__(_row, "spec", _row.name)


@functools.lru_cache(maxsize=1024)
def parse_kv_format(spec: str) -> KVFormat:
    """The format that a name, or a :attr:`KVFormat.spec`, stands for.

    Raises:
        ValueError: No format has that name; the message lists the known ones.
    """
    if spec in KV_FORMATS:
        return KV_FORMATS[spec]
    known = ", ".join(KV_FORMATS)
    if "=" not in spec:
        if spec in FORMATS:
            raise ValueError(f"{spec!r} is a format of latent rows: store, load and attend take it")
        raise ValueError(f"unknown format {spec!r}; known formats: {known} (or pass a mxkv.KVFormat)")
    try:
        raw = dict(part.split("=", 1) for part in spec.split(";"))
        correction = raw["norm_correction"] == "True"
        return KVFormat(raw["name"], KeyCode(raw["key"]), int(raw["value_bits"]), correction)
    except KeyError as error:
        raise ValueError(f"the format {spec!r} lacks the field {error}; known formats: {known}") from None


def get_kv_format(format: str | KVFormat) -> KVFormat:
    """A format object, from itself or its name.

    Raises:
        TypeError: ``format`` is neither a string nor a KVFormat.
        ValueError: No format has that name.
    """
    if isinstance(format, KVFormat):
        return format
    if not isinstance(format, str):
        raise TypeError(f"format must be a name or a mxkv.KVFormat, got {type(format).__name__}")
    return parse_kv_format(format)


def hadamard_block(head_dim: int) -> int:
    """The size of a rotation's diagonal blocks: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Where keys and values stand in a cache, in bytes.

    Slot ``s`` is position ``p = s % block_size`` of block ``b = s // block_size``. Head ``h``'s key starts at
    ``b * block_stride + p * token_bytes + h * head_bytes``, its value ``key_bytes`` behind it. The fp16 number ``f`` of
    its metadata stands at ``b * block_stride + meta_offset + 2 * ((h * fields + f) * block_size + p)``.
    """

    num_blocks: int
    block_size: int
    block_stride: int
    heads: int
    key_bytes: int
    value_bytes: int
    fields: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def head_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def meta_offset(self) -> int:
        return self.block_size * self.token_bytes


def kv_layout_of(kv_cache: torch.Tensor, format: KVFormat, head_dim: int) -> KVLayout:
    """The layout of a cache ``[num_blocks, block_size, heads, slot_bytes]``.

    Raises:
        TypeError: The cache is not of uint8.
        ValueError: The width or the strides do not fit.
    """
    width = format.slot_bytes(head_dim)
    if kv_cache.dtype != format.cache_dtype:
        raise TypeError(f"a {format.name} cache has dtype {format.cache_dtype}, got {kv_cache.dtype}")
    shape, strides = tuple(kv_cache.shape), kv_cache.stride()
    if len(shape) != 4 or shape[3] != width or not shape[1] or not shape[2]:
        raise ValueError(
            f"a {format.name} cache of head_dim {head_dim} has shape [num_blocks, block_size, heads, {width}] "
            f"of at least one slot and head; got shape {list(shape)}"
        )
    num_blocks, block_size, heads, _ = shape
    page = block_size * heads * width
    block_stride = strides[0] if num_blocks > 1 else page
    inner = [(size, stride) for size, stride in zip(shape[1:], strides[1:], strict=True) if size > 1]
    expected = [(n, s) for n, s in ((block_size, heads * width), (heads, width), (width, 1)) if n > 1]
    if num_blocks and (inner != expected or block_stride < page):
        raise ValueError(
            f"the pages of a cache must be contiguous and must not overlap (strides [at least {page}, {heads * width}, "
            f"{width}, 1]); got shape {list(shape)}, strides {list(strides)}"
        )
    if block_stride % 2:
        raise ValueError(f"the stride between a cache's pages must be even, got {block_stride}")
    return KVLayout(
        num_blocks, block_size, block_stride, heads, format.key_bytes(head_dim), format.value_bytes(head_dim),
        format.fields,
    )  # fmt: skip


def data_rows(kv_cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """The codes as a view ``[num_blocks, block_size, heads, key_bytes + value_bytes]`` of the cache."""
    return kv_cache.as_strided(
        (layout.num_blocks, layout.block_size, layout.heads, layout.head_bytes),
        (layout.block_stride, layout.token_bytes, layout.head_bytes, 1),
        kv_cache.storage_offset(),
    )


def meta_rows(kv_cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """The metadata's bytes as a view ``[num_blocks, block_size, heads, fields, 2]`` of the cache."""
    return kv_cache.as_strided(
        (layout.num_blocks, layout.block_size, layout.heads, layout.fields, 2),
        (layout.block_stride, 2, 2 * layout.fields * layout.block_size, 2 * layout.block_size, 1),
        kv_cache.storage_offset() + layout.meta_offset,
    )
