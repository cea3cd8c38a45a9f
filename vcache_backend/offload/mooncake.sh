#!/usr/bin/env bash
# `vcache mooncake` becomes this: one Mooncake master, and one provider that lends host memory. Both end with it.
#
#   mooncake.sh PROGRAMS NBYTES HOST PORT MASTER LOGS        PROGRAMS: the folder of Mooncake's programs; the last three may be empty
set -euo pipefail

READY_SECONDS=20
STOP_SECONDS=5
PATH=$1:$PATH nbytes=$2 host=$3 port=$4 master=$5 logs=$6
own_logs=false
pids=()
named=$host
if [[ $host == *:* ]]; then named="[$host]"; export MC_USE_IPV6=1; fi

say() { printf 'vcache mooncake: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

listens() { timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

# The first port from $1 on that no socket of this host uses, not even for a connection.
free_port() {
    local candidate
    for ((candidate = $1; candidate < $1 + 100; candidate++)); do
        grep -qs "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$candidate") " /proc/net/tcp /proc/net/tcp6 || { echo "$candidate"; return; }
    done
    die "no free port from $1 to $((candidate - 1))"
}

# The master and the provider end with this script, even if the script is killed.
bound=()
if setpriv --pdeathsig TERM true 2>/dev/null; then bound=(setpriv --pdeathsig TERM); fi

# Does PID, which this script started, still run? The shell knows; once a process is reaped, its number may be another process's.
runs() { [[ $'\n'$(jobs -rp)$'\n' == *$'\n'"$1"$'\n'* ]]; }

# NAME PID ADDRESS PORT: wait until the process listens.
ready() {
    local deadline=$((SECONDS + READY_SECONDS))
    until listens "$3" "$4"; do
        runs "$2" || fail "$1" "ended"
        ((SECONDS < deadline)) || fail "$1" "is not ready after $READY_SECONDS s"
        sleep 0.05
    done
}

# NAME FAULT: print the end of the process's log, and end.
fail() {
    tail -n 15 "$logs/$1.log" >&2 || true
    own_logs=false
    die "$1 $2; its log is $logs/$1.log"
}

# The provider stops first, and so tells the master that its memory goes.
stop() {
    local index pid deadline
    trap - EXIT INT TERM
    for ((index = ${#pids[@]} - 1; index >= 0; index--)); do
        pid=${pids[index]}
        runs "$pid" || continue
        kill -TERM "$pid" 2>/dev/null || true
        deadline=$((SECONDS + STOP_SECONDS))
        while runs "$pid" && ((SECONDS < deadline)); do sleep 0.05; done
        if runs "$pid"; then kill -KILL "$pid" 2>/dev/null || true; fi
        wait "$pid" 2>/dev/null || true
    done
    if $own_logs; then rm -rf "$logs"; fi
}

command -v mooncake_master mooncake_client >/dev/null ||
    die "no mooncake_master here: pip install '/path/to/vcache[mooncake]' (without CUDA: mooncake-transfer-engine-non-cuda xxhash)"

if [ -z "$logs" ]; then logs=$(mktemp -d) own_logs=true; fi
mkdir -p "$logs"
trap stop EXIT
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

# Only one of these scripts at a time chooses ports, until its processes listen on the ports.
exec 9</
flock -w "$READY_SECONDS" 9 2>/dev/null || true

if [ -z "$master" ]; then
    if [ -z "$port" ]; then
        port=$(free_port 50051)
        [ "$port" = 50051 ] || say "port 50051 is taken; the master gets $port: set offload.mooncake.master to it"
    elif listens "$host" "$port"; then
        die "port $port of $host is taken"
    fi
    metrics=$(free_port 9003)
    # A put never evicts, so the master makes room early, in the background. An object that was read stays for at least 5 s.
    "${bound[@]}" mooncake_master --rpc_address="$host" --rpc_port="$port" --metrics_host="$host" --metrics_port="$metrics" \
        --eviction_high_watermark_ratio=0.85 --eviction_ratio=0.1 --default_kv_lease_ttl=5000 >"$logs/master.log" 2>&1 9<&- &
    pids+=($!)
    ready master $! "$host" "$port"
    master=$named:$port
else
    [ -z "$port" ] || die "--port is the master's, and --master says that there is one"
    address=${master%:*} address=${address#[} address=${address%]}
    listens "$address" "${master##*:}" || die "nobody listens at $master"
    metrics=""
fi

own=$(free_port "$((port ? port + 1 : 50052))")
MC_TCP_BIND_ADDRESS=$host "${bound[@]}" mooncake_client --host="$host" --port="$own" --master_server_address="$master" \
    --metadata_server=P2PHANDSHAKE --protocol=tcp --global_segment_size="$nbytes B" --local_buffer_size=0 >"$logs/provider.log" 2>&1 9<&- &
pids+=($!)
ready provider $! "$host" "$own"
exec 9<&-

cat <<READY
ready: master $master${metrics:+ (metrics: http://$named:$metrics/metrics/summary)}, a provider of $((nbytes >> 20)) MiB; Ctrl-C ends both

  in the configuration, on every node:
    offload:
      policy: write_through
      mooncake: {master: "$master"}
  then, such as with configs/mooncake.yaml:
    vcache doctor --config FILE        # says whether an object goes in and comes back
    vcache serve --config FILE
READY

# Both processes run until a signal ends the wait; the trap stops them. (`wait -n` misses a process that ended before.)
while :; do
    for pid in "${pids[@]}"; do
        runs "$pid" && continue
        if [ "$pid" = "${pids[-1]}" ]; then fail provider "ended"; fi
        fail master "ended"
    done
    sleep 0.5 &
    wait $! || true
done
