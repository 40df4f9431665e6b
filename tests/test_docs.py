"""The documents' Python runs, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path)], ids=named)
def test_the_python_of_a_document_runs(path: Path, fresh_settings: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks(path):  # a later block may go on from an earlier one
        exec(compile(block, named(path), "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert broken == []


def test_the_documents_are_found() -> None:
    assert {"README.md", "docs/adding_a_format.md", "docs/adding_a_backend.md"} <= {named(path) for path in DOCUMENTS}
    assert blocks(ROOT / "README.md")
