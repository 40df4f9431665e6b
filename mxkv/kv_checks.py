"""The arguments of an operation on keys and values -> the spec of the call, or an error; see :mod:`mxkv.checks`.

Nothing here looks at a tensor's values, so nothing synchronises.
"""

from __future__ import annotations

import torch

from mxkv.checks import (
    INDEX_DTYPES,
    LATENT_DTYPES,
    QUERY_DTYPES,
    _apart,
    _check_same_device,
    _check_unit_stride,
    _names,
)
from mxkv.contracts import MOST_HEADS, MOST_SPLITS, NONFINITE, AttendKVSpec, LoadKVSpec, StoreKVSpec
from mxkv.kv_formats import KVFormat, kv_layout_of, parse_kv_format


def store_kv_spec(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
    nonfinite: str,
) -> StoreKVSpec:
    """Check the arguments of :func:`mxkv.store_kv`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.store_kv`.
    """
    for name, rows in (("key", key), ("value", value)):
        if rows.dim() != 3:
            raise ValueError(f"{name} must be 3-D [tokens, heads, head_dim], got shape {list(rows.shape)}")
        if rows.dtype not in LATENT_DTYPES:
            raise TypeError(f"{name} must be {_names(LATENT_DTYPES)}, got {rows.dtype}")
        _check_unit_stride(name, rows)
    if key.shape[1:] != value.shape[1:]:
        raise ValueError(
            f"key and value must have the same heads and head_dim, got {list(key.shape)} and {list(value.shape)}"
        )
    if key.dtype != value.dtype:
        raise TypeError(f"key and value must be of one dtype, got {key.dtype} and {value.dtype}")
    _check_index("slots", slots, 1)
    _check_same_device(kv_cache, key=key, value=value, slots=slots, centroids=centroids, rotation=rotation)
    check_kv_counts(key, value, slots)
    fmt = parse_kv_format(format)
    heads, head_dim = int(key.shape[1]), int(key.shape[2])
    layout = kv_layout_of(kv_cache, fmt, head_dim)
    if layout.heads != heads:
        raise ValueError(f"key and value must have the cache's {layout.heads} heads, got shape {list(key.shape)}")
    _check_tables(fmt, head_dim, centroids, rotation)
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {nonfinite!r}")
    return StoreKVSpec(
        kv_cache.device, fmt, head_dim, key.dtype, layout, centroids is not None, rotation is not None, nonfinite
    )


def load_kv_spec(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    head_dim: int,
    dtype: torch.dtype,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
) -> LoadKVSpec:
    """Check the arguments of :func:`mxkv.load_kv`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.load_kv`.
    """
    _check_index("slots", slots, 1)
    _check_same_device(kv_cache, slots=slots, centroids=centroids, rotation=rotation)
    if dtype not in LATENT_DTYPES:
        raise TypeError(f"keys and values are loaded as {_names(LATENT_DTYPES)}, got {dtype}")
    fmt = parse_kv_format(format)
    layout = kv_layout_of(kv_cache, fmt, head_dim)
    _check_tables(fmt, head_dim, centroids, rotation)
    return LoadKVSpec(kv_cache.device, fmt, head_dim, dtype, layout, centroids is not None, rotation is not None)


def attend_kv_spec(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    format: str,
    query_start: torch.Tensor | None,
    sink: torch.Tensor | None,
    window: int | None,
    num_splits: int | None,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> AttendKVSpec:
    """Check the arguments of :func:`mxkv.attend_kv`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.attend_kv`.
    """
    if q.dim() != 3:
        raise ValueError(f"q must be 3-D [queries, heads, head_dim], got shape {list(q.shape)}")
    if q.dtype not in QUERY_DTYPES:
        raise TypeError(f"q must be {_names(QUERY_DTYPES)}, got {q.dtype}")
    _check_unit_stride("q", q)
    _check_same_device(
        kv_cache, q=q, out=out, block_table=block_table, seq_lens=seq_lens, query_start=query_start, sink=sink,
        centroids=centroids, rotation=rotation, lse=lse, workspace=workspace,
    )  # fmt: skip
    _check_index("block_table", block_table, 2)
    _check_index("seq_lens", seq_lens, 1)
    if query_start is not None:
        _check_index("query_start", query_start, 1)
    check_kv_queries(q, out, block_table, seq_lens, query_start, lse)
    if out.dtype != q.dtype:
        raise TypeError(f"out must be of q's dtype: expected {q.dtype}, got {out.dtype}")
    _check_unit_stride("out", out)
    if not _apart(out):
        raise ValueError(f"the rows of out must not overlap, got shape {list(out.shape)}, strides {list(out.stride())}")
    fmt = parse_kv_format(format)
    heads, head_dim = int(q.shape[1]), int(q.shape[2])
    layout = kv_layout_of(kv_cache, fmt, head_dim)
    if not 1 <= heads <= MOST_HEADS or heads % layout.heads:
        raise ValueError(
            f"q must have 1 to {MOST_HEADS} heads, a multiple of the cache's {layout.heads}; got shape {list(q.shape)}"
        )
    if sink is not None:
        if sink.shape != (heads,):
            raise ValueError(f"sink must be [heads] = [{heads}], got shape {list(sink.shape)}")
        if sink.dtype != torch.float32:
            raise TypeError(f"sink must be torch.float32, got {sink.dtype}")
        if not sink.is_contiguous():
            raise ValueError(f"sink must be contiguous, got strides {list(sink.stride())}")
    if lse is not None:
        if lse.dtype != torch.float32:
            raise TypeError(f"lse must be torch.float32, got {lse.dtype}")
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got shape {list(lse.shape)}, strides {list(lse.stride())}")
    if workspace is not None and not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be contiguous, got shape {list(workspace.shape)}, strides {list(workspace.stride())}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if num_splits is not None and not 1 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"expected 1 <= num_splits <= {MOST_SPLITS}, got {num_splits}")
    _check_tables(fmt, head_dim, centroids, rotation)
    return AttendKVSpec(
        kv_cache.device, fmt, head_dim, q.dtype, layout, heads, query_start is not None, window is not None,
        sink is not None, lse is not None, centroids is not None, rotation is not None,
    )  # fmt: skip


def check_kv_counts(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """The checks of a store that its memoised spec does not cover: how many tokens there are."""
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"key and value must have the same tokens, got {list(key.shape)} and {list(value.shape)}")
    if slots.shape[0] > key.shape[0]:
        raise ValueError(f"expected at most one slot for each of the {key.shape[0]} tokens, got {slots.shape[0]}")


def check_kv_queries(
    q: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """The checks of an attention that its memoised spec does not cover: how many queries and sequences there are."""
    queries, sequences = q.shape[0], seq_lens.shape[0]
    if out.shape != q.shape:
        raise ValueError(f"out must be of q's shape {list(q.shape)}, got {list(out.shape)}")
    if lse is not None and lse.shape != q.shape[:2]:
        raise ValueError(f"lse must be [queries, heads] = {list(q.shape[:2])}, got shape {list(lse.shape)}")
    if block_table.shape[0] != sequences:
        raise ValueError(
            f"block_table must have a row for each of the {sequences} sequences, got shape {list(block_table.shape)}"
        )
    if query_start is None and sequences != queries:
        raise ValueError(
            f"without query_start there is one query of each sequence: expected seq_lens [{queries}], "
            f"got shape {list(seq_lens.shape)}"
        )
    if query_start is not None and query_start.shape[0] != sequences + 1:
        raise ValueError(
            f"query_start must be [sequences + 1] = [{sequences + 1}], got shape {list(query_start.shape)}"
        )


def check_address(kv_cache: torch.Tensor) -> None:
    """Raise ValueError where the cache's fp16 numbers would not stand at even addresses."""
    if kv_cache.data_ptr() & 1:
        raise ValueError(f"a cache of keys and values starts at an even address, got {kv_cache.data_ptr():#x}")


def _check_tables(
    format: KVFormat, head_dim: int, centroids: torch.Tensor | None, rotation: torch.Tensor | None
) -> None:
    for name, table, shape in (
        ("centroids", centroids, (1 << format.key.bits,)),
        ("rotation", rotation, (head_dim, head_dim)),
    ):
        if table is None:
            continue
        if not format.normed:
            raise ValueError(f"{name} belongs to mse3 and mse4 keys, got format {format.name!r} of {format.key.value}")
        if table.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for {format.name}, got shape {list(table.shape)}")
        if table.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {table.dtype}")
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(table.stride())}")


def _check_index(name: str, index: torch.Tensor, dims: int) -> None:
    if index.dim() != dims:
        raise ValueError(f"{name} must be {dims}-D, got shape {list(index.shape)}")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be {_names(INDEX_DTYPES)}, got {index.dtype}")
