/* SPDX-License-Identifier: Apache-2.0 */
/* The creation of a stack of LoRA linear layers: its page files, and rejections by one rank or by
 * some of them. */
#include "layer_problem.h"
#include "test_ranks.h"

#include "../store/tmp_dir.h"
#include "store/safetensors.h"

/* ---- page files ---- */

typedef struct counted {
    const bl_linear_spec *spec;
    int n_calls;
} counted;

static bl_status read_counted(void *user, int64_t begin, int64_t end, void *out)
{
    counted *c = user;
    c->n_calls++;
    return read_bf16((void *)c->spec, begin, end, out);
}

/* The first start writes the file; the second reads it: with a key without a look at the rows.
 * Other rows are another file, unless the key says that they are the same. */
static void test_page_files(void **state)
{
    test_device d = test_device_create(1);
    int64_t n = T * shapes[0].rows;
    float *y[4];
    problem p;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(y); i++) y[i] = test_floats(n);
    create_problem(&p, BL_FORMAT_FP8_BLOCK, PLAIN);
    for (int keyed = 0; keyed < 2; keyed++) {
        bl_linear_options o = {.device = d.device,
                               .max_tokens = T,
                               .tier = BL_TIER_DISK,
                               .ratio = 1,
                               .dir = tmp_subdir("kept"),
                               .key = keyed ? 77 : 0};
        for (int start = 0; start < 3; start++) {
            counted rows = {.spec = &p.bf16_specs[0]};
            bl_linear_spec specs[LAYERS];
            bl_linear_stack *stack;
            memcpy(specs, p.bf16_specs, sizeof specs);
            specs[0].weight = NULL;
            specs[0].read_rows = read_counted;
            specs[0].user = &rows;
            if (start == 2) p.bf16[0][5] ^= 0x8000; /* a sign */
            assert_int_equal(bl_linear_stack_create(&o, LAYERS, specs, &stack), BL_OK);
            assert_int_equal(rows.n_calls, keyed ? (start == 0) : 1 + (start != 1));
            forward_once(d, stack, &p, y[start]);
            bl_linear_stack_destroy(stack);
            if (start == 2) p.bf16[0][5] ^= 0x8000;
        }
        test_same_bits("from the file", y[0], y[1], n);
        if (keyed)
            test_same_bits("the same key", y[0], y[2], n);
        else
            assert_memory_not_equal(y[0], y[2], (size_t)n * sizeof(float));
    }
    free_problem(&p);
    for (size_t i = 0; i < BL_COUNT(y); i++) free(y[i]);
    test_device_destroy(d);
}

/* ---- a tensor of a checkpoint ---- */

static const bl_stored_tensor *write_tensor(const problem *p, bl_safetensors **file)
{
    const bl_stored_tensor_spec spec = {"w", BL_BF16, 2, {shapes[0].rows, shapes[0].cols}};
    size_t n_bytes = (size_t)(shapes[0].rows * shapes[0].cols) * sizeof(uint16_t);
    bl_safetensors_writer *writer;

    assert_int_equal(bl_safetensors_create(tmp_path("w.safetensors"), &spec, 1, NULL, 0, &writer),
                     BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, p->bf16[0], n_bytes), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    assert_int_equal(bl_safetensors_open(tmp_path("w.safetensors"), file), BL_OK);
    return bl_safetensors_find(*file, "w");
}

static void test_tensor_of_a_file(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device, .max_tokens = T};
    float *y[2];
    bl_safetensors *file;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_ROW, PLAIN);
    bl_linear_spec spec = p.bf16_specs[0];
    const bl_stored_tensor *tensor = write_tensor(&p, &file);
    for (int is_stored = 0; is_stored < 2; is_stored++) {
        bl_linear_stack *stack;
        if (is_stored) {
            spec.weight = NULL;
            spec.read_rows = bl_stored_tensor_read_rows;
            spec.user = (void *)tensor;
        }
        y[is_stored] = test_floats(T * shapes[0].rows);
        assert_int_equal(bl_linear_stack_create(&o, 1, &spec, &stack), BL_OK);
        forward_once(d, stack, &p, y[is_stored]);
        bl_linear_stack_destroy(stack);
    }
    test_same_bits("of the file", y[0], y[1], T * shapes[0].rows);
    assert_int_equal(bl_stored_tensor_read_rows((void *)tensor, 0, shapes[0].rows + 1, y[0]),
                     BL_EINTERNAL);
    assert_error_has("tensor w of 2 dimensions: rows 0 to");
    bl_safetensors_close(file);
    free(y[0]), free(y[1]);
    free_problem(&p);
    test_device_destroy(d);
}

/* ---- rejections ---- */

static void expect_failure(bl_device *device, const bl_linear_options *changes,
                           const bl_linear_spec *specs, int64_t n_layers, bl_status status,
                           const char *text)
{
    bl_linear_stack *stack = (bl_linear_stack *)device;
    bl_linear_options o = *changes;

    o.device = device;
    assert_int_equal(bl_linear_stack_create(&o, n_layers, specs, &stack), status);
    assert_null(stack);
    assert_error_has(text);
}

static void test_rejected_options(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options good = {.max_tokens = T}, o;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_F32, DROPOUT);
    expect_failure(NULL, &good, p.specs, LAYERS, BL_EUSAGE, "device is NULL");
    expect_failure(d.device, &good, NULL, LAYERS, BL_EUSAGE, "specs is NULL");
    expect_failure(d.device, &good, p.specs, 0, BL_EUSAGE, "0 layers");
    o = good, o.ratio = NAN;
    expect_failure(d.device, &o, p.specs, LAYERS, BL_EUSAGE, "ratio");
    o = good, o.max_tokens = -1;
    expect_failure(d.device, &o, p.specs, LAYERS, BL_EUSAGE, "max_tokens");
    o = good, o.ring_depth = -1;
    expect_failure(d.device, &o, p.specs, LAYERS, BL_EUSAGE, "ring_depth");
    o = good, o.tier = BL_TIER_DISK, o.ratio = 1;
    expect_failure(d.device, &o, p.specs, LAYERS, BL_EUSAGE, "directory");
    o.dir = "/nonexistent/pages";
    expect_failure(d.device, &o, p.specs, LAYERS, BL_EINPUT, "/nonexistent/pages");
    free_problem(&p);
    test_device_destroy(d);
}

static void test_rejected_specs(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options good = {.max_tokens = T};
    bl_linear_spec s;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_F32, DROPOUT);
    s = p.specs[0], s.rows = 0;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "layer 0: a weight of 0 x 131");
    s = p.specs[0], s.rows = INT64_MAX / 2;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "too large");
    s = p.specs[0], s.dtype = BL_I32;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "I32");
    s = p.specs[0], s.weight = NULL;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "read_rows");
    s = p.specs[0], s.lora.r = -1;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "LoRA rank");
    s = p.specs[0], s.lora.dropout = 1;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "dropout");
    s = p.specs[0], s.lora.alpha = INFINITY;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "alpha");
    s = p.specs[0], s.format = BL_FORMAT_COUNT;
    expect_failure(d.device, &good, &s, 1, BL_EUSAGE, "format");
    for (bl_format f = 0; f < BL_FORMAT_COUNT; f++) {
        s = p.specs[0], s.format = f;
        if (bl_format_is_packed(f)) {
            expect_failure(d.device, &good, &s, 1, BL_EINPUT, "whole groups");
            continue;
        }
        p.w[0][140 * 131 + 7] = NAN;
        expect_failure(d.device, &good, &s, 1, BL_EINPUT, "row 140");
    }
    p.w[0][140 * 131 + 7] = 1e6f; /* beyond f16 */
    s = p.specs[0], s.format = BL_FORMAT_F16;
    expect_failure(d.device, &good, &s, 1, BL_EINPUT, "row 140, column 7 is not finite in f16");
    free_problem(&p);
    test_device_destroy(d);
}

static void test_too_many_tokens(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device, .max_tokens = T - 1};
    bl_linear_stack *stack;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_F32, PLAIN);
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    assert_int_equal(bl_linear_layer_forward(bl_linear_stack_layer(stack, 1), d.stream, T,
                                             bl_tensor_f32(p.x[1]), bl_tensor_f32(p.first.y[1])),
                     BL_EUSAGE);
    assert_error_has("layer 1: 9 tokens, max_tokens is 8");
    bl_linear_stack_destroy(stack);
    bl_linear_stack_destroy(NULL);
    free_problem(&p);
    test_device_destroy(d);
}

static void expect_usage_error(bl_status status, const char *text)
{
    assert_int_equal(status, BL_EUSAGE);
    assert_error_has(text);
}

/* Each argument of a call that is missing or of another dtype, by its name. */
static void test_rejected_arguments(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device, .max_tokens = T};
    bl_linear_memory memory;
    bl_linear_stack *stack;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_F32, DROPOUT);
    expect_usage_error(bl_linear_stack_create(NULL, LAYERS, p.specs, &stack), "options is NULL");
    assert_null(stack);
    expect_usage_error(bl_linear_stack_create(&o, LAYERS, p.specs, NULL), "out is NULL");
    expect_usage_error(bl_linear_stack_plan(NULL, LAYERS, p.specs, &memory), "options is NULL");
    expect_usage_error(bl_linear_stack_plan(&o, LAYERS, p.specs, NULL), "out is NULL");
    expect_usage_error(bl_linear_stack_verify(NULL), "stack is NULL");

    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    bl_linear_layer *layer = bl_linear_stack_layer(stack, 1);
    bl_stream *stream = d.stream;
    bl_tensor x = bl_tensor_f32(p.x[1]), y = bl_tensor_f32(p.first.y[1]),
              dy = bl_tensor_f32(p.dy[1]), none = {0}, bf16 = bl_tensor_of(p.x[1], BL_BF16),
              odd = bl_tensor_of(p.x[1], BL_DTYPE_COUNT);
    assert_null(bl_linear_stack_layer(stack, -1));
    assert_null(bl_linear_stack_layer(stack, LAYERS));
    assert_null(bl_linear_stack_layer(NULL, 0));
    expect_usage_error(bl_linear_layer_forward(NULL, stream, T, x, y), "layer is NULL");
    expect_usage_error(bl_linear_layer_forward(layer, NULL, T, x, y), "stream is NULL");
    expect_usage_error(bl_linear_layer_forward(layer, stream, T, none, y), "layer 1: x is NULL");
    expect_usage_error(bl_linear_layer_forward(layer, stream, T, x, none), "layer 1: y is NULL");
    expect_usage_error(bl_linear_layer_forward(layer, stream, T, bf16, y),
                       "layer 1: y is F32, the tensors before it are BF16");
    expect_usage_error(bl_linear_layer_forward(layer, stream, T, x, odd),
                       "layer 1: y is of an unknown dtype, this device takes F32 and BF16");
    expect_usage_error(bl_linear_layer_backward(NULL, stream, T, x, dy, none), "layer is NULL");
    expect_usage_error(bl_linear_layer_backward(layer, NULL, T, x, dy, none), "stream is NULL");
    expect_usage_error(bl_linear_layer_backward(layer, stream, T, none, dy, none), "x is NULL");
    expect_usage_error(bl_linear_layer_backward(layer, stream, T, x, none, none), "dy is NULL");
    expect_usage_error(bl_linear_layer_backward(layer, stream, T, x, bf16, none), "dy is BF16");
    expect_usage_error(bl_linear_layer_backward(layer, stream, T, x, dy, bf16), "dx is BF16");
    assert_int_equal(bl_linear_layer_forward(layer, stream, T, x, y), BL_OK);
    assert_int_equal(bl_linear_layer_backward(layer, stream, T, x, dy, none), BL_OK);
    test_finish(d);
    bl_linear_stack_destroy(stack);
    free_problem(&p);
    test_device_destroy(d);
}

/* ---- ranks that differ, and ranks that fail ---- */

typedef struct failing_case {
    const problem *problem;
    int what;
} failing_case;

static bl_status fail_to_read(void *user, int64_t begin, int64_t end, void *out)
{
    (void)user, (void)out;
    return BL_FAIL(BL_EIO, "no rows %lld to %lld", (long long)begin, (long long)end);
}

/* Rank 1 is different; all end, none hangs. */
static bl_status create_differently(test_rank *self)
{
    const failing_case *c = self->arg;
    bl_linear_options o = {.device = self->device, .comm = self->comm, .max_tokens = T};
    bl_linear_spec specs[LAYERS];
    bl_linear_stack *stack = NULL;
    bool differs = self->rank == 1;

    memcpy(specs, c->problem->specs, sizeof specs);
    if (differs && c->what == 0) specs[2].rows--;
    if (differs && c->what == 1) o.ring_depth = 3;
    if (differs && c->what == 2) o.seed++;
    if (differs && c->what == 3) specs[0].lora.r++;
    if (differs && c->what == 4) specs[1].weight = NULL, specs[1].read_rows = fail_to_read;
    if (differs && c->what == 5) o.tier = BL_TIER_DISK, o.ratio = 1, o.dir = "/nonexistent/pages";
    bl_status st = bl_linear_stack_create(&o, LAYERS, specs, &stack);
    bl_linear_stack_destroy(stack);
    return st;
}

static void test_ranks_that_differ(void **state)
{
    static const struct {
        bl_status status;
        const char *text;
    } want[] = {{BL_EUSAGE, "rank 1 differ"},        {BL_EUSAGE, "rank 1 differ"},
                {BL_EUSAGE, "rank 1 differ"},        {BL_EUSAGE, "rank 1 differ"},
                {BL_EIO, "layer 1: no rows 1 to 2"}, {BL_EINPUT, "/nonexistent/pages"}};
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_ROW, LORA);
    for (int what = 0; what < (int)BL_COUNT(want); what++) {
        failing_case c = {&p, what};
        bl_error errors[2];
        assert_int_equal(test_ranks_run(2, 1, 60, create_differently, &c, errors),
                         want[what].status);
        assert_error_has(want[what].text);
        for (int r = 0; r < 2; r++) assert_int_not_equal(errors[r].status, BL_OK);
    }
    free_problem(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensor_of_a_file),   cmocka_unit_test(test_page_files),
        cmocka_unit_test(test_rejected_options),   cmocka_unit_test(test_rejected_specs),
        cmocka_unit_test(test_rejected_arguments), cmocka_unit_test(test_too_many_tokens),
        cmocka_unit_test(test_ranks_that_differ),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
