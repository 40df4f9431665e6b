"""A small store, load, attention and compression of every format on a GPU, against the oracle: for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.triton.small_run

Without PyTorch's memory caching each tensor is an allocation of its own, so an access past its end is seen.
"""

from __future__ import annotations

import sys

import torch

import mxkv
from tests.compression_cases import DIM, packed
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
        mxkv.save_ring_rows(given["kv_score"], given["slots"], given["state_cache"], backend=backend)
        written.append([tensor.view(torch.uint8).cpu() for tensor in (cache, out, given["state_cache"])])
    return all(torch.equal(*pair) for pair in zip(*written, strict=True))


def main() -> int:
    wrong = []
    g = torch.Generator().manual_seed(0)
    for format in mxkv.FORMATS.values():
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
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
