"""``mxkv tune`` and ``mxkv configs``: what they print, how they exit, what they leave in the cache."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mxkv
from mxkv import dispatch, settings
from mxkv.autotune_cache import lookup, tuner
from mxkv.autotune_cache.entries import Entry, EntryStore, read_bundle, write_bundle
from mxkv.autotune_cache.keys import Key, spec_to_json
from mxkv.cli import configs, make_app
from mxkv.cli import tune as tune_command
from tests import planted_backend as planted

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--backend", "planted", "--device", "cpu", "--format", "mxfp4", "--latent", "64")
FIRST = (*SMALL, "--op", "store", "--tokens", "2")  # two keys: plain, and with RoPE
REST = (*SMALL, "--op", "load", "--tokens", "2")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), list(arguments))


def as_json(result: Result) -> Any:
    assert result.stdout.startswith(("{", "[")), result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A cache with two tuned keys, and what ``mxkv tune`` printed."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch, dispatch.added_backend(planted.SOUND):
        for name in settings.VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("MXKV_CACHE_DIR", str(folder))
        settings.reload()
        result = invoke("tune", *FIRST)
    settings.reload()
    return folder, result


@pytest.fixture
def empty_cache(tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing shipped."""
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "cache"))
    fresh_settings.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    settings.reload()
    return tmp_path / "cache" / "tune" / "v1"


@pytest.fixture
def cache(empty_cache: Path) -> Iterator[Path]:
    """An empty cache; the planted backend is there."""
    with dispatch.added_backend(planted.SOUND):
        yield empty_cache


@pytest.fixture
def tuned(cache: Path, tuned_once: tuple[Path, Result]) -> Path:
    """A cache of the test's own with two tuned keys."""
    shutil.copytree(tuned_once[0], cache.parent.parent, dirs_exist_ok=True)
    lookup.resolver().reset()
    return cache


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(tuner, "Worker", refuse)


# tune


def test_tune_prints_lines_a_table_and_a_summary(tuned_once: tuple[Path, Result]) -> None:
    folder, result = tuned_once
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [line.split()[0] for line in lines] == ["[1/2]", "[2/2]"]
    assert "store mxfp4 d=64, 2 tokens: tuned" in lines[0]
    assert "store mxfp4 d=64 rope, 2 tokens: tuned" in lines[1]
    assert "to go]" in lines[0]
    assert "Before and after" in result.stdout
    assert "mode=good delay_us=20" in result.stdout
    assert "2 keys (2 tuned), 6 candidates of which 6 were timed now and 0 are rejected" in result.stdout
    assert len(list((folder / "tune" / "v1").glob("*.json"))) == 2


@pytest.mark.usefixtures("without_workers")
def test_tune_again_keeps_everything(tuned: Path) -> None:
    found = as_json(invoke("tune", *FIRST, "--json"))
    assert found["summary"]["kept"] == found["summary"]["keys"] == 2
    assert found["summary"]["timed_now"] == 0
    assert not found["interrupted"]
    assert found["error"] is None
    for row in found["keys"]:
        assert row["status"] == "kept"
        assert row["best"] == {"mode": "good", "delay_us": 20}
        assert row["default"] == {"mode": "good", "delay_us": 100}
        assert row["ratio"] == pytest.approx(row["default_us"] / row["best_us"])
        assert row["ratio"] > 1


def test_tune_json_is_one_document_and_progress_goes_to_stderr(cache: Path) -> None:
    result = invoke("tune", *REST, "--json")
    found = as_json(result)
    assert [row["status"] for row in found["keys"]] == ["tuned"]
    assert found["summary"]["seconds"] > 0
    assert found["summary"]["largest_ratio"] == found["keys"][0]["ratio"]
    assert "[1/1] load mxfp4 d=64, 2 tokens: tuned" in result.stderr


@pytest.mark.usefixtures("empty_cache")
def test_tune_reports_rejections_and_failures() -> None:
    with dispatch.added_backend(planted.HOPELESS):
        result = invoke("tune", *REST)
    assert result.exit_code == 1
    assert "mode=wrong delay_us=1 is rejected: wrong bytes" in result.stdout
    assert "failed: load mxfp4 d=64, 2 tokens: every candidate was rejected" in result.stdout
    assert "1 keys could not be tuned" in result.stderr


@pytest.mark.usefixtures("without_workers")
def test_dry_run_lists_what_would_be_tuned(tuned: Path) -> None:
    result = invoke("tune", *SMALL, "--tokens", "2", "--dry-run")
    assert result.exit_code == 0
    assert "new: load mxfp4 d=64, 2 tokens, 3 candidates" in result.stdout
    assert "1 of 3 keys would be tuned on cpu" in result.stdout
    found = as_json(invoke("tune", *SMALL, "--tokens", "2", "--dry-run", "--json"))
    assert sorted(row["state"] for row in found["keys"]) == ["kept", "kept", "new"]
    assert found["to_tune"] == 1
    everything = as_json(invoke("tune", "--preset", "all", "--device", "cpu", "--dry-run", "--json"))
    assert everything["to_tune"] == len(everything["keys"]) == 21 * (3 * len(mxkv.FORMATS) + 3)


@pytest.mark.usefixtures("without_workers")
def test_check_exits_with_1_where_a_key_is_missing(tuned: Path) -> None:
    there = invoke("tune", *FIRST, "--check")
    assert there.exit_code == 0
    assert "2 calls: 0 have no tuned configuration, 0 a stale one" in there.stdout
    missing = invoke("tune", *SMALL, "--tokens", "2", "--check")
    assert missing.exit_code == 1
    assert "missing: load mxfp4 d=64, 2 tokens" in missing.stdout
    found = as_json(invoke("tune", *SMALL, "--tokens", "2", "--check", "--json"))
    assert not found["ok"]
    assert [row["call"] for row in found["missing"]] == ["load mxfp4 d=64, 2 tokens"]


def a_log(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def a_call(device: str = "cpu", backend: str = "planted") -> dict[str, Any]:
    spec = mxkv.StoreSpec(torch.device(device), mxkv.FORMATS["mxfp4"], 64, torch.bfloat16, layout())
    return {"spec": spec_to_json(spec), "sizes": {"tokens": 2}, "backend": backend}


@pytest.mark.usefixtures("without_workers")
def test_a_check_of_nothing_is_no_success(tuned: Path, tmp_path: Path) -> None:
    here = a_log(tmp_path / "here", a_call())
    assert invoke("tune", "--from-log", here, "--device", "cpu", "--check").exit_code == 0
    unusable = {
        "garbage": a_log(tmp_path / "garbage", "not a line", [1]),
        "elsewhere": a_log(tmp_path / "elsewhere", a_call("cuda:0"), a_call("cuda:1")),
        "no backend": a_log(tmp_path / "no backend", a_call(backend="none such"), ""),
    }
    for log in unusable.values():
        for option in ("--check", "--dry-run", "--json"):
            result = invoke("tune", "--from-log", log, "--device", "cpu", option)
            assert result.exit_code == 1
            assert f"lines of {log} is a call that can be tuned here" in result.stderr
        found = as_json(invoke("tune", "--from-log", log, "--device", "cpu", "--check", "--json"))
        assert found["ok"] is False
        assert "nothing was checked" in found["error"]
        assert found["skipped_lines"]
    empty = a_log(tmp_path / "empty")
    result = invoke("tune", "--from-log", empty, "--device", "cpu", "--check")
    assert result.exit_code == 1
    assert f"nothing was checked: {empty} has no call" in result.stderr
    assert invoke("tune", "--from-log", empty, "--device", "cpu").exit_code == 0  # there is nothing to do
    result = invoke("tune", "--from-log", here, "--device", "cpu", "--check", "--op", "load")
    assert result.exit_code == 1
    assert "has no call that was asked for" in result.stderr
    assert invoke("tune", "--from-log", here, "--device", "cpu", "--check", "--format", "mxfp4").exit_code == 0
    some = a_log(tmp_path / "some", a_call("cuda:0"), a_call())
    assert invoke("tune", "--from-log", some, "--device", "cpu", "--check").exit_code == 0


@pytest.mark.parametrize("arguments", [("--op", "stor"), ("--format", "mxfp5")])
@pytest.mark.usefixtures("without_workers")
def test_filters_of_a_log_are_checked(tuned: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    log = a_log(tmp_path / "log", a_call())
    for option in ("--check", "--dry-run"):
        result = invoke("tune", "--from-log", log, "--device", "cpu", option, *arguments)
        assert result.exit_code == 2
        assert arguments[1] in result.stderr


@pytest.mark.usefixtures("without_workers")
def test_check_under_strict_lists_instead_of_raising(tuned: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    fresh_settings.setenv("MXKV_TUNE", "strict")
    settings.reload()
    assert invoke("tune", *FIRST, "--check").exit_code == 0
    result = invoke("tune", *REST, "--check")
    assert result.exit_code == 1
    assert "missing: load" in result.stdout


def test_a_log_of_misses_is_replayed(cache: Path, tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    log = tmp_path / "misses"
    fresh_settings.setenv("MXKV_LOG_MISSES", str(log))
    settings.reload()
    pages = mxkv.empty_cache("mxfp4", 2, 64, 64)
    mxkv.store(pages, torch.zeros(2, 64), torch.arange(2), backend="planted")
    with log.open("a") as file:
        file.write("not a line\n")
        other = spec_to_json(mxkv.LoadSpec(torch.device("cuda:1"), mxkv.FORMATS["mxfp4"], 64, torch.float32, layout()))
        file.write(json.dumps({"spec": other, "sizes": {"tokens": 2}, "backend": "planted"}) + "\n")
    result = invoke("tune", "--from-log", str(log), "--device", "cpu", "--json")
    found = as_json(result)
    assert [(row["call"], row["status"]) for row in found["keys"]] == [("store mxfp4 d=64 float32, 2 tokens", "tuned")]
    assert found["skipped_lines"] == [
        "line 2 is not a call: it is not JSON",
        "line 3 cannot be tuned: it is a call on cuda:1, and cpu is tuned",
    ]
    assert "line 2" in result.stderr
    planted.launches.clear()
    mxkv.store(pages, torch.zeros(2, 64), torch.arange(2), backend="planted")
    assert planted.launches[0][1] == planted.BEST
    assert invoke("tune", "--from-log", str(log), "--device", "cpu", "--op", "load").exit_code == 0
    assert invoke("tune", "--from-log", str(tmp_path / "none"), "--device", "cpu").exit_code == 2


def layout() -> Any:
    return mxkv.paging.contiguous_layout(mxkv.FORMATS["mxfp4"], 64, 2, 64)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("without_workers")
def test_a_spent_budget_leaves_keys(cache: Path) -> None:
    found = as_json(invoke("tune", *FIRST, "--budget", "0", "--json"))
    assert found["summary"]["left"] == 2


@pytest.mark.usefixtures("without_workers")
def test_an_unwritable_cache_is_named(cache: Path, tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "file"))
    settings.reload()
    result = invoke("tune", *FIRST)
    assert result.exit_code == 1
    assert f"cannot write tuned configurations to {tmp_path / 'file'}" in result.stderr
    assert result.stdout == ""
    found = invoke("tune", *FIRST, "--json")
    assert found.exit_code == 1
    assert str(tmp_path / "file") in as_json(found)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--op", "rotate"),
        ("--format", "none"),
        ("--preset", "some"),
        ("--device", "cuda:99"),
        ("--backend", "none"),
        ("--format", "mxfp4", "--latent", "33"),
        ("--budget", "-1"),
        ("--tokens", "0"),
    ],
)
@pytest.mark.usefixtures("without_workers")
def test_bad_options_are_errors(cache: Path, arguments: tuple[str, ...]) -> None:
    assert invoke("tune", *arguments).exit_code == 2


@pytest.mark.usefixtures("without_workers")
def test_torchrun_shards_the_work(cache: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    fresh_settings.setenv("WORLD_SIZE", "3")
    parts = []
    for rank in range(3):
        fresh_settings.setenv("RANK", str(rank))
        fresh_settings.setenv("LOCAL_RANK", str(rank))
        parts.append(as_json(invoke("tune", *SMALL, "--dry-run", "--json")))
    assert [part["rank"] for part in parts] == [0, 1, 2]
    keys = [row["key"] for part in parts for row in part["keys"]]
    assert len(keys) == len(set(keys)) == 3 * 8
    fresh_settings.setenv("RANK", "3")
    assert invoke("tune", *SMALL, "--dry-run").exit_code == 2


def test_the_device_of_a_rank_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_command.output, "checked_device", torch.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert tune_command._device(None) == tune_command._device("cuda") == torch.device("cuda:5")
    assert tune_command._device("cuda:2") == torch.device("cuda:2")
    assert tune_command._device("cpu") == torch.device("cpu")


def test_a_terminal_gets_a_bar(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with tune_command._progress(False) as told:
        told(tuner.Progress(1, 2, 1.0, 1.0, note="something [odd]"))
    assert not isinstance(told, tune_command._Lines)
    with tune_command._progress(True) as told:
        assert isinstance(told, tune_command._Lines)


def test_ctrl_c_keeps_what_is_done(cache: Path, tmp_path: Path) -> None:
    code = (
        "from mxkv import dispatch; from mxkv.cli import make_app; from tests.planted_backend import DRAGGING\n"
        "with dispatch.added_backend(DRAGGING): make_app()()\n"
    )
    command = [sys.executable, "-c", code, "tune", *SMALL, "--op", "store", "--tokens", "1", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run in the background of a script were told to ignore it, and so would this process be.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    assert "[1/2]" in process.stderr.readline()
    time.sleep(0.5)  # in the middle of the second key
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "run it again to go on" in err
    found = json.loads(out)
    assert found["interrupted"]
    assert [row["status"] for row in found["keys"]] == ["tuned", "partial"]
    assert found["keys"][1]["call"] == "store mxfp4 d=64 rope, 1 tokens"
    assert (found["summary"]["tuned"], found["summary"]["partial"]) == (1, 1)
    finished = [entry for entry in EntryStore(cache).entries() if entry.provenance["finished"]]
    assert [entry.key.name for entry in finished] == [found["keys"][0]["key"]]
    assert not [path.name for path in cache.iterdir() if path.suffix == ".tmp"]


def test_tune_anew(tuned: Path) -> None:
    dates = {path: path.read_bytes() for path in tuned.glob("*.json")}
    found = as_json(invoke("tune", *FIRST, "--force", "--dry-run", "--json"))
    assert [row["state"] for row in found["keys"]] == ["forced"] * 2
    found = as_json(invoke("tune", *FIRST, "--force", "--json"))
    assert [(row["status"], row["timed_now"]) for row in found["keys"]] == [("tuned", 3)] * 2
    assert all(path.read_bytes() != before for path, before in dates.items())


# configs


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def test_list(tuned: Path) -> None:
    shown = invoke("configs", "list").stdout
    assert all(name in shown for name in names(tuned))
    assert "2 entries" in shown
    found = as_json(invoke("configs", "list", "--json"))
    assert found["folder"] == str(tuned)
    assert sorted(row["key"] for row in found["entries"]) == names(tuned)
    for row in found["entries"]:
        assert row["origin"] == "cache"
        assert row["stale"] == []
        assert row["candidates"] == 3
        assert row["ratio"] > 1
        assert row["call"].startswith("store mxfp4 d=64")
    assert as_json(invoke("configs", "list", "--op", "load", "--json"))["entries"] == []


def test_list_takes_filters(tuned: Path) -> None:
    entry = next(EntryStore(tuned).entries())
    shipped = dataclasses.replace(
        entry, key=Key({**entry.key.hard, "arch": "sm_90", "compute_units": 132}), provenance={"device": "NVIDIA H200"}
    )
    lookup.SHIPPED.mkdir()
    write_bundle(lookup.SHIPPED / "nvidia_h200.json", [shipped])

    def listed(*arguments: str) -> list[str]:
        return sorted(row["origin"] for row in as_json(invoke("configs", "list", *arguments, "--json"))["entries"])

    assert listed() == ["cache", "cache", "nvidia_h200"]
    assert listed("--user") == listed("--device", "cpu") == ["cache", "cache"]
    assert listed("--shipped") == listed("--device", "h200") == ["nvidia_h200"]
    assert listed("--user", "--shipped") == listed()
    assert listed("--device", "A100") == listed("--user", "--device", "H200") == listed("--op", "load") == []
    for command in (("list",), ("clear",), ("export", "file")):
        result = invoke("configs", *command, "--op", "stor")
        assert result.exit_code == 2
        assert "unknown operation stor" in result.stderr
    assert len(names(tuned)) == 2


def test_entries_of_a_cpu_show_their_threads(tuned: Path) -> None:
    store = EntryStore(tuned)
    for entry in [*store.entries()]:
        store.write(dataclasses.replace(entry, key=Key({**entry.key.hard, "compute_units": 77})))
    shown = invoke("configs", "list").stdout
    here = torch.get_num_threads()
    assert shown.count("CPU, 77 threads") == 2
    assert shown.count(f"CPU, {here} threads") == 2
    units = [row["compute_units"] for row in as_json(invoke("configs", "list", "--json"))["entries"]]
    assert sorted(units) == sorted([here, here, 77, 77])


def test_show_takes_the_beginning_of_a_name(tuned: Path) -> None:
    name = names(tuned)[0]
    for beginning in (name, name[:12], name.split("-")[1][:6]):
        found = as_json(invoke("configs", "show", beginning, "--json"))
        assert found["name"] == name
        assert len(found["candidates"]) == 3
        assert found["key"]["tokens"] == 2
    shown = invoke("configs", "show", name).stdout
    for text in (name, "delay_us=2000", "best", "default", "latent_dim"):
        assert text in shown
    several = invoke("configs", "show", "store")
    assert several.exit_code == 2
    assert "the beginning of 2 names" in several.stderr
    assert invoke("configs", "show", "none").exit_code == 2


def test_export_and_import(tuned: Path, tmp_path: Path) -> None:
    before = [*EntryStore(tuned).entries()]
    bundle = tmp_path / "b.json"
    assert as_json(invoke("configs", "export", str(bundle), "--json")) == {"file": str(bundle), "entries": 2}
    assert "2 entries removed" in invoke("configs", "clear").stdout
    assert names(tuned) == []
    assert invoke("configs", "export", str(bundle)).exit_code == 1
    found = as_json(invoke("configs", "import", str(bundle), "--json"))
    assert (found["entries"], found["replaced"]) == (2, 0)
    assert [*EntryStore(tuned).entries()] == before
    assert "2 of them in the place of others" in invoke("configs", "import", str(bundle)).stdout


def test_a_bad_bundle_changes_nothing(tuned: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b.json"
    invoke("configs", "export", str(bundle))
    invoke("configs", "clear")
    bundle.write_bytes(bundle.read_bytes().replace(b'"delay_us":20', b'"delay_us":21'))
    result = invoke("configs", "import", str(bundle))
    assert result.exit_code == 2
    assert "checksum" in result.stderr
    assert names(tuned) == []
    assert invoke("configs", "import", str(tmp_path / "none")).exit_code == 2


def test_unwritable_places_are_named(tuned: Path, tmp_path: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "b.json"
    invoke("configs", "export", str(bundle))
    (tmp_path / "file").touch()
    result = invoke("configs", "export", str(tmp_path / "file" / "b.json"))
    assert result.exit_code == 1
    assert str(tmp_path / "file") in result.stderr
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path / "file"))
    settings.reload()
    result = invoke("configs", "import", str(bundle))
    assert result.exit_code == 1
    assert f"cannot write tuned configurations to {tmp_path / 'file'}" in result.stderr


def test_clear_takes_an_operation(tuned: Path) -> None:
    assert as_json(invoke("configs", "clear", "--op", "load", "--json"))["removed"] == 0
    (tuned / "load-of-garbage.json").touch()
    assert as_json(invoke("configs", "clear", "--op", "load", "--json"))["removed"] == 1
    assert as_json(invoke("configs", "clear", "--json"))["removed"] == 2


def test_clear_takes_beginnings_of_names(tuned: Path) -> None:
    first, second = names(tuned)
    for arguments in (("store",), ("none",), (first, "none"), (first, "--op", "store")):
        result = invoke("configs", "clear", *arguments)
        assert result.exit_code == 2, result.output
        assert names(tuned) == [first, second]
    assert "the beginning of 2 names" in invoke("configs", "clear", "store").stderr
    (tuned / "store-of-garbage.json").touch()
    found = as_json(invoke("configs", "clear", first.split("-")[1][:8], "store-of", first, "--json"))
    assert found["removed"] == 2
    assert names(tuned) == [second]


def other_choice(entry: Entry) -> Entry:
    return dataclasses.replace(entry, best=entry.default)


def test_diff_of_sets(tuned: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    entries = [*EntryStore(tuned).entries()]
    write_bundle(a, entries)
    write_bundle(b, [other_choice(entries[0])])
    same = invoke("configs", "diff", str(a), "cache")
    assert same.exit_code == 0
    assert "2 the same, 0 chosen differently" in same.stdout
    result = invoke("configs", "diff", str(a), str(b))
    assert result.exit_code == 1
    assert "only in A" in result.stdout
    found = as_json(invoke("configs", "diff", str(a), str(b), "--json"))
    assert found["differs"]
    assert [row["key"] for row in found["only_a"]] == [entries[1].key.name]
    (row,) = found["changed"]
    assert (row["a"], row["b"]) == (entries[0].best, entries[0].default)
    assert row["b_in_a_us"] == tuner.time_of(entries[0], entries[0].default)
    assert invoke("configs", "diff", str(a), "shipped").exit_code == 1
    assert invoke("configs", "diff", str(a), names(tuned)[0]).exit_code == 2


def test_diff_of_entries(tuned: Path) -> None:
    a, b = names(tuned)
    found = as_json(invoke("configs", "diff", a, b, "--json"))
    assert set(found["fields"]) == {"positioned", "rotate"}
    assert found["soft"] == {}
    assert len(found["candidates"]) == 3
    assert "rotate: " in invoke("configs", "diff", a, b).stdout
    assert invoke("configs", "diff", a, a).exit_code == 0


def test_verify_finds_what_is_bad(tuned: Path) -> None:
    good = invoke("configs", "verify")
    assert good.exit_code == 0
    assert "2 entries: 0 bad, 0 stale" in good.stdout
    path = sorted(tuned.glob("*.json"))[0]
    path.write_bytes(path.read_bytes()[:-40])
    bad = invoke("configs", "verify")
    assert bad.exit_code == 1
    assert f"BAD: {path}" in bad.stdout
    found = as_json(invoke("configs", "verify", "--json"))
    assert (found["ok"], found["bad"], found["entries"]) == (False, 1, 2)


def test_verify_finds_a_choice_that_does_not_exist_any_more(tuned: Path) -> None:
    store = EntryStore(tuned)
    entry = next(store.entries())
    gone = {"mode": "good", "delay_us": 21}
    candidates = tuple(
        dataclasses.replace(c, config=gone) if c.config == entry.best else c for c in entry.candidates
    )  # fmt: skip
    store.write(dataclasses.replace(entry, best=gone, candidates=candidates))
    result = invoke("configs", "verify")
    assert result.exit_code == 1
    assert "is not among the choices" in result.stdout


def test_verify_lists_stale_entries_and_shipped_ones(tuned: Path, tmp_path: Path) -> None:
    entries = [dataclasses.replace(e, soft={**e.soft, "source": "0"}) for e in EntryStore(tuned).entries()]
    invoke("configs", "clear")
    lookup.SHIPPED.mkdir()
    write_bundle(lookup.SHIPPED / "some_gpu.json", entries)
    result = invoke("configs", "verify")
    assert result.exit_code == 0
    assert result.stdout.count("stale (source): store mxfp4 d=64") == 2
    assert "2 entries: 0 bad, 2 stale" in result.stdout
    assert [row["origin"] for row in as_json(invoke("configs", "list", "--json"))["entries"]] == ["some_gpu"] * 2
    assert as_json(invoke("configs", "show", entries[0].key.name, "--json"))["stale"] == ["source"]
    data = (lookup.SHIPPED / "some_gpu.json").read_bytes()
    (lookup.SHIPPED / "some_gpu.json").write_bytes(data.replace(b"some", b"none").replace(b"mxfp4", b"mxfp5"))
    assert invoke("configs", "verify").exit_code == 1


def test_verify_reads_the_file_that_comes_before_all_others(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "chosen.json"
    monkeypatch.setenv("MXKV_TUNED", str(chosen))
    missing = invoke("configs", "verify")
    assert missing.exit_code == 1
    assert f"BAD: {chosen}" in missing.stdout.replace("\n", "")
    write_bundle(chosen, list(EntryStore(tuned).entries()))
    assert "4 entries: 0 bad, 0 stale" in invoke("configs", "verify").stdout


def test_verify_run_compares_bytes(tuned: Path) -> None:
    found = as_json(invoke("configs", "verify", "--run", "--json"))
    assert (found["ok"], found["ran"]) == (True, 2)


def test_verify_run_finds_wrong_bytes(tuned: Path) -> None:
    """An entry whose choice gives other bytes than it did when it was tuned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner.Session, "verdict", lambda self, work, config: "wrong bytes: all of them")
        result = invoke("configs", "verify", "--run")
    assert result.exit_code == 1
    assert "wrong bytes: all of them" in result.stdout


def test_an_entry_of_another_device_is_not_run(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_is_here", lambda entry: False)
    monkeypatch.setattr(tuner.Session, "verdict", lambda self, work, config: pytest.fail("it was run"))
    result = invoke("configs", "verify", "--run")
    assert result.exit_code == 0
    assert "2 entries: not run: for a device that is not here" in result.stdout


# The comparison of two tunings.


@pytest.fixture(scope="module")
def compare_tunings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_tunings", ROOT / "benchmarks/compare_tunings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_times(entry: Entry, best_us: float, default_us: float, best: dict[str, Any] | None = None) -> Entry:
    times = {tuner.canonical(entry.best): best_us, tuner.canonical(entry.default): default_us}
    candidates = tuple(
        dataclasses.replace(c, median_us=times.get(tuner.canonical(c.config), c.median_us)) for c in entry.candidates
    )
    return dataclasses.replace(entry, candidates=candidates, best=best or entry.best)


def test_two_tunings_are_compared(tuned: Path, tmp_path: Path, compare_tunings: ModuleType) -> None:
    first, second = EntryStore(tuned).entries()
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_bundle(a, [with_times(first, 10.0, 10.2), with_times(second, 10.0, 13.0)])
    write_bundle(b, [with_times(first, 11.0, 10.1, best=first.default), with_times(second, 10.4, 13.0)])
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/compare_tunings.py", a, b, "--out", out],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads((out / "tunings.json").read_text())
    rows = {row["key"]: row for row in found["rows"]}
    assert rows[first.key.name]["agrees"]
    assert (rows[first.key.name]["b_us"], rows[first.key.name]["b_in_a_us"]) == (10.1, 10.2)
    assert not rows[second.key.name]["agrees"]  # 10.0 and 10.4
    assert rows[second.key.name]["agrees_in_a"]
    assert found["agreement"] == 0.5
    assert found["same_choice"] == 0.5
    assert found["largest_default_ratio"] == 1.3
    assert found["above_default_limit"] == [second.key.name]
    text = (out / "tunings.md").read_text()
    assert "on 50.0% of the keys" in text
    assert "**1.300**" in text
    assert read_bundle(a).entries
    assert compare_tunings.compare({}, {})["agreement"] is None


def test_help_names_every_option() -> None:
    def shown(*arguments: str) -> str:
        environment = {"COLUMNS": "200", "NO_COLOR": "1"}
        return CliRunner().invoke(make_app(), [*arguments, "--help"], env=environment).output

    options = ["op", "format", "latent", "tokens", "preset", "from-log", "budget", "dry-run", "check", "force", "json"]
    assert all(f"--{option}" in shown("tune") for option in options)
    for command in ("list", "show", "diff", "verify", "export", "import", "clear"):
        assert command in shown("configs")
        assert "--json" in shown("configs", command)
