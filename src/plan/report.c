/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- a plan on one screen. */
#include "plan/report.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "base/sizes.h"

static const double GB = 1e9;

double bl_plan_report_seconds(const bl_plan_report *r)
{
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

/* "131,072" */
static const char *grouped(double number, char text[32])
{
    char plain[32];
    size_t n = (size_t)snprintf(plain, sizeof plain, "%.0f", number), at = 0;
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0) text[at++] = ',';
        text[at++] = plain[i];
    }
    text[at] = '\0';
    return text;
}

/* "50.73", or "-" for nothing; three digits at least. */
static const char *amount(double n_bytes, char text[32])
{
    double gb = n_bytes / GB;
    if (n_bytes == 0)
        snprintf(text, 32, "-");
    else
        snprintf(text, 32, gb < 0.0095 ? "%.4f" : gb < 0.0995 ? "%.3f" : "%.2f", gb);
    return text;
}

/* "bf16", "FP8", "FP8, 4 of 504 matrices in bf16: ...". */
static void describe_products(const bl_plan_report *r, char text[160])
{
    const bl_time_products *p = &r->time->products;
    bool is_cuda = r->c->hardware.kind == BL_DEVICE_CUDA;
    int64_t n_bf16 = p->n_matrices - p->n_fp8;

    if (r->config->compute_dtype != BL_COMPUTE_FP8 || n_bf16 == 0) {
        snprintf(text, 160, "%s", !is_cuda ? "fp32" : p->n_fp8 > 0 ? "FP8" : "bf16");
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

static void print_head(const bl_plan_report *r, FILE *out)
{
    const bl_plan_case *c = r->c;
    const bl_hardware *h = &c->hardware;
    const bl_topology *t = &c->input.topology;
    char held[BL_BASE_FORMATS_TEXT_BYTES], stored[BL_BASE_FORMATS_TEXT_BYTES], a[32], b[32];
    char products[160];
    int n_targets = 0;

    for (int p = 0; p < BL_PROJECTIONS; p++) n_targets += c->lora.a_offset[p] >= 0;
    bl_llama_base_formats_list_held(&c->model.base_formats, held);
    bl_llama_base_formats_list_stored(&c->model.base_formats, stored);
    fprintf(out, "Model    %.40s: %.4g B parameters, %lld layers\n", c->model.name,
            (double)bl_llama_config_n_params(&c->model.config) * 1e-9,
            (long long)c->model.config.n_layers);
    fprintf(out, "         projections %.36s in memory, %.36s in the checkpoint\n", held, stored);
    if (c->model.note) fprintf(out, "         %s\n", c->model.note);
    fprintf(out, "Adapter  LoRA r %lld on %d projections of a layer: %.4g M parameters\n",
            (long long)c->lora.options.r, n_targets,
            (double)(c->lora.n_floats * c->model.config.n_layers) * 1e-6);
    fprintf(out, "Machine  %s: %d x %s, %s GB of host memory%s\n", h->name,
            h->n_hosts * h->n_devices, h->device, grouped(h->host_memory_bytes.value / GB, a),
            h->n_hosts > 1 ? " a host" : "");
    if (h->kind == BL_DEVICE_CUDA && h->arch < 80)
        fprintf(out, "         (Ballast's GPU code needs compute capability 8.0, this has %d.%d)\n",
                h->arch / 10, h->arch % 10);
    int64_t sequences =
        r->config->per_device_train_batch_size * r->config->gradient_accumulation_steps;
    describe_products(r, products);
    fprintf(out, "Step     %d rank%s x %lld sequence%s of %s tokens = %s tokens; products in %s\n",
            t->n_ranks, t->n_ranks == 1 ? "" : "s", (long long)sequences, sequences == 1 ? "" : "s",
            grouped((double)c->input.longest_train_row, a),
            grouped((double)(sequences * c->input.longest_train_row * t->n_ranks), b), products);
}

static void print_memory(const bl_plan_report *r, FILE *out)
{
    const bl_memory_ledger *m = &r->plan->memory;
    const bl_hardware *h = &r->c->hardware;
    const bl_topology *t = &r->c->input.topology;
    bool is_gpu = h->kind == BL_DEVICE_CUDA;
    int64_t host = 0, n_processes = bl_plan_processes_on_host(t);
    char a[32], b[32];

    fprintf(out, "\nMemory of a rank, GB       %10s %10s\n", is_gpu ? "GPU" : "host",
            is_gpu ? "host" : "");
    for (int i = 0; i < BL_MEMORY_ITEMS; i++) {
        bl_memory_amount n = m->item[i];
        if (!is_gpu) n = (bl_memory_amount){n.device + n.host, 0};
        host += n.host;
        if (n.device + n.host == 0) continue;
        fprintf(out, "  %-24s %10s %10s\n", bl_memory_item_name((bl_memory_item)i),
                amount((double)n.device, a), is_gpu ? amount((double)n.host, b) : "");
    }
    if (is_gpu) {
        fprintf(out, "  %-24s %10s %10s   of %.1f GB a GPU: %.0f %%\n", "sum",
                amount((double)m->device, a), amount((double)host, b),
                h->device_memory_bytes.value / GB,
                100 * (double)m->device / h->device_memory_bytes.value);
    }
    fprintf(out, "A host: %.1f of %.1f GB of memory, with %s embedding of %.2f GB%s",
            (double)(m->total * n_processes) / GB, h->host_memory_bytes.value / GB,
            m->shared > 0 || n_processes == 1 ? "one" : "an", (double)m->embedding / GB,
            m->shared > 0 || n_processes == 1 ? "" : " a process");
    if (m->disk > 0)
        fprintf(out, "; %.1f of %s GB of disk", (double)(m->disk * t->n_on_host) / GB,
                grouped(h->disk_bytes.value / GB, a));
    fputs("\n", out);
}

const char *bl_plan_report_peak(const bl_plan_report *r)
{
    return r->c->hardware.kind != BL_DEVICE_CUDA ? "fp32"
           : r->time->products.n_fp8 > 0         ? "FP8"
                                                 : "bf16";
}

static void print_time(const bl_plan_report *r, FILE *out)
{
    const bl_time_estimate *e = r->time;
    char a[32];

    fprintf(out, "\nTime of a step       seconds    part   bound by\n");
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        const bl_time_part *part = &e->part[p];
        fprintf(out, "  %-14s %11.3f  %4.0f %%   %s\n", bl_time_phase_name((bl_time_phase)p),
                part->seconds, 100 * part->seconds / e->step_s, bl_lane_name(part->bound));
    }
    fprintf(out, "  %-14s %11.3f           %s tokens/s", "sum", e->step_s,
            grouped(e->tokens_per_s, a));
    if (e->mfu > 0)
        fprintf(out, ", MFU %.1f %% of the %s peak", 100 * e->mfu, bl_plan_report_peak(r));
    fputs("\n", out);
    double hours = bl_plan_report_seconds(r) / 3600, kwh = bl_plan_report_joules(r) / 3.6e6;
    fprintf(out, "%s tokens take %.*f hours", grouped(r->total_tokens, a), hours < 10 ? 2 : 1,
            hours);
    if (kwh > 0) fprintf(out, " and %.*f kWh", kwh < 10 ? 2 : 0, kwh);
    fputs("\n", out);
}

static void print_keys(const bl_train_config *c, const bl_plan *plan, FILE *out)
{
    const char *tier = plan->placement.tier == BL_TIER_DISK ? "disk" : "host";

    fprintf(out, "offload_ratio %.2f, offload_tier %s, ring_depth %lld, shard_size %lld,\n",
            plan->placement.ratio, tier, (long long)c->ring_depth, (long long)c->shard_size);
    fprintf(out,
            "         activation_checkpointing %s, activation_offload %s, visit_tokens %lld,\n",
            bl_plan_save_name(plan->pass.save), plan->pass.offload_activations ? "true" : "false",
            (long long)(plan->pass.max_group * plan->pass.T_max));
    fprintf(out, "         per_device_train_batch_size %lld, gradient_accumulation_steps %lld\n",
            (long long)c->per_device_train_batch_size, (long long)c->gradient_accumulation_steps);
}

/* A list that is broken before column 100. */
typedef struct list {
    FILE *out;
    int column, n;
} list;

static void say(list *l, const char *format, ...) BL_PRINTF(2, 3);
static void say(list *l, const char *format, ...)
{
    enum { LAST = 98, INDENT = 9 };
    char text[96];
    va_list arguments;

    va_start(arguments, format);
    int n_bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    bool is_next = l->n++ > 0, breaks = l->column + n_bytes > LAST;
    if (is_next) l->column += fprintf(l->out, breaks ? "," : ", ");
    if (breaks) l->column = fprintf(l->out, "\n%*s", INDENT, "") - 1;
    l->column += fprintf(l->out, "%s", text);
}

/* The keys in which b differs from a. */
static void print_difference(const bl_plan_option *a, const bl_plan_option *b, list *l)
{
    const bl_train_config *x = &a->config, *y = &b->config;
    int64_t visit_a = a->plan.pass.max_group * a->plan.pass.T_max,
            visit_b = b->plan.pass.max_group * b->plan.pass.T_max;

    if (x->offload_ratio != y->offload_ratio) say(l, "offload_ratio %.2f", y->offload_ratio);
    if (x->offload_tier != y->offload_tier)
        say(l, "offload_tier %s", y->offload_tier == BL_OFFLOAD_DISK ? "disk" : "host");
    if (a->plan.pass.save != b->plan.pass.save)
        say(l, "activation_checkpointing %s", bl_plan_save_name(b->plan.pass.save));
    if (x->activation_offload != y->activation_offload)
        say(l, "activation_offload %s", y->activation_offload ? "true" : "false");
    if (x->per_device_train_batch_size != y->per_device_train_batch_size) {
        say(l, "per_device_train_batch_size %lld", (long long)y->per_device_train_batch_size);
        say(l, "gradient_accumulation_steps %lld", (long long)y->gradient_accumulation_steps);
    }
    if (visit_a != visit_b) say(l, "visit_tokens %lld", (long long)visit_b);
    if (x->ring_depth != y->ring_depth) say(l, "ring_depth %lld", (long long)y->ring_depth);
    if (x->shard_size != y->shard_size) say(l, "shard_size %lld", (long long)y->shard_size);
}

static void print_choice(const bl_plan_report *r, FILE *out)
{
    char a[32];

    fprintf(out, "\nKeys     ");
    print_keys(r->config, r->plan, out);
    if (!r->choice) return;
    const bl_plan_option *best = &r->choice->best, *second = &r->choice->second;
    fprintf(out, "         the fastest of %lld combinations that fit, of %lld\n",
            (long long)r->choice->n_fit, (long long)r->choice->n_options);
    if (second->time.tokens_per_s == 0) return;
    list l = {.out = out};
    l.column =
        fprintf(out, "Second   %s tokens/s (%+.1f %%) with ", grouped(second->time.tokens_per_s, a),
                100 * (second->time.tokens_per_s / best->time.tokens_per_s - 1));
    print_difference(best, second, &l);
    fputs("\n", out);
}

/* The rates that decide, where they come from. */
static void print_rates(const bl_plan_report *r, FILE *out)
{
    const bl_hardware *h = &r->c->hardware;
    bool is_gpu = h->kind == BL_DEVICE_CUDA, is_fp8 = r->time->products.n_fp8 > 0;
    const bl_figure *gemm = !is_gpu  ? &h->f32_gemm_flops_per_s
                            : is_fp8 ? &h->fp8_gemm_flops_per_s
                                     : &h->bf16_gemm_flops_per_s;

    fprintf(out, "Rates    products %.4g TFLOP/s (%s)\n", gemm->value * 1e-12, gemm->source);
    if (r->c->input.topology.n_ranks > 1)
        fprintf(out, "         gathers %.4g GB/s (%s)\n", h->gather_bytes_per_s.value / GB,
                h->gather_bytes_per_s.source);
    if (r->plan->placement.ratio > 0 || r->plan->pass.offload_activations)
        fprintf(out, "         copies %.4g GB/s (%s)\n", h->copy_in_bytes_per_s.value / GB,
                h->copy_in_bytes_per_s.source);
    fprintf(out, "         --json has them all; docs/model.md says what the model leaves out\n");
}

void bl_plan_report_print(const bl_plan_report *r, FILE *out)
{
    print_head(r, out);
    print_memory(r, out);
    print_time(r, out);
    print_choice(r, out);
    print_rates(r, out);
}
