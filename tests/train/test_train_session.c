/* SPDX-License-Identifier: Apache-2.0 */
/* A session makes the steps of `ballast train`, bit for bit: with one call per step, with the base
 * on disk, and with other adapters in the same visits. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "session_runs.h"

static void train(const golden_args *args)
{
    assert_int_equal(golden_train(args), BL_OK);
}

/* Losses of the log, to its 12 digits. */
static void assert_loss(const session_run *run)
{
    json_t *metrics = golden_metrics(run->config->output_dir), *line;
    size_t i;
    bool is_found = false;

    json_array_foreach(metrics, i, line)
    {
        const json_t *loss = json_object_get(line, "loss");
        if (!loss || json_integer_value(json_object_get(line, "step")) != run->step) continue;
        is_found = true;
        assert_true(fabs(json_number_value(loss) - run->loss) <= 1e-11 * fabs(run->loss));
        break;
    }
    json_decref(metrics);
    assert_true(is_found);
}

static void compare(const char *name, const char *const (*changes)[2], size_t n_changes,
                    const char *const *keys, int n_keys)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("train-%s", name), 1);
    for (size_t i = 0; i < n_changes; i++) runs_set(&args, changes[i][0], "%s", changes[i][1]);
    train(&args);
    session_run *run = session_run_open(&args);
    bl_session *session = session_open_for(run, keys, n_keys);
    session_run_create(session, run);
    while (run->step < run->total_steps) {
        if (session_run_step(run) != BL_OK) fail_msg("%s", bl_error_text());
        session_run_assert_step(run);
    }
    assert_loss(run);
    bl_session_close(session);
    session_run_free(run);
    golden_args_free(&args);
}

static void test_steps_equal_train(void **state)
{
    (void)state;
    compare("standard", NULL, 0, NULL, 0);
}

static void test_micro_batches_of_several_rows(void **state)
{
    static const char *const changes[][2] = {{"per_device_train_batch_size", "3"},
                                             {"lora_r", "16"},
                                             {"weight_decay", "0.1"},
                                             {"max_grad_norm", "0.5"},
                                             {"lora_target_modules", "[q_proj, down_proj]"}};
    (void)state;
    compare("rows", changes, 5, NULL, 0);
}

static void test_base_on_disk(void **state)
{
    static char dir[GOLDEN_PATH_BYTES + 32];
    const char *const keys[] = {"offload_tier=disk", "offload_ratio=1", dir, "visit_tokens=64"};

    (void)state;
    snprintf(dir, sizeof dir, "offload_dir=%s", runs_path("pages"));
    compare("disk", NULL, 0, keys, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_equal_train),
        cmocka_unit_test(test_micro_batches_of_several_rows),
        cmocka_unit_test(test_base_on_disk),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
