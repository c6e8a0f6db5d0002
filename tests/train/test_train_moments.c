/* SPDX-License-Identifier: Apache-2.0 */
/* Moments outside the steps: a start that is refused, an output_dir that is taken away between two
 * parts of a run, and a request to stop. The linker has those parts called through this program. */
#include "runs.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "model/rows.h"
#include "train/rank/evaluate.h"
#include "train/rank/trainer.h"

/* The folder of the run under way, where it is taken away, and whether it is made again. */
#define PAIRS "tests/golden/preference/tokens/pairs.jsonl"

static const char *lost_dir;
static enum { NOWHERE, BEHIND_DATA, BEHIND_BASE, BEFORE_EVALUATION, BEHIND_EVALUATION } lost_at;
static bool is_made_again;

static void lose_output(int moment)
{
    if ((int)lost_at != moment) return;
    lost_at = NOWHERE;
    assert_int_equal(bl_tree_remove(lost_dir), BL_OK);
    if (is_made_again) assert_int_equal(bl_dir_create(lost_dir), BL_OK);
}

void __real_bl_job_measure_rows(bl_job *job);
void __wrap_bl_job_measure_rows(bl_job *job);
void __wrap_bl_job_measure_rows(bl_job *job)
{
    __real_bl_job_measure_rows(job);
    lose_output(BEHIND_DATA);
}

bl_status __real_bl_trainer_check_weights(bl_trainer *trainer);
bl_status __wrap_bl_trainer_check_weights(bl_trainer *trainer);
bl_status __wrap_bl_trainer_check_weights(bl_trainer *trainer)
{
    lose_output(BEHIND_BASE);
    return __real_bl_trainer_check_weights(trainer);
}

bl_status __real_bl_job_evaluate(bl_job *job, bl_eval_result *out);
bl_status __wrap_bl_job_evaluate(bl_job *job, bl_eval_result *out);
bl_status __wrap_bl_job_evaluate(bl_job *job, bl_eval_result *out)
{
    lose_output(BEFORE_EVALUATION);
    bl_status st = __real_bl_job_evaluate(job, out);
    lose_output(BEHIND_EVALUATION);
    return st;
}

static bool is_disk_full;

bl_status __real_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes)
{
    bl_status st = __real_bl_dir_free_bytes(path, n_bytes);
    if (is_disk_full) *n_bytes = 0;
    return st;
}

/* ---- requests to stop ---- */

/* This program is signaled when an evaluation begins, and passes are counted from then on. */
static atomic_bool asks_in_evaluation, is_asked_in_evaluation;
static atomic_int n_passes_after;
static const double GRACE_S = 0.01,
                    HEARD_S = 0.5; /* by then the grace is over, and the ranks know */

void __real_bl_evaluation_begin(bl_evaluation *e);
void __wrap_bl_evaluation_begin(bl_evaluation *e);
void __wrap_bl_evaluation_begin(bl_evaluation *e)
{
    __real_bl_evaluation_begin(e);
    if (!atomic_load(&asks_in_evaluation)) return;
    if (e->rank->index == 0) (void)kill(getpid(), SIGTERM);
    runs_sleep_s(HEARD_S);
    atomic_store(&is_asked_in_evaluation, true);
}

bl_status __real_bl_pass_run(bl_pass *pass, const bl_pass_input *input);
bl_status __wrap_bl_pass_run(bl_pass *pass, const bl_pass_input *input);
bl_status __wrap_bl_pass_run(bl_pass *pass, const bl_pass_input *input)
{
    if (atomic_load(&is_asked_in_evaluation)) atomic_fetch_add(&n_passes_after, 1);
    return __real_bl_pass_run(pass, input);
}

/* And when the n-th piece of the base is about to be loaded; 0: it is not. Pieces are counted. */
static atomic_int asked_at_piece, n_pieces;

bl_status __real_bl_row_loader_next(bl_row_loader *loader, uint64_t *checksum);
bl_status __wrap_bl_row_loader_next(bl_row_loader *loader, uint64_t *checksum);
bl_status __wrap_bl_row_loader_next(bl_row_loader *loader, uint64_t *checksum)
{
    int n = atomic_fetch_add(&n_pieces, 1) + 1, asked_at = atomic_load(&asked_at_piece);

    if (asked_at > 0 && n == asked_at) (void)kill(getpid(), SIGTERM);
    if (asked_at > 0 && n >= asked_at) runs_sleep_s(HEARD_S);
    return __real_bl_row_loader_next(loader, checksum);
}

/* ---- */

/* The names in the folder but the lock's. */
static size_t count_names(const char *dir)
{
    char **names;
    size_t n_names, n = 0;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) n += strcmp(names[i], ".ballast.lock") != 0;
    bl_names_free(names, n_names);
    return n;
}

static void assert_lost(const golden_args *args, int moment, bool again)
{
    lost_at = moment;
    is_made_again = again;
    bl_status st = golden_train(args);
    assert_int_equal(lost_at, NOWHERE); /* the moment came */
    assert_int_equal(st, BL_EIO);
    if (!strstr(bl_error_text(), "was removed while this process used it"))
        fail_msg("not that the folder was removed: %s", bl_error_text());
    if (again)
        assert_int_equal(count_names(lost_dir), 0);
    else
        assert_false(bl_file_exists(lost_dir));
}

/* The corrected command needs no other key. */
static void test_refused_start(void **state)
{
    const char *output = runs_path("refused"), *trace = runs_path("trace.json");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, output, 1);
    runs_set(&args, "trace", "%s", runs_path("no/such/trace.json"));
    assert_int_equal(golden_train(&args), BL_EIO);
    runs_unset(&args, "trace");
    assert_int_equal(golden_train(&args), BL_OK);
    assert_int_equal(golden_train(&args), BL_EUSAGE); /* now it holds one */
    assert_non_null(strstr(bl_error_text(), "holds a run already"));
    runs_write(trace, "{}");
    runs_set(&args, "trace", "%s", trace);
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    char *kept = runs_read(trace, NULL);
    assert_string_equal(kept, "{}");
    free(kept);
    golden_args_free(&args);
}

/* The run to be overwritten is kept until no check rejects the new run. */
static void test_refused_overwriting(void **state)
{
    const char *output = runs_path("overwritten"),
               *adapter = runs_path("overwritten/adapter_model.safetensors");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, output, 1);
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "overwrite_output_dir", "true");
    runs_set(&args, "trace", "%s", runs_path("no/such/trace.json"));
    assert_int_equal(golden_train(&args), BL_EIO);
    assert_true(bl_file_exists(adapter));
    runs_unset(&args, "trace");
    is_disk_full = true;
    runs_set(&args, "lora_r", "1024"); /* more than the run before gives back */
    assert_int_equal(golden_train(&args), BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), ": a checkpoint takes "));
    is_disk_full = false;
    assert_true(bl_file_exists(adapter));
    runs_unset(&args, "lora_r");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

static void test_lost_behind_data(void **state)
{
    golden_args args = {0};

    (void)state;
    lost_dir = runs_path("behind-data");
    runs_standard(&args, lost_dir, 2);
    assert_lost(&args, BEHIND_DATA, false);
    assert_lost(&args, BEHIND_DATA, true);
    golden_args_free(&args);
}

static void test_lost_behind_base(void **state)
{
    golden_args args = {0};

    (void)state;
    for (int again = 0; again < 2; again++) {
        lost_dir = runs_path("behind-base-%d", again);
        runs_standard(&args, lost_dir, 1);
        assert_int_equal(golden_train(&args), BL_OK);
        runs_set(&args, "resume_from_checkpoint", "true");
        assert_lost(&args, BEHIND_BASE, again == 1);
        golden_args_free(&args);
        args = (golden_args){0};
    }
}

static void test_lost_in_evaluation(void **state)
{
    golden_args args = {0};

    (void)state;
    lost_dir = runs_path("in-evaluation");
    runs_standard(&args, lost_dir, 1);
    runs_set(&args, "base_format", "fp8_row");
    for (int again = 0; again < 2; again++) {
        assert_lost(&args, BEFORE_EVALUATION, again == 1);
        assert_lost(&args, BEHIND_EVALUATION, again == 1);
    }
    golden_args_free(&args);
}

/* If the base is not gathered, only the end of the grace stops a rank. No rank begins another pass,
 * with LoRA's gathers or without gathers. A resumed run has the same bits. */
static void cut_in_evaluation(const char *name, int ranks, const char *const *keys)
{
    const char *output = runs_path("cut-%s-%d", name, ranks),
               *whole = runs_path("uncut-%s-%d", name, ranks);
    golden_args args = {0};

    runs_standard(&args, output, ranks);
    runs_set(&args, "shard_size", "1");
    runs_set(&args, "grace_s", "%g", GRACE_S);
    runs_set(&args, "per_device_eval_batch_size", "1");
    for (int i = 0; keys[i]; i += 2) {
        runs_unset(&args, keys[i]);
        if (*keys[i + 1]) runs_set(&args, keys[i], "%s", keys[i + 1]);
    }
    atomic_store(&n_passes_after, 0);
    atomic_store(&asks_in_evaluation, true);
    bl_status st = golden_train(&args);
    atomic_store(&asks_in_evaluation, false);
    atomic_store(&is_asked_in_evaluation, false);
    assert_int_equal(st, BL_ESTOPPED);
    int n = atomic_load(&n_passes_after);
    if (n < 1 || n > ranks) /* of three or six each; a late rank begins none */
        fail_msg("%s: %d passes after the grace", name, n);
    assert_non_null(strstr(bl_error_text(), "saved after step 0"));
    runs_set(&args, "resume_from_checkpoint", "true");
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "output_dir", "%s", whole);
    assert_int_equal(golden_train(&args), BL_OK);
    if (strcmp(name, "full") != 0) assert_true(runs_are_same(whole, output));
    golden_args_free(&args);
}

static void test_grace_runs_out_in_an_evaluation(void **state)
{
    const char *rows = runs_path("validation.jsonl");
    const char *const lora[] = {"validation_file", rows, NULL}, *const full[] = {"validation_file",
                                                                                 rows,
                                                                                 "finetuning_type",
                                                                                 "full",
                                                                                 "lora_dropout",
                                                                                 "",
                                                                                 NULL},
                      *const known[] = {"loss_type",
                                        "sigmoid",
                                        "data_format",
                                        "preference",
                                        "train_file",
                                        PAIRS,
                                        "validation_file",
                                        PAIRS,
                                        "precompute_ref_log_probs",
                                        "true",
                                        NULL};

    (void)state;
    runs_write(rows,
               "{\"input_ids\":[3,4,5,6]}\n{\"input_ids\":[4,5,6,7]}\n{\"input_ids\":[5,6,7]}\n"
               "{\"input_ids\":[6,7,8,9]}\n{\"input_ids\":[7,8,9,3]}\n{\"input_ids\":[8,9,3]}\n");
    for (int ranks = 1; ranks <= 2; ranks++) {
        cut_in_evaluation("lora", ranks, lora);
        cut_in_evaluation("known", ranks, known);
    }
    cut_in_evaluation("full", 1, full);
}

/* Whatever grace_s says, each rank ends with the piece that it is at; no file is left, and the same
 * command starts again. */
static void test_stopped_while_loading(void **state)
{
    enum { ASKED_AT = 3 };

    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *pages = runs_path("pages-%d", ranks);
        golden_args args = {0};

        runs_standard(&args, runs_path("loading-%d", ranks), ranks);
        runs_set(&args, "offload_ratio", "1");
        runs_set(&args, "offload_tier", "disk");
        runs_set(&args, "offload_dir", "%s", pages);
        atomic_store(&n_pieces, 0);
        atomic_store(&asked_at_piece, ASKED_AT);
        bl_status st = golden_train(&args);
        atomic_store(&asked_at_piece, 0);
        assert_int_equal(st, BL_ESTOPPED);
        assert_in_range(atomic_load(&n_pieces), ASKED_AT, ASKED_AT + ranks - 1);
        assert_non_null(strstr(bl_error_text(), "before this run's first step"));
        assert_int_equal(count_names(pages), 0);
        assert_int_equal(golden_train(&args), BL_OK);
        assert_int_equal(count_names(pages), 2 * ranks);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_start),
        cmocka_unit_test(test_refused_overwriting),
        cmocka_unit_test(test_lost_behind_data),
        cmocka_unit_test(test_lost_behind_base),
        cmocka_unit_test(test_lost_in_evaluation),
        cmocka_unit_test(test_grace_runs_out_in_an_evaluation),
        cmocka_unit_test(test_stopped_while_loading),
    };
    return cmocka_run_group_tests_name("moments", tests, runs_set_up, runs_tear_down);
}
