"""From a kernel to PTX, once for every machine: compiled by Numba, kept in mxkv's folder of caches."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import threading
import types as pytypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxkv import settings

_lock = threading.Lock()


@functools.cache
def version() -> str:
    """What compiles, with its version."""
    if settings.numba_simulated():
        return "numba simulator"
    names = [name for name in ("numba-cuda", "numba") if _installed(name)]
    return " ".join(f"{name} {_installed(name)}" for name in names[:1])


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source() -> str:
    """A hash of everything that kernels are made of."""
    from mxkv import numerics

    files = sorted(Path(__file__).parent.glob("*.py")) + [Path(str(numerics.__file__))]
    text = hashlib.sha256()
    for file in files:
        text.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return text.hexdigest()[:16]


def compile_ptx(function: Callable[..., None], arguments: str, capability: tuple[int, int]) -> str:
    """A kernel as PTX.

    Args:
        function: The kernel.
        arguments: A letter for each of its arguments: "i" int64, "f" fp32.
        capability: The compute capability.
    """
    from numba import cuda, types

    kinds = {"i": types.int64, "f": types.float32}
    signature = types.void(*(kinds[letter] for letter in arguments))
    with _lock, _compiling_for(capability):
        ptx: str = cuda.compile_ptx(function, signature, cc=capability)[0]
    return ptx


class _compiling_for:
    """Device functions are compiled for what Numba takes for the current device: here, for a capability of ours.

    (It would ask the driver, make a context for the answer, and fail where there is no GPU.)
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.device = pytypes.SimpleNamespace(compute_capability=capability)

    def __enter__(self) -> None:
        from numba.cuda import dispatcher

        self.module: Any = dispatcher
        self.before = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: self.device

    def __exit__(self, *error: object) -> None:
        self.module.get_current_device = self.before
