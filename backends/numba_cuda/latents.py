"""Launches the store and load kernels. Nothing here allocates or synchronises, so a CUDA graph can capture it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.backends.numba_cuda import compiler
from mxkv.backends.numba_cuda.config import LaunchConfig, configurations
from mxkv.backends.numba_cuda.launch import KERNEL_DTYPES, Launch, address, kernel_of
from mxkv.backends.numba_cuda.load import load_kernel, load_lines
from mxkv.backends.numba_cuda.store import store_kernel, store_lines
from mxkv.backends.numba_cuda.tasks import DTYPES, WIDEST, load_task, store_task
from mxkv.contracts import LoadSpec, Spec, StoreSpec, Tunable

STORE_ARGUMENTS, LOAD_ARGUMENTS = "i" * 14, "i" * 9


def blocks(tokens: int, each: int) -> int:
    """How many blocks of ``each`` tokens a launch has. The kernels' loops take what is past that."""
    return min(-(-tokens // each), 1 if settings.numba_simulated() else (1 << 31) - 1)


class StoreLaunch(Launch):
    """Quantizes rows and scatters them. See :func:`mxkv.store`."""

    spec: StoreSpec

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec, tunable(spec))

    def __call__(
        self,
        cache: torch.Tensor,
        latent: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        cos_sin: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        config: LaunchConfig | None = None,
    ) -> None:
        if cos_sin is not None and cos_sin.dtype not in KERNEL_DTYPES:
            cos_sin = cos_sin.to(torch.float32)
        tokens, element_size = slots.shape[0], latent.element_size()
        config = config or self.choose(tokens)
        latent_stride = latent.stride(0) * element_size
        latent_at, cache_at = latent.data_ptr(), cache.data_ptr()
        run, lines = self.kernel(
            cache_at % WIDEST, latent_at % WIDEST == 0 and latent_stride % WIDEST == 0, slots.element_size(),
            0 if positions is None else positions.element_size(), "" if cos_sin is None else DTYPES[cos_sin.dtype],
        )  # fmt: skip
        block = config.block(lines)
        run(
            blocks(tokens, block[1]), block, 0,
            cache_at, latent_at, slots.data_ptr(), address(positions), address(cos_sin), address(cache_scale),
            tokens, self.num_slots, 0 if cos_sin is None else cos_sin.shape[0], self.block_stride, latent_stride,
            _stride(slots), _stride(positions), _stride(cos_sin),
        )  # fmt: skip

    def kernel(self, *kind: Any) -> tuple[Any, int]:
        """What launches the kernel for tensors of a kind (see :func:`store_task`), and the lines of a row."""
        found = self.kernels.get(kind)
        if found is None:
            task = store_task(self.spec, *kind)
            found = kernel_of(task, store_kernel, STORE_ARGUMENTS, self.spec.device), store_lines(task)
            self.kernels[kind] = found
        return found

    def compile(self, config: LaunchConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        spec = self.spec
        aligned = spec.latent_dim * spec.latent_dtype.itemsize % WIDEST == 0
        self.kernel(0, aligned, 8, 8 * spec.positioned, "fp32" if spec.rotate else "")


class LoadLaunch(Launch):
    """Gathers rows and dequantizes them. See :func:`mxkv.load`."""

    spec: LoadSpec

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, tunable(spec))

    def __call__(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        cache_scale: torch.Tensor | None,
        config: LaunchConfig | None = None,
    ) -> None:
        tokens = slots.shape[0]
        config = config or self.choose(tokens)
        out_stride = out.stride(0) * out.element_size()
        out_at, cache_at = out.data_ptr(), cache.data_ptr()
        aligned = out_at % WIDEST == 0 and out_stride % WIDEST == 0
        run, lines = self.kernel(cache_at % WIDEST, aligned, slots.element_size())
        block = config.block(lines)
        run(
            blocks(tokens, block[1]), block, 0,
            cache_at, slots.data_ptr(), out_at, address(cache_scale),
            tokens, self.num_slots, self.block_stride, _stride(slots), out_stride,
        )  # fmt: skip

    def kernel(self, *kind: Any) -> tuple[Any, int]:
        """What launches the kernel for tensors of a kind (see :func:`load_task`), and the steps of a row."""
        found = self.kernels.get(kind)
        if found is None:
            task = load_task(self.spec, *kind)
            found = self.kernels[kind] = (
                kernel_of(task, load_kernel, LOAD_ARGUMENTS, self.spec.device),
                load_lines(task),
            )
        return found

    def compile(self, config: LaunchConfig) -> None:
        """Compile for contiguous tensors at aligned addresses, and launch nothing."""
        self.kernel(0, self.spec.latent_dim * self.spec.out_dtype.itemsize % WIDEST == 0, 8)


def _stride(tensor: torch.Tensor | None) -> int:
    """From one row to the next, in bytes."""
    return 0 if tensor is None else tensor.stride(0) * tensor.element_size()


@functools.lru_cache(maxsize=1024)
def prepare(spec: StoreSpec | LoadSpec) -> StoreLaunch | LoadLaunch:
    """What runs one kind of call."""
    return StoreLaunch(spec) if isinstance(spec, StoreSpec) else LoadLaunch(spec)


def tunable(spec: Spec) -> Tunable:
    """The launch configurations of one kind of call."""
    return Tunable(
        LaunchConfig,
        configurations(),
        lambda tokens: configurations()[0],
        target=devices.target_of(spec.device).name,
        source=compiler.source(),
        compiler=compiler.version(),
    )


def compile(spec: Spec, config: LaunchConfig) -> None:
    """Compile what a call of contiguous tensors would launch."""
    run: Any = prepare(spec)
    run.compile(config)
