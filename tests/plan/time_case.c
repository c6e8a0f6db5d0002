/* SPDX-License-Identifier: Apache-2.0 */
/* time_case.c -- Llama 3.1 405B in FP8 on eight H100, as a time model's input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "plan/time_case.h"

void time_case_init(time_case *c, const char *model)
{
    bl_lora_options lora = {.r = 16, .alpha = 16};

    *c = (time_case){.run = {.save = BL_SAVE_S0}};
    assert_int_equal(bl_model_config_preset(model, &c->model), BL_OK);
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        lora.target[p] = true;
        c->run.format[p] = BL_FORMAT_FP8_ROW;
    }
    bl_lora_layout_init(&c->model, &lora, &c->lora);
    c->run.n_layers = c->model.n_layers;
    c->input = (bl_time_input){.model = &c->model,
                               .lora = &c->lora,
                               .runs = &c->run,
                               .n_runs = 1,
                               .head_dtype = BL_BF16,
                               .moments = BL_F32,
                               .kind = BL_DEVICE_CUDA,
                               .act = BL_BF16,
                               .mode = BL_MATMUL_FP8,
                               .rates = {.gemm_flops_per_s = 700e12,
                                         .fp8_gemm_flops_per_s = 1300e12,
                                         .memory_bytes_per_s = 0.85 * 3.35e12,
                                         .decode_weights_per_s = 1e12,
                                         .launch_s = 3e-6,
                                         .gather_bytes_per_s = 343e9,
                                         .gather_latency_s = 30e-6,
                                         .copy_in_bytes_per_s = 50e9,
                                         .copy_out_bytes_per_s = 50e9,
                                         .disk_bytes_per_s = 6e9,
                                         .peak_flops_per_s = 989.4e12},
                               .n_ranks = 8,
                               .n_hosts = 1,
                               .n_shards = 8,
                               .ring_depth = 2,
                               .label_part = 1,
                               .useful_part = 1,
                               .n_micro = 1,
                               .group = 1,
                               .tier = BL_TIER_HOST};
    time_case_set_tokens(c, 4096);
}

void time_case_set_tokens(time_case *c, int64_t tokens)
{
    c->input.micro_tokens = tokens;
    c->input.document_tokens = tokens < 4096 ? (double)tokens : 4096;
    bl_rates *r = &c->input.rates;
    r->attention_forward_flops_per_s = tokens < 2048 ? 400e12 : tokens < 4096 ? 484e12 : 591e12;
    r->attention_backward_flops_per_s = tokens < 2048 ? 300e12 : tokens < 4096 ? 370e12 : 474e12;
}
