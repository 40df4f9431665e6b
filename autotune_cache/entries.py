"""Tuned entries: one small JSON file each, read with suspicion and written whole.

A reader sees a file as it was or as it is, never a part of it: entries are written beside their place and renamed.
Whatever is wrong with a file is one warning and a miss. Nothing here is locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mxkv import settings
from mxkv.autotune_cache.keys import SCHEMA, Key, canonical, digest_of, shown
from mxkv.contracts import Tunable

logger = logging.getLogger("mxkv")

KIND = "mxkv tuned configurations"
LARGEST_INT = 1 << 26  # of a configuration

_LARGEST_ENTRY = 1 << 20  # bytes of a file; real ones have a few thousand
_LARGEST_BUNDLE = 1 << 28
_LONGEST_STRING = 1000
_MOST_FIELDS = 64
_MOST_CANDIDATES = 4096
_STALE_TEMPORARY_S = 3600.0  # a write takes milliseconds

_warned: dict[str, object] = {}


class EntryError(ValueError):
    """What was read is no entry; the message says why."""


class StoreError(OSError):
    """An entry could not be written; the message says where that was tried."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What is known of one choice.

    Attributes:
        config: Its values by name.
        median_us: Time of a call, in microseconds; None where it was not timed.
        p20_us: Its 20th percentile.
        p80_us: Its 80th percentile.
        count: How many times went into these.
        rejected: Why it must not be taken, or None.
    """

    config: dict[str, Any]
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    count: int = 0
    rejected: str | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was measured for one key, and which choice is best.

    Attributes:
        key: What it belongs to.
        soft: What made the kernels (:func:`mxkv.autotune_cache.keys.soft_of`).
        best: The choice to take, its values by name.
        candidates: Every choice that was tried.
        default: What would be taken without tuning.
        provenance: Where it comes from: driver, torch, device name, date, clocks. Strings, numbers, bools and None.
    """

    key: Key
    soft: dict[str, str]
    best: dict[str, Any]
    candidates: tuple[Candidate, ...]
    default: dict[str, Any]
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON, with its schema and checksum."""
        data = {
            "schema": SCHEMA,
            "key": dict(self.key.hard),
            "soft": self.soft,
            "best": self.best,
            "default": self.default,
            "candidates": [dataclasses.asdict(candidate) for candidate in self.candidates],
            "provenance": self.provenance,
        }
        return {**data, "checksum": digest_of(data)}

    @classmethod
    def from_json(cls, data: Any, tunable: Tunable | None = None) -> Entry:
        """An entry that was read, every value of it checked.

        Args:
            data: What :meth:`to_json` gave.
            tunable: What may be chosen, where that is known: the best must be among it.

        Raises:
            EntryError: Something is wrong.
        """
        _fields(data, cls._JSON, "the entry")
        _check_envelope(data, "the entry")
        try:
            key = Key.from_json(data["key"])
        except ValueError as error:
            raise EntryError(str(error)) from None
        listed = data["candidates"]
        if not isinstance(listed, list) or len(listed) > _MOST_CANDIDATES:
            raise EntryError(f"candidates are {shown(listed)}, expected a list of them")
        entry = cls(
            key=key,
            soft=_texts(data["soft"], "soft"),
            best=_config(data["best"], "best"),
            candidates=tuple(_candidate(one) for one in listed),
            default=_config(data["default"], "default"),
            provenance=_scalars(data["provenance"], "provenance"),
        )
        entry._check_choices()
        if tunable is not None:
            entry.choice(tunable)
        return entry

    _JSON = frozenset({"schema", "key", "soft", "best", "default", "candidates", "provenance", "checksum"})

    def _check_choices(self) -> None:
        kinds = _kinds(self.best)
        for one in (self.default, *(candidate.config for candidate in self.candidates)):
            if _kinds(one) != kinds:
                raise EntryError(f"the choices {shown(self.best)} and {shown(one)} have not the same fields")
        found = [candidate for candidate in self.candidates if candidate.config == self.best]
        if not found:
            raise EntryError(f"the best, {shown(self.best)}, is not among the candidates")
        if any(candidate.rejected is not None for candidate in found):
            raise EntryError(f"the best, {shown(self.best)}, was rejected: {shown(found[0].rejected)}")

    def choice(self, tunable: Tunable) -> Any:
        """The best as an element of the tunable's space.

        Raises:
            EntryError: It is not in that space.
        """
        for config in tunable.space:
            values = config_to_json(config)
            if values == self.best and _kinds(values) == _kinds(self.best):
                return config
        raise EntryError(f"the best, {shown(self.best)}, is not among the choices of {tunable.config.__name__}")

    def stale(self, soft: Mapping[str, str]) -> tuple[str, ...]:
        """The soft fields in which the entry differs."""
        return tuple(name for name, value in soft.items() if self.soft.get(name) != value)


def config_to_json(config: Any) -> dict[str, Any]:
    """A choice, its values by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _kinds(config: Mapping[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in config.items()}


def _fields(data: Any, expected: frozenset[str], what: str) -> None:
    if not isinstance(data, dict):
        raise EntryError(f"{what} is {shown(data)}, expected an object")
    if data.keys() != expected:
        missing, extra = sorted(expected - data.keys()), sorted(data.keys() - expected)
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has also {shown(extra)}"] * bool(extra)
        raise EntryError(f"{what} {' and '.join(parts)}")


def _check_schema(data: dict[str, Any], what: str) -> None:
    if type(data["schema"]) is not int or data["schema"] != SCHEMA:
        raise EntryError(f"{what} has schema {shown(data['schema'])}, expected {SCHEMA}")


def _check_envelope(data: dict[str, Any], what: str) -> None:
    _check_schema(data, what)
    try:
        expected = digest_of({name: value for name, value in data.items() if name != "checksum"})
    except (ValueError, RecursionError):
        raise EntryError(f"{what} holds a number that is not finite, or is nested too deep") from None
    if data["checksum"] != expected:
        raise EntryError(f"{what}'s checksum does not match")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_STRING or not value.isprintable():
        raise EntryError(
            f"{what} is {shown(value)}, expected a string of at most {_LONGEST_STRING} printable characters"
        )
    return value


def _few(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict) or len(data) > _MOST_FIELDS:
        raise EntryError(f"{what} is {shown(data)}, expected an object of a few fields")
    for name in data:
        _text(name, f"a name in {what}")
    return data


def _texts(data: Any, what: str) -> dict[str, str]:
    return {name: _text(value, f"{what}.{name}") for name, value in _few(data, what).items()}


def _scalars(data: Any, what: str) -> dict[str, Any]:
    for name, value in _few(data, what).items():
        if isinstance(value, str):
            _text(value, f"{what}.{name}")
        elif isinstance(value, float) and math.isfinite(value):
            continue
        elif value is not None and not (isinstance(value, int) and abs(value) < 1 << 63):
            raise EntryError(f"{what}.{name} is {shown(value)}, expected a string, a number, a bool or null")
    return dict(data)


def _config(data: Any, what: str) -> dict[str, Any]:
    for name, value in _few(data, what).items():
        if isinstance(value, bool) or (type(value) is int and 0 < value <= LARGEST_INT):
            continue
        if not isinstance(value, str):
            raise EntryError(f"{what}.{name} is {shown(value)}, expected 1 to {LARGEST_INT}, a bool or a string")
        _text(value, f"{what}.{name}")
    if not data:
        raise EntryError(f"{what} has no fields")
    return dict(data)


def _candidate(data: Any) -> Candidate:
    _fields(data, frozenset(field.name for field in dataclasses.fields(Candidate)), "a candidate")
    times = [data["median_us"], data["p20_us"], data["p80_us"]]
    timed = all(type(t) in (int, float) and math.isfinite(t) and 0 < t < 1e12 for t in times)
    if not timed and times != [None] * 3:
        raise EntryError(f"a candidate's times are {shown(times)}, expected positive numbers or nulls")
    count = data["count"]
    if type(count) is not int or not 0 <= count < 1 << 31:
        raise EntryError(f"a candidate's count is {shown(count)}, expected a number of times")
    if data["rejected"] is not None:
        _text(data["rejected"], "a candidate's rejected")
    return Candidate(**{**data, "config": _config(data["config"], "a candidate's config")})


def parse_json(raw: bytes, largest: int) -> Any:
    """JSON of a file.

    Raises:
        EntryError: It is none, or too large.
    """
    if len(raw) > largest:
        raise EntryError(f"the file has more than {largest} bytes")
    if not raw.strip():
        raise EntryError("the file is empty")
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise EntryError(f"the file is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise EntryError("the file is nested too deep") from None
    except ValueError as error:
        raise EntryError(f"the file is not JSON: {shown(str(error))}") from None


def read_bytes(path: Path, largest: int) -> bytes:
    """At most ``largest + 1`` bytes of a file, which is opened once.

    Raises:
        OSError: It cannot be read.
        EntryError: It is something else than a file.
    """
    # Without O_NONBLOCK a named pipe in the file's place would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise EntryError("it is not a regular file")
        parts, left = [], largest + 1
        while left:
            part = os.read(descriptor, min(left, 1 << 20))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def warn_once(about: object, message: str, *arguments: object) -> None:
    """A warning, unless this process has given one about the same thing."""
    mine = object()
    if _warned.setdefault(str(about), mine) is mine:
        logger.warning(message, *arguments)


def forget_warnings() -> None:
    """Forget which warnings were given (for tests)."""
    _warned.clear()


def write_file(path: Path, data: bytes) -> None:
    """Put a file in place whole: readers see the old one or the new one, also after a crash.

    Raises:
        OSError: It cannot be written; what stood there stands there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system lets a folder be synchronised
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _replace(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except OSError:
        if not target.is_dir() or target.is_symlink():
            raise
        # A folder stands in the file's place. It is not ours to delete, unless it is empty.
        aside = target.with_name(f"{target.name}.{secrets.token_hex(6)}.aside")
        os.rename(target, aside)
        with contextlib.suppress(OSError):
            aside.rmdir()
        os.replace(source, target)


class EntryStore:
    """A folder of entries, one file each.

    Args:
        folder: Where they are; it need not exist. None stands for :func:`user_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """Where the entries are.

        Raises:
            StoreError: The user has no folder for caches.
        """
        if self._folder is None:
            self._folder = user_folder()
        return self._folder

    def path(self, key: Key) -> Path:
        """The file of a key's entry."""
        return self.folder / f"{key.name}.json"

    def read(self, key: Key, tunable: Tunable | None = None) -> Entry | None:
        """A key's entry; None, with one warning for each file, where there is none that can be used."""
        try:
            path = self.path(key)
        except StoreError as error:
            warn_once("no cache folder", "%s", error)
            return None
        return self._read(path, tunable)

    def check(self, path: Path, tunable: Tunable | None = None) -> Entry:
        """The entry of a file.

        Raises:
            OSError: The file cannot be read.
            EntryError: It holds no entry, or another key's than its name says.
        """
        entry = Entry.from_json(parse_json(read_bytes(path, _LARGEST_ENTRY), _LARGEST_ENTRY), tunable)
        if path.stem != entry.key.name:
            raise EntryError(f"it holds the entry {entry.key.name}, whose key is {entry.key.text}")
        return entry

    def _read(self, path: Path, tunable: Tunable | None = None) -> Entry | None:
        try:
            return self.check(path, tunable)
        except FileNotFoundError:
            return None
        except EntryError as error:
            self._warn(path, str(error))
        except OSError as error:
            if error.errno == errno.ENOTDIR or not os.access(self.folder, os.R_OK | os.X_OK):
                warn_once(self.folder, "the cache folder %s cannot be read: %s", self.folder, _reason(error))
            else:
                self._warn(path, _reason(error))
        return None

    def _warn(self, path: Path, reason: str) -> None:
        warn_once(path, "the tuned configuration %s cannot be used: %s; mxkv tune writes it anew", path, reason)

    def write(self, entry: Entry) -> Path:
        """Write an entry in the place of the one that its key had.

        Raises:
            StoreError: It could not be written.
            EntryError: It is none that could be read again.
        """
        data = entry.to_json()
        Entry.from_json(data)
        path = self.path(entry.key)
        try:
            write_file(path, _readable(data))
        except OSError as error:
            raise StoreError(
                error.errno, f"cannot write tuned configurations to {self.folder}: {_reason(error)} "
                "(MXKV_CACHE_DIR names another folder)",
            ) from error  # fmt: skip
        _warned.pop(str(path), None)
        return path

    def paths(self) -> list[Path]:
        """The files of the folder, whatever they hold."""
        try:
            return sorted(p for p in self.folder.iterdir() if p.suffix == ".json" and not p.name.startswith("."))
        except (FileNotFoundError, StoreError):
            return []
        except OSError as error:
            warn_once(self.folder, "the cache folder %s cannot be read: %s", self.folder, _reason(error))
            return []

    def entries(self) -> Iterator[Entry]:
        """Every entry that can be used; one warning for each file that cannot."""
        for path in self.paths():
            entry = self._read(path)
            if entry is not None:
                yield entry

    def remove(self, key: Key) -> bool:
        """Remove a key's entry; whether there was one.

        Raises:
            StoreError: It could not be removed.
        """
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(error.errno, f"cannot remove {self.path(key)}: {_reason(error)}") from error
        return True

    def sweep(self, age_s: float = _STALE_TEMPORARY_S) -> int:
        """Remove what writers that died have left behind; how many files that were."""
        removed = 0
        with contextlib.suppress(OSError):
            for path in list(self.folder.glob(".*.tmp")):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime >= age_s:
                        path.unlink()
                        removed += 1
        return removed


def _readable(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def user_folder() -> Path:
    """Where this user's tuned entries are: below ``MXKV_CACHE_DIR``, else the user's folder for caches.

    Raises:
        StoreError: There is no such folder.
    """
    chosen = settings.current().cache_dir
    if chosen is None:
        import platformdirs

        base = platformdirs.user_cache_path("mxkv", appauthor=False)
        if not base.is_absolute():
            raise StoreError(errno.ENOENT, "no home folder for tuned configurations (MXKV_CACHE_DIR names a folder)")
    else:
        base = Path(chosen)
    return base / "tune" / f"v{SCHEMA}"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Entries in one file.

    Attributes:
        device: What device they are for (for people; what counts is in each key).
        entries: The entries.
    """

    device: dict[str, Any]
    entries: tuple[Entry, ...]


_BUNDLE = frozenset({"schema", "kind", "device", "entries", "checksum"})


def bundle_bytes(entries: Iterable[Entry]) -> bytes:
    """Entries as one JSON file: the same bytes for the same entries, in whatever order they come."""
    chosen = sorted(entries, key=lambda entry: entry.key.name)
    seen = [(e.provenance.get("device", ""), e.key.hard["arch"], e.key.hard["compute_units"]) for e in chosen]
    names = ("name", "arch", "compute_units")
    device = dict(zip(names, seen[0], strict=True)) if len(set(seen)) == 1 else {}
    head = {"schema": SCHEMA, "kind": KIND, "device": device}
    listed = [entry.to_json() for entry in chosen]
    checksum = digest_of({**head, "entries": listed})
    lines = ",\n".join(canonical(one) for one in listed)  # a line each, for diffs
    text = f'{json.dumps(head)[:-1]}, "entries": [\n{lines}\n],\n"checksum": "{checksum}"}}\n'
    return text.encode()


def write_bundle(path: Path, entries: Iterable[Entry]) -> None:
    """Write entries to one file.

    Raises:
        StoreError: It could not be written.
    """
    try:
        write_file(path, bundle_bytes(entries))
    except OSError as error:
        raise StoreError(error.errno, f"cannot write {path}: {_reason(error)}") from error


def _opened(source: Path | bytes) -> dict[str, Any]:
    """A bundle as JSON, its fields checked but for what its entries hold."""
    raw = source if isinstance(source, bytes) else read_bytes(source, _LARGEST_BUNDLE)
    data: dict[str, Any] = parse_json(raw, _LARGEST_BUNDLE)
    _fields(data, _BUNDLE, "the bundle")
    if data["kind"] != KIND:
        raise EntryError(f"the bundle's kind is {shown(data['kind'])}, expected {KIND!r}")
    if not isinstance(data["entries"], list):
        raise EntryError(f"the bundle's entries are {shown(data['entries'])}, expected a list")
    return data


class OpenBundle(Mapping[Key, Entry]):
    """The entries of a file of many, each checked when it is asked for: a look-up needs one of hundreds.

    An entry that is bad is left out, with a warning; each has a checksum of its own.

    Args:
        path: The file.
        trusted: Whether the checksum over all of it need not be compared: it is a file of the installation.

    Raises:
        OSError: The file cannot be read.
        EntryError: It is no bundle.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self._path = path
        data = _opened(path)
        _check_schema(data, "the bundle")
        if not trusted:
            _check_envelope(data, "the bundle")
        self._raw = {_spelling(one): (number, one) for number, one in enumerate(data["entries"])}
        self._checked: dict[Key, Entry | None] = {}

    def __getitem__(self, key: Key) -> Entry:
        if key not in self._checked:
            self._checked[key] = self._check(canonical(dict(key.hard)))
        found = self._checked[key]
        if found is None:
            raise KeyError(key)
        return found

    def _check(self, spelling: str) -> Entry | None:
        number, one = self._raw.get(spelling, (0, None))
        if one is None:
            return None
        try:
            return Entry.from_json(one)
        except EntryError as error:
            warn_once(f"{self._path}:{number}", "entry %d of %s cannot be used: %s", number, self._path, error)
            return None

    def __iter__(self) -> Iterator[Key]:
        for spelling in self._raw:
            found = self._check(spelling)
            if found is not None:
                self._checked[found.key] = found
                yield found.key

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _spelling(one: Any) -> str:
    """What an entry of a bundle is found by; whatever is no entry is found by chance only, and refused then."""
    return canonical(one["key"]) if isinstance(one, dict) and isinstance(one.get("key"), dict) else repr(one)


def read_bundle(source: Path | bytes, *, strict: bool = True) -> Bundle:
    """The entries of one file, or of its bytes.

    Args:
        source: The file or its bytes.
        strict: Whether one bad entry refuses all; otherwise it is left out, with a warning.

    Raises:
        OSError: The file cannot be read.
        EntryError: It is no bundle, or (``strict``) one of its entries is bad.
    """
    data = _opened(source)
    _check_envelope(data, "the bundle")
    device = _scalars(data["device"], "device")
    found: dict[Key, Entry] = {}
    for number, one in enumerate(data["entries"]):
        try:
            entry = Entry.from_json(one)
            if entry.key in found:
                raise EntryError(f"its key is there already: {entry.key.text}")
        except EntryError as error:
            if strict:
                raise EntryError(f"entry {number}: {error}") from None
            where = "a bundle" if isinstance(source, bytes) else source
            warn_once(f"{where}:{number}", "entry %d of %s cannot be used: %s", number, where, error)
        else:
            found[entry.key] = entry
    return Bundle(device, tuple(found.values()))
