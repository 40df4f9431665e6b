"""The operations on DeepSeek V4.1's compressed tokens; docs/compression.md explains rings, chunks and groups."""

from __future__ import annotations

from typing import Any

import torch

from mxkv.checks import check_types
from mxkv.formats import Format
from mxkv.library import compress_norm_op, compress_store_op, save_ring_rows_op
from mxkv.operations import _scale_tensor, _spec_of

__all__ = ["compress_norm", "compress_store", "save_ring_rows"]

_TENSOR = (torch.Tensor, type(None))
_STRING = (str, type(None))


def compress_norm(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor | None,
    slots: torch.Tensor,
    query_start: torch.Tensor | None,
    token_to_request: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    compress_ratio: int,
    out: torch.Tensor,
    prev_rows: torch.Tensor | None = None,
    prev_row_indices: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Make one normalised latent of each token, or of each two; keep what the next chunk needs. In place.

    At ratio 1, every token whose slot is at least 0 gives ``out = RMSNorm(kv) * weight`` in its row.

    At ratio 2 a row is 512 values and 512 scores, and the tokens of positions 2i and 2i + 1 are a group. A group closes
    at its second token, if that token's slot is at least 0: each value is the mean of the two rows' values, weighed by
    the softmax over the two rows' scores; RMSNorm and ``weight`` follow; the result goes to the second token's row. All
    other rows of ``out`` stay as they are.

    A chunk that begins with a second token has its first one elsewhere: in the request's ring, row ``(position - 1) %
    capacity`` of the block that the chunk's first slot names, or, where ``prev_row_indices`` of the request is at least
    0, in that row of ``prev_rows``. Afterwards, unless there are ``prev_rows``, the last ``min(chunk, capacity)`` rows
    of the chunk are saved to their slots. Whatever the order in which a device does this, a ring is read first.

    Args:
        kv_score: ``[tokens, 512 * compress_ratio]`` fp32, requests one after another. Row starts are multiples of 16
            elements here, in ``state_cache`` and in ``prev_rows``.
        positions: ``[>= slots]`` int32 or int64; consecutive in a request. A negative one closes no group.
        state_cache: ``[blocks, capacity, 1024]`` fp32, the rings; any capacity of at least 1. May be None at ratio 1.
        slots: ``[<= tokens]`` int32 or int64: ``block * capacity + position % capacity`` (what another row than that
            does to its ring is unspecified). A negative slot closes no group and saves no row; nor does one past the
            last ring save one. If the chunk's first slot is negative, its first group is skipped and none of its rows
            is saved. If shorter than ``kv_score``, only its tokens exist.
        query_start: ``[requests + 1]`` int32 or int64: request i has the tokens from ``query_start[i]`` up to
            ``query_start[i + 1]``; it may have none. May be None at ratio 1.
        token_to_request: ``[>= slots]`` int32 or int64. A token that no request has, or not the one that is named here,
            is skipped. May be None at ratio 1.
        weight: ``[512]`` bf16.
        eps: Added to the mean of squares.
        compress_ratio: 1 or 2.
        out: ``[>= slots, 512]`` bf16 of any row stride. What is written (this and the rings) shares no memory with what
            is read.
        prev_rows: ``[rows, 1024]`` fp32: predecessors that other ranks sent. No ring is written then:
            :func:`save_ring_rows` does that.
        prev_row_indices: ``[>= requests]`` int32 or int64: rows of ``prev_rows``; -1 reads the ring. An index past the
            last row skips the group.
        backend: As in :func:`mxkv.store`.

    Raises:
        TypeError: A dtype that the operation does not take.
        ValueError: Shapes, strides or devices that do not fit, or a forced backend that cannot run the call. Nothing
            has been written.
    """
    try:
        compress_norm_op(
            kv_score, positions, state_cache, slots, query_start, token_to_request, weight, eps, compress_ratio, out,
            prev_rows, prev_row_indices, backend,
        )  # fmt: skip
    except (RuntimeError, AttributeError):
        _check_packed(
            kv_score, positions, state_cache, slots, query_start, token_to_request, weight, eps, compress_ratio,
            prev_rows, prev_row_indices, out=(out, torch.Tensor), backend=(backend, _STRING),
        )  # fmt: skip
        raise


def save_ring_rows(
    rows: torch.Tensor, slots: torch.Tensor, state_cache: torch.Tensor, *, backend: str | None = None
) -> None:
    """Save rows to the rings' slots, in place: what :func:`compress_norm` leaves to do where it has ``prev_rows``.

    Args:
        rows: ``[n, 1024]`` fp32; row starts are multiples of 16 elements.
        slots: ``[<= n]`` int32 or int64, of any stride. A negative slot, and one past the last ring, saves nothing. Of
            equal slots the last wins on the torch backend; on a GPU backend that row is unspecified.
        state_cache: ``[blocks, capacity, 1024]`` fp32, as in :func:`compress_norm`.
        backend: As in :func:`mxkv.store`.

    Raises:
        TypeError, ValueError: As in :func:`compress_norm`.
    """
    try:
        save_ring_rows_op(rows, slots, state_cache, backend)
    except (RuntimeError, AttributeError):
        check_types(
            rows=(rows, torch.Tensor), slots=(slots, torch.Tensor), state_cache=(state_cache, torch.Tensor),
            backend=(backend, _STRING),
        )  # fmt: skip
        raise


def compress_store(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor | None,
    slots: torch.Tensor,
    query_start: torch.Tensor | None,
    token_to_request: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    compress_ratio: int,
    cache: torch.Tensor,
    cache_slots: torch.Tensor,
    prev_rows: torch.Tensor | None = None,
    prev_row_indices: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    format: str | Format | None = None,
    cos_sin: torch.Tensor | None = None,
    cache_scale: torch.Tensor | float | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    """:func:`compress_norm`, then :func:`mxkv.store` of the latents that it made, in one call and with the same bytes.

    The latents are rounded to bf16, but go to memory only if ``out`` asks for them. A latent is stored under the same
    conditions as by :func:`mxkv.store` with the same ``positions``, ``compress_ratio`` and ``cos_sin``.

    Args:
        kv_score, positions, state_cache, slots, query_start, token_to_request, weight, eps, compress_ratio, prev_rows,
            prev_row_indices: As in :func:`compress_norm`.
        cache: The cache of the latents, as in :func:`mxkv.store`, of ``latent_dim`` 512.
        cache_slots: ``[>= slots]`` int32 or int64, of any stride: for each token its slot in the cache; only those of
            tokens that give a latent are looked at. A negative slot, and one past the end, stores nothing.
        out: ``[>= slots, 512]`` bf16 for the latents, or None.
        format, cos_sin, cache_scale, nonfinite, backend: As in :func:`mxkv.store`.

    Raises:
        TypeError, ValueError: As in :func:`compress_norm` and :func:`mxkv.store`. Nothing has been written.
    """
    try:
        compress_store_op(
            kv_score, positions, state_cache, slots, query_start, token_to_request, weight, eps, compress_ratio, cache,
            cache_slots, prev_rows, prev_row_indices, out, _spec_of(format), cos_sin,
            _scale_tensor(cache_scale, cache), nonfinite, backend,
        )  # fmt: skip
    except (RuntimeError, AttributeError):
        _check_packed(
            kv_score, positions, state_cache, slots, query_start, token_to_request, weight, eps, compress_ratio,
            prev_rows, prev_row_indices, cache=(cache, torch.Tensor), cache_slots=(cache_slots, torch.Tensor),
            out=(out, _TENSOR), cos_sin=(cos_sin, _TENSOR), nonfinite=(nonfinite, str), backend=(backend, _STRING),
        )  # fmt: skip
        raise


def _check_packed(
    kv_score: Any,
    positions: Any,
    state_cache: Any,
    slots: Any,
    query_start: Any,
    token_to_request: Any,
    weight: Any,
    eps: Any,
    compress_ratio: Any,
    prev_rows: Any,
    prev_row_indices: Any,
    **others: tuple[Any, Any],
) -> None:
    """After a call has failed: TypeError where an argument was of a type that is not taken."""
    check_types(
        kv_score=(kv_score, torch.Tensor), positions=(positions, torch.Tensor), state_cache=(state_cache, _TENSOR),
        slots=(slots, torch.Tensor), query_start=(query_start, _TENSOR), token_to_request=(token_to_request, _TENSOR),
        weight=(weight, torch.Tensor), eps=(eps, (int, float)), compress_ratio=(compress_ratio, int),
        prev_rows=(prev_rows, _TENSOR), prev_row_indices=(prev_row_indices, _TENSOR), **others,
    )  # fmt: skip
