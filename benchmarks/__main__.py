"""`python -m benchmarks`: run the subjects this machine can run, print their rows, write them as
they come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

try:
    import torch

    from . import copies, engine, metadata
    from .options import Measurement, names_of, parser
    from .results import Row
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
    asked = parser("python -m benchmarks", __doc__, 540.0)
    asked.add_argument("--only", type=names_of(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    options = asked.parse_args(arguments)
    made = Measurement(options)
    for name in options.only or SUBJECTS:
        run, needed = SUBJECTS[name]
        if (gpus := torch.cuda.device_count()) < needed:
            print(f"{name}: skipped, {gpus} GPUs here", file=sys.stderr)
            continue
        with made.part(name):
            made.add(run())
    return made.end()


if __name__ == "__main__":
    raise SystemExit(main())
