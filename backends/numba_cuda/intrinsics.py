"""The primitives as LLVM intrinsics.

Sums and products are LLVM's with explicit rounding: plain ones the compiler would contract into fused multiply-adds.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda as cuda
from numba import types

try:
    from numba.cuda.extending import intrinsic
except ImportError:  # before numba-cuda had its own
    from numba.core.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_GLOBAL, _SHARED = 1, 3  # address spaces


def _pointer(builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(kind, _GLOBAL))


def _load(builder, address, kind, align):
    """A read of what no thread writes: the compiler may keep it, or do it once for two."""
    value = builder.load(_pointer(builder, address, kind))
    value.align = align
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _fetch(kind, result, align, widen=None):
    @intrinsic
    def fetch(typing, address):
        def generate(context, builder, signature, arguments):
            value = _load(builder, arguments[0], kind, align)
            return builder.zext(value, widen) if widen else value

        return result(types.int64), generate

    return fetch


def _put(kind, value_type, align, narrow=False):
    @intrinsic
    def put(typing, address, value):
        def generate(context, builder, signature, arguments):
            value = builder.trunc(arguments[1], kind) if narrow else arguments[1]
            builder.store(value, _pointer(builder, arguments[0], kind)).align = align
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return put


fetch8, fetch16 = _fetch(_I8, types.int32, 1, _I32), _fetch(_I16, types.int32, 2, _I32)
fetch32, fetch64 = _fetch(_I32, types.int32, 4), _fetch(_I64, types.int64, 8)
fetch_float = _fetch(_FLOAT, types.float32, 4)
put8, put16 = _put(_I8, types.int32, 1, True), _put(_I16, types.int32, 2, True)
put32, put64 = _put(_I32, types.int32, 4), _put(_I64, types.int64, 8)
put_float = _put(_FLOAT, types.float32, 4)


@intrinsic
def fetch128(typing, address):
    """Four int32."""

    def generate(context, builder, signature, arguments):
        value = _load(builder, arguments[0], ir.VectorType(_I32, 4), 16)
        parts = [builder.extract_element(value, ir.Constant(_I32, i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.int32, 4)(types.int64), generate


@intrinsic
def put128(typing, address, a, b, c, d):
    def generate(context, builder, signature, arguments):
        value = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for i in range(4):
            value = builder.insert_element(value, arguments[1 + i], ir.Constant(_I32, i))
        builder.store(value, _pointer(builder, arguments[0], ir.VectorType(_I32, 4))).align = 16
        return context.get_dummy_value()

    return types.void(types.int64, types.int32, types.int32, types.int32, types.int32), generate


def _cast(result):
    @intrinsic
    def cast(typing, x):
        return result(result), lambda context, builder, signature, arguments: arguments[0]

    return cast


i32, u32, i64 = _cast(types.int32), _cast(types.uint32), _cast(types.int64)


@intrinsic
def bits_of(typing, x):
    return types.int32(types.float32), lambda context, builder, signature, a: builder.bitcast(a[0], _I32)


@intrinsic
def float_of(typing, bits):
    return types.float32(types.int32), lambda context, builder, signature, a: builder.bitcast(a[0], _FLOAT)


def _arithmetic(name, count):
    """A function of ``count`` fp32 numbers that LLVM has under a name."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * count)
        return builder.call(builder.module.declare_intrinsic(f"llvm.nvvm.{name}", (), kind), arguments)

    if count == 1:

        @intrinsic
        def compute(typing, x):
            return types.float32(types.float32), generate
    elif count == 2:

        @intrinsic
        def compute(typing, x, y):
            return types.float32(types.float32, types.float32), generate
    else:

        @intrinsic
        def compute(typing, x, y, z):
            return types.float32(types.float32, types.float32, types.float32), generate

    return compute


add, mul, div = (_arithmetic(name, 2) for name in ("add.rn.f", "mul.rn.f", "div.rn.f"))
fma, sqrt = _arithmetic("fma.rn.f", 3), _arithmetic("sqrt.rn.f", 1)
# Below 2^-126 exp2 is 0: a weight that small beside the largest one's 1.
exp2, log2 = _arithmetic("ex2.approx.ftz.f", 1), _arithmetic("lg2.approx.f", 1)


@intrinsic
def float_of_half(typing, bits):
    def generate(context, builder, signature, arguments):
        half = builder.bitcast(builder.trunc(arguments[0], _I16), ir.HalfType())
        return builder.fpext(half, _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def half_of_float(typing, x):
    def generate(context, builder, signature, arguments):
        return builder.zext(builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), _I16), _I32)

    return types.int32(types.float32), generate


@intrinsic
def address_of(typing, array):
    """Where a block's shared memory starts, an address of its own space."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.addrspacecast(data, ir.PointerType(_I8, _SHARED)), _I64)

    return types.int64(array), generate


def _shared_pointer(builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(kind, _SHARED))


def _shared_fetch(kind, result, align):
    @intrinsic
    def fetch(typing, address):
        def generate(context, builder, signature, arguments):
            value = builder.load(_shared_pointer(builder, arguments[0], kind))
            value.align = align
            return value

        return result(types.int64), generate

    return fetch


def _shared_put(kind, value_type, align, narrow=False):
    @intrinsic
    def put(typing, address, value):
        def generate(context, builder, signature, arguments):
            value = builder.trunc(arguments[1], kind) if narrow else arguments[1]
            builder.store(value, _shared_pointer(builder, arguments[0], kind)).align = align
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return put


shared_fetch, shared_fetch64 = _shared_fetch(_FLOAT, types.float32, 4), _shared_fetch(_I64, types.int64, 8)
shared_put, shared_put64 = _shared_put(_FLOAT, types.float32, 4), _shared_put(_I64, types.int64, 8)
shared_put16 = _shared_put(_I16, types.int32, 2, True)


def _shared_fetch_some(count, element, result):
    """A function that fetches so many fp32, or int32, at once."""

    @intrinsic
    def fetch(typing, address):
        def generate(context, builder, signature, arguments):
            value = builder.load(_shared_pointer(builder, arguments[0], ir.VectorType(element, count)))
            value.align = 4 * count
            parts = [builder.extract_element(value, ir.Constant(_I32, i)) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(result, count)(types.int64), generate

    return fetch


shared_fetch_pair, shared_fetch128 = (
    _shared_fetch_some(2, _FLOAT, types.float32),
    _shared_fetch_some(4, _FLOAT, types.float32),
)
shared_fetch_words, shared_fetch_four_words = (
    _shared_fetch_some(2, _I32, types.int32), _shared_fetch_some(4, _I32, types.int32),
)  # fmt: skip


def _shared_put_four(element, value_type):
    @intrinsic
    def put(typing, address, a, b, c, d):
        kind = ir.VectorType(element, 4)

        def generate(context, builder, signature, arguments):
            value = ir.Constant(kind, ir.Undefined)
            for i in range(4):
                value = builder.insert_element(value, arguments[1 + i], ir.Constant(_I32, i))
            builder.store(value, _shared_pointer(builder, arguments[0], kind)).align = 16
            return context.get_dummy_value()

        return types.void(types.int64, value_type, value_type, value_type, value_type), generate

    return put


shared_put128, shared_put_words = _shared_put_four(_FLOAT, types.float32), _shared_put_four(_I32, types.int32)


@intrinsic
def truncated(typing, x):
    """A small fp32 as int32, toward zero."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def permuted(typing, a, b, selector):
    """Four of the eight bytes of two int32: the last three bits of each of the selector's last four nibbles say which;
    the fourth one is to be 0."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_I32, [_I32] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.nvvm.prmt", (), kind), arguments)

    return types.int32(types.int32, types.int32, types.int32), generate


@intrinsic
def anew(typing, x):
    """The same int32, of which the compiler does not know that: in a loop, it derives nothing from it ahead of it."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_I32, [_I32])
        return builder.call(ir.InlineAsm(kind, "mov.b32 $0, $1;", "=r,r", side_effect=True), arguments)

    return types.int32(types.int32), generate
