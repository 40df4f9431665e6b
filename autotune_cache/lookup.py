"""Look-up: from a call's spec and sizes to the configuration that it is launched with.

Nothing is measured here, and nothing is read before it is needed: one file for a call that was tuned on this machine.
"""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mxkv import devices, settings
from mxkv.autotune_cache.entries import (
    Entry,
    EntryError,
    EntryStore,
    OpenBundle,
    StoreError,
    forget_warnings,
    warn_once,
)
from mxkv.autotune_cache.keys import Key, key_of, soft_of, spec_to_json, spelled
from mxkv.contracts import Spec, Tunable

logger = logging.getLogger("mxkv")

SHIPPED = Path(__file__).resolve().parent / "tuned"

Tuner = Callable[[Spec, tuple[int, ...], str, Tunable], Entry | None]

tuner: contextvars.ContextVar[Tuner | None] = contextvars.ContextVar("mxkv_tuner", default=None)
"""What tunes a call that was not tuned, inside ``with mxkv.tuning():``. It returns None to leave a call alone."""


class MissingConfigError(LookupError):
    """A call has no tuned configuration, and ``MXKV_TUNE=strict`` asks for one."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a look-up answers.

    Attributes:
        config: The configuration to launch with.
        origin: "tuned file", "snapshot", "cache", "shipped" or "default".
        stale: Names of what has changed since it was tuned (the kernel's source, its compiler).
        entry: The entry that it comes from; None for a default.
    """

    config: Any
    origin: str
    stale: tuple[str, ...] = ()
    entry: Entry | None = None


def device_slug(name: str) -> str:
    """A device's name as the shipped files are named: "NVIDIA H200" has ``nvidia_h200.json``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def refuse_capture(what: str) -> None:
    """Raise where the current stream is being captured: measuring would end the capture.

    Raises:
        RuntimeError: It is.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} while a CUDA graph is captured; tune, or call mxkv.warmup(), before the capture")


class Resolver:
    """Answers look-ups for this process, and remembers the answers.

    Attributes:
        generation: Changes whenever an answer may have changed; memos made under another one are void.
    """

    def __init__(self) -> None:
        self._generations = itertools.count(1)
        self.generation = 0
        self._start()

    def _start(self) -> None:
        self._memo: dict[tuple[Key, tuple[str, ...]], Found] = {}
        self._missed: dict[Key, object] = {}
        self._stale: dict[Key, tuple[str, ...]] = {}
        self._kept: dict[Key, Entry] = {}  # what could not be written
        self._snapshot: dict[Key, Entry] = {}
        self._bundles: dict[Path, Mapping[Key, Entry]] = {}
        self._store = EntryStore()

    def reset(self) -> None:
        """Forget everything (for tests, and when the settings are read again)."""
        forget_warnings()
        self._start()
        self.changed()

    def changed(self) -> None:
        """Forget the answers: entries were written, or a block of tuning begins or ends."""
        self._memo = {}
        self.generation = next(self._generations)

    @property
    def store(self) -> EntryStore:
        """The user's cache."""
        return self._store

    @property
    def stale(self) -> dict[Key, tuple[str, ...]]:
        """The keys that were answered with an entry of another source or compiler, and which of these differ."""
        return dict(self._stale)

    def find(self, spec: Spec, buckets: tuple[int, ...], *, backend: str, tunable: Tunable, log: bool = True) -> Found:
        """The configuration of a call.

        Args:
            spec: The call.
            buckets: Its sizes, each rounded by :func:`mxkv.autotune_cache.keys.bucket`.
            backend: The name of the backend that runs it.
            tunable: What that backend may choose.
            log: Whether a miss goes to ``MXKV_LOG_MISSES``.

        Raises:
            MissingConfigError: Nothing was tuned for it, and the policy is strict.
            RuntimeError: It would have to be tuned now, and a CUDA graph is being captured.
        """
        policy = settings.current().tune
        if policy == "off" or len(tunable.space) == 1:  # nothing to choose, and so nothing to tune
            return Found(tunable.default(*buckets), "default")
        key = key_of(spec, buckets, backend=backend, tunable=tunable)
        soft = soft_of(tunable)
        memo = self._memo
        known = (key, tuple(soft.values()))
        found = memo.get(known)
        hook = tuner.get()
        if found is None:
            found = self._look(key, spec.device, tunable, soft)
        # A file or a snapshot that the user has given is taken as it is.
        if hook is not None and key.known and (found is None or (found.stale and found.origin in ("cache", "shipped"))):
            tuned = self._tune(hook, spec, buckets, backend, tunable)
            if tuned is not None:
                found = Found(tuned.choice(tunable), "cache", tuned.stale(soft), tuned)
                self._kept[key] = tuned
                self.changed()
                memo = self._memo
        if found is None:
            if log and key.known:
                self._log_miss(key, spec, dict(zip(tunable.sizes, buckets, strict=True)), backend)
            if policy == "strict":
                raise MissingConfigError(self._missing(key, spec.device))
            found = Found(tunable.default(*buckets), "default")
        if found.stale:
            self._stale[key] = found.stale
            warn_once(
                "stale", "tuned configurations of another %s are used, the first for %s; mxkv tune tunes them anew",
                " and ".join(found.stale), key.text,
            )  # fmt: skip
        if hook is None or found.origin != "default":  # a later call may have the time to tune it
            memo[known] = found
        return found

    def _tune(self, hook: Tuner, spec: Spec, buckets: tuple[int, ...], backend: str, tunable: Tunable) -> Entry | None:
        refuse_capture(f"{spec.operation} of {spec.format.name} would be tuned now,")
        token = tuner.set(None)  # what the tuner itself calls is not tuned
        try:
            return hook(spec, buckets, backend, tunable)
        finally:
            tuner.reset(token)

    def _look(self, key: Key, device: torch.device, tunable: Tunable, soft: dict[str, str]) -> Found | None:
        if not key.known:
            return None
        for origin, entry in self._candidates(key, device, tunable):
            if entry is None:
                continue
            try:
                return Found(entry.choice(tunable), origin, entry.stale(soft), entry)
            except EntryError as error:
                warn_once(f"{origin} {key.name}", "a tuned configuration (%s) cannot be used: %s", origin, error)
        return None

    def _candidates(self, key: Key, device: torch.device, tunable: Tunable) -> Iterator[tuple[str, Entry | None]]:
        """A key's entry in each place where there may be one; a place is read only when it is asked for."""
        yield "tuned file", self._tuned_file().get(key)
        yield "snapshot", self._snapshot.get(key)
        yield "cache", self._kept.get(key) or self._store.read(key, tunable)
        yield "shipped", self._shipped(device).get(key)

    def _tuned_file(self) -> Mapping[Key, Entry]:
        chosen = settings.current().tuned
        return {} if chosen is None else self._bundle(Path(chosen), required=True)

    def _shipped(self, device: torch.device) -> Mapping[Key, Entry]:
        try:
            slug = device_slug(devices.describe(device).name)
        except ValueError:  # this machine has no such device
            return {}
        return self._bundle(SHIPPED / f"{slug}.json", required=False)

    def _bundle(self, path: Path, *, required: bool) -> Mapping[Key, Entry]:
        found = self._bundles.get(path)
        if found is None:
            found = {}
            try:
                found = OpenBundle(path, trusted=not required)
            except EntryError as error:
                warn_once(path, "the tuned configurations %s cannot be used: %s", path, error)
            except OSError as error:
                if required or not isinstance(error, FileNotFoundError):
                    reason = error.strerror or error
                    warn_once(path, "the tuned configurations %s cannot be read: %s", path, reason)
            self._bundles[path] = found
        return found

    def record(self, entry: Entry) -> bool:
        """Put an entry into the user's cache; where that cannot be written, keep it for this process, with one warning.

        Returns:
            Whether it was written.
        """
        written = True
        try:
            self._store.write(entry)
            self._kept.pop(entry.key, None)
        except StoreError as error:
            written = False
            self._kept[entry.key] = entry
            warn_once("unwritable", "%s; what is tuned is kept in memory only", error.strerror or error)
        self.changed()
        return written

    def use_snapshot(self, entries: Iterable[Entry]) -> None:
        """Answer from these entries before the cache and the shipped ones, instead of those of an earlier snapshot."""
        self._snapshot = {entry.key: entry for entry in entries}
        self.changed()

    def visible(self, here: Iterable[torch.device]) -> dict[Key, tuple[str, Entry]]:
        """Every entry that a look-up for one of these devices may answer with, and where it is from."""
        if settings.current().tune == "off":
            return {}
        described = [devices.describe(device) for device in here]
        places: list[tuple[str, Iterable[Entry]]] = [
            ("tuned file", self._tuned_file().values()),
            ("snapshot", self._snapshot.values()),
            ("cache", self._kept.values()),
            ("cache", self._store.entries()),
        ]
        places += [("shipped", self._shipped(d.device).values()) for d in described]
        fitting = {(d.arch, d.compute_units) for d in described}
        found: dict[Key, tuple[str, Entry]] = {}
        for origin, entries in places:
            for entry in entries:
                if (entry.key.hard["arch"], entry.key.hard["compute_units"]) in fitting:
                    found.setdefault(entry.key, (origin, entry))
        return found

    def _log_miss(self, key: Key, spec: Spec, sizes: dict[str, int], backend: str) -> None:
        path = settings.current().log_misses
        mine = object()
        if path is None or self._missed.setdefault(key, mine) is not mine:
            return
        line = json.dumps({"spec": spec_to_json(spec), "sizes": sizes, "backend": backend}) + "\n"
        try:
            # One write at the end of the file: lines of several processes do not mix.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            warn_once("log of misses", "MXKV_LOG_MISSES=%s cannot be written: %s", path, error.strerror or error)

    def _missing(self, key: Key, device: torch.device) -> str:
        """Why a strict look-up fails: the key, and the nearest one that was tuned."""
        message = f"no tuned configuration for {key.text} (MXKV_TUNE=strict)"
        if not key.known:
            return f"{message}: this machine has no such device"
        places = [self._tuned_file(), self._snapshot, self._kept, self._shipped(device)]
        tuned = {entry.key for entry in self._store.entries()}.union(*places)
        if not tuned:
            return f"{message}; nothing is tuned in {self._place()}: run mxkv tune"
        nearest = min(tuned, key=key.distance)
        pairs = key.differences(nearest).items()
        what = "; ".join(f"{name} is {spelled(theirs)}, not {spelled(mine)}" for name, (mine, theirs) in pairs)
        if not what:
            return f"{message}; its entry cannot be used (see the warnings): run mxkv tune"
        return f"{message}; the nearest that was tuned differs: {what} ({nearest.name}); run mxkv tune"

    def _place(self) -> str:
        try:
            return str(self._store.folder)
        except StoreError as error:
            return str(error.strerror)


_RESOLVER = Resolver()


def resolver() -> Resolver:
    """The resolver of this process."""
    return _RESOLVER
