"""What a check says."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. `detail` says what was found, `advice` what to do (empty where nothing is to be done)."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""
