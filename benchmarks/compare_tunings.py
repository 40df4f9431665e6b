"""Two tunings of the same device: do they agree, and what does tuning gain over the defaults?

    mxkv configs export a.json          after a tuning; b.json after another, into an empty cache
    python benchmarks/compare_tunings.py a.json b.json --out DIR

For each key that both have: the time that A's choice took in A, the time that B's choice took in B, and the time that
B's choice took in A. Two tunings agree on a key where the first two are within 3 % of each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxkv.autotune_cache.entries import Entry, read_bundle
from mxkv.autotune_cache.keys import Key
from mxkv.autotune_cache.tuner import time_of
from mxkv.cli.configs import call_text
from mxkv.cli.tune import config_text

TOLERANCE = 0.03
DEFAULT_LIMIT = 1.25
_MOST_SHOWN = 40


def entries_of(path: Path) -> dict[Key, Entry]:
    return {entry.key: entry for entry in read_bundle(path).entries}


def compare_key(a: Entry, b: Entry) -> dict[str, Any]:
    """What two tunings say about one key; times in microseconds."""
    a_us, b_us = time_of(a, a.best), time_of(b, b.best)
    b_in_a_us = time_of(a, b.best)
    default_us = time_of(a, a.default)
    return {
        "key": a.key.name,
        "call": call_text(a),
        "a": a.best,
        "b": b.best,
        "a_us": a_us,
        "b_us": b_us,
        "b_in_a_us": b_in_a_us,
        "default": a.default,
        "default_us": default_us,
        "agrees": within(a_us, b_us),
        "agrees_in_a": within(a_us, b_in_a_us),
        "same_choice": a.best == b.best,
        "default_ratio": default_us / a_us if default_us and a_us else None,
        "rejected": sum(candidate.rejected is not None for candidate in a.candidates),
    }


def within(a_us: float | None, b_us: float | None) -> bool:
    """Whether two times are within the tolerance; of a time that is missing nothing is known, so they are not."""
    return a_us is not None and b_us is not None and abs(b_us / a_us - 1) <= TOLERANCE


def compare(first: dict[Key, Entry], second: dict[Key, Entry]) -> dict[str, Any]:
    """What two tunings say."""
    rows = [compare_key(entry, second[key]) for key, entry in first.items() if key in second]
    rows.sort(key=lambda row: str(row["call"]))
    ratios = [row["default_ratio"] for row in rows if row["default_ratio"]]

    def share(what: str) -> float | None:
        return sum(row[what] for row in rows) / len(rows) if rows else None

    device = next((entry.provenance.get("device") for entry in first.values()), None)
    return {
        "device": device,
        "keys": len(rows),
        "only_a": len(first.keys() - second.keys()),
        "only_b": len(second.keys() - first.keys()),
        "tolerance": TOLERANCE,
        "agreement": share("agrees"),
        "agreement_in_a": share("agrees_in_a"),
        "same_choice": share("same_choice"),
        "candidates": sum(len(first[key].candidates) for key in first if key in second),
        "rejected": sum(row["rejected"] for row in rows),
        "largest_default_ratio": max(ratios, default=None),
        "median_default_ratio": statistics.median(ratios) if ratios else None,
        "default_limit": DEFAULT_LIMIT,
        "above_default_limit": [row["key"] for row in rows if (row["default_ratio"] or 0) > DEFAULT_LIMIT],
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    """The comparison for people: the shares, what disagrees, and every key's time by default and tuned."""
    rows = found["rows"]
    above = set(found["above_default_limit"])
    lines = [
        f"Two tunings of {found['device']}: {found['keys']} keys that both have "
        f"({found['only_a']} only in A, {found['only_b']} only in B).",
        "",
        f"- The time achieved in each run agrees within {TOLERANCE:.0%} on {_percent(found['agreement'])} of the keys.",
        f"- Both choices as measured in run A agree within {TOLERANCE:.0%} on {_percent(found['agreement_in_a'])}; the "
        f"choice is the same on {_percent(found['same_choice'])}.",
        f"- The default takes at most {_number(found['largest_default_ratio'], 3)} times as long as the choice (median "
        f"{_number(found['median_default_ratio'], 3)}); on {len(above)} keys more than {DEFAULT_LIMIT} times.",
        f"- {found['candidates']} candidates in A, {found['rejected']} rejected.",
        "",
    ]
    apart = [row for row in rows if not row["agrees"]]
    if apart:
        apart.sort(key=lambda row: -abs((row["b_us"] or 0) / (row["a_us"] or 1) - 1))
        lines += [
            "## Where the runs disagree",
            "",
            "| call | A | µs | B | µs | B's in A, µs |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['call']} | {config_text(row['a'])} | {_number(row['a_us'])} | {config_text(row['b'])} "
            f"| {_number(row['b_us'])} | {_number(row['b_in_a_us'])} |"
            for row in apart[:_MOST_SHOWN]
        ]
        if len(apart) > _MOST_SHOWN:
            lines.append(f"| and {len(apart) - _MOST_SHOWN} more | | | | | |")
        lines.append("")
    lines += [
        "## The default against the choice",
        "",
        "| call | default | µs | tuned | µs | ratio |",
        "|---|---|---|---|---|---|",
    ]
    ordered: Sequence[dict[str, Any]] = sorted(rows, key=lambda row: -(row["default_ratio"] or 0))
    lines += [
        f"| {row['call']} | {config_text(row['default'])} | {_number(row['default_us'])} | {config_text(row['a'])} "
        f"| {_number(row['a_us'])} | {'**' * (row['key'] in above)}{_number(row['default_ratio'], 3)}"
        f"{'**' * (row['key'] in above)} |"
        for row in ordered
    ]
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="what was exported after one tuning")
    parser.add_argument("b", type=Path, help="what was exported after another")
    parser.add_argument("--out", type=Path, help="where JSON and Markdown go; nowhere if not given")
    arguments = parser.parse_args()
    found = compare(entries_of(arguments.a), entries_of(arguments.b))
    text = markdown(found)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "tunings.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "tunings.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
