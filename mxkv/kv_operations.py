"""The operations on keys and values per head. Each is a thin layer over its torch operator: :mod:`mxkv.kv_library`."""

from __future__ import annotations

from typing import Any

import torch

from mxkv import contracts, dispatch, kv_library
from mxkv.checks import check_types, whole
from mxkv.kv_formats import KVFormat, get_kv_format, kv_layout_of
from mxkv.kv_library import attend_kv_op, load_kv_op, store_kv_op

__all__ = ["attend_kv", "attend_kv_workspace_bytes", "empty_kv_cache", "load_kv", "store_kv"]

_TENSOR = (torch.Tensor, type(None))
_STRING = (str, type(None))
_INTEGER = (int, type(None))
_NUMBER = (int, float, type(None))


def empty_kv_cache(
    format: str | KVFormat,
    num_blocks: int,
    block_size: int,
    heads: int,
    head_dim: int,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """A cache of keys and values with no token in it: every byte is zero, and every row reads as zeros.

    Args:
        format: A format's name, or a format.
        num_blocks: Pages.
        block_size: Slots of a page.
        heads: Heads that keys and values have.
        head_dim: Elements of a key, and of a value: a multiple of 16.
        device: Where to allocate it.

    Returns:
        ``[num_blocks, block_size, heads, slot_bytes]`` uint8.

    Raises:
        TypeError: A size that is no int.
        ValueError: An unknown format, a head_dim that does not fit it, or sizes below 0 (below 1 but for num_blocks).
    """
    fmt = get_kv_format(format)
    width = fmt.slot_bytes(whole("head_dim", head_dim))
    sizes = whole("num_blocks", num_blocks, 0), whole("block_size", block_size, 1)
    shape = (*sizes, whole("heads", heads, 1), width)
    return torch.zeros(shape, dtype=fmt.cache_dtype, device=device)


def store_kv(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    format: str | KVFormat,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    """Quantize keys and values and scatter them into a paged cache, in place.

    Args:
        kv_cache: ``[num_blocks, block_size, heads, slot_bytes]`` uint8; the blocks may stand apart, by an even number
            of bytes, and start at an even address.
        key: ``[tokens, heads, head_dim]`` bf16, fp16 or fp32; any strides, but heads contiguous. It shares no memory
            with the cache.
        value: Like ``key``, of its dtype.
        slots: ``[<= tokens]`` int32 or int64, of any stride. Slot ``s`` is position ``s % block_size`` of block
            ``s // block_size``. A negative slot, and one past the end, stores nothing. If shorter than ``key``, only
            its tokens are stored. Of equal slots the last wins on the torch backend; on a GPU backend what that slot
            holds is unspecified.
        format: A format's name or a format.
        centroids: ``[2 ** bits]`` fp32, ascending, instead of the Lloyd–Max quantizer's. Readers need the same.
        rotation: ``[head_dim, head_dim]`` fp32, orthogonal, instead of the Hadamard matrix. Readers need the same.
        nonfinite: "propagate": an element of an FP8 key that is NaN or infinite reads back as NaN, and so does every
            element of another key, or of a value, that holds one. "sanitize": NaN is stored as 0 and infinity as 65504.
        backend: The backend that must run the call; None leaves it to ``use_backend``, ``MXKV_BACKEND``, the device.

    Raises:
        TypeError: A dtype that the operation does not take.
        ValueError: Shapes, strides, addresses or devices that do not fit, an unknown format, unknown names, or a forced
            backend that cannot run the call. Nothing has been written.
    """
    try:
        store_kv_op(kv_cache, key, value, slots, _spec_of(format), centroids, rotation, nonfinite, backend)
    except (RuntimeError, AttributeError):
        check_types(
            kv_cache=(kv_cache, torch.Tensor), key=(key, torch.Tensor), value=(value, torch.Tensor),
            slots=(slots, torch.Tensor), centroids=(centroids, _TENSOR), rotation=(rotation, _TENSOR),
            nonfinite=(nonfinite, str), backend=(backend, _STRING),
        )  # fmt: skip
        raise


def load_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    format: str | KVFormat,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values from a paged cache and dequantize them, the rotation undone.

    Args:
        kv_cache: As in :func:`store_kv`.
        slots: ``[n]`` int32 or int64, of any stride. A negative slot, and one past the end, gives zeros.
        format: A format's name or a format.
        head_dim: Elements of a key, and of a value.
        dtype: bf16, fp16 or fp32; finite values saturate at its largest.
        centroids: What the keys were stored with.
        rotation: What the keys were stored with.
        backend: As in :func:`store_kv`.

    Returns:
        Keys and values, each ``[n, heads, head_dim]``.

    Raises:
        TypeError, ValueError: As in :func:`store_kv`.
    """
    try:
        key, value = load_kv_op(kv_cache, slots, _spec_of(format), head_dim, dtype, centroids, rotation, backend)
    except (RuntimeError, AttributeError):
        check_types(
            kv_cache=(kv_cache, torch.Tensor), slots=(slots, torch.Tensor), head_dim=(head_dim, int),
            dtype=(dtype, torch.dtype), centroids=(centroids, _TENSOR), rotation=(rotation, _TENSOR),
            backend=(backend, _STRING),
        )  # fmt: skip
        raise
    return key, value


def attend_kv(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    format: str | KVFormat,
    query_start: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over pages of keys and values, read straight from their packed bytes.

    Sequence i's rows are the first ``seq_lens[i]`` slots of the blocks that its row of the table names. Without
    ``query_start`` each sequence has one query, which sees all of them. With it, sequence i's queries are
    ``q[query_start[i]:query_start[i + 1]]``, and belong to its last rows: each sees the rows up to its own.

    Args:
        q: ``[queries, query_heads, head_dim]`` bf16 or fp16, at most 256 heads; ``query_heads`` is a multiple of the
            cache's heads, and query head h attends to the cache's head ``h // (query_heads / heads)``. Any strides, but
            heads contiguous.
        kv_cache: As in :func:`store_kv`.
        block_table: ``[sequences, max_blocks]`` int32 or int64, of any strides. A block that is negative or out of
            range is skipped and never read.
        seq_lens: ``[sequences]`` int32 or int64.
        format: A format's name or a format.
        query_start: ``[sequences + 1]`` int32 or int64, ascending from 0. Queries past its last entry are padding: they
            give zeros.
        scale: Factor of the logits; 1/√head_dim if None.
        sink: ``[query_heads]`` fp32: a logit for each head that joins the softmax's denominator and has no value.
        window: A query sees so many rows at most, the last ones; None: all.
        num_splits: How many programs share one query's rows; chosen from the shapes if None. Results of different
            numbers differ in rounding.
        centroids: What the keys were stored with.
        rotation: What the keys were stored with.
        return_lse: Also return the logarithm of the sum of exponentials.
        workspace: Memory for what the splits leave to be merged: contiguous, of any dtype, at least
            :func:`attend_kv_workspace_bytes` long, aligned to 16 bytes; what it holds afterwards is unspecified.
        out: ``[queries, query_heads, head_dim]`` of q's dtype to write into; any strides, but heads contiguous.
        backend: As in :func:`store_kv`.

    Returns:
        ``[queries, query_heads, head_dim]`` of q's dtype; ``out`` where it was given. A query with no row gives zeros.
        With ``return_lse`` also ``[queries, query_heads]`` fp32: natural logarithms, without the sink, −inf for a query
        with no row; :func:`merge_partials` merges such pairs.

    Raises:
        TypeError, ValueError: As in :func:`store_kv`; or a workspace that is too small.
    """
    try:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
        attend_kv_op(
            q, kv_cache, out, block_table, seq_lens, _spec_of(format), query_start, scale, sink, window, num_splits,
            centroids, rotation, lse, workspace, backend,
        )  # fmt: skip
    except (RuntimeError, AttributeError, TypeError):
        check_types(
            q=(q, torch.Tensor), kv_cache=(kv_cache, torch.Tensor), block_table=(block_table, torch.Tensor),
            seq_lens=(seq_lens, torch.Tensor), query_start=(query_start, _TENSOR), scale=(scale, _NUMBER),
            sink=(sink, _TENSOR), window=(window, _INTEGER), num_splits=(num_splits, _INTEGER),
            centroids=(centroids, _TENSOR), rotation=(rotation, _TENSOR), workspace=(workspace, _TENSOR),
            out=(out, _TENSOR), backend=(backend, _STRING),
        )  # fmt: skip
        raise
    return out if lse is None else (out, lse)


def attend_kv_workspace_bytes(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    format: str | KVFormat,
    query_start: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> int:
    """How many bytes of workspace a call of :func:`attend_kv` with these arguments takes; it depends on shapes alone.

    0 where one pass is enough: such a call takes no memory but its result.

    Raises:
        TypeError, ValueError: As in :func:`attend_kv`.
    """
    check_types(
        q=(q, torch.Tensor), kv_cache=(kv_cache, torch.Tensor), block_table=(block_table, torch.Tensor),
        seq_lens=(seq_lens, torch.Tensor), query_start=(query_start, _TENSOR), backend=(backend, _STRING),
    )  # fmt: skip
    num_splits = None if num_splits is None else whole("num_splits", num_splits)
    return kv_library.attend_kv_workspace_bytes(
        q, kv_cache, block_table, seq_lens, _spec_of(format), query_start, num_splits, backend
    )


def kv_spec(
    operation: str,
    *,
    device: str | torch.device,
    format: Any,
    dtype: torch.dtype,
    cache: torch.Tensor | None,
    heads: int = 8,
    head_dim: int = 128,
    **fields: Any,
) -> contracts.KVSpec:
    """What :func:`mxkv.spec` gives for an operation on keys and values.

    Raises:
        TypeError: The operation's spec has no such field.
        ValueError: An unknown format, a head_dim that does not fit it, or such a cache.
    """
    fmt = get_kv_format("turboquant-4bit-nc" if format is None else format)
    if cache is None:
        cache = empty_kv_cache(fmt, 1024, 64, heads, head_dim, "meta")
    layout = fields.pop("layout", None) or kv_layout_of(cache, fmt, head_dim)
    if operation == "attend_kv":
        fields = {"query_heads": layout.heads, **fields}
    found: contracts.KVSpec = KV_SPECS[operation](
        dispatch.resolve_device(device), fmt, head_dim, dtype, layout, **fields
    )
    return found


KV_SPECS: dict[str, Any] = {
    kind.operation: kind for kind in (contracts.StoreKVSpec, contracts.LoadKVSpec, contracts.AttendKVSpec)
}


def _spec_of(format: str | KVFormat) -> str:
    return format if isinstance(format, str) else get_kv_format(format).spec
