"""What `vcache bench` measures, one file a subject. Every figure stands beside its reference, measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `vcache bench`; 0, or 1 if a case missed its floor."""
    from .run import main as run

    return run(arguments)
