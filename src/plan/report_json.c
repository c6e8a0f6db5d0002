/* SPDX-License-Identifier: Apache-2.0 */
/* report_json.c -- a plan as a JSON document (`ballast plan --json`). */
#include "base/json.h"
#include "base/sizes.h"
#include "plan/forward_only_internal.h"
#include "plan/report_internal.h"

static json_t *describe_items(const bl_memory_ledger *m, bool is_trained)
{
    json_t *items = json_array();
    for (int i = 0; i < BL_MEMORY_ITEMS; i++)
        json_array_append_new(items, json_pack("{s:s, s:I, s:I}", "item",
                                               bl_memory_item_name((bl_memory_item)i, is_trained),
                                               "device_bytes", (json_int_t)m->item[i].device,
                                               "host_bytes", (json_int_t)m->item[i].host));
    return items;
}

static json_t *describe_memory(const bl_plan_report *r)
{
    const bl_memory_ledger *m = &r->plan->memory;
    const bl_topology *t = &r->c->input.topology;
    int64_t n_processes = bl_plan_processes_on_host(t), checkpoint = 0;

    if (plan_report_checkpoint_bytes(r, &checkpoint) != BL_OK) return NULL;
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "rank",
                     describe_items(m, bl_train_config_is_full(r->config)), "device_bytes_per_rank",
                     (json_int_t)m->device, "embedding_bytes_per_host",
                     (json_int_t)bl_memory_embedding_bytes(m, t), "bytes_per_process",
                     (json_int_t)m->total, "loading_bytes_per_process", (json_int_t)m->loading,
                     "host_bytes_per_host", (json_int_t)(m->total * n_processes),
                     "disk_bytes_per_host", (json_int_t)(m->disk * t->n_on_host), "model_bytes",
                     (json_int_t)r->c->model.stored.n_bytes, "checkpoint_bytes",
                     (json_int_t)checkpoint);
}

static json_t *describe_time(const bl_plan_report *r)
{
    const bl_time_estimate *e = r->time;
    json_t *phases = json_array();
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        const bl_time_part *part = &e->part[p];
        json_array_append_new(phases, json_pack("{s:s, s:f, s:f, s:s}", "phase",
                                                bl_time_phase_name((bl_time_phase)p), "seconds",
                                                part->seconds, "compute_seconds", part->compute_s,
                                                "bound_by", bl_lane_name(part->bound)));
    }
    return json_pack("{s:f, s:f, s:f, s:f, s:s, s:I, s:I, s:o}", "step_seconds", e->step_s,
                     "tokens_per_s", e->tokens_per_s, "model_flops_per_step", e->model_flops, "mfu",
                     e->mfu, "mfu_peak", bl_plan_report_peak(r), "fp8_matrices",
                     (json_int_t)e->products.n_fp8, "matrices", (json_int_t)e->products.n_matrices,
                     "phases", phases);
}

/* Adds the chosen keys of full fine-tuning. */
static json_t *add_full_keys(const bl_train_config *c, const bl_plan *plan, json_t *keys)
{
    if (!bl_train_config_is_full(c) || !keys) return keys;
    json_t *more =
        json_pack("{s:s, s:f, s:b}", "optimizer_tier",
                  plan_optimizer_tier_name(plan->optimizer.tier), "optimizer_ratio",
                  plan->optimizer.ratio, "offload_compute_copy", plan->placement.places_copy);
    if (!more || json_object_update(keys, more) != 0) {
        json_decref(keys);
        keys = NULL;
    }
    json_decref(more);
    return keys;
}

static json_t *describe_keys(int64_t n_layers, const bl_train_config *c, const bl_plan *plan)
{
    json_t *keys = json_pack(
        "{s:f, s:s, s:f, s:s, s:I, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "offload_ratio",
        plan->placement.ratio, "offload_tier",
        plan->placement.tier == BL_TIER_DISK ? "disk" : "host", "offload_host_part",
        plan->placement.host_part, "activation_checkpointing", bl_plan_save_name(plan->pass.save),
        "activation_checkpointing_layers", (json_int_t)(n_layers - plan->pass.n_saving_all),
        "activation_offload", plan->pass.offload_activations, "per_device_train_batch_size",
        (json_int_t)c->per_device_train_batch_size, "gradient_accumulation_steps",
        (json_int_t)c->gradient_accumulation_steps, "visit_tokens",
        (json_int_t)(plan->pass.max_group * plan->pass.T_max), "ring_depth",
        (json_int_t)c->ring_depth, "shard_size", (json_int_t)c->shard_size, "ranks",
        (json_int_t)c->ranks, "sum_block", (json_int_t)c->sum_block, "gather_by_hosts",
        c->gather_by_hosts);
    return add_full_keys(c, plan, keys);
}

static json_t *describe_second(int64_t n_layers, const bl_plan_choice *choice)
{
    const bl_plan_option *o = &choice->second;
    if (o->time.tokens_per_s == 0) return json_null();
    json_t *second = describe_keys(n_layers, &o->config, &o->plan);
    json_object_set_new(second, "tokens_per_s", json_real(o->time.tokens_per_s));
    return second;
}

static json_t *describe_model(const bl_plan_case *c)
{
    int64_t n_all = bl_model_config_n_params(&c->model.config),
            n_lora = bl_lora_n_weights(&c->lora, c->model.config.n_layers);
    char formats[BL_BASE_FORMATS_TEXT_BYTES];

    bl_base_formats_list_held(&c->model.base_formats, formats);
    json_t *model = json_pack(
        "{s:s, s:I, s:I, s:s, s:I, s:I}", "name", c->model.name, "parameters", (json_int_t)n_all,
        "layers", (json_int_t)c->model.config.n_layers, "base_format", formats, "lora_parameters",
        (json_int_t)n_lora, "trained_parameters",
        (json_int_t)(bl_train_config_is_full(c->config) ? c->trained.n_weights
                                                        : n_lora + c->modules.set.n_weights));
    return model;
}

/* In the order of the runs; null: out of memory. */
static bl_status describe_forward_only(const bl_plan_report *r, json_t **out)
{
    bl_plan_input in = r->c->input;
    bl_plan_forward_only passes;
    bl_status st = BL_OK;

    in.config = r->config;
    *out = json_array();
    for (int i = 0; st == BL_OK && i <= in.n_others; i++) {
        st = bl_plan_estimate_forward_only(&in, r->plan, i, &passes);
        if (st == BL_OK)
            json_array_append_new(*out, bl_plan_forward_only_describe(&in, i, &passes));
    }
    if (st != BL_OK) json_decref(*out);
    return st;
}

static json_t *describe_run(const bl_plan_report *r)
{
    const bl_plan_rows *rows = &r->c->input.rows;

    return json_pack("{s:I, s:I, s:f, s:I, s:f, s:I, s:f}", "steps", (json_int_t)rows->n_steps,
                     "rows", (json_int_t)rows->n_used, "epochs",
                     (double)rows->n_used / (double)rows->n_rows, "evaluations",
                     (json_int_t)rows->n_evaluations, "evaluation_seconds",
                     r->expected->evaluation_s, "checkpoints", (json_int_t)rows->n_checkpoints,
                     "seconds", r->expected->run_s);
}

bl_status bl_plan_report_describe(const bl_plan_report *r, json_t **out)
{
    json_t *hardware, *passes;

    bl_json_watch_memory();
    BL_TRY(describe_forward_only(r, &passes));
    bl_status st = bl_hardware_describe(&r->c->hardware, &hardware);
    if (st != BL_OK) {
        json_decref(passes);
        return st;
    }
    *out = json_pack("{s:i, s:o, s:o, s:I, s:o, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:f}",
                     "plan_version", 1, "model", describe_model(r->c), "hardware", hardware,
                     "row_tokens", (json_int_t)r->c->input.longest_train_row, "keys",
                     describe_keys(r->c->model.config.n_layers, r->config, r->plan), "memory",
                     describe_memory(r), "time", describe_time(r), "forward_only", passes,
                     "total_tokens", r->total_tokens, "total_seconds", bl_plan_report_seconds(r),
                     "total_joules", bl_plan_report_joules(r), "load_seconds",
                     bl_plan_report_load_seconds(r), "price", bl_plan_report_price(r));
    if (*out && r->choice) {
        json_object_set_new(*out, "options_tried", json_integer(r->choice->n_options));
        json_object_set_new(*out, "options_that_fit", json_integer(r->choice->n_fit));
        json_object_set_new(*out, "second_best",
                            describe_second(r->c->model.config.n_layers, r->choice));
    }
    if (*out && r->expected) json_object_set_new(*out, "run", describe_run(r));
    if (*out && r->together)
        json_object_set_new(*out, "together", bl_plan_together_describe(r->together, r->time));
    if (*out && !bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "the plan as JSON");
}
