"""What only a GPU can show: graphs, streams, devices, no synchronisation, no allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mxkv
from tests.support import cos_sin_table, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = list(mxkv.FORMATS)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Makes torch raise where a call of its own waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def arguments_of(name: str, tokens: int, device: str = "cuda") -> dict[str, Any]:
    scaled = mxkv.FORMATS[name].scale is mxkv.Scale.TENSOR
    return {
        "format": name,
        "positions": torch.arange(tokens, device=device),
        "cos_sin": cos_sin_table(64).to(device),
        "cache_scale": torch.full((1,), 0.37, device=device) if scaled else None,
        "backend": "triton",
    }


def expected(name: str, rows: torch.Tensor, slots: torch.Tensor, blocks: int) -> torch.Tensor:
    """The oracle's cache, computed on the CPU."""
    cache = mxkv.empty_cache(name, blocks, 8, rows.shape[1])
    arguments = arguments_of(name, len(slots), "cpu") | {"backend": "torch"}
    mxkv.store(cache, rows.cpu(), slots.cpu(), **arguments)
    return cache.view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_honours_what_changes_in_place(name: str) -> None:
    rows, slots = rows_of(16, 512, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache(name, 4, 8, 512, "cuda")
    arguments = arguments_of(name, 16)
    reading = {k: arguments[k] for k in ("format", "cache_scale", "backend")}
    out = torch.empty_like(rows)
    graph = torch.cuda.CUDAGraph()
    mxkv.store(cache, rows, slots, **arguments)
    mxkv.load(cache, slots, out=out, **reading)
    with torch.cuda.graph(graph):
        mxkv.store(cache, rows, slots, **arguments)
        mxkv.load(cache, slots, out=out, **reading)
    for seed in (1, 2):
        rows.copy_(rows_of(16, 512, torch.bfloat16, seed=seed))
        slots.copy_(torch.randperm(32)[:16])
        cache.view(torch.uint8).zero_()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache.view(torch.uint8).cpu(), expected(name, rows, slots, 4))
        assert torch.equal(out, mxkv.load(cache, slots, **reading))


def test_a_shape_first_met_inside_a_capture() -> None:
    """The default configuration, no synchronisation: Triton compiles, the capture survives, the replay is right."""
    rows, slots = rows_of(16, 704, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 704, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mxkv.store(cache, rows, slots, backend="triton")
    assert not cache.any()
    graph.replay()
    want = mxkv.empty_cache("mxfp4", 4, 8, 704)
    mxkv.store(want, rows.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_and_nothing_is_allocated(name: str) -> None:
    rows, slots = rows_of(16, 512, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache(name, 4, 8, 512, "cuda")
    arguments = arguments_of(name, 16)
    out = torch.empty_like(rows)

    def call() -> None:
        mxkv.store(cache, rows, slots, **arguments)
        mxkv.load(cache, slots, out=out, **{k: arguments[k] for k in ("format", "cache_scale", "backend")})

    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def delayed(action: Callable[[], None]) -> None:
    """Enqueue an action behind a wait of some milliseconds."""
    torch.cuda._sleep(20_000_000)
    action()


def test_a_side_stream_with_a_delayed_producer() -> None:
    rows, slots = torch.zeros(16, 512, dtype=torch.bfloat16, device="cuda"), torch.arange(16, device="cuda")
    made = rows_of(16, 512, torch.bfloat16).cuda()
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda")
    mxkv.store(cache, rows, slots, backend="triton")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delayed(lambda: rows.copy_(made))
        mxkv.store(cache, rows, slots, backend="triton")
        out = mxkv.load(cache, slots, backend="triton")
    stream.synchronize()
    want = mxkv.empty_cache("mxfp4", 4, 8, 512)
    mxkv.store(want, made.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)
    assert torch.equal(out.cpu(), mxkv.load(want, slots.cpu(), backend="torch"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    rows, slots = rows_of(16, 512, torch.bfloat16).to("cuda:1"), torch.arange(16, device="cuda:1")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda:1")
    with torch.cuda.device(0):
        mxkv.store(cache, rows, slots, backend="triton")
        assert torch.cuda.current_device() == 0
    want = mxkv.empty_cache("mxfp4", 4, 8, 512)
    mxkv.store(want, rows.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)


def test_the_launch_takes_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU: where another device is current, the launch happens under a guard of the tensors' device."""
    from mxkv.backends.triton_gpu import latents

    rows, slots = rows_of(4, 512, torch.bfloat16).cuda(), torch.arange(4, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 512, "cuda")
    guarded: list[torch.device | int] = []
    guard = torch.cuda.device
    monkeypatch.setattr(latents.torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(latents.torch.cuda, "device", lambda device: (guarded.append(device), guard(device))[1])
    mxkv.store(cache, rows, slots, backend="triton")
    assert guarded == [cache.device.index]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "dsv4"])
def test_many_tokens(name: str) -> None:
    """The configurations of large calls, whose programs take several tokens: every byte, against the oracle."""
    tokens = (1 << 17) + 5
    rows = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(tokens, device="cuda")
    caches = [mxkv.empty_cache(name, -(-tokens // 64), 64, 512, "cuda") for _ in range(2)]
    positions = torch.randint(8192, (tokens,), device="cuda")
    table = cos_sin_table(8192).cuda()
    for cache, backend in zip(caches, ("triton", "torch"), strict=True):
        mxkv.store(cache, rows, slots, positions=positions, cos_sin=table, backend=backend)
    assert torch.equal(*caches)
    read = [mxkv.load(caches[0], slots, backend=backend) for backend in ("triton", "torch")]
    assert torch.equal(*read)


def test_more_rows_than_two_to_the_31_elements() -> None:
    tokens = (1 << 31) // 512 + 8
    if torch.cuda.mem_get_info()[0] < 3 * tokens * 1024:
        pytest.skip("needs 13 GB of GPU memory")
    rows = torch.zeros(tokens, 512, device="cuda", dtype=torch.bfloat16)
    rows[-8:] = rows_of(8, 512, torch.bfloat16).cuda()
    slots = torch.full((tokens,), -1, device="cuda")
    slots[-8:] = torch.arange(8, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 1, 8, 512, "cuda")
    mxkv.store(cache, rows, slots, backend="triton")
    want = mxkv.empty_cache("mxfp4", 1, 8, 512)
    mxkv.store(want, rows[-8:].cpu(), torch.arange(8), backend="torch")
    assert torch.equal(cache.cpu(), want)
    loaded = mxkv.load(cache, slots, out=rows, backend="triton")
    assert torch.equal(loaded[-8:].cpu(), mxkv.load(want, torch.arange(8), backend="torch"))
    assert not loaded[: tokens - 8].any()


@pytest.mark.parametrize("name", NAMES)
def test_pools_past_two_to_the_32_bytes(name: str) -> None:
    width = mxkv.FORMATS[name].record_bytes(512)
    blocks = (1 << 32) // (64 * width) + 2
    if torch.cuda.mem_get_info()[0] < 64 * width * blocks + (1 << 30):
        pytest.skip("needs 5 GB of GPU memory")
    cache = mxkv.empty_cache(name, blocks, 64, 512, "cuda")
    rows = rows_of(32, 512, torch.bfloat16).cuda()
    first = blocks * 64 - 32
    slots, near = torch.arange(first, first + 32, device="cuda"), torch.arange(32, 64, device="cuda")
    arguments = arguments_of(name, 32)
    mxkv.store(cache, rows, slots, **arguments)
    small = mxkv.empty_cache(name, 1, 64, 512, "cuda")
    mxkv.store(small, rows, near, **arguments)
    assert torch.equal(cache[-1].view(torch.uint8), small[0].view(torch.uint8))
    assert not cache[:-1].view(torch.uint8).any()
    reading = {k: arguments[k] for k in ("format", "cache_scale", "backend")}
    assert torch.equal(mxkv.load(cache, slots, **reading), mxkv.load(small, near, **reading))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "dsv4", "bf16"])
def test_one_plan_serves_tensors_of_every_alignment(name: str) -> None:
    """What was compiled for aligned tensors is not launched for others: addresses, dtypes, strides change in turn."""
    tokens, blocks = 24, 4
    width = mxkv.FORMATS[name].record_bytes(512)
    table = cos_sin_table(64)
    rows = rows_of(tokens, 512, torch.bfloat16)
    order = torch.randperm(blocks * 8)[:tokens]
    want = mxkv.empty_cache(name, blocks, 8, 512)
    mxkv.store(want, rows, order, format=name, positions=torch.arange(tokens), cos_sin=table, backend="torch")
    read = mxkv.load(want, order, format=name, backend="torch")
    for shift in (0, 1, 0, 2, 3, 8, 0):
        for dtype, step in ((torch.int64, 1), (torch.int32, 1), (torch.int64, 2)):
            size = want.element_size()
            memory = torch.zeros(blocks * 8 * width + 64, dtype=torch.uint8, device="cuda")
            cache = memory[shift * size :][: blocks * 8 * width].view(want.dtype).view(want.shape)
            latent = torch.zeros(tokens * 512 + 16, dtype=torch.bfloat16, device="cuda")[shift : tokens * 512 + shift]
            latent = latent.view(tokens, 512).copy_(rows)
            indices = torch.zeros(2 * tokens + 16, dtype=dtype, device="cuda")[shift:]
            indices = indices[: step * tokens : step].copy_(order)
            positions = torch.zeros(tokens + 16, dtype=dtype, device="cuda")[shift:][:tokens]
            positions.copy_(torch.arange(tokens))
            turned = torch.zeros(64 * 64 + 16, device="cuda")[shift : shift + 64 * 64].view(64, 64).copy_(table)
            mxkv.store(cache, latent, indices, format=name, positions=positions, cos_sin=turned, backend="triton")
            assert torch.equal(cache.view(torch.uint8).cpu(), want.view(torch.uint8)), (shift, dtype, step)
            out = torch.zeros(tokens * 512 + 16, dtype=torch.bfloat16, device="cuda")[shift : tokens * 512 + shift]
            mxkv.load(cache, indices, format=name, out=out.view(tokens, 512), backend="triton")
            assert torch.equal(out.view(tokens, 512).cpu(), read), (shift, dtype, step)


def test_a_call_is_one_launch_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of call that was never tuned: one kernel for each call, whatever the tuner could do with it."""
    from mxkv.backends.triton_gpu.launch import Launcher

    launches: list[int] = []
    launch = Launcher.__call__
    monkeypatch.setattr(
        Launcher, "__call__", lambda self, *arguments: (launches.append(1), launch(self, *arguments))[1]
    )
    rows, slots = rows_of(16, 832, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 832, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mxkv.store(cache, rows, slots, backend="triton")
        mxkv.load(cache, slots, out=rows, format="mxfp4", backend="triton")
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() for _ in range(event.count) if "kernel" in event.key]
    assert len(launches) == 2
    assert sorted(kernels) == ["load_kernel", "store_kernel"]


def test_tuning_is_refused_under_capture() -> None:
    rows, slots = rows_of(16, 896, torch.bfloat16).cuda(), torch.arange(16, device="cuda")
    cache = mxkv.empty_cache("mxfp4", 4, 8, 896, "cuda")
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()), mxkv.tuning():
        pass
    with mxkv.tuning(), pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mxkv.store(cache, rows, slots, backend="triton")
    torch.cuda.synchronize()
    mxkv.store(cache, rows, slots, backend="triton")
    want = mxkv.empty_cache("mxfp4", 4, 8, 896)
    mxkv.store(want, rows.cpu(), slots.cpu(), backend="torch")
    assert torch.equal(cache.cpu(), want)


# Attention.


def attention(name: str, queries: int = 8, rows: int = 300, dim: int = 512) -> dict[str, Any]:
    """The arguments of an attention to random slots of a full cache."""
    scaled = mxkv.FORMATS[name].scale is mxkv.Scale.TENSOR
    scale = torch.full((1,), 0.02, device="cuda") if scaled else None
    cache = mxkv.empty_cache(name, 16, 64, dim, "cuda")
    values = torch.randn(1024, dim, device="cuda").bfloat16()
    mxkv.store(cache, values, torch.arange(1024, device="cuda"), format=name, cache_scale=scale, backend="triton")
    return {
        "q": torch.randn(queries, 16, dim, device="cuda").bfloat16(),
        "cache": cache,
        "indices": torch.randint(-1, 1025, (queries, rows), device="cuda"),
        "format": name,
        "cache_scale": scale,
    }


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got.float(), want.float(), atol=0.01, rtol=0.02)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_attention_honours_what_changes_in_place(name: str, splits: int) -> None:
    arguments = attention(name)
    out = torch.empty_like(arguments["q"])

    def call(backend: str, **more: Any) -> torch.Tensor:
        result: torch.Tensor = mxkv.attend(**arguments, num_splits=splits, backend=backend, **more)
        return result

    call("triton", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call("triton", out=out)
    for seed in (1, 2):
        g = torch.Generator("cuda").manual_seed(seed)
        arguments["q"].normal_(generator=g)
        arguments["indices"].random_(-1, 1025, generator=g)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call("triton"))
        assert close(out, call("torch"))


def test_an_attention_first_met_inside_a_capture() -> None:
    arguments = attention("mxfp4", dim=704)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mxkv.attend(**arguments, num_splits=2, backend="triton")
    graph.replay()
    assert close(out, mxkv.attend(**arguments, backend="torch"))


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_waits_for_nothing_and_allocates_nothing(splits: int) -> None:
    """Into ``out``, with a workspace where there are splits."""
    arguments = attention("mxfp4")
    needed = mxkv.attend_workspace_bytes(**arguments, num_splits=splits, backend="triton")
    assert bool(needed) == (splits > 1)
    workspace = torch.empty(needed, dtype=torch.uint8, device="cuda") if needed else None
    out = torch.empty_like(arguments["q"])

    def call() -> None:
        mxkv.attend(**arguments, num_splits=splits, out=out, workspace=workspace, backend="triton")

    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_partial_buffers_are_one_allocation() -> None:
    arguments = attention("mxfp4")
    out = torch.empty_like(arguments["q"])
    mxkv.attend(**arguments, num_splits=3, out=out, backend="triton")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mxkv.attend(**arguments, num_splits=3, out=out, backend="triton")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1


def test_attention_on_a_side_stream_with_a_delayed_producer() -> None:
    arguments = attention("mxfp4")
    made = torch.randn_like(arguments["q"])
    mxkv.attend(**arguments, num_splits=2, backend="triton")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delayed(lambda: arguments["q"].copy_(made))
        out = mxkv.attend(**arguments, num_splits=2, backend="triton")
    stream.synchronize()
    assert torch.equal(out, mxkv.attend(**arguments, num_splits=2, backend="triton"))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "bf16"])
def test_attention_to_the_end_of_a_pool_past_two_to_the_32_bytes(name: str) -> None:
    width = mxkv.FORMATS[name].record_bytes(512)
    blocks = (1 << 32) // (64 * width) + 2
    if torch.cuda.mem_get_info()[0] < 64 * width * blocks + (1 << 30):
        pytest.skip("needs 5 GB of GPU memory")
    small = attention(name)
    large = mxkv.empty_cache(name, blocks, 64, 512, "cuda")
    large[-16:].view(torch.uint8).copy_(small["cache"].view(torch.uint8))
    moved = torch.where(small["indices"] >= 0, small["indices"] + (blocks - 16) * 64, -1)
    got = mxkv.attend(**{**small, "cache": large, "indices": moved}, backend="triton")
    assert torch.equal(got, mxkv.attend(**small, backend="triton"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_attention_on_a_device_that_is_not_current() -> None:
    arguments = attention("mxfp4")
    elsewhere = {k: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with torch.cuda.device(0):
        got = mxkv.attend(**elsewhere, num_splits=2, backend="triton")
    assert torch.equal(got.cpu(), mxkv.attend(**arguments, num_splits=2, backend="triton").cpu())
