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
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    backend: str | None = None
    target: str | None = None


@functools.cache
def current() -> Settings:
    """The settings, read once; unknown ``MXKV_*`` names are warned of."""
    unknown = sorted(name for name in os.environ if name.startswith("MXKV_") and name not in VARIABLES)
    if unknown:
        logger.warning("unknown settings %s; known: %s", ", ".join(unknown), ", ".join(VARIABLES))
    return Settings(backend=os.environ.get("MXKV_BACKEND") or None, target=os.environ.get("MXKV_TARGET") or None)


def reload() -> None:
    """Read the environment again at the next use, and forget plans made under the old settings (for tests)."""
    from mxkv import devices, dispatch, library

    current.cache_clear()
    triton_interpret.cache_clear()
    devices.target_of.cache_clear()
    dispatch.forget_plans()
    library.forget_plans()


@functools.cache
def triton_interpret() -> bool:
    """Whether Triton interprets its kernels on the CPU (its own variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
