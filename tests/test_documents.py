"""What the documents say can be done, and their links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, SECONDS, stage

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "notes").glob("*.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


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


def test_the_program_of_the_api_page_prints_what_the_page_says(tmp_path: Path) -> None:
    (program,), (printed,) = _blocks(ROOT / "docs" / "api.md", "python"), _blocks(ROOT / "docs" / "api.md", "text")
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "vcache.yaml").write_text("pool: {device: host, segment_bytes: 32 MiB}\n")
    with stage(tmp_path / "server") as node:
        node.server()
        environment = {**os.environ, "VCACHE_CONFIG": str(tmp_path / "vcache.yaml"), "VCACHE_SOCKET": str(node.path)}
        ran = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS * 3
        )
    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
