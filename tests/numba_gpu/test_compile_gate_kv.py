"""The kernels on keys and values compile for every compute capability; see :mod:`tests.numba_gpu.test_compile_gate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mxkv
from tests.numba_gpu import no_compiler
from tests.numba_gpu.test_compile_gate import BF16, CAPABILITIES, FP16, FP32, NEWEST, Case, compiled

pytestmark = [pytest.mark.numba, pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())]


def rows_case(
    operation: str, name: str, dim: int, dtype: torch.dtype, capabilities: list[tuple[int, int]], **fields: Any
) -> Case:
    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import kv, kv_rows

        spec = mxkv.spec(operation, format=name, head_dim=dim, heads=2, dtype=dtype, **fields)
        corrected = spec.format.norm_correction
        task = kv_rows.KVTask(kv.record_of(spec, 0), kv.DTYPES[dtype], 0x7F7FFFFF, corrected, False, 8, 32, 4)
        factory = kv_rows.store_kv_kernel if operation == "store_kv" else kv_rows.load_kv_kernel
        return task, factory, kv.ROWS_ARGUMENTS

    return Case(f"{operation} {name} {dim}{' tabled' if fields else ''}", make, capabilities, wide=False)


def attend_case(name: str, dim: int, capabilities: list[tuple[int, int]], **fields: Any) -> Case:
    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import kv, kv_attend

        spec = mxkv.spec("attend_kv", format=name, head_dim=dim, heads=2, query_heads=8, dtype=FP16, **fields)
        packed, windowed = spec.packed, spec.windowed
        task = kv_attend.AttendKVTask(
            kv.record_of(spec, 0), 8, "fp16", packed, windowed, 4, 4, 4, True, not packed, 128, 4, 16, 4, True, 4
        )
        return task, kv_attend.attend_kv_kernel, kv.ATTEND_ARGUMENTS

    return Case(f"attend_kv {name} {dim}{' packed' if fields else ''}", make, capabilities, wide=False, exact=False)


CASES = [
    rows_case("store_kv", "turboquant-4bit-nc", 128, BF16, CAPABILITIES),
    rows_case("store_kv", "turboquant-k8v4", 80, FP16, NEWEST),
    rows_case("store_kv", "turboquant-3bit-nc", 64, FP32, NEWEST, tabled=True, rotated=True),
    rows_case("load_kv", "turboquant-3bit-nc", 128, BF16, CAPABILITIES),
    rows_case("load_kv", "turboquant-k8v4", 96, FP32, NEWEST),
    attend_case("turboquant-4bit-nc", 128, CAPABILITIES),
    attend_case("turboquant-k8v4", 64, NEWEST, packed=True, windowed=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_compile(case: Case) -> None:
    compiled(case)
