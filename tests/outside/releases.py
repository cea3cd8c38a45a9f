"""Whether each supported release of vLLM makes its KV cache as `exportable` expects, where only a
GPU would show it: read in its source archive.

Fetches the archives from the package index, keeps the files that are looked at in .venv/outside,
and imports nothing of them."""

from __future__ import annotations

import sys

from run import PLACE, fetch

from vcache_backend.integration.vllm.shapes import FILES, differences
from vcache_backend.supported import VLLM


def main() -> int:
    wrong = 0
    for minor in range(VLLM.low[1], VLLM.high[1]):
        version = f"0.{minor}.0"
        wanted = {f"vllm/{path}" for path in FILES}
        sources = fetch(version, wanted.__contains__, PLACE / f"vllm-{version}-sources")
        found = list(differences(sources / "vllm"))
        print(f"vllm {version}: {'; '.join(found) or 'as expected'}")
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
