"""Whether each supported release of vLLM makes its KV cache as `exportable` expects, where only a
GPU would show it: read in its source archive.

Fetches the archives from the package index, keeps the files that are looked at in .venv/outside,
and imports nothing of them."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from run import PLACE, download

from vcache_backend.integration.vllm.shapes import FILES, differences
from vcache_backend.supported import VLLM


def fetch(version: str) -> Path:
    """The folder of the package's sources."""
    name = f"vllm-{version}"
    folder = PLACE / f"{name}-sources"
    if not folder.is_dir():
        print(f"outside: fetching the source archive of vllm {version}", file=sys.stderr)
        archive, partial = download("vllm", version), PLACE / f".{name}-sources"
        wanted = {f"{name}/vllm/{path}" for path in FILES}
        with tarfile.open(archive) as tar:
            members = [member for member in tar.getmembers() if member.name in wanted]
            tar.extractall(partial, members, filter="data")
        archive.unlink()
        partial.rename(folder)
    return folder / name / "vllm"


def main() -> int:
    wrong = 0
    for minor in range(VLLM.low[1], VLLM.high[1]):
        version = f"0.{minor}.0"
        found = list(differences(fetch(version)))
        print(f"vllm {version}: {'; '.join(found) or 'as expected'}")
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
