/* SPDX-License-Identifier: Apache-2.0 */
/* Conversations from a file to a loss: packed or not, the same samples have the same losses.
 *
 * Limits: a token's loss depends on its row only by float32 rounding, since matrix products and
 * attention are cut into other blocks; first losses agree to the 2.8e-7 that float32 has against
 * float64 here, so 2e-6 as in test_train_golden.c. The second step has seen an update by AdamW,
 * which magnifies: 1e-4, as there. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "runs.h"
#include "data/dataset.h"

static const double FIRST_LOSS = 2e-6, LATER_LOSS = 1e-4;

enum { N_SAMPLES = 24, SEQUENCE = 96 };

static char model[GOLDEN_PATH_BYTES], data[GOLDEN_PATH_BYTES];

/* A tokenizer of single characters, small enough for the model's 96 embeddings. */
static void write_tokenizer(const char *path)
{
    static const char *const specials[] = {"<unk>", "<s>", "</s>"};
    static const char chars[] = "abcdefghijklmnopqrstuvwxyz.,?![]/<>INSTY 0123456789";
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("{\"added_tokens\":[", file);
    for (int id = 0; id < 3; id++)
        fprintf(file,
                "%s{\"id\":%d,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,\"rstrip\":"
                "false,"
                "\"normalized\":false,\"special\":true}",
                id ? "," : "", id, specials[id]);
    fputs("],\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_"
          "fallback\":false,"
          "\"merges\":[],\"vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2",
          file);
    for (int i = 0; chars[i]; i++) fprintf(file, ",\"%c\":%d", chars[i], i + 3);
    fputs("}}}\n", file);
    assert_int_equal(fclose(file), 0);
}

static void write_conversations(const char *path)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < N_SAMPLES; i++) {
        fprintf(file,
                "{\"messages\":[{\"role\":\"user\",\"content\":\"say "
                "%.*s\"},{\"role\":\"assistant\",\"content\":\"%.*s\"}",
                1 + i % 5, "abcdef", 2 + i * 7 % 23, "the quick brown fox jumps.");
        if (i % 3 == 0)
            fputs(",{\"role\":\"user\",\"content\":\"more?\"},{\"role\":\"assistant\",\"content\":"
                  "\"no.\"}",
                  file);
        fputs("]}\n", file);
    }
    assert_int_equal(fclose(file), 0);
}

static int set_up(void **state)
{
    if (runs_set_up(state)) return -1;
    strcpy(model, runs_path("model"));
    strcpy(data, runs_path("chat.jsonl"));
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", model);
    write_tokenizer(runs_path("model/tokenizer.json"));
    write_conversations(data);
    return 0;
}

/* Rows of the data set when it is packed; `first` samples of it are left out. */
static int64_t count_rows(const char *packing, int64_t first)
{
    bl_tokenizer *tokenizer;
    bl_dataset *samples, *rows;
    bl_packing how = BL_PACKING_NONE;
    bl_dataset_options options = bl_dataset_default_options(data);

    while (strcmp(packing, bl_packing_name(how)) != 0) how++;
    options.chat_template = "llama2";
    options.max_seq_length = SEQUENCE;
    assert_int_equal(bl_tokenizer_load(model, &tokenizer), BL_OK);
    if (bl_dataset_open(&options, tokenizer, &samples) != BL_OK) fail_msg("%s", bl_error_text());
    assert_int_equal(bl_dataset_count(samples), N_SAMPLES);
    int64_t n = N_SAMPLES - first;
    if (how != BL_PACKING_NONE) {
        assert_int_equal(bl_dataset_pack(samples, how, SEQUENCE, first, n, &rows), BL_OK);
        n = bl_dataset_count(rows);
        bl_dataset_close(rows);
    }
    bl_dataset_close(samples);
    bl_tokenizer_destroy(tokenizer);
    return n;
}

/* Two steps, each over all rows. percentage: of the samples, held out and evaluated after each
 * step. */
static json_t *train(const char *packing, int percentage)
{
    golden_args args = {0};
    int64_t held_out = N_SAMPLES * percentage / 100, n_rows = count_rows(packing, held_out);
    const char *output = runs_path("%s-%d", packing, percentage);

    golden_args_add(&args, "model_name_or_path", "%s", model);
    golden_args_add(&args, "train_file", "%s", data);
    golden_args_add(&args, "output_dir", "%s", output);
    golden_args_add(&args, "overwrite_output_dir", "true");
    golden_args_add(&args, "data_format", "messages");
    golden_args_add(&args, "chat_template", "llama2");
    golden_args_add(&args, "packing", "%s", packing);
    golden_args_add(&args, "max_seq_length", "%d", SEQUENCE);
    golden_args_add(&args, "shuffle", "false");
    golden_args_add(&args, "per_device_train_batch_size", "1");
    golden_args_add(&args, "gradient_accumulation_steps", "%lld", (long long)n_rows);
    golden_args_add(&args, "threads", "1");
    golden_args_add(&args, "max_steps", "2");
    golden_args_add(&args, "learning_rate", "0.01");
    golden_args_add(&args, "validation_split_percentage", "%d", percentage);
    golden_args_add(&args, "eval_strategy", percentage ? "steps" : "no");
    golden_args_add(&args, "eval_steps", "1");
    golden_args_add(&args, "logging_steps", "1000");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    return golden_metrics(output);
}

/* The `step`-th line that has `key`. */
static double metric(const json_t *metrics, const char *key, int step)
{
    size_t i;
    const json_t *line;

    json_array_foreach((json_t *)metrics, i, line)
    {
        const json_t *value = json_object_get(line, key);
        if (value && step-- == 0) return json_number_value(value);
    }
    fail_msg("metrics.jsonl lacks %s", key);
    return NAN;
}

static void check_near(double a, double b, double limit)
{
    if (!(fabs(a - b) <= limit * fabs(b)))
        fail_msg("%.9g and %.9g differ by more than %g", a, b, limit);
}

static void check_same_training(const json_t *a, const json_t *b)
{
    for (int step = 0; step < 2; step++) {
        check_near(metric(a, "loss", step), metric(b, "loss", step),
                   step ? LATER_LOSS : FIRST_LOSS);
        assert_true(metric(a, "label_tokens", step) == metric(b, "label_tokens", step));
        assert_true(metric(a, "tokens", step) == metric(b, "tokens", step));
    }
}

static void test_packed_samples_have_the_losses_of_rows(void **state)
{
    (void)state;
    assert_true(count_rows("pack", 0) < N_SAMPLES / 2 + 4);
    json_t *rows = train("none", 0), *packed = train("pack", 0);
    check_same_training(packed, rows);
    assert_true(metric(rows, "loss", 1) < metric(rows, "loss", 0));
    json_decref(rows);
    json_decref(packed);
}

static void test_a_split_is_made_before_packing(void **state)
{
    (void)state;
    json_t *rows = train("none", 25), *packed = train("pack", 25);
    check_same_training(packed, rows);
    check_near(metric(packed, "eval_loss", 0), metric(rows, "eval_loss", 0), FIRST_LOSS);
    assert_true(metric(packed, "eval_label_tokens", 0) == metric(rows, "eval_label_tokens", 0));
    json_decref(rows);
    json_decref(packed);
}

static void test_concatenation_crosses_samples(void **state)
{
    (void)state;
    json_t *rows = train("none", 0), *joined = train("concatenate", 0);
    assert_true(metric(joined, "tokens", 0) == (double)(count_rows("concatenate", 0) * SEQUENCE));
    assert_true(metric(joined, "tokens", 0) > metric(rows, "tokens", 0) - SEQUENCE);
    assert_true(isfinite(metric(joined, "loss", 0)));
    /* Attention that reaches into the samples before gives other losses. */
    assert_true(fabs(metric(joined, "loss", 0) - metric(rows, "loss", 0)) > 1e-4);
    json_decref(rows);
    json_decref(joined);
}

static void test_without_template_the_key_is_named(void **state)
{
    golden_args args = {0};
    (void)state;
    runs_standard(&args, runs_path("refused"), 1);
    runs_set(&args, "model_name_or_path", "%s", model);
    runs_set(&args, "train_file", "%s", data);
    runs_set(&args, "data_format", "messages");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(
        bl_error_text(), "chat_template: the model has no chat template of its own; give llama2"));
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed_samples_have_the_losses_of_rows),
        cmocka_unit_test(test_a_split_is_made_before_packing),
        cmocka_unit_test(test_concatenation_crosses_samples),
        cmocka_unit_test(test_without_template_the_key_is_named),
    };
    return cmocka_run_group_tests(tests, set_up, runs_tear_down);
}
