"""What the documents say can be done, and their links."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_commands import COMMANDS, Place, blocks, check, commands
from processes import ROOT, ran, stage

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    broken = []
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


def test_pages_stay_short() -> None:
    for name, most in {"README.md": 120, "CHANGELOG.md": 120, "docs/benchmarks.md": 200}.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name


_HEAVY = re.compile(r"[ᵃ-ᶻʰ-ˣ⁰-ⁿ¹²³]|\b(?:whose|of which|that which)\b")
_TWO_FIGURES = re.compile(r"\d[^\s|]* ?[·;/] ?[*×]*\d")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "adr"], ids=lambda page: page.name
)
def test_a_page_is_read_once(page: Path) -> None:
    """No footnotes, no heavy relative clauses, and no table cell with more than one figure."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)", "", page.read_text(), flags=re.S | re.M)
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert not [*_HEAVY.findall(text), *filter(_TWO_FIGURES.search, cells)]


def test_the_figures_are_those_of_the_result_files() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
    pages, folder, how = script["PAGES"], script["PICTURES"], "run scripts/figures.py"
    texts = [page.read_text() for page in pages]
    assert list(map(script["filled"], texts)) == texts, how
    named = [
        one for text in texts for one in re.findall(r"<!-- scripts/figures.py: (.*) -->", text)
    ]
    assert sorted(named) == sorted(script["tables"]())
    assert {one.name: one.read_text() for one in folder.iterdir()} == script["pictures"](), how
    assert not [
        words for name, words in script["claims"]() if words not in (ROOT / name).read_text()
    ]


def test_the_program_of_the_api_page_prints_what_the_page_says(tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "docs" / "api.md", "python")
    (printed,) = blocks(ROOT / "docs" / "api.md", "text")
    (tmp_path / "program.py").write_text(program)
    # What this machine needs: no GPU, and a server that may answer late beside other tests.
    lines = ["pool: {device: host, segment_bytes: 32 MiB}"]
    lines += ["client: {connect_seconds: 10, request_seconds: 10}\n"]
    (tmp_path / "vcache.yaml").write_text("\n".join(lines))
    with stage(tmp_path / "server") as node:
        node.server()
        changes = {"VCACHE_CONFIG": f"{tmp_path}/vcache.yaml", "VCACHE_SOCKET": str(node.path)}
        done = ran(sys.executable, "program.py", cwd=tmp_path, env=os.environ | changes)
        # The page says that what the first engine lent stays.
        assert len(node.client().list_segments()) == 1
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


# ---- commands


def _form(command: str) -> str:
    """Commands of one form are run alike: from `.venv` or not, with or without brackets, or lending
    memory, each of another device or size.
    """
    plain = command.removeprefix(".venv/bin/").replace("[--offload]", "--offload")
    return re.sub(r"(?<=--)(device|bytes) \S+", r"\1", plain)


PAGED = {_form(command): (command, page) for page in COMMANDS for command in commands(page)}
PAGED = sorted(PAGED.values())
assert {"vcache segment drop ID", "python examples/two_vllm_instances.py --cpu"} <= {*dict(PAGED)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server, and what stands for the names that the pages have."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "there.yaml").write_text("{}")
    with stage(folder) as node:
        node.server()
        yield {"VCACHE_SOCKET": str(node.path), "D": "host:page", "N": "64", "SIZE": "256KiB"} | {
            **dict.fromkeys(("FILE", "PATH"), str(folder / "there.yaml")),
            **dict.fromkeys(("NAME_OR_FOLDER", "M"), str(folder)),
        }


@pytest.mark.parametrize(
    ("command", "page"), PAGED, ids=lambda part: part.name if isinstance(part, Path) else part[:60]
)
def test_every_command_of_the_pages_runs(
    command: str, page: Path, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(command, Place(place, tmp_path, monkeypatch))


def test_which_models_are_cached_is_as_vllm_was_asked() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "which_models.py"))
    file = ROOT / "benchmarks" / "results" / "models.json"
    tables = script["tables"](json.loads(file.read_text()))
    assert f"\n{tables}\n" in script["PAGE"].read_text(), f"scripts/which_models.py write {file}"
