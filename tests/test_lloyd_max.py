"""The centroids: found again, and what defines them."""

from __future__ import annotations

import itertools
import math

import pytest

from mxkv import lloyd_max


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_table_is_found_again(bits: int) -> None:
    solved = lloyd_max.solve(bits)
    assert len(solved) == 1 << bits
    assert list(solved) == sorted(solved)
    for dim in (16, 32, 80, 128, 256):
        for got, want in zip(lloyd_max.centroids(dim, bits), solved, strict=True):
            assert abs(got - want / math.sqrt(dim)) < 1e-7


@pytest.mark.parametrize("bits", [3, 4])
def test_each_centroid_is_the_mean_of_its_cell(bits: int) -> None:
    """By numerical integration, which the solver does not use."""
    table = lloyd_max.solve(bits)
    edges = [-9.0, *((a + b) / 2 for a, b in itertools.pairwise(table)), 9.0]
    for centroid, low, high in zip(table, edges, edges[1:], strict=False):
        steps = 20_000
        xs = [low + (high - low) * (i + 0.5) / steps for i in range(steps)]
        weights = [math.exp(-x * x / 2) for x in xs]
        mean = math.fsum(x * w for x, w in zip(xs, weights, strict=True)) / math.fsum(weights)
        assert abs(mean - centroid) < 1e-7


def test_one_bit_is_known() -> None:
    assert abs(lloyd_max.solve(1)[1] - math.sqrt(2 / math.pi)) < 1e-12


def test_midpoints_are_rounded_once() -> None:
    table = lloyd_max.centroids(128, 4)
    assert table == tuple(-c for c in reversed(table))
    middle = lloyd_max.midpoints(table)
    assert middle[7] == 0
    assert all(a < m < b for a, m, b in zip(table, middle, table[1:], strict=False))
