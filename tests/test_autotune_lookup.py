"""Look-up of tuned configurations: where an answer comes from, what a miss is, what is read and when, snapshots."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mxkv
from mxkv import dispatch, settings
from mxkv.autotune_cache import entries, lookup
from mxkv.autotune_cache.choice import Choice
from mxkv.autotune_cache.entries import Entry, EntryStore, bundle_bytes, write_bundle
from mxkv.autotune_cache.keys import bucket, spec_from_json
from mxkv.autotune_cache.lookup import Found, MissingConfigError, Resolver, resolver
from mxkv.contracts import YES, Backend, Spec, Tunable
from tests.test_environment import run
from tests.tuned_entries import (
    BACKEND,
    CPU,
    SPACE,
    TUNABLE,
    default,
    entry,
    key,
    layout,
    load_spec,
    rekeyed,
    store_spec,
    tunable,
)


@pytest.fixture
def environment(fresh_settings: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Sets variables; the cache, the shipped files and the working folder are empty folders of this test."""
    fresh_settings.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "work").mkdir()
    fresh_settings.chdir(tmp_path / "work")

    def change(**variables: Any) -> None:
        for name, value in variables.items():
            fresh_settings.setenv(f"MXKV_{name.upper()}", str(value))
        settings.reload()

    change(cache_dir=tmp_path / "cache")
    yield change
    assert list((tmp_path / "work").iterdir()) == []


@pytest.fixture
def places(environment: Callable[..., None], tmp_path: Path) -> dict[str, Callable[[Entry], None]]:
    """How an entry gets into each place where one may be, the most important first."""

    def tuned_file(one: Entry) -> None:
        write_bundle(tmp_path / "tuned.json", [one])
        environment(tuned=tmp_path / "tuned.json")

    return {
        "tuned file": tuned_file,
        "snapshot": lambda one: mxkv.load_snapshot(bundle_bytes([one])),
        "cache": lambda one: print(EntryStore().write(one)),
        "shipped": lambda one: write_bundle(tmp_path / "shipped" / "cpu.json", [one]),
    }


def find(tokens: int = 512, spec: Spec | None = None, of: Tunable = TUNABLE, **named: Any) -> Found:
    return resolver().find(spec or store_spec(), (bucket(tokens),), backend=BACKEND, tunable=of, **named)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# Where an answer comes from.


def test_the_default_where_nothing_was_tuned(environment: Callable[..., None], tmp_path: Path) -> None:
    assert find(512) == Found(default(512), "default")
    assert find(5000) == Found(default(8192), "default")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("place", ["tuned file", "snapshot", "cache", "shipped"])
def test_each_place(place: str, places: dict[str, Callable[[Entry], None]]) -> None:
    places[place](entry())
    assert find() == Found(SPACE[3], place, (), entry())
    assert find(257) == find(512)
    for other in (256, 513):
        assert find(other).origin == "default"


def test_a_file_goes_before_a_snapshot_before_the_cache_before_what_is_shipped(
    places: dict[str, Callable[[Entry], None]],
) -> None:
    answers = []
    for number, (place, put) in enumerate(reversed(places.items())):
        former = find().origin
        if place == "tuned file":  # reading the settings again forgets the snapshot
            put(entry(best=SPACE[number]))
            places["snapshot"](entry(best=SPACE[number - 1]))
        else:
            put(entry(best=SPACE[number]))
            resolver().changed()
        if place == "shipped":
            settings.reload()
        answers.append((former, find().origin, find().config))
    order = [*reversed(places)]
    assert answers == [
        (former, place, SPACE[n]) for n, (former, place) in enumerate(zip(["default", *order], order, strict=False))
    ]


@pytest.mark.parametrize("place", ["tuned file", "snapshot", "cache", "shipped"])
@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "sm_90"}, {"compute_units": 132}, {"layout": "any/16"}, {"space": "0123456789abcdef"},
        {"target": "hopper"}, {"backend": "triton"}, {"format": "nvfp4"}, {"tokens": 1024},
    ],
)  # fmt: skip
def test_what_differs_in_a_hard_field_is_a_miss(
    place: str, changes: dict[str, Any], places: dict[str, Callable[[Entry], None]], caplog: pytest.LogCaptureFixture
) -> None:
    places[place](entry(rekeyed(key(), **changes)))
    assert find().origin == "default"
    assert not warnings(caplog)


def test_another_space_or_layout_is_a_miss(places: dict[str, Callable[[Entry], None]]) -> None:
    places["cache"](entry())
    assert find().origin == "cache"
    assert find(of=tunable(space=SPACE[:-1])).origin == "default"
    assert find(spec=store_spec(layout=layout(size=48))).origin == "default"
    assert find(spec=store_spec(layout=layout(size=128, blocks=9))).origin == "cache"


def test_an_unknown_device_never_matches(
    places: dict[str, Callable[[Entry], None]], environment: Callable[..., None], tmp_path: Path,
    fresh_settings: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not even an entry that says it is about an unknown device, put there past every check."""
    environment(log_misses=tmp_path / "misses")
    absent = store_spec(device=torch.device("cuda", 99))
    nowhere = key(absent)
    assert nowhere.hard["arch"] == "unknown"
    resolver().use_snapshot([entry(nowhere)])
    resolver()._kept[nowhere] = entry(nowhere)
    assert find(spec=absent).origin == "default"
    assert not (tmp_path / "misses").exists()
    environment(tune="strict")
    with pytest.raises(MissingConfigError, match="no such device"):
        find(spec=absent)


@pytest.mark.parametrize("place", ["tuned file", "snapshot", "cache", "shipped"])
def test_a_choice_that_is_no_longer_in_the_space(
    place: str, places: dict[str, Callable[[Entry], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its space's hash says that it belongs there, and it does not: one warning and a miss."""
    fewer = tunable(space=SPACE[4:])
    places[place](entry(key(of=fewer), SPACE[0]))
    caplog.clear()
    assert find(of=fewer).origin == "default"
    resolver().changed()
    assert find(of=fewer).origin == "default"
    (message,) = warnings(caplog)
    assert "not among the choices" in message


def test_a_corrupt_entry_is_one_warning_and_a_miss_until_it_is_written_anew(
    environment: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path = EntryStore().write(entry())
    path.write_bytes(path.read_bytes()[:100])
    for _ in range(3):
        assert find().origin == "default"
        resolver().changed()
    (message,) = warnings(caplog)
    assert str(path) in message
    assert resolver().record(entry(best=SPACE[2]))
    assert find() == Found(SPACE[2], "cache", (), entry(best=SPACE[2]))


# Stale entries.


def test_stale_entries_are_used_and_listed_and_warned_of_once(
    places: dict[str, Callable[[Entry], None]], caplog: pytest.LogCaptureFixture
) -> None:
    for tokens in (512, 1024, 2048):
        places["cache"](entry(key(tokens=tokens)))
    newer = tunable(source="new source")
    assert find(512, of=newer) == Found(SPACE[3], "cache", ("source",), entry())
    both = tunable(source="new source", compiler="none 2.0")
    assert find(1024, of=both).stale == ("source", "compiler")
    assert find(2048).stale == ()
    assert find(512, of=newer).stale == ("source",)
    assert resolver().stale == {key(): ("source",), key(tokens=1024): ("source", "compiler")}
    (message,) = warnings(caplog)
    assert key().text in message
    assert "another source" in message


# The memo and its generation.


def test_answers_are_remembered_until_something_changes(
    environment: Callable[..., None], fresh_settings: pytest.MonkeyPatch
) -> None:
    reads = []
    real = EntryStore.read
    fresh_settings.setattr(EntryStore, "read", lambda *a: reads.append(a) or real(*a))
    assert [find().origin for _ in range(3)] == ["default"] * 3
    assert len(reads) == 1
    EntryStore().write(entry())  # by another process, as it were
    assert find().origin == "default"
    resolver().changed()
    assert find().origin == "cache"


def test_the_generation_changes_with_what_a_lookup_may_answer(environment: Callable[..., None]) -> None:
    seen = [resolver().generation]

    def changed() -> bool:
        seen.append(resolver().generation)
        return seen[-1] not in seen[:-1]

    find()
    assert not changed()
    resolver().record(entry())
    assert changed()
    data = mxkv.snapshot()
    mxkv.digest()
    assert not changed()
    mxkv.load_snapshot(data)
    assert changed()
    with pytest.raises(ValueError):
        mxkv.load_snapshot(b"")
    assert not changed()
    settings.reload()
    assert changed()
    resolver().changed()
    assert changed()


def test_a_choice_asks_with_the_bucket_of_its_sizes(environment: Callable[..., None]) -> None:
    """What is tuned for a bucket is what every size of it gets."""
    for power in range(21):
        EntryStore().write(entry(key(tokens=1 << power), SPACE[power % 15]))
    choose = Choice(store_spec(), BACKEND, TUNABLE)
    for size in (1, 2, 3, 4, 5, 500, 512, 513, 65535, 65537, 1 << 20, 1 << 24):
        assert choose(size) == SPACE[(bucket(size).bit_length() - 1) % 15]
    EntryStore().write(entry(key(tokens=1), SPACE[9]))
    resolver().changed()
    assert choose(1) == SPACE[9]


def test_a_reader_that_was_overtaken_does_not_leave_an_old_answer(
    environment: Callable[..., None], fresh_settings: pytest.MonkeyPatch
) -> None:
    """Another thread loads a snapshot while this one looks: the answer of before must not stay."""
    real = EntryStore.read

    def slow(self: EntryStore, *arguments: Any) -> Entry | None:
        found = real(self, *arguments)
        mxkv.load_snapshot(bundle_bytes([entry(best=SPACE[5])]))
        return found

    fresh_settings.setattr(EntryStore, "read", slow)
    assert find().origin == "default"
    assert find() == Found(SPACE[5], "snapshot", (), entry(best=SPACE[5]))


# Policies.


def test_off_reads_nothing(places: dict[str, Callable[[Entry], None]], environment: Callable[..., None]) -> None:
    for put in places.values():
        put(entry())
    environment(tune="off")

    def never(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("something was read or tuned")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "read_bytes", never)
        patch.setattr(os, "open", never)
        token = lookup.tuner.set(never)
        try:
            assert find() == Found(default(512), "default")
            mxkv.digest()
        finally:
            lookup.tuner.reset(token)
        assert mxkv.snapshot() == bundle_bytes([])


def test_strict_takes_what_was_tuned(
    places: dict[str, Callable[[Entry], None]], environment: Callable[..., None]
) -> None:
    places["cache"](entry())
    environment(tune="strict")
    assert find().origin == "cache"


def test_a_strict_miss_names_the_nearest_key_and_what_differs(environment: Callable[..., None], tmp_path: Path) -> None:
    for tokens in (1, 1024, 65536):
        EntryStore().write(entry(key(tokens=tokens)))
    EntryStore().write(entry(key(load_spec())))
    EntryStore().write(entry(key(store_spec("nvfp4"), 2048)))
    environment(tune="strict")
    with pytest.raises(MissingConfigError) as caught:
        find()
    message = str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert key().text in message
    assert key(tokens=1024).name in message
    assert "tokens is 1024, not 512" in message
    assert "nvfp4" not in message
    with pytest.raises(MissingConfigError, match="differs: rotate is false, not true; tokens is 1024, not 2048 "):
        find(2048, store_spec(rotate=True))


def test_a_strict_miss_where_nothing_was_tuned(environment: Callable[..., None], tmp_path: Path) -> None:
    environment(tune="strict")
    with pytest.raises(MissingConfigError, match=r"nothing is tuned in .*cache.*mxkv tune"):
        find()


def test_a_strict_miss_looks_for_the_nearest_everywhere(
    places: dict[str, Callable[[Entry], None]], environment: Callable[..., None]
) -> None:
    places["shipped"](entry(key(tokens=256)))
    places["tuned file"](entry(key(tokens=1)))
    environment(tune="strict")
    with pytest.raises(MissingConfigError, match="tokens is 256, not 512"):
        find()
    places["snapshot"](entry(key(store_spec(), 1024)))
    with pytest.raises(MissingConfigError, match="tokens is 1024, not 2048"):
        find(2048)


def test_a_strict_miss_of_a_corrupt_entry(environment: Callable[..., None]) -> None:
    EntryStore().write(entry()).write_text("{")
    environment(tune="strict")
    with pytest.raises(MissingConfigError, match="nothing is tuned"):
        find()


@pytest.mark.parametrize("value", ["on", "Replay", "0"])
def test_a_policy_that_is_none(value: str, environment: Callable[..., None]) -> None:
    environment(tune=value)
    with pytest.raises(ValueError, match=f"MXKV_TUNE='{value}'.*replay, strict, off"):
        find()


def test_variables_that_are_empty_count_as_not_set(environment: Callable[..., None]) -> None:
    environment(tune="", tuned="", log_misses="", cache_dir="")
    assert settings.current() == settings.Settings()


def test_ranks(fresh_settings: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        fresh_settings.delenv(name, raising=False)
    assert settings.ranks() == settings.Ranks(0, 1, 0)
    fresh_settings.setenv("RANK", "9")
    with pytest.raises(ValueError, match="RANK=9 and WORLD_SIZE=1"):
        settings.ranks()
    fresh_settings.setenv("WORLD_SIZE", "16")
    fresh_settings.setenv("LOCAL_RANK", "1")
    assert settings.ranks() == settings.Ranks(9, 16, 1)
    for name, value in (("RANK", "-1"), ("LOCAL_RANK", "one"), ("WORLD_SIZE", "0"), ("RANK", "¹")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=name):
                settings.ranks()


# The file that MXKV_TUNED names.


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", bundle_bytes([entry()]).replace(b"512", b"513", 1)])
def test_a_bad_tuned_file_is_one_warning(
    content: bytes | None, environment: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_bytes(content)
    environment(tuned=path)
    EntryStore().write(entry())
    assert [find(tokens).origin for tokens in (512, 1024)] == ["cache", "default"]
    (message,) = warnings(caplog)
    assert str(path) in message


@pytest.mark.parametrize("good", [True, False])
def test_files_of_many_entries_are_read_once(
    good: bool, places: dict[str, Callable[[Entry], None]], fresh_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places["shipped"](entry(key(tokens=1)))
    places["tuned file"](entry(key(tokens=2)))
    if not good:
        (tmp_path / "tuned.json").unlink()
        (tmp_path / "shipped" / "cpu.json").unlink()
    read = []
    real = lookup.OpenBundle
    fresh_settings.setattr(lookup, "OpenBundle", lambda path, **named: read.append(path) or real(path, **named))
    assert read == []
    for _ in range(2):
        assert [find(1 << power).origin for power in range(4)] == (
            ["shipped", "tuned file", "default", "default"] if good else ["default"] * 4
        )
        resolver().changed()
    assert read == [tmp_path / "tuned.json", tmp_path / "shipped" / "cpu.json"]


def test_a_bad_entry_of_a_tuned_file_is_left_out(
    environment: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = json.loads(bundle_bytes([entry(), entry(key(tokens=1024))]))
    bundle["entries"][0]["best"]["block_tokens"] = 10**9
    del bundle["checksum"]
    bundle["checksum"] = entries.digest_of(bundle)
    (tmp_path / "tuned.json").write_text(json.dumps(bundle))
    environment(tuned=tmp_path / "tuned.json")
    assert sorted(find(tokens).origin for tokens in (512, 1024)) == ["default", "tuned file"]
    assert len(warnings(caplog)) == 1


def test_shipped_files_are_named_after_devices() -> None:
    assert lookup.device_slug("NVIDIA H200") == "nvidia_h200"
    assert lookup.device_slug("AMD Instinct MI355X (OAM)") == "amd_instinct_mi355x_oam"


def test_shipped_files_are_good() -> None:
    """Every shipped entry can be read, and its file is the one that is looked into for its device."""
    for path in lookup.SHIPPED.glob("*.json"):
        bundle = entries.read_bundle(path)
        assert bundle.entries
        for one in bundle.entries:
            assert lookup.device_slug(str(one.provenance["device"])) == path.stem


# The log of misses.


def test_misses_are_logged_once_for_each_key(environment: Callable[..., None], tmp_path: Path) -> None:
    log = tmp_path / "a folder" / "misses.jsonl"
    log.parent.mkdir()
    environment(log_misses=log)
    EntryStore().write(entry(key(tokens=1)))
    for tokens in (512, 300, 512, 1, 2, 512):
        find(tokens)
        resolver().changed()
    find(64, load_spec("nvfp4", scaled=True))
    find(128, log=False)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["sizes"] for line in lines] == [{"tokens": 512}, {"tokens": 2}, {"tokens": 64}]
    assert {line["backend"] for line in lines} == {BACKEND}
    assert [spec_from_json(line["spec"]) for line in lines] == [
        store_spec(), store_spec(), load_spec("nvfp4", scaled=True),
    ]  # fmt: skip


def test_strict_misses_are_logged(environment: Callable[..., None], tmp_path: Path) -> None:
    environment(log_misses=tmp_path / "misses", tune="strict")
    with pytest.raises(MissingConfigError):
        find()
    assert len((tmp_path / "misses").read_text().splitlines()) == 1


def test_a_log_that_cannot_be_written_is_one_warning(
    environment: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment(log_misses=tmp_path / "no folder" / "misses")
    assert [find(tokens).origin for tokens in (1, 2, 4)] == ["default"] * 3
    (message,) = warnings(caplog)
    assert str(tmp_path / "no folder" / "misses") in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_log_on_a_full_disk(environment: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    environment(log_misses="/dev/full")
    assert [find(tokens).origin for tokens in (1, 2, 4)] == ["default"] * 3
    assert len(warnings(caplog)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_eight_processes_log_whole_lines(tmp_path: Path) -> None:
    run(
        """
import os
from mxkv.autotune_cache.lookup import resolver
from tests.tuned_entries import TUNABLE, store_spec
children = []
for process in range(8):
    child = os.fork()
    if not child:
        try:
            for n in range(10):
                for power in range(21):
                    spec = store_spec(latent_dim=32 * (1 + 10 * process + n))
                    assert resolver().find(spec, (1 << power,), backend="torch", tunable=TUNABLE).origin == "default"
            os._exit(0)
        finally:
            os._exit(1)
    children.append(child)
assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
""",
        MXKV_LOG_MISSES=str(tmp_path / "misses"),
        MXKV_CACHE_DIR=str(tmp_path / "cache"),
    )
    lines = [json.loads(line) for line in (tmp_path / "misses").read_text().splitlines()]
    assert len(lines) == 8 * 10 * 21
    assert len({(spec_from_json(line["spec"]), line["sizes"]["tokens"]) for line in lines}) == len(lines)


# What cannot be written is kept in memory.


def test_what_cannot_be_written_is_kept_for_this_process(
    environment: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environment(cache_dir=tmp_path / "file")
    for tokens in (512, 1024):
        assert not resolver().record(entry(key(tokens=tokens)))
    about_writing = [message for message in warnings(caplog) if "memory" in message]
    assert len(about_writing) == 1
    assert str(tmp_path / "file") in about_writing[0]
    assert find() == Found(SPACE[3], "cache", (), entry())
    assert find(1024).origin == "cache"
    assert set(resolver().visible([CPU])) == {key(), key(tokens=1024)}
    settings.reload()
    assert find().origin == "default"


@pytest.mark.skipif(os.name != "posix", reason="other systems name the folder in other ways")
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    done = run(
        """
        import logging
        logging.basicConfig(format="LOG %(message)s")
        from mxkv.autotune_cache.lookup import resolver
        from tests.tuned_entries import SPACE, TUNABLE, entry, key, store_spec
        for tokens in (512, 1024):
            assert not resolver().record(entry(key(tokens=tokens)))
            found = resolver().find(store_spec(), (tokens,), backend="torch", tunable=TUNABLE)
            assert (found.origin, found.config) == ("cache", SPACE[3])
        """,
        HOME="/dev/null",
        XDG_CACHE_HOME="",
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    assert "/dev/null" in line
    assert "memory only" in line


# What is read, and when.


def test_nothing_is_read_at_import(tmp_path: Path) -> None:
    """No file of tuned configurations is opened, no folder listed or made, no heavy module loaded."""
    write_bundle(tmp_path / "tuned.json", [entry()])
    done = run(
        """
import sys, torch
before, touched = set(sys.modules), []
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename"):
        touched.append((event, str(arguments[0])))
sys.addaudithook(watch)
import mxkv, mxkv.autotune_cache.choice
read = [t for t in touched if t[1].endswith(".json") or "tuned" in t[1].split("/")[-2:] or "/cache" in t[1]]
assert not read, read
assert not [t for t in touched if t[0] in ("os.mkdir", "os.rename")], touched
heavy = {"filelock", "platformdirs", "rich", "typer", "triton", "numba", "mxkv.autotune_cache.tuner"}
assert not heavy & (set(sys.modules) - before)
print(len(touched))
""",
        MXKV_CACHE_DIR=str(tmp_path / "cache"),
        MXKV_TUNED=str(tmp_path / "tuned.json"),
        MXKV_TUNE="no policy",
        MXKV_LOG_MISSES=str(tmp_path / "misses"),
    )
    assert int(done.stdout) > 0  # the hook saw the modules' own files
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


def test_one_of_a_thousand_entries_takes_a_millisecond_and_one_file(tmp_path: Path) -> None:
    done = run(
        """
import os, statistics, sys, time
from mxkv.autotune_cache import lookup
from mxkv.autotune_cache.entries import EntryStore
from tests.tuned_entries import SPACE, TUNABLE, entry, key, store_spec
os.fsync = lambda descriptor: None  # only to fill the folder sooner
specs = [store_spec(latent_dim=32 * (n + 1)) for n in range(50)]
for spec in specs:
    for power in range(20):
        EntryStore().write(entry(key(spec, 1 << power), SPACE[power % 15]))
assert len(EntryStore().paths()) == 1000
opened, watching = [], False
def watch(event, arguments):
    if watching and event in ("open", "os.listdir", "os.scandir"):
        opened.append((event, str(arguments[0])))
sys.addaudithook(watch)
times = []
for attempt in range(41):
    spec, power = specs[attempt], attempt % 20
    resolver, watching = lookup.Resolver(), True
    start = time.perf_counter()
    found = resolver.find(spec, (1 << power,), backend="torch", tunable=TUNABLE)
    times.append(time.perf_counter() - start)
    watching = False
    assert found.origin == "cache" and found.config == SPACE[power % 15]
    expected = str(EntryStore().path(key(spec, 1 << power)))
    assert opened == [("open", expected)], opened
    opened.clear()
print(statistics.median(times))
""",
        MXKV_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert float(done.stdout) <= 1e-3


def test_a_second_process_answers_with_the_entries_of_the_first(environment: Callable[..., None]) -> None:
    EntryStore().write(entry(rekeyed(key(), compute_units=1)))
    done = run(
        """
        import torch
        torch.set_num_threads(1)
        from mxkv.autotune_cache.lookup import resolver
        from tests.tuned_entries import TUNABLE, store_spec
        found = resolver().find(store_spec(), (512,), backend="torch", tunable=TUNABLE)
        print(found.origin, found.config)
        """,
        MXKV_CACHE_DIR=str(settings.current().cache_dir),
    )
    assert done.stdout.strip() == f"cache {SPACE[3]}"


# The tuner's hook.


@pytest.fixture
def hook() -> Iterator[list[Any]]:
    """A tuner that finds SPACE[6] best, and what it was asked."""
    asked: list[Any] = []

    def tune(spec: Spec, buckets: tuple[int, ...], backend: str, tunable: Tunable) -> Entry:
        asked.append((spec, buckets, backend))
        assert lookup.tuner.get() is None
        return entry(key(spec, *buckets), SPACE[6], tunable)

    token = lookup.tuner.set(tune)
    yield asked
    lookup.tuner.reset(token)


def test_a_miss_is_tuned_once(environment: Callable[..., None], hook: list[Any], tmp_path: Path) -> None:
    environment(log_misses=tmp_path / "misses", tune="strict")
    before = resolver().generation
    choose = Choice(store_spec(), BACKEND, TUNABLE)
    assert [choose(512), choose(512), choose(300), find().config] == [SPACE[6]] * 4
    assert hook == [(store_spec(), (512,), BACKEND)]
    assert resolver().generation != before
    assert not (tmp_path / "misses").exists()
    token = lookup.tuner.set(None)
    assert find().origin == "cache"  # also when the block is left
    lookup.tuner.reset(token)


def test_what_was_tuned_is_not_tuned_again(places: dict[str, Callable[[Entry], None]], hook: list[Any]) -> None:
    places["cache"](entry())
    assert find().config == SPACE[3]
    assert hook == []


@pytest.mark.parametrize(("place", "again"), [("cache", 1), ("shipped", 1), ("tuned file", 0), ("snapshot", 0)])
def test_stale_entries_are_tuned_again_unless_the_user_gave_them(
    place: str, again: int, places: dict[str, Callable[[Entry], None]], hook: list[Any]
) -> None:
    newer = tunable(source="new")
    places[place](entry())
    assert find(of=newer).config == SPACE[6 if again else 3]
    assert find(of=newer).stale == (() if again else ("source",))
    assert len(hook) == again


def test_a_tuner_that_leaves_a_call_alone(environment: Callable[..., None]) -> None:
    asked = []
    token = lookup.tuner.set(lambda *a: asked.append(a))
    try:
        assert [find().origin, find().origin] == ["default"] * 2
    finally:
        lookup.tuner.reset(token)
    assert len(asked) == 2
    assert find().origin == "default"


def test_a_tuner_that_fails(environment: Callable[..., None]) -> None:
    def fail(*arguments: Any) -> Entry:
        raise RuntimeError("no device left")

    token = lookup.tuner.set(fail)
    try:
        with pytest.raises(RuntimeError, match="no device left"):
            find()
        assert lookup.tuner.get() is fail
    finally:
        lookup.tuner.reset(token)


def test_nothing_is_tuned_under_capture(
    environment: Callable[..., None], hook: list[Any], fresh_settings: pytest.MonkeyPatch
) -> None:
    EntryStore().write(entry())
    fresh_settings.setattr(torch.cuda, "is_initialized", lambda: True)
    fresh_settings.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert find().config == SPACE[3]  # what is tuned may be used
    with pytest.raises(RuntimeError, match="CUDA graph is captured"):
        find(1024)
    with pytest.raises(RuntimeError, match="tuning"):
        lookup.refuse_capture("mxkv.tuning()")
    assert hook == []
    token = lookup.tuner.set(None)
    assert find(1024).origin == "default"
    lookup.tuner.reset(token)


# Snapshots and digests.


def test_a_snapshot_carries_every_answer_to_another_process(
    places: dict[str, Callable[[Entry], None]], environment: Callable[..., None], tmp_path: Path
) -> None:
    here, shared = entry(best=SPACE[1]), entry(key(tokens=2048), SPACE[2])
    places["cache"](here)
    places["cache"](entry(rekeyed(key(), arch="sm_90")))  # of another device: it is left out
    places["cache"](entry(rekeyed(key(), compute_units=4096)))
    places["shipped"](shared)
    settings.reload()
    data, digest = mxkv.snapshot(), mxkv.digest()
    assert {e.key: e for e in entries.read_bundle(data).entries} == {here.key: here, shared.key: shared}
    assert mxkv.snapshot() == data
    environment(cache_dir=tmp_path / "another")
    (tmp_path / "shipped" / "cpu.json").unlink()
    settings.reload()
    assert find().origin == "default"
    assert mxkv.digest() != digest
    mxkv.load_snapshot(data)
    assert (find(512).config, find(2048).config) == (SPACE[1], SPACE[2])
    assert find().origin == "snapshot"
    assert mxkv.digest() == digest
    assert mxkv.snapshot() == data
    assert not (tmp_path / "another").exists()
    mxkv.load_snapshot(bundle_bytes([shared]))  # instead of the first
    assert (find(512).origin, find(2048).origin) == ("default", "snapshot")


def test_a_snapshot_gives_a_key_its_most_important_entry(places: dict[str, Callable[[Entry], None]]) -> None:
    for number, (place, put) in enumerate(reversed(places.items())):
        if place != "snapshot":
            put(entry(best=SPACE[number]))
    places["snapshot"](entry(best=SPACE[9]))
    (found,) = entries.read_bundle(mxkv.snapshot()).entries
    assert found.choice(TUNABLE) == SPACE[3]
    assert find().config == SPACE[3]


def test_equal_answers_have_equal_digests_in_every_process(environment: Callable[..., None], tmp_path: Path) -> None:
    mine = rekeyed(key(), compute_units=1)
    both = [entry(mine), entry(rekeyed(mine, tokens=1))]
    folders = {
        "some": both,
        "again": [both[1], entry(mine, date="2027-02-02")],
        "other": [both[0], entry(rekeyed(mine, tokens=1), SPACE[0])],
        "fewer": both[:1],
        "none": [],
    }
    for folder, chosen in folders.items():
        for one in chosen:
            EntryStore(tmp_path / folder / "tune" / "v1").write(one)
    code = """
import os, torch
torch.set_num_threads(1)
import mxkv
from mxkv import settings
for policy in ("replay", "strict", "off"):
    for folder in os.environ["FOLDERS"].split(","):
        os.environ["MXKV_TUNE"], os.environ["MXKV_CACHE_DIR"] = policy, os.environ["BASE"] + "/" + folder
        settings.reload()
        print(mxkv.digest())
"""
    outputs = [
        run(code, BASE=str(tmp_path), FOLDERS=",".join(folders), PYTHONHASHSEED=seed).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    some, again, other, fewer, none = outputs[0][:5]
    assert len(some) == 64
    assert some == again
    assert len({some, other, fewer, none}) == 4
    assert outputs[0][5:10] == outputs[0][:5]
    (off,) = set(outputs[0][10:])
    assert off not in outputs[0][:10]


def damaged() -> dict[str, Any]:
    good = bundle_bytes([entry(), entry(key(tokens=1))])
    hostile = json.loads(good)
    hostile["entries"][1]["best"]["block_tokens"] = -1
    del hostile["checksum"]
    return {
        "empty": b"",
        "truncated": good[:-10],
        "a bit": good.replace(b"10.5", b"10.4", 1),
        "bad UTF-8": b"\xff" + good,
        "hostile": json.dumps({**hostile, "checksum": entries.digest_of(hostile)}).encode(),
        "pickle": b"\x80\x04.",
    }


@pytest.mark.parametrize("kind", damaged())
def test_a_corrupt_snapshot_changes_nothing(
    kind: str, environment: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    mxkv.load_snapshot(bundle_bytes([entry(best=SPACE[4])]))
    before = (find(), find(1), mxkv.digest(), mxkv.snapshot(), resolver().generation)
    with pytest.raises(ValueError, match="no snapshot of tuned configurations"):
        mxkv.load_snapshot(damaged()[kind])
    assert (find(), find(1), mxkv.digest(), mxkv.snapshot(), resolver().generation) == before
    assert not warnings(caplog)


def test_a_snapshot_is_bytes(environment: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match="bytes, got str"):
        mxkv.load_snapshot("{}")  # type: ignore[arg-type]
    mxkv.load_snapshot(bytearray(bundle_bytes([entry()])))
    assert find().origin == "snapshot"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 14)), max_size=6))
def test_digests_follow_the_answers(pairs: list[tuple[int, int]]) -> None:
    answers = dict(pairs)
    chosen = [entry(key(tokens=1 << power), SPACE[best]) for power, best in answers.items()]
    try:
        resolver().use_snapshot(chosen)
        first = mxkv.digest()
        resolver().use_snapshot(reversed(chosen))
        assert mxkv.digest() == first
        changed = [entry(e.key, SPACE[0] if e.choice(TUNABLE) != SPACE[0] else SPACE[1]) for e in chosen[:1]]
        resolver().use_snapshot([*chosen[1:], *changed])
        assert (mxkv.digest() == first) == (not chosen)
    finally:
        resolver().reset()


# Warm-up.


class Planted:
    """Operations that say what they are asked to compile."""

    def __init__(self, tunable: Tunable | None = TUNABLE, compiles: bool = True) -> None:
        self.compiled: list[Any] = []
        if tunable is not None:
            self.tunable = lambda spec: tunable
        if compiles:
            self.compile = lambda spec, config: self.compiled.append(config)

    def store(self, *arguments: Any) -> None:
        raise AssertionError("a warm-up runs nothing")


@pytest.fixture
def planted(environment: Callable[..., None]) -> Iterator[Callable[..., Planted]]:
    blocks = []

    def plant(**named: Any) -> Planted:
        operations = Planted(**named)
        backend = Backend("planted", 1000, "", lambda device: YES, lambda spec: YES, lambda: operations,
                          frozenset({"store"}))  # fmt: skip
        blocks.append(dispatch.added_backend(backend))
        blocks[-1].__enter__()
        return operations

    yield plant
    for block in reversed(blocks):
        block.__exit__(None, None, None)


def planted_key(tokens: int) -> Any:
    return key(tokens=tokens, backend="planted")


def test_warmup_compiles_each_configuration_once(planted: Callable[..., Planted]) -> None:
    operations = planted()
    EntryStore().write(entry(planted_key(64), SPACE[5]))
    mxkv.warmup([store_spec()])
    assert operations.compiled == [default(1), SPACE[5], default(1 << 20)]
    operations.compiled.clear()
    mxkv.warmup([store_spec()], tokens=[50, 64, 1, 2])
    assert operations.compiled == [default(1), SPACE[5]]
    operations.compiled.clear()
    mxkv.warmup([store_spec()], tokens=5000)
    assert operations.compiled == [default(5000)]


def test_warmup_of_several_sizes(planted: Callable[..., Planted]) -> None:
    two = tunable(sizes=("tokens", "keys"), default=lambda tokens, keys: SPACE[0] if tokens < keys else SPACE[1])
    operations = planted(tunable=two)
    mxkv.warmup([store_spec()])
    assert operations.compiled == [SPACE[1], SPACE[0]]
    operations.compiled.clear()
    mxkv.warmup([store_spec()], tokens=[(3, 100)])
    assert operations.compiled == [SPACE[0]]
    with pytest.raises(ValueError, match="one bucket for each"):
        mxkv.warmup([store_spec()], tokens=[3])


@pytest.mark.parametrize("named", [{"tunable": None}, {"compiles": False}])
def test_warmup_where_there_is_nothing_to_compile(named: dict[str, Any], planted: Callable[..., Planted]) -> None:
    operations = planted(**named)
    mxkv.warmup([store_spec()])
    assert operations.compiled == []


def test_warmup_of_backends_as_they_are(environment: Callable[..., None]) -> None:
    mxkv.warmup([store_spec(), load_spec()], tokens=[1, 100])


def test_warmup_logs_only_the_sizes_that_are_named(
    planted: Callable[..., Planted], environment: Callable[..., None], tmp_path: Path
) -> None:
    planted()
    environment(log_misses=tmp_path / "misses")
    mxkv.warmup([store_spec()])
    assert not (tmp_path / "misses").exists()
    settings.reload()
    mxkv.warmup([store_spec()], tokens=[1, 2])
    assert len((tmp_path / "misses").read_text().splitlines()) == 2


def test_a_strict_warmup(planted: Callable[..., Planted], environment: Callable[..., None]) -> None:
    operations = planted()
    environment(tune="strict")
    with pytest.raises(MissingConfigError):
        mxkv.warmup([store_spec()])
    EntryStore().write(entry(planted_key(64), SPACE[5]))
    mxkv.warmup([store_spec()])
    assert operations.compiled == [SPACE[5]]
    with pytest.raises(MissingConfigError, match="tokens is 64, not 128"):
        mxkv.warmup([store_spec()], tokens=[64, 128])


def test_the_public_names() -> None:
    for name in ("snapshot", "load_snapshot", "digest", "warmup", "tuning", "MissingConfigError"):
        assert name in mxkv.__all__
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        mxkv.tune  # noqa: B018


def test_resolvers_share_nothing(environment: Callable[..., None]) -> None:
    one, two = Resolver(), Resolver()
    one.use_snapshot([entry()])
    asked = {"spec": store_spec(), "buckets": (512,), "backend": BACKEND, "tunable": TUNABLE}
    assert one.find(**asked).origin == "snapshot"
    assert two.find(**asked).origin == "default"


def test_threads_that_all_miss_log_once(environment: Callable[..., None], tmp_path: Path) -> None:
    import threading

    environment(log_misses=tmp_path / "misses")
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        for power in range(21):
            find(1 << power)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "misses").read_text().splitlines()) == 21
