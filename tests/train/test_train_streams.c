/* SPDX-License-Identifier: Apache-2.0 */
/* Training whose standard streams are closed, full or without a reader: it continues, and not a
 * byte of its log gets into its output files. Commands whose product is their standard output fail
 * instead. */
#include "runs.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"

enum { EXIT_IO = 4, CLOSED_0 = 1, CLOSED_1 = 2, CLOSED_2 = 4, FULL = 8, NO_READER = 16 };

static const double LIMIT_S = 600;

/* In the child: closes or replaces its standard streams. */
static bool spoil_streams(const int *how)
{
    int ends[2];

    if (*how & (FULL | NO_READER)) {
        ends[1] = open("/dev/full", O_WRONLY);
        if (*how & NO_READER && (pipe(ends) != 0 || close(ends[0]) != 0)) return false;
        if (ends[1] < 0 || dup2(ends[1], 1) < 0 || dup2(ends[1], 2) < 0) return false;
    }
    closefrom(3); /* so that the next file gets the lowest number of those closed here */
    for (int fd = 0; fd < 3; fd++)
        if (*how & (1 << fd)) close(fd);
    return true;
}

static void keys(golden_args *args, const char *output)
{
    runs_standard(args, output, 2);
    runs_set(args, "logging_steps", "1");
    runs_set(args, "dump_gradients", "%s.gradients", output);
}

static void assert_same_bytes(const char *path_a, const char *path_b)
{
    size_t n_a, n_b;
    char *a = runs_read(path_a, &n_a), *b = runs_read(path_b, &n_b);
    if (n_a != n_b || memcmp(a, b, n_a) != 0) fail_msg("%s and %s differ", path_a, path_b);
    free(a);
    free(b);
}

static void test_train(void **state)
{
    static const int cases[] = {
        CLOSED_0, CLOSED_1, CLOSED_2, CLOSED_1 | CLOSED_2, CLOSED_0 | CLOSED_1 | CLOSED_2,
        FULL,     NO_READER};
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    keys(&args, runs_path("whole"));
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    golden_args_free(&args);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *output = runs_path("spoilt-%zu", i);
        runs_child spoilt = {.prepare = spoil_streams, .arg = &cases[i]};
        keys(&args, output);
        runs_start(&spoilt, "train", &args);
        int code = runs_wait(&spoilt, LIMIT_S);
        if (code != 0) fail_msg("case %zu: exit code %d", i, code);
        assert_true(runs_are_same(runs_path("whole"), output));
        assert_same_bytes(runs_path("whole.gradients"), runs_path("spoilt-%zu.gradients", i));
        char *lock = runs_read(runs_path("spoilt-%zu/.ballast.lock", i), NULL);
        assert_int_equal(atoi(lock), spoilt.pid);
        assert_null(strchr(strchr(lock, '\n') + 1, '\n'));
        free(lock);
        golden_args_free(&args);
    }
}

static void test_commands_that_print(void **state)
{
    static const int cases[] = {CLOSED_1, FULL, NO_READER};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        runs_child child = {.prepare = spoil_streams, .arg = &cases[i]};
        golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
        golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
        golden_args_add(&args, "data_format", "tokens");
        golden_args_add(&args, "max_seq_length", "64");
        runs_start(&child, "eval", &args);
        assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_IO);
        if (cases[i] == CLOSED_1) runs_assert_error(&child, "writing to the standard output");
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train),
        cmocka_unit_test(test_commands_that_print),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
