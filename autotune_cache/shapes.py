"""What is tuned: the kinds of calls and the token counts of a preset, and those of a log of misses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mxkv import dispatch
from mxkv.autotune_cache.keys import LARGEST_BUCKET, bucket, shown, spec_from_json
from mxkv.compression_checks import ring_layout_of
from mxkv.contracts import (
    COMPRESS_DIM,
    AttendSpec,
    CompressSpec,
    CompressStoreSpec,
    LoadSpec,
    SaveRingSpec,
    Spec,
    StoreSpec,
    Tunable,
)
from mxkv.formats import FORMATS, Format, Scale
from mxkv.paging import contiguous_layout

PRESETS: dict[str, tuple[int, ...]] = {
    "serving": (1, 16, 64, 256, 1024, 4096, 16384, 65536),
    "all": tuple(1 << n for n in range(LARGEST_BUCKET.bit_length())),
}
"""The token counts of each preset."""

OPERATIONS = ("store", "load", "attend", "compress_norm", "compress_store")
UNASKED = ("store", "load")
"""What is tuned where nobody names an operation."""

ATTEND_HEADS = (16, 64, 128)
ATTEND_ROWS = 2048
MOST_QUERIES = 4096  # a preset's larger counts are of tokens
LATENT_DIM = 512
BLOCK_SIZE = 64
RING_CAPACITY = 8
_LONGEST_REASON = 160
_BLOCKS = 1024  # of a spec's layout; neither kernels nor keys look at it
_DTYPE = torch.bfloat16


class NotTunable(ValueError):
    """A call whose backend lets nothing be chosen, or that no backend runs."""


class NoCall(ValueError):
    """What is no call at all."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One key to tune.

    Attributes:
        spec: The kind of call.
        buckets: Its sizes, rounded up to their buckets.
        backend: The name of the backend that runs it.
    """

    spec: Spec
    buckets: tuple[int, ...]
    backend: str

    @property
    def text(self) -> str:
        """The work on one line, for people."""
        names = ("queries", "rows") if isinstance(self.spec, AttendSpec) else ("tokens",)
        sizes = ", ".join(f"{size} {name}" for size, name in zip(self.buckets, names, strict=True))
        return f"{describe(self.spec)}, {sizes}"


def describe(spec: Spec) -> str:
    """A kind of call on one line: what differs from the usual is named."""
    words = [spec.operation, spec.format.name]
    if spec.latent_dim != (spec.format.only_dim or LATENT_DIM):
        words.append(f"d={spec.latent_dim}")
    dtypes = ("latent_dtype", "out_dtype", "q_dtype")
    dtype = next((getattr(spec, name) for name in dtypes if hasattr(spec, name)), None)
    if dtype not in (None, _DTYPE):
        words.append(str(dtype).removeprefix("torch."))
    rope = getattr(spec, "rotate", False)
    told = {"device", "format", "latent_dim", "layout", "ring_layout", *dtypes, *(["positioned"] if rope else [])}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name not in told and value != field.default:
            name = "rope" if field.name == "rotate" else field.name
            words.append(name if value is True else f"{name}={value}")
    ringed = isinstance(spec, CompressSpec | SaveRingSpec)
    if not ringed and spec.layout.block_size != BLOCK_SIZE:
        words.append(f"block {spec.layout.block_size}")
    rings = spec.ring_layout if isinstance(spec, CompressStoreSpec) else spec.layout if ringed else None
    if rings is not None and rings.num_blocks and rings.block_size != RING_CAPACITY:
        words.append(f"rings of {rings.block_size}")
    return " ".join(words)


def tunable_of(spec: Spec, backend: str) -> Tunable:
    """What a backend may choose for a kind of call.

    Raises:
        NotTunable: Nothing.
    """
    operations = dispatch.get_backend(backend).load()
    if not hasattr(operations, "tunable") or not hasattr(operations, "prepare"):
        raise NotTunable(f"backend {backend!r} has nothing to tune")
    found: Tunable = operations.tunable(spec)
    return found


def backend_of(spec: Spec, backend: str | None = None) -> str:
    """The backend that runs a kind of call: the one that is asked for, or the one that dispatch chooses.

    Raises:
        NotTunable: It cannot.
    """
    found = dispatch.explain_spec(spec, backend)
    if found.chosen is None:
        raise NotTunable(str(found))
    return found.chosen


def kinds(
    device: torch.device,
    *,
    operations: Sequence[str] = (),
    formats: Sequence[Format] = (),
    latents: Sequence[int] = (),
) -> Iterator[Spec]:
    """The kinds of calls that presets have: of each format stores, plain and with RoPE, and loads, in bf16. Where they
    are asked for: attention; compressions of both ratios, into plain bf16 rows and with RoPE into a cache.

    Args:
        device: Where they run.
        operations: Only these; :data:`UNASKED` if empty.
        formats: Only these; every built-in one if empty.
        latents: Row widths; 512 if empty. A format that does not take a width has no call of it.

    Raises:
        ValueError: An unknown operation.
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise ValueError(f"unknown operation {', '.join(unknown)}; these can be tuned: {', '.join(OPERATIONS)}")
    for format in formats or tuple(FORMATS.values()):
        for dim in latents or (format.only_dim or LATENT_DIM,):
            if not format.accepts_dim(dim):
                continue
            layout = contiguous_layout(format, dim, _BLOCKS, BLOCK_SIZE)
            for scaled in (False, True) if format.scale is Scale.TENSOR else (False,):
                if "store" in (operations or UNASKED):
                    for rope in (False, True):
                        yield StoreSpec(
                            device, format, dim, _DTYPE, layout, positioned=rope, rotate=rope, scaled=scaled
                        )
                if "load" in (operations or UNASKED):
                    yield LoadSpec(device, format, dim, _DTYPE, layout, scaled=scaled)
                if "attend" in (operations or UNASKED):
                    for heads in ATTEND_HEADS:
                        yield AttendSpec(device, format, dim, _DTYPE, layout, heads, dim, scaled=scaled)
                if dim != COMPRESS_DIM:
                    continue
                for ratio in (1, 2):
                    rings = ring_layout_of(None, ratio)
                    if "compress_norm" in operations and format == FORMATS["bf16"]:
                        yield CompressSpec(device, ratio, rings)
                    if "compress_store" in operations:
                        yield CompressStoreSpec(device, format, layout, ratio, rings, rotate=True, scaled=scaled)


def works(
    device: torch.device,
    *,
    preset: str = "serving",
    operations: Sequence[str] = (),
    formats: Sequence[Format] = (),
    latents: Sequence[int] = (),
    tokens: Sequence[int] = (),
    backend: str | None = None,
) -> list[Work]:
    """The work of a preset, less what the filters leave out. ``tokens`` takes the place of the preset's counts.

    Raises:
        ValueError: An unknown preset or operation.
        NotTunable: A backend has nothing to tune.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known presets: {', '.join(PRESETS)}")
    buckets = sorted({bucket(count) for count in tokens or PRESETS[preset]})
    found = []
    for spec in kinds(device, operations=operations, formats=formats, latents=latents):
        chosen = backend_of(spec, backend)
        tunable_of(spec, chosen)
        if isinstance(spec, AttendSpec):
            queries = [size for size in buckets if size <= MOST_QUERIES or tokens]
            found += [Work(spec, (size, ATTEND_ROWS), chosen) for size in queries]
        else:
            found += [Work(spec, (size,), chosen) for size in buckets]
    return found


def works_of_log(path: Path, device: torch.device, backend: str | None = None) -> tuple[list[Work], list[str]]:
    """The calls of a log of misses (``MXKV_LOG_MISSES``), each once, and what is wrong with the lines left out.

    Args:
        path: The log.
        device: Where to tune them: calls of another type of device are left out, those of another index are moved.
        backend: The backend to tune them on, instead of the one that ran them.

    Raises:
        OSError: The log cannot be read.
    """
    found: dict[Work, None] = {}
    wrong = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found[_work_of_line(line, device, backend)] = None
        except NoCall as error:
            wrong.append(f"line {number} is not a call: {_short(error)}")
        except ValueError as error:
            wrong.append(f"line {number} cannot be tuned: {_short(error)}")
    return list(found), wrong


def _short(error: Exception) -> str:
    text = str(error).splitlines()[0]
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _work_of_line(line: bytes, device: torch.device, backend: str | None) -> Work:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise NoCall("it is not JSON") from None
    if not isinstance(data, dict) or not {"spec", "sizes", "backend"} <= data.keys():
        raise NoCall("expected an object with spec, sizes and backend")
    try:
        spec = spec_from_json(data["spec"])
    except ValueError as error:
        raise NoCall(str(error)) from None
    sizes, name = data["sizes"], data["backend"]
    if not isinstance(name, str):
        raise NoCall(f"its backend is {shown(name)}")
    if not isinstance(sizes, dict) or any(type(s) is not int or not 0 < s < 1 << 40 for s in sizes.values()):
        raise NoCall(f"expected sizes above 0, got {shown(sizes)}")
    if spec.device.type != device.type:
        raise NotTunable(f"it is a call on {spec.device}, and {device} is tuned")
    spec = dataclasses.replace(spec, device=device)
    chosen = backend_of(spec, backend or name)
    tunable = tunable_of(spec, chosen)
    if sizes.keys() != set(tunable.sizes):
        raise NoCall(f"expected the sizes {', '.join(tunable.sizes)}, got {shown(sizes)}")
    return Work(spec, tuple(bucket(sizes[size]) for size in tunable.sizes), chosen)


def shard(found: Sequence[Work], rank: int, world_size: int) -> list[Work]:
    """One rank's part of the work: each kind of call belongs to one rank, unless there are fewer kinds than ranks."""
    order = list(dict.fromkeys((work.backend, work.spec) for work in found))
    if len(order) < world_size:
        return list(found[rank::world_size])
    mine = set(order[rank::world_size])
    return [work for work in found if (work.backend, work.spec) in mine]


def grouped(found: Iterable[Work]) -> list[Work]:
    """The same work with each kind of call in one piece, so that its buffers and kernels are made once."""
    groups: dict[tuple[str, Spec], list[Work]] = {}
    for work in found:
        groups.setdefault((work.backend, work.spec), []).append(work)
    return [work for group in groups.values() for work in group]
