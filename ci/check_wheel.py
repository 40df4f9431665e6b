"""Builds the wheel, compares its contents with the folders, and runs it in an environment of its own.

A package that pyproject.toml does not list vanishes from the wheel without a word, and an editable install hides that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The folders that a wheel holds, and under which name.
FOLDERS = {"mxkv": "mxkv", "backends": "mxkv/backends", "autotune_cache": "mxkv/autotune_cache"}

_NOT_SHIPPED = {".pyc", ".md"}
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "tests"
)

_IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import mxkv
home = pathlib.Path(sys.argv[1]).resolve()
names = ["mxkv", *(m.name for m in pkgutil.walk_packages(mxkv.__path__, "mxkv.") if not m.name.endswith("__main__"))]
for name in names:
    module = importlib.import_module(name)
    origin = pathlib.Path(module.__file__).resolve()
    assert home in origin.parents, f"expected {name} from the wheel in {home}, got {origin}"
print(f"{len(names)} modules import from the wheel")
"""


def expected_files(root: Path) -> set[str]:
    """The files that a wheel of this tree must hold, as the wheel names them."""
    found = set()
    for folder, name in FOLDERS.items():
        for path in (root / folder).rglob("*"):
            inside = path.relative_to(root / folder)
            linked = folder == "mxkv" and (root / folder / inside.parts[0]).is_symlink()
            if path.is_file() and not linked and path.suffix not in _NOT_SHIPPED:
                found.add(f"{name}/{inside.as_posix()}")
    return found


def difference(root: Path, wheel: Path) -> list[str]:
    """What is wrong with a wheel's contents, one line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/") and ".dist-info/" not in n}
        licensed = any(n.endswith("/LICENSE") for n in archive.namelist())
    expected = expected_files(root)
    wrong = [
        f"missing from the wheel: {n} (is its package listed in pyproject.toml?)" for n in sorted(expected - names)
    ]
    wrong += [f"in the wheel, but not in the folders: {n}" for n in sorted(names - expected)]
    return wrong if licensed else [*wrong, "missing from the wheel: LICENSE"]


def build(root: Path, work: Path) -> Path:
    """Build an sdist, and from it a wheel, out of a copy of the tree (leftovers of other builds would end up in it)."""
    copy = work / "tree"
    shutil.copytree(root, copy, symlinks=True, ignore=_NOT_COPIED)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", copy, quiet=True)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, home: Path) -> Path:
    """Install a wheel into a new environment that takes everything else from this one; gives its site-packages."""
    venv.create(home, with_pip=False)
    (site,) = [*home.glob("lib/python*/site-packages"), *home.glob("Lib/site-packages")][:1]
    # A path in a .pth file is searched, but its own .pth files are not run: the editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        sys.executable, "-m", "pip", "--python", python_of(home), "install", "--quiet", "--no-deps", "--no-index", wheel
    )
    return site


def python_of(home: Path) -> Path:
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(*command: str | Path, cwd: Path | None = None, quiet: bool = False) -> None:
    """Run a command; its output is shown if it fails, or unless ``quiet``."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=quiet, check=False)
    if done.returncode:
        if quiet:
            print(done.stdout, done.stderr, sep="\n")
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command))}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build(ROOT, work)
        wrong = difference(ROOT, wheel)
        if wrong:
            raise SystemExit("\n".join(wrong))
        print(f"{wheel.name} holds what the folders hold: {len(expected_files(ROOT))} files")
        site = install(wheel, work / "env")
        run(python_of(work / "env"), "-I", "-c", _IMPORT_ALL, site, cwd=work)
        run(python_of(work / "env").with_name("mxkv"), "demo", cwd=work)


if __name__ == "__main__":
    main()
