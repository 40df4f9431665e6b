"""The tuner's calls of attend: what they accept, what they refuse, and what a preset makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch

import mxkv
from mxkv.autotune_cache import shapes, trials
from mxkv.contracts import SELECTIONS, AttendSpec
from mxkv.paging import contiguous_layout
from tests.support import Ops, name_of


def spec_of(ops: Ops, name: str = "mxfp4", selection: str = "dense", **fields: object) -> AttendSpec:
    format = mxkv.FORMATS[name]
    dim = format.only_dim or 64
    layout = contiguous_layout(format, dim, num_blocks=16, block_size=4)
    return AttendSpec(ops.device, format, dim, torch.bfloat16, layout, 3, dim, selection, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "bf16", "fp8"], ids=name_of)
def test_the_default_is_right(ops: Ops, format: str, selection: str) -> None:
    spec = spec_of(ops, format, selection, scaled=format == "fp8", sinked=format == "bf16", lse=format == "mxfp4")
    operation = trials.operation_of(spec)
    tunable = shapes.tunable_of(spec, ops.backend)
    config = tunable.default(4, 64)
    assert config in tunable.space
    for sizes in operation.check_sizes(config):
        assert operation.check(ops.backend, config, sizes) == ""


def test_what_is_wrong_is_found(ops: Ops) -> None:
    spec = spec_of(ops)
    operation = trials.operation_of(spec)
    config = shapes.tunable_of(spec, ops.backend).default(4, 64)
    trial = operation.trial((2, 9))
    trial.run(operation.prepared(ops.backend, trial.spec), config)
    assert operation.difference(trial) == ""
    out = trial.tensors[2]
    assert out is not None
    good = out.clone()
    for value in (float("nan"), float(good[1, 2, 5]) + 1.0):
        out[1, 2, 5] = value
        assert "wrong values" in operation.difference(trial)
        out.copy_(good)
    for at in (3, -3):
        trial.whole[at] += 1
        assert "guards" in operation.difference(trial)
        trial.whole[at] -= 1
    assert operation.difference(trial) == ""


@pytest.mark.parametrize("selection", SELECTIONS)
def test_sets_for_timing(ops: Ops, selection: str) -> None:
    operation = trials.operation_of(spec_of(ops, selection=selection))
    config = shapes.tunable_of(operation.spec, ops.backend).default(2, 16)
    pool_spec, sets = operation.sets((2, 16), (4, 16))
    assert len(sets) > 1
    prepared = operation.prepared(ops.backend, pool_spec)
    for tensors in itertools.islice(sets, 2):
        prepared(*tensors, config=config)
        assert tensors[2] is not None
        assert torch.isfinite(tensors[2]).all()
    assert operation.call_bytes((4, 16)) == 2 * operation.call_bytes((2, 16))


def test_a_preset_has_attention_where_it_is_asked_for() -> None:
    device = torch.device("cpu")
    assert not any(isinstance(work.spec, AttendSpec) for work in shapes.works(device))
    found = shapes.works(device, operations=["attend"], formats=[mxkv.FORMATS["mxfp4"]], tokens=[3, 64])
    assert [work.buckets for work in found] == [(4, 2048), (64, 2048)] * len(shapes.ATTEND_HEADS)
    assert "attend mxfp4 heads=16 value_dim=512, 4 queries, 2048 rows" in [work.text for work in found]
