"""Fixtures: which backend, on which device, a test runs."""

from __future__ import annotations

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

settings.register_profile(
    "mxkv",
    deadline=None,
    derandomize=True,
    max_examples=3 if INTERPRET else 60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mxkv")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tests run side by side; shapes are small


def _ops(backend: str, device: torch.device) -> Ops:
    return Ops(backend, dispatch.resolve_device(device))


@pytest.fixture(scope="session", params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The public operations on each backend: this makes the suite the conformance suite of every backend.

    Triton is tried on a GPU, or on the CPU where ``TRITON_INTERPRET=1`` asks for its interpreter; then it must run.
    """
    if request.param == "torch":
        return _ops("torch", torch.device(os.environ.get("MXKV_TEST_DEVICE") or "cpu"))
    device = torch.device(os.environ.get("MXKV_TEST_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("triton: no GPU here and TRITON_INTERPRET=1 is not set")
    found = mxkv.explain("store", device=device, backend="triton").verdicts["triton"]
    if not found.ok:
        pytest.fail(f"triton was asked for and cannot run on {device}: {'; '.join(found.reasons)}")
    return _ops("triton", device)


@pytest.fixture
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch for the environment; call ``mxkv.settings.reload()`` after changing it."""
    for name in mxkv_settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    mxkv_settings.reload()
    yield monkeypatch
    monkeypatch.undo()
    mxkv_settings.reload()
