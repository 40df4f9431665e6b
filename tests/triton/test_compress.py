"""The compression kernel's arithmetic equals the oracle's: on the interpreter, and with inline assembly on a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import mxkv  # noqa: E402
from mxkv import Element, Format, Placement, Scale, compression_checks, devices, numerics  # noqa: E402
from mxkv.backends.torch_eager import compression as oracle  # noqa: E402
from mxkv.backends.triton_gpu import codec, compress, compression  # noqa: E402
from mxkv.backends.triton_gpu.config import CompressConfig, compress_configurations, compress_default  # noqa: E402
from mxkv.contracts import Packed  # noqa: E402
from mxkv.paging import contiguous_layout  # noqa: E402
from tests.compression_cases import DIM, RING_DIM, packed  # noqa: E402
from tests.support import cos_sin_table  # noqa: E402
from tests.triton.compress_cases import FEW, H200_COMPUTE_UNITS, MANY_TOKENS  # noqa: E402
from tests.triton.test_codec import DEVICE, INTERPRETED, runs  # noqa: E402

pytestmark = pytest.mark.triton
BLOCK = 1024


@triton.jit
def reciprocal_kernel(x, out, PATHS: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, compress._reciprocal(tl.load(x + at), PATHS))


@triton.jit
def softmax_kernel(first, second, out, PATHS: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    low, high = compress.softmax_of_two(tl.load(first + at), tl.load(second + at), PATHS)
    tl.store(out + 2 * at, low)
    tl.store(out + 2 * at + 1, high)


def paths() -> codec.Paths:
    return codec.paths_of(devices.target_of(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)))


@runs
def test_the_reciprocal_is_correctly_rounded() -> None:
    """All fp32 of [1, 2], which is all that the softmax asks for; in the interpreter some of them."""
    step = 1013 if INTERPRETED else 1
    bits = torch.arange(0x3F800000, 0x40000001, step, dtype=torch.int32)
    values = torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK), value=0x40000000).view(torch.float32).to(DEVICE)
    out = torch.empty_like(values)
    reciprocal_kernel[(len(values) // BLOCK,)](values, out, paths(), BLOCK, enable_fp_fusion=False)
    assert torch.equal(out, torch.ones_like(values) / values)


@runs
def test_the_softmax_of_two() -> None:
    """Differences of every size, NaN and infinities: the bits of the oracle."""
    g = torch.Generator().manual_seed(0)
    count = (8 if INTERPRETED else 1024) * BLOCK
    scores = torch.randn(2, count, generator=g) * 2.0 ** torch.randint(-30, 8, (2, count), generator=g)
    special = torch.tensor([0.0, -0.0, 1e38, -1e38, float("inf"), -float("inf"), float("nan"), 87.4, 1e-45])
    scores[:, : len(special) ** 2] = torch.cartesian_prod(special, special).T
    first, second = scores.to(DEVICE)
    out = torch.empty(count, 2, device=DEVICE)
    softmax_kernel[(count // BLOCK,)](first, second, out, paths(), BLOCK, enable_fp_fusion=False)
    want = torch.stack(numerics.softmax_of_two(*scores), -1)
    have = out.cpu()
    assert torch.equal(have.isnan(), want.isnan())
    assert torch.equal(have.nan_to_num(9.0).view(torch.int32), want.nan_to_num(9.0).view(torch.int32))


@pytest.mark.parametrize("format", [None, "mxfp8"])
def test_the_defaults_are_among_what_is_tried(format: str | None) -> None:
    """Few tokens have four warps each, many have one; AMD's have one whatever their number."""
    rings = torch.empty(2, 3, RING_DIM, device="meta")
    if format is None:
        spec = mxkv.spec("compress_norm", device="cpu", compress_ratio=2, state_cache=rings)
    else:
        layout = contiguous_layout(mxkv.FORMATS[format], DIM, 16, 4)
        spec = mxkv.spec(
            "compress_store", device="cpu", compress_ratio=2, state_cache=rings, format=format, layout=layout
        )
    many = CompressConfig(2 if format is None else 8, 64)
    for tokens, config in ((1, FEW), (512, FEW), (1024, CompressConfig(1, 64)), (MANY_TOKENS, many)):
        assert compress_default(spec, devices.TARGETS["hopper"], tokens, H200_COMPUTE_UNITS) == config
        assert config in compress_configurations(spec)
        assert compress_default(spec, devices.TARGETS["gfx950"], tokens, H200_COMPUTE_UNITS) == CompressConfig(1)


CHUNKS = ((0, 7), (4, 1), (3, 1), (1, 6), (2, 2), (5, 1), (9, 4), (7, 0), (6, 1), (11, 5), (13, 3))
CONFIGS = (CompressConfig(2, 64), CompressConfig(16), CompressConfig(1, 64, 4), CompressConfig(4, 64, 2))


TWENTY_FOUR = Format("groups-of-24", Element.E2M1, Scale.E8M0, 24, Placement.PAGE, tail=32).spec


@runs
@pytest.mark.parametrize(
    ("format", "capacity"), [(None, 1), ("mxfp8", 3), ("dsv4", 1), pytest.param(TWENTY_FOUR, 1, id="groups-of-24-1")]
)
def test_tokens_of_a_program(format: str | None, capacity: int) -> None:
    """However many a program takes, and wherever chunks begin and end in it: what is written is the same."""
    call = packed(list(CHUNKS), capacity)
    call.slots[20] = -1
    tensors = (
        call.kv_score, call.positions, call.slots, call.query_start, call.token_to_request, call.state_cache,
        None, None, call.weight,
    )  # fmt: skip

    def outcome(config: CompressConfig | None, device: str) -> list[torch.Tensor]:
        tokens = Packed(*(None if t is None else t.clone().to(device) for t in tensors), call.eps)
        out = torch.full((call.tokens, DIM), -7.0, device=device).bfloat16()
        if format is None:
            spec = compression_checks.compress_spec(tokens, 2, out)
            arguments: tuple[object, ...] = (tokens, out)
        else:
            cache, table = mxkv.empty_cache(format, 3, 16, DIM, device), cos_sin_table(32).to(device)
            slots = torch.arange(call.tokens, device=device)
            spec = compression_checks.compress_store_spec(
                tokens, 2, cache, slots, out, format, table, None, "propagate"
            )
            arguments = (tokens, cache.zero_(), slots, table, None, out)
        if config is None:
            oracle.prepare(spec)(*arguments)
        else:
            compression.prepare(spec)(*arguments, config=config)
        written = [out, tokens.ring, *([] if format is None else [arguments[1]])]
        return [t.view(torch.uint8).cpu() for t in written]

    want = outcome(None, "cpu")
    for config in CONFIGS[: 2 if INTERPRETED else 4]:  # which knows no warps
        for have, wanted in zip(outcome(config, DEVICE), want, strict=True):
            assert torch.equal(have, wanted), config
