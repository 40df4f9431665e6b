"""The process in which candidates run: whatever they do to it, the tuner goes on.

``python -m mxkv.autotune_cache.worker`` takes requests as lines of JSON on its standard input and answers with lines of
JSON. :class:`Worker` is the tuner's side of it: it starts the process, waits with a limit, and says how it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch

from mxkv import dispatch
from mxkv.autotune_cache import measure, trials
from mxkv.autotune_cache.keys import spec_from_json, spec_to_json
from mxkv.contracts import Backend, Spec

TIMEOUT_S = 60.0
"""How long one step of a candidate (a check, a first call, a sample) may take."""

_START_S = 180.0
_ALARM_MARGIN_S = 20
_LONGEST_REASON = 600
_NVIDIA_SMI_S = 10.0
_KILL_S = 30.0

Event = dict[str, Any]


# The worker's side.


def main() -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    arguments = parser.parse_args()
    # What candidates print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    Server(answers, device, arguments.timeout).serve(sys.stdin)


class Server:
    """Does what requests ask for.

    Args:
        answers: Where answers go, a line each.
        device: The device that calls run on.
        timeout_s: After that long a step is hopeless, and the process ends itself if nobody else ends it.
    """

    def __init__(self, answers: IO[str], device: torch.device, timeout_s: float) -> None:
        self.answers = answers
        self.device = device
        self.timeout_s = timeout_s
        self.timer = measure.Timer(device)
        self._operation: tuple[Spec, trials.Operation] | None = None
        self._uncapturable = {trials.ORACLE}
        self._added: dict[str, contextlib.AbstractContextManager[None]] = {}

    def serve(self, requests: IO[str]) -> None:
        """Answer requests, one after another."""
        for line in requests:
            request = json.loads(line)
            self._alarm(True)
            try:
                self._register(request.get("place"))
                getattr(self, f"do_{request['do']}")(request)
            except MemoryError as error:
                self.say(event="error", reason=reason_of(error))
            except Exception as error:  # of the tuner's own tensors, not of a candidate
                self.say(event="error", reason=reason_of(error), fatal=self._is_broken())
            self._alarm(False)
            self.say(event="done")

    def _register(self, place: str | None) -> None:
        """Register the backend of a request, unless it is one that is installed."""
        if place is not None and place not in self._added:
            module, name = place.split(":")
            block = dispatch.added_backend(getattr(importlib.import_module(module), name))
            block.__enter__()
            self._added[place] = block  # a block that nobody holds is left

    def say(self, **event: Any) -> None:
        """Send an event; a step begins or ends."""
        self._alarm(True)
        self.answers.write(json.dumps(event) + "\n")

    def do_hello(self, request: Event) -> None:
        """Say that the process is up."""
        self.say(event="hello", pid=os.getpid())

    def do_provenance(self, request: Event) -> None:
        """Say where and with what this process measures."""
        self.say(event="provenance", **provenance(self.device))

    def do_compile(self, request: Event) -> None:
        """Compile a candidate without launching it."""
        spec = self._spec(request)
        operations = dispatch.get_backend(request["backend"]).load()
        self._attempt(0, lambda: operations.compile(spec, self._config(request, spec, request["config"])))

    def do_check(self, request: Event) -> None:
        """Run a candidate on nasty inputs; reject it where its bytes are not the oracle's."""
        spec = self._spec(request)
        operation = self._of(spec)
        config = self._config(request, spec, request["config"])
        wanted = [(sizes, seed) for sizes, seed in operation.check_calls(config) if seed or not request.get("ahead")]
        for sizes, seed in wanted:
            operation.trial(sizes, seed)
            self.say(event="drawn")

        def run() -> str:
            found = (operation.check(request["backend"], config, sizes, seed) for sizes, seed in wanted)
            return next(filter(None, found), "")

        self._attempt(0, run)

    def do_time(self, request: Event) -> None:
        """Time the candidates of one key."""
        spec, name = self._spec(request), request["backend"]
        operation = self._of(spec)
        sizes, most = tuple(request["sizes"]), tuple(request["most"])
        pool_spec, sets = operation.sets(sizes, most)
        prepared = operation.prepared(name, pool_spec)
        timer: measure.Timer = self.timer
        samplers: list[Callable[[], float]] = []
        indices: list[int] = []
        calls: int | None = None
        timer.warm_up()
        for index, values in enumerate(request["configs"]):
            config = self._config(request, spec, values)

            def call(tensors: trials.Tensors, config: Any = config) -> None:
                prepared(*tensors, config=config)

            def start(call: Callable[[trials.Tensors], None] = call) -> None:
                nonlocal calls
                timer.first_calls(call, sets)
                sample, calls = self._sampler(name, call, sets, calls)
                samplers.append(sample)

            if self._attempt(index, start):
                indices.append(index)
        if not indices:
            return

        def on_timing(place: int, timing: measure.Timing) -> None:
            self.say(
                event="timing", candidate=indices[place], median_us=round(timing.median_us, 4),
                p20_us=round(timing.p20_us, 4), p80_us=round(timing.p80_us, 4), count=timing.count,
            )  # fmt: skip

        _, finished = measure.race(
            samplers,
            plan=measure.Plan(**request.get("plan", {})),
            budget_s=request.get("budget_s") or float("inf"),
            on_turn=lambda place: self.say(event="at", candidate=indices[place]),
            on_timing=on_timing,
            on_failure=lambda place, error: self._reject(indices[place], error),
        )
        timer.used()
        self.say(event="finished", finished=finished)

    def _sampler(
        self, name: str, call: Callable[[trials.Tensors], None], sets: list[trials.Tensors], calls: int | None
    ) -> tuple[Callable[[], float], int]:
        """A sampler of a candidate; of a backend whose calls no graph captures, a plain loop."""
        if self.device.type != "cuda" or name not in self._uncapturable:
            try:
                return self.timer.sampler(call, sets, calls)
            except RuntimeError:
                if self.device.type != "cuda" or self._is_broken():
                    raise
                self._uncapturable.add(name)
                calls = None
        return measure.LoopTimer(self.device).sampler(call, sets, calls)

    def _attempt(self, index: int, step: Callable[[], str | None]) -> bool:
        """Let a candidate take a step; whether it did. Where it raises, or says what is wrong, it is rejected."""
        self.say(event="at", candidate=index)
        try:
            wrong = step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            self._reject(index, error)
            return False
        if wrong:
            self.say(event="rejected", candidate=index, reason=wrong)
        return not wrong

    def _reject(self, index: int, error: BaseException) -> None:
        fatal = self._is_broken()
        self.say(event="rejected", candidate=index, reason=reason_of(error), fatal=fatal)
        if fatal:
            self.answers.flush()
            os._exit(1)  # after an illegal access nothing runs on this context any more

    def _is_broken(self) -> bool:
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _alarm(self, on: bool) -> None:
        """The kernel ends a process that hangs, whoever holds the interpreter's lock; the tuner should have before."""
        if hasattr(signal, "alarm"):
            signal.alarm(int(self.timeout_s) + _ALARM_MARGIN_S if on else 0)

    def _spec(self, request: Event) -> Spec:
        return spec_from_json(request["spec"])

    def _of(self, spec: Spec) -> trials.Operation:
        if self._operation is None or self._operation[0] != spec:
            self._operation = None  # its memory is free before the next one takes some
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._operation = spec, trials.operation_of(spec)
        return self._operation[1]

    def _config(self, request: Event, spec: Spec, values: Mapping[str, Any]) -> Any:
        tunable = dispatch.get_backend(request["backend"]).load().tunable(spec)
        return tunable.config(**values)


def reason_of(error: BaseException) -> str:
    """An error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(f"{type(error).__name__}: {' | '.join(lines[:4])}" if lines else type(error).__name__)


def one_line(text: str) -> str:
    """A text as entries keep it: printable, on one line, not long."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:_LONGEST_REASON]


def provenance(device: torch.device) -> dict[str, str | int | float | bool | None]:
    """Where and with what something was measured."""
    from mxkv import __version__, devices

    described = devices.describe(device)
    found: dict[str, str | int | float | bool | None] = {
        "device": described.name, "torch": torch.__version__, "mxkv": __version__, "driver": None, "clocks": None,
    }  # fmt: skip
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda or torch.version.hip
        names = "driver_version,clocks.sm,clocks.mem,clocks.max.sm"
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", f"--id=GPU-{uuid}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
            driver, *clocks = done.stdout.strip().splitlines()[0].split(", ")
            found |= {"driver": driver, "clocks": one_line("sm {}, memory {}, most {}".format(*clocks))}
    else:
        found["threads"] = torch.get_num_threads()
    return found


# The tuner's side.


class WorkerEnded(RuntimeError):
    """A worker ended, or hung and was ended, before it had answered; the message says how.

    Attributes:
        by_chance: Whether that need not be the candidate's doing: whoever lacks memory or stops jobs sends signals too,
            and on a machine that is busy elsewhere anything takes long.
    """

    def __init__(self, message: str, *, by_chance: bool) -> None:
        super().__init__(message)
        self.by_chance = by_chance


class WorkerError(RuntimeError):
    """No worker can be started."""


class NoPlace(ValueError):
    """Worker processes cannot import a backend; the message says why."""


class Worker:
    """One worker process.

    Args:
        device: What its calls run on.
        threads: torch's threads in it: on the CPU they are part of a key.
        timeout_s: How long one step may take.
    """

    def __init__(self, device: torch.device, *, threads: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        command = [sys.executable, "-m", "mxkv.autotune_cache.worker", "--device", str(device)]
        command += ["--threads", str(threads), "--timeout", str(timeout_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=_environment(),
            start_new_session=True,  # Ctrl-C is the tuner's to handle
        )  # fmt: skip
        self._pending = b""

    def hello(self) -> Worker:
        """Wait until the process is up.

        Raises:
            WorkerError: It does not come up.
        """
        try:
            for _ in self.ask({"do": "hello"}, timeout_s=_START_S):
                pass
        except WorkerEnded as error:
            self.close()
            raise WorkerError(f"no worker process could be started for {self.device}: {error}") from None
        return self

    def ask(self, request: Event, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Send a request and give its events as they come.

        Raises:
            WorkerEnded: The process died, or no event came within the time limit; it is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._end() from None
        limit = self.timeout_s if timeout_s is None else timeout_s
        while True:
            event = self._event(limit)
            if event["event"] == "done":
                return
            yield event

    def _event(self, limit: float) -> Event:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + limit
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerEnded(f"timed out after {limit:g} s", by_chance=True)
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise self._end()
            self._pending += part
        line, self._pending = self._pending.split(b"\n", 1)
        event: Event = json.loads(line)
        return event

    def _end(self) -> WorkerEnded:
        """How the process ended."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        said = self._last_words()
        self.close()
        if code < 0:
            with contextlib.suppress(ValueError):
                how = one_line(f"the process was killed by {signal.Signals(-code).name}{said}")
                return WorkerEnded(how, by_chance=True)
        return WorkerEnded(one_line(f"the process ended with {code}{said}"), by_chance=code < 0)

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = [line for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    @property
    def alive(self) -> bool:
        """Whether the process can take requests."""
        return not self._log.closed and self._process.poll() is None

    def kill(self) -> None:
        """End the process, whatever it is doing; who waits for its answer learns that it ended."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """End the process, and release what it took here."""
        if self._log.closed:
            return
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may take its time
            self._process.wait(_KILL_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._log.close()


def _environment() -> dict[str, str]:
    """The worker's environment: it finds the same modules, and looks nothing up."""
    found = {k: v for k, v in os.environ.items() if k not in ("MXKV_TUNED", "MXKV_LOG_MISSES", "MXKV_BACKEND")}
    paths = [os.path.abspath(path) for path in sys.path if path]
    return {**found, "MXKV_TUNE": "off", "PYTHONPATH": os.pathsep.join(paths)}


def place_of(backend: str) -> str | None:
    """Where a worker finds a backend that ``dispatch.added_backend`` registered: "module:NAME"; None for the others.

    Raises:
        NoPlace: It finds it nowhere.
    """
    added = next((one for one in dispatch.added() if one.name == backend), None)
    return None if added is None else _place(added)


def _place(backend: Backend) -> str:
    functions = (backend.load, backend.supports, backend.probe)
    for module in dict.fromkeys(getattr(function, "__module__", None) for function in functions):
        for name, value in vars(sys.modules[module]).items() if module in sys.modules else ():
            if value is not backend:
                continue
            if module == "__main__":
                raise NoPlace(
                    f"worker processes cannot import the backend {backend.name!r} from the program that runs "
                    "(__main__): put it into a module of its own"
                )
            return f"{module}:{name}"
    raise NoPlace(
        f"worker processes cannot import the backend {backend.name!r}: expected it as an attribute of the module that "
        "has its functions"
    )


def request(do: str, spec: Spec, backend: str, **fields: Any) -> Event:
    """A request about a kind of call.

    Raises:
        NoPlace: Workers cannot import the backend.
    """
    return {"do": do, "spec": spec_to_json(spec), "backend": backend, "place": place_of(backend), **fields}


if __name__ == "__main__":
    main()
