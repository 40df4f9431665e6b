"""What is packaged is what is there, and the scripts say what pyproject.toml says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import mxkv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "ci/check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: Version(version) for name, version in (line.split("==") for line in lines if "==" in line)}


def test_every_folder_is_a_listed_package(project: dict[str, Any], check_wheel: ModuleType) -> None:
    found = {}
    for folder, name in check_wheel.FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder)
            if not (folder == "mxkv" and inside.parts and (ROOT / folder / inside.parts[0]).is_symlink()):
                found[".".join(Path(name, inside).parts)] = Path(folder, inside).as_posix()
    tool = project["tool"]["setuptools"]
    assert sorted(tool["packages"]) == sorted(found)
    for package, folder in found.items():
        if package.startswith(("mxkv.backends", "mxkv.autotune_cache")):
            assert tool["package-dir"][package] == folder


@pytest.mark.parametrize("name", ["backends", "autotune_cache"])
def test_moved_folders_are_linked_for_tools_that_read_the_tree(name: str) -> None:
    if not (ROOT / name).is_dir():
        pytest.skip(f"there is no {name} yet")
    assert os.readlink(ROOT / "mxkv" / name) == f"../{name}"


def wheel_of(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*names, "mxkv-1.dist-info/METADATA", "mxkv-1.dist-info/licenses/LICENSE"):
            archive.writestr(name, "")
    return path


def test_a_wheel_that_differs_from_the_folders_is_noticed(check_wheel: ModuleType, tmp_path: Path) -> None:
    for name in (
        "mxkv/__init__.py",
        "mxkv/py.typed",
        "mxkv/cli/d.json",
        "backends/a/k.py",
        "backends/a/__pycache__/k.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "mxkv/backends").symlink_to("../backends")
    right = {"mxkv/__init__.py", "mxkv/py.typed", "mxkv/cli/d.json", "mxkv/backends/a/k.py"}
    wheel = tmp_path / "w.whl"
    assert check_wheel.difference(tmp_path, wheel_of(wheel, right)) == []
    for name in right:
        (line,) = check_wheel.difference(tmp_path, wheel_of(wheel, right - {name}))
        assert name in line
        assert "missing" in line
    (line,) = check_wheel.difference(tmp_path, wheel_of(wheel, right | {"backends/a/k.py"}))
    assert "not in the folders: backends/a/k.py" in line


def test_the_version_is_one() -> None:
    assert importlib.metadata.version("mxkv") == mxkv.__version__


def test_the_readme_travels_with_the_package() -> None:
    text = importlib.metadata.metadata("mxkv").get_payload()  # type: ignore[attr-defined]
    assert "mxkv" in text


def test_pins_lie_in_the_ranges_and_cover_every_direct_dependency(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["project"]["dependencies"], *extras["demo"], *extras["dev"])]
    pinned = pins()
    for requirement in wanted:
        assert pinned[requirement.name] in requirement.specifier, requirement
    assert "triton" not in pinned  # torch's GPU builds ask for one of their own


def test_the_scripts_name_the_same_versions_as_the_files(project: dict[str, Any]) -> None:
    setup, test = (ROOT / "ci/setup.sh").read_text(), (ROOT / "ci/test").read_text()
    assert f"torch=={pins()['torch']}" in setup
    (requirement,) = (Requirement(text) for text in project["project"]["optional-dependencies"]["triton"])
    lowest = re.search(r"^lowest_triton=([\d.]+)", test, re.M)
    newest = re.search(r"^newest_triton=([\d.]+)", test, re.M)
    assert lowest
    assert newest
    (minimum,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    assert Version(lowest[1]) == Version(f"{minimum}.0") == Version(f"{minimum}")
    assert Version(newest[1]) in requirement.specifier


@pytest.mark.parametrize("script", ["ci/test", "ci/demo", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
