/* SPDX-License-Identifier: Apache-2.0 */
/* test_ranks.c -- a thread per rank with its communicator, device and stream. */
#include "test_ranks.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"

typedef struct test_run {
    test_rank_fn fn;
    int n_threads;
    void *arg;
    bl_error *errors;
} test_run;

static bl_status run_rank(bl_comm *comm, void *user)
{
    const test_run *run = user;
    test_rank self = {
        .rank = bl_comm_rank(comm), .n_ranks = bl_comm_size(comm), .comm = comm, .arg = run->arg};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cpu(run->n_threads, &self.device));
    BL_TRY_GOTO(st, done, bl_stream_create(self.device, "test", &self.stream));
    BL_TRY_GOTO(st, done, run->fn(&self));
    st = bl_stream_synchronize(self.stream);
done:
    bl_error_save(&self.error, st);
    if (run->errors) run->errors[self.rank] = self.error;
    if (st != BL_OK) bl_comm_abort(comm, &self.error); /* before its stream waits for others */
    bl_stream_destroy(self.stream);
    bl_device_destroy(self.device);
    return bl_error_restore(&self.error);
}

bl_status test_ranks_run(int n_ranks, int n_threads, double deadline_s, test_rank_fn fn, void *arg,
                         bl_error *errors)
{
    test_run run = {fn, n_threads, arg, errors};
    return bl_comm_run_local(n_ranks, deadline_s, run_rank, &run);
}

bool test_ranks_miss(int n_ranks, double deadline_s, test_rank_fn fn, void *arg, const char *text,
                     bl_error *errors)
{
    enum { MAX_TRIES = 3 };
    for (int i = 0; i < MAX_TRIES; i++) {
        double start_s = bl_now_s();
        bl_status st = test_ranks_run(n_ranks, 1, deadline_s, fn, arg, errors);
        double took_s = bl_now_s() - start_s;
        if (st == BL_ERANK && strcmp(bl_error_text(), text) == 0 && took_s > 0.9 * deadline_s)
            return true;
        printf("WRONG, after %.1f s: %s: %s\n", took_s, bl_status_name(st),
               st == BL_OK ? "" : bl_error_text());
    }
    return false;
}

float test_value(int rank, int64_t index, uint64_t seed)
{
    uint64_t z =
        seed * 0x9E3779B97F4A7C15u + (uint64_t)rank * 0xD1B54A32D192ED03u + (uint64_t)index;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u; /* SplitMix64's finalizer */
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float)((double)(z >> 11) * 0x1p-52 - 1.0);
}

float test_sum(int n_ranks, int block, int64_t index, uint64_t seed)
{
    float sum = 0.0f;
    for (int first = 0; first < n_ranks; first += block) {
        float of_block = 0.0f;
        for (int r = first; r < first + block && r < n_ranks; r++)
            of_block += test_value(r, index, seed);
        sum = first == 0 ? of_block : sum + of_block;
    }
    return sum;
}
