"""Calls on pages of keys and values: what ``mxkv verify`` compares with the oracle's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import mxkv
from mxkv.cli import vectors
from mxkv.contracts import KVSpec
from mxkv.kv_formats import data_rows, kv_layout_of, meta_rows
from mxkv.kv_operations import KV_SPECS

OPERATIONS = tuple(KV_SPECS)

_CPU = torch.device("cpu")
_HEADS, _GROUP, _TOKENS, _BLOCKS, _BLOCK_SIZE = 2, 3, 45, 7, 8
_SENTINEL = 0x5A
_MOST_APART = (
    1  # rows of normed keys whose last bits, or one code beside a midpoint, may differ: sums round differently
)
_MOST_ERROR = 2.0**-5  # of an attention's result, relative to its rows' root mean square, beside a bf16's rounding


@dataclasses.dataclass(frozen=True)
class KVCall:
    """One call.

    Attributes:
        operation: Its name.
        format: The pages' format.
        head_dim: Elements of a key, and of a value.
        dtype: Of keys and values, or of the queries.
        seed: Of the inputs; by turns they are lost or sanitized, queries of a sequence are one or several.
    """

    operation: str
    format: mxkv.KVFormat
    head_dim: int
    dtype: torch.dtype
    seed: int

    def __str__(self) -> str:
        return f"{self.operation} of {_HEADS} heads of {self.head_dim}, {self.dtype}, seed {self.seed}"

    def spec(self, device: torch.device) -> KVSpec:
        """The kind of call, on a device."""
        fields: dict[str, Any] = {}
        if self.operation == "attend_kv":
            fields = {"query_heads": _HEADS * _GROUP, "packed": self._packed, "windowed": self._packed, "sinked": True}
        elif self.operation == "store_kv":
            fields = {"nonfinite": self._nonfinite}
        spec: KVSpec = mxkv.spec(
            self.operation, device=device, format=self.format, dtype=self.dtype, cache=self._cache(_CPU),
            head_dim=self.head_dim, **fields,
        )  # fmt: skip
        return spec

    def difference(self, backend: str, device: torch.device) -> str:
        """What is wrong with what a backend makes of it on a device; empty where nothing is."""
        if self.operation == "store_kv":
            return self._difference_of_bytes(self._stored(backend, device).cpu(), self._stored("torch", _CPU))
        if self.operation == "load_kv":
            pairs = zip(self._loaded(backend, device), self._loaded("torch", _CPU), strict=True)
            wrong = sum(int((got.nan_to_num(7) != want.nan_to_num(7)).sum()) for got, want in pairs)
            return f"{wrong} elements differ" if wrong else ""
        (got, got_logs), (want, logs) = self._attended(backend, device), self._attended("torch", _CPU)
        spread = want.square().mean(-1, keepdim=True).sqrt()
        right = (got - want).abs() <= 2.0**-7 * want.abs() + _MOST_ERROR * spread
        right_logs = torch.isclose(got_logs, logs, rtol=0, atol=2.0**-5)
        if bool(right.all()) and bool(right_logs.all()):
            return ""
        return f"{int((~right).sum())} of {want.numel()} values and {int((~right_logs).sum())} logarithms are wrong"

    @property
    def _nonfinite(self) -> str:
        return ("propagate", "sanitize")[self.seed % 2]

    @property
    def _packed(self) -> bool:
        return self.seed % 2 == 1

    def _random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Numbers of about a normal distribution, the same on every platform."""
        count = torch.Size(shape).numel()
        parts = [vectors.hashed(count, 64 * self.seed + 8 * seed + i).double() / 2**32 for i in range(6)]
        return ((sum(parts) - 3.0) * 2**0.5).to(self.dtype).view(shape)  # type: ignore[union-attr]

    def _cache(self, device: torch.device) -> torch.Tensor:
        cache = mxkv.empty_kv_cache(self.format, _BLOCKS, _BLOCK_SIZE, _HEADS, self.head_dim, device)
        return cache.fill_(_SENTINEL)

    def _stored(self, backend: str, device: torch.device, odd: bool = True) -> torch.Tensor:
        """A cache after a store; ``odd`` asks for rows that hold what is not finite, nothing, or much."""
        key, value = (self._random(_TOKENS, _HEADS, self.head_dim, seed=i) for i in range(2))
        slots = (torch.arange(_TOKENS) * 11) % (_BLOCKS * _BLOCK_SIZE)
        if odd:
            key[3, 0, 1], value[4, 1, 2], key[5, 1, -1] = torch.nan, torch.inf, -torch.inf
            key[6], value[7], key[8], value[9] = 0, 0, key[8] * 300, value[9] * 2.0**-12
            slots[10], slots[11] = -1, _BLOCKS * _BLOCK_SIZE
        cache = self._cache(device)
        mxkv.store_kv(
            cache, key.to(device), value.to(device), slots.to(device), format=self.format, nonfinite=self._nonfinite,
            backend=backend,
        )  # fmt: skip
        return cache

    def _difference_of_bytes(self, got: torch.Tensor, want: torch.Tensor) -> str:
        layout = kv_layout_of(want, self.format, self.head_dim)
        if self.format.normed:
            keys = slice(0, layout.key_bytes)
            codes, wanted_codes = data_rows(got, layout)[..., keys], data_rows(want, layout)[..., keys]
            norms, wanted_norms = meta_rows(got, layout)[..., 0, :], meta_rows(want, layout)[..., 0, :]
            apart = (codes != wanted_codes).any(-1) | (norms != wanted_norms).any(-1)  # [blocks, block_size, heads]
            if int(apart.sum()) <= _MOST_APART:
                codes[apart], norms[apart] = wanted_codes[apart], wanted_norms[apart]
        wrong = int((got != want).sum())
        return f"{wrong} of {want.numel()} bytes differ" if wrong else ""

    def _loaded(self, backend: str, device: torch.device) -> list[torch.Tensor]:
        cache = self._stored("torch", _CPU).to(device)
        slots = torch.tensor([3, -1, 0, 40, 11, _BLOCKS * _BLOCK_SIZE, 12, 33], device=device)
        rows = mxkv.load_kv(cache, slots, format=self.format, head_dim=self.head_dim, dtype=self.dtype, backend=backend)
        return [each.cpu() for each in rows]

    def _attended(self, backend: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and its logarithms, fp32 on the CPU."""
        cache = self._stored("torch", _CPU, odd=False).to(device)
        table = torch.tensor([[4, 1, -1], [0, 2, 3], [5, _BLOCKS, 0]], dtype=torch.int32, device=device)
        lengths = torch.tensor([20, 3, 24], dtype=torch.int32, device=device)
        queries = 7 if self._packed else len(lengths)
        q = self._random(queries, _HEADS * _GROUP, self.head_dim, seed=5).to(device)
        starts = torch.tensor([0, 4, 5, 7], dtype=torch.int32, device=device) if self._packed else None
        sink = torch.linspace(-1, 1, _HEADS * _GROUP, device=device)
        out, logs = mxkv.attend_kv(
            q, cache, table, lengths, format=self.format, query_start=starts, sink=sink,
            window=9 if self._packed else None, return_lse=True, backend=backend,
        )  # fmt: skip
        return out.cpu().float(), logs.cpu()


def calls(format: mxkv.KVFormat) -> Iterator[KVCall]:
    """The calls of a format, always in the same order."""
    for seed, (head_dim, dtype) in enumerate(
        ((128, torch.bfloat16), (96, torch.float16), (32, torch.float32), (128, torch.float16))
    ):
        for operation in OPERATIONS:
            if operation != "attend_kv" or dtype != torch.float32:
                yield KVCall(operation, format, head_dim, dtype, seed)
