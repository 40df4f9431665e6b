"""In a fresh process: what an import costs and needs, a machine without GPU or Triton, forks, variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

ROUND_TRIP = """
import torch, mxkv
cache = mxkv.empty_cache("mxfp4", num_blocks=2, block_size=4, latent_dim=64)
mxkv.store(cache, torch.full((1, 64), 3.0), torch.tensor([5]))
assert mxkv.load(cache, torch.tensor([5])).eq(3).all()
"""

HIDE = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {hidden} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own that finds this checkout."""
    mine = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("MXKV_") and k not in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**mine, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_case_25_import_and_use_on_a_cpu_are_light(tmp_path: Path) -> None:
    """No heavy module, CUDA context, thread or file; the environment is read by the first call, not by the import."""
    run(
        """
import os, sys, threading, torch
heavy = {"triton", "numba", "llvmlite", "rich", "typer", "matplotlib", "transformers", "torchao"}
modules, threads = set(sys.modules), threading.active_count()
def light():
    new = set(sys.modules) - modules
    assert not heavy & {name.split(".")[0] for name in new}, sorted(new)
    assert not {name for name in new if name.startswith(("torch._inductor", "torch._dynamo"))}, sorted(new)
    assert not torch.cuda.is_initialized()
    assert threading.active_count() == threads
import mxkv
light()
del os.environ["MXKV_BACKEND"], os.environ["MXKV_TARGET"]
print(mxkv.explain("store", device="cpu"))
light()
"""
        + ROUND_TRIP
        + "light()\n",
        HOME=str(tmp_path),
        MXKV_BACKEND="no such backend",
        MXKV_TARGET="nowhere",
    )
    assert not [p for p in tmp_path.rglob("*") if "mxkv" in str(p.relative_to(tmp_path))]


def test_case_25_without_a_gpu() -> None:
    run(
        ROUND_TRIP
        + """
assert not torch.cuda.is_available()
found = mxkv.explain("store", device="cuda")
assert found.chosen is None, found
try:
    mxkv.empty_cache("mxfp4", 1, 1, 64, device="cuda")
except (RuntimeError, AssertionError):
    pass
else:
    raise SystemExit("a cuda cache without a GPU")
""",
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
    )


def test_case_25_without_triton_and_the_rest() -> None:
    run(HIDE.format(hidden={"triton", "numba", "rich", "typer", "numpy"}) + ROUND_TRIP)


@pytest.mark.parametrize("simulate", ["0", "1"])
def test_a_missing_numba_is_a_reason(simulate: str) -> None:
    run(
        HIDE.format(hidden={"numba", "llvmlite"})
        + ROUND_TRIP
        + """
for device in ("cpu", "cuda"):
    verdict = mxkv.explain("store", device=device, backend="numba").verdicts["numba"]
    assert not verdict.ok and "Numba is not installed" in verdict.reasons, verdict
try:
    mxkv.load(cache, torch.tensor([5]), backend="numba")
except ValueError as error:
    assert "Numba is not installed" in str(error) and "mxkv[numba]" in str(error)
else:
    raise SystemExit("numba ran without Numba")
""",
        NUMBA_ENABLE_CUDASIM=simulate,
    )


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_missing_triton_is_a_reason(interpret: str) -> None:
    """Where Triton is wanted and is not there, the error says so: no ImportError from inside."""
    run(
        HIDE.format(hidden={"triton"})
        + ROUND_TRIP
        + """
from mxkv import dispatch
if "triton" in {b.name for b in dispatch.backends()}:
    for device in ("cpu", "cuda"):
        verdict = mxkv.explain("store", device=device, backend="triton").verdicts["triton"]
        assert not verdict.ok
        assert any("triton" in reason.lower() for reason in verdict.reasons), verdict
    try:
        mxkv.load(cache, torch.tensor([5]), backend="triton")
    except ValueError as error:
        assert "triton" in str(error).lower()
    else:
        raise SystemExit("it ran")
""",
        TRITON_INTERPRET=interpret,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_case_25_a_forked_child_works() -> None:
    run(
        ROUND_TRIP
        + """
import os
child = os.fork()
if child == 0:
    try:
        mxkv.store(cache, torch.full((1, 64), 2.0), torch.tensor([1]))
        os._exit(0 if mxkv.load(cache, torch.tensor([1])).eq(2).all() else 3)
    except BaseException:
        os._exit(4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_case_25_a_child_forked_after_import_uses_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    run(
        """
        import os, torch, mxkv
        child = os.fork()
        if child == 0:
            try:
                cache = mxkv.empty_cache("mxfp4", 2, 4, 64, device="cuda")
                mxkv.store(cache, torch.full((1, 64), 2.0, device="cuda"), torch.tensor([1], device="cuda"))
                os._exit(0 if mxkv.load(cache, torch.tensor([1], device="cuda")).eq(2).all() else 3)
            except BaseException:
                os._exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        """
    )


def test_spawned_workers() -> None:
    run(
        """
        import multiprocessing, torch, mxkv
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply(mxkv.FORMATS["mxfp4"].record_bytes, (512,)) == 272
        """
    )


def test_case_34_unknown_backend_in_the_environment() -> None:
    done = python(ROUND_TRIP, MXKV_BACKEND="tritonn")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "ValueError" in last
    assert "tritonn" in last
    assert "torch" in last


def test_case_34_forced_backend_that_cannot_run() -> None:
    code = """
import mxkv
from mxkv import dispatch
names = {b.name for b in dispatch.backends()} - {"torch"}
print(*names)
"""
    for name in run(code).stdout.split():
        done = python(ROUND_TRIP, MXKV_BACKEND=name, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        assert done.returncode != 0
        assert f"backend '{name}' cannot run store of mxfp4" in done.stderr
    assert python(ROUND_TRIP, MXKV_BACKEND="torch").returncode == 0


def test_unknown_variables_are_warned_of() -> None:
    done = run("import logging; logging.basicConfig()\n" + ROUND_TRIP, MXKV_BAKEND="torch")
    assert "MXKV_BAKEND" in done.stderr
    assert "MXKV_BACKEND" in done.stderr


def test_threads() -> None:
    """Many threads that meet every format at once, with nothing planned yet."""
    run(
        """
        import threading, torch, mxkv
        found, failures = {}, []
        def work(seed):
            for format in mxkv.FORMATS.values():
                cache = mxkv.empty_cache(format, 2, 4, 512)
                mxkv.store(cache, torch.arange(512.0)[None] * seed, torch.tensor([5]), format=format)
                found[seed, format.name] = mxkv.load(cache, torch.tensor([5]), format=format)
        def guarded(seed):
            try:
                work(seed)
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=guarded, args=(s,)) for s in range(1, 8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures, failures
        together = dict(found)
        for seed in range(1, 8):
            work(seed)
        assert together.keys() == found.keys() and len(found) == 7 * len(mxkv.FORMATS)
        assert all(rows.any() and torch.equal(together[key], rows) for key, rows in found.items())
        """
    )


def test_flushed_subnormals_are_the_callers_choice_and_no_crash() -> None:
    run("import torch; torch.set_flush_denormal(True)\n" + ROUND_TRIP)
