/* SPDX-License-Identifier: Apache-2.0 */
/* A fake NCCL: communicators from their start to their end. README.md lists its guarantees. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulated.h"
#include "nccl_fake.h"
#include "runtime.h"

enum { MEET_INIT = 1, MEET_SPLIT, MEET_SPLIT_IDS, MEET_FINALIZE, MEET_DESTROY };

static const unsigned CONFIG_MAGIC = 0xcafebeef;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t all;
static _Thread_local char last_error[512];

ncclResult_t emulated_nccl_fail(ncclResult_t result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    emulated_nccl_log("error %d: %s", (int)result, last_error);
    return result;
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[ncclNumResults] = {
        [ncclSuccess] = "no error",
        [ncclUnhandledCudaError] = "unhandled cuda error",
        [ncclSystemError] = "unhandled system error",
        [ncclInternalError] = "internal error",
        [ncclInvalidArgument] = "invalid argument",
        [ncclInvalidUsage] = "invalid usage",
        [ncclRemoteError] = "remote process exited or there was a network error",
        [ncclInProgress] = "NCCL operation in progress",
    };
    return (unsigned)result < ncclNumResults ? texts[result] : "unknown result code";
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = emulated_settings_get()->nccl_version;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    return emulated_nccl_make_id(id);
}

/* ---- calls ---- */

/* Each thread's own, so that its address names it. */
static _Thread_local char own_mark;

static void check_alive(ncclComm_t comm, const char *function)
{
    bool is_known = false;
    pthread_mutex_lock(&lock);
    for (ncclComm_t c = all; c; c = c->next) is_known |= c == comm;
    pthread_mutex_unlock(&lock);
    if (!is_known) emulated_fatal("%s: not a communicator", function);
    if (atomic_load(&comm->is_over))
        emulated_fatal("%s: communicator %s was destroyed or aborted", function, comm->name);
}

void emulated_nccl_enter(ncclComm_t comm, const char *function)
{
    void *nobody = NULL;
    check_alive(comm, function);
    if (!atomic_compare_exchange_strong(&comm->caller, &nobody, &own_mark))
        emulated_fatal("%s: two threads use communicator %s at once", function, comm->name);
}

void emulated_nccl_exit(ncclComm_t comm)
{
    atomic_store(&comm->caller, NULL);
}

bool emulated_nccl_is_in_call(ncclComm_t comm)
{
    return atomic_load(&comm->caller) != NULL;
}

bool emulated_nccl_has_work(ncclComm_t comm)
{
    pthread_mutex_lock(&comm->lock);
    bool has = comm->n_ended != comm->n_launched;
    pthread_mutex_unlock(&comm->lock);
    return has;
}

void emulated_nccl_drain(ncclComm_t comm)
{
    pthread_mutex_lock(&comm->lock);
    while (comm->n_ended != comm->n_launched) pthread_cond_wait(&comm->turned, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

/* ---- init ---- */

/* 2.27 has the field without NCCL_CTA_POLICY_ZERO and refuses that; older ones know no such field
 * and look at none. */
static int known_policies(void)
{
    int version = emulated_settings_get()->nccl_version;
    if (version < 22700) return ~0;
    return version < 22800 ? NCCL_CTA_POLICY_EFFICIENCY
                           : NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO;
}

static ncclResult_t read_config(const ncclConfig_t *config, ncclConfig_t *out)
{
    *out = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    if (!config) return ncclSuccess;
    if (config->magic != CONFIG_MAGIC || config->size != sizeof *config)
        return emulated_nccl_fail(
            ncclInvalidArgument,
            "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    *out = *config;
    if (config->blocking == 0)
        emulated_fatal("NCCL: communicators that do not block: not emulated");
    if (config->CTAPolicy != NCCL_CONFIG_UNDEF_INT && (config->CTAPolicy & ~known_policies()) != 0)
        return emulated_nccl_fail(ncclInvalidArgument, "Invalid config policy attribute value %d",
                                  config->CTAPolicy);
    return ncclSuccess;
}

static uint64_t hash_host(void)
{
    char id[64] = "";
    const char *text = emulated_settings_get()->host;
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    FILE *file = text ? NULL : fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (!fgets(id, sizeof id, file)) id[0] = '\0';
        fclose(file);
    }
    for (const char *c = text ? text : id; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001B3u;
    return hash;
}

/* Compares each rank's description of itself with the others'. */
static ncclResult_t compare_ranks(ncclComm_t comm, int64_t said[][NCCL_WORDS])
{
    const int64_t *own = said[comm->rank];
    comm->is_one_host = true;
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        const int64_t *other = said[rank];
        if (other[1] != own[1])
            return emulated_nccl_fail(ncclInvalidUsage,
                                      "Mismatched NCCL version detected : rank %d version %lld "
                                      "rank %d version %lld",
                                      comm->rank, (long long)own[1], rank, (long long)other[1]);
        if (other[2] != own[2]) {
            comm->is_one_host = false;
            continue;
        }
        comm->host_mask |= (uint64_t)1 << rank;
        if (rank != comm->rank && other[3] == own[3])
            return emulated_nccl_fail(
                ncclInvalidUsage,
                "Duplicate GPU detected : rank %d and rank %d both on CUDA device %llx", comm->rank,
                rank, (unsigned long long)own[3] << 12);
    }
    return ncclSuccess;
}

static ncclComm_t make_comm(const ncclConfig_t *config, int rank, int n_ranks, int device,
                            uint64_t token)
{
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) emulated_fatal("no memory for a communicator");
    comm->config = *config;
    comm->config.commName = NULL;
    comm->rank = rank;
    comm->n_ranks = n_ranks;
    comm->device = device;
    snprintf(comm->name, sizeof comm->name, "%s%s%08x", config->commName ? config->commName : "",
             config->commName ? "." : "", (unsigned)token);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->turned, NULL);
    return comm;
}

static void remember(ncclComm_t comm)
{
    pthread_mutex_lock(&lock);
    comm->next = all;
    all = comm;
    pthread_mutex_unlock(&lock);
}

/* The common part of a start and a split. */
static ncclResult_t open_comm(const ncclConfig_t *config, int device, const ncclUniqueId *id,
                              int rank, int n_ranks, ncclComm_t *out)
{
    int64_t said[NCCL_MAX_RANKS][NCCL_WORDS];
    ncclComm_t comm = make_comm(config, rank, n_ranks, device, emulated_nccl_id_token(id));
    int64_t words[NCCL_WORDS] = {MEET_INIT, emulated_settings_get()->nccl_version,
                                 (int64_t)hash_host(), emulated_physical_device(device)};
    ncclResult_t result = emulated_nccl_join(&comm->member, id, rank, n_ranks);
    if (result != ncclSuccess) {
        free(comm);
        return result;
    }
    result = emulated_nccl_meet(&comm->member, words, UINT64_MAX, said);
    emulated_nccl_forget_id(id);
    if (result == ncclSuccess) result = compare_ranks(comm, said);
    if (result != ncclSuccess) {
        emulated_nccl_leave(&comm->member, true, false);
        free(comm);
        return result;
    }
    remember(comm);
    emulated_nccl_log("init %s rank=%d n_ranks=%d device=%d max_ctas=%d policy=%d", comm->name,
                      rank, n_ranks, device, comm->config.maxCTAs, comm->config.CTAPolicy);
    *out = comm;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    ncclConfig_t own;
    *comm = NULL;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (emulated_nccl_in_group())
        emulated_fatal("NCCL: a communicator made in a group: not emulated");
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks)
        return emulated_nccl_fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank,
                                  n_ranks);
    if (n_ranks > NCCL_MAX_RANKS)
        emulated_fatal("NCCL: more than %d ranks: not emulated", NCCL_MAX_RANKS);
    ncclResult_t result = read_config(config, &own);
    if (result != ncclSuccess) return result;
    emulated_nccl_set_rank(rank);
    result = emulated_nccl_fault(NCCL_AT_INIT);
    if (result != ncclSuccess) return result;
    result = open_comm(&own, emulated_current_device(), &id, rank, n_ranks, comm);
    /* As in the real one, the environment is stronger than config.blocking. Nothing else does not
     * block here. */
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    return result == ncclSuccess && blocking && strcmp(blocking, "0") == 0 ? ncclInProgress
                                                                           : result;
}

/* ---- split ---- */

/* Rank and size in the new communicator, and who makes its id: the first by key, then by rank. */
static void find_place(const struct ncclComm *comm, int64_t said[][NCCL_WORDS], int *rank, int *n,
                       int *first)
{
    const int64_t *own = said[comm->rank];
    *rank = *n = 0;
    *first = -1;
    for (int r = 0; r < comm->n_ranks; r++) {
        if (said[r][1] != own[1]) continue;
        ++*n;
        *rank += said[r][2] < own[2] || (said[r][2] == own[2] && r < comm->rank);
        if (*first < 0 || said[r][2] < said[*first][2]) *first = r;
    }
}

static ncclResult_t split(ncclComm_t comm, int color, int key, const ncclConfig_t *config,
                          ncclComm_t *out)
{
    enum { ID_WORDS = 3 };
    int64_t said[NCCL_MAX_RANKS][NCCL_WORDS], words[NCCL_WORDS] = {MEET_SPLIT, color, key};
    ncclUniqueId id = {.internal = {0}};
    int rank, n_ranks, first;

    ncclResult_t result = emulated_nccl_meet(&comm->member, words, UINT64_MAX, said);
    if (result != ncclSuccess) return result;
    find_place(comm, said, &rank, &n_ranks, &first);
    bool makes_id = color != NCCL_SPLIT_NOCOLOR && first == comm->rank;
    if (makes_id) result = emulated_nccl_make_id(&id);
    if (result != ncclSuccess) return result;
    words[0] = MEET_SPLIT_IDS;
    memcpy(words + 1, id.internal, ID_WORDS * sizeof *words);
    result = emulated_nccl_meet(&comm->member, words, UINT64_MAX, said);
    if (result != ncclSuccess || color == NCCL_SPLIT_NOCOLOR) return result;
    memcpy(id.internal, said[first] + 1, ID_WORDS * sizeof *words);
    return open_comm(config, comm->device, &id, rank, n_ranks, out);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    ncclConfig_t own;
    *out = NULL;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (emulated_nccl_in_group()) emulated_fatal("NCCL: a split in a group: not emulated");
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        return emulated_nccl_fail(ncclInvalidArgument, "Invalid color %d", color);
    emulated_nccl_enter(comm, "ncclCommSplit");
    ncclResult_t result = emulated_nccl_fault(NCCL_AT_SPLIT);
    /* Without a configuration the new communicator inherits its parent's. */
    if (result == ncclSuccess) result = read_config(config ? config : &comm->config, &own);
    if (result == ncclSuccess) result = split(comm, color, key, &own, out);
    emulated_nccl_exit(comm);
    return result;
}

/* ---- properties of a communicator ---- */

ncclResult_t ncclCommCount(const ncclComm_t comm, int *n_ranks)
{
    check_alive(comm, "ncclCommCount");
    *n_ranks = comm->n_ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    check_alive(comm, "ncclCommCuDevice");
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    check_alive(comm, "ncclCommUserRank");
    *rank = comm->rank;
    return ncclSuccess;
}

/* ---- the end ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    check_alive(comm, "ncclCommGetAsyncError");
    ncclResult_t result = emulated_nccl_fault(NCCL_AT_ASK);
    if (result != ncclSuccess) return result;
    bool is_lost = emulated_settings_get()->nccl_reports && emulated_nccl_has_dead(&comm->member);
    *error = is_lost ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    int64_t said[NCCL_MAX_RANKS][NCCL_WORDS], words[NCCL_WORDS] = {MEET_FINALIZE};
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    emulated_nccl_enter(comm, "ncclCommFinalize");
    emulated_nccl_drain(comm);
    ncclResult_t result = emulated_nccl_meet(&comm->member, words, UINT64_MAX, said);
    emulated_nccl_exit(comm);
    return result;
}

/* Waits for its work and for the other ranks of its host, as the real one says of itself. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    int64_t said[NCCL_MAX_RANKS][NCCL_WORDS], words[NCCL_WORDS] = {MEET_DESTROY};
    if (!comm) return ncclSuccess;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    emulated_nccl_enter(comm, "ncclCommDestroy");
    ncclResult_t result = emulated_nccl_fault(NCCL_AT_DESTROY);
    if (result == ncclSuccess) {
        emulated_nccl_drain(comm);
        result = emulated_nccl_meet(&comm->member, words, comm->host_mask, said);
    }
    emulated_nccl_exit(comm);
    if (result != ncclSuccess) return result;
    emulated_nccl_log("destroy %s", comm->name);
    atomic_store(&comm->is_over, true);
    emulated_nccl_leave(&comm->member, true, false);
    return ncclSuccess;
}

/* Releases what waits, on streams and in calls of other threads, and then waits, like the real one,
 * until all its work is over: work that is behind another communicator's on some stream is not, as
 * long as that one waits; and a gather by copy engines is not as long as a rank does not come: its
 * stream waits for a word in memory, which no abort writes (2.28.9). */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    check_alive(comm, "ncclCommAbort");
    emulated_nccl_log("abort %s", comm->name);
    ncclResult_t result = emulated_nccl_fault(NCCL_AT_ABORT);
    if (result != ncclSuccess) return result;
    while (emulated_settings_get()->nccl_abort == EMULATED_ABORT_HANGS) pause();
    atomic_store(&comm->member.is_canceled, true);
    emulated_nccl_ring_bell(&comm->member, comm->rank);
    emulated_nccl_drain(comm);
    atomic_store(&comm->is_over, true);
    emulated_nccl_leave(&comm->member, false, true);
    emulated_nccl_log("aborted %s", comm->name);
    return ncclSuccess;
}
