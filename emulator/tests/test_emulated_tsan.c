/* SPDX-License-Identifier: Apache-2.0 */
/* On the emulated GPU ThreadSanitizer reports accesses of two streams, or of a stream and the host,
 * to the same memory without an event between them, kernels included, and nothing else. Each case
 * runs this program again, as it exits with TSAN_OPTIONS' code after a report. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emulator/tests/planted.h"

extern char **environ;

enum {
    TEXT_BYTES = 16384,
    REPORTED = 66,
    BYTES = PLANTED_N * sizeof(float),
    LAST = PLANTED_N - 1,
    HANG_S = 120
};

/* the last value of each before the case */
static const float OLD_IN = LAST, OLD_OUT = -1.0f, OLD_HOST = -2.0f;

void planted_note_thread(int block, int thread)
{
    (void)block, (void)thread;
}

typedef struct gpu {
    bl_device *device;
    bl_stream *first, *second;
    bl_event *done;
    float *out, *in, *host;
} gpu;

static void need(bl_status st)
{
    if (st == BL_OK) return;
    fprintf(stderr, "%s\n", bl_error_text());
    exit(2);
}

static void fill(gpu *g, float *to, float first, float step)
{
    for (int i = 0; i < PLANTED_N; i++) g->host[i] = first + step * (float)i;
    need(bl_stream_copy(g->first, to, g->host, BYTES));
    need(bl_stream_synchronize(g->first));
}

static gpu open_gpu(void)
{
    gpu g;
    need(bl_device_create_cuda(0, &g.device));
    need(bl_stream_create(g.device, "first", &g.first));
    need(bl_stream_create(g.device, "second", &g.second));
    need(bl_event_create(g.device, &g.done));
    need(bl_device_alloc(g.device, BL_SPACE_DEVICE, BYTES, "test", (void **)&g.out));
    need(bl_device_alloc(g.device, BL_SPACE_DEVICE, BYTES, "test", (void **)&g.in));
    need(bl_device_alloc(g.device, BL_SPACE_HOST, BYTES, "test", (void **)&g.host));
    fill(&g, g.out, OLD_OUT, 0.0f);
    fill(&g, g.in, 0.0f, 1.0f);
    for (int i = 0; i < PLANTED_N; i++) g.host[i] = OLD_HOST;
    return g;
}

static void close_gpu(gpu *g)
{
    need(bl_stream_synchronize(g->first));
    need(bl_stream_synchronize(g->second));
    bl_device_free(g->device, BL_SPACE_DEVICE, g->out);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->in);
    bl_device_free(g->device, BL_SPACE_HOST, g->host);
    bl_event_destroy(g->done);
    bl_stream_destroy(g->first);
    bl_stream_destroy(g->second);
    bl_device_destroy(g->device);
}

__attribute__((no_sanitize("thread"))) static float peek(const volatile float *at)
{
    return *at;
}

/* Waits until an operation has changed a value, in a way that ThreadSanitizer does not see, so that
 * the wait orders nothing. With a fault planted the second access happens after the first, and the
 * host's next operation after both. Otherwise the operation of a late stream would follow whatever
 * the host had waited for meanwhile: ordered by accident. */
__attribute__((no_sanitize("thread"))) static void await_change(const volatile float *at, float old)
{
    while (peek(at) == old) usleep(100);
}

/* Work on the second stream waits for the first, unless the fault is planted. */
static void order(gpu *g, bool with_fault, const float *changed, float old)
{
    if (with_fault) {
        await_change(changed, old);
        return;
    }
    need(bl_event_record(g->done, g->first));
    need(bl_stream_wait(g->second, g->done));
}

static void kernel_then_copy(gpu *g, bool with_fault)
{
    need(planted_race(g->first, &(planted_args){g->out, g->in, false}));
    order(g, with_fault, &g->out[LAST], OLD_OUT);
    need(bl_stream_copy(g->second, g->host, g->out, BYTES));
    if (with_fault) await_change(&g->host[LAST], OLD_HOST);
}

static void copy_then_kernel(gpu *g, bool with_fault)
{
    need(bl_stream_copy(g->first, g->in, g->host, BYTES));
    order(g, with_fault, &g->in[LAST], OLD_IN);
    need(planted_race(g->second, &(planted_args){g->out, g->in, false}));
    if (with_fault) await_change(&g->out[LAST], OLD_OUT);
}

/* Kernels run one at a time; that does not order them. */
static void kernel_then_kernel(gpu *g, bool with_fault)
{
    need(planted_race(g->first, &(planted_args){g->out, g->in, false}));
    order(g, with_fault, &g->out[LAST], OLD_OUT);
    float first = with_fault ? peek(&g->out[LAST]) : 0;
    need(planted_copy(g->second, &(planted_args){g->out, g->in, false}));
    if (with_fault) await_change(&g->out[LAST], first);
}

/* Shared memory of two kernels is not one memory, though it has one address. */
static void kernels_side_by_side(gpu *g, bool with_fault)
{
    need(planted_race(g->first, &(planted_args){g->out, g->in, false}));
    if (with_fault) await_change(&g->out[LAST], OLD_OUT);
    float first = with_fault ? peek(&g->out[LAST]) : 0;
    planted_args second =
        with_fault ? (planted_args){g->out, g->host, false} : (planted_args){g->host, g->in, false};
    need(planted_race(g->second, &second));
    if (with_fault) await_change(&g->out[LAST], first);
}

/* Nor do kernels meet in the emulator's own memory, where it runs a warp's threads together. */
static void warps_side_by_side(gpu *g, bool with_fault)
{
    need(planted_warps(g->first, g->out));
    if (with_fault) await_change(&g->out[LAST], OLD_OUT);
    need(planted_warps(g->second, with_fault ? g->out : g->host));
}

static void host_then_copy(gpu *g, bool with_fault)
{
    need(bl_stream_copy(g->first, g->host, g->in, BYTES));
    if (with_fault)
        await_change(&g->host[LAST], OLD_HOST);
    else
        need(bl_stream_synchronize(g->first));
    g->host[0] = 1.0f;
}

typedef struct planted {
    const char *name;
    void (*run)(gpu *g, bool with_fault);
    const char *kernel; /* that the report must name */
} planted;

static const planted FAULTS[] = {
    {"kernel_then_copy", kernel_then_copy, "race_kernel"},
    {"copy_then_kernel", copy_then_kernel, "race_kernel"},
    {"kernel_then_kernel", kernel_then_kernel, "copy_kernel"},
    {"kernels_side_by_side", kernels_side_by_side, "race_kernel"},
    {"warps_side_by_side", warps_side_by_side, "warps_kernel"},
    {"host_then_copy", host_then_copy, "host_then_copy"},
};

static int run_case(const char *name, bool with_fault)
{
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++) {
        if (strcmp(name, FAULTS[i].name) != 0) continue;
        alarm(HANG_S);
        gpu g = open_gpu();
        FAULTS[i].run(&g, with_fault);
        close_gpu(&g);
        return 0;
    }
    return 2;
}

/* Runs the case; whether it ends as it should. text: what it printed. */
static bool ends_right(const planted *p, bool with_fault, char text[TEXT_BYTES], int *code)
{
    size_t n = 0;
    int ends[2], status;
    pid_t child;
    posix_spawn_file_actions_t actions;
    char *arguments[] = {(char *)"test", (char *)p->name, (char *)(with_fault ? "1" : "0"), NULL};

    assert_int_equal(pipe(ends), 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    memset(text, 0, TEXT_BYTES);
    for (ssize_t got; (got = read(ends[0], text + n, TEXT_BYTES - 1 - n)) > 0;) n += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    *code = status;
    return with_fault ? WIFEXITED(status) && WEXITSTATUS(status) == REPORTED &&
                            strstr(text, "data race") && strstr(text, p->kernel)
                      : WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* A lock that both threads happen to take in turn orders their accesses, and then there is no
 * report. So a fault has several attempts; without it each run must be right. */
static void check(const planted *p, bool with_fault)
{
    enum { MOST = 30 };
    char text[TEXT_BYTES];
    int status, n = 1;

    while (!ends_right(p, with_fault, text, &status)) {
        bool is_silent = with_fault && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!is_silent || n++ == MOST)
            fail_msg("%s, %s the fault: status %#x: %s", p->name, with_fault ? "with" : "without",
                     (unsigned)status, text);
    }
    if (n > 1) printf("again: %s was reported in attempt %d\n", p->name, n);
}

static void test_missing_waits_are_reported(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++) check(&FAULTS[i], true);
}

static void test_waits_are_seen(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++) check(&FAULTS[i], false);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_waits_are_reported),
        cmocka_unit_test(test_waits_are_seen),
    };
    if (argc == 3) return run_case(argv[1], argv[2][0] == '1');
    setenv("TSAN_OPTIONS", "exitcode=66:atexit_sleep_ms=0", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
