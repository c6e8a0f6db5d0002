/* SPDX-License-Identifier: Apache-2.0 */
/* Micro-batches of one visit that use different adapters, or none, with gradients or without: each
 * has the bits that it has in a separate pass. */
#include "pass_model.h"

enum { ADAPTERS = 2 };

/* What micro-batch i goes through: adapters[adapter], or nothing (-1). */
typedef struct usage {
    int adapter;
    bool trains;
} usage;

typedef struct result {
    double loss[MICROS];
    float *gradients[MICROS]; /* [LAYERS][n_floats of its adapter]; NULL without */
} result;

typedef struct sink_state {
    float *gradients;
    int64_t n_floats;
} sink_state;

static bl_status sink_begin(void *user, int64_t layer, bl_stream *stream, bl_unit_gradients *out)
{
    const sink_state *s = user;
    (void)stream;
    if (layer < LAYERS) out->lora = s->gradients + layer * s->n_floats;
    return BL_OK;
}

static bl_status sink_end(void *user, int64_t layer, bl_stream *stream)
{
    (void)user, (void)layer, (void)stream;
    return BL_OK;
}

/* All micro-batches in passes of `group`. */
static bl_status run_group(test_rank *self, pass_model *m, const pass_adapter *adapters[ADAPTERS],
                           bl_pass *pass, const usage *usages, int group, result *out)
{
    sink_state states[MICROS];
    bl_gradient_sink sinks[MICROS];
    bl_pass_micro micro[MICROS];

    for (int i = 0; i < MICROS; i++) {
        const pass_adapter *adapter = usages[i].adapter < 0 ? NULL : adapters[usages[i].adapter];
        m->loss[i] = 0;
        micro[i] = (bl_pass_micro){.batch = &m->micro[i],
                                   .adapter = adapter ? &adapter->use : NULL,
                                   .loss_sum = &m->loss[i],
                                   .loss_scale = 1.0 / (8 << i)};
        if (!usages[i].trains) continue;
        states[i].n_floats = adapter->layout.n_floats;
        states[i].gradients = out->gradients[i] = test_floats(LAYERS * states[i].n_floats);
        sinks[i] = (bl_gradient_sink){.user = &states[i], .begin = sink_begin, .end = sink_end};
        micro[i].gradients = &sinks[i];
    }
    for (int first = 0; first < MICROS; first += group) {
        BL_TRY(bl_pass_run(pass, &(bl_pass_input){.n_micro = group, .micro = micro + first}));
        BL_TRY(bl_pass_validate(pass));
    }
    BL_TRY(bl_stream_synchronize(self->stream));
    memcpy(out->loss, m->loss, sizeof out->loss);
    return BL_OK;
}

static bl_status compare(const pass_adapter *adapters[ADAPTERS], const usage *usages,
                         const result *alone, const result *together)
{
    for (int i = 0; i < MICROS; i++) {
        TEST_CHECK(alone->loss[i] == together->loss[i]);
        if (!usages[i].trains) continue;
        size_t n = (size_t)(LAYERS * adapters[usages[i].adapter]->layout.n_floats);
        TEST_CHECK(memcmp(alone->gradients[i], together->gradients[i], n * sizeof(float)) == 0);
    }
    return BL_OK;
}

static bl_status run_mixed(test_rank *self)
{
    static const usage cases[][MICROS] = {
        {{0, true}, {-1, false}, {1, true}, {0, false}},
        {{1, true}, {0, true}, {0, true}, {-1, false}},
        {{-1, false}, {1, false}, {0, false}, {-1, false}},
    };
    const variant *v = self->arg;
    pass_model m = {.base = NULL};
    pass_adapter second = {.shards = NULL};
    bl_pass *pass = NULL;
    const pass_adapter *adapters[ADAPTERS] = {&m.lora, &second};
    double first_loss[BL_COUNT(cases)];
    bl_status st;

    BL_TRY_GOTO(st, done, pass_model_create(self, v->depth, &m));
    BL_TRY_GOTO(st, done, pass_adapter_create(self, m.gathers, v->depth, 2, 0.0f, 500, &second));
    BL_TRY_GOTO(st, done, pass_create(self, &m, v, &pass));
    for (size_t c = 0; c < BL_COUNT(cases); c++) {
        result alone = {.loss = {0}}, together = {.loss = {0}};
        st = run_group(self, &m, adapters, pass, cases[c], 1, &alone);
        if (st == BL_OK) st = run_group(self, &m, adapters, pass, cases[c], MICROS, &together);
        if (st == BL_OK) st = compare(adapters, cases[c], &alone, &together);
        first_loss[c] = alone.loss[0];
        for (int i = 0; i < MICROS; i++) free(alone.gradients[i]), free(together.gradients[i]);
        if (st != BL_OK) goto done;
    }
    /* The first micro-batch goes through one adapter, the other, and none. */
    TEST_CHECK_GOTO(st, done,
                    first_loss[0] != first_loss[1] && first_loss[1] != first_loss[2] &&
                        first_loss[2] != first_loss[0]);
done:
    (void)bl_stream_synchronize(self->stream);
    if (m.gathers) (void)bl_stream_synchronize(m.gathers);
    pass_adapter_close(&second);
    pass_model_close(self, &m, pass);
    return st;
}

static void test_neighbors_change_no_bit(void **state)
{
    static const variant variants[] = {
        {.group = MICROS, .depth = 2, .save = BL_SAVE_S2},
        {.group = MICROS, .depth = 1, .save = BL_SAVE_S0, .offload = true},
        {.group = MICROS, .depth = 5, .save = BL_SAVE_S4, .offload = true},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(variants); i++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            bl_status st = test_ranks_run(n_ranks, 1, 60, run_mixed, (void *)&variants[i], NULL);
            if (st != BL_OK)
                print_error("variant %zu, %d ranks: %s\n", i, n_ranks, bl_error_text());
            assert_int_equal(st, BL_OK);
        }
}

static bl_status run_refused(test_rank *self)
{
    variant v = {.group = 1, .depth = 1};
    pass_model m = {.base = NULL};
    bl_gradient_sink sink = {.user = NULL};
    bl_pass *pass = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, pass_model_create(self, v.depth, &m));
    BL_TRY_GOTO(st, done, pass_create(self, &m, &v, &pass));
    bl_pass_micro micro[2] = {{.batch = m.micro, .loss_sum = m.loss, .gradients = &sink},
                              {.batch = m.micro, .loss_sum = m.loss}};
    TEST_CHECK_GOTO(st, done,
                    bl_pass_run(pass, &(bl_pass_input){.n_micro = 1, .micro = micro}) ==
                        BL_EINTERNAL);
    micro[0].gradients = NULL;
    TEST_CHECK_GOTO(st, done,
                    bl_pass_run(pass, &(bl_pass_input){.n_micro = 2, .micro = micro}) ==
                        BL_EINTERNAL);
    m.lora.layout.options.r++;
    micro[0].adapter = &m.lora.use;
    TEST_CHECK_GOTO(st, done,
                    bl_pass_run(pass, &(bl_pass_input){.n_micro = 1, .micro = micro}) ==
                        BL_EINTERNAL);
    st = BL_OK;
done:
    pass_model_close(self, &m, pass);
    return st;
}

static void test_beyond_the_options(void **state)
{
    (void)state;
    assert_int_equal(test_ranks_run(1, 1, 60, run_refused, NULL, NULL), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_neighbors_change_no_bit),
        cmocka_unit_test(test_beyond_the_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
