"""Attention in several splits: what merges them.

grid      one block for (query, head)
reads     a thread has four neighbouring columns (one, where a head is no multiple of four), and reads them of four
          splits at a time; the first of them are under way while the splits' logarithms are looked at
"""

from __future__ import annotations

from numba import cuda, types

from mxkv.backends.numba_cuda.attend_sums import (
    LN2,
    MINUS_INFINITY,
    Attention,
    columns_writer,
    divider,
    larger,
    logarithm_of,
)
from mxkv.backends.numba_cuda.primitives import (
    device,
    div,
    exp2,
    fetch128,
    fetch_float,
    float_of,
    fma,
    i32,
    i64,
    mul,
    put_float,
    sub,
    unrolled,
)
from mxkv.backends.numba_cuda.rows import ELEMENT_BYTES
from mxkv.backends.numba_cuda.shared import VECTOR

_SPLITS_UNDER_WAY = 4


def reduce_kernel(task: Attention):
    """The kernel that merges a task's splits, as a Python function: sums [queries, heads, splits, value_dim] and
    logarithms [queries, heads, splits]."""
    heads, value_dim, threads, divisor_of = task.heads, task.value_dim, task.threads, divider(task.sinked)
    width = VECTOR if value_dim % VECTOR == 0 else 1
    all_values, split_bytes, out_bytes = _SPLITS_UNDER_WAY * width, 4 * value_dim, ELEMENT_BYTES[task.dtype]
    write_columns = columns_writer(width, value_dim, task.dtype)

    @device
    def fetch_split(i, x, partial, split, splits, at):
        address = partial + min(split + i, splits - 1) * split_bytes + 4 * at
        if width == VECTOR:
            a, b, c, d = fetch128(address)
            x[4 * i], x[4 * i + 1] = float_of(a), float_of(b)
            x[4 * i + 2], x[4 * i + 3] = float_of(c), float_of(d)
        else:
            x[i] = fetch_float(address)

    @device
    def add_split(i, sums, x, logs, split, splits, top):
        if split + i < splits:
            weight = exp2(sub(fetch_float(logs + 4 * (split + i)), top))
            for j in range(width):
                sums[j] = fma(x[i * width + j], weight, sums[j])

    fetch_splits, add_splits = unrolled(fetch_split, _SPLITS_UNDER_WAY), unrolled(add_split, _SPLITS_UNDER_WAY)

    def kernel(partial, logs, out, lse, sink, splits):
        x = cuda.local.array(all_values, types.float32)
        sums = cuda.local.array(width, types.float32)
        block = i64(cuda.blockIdx.x)
        query = block // heads
        head = block - query * heads
        logs += 4 * block * splits
        partial += block * splits * split_bytes
        at = i32(width * cuda.threadIdx.x)
        fetch_splits(x, partial, 0, splits, min(at, value_dim - width))
        top, total = float_of(MINUS_INFINITY), float_of(0)
        for split in range(splits):
            top = larger(fetch_float(logs + 4 * split), top)
        if top == float_of(MINUS_INFINITY):
            top = float_of(0)
        for split in range(splits):
            total += exp2(sub(fetch_float(logs + 4 * split), top))
        factor = div(float_of(0x3F800000), divisor_of(top, total, sink, head))
        while at < value_dim:
            for j in range(width):
                sums[j] = 0
            split = i64(0)
            while split < splits:
                add_splits(sums, x, logs, split, splits, top)
                split += _SPLITS_UNDER_WAY
                if split < splits:
                    fetch_splits(x, partial, split, splits, at)
            write_columns(out[0] + query * out[1] + head * out[2] + at * out_bytes, sums, 0, factor, value_dim - at)
            at = i32(at + width * threads)
            if at < value_dim:
                fetch_splits(x, partial, 0, splits, at)
        if lse != 0 and cuda.threadIdx.x == 0:
            put_float(lse + 4 * block, mul(logarithm_of(top, total), LN2))

    return kernel
