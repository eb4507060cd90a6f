#!/bin/bash
#SBATCH --job-name=distdl-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
#SBATCH --requeue                  # Slurm may preempt it, and starts it again
#SBATCH --open-mode=append         # one log for all starts
#SBATCH --signal=USR1@120          # told to the workers two minutes before the time is up
set -eu

source .venv/bin/activate

srun --mpi="${MPI_TYPE:-pmix}" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores \
    python -m distdl_jax examples/resume.py --steps "${STEPS:-2000}" --out out/trained.safetensors

# It ends in good order when it is trained, and when it was told to stop: then its time was up.
test -e out/trained.safetensors || scontrol requeue "$SLURM_JOB_ID"
