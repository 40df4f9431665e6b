"""The oracle of the tests, against numbers written down by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import mxkv
from mxkv import Element
from tests import reference
from tests.support import DTYPES, dtype_name, messy_rows, name_of


def test_e2m1_boundaries_go_to_the_even_code() -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    assert {tie: reference.encode(Element.E2M1, tie) for tie in ties} == ties
    assert [reference.encode(Element.E2M1, -tie) for tie in ties] == [code + 8 for code in ties.values()]
    assert reference.encode(Element.E2M1, math.nextafter(0.25, 1)) == 1
    assert reference.encode(Element.E2M1, 1e30) == 7
    assert reference.encode(Element.E2M1, -0.0) == 8


def test_e4m3_table() -> None:
    assert reference.E4M3_TABLE[0x38] == 1
    assert reference.E4M3_TABLE[0x01] == Fraction(1, 512)
    assert reference.E4M3_TABLE[0x7E] == 448
    assert len(reference.E4M3_TABLE) == 127
    assert sorted(reference.E4M3_TABLE) == reference.E4M3_TABLE
    assert math.isnan(reference.decode(Element.E4M3, 0xFF))
    assert [reference.encode(Element.E4M3, x) for x in (464.0, 465.0, 1e4, -1e4, math.nan)] == [126, 126, 126, 254, 127]


@pytest.mark.parametrize(
    ("amax", "byte"), [(6.0, 127), (6.03125, 128), (7.0, 128), (3.0, 126), (0.0, 127), (2**-149, 0)]
)
def test_e8m0_scale_is_the_smallest_without_clamping(amax: float, byte: int) -> None:
    assert reference.e8m0_scale(amax, Element.E2M1) == byte


def test_bf16_rounds_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[~values.isnan()]
    want = values.bfloat16().view(torch.int16).tolist()
    got = [np.uint16(reference.encode_bf16(x)).astype(np.int16).item() for x in values.tolist()]
    assert got == want
    assert reference.encode_bf16(math.nan) == 0x7FC0


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_round_to_agrees_with_torch_inside_the_range(dtype: torch.dtype) -> None:
    values = messy_rows(16, 64, finite=True).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).flatten()
    want = values.to(dtype).float().tolist()
    assert [reference.round_to(x, dtype_name(dtype)) for x in values.tolist()] == want


def test_record_by_hand() -> None:
    row = [6.0, 0.25, -0.75, 1.25, 1.75, 2.5, 3.5, -5.0] + [0.0] * 24
    values, scales = reference.encode_row(row, mxkv.FORMATS["mxfp4"])
    assert values.hex() == "072a" + "44e6" + "00" * 12
    assert scales == bytes([127])
    assert reference.decode_row(values, scales, mxkv.FORMATS["mxfp4"])[:8] == [6.0, 0.0, -1.0, 1.0, 2.0, 2.0, 4.0, -4.0]


def test_rope_by_hand() -> None:
    row = np.arange(64, dtype=np.float32)
    quarter_turn = np.concatenate((np.zeros(32, np.float32), np.ones(32, np.float32)))
    turned = reference.rotate(row, quarter_turn)
    assert turned[:4].tolist() == [-1.0, 0.0, -3.0, 2.0]
