#!/bin/sh
# A kit for a machine with an NVIDIA GPU and no network: what distdl_jax needs beside jax, and a script that tries it.
#
#   sh tools/offline.sh pack distdl_jax-gpu.tar      here: wheels for Python 3.12 on Linux x86-64, and this commit
#   tar xf distdl_jax-gpu.tar                        there: then
#   sh distdl_jax-gpu/source/tools/offline.sh run    writes distdl_jax-gpu/results
#
# There must be: Python 3.12 with jax 0.11 or newer and its CUDA 13 plugin, CUDA 13 (nvcc on PATH, or CUDA_ROOT), a C++
# compiler and Python.h. PYTHON names that Python; unset: python3.12. `run` takes less than nine minutes: each step has a
# limit. It builds, looks by the doctor, runs the tests that are marked gpu, times messages, and trains two networks.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
wheels='mpich mpi4py nanobind setuptools wheel optax absl-py
    pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers
    matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six'

pack() {
    made=$(mktemp -d)
    kit=$made/distdl_jax-gpu
    mkdir -p "$kit/wheels" "$kit/source"
    git -C "$here" archive HEAD | tar x -C "$kit/source"
    # shellcheck disable=SC2086 # a list of names
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        --dest "$kit/wheels" $wheels
    python3 -m pip download --quiet --no-deps --no-binary=mpi4jax --dest "$kit/wheels" 'mpi4jax>=0.9.1'
    tar cf "$1" -C "$made" distdl_jax-gpu
    rm -rf "$made"
    echo "$1: $(du -m "$1" | cut -f 1) MB"
}

# --- There ----------------------------------------------------------------------------------------------------------

step() { # NAME SECONDS COMMAND...: its output in results/NAME.log, a line in results/summary.txt
    name=$1 limit=$2
    shift 2
    left=$((deadline - $(date +%s)))
    [ "$limit" -le "$left" ] || limit=$left
    began=$(date +%s)
    if [ "$limit" -lt 5 ]; then
        outcome='left out: no time'
    elif timeout "$limit" "$@" >"$results/$name.log" 2>&1; then
        outcome=passed
    else
        outcome="FAILED (exit status $?; 124: over $limit s)"
    fi
    printf '%-14s %4s s  %s\n' "$name" $(($(date +%s) - began)) "$outcome" | tee -a "$results/summary.txt"
    [ "$outcome" = passed ]
}

facts() {
    nvidia-smi || true
    nvcc --version || true
    uname -a
    "$python" -m pip list
}

build() {
    "$outer" -m venv --clear "$venv"
    # What the other Python has comes after what the kit has.
    "$outer" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    "$python" -m pip install --no-index --no-deps --ignore-installed "$kit"/wheels/*.whl
    cuda=${CUDA_ROOT:-$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")}
    # shellcheck disable=SC2012 # two known names
    static=$(ls "$cuda"/lib64/libcudart_static.a "$cuda"/lib/libcudart_static.a 2>/dev/null | head -n 1)
    mkdir -p "$venv/cuda/lib" # mpi4jax links to -lcudart; the static one is found when it runs, wherever CUDA lies
    ln -sfn "$cuda/include" "$venv/cuda/include"
    ln -sfn "$static" "$venv/cuda/lib/libcudart.a"
    CUDA_PATH=$venv/cuda MPI4JAX_BUILD_MPICC=$venv/bin/mpicc "$python" -m pip install --no-index --no-deps \
        --no-build-isolation --ignore-installed "$kit"/wheels/mpi4jax-*.tar.gz
    "$python" -m pip install --no-index --no-deps --no-build-isolation --editable "$kit/source"
    MPI4JAX_NO_WARN_JAX_VERSION=1 JAX_PLATFORMS=cpu "$python" -c \
        'import distdl_jax, mpi4jax, mpi4jax._src.xla_bridge.mpi_xla_bridge_cuda'
}

has_gpu() { "$python" -c 'import jax; print(jax.devices()); assert jax.default_backend() == "gpu"'; }

run() {
    kit=$(dirname "$here") outer=${PYTHON:-python3.12}
    results=$kit/results venv=$kit/venv
    python=$venv/bin/python deadline=$(($(date +%s) + 530))
    rm -rf "$results" && mkdir -p "$results" && cd "$here"
    export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1 DISTDL_JAX_GPUS=share JAX_DEFAULT_MATMUL_PRECISION=highest
    export kit outer venv python
    on_two="mpiexec -n 2 $python -m distdl_jax"
    tests="$python -m pytest -p no:cacheprovider -m gpu tests/gpu tests/watchdog/test_faults.py"
    # shellcheck disable=SC2086 # words of commands
    {
        step build 200 sh "$here/tools/offline.sh" build || { tail -n 5 "$results/build.log" && exit 1; }
        step facts 20 sh "$here/tools/offline.sh" facts || true
        step has_gpu 40 sh "$here/tools/offline.sh" has_gpu || { tail -n 1 "$results/has_gpu.log" && exit 1; }
        step doctor 40 $on_two doctor || true
        export DISTDL_JAX_TEST_GPU=1
        step tests 170 $tests -k 'not layers' --junitxml "$results/tests.xml" || true
        step messages 80 $on_two benchmarks/messages.py || true
        step fno 45 $on_two examples/fno.py --steps 60 --out "$results/fno.png" || true
        step unet3d 45 $on_two examples/unet3d.py --memory-volume 0 --samples 4 --steps 20 --check \
            --out "$results/unet3d.png" || true
        step layers 200 $tests -k layers --junitxml "$results/layers.xml" || true
    }
    cp -r out/benchmarks "$results" 2>/dev/null || true
    ! grep -q 'FAILED\|left out' "$results/summary.txt"
}

case ${1:-} in
    pack) pack "${2:-distdl_jax-gpu.tar}" ;;
    run | build | facts | has_gpu) "$1" ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0" ;;
esac
