# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# slurm.sh -- Slurm over the two hosts of hosts.sh, for tests that read both with `.`: a controller on a, a node on a and on b, each with 96
# processors and 8 GPUs that are device files. The real daemons (Debian: slurmctld slurmd slurm-client munge), with keys, ports and files
# of their own, also beside a Slurm that the machine already has.
#
#   slurm_is_here            whether the daemons are installed
#   slurm_start WORK         waits until both nodes are idle; sets SLURM_CONF. WORK is a new folder. Fails also without PMIx
#   slurm_stop               ends it, also after a failed start

slurm_work=

slurm_is_here() {
    for command in slurmctld slurmd srun sbatch munged; do
        command -v "$command" >/dev/null || return 1
    done
}

slurm_stop() {
    [ -n "$slurm_work" ] || return 0
    for name in slurmctld slurmd-a slurmd-b munge; do
        [ ! -s "$slurm_work/$name.pid" ] || kill "$(cat "$slurm_work/$name.pid")" 2>/dev/null || true
    done
    tries=0 # each removes the file with its number when it ends
    while [ -n "$(find "$slurm_work" -maxdepth 1 -name '*.pid' -size +0)" ] && [ $tries -lt 300 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    slurm_work=
}

slurm_configure() {
    cat >"$1/slurm.conf" <<CONF
ClusterName=ballast
SlurmctldHost=a
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$1/munge/socket,cred_expire=10
SlurmUser=root
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool-%n
TmpFS=$1/tmp-%n
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd-%n.pid
SlurmctldLogFile=$1/slurmctld.log
SlurmdLogFile=$1/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=a,b CPUs=96 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=a,b Default=YES MaxTime=INFINITE State=UP
CONF
    echo "Name=gpu File=$1/gpu[0-7]" >"$1/gres.conf"
    echo 'CgroupMountpoint=/sys/fs/cgroup' >"$1/cgroup.conf"
    for i in 0 1 2 3 4 5 6 7; do mknod "$1/gpu$i" c 1 3; done # /dev/null's numbers
}

slurm_start() {
    mkdir "$1" && mkdir -m 755 "$1/munge" && mkdir "$1/state" "$1/spool-a" "$1/spool-b" "$1/tmp-a" "$1/tmp-b"
    slurm_work=$1
    slurm_configure "$1"
    export SLURM_CONF="$1/slurm.conf"
    (umask 077 && head -c 128 /dev/urandom >"$1/munge/key")
    munged --force --socket="$1/munge/socket" --key-file="$1/munge/key" --pid-file="$1/munge.pid" --log-file="$1/munge.log" \
        --seed-file="$1/munge/seed" || return 1
    on a slurmctld && on a slurmd && on b slurmd || return 1
    tries=0
    until [ "$(on a sinfo --noheader --format=%T,%D)" = idle,2 ]; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || return 1
        sleep 0.1
    done
    srun --mpi=list 2>&1 | grep -qw pmix
}
