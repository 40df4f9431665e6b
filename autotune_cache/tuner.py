"""The tuner: checks, times and records the candidates of each key, and survives whatever they do.

Candidates run in a worker process only (:mod:`mxkv.autotune_cache.worker`), on tensors of its own. What was measured is
written while the tuner goes on, so that one that is stopped loses nothing, and one that is started again goes on there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import errno
import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mxkv import devices, dispatch, settings
from mxkv.autotune_cache import lookup, measure, trials
from mxkv.autotune_cache.entries import Candidate, Entry, EntryStore, StoreError, config_to_json, warn_once, write_file
from mxkv.autotune_cache.keys import Key, canonical, key_of, soft_of, spec_to_json
from mxkv.autotune_cache.shapes import Work, describe, grouped, tunable_of
from mxkv.autotune_cache.worker import (
    TIMEOUT_S,
    NoPlace,
    Worker,
    WorkerEnded,
    WorkerError,
    one_line,
    place_of,
    reason_of,
    request,
)
from mxkv.contracts import Spec, Tunable

logger = logging.getLogger("mxkv")

COMPILE_TIMEOUT_S = 300.0
_MOST_PROCESSES = 16
_FLUSH_S = 1.0
_LOCK_POLL_S = 0.2
_LONGEST_SPEC = 1000  # of an entry's strings
_LONGEST_TIMEOUT_S = 86400.0  # what clocks take
_COMPILES_AT_CALLS = ("cuda",)  # there kernels are compiled anew for tensors that are aligned otherwise


STATES = ("tuned", "kept", "partial", "failed", "left")
"""What can become of a key (:attr:`Result.status`)."""


class KeyFailed(RuntimeError):
    """A key cannot be tuned, and no candidate is to blame."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one key.

    Attributes:
        work: What was to be tuned.
        key: Its key.
        status: "tuned"; "kept" (it was tuned before); "partial" (time ran out, or the tuner was stopped, before every
            candidate was timed to the end); "failed"; "left" (that was before it began).
        entry: Its entry now, or None.
        timed: How many candidates were timed now.
        seconds: How long that took.
        reason: Why it failed.
    """

    work: Work
    key: Key
    status: str
    entry: Entry | None = None
    timed: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The candidates that must not be taken."""
        return tuple(c for c in self.entry.candidates if c.rejected is not None) if self.entry else ()

    @property
    def best_us(self) -> float | None:
        """The time of the choice."""
        return None if self.entry is None else time_of(self.entry, self.entry.best)

    @property
    def default_us(self) -> float | None:
        """The time of what would be taken without tuning."""
        return None if self.entry is None else time_of(self.entry, self.entry.default)


def time_of(entry: Entry, config: Mapping[str, Any]) -> float | None:
    """The median of one of an entry's candidates; None where it has none."""
    return next((c.median_us for c in entry.candidates if c.config == config and c.rejected is None), None)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the tuner is.

    Attributes:
        done, total: Keys.
        seconds: Since it began.
        eta_s: Seconds that are likely left, from the keys that were tuned now; None where none was.
        result: The key that was finished now, or None.
        note: What else there is to say.
    """

    done: int
    total: int
    seconds: float
    eta_s: float | None = None
    result: Result | None = None
    note: str = ""


def is_finished(entry: Entry, tunable: Tunable) -> bool:
    """Whether every candidate was timed to the end."""
    known = [candidate.config for candidate in entry.candidates]
    return entry.provenance.get("finished") is not False and all(config_to_json(c) in known for c in tunable.space)


class Session:
    """One device's worker, and which candidates it has found right.

    Args:
        device: The device.
        timeout_s: How long one step of a candidate may take.
    """

    def __init__(self, device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._worker: Worker | None = None
        self._verdicts: dict[tuple[str, Spec, str], str] = {}
        self.provenance: dict[str, Any] = {}

    def worker(self) -> Worker:
        """The worker, started if there is none.

        Raises:
            WorkerError: It does not start.
        """
        if self._worker is None or not self._worker.alive:
            self.close()
            self._worker = new_worker(self.device, self.timeout_s)
            self._worker.hello()
            if not self.provenance:
                for event in self._worker.ask({"do": "provenance"}):
                    self.provenance = {name: value for name, value in event.items() if name != "event"}
        return self._worker

    def ready(self, work: Work) -> None:
        """Have a worker that can do a work.

        Raises:
            KeyFailed: None can.
            WorkerError: None starts.
        """
        try:
            place_of(work.backend)
        except NoPlace as error:
            raise KeyFailed(str(error)) from None
        self.worker()

    def _ask(self, do: str, work: Work, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of an answer; a worker that cannot go on is ended.

        Raises:
            KeyFailed: Something else than a candidate failed.
            WorkerEnded: The worker died or hung.
        """
        try:
            asked = request(do, work.spec, work.backend, **fields)
        except NoPlace as error:
            raise KeyFailed(str(error)) from None
        for event in self.worker().ask(asked):
            if event["event"] == "error":
                self.close()
                raise KeyFailed(event["reason"])
            yield event

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def verdict(self, work: Work, config: dict[str, Any]) -> str:
        """Why a candidate must not be taken, or nothing. Buckets of one kind of call launch the same code: asked once.

        Raises:
            KeyFailed: It could not be found out.
        """
        key = work.backend, work.spec, canonical(config)
        if key not in self._verdicts:
            self._verdicts[key] = self._check(work, config)
        return self._verdicts[key]

    def reject(self, work: Work, config: dict[str, Any], reason: str) -> None:
        """Note that a candidate must not be taken, for any bucket."""
        self._verdicts[work.backend, work.spec, canonical(config)] = reason

    def _check(self, work: Work, config: dict[str, Any]) -> str:
        for again in (False, True):
            begun, found = False, ""
            try:
                for event in self._ask("check", work, config=config):
                    begun = begun or event["event"] == "at"
                    if event["event"] == "rejected":
                        found = event["reason"]
            except WorkerEnded as ended:
                if not found and ended.by_chance and not again:
                    continue
                if not begun:
                    raise KeyFailed(f"the worker could not draw inputs: {ended}") from None
                found = found or str(ended)
            break
        return found

    def race(
        self,
        work: Work,
        configs: Sequence[dict[str, Any]],
        most: tuple[int, ...],
        budget_s: float | None,
        on_candidate: Callable[[Candidate], None],
    ) -> bool:
        """Time candidates against each other; whether that was done to the end.

        Args:
            work: The key.
            configs: The candidates.
            most: The largest sizes that this kind of call will be timed at.
            budget_s: Seconds after which to stop.
            on_candidate: Told what is known of a candidate, as often as that changes.

        Raises:
            KeyFailed: It could not be done.
        """
        left = list(configs)
        ended_at: list[dict[str, Any] | None] = []
        started = time.monotonic()
        while left:
            budget = None if budget_s is None else budget_s - (time.monotonic() - started)
            if budget is not None and budget <= 0:
                return False
            at, out = None, set()
            finished = False
            try:
                for event in self._ask("time", work, sizes=work.buckets, most=most, configs=left, budget_s=budget):
                    at = event.get("candidate", at)
                    if event["event"] == "timing":
                        numbers = {name: event[name] for name in ("median_us", "p20_us", "p80_us", "count")}
                        on_candidate(Candidate(left[event["candidate"]], **numbers))
                    elif event["event"] == "rejected":
                        out.add(event["candidate"])
                        on_candidate(Candidate(left[event["candidate"]], rejected=event["reason"]))
                    elif event["event"] == "finished":
                        finished = event["finished"]
                return finished or len(out) == len(left)
            except WorkerEnded as ended:
                last = None if at is None else left[at]
                once = ended.by_chance and last not in ended_at
                ended_at.append(last)
                if at is None and not once:
                    raise KeyFailed(f"the worker could not draw inputs: {ended}") from None
                if at is not None and at not in out and not once:
                    self.reject(work, left[at], str(ended))  # it would end the worker at each other bucket too
                    on_candidate(Candidate(left[at], rejected=str(ended)))
                    out.add(at)
                left = [config for index, config in enumerate(left) if index not in out]
        return True


def new_worker(device: torch.device, timeout_s: float) -> Worker:
    """A worker process for a device, just started."""
    threads = devices.describe(device).compute_units if device.type == "cpu" else 1
    return Worker(device, threads=threads, timeout_s=timeout_s)


class Compiling:
    """Compiles candidates in several processes, ahead of their checks.

    Args:
        jobs: The kinds of calls and their candidates, in the order in which they will be wanted.
        device: What they are compiled for.
        timeout_s: How long one step of a candidate may take that runs.

    Raises:
        NoPlace: Workers cannot import a backend.
    """

    def __init__(
        self, jobs: Sequence[tuple[Work, dict[str, Any]]], device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._started: list[Worker] = []
        self._closed = threading.Event()
        self._futures: dict[tuple[str, Spec, str], concurrent.futures.Future[str]] = {}
        wanted = {(w.backend, w.spec, canonical(c)): (w, c) for w, c in jobs}
        # Made before anything is started, and here: the pool's threads do not see which backends are registered.
        asked = {
            key: (
                request("compile", work.spec, work.backend, config=config),
                request("check", work.spec, work.backend, config=config, ahead=True),
            )
            for key, (work, config) in wanted.items()
        }
        processes = max(1, min(_cpus() - 1, -(-len(wanted) // 2), _MOST_PROCESSES))
        self._pool = concurrent.futures.ThreadPoolExecutor(processes, thread_name_prefix="mxkv-compile")
        for key in wanted:
            self._futures[key] = self._pool.submit(self._compile, *asked[key])

    def reason(self, work: Work, config: dict[str, Any]) -> str:
        """Why a candidate does not compile, or nothing; waits until that is known."""
        future = self._futures.get((work.backend, work.spec, canonical(config)))
        return "" if future is None else future.result()

    def _compile(self, asked: dict[str, Any], ahead: dict[str, Any]) -> str:
        found, again = "", False
        while True:
            worker = self._a_worker()
            if worker is None:  # the worker that measures will compile it, or say why not
                return ""
            try:
                for event in worker.ask(asked):
                    if event["event"] in ("rejected", "error"):
                        found = f"does not compile: {event['reason']}"
                break
            except WorkerEnded as ended:
                if self._closed.is_set():
                    return ""
                if again or not ended.by_chance:
                    return f"does not compile: {ended}"
                again = True
        if not found and self._device.type in _COMPILES_AT_CALLS:
            try:
                # What is compiled is on the disk then. What it computes, the worker that measures will find out.
                for _ in worker.ask(ahead, timeout_s=self._timeout_s):
                    pass
            except WorkerEnded:
                return ""
        self._idle.put(worker)
        return found

    def _a_worker(self) -> Worker | None:
        """A process that has nothing to do; None where none can be started, or none is wanted any more."""
        if self._closed.is_set():
            return None
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        worker = new_worker(self._device, COMPILE_TIMEOUT_S)
        self._started.append(worker)
        if self._closed.is_set():
            worker.kill()
        try:
            return worker.hello()
        except WorkerError:
            return None

    def close(self) -> None:
        """End the processes."""
        self._closed.set()
        for worker in self._started:
            worker.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._started:
            worker.close()

    def close_if_done(self) -> None:
        """End the processes once there is nothing to compile: each of them holds memory of the device."""
        if not self._closed.is_set() and all(future.done() for future in self._futures.values()):
            self.close()


def _cpus() -> int:
    allowed: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


@dataclasses.dataclass
class _Job:
    """A key that is to be tuned, and what is known of its candidates."""

    work: Work
    key: Key
    tunable: Tunable
    known: dict[str, Candidate]
    todo: list[dict[str, Any]]
    stale: bool = False
    replaced: Entry | None = None  # it stays until all of what takes its place is known

    def entry(self, provenance: dict[str, Any], finished: bool) -> Entry | None:
        """The entry of what is known; None where no candidate can be taken."""
        space = [config_to_json(config) for config in self.tunable.space]
        found = [self.known.get(canonical(config)) for config in space]
        default = config_to_json(self.tunable.default(*self.work.buckets))
        medians = [None if c is None or c.rejected is not None else c.median_us for c in found]
        best = measure.winner(medians, space.index(default) if default in space else None)
        if best is None:
            return None
        spec = json.dumps(spec_to_json(self.work.spec))
        now = datetime.datetime.now(datetime.timezone.utc)
        extra = {
            "date": now.isoformat(timespec="seconds"),
            "finished": finished,
            "spec": spec if len(spec) <= _LONGEST_SPEC else None,
        }
        return Entry(
            self.key, soft_of(self.tunable), space[best], tuple(c for c in found if c is not None),
            default, {**provenance, **extra},
        )  # fmt: skip


class Tuning:
    """One run of the tuner over some works of one device.

    Args:
        works: What to tune. Keys that were tuned before are kept; stale ones come first.
        budget_s: Seconds after which to stop.
        on_progress: Told of each key, and of what goes wrong.
        store: Where entries are kept; None stands for the user's cache.
        timeout_s: How long one step of a candidate may take.
        session: The worker to use; None starts one and ends it.
        record: Keeps an entry; None writes it into the store, and a store that cannot be written is an error.
        force: Tune every key anew. An entry that is there stays until it can be replaced by a finished one.

    Attributes:
        results: One for each key, in the order in which they were done.

    Raises:
        ValueError: The works are on several devices.
    """

    def __init__(
        self,
        works: Sequence[Work],
        *,
        budget_s: float | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        store: EntryStore | None = None,
        timeout_s: float = TIMEOUT_S,
        session: Session | None = None,
        record: Callable[[Entry], object] | None = None,
        force: bool = False,
    ) -> None:
        if len({work.spec.device for work in works}) > 1:
            raise ValueError("expected works on one device, one tuner for each")
        self.works = grouped(works)
        self.store = store or lookup.resolver().store
        self.results: list[Result] = []
        self._budget_s = budget_s
        self._on_progress = on_progress
        self._timeout_s = timeout_s
        self._session = session
        self._record = record or self.store.write
        self._strict = record is None
        self._force = force
        self._started = time.monotonic()
        self._total = 0
        self._siblings: dict[str, Entry] | None = None
        self._told: set[tuple[str, Spec, str, str | None]] = set()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._started

    def run(self) -> list[Result]:
        """Tune. What was measured is kept where this ends by an exception, KeyboardInterrupt included.

        Raises:
            StoreError: Nothing can be written.
            WorkerError: No worker process can be started.
        """
        if not self.works:
            return []
        device = self.works[0].spec.device
        self._started = time.monotonic()
        with self._lock(device), contextlib.ExitStack() as stack:
            self.store.sweep()
            jobs = self._jobs()
            if not jobs:
                return self.results
            session = self._session
            if session is None:
                session = Session(device, self._timeout_s)
                stack.callback(session.close)
            compiling = self._compiling(jobs, device) if self._left() > 0 else None
            if compiling is not None:
                stack.callback(compiling.close)
            stack.callback(lookup.resolver().changed)
            most: dict[tuple[str, Spec], tuple[int, ...]] = {}
            for job in jobs:
                kind = job.work.backend, job.work.spec
                most[kind] = tuple(map(max, most.get(kind, job.work.buckets), job.work.buckets))
            try:
                for job in jobs:
                    kind = job.work.backend, job.work.spec
                    if self._left() <= 0:
                        self._done(Result(job.work, job.key, "left", self.store.read(job.key)))
                        continue
                    self._tune(job, session, compiling, most[kind])
            except KeyboardInterrupt:
                told = {result.key for result in self.results}
                left = [job for job in jobs if job.key not in told]
                self.results += [Result(job.work, job.key, "left", self.store.read(job.key)) for job in left]
                raise
        return self.results

    def plan(self) -> list[tuple[Work, Key, str]]:
        """What a run would do: each work, its key, and "new", "stale", "unfinished", "forced" or "kept"."""
        found = []
        for work in self._unique():
            tunable = tunable_of(work.spec, work.backend)
            key = key_of(work.spec, work.buckets, backend=work.backend, tunable=tunable)
            entry = self.store.read(key, tunable)
            state = "new"
            if entry is not None:
                state = "kept" if is_finished(entry, tunable) else "unfinished"
                state = "forced" if self._force else state
                state = "stale" if entry.stale(soft_of(tunable)) else state
            found.append((work, key, state))
        return found

    def _unique(self) -> Iterator[Work]:
        """The works, each key once: specs of other page counts are the same call."""
        seen = set()
        for work in self.works:
            key = key_of(
                work.spec, work.buckets, backend=work.backend, tunable=tunable_of(work.spec, work.backend)
            )  # fmt: skip
            if key not in seen:
                seen.add(key)
                yield work

    def _jobs(self) -> list[_Job]:
        jobs = []
        planned = self.plan()
        self._total = len(planned)
        for work, key, state in planned:
            tunable = tunable_of(work.spec, work.backend)
            entry = None if state in ("new", "stale") else self.store.read(key, tunable)
            if state == "kept" and entry is not None:
                self._done(Result(work, key, "kept", entry))
            elif self._force:
                space = [config_to_json(config) for config in tunable.space]
                replaced = entry if entry is not None and is_finished(entry, tunable) else None
                jobs.append(_Job(work, key, tunable, {}, space, state == "stale", replaced))
            else:
                jobs.append(self._job(work, key, tunable, entry, stale=state == "stale"))
        return sorted(jobs, key=lambda job: not job.stale)

    def _job(self, work: Work, key: Key, tunable: Tunable, entry: Entry | None, *, stale: bool) -> _Job:
        space = {canonical(config_to_json(c)): config_to_json(c) for c in tunable.space}
        source = entry or (None if stale else self._sibling(key, tunable))
        known = {} if source is None else {canonical(c.config): c for c in source.candidates}
        known = {name: candidate for name, candidate in known.items() if name in space}
        again: list[str] = []
        if entry is not None and entry.provenance.get("finished") is False:
            timed = [(c.median_us, name) for name, c in known.items() if c.median_us is not None and not c.rejected]
            again = [name for _, name in sorted(timed)[: measure.Plan().finalists]]
        todo = [config for name, config in space.items() if name not in known or name in again]
        return _Job(work, key, tunable, known, todo, stale)

    def _sibling(self, key: Key, tunable: Tunable) -> Entry | None:
        """An entry of the same call with other candidates: what it knows of those that are still there is kept."""
        if self._siblings is None:
            self._siblings = {_without_space(entry.key): entry for entry in self.store.entries()}
        found = self._siblings.get(_without_space(key))
        return None if found is None or found.stale(soft_of(tunable)) else found

    def _compiling(self, jobs: Sequence[_Job], device: torch.device) -> Compiling | None:
        if settings.triton_interpret():
            return None
        wanted = [
            (job.work, config)
            for job in jobs
            for config in job.todo
            if hasattr(dispatch.get_backend(job.work.backend).load(), "compile")
        ]
        try:
            return Compiling(wanted, device, self._timeout_s) if wanted else None
        except NoPlace:  # each key will say so
            return None

    def _tune(self, job: _Job, session: Session, compiling: Compiling | None, most: tuple[int, ...]) -> None:
        started = time.monotonic()
        flushed = started
        finished, interrupted, reason = False, False, ""
        timed: set[str] = set()

        def note(candidate: Candidate) -> None:
            nonlocal flushed
            name = canonical(candidate.config)
            job.known[name] = candidate
            if candidate.rejected is None:
                timed.add(name)
            else:
                self._tell_rejected(job.work, candidate)
            if time.monotonic() - flushed > _FLUSH_S:
                self._keep(job, session, finished=False)
                flushed = time.monotonic()

        try:
            if job.todo:
                finished = self._measure(job, session, compiling, most, note)
            else:
                finished = True
        except KeyFailed as error:
            reason = str(error)
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:  # however it ends
            entry = self._keep(job, session, finished=finished)
            if interrupted:
                seconds = time.monotonic() - started
                self.results.append(Result(job.work, job.key, "partial", entry, len(timed), seconds))
        status = "failed" if reason else "tuned" if finished else "partial" if timed else "left"
        if entry is None and finished:
            status = "failed"
            reason = "every candidate was rejected: " + "; ".join(
                sorted({c.rejected or "" for c in job.known.values()})
            )
        self._done(Result(job.work, job.key, status, entry, len(timed), time.monotonic() - started, one_line(reason)))

    def _measure(
        self,
        job: _Job,
        session: Session,
        compiling: Compiling | None,
        most: tuple[int, ...],
        note: Callable[[Candidate], None],
    ) -> bool:
        """Check and time a key's candidates; whether that was done to the end."""
        session.ready(job.work)
        right = []
        for config in job.todo:
            found = compiling.reason(job.work, config) if compiling is not None else ""
            if found:
                session.reject(job.work, config, found)
            found = session.verdict(job.work, config)
            if found:
                note(Candidate(config, rejected=one_line(found)))
            else:
                right.append(config)
        if compiling is not None:
            compiling.close_if_done()
        # The first one says how many calls a sample takes: of the default it is known that it is not slow.
        default = config_to_json(job.tunable.default(*job.work.buckets))
        right.sort(key=lambda config: config != default)
        left = self._left()
        return session.race(job.work, right, most, None if left == float("inf") else left, note)

    def _keep(self, job: _Job, session: Session, *, finished: bool) -> Entry | None:
        """Record what is known of a key's candidates; the key's entry then."""
        if job.replaced is not None and not finished:
            return job.replaced
        entry = job.entry(session.provenance, finished)
        if entry is not None:
            self._record(entry)
        return entry

    def _left(self) -> float:
        return float("inf") if self._budget_s is None else self._budget_s - self.seconds

    def _done(self, result: Result) -> None:
        self.results.append(result)
        self._tell(result=result)

    def _tell(self, **what: Any) -> None:
        done = len(self.results)
        tuned = sum(result.status != "kept" for result in self.results)
        eta = self.seconds / tuned * (self._total - done) if tuned else None
        self._on_progress(Progress(done, self._total, self.seconds, eta, **what))

    def _tell_rejected(self, work: Work, candidate: Candidate) -> None:
        """Once for all buckets of a kind of call."""
        about = work.backend, work.spec, canonical(candidate.config), candidate.rejected
        if about not in self._told:
            self._told.add(about)
            self._say(f"{describe(work.spec)}: {_short(candidate.config)} is rejected: {candidate.rejected}")

    def _say(self, note: str) -> None:
        self._tell(note=note)

    @contextlib.contextmanager
    def _lock(self, device: torch.device) -> Iterator[None]:
        """Keep other tuners off the device: two at once would measure each other."""
        import filelock

        try:
            check_writable(self.store)
        except StoreError:
            if self._strict:
                raise
            yield
            return
        lock = filelock.FileLock(self.store.folder / f"{_device_name(device)}.lock")
        try:
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                self._say(f"another tuner is at work on {device}: waiting for it")
                lock.acquire(poll_interval=_LOCK_POLL_S)
        except OSError as error:
            raise StoreError(error.errno or errno.EIO, f"cannot lock {lock.lock_file}: {error}") from error
        try:
            yield
        finally:
            lock.release()


def _without_space(key: Key) -> str:
    return canonical({name: value for name, value in key.hard.items() if name != "space"})


def _short(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _device_name(device: torch.device) -> str:
    """A device's name that does not depend on which devices this process sees."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    return re.sub(r"[^A-Za-z0-9-]+", "-", f"{device.type}-{uuid}" if uuid else str(device))


def check_writable(store: EntryStore) -> None:
    """Find out whether entries can be written before anything is measured.

    Raises:
        StoreError: They cannot; the message says where that was tried.
    """
    probe = store.folder / f".{os.getpid()}-{threading.get_ident()}.probe"
    try:
        write_file(probe, b"\n" * 4096)
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            error.errno or errno.EIO, f"cannot write tuned configurations to {store.folder}: {reason} "
            "(MXKV_CACHE_DIR names another folder)",
        ) from error  # fmt: skip


def tune(works: Sequence[Work], **options: Any) -> list[Result]:
    """Tune; the arguments are those of :class:`Tuning`."""
    return Tuning(works, **options).run()


@contextlib.contextmanager
def tuning(*, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Inside a ``with`` block, a call that was not tuned, or whose entry is stale, is tuned before it runs.

    That takes seconds for the first call of each kind and size, in a process of its own and on tensors of its own; the
    results are kept in the user's cache. A call that cannot be tuned runs as it would outside of the block, with a
    warning. Outside of such a block nothing is ever measured. The block counts for the thread that entered it. Under
    ``MXKV_TUNE=off`` nothing is tuned, since nothing that was tuned is used.

    Args:
        timeout_s: How long one step of a candidate may take.

    Raises:
        TypeError: ``timeout_s`` is no number.
        ValueError: It is not above 0, or not finite.
        RuntimeError: A CUDA graph is being captured.
    """
    block = _Block(_checked_timeout(timeout_s))
    lookup.refuse_capture("mxkv.tuning() was entered")
    if settings.current().tune == "off":
        warn_once("tuning under off", "mxkv.tuning() tunes nothing: MXKV_TUNE=off asks for the defaults only")
    with contextlib.ExitStack() as leaving:  # each step of which is taken, also where one raises
        leaving.callback(block.close)
        leaving.callback(block.resolver.changed)
        # Raises where the block is left in another thread or context than it was entered in.
        leaving.callback(lookup.tuner.reset, lookup.tuner.set(block.tune))
        block.resolver.changed()
        yield


def _checked_timeout(timeout_s: float) -> float:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s must be a number of seconds, got {type(timeout_s).__name__}")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
    return min(float(timeout_s), _LONGEST_TIMEOUT_S)


class _Block:
    """A block of :func:`tuning`: its workers, and what is known to be in vain.

    Args:
        timeout_s: How long one step of a candidate may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.resolver = lookup.resolver()
        self._timeout_s = timeout_s
        self._sessions: dict[torch.device, Session] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._in_vain: set[Key] = set()
        self._unreachable: set[str] = set()

    def tune(self, spec: Spec, buckets: tuple[int, ...], backend: str, tunable: Tunable) -> Entry | None:
        """The hook of look-ups: an entry for a call that has none; None, with one warning, where it cannot be tuned."""
        if spec.operation not in trials.OPERATIONS:
            return None
        key = key_of(spec, buckets, backend=backend, tunable=tunable)
        with self._lock:
            # A context that was copied inside the block outlives it.
            if self._closed or key in self._in_vain or not self._reaches(backend):
                return None
            work, entry = Work(spec, buckets, backend), None
            try:
                if spec.device.type == "cuda":
                    torch.cuda.synchronize(spec.device)  # what the caller has under way would be measured too
                if spec.device not in self._sessions:
                    self._sessions[spec.device] = Session(spec.device, self._timeout_s)
                entry = _tune_one(work, self._sessions[spec.device], self.resolver)
            except (ValueError, RuntimeError, OSError) as error:
                logger.warning("%s is not tuned: %s", work.text, reason_of(error))
            if entry is None:
                self._in_vain.add(key)
            return entry

    def _reaches(self, backend: str) -> bool:
        if backend in self._unreachable:
            return False
        try:
            place_of(backend)
        except NoPlace as error:
            self._unreachable.add(backend)
            logger.warning("calls of the backend %r are not tuned: %s", backend, error)
            return False
        return True

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._closed = True
            for session in self._sessions.values():
                session.close()


def _tune_one(work: Work, session: Session, resolver: lookup.Resolver) -> Entry | None:
    def told(progress: Progress) -> None:
        if progress.note:
            logger.warning("%s", progress.note)

    (result,) = Tuning([work], session=session, record=resolver.record, on_progress=told).run()
    if result.entry is None:
        logger.warning("%s is not tuned: %s", describe(work.spec), result.reason)
    return result.entry
