/* SPDX-License-Identifier: Apache-2.0 */
/* Hangs of the fake NCCL (README.md), aborts during a hang, and ranks whose peers die. A call that
 * does not end for a while counts as a hang; after an abort it must end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emulator/emulated.h"
#include "emulator/tests/test_nccl_ranks.h"

#define STRICT     "BALLAST_EMULATED=strict"
#define CONCURRENT "BALLAST_EMULATED=concurrent"
#define REPORT     "BALLAST_EMULATED_NCCL_ERRORS=report"

enum { BYTES = 1000, MARK_HUNG = 0, MARK_OTHER = 1 };

/* The state of one of two ranks, with one piece of work that may hang. */
typedef struct rank {
    const ranks_self *self;
    ncclComm_t comm;
    cudaStream_t stream;
    char *memory; /* 8 * BYTES */
} rank;

static rank open_rank(const ranks_self *self)
{
    rank r = {self, ranks_comm(self, 0), ranks_stream(), ranks_memory(8 * BYTES)};
    return r;
}

/* Aborts once no rank's stream has ended in a while; all of them end then. */
static void abort_blocked(const rank *r)
{
    ranks_nap();
    NEED(!ranks_is_idle(r->stream));
    ranks_mark(r->self, MARK_HUNG);
    ranks_await(r->self, MARK_HUNG, r->self->n_ranks);
    NEED_NCCL(ncclCommAbort(r->comm));
    NEED_CUDA(cudaStreamSynchronize(r->stream));
}

/* ---- mismatches ---- */

static int differs_in_bytes(const ranks_self *self)
{
    rank r = open_rank(self);
    NEED_NCCL(ranks_gather(self, r.memory, BYTES + (size_t)self->rank, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

static int differs_in_type(const ranks_self *self)
{
    rank r = open_rank(self);
    NEED_NCCL(ncclAllGather(r.memory, r.memory + BYTES, self->rank ? 20 : 10,
                            self->rank ? ncclBfloat16 : ncclFloat32, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

static int differs_in_root(const ranks_self *self)
{
    rank r = open_rank(self);
    NEED_NCCL(ncclBroadcast(r.memory, r.memory, BYTES, ncclUint8, self->rank, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

/* The same two collectives, the other way round. */
static int differs_in_order(const ranks_self *self)
{
    rank r = open_rank(self);
    for (int i = 0; i < 2; i++)
        if (i == self->rank)
            NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
        else
            NEED_NCCL(ncclBroadcast(r.memory, r.memory, BYTES, ncclUint8, 0, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

static int sends_another_size(const ranks_self *self)
{
    rank r = open_rank(self);
    if (self->rank == 0)
        NEED_NCCL(ncclSend(r.memory, BYTES, ncclUint8, 1, r.comm, r.stream));
    else
        NEED_NCCL(ncclRecv(r.memory, BYTES - 1, ncclUint8, 0, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

/* Both send first, in no group. */
static int sends_first(const ranks_self *self)
{
    rank r = open_rank(self);
    int peer = 1 - self->rank;
    NEED_NCCL(ncclSend(r.memory, BYTES, ncclUint8, peer, r.comm, r.stream));
    NEED_NCCL(ncclRecv(r.memory + BYTES, BYTES, ncclUint8, peer, r.comm, r.stream));
    abort_blocked(&r);
    return 0;
}

/* Of two communicators on one stream, the other one first. */
static int crosses(const ranks_self *self)
{
    rank r = open_rank(self);
    ncclComm_t second = ranks_comm(self, 1), comms[2] = {r.comm, second};
    for (int i = 0; i < 2; i++)
        NEED_NCCL(ranks_gather(self, r.memory, BYTES, comms[i ^ self->rank], r.stream));
    ranks_nap();
    NEED(!ranks_is_idle(r.stream));
    ranks_mark(self, MARK_HUNG);
    ranks_await(self, MARK_HUNG, self->n_ranks);
    /* The one that is ahead in the stream: the other's abort would wait for it. */
    NEED_NCCL(ncclCommAbort(comms[self->rank]));
    NEED_NCCL(ncclCommAbort(comms[1 - self->rank]));
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    return 0;
}

/* The last rank never comes. */
static int misses_one(const ranks_self *self)
{
    rank r = open_rank(self);
    if (self->rank < self->n_ranks - 1) {
        NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
        abort_blocked(&r);
        return 0;
    }
    ranks_mark(self, MARK_HUNG);
    ranks_await(self, MARK_HUNG, self->n_ranks);
    NEED_NCCL(ncclCommAbort(r.comm));
    return 0;
}

/* Another communicator, on another stream, works while this one hangs. */
static int works_beside(const ranks_self *self)
{
    rank r = open_rank(self);
    ncclComm_t second = ranks_comm(self, 1);
    cudaStream_t stream = ranks_stream();
    char *all = ranks_memory(2 * BYTES);
    if (self->rank == 0) NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    ranks_fill(all + self->rank * BYTES, BYTES, self->rank);
    NEED_NCCL(ranks_gather(self, all, BYTES, second, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < 2; i++) NEED(ranks_holds(all + i * BYTES, BYTES, i));
    if (self->rank == 0) NEED(!ranks_is_idle(r.stream));
    ranks_destroy(second);
    NEED_NCCL(ncclCommAbort(r.comm));
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    return 0;
}

static void test_what_hangs(void **state)
{
    static const char *const names[] = {"differs_in_bytes", "differs_in_type",    "differs_in_root",
                                        "differs_in_order", "sends_another_size", "sends_first",
                                        "crosses",          "works_beside",       "misses_one"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ranks_outcome o = RANKS(names[i], 2, CONCURRENT);
        ranks_assert_fine(&o, 2);
    }
    ranks_outcome o = RANKS("misses_one", 4, CONCURRENT, "BALLAST_EMULATED_SEED=5");
    ranks_assert_fine(&o, 4);
}

/* ---- aborts from another thread ---- */

/* Waits until another thread uses the communicator: none may begin to after the abort. */
static void abort_used(const rank *r, bool (*is_used)(ncclComm_t comm))
{
    while (!is_used(r->comm)) usleep(1000);
    ranks_nap();
    NEED(atomic_load(&r->self->board->marks[MARK_OTHER]) == 0); /* that thread still waits */
    NEED_NCCL(ncclCommAbort(r->comm));
}

static void *abort_work(void *argument)
{
    abort_used(argument, emulated_nccl_has_work);
    return NULL;
}

static void *abort_call(void *argument)
{
    abort_used(argument, emulated_nccl_is_in_call);
    return NULL;
}

/* Rank 0 waits, in the launch where the mode is strict and for its stream otherwise; rank 1 never
 * comes. */
static int is_aborted(const ranks_self *self)
{
    pthread_t thread;
    rank r = open_rank(self);
    if (self->rank == 1) {
        ranks_await(self, MARK_HUNG, 1);
        NEED_NCCL(ncclCommAbort(r.comm));
        return 0;
    }
    NEED(pthread_create(&thread, NULL, abort_work, &r) == 0);
    NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    ranks_mark(self, MARK_OTHER);
    NEED(pthread_join(thread, NULL) == 0);
    ranks_mark(self, MARK_HUNG);
    return 0;
}

/* The same in a call that waits on the host. */
static int split_is_aborted(const ranks_self *self)
{
    pthread_t thread;
    rank r = open_rank(self);
    ncclComm_t half;
    if (self->rank == 1) {
        ranks_await(self, MARK_HUNG, 1);
        NEED_NCCL(ncclCommAbort(r.comm));
        return 0;
    }
    NEED(pthread_create(&thread, NULL, abort_call, &r) == 0);
    NEED(ncclCommSplit(r.comm, 0, 0, &half, NULL) == ncclInternalError);
    ranks_mark(self, MARK_OTHER);
    NEED(pthread_join(thread, NULL) == 0);
    ranks_mark(self, MARK_HUNG);
    return 0;
}

static void test_abort_from_another_thread(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("is_aborted", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
    o = RANKS("is_aborted", 2, STRICT);
    ranks_assert_fine(&o, 2);
    o = RANKS("split_is_aborted", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
}

static void *abort_now(void *argument)
{
    const rank *r = argument;
    NEED_NCCL(ncclCommAbort(r->comm));
    ranks_mark(r->self, MARK_OTHER);
    return NULL;
}

/* An abort waits for work that is behind another communicator's in the stream. */
static int aborts_behind(const ranks_self *self)
{
    pthread_t thread;
    rank ahead = open_rank(self), behind = ahead;
    behind.comm = ranks_comm(self, 1);
    if (self->rank == 1) {
        ranks_await(self, MARK_HUNG, 1);
        NEED_NCCL(ncclCommAbort(ahead.comm));
        NEED_NCCL(ncclCommAbort(behind.comm));
        return 0;
    }
    NEED_NCCL(ranks_gather(self, ahead.memory, BYTES, ahead.comm, ahead.stream));
    NEED_NCCL(ranks_gather(self, behind.memory, BYTES, behind.comm, behind.stream));
    NEED(pthread_create(&thread, NULL, abort_now, &behind) == 0);
    ranks_nap();
    NEED(atomic_load(&self->board->marks[MARK_OTHER]) == 0);
    NEED_NCCL(ncclCommAbort(ahead.comm));
    NEED(pthread_join(thread, NULL) == 0);
    ranks_mark(self, MARK_HUNG);
    return 0;
}

/* With the setting, nothing is released and nothing returns. */
static int abort_hangs(const ranks_self *self)
{
    pthread_t thread;
    rank r = open_rank(self);
    if (self->rank == 1) {
        ranks_await(self, MARK_HUNG, 1);
        return 0;
    }
    NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    NEED(pthread_create(&thread, NULL, abort_now, &r) == 0);
    ranks_nap();
    NEED(atomic_load(&self->board->marks[MARK_OTHER]) == 0);
    NEED(!ranks_is_idle(r.stream));
    ranks_mark(self, MARK_HUNG);
    _exit(0);
}

static void test_aborts_that_wait(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("aborts_behind", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
    o = RANKS("abort_hangs", 2, CONCURRENT, "BALLAST_EMULATED_NCCL_ABORT=hang");
    ranks_assert_fine(&o, 2);
}

/* ---- the end with work under way ---- */

static void *destroy_now(void *argument)
{
    const rank *r = argument;
    ncclResult_t result = ncclCommDestroy(r->comm); /* until the abort */
    NEED(result != ncclSuccess);
    ranks_mark(r->self, MARK_OTHER);
    return NULL;
}

static int destroy_waits(const ranks_self *self)
{
    pthread_t thread;
    rank r = open_rank(self);
    if (self->rank == 1) {
        ranks_await(self, MARK_HUNG, 1);
        NEED_NCCL(ncclCommAbort(r.comm));
        return 0;
    }
    NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    NEED(pthread_create(&thread, NULL, destroy_now, &r) == 0);
    abort_used(&r, emulated_nccl_is_in_call);
    NEED(pthread_join(thread, NULL) == 0);
    ranks_mark(self, MARK_HUNG);
    return 0;
}

static void test_destroy_waits(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("destroy_waits", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
}

/* ---- deaths ---- */

/* Rank 1 is killed where the others gather for the second time. They hang; where that is reported,
 * one error says so; an abort ends it. */
static int loses_one(const ranks_self *self)
{
    const char *errors = getenv("BALLAST_EMULATED_NCCL_ERRORS");
    bool reports = errors && strcmp(errors, "report") == 0;
    ncclResult_t error = ncclSuccess;
    rank r = open_rank(self);
    NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    NEED_NCCL(ncclCommGetAsyncError(r.comm, &error));
    NEED(error == ncclSuccess);
    ranks_mark(self, MARK_OTHER);
    ranks_await(self, MARK_OTHER, self->n_ranks); /* all ask before any rank dies */
    NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
    NEED(self->rank != 1);
    while (reports && error == ncclSuccess) {
        NEED_NCCL(ncclCommGetAsyncError(r.comm, &error));
        ranks_nap();
    }
    NEED(error == (reports ? ncclRemoteError : ncclSuccess));
    ranks_nap();
    NEED(!ranks_is_idle(r.stream));
    NEED_NCCL(ncclCommGetAsyncError(r.comm, &error));
    NEED(error == (reports ? ncclRemoteError : ncclSuccess));
    NEED_NCCL(ncclCommAbort(r.comm));
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    return 0;
}

static void test_deaths(void **state)
{
    static const char *const modes[] = {REPORT, "BALLAST_EMULATED_NCCL_ERRORS=hang"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        ranks_outcome o =
            RANKS("loses_one", 3, CONCURRENT, modes[i], "BALLAST_EMULATED_FAULT=1:2:kill");
        ranks_assert_failed(&o, 1, SIGKILL, "");
        ranks_assert_others_fine(&o, 3, 1);
    }
}

/* A rank that has left in good order is not dead. */
static int leaves_early(const ranks_self *self)
{
    ncclResult_t error;
    char host[64];
    snprintf(host, sizeof host, "%d", self->rank); /* each on its own host: no destroy waits */
    NEED(setenv("BALLAST_EMULATED_HOST", host, 1) == 0);
    ncclComm_t comm = ranks_comm(self, 0);
    if (self->rank == 1) {
        NEED_NCCL(ncclCommDestroy(comm));
        ranks_mark(self, MARK_OTHER);
        ranks_await(self, MARK_HUNG, 1);
        return 0;
    }
    ranks_await(self, MARK_OTHER, 1);
    NEED_NCCL(ncclCommGetAsyncError(comm, &error));
    NEED(error == ncclSuccess);
    NEED_NCCL(ncclCommDestroy(comm));
    ranks_mark(self, MARK_HUNG);
    return 0;
}

static void test_leaving_is_no_death(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("leaves_early", 2, REPORT);
    ranks_assert_fine(&o, 2);
}

/* ---- faults ---- */

/* 10 + the result of a launch, an abort or an init, where it is not success. */
static int tells_result(const ranks_self *self)
{
    ncclUniqueId id = ranks_id(self, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm, half;
    NEED_CUDA(cudaSetDevice(self->rank));
    ncclResult_t result = ncclCommInitRankConfig(&comm, self->n_ranks, id, self->rank, &config);
    if (result != ncclSuccess) _exit(10 + (int)result);
    if (self->n_ranks == 1) {
        result = ncclCommSplit(comm, 0, 0, &half, NULL);
        if (result != ncclSuccess) _exit(20 + (int)result);
        char *memory = ranks_memory(BYTES);
        cudaStream_t stream = ranks_stream();
        for (int i = 1; i <= 3; i++) {
            result = ranks_gather(self, memory, BYTES, comm, stream);
            if (result != ncclSuccess) _exit(30 + 10 * i + (int)result);
        }
        result = ncclCommDestroy(half);
        if (result != ncclSuccess) _exit(80 + (int)result);
        result = ncclCommAbort(comm);
        if (result != ncclSuccess) _exit(90 + (int)result);
    }
    return 0;
}

static void test_faults(void **state)
{
    static const struct {
        const char *fault;
        int code;
    } faults[] = {
        {"BALLAST_EMULATED_FAULT=", 0},
        {"BALLAST_EMULATED_FAULT=1:1:fail", 0},
        {"BALLAST_EMULATED_FAULT=0:init:fail", 10 + ncclSystemError},
        {"BALLAST_EMULATED_FAULT=0:split:fail", 20 + ncclSystemError},
        {"BALLAST_EMULATED_FAULT=0:2:fail", 50 + ncclSystemError},
        {"BALLAST_EMULATED_FAULT=0:3:slow=0.01,0:3:fail", 60 + ncclSystemError},
        {"BALLAST_EMULATED_FAULT=0:destroy:fail", 80 + ncclSystemError},
        {"BALLAST_EMULATED_FAULT=0:abort:fail", 90 + ncclSystemError},
    };
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        ranks_outcome o = RANKS("tells_result", 1, faults[i].fault);
        if (ranks_code(&o, 0) != faults[i].code)
            fail_msg("%s: %d: %s", faults[i].fault, ranks_code(&o, 0), o.text[0]);
    }
    ranks_outcome o = RANKS("tells_result", 1, "BALLAST_EMULATED_FAULT=0:0:fail");
    ranks_assert_failed(&o, 0, SIGABRT, "RANK:WHEN:WHAT");
    o = RANKS("tells_result", 1, "BALLAST_EMULATED_FAULT=0:1:explode");
    ranks_assert_failed(&o, 0, SIGABRT, "RANK:WHEN:WHAT");
}

/* Rank 1 dies in a call where the others wait for it. */
static int dies_in_split(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0), half;
    NEED(ncclCommSplit(comm, 0, 0, &half, NULL) == ncclRemoteError);
    NEED_NCCL(ncclCommAbort(comm));
    return 0;
}

static void *end_after_death(void *argument)
{
    const ranks_self *self = argument;
    ranks_await_end(self, 1);
    if (self->rank == 0) ranks_await_end(self, 2); /* which needs the maker of its id */
    ranks_nap();
    _exit(0);
}

/* Before it joined, no rank knows it: the others wait without a limit. */
static int dies_at_init(const ranks_self *self)
{
    pthread_t thread;
    if (self->rank != 1)
        NEED(pthread_create(&thread, NULL, end_after_death, (void *)(uintptr_t)self) == 0);
    (void)ranks_comm(self, 0);
    return 1;
}

static void test_deaths_in_calls(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        ranks_outcome o =
            i ? RANKS("dies_at_init", 3, CONCURRENT, "BALLAST_EMULATED_FAULT=1:init:kill")
              : RANKS("dies_in_split", 3, REPORT, "BALLAST_EMULATED_FAULT=1:split:kill");
        ranks_assert_failed(&o, 1, SIGKILL, "");
        ranks_assert_others_fine(&o, 3, 1);
    }
}

/* Rank 1 stops at the second gather; it continues on request, and so do the others. A rank that is
 * only slow continues by itself. */
static int stops(const ranks_self *self)
{
    rank r = open_rank(self);
    ncclResult_t error;
    bool is_stop = strstr(getenv("BALLAST_EMULATED_FAULT"), "stop") != NULL;
    for (int i = 0; i < 2; i++) {
        NEED_NCCL(ranks_gather(self, r.memory, BYTES, r.comm, r.stream));
        ranks_mark(self, MARK_OTHER);
    }
    if (self->rank == 0) {
        ranks_await(self, MARK_OTHER, 3);
        if (is_stop) ranks_await_stop(self, 1); /* before it has, a SIGCONT would be lost */
        ranks_nap();
        NEED(!is_stop || !ranks_is_idle(r.stream));
        NEED_NCCL(ncclCommGetAsyncError(r.comm, &error));
        NEED(error == ncclSuccess); /* it is not dead */
        if (is_stop) NEED(kill(atomic_load(&self->board->pids[1]), SIGCONT) == 0);
    }
    NEED_CUDA(cudaStreamSynchronize(r.stream));
    ranks_destroy(r.comm);
    return 0;
}

static void test_stop_and_slow(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("stops", 2, CONCURRENT, REPORT, "BALLAST_EMULATED_FAULT=1:2:stop");
    ranks_assert_fine(&o, 2);
    o = RANKS("stops", 2, CONCURRENT, REPORT, "BALLAST_EMULATED_FAULT=1:2:slow=2");
    ranks_assert_fine(&o, 2);
}

static const ranks_case cases[] = {
    {"differs_in_bytes", differs_in_bytes},
    {"differs_in_type", differs_in_type},
    {"differs_in_root", differs_in_root},
    {"differs_in_order", differs_in_order},
    {"sends_another_size", sends_another_size},
    {"sends_first", sends_first},
    {"crosses", crosses},
    {"works_beside", works_beside},
    {"misses_one", misses_one},
    {"is_aborted", is_aborted},
    {"split_is_aborted", split_is_aborted},
    {"aborts_behind", aborts_behind},
    {"abort_hangs", abort_hangs},
    {"destroy_waits", destroy_waits},
    {"loses_one", loses_one},
    {"leaves_early", leaves_early},
    {"tells_result", tells_result},
    {"dies_in_split", dies_in_split},
    {"dies_at_init", dies_at_init},
    {"stops", stops},
    {NULL, NULL},
};

int main(int argc, char **argv)
{
    ranks_become(argc, argv, cases);
    if (!emulated_cuda_have_devices(8)) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_hangs),       cmocka_unit_test(test_abort_from_another_thread),
        cmocka_unit_test(test_aborts_that_wait), cmocka_unit_test(test_destroy_waits),
        cmocka_unit_test(test_deaths),           cmocka_unit_test(test_leaving_is_no_death),
        cmocka_unit_test(test_faults),           cmocka_unit_test(test_deaths_in_calls),
        cmocka_unit_test(test_stop_and_slow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
