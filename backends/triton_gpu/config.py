"""Launch configurations: how many tokens a program takes, and with how many warps."""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How a store or load kernel is launched.

    Attributes:
        block_tokens: Tokens of a program, a power of two.
        num_warps: Warps of a program, a power of two.
    """

    block_tokens: int
    num_warps: int


@functools.lru_cache(maxsize=4096)
def default_config(token_bucket: int, dim: int, compute_units: int) -> LaunchConfig:
    """A configuration that is good without tuning.

    A program takes several tokens, so that each thread has several independent loads under way; fewer, once that would
    leave compute units without work.

    Args:
        token_bucket: Tokens of the call, rounded up to a power of two.
        dim: Values of a row.
        compute_units: Of the device.
    """
    most = max(1, 4096 // max(dim, 1))
    block_tokens = 1
    while block_tokens < min(most, 8) and token_bucket // (2 * block_tokens) >= 4 * compute_units:
        block_tokens *= 2
    return LaunchConfig(block_tokens, 1 if block_tokens * dim <= 1024 else 2)


def token_bucket(tokens: int) -> int:
    """Tokens rounded up to a power of two."""
    return 1 << (tokens - 1).bit_length()
