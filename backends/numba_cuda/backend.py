"""The Numba backend: NVIDIA GPUs that Triton does not run on, and the CPU under Numba's simulator."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.contracts import YES, AttendSpec, Backend, CompressSpec, CompressStoreSpec, SaveRingSpec, Spec, Verdict

_OLDEST_CAPABILITY = 50


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
    found = devices.describe(device)
    number = int(found.arch.removeprefix("sm_"))
    if number < _OLDEST_CAPABILITY:
        return Verdict((f"it needs compute capability 5.0, {found.name} has {number / 10}",))
    return YES


def supports(spec: Spec) -> Verdict:
    if isinstance(spec, AttendSpec):
        from mxkv.backends.numba_cuda import attention  # asked only where Numba is installed

        return attention.supports(spec)
    return YES


def load() -> Any:
    from mxkv.backends.numba_cuda import attention, compression, latents

    def of(spec: Spec) -> Any:
        """The module that has a call's kernel."""
        if isinstance(spec, CompressSpec | CompressStoreSpec | SaveRingSpec):
            return compression
        return attention if isinstance(spec, AttendSpec) else latents

    return types.SimpleNamespace(
        prepare=lambda spec: of(spec).prepare(spec),
        tunable=lambda spec: of(spec).tunable(spec),
        compile=lambda spec, config: of(spec).compile(spec, config),
    )


BACKEND = Backend(
    name="numba",
    priority=50,
    description="Numba kernels for NVIDIA GPUs that Triton does not run on",
    probe=probe,
    supports=supports,
    load=load,
    operations=frozenset({"store", "load", "attend", "compress_norm", "compress_store", "save_ring_rows"}),
    slower=True,
)
