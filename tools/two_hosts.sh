#!/bin/sh
# Two network namespaces as two hosts, on one machine: no shared memory between them, TCP alone. Needs root, Linux's `ip`
# and MPICH's mpiexec.
#
#   tools/two_hosts.sh up                      make them
#   tools/two_hosts.sh run 2 python train.py   start 2 workers, one after the other on the first and on the second host
#   tools/two_hosts.sh cut                     cut the link between them
#   tools/two_hosts.sh down                    remove them, and end what still runs there
set -eu

first=distdl-a second=distdl-b link=distdl0

case "${1:-}" in
up)
    for host in $first $second; do
        ip netns add $host
        ip -n $host link set lo up
    done
    ip link add $link netns $first type veth peer name $link netns $second
    ip -n $first address add 10.77.0.1/24 dev $link
    ip -n $second address add 10.77.0.2/24 dev $link
    ip -n $first link set $link up
    ip -n $second link set $link up
    for host in $first $second; do
        until ip -n $host link show $link | grep -q 'state UP'; do sleep 0.1; done
    done
    ;;
run)
    workers=$2
    shift 2
    UCX_TLS=tcp,self UCX_NET_DEVICES=$link MPIR_CVAR_NOLOCAL=1
    export UCX_TLS UCX_NET_DEVICES MPIR_CVAR_NOLOCAL
    exec ip netns exec $first mpiexec -launcher ssh -launcher-exec "$0" \
        -hosts 10.77.0.1:1,10.77.0.2:1 -n "$workers" "$@"
    ;;
cut)
    ip -n $first link set $link down
    ;;
down)
    for host in $first $second; do
        for process in $(ip netns pids $host 2>/dev/null); do
            kill -KILL "$process" 2>/dev/null || true
        done
        ip netns delete $host 2>/dev/null || true
    done
    ;;
-x | 10.77.0.*)
    # As mpiexec calls ssh: the host's address, and a command.
    test "$1" != -x || shift
    case "$1" in
    10.77.0.1) host=$first ;;
    *) host=$second ;;
    esac
    shift
    exec ip netns exec $host sh -c "$*"
    ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
