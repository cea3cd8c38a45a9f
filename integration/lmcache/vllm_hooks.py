"""Where the entry point was before; environments installed by then still name it."""

from .patches import register

__all__ = ["register"]
