/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"

/* From what takes the most memory to what takes the least. */
static const struct {
    bl_activation_checkpointing key;
    unsigned save;
    const char *name;
} savings[] = {{BL_RECOMPUTE_NONE, BL_SAVE_S4, "none"},
               {BL_RECOMPUTE_SELECTIVE, BL_SAVE_S2, "selective"},
               {BL_RECOMPUTE_FULL, BL_SAVE_S0, "full"}};

/* Each of them plans with the same memory. */
static int64_t processes_on_host(const bl_plan_input *in)
{
    return bl_ceil_div(in->topology.n_on_host, in->topology.n_here);
}

static int64_t available_bytes(const bl_plan_input *in)
{
    return in->available_bytes != 0 ? in->available_bytes : bl_memory_available_bytes();
}

static double mib(int64_t n_bytes)
{
    return (double)n_bytes / (1 << 20);
}

static bl_status predict(const bl_plan_input *in, unsigned save, bl_plan *plan)
{
    plan->pass = bl_plan_pass_options(in, save);
    return bl_plan_predict_memory(in, &plan->placement, save, &plan->memory);
}

/* On the CPU device memory is host memory: only the disk tier makes room. */
static bl_status choose_ratio(const bl_plan_input *in, bl_plan *plan)
{
    enum { N_TRIES = 20 };
    int64_t available = available_bytes(in);

    if (plan->placement.tier != BL_TIER_DISK) return BL_OK;
    for (int i = 0; i <= N_TRIES; i++) {
        plan->placement.ratio = (double)i / N_TRIES;
        BL_TRY(predict(in, plan->pass.save, plan));
        if (available < 0 || plan->memory.total <= available / 10 * 9 / processes_on_host(in))
            break;
    }
    bl_log_info("offload_ratio auto: %.2f, %.1f MiB in all of %.1f MiB available",
                plan->placement.ratio, mib(plan->memory.total), mib(available));
    return BL_OK;
}

/* As configured; auto saves the least, until the base has its place. */
static unsigned first_saving(bl_activation_checkpointing asked)
{
    size_t i = 0;
    while (savings[i].key != asked && savings[i].key != BL_RECOMPUTE_FULL) i++;
    return savings[i].save;
}

static bl_status choose_placement(const bl_plan_input *in, bl_plan *plan)
{
    const bl_train_config *c = in->config;
    bool is_auto = c->offload_ratio == (double)BL_OPTION_AUTO;

    plan->placement = (bl_llama_placement){
        .ratio = is_auto ? 0.0 : c->offload_ratio,
        .tier = c->offload_tier == BL_OFFLOAD_DISK ? BL_TIER_DISK : BL_TIER_HOST,
        .dir = c->offload_dir,
        .pin = true,
        .n = in->topology.n_on_host};
    plan->pass = bl_plan_pass_options(in, first_saving(c->activation_checkpointing));
    return is_auto ? choose_ratio(in, plan) : BL_OK;
}

static bl_status choose_saving(const bl_plan_input *in, bl_plan *plan)
{
    if (in->config->activation_checkpointing != BL_RECOMPUTE_AUTO) return BL_OK;
    int64_t available = available_bytes(in);
    for (size_t i = 0; i < BL_COUNT(savings); i++) {
        BL_TRY(predict(in, savings[i].save, plan));
        if (savings[i].key != BL_RECOMPUTE_FULL &&
            plan->memory.total > available / 2 / processes_on_host(in))
            continue;
        bl_log_info("activation_checkpointing auto: %s, %.1f MiB in all of %.1f MiB available",
                    savings[i].name, mib(plan->memory.total), mib(available));
        return BL_OK;
    }
    return BL_OK;
}

bl_status bl_plan_choose(const bl_plan_input *in, bl_plan *out)
{
    BL_TRY(choose_placement(in, out));
    if (in->is_training) BL_TRY(choose_saving(in, out));
    return predict(in, out->pass.save, out);
}

void bl_plan_print(const bl_plan_input *in, const bl_plan *plan)
{
    const bl_memory_ledger *m = &plan->memory;
    const char *dir = in->config->offload_dir;
    int64_t free_bytes = 0;

    int64_t in_host = m->item[BL_MEMORY_BASE].host;

    bl_log_info("memory predicted: %.1f MiB%s (a rank: frozen base %.1f, ring %.1f, LoRA and AdamW "
                "%.1f, activations %.1f)",
                mib(m->total), processes_on_host(in) > 1 ? " a process" : "",
                mib(bl_memory_sum(m, BL_MEMORY_BASE, BL_MEMORY_NORMS)),
                mib(bl_memory_sum(m, BL_MEMORY_RING, BL_MEMORY_READER)),
                mib(bl_memory_sum(m, BL_MEMORY_LORA, BL_MEMORY_LORA_RING)),
                mib(bl_memory_sum(m, BL_MEMORY_LAYER_INPUTS, BL_MEMORY_LOGITS)));
    if (in_host > 0)
        bl_log_info("in host memory: %.1f MiB a rank of the frozen base", mib(in_host));
    if (in_host > 0 && in->config->device == BL_CONFIG_DEVICE_CPU)
        bl_log_warning("offload_tier host frees no memory of a CPU, whose memory is the host's; "
                       "offload_tier disk does");
    if (m->disk == 0) return;
    (void)bl_dir_free_bytes(dir, &free_bytes);
    bl_log_info("on disk: %d x %.1f MiB of the frozen base, in %s, which has %.1f MiB free",
                in->topology.n_on_host, mib(m->disk), dir, mib(free_bytes));
    if (bl_dir_is_in_memory(dir))
        bl_log_warning("offload_dir %s keeps its files in memory (tmpfs), beside what is "
                       "predicted; give it a disk",
                       dir);
}

bl_status bl_plan_check(const bl_plan_input *in, const bl_plan *plan)
{
    const bl_memory_ledger *m = &plan->memory;
    int64_t available = available_bytes(in), n_processes = processes_on_host(in);

    if (available < 0 || m->total <= available / n_processes) return BL_OK;
    return BL_FAIL(BL_ENOMEM,
                   "this run needs about %.1f MiB of memory, %.1f MiB are available; less are "
                   "needed with a smaller "
                   "per_device_train_batch_size, max_seq_length or visit_tokens, or fewer ranks%s",
                   mib(m->total * n_processes), mib(available),
                   plan->placement.tier == BL_TIER_DISK && plan->placement.ratio >= 1.0
                       ? ""
                       : ", or with the frozen base on disk (offload_tier disk, offload_dir, "
                         "offload_ratio 1)");
}
