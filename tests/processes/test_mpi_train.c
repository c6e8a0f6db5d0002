/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast train` as several processes writes the same adapter as the same number of local ranks,
 * byte for byte, and the same metrics except the times; and resumes an interrupted run of
 * either. */
#include "mpi_job.h"
#include "strangers.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/build_id.h"
#include "base/files.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "skip.h"

/* 400 steps of two processes take 3 s, but minutes where thirty others want the same two cores and
 * disk. */
static const double LIMIT_S = 600;

static bool has_probe(const char *dir)
{
    char **names;
    size_t n_names;
    bool found = false;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) found |= strstr(names[i], ".probe") != NULL;
    bl_names_free(names, n_names);
    return found;
}

static int train(const golden_args *args, int n_ranks, runs_child *child)
{
    mpi_start_ballast(child, n_ranks, NULL, "train", args);
    return runs_wait(child, LIMIT_S);
}

static void assert_trained(const golden_args *args, int n_ranks)
{
    runs_child child = {0};
    int code = train(args, n_ranks, &child);
    mpi_assert_error(&child, NULL);
    assert_int_equal(code, 0);
}

/* shard_size: a copy of the base for all ranks, for two of them (the ranks of a host), or each. */
static void test_same_as_local(void **state)
{
    static const int cases[][2] = {{2, 2}, {2, 1}, {4, 4}, {4, 2}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *local = runs_path("local-%zu", i), *mpi = runs_path("mpi-%zu", i);
        golden_args args = {0};
        runs_standard(&args, local, cases[i][0]);
        runs_set(&args, "shard_size", "%d", cases[i][1]);
        assert_int_equal(golden_train(&args), BL_OK);
        runs_set(&args, "output_dir", "%s", mpi);
        assert_trained(&args, cases[i][0]);
        if (!runs_are_same(local, mpi))
            fail_msg("%d ranks, shards of %d", cases[i][0], cases[i][1]);
        assert_true(bl_file_exists(runs_path("mpi-%zu/README.md", i)));
        assert_false(has_probe(mpi));
        golden_args_free(&args);
    }
}

/* A copy of `whole` as a crash after step 4 would have left it. */
static const char *crashed(const char *whole, const char *name)
{
    const char *output = runs_path("%s", name);
    runs_copy(whole, output);
    for (int step = 5; step <= 8; step++)
        assert_int_equal(bl_tree_remove(runs_path("%s/checkpoints/step-%d", name, step)), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("%s/adapter_model.safetensors", name)), BL_OK);
    return output;
}

static void test_resume_across_kinds(void **state)
{
    const char *local = runs_path("local-whole"), *mpi = runs_path("mpi-whole");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, local, 2);
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "output_dir", "%s", mpi);
    assert_trained(&args, 2);

    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "output_dir", "%s", crashed(local, "local-then-mpi"));
    assert_trained(&args, 2);
    assert_true(runs_are_same(local, runs_path("local-then-mpi")));

    runs_set(&args, "output_dir", "%s", crashed(mpi, "mpi-then-local"));
    assert_int_equal(golden_train(&args), BL_OK);
    assert_true(runs_are_same(local, runs_path("mpi-then-local")));

    runs_child child = {0};
    runs_set(&args, "output_dir", "%s", crashed(mpi, "other-ranks"));
    assert_int_equal(train(&args, 3, &child), 5);
    mpi_assert_error(&child, "ranks: 2 -> 3");
    golden_args_free(&args);
}

/* ---- what one process gets wrong, all end with ---- */

/* A script that starts the program, with `word` on rank 1, and `others` on the others: "--key
 * value", in place of that key, or "". */
static const char *with_words(const char *word, const char *others)
{
    char text[3 * GOLDEN_PATH_BYTES + sizeof BALLAST_PROGRAM];
    const char *path = runs_path("program.sh");
    snprintf(text, sizeof text,
             "#!/bin/sh\nmore='%s'\n[ $OMPI_COMM_WORLD_RANK = 1 ] && more='%s'\n"
             "for word; do\n  shift\n"
             "  if [ \"$word\" = \"${more%%%% *}\" ]; then skip=1\n"
             "  elif [ \"$skip\" ]; then skip=\n"
             "  else set -- \"$@\" \"$word\"; fi\ndone\nexec '%s' \"$@\" $more\n",
             others, word, BALLAST_PROGRAM);
    runs_write(path, text);
    assert_int_equal(chmod(path, 0755), 0);
    return path;
}

static void test_one_process_differs(void **state)
{
    char elsewhere[GOLDEN_PATH_BYTES + 16];
    snprintf(elsewhere, sizeof elsewhere, "--output_dir %s", runs_path("elsewhere"));
    const struct {
        const char *word;
        int code;
        const char *text;
    } cases[] = {
        {"--train_file /absent.jsonl", 3, "error: rank 1: /absent.jsonl: No such file"},
        {"--seed 7", 2, "error: the configuration is not the same on rank 0 and on rank 1"},
        {"--sum_block 2", 2, "error: sum_block is not the same on rank 0 and on rank 1"},
        {elsewhere, 2,
         "it must lie on a file system that all hosts share) is not the same on rank 0 and on rank "
         "1"},
        {"--validation_file " GOLDEN_DIR "/tokens/tiny.jsonl", 2,
         "error: the validation data are not the same"},
        {"--ranks 2", 2, "error: ranks: 2, but 3 processes were started"},
        {"--rankz 2", 2, "did you mean"},
        {"--save_steps 3", 2,
         "error: save_strategy, save_steps, eval_strategy, eval_steps, load_best_model_at_end, "
         "early_stopping_patience, early_stopping_threshold, per_device_eval_batch_size, "
         "shard_size, ring_depth, expert_group, gather_by_hosts or dump_gradients are not the same "
         "on "
         "rank 0 and on rank 1"},
        {"--ring_depth 3", 2, "gather_by_hosts or dump_gradients are not the same"},
        {"--gather_by_hosts true", 2, "gather_by_hosts or dump_gradients are not the same"},
    };

    (void)state;
    assert_int_equal(bl_dir_create(runs_path("elsewhere")),
                     BL_OK); /* one that is absent may come */
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        runs_child child = {0};
        golden_args args = {0};
        runs_standard(&args, runs_path("differs-%zu", i), 3);
        mpi_start_ballast(&child, 3, with_words(cases[i].word, ""), "train", &args);
        int code = runs_wait(&child, LIMIT_S);
        if (code != cases[i].code)
            fail_msg("%s: exit %d, not %d", cases[i].word, code, cases[i].code);
        mpi_assert_error(&child, cases[i].text);
        golden_args_free(&args);
    }
}

/* A host of a network file system sees the new output_dir later than the one that made it. What an
 * earlier run has left to look for is removed. */
static void test_output_dir_comes_late(void **state)
{
    const char *output = runs_path("whole-folder"), *late = runs_path("late-folder");
    char word[GOLDEN_PATH_BYTES + 32];
    runs_child child = {0};
    golden_args args = {0};

    (void)state;
    snprintf(word, sizeof word, "--output_dir %s", late);
    assert_int_equal(bl_dir_create(output), BL_OK);
    runs_write(runs_path("whole-folder/.ballast.probe-0123456789abcdef"), "");
    runs_standard(&args, output, 3);
    mpi_start_ballast(&child, 3, with_words(word, ""), "train", &args);
    mpi_wait_for_text(&child, "waiting for another host", 1);
    assert_true(has_probe(output));
    assert_false(bl_file_exists(runs_path("whole-folder/.ballast.probe-0123456789abcdef")));
    runs_sleep_s(1.0);
    assert_int_equal(symlink(output, late), 0);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    mpi_assert_error(&child, NULL);
    assert_false(has_probe(output));
    golden_args_free(&args);
}

/* Hosts with models of the same shapes and names: a bit in the middle of a matrix, a key of
 * config.json. */
static void test_models_differ(void **state)
{
    static const char *const shard_sizes[] = {"2", "1"};
    const struct {
        const char *model, *text;
    } cases[] = {
        {runs_path("flipped"),
         "error: the model's weights are not the same on rank 0 and on rank 1"},
        {runs_path("turned"), "error: the model's config.json, or its tensors, are not the same on "
                              "rank 0 and on rank 1"},
    };
    enum { IN_A_MATRIX = 700000 };
    char word[GOLDEN_PATH_BYTES + 32];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) runs_copy("demo/base", cases[i].model);
    runs_flip_bit(runs_path("flipped/model.safetensors"), IN_A_MATRIX);
    char *config = runs_read(runs_path("turned/config.json"), NULL),
         *theta = strstr(config, "10000.0");
    assert_non_null(theta);
    theta[0] = '2';
    runs_write(runs_path("turned/config.json"), config);
    free(config);
    for (size_t i = 0; i < 2 * BL_COUNT(cases) * BL_COUNT(shard_sizes); i++) {
        size_t which = i / 2 % BL_COUNT(cases);
        bool evaluates = i % 2;
        runs_child child = {0};
        golden_args args = {0};
        if (evaluates) {
            golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
            golden_args_add(&args, "data_format", "tokens");
            golden_args_add(&args, "max_seq_length", "64");
        } else {
            runs_standard(&args, runs_path("models-%zu", i), 2);
            runs_unset(&args, "model_name_or_path");
            runs_unset(&args, "ranks");
        }
        runs_set(&args, "shard_size", "%s", shard_sizes[i / 4]);
        snprintf(word, sizeof word, "--model_name_or_path %s", cases[which].model);
        mpi_start_ballast(&child, 2, with_words(word, "--model_name_or_path demo/base"),
                          evaluates ? "eval" : "train", &args);
        int code = runs_wait(&child, LIMIT_S);
        if (code != 2) fail_msg("case %zu: exit %d, not 2", i, code);
        mpi_assert_error(&child, cases[which].text);
        golden_args_free(&args);
    }
}

/* Hosts with other copies of the adapter that a run starts from, or that is evaluated: a bit of its
 * head, which each rank has whole. */
static void test_adapters_differ(void **state)
{
    static const char own[] = "tests/golden/modules/adapters/head-and-norms";
    char word[GOLDEN_PATH_BYTES + 32], other[GOLDEN_PATH_BYTES + 32];

    (void)state;
    runs_copy(own, runs_path("other-adapter"));
    runs_flip_bit(runs_path("other-adapter/adapter_model.safetensors"), 8000);
    snprintf(word, sizeof word, "--init_adapter %s", own);
    snprintf(other, sizeof other, "--init_adapter %s", runs_path("other-adapter"));
    for (int evaluates = 0; evaluates < 2; evaluates++) {
        runs_child child = {0};
        golden_args args = {0};
        golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
        golden_args_add(&args, evaluates ? "validation_file" : "train_file",
                        GOLDEN_DIR "/tokens/tiny-validation.jsonl");
        golden_args_add(&args, "data_format", "tokens");
        golden_args_add(&args, "max_seq_length", "64");
        if (!evaluates) golden_args_add(&args, "output_dir", "%s", runs_path("adapters"));
        mpi_start_ballast(&child, 2, with_words(other, word), evaluates ? "eval" : "train", &args);
        int code = runs_wait(&child, LIMIT_S);
        if (code != 2) fail_msg("evaluates %d: exit %d, not 2", evaluates, code);
        mpi_assert_error(&child, "error: init_adapter is not the same on rank 0 and on rank 1");
        golden_args_free(&args);
    }
}

/* Hosts of different instruction sets: a warning, of rank 0 only. */
static void test_one_machine_differs(void **state)
{
    char text[BL_CPU_GEMM_TEXT_BYTES], script[1024];
    runs_child child = {0};
    golden_args args = {0};

    (void)state;
    bl_cpu_gemm_describe(text);
    if (!runs_has_other_products(text)) TEST_SKIP("%s: there are no other products here", text);
    const char *path = runs_path("lesser-on-rank-1");
    snprintf(
        script, sizeof script,
        "#!/bin/sh\nif [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then export BALLAST_CPU_F32=portable; "
        "fi\nexec '%s' \"$@\"\n",
        BALLAST_PROGRAM);
    runs_write(path, script);
    assert_int_equal(chmod(path, 0755), 0);
    runs_standard(&args, runs_path("machines"), 3);
    runs_set(&args, "max_steps", "2");
    mpi_start_ballast(&child, 3, path, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    char *log = runs_read(child.log, NULL), *line = strstr(log, "not bit-identical on other hosts");
    assert_non_null(line);
    assert_non_null(strstr(line, "otherwise on 1 ranks, as ballast fp32"));
    assert_non_null(strstr(line, "ballast fp32 no fma on rank 1"));
    assert_null(strstr(line + 1, "not bit-identical on other hosts"));
    free(log);
    golden_args_free(&args);
}

/* ---- signals ---- */

enum { LONG_STEPS = 400 };

static void long_run(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "max_steps", "%d", LONG_STEPS);
    runs_set(args, "save_steps", "40");
    runs_set(args, "eval_steps", "100");
}

/* One run, stopped twice, each time resumed. False: it was over before it was asked to stop. */
static bool is_stopped_twice(const char *whole, const char *output, const char *grace, int second)
{
    golden_args args = {0};
    runs_child child = {0};

    long_run(&args, output, 2);
    runs_set(&args, "grace_s", "%s", grace);
    mpi_start_ballast(&child, 2, NULL, "train", &args);
    bool is_stopped = mpi_comes_to_step(&child, output, 45);
    if (is_stopped) kill(child.pid, SIGUSR1); /* mpirun passes it on to all */
    int code = runs_wait(&child, LIMIT_S);
    is_stopped = is_stopped && code != 0;
    if (is_stopped) {
        assert_int_equal(code, 75);
        mpi_assert_error(&child, "stopped ");
        assert_true(runs_logged_steps(output) < LONG_STEPS);
        runs_set(&args, "resume_from_checkpoint", "true");
        mpi_start_ballast(&child, 2, NULL, "train", &args);
        /* By then the log ends where the checkpoint does. */
        mpi_wait_for_text(&child, "memory predicted", 1);
        is_stopped = mpi_comes_to_step(&child, output, runs_logged_steps(output) + 20);
        pid_t pid = mpi_find_process(&child, 1);
        if (is_stopped && pid > 0) kill(pid, second); /* one rank's request is enough */
        code = runs_wait(&child, LIMIT_S);
        is_stopped = is_stopped && code != 0;
    }
    if (is_stopped) {
        assert_int_equal(code, 75);
        assert_trained(&args, 2);
        assert_true(runs_are_same(whole, output));
    }
    golden_args_free(&args);
    return is_stopped;
}

static void test_stop_and_go_on(void **state)
{
    static const char *const grace[] = {"20", "0"}; /* the second one stops inside a step */
    static const int second[] = {SIGUSR1, SIGHUP};
    enum { MAX_AGAIN = 5 };
    golden_args args = {0};
    const char *whole = runs_path("long-whole");

    (void)state;
    long_run(&args, whole, 2);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    for (size_t i = 0; i < BL_COUNT(grace); i++) {
        const char *output = runs_path("long-%zu", i);
        int n_again = 0;
        while (!is_stopped_twice(whole, output, grace[i], second[i])) {
            printf("again: grace_s %s: the run was over\n", grace[i]);
            if (++n_again > MAX_AGAIN) fail_msg("no run was stopped in time");
            assert_int_equal(bl_tree_remove(output), BL_OK);
        }
    }
}

static void test_a_rank_dies(void **state)
{
    for (int which = 0; which < 2; which++) {
        const char *output = runs_path("dies-%d", which);
        golden_args args = {0};
        runs_child child = {0};

        (void)state;
        long_run(&args, output, 3);
        runs_set(&args, "max_steps", "100000");
        mpi_start_ballast(&child, 3, NULL, "train", &args);
        pid_t ranks[3];
        for (int i = 0; i < 3; i++) ranks[i] = mpi_process_of(&child, i);
        mpi_wait_for_steps(&child, output, 45);
        kill(which == 0 ? ranks[1] : child.pid, SIGKILL);
        assert_int_equal(runs_wait(&child, LIMIT_S), which == 0 ? 128 + SIGKILL : -SIGKILL);
        mpi_assert_gone(ranks, 3);
        assert_true(bl_file_exists(runs_path("dies-%d/checkpoints/step-40/manifest.json", which)));
        golden_args_free(&args);
    }
}

static void test_a_rank_hangs(void **state)
{
    const char *output = runs_path("hangs");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    long_run(&args, output, 3);
    runs_set(&args, "max_steps", "100000");
    runs_set(&args, "step_deadline_s", "5");
    mpi_start_ballast(&child, 3, NULL, "train", &args);
    pid_t hung = mpi_process_of(&child, 0);
    mpi_wait_for_steps(&child, output, 5);
    kill(hung, SIGSTOP);
    assert_int_equal(runs_wait(&child, LIMIT_S), 7);
    mpi_assert_error(&child, "rank");
    /* Rank 2 may wait for rank 0 in the middle of a collective that the one who speaks is through
     * with. */
    char *log = runs_read(child.log, NULL);
    assert_true(strstr(log, "error: rank 0 ") || strstr(log, "error: ranks 0, 2 "));
    free(log);
    mpi_assert_gone(&hung, 1);
    golden_args_free(&args);
}

/* Only rank 0 checks output_dir; its error ends all ranks. */
static void test_output_dir_is_removed(void **state)
{
    const char *output = runs_path("removed");
    golden_args args = {0};
    runs_child child = {0};
    pid_t ranks[3];

    (void)state;
    long_run(&args, output, 3);
    runs_set(&args, "max_steps", "100000");
    mpi_start_ballast(&child, 3, NULL, "train", &args);
    for (int i = 0; i < 3; i++) ranks[i] = mpi_process_of(&child, i);
    mpi_wait_for_steps(&child, output, 5);
    /* Not piece by piece, or another error comes first. */
    assert_int_equal(rename(output, runs_path("removed-2")), 0);
    assert_int_equal(runs_wait(&child, LIMIT_S), 4);
    mpi_assert_error(&child, "was removed while this process used it");
    mpi_assert_gone(ranks, 3);
    assert_false(bl_file_exists(output));
    golden_args_free(&args);
}

/* ---- strangers at open ports ---- */

/* A foreign process sends one byte to each port of the ranks, and nothing to each of mpirun's, and
 * stays connected. The ranks continue, finish and end; mpirun itself may wait for it. */
static void test_strangers(void **state)
{
    const char *output = runs_path("strangers");
    golden_args args = {0};
    runs_child child = {0};
    strangers all = {.n = 0};
    pid_t ranks[2];

    (void)state;
    long_run(&args, output, 2);
    runs_set(&args, "step_deadline_s", "20");
    mpi_start_ballast(&child, 2, NULL, "train", &args);
    for (int i = 0; i < 2; i++) ranks[i] = mpi_process_of(&child, i);
    mpi_wait_for_steps(&child, output, 5);
    for (int i = 0; i < 2; i++) assert_int_equal(strangers_visit(ranks[i], "G", &all), 0);
    assert_true(strangers_visit(child.pid, "", &all) > 0);
    mpi_wait_for_steps(&child, output, LONG_STEPS);
    mpi_assert_gone(ranks, 2);
    assert_true(bl_file_exists(runs_path("strangers/adapter_model.safetensors")));
    strangers_leave(&all);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    mpi_assert_error(&child, NULL);
    golden_args_free(&args);
}

/* The program with another build id. */
static void write_other_build(const char *path)
{
    size_t n_bytes;
    char *program = runs_read(BALLAST_PROGRAM, &n_bytes);
    char *id = memmem(program, n_bytes, bl_build_id(), strlen(bl_build_id()));
    FILE *file = fopen(path, "w");

    assert_non_null(id);
    assert_non_null(file);
    memcpy(id, "0123456789abcdef", 16);
    assert_int_equal(fwrite(program, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, 0755), 0);
    free(program);
}

static void test_builds_differ(void **state)
{
    char script[2 * GOLDEN_PATH_BYTES + 128];
    const char *path = runs_path("either-build"), *other = runs_path("other-build");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    write_other_build(other);
    snprintf(
        script, sizeof script,
        "#!/bin/sh\nprogram='%s'\n[ $OMPI_COMM_WORLD_RANK = 1 ] && program='%s'\nexec \"$program\" "
        "\"$@\"\n",
        BALLAST_PROGRAM, other);
    runs_write(path, script);
    assert_int_equal(chmod(path, 0755), 0);
    runs_standard(&args, runs_path("builds"), 2);
    mpi_start_ballast(&child, 2, path, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 2);
    mpi_assert_error(&child, bl_build_id());
    mpi_assert_error(&child, "build 0123456789abcdef");
    setenv("BALLAST_ALLOW_BUILD_MISMATCH", "1", 1);
    mpi_start_ballast(&child, 2, path, "train", &args);
    int code = runs_wait(&child, LIMIT_S);
    unsetenv("BALLAST_ALLOW_BUILD_MISMATCH");
    assert_int_equal(code, 0);
    mpi_wait_for_text(&child, "is build 0123456789abcdef, not ", 1);
    golden_args_free(&args);
}

/* Two tasks of srun without PMIx: the remedy, at once, in one line. */
static void test_srun_without_pmix(void **state)
{
    static const char *const names[] = {"SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=1(x2)",
                                        "SLURM_LOCALID=0"};
    const char *argv[GOLDEN_MAX_ARGS + 16] = {"env", "SLURM_PROCID=0"};
    golden_args args = {0};
    runs_child child = {0};
    int n = 2;

    (void)state;
    runs_standard(&args, runs_path("srun"), 2);
    for (size_t i = 0; i < BL_COUNT(names); i++) argv[n++] = names[i];
    argv[n++] = BALLAST_PROGRAM;
    argv[n++] = "train";
    for (int i = 0; i < args.n; i++) argv[n++] = args.text[i];
    mpi_start_program(&child, argv);
    assert_int_equal(runs_wait(&child, LIMIT_S), 2);
    mpi_assert_error(&child, "add --mpi=pmix to srun");
    golden_args_free(&args);
}

static void test_eval(void **state)
{
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
    golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
    golden_args_add(&args, "data_format", "tokens");
    golden_args_add(&args, "max_seq_length", "64");
    golden_args_add(&args, "threads", "1");
    mpi_start_ballast(&child, 2, NULL, "eval", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    char *log = runs_read(child.log, NULL), *line = strstr(log, "{\"eval_loss\"");
    assert_non_null(line);
    assert_null(strstr(line + 1, "{\"eval_loss\"")); /* rank 0 alone */
    free(log);
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_local),
        cmocka_unit_test(test_resume_across_kinds),
        cmocka_unit_test(test_one_process_differs),
        cmocka_unit_test(test_output_dir_comes_late),
        cmocka_unit_test(test_models_differ),
        cmocka_unit_test(test_adapters_differ),
        cmocka_unit_test(test_one_machine_differs),
        cmocka_unit_test(test_stop_and_go_on),
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_a_rank_hangs),
        cmocka_unit_test(test_output_dir_is_removed),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_builds_differ),
        cmocka_unit_test(test_srun_without_pmix),
        cmocka_unit_test(test_eval),
    };
    if (!mpi_is_here()) return 77;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
