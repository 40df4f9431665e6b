"""Launches the compression kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from mxkv import devices
from mxkv.backends.numba_cuda import compiler, latents
from mxkv.backends.numba_cuda.compress import LANES, CompressTask, norm_kernel, save_kernel, scatter_kernel
from mxkv.backends.numba_cuda.config import CompressConfig, compress_configurations, configurations
from mxkv.backends.numba_cuda.launch import Launch, address, kernel_of
from mxkv.backends.numba_cuda.tasks import WIDEST
from mxkv.contracts import COMPRESS_DIM, CompressSpec, CompressStoreSpec, Packed, SaveRingSpec, Tunable

NORM_ARGUMENTS, SAVE_ARGUMENTS, SCATTER_ARGUMENTS = "2222235i23fii", "22223ii", "223i"
_NO_PREVIOUS = (0, 0, 0, 0, 0)
_NO_MARKS = (0, 0, 0)
_FLOAT = 4

Compression = CompressSpec | CompressStoreSpec | SaveRingSpec


class Sizes(NamedTuple):
    """The bytes of each index."""

    positions: int = 8
    slots: int = 8
    starts: int = 8
    requests: int = 8
    previous: int = 8
    cache_slots: int = 8


class _Compression(Launch):
    """What the launches have in common."""

    spec: CompressSpec | SaveRingSpec

    def __init__(self, spec: CompressSpec | SaveRingSpec) -> None:
        super().__init__(spec, tunable(spec))
        self.ring_stride = spec.layout.block_stride * _FLOAT

    def ring(self, ring: torch.Tensor | None) -> tuple[int, int, int]:
        """The rings' address, the stride of their blocks and how many slots they have."""
        return address(ring), self.ring_stride, self.num_slots


class CompressLaunch(_Compression):
    """Pools, normalises, saves. See :func:`mxkv.compress_norm`."""

    spec: CompressSpec

    def __call__(self, packed: Packed, out: torch.Tensor, config: CompressConfig | None = None) -> None:
        self.run(packed, out, None, None, config)

    def run(
        self,
        packed: Packed,
        out: torch.Tensor,
        cache_slots: torch.Tensor | None,
        chosen: torch.Tensor | None,
        config: CompressConfig | None,
    ) -> bool:
        """Pool, normalise, save; ``chosen`` [tokens] int64 gets the cache slots of the tokens that close a group.

        Returns:
            Whether there was anything to do; if not, nothing has been written.
        """
        tokens, pools = packed.slots.shape[0], self.spec.compress_ratio == 2
        requests = 0 if packed.query_start is None else packed.query_start.shape[0] - 1
        if pools and requests < 1:
            return False  # every token is padding
        config = config or self.choose(tokens)
        weight = packed.weight if packed.weight.stride(0) == 1 else packed.weight.contiguous()
        starts, of_token, previous = (0, 0), (0, 0), _NO_PREVIOUS
        sizes = Sizes(packed.positions.element_size(), packed.slots.element_size())
        wide = [packed.rows.data_ptr()]
        if pools:
            assert packed.query_start is not None
            assert packed.token_to_request is not None
            starts, of_token = _indices(packed.query_start), _indices(packed.token_to_request)
            sizes = sizes._replace(
                starts=packed.query_start.element_size(), requests=packed.token_to_request.element_size()
            )
            wide.append(address(packed.ring))
            if packed.prev_rows is not None and packed.prev_row_indices is not None:
                rows, indices = packed.prev_rows, packed.prev_row_indices
                previous = (rows.data_ptr(), rows.stride(0) * _FLOAT, rows.shape[0], *_indices(indices))
                sizes = sizes._replace(previous=indices.element_size())
                wide.append(rows.data_ptr())
        marks = _NO_MARKS
        if cache_slots is not None:
            marks = (*_indices(cache_slots), address(chosen))
            sizes = sizes._replace(cache_slots=cache_slots.element_size())
        norm, save = self.kernel(config, chosen is not None, not any(where % WIDEST for where in wide), sizes)
        rows_in = (packed.rows.data_ptr(), packed.rows.stride(0) * _FLOAT)
        slots, ring = _indices(packed.slots), self.ring(packed.ring if pools else None)
        grid, block = -(-tokens // config.tokens), (config.threads, config.tokens)
        norm(
            grid, block, 4 * LANES * config.tokens,
            rows_in, _indices(packed.positions), slots, starts, of_token, ring, previous, weight.data_ptr(),
            (out.data_ptr(), out.stride(0) * out.element_size()), marks, packed.eps, tokens, requests,
        )  # fmt: skip
        if pools and not self.spec.previous and self.num_slots:
            save(grid, block, 0, rows_in, slots, starts, of_token, ring, tokens, requests)
        return True

    def kernel(self, config: CompressConfig, marks: bool, aligned: bool, sizes: Sizes) -> tuple[Any, Any]:
        """What launches the two kernels for tensors of a kind."""
        kind = config, marks, aligned, sizes
        found = self.kernels.get(kind)
        if found is None:
            task, device = compress_task(self.spec, *kind), self.spec.device
            norm = kernel_of(task, norm_kernel, NORM_ARGUMENTS, device)
            saves = task.ratio == 2 and not task.previous
            save = kernel_of(task, save_kernel, SAVE_ARGUMENTS, device) if saves else None
            found = self.kernels[kind] = norm, save
        return found

    def compile(self, config: CompressConfig) -> None:
        """Compile for aligned rows and indices of 64 bits, and launch nothing."""
        self.kernel(config, False, True, Sizes())


class CompressStoreLaunch:
    """Pools, normalises, stores, saves. See :func:`mxkv.compress_store`.

    Between the kernels the latents pass through memory: ``out``, or some that is taken for the call.
    """

    def __init__(self, spec: CompressStoreSpec) -> None:
        self.compress, self.store = CompressLaunch(spec.compressed), latents.StoreLaunch(spec.stored)

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
        tokens, device = packed.slots.shape[0], cache.device
        rows = torch.empty(tokens, COMPRESS_DIM, dtype=torch.bfloat16, device=device) if out is None else out
        chosen = torch.empty(tokens, dtype=torch.int64, device=device)
        if self.compress.run(packed, rows, cache_slots, chosen, config):
            self.store(cache, rows[:tokens], chosen, packed.positions[:tokens], cos_sin, cache_scale)

    def compile(self, config: CompressConfig) -> None:
        """Compile for aligned rows and indices of 64 bits, and launch nothing."""
        self.compress.kernel(config, True, True, Sizes())
        self.store.compile(configurations()[0])


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
            task = compress_task(self.spec, config, False, aligned, Sizes(slots=slot_bytes))
            found = self.kernels[kind] = kernel_of(task, scatter_kernel, SCATTER_ARGUMENTS, self.spec.device)
        return found

    def compile(self, config: CompressConfig) -> None:
        """Compile for aligned rows and slots of 64 bits, and launch nothing."""
        self.kernel(config, True, 8)


def compress_task(
    spec: CompressSpec | SaveRingSpec, config: CompressConfig, marks: bool, aligned: bool, sizes: Sizes
) -> CompressTask:
    """The kernels' constants; see :class:`CompressTask`."""
    pools, previous = True, False
    if isinstance(spec, CompressSpec):
        pools, previous = spec.compress_ratio == 2, spec.previous
    layout = spec.layout
    return CompressTask(
        1 + pools, max(layout.block_size, 1), layout.value_stride * _FLOAT, previous, marks, aligned, *sizes,
        threads=config.threads, tokens=config.tokens,
    )  # fmt: skip


def _indices(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor of indices, and its stride in bytes."""
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


@functools.lru_cache(maxsize=1024)
def prepare(spec: Compression) -> CompressLaunch | CompressStoreLaunch | SaveLaunch:
    """What runs one kind of call."""
    if isinstance(spec, CompressStoreSpec):
        return CompressStoreLaunch(spec)
    return CompressLaunch(spec) if isinstance(spec, CompressSpec) else SaveLaunch(spec)


def tunable(spec: Compression) -> Tunable:
    """The launch configurations of one kind of call."""
    found = compress_configurations()
    if isinstance(spec, SaveRingSpec):
        found = found[:1]  # a copy: nothing is worth a choice
    return Tunable(
        CompressConfig,
        found,
        lambda tokens: found[0],
        target=devices.target_of(spec.device).name,
        source=compiler.source(),
        compiler=compiler.version(),
    )


def compile(spec: Compression, config: CompressConfig) -> None:
    """Compile what a call of contiguous tensors would launch in a configuration."""
    prepare(spec).compile(config)
