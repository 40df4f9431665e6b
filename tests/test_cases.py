"""Cases that broke other systems, numbered as in their list; each on every backend."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import mxkv
from mxkv import numerics
from mxkv.formats import Element
from tests import reference
from tests.reference import next_down, next_up
from tests.support import (
    FORMATS,
    GUARD,
    Ops,
    assert_same_pages,
    assert_same_rows,
    check_against_reference,
    fp32,
    guarded_pool,
    guards_of,
    name_of,
    pages_of,
    rows_of,
    sparse,
    width_for,
)

BOTH_POLICIES = pytest.mark.parametrize("nonfinite", ["propagate", "sanitize"])


def one_record(ops: Ops, name: str, values: list[float], **arguments: object) -> tuple[bytes, bytes, torch.Tensor]:
    """Store one row; its value bytes, its scale bytes, and what it reads back as."""
    format = mxkv.FORMATS[name]
    row = torch.tensor([values])
    cache = ops.empty(name, 1, 1, len(values))
    ops.store(cache, row.to(ops.device), ops.slots(0), format=name, **arguments)
    record = bytes(pages_of(cache)[0].tolist())
    split = format.value_bytes(len(values))
    return record[:split], record[split:], ops.load(cache, ops.slots(0), format=name, dtype=torch.float32).cpu()[0]


def group(values: list[float], size: int = 32) -> list[float]:
    return values + [0.0] * (size - len(values))


def codes(values: bytes) -> list[int]:
    return reference.unpack(values, Element.E2M1)


def test_case_01_ties_go_to_the_even_code(ops: Ops) -> None:
    values, scales, _ = one_record(ops, "mxfp4", group([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]))
    assert (scales[0], codes(values)[:8]) == (127, [7, 0, 2, 2, 4, 4, 6, 6])
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    above, _, _ = one_record(ops, "mxfp4", group([6.0] + [next_up(t) for t in ties]))
    assert codes(above)[:8] == [7, 1, 2, 3, 4, 5, 6, 7]
    below, _, _ = one_record(ops, "mxfp4", group([6.0] + [next_down(t) for t in ties]))
    assert codes(below)[:8] == [7, 0, 1, 2, 3, 4, 5, 6]


def test_case_02_scale_is_the_smallest_that_does_not_clamp(ops: Ops) -> None:
    values, scales, row = one_record(ops, "mxfp4", group([7.0]))
    assert (scales[0], codes(values)[0], row[0].item()) == (128, 6, 8.0)
    assert one_record(ops, "mxfp4", group([6.03125]))[1][0] == 128
    assert one_record(ops, "mxfp4", group([next_up(6.0)]))[1][0] == 128
    assert one_record(ops, "mxfp4", group([6.0]))[1][0] == 127


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-inline"])
def test_case_03_divisions_are_correctly_rounded(ops: Ops, name: str) -> None:
    values, scales, _ = one_record(ops, name, group([5.625, 4.6875], 16))
    assert (scales[0], values[0]) == (0x37, 0x67)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.grouped], ids=name_of)
def test_case_04_nan_stays_in_its_group(ops: Ops, format: mxkv.Format) -> None:
    d = width_for(format, 3 * format.group + format.tail)
    rows = rows_of(3, d)
    rows[1, format.group] = math.nan
    cache = check_against_reference(ops, format, rows)
    got = ops.load(cache, ops.slots(0, 1, 2), format=format, latent_dim=d).cpu()
    want = torch.zeros(3, d, dtype=torch.bool)
    want[1, format.group : 2 * format.group] = True
    assert torch.equal(got.isnan(), want)


@BOTH_POLICIES
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_case_05_huge_and_infinite_magnitudes(ops: Ops, format: mxkv.Format, nonfinite: str) -> None:
    d = width_for(format, 2 * format.group + format.tail)
    huge = [2.5e38, 3.38e38, math.inf, -math.inf, 1.5 * 2.0**127, 1.75 * 2.0**127]
    huge += (
        [next_up(x) for x in huge[-2:]] + [-next_up(x) for x in huge[-2:]] + [reference.LARGEST["float32"], math.nan]
    )
    rows = rows_of(len(huge), d)
    rows[:, 1] = torch.tensor(huge)
    cache = check_against_reference(ops, format, rows, nonfinite=nonfinite, dtypes=[torch.float32, torch.bfloat16])
    got = ops.load(cache, ops.slots(*range(len(huge))), format=format, latent_dim=d).cpu()
    assert got[0].isfinite().all()
    if nonfinite == "sanitize":
        assert got.isfinite().all()
    elif format.grouped:
        assert got[2, : format.group].isnan().all()
        assert got[2, format.group :].isfinite().all()


def test_case_05_mxfp4_limits_by_hand(ops: Ops) -> None:
    limit = 1.5 * 2.0**127
    assert one_record(ops, "mxfp4", group([limit]))[1][0] == 252
    assert one_record(ops, "mxfp4", group([next_up(limit)]))[1][0] == 255
    values, scales, row = one_record(ops, "mxfp4", group([-math.inf, math.nan, 1.0]), nonfinite="sanitize")
    assert (scales[0], codes(values)[:3], row[:3].tolist()) == (252, [15, 0, 0], [-limit, 0.0, 0.0])


def test_case_06_subnormal_scales(ops: Ops) -> None:
    codes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert numerics.decode_e4m3(codes_)[1].item() == 2.0**-9
    values, scales, row = one_record(ops, "nvfp4", group([6 * 2.0**-9, 2.0**-9], 16))
    assert (scales[0], codes(values)[:2]) == (0x01, [7, 2])
    assert row[:2].tolist() == [6 * 2.0**-9, 2.0**-9]


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-inline"])
def test_case_07_nvfp4_saturates_and_zero_is_zero(ops: Ops, name: str) -> None:
    values, scales, row = one_record(ops, name, [1e4] * 16)
    assert (scales[0], values, row[0].item()) == (0x7E, b"\x77" * 8, 448.0 * 6)
    values, scales, row = one_record(ops, name, [0.0] * 16)
    assert values == bytes(8)
    assert scales[0] != 0x7F
    assert not row.any()


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_case_08_zero_rows_read_as_zeros(ops: Ops, format: mxkv.Format) -> None:
    d = width_for(format, 2 * format.group + format.tail)
    rows = torch.zeros(3, d)
    rows[1] = -0.0
    rows[2, 0] = 1.0
    cache = check_against_reference(ops, format, rows)
    got = ops.load(cache, ops.slots(0, 1, 2), format=format, latent_dim=d).cpu()
    assert not got[:2].any()
    assert torch.equal(got[1].signbit(), torch.ones(d, dtype=torch.bool))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-inline", "fp8"])
def test_case_09_bytes_are_ocp(ops: Ops, name: str) -> None:
    values, _, row = one_record(ops, name, group([448.0, -448.0, -1e-9, 1e-9, -0.0, 1.0]))
    assert values[:6] == bytes([0x7E, 0xFE, 0x80, 0x00, 0x80, 0x38])
    assert row[:6].tolist() == [448.0, -448.0, 0.0, 0.0, 0.0, 1.0]


def test_case_10_e4m3_saturates(ops: Ops) -> None:
    values, _, row = one_record(ops, "fp8", [464.0, 465.0, 1e4, -464.0, -1e38, 448.0])
    assert values == bytes([0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7E])
    assert row.tolist() == [448.0, 448.0, 448.0, -448.0, -448.0, 448.0]
    assert numerics.encode_e4m3(torch.tensor([464.0, 465.0, 1e4, math.inf])).tolist() == [0x7E] * 4


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_case_15_slots_past_the_end(ops: Ops, format: mxkv.Format) -> None:
    d = width_for(format)
    whole, cache = guarded_pool(ops, format, 3, 4, d, gap=16, offset=64)
    rows = rows_of(4, d).to(ops.device)
    slots = ops.slots(12, 2**31, 2**40, -1)
    ops.store(cache, rows, slots, format=format)
    assert (whole == GUARD).all()
    assert_same_rows(ops.load(cache, slots, format=format, latent_dim=d), torch.zeros(4, d))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_case_16_equal_slots(ops: Ops, format: mxkv.Format) -> None:
    d = width_for(format)
    cache = ops.empty(format, 2, 4, d)
    cache.view(torch.uint8).fill_(0x5A)
    rows = rows_of(5, d)
    slots = [3, 6, 3, 6, 3]
    want = pages_of(cache)
    reference.store(want, fp32(rows), slots, format)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots), format=format)
    if ops.backend == "torch":
        assert_same_pages(cache, want)
    else:  # which of the rows stands in 3 and 6 is unspecified; nothing else changes
        got = pages_of(cache)
        for slot in (0, 1, 2, 4, 5, 7):
            block, position = divmod(slot, 4)
            at_values, at_scales = reference.offsets(format, d, 4, position)
            assert (got[block, at_values : at_values + format.value_bytes(d)] == 0x5A).all()
            assert (got[block, at_scales : at_scales + format.scale_bytes(d)] == 0x5A).all()


def test_case_17_fewer_slots_than_tokens(ops: Ops) -> None:
    rows = rows_of(8, 512)
    cache = ops.empty("mxfp4", 2, 8, 512)
    want = pages_of(cache)
    reference.store(want, fp32(rows), [0, 2, 4, 6, 8], mxkv.FORMATS["mxfp4"])
    ops.store(cache, rows.to(ops.device), ops.slots(0, 2, 4, 6, 8))
    assert_same_pages(cache, want)
    assert int((cache.flatten(0, 1) != 0).any(-1).sum()) == 5
    before = pages_of(cache)
    ops.store(cache, rows[:0].to(ops.device), ops.slots())
    assert_same_pages(cache, before)


def test_case_18_kinds_of_slots(ops: Ops) -> None:
    rows = rows_of(3, 96).to(ops.device)
    caches = []
    wide = ops.slots(5, 0, 1, 0, 7, 0)
    for slots in (wide[::2], wide[::2].contiguous(), wide[::2].int(), wide.int()[::2]):
        caches.append(ops.empty("mxfp4", 2, 4, 96))
        ops.store(caches[-1], rows, slots)
    assert all(torch.equal(caches[0], cache) for cache in caches[1:])
    assert caches[0].any()


def test_case_19_wide_block_stride(ops: Ops, tmp_path: Path) -> None:
    stride, blocks, block = 1_039_680, 2100, 2066
    try:
        pool = sparse(tmp_path / "pool", stride * blocks, ops)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no room here for a pool of {stride * blocks} bytes: {error}")
    cache = pool.as_strided((blocks, 64, 272), (stride, 272, 1))
    slots = [block * 64 + 5, 3, blocks * 64 - 1]
    rows = rows_of(3, 512)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots))
    format = mxkv.FORMATS["mxfp4"]
    for token, slot in enumerate(slots):
        start = slot // 64 * stride + slot % 64 * 272
        assert bytes(pool[start : start + 272].tolist()) == b"".join(reference.encode_row(rows[token].tolist(), format))
    near = ops.empty("mxfp4", 1, 4, 512)
    ops.store(near, rows.to(ops.device), ops.slots(0, 1, 2))
    assert_same_rows(ops.load(cache, ops.slots(*slots)), ops.load(near, ops.slots(0, 1, 2)))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_case_20_padded_pool(ops: Ops, format: mxkv.Format) -> None:
    d = width_for(format)
    rows = rows_of(6, d).to(ops.device)
    slots = ops.slots(11, 4, 0, 7, 3, 8)
    plain = ops.empty(format, 3, 4, d)
    whole, padded = guarded_pool(ops, format, 3, 4, d, gap=26)
    padded.view(torch.uint8).zero_() if format.cache_dtype == torch.uint8 else padded.zero_()
    ops.store(plain, rows, slots, format=format)
    ops.store(padded, rows, slots, format=format)
    assert_same_pages(padded, pages_of(plain))
    assert (guards_of(whole, padded) == GUARD).all()
    arguments = {"format": format, "latent_dim": d}
    assert_same_rows(ops.load(padded, slots, **arguments), ops.load(plain, slots, **arguments))


@pytest.mark.parametrize("name", [f.name for f in mxkv.FORMATS.values()])
def test_case_21_latent_of_a_wider_tensor(ops: Ops, name: str) -> None:
    kv = rows_of(7, 576, torch.bfloat16).to(ops.device)
    apart, together = ops.empty(name, 2, 4, 512), ops.empty(name, 2, 4, 512)
    slots = ops.slots(*range(7))
    ops.store(apart, kv[:, :512], slots, format=name)
    ops.store(together, kv[:, :512].contiguous(), slots, format=name)
    assert_same_pages(apart, pages_of(together))
    assert apart.view(torch.uint8).any()


@pytest.mark.parametrize(("d", "width"), [(96, 51), (576, 306)])
def test_case_23_widths_that_no_vector_divides(ops: Ops, d: int, width: int) -> None:
    assert ops.empty("mxfp4", 1, 1, d).shape[-1] == width
    check_against_reference(ops, mxkv.FORMATS["mxfp4"], rows_of(9, d, torch.bfloat16))
