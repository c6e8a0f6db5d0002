/* SPDX-License-Identifier: Apache-2.0 */
/* The pass over all layers: the number of micro-batches per visit, the choice and place of saved
 * activations, the depth of the rings and the number of ranks change no bit of the loss or of any
 * gradient. test_block tests a layer's results, test_model a model's, test_spill a spilling
 * stack. */
#include "pass_model.h"

#include <stdatomic.h>
#include <unistd.h>

enum { PAUSE_US = 400 };

/* What must not change. */
typedef struct outcome {
    double loss, evaluated;
    int64_t n_gradients; /* of each layer's vector */
    float *gradients;    /* [LAYERS][MICROS][n_gradients] */
} outcome;

/* ---- between visits: the stacks are in order, and both streams are now and then late ---- */

typedef struct visit_state {
    test_rank *self;
    pass_model *m;
    bl_pass *pass;
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
    s->is_valid = s->is_valid && bl_pass_validate(s->pass) == BL_OK;
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

static bl_status sink_begin(void *user, int64_t layer, bl_stream *stream, bl_unit_gradients *out)
{
    sink_state *s = user;
    (void)stream;
    if (layer >= LAYERS) return BL_OK; /* the head, which is frozen */
    int micro = s->n_begun % s->n_micro;
    s->in_order = s->in_order && layer == LAYERS - 1 - s->n_begun / s->n_micro;
    s->n_begun++;
    out->lora = s->out->gradients + (layer * MICROS + s->first_micro + micro) * s->out->n_gradients;
    return BL_OK;
}

static bl_status sink_end(void *user, int64_t layer, bl_stream *stream)
{
    (void)user, (void)layer, (void)stream;
    return BL_OK;
}

/* All through the model's adapter, their losses summed. sink NULL: an evaluation. */
static void use_adapter(const pass_model *m, int first, int n, const bl_gradient_sink *sink,
                        bl_pass_micro *micro)
{
    for (int i = 0; i < n; i++)
        micro[i] = (bl_pass_micro){.batch = &m->micro[first + i],
                                   .adapter = &m->lora.use,
                                   .loss_sum = m->loss,
                                   .gradients = sink,
                                   .loss_scale = 1.0 / 16};
}

static bl_status train(test_rank *self, pass_model *m, bl_pass *pass, int group, int fail_at,
                       outcome *out)
{
    visit_state visits = {self, m, pass, 88172645463325252u + (uint64_t)self->rank, true, fail_at};

    *m->loss = 0;
    for (int first = 0; first < MICROS; first += group) {
        sink_state state = {.out = out,
                            .first_micro = first,
                            .n_micro = (int)bl_min_i64(group, MICROS - first),
                            .in_order = true};
        bl_gradient_sink sink = {.user = &state, .begin = sink_begin, .end = sink_end};
        bl_pass_micro micro[MICROS];
        bl_pass_input input = {
            .n_micro = state.n_micro, .micro = micro, .stop = before_visit, .stop_user = &visits};
        use_adapter(m, first, state.n_micro, &sink, micro);
        BL_TRY(bl_pass_run(pass, &input));
        BL_TRY(bl_pass_validate(pass));
        TEST_CHECK(state.in_order && state.n_begun == LAYERS * state.n_micro);
    }
    BL_TRY(bl_stream_synchronize(self->stream));
    TEST_CHECK(visits.is_valid);
    out->loss = *m->loss;
    return BL_OK;
}

/* Once as it is called, once without the training's dropout: the same. */
static bl_status evaluate(test_rank *self, pass_model *m, bl_pass *pass, int group, outcome *out)
{
    visit_state visits = {self, m, pass, 362436069u + (uint64_t)self->rank, true, -1};
    float p = m->lora.use.dropout.p;
    double sums[2];
    for (int plain = 0; plain < 2; plain++) {
        *m->loss = 0;
        m->lora.use.dropout.p = plain ? 0.0f : p;
        for (int first = 0; first < MICROS; first += group) {
            bl_pass_micro micro[MICROS];
            bl_pass_input input = {.n_micro = (int)bl_min_i64(group, MICROS - first),
                                   .micro = micro,
                                   .stop = before_visit,
                                   .stop_user = &visits};
            use_adapter(m, first, input.n_micro, NULL, micro);
            BL_TRY(bl_pass_run(pass, &input));
        }
        BL_TRY(bl_stream_synchronize(self->stream));
        sums[plain] = *m->loss;
    }
    m->lora.use.dropout.p = p;
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
static bl_status update(test_rank *self, pass_model *m)
{
    update_args args = {m->lora.shards,
                        LAYERS * bl_ceil_div(m->lora.layout.n_floats, self->n_ranks)};
    BL_TRY(bl_stream_call(self->stream, update_task, &args, sizeof args));
    return bl_gather_ring_shards_changed(m->lora.use.ring, self->stream);
}

static bool stop_at(void *user)
{
    int *left = user;
    return (*left)-- == 0;
}

/* Two steps with an evaluation after each, as a run has them, then a pass that is stopped before
 * its first backward visit. */
static bl_status run_variant(test_rank *self, const variant *v, outcome *out)
{
    pass_model m = {.base = NULL};
    bl_pass *pass = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, pass_model_create(self, v->depth, &m));
    out->n_gradients = m.lora.layout.n_floats;
    out->gradients = test_floats(LAYERS * MICROS * out->n_gradients);
    BL_TRY_GOTO(st, done, pass_create(self, &m, v, &pass));
    int64_t allocations = bl_device_allocations(self->device);
    for (int step = 0; step < 2; step++) {
        BL_TRY_GOTO(st, done, train(self, &m, pass, v->group, -1, out));
        BL_TRY_GOTO(st, done, bl_gather_ring_validate(m.lora.use.ring));
        BL_TRY_GOTO(st, done, update(self, &m));
        BL_TRY_GOTO(st, done, evaluate(self, &m, pass, v->group, out));
    }
    TEST_CHECK_GOTO(st, done, bl_device_allocations(self->device) == allocations);
    int visits = LAYERS + 1;
    bl_gradient_sink never = {.begin = sink_begin, .end = sink_end}; /* of the head alone */
    bl_pass_micro micro;
    use_adapter(&m, 0, 1, &never, &micro);
    bl_pass_input input = {.n_micro = 1, .micro = &micro, .stop = stop_at, .stop_user = &visits};
    TEST_CHECK_GOTO(st, done, bl_pass_run(pass, &input) == BL_ESTOPPED);
    BL_TRY_GOTO(st, done, bl_pass_validate(pass));
    st = bl_stream_synchronize(self->stream);
done:
    pass_model_close(self, &m, pass);
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
        print_error("group %d, depth %d, save %u of all but %d layers, offload %d, %d ranks: %s\n",
                    run->v.group, run->v.depth, run->v.save, (int)run->v.n_saving_all,
                    run->v.offload, n_ranks, bl_error_text());
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
        shared_run run = {
            {groups[i / 9], depths[i / 3 % 3], saves[i % 3], false, i % 4}, &want, NULL};
        run_shared(&run, ranks[(i + i / 3 + i / 9) % 3]);
    }
    for (int i = 0; i < 18; i++) { /* every choice meets every other one */
        shared_run run = {
            {groups[i / 9], depths[i % 2], saves[i / 3 % 3], true, i / 2 % 4}, &want, NULL};
        run_shared(&run, powers[i % 3]);
    }
    free(want.gradients);
}

/* ---- how far the host runs ahead ---- */

enum { SLOW_VISIT_US = 3000 };

typedef struct ahead_state {
    bl_stream *stream;
    atomic_int begun; /* visits that the stream has come to */
    int queued;       /* visits that were asked for */
    int stop_at;
    bool is_bounded;
    const bl_timeline *timeline;
    double
        busy_s[2]; /* of visits whose spans were collected: before visit LAYERS, before the stop */
} ahead_state;

static bl_status count_visit(bl_stream *stream, const void *argument)
{
    ahead_state *s = *(ahead_state *const *)argument;
    (void)stream;
    usleep(SLOW_VISIT_US);
    atomic_fetch_add(&s->begun, 1);
    return BL_OK;
}

/* Before visit k: those up to k - 2 have ended, so the counts of visits 0 .. k - 2 have run. */
static bool before_slow_visit(void *user)
{
    ahead_state *s = user;
    bl_timeline_totals totals;
    s->is_bounded = s->is_bounded && atomic_load(&s->begun) >= s->queued - 1;
    bl_timeline_get_totals(s->timeline, &totals);
    if (s->queued == LAYERS || s->queued == s->stop_at)
        s->busy_s[s->queued == s->stop_at] = totals.lane[BL_LANE_COMPUTE].busy_s;
    if (s->queued == s->stop_at) return true;
    s->queued++;
    (void)bl_stream_call(s->stream, count_visit, &s, sizeof s);
    return false;
}

/* Over two passes: the second begins no further ahead than any visit. The stop is heeded at the
 * visit where it comes, with two visits at most still to run. */
static bl_status run_ahead(test_rank *self)
{
    variant v = {.group = MICROS, .depth = 2, .save = BL_SAVE_S2};
    pass_model m = {.base = NULL};
    bl_pass *pass = NULL;
    bl_status st;
    ahead_state s = {.stream = self->stream, .stop_at = LAYERS + 4, .is_bounded = true};
    bl_pass_micro micro[MICROS];
    bl_pass_input input = {
        .n_micro = MICROS, .micro = micro, .stop = before_slow_visit, .stop_user = &s};

    BL_TRY_GOTO(st, done, pass_model_create(self, v.depth, &m));
    BL_TRY_GOTO(st, done, pass_create(self, &m, &v, &pass));
    s.timeline = m.timeline;
    use_adapter(&m, 0, MICROS, NULL, micro);
    BL_TRY_GOTO(st, done, bl_pass_run(pass, &input)); /* LAYERS + 1 visits */
    TEST_CHECK_GOTO(st, done, bl_pass_run(pass, &input) == BL_ESTOPPED);
    TEST_CHECK_GOTO(st, done, s.is_bounded && s.queued == LAYERS + 4);
    TEST_CHECK_GOTO(st, done, atomic_load(&s.begun) >= s.queued - 2);
    /* Of visits up to three before these. */
    TEST_CHECK_GOTO(st, done, s.busy_s[0] > 0 && s.busy_s[1] > s.busy_s[0]);
    st = bl_stream_synchronize(self->stream);
done:
    pass_model_close(self, &m, pass);
    return st;
}

static void test_the_host_runs_two_visits_ahead(void **state)
{
    (void)state;
    if (test_ranks_run(1, 1, 60, run_ahead, NULL, NULL) != BL_OK) fail_msg("%s", bl_error_text());
}

/* ---- one step over all micro-batches together ---- */

typedef struct step_run {
    variant v;
    int fail_at; /* as in visit_state */
    /* a NaN in the norm of this layer; -1: in the embedding of the last micro-batch's tokens;
     * LAYERS: none */
    int bad;
} step_run;

typedef struct step_case {
    pass_model m;
    bl_pass *pass;
    outcome out;
    int32_t rare_ids[T_MAX];
} step_case;

static bl_status open_step(test_rank *self, const step_run *run, step_case *c)
{
    *c = (step_case){.pass = NULL};
    BL_TRY(pass_model_create(self, run->v.depth, &c->m));
    c->out.n_gradients = c->m.lora.layout.n_floats;
    c->out.gradients = test_floats(LAYERS * MICROS * c->out.n_gradients);
    for (int t = 0; t < T_MAX; t++) c->rare_ids[t] = VOCAB - 1;
    c->m.micro[MICROS - 1].ids = c->rare_ids;
    if (run->bad < 0) ((float *)c->m.model.embedding)[VOCAB * HIDDEN - 1] = NAN;
    if (run->bad >= 0 && run->bad < LAYERS) c->m.weights.vectors[2 * run->bad * HIDDEN] = NAN;
    return pass_create(self, &c->m, &run->v, &c->pass);
}

static void close_step(test_rank *self, step_case *c)
{
    pass_model_close(self, &c->m, c->pass);
    free(c->out.gradients);
}

/* All inputs are spilled, all except the newest two are fetched back; of the other saved
 * activations, all except the newest two are spilled and fetched; and of each only the rows that
 * the micro-batches have, each rounded up to 64. */
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
    int64_t kept = bl_block_saved_bytes(&c.m.weights.dims, run->v.save) * 2 * (LAYERS - 2),
            inputs = HIDDEN * 2 * LAYERS * (int64_t)sizeof(float);
    int64_t want = rows * (inputs + kept);
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
    bl_pass_micro all[MICROS];
    use_adapter(&c.m, 0, MICROS, NULL, all);
    bl_pass_input input = {.n_micro = MICROS, .micro = all};
    bool is_found = bl_pass_find_bad(c.pass, &input, &layer, &micro);
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

/* Wherever the stream fails while another still waits for it, the step fails with its text, and
 * all can be freed. */
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
        cmocka_unit_test(test_the_host_runs_two_visits_ahead),
        cmocka_unit_test(test_only_what_is_needed_is_moved),
        cmocka_unit_test(test_a_failed_stream_ends_the_step),
        cmocka_unit_test(test_the_first_bad_output_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
