#!/usr/bin/env bash
# How to check on GPUs: everything that needs two of them, in calls of at most nine minutes, the most important first.
#
#   shared/gpu/pack.sh DIR                        once: vLLM 0.26 and LMCache 0.5.3 for a host that reaches no package registry
#   benchmarks/gpu_night.sh CALL [PART.tar.xz...]  on that host, in the checkout, one call after the other:
#     pool      copies, engine, metadata server, the GPU tests            needs deps.tar.xz
#     speed     our connector: scheduler, a refused one, TTFT, prefill apart, decoding   needs vllm.tar.xz and vllm_c.tar.xz too
#     equal     200 hits through each integration beside each other, a flipped byte, a restart; compiled, with their control
#     kinds     failures, eager, TP=2 (both integrations); fp8, MLA, ngram
#     groups    models of several block tables, shapes of Gemma 3 and gpt-oss: equal, sensitive, TTFT; gpt-oss needs the part of MOE=1, too
#     states    models whose layers keep states: Granite 4 (Mamba-2; with CUDA graphs, too), LFM 2 (short convolutions), Qwen3-Next (gated
#               delta nets; its kernels of experts): equal, sensitive, TTFT. vLLM lies where SITE says; ours of 0.33 beside
#               torch 2.11, unpacked apart:
#                 SITE=/tmp/site33 benchmarks/gpu_night.sh states vllm33.tar.xz c33.tar.xz m33.tar.xz deps.tar.xz
#               (deps.tar.xz is that of 0.26; without FlashInfer, FlashAttention 2 and quack, which it does not need.)
#     lmcache   TTFT, decoding, misses through LMCache; misses through our connector
#     inplace   our connector without a pool, hits out of vLLM's own KV cache: 200 of them, TTFT, misses, decoding, prefill apart
#     inplace2  the death of an owner; likewise eager, TP=2, fp8, MLA, ngram; copies out of a KV cache
#     hostpool  our connector with a pool in host memory: equality, TTFT, a restart
#     deploy    data and expert parallel ranks of one `vllm serve`; instances in containers of their own: in the pool, then in place
#     four      two instances on four GPUs: TP=2 (equality, TTFT), PP=2 (equality, a restart); in the pool, then in place; some 500 s
#     campaign  live KV caches of two vLLMs under load, read by others while they are used again (at most 540 s with the start), and its
#               control (at most 120 s)
#   Serving at equal VRAM, our KV caches in place in turn with one peer (alone, offload, mp, pool); estimates from the runs of
#   2026-11-21: servers start in some 60 s, `prefix` takes 17 to 28 s, `trace` 20, 600 unfiltered requests 80 to 100. RUNS=0,1,2 by default.
#     serving_PEER     prefix and trace, three runs each                  about 400 s
#     unfiltered_PEER  the unfiltered trace, one run a call: RUNS=0, RUNS=1, ...    about 320 s, each further run 190
#     host             in place with 96 GiB of host memory for what leaves the KV caches, against mp; needs serving_mp's rows in $OUT.
#                      RUNS=0 first: the memory is taken and locked before the first request, some 40 s beside the servers' start.
#     x4               four servers on four GPUs, prefix, alone and in place      about 280 s
#   All of it is 4 x 400 + 4 x 700 s for three runs: on four GPUs two calls run beside each other, and that is two sessions' time.
#
# Calls that go on while nobody waits, which on a lent machine with a limit a call does twice the work (it keeps /tmp and its processes
# from call to call; what travels with a call is 64 MiB, which is not all parts):
#     stay [PART.tar.xz...]       unpack these, copy the checkout out of the way of later calls; begins nothing
#     later "CALL CALL..."        begin these in the background, one after the other, from that copy
#     fetch SECONDS "CALL..."     wait at most so long until these are over, and copy what there is to $OUT
#
# CALL+CALL runs two beside each other on a host of four GPUs, each on a pair of its own, into $OUT/CALL.
#
# With CUDA_VISIBLE_DEVICES=0 calls whose instances take a GPU each run on one GPU, too, which all share. Rows say so. Equality is worth
# as much there; times are not, as no byte crosses a link. Instances of several ranks run there, too, with NCCL 2.30 or later preloaded:
#     LD_PRELOAD=.../libnccl.so.2 CUDA_VISIBLE_DEVICES=0 python3 -m benchmarks.vllm_ttft --scale short --only tp2ttft,pp2,ep --integration vllm
#
# A call unpacks the parts it is given and goes on after whatever fails. Rows go to $OUT/*.json as they are measured, the logs of
# instances to $OUT/logs.tar.xz. Speed is worth something only on GPUs that nobody else uses. TINY=1 runs it without GPUs, for its own sake.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:?"usage: $0 CALL [PART.tar.xz...]; the calls are at the top of this script"}; shift
stay=${STAY:-/tmp/vcache-stay}
case $call in
  stay)
    mkdir -p "$stay/out" "${SITE:-/tmp/site}"
    [ -d "$stay/tree" ] || { cp -r . "$stay/new" && mv "$stay/new" "$stay/tree"; }
    for part in "$@"; do tar xJf "$part" -C "${SITE:-/tmp/site}" & done; wait
    exit ;;
  later)
    cd "$stay/tree" || exit 2
    setsid nohup bash -c 'for one in $1; do OUT=$2/$one benchmarks/gpu_night.sh "$one"; echo "rc $?" > "$2/$one.over"; done' \
      later "$1" "$stay/out" > "$stay/out/later.txt" 2>&1 < /dev/null &
    exit ;;
  fetch)
    for ((i = 0; i < $1; i++)); do
      over=1; for one in $2; do [ -f "$stay/out/$one.over" ] || over=; done
      [ -z "$over" ] || break
      sleep 1
    done
    cp -r "$stay/out/." "${OUT:?}"; tail -n 20 "$stay/out/later.txt"; for one in $2; do echo "== $one: $(cat "$stay/out/$one.over" 2> /dev/null || echo 'not over')"; done
    exit ;;
esac
known="pool speed equal kinds groups groups2 states lmcache inplace inplace2 hostpool deploy four campaign host x4"
for peer in alone offload mp pool; do known="$known serving_$peer unfiltered_$peer"; done
for one in ${call//+/ }; do [[ " $known " == *" $one "* ]] || { echo "no call $one; there are: $known"; exit 2; }; done
out=${OUT:-/tmp/vcache-gpu}; site=${SITE:-/tmp/site}; logs=/tmp/vcache-gpu-logs/$call; began=$SECONDS
mkdir -p "$out" "$site/vcache_backend-0.1.0.dist-info" "$logs"
for part in "$@"; do tar xJf "$part" -C "$site" & done; wait
if [ -z "${TINY:-}" ]; then
  # What an installation would do: the two folders are one package, and vLLM finds our plugin.
  [ -e vcache_backend/integration ] || ln -s ../integration vcache_backend/integration
  printf 'Metadata-Version: 2.1\nName: vcache-backend\nVersion: 0.1.0\n' > "$site/vcache_backend-0.1.0.dist-info/METADATA"
  printf '[vllm.general_plugins]\nvcache = vcache_backend.integration.plugin:register\n' > "$site/vcache_backend-0.1.0.dist-info/entry_points.txt"
  export PYTHONPATH=$PWD:$site
fi
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
trace=${TRACE:-shared/traces/mooncake-conversation.jsonl}

# What is missing is found now, in seconds, not by the first instance that does not start.
gpus=2
[[ $call != x4 && $call != four ]] || gpus=4
[[ $call != *+* ]] || gpus=4
[[ ${CUDA_VISIBLE_DEVICES-,} == *,* ]] || gpus=1
needs="torch msgspec vcache_backend vcache_backend.integration.vllm_connector"
[ "$call" = pool ] || needs="$needs vllm"
[[ ! $call =~ speed|equal|kinds|lmcache|_mp ]] || needs="$needs lmcache"
if ! "$python" - ${TINY:+0} ${TINY:-$gpus} $needs <<'END'
import importlib.metadata, importlib.util, sys
import torch
gpus, names = int(sys.argv[1]), [name for name in sys.argv[2:] if not name.isdigit()]

def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False

missing = [name for name in names if not found(name)]
points = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
problems = [f"no module {name}: is its part unpacked, is PYTHONPATH right?" for name in missing]
if "vcache" not in points:
    problems.append(f"vLLM would not find our plugin; there are {points}")
if torch.cuda.device_count() < gpus:
    problems.append(f"{torch.cuda.device_count()} GPUs where {gpus} are needed")
sys.exit("\n".join(problems) or 0)
END
then echo "== $call: cannot run here"; exit 2; fi
if [[ $call =~ serving|unfiltered|host ]] && [ ! -f "$trace" ]; then echo "== no trace at $trace: TRACE=FILE"; exit 2; fi

# vllm INTEGRATION SECONDS PARTS [OPTION...]: rows of these parts; SECONDS of the call's are over at the latest then.
vllm() {
  local integration=$1 seconds=$(($2 - SECONDS + began)) parts=$3 file=$1; shift 3
  if [[ " $* " == *" in_place "* ]]; then file=inplace; fi
  echo "== $integration: $parts, $seconds s"
  "$python" -m benchmarks.vllm_ttft --integration "$integration" --only "$parts" --seconds "$seconds" --out "$out/$file.json" \
    --logs "$logs/$file" --commit "${COMMIT:-}" ${TINY:+--scale tiny --rounds 1} "$@" > >(tee "$out/$call.$file.txt") 2>&1
}

# serving SECONDS SYSTEMS WORKLOADS RUNS [OPTION...]: rows of these go to $out/serving.json, which calls share.
serving() {
  local seconds=$(($1 - SECONDS + began)) systems=$2 workloads=$3 runs=${RUNS:-$4}; shift 4
  "$python" -m benchmarks.vllm_serving --systems "$systems" --workloads "$workloads" --runs "$runs" --trace "$trace" --seconds "$seconds" \
    --out "$out/serving.json" --logs "$logs/serving" --commit "${COMMIT:-}" ${TINY:+--scale tiny} "$@" > >(tee "$out/$call.txt") 2>&1
}

if [[ $call == *+* ]]; then
  IFS=+ read -ra calls <<< "$call"
  for i in "${!calls[@]}"; do
    CUDA_VISIBLE_DEVICES=$((2 * i)),$((2 * i + 1)) OUT=$out/${calls[i]} SITE=$site benchmarks/gpu_night.sh "${calls[i]}" &
  done
  wait
  exit
fi
case $call in
  pool)
    "$python" -m benchmarks --only engine --only copies --only metadata --only turns --out "$out/pool.json" --commit "${COMMIT:-}"
    timeout $((500 - SECONDS + began)) "$python" -m pytest -q -m gpu -n 6 --dist loadfile -p no:cacheprovider -p no:benchmark tests 2>&1 | tee "$out/gpu-tests.txt" | tail -15
    ;;
  speed)
    vllm vllm 520 scheduler,refused,ttft,agreeing,tpot,pd --rounds 9 --isolated --with-lmcache
    ;;
  equal)
    vllm vllm 520 agreeing,sensitive,flipped,equal,restart --pool-gib 8 --isolated &
    vllm lmcache 520 agreeing,sensitive,flipped,equal,restart --pool-gib 8 &
    wait
    ;;
  kinds)
    vllm vllm 350 failures,eager,tp2 --pool-gib 8 --isolated &
    vllm lmcache 350 failures,eager,tp2 --pool-gib 8 &
    wait
    vllm vllm 520 fp8,mla,ngram --pool-gib 8 --isolated
    ;;
  groups)
    vllm vllm 520 gemma3,gptoss --pool-gib 8 --isolated --rounds 9
    ;;
  states)
    vllm vllm 520 state_mamba2,state_conv,state_gdn,state_graphs --pool-gib 8 --isolated --rounds 9
    ;;
  lmcache)
    vllm lmcache 350 ttft,tpot,miss --rounds 9 --isolated
    vllm vllm 520 miss --isolated
    ;;
  inplace)
    vllm vllm 520 ttft,scheduler,miss,tpot,pd,agreeing,sensitive,flipped,equal --share in_place --isolated --rounds 9 --kv-gib 24
    ;;
  inplace2)
    vllm vllm 470 death,eager,tp2,fp8,mla,ngram --share in_place --isolated
    [ -n "${TINY:-}" ] || "$python" -m benchmarks --only copies --out "$out/copies.json" --commit "${COMMIT:-}"
    ;;
  hostpool)
    vllm vllm 400 agreeing,equal,ttft,restart --pool-gib 16 --set vcache.pool.device=host --suffix _hostmem --prompts 40 --isolated
    ;;
  deploy)
    vllm vllm 300 dp,ep,isolated --rounds 9 --pool-gib 8
    vllm vllm 520 dp,isolated --rounds 9 --share in_place
    ;;
  four)
    vllm vllm 300 tp2ttft,pp2 --rounds 9 --pool-gib 8
    vllm vllm 560 tp2ttft,pp2 --rounds 9 --share in_place
    ;;
  campaign)
    "$python" -m benchmarks.inplace_campaign --level gpu ${TINY:+--loads 200} --out "$out/campaign.json" 2>&1 | tee "$out/campaign.txt"
    ;;
  serving_*) peer=${call#serving_}; serving 570 "${peer/pool/vcache},inplace" prefix,trace 0,1,2 ;;
  unfiltered_*) peer=${call#unfiltered_}; serving 570 "${peer/pool/vcache},inplace" unfiltered 0 ;;
  host) serving 570 inplace_host prefix,trace,unfiltered 0,1,2 ;;
  x4) serving 570 alone,inplace prefix 0,1,2 --gpus 0,1,2,3 --concurrency 32 ;;
esac
tar cJf "$out/logs.tar.xz" -C "$logs" . --exclude='model*' 2> /dev/null
echo "== $call: $((SECONDS - began)) s; in $out: $(ls "$out" | tr '\n' ' ')"
