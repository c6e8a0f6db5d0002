/* SPDX-License-Identifier: Apache-2.0 */
/* plan_data.c -- what `ballast plan` takes from this machine: lengths of the rows of the data, and
 * measured rates. */
#include "cli/plan_data_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "plan/measure.h"
#include "train/data.h"

/* Rows of tokens need no tokenizer; all others need the model's directory. */
static bl_status is_readable(const bl_train_config *c, bool *out)
{
    bool has_data = false, has_model = false;

    if (c->train_file) BL_TRY(bl_path_exists(c->train_file, &has_data));
    BL_TRY(bl_path_exists(c->model_name_or_path, &has_model));
    *out = has_data && (has_model || c->data_format == BL_DATA_TOKENS);
    if (c->train_file && !*out)
        bl_log_info("rows are taken to be full: %s is not here",
                    has_data ? c->model_name_or_path : c->train_file);
    return BL_OK;
}

static bl_status open_data(const bl_train_config *c, const bl_model_config *model,
                           bl_run_data *data)
{
    bool readable;

    BL_TRY(is_readable(c, &readable));
    return readable ? bl_run_data_open_training(c, model, NULL, 1, data) : BL_OK;
}

static void take_data(bl_plan_input *in, const bl_run_data *data)
{
    if (!data->train.set) return;
    in->longest_train_row = data->train.longest;
    in->longest_validation_row = data->validation.longest;
    in->n_validation_rows = data->validation.n;
    in->n_positions = bl_max_i64(1, bl_run_data_positions(in->config, data));
    in->data_bytes = bl_run_data_bytes(data);
    in->tokenizer_bytes = data->tokenizer_bytes;
    in->rows = bl_run_data_measure(in->config, data);
}

static void add_run(bl_plan_case *c, int i, const bl_run_data *data)
{
    bl_plan_input *in = &c->input;
    bl_plan_run run = c->others[i - 1];

    if (data->train.set) {
        run.longest_train_row = data->train.longest;
        run.longest_validation_row = data->validation.longest;
        run.n_validation_rows = data->validation.n;
        run.data_bytes = bl_run_data_bytes(data);
        run.tokenizer_bytes = data->tokenizer_bytes;
        run.rows = bl_run_data_measure(run.config, data);
        in->n_positions = bl_max_i64(in->n_positions, bl_run_data_positions(run.config, data));
    }
    bl_plan_add_run(in, c->others, &run);
}

/* As in a training, all are open before the first is closed: so each takes the memory that it takes
 * there. */
bl_status bl_cli_plan_read_data(bl_plan_case *c)
{
    int n = c->configs.n;
    bl_run_data *data = calloc((size_t)n, sizeof *data);
    bl_status st = data ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: data of %d runs", n);

    for (int i = 0; st == BL_OK && i < n; i++)
        st = open_data(c->configs.run[i], &c->model.config, &data[i]);
    if (st == BL_OK) {
        take_data(&c->input, &data[0]);
        c->input.n_others = 0;
        for (int i = 1; i < n; i++) add_run(c, i, &data[i]);
    }
    for (int i = 0; data && i < n; i++) bl_run_data_close(&data[i]);
    free(data);
    return st;
}

/* The host's figure, which is for all cores, as the rate of the threads measured it. */
static void keep_rate(const bl_plan_case *c, const bl_plan_measured *m, double flops_per_s,
                      bl_figure *out)
{
    snprintf(out->source, sizeof out->source, "measured on this processor, %s, +-%.0f %%", m->date,
             50 * m->scatter);
    out->value = flops_per_s * c->hardware.n_cores / (double)c->config->threads;
}

bl_status bl_cli_plan_measure(bl_plan_case *c, bool wanted, bool again)
{
    bl_plan_measured m;

    if (c->hardware.kind != BL_DEVICE_CPU) return BL_OK;
    if (!wanted || !bl_plan_can_measure(&c->input)) {
        bl_log_warning("rates are a preset's: times may be off by a factor of 2 to 4%s",
                       wanted ? "; too large to measure in seconds" : "");
        return BL_OK;
    }
    BL_TRY(bl_plan_measure(&c->input, again, &m));
    c->measured = m.rates;
    c->input.measured = &c->measured;
    bl_figure *products = bl_train_config_act(c->config) == BL_BF16
                              ? &c->hardware.bf16_gemm_flops_per_s
                              : &c->hardware.f32_gemm_flops_per_s;
    keep_rate(c, &m, m.rates.gemm_flops_per_s, products);
    keep_rate(c, &m, m.rates.attention_forward_flops_per_s,
              &c->hardware.attention_forward_flops_per_s);
    keep_rate(c, &m, m.rates.attention_backward_flops_per_s,
              &c->hardware.attention_backward_flops_per_s);
    bl_log_info("rates of this processor, %s %s: products %.1f GFLOP/s with %lld thread%s, scatter "
                "%.0f %%%s",
                m.is_cached ? "measured" : "measured now,", m.date, m.rates.gemm_flops_per_s * 1e-9,
                (long long)c->config->threads, c->config->threads == 1 ? "" : "s", 100 * m.scatter,
                m.is_cached ? "; --measure again measures anew" : "");
    return BL_OK;
}
