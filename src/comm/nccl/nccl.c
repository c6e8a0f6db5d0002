/* SPDX-License-Identifier: Apache-2.0 */
/* Making and ending communicators of GPUs. A split makes a new unique id in the group's first rank
 * and sends it over the host's split, instead of ncclCommSplit: the parent may be busy meanwhile
 * and is not shared, so that each communicator can be aborted by itself (docs/design/0016). */
#include "comm/nccl/nccl.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "comm/nccl/internal.h"
#include "comm/wire.h"
#include "device/cuda/stream.h"

enum {
    /* Multiprocessors that a kernel of NCCL may take from the products beside it, of an H100's 132;
     * NCCL takes 16 to 24. Eight move a layer of 405B in less time than its products take.
     * NCCL_MAX_CTAS overrides it. */
    MAX_CTAS = 8
};

static const bl_comm_backend backend;

bool bl_comm_has_nccl(void)
{
    return true;
}

int bl_nccl_multiprocessors(const bl_comm *comm)
{
    const char *of_user = getenv("NCCL_MAX_CTAS");
    const comm_nccl *c = (const comm_nccl *)comm;

    if (comm->backend != &backend || comm->size == 1) return 0;
    if (comm_nccl_uses_copy_engines(c) && comm_nccl_uses_windows(c)) return 0;
    int n = of_user ? atoi(of_user) : 0;
    return n > 0 ? n : MAX_CTAS;
}

void bl_nccl_limit_deadline(bl_comm *comm, double most_s)
{
    comm_nccl_job *job = comm->backend == &backend ? ((comm_nccl *)comm)->job : NULL;
    if (!job || job->options.deadline_s <= most_s) return;
    atomic_store(&job->deadline_s, most_s);
    if (comm->rank == 0)
        bl_log_info("to the end of the first step a rank waits for at most %g s for another",
                    most_s);
}

bl_status comm_nccl_enter(const comm_nccl *c)
{
    cudaError_t error = cudaSetDevice(bl_cuda_device_properties(c->job->device)->index);
    return error == cudaSuccess ? BL_OK : bl_cuda_fail("cudaSetDevice", (int)error);
}

void comm_nccl_describe(char text[COMM_NCCL_TEXT_BYTES], const bl_comm_call *call, const char *name)
{
    char what[BL_COMM_CALL_TEXT_BYTES], root[32] = "";

    if (call->kind == BL_COMM_BROADCAST) snprintf(root, sizeof root, " from rank %d", call->detail);
    snprintf(text, COMM_NCCL_TEXT_BYTES, "%s%s, %zu bytes, on %s", bl_comm_call_name(call, what),
             root, call->bytes, name);
}

/* ---- state shared by the communicators of a rank ---- */

static void job_release(comm_nccl_job *job)
{
    if (--job->n_users > 0) return;
    comm_nccl_guard_close(job);
    comm_nccl_progress_close(job);
    bl_comm_destroy(job->order);
    bl_stream_destroy(job->host_stream);
    free(job->places);
    free(job);
}

/* With one user. */
static bl_status job_create(bl_device *device, const bl_nccl_options *options, comm_nccl_job **out)
{
    comm_nccl_job *job = calloc(1, sizeof *job);

    *out = NULL;
    if (!job) return BL_FAIL(BL_ENOMEM, "a communicator of GPUs");
    job->n_users = 1;
    job->device = device;
    job->options = *options;
    atomic_init(&job->deadline_s, options->deadline_s);
    snprintf(job->name, sizeof job->name, "%s", options->name ? options->name : "nccl");
    job->options.name = job->name;
    bl_status st = comm_nccl_guard_open(job);
    if (st == BL_OK) st = comm_nccl_load(&job->library);
    if (st == BL_OK) st = bl_stream_create_host(device, "nccl host", &job->host_stream);
    if (st != BL_OK) {
        job_release(job);
        return st;
    }
    *out = job;
    return BL_OK;
}

/* ---- a communicator of several ranks ---- */

/* What the first rank of a group tells the others. */
typedef struct invitation {
    ncclUniqueId id;
    int version;
} invitation;

static bl_status invite(comm_nccl *c, invitation *out)
{
    const comm_nccl_library *library = &c->job->library;

    if (c->base.rank == 0) {
        BL_TRY(comm_nccl_enter(c));
        BL_TRY(comm_nccl_check(library, (int)library->ncclGetUniqueId(&out->id), "ncclGetUniqueId",
                               c->name));
        out->version = library->version;
    }
    if (c->base.size == 1) return BL_OK;
    BL_TRY(bl_comm_broadcast(c->host, c->job->host_stream, out, sizeof *out, 0));
    BL_TRY(bl_stream_synchronize(c->job->host_stream));
    if (out->version == library->version) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "%s: its first rank has NCCL's version %d, rank %d has %d", c->name,
                   out->version, c->base.rank, library->version);
}

static bl_status join(comm_nccl *c)
{
    const comm_nccl_library *library = &c->job->library;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    invitation word = {.version = 0};

    BL_TRY(invite(c, &word));
    BL_TRY(comm_nccl_watch_open(c));
    config.blocking = 1;
    config.commName = c->name;
    config.maxCTAs = MAX_CTAS;
    if (comm_nccl_uses_copy_engines(c))
        config.CTAPolicy = NCCL_CTA_POLICY_ZERO; /* 2.27 refuses it */
    comm_nccl_progress_note(c, 1);
    if (comm_nccl_begin(c, "ncclCommInitRankConfig")) {
        bl_status st = comm_nccl_check(library,
                                       (int)library->ncclCommInitRankConfig(
                                           &c->nccl, c->base.size, word.id, c->base.rank, &config),
                                       "ncclCommInitRankConfig", c->name);
        if (st == BL_OK) comm_nccl_watch_ready(c);
        BL_TRY(comm_nccl_end(c, st));
    }
    if (atomic_load(&c->watch.is_over))
        return BL_FAIL(BL_ECANCELED, "canceled: %s was aborted as it was made", c->name);
    return BL_OK;
}

/* Called again after sum_block changes. */
static bl_status take_scratch(bl_comm *comm)
{
    comm_nccl *c = (comm_nccl *)comm;
    size_t scratch_bytes = bl_nccl_scratch_bytes(comm->size, comm->sum_block,
                                                 c->number == 0 ? c->job->options.sum_bytes : 0);

    if (comm->size == 1) return BL_OK;
    c->sum_blocks = comm_blocks_of(comm->size, comm->sum_block);
    c->part_bytes = scratch_bytes / (size_t)comm_blocks_parts_at_once(&c->sum_blocks);
    bl_device_free(c->job->device, BL_SPACE_DEVICE, c->scratch);
    c->scratch = NULL;
    BL_TRY(bl_comm_set_sum_block(c->host, comm->sum_block));
    return bl_device_alloc(c->job->device, BL_SPACE_DEVICE, scratch_bytes, "a communicator's sums",
                           (void **)&c->scratch);
}

static bl_status take_memory(comm_nccl *c)
{
    bl_device *device = c->job->device;

    BL_TRY(take_scratch(&c->base));
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, BL_NCCL_SMALL_BYTES, "a communicator's staging",
                           &c->staging));
    BL_TRY(bl_event_create(device, &c->down));
    return bl_event_create(device, &c->up);
}

static void nccl_destroy(bl_comm *comm)
{
    comm_nccl *c = (comm_nccl *)comm;
    comm_nccl_job *job = c->job;

    if (c->watch.is_open) comm_nccl_watch_close(c);
    if (c->host) (void)bl_stream_synchronize(job->host_stream); /* it uses what goes now */
    bl_event_destroy(c->down);
    bl_event_destroy(c->up);
    bl_device_free(job->device, BL_SPACE_DEVICE, c->scratch);
    bl_device_free(job->device, BL_SPACE_HOST, c->staging);
    bl_comm_destroy(c->host);
    job_release(job);
    free(c->job_ranks);
    free(c);
}

/* Which ranks of the job's first communicator the members are. */
static bl_status learn_ranks(comm_nccl *c, int job_rank)
{
    c->job_ranks = calloc((size_t)c->base.size, sizeof *c->job_ranks);
    if (!c->job_ranks) return BL_FAIL(BL_ENOMEM, "a communicator of %d GPUs", c->base.size);
    c->job_ranks[c->base.rank] = job_rank;
    if (c->base.size == 1) return BL_OK;
    BL_TRY(bl_comm_all_gather(c->host, c->job->host_stream, &c->job_ranks[c->base.rank],
                              c->job_ranks, sizeof *c->job_ranks));
    return bl_stream_synchronize(c->job->host_stream);
}

/* The path of gathers over several hosts. With one rank per host NCCL's sends no more bytes. */
static void choose_gathers(comm_nccl *c)
{
    int n = comm_nccl_spans_hosts(c) ? comm_nccl_ranks_per_host(c) : c->base.size;
    bool by_hosts = c->job->options.gathers_by_hosts && n > 1;

    c->hosts = comm_blocks_of(c->base.size, by_hosts ? n : c->base.size);
    if (!c->job->options.gathers_by_hosts || c->base.rank > 0 || c->number > 0) return;
    if (n == 0)
        bl_log_info("gather_by_hosts has no effect: ranks are not numbered host by host, with "
                    "equal numbers per host");
    else if (c->hosts.n > 1)
        bl_log_info("gather_by_hosts: each part is sent once to each of %d hosts of %d GPUs",
                    c->hosts.n, n);
}

/* The job's first one joins also where it is alone: so a machine with one GPU shows whether its
 * NCCL serves. */
static bl_status open_comm(comm_nccl *c, int job_rank)
{
    BL_TRY(learn_ranks(c, job_rank));
    if (c->number == 0) BL_TRY(comm_nccl_learn_places(c));
    if (c->base.size > 1) BL_TRY(take_memory(c));
    choose_gathers(c);
    return c->base.size > 1 || c->number == 0 ? join(c) : BL_OK;
}

/* Takes over `host`, also on failure. One more user of `job`. */
static bl_status comm_create(comm_nccl_job *job, bl_comm *host, int job_rank, comm_nccl **out)
{
    comm_nccl *c = calloc(1, sizeof *c);

    *out = NULL;
    if (!c) {
        bl_comm_destroy(host);
        return BL_FAIL(BL_ENOMEM, "a communicator of GPUs");
    }
    job->n_users++;
    c->job = job;
    c->host = host;
    c->base = (bl_comm){
        .backend = &backend, .rank = host->rank, .size = host->size, .sum_block = host->sum_block};
    c->number = job->n_made++;
    if (c->number == 0)
        snprintf(c->name, sizeof c->name, "%s", job->name);
    else
        snprintf(c->name, sizeof c->name, "%s#%d", job->name, c->number + 1);
    bl_status st = open_comm(c, job_rank);
    if (st == BL_OK) {
        *out = c;
        return BL_OK;
    }
    bl_error error;
    bl_error_save(&error, st);
    nccl_destroy(&c->base);
    return bl_error_restore(&error);
}

static bl_status nccl_split(bl_comm *comm, int color, bl_comm **out)
{
    comm_nccl *c = (comm_nccl *)comm, *made;
    bl_comm *host;

    BL_TRY(bl_comm_split(c->host, color, &host));
    BL_TRY(comm_create(c->job, host, c->job_ranks[comm->rank], &made));
    *out = &made->base;
    return BL_OK;
}

static void nccl_abort(bl_comm *comm, const bl_error *error)
{
    bl_comm_abort(((comm_nccl *)comm)->host, error);
    comm_nccl_watch_wake((comm_nccl *)comm);
}

static void nccl_first_error(bl_comm *comm, bl_error *out)
{
    bl_comm_first_error(((comm_nccl *)comm)->host, out);
}

static const bl_comm_backend backend = {
    .run = comm_nccl_run,
    .abort = nccl_abort,
    .first_error = nccl_first_error,
    .split = nccl_split,
    .destroy = nccl_destroy,
    .begin_alloc = comm_nccl_begin_alloc,
    .alloc = comm_nccl_alloc,
    .free = comm_nccl_free,
    .trust_order = comm_nccl_trust_order,
    .resize = take_scratch,
};

static void log_version(const comm_nccl *c)
{
    int version = c->job->library.version;
    if (c->base.rank > 0) return;
    bl_log_info("NCCL %d.%d.%d between %d GPUs", version / 10000, version / 100 % 100,
                version % 100, c->base.size);
}

bl_status bl_comm_create_nccl(bl_comm *host_world, bl_device *device,
                              const bl_nccl_options *options, bl_comm **out)
{
    comm_nccl_job *job;
    comm_nccl *c;
    bl_comm *host;

    *out = NULL;
    if (bl_device_get_kind(device) != BL_DEVICE_CUDA)
        return BL_FAIL(BL_EINTERNAL, "a communicator of GPUs for a device that is none");
    if (bl_comm_size(host_world) > 1 && !bl_wire_comm_is(host_world))
        return BL_FAIL(BL_EINTERNAL, "a communicator of GPUs over ranks of one process");
    BL_TRY(job_create(device, options, &job));
    bl_status st = comm_nccl_progress_open(job, bl_comm_rank(host_world));
    if (st == BL_OK && options->compares_calls && bl_comm_size(host_world) > 1)
        st = bl_comm_split(host_world, 0, &job->order);
    if (st == BL_OK) st = bl_comm_split(host_world, 0, &host);
    if (st == BL_OK) st = comm_create(job, host, bl_comm_rank(host_world), &c);
    job_release(job); /* the communicator is its user */
    BL_TRY(st);
    log_version(c);
    *out = &c->base;
    return BL_OK;
}
