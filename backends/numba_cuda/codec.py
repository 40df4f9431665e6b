"""Number codes inside kernels, in integer and fp32 arithmetic: exact on every target and in the simulator."""

from __future__ import annotations

from mxkv.backends.numba_cuda.primitives import (
    add,
    bits_of,
    device,
    div,
    float_of,
    fma,
    i32,
    mul,
    permuted,
    u32,
)
from mxkv.numerics import BF16_NAN, E4M3_NAN, E8M0_NAN, E8M0_ONE, float_bits

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
MANTISSA = 0x7FFFFF
NAN = 0x7FC00000

_E4M3_MAX = float_bits(448.0)
_E4M3_LEAST_NORMAL = float_bits(2.0**-6)
_E4M3_LEAST_SCALE = float_bits(2.0**-9)
_E4M3_MAGIC = 20 << 23  # from a binade to the one whose last bit is an eighth of it
_E4M3_BIAS = 121 << 3
_SIGNS = -0x7FFF8000  # of two bf16
_E4M3_BITS = -0x78100000  # a sign, and seven bits that begin where the last four of fp32's exponent do
_HALVES = float_bits(2.0**22)  # numbers of this binade end in 1/2
# What eight of them add up to, each shifted four bits further, less what they stand for.
_HALVES_SHIFTED = sum(_HALVES << 4 * i for i in range(8)) & 0xFFFFFFFF


@device
def sanitized(x, limit):
    """NaN to 0, magnitudes above ``limit`` (bits) to it."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    if magnitude > INFINITY:
        return float_of(0)
    return float_of((bits ^ magnitude) | min(magnitude, limit))


@device
def larger(x, largest):
    """The larger of twice a magnitude's bits and ``largest``, unsigned: as integers, NaN and infinity are most."""
    return max(u32(bits_of(x) << 1), largest)


@device
def e8m0_scale(amax, top_exponent, top_mantissa):
    """The E8M0 byte of a group, from the bits of its largest magnitude: no logarithm, no division."""
    if amax == 0:
        return i32(E8M0_ONE)
    byte = (amax >> 23) - top_exponent
    if (amax & MANTISSA) > top_mantissa:
        byte += 1
    return i32(max(byte, 0))


@device
def e4m3_scale(amax, element_max):
    """The E4M3 byte of a group, from the bits of its largest magnitude."""
    scale = bits_of(div(float_of(amax), element_max))
    return encode_e4m3(float_of(max(scale, _E4M3_LEAST_SCALE)))


@device
def decode_e8m0(byte):
    if byte == E8M0_NAN:
        return float_of(NAN)
    if byte == 0:
        return float_of(1 << 22)  # 2**-127 is subnormal
    return float_of(byte << 23)


@device
def decode_e4m3(code):
    """The code's bits, put where fp32 has them, are the value times 2**-120."""
    if (code & 0x7F) == E4M3_NAN:
        return float_of(NAN)
    return mul(float_of(((code & 0x7F) << 20) | ((code & 0x80) << 24)), 2.0**120)


@device
def has_e4m3_nan(word):
    """Whether one of four codes is NaN."""
    return (((word & 0x7F7F7F7F) + 0x01010101) & 0x80808080) != 0


@device
def scaled_e4m3(word, factor):
    """The code in the first byte of a word, no NaN, times a factor of 2**-120."""
    return mul(float_of(i32((i32(word) >> 4) & _E4M3_BITS)), factor)


@device
def decode_e2m1(code):
    """A code in the last four bits of an integer, likewise."""
    return mul(float_of(((code & 7) << 22) | ((code & 8) << 28)), 2.0**126)


@device
def scaled_e2m1_octet(word, scale):
    """Eight codes times an E8M0 scale (its byte, 2 to 252), as bf16, two to a word.

    The codes' magnitudes, 0, 1/2, 1, 3/2, 2, 3, 4 and 6, times the scale are a table of four words. The last three bits
    of a code choose a byte of its lower halves, and one of its upper halves.
    """
    half, one = i32((scale << 23) - 0x800000), i32(scale * 0x800080 + 0x400000)  # with 0, and with 3/2
    two, four = i32(one + 0x800080), i32(one + 0x1000100)
    lower_a, lower_b = permuted(half, one, 0x6420), permuted(two, four, 0x6420)
    upper_a, upper_b = permuted(half, one, 0x7531), permuted(two, four, 0x7531)
    first, last = i32(word & 0x77777777), i32((word & 0x77777777) >> 16)
    a, b = permuted(lower_a, lower_b, first), permuted(upper_a, upper_b, first)
    c, d = permuted(lower_a, lower_b, last), permuted(upper_a, upper_b, last)
    even = i32(word << 4)  # the signs of even codes begin its bytes
    return (
        i32(permuted(a, b, 0x5140) | (permuted(word, even, 0x0040) & _SIGNS)),
        i32(permuted(a, b, 0x7362) | (permuted(word, even, 0x1050) & _SIGNS)),
        i32(permuted(c, d, 0x5140) | (permuted(word, even, 0x2060) & _SIGNS)),
        i32(permuted(c, d, 0x7362) | (permuted(word, even, 0x3070) & _SIGNS)),
    )  # fmt: skip


@device
def encode_e4m3(x):
    """Finite fp32 to an E4M3 byte: nearest, ties to even, saturating.

    Adding 2**(e + 20) to a number of exponent e makes the adder round it to the code's step in that binade.
    """
    bits = bits_of(x)
    magnitude = min(bits & MAGNITUDE, _E4M3_MAX)
    exponent = max(magnitude, _E4M3_LEAST_NORMAL) & INFINITY
    magic = exponent + _E4M3_MAGIC
    steps = bits_of(add(float_of(magnitude), float_of(magic))) - magic
    return i32((steps + (exponent >> 20) - _E4M3_BIAS) | ((bits >> 24) & 0x80))


@device
def _e2m1_steps(x, whole, half, quarter):
    """The code of a magnitude times ``whole``, which no code saturates, above the bits of 2**22.

    Each binade has a grid of its own: steps of 1/2 below 2, of 1 below 4, of 2 above. Rounding onto a grid outside of
    its binade lands on a code too high, so the least of the three is right. The factors are powers of two: the products
    are exact, and the sums are rounded to 1/2, which in the second and third stands for a step of 1 and of 2.
    """
    x = float_of(bits_of(x) & MAGNITUDE)
    low = i32(bits_of(fma(x, whole, 2.0**22)))
    middle = i32(bits_of(fma(x, half, 2.0**22 + 1.0)))
    high = i32(bits_of(fma(x, quarter, 2.0**22 + 2.0)))
    return min(min(low, middle), high)


@device
def _e2m1_sign(x, place):
    return (bits_of(x) >> (31 - place)) & (1 << place)


@device
def encode_e2m1(x, whole, half, quarter):
    """fp32 times a power of two (with its half and its quarter) to an E2M1 code, saturating."""
    return i32(min(_e2m1_steps(x, whole, half, quarter) - _HALVES, 7) | _e2m1_sign(x, 3))


@device
def encode_e2m1_octet(x, reciprocal):
    """Eight fp32 times a power of two, no magnitude then above 6, to a word of E2M1 codes, the first one lowest."""
    whole, half, quarter = reciprocal, mul(reciprocal, 0.5), mul(reciprocal, 0.25)
    word = u32(-_HALVES_SHIFTED)
    signs = 0
    for i in range(8):
        word = u32(word + (_e2m1_steps(x[i], whole, half, quarter) << (4 * i)))
        signs |= _e2m1_sign(x[i], 4 * i + 3)
    return i32(word | u32(signs))


@device
def encode_bf16(x):
    """fp32 to bf16 bits: nearest even, every NaN is 0x7fc0."""
    bits = bits_of(x)
    if (bits & MAGNITUDE) > INFINITY:
        return i32(BF16_NAN)
    return i32(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


@device
def saturated(x, largest, keep_infinite):
    """fp32 with every finite value, and an infinity unless it is kept, at most ``largest`` (bits) in magnitude."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    if magnitude > INFINITY or (keep_infinite and magnitude == INFINITY):
        return x
    return float_of((bits ^ magnitude) | min(magnitude, largest))
