/* SPDX-License-Identifier: Apache-2.0 */
/* Successive halving of a sweep: at each rung the runs with the lowest validation losses go on, as
 * their losses alone say; the one that is left has the bits that it has alone; on 1 and 2 ranks,
 * and after SIGKILL at any moment. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "runs.h"

enum { N_RUNS = 4, FIRST_RUNG = 3, SECOND_RUNG = 6, ALL_STEPS = 12, LONGEST_NAME = 20 };
static const double LIMIT_S = 120;
static const char *const rates[N_RUNS] = {"1e-05", "0.01", "0.002", "0.0001"};

static void set_keys(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "rank_processes", "false");
    runs_set(args, "max_steps", "%d", ALL_STEPS);
    runs_set(args, "lr_scheduler_type", "constant");
    runs_set(args, "warmup_steps", "0");
    runs_set(args, "eval_steps", "5"); /* rungs are evaluated, too */
    runs_set(args, "eval_overlap", "true");
    runs_set(args, "reduction_factor", "2");
    runs_set(args, "grace_period", "%d", FIRST_RUNG);
}

/* The validation loss after that many steps, from the log. */
static double loss_at(const char *output, int step)
{
    char start[64], path[GOLDEN_PATH_BYTES + 16];

    snprintf(start, sizeof start, "\"step\":%d,", step);
    snprintf(path, sizeof path, "%s/metrics.jsonl", output);
    char *log = runs_read(path, NULL);
    double loss = -1;
    for (char *line = strtok(log, "\n"); line; line = strtok(NULL, "\n")) {
        const char *found = strstr(line, "\"eval_loss\":");
        if (found && strstr(line, start)) loss = strtod(found + strlen("\"eval_loss\":"), NULL);
    }
    free(log);
    assert_true(loss > 0);
    return loss;
}

static const char *alone(int ranks, int run)
{
    return runs_path("alone-%d-%d", ranks, run);
}

static void train_alone(int ranks)
{
    for (int run = 0; run < N_RUNS; run++) {
        golden_args args = {0};
        runs_child child = {0};
        set_keys(&args, alone(ranks, run), ranks);
        runs_set(&args, "learning_rate", "%s", rates[run]);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        golden_args_free(&args);
    }
}

/* Steps that each run makes, by the losses that the runs have alone. */
static void foresee(int ranks, int steps[N_RUNS])
{
    int order[N_RUNS] = {0, 1, 2, 3};

    for (int n = N_RUNS, rung = FIRST_RUNG; n > 1; n /= 2, rung *= 2) {
        for (int i = 0; i < n; i++)
            for (int k = i + 1; k < n; k++)
                if (loss_at(alone(ranks, order[k]), rung) < loss_at(alone(ranks, order[i]), rung)) {
                    int other = order[i];
                    order[i] = order[k];
                    order[k] = other;
                }
        for (int i = n / 2; i < n; i++) steps[order[i]] = rung;
    }
    steps[order[0]] = ALL_STEPS;
}

static const char *in_sweep(const char *name, int run)
{
    return runs_path("%s/learning_rate-%s", name, rates[run]);
}

static void start_sweep(const char *name, int ranks, bool resumes, runs_child *child)
{
    golden_args keys = {0}, args = {0};
    const char *path = runs_path("%s.yaml", name);

    set_keys(&keys, runs_path("%s", name), ranks);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < keys.n; i += 2)
        if (strcmp(keys.text[i], "--learning_rate") != 0)
            fprintf(file, "%s: %s\n", keys.text[i] + 2, keys.text[i + 1]);
    fprintf(file, "learning_rate: [%s, %s, %s, %s]\n", rates[0], rates[1], rates[2], rates[3]);
    assert_int_equal(fclose(file), 0);
    args.text[args.n++] = strdup(path);
    if (resumes) runs_set(&args, "resume_from_checkpoint", "true");
    runs_start(child, "train", &args);
    golden_args_free(&keys);
    golden_args_free(&args);
}

static void assert_halved(const char *sweep, int ranks, const runs_child *child)
{
    int steps[N_RUNS];
    char *log = runs_read(child->log, NULL);

    foresee(ranks, steps);
    for (int run = 0; run < N_RUNS; run++) {
        char name[64], line[256];
        assert_int_equal(runs_logged_steps(in_sweep(sweep, run)), steps[run]);
        if (steps[run] == ALL_STEPS)
            assert_true(runs_are_same(alone(ranks, run), in_sweep(sweep, run)));
        snprintf(name, sizeof name, "learning_rate-%s", rates[run]);
        snprintf(line, sizeof line, "%-*s  %d steps%s", LONGEST_NAME, name, steps[run],
                 steps[run] < ALL_STEPS ? " of 12, stopped at a rung  loss" : "  loss");
        if (!strstr(log, line)) printf("%s: %s", line, log);
        assert_non_null(strstr(log, line));
    }
    free(log);
}

static void test_halving(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        runs_child child = {0};
        char name[32];
        snprintf(name, sizeof name, "sweep-%d", ranks);
        train_alone(ranks);
        start_sweep(name, ranks, false, &child);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        assert_halved(name, ranks, &child);
    }
}

/* Killed around the rungs; one run has lost all checkpoints but its first. */
static void test_killed(void **state)
{
    (void)state;
    for (int step = FIRST_RUNG - 1; step <= SECOND_RUNG + 1; step++) {
        runs_child child = {0};
        char name[32];
        int steps[N_RUNS], last = 0;

        snprintf(name, sizeof name, "killed-%d", step);
        foresee(1, steps);
        while (steps[last] != ALL_STEPS) last++;
        start_sweep(name, 1, false, &child);
        while (runs_is_alive(&child) && runs_logged_steps(in_sweep(name, last)) < step)
            runs_sleep_s(0.0005);
        kill(child.pid, SIGKILL);
        (void)runs_wait(&child, LIMIT_S);               /* it may have been faster */
        for (int lost = 2; lost <= ALL_STEPS; lost++) { /* the others wait for it at the rungs */
            const char *rate = rates[(last + 1) % N_RUNS];
            assert_int_equal(bl_tree_remove(runs_path("%s/learning_rate-%s/checkpoints/step-%d",
                                                      name, rate, lost)),
                             BL_OK);
        }
        start_sweep(name, 1, true, &child);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        assert_halved(name, 1, &child);
    }
}

/* Of four runs the best one ends at the first rung by its patience: the places of two runs that
 * continue are those of the next two. */
static void test_patience_at_rung(void **state)
{
    golden_args args = {0};
    runs_child child = {0};
    int steps[N_RUNS], order[N_RUNS] = {0, 1, 2, 3};

    (void)state;
    for (int i = 0; i < N_RUNS; i++)
        for (int k = i + 1; k < N_RUNS; k++)
            if (loss_at(alone(1, order[k]), FIRST_RUNG) < loss_at(alone(1, order[i]), FIRST_RUNG)) {
                int other = order[i];
                order[i] = order[k];
                order[k] = other;
            }
    bool second_wins =
        loss_at(alone(1, order[1]), SECOND_RUNG) < loss_at(alone(1, order[2]), SECOND_RUNG);
    steps[order[0]] = FIRST_RUNG;
    steps[order[1]] = second_wins ? ALL_STEPS : SECOND_RUNG;
    steps[order[2]] = second_wins ? SECOND_RUNG : ALL_STEPS;
    steps[order[3]] = FIRST_RUNG;
    for (int run = 0; run < N_RUNS; run++) {
        golden_args keys = {0};
        const char *path = runs_path("patience-%d.yaml", run);
        set_keys(&keys, runs_path("patience-%d", run), 1);
        runs_set(&keys, "learning_rate", "%s", rates[run]);
        if (run == order[0]) { /* the second evaluation, at the rung, is not better by that much */
            runs_set(&keys, "eval_steps", "2");
            runs_set(&keys, "early_stopping_patience", "1");
            runs_set(&keys, "early_stopping_threshold", "100");
        }
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        for (int i = 0; i < keys.n; i += 2)
            fprintf(file, "%s: %s\n", keys.text[i] + 2, keys.text[i + 1]);
        assert_int_equal(fclose(file), 0);
        golden_args_free(&keys);
        args.text[args.n++] = strdup(path);
    }
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    golden_args_free(&args);
    for (int run = 0; run < N_RUNS; run++)
        assert_int_equal(runs_logged_steps(runs_path("patience-%d", run)), steps[run]);
}

static void assert_refused(const char *key, const char *value, const char *text)
{
    golden_args args = {0};
    runs_child child = {0};

    set_keys(&args, runs_path("refused"), 1);
    if (strcmp(key, "validation_file") == 0) {
        runs_unset(&args, "validation_file");
        runs_set(&args, "eval_strategy", "no");
    } else {
        runs_set(&args, key, "%s", value);
    }
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 2);
    runs_assert_error(&child, text);
    golden_args_free(&args);
}

static void test_refusals(void **state)
{
    (void)state;
    assert_refused("reduction_factor", "1", "reduction_factor 1 stops no run");
    assert_refused("validation_file", "", "reduction_factor compares validation losses");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halving),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_patience_at_rung),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
