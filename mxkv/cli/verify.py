"""``mxkv verify``: every backend of this machine against the oracle, and the oracle against pinned digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated

import torch
import typer

import mxkv
from mxkv import dispatch
from mxkv.cli import calls, kv_calls, output, vectors

ORACLE = "torch"
OPERATIONS_ON_ROWS = ("store", "load", *calls.OPERATIONS)
_CPU = torch.device("cpu")
_MOST_SHOWN = 3


@dataclasses.dataclass
class Outcome:
    """What one backend did with one format on one device.

    Attributes:
        device: The device.
        backend: The backend's name.
        format: The format's name.
        right: How many calls of each operation that it ran gave what is expected, guard bytes included.
        failures: One line for each call that went wrong.
        refusals: Why calls were not run, each reason once.
    """

    device: str
    backend: str
    format: str
    right: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    refusals: list[str] = dataclasses.field(default_factory=list)

    @property
    def word(self) -> str:
        if self.failures:
            return "MISMATCH"
        return "ok" if any(self.right.values()) else "not run"


def verify(
    backend: output.BackendOption = None,
    device: output.DeviceOption = None,
    format: Annotated[str | None, typer.Option("--format", help="Only this format.")] = None,
    json: output.JsonOption = False,
) -> None:
    """Compare every backend that runs here with the oracle, and the oracle with pinned digests.

    All bytes must be equal; the values of an attention as close as its error budget says. Of rotated keys, whose
    sums may round differently, one row of a call may differ.

    Exits with 1 if anything differs, or if nothing could be compared.
    """
    wanted = output.checked_backend(backend)
    devices = output.all_devices() if device is None else [output.checked_device(device)]
    formats = output.checked_all_formats(format)
    deviations = {each.name: deviating_digests(each) for each in formats if isinstance(each, mxkv.Format)}
    outcomes = [
        outcome
        for where in devices
        for candidate in dispatch.backends()
        if wanted in (None, candidate.name) and (candidate.name, where) != (ORACLE, _CPU)
        for outcome in compare(candidate.name, where, formats)
    ]
    oracle_only = wanted == ORACLE and devices == [_CPU]
    ran = sum(sum(outcome.right.values()) + len(outcome.failures) for outcome in outcomes)
    nothing = not ran and (not deviations or (wanted is not None and not oracle_only))
    ok = not any(deviations.values()) and not any(outcome.failures for outcome in outcomes) and not nothing
    if json:
        output.print_json(
            {
                "ok": ok,
                "oracle": {name: {"ok": not wrong, "deviations": wrong} for name, wrong in deviations.items()},
                "backends": [dataclasses.asdict(outcome) for outcome in outcomes],
            }
        )
    else:
        _print(deviations, outcomes)
    if nothing:
        what = "nothing was compared" if wanted is None else f"backend {wanted!r} ran nothing"
        raise output.fail(f"{what} on {', '.join(map(str, devices))}", 1)
    if not ok:
        raise output.fail("results differ from the specification's: see above", 1)


def deviating_digests(format: mxkv.Format) -> list[str]:
    """Where the oracle's bytes on this machine are not the pinned ones, one line each."""
    found, pinned = vectors.digests(format), vectors.pinned_digests().get(format.name, {})
    return [
        f"{what}: expected {pinned.get(what)}, got {digest}"
        for what, digest in found.items()
        if pinned.get(what) != digest
    ]


def compare(backend: str, device: torch.device, formats: Iterable[mxkv.Format | mxkv.KVFormat]) -> list[Outcome]:
    """What a backend does with each format on a device; one outcome for all where it does not run there."""
    probed = dispatch.get_backend(backend).probe(device)
    if not probed.ok:
        return [Outcome(str(device), backend, "all", refusals=[*probed.reasons, *filter(None, [probed.hint])])]
    return [compare_format(backend, device, format) for format in formats]


def compare_format(backend: str, device: torch.device, format: mxkv.Format | mxkv.KVFormat) -> Outcome:
    """Run a backend's calls of one format on a device, and compare them with the oracle's on the CPU."""
    outcome = Outcome(str(device), backend, format.name)
    if isinstance(format, mxkv.KVFormat):
        for kv_call in kv_calls.calls(format):
            if _is_taken(outcome, dispatch.verdict(dispatch.get_backend(backend), kv_call.spec(device))):
                _check(outcome, kv_call.operation, str(kv_call), lambda: kv_call.difference(backend, device))  # noqa: B023
        return outcome
    for case in vectors.cases(format):
        expected = case.store(ORACLE, _CPU)
        if _can(outcome, "store", case, case.dtype):
            what = f"store of {case}"
            _check(outcome, "store", what, lambda: _difference(case.store(backend, device), expected))  # noqa: B023
        for dtype in vectors.DTYPES.values():
            if _can(outcome, "load", case, dtype):
                rows, what = case.load(expected, dtype, ORACLE, _CPU), f"load as {dtype} after {case}"
                _check(
                    outcome,
                    "load",
                    what,
                    lambda: _difference(case.load(expected, dtype, backend, device), rows),  # noqa: B023
                )
    for call in calls.calls(format):
        spec = dataclasses.replace(call.spec, device=device)
        if _is_taken(outcome, dispatch.verdict(dispatch.get_backend(backend), spec)):
            _check(outcome, spec.operation, str(call), lambda: call.difference(backend, device))  # noqa: B023
    return outcome


def _can(outcome: Outcome, operation: str, case: vectors.Case, dtype: torch.dtype) -> bool:
    """Whether the backend says that it runs a store or a load."""
    found = mxkv.explain(
        operation, device=outcome.device, format=case.format, latent_dim=case.latent_dim, dtype=dtype,
    ).verdicts[outcome.backend]  # fmt: skip
    return _is_taken(outcome, found)


def _is_taken(outcome: Outcome, verdict: mxkv.Verdict) -> bool:
    """Whether a verdict is favourable; its reasons are noted if not."""
    for reason in verdict.reasons:
        if reason not in outcome.refusals:
            outcome.refusals.append(reason)
    return verdict.ok


def _check(outcome: Outcome, operation: str, what: str, difference: Callable[[], str]) -> None:
    """Note whether a call gives what is expected, or what went wrong; an exception is an outcome like any other."""
    try:
        found = difference()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        outcome.failures.append(f"{what}: {found}")
    outcome.right[operation] = outcome.right.get(operation, 0) + (not found)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(got, expected):
        return ""
    different = (got != expected).flatten().nonzero().flatten()
    first = int(different[0])
    mask = (1 << 8 * expected.element_size()) - 1
    return (
        f"{len(different)} of {expected.numel()} differ, first at {first}: "
        f"expected {int(expected.flatten()[first]) & mask:#x}, got {int(got.flatten()[first]) & mask:#x}"
    )


def _print(deviations: dict[str, list[str]], outcomes: list[Outcome]) -> None:
    screen = output.console()
    if deviations:  # of keys and values no digests are pinned
        screen.print(
            output.table(
                f"The oracle ({ORACLE} on the CPU) against pinned digests",
                ["format", "result"],
                ((name, "MISMATCH" if wrong else "ok") for name, wrong in deviations.items()),
            )
        )
    for name, wrong in deviations.items():
        for line in wrong:
            screen.print(f"  {name} {line}", markup=False)
    if not outcomes:
        screen.print("No other backend was asked for or is registered.")
        return
    of_pages = [outcome for outcome in outcomes if outcome.format in mxkv.KV_FORMATS]
    of_rows = [outcome for outcome in outcomes if outcome not in of_pages]
    for some, operations in ((of_rows, OPERATIONS_ON_ROWS), (of_pages, kv_calls.OPERATIONS)):
        columns = ["device", "backend", "format", *operations, "differ", "result"]
        rows = [
            (o.device, o.backend, o.format, *(o.right.get(name, "") for name in operations), len(o.failures), o.word)
            for o in some
        ]
        if rows:
            title = "Backends against the oracle: calls that are right"
            screen.print(output.table(title, columns, rows, right=columns[3:-1]))
    for outcome in outcomes:
        where = f"  {outcome.backend} on {outcome.device}, {outcome.format}:"
        for reason in outcome.refusals:
            screen.print(f"{where} not run: {reason}", markup=False)
        for line in outcome.failures[:_MOST_SHOWN]:
            screen.print(f"{where} {line}", markup=False)
        if len(outcome.failures) > _MOST_SHOWN:
            screen.print(f"{where} and {len(outcome.failures) - _MOST_SHOWN} more", markup=False)
