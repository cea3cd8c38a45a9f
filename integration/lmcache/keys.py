"""What LMCache's keys say about whose they are."""

from __future__ import annotations

from vcache_backend.transfer.keys import TaggedHash

from .scope import TAG_NAME


def scoped(key: TaggedHash) -> bool:
    """Whether the key carries our tag. One without it comes from a scheduler that did not load our hook."""
    return any(name == TAG_NAME for name, _ in key.tags or ())
