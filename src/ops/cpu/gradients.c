/* SPDX-License-Identifier: Apache-2.0 */
/* gradients.c -- gradients of weights that are vectors or tables, on the CPU: those of norms, of
 * biases and of the embedding. An item is a block of columns over all rows in their order, so that
 * neither threads nor the width of vectors change a bit. */
#include "ops/cpu/ops_cpu.h"

enum { COLUMNS = 64 }; /* of an item */

/* dw += dy (x - mean) rstd */
BL_CLONES static void add_products(int64_t n, double mean, double rstd, const float *x,
                                   const float *dy, double *dw)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) dw[i] += (double)dy[i] * (((double)x[i] - mean) * rstd);
}

BL_CLONES static void add_row(int64_t n, const float *dy, double *db)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) db[i] += (double)dy[i];
}

static void add_to(int64_t n, const double *sums, float *out)
{
    for (int64_t i = 0; i < n; i++) out[i] = (float)((double)out[i] + sums[i]);
}

static void norm_item(void *arg, int64_t index, void *scratch)
{
    const bl_norm_gradients_args *a = arg;
    int64_t begin = index * COLUMNS, n = bl_min_i64(COLUMNS, a->H - begin),
            n_rows = a->T * bl_max_i64(1, a->n_heads);
    double dw[COLUMNS] = {0}, db[COLUMNS] = {0};
    float x_copy[COLUMNS], dy_copy[COLUMNS];

    (void)scratch;
    for (int64_t r = 0; r < n_rows; r++) {
        int64_t at = bl_norm_row(r, a->H, a->n_heads, a->row_stride) + begin;
        const float *dy = ops_read(a->dy, at, n, dy_copy);
        if (a->dw)
            add_products(n, a->mean ? (double)a->mean[r] : 0.0, (double)a->rstd[r],
                         ops_read(a->x, at, n, x_copy), dy, dw);
        if (a->db) add_row(n, dy, db);
    }
    if (a->dw) add_to(n, dw, a->dw + begin);
    if (a->db) add_to(n, db, a->db + begin);
}

bl_status ops_cpu_norm_gradients(bl_stream *stream, const bl_norm_gradients_args *args)
{
    bl_norm_gradients_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.H, COLUMNS), norm_item, &a);
    return BL_OK;
}

BL_CLONES static void add_scaled(int64_t n, float scale, const float *dy, float *row)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) row[i] += scale * dy[i];
}

static void embedding_item(void *arg, int64_t index, void *scratch)
{
    const bl_embedding_backward_args *a = arg;
    int64_t begin = index * COLUMNS, n = bl_min_i64(COLUMNS, a->H - begin);

    float copy[COLUMNS];

    (void)scratch;
    for (int64_t t = 0; t < a->T; t++)
        add_scaled(n, a->scale, ops_read(a->dy, t * a->H + begin, n, copy),
                   a->table + a->ids[t] * a->H + begin);
}

bl_status ops_cpu_embedding_backward(bl_stream *stream, const bl_embedding_backward_args *args)
{
    bl_embedding_backward_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.H, COLUMNS), embedding_item, &a);
    return BL_OK;
}
