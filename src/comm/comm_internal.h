/* SPDX-License-Identifier: Apache-2.0 */
/* comm_internal.h -- what a kind of communicator implements. comm.c checks arguments and passes them on; a
 * kind's struct begins with struct bl_comm. */
#ifndef BALLAST_COMM_COMM_INTERNAL_H
#define BALLAST_COMM_COMM_INTERNAL_H

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bl_comm_element { BL_COMM_F32, BL_COMM_F64, BL_COMM_I64 } bl_comm_element;

typedef enum bl_comm_kind {
    BL_COMM_ALL_GATHER,
    BL_COMM_REDUCE_SCATTER,
    BL_COMM_ALL_REDUCE,
    BL_COMM_BROADCAST,
    BL_COMM_BARRIER,
    BL_COMM_SPLIT,
    BL_COMM_TRUST_ORDER
} bl_comm_kind;

/* bl_comm_set_label's: "layer 17", or "". */
enum { BL_COMM_LABEL_BYTES = 48 };
typedef struct bl_comm_label {
    char text[BL_COMM_LABEL_BYTES];
} bl_comm_label;

/* A collective of a rank. All ranks must agree, but for the label. */
typedef struct bl_comm_call {
    bl_comm_kind kind;
    int detail; /* element type or root */
    size_t bytes;
    bl_comm_label label;
    /* Its place among the calls of its rank, whose thread makes those of all communicators in one order. Not compared; set by the wire only. */
    uint64_t number;
} bl_comm_call;

/* "all_gather of layer 17" or "all_gather"; returns `text`. */
enum { BL_COMM_CALL_TEXT_BYTES = 80 };
const char *bl_comm_call_name(const bl_comm_call *call, char text[BL_COMM_CALL_TEXT_BYTES]);

/* BL_EINTERNAL, naming both, when two ranks (numbered as in the job) call different collectives. */
bl_status bl_comm_verify_calls(int rank_a, const bl_comm_call *a, int rank_b,
                               const bl_comm_call *b);

/* A collective with its arguments, which comm.c has checked. It fits into a stream's ring of arguments.
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
    /* NULL: the device's own memory. */
    bl_status (*alloc)(bl_comm *comm, bl_device *device, size_t size_bytes, const char *what,
                       void **out);
    void (*free)(bl_comm *comm, bl_device *device, void *memory);
    bl_status (*trust_order)(bl_comm *comm); /* NULL: every call is compared anyway */
} bl_comm_backend;

struct bl_comm {
    const bl_comm_backend *backend;
    int rank, size;
    bl_comm_label label; /* of the collectives to come: a backend copies it into each */
};

#ifdef __cplusplus
}
#endif

#endif
