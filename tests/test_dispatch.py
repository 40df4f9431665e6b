"""Who runs a call: verdicts with reasons, precedence, the environment, memoised plans, targets."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mxkv
from mxkv import contracts, devices, dispatch, settings
from mxkv.contracts import YES, Backend, LoadSpec, Spec, StoreSpec, Verdict
from mxkv.paging import contiguous_layout
from tests.support import rows_of

CPU = torch.device("cpu")


class Recorder:
    """A backend that does nothing and counts what is asked of it."""

    def __init__(self, name: str, priority: int = -5, **fields: Any) -> None:
        self.calls: list[Spec] = []
        self.asked = 0
        self.loads = 0
        self.reasons: tuple[str, ...] = ()
        self.operations = SimpleNamespace(store=self.run, load=self.run)
        arguments: dict[str, Any] = {
            "description": "for tests",
            "probe": lambda device: YES,
            "supports": self.supports,
            "load": self.load,
            "operations": frozenset({"store", "load"}),
            **fields,
        }
        self.backend = Backend(name, priority, **arguments)

    def run(self, spec: Spec, *arguments: Any) -> None:
        self.calls.append(spec)

    def supports(self, spec: Spec) -> Verdict:
        self.asked += 1
        return Verdict(self.reasons)

    def load(self) -> Any:
        self.loads += 1
        return self.operations


@pytest.fixture
def low(fresh_settings: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A backend of lower priority than the torch one."""
    recorder = Recorder("low")
    with dispatch.added_backend(recorder.backend):
        yield recorder


@pytest.fixture
def high(fresh_settings: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A backend of the highest priority."""
    recorder = Recorder("high", priority=10**6)
    with dispatch.added_backend(recorder.backend):
        yield recorder


def store_one(**arguments: Any) -> torch.Tensor:
    cache = mxkv.empty_cache("mxfp4", 2, 4, 64)
    mxkv.store(cache, rows_of(1, 64), torch.tensor([3]), **arguments)
    return cache


def store_spec(**fields: Any) -> StoreSpec:
    format = mxkv.FORMATS["mxfp4"]
    return StoreSpec(CPU, format, 64, torch.float32, contiguous_layout(format, 64, 2, 4), **fields)


# Choice.


def test_the_highest_priority_that_can_run_is_taken(high: Recorder) -> None:
    assert not store_one().any()
    assert [spec.operation for spec in high.calls] == ["store"]
    assert dispatch.backends()[0].name == "high"


def test_one_that_cannot_run_is_passed_over(high: Recorder, fresh_settings: pytest.MonkeyPatch) -> None:
    high.reasons = ("no",)
    assert store_one().any()
    assert not high.calls


def test_a_lower_priority_runs_only_if_named(low: Recorder) -> None:
    assert store_one().any()
    assert not low.calls
    assert not store_one(backend="low").any()
    assert len(low.calls) == 1


def test_a_forced_backend_never_falls_back(low: Recorder) -> None:
    low.reasons = ("it wants the moon", "it wants the stars")
    cache = mxkv.empty_cache("mxfp4", 2, 4, 64)
    call = (cache, rows_of(1, 64), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"low.*store of mxfp4.*wants the moon.*wants the stars"):
        mxkv.store(*call, backend="low")
    with mxkv.use_backend("low"), pytest.raises(ValueError, match="wants the moon"):
        mxkv.store(*call)
    with mxkv.use_backend("low"), pytest.raises(ValueError, match="wants the moon"):
        mxkv.load(cache, torch.tensor([3]))
    assert not cache.any()


def test_a_backend_whose_probe_refuses_says_why(fresh_settings: pytest.MonkeyPatch) -> None:
    recorder = Recorder("absent", probe=lambda device: Verdict((f"no driver on {device}",), hint="install one"))
    with (
        dispatch.added_backend(recorder.backend),
        pytest.raises(ValueError, match=r"absent.*no driver on cpu.*install one"),
    ):
        store_one(backend="absent")
    assert recorder.asked == 0


def test_a_backend_without_the_operation_says_what_it_has(fresh_settings: pytest.MonkeyPatch) -> None:
    recorder = Recorder("reader", operations=frozenset({"load"}))
    with dispatch.added_backend(recorder.backend), pytest.raises(ValueError, match=r"reader.*no store.*load"):
        store_one(backend="reader")


def test_unknown_names_list_the_known_ones(fresh_settings: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'nvcc'.*torch"):
        store_one(backend="nvcc")
    with pytest.raises(ValueError, match=r"unknown backend 'nvcc'.*torch"), mxkv.use_backend("nvcc"):
        pass


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="torch"), dispatch.added_backend(Recorder("torch").backend):
        pass


def test_names_end_with_their_block() -> None:
    with dispatch.added_backend(Recorder("brief").backend):
        assert "brief" in {b.name for b in dispatch.backends()}
    with pytest.raises(ValueError, match="brief"):
        store_one(backend="brief")


# Precedence: backend=, then use_backend, then MXKV_BACKEND, then priority.


def test_precedence(low: Recorder, high: Recorder, fresh_settings: pytest.MonkeyPatch) -> None:
    def who(**arguments: Any) -> str:
        before = len(low.calls), len(high.calls)
        store_one(**arguments)
        after = len(low.calls), len(high.calls)
        return {(0, 0): "torch", (1, 0): "low", (0, 1): "high"}[after[0] - before[0], after[1] - before[1]]

    assert who() == "high"
    fresh_settings.setenv("MXKV_BACKEND", "low")
    settings.reload()
    assert who() == "low"
    with mxkv.use_backend("torch"):
        assert who() == "torch"
        assert who(backend="high") == "high"
        with mxkv.use_backend("high"):
            assert who() == "high"
        assert who() == "torch"
    assert who() == "low"
    assert who(backend="torch") == "torch"


def test_use_backend_ends_after_an_error(low: Recorder) -> None:
    with pytest.raises(RuntimeError), mxkv.use_backend("low"):
        raise RuntimeError
    assert store_one().any()


def test_use_backend_holds_for_its_own_thread_only(low: Recorder) -> None:
    caches = []
    with mxkv.use_backend("low"):
        thread = threading.Thread(target=lambda: caches.append(store_one()))
        thread.start()
        thread.join()
    assert caches[0].any()


# The environment.


def test_unknown_backend_in_the_environment(fresh_settings: pytest.MonkeyPatch) -> None:
    fresh_settings.setenv("MXKV_BACKEND", "tritonn")
    settings.reload()
    with pytest.raises(ValueError, match=r"tritonn.*torch"):
        store_one()
    with pytest.raises(ValueError, match=r"tritonn.*torch"):
        mxkv.load(mxkv.empty_cache("mxfp4", 2, 4, 64), torch.tensor([3]))
    assert store_one(backend="torch").any()


def test_an_empty_variable_is_none(fresh_settings: pytest.MonkeyPatch) -> None:
    fresh_settings.setenv("MXKV_BACKEND", "")
    settings.reload()
    assert settings.current().backend is None
    assert store_one().any()


def test_unknown_variables_are_warned_of_once(
    fresh_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_settings.setenv("MXKV_BACKENDS", "torch")
    settings.reload()
    with caplog.at_level(logging.WARNING, logger="mxkv"):
        store_one()
        store_one(nonfinite="sanitize")
    warned = [r.getMessage() for r in caplog.records if "MXKV_BACKENDS" in r.getMessage()]
    assert len(warned) == 1
    assert "MXKV_BACKEND," in warned[0]
    assert "MXKV_TARGET" in warned[0]


def test_unknown_target_in_the_environment(fresh_settings: pytest.MonkeyPatch) -> None:
    fresh_settings.setenv("MXKV_TARGET", "hoper")
    settings.reload()
    with pytest.raises(ValueError, match=r"hoper.*hopper"):
        devices.target_of(CPU)
    for call in (store_one, lambda: mxkv.explain("store")):
        with pytest.raises(ValueError, match=r"MXKV_TARGET.*hoper.*hopper"):
            call()


def test_target_in_the_environment(fresh_settings: pytest.MonkeyPatch) -> None:
    assert devices.target_of(CPU).name == "cpu"
    fresh_settings.setenv("MXKV_TARGET", "gfx950")
    settings.reload()
    assert devices.target_of(CPU).name == "gfx950"
    assert mxkv.explain("store").target == "gfx950"


# explain.


def test_explain(low: Recorder, high: Recorder) -> None:
    high.reasons = ("no such unit", "and no such dtype")
    found = mxkv.explain("store", format="nvfp4", device="cpu")
    assert found.chosen == "torch"
    assert found.verdicts["torch"].ok
    assert found.verdicts["high"].reasons == high.reasons
    text = str(found)
    assert text.splitlines()[0] == "store of nvfp4 on cpu (target cpu): torch runs it"
    for name, words in (("torch", "chosen"), ("high", "no such unit; and no such dtype"), ("low", "lower priority")):
        assert any(line.split()[0] == name and words in line for line in text.splitlines()[1:])


def test_explain_agrees_with_what_runs(low: Recorder, high: Recorder) -> None:
    for name in (None, "low", "torch", "high"):
        chosen = mxkv.explain("store", latent_dim=64, dtype=torch.float32, backend=name).chosen
        before = len(low.calls), len(high.calls)
        store_one(backend=name)
        assert (len(low.calls) > before[0], len(high.calls) > before[1]) == (chosen == "low", chosen == "high")


def test_explain_of_a_forced_backend(low: Recorder) -> None:
    found = mxkv.explain("load", backend="low")
    assert (found.chosen, found.forced) == ("low", "low")
    assert "torch" in str(found)
    low.reasons = ("not today",)
    found = mxkv.explain("load", backend="low")
    assert found.chosen is None
    assert "no backend can run it" in str(found)
    assert "not today" in str(found)


def test_explain_passes_the_calls_fields_on(low: Recorder) -> None:
    specs: list[Spec] = []
    recorder = Recorder("listener", supports=lambda spec: specs.append(spec) or YES)  # type: ignore[func-returns-value]
    with dispatch.added_backend(recorder.backend):
        mxkv.explain("store", latent_dim=128, compress_ratio=2, positioned=True, nonfinite="sanitize")
    spec = specs[-1]
    assert isinstance(spec, StoreSpec)
    assert (spec.latent_dim, spec.compress_ratio, spec.positioned, spec.nonfinite) == (128, 2, True, "sanitize")


def test_explain_of_a_device_that_is_not_here(fresh_settings: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = mxkv.explain("store", device="cuda")
    assert found.chosen is None
    assert found.verdicts["torch"].reasons
    assert "cuda" in str(found)


def test_nothing_can_run(fresh_settings: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="torch"):
        dispatch.plan(dataclasses.replace(store_spec(), device=torch.device("xpu", 0)))


# Memoised plans.


def test_a_kind_of_call_is_planned_once(high: Recorder) -> None:
    cache = mxkv.empty_cache("mxfp4", 2, 4, 64)
    for n in (1, 3, 2):
        mxkv.store(cache, rows_of(n, 64), torch.arange(n))
        mxkv.load(cache, torch.arange(n))
    assert (high.asked, high.loads, len(high.calls)) == (2, 2, 6)
    assert high.calls[0] == high.calls[2]
    mxkv.store(cache, rows_of(1, 64, torch.bfloat16), torch.arange(1))
    assert high.asked == 3


def test_another_kind_of_call_is_another_plan(high: Recorder) -> None:
    """Whatever a spec holds makes another plan: nothing stale is reused."""
    cache, rows, slots = mxkv.empty_cache("mxfp4", 2, 4, 64), rows_of(2, 64), torch.arange(2)
    table = torch.ones(4, 64)
    page, wide = torch.zeros(8, 34, dtype=torch.uint8), torch.zeros(2, 4, 40, dtype=torch.uint8)[..., :34]
    calls: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = [
        (cache, rows, {}),
        (cache, rows.half(), {}),
        (cache, rows, {"nonfinite": "sanitize"}),
        (cache, rows, {"positions": slots}),
        (cache, rows, {"positions": slots, "cos_sin": table}),
        (cache, rows, {"positions": slots, "cos_sin": table, "compress_ratio": 2}),
        (cache, rows, {"positions": slots, "compress_ratio": 2}),
        (page, rows, {}),
        (wide, rows, {}),
        (torch.zeros(3, 4, 34, dtype=torch.uint8), rows, {}),
        (torch.zeros(2, 5, 34, dtype=torch.uint8), rows, {}),
        (mxkv.empty_cache("mxfp4", 2, 4, 96), rows_of(2, 96), {}),
        (mxkv.empty_cache("fp8", 2, 4, 64), rows, {}),
        (mxkv.empty_cache("fp8", 2, 4, 64), rows, {"cache_scale": 2.0}),
    ]
    for call_cache, latent, arguments in calls + calls:
        mxkv.store(call_cache, latent, slots, **arguments)
    first, second = high.calls[: len(calls)], high.calls[len(calls) :]
    assert first == second
    assert len(set(first)) == len(calls)
    assert high.asked == len(calls)


def test_plan(low: Recorder) -> None:
    spec = store_spec()
    bound = mxkv.plan(spec, "low")
    assert mxkv.plan(spec, "low") is bound
    assert low.asked == 1
    bound(1, 2, 3)
    assert low.calls == [spec]
    cache, want = mxkv.empty_cache("mxfp4", 2, 4, 64), store_one()
    mxkv.plan(spec)(cache, rows_of(1, 64), torch.tensor([3]), None, None, None)
    assert torch.equal(cache, want)


def test_forgotten_plans_are_made_again(high: Recorder) -> None:
    store_one()
    settings.reload()
    store_one()
    assert high.asked == 2


def test_zero_tokens_reach_no_backend(high: Recorder) -> None:
    cache = mxkv.empty_cache("mxfp4", 2, 4, 64)
    mxkv.store(cache, rows_of(2, 64), torch.arange(0))
    assert mxkv.load(cache, torch.arange(0)).shape == (0, 64)
    assert not high.calls


def test_a_backend_sees_as_many_rows_as_slots(high: Recorder) -> None:
    seen: list[tuple[int, ...]] = []
    high.operations.store = lambda spec, cache, latent, slots, positions, *rest: seen.append(
        (latent.shape[0], slots.shape[0], positions.shape[0])
    )
    cache = mxkv.empty_cache("mxfp4", 2, 4, 64)
    mxkv.store(cache, rows_of(5, 64), torch.arange(2), positions=torch.arange(4))
    assert seen == [(2, 2, 2)]


def test_bad_input_reaches_no_backend(high: Recorder) -> None:
    with pytest.raises(ValueError, match=r"34.*51"):
        mxkv.store(mxkv.empty_cache("mxfp4", 2, 4, 64), rows_of(1, 96), torch.arange(1))
    assert not high.calls


# Verdicts, specs, targets.


def test_verdicts_add_up() -> None:
    assert YES.ok
    both = Verdict(("a",), "try b") & Verdict(("c",))
    assert (both.ok, both.reasons, both.hint) == (False, ("a", "c"), "try b")
    assert (YES & YES).ok


def test_specs_can_be_keys() -> None:
    assert store_spec() == store_spec()
    assert hash(store_spec()) == hash(store_spec())
    assert store_spec(rotate=True) != store_spec()
    assert {StoreSpec.operation, LoadSpec.operation} == {"store", "load"}
    assert contracts.ROPE_DIM == 64


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "cuda"), ((8, 0), "ampere"), ((8, 6), "ampere"), ((8, 9), "ada"), ((9, 0), "hopper"),
        ((10, 0), "blackwell"), ((6, 1), "cuda"), ((3, 5), "cuda"),
    ],
)  # fmt: skip
def test_nvidia_targets(capability: tuple[int, int], name: str) -> None:
    assert devices.nvidia_target(capability).name == name


@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [((5, 0), 48), ((6, 1), 48), ((7, 0), 96), ((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227),
     ((10, 0), 227), ((12, 0), 99)],
)  # fmt: skip
def test_shared_memory_is_the_capabilitys_own(capability: tuple[int, int], kilobytes: int) -> None:
    assert devices.nvidia_target(capability).shared_memory == kilobytes << 10


@pytest.mark.parametrize(
    ("arch", "name"),
    [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx950", "gfx950"), ("gfx90a", "rocm"), ("gfx1100", "rocm")],
)
def test_amd_targets(arch: str, name: str) -> None:
    assert devices.amd_target(arch).name == name


def test_what_targets_can_do() -> None:
    targets = devices.TARGETS
    assert set(targets) == {"gfx950", "gfx942", "hopper", "ampere", "ada", "blackwell", "cuda", "rocm", "cpu"}
    assert {name for name, t in targets.items() if t.fp4_unpack} == {"gfx950", "blackwell"}
    assert targets["gfx942"].fp8 == "fnuz"
    assert targets["ampere"].fp8 == "e4b15"
    assert {name for name, t in targets.items() if t.fp8 == "e4nv"} == {"gfx950", "hopper", "ada", "blackwell"}
    assert {name for name, t in targets.items() if t.warp_size == 64} == {"gfx950", "gfx942", "rocm"}


def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"cuda:99"):
        devices.describe(torch.device("cuda", 99))
    with pytest.raises(ValueError, match=r"cpu or cuda.*meta"):
        devices.describe(torch.device("meta"))


def test_this_cpu() -> None:
    found = devices.describe(CPU)
    assert (found.target.name, found.compute_units) == ("cpu", torch.get_num_threads())
