"""Launch configurations: how many tokens a program takes, and with how many warps."""

from __future__ import annotations

import dataclasses

from mxkv.contracts import Spec


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
    return max(1, min(2048 // max(spec.latent_dim, 1), _MOST_TOKENS))


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
