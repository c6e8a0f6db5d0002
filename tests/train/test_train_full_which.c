/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of some tensors (trainable_modules, freeze) against float64 references in which
 * PyTorch's requires_grad is False (tools/golden/full); bits; checkpoints of the trained tensors
 * alone; the model that is written; keys that choose nothing. */
#include "full_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
#include "base/files.h"
#include "base/sizes.h"
#include "store/safetensors.h"

#define CASE(name) "../../full/cases/frozen-" name

/* A case, and the case with the same model and rows that trains everything. Cases of one model are
 * neighbors. */
static const struct {
    const char *name, *all;
} cases[] = {{CASE("all-but-last-layer"), "tiny-gqa"},
             {CASE("all-but-norms"), "tiny-gqa"},
             {CASE("all-but-head"), "tiny-gqa"},
             {CASE("all-but-embedding"), "tiny-gqa"},
             {CASE("all-but-q-v"), "tiny-gqa"},
             {CASE("tables-and-down"), "tiny-gqa"},
             {CASE("tied-table"), "tiny-mha-tied"},
             {CASE("all-but-tied-table"), "tiny-mha-tied"},
             {CASE("all-but-biases"), "qwen2-window"},
             {CASE("all-but-last-mlp"), "olmo2"},
             {CASE("all-but-layernorms"), "falcon-one-norm"}};

static void frozen_sets_follow_the_reference(void **state)
{
    (void)state;
    full_runs_check("tests/golden/full/frozen.json");
}

/* ---- bits ---- */

static void dump(const char *name, int n_ranks, const char *path)
{
    const char *args[] = {"max_steps", "1", "dump_gradients", path, NULL};

    assert_int_equal(bl_tree_remove(path), BL_OK);
    full_runs_train(name, n_ranks, "dumped", args);
}

static size_t assert_same_tensors(const char *of_some, const char *of_all, const char *what)
{
    bl_safetensors *some, *all;

    assert_int_equal(bl_safetensors_open(of_some, &some), BL_OK);
    assert_int_equal(bl_safetensors_open(of_all, &all), BL_OK);
    size_t n = bl_safetensors_count(some);
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *a = bl_safetensors_at(some, i),
                               *b = bl_safetensors_find(all, a->name);
        assert_non_null(b);
        assert_int_equal(a->n_bytes, b->n_bytes);
        char *bytes_a = malloc((size_t)a->n_bytes), *bytes_b = malloc((size_t)b->n_bytes);
        assert_int_equal(bl_stored_tensor_read(a, 0, (size_t)a->n_bytes, bytes_a), BL_OK);
        assert_int_equal(bl_stored_tensor_read(b, 0, (size_t)b->n_bytes, bytes_b), BL_OK);
        if (memcmp(bytes_a, bytes_b, (size_t)a->n_bytes) != 0)
            fail_msg("%s: %s has other bits", what, a->name);
        free(bytes_a), free(bytes_b);
    }
    assert_true(bl_safetensors_count(all) > n);
    bl_safetensors_close(some);
    bl_safetensors_close(all);
    return n;
}

/* With AddressSanitizer, which makes each of them take long, two ranks are enough. */
#ifdef __SANITIZE_ADDRESS__
enum { FEWEST_RANKS = 2, MOST_RANKS = 2 };
#else
enum { FEWEST_RANKS = 1, MOST_RANKS = 4 };
#endif

/* Freezing removes gradients, and changes no other gradient. One rank has all rows; of four, some
 * have no row of a tensor. */
static void first_gradients_are_those_of_training_all(void **state)
{
    char *some = strdup(runs_path("some.safetensors")), *all = strdup(runs_path("all.safetensors"));
    char whole[GOLDEN_PATH_BYTES];

    (void)state;
    for (int n_ranks = FEWEST_RANKS; n_ranks <= MOST_RANKS; n_ranks *= 4)
        for (size_t c = 0; c < BL_COUNT(cases); c++) {
            snprintf(whole, sizeof whole, "../../full/cases/%s", cases[c].all);
            dump(cases[c].name, n_ranks, some);
            if (c == 0 || strcmp(cases[c].all, cases[c - 1].all) != 0) dump(whole, n_ranks, all);
            assert_true(assert_same_tensors(some, all, cases[c].name) > 0);
        }
    free(some), free(all);
}

/* Parts of a fused matrix; matrices without their vectors; a table that is used twice. */
static bool has_all_variants(const char *name)
{
    return strstr(name, "q-v") || strstr(name, "tables-and-down") || strstr(name, "tied-table");
}

/* Starts of runs take most of the time. So the other cases have every third variant each, with all
 * variants in any three neighbors, and cases alternate between one rank and two. */
static void nothing_else_changes_a_bit(void **state)
{
    static const struct {
        const char *what, *args[8]; /* with a NULL behind them */
    } variants[] = {
        {"one micro-batch per visit", {"visit_tokens", "1"}},
        {"nothing recomputed", {"activation_checkpointing", "none"}},
        {"all recomputed", {"activation_checkpointing", "full"}},
        {"activations in host memory", {"activation_offload", "true"}},
        {"three threads", {"threads", "3"}},
        {"a ring of one", {"ring_depth", "1"}},
        {"half of the state on disk", {"optimizer_tier", "disk", "optimizer_ratio", "0.5"}},
        {"all of the state on disk", {"optimizer_tier", "disk", "visit_tokens", "1"}},
        {"weights and state on disk",
         {"optimizer_tier", "disk", "offload_tier", "disk", "offload_ratio", "1"}},
    };
    char *pages = strdup(runs_path("pages"));

    (void)state;
    for (size_t c = 0; c < BL_COUNT(cases); c++) {
        int n_ranks = FEWEST_RANKS == 2 || c % 2 == 0 ? 2 : 1;
        full_runs_train(cases[c].name, n_ranks, "plain", NULL);
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            const char *args[12] = {"offload_dir", pages};
            bool is_refused =
                strstr(cases[c].name, "q-v") && strstr(variants[v].what, "weights and state");
            if (!has_all_variants(cases[c].name) && v % 3 != c % 3) continue;
            memcpy(args + 2, variants[v].args, sizeof variants[v].args);
            bl_status st = full_runs_try(cases[c].name, n_ranks, "varied", args, NULL);
            assert_int_equal(st, is_refused ? BL_EUSAGE : BL_OK);
            if (!is_refused)
                full_runs_assert_same(FULL_RUNS_STEPS, "plain", "varied", n_ranks,
                                      variants[v].what);
        }
    }
    free(pages);
}

/* ---- checkpoints ---- */

/* Some steps on n_before ranks, the others on n_after; compared with those of the reference. */
static void resume(const char *name, int n_before, int n_after, const char *output)
{
    json_t *golden = golden_load_case(name);
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    for (int part = 0; part < 2; part++) {
        int n_ranks = part == 0 ? n_before : n_after;
        json_t *topology =
            json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size", 1,
                      "gradient_accumulation_steps", 4 / n_ranks);
        golden_args args = {0};
        full_runs_fill(golden, topology, model, runs_path("%s", output), &args);
        if (part == 0) runs_set(&args, "max_steps", "7");
        if (part == 1) runs_set(&args, "resume_from_checkpoint", "true");
        if (part == 1 && n_before != n_after) runs_set(&args, "allow_resume_mismatch", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        golden_args_free(&args);
        json_decref(topology);
    }
    json_t *metrics = golden_metrics(runs_path("%s", output));
    assert_true(golden_compare_losses(metrics,
                                      json_object_get(json_object_get(golden, "expect"), "steps"),
                                      FULL_RUNS_STEPS, 1e-5) <= 1e-5);
    json_decref(metrics);
    json_decref(golden);
}

/* Of q and v alone a rank of four has rows of one of them, or none. */
static void checkpoints_resume_on_any_number_of_ranks(void **state)
{
    static const char *const names[] = {CASE("all-but-q-v"), CASE("all-but-last-layer"),
                                        CASE("all-but-norms"), CASE("all-but-tied-table")};
    static const int orders[][2] = {{4, 1}, {1, 4}, {2, 4}, {4, 2}};

    (void)state;
    for (size_t c = 0; c < BL_COUNT(names); c++)
        for (size_t i = 0; i < BL_COUNT(orders); i++)
            if (c == 0 || i / 2 == c % 2) resume(names[c], orders[i][0], orders[i][1], "resharded");
}

static void a_resumed_run_has_the_bits_of_an_uninterrupted_one(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= 4; n_ranks *= 4) {
        json_t *golden = golden_load_case(CASE("all-but-q-v"));
        json_t *topology =
            json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size", 1,
                      "gradient_accumulation_steps", 4 / n_ranks);
        char model[GOLDEN_PATH_BYTES];
        golden_args args = {0};
        assert_true(golden_model(golden, model));
        assert_int_equal(bl_tree_remove(runs_path("whole")), BL_OK);
        full_runs_fill(golden, topology, model, runs_path("whole"), &args);
        assert_int_equal(golden_train(&args), BL_OK);
        golden_args_free(&args);
        json_decref(topology);
        json_decref(golden);
        resume(CASE("all-but-q-v"), n_ranks, n_ranks, "resumed");
        full_runs_assert_same(FULL_RUNS_STEPS, "whole", "resumed", n_ranks, "a resumed run");
    }
}

static int64_t file_bytes(const char *path)
{
    size_t n;
    free(runs_read(path, &n));
    return (int64_t)n;
}

/* Weights and moments of the head: 12 bytes per weight, not the model's. */
static void a_checkpoint_has_trained_tensors_alone(void **state)
{
    int64_t n_head = 96 * 24, n_padded = bl_round_up(4 * n_head, 4096);
    char name[BL_SHARD_NAME_BYTES];

    (void)state;
    full_runs_train(CASE("all-but-head"), 1, "plain", NULL);
    bl_trained_shard_name(0, 1, name);
    int64_t n = file_bytes(runs_path("plain/checkpoints/step-%d/%s", FULL_RUNS_STEPS, name));
    assert_true(n >= 12 * n_head && n <= 3 * n_padded + 4096);
}

/* Bytes of a rank for some choices. */
static void memory_is_that_of_trained_tensors(void **state)
{
    const char *const head[] = {"lm_head"}, *const q[] = {"q_proj"}, *const norms[] = {".*norm"};
    const bl_trained_patterns choices[] = {
        {head, 1, NULL, 0}, {q, 1, NULL, 0}, {norms, 1, NULL, 0}};
    const int64_t moments[] = {2 * bl_round_up(96 * 24 * 4, 4096), 2 * 2 * 4096, 0},
                  vectors[] = {0, 0, (2 * 2 + 1) * 24 * 4};
    bl_optimizer_placement placement = {.tier = BL_TIER_DEVICE, .moments = BL_F32};
    bl_model_config model;

    (void)state;
    assert_int_equal(bl_model_config_load(GOLDEN_DIR "/models/tiny-gqa", &model), BL_OK);
    for (size_t i = 0; i < BL_COUNT(choices); i++) {
        bl_trained_set set;
        bl_base_layout layout;
        bl_trained_full_bytes n;
        assert_int_equal(bl_trained_choose(&model, &choices[i], &set), BL_OK);
        assert_int_equal(bl_model_layout_trained(&model, 1, &layout), BL_OK);
        bl_tier *tiers = calloc((size_t)bl_base_part_count(&layout), sizeof *tiers);
        assert_int_equal(bl_trained_full_measure(&model, &layout, &set, tiers, &placement, &n),
                         BL_OK);
        assert_int_equal(n.units.moments, moments[i]);
        assert_int_equal(n.units.gradients, moments[i] / 2);
        assert_int_equal(n.vector_moment, vectors[i]);
        free(tiers);
        bl_base_layout_free(&layout);
        bl_trained_free(&set);
    }
}

/* ---- the model ---- */

/* Frozen tensors keep their bytes, whatever their dtype; trained ones change. */
static void frozen_tensors_are_copied(void **state)
{
    const char *args[] = {"learning_rate", "0.05", NULL};
    json_t *golden = golden_load_case(CASE("all-but-q-v"));
    char model[GOLDEN_PATH_BYTES];
    bl_safetensors *before, *after;
    size_t n_trained = 0;

    (void)state;
    assert_true(golden_model(golden, model));
    full_runs_train(CASE("all-but-q-v"), 2, "written", args);
    char *source = NULL;
    assert_int_equal(bl_path_join(model, "model.safetensors", &source), BL_OK);
    assert_int_equal(bl_safetensors_open(source, &before), BL_OK);
    assert_int_equal(bl_safetensors_open(runs_path("written/model/model.safetensors"), &after),
                     BL_OK);
    assert_int_equal(bl_safetensors_count(before), bl_safetensors_count(after));
    for (size_t i = 0; i < bl_safetensors_count(before); i++) {
        const bl_stored_tensor *a = bl_safetensors_at(before, i),
                               *b = bl_safetensors_find(after, a->name);
        assert_int_equal(a->n_bytes, b->n_bytes);
        char *bytes_a = malloc((size_t)a->n_bytes), *bytes_b = malloc((size_t)b->n_bytes);
        assert_int_equal(bl_stored_tensor_read(a, 0, (size_t)a->n_bytes, bytes_a), BL_OK);
        assert_int_equal(bl_stored_tensor_read(b, 0, (size_t)b->n_bytes, bytes_b), BL_OK);
        bool is_trained = strstr(a->name, "q_proj") || strstr(a->name, "v_proj"),
             is_same = memcmp(bytes_a, bytes_b, (size_t)a->n_bytes) == 0;
        if (is_trained == is_same) fail_msg("%s: %s", a->name, is_same ? "as it was" : "changed");
        n_trained += is_trained;
        free(bytes_a), free(bytes_b);
    }
    assert_int_equal(n_trained, 4);
    bl_safetensors_close(before);
    bl_safetensors_close(after);
    free(source);
    json_decref(golden);
}

/* ---- rejected keys ---- */

static void patterns_are_checked(void **state)
{
    static const struct {
        const char *trainable, *freeze, *text; /* text NULL: accepted */
    } choices[] = {
        {"layernorm", NULL, "trainable_modules: \"layernorm\" matches no tensor of the model"},
        {"model.layers.7", NULL, "\"model.layers.7\" matches no tensor"},
        {"lm_head", "q_prj", "freeze: \"q_prj\" matches no tensor"},
        {"(", NULL, "trainable_modules: \"(\" is not a regular expression: missing closing paren"},
        {"lm_head)|(norm", NULL, "is not a regular expression"},
        {"lm_head", "lm_head", "freeze: no tensor is left to train"},
        {NULL, ".*", "freeze: no tensor is left to train"},
        {"^lm_head.weight$", NULL, NULL}, /* as axolotl writes it */
        {"model.layers.(0|1).mlp", "up_proj", NULL},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(choices); i++) {
        const char *args[8] = {"max_steps", "1"};
        int n = 2;
        if (choices[i].trainable) args[n++] = "trainable_modules", args[n++] = choices[i].trainable;
        if (choices[i].freeze) args[n++] = "freeze", args[n++] = choices[i].freeze;
        bl_status st = full_runs_try("../../full/cases/tiny-gqa", 1, "chosen", args, NULL);
        assert_int_equal(st, choices[i].text ? BL_EUSAGE : BL_OK);
        if (choices[i].text && !strstr(bl_error_text(), choices[i].text))
            fail_msg("%s", bl_error_text());
    }
    const char *of_tables[] = {
        "max_steps", "1", "embedding_learning_rate", "1e-5", "trainable_modules", "q_proj", NULL};
    for (int i = 0; i < 2; i++) {
        of_tables[5] = i == 0 ? "q_proj" : "q_proj|lm_head";
        assert_int_equal(full_runs_try("../../full/cases/tiny-gqa", 1, "chosen", of_tables, NULL),
                         i == 0 ? BL_EUSAGE : BL_OK);
        if (i == 0) assert_non_null(strstr(bl_error_text(), "neither embedding nor head"));
    }
    const char *of_lora[] = {"finetuning_type", "lora", "trainable_modules", "norm", NULL};
    assert_int_equal(full_runs_try("../../full/cases/tiny-gqa", 1, "chosen", of_lora, NULL),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "trainable_modules: finetuning_type lora"));
}

/* Names of parts are whole: layer 1 is not 10 to 19, norm is not input_layernorm. */
static void a_pattern_matches_whole_parts(void **state)
{
    static const struct {
        const char *pattern;
        int64_t n;
    } counts[] = {{"model.layers.1", 9}, {"layers.1", 9}, {"norm", 1},          {".*norm", 5},
                  {"q_proj", 2},         {"mlp", 6},      {"q_proj|v_proj", 4}, {".*", 21}};
    bl_model_config model;

    (void)state;
    assert_int_equal(bl_model_config_load(GOLDEN_DIR "/models/tiny-gqa", &model), BL_OK);
    for (size_t i = 0; i < BL_COUNT(counts); i++) {
        bl_trained_patterns patterns = {&counts[i].pattern, 1, NULL, 0};
        bl_trained_set set;
        assert_int_equal(bl_trained_choose(&model, &patterns, &set), BL_OK);
        assert_int_equal(set.n_tensors, counts[i].n);
        bl_trained_free(&set);
    }
}

/* A checkpoint of other tensors is rejected, also with allow_resume_mismatch and with equal sizes.
 * Another expression for the same tensors can be allowed. */
static void a_run_resumes_with_its_own_choice(void **state)
{
    static const struct {
        const char *before, *after, *allows;
        bl_status st;
    } changes[] = {{"lm_head", "q_proj", "false", BL_ECHECKPOINT},
                   {"lm_head", "q_proj", "true", BL_ECHECKPOINT},
                   {"layers.0", "layers.1", "trainable_modules", BL_ECHECKPOINT},
                   {"layers.0", "model.layers.0", "false", BL_ECHECKPOINT},
                   {"layers.0", "model.layers.0", "trainable_modules", BL_OK}};
    json_t *golden = golden_load_case("../../full/cases/tiny-gqa");
    char model[GOLDEN_PATH_BYTES];

    (void)state;
    assert_true(golden_model(golden, model));
    for (size_t i = 0; i < BL_COUNT(changes); i++) {
        const char *first[] = {"max_steps", "3", "trainable_modules", changes[i].before, NULL};
        json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", 1, "per_device_train_batch_size",
                                     1, "gradient_accumulation_steps", 3);
        golden_args args = {0};
        full_runs_train("../../full/cases/tiny-gqa", 1, "other", first);
        full_runs_fill(golden, topology, model, runs_path("other"), &args);
        runs_set(&args, "resume_from_checkpoint", "true");
        runs_set(&args, "trainable_modules", "%s", changes[i].after);
        runs_set(&args, "allow_resume_mismatch", "%s", changes[i].allows);
        bl_status st = golden_train(&args);
        if (st != changes[i].st)
            fail_msg("%s, then %s: status %d", changes[i].before, changes[i].after, (int)st);
        if (st != BL_OK) assert_non_null(strstr(bl_error_text(), "trainable_modules"));
        golden_args_free(&args);
        json_decref(topology);
    }
    json_decref(golden);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frozen_sets_follow_the_reference),
        cmocka_unit_test(first_gradients_are_those_of_training_all),
        cmocka_unit_test(nothing_else_changes_a_bit),
        cmocka_unit_test(checkpoints_resume_on_any_number_of_ranks),
        cmocka_unit_test(a_resumed_run_has_the_bits_of_an_uninterrupted_one),
        cmocka_unit_test(a_checkpoint_has_trained_tensors_alone),
        cmocka_unit_test(memory_is_that_of_trained_tensors),
        cmocka_unit_test(frozen_tensors_are_copied),
        cmocka_unit_test(patterns_are_checked),
        cmocka_unit_test(a_pattern_matches_whole_parts),
        cmocka_unit_test(a_run_resumes_with_its_own_choice)};
    return cmocka_run_group_tests_name("full which", tests, runs_set_up, runs_tear_down);
}
