"""``mxkv configs``: what was tuned here and what is shipped: list, show, compare, verify, move and remove it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mxkv import devices, settings
from mxkv.autotune_cache import lookup, shapes, tuner
from mxkv.autotune_cache.entries import Entry, EntryError, EntryStore, StoreError, read_bundle, spec_of, write_bundle
from mxkv.autotune_cache.keys import Key, key_of, soft_of, space_of, spec_classes
from mxkv.autotune_cache.worker import WorkerError
from mxkv.cli import output
from mxkv.cli.tune import config_text
from mxkv.contracts import Tunable


def _checked_ops(names: list[str] | None) -> list[str] | None:
    """An ``--op`` option's values; typer reports an unknown one."""
    return output.checked_operations(names, spec_classes())


OpOption = Annotated[
    list[str] | None, typer.Option("--op", help="Only this operation (may be repeated).", callback=_checked_ops)
]
CACHE, SHIPPED = "cache", "shipped"


def make_app() -> typer.Typer:
    """The command with all its own."""
    app = typer.Typer(
        name="configs", help="Tuned configurations: list, show, compare, verify, move and remove them.",
        no_args_is_help=True,
    )  # fmt: skip
    commands: tuple[tuple[str, Callable[..., None]], ...] = (
        ("list", list_entries), ("show", show), ("diff", diff), ("verify", verify), ("export", export),
        ("import", import_bundle), ("clear", clear),
    )  # fmt: skip
    for name, command in commands:
        app.command(name)(command)
    return app


# Where entries are.


def _store() -> EntryStore:
    return lookup.resolver().store


def _folder() -> str:
    try:
        return str(_store().folder)
    except StoreError as error:
        raise output.fail(str(error.strerror or error), 1) from None


def _shipped() -> dict[Path, list[Entry]]:
    """The entries of every shipped file."""
    found = {}
    for path in sorted(lookup.SHIPPED.glob("*.json")):
        try:
            found[path] = [*read_bundle(path, strict=False).entries]
        except (EntryError, OSError):
            found[path] = []
    return found


def _everything(op: Sequence[str] | None = None) -> list[tuple[str, Entry]]:
    """Every entry, the user's before the shipped ones, with where it is from."""
    found = [(CACHE, entry) for entry in _store().entries()]
    found += [(path.stem, entry) for path, entries in _shipped().items() for entry in entries]
    return [(origin, entry) for origin, entry in found if not op or entry.key.hard["operation"] in op]


def _matching(name: str) -> tuple[str, Entry]:
    """The one entry whose name, or the hash in it, begins so; the user's own comes before a shipped one of its key."""
    found: dict[Key, tuple[str, Entry]] = {}
    for origin, entry in _everything():
        if _begins(entry.key.name, name):
            found.setdefault(entry.key, (origin, entry))
    if not found:
        raise output.fail(f"no tuned configuration is called {name!r}; mxkv configs list shows them", 2)
    if len(found) > 1:
        raise output.fail(_ambiguous(name, [key.name for key in found]), 2)
    return next(iter(found.values()))


# What is known of an entry.


def tunable_of(entry: Entry) -> Tunable | None:
    """What may be chosen for an entry's call today; None where this machine cannot tell.

    A shipped entry is for a device that need not be here. What its code is does not depend on that, so the tunable of a
    device that is here does, if its space is the same.
    """
    spec = spec_of(entry)
    if spec is None:
        return None
    for device in (spec.device, *output.all_devices()):
        try:
            found = shapes.tunable_of(dataclasses.replace(spec, device=device), str(entry.key.hard["backend"]))
        except (ValueError, ImportError):  # no such device, no such backend, nothing to tune
            continue
        return found
    return None


def stale_fields(entry: Entry) -> tuple[str, ...] | None:
    """What has changed since an entry was tuned; None where this machine cannot tell."""
    tunable = tunable_of(entry)
    return None if tunable is None else entry.stale(soft_of(tunable))


def _best_us(entry: Entry) -> float | None:
    return tuner.time_of(entry, entry.best)


def _ratio(entry: Entry) -> float | None:
    best, default = _best_us(entry), tuner.time_of(entry, entry.default)
    return default / best if best and default else None


def call_text(entry: Entry) -> str:
    """An entry's call on one line."""
    spec = spec_of(entry)
    sizes = [f"{v} {name}" for name, v in entry.key.hard.items() if name in ("tokens", "queries", "rows")]
    return ", ".join([shapes.describe(spec) if spec else entry.key.text, *(sizes if spec else ())])


# The commands.


def list_entries(
    op: OpOption = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Only devices with this in their names.")
    ] = None,
    user: Annotated[bool, typer.Option("--user", help="Only the user's own.")] = False,
    shipped: Annotated[bool, typer.Option("--shipped", help="Only those that came with the package.")] = False,
    json: output.JsonOption = False,
) -> None:
    """List every tuned configuration: the user's, and those that came with the package."""
    rows: list[dict[str, Any]] = []
    for origin, entry in _everything(op):
        if user != shipped and user != (origin == CACHE):
            continue
        if device is not None and device.lower() not in str(entry.provenance.get("device") or "").lower():
            continue
        stale = stale_fields(entry)
        rows.append(
            {
                "key": entry.key.name,
                "call": call_text(entry),
                "origin": origin,
                "device": entry.provenance.get("device"),
                "arch": entry.key.hard["arch"],
                "compute_units": entry.key.hard["compute_units"],
                "best": entry.best,
                "best_us": _best_us(entry),
                "ratio": _ratio(entry),
                "candidates": len(entry.candidates),
                "rejected": sum(c.rejected is not None for c in entry.candidates),
                "stale": None if stale is None else list(stale),
                "date": entry.provenance.get("date"),
            }
        )
    if json:
        output.print_json({"folder": _folder(), "entries": rows})
        return
    screen = output.console()
    columns = ["key", "call", "from", "device", "configuration", "µs", "default/tuned", "stale"]
    cells = (
        (
            row["key"],
            row["call"],
            row["origin"],
            _device_text(row),
            config_text(row["best"]),
            _number(row["best_us"], 2),
            _number(row["ratio"], 3),
            "?" if row["stale"] is None else ", ".join(row["stale"]) or "no",
        )
        for row in rows
    )
    screen.print(output.table(f"Tuned configurations ({_folder()})", columns, cells, right=columns[5:7]))
    screen.print(f"{len(rows)} entries", markup=False)


def _device_text(row: Mapping[str, Any]) -> str:
    """An entry's device; a CPU with its threads, which are part of the key."""
    name = row["device"] or "-"
    return f"{name}, {row['compute_units']} threads" if row["arch"] == "cpu" else name


def show(
    key: Annotated[str, typer.Argument(help="An entry's name, or its beginning.")], json: output.JsonOption = False
) -> None:
    """Show one entry: its key, where it is from, and what every candidate took."""
    origin, entry = _matching(key)
    stale = stale_fields(entry)
    if json:
        output.print_json(
            {"name": entry.key.name, "origin": origin, "stale": None if stale is None else list(stale),
             **entry.to_json()}
        )  # fmt: skip
        return
    screen = output.console()
    fields = [(name, value) for name, value in entry.key.hard.items()]
    screen.print(output.table(f"{entry.key.name} ({origin})", ["field", "value"], fields))
    rest = [*entry.soft.items(), *((k, v) for k, v in entry.provenance.items() if k != "spec")]
    screen.print(output.table("Where it comes from", ["what", "value"], rest))
    columns = ["candidate", "median µs", "p20", "p80", "samples", "what"]
    cells = []
    for candidate in entry.candidates:
        what = [f"rejected: {candidate.rejected}"] if candidate.rejected is not None else []
        what += ["best"] if candidate.config == entry.best else []
        what += ["default"] if candidate.config == entry.default else []
        times = (_number(t, 2) for t in (candidate.median_us, candidate.p20_us, candidate.p80_us))
        cells.append((config_text(candidate.config), *times, candidate.count, ", ".join(what)))
    screen.print(output.table("Candidates", columns, cells, right=columns[1:5]))
    if stale:
        screen.print(f"stale: tuned with another {' and '.join(stale)}", markup=False)


def diff(
    a: Annotated[str, typer.Argument(help='A file that was exported, "cache", "shipped", or an entry\'s name.')],
    b: Annotated[str, typer.Argument(help="Another one.")],
    json: output.JsonOption = False,
) -> None:
    """Compare two sets of tuned configurations, or two entries. Exits with 1 where they choose differently."""
    first, second = _side(a), _side(b)
    if isinstance(first, Entry) != isinstance(second, Entry):
        raise output.fail("expected two sets of entries or two entries, got one of each", 2)
    if isinstance(first, Entry) and isinstance(second, Entry):
        found = _entry_difference(first, second)
        differs = bool(found["fields"]) or first.best != second.best
    else:
        assert not isinstance(first, Entry)
        assert not isinstance(second, Entry)
        found = _set_difference(first, second)
        differs = bool(found["only_a"] or found["only_b"] or found["changed"])
    if json:
        output.print_json({"a": a, "b": b, "differs": differs, **found})
    else:
        _print_difference(found)
    if differs:
        raise typer.Exit(1)


def _side(text: str) -> Entry | dict[Key, Entry]:
    if text == CACHE:
        return {entry.key: entry for entry in _store().entries()}
    if text == SHIPPED:
        return {entry.key: entry for entries in _shipped().values() for entry in entries}
    if Path(text).is_file():
        return {entry.key: entry for entry in _read(Path(text))}
    return _matching(text)[1]


def _read(path: Path) -> tuple[Entry, ...]:
    try:
        return read_bundle(path).entries
    except EntryError as error:
        raise output.fail(f"{path} cannot be used: {error}", 2) from None
    except OSError as error:
        raise output.fail(f"cannot read {path}: {error.strerror or error}", 2) from None


def _set_difference(first: Mapping[Key, Entry], second: Mapping[Key, Entry]) -> dict[str, Any]:
    both = [key for key in first if key in second]
    return {
        "only_a": [{"key": key.name, "call": call_text(first[key])} for key in first if key not in second],
        "only_b": [{"key": key.name, "call": call_text(second[key])} for key in second if key not in first],
        "changed": [_choice(first[key], second[key]) for key in both if first[key].best != second[key].best],
        "same": sum(first[key].best == second[key].best for key in both),
    }


def _choice(first: Entry, second: Entry) -> dict[str, Any]:
    """Two entries' choices, and what the second's took when the first was measured."""
    return {
        "key": first.key.name,
        "call": call_text(first),
        "a": first.best,
        "b": second.best,
        "a_us": _best_us(first),
        "b_us": _best_us(second),
        "b_in_a_us": tuner.time_of(first, second.best),
    }


def _entry_difference(first: Entry, second: Entry) -> dict[str, Any]:
    return {
        "fields": {name: {"a": x, "b": y} for name, (x, y) in first.key.differences(second.key).items()},
        "soft": {
            name: {"a": first.soft.get(name), "b": second.soft.get(name)}
            for name in dict.fromkeys([*first.soft, *second.soft])
            if first.soft.get(name) != second.soft.get(name)
        },
        "best": _choice(first, second),
        "candidates": [
            {"config": c.config, "a_us": c.median_us, "b_us": tuner.time_of(second, c.config)} for c in first.candidates
        ],
    }


def _print_difference(found: Mapping[str, Any]) -> None:
    screen = output.console()
    if "changed" in found:
        for side in ("a", "b"):
            for row in found[f"only_{side}"]:
                screen.print(f"only in {side.upper()}: {row['call']} ({row['key']})", markup=False)
        columns = ["call", "A", "B", "A µs", "B µs", "B's in A µs"]
        cells = (
            (
                row["call"],
                config_text(row["a"]),
                config_text(row["b"]),
                _number(row["a_us"], 2),
                _number(row["b_us"], 2),
                _number(row["b_in_a_us"], 2),
            )
            for row in found["changed"]
        )
        if found["changed"]:
            screen.print(output.table("Chosen differently", columns, cells, right=columns[3:]))
        screen.print(f"{found['same']} the same, {len(found['changed'])} chosen differently", markup=False)
        return
    for kind in ("fields", "soft"):
        for name, pair in found[kind].items():
            screen.print(f"{name}: {pair['a']} | {pair['b']}", markup=False)
    best = found["best"]
    screen.print(f"best: {config_text(best['a'])} | {config_text(best['b'])}", markup=False)
    rows = ((config_text(c["config"]), _number(c["a_us"], 2), _number(c["b_us"], 2)) for c in found["candidates"])
    screen.print(output.table("Candidates", ["candidate", "A µs", "B µs"], rows, right=["A µs", "B µs"]))


@dataclasses.dataclass
class Checked:
    """What ``verify`` says of one entry.

    Attributes:
        where: Its file, or its shipped file and name.
        call: Its call.
        problem: What is wrong with it; empty where nothing is.
        stale: What has changed since it was tuned.
        note: What could not be looked at here, and why.
        ran: Whether its bytes were compared with the oracle's.
    """

    where: str
    call: str = ""
    problem: str = ""
    stale: tuple[str, ...] = ()
    note: str = ""
    ran: bool = False


def verify(
    run: Annotated[bool, typer.Option("--run", help="Also run each choice, and compare its bytes.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Check every entry: yours, MXKV_TUNED's, the shipped ones. Exits with 1 if one is bad; stale ones are listed."""
    store = _store()
    checked: list[Checked] = []
    to_run: list[tuple[Checked, Entry]] = []
    for path in store.paths():
        found = Checked(str(path))
        checked.append(found)
        try:
            entry = store.check(path)
        except (EntryError, OSError) as error:
            found.problem = str(error)
            continue
        _verify_entry(found, entry)
        to_run.append((found, entry))
    tuned = settings.current().tuned
    for path in [*([Path(tuned)] if tuned else []), *sorted(lookup.SHIPPED.glob("*.json"))]:
        try:
            bundle = read_bundle(path)
        except (EntryError, OSError) as error:
            checked.append(Checked(str(path), problem=str(error)))
            continue
        for entry in bundle.entries:
            found = Checked(f"{path.name}:{entry.key.name}")
            checked.append(found)
            _verify_entry(found, entry)
            to_run.append((found, entry))
    if run:
        _run(to_run)
    bad = [found for found in checked if found.problem]
    stale = [found for found in checked if found.stale]
    if json:
        output.print_json(
            {
                "ok": not bad,
                "entries": len(checked),
                "bad": len(bad),
                "stale": len(stale),
                "ran": sum(found.ran for found in checked),
                "checked": [dataclasses.asdict(found) for found in checked],
            }
        )
    else:
        for found in checked:
            if found.problem:
                print(f"BAD: {found.where}: {found.problem}")
        for found in stale:
            print(f"stale ({', '.join(found.stale)}): {found.call} ({found.where})")
        for note in sorted({found.note for found in checked if found.note}):
            print(f"{sum(found.note == note for found in checked)} entries: {note}")
        ran = f", {sum(found.ran for found in checked)} run" if run else ""
        print(f"{len(checked)} entries: {len(bad)} bad, {len(stale)} stale{ran}")
    if bad:
        raise typer.Exit(1)


def _verify_entry(found: Checked, entry: Entry) -> None:
    found.call = call_text(entry)
    tunable = tunable_of(entry)
    if tunable is None:
        found.note = "not compared with what may be chosen today: its backend cannot be asked here"
        return
    found.stale = entry.stale(soft_of(tunable))
    if space_of(tunable) != entry.key.hard["space"]:
        # Elsewhere the space may be another one; here no look-up finds the entry any more.
        if _is_here(entry):
            found.note = "of an earlier set of choices: no call finds them"
        return
    try:
        entry.choice(tunable)
    except EntryError as error:
        found.problem = str(error)


def _is_here(entry: Entry) -> bool:
    spec = spec_of(entry)
    try:
        described = devices.describe(spec.device) if spec is not None else None
    except ValueError:
        return False
    hard = entry.key.hard
    return described is not None and (described.arch, described.compute_units) == (hard["arch"], hard["compute_units"])


def _run(entries: Iterable[tuple[Checked, Entry]]) -> None:
    """Compare the bytes of each choice whose device is here with the oracle's."""
    sessions: dict[Any, tuner.Session] = {}
    try:
        for found, entry in entries:
            spec, tunable = spec_of(entry), tunable_of(entry)
            if found.problem or spec is None or tunable is None or not _is_here(entry):
                found.note = found.note or "not run: for a device that is not here"
                continue
            backend = str(entry.key.hard["backend"])
            buckets = tuple(int(entry.key.hard[name]) for name in tunable.sizes)
            if key_of(spec, buckets, backend=backend, tunable=tunable) != entry.key:
                found.note = found.note or "not run: of an earlier set of choices, or of another target"
                continue
            if spec.device not in sessions:
                sessions[spec.device] = tuner.Session(spec.device)
            try:
                found.problem = sessions[spec.device].verdict(shapes.Work(spec, buckets, backend), entry.best)
                found.ran = True
            except tuner.KeyFailed as error:
                found.note = f"not run: {error}"
    except WorkerError as error:
        raise output.fail(str(error), 1) from None
    finally:
        for session in sessions.values():
            session.close()


def export(
    file: Annotated[Path, typer.Argument(help="Where to write.")], op: OpOption = None, json: output.JsonOption = False
) -> None:
    """Write the user's entries to one file, which `import` reads elsewhere."""
    entries = [entry for entry in _store().entries() if not op or entry.key.hard["operation"] in op]
    if not entries:
        raise output.fail(f"nothing to export: there is no tuned configuration in {_folder()}", 1)
    try:
        write_bundle(file, entries)
    except StoreError as error:
        raise output.fail(str(error.strerror or error), 1) from None
    _report(json, f"{len(entries)} entries written to {file}", file=str(file), entries=len(entries))


def import_bundle(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")], json: output.JsonOption = False
) -> None:
    """Put a file's entries into the user's cache. One bad entry refuses all of them."""
    entries = _read(file)
    store = _store()
    try:
        replaced = sum(store.path(entry.key).exists() for entry in entries)
        for entry in entries:
            store.write(entry)
    except StoreError as error:
        raise output.fail(str(error.strerror or error), 1) from None
    lookup.resolver().changed()
    text = f"{len(entries)} entries put into {_folder()}, {replaced} of them in the place of others"
    _report(json, text, folder=_folder(), entries=len(entries), replaced=replaced)


def clear(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Names, or their beginnings.")] = None,
    op: OpOption = None,
    json: output.JsonOption = False,
) -> None:
    """Remove the user's entries: all of them, those that are named, or those of an operation. Shipped ones stay."""
    if keys and op:
        raise output.fail("expected names or --op, not both", 2)
    folder = _folder()
    paths = [path for path in _store().paths() if not op or path.stem.split("-", 1)[0] in op]
    removed = 0
    # Before one is removed it is known which.
    for path in [*dict.fromkeys(_named(key, paths) for key in keys)] if keys else paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output.fail(f"cannot remove {path}: {error.strerror or error}", 1) from None
        removed += 1
    lookup.resolver().changed()
    _report(json, f"{removed} entries removed from {folder}", folder=folder, removed=removed)


def _named(name: str, paths: Sequence[Path]) -> Path:
    """The one of some entries' files whose name, or the hash in it, begins so."""
    exact = [path for path in paths if path.stem == name]
    found = exact or [path for path in paths if _begins(path.stem, name)]
    if not found:
        raise output.fail(f"no configuration of yours is called {name!r}; mxkv configs list --user shows them", 2)
    if len(found) > 1:
        raise output.fail(_ambiguous(name, [path.stem for path in found]), 2)
    return found[0]


def _begins(stem: str, name: str) -> bool:
    return stem.startswith(name) or stem.split("-", 1)[-1].startswith(name)


def _ambiguous(name: str, stems: Sequence[str]) -> str:
    names = ", ".join(sorted(stems)[:5])
    return f"{name!r} is the beginning of {len(stems)} names: {names}{', …' * (len(stems) > 5)}"


def _report(json: bool, text: str, **data: Any) -> None:
    if json:
        output.print_json(data)
    else:
        print(text)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
