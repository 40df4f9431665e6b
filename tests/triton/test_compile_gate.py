"""The kernels compile for every target with no GPU present, and their machine code is what was meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
TARGETS = ("ampere", "ada", "hopper", "blackwell", "gfx942", "gfx950")


def run_worker(target: str, *arguments: str, module: str = "compile_worker") -> subprocess.CompletedProcess[str]:
    """Compile for a target in a process of its own: targets contaminate each other, and bad assembly kills it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("MXKV_")}
    return subprocess.run(
        [sys.executable, "-m", f"tests.triton.{module}", *arguments],
        cwd=ROOT, env=environment | {"MXKV_TARGET": target}, capture_output=True, text=True,
    )  # fmt: skip


def verdicts_of(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET", "0") == "1", reason="the run without the interpreter compiles")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str) -> None:
    done = run_worker(target)
    verdicts = verdicts_of(done.stdout)
    wrong = {v["case"]: v["problems"] for v in verdicts if v["problems"]}
    assert not wrong, f"{target}: {json.dumps(wrong, indent=1)}"
    tail = "\n".join(done.stdout.splitlines()[-3:])
    assert done.returncode == 0, f"{target}: exit status {done.returncode} after: {tail}\n{done.stderr[-3000:]}"
    assert len(verdicts) > 40


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET", "0") == "1", reason="the run without the interpreter compiles")
def test_a_target_must_be_a_gpu() -> None:
    done = run_worker("cpu")
    assert done.returncode == 2
    assert "MXKV_TARGET must name a GPU target" in done.stderr


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_attentions_launch_what_was_compiled_ahead(format: str) -> None:
    """Also where their sizes differ: else the tuner would compile each candidate again, one after another."""
    done = run_worker("hopper", format, module="compiled_ahead")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
