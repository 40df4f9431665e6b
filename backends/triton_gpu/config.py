"""Launch configurations: how many tokens a program takes, and with how many warps."""

from __future__ import annotations

import dataclasses

from mxkv.contracts import AttendSpec, CompressSpec, CompressStoreSpec, SaveRingSpec, Spec, StoreSpec
from mxkv.devices import Target
from mxkv.formats import Element
from mxkv.splitting import parts_of


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


def configurations(spec: Spec) -> tuple[LaunchConfig, ...]:
    """Every configuration that is worth trying: the default ones, and those of 8 to 128 elements for a thread."""
    return tuple(
        LaunchConfig(tokens, warps)
        for warps in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8, 16)
        if (warps == 1 and tokens <= _most_tokens(spec)) or 8 <= tokens * spec.latent_dim / (32 * warps) <= 128
    )


def _most_tokens(spec: Spec) -> int:
    """Tokens that one warp takes at most by default."""
    wide = isinstance(spec, StoreSpec) and spec.latent_dtype.itemsize > 2
    return max(1, min(2048 // max(spec.latent_dim, 1), _MOST_TOKENS // 2 if wide else _MOST_TOKENS))


def default_config(spec: Spec, token_bucket: int, compute_units: int) -> LaunchConfig:
    """A configuration that is good without tuning.

    One warp takes several tokens, so that each thread has several independent loads under way; fewer, once that would
    leave compute units without work. More warps were no faster on an H200, since one warp needs no barrier.

    Args:
        spec: The call.
        token_bucket: Its tokens, rounded up to a power of two.
        compute_units: Of the device.
    """
    most = _most_tokens(spec)
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
        num_stages: How deep the compiler pipelines plain rows: each tile under way takes one for its slots, one for it.
        block_dims: Values of a row that are taken at a time, a power of two of at least 64: products of few need fewer
            registers, and threads that share a row fewer addresses.
        most_registers: Registers of a thread, so that more programs fit a multiprocessor; 255 limits nothing (and so
            does any number on AMD).
    """

    block_heads: int
    block_rows: int
    programs_per_unit: int
    num_warps: int
    num_stages: int
    block_dims: int = 128
    most_registers: int = 255


_LEAST_TILES = 2  # of a split


def attend_default(spec: AttendSpec, target: Target, queries: int, rows: int) -> AttendConfig:
    """A configuration that is good without tuning.

    Args:
        spec: The call.
        target: Whose code runs.
        queries: Queries, rounded up to a power of two.
        rows: Rows of a query, likewise.
    """
    width = _padded(spec.value_dim)
    block_heads = 16
    while block_heads < min(spec.heads, 64) and 2 * block_heads * width <= 1 << 15:
        block_heads *= 2
    if target.vendor == "amd":
        return AttendConfig(block_heads, 16, 2, 4, 2)
    plain = spec.format.element is Element.BF16
    hopper = 90 <= target.capability < 100
    if not hopper and not (plain and target.capability >= 100):
        block_heads = min(block_heads, 32)  # with 64, products in registers run out of these
    num_warps = 8 if block_heads * width > 1 << 13 else 4
    programs, block_dims, stages = 2, 64, 3 if target.capability >= 100 else 5
    tail, fp8, grouped = spec.format.tail > 0, spec.format.element is Element.E4M3, spec.format.grouped
    if block_heads == 32:
        block_dims, stages = 128, 3
    elif block_heads == 64:  # one program fills a multiprocessor
        programs, block_dims = 1, 128 if hopper and (plain or tail) else 512  # a tail's chunks are narrow as it is
    elif hopper and fp8 and not grouped:
        block_dims = 128
    # Tiles of 64 rows spill a little with 64 heads, and were up to 20 % faster for all that. FP8 with scales has too
    # few registers: with 64 heads they were slower, and with 16 newer compilers than the measured one spill more.
    many_rows = hopper and block_heads != 32 and not tail and not (fp8 and grouped)
    tiles = ((64, 3), (32, stages), (32, 3), (32, 2), (16, 2)) if plain else ((64, 2), (32, 2), (16, 2))
    for block_rows, num_stages in tiles[not many_rows :]:
        config = AttendConfig(block_heads, block_rows, programs, num_warps, num_stages, block_dims)
        if fits(spec, target, config):
            return config
    return config


def attend_configurations(spec: AttendSpec, target: Target) -> tuple[AttendConfig, ...]:
    """Every configuration that is worth trying, the default ones among them."""
    width = _padded(spec.value_dim)
    plain = spec.format.element is Element.BF16
    heads = [heads for heads in (64, 32, 16) if heads < 2 * spec.heads and heads * width <= 1 << 15] or [16]
    # Programs per unit come first: those that differ in nothing else are one kernel, which is then compiled but once.
    found = [
        AttendConfig(block_heads, rows, programs[block_heads == 64], warps, num_stages, dims, registers)
        for programs in ((2, 1), (1, 2), (4, 4))
        for block_heads in heads[:2]
        for rows in (32, 64, 16)
        for warps in ((4, 8) if block_heads * width <= 1 << 14 else (8,))
        for dims in ((64, 128) if block_heads == 16 else (512, 128))
        for registers in ((255, 128) if block_heads * width <= 32 * 32 * warps else (255,))
        for num_stages in ((5, 3) if plain else (2,))
    ]
    default = attend_default(spec, target, 1, 1)
    return (default, *(config for config in found if config != default and fits(spec, target, config)))


def fits(spec: AttendSpec, target: Target, config: AttendConfig) -> bool:
    """Whether the tiles of rows and queries, as bf16, fit a program's shared memory beside what else it keeps there."""
    tiles = config.block_rows * (config.num_stages + 1) // 2 + config.block_heads
    return tiles * spec.latent_dim * 2 + (8 << 10) <= target.shared_memory


def _padded(dim: int) -> int:
    return -(-dim // 64) * 64


def splits_of(config: AttendConfig, spec: AttendSpec, queries: int, rows: int, compute_units: int) -> int:
    """Into how many parts each query's rows are split: so that the device is full, and no part is small or empty."""
    programs = queries * -(-spec.heads // config.block_heads)
    tiles = -(-rows // config.block_rows)
    wanted = min(config.programs_per_unit * compute_units // programs, tiles // _LEAST_TILES)
    return parts_of(tiles, wanted)


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """How a compression is launched.

    Attributes:
        block_tokens: Tokens that a program takes, one after another: a power of two, at most 32.
        most_registers: Registers of a thread, so that more programs fit a multiprocessor; 255 limits nothing (and so
            does any number on AMD).
        num_warps: Warps of a program. With one, a token's values need no exchange between warps; with more, few tokens
            take less time.
    """

    block_tokens: int
    most_registers: int = 255
    num_warps: int = 1


Compression = CompressSpec | CompressStoreSpec | SaveRingSpec
_MOST_PROGRAMS = 32  # of one warp, that a multiprocessor holds at once
_FEW_REGISTERS = 64  # so many let it hold them
_FEW_PROGRAMS = 4  # of four warps: half of what it holds then


def compress_default(spec: Compression, target: Target, tokens: int, compute_units: int) -> CompressConfig:
    """A configuration that is good without tuning.

    Pooling waits for memory several times: a limit of 64 registers lets a multiprocessor hold as many programs as it
    can, which on an H200 was as fast as what the compiler does with more, or faster. A program takes several tokens
    once there are enough for two rounds of such programs. Of few tokens, whose programs are all held at once with warps
    to spare, each takes less time with four warps: 64 tokens took 2.3 to 2.5 us rather than 2.6 to 2.7, and 4,096,
    which are too many, 19.4 rather than 17.6.

    Args:
        spec: The call.
        target: Whose code runs.
        tokens: Its tokens, rounded up to a power of two.
        compute_units: Of the device.
    """
    if isinstance(spec, SaveRingSpec) or spec.compress_ratio == 1:
        return CompressConfig(1)
    if target.vendor == "amd":  # whose compiler unrolls the loop over tokens, and has too few registers then
        return CompressConfig(1)
    if tokens <= _FEW_PROGRAMS * compute_units:
        return CompressConfig(1, _FEW_REGISTERS, 4)
    most, block_tokens = 8 if isinstance(spec, CompressStoreSpec) else 2, 1
    while 2 * block_tokens <= most and tokens // (2 * block_tokens) >= 2 * _MOST_PROGRAMS * compute_units:
        block_tokens *= 2
    return CompressConfig(block_tokens, _FEW_REGISTERS)


def compress_configurations(spec: Compression) -> tuple[CompressConfig, ...]:
    """Every configuration that is worth trying, the default ones among them: one, where rows are only copied."""
    if isinstance(spec, SaveRingSpec):
        return (CompressConfig(1),)
    one_warp = (CompressConfig(tokens, registers) for registers in (255, 64) for tokens in (1, 2, 4, 8))
    return *one_warp, CompressConfig(1, _FEW_REGISTERS, 2), CompressConfig(1, _FEW_REGISTERS, 4)
