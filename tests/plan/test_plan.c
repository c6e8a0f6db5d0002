/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan.c -- choices for a host whose memory is given, of a model without files: layers that
 * fit stay in memory, the others go to disk, and the error states the lack. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "arch/llama.h"
#include "trained/choose.h"
#include "plan/plan.h"

static const char DIR[] = "/nowhere/pages"; /* a plan creates nothing */

typedef struct plan_case {
    bl_train_config *config;
    bl_model_config model;
    bl_format *formats;
    bl_lora_layout lora;
    bl_plan_input input;
} plan_case;

/* Llama 3.1 8B in fp8_row on two ranks of one process, with `checkpointing` and offload_ratio
 * auto. */
static void open_case(plan_case *p, const char *checkpointing)
{
    char *args[] = {"--model_name_or_path",
                    "/nowhere/model",
                    "--train_file",
                    "/nowhere/train.jsonl",
                    "--output_dir",
                    "/nowhere/out",
                    "--device",
                    "cpu",
                    "--ranks",
                    "2",
                    "--threads",
                    "1",
                    "--offload_ratio",
                    "auto",
                    "--offload_tier",
                    "disk",
                    "--offload_dir",
                    (char *)DIR,
                    "--activation_checkpointing",
                    (char *)checkpointing};

    *p = (plan_case){0};
    assert_int_equal(
        bl_train_config_load(BL_CONFIG_TRAIN, NULL, (int)BL_COUNT(args), args, &p->config), BL_OK);
    assert_int_equal(bl_model_config_preset("llama3.1-8b", &p->model), BL_OK);
    int64_t n_formats = p->model.n_layers * BL_PROJECTIONS;
    p->formats = calloc((size_t)n_formats, sizeof *p->formats);
    assert_non_null(p->formats);
    for (int64_t i = 0; i < n_formats; i++) p->formats[i] = BL_FORMAT_FP8_ROW;
    assert_int_equal(bl_adapter_choose_lora(p->config, &p->model, true, &p->lora), BL_OK);
    p->input = (bl_plan_input){.config = p->config,
                               .model = &p->model,
                               .formats = p->formats,
                               .embedding_dtype = BL_BF16,
                               .head_dtype = BL_BF16,
                               .n_positions = 1024,
                               .lora = &p->lora,
                               .topology = {.n_ranks = 2, .n_here = 2, .n_on_host = 2},
                               .is_training = true,
                               .longest_train_row = 1024};
}

static void close_case(plan_case *p)
{
    bl_train_config_free(p->config);
    free(p->formats);
}

static bl_plan choose(plan_case *p, int64_t available_bytes)
{
    bl_plan plan;
    p->input.available_bytes = available_bytes;
    assert_int_equal(bl_plan_choose(&p->input, &plan), BL_OK);
    return plan;
}

/* Nine tenths of the memory are used: with a little less than all of the base needs, a twentieth of
 * it goes to disk. */
static void test_ratio_by_given_memory(void **state)
{
    plan_case p;

    (void)state;
    open_case(&p, "full");
    bl_plan all = choose(&p, -1);
    assert_true(all.placement.ratio == 0.0 && all.memory.disk == 0);
    int64_t enough = (all.memory.total + 8) / 9 * 10;
    assert_true(choose(&p, enough).placement.ratio == 0.0);
    bl_plan most = choose(&p, enough - 20);
    assert_true(most.placement.ratio == 0.05 && most.memory.disk > 0);
    assert_true(most.memory.total < all.memory.total);
    bl_plan least = choose(&p, 1);
    assert_true(least.placement.ratio == 1.0 && least.memory.total < most.memory.total);
    assert_string_equal(least.placement.dir, DIR);
    assert_int_equal(access(DIR, F_OK), -1);
    close_case(&p);
}

/* A host is shared: with a process per rank, each has half of it. */
static void test_processes_share_a_host(void **state)
{
    plan_case p;

    (void)state;
    open_case(&p, "full");
    p.input.topology = (bl_topology){.n_ranks = 2, .n_here = 1, .n_on_host = 2};
    int64_t enough = (choose(&p, -1).memory.total + 8) / 9 * 10;
    assert_true(choose(&p, 2 * enough).placement.ratio == 0.0);
    assert_true(choose(&p, 2 * enough - 40).placement.ratio > 0.0);
    close_case(&p);
}

/* The most that half of the memory holds. An evaluation saves nothing, whatever there is. */
static void test_saving_by_given_memory(void **state)
{
    static const struct {
        const char *name;
        unsigned save;
    } cases[] = {
        {"none", BL_SAVE_S4}, {"mlp", BL_SAVE_S3}, {"selective", BL_SAVE_S2}, {"full", BL_SAVE_S0}};
    int64_t total[BL_COUNT(cases)];
    plan_case p;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        open_case(&p, cases[i].name);
        bl_plan plan = choose(&p, -1);
        assert_int_equal(plan.pass.save, cases[i].save);
        total[i] = plan.memory.total;
        assert_true(i == 0 || total[i] < total[i - 1]);
        close_case(&p);
    }
    open_case(&p, "auto");
    assert_int_equal(choose(&p, 2 * total[0]).pass.save, BL_SAVE_S4);
    for (size_t i = 1; i < BL_COUNT(cases); i++)
        assert_int_equal(choose(&p, 2 * total[i - 1] - 2).pass.save, cases[i].save);
    p.input.is_training = false;
    assert_int_equal(choose(&p, 2 * total[0]).pass.save, BL_SAVE_S0);
    close_case(&p);
}

static void test_check_by_given_memory(void **state)
{
    plan_case p;

    (void)state;
    open_case(&p, "full");
    bl_plan plan = choose(&p, -1);
    p.input.available_bytes = plan.memory.total;
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_OK);
    p.input.available_bytes = plan.memory.total - 1;
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "these lower it: a smaller per_device_train"));
    assert_null(strstr(bl_error_text(), "offload_ratio 1")); /* this base is a small part */
    bl_plan large = plan;
    large.memory.item[BL_MEMORY_BASE].host = plan.memory.total / 4;
    assert_int_equal(bl_plan_check(&p.input, &large), BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "visit_tokens, or the frozen base on disk"));
    large.memory.item[BL_MEMORY_BASE].host = plan.memory.total / 4 * 3;
    assert_int_equal(bl_plan_check(&p.input, &large), BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "these lower it: the frozen base on disk"));
    plan = choose(&p, 1); /* all is on disk: no key is left */
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_ENOMEM);
    assert_null(strstr(bl_error_text(), "offload_ratio 1"));
    close_case(&p);
}

/* ---- a GPU, on a host that is large enough ---- */

static void open_gpu_case(plan_case *p, const char *checkpointing)
{
    open_case(p, checkpointing);
    p->config->device = BL_CONFIG_DEVICE_CUDA; /* which this machine need not have */
    p->config->compute_dtype = BL_COMPUTE_BF16;
    p->config->offload_tier = BL_OFFLOAD_HOST;
    p->input.available_bytes = INT64_MAX / 2;
}

static bl_plan choose_gpu(plan_case *p, int64_t gpu_bytes)
{
    bl_plan plan;
    p->input.gpu_available_bytes = gpu_bytes;
    assert_int_equal(bl_plan_choose(&p->input, &plan), BL_OK);
    return plan;
}

static int64_t prepared_bytes(bl_plan plan)
{
    return (int64_t)bl_linear_prepared_bytes(&plan.pass.prepared);
}

static int64_t gpu_bytes(const bl_plan *plan)
{
    return bl_memory_gpu_bytes(&plan->memory, 2);
}

/* What is offloaded leaves the GPU for the host, and brings a ring. */
static void test_a_gpu_has_memory_of_its_own(void **state)
{
    plan_case p;

    (void)state;
    open_gpu_case(&p, "full");
    bl_plan all = choose_gpu(&p, -1);
    assert_int_equal(all.pass.kind, BL_DEVICE_CUDA);
    assert_true(all.placement.ratio == 0.0 && all.memory.item[BL_MEMORY_BASE].host == 0);
    int64_t of_all = gpu_bytes(&all);
    assert_true(of_all > 2 * all.memory.item[BL_MEMORY_BASE].device &&
                of_all < 2 * all.memory.device);
    /* The only large items on the host are the embedding and those of its rows that go to the
     * GPUs. */
    int64_t rows = 2 * all.memory.item[BL_MEMORY_TOKENS].host;
    assert_true(all.memory.total - all.memory.embedding - rows < 64 << 20);

    bl_plan prepared = choose_gpu(&p, INT64_MAX / 2);
    int64_t enough = (gpu_bytes(&prepared) + 8) / 9 * 10;
    assert_true(choose_gpu(&p, enough).placement.ratio == 0.0);
    bl_plan half = choose_gpu(&p, of_all - all.memory.item[BL_MEMORY_BASE].device / 4);
    assert_true(half.placement.ratio > 0.0 && half.placement.ratio < 1.0);
    assert_true(half.memory.item[BL_MEMORY_BASE].host > 0 && half.memory.disk == 0);
    assert_true(gpu_bytes(&half) < of_all && half.memory.total > all.memory.total);
    assert_true(half.memory.total - all.memory.total >= half.memory.item[BL_MEMORY_BASE].host);

    bl_plan none = choose_gpu(&p, 1);
    assert_true(none.placement.ratio == 1.0);
    p.config->activation_offload = true;
    bl_plan offloaded = choose_gpu(&p, 1);
    int64_t moved = gpu_bytes(&none) - gpu_bytes(&offloaded);
    assert_true(moved > 0 && offloaded.memory.total - none.memory.total >= moved);
    close_case(&p);
}

/* What all layers save, and what an eighth of them leaves to recompute, whatever fits. */
static void test_saving_by_a_gpus_memory(void **state)
{
    static const char *const names[] = {"none", "full"};
    plan_case p;
    int64_t needed[2], eighths = 0;

    (void)state;
    for (int i = 0; i < 2; i++) {
        open_gpu_case(&p, names[i]);
        p.config->offload_ratio = 0;
        bl_plan plan = choose_gpu(&p, -1);
        assert_int_equal(plan.pass.n_saving_all, 0);
        needed[i] = gpu_bytes(&plan);
        close_case(&p);
    }
    open_gpu_case(&p, "auto");
    p.config->offload_ratio = 0;
    bl_plan most = choose_gpu(&p, (needed[0] + 8) / 9 * 10);
    assert_true(most.pass.save == BL_SAVE_S4 && most.pass.n_saving_all == 0);
    assert_int_equal(choose_gpu(&p, needed[1] / 9 * 10 - 20).pass.save, BL_SAVE_S0);
    for (int part = 1; part < 8; part++) {
        bl_plan plan = choose_gpu(&p, needed[1] / 9 * 10 + (needed[0] - needed[1]) / 8 * part);
        assert_true(gpu_bytes(&plan) > needed[1] && gpu_bytes(&plan) < needed[0]);
        assert_true(plan.pass.save != BL_SAVE_S4);
        eighths += plan.pass.n_saving_all > 0;
    }
    assert_true(eighths >= 4);
    p.config->activation_checkpointing_layers = p.model.n_layers; /* given */
    bl_plan given = choose_gpu(&p, needed[0] / 9 * 10 - 20);
    assert_true(given.pass.save == BL_SAVE_S3 && given.pass.n_saving_all == 0);
    close_case(&p);
}

/* Where a visit uses them more than once, prepared weights get separate memory if nine tenths of
 * the memory are still enough: a layer in bf16, and then no scratch for the largest of its
 * matrices. */
static void check_prepared(const char *checkpointing, int64_t group)
{
    plan_case p;

    open_gpu_case(&p, checkpointing);
    p.config->offload_ratio = 0;
    p.config->gradient_accumulation_steps = group;
    p.config->visit_tokens =
        group * p.config->per_device_train_batch_size * p.input.longest_train_row;
    bl_plan none = choose_gpu(&p, -1), with = choose_gpu(&p, INT64_MAX / 2);
    int64_t h = p.model.hidden_size, i = p.model.intermediate_size, kv = h / 4,
            layer = (2 * h * h + 2 * kv * h + 3 * h * i) * 2, gate_up = 2 * h * i * 2,
            more = with.memory.item[BL_MEMORY_WORKSPACE].device +
                   with.memory.item[BL_MEMORY_PREPARED].device -
                   none.memory.item[BL_MEMORY_WORKSPACE].device;
    assert_int_equal(none.pass.max_group, group);
    assert_int_equal(prepared_bytes(none), 0);
    assert_int_equal(prepared_bytes(with), layer);
    /* The rest is the LoRA terms of another matrix. */
    assert_in_range(more - (layer - gate_up), 0, layer / 100);
    int64_t needed = gpu_bytes(&with);
    assert_int_equal(prepared_bytes(choose_gpu(&p, (needed + 8) / 9 * 10)), layer);
    assert_int_equal(prepared_bytes(choose_gpu(&p, needed / 9 * 10 - 20)), 0);
    close_case(&p);
}

static void test_prepared_by_a_gpus_memory(void **state)
{
    plan_case p;

    (void)state;
    check_prepared("full", 1);
    check_prepared("none", 2);
    open_gpu_case(&p, "none");
    p.config->gradient_accumulation_steps = 1;
    assert_int_equal(prepared_bytes(choose_gpu(&p, INT64_MAX / 2)), 0);
    close_case(&p);
    open_gpu_case(&p, "full"); /* codes are transposed once, as without */
    p.config->gradient_accumulation_steps = 1;
    p.config->compute_dtype = BL_COMPUTE_FP8;
    assert_int_equal(prepared_bytes(choose_gpu(&p, INT64_MAX / 2)), 0);
    close_case(&p);
}

static void test_check_by_a_gpus_memory(void **state)
{
    plan_case p;

    (void)state;
    open_gpu_case(&p, "full");
    bl_plan plan = choose_gpu(&p, -1);
    p.input.gpu_available_bytes = gpu_bytes(&plan);
    p.input.available_bytes = plan.memory.total;
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_OK);
    p.input.gpu_available_bytes--;
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "GB of GPU memory"));
    assert_non_null(strstr(bl_error_text(), "GB of host memory"));
    assert_non_null(strstr(bl_error_text(), "offload_ratio 1 or activation_offload true"));
    p.input.gpu_available_bytes++;
    p.input.available_bytes--;
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "GB of host memory"));
    assert_null(strstr(bl_error_text(), "offload_ratio 1")); /* nothing is offloaded */
    p.config->activation_offload = true;
    plan = choose_gpu(&p, 1);
    assert_int_equal(bl_plan_check(&p.input, &plan), BL_ENOMEM);
    assert_null(strstr(bl_error_text(), "offload_ratio 1")); /* no key is left */
    close_case(&p);
}

static int64_t predicted(const bl_plan_input *in, unsigned save, bool expects, bl_memory_ledger *m)
{
    bl_placement placement = {.n = 1};
    bl_pass_options pass = bl_plan_pass_options(in, save);

    assert_int_equal(expects ? bl_plan_expect_memory(in, &placement, NULL, &pass, m)
                             : bl_plan_predict_memory(in, &placement, NULL, &pass, m),
                     BL_OK);
    return m->total;
}

/* Known rows make an expectation below the bound; the tokenizer is in both; memory that nothing
 * touches is in neither: the workspace has no tensors that a training keeps, but an evaluation and
 * a reference use them. */
static void test_expected_memory(void **state)
{
    bl_memory_ledger m;
    plan_case p;

    (void)state;
    open_case(&p, "none");
    bl_plan_input *in = &p.input;
    in->longest_train_row = 512;
    in->longest_validation_row = 0;
    int64_t tokens = p.config->per_device_train_batch_size * 512,
            bound = predicted(in, BL_SAVE_S4, false, &m),
            workspace = m.item[BL_MEMORY_WORKSPACE].device;
    assert_int_equal(predicted(in, BL_SAVE_S4, true, &m), bound);
    in->rows = (bl_plan_rows){.n_micro = 1, .largest = tokens, .mean = (double)tokens};
    assert_int_equal(predicted(in, BL_SAVE_S4, true, &m), bound);
    in->rows.largest = tokens / 8;
    assert_int_equal(predicted(in, BL_SAVE_S4, false, &m), bound);
    assert_true(predicted(in, BL_SAVE_S4, true, &m) < bound / 4 * 3);
    in->tokenizer_bytes = 1 << 26;
    assert_int_equal(predicted(in, BL_SAVE_S4, false, &m), bound + (1 << 26));
    bl_block_dims dims = bl_block_dims_of(&p.model, BL_LAYER_DENSE, BL_DEVICE_CPU, BL_F32);
    int64_t tensors = tokens * bl_block_saved_bytes(&dims, BL_SAVE_S4);
    predicted(in, BL_SAVE_S0, false, &m);
    assert_int_equal(m.item[BL_MEMORY_WORKSPACE].device, workspace + tensors);
    in->longest_validation_row = 512;
    predicted(in, BL_SAVE_S4, false, &m);
    assert_true(m.item[BL_MEMORY_WORKSPACE].device >= workspace + tensors);
    in->longest_validation_row = 0;
    char *loss = p.config->loss_type.items[0];
    for (int has_reference = 0; has_reference < 2; has_reference++) {
        p.config->loss_type.items[0] = has_reference ? "sigmoid" : "simpo";
        predicted(in, BL_SAVE_S4, false, &m);
        assert_int_equal(m.item[BL_MEMORY_WORKSPACE].device,
                         workspace + (has_reference ? tensors : 0));
    }
    p.config->loss_type.items[0] = loss;
    close_case(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ratio_by_given_memory),
        cmocka_unit_test(test_processes_share_a_host),
        cmocka_unit_test(test_saving_by_given_memory),
        cmocka_unit_test(test_check_by_given_memory),
        cmocka_unit_test(test_a_gpu_has_memory_of_its_own),
        cmocka_unit_test(test_saving_by_a_gpus_memory),
        cmocka_unit_test(test_prepared_by_a_gpus_memory),
        cmocka_unit_test(test_check_by_a_gpus_memory),
        cmocka_unit_test(test_expected_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
