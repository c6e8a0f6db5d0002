/* SPDX-License-Identifier: Apache-2.0 */
/* The directory of a queue after a crash, and with links as jobs; test_train_queue trains jobs. */
#include "runs.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "train/run/spool.h"

static const char *in_spool(const char *name)
{
    return runs_path("spool/%s", name);
}

static bool is_there(const char *name)
{
    return bl_file_exists(in_spool(name));
}

static bl_spool *open_spool(void)
{
    bl_spool *spool;

    assert_int_equal(bl_spool_open(runs_path("spool"), &spool), BL_OK);
    return spool;
}

static void expect_next(bl_spool *spool, const char *expected, bool expected_has_run)
{
    char *name;
    bool has_run;

    assert_int_equal(bl_spool_next(spool, false, &name, &has_run), BL_OK);
    if (expected) {
        assert_string_equal(name, expected);
        assert_int_equal(has_run, expected_has_run);
    } else {
        assert_null(name);
    }
    free(name);
}

static void expect_text(const char *name, const char *expected)
{
    char *text = runs_read(in_spool(name), NULL);
    assert_string_equal(text, expected);
    free(text);
}

/* A crash between the reason of a failure and the move of its job's file: when the job ends
 * otherwise, there is no reason. Those of other jobs and other files stay. */
static void test_stale_reason(void **state)
{
    (void)state;
    bl_spool_close(open_spool());
    runs_write(in_spool("running/a.yaml"), "seed: 1\n");
    runs_write(in_spool("failed/a.yaml.error"), "step 2: loss nan\n");
    runs_write(in_spool("rejected/a.yml.error"), "a key\n");
    runs_write(in_spool("failed/b.yaml"), "seed: 2\n");
    runs_write(in_spool("failed/b.yaml.error"), "step 3: loss nan\n");
    runs_write(in_spool("failed/notes.error"), "not a job's\n");
    bl_spool *spool = open_spool();
    expect_next(spool, "a.yaml", true);
    assert_int_equal(bl_spool_end_job(spool, "a.yaml", true, BL_SPOOL_DONE, NULL), BL_OK);
    expect_next(spool, NULL, false);
    bl_spool_close(spool);
    assert_true(is_there("done/a.yaml"));
    assert_false(is_there("failed/a.yaml.error"));
    assert_false(is_there("rejected/a.yml.error"));
    expect_text("failed/b.yaml.error", "step 3: loss nan\n");
    expect_text("failed/notes.error", "not a job's\n");
    assert_int_equal(bl_tree_remove(runs_path("spool")), BL_OK);
}

/* A relative link names its file from every directory; one to nothing ends like another job. */
static void test_links(void **state)
{
    (void)state;
    runs_write(runs_path("elsewhere.yaml"), "seed: 1\n");
    bl_spool *spool = open_spool();
    assert_int_equal(symlink("../elsewhere.yaml", in_spool("a.yaml")), 0);
    assert_int_equal(symlink(runs_path("elsewhere.yaml"), in_spool("b.yaml")), 0);
    assert_int_equal(symlink("../nothing.yaml", in_spool("c.yaml")), 0);
    expect_next(spool, "a.yaml", false);
    for (const char *name = "a.yaml"; name[0] <= 'b'; name = name[0] == 'a' ? "b.yaml" : "c.yaml") {
        assert_int_equal(bl_spool_begin(spool, name), BL_OK);
        assert_true(bl_spool_has(spool, name, true) && !bl_spool_has(spool, name, false));
        expect_text(name[0] == 'a' ? "running/a.yaml" : "running/b.yaml", "seed: 1\n");
    }
    expect_next(spool, "c.yaml", false);
    assert_int_equal(bl_spool_end_job(spool, "c.yaml", false, BL_SPOOL_REJECTED, "no file"), BL_OK);
    bl_spool_close(spool);
    spool = open_spool(); /* after a crash */
    expect_next(spool, "a.yaml", true);
    assert_int_equal(bl_spool_end_job(spool, "a.yaml", true, BL_SPOOL_DONE, NULL), BL_OK);
    expect_text("done/a.yaml", "seed: 1\n");
    expect_text("rejected/c.yaml.error", "no file\n");
    char **names;
    size_t n_names;
    assert_int_equal(bl_dir_list(runs_path("spool"), &names, &n_names), BL_OK);
    assert_int_equal(n_names, 5); /* four directories and the lock */
    bl_names_free(names, n_names);
    bl_spool_close(spool);
    assert_int_equal(bl_tree_remove(runs_path("spool")), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stale_reason),
                                       cmocka_unit_test(test_links)};
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
