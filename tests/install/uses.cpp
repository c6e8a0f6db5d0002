/* SPDX-License-Identifier: Apache-2.0 */
/* uses.cpp -- every installed header in one C++ program, and a function of each layer of libballast
 * called from it. */
#include <cstdio>
#include <vector>

#include <ballast/ballast_ops.h>

static bl_status quantize(bl_pool *pool, double *worst)
{
    const int64_t rows = 4, cols = 64;
    std::vector<float> x(rows * cols), scales(rows), back(rows * cols);
    std::vector<uint8_t> codes(rows * cols);

    for (size_t i = 0; i < x.size(); i++)
        x[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) / 50.0f;
    BL_TRY(bl_fp8_row_quantize(pool, BL_F32, x.data(), 0, rows, cols, codes.data(), scales.data()));
    bl_fp8_dequantize_tile(BL_FORMAT_FP8_ROW, codes.data(), scales.data(), cols, 0, rows, 0, cols,
                           back.data(), cols);
    *worst = 0.0;
    for (size_t i = 0; i < x.size(); i++) {
        double error = x[i] > back[i] ? x[i] - back[i] : back[i] - x[i];
        if (error > *worst) *worst = error;
    }
    return BL_OK;
}

/* A failure's text comes through C++ as well. */
static bl_status fail(void)
{
    bl_status st = BL_OK;
    BL_TRY_GOTO(st, done, BL_FAIL(BL_EINPUT, "%s: %d", "a text", 42));
done:
    return st;
}

static bl_status run(bl_stream *stream, bl_pool *pool)
{
    /* half of E4M3's step below the largest code, 448, which is here 1 */
    const double bound = 16.001 / 448;
    bl_comm *comm = nullptr;
    double worst, sum = 2.5;

    BL_TRY(quantize(pool, &worst));
    BL_TRY(bl_comm_create_local(1, 0, &comm));
    bl_status st = bl_comm_all_reduce_f64(comm, stream, &sum, 1);
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    bl_comm_destroy(comm);
    BL_TRY(st);
    std::printf("C++: largest error of FP8 %g, sum %g\n", worst, sum);
    return worst <= bound && sum == 2.5 && fail() == BL_EINPUT
               ? BL_OK
               : BL_FAIL(BL_EINTERNAL, "wrong numbers");
}

int main()
{
    bl_device *device = nullptr;
    bl_stream *stream = nullptr;
    bl_pool *pool = nullptr;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_pool_create(2, &pool));
    BL_TRY_GOTO(st, done, bl_device_create_cpu(2, &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "uses", &stream));
    st = run(stream, pool);
done:
    if (st != BL_OK) std::fprintf(stderr, "%s\n", bl_error_text());
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    bl_pool_destroy(pool);
    return st == BL_OK ? 0 : 1;
}
