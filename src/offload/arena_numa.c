/* SPDX-License-Identifier: Apache-2.0 */
/* arena_numa.c -- finds the NUMA node of a rank or GPU, and binds memory and threads to it. Nodes
 * are counted where their cores are: memory without cores (high-bandwidth memory, a GPU's, CXL) is
 * not used for a rank. */
#include <errno.h>
#include <hwloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "offload/arena.h"
#include "offload/arena_internal.h"

static bl_status load_topology_with(enum hwloc_type_filter_e devices, hwloc_topology_t *out)
{
    *out = NULL;
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0) return BL_FAIL(BL_ENOMEM, "hwloc: a topology");
    hwloc_topology_set_io_types_filter(topology, devices);
    if (hwloc_topology_load(topology) != 0) {
        int reason = errno;
        hwloc_topology_destroy(topology);
        errno = reason;
        return bl_fail_errno(BL_ELIMIT, "hwloc: the topology of this host");
    }
    *out = topology;
    return BL_OK;
}

/* One thread at a time loads a topology: for PCI devices hwloc calls libudev, which seeds its hash
 * tables in a static variable without a lock. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

/* With the host's PCI devices; the caller destroys it. */
static bl_status load_topology_of_devices(hwloc_topology_t *out)
{
    pthread_mutex_lock(&loading);
    bl_status st = load_topology_with(HWLOC_TYPE_FILTER_KEEP_IMPORTANT, out);
    pthread_mutex_unlock(&loading);
    return st;
}

/* The nodes and cores of this host, which do not change: loaded once and kept for the process,
 * because hwloc opens plugins and a hundred files of /sys each time. Threads only read it. */
static bl_status load_topology(hwloc_topology_t *out)
{
    static hwloc_topology_t host;
    bl_status st = BL_OK;

    pthread_mutex_lock(&loading);
    if (!host) st = load_topology_with(HWLOC_TYPE_FILTER_KEEP_NONE, &host);
    *out = host;
    pthread_mutex_unlock(&loading);
    return st;
}

/* Placement is advice: without a topology of the host there is none, after a warning. */
static bool find_topology(hwloc_topology_t *out)
{
    bool found = load_topology(out) == BL_OK;
    if (!found)
        bl_log_warning("%s; memory and threads are not bound to NUMA nodes", bl_error_text());
    return found;
}

/* The first node of each set of cores, in logical order: the one numbered `index`, or NULL after
 * the last. *n_nodes: how many up to there. */
static hwloc_obj_t find_node(hwloc_topology_t topology, int index, int *n_nodes)
{
    hwloc_obj_t node = NULL;
    hwloc_bitmap_t seen = hwloc_bitmap_alloc();

    *n_nodes = 0;
    while (seen &&
           (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != NULL) {
        if (hwloc_bitmap_iszero(node->cpuset) || hwloc_bitmap_intersects(node->cpuset, seen))
            continue;
        hwloc_bitmap_or(seen, seen, node->cpuset);
        if ((*n_nodes)++ == index) break;
    }
    hwloc_bitmap_free(seen);
    return node;
}

static int count_nodes(hwloc_topology_t topology)
{
    int n_nodes;
    find_node(topology, -1, &n_nodes);
    return n_nodes;
}

static bl_status get_node(hwloc_topology_t topology, int index, hwloc_obj_t *out)
{
    int n_nodes;

    *out = find_node(topology, index, &n_nodes);
    return *out ? BL_OK
                : BL_FAIL(BL_EUSAGE, "NUMA node %d: this host has %d with cores", index, n_nodes);
}

/* The node that has all cores the calling thread may run on; -1: there is not exactly one. */
static int find_node_of_thread(hwloc_topology_t topology)
{
    int found = -1, n_nodes = count_nodes(topology), unused;
    hwloc_bitmap_t cores = hwloc_bitmap_alloc();

    if (cores && hwloc_get_cpubind(topology, cores, HWLOC_CPUBIND_THREAD) == 0)
        for (int i = 0; i < n_nodes; i++)
            if (hwloc_bitmap_isincluded(cores, find_node(topology, i, &unused)->cpuset)) found = i;
    hwloc_bitmap_free(cores);
    return found;
}

bl_status bl_arena_bind_memory(void *memory, size_t size_bytes, int node, const char *what,
                               int *bound)
{
    hwloc_topology_t topology;
    hwloc_obj_t object;

    *bound = -1;
    if (!find_topology(&topology)) return BL_OK;
    if (node < 0) node = find_node_of_thread(topology);
    if (node < 0) return BL_OK;
    BL_TRY(get_node(topology, node, &object));
    if (count_nodes(topology) == 1) return BL_OK;
    if (hwloc_set_area_membind(topology, memory, size_bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                               HWLOC_MEMBIND_BYNODESET) == 0)
        *bound = node;
    else /* containers often forbid mbind */
        bl_log_warning("%s: its memory cannot be bound to NUMA node %d: %s", what, node,
                       strerror(errno));
    return BL_OK;
}

/* Cores that the thread may not run on (taskset, isolated ones) do not count; a node that has no
 * others is not used. */
static void bind_to_cores_of(hwloc_topology_t topology, hwloc_obj_t object, int node)
{
    hwloc_bitmap_t cores = hwloc_bitmap_alloc();

    if (cores && hwloc_get_cpubind(topology, cores, HWLOC_CPUBIND_THREAD) == 0) {
        hwloc_bitmap_and(cores, cores, object->cpuset);
        if (!hwloc_bitmap_iszero(cores) &&
            hwloc_set_cpubind(topology, cores, HWLOC_CPUBIND_THREAD) != 0)
            bl_log_warning("a thread cannot be bound to the cores of NUMA node %d: %s", node,
                           strerror(errno));
    }
    hwloc_bitmap_free(cores);
}

bl_status bl_arena_bind_thread(int node)
{
    hwloc_topology_t topology;
    hwloc_obj_t object;

    if (node < 0 || !find_topology(&topology)) return BL_OK;
    BL_TRY(get_node(topology, node, &object));
    if (count_nodes(topology) > 1) bind_to_cores_of(topology, object, node);
    return BL_OK;
}

/* False: the calling thread may not run on any core of a node. */
static bool may_use_all_nodes(hwloc_topology_t topology, int n_nodes)
{
    hwloc_bitmap_t cores = hwloc_bitmap_alloc();
    int unused;
    bool all = true;

    if (cores && hwloc_get_cpubind(topology, cores, HWLOC_CPUBIND_THREAD) == 0)
        for (int i = 0; i < n_nodes && all; i++)
            all = hwloc_bitmap_intersects(cores, find_node(topology, i, &unused)->cpuset);
    hwloc_bitmap_free(cores);
    return all;
}

int bl_arena_node_of(int index, int n)
{
    hwloc_topology_t topology;

    if (load_topology(&topology) != BL_OK) return -1;
    int n_nodes = count_nodes(topology);
    bool is_free = may_use_all_nodes(topology, n_nodes);
    return n < n_nodes || !is_free ? -1 : (int)((int64_t)index * n_nodes / n);
}

/* -1: none, or several. */
static int only_node_of(hwloc_topology_t topology, hwloc_const_bitmap_t cores)
{
    int found = -1, n_nodes = count_nodes(topology), unused;

    for (int i = 0; i < n_nodes; i++) {
        if (!hwloc_bitmap_intersects(cores, find_node(topology, i, &unused)->cpuset)) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return n_nodes > 1 ? found : -1;
}

int bl_arena_node_of_pci(const char *bus_id)
{
    hwloc_topology_t topology;
    int node = -1;

    if (load_topology_of_devices(&topology) != BL_OK) return -1;
    hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology, bus_id);
    if (device)
        node = only_node_of(topology, hwloc_get_non_io_ancestor_obj(topology, device)->cpuset);
    hwloc_topology_destroy(topology);
    return node;
}
