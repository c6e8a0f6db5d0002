/* SPDX-License-Identifier: Apache-2.0 */
/* mpi.c -- one exchange between processes that mpirun or srun has started, by MPI. The only file
 * that knows MPI.
 *
 * Open MPI listens on TCP ports and waits without a limit for any process that connects there,
 * until it is finalized. So a thread makes all calls of MPI; this process waits for it up to a
 * limit, and continues after the exchange even if MPI_Finalize hangs. */
#include <mpi.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "job/tcp/tcp.h"

/* After the exchange; MPI's end takes some milliseconds. */
static const double END_S = 20.0;

typedef enum mpi_stage { STARTING, EXCHANGED, ENDED } mpi_stage;

/* Of the thread and the one that waits; where the thread hangs it stays. */
typedef struct exchange {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    mpi_stage stage;
    bl_error error;
    int rank, n;
    size_t n_bytes;
    unsigned char *own, *all;
} exchange;

bl_status job_mpi_check(const bl_launch_info *info)
{
#ifdef OPEN_MPI
    static const char *const names[] = {"PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD",
                                        "PMI2_RANK"};

    if (strcmp(info->launcher, "srun") != 0) return BL_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "srun started %d tasks without PMIx, by which MPI finds the others: add "
                   "--mpi=pmix to srun (`srun --mpi=list` shows what it has)",
                   info->n_processes);
#else
    (void)info;
    return BL_OK;
#endif
}

/* ---- the thread ---- */

static bl_status check_mpi(int code, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return BL_OK;
    MPI_Error_string(code, text, &length);
    return BL_FAIL(BL_ERANK, "%s: %s", call, text);
}

static bl_status exchange_all(exchange *x)
{
    int provided, n, rank;

    BL_TRY(
        check_mpi(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread"));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (n != x->n || rank != x->rank)
        return BL_FAIL(BL_EUSAGE,
                       "the launcher started %d processes but MPI sees %d: start them with the MPI "
                       "that this build "
                       "uses (its mpirun, or srun --mpi=pmix)",
                       x->n, n);
    return check_mpi(MPI_Allgather(x->own, (int)x->n_bytes, MPI_BYTE, x->all, (int)x->n_bytes,
                                   MPI_BYTE, MPI_COMM_WORLD),
                     "MPI_Allgather");
}

static void come_to(exchange *x, mpi_stage stage, bl_status st)
{
    pthread_mutex_lock(&x->lock);
    x->stage = stage;
    if (st != BL_OK) bl_error_save(&x->error, st);
    pthread_cond_signal(&x->moved);
    pthread_mutex_unlock(&x->lock);
}

static void *exchange_main(void *argument)
{
    exchange *x = argument;
    int is_started = 0;

    prctl(PR_SET_NAME, "mpi");
    bl_status st = exchange_all(x);
    come_to(x, EXCHANGED, st);
    MPI_Initialized(&is_started);
    if (is_started) MPI_Finalize();
    come_to(x, ENDED, BL_OK);
    return NULL;
}

/* ---- the process ---- */

static void free_exchange(exchange *x)
{
    pthread_cond_destroy(&x->moved);
    pthread_mutex_destroy(&x->lock);
    free(x->own);
    free(x->all);
    free(x);
}

static exchange *create_exchange(const bl_launch_info *info, const void *own, size_t n_bytes)
{
    exchange *x = calloc(1, sizeof *x);

    if (!x) return NULL;
    bl_condition_init(&x->moved);
    pthread_mutex_init(&x->lock, NULL);
    x->rank = info->rank;
    x->n = info->n_processes;
    x->n_bytes = n_bytes;
    x->own = malloc(n_bytes);
    x->all = calloc((size_t)x->n, n_bytes);
    if (x->own && x->all) {
        memcpy(x->own, own, n_bytes);
        return x;
    }
    free_exchange(x);
    return NULL;
}

/* False: the limit is over. Under the lock. */
static bool wait_for_stage(exchange *x, mpi_stage stage, double limit_s)
{
    double until_s = bl_now_s() + limit_s, left_s;

    while (x->stage < stage && (left_s = until_s - bl_now_s()) > 0)
        (void)bl_condition_wait(&x->moved, &x->lock, left_s);
    return x->stage >= stage;
}

/* Before MPI starts; the user's own choice is kept. */
static void configure_mpi(const bl_launch_info *info)
{
    const char *interface = getenv("BALLAST_INTERFACE");

    /* A process that waits yields its core. */
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    if (info->n_local == info->n_processes) { /* shared memory: no port is opened */
        setenv("OMPI_MCA_btl", "^tcp,ofi", 0);
        setenv("OMPI_MCA_mtl", "^ofi", 0);
    } else if (interface && interface[0])
        setenv("OMPI_MCA_btl_tcp_if_include", interface, 0);
}

bl_status job_mpi_gather(const bl_launch_info *info, const void *own, void *all, size_t n_bytes,
                         double limit_s)
{
    exchange *x = create_exchange(info, own, n_bytes);
    pthread_t thread;

    if (!x) return BL_FAIL(BL_ENOMEM, "the addresses of %d processes", info->n_processes);
    configure_mpi(info);
    if (bl_thread_create(&thread, exchange_main, x) != 0) {
        free_exchange(x);
        return BL_FAIL(BL_ELIMIT, "MPI: no more threads");
    }
    pthread_mutex_lock(&x->lock);
    bool is_exchanged = wait_for_stage(x, EXCHANGED, limit_s),
         is_ended = is_exchanged && wait_for_stage(x, ENDED, END_S);
    bl_error error = x->error;
    if (is_exchanged) memcpy(all, x->all, (size_t)x->n * n_bytes);
    pthread_mutex_unlock(&x->lock);
    if (is_ended) {
        pthread_join(thread, NULL);
        free_exchange(x);
    } else {
        pthread_detach(thread);
    }
    if (!is_exchanged)
        return BL_FAIL(BL_ERANK,
                       "MPI did not start within %.0f s: a process did not come, or a stranger "
                       "holds one of MPI's ports",
                       limit_s);
    if (!is_ended)
        bl_log_warning("MPI has not ended within %.0f s; the job goes on without it", END_S);
    return bl_error_restore(&error);
}
