"""The configurations of the Numba backend's attention for real devices: some of them in the simulator, where the other
tests run blocks of a few threads, and what is said of all."""

from __future__ import annotations

import pytest
import torch

import mxkv
from mxkv import checks, devices, settings
from mxkv.contracts import AttendSpec

needs_simulator = pytest.mark.skipif(not settings.numba_simulated(), reason="needs Numba's simulator")


def spec_of(heads: int, dim: int) -> AttendSpec:
    cache, q = mxkv.empty_cache("bf16", 1, 8, dim), torch.empty(1, heads, dim, dtype=torch.bfloat16)
    rows = torch.zeros(1, 8, dtype=torch.int32)
    return checks.attend_spec(
        q, cache, torch.empty_like(q), rows, None, None, None, "bf16", None, None, None, None, None
    )


@pytest.mark.numba
@needs_simulator
@pytest.mark.parametrize(
    ("name", "heads", "dim", "missing", "splits", "launch"),
    [
        ("bf16", 16, 64, True, 1, (128, 16, 32, 6, 16, True, 3)),
        ("bf16", 16, 512, False, 1, (128, 16, 32, 6, 8, True, 3)),
        ("mxfp4", 32, 96, True, 1, (256, 32, 16, 6, 4, True, 2)),
        ("mxfp4", 13, 192, False, 2, (128, 16, 16, 6, 8, True, 3)),
        ("mxfp8", 3, 96, False, 1, (128, 4, 16, 6, 8, False, 3)),
        ("dsv4", 16, 512, False, 1, (128, 16, 32, 6, 16, True, 3)),
        ("bf16", 2, 67, True, 2, (128, 2, 32, 6, 8, True, 3)),
        ("nvfp4", 9, 80, True, 1, (64, 8, 8, 6, 4, True, 3)),
    ],
)
def test_real_configurations(
    name: str, heads: int, dim: int, missing: bool, splits: int, launch: tuple[int, int, int, int, int, bool, int]
) -> None:
    from mxkv.backends.numba_cuda import attention
    from mxkv.backends.numba_cuda.config import AttendConfig

    g = torch.Generator().manual_seed(0)
    cache = mxkv.empty_cache(name, 8, 8, dim)
    mxkv.store(cache, torch.randn(64, dim, generator=g), torch.arange(64), format=name, backend="torch")
    q, sink = torch.randn(1, heads, dim, generator=g).bfloat16(), torch.randn(heads, generator=g)
    indices = torch.randint(-3 if missing else 0, 64, (1, 70), generator=g, dtype=torch.int32)
    out, lse = torch.empty_like(q), torch.empty(1, heads)
    spec = checks.attend_spec(
        q, cache, out, indices, None, None, None, mxkv.FORMATS[name].spec, None, sink, None, lse, None
    )
    run, config = attention.prepare(spec), AttendConfig(*launch)
    run(q, cache, out, indices, None, None, sink, lse, None, dim**-0.5, splits, config=config)
    want, want_lse = mxkv.attend(q, cache, indices=indices, format=name, sink=sink, return_lse=True, backend="torch")
    assert (out.float() - want.float()).abs().max() <= 2.0**-7 * want.float().abs().max()
    assert (lse - want_lse).abs().max() < 1e-4


@pytest.mark.numba
@needs_simulator
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("bf16", 64),
        ("bf16", 67),
        ("mxfp4", 64),
        ("mxfp4", 96),
        ("mxfp8", 64),
        ("nvfp4", 64),
        ("fp8", 72),
        ("dsv4", 512),
    ],
)
def test_one_row_comes_out_as_a_load_gives_it(name: str, dim: int) -> None:
    """Whatever its magnitude: no value is rounded twice, nor lost, on its way through shared memory."""
    from mxkv.backends.numba_cuda import attention
    from mxkv.backends.numba_cuda.config import AttendConfig

    g, count = torch.Generator().manual_seed(0), 24
    cache = mxkv.empty_cache(name, 3, 8, dim)
    rows = torch.randn(count, dim, generator=g) * 2.0 ** torch.linspace(-132, 125, count)[:, None]
    mxkv.store(cache, rows.bfloat16(), torch.arange(count), format=name, backend="torch")
    q, indices = torch.zeros(count, 2, dim, dtype=torch.bfloat16), torch.arange(count, dtype=torch.int32)[:, None]
    out = torch.empty_like(q)
    spec = checks.attend_spec(
        q, cache, out, indices, None, None, None, mxkv.FORMATS[name].spec, None, None, None, None, None
    )
    config = AttendConfig(4, 2, 4, 2, 4, True, 3)
    attention.prepare(spec)(q, cache, out, indices, None, None, None, None, None, 1.0, 1, config=config)
    want = mxkv.load(cache, torch.arange(count), format=name, backend="torch")
    assert torch.equal(out, want[:, None].expand_as(out))


@pytest.mark.parametrize("target", [t for t in devices.TARGETS.values() if t.vendor == "nvidia"], ids=lambda t: t.name)
@pytest.mark.parametrize(("heads", "dim"), [(1, 512), (16, 64), (16, 512), (64, 576), (256, 80)])
def test_what_is_tried_fits(heads: int, dim: int, target: devices.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that the kernel can take, in a block's shared memory, each once, and splits that are its own."""
    from mxkv.backends.numba_cuda import config, shared

    monkeypatch.setattr(config.settings, "numba_simulated", lambda: False)
    spec = spec_of(heads, dim)
    found = config.attend_configurations(spec, target)
    assert found
    assert len(set(found)) == len(found)
    for launch in found:
        block = config.shared_of(spec, launch)
        assert block.bytes <= target.shared_memory
        assert launch.threads >= max(launch.block_heads, block.tile_threads)
        assert launch.block_rows <= shared.WARP >= block.tile_threads
        assert launch.threads * launch.resident * 128 <= 1 << 16  # registers of a multiprocessor
    for queries in (1, 8, 64, 256):
        assert config.guess(found, spec, queries, 2048, 132) in found
