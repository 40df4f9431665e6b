"""The tuner: what it times, what it rejects and survives, what it keeps, and that nothing is measured outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import mxkv
from mxkv import dispatch, settings
from mxkv.autotune_cache import lookup, measure, shapes, trials, tuner, worker
from mxkv.autotune_cache.entries import Candidate, Entry, EntryStore, StoreError, config_to_json
from mxkv.autotune_cache.keys import canonical, key_of, layout_class, soft_of, spec_to_json
from mxkv.autotune_cache.shapes import Work
from mxkv.backends.torch_eager import latents
from mxkv.contracts import Backend, LoadSpec, Spec, StoreSpec
from mxkv.formats import FORMATS, Placement
from mxkv.paging import contiguous_layout
from tests import planted_backend as planted
from tests.support import width_for

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
MXFP4 = FORMATS["mxfp4"]
STORE = StoreSpec(CPU, MXFP4, 64, torch.bfloat16, contiguous_layout(MXFP4, 64, 4, 64))
LOAD = LoadSpec(CPU, MXFP4, 64, torch.bfloat16, contiguous_layout(MXFP4, 64, 4, 64))


@pytest.fixture
def cache(tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> Path:
    """The user's folder of entries."""
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "a cache, größer"))
    settings.reload()
    return tmp_path / "a cache, größer" / "tune" / "v1"


def planted_works(*buckets: int, spec: Spec = STORE) -> list[Work]:
    return [Work(spec, (size,), "planted") for size in buckets]


def run(backend: Backend, works: list[Work], **options: Any) -> list[tuner.Result]:
    with dispatch.added_backend(backend):
        return tuner.tune(works, **options)


def no_worker(*arguments: Any, **options: Any) -> None:
    raise AssertionError("a worker was started")


# The race.


def turns(*times: float, log: list[int] | None = None) -> list[Callable[[], float]]:
    """Samplers that always take the same time."""

    def sampler(index: int) -> Callable[[], float]:
        def sample() -> float:
            if log is not None:
                log.append(index)
            return times[index]

        return sample

    return [sampler(index) for index in range(len(times))]


def test_a_slow_candidate_is_dropped_and_the_fastest_three_are_timed_again() -> None:
    found, finished = measure.race(turns(30.0, 10.0, 12.0, 11.0, 13.0))
    plan = measure.Plan()
    assert finished
    assert found[0].count == plan.first
    assert found[4].count == plan.least
    assert all(found[i].count == plan.least + plan.first for i in (1, 2, 3))


def test_candidates_take_turns() -> None:
    log: list[int] = []
    measure.race(turns(10.0, 11.0, 12.0, log=log))
    assert [sorted(log[i : i + 3]) for i in range(0, len(log), 3)] == [[0, 1, 2]] * (len(log) // 3)


def test_a_burst_costs_a_candidate_neither_its_place_nor_the_race() -> None:
    noise = random.Random(1)
    calls = [0, 0]

    def sampler(index: int, us: float) -> Callable[[], float]:
        def sample() -> float:
            calls[index] += 1
            slow = 5.0 if index == 1 and calls[1] in (2, 3) else 1.0  # something else runs
            return us * slow * (1 + noise.random() / 100)

        return sample

    found, _ = measure.race([sampler(0, 20.0), sampler(1, 15.0)])
    assert found[1].count > measure.Plan().least
    assert measure.winner([found[0].median_us, found[1].median_us]) == 1


def test_noise_is_answered_with_more_samples() -> None:
    noise = random.Random(2)
    quiet, _ = measure.race([lambda: 10.0, lambda: 11.0])
    loud, _ = measure.race([lambda: 10 + noise.random(), lambda: 10 + noise.random()])
    assert loud[0].count > 2 * quiet[0].count


def test_the_race_ends_with_its_budget_and_keeps_what_counts() -> None:
    def slow() -> float:
        time.sleep(0.02)
        return 20_000.0

    found, finished = measure.race([slow, slow], budget_s=0.17)
    assert not finished
    assert all(measure.FEWEST <= timing.count <= 5 for timing in found.values())
    assert measure.race([slow], budget_s=0.0) == ({}, False)


def test_statistics_come_when_they_count_and_when_they_are_final() -> None:
    told: list[tuple[int, int]] = []
    found, _ = measure.race(turns(10.0, 11.0), on_timing=lambda index, timing: told.append((index, timing.count)))
    assert told[:2] == [(0, measure.FEWEST), (1, measure.FEWEST)]
    assert dict(told) == {index: timing.count for index, timing in found.items()}


def test_a_candidate_that_fails_is_out() -> None:
    def tired() -> float:
        raise RuntimeError("tired")

    failed: list[int] = []
    found, finished = measure.race([tired, lambda: 1.0], on_failure=lambda index, error: failed.append(index))
    assert finished
    assert failed == [0]
    assert list(found) == [1]
    with pytest.raises(RuntimeError, match="tired"):
        measure.race([tired])


def test_a_tie_goes_to_the_one_declared_first() -> None:
    assert measure.winner([10.1, 10.0]) == 0
    assert measure.winner([10.3, 10.0]) == 1
    assert measure.winner([None, 10.3, 10.19, 10.0]) == 2
    assert measure.winner([None]) is None
    assert measure.winner([10.1, 10.0, 10.15], default=2) == 2  # what is taken without tuning, where it is as good
    assert measure.winner([10.1, 10.0, 10.3], default=2) == 0
    assert measure.winner([10.1, 10.0, None], default=2) == 0


def test_percentiles() -> None:
    timing = measure.Timing.of([float(i) for i in range(11, 0, -1)])
    assert (timing.median_us, timing.p20_us, timing.p80_us, timing.count) == (6.0, 3.0, 9.0, 11)


# The calls.


@pytest.mark.parametrize("name", FORMATS)
def test_the_torch_backend_passes_its_own_check(name: str) -> None:
    format = FORMATS[name]
    dim = width_for(format)
    layout = contiguous_layout(format, dim, 4, 8)
    scaled = format.scale is mxkv.Scale.TENSOR
    store = StoreSpec(CPU, format, dim, torch.float16, layout, True, True, 2, scaled, "sanitize")
    load = LoadSpec(CPU, format, dim, torch.float32, layout, scaled)
    for spec in (store, load):
        operation = trials.operation_of(spec)
        config = latents.tunable(spec).space[0]
        calls = operation.check_calls(config)
        assert {((1,), 0), ((331,), 0), ((331,), 1), ((331,), 2)} <= set(calls)
        assert [operation.check("torch", config, *call) for call in calls] == [""] * len(calls)


def test_the_check_looks_at_the_edges_of_tiles() -> None:
    @dataclasses.dataclass
    class Config:
        block_tokens: int = 8
        elements: int = 128 * 64
        name: str = "x"

    found = {size for (size,) in trials.operation_of(STORE).check_sizes(Config())}
    assert {7, 8, 9, 127, 128, 129} <= found


@pytest.mark.parametrize("spec", [STORE, LOAD], ids=["store", "load"])
def test_the_check_finds_any_byte_that_is_wrong(spec: Spec) -> None:
    operation = trials.operation_of(spec)
    trial = operation.trial((5,))
    trial.run(operation.prepared("torch", trial.spec), None)
    assert operation.difference(trial) == ""
    written = trial.tensors[0 if isinstance(spec, StoreSpec) else 2]
    assert written is not None
    inside = slice(1024, 1024 + written.nbytes)
    for at in (0, 1023, 1024, inside.stop - 1, inside.stop, trial.whole.shape[0] - 1):
        trial.whole[at] ^= 1
        assert "1 of" in operation.difference(trial), at
        trial.whole[at] ^= 1
    assert operation.difference(trial) == ""


def test_a_load_may_give_another_nan() -> None:
    operation = trials.operation_of(LOAD)
    trial = operation.trial((64,))
    trial.run(operation.prepared("torch", trial.spec), None)
    out = trial.tensors[2]
    assert out is not None
    nan = out.isnan()
    assert nan.any()
    out.view(torch.int16)[nan] ^= 1
    assert operation.difference(trial) == ""
    out[nan] = 1.0
    assert "wrong bytes" in operation.difference(trial)


def test_the_inputs_are_nasty() -> None:
    spec = dataclasses.replace(STORE, positioned=True, rotate=True)
    trial = trials.operation_of(spec).trial((331,))
    cache, rows, slots, positions, table, _ = trial.tensors
    assert cache is not None
    assert rows is not None
    assert slots is not None
    assert positions is not None
    assert table is not None
    assert rows.isnan().any()
    assert rows.isinf().any()
    magnitudes = rows[rows.isfinite() & (rows != 0)].abs().float().log2()
    assert magnitudes.min() < -100
    assert magnitudes.max() > 100
    assert (rows.unflatten(1, (-1, 16)) == 0).all(-1).any()
    assert (slots < 0).any()
    assert (slots >= trial.spec.layout.num_slots).any()
    stored = slots[(slots >= 0) & (slots < trial.spec.layout.num_slots)]
    assert stored.unique().shape == stored.shape  # which of two equal slots wins is not specified on a GPU
    assert (positions < 0).any()
    assert (positions >= table.shape[0]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_that_are_not_aligned_are_drawn_too(dtype: torch.dtype) -> None:
    spec = dataclasses.replace(STORE, positioned=True, rotate=True, latent_dtype=dtype)
    store = trials.operation_of(spec)
    load = trials.operation_of(dataclasses.replace(LOAD, out_dtype=dtype))
    drawn: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
    for seed in (1, 2):
        cache, rows, *others = store.trial((331,), seed).tensors
        drawn.append((cache, rows, others[:2]))  # type: ignore[arg-type]
        cache, slots, rows, _ = load.trial((331,), seed).tensors
        drawn.append((cache, rows, [slots]))  # type: ignore[arg-type, list-item]
    size = dtype.itemsize
    assert [rows.data_ptr() % 16 for _, rows, _ in drawn] == [size, size, 4, 4]
    assert [rows.stride(0) % 2 for _, rows, _ in drawn] == [1, 1, 0, 0]
    assert all(rows.stride(0) % 16 for _, rows, _ in drawn)
    assert [cache.data_ptr() % 16 for cache, _, _ in drawn] == [1, 1, 2, 2]
    for _, _, indices in drawn:
        assert {(index.dtype, index.stride(0)) for index in indices} == {(torch.int32, 2)}


def _not_aligned(tensors: list[torch.Tensor]) -> dict[str, bool]:
    cache, rows, slots = tensors
    return {
        "odd rows": rows.data_ptr() % 4 != 0,
        "rows at 4 bytes": rows.data_ptr() % 16 == 4,
        "rows an odd distance apart": rows.stride(0) % 2 == 1,
        "int32 slots": slots.dtype == torch.int32,
        "slots of a stride": slots.stride(0) == 2,
        "cache at any byte": cache.data_ptr() % 2 == 1,
        "cache at 2 bytes": cache.data_ptr() % 4 == 2,
    }


@pytest.mark.parametrize("what", _not_aligned([torch.zeros(1, 1)] * 3))
@pytest.mark.parametrize("spec", [STORE, LOAD], ids=["store", "load"])
def test_a_candidate_that_needs_alignment_is_found_out(spec: Spec, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = (0, 1, 2) if isinstance(spec, StoreSpec) else (0, 2, 1)  # of the cache, the rows and the slots

    def prepare(self: planted.Operations, of: Spec) -> Callable[..., None]:
        run = latents.prepare(of)

        def call(*tensors: Any, config: Any) -> None:
            run(*tensors)
            written = tensors[0 if isinstance(spec, StoreSpec) else 2]
            if _not_aligned([tensors[i] for i in order])[what]:
                written[-1].view(torch.uint8).flatten()[0] ^= 1

        return call

    monkeypatch.setattr(planted.Operations, "prepare", prepare)
    with dispatch.added_backend(planted.SOUND):
        operation = trials.operation_of(spec)
        found = {call: operation.check("planted", planted.GOOD, *call) for call in operation.check_calls(planted.GOOD)}
    assert [reason for (_, seed), reason in found.items() if not seed and reason] == []
    assert any("wrong bytes" in reason and "that are not aligned" in reason for reason in found.values())


def test_pages_stand_in_random_order_and_tokens_one_after_another() -> None:
    layout = contiguous_layout(MXFP4, 64, 16, 64)
    slots = trials.page_order(1024, layout, torch.Generator().manual_seed(0)).unflatten(0, (-1, 64))
    assert torch.equal(slots - slots[:, :1], torch.arange(64).expand(16, 64))
    assert sorted(slots[:, 0].tolist()) == [64 * i for i in range(16)]
    assert slots[:, 0].tolist() != [64 * i for i in range(16)]


@pytest.mark.parametrize("spec", [STORE, LOAD], ids=["store", "load"])
def test_sets_are_cut_from_one_pool_that_the_cache_does_not_hold(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "cache_bytes", lambda device: 1 << 18)
    operation = trials.operation_of(spec)
    pool_spec, sets = operation.sets((256,), (1024,))
    assert len(sets) * operation.call_bytes((256,)) > 2 << 18
    place = 1 if isinstance(spec, LoadSpec) else 2
    slots = torch.cat([tensors[place] for tensors in sets])  # type: ignore[misc]
    assert slots.unique().shape == slots.shape
    assert pool_spec.layout.num_slots > int(slots.max())
    _, small = operation.sets((1,), (1024,))
    assert all(tensor.data_ptr() % 16 == 0 for tensors in small for tensor in tensors if tensor is not None)
    assert small[0][0] is sets[0][0]  # the same pool
    assert sum(t is not None and t.data_ptr() == sets[0][place].data_ptr() for t in small[0]) == 1  # type: ignore[union-attr]


def test_pages_that_stand_far_apart_are_moved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "spare_memory", lambda device: 1 << 22)
    for format in (MXFP4, FORMATS["nvfp4"], FORMATS["bf16"]):
        natural = contiguous_layout(format, 64, 4, 64)
        for more in (0, 2, 8, 16):
            layout = dataclasses.replace(natural, block_stride=natural.block_stride + (1 << 26) + more)
            spec = dataclasses.replace(STORE, format=format, layout=layout)
            found = trials.private_layout(spec, 256)
            size = format.cache_dtype.itemsize
            assert layout_class(found, size) == layout_class(layout, size)
            assert found.num_blocks * found.block_stride * size < 1 << 20
            operation = trials.operation_of(spec)
            assert operation.check("torch", latents.tunable(spec).space[0], (99,)) == ""
    assert format.placement is Placement.NONE
    with pytest.raises(trials.TooLarge, match="MiB"):
        trials.private_layout(STORE, 1 << 20)


def test_bytes_between_pages_are_guarded() -> None:
    layout = dataclasses.replace(STORE.layout, block_stride=STORE.layout.block_stride + 32)
    operation = trials.operation_of(dataclasses.replace(STORE, layout=layout))
    trial = operation.trial((5,))
    trial.run(operation.prepared("torch", trial.spec), None)
    assert operation.difference(trial) == ""
    trial.whole[1024 + layout.block_stride - 1] += 1
    assert "wrong bytes" in operation.difference(trial)


# What is tuned.


def test_presets_have_every_format_and_kind_of_call() -> None:
    works = shapes.works(CPU, preset="all")
    assert {work.spec.format.name for work in works} == set(FORMATS)
    kinds = {(w.spec.operation, getattr(w.spec, "rotate", False), w.spec.format.name) for w in works}
    assert len(kinds) == 3 * len(FORMATS)
    assert {work.buckets for work in works} == {(1 << n,) for n in range(21)}
    serving = shapes.works(CPU)
    assert {work.buckets[0] for work in serving} == {1, 16, 64, 256, 1024, 4096, 16384, 65536}
    assert set(serving) <= set(works)
    assert all(work.backend == "torch" for work in works)
    assert len({work.text for work in works}) == len(works)
    keys = {
        key_of(w.spec, w.buckets, backend=w.backend, tunable=shapes.tunable_of(w.spec, w.backend)) for w in works
    }  # fmt: skip
    assert len(keys) == len(works)


def test_filters() -> None:
    works = shapes.works(CPU, operations=["load"], formats=[MXFP4], latents=[64, 96, 97], tokens=[3, 4, 100])
    assert [(w.spec.operation, w.spec.latent_dim, w.buckets) for w in works] == [
        ("load", dim, (size,)) for dim in (64, 96) for size in (4, 128)
    ]
    with pytest.raises(ValueError, match="unknown operation rotate"):
        shapes.works(CPU, operations=["rotate"])
    with pytest.raises(ValueError, match="unknown preset"):
        shapes.works(CPU, preset="some")


def test_what_is_wrong_with_a_line_of_a_log_is_said_shortly(tmp_path: Path) -> None:
    good = {"spec": spec_to_json(STORE), "sizes": {"tokens": 100}, "backend": "torch"}
    lines = [
        "not a line",
        "[" * 100_000,
        json.dumps({**good, "sizes": {"tokens": "x" * 1000}}),
        json.dumps({**good, "spec": {**spec_to_json(STORE), "format": "x" * 1000}}),
        json.dumps({**good, "backend": "none such"}),
        json.dumps({**good, "spec": {**spec_to_json(STORE), "device": "cuda:3"}}),
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    works, wrong = shapes.works_of_log(tmp_path / "log", CPU)
    assert not works
    assert wrong[:2] == [f"line {number} is not a call: it is not JSON" for number in (1, 2)]
    assert wrong[2].startswith("line 3 is not a call: expected sizes above 0, got {")
    assert wrong[3].startswith("line 4 is not a call: ")
    assert wrong[4].startswith("line 5 cannot be tuned: unknown backend 'none such'")
    assert wrong[5] == "line 6 cannot be tuned: it is a call on cuda:3, and cpu is tuned"
    assert max(map(len, wrong)) < 200


def test_a_log_of_misses_is_read_and_its_bad_lines_are_reported(tmp_path: Path) -> None:
    good = {"spec": spec_to_json(STORE), "sizes": {"tokens": 100}, "backend": "torch"}
    lines = [
        json.dumps(good),
        "",
        json.dumps({**good, "sizes": {"tokens": 120}}),  # the same key
        json.dumps({**good, "sizes": {"tokens": 0}}),
        json.dumps({**good, "sizes": {"rows": 1}}),
        json.dumps({**good, "backend": "none such"}),
        json.dumps({**good, "spec": {**spec_to_json(STORE), "device": "cuda:3"}}),
        json.dumps({**good, "spec": {**spec_to_json(STORE), "format": "none such"}}),
        json.dumps([1]),
        json.dumps(good)[:40],
        "[" * 100_000,
        "\x00\x01",
    ]
    path = tmp_path / "log"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    works, wrong = shapes.works_of_log(path, CPU)
    assert works == [Work(STORE, (128,), "torch")]
    assert [line.split()[1] for line in wrong] == [str(n) for n in range(4, 14)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
def test_ranks_share_the_work_without_overlap(world_size: int) -> None:
    works = shapes.works(CPU, tokens=[1, 64])
    parts = [shapes.shard(works, rank, world_size) for rank in range(world_size)]
    assert sorted(w.text for part in parts for w in part) == sorted(w.text for w in works)
    if world_size <= 8:  # a kind of call is one rank's: its kernels compile once
        kinds = [{w.spec for w in part} for part in parts]
        assert all(not a & b for i, a in enumerate(kinds) for b in kinds[:i])
        assert max(map(len, parts)) <= len(works) / world_size + 2


# Tuning.


def test_wrong_and_crashing_candidates_are_rejected_and_tuning_goes_on(cache: Path) -> None:
    notes: list[str] = []
    before = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype(), dict(os.environ)
    launched = len(planted.launches)
    (result,) = run(
        planted.ROTTEN, planted_works(2), timeout_s=1.0, on_progress=lambda p: notes.append(p.note)
    )  # fmt: skip
    assert result.status == "tuned"
    assert result.entry is not None
    assert result.entry.best == config_to_json(planted.BEST)
    reasons = {c.config["mode"]: c.rejected for c in result.entry.candidates}
    expected = {
        "wrong": "wrong bytes: 1 of",
        "guard": "the first of the guards: expected 0xa5, got 0xa6",
        "kill": "the process was killed by SIGKILL",
        "hang": "timed out after 1 s",
        "exit": "SystemExit: 3",
        "raise": "ZeroDivisionError: of all | things",
        "late kill": "the process was killed by SIGKILL",
        "late raise": "RuntimeError: tired",
        "does not compile": "does not compile: RuntimeError: ptxas: a register too many",
    }
    assert set(reasons) == {*expected, "good"}
    for mode, reason in expected.items():
        assert reason in (reasons[mode] or ""), mode
        assert any(mode in note and reason in note for note in notes), mode
    assert reasons["good"] is None
    assert EntryStore(cache).read(result.key) == result.entry
    # All of that happened elsewhere.
    assert len(planted.launches) == launched
    after = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype(), dict(os.environ)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_key_without_a_sound_candidate_fails_and_has_no_entry(cache: Path) -> None:
    (result,) = run(planted.HOPELESS, planted_works(2))
    assert result.status == "failed"
    assert "every candidate was rejected: wrong bytes" in result.reason
    assert not list(cache.glob("*.json"))


def tuned(backend: Backend, *buckets: int) -> None:
    """Entries as a tuning of a planted backend leaves them, without one."""
    with dispatch.added_backend(backend):
        for work in planted_works(*buckets):
            EntryStore(lookup.resolver().store.folder).write(entry_of(work))


def entry_of(work: Work, **provenance: Any) -> Entry:
    tunable = shapes.tunable_of(work.spec, work.backend)
    key = key_of(work.spec, work.buckets, backend=work.backend, tunable=tunable)
    times = [100.0 + i for i in range(len(tunable.space))]
    candidates = tuple(
        Candidate(config_to_json(config), us, us, us, 9) for config, us in zip(tunable.space, times, strict=True)
    )
    default = config_to_json(tunable.default(*work.buckets))
    return Entry(key, soft_of(tunable), config_to_json(tunable.space[0]), candidates, default, provenance)


def test_what_was_tuned_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(planted.SOUND, planted_works(2, 16))
    assert [result.status for result in first] == ["tuned", "tuned"]
    written = {path: path.read_bytes() for path in cache.glob("*.json")}
    assert len(written) == 2
    monkeypatch.setattr(tuner, "Worker", no_worker)
    again = run(planted.SOUND, planted_works(2, 16))
    assert [(result.status, result.entry) for result in again] == [("kept", result.entry) for result in first]
    assert {path: path.read_bytes() for path in cache.glob("*.json")} == written
    # A cache with more pages is the same call.
    larger = dataclasses.replace(STORE, layout=contiguous_layout(MXFP4, 64, 99, 64))
    (same,) = run(planted.SOUND, [*planted_works(2), *planted_works(2, spec=larger)])
    assert same.status == "kept"


def test_a_new_candidate_is_timed_alone(cache: Path) -> None:
    tuned(planted.SOUND, 2)
    (result,) = run(planted.GROWN, planted_works(2))
    assert result.timed == 1
    assert result.entry is not None
    old, new = result.entry.candidates[:3], result.entry.candidates[3]
    assert [c.median_us for c in old] == [100.0, 101.0, 102.0]
    assert new.config == config_to_json(planted.GROWN.load().space[3])
    assert new.count >= measure.FEWEST
    assert len(list(cache.glob("*.json"))) == 2


def test_a_stale_key_is_tuned_first_and_all_of_it(cache: Path) -> None:
    tuned(planted.SOUND, 16)
    results = run(planted.CHANGED, planted_works(2, 16))
    assert [(r.work.buckets[0], r.status, r.timed) for r in results] == [(16, "tuned", 3), (2, "tuned", 3)]
    with dispatch.added_backend(planted.CHANGED):
        assert [state for _, _, state in tuner.Tuning(planted_works(2, 16)).plan()] == ["kept", "kept"]
    with dispatch.added_backend(planted.SOUND):
        assert [state for _, _, state in tuner.Tuning(planted_works(2, 16)).plan()] == ["stale", "stale"]


def test_an_unfinished_key_is_finished(cache: Path) -> None:
    with dispatch.added_backend(planted.SOUND):
        entry = entry_of(*planted_works(2), finished=False)
        entry = dataclasses.replace(entry, candidates=entry.candidates[:2])
        store = EntryStore(cache)
        store.write(entry)
        (result,) = tuner.tune(planted_works(2))
        assert result.status == "tuned"
        assert result.entry is not None
        assert len(result.entry.candidates) == 3
        assert result.entry.provenance["finished"] is True
        assert [c.median_us != 100.0 + i for i, c in enumerate(result.entry.candidates)] == [True] * 3
        (again,) = tuner.tune(planted_works(2))
        assert again.status == "kept"


def test_every_key_is_tuned_anew_where_that_is_asked_for(cache: Path) -> None:
    tuned(planted.SOUND, 2, 16)
    with dispatch.added_backend(planted.SOUND):
        assert [s for _, _, s in tuner.Tuning(planted_works(1, 2, 16), force=True).plan()] == [
            "new",
            "forced",
            "forced",
        ]
    results = run(planted.SOUND, planted_works(2), force=True)
    assert [(r.status, r.timed) for r in results] == [("tuned", 3)]
    entry = EntryStore(cache).read(results[0].key)
    assert entry is not None
    assert entry.best == config_to_json(planted.BEST)
    # What another set of choices has measured is not taken either.
    (grown,) = run(planted.GROWN, planted_works(16), force=True)
    assert grown.timed == 4


def test_an_entry_stays_until_all_of_its_successor_is_known(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(planted.SOUND, 2)
    before = {path: path.read_bytes() for path in cache.glob("*.json")}
    monkeypatch.setattr(tuner, "_FLUSH_S", 0.0)
    interrupt_after(monkeypatch, 2, 2)
    with pytest.raises(KeyboardInterrupt):
        run(planted.SOUND, planted_works(2), force=True)
    assert {path: path.read_bytes() for path in cache.glob("*.json")} == before


def test_a_spent_budget_leaves_the_rest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "Worker", no_worker)
        patch.setattr(tuner, "Compiling", no_worker)
        tuned(planted.SOUND, 2)
        results = run(planted.SOUND, planted_works(2, 16), budget_s=0.0)
    assert [r.status for r in results] == ["kept", "left"]

    # In the middle of a key: what counts is kept, and the key is not finished.
    race = tuner.Session.race

    def short(self: Any, work: Any, configs: Any, most: Any, budget_s: float | None, told: Any) -> bool:
        return race(self, work, configs, most, 0.5, told)

    monkeypatch.setattr(tuner.Session, "race", short)
    (result,) = run(planted.DRAGGING, planted_works(1))
    assert result.status == "partial"
    entry = EntryStore(cache).read(result.key)
    assert entry is not None
    assert entry.provenance["finished"] is False
    assert all(measure.FEWEST <= c.count < 7 for c in entry.candidates)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, tokens: int, timings: int) -> None:
    """Ctrl-C in the middle of a key, once so many timings of it are known."""
    ask = worker.Worker.ask

    def ask_until(self: worker.Worker, request: Any, **options: Any) -> Iterator[Any]:
        known = 0
        for event in ask(self, request, **options):
            yield event
            known += event["event"] == "timing"
            if request.get("sizes") == (tokens,) and known == timings:
                raise KeyboardInterrupt

    monkeypatch.setattr(worker.Worker, "ask", ask_until)


def test_an_interruption_keeps_what_was_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(progress: tuner.Progress) -> None:
        if progress.result is not None:
            done.append(progress.result)

    done: list[tuner.Result] = []
    interrupt_after(monkeypatch, 16, 2)
    with dispatch.added_backend(planted.SOUND):
        tuning = tuner.Tuning(planted_works(2, 16, 64), on_progress=interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuning.run()
    assert [result.work.buckets for result in done] == [(2,)]
    told = [(result.work.buckets, result.status, result.timed) for result in tuning.results]
    assert told == [((2,), "tuned", 3), ((16,), "partial", 2), ((64,), "left", 0)]
    assert tuning.results[1].entry == EntryStore(cache).read(tuning.results[1].key)
    entries = {entry.key.hard["tokens"]: entry for entry in EntryStore(cache).entries()}
    assert sorted(entries) == [2, 16]
    assert len(entries[16].candidates) == 2
    assert entries[16].provenance["finished"] is False


def test_an_unwritable_cache_is_found_out_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuner, "Worker", no_worker)
    with pytest.raises(StoreError, match=r"cannot write tuned configurations to .*file/tune"):
        run(planted.SOUND, planted_works(2), store=EntryStore(tmp_path / "file" / "tune"))


def test_two_tuners_keep_off_each_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and then finds what the first has tuned."""
    monkeypatch.setattr(tuner, "Worker", no_worker)
    cache.mkdir(parents=True)
    lock = filelock.FileLock(cache / "cpu.lock", thread_local=False)
    lock.acquire()
    waiting = threading.Event()
    results: list[tuner.Result] = []

    def told(progress: tuner.Progress) -> None:
        if "another tuner is at work on cpu" in progress.note:
            waiting.set()

    thread = threading.Thread(
        target=lambda: results.extend(run(planted.SOUND, planted_works(2), on_progress=told)), daemon=True
    )
    thread.start()
    assert waiting.wait(20)
    tuned(planted.SOUND, 2)
    assert not results
    lock.release()
    thread.join(20)
    assert [result.status for result in results] == ["kept"]


def test_calls_go_on_while_a_tuner_writes(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each look-up gives a default or an entry, never an error or a warning."""
    works = planted_works(*(1 << n for n in range(8)))
    rounds = 40

    def write() -> None:
        for number in range(rounds):
            for work in works:
                store.write(entry_of(work, number=number))

    with dispatch.added_backend(planted.SOUND):
        store = EntryStore(cache)
        entry_of(works[0])
        context = __import__("contextvars").copy_context()
        thread = threading.Thread(target=lambda: context.run(write))
        thread.start()
        seen = set()
        tunable = shapes.tunable_of(STORE, "planted")
        while thread.is_alive():
            lookup.resolver().changed()
            for work in works:
                seen.add(lookup.resolver().find(STORE, work.buckets, backend="planted", tunable=tunable).origin)
        thread.join()
    assert seen <= {"default", "cache"}
    assert "cache" in seen
    assert not caplog.records


def killed_at(monkeypatch: pytest.MonkeyPatch, do: str, times: int, event: str = "at") -> list[int]:
    """Kill workers from outside in the middle of an answer, so many times."""
    ask = worker.Worker.ask
    killed: list[int] = []

    def ask_and_die(self: worker.Worker, request: Any, **options: Any) -> Iterator[Any]:
        for one in ask(self, request, **options):
            if request["do"] == do and one["event"] == event and len(killed) < times:
                killed.append(self._process.pid)
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
            yield one

    monkeypatch.setattr(worker.Worker, "ask", ask_and_die)
    return killed


@pytest.mark.parametrize(
    ("backend", "do", "event"),
    [
        (planted.SOUND, "check", "at"),
        (planted.SOUND, "check", "drawn"),
        (planted.SOUND, "time", "timing"),
        (planted.COMPILED, "compile", "at"),
    ],
    ids=["check", "draw", "time", "compile"],
)
def test_a_worker_that_is_killed_from_outside_costs_no_candidate(
    backend: Backend, do: str, event: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killed_at(monkeypatch, do, 1, event)
    (result,) = run(backend, planted_works(2))
    assert len(killed) == 1
    assert result.status == "tuned", result.reason
    assert not result.rejected
    assert result.entry is not None
    assert len(result.entry.candidates) == len(backend.load().space)
    assert result.entry.best == config_to_json(planted.BEST)


def test_a_candidate_whose_worker_ends_twice_is_rejected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(monkeypatch, "check", 2)
    (result,) = run(planted.SOUND, planted_works(2))
    assert result.status == "tuned"
    (rejected,) = result.rejected
    assert rejected.rejected == "the process was killed by SIGKILL"


def test_what_calls_compile_is_compiled_ahead(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels are compiled anew for tensors that are aligned otherwise: that, too, is done side by side."""
    ask = worker.Worker.ask
    asked: list[dict[str, Any]] = []
    ends: list[str] = []

    def noted(self: worker.Worker, request: Any, **options: Any) -> Iterator[Any]:
        asked.append(request)
        for event in ask(self, request, **options):
            ends.append(event["event"])
            yield event

    monkeypatch.setattr(worker.Worker, "ask", noted)
    monkeypatch.setattr(tuner, "_COMPILES_AT_CALLS", ("cpu",))
    (result,) = run(planted.COMPILED, planted_works(2))
    assert result.status == "tuned", result.reason
    assert [request["config"]["delay_us"] for request in asked if request.get("ahead")] == [100, 20]
    assert "error" not in ends


# tuning().


def a_store(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mxkv.empty_cache("mxfp4", 4, 64, 64), torch.randn(tokens, 64).bfloat16(), torch.arange(tokens)


@contextlib.contextmanager
def counted_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[worker.Worker]]:
    started: list[worker.Worker] = []

    class Counted(worker.Worker):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(tuner, "Worker", Counted)
    yield started
    assert not any(one.alive for one in started)


def test_tuning_tunes_at_the_first_call_and_never_outside(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with dispatch.added_backend(planted.SOUND), counted_workers(monkeypatch) as started:
        pages, rows, slots = a_store()
        expected = pages.clone()
        mxkv.store(expected, rows, slots, backend="torch")
        planted.launches.clear()

        def store() -> planted.PlantedConfig:
            """How the call was launched; it was launched once."""
            given = rows.clone()
            pages.zero_()
            mxkv.store(pages, rows, slots, backend="planted")
            assert torch.equal(pages, expected)
            assert torch.equal(rows, given)
            ((name, config),) = planted.launches
            assert name == "planted"
            planted.launches.clear()
            return config

        assert store() == planted.GOOD  # the default
        assert not started
        with mxkv.tuning():
            assert not started
            assert store() == planted.BEST
            assert store() == planted.BEST
            assert len(started) == 1
            mxkv.store(
                pages, *(t.repeat(9, 1) if t.dim() > 1 else torch.arange(27) for t in (rows, slots)), backend="planted"
            )
            assert len(started) == 1  # one worker for the block
        planted.launches.clear()
        assert len(list(cache.glob("*.json"))) == 2
        assert store() == planted.BEST
        mxkv.store(pages, rows[:1], slots[:1], backend="planted")  # a bucket that was not tuned
        assert planted.launches.pop()[1] == planted.GOOD
        assert len(started) == 1
        with mxkv.tuning():
            assert store() == planted.BEST  # from the cache
            assert len(started) == 1
    assert not caplog.records


def test_tuning_keeps_what_it_cannot_write(
    tmp_path: Path, fresh_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "file"))
    settings.reload()
    with dispatch.added_backend(planted.SOUND), counted_workers(fresh_settings) as started:
        pages, rows, slots = a_store()
        with mxkv.tuning():
            for _ in range(2):
                mxkv.store(pages, rows, slots, backend="planted")
        mxkv.store(pages, rows, slots, backend="planted")
        assert [config for _, config in planted.launches[-3:]] == [planted.BEST] * 3
        assert len(started) == 1
    warnings = [record for record in caplog.records if "memory only" in record.getMessage()]
    assert len(warnings) == 1
    assert "cannot write" in warnings[0].getMessage()


def test_a_call_that_cannot_be_tuned_runs_all_the_same(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dispatch.added_backend(planted.SOUND), pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.sys, "executable", "/bin/false")
        pages, rows, slots = a_store()
        with mxkv.tuning():
            mxkv.store(pages, rows, slots, backend="planted")
        assert planted.launches[-1][1] == planted.GOOD
    assert any("is not tuned" in record.getMessage() for record in caplog.records)


def test_a_key_that_cannot_be_tuned_is_tried_once_in_a_block(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with dispatch.added_backend(planted.HOPELESS), counted_workers(monkeypatch) as started:
        for _ in range(2):
            caplog.clear()
            with mxkv.tuning():
                for tokens in (5, 6, 7):  # one bucket
                    pages, rows, slots = a_store(tokens)
                    mxkv.store(pages, rows, slots, backend="planted")
            assert sum("is not tuned" in record.getMessage() for record in caplog.records) == 1
        assert len(started) == 2
    with (
        dispatch.added_backend(planted.SOUND),
        pytest.MonkeyPatch.context() as patch,
        counted_workers(patch) as started,
    ):
        patch.setattr(worker.sys, "executable", "/bin/false")
        with mxkv.tuning():
            for tokens in (5, 6, 7):
                pages, rows, slots = a_store(tokens)
                mxkv.store(pages, rows, slots, backend="planted")
        assert len(started) == 1


def test_a_backend_that_is_not_tuned_need_not_be_importable(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lonely = dataclasses.replace(planted.HOPELESS, name="lonely")
    with dispatch.added_backend(lonely), dispatch.added_backend(planted.SOUND), mxkv.tuning():
        pages, rows, slots = a_store()
        mxkv.store(pages, rows, slots, backend="planted")
        assert planted.launches[-1][1] == planted.BEST
    assert not caplog.records


def test_a_backend_of_the_program_that_runs_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuner, "Worker", no_worker)

    def load() -> Any:
        return planted.SOUND.load()

    load.__module__ = "__main__"
    mine = dataclasses.replace(planted.SOUND, load=load)
    monkeypatch.setattr(sys.modules["__main__"], "MINE", mine, raising=False)
    with dispatch.added_backend(mine):
        with mxkv.tuning():
            for tokens in (1, 7, 8):
                pages, rows, slots = a_store(tokens)
                mxkv.store(pages, rows, slots, backend="planted")
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "cannot import the backend 'planted' from the program that runs (__main__)" in warning
        (result,) = tuner.tune(planted_works(2))
    assert (result.status, result.entry) == ("failed", None)
    assert "put it into a module of its own" in result.reason


def test_a_block_that_is_left_elsewhere_ends_its_worker(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except ValueError as error:
            raised.append(error)

    with dispatch.added_backend(planted.SOUND), counted_workers(monkeypatch) as started:
        try:
            block = mxkv.tuning()
            block.__enter__()
            pages, rows, slots = a_store()
            mxkv.store(pages, rows, slots, backend="planted")
            generation = lookup.resolver().generation
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
            assert len(raised) == 1
            assert lookup.resolver().generation > generation
            assert not started[0].alive
            mxkv.store(*a_store(100), backend="planted")  # the hook is still there, and does nothing any more
            assert len(started) == 1
        finally:
            lookup.tuner.set(None)


def test_nothing_is_tuned_where_the_defaults_are_asked_for(
    cache: Path, fresh_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_settings.setattr(tuner, "Worker", no_worker)
    fresh_settings.setenv("MXKV_TUNE", "off")
    settings.reload()
    with dispatch.added_backend(planted.SOUND):
        for _ in range(2):
            with mxkv.tuning():
                mxkv.store(*a_store(), backend="planted")
    assert planted.launches[-1][1] == planted.GOOD
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "MXKV_TUNE=off" in warning


@pytest.mark.parametrize("timeout_s", ["x", None, True, 0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_number(timeout_s: Any) -> None:
    expected = ValueError if type(timeout_s) in (int, float) else TypeError
    with pytest.raises(expected, match="timeout_s must be"), mxkv.tuning(timeout_s=timeout_s):
        pass


def test_nothing_is_tuned_while_a_graph_is_captured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "Worker", no_worker)
    pages, rows, slots = a_store()
    with dispatch.added_backend(planted.SOUND):
        with mxkv.tuning():
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
                mxkv.store(pages, rows, slots, backend="planted")
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), mxkv.tuning():
            pass
        mxkv.store(pages, rows, slots, backend="planted")  # outside it is a call like any other
    assert not list(cache.glob("*.json"))


# Workers.


def test_a_worker_that_does_not_start_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.sys, "executable", "/bin/false")
    with pytest.raises(
        worker.WorkerError, match="no worker process could be started for cpu: the process ended with 1"
    ):
        run(planted.SOUND, planted_works(2))


def test_a_backend_that_workers_cannot_import_is_named() -> None:
    lonely = dataclasses.replace(planted.SOUND, description="a copy that no module holds")
    with dispatch.added_backend(lonely), pytest.raises(ValueError, match="cannot import the backend 'planted'"):
        worker.place_of("planted")
    partial = dataclasses.replace(lonely, load=functools.partial(planted.SOUND.load))
    with dispatch.added_backend(partial), pytest.raises(ValueError, match="cannot import the backend 'planted'"):
        worker.place_of("planted")
    with dispatch.added_backend(planted.GROWN):
        assert worker.place_of("planted") == "tests.planted_backend:GROWN"
        assert worker.place_of("torch") is None


def test_a_worker_ends_with_its_tuner() -> None:
    code = (
        "import sys, time, torch\n"
        "from mxkv.autotune_cache.worker import Worker\n"
        "one = Worker(torch.device('cpu')).hello()\n"
        "print(one._process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    tuner_process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tuner_process.stdout is not None
    pid = int(tuner_process.stdout.readline())
    tuner_process.kill()
    tuner_process.wait()
    tuner_process.stdout.close()
    until = time.monotonic() + 20
    while time.monotonic() < until and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "\nState:\tZ" in status.read_text())


def test_a_step_that_hangs_ends_the_process_by_itself(tmp_path: Path) -> None:
    """Where the tuner is gone and a candidate hangs, the kernel's alarm ends it."""
    code = (
        "import torch, sys\n"
        "from mxkv.autotune_cache import worker\n"
        "worker._ALARM_MARGIN_S = 1\n"
        "server = worker.Server(sys.stdout, torch.device('cpu'), 0.0)\n"
        "server._alarm(True)\n"
        "while True: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


# The interpreted kernels.


@pytest.mark.triton
def test_interpreted_kernels_are_tuned(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not settings.triton_interpret():
        pytest.skip("triton: TRITON_INTERPRET=1 is not set")
    from mxkv.backends.triton_gpu import latents as kernels

    tunable = kernels.tunable

    def smaller(spec: Spec) -> Any:
        found = tunable(spec)
        return dataclasses.replace(found, space=(found.default(1), found.space[1]))

    monkeypatch.setattr(kernels, "tunable", smaller)
    for spec in (STORE, LOAD):
        (result,) = tuner.tune([Work(spec, (2,), "triton")], timeout_s=100)
        assert result.status == "tuned", result.reason
        assert result.entry is not None
        assert len(result.entry.candidates) == len({canonical(c.config) for c in result.entry.candidates}) == 2
        assert not result.rejected, result.rejected
        found = lookup.resolver().find(spec, (2,), backend="triton", tunable=smaller(spec))
        assert found.origin == "cache"
        assert config_to_json(found.config) == result.entry.best
