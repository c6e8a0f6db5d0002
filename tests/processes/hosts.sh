# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# hosts.sh -- two hosts on one machine, for the shell tests of this folder, which read it with `.`: network, host name and mount
# namespaces, joined by a veth pair. Processes and files are common to both. Traffic stays inside.
#
#   hosts_make WORK          a (10.209.77.1) and b (10.209.77.2), which know each other by name. False where that is impossible, and
#                            why in $hosts_refused
#   on a|b COMMAND ...       the command on that host
#   hosts_received a|b       bytes that have come over the link
#   hosts_remove             both, again
#
# After hosts_make, `on a mpirun -H a,b ...` starts processes on both: what it needs is in the environment.

skip() { printf 'skip: %s\n' "$*"; exit 77; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

host_a=ballast-a-$$ host_b=ballast-b-$$
host_files=

hosts_remove() {
    ip netns del "$host_a" 2>/dev/null || true # and the veth pair with it
    ip netns del "$host_b" 2>/dev/null || true
}

# `ip netns exec` would hide the machine's cgroups; a name of its own, so that Open MPI does not take the two for one machine.
on() {
    on_host=$1
    shift
    case $on_host in a) on_namespace=$host_a ;; *) on_namespace=$host_b ;; esac
    nsenter --net="/run/netns/$on_namespace" unshare --uts --mount sh -c \
        'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' "$on_host" "$host_files/hosts" "$@"
}

hosts_received() {
    case $1 in a) on_namespace=$host_a ;; *) on_namespace=$host_b ;; esac
    ip -n "$on_namespace" -s link show link0 | awk '/RX:/ { getline; print $1 }'
}

hosts_make() {
    host_files=$1 hosts_refused="network namespaces need root"
    [ "$(id -u)" -eq 0 ] || return 1
    for command in ip nsenter unshare hostname; do
        hosts_refused="no $command on this machine"
        command -v "$command" >/dev/null || return 1
    done
    if ! hosts_connect 2>"$1/refused" || ! hosts_name "$1" 2>"$1/refused"; then
        hosts_refused="no network namespaces here: $(tail -n 1 "$1/refused")"
        return 1
    fi
    hosts_make_agent "$1"
}

hosts_connect() {
    ip netns add "$host_a" && ip netns add "$host_b" &&
        ip link add link0 netns "$host_a" type veth peer name link0 netns "$host_b" &&
        ip -n "$host_a" addr add 10.209.77.1/24 dev link0 && ip -n "$host_b" addr add 10.209.77.2/24 dev link0 || return 1
    for namespace in "$host_a" "$host_b"; do
        ip -n "$namespace" link set lo up && ip -n "$namespace" link set link0 up || return 1
    done
}

hosts_name() {
    printf '127.0.0.1 localhost\n10.209.77.1 a\n10.209.77.2 b\n' >"$1/hosts"
    on a true
}

# What mpirun calls in the place of ssh: AGENT HOST COMMAND...
hosts_make_agent() {
    cat >"$1/agent" <<AGENT
#!/bin/sh
host_a=$host_a host_b=$host_b host_files=$1
$(sed -n '/^on() {/,/^}/p' "$hosts_sh")
host=\$1
shift
on "\$host" sh -c "\$*"
AGENT
    chmod +x "$1/agent"
    export OMPI_MCA_plm_rsh_agent="$1/agent" OMPI_MCA_plm=rsh OMPI_MCA_btl_tcp_if_include=link0 OMPI_MCA_oob_tcp_if_include=link0
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}
