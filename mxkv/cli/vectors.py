"""Calls with inputs made by integer hashing, the same on every platform: what ``mxkv verify`` runs.

No random generator, no libm and no float conversion takes part in making them, so that a digest of what the oracle
writes says something about the arithmetic of the machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import itertools
import json
from collections.abc import Iterator

import torch

import mxkv
from mxkv.contracts import NONFINITE, ROPE_DIM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_MASK = 0xFFFFFFFF
_LAYOUT = {
    torch.bfloat16: (8, 7, torch.int16),
    torch.float16: (5, 10, torch.int16),
    torch.float32: (8, 23, torch.int32),
}

NUM_BLOCKS, BLOCK_SIZE = 5, 7
TOKENS = 48
MAX_POSITION = 40
_GUARD, _GAP = 19, 13  # elements around the pool, and between its blocks: odd, so that rows are aligned to nothing
_SENTINEL = 0x5A
_CACHE_SCALE = 0.4140625


def hashed(count: int, seed: int) -> torch.Tensor:
    """``count`` int64 in [0, 2**32), well mixed. Every product stays below 2**63."""
    x = torch.arange(1, count + 1, dtype=torch.int64)
    x = (x * 0x9E3779B1 + seed * 0x7FEB352D) & _MASK
    for multiplier, shift in ((0x7FEB352D, 16), (0x31848BAB, 15), (0x21F0AAAD, 17)):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK
    return x ^ (x >> 14)


def float_rows(rows: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of floating-point numbers, made of bits: magnitudes of many binades, ties, zeros, NaN, infinities.

    Row ``i`` of each eight has its own magnitude, from subnormal to near the largest. Of each sixteen rows one is zero,
    one holds a NaN, one infinities, and one the largest finite number.
    """
    exponent_bits, mantissa_bits, bits_dtype = _LAYOUT[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    full, half = (1 << exponent_bits) - 1, 1 << (mantissa_bits - 1)
    h = hashed(rows * dim, seed).view(rows, dim)
    tops = torch.tensor([bias, bias - 7, bias + 7, 1, 2 * bias - 2, bias + 3, bias - 3, bias - 12])
    row = torch.arange(rows)
    exponent = (tops[row % 8, None] - (h >> 23 & 7)).clamp(min=0)
    mantissa = h & ((1 << mantissa_bits) - 1)
    on_a_grid = mantissa & (3 << (mantissa_bits - 2))  # ties of E2M1 and of scales
    mantissa = torch.where(h >> 27 & 1 == 1, on_a_grid, mantissa)
    magnitude = exponent << mantissa_bits | mantissa
    magnitude = torch.where(h >> 28 == 3, 0, magnitude)
    column, kind = row * 37 % dim, row % 16
    magnitude[kind == 5] = 0
    for special, bits in (
        (7, full << mantissa_bits | half),
        (10, full << mantissa_bits),
        (13, (full << mantissa_bits) - 1),
    ):
        hit = row[kind == special]
        magnitude[hit, column[hit]] = bits
        if special == 10:
            magnitude[hit, dim - 1 - column[hit]] = bits
    width = exponent_bits + mantissa_bits
    signed = magnitude - ((h >> 26 & 1) << width)  # two's complement of the pattern with the sign bit set
    return signed.to(bits_dtype).view(dtype)


def slot_numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A shuffle of all slots among negative ones and ones past the end, one for each token."""
    slots = NUM_BLOCKS * BLOCK_SIZE
    past = 2**31 if dtype == torch.int64 else 2**31 - 1
    numbers = [*range(slots), -1, -slots, slots, slots + 3, past, -(2**31), *([-1] * TOKENS)][:TOKENS]
    order = hashed(TOKENS, seed).argsort(stable=True)
    return torch.tensor(numbers)[order].to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One store, and the loads of what it wrote.

    Attributes:
        format: The cache's format.
        latent_dim: Values of a row.
        dtype: Of the stored rows.
        nonfinite: The policy.
        compress_ratio: 1 or 2 with RoPE, 0 without.
        seed: Of the inputs. It also says the slots' dtype and stride, and whether there are fewer than tokens.
    """

    format: mxkv.Format
    latent_dim: int
    dtype: torch.dtype
    nonfinite: str
    compress_ratio: int
    seed: int

    def __str__(self) -> str:
        rope = f", rope of ratio {self.compress_ratio}" if self.compress_ratio else ""
        return f"{self.format.name} d={self.latent_dim} {self.dtype}, {self.nonfinite}{rope}, seed {self.seed}"

    def slots(self) -> torch.Tensor:
        """Slots as int64, as int32, strided, and fewer than tokens, in turn."""
        slots = slot_numbers(torch.int32 if self.seed % 4 == 1 else torch.int64, self.seed)
        if self.seed % 4 == 2:
            slots = torch.stack((slots, torch.zeros_like(slots)), 1)[:, 0]
        return slots[: TOKENS - 9] if self.seed % 4 == 3 else slots

    def cache_scale(self) -> torch.Tensor | None:
        return torch.tensor(_CACHE_SCALE) if self.format.scale is mxkv.Scale.TENSOR else None

    def empty_pool(self) -> torch.Tensor:
        """The bytes around, between and of the pages, all of them sentinels."""
        width = self.format.record_width(self.latent_dim)
        elements = 2 * _GUARD + NUM_BLOCKS * (BLOCK_SIZE * width + _GAP)
        return torch.full((elements * self.format.cache_dtype.itemsize,), _SENTINEL, dtype=torch.uint8)

    def cache_of(self, pool: torch.Tensor) -> torch.Tensor:
        """The cache inside a pool's bytes."""
        width = self.format.record_width(self.latent_dim)
        return pool.view(self.format.cache_dtype).as_strided(
            (NUM_BLOCKS, BLOCK_SIZE, width), (BLOCK_SIZE * width + _GAP, width, 1), _GUARD
        )

    def store(self, backend: str, device: torch.device) -> torch.Tensor:
        """The pool's bytes after the store, on the CPU."""
        pool = self.empty_pool().to(device)
        wide = float_rows(TOKENS, self.latent_dim + 8, self.dtype, self.seed).to(device)
        positions = cos_sin = None
        if self.compress_ratio:
            positions = (hashed(TOKENS, self.seed + 1) % (MAX_POSITION + 6) - 3).to(device)
            table = hashed(MAX_POSITION * ROPE_DIM, self.seed + 2).view(MAX_POSITION, ROPE_DIM) >> 8
            cos_sin = ((table - (1 << 23)).to(torch.float32) * 2.0**-23).to(device)  # exact
        scale = self.cache_scale()
        mxkv.store(
            self.cache_of(pool),
            wide[:, : self.latent_dim],
            self.slots().to(device),
            format=self.format,
            positions=positions,
            cos_sin=cos_sin,
            compress_ratio=max(1, self.compress_ratio),
            cache_scale=None if scale is None else scale.to(device),
            nonfinite=self.nonfinite,
            backend=backend,
        )
        return pool.cpu()

    def load(self, pool: torch.Tensor, dtype: torch.dtype, backend: str, device: torch.device) -> torch.Tensor:
        """The bits of the rows that a pool's bytes read as, on the CPU: every NaN is the same one."""
        scale = self.cache_scale()
        rows = mxkv.load(
            self.cache_of(pool.to(device)),
            self.slots().to(device),
            format=self.format,
            latent_dim=self.latent_dim,
            dtype=dtype,
            cache_scale=None if scale is None else scale.to(device),
            backend=backend,
        ).cpu()
        exponent_bits, mantissa_bits, bits_dtype = _LAYOUT[dtype]
        nan = ((1 << exponent_bits) - 1) << mantissa_bits | 1 << (mantissa_bits - 1)
        return torch.where(rows.isnan(), torch.tensor(nan, dtype=bits_dtype), rows.view(bits_dtype))


def dims_of(format: mxkv.Format) -> tuple[int, ...]:
    """Latent widths to try: one whose records are of odd size, and one whose groups are no power of two."""
    return (format.only_dim,) if format.only_dim is not None else (96, 576)


def cases(format: mxkv.Format) -> Iterator[Case]:
    """The calls of a format, always in the same order."""
    kinds = itertools.product(DTYPES.values(), dims_of(format), NONFINITE, (0, 1, 2))
    for seed, (dtype, dim, nonfinite, ratio) in enumerate(kinds):
        yield Case(format, dim, dtype, nonfinite, ratio, seed)


def digests(format: mxkv.Format) -> dict[str, str]:
    """SHA-256 of what the oracle writes for a format on the CPU, and of what it reads, by the dtype of the rows."""
    cpu = torch.device("cpu")
    found = {
        name: hashlib.sha256() for name in ("input", *(f"{op} {name}" for op in ("store", "load") for name in DTYPES))
    }
    names = {dtype: name for name, dtype in DTYPES.items()}
    for case in cases(format):
        rows = float_rows(TOKENS, case.latent_dim + 8, case.dtype, case.seed)
        found["input"].update(_bytes(rows))
        pool = case.store("torch", cpu)
        found[f"store {names[case.dtype]}"].update(_bytes(pool))
        for name, dtype in DTYPES.items():
            found[f"load {name}"].update(_bytes(case.load(pool, dtype, "torch", cpu)))
    return {name: digest.hexdigest() for name, digest in found.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def pinned_digests() -> dict[str, dict[str, str]]:
    """What :func:`digests` must give for each format, from ``digests.json`` beside this file."""
    found: dict[str, dict[str, str]] = json.loads(
        importlib.resources.files("mxkv.cli").joinpath("digests.json").read_text(encoding="utf-8")
    )
    return found


if __name__ == "__main__":  # `python -m mxkv.cli.vectors > mxkv/cli/digests.json`, after a change of the specification
    print(json.dumps({name: digests(format) for name, format in mxkv.FORMATS.items()}, indent=2))
