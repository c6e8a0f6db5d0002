/* SPDX-License-Identifier: Apache-2.0 */
/* test_measure.c -- the rates of this processor are measured once and kept; invalid values in a
 * cache are measured again; a plan's times use them; a part of a large matrix has its rate. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "arch/llama.h"
#include "trained/choose.h"
#include "plan/measure.h"
#include "plan/search.h"

static char cache[] = "/tmp/ballast-test-measure-XXXXXX";

typedef struct measure_case {
    bl_train_config *config;
    bl_model_config model;
    bl_format formats[2 * BL_PROJECTIONS];
    bl_lora_layout lora;
    bl_hardware hardware;
    bl_plan_input input;
} measure_case;

static void open_case(measure_case *c)
{
    char *args[] = {"--model_name_or_path",
                    "/nowhere/model",
                    "--train_file",
                    "/nowhere/train.jsonl",
                    "--output_dir",
                    "/nowhere/out",
                    "--device",
                    "cpu",
                    "--ranks",
                    "1",
                    "--threads",
                    "1"};

    *c = (measure_case){.model = {.arch = &bl_arch_llama,
                                  .vocab_size = 256,
                                  .hidden_size = 64,
                                  .intermediate_size = 128,
                                  .n_layers = 2,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 16,
                                  .max_position_embeddings = 512,
                                  .rms_norm_eps = 1e-5}};
    assert_int_equal(
        bl_train_config_load(BL_CONFIG_TRAIN, NULL, (int)BL_COUNT(args), args, &c->config), BL_OK);
    for (size_t i = 0; i < BL_COUNT(c->formats); i++) c->formats[i] = BL_FORMAT_FP8_ROW;
    assert_int_equal(bl_adapter_choose_lora(c->config, &c->model, true, &c->lora), BL_OK);
    assert_int_equal(bl_hardware_preset("cpu", &c->hardware), BL_OK);
    c->input = (bl_plan_input){.config = c->config,
                               .model = &c->model,
                               .formats = c->formats,
                               .embedding_dtype = BL_BF16,
                               .head_dtype = BL_BF16,
                               .n_positions = 64,
                               .lora = &c->lora,
                               .topology = {.n_ranks = 1, .n_here = 1, .n_on_host = 1},
                               .is_training = true,
                               .longest_train_row = 64,
                               .available_bytes = -1,
                               .hardware = &c->hardware};
}

/* The one file of the cache. */
static void find_cache(char path[256])
{
    char dir[128];
    snprintf(dir, sizeof dir, "%s/ballast", cache);
    DIR *d = opendir(dir);
    int n = 0;

    assert_non_null(d);
    for (struct dirent *entry = readdir(d); entry; entry = readdir(d))
        if (entry->d_name[0] != '.') {
            snprintf(path, 256, "%s/%.100s", dir, entry->d_name);
            n++;
        }
    closedir(d);
    assert_int_equal(n, 1);
}

static void test_measured_once(void **state)
{
    bl_plan_measured first, kept, again;
    measure_case c;

    (void)state;
    open_case(&c);
    assert_true(bl_plan_can_measure(&c.input));
    assert_int_equal(bl_plan_measure(&c.input, false, &first), BL_OK);
    assert_false(first.is_cached);
    assert_int_equal(bl_plan_measure(&c.input, false, &kept), BL_OK);
    assert_true(kept.is_cached);
    assert_string_equal(kept.date, first.date);
    assert_true(fabs(kept.rates.gemm_flops_per_s / first.rates.gemm_flops_per_s - 1) < 1e-4);
    assert_int_equal(bl_plan_measure(&c.input, true, &again), BL_OK);
    assert_false(again.is_cached);
    bl_train_config_free(c.config);
}

/* Damaged, cut off, of another build, or with rates that no processor has. */
static void test_bad_caches(void **state)
{
    static const struct {
        const char *find, *put;
    } changes[] = {{"\"gemm_flops_per_s\": ", "\"gemm_flops_per_s\": 1e300, \"was\": "},
                   {"\"memory_bytes_per_s\": ", "\"no\": "},
                   {"build ", "build x"},
                   {"{", "["}};
    char path[256], *text, *changed;
    bl_plan_measured m;
    measure_case c;
    size_t n_bytes;
    void *bytes;

    (void)state;
    open_case(&c);
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    find_cache(path);
    for (size_t i = 0; i < BL_COUNT(changes); i++) {
        assert_int_equal(bl_file_read_all(path, 1 << 16, &bytes, &n_bytes), BL_OK);
        assert_int_equal(bl_text_format(&text, "%.*s", (int)n_bytes, (const char *)bytes), BL_OK);
        free(bytes);
        char *at = strstr(text, changes[i].find);
        assert_non_null(at);
        assert_int_equal(bl_text_format(&changed, "%.*s%s%s", (int)(at - text), text,
                                        changes[i].put, at + strlen(changes[i].find)),
                         BL_OK);
        assert_int_equal(bl_file_write_atomic(path, changed, strlen(changed)), BL_OK);
        assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
        assert_false(m.is_cached);
        assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
        assert_true(m.is_cached);
        free(text);
        free(changed);
    }
    bl_train_config_free(c.config);
}

/* FLOPs per second of products and of the head, with as many rows as flops_max leaves. */
static void measure_part(const measure_case *c, double flops_max, bl_rates *out)
{
    assert_int_equal(bl_plan_measure_rates(&(bl_plan_measure_options){.model = &c->model,
                                                                      .act = BL_F32,
                                                                      .lora_r = 8,
                                                                      .tokens = 32,
                                                                      .document_tokens = 32,
                                                                      .n_ranks = 1,
                                                                      .threads = 1,
                                                                      .flops_max = flops_max,
                                                                      .runs = 1,
                                                                      .queued = 1,
                                                                      .seconds = 0.02,
                                                                      .in_cpu_time = true,
                                                                      .measures_head = true},
                                           out),
                     BL_OK);
}

/* A part of the rows has the rate of all of them, of which there are 5 and 8 times as many: a rate
 * that counted others than were computed would be so far off; 3 is for what other jobs take of the
 * caches. */
static void test_part_of_large_matrices(void **state)
{
    bl_rates all, part;
    measure_case c;

    (void)state;
    open_case(&c);
    c.model.hidden_size = 4096;
    c.model.intermediate_size = 4096;
    c.model.head_dim = 64;
    c.model.vocab_size = 8192;
    measure_part(&c, 0, &all);
    measure_part(&c, 1, &part);
    double products = part.gemm_flops_per_s / all.gemm_flops_per_s,
           head = part.head_flops_per_s / all.head_flops_per_s;
    assert_true(products > 1.0 / 3 && products < 3);
    assert_true(head > 1.0 / 3 && head < 3);
    bl_train_config_free(c.config);
}

/* Rates of FP8 are not used for another format, nor those of frozen matrices for trained ones. */
static void test_other_weights_are_measured_apart(void **state)
{
    bl_plan_measured m;
    measure_case c;

    (void)state;
    open_case(&c);
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    assert_true(m.is_cached);
    for (size_t i = 0; i < BL_COUNT(c.formats); i++) c.formats[i] = BL_FORMAT_F16;
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    assert_false(m.is_cached);
    c.config->finetuning_type = BL_FINETUNING_FULL;
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    assert_false(m.is_cached);
    bl_train_config_free(c.config);
}

static void double_rates(bl_rates *r)
{
    r->gemm_flops_per_s *= 2;
    r->lora_flops_per_s *= 2;
    r->head_flops_per_s *= 2;
    r->attention_forward_flops_per_s *= 2;
    r->attention_backward_flops_per_s *= 2;
    r->memory_bytes_per_s *= 2;
    r->optimizer_bytes_per_s *= 2;
}

/* Twice the rates, half the time, without the part that the machine's other rates have: the
 * difference of two steps is half as long, too. */
static void test_plan_uses_rates(void **state)
{
    bl_plan_measured m;
    bl_time_estimate at[3];
    measure_case c;
    bl_plan plan;

    (void)state;
    open_case(&c);
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    c.input.measured = &m.rates;
    assert_int_equal(bl_plan_choose(&c.input, &plan), BL_OK);
    for (int i = 0; i < 3; i++, double_rates(&m.rates))
        assert_int_equal(bl_plan_estimate(&c.input, &plan, &at[i]), BL_OK);
    double ratio = (at[0].step_s - at[1].step_s) / (at[1].step_s - at[2].step_s);
    assert_true(fabs(ratio - 2) < 0.01);
    assert_true(at[0].step_s > 1.9 * at[1].step_s);
    bl_train_config_free(c.config);
}

static void test_no_place_for_a_cache(void **state)
{
    bl_plan_measured m;
    measure_case c;

    (void)state;
    open_case(&c);
    setenv("XDG_CACHE_HOME", "/proc/nowhere", 1);
    assert_int_equal(bl_plan_measure(&c.input, false, &m), BL_OK);
    assert_false(m.is_cached);
    setenv("XDG_CACHE_HOME", cache, 1);
    bl_train_config_free(c.config);
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(cache) ? setenv("XDG_CACHE_HOME", cache, 1) : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(cache) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_measured_once),
        cmocka_unit_test(test_bad_caches),
        cmocka_unit_test(test_plan_uses_rates),
        cmocka_unit_test(test_part_of_large_matrices),
        cmocka_unit_test(test_no_place_for_a_cache),
        cmocka_unit_test(test_other_weights_are_measured_apart),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
