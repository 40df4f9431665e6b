"""The operations that users call. Each is a thin layer over its torch operator: see :mod:`mxkv.library`."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, cast

import torch

from mxkv import contracts, dispatch, library, numerics
from mxkv.checks import check_types, whole
from mxkv.compression_checks import ring_layout_of
from mxkv.formats import Format, get_format
from mxkv.kv_formats import KVFormat
from mxkv.kv_operations import KV_SPECS, kv_spec
from mxkv.library import attend_op, load_op, load_out_op, store_op
from mxkv.paging import contiguous_layout, layout_of

__all__ = ["attend", "attend_workspace_bytes", "empty_cache", "explain", "load", "merge_partials", "spec", "store"]

_TENSOR = (torch.Tensor, type(None))
_STRING = (str, type(None))
_INTEGER = (int, type(None))
_NUMBER = (int, float, type(None))


def empty_cache(
    format: str | Format,
    num_blocks: int,
    block_size: int,
    latent_dim: int,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """A cache with no token in it: every byte is zero, and every row reads as zeros.

    Args:
        format: A format's name, or a format.
        num_blocks: Pages.
        block_size: Slots of a page.
        latent_dim: Values of a row.
        device: Where to allocate it.

    Returns:
        ``[num_blocks, block_size, record width]``: uint8, of record_bytes width, for packed formats; bf16 or
        float8_e4m3fn, of width latent_dim, for the plain ones.

    Raises:
        TypeError: A size that is no int.
        ValueError: An unknown format, a latent_dim that does not fit it, or sizes below 0 (block_size below 1).
    """
    fmt = get_format(format)
    width = fmt.record_width(whole("latent_dim", latent_dim))
    shape = (whole("num_blocks", num_blocks, 0), whole("block_size", block_size, 1), width)
    return torch.zeros(shape, dtype=fmt.cache_dtype, device=device)


def store(
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    *,
    format: str | Format | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    compress_ratio: int = 1,
    cache_scale: torch.Tensor | float | None = None,
    nonfinite: str = "propagate",
    backend: str | None = None,
) -> None:
    """Quantize rows and scatter them into a paged cache, in place.

    Args:
        cache: ``[num_blocks, block_size, record width]`` of the format's dtype; the blocks may stand apart. Formats
            that keep no scales at the end of a page also take ``[num_slots, record width]``, and, with ``format=``,
            any contiguous tensor that can be viewed so.
        latent: ``[tokens, latent_dim]`` bf16, fp16 or fp32, of any row stride. It shares no memory with the cache.
        slots: ``[<= tokens]`` int32 or int64, of any stride. Slot ``s`` is position ``s % block_size`` of block
            ``s // block_size``. A negative slot, and one past the end, stores nothing. If shorter than ``latent``,
            only its tokens are stored. Of equal slots the last wins on the torch backend; on a GPU backend that record
            is unspecified.
        format: A format's name or a format; inferred from the cache's dtype and width and the latent's width if None.
            Of formats of the same width the one whose scales stand at the end of a page is taken: inline ones have to
            be named.
        positions: ``[>= slots]`` int32 or int64: the tokens' positions. A token of negative position is not stored.
        cos_sin: ``[max_pos, 64]`` of a floating-point dtype, 32 cosines then 32 sines: rotate the last 64 values of
            each row in adjacent pairs before quantizing. A token whose position is outside [0, max_pos) is not stored.
        compress_ratio: 1 or 2. A token is stored only if ``(position + 1) % compress_ratio == 0``, rotated by the
            table's row ``position // compress_ratio * compress_ratio``. 2 requires positions.
        cache_scale: The per-tensor scale of ``fp8`` caches, one fp32 number, 1 if None; stored values are
            latent / cache_scale.
            A tensor on the cache's device costs nothing more; a Python number is copied there at each call.
        nonfinite: "propagate": a group that holds NaN or infinity reads back as NaN. "sanitize": NaN is stored as 0 and
            infinity as the largest finite value.
        backend: The backend that must run the call; None leaves it to ``use_backend``, ``MXKV_BACKEND``, the device.

    Raises:
        TypeError: A dtype that the operation does not take.
        ValueError: Shapes, strides or devices that do not fit, an unknown or ambiguous format, unknown names, or a
            forced backend that cannot run the call. Nothing has been written.
    """
    if format is not None and not isinstance(format, str):
        format = get_format(format).spec
    plain = positions is None and cos_sin is None and cache_scale is None and compress_ratio == 1
    try:
        if plain and nonfinite == "propagate" and backend is None:
            store_op(cache, latent, slots, format)  # fewer arguments take less time: 0.5 us of a call's 4.5
        else:
            scale = _scale_tensor(cache_scale, cache)
            store_op(cache, latent, slots, format, positions, cos_sin, compress_ratio, scale, nonfinite, backend)
    except (RuntimeError, AttributeError):
        check_types(
            cache=(cache, torch.Tensor), latent=(latent, torch.Tensor), slots=(slots, torch.Tensor),
            positions=(positions, _TENSOR), cos_sin=(cos_sin, _TENSOR), compress_ratio=(compress_ratio, int),
            nonfinite=(nonfinite, str), backend=(backend, _STRING),
        )  # fmt: skip
        raise


def load(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    format: str | Format | None = None,
    latent_dim: int | None = None,
    dtype: torch.dtype | None = None,
    cache_scale: torch.Tensor | float | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Gather rows from a paged cache and dequantize them.

    Args:
        cache: As in :func:`store`.
        slots: ``[n]`` int32 or int64, of any stride. A negative slot, and one past the end, gives a row of zeros.
        format: A format's name or a format; inferred from the cache's dtype and width if None.
            Of formats of the same width the one whose scales stand at the end of a page is taken: inline ones have to
            be named.
        latent_dim: Values of a row; taken from the cache's width (or ``out``) if None.
        dtype: bf16 (the default), fp16 or fp32; finite values saturate at its largest.
        cache_scale: The per-tensor scale of ``fp8`` caches, 1 if None.
        out: ``[n, latent_dim]`` of any row stride to write into; its dtype is the rows' dtype. It shares no memory with
            the cache.
        backend: As in :func:`store`.

    Returns:
        ``[n, latent_dim]``; ``out`` where it was given.

    Raises:
        TypeError: A dtype that the operation does not take, or a ``dtype`` that is not ``out``'s.
        ValueError: As in :func:`store`.
    """
    try:
        return _load(cache, slots, format, latent_dim, dtype, cache_scale, out, backend)
    except (RuntimeError, AttributeError):
        check_types(
            cache=(cache, torch.Tensor), slots=(slots, torch.Tensor), out=(out, _TENSOR),
            latent_dim=(latent_dim, (int, type(None))), dtype=(dtype, (torch.dtype, type(None))),
            backend=(backend, _STRING),
        )  # fmt: skip
        raise


def _load(
    cache: torch.Tensor,
    slots: torch.Tensor,
    format: str | Format | None,
    latent_dim: int | None,
    dtype: torch.dtype | None,
    cache_scale: torch.Tensor | float | None,
    out: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    scale = _scale_tensor(cache_scale, cache)
    if out is None:
        rows: torch.Tensor = load_op(cache, slots, _spec_of(format), latent_dim, dtype, scale, backend)
        return rows
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"out must be of the dtype asked for: expected {dtype}, got {out.dtype}")
    if latent_dim is not None and (out.dim() != 2 or out.shape[1] != latent_dim):
        raise ValueError(f"out must be [slots, latent_dim] with latent_dim {latent_dim}, got shape {list(out.shape)}")
    load_out_op(cache, slots, out, _spec_of(format), scale, backend)
    return out


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    format: str | Format | None = None,
    cache_scale: torch.Tensor | float | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    value_dim: int | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention whose keys and values are the same rows of a paged cache, read straight from their packed bytes.

    Each query attends to rows of its own, which are selected in one of three ways. An index that is negative or out of
    range is skipped; no byte of a row that is not selected reaches a result.

    - ragged: ``indices`` [nnz] and ``indptr`` [queries + 1]: query i's are ``indices[indptr[i]:indptr[i + 1]]``.
    - dense: ``indices`` [queries, k].
    - pages: ``block_table`` [queries, max_blocks] and ``seq_lens`` [queries]: query i's are the first ``seq_lens[i]``
      slots of the blocks that its row of the table names.

    Args:
        q: ``[queries, heads, latent_dim]`` bf16 or fp16, 1 to 256 heads; any strides, but heads contiguous. Products
            take bf16 operands and sum in fp32; an fp16 query enters them exactly, as a sum of two bf16.
        cache: As in :func:`store`.
        indices: Slots, int32 or int64, of any strides.
        indptr: Where each query's slots begin, int32 or int64.
        block_table: Blocks, int32 or int64, of any strides.
        seq_lens: How many rows each query has, int32 or int64.
        format: A format's name or a format; inferred from the cache's dtype and width and ``latent_dim`` if None.
            Of formats of the same width the one whose scales stand at the end of a page is taken: inline ones have to
            be named.
        cache_scale: The per-tensor scale of ``fp8`` caches, 1 if None.
        scale: Factor of the logits; 1/√latent_dim if None.
        sink: ``[heads]`` fp32: a logit for each head that joins the softmax's denominator and has no value.
        value_dim: How many of a row's first values are summed up (at most ``latent_dim``, which None means).
        num_splits: How many programs share one query's rows; chosen from the shapes if None. Results of different
            numbers differ in rounding.
        return_lse: Also return the logarithm of the sum of exponentials.
        workspace: Memory for what the splits leave to be merged: contiguous, of any dtype, at least
            :func:`attend_workspace_bytes` long, aligned to 16 bytes; what it holds afterwards is unspecified.
        out: ``[queries, heads, value_dim]`` of q's dtype to write into; any strides, but heads contiguous.
        backend: As in :func:`store`.

    Returns:
        ``[queries, heads, value_dim]`` of q's dtype; ``out`` where it was given. A query with no row gives zeros. With
        ``return_lse`` also ``[queries, heads]`` fp32: natural logarithms, without the sink, −inf for a query with no
        row; :func:`merge_partials` merges such pairs.

    Raises:
        TypeError: A dtype that the operation does not take.
        ValueError: Shapes, strides or devices that do not fit, rows that are selected in no way or in two, an unknown
            or ambiguous format, a workspace that is too small, or a forced backend that cannot run the call. Nothing
            has been written.
    """
    try:
        _check_value_dim(value_dim, q)
        if out is None:
            out = torch.empty((*q.shape[:-1], value_dim or q.shape[-1]), dtype=q.dtype, device=q.device)
        elif value_dim is not None and (out.dim() != 3 or out.shape[2] != value_dim):
            raise ValueError(
                f"out must be [queries, heads, value_dim] with value_dim {value_dim}, got shape {list(out.shape)}"
            )
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
        attend_op(
            q, cache, out, indices, indptr, block_table, seq_lens, _spec_of(format), _scale_tensor(cache_scale, cache),
            scale, sink, num_splits, lse, workspace, backend,
        )  # fmt: skip
    except (RuntimeError, AttributeError, TypeError):
        check_types(
            q=(q, torch.Tensor), cache=(cache, torch.Tensor), indices=(indices, _TENSOR), indptr=(indptr, _TENSOR),
            block_table=(block_table, _TENSOR), seq_lens=(seq_lens, _TENSOR), scale=(scale, _NUMBER),
            sink=(sink, _TENSOR), value_dim=(value_dim, _INTEGER), num_splits=(num_splits, _INTEGER),
            workspace=(workspace, _TENSOR), out=(out, _TENSOR), backend=(backend, _STRING),
        )  # fmt: skip
        raise
    return out if lse is None else (out, lse)


def attend_workspace_bytes(
    q: torch.Tensor,
    cache: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    format: str | Format | None = None,
    cache_scale: torch.Tensor | float | None = None,
    sink: torch.Tensor | None = None,
    value_dim: int | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> int:
    """How many bytes of workspace a call of :func:`attend` with these arguments takes.

    It depends on shapes and on which arguments there are, not on their values: a call with a ``cache_scale``, a
    ``sink`` or ``return_lse`` may be launched in another configuration than one without. 0 where one pass is enough:
    such a call takes no memory but its result.

    Raises:
        TypeError, ValueError: As in :func:`attend`.
    """
    check_types(
        q=(q, torch.Tensor), cache=(cache, torch.Tensor), indices=(indices, _TENSOR), indptr=(indptr, _TENSOR),
        block_table=(block_table, _TENSOR), seq_lens=(seq_lens, _TENSOR), sink=(sink, _TENSOR),
        backend=(backend, _STRING),
    )  # fmt: skip
    value_dim = None if value_dim is None else whole("value_dim", value_dim)
    num_splits = None if num_splits is None else whole("num_splits", num_splits)
    _check_value_dim(value_dim, q)
    out = q.new_empty((*q.shape[:-1], value_dim or q.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if return_lse else None
    return library.attend_workspace_bytes(
        q, cache, out, indices, indptr, block_table, seq_lens, _spec_of(format), _scale_tensor(cache_scale, cache),
        sink, num_splits, lse, backend,
    )  # fmt: skip


def _check_value_dim(value_dim: int | None, q: torch.Tensor) -> None:
    if value_dim is not None and not 1 <= value_dim <= q.shape[-1]:
        raise ValueError(f"expected 1 <= value_dim <= latent_dim {q.shape[-1]}, got {value_dim}")


def merge_partials(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    sink: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merge attentions of the same queries over different rows: of other ranks, or other caches.

    Args:
        outs: ``[parts, queries, heads, value_dim]``, or a sequence of ``[queries, heads, value_dim]``: what
            :func:`attend` gave, without a sink.
        lses: ``[parts, queries, heads]``, or a sequence of ``[queries, heads]`` fp32. A part of −inf has no weight,
            whatever its out holds.
        sink: ``[heads]`` fp32, taken once.
        return_lse: Also return the logarithm of all parts' sum of exponentials, without the sink.

    Returns:
        ``[queries, heads, value_dim]`` in the dtype of ``outs``, computed in fp32; zeros where every part is empty.
        With ``return_lse`` also ``[queries, heads]`` fp32.

    Raises:
        TypeError: Parts of different dtypes, or of none that is floating-point; a sink that is no tensor.
        ValueError: Shapes that do not fit, or no part.
    """
    check_types(sink=(sink, _TENSOR))
    outs = outs if isinstance(outs, torch.Tensor) else _stacked("outs", outs)
    lses = lses if isinstance(lses, torch.Tensor) else _stacked("lses", lses)
    if outs.dim() != 4 or not outs.shape[0] or lses.shape != outs.shape[:3]:
        raise ValueError(
            "expected outs [parts, queries, heads, value_dim] and lses [parts, queries, heads] of at least one part, "
            f"got shapes {list(outs.shape)} and {list(lses.shape)}"
        )
    if not (outs.dtype.is_floating_point and lses.dtype.is_floating_point):
        raise TypeError(f"outs and lses must be of floating-point dtypes, got {outs.dtype} and {lses.dtype}")
    if sink is not None and sink.shape != outs.shape[2:3]:
        raise ValueError(f"sink must be [heads] = [{outs.shape[2]}], got shape {list(sink.shape)}")
    return numerics.merge_partials(outs, lses, sink, return_lse)


def _stacked(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not parts or any(not isinstance(part, torch.Tensor) for part in parts):
        raise (ValueError if not parts else TypeError)(f"{name} must hold at least one tensor, and tensors only")
    kinds = {(part.dtype, tuple(part.shape)) for part in parts}
    if len({dtype for dtype, _ in kinds}) > 1:
        raise TypeError(f"{name} must be of one dtype, got {', '.join(sorted(str(dtype) for dtype, _ in kinds))}")
    if len(kinds) > 1:
        raise ValueError(
            f"{name} must be of one shape, got {', '.join(sorted(str(list(shape)) for _, shape in kinds))}"
        )
    return torch.stack(tuple(parts))


def spec(
    operation: str,
    *,
    device: str | torch.device = "cpu",
    format: str | Format | KVFormat | None = None,
    latent_dim: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.Tensor | None = None,
    state_cache: torch.Tensor | None = None,
    **fields: Any,
) -> Any:
    """The description of a kind of call: what :func:`explain`, :func:`plan` and :func:`warmup` take.

    Args:
        operation: "store", "load", "attend", "compress_norm", "compress_store", "save_ring_rows", "store_kv", "load_kv"
            or "attend_kv".
        device: Where the tensors would be.
        format: A format's name, or a format; "mxfp4", or "turboquant-4bit-nc" for keys and values, if None.
        latent_dim: Values of a row. (Keys and values have ``head_dim=`` and ``heads=`` instead.)
        dtype: Of the rows, keys and values; of the queries for "attend" and "attend_kv".
        cache: A cache whose layout the calls have; pages of 64 slots, one after another, if None.
        state_cache: Rings whose layout the calls of compressions and of saving have; of 8 rows each, if None.
        **fields: Further fields of the operation's spec (:mod:`mxkv.contracts`), such as ``compress_ratio=2``.

    Returns:
        A :data:`mxkv.contracts.AnySpec`.

    Raises:
        TypeError: The operation's spec has no such field.
        ValueError: An unknown operation or format, a latent_dim that does not fit the format, or such a cache.
    """
    if operation in KV_SPECS:
        return kv_spec(operation, device=device, format=format, dtype=dtype, cache=cache, **fields)
    specs = {kind.operation: kind for kind in typing.get_args(contracts.Spec)}
    if operation not in specs:
        raise ValueError(f"unknown operation {operation!r}; known operations: {', '.join((*specs, *KV_SPECS))}")
    where = dispatch.resolve_device(device)
    if operation in ("compress_norm", "compress_store"):
        fields = {"compress_ratio": 2, **fields}
    rings = ring_layout_of(state_cache, fields.get("compress_ratio", 2))
    if operation in ("compress_norm", "save_ring_rows"):
        made: contracts.Spec = specs[operation](where, layout=rings, **fields)
        return made
    if operation == "compress_store":
        fields["ring_layout"] = rings
    fmt = get_format("mxfp4" if format is None else cast(Any, format))
    if cache is not None:
        fields["layout"] = layout_of(cache, fmt, latent_dim)
    layout = fields.pop("layout", None) or contiguous_layout(fmt, latent_dim, num_blocks=1024, block_size=64)
    if operation == "attend":
        fields = {"heads": 1, "value_dim": latent_dim, **fields}
    if operation == "compress_store":
        made = contracts.CompressStoreSpec(where, fmt, layout, **fields)
    else:
        made = specs[operation](where, fmt, latent_dim, dtype, layout, **fields)
    return made


def explain(operation: str, *, backend: str | None = None, **arguments: Any) -> dispatch.Explanation:
    """Who would run an operation, and why the other backends would not. Print it.

    Args:
        operation: One of those of :func:`spec`.
        backend: The backend to force, as in a call.
        **arguments: Those of :func:`spec`.

    Raises:
        TypeError, ValueError: As :func:`spec`; or an unknown backend.
    """
    return dispatch.explain_spec(spec(operation, **arguments), backend)


def _spec_of(format: str | Format | None) -> str | None:
    if format is None or isinstance(format, str):
        return format
    return get_format(format).spec


def _scale_tensor(cache_scale: torch.Tensor | float | None, cache: torch.Tensor) -> torch.Tensor | None:
    if cache_scale is None or isinstance(cache_scale, torch.Tensor):
        return cache_scale
    if isinstance(cache_scale, bool) or not isinstance(cache_scale, (int, float)):
        raise TypeError(f"cache_scale must be a number or a tensor of one, got {type(cache_scale).__name__}")
    return torch.full((), float(cache_scale), dtype=torch.float32, device=cache.device)
