"""The shared memory of a block of the attention kernel, and how its threads share a tile's logits."""

from __future__ import annotations

import dataclasses

VECTOR = 4  # fp32 of an access
WARP = 32
_BANKS = 128  # bytes that are read at a time


def _apart(size: int, step: int) -> int:
    """The least number from a size on that is a step behind a multiple of what all banks have."""
    return size + (step - size) % _BANKS


@dataclasses.dataclass(frozen=True)
class Shared:
    """A block's shared memory: where its parts start, in bytes; and how its threads share the logits of a tile.

    Attributes:
        dim: Values of a row.
        threads, block_heads, block_rows: Of a block.
        most_heads: Heads of which a thread sums logits, at most.
        value_bytes: Of a value of a tile's row: 2 (bf16) or 4 (fp32). Queries are fp32.
        apart: Whether keys and values are different rows.
        table: fp32 numbers that a block keeps beside them.
    """

    dim: int
    threads: int
    block_heads: int
    block_rows: int
    most_heads: int
    value_bytes: int = 4
    apart: bool = False
    table: int = 0

    @property
    def tile_heads(self) -> int:
        """Heads of which a thread sums logits."""
        return min(self.block_heads, self.most_heads)

    @property
    def tile_rows(self) -> int:
        """Rows of which it does."""
        return min(self.block_rows, 4)

    @property
    def tile_threads(self) -> int:
        """How many threads have one part of the dims of all logits."""
        return self.block_heads * self.block_rows // (self.tile_heads * self.tile_rows)

    @property
    def parts(self) -> int:
        """Into how many parts the dims of a logit are split."""
        return self.threads // self.tile_threads

    @property
    def warp_parts(self) -> int:
        """How many of these the lanes of one warp have, which add them up among themselves."""
        return max(min(self.threads, WARP) // self.tile_threads, 1)

    @property
    def partials(self) -> int:
        """How many sums of a logit are left then."""
        return self.parts // self.warp_parts

    @property
    def each(self) -> int:
        """Logits of which a thread makes weights: of one head."""
        return max(self.block_heads * self.block_rows // self.threads, 1)

    @property
    def vector(self) -> int:
        """Values of a row that a thread reads at a time."""
        return 16 // self.value_bytes

    @property
    def padded(self) -> int:
        return -(-self.dim // self.vector) * self.vector

    @property
    def query(self) -> int:
        """From one head's query to the next; neighbouring ones stand in different banks."""
        if self.value_bytes == 2:
            return _apart(4 * self.padded, 16)
        return 4 * (self.padded + VECTOR * (1 + self.padded // VECTOR % 2))

    @property
    def row(self) -> int:
        """From one row of a tile to the next. The rows that lanes read at a time stand in different banks; those of
        bf16 as far apart as they can, since lanes read neighbouring vectors of each."""
        if self.value_bytes == 2:
            return _apart(2 * self.padded, _BANKS // (self.block_rows // self.tile_rows))
        return self.query

    @property
    def keys(self) -> int:
        return self.block_heads * self.query

    @property
    def values(self) -> int:
        return self.keys + self.apart * self.block_rows * self.row

    @property
    def partial(self) -> int:
        """Logits [partials, HEADS, ROWS], not yet added up; then, in the place of the first of them, weights."""
        return self.values + self.block_rows * self.row

    @property
    def factors(self) -> int:
        """What the sums so far are multiplied by [HEADS]."""
        return self.partial + 4 * self.partials * self.block_heads * self.block_rows

    @property
    def places(self) -> int:
        """Where the rows of three tiles stand, by turns: values and scales [3, ROWS, 2] int64."""
        return -(-(self.factors + 4 * self.block_heads) // 16) * 16

    @property
    def bounds(self) -> int:
        """How many rows the split's end is behind the query's first, where that one stands, and the row of the table
        that names them: int64, which are seldom read."""
        return self.places + 3 * 16 * self.block_rows

    @property
    def tables(self) -> int:
        return self.bounds + 32

    @property
    def bytes(self) -> int:
        return self.tables + 4 * self.table


def latent_shared(dim: int, threads: int, block_heads: int, block_rows: int, tile_heads: int) -> Shared:
    """A block's whose rows are latent ones: what they hold is bf16."""
    return Shared(dim, threads, block_heads, block_rows, tile_heads, value_bytes=2)
