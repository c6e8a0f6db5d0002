/* SPDX-License-Identifier: Apache-2.0 */
/* A process whose thread for the others cannot be made: which limit it was. The linker puts __wrap_bl_thread_create in the place of
 * bl_thread_create. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/thread.h"
#include "comm/wire/internal.h"

int __wrap_bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument);
int __wrap_bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument)
{
    (void)thread, (void)main, (void)argument;
    return EAGAIN;
}

static int n_freed;

static void count_free(void *state)
{
    (void)state;
    n_freed++;
}

static void test_no_more_threads(void **state)
{
    static const bl_wire_transport transport = {.free = count_free};
    bl_wire *wire;

    (void)state;
    assert_int_equal(bl_wire_open(&transport, NULL, 0, 8, NULL, &wire), BL_ELIMIT);
    assert_string_equal(bl_error_text(), "a job of 8 processes: no more threads");
    assert_null(wire);
    assert_int_equal(n_freed, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_more_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
