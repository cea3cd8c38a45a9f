"""The names of devices, and how much host memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import GPU0, GPU1, UUIDS, FakeCuda, cuda

from vcache_backend.errors import ConfigError
from vcache_backend.vram_pool import devices

__all__ = ["cuda"]
GIB = 1 << 30


def test_a_gpu_is_named_by_its_uuid_however_it_is_asked_for(cuda: FakeCuda) -> None:
    assert devices.resolve("auto") == devices.resolve("cuda") == devices.resolve("cuda:0") == GPU0
    assert devices.resolve("cuda:1") == devices.resolve(UUIDS[1]) == GPU1
    assert devices.resolve("GPU-" + UUIDS[1][4:].upper()) == GPU1
    assert str(GPU1) == "GPU-00000000-0000-0000-0000-00000000abc1 (cuda:1)"


@pytest.mark.parametrize("spec", ["", "host:a/b", "cuda:-1", "GPU-123"])
def test_an_unknown_device_is_a_configuration_error_that_lists_the_forms(spec: str) -> None:
    forms = "auto, host, host:NAME .*, cuda, cuda:N or a GPU's UUID"
    with pytest.raises(ConfigError, match=rf"pool\.device: .*expected {forms}"):
        devices.resolve(spec)


@pytest.mark.parametrize(
    ("limit", "cache", "left"),
    [("max", 0, 64 * GIB), (8 * GIB, 0, GIB), (8 * GIB, 3 * GIB, 4 * GIB)],
)
def test_a_cgroup_has_what_its_limit_leaves_and_what_it_gives_back_of_files(
    tmp_path: Path, limit: object, cache: int, left: int
) -> None:
    """A service's cgroup lies below the root, whose file cache is the weights that it has read."""
    group = tmp_path / "sys/fs/cgroup/system.slice/vllm.service"
    files = {
        tmp_path / "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB >> 10} kB\n",
        tmp_path / "proc/self/cgroup": "4:memory:/\n0::/system.slice/vllm.service/worker\n",
        group / "memory.max": f"{limit}\n",
        group / "memory.current": f"{7 * GIB}\n",
        group / "memory.stat": f"file {cache + GIB}\ninactive_file {cache}\nactive_file 0\n",
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert devices.host_available(tmp_path) == left
