"""Proofs by exhaustion of what the kernels' packed bf16 arithmetic relies on: each step emulated, on every input.

A GPU is not needed: a bf16 product, sum or fused multiply-add is exact in fp64, and is then rounded once.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from mxkv import Element, numerics
from mxkv.backends.triton_gpu.tasks import _two_parts

MAGNITUDES = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()  # every finite one


def bf16(x: torch.Tensor) -> torch.Tensor:
    """fp64 rounded to bf16, nearest even, subnormals kept."""
    exponent = (x.abs().frexp().exponent - 1).clamp(min=-126)
    step = torch.ldexp(torch.ones_like(x), exponent - 7)
    return (x / step).round() * step


def codes_by_three_sums(y: torch.Tensor, factor: torch.Tensor | float, *, saturate: bool) -> torch.Tensor:
    """E2M1 codes of y * factor as the kernels compute them: the least of three roundings, one for each binade.

    The bf16 binade [32, 64) has steps of 1/4: adding 32 to half a value rounds the value to halves, and so on.
    """
    sums = [bf16(y * (bf16(torch.as_tensor(factor * part, dtype=torch.float64))) + offset)
            for part, offset in ((0.5, 32.0), (0.25, 32.5), (0.125, 33.0))]  # fmt: skip
    least = torch.minimum(torch.minimum(sums[0], sums[1]), sums[2])
    if saturate:
        least = least.clamp(max=32 + 7 / 4)
    assert bool((least >= 32).all())
    return ((least - 32) * 4).to(torch.uint8)


@pytest.mark.parametrize("byte", [0, 1, 2, 60, 126, 127, 128, 200, 250, 251, 252])
def test_e2m1_codes_under_a_power_of_two(byte: int) -> None:
    """Scaling and rounding happen in one fused step; its factors are exact down to the smallest (a subnormal)."""
    largest = 6 * 2.0 ** (byte - 127)
    fitting = MAGNITUDES[MAGNITUDES.le(largest)]
    factor = 2.0 ** (127 - byte)
    want = numerics.encode_e2m1((fitting * factor).float())
    assert torch.equal(codes_by_three_sums(fitting, factor, saturate=False), want)
    parts = torch.tensor([factor * part for part in (1, 0.5, 0.25, 0.125)], dtype=torch.float64)
    assert torch.equal(bf16(parts), parts)


@pytest.mark.parametrize("error", [-1.5, 0.0, 1.5])
def test_e2m1_codes_under_an_e4m3_scale(error: float) -> None:
    """x / scale from a reciprocal in two bf16 parts is close enough, whatever the approximation's last bits."""
    for byte in range(1, 0x7F):
        scale = numerics.decode_e4m3(torch.tensor([byte], dtype=torch.uint8)).double()
        reciprocal = (1 / scale).float().double() * (1 + error * 2.0**-23)
        high = bf16(reciprocal)
        low = bf16((reciprocal - high).float().double())
        quotient = bf16(MAGNITUDES * high + bf16(MAGNITUDES * low))
        want = numerics.encode_e2m1(MAGNITUDES.float() / scale.float())
        # Quotients past bf16's range saturate all the same.
        quotient = quotient.clamp(max=2.0**126)
        assert torch.equal(codes_by_three_sums(quotient, 1.0, saturate=True), want), byte


def fp32(x: Fraction) -> float:
    """A positive number rounded to fp32, nearest even; inside its normal range."""
    exponent = math.frexp(float(x))[1] - 24
    return math.ldexp(round(x / Fraction(2) ** exponent), exponent)


@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
def test_e2m1_codes_of_fp32_under_an_e4m3_scale(error: int) -> None:
    """The quotient from a reciprocal in two fp32 parts is on the right side of every tie, however the first is rounded.

    Around every tie, where alone it could be on the wrong one, for every scale: each step in exact arithmetic.
    """
    ties = [Fraction(2 * k + 1, 4) for k in range(4)] + [Fraction(5, 2), Fraction(7, 2), Fraction(5)]
    for byte in range(1, 0x7F):
        scale = float(numerics.decode_e4m3(torch.tensor([byte], dtype=torch.uint8)))
        high = fp32(1 / Fraction(scale))
        high += error * math.ldexp(1.0, math.frexp(high)[1] - 24)
        rest = 1 - Fraction(scale) * Fraction(high)
        low = Fraction(math.copysign(fp32(abs(rest)), rest)) * Fraction(high) if rest else Fraction(0)
        low = Fraction(math.copysign(fp32(abs(low)), low)) if low else Fraction(0)
        near, quotients = [], []
        for tie, step in itertools.product(ties, range(-9, 10)):
            middle = fp32(tie * Fraction(scale))
            x = torch.tensor([middle]).view(torch.int32).add(step).view(torch.float32).item()
            product = Fraction(x) * low
            product = Fraction(math.copysign(fp32(abs(product)), product)) if product else product
            near.append(x)
            quotients.append(fp32(Fraction(x) * Fraction(high) + product))
        want = numerics.encode_e2m1(torch.tensor(near) / torch.tensor(scale))
        assert torch.equal(numerics.encode_e2m1(torch.tensor(quotients)), want), byte


def signed_fp32(x: Fraction) -> Fraction:
    """Any number rounded to fp32, where that is not subnormal."""
    return Fraction(math.copysign(fp32(abs(x)), x)) if x else x


@pytest.mark.parametrize("largest", [1.0, 1.75, 6.0, 15.0, 448.0])
def test_e4m3_scales(largest: float) -> None:
    """amax / element_max by an inverse in two parts is on the right side of every tie of E4M3, for every amax near it.

    In exact arithmetic, around all ties, and around the codes themselves; a product and a fused multiply-add.
    """
    high, low = _two_parts(1 / largest)
    codes = numerics.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double().tolist()
    middles = [Fraction(x) for x in codes] + [
        (Fraction(x) + Fraction(y)) / 2 for x, y in itertools.pairwise([*codes, 512.0])
    ]
    amaxes = [fp32(middle * Fraction(largest)) for middle in middles if middle]
    near = torch.tensor(amaxes).view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    near = near.view(torch.float32).flatten()
    got = [
        fp32(Fraction(x) * Fraction(high) + signed_fp32(Fraction(x) * signed_fp32(Fraction(low))))
        for x in near.tolist()
    ]
    want = numerics.encode_e4m3(near / torch.tensor(largest))
    assert torch.equal(numerics.encode_e4m3(torch.tensor(got)), want)


def near(values: torch.Tensor) -> torch.Tensor:
    """fp32 around numbers: neighbours, and some as far away as a bf16 or two."""
    g = torch.Generator().manual_seed(0)
    steps = torch.cat((torch.arange(-20, 21), torch.randint(-(1 << 17), 1 << 17, (200,), generator=g)))
    bits = values.float().view(torch.int32)[:, None] + steps.int()
    return bits.clamp(0, 0x7F400000).view(torch.float32).flatten()


def odd(x: torch.Tensor) -> torch.Tensor:
    """fp32 cut to bf16, odd where that loses something."""
    bits = x.view(torch.int32)
    return ((bits | ((bits & 0xFFFF) != 0).int() << 16) & -65536).view(torch.float32)


def test_odd_bf16_have_the_bytes_of_the_fp32() -> None:
    """Around every tie and every code: E2M1 codes under every E4M3 scale, E4M3 codes, and scales of both kinds."""
    codes = numerics.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)).double()
    ties = (codes[1:] + codes[:-1]) / 2
    bounds = torch.cat((codes, ties))
    for byte in range(1, 0x7F):
        x = near(torch.tensor([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7]) * codes[byte])
        scale = codes[byte].float()
        assert torch.equal(numerics.encode_e2m1(odd(x) / scale), numerics.encode_e2m1(x / scale)), byte
    assert torch.equal(numerics.encode_e4m3(odd(near(bounds))), numerics.encode_e4m3(near(bounds)))
    exponents = torch.arange(-126, 127).double()
    for element, scale_of, amax in (
        (Element.E2M1, numerics.e4m3_scale, near(6 * bounds)),
        (Element.E2M1, numerics.e8m0_scale, near(6 * 2**exponents)),
        (Element.E4M3, numerics.e8m0_scale, near(torch.cat((448 * 2**exponents, torch.tensor([1e-4]))))),
    ):
        assert torch.equal(scale_of(odd(amax), element), scale_of(amax, element))


@pytest.mark.parametrize("byte", [0, 1, 60, 105, 127, 200, 246])
def test_e4m3_codes_under_a_power_of_two(byte: int) -> None:
    """A packed multiply may lose the last bits of products below bf16's normal range: E4M3 codes do not see it."""
    largest = 448 * 2.0 ** (byte - 127)
    fitting = MAGNITUDES[MAGNITUDES.le(largest)]
    factor = 2.0 ** (127 - byte)
    assert torch.equal(
        numerics.encode_e4m3(bf16(fitting * factor).float()), numerics.encode_e4m3((fitting * factor).float())
    )
