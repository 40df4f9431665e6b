"""The primitives' twins for Numba's simulator: an integer is Python's, fp32 a Python float that holds such a value."""

from __future__ import annotations

import ctypes
import math
import struct
import threading

import numpy as np


class _Local:
    """A thread's own arrays."""

    @staticmethod
    def array(count, kind):
        return np.empty(count, str(kind))


class cuda:
    """What device functions use of numba.cuda: the simulator knows that in a kernel's own module only."""

    local = _Local


def _reader(kind):
    def fetch(address):
        return kind.from_address(address).value

    return fetch


def _writer(kind):
    def put(address, value):
        kind.from_address(address).value = value

    return put


fetch8, fetch16, fetch32, fetch64 = map(_reader, (ctypes.c_uint8, ctypes.c_uint16, ctypes.c_int32, ctypes.c_int64))
put8, put16, put32, put64 = map(_writer, (ctypes.c_uint8, ctypes.c_uint16, ctypes.c_int32, ctypes.c_int64))
fetch_float = _reader(ctypes.c_float)
put_float = _writer(ctypes.c_float)


def fetch128(address):
    return tuple((ctypes.c_int32 * 4).from_address(address))


def put128(address, a, b, c, d):
    for i, value in enumerate((a, b, c, d)):
        put32(address + 4 * i, value)


def rounded(x):
    return ctypes.c_float(x).value


def i32(x):
    return (x + 0x80000000) % 0x100000000 - 0x80000000


def u32(x):
    return x & 0xFFFFFFFF


def i64(x):
    return int(x)


def bits_of(x):
    return struct.unpack("<i", struct.pack("<f", x))[0]


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def add(x, y):
    return rounded(x + y)


def mul(x, y):
    return rounded(x * y)


def fma(x, y, z):
    return rounded(x * y + z)  # the callers' products are exact, or they need no last bit


def div(x, y):
    with np.errstate(all="ignore"):
        return float(np.float32(x) / np.float32(y))


def sqrt(x):
    return rounded(math.sqrt(x)) if x >= 0 else math.nan


def exp2(x):
    return rounded(2.0 ** min(max(x, -1000.0), 1000.0)) if x == x else x


def log2(x):
    return rounded(math.log2(x)) if x > 0 else -math.inf if x == 0 else math.nan


def float_of_half(bits):
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def half_of_float(x):
    return int(np.float16(np.float32(x)).view(np.uint16))


def address_of(array):
    """Where a block's shared memory starts."""
    return array.ctypes.data


shared_fetch, shared_fetch64 = fetch_float, fetch64
shared_put, shared_put16, shared_put64, shared_put_words = put_float, put16, put64, put128


def shared_fetch128(address):
    return tuple((ctypes.c_float * 4).from_address(address))


def shared_fetch_pair(address):
    return tuple((ctypes.c_float * 2).from_address(address))


shared_fetch_four_words = fetch128


def shared_fetch_words(address):
    return tuple((ctypes.c_int32 * 2).from_address(address))


def shared_put128(address, a, b, c, d):
    for i, value in enumerate((a, b, c, d)):
        put_float(address + 4 * i, value)


def truncated(x):
    return int(x)


def barrier():
    threading.current_thread().syncthreads()


def shuffle_xor(x, mask):
    """Every thread of the block has to call it, so that a barrier can stand for a warp that runs in step."""
    thread = threading.current_thread()
    numbers = vars(thread._manager).setdefault("shuffled", {})
    numbers[thread.thread_id] = x
    thread.syncthreads()
    found = numbers[thread.thread_id ^ mask]
    thread.syncthreads()
    return found


def permuted(a, b, selector):
    source = struct.pack("<II", u32(a), u32(b))
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little", signed=True)


def anew(x):
    return x
