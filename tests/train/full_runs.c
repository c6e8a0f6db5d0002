/* SPDX-License-Identifier: Apache-2.0 */
/* full_runs.c -- trainings of every weight on the cases of tests/golden/full. */
#include "full_runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter/full.h"
#include "base/files.h"

void full_runs_fill(const json_t *golden, const json_t *topology, const char *model,
                    const char *output, golden_args *args)
{
    golden_config(golden, topology, args);
    golden_args_add(args, "model_name_or_path", "%s", model);
    golden_args_add(args, "output_dir", "%s", output);
    golden_args_add(args, "save_steps", "0");
    golden_args_add(args, "logging_steps", "1000");
    golden_args_add(args, "max_seq_length", "512");
    golden_args_add(args, "threads", "1");
}

const char *const full_runs_cases[FULL_RUNS_CASES] = {"../../full/cases/tiny-mha-tied",
                                                      "../../full/cases/qwen3-tied",
                                                      "../../full/cases/falcon-one-norm"};

static char *read_state(const char *output, int step, int n_ranks, int rank, size_t *n_bytes)
{
    char name[BL_SHARD_NAME_BYTES];
    bl_adapter_shard_name(rank, n_ranks, name);
    return runs_read(runs_path("%s/checkpoints/step-%d/%s", output, step, name), n_bytes);
}

void full_runs_assert_same(int step, const char *a, const char *b, int n_ranks, const char *what)
{
    for (int r = 0; r < n_ranks; r++) {
        size_t n_a, n_b;
        char *of_a = read_state(a, step, n_ranks, r, &n_a),
             *of_b = read_state(b, step, n_ranks, r, &n_b);
        if (n_a != n_b || memcmp(of_a, of_b, n_a) != 0) fail_msg("other bits: %s", what);
        free(of_a), free(of_b);
    }
}

bl_status full_runs_try(const char *name, int n_ranks, const char *output, const char *const *extra,
                        const struct bl_pager_hooks *hooks)
{
    json_t *golden = golden_load_case(name);
    json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                                 1, "gradient_accumulation_steps", 3);
    char model[GOLDEN_PATH_BYTES];
    golden_args args = {0};

    assert_true(golden_model(golden, model));
    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    full_runs_fill(golden, topology, model, runs_path("%s", output), &args);
    for (int i = 0; extra && extra[i]; i += 2) runs_set(&args, extra[i], "%s", extra[i + 1]);
    bl_status st = golden_train_hooked(&args, hooks);
    golden_args_free(&args);
    json_decref(topology);
    json_decref(golden);
    return st;
}

void full_runs_train(const char *name, int n_ranks, const char *output, const char *const *extra)
{
    assert_int_equal(full_runs_try(name, n_ranks, output, extra, NULL), BL_OK);
}

void full_runs_assert_same_file(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *of_a = runs_read(a, &n_a), *of_b = runs_read(b, &n_b);
    if (n_a != n_b || memcmp(of_a, of_b, n_a) != 0) fail_msg("%s differs from %s", a, b);
    free(of_a), free(of_b);
}

void full_runs_kill_args(int n_ranks, const char *output, golden_args *args)
{
    json_t *golden = golden_load_case(full_runs_cases[0]);
    json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                                 1, "gradient_accumulation_steps", 2);
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    full_runs_fill(golden, topology, model, runs_path("%s", output), args);
    runs_set(args, "save_steps", "1");
    runs_set(args, "save_total_limit", "3");
    json_decref(topology);
    json_decref(golden);
}

static int kill_until_it_ends(const golden_args *args, int most)
{
    int n_kills = 0, code = -1;

    while (code != 0) {
        runs_child child = {0};
        runs_start(&child, "train", args);
        if (n_kills < most) {
            runs_sleep_s(0.02 + runs_random_s(0.25));
            n_kills += kill(child.pid, SIGKILL) == 0;
        }
        code = runs_wait(&child, 120);
        assert_true(code == 0 || code == -SIGKILL);
        if (code == 0 && n_kills < 3) break; /* a fast machine */
    }
    return n_kills;
}

int full_runs_kill(int n_ranks, int most, const char *const *plain, const char *const *extra)
{
    golden_args args = {0};

    full_runs_kill_args(n_ranks, "whole", &args);
    runs_set(&args, "overwrite_output_dir", "true");
    for (int i = 0; plain && plain[i]; i += 2) runs_set(&args, plain[i], "%s", plain[i + 1]);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    assert_int_equal(bl_tree_remove(runs_path("killed")), BL_OK);
    full_runs_kill_args(n_ranks, "killed", &args);
    runs_set(&args, "resume_from_checkpoint", "true");
    for (int i = 0; extra && extra[i]; i += 2) runs_set(&args, extra[i], "%s", extra[i + 1]);
    int n_kills = kill_until_it_ends(&args, most);
    printf("%d ranks: %d kills\n", n_ranks, n_kills);
    golden_args_free(&args);
    full_runs_assert_same(FULL_RUNS_STEPS, "whole", "killed", n_ranks, "after kills");
    full_runs_assert_same_file(runs_path("whole/model/model.safetensors"),
                               runs_path("killed/model/model.safetensors"));
    return n_kills;
}
