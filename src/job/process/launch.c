/* SPDX-License-Identifier: Apache-2.0 */
/* launch.c -- a process of a job: joins its parent and the other ranks, reports its first error
 * once, and leaves within a time limit. */
#include "job/launch.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "job/internal.h"
#include "job/tcp/tcp.h"

/* ---- beginning ---- */

/* The parent may end before PR_SET_PDEATHSIG is set for this process. */
static bl_status begin_child(void)
{
    bl_launch_child child;

    BL_TRY(job_child_read(&child));
    bool has_parent = getppid() == child.parent;
    prctl(PR_SET_NAME, program_invocation_short_name); /* not "exe" */
    signal(SIGTTOU, SIG_IGN); /* it writes to a terminal whose foreground is its parent */
    void *line = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, child.line_fd, 0);
    if (line != MAP_FAILED) bl_log_share_line(line);
    job_child_free(&child);
    return has_parent ? BL_OK : BL_FAIL(BL_ERANK, "the process that started this rank is gone");
}

bl_status bl_launch_begin(bl_launch_info *out)
{
    bl_launch_read(out);
    /* A launcher that is killed cannot end us. torchrun's variables may also be set by a shell that
     * does not wait. */
    if (out->kind == BL_LAUNCH_MPI || out->kind == BL_LAUNCH_CHILD)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (out->rank > 0 || out->kind == BL_LAUNCH_CHILD) bl_log_set_silent(true);
    return out->kind == BL_LAUNCH_CHILD ? begin_child() : job_environment_check(out);
}

/* ---- opening ---- */

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

static bl_status open_child(bl_launch *launch)
{
    bl_launch_child child;

    BL_TRY(job_child_read(&child));
    launch->memory_fd = child.memory_fd;
    bl_status st = bl_wire_open_sockets(&(bl_wire_links){.rank = child.rank,
                                                         .n_processes = child.n_ranks,
                                                         .sockets = child.sockets,
                                                         .first_on_host = child.first_on_host,
                                                         .n_on_host = child.n_on_host,
                                                         .shared_fd = child.bulk_fd},
                                        job_report, &launch->wire);
    if (child.rank == 0) bl_log_set_silent(false);
    job_child_free(&child);
    return st;
}

/* Processes that were started each by itself. */
static bl_status connect_processes(bl_launch *launch, const bl_launch_options *options)
{
    static const double MEET_S =
        300.0; /* schedulers start processes of several hosts when they can */
    static const double FAILED_S = 10.0;
    const bl_launch_info *info = &launch->info;
    int *sockets = malloc((size_t)info->n_processes * sizeof *sockets);

    if (!sockets) return BL_FAIL(BL_ENOMEM, "%d connections", info->n_processes);
    bl_status st = info->kind == BL_LAUNCH_MPI
                       ? job_mpi_connect(info, &launch->key, sockets)
                       : job_torchrun_connect(info, options->secret_dir,
                                              options->has_failed ? FAILED_S : MEET_S, sockets);
    if (st == BL_OK) st = job_open_connected(info, sockets, job_report, &launch->wire);
    if (st == BL_OK && info->kind == BL_LAUNCH_MPI) warn_if_bound(info);
    free(sockets);
    return st;
}

/* A build without MPI, or a launcher that does not know it: all processes of a host detect it, and
 * only the first prints it. A launcher may end the others when one has left, so these wait until it
 * has printed. */
static bl_status leave_text_to_first(bl_status st)
{
    const struct timespec time_to_speak = {2, 0};
    bl_error error;

    bl_error_save(&error, st);
    nanosleep(&time_to_speak, NULL);
    error.text[0] = '\0';
    return bl_error_restore(&error);
}

bl_status bl_launch_open(const bl_launch_options *options, bl_launch **out)
{
    bl_launch_info info;

    *out = NULL;
    bl_launch_read(&info);
    if (info.kind == BL_LAUNCH_ALONE) return BL_OK;
    bl_launch *launch = calloc(1, sizeof *launch);
    if (!launch) return BL_FAIL(BL_ENOMEM, "the launch of %d processes", info.n_processes);
    *launch =
        (bl_launch){.info = info, .leave = options->leave, .memory_fd = -1, .told_s = BL_NEVER_S};
    bl_status st =
        info.kind == BL_LAUNCH_CHILD ? open_child(launch) : connect_processes(launch, options);
    if (st == BL_OK) {
        bl_wire_set_leave(launch->wire, launch->leave);
        *out = launch;
        return BL_OK;
    }
    free(launch);
    bl_launch_limit_exit(options->leave, st, BL_LAUNCH_EXIT_S);
    if (info.kind == BL_LAUNCH_MPI && info.local_rank > 0 && st == BL_EUSAGE)
        return leave_text_to_first(st);
    /* A child's own failure: the wire, which names ranks, is not there. */
    bool is_of_one_rank = info.kind == BL_LAUNCH_CHILD && info.rank > 0 && st != BL_EUSAGE;
    return is_of_one_rank ? bl_error_prefix(st, "rank %d", info.rank) : st;
}

int bl_launch_rank(const bl_launch *launch)
{
    return launch ? bl_wire_rank(launch->wire) : 0;
}

int bl_launch_size(const bl_launch *launch)
{
    return launch ? bl_wire_size(launch->wire) : 1;
}

int bl_launch_host_memory_fd(const bl_launch *launch)
{
    return launch ? launch->memory_fd : -1;
}

bl_status bl_launch_create_comm(bl_launch *launch, double deadline_s, bl_comm **out)
{
    bl_wire_set_deadline(launch->wire, deadline_s);
    return bl_comm_create_wire(launch->wire, out);
}

/* ---- the end ---- */

bool bl_launch_should_leave(bl_launch *launch)
{
    static const double PATIENCE_S =
        0.5; /* mpirun kills a second after the first process has left */
    bl_error error;

    if (!launch) return false;
    bl_wire_first_error(launch->wire, &error);
    if (error.status == BL_OK) return false;
    if (launch->told_s == BL_NEVER_S) launch->told_s = bl_now_s();
    return bl_now_s() - launch->told_s > PATIENCE_S;
}

/* mpirun sends SIGTERM as soon as one process has left with a failure; this one has its own way to
 * end. */
static void block_sigterm(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

/* By bl_wire_close, or bl_wire_end where threads still run. */
static bl_status end_job(const bl_launch *launch, bl_status st, bl_status (*end_wire)(bl_wire *))
{
    /* The first process to leave with a failure has mpirun end the others, and drop unread
     * output. */
    const struct timespec time_to_read = {0, 200 * 1000 * 1000};
    bl_error own, first;

    bl_error_save(&own, st);
    block_sigterm();
    bl_wire_first_error(launch->wire, &first);
    if (st == BL_ESTOPPED && first.status == BL_OK && bl_wire_rank(launch->wire) == 0)
        job_report(&own); /* all have agreed to stop, and wait at the end */
    if (st != BL_OK && st != BL_ESTOPPED) bl_wire_abort(launch->wire, &own);
    bl_status verdict = end_wire(launch->wire);
    if (verdict != BL_OK) own.status = verdict;
    if (own.status != BL_OK && launch->info.kind == BL_LAUNCH_MPI) nanosleep(&time_to_read, NULL);
    return job_end_report(own.status);
}

typedef struct exit_limit {
    bl_launch_leave_fn leave;
    bl_status st;
    double limit_s;
} exit_limit;

static void *limit_exit(void *argument)
{
    exit_limit limit = *(exit_limit *)argument;
    double until = bl_now_s() + limit.limit_s;

    free(argument);
    while (bl_now_s() < until) /* a process that was stopped does not exit at once */
        nanosleep(&(struct timespec){0, 50 * 1000 * 1000}, NULL);
    bl_log_warning("this process had done all and hung in its exit for %.0f s; it ends now",
                   limit.limit_s);
    limit.leave(limit.st);
    return NULL;
}

void bl_launch_limit_exit(bl_launch_leave_fn leave, bl_status st, double limit_s)
{
    exit_limit *limit = leave ? malloc(sizeof *limit) : NULL;
    pthread_t thread;

    if (!limit) return;
    *limit = (exit_limit){.leave = leave, .st = st, .limit_s = limit_s};
    if (bl_thread_create(&thread, limit_exit, limit) == 0)
        pthread_detach(thread);
    else
        free(limit);
}

void bl_launch_leave(bl_launch *launch)
{
    static atomic_flag is_leaving =
        ATOMIC_FLAG_INIT; /* by the main thread, or by the guard of a communicator */
    bl_launch_leave_fn leave = launch->leave;

    while (atomic_flag_test_and_set(&is_leaving)) pause(); /* the other one ends the process */
    /* Neither the wire nor the launch is freed: this process's other threads use them until it
     * ends. */
    leave(end_job(launch, BL_ECANCELED, bl_wire_end));
}

bl_status bl_launch_close(bl_launch *launch, bl_status st)
{
    if (!launch) return st;
    st = end_job(launch, st, bl_wire_close);
    bl_launch_limit_exit(launch->leave, st, BL_LAUNCH_EXIT_S);
    free(launch);
    return st;
}
