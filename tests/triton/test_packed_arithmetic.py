"""Proofs by exhaustion of what the kernels' packed bf16 arithmetic relies on: each step emulated, on every input.

A GPU is not needed: a bf16 product, sum or fused multiply-add is exact in fp64, and is then rounded once.
"""

from __future__ import annotations

import pytest
import torch

from mxkv import Element, numerics

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


def test_e4m3_scales_of_bf16() -> None:
    """amax / 6 by a multiply with 1/6: rounding to bf16, then to E4M3, gives what the division gives."""
    for element in (Element.E2M1, Element.E4M3):
        amax = MAGNITUDES.float()
        product = (amax * torch.tensor(1 / element.max, dtype=torch.float32)).clamp(min=numerics.E4M3_SCALE_MIN)
        got = numerics.encode_e4m3(bf16(product.double()).float())
        assert torch.equal(got, numerics.e4m3_scale(amax, element))


@pytest.mark.parametrize("byte", [0, 1, 60, 105, 127, 200, 246])
def test_e4m3_codes_under_a_power_of_two(byte: int) -> None:
    """A packed multiply may lose the last bits of products below bf16's normal range: E4M3 codes do not see it."""
    largest = 448 * 2.0 ** (byte - 127)
    fitting = MAGNITUDES[MAGNITUDES.le(largest)]
    factor = 2.0 ** (127 - byte)
    assert torch.equal(
        numerics.encode_e4m3(bf16(fitting * factor).float()), numerics.encode_e4m3((fitting * factor).float())
    )
