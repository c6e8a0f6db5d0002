/* SPDX-License-Identifier: Apache-2.0 */
/* A data set that the ranks of a host open together: the file is read by one of them, and all have
 * the samples, packed rows, counts and fingerprint that a process alone has; its errors are those
 * of the one that reads. Ranks are threads that map one memory file, each for itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "data/dataset.h"
#include "test_ranks.h"

enum { VOCAB = 1000, N_ROWS = 700, MAX_RANKS = 4 };

static char folder[64], path[128];

static int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-shared-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

/* Rows of 2 to 18 tokens; row `bad` (-1: none) has an id that is not in the vocabulary. */
static void write_rows(int bad)
{
    FILE *out = fopen(path, "w");

    assert_non_null(out);
    for (int r = 0; r < N_ROWS; r++) {
        fprintf(out, "{\"input_ids\": [%d", r == bad ? VOCAB : r);
        for (int t = 1; t < 2 + r * 7 % 17; t++) fprintf(out, ", %d", (r * 31 + t * 17) % VOCAB);
        fputs("]}\n", out);
    }
    assert_int_equal(fclose(out), 0);
}

typedef struct shared_case {
    bl_packing packing; /* NONE: samples */
    bl_dataset_options options;
    const bl_dataset *alone; /* NULL: not compared */
    int fd;
} shared_case;

static bl_status open_set(const bl_dataset_options *options, bl_packing packing, bl_dataset **out)
{
    enum { ROW_TOKENS = 40, FIRST = 3 };
    bl_dataset *samples, *packed;

    BL_TRY(bl_dataset_open(options, NULL, &samples));
    *out = samples;
    if (packing == BL_PACKING_NONE) return BL_OK;
    bl_status st = bl_dataset_pack(samples, packing, ROW_TOKENS, FIRST,
                                   bl_dataset_count(samples) - FIRST, &packed);
    bl_dataset_close(samples);
    *out = packed;
    return st;
}

static bl_status compare_row(const bl_dataset *a, const bl_dataset *b, int64_t index)
{
    bl_sample x, y;

    BL_TRY(bl_dataset_get(a, index, &x));
    bl_status st = bl_dataset_get(b, index, &y);
    size_t n_bytes = (size_t)x.n_tokens * sizeof *x.ids;
    if (st == BL_OK &&
        (x.n_tokens != y.n_tokens || bl_dataset_n_tokens(b, index) != x.n_tokens ||
         memcmp(x.ids, y.ids, n_bytes) != 0 || memcmp(x.labels, y.labels, n_bytes) != 0 ||
         (x.document_ids != NULL) != (y.document_ids != NULL) ||
         (x.document_ids && memcmp(x.document_ids, y.document_ids, n_bytes) != 0)))
        st = BL_FAIL(BL_EINTERNAL, "row %lld differs", (long long)index);
    bl_sample_free(&x);
    bl_sample_free(&y);
    return st;
}

static bl_status compare(const bl_dataset *alone, const bl_dataset *shared)
{
    bl_dataset_stats a, b;

    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    bl_dataset_get_stats(alone, &a);
    bl_dataset_get_stats(shared, &b);
    TEST_CHECK(memcmp(&a, &b, sizeof a) == 0);
    TEST_CHECK(bl_dataset_fingerprint(alone) == bl_dataset_fingerprint(shared));
    TEST_CHECK(bl_dataset_format(alone) == bl_dataset_format(shared));
    TEST_CHECK(bl_dataset_count(alone) == bl_dataset_count(shared));
    for (int64_t i = 0; i < bl_dataset_count(alone); i++) BL_TRY(compare_row(alone, shared, i));
    return BL_OK;
}

static bl_status open_together(test_rank *self)
{
    const shared_case *c = self->arg;
    bl_dataset_options options = c->options;
    bl_dataset *set = NULL;

    BL_TRY(bl_host_memory_open(c->fd, self->comm, &options.host));
    bl_status st = open_set(&options, c->packing, &set);
    /* An index in host memory outlives the handle that allocated it. */
    bl_host_memory_close(options.host);
    if (st == BL_OK && c->alone) st = compare(c->alone, set);
    bl_dataset_close(set);
    return st;
}

static void test_same_rows(void **state)
{
    (void)state;
    write_rows(-1);
    for (int p = BL_PACKING_NONE; p <= BL_PACKING_CONCATENATE; p++) {
        shared_case c = {.packing = (bl_packing)p, .options = bl_dataset_default_options(path)};
        bl_dataset *alone = NULL;
        c.options.vocab_size = VOCAB;
        assert_int_equal(open_set(&c.options, c.packing, &alone), BL_OK);
        c.alone = alone;
        for (int n = 1; n <= MAX_RANKS; n++) {
            struct stat info;
            c.fd = memfd_create("test_dataset_shared", MFD_CLOEXEC);
            if (test_ranks_run(n, 1, 60, open_together, &c, NULL) != BL_OK)
                fail_msg("packing %s, %d ranks: %s", bl_packing_name(c.packing), n,
                         bl_error_text());
            /* The index is there once: its parts, each in whole pages, and the header. */
            assert_int_equal(fstat(c.fd, &info), 0);
            int64_t most = bl_dataset_index_bytes(alone) + 4 * 4096;
            assert_true(n == 1 ? info.st_size == 0 : info.st_size > 4096 && info.st_size <= most);
            close(c.fd);
        }
        bl_dataset_close(alone);
    }
}

/* Only the first rank reads: a file that it alone could read wrongly is not read by the others. */
static void check_errors(const shared_case *given, bl_status status)
{
    shared_case c = *given;
    char expected[BL_ERROR_TEXT_BYTES];
    bl_dataset *alone = NULL;

    assert_int_equal(open_set(&c.options, c.packing, &alone), status);
    snprintf(expected, sizeof expected, "%s", bl_error_text());
    for (int n = 2; n <= MAX_RANKS; n++) {
        bl_error errors[MAX_RANKS];
        c.fd = memfd_create("test_dataset_shared", MFD_CLOEXEC);
        assert_int_equal(test_ranks_run(n, 1, 60, open_together, &c, errors), status);
        assert_string_equal(errors[0].text, expected);
        for (int r = 1; r < n; r++) assert_int_equal(errors[r].status, BL_ECANCELED);
        close(c.fd);
    }
}

static void test_errors_of_the_reader(void **state)
{
    shared_case c = {.options = bl_dataset_default_options(path)};

    (void)state;
    c.options.vocab_size = VOCAB;
    write_rows(N_ROWS - 2);
    check_errors(&c, BL_EINPUT);
    write_rows(-1);
    c.options.overlong = BL_OVERLONG_ERROR;
    c.options.max_seq_length = 17;
    check_errors(&c, BL_EINPUT);
    c.options.max_seq_length = 1;
    check_errors(&c, BL_EUSAGE);
}

/* What packing refuses is the index's maker's to say, too: after a scan that went well. */
static void test_errors_of_packing(void **state)
{
    shared_case c = {.packing = BL_PACKING_PACK, .options = bl_dataset_default_options(path)};
    FILE *out = fopen(path, "w");

    (void)state;
    assert_non_null(out);
    for (int r = 0; r < 5; r++) {
        fputs("{\"input_ids\": [0", out);
        for (int t = 1; t < 40 + r; t++) fprintf(out, ", %d", t);
        fputs("]}\n", out);
    }
    assert_int_equal(fclose(out), 0);
    c.options.vocab_size = VOCAB;
    check_errors(&c, BL_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_rows),
        cmocka_unit_test(test_errors_of_the_reader),
        cmocka_unit_test(test_errors_of_packing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
