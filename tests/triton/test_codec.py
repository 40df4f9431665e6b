"""The kernels' codes and constants equal the oracle's: on the interpreter, and with inline assembly on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import mxkv  # noqa: E402
from mxkv import Element, Format, Scale, devices, numerics  # noqa: E402
from mxkv.backends.triton_gpu import codec, tasks  # noqa: E402
from mxkv.contracts import LoadSpec, StoreSpec  # noqa: E402
from mxkv.paging import contiguous_layout  # noqa: E402
from tests.support import FORMATS, name_of  # noqa: E402

pytestmark = pytest.mark.triton
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU")


@triton.jit
def apply_kernel(x, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    if FUNCTION == "e2m1":
        tl.store(out + at, codec.encode_e2m1_pair(value, value, value, value, True) & 0xFF)
    elif FUNCTION == "e2m1 within 6":
        tl.store(out + at, codec.encode_e2m1_pair(value, value, value, value, False) & 0xFF)
    elif FUNCTION == "e4m3":
        tl.store(out + at, codec.encode_e4m3(value))
    elif FUNCTION == "bf16":
        tl.store(out + at, codec.encode_bf16(value))
    elif FUNCTION == "read e2m1":
        tl.store(out + at, codec.decode_e2m1(value))
    elif FUNCTION == "read e4m3":
        tl.store(out + at, codec.decode_e4m3(value))
    elif FUNCTION == "read e8m0":
        tl.store(out + at, codec.decode_e8m0(value))


def apply(function: str, x: torch.Tensor, out_dtype: torch.dtype, block: int = 1024) -> torch.Tensor:
    """A codec function of every element."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % block)).to(DEVICE)
    out = torch.empty(len(padded), dtype=out_dtype, device=DEVICE)
    apply_kernel[(len(padded) // block,)](padded, out, function, block, enable_fp_fusion=False)
    return out[: len(x)].cpu()


def hard_values(values: torch.Tensor) -> torch.Tensor:
    """A code's values, the ties between them, neighbours by one fp32 ulp, tiny and huge numbers; of both signs."""
    ordered = values.unique()
    centres = torch.cat((ordered, (ordered[1:] + ordered[:-1]) / 2))
    up, down = centres.nextafter(torch.tensor(torch.inf)), centres.nextafter(torch.tensor(-torch.inf))
    extreme = torch.tensor([1e-45, 1e-38, 1e-30, 1e30, torch.finfo(torch.float32).max])
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * values.max() / 3
    found = torch.cat((centres, up, down, extreme, random)).abs()
    return torch.cat((found, -found))


def same_floats(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((have.view(torch.int32) == want.view(torch.int32)) | (have.isnan() & want.isnan())).all())


@runs
@pytest.mark.parametrize("function", ["e2m1", "e2m1 within 6"])
def test_writing_e2m1(function: str) -> None:
    x = hard_values(torch.tensor(numerics.E2M1_VALUES))
    if function != "e2m1":
        x = x[x.abs() <= Element.E2M1.max]
    code = numerics.encode_e2m1(x).int()
    assert torch.equal(apply(function, x, torch.int32), code | (code << 4))


@runs
def test_writing_e4m3() -> None:
    values = numerics.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    x = hard_values(values)
    assert torch.equal(apply("e4m3", x, torch.int32), numerics.encode_e4m3(x).int())


@runs
def test_writing_bf16() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16 | torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    )
    x = torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).flatten().view(torch.float32)
    want = numerics.encode_bf16(x).view(torch.int16).int() & 0xFFFF
    assert torch.equal(apply("bf16", x, torch.int32), want)


@runs
def test_reading() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    small = torch.arange(16, dtype=torch.int32)
    assert same_floats(apply("read e2m1", small, torch.float32, 16), numerics.decode_e2m1(small.to(torch.uint8)))
    assert same_floats(apply("read e4m3", codes, torch.float32, 256), numerics.decode_e4m3(codes.to(torch.uint8)))
    assert same_floats(apply("read e8m0", codes, torch.float32, 256), numerics.decode_e8m0(codes))


def test_constants_equal_the_oracles() -> None:
    assert codec.BF16_NAN.value == numerics.BF16_NAN
    assert codec.E4M3_MAX.value == Element.E4M3.max
    smallest_normal = 1 << codec.E4M3_MANTISSA.value
    assert numerics.decode_e4m3(torch.tensor([smallest_normal], dtype=torch.uint8)).item() == (
        2.0**codec.E4M3_MIN_EXP.value
    )
    largest = torch.tensor([codec.BF16_MAX_BITS.value], dtype=torch.int16).view(torch.bfloat16)
    assert largest.item() == Element.BF16.max


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_a_tasks_constants_are_its_formats(format: Format) -> None:
    d = next(d for d in range(64, 1024) if format.accepts_dim(d))
    layout = contiguous_layout(format, d, 4, 8)
    paths = codec.paths_of(devices.TARGETS["hopper"])
    spec = StoreSpec(torch.device("cpu"), format, d, torch.bfloat16, layout, nonfinite="sanitize", compress_ratio=2)
    task = tasks.store_task(spec, paths, 16, 0, True)
    top = numerics.float_bits(format.element.max)
    assert (task.top_exponent + 127) << 23 | task.top_mantissa == top
    assert task.limit == numerics.float_bits(format.finite_limit)
    assert (task.element_max, task.amax_floor) == (format.element.max, format.amax_floor)
    assert (task.pad_scales, task.num_scales) == (format.scale_padding, format.num_groups(d))
    assert (task.sanitize, task.compress_ratio) == (True, 2)
    bytes_per = format.cache_dtype.itemsize
    read = tasks.load_task(LoadSpec(torch.device("cpu"), format, d, torch.float16, layout), paths, 0, True)
    for found in (task, read):
        assert found.block_size == layout.block_size
        assert found.value_stride == layout.value_stride * bytes_per
        assert found.scale_offset == layout.scale_offset * bytes_per
        assert found.scale_stride == layout.scale_stride * bytes_per
        # The regions tile the row, its values and its scales, without gaps.
        first = value_offset = scale = 0
        for region in found.regions:
            assert (region.first, region.value_offset) == (first, value_offset)
            first += region.size
            value_offset += region.size * {"e2m1": 4, "e4m3": 8, "bf16": 16}[region.element] // 8
            if region.scale in ("e8m0", "e4m3"):
                assert region.first_scale == scale
                scale += region.groups
        assert (first, value_offset) == (d, format.value_bytes(d))
        assert scale == format.num_groups(d)
    assert read.dtype_max == torch.finfo(torch.float16).max


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "fp8"])
def test_every_bf16_under_every_scale(name: str) -> None:
    """The instructions themselves, exhaustively: each scale's groups hold every bf16 that does not change the scale."""
    format = mxkv.FORMATS[name]
    grouped = format.grouped
    group = format.group if grouped else 512
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cuda")
    values = (bits << 16).view(torch.float32)
    if format.scale is Scale.E4M3:
        tops = [format.element.max * v for v in numerics.decode_e4m3(torch.arange(1, 0x7F, dtype=torch.uint8)).tolist()]
    elif grouped:
        tops = [format.element.max * 2.0**e for e in (-126, -100, -14, -1, 0, 1, 15, 100, 117)]
    else:
        tops = [float("inf")]
    arguments: dict[str, Any] = {"format": name}
    if not grouped:
        arguments["cache_scale"] = torch.full((1,), 0.37, device="cuda")
    for top in tops:
        fitting = values[(values.abs() <= top) | (torch.tensor(not grouped, device="cuda"))].to(torch.bfloat16)
        others = group - 1 if grouped else group
        count = -(-len(fitting) // others)
        rows = torch.zeros(count, group, dtype=torch.bfloat16, device="cuda")
        rows[:, group - others :] = torch.nn.functional.pad(fitting, (0, count * others - len(fitting))).view(count, -1)
        if grouped:
            rows[:, 0] = top
        rows = torch.nn.functional.pad(rows.flatten(), (0, -rows.numel() % 512)).view(-1, 512)
        slots = torch.arange(len(rows), device="cuda")
        caches = [mxkv.empty_cache(name, -(-len(rows) // 64), 64, 512, "cuda") for _ in range(2)]
        for cache, backend in zip(caches, ("triton", "torch"), strict=True):
            mxkv.store(cache, rows, slots, backend=backend, **arguments)
        assert torch.equal(*(cache.view(torch.uint8) for cache in caches)), top
