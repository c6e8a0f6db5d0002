/* SPDX-License-Identifier: Apache-2.0 */
/* Work that takes minutes says how far it is: a line of the log every five seconds, no more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

static double now_s = 1000.0;

double __wrap_bl_now_s(void);
double __wrap_bl_now_s(void)
{
    return now_s;
}

/* The text written to stderr while it was `file`. */
static char *read_back(int file)
{
    static char text[1024];
    ssize_t n = pread(file, text, sizeof text - 1, 0);
    assert_true(n >= 0);
    text[n] = '\0';
    return text;
}

static void test_a_line_every_five_seconds(void **state)
{
    char path[] = "/tmp/ballast-log-XXXXXX";
    int file = mkstemp(path), saved = dup(STDERR_FILENO), n_told = 0;
    double told_s = now_s;

    (void)state;
    assert_true(file >= 0 && saved >= 0);
    assert_int_equal(unlink(path), 0);
    assert_true(dup2(file, STDERR_FILENO) >= 0);
    for (int tenth = 1; tenth <= 121; tenth++) { /* 12.1 s */
        now_s = 1000.0 + 0.1 * tenth;
        n_told += bl_log_advance(&told_s, "pinning: %d of %d", tenth, 121);
    }
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    char *text = read_back(file);
    close(file);
    close(saved);
    assert_int_equal(n_told, 2);
    assert_non_null(strstr(text, "pinning: 5"));
    assert_non_null(strstr(text, "pinning: 10"));
    assert_int_equal(strlen(text), strlen("pinning: 50 of 121\npinning: 100 of 121\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_line_every_five_seconds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
