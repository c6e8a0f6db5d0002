/* SPDX-License-Identifier: Apache-2.0 */
/* order.c -- for debugging (bl_nccl_options.compares_calls): compares the order of launches before
 * anything can hang. Until the job trusts its order, a rank sends its next launch on a communicator
 * to all other ranks of it, and receives theirs: pairwise, over one channel of the host for all
 * communicators. So two ranks that are about to launch on different communicators notice it too, if
 * each of the two has the other. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "comm/nccl/internal.h"
#include "comm/wire.h"

/* What a rank says before a launch; without holes, so that all of it may be compared and sent. */
typedef struct announcement {
    int64_t number; /* of the communicator */
    int64_t kind, detail;
    uint64_t bytes;
    char name[2 * COMM_NCCL_NAME_BYTES];
    bl_comm_label label;
} announcement;

static void describe(char text[COMM_NCCL_TEXT_BYTES], const announcement *a)
{
    bl_comm_call call = {.kind = (bl_comm_kind)a->kind,
                         .detail = (int)a->detail,
                         .bytes = (size_t)a->bytes,
                         .label = a->label};
    comm_nccl_describe(text, &call, a->name);
}

static bl_status complain(comm_nccl *c, int peer, const announcement *own,
                          const announcement *theirs)
{
    char here[COMM_NCCL_TEXT_BYTES], there[COMM_NCCL_TEXT_BYTES];
    bl_error error;
    int rank = c->job_ranks[c->base.rank];

    describe(here, own);
    describe(there, theirs);
    bool is_lower = rank < peer; /* both ranks say the same */
    bl_error_save(&error,
                  BL_FAIL(BL_EINTERNAL, "ranks %d and %d launch different collectives: %s, and %s",
                          is_lower ? rank : peer, is_lower ? peer : rank, is_lower ? here : there,
                          is_lower ? there : here));
    bl_comm_abort(c->host, &error);
    return bl_error_restore(&error);
}

static bl_status tell(comm_nccl *c, const bl_comm_call *call, const announcement *own,
                      announcement *theirs, int *peers)
{
    int size = c->base.size, n = 0;

    for (int i = 1; i < size; i++) peers[n++] = c->job_ranks[(c->base.rank + i) % size];
    BL_TRY(bl_wire_comm_tell(c->job->order, call, n, peers, own, theirs, sizeof *own));
    for (int i = 0; i < n; i++)
        if (memcmp(&theirs[i], own, sizeof *own) != 0)
            return complain(c, peers[i], own, &theirs[i]);
    return BL_OK;
}

bl_status comm_nccl_compare(comm_nccl *c, const bl_comm_call *call)
{
    announcement own;
    size_t n = (size_t)c->base.size;

    if (!c->job->order || c->base.size == 1) return BL_OK;
    memset(&own, 0, sizeof own);
    own.number = c->number;
    own.kind = call->kind;
    own.detail = call->detail;
    own.bytes = call->bytes;
    strcpy(own.name, c->name);
    strcpy(own.label.text, call->label.text); /* bytes after its end have no meaning */
    announcement *theirs = calloc(n, sizeof *theirs);
    int *peers = calloc(n, sizeof *peers);
    bl_status st = theirs && peers ? tell(c, call, &own, theirs, peers)
                                   : BL_FAIL(BL_ENOMEM, "comparing the order of %zu ranks", n);
    free(peers);
    free(theirs);
    return st;
}

/* Itself a call that all ranks of the communicator make at the same place. */
bl_status comm_nccl_trust_order(bl_comm *comm)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {.kind = BL_COMM_TRUST_ORDER, .label = comm->label};

    BL_TRY(comm_nccl_compare(c, &call));
    bl_comm_destroy(c->job->order);
    c->job->order = NULL;
    double limited_s = atomic_exchange(&c->job->deadline_s, c->job->options.deadline_s);
    if (comm->rank == 0 && limited_s != c->job->options.deadline_s)
        bl_log_info("a rank waits for at most %g s for another from now on",
                    c->job->options.deadline_s);
    return BL_OK;
}
