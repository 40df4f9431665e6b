"""Where bytes go: strides, guards, padding, pools past 2**31, slots of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mxkv
from mxkv import Format
from tests import reference
from tests.support import (
    DTYPES,
    FORMATS,
    GUARD,
    INDEX_DTYPES,
    Ops,
    assert_same_pages,
    assert_same_rows,
    fp32,
    guarded_pool,
    guards_of,
    name_of,
    pages_of,
    rows_of,
    sparse,
    width_for,
)


@pytest.mark.parametrize("gap", [0, 6])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_pool_between_guards(ops: Ops, format: Format, gap: int) -> None:
    """Pages apart from each other, at an address that is aligned to the dtype only: no byte outside them changes."""
    d = width_for(format)
    whole, cache = guarded_pool(ops, format, 3, 4, d, gap=gap, offset=34)
    want = pages_of(cache)
    rows = rows_of(8, d)
    slots = [11, 0, -1, 12, 5, 2**31, -(2**31), 3]
    reference.store(want, fp32(rows), slots, format)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots), format=format)
    assert_same_pages(cache, want)
    guards = guards_of(whole, cache)
    assert guards.numel() == 68 + 3 * gap
    assert (guards == GUARD).all()
    got = ops.load(cache, ops.slots(11, 0, 5, 3), format=format, latent_dim=d, dtype=torch.float32)
    assert_same_rows(got, reference.load(want, [11, 0, 5, 3], format, d))


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "dsv4"])
def test_pools_at_odd_addresses(ops: Ops, name: str, offset: int) -> None:
    format = mxkv.FORMATS[name]
    whole, cache = guarded_pool(ops, format, 2, 3, 512, gap=offset, offset=offset)
    want = pages_of(cache)
    rows = rows_of(4, 512)
    reference.store(want, fp32(rows), [5, 1, 3, 0], format)
    ops.store(cache, rows.to(ops.device), ops.slots(5, 1, 3, 0))
    assert_same_pages(cache, want)
    assert (guards_of(whole, cache) == GUARD).all()
    assert_same_rows(ops.load(cache, ops.slots(5, 3), dtype=torch.float32), reference.load(want, [5, 3], format, 512))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_blocks_with_other_layers_pages_between_them(ops: Ops, format: Format) -> None:
    """A block stride that is no multiple of the page (61 layers' pages of other sizes stand between)."""
    d = width_for(format)
    width = format.record_width(d)
    pool = torch.full((4, 7 * width + 10), 0, dtype=torch.uint8, device=ops.device)
    if format.cache_dtype != torch.uint8:
        pool = torch.zeros(4, 7 * width + 10, dtype=format.cache_dtype, device=ops.device)
    cache = pool[:, width + 4 : 4 * width + 4].unflatten(1, (3, width))
    rows = rows_of(5, d)
    want = pages_of(ops.empty(format, 4, 3, d))
    reference.store(want, fp32(rows), [11, 2, 3, 0, 7], format)
    ops.store(cache, rows.to(ops.device), ops.slots(11, 2, 3, 0, 7), format=format)
    assert_same_pages(cache, want)
    cache.view(torch.uint8).zero_()
    assert not pool.view(torch.uint8).any()


@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "fp8"])
def test_reversed_or_overlapping_strides_are_never_garbage(ops: Ops, name: str) -> None:
    format = mxkv.FORMATS[name]
    flat = torch.zeros(64 * format.record_width(512), device=ops.device).to(format.cache_dtype)
    width = format.record_width(512)
    for strides in ((width, width, 1), (4 * width, width - 1, 1), (4 * width, width, 2), (0, width, 1)):
        cache = flat.as_strided((3, 4, width), strides)
        with pytest.raises(ValueError, match=r"expected|must"):
            ops.store(cache, rows_of(1, 512).to(ops.device), ops.slots(0))
        assert not flat.view(torch.uint8).any()


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_latent_of_any_row_stride(ops: Ops, format: Format) -> None:
    d = width_for(format)
    latents = []
    for dtype in DTYPES:
        wide = rows_of(5, d + 37, dtype).to(ops.device)
        base = rows_of(1, d, dtype).to(ops.device)
        latents += [
            wide[:, :d],
            wide[:, 3 : 3 + d],
            wide[::2, 5 : 5 + d],
            base.expand(4, d),
            wide.flip(0)[:, 1 : 1 + d],
        ]
    for latent in ops.some(latents, 3):
        slots = ops.slots(*range(1, latent.shape[0] + 1))
        apart, together = (ops.empty(format, 2, 4, d) for _ in range(2))
        ops.store(apart, latent, slots, format=format)
        ops.store(together, latent.contiguous(), slots, format=format)
        assert_same_pages(apart, pages_of(together))


@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "fp8"])
def test_transposed_latent_is_right_or_an_error(ops: Ops, name: str) -> None:
    latent = rows_of(512, 512).to(ops.device)[:, :6].t()
    assert latent.stride() == (1, 512)
    cache, want = ops.empty(name, 2, 4, 512), ops.empty(name, 2, 4, 512)
    ops.store(want, latent.contiguous(), ops.slots(*range(6)))
    refusal = None
    try:
        ops.store(cache, latent, ops.slots(*range(6)))
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        assert_same_pages(cache, pages_of(want))
    else:
        assert "stride" in refusal
        assert not cache.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=name_of)
def test_slots_of_every_kind(ops: Ops, dtype: torch.dtype) -> None:
    rows = rows_of(4, 64)
    slots = [6, -1, 8, 2]
    want = pages_of(ops.empty("mxfp4", 2, 4, 64))
    reference.store(want, fp32(rows), slots, mxkv.FORMATS["mxfp4"])
    plain = ops.slots(*slots, dtype=dtype)
    table = torch.full((4, 3), 3, dtype=dtype, device=ops.device)
    table[:, 1] = plain
    double = torch.full((8,), 1, dtype=dtype, device=ops.device)
    double[::2] = plain
    for kind in (plain, table[:, 1], double[::2], torch.cat((plain, plain))[4:]):
        cache = ops.empty("mxfp4", 2, 4, 64)
        ops.store(cache, rows.to(ops.device), kind)
        assert_same_pages(cache, want)
        assert_same_rows(
            ops.load(cache, kind, dtype=torch.float32), reference.load(want, slots, mxkv.FORMATS["mxfp4"], 64)
        )
    same = torch.full((1,), 5, dtype=dtype, device=ops.device).expand(4)
    assert torch.equal(ops.load(cache, same), ops.load(cache, same.contiguous()))


def test_int32_extremes_do_not_wrap(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 64)
    slots = ops.slots(2**31 - 1, -(2**31), 8, -8, dtype=torch.int32)
    ops.store(cache, rows_of(4, 64).to(ops.device), slots)
    assert not cache.any()
    assert_same_rows(ops.load(cache, slots), torch.zeros(4, 64))


def test_int64_slots_whose_low_word_is_a_slot(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 64)
    slots = ops.slots(2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63), 2**62 + 1)
    ops.store(cache, rows_of(5, 64).to(ops.device), slots)
    assert not cache.any()
    ops.store(cache, rows_of(1, 64).to(ops.device), ops.slots(3))
    assert_same_rows(ops.load(cache, slots), torch.zeros(5, 64))


def test_positions_whose_low_word_is_in_range(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 64)
    positions = ops.slots(2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63))
    table = torch.ones(8, 64, device=ops.device)
    for ratio in (1, 2):
        ops.store(
            cache, rows_of(4, 64).to(ops.device), ops.slots(0, 1, 2, 3), positions=positions, cos_sin=table,
            compress_ratio=ratio,
        )  # fmt: skip
    assert not cache.any()


# Past 2**31. The pools are sparse files, of which only the touched pages exist.


def big(path: Path, nbytes: int, ops: Ops) -> torch.Tensor:
    try:
        return sparse(path / "pool", nbytes, ops)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no room here for a pool of {nbytes} bytes: {error}")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "dsv4", "bf16"])
def test_pool_past_32_bit_addresses(ops: Ops, tmp_path: Path, name: str) -> None:
    """Blocks 2**30 bytes apart: the last one starts past 2**32 bytes."""
    format = mxkv.FORMATS[name]
    stride, width = 2**30 + 512, format.record_width(512)
    itemsize = format.cache_dtype.itemsize
    pool = big(tmp_path, 5 * stride, ops).view(format.cache_dtype)
    cache = pool.as_strided((5, 4, width), (stride // itemsize, width, 1))
    rows = rows_of(5, 512)
    slots = [19, 8, 14, 2, 20]
    want = pages_of(ops.empty(format, 5, 4, 512))
    reference.store(want, fp32(rows), slots, format)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots))
    assert_same_pages(cache, want)
    assert_same_rows(ops.load(cache, ops.slots(*slots), dtype=torch.float32), reference.load(want, slots, format, 512))


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_a_page_past_32_bit_offsets(ops: Ops, tmp_path: Path, name: str) -> None:
    """One block of more than 2**31 bytes: rows that stand 32 KiB apart."""
    format = mxkv.FORMATS[name]
    width, size, count = format.record_width(64), format.cache_dtype.itemsize, 70_000
    pool = big(tmp_path, count * 32768, ops).view(format.cache_dtype)
    cache = pool.as_strided((1, count, width), (count * 32768 // size, 32768 // size, 1))
    rows = rows_of(3, 64, torch.bfloat16)
    slots = [count - 1, 0, 2**31 // 32768]
    ops.store(cache, rows.to(ops.device), ops.slots(*slots), format=format)
    want = ops.empty(format, 1, 3, 64)
    ops.store(want, rows.to(ops.device), ops.slots(0, 1, 2), format=format)
    for token, slot in enumerate(slots):
        assert torch.equal(cache[0, slot], want[0, token])
    got = ops.load(cache, ops.slots(*slots), format=format, dtype=torch.float32)
    assert torch.equal(got, ops.load(want, ops.slots(0, 1, 2), format=format, dtype=torch.float32))


def test_slots_past_32_bits(ops: Ops, tmp_path: Path) -> None:
    """A pool of more than 2**31 slots of 17 bytes."""
    blocks = 2**25 + 2
    cache = big(tmp_path, blocks * 64 * 17, ops).view(blocks, 64, 17)
    slots = [2**31 + 70, 2**31 - 1, 2**31, 1, blocks * 64 - 1, blocks * 64]
    rows = rows_of(6, 32)
    ops.store(cache, rows.to(ops.device), ops.slots(*slots))
    got = ops.load(cache, ops.slots(*slots), dtype=torch.float32)
    format = mxkv.FORMATS["mxfp4"]
    want = torch.zeros(6, 32)
    for token, slot in enumerate(slots[:-1]):
        values, scales = reference.encode_row(rows[token].tolist(), format)
        block, position = divmod(slot, 64)
        assert bytes(cache[block, position].tolist()) == values + scales
        want[token] = torch.tensor(reference.decode_row(values, scales, format))
    assert_same_rows(got, want)


def test_latent_past_32_bit_addresses(ops: Ops, tmp_path: Path) -> None:
    """Rows 2**30 elements apart: the last ones start past 2**31 elements."""
    stride = 2**30 + 64
    latent = big(tmp_path, 2 * (3 * stride + 128), ops).view(torch.bfloat16).as_strided((4, 128), (stride, 1))
    rows = rows_of(4, 128, torch.bfloat16)
    latent.copy_(rows)
    cache = ops.empty("mxfp4", 1, 4, 128)
    ops.store(cache, latent, ops.slots(3, 1, 0, 2))
    want = pages_of(ops.empty("mxfp4", 1, 4, 128))
    reference.store(want, fp32(rows), [3, 1, 0, 2], mxkv.FORMATS["mxfp4"])
    assert_same_pages(cache, want)


def test_out_past_32_bit_addresses(ops: Ops, tmp_path: Path) -> None:
    stride = 2**30 + 64
    out = big(tmp_path, 2 * (3 * stride + 128), ops).view(torch.bfloat16).as_strided((4, 128), (stride, 1))
    cache = ops.empty("mxfp4", 1, 4, 128)
    ops.store(cache, rows_of(4, 128).to(ops.device), ops.slots(0, 1, 2, 3))
    ops.load(cache, ops.slots(3, 1, 0, 7), out=out)
    assert_same_rows(out, ops.load(cache, ops.slots(3, 1, 0, 7)))


def test_indices_past_32_bit_addresses(ops: Ops, tmp_path: Path) -> None:
    """Slots and positions 2**30 elements apart."""
    apart = big(tmp_path, 8 * (2 * 2**30 + 8), ops).view(torch.int64)
    slots, positions = apart[: 2**31 + 1 : 2**30], apart[3 : 2**31 + 4 : 2**30]
    slots.copy_(torch.tensor([2, 3, 1]))
    positions.copy_(torch.tensor([1, 3, 5]))
    rows, table = rows_of(3, 64), cos_sin_ones()
    cache, want = ops.empty("mxfp4", 1, 4, 64), pages_of(ops.empty("mxfp4", 1, 4, 64))
    ops.store(cache, rows.to(ops.device), slots, positions=positions, cos_sin=table.to(ops.device), compress_ratio=2)
    reference.store(
        want, fp32(rows), [2, 3, 1], mxkv.FORMATS["mxfp4"], positions=[1, 3, 5], cos_sin=fp32(table), compress_ratio=2
    )
    assert_same_pages(cache, want)


def cos_sin_ones() -> torch.Tensor:
    return torch.cat((torch.full((8, 32), 0.6), torch.full((8, 32), 0.8)), -1)


def test_strided_arithmetic_of_huge_pools_needs_no_memory() -> None:
    """The layout of a pool that no machine holds: Python integers, never 32 bits."""
    cache = torch.empty(2**22, 64, 272, dtype=torch.uint8, device="meta")
    from mxkv.paging import layout_of

    layout = layout_of(cache, mxkv.FORMATS["mxfp4"], 512)
    assert layout.num_slots == 2**28
    assert (layout.num_blocks - 1) * layout.block_stride == (2**22 - 1) * 64 * 272
