/* SPDX-License-Identifier: Apache-2.0 */
/* time_draw.c -- a layer's forward and backward visit with their neighbors, as a picture: a line
 * for each stream, a box for each of its spans. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "base/svg.h"
#include "plan/time.h"

enum {
    LEFT = 100,
    PANEL_WIDTH = 1060,
    WIDTH = 1200,
    TOP = 52,
    LANE = 34,
    BOX = 24,
    PANEL_GAP = 62
};
enum { SHOWN_VISITS = 3, TEXT_BYTES = 48 };

static const struct {
    const char *name, *color;
} lanes[BL_N_LANES] = {
    [BL_LANE_COMPUTE] = {"compute", "#009e73"},
    [BL_LANE_GATHER] = {"gather", "#0072b2"},
    [BL_LANE_COPY] = {"copy", "#56b4e9"},
    [BL_LANE_DISK] = {"disk", "#cc79a7"},
    [BL_LANE_ACTIVATIONS] = {"activations", "#e69f00"},
    [BL_LANE_LORA] = {"LoRA", "#d55e00"},
};

typedef struct spans {
    bl_span *span;
    size_t n, n_max;
    bool ran_out;
} spans;

static void keep(void *user, const bl_span *span)
{
    spans *s = user;

    if (s->n == s->n_max) {
        size_t n_max = s->n_max ? 2 * s->n_max : 4096;
        bl_span *more = realloc(s->span, n_max * sizeof *more);
        s->ran_out = s->ran_out || !more;
        if (!more) return;
        s->span = more;
        s->n_max = n_max;
    }
    s->span[s->n++] = *span;
}

static bool is_visit(const bl_span *s)
{
    return s->lane == BL_LANE_COMPUTE && !s->is_stall;
}

typedef struct panel {
    const char *what; /* "forward" */
    double begin_s, end_s, y;
    bool has_lane[BL_N_LANES];
} panel;

/* Visits of three neighbors, the middle layer between them. */
static panel choose_panel(const spans *s, const char *what, int64_t layer)
{
    panel p = {.what = what, .begin_s = INFINITY, .end_s = 0};

    for (size_t i = 0; i < s->n; i++) {
        const bl_span *v = &s->span[i];
        if (!is_visit(v) || strcmp(v->name, what) != 0 || llabs(v->unit - layer) > SHOWN_VISITS / 2)
            continue;
        p.begin_s = fmin(p.begin_s, v->begin_s);
        p.end_s = fmax(p.end_s, v->end_s);
    }
    for (size_t i = 0; i < s->n; i++) {
        const bl_span *v = &s->span[i];
        if (v->end_s > p.begin_s && v->begin_s < p.end_s && v->end_s > v->begin_s)
            p.has_lane[v->lane] = true;
    }
    return p;
}

static int count_lanes(const panel *p)
{
    int n = 0;
    for (int lane = 0; lane < BL_N_LANES; lane++) n += p->has_lane[lane];
    return n;
}

static double x_of(const panel *p, double s)
{
    double part = (s - p->begin_s) / (p->end_s - p->begin_s);
    return LEFT + PANEL_WIDTH * fmin(fmax(part, 0), 1);
}

static double y_of(const panel *p, bl_lane lane)
{
    double y = p->y + 26;
    for (int i = 0; i < (int)lane; i++) y += p->has_lane[i] ? LANE : 0;
    return y;
}

static const char *label_of(const bl_span *s, int64_t n_layers, char text[TEXT_BYTES])
{
    static const char *const matrices[] = {"qkv", "o", "gate|up", "down"};
    bool is_matrix =
        s->lane == BL_LANE_GATHER || s->lane == BL_LANE_COPY || s->lane == BL_LANE_DISK;

    if (is_matrix && s->unit < n_layers && s->item >= 0 && s->item < 4)
        snprintf(text, TEXT_BYTES, "%lld %s", (long long)s->unit, matrices[s->item]);
    else if (is_visit(s))
        snprintf(text, TEXT_BYTES, "layer %lld", (long long)s->unit);
    else
        snprintf(text, TEXT_BYTES, "%lld %s", (long long)s->unit, s->name);
    return text;
}

/* A stall of compute is drawn over its visit. */
static void draw_span(FILE *out, const panel *p, const bl_span *s, int64_t n_layers)
{
    char text[TEXT_BYTES];
    bl_lane lane = s->is_stall ? BL_LANE_COMPUTE : s->lane;
    double x = x_of(p, s->begin_s), width = x_of(p, s->end_s) - x, y = y_of(p, lane);

    if (s->end_s <= s->begin_s || s->end_s <= p->begin_s || s->begin_s >= p->end_s) return;
    if (s->is_stall && width < 0.3) return;
    label_of(s, n_layers, text);
    fprintf(out,
            "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" fill=\"%s\" "
            "stroke=\"#fff\" stroke-width=\"%g\"><title>%s%s%s, %.3f ms</title></rect>\n",
            x, y, fmax(width, 1.2), BOX, s->is_stall ? "#c8c8c8" : lanes[lane].color,
            width > 4 ? 0.8 : 0, s->is_stall ? "waits for " : "",
            s->is_stall ? lanes[s->lane].name : "", s->is_stall ? "" : text,
            1e3 * (s->end_s - s->begin_s));
    if (!s->is_stall && width > 7.6 * (double)strlen(text))
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"#fff\">%s</text>\n",
                x + width / 2, y + BOX / 2.0 + 4, text);
}

/* 1, 2 or 5 times a power of ten, about eight of them. */
static double tick_of(double seconds)
{
    double power = pow(10, floor(log10(seconds / 8)));
    double part = seconds / 8 / power;
    return power * (part < 2 ? 2 : part < 5 ? 5 : 10);
}

static void draw_axis(FILE *out, const panel *p, double y)
{
    double tick = tick_of(p->end_s - p->begin_s);

    for (int i = 0; p->begin_s + i * tick <= p->end_s; i++) {
        double x = x_of(p, p->begin_s + i * tick);
        fprintf(out,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"12\">%g</text>\n",
                x, p->y + 20, x, y, x, y + 14, 1e3 * i * tick);
    }
    fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\" font-size=\"12\">ms</text>\n",
            LEFT - 12, y + 14);
}

static void draw_panel(FILE *out, const panel *p, const spans *s, int64_t n_layers)
{
    fprintf(out, "<text x=\"%d\" y=\"%.1f\" font-weight=\"bold\">%s</text>\n", LEFT, p->y + 12,
            p->what);
    draw_axis(out, p, p->y + 26 + count_lanes(p) * LANE);
    for (int lane = 0; lane < BL_N_LANES; lane++)
        if (p->has_lane[lane])
            fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 12,
                    y_of(p, (bl_lane)lane) + BOX / 2.0 + 4, lanes[lane].name);
    for (int stalls = 0; stalls < 2; stalls++)
        for (size_t i = 0; i < s->n; i++)
            if (s->span[i].is_stall == (stalls == 1)) draw_span(out, p, &s->span[i], n_layers);
}

static double panel_height(const panel *p)
{
    return 26 + count_lanes(p) * LANE + PANEL_GAP - 26;
}

typedef struct picture {
    const char *title;
    spans spans;
    int64_t n_layers;
} picture;

static void draw(const void *user, FILE *out)
{
    const picture *pic = user;
    const spans *s = &pic->spans;
    panel forward = choose_panel(s, "forward", pic->n_layers / 2);
    panel backward = choose_panel(s, "backward", pic->n_layers / 2);

    forward.y = TOP;
    backward.y = TOP + panel_height(&forward);
    double legend = backward.y + panel_height(&backward);
    bl_svg_begin(out, WIDTH, legend + 24, pic->title, ": the streams of a rank");
    draw_panel(out, &forward, s, pic->n_layers);
    draw_panel(out, &backward, s, pic->n_layers);
    fprintf(out,
            "<rect x=\"%d\" y=\"%.1f\" width=\"14\" height=\"14\" fill=\"#c8c8c8\"/>\n"
            "<text x=\"%d\" y=\"%.1f\">compute waits</text>\n</svg>\n",
            LEFT, legend, LEFT + 22, legend + 12);
}

bl_status bl_time_draw(const bl_time_input *input, const char *title, const char *path)
{
    picture pic = {.title = title, .n_layers = input->model->n_layers};
    bl_status st = bl_time_trace(input, BL_TIME_FIRST_PASS, BL_TIME_AFTER_STEP, keep, &pic.spans);

    if (st == BL_OK && pic.spans.ran_out) st = BL_FAIL(BL_ENOMEM, "the picture %s", path);
    if (st == BL_OK) st = bl_svg_write(path, draw, &pic);
    free(pic.spans.span);
    return st;
}
