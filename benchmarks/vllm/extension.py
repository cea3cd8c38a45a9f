"""What vLLM's workers of a server learn by `--worker-extension-cls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

from .weights import scale_weights


class Extension:
    """Methods of every worker, for `/collective_rpc`."""

    model_runner: Any

    def scale_weights(self) -> int:
        """See the function of this name."""
        return scale_weights(self.model_runner.get_model())


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """The tensors of all ranks, which differ in their first dimension, one after the other."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(
    self: Any, input_: Any, dim: int = -1, sizes: Sequence[int] | None = None
) -> Any:
    """This rank's part of the sum of all ranks' tensors."""
    import torch

    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.contiguous().clone()
    torch.distributed.all_reduce(summed, group=self.device_group)
    return summed.split(list(sizes))[self.rank_in_group].contiguous()


def _local(apply: Any) -> Any:
    """Experts that compute those of this rank alone, given all ranks' tokens."""

    def applied(self: Any, *given: Any, **named: Any) -> Any:
        if (here := named.get("expert_map")) is not None:
            chosen = here[named["topk_ids"].long()]
            named["topk_ids"] = chosen.clamp(min=0).to(named["topk_ids"].dtype)
            named["topk_weights"] = named["topk_weights"].masked_fill(chosen < 0, 0)
        return apply(self, *given, **named)

    return applied


if current_platform.is_cpu():
    # vLLM has expert parallel ranks on CPUs but for these three.
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CPUUnquantizedExperts.apply = _local(CPUUnquantizedExperts.apply)
else:
    # vLLM 0.33 disables its NCCL communicator without these two, which put one to sleep, and says
    # nothing. torch 2.11 of the GPU hosts brings an older NCCL. Expert ranks need the rest of it.
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    NCCLLibrary.exported_functions = [
        function
        for function in NCCLLibrary.exported_functions
        if function.name not in ("ncclCommSuspend", "ncclCommResume")
    ]
