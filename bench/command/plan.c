/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench plan: predicted and measured step times. Trainings of a model made for it, on the
 * CPU, in several ways; before and after each of them the rates that plan/time.h needs are measured
 * in this process, at its shapes. Tiers are paced (offload/pager.h): each page takes as long as on
 * a slower link. */
#include <math.h>
#include <stdatomic.h>
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
#include "bench/command/file.h"
#include "bench/command/model.h"
#include "bench/command/plan_rates.h"
#include "offload/pager.h"
#include "train/train.h"

typedef struct plan_options {
    int64_t layers, hidden, tokens, steps, rounds, lora_r;
    char *dir, *only;
} plan_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench plan", .type = BL_OPTION_##kind,                                \
    .offset = offsetof(plan_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(layers, INT), .default_text = "8", .min = 2, .max = 1024,
     .help = "layers of the model"},
    {OPTION(hidden, INT), .default_text = "512", .min = 64, .max = 16384,
     .help = "hidden size of the model, a multiple of 64"},
    {OPTION(tokens, INT), .default_text = "256", .min = 2, .max = 65536,
     .help = "tokens per micro-batch"},
    {OPTION(lora_r, INT), .default_text = "16", .min = 1, .max = 1024, .help = "LoRA rank"},
    {OPTION(steps, INT), .default_text = "5", .min = 3, .max = 10000,
     .help = "steps per run; the first two do not count"},
    {OPTION(rounds, INT), .default_text = "3", .min = 1, .max = 100,
     .help = "rounds, in which each way is measured and predicted"},
    {OPTION(only, STRING), .help = "one way alone, by its name"},
    {OPTION(dir, PATH), .default_text = "/tmp",
     .help = "directory for a scratch directory, removed at the end"},
};

enum { N_WARM = 2, PATH_BYTES = 512, RATE_RUNS = 5 };

/* One way of training. part: the time of a forward visit's pages, as a fraction of a micro-batch's
 * compute; 0: not paced.
 *
 * Paced ways wait for their pages, and are compared by the clock. The others compute, and are
 * compared by CPU seconds per thread: other jobs of the machine change the clock's time, not
 * these. */
typedef struct way {
    const char *name;
    int ranks, threads, n_micro;
    double ratio, part;
    bl_tier tier;
    const char *checkpointing;
    unsigned save;
    bool offloads_activations;
} way;

static const way ways[] = {
    {"resident", 1, 2, 1, 0, 0, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"resident, nothing recomputed", 1, 2, 1, 0, 0, BL_TIER_HOST, "none", BL_SAVE_S4, false},
    {"activations in host memory", 1, 2, 1, 0, 0, BL_TIER_HOST, "none", BL_SAVE_S4, true},
    {"host", 1, 2, 1, 1, 0, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"two ranks, sharded", 2, 1, 1, 0, 0, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"host, paced", 1, 2, 1, 1, 4, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"host, half, paced", 1, 2, 1, 0.5, 6, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"host, four share a visit, paced", 1, 2, 4, 1, 12, BL_TIER_HOST, "full", BL_SAVE_S0, false},
    {"disk, paced", 1, 2, 1, 1, 4, BL_TIER_DISK, "full", BL_SAVE_S0, false},
    {"two ranks, host, paced", 2, 1, 1, 1, 4, BL_TIER_HOST, "full", BL_SAVE_S0, false},
};

static bool is_by_clock(const way *w)
{
    return w->part > 0;
}

typedef struct plan_bench {
    const plan_options *options;
    char scratch[PATH_BYTES];
    bl_model_config model;
    double pace_s_per_byte;
    _Atomic int64_t paced_ns, paced_bytes; /* of a training, all ranks */
} plan_bench;

/* ---- measured ---- */

/* Counts the real time: a thread that sleeps wakes late on a machine that others use. */
static void pace(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    plan_bench *b = user;
    double sleep_s = b->pace_s_per_byte * (double)n_bytes, begin_s = bl_now_s();
    struct timespec left = {(time_t)sleep_s, (long)(fmod(sleep_s, 1.0) * 1e9)};

    (void)tier, (void)page;
    while (nanosleep(&left, &left) != 0) {
    }
    atomic_fetch_add(&b->paced_ns, (int64_t)(1e9 * (bl_now_s() - begin_s)));
    atomic_fetch_add(&b->paced_bytes, (int64_t)n_bytes);
}

static bl_status configure(const plan_bench *b, const way *w, int64_t steps, bl_train_config **out)
{
    const plan_options *o = b->options;
    bl_bench_arguments *a = calloc(1, sizeof *a);

    if (!a) return BL_FAIL(BL_ENOMEM, "the configuration of a training");
    bl_bench_add(a, "model_name_or_path", "%s/model", b->scratch);
    bl_bench_add(a, "train_file", "%s/train.jsonl", b->scratch);
    bl_bench_add(a, "output_dir", "%s/run", b->scratch);
    bl_bench_add(a, "overwrite_output_dir", "true");
    bl_bench_add(a, "device", "cpu");
    bl_bench_add(a, "data_format", "tokens");
    bl_bench_add(a, "max_seq_length", "%lld", (long long)o->tokens);
    bl_bench_add(a, "per_device_train_batch_size", "1");
    bl_bench_add(a, "gradient_accumulation_steps", "%d", w->n_micro);
    bl_bench_add(a, "visit_tokens", "%lld", (long long)(w->n_micro * o->tokens));
    bl_bench_add(a, "base_format", "fp8_row");
    bl_bench_add(a, "lora_r", "%lld", (long long)o->lora_r);
    bl_bench_add(a, "max_steps", "%lld", (long long)steps);
    bl_bench_add(a, "save_steps", "0");
    bl_bench_add(a, "logging_steps", "1000000");
    bl_bench_add(a, "ranks", "%d", w->ranks);
    bl_bench_add(a, "threads", "%d", w->threads);
    bl_bench_add(a, "activation_checkpointing", "%s", w->checkpointing);
    bl_bench_add(a, "activation_offload", w->offloads_activations ? "true" : "false");
    bl_bench_add(a, "offload_ratio", "%g", w->ratio);
    bl_bench_add(a, "offload_tier", "%s", bl_tier_name(w->tier));
    if (w->tier == BL_TIER_DISK) bl_bench_add(a, "offload_dir", "%s", b->scratch);
    bl_status st = bl_bench_load(a, out);
    free(a);
    return st;
}

/* The mean step of those that count, from metrics.jsonl: rates are means, too. */
static bl_status read_step(const plan_bench *b, double *step_s)
{
    char path[2 * PATH_BYTES], line[2048];
    int64_t n = 0, n_lines = 0;
    double sum = 0;

    snprintf(path, sizeof path, "%s/run/metrics.jsonl", b->scratch);
    FILE *file = fopen(path, "re");
    if (!file) return bl_fail_errno(BL_EIO, "open %s", path);
    while (fgets(line, sizeof line, file)) {
        json_t *row = json_loads(line, 0, NULL), *value = json_object_get(row, "step_s");
        if (value && n_lines++ >= N_WARM) {
            sum += json_number_value(value);
            n++;
        }
        json_decref(row);
    }
    fclose(file);
    if (n == 0) return BL_FAIL(BL_EINTERNAL, "%s holds no step", path);
    *step_s = sum / (double)n;
    return BL_OK;
}

static bl_status train(plan_bench *b, const way *w, int64_t steps)
{
    bl_pager_hooks hooks = {.pace = pace, .pace_user = b};
    bl_train_config *config = NULL;

    BL_TRY(configure(b, w, steps, &config));
    bl_status st = bl_train_run(config, NULL, w->part > 0 ? &hooks : NULL);
    bl_train_config_free(config);
    return st;
}

/* Seconds per step, by the clock; or CPU seconds, from the difference of two trainings. */
static bl_status measure(plan_bench *b, const way *w, double *step_s)
{
    int64_t n = b->options->steps;
    double cpu_s[3] = {bl_processor_s()};

    b->paced_ns = b->paced_bytes = 0;
    BL_TRY(train(b, w, n));
    if (is_by_clock(w)) { /* the tier's rate, as measured */
        b->pace_s_per_byte = 1e-9 * (double)b->paced_ns / (double)b->paced_bytes;
        return read_step(b, step_s);
    }
    cpu_s[1] = bl_processor_s();
    BL_TRY(train(b, w, 4 * n));
    cpu_s[2] = bl_processor_s();
    double more_s = (cpu_s[2] - cpu_s[1]) - (cpu_s[1] - cpu_s[0]);
    *step_s = more_s / (double)(3 * n) / (w->ranks * w->threads);
    return BL_OK;
}

/* ---- predicted ---- */

static void set_pace(plan_bench *b, const way *w, const bl_time_estimate *plain)
{
    const plan_options *o = b->options;
    double visit_s = plain->part[BL_TIME_FORWARD].compute_s / (double)(o->layers * w->n_micro);
    double weights = (double)bl_arch_layer_weights(&b->model, bl_model_kind(&b->model, 0));

    b->pace_s_per_byte = w->part * visit_s * w->ranks / weights;
}

/* Past the page cache, as pages are read. */
static bl_status measure_disk(const plan_bench *b, double *bytes_per_s)
{
    enum { FILE_BYTES = 64 << 20 };
    const bl_reader_options reader = {.engine = BL_IO_AUTO};
    const char *engine;
    double seconds = 0;
    bl_bench_file file;

    bl_status st = bl_bench_file_make(b->scratch, FILE_BYTES, &file);
    if (st == BL_OK) st = bl_bench_file_read(&file, &reader, false, &seconds, &engine);
    bl_bench_file_close(&file);
    *bytes_per_s = FILE_BYTES / seconds;
    return st;
}

/* The way's step from rates that are measured now; sets the pace, if it is not set yet. */
static bl_status predict(plan_bench *b, const way *w, bl_time_estimate *out)
{
    const plan_options *o = b->options;
    bl_lora_options options = {.r = o->lora_r, .alpha = 16};
    bl_lora_layout lora;
    bl_time_run run = {
        .n_layers = b->model.n_layers, .kind = bl_model_kind(&b->model, 0), .save = w->save};
    bl_time_input in = {.model = &b->model,
                        .lora = &lora,
                        .runs = &run,
                        .n_runs = 1,
                        .head_dtype = BL_BF16,
                        .kind = BL_DEVICE_CPU,
                        .act = BL_F32,
                        .n_ranks = w->ranks,
                        .n_hosts = 1,
                        .n_shards = w->ranks,
                        .ring_depth = 2,
                        .micro_tokens = o->tokens,
                        .document_tokens = (double)o->tokens,
                        .label_part = 1,
                        .useful_part = 1,
                        .n_micro = w->n_micro,
                        .group = w->n_micro,
                        .tier = w->tier,
                        .offload_activations = w->offloads_activations,
                        .writes_device = true};

    for (int p = 0; p < b->model.arch->n_projections; p++) {
        options.target[p] = true;
        run.format[p] = BL_FORMAT_FP8_ROW;
    }
    bl_lora_layout_init(&b->model, &options, &lora);
    BL_TRY(bl_bench_plan_rates(&b->model, o->lora_r, o->tokens, w->ranks, w->threads, RATE_RUNS,
                               !is_by_clock(w), &in.rates));
    if (w->tier == BL_TIER_DISK) BL_TRY(measure_disk(b, &in.rates.disk_bytes_per_s));
    if (!is_by_clock(w)) {
        in.rates.cores = 0; /* CPU seconds are not shared with other jobs */
        in.offload_ratio = w->ratio;
        return bl_time_predict(&in, out);
    }
    BL_TRY(bl_time_predict(&in, out));
    in.offload_ratio = w->ratio;
    if (b->pace_s_per_byte == 0) set_pace(b, w, out);
    in.rates.pace_bytes_per_s = 1 / b->pace_s_per_byte;
    return bl_time_predict(&in, out);
}

/* By the clock; or the CPU seconds of the compute threads and of copies. */
static double seconds_of(const way *w, const bl_time_estimate *e)
{
    double sum = 0;

    if (is_by_clock(w)) return e->step_s;
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        sum += e->part[p].compute_s;
        for (int lane = 0; lane < BL_N_LANES; lane++)
            if (lane != BL_LANE_COMPUTE) sum += e->part[p].busy_s[lane] / w->threads;
    }
    return sum;
}

/* ---- the table ---- */

static bl_status ask(plan_bench *b, const way *w)
{
    double ratios[100], step_s[100], predicted_s[100];
    bl_time_estimate before, after;

    for (int64_t round = 0; round < b->options->rounds; round++) {
        b->pace_s_per_byte = 0;
        BL_TRY(predict(b, w, &before));
        BL_TRY(measure(b, w, &step_s[round]));
        BL_TRY(predict(b, w, &after));
        predicted_s[round] =
            is_by_clock(w) ? after.step_s : (seconds_of(w, &before) + seconds_of(w, &after)) / 2;
        ratios[round] = predicted_s[round] / step_s[round];
    }
    bl_bench_times ratio = bl_bench_summarize(ratios, b->options->rounds),
                   step = bl_bench_summarize(step_s, b->options->rounds),
                   predicted = bl_bench_summarize(predicted_s, b->options->rounds);
    printf("{\"bench\":\"plan\",\"way\":\"%s\",\"ranks\":%d,\"threads\":%d,\"micro_batches\":%d,"
           "\"tier\":\"%s\",\"ratio\":%g,\"part\":%g,\"seconds\":\"%s\",\"step_s\":%.4f,"
           "\"predicted_s\":%.4f,"
           "\"predicted_over_measured\":%.3f,\"lowest\":%.3f,\"highest\":%.3f,\"bound\":\"%s\"}\n",
           w->name, w->ranks, w->threads, w->n_micro, bl_tier_name(w->tier), w->ratio, w->part,
           is_by_clock(w) ? "clock" : "processor", step.median_s, predicted.median_s,
           ratio.median_s, ratios[0], ratios[b->options->rounds - 1],
           bl_lane_name(before.part[BL_TIME_FORWARD].bound));
    fflush(stdout);
    return BL_OK;
}

static bl_status ask_all(plan_bench *b)
{
    const char *only = b->options->only;
    int n = 0;

    for (size_t i = 0; i < BL_COUNT(ways); i++) {
        if (only && strcmp(only, ways[i].name) != 0) continue;
        BL_TRY(ask(b, &ways[i]));
        n++;
    }
    return n > 0 ? BL_OK : BL_FAIL(BL_EUSAGE, "--only %s: there is no such way", only);
}

static bl_status run(const void *values)
{
    const plan_options *o = values;
    char path[PATH_BYTES + 16];

    if (o->hidden % 64 != 0)
        return BL_FAIL(BL_EUSAGE, "--hidden %lld: must be a multiple of 64", (long long)o->hidden);
    bl_bench_model model = {.layers = o->layers,
                            .hidden = o->hidden,
                            .inter = 11 * o->hidden / 4,
                            .vocab = 256,
                            .rows = o->steps * 32,
                            .row_tokens = o->tokens};
    plan_bench b = {.options = o};
    snprintf(b.scratch, sizeof b.scratch, "%s/ballast-bench-XXXXXX", o->dir);
    if (!mkdtemp(b.scratch)) return bl_fail_errno(BL_EIO, "make a folder in %s", o->dir);
    bl_log_set_silent(true); /* the trainings' own reports */
    snprintf(path, sizeof path, "%s/model", b.scratch);
    bl_status st = bl_bench_model_write(&model, b.scratch);
    if (st == BL_OK) st = bl_model_config_load(path, &b.model);
    if (st == BL_OK) st = ask_all(&b);
    bl_error error;
    bl_error_save(&error, st);
    (void)bl_tree_remove(b.scratch);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

const bl_bench bl_bench_plan = {
    .name = "plan",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(plan_options),
    .details = "Trains a random model on the CPU in ten ways, and predicts each step from rates "
               "measured just before and after it.\n"
               "One JSON line per way: medians of the rounds, and predicted over measured.\n",
    .run = run,
};
