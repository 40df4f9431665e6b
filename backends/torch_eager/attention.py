"""Attention over latent rows, in the order in which the specification says it.

Rows are read as a load reads them, to bf16 (or to fp32, where a scale for the whole tensor is no power of two), and
everything else is fp32. Queries, and each query's rows, are taken in chunks, so that a prefill's temporaries stay
small; on a GPU the number of rows is read back, so that these calls cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mxkv import devices, numerics
from mxkv.autotune_cache.choice import Choice
from mxkv.autotune_cache.sources import source_hash
from mxkv.backends.torch_eager import latents
from mxkv.backends.torch_eager.latents import NAME, ChunkConfig
from mxkv.contracts import AttendSpec, LoadSpec, Tunable

_DEFAULT = ChunkConfig(1 << 22)  # dequantized rows of so many values at a time
_MOST_ROWS = 4096  # of one query at a time


def tunable(spec: AttendSpec) -> Tunable:
    """The chunk sizes of one kind of call."""
    return Tunable(
        ChunkConfig,
        tuple(ChunkConfig(1 << bits) for bits in range(18, 26)),
        lambda queries, rows: _DEFAULT,
        sizes=("queries", "rows"),
        target=devices.target_of(spec.device).name,
        source=source_hash(f"{__name__}:attend", within=(__package__, numerics.__name__)),
        compiler=f"torch {torch.__version__}",
    )


@functools.lru_cache(maxsize=1024)
def prepare(spec: AttendSpec) -> Callable[..., None]:
    """What runs one kind of call."""
    choose = Choice(spec, NAME, tunable(spec))

    def call(
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        rows: torch.Tensor,
        *others: torch.Tensor | float | None,
        config: ChunkConfig | None = None,
    ) -> None:
        each = rows.shape[0] // q.shape[0] if spec.selection == "ragged" else rows.shape[1]
        config = config or choose(q.shape[0], each * (spec.layout.block_size if spec.selection == "pages" else 1))
        attend(spec, q, cache, out, rows, *others, config=config)

    return call


@latents.never_compiled
def attend(
    spec: AttendSpec,
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor | None,
    cache_scale: torch.Tensor | None,
    sink: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scale: float,
    num_splits: int | None,
    config: ChunkConfig = _DEFAULT,
) -> None:
    """Attend to selected rows of a cache. See :func:`mxkv.attend`; the result has no splits and needs no workspace."""
    q, sink = q.detach(), None if sink is None else sink.detach()
    cache_scale = None if cache_scale is None else cache_scale.detach()
    first, count = _bounds(spec, rows, bounds, q.shape[0])
    longest = int(count.max())
    width = max(1, min(longest, _MOST_ROWS))
    queries = max(1, config.chunk_elements // (width * spec.latent_dim))
    for begin in range(0, q.shape[0], queries):
        here = slice(begin, begin + queries)
        heads = q[here].to(torch.float32)  # [chunk, heads, latent_dim]
        top = heads.new_full(heads.shape[:2], -torch.inf)  # the largest logit
        total = torch.zeros_like(top)  # of the exponentials
        summed = heads.new_zeros((*heads.shape[:2], spec.value_dim))
        for start in range(0, longest, width):
            slots = _slots(spec, rows, bounds, first, count, here, torch.arange(start, start + width, device=q.device))
            known = (slots >= 0) & (slots < spec.layout.num_slots)  # [chunk, width]
            keys = _read(spec, cache, torch.where(known, slots, -1), cache_scale)  # [chunk, width, latent_dim]
            logits = (heads @ keys.transpose(1, 2) * scale).masked_fill(~known[:, None], -torch.inf)
            raised = torch.maximum(top, logits.amax(-1))
            shift = torch.where(raised == -torch.inf, 0.0, raised)  # no row yet: -inf less -inf is NaN
            weights = (logits - shift[..., None]).exp()
            shrink = (top - shift).exp()
            total = total * shrink + weights.sum(-1)
            summed = summed * shrink[..., None] + weights @ keys[..., : spec.value_dim]
            top = raised
        shift = torch.where(top == -torch.inf, 0.0, top)
        if lse is not None:
            lse[here] = shift + total.log()
        if sink is not None:
            # Where the sink is the larger, it is what the exponentials are taken relative to.
            larger = torch.maximum(shift, sink)
            summed = summed * (shift - larger).exp()[..., None]
            divisor = total * (shift - larger).exp() + (sink - larger).exp()
        else:
            divisor = total
        empty = (top == -torch.inf)[..., None]
        out[here] = torch.where(empty, 0.0, summed / divisor[..., None]).to(out.dtype)


def _bounds(
    spec: AttendSpec, rows: torch.Tensor, bounds: torch.Tensor | None, queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each query's rows begin, and how many it has, inside of what ``rows`` holds."""
    if bounds is None:
        first = torch.zeros(queries, dtype=torch.int64, device=rows.device)
        return first, torch.full_like(first, rows.shape[1])
    bounds = bounds.long()
    if spec.selection == "ragged":
        bounds = bounds.clamp(0, rows.shape[0])
        return bounds[:-1], (bounds[1:] - bounds[:-1]).clamp(min=0)
    return torch.zeros_like(bounds), bounds.clamp(0, rows.shape[1] * spec.layout.block_size)


def _slots(
    spec: AttendSpec,
    rows: torch.Tensor,
    bounds: torch.Tensor | None,
    first: torch.Tensor,
    count: torch.Tensor,
    here: slice,
    at: torch.Tensor,
) -> torch.Tensor:
    """The slots of some queries' rows ``at`` [width]: int64 [chunk, width], -1 where a query has no such row."""
    exists = at < count[here, None]
    at = torch.where(exists, at, 0)
    if not rows.numel():
        return torch.full_like(at, -1)
    if spec.selection == "ragged":
        slots = rows[torch.where(exists, first[here, None] + at, 0)].long()
    elif spec.selection == "dense":
        slots = rows[here].gather(1, at).long()
    else:
        block_size = spec.layout.block_size
        blocks = rows[here].gather(1, at // block_size).long()
        known = (blocks >= 0) & (blocks < spec.layout.num_blocks)
        slots = torch.where(known, blocks * block_size + at % block_size, -1)
    return torch.where(exists, slots, -1)


def _read(spec: AttendSpec, cache: torch.Tensor, slots: torch.Tensor, cache_scale: torch.Tensor | None) -> torch.Tensor:
    """The rows of slots [chunk, width] as fp32; zeros where there is none."""
    dtype = torch.bfloat16 if spec.format.grouped else torch.float32  # bf16 holds every product of a code and a scale
    keys = torch.empty((*slots.shape, spec.latent_dim), dtype=dtype, device=cache.device)
    reading = LoadSpec(spec.device, spec.format, spec.latent_dim, dtype, spec.layout, spec.scaled)
    latents.load(reading, cache, slots.flatten(), keys.flatten(0, 1), cache_scale)
    return keys.to(torch.float32)
