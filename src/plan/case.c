/* SPDX-License-Identifier: Apache-2.0 */
/* case.c -- opens a plan's input from names: model or preset, machine or this one, and the
 * configuration resolved for it. */
#include "plan/case.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "trained/choose.h"
#include "trained/rates.h"
#include "ops/gemm.h"
#include "plan/memory.h"

static int64_t n_devices(const bl_hardware *h)
{
    return (int64_t)h->n_hosts * h->n_devices;
}

/* On several hosts, if sum_block does not divide the ranks per host: chooses the ranks of a
 * host as a block. Only without a configuration file: then the plan chooses keys. */
static void choose_sum_block(const bl_hardware *h, bl_train_configs *configs)
{
    for (int i = 0; i < configs->n; i++) {
        bl_train_config *c = configs->run[i];
        bool is_free = !c->source.file && !bl_train_config_given(c, "sum_block");
        if (is_free && h->n_hosts > 1 && h->n_devices > 1 && h->n_devices % c->sum_block != 0)
            c->sum_block = h->n_devices;
    }
}

static bl_status load_configs(const bl_hardware *h, bool is_here, int argc, char *const *argv,
                              bl_plan_case *c)
{
    bool has_gpus = h->kind == BL_DEVICE_CUDA;
    bl_config_machine machine = {.has_gpus = has_gpus,
                                 .n_ranks = is_here ? 1 : n_devices(h),
                                 .n_cores = h->n_cores,
                                 .n_ranks_on_host = h->n_devices,
                                 .gpu = h->device,
                                 .capability = h->arch,
                                 .cpu_bf16 = h->bf16_gemm_flops_per_s.value > 0 &&
                                             (!is_here || bl_cpu_gemm_has_bf16())};

    BL_TRY(bl_train_configs_load_for(&machine, argc, argv, &c->configs));
    if (has_gpus && !is_here) choose_sum_block(h, &c->configs);
    c->config = c->configs.run[0];
    if (!c->config->model_name_or_path)
        return BL_FAIL(BL_EUSAGE,
                       "plan: no model; give --model with a name (llama-3.1-405b) or a folder");
    if (has_gpus && !is_here && c->config->ranks > n_devices(h))
        return BL_FAIL(BL_EUSAGE, "ranks %lld: %s has %lld GPUs", (long long)c->config->ranks,
                       h->name, (long long)n_devices(h));
    return BL_OK;
}

/* Hosts are filled one after the other. Here, ranks are threads of one process, as `ballast train`
 * has them. */
static bl_topology topology_of(const bl_hardware *h, bool is_here, const bl_train_config *c)
{
    int n_ranks = (int)c->ranks;
    if (is_here) return (bl_topology){.n_ranks = n_ranks, .n_here = n_ranks, .n_on_host = n_ranks};
    bool has_gpus = h->kind == BL_DEVICE_CUDA;
    int on_host =
        has_gpus ? (int)bl_min_i64(n_ranks, h->n_devices) : (int)bl_ceil_div(n_ranks, h->n_hosts);
    return (bl_topology){.n_ranks = n_ranks,
                         .n_here = has_gpus ? 1 : on_host,
                         .n_on_host = on_host,
                         .shares_memory = has_gpus && on_host > 1};
}

/* Memory that programs find free on a GPU: all of it less the context and the communicator, which
 * are separate items of the ledger. */
static int64_t gpu_available_bytes(const bl_hardware *h, int n_ranks)
{
    return (int64_t)h->device_memory_bytes.value - bl_plan_gpu_reserve_bytes(n_ranks);
}

static bl_status choose_bf16_matrices(bl_plan_case *c)
{
    int64_t n_layers = c->model.config.n_layers;

    c->bf16_matrices = calloc((size_t)n_layers, sizeof *c->bf16_matrices);
    if (!c->bf16_matrices)
        return BL_FAIL(BL_ENOMEM, "exceptions of %lld layers", (long long)n_layers);
    return bl_train_config_bf16_matrices(c->config, n_layers, c->bf16_matrices);
}

static bl_status find_machine(const bl_plan_machine *machine, bl_hardware *out)
{
    BL_TRY(machine->name ? bl_hardware_load(machine->name, out) : bl_hardware_find(out));
    if (machine->host_memory_gb > 0)
        out->host_memory_bytes = (bl_figure){1e9 * machine->host_memory_gb, "host_memory_gb"};
    if (machine->pcie_lanes > 0) BL_TRY(bl_hardware_set_lanes(out, (int)machine->pcie_lanes));
    return BL_OK;
}

/* And its adapter, if one is trained. */
static bl_status open_model(bl_plan_case *c)
{
    const char *name = c->config->model_name_or_path;

    if (!bl_train_config_is_full(c->config)) {
        BL_TRY(bl_plan_model_open(name, c->config->base_format, &c->model));
        BL_TRY(bl_arch_set_expert_group(&c->model.config, c->config->expert_group));
        BL_TRY(bl_base_formats_check_device(&c->model.base_formats, c->hardware.kind));
        BL_TRY(bl_adapter_choose_modules(c->config, &c->model.config, true, &c->modules));
        BL_TRY(bl_adapter_choose_lora(c->config, &c->model.config, true, &c->lora));
        bl_trained_set *set = c->modules.names.n > 0 ? &c->modules.set : NULL;
        return bl_adapter_choose_rates(c->config, &c->model.config, set, &c->lora);
    }
    BL_TRY(bl_plan_model_open(name, BL_BASE_TRAINED, &c->model));
    bl_lora_layout_init(&c->model.config, NULL, &c->lora);
    return bl_adapter_choose_trained(c->config, &c->model.config, &c->trained);
}

static bool has_validation(const bl_train_config *c)
{
    return c->validation_file || c->validation_split_percentage > 0;
}

/* 0: as long as it can be. A row of preferences has two documents. */
static int64_t row_tokens_of(const bl_train_config *c, int64_t row_tokens)
{
    bl_losses losses = bl_plan_losses_of(c);
    bool is_pair = losses.is_preference && !losses.is_unpaired;

    return row_tokens > 0 ? row_tokens : (is_pair ? 2 : 1) * c->max_seq_length;
}

/* Configurations with the key are rejected when they are read; an init_adapter may have modules,
 * too. */
static bl_status check_shared(const bl_plan_case *c, const bl_train_config *config)
{
    bl_saved_modules modules;

    BL_TRY(bl_adapter_choose_modules(config, &c->model.config, true, &modules));
    int n = modules.names.n;
    bl_saved_modules_free(&modules);
    if (n == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: modules_to_save replaces modules of the base, which several runs share: "
                   "start them one after the other",
                   config->output_dir);
}

static bl_status add_others(bl_plan_case *c, int64_t row_tokens)
{
    size_t n = (size_t)(c->configs.n - 1);

    if (n > 0) BL_TRY(check_shared(c, c->config));
    c->others = calloc(n + 1, sizeof *c->others);
    c->other_loras = calloc(n + 1, sizeof *c->other_loras);
    if (!c->others || !c->other_loras) return BL_FAIL(BL_ENOMEM, "out of memory: %zu runs", n);
    for (size_t i = 0; i < n; i++) {
        const bl_train_config *config = c->configs.run[i + 1];
        int64_t tokens = row_tokens_of(config, row_tokens);
        bl_plan_run run = {.config = config,
                           .lora = &c->other_loras[i],
                           .longest_train_row = tokens,
                           .longest_validation_row = has_validation(config) ? tokens : 0};
        BL_TRY(check_shared(c, config));
        BL_TRY(bl_adapter_choose_lora(config, &c->model.config, true, &c->other_loras[i]));
        bl_plan_add_run(&c->input, c->others, &run);
    }
    return BL_OK;
}

static bl_status open_case(const bl_plan_machine *machine, int64_t row_tokens, int argc,
                           char *const *argv, bl_plan_case *c)
{
    bool is_here = machine->name == NULL, is_gpu;

    BL_TRY(find_machine(machine, &c->hardware));
    is_gpu = c->hardware.kind == BL_DEVICE_CUDA;
    BL_TRY(load_configs(&c->hardware, is_here, argc, argv, c));
    BL_TRY(open_model(c));
    BL_TRY(choose_bf16_matrices(c));
    int64_t own_tokens = row_tokens_of(c->config, row_tokens);
    bl_topology topology = topology_of(&c->hardware, is_here, c->config);
    int n_shards = bl_plan_n_shards(c->config, &topology);

    c->input = (bl_plan_input){
        .config = c->config,
        .model = &c->model.config,
        .formats = c->model.formats,
        .bf16_matrices = c->bf16_matrices,
        .embedding_dtype = c->model.embedding_dtype,
        .head_dtype = c->model.head_dtype,
        .n_positions = row_tokens > 0 ? row_tokens : c->config->max_seq_length,
        .load_bytes = bl_model_load_bytes(&c->model.stored, n_shards),
        .lora = &c->lora,
        .modules = c->modules.names.n > 0 ? &c->modules.set : NULL,
        .trained = bl_train_config_is_full(c->config) ? &c->trained : NULL,
        .topology = topology,
        .is_training = true,
        .longest_train_row = own_tokens,
        .longest_validation_row = has_validation(c->config) ? own_tokens : 0,
        .available_bytes = is_here && machine->host_memory_gb == 0
                               ? 0
                               : (int64_t)c->hardware.host_memory_bytes.value,
        .gpu_available_bytes = is_here  ? 0
                               : is_gpu ? gpu_available_bytes(&c->hardware, topology.n_ranks)
                                        : -1,
        .hardware = &c->hardware};
    return add_others(c, row_tokens);
}

bl_status bl_plan_case_open_on(const bl_plan_machine *machine, int64_t row_tokens, int argc,
                               char *const *argv, bl_plan_case *out)
{
    *out = (bl_plan_case){0};
    return open_case(machine, row_tokens, argc, argv, out);
}

bl_status bl_plan_case_open(const char *hardware, int64_t row_tokens, int argc, char *const *argv,
                            bl_plan_case *out)
{
    *out = (bl_plan_case){0};
    return open_case(&(bl_plan_machine){.name = hardware}, row_tokens, argc, argv, out);
}

bl_status bl_plan_case_check(const bl_plan_case *c)
{
    const bl_hardware *h = &c->hardware;

    if (h->kind == BL_DEVICE_CUDA && h->arch < BL_CUDA_CAPABILITY_MIN)
        return BL_FAIL(BL_ELIMIT,
                       "%s: planned only; training needs compute capability %d.%d, %s has %d.%d",
                       h->name, BL_CUDA_CAPABILITY_MIN / 10, BL_CUDA_CAPABILITY_MIN % 10, h->device,
                       h->arch / 10, h->arch % 10);
    return BL_OK;
}

void bl_plan_case_close(bl_plan_case *c)
{
    bl_plan_model_close(&c->model);
    bl_train_configs_free(&c->configs);
    bl_trained_free(&c->trained);
    bl_saved_modules_free(&c->modules);
    free(c->bf16_matrices);
    free(c->other_loras);
    free(c->others);
    *c = (bl_plan_case){0};
}
