"""Imports point down, and some things are done in one place only. Read from the source: nothing is
imported but the server.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import ROOT, ran

HOOK = "vcache_backend.integration.plugin"
FOLDERS = {name: name for name in ("vcache_backend", "benchmarks")}
FOLDERS |= {"integration": "vcache_backend.integration"}
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

GPU_CODE = ("torch", "triton", "numpy", "cuda", "vllm", "lmcache", "mooncake")
DOORS = ("vcache_backend.integration", "integration", "benchmarks")

TOOLS = tuple(f"vcache_backend.{name}" for name in ("cli", "doctor", "prove", "status", "tables"))
"""On top of everything."""
ROOMS = ("protocol", "metadata_server", "vram_pool", "resident", "offload", "transfer", "engine")
"""From the bottom up: none imports one above it, but for what `offload` shares with `transfer`:
layouts, keys, the outbox and statistics.
"""
SHARED = tuple(f"vcache_backend.transfer.{name}" for name in ("layout", "keys", "outbox", "stats"))

# (who, what it must not import even inside a function)
FORBIDDEN = [
    *(
        (f"vcache_backend.{room}", tuple(f"vcache_backend.{up}" for up in ROOMS[at + 1 :]))
        for at, room in enumerate(ROOMS[:-1])
    ),
    *((f"vcache_backend.{room}", (*TOOLS, "vllm", "lmcache")) for room in ROOMS),
    *((f"vcache_backend.{room}", ("vcache_backend.metadata_server",)) for room in ROOMS[2:]),
    ("vcache_backend.protocol", GPU_CODE),
    ("vcache_backend.metadata_server", GPU_CODE),
    ("vcache_backend.vram_pool", ("mooncake",)),
    ("vcache_backend.resident", ("mooncake",)),
    ("vcache_backend.transfer", ("mooncake",)),
    ("vcache_backend.config", GPU_CODE),
    ("vcache_backend.errors", GPU_CODE),
    ("vcache_backend.status", GPU_CODE),
]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module(path: Path) -> str:
    """The name a file is installed under."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


def folder(path: Path) -> str:
    """The package that a file lies in."""
    return module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]


def imports(path: Path, top_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, `from a import b` as both `a` and `a.b`; not
    for type checkers only.
    """
    package = folder(path)
    for node in _walk(parsed(path), top_only):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def _walk(node: ast.AST, top_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if top_only and function:
            continue
        yield child
        yield from _walk(child, top_only)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def found(path: Path, forbidden: tuple[str, ...], top_only: bool = False) -> list[str]:
    where, those = path.relative_to(ROOT), imports(path, top_only)
    return [f"{where}:{line} imports {name}" for line, name in those if within(name, forbidden)]


def imported(who: tuple[str, ...], forbidden: tuple[str, ...], top_only: bool = False) -> list[str]:
    """What the modules within `who` import of it."""
    files = [path for path in FILES if within(module(path), who)]
    assert files
    return [line for path in files for line in found(path, forbidden, top_only)]


@pytest.mark.parametrize(
    ("who", "forbidden"), FORBIDDEN, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_imports_point_down(who: str, forbidden: tuple[str, ...]) -> None:
    lines = imported((who,), forbidden)
    if who == "vcache_backend.offload":
        lines = [line for line in lines if not within(line.rpartition(" ")[2], SHARED)]
    assert lines == []


def test_what_the_offload_tier_needs_is_loaded_by_those_who_have_one() -> None:
    who = ("vcache_backend.transfer", "vcache_backend.engine")
    assert imported(who, ("vcache_backend.offload",), top_only=True) == []


def test_the_core_does_not_import_the_doors_but_lazily_in_the_cli() -> None:
    core = [path for path in FILES if path.is_relative_to(ROOT / "vcache_backend")]
    wrong = [found(path, DOORS, top_only=path.parent.name == "cli") for path in core]
    assert not any(wrong), wrong


def test_the_doors_and_benchmarks_import_their_own_modules_relatively() -> None:
    """The doors have one name in a checkout and another when installed; a relative import is right
    under both.
    """
    wrong = []
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        absolute = rf"^ *(from|import) ({own}|{FOLDERS[own]})\b"
        if own != "vcache_backend" and re.search(absolute, path.read_text(), re.M):
            wrong.append(path)
    assert wrong == []


def test_every_folder_of_code_is_packaged() -> None:
    """But for the benchmarks, which are run from a checkout."""
    files = [path for path in FILES if not path.is_relative_to(ROOT / "benchmarks")]
    packages = {*map(folder, files), "vcache_backend.configs"}
    assert packages == set(PYPROJECT["tool"]["setuptools"]["packages"])
    marks = {path.parent / "__init__.py" for path in FILES}
    assert [mark for mark in marks if not mark.exists()] == []


# The hook is what every process of vLLM gets.
@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import vcache_backend.metadata_server.main", ["rich"]),
        (f"from {HOOK} import register; register(); register()", ["msgspec"]),
    ],
    ids=["server", "hook"],
)
def test_what_has_to_be_light_loads_neither_torch_nor_cuda(code: str, more: list[str]) -> None:
    """What the imports do, rather than what they say: a fresh process has none of it, and no
    threads or numpy either.
    """
    heavy = ["torch", "triton", "numpy", "cuda", "vllm", "lmcache", *more]
    code = f"import sys; {code}; print([n for n in {heavy} if n in sys.modules])"
    child = ran(sys.executable, "-c", code)
    assert (child.stdout, child.stderr) == ("[]\n", "")


def test_no_two_classes_have_one_name() -> None:
    product = [path for path in FILES if not path.is_relative_to(ROOT / "benchmarks")]
    nodes = (node for path in product for node in ast.walk(parsed(path)))
    counted = Counter(one.name.lstrip("_") for one in nodes if isinstance(one, ast.ClassDef))
    assert [name for name, count in counted.items() if count > 1] == []


def test_no_imports_run_in_a_circle() -> None:
    """Nor those inside a function."""
    files = {module(path): path for path in FILES}
    graph = {
        name: {
            other
            for _, other in imports(path)
            if other in files and other != name and not name.startswith(f"{other}.")
        }
        for name, path in files.items()
    }
    TopologicalSorter(graph).prepare()  # CycleError names the circle
