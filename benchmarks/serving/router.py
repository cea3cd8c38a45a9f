"""How requests come to the servers: in turn, or through vLLM's router."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vcache_backend.children import Program, module

from ..processes import HOST, free_ports
from .servers import Servers, healthy
from .systems import SYSTEMS

POLICIES = "turn", "cache_aware", "power_of_two"


class Arm(NamedTuple):
    """A system, and the policy that distributes its requests. threshold: of `cache_aware`, which
    sends a request to the server with its prefix, unless that has so many requests more than the
    other one, and 1.1 times as many. `power_of_two` asks two servers, and looks at that alone."""

    system: str
    policy: str
    threshold: int

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Of SYSTEM:POLICY, such as inplace:turn or alone:cache_aware16. Raises ValueError."""
        system, _, policy = text.partition(":")
        match = re.fullmatch(r"(\D+?)(\d*)", policy or "turn")
        if system not in SYSTEMS or match is None or match[1] not in POLICIES:
            raise ValueError(f"no arm {text}; {', '.join(SYSTEMS)} : {', '.join(POLICIES)}")
        if (SYSTEMS[system].ranks or SYSTEMS[system].apart) and match[1] != "turn":
            raise ValueError(f"no arm {text}: nothing is distributed among equal servers")
        return cls(system, match[1], int(match[2] or 64))

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.system}_{self.policy}" + f"{self.threshold}" * (self.policy == "cache_aware")

    @property
    def said(self) -> str:
        """The policy in words."""
        if SYSTEMS[self.system].ranks:
            return "vLLM's own balancer"
        if self.policy == "turn":
            return "requests in turn"
        said = f"vllm-router {importlib.metadata.version('vllm-router')} {self.policy}"
        return said + f", threshold {self.threshold}" * (self.policy == "cache_aware")


@contextmanager
def way(arm: Arm, servers: Servers, folder: Path) -> Iterator[list[int]]:
    """The ports that get an arm's requests in turn: the servers', or that of a router, which knows
    nothing yet. Raises ChildFailed."""
    if arm.policy == "turn":
        yield servers.ports
        return
    port, metrics = free_ports(2)
    urls = [f"http://{HOST}:{each}" for each in servers.ports]
    arguments = ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    arguments += ["--policy", arm.policy, "--worker-urls", *urls]
    arguments += ["--balance-abs-threshold", str(arm.threshold)]
    arguments += ["--balance-rel-threshold", "1.1"]
    log = folder / f"router_{arm.name}.log"
    command = module("vllm_router.launch_router", *arguments)
    with Program(f"router {arm.name}", command, log) as router:
        router.until(partial(healthy, port), 40.0)
        yield [port]
