"""Launches the compression kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mxkv import devices
from mxkv.backends.numba_cuda import compiler
from mxkv.backends.numba_cuda.compress import LANES, CompressTask, norm_kernel, save_kernel, scatter_kernel
from mxkv.backends.numba_cuda.config import CompressConfig, compress_configurations
from mxkv.backends.numba_cuda.launch import Launch, address, kernel_of
from mxkv.backends.numba_cuda.tasks import WIDEST
from mxkv.contracts import CompressSpec, Packed, SaveRingSpec, Tunable

NORM_ARGUMENTS, SAVE_ARGUMENTS, SCATTER_ARGUMENTS = "2222235i2fii", "22223ii", "223i"
_NO_PREVIOUS = (0, 0, 0, 0, 0)
_FLOAT = 4


class _Compression(Launch):
    """What the launches have in common."""

    spec: CompressSpec | SaveRingSpec

    def __init__(self, spec: CompressSpec | SaveRingSpec) -> None:
        super().__init__(spec, tunable(spec))
        self.ring_stride = spec.layout.block_stride * _FLOAT

    def ring(self, ring: torch.Tensor | None) -> tuple[int, int, int]:
        """The rings' address, the stride of their blocks and how many slots they have."""
        return address(ring), self.ring_stride, self.num_slots

    def task(self, config: CompressConfig, aligned: bool, *sizes: int) -> CompressTask:
        """The kernels' constants; ``sizes`` are the bytes of positions, slots, starts, requests, previous rows."""
        spec = self.spec
        ratio, previous = (spec.compress_ratio, spec.previous) if isinstance(spec, CompressSpec) else (2, False)
        return CompressTask(
            ratio, max(spec.layout.block_size, 1), spec.layout.value_stride * _FLOAT, previous, aligned,
            *sizes, config.threads, config.tokens,
        )  # fmt: skip


class CompressLaunch(_Compression):
    """Pools, normalises, saves. See :func:`mxkv.compress_norm`."""

    spec: CompressSpec

    def __call__(self, packed: Packed, out: torch.Tensor, config: CompressConfig | None = None) -> None:
        tokens, pools = packed.slots.shape[0], self.spec.compress_ratio == 2
        requests = 0 if packed.query_start is None else packed.query_start.shape[0] - 1
        if pools and requests < 1:
            return  # every token is padding
        config = config or self.choose(tokens)
        weight = packed.weight if packed.weight.stride(0) == 1 else packed.weight.contiguous()
        starts, of_token, previous = (0, 0), (0, 0), _NO_PREVIOUS
        sizes = [packed.positions.element_size(), packed.slots.element_size(), 8, 8, 8]
        wide = [packed.rows.data_ptr()]
        if pools:
            assert packed.query_start is not None
            assert packed.token_to_request is not None
            starts, of_token = _indices(packed.query_start), _indices(packed.token_to_request)
            sizes[2:4] = packed.query_start.element_size(), packed.token_to_request.element_size()
            wide.append(address(packed.ring))
            if packed.prev_rows is not None and packed.prev_row_indices is not None:
                rows, indices = packed.prev_rows, packed.prev_row_indices
                previous = (rows.data_ptr(), rows.stride(0) * _FLOAT, rows.shape[0], *_indices(indices))
                sizes[4] = indices.element_size()
                wide.append(rows.data_ptr())
        aligned = not any(where % WIDEST for where in wide)
        norm, save = self.kernel(config, aligned, *sizes)
        rows_in = (packed.rows.data_ptr(), packed.rows.stride(0) * _FLOAT)
        slots, ring = _indices(packed.slots), self.ring(packed.ring if pools else None)
        grid, block = -(-tokens // config.tokens), (config.threads, config.tokens)
        norm(
            grid, block, 4 * LANES * config.tokens,
            rows_in, _indices(packed.positions), slots, starts, of_token, ring, previous, weight.data_ptr(),
            (out.data_ptr(), out.stride(0) * out.element_size()), packed.eps, tokens, requests,
        )  # fmt: skip
        if pools and not self.spec.previous and self.num_slots:
            save(grid, block, 0, rows_in, slots, starts, of_token, ring, tokens, requests)

    def kernel(self, *kind: Any) -> tuple[Any, Any]:
        """What launches the two kernels for tensors of a kind (see :meth:`task`)."""
        found = self.kernels.get(kind)
        if found is None:
            task, device = self.task(*kind), self.spec.device
            norm = kernel_of(task, norm_kernel, NORM_ARGUMENTS, device)
            saves = task.ratio == 2 and not task.previous
            save = kernel_of(task, save_kernel, SAVE_ARGUMENTS, device) if saves else None
            found = self.kernels[kind] = norm, save
        return found

    def compile(self, config: CompressConfig) -> None:
        """Compile for aligned rows and indices of 64 bits, and launch nothing."""
        self.kernel(config, True, 8, 8, 8, 8, 8)


class SaveLaunch(_Compression):
    """Rows to ring slots. See :func:`mxkv.save_ring_rows`."""

    spec: SaveRingSpec

    def __call__(
        self, rows: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor, config: CompressConfig | None = None
    ) -> None:
        tokens = slots.shape[0]
        config = config or self.choose(tokens)
        aligned = not (rows.data_ptr() % WIDEST or ring.data_ptr() % WIDEST)
        self.kernel(config, aligned, slots.element_size())(
            -(-tokens // config.tokens), (config.threads, config.tokens), 0,
            (rows.data_ptr(), rows.stride(0) * _FLOAT), _indices(slots), self.ring(ring), tokens,
        )  # fmt: skip

    def kernel(self, config: CompressConfig, aligned: bool, slot_bytes: int) -> Any:
        """What launches the kernel for tensors of a kind."""
        kind = config, aligned, slot_bytes
        found = self.kernels.get(kind)
        if found is None:
            task = self.task(config, aligned, 8, slot_bytes, 8, 8, 8)
            found = self.kernels[kind] = kernel_of(task, scatter_kernel, SCATTER_ARGUMENTS, self.spec.device)
        return found

    def compile(self, config: CompressConfig) -> None:
        """Compile for aligned rows and slots of 64 bits, and launch nothing."""
        self.kernel(config, True, 8)


def _indices(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor of indices, and its stride in bytes."""
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


@functools.lru_cache(maxsize=1024)
def prepare(spec: CompressSpec | SaveRingSpec) -> CompressLaunch | SaveLaunch:
    """What runs one kind of call."""
    return CompressLaunch(spec) if isinstance(spec, CompressSpec) else SaveLaunch(spec)


def tunable(spec: CompressSpec | SaveRingSpec) -> Tunable:
    """The launch configurations of one kind of call."""
    found = compress_configurations()
    return Tunable(
        CompressConfig,
        found,
        lambda tokens: found[0],
        target=devices.target_of(spec.device).name,
        source=compiler.source(),
        compiler=compiler.version(),
    )


def compile(spec: CompressSpec | SaveRingSpec, config: CompressConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    prepare(spec).compile(config)
