/* SPDX-License-Identifier: Apache-2.0 */
/* pass_model.c -- a model of random weights as a sharded base, with adapters and micro-batches. */
#include "pass_model.h"

#include "arch/rope.h"
#include "ops/rope.h"

enum { MAX_SPANS = 4096 };

static const int64_t tokens[MICROS] = {9, 0, 1,
                                       6}; /* a rank without samples visits with no tokens */

const bl_model_config pass_config = {.arch = &bl_arch_llama,
                                     .vocab_size = VOCAB,
                                     .hidden_size = HIDDEN,
                                     .intermediate_size = INTER,
                                     .n_layers = LAYERS,
                                     .n_heads = HEADS,
                                     .n_kv_heads = KV_HEADS,
                                     .head_dim = HEAD_DIM,
                                     .rms_norm_eps = 1e-5,
                                     .rope_theta = 100.0};

/* Sharded float weights: element `byte / 4` of a row is a function of its place in the whole. */
static void fill_shards(const bl_base_layout *layout, int shard, float *out)
{
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_base_part *part =
                &layout->units[u].matrix[m].part[0]; /* all float: one part */
            float *at = out + (layout->units[u].offset + part->shard_offset) / sizeof *out;
            int64_t cols = part->row_bytes / (int64_t)sizeof *out, begin, end;
            bl_base_part_rows(part, shard, &begin, &end);
            for (int64_t i = 0; i < (end - begin) * cols; i++)
                at[i] = 0.5f * test_value((int)(u * 8 + m), begin * cols + i, 1);
        }
}

/* w->shards as pages in device memory. */
static bl_status make_pages(bl_model_weights *w, int shard)
{
    enum { N_PAGES = LAYERS * BL_LAYER_MATRICES + 1 };
    bl_pages_options options = {
        .device = w->device, .node = -1, .shard = shard, .n_shards = w->layout.n_shards};
    bl_page_spec specs[N_PAGES];
    char names[N_PAGES][BL_PAGE_NAME_BYTES];

    TEST_CHECK(bl_base_part_count(&w->layout) <= N_PAGES);
    for (bl_base_walk at = {.layout = &w->layout}; bl_base_next(&at);) {
        snprintf(names[at.index], sizeof names[0], "part %d", (int)at.index);
        specs[at.index] = (bl_page_spec){names[at.index], at.part->shard_bytes, BL_TIER_DEVICE};
    }
    BL_TRY(bl_pages_create(&options, bl_base_part_count(&w->layout), specs, &w->pages));
    for (bl_base_walk at = {.layout = &w->layout}; bl_base_next(&at);)
        BL_TRY(bl_pages_write(w->pages, at.index, 0,
                              (const char *)w->shards + w->layout.units[at.idx_unit].offset +
                                  at.part->shard_offset,
                              at.part->shard_bytes));
    return bl_pages_seal(w->pages);
}

static bl_status make_base(test_rank *self, int depth, pass_model *m)
{
    bl_model_weights *w = &m->weights;
    double inverse[HEAD_DIM / 2];

    for (int i = 0; i < LAYERS * BL_PROJECTIONS; i++) m->formats[i] = BL_FORMAT_F32;
    m->model = (bl_model){.config = pass_config,
                          .formats = m->formats,
                          .embedding_dtype = BL_F32,
                          .n_positions = T_MAX,
                          .embedding = test_random_floats(VOCAB * HIDDEN, 2)};
    *w = (bl_model_weights){
        .model = &m->model,
        .device = self->device,
        .dims = bl_block_dims_of(&pass_config, BL_LAYER_DENSE, BL_DEVICE_CPU, BL_F32)};
    BL_TRY(bl_model_layout(&pass_config, m->formats, BL_F32, bl_device_get_kind(self->device),
                           self->n_ranks, &w->layout));
    w->shards = test_alloc((int64_t)w->layout.shard_bytes, 1);
    fill_shards(&w->layout, self->rank, w->shards);
    w->vectors = test_random_floats((2 * LAYERS + 1) * HIDDEN, 3);
    w->rope_tables = test_floats(T_MAX * HEAD_DIM);
    bl_model_rope_inv_freq(&pass_config, false, inverse);
    bl_rope_fill_tables(0, T_MAX, HEAD_DIM / 2, inverse, 1.0, w->rope_tables,
                        w->rope_tables + T_MAX * HEAD_DIM / 2);
    w->dims.rope.cos_table = w->rope_tables;
    w->dims.rope.sin_table = w->rope_tables + T_MAX * HEAD_DIM / 2;
    BL_TRY(bl_stream_create(self->device, "gathers", &m->gathers));
    if (self->n_ranks == 1) return bl_base_create_resident(&w->layout, w->shards, &m->base);
    BL_TRY(bl_stream_create(self->device, "copies", &m->copies));
    BL_TRY(make_pages(w, self->rank));
    return bl_model_base_create(w,
                                &(bl_model_base_options){.shard_group = self->comm,
                                                         .copy = m->copies,
                                                         .gather = m->gathers,
                                                         .ring_depth = depth},
                                &m->base);
}

bl_status pass_adapter_create(test_rank *self, bl_stream *gathers, int depth, int64_t r,
                              float dropout, int number, pass_adapter *out)
{
    bl_lora_options options = {.r = r,
                               .alpha = 6,
                               .dropout = dropout,
                               .target = {true, false, true, true, false, true, true}};
    bl_gather_unit units[LAYERS] = {0};

    bl_lora_layout_init(&pass_config, &options, &out->layout);
    int64_t shard = bl_ceil_div(out->layout.n_floats, self->n_ranks);
    out->shards = test_floats(LAYERS * shard);
    for (int l = 0; l < LAYERS; l++) {
        for (int64_t i = 0; i < shard; i++)
            out->shards[l * shard + i] = 0.3f * test_value(number + l, self->rank * shard + i, 1);
        units[l] = (bl_gather_unit){.n_items = 1,
                                    .item = {{.shard = out->shards + l * shard,
                                              .shard_bytes = (size_t)shard * sizeof(float)}}};
    }
    out->use =
        (bl_pass_adapter){.lora = &out->layout, .dropout = {.p = dropout, .seed = 3, .step = 4}};
    return bl_gather_ring_create(
        &(bl_gather_ring_options){
            .device = self->device, .comm = self->comm, .stream = gathers, .depth = depth},
        LAYERS, units, &out->use.ring);
}

void pass_adapter_close(pass_adapter *adapter)
{
    bl_gather_ring_destroy(adapter->use.ring);
    free(adapter->shards);
}

bl_status pass_model_create(test_rank *self, int depth, pass_model *m)
{
    BL_TRY(bl_stream_create(self->device, "activations", &m->activations));
    BL_TRY(bl_timeline_create(self->device, MAX_SPANS, NULL, NULL, &m->timeline));
    BL_TRY(make_base(self, depth, m));
    BL_TRY(pass_adapter_create(self, m->gathers, depth, 3, 0.2f, 100, &m->lora));
    for (int t = 0; t < T_MAX; t++) {
        m->ids[t] = (t * 7 + 3) % VOCAB;
        m->targets[t] = (t * 5 + 1) % VOCAB;
        m->position[t] = t;
        m->sample[t] = 1;
        m->ones[t] = 1;
    }
    for (int i = 0; i < MICROS; i++) {
        m->cu_seqlens[i][1] = (int32_t)tokens[i];
        m->micro[i] = (bl_micro_batch){.T = tokens[i],
                                       .n_documents = tokens[i] > 0,
                                       .ids = m->ids,
                                       .targets = m->targets,
                                       .weights = m->ones,
                                       .position = m->position,
                                       .sample = m->sample,
                                       .cu_seqlens = m->cu_seqlens[i]};
    }
    m->loss = test_alloc(MICROS, sizeof *m->loss);
    return BL_OK;
}

void pass_model_close(test_rank *self, pass_model *m, bl_pass *pass)
{
    (void)bl_stream_synchronize(self->stream);
    if (m->gathers) (void)bl_stream_synchronize(m->gathers);
    if (m->activations) (void)bl_stream_synchronize(m->activations);
    bl_pass_destroy(pass);
    pass_adapter_close(&m->lora);
    bl_base_destroy(m->base);
    bl_pages_destroy(m->weights.pages);
    bl_base_layout_free(&m->weights.layout);
    free(m->weights.shards), free(m->weights.vectors), free(m->weights.rope_tables),
        free(m->model.embedding);
    free(m->loss);
    bl_timeline_destroy(m->timeline);
    bl_stream_destroy(m->gathers);
    bl_stream_destroy(m->copies);
    bl_stream_destroy(m->activations);
}

bl_status pass_create(test_rank *self, pass_model *m, const variant *v, bl_pass **out)
{
    bl_pass_options options = {.act = bl_device_act(self->device),
                               .T_max = T_MAX,
                               .max_group = v->group,
                               .ring_depth = v->depth,
                               .save = v->save,
                               .n_saving_all = v->n_saving_all,
                               .training = true,
                               .offload_activations = v->offload,
                               .lora_r = m->lora.layout.options.r,
                               .lora_dropout = true,
                               .activations = v->offload ? m->activations : NULL,
                               .timeline = m->timeline};
    size_t before = bl_device_bytes(self->device);

    bl_pass_bytes n = bl_pass_measure(&pass_config, &options);
    TEST_CHECK((n.host_inputs + n.host_saved + n.host_embeddings > 0) == v->offload);
    BL_TRY(bl_pass_create(self->device, &m->weights, m->base, self->stream, &options, out));
    TEST_CHECK((int64_t)(bl_device_bytes(self->device) - before) ==
               n.inputs + n.saved + n.boundary + n.logits + n.workspace + n.feed);
    return BL_OK;
}
