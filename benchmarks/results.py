"""Result rows, and the file they go to: with the machine, the versions and the commit they were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

PACKAGES = (
    "torch",
    "triton",
    "cuda-bindings",
    "msgspec",
    "numpy",
    "vllm",
    "lmcache",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "xxhash",
    "zstandard",
)


class Row(msgspec.Struct, frozen=True):
    """One case. `value` and `reference` in `unit`; `ratio` is value ÷ reference unless `what` says otherwise.

    `runs`: samples behind the median. `spread`: (90th - 10th percentile) ÷ median of the samples of `value`.
    """

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
    samples: Sequence[float],
    reference: Sequence[float] | float,
    *,
    what: str,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Median of `samples` against the median (or the stated value) of the reference, judged by the ratio."""
    value = statistics.median(samples)
    against = reference if isinstance(reference, (int, float)) else statistics.median(reference)
    ratio = value / against if against else 0.0
    limit, ok = "", None
    if at_least is not None:
        limit, ok = f">= {at_least:g}", ratio >= at_least
    if at_most is not None:
        limit, ok = f"<= {at_most:g}", ratio <= at_most
    return Row(case, value, unit, float(against), ratio, len(samples), spread(samples), what, limit, ok)


def spread(samples: Sequence[float]) -> float:
    """(90th - 10th percentile) ÷ median; 0 for fewer than 3 samples."""
    if len(samples) < 3:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    middle = statistics.median(samples)
    return (deciles[-1] - deciles[0]) / middle if middle else 0.0


def machine() -> dict[str, object]:
    """What it ran on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "gpus": gpus,
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "driver": next(iter(re.findall(r"\d+\.\d+(?:\.\d+)?", " ".join(_lines("/proc/driver/nvidia/version")))), ""),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": str(torch.version.cuda)} if torch.cuda.is_available() else {})


def document(rows: Sequence[Row], commit: str = "") -> dict[str, object]:
    """The whole result file as plain values."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }


def write(path: Path, result: dict[str, object]) -> None:
    """One JSON file, readable in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _commit() -> str:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or "unknown"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
