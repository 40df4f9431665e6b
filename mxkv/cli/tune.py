"""``mxkv tune``: measures what is the fastest way to launch each kind of call here, and keeps it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mxkv import settings
from mxkv.autotune_cache import lookup, shapes, tuner
from mxkv.autotune_cache.entries import StoreError
from mxkv.autotune_cache.keys import Key, bucket, key_of
from mxkv.autotune_cache.shapes import Work
from mxkv.autotune_cache.worker import WorkerError
from mxkv.cli import output
from mxkv.formats import Format

INTERRUPTED = 130


def tune(
    op: Annotated[list[str] | None, typer.Option("--op", help="Only this operation (may be repeated).")] = None,
    format: Annotated[list[str] | None, typer.Option("--format", help="Only this format (may be repeated).")] = None,
    latent: Annotated[list[int] | None, typer.Option("--latent", min=1, help="Row width, instead of 512.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Token count, instead of the preset's.")
    ] = None,
    preset: Annotated[str, typer.Option("--preset", help=f"{' or '.join(shapes.PRESETS)}.")] = "serving",
    from_log: Annotated[
        Path | None, typer.Option("--from-log", help="Tune the calls of this log of misses (MXKV_LOG_MISSES).")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", min=0, help="Stop after so many seconds.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tuned, and tune nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Tune nothing; exit with 1 where a call has no tuned configuration.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Tune anew what was tuned before.")] = False,
    backend: output.BackendOption = None,
    device: output.DeviceOption = None,
    json: output.JsonOption = False,
) -> None:
    """Find the fastest launch configuration of each kind of call on this machine, and keep it in the user's cache.

    Each candidate is checked against the torch backend, byte for byte, before it is timed, in a process of its own.
    Calls that were tuned before are left alone; Ctrl-C keeps what is done, and a further run goes on there. Under
    torchrun each process takes a part of the work, on the GPU of its LOCAL_RANK.
    """
    forced = output.checked_backend(backend)
    where = _device(device)
    output.checked_operations(op, shapes.OPERATIONS)
    formats = [chosen for name in format or () for chosen in output.checked_formats(name)]
    wrong: list[str] = []
    in_vain = ""
    try:
        ranks = settings.ranks()
        if from_log is not None:
            logged, wrong = shapes.works_of_log(from_log, where, forced)
            found = _filtered(logged, op, formats, latent, tokens)
            in_vain = _why_nothing(from_log, len(logged), len(wrong), check) if not found else ""
        else:
            found = shapes.works(
                where, preset=preset, operations=op or (), formats=formats, latents=latent or (), tokens=tokens or (),
                backend=forced,
            )  # fmt: skip
    except OSError as error:
        raise output.fail(f"cannot read {from_log}: {error.strerror or error}", 2) from None
    except ValueError as error:  # NotTunable is one
        raise output.fail(str(error), 2) from None
    for line in wrong:
        print(f"mxkv: {from_log}: {line}", file=sys.stderr)
    if not found and from_log is None:
        raise output.fail("nothing to tune: no format takes what was asked for", 2)
    if in_vain:
        if json:
            output.print_json({"device": str(where), "skipped_lines": wrong, "ok": False, "error": in_vain})
        raise output.fail(in_vain, 1)
    works = shapes.shard(found, ranks.rank, ranks.world_size)
    head = {"device": str(where), "rank": ranks.rank, "world_size": ranks.world_size, "skipped_lines": wrong}
    if check:
        _check(works, head, json)
    elif dry_run:
        _dry_run(works, head, force, json)
    else:
        _tune(works, head, budget, force, json)


def _device(name: str | None) -> torch.device:
    """The device to tune: a GPU where there is one, and the one of LOCAL_RANK where several processes tune."""
    gpu = torch.cuda.is_available()
    if name not in (None, "cuda"):
        return output.checked_device(str(name))
    try:
        local = settings.ranks().local_rank
    except ValueError as error:
        raise output.fail(str(error), 2) from None
    return output.checked_device(f"cuda:{local}" if gpu or name == "cuda" else "cpu")


def _filtered(
    works: Sequence[Work],
    op: Sequence[str] | None,
    formats: Sequence[Format],
    latent: Sequence[int] | None,
    tokens: Sequence[int] | None,
) -> list[Work]:
    buckets = {bucket(count) for count in tokens or ()}
    return [
        work
        for work in works
        if (not op or work.spec.operation in op)
        and (not formats or work.spec.format in formats)
        and (not latent or work.spec.latent_dim in latent)
        and (not buckets or work.buckets[0] in buckets)
    ]


def _why_nothing(log: Path, calls: int, wrong: int, check: bool) -> str:
    """Why nothing of a log is left to do, where that is an error: it has lines, none of them is any use; or a check."""
    what = "checked" if check else "tuned"
    if not calls and wrong:
        return f"nothing was {what}: none of the {wrong} lines of {log} is a call that can be tuned here"
    if not check:
        return ""
    return f"nothing was checked: {log} has no call" + (" that was asked for" if calls else "")


# Without measuring.


def _check(works: Sequence[Work], head: dict[str, Any], json: bool) -> None:
    resolver = lookup.resolver()
    missing: list[tuple[Work, Key]] = []
    stale: list[tuple[Work, Key]] = []
    for work in works:
        tunable = shapes.tunable_of(work.spec, work.backend)
        key = key_of(work.spec, work.buckets, backend=work.backend, tunable=tunable)
        try:
            answer = resolver.find(work.spec, work.buckets, backend=work.backend, tunable=tunable, log=False)
        except lookup.MissingConfigError:
            missing.append((work, key))
            continue
        if answer.entry is None:
            missing.append((work, key))
        elif answer.stale:
            stale.append((work, key))
    if json:
        output.print_json(
            {
                **head,
                "ok": not missing,
                "keys": len(works),
                "missing": [{"call": work.text, "key": key.name} for work, key in missing],
                "stale": [{"call": work.text, "key": key.name} for work, key in stale],
            }
        )
    else:
        for what, listed in (("missing", missing), ("stale", stale)):
            for work, key in listed:
                print(f"{what}: {work.text} ({key.name})")
        print(f"{len(works)} calls: {len(missing)} have no tuned configuration, {len(stale)} a stale one")
    if missing:
        raise typer.Exit(1)


def _dry_run(works: Sequence[Work], head: dict[str, Any], force: bool, json: bool) -> None:
    rows = []
    for work, key, state in tuner.Tuning(works, force=force).plan():
        candidates = len(shapes.tunable_of(work.spec, work.backend).space)
        rows.append({"call": work.text, "key": key.name, "state": state, "candidates": candidates})
    to_do = [row for row in rows if row["state"] != "kept"]
    if json:
        output.print_json({**head, "keys": rows, "to_tune": len(to_do)})
        return
    for row in to_do:
        print(f"{row['state']}: {row['call']}, {row['candidates']} candidates ({row['key']})")
    print(f"{len(to_do)} of {len(rows)} keys would be tuned on {head['device']}")


# Measuring.


def _tune(works: Sequence[Work], head: dict[str, Any], budget: float | None, force: bool, json: bool) -> None:
    interrupted = False
    failure = ""
    with _progress(json) as told:
        run = tuner.Tuning(works, budget_s=budget, on_progress=told, force=force)
        try:
            run.run()
        except KeyboardInterrupt:
            interrupted = True
        except (StoreError, WorkerError) as error:
            failure = str(getattr(error, "strerror", None) or error)
    seconds = run.seconds
    rows = [_row(result) for result in run.results]
    summary = _summary(rows, len(works), seconds)
    if json:
        ended = {"interrupted": interrupted, "error": failure or None}
        output.print_json({**head, **ended, "summary": summary, "keys": rows})
    elif rows or not failure:
        _print(rows, summary)
    if failure:
        raise output.fail(failure, 1)
    if interrupted:
        raise output.fail("interrupted; what was measured is kept, run it again to go on", INTERRUPTED)
    if summary["failed"]:
        raise output.fail(f"{summary['failed']} keys could not be tuned: see above", 1)


def _row(result: tuner.Result) -> dict[str, Any]:
    entry = result.entry
    ratio = result.default_us / result.best_us if result.best_us and result.default_us else None
    return {
        "call": result.work.text,
        "key": result.key.name,
        "status": result.status,
        "reason": result.reason or None,
        "default": None if entry is None else entry.default,
        "best": None if entry is None else entry.best,
        "default_us": result.default_us,
        "best_us": result.best_us,
        "ratio": ratio,
        "candidates": 0 if entry is None else len(entry.candidates),
        "timed_now": result.timed,
        "rejected": [{"config": c.config, "reason": c.rejected} for c in result.rejected],
        "seconds": result.seconds,
    }


def _summary(rows: Sequence[dict[str, Any]], keys: int, seconds: float) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    return {
        "keys": keys,
        **{state: sum(row["status"] == state for row in rows) for state in tuner.STATES},
        "candidates": sum(row["candidates"] for row in rows),
        "timed_now": sum(row["timed_now"] for row in rows),
        "rejected": sum(len(row["rejected"]) for row in rows),
        "seconds": seconds,
        "largest_ratio": max(ratios, default=None),
    }


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    screen = output.console()
    shown = [row for row in rows if row["best_us"] is not None]
    if shown:
        columns = ["call", "default µs", "tuned µs", "default/tuned", "configuration", "status"]
        cells = (
            (
                row["call"],
                _us(row["default_us"]),
                _us(row["best_us"]),
                f"{row['ratio']:.3f}" if row["ratio"] else "-",
                config_text(row["best"]),
                row["status"],
            )
            for row in shown
        )
        screen.print(output.table("Before and after", columns, cells, right=columns[1:4]))
    reasons = {(config_text(r["config"]), r["reason"]) for row in rows for r in row["rejected"]}
    for config, reason in sorted(reasons):
        screen.print(f"rejected: {config}: {reason}", markup=False)
    for row in rows:
        if row["reason"]:
            screen.print(f"{row['status']}: {row['call']}: {row['reason']}", markup=False)
    states = ", ".join(f"{summary[state]} {state}" for state in tuner.STATES if summary[state])
    screen.print(
        f"{summary['keys']} keys ({states or 'none done'}), {summary['candidates']} candidates of which "
        f"{summary['timed_now']} were timed now and {summary['rejected']} are rejected, {summary['seconds']:.1f} s",
        markup=False,
    )


def config_text(config: dict[str, Any]) -> str:
    """A configuration on one line."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _progress(json: bool) -> contextlib.AbstractContextManager[Callable[[tuner.Progress], None]]:
    """What shows how far the tuner is: a bar on a terminal, lines elsewhere, and on stderr beside JSON."""
    if not json and sys.stdout.isatty():
        return _bar()
    return contextlib.nullcontext(_Lines(sys.stderr if json else sys.stdout))


class _Lines:
    """A line for each key."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, progress: tuner.Progress) -> None:
        print(_line(progress), file=self.stream, flush=True)


def _line(progress: tuner.Progress) -> str:
    if progress.result is None:
        return progress.note
    result = progress.result
    text = f"[{progress.done}/{progress.total}] {result.work.text}: {result.status}"
    if result.best_us is not None:
        text += f", {result.best_us:.2f} µs"
        if result.default_us is not None:
            text += f" (default {result.default_us:.2f}, {result.default_us / result.best_us:.2f}×)"
    if result.timed:
        text += f", {result.timed} candidates in {result.seconds:.1f} s"
    if result.rejected:
        text += f", {len(result.rejected)} rejected"
    return text + (f": {result.reason}" if result.reason else "") + f"  [{_eta(progress)}]"


def _eta(progress: tuner.Progress) -> str:
    return f"{progress.seconds:.0f} s, {progress.eta_s:.0f} s to go" if progress.eta_s is not None else "…"


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[tuner.Progress], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[eta]}")
    with Progress(*columns, console=output.console()) as bar:
        task = bar.add_task("tuning", total=None, eta="")

        def told(progress: tuner.Progress) -> None:
            if progress.note:
                bar.console.print(progress.note, markup=False)
            text = progress.result.work.text if progress.result else "tuning"
            bar.update(task, completed=progress.done, total=progress.total, description=text, eta=_eta(progress))

        yield told
