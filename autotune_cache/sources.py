"""What a tuned entry remembers of the source: a hash of a function and of everything that it calls in our modules.

Where a line stands, how it is broken, comments and docstrings do not count: a change elsewhere in a file makes no entry
stale. Every version of Python gives the same hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

_OURS = ("mxkv.",)


class _Module:
    """The top-level definitions of a module, and what it imports.

    Attributes:
        definitions: Names to the statements that define them.
        imports: Local names to (module, name in it, or None for the module itself).
    """

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"there is no source of a module {name!r}")
        self.lines = Path(spec.origin).read_text(encoding="utf-8").splitlines(keepends=True)
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        for node in ast.parse("".join(self.lines)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (t for each in targets for t in ast.walk(each) if isinstance(t, ast.Name)):
                    self.definitions.setdefault(target.id, []).append(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    whole = _is_module(inside)
                    self.imports[alias.asname or alias.name] = (inside, None) if whole else (node.module, alias.name)

    def text(self, node: ast.stmt) -> str:
        """A definition without comments, docstrings and blanks."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        lines = self.lines[first - 1 : node.end_lineno]
        tokens = list(tokenize.generate_tokens(io.StringIO("".join(lines)).readline))
        for token in tokens:
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        for start, end in _docstrings(node):
            lines[start - first : end - first + 1] = [""] * (end - start + 1)
        return "".join("".join(lines).split())


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return name.startswith(_OURS) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _docstrings(node: ast.stmt) -> Iterator[tuple[int, int]]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner, clean=False) is not None:
            yield inner.body[0].lineno, inner.body[0].end_lineno or inner.body[0].lineno


_modules = functools.cache(_Module)


@functools.cache
def source_hash(*roots: str, within: tuple[str, ...]) -> str:
    """A hash of definitions and of all that they use.

    Args:
        *roots: Top-level names with their modules: ``"mxkv.backends.triton_gpu.store:store_kernel"``.
        within: The modules (or packages) whose definitions count; what is elsewhere is not followed.

    Raises:
        ValueError: There is no such definition.
    """
    wanted: list[tuple[str, str]] = []
    for root in roots:
        module, _, name = root.partition(":")
        if name not in _modules(module).definitions:
            raise ValueError(f"{module} defines no {name!r}")
        wanted.append((module, name))
    texts: dict[tuple[str, str], str] = {}
    while wanted:
        module, name = wanted.pop()
        if (module, name) in texts:
            continue
        nodes = _modules(module).definitions.get(name, [])
        texts[module, name] = "".join(_modules(module).text(node) for node in nodes)
        for node in nodes:
            wanted += [found for found in _used(module, node) if any(_inside(found[0], where) for where in within)]
    spelled = "".join(f"{module}:{name}={text}\n" for (module, name), text in sorted(texts.items()))
    return hashlib.sha256(spelled.encode()).hexdigest()[:16]


def _inside(module: str, where: str) -> bool:
    return module == where or module.startswith(f"{where}.")


def _used(module: str, node: ast.stmt) -> Iterator[tuple[str, str]]:
    """The top-level definitions, here and in what is imported, that a definition names."""
    here = _modules(module)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            source, name = here.imports.get(inner.value.id, ("", ""))
            if source and name is None:
                yield source, inner.attr
        elif isinstance(inner, ast.Name):
            if inner.id in here.definitions:
                yield module, inner.id
            source, imported = here.imports.get(inner.id, ("", None))
            if source and imported is not None:
                yield source, imported
