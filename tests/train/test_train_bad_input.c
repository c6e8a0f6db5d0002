/* SPDX-License-Identifier: Apache-2.0 */
/* Bad models, data and machines as a user of `ballast train` meets them: the exit code, one line
 * that names the fault, soon, and nothing left behind that looks like a result. The tests of each
 * reader cover the inputs that it rejects (tests/store, tests/tokenizer, tests/data,
 * tests/arch). */
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"

enum { EXIT_INPUT = 3, EXIT_RESOURCE = 4, EXIT_NUMERIC = 6 };

/* a refusal takes a tenth of a second, and a sanitizer on a loaded machine a hundred times as
 * long */
static const double SOON_S = 20;

/* A safetensors file taken apart. */
typedef struct parts {
    json_t *header;
    unsigned char *data;
    size_t n_bytes;
} parts;

static parts take_apart(const char *path)
{
    size_t n;
    uint64_t length;
    char *bytes = runs_read(path, &n);

    memcpy(&length, bytes, 8);
    parts p = {.header = json_loadb(bytes + 8, length, 0, NULL), .n_bytes = n - 8 - length};
    assert_non_null(p.header);
    p.data = malloc(p.n_bytes);
    assert_non_null(p.data);
    memcpy(p.data, bytes + 8 + length, p.n_bytes);
    free(bytes);
    return p;
}

static void put_together(parts *p, const char *path)
{
    char *header = json_dumps(p->header, JSON_COMPACT);
    uint64_t length = strlen(header);
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(&length, 8, 1, file), 1);
    assert_int_equal(fwrite(header, length, 1, file), 1);
    assert_int_equal(fwrite(p->data, p->n_bytes, 1, file), 1);
    assert_int_equal(fclose(file), 0);
    free(header);
    free(p->data);
    json_decref(p->header);
}

/* A fresh copy of the small model, to be spoilt; its weights file is `weights`. */
static const char *fresh_model(const char **weights)
{
    const char *model = runs_path("model");
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", model);
    *weights = runs_path("model/model.safetensors");
    return model;
}

/* Sets one bf16 element of a tensor. */
static void set_element(const char *weights, const char *tensor, int64_t index, uint16_t bits)
{
    parts p = take_apart(weights);
    const json_t *entry = json_object_get(p.header, tensor);

    assert_non_null(entry);
    assert_string_equal(json_string_value(json_object_get(entry, "dtype")), "BF16");
    int64_t offset = json_integer_value(json_array_get(json_object_get(entry, "data_offsets"), 0));
    memcpy(p.data + offset + 2 * index, &bits, 2);
    put_together(&p, weights);
}

/* The run must end with `code`, soon, with one line that contains each of `texts`
 * (NULL-terminated), and leave no adapter. */
static void check_refused(const golden_args *args, int code, double limit_s,
                          const char *const *texts)
{
    runs_child child = {0};

    runs_start(&child, "train", args);
    int found = runs_wait(&child, limit_s);
    for (int i = 0; texts[i]; i++) runs_assert_error(&child, texts[i]);
    assert_int_equal(found, code);
    assert_false(bl_file_exists(runs_path("refused/adapter_model.safetensors")));
    assert_int_equal(bl_tree_remove(runs_path("refused")), BL_OK);
}

static void check_model_refused(const char *const *texts, const char *key, const char *value)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("refused"), 3);
    runs_set(&args, "model_name_or_path", "%s", runs_path("model"));
    if (key) runs_set(&args, key, "%s", value);
    check_refused(&args, EXIT_INPUT, SOON_S, texts);
    golden_args_free(&args);
}

#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* ---- models ---- */

static void test_broken_weight_files(void **state)
{
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    static const char html[] = "<!DOCTYPE html><html><body>404</body></html>\n";
    const char *weights;
    size_t n;

    (void)state;
    fresh_model(&weights);
    char *bytes = runs_read(weights, &n);
    runs_write_bytes(weights, bytes, n - 100);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);
    runs_write_bytes(weights, bytes, 4);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);

    char *longer = calloc(1, n + 64); /* another file behind the tensors */
    assert_non_null(longer);
    memcpy(longer, bytes, n);
    memcpy(longer + n, "PK\003\004", 4);
    runs_write_bytes(weights, longer, n + 64);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);
    free(longer);

    runs_write(weights, lfs);
    check_model_refused(TEXTS("model.safetensors", "Git LFS"), NULL, NULL);
    runs_write(weights, html);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);
    assert_int_equal(unlink(weights), 0);
    assert_int_equal(mkfifo(weights, 0600), 0);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);
    assert_int_equal(unlink(weights), 0);
    check_model_refused(TEXTS("model.safetensors"), NULL, NULL);
    free(bytes);
}

static void test_overlapping_tensors(void **state)
{
    const char *weights;

    (void)state;
    fresh_model(&weights);
    parts p = take_apart(weights);
    json_t *from = json_object_get(json_object_get(p.header, "model.layers.0.mlp.gate_proj.weight"),
                                   "data_offsets");
    json_object_set(json_object_get(p.header, "model.layers.0.mlp.up_proj.weight"), "data_offsets",
                    from);
    put_together(&p, weights);
    check_model_refused(TEXTS("model.safetensors", "_proj.weight"), NULL, NULL);
}

/* All defects of a model are listed in one run. */
static void test_wrong_tensors_are_listed_together(void **state)
{
    const char *weights;

    (void)state;
    fresh_model(&weights);
    parts p = take_apart(weights);
    json_t *moved = json_incref(json_object_get(p.header, "model.layers.0.mlp.gate_proj.weight"));
    json_object_del(p.header, "model.layers.0.mlp.gate_proj.weight");
    json_object_set_new(p.header, "model.layers.0.mlp.gate_prj.weight", moved);
    json_object_set_new(json_object_get(p.header, "model.layers.1.mlp.up_proj.weight"), "shape",
                        json_pack("[i,i]", 24, 132));
    json_object_set_new(json_object_get(p.header, "model.layers.1.self_attn.o_proj.weight"),
                        "dtype", json_string("I16"));
    put_together(&p, weights);
    check_model_refused(
        TEXTS("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_prj.weight",
              "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        NULL, NULL);
}

static void test_index_that_leaves_the_folder(void **state)
{
    const char *weights;

    (void)state;
    fresh_model(&weights);
    runs_copy(weights, runs_path("elsewhere.safetensors"));
    assert_int_equal(unlink(weights), 0);
    runs_write(runs_path("model/model.safetensors.index.json"),
               "{\"weight_map\": {\"model.norm.weight\": \"../elsewhere.safetensors\"}}");
    check_model_refused(TEXTS("model.safetensors.index.json", "../elsewhere.safetensors"), NULL,
                        NULL);
}

/* Row 131 of 132 is on the last of three ranks: the others must not wait for it, and the program
 * prints its error. */
static void test_weights_that_are_no_numbers(void **state)
{
    static const char *const formats[] = {"fp8_row", "fp8_block", "stored"};
    static const uint16_t bad[] = {0x7fc0, 0xff80}; /* NaN, -infinity */
    const char *weights;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(formats); i++)
        for (size_t k = 0; k < BL_COUNT(bad); k++) {
            fresh_model(&weights);
            set_element(weights, "model.layers.1.mlp.up_proj.weight", 131 * 24 + 5, bad[k]);
            check_model_refused(TEXTS("model.layers.1.mlp.up_proj.weight", "row 131", "column 5"),
                                "base_format", formats[i]);
        }
    static const char *const others[] = {"model.norm.weight",
                                         "model.layers.1.input_layernorm.weight", "lm_head.weight",
                                         "model.embed_tokens.weight"};
    for (size_t i = 0; i < BL_COUNT(others); i++) {
        fresh_model(&weights);
        set_element(weights, others[i], 7, 0x7fc0);
        check_model_refused(TEXTS(others[i], "7"), NULL, NULL);
    }
}

static void test_bad_model_config(void **state)
{
    const char *weights, *path = runs_path("model/config.json");

    (void)state;
    fresh_model(&weights);
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    json_object_set_new(config, "hidden_size", json_string("24"));
    assert_int_equal(json_dump_file(config, path, 0), 0);
    check_model_refused(TEXTS("config.json", "hidden_size"), NULL, NULL);
    json_object_set_new(config, "hidden_size", json_integer(INT64_C(1) << 40));
    assert_int_equal(json_dump_file(config, path, 0), 0);
    check_model_refused(TEXTS("config.json", "hidden_size"), NULL, NULL);
    json_decref(config);
    runs_write_bytes(path, "\037\213\010\0\0\0\0\0\0\003", 10);
    check_model_refused(TEXTS("config.json: is gzip data, not JSON: decompress it first"), NULL,
                        NULL);
    assert_int_equal(unlink(path), 0);
    check_model_refused(TEXTS("config.json"), NULL, NULL);
}

/* ---- lora_target_modules as PEFT writes them ---- */

static void run_targets(const char *output, const char *targets)
{
    golden_args args = {0};
    runs_child child = {0};

    runs_standard(&args, output, 1);
    runs_set(&args, "lora_target_modules", "%s", targets);
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, SOON_S), 0);
    golden_args_free(&args);
}

static void test_targets_by_path(void **state)
{
    static const struct {
        const char *targets, *error;
    } refused[] = {
        {"model.layers.0.self_attn.q_proj",
         "lora_target_modules: q_proj is named in 1 of 2 layers, not in "
         "layer 1; targets that differ by layer"},
        {"q_proj,layers.2.mlp.up_proj", "their paths in 2 layers, got \"layers.2.mlp.up_proj\""},
        {".*\\.0\\..*", "lora_target_modules: \".*\\.0\\..*\" selects other modules in layer 1 "
                        "than in layers before"},
        {".*lm", "lora_target_modules: \".*lm\" matches no projection"},
        {".*lm_head", "lora_target_modules: \".*lm_head\" matches no projection; LoRA terms of the "
                      "embedding and the head alone are not supported"},
        {"lm_head,embed_tokens",
         "\"lm_head\" and the other names select no projection; LoRA terms"},
    };
    (void)state;
    run_targets(runs_path("plain"), "q_proj,up_proj");
    run_targets(runs_path("paths"),
                "model.layers.0.self_attn.q_proj,up_proj,layers.1.self_attn.q_proj");
    run_targets(runs_path("pattern"), ".*\\.(q|up)_proj");
    assert_true(runs_are_same(runs_path("plain"), runs_path("paths")));
    assert_true(runs_are_same(runs_path("plain"), runs_path("pattern")));
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        golden_args args = {0};
        runs_standard(&args, runs_path("refused"), 1);
        runs_set(&args, "lora_target_modules", "%s", refused[i].targets);
        check_refused(&args, 2, SOON_S, TEXTS(refused[i].error));
        golden_args_free(&args);
    }
}

/* ---- data ---- */

#define GOOD_ROW "{\"input_ids\":[5,6,7,8]}\n"

typedef struct data_case {
    const char *bytes;
    size_t n_bytes; /* 0: up to the NUL */
    const char *text;
} data_case;

static const data_case data_cases[] = {
    {GOOD_ROW "{\"input_ids\":[5,6,7}\n", 0, "data.jsonl:2:"},
    {GOOD_ROW GOOD_ROW "{\"input_ids\":[5,\"\377\"]}\n", 0, "data.jsonl:3:"},
    {GOOD_ROW "{\"input_ids\":\0[5,6]}\n", sizeof GOOD_ROW + 21, "data.jsonl:2:14:"},
    {GOOD_ROW "{\"input_ids\":[5,96]}\n", 0, "data.jsonl:2:"},
    {GOOD_ROW "{\"input_ids\":[5,6],\"labels\":[-100,-100]}\n", 0, "data.jsonl:2:"},
    {GOOD_ROW "{\"input_ids\":[5,6],\"labels\":[5,-100]}\n", 0,
     "data.jsonl:2:"}, /* nothing predicts the first token */
    {GOOD_ROW "{\"input_ids\":[5,6],\"weights\":[1,0]}\n", 0, "data.jsonl:2:"},
    {"", 0, "data.jsonl"},
    {"\n \n", 0, "data.jsonl"},
    {"<html>\n", 0, "data.jsonl: is an HTML page"},
    {"\037\213\010\0\0\0\0\0\0\003", 10, "data.jsonl: damaged gzip data: it ends early"},
    {"PAR1\025\004\025\020", 8, "data.jsonl: is a Parquet file"},
    {"prompt,completion\na,b\n", 0, "data.jsonl:1: is not JSON and looks like CSV"},
};

static void data_args(golden_args *args, const char *output)
{
    runs_standard(args, output, 2);
    runs_unset(args, "validation_file");
    runs_set(args, "eval_strategy", "no");
    runs_set(args, "train_file", "%s", runs_path("data.jsonl"));
}

static void check_data_refused(const char *text, const char *key, const char *value)
{
    golden_args args = {0};

    data_args(&args, runs_path("refused"));
    if (key) runs_set(&args, key, "%s", value);
    check_refused(&args, EXIT_INPUT, SOON_S, TEXTS(text));
    golden_args_free(&args);
}

static void test_bad_data(void **state)
{
    const char *path = runs_path("data.jsonl");

    (void)state;
    for (size_t i = 0; i < BL_COUNT(data_cases); i++) {
        const data_case *c = &data_cases[i];
        path = runs_path("data.jsonl"); /* is valid for some calls only */
        runs_write_bytes(path, c->bytes, c->n_bytes ? c->n_bytes : strlen(c->bytes));
        check_data_refused(c->text, NULL, NULL);
    }
    runs_write(path, "{\"input_ids\":[5]}\n{\"bad\":1}\n");
    check_data_refused("data.jsonl", "skip_bad", "true"); /* nothing is left */
    runs_write(path, GOOD_ROW "{\"input_ids\":[5,6,7,8,9]}\n");
    golden_args args = {0};
    data_args(&args, runs_path("refused"));
    runs_set(&args, "max_seq_length", "4");
    runs_set(&args, "overlong", "error");
    check_refused(&args, EXIT_INPUT, SOON_S, TEXTS("data.jsonl:2", "5"));
    /* cut to a prompt without an answer: nothing is left */
    runs_write(path, "{\"input_ids\":[5,6,7,8,9],\"labels\":[-100,-100,-100,-100,9]}\n");
    runs_set(&args, "overlong", "truncate");
    check_refused(&args, EXIT_INPUT, SOON_S, TEXTS("data.jsonl: no usable rows", "raise it"));
    golden_args_free(&args);
}

/* Rows that are left out or cut are counted and reported. */
static void test_data_that_is_mended(void **state)
{
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    runs_write(runs_path("data.jsonl"),
               GOOD_ROW "{\"input_ids\":[5,6,7}\n{\"input_ids\":[5,6,7,8,9,10]}\n" GOOD_ROW);
    data_args(&args, runs_path("mended"));
    runs_set(&args, "skip_bad", "true");
    runs_set(&args, "max_seq_length", "4");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "data.jsonl:2:"));
    assert_non_null(strstr(log, "3 samples"));
    assert_non_null(strstr(log, "longer than max_seq_length 4 and were truncated"));
    assert_non_null(strstr(log, "2 tokens"));
    free(log);
    golden_args_free(&args);
}

/* Rank after rank meets the hole; whichever is first speaks for all. */
typedef enum data_change { OTHER_BYTES, OTHER_IDS, FEWER_BYTES } data_change;

/* Ids become others; the file's length, its rows' and their counts of tokens stay. */
static void change_ids(const char *path)
{
    size_t n;
    char *bytes = runs_read(path, &n);
    FILE *file = fopen(path, "r+");

    assert_non_null(file);
    for (size_t i = 0; i < n; i++) bytes[i] = (char)(bytes[i] == '2' ? '3' : bytes[i]);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    free(bytes);
}

static void check_changing_data(data_change change, const char *key, int code)
{
    golden_args args = {0};
    runs_child child = {0};
    const char *output = runs_path("changing"), *path = runs_path("data.jsonl");

    assert_int_equal(bl_tree_remove(output), BL_OK);
    runs_copy(GOLDEN_DIR "/tokens/tiny-more.jsonl", path);
    runs_standard(&args, output, 2);
    runs_set(&args, key, "%s", path);
    runs_set(&args, "max_steps", "100000");
    runs_set(&args, "save_steps", "0");
    runs_start(&child, "train", &args);
    while (runs_is_alive(&child) && runs_logged_steps(output) < 3) runs_sleep_s(0.002);
    if (change == FEWER_BYTES) {
        assert_int_equal(truncate(path, 300), 0);
    } else if (change == OTHER_IDS) {
        change_ids(path);
    } else {
        FILE *file = fopen(path, "r+");
        assert_non_null(file);
        for (int i = 0; i < 2000; i++) fputc('x', file);
        fclose(file);
    }
    assert_int_equal(runs_wait(&child, SOON_S), code);
    runs_assert_error(&child, "data.jsonl");
    golden_args_free(&args);
}

static void test_data_that_change_during_the_run(void **state)
{
    static const char *const keys[] = {"train_file", "validation_file"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        check_changing_data(OTHER_BYTES, keys[i], EXIT_INPUT);
        check_changing_data(OTHER_IDS, keys[i], EXIT_INPUT);
        check_changing_data(FEWER_BYTES, keys[i], EXIT_RESOURCE); /* a read that fails */
    }
}

static void test_text_without_a_tokenizer(void **state)
{
    (void)state;
    runs_write(runs_path("data.jsonl"), "{\"text\":\"a\"}\n");
    check_data_refused("tokenizer", "data_format", "text");
}

/* A tokenizer that cannot be read stops what needs one, and only that. */
static void test_a_tokenizer_that_cannot_be_read(void **state)
{
    static const char *const formats[] = {"tokens", "auto"};
    const char *weights, *model = fresh_model(&weights);

    (void)state;
    runs_write(runs_path("model/tokenizer.json"), "{\"model\":{\"type\":\"WordPiece\"}}");
    for (size_t i = 0; i < BL_COUNT(formats); i++) {
        golden_args args = {0};
        runs_child child = {0};
        const char *output = runs_path("unread-%zu", i);
        runs_standard(&args, output, 1);
        runs_set(&args, "model_name_or_path", "%s", model);
        runs_set(&args, "data_format", "%s", formats[i]);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, SOON_S), 0);
        char *log = runs_read(child.log, NULL);
        assert_non_null(strstr(log, "tokenizer.json: model: type WordPiece is not supported; rows "
                                    "of tokens need no tokenizer"));
        free(log);
        golden_args_free(&args);
    }
    runs_write(runs_path("text.jsonl"), "{\"text\":\"a\"}\n");
    for (const char *format = "auto"; format; format = *format == 'a' ? "text" : NULL) {
        golden_args args = {0};
        runs_standard(&args, runs_path("refused"), 1);
        runs_set(&args, "model_name_or_path", "%s", model);
        runs_set(&args, "train_file", "%s", runs_path("text.jsonl"));
        runs_set(&args, "data_format", "%s", format);
        check_refused(&args, EXIT_INPUT, SOON_S,
                      TEXTS("tokenizer.json: model: type WordPiece is not supported"));
        golden_args_free(&args);
    }
}

/* ---- numerics ---- */

/* A final norm of 3e38: the logits overflow, the loss is not a number. */
static void test_a_loss_that_is_no_number(void **state)
{
    static const int rank_counts[] = {1, 3};
    const char *weights, *model = fresh_model(&weights);

    (void)state;
    for (int64_t i = 0; i < 24; i++) set_element(weights, "model.norm.weight", i, 0x7f60);
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) {
        golden_args args = {0};
        runs_child child = {0};
        runs_standard(&args, runs_path("overflow-%zu", i), rank_counts[i]);
        runs_set(&args, "model_name_or_path", "%s", model);
        runs_unset(&args, "validation_file");
        runs_set(&args, "eval_strategy", "no");
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, 60), EXIT_NUMERIC);
        runs_assert_error(&child, "step 1: loss");
        runs_assert_error(&child, "the logits");
        runs_assert_error(&child, "rows (from 0) ");
        assert_false(bl_file_exists(runs_path("overflow-%zu/checkpoints/step-1", i)));
        assert_false(bl_file_exists(runs_path("overflow-%zu/adapter_model.safetensors", i)));
        assert_int_equal(runs_logged_steps(runs_path("overflow-%zu", i)), 0);
        golden_args_free(&args);
    }
}

/* A token whose embedding is so large that it overflows when the first layer's output is added, in
 * row 3 of the first step: rank 1's micro-batch 1. The other ranks have nothing to report. */
static void test_the_bad_tensor_is_found(void **state)
{
    enum { HIDDEN = 24, TOKEN = 60 };
    static const uint16_t huge = 0x7f7f, large[] = {0x7cf0, 0xfcf0}; /* 3.4e38; 1e37 and -1e37 */
    const char *weights, *model = fresh_model(&weights);
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    for (int64_t row = 0; row < 2; row++) { /* of the two signs one overflows */
        set_element(weights, "model.embed_tokens.weight", TOKEN * HIDDEN + row, huge);
        for (int64_t col = 0; col < HIDDEN; col++)
            set_element(weights, "model.layers.0.self_attn.o_proj.weight", row * HIDDEN + col,
                        large[row]);
    }
    runs_write(runs_path("data.jsonl"), GOOD_ROW GOOD_ROW GOOD_ROW "{\"input_ids\":[5,60,6,7]}\n");
    data_args(&args, runs_path("first-bad"));
    runs_set(&args, "model_name_or_path", "%s", model);
    runs_set(&args, "shuffle", "false");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), EXIT_NUMERIC);
    runs_assert_error(&child, "rank 1: step 1: loss");
    runs_assert_error(&child, "the output of layer 0, micro-batch 1; rows (from 0) 0, 1, 2, 3");
    golden_args_free(&args);
}

/* ---- machines ---- */

static void test_more_memory_than_there_is(void **state)
{
    golden_args args = {0};

    (void)state;
    runs_standard(&args, runs_path("refused"), 2);
    runs_set(&args, "per_device_train_batch_size", "65536");
    runs_set(&args, "gradient_accumulation_steps", "1024");
    runs_set(&args, "visit_tokens", "1000000000");
    check_refused(&args, EXIT_RESOURCE, SOON_S, TEXTS("GB of memory"));
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_broken_weight_files),
        cmocka_unit_test(test_overlapping_tensors),
        cmocka_unit_test(test_wrong_tensors_are_listed_together),
        cmocka_unit_test(test_index_that_leaves_the_folder),
        cmocka_unit_test(test_weights_that_are_no_numbers),
        cmocka_unit_test(test_bad_model_config),
        cmocka_unit_test(test_bad_data),
        cmocka_unit_test(test_data_that_is_mended),
        cmocka_unit_test(test_data_that_change_during_the_run),
        cmocka_unit_test(test_targets_by_path),
        cmocka_unit_test(test_text_without_a_tokenizer),
        cmocka_unit_test(test_a_tokenizer_that_cannot_be_read),
        cmocka_unit_test(test_a_loss_that_is_no_number),
        cmocka_unit_test(test_the_bad_tensor_is_found),
        cmocka_unit_test(test_more_memory_than_there_is),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
