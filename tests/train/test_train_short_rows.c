/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that are all far shorter than max_seq_length: a run's memory, to the byte, and its bits are
 * those of a run with a max_seq_length that its longest row just fills. Buffers too small would be
 * an internal error, or AddressSanitizer's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "runs.h"

enum { VOCABULARY = 96, N_ROWS = 24 };

/* Rows of `shortest` to `longest` tokens; the longest is neither the first nor the last. */
static void write_rows(const char *path, int shortest, int longest)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int row = 0; row < N_ROWS; row++) {
        int length = row == N_ROWS / 2 ? longest : shortest + row * 7 % (longest - shortest);
        fputs("{\"input_ids\":[", file);
        for (int t = 0; t < length; t++)
            fprintf(file, "%s%d", t ? "," : "", (row * 37 + t * 11) % VOCABULARY);
        fputs("]}\n", file);
    }
    assert_int_equal(fclose(file), 0);
}

typedef struct rows_case {
    const char *name;
    int ranks, longest_train, longest_validation; /* validation 0: the training file is split */
    const char *packing;
    int fitting; /* the max_seq_length that the longest row just fills */
} rows_case;

/* MiB; the log has GB. */
static double read_prediction(const char *log)
{
    double gb = 0;
    char *text = runs_read(log, NULL), *line = strstr(text, "memory predicted: ");
    assert_non_null(line);
    assert_int_equal(sscanf(line, "memory predicted: %lf GB", &gb), 1);
    free(text);
    return gb * 1e9 / (1 << 20);
}

static double train(const rows_case *c, int max_seq_length, const char *output)
{
    golden_args args = {0};
    runs_child child = {0};

    runs_standard(&args, output, c->ranks);
    runs_set(&args, "max_steps", "4");
    runs_set(&args, "train_file", "%s", runs_path("train.jsonl"));
    runs_set(&args, "data_format", "tokens");
    runs_set(&args, "max_seq_length", "%d", max_seq_length);
    runs_set(&args, "packing", "%s", c->packing);
    runs_set(&args, "per_device_eval_batch_size", "3");
    if (c->longest_validation) {
        runs_set(&args, "validation_file", "%s", runs_path("validation.jsonl"));
        write_rows(runs_path("validation.jsonl"), 4, c->longest_validation);
    } else {
        runs_unset(&args, "validation_file");
        runs_set(&args, "validation_split_percentage", "25");
    }
    write_rows(runs_path("train.jsonl"), 5, c->longest_train);
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 120), 0);
    golden_args_free(&args);
    return read_prediction(child.log);
}

static void test_short_rows(void **state)
{
    static const rows_case cases[] = {
        {"training rows are longest", 1, 40, 16, "none", 40},
        {"validation rows are longest", 2, 16, 40, "none", 40},
        {"a split", 1, 40, 0, "none", 40},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const rows_case *c = &cases[i];
        double fitting = train(c, c->fitting, runs_path("fitting-%zu", i));
        double generous = train(c, 32768, runs_path("generous-%zu", i));
        printf("%s: predicted %.1f MiB with max_seq_length %d, %.1f MiB with 32768\n", c->name,
               fitting, c->fitting, generous);
        assert_true(fabs(fitting - generous) < 1.0); /* what reading the data left is measured */
        assert_true(runs_are_same(runs_path("fitting-%zu", i), runs_path("generous-%zu", i)));
    }
}

/* Packed rows are as long as their samples let them be. */
static void test_packed_rows(void **state)
{
    static const rows_case cases[] = {{"packed", 2, 40, 16, "pack", 0},
                                      {"concatenated", 1, 40, 16, "concatenate", 0}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        double some = train(&cases[i], 64, runs_path("packed-%zu", i));
        printf("%s: predicted %.1f MiB\n", cases[i].name, some);
    }
    const rows_case all_in_one = {"one row each", 1, 40, 16, "pack", 0};
    double short_rows = train(&all_in_one, 1024, runs_path("one-row-1024"));
    assert_true(fabs(short_rows - train(&all_in_one, 32768, runs_path("one-row-32768"))) < 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_short_rows),
                                       cmocka_unit_test(test_packed_rows)};
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
