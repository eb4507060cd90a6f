#!/bin/bash
#SBATCH --job-name=distdl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8        # one worker a task: as many as the partitions need
#SBATCH --cpus-per-task=4          # its own cores
#SBATCH --time=01:00:00
set -eu

# module load gcc openmpi python   # the modules that it was built with, if any
source .venv/bin/activate

srun --mpi="${MPI_TYPE:-pmix}" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores \
    python -m distdl_jax "$@"
