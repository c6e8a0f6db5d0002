/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/launch.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "comm/wire/wire.h"

struct bl_launch {
    bl_wire *wire;
    bl_launch_leave_fn leave;
    double
        told_s; /* when this process's main thread first saw that the job has failed; 0: it has not */
};

/* A number of the environment, or `missing`. */
static int number_of(const char *name, int missing)
{
    enum { MAX_PROCESSES = 1 << 20 };
    const char *text = getenv(name);
    char *end;
    if (!text) return missing;
    long value = strtol(text, &end, 10);
    return end == text || value < 0 || value > MAX_PROCESSES ? missing : (int)value;
}

void bl_launch_read(bl_launch_info *out)
{
    /* Open MPI's first: under Slurm its daemons are a step themselves, which its ranks inherit. */
    static const struct {
        const char *launcher, *size, *rank, *n_local, *local_rank;
    } variables[] = {
        {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
        {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE",
         "SLURM_LOCALID"},
    };

    *out = (bl_launch_info){.n_processes = 1, .n_local = 1};
    for (size_t i = 0; i < BL_COUNT(variables); i++) {
        int size = number_of(variables[i].size, 0), rank = number_of(variables[i].rank, -1);
        if (size < 1 || rank < 0 || rank >= size) continue;
        int n_local = number_of(variables[i].n_local, 1); /* of Slurm's "4(x2)" the 4 */
        int local_rank = number_of(variables[i].local_rank, 0);
        if (n_local <= local_rank) n_local = local_rank + 1; /* and of its "2,4" the 2 */
        *out = (bl_launch_info){.launcher = variables[i].launcher,
                                .rank = rank,
                                .n_processes = size,
                                .local_rank = local_rank,
                                .n_local = n_local};
        return;
    }
}

static void report_error(const bl_error *error)
{
    bl_log_error(error->text);
    bl_log_set_silent(); /* it is the last line */
}

/* mpirun binds a rank to one core by default, and its worker threads with it. */
static void warn_if_bound(const bl_launch_info *info)
{
    cpu_set_t set;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof set, &set) != 0 || online < 2L * info->n_local) return;
    if (CPU_COUNT(&set) == 1)
        bl_log_warning("%s has bound this process to one core of %ld: give it --bind-to none",
                       info->launcher, online);
}

bl_status bl_launch_open(bl_launch_leave_fn leave, bl_launch **out)
{
    bl_launch_info info;

    *out = NULL;
    bl_launch_read(&info);
    if (info.n_processes == 1) return BL_OK;
    bl_launch *launch = calloc(1, sizeof *launch);
    if (!launch) return BL_FAIL(BL_ENOMEM, "the launch of %d processes", info.n_processes);
    launch->leave = leave;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a launcher that is killed cannot end us */
    if (info.rank > 0) bl_log_set_silent();
    bl_status st = bl_wire_open(info.rank, info.n_processes, report_error, &launch->wire);
    if (st != BL_OK) {
        free(launch);
        return st;
    }
    warn_if_bound(&info);
    *out = launch;
    return BL_OK;
}

int bl_launch_rank(const bl_launch *launch)
{
    return launch ? bl_wire_rank(launch->wire) : 0;
}

int bl_launch_size(const bl_launch *launch)
{
    return launch ? bl_wire_size(launch->wire) : 1;
}

bl_status bl_launch_create_comm(bl_launch *launch, double deadline_s, bl_comm **out)
{
    bl_wire_set_deadline(launch->wire, deadline_s);
    return bl_comm_create_wire(launch->wire, out);
}

bool bl_launch_should_leave(bl_launch *launch)
{
    static const double PATIENCE_S =
        0.5; /* mpirun kills a second after the first process has left */
    bl_error error;

    if (!launch) return false;
    bl_wire_first_error(launch->wire, &error);
    if (error.status == BL_OK) return false;
    if (launch->told_s == 0.0) launch->told_s = bl_now_s();
    return bl_now_s() - launch->told_s > PATIENCE_S;
}

/* mpirun sends SIGTERM as soon as one process has left with a failure; this one has its own way to end. */
static void block_sigterm(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

void bl_launch_leave(bl_launch *launch)
{
    bl_launch_leave_fn leave = launch->leave;

    leave(bl_launch_close(launch, BL_ECANCELLED));
}

bl_status bl_launch_close(bl_launch *launch, bl_status st)
{
    /* The first process to leave with a failure has mpirun end the others, and drop what it has not yet read.
     */
    const struct timespec time_to_read = {0, 200 * 1000 * 1000};
    bl_error own, first;

    if (!launch) return st;
    bl_error_save(&own, st);
    block_sigterm();
    bl_wire_first_error(launch->wire, &first);
    if (st == BL_ESTOPPED && first.status == BL_OK && bl_wire_rank(launch->wire) == 0)
        /* All have agreed to stop, and wait at the end; what was aborted, the wire reports. */
        report_error(&own);
    if (st != BL_OK && st != BL_ESTOPPED) bl_wire_abort(launch->wire, &own);
    bl_status verdict = bl_wire_close(launch->wire);
    free(launch);
    if (verdict != BL_OK) own.status = verdict;
    if (own.status != BL_OK) nanosleep(&time_to_read, NULL);
    own.text[0] = '\0';
    return bl_error_restore(&own);
}
