/* SPDX-License-Identifier: Apache-2.0 */
/* report_details.c -- prints the details of a plan after its dozen lines (`ballast plan
 * --details`): memory by item, disks, time by phase and by kind of op, rates and their sources. */
#include <stdlib.h>

#include "base/sizes.h"
#include "plan/report_internal.h"

/* "50.73", or "-" for nothing; three digits at least. */
static const char *amount(double n_bytes, char text[PLAN_NUMBER_BYTES])
{
    double gb = n_bytes / PLAN_GB;
    if (n_bytes == 0)
        snprintf(text, PLAN_NUMBER_BYTES, "-");
    else
        snprintf(text, PLAN_NUMBER_BYTES, gb < 0.0095 ? "%.4f" : gb < 0.0995 ? "%.3f" : "%.2f", gb);
    return text;
}

static void print_memory(const bl_plan_report *r, FILE *out)
{
    const bl_memory_ledger *m = &r->plan->memory;
    bool is_gpu = r->c->hardware.kind == BL_DEVICE_CUDA;
    int64_t host = 0, n_processes = bl_plan_processes_on_host(&r->c->input.topology);
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    fprintf(out, "\nMemory per rank, GB        %10s %10s\n", is_gpu ? "GPU" : "host",
            is_gpu ? "host" : "");
    for (int i = 0; i < BL_MEMORY_ITEMS; i++) {
        bl_memory_amount n = m->item[i];
        if (!is_gpu) n = (bl_memory_amount){n.device + n.host, 0};
        host += n.host;
        if (n.device + n.host == 0) continue;
        fprintf(out, "  %-24s %10s %10s\n",
                bl_memory_item_name((bl_memory_item)i, bl_train_config_is_full(r->config)),
                amount((double)n.device, a), is_gpu ? amount((double)n.host, b) : "");
    }
    if (is_gpu)
        fprintf(out, "  %-24s %10s %10s\n", "sum", amount((double)m->device, a),
                amount((double)host, b));
    bool is_one = m->shared > 0 || n_processes == 1;
    if (m->embedding == 0) {
        fprintf(out, "Per host: %s GB\n", plan_gb((double)(m->total * n_processes), a));
        return;
    }
    fprintf(out, "Per host: %s GB, with %s embedding of %s GB%s\n",
            plan_gb((double)(m->total * n_processes), a), is_one ? "one" : "an",
            amount((double)m->embedding, b), is_one ? "" : " per process");
}

static bl_status print_disk(const bl_plan_report *r, FILE *out)
{
    const bl_memory_ledger *m = &r->plan->memory;
    int64_t checkpoint = 0;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    BL_TRY(plan_report_checkpoint_bytes(r, &checkpoint));
    fprintf(out, "Disk: the model %s GB, %s %s GB", plan_gb((double)r->c->model.stored.n_bytes, a),
            r->together ? "a checkpoint of each run together" : "each checkpoint",
            plan_gb((double)checkpoint, b));
    if (m->disk > 0)
        fprintf(out, ", page files per host %s of %s GB",
                plan_gb((double)(m->disk * r->c->input.topology.n_on_host), a),
                plan_gb(r->c->hardware.disk_bytes.value, b));
    fputs("\n", out);
    return BL_OK;
}

static void print_time(const bl_plan_report *r, FILE *out)
{
    const bl_time_estimate *e = r->time;
    char a[PLAN_NUMBER_BYTES];

    fprintf(out, "\nTime per %-5s       seconds    part   bound by\n",
            r->together ? "round" : "step");
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        const bl_time_part *part = &e->part[p];
        fprintf(out, "  %-14s %11s  %4.0f %%   %s\n", bl_time_phase_name((bl_time_phase)p),
                plan_predicted(part->seconds, a), 100 * part->seconds / e->step_s,
                bl_lane_name(part->bound));
    }
    fprintf(out, "  %-14s %11s\n", "sum", plan_predicted(e->step_s, a));
    if (r->choice)
        fprintf(out, "Chosen from %lld combinations that fit, of %lld\n",
                (long long)r->choice->n_fit, (long long)r->choice->n_options);
}

static void add_amount(bl_time_amount *sum, const bl_time_amount *a)
{
    sum->seconds += a->seconds;
    sum->bytes += a->bytes;
    sum->flops += a->flops;
}

static void print_line(const bl_time_budget_line *line, FILE *out)
{
    bl_time_amount all = {0, 0, 0};
    char ms[BL_TIME_DIRECTIONS][PLAN_NUMBER_BYTES];

    for (int d = 0; d < BL_TIME_DIRECTIONS; d++) {
        add_amount(&all, &line->part[d]);
        plan_predicted(1e3 * line->part[d].seconds, ms[d]);
    }
    if (all.seconds == 0) return;
    fprintf(out, "  %-19s %6s %11s %9s %9.2f %8.2f\n", line->name, ms[BL_TIME_OF_FORWARD],
            ms[BL_TIME_OF_RECOMPUTATION], ms[BL_TIME_OF_BACKWARD], all.bytes / PLAN_GB,
            1e-12 * all.flops);
}

/* Compute alone, of the layers that recompute, where some do. */
static bl_status print_layer(const bl_plan_report *r, FILE *out)
{
    bl_plan_input in = r->c->input;
    bl_plan_time time;
    bl_time_budget budget;
    bl_time_budget_line sum = {.name = "sum"};

    in.config = r->config;
    BL_TRY(bl_plan_time_open(&in, r->plan, &time));
    bl_status st = bl_time_budget_layer(&time.input, &budget);
    bl_plan_time_close(&time);
    BL_TRY(st);
    fprintf(out, "\nA layer of a micro-batch, ms: forward, recomputed, backward    GB    TFLOP\n");
    for (int i = 0; i < budget.n; i++) {
        print_line(&budget.line[i], out);
        for (int d = 0; d < BL_TIME_DIRECTIONS; d++)
            add_amount(&sum.part[d], &budget.line[i].part[d]);
    }
    print_line(&sum, out);
    return BL_OK;
}

enum { RATE_NAME_COLUMNS = 19 };

static void print_rate(const char *name, const bl_figure *figure, FILE *out)
{
    fprintf(out, "  %-*s %8.4g GB/s     %s\n", RATE_NAME_COLUMNS, name, figure->value / PLAN_GB,
            figure->source);
}

static void print_flops(const char *name, const bl_figure *figure, FILE *out)
{
    if (figure->value > 0)
        fprintf(out, "  %-*s %8.4g TFLOP/s  %s\n", RATE_NAME_COLUMNS, name, figure->value * 1e-12,
                figure->source);
}

/* The rates that decide, and their sources. */
static void print_rates(const bl_plan_report *r, FILE *out)
{
    const bl_hardware *h = &r->c->hardware;
    bool is_gpu = h->kind == BL_DEVICE_CUDA, is_fp8 = r->time->products.n_fp8 > 0;

    fputs("\nRates\n", out);
    if (is_fp8) print_flops("FP8 products", &h->fp8_gemm_flops_per_s, out);
    if (is_fp8 && r->plan->pass.sums != BL_SUMS_FULL)
        print_flops("with fast sums", &h->fp8_fast_gemm_flops_per_s, out);
    bool is_bf16 = is_gpu || bl_train_config_act(r->config) == BL_BF16;
    print_flops(is_bf16 ? "bf16 products" : "products",
                is_bf16 ? &h->bf16_gemm_flops_per_s : &h->f32_gemm_flops_per_s, out);
    print_flops("attention", &h->attention_forward_flops_per_s, out);
    print_flops("attention, backward", &h->attention_backward_flops_per_s, out);
    if (is_gpu) print_rate("device memory", &h->device_memory_bytes_per_s, out);
    if (r->c->input.topology.n_ranks > 1) print_rate("gathers", &h->gather_bytes_per_s, out);
    if (r->c->hardware.n_hosts > 1) print_rate("network", &h->network_bytes_per_s, out);
    if (r->plan->placement.ratio > 0 || r->plan->pass.offload_activations)
        print_rate("copies", &h->copy_in_bytes_per_s, out);
    if (r->plan->memory.disk > 0) print_rate("disk", &h->disk_read_bytes_per_s, out);
    fputs("  --json has them all; docs/plan.md lists what the model leaves out\n\n", out);
}

bl_status plan_report_print_details(const bl_plan_report *r, FILE *out)
{
    print_memory(r, out);
    BL_TRY(print_disk(r, out));
    print_time(r, out);
    BL_TRY(print_layer(r, out));
    print_rates(r, out);
    return BL_OK;
}
