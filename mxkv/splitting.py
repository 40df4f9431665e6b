"""Rows that several programs share: how many parts they make, and the memory for what those leave to be merged."""

from __future__ import annotations

import torch

from mxkv.contracts import MOST_SPLITS, AttendSpec

ALIGNMENT = 16  # bytes, of a workspace


def rows_of(spec: AttendSpec, queries: int, rows: torch.Tensor) -> tuple[int, int]:
    """What bounds the rows of a call, and how many a query has, as far as shapes say (ragged: on the average)."""
    if spec.selection == "ragged":
        return rows.shape[0], -(-rows.shape[0] // queries)
    length = rows.shape[1] * (spec.layout.block_size if spec.selection == "pages" else 1)
    return length, length


def parts_of(tiles: int, wanted: int) -> int:
    """Into how many parts of the same length tiles are split: at most as many as wanted, and none is empty."""
    if wanted <= 1:
        return 1
    share = -(-tiles // wanted)
    return min(-(-tiles // share), MOST_SPLITS)


def partial_numbers(queries: int, heads: int, splits: int, width: int) -> int:
    """How many fp32 numbers the parts leave: sums [queries, heads, splits, width] and a logarithm for each."""
    return 0 if splits == 1 else queries * heads * splits * (width + 1)


def partials(count: int, workspace: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Memory for so many fp32 numbers: the caller's, or new.

    Raises:
        ValueError: The caller's is too small, or stands at an address that is not aligned.
    """
    if workspace is None:
        return torch.empty(count, dtype=torch.float32, device=device)
    if workspace.nbytes < 4 * count or workspace.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"expected a workspace of at least {4 * count} bytes, aligned to {ALIGNMENT}; "
            f"got {workspace.nbytes} bytes at {workspace.data_ptr():#x}"
        )
    return workspace.reshape(-1).view(torch.uint8)[: 4 * count].view(torch.float32)
