"""Launch configurations: how many threads a block has."""

from __future__ import annotations

import dataclasses

from mxkv import settings
from mxkv.backends.numba_cuda.shared import Shared, latent_shared
from mxkv.contracts import AttendSpec
from mxkv.devices import Target
from mxkv.splitting import parts_of

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
    found = [
        AttendConfig(threads, block_heads, block_rows, blocks, tile_heads, ahead, resident)
        for threads, block_heads, block_rows, tile_heads, ahead, resident in kinds
        for blocks in (2 * resident, resident, 2, 3 * resident)
    ]
    fitting = dict.fromkeys(config for config in found if fits(spec, target, config))
    return tuple(sorted(fitting, key=lambda config: _too_large(spec, target, config)))


def guess(
    found: tuple[AttendConfig, ...], spec: AttendSpec, queries: int, rows: int, compute_units: int
) -> AttendConfig:
    """The first configuration, with the splits that keep the multiprocessors busiest."""
    first = found[0]
    same = [config for config in found if dataclasses.replace(config, blocks_per_unit=first.blocks_per_unit) == first]

    def tiles_of(config: AttendConfig) -> int:
        """How long a multiprocessor is busy, in tiles. A block begins and ends in the time of one tile. Blocks that are
        held together take the sum of their times, and that of one for the waits that the others do not hide."""
        splits = splits_of(config, spec, queries, rows, compute_units)
        blocks = queries * -(-spec.heads // config.block_heads) * splits
        tiles = -(-rows // (config.block_rows * splits)) + 1
        rounds, rest = divmod(-(-blocks // compute_units), config.resident)
        return tiles * (rounds * (config.resident + 1) + (rest + 1 if rest else 0))

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
    return latent_shared(spec.latent_dim, config.threads, config.block_heads, config.block_rows, config.tile_heads)


def splits_of(config: AttendConfig, spec: AttendSpec, queries: int, rows: int, compute_units: int) -> int:
    """Into how many parts each query's rows are split: so that the device is full, and no part is small or empty."""
    blocks = queries * -(-spec.heads // config.block_heads)
    tiles = -(-rows // config.block_rows)
    wanted = min(config.blocks_per_unit * compute_units // blocks, tiles // _LEAST_TILES)
    return parts_of(tiles, wanted)
