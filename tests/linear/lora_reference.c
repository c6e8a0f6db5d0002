/* SPDX-License-Identifier: Apache-2.0 */
/* lora_reference.c -- the equations of linear/lora_linear.h in double, dropout included. */
#include "lora_reference.h"

#include "ops_test.h"

#include "ops/philox.h"

/* The mask's factor, from the words that ops/philox.h documents. */
static double mask(const bl_lora_dropout *d, int64_t t, int64_t c)
{
    uint32_t words[4];
    if (d->p == 0) return 1;
    bl_dropout_words(bl_dropout_key(d->seed, d->step, d->layer, d->matrix), d->sample[t],
                     d->position[t], (uint32_t)(c / 4), words);
    return words[c % 4] >= (uint32_t)floor((double)d->p * 4294967296.0) ? 1.0 / (1.0 - (double)d->p)
                                                                        : 0.0;
}

static double size_if(bool sizes, double value)
{
    return sizes ? fabs(value) : value;
}

static void reference_part(const lora_inputs *p, int i, bool sizes, const double *masked,
                           lora_reference *out)
{
    const bl_lora_part *part = &p->linear->part[i];
    int64_t T = p->T, K = p->K, N = p->N, r = part->r;
    double *dxd = test_doubles(T * K), s = part->scale;

    out->dA[i] = test_doubles(r * K);
    out->dB[i] = test_doubles(part->rows * r);
    for (int64_t t = 0; t < T; t++)
        for (int64_t q = 0; q < r; q++) {
            double u = 0, du = 0;
            for (int64_t k = 0; k < K; k++)
                u += masked[t * K + k] * size_if(sizes, ((const float *)part->A.data)[q * K + k]);
            for (int64_t n = 0; n < part->rows; n++) {
                double b = size_if(sizes, ((const float *)part->B.data)[n * r + q]),
                       dy = size_if(sizes, p->dy[t * N + part->row_begin + n]);
                out->y[t * N + part->row_begin + n] += s * u * b;
                out->dB[i][n * r + q] += s * dy * u;
                du += s * dy * b;
            }
            for (int64_t k = 0; k < K; k++) {
                out->dA[i][q * K + k] += du * masked[t * K + k];
                dxd[t * K + k] += du * size_if(sizes, ((const float *)part->A.data)[q * K + k]);
            }
        }
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++)
            out->dx[t * K + k] += mask(&p->linear->dropout, t, k) * dxd[t * K + k];
    free(dxd);
}

lora_reference lora_reference_compute(const lora_inputs *p, bool sizes)
{
    int64_t T = p->T, K = p->K, N = p->N;
    lora_reference out = {.y = test_doubles(T * N), .dx = test_doubles(T * K)};
    double *masked = test_doubles(T * K);

    for (int64_t t = 0; t < T; t++) {
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++) {
                double w = size_if(sizes, p->w[n * K + k]);
                out.y[t * N + n] += size_if(sizes, p->x[t * K + k]) * w;
                out.dx[t * K + k] += size_if(sizes, p->dy[t * N + n]) * w;
            }
        for (int64_t k = 0; k < K; k++)
            masked[t * K + k] = mask(&p->linear->dropout, t, k) * size_if(sizes, p->x[t * K + k]);
    }
    for (int i = 0; i < p->linear->n_parts; i++) reference_part(p, i, sizes, masked, &out);
    free(masked);
    return out;
}

void lora_reference_free(lora_reference *r)
{
    free(r->y);
    free(r->dx);
    for (int i = 0; i < BL_LORA_PARTS; i++) {
        free(r->dA[i]);
        free(r->dB[i]);
    }
}
