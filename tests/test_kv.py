"""Keys and values per head, on every backend: bytes against a second oracle, attention against fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import mxkv
from mxkv import KeyCode, KVFormat, lloyd_max
from tests import kv_reference
from tests.support import GUARD, Ops, generator, name_of

PRESETS = list(mxkv.KV_FORMATS.values())
CUSTOM = [
    KVFormat("k4v3", KeyCode.MSE4, 3),
    KVFormat("k8v3", KeyCode.FP8, 3),
    KVFormat("k3v4", KeyCode.MSE3, 4),
    KVFormat("k3v3", KeyCode.MSE3, 3),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}


def named(value: Any) -> str | None:
    return value.name if isinstance(value, KVFormat) else name_of(value)


def store(ops: Ops, *arguments: Any, **options: Any) -> None:
    mxkv.store_kv(*arguments, backend=ops.backend, **options)


def load(ops: Ops, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return mxkv.load_kv(*arguments, backend=ops.backend, **options)


def attend(ops: Ops, *arguments: Any, **options: Any) -> Any:
    return mxkv.attend_kv(*arguments, backend=ops.backend, **options)


def table_of(format: KVFormat, d: int) -> tuple[float, ...]:
    return lloyd_max.centroids(d, format.key.bits) if format.normed else ()


def rows(n: int, heads: int, d: int, dtype: torch.dtype = FP32, seed: int = 0, *, messy: bool = False) -> Any:
    """Keys and values [n, heads, d]: normal; with ``messy`` also zeros, outliers, far ranges, what is not finite."""
    g = generator(seed)
    key, value = (torch.randn(n, heads, d, generator=g) * torch.randn(n, heads, 1, generator=g).exp() for _ in range(2))
    if messy:
        for x in (key, value):
            x[1], x[2, 0], x[3, -1, 1:], x[4, 0, 2] = 0.0, -0.0, 0.0, 300.0
            x[5, 0, 1], x[6, -1, 0], x[7, 0, d - 1] = torch.nan, torch.inf, -torch.inf
            x[8], x[9, 0] = 7.25, 1e-6 * x[9, 0]
            x[10, 0] = 6e4 * x[10, 0].sign()
            if dtype is not FP16:
                x[11, 0], x[12, -1], x[13, 0, 3] = 1e5, 3e38 * x[12, -1].sign(), -1e38
                x[14, 0] = 1e-42 * x[14, 0]
    return key.to(dtype), value.to(dtype)


def pages(cache: torch.Tensor) -> Any:
    return cache.cpu().contiguous().reshape(cache.shape[0], -1).numpy().copy()


def check_bytes(
    cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Sequence[int],
    format: KVFormat,
    *,
    table: Sequence[float] | None = None,
    rotation: torch.Tensor | None = None,
    nonfinite: str = "propagate",
) -> None:
    """Every byte of a cache that was zero: equal, but for a key's norm, and codes on a midpoint, which may be next."""
    blocks, block_size, heads, _ = cache.shape
    d = key.shape[2]
    table = table_of(format, d) if table is None else table
    turn = None if rotation is None else rotation.cpu().numpy()
    got = pages(cache)
    want = np.zeros_like(got)
    keys, values = key.cpu().float().numpy(), value.cpu().float().numpy()
    for token, slot in enumerate(slots):
        if not 0 <= slot < blocks * block_size:
            continue
        for head in range(heads):
            row = kv_reference.encode(keys[token, head], values[token, head], format, table, turn, nonfinite)
            at = (format, d, heads, block_size, slot % block_size, head)
            found = kv_reference.read(got[slot // block_size], *at)
            if format.normed:
                steps = [abs(a - b) for a, b in zip(found.key, row.key, strict=True)]
                assert max(steps) <= 1
                assert all(near for step, near in zip(steps, row.near, strict=True) if step), (token, head)
                assert abs(found.numbers[0] - row.numbers[0]) <= 1, (token, head, found.numbers, row.numbers)
                row = dataclasses.replace(row, key=found.key, numbers=[found.numbers[0], *row.numbers[1:]])
            kv_reference.write(want[slot // block_size], row, *at)
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {wrong[0]}: {got[tuple(wrong[0])]:#x}"


def check_rows(
    cache: torch.Tensor,
    loaded: tuple[torch.Tensor, torch.Tensor],
    slots: Sequence[int],
    format: KVFormat,
    *,
    table: Sequence[float] | None = None,
    rotation: torch.Tensor | None = None,
) -> None:
    """Every loaded value is that of the bytes, exactly; with an explicit rotation, nearly."""
    blocks, block_size, heads, _ = cache.shape
    d = loaded[0].shape[2]
    table = table_of(format, d) if table is None else table
    turn = None if rotation is None else rotation.cpu().numpy()
    held = pages(cache)
    for i, slot in enumerate(slots):
        for head in range(heads):
            want = (np.zeros(d), np.zeros(d))
            if 0 <= slot < blocks * block_size:
                row = kv_reference.read(held[slot // block_size], format, d, heads, block_size, slot % block_size, head)
                want = kv_reference.decode(row, format, table, turn)
            for got, expected in zip(loaded, want, strict=True):
                expected = torch.from_numpy(np.asarray(expected)).float()
                most = torch.finfo(got.dtype).max
                expected = expected.clamp(-most, most).to(got.dtype)
                have = got[i, head].cpu()
                if rotation is None or got is loaded[1]:
                    assert torch.equal(have.nan_to_num(-7), expected.nan_to_num(-7)), (i, head)
                else:
                    assert torch.allclose(have.float(), expected.float(), rtol=1e-2, atol=1e-4, equal_nan=True)


SHAPES = [  # head_dim, heads, dtype
    (64, 2, BF16),
    (80, 3, FP16),
    (32, 8, FP32),
    (96, 1, BF16),
    (256, 1, BF16),
    (16, 64, BF16),
    (192, 1, FP32),
    (128, 2, BF16),
    (64, 5, FP16),
    (48, 1, BF16),
]


def drawn(few: int) -> list[Any]:
    """Pairs of a format and a shape that cover each; the first ``few`` of them where kernels are interpreted."""
    formats = [*PRESETS, *CUSTOM]
    pairs = [(formats[i % len(formats)], SHAPES[i % len(SHAPES)]) for i in range(2 * len(formats) + 2)]
    return [
        pytest.param(*pair, i >= few, id=f"{pair[0].name}-{pair[1][0]}x{pair[1][1]}") for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(("format", "shape", "rare"), drawn(5))
def test_bytes(ops: Ops, format: KVFormat, shape: tuple[int, int, torch.dtype], rare: bool) -> None:
    """Stored bytes are the second oracle's, for both policies; loaded values are those of the bytes."""
    d, heads, dtype = shape
    if rare and ops.slow:
        pytest.skip("the interpreter is slow: the first pairs cover formats and widths")
    n = 16
    key, value = rows(n, heads, d, dtype, messy=True)
    slots = [*range(3, 3 + n - 3), -1, 24, 2**31]
    for nonfinite in ("propagate", "sanitize") if not ops.slow or d < 100 else ("propagate",):
        cache = mxkv.empty_kv_cache(format, 3, 8, heads, d, ops.device)
        at = ops.slots(*slots)
        store(ops, cache, key.to(ops.device), value.to(ops.device), at, format=format, nonfinite=nonfinite)
        check_bytes(cache, key, value, slots, format, nonfinite=nonfinite)
        if nonfinite == "propagate":
            loaded = load(ops, cache, at, format=format, head_dim=d, dtype=dtype)
            check_rows(cache, loaded, slots, format)


@pytest.mark.parametrize(
    ("format", "d", "dtype", "tabled"),
    [(PRESETS[1], 96, FP16, False), (PRESETS[3], 128, BF16, False), (PRESETS[2], 64, BF16, True)],
    ids=named,
)
def test_rotations_of_16_bit_elements(ops: Ops, format: KVFormat, d: int, dtype: torch.dtype, tabled: bool) -> None:
    """As a matrix product may take them: of what is very small, very large, or not finite, too."""
    key, value = rows(20, 2, d, dtype, messy=True)
    key[15], key[16] = 0.0, 0.0
    key[15, :, 3] = -torch.finfo(dtype).tiny / 8  # subnormal: of its direction only signs are left
    key[16, :, 5] = torch.finfo(dtype).tiny / 8
    if dtype == BF16:
        key[17], key[18] = 1e18 * key[17], 2e19 * key[18].sign()  # squares sum up to less than the largest, and more
    options: dict[str, Any] = {"format": format}
    if tabled:
        options["centroids"] = torch.tensor(table_of(format, d), device=ops.device) * 1.1
    cache = mxkv.empty_kv_cache(format, 2, 10, 2, d, ops.device)
    store(ops, cache, key.to(ops.device), value.to(ops.device), ops.slots(*range(20)), **options)
    check_bytes(cache, key, value, range(20), format, table=options["centroids"].tolist() if tabled else None)
    for token in () if ops.slow else (15, 16):  # the interpreter reads subnormal bf16 as zeros
        row = kv_reference.read(pages(cache)[token // 10], format, d, 2, 10, token % 10, 0)
        positive = kv_reference.butterfly(key[token, 0].float().numpy()) >= 0
        assert [code >> (format.key.bits - 1) for code in row.key] == positive.tolist()


@pytest.mark.parametrize("format", [PRESETS[1], CUSTOM[3]], ids=named)
def test_centroids_and_rotation_of_the_callers_own(ops: Ops, format: KVFormat) -> None:
    d = 48
    g = generator(3)
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=g))
    rotation = rotation.contiguous()
    table = (torch.randn(1 << format.key.bits, generator=g) * d**-0.5).sort().values
    key, value = rows(6, 2, d)
    at = ops.slots(*range(6))
    for with_table, with_rotation in ((True, True), (False, True), (True, False)):
        cache = mxkv.empty_kv_cache(format, 1, 6, 2, d, ops.device)
        options: dict[str, Any] = {"format": format}
        if with_table:
            options["centroids"] = table.to(ops.device)
        if with_rotation:
            options["rotation"] = rotation.to(ops.device)
        store(ops, cache, key.to(ops.device), value.to(ops.device), at, **options)
        known = {"table": table.tolist() if with_table else None, "rotation": rotation if with_rotation else None}
        check_bytes(cache, key, value, range(6), format, **known)
        loaded = load(ops, cache, at, head_dim=d, dtype=FP32, **options)
        check_rows(cache, loaded, range(6), format, **known)
        q = torch.randn(1, 4, d, generator=g).bfloat16().to(ops.device)
        table_1 = ops.to([[0]], torch.int32)
        out = attend(ops, q, cache, table_1, ops.to([6], torch.int32), **options)
        want, _ = kv_reference.attend(q[0].cpu().float().numpy(), *(x.cpu().numpy() for x in loaded), scale=d**-0.5)
        assert np.abs(out[0].cpu().float().numpy() - want).max() < 0.02


@pytest.mark.parametrize("bits", [3, 4])
def test_case_11_centroids_give_their_own_codes(ops: Ops, bits: int) -> None:
    format = KVFormat("mine", KeyCode(f"mse{bits}"), 4)
    d = 64
    table = torch.tensor(lloyd_max.centroids(d, bits))
    rest = d - len(table)
    key = torch.cat((table, ((1 - table.square().sum()) / rest).sqrt().expand(rest)))[None, None]  # of norm 1
    cache = mxkv.empty_kv_cache(format, 1, 1, 1, d, ops.device)
    rotation = torch.eye(d, device=ops.device)
    store(ops, cache, key.to(ops.device), key.to(ops.device), ops.slots(0), format=format, rotation=rotation)
    codes = kv_reference.read(pages(cache)[0], format, d, 1, 1, 0, 0).key
    assert codes[: len(table)] == list(range(1 << bits))


@pytest.mark.parametrize("d", [0, 8, 40, 72, 100])
def test_case_12_other_widths_are_refused_by_name(d: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, got {d}"):
        mxkv.empty_kv_cache("turboquant-4bit-nc", 1, 1, 1, d)


def test_heads_far_apart(ops: Ops) -> None:
    """A stride between heads of which a multiple does not fit 32 bits. What lies between is never touched."""
    heads, d, tokens, stride = 5, 32, 3, 1 << 29
    if ops.device.type == "cuda" and torch.cuda.mem_get_info(ops.device)[0] < 8 * stride:
        pytest.skip("not enough memory")
    keys = torch.empty(stride * (heads - 1) + tokens * d, dtype=torch.bfloat16, device=ops.device)
    key = keys.as_strided((tokens, heads, d), (d, stride, 1))
    g = torch.Generator().manual_seed(0)
    key.copy_(torch.randn(tokens, heads, d, generator=g))
    value = torch.randn(tokens, heads, d, generator=g).bfloat16().to(ops.device)
    caches = []
    for backend in ("torch", ops.backend):
        caches.append(mxkv.empty_kv_cache("turboquant-k8v4", 1, 16, heads, d, ops.device))
        mxkv.store_kv(caches[-1], key, value, ops.slots(*range(tokens)), format="turboquant-k8v4", backend=backend)
    assert torch.equal(*caches)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=named)
def test_case_13_fp8_keys_to_448(ops: Ops, dtype: torch.dtype) -> None:
    """Every E4M3 value comes back; what is larger saturates, and ties go to even: on every target the same bytes."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    extra = torch.tensor(
        [464.0, 465.0, 1e4, -460.0, 448.0, 1.0625, 1.1875, 2.0**-10, -(2.0**-10), 1.5 * 2.0**-9, -1e-9, 0.1]
    )
    key = torch.cat((every, extra, torch.zeros(4))).reshape(17, 1, 16).to(dtype)
    cache = mxkv.empty_kv_cache("turboquant-k8v4", 2, 16, 1, 16, ops.device)
    on_device = key.to(ops.device)
    store(ops, cache, on_device, torch.zeros_like(on_device), ops.slots(*range(17)), format="turboquant-k8v4")
    check_bytes(cache, key, torch.zeros_like(key), range(17), mxkv.KV_FORMATS["turboquant-k8v4"])
    loaded, _ = load(ops, cache, ops.slots(*range(16)), format="turboquant-k8v4", head_dim=16, dtype=FP32)
    same = loaded.cpu().flatten() == every
    assert (same | every.isnan()).all()


# Addressing.


def guarded(
    ops: Ops, format: KVFormat, blocks: int, block_size: int, heads: int, d: int, gap: int, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of an allocation, and the cache in it."""
    width = format.slot_bytes(d)
    page = block_size * heads * width
    whole = torch.full((2 * offset + blocks * (page + gap),), GUARD, dtype=torch.uint8, device=ops.device)
    return whole, whole.as_strided((blocks, block_size, heads, width), (page + gap, heads * width, width, 1), offset)


@pytest.mark.parametrize(("gap", "offset"), [(0, 64), (30, 2), (4, 20)])
@pytest.mark.parametrize("format", [PRESETS[0], PRESETS[3]], ids=named)
def test_cases_15_and_20_guards_and_gaps(ops: Ops, format: KVFormat, gap: int, offset: int) -> None:
    """Slots that do not exist write nothing; other pages' bytes between ours stay; addresses are even, no more."""
    whole, cache = guarded(ops, format, 3, 4, 2, 32, gap, offset)
    cache.zero_()
    key, value = rows(9, 2, 32)
    slots = [11, 0, 5, 12, -1, 2**31, -(2**31), 7, 2**40]
    store(ops, cache, key.to(ops.device), value.to(ops.device), ops.slots(*slots), format=format)
    check_bytes(cache, key, value, slots, format)
    loaded = load(ops, cache, ops.slots(*slots), format=format, head_dim=32, dtype=FP32)
    check_rows(cache, loaded, slots, format)
    q = torch.randn(1, 2, 32, generator=generator(1)).bfloat16().to(ops.device)
    blocks, lengths = ops.to([[2, 0]], torch.int32), ops.to([7], torch.int32)
    out = attend(ops, q, cache, blocks, lengths, format=format)
    assert torch.equal(out, attend(ops, q, cache.clone(), blocks, lengths, format=format))
    cache.fill_(GUARD)
    assert (whole == GUARD).all()


def test_case_16_equal_slots(ops: Ops) -> None:
    format = PRESETS[1]
    key, value = rows(3, 2, 32)
    cache = mxkv.empty_kv_cache(format, 2, 4, 2, 32, ops.device)
    store(ops, cache, key.to(ops.device), value.to(ops.device), ops.slots(3, 3, 3), format=format)
    got = cache.clone()
    if ops.backend == "torch":
        check_bytes(cache, key[2:], value[2:], [3], format)
    store(ops, cache, key[:1].to(ops.device), value[:1].to(ops.device), ops.slots(3), format=format)
    where = (got != 0).cpu() | (cache != 0).cpu()
    touched = mxkv.empty_kv_cache(format, 2, 4, 2, 32)
    ones, more = torch.full((1, 2, 32), 3.0), torch.linspace(-9, 9, 32).expand(1, 2, 32)
    mxkv.store_kv(touched, ones, more, torch.tensor([3]), format=format, backend="torch")
    data = format.key_bytes(32) + format.value_bytes(32)
    assert not where.flatten(1)[1].any()
    assert not where.flatten(1)[0, : 3 * 2 * data].any()


def test_case_17_fewer_slots_than_tokens_and_none(ops: Ops) -> None:
    format = PRESETS[2]
    key, value = (x.to(ops.device) for x in rows(8, 1, 32))
    cache = mxkv.empty_kv_cache(format, 2, 4, 1, 32, ops.device)
    store(ops, cache, key, value, ops.slots(0, 1, 2, 3, 4), format=format)
    check_bytes(cache, key[:5], value[:5], range(5), format)
    before = cache.clone()
    store(ops, cache, key[:0], value[:0], ops.slots()[:0], format=format)
    store(ops, cache, key, value, ops.slots()[:0], format=format)
    assert torch.equal(cache, before)
    loaded, _ = load(ops, cache, ops.slots()[:0], format=format, head_dim=32)
    assert loaded.shape == (0, 1, 32)
    empty = mxkv.empty_kv_cache(format, 0, 4, 1, 32, ops.device)
    store(ops, empty, key, value, ops.slots(0, 1), format=format)
    loaded, _ = load(ops, empty, ops.slots(0, 1), format=format, head_dim=32)
    assert not loaded.any()


def test_cases_18_and_21_slots_and_rows_of_any_kind(ops: Ops) -> None:
    """int32, int64 and strided slots; keys and values that are parts of a wider tensor."""
    format = PRESETS[1]
    key, value = rows(6, 2, 32, BF16)
    fused = torch.full((6, 7, 2, 48), torch.nan, dtype=BF16, device=ops.device)
    fused[:, 1, :, 16:], fused[:, 3, :, 3:35] = key.to(ops.device), value.to(ops.device)
    slots = [5, 1, 7, 0, 2, 6]
    wide = torch.full((12,), 3, device=ops.device)
    wide[::2] = ops.slots(*slots)
    found = []
    for at in (ops.slots(*slots), ops.slots(*slots, dtype=torch.int32), wide[::2], wide.int()[::2]):
        for pair in ((key.to(ops.device), value.to(ops.device)), (fused[:, 1, :, 16:], fused[:, 3, :, 3:35])):
            cache = mxkv.empty_kv_cache(format, 2, 4, 2, 32, ops.device)
            store(ops, cache, *pair, at, format=format)
            found.append(cache)
    check_bytes(found[0], key, value, slots, format)
    assert all(torch.equal(cache, found[0]) for cache in found)


# Attention.


@dataclasses.dataclass
class Problem:
    """A full cache, its dequantized rows, and which blocks each sequence has."""

    format: KVFormat
    cache: torch.Tensor
    keys: Any
    values: Any
    blocks: list[list[int]]
    lengths: list[int]

    def run(self, ops: Ops, q: torch.Tensor, **options: Any) -> Any:
        dtype = options.pop("dtype", torch.int32)
        return attend(
            ops, q, self.cache, ops.to(self.blocks, dtype), ops.to(self.lengths, dtype), format=self.format, **options
        )

    def rows_of(self, sequence: int, position: int, window: int | None) -> list[int]:
        """The slots that a query at a position sees."""
        size = self.cache.shape[1]
        length = max(0, min(self.lengths[sequence], len(self.blocks[sequence]) * size))
        first = 0 if window is None else max(0, position - window + 1)
        found = []
        for row in range(first, min(position + 1, length)):
            block = self.blocks[sequence][row // size]
            if 0 <= block < self.cache.shape[0]:
                found.append(block * size + row % size)
        return found

    def check(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        starts: Sequence[int] | None = None,
        window: int | None = None,
        sink: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Each result within twice the error of products of bf16 that sum in fp32, and one rounding, of fp64."""
        size = self.cache.shape[1]
        starts = list(range(len(self.lengths) + 1)) if starts is None else starts
        scale = q.shape[2] ** -0.5 if scale is None else scale
        host, got = q.cpu(), out.detach().cpu().double().numpy()
        assert not np.isnan(got).any()
        sinks = None if sink is None else sink.cpu().tolist()
        for i in range(q.shape[0]):
            sequence = next((s for s in range(len(self.lengths)) if starts[s] <= i < starts[s + 1]), None)
            slots: list[int] = []
            if sequence is not None:
                length = max(0, min(self.lengths[sequence], len(self.blocks[sequence]) * size))
                slots = self.rows_of(sequence, length - (starts[sequence + 1] - i), window)
            keys, values = self.keys[slots], self.values[slots]
            want, logs = kv_reference.attend(host[i].float().numpy(), keys, values, scale=scale, sink=sinks)
            if not slots:
                assert not got[i].any(), "a query of no rows gives zeros"
                assert lse is None or bool((lse[i] == -torch.inf).all())
                continue
            exact, _ = kv_reference.attend(host[i].float().numpy(), keys, values, scale=scale)
            plain, plain_logs = simple(host[i], torch.from_numpy(keys), torch.from_numpy(values), scale)
            if lse is not None:
                assert np.abs(lse[i].cpu().numpy() - logs).max() <= 2 * np.abs(plain_logs - logs).max() + 1e-4
            budget = 2 * np.abs(plain - exact).max()
            error = np.abs(got[i] - want)
            assert (error <= budget + ROUNDING[q.dtype] * np.abs(want) + 1e-30).all(), (i, error.max(), budget)


def simple(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> tuple[Any, Any]:
    """What products of bf16 that sum in fp32 give for one query, unrounded, and logarithms: the measure of errors."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.bfloat16().float().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    logits = (q.float()[:, None] @ keys.mT * scale)[:, 0]
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    out = (weights.bfloat16().float()[:, None] @ values)[:, 0] / weights.sum(-1, keepdim=True)
    return out.double().numpy(), logits.logsumexp(-1).double().numpy()


def problem(
    ops: Ops, format: KVFormat, d: int, heads: int, block_size: int, blocks: list[list[int]], lengths: list[int]
) -> Problem:
    count = 6
    key, value = rows(count * block_size, heads, d)
    cache = mxkv.empty_kv_cache(format, count, block_size, heads, d, ops.device)
    slots = torch.arange(count * block_size)
    mxkv.store_kv(cache, key.to(ops.device), value.to(ops.device), slots.to(ops.device), format=format, backend="torch")
    loaded = mxkv.load_kv(cache, slots.to(ops.device), format=format, head_dim=d, dtype=FP32, backend="torch")
    return Problem(format, cache, *(x.cpu().numpy() for x in loaded), blocks, lengths)


def queries(ops: Ops, n: int, heads: int, d: int, dtype: torch.dtype = BF16, seed: int = 5) -> torch.Tensor:
    return torch.randn(n, heads, d, generator=generator(seed)).to(dtype).to(ops.device)


ATTENDED = [  # format, head_dim, heads, group, block_size, dtype
    (PRESETS[0], 128, 2, 4, 16, BF16),
    (PRESETS[1], 64, 1, 16, 32, FP16),
    (PRESETS[2], 80, 1, 3, 8, BF16),
    (PRESETS[3], 128, 1, 8, 16, BF16),
    (CUSTOM[1], 16, 1, 20, 10, BF16),
    (CUSTOM[0], 96, 1, 3, 16, BF16),
    (PRESETS[1], 128, 1, 2, 64, BF16),
    (CUSTOM[2], 48, 1, 5, 16, FP16),
    (PRESETS[1], 256, 1, 4, 16, BF16),
    (PRESETS[3], 192, 2, 2, 16, BF16),
    (PRESETS[0], 64, 1, 64, 16, BF16),
    (PRESETS[3], 256, 1, 1, 16, FP16),
    (CUSTOM[3], 32, 64, 1, 16, BF16),
]


@pytest.mark.parametrize("case", ATTENDED, ids=lambda c: f"{c[0].name}-{c[1]}-{c[2]}x{c[3]}-{c[4]}")
def test_decode(ops: Ops, case: Any) -> None:
    """One query of each sequence; tables with blocks that do not exist, lengths of 0 and past the end (case 22)."""
    format, d, heads, group, size, dtype = case
    if ops.slow and case in ATTENDED[5:]:
        pytest.skip("the interpreter is slow: the first cases cover the kernel")
    few = 3 if ops.slow else 5
    lengths = [2 * size - 1, 999, 0, 3 * size, -4][:few]
    blocks = [[3, 0, -1], [5, -1, 1], [1, 1, 1], [6, 2, 2**30], [0, 0, 0]][:few]
    p = problem(ops, format, d, heads, size, blocks, lengths)
    q = queries(ops, few, heads * group, d, dtype)
    sink = torch.linspace(-2, 2, heads * group, device=ops.device)
    p.check(q, *p.run(ops, q, return_lse=True, num_splits=1, dtype=torch.int64))
    if not ops.slow or d < 100:
        out, lse = p.run(ops, q, return_lse=True, sink=sink, num_splits=3, window=size + 3)
        p.check(q, out, lse, sink=sink, window=size + 3)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("format", [PRESETS[0], PRESETS[1]], ids=named)
def test_causal_prefill(ops: Ops, format: KVFormat, window: int | None) -> None:
    """Several queries of a sequence, none of another, one of a third, more than there are rows; padding behind."""
    if ops.slow and window != (1 if format.normed else 5):
        pytest.skip("the interpreter is slow: one window of each format")
    p = problem(ops, format, 32, 2, 16, [[3, 0], [1, 4], [2, -1], [5, 5]], [21, 9, 30, 3])
    starts = [0, 9, 9, 10, 15]
    q = queries(ops, 18, 6, 32)
    sink = torch.linspace(-1, 1, 6, device=ops.device)
    options: dict[str, Any] = {"query_start": ops.to(starts, torch.int32), "window": window, "sink": sink}
    out, lse = p.run(ops, q, return_lse=True, **options)
    p.check(q, out, lse, starts=starts, window=window, sink=sink)
    if window is None or ops.slow:
        options.pop("window")
        split, lse = p.run(ops, q, return_lse=True, num_splits=2, **options)
        p.check(q, split, lse, starts=starts, sink=sink)


def test_starts_that_make_no_sense_read_nothing_out_of_bounds(ops: Ops) -> None:
    p = problem(ops, PRESETS[1], 32, 1, 16, [[3], [1]], [16, 16])
    q = queries(ops, 4, 2, 32)
    for starts in ([0, 400, 2], [-5, 1, 2**31 - 1], [3, 1, 0]):
        out = p.run(ops, q, query_start=ops.to(starts, torch.int32))
        assert out.shape == q.shape


def test_out_may_be_the_queries(ops: Ops) -> None:
    p = problem(ops, PRESETS[1], 32, 2, 16, [[3], [1]], [16, 9])
    q = queries(ops, 2, 4, 32)
    want = p.run(ops, q, num_splits=1)
    assert torch.equal(p.run(ops, q, num_splits=1, out=q), want)


@pytest.mark.parametrize("name", ["turboquant-k8v4", "turboquant-3bit-nc"])
def test_what_is_not_seen_does_not_matter(ops: Ops, name: str) -> None:
    """Bytes of other slots, NaN included, reach no result; nor does a row reach a query before it."""
    format = mxkv.KV_FORMATS[name]
    p = problem(ops, format, 32, 1, 16, [[3, 0]], [20])
    q = queries(ops, 1, 2, 32)
    want = p.run(ops, q)
    poisoned = torch.full_like(p.cache, 0xFF)
    slots = ops.slots(*range(48, 64), *range(4))
    bad = torch.full((64, 1, 32), torch.nan, device=ops.device)
    mxkv.store_kv(poisoned, bad, bad, torch.arange(64, device=ops.device), format=format, backend="torch")
    key, value = rows(96, 1, 32)
    mxkv.store_kv(
        poisoned, key[slots.cpu()].to(ops.device), value[slots.cpu()].to(ops.device), slots, format=format,
        backend="torch",
    )  # fmt: skip
    clean, p.cache = p.cache, poisoned
    assert torch.equal(p.run(ops, q), want)
    # The last of 20 rows is NaN: of three queries the last one sees it.
    p.cache = clean.clone()
    mxkv.store_kv(p.cache, bad[:1], bad[:1], ops.slots(3), format=format, backend="torch")
    q = queries(ops, 3, 2, 32)
    starts = ops.to([0, 3], torch.int32)
    out = p.run(ops, q, query_start=starts)
    assert out[2].isnan().all()
    p.cache = clean
    assert torch.equal(out[:2], p.run(ops, q, query_start=starts)[:2])


def test_results_strides_workspace_and_merging(ops: Ops) -> None:
    p = problem(ops, PRESETS[1], 32, 2, 16, [[3, 0, 1], [2, 4, 5]], [45, 33])
    q = queries(ops, 2, 4, 32)
    blocks, lengths = ops.to(p.blocks, torch.int32), ops.to(p.lengths, torch.int32)
    out, lse = p.run(ops, q, return_lse=True)
    p.check(q, out, lse)
    wide = torch.full((2, 9, 50), torch.nan, dtype=BF16, device=ops.device)
    view = wide[:, ::2][:, :4, 7:39]
    assert p.run(ops, q, out=view) is view
    assert torch.equal(view, out)
    assert wide.isnan().sum() == wide.numel() - view.numel()
    strided = torch.zeros(2, 8, 40, dtype=BF16, device=ops.device)
    strided[:, 1::2, 8:] = q
    assert torch.equal(p.run(ops, strided[:, 1::2, 8:]), out)
    needed = mxkv.attend_kv_workspace_bytes(
        q, p.cache, blocks, lengths, format=p.format, num_splits=2, backend=ops.backend
    )
    whole = torch.full((needed + 64,), GUARD, dtype=torch.uint8, device=ops.device)
    split = p.run(ops, q, num_splits=2)
    assert torch.equal(p.run(ops, q, num_splits=2, workspace=whole[32 : 32 + needed]), split)
    assert (whole[:32] == GUARD).all()
    assert (whole[32 + needed :] == GUARD).all()
    if needed:
        with pytest.raises(ValueError, match="workspace of at least"):
            p.run(ops, q, num_splits=2, workspace=whole[: needed - 4])
    # Two caches' worth of rows, merged, are one attention: the first block, and the others.
    parts = [
        attend(ops, q, p.cache, blocks[:, :1], ops.to([16, 16], torch.int32), format=p.format, return_lse=True),
        attend(ops, q, p.cache, blocks[:, 1:], ops.to([29, 17], torch.int32), format=p.format, return_lse=True),
    ]
    merged, logs = mxkv.merge_partials([x for x, _ in parts], [x for _, x in parts], return_lse=True)
    assert torch.allclose(merged.float(), out.float(), rtol=0.02, atol=0.02)
    assert torch.allclose(logs, lse, atol=1e-3)


def test_no_query_no_sequence_no_block(ops: Ops) -> None:
    format = PRESETS[0]
    cache = mxkv.empty_kv_cache(format, 0, 16, 1, 32, ops.device)
    q = queries(ops, 2, 1, 32)
    blocks, lengths = ops.to([[0, 1], [5, 7]], torch.int32), ops.to([20, 3], torch.int32)
    out, lse = attend(ops, q, cache, blocks, lengths, format=format, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not attend(ops, q, cache, blocks[:, :0], lengths, format=format, num_splits=2).any()
    assert attend(ops, q[:0], cache, blocks[:0], lengths[:0], format=format).shape == (0, 1, 32)
    starts = ops.to([0], torch.int32)
    assert not attend(ops, q, cache, blocks[:0], lengths[:0], format=format, query_start=starts).any()


# Errors.


def arguments(ops: Ops) -> dict[str, Any]:
    key, value = (x.to(ops.device) for x in rows(2, 2, 32))
    return {
        "kv_cache": mxkv.empty_kv_cache(PRESETS[1], 2, 4, 2, 32, ops.device), "key": key, "value": value,
        "slots": ops.slots(0, 1), "format": PRESETS[1].name,
    }  # fmt: skip


def at_odd_address(cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(cache.numel() + 1, dtype=torch.uint8, device=cache.device)[1:].view(cache.shape)


BAD_STORES: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown format": (lambda a: {"format": "turboquant"}, ValueError, "known formats: turboquant-k8v4"),
    "format of another type": (lambda a: {"format": 4}, TypeError, "format must be a name or a mxkv.KVFormat"),
    "cache of another width": (lambda a: {"format": "turboquant-k8v4"}, ValueError, "has shape .* 2, 52|heads, 52"),
    "cache dtype": (lambda a: {"kv_cache": a["kv_cache"].view(torch.int8)}, TypeError, "dtype torch.uint8"),
    "flat cache": (lambda a: {"kv_cache": a["kv_cache"].flatten(1)}, ValueError, "has shape"),
    "heads": (lambda a: {"key": a["key"][:, :1], "value": a["value"][:, :1]}, ValueError, "cache's 2 heads"),
    "value's heads": (lambda a: {"value": a["value"][:, :1]}, ValueError, "the same heads"),
    "value's tokens": (lambda a: {"value": a["value"][:1]}, ValueError, "the same tokens"),
    "value's dtype": (lambda a: {"value": a["value"].half()}, TypeError, "one dtype"),
    "key's dtype": (lambda a: {"key": a["key"].double()}, TypeError, "got torch.float64"),
    "key's stride": (lambda a: {"key": a["key"].mT.contiguous().mT}, ValueError, "last stride 1"),
    "too many slots": (lambda a: {"slots": a["slots"].repeat(2)}, ValueError, "at most one slot"),
    "slots' dtype": (lambda a: {"slots": a["slots"].float()}, TypeError, "slots must be"),
    "policy": (lambda a: {"nonfinite": "ignore"}, ValueError, "nonfinite must be one of"),
    "centroids' shape": (lambda a: {"centroids": a["key"].new_zeros(8)}, ValueError, r"centroids must be \[16\]"),
    "rotation's dtype": (lambda a: {"rotation": a["key"].new_zeros(32, 32).half()}, TypeError, "rotation must be"),
    "odd address": (lambda a: {"kv_cache": at_odd_address(a["kv_cache"])}, ValueError, "even address"),
    "slots of another type": (lambda a: {"slots": [0, 1]}, TypeError, "slots must be Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_STORES)
def test_bad_stores(ops: Ops, what: str) -> None:
    """Refused, by name, with what was expected and what came; nothing has been written."""
    change, error, match = BAD_STORES[what]
    good = arguments(ops)
    for met_before in (False, True):
        if met_before:
            store(ops, **good)
            good["kv_cache"].zero_()
        with pytest.raises(error, match=match):
            store(ops, **{**good, **change(good)})
        assert not good["kv_cache"].any()
        if ops.slow:
            break


BAD_ATTENDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q's width": ({"q": torch.zeros(1, 4, 64, dtype=BF16)}, ValueError, "has shape"),
    "q's dtype": ({"q": torch.zeros(1, 4, 32)}, TypeError, "q must be"),
    "q's heads": ({"q": torch.zeros(1, 3, 32, dtype=BF16)}, ValueError, "a multiple of the cache's 2"),
    "sequences": ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table must have a row"),
    "queries": ({"q": torch.zeros(2, 4, 32, dtype=BF16)}, ValueError, "without query_start"),
    "starts": ({"query_start": torch.zeros(3, dtype=torch.int32)}, ValueError, r"query_start must be \[sequences"),
    "table's dims": ({"block_table": torch.zeros(1, dtype=torch.int32)}, ValueError, "block_table must be 2-D"),
    "window": ({"window": 0}, ValueError, "window must be at least 1"),
    "splits": ({"num_splits": 0}, ValueError, "num_splits"),
    "sink": ({"sink": torch.zeros(2)}, ValueError, r"sink must be \[heads\]"),
    "out": ({"out": torch.zeros(1, 4, 31, dtype=BF16)}, ValueError, "out must be of q's shape"),
    "centroids of fp8 keys": ({"centroids": torch.zeros(16)}, ValueError, "belongs to mse3 and mse4 keys"),
}


@pytest.mark.parametrize("what", BAD_ATTENDS)
def test_bad_attends(ops: Ops, what: str) -> None:
    change, error, match = BAD_ATTENDS[what]
    good: dict[str, Any] = {
        "q": torch.zeros(1, 4, 32, dtype=BF16), "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32), "format": PRESETS[0],
    }  # fmt: skip
    changed = {k: v.to(ops.device) if isinstance(v, torch.Tensor) else v for k, v in {**good, **change}.items()}
    cache = mxkv.empty_kv_cache(PRESETS[0], 1, 4, 2, 32, ops.device)
    with pytest.raises(error, match=match):
        attend(ops, kv_cache=cache, **changed)


def test_formats_are_data() -> None:
    for format in (*PRESETS, *CUSTOM):
        assert mxkv.kv_formats.parse_kv_format(format.spec) == format
    assert PRESETS[0].spec == "turboquant-k8v4"
    assert [format.slot_bytes(128) for format in PRESETS] == [196, 134, 118, 102]
    for wrong, error, match in (
        ({"value_bits": 5}, ValueError, "3 or 4"),
        ({"key": "mse4"}, TypeError, "KeyCode"),
        ({"key": KeyCode.FP8, "norm_correction": True}, ValueError, "norm_correction belongs to"),
        ({"name": "a;b"}, ValueError, "name must be"),
    ):
        with pytest.raises(error, match=match):
            KVFormat(**{"name": "mine", "key": KeyCode.MSE4, **wrong})  # type: ignore[arg-type]


def test_explain_and_plan(ops: Ops) -> None:
    for operation in ("store_kv", "load_kv", "attend_kv"):
        found = mxkv.explain(operation, device=ops.device, format="turboquant-k8v4", backend=ops.backend)
        assert found.chosen == ops.backend
        assert f"{operation} of turboquant-k8v4" in str(found)
    spec = mxkv.spec("store_kv", device=ops.device, format=PRESETS[1], head_dim=32, heads=2)
    run = mxkv.plan(spec, ops.backend)
    key, value = rows(2, 2, 32, BF16)
    cache = mxkv.empty_kv_cache(PRESETS[1], 1024, 64, 2, 32, ops.device)
    run(cache, key.to(ops.device), value.to(ops.device), ops.slots(0, 1), None, None)
    check_bytes(cache[:1], key, value, [0, 1], PRESETS[1])
    with pytest.raises(ValueError, match="multiple of 16"):
        mxkv.explain("load_kv", head_dim=40)
    if ops.backend == "triton":
        found = mxkv.explain("store_kv", device=ops.device, head_dim=1024, backend="triton")
        assert "at most 512" in found.verdicts["triton"].reasons[0]


# As torch operators.


def test_opcheck(ops: Ops) -> None:
    a = arguments(ops)
    at = (a["kv_cache"], a["key"], a["value"], a["slots"], a["format"])
    q = queries(ops, 1, 4, 32)
    blocks, lengths = ops.to([[0, 1]], torch.int32), ops.to([6], torch.int32)
    for operator, given in (
        (torch.ops.mxkv.store_kv.default, at),
        (torch.ops.mxkv.load_kv.default, (a["kv_cache"], a["slots"], a["format"], 32)),
        (torch.ops.mxkv.attend_kv.default, (q, a["kv_cache"], q.clone(), blocks, lengths, a["format"])),
    ):
        utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
        utils += [] if ops.slow else ["test_aot_dispatch_dynamic"]
        torch.library.opcheck(operator, given, {"backend": ops.backend}, test_utils=utils)


def test_compiled_writes_are_in_place(ops: Ops) -> None:
    """Case 31."""
    a = arguments(ops)
    q = queries(ops, 1, 4, 32)
    blocks, lengths = ops.to([[0, 1]], torch.int32), ops.to([2], torch.int32)

    def run(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        store(ops, cache, key, value, a["slots"], format=a["format"])
        return attend(ops, q, cache, blocks, lengths, format=a["format"], return_lse=True)

    want = run(a["kv_cache"].clone(), a["key"], a["value"])
    torch._dynamo.reset()
    where = a["kv_cache"].data_ptr()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(a["kv_cache"], a["key"], a["value"])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert a["kv_cache"].data_ptr() == where
    check_bytes(a["kv_cache"], a["key"], a["value"], [0, 1], PRESETS[1])
