"""The only reader of environment variables."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os

logger = logging.getLogger("mxkv")

VARIABLES = {
    "MXKV_BACKEND": "the backend that runs every call which names none",
    "MXKV_TARGET": "the target profile to take instead of the device's own",
    "MXKV_TUNE": "replay (use what was tuned), strict (a call that was not tuned raises) or off (defaults only)",
    "MXKV_TUNED": "a file of tuned configurations that comes before all others",
    "MXKV_CACHE_DIR": "the folder of tuned configurations, instead of the user's folder for caches",
    "MXKV_LOG_MISSES": "a file to which calls that were not tuned are appended",
}

POLICIES = ("replay", "strict", "off")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks for. Paths are absolute."""

    backend: str | None = None
    target: str | None = None
    tune: str = "replay"
    tuned: str | None = None
    cache_dir: str | None = None
    log_misses: str | None = None


@functools.cache
def current() -> Settings:
    """The settings, read once; unknown ``MXKV_*`` names are warned of.

    Raises:
        ValueError: A variable has a value that it cannot have.
    """
    unknown = sorted(name for name in os.environ if name.startswith("MXKV_") and name not in VARIABLES)
    if unknown:
        logger.warning("unknown settings %s; known: %s", ", ".join(unknown), ", ".join(VARIABLES))
    tune = os.environ.get("MXKV_TUNE") or "replay"
    if tune not in POLICIES:
        raise ValueError(f"MXKV_TUNE={tune!r} is no policy; expected one of {', '.join(POLICIES)}")
    return Settings(
        backend=os.environ.get("MXKV_BACKEND") or None,
        target=os.environ.get("MXKV_TARGET") or None,
        tune=tune,
        tuned=_path("MXKV_TUNED"),
        cache_dir=_path("MXKV_CACHE_DIR"),
        log_misses=_path("MXKV_LOG_MISSES"),
    )


def _path(name: str) -> str | None:
    value = os.environ.get(name)
    return os.path.abspath(os.path.expanduser(value)) if value else None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which of several processes this one is, as torchrun says.

    Attributes:
        rank: Its number among all.
        world_size: How many there are.
        local_rank: Its number among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks() -> Ranks:
    """What torchrun tells its processes; one process alone where it did not start them.

    Raises:
        ValueError: RANK, WORLD_SIZE or LOCAL_RANK is no number, or out of range.
    """
    found = Ranks(_number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0))
    if found.rank >= max(found.world_size, 1):
        raise ValueError(f"expected RANK below WORLD_SIZE, got RANK={found.rank} and WORLD_SIZE={found.world_size}")
    return found


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit()) or int(value) < (name == "WORLD_SIZE"):
        raise ValueError(f"{name}={value!r} is not what torchrun sets: expected a number of at least {default}")
    return int(value)


def reload() -> None:
    """Read the environment again at the next use, and forget plans made under the old settings (for tests)."""
    from mxkv import devices, dispatch, library
    from mxkv.autotune_cache import lookup

    current.cache_clear()
    triton_interpret.cache_clear()
    numba_simulated.cache_clear()
    devices.target_of.cache_clear()
    dispatch.forget_plans()
    library.forget_plans()
    lookup.resolver().reset()


@functools.cache
def triton_interpret() -> bool:
    """Whether Triton interprets its kernels on the CPU (its own variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def numba_simulated() -> bool:
    """Whether Numba simulates its CUDA kernels on the CPU (its own variable NUMBA_ENABLE_CUDASIM)."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
