/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks' report at the end of a step: loss and gradient norm over all of them, the bytes that
 * their lanes moved and the longest stalls; and that LoRA's own lane counts the bytes of its ring
 * and its gradients, and the waits for them. And the files of a checkpoint: whatever the order of
 * the layout and the number of ranks that wrote them, any other ranks read their floats from
 * them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "test_ranks.h"
#include "tmp_dir.h"
#include "arch/llama.h"
#include "trained/internal.h" /* its gradients, to be filled in */

enum { N_LAYERS = 3, DEPTH = 2, LATE_US = 100 * 1000 };

static const bl_model_config config = {.arch = &bl_arch_llama,
                                       .hidden_size = 24,
                                       .intermediate_size = 40,
                                       .n_layers = N_LAYERS,
                                       .n_heads = 4,
                                       .n_kv_heads = 2,
                                       .head_dim = 8};

typedef struct state_case {
    test_rank *self;
    bl_lora_layout layout;
    bl_stream *communication;
    bl_timeline *timeline;
    bl_trained_state *state;
} state_case;

static bl_status open_case(test_rank *self, bool is_stacked, state_case *c)
{
    bl_lora_options options = {
        .r = 5, .alpha = 10, .target = {true, false, true, true, false, true, true}};

    *c = (state_case){.self = self};
    bl_lora_layout_init(&config, &options, &c->layout);
    bl_lora_layout_stack(&c->layout, is_stacked);
    BL_TRY(bl_stream_create(self->device, "comm", &c->communication));
    BL_TRY(bl_timeline_create(self->device, 256, NULL, NULL, &c->timeline));
    bl_trained_context context = {self->device, self->comm, self->stream, c->communication,
                                  c->timeline};
    return bl_trained_state_create(&context, &c->layout, N_LAYERS, DEPTH, &c->state);
}

static bl_status close_case(state_case *c, bl_status st)
{
    bl_error error;

    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(c->self->comm, &error); /* before the streams are waited for */
    (void)bl_stream_synchronize(c->self->stream);
    if (c->communication) (void)bl_stream_synchronize(c->communication);
    bl_trained_state_destroy(c->state);
    bl_timeline_destroy(c->timeline);
    bl_stream_destroy(c->communication);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

/* Rank r's lane i has moved 2^40 (r + 1) + i bytes, above a float's exact integers. The last rank
 * has stalled longest, although no lane of it the longest but one. */
static bl_lane_totals lane_of(int rank, int n_ranks, int i)
{
    return (bl_lane_totals){.busy_s = 9.0,
                            .stall_s = rank == n_ranks - 1      ? 1.0 + i / 3.0
                                       : i == rank % BL_N_LANES ? 4.0
                                                                : 0.0,
                            .n_bytes = ((int64_t)(rank + 1) << 40) + i};
}

static bl_status check_lanes(const bl_lane_totals *lanes, int n)
{
    for (int i = 0; i < BL_N_LANES; i++) {
        TEST_CHECK(lanes[i].n_bytes == ((int64_t)n * (n + 1) / 2 << 40) + (int64_t)n * i);
        TEST_CHECK(lanes[i].stall_s == 1.0 + i / 3.0);
    }
    return BL_OK;
}

static bl_status reduce_twice(state_case *c)
{
    int rank = c->self->rank, n = c->self->n_ranks;

    for (int step = 1; step <= 2; step++) { /* the first one's numbers leave nothing behind */
        bl_lane_totals lanes[BL_N_LANES];
        double loss, norm, own = rank + step;
        for (int i = 0; i < BL_N_LANES; i++) lanes[i] = lane_of(rank, n, i);
        for (int64_t i = 0; i < N_LAYERS * trained_chunk(c->state, 0); i++)
            c->state->grad[i] = 2.0f;
        BL_TRY(
            bl_stream_copy(c->self->stream, bl_trained_state_loss_sum(c->state), &own, sizeof own));
        BL_TRY(bl_trained_state_join(c->state));
        BL_TRY(bl_trained_state_reduce(c->state, &loss, &norm, lanes));
        TEST_CHECK(loss == n * (n - 1) / 2 + n * step);
        TEST_CHECK(norm == sqrt(4.0 * (double)(N_LAYERS * trained_chunk(c->state, 0) * n)));
        BL_TRY(check_lanes(lanes, n));
        BL_TRY(bl_trained_state_update(c->state, step, 0.1, 0.9, 0.99, 1e-8, 0.0, 0.0));
        BL_TRY(bl_stream_synchronize(c->self->stream));
    }
    return BL_OK;
}

static bl_status reduce_lanes(test_rank *self)
{
    state_case c;
    bl_status st = open_case(self, false, &c);
    if (st == BL_OK) st = reduce_twice(&c);
    return close_case(&c, st);
}

static void assert_ranks(int n_ranks, test_rank_fn fn)
{
    bl_status st = test_ranks_run(n_ranks, 1, 60, fn, NULL, NULL);
    if (st != BL_OK) fail_msg("%d ranks: %s", n_ranks, bl_error_text());
}

static void test_lanes_of_all_ranks(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= 4; n_ranks++) assert_ranks(n_ranks, reduce_lanes);
}

static bl_status be_late(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    usleep(LATE_US);
    return BL_OK;
}

/* Rank 0 comes late to LoRA's weights of layer 0, and again to the gradients of the last of three
 * layers: the others wait. */
static bl_status use_weights_and_gradients(state_case *c)
{
    bl_trained_state *s = c->state;
    bl_gather_ring *ring = bl_trained_state_adapter(s).ring;
    const bl_gradient_sink *sink = bl_trained_state_sink(s);
    const void *weights;
    bl_unit_gradients gradients;

    if (c->self->rank == 0) BL_TRY(bl_stream_call(c->communication, be_late, NULL, 0));
    BL_TRY(bl_gather_ring_acquire(ring, 0, 0, c->self->stream, &weights));
    BL_TRY(bl_gather_ring_release(ring, 0, c->self->stream));
    for (int64_t layer = N_LAYERS - 1; layer >= 0; layer--) {
        BL_TRY(sink->begin(sink->user, layer, c->self->stream, &gradients));
        if (c->self->rank == 0 && layer == 0)
            BL_TRY(bl_stream_call(c->self->stream, be_late, NULL, 0));
        BL_TRY(sink->end(sink->user, layer, c->self->stream));
    }
    return bl_trained_state_join(s);
}

static bl_status check_lane(state_case *c, atomic_bool *was_late)
{
    bl_timeline_totals totals;
    int64_t chunk_bytes = trained_chunk(c->state, 0) * (int64_t)sizeof(float);

    bl_timeline_collect(c->timeline);
    bl_timeline_get_totals(c->timeline, &totals);
    const bl_lane_totals *lora = &totals.lane[BL_LANE_LORA];
    TEST_CHECK(lora->n_bytes == (1 + N_LAYERS) * chunk_bytes * (c->self->n_ranks - 1));
    if (c->self->n_ranks == 1) return BL_OK;
    /* Rank 0's compute stalled while its communication was late; the others' for both. Half of that
     * for clocks and scheduling; a rank that the machine delayed has stalled for less. */
    if (lora->stall_s <= (c->self->rank == 0 ? 0.5e-6 : 1.5e-6) * LATE_US)
        atomic_store(was_late, true);
    for (int i = 0; i < BL_N_LANES; i++)
        TEST_CHECK(i == BL_LANE_LORA ||
                   (totals.lane[i].stall_s == 0 && totals.lane[i].n_bytes == 0));
    return BL_OK;
}

static bl_status use_lane(test_rank *self)
{
    state_case c;
    bl_status st = open_case(self, false, &c);
    if (st == BL_OK) st = use_weights_and_gradients(&c);
    if (st == BL_OK) st = check_lane(&c, self->arg);
    return close_case(&c, st);
}

static void test_own_lane(void **state)
{
    enum { MAX_TRIES = 20 };
    (void)state;
    for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
        atomic_bool was_late = true;
        for (int n = 0; n < MAX_TRIES && was_late; n++) {
            was_late = false;
            bl_status st = test_ranks_run(n_ranks, 1, 60, use_lane, &was_late, NULL);
            if (st != BL_OK) fail_msg("%d ranks: %s", n_ranks, bl_error_text());
        }
        assert_false(was_late);
    }
}

/* ---- the files of a checkpoint ---- */

typedef struct file_case {
    bool is_stacked;
    int n_writers; /* 0: this rank writes */
    const char *dir;
} file_case;

/* Element `at` of array `which` in layer `layer`: a number that says which factor's element it is;
 * past the end of the flat vector 0. */
static float element_of(const bl_lora_layout *layout, int which, int64_t layer, int64_t at)
{
    bl_lora_layout plain = *layout;
    int64_t r = layout->options.r;

    bl_lora_layout_stack(&plain, false);
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if (layout->a_offset[p] < 0) continue;
        int64_t in_a = at - layout->a_offset[p], in_b = at - layout->b_offset[p], named = -1;
        if (in_a >= 0 && in_a < r * layout->a_cols[p]) named = plain.a_offset[p] + in_a;
        if (in_b >= 0 && in_b < r * layout->b_rows[p]) named = plain.b_offset[p] + in_b;
        if (named >= 0)
            return (float)(1 + named + layout->n_floats * (layer + N_LAYERS * (int64_t)which));
    }
    return 0;
}

static bl_status fill_or_check(state_case *c, bool checks)
{
    bl_trained_state *s = c->state;
    float *const arrays[] = {s->w, s->m, s->v};

    for (int i = 0; i < 3; i++)
        for (int64_t l = 0; l < N_LAYERS; l++)
            for (int64_t k = 0; k < trained_chunk(s, l); k++) {
                float *at = arrays[i] + l * trained_chunk(s, l) + k,
                      want = element_of(s->layout, i, l, c->self->rank * trained_chunk(s, l) + k);
                if (checks) TEST_CHECK(*at == want);
                if (!checks) *at = want;
            }
    return BL_OK;
}

static bl_status write_or_read(test_rank *self)
{
    const file_case *f = self->arg;
    char name[BL_SHARD_NAME_BYTES], path[512];
    state_case c;

    bl_status st = open_case(self, f->is_stacked, &c);
    if (st == BL_OK && f->n_writers > 0) {
        memset(c.state->w, 0x7f,
               (size_t)(N_LAYERS * trained_chunk(c.state, 0)) * sizeof *c.state->w);
        st = bl_trained_state_read_shards(c.state, f->dir, f->n_writers);
        if (st == BL_OK) st = fill_or_check(&c, true);
    } else if (st == BL_OK) {
        st = fill_or_check(&c, false);
        bl_trained_shard_name(self->rank, self->n_ranks, name);
        snprintf(path, sizeof path, "%s/%s", f->dir, name);
        if (st == BL_OK) st = bl_trained_state_write_shard(c.state, path);
    }
    return close_case(&c, st);
}

static void test_shards_in_either_order(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        file_case files = {.is_stacked = i & 1, .dir = tmp_subdir("shards")};
        int n_writers = i < 2 ? 2 : 3;
        if (test_ranks_run(n_writers, 1, 60, write_or_read, &files, NULL) != BL_OK)
            fail_msg("writing: %s", bl_error_text());
        for (int j = 0; j < 6; j++) {
            file_case read = {j & 1, n_writers, files.dir};
            if (test_ranks_run(1 + j / 2, 1, 60, write_or_read, &read, NULL) != BL_OK)
                fail_msg("stacked %d, %d ranks; read stacked %d, %d ranks: %s", i & 1, n_writers,
                         j & 1, 1 + j / 2, bl_error_text());
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lanes_of_all_ranks),
                                       cmocka_unit_test(test_own_lane),
                                       cmocka_unit_test(test_shards_in_either_order)};
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
