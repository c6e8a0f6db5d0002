/* SPDX-License-Identifier: Apache-2.0 */
/* A guarded CPU device: host code that touches device memory ends by SIGSEGV, tasks may touch it,
 * and a call that queues a task returns when it has run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sizes.h"
#include "device/device.h"
#include "device/guard.h"

enum { N = 1 << 16, BLOCKS = 40 };

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static bl_device *guarded_device(void)
{
    bl_device *device;
    bl_device_guard_memory(true);
    assert_ok(bl_device_create_cpu(2, &device));
    bl_device_guard_memory(false);
    return device;
}

static void *allocate(bl_device *device, bl_space space, size_t n_bytes)
{
    void *memory;
    assert_ok(bl_device_alloc(device, space, n_bytes, "numbers", &memory));
    return memory;
}

/* ---- what may touch it ---- */

typedef struct fill_args {
    uint32_t *x;
    uint32_t first;
} fill_args;

static void fill_piece(void *arg, int64_t index, void *scratch)
{
    const fill_args *a = arg;
    (void)scratch;
    for (int64_t i = index * (N / 8); i < (index + 1) * (N / 8); i++)
        a->x[i] = a->first + (uint32_t)i;
}

static bl_status fill(bl_stream *stream, const void *args)
{
    fill_args a = *(const fill_args *)args;
    bl_pool_run(bl_device_pool(bl_stream_device(stream)), 8, fill_piece, &a);
    return BL_OK;
}

/* New blocks are zero; tasks of two streams and the workers of one see the same bytes. */
static void check_blocks(bl_device *device, bl_stream *a, bl_stream *b, uint32_t *host)
{
    uint32_t *x[BLOCKS];

    for (int k = 0; k < BLOCKS; k++) {
        x[k] = allocate(device, BL_SPACE_DEVICE, N * sizeof **x);
        host[N - 1] = 1;
        assert_ok(bl_stream_copy(b, host, x[k], N * sizeof *host));
        for (int i = 0; i < N; i++) assert_int_equal(host[i], 0); /* no wait: it has run */
        fill_args args = {x[k], (uint32_t)k};
        assert_ok(bl_stream_call(a, fill, &args, sizeof args));
    }
    for (int k = 0; k < BLOCKS; k++) {
        assert_ok(bl_stream_copy(b, host, x[k], N * sizeof *host));
        for (int i = 0; i < N; i++) assert_int_equal(host[i], k + i);
        assert_ok(bl_stream_zero(a, x[k], N * sizeof *host));
        assert_ok(bl_stream_copy(b, host, x[k], N * sizeof *host));
        for (int i = 0; i < N; i++) assert_int_equal(host[i], 0);
        bl_device_free(device, BL_SPACE_DEVICE, x[k]);
    }
}

/* Again after all blocks were freed. */
static void test_tasks_touch_it(void **state)
{
    bl_device *device = guarded_device();
    bl_stream *a, *b;
    uint32_t *host = allocate(device, BL_SPACE_HOST, N * sizeof *host);

    (void)state;
    assert_false(bl_device_host_writes(device));
    assert_ok(bl_stream_create(device, "a", &a));
    assert_ok(bl_stream_create(device, "b", &b));
    for (int round = 0; round < 2; round++) check_blocks(device, a, b, host);
    bl_stream_destroy(a);
    bl_stream_destroy(b);
    bl_device_free(device, BL_SPACE_HOST, host);
    bl_device_destroy(device);
}

static void test_a_device_is_guarded_when_asked(void **state)
{
    bl_device *device;

    (void)state;
    assert_ok(bl_device_create_cpu(1, &device));
    assert_true(bl_device_host_writes(device));
    int *x = allocate(device, BL_SPACE_DEVICE, sizeof *x);
    *x = 7;
    bl_device_free(device, BL_SPACE_DEVICE, x);
    bl_device_destroy(device);
}

static void test_more_than_there_are_addresses(void **state)
{
    bl_device *device = guarded_device();
    void *memory;

    (void)state;
    assert_int_equal(bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)65 << 30, "the sun", &memory),
                     BL_ENOMEM);
    bl_device_destroy(device);
}

/* ---- planted touches, each in a child ---- */

typedef enum touch {
    READ,
    WRITE,
    READ_AFTER_TASKS,
    READ_FREED,
    READ_FREED_BY_TASK,
    READ_SECOND, /* a block made after all others were freed */
    CALL_SYSTEM,
    TOUCH_HOST_SPACE,
    TOUCHES
} touch;

static bl_status free_block(bl_stream *stream, const void *args)
{
    bl_device_free(bl_stream_device(stream), BL_SPACE_DEVICE, *(void *const *)args);
    return BL_OK;
}

/* Exit code 0: nothing happened. */
static void touch_memory(touch how)
{
    bl_device *device = guarded_device();
    bl_stream *stream;
    int32_t *x =
        allocate(device, how == TOUCH_HOST_SPACE ? BL_SPACE_HOST : BL_SPACE_DEVICE, N * sizeof *x);
    volatile int32_t *at = x + N / 2;
    int32_t value = 0;

    signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would end the process otherwise */
    assert_ok(bl_stream_create(device, "stream", &stream));
    if (how == READ_AFTER_TASKS) assert_ok(bl_stream_zero(stream, x, N * sizeof *x));
    if (how == READ_AFTER_TASKS) assert_ok(bl_stream_synchronize(stream));
    if (how == READ_FREED || how == READ_SECOND) {
        assert_ok(bl_stream_zero(stream, x, N * sizeof *x));
        bl_device_free(device, BL_SPACE_DEVICE, x);
    }
    if (how == READ_FREED_BY_TASK) { /* while the memory is open */
        void *block = x;
        assert_ok(bl_stream_call(stream, free_block, &block, sizeof block));
    }
    if (how == READ_SECOND) {
        x = allocate(device, BL_SPACE_DEVICE, N * sizeof *x);
        assert_ok(bl_stream_zero(stream, x, N * sizeof *x));
        at = x + N / 2;
    }
    if (how == CALL_SYSTEM) {
        int ends[2];
        if (pipe(ends) == 0 && write(ends[1], x, sizeof *x) < 0 && errno == EFAULT) raise(SIGSEGV);
    } else if (how == WRITE || how == TOUCH_HOST_SPACE) {
        *at = 1;
    } else {
        value = *at;
    }
    _exit(value == 0 ? 0 : 3);
}

static void test_planted_touches(void **state)
{
    (void)state;
    for (int how = 0; how < TOUCHES; how++) {
        int status;
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) touch_memory((touch)how);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (how == TOUCH_HOST_SPACE)
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        else if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV)
            fail_msg("touch %d: status %d", how, status);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_planted_touches),
                                       cmocka_unit_test(test_tasks_touch_it),
                                       cmocka_unit_test(test_a_device_is_guarded_when_asked),
                                       cmocka_unit_test(test_more_than_there_are_addresses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
