/* SPDX-License-Identifier: Apache-2.0 */
/* full_runs.c -- trainings of every weight on the cases of tests/golden/full. */
#include "full_runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
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
    bl_trained_shard_name(rank, n_ranks, name);
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

/* ---- against the reference ---- */

static const double FIRST_LOSS = 1e-6, GRADIENT = 1e-4, LOSSES = 1e-5, WEIGHTS = 1e-4;

static const char **strings_of(const json_t *list)
{
    const char **texts = calloc(json_array_size(list) + 1, sizeof *texts);

    assert_non_null(texts);
    for (size_t i = 0; i < json_array_size(list); i++)
        texts[i] = json_string_value(json_array_get(list, i));
    return texts;
}

void full_runs_choose(const json_t *golden, const bl_model_config *model, bl_trained_set *out)
{
    const json_t *keys = json_object_get(golden, "config"),
                 *trainable = json_object_get(keys, "trainable_modules"),
                 *freeze = json_object_get(keys, "freeze");
    const char **of_trainable = strings_of(trainable), **of_freeze = strings_of(freeze);
    bl_trained_patterns patterns = {of_trainable, (int64_t)json_array_size(trainable), of_freeze,
                                    (int64_t)json_array_size(freeze)};

    assert_int_equal(bl_trained_choose(model, &patterns, out), BL_OK);
    free(of_trainable);
    free(of_freeze);
}

/* Norms and projections of the tensors in a checkpoint, as golden_compare_tensors. */
static double compare_weights(const json_t *golden, const char *model, const char *checkpoint,
                              int n_ranks)
{
    const json_t *expect = json_object_get(golden, "expect"),
                 *weights = json_object_get(expect, "final_weights");
    double scale = json_number_value(json_object_get(expect, "weights_change_norm")), worst = 0;
    const char *file = runs_path("weights.safetensors");
    bl_trained_full_reader *reader;
    bl_model_config config;
    bl_trained_set set;
    bl_hf_model *files;

    assert_int_equal(bl_model_config_load(model, &config), BL_OK);
    assert_int_equal(bl_hf_open(model, &files), BL_OK);
    assert_int_equal(bl_model_config_fit(&config, files), BL_OK);
    bl_hf_close(files);
    full_runs_choose(golden, &config, &set);
    assert_int_equal(bl_trained_full_open(&config, &set, checkpoint, n_ranks, &reader), BL_OK);
    bl_stored_tensor_spec *specs = calloc(json_object_size(weights), sizeof *specs);
    bl_arch_tensor *tensors = calloc(json_object_size(weights), sizeof *tensors);
    size_t n = 0;
    for (int64_t i = 0; i < bl_arch_tensor_count(&config); i++) {
        bl_arch_tensor t = bl_arch_tensor_at(&config, i);
        if (!json_object_get(weights, t.name)) continue;
        tensors[n] = t;
        specs[n] =
            (bl_stored_tensor_spec){tensors[n].name, BL_F32, t.n_dims, {t.shape[0], t.shape[1]}};
        n++;
    }
    bl_safetensors_writer *writer;
    assert_int_equal(n, json_object_size(weights));
    assert_int_equal(bl_safetensors_create(file, specs, n, NULL, 0, &writer), BL_OK);
    for (size_t i = 0; i < n; i++) {
        int64_t count = tensors[i].shape[0] * (tensors[i].n_dims > 1 ? tensors[i].shape[1] : 1);
        float *values = malloc((size_t)count * sizeof *values);
        assert_int_equal(bl_trained_full_read(reader, &tensors[i], 0, tensors[i].shape[0], values),
                         BL_OK);
        assert_int_equal(
            bl_safetensors_writer_put(writer, i, 0, values, (size_t)count * sizeof *values), BL_OK);
        free(values);
    }
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    bl_trained_full_close(reader);
    bl_trained_free(&set);
    worst = golden_compare_tensors(file, weights, scale, WEIGHTS);
    free(specs), free(tensors);
    return worst;
}

static void check_topology(const json_t *golden, const json_t *topology, const char *model)
{
    const json_t *expect = json_object_get(golden, "expect"),
                 *steps = json_object_get(expect, "steps");
    int n_ranks = (int)json_integer_value(json_object_get(topology, "ranks"));
    const char *output = runs_path("golden"), *gradients = runs_path("gradients.safetensors");
    golden_args args = {0};

    assert_int_equal(bl_tree_remove(output), BL_OK);
    assert_int_equal(bl_tree_remove(gradients), BL_OK);
    full_runs_fill(golden, topology, model, output, &args);
    golden_args_add(&args, "dump_gradients", "%s", gradients);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    json_t *metrics = golden_metrics(output);
    double first = golden_compare_losses(metrics, steps, 1, FIRST_LOSS),
           losses = golden_compare_losses(metrics, steps, FULL_RUNS_STEPS, LOSSES),
           gradient =
               golden_compare_tensors(gradients, json_object_get(expect, "gradients"), 0, GRADIENT),
           weights =
               compare_weights(golden, model, runs_path("golden/checkpoints/step-20"), n_ranks);
    printf("%-22s %d ranks  first loss %.1e  losses %.1e  gradients %.1e  weights %.1e\n",
           json_string_value(json_object_get(golden, "name")), n_ranks, first, losses, gradient,
           weights);
    json_decref(metrics);
    assert_true(first <= FIRST_LOSS);
    assert_true(losses <= LOSSES);
    assert_true(gradient <= GRADIENT);
    assert_true(weights <= WEIGHTS);
}

void full_runs_check(const char *list)
{
    json_t *index = json_load_file(list, 0, NULL), *name, *topology;
    size_t i, k;

    assert_non_null(index);
    json_array_foreach(json_object_get(index, "cases"), i, name)
    {
        json_t *golden = golden_load_case(json_string_value(name));
        char model[GOLDEN_PATH_BYTES];
        assert_true(golden_model(golden, model));
        json_array_foreach(json_object_get(golden, "topologies"), k, topology)
            check_topology(golden, topology, model);
        json_decref(golden);
    }
    json_decref(index);
}
