"""Fixtures: which backend, on which device, a test runs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import mxkv
from mxkv import dispatch
from mxkv import settings as mxkv_settings
from tests.support import Ops

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
MOST_SIMULATED = 3
SIMULATE = mxkv_settings.numba_simulated()

settings.register_profile(
    "mxkv",
    deadline=None,
    derandomize=True,
    max_examples=3 if INTERPRET or SIMULATE else 60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mxkv")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tests run side by side; shapes are small


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="under Numba's simulator, too, every case of every test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Numba's simulator runs a thread of Python for each of a GPU's: of a test's many cases it takes a few."""
    if not SIMULATE or config.getoption("--all-cases"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("numba"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {item for of_test in cases.values() for item in _spread(of_test, MOST_SIMULATED)}
    left_out = [item for of_test in cases.values() for item in of_test if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _spread(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many, from all over a list, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def _ops(backend: str, device: torch.device) -> Ops:
    return Ops(backend, dispatch.resolve_device(device))


_BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.triton), pytest.param("numba", marks=pytest.mark.numba)]


@pytest.fixture(scope="session", params=_BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The public operations on each backend: this makes the suite the conformance suite of every backend.

    Triton is tried on a GPU, or on the CPU where ``TRITON_INTERPRET=1`` asks for its interpreter; then it must run. So
    is Numba, with ``NUMBA_ENABLE_CUDASIM=1`` for its simulator.
    """
    name = request.param
    if name == "torch":
        return _ops("torch", torch.device(os.environ.get("MXKV_TEST_DEVICE") or "cpu"))
    device = torch.device(os.environ.get("MXKV_TEST_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    variable, asked = {"triton": ("TRITON_INTERPRET", INTERPRET), "numba": ("NUMBA_ENABLE_CUDASIM", SIMULATE)}[name]
    if device.type == "cpu" and not asked:
        pytest.skip(f"{name}: no GPU here and {variable}=1 is not set")
    if name == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    found = mxkv.explain("store", device=device, backend=name).verdicts[name]
    if name == "numba" and not found.ok and not asked:
        pytest.skip(f"numba cannot run here: {'; '.join(found.reasons)}")  # ci/gpu asks beforehand whether it can
    if not found.ok:
        pytest.fail(f"{name} was asked for and cannot run on {device}: {'; '.join(found.reasons)}")
    return _ops(name, device)


@pytest.fixture
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch for the environment; call ``mxkv.settings.reload()`` after changing it."""
    for name in mxkv_settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    mxkv_settings.reload()
    yield monkeypatch
    monkeypatch.undo()
    mxkv_settings.reload()
