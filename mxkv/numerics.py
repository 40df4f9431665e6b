"""The number codes and the scale rules, in torch. The one place where they are written.

Every function is exact in the sense of the specification: IEEE fp32, round to nearest even, scales taken from
bit patterns, true divisions. Other backends are compared with these byte for byte.
"""

from __future__ import annotations

import functools
import struct

import torch

from mxkv.formats import Element, Scale

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of each E2M1 code 0 to 7; code 8 + c is its negative."""

E4M3_NAN = 0x7F
E4M3_SCALE_MIN = 2.0**-9
E8M0_NAN = 255
E8M0_ONE = 127
BF16_NAN = 0x7FC0

EXPONENT_SHIFT = 23
MANTISSA_MASK = 0x7FFFFF


def float_bits(value: float) -> int:
    """The bit pattern of a number as fp32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def divide(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    """x / y, correctly rounded. (On a GPU, torch turns a division by a Python number into a reciprocal multiply.)"""
    return x / (y if isinstance(y, torch.Tensor) else x.new_full((), y))


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 to E2M1 codes 0 to 15: nearest, ties to the even code, saturating at 6; the sign of zero is kept. No NaN."""
    a = x.abs()
    # Each binade is a grid of its own: steps of 1/2 below 2, of 1 below 4, of 2 above. Rounding onto a grid outside its
    # binade lands on a code too high, so the least of the three is right.
    code = (a * 2).round_()  # round_ takes ties to even
    code = torch.minimum(code, a.round().add_(2), out=code)
    code = torch.minimum(code, a.mul_(0.5).round_().add_(4), out=code).clamp_(max=7)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(8)
    return sign.bitwise_or_(code.to(torch.int32)).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 to 15 to fp32."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.int()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes to [..., n / 2] bytes: the even one in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    packed: torch.Tensor = pairs[..., 1].bitwise_left_shift(4).bitwise_or_(pairs[..., 0])
    return packed


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n / 2] bytes to [..., n] codes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 to E4M3 bytes: nearest, ties to even, saturating at 448; the sign of zero is kept; NaN is 0x7f."""
    # The cast's own saturation differs between torch versions: it is never asked to saturate.
    code = x.clamp(-Element.E4M3.max, Element.E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(code == 0xFF, E4M3_NAN, code)


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes to fp32."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def encode_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, nearest even; every NaN is 0x7fc0."""
    nan = torch.full((), BF16_NAN, dtype=torch.int16, device=x.device).view(torch.bfloat16)
    return torch.where(x.isnan(), nan, x.to(torch.bfloat16))


def e8m0_scale(amax: torch.Tensor, element: Element) -> torch.Tensor:
    """The E8M0 byte (int32) of a group: the smallest e with 2**e * element.max >= amax, plus 127, at least 0.

    A zero group takes 127.
    """
    top = float_bits(element.max)
    top_exponent, top_mantissa = (top >> EXPONENT_SHIFT) - 127, top & MANTISSA_MASK
    bits = amax.view(torch.int32)
    byte = (bits >> EXPONENT_SHIFT) - top_exponent + ((bits & MANTISSA_MASK) > top_mantissa)
    return torch.where(bits == 0, E8M0_ONE, byte.clamp_(min=0)).to(torch.int32)


def e8m0_reciprocal(byte: torch.Tensor) -> torch.Tensor:
    """2**(127 - byte) for a byte (int32) that :func:`e8m0_scale` gave: dividing by the scale, exactly."""
    return ((254 - byte) << EXPONENT_SHIFT).view(torch.float32)


def decode_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to fp32: 2**(byte - 127), NaN for 255."""
    bits = byte.int() << EXPONENT_SHIFT
    bits = torch.where(byte == 0, 1 << (EXPONENT_SHIFT - 1), bits)  # 2**-127 is subnormal
    return torch.where(byte == E8M0_NAN, torch.nan, bits.view(torch.float32))


def e4m3_scale(amax: torch.Tensor, element: Element) -> torch.Tensor:
    """The E4M3 byte of a group: amax / element.max, clamped to [2**-9, 448], rounded to nearest even."""
    return encode_e4m3(divide(amax, element.max).clamp_(E4M3_SCALE_MIN, Element.E4M3.max))


@functools.cache
def scale_nan(scale: Scale) -> int:
    """The scale byte of a group that holds a number which the record cannot hold."""
    return E8M0_NAN if scale is Scale.E8M0 else E4M3_NAN


def quantize_groups(
    groups: torch.Tensor, element: Element, scale: Scale, amax_floor: float
) -> tuple[torch.Tensor, ...]:
    """fp32 ``[..., group]``, finite, to codes ``[..., group]`` (one to a byte) and scale bytes ``[...]``, uint8."""
    amax = groups.abs().amax(-1)
    if amax_floor:
        amax = amax.clamp_(min=amax_floor)
    if scale is Scale.E8M0:
        byte = e8m0_scale(amax, element)
        scaled = groups * e8m0_reciprocal(byte)[..., None]
        scales = byte.to(torch.uint8)
    else:
        scales = e4m3_scale(amax, element)
        scaled = groups / decode_e4m3(scales)[..., None]
    return (encode_e2m1(scaled) if element is Element.E2M1 else encode_e4m3(scaled)), scales


LOG2_E = 1.4426950216293335
EXP2_COEFFICIENTS = (
    0.6931470632553101, 0.24022234976291656, 0.055506784468889236, 0.009671961888670921, 0.0013274633092805743,
)  # fmt: skip
"""2**f on [-1/2, 1/2] is 1 + f * (these, as a polynomial in f): each an fp32, within 2e-7 of it."""

INTEGERS = 12582912.0
"""1.5 * 2**23: added to a small fp32, it rounds it to an integer."""
INTEGERS_BITS = 0x4B400000
MOST_HALVINGS = 126.0


def softmax_of_two(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax weights of two fp32 scores, in arithmetic that every backend rounds alike.

    With e = exp(-|second - first|) the larger score weighs 1 / (1 + e), the other e times that. The exponential is a
    product, a rounding to an integer and a polynomial: a library's own would differ in its last bits from another's,
    which values that cancel each other turn into a difference that can be seen. From 2**-126 on it is 0. NaN gives NaN.
    """
    difference = second - first
    halvings = difference.abs() * LOG2_E
    rounded = halvings + INTEGERS
    fraction = (rounded - INTEGERS) - halvings  # exact, in [-1/2, 1/2]
    power = torch.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        power = power * fraction + coefficient
    scale = ((INTEGERS_BITS + 127 - rounded.view(torch.int32)) << EXPONENT_SHIFT).view(torch.float32)
    smaller = torch.where(halvings >= MOST_HALVINGS, 0.0, power * scale)
    large = divide(torch.ones_like(smaller), smaller + 1.0)
    small = smaller * large
    rises = difference >= 0
    return torch.where(rises, small, large), torch.where(rises, large, small)


def sum_of_squares(rows: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension of fp32 rows [..., 512], in one order: [..., 1].

    Neighbours are added first, which leaves 256; then halves, until 64 are left; then neighbours again; then halves.
    It is the order in which 32 threads that hold two pairs, four times, add with the fewest exchanges.
    """
    squares = rows * rows
    for halves in (False, True, True, False, True, True, True, True, True):
        if halves:
            width = squares.shape[-1] // 2
            squares = squares[..., :width] + squares[..., width:]
        else:
            squares = squares[..., ::2] + squares[..., 1::2]
    return squares


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 rows [..., 512] over the root of their mean square, times weights [512], as bf16."""
    # torch's square root of fp32 may be one off in its last bit (MKL); that of fp64, rounded to fp32, is right.
    root = (sum_of_squares(rows) * (1.0 / rows.shape[-1]) + eps).to(torch.float64).sqrt().to(torch.float32)
    return encode_bf16(rows * divide(torch.ones_like(root), root) * weight.to(torch.float32))


def merge_partials(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Partial attentions [parts, ..., heads, value_dim] with lses [parts, ..., heads], and a sink [heads], as one."""
    lses = lses.float()
    top = lses.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)  # -inf less -inf is NaN
    weights = (lses - top).exp()
    known = weights.sum(0)
    total = known if sink is None else known + (sink.float() - top).exp()
    parts = torch.where(weights[..., None] == 0, 0.0, outs.float() * weights[..., None])
    merged = torch.where(known[..., None] == 0, 0.0, parts.sum(0) / total[..., None]).to(outs.dtype)
    return (merged, top + known.log()) if return_lse else merged
