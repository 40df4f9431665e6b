"""Launch configurations: how many tokens a program takes, and with how many warps."""

from __future__ import annotations

import dataclasses

from mxkv.contracts import AttendSpec, Spec
from mxkv.devices import Target


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How a store or load kernel is launched.

    Attributes:
        block_tokens: Tokens of a program, a power of two.
        num_warps: Warps of a program, a power of two.
    """

    block_tokens: int
    num_warps: int


_MOST_TOKENS = 8  # narrow rows are mostly padding and RoPE: with more of them a program's registers spill


def default_config(spec: Spec, token_bucket: int, compute_units: int) -> LaunchConfig:
    """A configuration that is good without tuning.

    One warp takes several tokens, so that each thread has several independent loads under way; fewer, once that would
    leave compute units without work. More warps were no faster on an H200, since one warp needs no barrier.

    Args:
        spec: The call.
        token_bucket: Its tokens, rounded up to a power of two.
        compute_units: Of the device.
    """
    most = max(1, min(2048 // max(spec.latent_dim, 1), _MOST_TOKENS))
    block_tokens = 1
    while 2 * block_tokens <= most and token_bucket // (2 * block_tokens) >= 4 * compute_units:
        block_tokens *= 2
    return LaunchConfig(block_tokens, 1)


@dataclasses.dataclass(frozen=True)
class AttendConfig:
    """How an attention kernel is launched.

    Attributes:
        block_heads: Heads of a program, a power of two of at least 16.
        block_rows: Rows of a tile, a power of two of at least 16.
        programs_per_unit: How many programs a compute unit is to have: a query's rows are split where there are fewer.
        num_warps: Warps of a program, a power of two.
        num_stages: How deep the compiler pipelines plain rows: their slots take a stage for each tile that is under way.
        most_registers: Registers of a thread, so that more programs fit a multiprocessor; 0 leaves it to the compiler
            (and so do AMD's GPUs).
    """

    block_heads: int
    block_rows: int
    programs_per_unit: int
    num_warps: int
    num_stages: int
    most_registers: int = 0


_LEAST_TILES = 2  # of a split


def attend_default(spec: AttendSpec, target: Target, queries: int, rows: int) -> AttendConfig:
    """A configuration that is good without tuning.

    Args:
        spec: The call.
        target: Whose code runs.
        queries: Queries, rounded up to a power of two.
        rows: Rows of a query, likewise.
    """
    width = -(-spec.value_dim // 64) * 64
    block_heads = 16
    while block_heads < min(spec.heads, 64) and 2 * block_heads * width <= 1 << 15:
        block_heads *= 2
    num_warps = 8 if block_heads * width > 1 << 14 else 4
    num_stages = 2
    block_rows = 64
    while block_rows > 16 and not fits(spec, target, block_rows, num_stages):
        block_rows //= 2
    return AttendConfig(block_heads, block_rows, 2, num_warps, num_stages)


def fits(spec: AttendSpec, target: Target, block_rows: int, num_stages: int) -> bool:
    """Whether so many tiles of rows, as bf16, fit a program's shared memory beside what else it keeps there."""
    return block_rows * spec.latent_dim * 2 * num_stages + (24 << 10) <= target.shared_memory


def splits_of(config: AttendConfig, spec: AttendSpec, queries: int, rows: int, compute_units: int) -> int:
    """Into how many parts each query's rows are split: so that the device is full, and no part is small or empty."""
    programs = queries * -(-spec.heads // config.block_heads)
    tiles = -(-rows // config.block_rows)
    wanted = min(config.programs_per_unit * compute_units // programs, tiles // _LEAST_TILES)
    if wanted <= 1:
        return 1
    share = -(-tiles // wanted)
    return -(-tiles // share)
