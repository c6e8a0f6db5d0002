/* SPDX-License-Identifier: Apache-2.0 */
/* draw.c -- the use of memory and disk, as a picture: a bar for a GPU, for a host's memory and for
 * its disk, each as long as its capacity. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "base/svg.h"
#include "plan/report.h"

enum { TITLE_BYTES = 128 };

enum { LEFT = 130, BAR_WIDTH = 800, BAR_HEIGHT = 44, TOP = 56, ROW = 76, WIDTH = 960, LEGEND = 30 };

/* Items that a bar shows as one, in the order of the bars. */
typedef enum group { BASE, RING, LORA, ACTIVATIONS, WORK, EMBEDDING, SYSTEM, GROUPS } group;

static const struct {
    const char *name, *color;
} groups[GROUPS] = {
    [BASE] = {"frozen base", "#0072b2"},
    [RING] = {"ring, read buffers", "#56b4e9"},
    [LORA] = {"LoRA, gradients, AdamW", "#d55e00"},
    [ACTIVATIONS] = {"activations", "#009e73"},
    [WORK] = {"working set, logits", "#e69f00"},
    [EMBEDDING] = {"embedding", "#cc79a7"},
    [SYSTEM] = {"system: context, communicator, threads", "#999999"},
};

static group group_of(bl_memory_item item)
{
    switch (item) {
    case BL_MEMORY_BASE:
    case BL_MEMORY_SCALES:
    case BL_MEMORY_NORMS:
        return BASE;
    case BL_MEMORY_RING:
    case BL_MEMORY_READER:
        return RING;
    case BL_MEMORY_LORA:
    case BL_MEMORY_GRADIENTS:
    case BL_MEMORY_ADAM:
    case BL_MEMORY_LORA_RING:
        return LORA;
    case BL_MEMORY_LAYER_INPUTS:
    case BL_MEMORY_SAVED:
    case BL_MEMORY_BOUNDARY:
        return ACTIVATIONS;
    case BL_MEMORY_WORKSPACE:
    case BL_MEMORY_PREPARED:
    case BL_MEMORY_LOGITS:
    case BL_MEMORY_TOKENS:
        return WORK;
    default:
        return SYSTEM;
    }
}

static const char *name_of(int idx, bool is_trained)
{
    if (is_trained && idx == BASE) return "weights";
    if (is_trained && idx == LORA) return "gradients, AdamW";
    return groups[idx].name;
}

typedef struct bar {
    const char *name;
    double bytes[GROUPS], capacity;
    bool is_trained; /* every weight, no adapter */
} bar;

/* "2.54 GB", "630 MB" */
static const char *size_text(double bytes, char text[32])
{
    if (bytes >= 1e12)
        snprintf(text, 32, "%.2f TB", bytes * 1e-12);
    else if (bytes >= 1e9)
        snprintf(text, 32, bytes >= 1e11 ? "%.0f GB" : "%.1f GB", bytes * 1e-9);
    else
        snprintf(text, 32, "%.0f MB", bytes * 1e-6);
    return text;
}

static double sum_of(const bar *b)
{
    double sum = 0;
    for (int g = 0; g < GROUPS; g++) sum += b->bytes[g];
    return sum;
}

static void draw_bar(FILE *out, const bar *b, double y)
{
    char used[32], there[32];
    double sum = sum_of(b), whole = b->capacity > sum ? b->capacity : sum, x = LEFT;

    fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 12,
            y + BAR_HEIGHT / 2.0 + 4, b->name);
    fprintf(out,
            "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"#f4f4f4\" "
            "stroke=\"#999\"/>\n",
            LEFT, y, BAR_WIDTH, BAR_HEIGHT);
    for (int g = 0; g < GROUPS; g++) {
        double width = b->bytes[g] / whole * BAR_WIDTH;
        char text[32];
        if (b->bytes[g] <= 0) continue;
        fprintf(out,
                "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" fill=\"%s\">"
                "<title>%s: %s</title></rect>\n",
                x, y, width, BAR_HEIGHT, groups[g].color, name_of(g, b->is_trained),
                size_text(b->bytes[g], text));
        if (width >= 56)
            fprintf(out,
                    "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"#fff\">%s</text>\n",
                    x + width / 2, y + BAR_HEIGHT / 2.0 + 4, size_text(b->bytes[g], text));
        x += width;
    }
    fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\" font-size=\"12\">",
            LEFT + BAR_WIDTH, y + BAR_HEIGHT + 15);
    if (b->capacity > 0)
        fprintf(out, "%s of %s, %.0f %%</text>\n", size_text(sum, used),
                size_text(b->capacity, there), 100 * sum / b->capacity);
    else
        fprintf(out, "%s</text>\n", size_text(sum, used));
}

static void draw_legend(FILE *out, const bar *bars, int n_bars, double y)
{
    int n = 0;

    for (int g = 0; g < GROUPS; g++) {
        bool is_there = false;
        for (int i = 0; i < n_bars; i++) is_there = is_there || bars[i].bytes[g] > 0;
        if (!is_there) continue;
        double at_x = LEFT + n % 3 * (BAR_WIDTH / 3.0), at_y = y + n / 3 * 24.0;
        fprintf(out,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"14\" fill=\"%s\"/>\n"
                "<text x=\"%.1f\" y=\"%.1f\">%s</text>\n",
                at_x, at_y, groups[g].color, at_x + 22, at_y + 12, name_of(g, bars[0].is_trained));
        n++;
    }
}

/* Bars of the places in use; returns their number. */
static int make_bars(const bl_plan_report *r, bar bars[3])
{
    const bl_memory_ledger *m = &r->plan->memory;
    const bl_hardware *h = &r->c->hardware;
    const bl_topology *t = &r->c->input.topology;
    bool is_gpu = h->kind == BL_DEVICE_CUDA;
    bool is_trained = bl_train_config_is_full(r->config);
    double n_ranks = t->n_on_host, n_processes = (double)bl_plan_processes_on_host(t);
    int n = 0;
    bar device = {.name = "a GPU",
                  .capacity = h->device_memory_bytes.value,
                  .is_trained = is_trained},
        host = {.name = "host memory",
                .capacity = h->host_memory_bytes.value,
                .is_trained = is_trained},
        disk = {.name = "disk", .capacity = h->disk_bytes.value, .is_trained = is_trained};

    for (int i = 0; i < BL_MEMORY_ITEMS; i++) {
        group g = group_of((bl_memory_item)i);
        device.bytes[g] += (double)m->item[i].device;
        host.bytes[g] += n_ranks * (double)(m->item[i].host + (is_gpu ? 0 : m->item[i].device));
    }
    host.bytes[EMBEDDING] = (double)bl_memory_embedding_bytes(m, t);
    host.bytes[SYSTEM] += n_processes * (double)m->process;
    disk.bytes[BASE] = n_ranks * (double)m->disk;
    if (is_gpu) bars[n++] = device;
    bars[n++] = host;
    if (m->disk > 0) bars[n++] = disk;
    return n;
}

/* "llama-3.1-405b on 8xh100" */
static void write_title(const bl_plan_report *r, char title[TITLE_BYTES])
{
    snprintf(title, TITLE_BYTES, "%.60s on %.60s", r->c->model.name, r->c->hardware.name);
}

static void draw(const void *user, FILE *out)
{
    const bl_plan_report *r = user;
    char title[TITLE_BYTES];
    bar bars[3];
    int n = make_bars(r, bars);

    write_title(r, title);
    bl_svg_begin(out, WIDTH, TOP + n * ROW + LEGEND + 3 * 24, title, ": memory by tier and item");
    for (int i = 0; i < n; i++) draw_bar(out, &bars[i], TOP + i * ROW);
    draw_legend(out, bars, n, TOP + n * ROW + 10.0);
    fputs("</svg>\n", out);
}

bl_status bl_plan_draw_memory(const bl_plan_report *report, const char *path)
{
    return bl_svg_write(path, draw, report);
}

bl_status bl_plan_draw_streams(const bl_plan_report *report, const char *path)
{
    bl_plan_input input = report->c->input;
    bl_plan_time time;
    char title[TITLE_BYTES];

    input.config = report->config;
    BL_TRY(bl_plan_time_open(&input, report->plan, &time));
    write_title(report, title);
    bl_status st = bl_time_draw(&time.input, title, path);
    bl_plan_time_close(&time);
    return st;
}
