/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's memory and windows. */
#include <string.h>

#include "nccl_fake.h"
#include "runtime.h"

/* cudaMalloc gives multiples of 256 that are none of 512 (memory.c); the bytes behind stay
 * watched. */
enum {
    PAD_BYTES = NCCL_WIN_REQUIRED_ALIGNMENT - 256,
    MEET_WINDOW = 100,
    MAX_MEMORIES = 256,
    VERSION_TELLS = 22900
};

typedef struct memory {
    uintptr_t begin, end; /* 0, 0: none */
    int n_windows;
} memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static memory memories[MAX_MEMORIES];

/* With the lock; NULL: none has it. */
static memory *find_memory(uintptr_t at)
{
    for (int i = 0; i < MAX_MEMORIES; i++)
        if (memories[i].end && at >= memories[i].begin && at < memories[i].end) return &memories[i];
    return NULL;
}

static void remember(uintptr_t begin, size_t bytes)
{
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < MAX_MEMORIES && memories[i].end) i++;
    if (i == MAX_MEMORIES) emulated_fatal("ncclMemAlloc: more than %d: not emulated", MAX_MEMORIES);
    memories[i] = (memory){begin, begin + bytes, 0};
    pthread_mutex_unlock(&lock);
}

ncclResult_t ncclMemAlloc(void **out, size_t bytes)
{
    void *room;
    *out = NULL;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (bytes == 0) return emulated_nccl_fail(ncclInvalidArgument, "ncclMemAlloc: no bytes");
    if (cudaMalloc(&room, bytes + PAD_BYTES) != cudaSuccess)
        return emulated_nccl_fail(ncclUnhandledCudaError, "Cuda failure 'out of memory'");
    uintptr_t begin = (uintptr_t)room + PAD_BYTES;
    if (begin % NCCL_WIN_REQUIRED_ALIGNMENT) emulated_fatal("ncclMemAlloc: not where it should be");
    remember(begin, bytes);
    *out = (char *)room + PAD_BYTES;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *at)
{
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (!at) return ncclSuccess;
    pthread_mutex_lock(&lock);
    memory *m = find_memory((uintptr_t)at);
    if (!m || m->begin != (uintptr_t)at) emulated_fatal("ncclMemFree: not what ncclMemAlloc gave");
    if (m->n_windows > 0) emulated_fatal("ncclMemFree: the memory has a window");
    *m = (memory){0, 0, 0};
    pthread_mutex_unlock(&lock);
    return cudaFree((char *)at - PAD_BYTES) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

/* ---- windows ---- */

int emulated_nccl_find_window(ncclComm_t comm, const void *at, size_t bytes, int64_t *offset)
{
    uintptr_t begin = (uintptr_t)at;
    *offset = 0;
    for (int i = 0; i < NCCL_MAX_WINDOWS; i++) {
        const struct ncclWindow_vidmem *w = &comm->windows[i];
        if (!w->is_symmetric || begin < w->begin || begin + bytes > w->end) continue;
        *offset = (int64_t)(begin - w->begin);
        return i;
    }
    return -1;
}

/* The offset of the window in its memory, which gets one more; -1: not of ncclMemAlloc. */
static int64_t hold_memory(uintptr_t at, size_t bytes)
{
    pthread_mutex_lock(&lock);
    memory *m = find_memory(at);
    int64_t offset = -1;
    if (m && at + bytes <= m->end) {
        offset = (int64_t)(at - m->begin);
        m->n_windows++;
    }
    pthread_mutex_unlock(&lock);
    return offset;
}

static void check_symmetry(ncclComm_t comm, int64_t said[][NCCL_WORDS])
{
    const int64_t *own = said[comm->rank];
    for (int rank = 0; rank < comm->n_ranks; rank++)
        if (memcmp(said[rank], own, 4 * sizeof *own) != 0)
            emulated_fatal("ncclCommWindowRegister: %lld bytes at offset %lld, flags %lld on rank "
                           "%d; %lld bytes at offset %lld, flags %lld on rank %d",
                           (long long)own[1], (long long)own[2], (long long)own[3], comm->rank,
                           (long long)said[rank][1], (long long)said[rank][2],
                           (long long)said[rank][3], rank);
}

static ncclResult_t register_window(ncclComm_t comm, void *at, size_t bytes, ncclWindow_t *window,
                                    int flags)
{
    int64_t said[NCCL_MAX_RANKS][NCCL_WORDS],
        words[NCCL_WORDS] = {MEET_WINDOW, (int64_t)bytes, 0, flags};
    uintptr_t begin = (uintptr_t)at;
    int i = 0;

    if (begin % NCCL_WIN_REQUIRED_ALIGNMENT)
        return emulated_nccl_fail(ncclInvalidArgument, "Window address must be aligned to %d",
                                  NCCL_WIN_REQUIRED_ALIGNMENT);
    words[2] = hold_memory(begin, bytes);
    if (words[2] < 0)
        emulated_fatal("ncclCommWindowRegister: memory that ncclMemAlloc did not give");
    ncclResult_t result = emulated_nccl_meet(&comm->member, words, UINT64_MAX, said);
    if (result != ncclSuccess) return result;
    check_symmetry(comm, said);
    while (i < NCCL_MAX_WINDOWS && comm->windows[i].end) i++;
    if (i == NCCL_MAX_WINDOWS) emulated_fatal("more than %d windows: not emulated", i);
    comm->windows[i] =
        (struct ncclWindow_vidmem){begin, begin + bytes, (flags & NCCL_WIN_COLL_SYMMETRIC) != 0};
    *window = &comm->windows[i];
    emulated_nccl_log("window %s %zu bytes flags=%d", comm->name, bytes, flags);
    return ncclSuccess;
}

/* What ncclCommRegister does: of this rank alone, and not symmetric. */
static ncclResult_t register_here(ncclComm_t comm, void *at, size_t bytes, ncclWindow_t *window)
{
    uintptr_t begin = (uintptr_t)at;
    int i = 0;

    (void)hold_memory(begin, bytes);
    while (i < NCCL_MAX_WINDOWS && comm->windows[i].end) i++;
    if (i == NCCL_MAX_WINDOWS) emulated_fatal("more than %d windows: not emulated", i);
    comm->windows[i] = (struct ncclWindow_vidmem){begin, begin + bytes, false};
    *window = &comm->windows[i];
    emulated_nccl_log("register %s %zu bytes", comm->name, bytes);
    return ncclSuccess;
}

/* Where symmetric memory is not served, the real one gives no window and no error from 2.29 on;
 * before, a handle that looks like one. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *at, size_t bytes, ncclWindow_t *window,
                                    int flags)
{
    const emulated_settings *settings = emulated_settings_get();
    ncclResult_t result = ncclSuccess;

    *window = NULL;
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (emulated_nccl_in_group()) emulated_fatal("NCCL: a window made in a group: not emulated");
    if (!at || bytes == 0)
        return emulated_nccl_fail(ncclInvalidArgument, "ncclCommWindowRegister: no memory");
    emulated_nccl_enter(comm, "ncclCommWindowRegister");
    result = emulated_nccl_fault(NCCL_AT_WINDOW);
    if (result != ncclSuccess)
        emulated_nccl_log("window %s failed", comm->name);
    else if (comm->member.n_ranks == 1)
        result =
            emulated_nccl_fail(ncclInvalidUsage, "Communicator does not support symmetric memory!");
    else if (settings->nccl_windows == EMULATED_WINDOWS_FAIL)
        result = emulated_nccl_fail(ncclInvalidUsage, "Symmetric memory is not supported");
    else if (settings->nccl_windows == EMULATED_WINDOWS_YES && comm->is_one_host)
        result = register_window(comm, at, bytes, window, flags);
    else if (settings->nccl_version < VERSION_TELLS)
        result = register_here(comm, at, bytes, window);
    emulated_nccl_exit(comm);
    return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    if (emulated_enter() != cudaSuccess) return ncclUnhandledCudaError;
    if (!window) return ncclSuccess;
    emulated_nccl_enter(comm, "ncclCommWindowDeregister");
    if (window < comm->windows || window >= comm->windows + NCCL_MAX_WINDOWS || !window->end)
        emulated_fatal("ncclCommWindowDeregister: not a window of %s", comm->name);
    pthread_mutex_lock(&lock);
    memory *m = find_memory(window->begin);
    if (m) m->n_windows--;
    pthread_mutex_unlock(&lock);
    *window = (struct ncclWindow_vidmem){0};
    emulated_nccl_exit(comm);
    return ncclSuccess;
}
