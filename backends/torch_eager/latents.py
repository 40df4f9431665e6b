"""Store and load of latent rows, in the order in which the specification says it.

Rows are taken in chunks whose temporaries stay in a CPU's cache (and bound the memory they take); on a GPU the
selection of rows synchronises, so that these cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from mxkv import devices, numerics
from mxkv.autotune_cache.choice import Choice
from mxkv.autotune_cache.sources import source_hash
from mxkv.contracts import ROPE_DIM, LoadSpec, Spec, StoreSpec, Tunable
from mxkv.formats import Element, Format, Scale
from mxkv.paging import PageLayout, scale_rows, value_rows

NAME = "torch"  # the backend's, in its keys


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """How much is computed at a time.

    Attributes:
        chunk_elements: Values of a chunk of rows.
    """

    chunk_elements: int


_CPU_CHUNK, _GPU_CHUNK = ChunkConfig(1 << 19), ChunkConfig(1 << 25)  # what a CPU's cache holds; what fills a GPU


def tunable(spec: Spec) -> Tunable:
    """The chunk sizes of one kind of call."""
    return Tunable(
        ChunkConfig,
        tuple(ChunkConfig(1 << bits) for bits in range(16, 26)),
        lambda tokens: _CPU_CHUNK if spec.device.type == "cpu" else _GPU_CHUNK,
        target=devices.target_of(spec.device).name,
        source=source_hash(f"{__name__}:{spec.operation}", within=(__name__, numerics.__name__)),
        compiler=f"torch {torch.__version__}",
    )


@functools.lru_cache(maxsize=1024)
def prepare(spec: Spec) -> Callable[..., None]:
    """What runs one kind of call."""
    choose = Choice(spec, NAME, tunable(spec))
    run: Callable[..., None] = store if isinstance(spec, StoreSpec) else load

    def call(*tensors: torch.Tensor | None, config: ChunkConfig | None = None) -> None:
        slots = tensors[2] if isinstance(spec, StoreSpec) else tensors[1]
        assert slots is not None
        run(spec, *tensors, config=config or choose(slots.shape[0]))

    return call


def never_compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Keep torch.compile out of a function: a compiler drops roundings that the bytes depend on.

    Calls through the operators are never traced; this is for those that get here by another way. (Where nobody uses the
    compiler, torch.compiler.disable alone would import it, which takes a second.)
    """
    shielded: list[Callable[..., None]] = []

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not shielded:
            shielded.append(torch.compiler.disable(function))
        return shielded[0](*args, **options)

    return run


@never_compiled
def store(
    spec: StoreSpec,
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    cache_scale: torch.Tensor | None,
    config: ChunkConfig | None = None,
) -> None:
    """Quantize rows and scatter them. See :func:`mxkv.store`."""
    latent = latent.detach()  # quantizing has no gradient
    cos_sin = None if cos_sin is None else cos_sin.detach()
    cache_scale = None if cache_scale is None else cache_scale.detach()
    slots = slots.long()
    stored = (slots >= 0) & (slots < spec.layout.num_slots)
    if positions is not None:
        positions = positions.long()
        stored &= (positions >= 0) & ((positions + 1) % spec.compress_ratio == 0)
        if cos_sin is not None:
            stored &= positions < cos_sin.shape[0]
    tokens = _last_of_each(slots, stored)
    if not tokens.numel():
        return
    rows_per_chunk = _rows_per_chunk(spec, config)
    for chunk in tokens.split(rows_per_chunk):
        rows = _rows(latent, chunk).to(torch.float32)
        if cos_sin is not None and positions is not None:
            rows = rotate(rows, cos_sin, positions[chunk] // spec.compress_ratio * spec.compress_ratio)
        values, scales = encode(rows, spec.format, spec.nonfinite, cache_scale)
        _scatter(value_rows(cache, spec.layout, values.shape[1]), spec.layout, slots[chunk], values)
        if scales is not None:
            _scatter(scale_rows(cache, spec.layout, scales.shape[1]), spec.layout, slots[chunk], scales)


@never_compiled
def load(
    spec: LoadSpec,
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    cache_scale: torch.Tensor | None,
    config: ChunkConfig | None = None,
) -> None:
    """Gather rows and dequantize them. See :func:`mxkv.load`."""
    slots = slots.long()
    valid = (slots >= 0) & (slots < spec.layout.num_slots)
    if spec.layout.num_slots == 0:
        out.zero_()
        return
    rows_per_chunk = _rows_per_chunk(spec, config)
    value_width = spec.format.value_bytes(spec.latent_dim) // spec.format.cache_dtype.itemsize
    all_values = value_rows(cache, spec.layout, value_width)
    all_scales = (
        scale_rows(cache, spec.layout, spec.format.scale_bytes(spec.latent_dim)) if spec.format.grouped else None
    )
    for start in range(0, slots.shape[0], rows_per_chunk):
        here = slice(start, start + rows_per_chunk)
        slot = torch.where(valid[here], slots[here], 0)
        at = (slot // spec.layout.block_size, slot % spec.layout.block_size)
        values = all_values[at]
        scales = None if all_scales is None else all_scales[at]
        rows = decode(values, scales, spec.format, cache_scale)
        rows = saturate(rows, out.dtype, keep_infinite=spec.format.element is Element.BF16)
        if spec.format.tail:  # the tail is bf16: its infinities are the row's own
            tail = (
                values[:, -2 * spec.format.tail :]
                .clone(memory_format=torch.contiguous_format)
                .view(torch.bfloat16)
                .to(torch.float32)
            )
            rows[:, -spec.format.tail :] = saturate(tail, out.dtype, keep_infinite=True)
        out[here] = torch.where(valid[here, None], rows, 0.0).to(out.dtype)


def _rows_per_chunk(spec: Spec, config: ChunkConfig | None) -> int:
    config = config or (_CPU_CHUNK if spec.device.type == "cpu" else _GPU_CHUNK)
    return max(1, config.chunk_elements // spec.latent_dim)


def rotate(rows: torch.Tensor, cos_sin: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """RoPE (GPT-J pairs) on the last 64 values of each fp32 row, with the table's rows ``at``."""
    table = cos_sin[at].to(torch.float32)
    cos, sin = table[:, : ROPE_DIM // 2], table[:, ROPE_DIM // 2 :]
    pairs = rows[:, -ROPE_DIM:].unflatten(-1, (-1, 2))
    x, y = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
    return torch.cat((rows[:, :-ROPE_DIM], rotated), -1)


def encode(
    rows: torch.Tensor, format: Format, nonfinite: str, cache_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 rows [n, d] to values [n, value_bytes] (or [n, d] of a plain cache's dtype) and scales [n, scale_bytes]."""
    if format.element is Element.BF16:
        return _encode_bf16(rows, nonfinite), None
    if format.scale is Scale.TENSOR:
        return _encode_tensor_scaled(rows, nonfinite, cache_scale).view(torch.float8_e4m3fn), None
    body = rows[:, : rows.shape[1] - format.tail]
    groups = body.unflatten(-1, (-1, format.group))
    limit = format.finite_limit
    if nonfinite == "sanitize":
        groups = groups.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp_(-limit, limit)
        codes, scales = numerics.quantize_groups(groups, format.element, format.scale, format.amax_floor)
    else:
        lost = ~(groups.abs().amax(-1) <= limit)
        if lost.is_cuda or lost.any():
            groups = torch.where(lost[..., None], 0.0, groups)
        codes, scales = numerics.quantize_groups(groups, format.element, format.scale, format.amax_floor)
        scales.masked_fill_(lost, numerics.scale_nan(format.scale))
    values = codes.flatten(-2)
    if format.element is Element.E2M1:
        values = numerics.pack_nibbles(values)
    if format.tail:
        tail = _encode_bf16(rows[:, -format.tail :], nonfinite)
        values = torch.cat((values, tail.contiguous().view(torch.uint8)), -1)
    return values, torch.nn.functional.pad(scales, (0, format.scale_padding))


def decode(
    values: torch.Tensor, scales: torch.Tensor | None, format: Format, cache_scale: torch.Tensor | None
) -> torch.Tensor:
    """The inverse of :func:`encode`: fp32 rows [n, d], the bf16 tail left 0."""
    if format.element is Element.BF16:
        return values.to(torch.float32)
    if scales is None:
        rows = values.to(torch.float32)
        return rows if cache_scale is None else rows * cache_scale.reshape(())
    body = values[:, : values.shape[1] - 2 * format.tail]
    if format.element is Element.E2M1:
        elements = numerics.decode_e2m1(numerics.unpack_nibbles(body))
    else:
        elements = numerics.decode_e4m3(body)
    scales = scales[:, : scales.shape[1] - format.scale_padding]
    scale = numerics.decode_e8m0(scales) if format.scale is Scale.E8M0 else numerics.decode_e4m3(scales)
    rows = (elements.unflatten(-1, (-1, format.group)) * scale[..., None]).flatten(-2)
    return torch.nn.functional.pad(rows, (0, format.tail))


def saturate(rows: torch.Tensor, dtype: torch.dtype, *, keep_infinite: bool) -> torch.Tensor:
    """fp32 rows with every finite value inside a dtype's range (a product that overflowed fp32 was finite)."""
    largest = torch.finfo(dtype).max
    clamped = rows.clamp(-largest, largest)
    return torch.where(rows.isinf(), rows, clamped) if keep_infinite else clamped


def _encode_bf16(rows: torch.Tensor, nonfinite: str) -> torch.Tensor:
    if nonfinite == "sanitize":
        largest = Element.BF16.max
        rows = rows.nan_to_num(nan=0.0, posinf=largest, neginf=-largest).clamp_(-largest, largest)
    return numerics.encode_bf16(rows)


def _encode_tensor_scaled(rows: torch.Tensor, nonfinite: str, cache_scale: torch.Tensor | None) -> torch.Tensor:
    x = numerics.encode_bf16(rows).to(torch.float32)
    infinite = x.isinf()
    if nonfinite == "sanitize":
        x = x.nan_to_num(nan=0.0)
    scaled = x
    if cache_scale is not None:
        scale = cache_scale.reshape(())
        scaled = x * (torch.ones_like(scale) / scale)
    code = numerics.encode_e4m3(scaled)
    if nonfinite == "sanitize":
        largest = torch.where(x < 0, 0xFE, 0x7E).to(torch.uint8)
        return torch.where(infinite, largest, code)
    return code.masked_fill(infinite, numerics.E4M3_NAN)


def _last_of_each(slots: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The tokens to store, in order: of several with the same slot, the last."""
    tokens = stored.nonzero().squeeze(1)
    wanted = slots[tokens]
    ordered, order = wanted.sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return tokens[order[last].sort().values]


def _rows(latent: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The rows of some tokens (ascending); a view where they stand one after another."""
    if latent.device.type == "cpu":
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == tokens.shape[0]:
            return latent[first : last + 1]
    return latent[tokens]


def _scatter(pool: torch.Tensor, layout: PageLayout, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to the slots of a view [num_blocks, block_size, width]; as bytes, since not every dtype scatters."""
    if pool.shape[2]:
        at = (slots // layout.block_size, slots % layout.block_size)
        pool.view(torch.uint8)[at] = rows.contiguous().view(torch.uint8)
