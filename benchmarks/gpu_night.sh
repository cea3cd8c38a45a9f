#!/usr/bin/env bash
# How to check on two GPUs: calls of at most nine minutes, the most important first. Rows go to $OUT/*.json as they are measured, the
# output and the logs of instances to one file, $OUT/logs-CALL.tar.xz: a lent machine gives eight files back.
#
#   benchmarks/gpu_night.sh unpack FILE...   what scripts/gpu_pack.sh made: parts of vLLM 0.33 and LMCache 0.5.3 for a host that reaches no package registry
#   benchmarks/gpu_night.sh room GIB         for `serving` with --host-gib: let /dev/shm hold so much, in large pages, and have the machine's
#                                            memory grow by half of it in the background
#   benchmarks/gpu_night.sh later CALL...    begin these calls in the background, one after the other, from a copy of this checkout
#   benchmarks/gpu_night.sh fetch SECONDS    wait at most so long for them; copy what there is to $OUT. STAY=FOLDER before both: calls beside others
#   benchmarks/gpu_night.sh CALL...          one after the other; A+B beside each other
#
#   tests    pytest -m gpu                                                                          3 minutes
#   equal    200 hits each in place, through a pool and through LMCache beside each other, with their control   6 minutes; WAYS=in_place: that alone
#            WAYS=saved: in place, hits out of the pool in host memory                             5 minutes on one GPU
#   speed    in place and through a pool: async_ttft, the scheduler's time, misses                  7 minutes; nothing beside it
#            PARTS=scheduler WAYS=pool: of one alone, 3 minutes; with CUDA_VISIBLE_DEVICES=0 on one GPU
#   prove    vcache prove, in place and through a pool                                              2 minutes on one GPU
#   multi    200 hits each of VCacheMultiConnector beside LMCache's server: in place, and LMCache's   4 minutes on one GPU
#   decode   what a step that only decodes costs, beside vLLM alone                                       4 minutes on one GPU; nothing beside it
#   short    short_tax in place                                                                     4 minutes; nothing beside it
#   tables   in place, hits that end as vLLM's own do, bit for bit, with flipped bytes: Gemma 3, gpt-oss, LFM 2, Granite 4, Qwen3-Next   6 minutes on one GPU
#            TABLES=gdn: Qwen3-Next alone, 2 minutes; TABLES=v4: DeepSeek V4, which wants the parts tile and cutlass
#   groups   in place: async_ttft of the shapes of gpt-oss and Gemma 3, with CUDA graphs            7 minutes; nothing beside it
#            TIMED=ttft,ttft_gpt_oss: of Llama's and gpt-oss's; on four GPUs, tensor parallel 2: TIMED=tp2_gpt_oss,ttft_tp2_gpt_oss
#   models   through a pool: Gemma 3, gpt-oss, LFM 2; fp8, MLA, n-gram, tensor parallel 2, the first three in place, too   7 minutes
#   which    how each text generation model of vLLM's registry is cached (docs/vllm/models.md); beside anything   6 minutes
#   copies   copies, engine, metadata server                                                        2 minutes
#   serving  two servers, vLLM alone, in place and with a pool, in turn: WORKLOADS=..., RUNS=0,1,2  7 minutes
#            one server, on one GPU: GPUS=0, with CUDA_VISIBLE_DEVICES=0
#   routed   two servers, vLLM alone and in place, in turn and behind vllm-router: ARMS=..., WORKLOADS=...   8 minutes; nothing beside it
#   ranks    one server of two data parallel ranks, alone and in place, chat: WORKLOADS=...         8 minutes; nothing beside it
#            of gpt-oss: MORE="--model gpt_oss_20b"
#   pd       prefill and decode apart, vcache beside NIXL and beside two servers that do both: ARMS=..., FLIGHTS="1 8 16 32", TOKENS="8 32" in
#            thousands, ANSWER=128 or 512, REPEATS=6 for shared prefixes, REQUESTS=40   4 minutes an arm with two flights and 8k; nothing beside it
#            on one GPU: GPUS=0,0 MORE="--memory 0.6"; up to four arms in turn: MORE="--together --memory 0.22"
#            on four GPUs, of which three compute prompts: GPUS=0,1,2,3 MORE="--prefills 3"
#   soak     whole vLLMs paused, stopped and killed, with controls: LEVELS="death death_pool"   7 minutes; without a GPU: LEVELS="planned hits"
#
# `serving`, `routed` and `ranks` keep their rows for the next call on the same machine: two calls may measure one system each
# (ARMS=alone:turn,alone:cache_aware16, then ARMS=inplace:turn,inplace:cache_aware16), and the second one compares. NAME: of the file
# with the rows. The router's wheel is unpacked like the other parts.
#
# A server answers after 30 to 60 s on H100s, 55 and 67 s for four data parallel ranks; on H200s after 65 to 95 s. A machine starts, with what
# is unpacked, in 50 s; a failed start costs 180 s.
#
# Within 30 minutes of device time: `unpack` in three calls, the last with `later tests` behind it (before, tests that want vLLM are skipped);
# `equal`; `speed`; `short models`.
# SECONDS_IN_ALL (560): when everything must be over; behind `later` it may be more than a call may last. GPUS=0,1,2,3: `serving`, `routed` and `ranks` on four GPUs, which CUDA_VISIBLE_DEVICES
# must name, too; MORE: options for them. With CUDA_VISIBLE_DEVICES=0 all instances share one GPU: equality counts, times do not. TINY=1 runs
# the script on the CPU, to check it.
set -uo pipefail
cd "$(dirname "$0")/.."
stay=${STAY:-/tmp/vcache-stay} site=${SITE:-/tmp/site}
case ${1:?"see the top of $0"} in
  unpack)
    shift; mkdir -p "$site" "$stay/parts"
    for file in "$@"; do
      case $file in
        *.whl) python3 -m zipfile -e "$file" "$site" & ;;
        *.xz) tar xJf "$file" -C "$site" & ;;
        *) cp "$file" "$stay/parts/" ;;  # A piece of a file that is too large for one call: NAME.tar.xz.0, NAME.tar.xz.1
      esac
    done
    # What every process imports is read from the disk, and compiled, once, while the other parts come.
    setsid nohup python3 -c 'import torch, transformers, triton, numpy' > /dev/null 2>&1 < /dev/null &
    wait $(jobs -p | head -n -1)
    for first in "$stay"/parts/*.0; do
      [ -f "$first" ] && [ -f "${first%.0}.1" ] && cat "$first" "${first%.0}.1" | tar xJ -C "$site" && rm "$first" "${first%.0}.1"
    done
    setsid nohup python3 -m compileall -q -j 8 "$site" > /dev/null 2>&1 < /dev/null &
    PYTHONPATH=$site setsid nohup python3 -c 'import vllm.entrypoints.openai.api_server' > /dev/null 2>&1 < /dev/null &
    echo "== unpacked; in $site/vllm: $(cd "$site/vllm" 2> /dev/null && echo *.so vllm_flash_attn/*.so)"
    exit ;;
  room)
    rm -f /dev/shm/lmcache_l1_pool_*
    mount -o "remount,size=$2g,huge=within_size" /dev/shm || mount -o "remount,size=$2g" /dev/shm
    # A machine has 31 GiB at first and gets more as it is used, 8 GiB in 3 s.
    setsid nohup python3 -c "import numpy; kept = [numpy.ones(1 << 30, numpy.uint8) for _ in range($2 // 2)]" > /dev/null 2>&1 < /dev/null &
    echo "== room: $(df -h --output=size,avail /dev/shm | tail -n 1)"
    exit ;;
  later)
    [ ! -d "$stay/out" ] || [ -f "$stay/out/over.txt" ] || { echo "== later: what began before is not over"; exit 2; }
    shift; rm -rf "$stay/out" "$stay/tree"; mkdir -p "$stay/out"
    cp -r . "$stay/tree" && cd "$stay/tree" || exit 2
    OUT=$stay/out setsid nohup bash -c 'benchmarks/gpu_night.sh "$@"; echo "rc $?" > "$OUT/over.txt"' later "$@" > "$stay/out/later.txt" 2>&1 < /dev/null &
    exit ;;
  fetch)
    for ((i = 0; i < $2; i++)); do [ ! -f "$stay/out/over.txt" ] || break; sleep 1; done
    cp -r "$stay/out/." "${OUT:?}"; tail -n 20 "$stay/out/later.txt"; cat "$stay/out/over.txt" 2> /dev/null || echo '== not over'
    exit ;;
esac
out=${OUT:-/tmp/vcache-gpu} logs=$(mktemp -d /tmp/vcache-gpu-logs.XXXX) until=$((SECONDS + ${SECONDS_IN_ALL:-560}))
mkdir -p "$out" "$logs"
if [ -z "${TINY:-}" ]; then
  # What an installation would do: the two folders are one package, and vLLM finds our plugin.
  mkdir -p "$site/vcache_backend-0.1.0.dist-info"
  [ -e vcache_backend/integration ] || ln -s ../integration vcache_backend/integration
  printf 'Metadata-Version: 2.1\nName: vcache-backend\nVersion: 0.1.0\n' > "$site/vcache_backend-0.1.0.dist-info/METADATA"
  printf '[vllm.general_plugins]\nvcache = vcache_backend.integration.plugin:register\n' > "$site/vcache_backend-0.1.0.dist-info/entry_points.txt"
  export PYTHONPATH=$PWD:$site
  # What DeepSeek V4 alone needs: other versions of some packages, and those that vLLM uses in all models that find them.
  [[ ${TABLES:-} != *v4* ]] || export PYTHONPATH=$site/v4:$site/v4/nvidia_cutlass_dsl/dsl_packages:$PYTHONPATH
fi
# DeepGEMM compiles a kernel for each number of tokens.
export VLLM_USE_DEEP_GEMM=0
# Servers fork their engines, which then import nothing again. vLLM spawns them where it must. With this, and what `unpack` compiles,
# four servers answered after 32 and 57 s; before, after 146 and 105 s.
export VLLM_WORKER_MULTIPROC_METHOD=${VLLM_WORKER_MULTIPROC_METHOD:-fork}
export PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}
python=${PYTHON:-python3}

# What is missing is found now, in seconds, not by the first instance that does not start.
"$python" - "$*" "${TINY:-}" "${ARMS:-}" << 'END' || { echo "== $*: cannot run here"; exit 2; }
import importlib, importlib.metadata, re, sys
import torch
calls, tiny, arms = sys.argv[1:]
names = ["msgspec", "vcache_backend.engine"]
if calls not in ("tests", "copies"):
    names += ["vllm", "vllm.v1.engine.core", "vcache_backend.integration.vllm_connector"]
if not tiny and "vllm" in names:
    names += ["vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C"]
names += ["lmcache"] if re.search("equal|multi", calls) or re.search(r"lmcache|both(_pool)?:", arms) else []
names += ["nixl"] if not tiny and ("nixl" in arms or ("pd" in calls and not arms)) else []
names += ["vllm_router.launch_router", "vllm_router_rs"] if "routed" in calls or re.search("aware|power", arms) else []
problems = []
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        problems.append(f"{name}: {type(error).__name__}: {error}")
if "vcache" not in [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]:
    problems.append("vLLM would not find our plugin")
if not tiny and torch.cuda.device_count() < 2:
    print(f"only {torch.cuda.device_count()} GPUs")
sys.exit("\n".join(problems) or 0)
END

# bench NAME SECONDS MODULE [OPTION...]: rows go to $out/NAME.json; it is over after SECONDS, or when everything must be.
bench() {
  local name=$1 seconds=$2 module=$3; shift 3
  [ "$seconds" -lt $((until - SECONDS)) ] || seconds=$((until - SECONDS))
  echo "== $name: $module $*, $seconds s"
  timeout -k 5 $((until - SECONDS + 25)) "$python" -m "benchmarks.$module" --out "$out/$name.json" --commit "${COMMIT:-}" --seconds "$seconds" "$@" > "$logs/$name.txt" 2>&1
  local rc=$?
  echo "== $name: rc $rc"; grep -E "ratio|FAILED|failed:|wrong" "$logs/$name.txt" | cut -c1-200 | tail -n 30
  [ "$rc" = 0 ] || tail -n 12 "$logs/$name.txt" | cut -c1-300
}
# ttft NAME SECONDS PARTS [OPTION...]: of benchmarks.vllm_ttft.
ttft() {
  local name=$1 seconds=$2 parts=$3; shift 3
  bench "$name" "$seconds" vllm_ttft --only "$parts" --logs "$logs/$name" "$@" ${TINY:+--scale tiny --rounds 1}
}
pool=(--integration vllm --pool-gib "${POOL_GIB:-8}") in_place=(--integration inplace)

tests() {
  timeout $((until - SECONDS)) "$python" -m pytest -q -m gpu -n "${TEST_PROCESSES:-6}" --dist loadfile -p no:cacheprovider -p no:benchmark tests > "$out/tests.txt" 2>&1
  echo "== tests: rc $?"; tail -n 15 "$out/tests.txt"
}
prove() {
  for way in in_place pool; do
    timeout $((until - SECONDS)) "$python" -m vcache_backend prove --share "$way" --seconds 20 --json > "$out/prove_$way.json" 2> "$logs/prove_$way.txt"
    echo "== prove $way: rc $?"; tail -n 3 "$logs/prove_$way.txt"
  done
}
multi() {
  ttft multi_both 400 agreeing,sensitive,flipped,equal --integration both --scale beside &
  ttft multi_behind 400 agreeing,sensitive,equal --integration behind --scale beside &
  wait
}
equal() {
  local parts=agreeing,sensitive,equal ways=${WAYS:-in_place pool lmcache}
  [[ $ways != *in_place* ]] || ttft equal_in_place 500 agreeing,sensitive,flipped,equal "${in_place[@]}" --scale beside &
  [[ $ways != *pool* ]] || ttft equal_pool 500 $parts --integration vllm --scale beside &
  [[ $ways != *saved* ]] || ttft equal_saved 500 $parts --integration saved --scale beside &
  [[ $ways != *lmcache* ]] || ttft equal_lmcache 500 $parts --integration lmcache --scale beside &
  wait
}
speed() {
  local parts=${PARTS:-ttft,scheduler,miss} ways=${WAYS:-in_place pool}
  [[ $ways != *in_place* ]] || ttft speed_in_place 270 "$parts" "${in_place[@]}" --kv-gib 6 --rounds 7
  [[ $ways != *pool* ]] || ttft speed_pool 250 "$parts" "${pool[@]}" --kv-gib 6 --rounds 7
}
decode() { ttft decode 300 decode "${in_place[@]}" --kv-gib 6 --rounds 5; }
short() { ttft short 300 short "${in_place[@]}" --kv-gib 6; }
models() {
  ttft models 550 gemma3,gpt_oss,lfm2 --integration vllm --pool-gib 4 --rounds 3 &
  ttft modes 550 fp8,mla,ngram,tp2 --integration vllm --scale beside --rounds 3 &
  ttft modes_in_place 550 fp8,mla,ngram "${in_place[@]}" --scale beside --rounds 3 &
  wait
}
tables() {
  local each
  for each in ${TABLES:-gemma3,gpt_oss conv,mamba2,gdn}; do ttft "tables_${each//,/_}" 500 "$each" "${in_place[@]}" --scale beside & done
  wait
}
groups() { ttft groups 420 "${TIMED:-ttft_gpt_oss,ttft_gemma3}" "${in_place[@]}" --kv-gib 6 --rounds 9; }
which() { timeout $((until - SECONDS)) "$python" scripts/which_models.py run "$out/which_models.json" > "$logs/which.txt" 2>&1; echo "== which: rc $?"; }
copies() { "$python" -m benchmarks --out "$out/copies.json" --commit "${COMMIT:-}" 2>&1 | tail -n 60; }
soak() {
  local levels=${LEVELS:-death death_pool} level
  for level in $levels; do
    PYTHONPATH=tests:tests/support:${PYTHONPATH:-} timeout $((until - SECONDS)) "$python" -m soak --level "$level" --seconds "${SOAK_SECONDS:-180}" > "$out/soak-$level.txt" 2>&1 &
  done
  wait; for level in $levels; do tail -n 1 "$out/soak-$level.txt"; done
}
# served NAME ARMS WORKLOADS [OPTION...]: rows of earlier calls on this machine are continued. Sizes are for 80 GiB a GPU and a short time.
served() {
  local name=${NAME:-$1} arms=$2 workloads=$3; shift 3
  mkdir -p "$stay"; [ ! -f "$stay/$name.json" ] || cp "$stay/$name.json" "$out/"
  [ -n "${TINY:-}" ] || set -- --memory 0.8 --prefixes 48 --fork-contexts 4 --chat-conversations 80 --chat-turns 6 --chat-arrivals 8 --chat-thinking 2 "$@"
  bench "$name" "$((until - SECONDS))" vllm_serving --arms "$arms" --workloads "$workloads" --runs "${RUNS:-0}" --logs "$logs/$name" ${GPUS:+--gpus "$GPUS"} ${TINY:+--scale tiny} "$@" ${MORE:-}
  [ ! -f "$out/$name.json" ] || cp "$out/$name.json" "$stay/"
}
serving() { served serving "${ARMS:-alone:turn,inplace:turn,pool:turn}" "${WORKLOADS:-prefix}"; }
routed() { served routed "${ARMS:-alone:turn,alone:cache_aware16,inplace:turn,inplace:cache_aware16}" "${WORKLOADS:-fork,prefix,chat}"; }
pd() {
  local many tokens workloads= repeats=${REPEATS:-1}
  for tokens in ${TOKENS:-8}; do
    for many in ${FLIGHTS:-1 8}; do workloads+=${workloads:+,}prefix_${tokens}k_$many; done
  done
  [ -n "${TINY:-}" ] || set -- --suffix 258 --output "${ANSWER:-128}"
  served pd "${ARMS:-pd_vcache:turn,pd_nixl_pull_64:turn}" "$workloads" --repeats "$repeats" --prefixes $((${REQUESTS:-40} / repeats)) "$@"
}
ranks() { served ranks "${ARMS:-alone_dp:turn,inplace_dp:turn}" "${WORKLOADS:-chat,prefix}"; }

for beside in "$@"; do
  for call in ${beside//+/ }; do
    [[ " tests equal multi speed prove decode short tables groups models which copies serving routed ranks pd soak " == *" $call "* ]] || { echo "no call $call: see the top of $0"; continue; }
    "$call" &
  done
  wait
done
calls=$*
tar cJf "$out/logs-${calls//[ +]/-}.tar.xz" -C "$logs" . 2> /dev/null
echo "== $*: $SECONDS s; in $out: $(ls "$out" | tr '\n' ' ')"
