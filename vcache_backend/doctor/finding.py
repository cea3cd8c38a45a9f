"""The result of a check."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. advice: what to do, or empty."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warn(check: str, detail: str, advice: str) -> Finding:
    return Finding(check, "warn", detail, advice)


def fail(check: str, detail: str, advice: str = "") -> Finding:
    return Finding(check, "fail", detail, advice)
