/* SPDX-License-Identifier: Apache-2.0 */
/* A whole step on a GPU: pass, gradients, update. It follows the CPU's within what bf16 rounds;
 * what must not change a bit changes none; and what fills the last tile of a micro-batch adds
 * nothing. Generation follows the CPU's, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "model/generate.h"
#include "step_model.h"
#include "trained/internal.h"

static const step_choice plain = {
    .group = STEP_MICROS, .depth = 2, .save = BL_SAVE_S3, .tier = BL_TIER_DEVICE, .prepares = true};

static const step_kind bf16_kind = {
    .device = BL_DEVICE_CUDA, .format = BL_FORMAT_BF16, .dropout = 0.25f};

static void ok(bl_status status)
{
    if (status != BL_OK) fail_msg("%s", bl_error_text());
}

static step_result run(const step_kind *kind, const step_choice *choice)
{
    step_model m;
    step_result result = {0};
    bl_status st = step_open(kind, choice, &m);

    if (st == BL_OK) st = step_run(&m, choice, &result);
    step_close(&m);
    ok(st);
    return result;
}

/* ---- against the CPU ---- */

/* Between a layer's input and its gradient there are about 12 roundings to bf16 forward and 12
 * backward, each off by 2^-9 at most, 2^-9 / sqrt(3) in the mean, and independent: over 3 layers
 * sqrt(72) 2^-9 / sqrt(3) = 1 %. Softmax, SwiGLU and the logits magnify that, here about fourfold;
 * eight times is allowed. A factor in the wrong place, or one missing, puts half of the gradient
 * off. FP8 rounds factors to 2^-4, 2^-4 / sqrt(3) / 2 = 1.8 % in the mean over a binade,
 * in about 12 products on the way to a gradient whose sums are by half LoRA's or the residual's:
 * sqrt(12) 1.8 % / 2 = 3.1 %, of which five times is allowed. The loss, a mean over tokens, is off
 * by far less. */
static void follows_the_cpu(bl_format format, bl_matmul_mode mode, bool is_tied, double limit)
{
    step_kind gpu = {.device = BL_DEVICE_CUDA,
                     .format = format,
                     .mode = mode,
                     .is_tied = is_tied,
                     .dropout = 0.25f},
              cpu = gpu;

    cpu.device = BL_DEVICE_CPU;
    step_result want = run(&cpu, &plain), got = run(&gpu, &plain);
    double far = step_distance(got.gradients, want.gradients, want.n),
           loss = fabs(got.loss - want.loss) / want.loss;
    printf("%s, %s%s: loss off by %.2g, gradients by %.2g\n",
           format == BL_FORMAT_BF16 ? "bf16" : "fp8_row", mode == BL_MATMUL_FP8 ? "fp8" : "bf16",
           is_tied ? ", tied head" : "", loss, far);
    assert_true(want.loss > 0 && far > 0);
    assert_true(far < limit);
    assert_true(loss < limit / 40);
    assert_memory_not_equal(got.weights, want.weights, (size_t)got.n * sizeof *got.weights);
    step_free(&want);
    step_free(&got);
}

static void test_a_step_follows_the_cpus(void **state)
{
    (void)state;
    follows_the_cpu(BL_FORMAT_BF16, BL_MATMUL_BF16, false, 0.08);
    follows_the_cpu(BL_FORMAT_FP8_ROW, BL_MATMUL_BF16, true, 0.08);
}

static void test_a_step_in_fp8_follows_the_cpus(void **state)
{
    (void)state;
    follows_the_cpu(BL_FORMAT_FP8_ROW, BL_MATMUL_FP8, false, 0.15);
}

/* ---- what changes no bit ---- */

static void assert_same(const step_result *want, const step_result *got, const char *what)
{
    if (got->loss != want->loss ||
        memcmp(got->gradients, want->gradients, (size_t)want->n * sizeof(float)) != 0 ||
        memcmp(got->weights, want->weights, (size_t)want->n * sizeof(float)) != 0)
        fail_msg("%s: loss %.17g, not %.17g; gradients off by %g", what, got->loss, want->loss,
                 step_distance(got->gradients, want->gradients, want->n));
}

static void no_choice_changes(const step_kind *kind, size_t n_choices)
{
    static const step_choice choices[] = {
        {1, 1, BL_SAVE_S0, true, BL_TIER_HOST, true},
        {3, 2, BL_SAVE_S2, false, BL_TIER_DEVICE, false},
        {2, 3, BL_SAVE_S4, false, BL_TIER_HOST, true},
        {1, 2, BL_SAVE_S4, true, BL_TIER_DEVICE, false},
        {4, 1, BL_SAVE_S0, false, BL_TIER_HOST, true},
        {2, 2, BL_SAVE_S3, true, BL_TIER_DEVICE, true},
    };
    step_result want = run(kind, &plain);

    for (size_t i = 0; i < n_choices && i < BL_COUNT(choices); i++) {
        char what[96];
        step_result got = run(kind, &choices[i]);
        snprintf(what, sizeof what, "group %d, depth %d, save %u, offload %d, tier %d",
                 choices[i].group, choices[i].depth, choices[i].save, choices[i].offload,
                 (int)choices[i].tier);
        assert_same(&want, &got, what);
        step_free(&got);
    }
    step_free(&want);
}

static void test_no_choice_changes_a_bit(void **state)
{
    (void)state;
    no_choice_changes(&bf16_kind, SIZE_MAX);
}

static void test_one_choice_changes_no_bit(void **state)
{
    (void)state;
    no_choice_changes(&bf16_kind, 1);
}

static void test_no_choice_changes_a_bit_in_fp8(void **state)
{
    step_kind kind = bf16_kind;
    (void)state;
    kind.format = BL_FORMAT_FP8_ROW;
    kind.mode = BL_MATMUL_FP8;
    no_choice_changes(&kind, 2);
}

/* ---- padding ---- */

/* Three ways to a full tile: memory behind the batch that is NaN, memory that is zero, and a tile
 * that the caller filled with tokens that have no weight. And rows that the micro-batch before left
 * as NaN. */
static void test_padding_adds_nothing(void **state)
{
    step_choice one = {.group = 1, .depth = 2, .save = BL_SAVE_S2, .tier = BL_TIER_DEVICE};
    step_batch alone = step_batches[3], full = alone, bad = {.n_tokens = 150};
    step_result want = {0}, got = {0};
    (void)state;

    full.n_behind = 128 - full.n_tokens;
    for (int way = 0; way < 4; way++) {
        step_model m;
        double loss;
        ok(step_open(&bf16_kind, &one, &m));
        for (int i = 0; i < STEP_MICROS; i++) {
            static const step_batch none = {.n_tokens = 0};
            const step_batch *batch = i < 3 ? &none : way == 2 ? &full : &alone;
            ok(step_set_batch(&m, i, batch, way == 1 ? 0 : 0xff));
        }
        if (way == 3) { /* an evaluation whose embeddings are NaN */
            ok(step_set_batch(&m, 0, &bad, 0xff));
            for (int t = 0; t < STEP_T_MAX; t++)
                ((int32_t *)m.micro[0].host_ids)[t] = STEP_POISON_ID;
            ok(step_evaluate(&m, 0, &loss));
            assert_true(isnan(loss));
            m.micro[0].T = m.micro[0].n_documents = 0;
        }
        ok(step_run(&m, &one, &got));
        step_close(&m);
        if (way == 0) {
            want = got;
            assert_true(isfinite(want.loss) && want.loss > 0);
            continue;
        }
        assert_same(&want, &got,
                    way == 1   ? "zeros behind"
                    : way == 2 ? "filled by the caller"
                               : "NaN before");
        step_free(&got);
    }
    step_free(&want);
}

/* The first layer whose output is not finite, and none where only the padding's rows could be. */
static void test_the_first_bad_output_is_found(void **state)
{
    step_model m;
    double loss;
    int64_t layer;
    int micro;
    (void)state;

    ok(step_open(&bf16_kind, &plain, &m));
    bl_pass_micro all[STEP_MICROS];
    for (int i = 0; i < STEP_MICROS; i++)
        all[i] = (bl_pass_micro){.batch = &m.micro[i],
                                 .adapter = &m.adapter,
                                 .loss_sum = bl_trained_state_loss_sum(m.state),
                                 .gradients = bl_trained_state_sink(m.state)};
    bl_pass_input input = {.n_micro = STEP_MICROS, .micro = all};
    for (int bad = 0; bad < 2; bad++) {
        if (bad) ((int32_t *)m.micro[3].host_ids)[36] = STEP_POISON_ID; /* its last token */
        ok(bl_pass_run(m.pass, &input));
        ok(bl_trained_state_join(m.state));
        bool is_found = bl_pass_find_bad(m.pass, &input, &layer, &micro);
        assert_true(is_found == (bad == 1));
        if (is_found) assert_true(layer == -1 && micro == 3);
    }
    ok(step_evaluate(&m, 2, &loss)); /* nothing of it stays */
    assert_true(isfinite(loss));
    step_close(&m);
}

/* ---- how far the host runs ahead ---- */

typedef struct ahead_state {
    bl_stream *stream;
    atomic_int begun; /* visits that the stream has come to */
    int queued;       /* visits that were asked for */
    bool is_bounded;
} ahead_state;

static bl_status count_visit(bl_stream *stream, const void *argument)
{
    ahead_state *s = *(ahead_state *const *)argument;
    (void)stream;
    usleep(5000);
    atomic_fetch_add(&s->begun, 1);
    return BL_OK;
}

/* Before visit k, those up to k - 2 have ended. Stops at visit 6. */
static bool before_visit(void *user)
{
    ahead_state *s = user;
    s->is_bounded = s->is_bounded && atomic_load(&s->begun) >= s->queued - 1;
    if (s->queued == 6) return true;
    s->queued++;
    (void)bl_stream_call(s->stream, count_visit, &s, sizeof s);
    return false;
}

static void test_the_host_runs_two_visits_ahead(void **state)
{
    step_model m;
    bl_pass_micro micro[STEP_MICROS];
    (void)state;

    ok(step_open(&bf16_kind, &plain, &m));
    ahead_state s = {.stream = m.compute, .is_bounded = true};
    for (int i = 0; i < STEP_MICROS; i++) micro[i] = (bl_pass_micro){.batch = &m.micro[i]};
    assert_int_equal(bl_pass_run(m.pass, &(bl_pass_input){.n_micro = STEP_MICROS,
                                                          .micro = micro,
                                                          .stop = before_visit,
                                                          .stop_user = &s}),
                     BL_OK);
    assert_int_equal(s.queued, STEP_LAYERS + 1);
    assert_int_equal(bl_pass_run(m.pass, &(bl_pass_input){.n_micro = STEP_MICROS,
                                                          .micro = micro,
                                                          .stop = before_visit,
                                                          .stop_user = &s}),
                     BL_ESTOPPED);
    assert_true(s.is_bounded && s.queued == 6 && atomic_load(&s.begun) >= 4);
    step_close(&m);
}

/* ---- generation ---- */

enum { PROMPT = 21, GENERATED = 4 };

/* The logits after the prompt, taken at once or in two pieces, and after each of the tokens that
 * follow. */
static float *continue_prompt(bl_device_kind device, bool in_pieces)
{
    step_kind kind = bf16_kind;
    step_model m;
    bl_generator *generator = NULL;
    const float *logits;
    float *all = calloc((GENERATED + 1) * STEP_VOCAB, sizeof *all);
    int32_t ids[PROMPT + GENERATED];

    kind.device = device;
    for (int i = 0; i < PROMPT + GENERATED; i++) ids[i] = (i * 11 + 4) % (STEP_VOCAB - 1);
    ok(step_open(&kind, &plain, &m));
    ok(bl_generator_create(m.device, m.compute, &m.weights, m.base, &m.layout,
                           m.state->compute_copy, PROMPT + GENERATED, &generator));
    if (in_pieces) ok(bl_generator_extend(generator, ids, PROMPT / 2, &logits));
    int first = in_pieces ? PROMPT / 2 : 0;
    ok(bl_generator_extend(generator, ids + first, PROMPT - first, &logits));
    for (int i = 0;; i++) {
        memcpy(all + i * STEP_VOCAB, logits, STEP_VOCAB * sizeof *logits);
        if (i == GENERATED) break;
        ok(bl_generator_extend(generator, ids + PROMPT + i, 1, &logits));
    }
    bl_generator_destroy(generator);
    step_close(&m);
    return all;
}

/* Logits have half of the roundings of a gradient, and are rounded to bf16 themselves: within the
 * same limit. */
static void test_a_continuation_follows_the_cpus(void **state)
{
    (void)state;
    float *want = continue_prompt(BL_DEVICE_CPU, false);
    for (int pieces = 0; pieces < 2; pieces++) {
        float *got = continue_prompt(BL_DEVICE_CUDA, pieces);
        double far = step_distance(got, want, (GENERATED + 1) * STEP_VOCAB);
        printf("logits off by %.2g\n", far);
        assert_true(far > 0 && far < 0.04);
        free(got);
    }
    free(want);
}

/* "short": what takes little time on an emulated GPU that runs one operation at a time. */
int main(int argc, char **argv)
{
    const struct CMUnitTest short_tests[] = {
        cmocka_unit_test(test_one_choice_changes_no_bit),
        cmocka_unit_test(test_the_first_bad_output_is_found),
        cmocka_unit_test(test_a_continuation_follows_the_cpus),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_step_follows_the_cpus),
        cmocka_unit_test(test_a_step_in_fp8_follows_the_cpus),
        cmocka_unit_test(test_no_choice_changes_a_bit),
        cmocka_unit_test(test_no_choice_changes_a_bit_in_fp8),
        cmocka_unit_test(test_padding_adds_nothing),
        cmocka_unit_test(test_the_first_bad_output_is_found),
        cmocka_unit_test(test_the_host_runs_two_visits_ahead),
        cmocka_unit_test(test_a_continuation_follows_the_cpus),
    };
    if (!step_has_gpu()) return 77;
    if (argc > 1 && strcmp(argv[1], "short") == 0)
        return cmocka_run_group_tests(short_tests, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
