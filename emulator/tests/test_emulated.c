/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated GPU's guarantees (README.md): its modes and settings, and that it ends a program
 * whose calls a GPU does not allow. Settings are read once, so each case is a child process with
 * its own environment. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/cuda/stream.h"
#include "device/device.h"
#include "emulator/emulated.h"
#include "emulator/queue.h"

/* BLOCKED_MS: after which a copy of a byte is taken to wait for something. */
enum { TEXT_BYTES = 4096, BYTES = 1000, BLOCKED_MS = 3000 };

typedef struct outcome {
    int status; /* as waitpid has it */
    char text[TEXT_BYTES];
} outcome;

/* Runs body() in a child with these settings ("NAME=value", then NULL); returns the child's stderr.
 * The child exits with the return value of body. */
static outcome run(int (*body)(void), const char *const *settings)
{
    outcome out = {.status = 0};
    int ends[2];
    size_t n = 0;

    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        unsetenv("BALLAST_EMULATED_QUEUES"), unsetenv("BALLAST_EMULATED_GPUS");
        for (; *settings; settings++) putenv((char *)*settings);
        signal(SIGABRT, SIG_DFL), signal(SIGSEGV, SIG_DFL); /* not cmocka's */
        _exit(body());
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], out.text + n, TEXT_BYTES - 1 - n)) > 0;)
        n += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &out.status, 0), child);
    return out;
}

#define RUN(body, ...) run(body, (const char *const[]){__VA_ARGS__, NULL})
#define STRICT         "BALLAST_EMULATED=strict"
#define CONCURRENT     "BALLAST_EMULATED=concurrent"

static void assert_fine(outcome o)
{
    if (!WIFEXITED(o.status) || WEXITSTATUS(o.status) != 0)
        fail_msg("status %#x: %s", (unsigned)o.status, o.text);
}

static void assert_killed(outcome o, int signal_number, const char *line)
{
    if (!WIFSIGNALED(o.status) || WTERMSIG(o.status) != signal_number || !strstr(o.text, line))
        fail_msg("status %#x: %s", (unsigned)o.status, o.text);
}

/* ---- the children ---- */

typedef struct gpu {
    bl_device *device;
    bl_stream *stream;
    char *memory, *pinned; /* BYTES each */
} gpu;

static bool open_gpu(gpu *g)
{
    return bl_device_create_cuda(0, &g->device) == BL_OK &&
           bl_stream_create(g->device, "test", &g->stream) == BL_OK &&
           bl_device_alloc(g->device, BL_SPACE_DEVICE, BYTES, "test", (void **)&g->memory) ==
               BL_OK &&
           bl_device_alloc(g->device, BL_SPACE_HOST, BYTES, "test", (void **)&g->pinned) == BL_OK;
}

static int close_gpu(gpu *g)
{
    bl_status st = bl_stream_synchronize(g->stream);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->memory);
    bl_device_free(g->device, BL_SPACE_HOST, g->pinned);
    bl_stream_destroy(g->stream);
    bl_device_destroy(g->device);
    return st != BL_OK;
}

static bl_status set_first(bl_stream *stream, const void *args)
{
    (void)stream;
    **(char *const *)args = 1;
    return BL_OK;
}

static int copies_and_host_functions(void)
{
    gpu g;
    if (!open_gpu(&g)) return 1;
    memset(g.pinned, 7, BYTES);
    bool ok = bl_stream_copy(g.stream, g.memory, g.pinned, BYTES) == BL_OK &&
              bl_stream_call(g.stream, set_first, &g.pinned, sizeof g.pinned) == BL_OK &&
              bl_stream_copy(g.stream, g.pinned + 1, g.memory, BYTES - 1) == BL_OK &&
              bl_stream_synchronize(g.stream) == BL_OK && g.pinned[0] == 1 && g.pinned[1] == 7;
    return close_gpu(&g) || !ok;
}

static int host_touches(void)
{
    gpu g;
    if (!open_gpu(&g)) return 1;
    g.memory[BYTES / 2] = 1;
    return close_gpu(&g);
}

static int host_function_touches(void)
{
    gpu g;
    if (!open_gpu(&g)) return 1;
    (void)bl_stream_call(g.stream, set_first, &g.memory, sizeof g.memory);
    return close_gpu(&g);
}

static int copies_unpinned(void)
{
    char unpinned[BYTES] = "";
    gpu g;
    if (!open_gpu(&g)) return 1;
    (void)bl_stream_copy(g.stream, g.memory, unpinned, BYTES);
    return close_gpu(&g);
}

static void write_behind(void *memory)
{
    ((char *)memory)[BYTES] = 1;
}

static void write_before(void *memory)
{
    ((char *)memory)[-2] = 1;
}

static int kernel_writes(void (*work)(void *))
{
    gpu g;
    if (!open_gpu(&g)) return 1;
    (void)emulated_queue(bl_cuda_stream_handle(g.stream), work, g.memory);
    return close_gpu(&g);
}

static int kernel_writes_behind(void)
{
    return kernel_writes(write_behind);
}

static int kernel_writes_before(void)
{
    return kernel_writes(write_before);
}

static atomic_bool is_over;

static void spin(void *started)
{
    atomic_store((atomic_bool *)started, true);
    while (!atomic_load(&is_over)) sched_yield();
}

/* The stream that writes the byte is not synchronized: that is the point. */
__attribute__((no_sanitize("thread"))) static char peek(const volatile char *at)
{
    return *at;
}

/* While a kernel runs: pinned memory to the device, and within the device on another stream. Adds
 * 1 where the first has not ended after a second, and 2 where the second has not. */
static int copies_beside_a_kernel(void)
{
    static atomic_bool started;
    bl_stream *within;
    gpu g;
    int waiting = 3;

    if (!open_gpu(&g) || bl_stream_create(g.device, "within", &within) != BL_OK) return 8;
    char *end = g.memory + BYTES - 1, *half = end - BYTES / 2;
    g.pinned[BYTES - 1] = 5;
    g.memory[BYTES / 2 - 2] = 6; /* is copied to `half` */
    *end = *half = 0;
    if (emulated_queue(bl_cuda_stream_handle(g.stream), spin, &started) != 0) return 9;
    while (!atomic_load(&started)) sched_yield();
    bl_stream *in;
    if (bl_stream_create(g.device, "in", &in) != BL_OK) return 10;
    (void)bl_stream_copy(within, g.memory + BYTES / 2 - 1, g.memory + BYTES / 2 - 2, 1);
    (void)bl_stream_copy(in, g.memory + BYTES - 1, g.pinned + BYTES - 1, 1);
    for (int i = 0; i < 100 && waiting; i++) {
        usleep(10000);
        waiting = (peek(end) == 5 ? 0 : 1) + (peek(half) == 6 ? 0 : 2);
    }
    atomic_store(&is_over, true);
    (void)bl_stream_synchronize(within), (void)bl_stream_synchronize(in);
    bool all = *end == 5 && *half == 6;
    bl_stream_destroy(within), bl_stream_destroy(in);
    return close_gpu(&g) || !all ? 11 : waiting;
}

static bl_status wait_for_gate(bl_stream *stream, const void *args)
{
    const atomic_bool *gate = *(const atomic_bool *const *)args;
    (void)stream;
    while (!atomic_load(gate)) usleep(1000);
    return BL_OK;
}

static bl_status synchronize(bl_stream *stream, const void *args)
{
    (void)args;
    return bl_stream_synchronize(stream);
}

static int host_function_calls_cuda(void)
{
    gpu g;
    if (!open_gpu(&g)) return 1;
    (void)bl_stream_call(g.stream, synchronize, NULL, 0);
    return close_gpu(&g);
}

/* The GPU has a wait for a task of the host, then, on the next stream, a copy. 0: the copy is over
 * before the task; 1: it waits for the task. */
static int copies_behind_a_wait(void)
{
    static atomic_bool is_free;
    const atomic_bool *gate = &is_free;
    bl_stream *host, *next;
    bl_event *event;
    gpu g;

    if (!open_gpu(&g) || bl_stream_create(g.device, "next", &next) != BL_OK ||
        bl_stream_create_host(g.device, "host", &host) != BL_OK ||
        bl_event_create(g.device, &event) != BL_OK)
        return 8;
    g.pinned[0] = 5;
    bool ok = bl_stream_call(host, wait_for_gate, &gate, sizeof gate) == BL_OK &&
              bl_event_record(event, host) == BL_OK && bl_stream_wait(g.stream, event) == BL_OK &&
              bl_stream_copy(next, g.memory, g.pinned, 1) == BL_OK;
    for (int i = 0; ok && i < BLOCKED_MS / 10 && peek(g.memory) != 5; i++) usleep(10000);
    int waits = peek(g.memory) != 5;
    atomic_store(&is_free, true);
    ok = ok && bl_stream_synchronize(next) == BL_OK && peek(g.memory) == 5;
    bl_event_destroy(event);
    bl_stream_destroy(host), bl_stream_destroy(next);
    return close_gpu(&g) || !ok ? 9 : waits;
}

/* Another library has made the context. */
static int copies_in_a_context(void)
{
    return cudaSetDevice(0) == cudaSuccess ? copies_behind_a_wait() : 7;
}

/* 8 MiB hold 5, then not 5 more, then 5 again. */
static int takes_memory(void)
{
    enum { PIECE = 5 << 20 };
    size_t free_bytes, total_bytes;
    void *first, *second;
    gpu g;
    if (!open_gpu(&g)) return 1;
    if (bl_device_alloc(g.device, BL_SPACE_DEVICE, PIECE, "first", &first) != BL_OK) return 2;
    if (bl_device_measure_cuda(0, &free_bytes, &total_bytes) != BL_OK || total_bytes != 8 << 20 ||
        free_bytes > (3 << 20) || free_bytes < (2 << 20))
        return 3;
    if (bl_device_alloc(g.device, BL_SPACE_DEVICE, PIECE, "second", &second) != BL_ENOMEM) return 4;
    bl_device_free(g.device, BL_SPACE_DEVICE, first);
    if (bl_device_alloc(g.device, BL_SPACE_DEVICE, PIECE, "second", &second) != BL_OK) return 5;
    bl_device_free(g.device, BL_SPACE_DEVICE, second);
    return close_gpu(&g);
}

/* 0: GPU 1 is there, of capability 8.0; its refusal is on stderr. */
static int has_second_ampere(void)
{
    bl_device *device;
    if (bl_device_create_cuda(1, &device) != BL_OK) {
        fputs(bl_error_text(), stderr);
        return 1;
    }
    int capability = bl_cuda_device_properties(device)->capability;
    bl_device_destroy(device);
    return capability != 80;
}

/* ---- tests ---- */

static void test_both_modes_compute(void **state)
{
    (void)state;
    assert_fine(RUN(copies_and_host_functions, STRICT));
    assert_fine(RUN(copies_and_host_functions, CONCURRENT));
    assert_fine(RUN(copies_and_host_functions, CONCURRENT, "BALLAST_EMULATED_SEED=5"));
}

static void test_strict_closes_device_memory(void **state)
{
    (void)state;
    assert_killed(RUN(host_touches, STRICT), SIGSEGV, "the host touched device memory");
    assert_killed(RUN(host_function_touches, STRICT), SIGSEGV, "the host touched device memory");
    assert_fine(RUN(host_touches, CONCURRENT)); /* not checked */
}

static void test_strict_wants_pinned_memory(void **state)
{
    (void)state;
    assert_killed(RUN(copies_unpinned, STRICT), SIGABRT,
                  "copy of 1000 bytes from or to host memory that is not pinned");
    assert_fine(RUN(copies_unpinned, CONCURRENT));
}

static void test_what_kernels_may_not_write(void **state)
{
    (void)state;
    assert_killed(RUN(kernel_writes_behind, CONCURRENT), SIGABRT,
                  "0 bytes behind an allocation of 1000");
    assert_killed(RUN(kernel_writes_before, STRICT), SIGABRT,
                  "2 bytes before an allocation of 1000");
}

static void test_host_functions_call_nothing(void **state)
{
    (void)state;
    assert_killed(RUN(host_function_calls_cuda, CONCURRENT), SIGABRT, "a host function calls CUDA");
    assert_killed(RUN(host_function_calls_cuda, STRICT), SIGABRT, "a host function calls CUDA");
}

/* A copy engine moves bytes beside a kernel; a copy within the device needs what the kernel has. */
static void test_a_kernel_may_have_the_whole_gpu(void **state)
{
    (void)state;
    outcome shared = RUN(copies_beside_a_kernel, CONCURRENT),
            whole = RUN(copies_beside_a_kernel, CONCURRENT, "BALLAST_EMULATED_WHOLE_GPU=yes");
    assert_fine(shared);
    assert_true(WIFEXITED(whole.status));
    assert_int_equal(WEXITSTATUS(whole.status), 2);
}

static int blocks_with(const char *queues)
{
    char connections[64], emulated[64];
    int number = atoi(queues + 1);
    bool is_emulated = *queues == 'E';

    snprintf(connections, sizeof connections, "CUDA_DEVICE_MAX_CONNECTIONS=%d",
             is_emulated ? 32 : number);
    snprintf(emulated, sizeof emulated, "BALLAST_EMULATED_QUEUES=%d", number);
    outcome o = is_emulated ? RUN(copies_behind_a_wait, CONCURRENT, connections, emulated)
                            : RUN(copies_behind_a_wait, CONCURRENT, connections);
    if (!WIFEXITED(o.status) || WEXITSTATUS(o.status) > 1 ||
        (!is_emulated && !strstr(o.text, "CUDA_DEVICE_MAX_CONNECTIONS=1 is replaced by 32")))
        fail_msg("%s: status %#x: %s", queues, (unsigned)o.status, o.text);
    return WEXITSTATUS(o.status);
}

/* A device raises the variable to 32 before there are queues. With ThreadSanitizer the variable
 * gives no queues (settings.c). */
static void test_streams_share_queues(void **state)
{
#ifdef __SANITIZE_THREAD__
    const int waits = 0;
#else
    const int waits = 1;
#endif
    (void)state;
    assert_int_equal(blocks_with("E1"), 1);
    assert_int_equal(blocks_with("E8"), 0);
    assert_int_equal(blocks_with("E32"), 0);
    assert_int_equal(blocks_with("E0"), 0);
    assert_int_equal(blocks_with("C1"), 0);
    outcome late = RUN(copies_in_a_context, CONCURRENT, "CUDA_DEVICE_MAX_CONNECTIONS=1");
    if (!WIFEXITED(late.status) || WEXITSTATUS(late.status) != waits ||
        !strstr(late.text, "CUDA was in use before Ballast, with 1 hardware queues"))
        fail_msg("status %#x: %s", (unsigned)late.status, late.text);
}

static void test_settings(void **state)
{
    (void)state;
    assert_fine(RUN(takes_memory, "BALLAST_EMULATED_MEMORY_MIB=8"));
    assert_fine(RUN(has_second_ampere, "BALLAST_EMULATED_ARCH=80", "BALLAST_EMULATED_DEVICES=2"));
    outcome o = RUN(has_second_ampere, CONCURRENT);
    assert_int_equal(WEXITSTATUS(o.status), 1);
    assert_non_null(strstr(o.text, "GPU 1 is not among this machine's 1"));
    o = RUN(has_second_ampere, "BALLAST_EMULATED_DEVICES=2", "BALLAST_EMULATED_GPUS=1");
    assert_int_equal(WEXITSTATUS(o.status), 1);
    assert_non_null(strstr(o.text, "GPU 1 is not among this machine's 1"));
    o = RUN(has_second_ampere, "BALLAST_EMULATED_DRIVER=12040", "BALLAST_EMULATED_DEVICES=2");
    assert_int_equal(WEXITSTATUS(o.status), 1);
    assert_non_null(strstr(o.text, "driver serves CUDA 12.4"));
    assert_killed(RUN(has_second_ampere, "BALLAST_EMULATED=fast"), SIGABRT,
                  "BALLAST_EMULATED=fast: concurrent or strict");
    assert_killed(RUN(has_second_ampere, "BALLAST_EMULATED_DEVICES=-1"), SIGABRT,
                  "BALLAST_EMULATED_DEVICES=-1: a number from 0 to 64");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_modes_compute),
        cmocka_unit_test(test_strict_closes_device_memory),
        cmocka_unit_test(test_strict_wants_pinned_memory),
        cmocka_unit_test(test_what_kernels_may_not_write),
        cmocka_unit_test(test_host_functions_call_nothing),
        cmocka_unit_test(test_a_kernel_may_have_the_whole_gpu),
        cmocka_unit_test(test_streams_share_queues),
        cmocka_unit_test(test_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
