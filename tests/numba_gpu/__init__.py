"""Tests of the Numba backend alone."""

from __future__ import annotations

import importlib.util

from mxkv import settings
from mxkv.backends.numba_cuda.backend import unfit_versions


def no_compiler() -> str:
    """Why Numba does not compile here; empty where it does."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    if settings.numba_simulated():
        return "the simulator has no compiler: run without it"
    return "; ".join(unfit_versions().reasons)
