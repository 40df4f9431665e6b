"""compress_norm, save_ring_rows and compress_store."""

from __future__ import annotations

import pytest

from tests.compression_cases import check, packed
from tests.support import Ops


@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
def test_chunks_of_every_kind(ops: Ops, capacity: int) -> None:
    chunks = [(0, 4), (5, 1), (3, 2), (7, 0), (4, 1), (1, 7), (10, 3), (9, 2 * capacity + 1)]
    check(ops, packed(chunks, capacity, seed=capacity, blocks=[3, 0, 1, 2, 7, 4, 6, 5]))
