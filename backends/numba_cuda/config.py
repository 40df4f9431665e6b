"""Launch configurations: how many threads a block has."""

from __future__ import annotations

import dataclasses

SIMULATED_THREADS = 4  # the simulator runs a Python thread for each


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How a store or load kernel is launched.

    Attributes:
        threads: Of a block, at most; a power of two.
    """

    threads: int

    def block(self, lines: int) -> tuple[int, int]:
        """A block's threads: lines of a row, and rows."""
        width = min(lines, self.threads)
        return width, max(1, self.threads // width)


CONFIGURATIONS = tuple(LaunchConfig(threads) for threads in (256, 128, 512, 64))
