"""Small calls of every operation and format on a GPU, compared with the oracle: for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.triton.small_run [FORMAT]...

Without PyTorch's memory caching each tensor is an allocation of its own, so an access past its end is seen.
"""

from __future__ import annotations

import sys

import torch

import mxkv
from tests.compression_cases import DIM, RING_DIM, packed
from tests.support import Ops


def attends(format: mxkv.Format, dim: int, rows: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether attention over a table of exact length, with blocks that do not exist, is close to the oracle's."""
    g = torch.Generator().manual_seed(1)
    q = torch.randn(3, 5, dim, generator=g).bfloat16()
    table, lengths = torch.tensor([[5, -1], [0, 6], [2, 1]]), torch.tensor([16, 9, 13])
    outs = []
    for device, backend in (("cpu", "torch"), ("cuda", "triton")):
        cache = mxkv.empty_cache(format, 6, 8, dim, device)
        mxkv.store(cache, rows.to(device), slots.to(device), format=format, backend=backend)
        for splits in (1, 2):
            out = mxkv.attend(
                q.to(device), cache, block_table=table.to(device), seq_lens=lengths.to(device), format=format,
                num_splits=splits, backend=backend,
            )  # fmt: skip
            outs.append(out.float().cpu())
    return all(torch.allclose(out, outs[0], atol=0.03, rtol=0.03) for out in outs[1:])


def compresses(format: mxkv.Format) -> bool:
    """Whether chunks that begin and end anywhere, of slots that partly do not exist, give the oracle's bytes."""
    call = packed([(0, 5), (3, 4), (6, 1), (1, 3)], 2)
    call.slots[[1, 7, 9]] = torch.tensor([-1, 1 << 40, -1])
    written = []
    for device, backend in (("cpu", "torch"), ("cuda", "triton")):
        ops = Ops(backend, torch.device(device))
        given, cache = call.arguments(ops), mxkv.empty_cache(format, 3, 4, DIM, device)
        out = torch.zeros(call.tokens, DIM, dtype=torch.bfloat16, device=device)
        slots = torch.arange(call.tokens, device=device) + 1
        mxkv.compress_store(**given, cache=cache, cache_slots=slots, out=out, format=format, backend=backend)
        saved = torch.zeros(call.tokens, 1, RING_DIM, device=device)
        mxkv.save_ring_rows(given["kv_score"], slots - 2, saved, backend=backend)  # each slot once, one of them none
        written.append([tensor.view(torch.uint8).cpu() for tensor in (cache, out, given["state_cache"], saved)])
    return all(torch.equal(*pair) for pair in zip(*written, strict=True))


def kv_equal(format: mxkv.KVFormat, dim: int, dtype: torch.dtype) -> bool:
    """Whether keys and values are stored and loaded as the oracle's, and attention, causal too, is close to its."""
    g = torch.Generator().manual_seed(2)
    key, value = (torch.randn(37, 2, dim, generator=g).to(dtype) for _ in range(2))
    slots = torch.randperm(48, generator=g)[:37]
    slots[3], slots[5], slots[7] = -1, 48, 2**31
    q = torch.randn(6, 6, dim, generator=g).bfloat16()
    table, lengths = torch.tensor([[5, -1], [0, 6]]), torch.tensor([16, 9])
    loaded, outs = [], []
    for device, backend in (("cpu", "torch"), ("cuda", "triton")):
        cache = mxkv.empty_kv_cache(format, 6, 8, 2, dim, device)
        given = key.to(device), value.to(device), slots.to(device)
        mxkv.store_kv(cache, *given, format=format, backend=backend)
        loaded += [x.float().cpu() for x in mxkv.load_kv(cache, given[2], format=format, head_dim=dim, backend=backend)]
        pages = table.to(device), lengths.to(device)
        outs.append(mxkv.attend_kv(q[:2].to(device), cache, *pages, format=format, num_splits=2, backend=backend))
        starts = torch.tensor([0, 4, 5], device=device)
        outs.append(mxkv.attend_kv(q.to(device), cache, *pages, format=format, query_start=starts, backend=backend))
    outs = [out.float().cpu() for out in outs]
    close = all(torch.allclose(*pair, atol=0.03, rtol=0.03) for pair in (outs[::2], outs[1::2]))
    return close and torch.equal(loaded[1], loaded[3]) and torch.allclose(loaded[0], loaded[2], atol=0.2)


def main() -> int:
    wrong = []
    g = torch.Generator().manual_seed(0)
    names = sys.argv[1:] or [*mxkv.FORMATS, *mxkv.KV_FORMATS]
    for format in (format for name, format in mxkv.FORMATS.items() if name in names):
        for dim, dtype in ((512, torch.bfloat16), (96, torch.bfloat16), (576, torch.float32), (320, torch.float16)):
            if not format.accepts_dim(dim):
                continue
            tokens, block_size = 37, 8
            rows = torch.randn(tokens, dim, generator=g).to(dtype)
            slots = torch.randperm(48, generator=g)[:tokens]
            slots[3], slots[5], slots[7] = -1, 48, 2**31
            positions = torch.randint(-2, 70, (tokens,), generator=g)
            table = torch.randn(64, 64, generator=g)
            caches, loaded = [], []
            for device, backend in (("cpu", "torch"), ("cuda", "triton")):
                cache = mxkv.empty_cache(format, 6, block_size, dim, device)
                mxkv.store(
                    cache, rows.to(device), slots.to(device), format=format, positions=positions.to(device),
                    cos_sin=table.to(device), backend=backend,
                )  # fmt: skip
                out = mxkv.load(cache, slots.to(device), format=format, latent_dim=dim, backend=backend)
                caches.append(cache.view(torch.uint8).cpu())
                loaded.append(out.view(torch.int16).cpu())
            same = torch.equal(*caches) and torch.equal(*loaded) and attends(format, dim, rows, slots)
            same = same and (dim != DIM or compresses(format))
            print(f"{format.name} {dim} {dtype}: {'equal' if same else 'DIFFERENT'}", flush=True)
            if not same:
                wrong.append((format.name, dim, dtype))
    for kv_format in (format for name, format in mxkv.KV_FORMATS.items() if name in names):
        for dim, dtype in ((128, torch.bfloat16), (80, torch.float16), (32, torch.float32)):
            same = kv_equal(kv_format, dim, dtype)
            print(f"{kv_format.name} {dim} {dtype}: {'equal' if same else 'DIFFERENT'}", flush=True)
            if not same:
                wrong.append((kv_format.name, dim, dtype))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
