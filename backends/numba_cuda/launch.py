"""What every launch needs: the call's device, its configuration, and its kernel for what its tensors' addresses allow.

A kernel is compiled once for each task, and kept beside the tuned configurations (:mod:`.compiler`). In Numba's
simulator it is not compiled: each of its threads is one of Python's, over the CPU tensors' own memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch

from mxkv import settings
from mxkv.autotune_cache.choice import Choice
from mxkv.contracts import Spec, Tunable

NAME = "numba"  # the backend's, in its keys

_SIMULATED_SLICE_S = 5e-6  # the simulator polls its threads, each time for as long as the interpreter lets it

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Launch:
    """What every launch for one spec has in common.

    Args:
        spec: The call.
        tunable: What may be chosen about it.
    """

    def __init__(self, spec: Spec, tunable: Tunable) -> None:
        self.spec = spec
        self.choose = Choice(spec, NAME, tunable)
        self.num_slots = spec.layout.num_slots
        self.block_stride = spec.layout.block_stride * spec.format.cache_dtype.itemsize
        self.kernels: dict[Hashable, Any] = {}  # by what of the tensors they are compiled for


def kernel_of(task: Any, factory: Callable[[Any], Callable[..., None]], arguments: str, device: torch.device) -> Any:
    """What launches a task's kernel on a device.

    Args:
        task: The kernel's constants.
        factory: From them to the kernel.
        arguments: Each of the kernel's: "i" int64, "f" fp32, a digit (of base 36) for a tuple of so many int64.
        device: Where it runs.
    """
    if settings.numba_simulated():
        return _simulated(factory(task), arguments)
    from mxkv.backends.numba_cuda import driver

    return driver.Kernel(task, factory, arguments, device)


def _simulated(function: Callable[..., None], kinds: str) -> Callable[..., None]:
    from numba import cuda

    kernel = cuda.jit(function)

    def launch(grid: int, block: tuple[int, int], shared: int, *arguments: Any) -> None:
        rounded = (ctypes.c_float(x).value if kind == "f" else x for x, kind in zip(arguments, kinds, strict=True))
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SIMULATED_SLICE_S)
        try:
            kernel[grid, block, 0, shared](*rounded)
        finally:
            sys.setswitchinterval(before)

    return launch


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor's first element stands; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
