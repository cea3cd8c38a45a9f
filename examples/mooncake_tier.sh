#!/usr/bin/env bash
# A Mooncake store for the offload tier: one master, and one provider that lends host memory. Both end with this script.
#
#   examples/mooncake_tier.sh [--segment 4GiB] [--port 50051] [--host ADDRESS]            # node 1
#   examples/mooncake_tier.sh --master ADDRESS:50051 --host ADDRESS [--segment 4GiB]      # node 2, ...: one more provider
#
#   --segment SIZE   memory that the provider lends: 512MiB, 4GiB, 16GB, ...
#   --port PORT      the master's; without it 50051, or the next one that is free
#   --host ADDRESS   of this node, as other nodes reach it; 127.0.0.1, so nobody else, without it
#   --master HOST:PORT   start no master, join that one
#   --logs FOLDER    keep both logs there
#   --demo           when it is ready: two nodes on this machine share a prompt's KV through it (mooncake_two_nodes.py); then end
#
# Mooncake asks nobody for a password and encrypts nothing: whoever reaches the ports reads and writes. Needs the package
# mooncake-transfer-engine or one of its variants, in .venv or on PATH. docs/mooncake.md says more.
set -euo pipefail

READY_SECONDS=20
STOP_SECONDS=5
segment=4GiB port="" host=127.0.0.1 master="" logs=""
own_logs=false demo=false
pids=()

say() { printf 'mooncake_tier: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# SIZE -> bytes
bytes() {
    local number unit factor
    [[ $1 =~ ^([0-9]+)\ *([A-Za-z]*)$ ]] || die "--segment $1 is no size such as 512MiB or 4GiB"
    number=${BASH_REMATCH[1]} unit=${BASH_REMATCH[2]^^}
    case $unit in
        "" | B) factor=1 ;; KB) factor=1000 ;; MB) factor=1000000 ;; GB) factor=1000000000 ;;
        KIB) factor=$((1 << 10)) ;; MIB) factor=$((1 << 20)) ;; GIB) factor=$((1 << 30)) ;; TIB) factor=$((1 << 40)) ;;
        *) die "--segment $1: the unit is none of KB MB GB KiB MiB GiB TiB" ;;
    esac
    echo $((number * factor))
}

listens() { timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

# The first port from $1 on where nobody listens.
free_port() {
    local candidate
    for ((candidate = $1; candidate < $1 + 100; candidate++)); do
        if ! listens "$host" "$candidate"; then echo "$candidate"; return; fi
    done
    die "no free port from $1 to $((candidate - 1))"
}

# What is started ends with this script even if that is killed.
bound=()
if setpriv --pdeathsig TERM true 2>/dev/null; then bound=(setpriv --pdeathsig TERM); fi

# NAME PID ADDRESS PORT: wait until it listens.
ready() {
    local deadline=$((SECONDS + READY_SECONDS))
    until listens "$3" "$4"; do
        kill -0 "$2" 2>/dev/null || fail "$1" "ended"
        ((SECONDS < deadline)) || fail "$1" "is not ready after $READY_SECONDS s"
        sleep 0.05
    done
}

# NAME WHAT: its log's end, and the end.
fail() {
    tail -n 15 "$logs/$1.log" >&2 || true
    own_logs=false
    die "$1 $2; its log is $logs/$1.log"
}

# The provider first: it tells the master that its memory goes.
stop() {
    local index pid deadline
    trap - EXIT INT TERM
    for ((index = ${#pids[@]} - 1; index >= 0; index--)); do
        pid=${pids[index]}
        kill -TERM "$pid" 2>/dev/null || continue
        deadline=$((SECONDS + STOP_SECONDS))
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.05; done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if $own_logs; then rm -rf "$logs"; fi
}

while (($#)); do
    case $1 in
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        --demo) demo=true; shift ;;
        --segment | --port | --host | --master | --logs)
            (($# > 1)) || die "$1 wants a value"
            printf -v "${1#--}" %s "$2"
            shift 2 ;;
        *) die "unknown argument $1; see --help" ;;
    esac
done
nbytes=$(bytes "$segment")
here=$(cd "$(dirname "$0")/.." && pwd)
PATH=$here/.venv/bin:$PATH
command -v mooncake_master mooncake_client >/dev/null ||
    die "no mooncake_master here: pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"

if [ -z "$logs" ]; then logs=$(mktemp -d) own_logs=true; fi
mkdir -p "$logs"
trap stop EXIT
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

if [ -z "$master" ]; then
    if [ -z "$port" ]; then
        port=$(free_port 50051)
        [ "$port" = 50051 ] || say "port 50051 is taken; the master gets $port: set offload.mooncake.master to it"
    elif listens "$host" "$port"; then
        die "port $port of $host is taken"
    fi
    metrics=$(free_port 9003)
    # Room is made early, in the background: a put itself never evicts. What was read is kept for at least five seconds.
    "${bound[@]}" mooncake_master --rpc_address="$host" --rpc_port="$port" --metrics_host="$host" --metrics_port="$metrics" \
        --eviction_high_watermark_ratio=0.85 --eviction_ratio=0.1 --default_kv_lease_ttl=5000 >"$logs/master.log" 2>&1 &
    pids+=($!)
    ready master $! "$host" "$port"
    master=$host:$port
else
    [ -z "$port" ] || die "--port is the master's, and --master says that there is one"
    listens "${master%:*}" "${master##*:}" || die "nobody listens at $master"
    metrics=""
fi

own=$(free_port "$((port ? port + 1 : 50052))")
MC_TCP_BIND_ADDRESS=$host "${bound[@]}" mooncake_client --host="$host" --port="$own" --master_server_address="$master" \
    --metadata_server=P2PHANDSHAKE --protocol=tcp --global_segment_size="$nbytes B" --local_buffer_size=0 >"$logs/provider.log" 2>&1 &
pids+=($!)
ready provider $! "$host" "$own"

if $demo; then
    python "$here/examples/mooncake_two_nodes.py" --master "$master"
    exit
fi
cat <<READY
ready: master $master${metrics:+ (metrics: http://$host:$metrics/metrics/summary)}, a provider of $segment; Ctrl-C ends both

  in the configuration, on every node:
    offload:
      policy: write_through
      mooncake: {master: "$master"}
  then, such as with configs/mooncake.yaml:
    vcache doctor --config FILE        # says whether an object goes in and comes back
    vcache serve --config FILE
READY

# Both are meant to run for ever. A signal ends the wait, and its trap the rest. (`wait -n` does not see who ended before it.)
while :; do
    for pid in "${pids[@]}"; do
        kill -0 "$pid" 2>/dev/null && continue
        if [ "$pid" = "${pids[-1]}" ]; then fail provider "ended"; fi
        fail master "ended"
    done
    sleep 0.5 &
    wait $! || true
done
