"""Cache formats as data.

A format says how one row of a KV cache becomes bytes: the element code, the scale that a group of
elements shares, the group size, and where the scales stand. Every store, load and attention kernel
reads these fields; none knows a format by name. A new record is a new row of :data:`FORMATS`, or a
:class:`Format` object that the caller makes and passes as ``format=``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch


class Element(enum.Enum):
    """The code of one value."""

    E2M1 = "e2m1"  # FP4: 0 .5 1 1.5 2 3 4 6 and a sign, two to a byte
    E4M3 = "e4m3"  # OCP FP8 e4m3fn: max 448, NaN 0x7f and 0xff, no Inf
    BF16 = "bf16"

    @property
    def bits(self) -> int:
        """Bits that one value takes."""
        return {Element.E2M1: 4, Element.E4M3: 8, Element.BF16: 16}[self]

    @property
    def max(self) -> float:
        """Largest finite value of the code."""
        return {Element.E2M1: 6.0, Element.E4M3: 448.0, Element.BF16: (2 - 2**-7) * 2.0**127}[self]


class Scale(enum.Enum):
    """The code of a scale, and how many values share it."""

    E8M0 = "e8m0"  # one byte a group: 2**(byte - 127), 255 is NaN
    E4M3 = "e4m3"  # one byte a group, always positive
    TENSOR = "tensor"  # one fp32 number for the whole cache, kept by the caller
    NONE = "none"


class Placement(enum.Enum):
    """Where a token's scales stand."""

    INLINE = "inline"  # behind the token's own values
    PAGE = "page"  # behind all values of the page, one token's after another
    NONE = "none"  # the cache holds no scales: plain rows


_ROWS: dict[str, Format] = {}  # filled once, below; FORMATS is its read-only face


@dataclasses.dataclass(frozen=True)
class Format:
    """One record layout.

    Args:
        name: What errors and tables call it.
        element: Code of the quantized values.
        scale: Code of the scale, or how the scale is kept.
        group: Values that share one scale (1 where a group has no meaning). Even for E2M1.
        placement: Where the scales stand.
        tail: How many of the last values are stored as bf16, unquantized.
        scale_padding: Zero bytes that follow a token's scales.
        amax_floor: A group's largest magnitude is raised to this before the scale is picked.
        only_dim: The one latent width that the record is defined for, or None.

    Raises:
        ValueError: The fields contradict each other.
    """

    name: str
    element: Element
    scale: Scale = Scale.NONE
    group: int = 1
    placement: Placement = Placement.NONE
    tail: int = 0
    scale_padding: int = 0
    amax_floor: float = 0.0
    only_dim: int | None = None
    spec: str = dataclasses.field(init=False, repr=False, compare=False)
    """The format as one string that :func:`parse_format` reads back: its name where that names this very format."""

    def __post_init__(self) -> None:
        self._check_types()
        # Made here, not when first asked for: torch.compile traces no lazily made attribute.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        named = _ROWS.get(self.name) == self
        spec = ";".join(f"{k}={v.value if isinstance(v, enum.Enum) else v}" for k, v in values.items())
        object.__setattr__(self, "spec", self.name if named else spec)
        grouped = self.scale in (Scale.E8M0, Scale.E4M3)
        if not self.name or any(c in ";=" or c.isspace() for c in self.name):
            raise ValueError(f"a format's name must be non-empty without ';', '=' or blanks, got {self.name!r}")
        if grouped == (self.placement is Placement.NONE):
            raise ValueError(
                f"format {self.name!r}: group scales need placement inline or page, and nothing else does; "
                f"got scale={self.scale.value}, placement={self.placement.value}"
            )
        if grouped and self.element is Element.BF16:
            raise ValueError(
                f"format {self.name!r}: group scales go with e2m1 or e4m3 elements, "
                f"got element={self.element.value}, scale={self.scale.value}"
            )
        if self.element is Element.E2M1 and not grouped:
            raise ValueError(f"format {self.name!r}: e2m1 elements need group scales, got scale={self.scale.value}")
        if (self.element is Element.E4M3 and not grouped) != (self.scale is Scale.TENSOR):
            raise ValueError(
                f"format {self.name!r}: e4m3 elements need a scale, and a tensor scale needs e4m3 elements; "
                f"got element={self.element.value}, scale={self.scale.value}"
            )
        if self.group < 1 or (grouped and self.group % 2):
            raise ValueError(f"format {self.name!r}: group must be a positive even number, got {self.group}")
        if not grouped and (self.group != 1 or self.tail or self.scale_padding or self.amax_floor):
            raise ValueError(f"format {self.name!r}: group, tail, scale_padding and amax_floor belong to group scales")
        floor_fits = 0 <= self.amax_floor <= self.finite_limit
        if self.tail < 0 or self.tail % 2 or self.scale_padding < 0 or not floor_fits:
            raise ValueError(
                f"format {self.name!r}: tail must be even; tail, scale_padding and amax_floor must be finite and "
                f"at least 0, got {self.tail}, {self.scale_padding}, {self.amax_floor}"
            )
        if self.only_dim is not None:
            self.check_dim(self.only_dim)

    def _check_types(self) -> None:
        kinds: dict[str, Any] = {
            "name": str, "element": Element, "scale": Scale, "group": int, "placement": Placement,
            "tail": int, "scale_padding": int, "amax_floor": (int, float), "only_dim": (int, type(None)),
        }  # fmt: skip
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise TypeError(f"a format's {name} must be of type {expected}, got {value!r}")

    @property
    def grouped(self) -> bool:
        """Whether groups of values share a scale that is stored in the cache."""
        return self.placement is not Placement.NONE

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the cache tensor."""
        if self.grouped:
            return torch.uint8
        return torch.bfloat16 if self.element is Element.BF16 else torch.float8_e4m3fn

    @property
    def finite_limit(self) -> float:
        """The largest magnitude that counts as finite on the way in (``L`` of the specification)."""
        if self.element is Element.E2M1:
            return 1.5 * 2.0**127
        return 1.75 * 2.0**127 if self.scale is Scale.E8M0 else torch.finfo(torch.float32).max

    def accepts_dim(self, latent_dim: int) -> bool:
        """Whether a row of ``latent_dim`` values fits the format."""
        if self.only_dim is not None and latent_dim != self.only_dim:
            return False
        body = latent_dim - self.tail
        return body > 0 and body % self.group == 0

    def check_dim(self, latent_dim: int) -> None:
        """Raise ValueError where ``latent_dim`` does not fit the format."""
        if self.accepts_dim(latent_dim):
            return
        if self.only_dim is not None and latent_dim != self.only_dim:
            raise ValueError(f"format {self.name!r} is defined for latent_dim {self.only_dim} only, got {latent_dim}")
        tail = f" after the last {self.tail} values" if self.tail else ""
        raise ValueError(
            f"format {self.name!r} needs a positive latent_dim that is a multiple of its group of {self.group}{tail}, "
            f"got {latent_dim}"
        )

    def num_groups(self, latent_dim: int) -> int:
        """Scales of one token."""
        return (latent_dim - self.tail) // self.group if self.grouped else 0

    def value_bytes(self, latent_dim: int) -> int:
        """Bytes of one token's values, the bf16 tail included."""
        return (latent_dim - self.tail) * self.element.bits // 8 + 2 * self.tail

    def scale_bytes(self, latent_dim: int) -> int:
        """Bytes of one token's scales, the padding included."""
        return self.num_groups(latent_dim) + self.scale_padding

    def record_bytes(self, latent_dim: int) -> int:
        """Bytes of one token.

        Raises:
            ValueError: ``latent_dim`` does not fit the format.
        """
        self.check_dim(latent_dim)
        return self.value_bytes(latent_dim) + self.scale_bytes(latent_dim)

    def page_bytes(self, latent_dim: int, block_size: int) -> int:
        """Bytes of one page of ``block_size`` tokens."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        return block_size * self.record_bytes(latent_dim)

    def tokens_per_gib(self, latent_dim: int) -> int:
        """Tokens whose records fit in 2**30 bytes."""
        return 2**30 // self.record_bytes(latent_dim)

    def record_width(self, latent_dim: int) -> int:
        """Elements of the cache's dtype that one record takes: the last dimension of a cache tensor."""
        return self.record_bytes(latent_dim) // self.cache_dtype.itemsize

    def dims_of_width(self, width: int) -> list[int]:
        """The latent widths whose record is ``width`` elements of the cache's dtype wide (none or one)."""
        total = width * self.cache_dtype.itemsize - self.scale_padding - 2 * self.tail
        per_group = self.group * self.element.bits // 8 + (1 if self.grouped else 0)
        if self.element is Element.BF16:
            per_group = 2
        if total <= 0 or total % per_group:
            return []
        dim = total // per_group * self.group + self.tail
        return [dim] if self.accepts_dim(dim) else []


def _table(*rows: Format) -> Mapping[str, Format]:
    for row in rows:
        _ROWS[row.name] = row
        object.__setattr__(row, "spec", row.name)
    return MappingProxyType(_ROWS)


_E4M3_FLOOR = 1e-4

FORMATS: Mapping[str, Format] = _table(
    Format("mxfp4", Element.E2M1, Scale.E8M0, 32, Placement.INLINE),
    Format("mxfp8", Element.E4M3, Scale.E8M0, 32, Placement.PAGE, amax_floor=_E4M3_FLOOR),
    Format("nvfp4", Element.E2M1, Scale.E4M3, 16, Placement.PAGE),
    Format(
        "dsv4", Element.E4M3, Scale.E8M0, 64, Placement.PAGE,
        tail=64, scale_padding=1, amax_floor=_E4M3_FLOOR, only_dim=512,
    ),
    Format("mxfp8-inline", Element.E4M3, Scale.E8M0, 32, Placement.INLINE, amax_floor=_E4M3_FLOOR),
    Format("nvfp4-inline", Element.E2M1, Scale.E4M3, 16, Placement.INLINE),
    Format("bf16", Element.BF16),
    Format("fp8", Element.E4M3, Scale.TENSOR),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def parse_format(spec: str) -> Format:
    """The format that a name, or a :attr:`Format.spec`, stands for.

    Raises:
        ValueError: No format has that name; the message lists the known ones.
    """
    if spec in FORMATS:
        return FORMATS[spec]
    if "=" not in spec:
        from mxkv.kv_formats import KV_FORMATS

        if spec in KV_FORMATS:
            raise ValueError(f"{spec!r} is a format of keys and values: store_kv, load_kv and attend_kv take it")
        raise ValueError(f"unknown format {spec!r}; known formats: {', '.join(FORMATS)} (or pass a mxkv.Format)")
    try:
        raw = dict(part.split("=", 1) for part in spec.split(";"))
        return _from_fields(raw)
    except KeyError as error:
        raise ValueError(f"the format {spec!r} lacks the field {error}; known formats: {', '.join(FORMATS)}") from None


def _from_fields(raw: Mapping[str, str]) -> Format:
    return Format(
        name=raw["name"],
        element=Element(raw["element"]),
        scale=Scale(raw["scale"]),
        group=int(raw["group"]),
        placement=Placement(raw["placement"]),
        tail=int(raw["tail"]),
        scale_padding=int(raw["scale_padding"]),
        amax_floor=float(raw["amax_floor"]),
        only_dim=None if raw["only_dim"] == "None" else int(raw["only_dim"]),
    )


def get_format(format: str | Format) -> Format:
    """A format object, from itself or its name.

    Raises:
        TypeError: ``format`` is neither a string nor a Format.
        ValueError: No format has that name.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise TypeError(f"format must be a name or a mxkv.Format, got {type(format).__name__}")
    return parse_format(format)


def infer_format(dtype: torch.dtype, width: int, latent_dim: int | None, *, paged: bool) -> tuple[Format, int]:
    """The format and latent width of a cache whose last dimension is ``width`` elements of ``dtype``.

    Formats that differ in placement only have the same width: the page layout is meant, unless the inline one is named.

    Args:
        dtype: The cache's dtype.
        width: The cache's last dimension.
        latent_dim: The latent's width where it is known.
        paged: Whether the cache is 3-D, and so says its block size.

    Raises:
        TypeError: No format has that dtype.
        ValueError: No format fits, or several do; the message lists the candidates.
    """
    width = int(width)  # a symbolic size of a traced program becomes a number here
    of_dtype = [f for f in FORMATS.values() if f.cache_dtype == dtype]
    if not of_dtype:
        known = sorted({str(f.cache_dtype) for f in FORMATS.values()})
        raise TypeError(f"no format has a cache of dtype {dtype}; expected one of {', '.join(known)}")
    found = [(f, dim) for f in of_dtype for dim in f.dims_of_width(width) if latent_dim is None or dim == latent_dim]
    page_twins = {(f.element, f.scale, f.group, dim) for f, dim in found if f.placement is Placement.PAGE}
    meant = [
        (f, dim)
        for f, dim in found
        if f.placement is not Placement.INLINE or (f.element, f.scale, f.group, dim) not in page_twins
    ]
    known_dim = "" if latent_dim is None else f" and latent_dim {latent_dim}"
    if not meant:
        widths = (
            ""
            if latent_dim is None
            else "; expected widths: "
            + ", ".join(f"{f.name} {f.record_width(latent_dim)}" for f in of_dtype if f.accepts_dim(latent_dim))
        )
        raise ValueError(f"no format has a {dtype} cache of width {width}{known_dim}{widths}")
    if len(meant) > 1:
        listed = ", ".join(f"{f.name} (latent_dim {dim})" for f, dim in found)
        raise ValueError(
            f"a {dtype} cache of width {width}{known_dim} is ambiguous: it can be {listed}; "
            f"pass format= (or latent_dim=)"
        )
    fmt, dim = meant[0]
    if fmt.placement is Placement.PAGE and not paged:
        listed = ", ".join(f.name for f, _ in found)
        raise ValueError(
            f"a {dtype} cache of width {width} can be {listed}; {fmt.name} is meant unless another is named, and it "
            f"keeps its scales at the end of each page: expected a 3-D cache [num_blocks, block_size, {width}], got 2-D"
        )
    return fmt, dim
