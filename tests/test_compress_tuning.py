"""The tuner's compressions: what they accept, what they refuse, what a preset makes of them, and a run of the tuner."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mxkv
from mxkv import contracts, settings
from mxkv.autotune_cache import lookup, shapes, trials
from mxkv.autotune_cache.keys import key_of, spec_from_json, spec_to_json
from mxkv.cli import make_app
from mxkv.contracts import CompressSpec, CompressStoreSpec
from mxkv.paging import contiguous_layout
from tests.compression_cases import DIM, RING_DIM, packed
from tests.support import Ops, cos_sin_table

CPU = torch.device("cpu")


def spec_of(ops: Ops, format: str | None = None, ratio: int = 2, capacity: int = 3, **fields: Any) -> contracts.Spec:
    """A kind of call; into pages of four slots where there is a format."""
    rings = torch.empty(2, capacity, RING_DIM, device="meta")
    fields |= {"device": ops.device, "compress_ratio": ratio, "state_cache": rings}
    if format is None:
        return mxkv.spec("compress_norm", **fields)
    layout = contiguous_layout(mxkv.FORMATS[format], DIM, 16, 4)
    return mxkv.spec("compress_store", format=format, layout=layout, scaled=format == "fp8", **fields)


CALLS: dict[str, dict[str, Any]] = {
    "norm": {},
    "ratio 1": {"ratio": 1},
    "other ranks": {"previous": True, "capacity": 1},
    "mxfp8": {"format": "mxfp8", "rotate": True},
    "dsv4": {"format": "dsv4", "rotate": True, "latents": True, "previous": True},
    "nvfp4": {"format": "nvfp4", "ratio": 1, "rotate": True, "nonfinite": "sanitize"},
    "bf16": {"format": "bf16", "capacity": 8},
    "fp8": {"format": "fp8", "rotate": True, "latents": True, "ratio": 1},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_default_is_right(ops: Ops, call: str) -> None:
    operation = trials.operation_of(spec_of(ops, **CALLS[call]))
    config = shapes.tunable_of(operation.spec, ops.backend).default(64)
    calls = operation.check_calls(config)
    assert {seed for _, seed in calls} == set(range(len(trials.STANDINGS)))
    for sizes, seed in calls[1::2] if ops.slow else calls:
        assert operation.check(ops.backend, config, sizes, seed) == ""


def test_trials_have_what_makes_calls_hard(ops: Ops) -> None:
    trial = trials.operation_of(spec_of(ops, "mxfp8", rotate=True, latents=True)).trial((21,))
    tokens, ring = trial.tensors[0], trial.tensors[0].ring  # type: ignore[union-attr]
    assert isinstance(tokens, contracts.Packed)
    starts = tokens.query_start.tolist()  # type: ignore[union-attr]
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    assert {1, 2, 5} <= set(lengths)
    positions, slots = tokens.positions, tokens.slots
    assert (positions[starts[:-1]] % 2 == 1).any()  # whose predecessors are in the rings
    assert {True, False} == set((positions >= 0).tolist())
    assert (slots < 0).any()
    assert (slots >= trial.spec.ring_layout.num_slots).any()  # type: ignore[union-attr]
    assert tokens.rows.isnan().any()
    assert ring.isinf().any()
    changed = {
        name: not torch.equal(trial.expected[part], trial.before[part])
        for name, part in trial.parts.items()  # type: ignore[attr-defined]
    }
    assert changed == {"latents": True, "rings": True, "cache": True}


def test_what_is_wrong_is_found(ops: Ops) -> None:
    operation = trials.operation_of(spec_of(ops, "mxfp4", rotate=True, latents=True))
    config = shapes.tunable_of(operation.spec, ops.backend).default(16)
    trial: Any = operation.trial((6,))
    for _ in range(2):  # a run finds the rings as they were
        trial.run(operation.prepared(ops.backend, trial.spec), config)
        assert operation.difference(trial) == ""
    for name, part in trial.parts.items():
        for at, where in (
            (part.start + 3, "guards"),
            (part.start + 1024 + 37, "at byte 37"),
            (part.stop - 1, "guards"),
        ):
            trial.whole[at] ^= 0x11
            assert operation.difference(trial).startswith(f"{name}: wrong bytes")
            assert where in operation.difference(trial)
            trial.whole[at] ^= 0x11
    assert operation.difference(trial) == ""


@pytest.mark.parametrize("call", ["norm", "ratio 1", "other ranks", "dsv4", "fp8"])
def test_sets_for_timing(ops: Ops, call: str) -> None:
    operation = trials.operation_of(spec_of(ops, **CALLS[call]))
    config = shapes.tunable_of(operation.spec, ops.backend).default(4)
    pool_spec, sets = operation.sets((6,), (8,))
    assert len(sets) > 1
    prepared = operation.prepared(ops.backend, pool_spec)
    for tensors in itertools.islice(sets, 2):
        prepared(*tensors, config=config)
        ring = tensors[0].ring  # type: ignore[union-attr]
        assert ring is None or torch.isfinite(ring).all()
    assert operation.call_bytes((64,)) > operation.call_bytes((32,))


def test_a_timed_call_is_one_that_the_public_functions_take() -> None:
    """Shapes, strides and dtypes are those that are checked, rings belong to one request each, latents are made."""
    ops = Ops("torch", CPU)
    for fields in CALLS.values():
        operation = trials.operation_of(spec_of(ops, **fields))
        pool_spec, sets = operation.sets((70,), (70,))
        tokens: Any = sets[-1][0]
        p = [tokens.rows, tokens.positions, tokens.ring, tokens.slots, tokens.query_start, tokens.token_to_request]
        p += [tokens.weight, tokens.eps, pool_spec.compress_ratio]  # type: ignore[union-attr]
        if isinstance(pool_spec, CompressSpec):
            out: Any = torch.zeros_like(sets[-1][1])  # type: ignore[arg-type]
            mxkv.compress_norm(*p, out, tokens.prev_rows, tokens.prev_row_indices, backend="torch")
            made = out.any(1)
        else:
            cache, slots, table, scale, out = sets[-1][1:]
            cache.zero_()  # type: ignore[union-attr]
            mxkv.compress_store(
                *p, cache, slots, tokens.prev_rows, tokens.prev_row_indices, out=out, format=pool_spec.format,
                cos_sin=table, cache_scale=scale, backend="torch",
            )  # fmt: skip
            made = mxkv.load(cache, slots, format=pool_spec.format, cache_scale=scale, latent_dim=DIM).any(1)  # type: ignore[arg-type]
        assert made.sum() >= (70 if pool_spec.compress_ratio == 1 else 32)  # type: ignore[union-attr]


def test_a_preset_has_compressions_where_they_are_asked_for() -> None:
    kinds = (CompressSpec, CompressStoreSpec)
    assert not any(isinstance(work.spec, kinds) for work in shapes.works(CPU))
    found = shapes.works(CPU, operations=["compress_norm"], tokens=[3, 64])
    texts = [work.text for work in found]
    assert texts == [f"compress_norm bf16 compress_ratio={r}, {n} tokens" for r in (1, 2) for n in (4, 64)]
    found = shapes.works(CPU, operations=["compress_store"], tokens=[64])
    assert len(found) == 2 * (len(mxkv.FORMATS) + 1)  # fp8 with a scale too
    assert found[1].text == "compress_store mxfp4 compress_ratio=2 rope, 64 tokens"
    assert not shapes.works(CPU, operations=["compress_norm", "compress_store"], latents=[576])
    for work in found:
        assert spec_from_json(json.loads(json.dumps(spec_to_json(work.spec)))) == work.spec
    other = spec_of(Ops("torch", CPU), "mxfp4", previous=True)
    assert shapes.describe(other) == "compress_store mxfp4 compress_ratio=2 previous block 4 rings of 3"


@pytest.mark.parametrize("ratio", [1, 2])
def test_calls_find_what_a_preset_tunes(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """The keys of calls of the public functions are those of the presets' kinds, and of mxkv.spec."""
    asked = []
    find = lookup.Resolver.find

    def noted(self: Any, spec: Any, buckets: Any, **options: Any) -> Any:
        asked.append(key_of(spec, buckets, backend=options["backend"], tunable=options["tunable"]))
        return find(self, spec, buckets, **options)

    monkeypatch.setattr(lookup.Resolver, "find", noted)
    call = packed([(0, 4)], 8)
    arguments = call.arguments(Ops("torch", CPU)) | {"compress_ratio": ratio}
    arguments["kv_score"] = call.kv_score[:, : ratio * DIM].contiguous()
    mxkv.compress_norm(**arguments, out=torch.empty(4, DIM).bfloat16(), backend="torch")
    cache = mxkv.empty_cache("mxfp8", 4, 64, DIM)
    mxkv.compress_store(
        **arguments, cache=cache, cache_slots=call.slots, format="mxfp8", cos_sin=cos_sin_table(8), backend="torch"
    )
    format = mxkv.FORMATS["mxfp8"]
    found = [
        work
        for name, formats in (("compress_norm", []), ("compress_store", [format]))
        for work in shapes.works(CPU, operations=[name], formats=formats, tokens=[4], backend="torch")
        if work.spec.compress_ratio == ratio  # type: ignore[union-attr]
    ]
    named: list[Any] = [
        mxkv.spec("compress_norm", compress_ratio=ratio),
        mxkv.spec("compress_store", format=format, compress_ratio=ratio, rotate=True),
    ]
    for specs in ([work.spec for work in found], named):
        keys = [key_of(s, (4,), backend="torch", tunable=shapes.tunable_of(s, "torch")) for s in specs]
        assert {*keys} <= {*asked}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_strict_calls_run_once_they_are_tuned(tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    """One of them in a block of tuning, the other by the command, from the log of misses."""
    log = str(tmp_path / "misses")
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "cache"))
    fresh_settings.setenv("MXKV_TUNE", "strict")
    fresh_settings.setenv("MXKV_LOG_MISSES", log)
    settings.reload()
    call = packed([(0, 2)], 8)
    arguments = call.arguments(Ops("torch", CPU))
    out, cache = torch.empty(2, DIM).bfloat16(), mxkv.empty_cache("bf16", 1, 64, DIM)
    stored: dict[str, Any] = {"cache": cache, "cache_slots": call.slots, "cos_sin": cos_sin_table(8), "format": "bf16"}
    with pytest.raises(mxkv.MissingConfigError, match="operation=compress_norm"):
        mxkv.compress_norm(**arguments, out=out, backend="torch")
    with pytest.raises(mxkv.MissingConfigError, match="operation=compress_store"):
        mxkv.compress_store(**arguments, **stored, backend="torch")
    with mxkv.tuning():
        mxkv.compress_norm(**arguments, out=out, backend="torch")
    (entry,) = lookup.resolver().store.entries()
    assert entry.key.hard["operation"] == "compress_norm"
    assert len(entry.candidates) > 1
    assert not any(candidate.rejected for candidate in entry.candidates)
    assert "1 keys (1 tuned)" in invoke("tune", "--from-log", log, "--device", "cpu", "--op", "compress_store")
    mxkv.compress_norm(**arguments, out=out, backend="torch")
    mxkv.compress_store(**arguments, **stored, backend="torch")
    assert torch.equal(out[1, :448], cache[0, 1, :448])
    with mxkv.use_backend("torch"):
        mxkv.warmup([mxkv.spec("compress_norm"), mxkv.spec("compress_store", format="bf16", rotate=True)], tokens=2)
    text = "compress_store bf16 compress_ratio=2 rope, 2 tokens"
    (row,) = json.loads(invoke("configs", "list", "--user", "--op", "compress_store", "--json"))["entries"]
    assert row["call"] == text
    assert "ring_layout" in invoke("configs", "show", row["key"])
    assert "0 bad, 0 stale" in invoke("configs", "verify")


def test_nothing_is_looked_up_for_rows_that_are_only_saved(
    ops: Ops, tmp_path: Path, fresh_settings: pytest.MonkeyPatch
) -> None:
    misses = tmp_path / "misses"
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path))
    fresh_settings.setenv("MXKV_TUNE", "strict")
    fresh_settings.setenv("MXKV_LOG_MISSES", str(misses))
    settings.reload()
    ring = torch.zeros(2, 3, RING_DIM, device=ops.device)
    with mxkv.tuning():
        mxkv.save_ring_rows(torch.ones(2, RING_DIM, device=ops.device), ops.slots(4, 1), ring, backend=ops.backend)
    assert ring.flatten(0, 1).any(1).tolist() == [False, True, False, False, True, False]
    with mxkv.use_backend(ops.backend):
        mxkv.warmup(mxkv.spec("save_ring_rows", device=ops.device), tokens=[2, 64])
    assert not misses.exists()
    assert not list(lookup.resolver().store.entries())
