"""What only a GPU can show of the Numba backend: graphs, streams, no synchronisation, no allocation, alignments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxkv
from tests.numba_gpu import no_compiler
from tests.support import cos_sin_table, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.numba,
    pytest.mark.skipif(bool(no_compiler()), reason=no_compiler()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = list(mxkv.FORMATS)
NUMBA = {"backend": "numba"}


def arguments_of(name: str, tokens: int, device: str = "cuda") -> dict[str, Any]:
    scaled = mxkv.FORMATS[name].scale is mxkv.Scale.TENSOR
    return {
        "format": name,
        "positions": torch.arange(tokens, device=device),
        "cos_sin": cos_sin_table(64).to(device),
        "cache_scale": torch.full((1,), 0.37, device=device) if scaled else None,
    }


def expected(name: str, rows: torch.Tensor, slots: torch.Tensor, blocks: int) -> torch.Tensor:
    """The oracle's cache, computed on the CPU."""
    cache = mxkv.empty_cache(name, blocks, 8, rows.shape[1])
    mxkv.store(cache, rows.cpu(), slots.cpu(), **arguments_of(name, len(slots), "cpu"), backend="torch")
    return cache.view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_honours_what_changes_in_place_and_nothing_waits(name: str) -> None:
    rows, slots = rows_of(16, 512, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache, q = mxkv.empty_cache(name, 4, 8, 512, "cuda"), rows_of(6, 512, torch.bfloat16).cuda().view(2, 3, 512)
    arguments = arguments_of(name, 16)
    reading = {k: arguments[k] for k in ("format", "cache_scale")} | NUMBA
    out, attended, indices = torch.empty_like(rows), torch.empty_like(q), torch.arange(32, device="cuda").view(2, 16)

    def call() -> None:
        mxkv.store(cache, rows, slots, **arguments, **NUMBA)
        mxkv.load(cache, slots, out=out, **reading)
        mxkv.attend(q, cache, indices=indices, out=attended, num_splits=1, **reading)

    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in (1, 2):
        rows.copy_(rows_of(16, 512, torch.bfloat16, seed=seed))
        slots.copy_(torch.randperm(32)[:16])
        cache.view(torch.uint8).zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache.view(torch.uint8).cpu(), expected(name, rows, slots, 4))
        want = mxkv.load(cache, slots, format=name, cache_scale=arguments["cache_scale"], backend="torch")
        assert torch.equal(out, want)
        assert torch.equal(attended, mxkv.attend(q, cache, indices=indices, num_splits=1, **reading))


def test_a_shape_first_met_inside_a_capture() -> None:
    rows, slots = rows_of(16, 704, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 704, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mxkv.store(cache, rows, slots, **NUMBA)
    assert not cache.any()
    graph.replay()
    want = mxkv.empty_cache("mxfp4", 4, 8, 704)
    mxkv.store(want, rows.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)


def test_case_27_a_side_stream_with_a_delayed_producer() -> None:
    rows, slots = torch.zeros(16, 512, dtype=torch.bfloat16, device="cuda"), torch.arange(16, device="cuda")
    made = rows_of(16, 512, torch.bfloat16).cuda()
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda")
    mxkv.store(cache, rows, slots, **NUMBA)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        rows.copy_(made)
        mxkv.store(cache, rows, slots, **NUMBA)
        out = mxkv.load(cache, slots, **NUMBA)
    stream.synchronize()
    want = mxkv.empty_cache("mxfp4", 4, 8, 512)
    mxkv.store(want, made.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)
    assert torch.equal(out.cpu(), mxkv.load(want, slots.cpu(), backend="torch"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_case_26_tensors_on_a_device_that_is_not_current() -> None:
    rows, slots = rows_of(16, 512, torch.bfloat16).to("cuda:1"), torch.arange(16, device="cuda:1")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda:1")
    with torch.cuda.device(0):
        mxkv.store(cache, rows, slots, **NUMBA)
        assert torch.cuda.current_device() == 0
    want = mxkv.empty_cache("mxfp4", 4, 8, 512)
    mxkv.store(want, rows.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)


def test_a_thread_without_a_context() -> None:
    """The first thing that a thread does on the GPU is a launch."""
    import threading

    rows, slots = rows_of(16, 512, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda")
    mxkv.store(cache, rows, slots, **NUMBA)
    want = cache.clone()
    cache.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: mxkv.store(cache, rows, slots, **NUMBA))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(cache, want)


@pytest.mark.parametrize("name", NAMES)
def test_many_tokens(name: str) -> None:
    """Every byte, against the oracle."""
    tokens = (1 << 17) + 5
    rows = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(tokens, device="cuda")
    caches = [mxkv.empty_cache(name, -(-tokens // 64), 64, 512, "cuda") for _ in range(2)]
    positions = torch.randint(8192, (tokens,), device="cuda")
    table = cos_sin_table(8192).cuda()
    for cache, backend in zip(caches, ("numba", "torch"), strict=True):
        mxkv.store(cache, rows, slots, format=name, positions=positions, cos_sin=table, backend=backend)
    assert torch.equal(*(cache.view(torch.uint8) for cache in caches))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        read = [mxkv.load(caches[0], slots, format=name, dtype=dtype, backend=b) for b in ("numba", "torch")]
        assert torch.equal(*read)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "dsv4", "bf16"])
def test_tensors_of_every_alignment(name: str) -> None:
    tokens, blocks = 24, 4
    width = mxkv.FORMATS[name].record_bytes(512)
    rows = rows_of(tokens, 512, torch.bfloat16)
    order = torch.randperm(blocks * 8)[:tokens]
    want = mxkv.empty_cache(name, blocks, 8, 512)
    mxkv.store(want, rows, order, format=name, backend="torch")
    read = mxkv.load(want, order, format=name, backend="torch")
    for shift in (0, 1, 2, 3, 4, 8, 0):
        memory = torch.zeros(blocks * 8 * width + 64, dtype=torch.uint8, device="cuda")
        cache = memory[shift * want.element_size() :][: blocks * 8 * width].view(want.dtype).view(want.shape)
        latent = torch.zeros(tokens * 512 + 16, dtype=torch.bfloat16, device="cuda")[shift : tokens * 512 + shift]
        latent = latent.view(tokens, 512).copy_(rows)
        mxkv.store(cache, latent, order.cuda(), format=name, **NUMBA)
        assert torch.equal(cache.view(torch.uint8).cpu(), want.view(torch.uint8)), shift
        out = torch.zeros(tokens * 512 + 16, dtype=torch.bfloat16, device="cuda")[shift : tokens * 512 + shift]
        mxkv.load(cache, order.cuda(), format=name, out=out.view(tokens, 512), **NUMBA)
        assert torch.equal(out.view(tokens, 512).cpu(), read), shift


@pytest.mark.parametrize("heads", [1, 5, 16, 40])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "dsv4", "bf16"])
def test_attend_at_full_size(name: str, heads: int) -> None:
    cache = mxkv.empty_cache(name, 64, 64, 512, "cuda")
    mxkv.store(cache, torch.randn(4096, 512, device="cuda"), torch.arange(4096, device="cuda"), format=name)
    q = torch.randn(7, heads, 512, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(-5, 4100, (7, 1500), device="cuda", dtype=torch.int32)
    found = [
        mxkv.attend(q, cache, indices=indices, format=name, return_lse=True, backend=backend)
        for backend in ("numba", "torch")
    ]
    (got, got_lse), (want, want_lse) = found
    assert (got.float() - want.float()).abs().max() <= 2.0**-7 * want.float().abs().max()
    assert (got_lse - want_lse).abs().max() < 1e-3


def test_the_automatic_choice_says_why_it_is_slower(
    fresh_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Triton cannot run, Numba does, with one warning that gives the reason."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    mxkv.settings.reload()
    assert mxkv.explain("store", device="cuda").chosen == "numba"
    rows, slots = rows_of(16, 512, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda")
    for _ in range(3):
        mxkv.store(cache, rows, slots)
    said = [record.getMessage() for record in caplog.records if "slower backend" in record.getMessage()]
    assert len(said) == 1
    assert "'numba'" in said[0]
    assert "Triton is not installed" in said[0]
