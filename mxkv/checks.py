"""The arguments of an operation -> the spec of the call, or an error that says what was expected and what came.

Nothing here looks at a tensor's values, so nothing synchronises.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from mxkv.contracts import MOST_HEADS, MOST_SPLITS, NONFINITE, ROPE_DIM, AttendSpec, LoadSpec, StoreSpec
from mxkv.formats import Format, Scale, infer_format, parse_format
from mxkv.paging import layout_of

LATENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERY_DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def store_spec(
    cache: torch.Tensor,
    latent: torch.Tensor,
    slots: torch.Tensor,
    format: str | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    compress_ratio: int,
    cache_scale: torch.Tensor | None,
    nonfinite: str,
) -> StoreSpec:
    """Check the arguments of :func:`mxkv.store`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.store`.
    """
    _check_rows("latent", latent)
    latent_dim = int(latent.shape[1])
    _check_index("slots", slots)
    _check_same_device(cache, latent=latent, slots=slots, positions=positions, cos_sin=cos_sin, cache_scale=cache_scale)
    if positions is not None:
        _check_index("positions", positions)
    check_counts(latent, slots, positions)
    fmt = _format_of(cache, format, latent_dim)
    layout = layout_of(cache, fmt, latent_dim)
    _check_scale(fmt, cache_scale)
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {nonfinite!r}")
    if compress_ratio not in (1, 2):
        raise ValueError(f"compress_ratio must be 1 or 2, got {compress_ratio}")
    if compress_ratio != 1 and positions is None:
        raise ValueError(f"compress_ratio {compress_ratio} stores by position: expected positions, got None")
    if cos_sin is not None:
        if positions is None:
            raise ValueError("cos_sin is looked up by position: expected positions, got None")
        if latent_dim < ROPE_DIM:
            raise ValueError(
                f"RoPE rotates the last {ROPE_DIM} values: expected latent_dim >= {ROPE_DIM}, got {latent_dim}"
            )
        if cos_sin.dim() != 2 or cos_sin.shape[1] != ROPE_DIM:
            raise ValueError(
                f"cos_sin must be [max_pos, {ROPE_DIM}] ({ROPE_DIM // 2} cosines, then {ROPE_DIM // 2} sines), "
                f"got shape {list(cos_sin.shape)}"
            )
        if not cos_sin.dtype.is_floating_point:
            raise TypeError(f"cos_sin must be of a floating-point dtype, got {cos_sin.dtype}")
        _check_unit_stride("cos_sin", cos_sin)
    return StoreSpec(
        cache.device, fmt, latent_dim, latent.dtype, layout,
        positions is not None, cos_sin is not None, compress_ratio, cache_scale is not None, nonfinite,
    )  # fmt: skip


def load_spec(
    cache: torch.Tensor,
    slots: torch.Tensor,
    format: str | None,
    latent_dim: int | None,
    dtype: torch.dtype,
    cache_scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> LoadSpec:
    """Check the arguments of :func:`mxkv.load`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.load`.
    """
    _check_index("slots", slots)
    _check_same_device(cache, slots=slots, out=out, cache_scale=cache_scale)
    if dtype not in LATENT_DTYPES:
        raise TypeError(f"rows are loaded as {_names(LATENT_DTYPES)}, got {dtype}")
    if out is not None:
        _check_rows("out", out)
        if latent_dim not in (None, out.shape[1]):
            raise ValueError(
                f"out must be [slots, latent_dim] = [{slots.shape[0]}, {latent_dim}], got {list(out.shape)}"
            )
        if out.shape[0] != slots.shape[0]:
            raise ValueError(f"out must have a row for each of the {slots.shape[0]} slots, got shape {list(out.shape)}")
        if out.stride(0) < out.shape[1]:
            raise ValueError(
                f"the rows of out must not overlap, got shape {list(out.shape)}, strides {list(out.stride())}"
            )
        latent_dim = int(out.shape[1])
    fmt = _format_of(cache, format, latent_dim)
    if latent_dim is None:
        latent_dim = _dim_of(cache, fmt)
    layout = layout_of(cache, fmt, latent_dim)
    _check_scale(fmt, cache_scale)
    return LoadSpec(cache.device, fmt, latent_dim, dtype, layout, cache_scale is not None)


def attend_spec(
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
) -> AttendSpec:
    """Check the arguments of :func:`mxkv.attend`.

    Raises:
        TypeError, ValueError: See :func:`mxkv.attend`.
    """
    if q.dim() != 3:
        raise ValueError(f"q must be 3-D [queries, heads, latent_dim], got shape {list(q.shape)}")
    if q.dtype not in QUERY_DTYPES:
        raise TypeError(f"q must be {_names(QUERY_DTYPES)}, got {q.dtype}")
    heads, latent_dim = int(q.shape[1]), int(q.shape[2])
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"q must have 1 to {MOST_HEADS} heads, got shape {list(q.shape)}")
    _check_unit_stride("q", q)
    _check_same_device(
        cache, q=q, out=out, indices=indices, indptr=indptr, block_table=block_table, seq_lens=seq_lens,
        cache_scale=cache_scale, sink=sink, lse=lse, workspace=workspace,
    )  # fmt: skip
    selection = _check_selection(indices, indptr, block_table, seq_lens)
    check_queries(q, out, indices, indptr, block_table, seq_lens, lse)
    if out.dtype != q.dtype:
        raise TypeError(f"out must be of q's dtype: expected {q.dtype}, got {out.dtype}")
    value_dim = int(out.shape[2])
    if not 1 <= value_dim <= latent_dim:
        raise ValueError(f"expected 1 <= value_dim <= latent_dim {latent_dim}, got {value_dim}")
    _check_unit_stride("out", out)
    if not _apart(out):
        raise ValueError(f"the rows of out must not overlap, got shape {list(out.shape)}, strides {list(out.stride())}")
    if sink is not None:
        if sink.shape != (heads,):
            raise ValueError(f"sink must be [heads] = [{heads}], got shape {list(sink.shape)}")
        if sink.dtype != torch.float32:
            raise TypeError(f"sink must be torch.float32, got {sink.dtype}")
        if heads > 1 and sink.stride(0) != 1:
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
    if num_splits is not None and not 1 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"expected 1 <= num_splits <= {MOST_SPLITS}, got {num_splits}")
    fmt = _format_of(cache, format, latent_dim)
    layout = layout_of(cache, fmt, latent_dim)
    _check_scale(fmt, cache_scale)
    return AttendSpec(
        cache.device, fmt, latent_dim, q.dtype, layout, heads, value_dim, selection, cache_scale is not None,
        sink is not None, lse is not None,
    )  # fmt: skip


def check_queries(
    q: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """The checks of an attention that its memoised spec does not cover: how many queries there are."""
    queries = q.shape[0]
    if out.dim() != 3 or out.shape[0] != queries or out.shape[1] != q.shape[1]:
        raise ValueError(
            f"out must be [queries, heads, value_dim] with {queries} queries and {q.shape[1]} heads, "
            f"got shape {list(out.shape)}"
        )
    if lse is not None and (lse.dim() != 2 or lse.shape[0] != queries or lse.shape[1] != q.shape[1]):
        raise ValueError(f"lse must be [queries, heads] = [{queries}, {q.shape[1]}], got shape {list(lse.shape)}")
    if indptr is not None:
        if indptr.shape[0] != queries + 1:
            raise ValueError(f"indptr must be [queries + 1] = [{queries + 1}], got shape {list(indptr.shape)}")
        return
    for name, rows in (("indices", indices), ("block_table", block_table), ("seq_lens", seq_lens)):
        if rows is not None and rows.shape[0] != queries:
            raise ValueError(f"{name} must have a row for each of the {queries} queries, got shape {list(rows.shape)}")


def _check_selection(
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> str:
    """How rows are selected: one of :data:`mxkv.contracts.SELECTIONS`."""
    given = {"indices": indices, "indptr": indptr, "block_table": block_table, "seq_lens": seq_lens}
    names = [name for name, tensor in given.items() if tensor is not None]
    kinds = {("indices", "indptr"): "ragged", ("indices",): "dense", ("block_table", "seq_lens"): "pages"}
    found = kinds.get(tuple(names))
    if found is None:
        raise ValueError(
            "rows are selected by indices [nnz] with indptr [queries + 1], by indices [queries, k], or by block_table "
            f"[queries, max_blocks] with seq_lens [queries]; got {', '.join(names) or 'none of them'}"
        )
    dims = {"indices": 1 if found == "ragged" else 2, "indptr": 1, "block_table": 2, "seq_lens": 1}
    for name in names:
        tensor = given[name]
        assert tensor is not None
        if tensor.dim() != dims[name]:
            raise ValueError(f"{name} must be {dims[name]}-D here, got shape {list(tensor.shape)}")
        if tensor.dtype not in INDEX_DTYPES:
            raise TypeError(f"{name} must be {_names(INDEX_DTYPES)}, got {tensor.dtype}")
    return found


def _apart(out: torch.Tensor) -> bool:
    """Whether no two rows of [queries, heads, values] share an element."""
    dims = sorted(zip(out.stride()[:2], out.shape[:2], strict=True))
    reach = out.shape[2]
    for stride, size in dims:
        if size > 1 and stride < reach:
            return False
        reach += stride * (size - 1)
    return True


def check_counts(latent: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor | None) -> None:
    """The checks of a store that its memoised spec does not cover: how many tokens there are."""
    if slots.shape[0] > latent.shape[0]:
        raise ValueError(
            f"expected at most one slot for each of the {latent.shape[0]} latent rows, got {slots.shape[0]}"
        )
    if positions is not None and positions.shape[0] < slots.shape[0]:
        raise ValueError(f"expected a position for each of the {slots.shape[0]} slots, got {positions.shape[0]}")


def _format_of(cache: torch.Tensor, format: str | None, latent_dim: int | None) -> Format:
    if format is not None:
        return parse_format(format)
    if cache.dim() not in (2, 3):
        raise ValueError(
            "without format= the cache must be [num_blocks, block_size, record width] or [num_slots, record width], "
            f"got shape {list(cache.shape)}"
        )
    return infer_format(cache.dtype, cache.shape[-1], latent_dim, paged=cache.dim() == 3)[0]


def _dim_of(cache: torch.Tensor, format: Format) -> int:
    if format.only_dim is not None:
        return format.only_dim
    if cache.dtype != format.cache_dtype:
        raise TypeError(f"a {format.name} cache has dtype {format.cache_dtype}, got {cache.dtype}")
    dims = format.dims_of_width(cache.shape[-1]) if cache.dim() in (2, 3) else []
    if not dims:
        raise ValueError(
            f"no latent_dim has {format.name} records of the cache's width: expected a record width, "
            f"got shape {list(cache.shape)} (pass latent_dim= if the cache is a view of another shape)"
        )
    return dims[0]


def _check_rows(name: str, rows: torch.Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name} must be 2-D [tokens, latent_dim], got shape {list(rows.shape)}")
    if rows.dtype not in LATENT_DTYPES:
        raise TypeError(f"{name} must be {_names(LATENT_DTYPES)}, got {rows.dtype}")
    _check_unit_stride(name, rows)


def _check_unit_stride(name: str, rows: torch.Tensor) -> None:
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(
            f"the rows of {name} must be contiguous (last stride 1; any row stride), "
            f"got shape {list(rows.shape)}, strides {list(rows.stride())}"
        )


def _check_index(name: str, index: torch.Tensor) -> None:
    if index.dim() != 1:
        raise ValueError(f"{name} must be 1-D [tokens], got shape {list(index.shape)}")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be {_names(INDEX_DTYPES)}, got {index.dtype}")


def _check_scale(format: Format, cache_scale: torch.Tensor | None) -> None:
    if cache_scale is None:
        return
    if format.scale is not Scale.TENSOR:
        raise ValueError(f"cache_scale belongs to formats with one scale per tensor (fp8), got format {format.name!r}")
    if cache_scale.numel() != 1:
        raise ValueError(f"cache_scale must hold one number, got shape {list(cache_scale.shape)}")
    if cache_scale.dtype != torch.float32:
        raise TypeError(f"cache_scale must be torch.float32, got {cache_scale.dtype}")


def _check_same_device(cache: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != cache.device:
            raise ValueError(
                f"all tensors must be on the cache's device: expected {name} on {cache.device}, got {tensor.device}"
            )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d) for d in dtypes[:-1]) + f" or {dtypes[-1]}"


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A size as an int.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than ``least``.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be int, got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be int, got {value}")
    if least is not None and count < least:
        raise ValueError(f"expected {name} >= {least}, got {count}")
    return count


def check_types(**arguments: tuple[Any, Any]) -> None:
    """TypeError where an argument (given with its type) is of one that is not taken: asked after a call on a hot path
    has failed."""
    for name, (value, expected) in arguments.items():
        if not isinstance(value, expected) or isinstance(value, bool):
            kinds = expected if isinstance(expected, tuple) else (expected,)
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            shown = repr(value) if isinstance(value, (str, int, float)) else type(value).__name__
            raise TypeError(f"{name} must be {names}, got {shown}")
