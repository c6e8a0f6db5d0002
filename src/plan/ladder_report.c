/* SPDX-License-Identifier: Apache-2.0 */
/* ladder_report.c -- the strategies as a table, as JSON and as an SVG. */
#include "plan/ladder_report.h"

#include <math.h>
#include <string.h>

#include "base/sizes.h"
#include "base/svg.h"

static const double GB = 1e9;

static bl_strategy_job job_of(const bl_ladder_case *c)
{
    return (bl_strategy_job){.model = c->model,
                             .n_devices = c->hardware->n_devices * c->hardware->n_hosts,
                             .length = c->length,
                             .batch = 1,
                             .lora_r = c->lora_r};
}

static void count_rung(const bl_ladder_case *c, size_t rung, bl_strategy_memory *out)
{
    bl_strategy_job job = job_of(c);
    bl_strategy_count(&bl_ladder[rung].strategy, &job, out);
}

/* ---- a table ---- */

static void print_amount(int64_t n_bytes, FILE *out)
{
    double gb = (double)n_bytes / GB;
    if (n_bytes == 0)
        fprintf(out, "%10s", "-");
    else
        fprintf(out, "%10.*f", gb < 100 ? 2 : 1, gb);
}

/* Wrapped at 96 columns, so that the lines can be copied. */
static void print_words(const char *words, FILE *out)
{
    enum { LAST_COLUMN = 96, INDENT = 4 };
    int column = 0;

    while (*words) {
        const char *value = strchr(words, ' '), *end = value ? strchr(value + 1, ' ') : NULL;
        int n = (int)(end ? end - words : (ptrdiff_t)strlen(words));
        bool is_full = column > 0 && column + 1 + n > LAST_COLUMN;
        if (is_full) fputs(" \\\n", out);
        column = is_full || column == 0 ? INDENT : column + 1;
        fprintf(out, "%*s%.*s", column == INDENT ? INDENT : 1, "", n, words);
        column += n;
        words += n;
        while (*words == ' ') words++;
    }
    fputs("\n", out);
}

static bl_status print_runs(const bl_ladder_case *c, FILE *out)
{
    fputs("\nWith Ballast: planned memory, and the keys of `ballast train`\n", out);
    for (size_t i = 0; i < bl_ladder_length; i++) {
        bl_ladder_run run;
        BL_TRY(bl_ladder_plan(c, i, &run));
        if (run.reason[0]) {
            fprintf(out, "\n%-24s  unsupported: %s\n", bl_ladder[i].name, run.reason);
            continue;
        }
        fprintf(out, "\n%-24s  %.2f GB per GPU, %.2f GB per host%s\n", bl_ladder[i].name,
                (double)run.device_bytes / GB, (double)run.host_bytes / GB,
                run.fits ? "" : ": too large");
        print_words(run.keys, out);
    }
    return BL_OK;
}

bl_status bl_ladder_print(const bl_ladder_case *c, FILE *out)
{
    int64_t room = bl_strategy_room(c->hardware);

    fprintf(out, "%s on %s: a sequence of %lld tokens on each of %d GPUs, LoRA r %lld\n\n",
            c->model_name, c->hardware->name, (long long)c->length, job_of(c).n_devices,
            (long long)c->lora_r);
    fprintf(out, "%-24s%10s%10s%10s%10s%10s%10s%10s\n", "GB of a GPU", "weights", "gradients",
            "AdamW", "activ.", "buffers", "sum", "host");
    for (size_t i = 0; i < bl_ladder_length; i++) {
        bl_strategy_memory m;
        count_rung(c, i, &m);
        int64_t sum = bl_strategy_total(&m);
        const int64_t amounts[] = {m.weights, m.gradients, m.optimizer, m.activations + m.logits,
                                   m.buffers, sum,         m.host};
        fprintf(out, "%-24s", bl_ladder[i].name);
        for (size_t k = 0; k < BL_COUNT(amounts); k++) print_amount(amounts[k], out);
        fputs(sum <= room ? "  fits\n" : "\n", out);
    }
    fprintf(out,
            "\nA GPU has room for %.1f GB of its %.1f GB. activ.: checkpointed activations and "
            "logits. Each\nline with + adds to the one above.\n",
            (double)room / GB, c->hardware->device_memory_bytes.value / GB);
    return print_runs(c, out);
}

/* ---- JSON ---- */

static json_t *describe_run(const bl_ladder_run *run)
{
    if (run->reason[0]) return json_pack("{s:s}", "unsupported", run->reason);
    return json_pack("{s:s, s:I, s:I, s:b}", "keys", run->keys, "device_bytes",
                     (json_int_t)run->device_bytes, "host_bytes", (json_int_t)run->host_bytes,
                     "fits", run->fits);
}

static bl_status add_rung(const bl_ladder_case *c, size_t i, json_t *rungs)
{
    bl_strategy_memory m;
    bl_ladder_run run;

    count_rung(c, i, &m);
    BL_TRY(bl_ladder_plan(c, i, &run));
    json_array_append_new(
        rungs,
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:o}", "strategy",
                  bl_ladder[i].name, "weights_bytes", (json_int_t)m.weights, "gradients_bytes",
                  (json_int_t)m.gradients, "optimizer_bytes", (json_int_t)m.optimizer,
                  "activations_bytes", (json_int_t)m.activations, "logits_bytes",
                  (json_int_t)m.logits, "buffers_bytes", (json_int_t)m.buffers, "device_bytes",
                  (json_int_t)bl_strategy_total(&m), "host_bytes", (json_int_t)m.host, "fits",
                  bl_strategy_total(&m) <= bl_strategy_room(c->hardware), "ballast",
                  describe_run(&run)));
    return BL_OK;
}

bl_status bl_ladder_describe(const bl_ladder_case *c, json_t **out)
{
    json_t *rungs = json_array();
    int64_t room = bl_strategy_room(c->hardware);
    bl_status st = BL_OK;

    *out = NULL;
    for (size_t i = 0; i < bl_ladder_length && st == BL_OK; i++) st = add_rung(c, i, rungs);
    if (st != BL_OK) {
        json_decref(rungs);
        return st;
    }
    bool is_whole = json_array_size(rungs) == bl_ladder_length;
    *out = json_pack("{s:s, s:s, s:I, s:I, s:I, s:o}", "model", c->model_name, "hardware",
                     c->hardware->name, "tokens", (json_int_t)c->length, "lora_r",
                     (json_int_t)c->lora_r, "room_bytes", (json_int_t)room, "ladder", rungs);
    if (is_whole && *out) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "the ladder's text");
}

/* ---- a picture ---- */

enum { WIDTH = 960, LEFT = 200, RIGHT = 110, TOP = 64, ROW = 34, BAR = 22, BOTTOM = 46 };

/* The scale: whole powers of ten around all bars and the device. */
typedef struct scale {
    double low, high; /* log10 of bytes */
} scale;

static double x_of(const scale *s, double bytes)
{
    double part = (log10(fmax(bytes, 1)) - s->low) / (s->high - s->low);
    return LEFT + fmax(part, 0) * (WIDTH - LEFT - RIGHT);
}

static scale scale_of(const bl_ladder_case *c)
{
    double least = c->hardware->device_memory_bytes.value, most = least;

    for (size_t i = 0; i < bl_ladder_length; i++) {
        bl_strategy_memory m;
        count_rung(c, i, &m);
        least = fmin(least, (double)bl_strategy_total(&m));
        most = fmax(most, (double)bl_strategy_total(&m));
    }
    return (scale){floor(log10(least) - 0.1), ceil(log10(most))};
}

static void draw_grid(const scale *s, double bottom, FILE *out)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};

    for (int power = (int)s->low; power <= (int)s->high; power++) {
        double x = x_of(s, pow(10, power));
        fprintf(out, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", x,
                TOP - 6, x, bottom);
        fprintf(
            out,
            "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"12\">%d %s</text>\n", x,
            bottom + 16, (int)lround(pow(10, power % 3)), units[power / 3]);
    }
}

static void draw_rung(const bl_ladder_case *c, const scale *s, size_t rung, FILE *out)
{
    bl_strategy_memory m;
    double y = TOP + (double)rung * ROW;

    count_rung(c, rung, &m);
    double bytes = (double)bl_strategy_total(&m), end = x_of(s, bytes);
    bool fits = bl_strategy_total(&m) <= bl_strategy_room(c->hardware);
    fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 10, y + 15,
            bl_ladder[rung].name);
    fprintf(out, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", LEFT, y,
            end - LEFT, BAR, fits ? "#009e73" : "#56b4e9");
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">", end + 8, y + 15);
    if (bytes >= 1e12)
        fprintf(out, "%.2f TB</text>\n", bytes / 1e12);
    else
        fprintf(out, "%.*f GB</text>\n", bytes < 1e11 ? 1 : 0, bytes / GB);
}

static void draw(const void *user, FILE *out)
{
    const bl_ladder_case *c = user;
    scale s = scale_of(c);
    double bottom = TOP + (double)bl_ladder_length * ROW,
           room = (double)bl_strategy_room(c->hardware), x = x_of(&s, room);
    char title[256];

    snprintf(title, sizeof title, "%.120s on %s", c->model_name, c->hardware->name);
    bl_svg_begin(out, WIDTH, bottom + BOTTOM, title, ": memory of a GPU by strategy");
    draw_grid(&s, bottom, out);
    for (size_t i = 0; i < bl_ladder_length; i++) draw_rung(c, &s, i, out);
    fprintf(
        out,
        "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#d55e00\" "
        "stroke-width=\"2\" stroke-dasharray=\"6 4\"/>\n"
        "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" fill=\"#d55e00\">a GPU has room for %.1f "
        "GB</text>\n</svg>\n",
        x, TOP - 10, x, bottom, x, TOP - 16, room / GB);
}

bl_status bl_ladder_draw(const bl_ladder_case *c, const char *path)
{
    return bl_svg_write(path, draw, c);
}

/* ---- a family ---- */

static void print_cell(const bl_ladder_case *c, FILE *out)
{
    bl_strategy_job job = job_of(c);
    bl_strategy s;
    char cell[32] = "-";

    if (bl_strategy_choose(&job, c->hardware, &s))
        snprintf(cell, sizeof cell, "ZeRO-%d%s", s.zero_stage, s.checkpointing ? "+GC" : "");
    fprintf(out, "%12s", cell);
}

bl_status bl_family_print(const bl_hardware *hardware, const char *const *models, size_t n_models,
                          const int64_t *lengths, size_t n_lengths, int64_t lora_r, FILE *out)
{
    fprintf(
        out,
        "LoRA r %lld on %s, a sequence on each GPU: the fastest of ZeRO's stages, with and "
        "without\nrecomputation of activations (+GC), that fits %.1f GB a GPU; -: none\n\n%-20s",
        (long long)lora_r, hardware->name, (double)bl_strategy_room(hardware) / GB, "tokens");
    for (size_t k = 0; k < n_lengths; k++) fprintf(out, "%12lld", (long long)lengths[k]);
    fputc('\n', out);
    for (size_t i = 0; i < n_models; i++) {
        bl_plan_model model;
        BL_TRY(bl_plan_model_open(models[i], BL_BASE_AUTO, &model));
        fprintf(out, "%-20s", model.name);
        for (size_t k = 0; k < n_lengths; k++)
            print_cell(&(bl_ladder_case){.hardware = hardware,
                                         .model_name = model.name,
                                         .model = &model.config,
                                         .length = lengths[k],
                                         .lora_r = lora_r},
                       out);
        fputc('\n', out);
        bl_plan_model_close(&model);
    }
    return BL_OK;
}
