"""Whether what the tuner's processes compile ahead is what an attention launches, with no GPU.

MXKV_TARGET=hopper python -m tests.triton.compiled_ahead FORMAT

Launches are recorded, and specialised by Triton's own rules; each line that is printed is a call that would compile
another kernel.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import mxkv
from mxkv.autotune_cache import shapes, trials
from mxkv.backends.triton_gpu import attention


class Recorder:
    """Stands where the kernel stands, and keeps for what it would be compiled."""

    def __init__(self, kernel: Any) -> None:
        self.bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        self.found: list[str] = []

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        _, specialization, _ = self.bind(*arguments, **options)
        self.found.append(re.sub(r"0x[0-9a-f]+", "", repr(specialization)))

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
        self(*arguments, **options)


def main() -> None:
    format = mxkv.FORMATS[sys.argv[1]]
    spec, *_ = shapes.kinds(torch.device("cpu"), operations=["attend"], formats=[format])
    kernel = attention.attend_kernel = Recorder(attention.attend_kernel)
    attention.reduce_kernel = Recorder(attention.reduce_kernel)  # merging is compiled for the number of splits
    launch = attention.prepare(spec)
    config = attention.tunable(spec).space[0]
    launch.compile(config)
    ahead, kernel.found = set(kernel.found), []
    calls = trials.OPERATIONS["attend"](spec)
    for sizes in calls.check_sizes(config):
        trial = calls.trial(sizes)
        attention.prepare(trial.spec)(*trial.tensors, config=config)
    attention.prepare(calls.fill(64))(*calls.cut(0, (64, 2048)), config=config)
    assert len(kernel.found) > 4
    for found in kernel.found:
        if found not in ahead:
            print(found)


if __name__ == "__main__":
    main()
