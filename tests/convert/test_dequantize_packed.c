/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints in 4 bits: bl_model_dequantize gives the weights of the libraries that wrote them, to
 * the bit (tools/golden/bits4), and each damaged file is one clear line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "convert/dequantize.h"
#include "skip.h"
#include "store/hf_model.h"

#define MODELS "tests/golden/bits4/models/"
#define Q      "model.layers.0.self_attn.q_proj.weight"

static char folder[] = "/tmp/ballast-test-packed.XXXXXX";
static bl_pool *pool;

static int set_up(void **state)
{
    (void)state;
    return !mkdtemp(folder) || bl_pool_create(2, &pool) != BL_OK;
}

static int tear_down(void **state)
{
    (void)state;
    bl_pool_destroy(pool);
    return bl_tree_remove(folder) != BL_OK;
}

static void check(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static bl_status dequantize(const char *source, char target[512])
{
    bl_quantize_result unused;

    snprintf(target, 512, "%s/made", folder);
    check(bl_tree_remove(target));
    return bl_model_dequantize(
        &(bl_quantize_options){
            .source = source, .target = target, .format = BL_FORMAT_F32, .pool = pool},
        &unused);
}

static void *read_all(const bl_stored_tensor *t)
{
    void *bytes = malloc((size_t)t->n_bytes + 1);

    assert_non_null(bytes);
    check(bl_stored_tensor_read(t, 0, (size_t)t->n_bytes, bytes));
    return bytes;
}

/* ---- values ---- */

static void check_hashes(const char *name)
{
    char source[512], target[512], path[600], hash[17];
    const char *weight;
    json_t *expected, *value;
    bl_hf_model *made;

    snprintf(source, sizeof source, MODELS "%s", name);
    snprintf(path, sizeof path, "%s/dequant.json", source);
    check(bl_json_load(path, 1 << 20, &expected));
    check(dequantize(source, target));
    check(bl_hf_open(target, &made));
    assert_true(json_object_size(expected) > 0);
    json_object_foreach(expected, weight, value)
    {
        const bl_stored_tensor *t = bl_hf_find(made, weight);
        assert_non_null(t);
        assert_int_equal(t->dtype, BL_F32);
        void *bytes = read_all(t);
        snprintf(hash, sizeof hash, "%016llx",
                 (unsigned long long)XXH3_64bits_withSeed(bytes, (size_t)t->n_bytes, 0));
        free(bytes);
        if (strcmp(hash, json_string_value(value)) != 0) fail_msg("%s: %s differs", name, weight);
    }
    for (size_t i = 0; i < bl_hf_count(made); i++) /* nothing of the codes is left */
        if (!strstr(bl_hf_at(made, i)->name, ".weight") ||
            strlen(strstr(bl_hf_at(made, i)->name, ".weight")) != strlen(".weight"))
            fail_msg("%s: %s is left", name, bl_hf_at(made, i)->name);
    bl_hf_close(made);
    json_decref(expected);
}

static void test_values(void **state)
{
    static const char *const names[] = {"int4-g32", "int4-g128-zero", "int4-channel-zero",
                                        "mxfp4",    "nvfp4",          "groups",
                                        "nf4",      "nf4-double"};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(names); i++) check_hashes(names[i]);
}

/* Models of the test data, with their libraries' float32 weights beside them. */
static void test_published(void **state)
{
    static const char *const names[] = {"llama-nf4", "llama-nvfp4-ct", "gpt_oss-mxfp4"};
    const char *data = getenv("BALLAST_TEST_DATA");
    char source[512], target[512], path[600];

    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        bl_hf_model *made;
        bl_safetensors *expected;
        snprintf(source, sizeof source, "%s/models-4bit/%s", data, names[i]);
        snprintf(path, sizeof path, "%s/dequant.safetensors", source);
        check(bl_safetensors_open(path, &expected));
        check(dequantize(source, target));
        check(bl_hf_open(target, &made));
        assert_true(bl_safetensors_count(expected) > 0);
        for (size_t t = 0; t < bl_safetensors_count(expected); t++) {
            const bl_stored_tensor *e = bl_safetensors_at(expected, t),
                                   *m = bl_hf_find(made, e->name);
            assert_non_null(m);
            assert_int_equal(m->n_bytes, e->n_bytes);
            void *a = read_all(e), *b = read_all(m);
            if (memcmp(a, b, (size_t)e->n_bytes) != 0) fail_msg("%s: %s", names[i], e->name);
            free(a);
            free(b);
        }
        bl_hf_close(made);
        bl_safetensors_close(expected);
    }
}

/* ---- Model Optimizer's NVFP4: other names, a scale of scales that multiplies ---- */

/* The name with `from` at its end as `to`, in `text`; else as it is. */
static const char *renamed(const char *name, const char *from, const char *to, char text[256])
{
    size_t n = strlen(name), length = strlen(from);

    if (n < length || strcmp(name + n - length, from) != 0) return name;
    snprintf(text, 256, "%.*s%s", (int)(n - length), name, to);
    return text;
}

/* The golden NVFP4 model with 2^-10 as scale of scales of all weights, as either library has it. */
static void write_nvfp4(const char *dir, bool is_modelopt)
{
    static const char *const names[][2] = {
        {"_packed", ""}, {"_global_scale", "_scale_2"}, {".input_global_scale", ".input_scale"}};
    enum { MAX_TENSORS = 100 };
    static char texts[MAX_TENSORS][256];
    const float second = is_modelopt ? 0x1p-10f : 0x1p10f;
    bl_stored_tensor_spec specs[MAX_TENSORS];
    bl_safetensors *file;
    bl_safetensors_writer *writer;
    char path[600];

    check(bl_dir_create(dir));
    check(bl_safetensors_open(MODELS "nvfp4/model.safetensors", &file));
    size_t n = bl_safetensors_count(file);
    assert_true(n <= MAX_TENSORS);
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *t = bl_safetensors_at(file, i);
        specs[i] = (bl_stored_tensor_spec){t->name, t->dtype, t->n_dims, {0}};
        memcpy(specs[i].shape, t->shape, sizeof specs[i].shape);
        for (size_t k = BL_COUNT(names); is_modelopt && k-- > 0 && specs[i].name == t->name;)
            specs[i].name = renamed(t->name, names[k][0], names[k][1], texts[i]);
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    check(bl_safetensors_create(path, specs, n, NULL, 0, &writer));
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *t = bl_safetensors_at(file, i);
        void *bytes = read_all(t);
        if (strstr(t->name, "weight_global_scale")) memcpy(bytes, &second, sizeof second);
        check(bl_safetensors_writer_put(writer, i, 0, bytes, (size_t)t->n_bytes));
        free(bytes);
    }
    check(bl_safetensors_writer_commit(writer));
    bl_safetensors_close(file);
}

static void test_modelopt(void **state)
{
    char source[512], target[512], made[600], path[600];
    json_t *config;
    void *bytes[2];
    size_t n[2];

    (void)state;
    check(bl_json_load(MODELS "nvfp4/config.json", 1 << 20, &config));
    for (int i = 0; i < 2; i++) {
        snprintf(source, sizeof source, "%s/nvfp4-%d", folder, i);
        write_nvfp4(source, i == 1);
        if (i == 1)
            json_object_set_new(config, "quantization_config",
                                json_pack("{s:s, s:s, s:i, s:[s]}", "quant_method", "modelopt",
                                          "quant_algo", "NVFP4", "group_size", 16,
                                          "exclude_modules", "lm_head"));
        char *text = json_dumps(config, 0);
        snprintf(path, sizeof path, "%s/config.json", source);
        check(bl_file_write_atomic(path, text, strlen(text)));
        free(text);
        check(dequantize(source, target));
        snprintf(made, sizeof made, "%s/model.safetensors", target);
        check(bl_file_read_all(made, 1 << 24, &bytes[i], &n[i]));
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(bytes[0], bytes[1], n[0]);
    free(bytes[0]);
    free(bytes[1]);
    json_decref(config);
}

/* ---- damaged files ---- */

typedef enum change_kind { DROP, ADD, RENAME, BYTES, AS, TEXT } change_kind;

typedef struct change {
    const char *model, *tensor;
    change_kind kind;
    /* RENAME: the name. BYTES: the first bytes. TEXT: all of them. ADD: nothing. */
    const char *bytes;
    size_t n_bytes;
    bl_dtype dtype; /* AS, ADD: dtype and shape of the same bytes, or of zeros */
    int64_t shape[4];
    const char *says; /* NULL: no error */
} change;

#define IS(text) text, sizeof(text) - 1

static void write_tensor(const change *c, const bl_stored_tensor *t, size_t i,
                         bl_safetensors_writer *writer)
{
    char *bytes = read_all(t);
    bool is_it = !strcmp(t->name, c->tensor);

    if (is_it && c->kind == BYTES) memcpy(bytes, c->bytes, c->n_bytes);
    check(bl_safetensors_writer_put(writer, i, 0, is_it && c->kind == TEXT ? c->bytes : bytes,
                                    is_it && c->kind == TEXT ? c->n_bytes : (size_t)t->n_bytes));
    free(bytes);
}

/* A copy of the model's file with one change. */
static void write_changed(const change *c, const char *from, const char *to)
{
    static const char zeros[4096];
    enum { MAX_TENSORS = 200 };
    bl_stored_tensor_spec specs[MAX_TENSORS];
    const bl_stored_tensor *kept[MAX_TENSORS];
    bl_safetensors *file;
    bl_safetensors_writer *writer;
    size_t n = 0, n_found = c->kind == ADD;

    check(bl_safetensors_open(from, &file));
    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor *t = bl_safetensors_at(file, i);
        bool is_it = !strcmp(t->name, c->tensor);
        n_found += is_it;
        if (is_it && c->kind == DROP) continue;
        assert_true(n + 1 < MAX_TENSORS);
        kept[n] = t;
        bl_stored_tensor_spec *s = &specs[n++];
        *s = (bl_stored_tensor_spec){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims};
        memcpy(s->shape, t->shape, sizeof s->shape);
        if (is_it && c->kind == RENAME) s->name = c->bytes;
        if (is_it && c->kind == TEXT) s->shape[0] = (int64_t)c->n_bytes;
        if (is_it && c->kind == AS) {
            s->dtype = c->dtype;
            s->n_dims = c->shape[2] ? 4 : c->shape[1] ? 2 : 1;
            memcpy(s->shape, c->shape, sizeof c->shape);
        }
    }
    if (n_found != 1) fail_msg("%s has no %s", from, c->tensor);
    size_t n_kept = n;
    if (c->kind == ADD)
        specs[n++] = (bl_stored_tensor_spec){
            c->tensor, c->dtype, c->shape[1] ? 2 : 1, {c->shape[0], c->shape[1]}};
    check(bl_safetensors_create(to, specs, n, NULL, 0, &writer));
    for (size_t i = 0; i < n_kept; i++) write_tensor(c, kept[i], i, writer);
    if (c->kind == ADD)
        check(bl_safetensors_writer_put(writer, n_kept, 0, zeros,
                                        (size_t)(c->shape[0] * bl_max_i64(c->shape[1], 1)) *
                                            bl_dtype_bytes(c->dtype)));
    check(bl_safetensors_writer_commit(writer));
    bl_safetensors_close(file);
}

static void copy_config(const char *model, const char *to, const char *from_text,
                        const char *to_text)
{
    char path[600];
    void *bytes;
    size_t n;

    snprintf(path, sizeof path, MODELS "%s/config.json", model);
    check(bl_file_read_all(path, 1 << 20, &bytes, &n));
    char *text = malloc(n + 256), *at;
    assert_non_null(text);
    memcpy(text, bytes, n);
    text[n] = '\0';
    if (from_text) {
        assert_non_null(at = strstr(text, from_text));
        memmove(at + strlen(to_text), at + strlen(from_text), strlen(at + strlen(from_text)) + 1);
        memcpy(at, to_text, strlen(to_text));
    }
    snprintf(path, sizeof path, "%s/config.json", to);
    check(bl_file_write_atomic(path, text, strlen(text)));
    free(text);
    free(bytes);
}

static void expect(const char *source, const char *what, const char *says)
{
    char target[512];
    bl_status st = dequantize(source, target);

    if (st != (says ? BL_EINPUT : BL_OK) || (says && !strstr(bl_error_text(), says)) ||
        (says && strchr(bl_error_text(), '\n')))
        fail_msg("%s: status %d, \"%s\"; expected \"%s\"", what, (int)st, bl_error_text(), says);
}

static void test_damaged(void **state)
{
#define STATE(rest)                                                                                \
    IS("{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":" rest "}")
#define OF_Q Q ".quant_state.bitsandbytes__nf4"
    static const change changes[] = {
        {"int4-g32", Q "_scale", DROP, .says = Q " has 4 bits and no " Q "_scale"},
        {"int4-g32", Q "_shape", DROP, .says = Q " has 4 bits and no " Q "_shape"},
        {"int4-g32", Q "_packed", DROP, .says = "missing " Q},
        {"int4-g32", Q "_packed", DROP, .says = "unexpected " Q "_scale"},
        {"int4-g32", Q "_shape", BYTES, IS("\x20\0\0\0\0\0\0\0\x80"),
         .says = Q "_packed has shape [32, 8], which is not 4 bits per element"},
        {"int4-g32", Q "_shape", BYTES, IS("\x20\0\0\0\0\0\0\0\x3f"),
         .says = Q " has shape [32, 63], expected [32, 64]"},
        {"int4-g32", Q "_shape", BYTES, IS("\x20\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"),
         .says = Q "_shape: element 1 is 9223372036854775807, which is no size"},
        {"int4-g32", Q "_packed", AS, .dtype = BL_I32, .shape = {16, 16},
         .says = Q "_packed has shape [16, 16], which is not"},
        {"int4-g32", Q "_packed", AS, .dtype = BL_F32, .shape = {32, 8},
         .says = Q "_packed has dtype F32, expected I32 or U8"},
        {"int4-g32", Q "_scale", AS, .dtype = BL_I16, .shape = {32, 2},
         .says = Q "_scale has dtype I16, which is not read here"},
        {"int4-g32", Q "_scale", AS, .dtype = BL_BF16, .shape = {2, 32},
         .says = Q "_scale has shape [2, 32], "},
        {"int4-g32", Q "_scale", BYTES, IS("\xc0\x7f"),
         .says = Q "_scale: element 0 is not finite"},
        {"int4-g32", Q "_scale", BYTES, IS("\x80\xbf"),
         .says = Q "_scale: element 0 is -1; scales are positive"},
        {"int4-g32", Q "_g_idx", ADD, .dtype = BL_I32, .shape = {64, 0},
         .says = "unexpected " Q "_g_idx"},
        {"int4-g32", Q, ADD, .dtype = BL_BF16, .shape = {32, 64},
         .says = "tensor " Q " is stored twice, also as " Q "_packed"},
        {"int4-g128-zero", Q "_zero_point", DROP, .says = Q " has no zero points"},
        {"int4-g128-zero", Q "_zero_point", AS, .dtype = BL_I32, .shape = {1, 16},
         .says = Q "_zero_point has shape [1, 16], expected [16, 1] for its scales"},
        {"int4-g128-zero", Q "_scale", AS, .dtype = BL_BF16, .shape = {16, 1, 8, 1},
         .says = Q "_zero_point has shape [16, 1], expected [2, 8] for its scales"},
        {"int4-g128-zero", Q "_zero_point", AS, .dtype = BL_F32, .shape = {16, 1},
         .says = Q "_zero_point has dtype F32, which is not read here"},
        {"nvfp4", Q "_global_scale", DROP, .says = Q " has 4 bits and no " Q "_global_scale"},
        {"nvfp4", Q "_global_scale", BYTES, IS("\0\0\xc0\x7f"),
         .says = Q "_global_scale: element 0 is not finite"},
        {"nvfp4", Q "_global_scale", BYTES, IS("\0\0\0\0"),
         .says = Q "_global_scale is 0; scales are positive"},
        {"nvfp4", Q "_scale", BYTES, IS("\x7f"), .says = Q "_scale: element 0 is not finite"},
        {"nvfp4", Q "_scale", BYTES, IS("\0"),
         .says = NULL}, /* a block too small for a scale: zeros */
        {"nvfp4", Q "_scale", AS, .dtype = BL_F8_E4M3, .shape = {64, 2},
         .says = Q "_scale has shape [64, 2], "},
        {"nvfp4", "x.weight_packed", ADD, .dtype = BL_U8, .shape = {0, INT64_MAX},
         .says = "x.weight_packed has shape [0, 9223372036854775807], expected a matrix"},
        {"nvfp4", "x.weight_packed", ADD, .dtype = BL_U8, .shape = {1, 16},
         .says = "x.weight has 4 bits and no x.weight_scale"},
        {"nvfp4", Q "_zero_point", ADD, .dtype = BL_I32, .shape = {4, 4},
         .says = "unexpected " Q "_zero_point"},
        {"mxfp4", Q "_scale", BYTES, IS("\xff"),
         .says = "model.safetensors: tensor " Q "_scale: element 0 is not finite"},
        {"mxfp4", Q "_packed", AS, .dtype = BL_U8, .shape = {16, 64},
         .says = Q " has shape [16, 128], expected [32, 64]"},
        {"nf4", Q ".absmax", DROP, .says = Q " has 4 bits and no " Q ".absmax"},
        {"nf4", Q ".absmax", BYTES, IS("\0\0\x80\x7f"), .says = Q ".absmax: element 0 is not"},
        {"nf4", Q ".absmax", AS, .dtype = BL_U8, .shape = {128, 0},
         .says = Q ".absmax has dtype U8, which is not read here"},
        {"nf4", Q ".quant_map", DROP, .says = Q " has 4 bits and no " Q ".quant_map"},
        {"nf4", Q ".quant_map", BYTES, IS("\0\0\xc0\x7f"), .says = ".quant_map: element 0 is not"},
        {"nf4", Q, DROP, .says = OF_Q " has no codes (" Q ")"},
        {"nf4", OF_Q, DROP, .says = Q " has shape [1024, 1], expected [32, 64]"},
        {"nf4", OF_Q, RENAME, IS(Q ".quant_state.bitsandbytes__fp4"),
         .says = "of bitsandbytes' 4 bits only NF4 is read; use"},
        {"nf4", OF_Q, TEXT, STATE("[32,64]"), .says = NULL},
        {"nf4", OF_Q, TEXT, IS("{\"quant_type\":\"nf4\",\"blocksi"), .says = OF_Q ":1:"},
        {"nf4", OF_Q, TEXT, IS("[1]"), .says = OF_Q ": expected a JSON object"},
        {"nf4", OF_Q, TEXT, STATE("[32,64],\"later\":1"), .says = OF_Q ": key later: unknown"},
        {"nf4", OF_Q, TEXT, STATE("[32,64,1]"), .says = "key shape: expected two positive"},
        {"nf4", OF_Q, TEXT, STATE("[32,-64]"), .says = "key shape: expected two positive"},
        {"nf4", OF_Q, TEXT, STATE("[32,66]"), .says = Q " has 1024 bytes, expected 1056"},
        {"nf4", OF_Q, TEXT, STATE("[32,63]"), .says = "an odd number of columns"},
        {"nf4", OF_Q, TEXT, STATE("[64,32]"), .says = Q " has shape [64, 32], expected [32, 64]"},
        {"nf4", OF_Q, TEXT, IS("{\"quant_type\":\"nf4\",\"blocksize\":0,\"shape\":[32,64]}"),
         .says = "key blocksize: expected an integer"},
        {"nf4", OF_Q, TEXT, IS("{\"quant_type\":\"nf4\",\"blocksize\":128,\"shape\":[32,64]}"),
         .says = Q ".absmax has 32 elements, expected 16"},
        {"nf4", OF_Q, TEXT, IS("{\"quant_type\":\"fp4\",\"blocksize\":64,\"shape\":[32,64]}"),
         .says = "key quant_type: expected \"nf4\", got \"fp4\""},
        {"nf4-double", Q ".nested_quant_map", DROP, .says = "and no " Q ".nested_quant_map"},
        {"nf4-double", Q ".nested_absmax", DROP, .says = Q ".absmax has dtype U8"},
        {"nf4-double", Q ".nested_absmax", BYTES, IS("\0\0\x80\x7f"),
         .says = Q ".absmax: element 0 is not finite"},
        {"nf4-double", OF_Q, TEXT, STATE("[32,24]"), .says = "key nested_blocksize: missing"},
    };
    char dir[512], from[512], to[600];

    (void)state;
    snprintf(dir, sizeof dir, "%s/changed", folder);
    check(bl_dir_create(dir));
    for (size_t i = 0; i < BL_COUNT(changes); i++) {
        const change *c = &changes[i];
        snprintf(from, sizeof from, MODELS "%s/model.safetensors", c->model);
        snprintf(to, sizeof to, "%s/model.safetensors", dir);
        write_changed(c, from, to);
        copy_config(c->model, dir, NULL, NULL);
        snprintf(to, sizeof to, "case %zu, %s, %s", i, c->model, c->tensor);
        expect(dir, to, c->says);
    }
}

/* What config.json says of a weight is compared with its tensors. */
static void test_declared(void **state)
{
    static const struct {
        const char *model, *from, *to, *says;
    } cases[] = {
        {"int4-g32", "\"lm_head\"", "\"re:.*q_proj\"",
         Q " is in 4 bits, but the quantization's ignore has \"re:.*q_proj\""},
        {"int4-g32", "\"group_size\": 32", "\"group_size\": 64", "but blocks of 1 x 64, as config"},
        {"nvfp4", "16, \"num_bits\": 4, \"scale_dtype", "32, \"num_bits\": 4, \"scale_dtype",
         "but blocks of 1 x 32, as config"},
        {"int4-g32", "\"num_bits\": 4", "\"num_bits\": 8", "key num_bits: expected "},
        {"int4-g32", "\"symmetric\": true", "\"symmetric\": false", "has no zero points"},
        {"nf4", "\"llm_int8_skip_modules\": null", "\"llm_int8_skip_modules\": [\"q_proj\"]",
         Q " is in 4 bits, but the quantization's llm_int8_skip_modules has \"q_proj\""},
        {"nf4", "\"load_in_8bit\": false", "\"load_in_8bit\": true", "\"bitsandbytes int8\""},
        {"nf4", "\"bnb_4bit_quant_type\": \"nf4\"", "\"bnb_4bit_quant_type\": \"fp4\"",
         "key bnb_4bit_quant_type: weights in \"fp4\" are not supported"},
        {"nf4", "\"load_in_4bit\": true,", "\"load_in_4bit\": true, \"later\": 1,",
         "key later: unknown"},
    };
    char dir[512], path[600], from[512];
    void *bytes;
    size_t n;

    (void)state;
    snprintf(dir, sizeof dir, "%s/declared", folder);
    check(bl_dir_create(dir));
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        snprintf(from, sizeof from, MODELS "%s/model.safetensors", cases[i].model);
        check(bl_file_read_all(from, 1 << 24, &bytes, &n));
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        check(bl_file_write_atomic(path, bytes, n));
        free(bytes);
        copy_config(cases[i].model, dir, cases[i].from, cases[i].to);
        expect(dir, cases[i].to, cases[i].says);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),   cmocka_unit_test(test_published),
        cmocka_unit_test(test_modelopt), cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_declared),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
