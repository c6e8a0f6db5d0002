/* SPDX-License-Identifier: Apache-2.0 */
/* A queue: jobs that are moved into a directory join the base that is loaded, each with the bits
 * that it has alone, on threads and processes; they join at different steps, fail or are rejected
 * without the others; a killed or stopped queue goes on. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sizes.h"
#include "queue_runs.h"

/* One from the start, one once it has made steps, then two at once, after the second has ended. */
static void test_bits(void **state)
{
    static const queue cases[] = {
        {.name = "one", .ranks = 1, .processes = "false"},
        {.name = "threads", .ranks = 2, .processes = "false"},
        {.name = "processes", .ranks = 2, .processes = "true"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        queue q = cases[i];
        for (int job = 0; job < QUEUE_N_JOBS; job++)
            queue_train_alone(q.name, job, q.ranks, q.processes);
        queue_start(&q);
        queue_await(&q, queue_path(&q, "%s", "running"));
        queue_put(&q, 0);
        queue_await_step(&q, runs_path("%s-queued-0", q.name), 3);
        queue_put(&q, 1);
        queue_await_step(&q, runs_path("%s-queued-1", q.name), 2);
        queue_put(&q, 2);
        queue_put(&q, 3);
        for (int job = 0; job < QUEUE_N_JOBS; job++) queue_await_end(&q, "done", job);
        queue_stop(&q);
        for (int job = 0; job < QUEUE_N_JOBS; job++) queue_assert_same(&q, job);
    }
}

static void put_text(queue *q, const char *name, const char *text)
{
    const char *path = queue_path(q, "%s", name), *part = queue_path(q, ".%s", name);
    runs_write(part, text);
    assert_int_equal(rename(part, path), 0);
}

/* AdamW with epsilon 0 divides the first gradient of A, which is 0, by 0: step 2 is not finite. */
static void put_failing(queue *q)
{
    golden_args args = {0};
    runs_standard(&args, runs_path("%s-failing", q->name), q->ranks);
    runs_set(&args, "adam_epsilon", "0");
    queue_write_keys(&args, queue_path(q, "%s", "failing.yaml"), QUEUE_JOB_KEYS);
    golden_args_free(&args);
}

/* Jobs whose outputs the queue or a list of files cannot have; other users can change the last
 * one's file. */
static const char *const bad_outputs[][2] = {
    {"output_dir: \"o\\nx\"", "output_dir: the path has a control character (0x0a)"},
    {"output_dir: ok\nreport_to: tensorboard\nlogging_dir: \"o\\e[31m\"",
     "logging_dir: the path has"},
    {"output_dir: QUEUE", "is in the directory of queue"},
    {"output_dir: QUEUE/running", "is in the directory of queue"},
    {"output_dir: LINK/new/one", "is in the directory of queue"},
    {"output_dir: ok\ndump_gradients: QUEUE/x.yaml", "dump_gradients: "},
    {"output_dir: ok\nreport_to: tensorboard\nlogging_dir: LINK", "logging_dir: "},
    {"output_dir: /proc/self/none", "/proc/self/none"},
    {"output_dir: ok", "other users may write it (mode 666)"},
};

static void put_bad_outputs(queue *q)
{
    char link[GOLDEN_PATH_BYTES], text[3 * GOLDEN_PATH_BYTES], name[32];

    snprintf(link, sizeof link, "%s", runs_path("%s-link", q->name));
    assert_int_equal(symlink(q->dir, link), 0);
    for (size_t i = 0; i < BL_COUNT(bad_outputs); i++) {
        const char *from = bad_outputs[i][0], *at = strstr(from, "QUEUE");
        const char *dir = at ? q->dir : link;
        if (!at) at = strstr(from, "LINK");
        int n = at ? (int)(at - from) : (int)strlen(from);
        snprintf(text, sizeof text, "%.*s%s%s\ntrain_file: %s\n", n, from, at ? dir : "",
                 at ? at + strspn(at, "QUEUELINK") : "", QUEUE_PAIRS);
        snprintf(name, sizeof name, "out%zu.yaml", i);
        mode_t mask = umask(i + 1 == BL_COUNT(bad_outputs) ? 0 : 022);
        put_text(q, name, text);
        umask(mask);
    }
}

static void assert_bad_outputs(queue *q)
{
    char name[64];

    for (size_t i = 0; i < BL_COUNT(bad_outputs); i++) {
        snprintf(name, sizeof name, "rejected/out%zu.yaml.error", i);
        queue_assert_line(q, name, bad_outputs[i][1]);
    }
    assert_int_equal(access("ok", F_OK), -1);
}

/* Jobs that cannot be read, have another value of a common key, share an output_dir, have
 * modules_to_save, write where the queue is, or have a loss that is not finite end without the
 * others. */
static void test_bad_jobs(void **state)
{
    static const queue cases[] = {
        {.name = "bad", .ranks = 1, .processes = "false"},
        {.name = "bad-processes", .ranks = 2, .processes = "true"},
    };
    char text[3 * GOLDEN_PATH_BYTES], longest[247]; /* without room for .error */

    (void)state;
    snprintf(longest, sizeof longest, "%0241d.yaml", 0);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        queue q = cases[i];
        queue_train_alone(q.name, 0, q.ranks, q.processes);
        queue_start(&q);
        queue_await(&q, queue_path(&q, "%s", "running"));
        queue_put(&q, 0);
        queue_await_step(&q, runs_path("%s-queued-0", q.name), 1);
        put_text(&q, "a.yaml", "learning_rate: much\n");
        put_text(&q, "b.yaml", "output_dir: /tmp/none\ntrain_file: x.jsonl\nmax_seq_length: 32\n");
        snprintf(text, sizeof text, "output_dir: %s\ntrain_file: missing.jsonl\n",
                 runs_path("%s-missing", q.name));
        put_text(&q, "c.yml", text);
        snprintf(text, sizeof text, "output_dir: %s\ntrain_file: %s\n",
                 runs_path("%s-queued-0", q.name), QUEUE_PAIRS);
        put_text(&q, "d.yaml", text);
        put_text(&q, "e.txt", "passed over");
        snprintf(text, sizeof text,
                 "output_dir: %s\ntrain_file: %s\nloss_type: simpo\nmodules_to_save: [norm]\n",
                 runs_path("%s-whole", q.name), QUEUE_PAIRS);
        put_text(&q, "f.yaml", text);
        put_text(&q, longest, "learning_rate: much\n");
        put_bad_outputs(&q);
        put_failing(&q);
        queue_await(&q, queue_path(&q, "%s", "failed/failing.yaml"));
        queue_await_end(&q, "done", 0);
        queue_await(&q, queue_path(&q, "%s", "rejected/d.yaml"));
        queue_await(&q, queue_path(&q, "%s", "rejected/f.yaml"));
        queue_await(&q, queue_path(&q, "rejected/%s", longest));
        queue_await(&q, queue_path(&q, "%s", "rejected/out8.yaml"));
        queue_stop(&q);
        queue_assert_same(&q, 0);
        queue_assert_line(&q, "rejected/a.yaml.error", "a.yaml:1: learning_rate");
        queue_assert_line(&q, "rejected/b.yaml.error",
                          "max_seq_length: 32, but the base of this queue");
        queue_assert_line(&q, "rejected/c.yml.error", "missing.jsonl");
        queue_assert_line(&q, "rejected/d.yaml.error", "output_dir");
        queue_assert_line(&q, "rejected/f.yaml.error",
                          "modules_to_save replaces modules of the base");
        queue_assert_line(&q, "failed/failing.yaml.error", "step 2: loss ");
        assert_bad_outputs(&q);
        assert_true(queue_has(&q, "%s", "e.txt"));
        assert_int_equal(access(runs_path("%s-failing/adapter_model.safetensors", q.name), F_OK),
                         -1);
    }
}

/* A file whose name is that of a job which trains waits for its end; a job whose file is removed
 * while it trains ends without the others. */
static void test_names(void **state)
{
    queue q = {.name = "names", .ranks = 1, .processes = "false"};
    golden_args args = {0};

    (void)state;
    for (int job = 0; job < 3; job++) queue_train_alone(q.name, job, q.ranks, q.processes);
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "running"));
    queue_put(&q, 0);
    queue_await_step(&q, runs_path("%s-queued-0", q.name), 1);
    queue_job_keys(&args, q.name, "queued", 1, q.ranks);
    queue_write_keys(&args, queue_path(&q, "%s", "job0.yaml"), QUEUE_JOB_KEYS);
    golden_args_free(&args);
    queue_put(&q, 2);
    queue_await_step(&q, runs_path("%s-queued-2", q.name), 1);
    assert_int_equal(unlink(queue_path(&q, "%s", "running/job2.yaml")), 0);
    queue_await_end(&q, "done", 0);
    assert_int_equal(unlink(queue_path(&q, "%s", "done/job0.yaml")), 0);
    queue_await_end(&q, "done", 0);
    queue_await(&q, runs_path("%s-queued-2/README.md", q.name));
    queue_stop(&q);
    assert_false(queue_has(&q, "%s", "done/job2.yaml"));
    for (int job = 0; job < 3; job++) queue_assert_same(&q, job);
}

/* Ended by a signal while two jobs train and one waits to be seen; the same command goes on. */
static void end_in_the_middle(const queue *made, int signal_number, int code)
{
    queue q = *made;

    for (int job = 0; job < 3; job++) queue_train_alone(q.name, job, q.ranks, q.processes);
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "running"));
    queue_put(&q, 0);
    queue_put(&q, 2);
    queue_await_step(&q, runs_path("%s-queued-2", q.name), 4);
    assert_true(runs_stop(&q.child));
    queue_put(&q, 1);
    kill(q.child.pid, signal_number);
    kill(q.child.pid, SIGCONT);
    int ended = runs_wait(&q.child, QUEUE_LIMIT_S);
    assert_int_equal(ended, code);
    assert_true(queue_has(&q, "%s", "running/job0.yaml"));
    queue_start(&q);
    for (int job = 0; job < 3; job++) queue_await_end(&q, "done", job);
    queue_stop(&q);
    for (int job = 0; job < 3; job++) queue_assert_same(&q, job);
}

static void test_killed(void **state)
{
    static const queue one = {.name = "killed", .ranks = 1, .processes = "false"},
                       threads = {.name = "killed-threads", .ranks = 2, .processes = "false"};
    (void)state;
    end_in_the_middle(&one, SIGKILL, -SIGKILL);
    end_in_the_middle(&threads, SIGKILL, -SIGKILL);
}

static void test_stopped(void **state)
{
    static const queue one = {.name = "stopped", .ranks = 1, .processes = "false"};
    (void)state;
    end_in_the_middle(&one, SIGTERM, 75);
}

/* A job that resumed the checkpoint of another run starts from it again until it has one itself. */
static void test_continued(void **state)
{
    queue q = {.name = "continued", .ranks = 1, .processes = "false"};
    static const char *const outputs[] = {"continued-alone-0", "continued-queued-0",
                                          "continued-queued-1"};
    golden_args args = {0};
    size_t n_bytes[3];

    (void)state;
    queue_train_alone(q.name, 0, q.ranks, q.processes);
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "running"));
    for (int job = 0; job < 2; job++) { /* a checkpoint every 10 steps; none before the end */
        queue_job_keys(&args, q.name, "queued", 0, q.ranks);
        runs_set(&args, "output_dir", "%s", runs_path("%s", outputs[1 + job]));
        runs_set(&args, "save_steps", job == 0 ? "10" : "60");
        runs_set(&args, "resume_from_checkpoint", "%s",
                 runs_path("continued-alone-0/checkpoints/step-10"));
        queue_write_keys(&args, queue_path(&q, job == 0 ? "%s0.yaml" : "%s1.yaml", "job"),
                         QUEUE_JOB_KEYS);
        golden_args_free(&args);
    }
    queue_await(&q, runs_path("continued-queued-0/checkpoints/step-20"));
    queue_await_step(&q, runs_path("%s", outputs[2]), 2);
    assert_int_equal(kill(q.child.pid, SIGKILL), 0);
    assert_int_equal(runs_wait(&q.child, QUEUE_LIMIT_S), -SIGKILL);
    queue_start(&q);
    for (int job = 0; job < 2; job++) queue_await_end(&q, "done", job);
    queue_stop(&q);
    char *log = runs_read(q.child.log, NULL), *adapters[3];
    assert_non_null(strstr(log, "continued-queued-0/checkpoints/step-"));
    assert_non_null(strstr(log, "continued-alone-0/checkpoints/step-10 after step 10"));
    free(log);
    for (int i = 0; i < 3; i++)
        adapters[i] = runs_read(runs_path("%s/adapter_model.safetensors", outputs[i]), &n_bytes[i]);
    for (int i = 1; i < 3; i++) {
        assert_int_equal(n_bytes[i], n_bytes[0]);
        assert_memory_equal(adapters[i], adapters[0], n_bytes[0]);
    }
    for (int i = 0; i < 3; i++) free(adapters[i]);
}

/* A directory where other users put jobs, or where a job's file cannot be moved. */
static void test_directories(void **state)
{
    static const struct {
        const char *sub, *error;
        mode_t mode;
    } cases[] = {{"", "other users may write it (mode 775)", 0775},
                 {"", "other users may create files in it (mode 1777)", 01777},
                 {"/running", "other users may write it (mode 777)", 0777},
                 {"/rejected", "other users may write it (mode 777)", 0777}};
    queue q = {.name = "directories", .ranks = 1, .processes = "false"};

    (void)state;
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "running"));
    queue_stop(&q);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char path[2 * GOLDEN_PATH_BYTES];
        snprintf(path, sizeof path, "%s%s", q.dir, cases[i].sub);
        (void)mkdir(path, 0700);
        assert_int_equal(chmod(path, cases[i].mode), 0);
        queue_start(&q);
        assert_int_equal(runs_wait(&q.child, QUEUE_LIMIT_S), 2);
        runs_assert_error(&q.child, cases[i].error);
        assert_int_equal(chmod(path, 0700), 0);
    }
    if (geteuid() != 0) return;
    assert_int_equal(chown(q.dir, 65534, (gid_t)-1), 0);
    queue_start(&q);
    assert_int_equal(runs_wait(&q.child, QUEUE_LIMIT_S), 2);
    runs_assert_error(&q.child, "belongs to another user (uid 65534)");
    assert_int_equal(chown(q.dir, 0, (gid_t)-1), 0);
}

/* Directories with names of jobs, there and where a job moves; and a relative link with a long
 * name. */
static void test_moves(void **state)
{
    queue q = {.name = "moves", .ranks = 1, .processes = "false"};
    static const char *const dirs[] = {"rejected/file.yaml", "rejected/both.yaml", "both.yaml",
                                       "dir.yaml"};
    char longest[255];

    (void)state;
    snprintf(longest, sizeof longest, "%0249d.yaml", 0);
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "rejected"));
    queue_stop(&q);
    for (size_t i = 0; i < BL_COUNT(dirs); i++) {
        char below[GOLDEN_PATH_BYTES];
        assert_int_equal(mkdir(queue_path(&q, "%s", dirs[i]), 0700), 0);
        snprintf(below, sizeof below, "%s/x", dirs[i]); /* it is not empty */
        runs_write(queue_path(&q, "%s", below), "x");
    }
    runs_write(queue_path(&q, "%s", "file.yaml"), "learning_rate: much\n");
    runs_write(queue_path(&q, "%s", "rejected/dir.yaml"), "an earlier job");
    assert_int_equal(symlink("none", queue_path(&q, "%s", longest)), 0);
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "rejected/file.yaml.1"));
    queue_stop(&q);
    assert_true(queue_has(&q, "%s", "rejected/both.yaml.1/x"));
    assert_true(queue_has(&q, "%s", "rejected/dir.yaml.1/x"));
    struct stat info;
    assert_int_equal(lstat(queue_path(&q, "rejected/%s", longest), &info), 0);
    queue_assert_line(&q, "rejected/file.yaml.error", "learning_rate");
    queue_start(&q);
    queue_stop(&q);
}

/* Keys that a queue's base cannot have; and a second queue in one directory. */
static void test_refusals(void **state)
{
    static const char *const keys[][3] = {
        {"output_dir", "x", "output_dir: not with queue"},
        {"finetuning_type", "full", "finetuning_type full"},
    };
    queue q = {.name = "refused", .ranks = 1, .processes = "false"}, second;

    (void)state;
    queue_start(&q);
    queue_await(&q, queue_path(&q, "%s", "running"));
    second = q;
    queue_start(&second);
    assert_int_equal(runs_wait(&second.child, QUEUE_LIMIT_S), 2);
    runs_assert_error(&second.child, "is in use by pid ");
    queue_stop(&q);
    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        golden_args args = {0};
        runs_child child = {0};
        runs_set(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
        runs_set(&args, "queue", "%s", q.dir);
        runs_set(&args, keys[i][0], "%s", keys[i][1]);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, QUEUE_LIMIT_S), 2);
        runs_assert_error(&child, keys[i][2]);
        golden_args_free(&args);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),     cmocka_unit_test(test_bad_jobs),
        cmocka_unit_test(test_names),    cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),  cmocka_unit_test(test_continued),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_directories),
        cmocka_unit_test(test_moves),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
