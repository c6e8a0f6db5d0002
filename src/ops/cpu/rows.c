/* SPDX-License-Identifier: Apache-2.0 */
/* Sums, maxima and exponentials of rows, in an order that depends on the length alone. */
#include "ops/cpu/ops_cpu.h"

#include <math.h>

/* Pairwise, so that the order is the same however the lanes were held. */
static double lanes_sum(const double *lanes, int n)
{
    return n == 1 ? lanes[0] : lanes_sum(lanes, n / 2) + lanes_sum(lanes + n / 2, n - n / 2);
}

enum { EXP_BLOCK = 256 };

BL_CLONES static double row_exp_sum(float *row, int64_t n, float shift)
{
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += EXP_BLOCK) {
        int64_t count = bl_min_i64(EXP_BLOCK, n - begin), i = 0;
        float *block = row + begin;
        for (int64_t k = 0; k < count; k++) block[k] = ops_expf(block[k] - shift);
        vf16 even = {0}, odd = {0};
        for (; i + 32 <= count; i += 32) {
            even += *(const vf16 *)(block + i);
            odd += *(const vf16 *)(block + i + 16);
        }
        even += odd;
        float rest = 0;
        for (; i < count; i++) rest += block[i];
        for (int k = 0; k < 8; k++) even[k] += even[k + 8];
        for (int k = 0; k < 4; k++) even[k] += even[k + 4];
        total += (double)((even[0] + even[2]) + (even[1] + even[3])) + (double)rest;
    }
    return total;
}

BL_CLONES static float row_max(const float *row, int64_t n)
{
    float best = -INFINITY;
    int64_t i = 0;
    if (n >= 16) {
        vf16 most = *(const vf16 *)row;
        for (int k = 0; k < 16; k++)
            most[k] = most[k] > best ? most[k] : best; /* no NaN to start from */
        for (i = 16; i + 16 <= n; i += 16) {
            vf16 next = *(const vf16 *)(row + i);
            vi16 larger = next > most;
            most = (vf16)(((vi16)next & larger) | ((vi16)most & ~larger));
        }
        for (int k = 0; k < 16; k++) best = most[k] > best ? most[k] : best;
    }
    for (; i < n; i++) best = row[i] > best ? row[i] : best;
    return best;
}

BL_CLONES static double row_dot(const float *a, const float *b, int64_t n)
{
    vd8 even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        even += __builtin_convertvector(*(const vf8 *)(a + i), vd8) *
                __builtin_convertvector(*(const vf8 *)(b + i), vd8);
        odd += __builtin_convertvector(*(const vf8 *)(a + i + 8), vd8) *
               __builtin_convertvector(*(const vf8 *)(b + i + 8), vd8);
    }
    even += odd;
    double lanes[8], rest = 0;
    for (int k = 0; k < 8; k++) lanes[k] = even[k];
    for (; i < n; i++) rest += (double)a[i] * (double)b[i];
    return lanes_sum(lanes, 8) + rest;
}

BL_CLONES static void row_scale(int64_t n, float factor, float *row)
{
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
}

double ops_exp_sum(float *row, int64_t n, float shift)
{
    return row_exp_sum(row, n, shift);
}

float ops_max(const float *row, int64_t n)
{
    return row_max(row, n);
}

double ops_dot(const float *a, const float *b, int64_t n)
{
    return row_dot(a, b, n);
}

void ops_scale(int64_t n, float factor, float *row)
{
    row_scale(n, factor, row);
}
