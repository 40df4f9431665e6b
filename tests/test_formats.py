"""Formats as data: sizes, widths, inference, the placement of bytes, and formats that a caller makes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import mxkv
from mxkv import Element, Format, Placement, Scale
from mxkv.formats import get_format, infer_format, parse_format
from mxkv.paging import contiguous_layout, layout_of
from tests import reference
from tests.support import FORMATS, name_of, width_for

RECORD_BYTES_512 = {
    "mxfp4": 272,
    "mxfp8": 528,
    "nvfp4": 288,
    "dsv4": 584,
    "mxfp8-inline": 528,
    "nvfp4-inline": 288,
    "bf16": 1024,
    "fp8": 512,
}


def test_table_is_the_specification() -> None:
    assert {name: f.record_bytes(512) for name, f in mxkv.FORMATS.items()} == RECORD_BYTES_512
    fields = {
        name: (f.element.value, f.scale.value, f.group, f.placement.value, f.tail) for name, f in mxkv.FORMATS.items()
    }
    assert fields == {
        "mxfp4": ("e2m1", "e8m0", 32, "inline", 0),
        "mxfp8": ("e4m3", "e8m0", 32, "page", 0),
        "nvfp4": ("e2m1", "e4m3", 16, "page", 0),
        "dsv4": ("e4m3", "e8m0", 64, "page", 64),
        "mxfp8-inline": ("e4m3", "e8m0", 32, "inline", 0),
        "nvfp4-inline": ("e2m1", "e4m3", 16, "inline", 0),
        "bf16": ("bf16", "none", 1, "none", 0),
        "fp8": ("e4m3", "tensor", 1, "none", 0),
    }
    dsv4 = mxkv.FORMATS["dsv4"]
    assert (dsv4.value_bytes(512), dsv4.scale_bytes(512), dsv4.num_groups(512)) == (576, 8, 7)
    assert [f.name for f in mxkv.FORMATS.values() if f.amax_floor] == ["mxfp8", "dsv4", "mxfp8-inline"]


def test_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        mxkv.FORMATS["mxfp4"] = mxkv.FORMATS["nvfp4"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        mxkv.FORMATS["mxfp4"].group = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("d", "width"), [(32, 17), (64, 34), (96, 51), (192, 102), (320, 170), (576, 306), (1024, 544)]
)
def test_mxfp4_widths(d: int, width: int) -> None:
    assert mxkv.FORMATS["mxfp4"].record_bytes(d) == width
    assert mxkv.empty_cache("mxfp4", 2, 3, d).shape == (2, 3, width)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_sizes_agree_with_the_reference(format: Format) -> None:
    for d in range(1, 1100):
        if not format.accepts_dim(d):
            with pytest.raises(ValueError, match=str(d)):
                format.record_bytes(d)
            continue
        assert format.record_bytes(d) == reference.record_bytes(format, d)
        assert format.page_bytes(d, 7) == 7 * format.record_bytes(d)
        assert format.tokens_per_gib(d) == 2**30 // format.record_bytes(d)
        assert format.dims_of_width(format.record_width(d)) == [d]


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_dims_of_width_names_only_widths_that_fit(format: Format) -> None:
    for width in range(1, 700):
        for d in format.dims_of_width(width):
            assert format.record_width(d) == width


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_layout_gives_every_byte_of_a_page_to_one_record(format: Format, block_size: int) -> None:
    d = width_for(format, 96)
    layout = contiguous_layout(format, d, 2, block_size)
    size = format.cache_dtype.itemsize
    owners = np.zeros(2 * format.page_bytes(d, block_size), np.int64)
    for slot in range(2 * block_size):
        block, position = divmod(slot, block_size)
        values = (block * layout.block_stride + position * layout.value_stride) * size
        scales = (block * layout.block_stride + layout.scale_offset + position * layout.scale_stride) * size
        at_values, at_scales = reference.offsets(format, d, block_size, position)
        assert values == block * format.page_bytes(d, block_size) + at_values
        owners[values : values + format.value_bytes(d)] += 1
        if format.grouped:
            assert scales == block * format.page_bytes(d, block_size) + at_scales
            owners[scales : scales + format.scale_bytes(d)] += 1
    assert (owners == 1).all()


@pytest.mark.parametrize(
    ("dtype", "width", "latent_dim", "paged", "name", "dim"),
    [
        (torch.uint8, 272, None, True, "mxfp4", 512),
        (torch.uint8, 272, 512, False, "mxfp4", 512),
        (torch.uint8, 51, 96, True, "mxfp4", 96),
        (torch.uint8, 306, 576, True, "mxfp4", 576),
        (torch.uint8, 528, 512, True, "mxfp8", 512),
        (torch.uint8, 288, 512, True, "nvfp4", 512),
        (torch.uint8, 584, 512, True, "dsv4", 512),
        (torch.bfloat16, 512, None, False, "bf16", 512),
        (torch.float8_e4m3fn, 576, 576, True, "fp8", 576),
    ],
)
def test_inference(dtype: torch.dtype, width: int, latent_dim: int | None, paged: bool, name: str, dim: int) -> None:
    found, found_dim = infer_format(dtype, width, latent_dim, paged=paged)
    assert (found.name, found_dim) == (name, dim)


def test_ambiguous_width_lists_the_candidates() -> None:
    with pytest.raises(ValueError, match=r"ambiguous.*mxfp4.*576.*nvfp4.*544"):
        mxkv.load(torch.zeros(1, 4, 306, dtype=torch.uint8), torch.arange(1))


def test_page_format_is_meant_and_needs_a_3d_cache() -> None:
    with pytest.raises(ValueError, match=r"mxfp8.*mxfp8-inline.*3-D.*2-D"):
        mxkv.store(torch.zeros(8, 528, dtype=torch.uint8), torch.zeros(1, 512), torch.arange(1))
    mxkv.store(torch.zeros(8, 528, dtype=torch.uint8), torch.zeros(1, 512), torch.arange(1), format="mxfp8-inline")


def test_width_that_no_format_has() -> None:
    with pytest.raises(ValueError, match=r"271.*latent_dim 512.*mxfp4 272"):
        mxkv.store(torch.zeros(2, 4, 271, dtype=torch.uint8), torch.zeros(1, 512), torch.arange(1))


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_format_travels_as_a_string(format: Format) -> None:
    assert parse_format(format.spec) == format
    assert get_format(format) is format


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_formats_and_specs_can_be_copied_and_pickled(format: Format) -> None:
    spec = mxkv.explain("store", format=format, latent_dim=width_for(format)).spec
    assert format.spec
    for thing in (format, spec):
        assert pickle.loads(pickle.dumps(thing)) == thing
        assert copy.deepcopy(thing) == thing


def test_a_changed_builtin_does_not_travel_under_its_name() -> None:
    changed = dataclasses.replace(mxkv.FORMATS["mxfp4"], group=64)
    assert changed.spec != "mxfp4"
    assert parse_format(changed.spec) == changed


GROUPED = {"name": "x", "element": Element.E2M1, "scale": Scale.E8M0, "group": 32, "placement": Placement.INLINE}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": Placement.NONE}, "placement"),
        ({"scale": Scale.NONE}, "scales"),
        ({"scale": Scale.TENSOR, "placement": Placement.NONE}, "e2m1"),
        ({"element": Element.BF16}, "bf16"),
        ({"element": Element.E4M3, "scale": Scale.NONE, "placement": Placement.NONE}, "e4m3"),
        ({"group": 0}, "0"),
        ({"group": 31}, "31"),
        ({"group": -32}, "-32"),
        ({"tail": -2}, "-2"),
        ({"tail": 3}, "3"),
        ({"scale_padding": -1}, "-1"),
        ({"amax_floor": -1.0}, "-1.0"),
        ({"only_dim": 500}, "500"),
        ({"name": ""}, "name"),
        ({"name": "a b"}, "a b"),
        ({"name": "a;b=c"}, "a;b=c"),
    ],
)
def test_contradictions_are_errors(changes: dict[str, Any], words: str) -> None:
    Format(**GROUPED)
    with pytest.raises(ValueError, match=words):
        Format(**{**GROUPED, **changes})


def test_empty_cache() -> None:
    cache = mxkv.empty_cache("nvfp4", 3, 5, 96)
    assert (cache.dtype, cache.shape, cache.is_contiguous()) == (torch.uint8, (3, 5, 54), True)
    assert not cache.any()
    assert mxkv.empty_cache("bf16", 3, 5, 96).dtype == torch.bfloat16
    assert mxkv.empty_cache("fp8", 3, 5, 96).dtype == torch.float8_e4m3fn
    assert mxkv.empty_cache("mxfp4", 0, 5, 96).shape == (0, 5, 51)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_layout_of_a_padded_pool_keeps_the_offsets_inside_a_page(format: Format) -> None:
    d = width_for(format)
    width = format.record_width(d)
    stride = 4 * width + 8
    cache = torch.zeros(3 * stride, dtype=format.cache_dtype).as_strided((3, 4, width), (stride, width, 1))
    padded, plain = layout_of(cache, format, d), contiguous_layout(format, d, 3, 4)
    assert padded == dataclasses.replace(plain, block_stride=stride)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": "e2m1"}, "element must be of type Element, got 'e2m1'"),
        ({"scale": "e8m0"}, "scale must be of type Scale"),
        ({"placement": "inline"}, "placement must be of type Placement"),
        ({"group": 32.0}, "group must be of type int, got 32.0"),
        ({"scale_padding": 1.0}, "scale_padding must be of type int"),
        ({"tail": True}, "tail must be of type int, got True"),
        ({"name": 3}, "name must be of type str, got 3"),
    ],
)
def test_fields_of_a_wrong_type(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(mxkv.FORMATS["mxfp4"], **fields)


@pytest.mark.parametrize("floor", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_floor_must_be_a_finite_magnitude(floor: float) -> None:
    with pytest.raises(ValueError, match="amax_floor"):
        dataclasses.replace(mxkv.FORMATS["mxfp4"], amax_floor=floor)
