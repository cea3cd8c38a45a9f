"""Versions as numbers."""

from __future__ import annotations

import re

Version = tuple[int, ...]


def numbers(text: str) -> Version:
    """The leading numbers: (2, 13, 0) of "2.13.0+cpu", (6, 18, 44) of "6.18.44-generic"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def dotted(version: Version) -> str:
    return ".".join(map(str, version))
