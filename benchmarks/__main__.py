"""`python -m benchmarks`: run the subjects this machine can run, print their
rows, write them as they come.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import msgspec
    import torch

    from . import copies, engine, metadata
    from .results import Report, Row
except ModuleNotFoundError as absent:
    sys.exit(f"{absent.name} is not installed: pip install '/path/to/vcache[engine]'")

SUBJECTS: dict[str, tuple[Callable[[], list[Row]], int]] = {
    "metadata": (metadata.run, 0),
    "copies": (copies.run, 1),
    "engine": (engine.run, 2),
}
"""Each with the GPUs that it needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a case missed its limit or a subject failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    option = parser.add_argument
    option("--only", action="append", choices=SUBJECTS, help="may be repeated (default: all)")
    option("--out", type=Path, help="result file; one that is there is continued")
    option("--commit", default="", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    try:
        report, failed = Report(options.out, options.commit), list[str]()
    except (OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
        parser.error(f"argument --out: {options.out}: {error}")
    for name in options.only or SUBJECTS:
        run, needed = SUBJECTS[name]
        if (gpus := torch.cuda.device_count()) < needed:
            print(f"{name}: skipped, {gpus} GPUs here", file=sys.stderr)
            continue
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            report.add(run())
        except Exception:  # noqa: BLE001 - the other subjects' rows count
            failed.append(name)
            traceback.print_exc()
    return int(bool(failed) or report.missed)


if __name__ == "__main__":
    raise SystemExit(main())
