"""What every launch needs, and launches without the JIT's search for what it has compiled, 15 to 30 us of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch
from triton.compiler import CompiledKernel

from mxkv import devices, settings
from mxkv.autotune_cache.choice import Choice
from mxkv.backends.triton_gpu.codec import Paths, paths_of
from mxkv.contracts import Spec, Tunable

NAME = "triton"  # the backend's, in its keys

_MOST_KERNELS = 256
_NO_GUARD = contextlib.nullcontext()


class DeviceGuard:
    """Triton launches on the current device: called, gives what makes it the tensors' for a ``with`` block."""

    def __init__(self, device: torch.device) -> None:
        self.index = None if device.type == "cpu" else device.index

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        if self.index is None or self.index == torch.cuda.current_device():
            return _NO_GUARD
        return torch.cuda.device(self.index)


class Launch:
    """What every launch for one spec has in common.

    Args:
        spec: The call.
        tunable: What may be chosen about it.
        paths: The instructions to use, instead of the target's.
    """

    def __init__(self, spec: Spec, tunable: Tunable, paths: Paths | None = None) -> None:
        self.spec = spec
        self.target = devices.target_of(spec.device)
        self.paths = paths or paths_of(self.target)
        self.choose = Choice(spec, NAME, tunable)
        self.num_slots = spec.layout.num_slots
        self.block_stride = spec.layout.block_stride * spec.format.cache_dtype.itemsize
        # Not every target has the dtype fp8: kernels see its bytes.
        self.as_bytes = spec.format.cache_dtype == torch.float8_e4m3fn
        self.guard = DeviceGuard(spec.device)
        self.tasks: dict[tuple[Any, ...], Any] = {}


class Launcher:
    """One JIT kernel with one set of constants, and what was compiled of it.

    Triton compiles a kernel anew where an argument's dtype, an integer's width or some of its values, or a pointer's
    alignment differ; ``key`` names what of that differs between this launcher's calls. Where it does not tell all that
    the JIT looks at (AMD: the size of a tensor's memory) each launch goes through the JIT.

    Args:
        kernel: The JIT kernel.
        device: Where it runs.
    """

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self.kernel = kernel
        self.direct = device.type == "cuda" and torch.version.hip is None and not settings.triton_interpret()
        self.compiled: dict[Hashable, CompiledKernel] = {}

    def __call__(self, key: Hashable, programs: int, num_warps: int, *arguments: Any) -> None:
        """Launch on the current device and stream.

        Args:
            key: Everything that Triton specializes on and that may differ between calls, ``num_warps`` included.
            programs: The grid's size.
            num_warps: Warps of a program.
            *arguments: The kernel's, its constants included.
        """
        known = self.compiled.get(key)
        if known is not None:
            known[(programs, 1, 1)](*arguments)
            return
        made = self.kernel[(programs,)](*arguments, num_warps=num_warps, enable_fp_fusion=False)
        if self.direct:
            if len(self.compiled) >= _MOST_KERNELS:
                self.compiled.clear()
            self.compiled[key] = made
