/* SPDX-License-Identifier: Apache-2.0 */
/* The places of adapters in a layer's flat vector, their initial values, and both in a PEFT
 * configuration. */
#include "ops_test.h"

#include "arch/lora.h"
#include "arch/llama.h"
#include "trained/peft.h"

static const bl_model_config config = {.arch = &bl_arch_llama,
                                       .hidden_size = 24,
                                       .intermediate_size = 40,
                                       .n_layers = 3,
                                       .n_heads = 4,
                                       .n_kv_heads = 2,
                                       .head_dim = 8};

static bl_lora_options some_options(void)
{
    return (bl_lora_options){
        .r = 5, .alpha = 10, .target = {true, false, true, true, false, true, true}};
}

static void test_layout(void **state)
{
    static const int64_t rows[] = {32, 16, 16, 24, 40, 40, 24},
                         cols[] = {24, 24, 24, 32, 24, 24, 40};
    static const int64_t row_begin[] = {0, 32, 48, 0, 0, 40, 0};
    bl_lora_options options = some_options();
    bl_lora_layout layout;
    int64_t at = 0;
    (void)state;

    bl_lora_layout_init(&config, &options, &layout);
    for (int p = 0; p < BL_PROJECTIONS; p++) { /* PEFT's module order, A before B, without gaps */
        if (!options.target[p]) {
            assert_int_equal(layout.a_offset[p], -1);
            continue;
        }
        assert_int_equal(layout.a_offset[p], at);
        assert_int_equal(layout.b_offset[p], at + 5 * cols[p]);
        assert_int_equal(layout.row_begin[p], row_begin[p]);
        at += 5 * (cols[p] + rows[p]);
    }
    assert_int_equal(layout.n_floats, at);
    assert_true(layout.scale == 2.0f);
    options.use_rslora = true;
    bl_lora_layout_init(&config, &options, &layout);
    assert_true(layout.scale == (float)(10 / sqrt(5)));
    bl_lora_layout_init(&config, NULL, &layout);
    assert_int_equal(layout.n_floats, 0);
}

/* Matrix by matrix A's before B's, without gaps, and back to PEFT's order. */
static void test_stacked_layout(void **state)
{
    static const struct {
        int n, projections[3];
    } matrices[] = {{3, {BL_Q, BL_K, BL_V}}, {1, {BL_O}}, {2, {BL_GATE, BL_UP}}, {1, {BL_DOWN}}};
    bl_lora_options options = some_options();
    bl_lora_layout layout, plain;
    bl_lora_linear linear = {.n_parts = 0};
    int64_t at = 0;
    (void)state;

    bl_lora_layout_init(&config, &options, &plain);
    layout = plain;
    bl_lora_layout_stack(&layout, true);
    for (int m = 0; m < 4; m++)
        for (int factor = 0; factor < 2; factor++)
            for (int i = 0; i < matrices[m].n; i++) {
                int p = matrices[m].projections[i];
                if (!options.target[p]) continue;
                assert_int_equal((factor ? layout.b_offset : layout.a_offset)[p], at);
                at += 5 * (factor ? layout.b_rows : layout.a_cols)[p];
            }
    assert_int_equal(layout.n_floats, at);
    assert_int_equal(at, plain.n_floats);
    float *first = test_floats(at), *stacked = test_floats(at);
    bl_lora_layout_initialize(&plain, 42, 1, 0, at, first);
    bl_lora_layout_initialize(&layout, 42, 1, 0, at, stacked);
    for (int p = 0; p < BL_PROJECTIONS; p++) { /* the same weights, elsewhere */
        if (!options.target[p]) continue;
        test_same_bits("A", first + plain.a_offset[p], stacked + layout.a_offset[p],
                       5 * plain.a_cols[p]);
        test_same_bits("B", first + plain.b_offset[p], stacked + layout.b_offset[p],
                       5 * plain.b_rows[p]);
    }
    bl_lora_layout_bind(&layout, BL_LAYER_DENSE, BL_QKV, bl_tensor_f32(stacked), NULL, &linear);
    assert_true(linear.is_stacked);
    for (int i = 0; i + 1 < linear.n_parts; i++) /* the linear layer takes these as one matrix */
        assert_ptr_equal(bl_tensor_at(linear.part[i].A, 5 * config.hidden_size).data,
                         linear.part[i + 1].A.data);
    bl_lora_layout_stack(&layout, false);
    assert_memory_equal(layout.a_offset, plain.a_offset, sizeof plain.a_offset);
    assert_memory_equal(layout.b_offset, plain.b_offset, sizeof plain.b_offset);
    free(first), free(stacked);
}

static void test_binding(void **state)
{
    bl_lora_options options = some_options();
    bl_lora_layout layout;
    bl_lora_linear linear;
    (void)state;

    bl_lora_layout_init(&config, &options, &layout);
    float *weights = test_floats(layout.n_floats), *gradients = test_floats(layout.n_floats);
    bl_lora_layout_bind(&layout, BL_LAYER_DENSE, BL_QKV, bl_tensor_f32(weights), gradients,
                        &linear);
    assert_int_equal(linear.n_parts, 2);
    assert_true(linear.part[1].r == 5 && linear.part[1].row_begin == 48 &&
                linear.part[1].rows == 16);
    assert_ptr_equal(linear.part[1].A.data, weights + layout.a_offset[BL_V]);
    assert_ptr_equal(linear.part[1].dB, gradients + layout.b_offset[BL_V]);
    bl_lora_layout_bind(&layout, BL_LAYER_DENSE, BL_GATE_UP, bl_tensor_f32(weights), NULL, &linear);
    assert_int_equal(linear.n_parts, 1);
    assert_int_equal(linear.part[0].row_begin, 40);
    assert_null(linear.part[0].dA);
    free(weights), free(gradients);
}

/* Uniform in +-1/sqrt(K) for A, zero for B, the same for every range that is asked for. */
static void test_start(void **state)
{
    bl_lora_options options = some_options();
    bl_lora_layout layout;
    (void)state;

    options.r = 64;
    bl_lora_layout_init(&config, &options, &layout);
    int64_t n = layout.n_floats, padded = n + 7;
    float *whole = test_floats(padded), *pieces = test_floats(padded), *other = test_floats(n);
    bl_lora_layout_initialize(&layout, 42, 1, 0, padded, whole);
    for (int64_t begin = 0; begin < padded; begin += 501)
        bl_lora_layout_initialize(&layout, 42, 1, begin, bl_min_i64(501, padded - begin),
                                  pieces + begin);
    test_same_bits("pieces", whole, pieces, padded);
    for (int64_t i = n; i < padded; i++) assert_true(whole[i] == 0);
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if (layout.a_offset[p] < 0) continue;
        int64_t count = layout.b_offset[p] - layout.a_offset[p];
        double bound = 1 / sqrt((double)layout.a_cols[p]), sum = 0, squares = 0;
        for (int64_t i = layout.a_offset[p]; i < layout.b_offset[p]; i++) {
            assert_true(fabs((double)whole[i]) <= bound * (1 + U));
            sum += (double)whole[i];
            squares += (double)whole[i] * (double)whole[i];
        }
        /* Variance bound^2 / 3, that of the squares 4 bound^4 / 45: within five standard
         * deviations. */
        assert_true(fabs(sum / (double)count) <= 5 * bound / sqrt(3.0 * (double)count));
        assert_true(fabs(squares / (double)count - bound * bound / 3) <=
                    5 * bound * bound * sqrt(4.0 / 45 / (double)count));
        for (int64_t i = 0; i < 64 * layout.b_rows[p]; i++)
            assert_true(whole[layout.b_offset[p] + i] == 0);
    }
    for (int i = 0; i < 2; i++) { /* another seed, another layer: other numbers */
        bl_lora_layout_initialize(&layout, i ? 43 : 42, i ? 1 : 2, 0, n, other);
        assert_memory_not_equal(whole, other, (size_t)layout.b_offset[BL_Q] * sizeof *other);
    }
    assert_memory_not_equal(whole, whole + layout.a_offset[BL_V],
                            64 * 24 * sizeof *whole); /* q's and v's */
    free(whole), free(pieces), free(other);
}

/* As in PEFT: the embedding has A = 0 and B ~ N(0, 1), the head is initialized like a projection.
 * The values do not depend on the ranges of the calls. */
static void test_start_of_tables(void **state)
{
    bl_lora_options options = some_options();
    bl_lora_layout layout;
    (void)state;

    options.r = 64;
    options.table[BL_TABLE_EMBEDDING] = options.table[BL_TABLE_HEAD] = true;
    bl_lora_layout_init(&config, &options, &layout);
    int64_t V = config.vocab_size, H = config.hidden_size, n = layout.n_table_floats;
    assert_int_equal(layout.table_a[BL_TABLE_EMBEDDING], 0);
    assert_int_equal(layout.table_b[BL_TABLE_EMBEDDING], 64 * V);
    assert_int_equal(layout.table_a[BL_TABLE_HEAD], 64 * (V + H));
    assert_int_equal(layout.table_b[BL_TABLE_HEAD], 64 * (V + 2 * H));
    assert_int_equal(n, 128 * (V + H));
    assert_int_equal(bl_lora_n_weights(&layout, 3), 3 * layout.n_floats + n);
    float *whole = test_floats(n), *pieces = test_floats(n);
    bl_lora_layout_initialize_tables(&layout, 42, 0, n, whole);
    for (int64_t begin = 0; begin < n; begin += 501)
        bl_lora_layout_initialize_tables(&layout, 42, begin, bl_min_i64(501, n - begin),
                                         pieces + begin);
    test_same_bits("pieces", whole, pieces, n);
    double count = 64.0 * (double)H, sum = 0, squares = 0, bound = 1 / sqrt((double)H);
    for (int64_t i = 0; i < 64 * V; i++)
        assert_true(whole[i] == 0 && whole[layout.table_b[BL_TABLE_HEAD] + i] == 0);
    for (int64_t i = 64 * V; i < 64 * (V + H); i++) {
        sum += (double)whole[i];
        squares += (double)whole[i] * (double)whole[i];
    }
    /* Variance 1, that of the squares 2: within five standard deviations. */
    assert_true(fabs(sum / count) <= 5 / sqrt(count));
    assert_true(fabs(squares / count - 1) <= 5 * sqrt(2 / count));
    for (int64_t i = 64 * (V + H); i < 64 * (V + 2 * H); i++)
        assert_true(whole[i] != 0 && fabs((double)whole[i]) <= bound * (1 + U));
    bl_lora_layout_initialize_tables(&layout, 43, 0, n, pieces);
    assert_memory_not_equal(whole + 64 * V, pieces + 64 * V, (size_t)(64 * H) * sizeof *whole);
    free(whole), free(pieces);
}

static void test_peft_configuration(void **state)
{
    bl_lora_options options = some_options(), back;
    (void)state;
    options.dropout = 0.1;
    options.use_rslora = true;
    bl_peft_config peft = bl_lora_peft_config(&options);
    bl_lora_options_of_peft(&peft, &back);
    assert_true(back.r == 5 && back.alpha == 10 && back.dropout == 0.1 && back.use_rslora);
    assert_memory_equal(back.target, options.target, sizeof back.target);
    bl_peft_base base = bl_lora_peft_base(&config);
    assert_true(base.n_layers == 3 && base.out_features[BL_K] == 16 &&
                base.in_features[BL_O] == 32 && base.in_features[BL_DOWN] == 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),          cmocka_unit_test(test_stacked_layout),
        cmocka_unit_test(test_binding),         cmocka_unit_test(test_start),
        cmocka_unit_test(test_start_of_tables), cmocka_unit_test(test_peft_configuration),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
