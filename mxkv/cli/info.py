"""``mxkv info``: versions, devices, which backend runs what and why not, settings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from typing import Any

import torch

import mxkv
from mxkv import devices, dispatch, settings
from mxkv.cli import output
from mxkv.kv_operations import KV_SPECS

_OPERATIONS = ("store", "load", "attend", "compress_store")
_OF_ROWS = ("compress_norm", "save_ring_rows")  # they know no formats: listed under that of their specs
_ROWS = "bf16"


def info(json: output.JsonOption = False) -> None:
    """Show versions, devices and what they can do, which backend runs what and why not, and the settings in force."""
    try:
        found = collect()
    except ValueError as error:  # MXKV_BACKEND or MXKV_TARGET names nothing that exists
        raise output.fail(str(error), 2) from None
    if json:
        output.print_json(found)
    else:
        _print(found)


def collect() -> dict[str, Any]:
    """Everything that the command shows.

    Raises:
        ValueError: A setting names a backend or a target that does not exist.
    """
    here = output.all_devices()
    return {
        "versions": _versions(),
        "settings": {name: os.environ.get(name) for name in settings.VARIABLES},
        "devices": [_device(device) for device in here],
        "backends": [
            {
                "name": backend.name,
                "priority": backend.priority,
                "description": backend.description,
                "operations": sorted(backend.operations),
                "devices": {str(device): _verdict(backend.probe(device)) for device in here},
            }
            for backend in dispatch.backends()
        ],
        "numba_kernels": _numba_kernels(),
        "support": [
            _support(device, format, operation)
            for device in here
            for format in mxkv.FORMATS.values()
            for operation in (*_OPERATIONS, *(_OF_ROWS if format.name == _ROWS else ()))
        ]
        + [
            _support(device, kv_format, operation)
            for device in here
            for kv_format in mxkv.KV_FORMATS.values()
            for operation in KV_SPECS
        ],
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"mxkv": mxkv.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "numba", "numba-cuda"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["hip"] = torch.version.hip
    return found


def _numba_kernels() -> dict[str, Any]:
    """The compiled kernels that the Numba backend keeps, and what compiling each took."""
    from mxkv.autotune_cache.entries import StoreError
    from mxkv.backends.numba_cuda import compiler

    try:
        folder = str(compiler.folder())
    except StoreError as error:
        folder = str(error.strerror)
    return {"folder": folder, "kernels": compiler.kept()}


def _device(device: torch.device) -> dict[str, Any]:
    found = devices.describe(device)
    return {
        "device": str(device),
        "name": found.name,
        "arch": found.arch,
        "compute_units": found.compute_units,
        "memory_bytes": found.memory_bytes,
        "l2_bytes": found.l2_bytes,
        "target": dataclasses.asdict(devices.target_of(device)),
        "own_target": found.target.name,
    }


def _verdict(verdict: mxkv.Verdict) -> dict[str, Any]:
    return {"ok": verdict.ok, "reasons": list(verdict.reasons), "hint": verdict.hint}


def _support(device: torch.device, format: mxkv.Format | mxkv.KVFormat, operation: str) -> dict[str, Any]:
    width: dict[str, Any] = {} if isinstance(format, mxkv.KVFormat) else {"latent_dim": format.only_dim or 512}
    found = mxkv.explain(operation, device=device, format=format, **width)
    return {
        "device": str(device),
        "format": format.name,
        "operation": operation,
        "chosen": found.chosen,
        "verdicts": {name: _verdict(verdict) for name, verdict in found.verdicts.items()},
    }


def _print(found: dict[str, Any]) -> None:
    screen = output.console()
    screen.print(output.table("Versions", ["what", "version"], ((k, v or "-") for k, v in found["versions"].items())))
    screen.print(_device_table(found["devices"]))
    screen.print(_backend_table(found["backends"]))
    for device in found["devices"]:
        rows = [row for row in found["support"] if row["device"] == device["device"]]
        chosen = {(row["format"], row["operation"]): row["chosen"] or "no backend" for row in rows}
        for formats, operations in ((mxkv.FORMATS, (*_OPERATIONS, *_OF_ROWS)), (mxkv.KV_FORMATS, KV_SPECS)):
            screen.print(
                output.table(
                    f"Who runs what on {device['device']}",
                    ["format", *operations],
                    ([name, *(chosen.get((name, operation), "") for operation in operations)] for name in formats),
                )
            )
        for line in _refusals(rows):
            screen.print(line, markup=False)
    kernels = found["numba_kernels"]["kernels"]
    if kernels:
        seconds = [kernel["seconds"] for kernel in kernels]
        screen.print(
            f"{len(kernels)} compiled Numba kernels in {found['numba_kernels']['folder']}; compiling took "
            f"{sum(seconds):.1f} s, {max(seconds):.1f} s at most for one",
            markup=False,
        )
    rows = [(name, value or "(not set)", settings.VARIABLES[name]) for name, value in found["settings"].items()]
    screen.print(output.table("Settings", ["variable", "value", "meaning"], rows))


def _device_table(found: list[dict[str, Any]]) -> Any:
    def can(target: dict[str, Any]) -> str:
        return (
            f"fp8 {target['fp8']}, fp4 unpack {'yes' if target['fp4_unpack'] else 'no'}, "
            f"fp4 pack {'yes' if target['fp4_pack'] else 'no'}, bf16 pairs {target['bf16_pairs']}"
        )

    def target_name(row: dict[str, Any]) -> str:
        name: str = row["target"]["name"]
        return name if name == row["own_target"] else f"{name} (forced; its own is {row['own_target']})"

    rows = (
        (row["device"], row["name"], row["arch"], target_name(row), row["compute_units"], can(row["target"]))
        for row in found
    )
    return output.table("Devices", ["device", "name", "arch", "target", "compute units", "its target can do"], rows)


def _backend_table(found: list[dict[str, Any]]) -> Any:
    def runs_on(row: dict[str, Any]) -> str:
        return "\n".join(
            f"{device}: " + ("yes" if verdict["ok"] else "; ".join(verdict["reasons"]))
            for device, verdict in row["devices"].items()
        )

    rows = ((row["name"], row["priority"], row["description"], runs_on(row)) for row in found)
    return output.table("Backends", ["name", "priority", "what it is", "runs here"], rows)


def _refusals(rows: list[dict[str, Any]]) -> list[str]:
    """Why backends do not run something, each reason once with the calls that it holds for."""
    calls: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, verdict in row["verdicts"].items():
            if not verdict["ok"]:
                why = "; ".join(verdict["reasons"]) + (f" ({verdict['hint']})" if verdict["hint"] else "")
                calls.setdefault((name, why), []).append(f"{row['operation']} {row['format']}")
    return [
        f"  {name} does not run {'anything' if len(which) == len(rows) else ', '.join(which)}: {why}"
        for (name, why), which in calls.items()
    ]
