/* SPDX-License-Identifier: Apache-2.0 */
/* A run is resumed with the model and the data it was begun with, or refused: a bit in the middle
 * of any tensor, each key of config.json. Page files of a model that has changed are not used,
 * whatever its size and time of writing say. */
#include "runs.h"
#include "test_ranks.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "store/safetensors.h"
#include "train/rank.h"
#include "train/training_internal.h"

enum { STEPS = 2, MAX_JSON_BYTES = 1 << 20 };

/* A copy of demo/base, whose matrices are larger than the part that is checked before they are
 * read. */
static const char *copy_model(const char *name)
{
    const char *model = runs_path("%s", name);
    runs_copy("demo/base", model);
    return model;
}

static void set_run(golden_args *args, const char *model, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "model_name_or_path", "%s", model);
    runs_set(args, "max_steps", "%d", STEPS);
}

static bl_status run(const char *model, const char *output, int ranks, const char *key,
                     const char *value)
{
    golden_args args = {0};

    set_run(&args, model, output, ranks);
    runs_set(&args, "resume_from_checkpoint", "true");
    if (key) runs_set(&args, key, "%s", value);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    return st;
}

static void assert_error_has(const char *what, const char *text)
{
    if (!strstr(bl_error_text(), text))
        fail_msg("%s: '%s' is not in: %s", what, text, bl_error_text());
}

/* A run of which the last step is lost. */
static const char *interrupted_run(const char *model, const char *name, int ranks)
{
    const char *output = runs_path("%s", name);

    assert_int_equal(bl_tree_remove(output), BL_OK);
    assert_int_equal(run(model, output, ranks, NULL, NULL), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("%s/checkpoints/step-%d", name, STEPS)), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("%s/adapter_model.safetensors", name)), BL_OK);
    return output;
}

static void flip_middle(const char *model, const char *tensor)
{
    char path[GOLDEN_PATH_BYTES + 32];
    bl_safetensors *file;

    snprintf(path, sizeof path, "%s/model.safetensors", model);
    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    const bl_stored_tensor *t = bl_safetensors_find(file, tensor);
    assert_non_null(t);
    int64_t at = t->offset_bytes + t->n_bytes / 4 * 2; /* the low byte of a bf16 */
    bl_safetensors_close(file);
    runs_flip_bit(path, at);
}

/* ---- weights ---- */

static const char *const tensors[] = {
    "model.embed_tokens.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
};

static void check_flips(int ranks, const char *key, const char *value)
{
    const char *model = copy_model("flipped"), *output = interrupted_run(model, "flips", ranks);
    char *log = runs_read(runs_path("flips/metrics.jsonl"), NULL);

    for (size_t i = 0; i < BL_COUNT(tensors); i++) {
        flip_middle(model, tensors[i]);
        bl_status st = run(model, output, ranks, key, value);
        if (st != BL_ECHECKPOINT) fail_msg("%d ranks, %s: status %d", ranks, tensors[i], (int)st);
        assert_error_has(tensors[i], strstr(tensors[i], "norm") ? "the model's tensors differ"
                                                                : "the model's weights differ");
        flip_middle(model, tensors[i]);
    }
    char *after = runs_read(runs_path("flips/metrics.jsonl"), NULL);
    assert_string_equal(after,
                        log); /* longer than in the checkpoint: a rejected run changes no file */
    free(after);
    free(log);
    assert_int_equal(run(model, output, ranks, key, value), BL_OK);
}

static void test_a_bit_of_any_tensor(void **state)
{
    (void)state;
    check_flips(1, NULL, NULL);
    check_flips(3, NULL, NULL);
    check_flips(2, "shard_size", "1");
    check_flips(1, "base_format", "auto");
}

static void test_a_mismatch_is_allowed(void **state)
{
    const char *model = copy_model("allowed"), *output = interrupted_run(model, "allowed-run", 2);
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    flip_middle(model, "model.layers.1.mlp.up_proj.weight");
    set_run(&args, model, output, 2);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "allow_resume_mismatch", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "not bit-identical: the model's weights differ"));
    free(log);
    golden_args_free(&args);
    /* Its checkpoint is one of the model as it is now. */
    assert_int_equal(bl_tree_remove(runs_path("allowed-run/adapter_model.safetensors")), BL_OK);
    assert_int_equal(run(model, output, 2, NULL, NULL), BL_OK);
}

/* Copies of the base that differ where no process has looked before it was read. */
static bl_status check_as_rank(test_rank *self)
{
    const uint64_t *checksums = self->arg;
    bl_job job = {.topology.n_ranks = self->n_ranks};
    bl_model_weights weights = {.checksum = checksums[self->rank]};
    bl_rank rank = {.job = &job,
                    .index = self->rank,
                    .host_comm = {.comm = self->comm, .stream = self->stream},
                    .weights = &weights};
    return bl_rank_compare_weights(&rank);
}

static void test_ranks_compare_their_copies(void **state)
{
    uint64_t same[] = {7, 7, 7}, third_differs[] = {7, 7, 8};

    (void)state;
    assert_int_equal(test_ranks_run(3, 1, 60, check_as_rank, same, NULL), BL_OK);
    assert_int_equal(test_ranks_run(3, 1, 60, check_as_rank, third_differs, NULL), BL_EUSAGE);
    assert_error_has("copies", "the model's weights are not the same on rank 0 and on rank 2");
}

/* A checkpoint that names no model is not taken for one of this model: one reason, not a list. */
static void test_a_checkpoint_that_names_no_model(void **state)
{
    json_t *empty = json_object();
    bl_job job = {0};
    bl_start start = {.has_weights = true};
    char *text = NULL;
    size_t n_bytes;

    (void)state;
    bl_train_config config = {0};
    char *names = NULL;
    bl_differences d = {.config = &config,
                        .all = open_memstream(&text, &n_bytes),
                        .refused = open_memstream(&names, &n_bytes)};
    assert_int_equal(bl_job_list_identity(&job, empty, &start, &d), BL_OK);
    fclose(d.all);
    fclose(d.refused);
    assert_true(d.is_refused);
    assert_string_equal(names, "model_name_or_path");
    free(names);
    assert_string_equal(text, "it does not say which model and data it was made with; ");
    assert_false(start.has_weights);
    free(text);
    json_decref(empty);
}

/* ---- config.json ---- */

static json_t *load_config(const char *model)
{
    char path[GOLDEN_PATH_BYTES + 32];
    json_t *config;

    snprintf(path, sizeof path, "%s/config.json", model);
    assert_int_equal(bl_json_load(path, MAX_JSON_BYTES, &config), BL_OK);
    return config;
}

static void put_config(const char *model, const json_t *config)
{
    char path[GOLDEN_PATH_BYTES + 32], *text = json_dumps(config, JSON_INDENT(2));

    snprintf(path, sizeof path, "%s/config.json", model);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    free(text);
}

/* Another valid value of the key. */
static json_t *other_value(const char *key, const json_t *value)
{
    if (!strcmp(key, "factor")) return json_real(4);
    if (json_is_boolean(value)) return json_boolean(!json_is_true(value));
    if (json_is_integer(value)) return json_integer(json_integer_value(value) / 2);
    if (json_is_real(value))
        return json_real(json_real_value(value) * 1.5 + 0.25 * (json_real_value(value) == 0));
    return json_string("linear"); /* of rope_type */
}

/* The keys whose values no result depends on; num_key_value_heads gives way to k_proj's rows. */
static bool is_without_effect(const char *key)
{
    static const char *const keys[] = {
        "torch_dtype", "initializer_range", "max_position_embeddings",
        "use_cache",   "attention_dropout", "architectures",
        "model_type",  "hidden_act",        "num_key_value_heads"};
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (!strcmp(keys[i], key)) return true;
    return false;
}

/* Changes each key of `object`, a part of config, in turn. Returns how many were refused as another
 * model's. */
static int check_keys(const char *model, const char *output, json_t *config, json_t *object)
{
    const char *key;
    json_t *value;
    void *next;
    int n_refused = 0;

    json_object_foreach_safe(object, next, key, value)
    {
        if (json_is_object(value) || is_without_effect(key)) continue;
        json_t *kept = json_deep_copy(value);
        json_object_set_new(object, key, other_value(key, value));
        put_config(model, config);
        bl_status st = run(model, output, 1, NULL, NULL);
        if (st == BL_OK) fail_msg("config.json: another %s goes on silently", key);
        if (st == BL_ECHECKPOINT) {
            assert_error_has(key, object == config ? key : "rope_parameters");
            assert_error_has(key, "of the model's config.json is ");
            n_refused++;
        } else {
            assert_int_equal(st, BL_EINPUT); /* tensors of other shapes, attention with biases */
        }
        json_object_set_new(object, key, kept);
    }
    return n_refused;
}

static void test_each_key_of_the_configuration(void **state)
{
    const char *model = copy_model("configured"), *output = interrupted_run(model, "config-run", 1);
    json_t *config = load_config(model);

    (void)state;
    /* bos_token_id, eos_token_id, num_attention_heads with head_dim ..., rms_norm_eps, rope_theta;
     * the keys of rope_scaling */
    assert_true(check_keys(model, output, config, config) >= 4);
    assert_int_equal(check_keys(model, output, config, json_object_get(config, "rope_scaling")), 5);

    json_object_set_new(config, "max_position_embeddings", json_integer(4096));
    json_object_set_new(config, "torch_dtype", json_string("float32"));
    json_object_set_new(config, "use_cache", json_false());
    /* The newer spelling of the same. */
    json_t *rope = json_deep_copy(json_object_get(config, "rope_scaling"));
    json_object_set(rope, "rope_theta", json_object_get(config, "rope_theta"));
    json_object_set_new(config, "rope_parameters", rope);
    json_object_del(config, "rope_scaling");
    json_object_del(config, "rope_theta");
    put_config(model, config);
    assert_int_equal(run(model, output, 1, NULL, NULL), BL_OK);
    json_decref(config);
}

/* ---- data ---- */

static void test_validation_data(void **state)
{
    const char *output = interrupted_run("demo/base", "data-run", 1);

    (void)state;
    assert_int_equal(
        run("demo/base", output, 1, "validation_file", GOLDEN_DIR "/tokens/tiny.jsonl"),
        BL_OK); /* they change no bit of the adapter */
    assert_int_equal(run("demo/base", output, 1, NULL, NULL), BL_OK);
}

/* ---- page files ---- */

static void set_offload(golden_args *args, const char *pages)
{
    runs_set(args, "offload_ratio", "1");
    runs_set(args, "offload_tier", "disk");
    runs_set(args, "offload_dir", "%s", pages);
}

static bl_status train_with(const char *model, const char *output, const char *pages)
{
    golden_args args = {0};

    set_run(&args, model, output, 2);
    runs_set(&args, "base_format", "stored"); /* FP8 may round the bit away */
    if (pages) set_offload(&args, pages);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    return st;
}

static void test_page_files_of_a_changed_model(void **state)
{
    const char *model = copy_model("paged"), *pages = runs_path("pages"),
               *file = runs_path("paged/model.safetensors");
    struct stat before;

    (void)state;
    assert_int_equal(bl_dir_create(pages), BL_OK);
    assert_int_equal(train_with(model, runs_path("first"), pages), BL_OK);
    assert_int_equal(stat(file, &before), 0);
    runs_sleep_s(0.05); /* more than a tick of the file system's clock */
    flip_middle(model, "model.layers.1.mlp.up_proj.weight");
    const struct timespec times[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, file, times, 0), 0);
    assert_int_equal(train_with(model, runs_path("memory"), NULL), BL_OK);
    assert_int_equal(train_with(model, runs_path("disk"), pages), BL_OK);
    assert_true(runs_are_same(runs_path("memory"), runs_path("disk")));
    assert_false(runs_are_same(runs_path("memory"), runs_path("first")));
}

/* A run that reads no weights, because its page files are there, still compares the checksums of
 * the weights that they were made from. */
static void test_page_files_know_their_weights(void **state)
{
    const char *model = copy_model("known"), *pages = runs_path("known-pages"),
               *output = interrupted_run(model, "known-run", 2);
    golden_args args = {0};

    (void)state;
    assert_int_equal(bl_dir_create(pages), BL_OK);
    set_run(&args, model, output, 2);
    set_offload(&args, pages);
    runs_set(&args, "resume_from_checkpoint", "true");
    for (int again = 0; again < 2; again++) { /* writes the files; uses them */
        assert_int_equal(golden_train(&args), BL_OK);
        assert_int_equal(bl_tree_remove(runs_path("known-run/checkpoints/step-%d", STEPS)), BL_OK);
    }
    runs_set(&args, "resume_from_checkpoint", "false");
    runs_set(&args, "output_dir", "%s", runs_path("known-other"));
    flip_middle(model, "model.layers.0.self_attn.q_proj.weight");
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "output_dir", "%s", output);
    assert_int_equal(golden_train(&args),
                     BL_ECHECKPOINT); /* with page files of the changed model */
    assert_error_has("page files", "the model's weights differ");
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_bit_of_any_tensor),
        cmocka_unit_test(test_a_mismatch_is_allowed),
        cmocka_unit_test(test_ranks_compare_their_copies),
        cmocka_unit_test(test_a_checkpoint_that_names_no_model),
        cmocka_unit_test(test_each_key_of_the_configuration),
        cmocka_unit_test(test_validation_data),
        cmocka_unit_test(test_page_files_of_a_changed_model),
        cmocka_unit_test(test_page_files_know_their_weights),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
