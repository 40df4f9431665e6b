"""The Triton backend: CUDA from compute capability 8.0, ROCm, and the CPU under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import types
import typing
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.contracts import (
    OPERATIONS,
    ROPE_DIM,
    YES,
    AnySpec,
    AttendSpec,
    Backend,
    CompressSpec,
    CompressStoreSpec,
    KVSpec,
    SaveRingSpec,
    StoreSpec,
    Verdict,
)

_OLDEST_CAPABILITY = 80


def probe(device: torch.device) -> Verdict:
    if importlib.util.find_spec("triton") is None:
        return Verdict(("Triton is not installed",), "pip install 'triton>=3.6'")
    if settings.triton_interpret():
        return YES if device.type == "cpu" else Verdict((f"TRITON_INTERPRET=1 interprets on the CPU, not {device}",))
    if device.type != "cuda":
        return Verdict((f"Triton compiles for GPUs, not {device}",), "TRITON_INTERPRET=1 interprets its kernels there")
    if not torch.cuda.is_available():
        return Verdict(("torch finds no GPU here",))
    target = devices.describe(device).target
    if target.vendor == "nvidia" and target.capability < _OLDEST_CAPABILITY:
        return Verdict((f"Triton needs compute capability 8.0, {devices.describe(device).name} has less",))
    foreign = devices.foreign_target(device)
    return Verdict((foreign,)) if foreign else YES


def supports(spec: AnySpec) -> Verdict:
    if isinstance(spec, typing.get_args(KVSpec)):
        from mxkv.backends.triton_gpu import kv

        return kv.supports(spec)
    if isinstance(spec, AttendSpec):
        from mxkv.backends.triton_gpu import attention  # asked only where Triton is installed

        return attention.supports(spec)
    if isinstance(spec, StoreSpec) and spec.rotate and (spec.latent_dim - ROPE_DIM) % 2:
        return Verdict((f"it rotates pairs of even and odd elements, and latent_dim {spec.latent_dim} is odd",))
    return YES


def load() -> Any:
    from mxkv.backends.triton_gpu import attention, compression, kv, latents

    def of(spec: AnySpec) -> Any:
        """The module that has a call's kernel."""
        if isinstance(spec, CompressSpec | CompressStoreSpec | SaveRingSpec):
            return compression
        if isinstance(spec, typing.get_args(KVSpec)):
            return kv
        return attention if isinstance(spec, AttendSpec) else latents

    return types.SimpleNamespace(
        prepare=lambda spec: of(spec).prepare(spec),
        tunable=lambda spec: of(spec).tunable(spec),
        compile=lambda spec, config: of(spec).compile(spec, config),
    )


BACKEND = Backend(
    name="triton",
    priority=100,
    description="Triton kernels for CUDA and ROCm GPUs",
    probe=probe,
    supports=supports,
    load=load,
    operations=OPERATIONS,
)
