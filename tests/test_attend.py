"""attend against fp64, on every backend: formats, widths, heads, selections, splits, sinks, what must not be read."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import mxkv
import mxkv.paging
from mxkv import Element, Format, Placement, Scale
from mxkv.contracts import AttendSpec
from tests import reference
from tests.support import (
    BUILTIN,
    CUSTOM,
    FORMATS,
    GUARD,
    INDEX_DTYPES,
    Ops,
    generator,
    guarded_pool,
    guards_of,
    name_of,
    width_for,
)

QUERY_DTYPES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CACHE_SCALE = 0.02
SELECTIONS = ["ragged", "dense", "pages"]


@dataclasses.dataclass
class Problem:
    """A full cache, queries, and the slots that each selects."""

    format: Format
    cache: torch.Tensor
    keys: torch.Tensor
    q: torch.Tensor
    selected: list[list[int]]
    cache_scale: float | None

    def arguments(self, ops: Ops, selection: str = "ragged", dtype: torch.dtype = torch.int32) -> dict[str, Any]:
        rows = select(ops, self.selected, selection, dtype)
        return {"format": self.format, "cache_scale": self.cache_scale, **rows}

    def run(self, ops: Ops, selection: str = "ragged", **arguments: Any) -> Any:
        return ops.attend(self.q, self.cache, **self.arguments(ops, selection), **arguments)


def select(
    ops: Ops, selected: Sequence[Sequence[int]], selection: str = "ragged", dtype: torch.dtype = torch.int32
) -> dict[str, Any]:
    """The arguments that select slots, ragged or dense (padded with -1)."""
    if selection == "ragged":
        indptr = torch.tensor([0, *map(len, selected)]).cumsum(0)
        flat = [slot for slots in selected for slot in slots]
        return {"indices": ops.to(flat, dtype).reshape(-1), "indptr": ops.to(indptr.to(dtype))}
    longest = max(map(len, selected))
    padded = [[*slots, *[-1] * (longest - len(slots))] for slots in selected]
    return {"indices": ops.to(padded, dtype).reshape(len(selected), longest)}


def problem(
    ops: Ops,
    format: Format,
    d: int,
    *,
    heads: int = 3,
    counts: Sequence[int] = (40, 0, 1, 17),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    blocks: int = 7,
    block_size: int = 8,
    rows: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
) -> Problem:
    g = generator(seed)
    slots = blocks * block_size
    rows = torch.randn(slots, d, generator=g) if rows is None else rows
    cache_scale = CACHE_SCALE if format.scale is Scale.TENSOR else None
    cache = ops.empty(format, blocks, block_size, d)
    ops.store(cache, rows.to(ops.device), ops.slots(*range(slots)), format=format, cache_scale=cache_scale)
    keys = mxkv.load(
        cache, ops.slots(*range(slots)), format=format, latent_dim=d, dtype=torch.float32, cache_scale=cache_scale,
        backend="torch",
    )  # fmt: skip
    q = torch.randn(len(counts), heads, d, generator=g) if q is None else q
    selected = [torch.randint(-2, slots + 2, (count,), generator=g).tolist() for count in counts]
    return Problem(format, cache, keys.cpu(), q.to(dtype).to(ops.device), selected, cache_scale)


def simple(q: Any, keys: Any, slots: Sequence[int], scale: float, value_dim: int) -> Any:
    """What products of bf16 that sum in fp32 give for one query [heads, d], unrounded: the measure of errors."""
    keys = keys[[slot for slot in slots if 0 <= slot < len(keys)]].bfloat16().float()
    logits = q.float() @ keys.T * scale
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights.bfloat16().float() @ keys[:, :value_dim] / weights.sum(-1, keepdim=True)


def check(
    p: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> None:
    """Each result within twice the error of :func:`simple`, and one rounding, of what fp64 gives."""
    q = p.q.detach().cpu().double().numpy()
    sinks = None if sink is None else sink.cpu().tolist()
    want, logs = reference.attend(q, p.keys.numpy(), p.selected, scale=scale, sink=sinks, value_dim=value_dim)
    dim = q.shape[2]
    scale = dim**-0.5 if scale is None else scale
    got = out.detach().cpu().double().numpy()
    assert got.shape == want.shape
    assert not np.isnan(got).any()
    plain = reference.attend(q, p.keys.numpy(), p.selected, scale=scale, value_dim=value_dim)[0]
    for i, slots in enumerate(p.selected):
        if np.isneginf(logs[i]).all():
            assert not got[i].any(), "a query of no rows gives zeros"
            continue
        with np.errstate(all="ignore"):
            budget = (
                2
                * np.abs(simple(p.q[i].cpu(), p.keys, slots, scale, value_dim or dim).double().numpy() - plain[i]).max()
            )
        allowed = float(budget) + ROUNDING[out.dtype] * np.abs(want[i]) + 1e-30
        worst = np.abs(got[i] - want[i]) - allowed
        assert (worst <= 0).all(), f"query {i}: error {np.abs(got[i] - want[i]).max()}, budget {budget}"
    if lse is not None:
        found = lse.cpu().double().numpy()
        assert np.array_equal(np.isneginf(found), np.isneginf(logs))
        finite = ~np.isneginf(logs)
        assert np.allclose(found[finite], logs[finite], rtol=1e-5, atol=1e-4)


# Formats, widths, heads.


@pytest.mark.parametrize("selection", ["ragged", "dense"])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_formats(ops: Ops, format: Format, selection: str) -> None:
    p = problem(ops, format, width_for(format, 128))
    out, lse = p.run(ops, selection, return_lse=True)
    check(p, out, lse)


@pytest.mark.parametrize("d", [64, 96, 192, 320, 512, 576])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "mxfp8-inline", "bf16", "fp8"])
def test_widths(ops: Ops, name: str, d: int) -> None:
    p = problem(ops, mxkv.FORMATS[name], d, heads=2, counts=(20, 33))
    check(p, *p.run(ops, return_lse=True))


@pytest.mark.parametrize("d", [1, 2, 7, 16, 33, 80])
@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_odd_widths(ops: Ops, name: str, d: int) -> None:
    format = mxkv.FORMATS[name]
    if not format.accepts_dim(d):
        pytest.skip(f"{name} has no rows of {d} values")
    p = problem(ops, format, d, heads=2, counts=(20, 3))
    check(p, *p.run(ops, return_lse=True))


@pytest.mark.parametrize("value_dim", [1, 40, 64, 500, 512])
@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_fewer_values_than_a_row_has(ops: Ops, name: str, value_dim: int) -> None:
    """MLA's split: 576 values make the logits, the first 512 are summed up."""
    p = problem(ops, mxkv.FORMATS[name], 576, heads=2, counts=(20, 3))
    out = p.run(ops, value_dim=value_dim)
    check(p, out, value_dim=value_dim)
    wide = torch.full((2, 2, 600), float("nan"), dtype=p.q.dtype, device=ops.device)
    assert p.run(ops, out=wide[..., 8 : 8 + value_dim]).data_ptr() == wide[..., 8:].data_ptr()
    assert torch.equal(wide[..., 8 : 8 + value_dim], out)
    assert wide[..., :8].isnan().all()
    assert wide[..., 8 + value_dim :].isnan().all()


@pytest.mark.parametrize("heads", [1, 2, 15, 16, 17, 31, 64, 65, 128, 256])
def test_heads(ops: Ops, heads: int) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, heads=heads, counts=(20, 0))
    sink = torch.linspace(-3, 3, heads, device=ops.device)
    check(p, *p.run(ops, return_lse=True, sink=sink), sink=sink)


@pytest.mark.parametrize("dtype", QUERY_DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "bf16"])
def test_query_dtypes(ops: Ops, name: str, dtype: torch.dtype) -> None:
    """An fp16 query is not rounded to bf16 on the way."""
    p = problem(ops, mxkv.FORMATS[name], 128, dtype=dtype)
    check(p, *p.run(ops, return_lse=True))


@pytest.mark.parametrize("scale", [0.0, 0.5, -0.3, 1e-3])
def test_scale(ops: Ops, scale: float) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    check(p, *p.run(ops, return_lse=True, scale=scale), scale=scale)


@pytest.mark.parametrize("group", [4, 6, 8, 24])
def test_odd_groups(ops: Ops, group: int) -> None:
    """Groups that are no power of two, or narrower than a word: right, or refused with a reason."""
    format = Format("mine", Element.E2M1, Scale.E8M0, group, Placement.INLINE)
    found = mxkv.explain("attend", device=ops.device, format=format, latent_dim=group * 5, backend=ops.backend)
    if found.chosen is None:
        assert "power of two" in found.verdicts[ops.backend].reasons[0]
        return
    p = problem(ops, format, group * 5)
    check(p, p.run(ops))


@pytest.mark.parametrize("placement", [Placement.INLINE, Placement.PAGE], ids=lambda p: p.value)
def test_records_at_odd_bytes(ops: Ops, placement: Placement) -> None:
    """Records of odd size, whose bf16 tail starts at an odd byte too."""
    format = Format("odd", Element.E2M1, Scale.E8M0, 8, placement, tail=2, scale_padding=2)
    p = problem(ops, format, 26)
    check(p, p.run(ops))


# Selections.


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "bf16"])
def test_pages(ops: Ops, name: str, dtype: torch.dtype) -> None:
    """Case 22: a table of exact length with entries of -1, and past the end; lengths of 0, past the end, negative."""
    p = problem(ops, mxkv.FORMATS[name], 64, counts=[0] * 6)
    table = [[3, 0, 6], [5, -1, 1], [7, 2, 2**31 - 1], [1, 1, 1], [-5, -1, 0], [4, 0, 0]]
    lengths = [24, 20, 24, 0, -3, 1000]
    p.selected = [
        [block * 8 + i % 8 if 0 <= block < 7 else -1 for i in range(max(0, min(length, 24))) for block in [row[i // 8]]]
        for row, length in zip(table, lengths, strict=True)
    ]
    arguments = {"format": p.format, "seq_lens": ops.to(lengths, dtype)}
    wide = ops.to([[9, *[x for entry in row for x in (entry, 77)]] for row in table], dtype)
    for blocks in (ops.to(table, dtype), wide[:, 1::2]):
        out, lse = ops.attend(p.q, p.cache, block_table=blocks, return_lse=True, **arguments)
        check(p, out, lse)
    exact = [row[: -(-max(0, min(length, 24)) // 8)] for row, length in zip(table, lengths, strict=True)][1]
    flat = ops.to(exact, dtype)[None]
    out = ops.attend(p.q[1:2], p.cache, block_table=flat, format=p.format, seq_lens=ops.to([20], dtype))
    assert torch.equal(out, ops.attend(p.q, p.cache, block_table=ops.to(table, dtype), **arguments)[1:2])


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("selection", ["ragged", "dense"])
def test_indices_of_any_stride_and_dtype(ops: Ops, selection: str, dtype: torch.dtype) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    want = p.run(ops, selection)
    plain = p.arguments(ops, selection, dtype)
    strided = dict(plain)
    for name in ("indices", "indptr"):
        if name in plain:
            wide = torch.full((*plain[name].shape[:-1], 3 * plain[name].shape[-1]), 99, dtype=dtype, device=ops.device)
            wide[..., 1::3] = plain[name]
            strided[name] = wide[..., 1::3]
    for arguments in (plain, strided):
        assert torch.equal(ops.attend(p.q, p.cache, **arguments), want)
    if selection == "dense":
        plain["indices"] = plain["indices"].t().contiguous().t()
        assert torch.equal(ops.attend(p.q, p.cache, **plain), want)


def test_slots_out_of_range_are_skipped(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=[0] * 4)
    p.selected = [[-1, 3, 56, 2**31 - 1], [-(2**31), -1, 56], [55, 0, -7, 57], []]
    out, lse = p.run(ops, return_lse=True)
    check(p, out, lse)
    far = select(ops, [[3, 2**40, -(2**40), 2**62 + 1]] * 4, "dense", torch.int64)
    got = ops.attend(p.q, p.cache, format=p.format, **far)
    assert torch.equal(got[0], out[0])


def test_bounds_that_make_no_sense_read_nothing_out_of_bounds(ops: Ops) -> None:
    """indptr is device data, which nobody checks: it is clamped to what indices hold."""
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    indices = ops.to([5, 6, 7, 8], torch.int32)
    indptr = ops.to([-3, 2, 1, 4000, 2], torch.int32)
    out, lse = ops.attend(p.q, p.cache, indices=indices, indptr=indptr, format=p.format, return_lse=True)
    p.selected = [[5, 6], [], [6, 7, 8], []]
    check(p, out, lse)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_nothing_is_selected(ops: Ops, selection: str) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=(0, 0, 0))
    none = torch.zeros(3, 0, dtype=torch.int32, device=ops.device)
    zeros = torch.zeros(4, dtype=torch.int32, device=ops.device)
    rows = {
        "ragged": {"indices": none[0], "indptr": zeros},
        "dense": {"indices": none},
        "pages": {"block_table": none, "seq_lens": zeros[:3] + 9},
    }[selection]
    out = torch.full_like(p.q, float("nan"))
    for splits in (None, 1, 3):
        got, lse = ops.attend(
            p.q, p.cache, format=p.format, out=out, return_lse=True, num_splits=splits,
            sink=torch.ones(3, device=ops.device), **rows,
        )  # fmt: skip
        assert got is out
        assert not out.any()
        assert (lse == -torch.inf).all()
        out.fill_(float("nan"))


def test_no_query_and_no_slot(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    none = torch.zeros(0, 5, dtype=torch.int64, device=ops.device)
    out, lse = ops.attend(p.q[:0], p.cache, indices=none, return_lse=True)
    assert out.shape == (0, 3, 64)
    assert lse.shape == (0, 3)
    empty = ops.empty("mxfp4", 0, 8, 64)
    out, lse = ops.attend(p.q, empty, return_lse=True, **select(ops, p.selected))
    assert not out.any()
    assert (lse == -torch.inf).all()


# Shapes of tensors.


def test_queries_and_results_of_any_stride(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    want = p.run(ops)
    wide = torch.full((4, 3, 2, 100), float("nan"), dtype=p.q.dtype, device=ops.device)
    wide[:, :, 1, 3:67] = p.q
    by_head = p.q.transpose(0, 1).contiguous().transpose(0, 1)
    for q in (wide[:, :, 1, 3:67], by_head):
        assert torch.equal(ops.attend(q, p.cache, **p.arguments(ops)), want)
    one = p.q[:1].expand(4, 3, 64)
    assert torch.equal(ops.attend(one, p.cache, **p.arguments(ops))[0], want[0])
    out = torch.full((3, 4, 80), float("nan"), dtype=p.q.dtype, device=ops.device)
    view = out[..., 5:69].transpose(0, 1)
    assert ops.attend(p.q, p.cache, out=view, **p.arguments(ops)) is view
    assert torch.equal(view, want)
    assert out[..., :5].isnan().all()
    assert out[..., 69:].isnan().all()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "bf16", "dsv4"])
def test_blocks_that_stand_apart(ops: Ops, name: str) -> None:
    """Any block stride: of 16 bytes, of 2, and, for bytes, of 1; nothing but the records is read."""
    format = mxkv.FORMATS[name]
    d = width_for(format)
    p = problem(ops, format, d)
    want = p.run(ops)
    for gap, offset in ((16, 32), (2, 6), (1, 3)):
        if format.cache_dtype == torch.uint8 or gap % 2 == 0:
            whole, cache = guarded_pool(ops, format, 7, 8, d, gap=gap, offset=offset)
            cache.copy_(p.cache)
            guards = guards_of(whole, cache).clone()
            assert torch.equal(ops.attend(p.q, cache, **p.arguments(ops)), want)
            assert torch.equal(guards_of(whole, cache), guards)
            assert (guards == GUARD).all()


@pytest.mark.parametrize("name", ["mxfp4", "bf16", "fp8"])
def test_rows_of_a_2d_cache(ops: Ops, name: str) -> None:
    p = problem(ops, mxkv.FORMATS[name], 96)
    want = p.run(ops)
    flat = p.cache.flatten(0, 1)
    wide = torch.zeros(flat.shape[0], flat.shape[1] + 5, dtype=torch.uint8, device=ops.device)
    if flat.dtype != torch.uint8:
        wide = torch.zeros(flat.shape[0], flat.shape[1] + 5, dtype=flat.dtype, device=ops.device)
    wide.view(torch.uint8).fill_(0xFF)
    wide[:, : flat.shape[1]].view(torch.uint8).copy_(flat.view(torch.uint8))
    for cache in (flat, wide[:, : flat.shape[1]]):
        assert torch.equal(ops.attend(p.q, cache, **p.arguments(ops)), want)


# What must not be read.


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("format", [*BUILTIN, *CUSTOM], ids=name_of)
def test_bytes_of_other_slots_never_reach_a_result(ops: Ops, format: Format, splits: int | None) -> None:
    d = width_for(format)
    p = problem(ops, format, d)
    arguments = p.arguments(ops)
    want = ops.attend(p.q, p.cache, num_splits=splits, **arguments)
    poisoned = ops.empty(format, 7, 8, d)
    poisoned.view(torch.uint8).fill_(0xFF)
    used = sorted({slot for slots in p.selected for slot in slots if 0 <= slot < 56})
    rows = mxkv.load(p.cache, ops.slots(*used), format=format, latent_dim=d, dtype=torch.float32, backend="torch")
    ops.store(poisoned, rows, ops.slots(*used), format=format)
    got = torch.full((6, 3, d), float("nan"), dtype=p.q.dtype, device=ops.device)
    ops.attend(p.q, poisoned, num_splits=splits, out=got[1:5], **arguments)
    assert torch.equal(got[1:5].isnan(), torch.zeros_like(got[1:5], dtype=torch.bool))
    if format.element is Element.E2M1 or not format.grouped:  # what was read stores as the same bytes
        assert torch.equal(got[1:5], want)
    assert got[0].isnan().all()
    assert got[5].isnan().all()


def test_a_row_that_is_nan_stays_in_its_query(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=[0] * 3)
    p.cache[2, 3].fill_(0xFF)
    for splits in (None, 2):
        rows = select(ops, [[1, 19, 2], [4, 5, 6], [19]])
        out, lse = ops.attend(p.q, p.cache, return_lse=True, num_splits=splits, **rows)
        assert out[0].isnan().all()
        assert out[2].isnan().all()
        assert lse[0].isnan().all()
        assert not out[1].isnan().any()


def test_the_cache_and_the_queries_are_left_alone(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    before = p.cache.clone(), p.q.clone()
    p.run(ops, num_splits=2)
    assert torch.equal(p.cache, before[0])
    assert torch.equal(p.q, before[1])


# Numbers.


def adversarial(kind: str, d: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [56, d] and queries [4, 3, d]."""
    rows, q = torch.randn(56, d, generator=g), torch.randn(4, 3, d, generator=g)
    if kind == "large rows":
        rows *= 1000
    elif kind == "large queries":
        q *= 50
    elif kind == "one-hot":  # each query is one of the rows, and far from the others
        q = rows[:12].reshape(4, 3, d) * 40
    elif kind == "one huge logit":
        rows[7] = 100 * q[0, 0]
    elif kind == "all equal":
        rows = rows[:1].expand(56, d).clone()
    elif kind == "all zero":
        rows = torch.zeros(56, d)
    elif kind == "very negative logits":  # as far from zero as bf16 products get without becoming infinite
        rows, q = -rows.abs() * 1e15, q.abs() * 1e15
    elif kind == "tiny":
        rows, q = rows * 1e-20, q * 1e-15
    elif kind == "opposite signs":
        q[:, :, ::2] = -q[:, :, 1::2]
    return rows, q


KINDS = [
    "random", "large rows", "large queries", "one-hot", "one huge logit", "all equal", "all zero",
    "very negative logits", "tiny", "opposite signs",
]  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "bf16"])
def test_errors_stay_within_the_budget(ops: Ops, name: str, kind: str, splits: int) -> None:
    rows, q = adversarial(kind, 128, generator(3))
    p = problem(ops, mxkv.FORMATS[name], 128, counts=(50, 1, 2, 33), rows=rows, q=q)
    p.selected[0][:4] = [7, 0, 1, 2]
    check(p, p.run(ops, num_splits=splits))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_one_row_comes_back_as_it_is_read(ops: Ops, format: Format) -> None:
    """The only row has all the weight: attention to it is what a load gives, whatever its bytes (but NaN)."""
    d = width_for(format)
    blocks = ops.few(64, 2)
    cache = ops.empty(format, blocks, 8, d)
    bytes = torch.randint(256, cache.view(torch.uint8).shape, dtype=torch.uint8, generator=generator(0))
    bytes[(bytes & 0x7F) == 0x7F] = 0x3C
    cache.view(torch.uint8).copy_(bytes)
    slots = torch.randperm(blocks * 8, generator=generator(1))
    scale = CACHE_SCALE if format.scale is Scale.TENSOR else None
    q = torch.zeros(len(slots), 1, d, dtype=torch.bfloat16, device=ops.device)
    arguments = {"format": format, "cache_scale": scale}
    out = ops.attend(q, cache, indices=slots[:, None].to(ops.device), **arguments)[:, 0]
    want = mxkv.load(cache, slots.to(ops.device), latent_dim=d, backend="torch", **arguments)
    normal = want.abs() >= torch.finfo(torch.bfloat16).tiny
    assert normal.any()
    assert torch.equal(out[normal], want[normal])
    assert (out[~normal].float() - want[~normal].float()).abs().max() <= 2.0**-126


def test_an_infinity_of_a_plain_row(ops: Ops) -> None:
    """A logit of -inf has no weight; one of +inf leaves no number."""
    rows = torch.randn(56, 64, generator=generator(0))
    rows[3, 5] = float("inf")
    p = problem(ops, mxkv.FORMATS["bf16"], 64, heads=1, counts=[0], rows=rows, q=torch.ones(1, 1, 64))
    assert p.run(ops, **{}) is not None
    out = ops.attend(p.q, p.cache, **select(ops, [[1, 3]]))
    assert out.isnan().all()


def kernels_of(ops: Ops) -> Any:
    """The module that launches a backend's attention kernels."""
    package = {"triton": "triton_gpu", "numba": "numba_cuda"}[ops.backend]
    return importlib.import_module(f"mxkv.backends.{package}.attention")


def config_of(ops: Ops, spec: AttendSpec) -> Any:
    """A configuration of the backend's portable kernel."""
    if ops.backend == "numba":
        return kernels_of(ops).tunable(spec).space[0]
    from mxkv.backends.triton_gpu.config import AttendConfig

    return AttendConfig(block_heads=16, block_rows=16, programs_per_unit=1, num_warps=4, num_stages=2)


def bits_of_two_formats(ops: Ops, d: int, heads: int, splits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over mxfp4 rows, and over bf16 rows of the same values."""
    g = generator(seed)
    rows = torch.randn(56, d, generator=g) * 2.0 ** torch.randint(-6, 6, (56, 1), generator=g)
    packed, plain = ops.empty("mxfp4", 7, 8, d), ops.empty("bf16", 7, 8, d)
    slots = ops.slots(*range(56))
    ops.store(packed, rows.to(ops.device), slots)
    ops.store(plain, ops.load(packed, slots), slots)
    q = torch.randn(3, heads, d, generator=g).bfloat16().to(ops.device)
    indices = torch.randint(-2, 58, (3, 50), generator=g).to(ops.device)
    if ops.backend == "torch":
        found = [ops.attend(q, cache, indices=indices, num_splits=splits) for cache in (packed, plain)]
        return found[0], found[1]
    from mxkv import checks

    attention, found = kernels_of(ops), []
    for cache in (packed, plain):
        out = torch.empty_like(q)
        spec = checks.attend_spec(q, cache, out, indices, None, None, None, None, None, None, None, None, None)
        run, config = attention.prepare(spec), config_of(ops, spec)
        run(q, cache, out, indices, None, None, None, None, None, d**-0.5, splits, config=config)
        found.append(out)
    return found[0], found[1]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [3, 17])
@pytest.mark.parametrize("d", [64, 96, 320])
def test_the_same_values_in_two_formats_give_the_same_bits(ops: Ops, d: int, heads: int, splits: int) -> None:
    packed, plain = bits_of_two_formats(ops, d, heads, splits)
    assert torch.equal(packed.view(torch.int16), plain.view(torch.int16))


# Splits and workspace.


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", ["mxfp4", "bf16", "fp8"])
def test_any_number_of_splits(ops: Ops, name: str, splits: int) -> None:
    """More than there are tiles, too: the splits that are empty add nothing."""
    p = problem(ops, mxkv.FORMATS[name], 64, counts=(50, 0, 1, 33), blocks=7)
    sink = torch.tensor([0.5, -torch.inf, 3.0], device=ops.device)
    check(p, *p.run(ops, num_splits=splits, return_lse=True, sink=sink), sink=sink)


def test_a_split_count_comes_from_shapes(ops: Ops) -> None:
    """The same shapes with other values, and other lengths: the same bytes of workspace."""
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=(50, 50, 50, 50))
    shared = {"backend": ops.backend}
    some = mxkv.attend_workspace_bytes(p.q, p.cache, **select(ops, p.selected, "dense"), **shared)
    none = mxkv.attend_workspace_bytes(p.q, p.cache, **select(ops, [[-1] * 50] * 4, "dense"), **shared)
    assert some == none
    assert mxkv.attend_workspace_bytes(p.q, p.cache, **select(ops, p.selected), num_splits=1, **shared) == 0


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("cache_scale", [None, 0.5])
def test_a_workspace_is_that_of_the_same_call(
    ops: Ops, cache_scale: float | None, with_sink: bool, lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given besides may mean another configuration: the one that is asked about is the one that is launched."""
    from mxkv import library

    p, plans, plan_of = problem(ops, mxkv.FORMATS["fp8"], 64), [], library._attend_plan

    def recorded(*arguments: Any) -> Any:
        plans.append(plan_of(*arguments))
        return plans[-1]

    monkeypatch.setattr(library, "_attend_plan", recorded)
    given = p.arguments(ops) | {
        "cache_scale": cache_scale, "sink": torch.zeros(p.q.shape[1], device=ops.device) if with_sink else None,
        "return_lse": lse, "backend": ops.backend, "value_dim": 32,
    }  # fmt: skip
    needed = mxkv.attend_workspace_bytes(p.q, p.cache, **given)
    mxkv.attend(p.q, p.cache, **given, workspace=torch.empty(needed, dtype=torch.uint8, device=ops.device))
    asked, launched = plans
    assert asked is launched


def test_one_split_launches_no_merging_and_takes_no_memory(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.backend == "torch":
        pytest.skip("the torch backend has no splits")
    attention = kernels_of(ops)
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    want = p.run(ops, num_splits=1)
    out = torch.full_like(want, float("nan"))
    monkeypatch.setattr(attention, "reduce_kernel", None)
    monkeypatch.setattr(attention.splitting, "partials", None)
    assert torch.equal(p.run(ops, num_splits=1, out=out), want)
    with pytest.raises(TypeError):
        p.run(ops, num_splits=2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64], ids=name_of)
def test_workspace(ops: Ops, dtype: torch.dtype) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=(50, 0, 1, 33))
    want, want_lse = p.run(ops, num_splits=3, return_lse=True)
    needed = mxkv.attend_workspace_bytes(
        p.q, p.cache, **p.arguments(ops), num_splits=3, return_lse=True, backend=ops.backend
    )
    assert needed == (0 if ops.backend == "torch" else 4 * 3 * 3 * 4 * 65)
    memory = torch.full((needed + 64,), 0xFF, dtype=torch.uint8, device=ops.device)  # every float is NaN
    memory = memory[: memory.numel() // 8 * 8]
    out, lse = p.run(ops, num_splits=3, return_lse=True, workspace=memory.view(dtype))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert (memory[needed:] == 0xFF).all()
    if needed:
        out.fill_(7)
        with pytest.raises(ValueError, match=f"at least {needed} bytes"):
            p.run(ops, num_splits=3, workspace=memory[: needed - 1], out=out)
        assert (out == 7).all()


# Sinks, logarithms, merging.


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(ops: Ops, splits: int) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, heads=6)
    sink = torch.tensor([0.0, -torch.inf, 5.0, -200.0, 200.0, 1e30], device=ops.device)
    out, lse = p.run(ops, sink=sink, return_lse=True, num_splits=splits)
    check(p, out, lse, sink=sink)
    assert torch.equal(lse, p.run(ops, return_lse=True, num_splits=splits)[1]), "logarithms are without the sink"


@pytest.mark.parametrize("sinked", [False, True])
def test_merging_parts_is_as_good_as_one_pass(ops: Ops, sinked: bool) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=(50, 0, 1, 33))
    sink = torch.tensor([0.3, -1.0, 4.0], device=ops.device) if sinked else None
    parts = [
        ops.attend(p.q, p.cache, return_lse=True, **select(ops, [slots[i::3] for slots in p.selected]))
        for i in range(3)
    ]
    outs, lses = zip(*parts, strict=True)
    outs[2][1].fill_(float("nan"))  # of no weight
    merged, lse = mxkv.merge_partials(outs, lses, sink, return_lse=True)
    whole, want = p.run(ops, sink=sink, return_lse=True)
    assert merged.dtype == whole.dtype
    assert torch.allclose(merged.float(), whole.float(), atol=0.02, rtol=0.02)
    assert torch.equal(lse.isinf(), want.isinf())
    assert torch.allclose(lse.nan_to_num(neginf=0), want.nan_to_num(neginf=0), atol=1e-4)
    again = mxkv.merge_partials(torch.stack(outs), torch.stack(lses), sink)
    assert torch.equal(again, merged)
    assert not merged[1].any()


def test_merging_fp32_parts_is_exact_enough() -> None:
    g = generator(0)
    logits, values = torch.randn(40, generator=g).double() * 30, torch.randn(40, 8, generator=g).double()
    whole = logits.softmax(0) @ values
    outs = [(part.softmax(0) @ v).float()[None, None] for part, v in zip(logits.split(7), values.split(7), strict=True)]
    lses = [part.logsumexp(0).float()[None, None] for part in logits.split(7)]
    merged, lse = mxkv.merge_partials(outs, lses, return_lse=True)
    assert torch.allclose(merged[0, 0].double(), whole, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), logits.logsumexp(0)[None, None], rtol=1e-6)
    sink = torch.tensor([5.0])
    shrunk = mxkv.merge_partials(outs, lses, sink)
    factor = 1 / (1 + (sink - lse).exp())
    assert torch.allclose(shrunk, merged * factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outs", "lses", "sink", "error", "match"),
    [
        ([], [], None, ValueError, "outs.*at least one"),
        (torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3), None, ValueError, r"at least one part.*\[0, 2, 3, 4\]"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), None, ValueError, r"parts.*\[2, 3, 4\]"),
        (torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 2), None, ValueError, r"\[2, 2, 3, 4\].*\[2, 2, 2\]"),
        ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], [torch.zeros(2, 3)] * 2, None, ValueError, r"one shape"),
        ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).half()], [torch.zeros(2, 3)] * 2, None, TypeError, r"one dtype"),
        ([torch.zeros(2, 3, 4), 1], [torch.zeros(2, 3)] * 2, None, TypeError, r"tensors only"),
        (torch.zeros(2, 2, 3, 4).int(), torch.zeros(2, 2, 3), None, TypeError, r"floating.*int32"),
        (torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3), torch.zeros(2), ValueError, r"sink.*\[3\].*\[2\]"),
    ],
)
def test_merging_what_does_not_fit(outs: Any, lses: Any, sink: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        mxkv.merge_partials(outs, lses, sink)


# Bad input.

Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD: dict[str, tuple[Change, type[Exception] | tuple[type[Exception], ...], str]] = {
    "q of rank 2": (lambda a: {"q": a["q"][0]}, ValueError, r"q.*3-D.*\[3, 512\]"),
    "fp32 q": (lambda a: {"q": a["q"].float()}, TypeError, r"q.*bfloat16.*float16.*float32"),
    "transposed q": (lambda a: {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, r"q.*contig"),
    "no head": (lambda a: {"q": a["q"][:, :0], "out": None}, ValueError, r"1 to 256 heads.*\[2, 0, 512\]"),
    "257 heads": (lambda a: {"q": a["q"][:, :1].expand(2, 257, 512), "out": None}, ValueError, r"256.*257"),
    "q of another width": (lambda a: {"q": a["q"][..., :480], "out": None}, ValueError, r"272.*480.*255"),
    "no rows": (lambda a: {"indices": None}, ValueError, r"indptr.*block_table.*none of them"),
    "rows in two ways": (
        lambda a: {"block_table": a["indices"], "seq_lens": a["indices"][:, 0]}, ValueError,
        r"got indices, block_table, seq_lens",
    ),
    "bounds alone": (lambda a: {"indices": None, "indptr": a["indices"][0]}, ValueError, r"got indptr"),
    "table without lengths": (lambda a: {"indices": None, "block_table": a["indices"]}, ValueError, r"got block_table"),
    "dense indices of rank 1": (lambda a: {"indices": a["indices"][0]}, ValueError, r"indices.*2-D.*\[5\]"),
    "ragged indices of rank 2": (lambda a: {"indptr": a["indices"][0, :3]}, ValueError, r"indices.*1-D.*\[2, 5\]"),
    "float indices": (lambda a: {"indices": a["indices"].float()}, TypeError, r"indices.*int32.*int64.*float32"),
    "int16 indices": (lambda a: {"indices": a["indices"].short()}, TypeError, r"indices.*int32.*int16"),
    "too few rows of indices": (lambda a: {"indices": a["indices"][:1]}, ValueError, r"indices.*2 queries.*\[1, 5\]"),
    "too short bounds": (
        lambda a: {"indices": a["indices"][0], "indptr": a["indices"][0, :2]}, ValueError, r"indptr.*\[3\].*\[2\]",
    ),
    "too few lengths": (
        lambda a: {"indices": None, "block_table": a["indices"], "seq_lens": a["indices"][0, :1]}, ValueError,
        r"seq_lens.*2 queries.*\[1\]",
    ),
    "indices elsewhere": (lambda a: {"indices": a["indices"].to("meta")}, ValueError, r"indices on (cpu|cuda).*meta"),
    "q elsewhere": (lambda a: {"q": a["q"].to("meta")}, (ValueError, RuntimeError), r"meta"),
    "out of another dtype": (lambda a: {"out": a["out"].half()}, TypeError, r"out.*bfloat16.*float16"),
    "out of too few queries": (lambda a: {"out": a["out"][:1]}, ValueError, r"out.*2 queries.*\[1, 3, 512\]"),
    "out of too many heads": (
        lambda a: {"out": a["out"].new_zeros(2, 4, 512)}, ValueError, r"out.*3 heads.*\[2, 4, 512\]",
    ),
    "out wider than a row": (lambda a: {"out": a["out"].new_zeros(2, 3, 600)}, ValueError, r"value_dim.*512.*600"),
    "out of another width than value_dim": (
        lambda a: {"value_dim": 100}, ValueError, r"out.*value_dim 100.*\[2, 3, 512\]",
    ),
    "expanded out": (lambda a: {"out": a["out"][:1].expand(2, 3, 512)}, ValueError, r"out.*overlap.*strides"),
    "transposed out": (
        lambda a: {"out": a["out"].transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, r"out.*contiguous",
    ),
    "value_dim 0": (lambda a: {"value_dim": 0, "out": None}, ValueError, r"value_dim.*512.*0"),
    "value_dim past the row": (lambda a: {"value_dim": 513, "out": None}, ValueError, r"value_dim.*512.*513"),
    "sink of another width": (lambda a: {"sink": torch.zeros(2).to(a["q"].device)}, ValueError, r"sink.*\[3\].*\[2\]"),
    "fp16 sink": (lambda a: {"sink": torch.zeros(3).half().to(a["q"].device)}, TypeError, r"sink.*float32.*float16"),
    "strided sink": (lambda a: {"sink": torch.zeros(6).to(a["q"].device)[::2]}, ValueError, r"sink.*contiguous.*2"),
    "sink in a list": (lambda a: {"sink": [0.0, 0.0, 0.0]}, TypeError, r"sink.*list"),
    "no split": (lambda a: {"num_splits": 0}, ValueError, r"num_splits.*0"),
    "too many splits": (lambda a: {"num_splits": 5000}, ValueError, r"num_splits.*5000"),
    "half a split": (lambda a: {"num_splits": 1.5}, (TypeError, ValueError), r"num_splits.*1\.5"),
    "scale in a string": (lambda a: {"scale": "1"}, TypeError, r"scale.*'1'"),
    "strided workspace": (
        lambda a: {"workspace": torch.zeros(999).to(a["q"].device)[::3]}, ValueError, r"workspace.*contiguous",
    ),
    "cache_scale of a format with its own": (lambda a: {"cache_scale": 2.0}, ValueError, r"cache_scale.*fp8.*mxfp4"),
    "unknown format": (lambda a: {"format": "mxfp5"}, ValueError, r"mxfp5.*mxfp4.*nvfp4"),
    "unknown backend": (lambda a: {"backend": "cuda"}, ValueError, r"cuda.*torch"),
    "strided cache": (
        lambda a: {"cache": torch.zeros(2, 4, 544).byte().to(a["q"].device)[..., ::2]}, ValueError, r"cache.*strides",
    ),
    "indices in a list": (lambda a: {"indices": [[0, 1]]}, TypeError, r"indices.*list"),
    "q in numpy": (lambda a: {"q": a["q"].float().cpu().numpy()}, TypeError, r"q.*ndarray"),
}  # fmt: skip


@pytest.mark.parametrize("met_before", [False, True], ids=["first", "after a good call"])
@pytest.mark.parametrize("what", BAD)
def test_bad_input(ops: Ops, what: str, met_before: bool) -> None:
    change, error, match = BAD[what]
    good: dict[str, Any] = {
        "q": torch.ones(2, 3, 512, dtype=torch.bfloat16, device=ops.device),
        "cache": ops.empty("mxfp4", 2, 4, 512),
        "indices": ops.to([[0, 1, 2, 3, 4], [5, 6, 7, -1, 8]], torch.int32),
        "out": torch.full((2, 3, 512), 7.0, dtype=torch.bfloat16, device=ops.device),
    }
    if met_before:
        ops.attend(**good)
        good["out"].fill_(7.0)
    call = {"backend": ops.backend, **good, **change(good)}
    with pytest.raises(error, match=f"(?s){match}") as caught:
        mxkv.attend(**call)
    assert len(str(caught.value)) < 600, "a message that nobody reads"
    assert (good["out"] == 7).all()


def test_strides_are_checked_at_every_call(ops: Ops) -> None:
    """One query whose strides would overlap for two."""
    cache = ops.empty("mxfp4", 2, 4, 64)
    memory = torch.zeros(2048, dtype=torch.bfloat16, device=ops.device)
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16, device=ops.device)
    indices = ops.to([[0], [1]], torch.int64)
    ops.attend(q[:1], cache, indices=indices[:1], out=memory.as_strided((1, 1, 64), (8, 8, 1)))
    with pytest.raises(ValueError, match=r"out.*overlap"):
        ops.attend(q, cache, indices=indices, out=memory.as_strided((2, 1, 64), (8, 8, 1)))


# As a torch operator.


def arguments_of(ops: Ops, name: str = "mxfp4", lse: bool = True) -> tuple[Any, ...]:
    p = problem(ops, mxkv.FORMATS[name], width_for(mxkv.FORMATS[name]), counts=(20, 3))
    rows = select(ops, p.selected, "dense")
    out = torch.empty_like(p.q)
    scale = None if p.cache_scale is None else torch.full((), p.cache_scale, device=ops.device)
    logs = torch.empty(2, 3, device=ops.device) if lse else None
    return p.q, p.cache, out, rows["indices"], None, None, None, name, scale, None, None, None, logs


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "dsv4", "bf16"])
def test_opcheck(ops: Ops, name: str, lse: bool) -> None:
    torch.library.opcheck(torch.ops.mxkv.attend.default, arguments_of(ops, name, lse), {"backend": ops.backend})


def test_the_schema_declares_what_is_written() -> None:
    schema = torch.ops.mxkv.attend.default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None] == ["out", "lse", "workspace"]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(ops: Ops, compiler: str) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    rows = select(ops, p.selected)
    sink = torch.ones(3, device=ops.device)

    def step(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor) -> Any:
        out, lse = mxkv.attend(
            q * 2, cache, indices=indices, indptr=indptr, sink=sink, return_lse=True, backend=ops.backend
        )
        return mxkv.merge_partials([out, out], [lse, lse], sink) + 1

    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=compiler)(p.q, p.cache, rows["indices"], rows["indptr"])
    want = step(p.q, p.cache, rows["indices"], rows["indptr"])
    assert torch.allclose(got.float(), want.float(), atol=0.02)


def test_fakes_have_the_shapes_of_the_real(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    rows = select(ops, p.selected, "dense")
    real = ops.attend(p.q, p.cache, value_dim=32, return_lse=True, **rows)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ops.attend(
            mode.from_tensor(p.q), mode.from_tensor(p.cache), value_dim=32, return_lse=True,
            indices=mode.from_tensor(rows["indices"]),
        )  # fmt: skip
        with pytest.raises(TypeError, match="float32"):
            ops.attend(
                mode.from_tensor(p.q).float(), mode.from_tensor(p.cache), indices=mode.from_tensor(rows["indices"])
            )
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.dtype, one.device, one.stride()) == (
            other.shape, other.dtype, other.device, other.stride(),
        )  # fmt: skip


def test_queries_that_need_gradients(ops: Ops) -> None:
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64)
    want = p.run(ops)
    p.q = p.q.requires_grad_()
    got = p.run(ops)
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_explain(ops: Ops) -> None:
    found = mxkv.explain("attend", device=ops.device, format="mxfp4", heads=64, value_dim=512, backend=ops.backend)
    assert found.chosen == ops.backend
    assert "attend of mxfp4" in str(found)
    with pytest.raises(TypeError, match="colour"):
        mxkv.explain("attend", colour=1)


def test_the_torch_backend_takes_many_queries_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxkv.backends.torch_eager import attention
    from mxkv.backends.torch_eager.latents import ChunkConfig

    ops = Ops("torch", torch.device("cpu"))
    p = problem(ops, mxkv.FORMATS["mxfp4"], 64, counts=(50, 0, 1, 33))
    want, rows = p.run(ops), select(ops, p.selected)
    spec = mxkv.explain(
        "attend", format="mxfp4", latent_dim=64, heads=3, selection="ragged",
        layout=mxkv.paging.layout_of(p.cache, p.format, 64),
    ).spec  # fmt: skip
    for elements, most in itertools.product((1, 3000), (1, 7)):
        monkeypatch.setattr(attention, "_MOST_ROWS", most)
        got = torch.full_like(want, float("nan"))
        attention.attend(
            spec, p.q, p.cache, got, rows["indices"], rows["indptr"], None, None, None, None, 0.125, None,
            config=ChunkConfig(elements),
        )  # fmt: skip
        assert torch.allclose(got.float(), want.float(), atol=0.01)
        check(p, got)
