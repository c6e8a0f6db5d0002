/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel emulator's guarantees: each planted fault (planted.cu) ends the program with a line
 * that names it, whatever the order of threads, and its twin without the fault runs and computes
 * the right result. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emulator/emulated.h"
#include "emulator/tests/planted.h"

enum { TEXT_BYTES = 4096, SEEDS = 4 };

typedef struct gpu {
    bl_device *device;
    bl_stream *stream;
    float *out, *in, *host; /* PLANTED_N each */
} gpu;

static void alloc(gpu *g, bl_space space, float **out)
{
    void *memory;
    assert_int_equal(bl_device_alloc(g->device, space, PLANTED_N * sizeof(float), "test", &memory),
                     BL_OK);
    *out = memory;
}

static gpu open_gpu(void)
{
    gpu g;
    assert_int_equal(bl_device_create_cuda(0, &g.device), BL_OK);
    assert_int_equal(bl_stream_create(g.device, "test", &g.stream), BL_OK);
    alloc(&g, BL_SPACE_DEVICE, &g.out);
    alloc(&g, BL_SPACE_DEVICE, &g.in);
    alloc(&g, BL_SPACE_HOST, &g.host);
    for (int i = 0; i < PLANTED_N; i++) g.host[i] = (float)i;
    size_t bytes = PLANTED_N * sizeof(float);
    assert_int_equal(bl_stream_copy(g.stream, g.in, g.host, bytes), BL_OK);
    assert_int_equal(bl_stream_zero(g.stream, g.out, bytes), BL_OK);
    assert_int_equal(bl_stream_synchronize(g.stream), BL_OK);
    return g;
}

static void download(gpu *g)
{
    assert_int_equal(bl_stream_copy(g->stream, g->host, g->out, PLANTED_N * sizeof(float)), BL_OK);
    assert_int_equal(bl_stream_synchronize(g->stream), BL_OK);
}

static void close_gpu(gpu *g)
{
    (void)bl_stream_synchronize(g->stream);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->out);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->in);
    bl_device_free(g->device, BL_SPACE_HOST, g->host);
    bl_stream_destroy(g->stream);
    bl_device_destroy(g->device);
}

/* ---- faults ---- */

typedef struct planted {
    const char *name;
    planted_launch *launch;
    int signal_number;
    const char *line; /* of the report */
} planted;

static const planted FAULTS[] = {
    {"race", planted_race, SIGABRT, "a race"},
    {"race in a warp", planted_race_in_warp, SIGABRT, "a race"},
    {"race between warps", planted_race_between_warps, SIGABRT, "a race"},
    {"race after a shuffle", planted_race_after_shuffle, SIGABRT, "a race"},
    {"overwritten too early", planted_overwrite, SIGABRT, "a race"},
    {"race of loads", planted_race_of_loads, SIGABRT, "of its static shared memory, which thread"},
    {"race of lanes", planted_race_of_lanes, SIGABRT, "of its block read before"},
    {"read before it is written", planted_not_written, SIGABRT,
     "of its static shared memory, which nothing has written"},
    {"race in a cluster", planted_race_in_cluster, SIGABRT, "of another block"},
    {"copy read before its wait", planted_copy, SIGABRT, "on its way by an asynchronous copy"},
    {"copy over what is read", planted_copy_overwrites, SIGABRT, "a race"},
    {"copy that nothing waits for", planted_copy_unfinished, SIGABRT,
     "ends before its asynchronous copies have arrived"},
    {"barrier", planted_barrier, SIGABRT, "waits at a barrier that not all threads reach"},
    {"shuffle", planted_shuffle, SIGABRT, "waits at a shuffle that not all threads reach"},
    {"collectives", planted_collective, SIGABRT, "of a warp do different things together"},
    {"alignment", planted_misaligned, SIGILL, ""},
    {"bounds of an array", planted_bounds_static, SIGILL, ""},
    {"bounds of dynamic shared memory", planted_bounds_dynamic, SIGABRT,
     "of 512 bytes of dynamic shared memory"},
    {"two blocks write", planted_blocks_write, SIGABRT, "of another block wrote before"},
    {"a block writes what another reads", planted_blocks_load, SIGABRT, "of another block"},
    {"a block reads what another writes", planted_blocks_read, SIGABRT, "of another block"},
};

/* In a child: the launch, then exit 0. */
static _Noreturn void launch_in_child(planted_launch *launch, bool with_fault, int seed, int to)
{
    char setting[64];
    snprintf(setting, sizeof setting, "BALLAST_EMULATED_SEED=%d", seed);
    putenv(setting);
    dup2(to, STDERR_FILENO);
    signal(SIGABRT, SIG_DFL), signal(SIGILL, SIG_DFL), signal(SIGSEGV, SIG_DFL); /* not cmocka's */
    gpu g = open_gpu();
    bl_status st = launch(g.stream, &(planted_args){g.out, g.in, with_fault});
    if (st == BL_OK) st = bl_stream_synchronize(g.stream);
    _exit(st == BL_OK ? 0 : 1);
}

static void check_fault(const planted *p, bool with_fault, int seed)
{
    char text[TEXT_BYTES] = "";
    size_t n = 0;
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) launch_in_child(p->launch, with_fault, seed, ends[1]);
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], text + n, TEXT_BYTES - 1 - n)) > 0;) n += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    bool is_right = with_fault ? WIFSIGNALED(status) && WTERMSIG(status) == p->signal_number &&
                                     strstr(text, p->line)
                               : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!is_right)
        fail_msg("%s, %s the fault, seed %d: status %#x: %s", p->name,
                 with_fault ? "with" : "without", seed, (unsigned)status, text);
    if (with_fault && seed == 1) print_message("%s: %s", p->name, *text ? text : "a trap\n");
}

static void test_faults_end_the_program(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++)
        for (int seed = 1; seed <= SEEDS; seed++) check_fault(&FAULTS[i], true, seed);
}

static void test_twins_run(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++)
        for (int seed = 1; seed <= SEEDS; seed++) check_fault(&FAULTS[i], false, seed);
}

/* ---- what right kernels compute ---- */

static void test_barriers_and_copies_compute(void **state)
{
    (void)state;
    gpu g = open_gpu();
    planted_args args = {g.out, g.in, false};
    enum { T = PLANTED_THREADS };

    assert_int_equal(planted_race(g.stream, &args), BL_OK);
    download(&g);
    for (int i = 0; i < PLANTED_N; i++) {
        int first = i / T * T, t = i % T;
        assert_true(g.host[i] == (float)(2 * first + (t + 1) % T + (t + T - 1) % T));
    }
    assert_int_equal(planted_copy(g.stream, &args), BL_OK);
    download(&g);
    for (int i = 0; i < PLANTED_N; i++) assert_true(g.host[i] == (float)(PLANTED_N - 1 - i));
    assert_int_equal(planted_race_in_cluster(g.stream, &args), BL_OK);
    download(&g);
    for (int i = 0; i < PLANTED_N; i++) assert_true(g.host[i] == (float)(i / T ^ 1));
    close_gpu(&g);
}

static void test_grids_and_warps_compute(void **state)
{
    (void)state;
    gpu g = open_gpu();
    enum { T = PLANTED_THREADS };

    assert_int_equal(planted_grid(g.stream, g.out), BL_OK);
    download(&g);
    for (int i = 0; i < PLANTED_N; i++)
        assert_true(g.host[i] == (float)(i / 32 * 1000 + i % 32 + 64 * 5));
    assert_int_equal(planted_warps(g.stream, g.out), BL_OK);
    download(&g);
    for (int t = 0; t < T; t++) {
        int first = t / 32 * 32, lane = t % 32, ballot = 0;
        for (int i = first; i < first + 32; i++) ballot += i % 3 == 0;
        float other = (float)(first + (lane + 7) % 32);
        assert_true(g.host[t] == other * other);
        assert_true(g.host[T + t] == (float)ballot);
        assert_true(g.host[2 * T + t] == (float)(lane < 30 ? t + 2 : t));
        assert_true(g.host[3 * T + t] == (float)(first + 31) + 0.5f);
    }
    close_gpu(&g);
}

static int noted[PLANTED_N], n_noted;

void planted_note_thread(int block, int thread)
{
    noted[n_noted++] = block * PLANTED_THREADS + thread;
}

/* Every thread runs once; threads in order, in reverse and shuffled, and blocks in other orders,
 * are all met within a few launches. */
static void test_orders_vary(void **state)
{
    (void)state;
    gpu g = open_gpu();
    bool seen_forwards = false, seen_backwards = false, seen_shuffled = false;
    bool seen_first[PLANTED_BLOCKS] = {false};
    for (int launch = 0; launch < 64; launch++) {
        bool has_run[PLANTED_N] = {false};
        n_noted = 0;
        assert_int_equal(planted_order(g.stream), BL_OK);
        assert_int_equal(bl_stream_synchronize(g.stream), BL_OK);
        assert_int_equal(n_noted, PLANTED_N);
        for (int i = 0; i < PLANTED_N; i++) {
            assert_false(has_run[noted[i]]);
            has_run[noted[i]] = true;
        }
        int first = noted[0] % PLANTED_THREADS, second = noted[1] % PLANTED_THREADS;
        seen_first[noted[0] / PLANTED_THREADS] = true;
        if (first == 0 && second == 1)
            seen_forwards = true;
        else if (first == PLANTED_THREADS - 1 && second == first - 1)
            seen_backwards = true;
        else
            seen_shuffled = true;
    }
    assert_true(seen_forwards && seen_backwards && seen_shuffled);
    for (int block = 0; block < PLANTED_BLOCKS; block++) assert_true(seen_first[block]);
    close_gpu(&g);
}

static void test_shared_memory_has_limits(void **state)
{
    (void)state;
    gpu g = open_gpu();
    const size_t plain = 48 << 10, most = 227 << 10;

    assert_int_equal(planted_shared(g.stream, g.out, plain, false), BL_OK);
    assert_int_not_equal(planted_shared(g.stream, g.out, plain + 1, false), BL_OK);
    assert_int_equal(planted_shared(g.stream, g.out, most, true), BL_OK);
    download(&g);
    for (int t = 0; t < PLANTED_THREADS; t++)
        assert_true(g.host[t] == (float)(unsigned char)(most - 1 - (size_t)t));
    assert_int_not_equal(planted_shared(g.stream, g.out, most + 1, true), BL_OK);
    close_gpu(&g);
}

/* 0: an Ampere has 163 KiB and no clusters. */
static int ampere_has_limits(void)
{
    gpu g = open_gpu();
    planted_args args = {g.out, g.in, false};
    if (planted_shared(g.stream, g.out, 163 << 10, true) != BL_OK) return 1;
    if (planted_shared(g.stream, g.out, (163 << 10) + 1, true) == BL_OK) return 2;
    if (planted_race_in_cluster(g.stream, &args) == BL_OK) return 3;
    close_gpu(&g);
    return 0;
}

static void test_ampere_has_limits(void **state)
{
    int status;
    (void)state;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        putenv((char *)"BALLAST_EMULATED_ARCH=80");
        _exit(ampere_has_limits());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* A stride of 2^k words meets each bank 2^k times; an odd one never twice. */
static void test_bank_conflicts_are_counted(void **state)
{
    (void)state;
    gpu g = open_gpu();
    for (int stride = 1; stride <= 33; stride++) {
        int ways = 1;
        while (stride % (2 * ways) == 0 && ways < 32) ways *= 2;
        emulated_forget_accesses();
        assert_int_equal(planted_strided(g.stream, g.out, stride), BL_OK);
        assert_int_equal(bl_stream_synchronize(g.stream), BL_OK);
        if (emulated_worst_bank_passes() != (double)ways)
            fail_msg("stride %d: %g passes", stride, emulated_worst_bank_passes());
    }
    close_gpu(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* first those that fork: no thread runs yet */
        cmocka_unit_test(test_faults_end_the_program),
        cmocka_unit_test(test_twins_run),
        cmocka_unit_test(test_ampere_has_limits),
        cmocka_unit_test(test_barriers_and_copies_compute),
        cmocka_unit_test(test_grids_and_warps_compute),
        cmocka_unit_test(test_orders_vary),
        cmocka_unit_test(test_shared_memory_has_limits),
        cmocka_unit_test(test_bank_conflicts_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
