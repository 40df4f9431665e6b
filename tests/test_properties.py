"""What holds for any rows: errors within half a step, load∘store is a projection, tokens do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mxkv
from mxkv import Element, Format, Scale
from tests import reference
from tests.support import (
    FORMATS,
    Ops,
    assert_same_pages,
    assert_same_rows,
    fp32,
    messy_rows,
    name_of,
    pages_of,
    width_for,
)

E8M0 = [f for f in FORMATS if f.scale is Scale.E8M0]
E4M3_SCALED = [f for f in FORMATS if f.scale is Scale.E4M3]
SEEDS = st.integers(0, 2**32 - 1)


def finite(limit: float) -> st.SearchStrategy[float]:
    """fp32 numbers, the simple ones and the nasty ones."""
    largest = float(np.float32(limit))
    any_float = st.floats(-largest, largest, width=32)
    grid = st.builds(lambda n, e: float(np.float32(n / 8 * 2.0**e)), st.integers(-64, 64), st.integers(-100, 100))
    return any_float | grid | st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 6.0, -448.0])


def row_of(draw: st.DrawFn, d: int, limit: float) -> torch.Tensor:
    """A row of a few drawn values, again and again."""
    few = draw(st.lists(finite(limit), min_size=1, max_size=37))
    return torch.tensor(few).repeat(d // len(few) + 1)[None, :d]


def stored(ops: Ops, format: Format, rows: torch.Tensor, **arguments: Any) -> torch.Tensor:
    n = rows.shape[0]
    cache = ops.empty(format, n, 1, rows.shape[1])
    ops.store(cache, rows.to(ops.device), ops.slots(*range(n)), format=format, **arguments)
    return cache


def loaded(ops: Ops, format: Format, cache: torch.Tensor, d: int, **arguments: Any) -> torch.Tensor:
    slots = ops.slots(*range(cache.shape[0]))
    return ops.load(cache, slots, format=format, latent_dim=d, dtype=torch.float32, **arguments).cpu()


def scales_of(format: Format, cache: torch.Tensor, d: int) -> torch.Tensor:
    """The scale of every value of a cache of one-slot blocks [n, d - tail], fp64."""
    value_bytes, groups = format.value_bytes(d), format.num_groups(d)
    raw = pages_of(cache)[:, value_bytes : value_bytes + groups]
    decode = reference.decode_e8m0 if format.scale is Scale.E8M0 else lambda b: reference.decode(Element.E4M3, b)
    scale = torch.tensor([[decode(int(b)) for b in row] for row in raw], dtype=torch.float64)
    return scale.repeat_interleave(format.group, 1)


def half_steps(element: Element, magnitude: torch.Tensor) -> torch.Tensor:
    """Half the distance of the two codes around a magnitude (above the largest: of the last two)."""
    table = torch.tensor([float(v) for v in reference.TABLES[element]], dtype=torch.float64)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(1, len(table) - 1)
    return (table[above] - table[above - 1]) / 2


@pytest.mark.parametrize("format", E8M0, ids=name_of)
@given(data=st.data())
def test_error_within_half_a_step_of_e8m0(ops: Ops, format: Format, data: st.DataObject) -> None:
    d = width_for(format)
    row = row_of(data.draw, d, reference.finite_limit(format))
    check_half_a_step_of_e8m0(ops, format, row)


@pytest.mark.parametrize("format", E8M0, ids=name_of)
@given(seed=SEEDS)
def test_error_within_half_a_step_of_e8m0_in_messy_rows(ops: Ops, format: Format, seed: int) -> None:
    limit = reference.finite_limit(format)
    rows = messy_rows(4, width_for(format, 192), seed=seed, finite=True).clamp(-limit, limit)
    check_half_a_step_of_e8m0(ops, format, rows)


def check_half_a_step_of_e8m0(ops: Ops, format: Format, rows: torch.Tensor) -> None:
    d = rows.shape[1]
    cache = stored(ops, format, rows)
    got, body = loaded(ops, format, cache, d).double(), slice(0, d - format.tail)
    scale = scales_of(format, cache, d)
    exact = rows.double()[:, body]
    magnitude = exact.abs() / scale
    largest = float(reference.TABLES[format.element][-1])
    assert (magnitude <= largest).all(), "an element clamps"
    error = (got[:, body] - exact).abs()
    limit = half_steps(format.element, magnitude) * scale
    assert (error <= limit).all()
    # No smaller scale would do.
    groups = exact.abs().unflatten(1, (-1, format.group)).amax(-1).clamp(min=format.amax_floor)
    group_scale = scale[:, :: format.group]
    smallest = (group_scale <= 2.0**-127) | (groups > group_scale / 2 * largest)
    assert (smallest | ((groups == 0) & (group_scale == 1))).all()
    if format.tail:
        assert_same_rows(got[:, d - format.tail :].float(), rows[:, d - format.tail :].bfloat16())


@pytest.mark.parametrize("format", E4M3_SCALED, ids=name_of)
@given(seed=SEEDS)
def test_error_within_half_a_step_of_e4m3_scales(ops: Ops, format: Format, seed: int) -> None:
    """Where the scale neither clamps nor is subnormal; the scale is rounded, and so is the quotient."""
    d = width_for(format, 96)
    rows = messy_rows(6, d, seed=seed, finite=True).clamp(-1e9, 1e9)
    cache = stored(ops, format, rows)
    body = slice(0, d - format.tail)
    scale, exact = scales_of(format, cache, d), rows.double()[:, body]
    got = loaded(ops, format, cache, d).double()[:, body]
    largest = float(reference.TABLES[format.element][-1])
    amax = exact.abs().unflatten(1, (-1, format.group)).amax(-1).repeat_interleave(format.group, 1)
    usual = (amax / largest >= 2.0**-6) & (amax / largest <= 448) & (amax >= format.amax_floor)
    limit = half_steps(format.element, exact.abs() / scale) * scale * (1 + 2e-7) + exact.abs() * 2e-7
    if format.element is Element.E4M3:  # 448 plus a sixteenth is more than half a step above: it clamps
        limit = torch.maximum(limit, exact.abs() - largest * scale)
    assert ((got - exact).abs() <= limit)[usual].all()
    assert (amax[usual] <= scale[usual] * largest * (1 + 1 / 16)).all()


@pytest.mark.parametrize("format", E8M0, ids=name_of)
@given(data=st.data())
def test_what_was_loaded_loads_again(ops: Ops, format: Format, data: st.DataObject) -> None:
    row = row_of(data.draw, width_for(format), 3.4e38)
    check_loads_again(ops, format, row)


@pytest.mark.parametrize("nonfinite", ["propagate", "sanitize"])
@pytest.mark.parametrize("format", E8M0, ids=name_of)
@given(seed=SEEDS)
def test_what_was_loaded_loads_again_in_messy_rows(ops: Ops, format: Format, nonfinite: str, seed: int) -> None:
    check_loads_again(ops, format, messy_rows(4, width_for(format, 192), seed=seed), nonfinite=nonfinite)


def check_loads_again(ops: Ops, format: Format, rows: torch.Tensor, **arguments: Any) -> None:
    d = rows.shape[1]
    once = loaded(ops, format, stored(ops, format, rows, **arguments), d)
    twice = loaded(ops, format, stored(ops, format, once, **arguments), d)
    assert_same_rows(twice, once)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
@given(seed=SEEDS)
def test_tokens_do_not_see_each_other(ops: Ops, format: Format, seed: int) -> None:
    """A row's record does not depend on what is stored with it."""
    rows = messy_rows(5, width_for(format), torch.bfloat16, seed=seed)
    together = pages_of(stored(ops, format, rows))
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
    assert (pages_of(stored(ops, format, rows[order])) == together[order]).all()
    for token in (0, 3):
        assert (pages_of(stored(ops, format, rows[token : token + 1])) == together[token]).all()


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
@given(seed=SEEDS)
def test_sign_does_not_change_the_magnitude(ops: Ops, format: Format, seed: int) -> None:
    rows = messy_rows(3, width_for(format), seed=seed)
    d = rows.shape[1]
    plus = loaded(ops, format, stored(ops, format, rows), d)
    minus = loaded(ops, format, stored(ops, format, -rows), d)
    assert_same_rows(torch.where(plus.isnan(), plus, -minus), plus)


@pytest.mark.parametrize("name", ["mxfp4", "fp4-64", "fp4-page"])
@given(seed=SEEDS, shift=st.integers(-20, 20))
def test_powers_of_two_go_through_e8m0_scales(ops: Ops, name: str, seed: int, shift: int) -> None:
    format = next(f for f in FORMATS if f.name == name)
    rows = messy_rows(2, width_for(format), torch.float16, seed=seed, finite=True).float()
    d = rows.shape[1]
    plain = loaded(ops, format, stored(ops, format, rows), d)
    assert_same_rows(loaded(ops, format, stored(ops, format, rows * 2.0**shift), d), plain * 2.0**shift)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
@given(seed=SEEDS)
def test_narrow_dtypes_are_the_wide_one_rounded(ops: Ops, format: Format, dtype: torch.dtype, seed: int) -> None:
    rows = messy_rows(3, width_for(format), seed=seed)
    d = rows.shape[1]
    cache = stored(ops, format, rows)
    wide = loaded(ops, format, cache, d)
    narrow = ops.load(cache, ops.slots(0, 1, 2), format=format, latent_dim=d, dtype=dtype)
    largest = torch.finfo(dtype).max
    keeps_infinite = torch.zeros(d, dtype=torch.bool)
    keeps_infinite[d - (d if format.element is Element.BF16 else format.tail) :] = True
    clamped = torch.where(wide.isinf() & keeps_infinite, wide, wide.clamp(-largest, largest))
    assert_same_rows(narrow, clamped.to(dtype))


@pytest.mark.parametrize("format", [mxkv.FORMATS[n] for n in ("mxfp4", "nvfp4", "fp8")], ids=name_of)
@given(
    slots=st.lists(st.integers(-3, 14) | st.sampled_from([2**31, 2**32, -(2**31), 2**63 - 1, -(2**63)]), max_size=12),
    extra=st.integers(0, 3),
    seed=SEEDS,
)
def test_any_slots(ops: Ops, format: Format, slots: list[int], extra: int, seed: int) -> None:
    if ops.backend != "torch":
        slots = list(dict.fromkeys(slots))  # elsewhere a slot that comes twice is unspecified
    d = width_for(format)
    rows = messy_rows(len(slots) + extra, d, torch.float16, seed=seed)
    cache = ops.empty(format, 4, 3, d)
    want = pages_of(cache)
    reference.store(want, fp32(rows), slots, format)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots), format=format)
    assert_same_pages(cache, want)
    got = ops.load(cache, ops.slots(*slots), format=format, latent_dim=d, dtype=torch.float32)
    assert_same_rows(got, reference.load(want, slots, format, d))


@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "bf16"])
@given(
    positions=st.lists(st.integers(-2, 20) | st.sampled_from([2**31, 2**32 + 1, -(2**63)]), min_size=1, max_size=6),
    compress_ratio=st.sampled_from([1, 2]),
    max_pos=st.integers(0, 17),
    seed=SEEDS,
)
def test_any_positions(ops: Ops, name: str, positions: list[int], compress_ratio: int, max_pos: int, seed: int) -> None:
    format = mxkv.FORMATS[name]
    d = width_for(format)
    n = len(positions)
    rows = messy_rows(n, d, torch.bfloat16, seed=seed)
    table = torch.randn(max_pos, 64, generator=torch.Generator().manual_seed(seed))
    cache = ops.empty(format, n, 1, d)
    want = pages_of(cache)
    reference.store(
        want,
        fp32(rows),
        list(range(n)),
        format,
        positions=positions,
        cos_sin=fp32(table),
        compress_ratio=compress_ratio,
    )
    ops.store(
        cache, rows.to(ops.device), ops.slots(*range(n)), format=format, positions=ops.slots(*positions),
        cos_sin=table.to(ops.device), compress_ratio=compress_ratio,
    )  # fmt: skip
    assert_same_pages(cache, want)
