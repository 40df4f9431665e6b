"""Keys and values on a GPU: graphs, no synchronisation, no allocation, devices, many tokens, far addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mxkv
from mxkv import kv_checks
from mxkv.backends.triton_gpu import kv
from tests.triton.test_gpu import no_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = list(mxkv.KV_FORMATS)
HEADS, DIM, BLOCK_SIZE = 4, 128, 32


def rows(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(tokens, HEADS, DIM, device="cuda", generator=g).to(dtype) for _ in range(2)]


def full_cache(name: str, blocks: int = 16, backend: str = "triton") -> torch.Tensor:
    cache = mxkv.empty_kv_cache(name, blocks, BLOCK_SIZE, HEADS, DIM, "cuda")
    slots = torch.arange(blocks * BLOCK_SIZE, device="cuda")
    mxkv.store_kv(cache, *rows(len(slots)), slots, format=name, backend=backend)
    return cache


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_have_the_oracles_bytes(name: str) -> None:
    """All values and FP8 keys; of other keys, all but a few codes that fall on a midpoint, and norms' last bits.

    A norm is corrected by its row's codes: where one differs, so does it.
    """
    format = mxkv.KV_FORMATS[name]
    caches = [full_cache(name, 256, backend) for backend in ("torch", "triton")]
    got, want = (cache.view(torch.uint8).flatten(1).long() for cache in caches)
    data = BLOCK_SIZE * HEADS * (format.key_bytes(DIM) + format.value_bytes(DIM))
    codes = [x[:, :data].unflatten(1, (-1, format.key_bytes(DIM) + format.value_bytes(DIM))) for x in (got, want)]
    keys, values = (
        [x[..., part] for x in codes] for part in (slice(0, format.key_bytes(DIM)), slice(format.key_bytes(DIM), None))
    )
    assert torch.equal(*values)
    differ = keys[0] != keys[1]
    assert int(differ.sum()) <= (keys[0].numel() // 10**5 if format.normed else 0)
    numbers = [
        cache.flatten(1)[:, data:].contiguous().view(torch.int16).view(256, HEADS, -1, BLOCK_SIZE) for cache in caches
    ]
    assert torch.equal(*(n[:, :, -2:] for n in numbers))
    apart = (numbers[0].long() - numbers[1].long()).abs()
    same = ~differ.any(-1).view(256, BLOCK_SIZE, HEADS).permute(0, 2, 1)
    assert int((apart.amax(2) * same).max()) <= 1
    assert int((apart[:, :, 0] > 0).sum()) <= apart[:, :, 0].numel() // 10**3
    loaded = [
        mxkv.load_kv(caches[0], torch.arange(99, device="cuda"), format=name, head_dim=DIM, backend=b)
        for b in ("torch", "triton")
    ]
    assert all(torch.equal(x, y) for x, y in zip(*loaded, strict=True))


@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], NAMES[3]])
def test_no_configuration_changes_bytes(name: str) -> None:
    """What each launch configuration stores of 16-bit keys and values, more than all of its programs take at once."""
    key, value = rows(20_000)
    slots = torch.arange(len(key), device="cuda").flip(0)
    caches = []
    for config in (None, kv.KVConfig(8, 1, 4, 1), kv.KVConfig(16, 2, 4, 3), kv.KVConfig(16, 1, 4, 8)):
        cache = mxkv.empty_kv_cache(name, 625, BLOCK_SIZE, HEADS, DIM, "cuda")
        spec = kv_checks.store_kv_spec(cache, key, value, slots, name, None, None, "propagate")
        kv.prepare(spec)(cache, key, value, slots, None, None, config=config)
        caches.append(cache)
    assert all(torch.equal(cache, caches[0]) for cache in caches)


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_honours_what_changes_in_place(name: str, splits: int | None) -> None:
    cache = full_cache(name)
    key, value = rows(3, 1)
    slots = torch.tensor([5, 40, 130], device="cuda")
    q = torch.randn(3, 4 * HEADS, DIM, device="cuda").bfloat16()
    blocks = torch.arange(15, device="cuda", dtype=torch.int32).view(3, 5)
    lengths = torch.tensor([100, 1, 160], device="cuda", dtype=torch.int32)

    def run() -> torch.Tensor:
        mxkv.store_kv(cache, key, value, slots, format=name, backend="triton")
        return mxkv.attend_kv(q, cache, blocks, lengths, format=name, num_splits=splits, backend="triton")

    run()
    graph, out = captured(run)
    for seed in (2, 3):
        for tensor, fresh in zip((key, value), rows(3, seed), strict=True):
            tensor.copy_(fresh)
        slots.add_(1)
        lengths.copy_(torch.tensor([70 + seed, 5, 159], dtype=torch.int32))
        q.normal_()
        twin = cache.clone()
        graph.replay()
        mxkv.store_kv(twin, key, value, slots, format=name, backend="triton")
        want = mxkv.attend_kv(q, twin, blocks, lengths, format=name, num_splits=splits, backend="triton")
        assert torch.equal(cache, twin)
        assert torch.equal(out, want)
        oracle = mxkv.attend_kv(q, twin, blocks, lengths, format=name, backend="torch")
        assert torch.allclose(out.float(), oracle.float(), atol=0.03, rtol=0.03)


def test_a_shape_first_met_inside_a_capture() -> None:
    """Case 24."""
    cache = full_cache("turboquant-4bit-nc")
    q = torch.randn(2, 7 * HEADS, DIM, device="cuda").half()
    blocks = torch.arange(8, device="cuda").view(2, 4)
    lengths = torch.tensor([100, 128], device="cuda")
    graph, out = captured(lambda: mxkv.attend_kv(q, cache, blocks, lengths, format="turboquant-4bit-nc", window=50))
    graph.replay()
    want = mxkv.attend_kv(q, cache, blocks, lengths, format="turboquant-4bit-nc", window=50, backend="torch")
    assert torch.allclose(out.float(), want.float(), atol=0.03, rtol=0.03)


def test_nothing_waits_and_nothing_is_allocated() -> None:
    name = "turboquant-3bit-nc"
    cache = full_cache(name)
    key, value = rows(9)
    slots = torch.arange(9, device="cuda")
    q = torch.randn(3, 4 * HEADS, DIM, device="cuda").bfloat16()
    blocks = torch.arange(15, device="cuda", dtype=torch.int32).view(3, 5)
    lengths = torch.tensor([100, 1, 160], device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)
    needed = mxkv.attend_kv_workspace_bytes(q, cache, blocks, lengths, format=name, num_splits=4)
    workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")

    def run() -> None:
        mxkv.store_kv(cache, key, value, slots, format=name)
        mxkv.attend_kv(q, cache, blocks, lengths, format=name, out=out, workspace=workspace, num_splits=4)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("name", NAMES)
def test_prefill_is_the_oracles(name: str) -> None:
    cache = full_cache(name, 64)
    starts = torch.tensor([0, 300, 301, 400], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([320, 500, 99], device="cuda", dtype=torch.int32)
    blocks = torch.randperm(64, device="cuda")[:48].view(3, 16).int()
    q = torch.randn(410, 4 * HEADS, DIM, device="cuda").bfloat16()
    for window in (None, 77):
        options: dict[str, Any] = {"format": name, "query_start": starts, "window": window, "return_lse": True}
        out, lse = mxkv.attend_kv(q, cache, blocks, lengths, backend="triton", **options)
        want, logs = mxkv.attend_kv(q, cache, blocks, lengths, backend="torch", **options)
        assert torch.allclose(out.float(), want.float(), atol=0.03, rtol=0.03)
        assert torch.equal(lse.isinf(), logs.isinf())
        assert torch.allclose(lse.nan_to_num(0, 0, 0), logs.nan_to_num(0, 0, 0), atol=5e-3)


def test_a_pool_past_two_to_the_32_bytes() -> None:
    """Case 19: pages far apart."""
    format = mxkv.KV_FORMATS["turboquant-4bit-nc"]
    width, stride = format.slot_bytes(DIM), (1 << 21) + 64
    try:
        whole = torch.zeros(2100 * stride, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("not enough memory")
    shape, strides = (2100, BLOCK_SIZE, HEADS, width), (stride, HEADS * width, width, 1)
    cache = whole.as_strided(shape, strides)
    slots = torch.tensor([2066 * BLOCK_SIZE + 3, 2099 * BLOCK_SIZE + 31, 7], device="cuda")
    key, value = rows(3)
    mxkv.store_kv(cache, key, value, slots, format=format, backend="triton")
    near = mxkv.empty_kv_cache(format, 1, 3, HEADS, DIM, "cuda")
    mxkv.store_kv(near, key, value, torch.arange(3, device="cuda"), format=format, backend="triton")
    far = mxkv.load_kv(cache, slots, format=format, head_dim=DIM, backend="triton")
    here = mxkv.load_kv(near, torch.arange(3, device="cuda"), format=format, head_dim=DIM, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(far, here, strict=True))
    q = torch.randn(1, HEADS, DIM, device="cuda").bfloat16()
    blocks, lengths = torch.tensor([[2066]], device="cuda"), torch.tensor([4], device="cuda")
    out = mxkv.attend_kv(q, cache, blocks, lengths, format=format, backend="triton")
    want = mxkv.attend_kv(q, cache[2066:2067].clone(), blocks * 0, lengths, format=format, backend="triton")
    assert torch.equal(out, want)


def test_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cache = full_cache("turboquant-k8v4").to("cuda:1")
    q = torch.randn(1, HEADS, DIM, device="cuda:1").bfloat16()
    blocks, lengths = torch.zeros(1, 1, dtype=torch.int32, device="cuda:1"), torch.full((1,), 9, device="cuda:1")
    out = mxkv.attend_kv(q, cache, blocks, lengths, format="turboquant-k8v4", backend="triton")
    want = mxkv.attend_kv(q, cache, blocks, lengths, format="turboquant-k8v4", backend="torch")
    assert torch.allclose(out.float(), want.float(), atol=0.03, rtol=0.03)
