/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of full fine-tuning, written behind the steps: the next step runs while a write is
 * blocked; updates wait until their unit is written; the bytes are those of a checkpoint after the
 * last step; also while an evaluation runs in the visits of the next step; a failed write ends the
 * run, and the previous checkpoint stays. */
#include "full_runs.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "trained/full.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "ops/optimizer.h"
#include "store/checkpoint.h"
#include "store/safetensors.h"

enum { STEPS = 6, MIDDLE = 3, N_MODES = 3, WAIT_S = 60 };

#define ON_DISK       "optimizer_tier", "disk", "offload_tier", "disk", "offload_ratio", "1"
#define STATE_ON_DISK "optimizer_tier", "disk", "optimizer_ratio", "0.5"

static const char *const modes[N_MODES][8] = {{NULL}, {ON_DISK}, {STATE_ON_DISK}};

/* ---- a blocked, slow or full disk ---- */

static struct {
    char log[512];         /* metrics of the run */
    atomic_int held_until; /* the first write waits for the log's line of this step; 0: none */
    atomic_bool held_for_evaluation; /* the first write waits for the loss of step MIDDLE */
    atomic_bool came;                /* the line was logged */
    atomic_bool is_late;    /* the checkpoint of step MIDDLE began after the loss was logged */
    atomic_int delay_us;    /* of each write */
    atomic_int fails_after; /* writes that succeed; -1: all */
    atomic_int update_us;   /* before each update of a piece by the host */
} disk;

static void pause_us(int n)
{
    nanosleep(&(struct timespec){n / 1000000, n % 1000000 * 1000L}, NULL);
}

static bool has_line(int step, const char *other)
{
    char key[32], line[8192];
    bool found = false;
    FILE *log = fopen(disk.log, "r");

    snprintf(key, sizeof key, "\"step\":%d,", step);
    while (log && !found && fgets(line, sizeof line, log)) {
        char *to = line;
        for (const char *c = line; *c; c++)
            if (*c != ' ') *to++ = *c;
        *to = 0;
        found = strstr(line, key) && strstr(line, other);
    }
    if (log) fclose(log);
    return found;
}

bl_status __real_bl_safetensors_writer_put(bl_safetensors_writer *writer, size_t index,
                                           int64_t offset_bytes, const void *bytes, size_t n_bytes);
bl_status __wrap_bl_safetensors_writer_put(bl_safetensors_writer *writer, size_t index,
                                           int64_t offset_bytes, const void *bytes, size_t n_bytes);

static void wait_for_line(int step, const char *other)
{
    double until = bl_now_s() + WAIT_S;

    while (!has_line(step, other) && bl_now_s() < until) pause_us(2000);
    atomic_store(&disk.came, has_line(step, other));
}

bl_status __wrap_bl_safetensors_writer_put(bl_safetensors_writer *writer, size_t index,
                                           int64_t offset_bytes, const void *bytes, size_t n_bytes)
{
    int step = atomic_exchange(&disk.held_until, 0);

    if (step > 0) wait_for_line(step, "\"grad_norm\"");
    if (atomic_exchange(&disk.held_for_evaluation, false)) wait_for_line(MIDDLE, "\"eval_loss\"");
    pause_us(atomic_load(&disk.delay_us));
    if (atomic_load(&disk.fails_after) >= 0 && atomic_fetch_sub(&disk.fails_after, 1) == 0)
        return BL_FAIL(BL_ELIMIT, "a full disk");
    return __real_bl_safetensors_writer_put(writer, index, offset_bytes, bytes, n_bytes);
}

bl_status __real_bl_trained_state_begin_shard(bl_trained_state *state, const char *path,
                                              bl_status (*then)(void *user), void *user);
bl_status __wrap_bl_trained_state_begin_shard(bl_trained_state *state, const char *path,
                                              bl_status (*then)(void *user), void *user);

/* On the thread that trains: unlike the first write's, the moment does not depend on the load. */
bl_status __wrap_bl_trained_state_begin_shard(bl_trained_state *state, const char *path,
                                              bl_status (*then)(void *user), void *user)
{
    char middle[32];

    snprintf(middle, sizeof middle, "/step-%d", MIDDLE);
    if (strstr(path, middle) && has_line(MIDDLE, "\"eval_loss\""))
        atomic_store(&disk.is_late, true);
    return __real_bl_trained_state_begin_shard(state, path, then, user);
}

bl_status __real_bl_adamw_on_host(bl_stream *stream, const bl_adamw_args *args);
bl_status __wrap_bl_adamw_on_host(bl_stream *stream, const bl_adamw_args *args);

bl_status __wrap_bl_adamw_on_host(bl_stream *stream, const bl_adamw_args *args)
{
    pause_us(atomic_load(&disk.update_us));
    return __real_bl_adamw_on_host(stream, args);
}

static void use_disk(const char *output, int held_until, int delay_us, int fails_after)
{
    snprintf(disk.log, sizeof disk.log, "%s", runs_path("%s/metrics.jsonl", output));
    atomic_store(&disk.held_until, held_until);
    atomic_store(&disk.came, false);
    atomic_store(&disk.is_late, false);
    atomic_store(&disk.delay_us, delay_us);
    atomic_store(&disk.fails_after, fails_after);
    atomic_store(&disk.update_us, 0);
}

/* ---- runs ---- */

static const char *const evaluates[] = {
    "validation_file", "tests/golden/families/tokens/rows.jsonl",
    "eval_strategy",   "steps",
    "eval_steps",      "3",
    "eval_overlap",    "true"};
static bool has_evaluations; /* in the visits of the next step */

/* With a constant learning rate: checkpoints do not depend on the number of steps. */
static bl_status train(const char *name, int n_ranks, const char *output, int mode, int steps,
                       int save_steps)
{
    char total[16], every[16];
    const char *args[32] = {"lr_scheduler_type", "constant", "max_steps",   total,
                            "save_steps",        every,      "offload_dir", runs_path("pages"),
                            "logging_steps",     "1"};

    snprintf(total, sizeof total, "%d", steps);
    snprintf(every, sizeof every, "%d", save_steps);
    memcpy(args + 10, modes[mode], sizeof modes[mode]);
    int n = 10;
    while (args[n]) n++;
    if (has_evaluations) memcpy(args + n, evaluates, sizeof evaluates);
    return full_runs_try(name, n_ranks, output, args, NULL);
}

static void the_step_goes_on(void **state)
{
    (void)state;
    for (int mode = 0; mode < N_MODES; mode++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            use_disk("goes-on", MIDDLE + 1, 0, -1);
            assert_int_equal(train(full_runs_cases[0], n_ranks, "goes-on", mode, STEPS, MIDDLE),
                             BL_OK);
            assert_true(atomic_load(&disk.came));
        }
}

static double number_of_state(const char *name, const char *key)
{
    json_t *manifest =
        json_load_file(runs_path("%s/checkpoints/step-%d/manifest.json", name, MIDDLE), 0, NULL);
    double number = json_number_value(json_object_get(json_object_get(manifest, "state"), key));
    json_decref(manifest);
    return number;
}

/* The evaluation of step MIDDLE ends before the update of the next step: its checkpoint has the
 * loss, and the update does not wait for the file's last units. */
static void an_evaluation_goes_on(void **state)
{
    (void)state;
    has_evaluations = true;
    for (int mode = 0; mode < N_MODES; mode++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            use_disk("evaluated", 0, 0, -1);
            assert_int_equal(train(full_runs_cases[0], n_ranks, "evaluated", mode, STEPS, MIDDLE),
                             BL_OK);
            use_disk("goes-on", 0, 0, -1);
            atomic_store(&disk.held_for_evaluation, true);
            assert_int_equal(train(full_runs_cases[0], n_ranks, "goes-on", mode, STEPS, MIDDLE),
                             BL_OK);
            assert_true(atomic_load(&disk.came) && !atomic_load(&disk.is_late));
            full_runs_assert_same(MIDDLE, "evaluated", "goes-on", n_ranks, "an evaluation");
            assert_int_equal(number_of_state("goes-on", "evaluated_step"), MIDDLE);
            assert_true(number_of_state("goes-on", "validation_loss") ==
                        number_of_state("evaluated", "validation_loss"));
        }
    has_evaluations = false;
}

/* Each write takes longer than a step of these models, so updates wait. The updates that a
 * checkpoint waits for are slow in every other run. */
static void later_steps_change_no_byte(void **state)
{
    (void)state;
    for (int mode = 0; mode < N_MODES; mode++)
        for (int c = 0; c < FULL_RUNS_CASES; c++) {
            int n_ranks = 1 + (c + mode) % 2;
            use_disk("last", 0, 0, -1);
            assert_int_equal(train(full_runs_cases[c], n_ranks, "last", 0, MIDDLE, 0), BL_OK);
            use_disk("middle", MIDDLE + 1, 1000, -1);
            if (c % 2 == 1) {
                use_disk("middle", 0, 0, -1);
                atomic_store(&disk.update_us, 3000);
            }
            assert_int_equal(train(full_runs_cases[c], n_ranks, "middle", mode, STEPS, MIDDLE),
                             BL_OK);
            full_runs_assert_same(MIDDLE, "last", "middle", n_ranks, full_runs_cases[c]);
        }
}

static bool exists(const char *path)
{
    FILE *file = fopen(path, "r");
    if (file) fclose(file);
    return file != NULL;
}

static void a_failure_ends_the_run(void **state)
{
    (void)state;
    for (int mode = 0; mode < N_MODES; mode++) {
        int n_ranks = 1 + mode % 2;
        use_disk("fails", 0, 0, 7);
        assert_int_equal(train(full_runs_cases[1], n_ranks, "fails", mode, STEPS, 2), BL_ELIMIT);
        assert_non_null(strstr(bl_error_text(), "a full disk"));
        assert_false(exists(runs_path("fails/checkpoints/step-2/manifest.json")));
        assert_false(exists(runs_path("fails/checkpoints/step-2.tmp/config.yaml")));
    }
}

/* The disk is full after the first checkpoint and a part of the second one. */
static void an_earlier_checkpoint_stays(void **state)
{
    enum { FIRST = 2 };
    json_t *verified = NULL;
    int64_t step;

    (void)state;
    use_disk("stays", 0, 0, -1);
    atomic_store(&disk.fails_after, 1 << 20);
    assert_int_equal(train(full_runs_cases[1], 1, "stays", 0, FIRST, FIRST), BL_OK);
    int of_one = (1 << 20) - atomic_load(&disk.fails_after);
    use_disk("stays", 0, 0, of_one + 3);
    assert_int_equal(train(full_runs_cases[1], 1, "stays", 0, STEPS, FIRST), BL_ELIMIT);
    assert_int_equal(
        bl_checkpoint_verify(runs_path("stays/checkpoints/step-%d", FIRST), &step, &verified),
        BL_OK);
    assert_int_equal(step, FIRST);
    json_decref(verified);
    assert_false(exists(runs_path("stays/checkpoints/step-%d/manifest.json", 2 * FIRST)));
}

/* A learning rate and weight decay that take the weights to infinity in some steps, which are all
 * saved: the last save is under way when the loss is not finite. */
static void a_loss_that_is_not_finite(void **state)
{
    const char *args[] = {"learning_rate",
                          "10",
                          "weight_decay",
                          "1",
                          "max_grad_norm",
                          "0",
                          "max_steps",
                          "60",
                          "save_steps",
                          "1",
                          "offload_dir",
                          runs_path("pages"),
                          ON_DISK,
                          NULL,
                          NULL};
    json_t *verified = NULL;
    int64_t step;
    int failed;

    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        if (n_ranks == 2) args[12] = NULL; /* in memory */
        use_disk("infinite", 0, 2000, -1);
        assert_int_equal(full_runs_try(full_runs_cases[1], n_ranks, "infinite", args, NULL),
                         BL_ENUMERIC);
        assert_int_equal(sscanf(strstr(bl_error_text(), "step "), "step %d: loss", &failed), 1);
        assert_true(failed > 2);
        assert_int_equal(bl_checkpoint_verify(runs_path("infinite/checkpoints/step-%d", failed - 1),
                                              &step, &verified),
                         BL_OK);
        json_decref(verified);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_step_goes_on),
        cmocka_unit_test(an_evaluation_goes_on),
        cmocka_unit_test(later_steps_change_no_byte),
        cmocka_unit_test(a_failure_ends_the_run),
        cmocka_unit_test(an_earlier_checkpoint_stays),
        cmocka_unit_test(a_loss_that_is_not_finite),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
