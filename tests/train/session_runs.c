/* SPDX-License-Identifier: Apache-2.0 */
/* session_runs.c -- rows of token files, in the order and at the learning rates of a run. */
#include "session_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "train/data/sampler.h"

static void read_rows(session_run *run)
{
    FILE *file = fopen(run->config->train_file, "r");
    char *line = NULL;
    size_t n_line = 0;

    assert_non_null(file);
    while (getline(&line, &n_line, file) > 0) {
        json_t *root = json_loads(line, 0, NULL);
        json_t *ids = json_object_get(root, "input_ids"), *labels = json_object_get(root, "labels");
        int64_t i = run->n_rows++, n = (int64_t)json_array_size(ids);
        assert_true(i < SESSION_MAX_ROWS && n <= SESSION_MAX_TOKENS);
        for (int64_t t = 0; t < n; t++) {
            json_t *next = json_array_get(labels ? labels : ids, (size_t)t + 1);
            run->ids[i][t] = (int32_t)json_integer_value(json_array_get(ids, (size_t)t));
            run->targets[i][t] = next ? (int32_t)json_integer_value(next) : -100;
        }
        run->row[i] =
            (bl_session_row){.n = n, .input_ids = run->ids[i], .targets = run->targets[i]};
        json_decref(root);
    }
    free(line);
    fclose(file);
}

session_run *session_run_open(const golden_args *args)
{
    session_run *run = calloc(1, sizeof *run);

    assert_non_null(run);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, args->n, args->text, &run->config),
                     BL_OK);
    read_rows(run);
    run->total_steps = bl_train_total_steps(run->config, run->n_rows);
    return run;
}

void session_run_free(session_run *run)
{
    bl_train_config_free(run->config);
    free(run);
}

bl_session *session_open_for(const session_run *run, const char *const *more, int n)
{
    const bl_train_config *c = run->config;
    char texts[4][GOLDEN_PATH_BYTES + 64];
    const char *keys[32] = {texts[0], texts[1], texts[2], texts[3], "device=cpu", "threads=1"};
    int n_keys = 6;
    bl_session *session = NULL;

    snprintf(texts[0], sizeof texts[0], "model_name_or_path=%s", c->model_name_or_path);
    snprintf(texts[1], sizeof texts[1], "max_seq_length=%lld", (long long)c->max_seq_length);
    snprintf(texts[2], sizeof texts[2], "base_format=%s", bl_base_format_name(c->base_format));
    snprintf(texts[3], sizeof texts[3], "per_device_train_batch_size=%lld",
             (long long)c->per_device_train_batch_size);
    for (int i = 0; i < n; i++) keys[n_keys++] = more[i];
    if (bl_session_open(keys, n_keys, &session) != BL_OK) fail_msg("%s", bl_error_text());
    return session;
}

void session_run_create(bl_session *session, session_run *run)
{
    const bl_train_config *c = run->config;
    char texts[5][256];
    const char *const keys[] = {texts[0], texts[1], texts[2], texts[3], texts[4]};

    snprintf(texts[0], sizeof texts[0], "lora_r=%lld", (long long)c->lora_r);
    snprintf(texts[1], sizeof texts[1], "lora_alpha=%.17g", c->lora_alpha);
    snprintf(texts[2], sizeof texts[2], "lora_dropout=%.17g", c->lora_dropout);
    snprintf(texts[3], sizeof texts[3], "seed=%lld", (long long)c->seed);
    int used = snprintf(texts[4], sizeof texts[4], "lora_target_modules=");
    for (int64_t i = 0; i < c->lora_target_modules.n_items; i++)
        used += snprintf(texts[4] + used, sizeof texts[4] - (size_t)used, "%s%s", i ? "," : "",
                         c->lora_target_modules.items[i]);
    if (bl_session_create_lora(session, keys, BL_COUNT(keys), &run->adapter) != BL_OK)
        fail_msg("%s", bl_error_text());
}

bl_status session_run_step(session_run *run)
{
    const bl_train_config *c = run->config;
    const bl_sampler sampler = {run->n_rows, (uint64_t)c->seed, c->shuffle};
    int64_t first = bl_train_position(c, run->n_rows, run->step),
            n = bl_train_position(c, run->n_rows, run->step + 1) - first;
    const bl_session_loss loss = {.kind = BL_SESSION_CROSS_ENTROPY};
    const bl_session_step step = {.lr = bl_train_learning_rate(c, run->step, run->total_steps),
                                  .beta1 = c->adam_beta1,
                                  .beta2 = c->adam_beta2,
                                  .eps = c->adam_epsilon,
                                  .weight_decay = c->weight_decay,
                                  .max_grad_norm = c->max_grad_norm};
    bl_session_row rows[SESSION_MAX_ROWS];
    bl_session_result result;

    for (int64_t i = 0; i < n; i++) rows[i] = run->row[bl_sampler_row(&sampler, first + i)];
    BL_TRY(bl_session_forward_backward(run->adapter, rows, n, &loss, NULL, &result));
    run->loss = result.loss;
    BL_TRY(bl_session_optim_step(run->adapter, &step, NULL));
    run->step++;
    return BL_OK;
}

static void assert_same_file(const char *one, const char *two)
{
    size_t n_one, n_two;
    char *first = runs_read(one, &n_one), *second = runs_read(two, &n_two);

    if (n_one != n_two || memcmp(first, second, n_one) != 0) fail_msg("%s and %s differ", one, two);
    free(first);
    free(second);
}

void session_run_assert_step(const session_run *run)
{
    const char *dir = runs_path("weights-%lld", (long long)run->step);
    char theirs[2 * GOLDEN_PATH_BYTES], ours[2 * GOLDEN_PATH_BYTES];

    if (bl_session_save_weights(run->adapter, dir) != BL_OK) fail_msg("%s", bl_error_text());
    snprintf(theirs, sizeof theirs, "%s/checkpoints/step-%lld/adapter_model.safetensors",
             run->config->output_dir, (long long)run->step);
    snprintf(ours, sizeof ours, "%s/adapter_model.safetensors", dir);
    assert_same_file(theirs, ours);
}
