"""Makes vLLM believe that it runs on an H200. Import it before vLLM.

vLLM then chooses backends, block sizes and layouts as there, and can make models without memory
(`torch.device("meta")`), but run nothing. Kernels, and packages that only kernels need, are
replaced by names. Only vLLM's Python code is used; take it from a wheel for CUDA, unpacked and
named in PYTHONPATH, since a build for CPUs lacks parts of some models."""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch._ops
import torch.library
from torch.overrides import TorchFunctionMode

KERNELS = [
    "_C",
    "_C_stable_libtorch",
    "_flashkda_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "_qutlass_C",
    "cumem_allocator",
    "fs_io_C",
    "spinloop",
]
MEMORY = 141 << 30


class _Name(type):
    """A class that stands for anything in a missing package."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return given[0]  # a decorator
        return cls if cls.__mro__[1] is object else super().__call__(*given, **named)

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__


class _Missing(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """Finds the packages `names`, if nothing else does."""

    def __init__(self) -> None:
        self.names = {"cuda", "cutlass", "quack"}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Kernel:
    """An operation that is not here. Asked whether something is supported, it says yes."""

    def __call__(self, *_: object, **__: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _NoMemory(TorchFunctionMode):
    """Puts on no device what a model would put on the GPU."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if _on_gpu(named.get("device")):
            named["device"] = "meta"
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.to and len(args) > 1 and _on_gpu(args[1]):
            args = (args[0], "meta", *args[2:])
        return func(*args, **named)


def _on_gpu(device: object) -> bool:
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, int) or getattr(device, "type", "") == "cuda"


class _Driver:
    """Triton's."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    @property
    def utils(self) -> Any:
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        return types.SimpleNamespace(get_device_properties=lambda _: properties)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


def _torch() -> None:
    """Let torch and Triton find a GPU, and kernels."""
    names = torch._ops._OpNamespace.__getattr__
    fake = torch.library.register_fake
    ours = ("_C", "_moe_C", "_flash", "_vllm", "_rocm")

    def operation(self: Any, name: str) -> Any:
        try:
            return names(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith(ours):
                raise
            return _Kernel()

    def register_fake(name: Any, *given: Any, **named: Any) -> Any:
        if isinstance(name, str) and name.startswith(ours):
            return lambda function: function
        return fake(name, *given, **named)

    torch._ops._OpNamespace.__getattr__ = operation  # type: ignore[assignment]
    torch.library.register_fake = register_fake
    torch.version.cuda = "13.0"
    facts = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        L2_cache_size=60 << 20,
        warp_size=32,
    )
    nothing = type("Nothing", (), {"__init__": lambda self, *_, **__: None})
    for module in (torch.cuda, torch.accelerator):
        module.is_available = lambda: True
        module.device_count = lambda: 1
        module.empty_cache = module.synchronize = lambda *_: None
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    torch.cuda.get_device_name = lambda _=None: facts.name
    torch.cuda.get_device_properties = lambda _=None: facts
    torch.cuda.mem_get_info = torch.accelerator.get_memory_info = lambda *_: (MEMORY, MEMORY)
    torch.cuda.ipc_collect = torch.accelerator.empty_host_cache = lambda: None
    torch.cuda.Event = torch.cuda.Stream = nothing
    import triton
    from triton.backends import backends

    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    triton.runtime.driver.set_active(_Driver())


def _attention() -> None:
    """Give vLLM FlashAttention 3, without its kernels."""
    package = _Missing("vllm.vllm_flash_attn")
    interface = _Missing("vllm.vllm_flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.is_fa_version_supported = lambda version, device=None: version == 3
        module.fa_version_unsupported_reason = lambda version, device=None: (
            None if version == 3 else "it is not here"
        )
        sys.modules[module.__name__] = module
    interface.FA2_AVAILABLE, interface.FA3_AVAILABLE = False, True


def _vllm() -> None:
    """Give vLLM its platform."""
    for name in KERNELS:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    _attention()
    import vllm

    for name in KERNELS:
        setattr(vllm, name, sys.modules[f"vllm.{name}"])
    from vllm import platforms

    # Of a build for CPUs the version's name says so.
    platforms.vllm_version_matches_substr = lambda _: False
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    def has(capability: Any, device_id: int = 0) -> bool:
        return (9, 0) >= capability if isinstance(capability, tuple) else capability <= 90

    answers: dict[str, Any] = {
        "get_device_capability": lambda device_id=0: DeviceCapability(9, 0),
        "has_device_capability": has,
        "get_device_name": lambda device_id=0: "NVIDIA H200",
        "get_device_uuid": lambda device_id=0: "GPU-0",
        "get_device_total_memory": lambda device_id=0: MEMORY,
        "is_fully_connected": lambda devices: True,
        "num_compute_units": lambda device_id=0: 132,
        "device_count": lambda: 1,
        "is_integrated_gpu": lambda device_id=0: False,
        "check_if_supports_dtype": lambda dtype: None,
        "get_cuda_runtime_major": lambda: 13,
        "is_pin_memory_available": lambda: False,
        "get_device_numa_node": lambda device_id=0: None,
        "get_all_device_numa_nodes": lambda: None,
        "set_device": lambda device: None,
    }
    made = {name: staticmethod(answer) for name, answer in answers.items()}
    platforms._current_platform = type("H200", (CudaPlatformBase,), made)()
    from vllm.utils import deep_gemm, import_utils

    import_utils.has_deep_gemm = deep_gemm.has_deep_gemm = lambda: True
    deep_gemm.is_deep_gemm_supported = lambda: True


FINDER = _Finder()
_torch()
sys.meta_path.append(FINDER)
_vllm()
_NoMemory().__enter__()
