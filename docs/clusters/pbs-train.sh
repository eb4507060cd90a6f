#!/bin/bash
#PBS -N distdl
#PBS -l select=2:ncpus=32:mpiprocs=8
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -r y
set -eu

cd "$PBS_O_WORKDIR"
# module load gcc openmpi python   # the modules that it was built with, if any
source .venv/bin/activate

# PBS lists a host once for each of its workers.
workers=$(wc -l <"$PBS_NODEFILE")
if mpiexec --version | grep -q 'Open MPI\|OpenRTE'; then
    launch=(mpiexec -n "$workers" --hostfile "$PBS_NODEFILE" --bind-to core --map-by "slot:PE=${NCPUS_A_WORKER:-4}")
else
    launch=(mpiexec -n "$workers" -f "$PBS_NODEFILE" -bind-to "core:${NCPUS_A_WORKER:-4}")
fi
"${launch[@]}" python -m distdl_jax examples/resume.py --steps "${STEPS:-2000}" --out out/trained.safetensors
