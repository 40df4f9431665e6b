"""What the commands share: options that are checked, and output as tables or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mxkv
from mxkv import devices, dispatch
from mxkv.formats import get_format

BackendOption = Annotated[str | None, typer.Option("--backend", help="Only this backend (default: see each command).")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Only this device, as torch names it (cpu, cuda:0).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def all_devices() -> list[torch.device]:
    """The devices of this machine that torch can use: the CPU and each GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def checked_backend(name: str | None) -> str | None:
    """A ``--backend`` option's value; typer reports an unknown one."""
    try:
        devices.forced_target()
    except ValueError as error:  # of the environment, not of the option
        raise fail(str(error), 2) from None
    try:
        return None if name is None else dispatch.get_backend(name).name
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from None


def checked_device(name: str) -> torch.device:
    """A ``--device`` option's value as a device that this machine has; typer reports another one."""
    try:
        return devices.describe(dispatch.resolve_device(name)).device
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from None


def checked_formats(name: str | None) -> list[mxkv.Format]:
    """A ``--format`` option's format, or all of them; typer reports an unknown one."""
    try:
        return list(mxkv.FORMATS.values()) if name is None else [get_format(name)]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--format") from None


def checked_all_formats(name: str | None) -> list[mxkv.Format | mxkv.KVFormat]:
    """The same, of rows' formats and of those of keys and values."""
    if name is not None and name in mxkv.KV_FORMATS:
        return [mxkv.KV_FORMATS[name]]
    return [*checked_formats(name), *(mxkv.KV_FORMATS.values() if name is None else ())]


def checked_operations(names: list[str] | None, known: Collection[str]) -> list[str] | None:
    """An ``--op`` option's values; typer reports an unknown one."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"unknown operation {', '.join(unknown)}; known: {', '.join(known)}", param_hint="--op"
        )
    return names


def print_json(data: Any) -> None:
    """Print JSON and nothing else."""
    print(json.dumps(data, indent=2, allow_nan=False))


def fail(message: str, code: int) -> typer.Exit:
    """Print an error; raise what this returns to end the command."""
    print(f"mxkv: {message}", file=sys.stderr)
    return typer.Exit(code)


def console() -> Console:
    """Where tables go. Where the output is no terminal, nothing wraps at 80 columns."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> Table:
    """A table; the columns named in ``right`` are aligned to the right. Cells are text, not markup."""
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made
