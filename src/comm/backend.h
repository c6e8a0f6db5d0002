/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h -- the functions of a kind of communicator. comm.c checks arguments and passes them on;
 * a kind's struct begins with struct bl_comm. */
#ifndef BALLAST_COMM_BACKEND_H
#define BALLAST_COMM_BACKEND_H

#include "comm/call.h"
#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A collective with its arguments, which comm.c has checked. It fits into a stream's ring of
 * arguments.
 *
 *   kind            send -> recv                        call.bytes    call.detail   n
 *   ALL_GATHER      bytes -> size * bytes               of one rank
 *   REDUCE_SCATTER  size * n floats -> n floats         n * 4         BL_COMM_F32   of recv
 *   ALL_REDUCE      in place: both are the values       of all        the element   of the values
 *   BROADCAST       in place: both are the buffer       of all        the root
 *   BARRIER */
typedef struct bl_comm_task {
    bl_comm *comm;
    bl_comm_call call;
    const void *send;
    void *recv;
    int64_t n;
} bl_comm_task;

typedef struct bl_comm_backend {
    bl_status (*run)(bl_stream *stream, const bl_comm_task *task);
    void (*abort)(bl_comm *comm, const bl_error *error);
    void (*first_error)(bl_comm *comm, bl_error *out);
    bl_status (*split)(bl_comm *comm, int color, bl_comm **out);
    void (*destroy)(bl_comm *comm);
    bl_status (*begin_alloc)(bl_comm *comm, bl_status own); /* NULL: alloc is not collective */
    /* NULL: the device's own memory. */
    bl_status (*alloc)(bl_comm *comm, bl_device *device, size_t size_bytes, const char *what,
                       void **out);
    void (*free)(bl_comm *comm, bl_device *device, void *memory);
    bl_status (*trust_order)(bl_comm *comm); /* NULL: every call is compared anyway */
    /* comm->sum_block has changed: allocates the memory for its value. NULL: no memory needed. */
    bl_status (*resize)(bl_comm *comm);
} bl_comm_backend;

struct bl_comm {
    const bl_comm_backend *backend;
    int rank, size;
    int sum_block;       /* ranks per block of a sum */
    bl_comm_label label; /* of the collectives to come: a backend copies it into each */
};

#ifdef __cplusplus
}
#endif

#endif
