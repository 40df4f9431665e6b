"""The backends, one folder each. A backend never imports another one, nor the operations."""

from __future__ import annotations

from mxkv.backends.numba_cuda.backend import BACKEND as NUMBA
from mxkv.backends.torch_eager.backend import BACKEND as TORCH
from mxkv.backends.triton_gpu.backend import BACKEND as TRITON
from mxkv.contracts import Backend

BUILTIN: tuple[Backend, ...] = (TRITON, NUMBA, TORCH)
