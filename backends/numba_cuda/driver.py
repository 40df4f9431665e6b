"""Launches compiled kernels through the CUDA driver: on torch's current stream, in the context of the tensors' device.

(Numba's own launches look at each argument's type, warn of small grids and make contexts of their own; these take a
few microseconds.)
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from mxkv.backends.numba_cuda import compiler

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_SHARED_WITHOUT_ASKING = 48 << 10
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
_LOG_BYTES = 8192
_KINDS = {"i": ctypes.c_int64, "f": ctypes.c_float}

_lock = threading.Lock()


class DriverError(RuntimeError):
    """The CUDA driver refused something; the message says what and why."""


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver, which torch has loaded and started.

    Raises:
        DriverError: There is none.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"the CUDA driver {name} cannot be loaded: {error}") from None
    pointer, handle = ctypes.c_void_p, ctypes.c_void_p
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(handle), ctypes.c_int]
    library.cuCtxGetCurrent.argtypes = [ctypes.POINTER(handle)]
    library.cuCtxPushCurrent_v2.argtypes = [handle]
    library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(handle)]
    library.cuModuleLoadDataEx.argtypes = [
        ctypes.POINTER(handle), ctypes.c_char_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(pointer)
    ]  # fmt: skip
    library.cuModuleGetFunction.argtypes = [ctypes.POINTER(handle), handle, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [handle, ctypes.c_int, ctypes.c_int]
    library.cuLaunchKernel.argtypes = [handle, *[ctypes.c_uint] * 7, handle, ctypes.POINTER(pointer), pointer]
    return library


def _check(result: int, what: str, log: str = "") -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise DriverError(f"{what} failed with CUDA error {result}: {reason}" + (f"\n{log}" if log else ""))


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """A device's primary context: torch's. It is held as long as the process lives, as torch holds it."""
    torch.cuda.init()
    context = ctypes.c_void_p()
    # Both torch and the driver count what CUDA_VISIBLE_DEVICES leaves, in the same order.
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "taking the device's context")
    return context


class _entered:
    """Makes a context the current one, where it is not."""

    def __init__(self, context: ctypes.c_void_p) -> None:
        self.context = context
        self.pushed = False

    def __enter__(self) -> None:
        current = ctypes.c_void_p()
        _check(_driver().cuCtxGetCurrent(ctypes.byref(current)), "asking for the current context")
        if current.value != self.context.value:
            _check(_driver().cuCtxPushCurrent_v2(self.context), "entering the device's context")
            self.pushed = True

    def __exit__(self, *error: object) -> None:
        if self.pushed:
            _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class Kernel:
    """One kernel on one device, compiled and loaded.

    Args:
        task: The kernel's constants.
        factory: From them to the kernel.
        arguments: Each of its arguments: "i" int64, "f" fp32, a digit (of base 36) for a tuple of so many int64.
        device: Where it runs.

    Raises:
        DriverError: The driver does not take it.
        ImportError, OSError: Numba finds no NVVM; the message says what it looked for.
    """

    def __init__(
        self, task: Any, factory: Callable[[Any], Callable[..., None]], arguments: str, device: torch.device
    ) -> None:
        self.stream_of = functools.partial(torch.cuda.current_stream, device)
        index = torch.cuda.current_device() if device.index is None else device.index
        code = compiler.code_of(task, factory, arguments, torch.cuda.get_device_capability(index))
        self.context = _context(index)
        self.most_shared = _SHARED_WITHOUT_ASKING
        flat = compiler.flat(arguments)
        self.nested = any(compiler.tuple_size(kind) for kind in arguments)
        fields = [(f"a{i}", _KINDS[letter]) for i, letter in enumerate(flat)]
        self.values = type("Values", (ctypes.Structure,), {"_fields_": fields})
        self.offsets = [getattr(self.values, name).offset for name, _ in fields]
        self.pointers = ctypes.c_void_p * len(fields)
        self.function = ctypes.c_void_p()
        with _entered(self.context), _lock:
            self.module = _loaded(code.ptx)
            name = code.entry.encode()
            found = _driver().cuModuleGetFunction(ctypes.byref(self.function), self.module, name)
            _check(found, f"looking for the kernel {code.entry}")

    def __call__(self, grid: int, block: tuple[int, int], shared: int, *arguments: Any) -> None:
        """Launch on torch's current stream of the kernel's device.

        Args:
            grid: Blocks.
            block: A block's threads, [x, y].
            shared: Bytes of shared memory of a block.
            *arguments: The kernel's.
        """
        if self.nested:
            flat: list[Any] = []
            for value in arguments:
                flat.extend(value) if isinstance(value, tuple) else flat.append(value)
            arguments = tuple(flat)
        values = self.values(*arguments)
        base = ctypes.addressof(values)
        pointers = self.pointers(*[base + offset for offset in self.offsets])
        with _entered(self.context):
            if shared > self.most_shared:
                asked = _driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared)
                _check(asked, f"asking for {shared} bytes of shared memory")
                # As many blocks as the registers allow are to find room: the first-level cache gets what is left.
                _driver().cuFuncSetAttribute(self.function, _SHARED_CARVEOUT, 100)
                self.most_shared = shared
            launched = _driver().cuLaunchKernel(
                self.function, grid, 1, 1, block[0], block[1], 1, shared, self.stream_of().cuda_stream, pointers, None
            )
            _check(launched, f"launching {grid} blocks of {math.prod(block)} threads")


def _loaded(ptx: str) -> ctypes.c_void_p:
    """A module of the current context."""
    module = ctypes.c_void_p()
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    result = _driver().cuModuleLoadDataEx(ctypes.byref(module), ptx.encode(), 2, options, values)
    _check(result, "loading a kernel", log.value.decode(errors="replace"))
    return module
