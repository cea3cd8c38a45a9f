#!/usr/bin/env bash
# Pack vLLM 0.33.0 and LMCache 0.5.3 for a GPU host that reaches no package registry.
#
# The host brings Python 3.12, torch 2.11.0+cu130, triton 3.6.0, transformers 5.17 and cuda-bindings/cuda-core 13; the parts bring the
# rest, trimmed to what Hopper needs (FlashAttention 3 alone). All undefined torch symbols of these libraries are in torch 2.11.0's
# (LMCache 0.5.6's are not). vLLM's own pin is torch 2.14; compiled and in place it ran beside 2.11 (2026-11-24).
#
#   scripts/gpu_pack.sh OUT_DIR     some 340 MiB in seven folders of OUT_DIR, each for one call, which carries 64 MiB with the checkout;
#                                   8 minutes of CPU time and as much of network, 2 GB of scratch in PACK_WORK
#     1, 2, 3   what all runs want: deps (LMCache with its CUDA kernels, msgspec, pyzmq, ...), c in two pieces (vLLM's CUDA extension),
#               fa3 (FlashAttention 3), moe (kernels of mixtures of experts, FlashMLA), vllm (its Python code), gemm (DeepGEMM, for the indexer
#               of DeepSeek V3.2 and V4 alone)
#     4, 5      for DeepSeek V4 alone, which compiles its kernels on the host: cutlass in two pieces (CuTe DSL) and tile (TileLang), in a
#               folder v4
#     6         what benchmarks put before vLLM or beside us: the router's wheel, nixl (NIXL 1.5.1 with UCX alone)
#     7         the engine of Mooncake's wheel, with this host's libraries that it wants, for the arm pd_mooncake
#
# For each: rm -rf .gpu && cp -rL OUT_DIR/1 .gpu; carry .gpu; on the host benchmarks/gpu_night.sh unpack .gpu/*
# That puts it into /tmp/site; then PYTHONPATH=/tmp/site.
set -euo pipefail
list=$(cd "$(dirname "$0")/.." && pwd)/requirements/gpu-host.txt  # what the host lacks
out=$(mkdir -p "${1:?usage: pack.sh OUT_DIR}" && cd "$1" && pwd)
work=${PACK_WORK:-${TMPDIR:-/tmp}/pack-gpu-host-33}
mkdir -p "$work/wheels"
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for tag in 2_39 2_35 2_34 2_31 2_28 2_27 2_17 2_5; do target+=(--platform "manylinux_${tag}_x86_64"); done
for tag in 2014 2010 1; do target+=(--platform "manylinux${tag}_x86_64"); done

[ -d "$work/deps" ] || {
  python3 -m pip install -q --no-compile "${target[@]}" --target "$work/deps.tmp" \
    -r "$list" msgpack==1.1.2 orjson lmcache==0.5.3
  rm -rf "$work/deps.tmp/mistral_common/data" "$work"/deps.tmp/pycountry* "$work/deps.tmp/supervisor" "$work"/deps.tmp/lmcache/lmcache_redis*.so
  find "$work/deps.tmp" -name '*.pyi' -delete
  mv "$work/deps.tmp" "$work/deps"
}
[ -d "$work/vllm" ] || {
  python3 -m pip download -q "${target[@]}" -d "$work/wheels" vllm==0.33.0
  python3 -m zipfile -e "$work"/wheels/vllm-0.33.0-*.whl "$work/vllm.tmp"
  cd "$work/vllm.tmp/vllm"
  rm -rf vllm-rs third_party/fmha_sm100 _qutlass_C.abi3.so _flashkda_C.abi3.so _deepselect_C.abi3.so \
    vllm_flash_attn/_vllm_fa2_C.abi3.so
  mkdir -p "$work"/{c,moe}/vllm "$work/gemm/vllm/third_party" "$work/fa3/vllm/vllm_flash_attn"
  mv third_party/deep_gemm "$work/gemm/vllm/third_party/"
  # V3.2's module of a Blackwell kernel wants cutlass (92 MB) to be imported. Elsewhere vLLM asks it only whether it applies.
  printf 'fused_q_cutedsl = None\n\n\ndef is_fused_q_cutedsl_supported(*tensors, **flags):\n    return False\n' \
    > models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py
  (cd .. && cp --parents vllm/models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py "$work/gemm/")
  # The host's NCCL is older than 2.29.7: vLLM asks whether it can be suspended before it does so, but not when it loads the library.
  sed -i 's/elif func.name == "ncclGetLastError":/elif func.name in ("ncclGetLastError", "ncclCommSuspend", "ncclCommResume"):/' \
    distributed/device_communicators/pynccl_wrapper.py
  mv _C_stable_libtorch.abi3.so "$work/c/vllm/"
  mv _moe_C_stable_libtorch.abi3.so _flashmla_C.abi3.so "$work/moe/vllm/"
  mv vllm_flash_attn/_vllm_fa3_C.abi3.so "$work/fa3/vllm/vllm_flash_attn/"
  find . -name '*.pyi' -delete
  mv "$work/vllm.tmp" "$work/vllm"
}
[ -d "$work/nixl" ] || {
  python3 -m pip download -q "${target[@]}" -d "$work/wheels" nixl==1.5.1 nixl-cu13==1.5.1
  for wheel in "$work"/wheels/nixl*.whl; do python3 -m zipfile -e "$wheel" "$work/nixl.tmp"; done
  cd "$work/nixl.tmp"
  # libnixl finds the plugins beside it, in .nixl_cu13.mesonpy.libs, and UCX its own in nixl_cu13.libs/ucx.
  rm -rf nixl_cu13-*.data nixl_cu13.scripts nixl_ep nixl_ep_cu13 nixl_cu13.libs/{nixl,ucx/libucx_perftest*,ucx/*.la}
  rm -f nixl_cu13.libs/lib{aws,azure,s2n,curl,xml2,gusli,aio,numa,uring,core,pull,zstd}[-_c]*
  find .nixl_cu13.mesonpy.libs/plugins -type f ! -name libplugin_UCX.so -delete
  cd "$work" && mv nixl.tmp nixl
}
[ -d "$work/mooncake" ] || {
  python3 -m pip download -q "${target[@]}" -d "$work/wheels" mooncake-transfer-engine==0.3.13.post1 nvidia-cuda-runtime-cu12
  for wheel in mooncake_transfer_engine nvidia_cuda_runtime; do python3 -m zipfile -e "$work/wheels/$wheel"*.whl "$work/mooncake.whole"; done
  new=$work/mooncake.tmp libs=$work/mooncake.tmp/mooncake_transfer_engine.libs
  mkdir -p "$new/mooncake" && touch "$new/mooncake/__init__.py"
  (cd "$work/mooncake.whole" && cp mooncake/{engine,libasio,libetcd_wrapper}.so "$new/mooncake/" && cp -r mooncake_transfer_engine* "$new/")
  cp "$work/mooncake.whole/nvidia/cuda_runtime/lib/libcudart.so.12" "$libs/"
  # What the loader finds in the system: apt install ibverbs-providers libcurl4 libnuma1.
  ldd "$new/mooncake/engine.so" | awk '$3 ~ "^/(usr/)?lib" && $1 !~ /^lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+)\.so/ {print $3}' \
    | xargs -I{} cp -L {} "$libs/"
  mv "$new" "$work/mooncake"
}
[ -d "$work/tile" ] || {
  rm -rf "$work/v4" && mkdir -p "$work/v4/wheels"
  python3 -m pip download -q "${target[@]}" -d "$work/v4/wheels" tilelang==0.1.12 apache-tvm-ffi==0.1.11 'z3-solver<4.15.5' torch-c-dlpack-ext quack-kernels==0.6.5 \
    nvidia-cutlass-dsl==4.8.0 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.0
  mkdir -p "$work"/{tile.tmp,cutlass}/v4
  for wheel in "$work"/v4/wheels/nvidia*.whl; do python3 -m zipfile -e "$wheel" "$work/cutlass/v4"; done
  for wheel in "$work"/v4/wheels/[!n]*.whl; do python3 -m zipfile -e "$wheel" "$work/tile.tmp/v4"; done
  rm -rf "$work"/tile.tmp/v4/{tilelang/3rdparty/composable_kernel,z3/include,z3_solver*.data,tvm_ffi/3rdparty/libbacktrace} "$work"/cutlass/v4/nvidia_cutlass_dsl/dsl_packages/iket/profiler/*.so
  ln -sf libz3.so.4.15 "$work/tile.tmp/v4/z3/lib/libz3.so"  # the same file twice
  mv "$work/tile.tmp" "$work/tile"
}
for part in deps fa3 c moe gemm nixl vllm mooncake tile cutlass; do
  [ -f "$work/$part.tar.xz" ] || { tar cf - -C "$work/$part" . | xz -T1 -3 > "$work/$part.tmp"; mv "$work/$part.tmp" "$work/$part.tar.xz"; }
done
mkdir -p "$out"/{1,2,3,4,5,6,7} && cd "$work"
# halves PART MIB ONE OTHER: its first so many MiB to a folder, the rest to another.
halves() { head -c "$2M" "$1.tar.xz" > "$out/$3/$1.tar.xz.0" && tail -c "+$(($2 * 1048576 + 1))" "$1.tar.xz" > "$out/$4/$1.tar.xz.1"; }
halves c 20 1 2
halves cutlass 54 5 4
cp deps.tar.xz "$out/1/"
cp fa3.tar.xz "$out/2/"
cp moe.tar.xz vllm.tar.xz gemm.tar.xz "$out/3/"
cp tile.tar.xz "$out/4/"
cp nixl.tar.xz "$out/6/"
python3 -m pip download -q "${target[@]}" -d "$out/6" vllm-router==0.1.17
cp mooncake.tar.xz "$out/7/"
du -sm "$out"/*
[ "$(du -sm "$out"/* | sort -n | tail -n 1 | cut -f 1)" -le 58 ] || { echo "a folder has more than a call carries" >&2; exit 1; }
