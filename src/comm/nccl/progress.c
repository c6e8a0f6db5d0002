/* SPDX-License-Identifier: Apache-2.0 */
/* How far the ranks of a host are on each communicator, in memory that they share: so that a
 * deadline names the rank that did not come, not the one that waited for it. A rank writes its own
 * row; any thread may read. */
#include <stdatomic.h>

#include "base/clock.h"
#include "comm/nccl/internal.h"

/* Further communicators are not counted; a training has three. */
enum { N_COUNTED = 14 };

typedef struct row {
    _Atomic int64_t job_rank; /* + 1; 0: not there yet */
    _Atomic double alive_s;   /* CLOCK_MONOTONIC, which a host has one of; set before job_rank */
    _Atomic uint64_t n_steps[N_COUNTED]; /* by the communicator's number */
} row;

static size_t piece_bytes(const bl_host_memory *memory)
{
    return (size_t)bl_host_memory_size(memory) * sizeof(row);
}

bl_status comm_nccl_progress_open(comm_nccl_job *job, int job_rank)
{
    bl_host_memory *memory = job->options.host_memory;

    if (!memory) return BL_OK;
    BL_TRY(bl_host_memory_take(memory, piece_bytes(memory), "progress on GPUs", &job->progress));
    job->progress_bytes = piece_bytes(memory);
    job->progress_row = bl_host_memory_rank(memory);
    comm_nccl_progress_beat(job, bl_now_s());
    atomic_store(&((row *)job->progress)[job->progress_row].job_rank, job_rank + 1);
    return BL_OK;
}

void comm_nccl_progress_close(comm_nccl_job *job)
{
    bl_host_memory_return(job->progress, job->progress_bytes);
}

void comm_nccl_progress_note(comm_nccl *c, uint64_t n_steps)
{
    row *rows = c->job->progress;
    if (!rows || c->number >= N_COUNTED) return;
    atomic_store_explicit(&rows[c->job->progress_row].n_steps[c->number], n_steps,
                          memory_order_relaxed);
}

static bool is_member(const comm_nccl *c, int64_t job_rank)
{
    for (int i = 0; i < c->base.size; i++)
        if (c->job_ranks[i] == job_rank) return true;
    return false;
}

int comm_nccl_progress_find(const comm_nccl *c, uint64_t n_steps, uint64_t *reached)
{
    row *rows = c->job->progress;
    int last = -1;

    *reached = n_steps;
    if (!rows || c->number >= N_COUNTED) return -1;
    for (size_t i = 0; i < c->job->progress_bytes / sizeof *rows; i++) {
        int64_t job_rank = atomic_load(&rows[i].job_rank) - 1;
        uint64_t n = atomic_load_explicit(&rows[i].n_steps[c->number], memory_order_relaxed);
        if (n >= *reached || !is_member(c, job_rank)) continue;
        *reached = n;
        last = (int)job_rank;
    }
    return last;
}

void comm_nccl_progress_beat(const comm_nccl_job *job, double now_s)
{
    row *rows = job->progress;
    if (rows) atomic_store_explicit(&rows[job->progress_row].alive_s, now_s, memory_order_relaxed);
}

int comm_nccl_progress_find_silent(const comm_nccl *c, double since_s)
{
    row *rows = c->job->progress;

    for (size_t i = 0; rows && i < c->job->progress_bytes / sizeof *rows; i++) {
        int64_t job_rank = atomic_load(&rows[i].job_rank) - 1;
        double alive_s = atomic_load_explicit(&rows[i].alive_s, memory_order_relaxed);
        if (alive_s < since_s && is_member(c, job_rank)) return (int)job_rank;
    }
    return -1;
}
