/* SPDX-License-Identifier: Apache-2.0 */
/* what_if.c -- plans a training again for each value of one key or figure, as a table, JSON or
 * bars. */
#include "plan/what_if.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "base/svg.h"
#include "plan/case.h"

enum { KEY_BYTES = BL_WHAT_IF_VALUE_BYTES };

/* ---- the values ---- */

static bl_status parse_spec(const char *spec, bl_what_if *out)
{
    const char *equals = strchr(spec, '=');

    *out = (bl_what_if){.n_rows = 0};
    if (!equals || equals == spec || equals - spec >= KEY_BYTES || equals[1] == '\0')
        return BL_FAIL(BL_EUSAGE, "--what_if: expected KEY=a,b,c, got '%s'", spec);
    memcpy(out->key, spec, (size_t)(equals - spec));
    for (const char *at = equals + 1;; at++) {
        size_t n_bytes = strcspn(at, ",");
        if (n_bytes == 0 || n_bytes >= BL_WHAT_IF_VALUE_BYTES)
            return BL_FAIL(BL_EUSAGE, "--what_if %s: expected values between commas, got '%s'",
                           out->key, equals + 1);
        if (out->n_rows == BL_WHAT_IF_VALUES)
            return BL_FAIL(BL_EUSAGE, "--what_if %s: more than %d values", out->key,
                           BL_WHAT_IF_VALUES);
        memcpy(out->rows[out->n_rows++].value, at, n_bytes);
        at += n_bytes;
        if (*at == '\0') return BL_OK;
    }
}

static const bl_figure_info *find_figure(const char *key)
{
    for (size_t i = 0; i < bl_n_figures; i++)
        if (strcmp(bl_figures[i].key, key) == 0) return &bl_figures[i];
    return NULL;
}

static bl_status parse_number(const char *text, double least, double most, double *out)
{
    char *end;
    *out = strtod(text, &end);
    if (*end == '\0' && *out >= least && *out <= most) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "expected a number of %.0f to %.0f, got '%s'", least, most, text);
}

/* Whether the word is "--key" or "--key=..."; - and _ are the same in it. */
static bool is_word_of(const char *word, const char *key)
{
    if (strncmp(word, "--", 2) != 0) return false;
    for (word += 2; *key && (*word == *key || (*word == '-' && *key == '_')); word++) key++;
    return *key == '\0' && (*word == '\0' || *word == '=');
}

/* argv with the key's value in the place of another one. words has room for argc + 2. */
static int replace_key(const bl_what_if_case *c, char *option, char *value, char **words)
{
    int n = 0;

    for (int i = 0; i < c->argc; i++) {
        if (!is_word_of(c->argv[i], option + 2)) {
            words[n++] = c->argv[i];
            continue;
        }
        bool has_value =
            !strchr(c->argv[i], '=') && i + 1 < c->argc && strncmp(c->argv[i + 1], "--", 2) != 0;
        i += has_value;
    }
    words[n++] = option;
    words[n++] = value;
    return n;
}

/* Opens the case with one value. */
static bl_status open_case(const bl_what_if_case *c, const char *key, char *value,
                           bl_plan_case *out)
{
    const bl_figure_info *figure = find_figure(key);
    char option[KEY_BYTES + 2];
    double number;

    *out = (bl_plan_case){.config = NULL};
    if (strcmp(key, "hardware") == 0) {
        bl_plan_machine other = c->machine;
        other.name = value;
        return bl_plan_case_open_on(&other, c->row_tokens, c->argc, c->argv, out);
    }
    if (strcmp(key, "tokens") == 0) {
        BL_TRY(parse_number(value, 1, 1 << 20, &number));
        return bl_plan_case_open_on(&c->machine, (int64_t)number, c->argc, c->argv, out);
    }
    if (figure) {
        BL_TRY(parse_number(value, 0, 1e18, &number));
        BL_TRY(bl_hardware_check_figure(key, number));
        BL_TRY(bl_plan_case_open_on(&c->machine, c->row_tokens, c->argc, c->argv, out));
        bl_figure *f = (bl_figure *)((char *)&out->hardware + figure->offset);
        if (strcmp(key, "device_memory_bytes") == 0)
            out->input.gpu_available_bytes += (int64_t)(number - f->value);
        if (strcmp(key, "host_memory_bytes") == 0) out->input.available_bytes = (int64_t)number;
        *f = (bl_figure){.value = number, .source = "what_if"};
        return bl_hardware_check_peaks(&out->hardware);
    }
    char **words = calloc((size_t)c->argc + 2, sizeof *words);
    if (!words) return BL_FAIL(BL_ENOMEM, "the configuration of a plan");
    snprintf(option, sizeof option, "--%s", key);
    int n = replace_key(c, option, value, words);
    bl_status st = bl_plan_case_open_on(&c->machine, c->row_tokens, n, words, out);
    free(words);
    return st;
}

/* ---- the rows ---- */

static void fill_row(const bl_plan_case *c, const bl_plan *plan, const bl_time_estimate *time,
                     bl_what_if_row *row)
{
    const bl_topology *t = &c->input.topology;

    row->fits = true;
    row->time = *time;
    row->device_bytes = (double)plan->memory.device;
    row->host_bytes = (double)plan->memory.total * (double)bl_plan_processes_on_host(t);
}

static bl_status fill_chosen_row(const bl_plan_case *c, bl_plan_objective objective,
                                 bl_what_if_row *row)
{
    bl_plan_choice choice;
    unsigned free_keys =
        c->config->source.file ? bl_plan_auto_keys(c->config) : bl_plan_keys_left_open(c->config);

    BL_TRY(bl_plan_search(&c->input, free_keys, objective, &choice));
    fill_row(c, &choice.best.plan, &choice.best.time, row);
    row->fits = choice.n_fit > 0;
    return BL_OK;
}

static bl_status fill_configured_row(const bl_plan_case *c, bl_what_if_row *row)
{
    bl_plan plan;
    bl_time_estimate time;

    BL_TRY(bl_plan_choose(&c->input, &plan));
    BL_TRY(bl_plan_estimate(&c->input, &plan, &time));
    fill_row(c, &plan, &time, row);
    return BL_OK;
}

bl_status bl_what_if_run(const bl_what_if_case *c, const char *spec, bl_what_if *out)
{
    BL_TRY(parse_spec(spec, out));
    for (int i = 0; i < out->n_rows; i++) {
        bl_plan_case one;
        bl_what_if_row *row = &out->rows[i];
        bl_status st = open_case(c, out->key, row->value, &one);
        if (st == BL_OK)
            st = one.hardware.kind == BL_DEVICE_CUDA ? fill_chosen_row(&one, c->objective, row)
                                                     : fill_configured_row(&one, row);
        if (st == BL_OK && i == 0)
            snprintf(out->title, sizeof out->title, "%.60s%s%.60s", one.model.name,
                     strcmp(out->key, "hardware") == 0 ? "" : " on ",
                     strcmp(out->key, "hardware") == 0 ? "" : one.hardware.name);
        bl_plan_case_close(&one);
        if (st != BL_OK) return bl_error_prefix(st, "--what_if %s=%s", out->key, row->value);
    }
    return BL_OK;
}

void bl_what_if_print(const bl_what_if *w, FILE *out)
{
    fprintf(out, "%-20s %9s %6s %9s %9s %9s %8s %8s  %s\n", w->key, "tokens/s", "MFU", "step, s",
            "forward", "backward", "GPU, GB", "host, GB", "bound by");
    for (int i = 0; i < w->n_rows; i++) {
        const bl_what_if_row *r = &w->rows[i];
        const bl_time_estimate *t = &r->time;
        fprintf(out, "%-20s ", r->value);
        if (!r->fits)
            fprintf(out, "does not fit: %.1f GB of a GPU, %.1f GB of a host\n",
                    1e-9 * r->device_bytes, 1e-9 * r->host_bytes);
        else
            fprintf(out, "%9.0f %4.1f %% %9.3f %9.3f %9.3f %8.1f %8.1f  %s\n", t->tokens_per_s,
                    100 * t->mfu, t->step_s, t->part[BL_TIME_FORWARD].seconds,
                    t->part[BL_TIME_BACKWARD].seconds, 1e-9 * r->device_bytes, 1e-9 * r->host_bytes,
                    bl_lane_name(bl_time_bound(t)));
    }
}

bl_status bl_what_if_describe(const bl_what_if *w, json_t **out)
{
    json_t *rows = json_array();

    for (int i = 0; i < w->n_rows; i++) {
        const bl_what_if_row *r = &w->rows[i];
        json_array_append_new(
            rows, json_pack("{s:s, s:b, s:f, s:f, s:f, s:f, s:f, s:s}", "value", r->value, "fits",
                            r->fits, "tokens_per_s", r->time.tokens_per_s, "step_s", r->time.step_s,
                            "mfu", r->time.mfu, "device_bytes", r->device_bytes, "host_bytes",
                            r->host_bytes, "bound", bl_lane_name(bl_time_bound(&r->time))));
    }
    *out = json_pack("{s:s, s:o}", "what_if", w->key, "rows", rows);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "the plan's document");
}

/* ---- the picture ---- */

enum { WIDTH = 820, HEIGHT = 440, LEFT = 80, RIGHT = 30, TOP = 60, BOTTOM = 66 };

static double highest_of(const bl_what_if *w)
{
    double highest = 1;
    for (int i = 0; i < w->n_rows; i++)
        if (w->rows[i].fits) highest = fmax(highest, w->rows[i].time.tokens_per_s);
    double power = pow(10, floor(log10(highest)));
    return power * ceil(highest / power * 2) / 2;
}

/* A bar for each value: what does not fit has none. */
static void draw_bars(const bl_what_if *w, FILE *out)
{
    double highest = highest_of(w), room = (double)(WIDTH - LEFT - RIGHT) / w->n_rows,
           bottom = HEIGHT - BOTTOM, height = bottom - TOP;

    for (int k = 0; k <= 5; k++) {
        double y = bottom - height * k / 5;
        fprintf(out,
                "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>\n"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n",
                LEFT, y, WIDTH - RIGHT, y, LEFT - 8, y + 4, highest * k / 5);
    }
    for (int i = 0; i < w->n_rows; i++) {
        const bl_what_if_row *r = &w->rows[i];
        double x = LEFT + room * (i + 0.5), h = height * r->time.tokens_per_s / highest;
        if (r->fits)
            fprintf(out,
                    "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
                    "fill=\"#0072b2\"/>\n"
                    "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.0f</text>\n",
                    x - fmin(room * 0.35, 40), bottom - h, fmin(room * 0.7, 80), h, x,
                    bottom - h - 6, r->time.tokens_per_s);
        else
            fprintf(out,
                    "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"#999\">does not "
                    "fit</text>\n",
                    x, bottom - 8);
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", x, bottom + 20);
        bl_svg_text(out, r->value);
        fputs("</text>\n", out);
    }
}

static void draw(const void *user, FILE *out)
{
    const bl_what_if *w = user;

    bl_svg_begin(out, WIDTH, HEIGHT, w->title, "");
    fprintf(out, "<text x=\"%d\" y=\"48\" text-anchor=\"end\">tokens/s</text>\n", LEFT - 8);
    draw_bars(w, out);
    fprintf(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 16);
    bl_svg_text(out, w->key);
    fputs("</text>\n</svg>\n", out);
}

bl_status bl_what_if_draw(const bl_what_if *what_if, const char *path)
{
    return bl_svg_write(path, draw, what_if);
}
