"""The registry: which backend runs which operation for which format on which device, and why the others do not."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.contracts import AnySpec, Backend, Verdict

logger = logging.getLogger("mxkv")

ENTRY_POINTS = "mxkv.backends"

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("mxkv_backend", default=None)
_added: contextvars.ContextVar[tuple[Backend, ...]] = contextvars.ContextVar("mxkv_added_backends", default=())

_MOST_PLANS = 4096
_plans: dict[Any, Callable[..., None]] = {}
_warned: set[tuple[str, str]] = set()

forced = _forced.get
added = _added.get
"""What, beside a call's own arguments and the environment, decides who runs it (part of every memo's key)."""


@functools.cache
def _installed() -> tuple[Backend, ...]:
    from mxkv.backends import BUILTIN

    plugins = tuple(point.load() for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return BUILTIN + plugins


def backends() -> tuple[Backend, ...]:
    """Every registered backend, the preferred first: ours, and those that packages offer as entry points."""
    return tuple(sorted(_installed() + _added.get(), key=lambda b: -b.priority))


@contextlib.contextmanager
def added_backend(backend: Backend) -> Iterator[None]:
    """Register a backend inside a ``with`` block (for tests and experiments)."""
    if any(backend.name == other.name for other in backends()):
        raise ValueError(f"a backend named {backend.name!r} is registered already")
    token = _added.set((*_added.get(), backend))
    try:
        yield
    finally:
        _added.reset(token)


def get_backend(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: None has it; the message lists the known ones.
    """
    for backend in backends():
        if backend.name == name:
            return backend
    raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(b.name for b in backends())}")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every call inside a ``with`` block on one backend, unless the call names another.

    The block counts for the thread that entered it. A compiled function may run inside it; it does not compile with it.

    Args:
        name: A backend's name. It runs the call or raises with the reason; it never falls back.

    Raises:
        ValueError: No backend has that name.
    """
    token = _forced.set(get_backend(name).name)
    try:
        yield
    finally:
        _forced.reset(token)


def override(name: str | None) -> str | None:
    """The backend that a call is forced to: its own ``backend=``, else ``use_backend``, else ``MXKV_BACKEND``."""
    return name or _forced.get() or settings.current().backend


def verdict(backend: Backend, spec: AnySpec) -> Verdict:
    """Whether a backend can run a call, with all the reasons why not."""
    if spec.operation not in backend.operations:
        return Verdict((f"it has no {spec.operation}; it has {', '.join(sorted(backend.operations))}",))
    probed = backend.probe(spec.device)
    return probed if not probed.ok else backend.supports(spec)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Who would run a call, and why the others would not.

    Attributes:
        spec: The call.
        target: The name of the target whose code would run.
        chosen: The backend that would run it, or None.
        verdicts: Each backend's verdict, the preferred first.
        forced: The backend that the call is forced to, or None.
    """

    spec: AnySpec
    target: str
    chosen: str | None
    verdicts: Mapping[str, Verdict]
    forced: str | None

    def __str__(self) -> str:
        call = f"{self.spec.operation} of {self.spec.format.name} on {self.spec.device} (target {self.target})"
        lines = [f"{call}: " + (f"{self.chosen} runs it" if self.chosen else "no backend can run it")]
        for name, found in self.verdicts.items():
            if name == self.chosen:
                what = "chosen" + (", forced" if self.forced else "")
            elif not found.ok:
                what = "cannot: " + "; ".join(found.reasons) + (f" ({found.hint})" if found.hint else "")
            else:
                what = f"could: not chosen, {self.forced} is forced" if self.forced else "could: has a lower priority"
            lines.append(f"  {name:<8} {what}")
        return "\n".join(lines)


def explain_spec(spec: AnySpec, backend: str | None = None) -> Explanation:
    """Who would run a call."""
    forced = override(backend)
    verdicts = {b.name: verdict(b, spec) for b in backends()}
    if forced is not None:
        get_backend(forced)
    candidates = [name for name, found in verdicts.items() if found.ok and forced in (None, name)]
    named = devices.forced_target()  # raises where MXKV_TARGET names none
    try:
        target = (named or devices.describe(spec.device).target).name
    except ValueError:
        target = "unknown"
    return Explanation(spec, target, candidates[0] if candidates else None, verdicts, forced)


def _choose(spec: AnySpec, backend: str | None) -> Backend:
    """The backend that runs a call.

    Raises:
        ValueError: The forced backend, or every backend, cannot; the message gives the reasons.
    """
    found = explain_spec(spec, backend)
    if found.chosen is None:
        if found.forced is not None:
            refusal = found.verdicts[found.forced]
            reasons = "; ".join(refusal.reasons) + (f" ({refusal.hint})" if refusal.hint else "")
            raise ValueError(f"backend {found.forced!r} cannot run {spec.operation} of {spec.format.name}: {reasons}")
        raise ValueError(str(found))
    chosen = get_backend(found.chosen)
    if chosen.slower and found.forced is None and spec.device.type != "cpu":
        _warn_slower(chosen, found)
    return chosen


def _warn_slower(chosen: Backend, found: Explanation) -> None:
    reasons = "; ".join(f"{name}: {', '.join(v.reasons)}" for name, v in found.verdicts.items() if not v.ok)
    key = (chosen.name, reasons)
    if key not in _warned:
        _warned.add(key)
        logger.warning(
            "%s of %s on %s runs on the slower backend %r: %s",
            found.spec.operation, found.spec.format.name, found.spec.device, chosen.name, reasons,
        )  # fmt: skip


def plan(spec: AnySpec, backend: str | None = None) -> Callable[..., None]:
    """A callable that runs one kind of call, bound to its backend; for hot loops that check their own arguments.

    For compiled functions :func:`mxkv.store` and :func:`mxkv.load` are the ones to use: they are operators.

    It takes a backend function's arguments (:class:`mxkv.contracts.StoreFunction`, ``LoadFunction``) without the spec.

    Args:
        spec: The call.
        backend: A backend's name, or None for the automatic choice.

    Raises:
        ValueError: No backend, or not the forced one, can run it.
    """
    key = (spec, override(backend), _added.get())
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        operations = _choose(spec, backend).load()
        if hasattr(operations, "prepare"):
            found = operations.prepare(spec)
        else:
            found = functools.partial(getattr(operations, spec.operation), spec)
        _plans[key] = found
    return found


def forget_plans() -> None:
    """Forget every plan and every warning that was given (for tests)."""
    _plans.clear()
    _warned.clear()


def resolve_device(device: str | torch.device) -> torch.device:
    """A device with its index, as tensors name it."""
    device = torch.device(device)
    index: int | None = device.index  # (torch's stubs leave the None out)
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device
