"""Who may make memory for the pool now: claims on what a device shall lend in all. Pure.

Memory that is made and then refused would be made in vain, and on a GPU may be too much; so a worker asks first.
"""

from __future__ import annotations

import msgspec

CLAIM_SECONDS = 30.0
"""How long a worker may take to make its memory; then others may."""
ROUNDING_BYTES = 64 << 20
"""So much larger than its claim may a segment be: GPU memory comes in granules."""


class Claim(msgspec.Struct, frozen=True):
    """`client` is about to lend so many bytes of `device`. `until`: on the server's monotonic clock."""

    id: int
    device: str
    nbytes: int
    until: float


class Claims:
    """At most one of each client."""

    def __init__(self) -> None:
        self._of_client: dict[int, Claim] = {}

    def grant(self, id_: int, client: int, device: str, missing: int, now: float) -> int:
        """Of the `missing` bytes of a device what nobody else is about to make; the client's claim is on that from now on."""
        self.drop_client(client)
        others = sum(claim.nbytes for claim in self._of_client.values() if claim.device == device and now <= claim.until)
        nbytes = max(missing - others, 0)
        if nbytes:
            self._of_client[client] = Claim(id_, device, nbytes, now + CLAIM_SECONDS)
        return nbytes

    def redeem(self, id_: int, client: int, device: str, nbytes: int, now: float) -> bool:
        """The client has made so many bytes under its claim, which ends; False if it has no such claim any more."""
        claim = self._of_client.pop(client, None)
        if claim is None or (claim.id, claim.device) != (id_, device):
            return False
        return now <= claim.until and nbytes <= claim.nbytes + ROUNDING_BYTES

    def drop_client(self, client: int) -> None:
        """It makes nothing, or is gone."""
        self._of_client.pop(client, None)
