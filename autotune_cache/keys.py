"""What a tuned configuration belongs to: its key, and the one function that rounds a call's sizes.

A hard field that differs makes another key. Soft fields (:func:`soft_of`) only say that an entry should be tuned anew.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from mxkv import contracts, devices
from mxkv.contracts import Spec, Tunable
from mxkv.formats import Format, parse_format
from mxkv.paging import PageLayout

SCHEMA = 1
LARGEST_BUCKET = 1 << 20
UNKNOWN = "unknown"
"""The architecture of a device that is not here: it equals no other, not even itself."""

Value = str | int | bool

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_REQUIRED: Mapping[str, type] = types.MappingProxyType(
    {"operation": str, "backend": str, "arch": str, "compute_units": int, "target": str, "space": str}
)
_LONGEST_VALUE = 1000
_MOST_FIELDS = 64


def bucket(size: int) -> int:
    """A size as keys have it: rounded up to a power of two, at least 1, and at most 2**20."""
    if size <= 1:
        return 1
    return min(1 << (size - 1).bit_length(), LARGEST_BUCKET)


def canonical(data: Any) -> str:
    """JSON of which equal data have one spelling: what is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(data: Any) -> str:
    """The sha256 of :func:`canonical`, in hex."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def layout_class(layout: PageLayout, itemsize: int) -> str:
    """What kernels specialise on in a layout: the kind of block size, and how the records are aligned.

    ``rows`` is a block size of 1, ``pow2`` another power of two, ``any`` the rest. The number behind it is the largest
    power of two, at most 16, that divides the distance in bytes between records and between blocks. How many blocks
    there are, and how far apart they stand beyond that, does not matter.
    """
    size = layout.block_size
    kind = "rows" if size == 1 else "pow2" if size > 0 and size & (size - 1) == 0 else "any"
    return f"{kind}/{math.gcd(16, layout.value_stride * itemsize, layout.block_stride * itemsize)}"


def plain(value: Any, itemsize: int = 1) -> Value:
    """A field of a spec as a key has it.

    Args:
        value: A dtype, a format, a layout, an enum, a number, a string, None, or a tuple of these.
        itemsize: Bytes of a layout's elements.

    Raises:
        TypeError: Keys have no spelling for such a value.
    """
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Format):
        return value.spec
    if isinstance(value, PageLayout):
        return layout_class(value, itemsize)
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return ",".join(str(plain(item, itemsize)) for item in value)
    raise TypeError(f"a key has no spelling for {type(value).__name__} {value!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """What must agree for a tuned configuration to be used.

    Attributes:
        hard: The fields by name: strings, ints and bools.
    """

    hard: Mapping[str, Value]

    def __post_init__(self) -> None:
        object.__setattr__(self, "hard", types.MappingProxyType(dict(self.hard)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Key, (dict(self.hard),)

    @functools.cached_property
    def identity(self) -> str:
        """The fields as canonical JSON, in which 1 is not true."""
        return canonical(dict(self.hard))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @functools.cached_property
    def name(self) -> str:
        """The stem of the entry's file."""
        return f"{self.hard['operation']}-{hashlib.sha256(self.identity.encode()).hexdigest()[:24]}"

    @property
    def text(self) -> str:
        """The key on one line, for people."""
        return " ".join(f"{name}={spelled(value)}" for name, value in self.hard.items() if name != "schema")

    def __str__(self) -> str:
        return self.text

    @property
    def known(self) -> bool:
        """Whether it is about a device that was seen; else nothing matches it."""
        return self.hard["arch"] not in ("", UNKNOWN) and int(self.hard["compute_units"]) > 0

    def differences(self, other: Key) -> dict[str, tuple[Value | None, Value | None]]:
        """The fields in which two keys differ, with both values (None where a key has no such field)."""
        names = dict.fromkeys([*self.hard, *other.hard])
        pairs = {name: (self.hard.get(name), other.hard.get(name)) for name in names}
        return {name: (a, b) for name, (a, b) in pairs.items() if type(a) is not type(b) or a != b}

    def distance(self, other: Key) -> tuple[bool, int, int, float, str]:
        """Sorts keys by nearness: the same operation, few other fields, numbers before names, by little."""
        pairs = self.differences(other)
        numbers = [(a, b) for a, b in pairs.values() if type(a) is int and type(b) is int]
        apart = sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in numbers)
        return "operation" in pairs, len(pairs) - len(numbers), len(pairs), apart, other.name

    @classmethod
    def from_json(cls, data: Any) -> Key:
        """A key that was read, every field of it checked.

        Raises:
            ValueError: It is no key of this schema; the message says why.
        """
        if not isinstance(data, dict) or len(data) > _MOST_FIELDS:
            raise ValueError("the key is not an object of a few fields")
        for name, value in data.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"the key has a field {name[:80]!r}")
            if isinstance(value, str) and len(value) <= _LONGEST_VALUE and value.isprintable():
                continue
            if not isinstance(value, int) or not 0 <= value < 1 << 31:
                raise ValueError(f"the key's field {name} is {shown(value)}")
        if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
            raise ValueError(f"the key's schema is {shown(data.get('schema'))}, expected {SCHEMA}")
        for name, kind in _REQUIRED.items():
            if type(data.get(name)) is not kind:
                raise ValueError(f"the key's field {name} is {shown(data.get(name))}, expected {kind.__name__}")
        if not _NAME.fullmatch(data["operation"]):
            raise ValueError(f"the key's operation is {shown(data['operation'])}")
        key = cls(data)
        if not key.known:
            raise ValueError("the key's device is unknown")
        return key


def spelled(value: Value | None) -> str:
    """A field's value for people; None is that of a field that a key does not have."""
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: Any) -> str:
    """A value for an error message: printable, and not long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an int of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=256)
def _space_hash(config: type, space: tuple[Any, ...]) -> str:
    """Names the set of choices. Their order, which only breaks ties, is not part of it."""
    fields = [field.name for field in dataclasses.fields(config)]
    choices = sorted(canonical([getattr(choice, name) for name in fields]) for choice in space)
    return digest_of([config.__name__, fields, choices])[:16]


def space_of(tunable: Tunable) -> str:
    """The name of a tunable's set of choices, as keys have it."""
    return _space_hash(tunable.config, tunable.space)


def key_of(spec: Spec, buckets: tuple[int, ...], *, backend: str, tunable: Tunable) -> Key:
    """The key of a call.

    Args:
        spec: The call.
        buckets: Its sizes, each rounded by :func:`bucket`, in the order of ``tunable.sizes``.
        backend: The name of the backend that runs it.
        tunable: What that backend may choose.

    Raises:
        ValueError: Not one bucket for each of the sizes, or one that is no bucket.
    """
    if len(buckets) != len(tunable.sizes) or any(bucket(b) != b for b in buckets):
        raise ValueError(f"expected one bucket for each of {tunable.sizes}, got {buckets}")
    hard: dict[str, Value] = {"schema": SCHEMA, "operation": spec.operation, "backend": backend}
    for field in dataclasses.fields(spec):
        if field.name != "device":
            value = getattr(spec, field.name)
            hard[field.name] = plain(value, _itemsize(spec, field.name))
    hard.update(zip(tunable.sizes, buckets, strict=True))
    try:
        device = devices.describe(spec.device)
        hard.update(arch=device.arch or UNKNOWN, compute_units=device.compute_units)
    except ValueError:  # this machine has no such device
        hard.update(arch=UNKNOWN, compute_units=0)
    hard.update(target=tunable.target, space=space_of(tunable))
    return Key(hard)


def _itemsize(spec: Spec, name: str) -> int:
    """Bytes of an element of a layout's cache, of the format ``format`` (of ``swa_format`` for ``swa_layout``)."""
    named = getattr(spec, name.removesuffix("layout") + "format", None)
    format = named if isinstance(named, Format) else spec.format
    return format.cache_dtype.itemsize


def soft_of(tunable: Tunable) -> dict[str, str]:
    """What may differ from an entry's without making it wrong: every choice gives the same bytes."""
    return {"source": tunable.source, "compiler": tunable.compiler}


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """A spec as JSON, with nothing lost: for worker processes and the log of misses."""
    fields = {field.name: _to_json(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return {"operation": spec.operation, **fields}


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, PageLayout):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) or value is None:
        return value
    return plain(value)


@functools.cache
def spec_classes() -> Mapping[str, type]:
    """The spec's class of each operation."""
    return types.MappingProxyType({kind.operation: kind for kind in typing.get_args(contracts.Spec)})


def spec_from_json(data: Any) -> Spec:
    """A spec back from :func:`spec_to_json`.

    Raises:
        ValueError: It is none: an unknown operation or field, one that is missing, or a value that does not fit.
    """
    if not isinstance(data, dict) or data.get("operation") not in list(spec_classes()):
        known = ", ".join(spec_classes())
        raise ValueError(f"expected a spec of one of the operations {known}, got {shown(data)}")
    kind = spec_classes()[data["operation"]]
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    unknown = data.keys() - fields - {"operation"}
    if unknown:
        raise ValueError(f"a spec of {data['operation']} has no field {', '.join(sorted(map(shown, unknown)))}")
    values = {name: _from_json(data[name], hints[name], name) for name in data.keys() & fields}
    try:
        return typing.cast(Spec, kind(**values))
    except TypeError as error:  # a field is missing
        raise ValueError(f"a spec of {data['operation']}: {error}") from None


def _from_json(value: Any, hint: Any, name: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = typing.get_args(hint)
        if value is None and type(None) in kinds:
            return None
        rest = [kind for kind in kinds if kind is not type(None)]
        if len(rest) == 1:
            return _from_json(value, rest[0], name)
    elif typing.get_origin(hint) is tuple and isinstance(value, list):
        kinds = typing.get_args(hint)
        inner = [kinds[0]] * len(value) if kinds[1:] == (...,) else kinds
        if len(inner) == len(value):
            return tuple(_from_json(v, kind, name) for v, kind in zip(value, inner, strict=True))
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    elif hint is PageLayout and isinstance(value, dict) and all(type(v) is int for v in value.values()):
        if value.keys() == {field.name for field in dataclasses.fields(PageLayout)}:
            return PageLayout(**value)
    elif isinstance(value, str):
        if hint is Format:
            return parse_format(value)
        if hint is torch.dtype and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
        if hint is torch.device:
            return _device(value)
    raise ValueError(f"a spec's {name} is {shown(value)}")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise ValueError(f"a spec's device is {shown(text)}") from None
