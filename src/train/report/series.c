/* SPDX-License-Identifier: Apache-2.0 */
/* series.c -- reads a metrics log; when all bins of a series are full, neighbors are merged. */
#include "train/report/series.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* `next` has later steps. */
static void merge(bl_series_bin *bin, const bl_series_bin *next)
{
    if (bin->n == 0) {
        *bin = *next;
        return;
    }
    bin->last_step = next->last_step;
    bin->n += next->n;
    bin->loss_sum += next->loss_sum;
    bin->loss_least = fmin(bin->loss_least, next->loss_least);
    bin->loss_most = fmax(bin->loss_most, next->loss_most);
    bin->seconds += next->seconds;
    bin->tokens += next->tokens;
    bin->learning_rate = next->learning_rate;
    for (int lane = 0; lane < BL_N_LANES; lane++) {
        bin->stall_s[lane] += next->stall_s[lane];
        bin->moved_bytes[lane] += next->moved_bytes[lane];
    }
}

static void halve(bl_series *s)
{
    for (int64_t i = 0; i < s->n_bins; i++) {
        if (i % 2 == 0)
            s->bin[i / 2] = s->bin[i];
        else
            merge(&s->bin[i / 2], &s->bin[i]);
    }
    s->n_bins = (s->n_bins + 1) / 2;
    s->per_bin *= 2;
}

static void add(bl_series *s, const bl_series_bin *one)
{
    bool is_least = s->total.n == 0 || one->loss_sum < s->total.loss_least;

    if (s->total.n == 0) {
        s->first = *one;
        s->per_bin = 1;
    }
    if (is_least) s->least_step = one->first_step;
    s->last = *one;
    merge(&s->total, one);
    bool is_full = s->n_bins == 0 || s->bin[s->n_bins - 1].n == s->per_bin;
    if (is_full && s->n_bins == BL_SERIES_BINS) halve(s);
    is_full = s->n_bins == 0 || s->bin[s->n_bins - 1].n == s->per_bin;
    if (is_full) s->bin[s->n_bins++] = (bl_series_bin){.n = 0};
    merge(&s->bin[s->n_bins - 1], one);
}

/* Finite numbers only: null, as of mfu, is not there. */
static bool get(const json_t *line, const char *key, double *value)
{
    const json_t *found = json_object_get(line, key);

    if (!json_is_number(found)) return false;
    *value = json_number_value(found);
    return isfinite(*value) != 0;
}

static void read_lanes(const json_t *line, bl_series_bin *one)
{
    char key[48];

    for (int lane = BL_LANE_COMPUTE + 1; lane < BL_N_LANES; lane++) {
        snprintf(key, sizeof key, "%s_stall_s", bl_lane_name((bl_lane)lane));
        if (!get(line, key, &one->stall_s[lane])) one->stall_s[lane] = 0;
        snprintf(key, sizeof key, "%s_bytes", bl_lane_name((bl_lane)lane));
        if (!get(line, key, &one->moved_bytes[lane])) one->moved_bytes[lane] = 0;
    }
}

/* False: the line is not a step, nor an evaluation. */
static bool take_line(const json_t *line, bl_run_series *out)
{
    bl_series_bin one = {.n = 1};
    double step;

    if (!json_is_object(line) || !get(line, "step", &step) || step < 0 || step > 9007199254740992.0)
        return false;
    one.first_step = one.last_step = (int64_t)step;
    bool is_step = get(line, "loss", &one.loss_sum);
    if (!is_step && !get(line, "eval_loss", &one.loss_sum)) return false;
    one.loss_least = one.loss_most = one.loss_sum;
    if (!get(line, is_step ? "step_s" : "eval_s", &one.seconds)) return false;
    if (is_step) {
        if (!get(line, "tokens", &one.tokens)) return false;
        if (!get(line, "learning_rate", &one.learning_rate)) return false;
        read_lanes(line, &one);
    }
    add(is_step ? &out->steps : &out->evaluations, &one);
    return true;
}

static bl_status read_line(const char *path, int64_t number, const char *text, size_t n,
                           bl_run_series *out)
{
    json_t *line = NULL;

    bl_status st = bl_json_parse(path, number, text, n, &line);
    if (st == BL_ENOMEM) return st;
    if (st != BL_OK || !take_line(line, out)) out->n_skipped++;
    json_decref(line);
    return BL_OK;
}

bl_status bl_run_series_read(const char *path, int64_t n_bytes, bl_run_series *out)
{
    char *text = NULL;
    size_t capacity = 0;
    bl_status st = BL_OK;
    int64_t at = 0;

    *out = (bl_run_series){.n_skipped = 0};
    FILE *file = fopen(path, "re");
    if (!file) return bl_fail_errno(BL_EIO, "open %s", path);
    for (int64_t number = 1; st == BL_OK && at < n_bytes; number++) {
        ssize_t n = getline(&text, &capacity, file);
        if (n <= 0) break;
        at += n;
        st = read_line(path, number, text, (size_t)n, out);
    }
    if (st == BL_OK && ferror(file)) st = bl_fail_errno(BL_EIO, "read %s", path);
    if (st == BL_OK && at < n_bytes && !feof(file)) st = BL_FAIL(BL_ENOMEM, "a line of %s", path);
    free(text);
    fclose(file);
    return st;
}
