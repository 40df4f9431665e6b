"""The torch eager backend: runs everything everywhere."""

from __future__ import annotations

import types
import typing
from typing import Any

import torch

from mxkv.contracts import (
    OPERATIONS,
    YES,
    AnySpec,
    AttendSpec,
    Backend,
    CompressSpec,
    CompressStoreSpec,
    KVSpec,
    SaveRingSpec,
    Verdict,
)


def probe(device: torch.device) -> Verdict:
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        return YES
    return Verdict((f"torch has no usable {device.type} device here",))


def supports(spec: AnySpec) -> Verdict:
    return YES


def load() -> Any:
    from mxkv.backends.torch_eager import attention, compression, kv, latents

    def of(spec: AnySpec) -> Any:
        """The module that has a call's code."""
        if isinstance(spec, CompressSpec | CompressStoreSpec | SaveRingSpec):
            return compression
        if isinstance(spec, typing.get_args(KVSpec)):
            return kv
        return attention if isinstance(spec, AttendSpec) else latents

    return types.SimpleNamespace(
        store=latents.store,
        load=latents.load,
        attend=attention.attend,
        compress_norm=compression.compress_norm,
        compress_store=compression.compress_store,
        save_ring_rows=compression.save_ring_rows,
        store_kv=kv.store_kv,
        load_kv=kv.load_kv,
        attend_kv=kv.attend_kv,
        prepare=lambda spec: of(spec).prepare(spec),
        tunable=lambda spec: of(spec).tunable(spec),
    )


BACKEND = Backend(
    name="torch",
    priority=0,
    description="plain torch, the reference that the others are compared with",
    probe=probe,
    supports=supports,
    load=load,
    operations=OPERATIONS,
    slower=True,
)
