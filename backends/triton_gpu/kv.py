"""Launches the kernels on pages of keys and values. Nothing here synchronises, so a CUDA graph can capture it.

What a kind of call decides once is kept with its plan; a call adds what depends on its tensors' addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from mxkv import devices, lloyd_max
from mxkv.backends.triton_gpu.attend import Heads
from mxkv.backends.triton_gpu.codec import Paths, paths_of
from mxkv.backends.triton_gpu.kv_codec import KVTask
from mxkv.backends.triton_gpu.kv_store import load_kv_kernel, store_kv_kernel
from mxkv.contracts import YES, AttendKVSpec, KVSpec, LoadKVSpec, StoreKVSpec, Verdict
from mxkv.kv_formats import hadamard_block

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_WIDEST_ACCESS = 16
_MOST_DIM = 512
_WIDEST_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """How a store or load of keys and values is launched.

    Attributes:
        block_rows: Rows (of one head of one token) of a program, a power of two.
        num_warps: Warps of a program, a power of two.
    """

    block_rows: int
    num_warps: int


def supports(spec: KVSpec) -> Verdict:
    """Whether the kernels take a call."""
    reasons = []
    if spec.head_dim > _MOST_DIM:
        reasons.append(f"its heads have at most {_MOST_DIM} elements, got head_dim {spec.head_dim}")
    elif spec.format.normed and hadamard_block(spec.head_dim) > _WIDEST_BLOCK:
        reasons.append(f"it rotates at most {_WIDEST_BLOCK} elements at a time, got head_dim {spec.head_dim}")
    return Verdict(tuple(reasons), "backend='torch' runs every call") if reasons else YES


def rows_default(spec: StoreKVSpec | LoadKVSpec, warp_size: int, interpreted: bool) -> KVConfig:
    """One warp, a thread for each row or part of one. The interpreter's time goes by programs: it gets few."""
    parts = max(1, hadamard_block(spec.head_dim) // 128)
    return KVConfig(128 if interpreted else max(16, warp_size // parts), 1)


class RowsLaunch:
    """Stores or loads keys and values. See :func:`mxkv.store_kv` and :func:`mxkv.load_kv`.

    Args:
        spec: The call.
        paths: The instructions to use, instead of the target's; each choice gives the same bytes.
    """

    def __init__(self, spec: StoreKVSpec | LoadKVSpec, paths: Paths | None = None) -> None:
        self.spec = spec
        self.target = devices.target_of(spec.device)
        self.paths = paths or paths_of(self.target)
        self.config = rows_default(spec, self.target.warp_size, self.paths.interpreted)
        self.tasks: dict[int, KVTask] = {}
        self.guard = device_guard(spec.device)

    def __call__(self, *tensors: Any, config: KVConfig | None = None) -> None:
        if isinstance(self.spec, StoreKVSpec):
            kv_cache, key, value, slots, centroids, rotation = tensors
        else:
            kv_cache, slots, key, value, centroids, rotation = tensors
        if not self.spec.layout.num_slots:
            if isinstance(self.spec, LoadKVSpec):
                key.zero_()
                value.zero_()
            return
        config = config or self.config
        tokens = slots.shape[0]
        kernel: Any = store_kv_kernel if isinstance(self.spec, StoreKVSpec) else load_kv_kernel
        programs = 2 * -(-tokens * self.spec.layout.heads // config.block_rows)
        with self.guard():
            kernel[(programs,)](
                kv_cache, Heads(key, key.stride(0), key.stride(1)), Heads(value, value.stride(0), value.stride(1)),
                slots, centroids, rotation, tokens, self.spec.layout.num_slots, self.spec.layout.block_stride,
                slots.stride(0), self.task(kv_cache.data_ptr()), config.block_rows,
                num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip

    def task(self, address: int) -> KVTask:
        """The kernels' constants for a cache at an address."""
        alignment = math.gcd(_WIDEST_ACCESS, address)
        found = self.tasks.get(alignment)
        if found is None:
            found = self.tasks[alignment] = kv_task(self.spec, self.paths, alignment)
        return found


def device_guard(device: torch.device) -> Callable[[], Any]:
    """What makes a device the current one while a kernel is launched."""
    import contextlib

    if device.type == "cpu":
        return contextlib.nullcontext

    def guard() -> Any:
        current = device.index == torch.cuda.current_device()
        return contextlib.nullcontext() if current else torch.cuda.device(device.index)

    return guard


def kv_task(spec: KVSpec, paths: Paths, address: int) -> KVTask:
    """A kernel's constants.

    Args:
        spec: The call.
        paths: The target's instructions (:func:`paths_of`).
        address: Of the cache, or its last four bits.
    """
    layout, dim = spec.layout, spec.head_dim
    table: tuple[float, ...] = ()
    if spec.format.normed and not spec.tabled:
        table = lloyd_max.centroids(dim, spec.format.key.bits)
    return KVTask(
        key_bits=spec.format.key.bits,
        value_bits=spec.format.value_bits,
        corrected=spec.format.norm_correction,
        dim=dim,
        heads=layout.heads,
        block=hadamard_block(dim),
        dtype=_DTYPES[spec.dtype],
        dtype_max=torch.finfo(spec.dtype).max,
        table=table,
        rotated=spec.rotated,
        sanitize=isinstance(spec, StoreKVSpec) and spec.nonfinite == "sanitize",
        block_size=layout.block_size,
        token_bytes=layout.token_bytes,
        head_bytes=layout.head_bytes,
        key_bytes=layout.key_bytes,
        meta_offset=layout.meta_offset,
        fields=layout.fields,
        alignment=math.gcd(_WIDEST_ACCESS, address, layout.block_stride, layout.key_bytes, layout.value_bytes),
        narrow=layout.num_slots < 1 << 31,
        paths=paths,
    )


@functools.lru_cache(maxsize=1024)
def prepare(spec: KVSpec) -> Callable[..., None]:
    """What runs one kind of call."""
    assert not isinstance(spec, AttendKVSpec)
    return RowsLaunch(spec)
