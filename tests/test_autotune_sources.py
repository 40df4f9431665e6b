"""The hash of a kernel's source: what makes a tuned entry stale, and what does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mxkv.autotune_cache import sources
from mxkv.autotune_cache.sources import source_hash

MAIN = '''
"""A module."""
from mxkv_sample import other
from mxkv_sample.other import LIMIT
import math

UNUSED = 3


def kernel(x):
    """What it does."""
    return helper(x) + other.far(x) + LIMIT + math.pi


def helper(x):
    return f"{x + 1:>3}" * 2  # a comment


def unrelated():
    return UNUSED
'''
OTHER = """
LIMIT = 7


def far(x):
    return near(x)


def near(x):
    return x


def nobody():
    return 1
"""


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """The hash of the sample's kernel, the sample's two modules being given."""
    package = tmp_path / "mxkv_sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "_OURS", ("mxkv.", "mxkv_sample."))

    def forget() -> None:
        for cached in (source_hash, sources._modules, sources._is_module):
            cached.cache_clear()
        for name in [name for name in sys.modules if name.startswith("mxkv_sample")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def of(main: str, other: str) -> str:
        forget()
        (package / "main.py").write_text(main)
        (package / "other.py").write_text(other)
        return source_hash("mxkv_sample.main:kernel", within=("mxkv_sample",))

    yield of
    forget()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another"),
        ("What it does.", "What it does,\n    at length."),
        ("UNUSED = 3", "UNUSED = 4\n\n\n\n"),
        ("return helper(x) + ", "return helper(\n        x\n    ) + "),
        ("def nobody():\n    return 1", "def nobody():\n    return 2"),
        ("def unrelated():\n", "def unrelated():\n    print()\n"),
    ],
)
def test_what_does_not_change_the_hash(hashed: Callable[[str, str], str], old: str, new: str) -> None:
    assert old in MAIN + OTHER
    assert hashed(MAIN, OTHER) == hashed(MAIN.replace(old, new), OTHER.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 7", "LIMIT = 8"),
        ("return x\n", "return -x\n"),
        ("x + 1:>3", "x + 1:>4"),
        ("return helper(x) +", "return 2 * helper(x) +"),
        ("    return near(x)", "    return 1 + near(x)"),
        ("def kernel(x):", "@staticmethod\ndef kernel(x):"),
    ],
)
def test_what_changes_the_hash(hashed: Callable[[str, str], str], old: str, new: str) -> None:
    assert old in MAIN + OTHER
    assert hashed(MAIN, OTHER) != hashed(MAIN.replace(old, new), OTHER.replace(old, new))


def test_an_unknown_root() -> None:
    with pytest.raises(ValueError, match="defines no 'nothing'"):
        source_hash("mxkv.numerics:nothing", within=("mxkv",))
    with pytest.raises(ValueError, match="no source of a module"):
        source_hash("mxkv.nowhere:nothing", within=("mxkv",))
