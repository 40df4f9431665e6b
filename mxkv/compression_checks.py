"""The arguments of compress_norm, compress_store and save_ring_rows -> the spec of the call, or an error.

Nothing here looks at a tensor's values, so nothing synchronises.
"""

from __future__ import annotations

import torch

from mxkv import checks
from mxkv.contracts import COMPRESS_DIM, RING_DIM, CompressSpec, CompressStoreSpec, Packed, SaveRingSpec
from mxkv.paging import PageLayout

ROW_STEP = 16
"""Rows of fp32 start at multiples of so many elements, so that a kernel reads them 16 bytes at a time."""

_NO_RING = PageLayout(0, 1, 0, 0, 0, 0)


def compress_spec(packed: Packed, compress_ratio: int, out: torch.Tensor) -> CompressSpec:
    """Check the arguments of :func:`mxkv.compress_norm`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.compress_norm`.
    """
    spec = _packed_spec(packed, compress_ratio)
    _check_out(packed, out)
    check_values(packed, compress_ratio, out)
    return spec


def compress_store_spec(
    packed: Packed,
    compress_ratio: int,
    cache: torch.Tensor,
    cache_slots: torch.Tensor,
    out: torch.Tensor | None,
    format: str | None,
    cos_sin: torch.Tensor | None,
    cache_scale: torch.Tensor | None,
    nonfinite: str,
) -> CompressStoreSpec:
    """Check the arguments of :func:`mxkv.compress_store`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.compress_store`.
    """
    spec = _packed_spec(packed, compress_ratio)
    _check_index("cache_slots", cache_slots)
    _check_same_device(packed.rows, cache=cache, cache_slots=cache_slots)
    if out is not None:
        _check_out(packed, out)
    check_values(packed, compress_ratio, out, cache_slots)
    tokens = packed.slots.shape[0]
    stored = checks.store_spec(
        cache, packed.rows[:, :COMPRESS_DIM], cache_slots[:tokens], format, packed.positions, cos_sin, compress_ratio,
        cache_scale, nonfinite,
    )  # fmt: skip
    return CompressStoreSpec(
        spec.device, stored.format, stored.layout, compress_ratio, spec.layout, spec.previous, stored.rotate,
        stored.scaled, nonfinite, out is not None,
    )  # fmt: skip


def save_ring_spec(rows: torch.Tensor, slots: torch.Tensor, state_cache: torch.Tensor) -> SaveRingSpec:
    """Check the arguments of :func:`mxkv.save_ring_rows`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.save_ring_rows`.
    """
    _check_rows("rows", rows, RING_DIM)
    _check_index("slots", slots)
    layout = _ring_layout(state_cache)
    _check_same_device(rows, slots=slots, state_cache=state_cache)
    if slots.shape[0] > rows.shape[0]:
        raise ValueError(f"expected at most one slot for each of the {rows.shape[0]} rows, got {slots.shape[0]}")
    return SaveRingSpec(rows.device, layout)


def ring_layout_of(state_cache: torch.Tensor | None, compress_ratio: int = 2) -> PageLayout:
    """Where the rows of rings stand; rings of 8 rows, one after another, if None. At ratio 1 there are none."""
    if compress_ratio == 1:
        return _NO_RING
    if state_cache is None:
        state_cache = torch.empty((1024, 8, RING_DIM), dtype=torch.float32, device="meta")
    return _ring_layout(state_cache)


def check_values(
    packed: Packed, compress_ratio: int, out: torch.Tensor | None, cache_slots: torch.Tensor | None = None
) -> None:
    """The checks that a memoised spec does not cover: eps, and how many tokens and requests there are."""
    if not packed.eps >= 0:
        raise ValueError(f"eps must be at least 0, got {packed.eps}")
    tokens, rows = packed.slots.shape[0], packed.rows.shape[0]
    if tokens > rows:
        raise ValueError(f"expected at most one slot for each of the {rows} rows of kv_score, got {tokens}")
    of_tokens = {"positions": packed.positions, "out": out, "cache_slots": cache_slots}
    if compress_ratio == 2:
        of_tokens["token_to_request"] = packed.token_to_request
    for name, tensor in of_tokens.items():
        if tensor is not None and tensor.shape[0] < tokens:
            raise ValueError(f"{name} must have a row for each of the {tokens} slots, got {tensor.shape[0]}")
    starts, indices = packed.query_start, packed.prev_row_indices
    if compress_ratio == 1 or starts is None:
        return
    if starts.shape[0] < 1:
        raise ValueError("query_start must be [requests + 1], got shape [0]")
    if indices is not None and indices.shape[0] < starts.shape[0] - 1:
        raise ValueError(
            f"prev_row_indices must have one for each of the {starts.shape[0] - 1} requests, got {indices.shape[0]}"
        )


def _packed_spec(packed: Packed, compress_ratio: int) -> CompressSpec:
    if compress_ratio not in (1, 2):
        raise ValueError(f"compress_ratio must be 1 or 2, got {compress_ratio}")
    _check_rows("kv_score", packed.rows, COMPRESS_DIM * compress_ratio)
    for name in ("positions", "slots"):
        _check_index(name, getattr(packed, name))
    weight = packed.weight
    if tuple(weight.shape) != (COMPRESS_DIM,):
        raise ValueError(f"weight must be [{COMPRESS_DIM}], got shape {list(weight.shape)}")
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"weight must be torch.bfloat16, got {weight.dtype}")
    if weight.stride(0) != 1:
        raise ValueError(f"weight must be contiguous, got stride {weight.stride(0)}")
    _check_same_device(packed.rows, positions=packed.positions, slots=packed.slots, weight=weight)
    if compress_ratio == 1:  # pools nothing: what belongs to requests and rings is not looked at
        return CompressSpec(packed.rows.device, 1, _NO_RING)
    needed = {
        "state_cache": packed.ring, "query_start": packed.query_start, "token_to_request": packed.token_to_request,
    }  # fmt: skip
    missing = [name for name, tensor in needed.items() if tensor is None]
    if packed.ring is None or missing:
        raise ValueError(
            f"compress_ratio 2 pools the tokens of requests: expected {', '.join(needed)}; "
            f"got None for {', '.join(missing)}"
        )
    for name in ("query_start", "token_to_request"):
        _check_index(name, getattr(packed, name))
    layout = _ring_layout(packed.ring)
    previous = packed.prev_rows
    if (previous is None) != (packed.prev_row_indices is None):
        raise ValueError("prev_rows and prev_row_indices go together: expected both or neither, got one of them")
    if previous is not None and packed.prev_row_indices is not None:
        _check_rows("prev_rows", previous, RING_DIM)
        _check_index("prev_row_indices", packed.prev_row_indices)
    _check_same_device(packed.rows, **needed, prev_rows=previous, prev_row_indices=packed.prev_row_indices)
    return CompressSpec(packed.rows.device, 2, layout, previous is not None)


def _ring_layout(ring: torch.Tensor) -> PageLayout:
    if ring.dim() != 3 or ring.shape[2] != RING_DIM:
        raise ValueError(f"state_cache must be [blocks, capacity, {RING_DIM}], got shape {list(ring.shape)}")
    if ring.dtype != torch.float32:
        raise TypeError(f"state_cache must be torch.float32, got {ring.dtype}")
    blocks, capacity, _ = ring.shape
    block_stride, row_stride, unit = ring.stride()
    if capacity < 1:
        raise ValueError(f"a ring needs a capacity of at least 1, got shape {list(ring.shape)}")
    if capacity == 1:
        row_stride = RING_DIM
    if blocks <= 1:
        block_stride = capacity * row_stride
    if unit != 1 or row_stride < RING_DIM or block_stride < (capacity - 1) * row_stride + RING_DIM:
        raise ValueError(
            f"the rows of state_cache must be contiguous and not overlap, got shape {list(ring.shape)}, "
            f"strides {list(ring.stride())}"
        )
    _check_starts("state_cache", ring, block_stride, row_stride)
    return PageLayout(blocks, capacity, block_stride, row_stride, 0, row_stride)


def _check_rows(name: str, rows: torch.Tensor, width: int) -> None:
    if rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"{name} must be [rows, {width}], got shape {list(rows.shape)}")
    if rows.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {rows.dtype}")
    if rows.stride(1) != 1:
        raise ValueError(f"the rows of {name} must be contiguous (last stride 1), got strides {list(rows.stride())}")
    _check_starts(name, rows, rows.stride(0) if rows.shape[0] > 1 else 0)


def _check_starts(name: str, tensor: torch.Tensor, *strides: int) -> None:
    offset = tensor.storage_offset()
    if any(number % ROW_STEP for number in (offset, *strides)):
        raise ValueError(
            f"the rows of {name} must start at multiples of {ROW_STEP} fp32 elements, "
            f"got strides {list(tensor.stride())} and storage offset {offset}"
        )


def _check_out(packed: Packed, out: torch.Tensor) -> None:
    if out.dim() != 2 or out.shape[1] != COMPRESS_DIM:
        raise ValueError(f"out must be [tokens, {COMPRESS_DIM}], got shape {list(out.shape)}")
    if out.dtype != torch.bfloat16:
        raise TypeError(f"out must be torch.bfloat16, got {out.dtype}")
    if out.stride(1) != 1 or (out.shape[0] > 1 and out.stride(0) < COMPRESS_DIM):
        raise ValueError(
            f"the rows of out must be contiguous and not overlap (any row stride), got strides {list(out.stride())}"
        )
    _check_same_device(packed.rows, out=out)


def _check_index(name: str, index: torch.Tensor) -> None:
    if index.dim() != 1:
        raise ValueError(f"{name} must be 1-D, got shape {list(index.shape)}")
    if index.dtype not in checks.INDEX_DTYPES:
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {index.dtype}")


def _check_same_device(rows: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != rows.device:
            raise ValueError(
                f"all tensors must be on one device: expected {name} on {rows.device}, got {tensor.device}"
            )
