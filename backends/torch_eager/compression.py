"""Pooling, normalising and saving of compressed tokens, in the order in which the specification says it.

Nothing is saved before every row has been read. Tokens are taken in chunks; on a GPU their selection synchronises, so
that these calls cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mxkv import devices, numerics
from mxkv.autotune_cache.choice import Choice
from mxkv.autotune_cache.sources import source_hash
from mxkv.backends.torch_eager import latents
from mxkv.backends.torch_eager.latents import NAME, ChunkConfig
from mxkv.contracts import (
    COMPRESS_DIM,
    RING_DIM,
    CompressSpec,
    CompressStoreSpec,
    Packed,
    SaveRingSpec,
    Tunable,
)
from mxkv.paging import value_rows

_CPU_CHUNK, _GPU_CHUNK = ChunkConfig(1 << 19), ChunkConfig(1 << 25)

Compression = CompressSpec | CompressStoreSpec | SaveRingSpec


def tunable(spec: Compression) -> Tunable:
    """The chunk sizes of one kind of call: one, where rows are only copied."""
    chunks = tuple(ChunkConfig(1 << bits) for bits in range(16, 26))
    return Tunable(
        ChunkConfig,
        (_default(spec),) if isinstance(spec, SaveRingSpec) else chunks,
        lambda tokens: _default(spec),
        target=devices.target_of(spec.device).name,
        source=source_hash(f"{__name__}:{spec.operation}", within=(__package__, numerics.__name__)),
        compiler=f"torch {torch.__version__}",
    )


@functools.lru_cache(maxsize=1024)
def prepare(spec: Compression) -> Callable[..., None]:
    """What runs one kind of call."""
    choose = Choice(spec, NAME, tunable(spec))
    runs = {"compress_norm": compress_norm, "compress_store": compress_store, "save_ring_rows": save_ring_rows}
    run = runs[spec.operation]

    def call(first: Packed | torch.Tensor, *others: Any, config: ChunkConfig | None = None) -> None:
        tokens = (first.slots if isinstance(first, Packed) else first).shape[0]
        run(spec, first, *others, config=config or choose(tokens))

    return call


@latents.never_compiled
def compress_norm(spec: CompressSpec, packed: Packed, out: torch.Tensor, config: ChunkConfig | None = None) -> None:
    """Pool, normalise, save. See :func:`mxkv.compress_norm`."""
    packed = _detached(packed)
    for tokens, rows in _compressed(spec, packed, config or _default(spec)):
        out[tokens] = rows
    _save(spec, packed)


@latents.never_compiled
def compress_store(
    spec: CompressStoreSpec,
    packed: Packed,
    cache: torch.Tensor,
    cache_slots: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache_scale: torch.Tensor | None,
    out: torch.Tensor | None,
    config: ChunkConfig | None = None,
) -> None:
    """Pool, normalise, store, save. See :func:`mxkv.compress_store`."""
    packed, config = _detached(packed), config or _default(spec)
    for tokens, rows in _compressed(spec.compressed, packed, config):
        if out is not None:
            out[tokens] = rows
        latents.store(
            spec.stored, cache, rows, cache_slots[tokens], packed.positions[tokens], cos_sin, cache_scale, config
        )
    _save(spec.compressed, packed)


@latents.never_compiled
def save_ring_rows(
    spec: SaveRingSpec, rows: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor, config: ChunkConfig | None = None
) -> None:
    """Rows to ring slots. See :func:`mxkv.save_ring_rows`."""
    slots = slots.long()
    tokens = latents._last_of_each(slots, (slots >= 0) & (slots < spec.layout.num_slots))
    _write(spec, ring, slots[tokens], rows.detach()[tokens])


def pooled(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The values of two rows [n, 512 values | 512 scores], weighed by the softmax over the two: [n, 512] fp32."""
    weights = numerics.softmax_of_two(first[:, COMPRESS_DIM:], second[:, COMPRESS_DIM:])
    return first[:, :COMPRESS_DIM] * weights[0] + second[:, :COMPRESS_DIM] * weights[1]


def _default(spec: Compression) -> ChunkConfig:
    return _CPU_CHUNK if spec.device.type == "cpu" else _GPU_CHUNK


def _detached(packed: Packed) -> Packed:
    """The same call without gradients: it has none."""
    prev_rows = None if packed.prev_rows is None else packed.prev_rows.detach()
    return packed._replace(rows=packed.rows.detach(), prev_rows=prev_rows, weight=packed.weight.detach())


def _compressed(spec: CompressSpec, packed: Packed, config: ChunkConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens that close a group, a chunk of them at a time, and their latents: bf16 [chunk, 512]."""
    closing = _closing(spec, packed)
    if not closing.numel():
        return
    for tokens in closing.split(max(1, config.chunk_elements // RING_DIM)):
        rows = packed.rows[tokens]
        if spec.compress_ratio == 2:
            rows = pooled(_predecessors(spec, packed, tokens), rows)
        yield tokens, numerics.rms_norm(rows, packed.weight, packed.eps)


def _bounds(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: its request, whether it is one of the request's, and where that begins and ends."""
    assert packed.query_start is not None
    assert packed.token_to_request is not None
    tokens = packed.slots.shape[0]
    start = packed.query_start.long().clamp(0, tokens)
    request = packed.token_to_request[:tokens].long()
    known = (request >= 0) & (request < start.shape[0] - 1)
    request = torch.where(known, request, 0)
    token = torch.arange(tokens, device=start.device)
    begin, end = start[request], start[request + 1]
    return request, known & (begin <= token) & (token < end), begin, end


def _requests(packed: Packed) -> int:
    return 0 if packed.query_start is None else max(0, packed.query_start.shape[0] - 1)


def _closing(spec: CompressSpec, packed: Packed) -> torch.Tensor:
    """The tokens whose latents are made, in order."""
    slots = packed.slots.long()
    tokens = slots.shape[0]
    closes = slots >= 0
    if spec.compress_ratio == 2:
        if not _requests(packed):
            return slots.new_empty(0)
        request, inside, begin, _ = _bounds(packed)
        positions = packed.positions[:tokens].long()
        closes &= inside & (positions >= 0) & (positions % 2 == 1)
        token = torch.arange(tokens, device=slots.device)
        at_begin = torch.where(inside, begin, 0)
        closes &= (token - begin > 1) | (slots[at_begin] >= 0)  # the first group hangs on the first token's slot
        known = slots < spec.layout.num_slots  # of a token whose predecessor is in a ring
        if packed.prev_row_indices is not None and packed.prev_rows is not None:
            index = packed.prev_row_indices.long()[request]
            known = torch.where(index >= 0, index < packed.prev_rows.shape[0], known)
        closes &= (token > begin) | known
    return closes.nonzero().squeeze(1)


def _predecessors(spec: CompressSpec, packed: Packed, tokens: torch.Tensor) -> torch.Tensor:
    """The rows before those of some closing tokens: of the chunk, of another rank, or of a ring: fp32 [n, 1024]."""
    assert packed.ring is not None
    request, _, begin, _ = (of_token[tokens] for of_token in _bounds(packed))
    rows = packed.rows[(tokens - 1).clamp(min=0)]
    outside = (tokens == begin).nonzero().squeeze(1)
    if not outside.numel():
        return rows
    slots, positions = packed.slots[tokens[outside]].long(), packed.positions[tokens[outside]].long()
    index = torch.full_like(slots, -1)
    if packed.prev_row_indices is not None and packed.prev_rows is not None:
        index = packed.prev_row_indices.long()[request[outside]]
        given = index >= 0
        rows[outside[given]] = packed.prev_rows[index[given]]
    ringed = index < 0
    capacity = spec.layout.block_size
    ring = value_rows(packed.ring, spec.layout, RING_DIM)
    rows[outside[ringed]] = ring[slots[ringed] // capacity, (positions[ringed] - 1) % capacity]
    return rows


def _save(spec: CompressSpec, packed: Packed) -> None:
    """The last rows of each chunk to the request's ring, unless another rank will."""
    if spec.compress_ratio == 1 or spec.previous or not spec.layout.num_slots or not _requests(packed):
        return
    assert packed.ring is not None
    slots = packed.slots.long()
    _, inside, begin, end = _bounds(packed)
    token = torch.arange(slots.shape[0], device=slots.device)
    first = slots[torch.where(inside, begin, 0)]
    saved = inside & (token >= end - spec.layout.block_size) & (first >= 0)
    saved &= (slots >= 0) & (slots < spec.layout.num_slots)
    tokens = latents._last_of_each(slots, saved)
    _write(spec, packed.ring, slots[tokens], packed.rows[tokens])


def _write(spec: CompressSpec | SaveRingSpec, ring: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if slots.numel():
        capacity = spec.layout.block_size
        value_rows(ring, spec.layout, RING_DIM)[slots // capacity, slots % capacity] = rows
