/* SPDX-License-Identifier: Apache-2.0 */
/* ledger.c -- the memory a job will take, added up from the same functions that allocate it; docs/memory.md explains the rows. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "base/sizes.h"
#include "ops/rope.h"
#include "train/job.h"

enum { OTHER_BYTES = 24 << 20 }; /* code's data, libraries, stacks, streams: measured on small models, docs/memory.md */

static int64_t scale_bytes(const bl_base_layout *layout)
{
    int64_t n = 0;
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) {
                size_t codes, scales;
                if (bl_format_sizes(w->segment[s].format, w->segment[s].rows, w->cols, &codes, &scales)) n += (int64_t)scales;
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

    BL_TRY(bl_llama_layout(m, job->host->formats, job->host->head_dtype, shards, &layout));
    int64_t norms = (2 * m->n_layers + 1) * m->hidden_size, rope = job->host->n_positions * m->head_dim;
    *out = (bl_memory_ledger){
        .frozen = (int64_t)layout.shard_bytes + scale_bytes(&layout) + (norms + rope) * (int64_t)sizeof(float),
        .ring = shards > 1 ? (int64_t)bl_base_sharded_ring_bytes(&layout, (int)c->ring_depth) : 0,
        .embedding = m->vocab_size * m->hidden_size * (int64_t)bl_dtype_bytes(job->host->embedding_dtype),
        .adapter = job->lora.n_floats ? bl_adapter_state_bytes(&job->lora, m->n_layers, job->n_ranks, (int)c->ring_depth) : 0,
        .activations = bl_llama_pass_bytes(m, &options),
        .batches = job->evaluate_only ? 0 : 2 * bl_batches_bytes((int)c->gradient_accumulation_steps, options.T_max),
        .scratch = c->threads * BL_POOL_SCRATCH_BYTES,
        .other = OTHER_BYTES,
    };
    bl_base_layout_free(&layout);
    out->total = (out->frozen + out->ring + out->adapter + out->activations + out->batches + out->scratch) * job->n_here +
                 out->embedding + out->other;
    return BL_OK;
}

/* The number behind `key` in a file of the system's, in units of `unit`; -1 when there is none. */
static int64_t read_number(const char *path, const char *key, int64_t unit)
{
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");

    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNd64, &value) == 1) value *= unit;
    fclose(file);
    return value;
}

bl_status bl_job_check_memory(const bl_memory_ledger *ledger)
{
    int64_t available = read_number("/proc/meminfo", "MemAvailable:", 1024), limit = read_number("/sys/fs/cgroup/memory.max", "", 1);

    if (limit >= 0 && (available < 0 || limit < available)) available = limit;
    if (available < 0 || ledger->total <= available) return BL_OK;
    return BL_FAIL(BL_ENOMEM,
                   "this run needs about %.1f MiB of memory, %.1f MiB are available; less are needed with a smaller "
                   "per_device_train_batch_size, max_seq_length or visit_tokens, or fewer ranks",
                   (double)ledger->total / (1 << 20), (double)available / (1 << 20));
}

int64_t bl_process_anonymous_bytes(void)
{
    return bl_max_i64(0, read_number("/proc/self/status", "RssAnon:", 1024));
}
