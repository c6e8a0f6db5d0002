/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.c -- metrics.jsonl, cut back at a resume, scalars for TensorBoard, and the lines and
 * progress bar on the terminal. */
#include "train/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "train/report/events.h"

struct bl_metrics {
    bl_events *events; /* NULL: none */
    int fd;
    char *path;
    int64_t logging_steps;
    _Atomic int64_t bytes;     /* complete lines; changed by one thread */
    bool is_cut;               /* the file ends at `bytes` */
    double mean_step_s;        /* smoothed, for the time left */
    double begun_s;            /* when it was opened */
    int64_t n_steps, n_tokens; /* since then */
};

static bl_status copy_bytes(int from, const char *path, int64_t n_bytes, bl_writer *to)
{
    char piece[1 << 14];

    for (int64_t at = 0; at < n_bytes;) {
        size_t n = (size_t)bl_min_i64((int64_t)sizeof piece, n_bytes - at);
        BL_TRY(bl_file_read_full(from, path, piece, n, at));
        BL_TRY(bl_writer_append(to, piece, n));
        at += (int64_t)n;
    }
    return BL_OK;
}

/* A log with a second name (cp -al) is another run's as well: a copy takes the name here. */
static bl_status unshare(const char *path)
{
    struct stat info;
    bl_writer *writer;
    int fd;

    if (lstat(path, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink == 1) return BL_OK;
    BL_TRY(bl_file_open(path, &fd, NULL));
    bl_status st = bl_writer_open(path, &writer);
    if (st == BL_OK) {
        st = copy_bytes(fd, path, info.st_size, writer);
        if (st == BL_OK)
            st = bl_writer_commit(writer);
        else
            bl_writer_abort(writer);
    }
    close(fd);
    return st;
}

/* A link is never followed: it may lead out of output_dir. */
static bl_status open_log(bl_metrics *m)
{
    BL_TRY(bl_file_check_output(m->path)); /* a FIFO would block */
    BL_TRY(unshare(m->path));
    m->fd = open(m->path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (m->fd >= 0) return BL_OK;
    if (errno == ELOOP)
        return BL_FAIL(BL_EUSAGE, "%s: is a symbolic link, not a metrics log: remove it", m->path);
    return bl_fail_errno(BL_EIO, "open %s", m->path);
}

bl_status bl_metrics_open(const char *path, int64_t keep_bytes, int64_t logging_steps,
                          bl_metrics **out)
{
    *out = NULL;
    bl_metrics *m = calloc(1, sizeof *m);
    if (m) m->path = strdup(path);
    if (!m || !m->path) {
        free(m);
        return BL_FAIL(BL_ENOMEM, "the metrics log");
    }
    m->fd = -1;
    m->logging_steps = logging_steps;
    m->bytes = keep_bytes;
    m->begun_s = bl_now_s();
    bl_status st = open_log(m);
    struct stat info;
    if (st == BL_OK && fstat(m->fd, &info) != 0) st = bl_fail_errno(BL_EIO, "stat %s", path);
    if (st == BL_OK && info.st_size < keep_bytes) {
        bl_log_warning(
            "%s has %lld bytes, it had %lld when the checkpoint was made: lines are missing", path,
            (long long)info.st_size, (long long)keep_bytes);
        m->bytes = info.st_size;
    }
    if (st != BL_OK) {
        bl_metrics_close(m);
        return st;
    }
    *out = m;
    return BL_OK;
}

/* Not when it is opened: a run that is rejected after that leaves the log unchanged. */
static bl_status cut(bl_metrics *m)
{
    if (!m->is_cut && ftruncate(m->fd, m->bytes) != 0)
        return bl_fail_errno(BL_EIO, "cut %s", m->path);
    m->is_cut = true;
    return BL_OK;
}

static bl_status append(bl_metrics *m, const char *line)
{
    size_t n = strlen(line);
    BL_TRY(cut(m));
    BL_TRY(bl_file_write_full(m->fd, m->path, line, n, m->bytes));
    m->bytes += (int64_t)n;
    return BL_OK;
}

/* The lanes that move bytes for compute. */
static const bl_lane moving_lanes[] = {BL_LANE_GATHER, BL_LANE_COPY, BL_LANE_DISK,
                                       BL_LANE_ACTIVATIONS, BL_LANE_LORA};

/* The part of the step that compute waited for a lane. */
static double stalled_part(const bl_step_metrics *s, size_t moving)
{
    return s->lanes[moving_lanes[moving]].stall_s / s->step_s;
}

static const double SHOWN_STALL = 0.01;

/* "stalls: gather 3 %, disk 12 %": the lanes that compute waited for longer than a hundredth of the
 * step; "" without any. */
static void print_stalls(const bl_step_metrics *s, char *text, size_t text_bytes)
{
    size_t used = 0;
    const char *before = "stalls: ";

    text[0] = '\0';
    for (size_t i = 0; i < BL_COUNT(moving_lanes) && used < text_bytes; i++) {
        double part = stalled_part(s, i);
        if (part < SHOWN_STALL) continue;
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%s %.0f %%", before,
                                 bl_lane_name(moving_lanes[i]), 100 * part);
        before = ", ";
    }
}

/* For a short line: of several lanes, their sum. */
static void print_stall_sum(const bl_step_metrics *s, char *text, size_t text_bytes)
{
    double sum = 0;
    int n = 0;

    for (size_t i = 0; i < BL_COUNT(moving_lanes); i++) {
        if (stalled_part(s, i) < SHOWN_STALL) continue;
        sum += stalled_part(s, i);
        n++;
    }
    if (n < 2)
        print_stalls(s, text, text_bytes);
    else
        snprintf(text, text_bytes, "stalls: %.0f %%", 100 * sum);
}

enum { PART_BYTES = 96, MAX_PARTS = 9, NAME_BYTES = 48, PREFERENCE_BYTES = 320 };

static void join_parts(char part[MAX_PARTS][PART_BYTES], char *line, size_t line_bytes)
{
    size_t used = 0;

    line[0] = '\0';
    for (int i = 0; i < MAX_PARTS; i++)
        if (part[i][0] && used < line_bytes)
            used +=
                (size_t)snprintf(line + used, line_bytes - used, "%s%s", used ? "  " : "", part[i]);
}

/* Keeps parts in the order of important[], each if it fits into less than `columns` with those kept
 * before; the first always; 0 columns: all. */
static void fit_parts(char part[MAX_PARTS][PART_BYTES], const int *important, size_t n, int columns,
                      char *line, size_t line_bytes)
{
    size_t used = strlen(part[important[0]]);

    for (size_t i = 1; i < n && columns > 0; i++) {
        size_t more = strlen(part[important[i]]) + 2;
        if (used + more < (size_t)columns)
            used += more;
        else
            part[important[i]][0] = '\0';
    }
    join_parts(part, line, line_bytes);
}

/* A line of the log, which stays. */
static void print_step(const bl_metrics *m, const bl_step_metrics *s, int columns)
{
    enum { STEP, LOSS, MARGIN, GRAD_NORM, RATE, SPEED, LEFT, STALLS };
    static const int important[] = {STEP, LOSS, MARGIN, RATE, SPEED, GRAD_NORM, LEFT, STALLS};
    char part[MAX_PARTS][PART_BYTES] = {{0}}, line[MAX_PARTS * PART_BYTES],
         left[BL_CLOCK_TEXT_BYTES];

    bl_clock_text(m->mean_step_s * (double)(s->total_steps - s->step), left);
    snprintf(part[STEP], PART_BYTES, "step %lld/%lld", (long long)s->step,
             (long long)s->total_steps);
    snprintf(part[LOSS], PART_BYTES, "loss %.4f", s->loss);
    if (s->preference.is_there && !isnan(s->preference.value[BL_METRIC_MARGINS]))
        snprintf(part[MARGIN], PART_BYTES, "reward margin %.4f",
                 s->preference.value[BL_METRIC_MARGINS]);
    snprintf(part[GRAD_NORM], PART_BYTES, "grad_norm %.3f", s->grad_norm);
    snprintf(part[RATE], PART_BYTES, "lr %.2e", s->learning_rate);
    snprintf(part[SPEED], PART_BYTES, "%.0f tokens/s", (double)s->tokens / s->step_s);
    snprintf(part[LEFT], PART_BYTES, "%s left", left);
    print_stalls(s, part[STALLS], PART_BYTES);
    fit_parts(part, important, BL_COUNT(important), columns, line, sizeof line);
    bl_log_info("%s", line);
}

/* "[###....]" in the n_free columns left on the line; "" if they are too few. */
static void print_bar(const bl_step_metrics *s, int n_free, char bar[PART_BYTES])
{
    enum { LEAST = 4, MOST = 32, AROUND = 4 /* brackets and the space between parts */ };
    int width = n_free - AROUND > MOST ? MOST : n_free - AROUND;

    bar[0] = '\0';
    if (width < LEAST) return;
    int done = (int)((double)width * (double)s->step / (double)s->total_steps);
    snprintf(bar, PART_BYTES, "[%.*s%.*s]", done, "################################", width - done,
             "................................");
}

/* The line below the log, which is drawn again and again. */
static void draw_progress(const bl_metrics *m, const bl_step_metrics *s, int columns)
{
    enum { STEP, PERCENT, BAR, TIMES, LOSS, RATE, SPEED, STALLS, MEMORY };
    static const int important[] = {STEP, LOSS, TIMES, SPEED, STALLS, PERCENT, RATE, MEMORY};
    char part[MAX_PARTS][PART_BYTES] = {{0}}, line[MAX_PARTS * PART_BYTES];
    char elapsed[BL_CLOCK_TEXT_BYTES], left[BL_CLOCK_TEXT_BYTES];

    bl_clock_text(bl_now_s() - m->begun_s, elapsed);
    bl_clock_text(m->mean_step_s * (double)(s->total_steps - s->step), left);
    snprintf(part[STEP], PART_BYTES, "step %lld/%lld", (long long)s->step,
             (long long)s->total_steps);
    snprintf(part[PERCENT], PART_BYTES, "%d%%",
             (int)(100.0 * (double)s->step / (double)s->total_steps));
    snprintf(part[TIMES], PART_BYTES, "%s<%s", elapsed, left);
    snprintf(part[LOSS], PART_BYTES, "loss %.4f", s->loss);
    snprintf(part[RATE], PART_BYTES, "lr %.1e", s->learning_rate);
    snprintf(part[SPEED], PART_BYTES, "%.0f tokens/s", (double)s->tokens / s->step_s);
    print_stall_sum(s, part[STALLS], PART_BYTES);
    double gb = (double)bl_memory_anonymous_bytes() * 1e-9;
    snprintf(part[MEMORY], PART_BYTES, gb < 0.1 ? "%.0f MB" : "%.1f GB", gb < 0.1 ? gb * 1e3 : gb);
    fit_parts(part, important, BL_COUNT(important), columns, line, sizeof line);
    print_bar(s, columns - 1 - (int)strlen(line), part[BAR]);
    join_parts(part, line, sizeof line);
    bl_log_progress("%s", line);
}

static void print_progress(bl_metrics *m, const bl_step_metrics *s)
{
    bool last = s->step == s->total_steps;
    int columns = bl_log_columns();

    if (s->step % m->logging_steps == 0 || last) print_step(m, s, columns);
    if (columns > 0 && !last) draw_progress(m, s, columns);
}

void bl_metrics_report_to(bl_metrics *m, bl_events *events)
{
    m->events = events;
}

static bl_status add_event(const bl_metrics *m, int64_t step, bl_scalar *scalars, size_t n,
                           const char *prefix, const bl_preference_metrics *preference)
{
    char names[BL_PREFERENCE_N_METRICS][NAME_BYTES];

    if (!m->events) return BL_OK;
    for (int i = 0; i < BL_PREFERENCE_N_METRICS && preference->is_there; i++) {
        if (isnan(preference->value[i])) continue;
        snprintf(names[i], NAME_BYTES, "%s/%s", prefix, bl_preference_metric_name(i));
        scalars[n++] = (bl_scalar){names[i], preference->value[i]};
    }
    return bl_events_add(m->events, step, bl_wall_s(), scalars, n);
}

static bl_status add_step_event(const bl_metrics *m, const bl_step_metrics *s)
{
    enum { N = 5 };
    bl_scalar scalars[N + BL_PREFERENCE_N_METRICS] = {
        {"train/loss", s->loss},
        {"train/grad_norm", s->grad_norm},
        {"train/learning_rate", s->learning_rate},
        {"train/epoch", s->epoch},
        {"train/tokens_per_second", (double)s->tokens / s->step_s}};

    return add_event(m, s->step, scalars, N, "train", &s->preference);
}

static bl_status add_eval_event(const bl_metrics *m, const bl_eval_metrics *e)
{
    enum { N = 2 };
    bl_scalar scalars[N + BL_PREFERENCE_N_METRICS] = {{"eval/loss", e->loss},
                                                      {"eval/runtime", e->seconds}};

    return add_event(m, e->step, scalars, N, "eval", &e->preference);
}

/* ",\"rewards/chosen\":0.1", and so on; "" without preferences. */
static void print_preference(const bl_preference_metrics *p, const char *prefix, char *text,
                             size_t n_bytes)
{
    size_t used = 0;

    text[0] = '\0';
    for (int i = 0; i < BL_PREFERENCE_N_METRICS && p->is_there; i++)
        if (!isnan(p->value[i]) && used < n_bytes)
            used += (size_t)snprintf(text + used, n_bytes - used, ",\"%s%s\":%.12g", prefix,
                                     bl_preference_metric_name(i), p->value[i]);
}

/* Of preferences to the last bit: that of the first step says whether policy and reference are the
 * same. */
static int loss_digits(const bl_preference_metrics *p)
{
    return p->is_there ? 17 : 12;
}

void bl_metrics_print_end(const bl_metrics *m)
{
    double seconds = bl_now_s() - m->begun_s;
    char duration[BL_CLOCK_TEXT_BYTES];

    bl_clock_text(seconds, duration);
    bl_log_info("trained %lld step%s, %lld tokens in %s: %.0f tokens/s", (long long)m->n_steps,
                m->n_steps == 1 ? "" : "s", (long long)m->n_tokens, duration,
                seconds > 0 ? (double)m->n_tokens / seconds : 0.0);
}

bl_status bl_metrics_step(bl_metrics *m, const bl_step_metrics *s)
{
    char line[1024 + PREFERENCE_BYTES], preference[PREFERENCE_BYTES], mfu[32] = "null";

    m->n_steps++;
    m->n_tokens += s->tokens;
    m->mean_step_s = m->mean_step_s == 0 ? s->step_s : 0.9 * m->mean_step_s + 0.1 * s->step_s;
    /* A step above the peak: other work slowed the measurement of the peak. */
    double part = s->peak_flops > 0 ? s->flops / s->step_s / s->peak_flops : 0;
    if (part > 0 && part <= 1) snprintf(mfu, sizeof mfu, "%.4f", part);
    snprintf(
        line, sizeof line,
        "{\"step\":%lld,\"loss\":%.*g,\"grad_norm\":%.12g,\"learning_rate\":%.12g,\"epoch\":%.12g,"
        "\"tokens\":%lld,"
        "\"label_tokens\":%lld,\"step_s\":%.6f,\"tokens_per_s\":%.3f,\"tflops\":%.6f,\"mfu\":%s",
        (long long)s->step, loss_digits(&s->preference), s->loss, s->grad_norm, s->learning_rate,
        s->epoch, (long long)s->tokens, (long long)s->label_tokens, s->step_s,
        (double)s->tokens / s->step_s, s->flops / s->step_s * 1e-12, mfu);
    size_t used = strlen(line);
    for (size_t i = 0; i < BL_COUNT(moving_lanes); i++) {
        const bl_lane_totals *lane = &s->lanes[moving_lanes[i]];
        const char *name = bl_lane_name(moving_lanes[i]);
        used += (size_t)snprintf(line + used, sizeof line - used,
                                 ",\"%s_bytes\":%lld,\"%s_stall_s\":%.6f", name,
                                 (long long)lane->n_bytes, name, lane->stall_s);
    }
    if (s->n_fallbacks >= 0)
        used += (size_t)snprintf(line + used, sizeof line - used, ",\"bf16_fallbacks\":%lld",
                                 (long long)s->n_fallbacks);
    print_preference(&s->preference, "", preference, sizeof preference);
    snprintf(line + used, sizeof line - used, "%s}\n", preference);
    print_progress(m, s);
    BL_TRY(append(m, line));
    return add_step_event(m, s);
}

static void log_evaluation(const bl_eval_metrics *e, bool is_lowest)
{
    const bl_preference_metrics *p = &e->preference;
    char more[PART_BYTES] = "";
    int used = 0;

    if (!p->is_there)
        snprintf(more, sizeof more, "  perplexity %.3f", exp(e->loss));
    else if (!isnan(p->value[BL_METRIC_MARGINS]))
        used = snprintf(more, sizeof more, "  reward margin %.4f", p->value[BL_METRIC_MARGINS]);
    if (p->is_there && !isnan(p->value[BL_METRIC_ACCURACIES]))
        snprintf(more + used, sizeof more - (size_t)used, "  accuracy %.3f",
                 p->value[BL_METRIC_ACCURACIES]);
    bl_log_info("step %lld  validation loss %.4f%s%s", (long long)e->step, e->loss, more,
                is_lowest ? "  (lowest)" : "");
}

bl_status bl_metrics_eval(bl_metrics *m, const bl_eval_metrics *e)
{
    char line[256 + PREFERENCE_BYTES], preference[PREFERENCE_BYTES], of_best[96] = "";
    bool has_best = e->best && e->best->step >= 0;

    log_evaluation(e, has_best && e->best->step == e->step);
    if (has_best)
        snprintf(of_best, sizeof of_best, ",\"best_step\":%lld,\"best_eval_loss\":%.12g",
                 (long long)e->best->step, e->best->loss);
    print_preference(&e->preference, "eval_", preference, sizeof preference);
    snprintf(line, sizeof line,
             "{\"step\":%lld,\"eval_loss\":%.*g,\"eval_label_tokens\":%lld,\"eval_s\":%.3f%s%s}\n",
             (long long)e->step, loss_digits(&e->preference), e->loss, (long long)e->label_tokens,
             e->seconds, preference, of_best);
    BL_TRY(append(m, line));
    return add_eval_event(m, e);
}

int64_t bl_metrics_bytes(const bl_metrics *m)
{
    return atomic_load(&m->bytes);
}

bl_status bl_metrics_sync(bl_metrics *m, int64_t *bytes)
{
    *bytes = m->bytes;
    BL_TRY(cut(m));
    return bl_file_sync(m->fd, m->path);
}

void bl_metrics_close(bl_metrics *m)
{
    if (!m) return;
    bl_log_finish_progress();
    if (m->fd >= 0) close(m->fd);
    bl_events_close(m->events);
    free(m->path);
    free(m);
}
