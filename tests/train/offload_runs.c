/* SPDX-License-Identifier: Apache-2.0 */
/* offload_runs.c -- the runs of offload_runs.h. */
#include "offload_runs.h"
#include "runs.h"

#include <stdio.h>
#include <string.h>

#include "base/files.h"

void offload_args(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "overwrite_output_dir", "true");
    runs_set(args, "max_steps", "%d", STEPS);
    runs_set(args, "save_steps", "0");
    runs_set(args, "eval_steps", "2");
}

const char *plain_run(int ranks)
{
    static char paths[MAX_RANKS + 1][GOLDEN_PATH_BYTES];
    golden_args args = {0};

    if (paths[ranks][0]) return paths[ranks];
    snprintf(paths[ranks], GOLDEN_PATH_BYTES, "%s", runs_path("plain-%d", ranks));
    offload_args(&args, paths[ranks], ranks);
    runs_set(&args, "offload_ratio", "0");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    return paths[ranks];
}

const char *pages_dir(int ranks)
{
    const char *dir = runs_path("pages-%d", ranks);
    assert_int_equal(bl_dir_create(dir), BL_OK);
    return dir;
}

void assert_error_has(const char *text)
{
    if (!strstr(bl_error_text(), text)) fail_msg("'%s' is not in: %s", text, bl_error_text());
}
