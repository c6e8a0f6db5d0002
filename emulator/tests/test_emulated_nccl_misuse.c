/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that the fake NCCL (README.md) rejects, as the real one does, and those for which it ends
 * the program with a line; windows; and how a program finds the library. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator/emulated.h"
#include "emulator/tests/test_nccl_ranks.h"

#define CONCURRENT "BALLAST_EMULATED=concurrent"

enum { BYTES = 1000, PAGE = NCCL_WIN_REQUIRED_ALIGNMENT };

/* ---- refusals ---- */

/* 10 + the result of a start on the GPU that the environment's DEVICE_OF_ALL names, or on one's
 * own. */
static int tells_init(const ranks_self *self)
{
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = ranks_id(self, 0);
    const char *device = getenv("DEVICE_OF_ALL");
    NEED_CUDA(cudaSetDevice(device ? atoi(device) : self->rank));
    ncclResult_t result = ncclCommInitRankConfig(&comm, self->n_ranks, id, self->rank, &config);
    fprintf(stderr, "%s: %s\n", ncclGetErrorString(result), ncclGetLastError(NULL));
    return 10 + (int)result;
}

/* The same with a version, or a host, of each rank's own. */
static int tells_init_of_own(const ranks_self *self)
{
    char text[16];
    snprintf(text, sizeof text, "%d", 22800 + self->rank);
    NEED(setenv(getenv("OWN"), text, 1) == 0);
    return tells_init(self);
}

static void assert_results(const ranks_outcome *o, ncclResult_t result, const char *line)
{
    for (int rank = 0; rank < 2; rank++)
        if (ranks_code(o, rank) != 10 + (int)result || !strstr(o->text[rank], line))
            fail_msg("rank %d: %d: %s", rank, ranks_code(o, rank), o->text[rank]);
}

static void test_one_gpu_a_rank(void **state)
{
    static const char ONE[] = "DEVICE_OF_ALL=0", DUPLICATE[] = "Duplicate GPU detected";
    (void)state;
    ranks_outcome o = RANKS("tells_init", 2, ONE);
    assert_results(&o, ncclInvalidUsage, DUPLICATE);
    o = RANKS("tells_init", 2, CONCURRENT);
    assert_results(&o, ncclSuccess, "");
    /* The second of two hosts has a GPU 0, too. */
    o = RANKS("tells_init_of_own", 2, ONE, "OWN=BALLAST_EMULATED_HOST");
    assert_results(&o, ncclSuccess, "");
}

static void test_versions_agree(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("tells_init_of_own", 2, "OWN=BALLAST_EMULATED_NCCL_VERSION");
    assert_results(&o, ncclInvalidUsage, "Mismatched NCCL version detected");
}

/* How CUDA reads the variable. */
static int counts_visible(const ranks_self *self)
{
    int n;
    (void)self;
    NEED_CUDA(cudaGetDeviceCount(&n));
    return n;
}

/* On a GPU that two processes see by different numbers, or on different ones that both call 0. */
static int takes_visible(const ranks_self *self)
{
    NEED(setenv("CUDA_VISIBLE_DEVICES", self->rank ? "1,3" : "3,1", 1) == 0);
    if (getenv("THE_SAME")) NEED(setenv("DEVICE_OF_ALL", self->rank ? "1" : "0", 1) == 0);
    return tells_init(self);
}

static void test_visible_devices(void **state)
{
    static const struct {
        const char *setting;
        int n;
    } lists[] = {{"CUDA_VISIBLE_DEVICES=3,1", 2},   {"CUDA_VISIBLE_DEVICES=2,9,1", 1},
                 {"CUDA_VISIBLE_DEVICES=-1", 0},    {"CUDA_VISIBLE_DEVICES=", 0},
                 {"CUDA_VISIBLE_DEVICES=1,2,1", 0}, {"NO_VISIBLE_DEVICES=1", 8}};
    (void)state;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        ranks_outcome o = RANKS("counts_visible", 1, lists[i].setting);
        assert_int_equal(ranks_code(&o, 0), lists[i].n);
    }
    ranks_outcome o = RANKS("takes_visible", 2, "DEVICE_OF_ALL=0");
    assert_results(&o, ncclSuccess, "");
    o = RANKS("takes_visible", 2, "THE_SAME=1");
    assert_results(&o, ncclInvalidUsage, "Duplicate GPU detected");
}

static int is_refused(const ranks_self *self)
{
    ncclComm_t comm, other;
    ncclUniqueId id = ranks_id(self, 0), wrong = {.internal = "?"};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER, broken = config;
    cudaStream_t stream = ranks_stream();
    char *memory = ranks_memory(BYTES);

    broken.magic = 1;
    NEED(ncclCommInitRankConfig(&comm, 1, id, 0, &broken) == ncclInvalidArgument);
    broken = config;
    broken.size--;
    NEED(ncclCommInitRankConfig(&comm, 1, id, 0, &broken) == ncclInvalidArgument);
    NEED(ncclCommInitRankConfig(&comm, 1, id, 1, &config) == ncclInvalidArgument);
    NEED(ncclCommInitRankConfig(&comm, 1, wrong, 0, &config) == ncclInvalidArgument);
    NEED_NCCL(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    NEED(ncclCommInitRankConfig(&other, 1, id, 0, &config) == ncclSystemError); /* it is over */
    NEED(ncclCommSplit(comm, -2, 0, &other, NULL) == ncclInvalidArgument);
    NEED(ncclAllGather(memory, memory, 1, ncclNumTypes, comm, stream) == ncclInvalidArgument);
    NEED(ncclBroadcast(memory, memory, 1, ncclInt8, 1, comm, stream) == ncclInvalidArgument);
    NEED(ncclAllGather(memory, memory, 1, ncclInt8, comm, NULL) == ncclInvalidArgument);
    NEED(ncclSend(memory, 1, ncclInt8, 0, comm, stream) == ncclInvalidUsage); /* to itself alone */
    NEED(ncclGroupEnd() == ncclInvalidUsage);
    NEED_CUDA(cudaSetDevice(1));
    cudaStream_t foreign = ranks_stream();
    NEED(ncclAllGather(memory, memory, 1, ncclInt8, comm, foreign) == ncclInvalidArgument);
    NEED_NCCL(ncclAllGather(memory, memory, 0, ncclInt8, comm, stream));
    ranks_destroy(comm);
    return 0;
}

static void test_refusals(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("is_refused", 1, CONCURRENT);
    ranks_assert_fine(&o, 1);
}

/* ---- what ends a program ---- */

static int gathers_host_memory(const ranks_self *self)
{
    static char host[BYTES];
    ncclComm_t comm = ranks_comm(self, 0);
    (void)ranks_gather(self, host, BYTES, comm, ranks_stream());
    return 0;
}

static int gathers_too_much(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    (void)ranks_gather(self, ranks_memory(BYTES), BYTES + 1, comm, ranks_stream());
    return 0;
}

static int gathers_over_itself(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    char *memory = ranks_memory(2 * BYTES);
    (void)ncclAllGather(memory + 1, memory, BYTES, ncclUint8, comm, ranks_stream());
    return 0;
}

static int uses_it_later(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    ranks_destroy(comm);
    (void)ranks_gather(self, ranks_memory(BYTES), BYTES, comm, stream);
    return 0;
}

static int aborts_twice(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    NEED_NCCL(ncclCommAbort(comm));
    (void)ncclCommAbort(comm);
    return 0;
}

static int frees_foreign_memory(const ranks_self *self)
{
    (void)self;
    (void)ncclMemFree(ranks_memory(BYTES));
    return 0;
}

static int frees_under_a_window(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    ncclWindow_t window;
    void *memory;
    NEED_NCCL(ncclMemAlloc(&memory, PAGE));
    NEED_NCCL(ncclCommWindowRegister(comm, memory, PAGE, &window, NCCL_WIN_COLL_SYMMETRIC));
    (void)ncclMemFree(memory);
    return 0;
}

static int has_two_streams_in_a_group(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    char *memory = ranks_memory(BYTES);
    NEED_NCCL(ncclGroupStart());
    (void)ranks_gather(self, memory, BYTES, comm, ranks_stream());
    (void)ranks_gather(self, memory, BYTES, comm, ranks_stream());
    return 0;
}

static int does_not_block(const ranks_self *self)
{
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    (void)ncclCommInitRankConfig(&comm, 1, ranks_id(self, 0), 0, &config);
    return 0;
}

static void host_function(void *argument)
{
    int version;
    (void)ncclGetVersion(&version);
    (void)ncclGroupStart();
    (void)argument;
}

static int calls_from_a_host_function(const ranks_self *self)
{
    cudaStream_t stream = ranks_stream();
    (void)self;
    NEED_CUDA(cudaLaunchHostFunc(stream, host_function, NULL));
    NEED_CUDA(cudaStreamSynchronize(stream));
    return 0;
}

static void test_what_ends_a_program(void **state)
{
    static const struct {
        const char *name, *line;
        int n_ranks;
    } faults[] = {
        {"gathers_host_memory", "a buffer that is not device memory", 1},
        {"gathers_too_much", "1001 bytes, and the allocation ends after 1000", 1},
        {"gathers_over_itself", "the buffers overlap", 1},
        {"uses_it_later", "was destroyed or aborted", 1},
        {"aborts_twice", "was destroyed or aborted", 1},
        {"frees_foreign_memory", "not what ncclMemAlloc gave", 1},
        {"frees_under_a_window", "the memory has a window", 2},
        {"has_two_streams_in_a_group", "a communicator on two streams: not emulated", 1},
        {"does_not_block", "not emulated", 1},
        {"calls_from_a_host_function", "a host function calls CUDA", 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        ranks_outcome o = RANKS(faults[i].name, faults[i].n_ranks, CONCURRENT);
        ranks_assert_failed(&o, 0, SIGABRT, faults[i].line);
    }
}

/* One thread waits in a split, another launches. */
static void *split_now(void *argument)
{
    ncclComm_t half;
    (void)ncclCommSplit(argument, 0, 0, &half, NULL);
    return NULL;
}

static int has_two_threads(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    pthread_t thread;
    char *memory = ranks_memory(2 * BYTES);
    cudaStream_t stream = ranks_stream();
    if (self->rank == 1) {
        ranks_await_end(self, 0);
        return 0;
    }
    NEED(pthread_create(&thread, NULL, split_now, comm) == 0);
    for (;;) { /* until the other thread is in its call */
        (void)ranks_gather(self, memory, BYTES, comm, stream);
        ranks_nap();
    }
}

static void test_two_threads(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("has_two_threads", 2, CONCURRENT);
    ranks_assert_failed(&o, 0, SIGABRT, "two threads use communicator");
    assert_int_equal(ranks_code(&o, 1), 0);
}

/* ---- windows ---- */

/* A window at page `skip`, of `bytes`, and a gather in place at `at` bytes into it. */
typedef struct window_plan {
    size_t skip, bytes, at;
} window_plan;

static void gather_in_window(const ranks_self *self, window_plan plan, bool gets_one)
{
    ncclUniqueId id = ranks_id(self, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ncclWindow_t window;
    void *memory;
    cudaStream_t stream = ranks_stream();

    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    NEED_CUDA(cudaSetDevice(self->rank));
    NEED_CUDA(cudaStreamDestroy(stream));
    stream = ranks_stream();
    NEED_NCCL(ncclCommInitRankConfig(&comm, self->n_ranks, id, self->rank, &config));
    NEED_NCCL(ncclMemAlloc(&memory, 8 * PAGE));
    char *begin = (char *)memory + plan.skip;
    NEED_NCCL(ncclCommWindowRegister(comm, begin, plan.bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    NEED((window != NULL) == gets_one);
    char *all = begin + plan.at;
    ranks_fill(all + self->rank * BYTES, BYTES, self->rank);
    NEED_NCCL(ranks_gather(self, all, BYTES, comm, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    for (int r = 0; r < self->n_ranks; r++) NEED(ranks_holds(all + r * BYTES, BYTES, r));
    NEED_NCCL(ncclCommWindowDeregister(comm, window));
    NEED_NCCL(ncclMemFree(memory));
    ranks_destroy(comm);
}

static int gathers_in_window(const ranks_self *self)
{
    gather_in_window(self, (window_plan){PAGE, 4 * PAGE, 64}, true);
    return 0;
}

static int gathers_in_no_window(const ranks_self *self)
{
    gather_in_window(self, (window_plan){PAGE, 4 * PAGE, 64}, false);
    return 0;
}

static int has_other_bytes(const ranks_self *self)
{
    gather_in_window(self, (window_plan){PAGE, (size_t)(4 + self->rank) * PAGE, 64}, true);
    return 0;
}

static int has_other_place(const ranks_self *self)
{
    gather_in_window(self, (window_plan){(size_t)self->rank * PAGE, 4 * PAGE, 64}, true);
    return 0;
}

static int gathers_elsewhere(const ranks_self *self)
{
    gather_in_window(self, (window_plan){0, 4 * PAGE, (size_t)self->rank * 64}, true);
    return 0;
}

static int registers_wrongly(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    ncclWindow_t window;
    void *memory;
    NEED_NCCL(ncclMemAlloc(&memory, 2 * PAGE));
    NEED((uintptr_t)memory % PAGE == 0);
    NEED(ncclCommWindowRegister(comm, (char *)memory + 256, PAGE, &window, 1) ==
         ncclInvalidArgument);
    NEED(ncclCommWindowRegister(comm, NULL, PAGE, &window, 1) == ncclInvalidArgument);
    return 0;
}

/* How often rank 0 gathered, by copy engines or kernels. */
static void assert_gathers(const char *path, const char *name, int n_ranks, const char *setting,
                           const char *second)
{
    char file[] = "/tmp/test_emulated_nccl.XXXXXX", counts[64], text[2048] = "", line[64];
    int fd = mkstemp(file);
    assert_true(fd >= 0);
    snprintf(counts, sizeof counts, "BALLAST_EMULATED_COUNTS=%s", file);
    snprintf(line, sizeof line, "nccl:all_gather:%s 1 1000\n", path);
    ranks_outcome o = RANKS(name, n_ranks, counts, setting, second);
    ranks_assert_fine(&o, n_ranks);
    FILE *in = fopen(file, "r");
    assert_non_null(in);
    (void)!fread(text, 1, sizeof text - 1, in);
    fclose(in);
    close(fd);
    unlink(file);
    if (!strstr(text, line)) fail_msg("%s: %s", line, text);
}

static void test_windows(void **state)
{
    (void)state;
    assert_gathers("copy_engine", "gathers_in_window", 2, CONCURRENT, NULL);
    assert_gathers("kernel", "gathers_in_window", 2, "BALLAST_EMULATED_NCCL_WINDOWS=no", NULL);
    assert_gathers("kernel", "gathers_in_no_window", 2, "BALLAST_EMULATED_NCCL_WINDOWS=no",
                   "BALLAST_EMULATED_NCCL_VERSION=22900");
    ranks_outcome o = RANKS("registers_wrongly", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
    o = RANKS("gathers_in_window", 1, CONCURRENT);
    ranks_assert_failed(&o, 0, 0, "Communicator does not support symmetric memory!");
    o = RANKS("gathers_in_window", 2, "BALLAST_EMULATED_NCCL_WINDOWS=fail");
    ranks_assert_failed(&o, 0, 0, "Symmetric memory is not supported");
}

static void test_windows_are_symmetric(void **state)
{
    static const char *const names[] = {"has_other_bytes", "has_other_place", "gathers_elsewhere"};
    static const char *const lines[] = {"bytes at offset", "bytes at offset",
                                        "symmetric windows want the same place"};
    (void)state;
    for (int i = 0; i < 3; i++) {
        ranks_outcome o = RANKS(names[i], 2, CONCURRENT);
        /* The first to see it ends; the other may see it, too, or wait for the first. */
        int rank = strstr(o.text[0], lines[i]) ? 0 : 1;
        ranks_assert_failed(&o, rank, SIGABRT, lines[i]);
    }
}

/* ---- the library ---- */

/* 0: all is there. 21: no library. 22: it lacks windows. 23: it lacks the hidden functions. */
static int looks_for_library(const ranks_self *self)
{
    int version, expected = atoi(getenv("VERSION"));
    ncclResult_t (*get_version)(int *);
    (void)self;
    NEED(dlsym(RTLD_DEFAULT, "ncclGetVersion") == NULL); /* it is not the program's own */
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL), *found;
    if (!library) {
        NEED(strstr(dlerror(), "libnccl.so.2"));
        return 21;
    }
    found = dlsym(library, "ncclGetVersion");
    NEED(found);
    memcpy(&get_version, &found, sizeof found);
    NEED(get_version(&version) == ncclSuccess && version == expected);
    NEED(dlsym(library, "ncclNoSuchFunction") == NULL);
    NEED(dlsym(library, "ncclAllGather"));
    if (!dlsym(library, "ncclCommWindowRegister")) return 22;
    if (!dlsym(library, "ncclMemAlloc")) return 23;
    NEED(dlclose(library) == 0);
    NEED(dlopen("libdl.so.2", RTLD_NOW)); /* others are the system's */
    return 0;
}

static void test_the_library(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("looks_for_library", 1, "VERSION=22809");
    assert_int_equal(ranks_code(&o, 0), 0);
    o = RANKS("looks_for_library", 1, "VERSION=0", "BALLAST_EMULATED_NCCL_VERSION=0");
    assert_int_equal(ranks_code(&o, 0), 21);
    o = RANKS("looks_for_library", 1, "VERSION=22603", "BALLAST_EMULATED_NCCL_VERSION=22603");
    assert_int_equal(ranks_code(&o, 0), 22);
    o = RANKS("looks_for_library", 1, "VERSION=22809",
              "BALLAST_EMULATED_NCCL_HIDE=ncclX,ncclMemAlloc");
    assert_int_equal(ranks_code(&o, 0), 23);
}

static const ranks_case cases[] = {
    {"tells_init", tells_init},
    {"tells_init_of_own", tells_init_of_own},
    {"counts_visible", counts_visible},
    {"takes_visible", takes_visible},
    {"is_refused", is_refused},
    {"gathers_host_memory", gathers_host_memory},
    {"gathers_too_much", gathers_too_much},
    {"gathers_over_itself", gathers_over_itself},
    {"uses_it_later", uses_it_later},
    {"aborts_twice", aborts_twice},
    {"frees_foreign_memory", frees_foreign_memory},
    {"frees_under_a_window", frees_under_a_window},
    {"has_two_streams_in_a_group", has_two_streams_in_a_group},
    {"does_not_block", does_not_block},
    {"calls_from_a_host_function", calls_from_a_host_function},
    {"has_two_threads", has_two_threads},
    {"gathers_in_window", gathers_in_window},
    {"gathers_in_no_window", gathers_in_no_window},
    {"has_other_bytes", has_other_bytes},
    {"has_other_place", has_other_place},
    {"gathers_elsewhere", gathers_elsewhere},
    {"registers_wrongly", registers_wrongly},
    {"looks_for_library", looks_for_library},
    {NULL, NULL},
};

int main(int argc, char **argv)
{
    ranks_become(argc, argv, cases);
    if (!emulated_cuda_have_devices(8)) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_gpu_a_rank),
        cmocka_unit_test(test_versions_agree),
        cmocka_unit_test(test_visible_devices),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_what_ends_a_program),
        cmocka_unit_test(test_two_threads),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_windows_are_symmetric),
        cmocka_unit_test(test_the_library),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
