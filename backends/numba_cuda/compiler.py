"""From a kernel to PTX: compiled by Numba once, and kept in mxkv's folder of caches for every process after that.

PTX is compiled for a capability, not for a driver: its header asks for the oldest version of PTX that has what that
capability needs, so that a driver older than the toolkit takes it too. The driver keeps what it makes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import threading
import time
import types as pytypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mxkv import settings
from mxkv.autotune_cache import entries
from mxkv.backends.numba_cuda.backend import installed

_lock = threading.RLock()
_HEADER = "// mxkv "
_LARGEST = 1 << 24  # bytes of a file; real ones have some ten thousand
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)")
_ENVIRONMENT = re.compile(r"^\.common \.global \.align \d+ \.u64 _ZN08NumbaEnv[\w$]+;\n", re.MULTILINE)  # never read
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_BODY = re.compile(r"(\.visible\s+\.entry\s+[\w$]+\([^)]*\)\s*)\{")
_SHARED = re.compile(r"(\.extern\s+\.shared\s+\.align\s+)\d+")
# From a capability on: the PTX that first had it.
_PTX_VERSIONS = (
    ((0, 0), (6, 3)),
    ((8, 0), (7, 0)),
    ((8, 6), (7, 1)),
    ((8, 7), (7, 4)),
    ((8, 9), (7, 8)),
    ((9, 1), (8, 6)),
)


class CompilerError(RuntimeError):
    """Numba cannot compile with what is installed beside it; the message says what it missed."""


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        ptx: Its PTX.
        entry: Its name there.
        seconds: What compiling it took.
        made: Whether it was compiled here, by this process, and not read.
    """

    ptx: str
    entry: str
    seconds: float
    made: bool


@functools.cache
def version() -> str:
    """What compiles, with its version."""
    if settings.numba_simulated():
        return "numba simulator"
    return f"numba-cuda {installed('numba-cuda')}"


@functools.cache
def source() -> str:
    """A hash of everything that kernels are made of."""
    from mxkv import numerics

    text = hashlib.sha256()
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(str(numerics.__file__))):
        text.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return text.hexdigest()[:16]


def flat(arguments: str) -> str:
    """The kinds of a kernel's arguments with its tuples taken apart."""
    return "".join("i" * (tuple_size(kind) or 1) if kind != "f" else kind for kind in arguments)


def tuple_size(kind: str) -> int:
    """How many int64 a kind of argument is a tuple of; 0 for a number."""
    return 0 if kind in "if" else int(kind, 36)


def code_of(
    task: Any, factory: Callable[[Any], Callable[..., None]], arguments: str, capability: tuple[int, int]
) -> Code:
    """A task's kernel, read where it was compiled before.

    Args:
        task: The kernel's constants; their text tells one kernel from another. Its ``bounds``, if it has any, are those
            of :func:`compile_ptx`.
        factory: From them to the kernel.
        arguments: Each of its arguments: "i" int64, "f" fp32, a digit (of base 36) for a tuple of so many int64.
        capability: The device's compute capability.
    """
    key = "\n".join((factory.__qualname__, repr(task), arguments, repr(capability), version(), source()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    found = _read(digest)
    if found is None:
        started = time.perf_counter()
        ptx = compile_ptx(factory(task), arguments, capability, getattr(task, "bounds", None))
        found = Code(ptx, entry_of(ptx), time.perf_counter() - started, True)
        _write(digest, found, f"{factory.__name__} for compute capability {capability[0]}.{capability[1]}")
    return found


def folder() -> Path:
    """Where compiled kernels are kept: beside the tuned configurations.

    Raises:
        StoreError: The user has no folder for caches.
    """
    return entries.user_folder().parent.parent / "numba"


def kept() -> list[dict[str, Any]]:
    """What is known of every kernel that is kept: what it is, and the seconds that compiling it took."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder().glob("*.ptx")):
            with contextlib.suppress(OSError, ValueError, entries.EntryError):
                line = path.open("rb").readline(1000)
                found.append(json.loads(line.removeprefix(_HEADER.encode())))
    return found


def _read(digest: str) -> Code | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, entries.EntryError):
        header, _, ptx = entries.read_bytes(folder() / f"{digest}.ptx", _LARGEST).decode().partition("\n")
        about = json.loads(header.removeprefix(_HEADER))
        if about["checksum"] == _checksum(ptx):
            return Code(ptx, entry_of(ptx), float(about["seconds"]), False)
    return None


def _write(digest: str, code: Code, what: str) -> None:
    about = {"kernel": what, "seconds": round(code.seconds, 3), "checksum": _checksum(code.ptx)}
    try:
        entries.write_file(folder() / f"{digest}.ptx", f"{_HEADER}{json.dumps(about)}\n{code.ptx}".encode())
    except OSError as error:
        reason = error.strerror or error
        entries.warn_once("unwritable kernels", "cannot keep compiled kernels (%s): they are compiled anew", reason)


def _checksum(ptx: str) -> str:
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


def entry_of(ptx: str) -> str:
    """The name of the kernel in PTX.

    Raises:
        ValueError: There is none.
    """
    found = _ENTRY.search(ptx)
    if found is None:
        raise ValueError("the PTX has no kernel")
    return found.group(1)


def compile_ptx(
    function: Callable[..., None],
    arguments: str,
    capability: tuple[int, int],
    bounds: tuple[int, int] | None = None,
) -> str:
    """A kernel as PTX.

    Args:
        function: The kernel.
        arguments: Each of its arguments, as in :func:`code_of`.
        capability: The compute capability.
        bounds: A block's threads, and how many blocks a multiprocessor is to hold at once: they bound a thread's
            registers. Without them a thread has as many as it likes.
    """
    with _explained():
        from numba import cuda, types

    kinds = {"i": types.int64, "f": types.float32}
    signature = types.void(
        *(types.UniTuple(types.int64, tuple_size(kind)) if tuple_size(kind) else kinds[kind] for kind in arguments)
    )
    with _lock, _explained(), _compiling_for(capability):
        ptx: str = cuda.compile_ptx(function, signature, cc=capability)[0]
    ptx = _SHARED.sub(r"\g<1>16", _VERSION.sub(functools.partial(_older, capability), ptx))
    if bounds is not None:
        ptx = _BODY.sub(rf"\g<1>.maxntid {bounds[0]}, 1, 1\n.minnctapersm {bounds[1]}\n{{", ptx)
    # Numba's names count what was compiled before; ours are what a profiler shows.
    return _ENVIRONMENT.sub("", ptx).replace(entry_of(ptx), function.__qualname__.split(".")[0])


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Numba loads itself at the first compilation: what it misses there, it misses among what is installed."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        versions = ", ".join(f"{name} {installed(name) or '(none)'}" for name in ("numba", "numba-cuda", "numpy"))
        raise CompilerError(f"Numba cannot compile here: {error} (installed: {versions})") from error


def _older(capability: tuple[int, int], version: re.Match[str]) -> str:
    given = int(version[1]), int(version[2])
    oldest = max(needed for since, needed in _PTX_VERSIONS if since <= capability)
    major, minor = min(given, oldest)
    return f".version {major}.{minor}"


@contextlib.contextmanager
def _compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Device functions are compiled for what Numba takes for the current device: here, for a capability of ours.

    (It would ask the driver, make a context for the answer, and fail where there is no GPU.)
    """
    from numba.cuda import dispatcher

    module: Any = dispatcher
    before = module.get_current_device
    device = pytypes.SimpleNamespace(compute_capability=capability)
    module.get_current_device = lambda: device
    try:
        yield
    finally:
        module.get_current_device = before
