"""What a kernel's lines come down to: memory at an address, the bits of a number, arithmetic that is rounded once.

Kernels take addresses, not arrays: every dtype is then bytes, and an access is as wide as an alignment allows. Each
primitive is an LLVM intrinsic (:mod:`.intrinsics`) and, for Numba's simulator, a Python twin (:mod:`.simulated`).
"""

from __future__ import annotations

import importlib

from mxkv import settings

SIMULATED = settings.numba_simulated()

primitives = importlib.import_module(f"{__package__}.{'simulated' if SIMULATED else 'intrinsics'}")

cuda = primitives.cuda
fetch8, fetch16, fetch32, fetch64, fetch128, fetch_float = (
    primitives.fetch8, primitives.fetch16, primitives.fetch32, primitives.fetch64, primitives.fetch128,
    primitives.fetch_float,
)  # fmt: skip
put8, put16, put32, put64, put128, put_float = (
    primitives.put8, primitives.put16, primitives.put32, primitives.put64, primitives.put128, primitives.put_float,
)  # fmt: skip
i32, u32, i64, bits_of, float_of = (
    primitives.i32, primitives.u32, primitives.i64, primitives.bits_of, primitives.float_of,
)  # fmt: skip
float_of_half, half_of_float, truncated = primitives.float_of_half, primitives.half_of_float, primitives.truncated
add, mul, div, fma, sqrt, exp2, log2 = (
    primitives.add, primitives.mul, primitives.div, primitives.fma, primitives.sqrt, primitives.exp2, primitives.log2,
)  # fmt: skip

address_of, shared_fetch, shared_fetch64, shared_fetch128 = (
    primitives.address_of, primitives.shared_fetch, primitives.shared_fetch64, primitives.shared_fetch128,
)  # fmt: skip
shared_fetch_pair, shared_fetch_words, shared_fetch_four_words = (
    primitives.shared_fetch_pair, primitives.shared_fetch_words, primitives.shared_fetch_four_words,
)  # fmt: skip
shared_put, shared_put16, shared_put64, shared_put128, shared_put_words = (
    primitives.shared_put, primitives.shared_put16, primitives.shared_put64, primitives.shared_put128,
    primitives.shared_put_words,
)  # fmt: skip
anew, permuted = primitives.anew, primitives.permuted


def device(function):
    """A function that kernels call. The simulator runs it as it is, which is faster than through its own wrapper."""
    return function if SIMULATED else cuda.jit(device=True)(function)


def unrolled(step, count):
    """A function that calls ``step(i, *arguments)`` for each i below a count: written out, where the compiler would
    leave a loop as it is, and keep the arrays that it counts through in memory."""

    def calls(first, number):
        if number == 1:

            @device
            def run(*arguments):
                step(first, *arguments)

        else:
            before, behind = calls(first, number // 2), calls(first + number // 2, number - number // 2)

            @device
            def run(*arguments):
                before(*arguments)
                behind(*arguments)

        return run

    return calls(0, count)


@device
def sub(x, y):
    return add(x, float_of(bits_of(y) ^ -0x80000000))


@device
def fetch_index(address, SIZE):
    """An int32 or int64 (SIZE bytes) as int64."""
    if SIZE == 4:
        return i64(fetch32(address))
    return fetch64(address)


if SIMULATED:
    barrier, shuffle_xor = primitives.barrier, primitives.shuffle_xor
else:

    @device
    def barrier():
        """Wait for the block's other threads. (The simulator knows cuda.syncthreads in a kernel's own module only.)"""
        cuda.syncthreads()

    @device
    def shuffle_xor(x, mask):
        """The fp32 of the lane whose number differs in the bits of a mask; all lanes of the warp call it."""
        return cuda.shfl_xor_sync(0xFFFFFFFF, x, mask)
