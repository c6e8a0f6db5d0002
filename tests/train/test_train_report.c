/* SPDX-License-Identifier: Apache-2.0 */
/* report.svg: its curves and sums are the values of metrics.jsonl, after a resume and of one step,
 * too; long logs; on request while a run goes on, and when it stops. */
#include "runs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/report/report.h"
#include "train/report/series.h"

enum { EXIT_STOPPED = 75, MAX_POINTS = 1024 };

static const double LIMIT_S = 600;

static char *read_report(const char *output)
{
    char path[GOLDEN_PATH_BYTES + 16];

    snprintf(path, sizeof path, "%s/report.svg", output);
    char *text = runs_read(path, NULL);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    assert_string_equal(text + strlen(text) - 7, "</svg>\n");
    return text;
}

/* ---- curves ---- */

typedef struct curve {
    double x[MAX_POINTS], y[MAX_POINTS]; /* values, not pixels */
    double x_error, y_error;             /* of a position with two decimals */
    int n;
} curve;

/* The points of a line or dot of that class in that panel, by the panel's own scales. */
static void read_curve(const char *svg, const char *panel, const char *class, curve *out)
{
    char key[64];
    double x0, x1, y0, y1, left, top, width, height, px, py;
    int used;

    snprintf(key, sizeof key, "<g id=\"%s\" data-x=\"", panel);
    const char *at = strstr(svg, key);
    if (!at) fail_msg("no panel %s", panel);
    assert_int_equal(sscanf(at + strlen(key),
                            "%lf %lf\" data-y=\"%lf %lf\" data-box=\"%lf %lf %lf %lf", &x0, &x1,
                            &y0, &y1, &left, &top, &width, &height),
                     8);
    snprintf(key, sizeof key, "class=\"%s\"", class);
    const char *curve_at = strstr(at, key),
               *points = curve_at ? strstr(curve_at, "points=\"") : NULL;
    if (!curve_at) fail_msg("no curve %s", class);
    out->n = 0;
    out->x_error = 0.0051 / width * (x1 - x0);
    out->y_error = 0.0051 / height * (y1 - y0);
    const char *end = strstr(curve_at, "/>");
    if (points && points < end) {
        for (at = points + 8; sscanf(at, " %lf,%lf%n", &px, &py, &used) == 2; at += used) {
            assert_true(out->n < MAX_POINTS);
            out->x[out->n] = x0 + (px - left) / width * (x1 - x0);
            out->y[out->n++] = y0 + (top + height - py) / height * (y1 - y0);
        }
        return;
    }
    while (curve_at > svg && *curve_at != '<') curve_at--;
    assert_int_equal(sscanf(curve_at, "<circle r=\"2\" cx=\"%lf\" cy=\"%lf\"", &px, &py), 2);
    out->x[0] = x0 + (px - left) / width * (x1 - x0);
    out->y[0] = y0 + (top + height - py) / height * (y1 - y0);
    out->n = 1;
}

/* Every line of the log with that key is a point, and there is no other. */
static void expect_curve(const char *svg, const json_t *log, const char *panel, const char *class,
                         const char *key)
{
    curve *c = malloc(sizeof *c);
    int n = 0;

    assert_non_null(c);
    read_curve(svg, panel, class, c);
    for (size_t i = 0; i < json_array_size(log); i++) {
        const json_t *line = json_array_get(log, i), *value = json_object_get(line, key);
        if (!value) continue;
        assert_true(n < c->n);
        double step = json_number_value(json_object_get(line, "step"));
        assert_true(fabs(c->x[n] - step) <= c->x_error);
        /* The log has step_s, of which the speed is made, to 1e-6. */
        double of_time = 0.51e-6 / json_number_value(json_object_get(line, "step_s")),
               error = c->y_error;
        if (!strcmp(key, "tokens_per_s")) error += of_time * json_number_value(value);
        if (!(fabs(c->y[n] - json_number_value(value)) <= error))
            fail_msg("%s of step %g: %g, in the log %g", key, step, c->y[n],
                     json_number_value(value));
        n++;
    }
    assert_int_equal(n, c->n);
    free(c);
}

static void expect_evaluations(const char *svg, const json_t *log)
{
    char text[128];

    for (size_t i = 0; i < json_array_size(log); i++) {
        const json_t *line = json_array_get(log, i), *loss = json_object_get(line, "eval_loss");
        if (!loss) continue;
        snprintf(text, sizeof text, "<title>step %lld: validation loss %.6g</title>",
                 (long long)json_integer_value(json_object_get(line, "step")),
                 json_number_value(loss));
        if (!strstr(svg, text)) fail_msg("no '%s' in: %s", text, svg);
    }
}

static double sum_of(const json_t *log, const char *key)
{
    double sum = 0;

    for (size_t i = 0; i < json_array_size(log); i++)
        sum += json_number_value(json_object_get(json_array_get(log, i), key));
    return sum;
}

/* The seconds in the row of that name; -1: there is none. */
static double row_s(const char *svg, const char *name)
{
    char key[96];
    double seconds;

    snprintf(key, sizeof key, ">%s</text>", name);
    const char *at = strstr(strstr(svg, "<g id=\"where\">"), key);
    if (!at) return -1;
    at = strstr(at, "text-anchor=\"end\">");
    assert_int_equal(sscanf(at + strlen("text-anchor=\"end\">"), "%lf s<", &seconds), 1);
    return seconds;
}

static void expect_sums(const char *svg, const json_t *log)
{
    static const char *const lanes[] = {"gather", "copy", "disk", "activations", "lora"};
    double stalls = 0;
    char key[64];

    for (size_t i = 0; i < BL_COUNT(lanes); i++) {
        snprintf(key, sizeof key, "%s_stall_s", lanes[i]);
        double expected = sum_of(log, key);
        stalls += expected;
        snprintf(key, sizeof key, "waiting for: %s", lanes[i]);
        double shown = row_s(svg, key);
        if (expected > 0 || shown >= 0) assert_true(fabs(shown - expected) <= 0.00051);
    }
    assert_true(fabs(row_s(svg, "compute") - fmax(sum_of(log, "step_s") - stalls, 0)) <= 0.00051);
    if (sum_of(log, "eval_s") > 0)
        assert_true(fabs(row_s(svg, "evaluations") - sum_of(log, "eval_s")) <= 0.00051);
}

static void expect_values(const char *output)
{
    char *svg = read_report(output);
    json_t *log = golden_metrics(output);

    expect_curve(svg, log, "loss", "train_loss", "loss");
    expect_curve(svg, log, "learning_rate", "learning_rate", "learning_rate");
    expect_curve(svg, log, "tokens_per_s", "tokens_per_s", "tokens_per_s");
    expect_evaluations(svg, log);
    expect_sums(svg, log);
    json_decref(log);
    free(svg);
}

/* ---- runs ---- */

static void train(golden_args *args)
{
    assert_int_equal(golden_train(args), BL_OK);
    golden_args_free(args);
}

static void test_values(void **state)
{
    const char *output = runs_path("values");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, output, 2);
    train(&args);
    expect_values(output);
    runs_assert_listed(output);
    char *svg = read_report(output);
    assert_non_null(strstr(svg, ">tiny-gqa: step 8 of 8</text>"));
    assert_non_null(strstr(svg, ">8 steps, "));
    free(svg);
}

/* The steps before the resumed one are in it, those after it once. */
static void test_resume(void **state)
{
    const char *output = runs_path("resumed");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, output, 1);
    train(&args);
    assert_int_equal(bl_tree_remove(runs_path("resumed/checkpoints/step-8")), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("resumed/checkpoints/step-7")), BL_OK);
    runs_standard(&args, output, 1);
    runs_set(&args, "resume_from_checkpoint", "true");
    train(&args);
    expect_values(output);
    runs_assert_listed(output);
}

/* With and without validation: no value is the range of all. */
static void test_one_step(void **state)
{
    (void)state;
    for (int validates = 0; validates <= 1; validates++) {
        const char *output = runs_path("one-%d", validates);
        golden_args args = {0};
        runs_standard(&args, output, 1);
        runs_set(&args, "max_steps", "1");
        if (!validates) runs_unset(&args, "validation_file");
        if (!validates) runs_set(&args, "eval_strategy", "no");
        train(&args);
        expect_values(output);
        char *svg = read_report(output);
        assert_non_null(strstr(svg, ">1 step, "));
        free(svg);
    }
}

/* A user's file of that name stays. */
static void test_other_file(void **state)
{
    const char *output = runs_path("other"), *path = runs_path("other/report.svg");
    golden_args args = {0};

    (void)state;
    assert_int_equal(bl_dir_create(output), BL_OK);
    runs_write(path, "<svg>mine</svg>");
    runs_standard(&args, output, 1);
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "report.svg"));
    golden_args_free(&args);
    char *text = runs_read(path, NULL);
    assert_string_equal(text, "<svg>mine</svg>");
    free(text);
}

/* ---- long logs ---- */

enum { N_LINES = 5000 };

/* Steps 1 to 5000 of loss 10 - step / 1000; of it 3 lines that are not steps. */
static int64_t write_log(const char *path)
{
    char *text;
    size_t n;
    FILE *file = open_memstream(&text, &n);

    assert_non_null(file);
    for (int i = 1; i <= N_LINES; i++) {
        fprintf(file,
                "{\"step\":%d,\"loss\":%.12g,\"learning_rate\":0.001,\"tokens\":100,\"step_s\":0.5,"
                "\"mfu\":null,\"disk_bytes\":7,\"disk_stall_s\":0.125}\n",
                i, 10 - i / 1000.0);
        if (i % 1000 == 0)
            fprintf(file, "{\"step\":%d,\"eval_loss\":%d,\"eval_s\":2}\n", i, abs(3000 - i));
    }
    fputs("not JSON\n{\"step\":1}\n{\"step\":5001,\"loss\":null}\n{\"step\":5002,\"lo", file);
    fclose(file);
    runs_write(path, text);
    free(text);
    return (int64_t)n;
}

static void test_many_steps(void **state)
{
    const char *path = runs_path("long.jsonl"), *svg_path = runs_path("long.svg");
    const bl_report report = {.model = "/models/a <&\xff> b//", .total_steps = 6000};
    bl_run_series *run = malloc(sizeof *run);
    int64_t n_bytes = write_log(path), n = 0;
    double loss = 0;
    bool is_written;

    (void)state;
    assert_non_null(run);
    assert_int_equal(bl_run_series_read(path, n_bytes, run), BL_OK);
    const bl_series *s = &run->steps;
    assert_int_equal(run->n_skipped, 4);
    assert_in_range(s->n_bins, BL_SERIES_BINS / 2, BL_SERIES_BINS);
    for (int64_t i = 0; i < s->n_bins; i++) {
        const bl_series_bin *bin = &s->bin[i];
        assert_int_equal(bin->first_step, n + 1);
        assert_int_equal(bin->last_step, n + bin->n);
        assert_true(i + 1 == s->n_bins || bin->n == s->per_bin);
        double first = 10 - (double)bin->first_step / 1000,
               last = 10 - (double)bin->last_step / 1000;
        assert_true(fabs(bin->loss_sum / (double)bin->n - (first + last) / 2) < 1e-12);
        assert_true(fabs(bin->loss_most - first) < 1e-12);
        assert_true(fabs(bin->loss_least - last) < 1e-12);
        n += bin->n;
        loss += bin->loss_sum;
    }
    assert_int_equal(n, N_LINES);
    assert_true(fabs(loss - (10 * N_LINES - N_LINES * (N_LINES + 1) / 2 / 1000.0)) < 1e-8);
    assert_true(s->total.seconds == N_LINES * 0.5 && s->total.tokens == N_LINES * 100);
    assert_true(s->total.stall_s[BL_LANE_DISK] == N_LINES * 0.125);
    assert_true(s->total.moved_bytes[BL_LANE_DISK] == N_LINES * 7);
    assert_int_equal(run->evaluations.n_bins, 5);
    assert_int_equal(run->evaluations.least_step, 3000);
    /* A part of the log, as while it grows. */
    assert_int_equal(bl_run_series_read(path, n_bytes / 2, run), BL_OK);
    assert_in_range(s->total.n, N_LINES / 2 - 50, N_LINES / 2 + 50);
    free(run);

    assert_int_equal(bl_report_write(path, n_bytes, &report, svg_path, &is_written), BL_OK);
    assert_true(is_written);
    char *svg = runs_read(svg_path, NULL);
    assert_non_null(strstr(svg, ">a &lt;&amp;?> b: step 5000 of 6000</text>"));
    assert_non_null(strstr(svg, "lowest 0.0000 at step 3000"));
    assert_non_null(strstr(svg, "could not be read: 4."));
    assert_true(fabs(row_s(svg, "waiting for: disk") - N_LINES * 0.125) < 1e-9);
    assert_true(fabs(row_s(svg, "evaluations") - 10) < 1e-9);
    free(svg);

    /* Without a step nothing is written. */
    assert_int_equal(bl_tree_remove(svg_path), BL_OK);
    assert_int_equal(bl_report_write(path, 0, &report, svg_path, &is_written), BL_OK);
    assert_false(is_written);
    assert_false(bl_file_exists(svg_path));
}

/* ---- signals ---- */

static void wait_for_text(const runs_child *child, const char *text)
{
    for (bool said = false; !said;) {
        assert_true(runs_is_alive(child));
        char *log = bl_file_exists(child->log) ? runs_read(child->log, NULL) : NULL;
        said = log && strstr(log, text);
        free(log);
        if (!said) runs_sleep_s(0.002);
    }
}

/* Threads, and processes, whose parent takes the signal: the run goes on, and ends as it was asked
 * to later. */
static void test_signal(void **state)
{
    (void)state;
    for (int processes = 0; processes <= 1; processes++) {
        const char *output = runs_path("signal-%d", processes),
                   *path = runs_path("signal-%d/report.svg", processes);
        golden_args args = {0};
        runs_child child = {0};
        runs_standard(&args, output, 2);
        runs_set(&args, "rank_processes", processes ? "true" : "false");
        runs_set(&args, "max_steps", "10000000");
        runs_set(&args, "save_steps", "0");
        runs_set(&args, "eval_strategy", "no");
        runs_start(&child, "train", &args);
        while (runs_logged_steps(output) < 3) {
            assert_true(runs_is_alive(&child));
            runs_sleep_s(0.002);
        }
        assert_false(bl_file_exists(path));
        kill(child.pid, SIGUSR2);
        wait_for_text(&child, "report written to ");
        char *svg = read_report(output);
        assert_non_null(strstr(svg, " of 10000000</text>"));
        free(svg);
        kill(child.pid, SIGTERM);
        assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_STOPPED);
        runs_assert_stopped(&child, "stopped on request after step ");
        json_t *log = golden_metrics(output);
        char text[64];
        snprintf(text, sizeof text, ": step %lld of 10000000</text>",
                 (long long)runs_logged_steps(output));
        svg = read_report(output);
        if (!strstr(svg, text)) fail_msg("no '%s' in: %.800s", text, svg);
        expect_sums(svg, log);
        json_decref(log);
        free(svg);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),     cmocka_unit_test(test_resume),
        cmocka_unit_test(test_one_step),   cmocka_unit_test(test_other_file),
        cmocka_unit_test(test_many_steps), cmocka_unit_test(test_signal),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
