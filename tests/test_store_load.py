"""store and load of every format against the reference: widths, dtypes, policies, RoPE, formats that a caller makes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mxkv
from mxkv import Element, Format, Placement, Scale, checks, dispatch
from tests import reference
from tests.support import (
    BUILTIN,
    CUSTOM,
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    Ops,
    assert_same_pages,
    assert_same_rows,
    check_against_reference,
    cos_sin_table,
    fp32,
    messy_rows,
    name_of,
    pages_of,
    rows_of,
    width_for,
)

NONFINITE = ["propagate", "sanitize"]


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_messy_rows(ops: Ops, format: Format, nonfinite: str) -> None:
    d = width_for(format, 192)
    n = ops.few(24, 3)
    slots = torch.randperm(n + 5, generator=torch.Generator().manual_seed(3))[:n].tolist()
    for dtype in DTYPES:
        rows = messy_rows(n, d, dtype, seed=4)
        check_against_reference(ops, format, rows, block_size=4, slots=slots, nonfinite=nonfinite, dtypes=[dtype])


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_any_width(ops: Ops, format: Format) -> None:
    widths = [32, 64, 96, 160, 192, 320, 384, 512, 576, 1024, 2080, 4096]
    for d in (d for d in widths if not format.accepts_dim(d)):
        with pytest.raises(ValueError, match=f"got {d}"):
            ops.empty(format, 1, 2, d)
    for d in ops.some([d for d in widths if format.accepts_dim(d)], 3):
        check_against_reference(ops, format, rows_of(ops.few(5, 2), d, torch.bfloat16), block_size=3)


@pytest.mark.parametrize("d", [16, 48, 80, 112])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-inline"])
def test_any_width_of_groups_of_16(ops: Ops, name: str, d: int) -> None:
    check_against_reference(ops, mxkv.FORMATS[name], rows_of(5, d), block_size=3)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_any_width_of_plain_rows(ops: Ops, name: str, d: int) -> None:
    check_against_reference(ops, mxkv.FORMATS[name], rows_of(5, d), block_size=3)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_any_block_size(ops: Ops, format: Format) -> None:
    for block_size in ops.some([1, 2, 5, 16, 64], 2):
        slots = sorted({0, block_size - 1, block_size, 2 * block_size + block_size // 2, 3 * block_size - 1})
        check_against_reference(ops, format, rows_of(len(slots), width_for(format)), block_size=block_size, slots=slots)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_overwriting_touches_only_its_record(ops: Ops, format: Format) -> None:
    d = width_for(format)
    cache = ops.empty(format, 3, 4, d)
    cache.view(torch.uint8).fill_(0x5A)
    want = pages_of(cache)
    for seed, slots in enumerate(([5, 2], [2], [11, 0], [5])):
        rows = rows_of(len(slots), d, seed=seed)
        reference.store(want, fp32(rows), slots, format)
        ops.store(cache, rows.to(ops.device), ops.slots(*slots), format=format)
        assert_same_pages(cache, want)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_nothing_to_do(ops: Ops, format: Format) -> None:
    d = width_for(format)
    none = ops.slots()
    cache = ops.empty(format, 2, 4, d)
    cache.view(torch.uint8).fill_(0x5A)
    before = pages_of(cache)
    ops.store(cache, rows_of(0, d).to(ops.device), none, format=format)
    ops.store(cache, rows_of(3, d).to(ops.device), none, format=format)
    ops.store(cache, rows_of(3, d).to(ops.device), ops.slots(-1, 8, 2**40), format=format)
    assert_same_pages(cache, before)
    assert ops.load(cache, none, format=format, latent_dim=d).shape == (0, d)
    assert ops.load(cache, none, format=format, out=torch.empty(0, d, device=ops.device)).shape == (0, d)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_cache_of_no_blocks(ops: Ops, format: Format) -> None:
    d = width_for(format)
    cache = ops.empty(format, 0, 4, d)
    ops.store(cache, rows_of(3, d).to(ops.device), ops.slots(0, 1, 2), format=format)
    rows = ops.load(cache, ops.slots(0, 1, -1), format=format, latent_dim=d)
    assert_same_rows(rows, torch.zeros(3, d))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_a_new_cache_reads_as_zeros(ops: Ops, format: Format) -> None:
    d = width_for(format)
    assert_same_rows(
        ops.load(ops.empty(format, 2, 4, d), ops.slots(*range(8)), format=format, latent_dim=d), torch.zeros(8, d)
    )


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_out_of_any_row_stride(ops: Ops, format: Format) -> None:
    d = width_for(format)
    cache = check_against_reference(ops, format, messy_rows(8, d))
    slots = ops.slots(3, 0, -1, 7, 99, 3)
    for dtype in ops.some(DTYPES, 2):
        want = ops.load(cache, slots, format=format, latent_dim=d, dtype=dtype)
        wide = torch.full((6, d + 9), -7.0, dtype=dtype, device=ops.device)
        out = wide[:, 4 : 4 + d]
        assert ops.load(cache, slots, format=format, out=out) is out
        assert_same_rows(out, want)
        assert (wide[:, :4] == -7).all()
        assert (wide[:, 4 + d :] == -7).all()
        assert_same_rows(want[[2, 4]], torch.zeros(2, d))


@pytest.mark.parametrize("slot_dtype", INDEX_DTYPES, ids=name_of)
def test_default_dtype_and_inference(ops: Ops, slot_dtype: torch.dtype) -> None:
    for format in mxkv.FORMATS.values():
        if format.name.endswith("-inline"):
            continue
        cache = ops.empty(format, 2, 4, 512)
        want = pages_of(cache)
        rows = rows_of(3, 512, torch.bfloat16)
        reference.store(want, fp32(rows), [6, 1, 3], format)
        ops.store(cache, rows.to(ops.device), ops.slots(6, 1, 3, dtype=slot_dtype))
        assert_same_pages(cache, want)
        got = ops.load(cache, ops.slots(1, 6, dtype=slot_dtype))
        assert got.dtype == torch.bfloat16
        assert_same_rows(got, reference.load(want, [1, 6], format, 512, "bfloat16"))


# Caches of other shapes.


@pytest.mark.parametrize("row_gap", [0, 5, 48])
@pytest.mark.parametrize(
    "name",
    [
        "mxfp4",
        "mxfp8-inline",
        "nvfp4-inline",
        "bf16",
        "fp8",
        *(f.name for f in CUSTOM if f.placement is Placement.INLINE),
    ],
)
def test_rows_of_a_2d_cache(ops: Ops, name: str, row_gap: int) -> None:
    format = {f.name: f for f in FORMATS}[name]
    d = width_for(format)
    width = format.record_width(d)
    wide = torch.full((9, width + row_gap), 0, dtype=torch.uint8, device=ops.device)
    if format.cache_dtype != torch.uint8:
        wide = torch.zeros(9, width + row_gap, dtype=format.cache_dtype, device=ops.device)
    cache = wide[:, :width]
    rows = rows_of(4, d)
    want = pages_of(ops.empty(format, 9, 1, d))
    reference.store(want, fp32(rows), [8, 0, 4, 3], format)
    ops.store(cache, rows.to(ops.device), ops.slots(8, 0, 4, 3), format=format)
    assert_same_pages(cache.unsqueeze(1), want)
    assert not pages_of(wide)[:, width * format.cache_dtype.itemsize :].any()
    got = ops.load(cache, ops.slots(8, 0, 4, 9), format=format, latent_dim=d, dtype=torch.float32)
    assert_same_rows(got, reference.load(want, [8, 0, 4, 9], format, d))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8-inline", "nvfp4-inline", "bf16", "fp8"])
def test_any_contiguous_view_with_a_named_format(ops: Ops, name: str) -> None:
    d, rows = 64, rows_of(3, 64)
    plain = ops.empty(name, 2, 4, d)
    ops.store(plain, rows.to(ops.device), ops.slots(1, 6, 3), format=name)
    flat = torch.zeros_like(plain).flatten()
    ops.store(flat, rows.to(ops.device), ops.slots(1, 6, 3), format=name)
    assert torch.equal(flat.view(torch.uint8), plain.flatten().view(torch.uint8))
    deep = plain.view(2, 2, 1, 2, -1)
    got = ops.load(deep, ops.slots(1, 6, 3), format=name, latent_dim=d)
    assert_same_rows(got, ops.load(plain, ops.slots(1, 6, 3), format=name))


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_rows_wider_apart_inside_a_page(ops: Ops, name: str) -> None:
    """Inline and plain records may have any row stride in a 3-D cache too."""
    format = mxkv.FORMATS[name]
    width = format.record_width(64)
    wide = torch.zeros(3, 4, width + 7, dtype=format.cache_dtype, device=ops.device)
    cache = wide[:, :, 2 : 2 + width]
    rows = rows_of(3, 64)
    ops.store(cache, rows.to(ops.device), ops.slots(1, 11, 6))
    want = pages_of(ops.empty(format, 3, 4, 64))
    reference.store(want, fp32(rows), [1, 11, 6], format)
    assert_same_pages(cache, want)
    assert not wide[:, :, :2].any()
    assert not wide[:, :, 2 + width :].any()


# RoPE.


@pytest.mark.parametrize("compress_ratio", [1, 2])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_rope_before_the_scales(ops: Ops, format: Format, compress_ratio: int) -> None:
    d = width_for(format, 128)
    positions = [0, 1, 2, 3, 40, 41, 63, 64, 65, -1, -2, 7, 2**31 - 1, -(2**31)]
    slots = [9, 3, 0, 11, 5, 7, 1, 2, 4, 6, 8, -1, 10, 12]
    rows, table = messy_rows(len(slots), d, seed=5), cos_sin_table(64)
    cache = ops.empty(format, 5, 3, d)
    cache.view(torch.uint8).fill_(0x5A)
    want = pages_of(cache)
    reference.store(
        want, fp32(rows), slots, format, positions=positions, cos_sin=fp32(table), compress_ratio=compress_ratio
    )
    ops.store(
        cache, rows.to(ops.device), ops.slots(*slots), format=format, positions=ops.slots(*positions),
        cos_sin=table.to(ops.device), compress_ratio=compress_ratio,
    )  # fmt: skip
    assert_same_pages(cache, want)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("latent_dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("position_dtype", INDEX_DTYPES, ids=name_of)
def test_rope_dtypes(
    ops: Ops, table_dtype: torch.dtype, latent_dtype: torch.dtype, position_dtype: torch.dtype
) -> None:
    format = mxkv.FORMATS["dsv4"]
    rows, table = rows_of(6, 512, latent_dtype), cos_sin_table(32, table_dtype)
    positions = [5, 31, 0, 17, 32, 9]
    cache = ops.empty(format, 2, 4, 512)
    want = pages_of(cache)
    reference.store(want, fp32(rows), [0, 1, 2, 3, 4, 5], format, positions=positions, cos_sin=fp32(table))
    ops.store(
        cache, rows.to(ops.device), ops.slots(*range(6)), positions=ops.slots(*positions, dtype=position_dtype),
        cos_sin=table.to(ops.device),
    )  # fmt: skip
    assert_same_pages(cache, want)


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "bf16", "fp8"])
def test_rope_of_what_is_not_finite(ops: Ops, name: str, nonfinite: str) -> None:
    format = mxkv.FORMATS[name]
    rows = rows_of(4, 512)
    for token, value in enumerate((float("nan"), float("inf"), 3.3e38, -3e38)):
        rows[token, 470] = value
    table = cos_sin_table(8)
    cache = ops.empty(format, 1, 4, 512)
    want = pages_of(cache)
    arguments: dict[str, Any] = {"nonfinite": nonfinite}
    reference.store(
        want, fp32(rows), [0, 1, 2, 3], format, positions=[7, 1, 2, 3], cos_sin=fp32(table), nonfinite=nonfinite
    )
    ops.store(
        cache, rows.to(ops.device), ops.slots(0, 1, 2, 3), positions=ops.slots(7, 1, 2, 3),
        cos_sin=table.to(ops.device), **arguments,
    )  # fmt: skip
    assert_same_pages(cache, want)


@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "bf16"])
def test_compress_ratio_without_rope(ops: Ops, name: str) -> None:
    """Positions choose the tokens, whether a table turns them or not; a table's end does not matter here."""
    format = mxkv.FORMATS[name]
    rows, positions = rows_of(6, 512), [0, 1, 2, 3, -1, 10**9 + 1]
    cache = ops.empty(format, 2, 4, 512)
    want = pages_of(cache)
    reference.store(want, fp32(rows), [0, 1, 2, 3, 4, 5], format, positions=positions, compress_ratio=2)
    ops.store(cache, rows.to(ops.device), ops.slots(*range(6)), positions=ops.slots(*positions), compress_ratio=2)
    assert_same_pages(cache, want)


def test_rope_table_rows_apart_positions_strided_and_longer_than_slots(ops: Ops) -> None:
    rows, table = rows_of(5, 128), cos_sin_table(16)
    wide = torch.full((16, 100), float("nan"), device=ops.device)
    wide[:, 7:71] = table.to(ops.device)
    positions = ops.slots(*[p for position in (3, 15, 8, 0, 1, 2) for p in (position, 10**6)])[::2]
    assert positions.shape[0] == 6
    cache = ops.empty("mxfp4", 2, 4, 128)
    ops.store(cache, rows.to(ops.device), ops.slots(2, 7, 5, 0), positions=positions, cos_sin=wide[:, 7:71])
    want = pages_of(ops.empty("mxfp4", 2, 4, 128))
    reference.store(want, fp32(rows), [2, 7, 5, 0], mxkv.FORMATS["mxfp4"], positions=[3, 15, 8, 0], cos_sin=fp32(table))
    assert_same_pages(cache, want)


def test_rope_with_a_table_of_no_positions(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 1, 4, 128)
    table = torch.zeros(0, 64, device=ops.device)
    ops.store(cache, rows_of(2, 128).to(ops.device), ops.slots(0, 1), positions=ops.slots(0, 1), cos_sin=table)
    assert not cache.any()


def test_a_skipped_token_does_not_hide_an_earlier_one_of_the_same_slot(ops: Ops) -> None:
    """Two tokens name slot 3, and the second is not stored (its position is even): the first one's record stands."""
    rows = rows_of(2, 64)
    cache = ops.empty("mxfp4", 1, 4, 64)
    ops.store(cache, rows.to(ops.device), ops.slots(3, 3), positions=ops.slots(1, 2), compress_ratio=2)
    want = pages_of(ops.empty("mxfp4", 1, 4, 64))
    reference.store(want, fp32(rows), [3, -1], mxkv.FORMATS["mxfp4"])
    assert_same_pages(cache, want)


# Formats that a caller makes.


@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3], ids=lambda e: e.value)
@pytest.mark.parametrize("scale", [Scale.E8M0, Scale.E4M3], ids=lambda s: s.value)
@pytest.mark.parametrize("placement", [Placement.INLINE, Placement.PAGE], ids=lambda p: p.value)
def test_any_format(ops: Ops, element: Element, scale: Scale, placement: Placement) -> None:
    for group, tail, padding in ops.some([(16, 0, 0), (64, 0, 3), (128, 64, 0), (32, 32, 1)], 2):
        format = Format("mine", element, scale, group, placement, tail=tail, scale_padding=padding)
        rows = messy_rows(6, 2 * group + tail, seed=group)
        check_against_reference(ops, format, rows, slots=[5, 0, 7, 2, 3, 9], dtypes=[torch.bfloat16])


def test_a_format_of_a_builtin_name_is_its_own(ops: Ops) -> None:
    changed = dataclasses.replace(mxkv.FORMATS["mxfp4"], group=64)
    check_against_reference(ops, changed, rows_of(4, 128))


@pytest.mark.parametrize("group", [2, 4, 6, 8, 24, 48])
def test_odd_groups(ops: Ops, group: int) -> None:
    """Groups that are no power of two, or narrower than a wide access: right, or refused with a reason."""
    format = Format("mine", Element.E2M1, Scale.E8M0, group, Placement.INLINE)
    found = mxkv.explain("store", device=ops.device, format=format, latent_dim=group * 4, backend=ops.backend)
    if found.chosen is None:
        assert found.verdicts[ops.backend].reasons
        return
    check_against_reference(ops, format, messy_rows(5, group * 4, seed=group))


@pytest.mark.parametrize("placement", [Placement.INLINE, Placement.PAGE])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_tail_at_an_odd_byte(ops: Ops, placement: Placement, count: int) -> None:
    """Records of odd size whose bf16 tail starts at an odd byte; one row alone too, which is contiguous as is."""
    format = Format("odd", Element.E2M1, Scale.E8M0, 2, placement, tail=2)
    cache, rows = ops.empty(format, 3, 4, 4), torch.tensor([[6.0, -3.0, 1.5, -0.25]] * count)
    slots = ops.slots(*range(5, 5 + count))
    ops.store(cache, rows.to(ops.device), slots, format=format)
    assert torch.equal(ops.load(cache, slots, format=format, latent_dim=4, dtype=torch.float32).cpu(), rows)


@pytest.mark.parametrize("floor", [0.0, 2.0**-110])
@pytest.mark.parametrize("element", [Element.E4M3, Element.E2M1])
def test_rope_of_groups_near_the_least_magnitudes(ops: Ops, element: Element, floor: float) -> None:
    """Where ties of the codes are among the subnormal bf16."""
    format = Format("tiny", element, Scale.E8M0, 32, Placement.INLINE, amax_floor=floor)
    n, d, g = ops.few(64, 24), 128, torch.Generator().manual_seed(1)
    rows = (torch.randn(n, d, generator=g) * 2.0 ** torch.randint(-133, -105, (n, 1), generator=g)).bfloat16()
    arguments = {"format": format, "positions": torch.arange(n) % 8, "cos_sin": cos_sin_table(8)}
    want = mxkv.empty_cache(format, 4, 16, d)
    mxkv.store(want, rows, torch.arange(n), backend="torch", **arguments)
    cache = ops.empty(format, 4, 16, d)
    moved = {name: ops.to(value) if torch.is_tensor(value) else value for name, value in arguments.items()}
    ops.store(cache, rows.to(ops.device), ops.slots(*range(n)), **moved)
    assert torch.equal(cache.cpu(), want)


@pytest.mark.parametrize("tail", [48, 62])
def test_rope_where_groups_and_tail_share_what_is_rotated(ops: Ops, tail: int) -> None:
    """Three regions of a row, the last two of sizes that no power of two divides evenly."""
    format = Format("short-groups", Element.E2M1, Scale.E8M0, 16, Placement.INLINE, tail=tail)
    d = next(width for width in range(320, 400) if format.accepts_dim(width))
    rows, slots = rows_of(9, d, torch.bfloat16).to(ops.device), ops.slots(*range(9))
    arguments = {"format": format, "positions": ops.to(torch.arange(9)), "cos_sin": cos_sin_table(16).to(ops.device)}
    cache, want = ops.empty(format, 2, 8, d), ops.empty(format, 2, 8, d)
    ops.store(cache, rows, slots, **arguments)
    mxkv.store(want, rows, slots, backend="torch", **arguments)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("offset", [0, 1, 2], ids=["aligned", "by-one", "by-two"])
@pytest.mark.parametrize("format", BUILTIN, ids=name_of)
def test_every_configuration_gives_the_same_bytes(ops: Ops, format: Format, offset: int) -> None:
    """The tuner may choose any of them for any call of a kind: rows and pools of every alignment."""
    operations = dispatch.get_backend(ops.backend).load()
    tokens, d = ops.few(70, 19), 512
    rows, slots = messy_rows(tokens, d, torch.bfloat16), torch.randperm(80)[:tokens]
    table, positions = cos_sin_table(tokens), torch.arange(tokens)
    scale = torch.full((1,), 0.37) if format.scale is Scale.TENSOR else None
    want = mxkv.empty_cache(format, 10, 8, d)
    mxkv.store(want, rows, slots, format=format, positions=positions, cos_sin=table, cache_scale=scale, backend="torch")
    read = mxkv.load(want, slots, format=format, cache_scale=scale, backend="torch")
    size, width = format.cache_dtype.itemsize, format.record_width(d)
    extras = [positions.to(ops.device), table.to(ops.device), None if scale is None else scale.to(ops.device)]
    # The offset is in elements: aligned for wide accesses, for one element, for a pair.
    memory = torch.zeros(80 * width * size + 64, dtype=torch.uint8, device=ops.device)
    cache = memory[offset * size :][: 80 * width * size].view(format.cache_dtype).view(10, 8, width)
    latent = torch.zeros(tokens * d + 16, dtype=torch.bfloat16, device=ops.device)[offset:][: tokens * d]
    latent = latent.view(tokens, d).copy_(rows)
    where = slots.to(ops.device)
    spec = checks.store_spec(cache, latent, where, format.spec, *extras[:2], 1, extras[2], "propagate")
    load_spec = checks.load_spec(cache, where, format.spec, d, torch.bfloat16, extras[2], None)
    for config in ops.some(operations.tunable(spec).space, 3):
        memory.zero_()
        operations.prepare(spec)(cache, latent, where, *extras, config=config)
        assert torch.equal(cache.view(torch.uint8).cpu(), want.view(torch.uint8)), (offset, config)
    for config in ops.some(operations.tunable(load_spec).space, 3):
        latent.fill_(7.0)
        operations.prepare(load_spec)(cache, where, latent, extras[2], config=config)
        assert_same_rows(latent, read)
