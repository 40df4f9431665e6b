"""Tuned entries on disk: what is written is read, whatever else is there is one warning and a miss, nothing is lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mxkv import settings
from mxkv.autotune_cache import entries
from mxkv.autotune_cache.entries import (
    Candidate,
    Entry,
    EntryError,
    EntryStore,
    StoreError,
    bundle_bytes,
    config_to_json,
    read_bundle,
    write_bundle,
)
from mxkv.autotune_cache.keys import digest_of
from tests.test_environment import run
from tests.tuned_entries import SPACE, TUNABLE, Launch, default, entry, key, load_spec, rekeyed, store_spec, tunable


@pytest.fixture
def permissions(tmp_path: Path) -> None:
    """Skips where permissions bind nobody: root, and file systems without them."""
    (tmp_path / "locked").touch(mode=0)
    if os.access(tmp_path / "locked", os.R_OK):
        pytest.skip("permissions do not bind this user")


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    entries.forget_warnings()
    yield
    entries.forget_warnings()


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    return EntryStore(tmp_path / "tune" / "v1")


def signed(data: dict[str, Any]) -> dict[str, Any]:
    """Data with the checksum that belongs to it."""
    bare = {name: value for name, value in data.items() if name != "checksum"}
    return {**bare, "checksum": digest_of(bare)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# Round trips.


def test_an_entry_comes_back(store: EntryStore) -> None:
    written = entry(note="naïve 内存", clocks=1980, locked=True, idle=None)
    path = store.write(written)
    assert path == store.folder / f"{key().name}.json"
    assert store.read(key()) == written
    assert store.read(key(), TUNABLE) == written
    assert EntryStore(store.folder).read(key()) == written
    assert list(store.entries()) == [written]
    assert store.read(key(tokens=1)) is None
    assert written.choice(TUNABLE) is SPACE[3]
    assert [p.name for p in store.folder.iterdir()] == [path.name]


def test_an_entry_replaces_the_former_one(store: EntryStore) -> None:
    store.write(entry(best=SPACE[0]))
    store.write(entry(best=SPACE[2]))
    found = store.read(key())
    assert found is not None
    assert found.choice(TUNABLE) == SPACE[2]
    assert len(store.paths()) == 1


def test_entries_are_removed(store: EntryStore) -> None:
    store.write(entry())
    store.write(entry(key(tokens=1)))
    assert store.remove(key())
    assert not store.remove(key())
    assert store.read(key()) is None
    assert [found.key for found in store.entries()] == [key(tokens=1)]


def test_an_empty_store(store: EntryStore) -> None:
    assert store.read(key()) is None
    assert list(store.entries()) == []
    assert not store.remove(key())
    assert store.sweep() == 0
    assert not store.folder.exists()


def test_a_path_with_blanks_and_other_scripts(tmp_path: Path) -> None:
    store = EntryStore(tmp_path / "mein Ordner" / "缓存 ñ🗄" / "v1")
    store.write(entry())
    assert store.read(key()) == entry()
    write_bundle(store.folder / "alle Einträge.json", [entry()])
    assert read_bundle(store.folder / "alle Einträge.json").entries == (entry(),)


def test_stale_fields_are_named() -> None:
    found = entry()
    assert found.stale({"source": "5ca1ab1e", "compiler": "none 1.0"}) == ()
    assert found.stale({"source": "5ca1ab1e", "compiler": "none 2.0"}) == ("compiler",)
    assert found.stale({"source": "", "compiler": "none 2.0"}) == ("source", "compiler")


def test_what_cannot_be_read_again_is_not_written(store: EntryStore) -> None:
    """Mistakes of whoever makes entries show when they write, not when somebody reads."""
    good = entry()
    for bad in (
        dataclasses.replace(good, best=config_to_json(SPACE[-1])),
        dataclasses.replace(good, provenance={"clocks": [1, 2]}),
        dataclasses.replace(good, candidates=()),
        dataclasses.replace(good, key=rekeyed(key(), arch="unknown")),
    ):
        with pytest.raises(EntryError):
            store.write(bad)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write(dataclasses.replace(good, provenance={"clocks": float("nan")}))
    assert store.paths() == []


# Corruption. Each kind is one warning and a miss, and the next write replaces it.

GOOD = entry().to_json()


def text(data: Any) -> bytes:
    return json.dumps(data).encode()


def with_best(**changes: Any) -> bytes:
    """A hostile choice that is everywhere in the entry, so that the entry agrees with itself."""
    best = {**GOOD["best"], **changes}
    candidates = [{**GOOD["candidates"][0], "config": best}]
    return text(signed({**GOOD, "best": best, "default": best, "candidates": candidates}))


def with_candidate(**changes: Any) -> bytes:
    return text(signed({**GOOD, "candidates": [*GOOD["candidates"], {**GOOD["candidates"][0], **changes}]}))


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "truncated": text(GOOD)[:-40],
    "half": text(GOOD)[: len(text(GOOD)) // 2],
    "zeros": bytes(4096),
    "bad UTF-8": text(GOOD).replace(b"CPU", b"\xff\xfe"),
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "no JSON": b"import os",
    "two documents": text(GOOD) + text(GOOD),
    "a list": text([GOOD]),
    "a number": b"1",
    "null": b"null",
    "a string": b'"entry"',
    "schema 2": text(signed({**GOOD, "schema": 2})),
    "schema true": text(signed({**GOOD, "schema": True})),
    "schema text": text(signed({**GOOD, "schema": "1"})),
    "key of schema 2": text(signed({**GOOD, "key": {**GOOD["key"], "schema": 2}})),
    "wrong checksum": text({**GOOD, "checksum": "0" * 64}),
    "checksum of no text": text({**GOOD, "checksum": None}),
    "a changed value": text({**GOOD, "best": config_to_json(SPACE[2])}),
    "an extra field": text(signed({**GOOD, "exec": "rm"})),
    "an extra field of a candidate": with_candidate(pickle="x"),
    "no checksum": text({k: v for k, v in GOOD.items() if k != "checksum"}),
    **{f"no {name}": text(signed({k: v for k, v in GOOD.items() if k != name})) for name in GOOD if name != "checksum"},
    "key of another call": text(entry(key(tokens=1)).to_json()),
    "key without a device": text(signed({**GOOD, "key": {**GOOD["key"], "arch": "unknown"}})),
    "a block of 10**9": with_best(block_tokens=10**9),
    "one more than allowed": with_best(block_tokens=entries.LARGEST_INT + 1),
    "a negative block": with_best(block_tokens=-8),
    "a block of 0": with_best(block_tokens=0),
    "a bool for an int": with_best(block_tokens=True),
    "an int for a bool": with_best(staged=1),
    "a float for an int": with_best(block_tokens=8.0),
    "a text for an int": with_best(block_tokens="8"),
    "a list for an int": with_best(block_tokens=[8]),
    "null for an int": with_best(block_tokens=None),
    "a choice of no space": with_best(block_tokens=1 << 19),
    "the largest choice": with_best(block_tokens=entries.LARGEST_INT),
    "an extra field of the choice": with_best(maxnreg=8),
    "a text of many bytes": with_best(order="x" * 5000),
    "a text of no letters": with_best(order="\x1b[2J"),
    "no choice": text(signed({**GOOD, "best": {}, "default": {}, "candidates": []})),
    "a best that was rejected": text(signed({**GOOD, "best": config_to_json(SPACE[-1])})),
    "a best that was not tried": text(signed({**GOOD, "candidates": GOOD["candidates"][:2]})),
    "a best that was tried and rejected": with_candidate(config=GOOD["best"], rejected="wrong"),
    "a best of other fields": text(signed({**GOOD, "best": {"block_tokens": 1}})),
    "a best by index": text(signed({**GOOD, "best": 3})),
    "no candidates": text(signed({**GOOD, "candidates": []})),
    "candidates by name": text(signed({**GOOD, "candidates": {"a": GOOD["candidates"][0]}})),
    "a candidate that is a number": text(signed({**GOOD, "candidates": [*GOOD["candidates"], 3]})),
    "NaN": with_candidate().replace(b'"median_us": 10.5', b'"median_us": NaN'),
    "infinity": with_candidate().replace(b'"median_us": 10.5', b'"median_us": Infinity'),
    "a number beyond floats": with_candidate().replace(b'"median_us": 10.5', b'"median_us": 1e999'),
    "a number of many digits": with_candidate().replace(b'"count": 100', b'"count": ' + b"9" * 10_000),
    "a negative time": with_candidate(median_us=-1.0),
    "a time that is a bool": with_candidate(median_us=True),
    "half the times": with_candidate(p20_us=None),
    "a negative count": with_candidate(count=-1),
    "a count that is a bool": with_candidate(count=True),
    "a rejection that is no reason": with_candidate(rejected=False),
    "a nested provenance": text(signed({**GOOD, "provenance": {"a": {"b": 1}}})),
    "a soft field that is no text": text(signed({**GOOD, "soft": {"source": 1}})),
    "nested too deep": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "a huge file": text(GOOD) + b" " * (1 << 21),
}  # fmt: skip


def check_one_warning(store: EntryStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file of ``key()`` is bad: two reads and a listing warn once, and the next write replaces it."""
    store.write(entry(key(tokens=1)))
    caplog.clear()
    before = time.perf_counter()
    assert store.read(key(), TUNABLE) is None
    assert store.read(key(), TUNABLE) is None
    assert EntryStore(store.folder).read(key(), TUNABLE) is None
    assert time.perf_counter() - before < 5
    (message,) = warnings(caplog)
    assert str(path) in message
    assert len(message) < 1000
    assert "\x1b" not in message
    neighbour = store.read(key(tokens=1))
    assert neighbour == entry(key(tokens=1))
    store.write(entry(best=SPACE[1]))
    found = store.read(key(), TUNABLE)
    assert found is not None
    assert found.choice(TUNABLE) == SPACE[1]
    assert len(warnings(caplog)) == 1


ONLY_A_SPACE_TELLS = {
    "a bool for an int", "an int for a bool", "a text for an int", "a choice of no space", "the largest choice",
    "an extra field of the choice",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CONTENTS.keys() - ONLY_A_SPACE_TELLS - {"key of another call"}))
def test_corruption_shows_without_knowing_what_may_be_chosen(kind: str) -> None:
    """As ``mxkv configs verify`` and imports see it: range, type and consistency do not lean on the space."""
    with pytest.raises(EntryError):
        Entry.from_json(entries.parse_json(CONTENTS[kind], 1 << 20))


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_corrupt_file(kind: str, store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    path = store.path(key())
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENTS[kind])
    check_one_warning(store, path, caplog)


def _folder(path: Path) -> None:
    path.mkdir()


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "diary.txt").write_text("dear diary")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_bad(path: Path) -> None:
    (path.parent / "elsewhere").write_text("{}")
    path.symlink_to("elsewhere")


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("make", [_folder, _full_folder, _loop, _pipe, _device, _link_to_bad])
def test_something_else_in_a_files_place(
    make: Callable[[Path], None], store: EntryStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path(key())
    path.parent.mkdir(parents=True)
    make(path)
    check_one_warning(store, path, caplog)
    if make is _full_folder:  # nobody's files are deleted
        assert [p.read_text() for p in store.folder.rglob("diary.txt")] == ["dear diary"]
    if make is _link_to_bad:
        assert (path.parent / "elsewhere").read_text() == "{}"


@pytest.mark.usefixtures("permissions")
def test_a_file_that_must_not_be_read(store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    path = store.write(entry())
    path.chmod(0)
    check_one_warning(store, path, caplog)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read(
    code: int, store: EntryStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where permissions bind nobody, and a disk that fails."""
    path = store.write(entry())
    real = os.open

    def failing(name: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if name == path and flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(code, os.strerror(code), str(name))
        return real(name, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", failing)
    store.write(entry(key(tokens=1)))
    assert store.read(key()) is None
    assert store.read(key()) is None
    (message,) = warnings(caplog)
    assert str(path) in message
    assert os.strerror(code) in message
    assert store.read(key(tokens=1)) is not None


def test_a_dangling_link_is_no_file(store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.folder.mkdir(parents=True)
    store.path(key()).symlink_to("nowhere")
    assert store.read(key()) is None
    store.write(entry())
    assert store.read(key()) == entry()
    assert not warnings(caplog)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("make", [_folder, _pipe, _device])
def test_only_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "one.json")
    with pytest.raises(EntryError, match="not a regular file"):
        read_bundle(tmp_path / "one.json")


def test_a_file_that_is_spoilt_again_is_warned_of_again(store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    for round in (1, 2):
        store.write(entry()).write_text("{")
        assert store.read(key()) is None
        assert store.read(key()) is None
        assert len(warnings(caplog)) == round


def test_a_listing_warns_once_for_each_bad_file(store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.write(entry())
    for number in range(3):
        (store.folder / f"store-{number}.json").write_text("{")
    (store.folder / "store-copy.json").write_bytes(store.path(key()).read_bytes())
    (store.folder / "notes.txt").write_text("mine")
    assert list(store.entries()) == [entry()]
    assert list(store.entries()) == [entry()]
    assert len(warnings(caplog)) == 4
    assert len(store.paths()) == 5


def test_check_says_what_is_wrong(store: EntryStore) -> None:
    path = store.write(entry())
    assert store.check(path, TUNABLE) == entry()
    with pytest.raises(EntryError, match="not among the choices"):
        store.check(path, tunable(space=SPACE[:2]))
    path.write_text("{")
    with pytest.raises(EntryError, match="not JSON"):
        store.check(path)
    with pytest.raises(FileNotFoundError):
        store.check(store.folder / "store-0.json")


def test_a_choice_is_one_of_the_space_in_value_and_type() -> None:
    best = {**config_to_json(SPACE[0]), "block_tokens": True}
    odd = dataclasses.replace(entry(), best=best)
    with pytest.raises(EntryError, match="not among the choices"):
        odd.choice(TUNABLE)
    with pytest.raises(EntryError, match="not among the choices"):
        Entry.from_json(
            dataclasses.replace(entry(), best=best, default=best, candidates=(Candidate(best),)).to_json(), TUNABLE
        )


# Folders that cannot be written, and full disks.


def test_a_folder_that_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    store = EntryStore(tmp_path / "cache" / "tune" / "v1")
    assert store.read(key()) is None
    assert store.read(key(tokens=1)) is None
    assert list(store.entries()) == []
    (message,) = warnings(caplog)
    assert str(store.folder) in message
    with pytest.raises(StoreError, match=r"cannot write tuned configurations to .*v1.*MXKV_CACHE_DIR"):
        store.write(entry())
    with pytest.raises(StoreError):
        store.remove(key())
    assert store.sweep() == 0
    assert (tmp_path / "cache").read_text() == "a file"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_a_file_system_that_nobody_writes(caplog: pytest.LogCaptureFixture) -> None:
    store = EntryStore(Path("/proc/mxkv/tune/v1"))
    assert store.read(key()) is None
    assert not warnings(caplog)
    with pytest.raises(StoreError, match="/proc/mxkv"):
        store.write(entry())


@pytest.mark.usefixtures("permissions")
def test_a_folder_without_the_permission_to_write(store: EntryStore) -> None:
    store.write(entry(best=SPACE[0]))
    store.folder.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="v1"):
            store.write(entry())
        assert store.read(key()) == entry(best=SPACE[0])
    finally:
        store.folder.chmod(0o700)


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_leaves_what_was_there(
    call: str, code: int, store: EntryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    former = entry(best=SPACE[0])
    store.write(former)

    def failing(*arguments: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr("builtins.open", failing)
        else:
            patch.setattr(os, call, failing)
        with pytest.raises(StoreError, match=os.strerror(code)) as caught:
            store.write(entry(best=SPACE[2]))
    assert caught.value.errno == code
    assert store.read(key()) == former
    assert [p.name for p in store.folder.iterdir()] == [f"{key().name}.json"]
    store.write(entry(best=SPACE[2]))
    assert store.read(key()) == entry(best=SPACE[2])
    assert not warnings(caplog)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_is_full(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes themselves find no room: the file was made, and does not stay."""
    store.write(entry(best=SPACE[0]))
    real = open
    monkeypatch.setattr("builtins.open", lambda path, mode, **named: real("/dev/full", "wb", **named))
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
        store.write(entry())
    monkeypatch.undo()
    assert store.read(key()) == entry(best=SPACE[0])


def test_an_interrupt_leaves_no_temporary_file(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write(entry())
    assert list(store.folder.iterdir()) == []


def test_an_entry_is_on_the_disk_before_it_has_its_name(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, synchronised, renamed, and the folder synchronised, in this order."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synchronise(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        if steps[-1] == "file":
            assert os.fstat(descriptor).st_size > 100
        fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        steps.append("rename")
        assert source.parent == target.parent
        assert source not in store.paths()
        assert str(os.getpid()) in source.name
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(os, "replace", rename)
    store.write(entry())
    assert steps == ["file", "rename", "folder"]


def test_a_file_system_that_synchronises_no_folders(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def synchronise(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", synchronise)
    store.write(entry())
    assert store.read(key()) == entry()


def test_what_dead_writers_left_is_invisible_and_swept(store: EntryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.write(entry())
    left = [store.folder / f".{key().name}.json.{pid}-abc.tmp" for pid in (99999999, os.getpid())]
    for path in left:
        path.write_bytes(b'{"schema": 1')
    assert list(store.entries()) == [entry()]
    assert store.sweep() == 0  # they may be under way
    os.utime(left[0], (time.time() - 7200,) * 2)
    assert store.sweep() == 1
    assert [path.exists() for path in left] == [False, True]
    assert store.sweep(age_s=0) == 1
    assert store.read(key()) == entry()
    assert not warnings(caplog)


# Where the folder is.


def test_the_folder_below_the_one_that_the_environment_names(
    fresh_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "a b"))
    settings.reload()
    assert entries.user_folder() == tmp_path / "a b" / "tune" / "v1"
    fresh_settings.setenv("HOME", str(tmp_path))
    fresh_settings.setenv("MXKV_CACHE_DIR", "~/mine")
    settings.reload()
    assert entries.user_folder() == tmp_path / "mine" / "tune" / "v1"
    fresh_settings.chdir(tmp_path)
    fresh_settings.setenv("MXKV_CACHE_DIR", "here")
    settings.reload()
    assert entries.user_folder() == tmp_path / "here" / "tune" / "v1"
    fresh_settings.chdir("/")
    assert EntryStore().folder == tmp_path / "here" / "tune" / "v1"


@pytest.mark.skipif(os.name != "posix", reason="other systems name the folder in other ways")
def test_the_folder_in_the_users_home(fresh_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_settings.setenv("HOME", str(tmp_path))
    fresh_settings.delenv("XDG_CACHE_HOME", raising=False)
    settings.reload()
    assert entries.user_folder().is_relative_to(tmp_path)
    assert entries.user_folder().parts[-3:] == ("mxkv", "tune", "v1")
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_writes_nothing_into_the_working_folder(
    fresh_settings: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import platformdirs

    fresh_settings.chdir(tmp_path)
    fresh_settings.setattr(platformdirs, "user_cache_path", lambda *a, **k: Path("~/.cache/mxkv"))
    store = EntryStore()
    with pytest.raises(StoreError, match="MXKV_CACHE_DIR"):
        store.write(entry())
    assert store.read(key()) is None
    assert store.read(key()) is None
    assert list(store.entries()) == []
    assert len(warnings(caplog)) == 1
    assert list(tmp_path.iterdir()) == []


# Several processes.

COMMON = """
import os, random, signal, sys, time
from pathlib import Path
from mxkv.autotune_cache.entries import EntryStore
from tests.tuned_entries import SPACE, TUNABLE, entry, key, load_spec, store_spec
folder = Path(os.environ["FOLDER"])
store = EntryStore(folder)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_sixteen_processes_lose_nothing(tmp_path: Path) -> None:
    """Each writes 50 entries of its own, and 50 times the one that all write."""
    run(
        COMMON
        + """
keys = [[key(store_spec(latent_dim=32 * (1 + n)), 1 << (p % 16)) for n in range(50)] for p in range(16)]
shared = key(load_spec())
children = []
for mine in keys:
    child = os.fork()
    if not child:
        try:
            for n, one in enumerate(mine):
                store.write(entry(one, SPACE[n % 8], number=n))
                store.write(entry(shared, SPACE[n % 8], writer=os.getpid(), number=n))
                assert store.read(shared) is not None
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    children.append(child)
assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
for mine in keys:
    for n, one in enumerate(mine):
        assert store.read(one) == entry(one, SPACE[n % 8], number=n)
last = store.read(shared)
assert last.provenance["writer"] in children
assert len(store.paths()) == 801
assert sorted(p.suffix for p in folder.iterdir()) == [".json"] * 801
""",
        FOLDER=str(tmp_path / "cache"),
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_kill_at_any_moment_loses_no_finished_entry(tmp_path: Path) -> None:
    """200 writers die, forked from one warm parent; what they said was written is there, and nothing else shows."""
    done = run(
        COMMON
        + """
import logging
class Never(logging.Handler):
    def emit(self, record):
        raise SystemExit("a warning: " + record.getMessage())
logging.getLogger("mxkv").addHandler(Never())
keys = [key(tokens=1 << n) for n in range(8)]
store.write(entry(keys[0], number=-1))
least, temporaries, finished = {0: -1}, 0, 0
random.seed(5)
for attempt in range(200):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            for step in range(10**9):
                number = attempt * 10**6 + step
                store.write(entry(keys[step % 8], SPACE[step % 8], number=number))
                os.write(writing, b"%d %d\\n" % (step % 8, number))
        finally:
            os._exit(1)
    os.close(writing)
    said = b"" if attempt % 2 else os.read(reading, 1 << 16)  # half of them die later than their first write
    time.sleep(random.uniform(0, 0.004))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    for line in said.decode().split("\\n")[:-1]:
        which, number = map(int, line.split())
        least[which] = number
        finished += 1
    for which, number in least.items():
        found = store.read(keys[which], TUNABLE)
        assert found is not None and found.provenance["number"] >= number, (which, number, found)
    for path in store.paths():
        store.check(path, TUNABLE)
    assert len(list(store.entries())) == len(store.paths()) <= 8
    temporaries = len(list(folder.glob(".*.tmp")))
assert finished >= 100, finished
assert store.sweep() == 0
assert store.sweep(age_s=0) == temporaries
assert len(list(folder.iterdir())) == len(store.paths())
print(finished, temporaries)
""",
        FOLDER=str(tmp_path / "cache"),
    )
    finished, temporaries = map(int, done.stdout.split())
    assert temporaries > 0, f"no writer died while it wrote, of {finished} writes"


def test_a_second_process_sees_the_entries_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    run(COMMON + "store.write(entry(number=7))", FOLDER=str(folder))
    found = run(COMMON + "print(store.read(key(), TUNABLE).provenance['number'])", FOLDER=str(folder))
    assert found.stdout.split() == ["7"]


# Bundles.


def some() -> list[Entry]:
    return [entry(key(tokens=1 << n), SPACE[n]) for n in range(5)] + [entry(key(load_spec()))]


def test_a_bundle_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bundle.json"
    write_bundle(path, some())
    found = read_bundle(path)
    assert {e.key: e for e in found.entries} == {e.key: e for e in some()}
    assert found.device == {"name": "CPU", "arch": "cpu", "compute_units": key().hard["compute_units"]}
    assert read_bundle(path.read_bytes()) == found
    assert bundle_bytes(reversed(some())) == path.read_bytes()
    assert read_bundle(bundle_bytes([])).entries == ()
    mixed = [entry(), entry(rekeyed(key(), arch="sm_90"))]
    assert read_bundle(bundle_bytes(mixed)).device == {}
    assert len(path.read_text().splitlines()) == 3 + len(some())  # an entry a line


def rebundled(change: Callable[[dict[str, Any]], Any]) -> bytes:
    data = json.loads(bundle_bytes(some()))
    changed = change(data)
    return text(signed(data if changed is None else changed))


BAD_BUNDLES: dict[str, bytes] = {
    "empty": b"",
    "truncated": bundle_bytes(some())[:-5],
    "bad UTF-8": bundle_bytes(some()).replace(b"CPU", b"\xff"),
    "one entry": text(GOOD),
    "a list": b"[]",
    "schema 2": rebundled(lambda data: data.update(schema=2)),
    "another kind": rebundled(lambda data: data.update(kind="a shopping list")),
    "an extra field": rebundled(lambda data: data.update(more=1)),
    "entries by name": rebundled(lambda data: data.update(entries={"a": GOOD})),
    "a nested device": rebundled(lambda data: data.update(device={"a": {}})),
    "wrong checksum": bundle_bytes(some()).replace(b"2026-01-01", b"2026-01-02"),
}


@pytest.mark.parametrize("kind", BAD_BUNDLES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_bad_bundle_is_refused(kind: str, strict: bool) -> None:
    with pytest.raises(EntryError):
        read_bundle(BAD_BUNDLES[kind], strict=strict)


BAD_ENTRIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hostile": lambda data: data["entries"].__setitem__(1, json.loads(with_best(block_tokens=10**9))),
    "its own checksum": lambda data: data["entries"][1].update(soft={}),
    "no entry": lambda data: data["entries"].__setitem__(1, None),
    "twice the same key": lambda data: data["entries"].__setitem__(1, data["entries"][0]),
}


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_a_bad_entry_of_a_bundle(kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_bytes(rebundled(BAD_ENTRIES[kind]))
    with pytest.raises(EntryError, match="entry 1"):
        read_bundle(path)
    assert not warnings(caplog)
    assert len(read_bundle(path, strict=False).entries) == 5
    assert len(read_bundle(path, strict=False).entries) == 5
    (message,) = warnings(caplog)
    assert str(path) in message
    assert "entry 1" in message


def test_a_bundle_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        write_bundle(tmp_path / "file" / "bundle.json", some())


def test_the_entries_of_these_tests_are_good() -> None:
    assert Entry.from_json(json.loads(text(GOOD)), TUNABLE) == entry()
    assert isinstance(default(1), Launch)
    Entry.from_json(json.loads(with_best()), TUNABLE)
    Entry.from_json(json.loads(with_candidate()), TUNABLE)
    assert store_spec().operation == "store"
