/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c -- the keys for the number and kind of a job's ranks: ranks, rank_processes, threads.
 * Their meaning depends on how this process was started:
 *
 * | started by | processes | ranks auto | a rank is |
 * | a user | 1 | visible GPUs, or 1 | a thread; a child, with a GPU each or rank_processes true |
 * | mpirun, srun: one task per host | hosts | hosts x its visible GPUs, or hosts | a child of the
 *   task; the task, if there are no more ranks |
 * | mpirun, srun, torchrun: more | P | P | the task |
 * | a parent | ranks | ranks | this process | */
#include <string.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "job/launch.h"
#include "comm/nccl/nccl.h"
#include "config/internal.h"

bool config_has_gpu_processes(void)
{
    return bl_comm_has_nccl();
}

/* Cores that the parent of this process is bound to: no more than this one where its tasks share
 * its set. */
static int64_t cores_of_starter(int64_t n_unknown)
{
    pid_t starter = getppid(); /* 0: outside of the container */
    int64_t n = starter == 0 ? -1 : bl_cores_of_process(starter);
    return n < 0 ? n_unknown : n;
}

int64_t config_cores_of_task(int64_t n_usable, int64_t n_starter, int64_t n_allowed,
                             int64_t n_on_host)
{
    if (n_usable * n_on_host <= bl_min_i64(n_starter, n_allowed)) return n_usable;
    return bl_max_i64(1, n_usable / n_on_host);
}

static bool is_task(const bl_launch_info *launch)
{
    return launch->kind == BL_LAUNCH_MPI || launch->kind == BL_LAUNCH_TORCHRUN;
}

/* The launcher may have bound a process that is one of its host's ranks; the ranks in it, threads
 * or children, share its cores. */
static int64_t cores_of_rank(const bl_launch_info *launch, int64_t n_children, int64_t n_on_host)
{
    int64_t n = bl_cores_bound();

    if (!is_task(launch) || n_children > 0) return bl_max_i64(1, n / n_on_host);
    return config_cores_of_task(n, cores_of_starter(n), bl_cores_allowed(), n_on_host);
}

int64_t config_cores_within(int64_t quota, int64_t n_cores, int64_t n_on_host)
{
    return quota < 0 ? n_cores : bl_min_i64(n_cores, bl_max_i64(1, quota / n_on_host));
}

/* A rank may have its cores alone; the quota of a container is shared by all of its processes. */
static int64_t auto_threads(const bl_launch_info *launch, int64_t n_children, int64_t n_on_host)
{
    int64_t n_cores = cores_of_rank(launch, n_children, n_on_host),
            n = config_cores_within(bl_cores_quota(), n_cores, n_on_host);

    if (n < n_cores)
        bl_log_info("threads auto: %lld of %lld cores%s: the container's limit", (long long)n,
                    (long long)n_cores, n_on_host > 1 ? " per rank" : "");
    return n;
}

/* The GPUs that ranks of a process started by this one can have. */
static int usable_gpus(const bl_train_config *c, int n_gpus)
{
    return c->device == BL_CONFIG_DEVICE_CUDA && config_has_gpu_processes() ? n_gpus : 0;
}

/* Whether this process may start the ranks of its host. */
static bool is_for_a_host(const bl_launch_info *launch)
{
    return launch->kind == BL_LAUNCH_ALONE ||
           (launch->kind == BL_LAUNCH_MPI && launch->n_local == 1);
}

static int64_t auto_ranks(const bl_train_config *c, const bl_launch_info *launch, int n_gpus)
{
    bool takes_all = is_for_a_host(launch) && usable_gpus(c, n_gpus) > 1 &&
                     c->rank_processes != BL_RANK_PROCESSES_FALSE;
    return launch->n_processes * (takes_all ? n_gpus : 1);
}

/* Ranks on one GPU, or on GPUs that do not suffice, cannot be processes. */
static bl_status check_gpus(const bl_train_config *c, int64_t n_here, int n_gpus)
{
    if (c->device != BL_CONFIG_DEVICE_CUDA || n_here == 1) return BL_OK;
    if (!config_has_gpu_processes())
        return BL_FAIL(BL_EUSAGE, "rank_processes true: this build has no NCCL for GPUs of several "
                                  "processes; use false, or device cpu");
    if (n_gpus == 1)
        return BL_FAIL(BL_EUSAGE,
                       "rank_processes true: %lld ranks share a GPU only as threads; use false",
                       (long long)n_here);
    if (n_here > n_gpus)
        return BL_FAIL(BL_EUSAGE, "ranks: %lld on this host, but it has %d GPUs", (long long)n_here,
                       n_gpus);
    return BL_OK;
}

/* Ranks on several GPUs need NCCL; without it, `auto` uses one GPU of several and warns. */
static bl_status check_nccl(const bl_train_config *c, bool is_auto, int n_gpus)
{
    if (c->device != BL_CONFIG_DEVICE_CUDA || n_gpus < 2 || config_has_gpu_processes() ||
        c->rank_processes == BL_RANK_PROCESSES_FALSE)
        return BL_OK;
    if (c->ranks > 1 && c->rank_processes == BL_RANK_PROCESSES_AUTO)
        return BL_FAIL(BL_EUSAGE,
                       "ranks: %lld on %d GPUs: this build has no NCCL (docs/install.md); with "
                       "rank_processes false they are threads that share one GPU",
                       (long long)c->ranks, n_gpus);
    if (is_auto)
        bl_log_warning("this build has no NCCL: of %d GPUs one is used (docs/install.md)", n_gpus);
    return BL_OK;
}

/* Tasks that are ranks have a GPU each, however many there are. */
static void warn_of_idle_gpus(const bl_train_config *c, const bl_launch_info *launch, int n_gpus)
{
    if (c->device != BL_CONFIG_DEVICE_CUDA || !is_task(launch) || n_gpus <= launch->n_local) return;
    bl_log_warning("%s started %d process%s on a host with %d GPUs; the others are idle",
                   launch->launcher, launch->n_local, launch->n_local == 1 ? "" : "es", n_gpus);
}

/* The processes to start here, *n; 0: none, the ranks are threads, or this process is one. */
static bl_status count_children(const bl_train_config *c, const bl_launch_info *launch, int n_gpus,
                                int64_t *n)
{
    bool wants = c->rank_processes == BL_RANK_PROCESSES_TRUE ||
                 (c->rank_processes == BL_RANK_PROCESSES_AUTO && usable_gpus(c, n_gpus) > 1);
    int64_t n_here = c->ranks / launch->n_processes;

    *n = 0;
    if (!wants || (launch->n_processes > 1 && c->ranks == launch->n_processes)) return BL_OK;
    if (n_here == 1 && c->rank_processes == BL_RANK_PROCESSES_AUTO) return BL_OK;
    if (!is_for_a_host(launch))
        return BL_FAIL(BL_EUSAGE,
                       "ranks: %lld, but %d processes were started, %d on this host: start one "
                       "per rank%s",
                       (long long)c->ranks, launch->n_processes, launch->n_local,
                       launch->kind == BL_LAUNCH_MPI ? ", or one per host"
                                                     : " (torchrun --nproc_per_node)");
    if (c->ranks % launch->n_processes != 0)
        return BL_FAIL(BL_EUSAGE, "ranks: %lld cannot be divided by %d hosts", (long long)c->ranks,
                       launch->n_processes);
    *n = n_here;
    return check_gpus(c, n_here, n_gpus);
}

bl_status config_place_ranks(bl_train_config *c, int n_gpus)
{
    bl_launch_info launch;
    int64_t n_children = 0;
    bool is_auto = c->ranks == BL_OPTION_AUTO;

    bl_launch_read(&launch);
    if (is_auto) c->ranks = auto_ranks(c, &launch, n_gpus);
    if (launch.kind == BL_LAUNCH_ALONE) BL_TRY(check_nccl(c, is_auto, n_gpus));
    if (launch.kind != BL_LAUNCH_CHILD) BL_TRY(count_children(c, &launch, n_gpus, &n_children));
    if (n_children == 0) warn_of_idle_gpus(c, &launch, n_gpus);
    bool are_processes = n_children > 0 || launch.kind != BL_LAUNCH_ALONE;
    c->rank_processes = are_processes ? BL_RANK_PROCESSES_TRUE : BL_RANK_PROCESSES_FALSE;
    int64_t n_on_host = n_children > 0                   ? n_children
                        : launch.kind == BL_LAUNCH_ALONE ? c->ranks
                                                         : launch.n_local;
    if (c->threads == BL_OPTION_AUTO) c->threads = auto_threads(&launch, n_children, n_on_host);
    return BL_OK;
}

int bl_train_config_starts_ranks(const bl_train_config *c)
{
    bl_launch_info launch;

    bl_launch_read(&launch);
    if (c->rank_processes != BL_RANK_PROCESSES_TRUE || !is_for_a_host(&launch)) return 0;
    if (launch.n_processes > 1 && c->ranks == launch.n_processes) return 0;
    return (int)(c->ranks / launch.n_processes);
}
