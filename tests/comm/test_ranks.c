/* SPDX-License-Identifier: Apache-2.0 */
#include "test_ranks.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct rank_thread {
    test_rank self;
    test_rank_fn fn;
    int n_threads;
    pthread_t thread;
} rank_thread;

static void *rank_main(void *argument)
{
    rank_thread *t = argument;
    test_rank *self = &t->self;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cpu(t->n_threads, &self->device));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "test", &self->stream));
    BL_TRY_GOTO(st, done, t->fn(self));
    st = bl_stream_synchronize(self->stream);
done:
    bl_error_save(&self->error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &self->error);
    bl_stream_destroy(self->stream);
    bl_device_destroy(self->device);
    return NULL;
}

bl_status test_ranks_run(int n_ranks, int n_threads, double deadline_s, test_rank_fn fn, void *arg,
                         bl_error *errors)
{
    rank_thread *threads = calloc((size_t)n_ranks, sizeof *threads);
    bl_comm **comms = calloc((size_t)n_ranks, sizeof *comms);
    bl_error first = {.status = BL_OK};
    bl_status st = BL_OK;

    if (!threads || !comms) {
        st = BL_FAIL(BL_ENOMEM, "%d test ranks", n_ranks);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_comm_create_local(n_ranks, deadline_s, comms));
    for (int i = 0; i < n_ranks; i++) {
        threads[i] =
            (rank_thread){.self = {.rank = i, .n_ranks = n_ranks, .comm = comms[i], .arg = arg},
                          .fn = fn,
                          .n_threads = n_threads};
        if (pthread_create(&threads[i].thread, NULL, rank_main, &threads[i]) != 0) abort();
    }
    for (int i = 0; i < n_ranks; i++) {
        pthread_join(threads[i].thread, NULL);
        if (errors) errors[i] = threads[i].self.error;
    }
    bl_comm_first_error(comms[0], &first);
    st = first.status == BL_OK ? BL_OK : bl_error_restore(&first);
done:
    for (int i = 0; comms && i < n_ranks; i++) bl_comm_destroy(comms[i]);
    free(comms);
    free(threads);
    return st;
}

float test_value(int rank, int64_t index, uint64_t seed)
{
    uint64_t z =
        seed * 0x9E3779B97F4A7C15u + (uint64_t)rank * 0xD1B54A32D192ED03u + (uint64_t)index;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u; /* SplitMix64's finaliser */
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float)((double)(z >> 11) * 0x1p-52 - 1.0);
}
