"""Exhaustive codecs: every code, byte, tie, power of two and 16-bit pattern, on every backend."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import mxkv
from mxkv import Element, Format, numerics
from tests import reference
from tests.reference import decode, next_down, next_up
from tests.support import CUSTOM, DTYPES, FORMATS, Ops, assert_same_rows, check_against_reference, dtype_name, name_of

NONFINITE = ["propagate", "sanitize"]
GROUPED = [f for f in FORMATS if f.grouped]


def ties(element: Element) -> list[float]:
    """The midpoints of neighbouring values."""
    table = reference.TABLES[element]
    return [float((low + high) / 2) for low, high in itertools.pairwise(table)]


def both_sides(values: list[float]) -> list[float]:
    """Each value, its fp32 neighbours, and all of them negated."""
    near = [x for v in values for x in (next_down(v), v, next_up(v))]
    return near + [-x for x in near]


# The functions of numerics.py.


def test_all_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = numerics.decode_e2m1(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(values.signbit(), codes >= 8)
    assert torch.equal(numerics.encode_e2m1(values), codes)
    assert torch.equal(numerics.unpack_nibbles(numerics.pack_nibbles(codes)), codes)
    assert numerics.pack_nibbles(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist() == [0x21, 0xF3]


def test_all_e4m3_bytes_agree_with_torch_and_the_reference() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = numerics.decode_e4m3(codes)
    assert_same_rows(values, codes.view(torch.float8_e4m3fn).float())
    assert_same_rows(values, np.array([decode(Element.E4M3, code) for code in range(256)], np.float32))
    back = numerics.encode_e4m3(values)
    assert torch.equal(back, torch.where(codes == 0xFF, 0x7F, codes))


def test_all_e8m0_bytes() -> None:
    values = numerics.decode_e8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert_same_rows(values, np.array([reference.decode_e8m0(byte) for byte in range(256)], np.float32))
    assert values[0].item() == 2.0**-127


@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3], ids=lambda e: e.value)
def test_ties_and_their_neighbours(element: Element) -> None:
    values = both_sides(ties(element)) + both_sides([float(v) for v in reference.TABLES[element][1:]]) + [0.0, -0.0]
    encode = numerics.encode_e2m1 if element is Element.E2M1 else numerics.encode_e4m3
    got = encode(torch.tensor(values)).tolist()
    assert got == [reference.encode(element, x) for x in values]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3], ids=lambda e: e.value)
def test_all_16_bit_patterns(element: Element, dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype).float()
    if element is Element.E2M1:
        patterns = patterns[~patterns.isnan()]
    encode = numerics.encode_e2m1 if element is Element.E2M1 else numerics.encode_e4m3
    got = encode(patterns).tolist()
    assert got == [reference.encode(element, x) for x in patterns.tolist()]


@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3], ids=lambda e: e.value)
def test_e8m0_scale_around_every_power_of_two(element: Element) -> None:
    amax = [a for a in group_maxima() if a <= reference.finite_limit(mxkv.FORMATS["mxfp4"])]
    got = numerics.e8m0_scale(torch.tensor(amax), element).tolist()
    assert got == [reference.e8m0_scale(a, element) for a in amax]
    assert max(got) <= 254


@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3], ids=lambda e: e.value)
def test_e4m3_scale_around_every_power_of_two(element: Element) -> None:
    amax = group_maxima()
    got = numerics.e4m3_scale(torch.tensor(amax), element).tolist()
    assert got == [reference.e4m3_scale(a, element) for a in amax]
    assert 0 < min(got) < max(got) < 0x7F


# The same through store and load, on every backend.


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def group_maxima() -> list[float]:
    """Powers of two, and what a group's scale can reach, with the fp32 neighbours of each."""
    exact = {2.0**e for e in range(-149, 128)} | {m * 2.0**e for m in (1.5, 1.75) for e in range(-147, 128)}
    found = {x for v in exact for x in (next_down(v), v, next_up(v)) if math.isfinite(x) and x > 0}
    return sorted(found)


def in_groups(values: list[float], format: Format, lead: float) -> torch.Tensor:
    """Rows whose groups start with ``lead``, then hold the values in turn."""
    d = 512 if format.accepts_dim(512) else 512 + format.tail
    body, here = d - format.tail, format.group - 1
    groups = [values[i : i + here] for i in range(0, len(values), here)]
    groups = [[lead, *group, *[0.0] * (here - len(group))] for group in groups]
    flat = torch.tensor(groups).flatten()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % body)).view(-1, body)
    return torch.nn.functional.pad(rows, (0, format.tail))


@pytest.mark.parametrize("format", GROUPED, ids=name_of)
def test_store_ties_and_their_neighbours(ops: Ops, format: Format) -> None:
    """The leading 6 or 448 makes the scale 1, so that the ties are met as they are."""
    values = both_sides(ties(format.element))
    rows = in_groups(values, format, float(reference.TABLES[format.element][-1]))
    cache = check_against_reference(ops, format, rows)
    values_only = cache.cpu().flatten()[: format.value_bytes(rows.shape[1])]
    assert reference.unpack(bytes(values_only[:1].tolist()), format.element)[0] in (0x07, 0x7E)


@pytest.mark.parametrize("format", GROUPED, ids=name_of)
def test_store_around_every_power_of_two(ops: Ops, format: Format) -> None:
    maxima = group_maxima()
    if ops.slow:
        maxima = maxima[::23] + maxima[-12:]
    d = 512 if format.accepts_dim(512) else 512 + format.tail
    fractions = torch.rand(len(maxima), format.group, generator=torch.Generator().manual_seed(0)) * 2 - 1
    groups = torch.tensor(maxima)[:, None] * fractions
    groups[:, format.group // 2] = torch.tensor(maxima) * torch.tensor([1.0, -1.0]).repeat(len(maxima))[: len(maxima)]
    flat = groups.flatten()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % (d - format.tail))).view(-1, d - format.tail)
    check_against_reference(ops, format, torch.nn.functional.pad(rows, (0, format.tail)), dtypes=DTYPES)


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("format", [*mxkv.FORMATS.values(), CUSTOM[4]], ids=name_of)
def test_store_all_16_bit_patterns(ops: Ops, format: Format, dtype: torch.dtype, nonfinite: str) -> None:
    patterns = all_patterns(dtype)
    if ops.slow:
        patterns = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))[: 2**10]].sort().values
    if format.tail:  # let every pattern meet the groups, and the tail
        body = torch.nn.functional.pad(patterns, (0, -patterns.numel() % 448)).view(-1, 448)
        rows = torch.cat((body, patterns.repeat(2)[: body.shape[0] * 64].view(-1, 64)), -1)
    else:
        rows = patterns.view(-1, 512)
    check_against_reference(ops, format, rows, nonfinite=nonfinite)


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_store_shuffled_patterns(ops: Ops, format: Format, nonfinite: str) -> None:
    """Groups that mix every magnitude."""
    d = 512 if format.accepts_dim(512) else 512 + format.tail
    n = ops.few(64, 2)
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(2))[: n * d]
    rows = all_patterns(torch.bfloat16)[order].view(-1, d)
    calm = rows.clone()
    calm[~(calm.float().abs() < 1e30)] = 1.0
    check_against_reference(ops, format, torch.cat((rows, calm)), nonfinite=nonfinite, dtypes=DTYPES)


def fp8_ties() -> list[float]:
    """The ties of E4M3 and their bf16 neighbours."""
    bits = [reference.encode_bf16(tie) for tie in ties(Element.E4M3)]
    near = [reference.decode_bf16(b + step) for b in bits for step in (-1, 0, 1)]
    return near + [-x for x in near]


@pytest.mark.parametrize("cache_scale", [None, 1.0, 0.5, 0.3, 3.7, 1e-6, 1e30])
def test_store_fp8_rows(ops: Ops, cache_scale: float | None) -> None:
    values = fp8_ties()
    scale = 1.0 if cache_scale is None else cache_scale
    values += [min(v * scale, 3e38) for v in values]
    values += [464.0, 465.0, -1e4, 3e38, -3.38e38, 3.3895e38, 3.4e38, math.inf, -math.inf, math.nan, 1e-9, -1e-9, -0.0]
    values += [0.0] * (-len(values) % 64)
    for nonfinite in NONFINITE:
        rows = torch.tensor(values).view(-1, 64)
        check_against_reference(
            ops, mxkv.FORMATS["fp8"], rows, nonfinite=nonfinite, cache_scale=cache_scale, dtypes=DTYPES
        )


def cache_holding(ops: Ops, format: Format, records: torch.Tensor, d: int) -> torch.Tensor:
    cache = ops.empty(format, 1, records.shape[0], d)
    raw = records.to(torch.uint8).reshape((*cache.shape[:2], -1))
    return cache.copy_(raw.to(ops.device).view(format.cache_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_load_every_code_under_every_e8m0_byte(ops: Ops, dtype: torch.dtype) -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]).expand(256, 16)
    cache = cache_holding(ops, mxkv.FORMATS["mxfp4"], torch.cat((codes, torch.arange(256)[:, None]), -1), 32)
    rows = ops.load(cache, ops.slots(*range(256)), format="mxfp4", dtype=dtype)
    table = np.array([decode(Element.E2M1, c) for c in range(16)] * 2, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = table * np.array([reference.decode_e8m0(b) for b in range(256)])[:, None]
    largest = torch.finfo(dtype).max
    assert_same_rows(rows, torch.from_numpy(exact).clamp(-largest, largest).to(dtype))
    assert rows[255].isnan().all()
    assert not rows[:255].isnan().any()


@pytest.mark.parametrize("format", [mxkv.FORMATS["nvfp4-inline"], CUSTOM[4]], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_load_every_e4m3_scale_byte(ops: Ops, format: Format, dtype: torch.dtype) -> None:
    """Negative and NaN scale bytes too: a page may hold anything."""
    codes = (
        torch.arange(8)[None] * 0x22 + 0x10 if format.element is Element.E2M1 else torch.arange(0, 256, 16)[None] + 5
    )
    records = torch.cat((codes.expand(256, -1), torch.arange(256)[:, None]), -1)
    cache = cache_holding(ops, format, records, 16)
    rows = ops.load(cache, ops.slots(*range(256)), format=format, latent_dim=16, dtype=dtype)
    want = [reference.decode_row(bytes(r[:-1]), bytes(r[-1:]), format, dtype_name(dtype)) for r in records.tolist()]
    assert_same_rows(rows, np.array(want, np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_load_every_e4m3_byte_under_every_e8m0_byte(ops: Ops, dtype: torch.dtype) -> None:
    scales = (
        torch.arange(256)
        if not ops.slow
        else torch.tensor([0, 1, 2, 60, 118, 127, 128, 200, 245, 246, 247, 253, 254, 255])
    )
    values = torch.arange(256).expand(len(scales), 256)
    records = torch.cat((values, scales[:, None].expand(-1, 8)), -1)
    cache = cache_holding(ops, mxkv.FORMATS["mxfp8-inline"], records, 256)
    rows = ops.load(cache, ops.slots(*range(len(scales))), format="mxfp8-inline", dtype=dtype)
    table = torch.tensor([decode(Element.E4M3, c) for c in range(256)], dtype=torch.float64)
    exact = table * torch.tensor([reference.decode_e8m0(int(b)) for b in scales], dtype=torch.float64)[:, None]
    largest = torch.finfo(dtype).max
    assert_same_rows(rows, exact.float().clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("cache_scale", [None, 0.3, 1e38, 1e-40])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_load_every_fp8_byte(ops: Ops, dtype: torch.dtype, cache_scale: float | None) -> None:
    cache = cache_holding(ops, mxkv.FORMATS["fp8"], torch.arange(256)[None], 256)
    rows = ops.load(cache, ops.slots(0), dtype=dtype, cache_scale=cache_scale)
    scale = 1.0 if cache_scale is None else float(np.float32(cache_scale))
    want = reference.decode_row(bytes(range(256)), b"", mxkv.FORMATS["fp8"], dtype_name(dtype), scale)
    assert_same_rows(rows, np.array([want], np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_load_every_bf16_pattern(ops: Ops, dtype: torch.dtype) -> None:
    cache = all_patterns(torch.bfloat16).view(1, 64, 1024).to(ops.device)
    rows = ops.load(cache, ops.slots(*range(64)), dtype=dtype)
    patterns = all_patterns(torch.bfloat16).view(64, 1024).float()
    largest = torch.finfo(dtype).max
    assert_same_rows(rows, torch.where(patterns.isinf(), patterns, patterns.clamp(-largest, largest)).to(dtype))
