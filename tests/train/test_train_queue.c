/* SPDX-License-Identifier: Apache-2.0 */
/* A queue: jobs that are moved into a directory join the base that is loaded, each with the bits
 * that it has alone, on threads and processes; they join at different steps, wait for memory, fail
 * or are rejected without the others; a killed or stopped queue goes on. */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "runs.h"
#include "train/train.h"

enum { N_JOBS = 4 };
static const double LIMIT_S = 120;

#define PAIRS "tests/golden/preference/tokens/pairs.jsonl"

/* Keys of the jobs besides the standard ones; the last one has evaluations in visits. */
static const char *const differences[N_JOBS][8][2] = {
    {{"max_steps", "60"}, {"lora_r", "8"}, {"save_steps", "10"}, {"eval_steps", "20"}},
    {{"max_steps", "25"},
     {"lora_r", "4"},
     {"gradient_accumulation_steps", "3"},
     {"per_device_train_batch_size", "2"},
     {"lora_target_modules", "[q_proj, down_proj]"},
     {"learning_rate", "0.01"}},
    {{"loss_type", "[sigmoid, sft]"},
     {"loss_weights", "[1, 0.3]"},
     {"data_format", "preference"},
     {"train_file", PAIRS},
     {"validation_file", PAIRS},
     {"max_steps", "30"},
     {"eval_steps", "10"}},
    {{"max_steps", "20"}, {"seed", "7"}, {"eval_steps", "5"}, {"eval_overlap", "true"}},
};

/* Keys of the base: what runs have in common, and no others. */
static bool is_of_base(const char *key)
{
    static const char *const keys[] = {"model_name_or_path", "device", "ranks", "threads",
                                       "max_seq_length"};
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (strcmp(key, keys[i]) == 0) return true;
    return false;
}

typedef enum which { BASE, JOB, ALL } which;

/* The arguments of that kind as a file, which appears whole. */
static void write_keys(const golden_args *args, const char *path, which keys)
{
    char temporary[GOLDEN_PATH_BYTES + 8];
    snprintf(temporary, sizeof temporary, "%s.part", path);
    FILE *file = fopen(temporary, "w");
    assert_non_null(file);
    for (int i = 0; i < args->n; i += 2)
        if (keys == ALL || is_of_base(args->text[i] + 2) == (keys == BASE))
            fprintf(file, "%s: %s\n", args->text[i] + 2, args->text[i + 1]);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(temporary, path), 0);
}

static void job_keys(golden_args *args, const char *name, const char *place, int job, int ranks)
{
    runs_standard(args, runs_path("%s-%s-%d", name, place, job), ranks);
    for (size_t i = 0; i < BL_COUNT(differences[job]); i++)
        if (differences[job][i][0])
            runs_set(args, differences[job][i][0], "%s", differences[job][i][1]);
}

static void expect_code(runs_child *child, int code)
{
    int ended = runs_wait(child, LIMIT_S);
    if (ended != code) {
        char *log = runs_read(child->log, NULL);
        printf("%s", log);
        free(log);
    }
    assert_int_equal(ended, code);
}

static void train_alone(const char *name, int job, int ranks, const char *processes)
{
    golden_args keys = {0}, args = {0};
    runs_child child = {0};
    const char *file = runs_path("%s-alone-%d.yaml", name, job);

    job_keys(&keys, name, "alone", job, ranks);
    write_keys(&keys, file, ALL);
    args.text[args.n++] = strdup(file);
    runs_set(&args, "rank_processes", "%s", processes);
    runs_start(&child, "train", &args);
    expect_code(&child, 0);
    golden_args_free(&keys);
    golden_args_free(&args);
}

/* ---- a queue ---- */

typedef struct queue {
    const char *name;
    int ranks;
    const char *processes; /* rank_processes */
    char dir[GOLDEN_PATH_BYTES];
    runs_child child;
} queue;

static const char *in_queue(const queue *q, const char *format, const char *name)
{
    char below[256];
    snprintf(below, sizeof below, format, name);
    return runs_path("%s-queue/%s", q->name, below);
}

static bool is_there(const queue *q, const char *format, const char *name)
{
    return access(in_queue(q, format, name), F_OK) == 0;
}

static void start(queue *q)
{
    golden_args keys = {0}, args = {0};
    const char *base = runs_path("%s-base.yaml", q->name);

    snprintf(q->dir, sizeof q->dir, "%s", runs_path("%s-queue", q->name));
    runs_standard(&keys, runs_path("unused"), q->ranks);
    write_keys(&keys, base, BASE);
    args.text[args.n++] = strdup(base);
    runs_set(&args, "queue", "%s", q->dir);
    runs_set(&args, "rank_processes", "%s", q->processes);
    runs_start(&q->child, "train", &args);
    golden_args_free(&keys);
    golden_args_free(&args);
}

static void await(queue *q, const char *path)
{
    for (int i = 0; access(path, F_OK) != 0; i++) {
        if (!runs_is_alive(&q->child) || i > 60000) {
            char *log = runs_read(q->child.log, NULL);
            printf("%s\n%s", path, log);
            free(log);
        }
        assert_true(runs_is_alive(&q->child));
        assert_true(i <= 60000);
        runs_sleep_s(0.001);
    }
}

static void await_step(queue *q, const char *output, int64_t step)
{
    for (int i = 0; runs_logged_steps(output) < step; i++) {
        assert_true(runs_is_alive(&q->child));
        assert_true(i <= 60000);
        runs_sleep_s(0.001);
    }
}

static void put(queue *q, int job)
{
    golden_args args = {0};
    job_keys(&args, q->name, "queued", job, q->ranks);
    write_keys(&args, in_queue(q, "job%s.yaml", (char[]){(char)('0' + job), '\0'}), JOB);
    golden_args_free(&args);
}

static void await_end(queue *q, const char *end, int job)
{
    char name[64];
    snprintf(name, sizeof name, "%s/job%d", end, job);
    await(q, in_queue(q, "%s.yaml", name));
}

static void stop(queue *q)
{
    runs_write(in_queue(q, "%s", "stop"), "");
    expect_code(&q->child, 0);
    assert_false(is_there(q, "%s", "stop"));
}

static void assert_same(const queue *q, int job)
{
    assert_true(runs_are_same(runs_path("%s-alone-%d", q->name, job),
                              runs_path("%s-queued-%d", q->name, job)));
}

/* ---- the tests ---- */

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
        for (int job = 0; job < N_JOBS; job++) train_alone(q.name, job, q.ranks, q.processes);
        start(&q);
        await(&q, in_queue(&q, "%s", "running"));
        put(&q, 0);
        await_step(&q, runs_path("%s-queued-0", q.name), 3);
        put(&q, 1);
        await_step(&q, runs_path("%s-queued-1", q.name), 2);
        put(&q, 2);
        put(&q, 3);
        for (int job = 0; job < N_JOBS; job++) await_end(&q, "done", job);
        stop(&q);
        for (int job = 0; job < N_JOBS; job++) assert_same(&q, job);
    }
}

static void put_text(queue *q, const char *name, const char *text)
{
    const char *path = in_queue(q, "%s", name), *part = in_queue(q, ".%s", name);
    runs_write(part, text);
    assert_int_equal(rename(part, path), 0);
}

static void assert_line(const queue *q, const char *path, const char *text)
{
    char *line = runs_read(in_queue(q, "%s", path), NULL);
    if (!strstr(line, text)) printf("%s: %s", path, line);
    assert_non_null(strstr(line, text));
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
    free(line);
}

/* AdamW with epsilon 0 divides the first gradient of A, which is 0, by 0: step 2 is not finite. */
static void put_failing(queue *q)
{
    golden_args args = {0};
    runs_standard(&args, runs_path("%s-failing", q->name), q->ranks);
    runs_set(&args, "adam_epsilon", "0");
    write_keys(&args, in_queue(q, "%s", "failing.yaml"), JOB);
    golden_args_free(&args);
}

/* Jobs that cannot be read, have another value of a common key, share an output_dir, train modules
 * of the base, or have a loss that is not finite end alone. */
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
        train_alone(q.name, 0, q.ranks, q.processes);
        start(&q);
        await(&q, in_queue(&q, "%s", "running"));
        put(&q, 0);
        await_step(&q, runs_path("%s-queued-0", q.name), 1);
        put_text(&q, "a.yaml", "learning_rate: much\n");
        put_text(&q, "b.yaml", "output_dir: /tmp/none\ntrain_file: x.jsonl\nmax_seq_length: 32\n");
        snprintf(text, sizeof text, "output_dir: %s\ntrain_file: missing.jsonl\n",
                 runs_path("%s-missing", q.name));
        put_text(&q, "c.yml", text);
        snprintf(text, sizeof text, "output_dir: %s\ntrain_file: %s\n",
                 runs_path("%s-queued-0", q.name), PAIRS);
        put_text(&q, "d.yaml", text);
        put_text(&q, "e.txt", "passed over");
        snprintf(text, sizeof text,
                 "output_dir: %s\ntrain_file: %s\nloss_type: simpo\nmodules_to_save: [norm]\n",
                 runs_path("%s-whole", q.name), PAIRS);
        put_text(&q, "f.yaml", text);
        put_text(&q, longest, "learning_rate: much\n");
        put_failing(&q);
        await(&q, in_queue(&q, "%s", "failed/failing.yaml"));
        await_end(&q, "done", 0);
        await(&q, in_queue(&q, "%s", "rejected/d.yaml"));
        await(&q, in_queue(&q, "%s", "rejected/f.yaml"));
        await(&q, in_queue(&q, "rejected/%s", longest));
        stop(&q);
        assert_same(&q, 0);
        assert_line(&q, "rejected/a.yaml.error", "a.yaml:1: learning_rate");
        assert_line(&q, "rejected/b.yaml.error", "max_seq_length: 32, but the base of this queue");
        assert_line(&q, "rejected/c.yml.error", "missing.jsonl");
        assert_line(&q, "rejected/d.yaml.error", "output_dir");
        assert_line(&q, "rejected/f.yaml.error", "modules_to_save replaces modules of the base");
        assert_line(&q, "failed/failing.yaml.error", "step 2: loss ");
        assert_true(is_there(&q, "%s", "e.txt"));
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
    for (int job = 0; job < 3; job++) train_alone(q.name, job, q.ranks, q.processes);
    start(&q);
    await(&q, in_queue(&q, "%s", "running"));
    put(&q, 0);
    await_step(&q, runs_path("%s-queued-0", q.name), 1);
    job_keys(&args, q.name, "queued", 1, q.ranks);
    write_keys(&args, in_queue(&q, "%s", "job0.yaml"), JOB);
    golden_args_free(&args);
    put(&q, 2);
    await_step(&q, runs_path("%s-queued-2", q.name), 1);
    assert_int_equal(unlink(in_queue(&q, "%s", "running/job2.yaml")), 0);
    await_end(&q, "done", 0);
    assert_int_equal(unlink(in_queue(&q, "%s", "done/job0.yaml")), 0);
    await_end(&q, "done", 0);
    await(&q, runs_path("%s-queued-2/README.md", q.name));
    stop(&q);
    assert_false(is_there(&q, "%s", "done/job2.yaml"));
    for (int job = 0; job < 3; job++) assert_same(&q, job);
}

/* Ended by a signal while two jobs train and one waits to be seen; the same command goes on. */
static void end_in_the_middle(const queue *made, int signal_number, int code)
{
    queue q = *made;

    for (int job = 0; job < 3; job++) train_alone(q.name, job, q.ranks, q.processes);
    start(&q);
    await(&q, in_queue(&q, "%s", "running"));
    put(&q, 0);
    put(&q, 2);
    await_step(&q, runs_path("%s-queued-2", q.name), 4);
    assert_true(runs_stop(&q.child));
    put(&q, 1);
    kill(q.child.pid, signal_number);
    kill(q.child.pid, SIGCONT);
    int ended = runs_wait(&q.child, LIMIT_S);
    assert_int_equal(ended, code);
    assert_true(is_there(&q, "%s", "running/job0.yaml"));
    start(&q);
    for (int job = 0; job < 3; job++) await_end(&q, "done", job);
    stop(&q);
    for (int job = 0; job < 3; job++) assert_same(&q, job);
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

/* ---- memory: in this process, which says how much there is ---- */

static _Atomic int64_t planted_bytes;

int64_t __real_bl_memory_available_bytes(void);
int64_t __wrap_bl_memory_available_bytes(void);

int64_t __wrap_bl_memory_available_bytes(void)
{
    int64_t planted = atomic_load(&planted_bytes);
    return planted ? planted : __real_bl_memory_available_bytes();
}

static void *serve(void *user)
{
    return (void *)(intptr_t)bl_train_run_queue(user, NULL, NULL);
}

/* A queue in this process with this much memory, to its end; its log, the caller's. put_jobs gives
 * it work. */
static char *serve_here(queue *q, int64_t available_bytes, void (*put_jobs)(queue *q))
{
    golden_args keys = {0}, args = {0};
    bl_train_config *config;
    const char *base = runs_path("%s-base.yaml", q->name), *path = runs_path("%s-log", q->name);
    char log[GOLDEN_PATH_BYTES]; /* the path outlives many others */
    pthread_t thread;
    void *status;

    snprintf(q->dir, sizeof q->dir, "%s", runs_path("%s-queue", q->name));
    runs_standard(&keys, runs_path("unused"), q->ranks);
    write_keys(&keys, base, BASE);
    args.text[args.n++] = strdup(base);
    runs_set(&args, "queue", "%s", q->dir);
    runs_set(&args, "per_device_train_batch_size", "1"); /* of a base that jobs are larger than */
    runs_set(&args, "per_device_eval_batch_size", "1");
    runs_set(&args, "lora_r", "1");
    runs_set(&args, "activation_checkpointing", "full"); /* auto would save less where both join */
    snprintf(log, sizeof log, "%s", path);
    fflush(stderr);
    int saved = dup(STDERR_FILENO), file = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(saved >= 0 && file >= 0 && dup2(file, STDERR_FILENO) >= 0);
    atomic_store(&planted_bytes, available_bytes);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, args.n, args.text, &config),
                     BL_OK);
    assert_int_equal(pthread_create(&thread, NULL, serve, config), 0);
    while (!is_there(q, "%s", "rejected")) runs_sleep_s(0.001);
    put_jobs(q);
    runs_write(in_queue(q, "%s", "stop"), "");
    assert_int_equal(pthread_join(thread, &status), 0);
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(file);
    atomic_store(&planted_bytes, 0);
    char *text = runs_read(log, NULL);
    if ((intptr_t)status != BL_OK) printf("%s", text);
    assert_int_equal((intptr_t)status, BL_OK);
    bl_train_config_free(config);
    golden_args_free(&keys);
    golden_args_free(&args);
    return text;
}

/* The second job comes while the first one trains. */
static void put_both(queue *q)
{
    put(q, 0);
    while (runs_logged_steps(runs_path("%s-queued-0", q->name)) < 2) runs_sleep_s(0.001);
    put(q, 1);
    while (!is_there(q, "%s", "done/job1.yaml")) runs_sleep_s(0.001);
}

/* The second job is withdrawn while it waits for memory. */
static void put_and_withdraw(queue *q)
{
    bool waits = false;

    put(q, 0);
    while (runs_logged_steps(runs_path("%s-queued-0", q->name)) < 2) runs_sleep_s(0.001);
    put(q, 1);
    while (!waits) {
        char *log = runs_read(runs_path("%s-log", q->name), NULL);
        waits = strstr(log, " waits until ") != NULL;
        free(log);
        runs_sleep_s(0.001);
    }
    assert_int_equal(unlink(in_queue(q, "%s", "job1.yaml")), 0);
    while (!is_there(q, "%s", "done/job0.yaml")) runs_sleep_s(0.001);
}

/* Larger than the base foresees. */
static void put_large(queue *q)
{
    golden_args args = {0};
    job_keys(&args, q->name, "queued", 0, q->ranks);
    runs_set(&args, "per_device_train_batch_size", "512");
    write_keys(&args, in_queue(q, "%s", "job0.yaml"), JOB);
    golden_args_free(&args);
    while (!is_there(q, "%s", "rejected/job0.yaml")) runs_sleep_s(0.001);
}

static double predicted_gb(const char *log, int plan)
{
    static const char label[] = "memory predicted: ";
    const char *whole = log;
    for (int i = 0; log && i <= plan; i++) {
        log = strstr(log, label);
        if (log) log += strlen(label);
    }
    if (!log) printf("%s", whole);
    assert_non_null(log);
    return strtod(log, NULL);
}

/* The base, the base with a job, with both. */
enum { OF_BASE, OF_ONE, OF_BOTH };

/* With memory for one job the other waits, which is logged once; a job that is too large alone is
 * rejected. */
static void test_memory(void **state)
{
    queue ample = {.name = "ample", .ranks = 1}, little = {.name = "little", .ranks = 1},
          withdrawn = {.name = "withdrawn", .ranks = 1}, none = {.name = "none", .ranks = 1};

    (void)state;
    char *log = serve_here(&ample, (int64_t)1 << 40, put_both);
    double base = predicted_gb(log, OF_BASE), one = predicted_gb(log, OF_ONE),
           both = predicted_gb(log, OF_BOTH);
    assert_null(strstr(log, " waits until "));
    free(log);
    assert_true(base < both && one < both);

    int64_t for_one = (int64_t)((fmax(base, one) + both) / 2 * 1e9);
    log = serve_here(&little, for_one, put_both);
    const char *said = strstr(log, "job job1.yaml waits until a run has ended: ");
    assert_non_null(said);
    assert_null(strstr(strchr(said, '\n'), " waits until "));
    free(log);
    for (int job = 0; job < 2; job++)
        assert_true(
            runs_are_same(runs_path("ample-queued-%d", job), runs_path("little-queued-%d", job)));

    log = serve_here(&withdrawn, for_one, put_and_withdraw);
    assert_non_null(strstr(log, "job job1.yaml was withdrawn"));
    free(log);
    assert_int_equal(access(runs_path("withdrawn-queued-1/metrics.jsonl"), F_OK), -1);

    log = serve_here(&none, (int64_t)(both * 1e9), put_large);
    free(log);
    assert_line(&none, "rejected/job0.yaml.error", "this run needs about ");
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
    start(&q);
    await(&q, in_queue(&q, "%s", "running"));
    second = q;
    start(&second);
    assert_int_equal(runs_wait(&second.child, LIMIT_S), 2);
    runs_assert_error(&second.child, "is in use by pid ");
    stop(&q);
    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        golden_args args = {0};
        runs_child child = {0};
        runs_set(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
        runs_set(&args, "queue", "%s", q.dir);
        runs_set(&args, keys[i][0], "%s", keys[i][1]);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, LIMIT_S), 2);
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
        cmocka_unit_test(test_stopped),  cmocka_unit_test(test_memory),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
