/* SPDX-License-Identifier: Apache-2.0 */
/* An open data set: its fingerprint, threads that build and read rows, a file that changes
 * meanwhile, the split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "dataset_case.h"

static void test_fingerprint(void **state)
{
    static const char row[] = "{\"prompt\":\"ab\",\"completion\":\"abc\"}\n";
    bl_dataset_options options = default_options();
    bl_dataset *dataset = open_with(&options, row);
    uint64_t first = bl_dataset_fingerprint(dataset);
    char other[160];

    (void)state;
    bl_dataset_close(dataset);
    strcpy(other, path);
    snprintf(path, sizeof path, "%s/elsewhere.jsonl", folder);
    dataset = open_with(&options, row);
    assert_true(bl_dataset_fingerprint(dataset) == first); /* whatever its path */
    bl_dataset_close(dataset);
    options.path = path;

    for (int change = 0; change < 4; change++) {
        options = default_options();
        options.train_on_inputs = change == 0;
        options.max_seq_length = change == 1 ? 100 : 0;
        options.eos_id = change == 2 ? EOS + 1 : EOS;
        snprintf(other, sizeof other, "%s%s", row, change == 3 ? "\n" : "");
        dataset = open_with(&options, other);
        assert_true(bl_dataset_fingerprint(dataset) != first);
        bl_dataset_close(dataset);
    }
}

/* Many batches, with bad rows among them: how many threads build them changes nothing, and the
 * first bad row is the one named. */
static void test_threads_build_rows(void **state)
{
    enum { N_ROWS = 3000, N_BYTES = N_ROWS * 48 };
    static char text[N_BYTES];
    bl_dataset_options options = default_options();
    bl_dataset_stats stats, first_stats = {0};
    uint64_t first = 0;
    size_t n = 0;
    bl_dataset *dataset;

    (void)state;
    for (int i = 0; i < N_ROWS; i++)
        n += (size_t)snprintf(text + n, sizeof text - n,
                              i % 700 == 699 ? "{\"text\":%d}\n" : "{\"text\":\"ab hello %d\"}\n",
                              i);
    for (int n_threads = 1; n_threads <= 7; n_threads += 3) {
        options.n_threads = n_threads;
        options.skip_bad = true;
        dataset = open_with(&options, text);
        bl_dataset_get_stats(dataset, &stats);
        assert_int_equal(stats.n_bad, 4);
        assert_int_equal(bl_dataset_count(dataset), N_ROWS - 4);
        if (n_threads == 1) {
            first = bl_dataset_fingerprint(dataset);
            first_stats = stats;
        }
        assert_true(bl_dataset_fingerprint(dataset) == first);
        assert_memory_equal(&stats, &first_stats, sizeof stats);
        bl_dataset_close(dataset);
        options.skip_bad = false;
        check_refused(&options, text, n, ":700: key text: expected a string, got 699");
    }
}

static void test_changed_file_is_noticed(void **state)
{
    bl_sample sample;
    bl_dataset *dataset = open_text("{\"text\":\"ab ab\"}\n{\"text\":\"ab ab\"}\n");

    (void)state;
    write_bytes("{\"text\":\"ab ab\"}\n{\"text\":\"ababa\"}\n", 34);
    assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
    bl_sample_free(&sample);
    assert_int_equal(bl_dataset_get(dataset, 1, &sample), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), ":2: sample 1 (from 0) has changed"));
    assert_null(sample.ids);
    write_bytes("{\"te", 4);
    assert_int_equal(bl_dataset_get(dataset, 1, &sample), BL_EIO);
    bl_dataset_close(dataset);
}

static void *get_often(void *arg)
{
    const bl_dataset *dataset = arg;
    intptr_t n_wrong = 0;

    for (int64_t i = 0; i < 3000; i++) {
        bl_sample sample;
        if (bl_dataset_get(dataset, i % 50, &sample) != BL_OK ||
            sample.ids[1] != 10 + (int32_t)(i % 50))
            n_wrong++;
        bl_sample_free(&sample);
    }
    return (void *)n_wrong;
}

static void test_threads_get_samples(void **state)
{
    enum { N_THREADS = 4 };
    char text[4096];
    size_t n = 0;
    pthread_t thread[N_THREADS];
    void *n_wrong;

    (void)state;
    for (int i = 0; i < 50; i++) n += (size_t)sprintf(text + n, "{\"input_ids\":[1,%d]}\n", 10 + i);
    bl_dataset *dataset = open_text(text);
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, get_often, dataset), 0);
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(thread[i], &n_wrong);
        assert_null(n_wrong);
    }
    bl_dataset_close(dataset);
}

static void test_split_rounds_half_to_even(void **state)
{
    int64_t n;
    (void)state;
    assert_int_equal(bl_dataset_split(1000, 5, &n), BL_OK);
    assert_int_equal(n, 50);
    assert_int_equal(bl_dataset_split(50, 5, &n), BL_OK); /* 2.5 */
    assert_int_equal(n, 2);
    assert_int_equal(bl_dataset_split(70, 5, &n), BL_OK); /* 3.5 */
    assert_int_equal(n, 4);
    assert_int_equal(bl_dataset_split(10, 0, &n), BL_OK);
    assert_int_equal(n, 0);
    assert_int_equal(bl_dataset_split(10, 1, &n), BL_EUSAGE);
    assert_int_equal(bl_dataset_split(10, 99, &n), BL_EUSAGE);
    assert_int_equal(bl_dataset_split(10, 100, &n), BL_EUSAGE);
    assert_int_equal(bl_dataset_split(10, -1, &n), BL_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fingerprint, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_threads_build_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_changed_file_is_noticed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_threads_get_samples, set_up, tear_down),
        cmocka_unit_test(test_split_rounds_half_to_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
