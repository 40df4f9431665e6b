"""The kernels compile for every compute capability with no GPU present, and their code is what was meant.

Where the installed toolkit knows a capability no more (CUDA 13 begins at 7.5), its cases are skipped with that reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mxkv
from mxkv import checks, devices
from tests.numba_gpu import no_compiler
from tests.support import CUSTOM, cos_sin_table

pytestmark = [pytest.mark.numba, pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())]

CAPABILITIES = [(5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (9, 0)]
SOME = [(5, 0), (9, 0)]
NEWEST = [(9, 0)]
BY_NAME = {format.name: format for format in [*mxkv.FORMATS.values(), *CUSTOM]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel to compile.

    Attributes:
        name: What pytest calls it.
        make: Gives the kernel's task, its factory and its arguments' kinds.
        capabilities: What it is compiled for.
        wide: Whether it is to read and write 16 bytes at a time.
        exact: Whether every sum and product of it is rounded by itself.
        registers: Of a thread, at most.
    """

    name: str
    make: Callable[[], tuple[Any, Callable[[Any], Any], str]]
    capabilities: list[tuple[int, int]]
    wide: bool = True
    exact: bool = True
    registers: int = 255


def store_case(
    name: str, dtype: torch.dtype, dim: int, capabilities: list[tuple[int, int]], *, rope: bool = False,
    aligned: bool = True, **options: Any,
) -> Case:  # fmt: skip
    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import latents, store, tasks

        format = BY_NAME[name]
        cache = mxkv.empty_cache(format, 2, 4, dim)
        rows, slots = torch.empty(8, dim, dtype=dtype), torch.zeros(8, dtype=torch.int64)
        positions, table = (slots, cos_sin_table(8)) if rope else (None, None)
        scale = torch.ones(1) if format.scale is mxkv.Scale.TENSOR else None
        arguments = {"compress_ratio": 1, "nonfinite": "propagate"} | options
        spec = checks.store_spec(
            cache, rows, slots, format.spec, positions, table, arguments["compress_ratio"], scale,
            arguments["nonfinite"],
        )  # fmt: skip
        task = tasks.store_task(spec, 0, aligned, 8, 8 * rope, "fp32" if rope else "")
        return task, store.store_kernel, latents.STORE_ARGUMENTS

    format = BY_NAME[name]
    wide = aligned and format.element is not mxkv.Element.E4M3 and format.scale is not mxkv.Scale.E4M3
    exact = format.element is not mxkv.Element.E2M1  # its codes take fused sums of exact products
    title = f"store {name} {str(dtype).removeprefix('torch.')} {dim}{' rope' if rope else ''}"
    return Case(title, make, capabilities, wide, exact)


def load_case(name: str, dtype: torch.dtype, dim: int, capabilities: list[tuple[int, int]]) -> Case:
    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import latents, load, tasks

        format = BY_NAME[name]
        cache, slots = mxkv.empty_cache(format, 2, 4, dim), torch.zeros(8, dtype=torch.int64)
        scale = torch.ones(1) if format.scale is mxkv.Scale.TENSOR else None
        spec = checks.load_spec(cache, slots, format.spec, dim, dtype, scale, None)
        return tasks.load_task(spec, 0, dim % 8 == 0, 8), load.load_kernel, latents.LOAD_ARGUMENTS

    return Case(f"load {name} {str(dtype).removeprefix('torch.')} {dim}", make, capabilities, dim % 8 == 0)


def attend_case(
    name: str,
    selection: str,
    dim: int,
    capabilities: list[tuple[int, int]],
    *,
    whole: bool = True,
    reduce: bool = False,
    heads: int = 3,
    dtype: torch.dtype = torch.float16,
    guessed: bool = False,
    registers: int = 255,
) -> Case:
    """``dtype``: of the queries. ``guessed``: in the first configuration of an H200 with all heads in a block, else in
    one that fits compute capability 5.0."""

    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import attend, attend_merge, attention, config

        cache, q = mxkv.empty_cache(name, 4, 8, dim), torch.empty(2, heads, dim, dtype=dtype)
        rows, bounds = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        selected = (None, None, rows, bounds) if selection == "pages" else (rows, None, None, None)
        spec = checks.attend_spec(
            q, cache, torch.empty_like(q), *selected, BY_NAME[name].spec, None, torch.zeros(heads), None, None, None
        )
        launch = config.AttendConfig(128, 4, 8, 2, 8, True, 3)
        if guessed:
            found = config.attend_configurations(spec, devices.TARGETS["hopper"])
            launch = next(launch for launch in found if launch.block_heads == heads)
        task = attention.attend_task(spec, 0, 4, 4 * (selection == "pages"), whole, launch)
        if reduce:
            return task, attend_merge.reduce_kernel, attention.REDUCE_ARGUMENTS
        return task, attend.attend_kernel, attention.ATTEND_ARGUMENTS

    kind = f"{selection} {str(dtype).removeprefix('torch.')}"
    title = f"{'reduce' if reduce else 'attend'} {name} {kind} {heads} heads {dim}{'' if whole else ' split'}"
    return Case(title, make, capabilities, wide=False, exact=False, registers=registers)


def compress_case(name: str, capabilities: list[tuple[int, int]], *, ratio: int = 2, **fields: bool) -> Case:
    def make() -> tuple[Any, Callable[[Any], Any], str]:
        from mxkv.backends.numba_cuda import compress, compression, config

        options = {"marks": False, "aligned": True} | fields
        spec = mxkv.spec("compress_norm", compress_ratio=ratio, previous=ratio == 2)
        task = compression.compress_task(
            spec, config.CompressConfig(32, 4), options["marks"], options["aligned"], compression.Sizes(slots=4)
        )
        kinds = {"norm": compression.NORM_ARGUMENTS, "save": compression.SAVE_ARGUMENTS}
        kinds["scatter"] = compression.SCATTER_ARGUMENTS
        return task, getattr(compress, f"{name}_kernel"), kinds[name]

    title = f"compress {name} {ratio}{' marks' * fields.get('marks', False)}"
    return Case(title, make, capabilities, wide=False)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    store_case("mxfp4", BF16, 512, CAPABILITIES),
    store_case("dsv4", BF16, 512, CAPABILITIES, rope=True, compress_ratio=2),
    store_case("nvfp4", FP16, 512, SOME),
    store_case("mxfp8", FP32, 96, NEWEST, nonfinite="sanitize"),
    store_case("fp8-scaled-by-fp8", BF16, 64, NEWEST),
    store_case("fp8", FP32, 512, NEWEST, rope=True),
    store_case("bf16", FP16, 67, NEWEST, rope=True, aligned=False),
    store_case("mxfp4", BF16, 96, NEWEST, aligned=False),
    load_case("mxfp4", BF16, 512, CAPABILITIES),
    load_case("nvfp4", FP16, 512, NEWEST),
    load_case("dsv4", FP32, 512, NEWEST),
    load_case("fp8", BF16, 67, NEWEST),
    compress_case("norm", CAPABILITIES),
    compress_case("norm", NEWEST, ratio=1, marks=True, aligned=False),
    compress_case("save", SOME),
    compress_case("scatter", CAPABILITIES),
    attend_case("mxfp4", "dense", 512, CAPABILITIES),
    attend_case("dsv4", "pages", 512, NEWEST, whole=False),
    attend_case("mxfp4", "dense", 512, CAPABILITIES, whole=False, reduce=True),
    # Three blocks of 128 threads are to fit a multiprocessor.
    attend_case("bf16", "dense", 512, NEWEST, whole=False, heads=16, guessed=True, registers=168),
    attend_case("bf16", "dense", 512, NEWEST, heads=16, dtype=BF16, guessed=True, registers=168),
    attend_case("mxfp4", "dense", 512, NEWEST, whole=False, heads=16, guessed=True, registers=168),
    attend_case("dsv4", "dense", 512, NEWEST, heads=16, guessed=True, registers=168),
    attend_case("nvfp4", "dense", 512, NEWEST, heads=16, dtype=BF16, guessed=True, registers=168),
]


def ptxas() -> str | None:
    """The assembler of the toolkit's wheel, if it is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvcc-cu12") or ():
            if file.name == "ptxas":
                return str(Path(str(file.locate())))
    return None


def supported(capability: tuple[int, int]) -> str:
    """Why the installed toolkit does not compile for a capability; empty where it does."""
    from mxkv.backends.numba_cuda import compiler

    def nothing(address):  # type: ignore[no-untyped-def]
        pass

    try:
        compiler.compile_ptx(nothing, "i", capability)
    except Exception as error:
        if "NvvmSupport" in type(error).__name__ or "not supported" in str(error):
            return f"{capability[0]}.{capability[1]}: {str(error).splitlines()[0]}"
        raise
    return ""


def problems_of(case: Case, ptx: str, capability: tuple[int, int]) -> list[str]:
    """What is not as it was meant in a kernel's code."""
    found = []
    major, minor = capability
    if f".target sm_{major}{minor}" not in ptx:
        found.append("it is code for another target")
    if ".local" in ptx:
        found.append("something is kept in local memory")
    if re.search(r"\b(call|call\.uni)\b", ptx):
        found.append("a function was not inlined")
    loose = set(re.findall(r"\b(?:mul|add|sub|div|sqrt|rcp)(?:\.approx|\.full|\.ftz)*\.f32\b", ptx))
    if case.exact and (loose or "fma.rn.f32" in ptx):
        found.append(f"rounded in a way that was not asked for: {sorted(loose) or 'fma'}")
    if "double" in ptx or ".f64" in ptx:
        found.append("something is computed in fp64")
    if case.wide and not (re.search(r"st\.global\.v4", ptx) and re.search(r"ld\.global\.nc\.(v4|u32|b32)", ptx)):
        found.append("it does not write 16 bytes at a time")
    assembler = ptxas()
    if assembler is not None:
        done = subprocess.run(
            [assembler, "-v", f"-arch=sm_{major}{minor}", "-o", "/dev/null", "-"],
            input=ptx, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            found.append(f"ptxas refuses it: {done.stderr[-500:]}")
        elif not re.search(r"0 bytes stack frame, 0 bytes spill stores", done.stderr):
            found.append(f"it spills: {done.stderr[-200:]}")
        used = re.search(r"Used (\d+) registers", done.stderr)
        if used and int(used[1]) > case.registers:
            found.append(f"a thread takes {used[1]} registers, not {case.registers} at most")
    return found


def compiled(case: Case) -> None:
    """Compile a case for all its capabilities and look at the code.

    Raises:
        AssertionError: Something is not as it was meant.
    """
    from mxkv.backends.numba_cuda import compiler

    task, factory, arguments = case.make()
    function = factory(task)
    wrong, unsupported = {}, []
    for capability in case.capabilities:
        try:
            ptx = compiler.compile_ptx(function, arguments, capability, getattr(task, "bounds", None))
        except Exception:
            reason = supported(capability)
            if not reason:
                raise
            unsupported.append(reason)
            continue
        found = problems_of(case, ptx, capability)
        taken = re.findall(r"\.param \.(\w+) \w+_param_\d+", ptx)
        given = [{"i": "u64", "f": "f32"}[kind] for kind in compiler.flat(arguments)]
        if taken != given:
            found.append(f"it takes {taken}, and a launch gives {given}")
        if found:
            wrong[f"{capability[0]}.{capability[1]}"] = found
    assert not wrong
    if unsupported:
        pytest.skip(f"not by this toolkit: {'; '.join(unsupported)}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_compile(case: Case) -> None:
    compiled(case)
