#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Makes .venv from scratch: Python, a torch that fits this machine's GPU (or none), vLLM as its empty build, superl8.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: ./bootstrap.sh [options]

Makes a virtual environment with everything that superl8 needs. Steps that are done already are skipped, so it can be
run again at any time. Nothing is installed outside the environment.

  --dev             install editable, with the test and lint tools and what the kernels are built with
  --venv DIR        the environment to make or to complete (default: .venv beside this script)
  --python PYTHON   the Python to make it with (default: the first of 3.11 to 3.13 that is found)
  --torch VERSION   the torch to install, 2.10 to 2.14 (default: by the GPU, see below)
  --torch-index URL take torch from this index
  --pure-python     no CUDA kernels: every op runs as torch code. For machines without g++
  --dry-run         say what would be done, and stop
  --help            this text

Which torch, where --torch says nothing:
  no NVIDIA GPU     2.13.0, the CPU build from PyTorch's own index if it can be reached
  sm_70 (Volta)     2.10.0 from the default index (CUDA 12.8), the newest there with code for it
  sm_61 (P40)       2.14.0 from PyTorch's cu126 index, the newest with code for it
  newer             2.14.0 from the default index
Of several GPUs the oldest decides. The environment variable SUPERL8_ARCHS names the architectures to build kernels for
(csrc/build.py; default sm_70 and PTX, and sm_61 where there is such a card).
HELP
}

readonly CPU_TORCH=2.13.0 VOLTA_TORCH=2.10.0 NEWEST_TORCH=2.14.0 VLLM=0.33.0
readonly PYTORCH_INDEX=https://download.pytorch.org/whl
readonly VLLM_BUILD_TOOLS=("setuptools>=78.1.1,<81" setuptools-scm setuptools-rust wheel cmake ninja jinja2 packaging regex)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly ROOT

say() { printf '\n== %s\n' "$*"; }
note() { printf '   %s\n' "$*"; }
die() {
    printf 'bootstrap: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '           %s\n' "$line" >&2; done
    exit 1
}

# ---- what is asked for

venv=$ROOT/.venv python='' torch='' torch_index='' dev=0 pure=0 dry_run=0
while (($#)); do
    case $1 in
        --dev) dev=1 ;;
        --pure-python) pure=1 ;;
        --dry-run) dry_run=1 ;;
        --venv | --python | --torch | --torch-index)
            (($# > 1)) || die "$1 wants a value; see --help"
            case $1 in
                --venv) venv=$2 ;;
                --python) python=$2 ;;
                --torch) torch=$2 ;;
                --torch-index) torch_index=$2 ;;
            esac
            shift
            ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) die "unknown option $1; see --help" ;;
    esac
    shift
done

# ---- what is here

supported_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "$venv/bin/python" python3 python3.12 python3.11 python3.13 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-3].*/bin/python; do
        if command -v "$candidate" >/dev/null && supported_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "there is no Python 3.11, 3.12 or 3.13" \
        "Debian 12 and later, Ubuntu 24.04 and later: apt-get install python3 python3-venv python3-dev" \
        "Ubuntu 22.04: apt-get install python3.11 python3.11-venv python3.11-dev"
}

check_python() {
    local package
    supported_python "$python" || die "$python is not a Python of 3.11 to 3.13"
    package=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    if [[ ! -x $venv/bin/python ]] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        die "$python cannot make virtual environments" "apt-get install $package-venv"
    fi
    ((pure)) && return
    command -v "${CXX:-g++}" >/dev/null || die "there is no ${CXX:-g++} to build the kernels with" \
        "apt-get install g++" "or: ./bootstrap.sh --pure-python, which runs every op as torch code"
    "$python" - <<'PY' || die "$python has no Python.h to build the kernels with" "apt-get install $package-dev"
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PY
}

# Compute capabilities of the GPUs, lowest first, as "70 90"; "unknown" for a GPU whose driver does not tell.
find_gpus() {
    local found
    if command -v nvidia-smi >/dev/null; then
        if found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then
            found=$(grep -oE '^[0-9]+\.[0-9]+' <<<"$found" | tr -d . | sort -n | tr '\n' ' ' || true)
            echo "${found% }"
            return
        fi
        compgen -G '/dev/nvidia[0-9]*' >/dev/null && echo unknown
    fi
    return 0
}

choose_torch() {
    local oldest=${gpus%% *}
    if [[ -n $torch ]]; then
        torch_reason='as asked for'
    elif [[ -z $gpus ]]; then
        torch=$CPU_TORCH torch_reason='no NVIDIA GPU'
    elif [[ $oldest == unknown ]]; then
        torch=$VOLTA_TORCH torch_reason='a GPU whose driver does not tell its kind, taken for a Volta'
    elif ((oldest < 70)); then
        torch=$NEWEST_TORCH+cu126 torch_reason="sm_$oldest"
        torch_index=${torch_index:-$PYTORCH_INDEX/cu126}
    elif ((oldest < 75)); then
        torch=$VOLTA_TORCH torch_reason="sm_$oldest"
    else
        torch=$NEWEST_TORCH torch_reason="sm_$oldest"
    fi
}

[[ -z $torch || $torch =~ ^2\.1[0-4](\.|\+|$) ]] || die "torch $torch is not among 2.10 to 2.14, which superl8 works with"
[[ -n $python ]] || python=$(find_python)
check_python
gpus=$(find_gpus)
choose_torch
if [[ " $gpus " == *" 61 "* && -z ${SUPERL8_ARCHS:-} ]]; then
    export SUPERL8_ARCHS='sm_61 sm_70 compute_70'
fi

say "plan"
note "python   $("$python" --version 2>&1 | cut -d' ' -f2) ($python)"
note "venv     $venv"
note "gpu      ${gpus:-none}"
note "torch    $torch ($torch_reason)${torch_index:+ from $torch_index}"
note "vllm     $VLLM, empty build"
note "superl8  $( ((dev)) && echo 'editable, with tests' || echo 'installed'), $( ((pure)) && echo 'pure Python' || echo 'with kernels')"
((dry_run)) && exit 0

# ---- steps

# The environment's packages, asked without importing them.
installed() { "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null || true; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

make_venv() {
    if [[ ! -x $venv/bin/python ]]; then
        say "making $venv"
        "$python" -m venv "$venv"
        pip install -qq --upgrade 'pip>=24'
    fi
    supported_python "$venv/bin/python" || die "$venv holds a Python that is not 3.11 to 3.13; remove it, or choose --venv"
}

torch_is_there() {
    local have
    have=$(installed torch)
    [[ -n $have ]] || return 1
    [[ -z $gpus || $have != *+cpu ]] || return 1
    [[ $have == "$torch" || ($torch != *+* && ${have%%+*} == "$torch") ]]
}

install_torch() {
    local source=()
    if torch_is_there; then
        note "torch $(installed torch) is there"
        return
    fi
    say "installing torch $torch"
    if [[ -n $torch_index ]]; then
        source=(--extra-index-url "$torch_index")
    elif [[ -z $gpus && $torch != *+* ]]; then
        if reaches "$PYTORCH_INDEX/cpu/torch/"; then
            source=(--extra-index-url "$PYTORCH_INDEX/cpu")
            torch+=+cpu
        else
            note "PyTorch's own index cannot be reached; the default index may give a CUDA build of 2 GB, which works too"
        fi
    fi
    pip install -qq "${source[@]}" "torch==$torch"
}

reaches() {
    "$python" - "$1" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=8)
PY
}

# torch stays what it is, whatever later steps depend on; NumPy stays at what numba takes.
write_constraints() { printf 'torch==%s\nnumpy<2.5\n' "$(installed torch)" >"$venv/superl8-constraints.txt"; }

# True for vLLM's CUDA wheel, which brings compiled extensions.
vllm_is_compiled() { compgen -G "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/*.so" >/dev/null; }

install_vllm() {
    if [[ $(installed vllm) == 0.33.* ]] && ! vllm_is_compiled; then
        note "vLLM $(installed vllm), empty build, is there"
        return
    fi
    say "building vLLM $VLLM without extensions (some minutes: it is pure Python, but has many dependencies)"
    pip install -qq -c "$venv/superl8-constraints.txt" "${VLLM_BUILD_TOOLS[@]}"
    build_vllm
    # pip keeps wheels that it built, also one that was built here with extensions.
    if vllm_is_compiled; then build_vllm --no-cache-dir --force-reinstall --no-deps; fi
}

build_vllm() (
    # A rustc that refuses: vLLM's optional Rust parts are then left out instead of being compiled.
    no_rust=$(mktemp -d)
    trap 'rm -r "$no_rust"' EXIT
    printf '#!/bin/sh\nexit 1\n' | tee "$no_rust/rustc" >"$no_rust/cargo"
    chmod +x "$no_rust"/*
    export PATH="$no_rust:$PATH" VLLM_VERSION_OVERRIDE=$VLLM VLLM_TARGET_DEVICE=empty
    pip install -qq "$@" -c "$venv/superl8-constraints.txt" --no-build-isolation --no-binary vllm "vllm==$VLLM"
)

# Hash of what an installation is made of: with --dev Python files are used in place.
fingerprint() {
    local files=("$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT/vllm_superl8/formats/layout.py")
    while IFS= read -r -d '' file; do files+=("$file"); done < <(
        find "$ROOT/csrc" -type f ! -name '*.pyc' -print0
        ((dev)) || find "$ROOT/vllm_superl8" -name '*.py' -print0
    )
    {
        echo "dev=$dev pure=$pure archs=${SUPERL8_ARCHS:-} $ROOT"
        printf '%s\n' "${files[@]}" | LC_ALL=C sort | while IFS= read -r file; do sha256sum "$file"; done
    } | sha256sum | cut -d' ' -f1
}

install_superl8() {
    local stamp=$venv/superl8-installed now
    now=$(fingerprint)
    if [[ -n $(installed vllm-superl8) && -f $stamp && $(<"$stamp") == "$now" ]]; then
        note "superl8 $(installed vllm-superl8) is there"
        return
    fi
    say "installing superl8"
    if ((pure)); then export SUPERL8_PURE_PYTHON=1; fi
    if ((dev)); then
        # Built with what is in the environment, so that `python csrc/build.py` and the tests have it too.
        "$venv/bin/python" - "$ROOT/pyproject.toml" >"$venv/superl8-build-requires.txt" <<'PY'
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"]))
PY
        pip install -qq -c "$venv/superl8-constraints.txt" -r "$venv/superl8-build-requires.txt"
        pip install -qq -c "$venv/superl8-constraints.txt" --no-build-isolation -e "${ROOT}[test,dev]"
    else
        rm -rf "$ROOT/build" # setuptools would pack what an older build left there
        pip install -qq -c "$venv/superl8-constraints.txt" "$ROOT"
    fi
    echo "$now" >"$stamp"
}

report() {
    say "done after $SECONDS s"
    (cd / && VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python") <<'PY'
import importlib.metadata as metadata, platform, torch
from vllm_superl8.ops import registry

archs = torch.cuda.get_arch_list()
code = " ".join(archs) if archs else f"CUDA {torch.version.cuda}, no GPU" if torch.version.cuda else "CPU build"
print(f"   python   {platform.python_version()}")
print(f"   torch    {torch.__version__} ({code})")
print(f"   vllm     {metadata.version('vllm')} (empty build)")
if registry.COMPILED is None:
    print(f"   superl8  {metadata.version('vllm-superl8')}, pure Python: {registry.NO_KERNELS_REASON}")
else:
    info = registry.COMPILED.build_info()
    print(f"   superl8  {metadata.version('vllm-superl8')}, {len(info['kernels'])} kernels for {' '.join(info['archs'])}")
PY
    note "next     $venv/bin/superl8 demo     (or: $venv/bin/superl8 doctor)"
}

make_venv
install_torch
write_constraints
install_vllm
install_superl8
report
