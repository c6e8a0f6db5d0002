/* SPDX-License-Identifier: Apache-2.0 */
/* resume_runs.c -- the runs of resume_runs.h. */
#include "resume_runs.h"
#include "runs.h"

#include <stdio.h>
#include <string.h>

#include "base/files.h"

const char *whole_run(int ranks)
{
    const char *output = runs_path("whole-%d", ranks);
    golden_args args = {0};

    if (bl_file_exists(output)) return output;
    runs_standard(&args, output, ranks);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    assert_int_equal(runs_logged_steps(output), STEPS);
    return output;
}

const char *crashed_run(const char *whole, int64_t step, const char *name)
{
    const char *output = runs_path("%s", name), *checkpoints = runs_path("%s/checkpoints", name);

    assert_int_equal(bl_tree_remove(output), BL_OK);
    assert_int_equal(bl_dir_create(checkpoints), BL_OK);
    for (int64_t s = 1; s <= step; s++) {
        char from[GOLDEN_PATH_BYTES + 64], to[GOLDEN_PATH_BYTES + 64];
        snprintf(from, sizeof from, "%s/checkpoints/step-%lld", whole, (long long)s);
        snprintf(to, sizeof to, "%s/step-%lld", checkpoints, (long long)s);
        runs_copy(from, to);
    }
    char log[GOLDEN_PATH_BYTES + 64];
    snprintf(log, sizeof log, "%s/metrics.jsonl", whole);
    runs_copy(log, runs_path("%s/metrics.jsonl", name)); /* longer than the checkpoint says */
    return output;
}

bl_status resume(const char *output, int ranks, const char *key, const char *value)
{
    golden_args args = {0};

    runs_standard(&args, output, ranks);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "save_steps", "0");
    if (key) runs_set(&args, key, "%s", value);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    return st;
}

void assert_error_has(const char *text)
{
    if (!strstr(bl_error_text(), text)) fail_msg("'%s' is not in: %s", text, bl_error_text());
}
