"""What several processes need to agree, and to be ready: snapshots, their digest, and warm-up.

Nothing here talks to other processes: one tunes, and the framework sends its snapshot to the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mxkv import devices, dispatch, settings
from mxkv.autotune_cache.entries import Entry, EntryError, bundle_bytes, read_bundle, spec_of
from mxkv.autotune_cache.keys import LARGEST_BUCKET, bucket, digest_of, space_of
from mxkv.autotune_cache.lookup import MissingConfigError, resolver
from mxkv.contracts import Spec, Tunable


def _here() -> list[torch.device]:
    """The devices of this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def snapshot() -> bytes:
    """Every tuned configuration that calls on this process's devices may use, to be given to :func:`load_snapshot`.

    Equal configurations give equal bytes. It is also what ``mxkv configs import`` reads.
    """
    return bundle_bytes(entry for _, entry in resolver().visible(_here()).values())


def load_snapshot(data: bytes) -> None:
    """Use the configurations of a :func:`snapshot` in this process.

    They come before the cache and the shipped ones, and replace those of an earlier snapshot. They are not written.

    Raises:
        TypeError: ``data`` is not bytes.
        ValueError: Something is wrong with it. Nothing has changed.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a snapshot is bytes, got {type(data).__name__}")
    try:
        entries = read_bundle(bytes(data)).entries
    except EntryError as error:
        raise ValueError(f"this is no snapshot of tuned configurations: {error}") from None
    resolver().use_snapshot(entries)


def digest() -> str:
    """What calls on this process's GPUs are launched with, as one string: ranks that agree have equal ones.

    It covers which configuration each key gets, not when or where that was measured. What was tuned for other sets of
    choices than today's, so that no call finds it, is left out where an entry says which call it is for and that call's
    backend is here. Where there is no GPU it is about the CPU; where there is one it is not, so that numbers of threads
    do not matter.
    """
    here = _here()[1:] or _here()
    found = _Answerable(here)
    answers = {key.identity: entry.best for key, (_, entry) in resolver().visible(here).items() if found(entry)}
    kinds = sorted({(d.arch, d.compute_units) for d in map(devices.describe, here)})
    return digest_of({"tuned": settings.current().tune != "off", "devices": kinds, "answers": answers})


class _Answerable:
    """Whether a look-up can answer with an entry; it can where this machine cannot tell.

    Args:
        here: The devices that are here.
    """

    def __init__(self, here: Iterable[torch.device]) -> None:
        described = [devices.describe(device) for device in here]
        self._devices = {(found.arch, found.compute_units): found.device for found in described}
        self._tunable = functools.cache(self._ask)

    def __call__(self, entry: Entry) -> bool:
        hard, spec = entry.key.hard, spec_of(entry)
        device = self._devices.get((str(hard["arch"]), int(hard["compute_units"])))
        if spec is None or device is None:
            return True
        tunable = self._tunable(dataclasses.replace(spec, device=device), str(hard["backend"]))
        return tunable is None or (tunable.target, space_of(tunable)) == (hard["target"], hard["space"])

    @staticmethod
    def _ask(spec: Spec, backend: str) -> Tunable | None:
        try:
            ask: Callable[[Spec], Tunable] | None = getattr(dispatch.get_backend(backend).load(), "tunable", None)
            return None if ask is None else ask(spec)
        except (ValueError, ImportError):  # no such backend here
            return None


def warmup(specs: Iterable[Spec] | Spec, tokens: Iterable[int | tuple[int, ...]] | int | None = None) -> None:
    """Look up and compile ahead what calls will be launched with, so that the first of them waits for nothing.

    What is compiled is for int64 slots and positions, and for contiguous tensors at aligned addresses. A call whose
    tensors are others compiles at its first launch.

    Args:
        specs: The calls, as :func:`mxkv.plan` takes them, or one. The backend is the one that would run them now.
        tokens: Their sizes: a number for an operation of one size, a tuple for one of several; or several of these.
            None stands for every size; then those that ``MXKV_TUNE=strict`` would refuse are passed over, unless that
            is all of them.

    Raises:
        TypeError: ``specs`` or ``tokens`` is something else.
        ValueError: A size below 1, or no backend can run one of the calls.
        MissingConfigError: Nothing was tuned for it, and the policy is strict.
    """
    kinds = typing.get_args(Spec)
    chosen = [specs] if isinstance(specs, kinds) else _listed(specs, "specs must be a spec or several")
    for spec in chosen:
        if not isinstance(spec, kinds):
            raise TypeError(f"specs must be a spec or several (mxkv.spec makes them), got {type(spec).__name__}")
    given: list[tuple[int, ...]] | None = None
    if tokens is not None:
        listed = [tokens] if _is_count(tokens) else _listed(tokens, "tokens must be a number, or several")
        given = [_sizes(size) for size in listed]
    for spec in chosen:
        _warm(spec, given)


def _listed(values: Any, expected: str) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{expected}, got {type(values).__name__}")
    return list(values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple) else (value,)
    for size in sizes:
        if not _is_count(size):
            raise TypeError(f"tokens must be integers, or tuples of them, got {value!r}")
        if size < 1:
            raise ValueError(f"tokens must be at least 1, got {value!r}")
    return sizes


def _warm(spec: Spec, given: list[tuple[int, ...]] | None) -> None:
    dispatch.plan(spec)
    name = dispatch.explain_spec(spec).chosen
    if name is None:  # plan() has raised
        return
    operations = dispatch.get_backend(name).load()
    if not hasattr(operations, "tunable"):
        return
    tunable = operations.tunable(spec)
    if given is None:
        powers = [1 << power for power in range(LARGEST_BUCKET.bit_length())]
        sizes = set(itertools.product(powers, repeat=len(tunable.sizes)))
    else:
        sizes = {tuple(map(bucket, size)) for size in given}
    configs: dict[Any, None] = {}
    missing = None
    for buckets in sorted(sizes):
        try:
            found = resolver().find(spec, buckets, backend=name, tunable=tunable, log=given is not None)
        except MissingConfigError as error:
            if given is not None:
                raise
            missing = error
        else:
            configs[found.config] = None
    if missing is not None and not configs:
        raise missing
    if hasattr(operations, "compile"):
        for config in configs:
            operations.compile(spec, config)
