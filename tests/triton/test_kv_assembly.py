"""The inline assembly of the kernels on keys and values, run by a small PTX interpreter, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import mxkv
from mxkv import KeyCode, KVFormat, lloyd_max
from mxkv.backends.torch_eager import kv as oracle
from mxkv.backends.triton_gpu import kv, kv_attend, kv_codec
from mxkv.backends.triton_gpu.codec import Paths
from tests.support import generator
from tests.triton import ptx

pytestmark = pytest.mark.triton
PATHS = Paths(pairs="full", e4m3="cvt")
BITS = (3, 4)


def format_of(bits: int, corrected: bool = True) -> KVFormat:
    return KVFormat("mine", KeyCode(f"mse{bits}"), bits, norm_correction=corrected)


def store_task(bits: int, d: int, corrected: bool = True) -> kv.KVTask:
    return kv.kv_task(mxkv.spec("store_kv", format=format_of(bits, corrected), head_dim=d, heads=1), PATHS, 0)


def attend_task(bits: int, d: int) -> kv_attend.AttendKVTask:
    launch = kv.AttendKVLaunch(mxkv.spec("attend_kv", format=format_of(bits), head_dim=d, heads=1), PATHS)
    return launch.task(0, True, launch.config)


def word_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return (codes.long() << (bits * torch.arange(8))).sum(-1)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("d", [64, 16, 128])
@pytest.mark.parametrize("bits", BITS)
def test_keys_are_bucketized(bits: int, d: int, corrected: bool) -> None:
    """On midpoints and near them, at zeros of both signs, far out, and anywhere."""
    factor = 2.0**-5
    table = torch.tensor(lloyd_max.centroids(d, bits))
    edges = torch.tensor(lloyd_max.midpoints(table.tolist()))
    near = torch.cat((edges, edges * (1 + 2.0**-21), edges * (1 - 2.0**-21)))
    other = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 11.3, -11.3, 1e-9, -1e-9, 1e30, -1e30])
    anywhere = torch.randn(8192, generator=generator(0)) * 2 * d**-0.5
    y = torch.cat((near, other, anywhere))
    y = y[torch.randperm(len(y), generator=generator(1))[: len(y) // 256 * 256]].view(-1, 8)
    want = torch.bucketize(y, edges, right=True)
    task = store_task(bits, d, corrected)
    columns = [ptx.bits_of(y[:, j] / factor) for j in range(8)]
    columns.append(ptx.bits_of(torch.full((len(y),), factor * task.companding[0])))
    if corrected:
        before = [torch.full_like(columns[0], n) for n in (1000, 70)]
        word, *sums = ptx.run(task.bucketize_assembly, 3, *columns, *before)
        squares = ((sums[0] - 1000) * kv_codec._RADIX + (sums[1] - 70)).double() * task.square_unit
        assert torch.allclose(squares.float(), table[want].square().sum(-1), rtol=1e-6)
    else:
        (word,) = ptx.run(task.bucketize_assembly, 1, *columns)
    assert torch.equal(word, word_of(want, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", [16, 80, 128, 512])
def test_companding_counts_midpoints(bits: int, d: int) -> None:
    """A tanh puts each midpoint near its number, so that a coarse tanh will do."""
    k, most = store_task(bits, d).companding
    edges = torch.tensor(lloyd_max.midpoints(lloyd_max.centroids(d, bits)))
    middle = len(edges) // 2
    numbers = torch.arange(-middle, middle + 1)
    assert ((k * edges).tanh() * most - numbers).abs().max() < 0.4
    assert most < middle + 0.4


@pytest.mark.parametrize("bits", BITS)
def test_values_are_packed(bits: int) -> None:
    x = torch.rand(512, 8, generator=generator(0)) * 2**bits
    x[:64] = x[:64].trunc()
    x[64:128] = x[64:128].trunc().nextafter(torch.zeros(())).clamp(min=0)
    (word,) = ptx.run(store_task(bits, 64).pack_values_assembly, 1, *(ptx.bits_of(x[:, j]) for j in range(8)))
    assert torch.equal(word, word_of(x.trunc(), bits))


def halves(words: list[torch.Tensor], dtype: torch.dtype) -> Any:
    """Words of two halves each as numbers [n, 2 * words]."""
    each = [half for word in words for half in ptx.halves(word)]
    signed = torch.stack([torch.where(h > 0x7FFF, h - 0x10000, h) for h in each], -1).to(torch.int16)
    return signed.view(dtype).float()


@pytest.mark.parametrize("d", [64, 80, 256])
@pytest.mark.parametrize("bits", BITS)
def test_codes_become_centroids(bits: int, d: int) -> None:
    codes = torch.randint(0, 1 << bits, (4096, 8), generator=generator(0))
    task = attend_task(bits, d)
    above = torch.randint(0, 256, (4096,), generator=generator(1)) << 24 if bits == 3 else 0  # bits above a run
    words = ptx.run(task.centroids_assembly, 4, word_of(codes, bits) | above)
    assert torch.equal(halves(words, torch.float16), torch.tensor(task.halves)[codes])


@pytest.mark.parametrize("bits", BITS)
def test_codes_of_two_tokens_become_pairs(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 4096, 8), generator=generator(0))
    above = torch.randint(0, 256, (4096,), generator=generator(1)) << 24 if bits == 3 else 0
    words = ptx.run(attend_task(bits, 64).codes_assembly, 8, *(word_of(c, bits) | above for c in codes))
    got = halves(words, torch.bfloat16).view(4096, 8, 2)
    assert torch.equal(got, (codes - (1 << (bits - 1))).permute(1, 2, 0).float())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", [32, 80, 128])
def test_centroids_lose_little_as_halves(bits: int, d: int) -> None:
    table = lloyd_max.centroids(d, bits)
    halved, factor = kv_attend.halves_of_table(table)
    worst = max(abs(h / factor - c) for h, c in zip(halved, table, strict=True)) * d**0.5
    assert worst < 2.5e-4  # a rounding to fp16 may lose 1e-3 of the largest
    assert halved == tuple(-h for h in reversed(halved))


def test_the_oracles_packing_is_the_runs_order() -> None:
    codes = torch.randint(0, 8, (5, 8), generator=generator(0))
    packed = oracle.pack(codes.to(torch.uint8), 3).long()
    assert torch.equal(word_of(codes, 3), packed[:, 0] | packed[:, 1] << 8 | packed[:, 2] << 16)
