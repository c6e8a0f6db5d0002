/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives, sends and receives, groups of them. What a group holds is launched when the
 * outermost ends: for each communicator, in the order of their first use, the collectives one by
 * one, then all sends and receives as one piece of work. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counts.h"
#include "nccl_fake.h"
#include "runtime.h"

typedef struct group {
    int depth, n, room;
    ncclResult_t error;
    nccl_work **works;
} group;

static _Thread_local group pending;

bool emulated_nccl_in_group(void)
{
    return pending.depth > 0;
}

static size_t type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

static ncclResult_t check_call(ncclComm_t comm, const char *function, ncclDataType_t type, int peer,
                               cudaStream_t stream)
{
    if (type_bytes(type) == 0)
        return emulated_nccl_fail(ncclInvalidArgument, "%s: invalid type %d", function, (int)type);
    if (peer < 0 || peer >= comm->n_ranks)
        return emulated_nccl_fail(ncclInvalidArgument, "%s: invalid rank %d of %d", function, peer,
                                  comm->n_ranks);
    if (!stream || stream->device != comm->device)
        return emulated_nccl_fail(ncclInvalidArgument,
                                  "%s: the stream is not of the communicator's device", function);
    return ncclSuccess;
}

/* The real one reads and writes whatever it gets. */
static void check_memory(const char *function, const void *memory, size_t bytes)
{
    uintptr_t end = emulated_memory_end(memory);
    if (!end) emulated_fatal("%s: a buffer that is not device memory", function);
    if ((uintptr_t)memory + bytes > end)
        emulated_fatal("%s: %zu bytes, and the allocation ends after %zu", function, bytes,
                       (size_t)(end - (uintptr_t)memory));
}

static nccl_work *make_work(ncclComm_t comm, cudaStream_t stream, nccl_kind kind)
{
    nccl_work *work = calloc(1, sizeof *work);
    if (!work) emulated_fatal("no memory for a launch");
    work->comm = comm;
    work->stream = stream;
    work->kind = kind;
    return work;
}

static nccl_transfer *add_transfer(nccl_work *work, bool is_send, int peer, void *at, size_t bytes)
{
    if (work->n_transfers == work->room) {
        work->room = 2 * work->room + 8;
        work->transfers = realloc(work->transfers, (size_t)work->room * sizeof *work->transfers);
        if (!work->transfers) emulated_fatal("no memory for a launch");
    }
    nccl_transfer *t = &work->transfers[work->n_transfers++];
    *t = (nccl_transfer){.is_send = is_send, .peer = peer, .at = at, .bytes = bytes};
    return t;
}

static void add_to_group(nccl_work *work)
{
    group *g = &pending;
    if (g->n == g->room) {
        g->room = 2 * g->room + 16;
        g->works = realloc(g->works, (size_t)g->room * sizeof(nccl_work *));
        if (!g->works) emulated_fatal("no memory for a group");
    }
    for (int i = 0; i < g->n; i++)
        if (g->works[i]->comm == work->comm && g->works[i]->stream != work->stream)
            emulated_fatal("a group uses a communicator on two streams: not emulated");
    g->works[g->n++] = work;
}

/* ---- the group's end ---- */

/* Sends to oneself and receives from oneself meet at once. One copy a launch is enough for what
 * there is. */
static ncclResult_t join_own_parts(nccl_work *work)
{
    nccl_transfer *own[2] = {NULL, NULL};
    int kept = 0;
    for (int i = 0; i < work->n_transfers; i++) {
        nccl_transfer *t = &work->transfers[i];
        if (t->peer != work->comm->rank) continue;
        if (own[t->is_send]) emulated_fatal("two sends to oneself in a group: not emulated");
        own[t->is_send] = t;
    }
    if (!own[0] && !own[1]) return ncclSuccess;
    if (!own[0] || !own[1])
        return emulated_nccl_fail(ncclInvalidUsage, "Trying to %s self without a matching %s",
                                  own[1] ? "send to" : "recv from", own[1] ? "recv" : "send");
    if (own[0]->bytes != own[1]->bytes)
        return emulated_nccl_fail(ncclInvalidUsage, "%zu bytes to self, %zu from self",
                                  own[1]->bytes, own[0]->bytes);
    if (own[0]->at != own[1]->at) {
        work->copy_to = own[0]->at;
        work->copy_from = own[1]->at;
        work->copy_bytes = own[0]->bytes;
    }
    for (int i = 0; i < work->n_transfers; i++)
        if (work->transfers[i].peer != work->comm->rank)
            work->transfers[kept++] = work->transfers[i];
    work->n_transfers = kept;
    return ncclSuccess;
}

enum {
    VERSION_GATHERS = 22800, /* by copy engines */
    VERSION_MEETS = 22902,   /* without words that a driver of CUDA 13.1 does not write */
    VERSION_SENDS = 22902,   /* from memory that is in no window, too */
    DRIVER_WITHOUT_WORDS = 13010
};

/* By the sources of 2.28.9 and 2.29.2. A GPU with multicast meets otherwise; this one has none. */
static bool uses_copy_engines(const nccl_work *work)
{
    const struct ncclComm *comm = work->comm;
    int version = emulated_settings_get()->nccl_version, driver = 0;
    bool has_window = work->words[4] >= 0 && (work->words[6] >= 0 || version >= VERSION_SENDS);

    if (!has_window || !comm->is_one_host || comm->n_ranks < 2 || work->kind != NCCL_ALL_GATHER ||
        comm->config.CTAPolicy != NCCL_CTA_POLICY_ZERO || version < VERSION_GATHERS)
        return false;
    (void)cudaDriverGetVersion(&driver);
    if (version < VERSION_MEETS && driver >= DRIVER_WITHOUT_WORDS)
        emulated_fatal("ncclAllGather: NCCL %d gathers by copy engines, whose meetings a driver of "
                       "CUDA 13.1 breaks (NVIDIA/nccl, issue 2052)",
                       version);
    return true;
}

static void note_collective(nccl_work *work)
{
    const char *name = work->kind == NCCL_ALL_GATHER ? "all_gather" : "broadcast";
    work->has_copy_engines = uses_copy_engines(work);
    const char *path = work->has_copy_engines ? "copy_engine" : "kernel";
    char what[64];
    snprintf(what, sizeof what, "nccl:%s:%s", name, path);
    emulated_count(what, (size_t)work->words[1]);
    emulated_nccl_log("launch %s %s %lld root=%lld stream=%d %s", work->comm->name, name,
                      (long long)work->words[1], (long long)work->words[3],
                      emulated_nccl_stream_number(work->stream), path);
}

static void note_pairs(const nccl_work *work)
{
    char text[2048] = "";
    size_t used = 0;
    for (int i = 0; i < work->n_transfers; i++) {
        const nccl_transfer *t = &work->transfers[i];
        emulated_count(t->is_send ? "nccl:send" : "nccl:recv", t->bytes);
        if (used < sizeof text)
            used += (size_t)snprintf(text + used, sizeof text - used, " %s:%d:%zu",
                                     t->is_send ? "send" : "recv", t->peer, t->bytes);
    }
    emulated_nccl_log("launch %s pairs%s stream=%d", work->comm->name, text,
                      emulated_nccl_stream_number(work->stream));
}

static ncclResult_t launch(nccl_work *work)
{
    ncclComm_t comm = work->comm;
    ncclResult_t result = work->kind == NCCL_PAIRS ? join_own_parts(work) : ncclSuccess;
    if (result == ncclSuccess) result = emulated_nccl_fault(NCCL_AT_LAUNCH);
    if (result != ncclSuccess) {
        free(work->transfers);
        free(work);
        return result;
    }
    emulated_nccl_enter(comm, "a launch");
    if (work->kind == NCCL_PAIRS) {
        note_pairs(work);
        for (int i = 0; i < work->n_transfers; i++) {
            nccl_transfer *t = &work->transfers[i];
            t->number = t->is_send ? comm->n_sends[t->peer]++ : comm->n_receives[t->peer]++;
        }
    } else {
        note_collective(work);
        work->number = comm->n_collectives++;
    }
    pthread_mutex_lock(&comm->lock);
    work->ticket = comm->n_launched++;
    pthread_mutex_unlock(&comm->lock);
    result = emulated_nccl_give(work);
    emulated_nccl_exit(comm);
    return result;
}

/* All work of one communicator, taken out of the list: collectives before the rest. */
static void launch_of(ncclComm_t comm)
{
    group *g = &pending;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < g->n; i++) {
            nccl_work *work = g->works[i];
            if (!work || work->comm != comm || (work->kind == NCCL_PAIRS) != (pass == 1)) continue;
            g->works[i] = NULL;
            ncclResult_t result = launch(work);
            if (g->error == ncclSuccess) g->error = result;
        }
}

ncclResult_t ncclGroupStart(void)
{
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    pending.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    group *g = &pending;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (g->depth == 0) return emulated_nccl_fail(ncclInvalidUsage, "ncclGroupEnd without a start");
    if (--g->depth > 0) return ncclSuccess;
    for (int i = 0; i < g->n; i++)
        if (g->works[i]) launch_of(g->works[i]->comm);
    ncclResult_t result = g->error;
    free(g->works);
    *g = (group){0};
    return result;
}

/* A call outside of a group is a group with one member. Its error is the group's error, too. */
static ncclResult_t end_call(ncclResult_t result)
{
    if (pending.error == ncclSuccess) pending.error = result;
    ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

/* ---- calls ---- */

static void add_collective(nccl_work *work, const void *read, size_t read_bytes,
                           const void *written, size_t written_bytes, int64_t own_offset)
{
    work->words[4] = emulated_nccl_find_window(work->comm, written, written_bytes, &work->words[5]);
    work->words[6] = emulated_nccl_find_window(work->comm, read, read_bytes, &work->words[7]);
    if (work->words[6] >= 0) work->words[7] -= own_offset;
    add_to_group(work);
}

static ncclResult_t all_gather(const char *send, char *receive, size_t bytes, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream)
{
    size_t all = bytes * (size_t)comm->n_ranks;
    char *own = receive + (size_t)comm->rank * bytes;
    if (bytes == 0) return ncclSuccess;
    check_memory("ncclAllGather", send, bytes);
    check_memory("ncclAllGather", receive, all);
    if (send != own && send + bytes > receive && send < receive + all)
        emulated_fatal("ncclAllGather: the buffers overlap, and not at the own part");
    nccl_work *work = make_work(comm, stream, NCCL_ALL_GATHER);
    memcpy(work->words, (int64_t[4]){NCCL_ALL_GATHER, (int64_t)bytes, type, 0},
           4 * sizeof(int64_t));
    if (send != own) {
        work->copy_from = send;
        work->copy_to = own;
        work->copy_bytes = bytes;
    }
    for (int rank = 0; rank < comm->n_ranks && comm->n_ranks > 1; rank++)
        (void)add_transfer(
            work, rank == comm->rank, rank,
            rank == comm->rank ? (char *)(uintptr_t)send : receive + (size_t)rank * bytes, bytes);
    add_collective(work, send, bytes, receive, all, send == own ? (int64_t)(own - receive) : 0);
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    emulated_nccl_enter(comm, "ncclAllGather");
    result = check_call(comm, "ncclAllGather", type, 0, stream);
    if (result == ncclSuccess)
        result = all_gather(send, receive, send_count * type_bytes(type), type, comm, stream);
    emulated_nccl_exit(comm);
    return end_call(result);
}

static ncclResult_t broadcast(const char *send, char *receive, size_t bytes, ncclDataType_t type,
                              int root, ncclComm_t comm, cudaStream_t stream)
{
    bool is_root = comm->rank == root;
    if (bytes == 0) return ncclSuccess;
    if (is_root) check_memory("ncclBroadcast", send, bytes);
    check_memory("ncclBroadcast", receive, bytes);
    nccl_work *work = make_work(comm, stream, NCCL_BROADCAST);
    memcpy(work->words, (int64_t[4]){NCCL_BROADCAST, (int64_t)bytes, type, root},
           4 * sizeof(int64_t));
    if (is_root && send != receive) {
        work->copy_from = send;
        work->copy_to = receive;
        work->copy_bytes = bytes;
    }
    if (comm->n_ranks > 1)
        (void)add_transfer(work, is_root, root, is_root ? (char *)(uintptr_t)send : receive, bytes);
    work->words[4] = work->words[6] = -1; /* no kernel for windows */
    add_to_group(work);
    return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    emulated_nccl_enter(comm, "ncclBroadcast");
    result = check_call(comm, "ncclBroadcast", type, root, stream);
    if (result == ncclSuccess)
        result = broadcast(send, receive, count * type_bytes(type), type, root, comm, stream);
    emulated_nccl_exit(comm);
    return end_call(result);
}

/* The group's piece of pairs of this communicator. */
static nccl_work *pairs_of(ncclComm_t comm, cudaStream_t stream)
{
    for (int i = 0; i < pending.n; i++)
        if (pending.works[i]->comm == comm && pending.works[i]->stream == stream &&
            pending.works[i]->kind == NCCL_PAIRS)
            return pending.works[i];
    nccl_work *work = make_work(comm, stream, NCCL_PAIRS);
    add_to_group(work);
    return work;
}

static ncclResult_t pair(const char *function, bool is_send, void *memory, size_t count,
                         ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    emulated_nccl_enter(comm, function);
    result = check_call(comm, function, type, peer, stream);
    if (result == ncclSuccess) {
        size_t bytes = count * type_bytes(type);
        if (bytes > 0) check_memory(function, memory, bytes);
        (void)add_transfer(pairs_of(comm, stream), is_send, peer, memory, bytes);
    }
    emulated_nccl_exit(comm);
    return end_call(result);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return pair("ncclSend", true, (void *)(uintptr_t)send, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return pair("ncclRecv", false, receive, count, type, peer, comm, stream);
}
