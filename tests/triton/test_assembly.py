"""The text of the kernels' inline assembly, run by a small PTX interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mxkv import Element, numerics
from mxkv.backends.triton_gpu import codec
from tests.triton import ptx

pytestmark = pytest.mark.triton
PAIRS = ("full", "fma")


def every_bf16(limit: float) -> torch.Tensor:
    """Every bf16 of at most some magnitude, in no order, as groups of eight."""
    bits = torch.arange(1 << 16)
    values = ptx.float_of(bits << 16)
    fitting = bits[(values.abs() <= limit) & values.isfinite()]
    fitting = fitting[torch.randperm(len(fitting), generator=torch.Generator().manual_seed(0))]
    return fitting[: len(fitting) // 8 * 8].view(-1, 8)


def words_of(groups: torch.Tensor) -> list[torch.Tensor]:
    return [groups[:, 2 * i] | (groups[:, 2 * i + 1] << 16) for i in range(groups.shape[1] // 2)]


def twice(half: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, half | (half << 16))


def bytes_of(word: torch.Tensor) -> torch.Tensor:
    return torch.stack([(word >> (8 * i)) & 0xFF for i in range(4)], -1).to(torch.uint8)


def upper(value: float) -> int:
    """The bf16 bits of a number that bf16 holds."""
    bits = numerics.float_bits(value)
    assert not bits & 0xFFFF
    return bits >> 16


@pytest.mark.parametrize("byte", [0, 1, 100, 127, 128, 250, 251, 252])
@pytest.mark.parametrize("pairs", PAIRS)
def test_e2m1_under_a_power_of_two(pairs: str, byte: int) -> None:
    groups = every_bf16(6 * 2.0 ** (byte - 127))
    words = words_of(groups)
    factor = 2.0 ** (127 - byte)
    parts = [twice(upper(factor * part), words[0]) for part in (0.5, 0.25, 0.125) for _ in range(4)]
    keep = [torch.full_like(words[0], ptx.WORD)] * 4
    assembly = codec._encode_e2m1_assembly.fn(pairs, False)
    (got,) = ptx.run(assembly, 1, *words, *parts, *keep)
    want = numerics.pack_nibbles(numerics.encode_e2m1(ptx.float_of(groups << 16) * factor))
    assert torch.equal(bytes_of(got), want)


@pytest.mark.parametrize("pairs", PAIRS)
def test_e2m1_under_an_e4m3_scale(pairs: str) -> None:
    groups = every_bf16(float("inf"))
    words = words_of(groups)
    keep = [torch.full_like(words[0], ptx.WORD)] * 4
    assembly = codec._encode_e2m1_assembly.fn(pairs, True)
    for byte in (*range(1, 0x7F, 7), 0x7E):
        scale = numerics.decode_e4m3(torch.tensor([byte], dtype=torch.uint8))
        reciprocal = 1 / scale.double()
        high = float(ptx.bf16(reciprocal))
        low = float(ptx.bf16(reciprocal.float().double() - high))
        parts = [twice(upper(part), words[0]) for part in (high, low) for _ in range(4)]
        (got,) = ptx.run(assembly, 1, *words, *parts, *keep)
        want = numerics.pack_nibbles(numerics.encode_e2m1(ptx.float_of(groups << 16) / scale))
        assert torch.equal(bytes_of(got), want), byte


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("pairs", PAIRS)
def test_e2m1_of_fewer_than_four_words(pairs: str, divide: bool, count: int) -> None:
    """A thread that has fewer (of a narrow row) leaves anything in the others' place."""
    groups = every_bf16(6.0)
    words = words_of(groups)
    parts = [upper(x) for x in ((1.0, 0.0) if divide else (0.5, 0.25, 0.125))]
    operands = [words, *([twice(part, words[0])] * 4 for part in parts), [torch.full_like(words[0], ptx.WORD)] * 4]
    g = torch.Generator().manual_seed(1)
    anything = [torch.randint(0, 1 << 32, words[0].shape, generator=g) for _ in range(4 * len(operands))]
    given = [
        operand if i < count else anything.pop() for four in operands for i, operand in enumerate(four)
    ]  # each operand comes for word after word
    (got,) = ptx.run(codec._encode_e2m1_assembly.fn(pairs, divide), 1, *given)
    want = numerics.pack_nibbles(numerics.encode_e2m1(ptx.float_of(groups << 16)))
    assert torch.equal(bytes_of(got)[:, :count], want[:, :count])


@pytest.mark.parametrize("byte", [0, 105, 127, 246])
@pytest.mark.parametrize("pairs", PAIRS)
def test_e4m3_under_a_power_of_two(pairs: str, byte: int) -> None:
    groups = every_bf16(448 * 2.0 ** (byte - 127)).view(-1, 4)
    words = words_of(groups)
    factor = 2.0 ** (127 - byte)
    reciprocal, keep = twice(upper(factor), words[0]), torch.full_like(words[0], ptx.WORD)
    (got,) = ptx.run(codec._encode_e4m3_assembly.fn(pairs), 1, *words, reciprocal, reciprocal, keep, keep)
    assert torch.equal(bytes_of(got), numerics.encode_e4m3(ptx.float_of(groups << 16) * factor))


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("pairs", PAIRS)
def test_a_lost_group_gives_zeros(pairs: str, divide: bool) -> None:
    words = [torch.tensor([w]) for w in (0x7FC0FF80, 0x7F80FFFF, 0x12345678, 0x80008000)]
    some = [twice(0x3F80, words[0])] * (8 if divide else 12)
    (got,) = ptx.run(codec._encode_e2m1_assembly.fn(pairs, divide), 1, *words, *some, *[torch.zeros(1).long()] * 4)
    assert not got.any()


def test_odd_pairs() -> None:
    upper, lower = torch.meshgrid(
        torch.arange(0, 1 << 16, 7), torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF]), indexing="ij"
    )
    upper, lower = upper.flatten(), lower.flatten()
    x = (upper << 16) | lower
    (got,) = ptx.run(codec.ODD_ASSEMBLY.value, 1, x, x.flip(0), twice(1, x))
    want = upper | (lower != 0)
    assert torch.equal(got, want | (want.flip(0) << 16))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("pairs", PAIRS)
def test_reading_e2m1(pairs: str, saturate: bool) -> None:
    """All pairs of codes under every scale byte, as the oracle reads them: in fp32, saturated, rounded to bf16."""
    assembly = codec._decode_e2m1_assembly.fn(pairs, saturate)
    codes = torch.arange(256)
    values = numerics.decode_e2m1(numerics.unpack_nibbles(codes.to(torch.uint8)[:, None]))
    for byte in range(256):
        scale = (numerics.decode_e8m0 if saturate else lambda b: numerics.decode_e4m3(b.to(torch.uint8)))(
            torch.tensor([byte])
        )
        half = int(ptx.bits_of(scale)[0]) >> 16
        got = ptx.run(assembly, 2, codes | (codes.flip(0) << 16), twice(half, codes), twice(half, codes))
        largest = torch.finfo(torch.bfloat16).max
        want = (values * scale).clamp(-largest, largest).to(torch.bfloat16)
        for word, expected in zip(got, (want, want.flip(0)), strict=True):
            have = torch.stack(ptx.halves(word), -1).to(torch.int32).to(torch.int16).view(torch.bfloat16)
            same = (have.view(torch.int16) == expected.view(torch.int16)) | (have.isnan() & expected.isnan())
            assert same.all(), byte


def test_the_largest_magnitudes_are_those_of_the_oracle() -> None:
    """Numbers that stand in the assembly: seven quarters above 32, and no more than the oracle's codes."""
    assert numerics.E2M1_VALUES.index(Element.E2M1.max) == 7
    assert ptx.float_of(torch.tensor([0x42070000])).item() == 32 + 7 / 4


def words_of_bytes(bytes: torch.Tensor) -> torch.Tensor:
    return sum((bytes[:, i].long() << (8 * i) for i in range(4)), torch.zeros(len(bytes), dtype=torch.long))


def loaded(values: torch.Tensor) -> torch.Tensor:
    """fp32 as a load gives it in bf16: saturated; the bits."""
    largest = torch.finfo(torch.bfloat16).max
    return ptx.bits_of(values.clamp(-largest, largest).bfloat16().float()) >> 16


@pytest.mark.parametrize("scale", ["e8m0", "e4m3"])
@pytest.mark.parametrize("pairs", PAIRS)
def test_octets_of_e2m1(pairs: str, scale: str) -> None:
    """Every pair of codes at every place of a word, under every scale: the bits that a load to bf16 gives, in order."""
    byte = torch.arange(256)
    bytes = torch.stack([byte.roll(7 * i) for i in range(4)], -1).to(torch.uint8)
    words = words_of_bytes(bytes)
    codes = numerics.unpack_nibbles(bytes)
    for number in range(256):
        of_group = torch.tensor([number], dtype=torch.uint8)
        factor = numerics.decode_e8m0(of_group) if scale == "e8m0" else numerics.decode_e4m3(of_group)
        half = int(ptx.bits_of(factor)[0]) >> 16
        outputs = ptx.run(codec._octet_assembly.fn(pairs, scale == "e8m0"), 4, words, twice(half, words))
        got = torch.stack([part for word in outputs for part in ptx.halves(word)], -1)
        want = loaded(numerics.decode_e2m1(codes) * factor)
        if bool(factor.isnan()):
            assert bool(((got & 0x7FFF) > 0x7F80).all())
        else:
            assert torch.equal(got, want), number


@pytest.mark.parametrize("scale", ["e8m0", "e4m3", "tensor"])
@pytest.mark.parametrize("pairs", PAIRS)
def test_quads_of_e4m3(pairs: str, scale: str) -> None:
    byte = torch.arange(256)
    bytes = torch.stack([byte.roll(31 * i) for i in range(4)], -1).to(torch.uint8)
    words, values = words_of_bytes(bytes), numerics.decode_e4m3(bytes)
    for number in range(0, 256, 1 if scale != "tensor" else 256):
        of_group = torch.tensor([number], dtype=torch.uint8)
        factor = {
            "e8m0": numerics.decode_e8m0(of_group), "e4m3": numerics.decode_e4m3(of_group), "tensor": torch.ones(1),
        }[scale]  # fmt: skip
        assembly = codec._quad_assembly.fn(pairs, scale != "tensor", scale == "e8m0")
        outputs = ptx.run(assembly, 2, words, ptx.bits_of(factor).expand_as(words))
        got = torch.stack([part for word in outputs for part in ptx.halves(word)], -1)
        product = values * factor
        nan = product.isnan()
        assert torch.equal((got & 0x7FFF) > 0x7F80, nan)
        assert torch.equal(got[~nan], loaded(product)[~nan]), number
