/* SPDX-License-Identifier: Apache-2.0 */
/* ledger.c -- the memory a job will take, added up from the same functions that allocate it; docs/memory.md explains the rows. */
#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/sizes.h"
#include "ops/rope.h"
#include "train/job.h"

/* Measured, docs/memory.md: what no function of ours allocates. */
enum {
    PROCESS_BYTES =
        4 << 20,          /* data and heap of program and libraries, stacks, streams, open files */
    BLAS_BYTES = 4 << 20, /* a thread's packing buffers and generated code */
};

static int64_t scale_bytes(const bl_base_layout *layout)
{
    int64_t n = 0;
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) {
                size_t codes, scales;
                if (bl_format_sizes(w->segment[s].format, w->segment[s].rows, w->cols, &codes,
                                    &scales))
                    n += (int64_t)scales;
            }
        }
    return n * (int64_t)sizeof(float);
}

bl_status bl_job_predict_memory(const bl_job *job, bl_memory_ledger *out)
{
    const bl_train_config *c = job->config;
    const bl_llama_config *m = &job->host->config;
    bl_pass_options options = bl_job_pass_options(job);
    bl_base_layout layout;
    int shards = (int)bl_min_i64(c->shard_size, job->n_ranks);

    bl_llama_placed_bytes placed;
    BL_TRY(bl_llama_layout(m, job->host->formats, job->host->head_dtype, shards, &layout));
    bl_status st = bl_llama_place_bytes(&layout, &job->placement, (int)c->ring_depth, &placed);
    int64_t scales = scale_bytes(&layout);
    bl_base_layout_free(&layout);
    BL_TRY(st);
    int64_t norms = (2 * m->n_layers + 1) * m->hidden_size,
            rope = job->host->n_positions * m->head_dim;
    *out = (bl_memory_ledger){
        .frozen = (int64_t)(placed.device + placed.host) + scales +
                  (norms + rope) * (int64_t)sizeof(float),
        .ring = (int64_t)(placed.ring + placed.reader),
        .host = (int64_t)placed.host,
        .disk = (int64_t)placed.disk,
        .embedding =
            m->vocab_size * m->hidden_size * (int64_t)bl_dtype_bytes(job->host->embedding_dtype),
        .adapter = job->lora.n_floats ? bl_adapter_state_bytes(&job->lora, m->n_layers,
                                                               job->n_ranks, (int)c->ring_depth)
                                      : 0,
        .activations = bl_llama_pass_bytes(m, &options) + bl_llama_pass_host_bytes(m, &options),
        .batches = (job->evaluate_only ? 0
                                       : 2 * bl_batches_bytes((int)c->gradient_accumulation_steps,
                                                              options.T_max)) +
                   (job->validation ? bl_batches_bytes(1, options.T_max) : 0),
        .scratch = c->threads * (BL_POOL_SCRATCH_BYTES + BLAS_BYTES),
        .other = PROCESS_BYTES,
    };
    out->total =
        (out->frozen + out->ring + out->adapter + out->activations + out->batches + out->scratch) *
            job->n_here +
        out->embedding + out->other;
    /* While weights are read, most of the rest is not there yet; with little of the rest, that is the peak. */
    int64_t loading = (out->frozen + out->scratch + bl_llama_load_bytes(job->host, shards) +
                       (int64_t)placed.writing) *
                          job->n_here +
                      out->embedding + out->other;
    out->total = bl_max_i64(out->total, loading);
    return BL_OK;
}

/* From what takes the most memory to what takes the least. */
static const struct {
    bl_activation_checkpointing key;
    unsigned save;
    const char *name;
} savings[] = {{BL_CHECKPOINT_NONE, BL_SAVE_S4, "none"},
               {BL_CHECKPOINT_SELECTIVE, BL_SAVE_S2, "selective"},
               {BL_CHECKPOINT_FULL, BL_SAVE_S0, "full"}};

/* Each of them plans with the same memory. */
static int64_t processes_on_host(const bl_job *job)
{
    return bl_ceil_div(job->n_on_host, job->n_here);
}

static double mib(int64_t n_bytes)
{
    return (double)n_bytes / (1 << 20);
}

/* On the CPU device memory is host memory: only the disk tier makes room. */
static bl_status choose_ratio(bl_job *job)
{
    enum { N_TRIES = 20 };
    int64_t available = bl_memory_available_bytes();
    bl_memory_ledger ledger;

    if (job->placement.tier != BL_TIER_DISK) return BL_OK;
    for (int i = 0; i <= N_TRIES; i++) {
        job->placement.ratio = (double)i / N_TRIES;
        BL_TRY(bl_job_predict_memory(job, &ledger));
        if (available < 0 || ledger.total <= available / 10 * 9 / processes_on_host(job)) break;
    }
    bl_log_info("offload_ratio auto: %.2f, %.1f MiB in all of %.1f MiB available",
                job->placement.ratio, mib(ledger.total), mib(available));
    return BL_OK;
}

/* As output_dir, it is made with its parents. */
static bl_status make_offload_dir(const bl_train_config *c)
{
    if (!c->offload_dir) return BL_OK;
    if (c->offload_tier != BL_OFFLOAD_DISK) {
        bl_log_info("offload_dir %s is not used: offload_tier is host", c->offload_dir);
        return BL_OK;
    }
    bl_status st = bl_dir_create(c->offload_dir);
    return st == BL_OK ? BL_OK : bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "offload_dir");
}

bl_status bl_job_choose_placement(bl_job *job)
{
    const bl_train_config *c = job->config;
    bool is_auto = c->offload_ratio == (double)BL_OPTION_AUTO;

    BL_TRY(make_offload_dir(c));
    for (size_t i = 0; i < BL_COUNT(savings);
         i++) /* auto: the least, until the base has its place */
        if (savings[i].key == c->activation_checkpointing || savings[i].key == BL_CHECKPOINT_FULL) {
            job->save = savings[i].save;
            break;
        }
    job->placement = (bl_llama_placement){.ratio = is_auto ? 0.0 : c->offload_ratio,
                                          .tier = c->offload_tier == BL_OFFLOAD_DISK ? BL_TIER_DISK
                                                                                     : BL_TIER_HOST,
                                          .dir = c->offload_dir,
                                          .pin = true,
                                          .n = job->n_on_host};
    return is_auto ? choose_ratio(job) : BL_OK;
}

bl_status bl_job_choose_saving(bl_job *job)
{
    bl_activation_checkpointing asked = job->config->activation_checkpointing;

    if (asked != BL_CHECKPOINT_AUTO) return BL_OK;
    int64_t available = bl_memory_available_bytes();
    for (size_t i = 0; i < BL_COUNT(savings); i++) {
        bl_memory_ledger ledger;
        job->save = savings[i].save;
        BL_TRY(bl_job_predict_memory(job, &ledger));
        if (savings[i].key != BL_CHECKPOINT_FULL &&
            ledger.total > available / 2 / processes_on_host(job))
            continue;
        bl_log_info("activation_checkpointing auto: %s, %.1f MiB in all of %.1f MiB available",
                    savings[i].name, mib(ledger.total), mib(available));
        return BL_OK;
    }
    return BL_OK;
}

void bl_job_print_memory(const bl_job *job, const bl_memory_ledger *m)
{
    const char *dir = job->config->offload_dir;
    int64_t free_bytes = 0;

    bl_log_info("memory predicted: %.1f MiB%s (a rank: frozen base %.1f, ring %.1f, LoRA and AdamW "
                "%.1f, activations %.1f)",
                mib(m->total), processes_on_host(job) > 1 ? " a process" : "", mib(m->frozen),
                mib(m->ring), mib(m->adapter), mib(m->activations));
    if (m->host > 0)
        bl_log_info("in host memory: %.1f MiB a rank of the frozen base", mib(m->host));
    if (m->host > 0 && job->config->device == BL_CONFIG_DEVICE_CPU)
        bl_log_warning("offload_tier host frees no memory of a CPU, whose memory is the host's; "
                       "offload_tier disk does");
    if (m->disk == 0) return;
    (void)bl_dir_free_bytes(dir, &free_bytes);
    bl_log_info("on disk: %d x %.1f MiB of the frozen base, in %s, which has %.1f MiB free",
                job->n_on_host, mib(m->disk), dir, mib(free_bytes));
    if (bl_dir_is_in_memory(dir))
        bl_log_warning("offload_dir %s keeps its files in memory (tmpfs), beside what is "
                       "predicted; give it a disk",
                       dir);
}

bl_status bl_job_check_memory(const bl_job *job, const bl_memory_ledger *m)
{
    int64_t available = bl_memory_available_bytes(), n_processes = processes_on_host(job);

    if (available < 0 || m->total <= available / n_processes) return BL_OK;
    return BL_FAIL(BL_ENOMEM,
                   "this run needs about %.1f MiB of memory, %.1f MiB are available; less are "
                   "needed with a smaller "
                   "per_device_train_batch_size, max_seq_length or visit_tokens, or fewer ranks%s",
                   mib(m->total * n_processes), mib(available),
                   job->placement.tier == BL_TIER_DISK && job->placement.ratio >= 1.0
                       ? ""
                       : ", or with the frozen base on disk (offload_tier disk, offload_dir, "
                         "offload_ratio 1)");
}
