"""Number codes inside kernels. Values come and go as pairs: the even and the odd element of a row.

Each function that holds inline assembly has a portable twin beside it; a :class:`Paths` says which is taken. The
portable twins use integer and fp32 arithmetic only, so they are exact in the interpreter and on every target.
"""

from __future__ import annotations

import dataclasses
import functools

import triton
import triton.language as tl

from mxkv import settings
from mxkv.devices import Target


@dataclasses.dataclass(frozen=True)
class Paths:
    """Which instructions a target has.

    Attributes:
        pairs: Arithmetic on two bf16 in one register: "full" (sm_90), "fma" (sm_80), "none".
        e4m3: Conversion to and from OCP E4M3: "cvt" (sm_89) or "software".
        scaled_reads: Whether gfx950's converters read FP4 and FP8. (They would scale too; but what they do at the ends
            of the range is not the oracle's to say: loads give them a scale of 1, under which every code is exact.)
        interpreted: Whether Triton's interpreter runs the kernels. It multiplies matrices of bf16 as if they were
            integers, and has no range over what a kernel computes.
        register: What inline assembly calls a vector register.
    """

    pairs: str
    e4m3: str
    scaled_reads: bool = False
    interpreted: bool = False
    register: str = "r"

    @property
    def nothing(self) -> str:
        """The constraints of an empty assembly that gives back what it takes."""
        return f"={self.register},0"


@functools.cache
def paths_of(target: Target) -> Paths:
    """The instructions that a target's kernels use; none in the interpreter."""
    if settings.triton_interpret():
        return Paths(pairs="none", e4m3="software", interpreted=True)
    if target.vendor != "nvidia":
        return Paths(pairs="none", e4m3="software", scaled_reads=target.fp4_unpack, register="v")
    return Paths(pairs=target.bf16_pairs, e4m3="cvt" if target.fp8 == "e4nv" else "software")


# Small floats: (smallest exponent, mantissa bits, largest value).
E4M3_MIN_EXP = tl.constexpr(-6)
E4M3_MANTISSA = tl.constexpr(3)
E4M3_MAX = tl.constexpr(448.0)
BF16_NAN = tl.constexpr(0x7FC0)
BF16_MAX_BITS = tl.constexpr(0x7F7F)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_small(x, MIN_EXP: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr):
    """The magnitude code of finite fp32: nearest, ties to even, saturating.

    Adding 2**(e + 23 - MANTISSA) to a number of exponent e makes the adder round it to the code's step in that binade.
    """
    y = tl.minimum(tl.abs(x), MAX)
    exponent = bits_of(tl.maximum(y, 2.0**MIN_EXP)) & 0x7F800000
    magic = exponent + ((23 - MANTISSA) << 23)
    steps = bits_of(y + float_of(magic)) - magic
    return steps + (exponent >> (23 - MANTISSA)) - ((127 + MIN_EXP) << MANTISSA)


@triton.jit
def sign_of(x, BIT: tl.constexpr):
    """The sign of fp32, moved to a bit."""
    return (bits_of(x) >> (31 - BIT)) & (1 << BIT)


@triton.jit
def _e2m1_steps(x, SATURATE: tl.constexpr):
    """An integer whose last three bits are the magnitude code of finite fp32, the next five zero.

    Each binade has a grid of its own: steps of 1/2 below 2, of 1 below 4, of 2 above. Rounding onto a grid outside of
    its binade lands on a code too high, so the least of the three is right. Adding 2**23 rounds to an integer.
    """
    a = tl.abs(x)
    steps = bits_of(tl.fma(a, 2.0, 8388608.0))
    steps = tl.minimum(steps, bits_of(tl.fma(a, 1.0, 8388608.0 + 2.0)))
    steps = tl.minimum(steps, bits_of(tl.fma(a, 0.5, 8388608.0 + 4.0)))
    return tl.minimum(steps, 0x4B000007) if SATURATE else steps


@triton.jit
def encode_e2m1_pair(x, y, signed_x, signed_y, SATURATE: tl.constexpr):
    """Two finite fp32 to two E2M1 codes in the low byte of an int32, x in the low nibble; bits above are arbitrary.

    The signs are those of signed_x and signed_y. Without SATURATE no magnitude is above 6.
    """
    codes = _e2m1_steps(x, SATURATE) + (_e2m1_steps(y, SATURATE) << 4)
    return codes | sign_of(signed_x, 3) | sign_of(signed_y, 7)


@triton.jit
def encode_e4m3(x):
    """Finite fp32 to E4M3 bytes, in software."""
    return encode_small(x, E4M3_MIN_EXP, E4M3_MANTISSA, E4M3_MAX) | sign_of(x, 7)


@triton.jit
def encode_e4m3_pair(x, y, PATHS: tl.constexpr):
    """Two finite fp32 to two E4M3 bytes in the low half of an int32, x in the lower byte."""
    if PATHS.e4m3 == "cvt":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
            "=r,f,f", [x, y], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return encode_e4m3(x) | (encode_e4m3(y) << 8)


@triton.jit
def encode_bf16(x):
    """fp32 to bf16 bits: nearest even, NaN is 0x7fc0."""
    bits = bits_of(x)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x != x, BF16_NAN, rounded)


@triton.jit
def decode_e2m1(code):
    """E2M1 codes to fp32: the code's bits, put where fp32 has them, are the value times 2**-126."""
    return float_of(((code & 7) << 22) | ((code & 8) << 28)) * (2.0**126)


@triton.jit
def decode_e4m3(code):
    """E4M3 bytes to fp32: the code's bits, put where fp32 has them, are the value times 2**-120."""
    value = float_of(((code & 0x7F) << 20) | ((code & 0x80) << 24)) * (2.0**120)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e8m0(byte):
    """E8M0 bytes (int32) to fp32."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, float("nan"), float_of(bits))


@triton.jit
def e8m0_scale(amax_bits, TASK: tl.constexpr):
    """The E8M0 byte (int32) of a group, from the bits of its largest magnitude (fp32): no logarithm, no division."""
    byte = (amax_bits >> 23) - TASK.top_exponent + ((amax_bits & 0x7FFFFF) > TASK.top_mantissa).to(tl.int32)
    return tl.where(amax_bits == 0, 127, tl.maximum(byte, 0))


@triton.jit
def _max_u16x2(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _max_i32(a, b):
    return tl.maximum(a, b)


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, y):
    """The largest magnitude in two tiles of fp32 [.., .., n], over the last axis, as bits: NaN's are the largest."""
    largest = _max_or_nan(tl.abs(x), tl.abs(y))
    return bits_of(tl.reduce(largest, 2, _max_or_nan)) & 0x7FFFFFFF


@triton.jit
def largest_half(words, PATHS: tl.constexpr):
    """The largest magnitude in the halves (bf16) of words [.., .., n], over the last axis, as bits of fp32."""
    if PATHS.pairs == "full":
        both = tl.reduce(words & 0x7FFF7FFF, 2, _max_u16x2)
        return tl.maximum(both << 16, both) & -65536  # what is below the larger half does not matter
    else:
        return tl.reduce(tl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF), 2, _max_i32) << 16


@triton.jit
def _twice(half):
    return half | (half << 16)


@triton.jit
def _upper_twice(bits):
    """The upper half of a positive fp32 whose lower half is zero, twice."""
    return bits | (bits >> 16)


@triton.jit
def spread(of_groups, words):
    """A number of each group, for each of the group's words."""
    return tl.broadcast_to(of_groups[:, :, None], words.shape)


@triton.constexpr_function
def _encode_e4m3_assembly(pairs):
    """PTX from two words of two bf16, times a power of two, to four E4M3 bytes; see :func:`encode_e4m3_words`."""
    lines = [".reg .b32 y, x, none;", ".reg .b16 h<2>;", "mov.b32 none, 0x80008000;"]
    for i in range(2):
        factor = f"${3 + i}"
        product = f"mul.rn.bf16x2 y, ${1 + i}, {factor};"
        if pairs != "full":
            product = f"fma.rn.bf16x2 y, ${1 + i}, {factor}, none;"
        lines += [product, "shl.b32 x, y, 16;", "and.b32 y, y, 0xffff0000;", f"cvt.rn.satfinite.e4m3x2.f32 h{i}, y, x;"]
    return "{ " + " ".join([*lines, "mov.b32 y, {h0, h1};", "and.b32 $0, y, $5;"]) + " }"


@triton.jit
def encode_e4m3_words(words, byte, lost, PATHS: tl.constexpr):
    """Two bf16 in a word, divided by their group's E8M0 scale, to two E4M3 bytes; lost groups give zeros.

    Two words are taken together; they are of one group. The packed multiply is exact, but for products below bf16's
    normal range, which are zero as E4M3 however they round.
    """
    reciprocal = spread(power_reciprocal(byte), words)
    keep = spread(tl.where(lost, 0, -1), words)
    return tl.inline_asm_elementwise(
        _encode_e4m3_assembly(PATHS.pairs), "=r,r,r,r,r,r,r", [words, reciprocal, keep],
        dtype=tl.uint16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.constexpr_function
def _encode_e2m1_assembly(pairs, divide):
    """PTX from four words of two bf16 to four bytes of two E2M1 codes; see :func:`encode_e2m1_words`."""
    least = "min.u16x2" if pairs == "full" else "min.bf16x2"  # as integers, three at once on sm_90
    lines = [
        ".reg .b32 a<4>, t<4>, u<4>, v<4>, c0, c1, c2;",
        "mov.b32 c0, 0x42004200;",  # 32: sums in [32, 64) have steps of 1/4, so the last bits are the code
        "mov.b32 c1, 0x42024202;",  # 32 + 2/4
        "mov.b32 c2, 0x42044204;",  # 32 + 4/4
    ]
    if divide:
        lines += [
            ".reg .b32 p<3>, none, most;",
            "mov.b32 p0, 0x3f003f00;",  # 1/2
            "mov.b32 p1, 0x3e803e80;",  # 1/4
            "mov.b32 p2, 0x3e003e00;",  # 1/8
            "mov.b32 none, 0x80008000;",
            "mov.b32 most, 0x42074207;",
        ]
    for i in range(4):
        lines.append(f"and.b32 a{i}, ${1 + i}, 0x7fff7fff;")
        parts = ("p0", "p1", "p2") if divide else (f"${5 + i}", f"${9 + i}", f"${13 + i}")
        if divide:  # fma with -0 is a multiply, which sm_80 lacks
            lines += [f"fma.rn.bf16x2 t{i}, a{i}, ${9 + i}, none;", f"fma.rn.bf16x2 a{i}, a{i}, ${5 + i}, t{i};"]
        lines += [
            f"fma.rn.bf16x2 {r}{i}, a{i}, {part}, c{j};" for j, (r, part) in enumerate(zip("tuv", parts, strict=True))
        ]
        lines += [f"{least} t{i}, t{i}, u{i};", f"{least} t{i}, t{i}, v{i};"]
        if divide:
            lines.append(f"{least} t{i}, t{i}, most;")
    keep = "$13" if divide else "$17"
    lines += [
        # A thread may have fewer than four words. What is in the others' place must not reach them: it stands above.
        "prmt.b32 u0, t0, t1, 0x6420;",  # low bytes: the codes, even and odd, of word 0, then of word 1
        "prmt.b32 u1, t2, t3, 0x6420;",
        "prmt.b32 t0, $1, $2, 0x7531;",  # high bytes, in the same order: the signs
        "prmt.b32 t1, $3, $4, 0x7531;",
        "shl.b32 u0, u0, 4;",
        "shl.b32 u1, u1, 4;",
        "and.b32 t0, t0, 0x80808080;",
        "and.b32 t1, t1, 0x80808080;",
        "or.b32 u0, u0, t0;",
        "or.b32 u1, u1, t1;",
        "mul.hi.u32 u0, u0, 0x11000000;",  # down by four bits and by eight: words' codes in bytes 0 and 2
        "mul.hi.u32 u1, u1, 0x11000000;",
        "prmt.b32 t0, u0, u1, 0x6420;",
        f"and.b32 $0, t0, {keep};",
    ]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def encode_e2m1_words(words, byte, lost, SCALE: tl.constexpr, PATHS: tl.constexpr):
    """Two bf16 in a word, divided by their group's scale, to two E2M1 codes in a byte.

    As :func:`encode_e2m1` does it, on both halves at once; four words are taken together, which leaves their bytes in
    one register. Groups that are lost give zeros, whatever the words hold; the four words are of one group.

    A power of two scales inside of the three sums. An E4M3 scale divides first: 1 / scale is taken as a sum of two
    bf16, which leaves the quotient an error below 2**-16 of itself before it is rounded to bf16. That is harmless:
    unless the quotient is a tie of E2M1, it differs from every tie by more than 2**-8 of it (a bf16 has 8 significant
    bits, a scale 4, a tie 3), so bf16 rounding makes a near-tie a tie and nothing else one. Tested over all scales and
    all bf16.

    Args:
        words: [.., .., n].
        byte: The groups' scale bytes (int32) [.., ..].
        lost: Whether a group holds what its record cannot.
        SCALE: "e8m0" or "e4m3".
        PATHS: The target's instructions.
    """
    keep = spread(tl.where(lost, 0, -1), words)
    if SCALE == "e8m0":
        half = (253 - byte) << 23  # of 1 / scale, as fp32, whose upper half is bf16; byte is at most 252
        quarter, eighth = bits_of(float_of(half) * 0.5), bits_of(float_of(half) * 0.25)
        return tl.inline_asm_elementwise(
            _encode_e2m1_assembly(PATHS.pairs, False), "=r" + ",r" * 20,
            [words, spread(_upper_twice(half), words), spread(_upper_twice(quarter), words),
             spread(_upper_twice(eighth), words), keep],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        high, low = split_reciprocal(decode_e4m3_scale(byte, PATHS))
        return tl.inline_asm_elementwise(
            _encode_e2m1_assembly(PATHS.pairs, True), "=r" + ",r" * 16,
            [words, spread(high, words), spread(low, words), keep],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def split_reciprocal(scale):
    """1 / scale (fp32) as a sum of two bf16, each held twice in a word."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 whole, high, low;
        rcp.approx.ftz.f32 whole, $2;
        cvt.rn.bf16x2.f32 $0, whole, whole;
        and.b32 high, $0, 0xffff0000;
        sub.rn.f32 low, whole, high;
        cvt.rn.bf16x2.f32 $1, low, low;
        }""",
        "=&r,=r,f", [scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def quotients_for_e2m1(x, y, scale, PATHS: tl.constexpr):
    """x / scale and y / scale, fp32, so close that E2M1 of them is that of the correctly rounded quotients.

    1 / scale is taken in two parts, the first of which need not be rounded right. A quotient then errs by little more
    than half of its last bit, and is exact where it is a tie of E2M1. The correctly rounded quotient is on the same
    side of every tie: a scale has 4 significant bits and a tie 3, so a quotient that is no tie is never nearer to half
    a bit beside a tie than 1/32 of that bit. Tested over all scales, around all ties. The sign of zero is lost.

    Args:
        x, y: fp32 tiles.
        scale: fp32 of E4M3, of a shape that spreads to theirs.
        PATHS: The target's instructions.
    """
    if PATHS.pairs != "none":
        high = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        low = tl.broadcast_to(tl.fma(-scale, high, tl.full(scale.shape, 1.0, tl.float32)) * high, x.shape)
        high = tl.broadcast_to(high, x.shape)
        return tl.fma(x, high, x * low), tl.fma(y, high, y * low)
    else:
        scale = tl.broadcast_to(scale, x.shape)
        return tl.math.div_rn(x, scale), tl.math.div_rn(y, scale)


@triton.jit
def e4m3_scale(amax, TASK: tl.constexpr, PATHS: tl.constexpr):
    """The E4M3 byte of a group's scale: fp32 amax / element_max, rounded twice as the oracle rounds it.

    1 / element_max is taken in two parts, so that the product errs by hardly more than half of its last bit. Where amax
    is element_max times a tie of E4M3, which is exact, it is that tie. Any other amax stays on its side of the tie:
    element_max has at most 4 significant bits, so the quotients next to the tie are more than half a last bit away.
    Tested around all ties, and over all bf16.
    """
    if PATHS.interpreted:  # its fma rounds twice
        scale = tl.math.div_rn(amax, tl.full(amax.shape, TASK.element_max, tl.float32))
    else:
        scale = tl.fma(amax, TASK.element_inverse[0], amax * TASK.element_inverse[1])
    scale = tl.maximum(scale, 2.0**-9)
    if PATHS.e4m3 == "cvt":
        return encode_e4m3_pair(scale, tl.full(scale.shape, 0.0, tl.float32), PATHS)
    else:
        return encode_e4m3(scale)


@triton.jit
def decode_e4m3_scale(byte, PATHS: tl.constexpr):
    """The E4M3 byte of a scale to fp32."""
    if PATHS.e4m3 == "cvt":
        x, _y = decode_e4m3_pair(byte, PATHS)
        return x
    else:
        return decode_e4m3(byte)


@triton.jit
def canonical_bf16(words):
    """Two bf16 in a word with every NaN made 0x7fc0: adding 0x7f to a half carries into its sign bit for NaN alone."""
    nan = (((words & 0x7FFF7FFF) + 0x007F007F) >> 15) & 0x00010001
    mask = (nan << 16) - nan  # 0xffff in each half that is NaN
    return (words & ~mask) | (mask & 0x7FC07FC0)


@triton.jit
def power_reciprocal(byte):
    """2**(127 - byte) as a bf16, held twice in a word; byte is 0 to 253."""
    return _twice((254 - byte) << 7)


@triton.jit
def bf16_pair(x, y, PATHS: tl.constexpr):
    """Two fp32 to two bf16 in a word, x in the low half; some NaN for NaN."""
    if PATHS.pairs != "none":
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return encode_bf16(x) | (encode_bf16(y) << 16)


# Upper halves of two fp32, the last bit of each set where its lower half is not zero; the last operand is 0x00010001.
ODD_ASSEMBLY = tl.constexpr("""{
    .reg .b32 kept, lost;
    prmt.b32 kept, $1, $2, 0x7632;
    prmt.b32 lost, $1, $2, 0x5410;
    min.u16x2 lost, lost, $3;
    or.b32 $0, kept, lost;
}""")


@triton.jit
def odd_pair(x, y, PATHS: tl.constexpr):
    """Two fp32 to two bf16 in a word, x in the low half: cut off, and made odd where that loses anything.

    A group encoded from such numbers has the bytes that it has from the fp32. All that is asked of a number is on which
    side of some bounds it is, or whether it is one: ties of E2M1 and E4M3 times a scale, ties of E4M3 times 6, the
    largest that is finite. They have at most 7 significant bits, so they are even bf16, and none is between a number
    and the odd bf16 beside it: unless it is among the subnormal bf16, where ties of E4M3 may be under the scales of
    groups of less than 2**-115. Tested around all bounds. NaN stays NaN.
    """
    if PATHS.pairs == "full":
        return tl.inline_asm_elementwise(
            ODD_ASSEMBLY, "=r,f,f,r", [x, y, tl.full(x.shape, 0x00010001, tl.int32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = bits_of(x), bits_of(y)
        low = low | ((low + 0xFFFF) & 0x10000)
        high = high | ((high + 0xFFFF) & 0x10000)
        return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def fp16_pair(x, y):
    """Two fp32 to two fp16 in a word, x in the low half."""
    low = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _two_floats(both):
    """The halves of an int64 as fp32."""
    return float_of(both.to(tl.int32)), float_of((both >> 32).to(tl.int32))


@triton.jit
def decode_e2m1_pair(values, PATHS: tl.constexpr):
    """Two E2M1 codes in the low byte of an int32, the even one in the low nibble, to two fp32."""
    if PATHS.scaled_reads:
        return _two_floats(
            tl.inline_asm_elementwise(
                "v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0", "=v,v", [values], dtype=tl.int64, is_pure=True, pack=1
            )
        )
    else:
        return decode_e2m1(values & 15), decode_e2m1(values >> 4)


@triton.jit
def decode_e4m3_pair(values, PATHS: tl.constexpr):
    """Two E4M3 bytes in the low half of an int32 to two fp32."""
    if PATHS.e4m3 == "cvt":
        both = tl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }",
            "=r,r", [values], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        x = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return x, ((both >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PATHS.scaled_reads:
        return _two_floats(
            tl.inline_asm_elementwise(
                "v_cvt_scalef32_pk_f32_fp8 $0, $1, 1.0", "=v,v", [values], dtype=tl.int64, is_pure=True, pack=1
            )
        )
    else:
        return decode_e4m3(values & 0xFF), decode_e4m3((values >> 8) & 0xFF)


@triton.jit
def saturate(x, TASK: tl.constexpr, KEEP_INFINITE: tl.constexpr):
    """fp32 with finite values inside the range of the dtype that comes out; NaN stays."""
    inside = tl.minimum(tl.maximum(x, -TASK.dtype_max), TASK.dtype_max)
    kept = x != x
    if KEEP_INFINITE:
        kept = kept | (tl.abs(x) == float("inf"))
    return tl.where(kept, x, inside)


@triton.constexpr_function
def _decode_e2m1_assembly(pairs, saturate):
    """PTX from two bytes (in 16 bits each) of two E2M1 codes, and a scale for each, to two words of two bf16."""
    lines = [
        ".reg .b32 w, u, odd, big, none, top, bottom;",
        "mov.b32 big, 0x7e807e80;",
        "mov.b32 none, 0x80008000;",
        "mov.b32 top, 0x7f7f7f7f;",
        "mov.b32 bottom, 0xff7fff7f;",
        "shl.b32 odd, $2, 4;",
    ]
    for i in range(2):
        lines += [
            f"prmt.b32 w, $2, odd, 0x{2 * i}{2 * i}{2 * i + 4}{2 * i + 4};",  # codes in each half's upper four bits
            "shr.u32 u, w, 6;",
            "and.b32 u, u, 0x01c001c0;",
            "and.b32 w, w, 0x80008000;",
            "or.b32 w, w, u;",
        ]
        for factor in ("big", f"${3 + i}"):
            lines.append(
                f"mul.rn.bf16x2 w, w, {factor};" if pairs == "full" else f"fma.rn.bf16x2 w, w, {factor}, none;"
            )
        if saturate and pairs == "full":
            lines.append("min.NaN.xorsign.abs.bf16x2 w, w, top;")
        elif saturate:
            lines += ["min.NaN.bf16x2 w, w, top;", "max.NaN.bf16x2 w, w, bottom;"]
        lines.append(f"mov.b32 ${i}, w;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def decode_e2m1_words(values, scale, PATHS: tl.constexpr, SATURATE: tl.constexpr):
    """Two E2M1 codes in a byte, times a scale (a bf16 held twice in a word), to two bf16 in a word.

    A code's bits, put where bf16 has them, are the value times 2**-126; two multiplications give the value times the
    scale. Bytes come widened to 16 bits: Triton then changes their layout while they are bytes, not as words.
    """
    return tl.inline_asm_elementwise(
        _decode_e2m1_assembly(PATHS.pairs, SATURATE), "=&r,=&r,r,r,r", [values.to(tl.int16), scale],
        dtype=tl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def saturate_words(words, PATHS: tl.constexpr):
    """Two bf16 in a word, with infinities made the largest finite value; NaN stays."""
    if PATHS.pairs == "full":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 top; mov.b32 top, 0x7f7f7f7f; min.NaN.xorsign.abs.bf16x2 $0, $1, top; }",
            "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, top, bottom;
            mov.b32 top, 0x7f7f7f7f;
            mov.b32 bottom, 0xff7fff7f;
            min.NaN.bf16x2 t, $1, top;
            max.NaN.bf16x2 $0, t, bottom;
            }""",
            "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def scale_word(byte, REGION: tl.constexpr):
    """A scale byte (int32) as a bf16, held twice in a word. Exact: an E4M3 scale has 4 significant bits."""
    if REGION.scale == "e8m0":
        half = tl.where(byte == 0, 0x40, byte << 7)
        half = tl.where(byte == 255, BF16_NAN, half)
    else:
        half = (bits_of(decode_e4m3(byte)) >> 16) & 0xFFFF
    return _twice(half)


# Whole words, for products: every value to bf16, in the order of the row's elements.


@triton.jit
def round_to_bf16(x, PATHS: tl.constexpr):
    """fp32 to bf16, nearest even; in the interpreter, fp32 numbers that bf16 holds."""
    if PATHS.interpreted:
        return float_of(encode_bf16(x) << 16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, PATHS: tl.constexpr):
    """fp32 to a dtype, nearest even."""
    if PATHS.interpreted and DTYPE == tl.bfloat16:
        return encode_bf16(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _exact_pair(x, y):
    """Two fp32 that bf16 holds to two bf16 in a word, x in the low half."""
    return ((bits_of(x) >> 16) & 0xFFFF) | (bits_of(y) & -65536)


@triton.jit
def _clamp_to_bf16(x):
    """fp32 with infinities made bf16's largest finite number; NaN stays."""
    largest = float_of(tl.full([1], BF16_MAX_BITS << 16, tl.int32))
    largest = tl.broadcast_to(tl.reshape(largest, [1] * len(x.shape)), x.shape)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -largest), largest))


@triton.jit
def _in_order(words, PARTS: tl.constexpr):
    """Tiles [rows, n] that hold the first, second … words of each n, as one [rows, PARTS n]."""
    ROWS: tl.constexpr = words[0].shape[0]
    WORDS: tl.constexpr = words[0].shape[1] * PARTS
    if PARTS == 2:
        both = tl.join(words[0], words[1])
    else:
        both = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    return tl.reshape(both, [ROWS, WORDS])


@triton.jit
def halves_of(pairs, PATHS: tl.constexpr):
    """Words of two bf16 [rows, n] as bf16 [rows, 2 n]."""
    ROWS: tl.constexpr = pairs.shape[0]
    WIDTH: tl.constexpr = pairs.shape[1] * 2
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    values = tl.reshape(tl.join(low, high), [ROWS, WIDTH])
    if PATHS.interpreted:
        return values
    else:
        # Nothing, which the compiler does not look through: from what it sees behind, a join of words, it would choose
        # another order of a product's terms than for values that were loaded as they are.
        return tl.inline_asm_elementwise("", PATHS.nothing, [values], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def _for_words(of_groups, words):
    """A number of each group [rows, groups], for each of its words [rows, n]."""
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = of_groups.shape[1]
    EACH: tl.constexpr = words.shape[1] // GROUPS
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], [ROWS, GROUPS, EACH]), [ROWS, GROUPS * EACH])


@triton.constexpr_function
def _saturate_assembly(pairs, register):
    """PTX that makes infinities of two bf16 the largest finite number, given ``top`` and ``bottom``."""
    if pairs == "full":
        return [f"min.NaN.xorsign.abs.bf16x2 {register}, {register}, top;"]
    return [f"min.NaN.bf16x2 {register}, {register}, top;", f"max.NaN.bf16x2 {register}, {register}, bottom;"]


@triton.constexpr_function
def _octet_assembly(pairs, saturate):
    """PTX from a word of eight E2M1 codes, and their scale as two bf16, to four words of two bf16.

    A bf16's upper and lower byte are looked up in tables of the eight magnitudes, four codes at a time. The upper
    bytes come with their sign bit set; a second look-up, for which a code's sign bit means a zero, takes it away.
    """
    lines = [
        ".reg .b32 codes, magnitude, upper, lower, plus, top, bottom, none;",
        "mov.b32 top, 0x7f7f7f7f;",
        "mov.b32 bottom, 0xff7fff7f;",
        "mov.b32 none, 0x80008000;",
        "mov.b32 codes, $4;",
        "and.b32 magnitude, $4, 0x77777777;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.u32 codes, codes, 16;", "shr.u32 magnitude, magnitude, 16;"]
        first, second = f"${2 * half}", f"${2 * half + 1}"
        lines += [
            "prmt.b32 upper, 0xbfbfbf80, 0xc0c0c0c0, magnitude;",
            "prmt.b32 lower, 0xc0800000, 0xc0804000, magnitude;",
            "prmt.b32 plus, 0x40404040, 0x40404040, codes;",
            "mad.lo.u32 upper, plus, 0xfffffffe, upper;",
            f"prmt.b32 {first}, lower, upper, 0x5140;",
            f"prmt.b32 {second}, lower, upper, 0x7362;",
        ]
        for word in (first, second):
            multiply = "mul.rn.bf16x2 {0}, {0}, $5;" if pairs == "full" else "fma.rn.bf16x2 {0}, {0}, $5, none;"
            lines.append(multiply.format(word))
            lines += _saturate_assembly(pairs, word) if saturate else []
    return "{ " + " ".join(lines) + " }"


@triton.jit
def decode_e2m1_octets(words, byte, REGION: tl.constexpr, PATHS: tl.constexpr):
    """Words of eight E2M1 codes [rows, n], with the groups' scale bytes [rows, groups], to pairs of bf16 [rows, 4 n].

    Both ways give the same bits: the product of a code and a scale is exact in bf16, or past its largest number.
    """
    if PATHS.pairs != "none":
        scale = _for_words(scale_word(byte, REGION), words)
        pairs = tl.inline_asm_elementwise(
            _octet_assembly(PATHS.pairs, REGION.scale == "e8m0"), "=&r,=&r,=&r,=&r,r,r", [words, scale],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif PATHS.scaled_reads and REGION.scale == "e8m0":
        scaled = tl.inline_asm_elementwise(
            """
            v_cvt_scalef32_pk_bf16_fp4 $0, $4, $5
            v_cvt_scalef32_pk_bf16_fp4 $1, $4, $5 op_sel:[1,0,0]
            v_cvt_scalef32_pk_bf16_fp4 $2, $4, $5 op_sel:[0,1,0]
            v_cvt_scalef32_pk_bf16_fp4 $3, $4, $5 op_sel:[1,1,0]
            """,
            "=&v,=&v,=&v,=&v,v,v", [words, _for_words(decode_e8m0(byte), words)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        # Whatever the converter makes of a product past bf16's range, a magnitude is at most bf16's largest number; but
        # a group that is NaN stays NaN.
        limit = _for_words(tl.where(byte == 255, 0x7FFF7FFF, 0x7F7F7F7F), words)
        pairs = ()
        for part in tl.static_range(4):
            magnitude = tl.inline_asm_elementwise(
                "v_pk_min_u16 $0, $1, $2", "=v,v,v", [scaled[part] & 0x7FFF7FFF, limit],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            pairs = pairs + (magnitude | (scaled[part] & -2147450880),)
    else:
        if REGION.scale == "e8m0":
            factor = decode_e8m0(byte)
        else:
            factor = decode_e4m3(byte)
        factor = _for_words(factor, words)
        pairs = ()
        for part in tl.static_range(4):
            x = decode_e2m1(words >> (8 * part)) * factor
            y = decode_e2m1(words >> (8 * part + 4)) * factor
            if REGION.scale == "e8m0":
                x, y = _clamp_to_bf16(x), _clamp_to_bf16(y)
            pairs = pairs + (_exact_pair(x, y),)
    return _in_order(pairs, 4)


@triton.constexpr_function
def _quad_assembly(pairs, scaled, saturate):
    """PTX from a word of four E4M3 bytes, and their scale in fp32, to two words of two bf16."""
    lines = [
        ".reg .b32 half, top, bottom;",
        ".reg .b16 bytes<2>, low, high;",
        ".reg .f32 x, y;",
        "mov.b32 top, 0x7f7f7f7f;",
        "mov.b32 bottom, 0xff7fff7f;",
        "mov.b32 {bytes0, bytes1}, $2;",
    ]
    for part in range(2):
        lines += [
            f"cvt.rn.f16x2.e4m3x2 half, bytes{part};",
            "mov.b32 {low, high}, half;",
            "cvt.f32.f16 x, low;",
            "cvt.f32.f16 y, high;",
        ]
        if scaled:
            lines += ["mul.rn.f32 x, x, $3;", "mul.rn.f32 y, y, $3;"]
        lines.append(f"cvt.rn.bf16x2.f32 ${part}, y, x;")
        lines += _saturate_assembly(pairs, f"${part}") if saturate else []
    return "{ " + " ".join(lines) + " }"


@triton.jit
def decode_e4m3_quads(words, byte, REGION: tl.constexpr, PATHS: tl.constexpr):
    """Words of four E4M3 bytes [rows, n], with the groups' scale bytes [rows, groups], to pairs of bf16 [rows, 2 n].

    Without scale bytes the values are the codes'. Products below bf16's normal range may differ in their last bit.
    """
    if REGION.scale == "e8m0":
        factor = _for_words(decode_e8m0(byte), words)
    elif REGION.scale == "e4m3":
        factor = _for_words(decode_e4m3(byte), words)
    else:
        factor = tl.full(words.shape, 1.0, tl.float32)
    if PATHS.e4m3 == "cvt":
        pairs = tl.inline_asm_elementwise(
            _quad_assembly(PATHS.pairs, REGION.scale != "tensor", REGION.scale == "e8m0"), "=&r,=&r,r,f",
            [words, factor], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pairs = ()
        for part in tl.static_range(2):
            x, y = decode_e4m3_pair((words >> (16 * part)) & 0xFFFF, PATHS)
            if REGION.scale != "tensor":
                x, y = x * factor, y * factor
            if REGION.scale == "e8m0":
                x, y = _clamp_to_bf16(x), _clamp_to_bf16(y)
            pairs = pairs + (_exact_pair(x, y),)
    return _in_order(pairs, 2)
