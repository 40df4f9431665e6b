"""Launches the compression kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton

from mxkv import devices, settings
from mxkv.autotune_cache.sources import source_hash
from mxkv.backends.triton_gpu.codec import Paths
from mxkv.backends.triton_gpu.compress import (
    CompressTask,
    Previous,
    Requests,
    Ring,
    Rows,
    Target,
    compress_kernel,
    save_kernel,
)
from mxkv.backends.triton_gpu.config import (
    CompressConfig,
    Compression,
    compress_configurations,
    compress_default,
)
from mxkv.backends.triton_gpu.launch import Launch
from mxkv.backends.triton_gpu.regions import Region
from mxkv.backends.triton_gpu.tasks import store_task
from mxkv.contracts import (
    COMPRESS_DIM,
    RING_DIM,
    ROPE_DIM,
    CompressSpec,
    CompressStoreSpec,
    Packed,
    SaveRingSpec,
    Tunable,
)
from mxkv.paging import PageLayout

_KERNELS = {"compress_norm": "compress_kernel", "compress_store": "compress_kernel", "save_ring_rows": "save_kernel"}
_WIDEST_ACCESS = 16
_WORD = 4
_ALL_REGISTERS = 255
_PAIRS = COMPRESS_DIM // 2
_ANY_COUNT = 2  # a count that is not specialized on
_LINE = 32  # pairs of a tile's line where no group says how many
_NOTHING = Rows(None, 0)
_NO_REQUESTS = Requests(None, 0, None, 0)
_NO_RING = Ring(None, 0, 0)
_NO_PREVIOUS = Previous(None, 0, 0, None, 0)
_NO_TARGET = Target(None, 0, 0, None, 0, None, 0, 0, None)


def _of_turned(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """The regions of a row that has been rotated: the groups that RoPE turns are among the others."""
    first, *others = (dataclasses.replace(region, rotated=COMPRESS_DIM) for region in regions)
    if others and (others[0].element, others[0].scale) == (first.element, first.scale):
        turned = others.pop(0)
        first = dataclasses.replace(first, groups=first.groups + turned.groups, size=first.size + turned.size)
    return first, *others


class _Compression(Launch):
    """What the launches have in common."""

    def __init__(self, spec: Compression, rings: PageLayout, ratio: int, previous: bool, paths: Paths | None) -> None:
        super().__init__(spec, tunable(spec), paths)
        self.rings = rings
        self.ratio = ratio
        self.previous = previous

    def options(self, config: CompressConfig) -> dict[str, Any]:
        """The compiler's options."""
        options: dict[str, Any] = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        if self.target.vendor == "nvidia" and config.most_registers < _ALL_REGISTERS:
            options["maxnreg"] = config.most_registers
        return options

    def ring(self, ring: torch.Tensor | None) -> Ring:
        if ring is None:
            return _NO_RING
        return Ring(ring, self.rings.block_stride, self.rings.num_slots)

    def task(self, aligned: bool, words_out: bool, cache_at: int) -> CompressTask:
        """The kernel's constants for tensors of which the alignment is given."""
        key = aligned, words_out, cache_at
        found = self.tasks.get(key)
        if found is None:
            spec, store, pairs, whole = self.spec, None, _LINE, False
            if isinstance(spec, CompressStoreSpec):
                store = store_task(spec.stored, self.paths, _WIDEST_ACCESS, cache_at, True, merge=False)
                wanted = store.regions[0].pairs
                whole = wanted & (wanted - 1) == 0 and wanted <= _PAIRS
                if whole:
                    pairs = wanted
                    store = dataclasses.replace(store, regions=_of_turned(store.regions))
            found = self.tasks[key] = CompressTask(
                self.ratio, self.rings.block_size, self.rings.value_stride, self.previous, _PAIRS // pairs, pairs,
                whole, aligned, words_out, store, self.paths,
            )  # fmt: skip
        return found

    def target_for_compiling(self, floats: torch.Tensor, index: torch.Tensor) -> Target:
        """The cache of contiguous tensors at aligned addresses: none."""
        return _NO_TARGET

    def compile(self, config: CompressConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        floats = torch.empty(1, dtype=torch.float32, device=self.spec.device)
        index = torch.empty(1, dtype=torch.int64, device=self.spec.device)
        halves, indices = floats.view(torch.bfloat16), Rows(index, 1)
        asked = not isinstance(self.spec, CompressStoreSpec) or self.spec.latents
        pooled = self.ratio == 2
        with self.guard():
            compress_kernel.warmup(
                Rows(floats, self.ratio * COMPRESS_DIM), indices, indices,
                Requests(index, 1, index, 1) if pooled else _NO_REQUESTS,
                self.ring(floats) if pooled else _NO_RING,
                Previous(floats, RING_DIM, _ANY_COUNT, index, 1) if self.previous else _NO_PREVIOUS,
                halves, Rows(halves, COMPRESS_DIM) if asked else _NOTHING, self.target_for_compiling(floats, index),
                1e-6, 1, 1, self.task(True, True, 0), config.block_tokens, grid=(1,), **self.options(config),
            )  # fmt: skip

    def launch(
        self, packed: Packed, out: torch.Tensor | None, target: Target, cache_at: int, config: CompressConfig | None
    ) -> None:
        tokens = packed.slots.shape[0]
        if config is None:
            config = self.choose(tokens)
        weight = packed.weight
        if weight.data_ptr() % _WORD:
            weight = weight.clone()  # it is read in words
        ring, requests, previous, num_requests = _NO_RING, _NO_REQUESTS, _NO_PREVIOUS, 0
        if self.ratio == 2:
            assert packed.query_start is not None
            assert packed.token_to_request is not None
            starts, of_token = packed.query_start, packed.token_to_request
            num_requests = starts.shape[0] - 1
            if not num_requests:
                return  # every token is padding
            requests = Requests(starts, starts.stride(0), of_token, of_token.stride(0))
            ring = self.ring(packed.ring)
            if packed.prev_rows is not None and packed.prev_row_indices is not None:
                rows, indices = packed.prev_rows, packed.prev_row_indices
                previous = Previous(rows, rows.stride(0), rows.shape[0], indices, indices.stride(0))
        addresses = (tensor.data_ptr() for tensor in (packed.rows, ring.ptr, previous.ptr) if tensor is not None)
        aligned = not any(address % _WIDEST_ACCESS for address in addresses)
        words_out = out is None or not (out.data_ptr() % _WORD or out.stride(0) % 2)
        row_stride = packed.rows.stride(0)
        with self.guard():
            compress_kernel[(-(-tokens // config.block_tokens),)](
                Rows(packed.rows, row_stride),
                Rows(packed.positions, packed.positions.stride(0)), Rows(packed.slots, packed.slots.stride(0)),
                requests, ring, previous, weight, _NOTHING if out is None else Rows(out, out.stride(0)), target,
                packed.eps, tokens, num_requests, self.task(aligned, words_out, cache_at), config.block_tokens,
                **self.options(config),
            )  # fmt: skip


class CompressLaunch(_Compression):
    """Pools, normalises, saves. See :func:`mxkv.compress_norm`."""

    def __init__(self, spec: CompressSpec, paths: Paths | None = None) -> None:
        super().__init__(spec, spec.layout, spec.compress_ratio, spec.previous, paths)

    def __call__(self, packed: Packed, out: torch.Tensor, config: CompressConfig | None = None) -> None:
        self.launch(packed, out, _NO_TARGET, 0, config)


class CompressStoreLaunch(_Compression):
    """Pools, normalises, stores, saves. See :func:`mxkv.compress_store`."""

    spec: CompressStoreSpec

    def __init__(self, spec: CompressStoreSpec, paths: Paths | None = None) -> None:
        super().__init__(spec, spec.ring_layout, spec.compress_ratio, spec.previous, paths)

    def __call__(
        self,
        packed: Packed,
        cache: torch.Tensor,
        cache_slots: torch.Tensor,
        cos_sin: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        out: torch.Tensor | None,
        config: CompressConfig | None = None,
    ) -> None:
        if self.as_bytes:
            cache = cache.view(torch.uint8)
        stride, positions = (0, 0) if cos_sin is None else (cos_sin.stride(0), cos_sin.shape[0])
        target = Target(
            cache,
            self.block_stride,
            self.num_slots,
            cache_slots,
            cache_slots.stride(0),
            cos_sin,
            stride,
            positions,
            cache_scale,
        )
        self.launch(packed, out, target, cache.data_ptr() % _WORD, config)

    def target_for_compiling(self, floats: torch.Tensor, index: torch.Tensor) -> Target:
        spec = self.spec
        cache = floats.view(torch.uint8 if self.as_bytes else spec.format.cache_dtype)
        table, stride, positions = (floats, ROPE_DIM, _ANY_COUNT) if spec.rotate else (None, 0, 0)
        return Target(
            cache,
            self.block_stride,
            self.num_slots,
            index,
            1,
            table,
            stride,
            positions,
            floats if spec.scaled else None,
        )


class SaveRingLaunch(_Compression):
    """Rows to ring slots. See :func:`mxkv.save_ring_rows`."""

    def __init__(self, spec: SaveRingSpec, paths: Paths | None = None) -> None:
        super().__init__(spec, spec.layout, 1, False, paths)

    def __call__(
        self, rows: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor, config: CompressConfig | None = None
    ) -> None:
        tokens = slots.shape[0]
        if not self.rings.num_slots:
            return
        if config is None:
            config = self.choose(tokens)
        aligned = not (rows.data_ptr() % _WIDEST_ACCESS or ring.data_ptr() % _WIDEST_ACCESS)
        with self.guard():
            save_kernel[(-(-tokens // config.block_tokens),)](
                Rows(rows, rows.stride(0)), Rows(slots, slots.stride(0)), self.ring(ring), tokens,
                self.task(aligned, True, 0), config.block_tokens, **self.options(config),
            )  # fmt: skip

    def compile(self, config: CompressConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        floats = torch.empty(1, dtype=torch.float32, device=self.spec.device)
        index = torch.empty(1, dtype=torch.int64, device=self.spec.device)
        with self.guard():
            save_kernel.warmup(
                Rows(floats, RING_DIM), Rows(index, 1), self.ring(floats), 1, self.task(True, True, 0),
                config.block_tokens, grid=(1,), **self.options(config),
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def prepare(spec: Compression) -> CompressLaunch | CompressStoreLaunch | SaveRingLaunch:
    """What runs one kind of call."""
    if isinstance(spec, CompressSpec):
        return CompressLaunch(spec)
    return CompressStoreLaunch(spec) if isinstance(spec, CompressStoreSpec) else SaveRingLaunch(spec)


def tunable(spec: Compression) -> Tunable:
    """The launch configurations of one kind of call."""
    compute_units, target = devices.describe(spec.device).compute_units, devices.target_of(spec.device)
    return Tunable(
        CompressConfig,
        compress_configurations(spec),
        functools.partial(compress_default, spec, target, compute_units=compute_units),
        target=target.name,
        source=source_hash(f"{__package__}.compress:{_KERNELS[spec.operation]}", within=(__package__,)),
        compiler=f"triton {triton.__version__}",
    )


def compile(spec: Compression, config: CompressConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    if not settings.triton_interpret():
        prepare(spec).compile(config)
