/* SPDX-License-Identifier: Apache-2.0 */
/* ledger.c -- the memory a job will take, added up from the same functions that allocate it; docs/memory.md explains the rows. */
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
    out->total = (out->frozen + out->ring + out->adapter + out->activations + out->batches + out->scratch) * job->n_ranks +
                 out->embedding + out->other;
    return BL_OK;
}

int64_t bl_process_anonymous_bytes(void)
{
    char line[256];
    long long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    if (!status) return 0;
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %lld kB", &kib) == 1) break;
    fclose(status);
    return kib * 1024;
}
