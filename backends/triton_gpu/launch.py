"""Launches a JIT kernel without the JIT's own search for what it has compiled, which takes 15 to 30 us of a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton.compiler import CompiledKernel

from mxkv import settings

_MOST_KERNELS = 256


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
