/* SPDX-License-Identifier: Apache-2.0 */
/* report_panel.c -- draws axes, lines and areas. */
#include <math.h>

#include "base/sizes.h"
#include "base/svg.h"
#include "train/report/report_internal.h"

void train_panel_fit(report_panel *p, double least, double most, double floor)
{
    const double MARGIN = 0.06, AROUND = 0.05;
    double range = most - least;

    if (range <= 1e-12 * fmax(fabs(least), fabs(most)))
        range = most != 0 ? 2 * AROUND * fabs(most) / (2 * MARGIN) : 1;
    p->y0 = fmax(least - MARGIN * range, floor);
    p->y1 = most + MARGIN * range;
}

double train_panel_x(const report_panel *p, double x)
{
    return p->left + (x - p->x0) / (p->x1 - p->x0) * p->width;
}

double train_panel_y(const report_panel *p, double y)
{
    return p->top + p->height - (y - p->y0) / (p->y1 - p->y0) * p->height;
}

/* 1, 2 or 5 times a power of ten: at most n_most of them in `range`. */
static double tick_of(double range, double n_most)
{
    static const double steps[] = {1, 2, 5, 10};
    double unit = pow(10, floor(log10(range / n_most)));

    for (int i = 0; i < 4; i++)
        if (range / (unit * steps[i]) <= n_most) return unit * steps[i];
    return 10 * unit;
}

static void draw_x_axis(FILE *out, const report_panel *p)
{
    double tick = fmax(tick_of(p->x1 - p->x0, 10), 1);
    double bottom = p->top + p->height;

    for (double x = ceil(p->x0 / tick) * tick; x <= p->x1; x += tick) {
        double at = train_panel_x(p, x);
        fprintf(out,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#e6e6e6\"/>\n"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"11\" "
                "fill=\"#666\">%.0f</text>\n",
                at, p->top, at, bottom, at, bottom + 15, x);
    }
}

static void draw_y_axis(FILE *out, const report_panel *p, const char *format)
{
    double tick = tick_of(p->y1 - p->y0, p->height > 150 ? 7 : 4);
    char text[32];

    for (double n = ceil(p->y0 / tick - 1e-9); n * tick <= p->y1 + 1e-9 * tick; n++) {
        double value = n * tick + 0.0 /* not -0 */, at = train_panel_y(p, value);
        snprintf(text, sizeof text, format, value);
        fprintf(out,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#e6e6e6\"/>\n"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\" font-size=\"11\" "
                "fill=\"#666\">%s</text>\n",
                p->left, at, p->left + p->width, at, p->left - 8, at + 4, text);
    }
}

void train_panel_begin(FILE *out, const report_panel *p, const char *format)
{
    fprintf(out,
            "<g id=\"%s\" data-x=\"%.17g %.17g\" data-y=\"%.17g %.17g\" data-box=\"%g %g %g %g\">\n"
            "<text x=\"%.1f\" y=\"%.1f\" font-weight=\"bold\">",
            p->id, p->x0, p->x1, p->y0, p->y1, p->left, p->top, p->width, p->height, p->left,
            p->top - 10);
    bl_svg_text(out, p->title);
    fputs("</text>\n", out);
    draw_x_axis(out, p);
    draw_y_axis(out, p, format);
    fprintf(out,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" "
            "stroke=\"#bbb\"/>\n",
            p->left, p->top, p->width, p->height);
}

void train_panel_end(FILE *out)
{
    fputs("</g>\n", out);
}

static void put_point(FILE *out, const report_panel *p, double x, double y)
{
    fprintf(out, " %.2f,%.2f", train_panel_x(p, x), train_panel_y(p, y));
}

void train_panel_smooth_line(FILE *out, const report_panel *p, const char *id, const char *style,
                             const bl_series *s, report_value_fn value, int64_t around)
{
    if (s->n_bins == 1) {
        fprintf(out, "<circle r=\"2\" cx=\"%.2f\" cy=\"%.2f\" class=\"%s\" fill=\"none\" %s/>\n",
                train_panel_x(p, (double)s->bin[0].last_step), train_panel_y(p, value(s->bin)), id,
                style);
        return;
    }
    fprintf(out, "<polyline class=\"%s\" fill=\"none\" stroke-linejoin=\"round\" %s points=\"", id,
            style);
    for (int64_t i = 0; i < s->n_bins; i++) {
        int64_t reach = bl_min_i64(around, bl_min_i64(i, s->n_bins - 1 - i));
        double sum = 0;
        for (int64_t k = i - reach; k <= i + reach; k++) sum += value(&s->bin[k]);
        put_point(out, p, (double)s->bin[i].last_step, sum / (double)(2 * reach + 1));
    }
    fputs("\"/>\n", out);
}

void train_panel_line(FILE *out, const report_panel *p, const char *id, const char *style,
                      const bl_series *s, report_value_fn value)
{
    train_panel_smooth_line(out, p, id, style, s, value, 0);
}

void train_panel_area(FILE *out, const report_panel *p, const char *id, const char *style,
                      const bl_series *s, const double *lower, const double *upper)
{
    fprintf(out, "<polygon class=\"%s\" %s points=\"", id, style);
    /* Each bin is as wide as its steps. */
    for (int64_t i = 0; i < s->n_bins; i++) {
        put_point(out, p, (double)s->bin[i].first_step - 1, upper[i]);
        put_point(out, p, (double)s->bin[i].last_step, upper[i]);
    }
    for (int64_t i = s->n_bins - 1; i >= 0; i--) {
        put_point(out, p, (double)s->bin[i].last_step, lower[i]);
        put_point(out, p, (double)s->bin[i].first_step - 1, lower[i]);
    }
    fputs("\"/>\n", out);
}
