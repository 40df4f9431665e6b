"""Compiled kernels: kept on disk, read again, never trusted blindly; and what a launch hands to the driver."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mxkv
from mxkv import settings
from mxkv.autotune_cache import entries
from tests.numba_gpu import no_compiler

pytestmark = [pytest.mark.numba, pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())]


@dataclasses.dataclass(frozen=True)
class Task:
    step: int


made: list[int] = []


def counting_kernel(task: Task) -> Any:
    from mxkv.backends.numba_cuda.primitives import put64

    step = task.step
    made.append(step)

    def kernel(address: Any, count: Any) -> None:
        put64(address, count[0] + count[1] + step)

    return kernel


@pytest.fixture
def folder(tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path))
    settings.reload()
    entries.forget_warnings()
    made.clear()
    yield tmp_path / "numba"
    entries.forget_warnings()


def code(step: int = 1, capability: tuple[int, int] = (9, 0)) -> Any:
    from mxkv.backends.numba_cuda import compiler

    return compiler.code_of(Task(step), counting_kernel, "i2", capability)


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    first, again = code(), code()
    assert first.made
    assert not again.made
    assert (first.ptx, first.entry, round(first.seconds, 3)) == (again.ptx, again.entry, again.seconds)
    assert made == [1]
    code(2)
    assert ".target sm_80" in code(1, (8, 0)).ptx
    assert made == [1, 2, 1]
    assert len(list(folder.glob("*.ptx"))) == 3
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"", lambda data: b"// mxkv {}\n" + data])
def test_a_damaged_file_is_compiled_anew(folder: Path, damage: Any) -> None:
    want = code()
    (path,) = folder.glob("*.ptx")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    got = code()
    assert got.made
    assert got.ptx == want.ptx
    assert not code().made


def test_another_source_is_another_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mxkv.backends.numba_cuda import compiler

    code()
    monkeypatch.setattr(compiler, "source", lambda: "another")
    assert code().made


def test_a_folder_that_cannot_be_written_is_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert code(1).made
        assert code(2).made
    assert len([r for r in caplog.records if "compiled kernels" in r.message]) == 1


def test_info_shows_what_compiling_took(folder: Path) -> None:
    from mxkv.cli import info

    assert info.collect()["numba_kernels"] == {"folder": str(folder), "kernels": []}
    code()
    (kernel,) = info.collect()["numba_kernels"]["kernels"]
    assert kernel["kernel"] == "counting_kernel for compute capability 9.0"
    assert kernel["seconds"] > 0


def test_the_ptx_asks_for_no_more_than_it_needs(folder: Path) -> None:
    for capability, version in (((7, 5), "6.3"), ((8, 0), "7.0"), ((9, 0), "7.8")):
        assert f".version {version}\n" in code(1, capability).ptx


class Driver:
    """Takes what the CUDA driver would, and remembers the last launch."""

    def __init__(self) -> None:
        self.current = 0
        self.left: list[int] = []
        self.launched: tuple[Any, ...] = ()
        self.attributes: dict[int, int] = {}

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        context._obj.value = 100 + index
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current or None
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.left.append(self.current)
        self.current = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current = self.left.pop()
        return 0

    def cuModuleLoadDataEx(self, module: Any, image: bytes, *options: Any) -> int:
        module._obj.value = 7
        return 218 if b"broken" in image else 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 8
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes[attribute] = value
        return 0

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"a reason"
        return 0

    def cuLaunchKernel(self, function: Any, *sizes: Any) -> int:
        *sizes, pointers, _ = sizes
        kinds = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        values = [ctypes.cast(p, ctypes.POINTER(kind))[0] for p, kind in zip(pointers, kinds, strict=True)]
        self.launched = (self.current, tuple(sizes), values)
        return 0 if sizes[0] else 1


@pytest.fixture
def driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from mxkv.backends.numba_cuda import driver

    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    stream = type("Stream", (), {"cuda_stream": 55})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device.index == 1 else None)
    driver._context.cache_clear()
    yield fake
    driver._context.cache_clear()


def test_a_launch_goes_to_the_tensors_device_and_torchs_stream(driver: Driver) -> None:
    from mxkv.backends.numba_cuda import driver as launching

    kernel = launching.Kernel(Task(1), counting_kernel, "i2", torch.device("cuda", 1))
    assert driver.current == 0
    kernel(3, (32, 4), 0, 1 << 40, (-5, 6))
    assert driver.launched == (101, (3, 1, 1, 32, 4, 1, 0, 55), [1 << 40, -5, 6])
    assert driver.current == 0  # what was current is so again
    driver.current = 101
    kernel(1, (32, 1), 60 << 10, 1, (2, 3))
    assert driver.attributes == {8: 60 << 10, 9: 100}  # of shared memory: the most, and the percentage
    assert not driver.left


def test_what_the_driver_refuses_is_said(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from mxkv.backends.numba_cuda import compiler
    from mxkv.backends.numba_cuda import driver as launching

    kernel = launching.Kernel(Task(1), counting_kernel, "i2", torch.device("cuda", 1))
    with pytest.raises(launching.DriverError, match=r"launching 0 blocks of 128 threads .* error 1: a reason"):
        kernel(0, (32, 4), 0, 1, (2, 3))
    assert not driver.left
    broken = compiler.Code("broken", "kernel", 0.0, True)
    monkeypatch.setattr(compiler, "code_of", lambda *arguments: broken)
    with pytest.raises(launching.DriverError, match="loading a kernel failed with CUDA error 218"):
        launching.Kernel(Task(1), counting_kernel, "i2", torch.device("cuda", 1))


def test_a_real_call_reaches_the_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store as it is on a GPU, but for the driver: its kernel compiles, its arguments are those of the tensors."""
    from mxkv import checks
    from mxkv.backends.numba_cuda import latents

    cache, rows = mxkv.empty_cache("mxfp4", 2, 4, 512), torch.zeros(3, 512, dtype=torch.bfloat16)
    slots = torch.zeros(3, dtype=torch.int32)
    seen: list[Any] = []

    def launcher(task: Any, factory: Any, arguments: str, device: torch.device) -> Any:
        assert len(arguments) == 14
        return lambda *values: seen.append((task, values))

    monkeypatch.setattr(latents, "kernel_of", launcher)
    spec = checks.store_spec(cache, rows, slots, "mxfp4", None, None, 1, None, "propagate")
    latents.StoreLaunch(spec)(cache, rows, slots, None, None, None)
    ((task, values),) = seen
    assert task.aligned
    assert task.index_bytes == 4
    grid, block, shared, *arguments = values
    assert (grid, block, shared) == (1, (16, 16), 0)
    assert arguments[:6] == [cache.data_ptr(), rows.data_ptr(), slots.data_ptr(), 0, 0, 0]
    assert arguments[6:] == [3, 8, 0, 4 * 272, 1024, 4, 0, 0]


# What stands beside Numba.


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"numba-cuda": "0.30.4", "numpy": "2.5.2"}, "numba-cuda 0.30.4 needs numpy.row_stack, which numpy 2.5.2"),
        ({"numba-cuda": "0.20.1", "numpy": "2.5.0rc1"}, "numba-cuda 0.20.1 needs numpy.row_stack"),
        ({"numba-cuda": "0.30.4", "numpy": "3.0"}, "numpy 3.0 does not have"),
        ({"numpy": "2.4.6"}, "numba-cuda is not installed"),
        ({"numba-cuda": "0.30.4", "numpy": "2.4.6"}, ""),
        ({"numba-cuda": "0.31.0", "numpy": "2.5.2"}, ""),
    ],
)
def test_versions_that_do_not_go_together_are_a_reason(
    fresh_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], reason: str
) -> None:
    """Told from versions alone, before anything is imported; a forced call raises with it."""
    from mxkv import devices, dispatch
    from mxkv.backends.numba_cuda import backend

    gpu = devices.Device(torch.device("cuda", 0), "a GPU", "sm_75", devices.TARGETS["cuda"], 40, 0, 0)
    monkeypatch.setattr(backend, "installed", versions.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "describe", lambda device: gpu)
    backend.unfit_versions.cache_clear()
    dispatch.forget_plans()
    try:
        found = mxkv.explain("store", device=torch.device("cuda", 0), backend="numba")
        verdict = found.verdicts["numba"]
        assert verdict.ok == (not reason), verdict
        assert reason in "".join(verdict.reasons)
        if "row_stack" in reason:
            assert verdict.hint == "pip install 'numpy<2.5'"
            with pytest.raises(ValueError, match=r"cannot run store of mxfp4: numba-cuda .* needs numpy.row_stack"):
                mxkv.plan(mxkv.spec("store", device=torch.device("cuda", 0), format="mxfp4"), "numba")
    finally:
        backend.unfit_versions.cache_clear()
        dispatch.forget_plans()


def test_what_numba_misses_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numba-cuda's first compilation fails where numpy lacks what it takes."""
    from numba import cuda

    from mxkv.backends.numba_cuda import compiler

    def broken(*arguments: Any, **options: Any) -> None:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(cuda, "compile_ptx", broken)
    with pytest.raises(compiler.CompilerError, match=r"row_stack' \(installed: numba .*, numba-cuda .*, numpy "):
        code()
    assert not folder.exists()
