"""What every test has: the interpreter for Triton where there is no GPU, a clean environment, GPU
tests skipped by name.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Machines here are slow at times; a slow example is no failure, a slow test is (`timeout` in
# pyproject.toml).
settings.register_profile(
    "vcache", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("vcache")


# Tests start hundreds of Pythons: each would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts pytest in the background has it ignore SIGINT, and so would every process that
# a test starts and sends it to.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _gpus() -> int:
    """GPUs of this machine, without loading CUDA into the process that will start others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(bool(re.fullmatch(r"nvidia\d+", one.name)) for one in Path("/dev").iterdir())
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip()]))


GPUS = _gpus()
if GPUS == 0:
    # Read by Triton when a kernel is decorated, so before anything imports it; children inherit it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONGEST = (
    "injector soak monitor planned examples injector_lmcache real_waits real_modes versions "
    "real_hits real_processes multi offload_tier shapes kernel prove groups benchmarks "
    "real_failures disaggregated_prefill real_offload offload_process instances real_in_place "
    "start processes documents mappings offload_store publisher sources monitor_web packaging "
    "doctor_model"
)
"""Files of tests by the seconds that they take, the longest first; all others are short. The
second and the third one need no vLLM, which the nursery imports meanwhile."""
_NO_GPU = re.compile(r"needs \d+ GPUs?, here are")
PROCESS = os.environ.get("PYTEST_XDIST_WORKER", "")
"""The name of this process, if pytest has several."""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A `processes.Stage` of its own, without a server yet."""
    from processes import stage

    with stage(tmp_path) as made:
        yield made


@pytest.fixture
def stage(alone: Any) -> Any:
    """The same with a server."""
    alone.server()
    return alone


@pytest.fixture
def memfd() -> Iterator[int]:
    """Memory for a segment of four chunks of 1 KiB."""
    from processes import make_memfd

    fd = make_memfd(4096)
    yield fd
    os.close(fd)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The processes of pytest-xdist are forked from one that has imported what tests import."""
    from processes import WARM, nursery
    from vllm_cases import QUIET

    os.environ[WARM] = nursery("warm", **QUIET).address
    for spec in specs:
        spec.python = f"{sys.executable} {Path(__file__).parent / 'support' / 'warm.py'}"


def pytest_collection_finish(session: Any) -> None:
    """What vLLM finds out about a model, in seconds, it keeps for all instances of these tests, and
    for no others. The second process is the first that has nothing to do: it has the nursery of all
    tests with vLLM import that meanwhile.
    """
    # What was imported stays: no collection of garbage need look at it.
    gc.collect()
    gc.freeze()
    root = session.config._tmp_path_factory.getbasetemp()
    # With pytest-xdist, of all its processes.
    os.environ["VLLM_CACHE_ROOT"] = str((root.parent if PROCESS else root) / "vllm_cache")
    cases = sys.modules.get("vllm_cases")
    if PROCESS == "gw1" and cases is not None and not cases.missing(()):
        threading.Thread(target=cases.home, daemon=True).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        count = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if count > GPUS:
            reason = f"needs {count} GPU{'s' * (count > 1)}, here are {GPUS}"
            item.add_marker(pytest.mark.skip(reason=reason))
    _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    """Files that take long first, so that none of them runs alone at the end (with
    `--no-loadscope-reorder`).
    """
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Why a test failed may stand in what its processes said, whose logs are gone with the
    machine.
    """
    report = yield
    if report.failed:
        try:
            from processes import last_words

            report.sections += [(f"{name} said", said) for name, said in last_words().items()]
            for log in sorted(item.config._tmp_path_factory.getbasetemp().rglob("*.log")):
                if log.is_file() and log.stat().st_mtime >= call.start - 1:
                    report.sections.append((str(log), log.read_text(errors="replace")[-4000:]))
        except Exception as error:  # noqa: BLE001 - processes end and files go while they are looked at; the test has failed anyway
            report.sections.append(("logs", f"not all can be shown: {error!r}"))
    if report.when == "teardown":
        from processes import forget_last_words

        forget_last_words()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Names of the GPU tests before pytest's own list, and behind it why each test failed: of a
    long output the end is what is kept.
    """
    # From the reports: with pytest-xdist the tests were collected in other processes.
    skipped = terminalreporter.getreports("skipped")
    names = [one.nodeid for one in skipped if _NO_GPU.search(str(one.longrepr))]
    if names:
        here = "no GPU here" if GPUS == 0 else f"{GPUS} here"
        terminalreporter.section(f"{len(names)} GPU test{'s' * (len(names) > 1)} skipped ({here})")
        for name in names:
            terminalreporter.line(f"  {name}")
    yield
    reports = terminalreporter.getreports
    for report in [*reports("passed"), *reports("failed")]:
        for name, line in getattr(report, "user_properties", ()):
            if name == "summary":
                terminalreporter.line(line)
    failed = [*reports("error"), *reports("failed")]
    if failed:
        terminalreporter.section(f"why {len(failed)} failed, the first last")
        # What fails first is the cause of others.
        for report in sorted(failed, key=lambda report: getattr(report, "start", 0.0))[7::-1]:
            terminalreporter.line(f"{report.nodeid} ({report.when})")
            terminalreporter.line(textwrap.indent(_why(report), "  "))


def _why(report: Any) -> str:
    """The lines that raised, from the test down, and what they raised; its beginning and its end,
    since it may quote a log.
    """
    text = report.longreprtext.splitlines()
    lines = [line for line in text if line.startswith((">", "E "))] or text
    if len(lines) > 16:
        lines[6:-8] = ["…"]
    return "\n".join(line[:300] for line in lines)


@pytest.fixture(scope="session", autouse=True)
def _no_survivors() -> Iterator[None]:
    """Every test ends its own processes."""
    from processes import survivors

    yield
    left = survivors()
    assert not left, f"left running: {', '.join(left)}"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds the server or the file of the person who runs it; every test's default socket
    is its own.
    """
    monkeypatch.delenv("VCACHE_CONFIG", raising=False)
    monkeypatch.delenv("VCACHE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
