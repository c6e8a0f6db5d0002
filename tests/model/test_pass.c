/* SPDX-License-Identifier: Apache-2.0 */
/* The pass over all layers: how many micro-batches a visit takes, what is kept and where, how deep the rings
 * are and how many ranks share the weights changes no bit of the loss or of any gradient. What a layer computes
 * is test_block's, what a model does test_model's, what a spilling stack does test_spill's. */
#include "ops_test.h"
#include "test_ranks.h"

#include <unistd.h>

#include "model/pass.h"
#include "ops/rope.h"

enum {
    LAYERS = 5, /* more than fit the slots of offloaded activations */
    HIDDEN = 16,
    INTER = 24,
    HEADS = 2,
    KV_HEADS = 1,
    HEAD_DIM = 8,
    VOCAB = 37,
    MICROS = 4,
    T_MAX = 9,
    MAX_SPANS = 4096,
    PAUSE_US = 400
};

static const int64_t tokens[MICROS] = {9, 0, 1,
                                       6}; /* a rank without samples visits with no tokens */

static const bl_llama_config config = {.vocab_size = VOCAB,
                                       .hidden_size = HIDDEN,
                                       .intermediate_size = INTER,
                                       .n_layers = LAYERS,
                                       .n_heads = HEADS,
                                       .n_kv_heads = KV_HEADS,
                                       .head_dim = HEAD_DIM,
                                       .rms_norm_eps = 1e-5,
                                       .rope_theta = 100.0};

typedef struct variant {
    int group, depth;
    unsigned save;
    bool offload;
} variant;

/* What must not change. */
typedef struct outcome {
    double loss, evaluated;
    int64_t n_gradients; /* of each layer's vector */
    float *gradients;    /* [LAYERS][MICROS][n_gradients] */
} outcome;

typedef struct rank_model {
    bl_llama_host host;
    bl_llama_weights weights;
    bl_base *base;
    bl_lora_layout lora;
    float *lora_shards;
    bl_gather_ring *lora_ring;
    bl_stream *gathers, *activations;
    bl_timeline *timeline;
    bl_micro_batch micro[MICROS];
    int32_t ids[T_MAX], targets[T_MAX], position[T_MAX], cu_seqlens[MICROS][2];
    float ones[T_MAX];
    int64_t sample[T_MAX];
    double *loss;
} rank_model;

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

static bl_status make_base(test_rank *self, int depth, rank_model *m)
{
    bl_format formats[LAYERS * BL_PROJECTIONS];
    bl_llama_weights *w = &m->weights;
    double inverse[HEAD_DIM / 2];

    for (int i = 0; i < LAYERS * BL_PROJECTIONS; i++) formats[i] = BL_FORMAT_F32;
    m->host = (bl_llama_host){.config = config,
                              .embedding_dtype = BL_F32,
                              .n_positions = T_MAX,
                              .embedding = test_random_floats(VOCAB * HIDDEN, 2)};
    *w = (bl_llama_weights){
        .host = &m->host, .device = self->device, .dims = bl_block_dims_of(&config)};
    BL_TRY(bl_llama_layout(&config, formats, BL_F32, self->n_ranks, &w->layout));
    w->shards = test_alloc((int64_t)w->layout.shard_bytes, 1);
    fill_shards(&w->layout, self->rank, w->shards);
    w->norms = test_random_floats((2 * LAYERS + 1) * HIDDEN, 3);
    w->rope_tables = test_floats(T_MAX * HEAD_DIM);
    bl_llama_config_rope_inv_freq(&config, inverse);
    bl_rope_fill_tables(T_MAX, HEAD_DIM / 2, inverse, w->rope_tables,
                        w->rope_tables + T_MAX * HEAD_DIM / 2);
    w->dims.cos_table = w->rope_tables;
    w->dims.sin_table = w->rope_tables + T_MAX * HEAD_DIM / 2;
    BL_TRY(bl_stream_create(self->device, "gathers", &m->gathers));
    if (self->n_ranks == 1) return bl_base_create_resident(&w->layout, w->shards, &m->base);
    return bl_base_create_sharded(&w->layout, w->shards, self->device, self->comm, m->gathers,
                                  depth, &m->base);
}

static bl_status make_lora(test_rank *self, int depth, rank_model *m)
{
    bl_lora_options options = {
        .r = 3, .alpha = 6, .dropout = 0.2, .target = {true, false, true, true, false, true, true}};
    bl_gather_unit units[LAYERS] = {0};

    bl_lora_layout_init(&config, &options, &m->lora);
    int64_t shard = bl_ceil_div(m->lora.n_floats, self->n_ranks);
    m->lora_shards = test_floats(LAYERS * shard);
    for (int l = 0; l < LAYERS; l++) {
        for (int64_t i = 0; i < shard; i++)
            m->lora_shards[l * shard + i] = 0.3f * test_value(100 + l, self->rank * shard + i, 1);
        units[l] = (bl_gather_unit){.n_items = 1,
                                    .item = {{.shard = m->lora_shards + l * shard,
                                              .shard_bytes = (size_t)shard * sizeof(float)}}};
    }
    return bl_gather_ring_create(
        &(bl_gather_ring_options){
            .device = self->device, .comm = self->comm, .stream = m->gathers, .depth = depth},
        LAYERS, units, &m->lora_ring);
}

static bl_status make_model(test_rank *self, int depth, rank_model *m)
{
    BL_TRY(bl_stream_create(self->device, "activations", &m->activations));
    BL_TRY(bl_timeline_create(self->device, MAX_SPANS, NULL, NULL, &m->timeline));
    BL_TRY(make_base(self, depth, m));
    BL_TRY(make_lora(self, depth, m));
    for (int t = 0; t < T_MAX; t++) {
        m->ids[t] = (t * 7 + 3) % VOCAB;
        m->targets[t] = (t * 5 + 1) % VOCAB;
        m->position[t] = t;
        m->sample[t] = 1;
        m->ones[t] = 1;
    }
    for (int i = 0; i < MICROS; i++) {
        m->cu_seqlens[i][1] = (int32_t)tokens[i];
        m->micro[i] = (bl_micro_batch){tokens[i], tokens[i] > 0, m->ids,    m->targets,
                                       m->ones,   m->position,   m->sample, m->cu_seqlens[i]};
    }
    m->loss = test_alloc(1, sizeof *m->loss);
    return BL_OK;
}

static void close_model(test_rank *self, rank_model *m, bl_llama_pass *pass)
{
    (void)bl_stream_synchronize(self->stream);
    if (m->gathers) (void)bl_stream_synchronize(m->gathers);
    if (m->activations) (void)bl_stream_synchronize(m->activations);
    bl_llama_pass_destroy(pass);
    bl_gather_ring_destroy(m->lora_ring);
    bl_base_destroy(m->base);
    bl_base_layout_free(&m->weights.layout);
    free(m->weights.shards), free(m->weights.norms), free(m->weights.rope_tables),
        free(m->host.embedding);
    free(m->lora_shards), free(m->loss);
    bl_timeline_destroy(m->timeline);
    bl_stream_destroy(m->gathers);
    bl_stream_destroy(m->activations);
}

static bl_status create_pass(test_rank *self, rank_model *m, const variant *v, bl_llama_pass **out)
{
    bl_pass_options options = {.T_max = T_MAX,
                               .max_group = v->group,
                               .ring_depth = v->depth,
                               .save = v->save,
                               .training = true,
                               .offload_activations = v->offload,
                               .lora = &m->lora,
                               .lora_ring = m->lora_ring,
                               .activations = v->offload ? m->activations : NULL,
                               .timeline = m->timeline};
    size_t before = bl_device_bytes(self->device);

    TEST_CHECK((bl_llama_pass_host_bytes(&config, &options) > 0) == v->offload);
    BL_TRY(bl_llama_pass_create(self->device, &m->weights, m->base, self->stream, &options, out));
    TEST_CHECK((int64_t)(bl_device_bytes(self->device) - before) ==
               bl_llama_pass_bytes(&config, &options));
    return BL_OK;
}

/* ---- between visits: the stacks are in order, and both streams are now and then late ---- */

typedef struct visit_state {
    test_rank *self;
    rank_model *m;
    bl_llama_pass *pass;
    uint64_t random;
    bool is_valid;
    int fail_at; /* the visit before which the activations stream fails; < 0: none */
} visit_state;

static bl_status sleep_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    usleep(*(const unsigned *)argument);
    return BL_OK;
}

static bl_status fail_task(bl_stream *stream, const void *argument)
{
    (void)stream, (void)argument;
    return BL_FAIL(BL_EIO, "planted");
}

static void delay(visit_state *s, bl_stream *stream)
{
    s->random ^= s->random << 13; /* xorshift64 */
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    unsigned pause_us = (unsigned)(s->random >> 8) % PAUSE_US;
    if (s->random % 3 == 0) (void)bl_stream_call(stream, sleep_task, &pause_us, sizeof pause_us);
}

static bool before_visit(void *user)
{
    visit_state *s = user;
    s->is_valid = s->is_valid && bl_llama_pass_validate(s->pass) == BL_OK;
    delay(s, s->m->activations);
    delay(s, s->self->stream);
    if (s->fail_at-- == 0) (void)bl_stream_call(s->m->activations, fail_task, NULL, 0);
    return false;
}

/* ---- a sink that keeps each micro-batch's gradients apart ---- */

typedef struct sink_state {
    outcome *out;
    int first_micro, n_micro, n_begun;
    bool in_order;
} sink_state;

static bl_status sink_begin(void *user, int64_t layer, bl_stream *stream, float **gradients)
{
    sink_state *s = user;
    (void)stream;
    int micro = s->n_begun % s->n_micro;
    s->in_order = s->in_order && layer == LAYERS - 1 - s->n_begun / s->n_micro;
    s->n_begun++;
    *gradients =
        s->out->gradients + (layer * MICROS + s->first_micro + micro) * s->out->n_gradients;
    return BL_OK;
}

static bl_status sink_end(void *user, int64_t layer, bl_stream *stream)
{
    (void)user, (void)layer, (void)stream;
    return BL_OK;
}

static bl_status train(test_rank *self, rank_model *m, bl_llama_pass *pass, int group, int fail_at,
                       outcome *out)
{
    visit_state visits = {self, m, pass, 88172645463325252u + (uint64_t)self->rank, true, fail_at};

    *m->loss = 0;
    for (int first = 0; first < MICROS; first += group) {
        sink_state state = {.out = out,
                            .first_micro = first,
                            .n_micro = (int)bl_min_i64(group, MICROS - first),
                            .in_order = true};
        bl_gradient_sink sink = {&state, sink_begin, sink_end};
        bl_pass_input input = {.n_micro = state.n_micro,
                               .micro = m->micro + first,
                               .loss_scale = 1.0 / 16,
                               .loss_sum = m->loss,
                               .dropout = {.p = 0.2f, .seed = 3, .step = 4},
                               .sink = &sink,
                               .stop = before_visit,
                               .stop_user = &visits};
        BL_TRY(bl_llama_pass_train(pass, &input));
        BL_TRY(bl_llama_pass_validate(pass));
        TEST_CHECK(state.in_order && state.n_begun == LAYERS * state.n_micro);
    }
    BL_TRY(bl_stream_synchronize(self->stream));
    TEST_CHECK(visits.is_valid);
    out->loss = *m->loss;
    return BL_OK;
}

/* Once as it is called, once without the training's dropout: the same. */
static bl_status evaluate(test_rank *self, rank_model *m, bl_llama_pass *pass, int group,
                          outcome *out)
{
    visit_state visits = {self, m, pass, 362436069u + (uint64_t)self->rank, true, -1};
    double sums[2];
    for (int plain = 0; plain < 2; plain++) {
        *m->loss = 0;
        for (int first = 0; first < MICROS; first += group) {
            bl_pass_input input = {.n_micro = (int)bl_min_i64(group, MICROS - first),
                                   .micro = m->micro + first,
                                   .loss_sum = m->loss,
                                   .dropout = {.p = plain ? 0.0f : 0.2f, .seed = 3, .step = 4},
                                   .stop = before_visit,
                                   .stop_user = &visits};
            BL_TRY(bl_llama_pass_evaluate(pass, &input));
        }
        BL_TRY(bl_stream_synchronize(self->stream));
        sums[plain] = *m->loss;
    }
    TEST_CHECK(sums[0] == sums[1] && visits.is_valid);
    out->evaluated = sums[0];
    return BL_OK;
}

typedef struct update_args {
    float *weights;
    int64_t n;
} update_args;

static bl_status update_task(bl_stream *stream, const void *argument)
{
    const update_args *a = argument;
    (void)stream;
    for (int64_t i = 0; i < a->n; i++) a->weights[i] *= 0.75f;
    return BL_OK;
}

/* As the optimizer does: no visit after it may see older weights. */
static bl_status update(test_rank *self, rank_model *m)
{
    update_args args = {m->lora_shards, LAYERS * bl_ceil_div(m->lora.n_floats, self->n_ranks)};
    BL_TRY(bl_stream_call(self->stream, update_task, &args, sizeof args));
    return bl_gather_ring_shards_changed(m->lora_ring, self->stream);
}

static bool stop_at(void *user)
{
    int *left = user;
    return (*left)-- == 0;
}

/* Two steps with an evaluation after each, as a run has them, then a pass that is stopped before its first backward visit. */
static bl_status run_variant(test_rank *self, const variant *v, outcome *out)
{
    rank_model m = {.base = NULL};
    bl_llama_pass *pass = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, make_model(self, v->depth, &m));
    out->n_gradients = m.lora.n_floats;
    out->gradients = test_floats(LAYERS * MICROS * out->n_gradients);
    BL_TRY_GOTO(st, done, create_pass(self, &m, v, &pass));
    int64_t allocations = bl_device_allocations(self->device);
    for (int step = 0; step < 2; step++) {
        BL_TRY_GOTO(st, done, train(self, &m, pass, v->group, -1, out));
        BL_TRY_GOTO(st, done, bl_gather_ring_validate(m.lora_ring));
        BL_TRY_GOTO(st, done, update(self, &m));
        BL_TRY_GOTO(st, done, evaluate(self, &m, pass, v->group, out));
    }
    TEST_CHECK_GOTO(st, done, bl_device_allocations(self->device) == allocations);
    int visits = LAYERS + 1;
    bl_pass_input input = {
        .n_micro = 1, .micro = m.micro, .loss_sum = m.loss, .stop = stop_at, .stop_user = &visits};
    TEST_CHECK_GOTO(st, done, bl_llama_pass_train(pass, &input) == BL_ESTOPPED);
    BL_TRY_GOTO(st, done, bl_llama_pass_validate(pass));
    st = bl_stream_synchronize(self->stream);
done:
    close_model(self, &m, pass);
    return st;
}

typedef struct shared_run {
    variant v;
    const outcome *want; /* NULL: this is the first */
    outcome *got;
} shared_run;

static bl_status compare_variant(test_rank *self)
{
    const shared_run *run = self->arg;
    outcome got = {.gradients = NULL};
    bl_status st = run_variant(self, &run->v, &got);

    if (!run->want) {
        *run->got = got;
        return st;
    }
    size_t n_bytes = (size_t)(LAYERS * MICROS * got.n_gradients) * sizeof *got.gradients;
    if (st == BL_OK && (got.loss != run->want->loss || got.evaluated != run->want->evaluated))
        st = BL_FAIL(BL_EINTERNAL, "loss %.17g and %.17g, not %.17g and %.17g", got.loss,
                     got.evaluated, run->want->loss, run->want->evaluated);
    if (st == BL_OK && memcmp(got.gradients, run->want->gradients, n_bytes) != 0)
        st = BL_FAIL(BL_EINTERNAL, "other gradients");
    free(got.gradients);
    return st;
}

static void run_shared(const shared_run *run, int n_ranks)
{
    bl_status st = test_ranks_run(n_ranks, 1, 60, compare_variant, (void *)run, NULL);
    if (st != BL_OK)
        print_error("group %d, depth %d, save %u, offload %d, %d ranks: %s\n", run->v.group,
                    run->v.depth, run->v.save, run->v.offload, n_ranks, bl_error_text());
    assert_int_equal(st, BL_OK);
}

static void test_no_choice_changes_a_bit(void **state)
{
    static const int groups[] = {1, 3, MICROS}, depths[] = {1, 2, 5}, ranks[] = {1, 2, 3},
                     powers[] = {1, 2, 4};
    static const unsigned saves[] = {BL_SAVE_S0, BL_SAVE_S2, BL_SAVE_S4};
    outcome want = {.gradients = NULL};
    shared_run first = {{.group = MICROS, .depth = 2, .save = BL_SAVE_S3}, NULL, &want};
    (void)state;

    run_shared(&first, 1);
    assert_true(want.loss > 0 && want.evaluated > 0 &&
                want.loss != want.evaluated); /* dropout is for training only */
    for (int64_t i = 0; i < want.n_gradients; i++)
        assert_true(want.gradients[want.n_gradients + i] == 0); /* no tokens */
    for (int i = 0; i < 27; i++) {                              /* every pair of choices meets */
        shared_run run = {{groups[i / 9], depths[i / 3 % 3], saves[i % 3], false}, &want, NULL};
        run_shared(&run, ranks[(i + i / 3 + i / 9) % 3]);
    }
    for (int i = 0; i < 18; i++) { /* every choice meets every other one */
        shared_run run = {{groups[i / 9], depths[i % 2], saves[i / 3 % 3], true}, &want, NULL};
        run_shared(&run, powers[i % 3]);
    }
    free(want.gradients);
}

/* ---- one step over all micro-batches together ---- */

typedef struct step_run {
    variant v;
    int fail_at; /* as in visit_state */
    int bad; /* a NaN in the norm of this layer; -1: in the embedding of the last micro-batch's tokens; LAYERS: none */
} step_run;

typedef struct step_case {
    rank_model m;
    bl_llama_pass *pass;
    outcome out;
    int32_t rare_ids[T_MAX];
} step_case;

static bl_status open_step(test_rank *self, const step_run *run, step_case *c)
{
    *c = (step_case){.pass = NULL};
    BL_TRY(make_model(self, run->v.depth, &c->m));
    c->out.n_gradients = c->m.lora.n_floats;
    c->out.gradients = test_floats(LAYERS * MICROS * c->out.n_gradients);
    for (int t = 0; t < T_MAX; t++) c->rare_ids[t] = VOCAB - 1;
    c->m.micro[MICROS - 1].ids = c->rare_ids;
    if (run->bad < 0) ((float *)c->m.host.embedding)[VOCAB * HIDDEN - 1] = NAN;
    if (run->bad >= 0 && run->bad < LAYERS) c->m.weights.norms[2 * run->bad * HIDDEN] = NAN;
    return create_pass(self, &c->m, &run->v, &c->pass);
}

static void close_step(test_rank *self, step_case *c)
{
    close_model(self, &c->m, c->pass);
    free(c->out.gradients);
}

/* All inputs go out, all but the newest two come back; of what is kept, all but the newest two go both ways; and of
 * each only the rows that the micro-batches have, each rounded up to 64. */
static bl_status count_bytes(test_rank *self)
{
    const step_run *run = self->arg;
    step_case c;
    bl_status st;
    bl_timeline_totals totals;
    const bl_lane_totals *moved = &totals.lane[BL_LANE_ACTIVATIONS];

    BL_TRY_GOTO(st, done, open_step(self, run, &c));
    BL_TRY_GOTO(st, done, train(self, &c.m, c.pass, run->v.group, run->fail_at, &c.out));
    BL_TRY_GOTO(st, done, evaluate(self, &c.m, c.pass, run->v.group, &c.out)); /* moves nothing */
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.m.activations));
    bl_timeline_collect(c.m.timeline);
    bl_timeline_get_totals(c.m.timeline, &totals);
    int64_t rows = 3 * 64; /* one micro-batch has no tokens */
    int64_t kept = bl_block_saved_floats(&c.m.weights.dims, run->v.save) * 2 * (LAYERS - 2),
            inputs = HIDDEN * 2 * LAYERS;
    int64_t want = rows * (inputs + kept) * (int64_t)sizeof(float);
    TEST_CHECK_GOTO(st, done, totals.n_dropped == 0 && totals.lane[BL_LANE_COMPUTE].busy_s > 0);
    TEST_CHECK_GOTO(st, done, moved->n_bytes == (run->v.offload ? want : 0));
    TEST_CHECK_GOTO(st, done, (moved->busy_s > 0) == run->v.offload);
done:
    close_step(self, &c);
    return st;
}

static bl_status fail_activations(test_rank *self)
{
    const step_run *run = self->arg;
    step_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_step(self, run, &c));
    st = train(self, &c.m, c.pass, run->v.group, run->fail_at, &c.out);
done:
    close_step(self, &c);
    return st;
}

static bl_status find_planted(test_rank *self)
{
    const step_run *run = self->arg;
    step_case c;
    bl_status st;
    int64_t layer = -2;
    int micro = -1;

    BL_TRY_GOTO(st, done, open_step(self, run, &c));
    BL_TRY_GOTO(st, done, train(self, &c.m, c.pass, run->v.group, run->fail_at, &c.out));
    bl_pass_input input = {.n_micro = MICROS, .micro = c.m.micro};
    bool is_found = bl_llama_pass_find_bad(c.pass, &input, &layer, &micro);
    TEST_CHECK_GOTO(st, done, is_found == (run->bad < LAYERS));
    TEST_CHECK_GOTO(st, done,
                    !is_found || (layer == run->bad && micro == (run->bad < 0 ? MICROS - 1 : 0)));
done:
    close_step(self, &c);
    return st;
}

static bl_status run_step(test_rank_fn fn, step_run run)
{
    bl_status st = test_ranks_run(1, 1, 60, fn, &run, NULL);
    if (st != BL_OK && run.fail_at < 0)
        print_error("group %d, save %u, offload %d, bad %d: %s\n", run.v.group, run.v.save,
                    run.v.offload, run.bad, bl_error_text());
    return st;
}

static void test_only_what_is_needed_is_moved(void **state)
{
    static const unsigned saves[] = {BL_SAVE_S0, BL_SAVE_S2, BL_SAVE_S4};
    (void)state;
    for (int i = 0; i < 12; i++) {
        variant v = {
            .group = i / 3 % 2 ? 3 : 1, .depth = 2, .save = saves[i % 3], .offload = i < 6};
        assert_int_equal(run_step(count_bytes, (step_run){v, -1, LAYERS}), BL_OK);
    }
}

/* Wherever the stream fails while somebody still waits for it, the step fails with its words, and all can be freed. */
static void test_a_failed_stream_ends_the_step(void **state)
{
    variant v = {.group = MICROS, .depth = 2, .save = BL_SAVE_S2, .offload = true};
    (void)state;
    for (int visit = 0; visit < 2 * LAYERS - 1; visit++) {
        assert_int_equal(run_step(fail_activations, (step_run){v, visit, LAYERS}), BL_EIO);
        assert_non_null(strstr(bl_error_text(), "planted"));
    }
}

static void test_the_first_bad_output_is_found(void **state)
{
    (void)state;
    for (int offload = 0; offload < 2; offload++)
        for (int bad = -1; bad <= LAYERS; bad++) {
            variant v = {.group = MICROS, .depth = 2, .save = BL_SAVE_S2, .offload = offload};
            assert_int_equal(run_step(find_planted, (step_run){v, -1, bad}), BL_OK);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_choice_changes_a_bit),
        cmocka_unit_test(test_only_what_is_needed_is_moved),
        cmocka_unit_test(test_a_failed_stream_ends_the_step),
        cmocka_unit_test(test_the_first_bad_output_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
