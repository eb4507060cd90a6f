#!/bin/sh
# A Slurm of one node, this machine, from Debian's packages: apt-get install slurmctld slurmd slurm-client munge. Needs root.
#
#   tools/one_node_slurm.sh up FOLDER      start it; its configuration, logs and state are in FOLDER
#   export SLURM_CONF=FOLDER/slurm.conf    then srun, sbatch, scancel as ever; `all` preempts jobs of the partition `low`
#   tools/one_node_slurm.sh down FOLDER    stop it
set -eu

folder=$(realpath -m "${2:?which folder?}")
node=$(hostname -s)
export SLURM_CONF="$folder/slurm.conf"

case "${1:-}" in
up)
    mkdir -p "$folder/state" "$folder/spool" /run/munge
    chown munge: /run/munge
    test -S /run/munge/munge.socket.2 || runuser -u munge -- munged
    # MPICH names its shared memory after the job, and one that was killed leaves it behind: no number comes again.
    cat >"$SLURM_CONF" <<EOF
ClusterName=one
SlurmctldHost=$node
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=pmi2
ReturnToService=2
FirstJobId=$(($(date +%s) % 50000000))
KillWait=5
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
NodeName=$node CPUs=$(nproc) State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8 PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=$node MaxTime=INFINITE OverSubscribe=NO PriorityTier=1 GraceTime=60
EOF
    slurmctld
    slurmd
    until sinfo --noheader --format=%T 2>/dev/null | grep -q -E 'idle|mixed|allocated'; do sleep 0.2; done
    ;;
down)
    for name in slurmd slurmctld; do
        test ! -f "$folder/$name.pid" || kill "$(cat "$folder/$name.pid")" || true
    done
    ;;
*)
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
