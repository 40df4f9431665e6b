"""The operations as torch operators (``torch.ops.mxkv``): schemas, implementations, fakes.

The schemas declare what a call writes, so that compiled programs write the caller's cache in place. A call's checks and
the choice of its backend are made once for each kind of call and memoised under everything they depend on but the
token count; a further call of that kind costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mxkv import checks, compression_checks, dispatch
from mxkv.contracts import Packed

_library = torch.library.Library("mxkv", "DEF")

_SCHEMAS = (
    "store(Tensor(a!) cache, Tensor latent, Tensor slots, str? format=None, Tensor? positions=None, "
    "Tensor? cos_sin=None, int compress_ratio=1, Tensor? cache_scale=None, str nonfinite='propagate', "
    "str? backend=None) -> ()",
    "load(Tensor cache, Tensor slots, str? format=None, int? latent_dim=None, ScalarType? dtype=None, "
    "Tensor? cache_scale=None, str? backend=None) -> Tensor",
    "load_out(Tensor cache, Tensor slots, Tensor(a!) out, str? format=None, Tensor? cache_scale=None, "
    "str? backend=None) -> ()",
    "attend(Tensor q, Tensor cache, Tensor(a!) out, Tensor? indices=None, Tensor? indptr=None, "
    "Tensor? block_table=None, Tensor? seq_lens=None, str? format=None, Tensor? cache_scale=None, "
    "float? scale=None, Tensor? sink=None, int? num_splits=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None, "
    "str? backend=None) -> ()",
    "compress_norm(Tensor kv_score, Tensor positions, Tensor(a!)? state_cache, Tensor slots, Tensor? query_start, "
    "Tensor? token_to_request, Tensor weight, float eps, int compress_ratio, Tensor(b!) out, Tensor? prev_rows=None, "
    "Tensor? prev_row_indices=None, str? backend=None) -> ()",
    "save_ring_rows(Tensor rows, Tensor slots, Tensor(a!) state_cache, str? backend=None) -> ()",
    "compress_store(Tensor kv_score, Tensor positions, Tensor(a!)? state_cache, Tensor slots, Tensor? query_start, "
    "Tensor? token_to_request, Tensor weight, float eps, int compress_ratio, Tensor(b!) cache, Tensor cache_slots, "
    "Tensor? prev_rows=None, Tensor? prev_row_indices=None, Tensor(c!)? out=None, str? format=None, "
    "Tensor? cos_sin=None, Tensor? cache_scale=None, str nonfinite='propagate', str? backend=None) -> ()",
)

_MOST_PLANS = 4096
_plans: dict[Any, tuple[Callable[..., None], int]] = {}


def forget_plans() -> None:
    """Forget every memoised call (for tests)."""
    _plans.clear()


def _remember(key: Any, plan: Callable[..., None], latent_dim: int) -> tuple[Callable[..., None], int]:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan, latent_dim
    return plan, latent_dim


def _kind(tensor: torch.Tensor | None) -> Any:
    """What a memoised call depends on in a tensor, less its first dimension, which counts tokens."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.get_device()


def _store(
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    format: str | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    compress_ratio: int = 1,
    cache_scale: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    if positions is None and cos_sin is None and cache_scale is None:
        extras = None
    else:
        extras = (
            _kind(positions),
            _kind(cos_sin),
            None if cache_scale is None else (cache_scale.numel(), *_kind(cache_scale)),
        )
    key = (
        cache.shape, cache.stride(), cache.dtype, cache.get_device(), latent.shape[1:], latent.stride(), latent.dtype,
        latent.get_device(), slots.stride(), slots.dtype, slots.get_device(), extras, format, compress_ratio, nonfinite,
        backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        spec = checks.store_spec(
            cache, latent, slots, format, positions, cos_sin, compress_ratio, cache_scale, nonfinite
        )
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    tokens, rows = slots.shape[0], latent.shape[0]
    if tokens != rows or (positions is not None and positions.shape[0] != tokens):
        checks.check_counts(latent, slots, positions)
        latent = latent[:tokens]
        positions = None if positions is None else positions[:tokens]
    if tokens:
        found[0](cache, latent, slots, positions, cos_sin, cache_scale)


def _load_plan(
    cache: torch.Tensor,
    slots: torch.Tensor,
    format: str | None,
    latent_dim: int | None,
    dtype: torch.dtype,
    cache_scale: torch.Tensor | None,
    out: torch.Tensor | None,
    backend: str | None,
) -> tuple[Callable[..., None], int]:
    scale = None if cache_scale is None else (cache_scale.numel(), _kind(cache_scale))
    key = (
        cache.shape, cache.stride(), cache.dtype, cache.get_device(), slots.stride(), slots.dtype, slots.get_device(),
        format, latent_dim, dtype, scale, _kind(out), backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None or (out is not None and out.shape[0] != slots.shape[0]):
        spec = checks.load_spec(cache, slots, format, latent_dim, dtype, cache_scale, out)
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    return found


def _load(
    cache: torch.Tensor,
    slots: torch.Tensor,
    format: str | None = None,
    latent_dim: int | None = None,
    dtype: torch.dtype | None = None,
    cache_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    dtype = dtype or torch.bfloat16
    plan, latent_dim = _load_plan(cache, slots, format, latent_dim, dtype, cache_scale, None, backend)
    out = torch.empty((slots.shape[0], latent_dim), dtype=dtype, device=cache.device)
    if slots.shape[0]:
        plan(cache, slots, out, cache_scale)
    return out


def _load_out(
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    format: str | None = None,
    cache_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    plan, _ = _load_plan(cache, slots, format, None, out.dtype, cache_scale, out, backend)
    if slots.shape[0]:
        plan(cache, slots, out, cache_scale)


def _attend_plan(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    format: str | None,
    cache_scale: torch.Tensor | None,
    sink: torch.Tensor | None,
    num_splits: int | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    backend: str | None,
) -> Callable[..., None]:
    extras = (
        None if cache_scale is None else (cache_scale.numel(), *_kind(cache_scale)),
        None if sink is None else (sink.shape, *_kind(sink)),
        None if workspace is None else (workspace.is_contiguous(), workspace.get_device()),
    )
    # Strides count: where there is one query only, those of more queries may be wrong.
    key = (
        cache.shape, cache.stride(), cache.dtype, cache.get_device(), _kind(q), _kind(out), q.shape[0] > 1,
        _index_kind(indices), _index_kind(indptr), _index_kind(block_table), _index_kind(seq_lens), extras, _kind(lse),
        num_splits, format, backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        spec = checks.attend_spec(
            q, cache, out, indices, indptr, block_table, seq_lens, format, cache_scale, sink, num_splits, lse, workspace
        )
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    checks.check_queries(q, out, indices, indptr, block_table, seq_lens, lse)
    return found[0]


def _index_kind(index: torch.Tensor | None) -> Any:
    """What a memoised call depends on in a tensor of slots, blocks or bounds: any of its strides may be taken."""
    return None if index is None else (index.dtype, index.dim(), index.get_device())


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    format: str | None = None,
    cache_scale: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    num_splits: int | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    plan = _attend_plan(
        q, cache, out, indices, indptr, block_table, seq_lens, format, cache_scale, sink, num_splits, lse, workspace,
        backend,
    )  # fmt: skip
    if q.shape[0]:
        rows, bounds = (indices, indptr) if block_table is None else (block_table, seq_lens)
        scale = float(q.shape[2] ** -0.5) if scale is None else scale
        plan(q, cache, out, rows, bounds, cache_scale, sink, lse, workspace, scale, num_splits)


def attend_workspace_bytes(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    format: str | None,
    cache_scale: torch.Tensor | None,
    sink: torch.Tensor | None,
    num_splits: int | None,
    lse: torch.Tensor | None,
    backend: str | None,
) -> int:
    """The bytes of workspace that an attention needs; see :func:`mxkv.attend_workspace_bytes`."""
    plan = _attend_plan(
        q, cache, out, indices, indptr, block_table, seq_lens, format, cache_scale, sink, num_splits, lse, None, backend
    )
    needed = getattr(plan, "workspace_bytes", None)  # a backend that computes in one pass has none
    rows = indices if block_table is None else block_table
    return 0 if needed is None else int(needed(q.shape[0], rows, num_splits))


def _rows_kind(tensor: torch.Tensor | None) -> Any:
    """As :func:`_kind`; one row may have a stride that several may not."""
    return None if tensor is None else (tensor.shape[0] > 1, *_kind(tensor))


def _packed_kind(packed: Packed) -> Any:
    """What a memoised call depends on in its tokens, rings and weights."""
    rows, ring, previous = packed.rows, packed.ring, packed.prev_rows
    return (
        _rows_kind(rows), rows.storage_offset() % compression_checks.ROW_STEP, _index_kind(packed.positions),
        _index_kind(packed.slots), _index_kind(packed.query_start), _index_kind(packed.token_to_request),
        None if ring is None else (ring.shape, *_kind(ring), ring.storage_offset() % compression_checks.ROW_STEP),
        None if previous is None else (*_rows_kind(previous), previous.storage_offset() % compression_checks.ROW_STEP),
        _index_kind(packed.prev_row_indices), packed.weight.shape, _kind(packed.weight),
    )  # fmt: skip


def _compress_norm(
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
    backend: str | None = None,
) -> None:
    packed = Packed(
        kv_score, positions, slots, query_start, token_to_request, state_cache, prev_rows, prev_row_indices, weight, eps
    )
    key = ("compress_norm", _packed_kind(packed), compress_ratio, _rows_kind(out), backend, dispatch.forced(),
           dispatch.added())  # fmt: skip
    found = _plans.get(key)
    if found is None:
        spec = compression_checks.compress_spec(packed, compress_ratio, out)
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    compression_checks.check_values(packed, compress_ratio, out)
    if slots.shape[0]:
        found[0](packed, out)


def _save_ring_rows(
    rows: torch.Tensor, slots: torch.Tensor, state_cache: torch.Tensor, backend: str | None = None
) -> None:
    step = compression_checks.ROW_STEP
    key = (
        "save_ring_rows", _rows_kind(rows), rows.storage_offset() % step, _index_kind(slots), state_cache.shape,
        _kind(state_cache), state_cache.storage_offset() % step, backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        spec = compression_checks.save_ring_spec(rows, slots, state_cache)
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    if slots.shape[0] > rows.shape[0]:
        compression_checks.save_ring_spec(rows, slots, state_cache)  # raises
    if slots.shape[0]:
        found[0](rows[: slots.shape[0]], slots, state_cache)


def _compress_store(
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
    out: torch.Tensor | None = None,
    format: str | None = None,
    cos_sin: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    packed = Packed(
        kv_score, positions, slots, query_start, token_to_request, state_cache, prev_rows, prev_row_indices, weight, eps
    )
    key = (
        "compress_store", _packed_kind(packed), compress_ratio, _rows_kind(out), cache.shape, _kind(cache),
        cache.stride(), _index_kind(cache_slots), _kind(cos_sin),
        None if cache_scale is None else (cache_scale.numel(), *_kind(cache_scale)),
        format, nonfinite, backend, dispatch.forced(), dispatch.added(),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        spec = compression_checks.compress_store_spec(
            packed, compress_ratio, cache, cache_slots, out, format, cos_sin, cache_scale, nonfinite
        )
        found = _remember(key, dispatch.plan(spec, backend), spec.latent_dim)
    compression_checks.check_values(packed, compress_ratio, out, cache_slots)
    if slots.shape[0]:
        found[0](packed, cache, cache_slots, cos_sin, cache_scale, out)


def _fake_store(
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    format: str | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    compress_ratio: int = 1,
    cache_scale: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    checks.store_spec(cache, latent, slots, format, positions, cos_sin, compress_ratio, cache_scale, nonfinite)


def _fake_load(
    cache: torch.Tensor,
    slots: torch.Tensor,
    format: str | None = None,
    latent_dim: int | None = None,
    dtype: torch.dtype | None = None,
    cache_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    dtype = dtype or torch.bfloat16
    spec = checks.load_spec(cache, slots, format, latent_dim, dtype, cache_scale, None)
    return torch.empty((slots.shape[0], spec.latent_dim), dtype=dtype, device=cache.device)


def _fake_load_out(
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    format: str | None = None,
    cache_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    checks.load_spec(cache, slots, format, None, out.dtype, cache_scale, out)


def _fake_attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    format: str | None = None,
    cache_scale: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    num_splits: int | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    checks.attend_spec(
        q, cache, out, indices, indptr, block_table, seq_lens, format, cache_scale, sink, num_splits, lse, workspace
    )


def _fake_compress_norm(
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
    backend: str | None = None,
) -> None:
    packed = Packed(
        kv_score, positions, slots, query_start, token_to_request, state_cache, prev_rows, prev_row_indices, weight, eps
    )
    compression_checks.compress_spec(packed, compress_ratio, out)


def _fake_save_ring_rows(
    rows: torch.Tensor, slots: torch.Tensor, state_cache: torch.Tensor, backend: str | None = None
) -> None:
    compression_checks.save_ring_spec(rows, slots, state_cache)


def _fake_compress_store(
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
    out: torch.Tensor | None = None,
    format: str | None = None,
    cos_sin: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    packed = Packed(
        kv_score, positions, slots, query_start, token_to_request, state_cache, prev_rows, prev_row_indices, weight, eps
    )
    compression_checks.compress_store_spec(
        packed, compress_ratio, cache, cache_slots, out, format, cos_sin, cache_scale, nonfinite
    )


_functions: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_store, _fake_store),
    (_load, _fake_load),
    (_load_out, _fake_load_out),
    (_attend, _fake_attend),
    (_compress_norm, _fake_compress_norm),
    (_save_ring_rows, _fake_save_ring_rows),
    (_compress_store, _fake_compress_store),
)
for _schema, (_implementation, _fake) in zip(_SCHEMAS, _functions, strict=True):
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxkv::{_name}", _fake, lib=_library)

store_op = torch.ops.mxkv.store.default
load_op = torch.ops.mxkv.load.default
load_out_op = torch.ops.mxkv.load_out.default
attend_op = torch.ops.mxkv.attend.default
compress_norm_op = torch.ops.mxkv.compress_norm.default
save_ring_rows_op = torch.ops.mxkv.save_ring_rows.default
compress_store_op = torch.ops.mxkv.compress_store.default
