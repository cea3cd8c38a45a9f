"""The offload tier: what its settings mean here, and whether its store answers."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from vcache_backend.config import ByteSize, Config, OffloadConfig
from vcache_backend.doctor import mooncake
from vcache_backend.doctor.finding import Finding
from vcache_backend.doctor.memory import host_available

LEAST_CHUNKS = 4
"""With staging memory for fewer a worker has no tier."""
LOSSY = ("fp8", "int8")
SMALL_TOKEN = ByteSize(64 << 10)
"""KV of a token, all layers: few models that are worth a tier have less."""


def check_offload(config: Config) -> Iterator[Finding]:
    """One line where the tier is off. Puts one small object into the store, reads it and removes it again."""
    tier = config.offload
    if tier.policy == "off":
        yield Finding("offload", "ok", "off: what leaves the pool is computed again (offload.policy)")
        return
    yield Finding("offload", "ok", f"{tier.policy} to {tier.store} at {tier.mooncake.master}, {tier.mooncake.protocol}")
    yield _codec(tier)
    yield _bandwidth(tier)
    yield _staging(tier, config.engine.chunk_size)
    if tier.mooncake.protocol == "rdma":
        yield _locked_memory(tier)
    yield from mooncake.check(config)


def _codec(tier: OffloadConfig) -> Finding:
    if tier.codec not in LOSSY:
        return Finding("offload codec", "ok", f"{tier.codec}: every bit comes back")
    detail = f"{tier.codec} loses bits: answers after a read from there differ a little, and only instances with it share"
    return Finding("offload codec", "warn", detail, "set offload.codec to raw, unless docs/mooncake.md's errors are fine")


def _bandwidth(tier: OffloadConfig) -> Finding:
    least = tier.least_bandwidth(on_gpu=True)
    if not least:
        return Finding("offload bandwidth", "ok", "no bound: the tier is read, however slow that is (offload.min_bandwidth)")
    detail = (
        f"while less than {least.about}/s of KV comes from there it is computed, but for a try every {tier.retry_max_seconds:g} s"
    )
    if tier.min_bandwidth is None:
        detail = f"for KV caches on a GPU: {detail} (offload.min_bandwidth is not set)"
    return Finding("offload bandwidth", "ok", detail)


def _staging(tier: OffloadConfig, chunk_tokens: int) -> Finding:
    """A chunk's size is the model's; so the largest of which the least number fits."""
    token = ByteSize(tier.staging_bytes // LEAST_CHUNKS // chunk_tokens)
    detail = f"{tier.staging_bytes}: {LEAST_CHUNKS} chunks of {chunk_tokens} tokens of {token.about} each"
    available = host_available()
    if tier.staging_bytes > available:
        advice = f"set offload.staging_bytes to {ByteSize(available // 4).about} or less"
        return Finding("offload staging", "fail", f"{detail}; {ByteSize(available).about} of host memory available", advice)
    if token < SMALL_TOKEN:
        enough = ByteSize(2 * SMALL_TOKEN * chunk_tokens * LEAST_CHUNKS)
        advice = f"set offload.staging_bytes to {enough.about}"
        return Finding("offload staging", "warn", f"{detail}, less than most models have", advice)
    return Finding("offload staging", "ok", detail)


def _locked_memory(tier: OffloadConfig) -> Finding:
    """RDMA registers the staging memory, and that counts against the limit; what CUDA pins does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= tier.staging_bytes:
        return Finding("locked memory", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"limit {ByteSize(soft).about}")
    detail = f"limit {ByteSize(soft).about}, and RDMA must lock offload.staging_bytes, {tier.staging_bytes}"
    bound = "none" if hard == resource.RLIM_INFINITY else ByteSize(hard).about
    advice = f"ulimit -l unlimited (the hard limit: {bound}; docker: --ulimit memlock=-1), or LimitMEMLOCK=infinity in the unit"
    return Finding("locked memory", "fail", detail, advice)
