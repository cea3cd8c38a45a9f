"""The tenants' shares of the pool: each chunk counts for a tenant. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from vcache_backend.metadata_server.messages import TENANT_BYTES, TenantStats

OTHERS = "*"
"""The name of all tenants without an own share, and of requests without a tenant."""


def tenant_id(name: str) -> bytes:
    """Identify a tenant to the server. A digest, since a name may be a `cache_salt`, a secret."""
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=TENANT_BYTES, person=b"vcache-tenant-1").digest()


class Tenant:
    """A tenant with a share of the pool. used: bytes of its slots. evicted: chunks."""

    def __init__(self, name: str, share: float) -> None:
        self.name, self.share = name, share
        self.used = self.evicted = 0

    def limit(self, capacity: int) -> int:
        """The tenant's bytes of a pool of `capacity` bytes."""
        return int(self.share * capacity)


class Quotas:
    """The tenants that the configuration names. Other tenants' names are never kept."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.tenants = [Tenant(name, share) for name, share in shares.items()]
        self._of = {tenant_id(tenant.name): tenant for tenant in self.tenants}
        self._others = self._of.pop(tenant_id(OTHERS), None)

    def of(self, tenant: bytes) -> Tenant | None:
        """The tenant for which a chunk counts, by its id; None if nothing limits it."""
        return self._of.get(tenant, self._others)

    def stats(self, capacity: int) -> list[TenantStats]:
        """Each tenant's statistics in a pool of `capacity` bytes."""
        return [
            TenantStats(tenant.name, tenant.used, tenant.limit(capacity), tenant.evicted)
            for tenant in self.tenants
        ]
