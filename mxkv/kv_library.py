"""The operations on keys and values as torch operators; see :mod:`mxkv.library`, whose rules hold here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mxkv import dispatch, kv_checks

_library = torch.library.Library("mxkv", "FRAGMENT")

_SCHEMAS = (
    "store_kv(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slots, str format, Tensor? centroids=None, "
    "Tensor? rotation=None, str nonfinite='propagate', str? backend=None) -> ()",
    "load_kv(Tensor kv_cache, Tensor slots, str format, int head_dim, ScalarType? dtype=None, Tensor? centroids=None, "
    "Tensor? rotation=None, str? backend=None) -> (Tensor, Tensor)",
    "attend_kv(Tensor q, Tensor kv_cache, Tensor(a!) out, Tensor block_table, Tensor seq_lens, str format, "
    "Tensor? query_start=None, float? scale=None, Tensor? sink=None, int? window=None, int? num_splits=None, "
    "Tensor? centroids=None, Tensor? rotation=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None, "
    "str? backend=None) -> ()",
)

_MOST_PLANS = 4096
_plans: dict[Any, Callable[..., None]] = {}


def forget_plans() -> None:
    """Forget every memoised call (for tests)."""
    _plans.clear()


def _remember(key: Any, plan: Callable[..., None]) -> Callable[..., None]:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _kind(tensor: torch.Tensor | None) -> Any:
    """What a memoised call depends on in a tensor, less its first dimension, which counts tokens or queries."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.get_device()


def _table_kind(table: torch.Tensor | None) -> Any:
    return None if table is None else (table.shape[0], *_kind(table))


def _index_kind(index: torch.Tensor | None) -> Any:
    return None if index is None else (index.dtype, index.dim(), index.get_device())


def _cache_kind(kv_cache: torch.Tensor) -> Any:
    return kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.get_device()


def _store_kv(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    memo = (
        _cache_kind(kv_cache), _kind(key), _kind(value), _kind(slots), format, _table_kind(centroids),
        _table_kind(rotation), nonfinite, backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    plan = _plans.get(memo)
    if plan is None:
        spec = kv_checks.store_kv_spec(kv_cache, key, value, slots, format, centroids, rotation, nonfinite)
        plan = _remember(memo, dispatch.plan(spec, backend))
    tokens = slots.shape[0]
    if tokens != key.shape[0] or tokens != value.shape[0]:
        kv_checks.check_kv_counts(key, value, slots)
        key, value = key[:tokens], value[:tokens]
    kv_checks.check_address(kv_cache)
    if tokens:
        plan(kv_cache, key, value, slots, centroids, rotation)


def _load_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    head_dim: int,
    dtype: torch.dtype | None = None,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = dtype or torch.bfloat16
    memo = (
        _cache_kind(kv_cache), _kind(slots), format, head_dim, dtype, _table_kind(centroids), _table_kind(rotation),
        backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    plan = _plans.get(memo)
    if plan is None:
        spec = kv_checks.load_kv_spec(kv_cache, slots, format, head_dim, dtype, centroids, rotation)
        plan = _remember(memo, dispatch.plan(spec, backend))
    kv_checks.check_address(kv_cache)
    key, value = _loaded(kv_cache, slots, head_dim, dtype)
    if slots.shape[0]:
        plan(kv_cache, slots, key, value, centroids, rotation)
    return key, value


def _loaded(
    kv_cache: torch.Tensor, slots: torch.Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (slots.shape[0], kv_cache.shape[2], head_dim)
    key = torch.empty(shape, dtype=dtype, device=kv_cache.device)
    return key, torch.empty(shape, dtype=dtype, device=kv_cache.device)


def _attend_kv_plan(
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
    backend: str | None,
) -> Callable[..., None]:
    # Strides count: where there is one query only, those of more queries may be wrong.
    memo = (
        _cache_kind(kv_cache), _kind(q), _kind(out), q.shape[0] > 1, _index_kind(block_table), _index_kind(seq_lens),
        _index_kind(query_start), _table_kind(sink), window, num_splits, _table_kind(centroids), _table_kind(rotation),
        _kind(lse), None if workspace is None else (workspace.is_contiguous(), workspace.get_device()), format, backend,
        dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    plan = _plans.get(memo)
    if plan is None:
        spec = kv_checks.attend_kv_spec(
            q, kv_cache, out, block_table, seq_lens, format, query_start, sink, window, num_splits, centroids, rotation,
            lse, workspace,
        )  # fmt: skip
        plan = _remember(memo, dispatch.plan(spec, backend))
    kv_checks.check_kv_queries(q, out, block_table, seq_lens, query_start, lse)
    return plan


def _attend_kv(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    format: str,
    query_start: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    plan = _attend_kv_plan(
        q, kv_cache, out, block_table, seq_lens, format, query_start, sink, window, num_splits, centroids, rotation,
        lse, workspace, backend,
    )  # fmt: skip
    kv_checks.check_address(kv_cache)
    if q.shape[0]:
        scale = float(q.shape[2] ** -0.5) if scale is None else scale
        plan(
            q, kv_cache, out, block_table, seq_lens, query_start, sink, centroids, rotation, lse, workspace, scale,
            window, num_splits,
        )  # fmt: skip


def attend_kv_workspace_bytes(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    format: str,
    query_start: torch.Tensor | None,
    num_splits: int | None,
    backend: str | None,
) -> int:
    """The bytes of workspace that an attention needs; see :func:`mxkv.attend_kv_workspace_bytes`."""
    plan = _attend_kv_plan(
        q, kv_cache, q.new_empty(q.shape), block_table, seq_lens, format, query_start, None, None, num_splits, None,
        None, None, None, backend,
    )  # fmt: skip
    needed = getattr(plan, "workspace_bytes", None)  # a backend that computes in one pass has none
    return 0 if needed is None else int(needed(q.shape[0], block_table, num_splits))


def _check_offset(kv_cache: torch.Tensor) -> None:
    """What a fake tensor says about its address."""
    offset = kv_cache.storage_offset()
    if isinstance(offset, int) and offset % 2:
        raise ValueError(f"a cache of keys and values starts at an even address, got storage offset {offset}")


def _fake_store_kv(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    _check_offset(kv_cache)
    kv_checks.store_kv_spec(kv_cache, key, value, slots, format, centroids, rotation, nonfinite)


def _fake_load_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    format: str,
    head_dim: int,
    dtype: torch.dtype | None = None,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_offset(kv_cache)
    dtype = dtype or torch.bfloat16
    kv_checks.load_kv_spec(kv_cache, slots, format, head_dim, dtype, centroids, rotation)
    return _loaded(kv_cache, slots, head_dim, dtype)


def _fake_attend_kv(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    format: str,
    query_start: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    centroids: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    _check_offset(kv_cache)
    kv_checks.attend_kv_spec(
        q, kv_cache, out, block_table, seq_lens, format, query_start, sink, window, num_splits, centroids, rotation,
        lse, workspace,
    )  # fmt: skip


_functions: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_store_kv, _fake_store_kv),
    (_load_kv, _fake_load_kv),
    (_attend_kv, _fake_attend_kv),
)
for _schema, (_implementation, _fake) in zip(_SCHEMAS, _functions, strict=True):
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxkv::{_name}", _fake, lib=_library)

store_kv_op = torch.ops.mxkv.store_kv.default
load_kv_op = torch.ops.mxkv.load_kv.default
attend_kv_op = torch.ops.mxkv.attend_kv.default
