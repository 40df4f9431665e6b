"""What the tests share: the formats under test, rows that try hard, pools with guards, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mxkv
from mxkv import Element, Format, Placement, Scale
from tests import reference

BUILTIN = list(mxkv.FORMATS.values())
CUSTOM = [
    Format("fp4-64", Element.E2M1, Scale.E8M0, 64, Placement.INLINE),
    Format("fp4-page", Element.E2M1, Scale.E8M0, 32, Placement.PAGE),
    Format("fp4-tail", Element.E2M1, Scale.E8M0, 32, Placement.PAGE, tail=64, scale_padding=3),
    Format("fp4-floor", Element.E2M1, Scale.E4M3, 32, Placement.INLINE, tail=32, amax_floor=0.25),
    Format("fp8-scaled-by-fp8", Element.E4M3, Scale.E4M3, 16, Placement.INLINE),
    Format("fp8-no-floor", Element.E4M3, Scale.E8M0, 128, Placement.PAGE, tail=64),
]
FORMATS = BUILTIN + CUSTOM
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDEX_DTYPES = [torch.int32, torch.int64]
GUARD = 0xA5


def name_of(value: Any) -> str | None:
    """What pytest calls a parameter."""
    if isinstance(value, Format):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def width_for(format: Format, at_least: int = 0) -> int:
    """The narrowest width of at least so many values (and of at least the 64 that RoPE turns) that a format takes."""
    return next(d for d in range(max(at_least, 64), 2048) if format.accepts_dim(d))


@dataclasses.dataclass(frozen=True)
class Ops:
    """The public operations on one backend and device."""

    backend: str
    device: torch.device

    @property
    def slow(self) -> bool:
        """Whether kernels are interpreted: keep shapes small."""
        return self.backend != "torch" and self.device.type == "cpu"

    def few(self, many: int, few: int) -> int:
        return few if self.slow else many

    def some(self, items: Sequence[Any], few: int) -> list[Any]:
        """All items; of those ``few`` evenly chosen ones, the first and the last among them, where kernels are slow."""
        if not self.slow or len(items) <= few:
            return list(items)
        return [items[i * (len(items) - 1) // (few - 1)] for i in range(few)]

    def to(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(data, dtype=dtype).to(self.device)

    def slots(self, *slots: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(slots, dtype=dtype, device=self.device)

    def empty(self, format: str | Format, num_blocks: int, block_size: int, latent_dim: int) -> torch.Tensor:
        return mxkv.empty_cache(format, num_blocks, block_size, latent_dim, self.device)

    def store(self, cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, **arguments: Any) -> None:
        mxkv.store(cache, latent, slots, backend=self.backend, **arguments)

    def load(self, cache: torch.Tensor, slots: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return mxkv.load(cache, slots, backend=self.backend, **arguments)

    def attend(self, q: torch.Tensor, cache: torch.Tensor, **arguments: Any) -> Any:
        return mxkv.attend(q, cache, backend=self.backend, **arguments)


# Rows.


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(n: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows like hidden states: normal, a few outliers."""
    g = generator(seed)
    rows = torch.randn(n, d, generator=g)
    rows[torch.rand(n, d, generator=g) < 0.01] *= 30
    return rows.to(dtype)


def messy_rows(
    n: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0, *, finite: bool = False
) -> torch.Tensor:
    """Rows whose runs of 16 values differ wildly: any magnitude, zeros of both signs, ties, and what is not finite."""
    g = generator(seed)
    runs = torch.randn(n, d // 16 + 1, 16, generator=g)
    low, high = (-24, 15) if dtype == torch.float16 else (-140, 126)
    exponent = torch.randint(low, high, runs.shape[:2], generator=g).double()
    exponent = torch.where(torch.rand(exponent.shape, generator=g) < 0.5, exponent.clamp(-9, 9), exponent)
    runs = (runs.double() * 2.0 ** exponent[..., None]).float()
    kind = torch.rand(runs.shape, generator=g)
    runs[kind < 0.05] = 0.0
    runs[kind < 0.02] = -0.0
    on_grid = torch.randint(-24, 25, runs.shape, generator=g).double() / 4 * 2.0 ** exponent[..., None]
    runs = torch.where((kind > 0.85) & (exponent < 100)[..., None], on_grid.float(), runs)
    dull = torch.rand(runs.shape[:2], generator=g)
    runs[dull < 0.08] = 0.0
    if not finite:
        bad = torch.rand(runs.shape, generator=g)
        for i, value in enumerate((float("nan"), float("inf"), -float("inf"), 2.5e38, 2.9e38, -3.1e38, 3.38e38)):
            runs[(bad > i * 5e-4) & (bad < (i + 1) * 5e-4)] = value
    rows = runs.flatten(1)[:, :d].contiguous().to(dtype)
    return rows.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max) if finite else rows


def cos_sin_table(max_pos: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[max_pos, 64]: 32 cosines, then 32 sines."""
    angle = torch.arange(max_pos)[:, None] / 10000 ** (torch.arange(32) / 32)
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


# Pools.


def pages_of(cache: torch.Tensor) -> reference.Pages:
    """A copy of the pages' own bytes [num_blocks, page bytes], without what stands between them."""
    plain = cache.detach().cpu().contiguous()
    as_bytes = plain.view(torch.uint8) if plain.numel() else plain.new_empty(plain.shape, dtype=torch.uint8)
    num_blocks = cache.shape[0]
    return as_bytes.reshape(num_blocks, -1).numpy().copy()


def guarded_pool(
    ops: Ops, format: Format, num_blocks: int, block_size: int, d: int, *, gap: int = 0, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of an allocation, and the cache in it: ``gap`` bytes between the pages, ``offset`` before and after."""
    page = block_size * format.record_bytes(d)
    stride = page + gap
    size = format.cache_dtype.itemsize
    whole = torch.full((2 * offset + num_blocks * stride,), GUARD, dtype=torch.uint8, device=ops.device)
    shape, strides = (
        (num_blocks, block_size, page // block_size // size),
        (stride // size, page // block_size // size, 1),
    )
    return whole, whole.view(format.cache_dtype).as_strided(shape, strides, offset // size)


def guards_of(whole: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The bytes of an allocation that belong to no page of the cache."""
    size = cache.element_size()
    mine = torch.zeros_like(whole, dtype=torch.bool)
    page = cache.shape[1] * cache.shape[2] * size
    for block in range(cache.shape[0]):
        start = (cache.storage_offset() + block * cache.stride(0)) * size
        mine[start : start + page] = True
    return whole[~mine]


def sparse(path: Path, nbytes: int, ops: Ops) -> torch.Tensor:
    """``nbytes`` zero bytes that take no room until they are touched (on a GPU: plain memory, if there is enough).

    Raises:
        OSError, RuntimeError: There is no room.
    """
    if ops.device.type == "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, device=ops.device)
    with path.open("wb") as file:
        file.truncate(nbytes)
    return torch.from_numpy(np.memmap(path, np.uint8, mode="r+"))


# Comparisons.


def fp32(rows: torch.Tensor) -> reference.Rows:
    return rows.detach().cpu().float().numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_same_pages(got: torch.Tensor, want: reference.Pages) -> None:
    """Every byte of a cache's pages equals the expected one."""
    have = pages_of(got)
    assert have.shape == want.shape
    wrong = np.argwhere(have != want)
    assert not len(wrong), (
        f"{len(wrong)} bytes differ; first at block {wrong[0][0]}, byte {wrong[0][1]}: "
        f"expected {want[tuple(wrong[0])]:#04x}, got {have[tuple(wrong[0])]:#04x}"
    )


def assert_same_rows(got: torch.Tensor, want: reference.Rows | torch.Tensor) -> None:
    """Every value equals the expected one bit for bit, the sign of zero included; any NaN equals any NaN."""
    have = got.detach().cpu().float()
    expected = want.detach().cpu().float() if isinstance(want, torch.Tensor) else torch.from_numpy(want)
    assert have.shape == expected.shape
    same = (have.view(torch.int32) == expected.view(torch.int32)) | (have.isnan() & expected.isnan())
    wrong = (~same).nonzero().tolist()
    assert not wrong, (
        f"{len(wrong)} values differ; first at {wrong[0]}: "
        f"expected {expected[tuple(wrong[0])].item()!r}, got {have[tuple(wrong[0])].item()!r}"
    )


def check_against_reference(
    ops: Ops,
    format: Format,
    rows: torch.Tensor,
    *,
    block_size: int = 4,
    slots: Sequence[int] | None = None,
    nonfinite: str = "propagate",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    cache_scale: float | None = None,
) -> torch.Tensor:
    """Store rows, compare every byte; load them, compare every value. Returns the cache."""
    n, d = rows.shape
    where = list(range(n)) if slots is None else list(slots)
    num_blocks = -(-max(max(where, default=0) + 1, n) // block_size)
    cache = ops.empty(format, num_blocks, block_size, d)
    want = pages_of(cache)
    scale = 1.0 if cache_scale is None else cache_scale
    reference.store(want, fp32(rows), where, format, nonfinite=nonfinite, cache_scale=scale)
    at = ops.slots(*where)
    ops.store(cache, rows.to(ops.device), at, format=format, nonfinite=nonfinite, cache_scale=cache_scale)
    assert_same_pages(cache, want)
    for dtype in dtypes:
        got = ops.load(cache, at, format=format, latent_dim=d, dtype=dtype, cache_scale=cache_scale)
        assert got.dtype == dtype
        assert_same_rows(got, reference.load(want, where, format, d, dtype_name(dtype), scale))
    return cache
