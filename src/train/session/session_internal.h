/* SPDX-License-Identifier: Apache-2.0 */
/* session_internal.h -- a session, its adapters, and the requests that wait for its thread. */
#ifndef BALLAST_TRAIN_SESSION_SESSION_INTERNAL_H
#define BALLAST_TRAIN_SESSION_SESSION_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>

#include "train/rank/ranks.h"
#include "train/session.h"

/* The session's thread alone uses all but `session` and `next`. */
struct bl_session_adapter {
    bl_session *session;
    bl_train_config *config;
    bl_job job;
    bl_rank rank; /* borrows the session's */
    int64_t n_updates;
    int64_t n_samples;  /* rows since the last update: dropout's sample numbers */
    int64_t n_calls;    /* with gradients since then */
    int64_t last_visit; /* bl_session.n_visits at its last one; 0: none */
    bl_session_adapter *next;
};

/* A call that goes through the layers. Token t of row i is at[i] + t in `values` and `gradient`. */
typedef struct session_visit {
    const bl_session_row *rows;
    int64_t n_rows;
    const bl_session_loss *loss; /* NULL: forward alone */
    float *const *logp;          /* the caller's; NULL: not wanted */
    bl_session_result result;
    int64_t T_max, n_micro; /* T_max: tokens of the largest micro-batch */
    int64_t *at;            /* [n_rows] */
    bool has_begun;
    bl_batches *batches;
    bl_twin *sum;    /* a double: -sum_t w_t log p_t */
    bl_twin *values; /* [n_micro][T_max]: log p_t */
    float *gradient; /* of custom: [n_micro][T_max], dL/d log p_t */
    double divisor;  /* D */
    double weighed;  /* sum of a weighed loss, without 1 / D */
} session_visit;

enum { SESSION_NO_CALL, SESSION_WANTS_CALL, SESSION_CALLED };

typedef struct session_request {
    bl_session_adapter *adapter;                /* NULL: the session's */
    bl_status (*run)(struct session_request *); /* NULL: through the layers, with `visit` */
    session_visit *visit;
    bl_session *session;
    void *user; /* of run */
    int call;   /* of a custom loss: asks the waiting thread to run fn */
    bl_error called;
    bool is_done;
    bl_error error;
    struct session_request *next;
} session_request;

/* Micro-batches of a request in the pass under way: its `first` to first + n - 1. */
typedef struct session_part {
    session_request *request;
    int first, n, at;
} session_part;

struct bl_session {
    bl_train_config *config;
    bl_job job;
    bl_ranks ranks;
    bl_rank *rank; /* the one */
    pid_t pid;
    bl_pass_micro *micro; /* [pass.max_group] */
    session_part *part;   /* [pass.max_group] */
    int n_micro, n_parts;
    bl_session_adapter *adapters;
    int64_t n_passes;
    int64_t n_visits; /* calls of train_session_run_visits */
    double visit_s;   /* time of the last one */

    pthread_mutex_t mutex; /* of what follows; `changed` is broadcast */
    pthread_cond_t changed;
    session_request *waiting; /* in their order */
    bool is_ready, is_closing;
    bl_error broken;         /* of the base; BL_OK: none */
    bl_tokenizer *tokenizer; /* NULL: not read yet, or there is none */
};

/* session.c: gives the request to the session's thread and waits. */
bl_status train_session_submit(bl_session *session, session_request *request);
/* session.c. BL_EUSAGE: of a forked process, or the function of a custom loss. */
bl_status train_session_check_caller(const bl_session *session);
/* text.c: *out NULL: the model has none. Any thread. */
bl_status train_session_tokenizer(bl_session *session, const bl_tokenizer **out);
/* On the session's thread, in a visit: runs fn of the request's custom loss on the thread that
 * waits. */
bl_status train_session_call(session_request *request);

/* rows.c. Any thread: checks rows and loss, and computes their places. BL_EUSAGE names the
 * argument. train_session_free_visit in any case. */
bl_status train_session_check_visit(const bl_session *session, session_visit *visit);
/* Allocates and fills what the visit has on the device. */
bl_status train_session_begin_visit(bl_session_adapter *adapter, session_visit *visit);
/* Whether token t of the row is in the sums of the loss. */
bool train_session_token_counts(const bl_session_row *row, int64_t t);
/* Whether the loss is a function of log-probabilities that the pass's weigher has. */
bool train_session_is_weighed(const session_visit *visit);
/* After the passes, with idle streams: the results, for the caller. BL_ENUMERIC. */
bl_status train_session_end_visit(bl_session_adapter *adapter, session_visit *visit);
void train_session_free_visit(session_visit *visit);

/* visit.c: requests[n], of an adapter each, through the layers; sets their errors. Returns the
 * error of the base. */
bl_status train_session_run_visits(bl_session *session, session_request **requests, int n);

/* adapter.c, on the session's thread. */
void train_session_free_adapter(bl_session_adapter *adapter);
/* The gradients since the last update become zero. */
bl_status train_session_drop_gradients(bl_session_adapter *adapter);
/* Creates an adapter of these keys, and fills it: from a checkpoint's directory, or NULL: fresh. */
bl_status train_session_create_adapter(bl_session *session, bl_train_config *config,
                                       const char *dir, bl_session_adapter **out);

#endif
