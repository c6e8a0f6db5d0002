/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for gathered data. Where possible it is NCCL's, registered with all ranks of the
 * communicator as a symmetric window: there NCCL 2.28 gathers by copy engines, and where those
 * cannot be trusted by kernels that use few multiprocessors. NCCL rounds an allocation up to the
 * driver's granularity (2 MiB); the account has the requested size. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "base/log.h"
#include "comm/nccl/internal.h"

enum { DRIVER_WITHOUT_WORDS = 13010 };

/* From CUDA 13.1 on the driver writes no words to other GPUs' memory from a stream, by which NCCL
 * before 2.29.2 makes copy engines of GPUs without multicast meet (NVIDIA/nccl, issue 2052).
 * Multicast is not checked: NCCL can be configured not to use it. */
static bool cannot_meet(const comm_nccl_library *library)
{
    int driver = 0;
    return library->version < COMM_NCCL_VERSION_COPIES_WORDS &&
           cudaDriverGetVersion(&driver) == cudaSuccess && driver >= DRIVER_WITHOUT_WORDS;
}

/* Why a gather in a window is not the copy engines'; NULL: it is. */
static const char *why_kernels(const comm_nccl *c)
{
    const comm_nccl_library *library = &c->job->library;

    if (!c->job->options.copy_engines) return "copy engines are not asked for";
    if (library->version < COMM_NCCL_VERSION_COPY_ENGINES)
        return "this version has no gathers by copy engines (2.28 and later do)";
    if (cannot_meet(library))
        return "with a driver of CUDA 13.1 or later it takes NCCL 2.29.2 or later to gather by "
               "copy engines";
    return NULL;
}

bool comm_nccl_uses_copy_engines(const comm_nccl *c)
{
    return !why_kernels(c);
}

/* NULL: windows serve. The same on all ranks, as all of them register a window or none does. */
static const char *why_plain(const comm_nccl *c)
{
    const comm_nccl_library *library = &c->job->library;

    if (c->base.size == 1) return "a group of one gathers nothing"; /* and may have no window */
    if (!c->job->options.copy_engines) return why_kernels(c);
    /* NCCL would make a window over the network, with additional connections and device memory, for
     * gathers that use none of it. */
    if (comm_nccl_spans_hosts(c))
        return "copy engines work inside one host, and the group spans several";
    if (!library->ncclCommWindowRegister || !library->ncclCommWindowDeregister)
        return "this version has no symmetric windows (2.27 and later do)";
    return NULL;
}

bool comm_nccl_uses_windows(const comm_nccl *c)
{
    return !why_plain(c) && !c->lacks_windows;
}

/* why_plain NULL: in a window. */
static void log_path(comm_nccl *c, const char *why_plain)
{
    const char *why = why_kernels(c);

    if (c->base.rank > 0 || c->base.size == 1 || c->job->has_told_path) return;
    c->job->has_told_path = true;
    if (why_plain)
        bl_log_info("NCCL gathers by kernels: %s", why_plain);
    else if (why)
        bl_log_info("NCCL gathers by kernels, in symmetric windows: %s", why);
    else if (c->job->library.version < COMM_NCCL_VERSION_TELLS)
        bl_log_info(
            "NCCL was asked to gather by copy engines; this version does not tell whether it does");
    else
        bl_log_info("NCCL was asked to gather by copy engines, in symmetric windows");
}

static bl_status zero(comm_nccl *c, void *memory, size_t size_bytes)
{
    bl_stream *stream;

    BL_TRY(bl_stream_create(c->job->device, "zero", &stream));
    bl_status st = bl_stream_zero(stream, memory, size_bytes);
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    bl_stream_destroy(stream);
    return st;
}

/* A window that is NULL without an error says that this machine has no symmetric ones; the memory
 * serves without. Before 2.29 there is none only where nothing is registered at all: where
 * symmetric memory is not served, the window is the handle of ncclCommRegister (read in 2.28.9). */
static bl_status register_block(comm_nccl *c, comm_nccl_block *block)
{
    const comm_nccl_library *library = &c->job->library;

    if (!comm_nccl_begin(c, "ncclCommWindowRegister"))
        return BL_FAIL(BL_ECANCELED, "canceled: %s is over", c->name);
    bl_status st = comm_nccl_check(
        library,
        (int)library->ncclCommWindowRegister(c->nccl, block->memory, block->size_bytes,
                                             &block->window, NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister", c->name);
    BL_TRY(comm_nccl_end(c, st));
    if (atomic_load(&c->watch.is_over))
        return BL_FAIL(BL_ECANCELED, "canceled: %s was ended meanwhile", c->name);
    c->lacks_windows |= !block->window;
    log_path(c, block->window ? NULL : "this machine has no symmetric windows");
    return BL_OK;
}

/* The first failure in rank order, on every rank. */
static bl_status agree(comm_nccl *c, bl_status own)
{
    bl_stream *stream = c->job->host_stream;
    bl_error *all = calloc((size_t)c->base.size, sizeof *all);
    bl_error first = {.status = BL_OK};

    if (own == BL_ECANCELED || !all) {
        free(all);
        return all || own != BL_OK ? own
                                   : BL_FAIL(BL_ENOMEM, "the states of %d ranks", c->base.size);
    }
    bl_error_save(&all[c->base.rank], own);
    bl_status st = bl_comm_all_gather(c->host, stream, &all[c->base.rank], all, sizeof *all);
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    for (int i = c->base.size - 1; i >= 0; i--)
        if (all[i].status != BL_OK) first = all[i];
    free(all);
    BL_TRY(st);
    return first.status == BL_OK ? BL_OK : bl_error_restore(&first);
}

bl_status comm_nccl_begin_alloc(bl_comm *comm, bl_status own)
{
    comm_nccl *c = (comm_nccl *)comm;
    return c->nccl && !why_plain(c) ? agree(c, own) : own;
}

static void free_block(comm_nccl *c, comm_nccl_block *block)
{
    const comm_nccl_library *library = &c->job->library;
    bool is_free = !block->window && !atomic_load(&c->watch.is_over);

    if (block->window && comm_nccl_begin(c, "ncclCommWindowDeregister")) {
        (void)library->ncclCommWindowDeregister(c->nccl, block->window);
        (void)comm_nccl_end(c, BL_OK);
        is_free = true;
    }
    /* The abort of a communicator that is over takes its windows, but may still be under way on the
     * watch's thread: such memory stays until the process ends, which is about to. */
    if (is_free && block->memory) (void)library->ncclMemFree(block->memory);
    free(block);
}

static bl_status take_block(comm_nccl *c, const char *what, comm_nccl_block *block)
{
    if (c->job->library.ncclMemAlloc(&block->memory, block->size_bytes) == ncclSuccess)
        return zero(c, block->memory, block->size_bytes);
    block->memory = NULL;
    (void)cudaGetLastError();
    return BL_FAIL(BL_ENOMEM, "%s: no memory for %zu bytes (ncclMemAlloc)", what,
                   block->size_bytes);
}

static bl_status make_block(comm_nccl *c, size_t size_bytes, const char *what,
                            comm_nccl_block **out)
{
    comm_nccl_block *block = calloc(1, sizeof *block);

    bl_status st = block ? BL_OK : BL_FAIL(BL_ENOMEM, "%s", what);
    if (block) {
        block->size_bytes = size_bytes;
        st = take_block(c, what, block);
    }
    st = agree(c, st);
    if (st == BL_OK) st = register_block(c, block);
    if (st == BL_OK) {
        *out = block;
        return BL_OK;
    }
    bl_error error;
    bl_error_save(&error, st);
    if (block) free_block(c, block);
    return bl_error_restore(&error);
}

bl_status comm_nccl_alloc(bl_comm *comm, bl_device *device, size_t size_bytes, const char *what,
                          void **out)
{
    comm_nccl *c = (comm_nccl *)comm;
    comm_nccl_block *block;
    const char *why_not = why_plain(c);

    if (!c->nccl || size_bytes == 0 || why_not) {
        if (c->nccl) log_path(c, why_not);
        return bl_device_alloc(device, BL_SPACE_DEVICE, size_bytes, what, out);
    }
    BL_TRY(comm_nccl_enter(c));
    BL_TRY(make_block(c, size_bytes, what, &block));
    bl_device_adopt(device, BL_SPACE_DEVICE, size_bytes);
    block->next = c->blocks;
    c->blocks = block;
    *out = block->memory;
    return BL_OK;
}

void comm_nccl_free(bl_comm *comm, bl_device *device, void *memory)
{
    comm_nccl *c = (comm_nccl *)comm;
    comm_nccl_block **link = &c->blocks;

    while (*link && (*link)->memory != memory) link = &(*link)->next;
    if (!*link) {
        bl_device_free(device, BL_SPACE_DEVICE, memory);
        return;
    }
    comm_nccl_block *block = *link;
    *link = block->next;
    bl_device_disown(device, BL_SPACE_DEVICE, block->size_bytes);
    (void)comm_nccl_enter(c);
    free_block(c, block);
}
