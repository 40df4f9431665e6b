"""Small attentions of the Numba backend on a GPU, compared with the torch backend's: for compute-sanitizer's racecheck.

    compute-sanitizer --tool racecheck python -m tests.numba_gpu.small_run [FORMAT]...

Threads of a block share a tile of rows, logits and weights: what keeps their accesses apart are barriers, and neither
Numba's simulator nor a right result shows that one is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import mxkv
from mxkv import checks
from mxkv.backends.numba_cuda import attention

DEVICE = "cuda"
MOST_ERROR = 2.0**-6
ROWS, BLOCK_SIZE, MOST = 512, 64, 300  # MOST: rows of a query


def error_of(have: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float(((have.float() - want.float()).abs().max() / want.float().abs().max()).nan_to_num(torch.inf))


def attends(name: str) -> Iterator[tuple[str, float]]:
    """Attention over latent rows, in one split and in several: which, and its error."""
    g = torch.Generator(DEVICE).manual_seed(0)
    seen: set[tuple[Any, ...]] = set()
    for dim, heads in ((512, 16), (512, 40), (96, 3)):
        if not mxkv.FORMATS[name].accepts_dim(dim):
            continue
        cache = mxkv.empty_cache(name, ROWS // BLOCK_SIZE, BLOCK_SIZE, dim, DEVICE)
        scale = torch.full((1,), 0.02, device=DEVICE) if mxkv.FORMATS[name].scale is mxkv.Scale.TENSOR else None
        rows = torch.randn(ROWS, dim, device=DEVICE, generator=g)
        given = {"format": name, "cache_scale": scale}
        mxkv.store(cache, rows, torch.arange(ROWS, device=DEVICE), **given, backend="torch")
        q = torch.randn(3, heads, dim, device=DEVICE, generator=g).bfloat16()
        indices = torch.randint(-20, ROWS + 20, (3, MOST), device=DEVICE, generator=g)
        indices[0] %= ROWS
        want, out = mxkv.attend(q, cache, indices=indices, **given, backend="torch"), torch.empty_like(q)
        spec = checks.attend_spec(q, cache, out, indices, None, None, None, name, scale, None, None, None, None)
        first, *others = attention.tunable(spec).space
        for config in (first, *others):  # compiling takes seconds: of launches that are much alike, one
            kind = config.threads, config.block_rows, config.ahead, config.tile_heads
            if config is not first and kind in seen:
                continue
            seen.add(kind)
            for splits in (1, 3) if config is first else (3,):
                out.fill_(torch.nan)
                attention.prepare(spec)(
                    q, cache, out, indices, None, scale, None, None, None, dim**-0.5, splits, config=config
                )
                yield f"{name} {dim} heads={heads} splits={splits} {config}", error_of(out, want)


def attends_kv(name: str) -> Iterator[tuple[str, float]]:
    """Attention over pages of keys and values."""
    g = torch.Generator(DEVICE).manual_seed(0)
    for dim, heads, group in ((128, 2, 4), (80, 1, 16)):
        cache = mxkv.empty_kv_cache(name, 8, 16, heads, dim, DEVICE)
        key, value = (torch.randn(128, heads, dim, device=DEVICE, generator=g).bfloat16() for _ in range(2))
        mxkv.store_kv(cache, key, value, torch.arange(128, device=DEVICE), format=name, backend="torch")
        q = torch.randn(2, heads * group, dim, device=DEVICE, generator=g).bfloat16()
        table = torch.tensor([[0, 3, 2, 5], [7, 1, 4, 6]], device=DEVICE)
        pages = cache, table, torch.tensor([61, 40], device=DEVICE)
        want = mxkv.attend_kv(q, *pages, format=name, backend="torch")
        for splits in (1, 2):
            out = mxkv.attend_kv(q, *pages, format=name, backend="numba", num_splits=splits)
            yield f"{name} {dim} heads={heads} group={group} splits={splits}", error_of(out, want)


def main() -> int:
    names = sys.argv[1:] or [*mxkv.FORMATS, *mxkv.KV_FORMATS]
    wrong = 0
    for name in names:
        for what, error in attends(name) if name in mxkv.FORMATS else attends_kv(name):
            right = error <= MOST_ERROR
            wrong += not right
            print(f"{what}: {'close' if right else 'WRONG'} ({error:.1e})", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
