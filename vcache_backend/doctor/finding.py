"""The result of a check."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. advice: what to do; empty if there is nothing to do."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""
