/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings on several emulated GPUs, a process each, with NCCL (emulator's) between them, write
 * the bytes of the same number of rank-threads that share one GPU; in any form, and resumed in any
 * other. */
#include "cuda_runs.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/sizes.h"
#include "device/timeline.h"
#include "emulator/emulated.h"
#include "mpi_job.h"
#include "skip.h"

enum { LIMIT_S = 600 };

/* Threads of one process; processes that mpirun starts; children of the process that a user
 * starts. */
typedef enum form { THREADS, TASKS, CHILDREN } form;

static const char *const form_names[] = {
    [THREADS] = "threads", [TASKS] = "tasks", [CHILDREN] = "children"};

/* ---- one run ---- */

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Threads see one GPU, processes as many as they are. */
static void start(runs_child *child, form f, int n_ranks, const golden_args *args)
{
    set_number("BALLAST_EMULATED_DEVICES", f == THREADS ? 1 : n_ranks);
    if (f == TASKS)
        mpi_start_ballast(child, n_ranks, NULL, "train", args);
    else
        runs_start(child, "train", args);
}

static bool has_same_adapter(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *left = runs_read(runs_path("%s/adapter_model.safetensors", a), &n_a),
         *right = runs_read(runs_path("%s/adapter_model.safetensors", b), &n_b);
    bool is_same = n_a == n_b && memcmp(left, right, n_a) == 0;

    free(left);
    free(right);
    return is_same;
}

static void make_args(golden_args *args, const char *output, int n_ranks, const char *keys)
{
    *args = (golden_args){0};
    cuda_runs_standard(args, output, n_ranks);
    cuda_runs_set_all(args, keys);
}

/* What hangs on a new machine shows in its first step; later ones have the whole deadline. */
static void check_deadlines(const char *log)
{
    const char *first = strstr(log, "to the end of the first step a rank waits for at most 120 s");
    if (!first || !strstr(first, "a rank waits for at most 1800 s for another from now on"))
        fail_msg("deadlines\n%s", log);
}

/* All but counters and sums: less than 16 KiB per rank of the process. */
static void check_memory(const char *log, int n_ranks)
{
    const char *line = strstr(log, "GPU memory measured: ");
    double measured, predicted;

    assert_non_null(line);
    assert_int_equal(
        sscanf(line, "GPU memory measured: peak %lf GB, predicted %lf GB", &measured, &predicted),
        2);
    double more_kib = (measured - predicted) * (1e9 / 1024.0);
    if (more_kib < -1.0 || more_kib > 16.0 * n_ranks) fail_msg("GPU memory\n%s", log);
}

static void train(form f, int n_ranks, const char *output, const char *keys)
{
    golden_args args;
    runs_child child = {0};

    make_args(&args, output, n_ranks, keys);
    start(&child, f, n_ranks, &args);
    int code = runs_wait(&child, LIMIT_S);
    char *log = runs_read(child.log, NULL);
    if (code != 0) fail_msg("%s: exit code %d\n%s", output, code, log);
    /* The run used the GPUs. */
    bool has_nccl = strstr(log, "NCCL") != NULL;
    if (has_nccl != (f != THREADS && n_ranks > 1)) fail_msg("%s: NCCL or not\n%s", output, log);
    if (has_nccl && !strstr(log, "GPU memory that CUDA and NCCL took in the warm-up: 0.000 GB"))
        fail_msg("%s: memory of the warm-up\n%s", output, log);
    if (strstr(log, "is new after the warm-up")) fail_msg("%s: not warm\n%s", output, log);
    if (has_nccl) check_deadlines(log);
    check_memory(log, f == THREADS ? n_ranks : 1);
    free(log);
    golden_args_free(&args);
}

/* ---- the same bits ---- */

#define DEMO "model_name_or_path demo/base max_steps 1 "
#define DISK "offload_tier disk offload_dir %s/pages-"

/* Each has a run of threads, with `plain`, that the processes must equal, with `plain` and
 * `more`. */
static const struct {
    int n_ranks;
    const char *plain, *more;
    bool in_strict, by_mpirun;
} cases[] = {
    {2, "activation_checkpointing none", "", true, true},
    {4, "activation_checkpointing full", "shard_size 1", false, false},
    {4, "activation_checkpointing full", "shard_size 2", false, false},
    {4, "activation_checkpointing full", "offload_ratio 0.5 activation_offload true", false, false},
    /* Four rows to evaluate: four ranks have none. */
    {8,
     "validation_file " GOLDEN_DIR "/tokens/tiny-validation.jsonl eval_strategy steps eval_steps 1",
     "shard_size 4 offload_ratio 1", false, true},
    {2, "activation_checkpointing none", "offload_ratio 1 visit_tokens 1 " DISK "gpus", false,
     false},
    {2, DEMO "compute_dtype fp8 base_format fp8_row", "offload_ratio 0.5", false, false},
    {2, DEMO "compute_dtype fp8 base_format fp8_block", "visit_tokens 1", false, false},
    {2, "packing pack per_device_train_batch_size 2", "activation_offload true", true, false},
    {4,
     "validation_file " GOLDEN_DIR "/tokens/tiny-validation.jsonl eval_strategy steps eval_steps 1",
     "shard_size 2", false, false},
};

static void test_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char keys[1024];
        if (cuda_runs_are_slow() && !cases[i].in_strict) continue;
        snprintf(keys, sizeof keys, "%s %s", cases[i].plain, cases[i].more);
        train(THREADS, cases[i].n_ranks, runs_path("threads"), cases[i].plain);
        for (form f = TASKS; f <= CHILDREN; f++) {
            if (f == TASKS && !cases[i].by_mpirun) continue;
            train(f, cases[i].n_ranks, runs_path("processes"), keys);
            if (!runs_are_same(runs_path("threads"), runs_path("processes")))
                fail_msg("%d %s are not as threads: %s", cases[i].n_ranks, form_names[f], keys);
        }
    }
}

/* ---- before the first step ---- */

typedef struct count {
    char what[64];
    unsigned long long n;
} count;

enum { MAX_COUNTS = 64 };

static int read_counts(const char *path, count *counts)
{
    char *text = runs_read(path, NULL), *rest = text;
    int n = 0;

    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), n++) {
        assert_true(n < MAX_COUNTS);
        assert_int_equal(sscanf(line, "%63s %llu", counts[n].what, &counts[n].n), 2);
    }
    free(text);
    return n;
}

static unsigned long long count_of(const count *counts, int n, const char *what)
{
    for (int i = 0; i < n; i++)
        if (strcmp(counts[i].what, what) == 0) return counts[i].n;
    return 0;
}

static bool is_run(const char *what)
{
    return strncmp(what, "kernel:", 7) == 0 || strncmp(what, "product:", 8) == 0;
}

/* A process must run more than its share of the threads' operations: the rest ran before the first
 * step. */
static void check_counts(const char *path, const count *all, int n_all, int n_ranks)
{
    count own[MAX_COUNTS];
    int n_own = read_counts(path, own);

    assert_int_equal(count_of(own, n_own, "loading:eager"), 1);
    assert_int_equal(count_of(own, n_own, "channels:8"), 1); /* NCCL's */
    for (int i = 0; i < n_all; i++) {
        unsigned long long n = count_of(own, n_own, all[i].what);
        if (is_run(all[i].what) && n * (unsigned)n_ranks <= all[i].n)
            fail_msg("%s: %s ran %llu times, in %d threads %llu times: it was not warm", path,
                     all[i].what, n, n_ranks, all[i].n);
    }
}

/* Every kernel and kind of product runs before the first step. */
static void warms_up(const char *name, const char *keys)
{
    enum { N_RANKS = 2 };
    const char *folder = runs_path("counts-%s", name);
    count all[MAX_COUNTS];
    char **names;
    size_t n_names;

    assert_int_equal(bl_dir_create(folder), BL_OK);
    setenv("BALLAST_EMULATED_COUNTS", runs_path("counts"), 1);
    train(THREADS, N_RANKS, runs_path("threads"), keys);
    setenv("BALLAST_EMULATED_COUNTS", runs_path("counts-%s/%%p", name), 1);
    train(CHILDREN, N_RANKS, runs_path("children"), keys);
    unsetenv("BALLAST_EMULATED_COUNTS");
    int n_all = read_counts(runs_path("counts"), all);
    assert_true(count_of(all, n_all, "kernel:adamw_kernel") > 0);
    assert_int_equal(count_of(all, n_all, "loading:eager"), 0); /* threads load as they like */
    assert_int_equal(bl_dir_list(folder, &names, &n_names), BL_OK);
    assert_int_equal(n_names, N_RANKS); /* their parent has no part in CUDA */
    for (size_t i = 0; i < n_names; i++)
        check_counts(runs_path("counts-%s/%s", name, names[i]), all, n_all, N_RANKS);
    bl_names_free(names, n_names);
}

static void test_all_is_warm_before_the_first_step(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    warms_up("bf16", "activation_checkpointing full validation_file " GOLDEN_DIR
                     "/tokens/tiny-validation.jsonl eval_strategy steps eval_steps 1");
    warms_up("fp8", DEMO "compute_dtype fp8 base_format fp8_row lora_dropout 0.1");
    /* Up to 256 tokens in training, less than 128 in evaluation. */
    warms_up("short", DEMO "max_seq_length 160 train_file demo/train.jsonl "
                           "data_format prompt_completion "
                           "validation_split_percentage 1 eval_strategy steps eval_steps 1 "
                           "per_device_train_batch_size 2 per_device_eval_batch_size 1");
}

/* Where NCCL gathers by kernels, products leave them their multiprocessors; copy engines take
 * none. `counted`: what all products are; NULL: for the whole GPU. */
static void check_products_on(const char *driver, const char *max_ctas, const char *counted)
{
    const char *folder = runs_path("room-%s-%s", driver, max_ctas);
    count all[MAX_COUNTS];
    char **names;
    size_t n_names;

    assert_int_equal(bl_dir_create(folder), BL_OK);
    setenv("BALLAST_EMULATED_COUNTS", runs_path("room-%s-%s/%%p", driver, max_ctas), 1);
    setenv("BALLAST_EMULATED_DRIVER", driver, 1);
    setenv("NCCL_MAX_CTAS", max_ctas, 1);
    train(CHILDREN, 2, runs_path("children"), "max_steps 1");
    unsetenv("BALLAST_EMULATED_COUNTS");
    unsetenv("BALLAST_EMULATED_DRIVER");
    unsetenv("NCCL_MAX_CTAS");
    assert_int_equal(bl_dir_list(folder, &names, &n_names), BL_OK);
    assert_int_equal(n_names, 2);
    for (size_t i = 0; i < n_names; i++) {
        int n = read_counts(runs_path("room-%s-%s/%s", driver, max_ctas, names[i]), all);
        unsigned long long n_products = count_of(all, n, "product:bf16"), n_on = 0;
        for (int k = 0; k < n; k++)
            if (strncmp(all[k].what, "product_on:", strlen("product_on:")) == 0) n_on += all[k].n;
        assert_true(n_products > 0);
        assert_int_equal(n_on, counted ? n_products : 0);
        if (counted) assert_int_equal(count_of(all, n, counted), n_products);
    }
    bl_names_free(names, n_names);
}

/* LoRA's exchange, and nothing else between GPUs, takes multiprocessors: a GPU that gives all of
 * them to one kernel trains as any other. Where NCCL's kernels gather, too, one of each kind waits
 * for the other: the emulated GPU starts them in another order on either rank. */
static void test_no_two_kernels_wait_for_ranks(void **state)
{
    golden_args args;
    runs_child child = {0};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("strict: one operation at a time anyway");
    train(THREADS, 2, runs_path("threads"), "max_steps 1");
    setenv("BALLAST_EMULATED_WHOLE_GPU", "crossed", 1);
    train(CHILDREN, 2, runs_path("children"), "max_steps 1");
    setenv("BALLAST_EMULATED_DRIVER", "13010", 1);
    make_args(&args, runs_path("hanging"), 2, "max_steps 1 step_deadline_s 5");
    start(&child, CHILDREN, 2, &args);
    int code = runs_wait(&child, LIMIT_S);
    unsetenv("BALLAST_EMULATED_DRIVER");
    unsetenv("BALLAST_EMULATED_WHOLE_GPU");
    golden_args_free(&args);
    assert_true(has_same_adapter("threads", "children"));
    assert_int_equal(code, 7);
}

static void test_products_leave_room_for_nccl(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    check_products_on("13000", "", NULL);
    check_products_on("13010", "", "product_on:124");
    check_products_on("13010", "4", "product_on:128");
}

/* ---- one run in several forms ---- */

/* From each of the forms to each other that follows it here. */
static void test_resumes_in_any_form(void **state)
{
    static const form forms[] = {CHILDREN, TASKS, THREADS, CHILDREN};
    char keys[512], from[32] = "whole", to[32];

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    train(THREADS, 2, runs_path("whole"), "max_steps 5 save_steps 1");
    for (int i = 0; i < (int)BL_COUNT(forms); i++) {
        snprintf(to, sizeof to, "resumed-%d", i);
        snprintf(keys, sizeof keys,
                 "max_steps 5 save_steps 1 overwrite_output_dir false resume_from_checkpoint "
                 "%%s/%s/checkpoints/step-%d",
                 from, i + 1);
        train(forms[i], 2, runs_path("%s", to), keys);
        if (!has_same_adapter("whole", to)) fail_msg("%s as %s", keys, form_names[forms[i]]);
        memcpy(from, to, sizeof from);
    }
}

/* The parent passes a request to stop on to its ranks; threads resume their checkpoint. */
static void test_stops_on_request(void **state)
{
    static const char KEYS[] = "max_steps 24 save_steps 100";
    enum { MAX_TRIES = 5 };
    golden_args args;
    runs_child child = {0};
    int code = 0;

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    train(THREADS, 2, runs_path("unstopped"), KEYS);
    make_args(&args, runs_path("stopped"), 2, KEYS);
    for (int i = 0; i < MAX_TRIES && code == 0; i++) { /* 0: the signal came after the last step */
        assert_int_equal(bl_tree_remove(runs_path("stopped")), BL_OK);
        start(&child, CHILDREN, 2, &args);
        while (runs_is_alive(&child) && runs_logged_steps(runs_path("stopped")) < 2)
            runs_sleep_s(0.01);
        if (runs_is_alive(&child)) kill(child.pid, SIGTERM);
        code = runs_wait(&child, LIMIT_S);
    }
    assert_int_equal(code, 75);
    runs_assert_stopped(&child, "stopped on request after step ");
    golden_args_free(&args);
    train(THREADS, 2, runs_path("stopped"),
          "max_steps 24 save_steps 100 overwrite_output_dir false "
          "resume_from_checkpoint true");
    assert_true(runs_are_same(runs_path("unstopped"), runs_path("stopped")));
}

/* CUDA's own threads are made where a context first is: by the plan, long before the ranks. A
 * signal that one of them took would leave at once. */
static void one_thread_takes_signals(form f, int n_ranks)
{
    golden_args args;
    runs_child child = {0};
    const char *output = runs_path("masks-%s", form_names[f]);

    make_args(&args, output, n_ranks, "max_steps 100000");
    start(&child, f, n_ranks, &args);
    while (runs_is_alive(&child) && runs_logged_steps(output) < 1) runs_sleep_s(0.01);
    for (int i = 0; i < n_ranks; i++)
        mpi_assert_one_thread_takes_signals(f == THREADS ? child.pid : mpi_process_of(&child, i));
    kill(child.pid, SIGTERM);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    runs_assert_stopped(&child, "stopped on request after step ");
    golden_args_free(&args);
}

static void test_one_thread_takes_signals(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    one_thread_takes_signals(THREADS, 1);
    one_thread_takes_signals(CHILDREN, 2);
}

/* ---- launches ---- */

typedef struct launch {
    char comm[32], kind[32]; /* without what tells groups of the same split apart */
    long long bytes;
    int stream;
} launch;

enum { MAX_LAUNCHES = 8192 };

/* "launch ballast#2.414a9a9e all_gather 8192 root=0 stream=1 copy_engine", "launch ballast.1f pairs
 * send:1:3584 ... stream=0". */
static int read_launches(const char *path, launch *launches)
{
    char *text = runs_read(path, NULL), *rest = text;
    int n = 0;

    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        launch *l = &launches[n];
        const char *stream = strstr(line, "stream=");
        if (strncmp(line, "launch ", 7) != 0) continue;
        assert_true(++n < MAX_LAUNCHES && stream);
        assert_int_equal(sscanf(line, "launch %31[^.].%*s %31s", l->comm, l->kind), 2);
        l->bytes = -1;
        (void)sscanf(line, "launch %*s all_gather %lld", &l->bytes);
        l->stream = atoi(stream + 7);
    }
    free(text);
    return n;
}

static bool is_same_launch(const launch *a, const launch *b)
{
    return strcmp(a->comm, b->comm) == 0 && strcmp(a->kind, b->kind) == 0 && a->bytes == b->bytes &&
           a->stream == b->stream;
}

/* LoRA's and the base's collectives are launched in one order on all ranks, and each kind has a
 * separate stream: a wait on the base's stream does not delay LoRA's. */
static void test_one_order_of_launches(void **state)
{
    enum { N_RANKS = 4 };
    static launch own[MAX_LAUNCHES], first[MAX_LAUNCHES];
    bool has[2] = {false, false};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    setenv("BALLAST_EMULATED_NCCL_LOG", runs_path("launches"), 1);
    train(CHILDREN, N_RANKS, runs_path("ordered"),
          "shard_size 2 offload_ratio 0.5 save_steps 1 visit_tokens 1 activation_offload true");
    unsetenv("BALLAST_EMULATED_NCCL_LOG");
    int n = read_launches(runs_path("launches.0"), first);
    assert_true(n > 0);
    for (int rank = 1; rank < N_RANKS; rank++) {
        assert_int_equal(read_launches(runs_path("launches.%d", rank), own), n);
        for (int i = 0; i < n; i++)
            if (!is_same_launch(&own[i], &first[i]))
                fail_msg("launch %d: %s %s on rank 0, %s %s on rank %d", i, first[i].comm,
                         first[i].kind, own[i].comm, own[i].kind, rank);
    }
    for (int i = 0; i < n; i++) {
        bool is_base = strchr(first[i].comm, '#') != NULL;
        has[is_base] = true;
        for (int j = 0; j < i; j++)
            assert_int_equal(first[i].stream == first[j].stream,
                             is_base == (strchr(first[j].comm, '#') != NULL));
    }
    assert_true(has[false] && has[true]);
}

/* Another program's process on one GPU makes all ranks plan with less, which one line reports. The
 * first rank logs: the second has less. */
static void test_a_gpu_with_less_memory_is_told(void **state)
{
    golden_args args;
    runs_child child = {0};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    runs_write(runs_path("less-memory"),
               "#!/bin/sh\n"
               "[ \"$OMPI_COMM_WORLD_RANK\" != 1 ] || export BALLAST_EMULATED_MEMORY_MIB=3600\n"
               "exec \"" BALLAST_PROGRAM "\" \"$@\"\n");
    assert_int_equal(chmod(runs_path("less-memory"), 0700), 0);
    make_args(&args, runs_path("less"), 2, "max_steps 1");
    set_number("BALLAST_EMULATED_DEVICES", 2);
    mpi_start_ballast(&child, 2, runs_path("less-memory"), "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    char *log = runs_read(child.log, NULL);
    const char *line = strstr(log, "warning: rank 1 on host ");
    if (!line || !strstr(line, "GB free for the run, others up to ")) fail_msg("%s", log);
    assert_null(strstr(line + 1, "plan with the least\n")); /* one host */
    free(log);
    golden_args_free(&args);
}

/* ---- overlap ---- */

typedef struct span {
    char name[24];
    int lane, layer;
} span;

enum { MAX_SPANS = 16384 };

/* In the order in which the rank queued them. */
static int read_spans(const char *path, span *spans)
{
    json_t *trace = json_load_file(path, 0, NULL), *event;
    size_t i;
    int n = 0;

    assert_non_null(trace);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        const json_t *layer = json_object_get(json_object_get(event, "args"), "layer");
        const char *name = json_string_value(json_object_get(event, "name"));
        if (!layer || !name) continue;
        assert_true(n < MAX_SPANS);
        snprintf(spans[n].name, sizeof spans[n].name, "%s", name);
        spans[n].lane = (int)json_integer_value(json_object_get(event, "tid"));
        spans[n++].layer = (int)json_integer_value(layer);
    }
    json_decref(trace);
    return n;
}

/* The last gather of `layer` in the lane before span number `at`; -1: none. */
static int last_gather(const span *spans, int at, bl_lane lane, int layer)
{
    while (--at >= 0)
        if (spans[at].lane == (int)lane && spans[at].layer == layer &&
            strcmp(spans[at].name, "gather") == 0)
            return at;
    return -1;
}

static int last_visit(const span *spans, int at)
{
    while (--at >= 0)
        if (spans[at].lane == (int)BL_LANE_COMPUTE &&
            (strcmp(spans[at].name, "forward") == 0 || strcmp(spans[at].name, "backward") == 0))
            return at;
    return -1;
}

/* Before a layer computes, the base and the LoRA weights of the one after it are being gathered:
 * asked for since the visit before, or in the ring since then. */
static void check_overlap(const span *spans, int n, int n_layers)
{
    static const bl_lane lanes[] = {BL_LANE_GATHER, BL_LANE_LORA};
    int n_checked = 0;

    for (int i = 0; i < n; i++) {
        if (strcmp(spans[i].name, "forward") != 0) continue;
        int next = spans[i].layer + 1, before = last_visit(spans, i);
        if (next >= n_layers || before < 0) continue;
        for (size_t k = 0; k < BL_COUNT(lanes); k++) {
            int gather = last_gather(spans, i, lanes[k], next),
                older = last_gather(spans, i, lanes[k], spans[i].layer);
            if (gather < 0 || older < 0 || gather < older)
                fail_msg("lane %d: layer %d computes before layer %d is gathered", (int)lanes[k],
                         spans[i].layer, next);
        }
        n_checked++;
    }
    assert_true(n_checked >= n_layers);
}

static void test_gathers_run_ahead(void **state)
{
    enum { N_LAYERS = 4, N_RANKS = 2 };
    static span spans[MAX_SPANS];

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    train(CHILDREN, N_RANKS, runs_path("traced"),
          DEMO "offload_ratio 1 activation_checkpointing full trace %s/trace.json");
    for (int rank = 0; rank < N_RANKS; rank++)
        check_overlap(spans, read_spans(runs_path("trace.json.rank%d", rank), spans), N_LAYERS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_all_is_warm_before_the_first_step),
        cmocka_unit_test(test_products_leave_room_for_nccl),
        cmocka_unit_test(test_no_two_kernels_wait_for_ranks),
        cmocka_unit_test(test_resumes_in_any_form),
        cmocka_unit_test(test_stops_on_request),
        cmocka_unit_test(test_one_thread_takes_signals),
        cmocka_unit_test(test_one_order_of_launches),
        cmocka_unit_test(test_a_gpu_with_less_memory_is_told),
        cmocka_unit_test(test_gathers_run_ahead),
    };
    if (!mpi_is_here() || !emulated_cuda_have_devices(4)) return CUDA_SKIPPED;
    return cmocka_run_group_tests_name("train_gpus", tests, runs_set_up, runs_tear_down);
}
