/* SPDX-License-Identifier: Apache-2.0 */
/* A process whose thread for the others cannot be made: the error names the limit. The linker
 * replaces bl_thread_create by __wrap_bl_thread_create. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/socket.h>
#include <unistd.h>

#include "base/thread.h"
#include "comm/wire.h"

int __wrap_bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument);
int __wrap_bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument)
{
    (void)thread, (void)main, (void)argument;
    return EAGAIN;
}

/* The socket is the wire's, also when it is not opened. */
static void test_no_more_threads(void **state)
{
    int pair[2], sockets[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    bl_wire_links links = {.n_processes = 8, .sockets = sockets, .n_on_host = 8, .shared_fd = -1};
    bl_wire *wire;
    char byte;

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    sockets[1] = pair[0];
    assert_int_equal(bl_wire_open_sockets(&links, NULL, &wire), BL_ELIMIT);
    assert_string_equal(bl_error_text(), "a job of 8 processes: no more threads");
    assert_null(wire);
    assert_int_equal(recv(pair[1], &byte, 1, 0), 0);
    close(pair[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_more_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
