"""The Numba backend: NVIDIA GPUs that Triton does not run on, and the CPU under Numba's simulator."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import types
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.contracts import YES, AnySpec, Backend, Verdict

_MODULES = {
    "store": "latents",
    "load": "latents",
    "attend": "attention",
    "compress_norm": "compression",
    "compress_store": "compression",
    "save_ring_rows": "compression",
    "store_kv": "kv",
    "load_kv": "kv",
    "attend_kv": "kv",
}
_OLDEST_CAPABILITY = 50
_NUMPY_WITHOUT, _NEEDS_ROW_STACK = (2, 5), (0, 30, 4)  # the first without numpy.row_stack; the last known to need it


@functools.cache
def unfit_versions() -> Verdict:
    """Whether the installed numba-cuda can compile beside the installed numpy; looks at versions, and imports nothing.

    numba-cuda's own requirements do not say so.
    """
    compiler, numpy = (installed(name) for name in ("numba-cuda", "numpy"))
    if compiler is None:
        return Verdict(("numba-cuda is not installed",), "pip install 'mxkv[numba]'")
    if numpy is not None and _numbers(numpy) >= _NUMPY_WITHOUT and _numbers(compiler) <= _NEEDS_ROW_STACK:
        reason = f"numba-cuda {compiler} needs numpy.row_stack, which numpy {numpy} does not have"
        return Verdict((reason,), "pip install 'numpy<2.5'")
    return YES


def installed(package: str) -> str | None:
    """An installed package's version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def probe(device: torch.device) -> Verdict:
    if importlib.util.find_spec("numba") is None:
        return Verdict(("Numba is not installed",), "pip install 'mxkv[numba]'")
    if settings.numba_simulated():
        if device.type == "cpu":
            return YES
        return Verdict((f"NUMBA_ENABLE_CUDASIM=1 simulates on the CPU, not on {device}",))
    if device.type != "cuda":
        return Verdict(
            (f"Numba compiles for GPUs, not {device}",), "NUMBA_ENABLE_CUDASIM=1 simulates its kernels there"
        )
    if torch.version.hip:
        return Verdict((f"it compiles for NVIDIA GPUs, and {device} is an AMD one",))
    if not torch.cuda.is_available():
        return Verdict(("torch finds no GPU here",))
    unfit = unfit_versions()
    if not unfit.ok:
        return unfit
    found = devices.describe(device)
    number = int(found.arch.removeprefix("sm_"))
    if number < _OLDEST_CAPABILITY:
        return Verdict((f"it needs compute capability 5.0, {found.name} has {number / 10}",))
    return YES


def supports(spec: AnySpec) -> Verdict:
    if spec.operation in ("attend", "attend_kv"):
        return _module_of(spec).supports(spec)  # asked only where Numba is installed
    return YES


def _module_of(spec: AnySpec) -> Any:
    """The module that has a call's kernel."""
    return importlib.import_module(f"{__package__}.{_MODULES[spec.operation]}")


def load() -> Any:
    return types.SimpleNamespace(
        prepare=lambda spec: _module_of(spec).prepare(spec),
        tunable=lambda spec: _module_of(spec).tunable(spec),
        compile=lambda spec, config: _module_of(spec).compile(spec, config),
    )


BACKEND = Backend(
    name="numba",
    priority=50,
    description="Numba kernels for NVIDIA GPUs that Triton does not run on",
    probe=probe,
    supports=supports,
    load=load,
    operations=frozenset(_MODULES),
    slower=True,
)
