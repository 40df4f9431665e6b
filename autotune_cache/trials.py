"""The calls that a tuner makes: private tensors, inputs that try hard, and what the oracle makes of them.

Each operation has one class here, listed in :data:`OPERATIONS`. It draws two kinds of calls: a :class:`Trial`, small,
of nasty inputs, in an allocation with guard bytes, whose outcome is compared with the oracle's; and, for timing, many
sets of tensors cut from one pool, so that buckets of one kind of call share their memory.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import os
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mxkv import devices, dispatch, settings
from mxkv.compression_checks import ROW_STEP
from mxkv.contracts import (
    COMPRESS_DIM,
    RING_DIM,
    ROPE_DIM,
    AttendSpec,
    CompressSpec,
    CompressStoreSpec,
    LoadSpec,
    Packed,
    Spec,
    StoreSpec,
)
from mxkv.formats import Placement
from mxkv.paging import PageLayout

ORACLE = "torch"
MIB = 1 << 20

_POISON = 0xA5
_GUARD = 1024  # bytes before and after what a call may write; keeps every alignment that a kernel looks at
_FEW_HUNDRED, _FEW_INTERPRETED = 331, 21  # odd, so that the last tile of any size is a part of one
_EVEN = 256  # a count that compilers specialize on
_MOST_EDGE = 600
_SPARE_BLOCKS = 3
_MAX_POSITION = 8192
_RUN = 64  # tokens that follow one another, where pages do not say
_SET_STEP = 32  # sets start at multiples of so many tokens: their tensors are aligned as a caller's are
_MOST_SETS, _FEW_SETS = 512, 256
_UNKNOWN_L2 = 60 * MIB
_CPU_CACHE = 8 * MIB
_STORED_PAGES_TOKENS = 4096
_REQUESTS = 16  # of a compression that is timed: few tokens are their next ones, many are chunks of their prompts
_MOST_RING_BYTES = 64 * MIB  # of a trial

Tensors = tuple[torch.Tensor | None, ...]


class TooLarge(ValueError):
    """A call's tensors do not fit into the memory that a tuner may take."""


@dataclasses.dataclass
class Trial:
    """One call on private tensors.

    Attributes:
        spec: The call; its layout is that of these tensors.
        tensors: The arguments, as a backend's function takes them after the spec.
        whole: All bytes of the allocation that it writes into, guards included.
        expected: The same bytes after the oracle's call.
    """

    spec: Spec
    tensors: Tensors
    whole: torch.Tensor
    before: torch.Tensor
    expected: torch.Tensor

    def run(self, prepared: Callable[..., None], config: Any) -> None:
        """Make the call on fresh bytes."""
        self.whole.copy_(self.before)
        prepared(*self.tensors, config=config)

    def outcome(self) -> torch.Tensor:
        """Every byte that the call could have written."""
        return self.whole


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a trial's tensors stand in memory: kernels are compiled for what they are aligned to.

    Attributes:
        row_bytes: How far rows begin behind an aligned address, at least one element.
        row_gap: Elements between rows.
        odd: Whether rows are an odd number of elements apart, for which the gap may be larger by one.
        cache_bytes: How far the cache begins behind an aligned address, at least one element.
        indices: dtype of slots and positions.
        index_step: Elements from one index to the next.
    """

    row_bytes: int = 0
    row_gap: int = 0
    odd: bool = False
    cache_bytes: int = 0
    indices: torch.dtype = torch.int64
    index_step: int = 1

    def rows(self, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Rows that stand so, on a device."""
        return self._place(rows, device, self.offset(self.row_bytes, rows.dtype), self.pitch(rows.shape[1]))

    def index(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Slots or positions that stand so, on a device."""
        return self._place(values.to(self.indices), device, self.index_step - 1, self.index_step)

    def pitch(self, width: int) -> int:
        """Elements from one row to the next."""
        pitch = width + self.row_gap
        return pitch + 1 if self.odd and pitch % 2 == 0 else pitch

    @staticmethod
    def offset(distance: int, dtype: torch.dtype) -> int:
        """A distance in bytes, in elements of a dtype."""
        return max(distance // dtype.itemsize, 1) if distance else 0

    @staticmethod
    def _place(values: torch.Tensor, device: torch.device, offset: int, pitch: int) -> torch.Tensor:
        memory = torch.zeros(offset + values.shape[0] * pitch, dtype=values.dtype, device=device)
        return memory.as_strided(values.shape, (pitch, 1)[: values.dim()], offset).copy_(values)


STANDINGS = (
    Standing(),  # as callers' tensors mostly do
    Standing(row_bytes=1, row_gap=1, odd=True, cache_bytes=1, indices=torch.int32, index_step=2),
    Standing(row_bytes=4, row_gap=2, cache_bytes=2, indices=torch.int32, index_step=2),
)
"""How the draws of each seed stand in memory."""


class Operation(abc.ABC):
    """The calls of one kind.

    Args:
        spec: The kind; the number of its pages, and how far they stand apart, are chosen anew for each allocation.
    """

    seeds: ClassVar[tuple[int, ...]] = (0,)
    """Of the draws of a check: the first is made at every size, the others at one."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.device: torch.device = spec.device
        self._trials: dict[tuple[tuple[int, ...], int], Trial] = {}
        self._prepared: dict[tuple[str, Spec], Callable[..., None]] = {}
        self._capacity = 0

    # To be checked.

    @abc.abstractmethod
    def draw(self, sizes: tuple[int, ...], seed: int) -> Trial:
        """A call of these sizes on nasty inputs."""

    @abc.abstractmethod
    def difference(self, trial: Trial) -> str:
        """What is wrong with a trial's outcome; empty where nothing is."""

    def trial(self, sizes: tuple[int, ...], seed: int = 0) -> Trial:
        """As :meth:`draw`, which happens once."""
        key = sizes, seed
        if key not in self._trials:
            self._trials[key] = self.draw(sizes, seed)
        return self._trials[key]

    def check_sizes(self, config: Any) -> list[tuple[int, ...]]:
        """The sizes at which a configuration is checked: one, a few hundred, and the edges of its tiles."""
        few = _few()
        counts = {1, few} if settings.triton_interpret() else {1, few, _EVEN}
        for number in vars(config).values():
            if isinstance(number, int) and not isinstance(number, bool):
                for tile in (number, number // self.spec.latent_dim):  # of tokens, or of elements
                    counts |= {tile - 1, tile, tile + 1} if 1 < tile < min(_MOST_EDGE, 2 * few) else set()
        return [(count,) for count in sorted(counts) if count]

    def check_calls(self, config: Any) -> list[tuple[tuple[int, ...], int]]:
        """The sizes and the seed of each call that a configuration is checked with."""
        sizes = self.check_sizes(config)
        few = min(sizes, key=lambda size: abs(size[-1] - _few()))
        return [(size, self.seeds[0]) for size in sizes] + [(few, seed) for seed in self.seeds[1:]]

    def check(self, backend: str, config: Any, sizes: tuple[int, ...], seed: int = 0) -> str:
        """Make a call of these sizes and compare it with the oracle's; what is wrong, or nothing."""
        trial = self.trial(sizes, seed)
        trial.run(self.prepared(backend, trial.spec), config)
        found = self.difference(trial)
        where = " that are not aligned" if seed else ""
        return f"{found} (of {', '.join(map(str, sizes))} tokens{where})" if found else ""

    def prepared(self, backend: str, spec: Spec) -> Callable[..., None]:
        """What runs a kind of call on a backend."""
        key = backend, spec
        if key not in self._prepared:
            self._prepared[key] = dispatch.get_backend(backend).load().prepare(spec)
        return self._prepared[key]

    # To be timed.

    @abc.abstractmethod
    def call_bytes(self, sizes: tuple[int, ...]) -> int:
        """Bytes that a call moves."""

    @abc.abstractmethod
    def fill(self, tokens: int) -> Spec:
        """Draw the pool for so many tokens; the spec of the calls that are cut from it."""

    @abc.abstractmethod
    def cut(self, start: int, sizes: tuple[int, ...]) -> Tensors:
        """The tensors of a call from the pool, from a token on."""

    def sets(self, sizes: tuple[int, ...], most: tuple[int, ...]) -> tuple[Spec, list[Tensors]]:
        """Sets of tensors, together larger than twice the last cache; of calls so small that they never are, some.

        Args:
            sizes: Of a call.
            most: The largest sizes that will be asked for: the pool is drawn once.

        Raises:
            TooLarge: The tensors would take more memory than there is to spare.
        """
        tokens, per_token = sizes[0], max(1, self.call_bytes((1, *sizes[1:])))
        beyond_cache = 2 * cache_bytes(self.device)
        wanted = max(most[0], tokens, 2 * beyond_cache // per_token)  # as many sets of any size as are needed
        wanted = -(-wanted // _SET_STEP) * _SET_STEP
        if self._capacity < tokens:
            spare = spare_memory(self.device)
            if tokens * per_token > spare:
                raise TooLarge(f"{tokens} tokens take {tokens * per_token >> 20} MiB, {spare >> 20} MiB are to spare")
            self._pool_spec = self.fill(max(tokens, min(wanted, spare // per_token)))
            self._capacity = max(tokens, min(wanted, spare // per_token))
        step = -(-tokens // _SET_STEP) * _SET_STEP
        there = max(1, self._capacity // step)
        needed = beyond_cache // (tokens * per_token) + 1
        count = min(there, needed if needed <= _MOST_SETS else _FEW_SETS)
        spread = there // count  # small calls stand far apart
        return self._pool_spec, [self.cut(i * spread * step, sizes) for i in range(count)]


class StoreCalls(Operation):
    """Stores: every byte of the cache's allocation is the oracle's."""

    spec: StoreSpec
    seeds = tuple(range(len(STANDINGS)))

    def draw(self, sizes: tuple[int, ...], seed: int) -> Trial:
        (tokens,) = sizes
        spec, g, standing = self.spec, torch.Generator().manual_seed(seed), STANDINGS[seed]
        layout = private_layout(spec, tokens)
        whole, cache = allocate(spec, layout, standing.cache_bytes)
        whole.fill_(_POISON)
        slots = page_order(tokens, layout, g)
        slots[3::16] = -1
        slots[11::16] = layout.num_slots + torch.arange(len(slots[11::16])) * 7
        positions = table = None
        if spec.positioned:
            positions = torch.randint(_RUN, (tokens,), generator=g)
            positions[5::17] = -1
            positions[9::17] = _RUN + 3
            if tokens == 1:
                positions[:] = 2 * spec.compress_ratio - 1
        if spec.rotate:
            table = standing.rows(_table(_RUN, g), self.device)
        if positions is not None:
            positions = standing.index(positions, self.device)
        rows = standing.rows(messy_rows(tokens, spec.latent_dim, spec.latent_dtype, g), self.device)
        arguments = rows, standing.index(slots, self.device), positions, table, _scale(spec.scaled)
        return _trial(dataclasses.replace(spec, layout=layout), whole, cache, arguments)

    def difference(self, trial: Trial) -> str:
        return _different_bytes(trial.outcome(), trial.expected)

    def call_bytes(self, sizes: tuple[int, ...]) -> int:
        (tokens,) = sizes
        return tokens * (self.spec.latent_dim * self.spec.latent_dtype.itemsize + _slot_bytes(self.spec))

    def fill(self, tokens: int) -> Spec:
        spec, g = self.spec, torch.Generator(self.device).manual_seed(0)
        layout = private_layout(spec, tokens, spare=0)
        _, self._cache = allocate(spec, layout)
        self._rows = torch.randn(tokens, spec.latent_dim, dtype=spec.latent_dtype, device=self.device, generator=g)
        self._slots = page_order(tokens, layout, g)
        self._positions = _positions(tokens, g) if spec.positioned else None
        self._table = _table(_MAX_POSITION, g) if spec.rotate else None
        self._scale = _on(self.device, _scale(spec.scaled))
        return dataclasses.replace(spec, layout=layout)

    def cut(self, start: int, sizes: tuple[int, ...]) -> Tensors:
        (tokens,) = sizes
        here = slice(start, start + tokens)
        positions = None if self._positions is None else self._positions[here]
        return self._cache, self._rows[here], self._slots[here], positions, self._table, self._scale


class LoadCalls(Operation):
    """Loads: every value is the oracle's bit for bit (any NaN equals any other), and no guard byte changes."""

    spec: LoadSpec
    seeds = tuple(range(len(STANDINGS)))

    def draw(self, sizes: tuple[int, ...], seed: int) -> Trial:
        (tokens,) = sizes
        spec, g, standing = self.spec, torch.Generator().manual_seed(seed), STANDINGS[seed]
        layout = private_layout(spec, tokens)
        pages, cache = allocate(spec, layout, standing.cache_bytes)
        # Half of the records are any bytes there are, the others what a store writes.
        pages.copy_(torch.randint(256, pages.shape, dtype=torch.uint8, generator=g))
        self._store(cache, layout, torch.randperm(layout.num_slots, generator=g)[::2], g)
        shape, pitch = (tokens, spec.latent_dim), standing.pitch(spec.latent_dim)
        offset = standing.offset(standing.row_bytes, spec.out_dtype)
        whole, out = _guarded(shape, pitch, spec.out_dtype, offset, self.device)
        slots = torch.randint(layout.num_slots, (tokens,), generator=g)
        slots[3::16] = -1
        slots[11::16] = layout.num_slots + torch.arange(len(slots[11::16])) * 7
        arguments = standing.index(slots, self.device), out, _scale(spec.scaled)
        return _trial(dataclasses.replace(spec, layout=layout), whole, cache, arguments)

    def _store(self, cache: torch.Tensor, layout: PageLayout, slots: torch.Tensor, g: torch.Generator) -> None:
        spec = self.spec
        stored = StoreSpec(
            self.device, spec.format, spec.latent_dim, torch.bfloat16, layout, scaled=spec.scaled, nonfinite="propagate"
        )
        rows = messy_rows(slots.shape[0], spec.latent_dim, torch.bfloat16, g)
        run_oracle(stored, (cache, rows, slots, None, None, _scale(spec.scaled)))

    def difference(self, trial: Trial) -> str:
        return _different_values(trial.outcome(), trial.expected, self.spec.out_dtype)

    def call_bytes(self, sizes: tuple[int, ...]) -> int:
        (tokens,) = sizes
        return tokens * (self.spec.latent_dim * self.spec.out_dtype.itemsize + _slot_bytes(self.spec))

    def fill(self, tokens: int) -> Spec:
        spec, g = self.spec, torch.Generator(self.device).manual_seed(0)
        layout = private_layout(spec, tokens, spare=0)
        whole, self._cache = allocate(spec, layout)
        self._slots = page_order(tokens, layout, g)
        self._fill_pages(whole, self._cache, layout)
        self._out = torch.empty(tokens, spec.latent_dim, dtype=spec.out_dtype, device=self.device)
        self._scale = _on(self.device, _scale(spec.scaled))
        return dataclasses.replace(spec, layout=layout)

    def _fill_pages(self, whole: torch.Tensor, cache: torch.Tensor, layout: PageLayout) -> None:
        """Store rows everywhere. The oracle is slow: it stores some pages, and the others are copies of them."""
        blocks = min(layout.num_blocks, max(1, _STORED_PAGES_TOKENS // layout.block_size))
        first = dataclasses.replace(layout, num_blocks=blocks)
        page = layout.block_stride * self.spec.format.cache_dtype.itemsize
        pages = whole[_GUARD:-_GUARD]
        pages.zero_()
        self._store(cache, first, torch.arange(min(first.num_slots, _STORED_PAGES_TOKENS)), torch.Generator())
        for start in range(blocks, layout.num_blocks, blocks):
            part = pages[start * page : (start + blocks) * page]
            part.copy_(pages[: part.shape[0]])

    def cut(self, start: int, sizes: tuple[int, ...]) -> Tensors:
        (tokens,) = sizes
        here = slice(start, start + tokens)
        return self._cache, self._slots[here], self._out[here], self._scale


class AttendCalls(LoadCalls):
    """Attention: every value is close to the oracle's, whatever the slots hold that are not selected.

    Its sizes are queries, and rows of a query.
    """

    spec: AttendSpec  # type: ignore[assignment]
    seeds = (0,)

    def check_sizes(self, config: Any) -> list[tuple[int, ...]]:
        tile = getattr(config, "block_rows", 32)
        if settings.triton_interpret():
            return [(1, 1), (2, tile + 1)]
        return [(1, 1), (2, tile - 1), (2, tile), (3, tile + 1), (2, 4 * tile + 3), (5, _FEW_HUNDRED)]

    def draw(self, sizes: tuple[int, ...], seed: int) -> Trial:
        queries, rows = sizes
        spec, g = self.spec, torch.Generator().manual_seed(seed)
        layout = private_layout(spec, 2 * rows)
        pages, cache = allocate(spec, layout)
        pages.fill_(0xFF)  # which reads as NaN
        if spec.selection == "pages":
            known = torch.randperm(layout.num_blocks, generator=g)[::2]
            stored = (known[:, None] * layout.block_size + torch.arange(layout.block_size)).flatten()
        else:
            known = stored = torch.randperm(layout.num_slots, generator=g)[::2]
        self._store(cache, layout, stored, g)
        selected = self._select(known, layout, queries, rows, g)
        count = queries * spec.heads * spec.value_dim * spec.q_dtype.itemsize
        whole = torch.full((count + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=self.device)
        out = whole[_GUARD:-_GUARD].view(spec.q_dtype).view(queries, spec.heads, spec.value_dim)
        q = torch.randn(queries, spec.heads, spec.latent_dim, generator=g).to(spec.q_dtype)
        tensors: Any = (q.to(self.device), cache, out, *selected, *self._others(queries, g))
        private = dataclasses.replace(spec, layout=layout)
        before = whole.clone()
        run_oracle(private, tensors)
        return Trial(private, tensors, whole, before, whole.clone())

    def _store(self, cache: torch.Tensor, layout: PageLayout, slots: torch.Tensor, g: torch.Generator) -> None:
        spec = self.spec
        stored = StoreSpec(self.device, spec.format, spec.latent_dim, torch.bfloat16, layout, scaled=spec.scaled)
        rows = torch.randn(slots.shape[0], spec.latent_dim, generator=g).to(torch.bfloat16)
        run_oracle(stored, (cache, rows, slots, None, None, _scale(spec.scaled)))

    def _select(
        self, known: torch.Tensor, layout: PageLayout, queries: int, rows: int, g: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots or blocks out of some for each query, some of them out of range, and what bounds them."""
        paged = self.spec.selection == "pages"
        each = -(-rows // layout.block_size) if paged else rows
        chosen = known.to(g.device)[torch.randint(known.shape[0], (queries, each), device=g.device, generator=g)]
        chosen.view(-1)[3::16] = -1
        chosen.view(-1)[11::16] = layout.num_blocks if paged else layout.num_slots
        chosen = chosen.to(torch.int32)
        bounds = None
        if paged:
            bounds = torch.full((queries,), rows, dtype=torch.int32)
            bounds[1::3] = rows // 2
        elif self.spec.selection == "ragged":
            cuts = torch.arange(queries + 1) * rows
            cuts[1:-1] += torch.randint(-(rows // 2), rows // 2 + 1, (queries - 1,), generator=torch.Generator())
            bounds, chosen = cuts.to(torch.int32), chosen.flatten()
        return chosen.to(self.device), _on(self.device, bounds)

    def _others(self, queries: int, g: torch.Generator) -> tuple[Any, ...]:
        """What follows the selection: scales, the sink, where logarithms go, and no workspace."""
        spec = self.spec
        sink = torch.randn(spec.heads, device=g.device, generator=g).to(self.device) if spec.sinked else None
        lse = torch.empty(queries, spec.heads, device=self.device) if spec.lse else None
        return _on(self.device, _scale(spec.scaled)), sink, lse, None, spec.latent_dim**-0.5, None

    def difference(self, trial: Trial) -> str:
        inside, dtype = slice(_GUARD, -_GUARD), self.spec.q_dtype
        have, want = trial.outcome()[inside].view(dtype).float(), trial.expected[inside].view(dtype).float()
        merged = trial.expected.clone()
        merged[:_GUARD], merged[-_GUARD:] = trial.outcome()[:_GUARD], trial.outcome()[-_GUARD:]
        if found := _different_bytes(merged, trial.expected):
            return found
        # Twice the rounding of the weights to bf16, which the other weights' share of a sum bounds, and of the result.
        spread = (
            want.view(-1, self.spec.value_dim).square().mean(-1, keepdim=True).sqrt().expand(-1, self.spec.value_dim)
        )
        off = (have - want).abs() - 2.0**-7 * want.abs() - 2.0**-6 * spread.reshape(-1)
        if not bool((off <= 0).all()):  # NaN is not
            wrong = int((~(off <= 0)).nonzero().flatten()[0])
            return f"wrong values, the first at {wrong}: expected {float(want[wrong])}, got {float(have[wrong])}"
        return ""

    def call_bytes(self, sizes: tuple[int, ...]) -> int:
        queries, rows = sizes
        spec = self.spec
        heads = spec.heads * (spec.latent_dim + spec.value_dim) * spec.q_dtype.itemsize
        return queries * (rows * _slot_bytes(spec) + heads)

    def fill(self, tokens: int) -> Spec:
        spec, g = self.spec, torch.Generator(self.device).manual_seed(0)
        slots = -(-4 * cache_bytes(self.device) // _slot_bytes(spec))  # so many that calls seldom share one
        layout = private_layout(spec, slots, spare=0)
        whole, self._cache = allocate(spec, layout)
        self._fill_pages(whole, self._cache, layout)
        shape = (tokens, spec.heads, spec.latent_dim)
        self._q = torch.randn(shape, device=self.device, generator=g).to(spec.q_dtype)
        self._out = torch.empty((*shape[:2], spec.value_dim), dtype=spec.q_dtype, device=self.device)
        self._layout = layout
        return dataclasses.replace(spec, layout=layout)

    def cut(self, start: int, sizes: tuple[int, ...]) -> Tensors:
        queries, rows = sizes
        here, g = slice(start, start + queries), torch.Generator(self.device).manual_seed(start)
        count = self._layout.num_blocks if self.spec.selection == "pages" else self._layout.num_slots
        selected = self._select(torch.arange(count), self._layout, queries, rows, g)
        return self._q[here], self._cache, self._out[here], *selected, *self._others(queries, g)


@dataclasses.dataclass
class PartedTrial(Trial):
    """A trial that writes into several tensors of one allocation.

    Attributes:
        parts: The bytes of each of them, guards included.
    """

    parts: Mapping[str, slice]


class CompressCalls(Operation):
    """Compressions: every bit of the latents and every byte of the rings are the oracle's (any NaN equals any other).

    A call writes the rings that it reads: those of trials are drawn anew for each run, those of timed calls may hold
    anything.
    """

    spec: CompressSpec | CompressStoreSpec
    seeds = tuple(range(len(STANDINGS)))

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.rings: PageLayout = spec.ring_layout if isinstance(spec, CompressStoreSpec) else spec.layout
        self.pooled = spec.compress_ratio == 2

    def draw(self, sizes: tuple[int, ...], seed: int) -> Trial:
        (tokens,) = sizes
        g, standing = torch.Generator().manual_seed(seed), STANDINGS[seed]
        lengths = self._chunks(tokens)
        spec = self._private(tokens, len(lengths) + _SPARE_BLOCKS)
        whole, tensors, parts = _together(self._written(spec, tokens, standing))
        whole.fill_(_POISON)
        packed = self._draw_packed(tensors.get("rings"), lengths, standing, g)
        arguments = packed, *self._draw_others(spec, tensors, tokens, standing, g)
        before = whole.clone()
        run_oracle(spec, arguments)
        return PartedTrial(spec, arguments, whole, before, whole.clone(), parts)

    def _chunks(self, tokens: int) -> torch.Tensor:
        """How many tokens each request has: one, a ring's and more, and what lies between."""
        ring = 4 * self.rings.block_size * self.rings.value_stride
        most = max(1, _MOST_RING_BYTES // max(ring, 1))
        lengths: list[int] = []
        for length in itertools.cycle((1, 2, 3, self.rings.block_size + 2, 5, 4, 7)):
            left = tokens - sum(lengths)
            lengths.append(left if len(lengths) == most - 1 else min(length, left))
            if left == lengths[-1]:
                break
        return torch.tensor(lengths)

    def _private(self, tokens: int, rings: int, spare: int = _SPARE_BLOCKS) -> Any:
        """The spec of a call on private tensors: with so many rings, one after another."""
        return dataclasses.replace(self.spec, layout=self._private_rings(rings))

    def _private_rings(self, rings: int) -> PageLayout:
        if not self.pooled:
            return self.rings
        stride = self.rings.block_size * self.rings.value_stride
        return dataclasses.replace(self.rings, num_blocks=rings, block_stride=stride)

    def _written(self, spec: Any, tokens: int, standing: Standing) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The allocations that a call writes into, and the tensors in them."""
        found = {}
        if not isinstance(spec, CompressStoreSpec) or spec.latents:
            offset = standing.offset(standing.row_bytes, torch.bfloat16)
            pitch = standing.pitch(COMPRESS_DIM)
            found["latents"] = _guarded((tokens, COMPRESS_DIM), pitch, torch.bfloat16, offset, self.device)
        if self.pooled:
            rings = spec.ring_layout if isinstance(spec, CompressStoreSpec) else spec.layout
            offset = standing.offset(standing.row_bytes, torch.float32)
            whole, rows = _guarded((rings.num_slots, RING_DIM), rings.value_stride, torch.float32, offset, self.device)
            found["rings"] = whole, rows.unflatten(0, (rings.num_blocks, rings.block_size))
        return found

    def _draw_packed(
        self, ring: torch.Tensor | None, lengths: torch.Tensor, standing: Standing, g: torch.Generator
    ) -> Packed:
        requests, tokens = lengths.shape[0], int(lengths.sum())
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        request = torch.arange(requests).repeat_interleave(lengths)
        first = torch.randint(_RUN - 4, (requests,), generator=g)
        first[::3] |= 1  # so that rings are read
        first[4::7] = -2
        if tokens == 1:
            first[:] = 5
        positions = first[request] + torch.arange(tokens) - starts[request]
        slots = torch.arange(tokens)
        if ring is not None:
            blocks, capacity, _ = ring.shape
            ring.copy_(_scored_rows(blocks * capacity, RING_DIM, g).view_as(ring))
            slots = torch.randperm(blocks, generator=g)[request] * capacity + positions % capacity
            slots[11::16] = blocks * capacity + torch.arange(len(slots[11::16])) * 7
        slots[3::16] = -1
        request[13::32] = requests
        rows, weight = self._rows_at(tokens, standing, g), (1 + 0.2 * torch.randn(COMPRESS_DIM, generator=g)).bfloat16()
        offset = standing.offset(standing.row_bytes, weight.dtype)
        packed = Packed(
            rows, standing.index(positions, self.device), standing.index(slots, self.device), None, None, None, None,
            None, standing._place(weight, self.device, offset, 1), 1e-6,
        )  # fmt: skip
        if ring is None:
            return packed
        packed = packed._replace(
            query_start=standing.index(starts, self.device), token_to_request=standing.index(request, self.device),
            ring=ring,
        )  # fmt: skip
        if self.spec.previous:
            count = max(1, requests // 2)
            index = torch.randint(-1, count + 1, (requests,), generator=g)
            packed = packed._replace(
                prev_rows=self._rows_at(count, standing, g), prev_row_indices=standing.index(index, self.device)
            )
        return packed

    def _rows_at(self, count: int, standing: Standing, g: torch.Generator) -> torch.Tensor:
        """Rows as a call takes them, apart by multiples of the elements that the contract says."""
        rows = _scored_rows(count, self.spec.compress_ratio * COMPRESS_DIM, g)
        pitch = rows.shape[1] + (ROW_STEP if standing.row_gap else 0)
        return standing._place(rows, self.device, standing.offset(standing.row_bytes, rows.dtype), pitch)

    def _draw_others(
        self, spec: Any, tensors: Mapping[str, torch.Tensor], tokens: int, standing: Standing, g: torch.Generator
    ) -> tuple[Any, ...]:
        """What follows the packed tokens in a trial."""
        return (tensors["latents"],)

    def difference(self, trial: Trial) -> str:
        assert isinstance(trial, PartedTrial)
        for name, part in trial.parts.items():
            have, want = trial.outcome()[part], trial.expected[part]
            latents = name == "latents"
            found = _different_values(have, want, torch.bfloat16) if latents else _different_bytes(have, want)
            if found:
                return f"{name}: {found}"
        return ""

    def call_bytes(self, sizes: tuple[int, ...]) -> int:
        (tokens,) = sizes
        ratio, chunk = self.spec.compress_ratio, -(-tokens // _REQUESTS)
        moved = tokens * 4 * COMPRESS_DIM * ratio + tokens * self._latent_bytes() // ratio
        if self.pooled and not self.spec.previous:
            moved += -(-tokens // chunk) * min(chunk, self.rings.block_size) * 4 * RING_DIM
        return moved

    def _latent_bytes(self) -> int:
        return 2 * COMPRESS_DIM

    def fill(self, tokens: int) -> Spec:
        g = torch.Generator(self.device).manual_seed(0)
        ring = 4 * self.rings.block_size * self.rings.value_stride
        rings = max(_REQUESTS, 2 * cache_bytes(self.device) // max(ring, 1))
        spec: Any = self._private(tokens, rings, spare=0)
        written = {name: tensor for name, (_, tensor) in self._written(spec, tokens, Standing()).items()}
        self._ring, self._latents = written.get("rings"), written.get("latents")
        if self._ring is not None:
            self._ring.normal_(generator=g)
        width = self.spec.compress_ratio * COMPRESS_DIM
        self._rows = torch.randn(tokens, width, device=self.device, generator=g)
        self._weight = torch.ones(COMPRESS_DIM, dtype=torch.bfloat16, device=self.device)
        self._previous = torch.randn(_REQUESTS, RING_DIM, device=self.device, generator=g)
        self._fill_others(spec, tokens, written, g)
        return typing.cast(Spec, spec)

    def _fill_others(self, spec: Any, tokens: int, written: Mapping[str, torch.Tensor], g: torch.Generator) -> None:
        """Draw what :meth:`_cut_others` cuts from."""

    def cut(self, start: int, sizes: tuple[int, ...]) -> Tensors:
        (tokens,) = sizes
        here, g = slice(start, start + tokens), torch.Generator(self.device).manual_seed(start)
        chunk = -(-tokens // _REQUESTS)
        requests = -(-tokens // chunk)
        token = torch.arange(tokens, device=self.device)
        request = token // chunk
        positions = torch.randint(_MAX_POSITION, (requests,), device=self.device, generator=g)[request] + token % chunk
        packed = Packed(self._rows[here], positions, token, None, None, None, None, None, self._weight, 1e-6)
        if self._ring is not None:
            blocks, capacity, _ = self._ring.shape
            first = start // _SET_STEP * _REQUESTS % (blocks - requests + 1)
            starts = torch.arange(requests + 1, device=self.device).mul_(chunk).clamp_(max=tokens)
            packed = packed._replace(
                slots=(first + request) * capacity + positions % capacity, query_start=starts,
                token_to_request=request, ring=self._ring,
            )  # fmt: skip
        if self.spec.previous:
            packed = packed._replace(prev_rows=self._previous, prev_row_indices=starts[:-1] // chunk)
        latents = None if self._latents is None else self._latents[here]
        found: Any = packed, *self._cut_others(start, tokens, latents)
        return typing.cast(Tensors, found)

    def _cut_others(self, start: int, tokens: int, latents: torch.Tensor | None) -> tuple[Any, ...]:
        """What follows the packed tokens in a timed call."""
        return (latents,)


class CompressStoreCalls(CompressCalls):
    """Compressions into a cache: so is every byte of the cache's allocation."""

    spec: CompressStoreSpec

    def _private(self, tokens: int, rings: int, spare: int = _SPARE_BLOCKS) -> Any:
        layout = private_layout(self.spec, tokens, spare=spare)
        return dataclasses.replace(self.spec, layout=layout, ring_layout=self._private_rings(rings))

    def _written(self, spec: Any, tokens: int, standing: Standing) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return super()._written(spec, tokens, standing) | {"cache": allocate(spec, spec.layout, standing.cache_bytes)}

    def _draw_others(
        self, spec: Any, tensors: Mapping[str, torch.Tensor], tokens: int, standing: Standing, g: torch.Generator
    ) -> tuple[Any, ...]:
        slots = page_order(tokens, spec.layout, g)
        slots[5::16] = -1
        slots[9::16] = spec.layout.num_slots + torch.arange(len(slots[9::16])) * 7
        table = standing.rows(_table(_RUN, g), self.device) if spec.rotate else None
        scale = _on(self.device, _scale(spec.scaled))
        return tensors["cache"], standing.index(slots, self.device), table, scale, tensors.get("latents")

    def _latent_bytes(self) -> int:
        return _slot_bytes(self.spec) + (super()._latent_bytes() if self.spec.latents else 0)

    def _fill_others(self, spec: Any, tokens: int, written: Mapping[str, torch.Tensor], g: torch.Generator) -> None:
        self._cache = written["cache"]
        self._slots = page_order(tokens, spec.layout, g)
        self._table = _table(_MAX_POSITION + -(-tokens // _REQUESTS), g) if spec.rotate else None
        self._scale = _on(self.device, _scale(spec.scaled))

    def _cut_others(self, start: int, tokens: int, latents: torch.Tensor | None) -> tuple[Any, ...]:
        here = torch.arange(start, start + tokens, device=self.device)
        slots = self._slots[here // self.spec.compress_ratio]  # one after another at the tokens that close groups
        return self._cache, slots, self._table, self._scale, latents


OPERATIONS: Mapping[str, type[Operation]] = MappingProxyType(
    {
        "store": StoreCalls,
        "load": LoadCalls,
        "attend": AttendCalls,
        "compress_norm": CompressCalls,
        "compress_store": CompressStoreCalls,
    }
)
"""The class that makes the calls of each operation. A new operation that is to be tuned needs one."""


def operation_of(spec: Spec) -> Operation:
    """What makes a kind of call.

    Raises:
        ValueError: The tuner does not know the operation.
    """
    if spec.operation not in OPERATIONS:
        raise ValueError(f"{spec.operation} cannot be tuned; these can: {', '.join(OPERATIONS)}")
    return OPERATIONS[spec.operation](spec)


def run_oracle(spec: Spec, tensors: Tensors) -> None:
    """Make a call on the oracle, on the device of its tensors."""
    operations = dispatch.get_backend(ORACLE).load()
    getattr(operations, spec.operation)(spec, *(_on(spec.device, tensor) for tensor in tensors))


# Memory.


def _few() -> int:
    """Tokens of a check's main call."""
    return _FEW_INTERPRETED if settings.triton_interpret() else _FEW_HUNDRED


def cache_bytes(device: torch.device) -> int:
    """What calls must move so that none finds its data in the last cache: a GPU's L2, a part of a CPU's."""
    if device.type == "cpu":
        return _CPU_CACHE
    return devices.describe(device).l2_bytes or _UNKNOWN_L2


def spare_memory(device: torch.device) -> int:
    """Bytes that the tuner's tensors may take: half of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 2048 * MIB


def private_layout(spec: Spec, tokens: int, *, spare: int = _SPARE_BLOCKS) -> PageLayout:
    """A spec's layout with as many pages as so many tokens take.

    Pages that stand far apart (views of a large pool) are moved together where memory would not do, without a change of
    what kernels see of the distance: its alignment.

    Raises:
        TooLarge: One page takes more memory than there is to spare.
    """
    layout, size = spec.layout, spec.format.cache_dtype.itemsize
    blocks = -(-tokens // layout.block_size) + spare
    most = spare_memory(spec.device) // size
    if blocks * layout.block_stride <= most:
        return dataclasses.replace(layout, num_blocks=blocks)
    page = _page_elements(spec)
    stride = page + (layout.block_stride - page) % 16
    if blocks * stride > most:
        raise TooLarge(f"{blocks} pages take {blocks * stride * size >> 20} MiB, {most * size >> 20} MiB are to spare")
    return dataclasses.replace(layout, num_blocks=blocks, block_stride=min(stride, layout.block_stride))


def allocate(spec: Spec, layout: PageLayout, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of an allocation, and the cache in it: guards before and behind, and between pages that stand apart.

    Args:
        spec: The kind of call.
        layout: The cache's.
        offset: Bytes by which the cache is not aligned, at least one element.
    """
    dtype = spec.format.cache_dtype
    size, width = dtype.itemsize, spec.format.record_width(spec.latent_dim)
    pages = (layout.num_blocks - 1) * layout.block_stride + max(_page_elements(spec), layout.block_stride)
    whole = torch.zeros(pages * size + 2 * _GUARD, dtype=torch.uint8, device=spec.device)
    row = width if spec.format.placement is Placement.PAGE else layout.value_stride
    shape = (layout.num_blocks, layout.block_size, width)
    first = _GUARD // size + Standing.offset(offset, dtype)
    cache = whole.view(dtype).as_strided(shape, (layout.block_stride, row, 1), first)
    return whole, cache


def _guarded(
    shape: tuple[int, int], pitch: int, dtype: torch.dtype, offset: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of an allocation, and rows in it that stand ``pitch`` elements apart: guards before and behind.

    Args:
        offset: Elements by which the first row is not aligned.
    """
    size = dtype.itemsize
    first = _GUARD // size + offset
    whole = torch.full(((first + shape[0] * pitch) * size + _GUARD,), _POISON, dtype=torch.uint8, device=device)
    return whole, whole.view(dtype).as_strided(shape, (pitch, 1), first)


def _together(
    written: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, slice]]:
    """One allocation in the place of several: all its bytes, the tensors in it, and the bytes of each."""
    sizes = [-(-whole.shape[0] // _GUARD) * _GUARD for whole, _ in written.values()]
    ends = list(itertools.accumulate(sizes))
    (device,) = {whole.device for whole, _ in written.values()}
    memory = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
    tensors, parts = {}, {}
    for (name, (_, tensor)), size, end in zip(written.items(), sizes, ends, strict=True):
        first = (end - size) // tensor.element_size() + tensor.storage_offset()
        tensors[name] = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), first)
        parts[name] = slice(end - size, end)
    return memory, tensors, parts


def _page_elements(spec: Spec) -> int:
    """Elements from a page's first to its last, both included."""
    width = spec.format.record_width(spec.latent_dim)
    if spec.format.placement is Placement.PAGE:
        return spec.layout.block_size * width
    return (spec.layout.block_size - 1) * spec.layout.value_stride + width


def _slot_bytes(spec: Spec) -> int:
    """Bytes of memory that one slot of a cache takes, or that it would at least."""
    return spec.format.record_bytes(spec.latent_dim)


# Inputs.


def page_order(tokens: int, layout: PageLayout, g: torch.Generator) -> torch.Tensor:
    """Slots of that many tokens, each once: pages in random order, tokens one after another inside a page."""
    run = layout.block_size if layout.block_size > 1 else _RUN
    runs = -(-layout.num_slots // run)
    starts = torch.randperm(runs, device=g.device, generator=g) * run
    slots = (starts[:, None] + torch.arange(run, device=g.device)).flatten()
    return slots[slots < layout.num_slots][:tokens].contiguous()


def messy_rows(tokens: int, dim: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Rows whose runs of 16 values differ wildly: any magnitude, ties, zeros of both signs, what is not finite."""
    runs = torch.randn(tokens, dim // 16 + 1, 16, generator=g, dtype=torch.float64)
    low, high = (-24, 15) if dtype == torch.float16 else (-140, 126)
    far = torch.randint(low, high, runs.shape[:2], generator=g)
    near = torch.randint(-9, 10, runs.shape[:2], generator=g)
    power = 2.0 ** torch.where(torch.rand(runs.shape[:2], generator=g) < 0.3, far, near).double()[..., None]
    tied = torch.randint(-24, 25, runs.shape, generator=g) / 4
    runs = torch.where(torch.rand(runs.shape, generator=g) < 0.2, tied, runs) * power
    kind = torch.rand(runs.shape, generator=g)
    runs[kind < 0.04] = 0.0
    runs[kind < 0.02] = -0.0
    runs[torch.rand(runs.shape[:2], generator=g) < 0.06] = 0.0
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"), 2.5e38, -3.3e38)):
        runs[(kind > 0.5 + i * 5e-4) & (kind < 0.5 + (i + 1) * 5e-4)] = value
    return runs.flatten(1)[:, :dim].to(torch.float32).to(dtype).contiguous()


def _scored_rows(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    """Values of several magnitudes, then scores, if rows are so wide, of which some decide alone; a few not finite."""
    found = torch.randn(rows, width, generator=g)
    found[:, :COMPRESS_DIM] *= 2.0 ** torch.randint(-6, 7, (rows, 1), generator=g)
    found[:, COMPRESS_DIM:] *= 3 ** torch.randint(0, 4, (rows, 1), generator=g)
    found[7::29, :COMPRESS_DIM] = 0.0
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        found[(12 + 5 * i) :: 37, 31 * i :: 311] = value
    return found


def _table(rows: int, g: torch.Generator) -> torch.Tensor:
    angle = torch.rand(rows, ROPE_DIM // 2, device=g.device, generator=g) * (2 * math.pi)
    return torch.cat((angle.cos(), angle.sin()), -1)


def _positions(tokens: int, g: torch.Generator) -> torch.Tensor:
    """Positions as sequences have them: runs that start anywhere."""
    starts = torch.randint(_MAX_POSITION // _RUN, (-(-tokens // _RUN),), device=g.device, generator=g) * _RUN
    return (starts[:, None] + torch.arange(_RUN, device=g.device)).flatten()[:tokens].contiguous()


def _scale(scaled: bool) -> torch.Tensor | None:
    return torch.full((1,), 0.37) if scaled else None


def _on(device: torch.device, argument: Any) -> Any:
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


# Comparisons.


def _trial(spec: Spec, whole: torch.Tensor, cache: torch.Tensor, arguments: Tensors) -> Trial:
    """A trial whose expected bytes the oracle has written."""
    tensors = (cache, *(_on(spec.device, tensor) for tensor in arguments))
    before = whole.clone()
    run_oracle(spec, tensors)
    expected = whole.clone()
    return Trial(spec, tensors, whole, before, expected)


def _different_values(have: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> str:
    """As :func:`_different_bytes`, of values between guards: any NaN equals any other."""
    if torch.equal(have, want):
        return ""
    inside = slice(_GUARD, -_GUARD)
    merged, wanted = have.clone(), want[inside].view(dtype)
    values = merged[inside].view(dtype)
    values.copy_(torch.where(values.isnan() & wanted.isnan(), wanted, values))
    return _different_bytes(merged, want)


def _different_bytes(have: torch.Tensor, want: torch.Tensor) -> str:
    if torch.equal(have, want):
        return ""
    wrong = (have != want).nonzero().flatten()
    first = int(wrong[0])
    where = "of the guards" if first < _GUARD or first >= want.shape[0] - _GUARD else f"at byte {first - _GUARD}"
    return (
        f"wrong bytes: {wrong.shape[0]} of {want.shape[0]} differ from the oracle's, the first {where}: "
        f"expected {int(want[first]):#04x}, got {int(have[first]):#04x}"
    )
