"""Launch configurations: how many threads a block has."""

from __future__ import annotations

import dataclasses

from mxkv import settings
from mxkv.contracts import AttendSpec
from mxkv.devices import Target
from mxkv.splitting import parts_of

VECTOR = 4  # fp32 of an access to shared memory
WARP = 32
_BANKS = 128  # bytes of shared memory that are read at a time
SIMULATED_THREADS = 4  # the simulator runs a Python thread for each


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How a store or load kernel is launched.

    Attributes:
        threads: Of a block, at most; a power of two.
        width: Of these, those that take one row together, at most; a power of two. Fewer look up fewer slots.
    """

    threads: int
    width: int

    def block(self, lines: int) -> tuple[int, int]:
        """A block's threads: those of a row of so many lines, and rows."""
        width = min(lines, self.width)
        return width, max(1, self.threads // width)


def configurations() -> tuple[LaunchConfig, ...]:
    """Every configuration that is worth trying, the best guess first."""
    if settings.numba_simulated():
        return LaunchConfig(SIMULATED_THREADS, SIMULATED_THREADS), LaunchConfig(2, 1)
    return tuple(LaunchConfig(threads, width) for width in (16, 64, 32) for threads in (256, 128, 512))


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """How a compression kernel is launched.

    Attributes:
        threads: Of a token, a power of two of at most 32.
        tokens: Of a block.
    """

    threads: int
    tokens: int


def compress_configurations() -> tuple[CompressConfig, ...]:
    """Every configuration that is worth trying, the best guess first."""
    if settings.numba_simulated():
        return CompressConfig(2, 1), CompressConfig(1, 3)
    return tuple(CompressConfig(32, tokens) for tokens in (4, 2, 8))


@dataclasses.dataclass(frozen=True)
class AttendConfig:
    """How an attention kernel is launched.

    Attributes:
        threads: Of a block: a power of two, not fewer than block_heads, nor than block_heads * block_rows over what a
            thread has of them (:class:`Shared`).
        block_heads: Heads of a block, a power of two of at least 2.
        block_rows: Rows of a tile, a power of two, 2 to 32.
        blocks_per_unit: How many blocks a multiprocessor is to have: a query's rows are split where there are fewer.
        tile_heads: Heads of which a thread sums logits, at most: 4 or 8.
        ahead: Whether a thread reads its bytes of the next tile before it adds this one's values up.
        resident: How many blocks a multiprocessor is to hold at once: the compiler gives a thread no more registers
            than that allows.
    """

    threads: int
    block_heads: int
    block_rows: int
    blocks_per_unit: int
    tile_heads: int = 8
    ahead: bool = True
    resident: int = 1


MOST_SHARED = 99 << 10  # of compute capability 8.6; where there is more, two blocks are to fit
_LEAST_TILES = 2  # of a split
_RESERVED = 1 << 10  # of a block's shared memory, for the system
_SIMULATED = (AttendConfig(SIMULATED_THREADS, 4, 4, 1, 4), AttendConfig(2, 2, 4, 2, 4, False))


def attend_configurations(spec: AttendSpec, target: Target) -> tuple[AttendConfig, ...]:
    """Every configuration that is worth trying and fits a block's shared memory; the best guess comes first."""
    if settings.numba_simulated():
        return _SIMULATED
    heads = 2
    while heads < min(spec.heads, 16):
        heads *= 2
    few = max(heads // 2, 2)
    kinds = [
        # threads, block_heads, block_rows, tile_heads, ahead, resident
        (128, heads, 32, 8, True, 3),
        (128, heads, 32, 8, False, 3),
        (128, heads, 16, 8, True, 3),
        (128, heads, 16, 4, False, 4),
        (128, few, 32, 4, False, 4),
        (128, few, 16, 8, True, 3),
        (128, few, 8, 8, True, 3),
        (128, 4, 4, 4, False, 4),
        (128, 2, 2, 4, False, 4),
    ]
    if spec.heads >= 32:
        kinds.insert(3, (256, 32, 16, 4, False, 2))
    found = [
        AttendConfig(threads, block_heads, block_rows, blocks, tile_heads, ahead, resident)
        for threads, block_heads, block_rows, tile_heads, ahead, resident in kinds
        for blocks in (2 * resident, resident, 2)
    ]
    fitting = dict.fromkeys(config for config in found if fits(spec, target, config))
    return tuple(sorted(fitting, key=lambda config: _too_large(spec, target, config)))


def guess(
    found: tuple[AttendConfig, ...], spec: AttendSpec, queries: int, rows: int, compute_units: int
) -> AttendConfig:
    """The first configuration, with the splits that keep the multiprocessors busiest."""
    first = found[0]
    same = [config for config in found if dataclasses.replace(config, blocks_per_unit=first.blocks_per_unit) == first]

    def tiles_of(config: AttendConfig) -> float:
        """How long a multiprocessor is busy, in tiles. A block begins and ends in the time of one, and waits half of
        its time where no other block has something to do meanwhile."""
        splits = splits_of(config, spec, queries, rows, compute_units)
        blocks = queries * -(-spec.heads // config.block_heads) * splits
        held = min(config.resident, max(blocks / compute_units, 1))
        tiles = -(-rows // (config.block_rows * splits)) + 1
        return -(-blocks // compute_units) * tiles * (1 + 0.5 / held)

    return min(same, key=tiles_of)


def fits(spec: AttendSpec, target: Target, config: AttendConfig) -> bool:
    """Whether a block's shared memory holds its tiles."""
    return shared_of(spec, config).bytes <= max(min(target.shared_memory, MOST_SHARED), target.shared_memory // 2)


def _too_large(spec: AttendSpec, target: Target, config: AttendConfig) -> bool:
    """Whether tiles of 32 rows make blocks so large that a multiprocessor holds fewer than with 16."""
    smaller = dataclasses.replace(config, block_rows=16)
    return config.block_rows == 32 and not held(spec, target, config) and held(spec, target, smaller)


def held(spec: AttendSpec, target: Target, config: AttendConfig) -> bool:
    """Whether a multiprocessor has the shared memory for the blocks that it is to hold; each takes 1 KiB more."""
    return config.resident * (shared_of(spec, config).bytes + _RESERVED) <= target.shared_memory + _RESERVED


def shared_of(spec: AttendSpec, config: AttendConfig) -> Shared:
    """A block's shared memory."""
    return Shared(
        spec.latent_dim, config.threads, config.block_heads, config.block_rows, config.tile_heads, value_bytes=2
    )


def splits_of(config: AttendConfig, spec: AttendSpec, queries: int, rows: int, compute_units: int) -> int:
    """Into how many parts each query's rows are split: so that the device is full, and no part is small or empty."""
    blocks = queries * -(-spec.heads // config.block_heads)
    tiles = -(-rows // config.block_rows)
    wanted = min(config.blocks_per_unit * compute_units // blocks, tiles // _LEAST_TILES)
    return parts_of(tiles, wanted)


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
    def tables(self) -> int:
        return self.places + 3 * 16 * self.block_rows

    @property
    def bytes(self) -> int:
        return self.tables + 4 * self.table
