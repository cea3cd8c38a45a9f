"""Two worker processes, one on each of two GPUs, share KV over NVLink through a real server.

A pytest test, and a script: `python tests/test_cross_gpu_store_retrieve.py` prints what happens and exits with 1 if a byte is wrong.
What happens is `engine_cases.across`, as in the twin on host memory. There, too, is the streams' part: the KV is still being
computed when it is stored and is overwritten right behind it, and what is retrieved is read at once by the next kernels.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from engine_cases import FLASH, MLA, PACKED, PACKED_HND, Arrangement, Sizes, across, report

from vcache_backend.vram_pool import devices

SIZES = Sizes(layers=8, heads=8, dim=128, blocks=320)
COUNT, CHUNK_SIZE = 4096, 256
ARRANGEMENTS = [FLASH, PACKED, PACKED_HND, MLA]


@pytest.mark.gpu(count=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda a: a.name)
def test_two_gpus_share_every_byte_and_a_successor_finds_them(tmp_path: Path, arrangement: Arrangement) -> None:
    for step in across(tmp_path, ("cuda:0", "cuda:1"), arrangement, SIZES, COUNT, CHUNK_SIZE):
        assert step.right, step.text


@pytest.mark.gpu(count=2)
@pytest.mark.timeout(300)
def test_two_processes_that_see_one_gpu_each_share_every_byte(tmp_path: Path) -> None:
    """As two instances with `CUDA_VISIBLE_DEVICES=0` and `=1` do: each calls its own GPU cuda:0, and cannot name the other's."""
    visible = (devices.resolve("cuda:0").name, devices.resolve("cuda:1").name)
    for step in across(tmp_path, ("cuda:0", "cuda:0"), FLASH, SIZES, COUNT, CHUNK_SIZE, visible):
        assert step.right, step.text


def main() -> int:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        print(f"two GPUs are needed, here are {count}; tests/test_cross_process_store_retrieve.py does the same on host memory")
        return 1
    right = True
    for arrangement in ARRANGEMENTS:
        with tempfile.TemporaryDirectory() as folder:
            title = f"{arrangement.name}: {COUNT} tokens, {SIZES.layers} layers, {torch.cuda.get_device_name(0)} and its peer"
            right &= report(title, across(Path(folder), ("cuda:0", "cuda:1"), arrangement, SIZES, COUNT, CHUNK_SIZE))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
