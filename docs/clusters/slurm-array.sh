#!/bin/bash
#SBATCH --job-name=distdl-array
#SBATCH --array=0-3%2              # four jobs, two at a time
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
#SBATCH --output=array-%a.log
set -eu

source .venv/bin/activate

rates=(0.1 0.03 0.01 0.003)        # what differs from job to job
srun --mpi="${MPI_TYPE:-pmix}" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores \
    python -m distdl_jax "$@" --learning-rate "${rates[SLURM_ARRAY_TASK_ID]}" --out "out/$SLURM_ARRAY_TASK_ID.png"
