/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- report.svg: its summary, its panels, and the sums of where the time went. */
#include "train/report/report.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "base/svg.h"
#include "tokenizer/text.h"
#include "train/report/report_internal.h"

enum {
    WIDTH = 960,
    LEFT = 78,
    PANEL_WIDTH = WIDTH - LEFT - 32,
    LOSS_TOP = 124,
    LOSS_HEIGHT = 240,
    LOW_HEIGHT = 96,
    PANEL_GAP = 56,
    RATE_TOP = LOSS_TOP + LOSS_HEIGHT + PANEL_GAP,
    SPEED_TOP = RATE_TOP + LOW_HEIGHT + PANEL_GAP,
    TIME_TOP = SPEED_TOP + LOW_HEIGHT + PANEL_GAP,
    TABLE_TOP = TIME_TOP + LOW_HEIGHT + PANEL_GAP,
    ROW = 20,
    BAR_HEIGHT = 18,
    MAX_TITLE_BYTES = 96,
};

static const char TRAIN_COLOR[] = "#0072b2", EVAL_COLOR[] = "#d55e00";

/* The lanes that compute waited for, as ballast plan draws them. */
static const char *const colors[BL_N_LANES] = {
    [BL_LANE_COMPUTE] = "#009e73", [BL_LANE_GATHER] = "#0072b2",      [BL_LANE_COPY] = "#56b4e9",
    [BL_LANE_DISK] = "#cc79a7",    [BL_LANE_ACTIVATIONS] = "#e69f00", [BL_LANE_LORA] = "#d55e00",
};
static const char EVALUATION_COLOR[] = "#999";

typedef struct picture {
    const bl_report *report;
    const bl_run_series *run;
    char name[MAX_TITLE_BYTES]; /* of the model */
    double x0, x1;
} picture;

/* ---- values ---- */

static double loss_of(const bl_series_bin *bin)
{
    return bin->loss_sum / (double)bin->n;
}

static double rate_of(const bl_series_bin *bin)
{
    return bin->learning_rate;
}

static double speed_of(const bl_series_bin *bin)
{
    return bin->seconds > 0 ? bin->tokens / bin->seconds : 0;
}

static double stalled_s(const bl_series_bin *bin)
{
    double sum = 0;
    for (int lane = 0; lane < BL_N_LANES; lane++) sum += bin->stall_s[lane];
    return sum;
}

/* The rest of the steps. Each stall is that of the rank that waited the longest: of several ranks
 * they can be more than the step together. */
static double compute_s(const bl_series_bin *bin)
{
    return fmax(bin->seconds - stalled_s(bin), 0);
}

static double lane_s(const bl_series_bin *bin, int lane)
{
    return lane == BL_LANE_COMPUTE ? compute_s(bin) : bin->stall_s[lane];
}

/* Of the bin's time; a lane's part begins where that of the lane before it ends. */
static double percent_up_to(const bl_series_bin *bin, int lane)
{
    double sum = 0, whole = compute_s(bin) + stalled_s(bin);
    for (int i = 0; i <= lane; i++) sum += lane_s(bin, i);
    return whole > 0 ? 100 * sum / whole : 0;
}

static void range_of(const bl_series *s, report_value_fn value, double *least, double *most)
{
    for (int64_t i = 0; i < s->n_bins; i++) {
        *least = fmin(*least, value(&s->bin[i]));
        *most = fmax(*most, value(&s->bin[i]));
    }
}

/* ---- the summary ---- */

static void draw_summary(FILE *out, const picture *pic)
{
    const bl_series *s = &pic->run->steps, *e = &pic->run->evaluations;
    char steps[BL_CLOCK_TEXT_BYTES], evaluations[BL_CLOCK_TEXT_BYTES];

    bl_clock_text(s->total.seconds, steps);
    bl_clock_text(e->total.seconds, evaluations);
    fprintf(out, "<text x=\"%d\" y=\"54\">%lld step%s, %.0f tokens in %s: %.0f tokens/s", LEFT,
            (long long)s->total.n, s->total.n == 1 ? "" : "s", s->total.tokens, steps,
            speed_of(&s->total));
    if (e->total.n > 0)
        fprintf(out, "; %lld evaluation%s in %s", (long long)e->total.n, e->total.n == 1 ? "" : "s",
                evaluations);
    fprintf(out,
            "</text>\n<text x=\"%d\" y=\"74\">Training loss %.4f at step %lld, %.4f at step %lld",
            LEFT, s->first.loss_sum, (long long)s->first.last_step, s->last.loss_sum,
            (long long)s->last.last_step);
    if (e->total.n > 0)
        fprintf(out, "; validation loss %.4f at step %lld, lowest %.4f at step %lld",
                e->last.loss_sum, (long long)e->last.last_step, e->total.loss_least,
                (long long)e->least_step);
    fputs("</text>\n", out);
}

/* ---- panels ---- */

static report_panel panel_at(const picture *pic, const char *id, const char *title, double top,
                             double height)
{
    return (report_panel){.id = id,
                          .title = title,
                          .left = LEFT,
                          .top = top,
                          .width = PANEL_WIDTH,
                          .height = height,
                          .x0 = pic->x0,
                          .x1 = pic->x1};
}

static void draw_key(FILE *out, double x, double y, const char *color, const char *format,
                     long long number)
{
    fprintf(out,
            "<line x1=\"%.0f\" y1=\"%.0f\" x2=\"%.0f\" y2=\"%.0f\" stroke=\"%s\" "
            "stroke-width=\"3\"/>\n<text x=\"%.0f\" y=\"%.0f\" font-size=\"12\">",
            x, y - 4, x + 22, y - 4, color, x + 28, y);
    fprintf(out, format, number);
    fputs("</text>\n", out);
}

static void draw_evaluations(FILE *out, const report_panel *p, const bl_series *e)
{
    if (e->n_bins > 1)
        train_panel_line(out, p, "eval_loss", "stroke=\"#d55e00\" stroke-width=\"2\"", e, loss_of);
    for (int64_t i = 0; i < e->n_bins; i++) {
        const bl_series_bin *bin = &e->bin[i];
        fprintf(out,
                "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"3\" fill=\"%s\"><title>step %lld: validation "
                "loss %.6g</title></circle>\n",
                train_panel_x(p, (double)bin->last_step), train_panel_y(p, loss_of(bin)),
                EVAL_COLOR, (long long)bin->last_step, loss_of(bin));
    }
}

static void draw_loss(FILE *out, const picture *pic)
{
    enum { SMOOTH_FROM = 40 /* bins */, SMOOTH_PARTS = 30 };
    const bl_series *s = &pic->run->steps, *e = &pic->run->evaluations;
    report_panel p = panel_at(pic, "loss", "Loss", LOSS_TOP, LOSS_HEIGHT);
    double least = INFINITY, most = -INFINITY;
    bool is_smooth = s->n_bins >= SMOOTH_FROM;
    int64_t around = s->n_bins / SMOOTH_PARTS / 2 + 1;

    range_of(s, loss_of, &least, &most);
    range_of(e, loss_of, &least, &most);
    train_panel_fit(&p, least, most, 0);
    train_panel_begin(out, &p, "%g");
    train_panel_line(out, &p, "train_loss",
                     is_smooth ? "stroke=\"#0072b2\" stroke-opacity=\"0.35\""
                               : "stroke=\"#0072b2\" stroke-width=\"1.6\"",
                     s, loss_of);
    if (is_smooth)
        train_panel_smooth_line(out, &p, "smooth_loss", "stroke=\"#0072b2\" stroke-width=\"2\"", s,
                                loss_of, around);
    draw_evaluations(out, &p, e);
    double y = LOSS_TOP - 10, x = LEFT + PANEL_WIDTH;
    if (e->total.n > 0) draw_key(out, x - 90, y, EVAL_COLOR, "validation", 0);
    if (!is_smooth && s->per_bin == 1)
        draw_key(out, x - 180, y, TRAIN_COLOR, "training", 0);
    else
        draw_key(out, x - 295, y, TRAIN_COLOR, "training, mean of %lld steps",
                 (long long)((is_smooth ? 2 * around + 1 : 1) * s->per_bin));
    train_panel_end(out);
}

/* A low panel with one line. */
static void draw_line(FILE *out, const picture *pic, const char *id, const char *title, double top,
                      const char *format, report_value_fn of)
{
    const bl_series *s = &pic->run->steps;
    report_panel p = panel_at(pic, id, title, top, LOW_HEIGHT);
    double least = 0, most = 0;

    range_of(s, of, &least, &most);
    train_panel_fit(&p, least, most, 0);
    train_panel_begin(out, &p, format);
    train_panel_line(out, &p, id, "stroke=\"#0072b2\" stroke-width=\"1.6\"", s, of);
    train_panel_end(out);
}

static void draw_time(FILE *out, const picture *pic)
{
    const bl_series *s = &pic->run->steps;
    report_panel p = panel_at(pic, "time", "Time of the steps, %", TIME_TOP, LOW_HEIGHT);
    double lower[BL_SERIES_BINS] = {0}, upper[BL_SERIES_BINS];
    char style[64];

    p.y1 = 100;
    train_panel_begin(out, &p, "%g");
    for (int lane = 0; lane < BL_N_LANES; lane++) {
        if (lane_s(&s->total, lane) <= 0) continue;
        for (int64_t i = 0; i < s->n_bins; i++) upper[i] = percent_up_to(&s->bin[i], lane);
        snprintf(style, sizeof style, "fill=\"%s\" fill-opacity=\"0.8\"", colors[lane]);
        train_panel_area(out, &p, bl_lane_name((bl_lane)lane), style, s, lower, upper);
        memcpy(lower, upper, (size_t)s->n_bins * sizeof *lower);
    }
    train_panel_end(out);
}

/* ---- sums of the time ---- */

typedef struct share {
    const char *name, *color;
    bool is_stall;
    double seconds, bytes;
} share;

enum { MAX_SHARES = BL_N_LANES + 1 };

/* Compute, evaluations, and each lane that was waited for or moved bytes. */
static int list_shares(const bl_run_series *run, share list[MAX_SHARES], double *whole_s)
{
    const bl_series_bin *total = &run->steps.total;
    int n = 0;

    *whole_s = run->evaluations.total.seconds;
    for (int lane = 0; lane < BL_N_LANES; lane++) {
        share one = {bl_lane_name((bl_lane)lane), colors[lane], lane != BL_LANE_COMPUTE,
                     lane_s(total, lane), total->moved_bytes[lane]};
        *whole_s += one.seconds;
        if (!one.is_stall || one.seconds > 0 || one.bytes > 0) list[n++] = one;
    }
    if (run->evaluations.total.n > 0)
        list[n++] =
            (share){"evaluations", EVALUATION_COLOR, false, run->evaluations.total.seconds, 0};
    return n;
}

static void draw_share(FILE *out, const share *one, double whole_s, double *x, double y)
{
    double part = whole_s > 0 ? one->seconds / whole_s : 0;

    fprintf(out,
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" "
            "fill-opacity=\"0.8\"/>\n<rect x=\"%d\" y=\"%.0f\" width=\"12\" height=\"12\" "
            "fill=\"%s\" fill-opacity=\"0.8\"/>\n",
            *x, TABLE_TOP, part * PANEL_WIDTH, BAR_HEIGHT, one->color, LEFT, y - 11, one->color);
    *x += part * PANEL_WIDTH;
    fprintf(out,
            "<text x=\"%d\" y=\"%.0f\">%s%s</text>\n"
            "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%.3f s</text>\n"
            "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%.1f %%</text>\n",
            LEFT + 20, y, one->is_stall ? "waiting for: " : "", one->name, LEFT + 330, y,
            one->seconds, LEFT + 410, y, 100 * part);
    if (one->bytes > 0)
        fprintf(out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%.*f %s moved</text>\n",
                LEFT + 560, y, one->bytes < 1e9 ? 3 : 2,
                one->bytes * (one->bytes < 1e9 ? 1e-6 : 1e-9), one->bytes < 1e9 ? "MB" : "GB");
}

static void draw_table(FILE *out, const picture *pic)
{
    share list[MAX_SHARES];
    double whole_s, x = LEFT, y = TABLE_TOP + BAR_HEIGHT + 22;
    int n = list_shares(pic->run, list, &whole_s);

    fprintf(out,
            "<g id=\"where\">\n<text x=\"%d\" y=\"%d\" font-weight=\"bold\">Where the time of "
            "steps and evaluations went</text>\n",
            LEFT, TABLE_TOP - 10);
    for (int i = 0; i < n; i++, y += ROW) draw_share(out, &list[i], whole_s, &x, y);
    fprintf(out,
            "<text x=\"%d\" y=\"%.0f\" font-size=\"11\" fill=\"#666\">Waiting: of the rank that "
            "waited the longest. Bytes: of all ranks. Loading the model and writing checkpoints "
            "are not included.",
            LEFT, y + 2);
    if (pic->run->n_skipped > 0)
        fprintf(out, " Lines of the log that could not be read: %lld.",
                (long long)pic->run->n_skipped);
    fputs("</text>\n</g>\n", out);
}

static void draw(const void *user, FILE *out)
{
    const picture *pic = user;
    share list[MAX_SHARES];
    double whole_s;
    int n = list_shares(pic->run, list, &whole_s);
    char rest[64];

    snprintf(rest, sizeof rest, ": step %lld of %lld", (long long)pic->run->steps.last.last_step,
             (long long)pic->report->total_steps);
    bl_svg_begin(out, WIDTH, TABLE_TOP + BAR_HEIGHT + 22 + (n + 1) * ROW + 8, pic->name, rest);
    draw_summary(out, pic);
    draw_loss(out, pic);
    draw_line(out, pic, "learning_rate", "Learning rate", RATE_TOP, "%.3g", rate_of);
    draw_line(out, pic, "tokens_per_s", "Tokens per second", SPEED_TOP, "%.10g", speed_of);
    draw_time(out, pic);
    draw_table(out, pic);
    fputs("</svg>\n", out);
}

/* The last part of the path, as XML takes it: control characters and bytes that are not UTF-8 are
 * replaced. */
static void name_model(const char *path, char name[MAX_TITLE_BYTES])
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    snprintf(name, MAX_TITLE_BYTES, "%.*s", (int)(end - begin), path + begin);
    for (char *c = name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    for (size_t n = strlen(name), at; (at = bl_utf8_valid_prefix(name, n)) < n;) name[at] = '?';
}

bl_status bl_report_write(const char *log_path, int64_t log_bytes, const bl_report *report,
                          const char *path, bool *is_written)
{
    bl_run_series *run = malloc(sizeof *run);
    picture pic = {.report = report, .run = run};

    *is_written = false;
    if (!run) return BL_FAIL(BL_ENOMEM, "the report");
    bl_status st = bl_run_series_read(log_path, log_bytes, run);
    if (st == BL_OK && run->steps.total.n > 0) {
        const bl_series *s = &run->steps, *e = &run->evaluations;
        name_model(report->model, pic.name);
        pic.x0 = (double)s->first.first_step - 1;
        pic.x1 = (double)s->last.last_step;
        if (e->total.n > 0) pic.x0 = fmin(pic.x0, (double)e->first.first_step);
        if (e->total.n > 0) pic.x1 = fmax(pic.x1, (double)e->last.last_step);
        st = bl_svg_write(path, draw, &pic);
        *is_written = st == BL_OK;
    }
    free(run);
    return st;
}
