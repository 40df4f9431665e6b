"""The Lloyd–Max quantizer of the normal distribution: the centroids of keys that are stored by direction.

A unit vector of D elements, rotated at random, has elements close to N(0, 1/D). That distribution is N(0, 1) scaled,
and so is its quantizer: one table of each width serves every D.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Mapping
from types import MappingProxyType

_CONVERGED = 1e-14  # the largest move of a centroid in one step; it is then off by less than 1e-11
_MOST_STEPS = 100_000

_UPPER: Mapping[int, tuple[float, ...]] = MappingProxyType({
    3: (0.245094178944, 0.756005281206, 1.343909278505, 2.151945704537),
    4: (0.128395029851, 0.38804829949, 0.656759118533, 0.942340456487, 1.256231197347, 1.618046386022,
        2.069017226532, 2.732589570995),
})  # fmt: skip
"""The positive centroids of N(0, 1) in order, by width in bits; :func:`solve` finds them again."""


def solve(bits: int) -> tuple[float, ...]:
    """The 2**bits centroids of N(0, 1), ascending: each the mean of what is nearer to it than to its neighbours.

    The mean of N(0, 1) between a and b is (φ(a) − φ(b)) / (Φ(b) − Φ(a)), φ its density and Φ its distribution. The
    table is symmetric: its upper half is solved for.
    """
    count = 1 << (bits - 1)
    upper = [3.0 * (i + 0.5) / count for i in range(count)]
    for _ in range(_MOST_STEPS):
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(upper)), math.inf]
        moved = [_mean(a, b) for a, b in itertools.pairwise(edges)]
        step = max(abs(a - b) for a, b in zip(upper, moved, strict=True))
        upper = moved
        if step < _CONVERGED:
            break
    return (*(-c for c in reversed(upper)), *upper)


def _mean(a: float, b: float) -> float:
    """The mean of N(0, 1) between 0 <= a < b. Of two tails, so that nothing cancels far out."""
    return (_density(a) - _density(b)) / (_tail(a) - _tail(b))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _tail(x: float) -> float:
    """The weight of N(0, 1) above x."""
    return math.erfc(x / math.sqrt(2)) / 2


@functools.lru_cache(maxsize=1024)
def centroids(dim: int, bits: int) -> tuple[float, ...]:
    """The 2**bits centroids of N(0, 1/dim), ascending, rounded to fp32."""
    upper = _UPPER[bits] if bits in _UPPER else solve(bits)[1 << (bits - 1) :]
    scaled = [round_to_fp32(c / math.sqrt(dim)) for c in upper]
    return (*(-c for c in reversed(scaled)), *scaled)


def midpoints(table: tuple[float, ...]) -> tuple[float, ...]:
    """The means of neighbouring centroids, rounded to fp32."""
    return tuple(round_to_fp32((a + b) / 2) for a, b in itertools.pairwise(table))


def round_to_fp32(x: float) -> float:
    """A number rounded to the nearest fp32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded
