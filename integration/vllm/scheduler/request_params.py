"""A request's own settings for the connector: `vcache` in its `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from vcache_backend.errors import MAX_LINE_CHARS, printable

NAME = "vcache"


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's settings.

    load, store: the request may load chunks, and store chunks. announced: another instance is
    computing this prompt, so wait for its chunks, at most `wait_seconds`."""

    load: bool = True
    store: bool = True
    announced: bool = False
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0


NOTHING = RequestParams(load=False, store=False)
DEFAULT = RequestParams()


def read(params: object) -> RequestParams:
    """Read the settings from `kv_transfer_params`, an untrusted value from a client. ValueError
    names an unknown key or an impossible value, in one line that can be logged."""
    params = params or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params: Expected an object, got {type(params).__name__}")
    given = params.get(NAME)
    if given is None:
        return DEFAULT
    try:
        return msgspec.convert(given, RequestParams)
    except ValueError as error:  # also of text that is not Unicode
        said = printable(str(error), MAX_LINE_CHARS)
        raise ValueError(f"kv_transfer_params: {NAME}: {said}") from error
