"""Two real worker processes on host memory share KV through a real server: the twin of `test_cross_gpu_store_retrieve.py`.

A pytest test, and a script: `python tests/test_cross_process_store_retrieve.py` prints what happens and exits with 1 if a byte is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from engine_cases import FLASH, MLA, Arrangement, Sizes, across, report

SIZES = Sizes(layers=4, heads=2, dim=64, blocks=96)
COUNT, CHUNK_SIZE = 1024, 256
ARRANGEMENTS = [FLASH, MLA]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda a: a.name)
def test_two_processes_share_every_byte_and_a_successor_finds_them(tmp_path: Path, arrangement: Arrangement) -> None:
    for step in across(tmp_path, ("host:a", "host:b"), arrangement, SIZES, COUNT, CHUNK_SIZE):
        assert step.right, step.text


def main() -> int:
    right = True
    for arrangement in ARRANGEMENTS:
        with tempfile.TemporaryDirectory() as folder:
            title = f"{arrangement.name}: {COUNT} tokens, {SIZES.layers} layers, host memory"
            right &= report(title, across(Path(folder), ("host:a", "host:b"), arrangement, SIZES, COUNT, CHUNK_SIZE))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
