/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c -- the half of a communicator that all kinds share: argument checks, labels for errors,
 * and dispatch. */
#include "comm/backend.h"

#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/sum_internal.h"

static const char *kind_name(bl_comm_kind kind)
{
    static const char *const names[] = {
        [BL_COMM_ALL_GATHER] = "all_gather",   [BL_COMM_REDUCE_SCATTER] = "reduce_scatter",
        [BL_COMM_ALL_REDUCE] = "all_reduce",   [BL_COMM_BROADCAST] = "broadcast",
        [BL_COMM_BARRIER] = "barrier",         [BL_COMM_SPLIT] = "split",
        [BL_COMM_TRUST_ORDER] = "trust_order",
    };
    return (size_t)kind < BL_COUNT(names) ? names[kind] : "an unknown collective";
}

const char *bl_comm_call_name(const bl_comm_call *call, char text[BL_COMM_CALL_TEXT_BYTES])
{
    bool has_label = call->label.text[0] != '\0';
    snprintf(text, BL_COMM_CALL_TEXT_BYTES, "%s%s%.*s", kind_name(call->kind),
             has_label ? " of " : "", BL_COMM_LABEL_BYTES - 1, call->label.text);
    return text;
}

void bl_comm_set_label(bl_comm *comm, const char *what, int64_t index)
{
    if (!what)
        comm->label.text[0] = '\0';
    else if (index < 0)
        snprintf(comm->label.text, sizeof comm->label.text, "%s", what);
    else
        snprintf(comm->label.text, sizeof comm->label.text, "%s %lld", what, (long long)index);
}

bl_status bl_comm_verify_calls(int rank_a, const bl_comm_call *a, int rank_b, const bl_comm_call *b)
{
    char a_name[BL_COMM_CALL_TEXT_BYTES], b_name[BL_COMM_CALL_TEXT_BYTES];

    if (a->kind == b->kind && a->bytes == b->bytes && a->detail == b->detail &&
        strncmp(a->label.text, b->label.text, BL_COMM_LABEL_BYTES) == 0)
        return BL_OK;
    return BL_FAIL(
        BL_EINTERNAL,
        "ranks %d and %d call different collectives: %s, %zu bytes (%d), and %s, %zu bytes (%d)",
        rank_a, rank_b, bl_comm_call_name(a, a_name), a->bytes, a->detail,
        bl_comm_call_name(b, b_name), b->bytes, b->detail);
}

int bl_comm_rank(const bl_comm *comm)
{
    return comm->rank;
}

int bl_comm_size(const bl_comm *comm)
{
    return comm->size;
}

bl_status bl_comm_set_sum_block(bl_comm *comm, int n_ranks)
{
    if (n_ranks < 1) return BL_FAIL(BL_EUSAGE, "sums in blocks of %d ranks", n_ranks);
    comm->sum_block = n_ranks;
    return comm->backend->resize ? comm->backend->resize(comm) : BL_OK;
}

int64_t bl_comm_sum_received(const bl_comm *comm, int64_t bytes)
{
    comm_blocks blocks = comm_blocks_of(comm->size, comm->sum_block);
    return bytes * comm_blocks_received(&blocks, comm->rank);
}

/* Offsets up to factor * n * unit_bytes must be representable. */
static bl_status check_count(const char *what, int64_t n, size_t unit_bytes, int factor)
{
    size_t bytes;
    if (n < 0 || bl_mul_overflows((size_t)n, unit_bytes, &bytes) ||
        bl_mul_overflows(bytes, (size_t)factor, &bytes))
        return BL_FAIL(BL_EINTERNAL, "%s of %lld elements", what, (long long)n);
    return BL_OK;
}

_Static_assert(sizeof(bl_comm_task) <= BL_STREAM_ARGS_BYTES, "a stream's task has room for it");

static bl_status run(bl_stream *stream, bl_comm_task task)
{
    task.call.label = task.comm->label;
    return task.comm->backend->run(stream, &task);
}

bl_status bl_comm_all_gather(bl_comm *comm, bl_stream *stream, const void *send, void *recv,
                             size_t bytes)
{
    size_t total_bytes;
    if (bl_mul_overflows(bytes, (size_t)comm->size, &total_bytes))
        return BL_FAIL(BL_EINTERNAL, "all_gather of %zu bytes a rank", bytes);
    return run(stream, (bl_comm_task){.comm = comm,
                                      .call = {.kind = BL_COMM_ALL_GATHER, .bytes = bytes},
                                      .send = send,
                                      .recv = recv});
}

bl_status bl_comm_reduce_scatter_f32(bl_comm *comm, bl_stream *stream, const float *send,
                                     float *recv, int64_t n)
{
    BL_TRY(check_count("reduce_scatter", n, sizeof *send, comm->size));
    return run(stream, (bl_comm_task){.comm = comm,
                                      .call = {.kind = BL_COMM_REDUCE_SCATTER,
                                               .detail = BL_COMM_F32,
                                               .bytes = (size_t)n * sizeof *send},
                                      .send = send,
                                      .recv = recv,
                                      .n = n});
}

static bl_status all_reduce(bl_comm *comm, bl_stream *stream, void *values, int64_t n,
                            bl_comm_element element)
{
    size_t unit_bytes = comm_sum_element_bytes(element);

    BL_TRY(check_count("all_reduce", n, unit_bytes, 1));
    return run(stream, (bl_comm_task){.comm = comm,
                                      .call = {.kind = BL_COMM_ALL_REDUCE,
                                               .detail = (int)element,
                                               .bytes = (size_t)n * unit_bytes},
                                      .send = values,
                                      .recv = values,
                                      .n = n});
}

bl_status bl_comm_all_reduce_f32(bl_comm *comm, bl_stream *stream, float *values, int64_t n)
{
    return all_reduce(comm, stream, values, n, BL_COMM_F32);
}

bl_status bl_comm_all_reduce_f64(bl_comm *comm, bl_stream *stream, double *values, int64_t n)
{
    return all_reduce(comm, stream, values, n, BL_COMM_F64);
}

bl_status bl_comm_all_reduce_i64(bl_comm *comm, bl_stream *stream, int64_t *values, int64_t n)
{
    return all_reduce(comm, stream, values, n, BL_COMM_I64);
}

bl_status bl_comm_broadcast(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes, int root)
{
    if (root < 0 || root >= comm->size)
        return BL_FAIL(BL_EINTERNAL, "broadcast from rank %d of %d", root, comm->size);
    return run(stream,
               (bl_comm_task){.comm = comm,
                              .call = {.kind = BL_COMM_BROADCAST, .detail = root, .bytes = bytes},
                              .send = buffer,
                              .recv = buffer});
}

bl_status bl_comm_barrier(bl_comm *comm, bl_stream *stream)
{
    return run(stream, (bl_comm_task){.comm = comm, .call = {.kind = BL_COMM_BARRIER}});
}

bl_status bl_comm_alloc(bl_comm *comm, bl_device *device, size_t size_bytes, const char *what,
                        void **out)
{
    *out = NULL;
    if (comm && comm->backend->alloc)
        return comm->backend->alloc(comm, device, size_bytes, what, out);
    return bl_device_alloc(device, BL_SPACE_DEVICE, size_bytes, what, out);
}

bl_status bl_comm_begin_alloc(bl_comm *comm, bl_status own)
{
    return comm && comm->backend->begin_alloc ? comm->backend->begin_alloc(comm, own) : own;
}

void bl_comm_free(bl_comm *comm, bl_device *device, void *memory)
{
    if (!memory) return;
    if (comm && comm->backend->free)
        comm->backend->free(comm, device, memory);
    else
        bl_device_free(device, BL_SPACE_DEVICE, memory);
}

bl_status bl_comm_trust_order(bl_comm *comm)
{
    return comm->backend->trust_order ? comm->backend->trust_order(comm) : BL_OK;
}

void bl_comm_abort(bl_comm *comm, const bl_error *error)
{
    comm->backend->abort(comm, error);
}

void bl_comm_first_error(bl_comm *comm, bl_error *out)
{
    comm->backend->first_error(comm, out);
}

bl_status bl_comm_split(bl_comm *comm, int color, bl_comm **out)
{
    *out = NULL;
    return comm->backend->split(comm, color, out);
}

void bl_comm_destroy(bl_comm *comm)
{
    if (comm) comm->backend->destroy(comm);
}
