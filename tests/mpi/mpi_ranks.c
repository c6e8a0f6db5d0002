/* SPDX-License-Identifier: Apache-2.0 */
/* One process of a job under mpirun that runs a case of tests/comm/comm_cases.h on the communicator of all
 * processes, and ends as the program does: with the job's status as exit code, and one line of error from one
 * of them. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "comm/launch.h"
#include "comm_cases.h"

/* Rank 1 fails, the others leave in good order. */
static bl_status fail_at_the_end(test_rank *self)
{
    if (self->rank == 1) return BL_FAIL(BL_ECHECKPOINT, "checkpoint 7 is damaged");
    return BL_OK;
}

/* Ranks 1 and 2 fail at once, each by itself: the lowest rank's error is the job's. */
static bl_status two_fail(test_rank *self)
{
    if (self->rank == 2) return BL_FAIL(BL_ENUMERIC, "a loss of nan");
    if (self->rank == 1) return BL_FAIL(BL_EINPUT, "train.jsonl:3: no JSON");
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

static bl_status rank_is_stopped(test_rank *self)
{
    if (self->rank == 1) raise(SIGSTOP);
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

/* Rank 0 is stopped; rank 1 says when the others have given it up. */
static bl_status rank_is_given_up(test_rank *self)
{
    bl_error failure = {.status = BL_OK};

    if (self->rank == 0) raise(SIGSTOP);
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    while (self->rank == 1 && failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    if (self->rank == 1) fputs("has given up\n", stderr);
    return bl_stream_synchronize(self->stream);
}

/* Rank 1 computes for ever and hears nothing; the others wait for it. */
static bl_status wait_for_ever(test_rank *self)
{
    fputs("has started\n", stderr);
    while (self->rank == 1) pause();
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

static bl_status stop_together(test_rank *self)
{
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    BL_TRY(bl_stream_synchronize(self->stream));
    return BL_FAIL(BL_ESTOPPED, "stopped after step 3");
}

/* More than one piece. Whole only in a build whose pieces are small, or with the memory for it. */
static bl_status large(test_rank *self)
{
    enum { MIB = 1 << 20 };
    size_t n = (size_t)1100 * MIB, step = 4099;
    unsigned char *bytes = malloc(n);
    if (!bytes) return BL_FAIL(BL_ENOMEM, "%zu bytes", n);
    for (size_t i = 0; self->rank == 0 && i < n; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    bl_status st = bl_comm_broadcast(self->comm, self->stream, bytes, n, 0);
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    for (size_t i = n - 1; st == BL_OK && i >= step; i -= step)
        if (bytes[i] != (unsigned char)(i * 2654435761u >> 24))
            st = BL_FAIL(BL_EINTERNAL, "byte %zu differs", i);
    free(bytes);
    return st;
}

static const struct {
    const char *name;
    test_rank_fn fn;
    double deadline_s;
} cases[] = {
    {"values", comm_case_world_values, 60},
    {"negative_zero", comm_case_negative_zero, 60},
    {"split", comm_case_split_values, 60},
    {"pipeline", comm_case_run_pipeline, 60},
    {"gather_is_held", comm_case_gather_is_held, 60},
    {"abort", comm_case_one_rank_fails, 0},
    {"deadline", comm_case_two_ranks_stay_away, COMM_CASE_DEADLINE_S},
    {"deadline_of_group", comm_case_split_rank_stays_away, COMM_CASE_DEADLINE_S},
    {"other_size", comm_case_other_size, 0},
    {"other_kind", comm_case_other_kind, 0},
    {"other_root", comm_case_other_root, 0},
    {"other_element", comm_case_other_element, 0},
    {"fail_at_the_end", fail_at_the_end, 0},
    {"two_fail", two_fail, 0},
    {"stopped", rank_is_stopped, COMM_CASE_DEADLINE_S},
    {"given_up", rank_is_given_up, COMM_CASE_DEADLINE_S},
    {"for_ever", wait_for_ever, 0},
    {"stop_together", stop_together, 0},
    {"large", large, 60},
};

static bl_status run_case(bl_launch *launch, const char *name)
{
    test_rank self = {.rank = bl_launch_rank(launch), .n_ranks = bl_launch_size(launch)};
    bl_status st = BL_FAIL(BL_EUSAGE, "no case %s", name);
    size_t which = 0;

    while (which < BL_COUNT(cases) && strcmp(cases[which].name, name) != 0) which++;
    if (which == BL_COUNT(cases)) return st;
    BL_TRY(bl_launch_create_comm(launch, cases[which].deadline_s, &self.comm));
    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &self.device));
    BL_TRY_GOTO(st, done, bl_stream_create(self.device, "test", &self.stream));
    BL_TRY_GOTO(st, done, cases[which].fn(&self));
    st = bl_stream_synchronize(self.stream);
done:
    bl_error_save(&self.error, st);
    if (st != BL_OK && st != BL_ESTOPPED) bl_comm_abort(self.comm, &self.error);
    bl_stream_destroy(self.stream);
    bl_device_destroy(self.device);
    bl_comm_destroy(self.comm);
    return bl_error_restore(&self.error);
}

int main(int argc, char **argv)
{
    bl_launch *launch = NULL;
    bl_status st = bl_launch_open(NULL, &launch);

    if (st == BL_OK && (!launch || argc != 2))
        st = BL_FAIL(BL_EUSAGE, "run it as: mpirun -n N mpi_ranks CASE");
    else if (st == BL_OK)
        st = bl_launch_close(launch, run_case(launch, argv[1]));
    if (st != BL_OK && bl_error_text()[0]) bl_log_error(bl_error_text());
    return bl_status_exit_code(st);
}
