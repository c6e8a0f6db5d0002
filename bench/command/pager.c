/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench pager: the cost of offloading in a training step. Trainings of a model made for it
 * take turns: everything in device memory; offloaded, prefetched; offloaded, loaded when it is
 * needed (the engine's synchronous mode). The tiers are paced: after each page the copy stream
 * sleeps, so that a visit's copies take a chosen part of the visit's compute, measured in the same
 * run. So the figures describe the engine, not this host's disk. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "bench/command/arguments.h"
#include "bench/command/bench.h"
#include "bench/command/model.h"
#include "offload/pager.h"
#include "train/train.h"

typedef enum question { OVERLAP, STALL, RATIO, RUNS, EVALUATION, STATE } question;

typedef struct pager_options {
    question question;
    bl_tier tier; /* BL_TIER_HOST, BL_TIER_DISK */
    int64_t layers, hidden, tokens, micro_batches, steps, rounds, ranks, threads, ring_depth, runs;
    double part;
    bl_optimizer_state_dtype state_dtype;
    char *device, *dir;
} pager_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench pager", .type = BL_OPTION_##kind,                               \
    .offset = offsetof(pager_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(question, ENUM), .names = "overlap|stall|ratio|runs|evaluation|state",
     .default_text = "overlap",
     .help = "overlap: step times against those without offloading; stall: seconds that "
             "micro-batches wait when 1 to 8 of them share a "
             "visit; ratio: tokens per second for offload_ratio 0 to 1; runs: a round of --runs "
             "runs over one base against a step of one run; evaluation: its time apart, and in the "
             "visits of a step (eval_overlap); state: step times of training every weight with "
             "AdamW's state, and also the weights, on a disk"},
    {OPTION(tier, ENUM), .names = "device|host|disk", .default_text = "host",
     .help = "tier of offloaded pages: host or disk"},
    {OPTION(part, REAL), .default_text = "0.8", .min = 0, .max = 100,
     .help = "copy time of a visit of one micro-batch, as a fraction of its compute time; state: "
             "time of a step's transfers, as a fraction of the step in memory"},
    {OPTION(state_dtype, ENUM), .names = "fp32|bf16", .default_text = "fp32",
     .help = "question state: optimizer_state_dtype"},
    {OPTION(ranks, INT), .default_text = "1", .min = 1, .max = 16,
     .help = "ranks, which share each base"},
    {OPTION(threads, INT), .default_text = "2", .min = 1, .max = 256,
     .help = "CPU threads per rank"},
    {OPTION(ring_depth, INT), .default_text = "2", .min = 1, .max = 64,
     .help = "layers of the base held at once"},
    {OPTION(layers, INT), .default_text = "16", .min = 2, .max = 1024,
     .help = "layers of the model"},
    {OPTION(hidden, INT), .default_text = "256", .min = 64, .max = 16384,
     .help = "hidden size of the model, a multiple of 64"},
    {OPTION(tokens, INT), .default_text = "256", .min = 2, .max = 65536,
     .help = "tokens per micro-batch"},
    {OPTION(micro_batches, INT), .default_text = "1", .min = 1, .max = 64,
     .help = "micro-batches per step (stall: 8)"},
    {OPTION(runs, INT), .default_text = "4", .min = 2, .max = 16,
     .help = "question runs: how many share a base, with --micro_batches each"},
    {OPTION(steps, INT), .default_text = "8", .min = 3, .max = 10000,
     .help = "steps per run; the first two do not count"},
    {OPTION(rounds, INT), .default_text = "3", .min = 1, .max = 100,
     .help = "rounds, in which the contenders take turns"},
    {OPTION(device, STRING), .default_text = "auto", .help = "auto, cpu or cuda"},
    {OPTION(dir, PATH), .default_text = "/tmp",
     .help = "directory for a scratch directory, removed at the end"},
};

enum { N_WARM = 2, MAX_RANKS = 16, MAX_RUNS = 16, PATH_BYTES = 512, MAX_VALUES = 4096 };

/* ---- pacing ---- */

/* Forward visits come in rising order of layers, backward ones in falling order: each copy stream
 * tells them apart for itself. */
typedef struct copy_thread {
    pthread_t thread;
    int64_t last_layer;
    bool is_backward;
} copy_thread;

typedef struct pacer {
    pthread_mutex_t lock; /* guards threads */
    copy_thread threads[MAX_RANKS];
    int n_threads;
    int64_t layer_bytes; /* of a rank */
    int64_t pages_a_layer;
    double forward_s, backward_s; /* that the copies of a visit shall take */
} pacer;

static bool is_backward(pacer *p, int64_t layer)
{
    int i = 0;

    pthread_mutex_lock(&p->lock);
    while (i < p->n_threads && !pthread_equal(p->threads[i].thread, pthread_self())) i++;
    if (i == p->n_threads)
        p->threads[p->n_threads++] = (copy_thread){.thread = pthread_self(), .last_layer = -1};
    copy_thread *t = &p->threads[i];
    if (layer != t->last_layer) t->is_backward = layer < t->last_layer;
    t->last_layer = layer;
    bool backward = t->is_backward;
    pthread_mutex_unlock(&p->lock);
    return backward;
}

static void sleep_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)(fmod(seconds, 1.0) * 1e9)};

    while (nanosleep(&left, &left) != 0) {
    }
}

static void pace(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    pacer *p = user;
    double visit_s = is_backward(p, page / p->pages_a_layer) ? p->backward_s : p->forward_s;

    (void)tier;
    sleep_for(visit_s * (double)n_bytes / (double)p->layer_bytes);
}

/* A disk of a chosen rate, for transfers in both directions. While the host is busy, it works on
 * the requests that it has. */
typedef struct paced_disk {
    pthread_mutex_t lock; /* guards free_s */
    double bytes_per_s;
    double free_s; /* when its last request ends */
} paced_disk;

enum { QUEUED_BYTES = 16 << 20 }; /* of the optimizer's readers: 16 requests of 1 MiB */

static int64_t pace_disk(void *user, const bl_io_completion *completion)
{
    paced_disk *d = user;
    double now_s = bl_now_s();

    pthread_mutex_lock(&d->lock);
    d->free_s = fmax(d->free_s, now_s - QUEUED_BYTES / d->bytes_per_s) +
                (double)completion->n_bytes / d->bytes_per_s;
    double sleep_s = d->free_s - now_s;
    pthread_mutex_unlock(&d->lock);
    if (sleep_s > 0) sleep_for(sleep_s);
    return completion->result;
}

/* ---- one training ---- */

typedef struct contender {
    double ratio;
    bool is_synchronous;
    int64_t visit_micro; /* micro-batches that share a visit */
    bool evaluates;      /* after each step, the rows of the training, one per micro-batch */
    bool in_visits;      /* of the next step */
    bool is_full;        /* trains every weight; ratio: of the weights on a paced disk */
    double state_ratio;  /* of the optimizer's state there */
} contender;

typedef struct outcome {
    double step_s, tokens_per_s, stall_s; /* medians of steps; stall: of compute, for pages */
    double forward_s, backward_s; /* medians of visits of one micro-batch; with a trace only */
    double eval_s; /* median of evaluations between steps; in visits: what comes on top of those */
} outcome;

typedef struct pager_bench {
    const pager_options *options;
    char scratch[PATH_BYTES];
    int64_t layer_weights;
    pacer pacer;
    paced_disk disk;
} pager_bench;

static double median(double *values, int64_t n)
{
    return n > 0 ? bl_bench_summarize(values, n).median_s : 0;
}

static void configure_full(const pager_bench *b, const contender *c, bl_bench_arguments *a)
{
    bl_bench_add(a, "finetuning_type", "full");
    bl_bench_add(a, "learning_rate", "1e-5");
    bl_bench_add(a, "optimizer_state_dtype", "%s",
                 b->options->state_dtype == BL_OPTIMIZER_STATE_BF16 ? "bf16" : "fp32");
    bl_bench_add(a, "optimizer_tier", "disk");
    bl_bench_add(a, "optimizer_ratio", "%g", c->state_ratio);
}

static bl_status configure(const pager_bench *b, const contender *c, bool traces, int run,
                           bl_train_config **out)
{
    const pager_options *o = b->options;
    bl_bench_arguments *a = calloc(1, sizeof *a);

    if (!a) return BL_FAIL(BL_ENOMEM, "the configuration of a training");
    bl_bench_add(a, "model_name_or_path", "%s/model", b->scratch);
    bl_bench_add(a, "train_file", "%s/train.jsonl", b->scratch);
    bl_bench_add(a, "output_dir", "%s/run%d", b->scratch, run);
    bl_bench_add(a, "seed", "%d", run + 1);
    bl_bench_add(a, "overwrite_output_dir", "true");
    bl_bench_add(a, "data_format", "tokens");
    bl_bench_add(a, "max_seq_length", "%lld", (long long)o->tokens);
    bl_bench_add(a, "per_device_train_batch_size", "1");
    bl_bench_add(a, "gradient_accumulation_steps", "%lld", (long long)o->micro_batches);
    bl_bench_add(a, "visit_tokens", "%lld", (long long)(c->visit_micro * o->tokens));
    bl_bench_add(a, "max_steps", "%lld", (long long)o->steps);
    bl_bench_add(a, "save_steps", "0");
    bl_bench_add(a, "logging_steps", "1000000");
    bl_bench_add(a, "ranks", "%lld", (long long)o->ranks);
    bl_bench_add(a, "device", "%s", o->device);
    bl_bench_add(a, "threads", "%lld", (long long)o->threads);
    bl_bench_add(a, "ring_depth", "%lld", (long long)o->ring_depth);
    bl_bench_add(a, "activation_checkpointing", "full");
    bl_bench_add(a, "offload_ratio", "%g", c->ratio);
    bl_bench_add(a, "offload_tier", "%s", bl_tier_name(o->tier));
    if (o->tier == BL_TIER_DISK) bl_bench_add(a, "offload_dir", "%s", b->scratch);
    if (c->evaluates) {
        bl_bench_add(a, "validation_file", "%s/train.jsonl", b->scratch);
        bl_bench_add(a, "per_device_eval_batch_size", "1");
        bl_bench_add(a, "eval_strategy", "steps");
        bl_bench_add(a, "eval_steps", "1");
        bl_bench_add(a, "eval_overlap", c->in_visits ? "true" : "false");
    }
    if (traces) bl_bench_add(a, "trace", "%s/trace.json", b->scratch);
    if (c->is_full) configure_full(b, c, a);
    bl_status st = bl_bench_load(a, out);
    free(a);
    return st;
}

/* The steps that count, from metrics.jsonl. */
static bl_status read_metrics(const pager_bench *b, outcome *out)
{
    char path[2 * PATH_BYTES], line[2048];
    double step_s[MAX_VALUES], tokens_per_s[MAX_VALUES], stall_s[MAX_VALUES], eval_s[MAX_VALUES];
    int64_t n = 0, n_lines = 0, n_evaluations = 0;

    snprintf(path, sizeof path, "%s/run0/metrics.jsonl", b->scratch);
    FILE *file = fopen(path, "re");
    if (!file) return bl_fail_errno(BL_EIO, "open %s", path);
    while (fgets(line, sizeof line, file) && n < MAX_VALUES) {
        json_t *row = json_loads(line, 0, NULL);
        if (json_object_get(row, "step_s") && n_lines++ >= N_WARM) {
            step_s[n] = json_number_value(json_object_get(row, "step_s"));
            tokens_per_s[n] = json_number_value(json_object_get(row, "tokens_per_s"));
            stall_s[n++] = json_number_value(json_object_get(row, "copy_stall_s")) +
                           json_number_value(json_object_get(row, "disk_stall_s"));
        }
        if (json_object_get(row, "eval_s") && n > 0 && n < b->options->steps - N_WARM)
            eval_s[n_evaluations++] = json_number_value(json_object_get(row, "eval_s"));
        json_decref(row);
    }
    fclose(file);
    *out = (outcome){.step_s = median(step_s, n),
                     .tokens_per_s = median(tokens_per_s, n),
                     .stall_s = median(stall_s, n),
                     .eval_s = median(eval_s, n_evaluations)};
    return n > 0 ? BL_OK : BL_FAIL(BL_EINTERNAL, "%s holds no step", path);
}

/* How long rank 0's visits took, from the trace. */
static bl_status read_trace(const pager_bench *b, int64_t visit_micro, outcome *out)
{
    static double durations[2][MAX_VALUES];
    char path[PATH_BYTES + 16];
    int64_t n[2] = {0, 0};
    json_error_t error;
    const json_t *event;
    size_t i;

    snprintf(path, sizeof path, "%s/trace.json", b->scratch);
    json_t *trace = json_load_file(path, 0, &error);
    if (!trace) return BL_FAIL(BL_EINTERNAL, "%s: %s", path, error.text);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        const char *name = json_string_value(json_object_get(event, "name"));
        int k = name && strcmp(name, "forward") == 0    ? 0
                : name && strcmp(name, "backward") == 0 ? 1
                                                        : -1;
        if (k < 0 || n[k] == MAX_VALUES || json_integer_value(json_object_get(event, "pid")) != 0)
            continue;
        durations[k][n[k]++] = 1e-6 * json_number_value(json_object_get(event, "dur"));
    }
    json_decref(trace);
    out->forward_s = median(durations[0], n[0]) / (double)visit_micro;
    out->backward_s = median(durations[1], n[1]) / (double)visit_micro;
    return n[0] > 0 && n[1] > 0 ? BL_OK : BL_FAIL(BL_EINTERNAL, "%s holds no visits", path);
}

/* n_runs over one base; the outcome is the first one's, whose steps are the rounds of all. */
static bl_status train_runs(pager_bench *b, const contender *c, bool traces, int n_runs,
                            outcome *out)
{
    bl_pager_hooks hooks = {
        .pace = pace, .pace_user = &b->pacer, .is_synchronous = c->is_synchronous};
    if (c->is_full) hooks = (bl_pager_hooks){.io = pace_disk, .io_user = &b->disk};
    bl_train_config *configs[MAX_RUNS] = {NULL};
    bl_status st = BL_OK;

    b->pacer.n_threads = 0; /* the last training's are gone */
    for (int i = 0; i < n_runs && st == BL_OK; i++) st = configure(b, c, traces, i, &configs[i]);
    if (st == BL_OK)
        st = bl_train_run_all((const bl_train_config *const *)configs, n_runs, NULL, &hooks);
    for (int i = 0; i < n_runs; i++) bl_train_config_free(configs[i]);
    if (st == BL_OK) st = read_metrics(b, out);
    return st == BL_OK && traces ? read_trace(b, c->visit_micro, out) : st;
}

static bl_status train(pager_bench *b, const contender *c, bool traces, outcome *out)
{
    return train_runs(b, c, traces, 1, out);
}

/* ---- the questions ---- */

/* A training without offloading; its visits set the pace of those that follow. */
static bl_status calibrate(pager_bench *b, outcome *plain)
{
    BL_TRY(train(b, &(contender){.ratio = 0, .visit_micro = 1}, true, plain));
    b->pacer.forward_s = b->options->part * plain->forward_s;
    b->pacer.backward_s = b->options->part * plain->backward_s;
    return BL_OK;
}

static bl_status ask_overlap(pager_bench *b)
{
    const pager_options *o = b->options;
    double ahead[100], late[100];

    for (int64_t round = 0; round < o->rounds; round++) {
        outcome plain, overlapped, synchronous;
        BL_TRY(calibrate(b, &plain));
        BL_TRY(train(b, &(contender){.ratio = 1, .visit_micro = 1}, false, &overlapped));
        BL_TRY(train(b, &(contender){.ratio = 1, .visit_micro = 1, .is_synchronous = true}, false,
                     &synchronous));
        ahead[round] = overlapped.step_s / plain.step_s;
        late[round] = synchronous.step_s / plain.step_s;
        printf("{\"bench\":\"pager\",\"question\":\"overlap\",\"tier\":\"%s\",\"ranks\":%lld,"
               "\"threads\":%lld,\"part\":%g,\"round\":%lld,"
               "\"step_s\":%.6f,\"overlapped\":%.4f,\"synchronous\":%.4f,\"stall_s\":%.6f}\n",
               bl_tier_name(o->tier), (long long)o->ranks, (long long)o->threads, o->part,
               (long long)round + 1, plain.step_s, ahead[round], late[round], overlapped.stall_s);
        fflush(stdout);
    }
    bl_bench_times a = bl_bench_summarize(ahead, o->rounds),
                   s = bl_bench_summarize(late, o->rounds);
    printf("{\"bench\":\"pager\",\"question\":\"overlap\",\"tier\":\"%s\",\"ranks\":%lld,"
           "\"threads\":%lld,\"part\":%g,"
           "\"overlapped_median\":%.4f,\"synchronous_median\":%.4f}\n",
           bl_tier_name(o->tier), (long long)o->ranks, (long long)o->threads, o->part, a.median_s,
           s.median_s);
    return BL_OK;
}

/* In parts of C, the compute of one micro-batch's visit: D = part x C, so a micro-batch should wait
 * max(0, D / m - C) in each visit whose layer is brought: all but two of a pass, since the last
 * layer stays for its backward pass and the first for the next pass. */
static bl_status ask_stall(pager_bench *b)
{
    const pager_options *o = b->options;
    double brought = 1.0 - 1.0 / (double)o->layers;

    for (int64_t m = 1; m <= o->micro_batches; m++) {
        outcome plain, offloaded;
        if (o->micro_batches % m != 0) continue;
        BL_TRY(calibrate(b, &plain));
        BL_TRY(train(b, &(contender){.ratio = 1, .visit_micro = m}, false, &offloaded));
        double compute_s =
            (double)(o->layers * o->micro_batches) * (plain.forward_s + plain.backward_s);
        printf("{\"bench\":\"pager\",\"question\":\"stall\",\"tier\":\"%s\",\"part\":%g,\"m\":%lld,"
               "\"predicted\":%.4f,\"measured\":%.4f,"
               "\"step\":%.4f}\n",
               bl_tier_name(o->tier), o->part, (long long)m,
               brought * fmax(0, o->part / (double)m - 1), offloaded.stall_s / compute_s,
               offloaded.step_s / plain.step_s);
        fflush(stdout);
    }
    return BL_OK;
}

static bl_status ask_ratio(pager_bench *b)
{
    enum { N_RATIOS = 9 };
    const pager_options *o = b->options;
    outcome plain, way[2];

    for (int i = 0; i < N_RATIOS; i++) {
        double ratio = (double)i / (N_RATIOS - 1);
        BL_TRY(calibrate(b, &plain));
        for (int k = 0; k < 2; k++)
            BL_TRY(train(b,
                         &(contender){.ratio = ratio, .visit_micro = 1, .is_synchronous = k == 1},
                         false, &way[k]));
        printf("{\"bench\":\"pager\",\"question\":\"ratio\",\"tier\":\"%s\",\"part\":%g,\"ratio\":%"
               ".3f,\"tokens_per_s\":%.1f,"
               "\"overlapped\":%.4f,\"synchronous\":%.4f}\n",
               bl_tier_name(o->tier), o->part, ratio, plain.tokens_per_s,
               way[0].tokens_per_s / plain.tokens_per_s, way[1].tokens_per_s / plain.tokens_per_s);
        fflush(stdout);
    }
    return BL_OK;
}

/* A round of several runs, whose micro-batches share visits, against a step of one run: with the
 * base offloaded, and resident, where sharing can only cost. There also whole trainings by
 * processor time, which other jobs of the machine change less. */
static bl_status ask_runs(pager_bench *b)
{
    const pager_options *o = b->options;
    int64_t together = o->runs * o->micro_batches;
    double offloaded[100], resident[100], processor[100];

    for (int64_t round = 0; round < o->rounds; round++) {
        outcome plain, one, all, resident_one, resident_all;
        contender alone = {.ratio = 1, .visit_micro = o->micro_batches},
                  shared = {.ratio = 1, .visit_micro = together};
        double at_s[3];
        BL_TRY(calibrate(b, &plain));
        BL_TRY(train(b, &alone, false, &one));
        BL_TRY(train_runs(b, &shared, false, (int)o->runs, &all));
        alone.ratio = shared.ratio = 0;
        at_s[0] = bl_processor_s();
        BL_TRY(train(b, &alone, false, &resident_one));
        at_s[1] = bl_processor_s();
        BL_TRY(train_runs(b, &shared, false, (int)o->runs, &resident_all));
        at_s[2] = bl_processor_s();
        offloaded[round] = all.step_s / one.step_s;
        resident[round] = resident_all.step_s / resident_one.step_s / (double)o->runs;
        processor[round] = (at_s[2] - at_s[1]) / (at_s[1] - at_s[0]) / (double)o->runs;
        printf("{\"bench\":\"pager\",\"question\":\"runs\",\"tier\":\"%s\",\"part\":%g,"
               "\"runs\":%lld,\"round\":%lld,\"step_s\":%.6f,\"offloaded_step_s\":%.6f,"
               "\"offloaded\":%.4f,\"resident_in_turn\":%.4f,\"resident_processor\":%.4f}\n",
               bl_tier_name(o->tier), o->part, (long long)o->runs, (long long)round + 1,
               resident_one.step_s, one.step_s, offloaded[round], resident[round],
               processor[round]);
        fflush(stdout);
    }
    printf("{\"bench\":\"pager\",\"question\":\"runs\",\"tier\":\"%s\",\"part\":%g,\"runs\":%lld,"
           "\"offloaded_median\":%.4f,\"resident_in_turn_median\":%.4f,"
           "\"resident_processor_median\":%.4f}\n",
           bl_tier_name(o->tier), o->part, (long long)o->runs,
           bl_bench_summarize(offloaded, o->rounds).median_s,
           bl_bench_summarize(resident, o->rounds).median_s,
           bl_bench_summarize(processor, o->rounds).median_s);
    return BL_OK;
}

/* The time that an evaluation adds to a step: with the base resident, which is its compute; with
 * the base offloaded, apart and in the visits of a step. */
static bl_status ask_evaluation(pager_bench *b)
{
    const pager_options *o = b->options;
    double apart_s[100], in_visits_s[100];

    for (int64_t round = 0; round < o->rounds; round++) {
        contender c = {.ratio = 0, .visit_micro = o->micro_batches, .evaluates = true};
        outcome resident, without, apart, in_visits;
        BL_TRY(calibrate(b, &without));
        BL_TRY(train(b, &c, false, &resident));
        c.ratio = 1;
        BL_TRY(train(b, &c, false, &apart));
        c.in_visits = true;
        BL_TRY(train(b, &c, false, &in_visits));
        c.evaluates = false;
        BL_TRY(train(b, &c, false, &without));
        apart_s[round] = apart.eval_s / resident.eval_s;
        in_visits_s[round] =
            (in_visits.step_s - without.step_s + in_visits.eval_s) / resident.eval_s;
        printf("{\"bench\":\"pager\",\"question\":\"evaluation\",\"tier\":\"%s\",\"part\":%g,"
               "\"round\":%lld,\"micro_batches\":%lld,\"step_s\":%.6f,\"compute_s\":%.6f,"
               "\"apart\":%.4f,\"in_visits\":%.4f}\n",
               bl_tier_name(o->tier), o->part, (long long)round + 1,
               (long long)(o->steps * o->micro_batches), without.step_s, resident.eval_s,
               apart_s[round], in_visits_s[round]);
        fflush(stdout);
    }
    printf("{\"bench\":\"pager\",\"question\":\"evaluation\",\"tier\":\"%s\",\"part\":%g,"
           "\"apart_median\":%.4f,\"in_visits_median\":%.4f}\n",
           bl_tier_name(o->tier), o->part, bl_bench_summarize(apart_s, o->rounds).median_s,
           bl_bench_summarize(in_visits_s, o->rounds).median_s);
    return BL_OK;
}

/* Bytes of a step's transfers with state, or also weights, on disk: gradients are written and read,
 * moments read and written; weights, too, and read again for both passes. */
static double step_bytes(const pager_bench *b, bool with_weights)
{
    const pager_options *o = b->options;
    double moment = o->state_dtype == BL_OPTIMIZER_STATE_BF16 ? 2 : 4;
    return (8 + 4 * moment + (with_weights ? 16 : 0)) * (double)(o->layers * b->layer_weights);
}

/* The disk's rate: the state's transfers take `part` of the step in memory. */
static bl_status ask_state(pager_bench *b)
{
    const pager_options *o = b->options;
    double state[100], all[100];

    for (int64_t round = 0; round < o->rounds; round++) {
        outcome plain, on_disk, all_on_disk;
        contender c = {.is_full = true, .visit_micro = o->micro_batches};
        BL_TRY(train(b, &c, false, &plain));
        b->disk.bytes_per_s = step_bytes(b, false) / (o->part * plain.step_s);
        c.state_ratio = 1;
        BL_TRY(train(b, &c, false, &on_disk));
        c.ratio = 1;
        BL_TRY(train(b, &c, false, &all_on_disk));
        state[round] = on_disk.step_s / plain.step_s;
        all[round] = all_on_disk.step_s / plain.step_s;
        printf("{\"bench\":\"pager\",\"question\":\"state\",\"state_dtype\":\"%s\",\"part\":%g,"
               "\"tokens\":%lld,\"round\":%lld,\"step_s\":%.6f,\"disk_gb_per_s\":%.4g,"
               "\"state\":%.4f,\"all\":%.4f,\"part_of_all\":%.3f}\n",
               o->state_dtype == BL_OPTIMIZER_STATE_BF16 ? "bf16" : "fp32", o->part,
               (long long)o->tokens, (long long)round + 1, plain.step_s, b->disk.bytes_per_s * 1e-9,
               state[round], all[round], o->part * step_bytes(b, true) / step_bytes(b, false));
        fflush(stdout);
    }
    printf("{\"bench\":\"pager\",\"question\":\"state\",\"part\":%g,\"tokens\":%lld,"
           "\"state_median\":%.4f,\"all_median\":%.4f}\n",
           o->part, (long long)o->tokens, bl_bench_summarize(state, o->rounds).median_s,
           bl_bench_summarize(all, o->rounds).median_s);
    return BL_OK;
}

static bl_status run(const void *values)
{
    static bl_status (*const ask[])(pager_bench *) = {ask_overlap, ask_stall,      ask_ratio,
                                                      ask_runs,    ask_evaluation, ask_state};
    pager_options options = *(const pager_options *)values;
    const pager_options *o = &options;

    if (options.question == STALL) options.micro_batches = 8;
    if (options.question == STATE) options.tier = BL_TIER_DISK;
    if (options.question == STATE && o->part == 0)
        return BL_FAIL(BL_EUSAGE, "--part 0: question state needs a positive fraction");
    if (o->tier == BL_TIER_DEVICE) return BL_FAIL(BL_EUSAGE, "--tier: host or disk");
    if (o->hidden % 64 != 0)
        return BL_FAIL(BL_EUSAGE, "--hidden %lld: must be a multiple of 64", (long long)o->hidden);
    bl_bench_model model = {.layers = o->layers,
                            .hidden = o->hidden,
                            .inter = 11 * o->hidden / 4,
                            .vocab = 256,
                            .rows = o->steps * o->micro_batches * o->ranks,
                            .row_tokens = o->tokens};
    pager_bench b = {.options = o,
                     .layer_weights = bl_bench_model_layer_weights(&model),
                     .pacer = {.pages_a_layer = 4,
                               .layer_bytes = bl_bench_model_layer_weights(&model) / o->ranks}};
    snprintf(b.scratch, sizeof b.scratch, "%s/ballast-bench-XXXXXX", o->dir);
    if (!mkdtemp(b.scratch)) return bl_fail_errno(BL_EIO, "make a folder in %s", o->dir);
    bl_log_set_silent(true); /* the trainings' own reports */
    pthread_mutex_init(&b.pacer.lock, NULL);
    pthread_mutex_init(&b.disk.lock, NULL);
    bl_status st = bl_bench_model_write(&model, b.scratch);
    if (st == BL_OK) st = ask[o->question](&b);
    bl_error error;
    bl_error_save(&error, st);
    pthread_mutex_destroy(&b.disk.lock);
    pthread_mutex_destroy(&b.pacer.lock);
    (void)bl_tree_remove(b.scratch);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

const bl_bench bl_bench_pager = {
    .name = "pager",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(pager_options),
    .details = "Trains a random model in three ways that take turns: all in device memory; "
               "offloaded and prefetched;\n"
               "offloaded and loaded on demand. Tiers are paced to the compute measured in the "
               "same run. JSON lines;\n"
               "overlapped and synchronous are step times (question ratio: tokens per second) "
               "relative to the first way's.\n"
               "Question runs: offloaded is the time of a round of all runs relative to a step of "
               "one; resident_in_turn the\n"
               "same without offloading, relative to the runs one after the other; "
               "resident_processor that of whole\n"
               "trainings in processor time.\n"
               "Question evaluation: time that an evaluation adds to a step, relative to that "
               "without offloading.\n"
               "Question state: state and all are step times with AdamW's state, and also the "
               "weights, on the paced disk,\n"
               "relative to the step in memory.\n",
    .run = run,
};
