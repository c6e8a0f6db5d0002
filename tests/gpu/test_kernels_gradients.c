/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of trained norms, biases and embeddings on CUDA against their CPU twins, over the
 * shapes below. */
#include "gpu_test.h"

#include "ops/elementwise.h"
#include "ops/norm.h"

/* More rows than a block has at a time; not multiples of 8, of 16, of a warp; more columns than a
 * block of the embedding takes; one row, one column, none; buffers that begin anywhere. */
static const shape shapes[] = {{128, 256, 0}, {300, 64, 0}, {7, 172, 0}, {129, 100, 1}, {5, 1, 0},
                               {3, 2049, 3},  {2, 4096, 0}, {1, 32, 0},  {0, 64, 0}};

static bl_status launch_norm_gradients(bl_stream *stream, const void *args)
{
    return bl_norm_gradients(stream, args);
}

static bl_status launch_embedding_backward(bl_stream *stream, const void *args)
{
    return bl_embedding_backward(stream, args);
}

/* Sums in double in another order, off by n 2^-53 of the sizes, which are at most 8 per row; then
 * each rounded to fp32 once. */
static void sums_are_close(const char *what, const buffer *got, const float *want, int64_t n_rows,
                           int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float value;
        memcpy(&value, got->result + 4 * i, 4);
        double allowed = 2 * U * fabs((double)want[i]) + 8.0 * (double)(n_rows * n_rows) * 0x1p-52;
        if (!(fabs((double)value - (double)want[i]) <= allowed)) {
            print_error("%s[%lld]: %.9g, not %.9g\n", what, (long long)i, (double)value,
                        (double)want[i]);
            fail();
        }
    }
}

/* dw and db of LayerNorm, dw of RMSNorm, db of a bias; n_heads 3: of heads in wider rows. */
static void check_norm_gradients(gpu_test *t, shape s, int64_t n_heads, bool has_mean, bool has_dw,
                                 bool has_db)
{
    int64_t per_row = n_heads > 0 ? n_heads : 1, n_rows = s.rows * per_row,
            stride = n_heads > 0 ? n_heads * s.cols + 16 : s.cols, n = s.rows * stride;
    buffer x, dy, mean, rstd, dw, db;
    float *cx = bf16_inputs(t, n, s.shift, 51, 2.0f, &x),
          *cdy = bf16_inputs(t, n, s.shift, 52, 1.0f, &dy),
          *cmean = f32_inputs(t, n_rows, 0, 53, &mean),
          *crstd = f32_inputs(t, n_rows, 0, 54, &rstd), *cdw = f32_inputs(t, s.cols, 0, 55, &dw),
          *cdb = f32_inputs(t, s.cols, 0, 56, &db);
    bl_norm_gradients_args args = {.T = s.rows,
                                   .H = s.cols,
                                   .dy = bl_tensor_f32(cdy),
                                   .n_heads = n_heads,
                                   .row_stride = stride};
    if (has_dw) args.x = bl_tensor_f32(cx), args.rstd = crstd, args.dw = cdw;
    if (has_mean) args.mean = cmean;
    if (has_db) args.db = cdb;
    gpu_ok(bl_norm_gradients(t->cpu.stream, &args));
    test_finish(t->cpu);
    args.dy = gpu_bf16(&dy);
    if (has_dw) args.x = gpu_bf16(&x), args.rstd = (float *)rstd.gpu, args.dw = (float *)dw.gpu;
    if (has_mean) args.mean = (float *)mean.gpu;
    if (has_db) args.db = (float *)db.gpu;
    run_twice(t, launch_norm_gradients, &args, (buffer *[]){&x, &dy, &mean, &rstd, &dw, &db}, 6);
    sums_are_close("dw", &dw, cdw, n_rows, s.cols);
    sums_are_close("db", &db, cdb, n_rows, s.cols);
    free(cx), free(cdy), free(cmean), free(crstd), free(cdw), free(cdb);
    buffer *all[] = {&x, &dy, &mean, &rstd, &dw, &db};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
}

static void check_rows(gpu_test *t, shape s)
{
    check_norm_gradients(t, s, 0, true, true, true);
    check_norm_gradients(t, s, 0, false, true, false);
    check_norm_gradients(t, s, 0, false, false, true);
}

static void check_heads(gpu_test *t, shape s)
{
    if (s.cols <= 256) check_norm_gradients(t, s, 3, false, true, false);
}

/* The CPU's bits: the same additions in the same order. Few ids, so that most are shared. */
static void check_embedding_backward(gpu_test *t, shape s)
{
    enum { VOCABULARY = 11 };
    int64_t n = s.rows * s.cols;
    buffer dy, table;
    float *cdy = bf16_inputs(t, n, s.shift, 57, 1.0f, &dy),
          *ctable = f32_inputs(t, VOCABULARY * s.cols, s.shift, 58, &table);
    int32_t *ids = test_alloc(s.rows, sizeof *ids);
    for (int64_t i = 0; i < s.rows; i++)
        ids[i] = i < 3 ? (int32_t)i : (int32_t)(i * i % (VOCABULARY - 1));
    bl_embedding_backward_args args = {.T = s.rows,
                                       .H = s.cols,
                                       .scale = 1.5f,
                                       .ids = ids,
                                       .dy = bl_tensor_f32(cdy),
                                       .table = ctable};
    buffer gids = bytes_input(t, ids, (size_t)s.rows * sizeof *ids);
    gpu_ok(bl_embedding_backward(t->cpu.stream, &args));
    test_finish(t->cpu);
    args.dy = gpu_bf16(&dy), args.ids = (int32_t *)(void *)gids.gpu;
    args.table = (float *)(void *)table.gpu;
    run_twice(t, launch_embedding_backward, &args, (buffer *[]){&dy, &gids, &table}, 3);
    same_bytes("table", &table, ctable, (size_t)(VOCABULARY * s.cols) * sizeof *ctable);
    free(cdy), free(ctable), free(ids);
    buffer *all[] = {&dy, &gids, &table};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
}

int main(void)
{
    static const kernel_case kernels[] = {{"norm_gradients", check_rows},
                                          {"norm_gradients of heads", check_heads},
                                          {"embedding_backward", check_embedding_backward}};
    return run_kernels(kernels, (int)BL_COUNT(kernels), shapes, (int)BL_COUNT(shapes));
}
