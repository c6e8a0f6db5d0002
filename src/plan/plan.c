/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c -- chooses the auto values (placement, saved activations, preparation), predicts memory,
 * and explains what does not fit. */
#include "plan/plan.h"

#include <stdio.h>

#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "plan/search.h"

/* From what takes the most memory to what takes the least. */
static const struct {
    bl_activation_checkpointing key;
    unsigned save;
    const char *name;
} savings[] = {{BL_RECOMPUTE_NONE, BL_SAVE_S4, "none"},
               {BL_RECOMPUTE_MLP, BL_SAVE_S3, "mlp"},
               {BL_RECOMPUTE_SELECTIVE, BL_SAVE_S2, "selective"},
               {BL_RECOMPUTE_FULL, BL_SAVE_S0, "full"}};

unsigned bl_plan_save_of(bl_activation_checkpointing key)
{
    size_t i = 0;
    while (savings[i].key != key && savings[i].key != BL_RECOMPUTE_FULL) i++;
    return savings[i].save;
}

const char *bl_plan_save_name(unsigned save)
{
    size_t i = 0;
    while (savings[i].save != save && savings[i].key != BL_RECOMPUTE_FULL) i++;
    return savings[i].name;
}

static int64_t processes_on_host(const bl_plan_input *in)
{
    return bl_plan_processes_on_host(&in->topology);
}

int64_t bl_plan_available_bytes(const bl_plan_input *in)
{
    return in->available_bytes != 0 ? in->available_bytes : bl_memory_available_bytes();
}

/* -1: not known. The ranks of a process share its GPU; what NCCL will take of that between
 * processes is not there yet. */
int64_t bl_plan_gpu_available_bytes(const bl_plan_input *in)
{
    size_t free_bytes, total_bytes;

    if (in->gpu_available_bytes != 0) return in->gpu_available_bytes;
    if (bl_device_measure_cuda(in->topology.gpu, &free_bytes, &total_bytes) != BL_OK) return -1;
    return bl_max_i64(0, (int64_t)free_bytes - bl_plan_communicator_bytes(&in->topology));
}

int64_t bl_plan_usable_bytes(int64_t available)
{
    return available < 0 ? 0 : available / 10 * 9;
}

static int64_t gpu_bytes(const bl_plan_input *in, const bl_memory_ledger *m)
{
    return bl_memory_gpu_bytes(m, in->topology.n_here);
}

static bool is_gpu(const bl_plan_input *in)
{
    return bl_train_config_device_kind(in->config) == BL_DEVICE_CUDA;
}

static bl_status predict(const bl_plan_input *in, unsigned save, bl_plan *plan)
{
    plan->pass = bl_plan_pass_options(in, save);
    return bl_plan_predict_memory(in, &plan->placement, &plan->optimizer, &plan->pass,
                                  &plan->memory);
}

/* The measure of a choice: the memory where the ranks compute, its needed and available bytes. */
typedef struct room {
    const char *name; /* "GPU memory" */
    int64_t needed, available;
} room;

static room room_of(const bl_plan_input *in, const bl_plan *plan)
{
    return is_gpu(in)
               ? (room){"GPU memory", gpu_bytes(in, &plan->memory), bl_plan_gpu_available_bytes(in)}
               : (room){"memory", plan->memory.total, bl_plan_available_bytes(in)};
}

/* The least with which the usable memory is enough. A CPU's device memory is host memory: only the
 * disk tier makes room. */
static bl_status choose_ratio(const bl_plan_input *in, bl_plan *plan)
{
    enum { N_TRIES = 20 };
    room r = {0};

    if (plan->placement.tier != BL_TIER_DISK && !is_gpu(in)) return BL_OK;
    for (int i = 0; i <= N_TRIES; i++) {
        plan->placement.ratio = (double)i / N_TRIES;
        BL_TRY(predict(in, plan->pass.save, plan));
        r = room_of(in, plan);
        if (r.available < 0 ||
            r.needed <= bl_plan_usable_bytes(r.available) / processes_on_host(in))
            break;
    }
    bl_log_info("offload_ratio auto: %.2f, %.4g of %.4g GB of available %s", plan->placement.ratio,
                bl_gb(r.needed), bl_gb(r.available), r.name);
    return BL_OK;
}

static bl_status choose_placement(const bl_plan_input *in, bl_plan *plan)
{
    const bl_train_config *c = in->config;
    bool is_auto = c->offload_ratio == (double)BL_OPTION_AUTO;

    plan->placement =
        (bl_placement){.ratio = is_auto ? 0.0 : c->offload_ratio,
                       .tier = c->offload_tier == BL_OFFLOAD_DISK ? BL_TIER_DISK : BL_TIER_HOST,
                       .host_part = c->offload_host_part,
                       .places_copy = c->offload_compute_copy == BL_COPY_OFFLOADED,
                       .dir = c->offload_dir,
                       .pin = true,
                       .n = in->topology.n_on_host};
    plan->optimizer = bl_trained_full_placement(c);
    plan->pass = bl_plan_pass_options(in, bl_plan_save_of(c->activation_checkpointing));
    return is_auto ? choose_ratio(in, plan) : BL_OK;
}

/* A host has other programs, too: half of its memory is left to them. A GPU is the job's. */
static bool has_room(const bl_plan_input *in, const bl_plan *plan)
{
    int64_t available = bl_plan_available_bytes(in);

    if (plan->memory.total > available / 2 / processes_on_host(in)) return false;
    if (!is_gpu(in)) return true;
    room r = room_of(in, plan);
    return r.available < 0 || r.needed <= bl_plan_usable_bytes(r.available);
}

static bl_status choose_saving(const bl_plan_input *in, bl_plan *plan)
{
    if (in->config->activation_checkpointing != BL_RECOMPUTE_AUTO) return BL_OK;
    for (size_t i = 0; i < BL_COUNT(savings); i++) {
        BL_TRY(predict(in, savings[i].save, plan));
        if (savings[i].key != BL_RECOMPUTE_FULL && !has_room(in, plan)) continue;
        room r = room_of(in, plan);
        bl_log_info("activation_checkpointing auto: %s, %.4g of %.4g GB of available %s",
                    savings[i].name, bl_gb(r.needed), bl_gb(r.available), r.name);
        return BL_OK;
    }
    return BL_OK;
}

/* In the remaining memory of a GPU. */
static bl_status choose_prepared(const bl_plan_input *in, bl_plan *plan)
{
    bl_plan with = *plan;

    if (!bl_plan_uses_prepared(in, &plan->pass)) return BL_OK;
    BL_TRY(bl_plan_prepare(in, &with.pass));
    BL_TRY(bl_plan_predict_memory(in, &with.placement, &with.optimizer, &with.pass, &with.memory));
    room r = room_of(in, &with);
    if (r.needed > bl_plan_usable_bytes(r.available)) return BL_OK; /* nor where that is unknown */
    bl_log_info("weights are prepared once per visit, in %.4g GB of GPU memory per rank",
                bl_gb((int64_t)bl_linear_prepared_bytes(&with.pass.prepared)));
    *plan = with;
    return BL_OK;
}

/* Ranks that share a GPU gather by copies in its memory: each byte is read and written, by all of
 * them. */
static void add_shared_gathers(const bl_plan_input *in, bl_hardware *here)
{
    bl_figure *gather = &here->gather_bytes_per_s;

    if (gather->value > 0 || in->topology.n_ranks == 1) return;
    gather->value = here->device_memory_bytes_per_s.value / (2 * in->topology.n_ranks);
    snprintf(gather->source, sizeof gather->source,
             "assumed: copies in the memory of a GPU that %d ranks share", in->topology.n_ranks);
}

static void print_saving(const bl_plan_input *in, const bl_pass_options *pass)
{
    int64_t n_layers = in->model->n_layers;
    char layers[64] = "";

    if (pass->n_saving_all > 0)
        snprintf(layers, sizeof layers, " in %lld of %lld layers",
                 (long long)(n_layers - pass->n_saving_all), (long long)n_layers);
    bl_log_info("activation_checkpointing auto: %s%s", bl_plan_save_name(pass->save), layers);
}

static void print_optimizer(const bl_optimizer_placement *p)
{
    if (p->tier == BL_TIER_DEVICE)
        bl_log_info("optimizer_tier auto: device");
    else
        bl_log_info("optimizer_tier auto: %s, optimizer_ratio %.2f",
                    p->tier == BL_TIER_DISK ? "disk" : "host", p->ratio);
}

/* The fastest that fits, of the keys that are auto; what needs the least memory, when nothing
 * fits. */
static bl_status choose_by_time(const bl_plan_input *in, bl_plan *out)
{
    unsigned free_keys = bl_plan_auto_keys(in->config);
    bl_plan_input with_rates = *in;
    bl_hardware here;
    bl_plan_choice choice;

    if (!in->hardware) {
        BL_TRY(bl_hardware_find(&here));
        if (here.kind != BL_DEVICE_CUDA) BL_TRY(bl_hardware_preset("h100", &here));
        add_shared_gathers(in, &here);
        with_rates.hardware = &here;
    }
    BL_TRY(bl_plan_search(&with_rates, free_keys, BL_PLAN_BY_SPEED, &choice));
    *out = choice.best.plan;
    room r = room_of(in, out);
    if (free_keys & BL_FREE_RATIO)
        bl_log_info("offload_ratio auto: %.2f, %.4g of %.4g GB of available %s",
                    out->placement.ratio, bl_gb(r.needed), bl_gb(r.available), r.name);
    if (free_keys & BL_FREE_OPTIMIZER) print_optimizer(&out->optimizer);
    if (free_keys & BL_FREE_COPY)
        bl_log_info("offload_compute_copy auto: %s", out->placement.places_copy ? "true" : "false");
    if (free_keys & BL_FREE_SAVE) print_saving(in, &out->pass);
    if (free_keys & BL_FREE_VISIT)
        bl_log_info("visit_tokens auto: %lld", (long long)out->pass.max_group * out->pass.T_max);
    if (bl_linear_prepared_bytes(&out->pass.prepared) > 0)
        bl_log_info("weights are prepared once per visit, in %.4g GB of GPU memory per rank",
                    bl_gb((int64_t)bl_linear_prepared_bytes(&out->pass.prepared)));
    return BL_OK;
}

bl_status bl_plan_choose(const bl_plan_input *in, bl_plan *out)
{
    if (is_gpu(in) && in->is_training) return choose_by_time(in, out);
    BL_TRY(choose_placement(in, out));
    if (in->is_training) BL_TRY(choose_saving(in, out));
    BL_TRY(predict(in, out->pass.save, out));
    return choose_prepared(in, out);
}

static void print_prediction(const bl_plan_input *in, const bl_memory_ledger *m)
{
    int64_t in_host = m->item[BL_MEMORY_BASE].host;
    bool is_full = bl_train_config_is_full(in->config);
    char gpu[64] = "";

    if (is_gpu(in)) snprintf(gpu, sizeof gpu, "%.4g GB of GPU memory, ", bl_gb(gpu_bytes(in, m)));
    bl_log_info("memory predicted: %s%.4g GB%s%s (per rank: %s %.4g, ring %.4g, %s %.4g, "
                "activations %.4g)",
                gpu, bl_gb(m->total), is_gpu(in) ? " of host memory" : "",
                processes_on_host(in) > 1 ? " per process" : "",
                is_full ? "weights" : "frozen base",
                bl_gb(bl_memory_sum(m, BL_MEMORY_BASE, BL_MEMORY_NORMS)),
                bl_gb(bl_memory_sum(m, BL_MEMORY_RING, BL_MEMORY_READER)),
                is_full ? "gradients and AdamW" : "LoRA and AdamW",
                bl_gb(bl_memory_sum(m, BL_MEMORY_LORA, BL_MEMORY_LORA_RING)),
                bl_gb(bl_memory_sum(m, BL_MEMORY_LAYER_INPUTS, BL_MEMORY_LOGITS)));
    if (in_host > 0)
        bl_log_info("in host memory: %.4g GB per rank of the %s", bl_gb(in_host),
                    is_full ? "weights" : "frozen base");
    if (in_host > 0 && !is_gpu(in))
        bl_log_warning("offload_tier host frees no memory of a CPU, whose memory is the host's; "
                       "offload_tier disk does");
    if (is_gpu(in) && in->topology.n_here > 1)
        bl_log_info("the %d ranks share one GPU, whose memory holds all their copies",
                    in->topology.n_here);
}

void bl_plan_print(const bl_plan_input *in, const bl_plan *plan)
{
    const bl_memory_ledger *m = &plan->memory;
    const char *dir = in->config->offload_dir;
    int64_t free_bytes = 0;

    print_prediction(in, m);
    if (m->disk == 0) return;
    (void)bl_dir_free_bytes(dir, &free_bytes);
    bl_log_info("on disk: %d x %.4g GB of %s, in %s, which has %.4g GB free",
                in->topology.n_on_host, bl_gb(m->disk),
                bl_train_config_is_full(in->config) ? "weights and their state" : "the frozen base",
                dir, bl_gb(free_bytes));
    if (bl_dir_is_in_memory(dir))
        bl_log_warning("offload_dir %s keeps its files in memory (tmpfs), beside what is "
                       "predicted; give it a disk",
                       dir);
}

/* The keys that have something left to give. */
static const char *gpu_remedies(const bl_plan_input *in, const bl_plan *plan)
{
    bool has_base = plan->placement.ratio < 1.0,
         has_saved = in->is_training && !in->config->activation_offload;
    bool is_full = bl_train_config_is_full(in->config);
    if (is_full && plan->optimizer.tier == BL_TIER_DEVICE)
        return has_saved
                   ? ", or with optimizer_tier host, offload_ratio 1 or activation_offload true"
                   : ", or with optimizer_tier host or offload_ratio 1";
    if (is_full && !has_base && !plan->placement.places_copy)
        return ", or with offload_compute_copy true";
    return has_base && has_saved ? ", or with offload_ratio 1 or activation_offload true"
           : has_base            ? ", or with offload_ratio 1"
           : has_saved           ? ", or with activation_offload true"
                                 : "";
}

/* Advice to those that share a memory. */
static const char *fewer_ranks(int n_ranks)
{
    return n_ranks > 1 ? ", or fewer ranks" : "";
}

static bl_status check_gpu(const bl_plan_input *in, const bl_plan *plan)
{
    const bl_memory_ledger *m = &plan->memory;
    int64_t needed = gpu_bytes(in, m), gpu = bl_plan_gpu_available_bytes(in),
            host = bl_plan_available_bytes(in);

    if (gpu < 0 || needed <= gpu) return BL_OK;
    return BL_FAIL(BL_ENOMEM,
                   "this run needs about %.4g GB of GPU memory, %.4g GB are available, and %.4g "
                   "GB of host memory, %.4g GB are available; these lower it: a smaller "
                   "per_device_train_batch_size, max_seq_length or visit_tokens%s%s",
                   bl_gb(needed), bl_gb(gpu), bl_gb(m->total), bl_gb(host),
                   fewer_ranks(in->topology.n_here), gpu_remedies(in, plan));
}

/* What full fine-tuning can keep on disk, or not at all with LoRA. */
static int64_t state_bytes(const bl_memory_ledger *m)
{
    return m->item[BL_MEMORY_BASE].host + m->item[BL_MEMORY_LORA].host +
           m->item[BL_MEMORY_GRADIENTS].host + m->item[BL_MEMORY_ADAM].host;
}

/* The remedy that saves most is the first, and one that saves little is left out. */
static bl_status check_host(const bl_plan_input *in, const bl_plan *plan)
{
    static const double SMALL_PART = 0.05;
    const bl_memory_ledger *m = &plan->memory;
    int64_t available = bl_plan_available_bytes(in), n_processes = processes_on_host(in);
    bool is_on_disk = plan->placement.tier == BL_TIER_DISK && plan->placement.ratio >= 1.0 &&
                      plan->placement.host_part == 0;

    if (available < 0 || m->total <= available / n_processes) return BL_OK;
    bool is_full = bl_train_config_is_full(in->config);
    int64_t base = is_on_disk ? 0 : m->item[BL_MEMORY_BASE].host;
    const char *smaller = "a smaller per_device_train_batch_size, max_seq_length or visit_tokens",
               *disk = is_full ? "optimizer_tier disk and offload_tier disk (offload_dir, "
                                 "offload_ratio 1), or finetuning_type lora"
                               : "the frozen base on disk (offload_tier disk, offload_dir, "
                                 "offload_ratio 1)";
    if (is_full) base = state_bytes(m);
    bool has_disk = base >= SMALL_PART * (double)m->total, is_first = 2 * base > m->total;
    return BL_FAIL(BL_ENOMEM,
                   "this run needs about %.4g GB of %s, %.4g GB are available; these lower it: "
                   "%s%s%s%s",
                   bl_gb(m->total * n_processes), is_gpu(in) ? "host memory" : "memory",
                   bl_gb(available), is_first ? disk : smaller, has_disk ? ", or " : "",
                   !has_disk  ? ""
                   : is_first ? smaller
                              : disk,
                   fewer_ranks(in->topology.n_on_host));
}

bl_status bl_plan_check(const bl_plan_input *in, const bl_plan *plan)
{
    if (is_gpu(in)) BL_TRY(check_gpu(in, plan));
    return check_host(in, plan);
}
