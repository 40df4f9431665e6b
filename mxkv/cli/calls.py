"""Calls of the operations other than store and load: what ``mxkv verify`` compares with the oracle's.

Most are the trials of the tuner. They are drawn on the CPU, so that a device gets the very inputs that the oracle gets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

import mxkv
from mxkv import dispatch
from mxkv.autotune_cache import shapes, trials
from mxkv.cli import vectors
from mxkv.contracts import COMPRESS_DIM, RING_DIM, SELECTIONS, SaveRingSpec, Spec

OPERATIONS = ("attend", "compress_norm", "compress_store", "save_ring_rows")

_CPU = torch.device("cpu")
_ROWS = mxkv.FORMATS["bf16"]  # of the operations that know no format: that of their specs
_HEADS, _QUERIES, _SELECTED, _TOKENS = 3, 3, 21, 21
_BLOCK_SIZE, _CAPACITY = 7, 3


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the tuner can draw.

    Attributes:
        spec: The call, on the CPU.
        sizes: Its sizes, as its operation has them.
        seed: Of the inputs, and of how tensors stand in memory.
    """

    spec: Spec
    sizes: tuple[int, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"{shapes.describe(self.spec)}, {' x '.join(map(str, self.sizes))}, seed {self.seed}"

    def difference(self, backend: str, device: torch.device) -> str:
        """What is wrong with what a backend makes of it on a device; empty where nothing is."""
        operation = trials.operation_of(self.spec)
        expected = operation.draw(self.sizes, self.seed)
        trial = trials.operation_of(dataclasses.replace(self.spec, device=device)).draw(self.sizes, self.seed)
        trial.whole.copy_(trial.before)
        dispatch.plan(trial.spec, backend)(*trial.tensors)
        return operation.difference(dataclasses.replace(expected, whole=trial.whole.cpu()))


@dataclasses.dataclass(frozen=True)
class Save:
    """A saving of rows to rings, which the tuner does not know."""

    spec: SaveRingSpec
    seed: int = 0

    def __str__(self) -> str:
        return f"save_ring_rows, seed {self.seed}"

    def difference(self, backend: str, device: torch.device) -> str:
        """As that of :class:`Call`."""
        got, expected = self._rings(backend, device), self._rings("torch", _CPU)
        wrong = int((got != expected).sum())
        return f"{wrong} of {expected.numel()} bytes differ" if wrong else ""

    def _rings(self, backend: str, device: torch.device) -> torch.Tensor:
        """The bytes of rings that stand apart, after the call, on the CPU."""
        layout = self.spec.layout
        pool = torch.full((layout.num_blocks * layout.block_stride,), 0.3, device=device)
        shape = (layout.num_blocks, layout.block_size, RING_DIM)
        rings = pool.as_strided(shape, (layout.block_stride, layout.value_stride, 1))
        rows = vectors.float_rows(vectors.TOKENS, RING_DIM, torch.float32, self.seed)
        slots = vectors.slot_numbers((torch.int64, torch.int32)[self.seed % 2], self.seed)
        mxkv.save_ring_rows(rows.to(device), slots.to(device), rings, backend=backend)
        return pool.cpu().view(torch.uint8)


def calls(format: mxkv.Format) -> Iterator[Call | Save]:
    """The calls of a format, always in the same order. A further operation adds its own, and its name above."""
    yield from _attentions(format)
    if format == _ROWS:
        yield from _compressions()
        yield from _savings()
    if format.accepts_dim(COMPRESS_DIM):
        yield from _compressions_into(format)


def _attentions(format: mxkv.Format) -> Iterator[Call]:
    for i, (dim, selection) in enumerate(itertools.product(vectors.dims_of(format), SELECTIONS)):
        spec = mxkv.spec(
            "attend", format=format, latent_dim=dim, cache=_cache(format, dim), heads=_HEADS, value_dim=dim,
            selection=selection, scaled=format.scale is mxkv.Scale.TENSOR, sinked=i % 2 == 1, lse=i % 3 == 0,
        )  # fmt: skip
        yield Call(spec, (_QUERIES, _SELECTED))


def _compressions() -> Iterator[Call]:
    for seed, (ratio, previous) in enumerate(((2, False), (2, True), (1, False))):
        spec = mxkv.spec("compress_norm", state_cache=_rings(_CAPACITY), compress_ratio=ratio, previous=previous)
        yield Call(spec, (_TOKENS,), seed)


def _compressions_into(format: mxkv.Format) -> Iterator[Call]:
    for seed, (ratio, rotate, previous) in enumerate(((2, True, False), (2, False, True), (1, True, False))):
        spec = mxkv.spec(
            "compress_store", format=format, cache=_cache(format, COMPRESS_DIM), state_cache=_rings(_CAPACITY),
            compress_ratio=ratio, rotate=rotate, previous=previous, scaled=format.scale is mxkv.Scale.TENSOR,
            latents=seed == 0, nonfinite=("propagate", "sanitize")[seed % 2],
        )  # fmt: skip
        yield Call(spec, (_TOKENS,), seed)


def _savings() -> Iterator[Save]:
    rings = torch.empty(vectors.NUM_BLOCKS, vectors.BLOCK_SIZE, RING_DIM + 16, device="meta")[..., :RING_DIM]
    for seed in range(2):
        spec = mxkv.spec("save_ring_rows", state_cache=rings)
        assert isinstance(spec, SaveRingSpec)
        yield Save(spec, seed)


def _cache(format: mxkv.Format, dim: int) -> torch.Tensor:
    return mxkv.empty_cache(format, 1, _BLOCK_SIZE, dim)


def _rings(capacity: int) -> torch.Tensor:
    return torch.empty(1, capacity, RING_DIM, device="meta")
