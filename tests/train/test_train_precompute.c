/* SPDX-License-Identifier: Apache-2.0 */
/* precompute_ref_log_probs: losses, metrics, checkpoints and adapters are those of a reference that
 * goes through the layers beside the policy, bit for bit, for each loss with a reference, at 1 or 2
 * ranks, after a resume, in evaluations; the steps' passes have the policy's micro-batches only;
 * the sums are read again, or recomputed if the file has another key or is damaged.
 *
 * Bits are compared where products of a row do not depend on other rows: in the first epoch, with
 * one row per micro-batch, and in bf16. */
#include "runs.h"

#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "model/pass.h"

#define PAIRS     "tests/golden/preference/tokens/pairs.jsonl"
#define HOLES     "tests/golden/preference/tokens/holes.jsonl"
#define LABELS    "tests/golden/preference/tokens/labels.jsonl"
#define ADAPTER   GOLDEN_DIR "/adapters/tiny-gqa-all-linear"
#define FILE_NAME "ref_log_probs.bin"

static const double LIMIT_S = 120;

/* ---- passes, counted by the linker's help ---- */

static atomic_int n_forward, /* passes without gradients */
    n_besides;               /* micro-batches without gradients in passes that have some */

bl_status __real_bl_pass_run(bl_pass *pass, const bl_pass_input *input);
bl_status __wrap_bl_pass_run(bl_pass *pass, const bl_pass_input *input);
bl_status __wrap_bl_pass_run(bl_pass *pass, const bl_pass_input *input)
{
    int n = 0;

    for (int i = 0; i < input->n_micro; i++) n += input->micro[i].gradients != NULL;
    if (n == 0)
        atomic_fetch_add(&n_forward, 1);
    else
        atomic_fetch_add(&n_besides, input->n_micro - n);
    return __real_bl_pass_run(pass, input);
}

/* ---- runs ---- */

static void set_all(golden_args *args, const char *const *pairs)
{
    for (int i = 0; pairs[i]; i += 2) runs_set(args, pairs[i], "%s", pairs[i + 1]);
}

/* 13 rows in more than an epoch, with evaluations. */
static void prepare(golden_args *args, const char *output, int ranks, bool precomputes)
{
    runs_standard(args, runs_path("%s", output), ranks);
    runs_set(args, "loss_type", "sigmoid");
    runs_set(args, "data_format", "preference");
    runs_set(args, "train_file", PAIRS);
    runs_set(args, "validation_file", PAIRS);
    runs_set(args, "per_device_eval_batch_size", "2");
    runs_set(args, "eval_stored_base", "false"); /* it has passes, too */
    if (precomputes) runs_set(args, "precompute_ref_log_probs", "true");
}

static void train(golden_args *args)
{
    atomic_store(&n_forward, 0);
    atomic_store(&n_besides, 0);
    if (golden_train(args) != BL_OK) fail_msg("%s", bl_error_text());
    golden_args_free(args);
}

static void assert_same(const char *one, const char *two)
{
    if (!runs_are_same(runs_path("%s", one), runs_path("%s", two)))
        fail_msg("%s and %s differ", one, two);
}

/* ---- bits ---- */

static const char *const kto[] = {"loss_type",
                                  "kto",
                                  "data_format",
                                  "unpaired_preference",
                                  "train_file",
                                  LABELS,
                                  "validation_file",
                                  LABELS,
                                  "per_device_train_batch_size",
                                  "2",
                                  "max_steps",
                                  "2",
                                  NULL};

static const struct {
    const char *name;
    bool is_kto;
    const char *keys[12];
} cases[] = {
    {"sigmoid", false, {NULL}},
    {"hinge", false, {"loss_type", "hinge", NULL}},
    {"ipo", false, {"loss_type", "ipo", NULL}},
    {"sigmoid_norm", false, {"loss_type", "sigmoid_norm", NULL}},
    {"robust", false, {"loss_type", "robust", "label_smoothing", "0.1", NULL}},
    {"apo_zero", false, {"loss_type", "apo_zero", NULL}},
    {"apo_down", false, {"loss_type", "apo_down", NULL}},
    {"sft", false, {"loss_type", "sigmoid,sft", "loss_weights", "1,0.3", NULL}},
    {"ld", false, {"ld_alpha", "0.4", NULL}},
    {"holes", false, {"train_file", HOLES, NULL}},
    {"continued", false, {"init_adapter", ADAPTER, NULL}},
    {"kto", true, {NULL}},
    {"kto-continued", true, {"init_adapter", ADAPTER, "shuffle", "false", NULL}},
    {"rows-together", false, {"per_device_train_batch_size", "3", "max_steps", "2", NULL}},
    {"epochs",
     false,
     {"per_device_train_batch_size", "3", "compute_dtype", "bf16", "max_steps", "9", NULL}},
    {"kto-epochs", true, {"compute_dtype", "bf16", "max_steps", "9", NULL}},
    {"short-steps", false, {"epoch_end", "short_step", "max_steps", "11", NULL}},
    {"part", false, {"max_steps", "3", "train_file", PAIRS, NULL}},
    {"split", false, {"validation_file", "null", "validation_split_percentage", "40", NULL}},
    {"overlap", false, {"eval_overlap", "true", "eval_steps", "1", NULL}},
    {"kto-overlap", true, {"eval_overlap", "true", "eval_steps", "1", NULL}},
    {"one-per-visit", false, {"visit_tokens", "1", "gradient_accumulation_steps", "3", NULL}},
    {"host", false, {"offload_ratio", "1", "activation_offload", "true", NULL}},
};

static void prepare_case(golden_args *args, size_t i, const char *output, int ranks, bool known)
{
    prepare(args, output, ranks, known);
    if (cases[i].is_kto) set_all(args, kto);
    set_all(args, cases[i].keys);
    if (!strcmp(cases[i].name, "split")) runs_unset(args, "validation_file");
    runs_set(args, "overwrite_output_dir", "true");
}

/* With AddressSanitizer, which makes each of them take long, two ranks are enough. */
#ifdef __SANITIZE_ADDRESS__
enum { FEWEST_RANKS = 2 };
#else
enum { FEWEST_RANKS = 1 };
#endif

/* One loss of each kind on one rank and on two; other cases alternately on one or on two. */
static void test_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int ranks = FEWEST_RANKS; ranks <= 2; ranks++) {
            bool has_both = !strcmp(cases[i].name, "sigmoid") || !strcmp(cases[i].name, "kto");
            golden_args args = {0};
            if (FEWEST_RANKS < 2 && !has_both && ranks != 1 + (int)(i % 2)) continue;
            prepare_case(&args, i, "rides", ranks, false);
            train(&args);
            prepare_case(&args, i, "known", ranks, true);
            train(&args);
            printf("%s, %d ranks\n", cases[i].name, ranks);
            assert_same("rides", "known");
        }
}

/* Rewards are differences of sums of up to 24 log-probabilities of about 4: 24 x 4 x 2^-23 is
 * 1.1e-5, times beta 0.1. */
static void test_later_epochs(void **state)
{
    json_t *metrics[2];

    (void)state;
    for (int known = 0; known < 2; known++) {
        golden_args args = {0};
        prepare(&args, known ? "known" : "rides", 2, known);
        set_all(&args, kto);
        runs_set(&args, "max_steps", "8");
        runs_set(&args, "overwrite_output_dir", "true");
        train(&args);
        metrics[known] = golden_metrics(runs_path(known ? "known" : "rides"));
    }
    for (size_t i = 0; i < json_array_size(metrics[0]); i++)
        for (int k = 0; k < 2; k++) {
            static const char *const keys[] = {"loss", "eval_loss"};
            const json_t *one = json_object_get(json_array_get(metrics[0], i), keys[k]),
                         *two = json_object_get(json_array_get(metrics[1], i), keys[k]);
            assert_true(!one == !two);
            if (one) assert_true(fabs(json_number_value(one) - json_number_value(two)) < 1.1e-6);
        }
    for (int known = 0; known < 2; known++) json_decref(metrics[known]);
}

/* Of a step: the policy's micro-batches, and of kto as many mismatched ones. */
static void test_passes(void **state)
{
    static const int steps = 8, micro = 2, rows = 13, evaluations = 4;
    golden_args args = {0};

    (void)state;
    for (int is_kto = 0; is_kto < 2; is_kto++) {
        prepare(&args, "passes", 1, true);
        if (is_kto) set_all(&args, kto);
        runs_set(&args, "max_steps", "%d", steps);
        runs_set(&args, "visit_tokens", "100000");
        train(&args);
        int of_file = is_kto ? steps : (rows + micro - 1) / micro,
            of_evaluation = is_kto ? 6 : (rows + 1) / 2;
        assert_int_equal(atomic_load(&n_besides), is_kto ? steps * micro : 0);
        assert_int_equal(atomic_load(&n_forward), of_file + (1 + evaluations) * of_evaluation);
        assert_int_equal(bl_tree_remove(runs_path("passes")), BL_OK);
    }
}

/* ln 2 to the last bit. */
static void test_first_loss(void **state)
{
    static const int ranks[] = {1, 2, 4, 8};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(ranks); i++) {
        golden_args args = {0};
        prepare(&args, "first", ranks[i], true);
        runs_set(&args, "overwrite_output_dir", "true");
        runs_set(&args, "max_steps", "1");
        runs_set(&args, "lora_dropout", "0");
        train(&args);
        json_t *metrics = golden_metrics(runs_path("first")), *step = json_array_get(metrics, 1);
        assert_true(json_number_value(json_object_get(json_array_get(metrics, 0), "eval_loss")) ==
                    log(2));
        assert_true(json_number_value(json_object_get(step, "loss")) == log(2));
        json_decref(metrics);
    }
}

/* ---- the file ---- */

static bool was_computed(golden_args *args, int evaluations)
{
    train(args);
    return atomic_load(&n_forward) > evaluations;
}

static void prepare_file_run(golden_args *args, const char *const *keys)
{
    prepare(args, "file", 1, true);
    runs_set(args, "overwrite_output_dir", "true");
    runs_set(args, "per_device_eval_batch_size", "16"); /* a pass per evaluation */
    set_all(args, keys);
}

static void test_file(void **state)
{
    static const int evaluations = 4;
    static const struct {
        const char *keys[6];
        bool is_stale;
    } runs[] = {
        {{NULL}, true},
        {{NULL}, false},
        {{"learning_rate", "0.001", NULL}, false}, /* not the reference's */
        {{"beta", "0.3", NULL}, false},
        {{"ld_alpha", "0.5", NULL}, true},
        {{"seed", "5", NULL}, true},
        {{"init_adapter", ADAPTER, NULL}, true},
        {{"init_adapter", ADAPTER, "loss_type", "hinge", NULL}, false},
        {{"train_file", HOLES, NULL}, true},
        {{"train_file", HOLES, "validation_file", HOLES, NULL}, true},
        {{"base_format", "fp8_row", NULL}, true},
        {{NULL}, true},
    };
    golden_args args = {0};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(runs); i++) {
        prepare_file_run(&args, runs[i].keys);
        if (was_computed(&args, evaluations) != runs[i].is_stale)
            fail_msg("run %zu: stale %d", i, runs[i].is_stale);
    }
    runs_copy(runs_path("file"), runs_path("whole"));
    /* mark, key, number, checksum, sums; and a part */
    static const int64_t bits[] = {3, 20, 33, 41, 60, -1};
    for (size_t i = 0; i <= BL_COUNT(bits); i++) {
        const char *path = runs_path("file/" FILE_NAME);
        if (i < BL_COUNT(bits))
            runs_flip_bit(path, bits[i]);
        else
            assert_int_equal(truncate(path, 70), 0);
        prepare_file_run(&args, (const char *const[]){NULL});
        assert_true(was_computed(&args, evaluations));
        assert_same("whole", "file");
    }
    assert_int_equal(bl_tree_remove(runs_path("file")), BL_OK);
}

static void expect_log(golden_args *args, const char *text)
{
    runs_child child = {0};

    runs_start(&child, "train", args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    char *log = runs_read(child.log, NULL);
    if (!strstr(log, text)) fail_msg("no \"%s\" in %s", text, log);
    free(log);
    golden_args_free(args);
}

/* Of ranks as processes, too. */
static void test_log(void **state)
{
    golden_args args = {0};

    (void)state;
    prepare(&args, "rides", 2, false);
    runs_set(&args, "overwrite_output_dir", "true");
    train(&args);
    for (int i = 0; i < 4; i++) {
        static const char *const texts[] = {"reference: done in ", "rows read from ",
                                            "is of other data, batches, model or adapter",
                                            "is damaged: computing"};
        prepare(&args, "file", 2, true);
        runs_set(&args, "rank_processes", "true");
        runs_set(&args, "overwrite_output_dir", "true");
        if (i == 2) runs_set(&args, "per_device_eval_batch_size", "3");
        if (i == 3) runs_flip_bit(runs_path("file/" FILE_NAME), -3);
        expect_log(&args, texts[i]);
        if (i < 2) assert_same("rides", "file");
    }
    assert_int_equal(bl_tree_remove(runs_path("file")), BL_OK);
}

/* ---- interruptions, several runs ---- */

/* In another output_dir the sums are computed again, though the weights are those after step 1. */
static void test_resume(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        if (!strstr(cases[i].name, "continued") && strcmp(cases[i].name, "kto") != 0) continue;
        for (int resumes = 0; resumes < 2; resumes++) {
            prepare_case(&args, i, resumes ? "resumed" : "whole", 2, true);
            if (resumes) {
                runs_unset(&args, "overwrite_output_dir");
                runs_set(&args, "resume_from_checkpoint", "%s",
                         runs_path("whole/checkpoints/step-1"));
            }
            train(&args);
        }
        size_t n_one, n_two;
        char *one = runs_read(runs_path("whole/adapter_model.safetensors"), &n_one),
             *two = runs_read(runs_path("resumed/adapter_model.safetensors"), &n_two);
        assert_true(n_one == n_two && memcmp(one, two, n_one) == 0);
        free(one);
        free(two);
        assert_int_equal(bl_tree_remove(runs_path("whole")), BL_OK);
        assert_int_equal(bl_tree_remove(runs_path("resumed")), BL_OK);
    }
}

/* Killed at its first steps, before and after there are sums. */
static void test_killed(void **state)
{
    golden_args args = {0};

    (void)state;
    prepare(&args, "whole", 2, false);
    runs_set(&args, "init_adapter", ADAPTER);
    train(&args);
    for (int step = 0; step < 4; step++) {
        runs_child child = {0};
        char output[32];
        snprintf(output, sizeof output, "killed-%d", step);
        for (int resumes = 0; resumes < 2; resumes++) {
            prepare(&args, output, 2, true);
            runs_set(&args, "init_adapter", ADAPTER);
            if (resumes) runs_set(&args, "resume_from_checkpoint", "true");
            runs_start(&child, "train", &args);
            while (!resumes && runs_is_alive(&child) &&
                   (step == 0 ? access(runs_path("%s/metrics.jsonl", output), F_OK) != 0
                              : runs_logged_steps(runs_path("%s", output)) < step))
                runs_sleep_s(0.0002);
            if (!resumes) kill(child.pid, SIGKILL);
            int ended = runs_wait(&child, LIMIT_S);
            assert_true(ended == 0 || (!resumes && ended == -SIGKILL));
            golden_args_free(&args);
        }
        assert_same("whole", output);
    }
}

static const char *make_file(const char *output, int run)
{
    const char *path = runs_path("%s.yaml", output);
    golden_args args = {0};

    prepare(&args, output, 1, run != 1);
    if (run == 2) set_all(&args, kto);
    if (run == 2) runs_set(&args, "max_steps", "5");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < args.n; i += 2)
        fprintf(file, "%s: %s\n", args.text[i] + 2, args.text[i + 1]);
    assert_int_equal(fclose(file), 0);
    golden_args_free(&args);
    return path;
}

static void run_files(const char *const *files, int n)
{
    golden_args args = {0};
    runs_child child = {0};

    for (int i = 0; i < n; i++) args.text[args.n++] = strdup(files[i]);
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    golden_args_free(&args);
}

/* Of three runs over one base, the second with a reference as companion. */
static void test_together(void **state)
{
    const char *files[3];
    char output[32];

    (void)state;
    for (int run = 0; run < 3; run++) {
        snprintf(output, sizeof output, "alone-%d", run);
        files[0] = make_file(output, run);
        run_files(files, 1);
    }
    for (int run = 0; run < 3; run++) {
        snprintf(output, sizeof output, "together-%d", run);
        files[run] = make_file(output, run);
    }
    run_files(files, 3);
    for (int run = 0; run < 3; run++)
        assert_true(runs_are_same(runs_path("alone-%d", run), runs_path("together-%d", run)));
}

static void test_refusals(void **state)
{
    static const char *const losses[] = {"orpo", "simpo", "nll"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(losses); i++) {
        golden_args args = {0};
        prepare(&args, "refused", 1, true);
        runs_set(&args, "loss_type", "%s", losses[i]);
        assert_int_equal(golden_train(&args), BL_EUSAGE);
        assert_non_null(strstr(bl_error_text(), "has no reference; leave it out"));
        golden_args_free(&args);
    }
}

/* No file is kept of sums that are not finite. */
static void test_not_finite(void **state)
{
    golden_args args = {0};

    (void)state;
    prepare(&args, "infinite", 2, true);
    runs_set(&args, "model_name_or_path", "%s", runs_overflowing_model());
    assert_int_equal(golden_train(&args), BL_ENUMERIC);
    assert_non_null(strstr(bl_error_text(), "log-probabilities of the reference are not finite"));
    assert_int_equal(access(runs_path("infinite/" FILE_NAME), F_OK), -1);
    golden_args_free(&args);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    setenv("BALLAST_CPU_BF16", "emulated", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),  cmocka_unit_test(test_later_epochs),
        cmocka_unit_test(test_passes),     cmocka_unit_test(test_first_loss),
        cmocka_unit_test(test_file),       cmocka_unit_test(test_log),
        cmocka_unit_test(test_resume),     cmocka_unit_test(test_killed),
        cmocka_unit_test(test_together),   cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_not_finite),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
