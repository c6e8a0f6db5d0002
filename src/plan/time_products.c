/* SPDX-License-Identifier: Apache-2.0 */
/* time_products.c -- how a step's products are made, its FLOPs, and the compute of a layer by kind
 * of op. */
#include <string.h>

#include "arch/block.h"
#include "base/sizes.h"
#include "ops/cost.h"
#include "plan/run_pass_internal.h"

/* ---- products with frozen matrices ---- */

static bool is_exception(const bl_time_run *run, int matrix)
{
    return run->bf16_matrices >> matrix & 1u;
}

/* Whether products with a matrix are in FP8; *reason: why not. */
static bool is_fp8(const bl_time_input *in, const bl_time_run *run, int matrix,
                   bl_matmul_fallback *reason)
{
    bl_block_dims dims = bl_block_dims_of(in->model, run->kind, in->kind, in->act);
    /* Training pads tokens to whole rows of a block. */
    bl_matmul_weight_args product = {.mode = is_exception(run, matrix) ? BL_MATMUL_BF16 : in->mode,
                                     .T = bl_block_rows(&dims, in->micro_tokens)};

    for (int p = 0; p < in->model->arch->n_projections; p++) {
        int64_t rows, cols;
        if ((int)in->model->arch->projections[p].matrix != matrix ||
            !bl_arch_has(in->model->arch, run->kind, p))
            continue;
        bl_projection_shape(in->model, p, &rows, &cols);
        product.weight.segment[product.weight.n_segments++] =
            (bl_weight_segment){.format = run->format[p], .rows = rows};
        product.weight.rows += rows;
        product.weight.cols = cols;
    }
    *reason = BL_FALLBACK_COUNT;
    return bl_matmul_weight_mode(&product, reason) == BL_MATMUL_FP8 && in->kind == BL_DEVICE_CUDA;
}

void bl_time_count_products(const bl_time_input *in, bl_time_products *out)
{
    *out = (bl_time_products){.reason = BL_FALLBACK_COUNT};
    for (int r = 0; r < in->n_runs; r++)
        for (int matrix = 0; matrix < BL_LAYER_MATRICES; matrix++) {
            const bl_time_run *run = &in->runs[r];
            bl_matmul_fallback reason;
            if (!bl_arch_segment(in->model->arch, run->kind, matrix, 0)) continue;
            out->n_matrices += run->n_layers;
            if (is_fp8(in, run, matrix, &reason)) out->n_fp8 += run->n_layers;
            if (is_exception(run, matrix)) out->n_exceptions += run->n_layers;
            if (out->reason == BL_FALLBACK_COUNT) out->reason = reason;
        }
}

/* ---- FLOPs ---- */

/* Whether modules_to_save include the head. */
static bool has_own_head(const bl_time_input *in)
{
    return in->modules && in->modules->unit[in->model->n_layers].matrix[0].n > 0;
}

double plan_model_flops(const bl_time_input *in)
{
    double tokens = (double)in->micro_tokens * in->n_micro * in->n_ranks * in->useful_part,
           labels = tokens * in->label_part;

    if (in->trained)
        return bl_trained_step_flops(in->model, in->trained, tokens, in->document_tokens, labels);
    double n_lora = (double)bl_lora_floats_before(in->lora, in->model->n_layers);
    double flops = bl_arch_step_flops(in->model, n_lora, 0, tokens, in->document_tokens, labels);
    flops += bl_lora_table_flops(in->lora, tokens, labels);
    if (has_own_head(in))
        flops += 2.0 * (double)in->model->vocab_size * (double)in->model->hidden_size * labels;
    return in->is_trained ? flops + bl_arch_gradient_flops(in->model, tokens, labels) : flops;
}

/* ---- by kind of op ---- */

typedef enum group {
    OF_PRODUCTS, /* with the frozen matrices */
    OF_ATTENTION,
    OF_LORA,
    OF_GRADIENTS, /* of the matrices, where they are trained */
    OF_QUANTIZE,  /* their other operand */
    OF_PREPARE,   /* frozen matrices dequantized or transposed */
    OF_ACTIVATION,
    OF_ELEMENTWISE,
    N_GROUPS
} group;
_Static_assert((int)N_GROUPS <= (int)BL_TIME_BUDGET_LINES, "bl_time_budget.line");

static const char *const group_names[N_GROUPS] = {[OF_PRODUCTS] = "frozen products",
                                                  [OF_ATTENTION] = "attention",
                                                  [OF_LORA] = "LoRA",
                                                  [OF_GRADIENTS] = "weight gradients",
                                                  [OF_QUANTIZE] = "operands to FP8",
                                                  [OF_PREPARE] = "copies of W",
                                                  [OF_ACTIVATION] = "activation function",
                                                  [OF_ELEMENTWISE] = "norms, RoPE, adds"};

static group group_of(const bl_time_input *in, const plan_kernel *k)
{
    if (k->rate == BL_COST_PREPARE) return OF_PREPARE;
    if (strcmp(k->op, "grouped_matmul") == 0) return OF_PRODUCTS;
    if (strcmp(k->op, "matmul_weight") == 0) return k->flops > 0 ? OF_PRODUCTS : OF_QUANTIZE;
    if (strncmp(k->op, "attention", 9) == 0) return OF_ATTENTION;
    if (strncmp(k->op, "swiglu", 6) == 0 || strncmp(k->op, "gelu", 4) == 0) return OF_ACTIVATION;
    if (strcmp(k->op, "matmul") == 0) return in->is_trained ? OF_GRADIENTS : OF_LORA;
    return strcmp(k->op, "dropout") == 0 ? OF_LORA : OF_ELEMENTWISE;
}

typedef struct tally {
    const bl_time_input *in;
    bl_time_amount forward[N_GROUPS], backward[N_GROUPS];
} tally;

static void add_kernel(void *user, const plan_kernel *k)
{
    tally *t = user;
    bl_time_amount *all = k->is_backward ? t->backward : t->forward,
                   *sum = &all[group_of(t->in, k)];
    double n = t->in->group; /* of a micro-batch; copies of W serve the group */

    sum->seconds += k->seconds / n;
    sum->bytes += k->bytes / n;
    sum->flops += k->flops / n;
}

static bl_status tally_layer(const bl_time_input *in, unsigned save, tally *out)
{
    bl_time_run run = *plan_longest_run(in);
    bl_time_input alone = *in;

    *out = (tally){.in = in};
    run.save = save;
    alone.runs = &run;
    alone.n_runs = 1;
    return plan_run_kernels(&alone, add_kernel, out);
}

bl_status bl_time_budget_layer(const bl_time_input *in, bl_time_budget *out)
{
    tally kept, whole;

    *out = (bl_time_budget){.n = N_GROUPS};
    BL_TRY(tally_layer(in, BL_SAVE_S4, &kept));
    BL_TRY(tally_layer(in, plan_longest_run(in)->save, &whole));
    for (int g = 0; g < N_GROUPS; g++) {
        bl_time_budget_line *line = &out->line[g];
        bl_time_amount all = whole.backward[g], own = kept.backward[g];
        line->name = in->is_trained && g == OF_PRODUCTS ? "products with W" : group_names[g];
        line->part[BL_TIME_OF_FORWARD] = whole.forward[g];
        line->part[BL_TIME_OF_BACKWARD] = own;
        line->part[BL_TIME_OF_RECOMPUTATION] = (bl_time_amount){
            all.seconds - own.seconds, all.bytes - own.bytes, all.flops - own.flops};
    }
    return BL_OK;
}
