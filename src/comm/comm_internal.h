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

typedef struct bl_comm_backend {
    bl_status (*all_gather)(bl_comm *comm, bl_stream *stream, const void *send, void *recv,
                            size_t bytes);
    bl_status (*reduce_scatter_f32)(bl_comm *comm, bl_stream *stream, const float *send,
                                    float *recv, int64_t n);
    bl_status (*all_reduce)(bl_comm *comm, bl_stream *stream, void *values, int64_t n,
                            bl_comm_element element);
    bl_status (*broadcast)(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes, int root);
    bl_status (*barrier)(bl_comm *comm, bl_stream *stream);
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
