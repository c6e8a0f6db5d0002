/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- prints a plan in a dozen lines. */
#include "plan/report_internal.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "trained/full.h"
#include "trained/state.h"
#include "base/sizes.h"
#include "comm/comm.h"
#include "plan/forward_only_internal.h"

/* ---- amounts ---- */

double bl_plan_report_seconds(const bl_plan_report *r)
{
    if (r->expected) return r->expected->run_s;
    return r->time->tokens_per_s > 0 ? r->total_tokens / r->time->tokens_per_s : 0;
}

double bl_plan_report_joules(const bl_plan_report *r)
{
    const bl_hardware *h = &r->c->hardware;
    const bl_topology *t = &r->c->input.topology;
    double n_hosts = ceil((double)t->n_ranks / t->n_on_host);
    double devices = h->kind == BL_DEVICE_CUDA ? h->device_watts.value * t->n_ranks : 0;
    if (h->host_watts.value == 0) return 0;
    return (devices + h->host_watts.value * n_hosts) * bl_plan_report_seconds(r);
}

/* Where ranks of several hosts share one copy, each host reads its part of the checkpoint. */
double bl_plan_report_load_seconds(const bl_plan_report *r)
{
    const bl_hardware *h = &r->c->hardware;
    const bl_topology *t = &r->c->input.topology;
    double n_shards = bl_plan_n_shards(r->config, t), pinned = 0, seconds = 0;
    double part = fmin(1, t->n_on_host / n_shards);

    for (int i = 0; i < BL_MEMORY_ITEMS; i++) pinned += (double)r->plan->memory.item[i].host;
    if (h->disk_read_bytes_per_s.value > 0)
        seconds += part * (double)r->c->model.stored.n_bytes / h->disk_read_bytes_per_s.value;
    if (h->pin_bytes_per_s.value > 0) seconds += pinned * t->n_on_host / h->pin_bytes_per_s.value;
    return seconds;
}

bl_status plan_report_checkpoint_bytes(const bl_plan_report *r, int64_t *n_bytes)
{
    const bl_model_config *model = &r->c->model.config;

    if (bl_train_config_is_full(r->config))
        return bl_trained_full_checkpoint_bytes(model, &r->c->trained, r->c->input.topology.n_ranks,
                                                bl_train_config_moments(r->config), n_bytes);
    *n_bytes = 0; /* of all runs */
    for (int i = 0; i <= r->c->input.n_others; i++)
        *n_bytes += bl_adapter_checkpoint_bytes(bl_plan_run_at(&r->c->input, i).lora, model,
                                                r->c->input.modules);
    return BL_OK;
}

double bl_plan_report_price(const bl_plan_report *r)
{
    return r->price_per_hour * (bl_plan_report_seconds(r) + bl_plan_report_load_seconds(r)) / 3600;
}

const char *bl_plan_report_peak(const bl_plan_report *r)
{
    return bl_train_config_act(r->config) == BL_F32 ? "fp32"
           : r->time->products.n_fp8 > 0            ? "FP8"
                                                    : "bf16";
}

static double host_bytes(const bl_plan_report *r, const bl_memory_ledger *m)
{
    return (double)m->total * (double)bl_plan_processes_on_host(&r->c->input.topology);
}

/* ---- text ---- */

/* "131,072" */
static const char *format_number(double number, char text[PLAN_NUMBER_BYTES])
{
    char plain[PLAN_NUMBER_BYTES];
    size_t n = (size_t)snprintf(plain, sizeof plain, "%.0f", number), at = 0;
    for (size_t i = 0; i < n && at + 2 < PLAN_NUMBER_BYTES; i++) {
        if (i > 0 && (n - i) % 3 == 0) text[at++] = ',';
        text[at++] = plain[i];
    }
    text[at] = '\0';
    return text;
}

const char *plan_gb(double n_bytes, char text[PLAN_NUMBER_BYTES])
{
    double gb = n_bytes / PLAN_GB;
    if (gb >= 99.95) return format_number(gb, text);
    snprintf(text, PLAN_NUMBER_BYTES, "%.*f", gb < 0.0995 ? 3 : gb < 9.995 ? 2 : 1, gb);
    return text;
}

const char *plan_predicted(double number, char text[PLAN_NUMBER_BYTES])
{
    int power = number > 0 ? (int)floor(log10(number)) : 0;
    double unit = pow(10, power - 1), rounded = round(number / unit) * unit;

    if (rounded >= 9.95) return format_number(rounded, text);
    snprintf(text, PLAN_NUMBER_BYTES, "%.*f", rounded >= pow(10, power + 1) ? -power : 1 - power,
             rounded);
    return text;
}

/* "70.55 B", "134.5 M", "0.82 M" */
static const char *format_parameters(double n, char text[PLAN_NUMBER_BYTES])
{
    snprintf(text, PLAN_NUMBER_BYTES,
             n >= 1e9   ? "%.4g B"
             : n >= 1e6 ? "%.4g M"
                        : "%.2g M",
             n >= 1e9 ? n * 1e-9 : n * 1e-6);
    return text;
}

/* Words that are broken between them before column PLAN_COLUMN_LAST, by `separator` (", "; " "
 * becomes " \" at an end). */
typedef struct word_list {
    FILE *out;
    const char *separator;
    int column, n;
} word_list;

static void BL_PRINTF(2, 3) add_word(word_list *l, const char *format, ...)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES + 32];
    va_list arguments;

    va_start(arguments, format);
    int n_bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    bool is_flags = l->separator[0] == ' ', is_next = l->n++ > 0,
         breaks = l->column + n_bytes > PLAN_COLUMN_LAST;
    if (is_next)
        l->column += fprintf(l->out, "%s", breaks ? (is_flags ? " \\" : ",") : l->separator);
    if (breaks) l->column = fprintf(l->out, "\n%*s", PLAN_INDENT, "") - 1;
    l->column += fprintf(l->out, "%s", text);
}

/* "bf16", "FP8", "FP8, but 4 of 504 matrices in bf16: ...". */
static void describe_products(const bl_plan_report *r, char text[160])
{
    const bl_time_products *p = &r->time->products;
    int64_t n_bf16 = p->n_matrices - p->n_fp8;

    if (r->config->compute_dtype != BL_COMPUTE_FP8 || n_bf16 == 0) {
        snprintf(text, 160, "%s", bl_plan_report_peak(r));
        return;
    }
    const char *why = p->reason == BL_FALLBACK_COUNT ? "compute_bf16_modules"
                                                     : bl_matmul_fallback_text(p->reason);
    if (p->n_fp8 == 0)
        snprintf(text, 160, "bf16,\n         none in FP8: %s", why);
    else
        snprintf(text, 160, "FP8,\n         but %lld of %lld matrices in bf16: %s",
                 (long long)n_bf16, (long long)p->n_matrices, why);
}

/* ---- the lines ---- */

static void print_trained(const bl_plan_case *c, double n_params, FILE *out)
{
    char chosen[BL_TRAINED_TEXT_BYTES];

    bl_trained_describe(&c->model.config, &c->trained, chosen);
    if (c->trained.is_all)
        fprintf(out, "\nTrained  every weight: %.4g M parameters\n", n_params * 1e-6);
    else
        fprintf(out, "\nTrained  %s\n", chosen);
}

static void print_model(const bl_plan_report *r, FILE *out)
{
    const bl_plan_case *c = r->c;
    char held[BL_BASE_FORMATS_TEXT_BYTES], stored[BL_BASE_FORMATS_TEXT_BYTES];
    char a[PLAN_NUMBER_BYTES];
    int n_targets = 0;

    for (int p = 0; p < c->lora.arch->n_projections; p++)
        n_targets += bl_lora_has(&c->lora, c->model.config.n_layers - 1, p);
    bl_base_formats_list_held(&c->model.base_formats, held);
    bl_base_formats_list_stored(&c->model.base_formats, stored);
    bool is_full = bl_train_config_is_full(r->config);
    double n_params = (double)bl_model_config_n_params(&c->model.config);
    word_list l = {.out = out, .separator = ", "};
    l.column = fprintf(out, "Model    ");
    add_word(&l, "%.40s: %s parameters", c->model.name, format_parameters(n_params, a));
    add_word(&l, "%s in memory", held);
    add_word(&l, "%s in the checkpoint", stored);
    if (is_full) {
        print_trained(c, n_params, out);
        return;
    }
    if (r->together) {
        fprintf(out, "\nAdapters %d over one base\n", r->together->n);
        return;
    }
    fprintf(
        out, "\nAdapter  LoRA r %lld on %d projection%s per layer: %s parameters\n",
        (long long)c->lora.options.r, n_targets, n_targets == 1 ? "" : "s",
        format_parameters((double)bl_lora_floats_before(&c->lora, c->model.config.n_layers), a));
    if (c->lora.n_table_floats > 0)
        fprintf(out, "         terms of embedding or head: %.4g M, whole on every rank\n",
                (double)c->lora.n_table_floats * 1e-6);
    if (c->modules.names.n > 0)
        fprintf(out, "         modules_to_save: %.4g M in %lld tensors, whole on every rank\n",
                (double)c->modules.set.n_weights * 1e-6, (long long)c->modules.set.n_tensors);
}

static void print_machine(const bl_plan_report *r, FILE *out)
{
    const bl_hardware *h = &r->c->hardware;
    char a[PLAN_NUMBER_BYTES];

    fprintf(out, "Machine  %s: %d x %s, %s GB of memory per host\n", h->name,
            h->n_hosts * h->n_devices, h->device, plan_gb(h->host_memory_bytes.value, a));
}

/* A step of each run. */
static void print_round(const bl_plan_report *r, const char *products, FILE *out)
{
    const bl_topology *t = &r->c->input.topology;
    int64_t tokens = 0;
    char a[PLAN_NUMBER_BYTES];

    for (int i = 0; i < r->together->n; i++) {
        bl_plan_run run = bl_plan_run_at(&r->c->input, i);
        tokens += run.config->per_device_train_batch_size *
                  run.config->gradient_accumulation_steps * run.longest_train_row;
    }
    fprintf(out, "Round    %d rank%s x a step of each run = %s tokens; products in %s\n",
            t->n_ranks, t->n_ranks == 1 ? "" : "s", format_number((double)(tokens * t->n_ranks), a),
            products);
}

static void print_step(const bl_plan_report *r, FILE *out)
{
    const bl_topology *t = &r->c->input.topology;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES], products[160];
    int64_t sequences =
        r->config->per_device_train_batch_size * r->config->gradient_accumulation_steps;

    describe_products(r, products);
    if (r->together) {
        print_round(r, products, out);
        return;
    }
    fprintf(out, "Step     %d rank%s x %lld sequence%s of %s tokens = %s tokens; products in %s\n",
            t->n_ranks, t->n_ranks == 1 ? "" : "s", (long long)sequences, sequences == 1 ? "" : "s",
            format_number((double)r->c->input.longest_train_row, a),
            format_number((double)(sequences * r->c->input.longest_train_row * t->n_ranks), b),
            products);
}

static void print_part(const char *name, double bytes, double of, FILE *out)
{
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];
    fprintf(out, "%s %s of %s GB (%.0f %%)", name, plan_gb(bytes, a), plan_gb(of, b),
            100 * bytes / of);
}

static void print_memory(const bl_plan_report *r, FILE *out)
{
    const bl_memory_ledger *m = &r->plan->memory;
    const bl_hardware *h = &r->c->hardware;
    char a[PLAN_NUMBER_BYTES];

    fputs("Memory   ", out);
    if (h->kind == BL_DEVICE_CUDA) {
        print_part("each GPU", (double)m->device, h->device_memory_bytes.value, out);
        fputs(", ", out);
    }
    print_part("each host", host_bytes(r, m), h->host_memory_bytes.value, out);
    if (m->disk > 0)
        fprintf(out, ", page files %s GB",
                plan_gb((double)m->disk * r->c->input.topology.n_on_host, a));
    fputs("\n", out);
}

/* "9.9 hours", "51 days", "12 years" */
static void describe_duration(double seconds, char text[PLAN_NUMBER_BYTES])
{
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{365.25 * 86400, "years"}, {86400, "days"}, {3600, "hours"}, {60, "minutes"}};
    size_t i = 0;

    while (i < BL_COUNT(units) && seconds < 2 * units[i].seconds) i++;
    double number = i < BL_COUNT(units) ? seconds / units[i].seconds : seconds;
    char a[PLAN_NUMBER_BYTES];
    snprintf(text, PLAN_NUMBER_BYTES, "%.20s %s", plan_predicted(number, a),
             i < BL_COUNT(units) ? units[i].name : "seconds");
}

/* ", 2 evaluations", or nothing. */
static void print_count(int64_t n, const char *name, FILE *out)
{
    if (n > 0) fprintf(out, ", %lld %s%s", (long long)n, name, n == 1 ? "" : "s");
}

static void print_run(const bl_plan_report *r, FILE *out)
{
    const bl_plan_rows *rows = &r->c->input.rows;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    describe_duration(bl_plan_report_seconds(r), a);
    if (!r->expected) {
        fprintf(out, "\nTime     %s for %s tokens", a, format_number(r->total_tokens, b));
        return;
    }
    fprintf(out, "\nTime     %s for this run: %lld step%s of %s rows (%.3g epochs)", a,
            (long long)rows->n_steps, rows->n_steps == 1 ? "" : "s",
            format_number((double)rows->n_used, b), (double)rows->n_used / (double)rows->n_rows);
    print_count(rows->n_evaluations, "evaluation", out);
    print_count(rows->n_checkpoints, "checkpoint", out);
}

static void print_time(const bl_plan_report *r, FILE *out)
{
    const bl_time_estimate *e = r->time;
    double kwh = bl_plan_report_joules(r) / 3.6e6, load_s = bl_plan_report_load_seconds(r);
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    fprintf(out, "Speed    %s tokens/s, %s s per %s, bound by %s",
            plan_predicted(e->tokens_per_s, a), plan_predicted(e->step_s, b),
            r->together ? "round" : "step", bl_lane_name(bl_time_bound(e)));
    if (e->mfu > 0 && r->c->hardware.kind == BL_DEVICE_CUDA)
        fprintf(out, "; MFU %s %% of the %s peak", plan_predicted(100 * e->mfu, a),
                bl_plan_report_peak(r));
    print_run(r, out);
    if (kwh > 0) fprintf(out, ", %s kWh", plan_predicted(kwh, a));
    if (r->price_per_hour > 0)
        fprintf(out, ", price %s", plan_predicted(bl_plan_report_price(r), a));
    describe_duration(load_s, b);
    if (load_s > 0)
        fprintf(out, "; at least %s to load %s GB", b,
                plan_gb((double)r->c->model.stored.n_bytes, a));
    fputs("\n", out);
}

const char *plan_optimizer_tier_name(bl_tier tier)
{
    return tier == BL_TIER_DISK ? "disk" : tier == BL_TIER_HOST ? "host" : "device";
}

/* To be copied behind `ballast train`. */
static void print_keys(const bl_plan_report *r, FILE *out)
{
    const bl_train_config *c = r->config;
    const bl_plan *plan = r->plan;
    word_list l = {.out = out, .separator = " "};

    l.column = fprintf(out, "Keys     ");
    if (bl_train_config_is_full(c)) {
        add_word(&l, "--finetuning_type full");
        add_word(&l, "--optimizer_tier %s", plan_optimizer_tier_name(plan->optimizer.tier));
        if (plan->optimizer.tier != BL_TIER_DEVICE)
            add_word(&l, "--optimizer_ratio %.2f", plan->optimizer.ratio);
        if (plan->placement.ratio > 0)
            add_word(&l, "--offload_compute_copy %s",
                     plan->placement.places_copy ? "true" : "false");
    }
    add_word(&l, "--offload_ratio %.2f", plan->placement.ratio);
    add_word(&l, "--offload_tier %s", plan->placement.tier == BL_TIER_DISK ? "disk" : "host");
    if (plan->placement.tier == BL_TIER_DISK)
        add_word(&l, "--offload_host_part %.2f", plan->placement.host_part);
    add_word(&l, "--activation_checkpointing %s", bl_plan_save_name(plan->pass.save));
    if (plan->pass.n_saving_all > 0)
        add_word(&l, "--activation_checkpointing_layers %lld",
                 (long long)c->activation_checkpointing_layers);
    add_word(&l, "--activation_offload %s", plan->pass.offload_activations ? "true" : "false");
    if (!r->together) { /* each run has its own */
        add_word(&l, "--per_device_train_batch_size %lld",
                 (long long)c->per_device_train_batch_size);
        add_word(&l, "--gradient_accumulation_steps %lld",
                 (long long)c->gradient_accumulation_steps);
    }
    add_word(&l, "--visit_tokens %lld", (long long)(plan->pass.max_group * plan->pass.T_max));
    add_word(&l, "--ring_depth %lld", (long long)c->ring_depth);
    add_word(&l, "--shard_size %lld", (long long)c->shard_size);
    if (c->gather_by_hosts) add_word(&l, "--gather_by_hosts true");
    if (c->sum_block != BL_COMM_SUM_BLOCK)
        add_word(&l, "--sum_block %lld", (long long)c->sum_block);
    fputs("\n", out);
}

/* The keys in which b differs from a. */
static void print_difference(int64_t n_layers, const bl_plan_option *a, const bl_plan_option *b,
                             word_list *l)
{
    const bl_train_config *x = &a->config, *y = &b->config;
    int64_t visit_a = a->plan.pass.max_group * a->plan.pass.T_max,
            visit_b = b->plan.pass.max_group * b->plan.pass.T_max;

    if (x->offload_ratio != y->offload_ratio) add_word(l, "offload_ratio %.2f", y->offload_ratio);
    if (x->offload_tier != y->offload_tier)
        add_word(l, "offload_tier %s", y->offload_tier == BL_OFFLOAD_DISK ? "disk" : "host");
    if (x->offload_host_part != y->offload_host_part)
        add_word(l, "offload_host_part %.2f", y->offload_host_part);
    if (a->plan.optimizer.tier != b->plan.optimizer.tier)
        add_word(l, "optimizer_tier %s", plan_optimizer_tier_name(b->plan.optimizer.tier));
    if (a->plan.optimizer.ratio != b->plan.optimizer.ratio)
        add_word(l, "optimizer_ratio %.2f", b->plan.optimizer.ratio);
    if (a->plan.placement.places_copy != b->plan.placement.places_copy)
        add_word(l, "offload_compute_copy %s", b->plan.placement.places_copy ? "true" : "false");
    if (a->plan.pass.save != b->plan.pass.save)
        add_word(l, "activation_checkpointing %s", bl_plan_save_name(b->plan.pass.save));
    if (a->plan.pass.n_saving_all != b->plan.pass.n_saving_all && b->plan.pass.save != BL_SAVE_S4)
        add_word(l, "activation_checkpointing_layers %lld",
                 (long long)(n_layers - b->plan.pass.n_saving_all));
    if (x->activation_offload != y->activation_offload)
        add_word(l, "activation_offload %s", y->activation_offload ? "true" : "false");
    if (x->per_device_train_batch_size != y->per_device_train_batch_size) {
        add_word(l, "per_device_train_batch_size %lld", (long long)y->per_device_train_batch_size);
        add_word(l, "gradient_accumulation_steps %lld", (long long)y->gradient_accumulation_steps);
    }
    if (visit_a != visit_b) add_word(l, "visit_tokens %lld", (long long)visit_b);
    if (x->ring_depth != y->ring_depth) add_word(l, "ring_depth %lld", (long long)y->ring_depth);
    if (x->shard_size != y->shard_size) add_word(l, "shard_size %lld", (long long)y->shard_size);
}

static void print_second(const bl_plan_report *r, FILE *out)
{
    const bl_plan_option *best = &r->choice->best, *second = &r->choice->second;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    if (second->time.tokens_per_s == 0) return;
    word_list l = {.out = out, .separator = ", "};
    l.column = fprintf(out, "Or       %s tokens/s (%+.1f %%), each host %s GB: ",
                       plan_predicted(second->time.tokens_per_s, a),
                       100 * (second->time.tokens_per_s / best->time.tokens_per_s - 1),
                       plan_gb(host_bytes(r, &second->plan.memory), b));
    print_difference(r->c->model.config.n_layers, best, second, &l);
    fputs("\n", out);
}

/* Seconds per step that another configuration would save, if at least a hundredth; else 0. */
static bl_status saving_of(const bl_plan_report *r, const bl_train_config *config, double *out_s)
{
    static const double LEAST = 1e-2;
    bl_plan_input in = r->c->input;
    bl_time_estimate time;

    in.config = config;
    BL_TRY(bl_plan_estimate(&in, r->plan, &time));
    *out_s = r->time->step_s - time.step_s;
    if (*out_s < LEAST * r->time->step_s) *out_s = 0;
    return BL_OK;
}

/* The time that blocks of a host's ranks would save if blocks span hosts, and that of gathers by
 * hosts. */
static bl_status print_savings(const bl_plan_report *r, FILE *out)
{
    const bl_topology *t = &r->c->input.topology;
    const char *step = r->together ? "round" : "step";
    bl_train_config config = *r->config;
    double saved_s = 0;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    if (t->n_on_host == t->n_ranks || t->n_on_host == 1) return BL_OK;
    config.sum_block = t->n_on_host;
    if (t->n_on_host % r->config->sum_block != 0) BL_TRY(saving_of(r, &config, &saved_s));
    if (saved_s > 0)
        fprintf(out,
                "Note     --sum_block %d, the ranks of a host, would save %s s per %s (%s %%): "
                "sums of gradients\n         would send fewer bytes over the network\n",
                t->n_on_host, plan_predicted(saved_s, a), step,
                plan_predicted(100 * saved_s / r->time->step_s, b));
    config = *r->config;
    config.gather_by_hosts = true;
    saved_s = 0;
    if (r->c->hardware.kind == BL_DEVICE_CUDA) BL_TRY(saving_of(r, &config, &saved_s));
    if (saved_s > 0)
        fprintf(out,
                "Note     --gather_by_hosts true would save %s s per %s (%s %%): each part of "
                "the weights\n         would enter each host once\n",
                plan_predicted(saved_s, a), step,
                plan_predicted(100 * saved_s / r->time->step_s, b));
    return BL_OK;
}

/* Caveats about the rest. */
static void print_notes(const bl_plan_report *r, bool has_details, FILE *out)
{
    enum { LONG_S = 1000 * 3600 };
    static const double DOUBTFUL_MFU = 0.6, IDLE_HOST = 0.3;
    char a[PLAN_NUMBER_BYTES];
    const bl_hardware *h = &r->c->hardware;

    if (bl_plan_report_seconds(r) > LONG_S)
        fputs(
            "Note     impractical: thousands of hours; use more devices, a smaller model or fewer "
            "tokens\n",
            out);
    double idle = h->host_memory_bytes.value - host_bytes(r, &r->plan->memory);
    if (bl_time_bound(r->time) == BL_LANE_DISK && idle > IDLE_HOST * h->host_memory_bytes.value)
        fprintf(out,
                "Note     %s GB of host memory are unused while the disk binds; "
                "offload_host_part uses it\n",
                plan_gb(idle, a));
    int64_t n_micro = bl_plan_count_micro(&r->c->input);
    if (r->together && r->plan->pass.max_group < n_micro &&
        bl_time_bound(r->time) != BL_LANE_COMPUTE)
        fprintf(
            out,
            "Note     --visit_tokens %lld brings each layer once for all %lld micro-batches of a "
            "round\n",
            (long long)(n_micro * bl_plan_micro_tokens(&r->c->input)), (long long)n_micro);
    if (r->time->mfu > DOUBTFUL_MFU && h->kind == BL_DEVICE_CUDA)
        fprintf(out, "Note     doubtful: few programs reach an MFU above %.0f %%\n",
                100 * DOUBTFUL_MFU);
    if (has_details) return;
    if (h->kind == BL_DEVICE_CUDA)
        fputs("Note     GPU rates are not measured by Ballast; --details has them, and memory by "
              "item\n",
              out);
    else
        fputs("Note     --details has memory by item, and the rates\n", out);
}

static bl_status print_forward_only(const bl_plan_report *r, FILE *out)
{
    bl_plan_input in = r->c->input;
    bl_plan_forward_only passes;

    in.config = r->config;
    for (int i = 0; i <= in.n_others; i++) {
        BL_TRY(bl_plan_estimate_forward_only(&in, r->plan, i, &passes));
        bl_plan_forward_only_print(&in, i,
                                   r->together ? bl_plan_together_name(r->together, i) : NULL,
                                   r->time->step_s, &passes, out);
    }
    return BL_OK;
}

bl_status bl_plan_report_print(const bl_plan_report *r, bool has_details, FILE *out)
{
    print_model(r, out);
    print_machine(r, out);
    print_step(r, out);
    print_memory(r, out);
    print_time(r, out);
    if (r->together) bl_plan_together_print(r->together, r->time, out);
    BL_TRY(print_forward_only(r, out));
    print_keys(r, out);
    if (r->choice) print_second(r, out);
    if (has_details) BL_TRY(plan_report_print_details(r, out));
    BL_TRY(print_savings(r, out));
    print_notes(r, has_details, out);
    return BL_OK;
}
