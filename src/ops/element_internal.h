/* SPDX-License-Identifier: Apache-2.0 */
/* element_internal.h -- the arithmetic of the element-wise ops on one element, for C and for CUDA.
 * The op's header has the equation; here is the order of the roundings, in which both devices agree
 * (CUDA files are compiled without contraction). Only bl_exp differs. */
#ifndef BALLAST_OPS_ELEMENT_INTERNAL_H
#define BALLAST_OPS_ELEMENT_INTERNAL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "base/host_device.h"
#include "ops/rounding_internal.h"

/* exp(x) within 1 ulp wherever the result is normal, in arithmetic that vectorizes: x = n ln 2 + r
 *   with |r|
 * <= ln(2)/2 (ln 2 in two parts, the first with so few bits that n times it is exact: Cody & Waite
 * 1980), Taylor's polynomial of degree 7 (remainder below r^8/8! < 5.3e-9, a twelfth of an ulp),
 * and 2^n in two factors so that the ends of the range round to denormals, 0 and infinity. NaN
 * stays NaN. */
static inline float ops_expf(float x)
{
    const float magic =
        12582912.0f;               /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = x < -104.0f ? -104.0f : x; /* below: 0 */
    x = x > 89.0f ? 89.0f : x;     /* above: infinity */
    float shifted = x * 1.44269504f + magic;
    float n = shifted - magic;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = 1.0f + (r + r * r * p);

    int32_t bits, half;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int32_t)((uint32_t)bits - 0x4B400000u); /* n; anything at all for NaN, hence unsigned */
    half = bits >> 1;
    uint32_t low = ((uint32_t)half + 127u) << 23, high = ((uint32_t)bits - (uint32_t)half + 127u)
                                                         << 23;
    float scale_low, scale_high;
    memcpy(&scale_low, &low, sizeof low);
    memcpy(&scale_high, &high, sizeof high);
    return p * scale_low * scale_high;
}

/* On a GPU exp takes the special function unit: the polynomial would cost more than the memory
 * leaves time for. Its relative error is at most 2^-22 + |x| 2^-23 (CUDA C++ Programming Guide,
 * intrinsic functions: 2 + floor(|1.173 x|) ulp). */
BL_HOST_DEVICE float bl_exp(float x)
{
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return ops_expf(x);
#endif
}

/* silu(g) u */
BL_HOST_DEVICE float bl_swiglu(float g, float u)
{
    return g / (1.0f + bl_exp(-g)) * u;
}

typedef struct bl_swiglu_gradient {
    float dg, du;
} bl_swiglu_gradient;

BL_HOST_DEVICE bl_swiglu_gradient bl_swiglu_gradient_of(float g, float u, float dh)
{
    float sigma = 1.0f / (1.0f + bl_exp(-g));
    bl_swiglu_gradient d = {dh * u * (sigma * (1.0f + g * (1.0f - sigma))), dh * (g * sigma)};
    return d;
}

/* x clamped from above; NaN stays NaN. */
BL_HOST_DEVICE float bl_clamp_above(float x, float limit)
{
    return x > limit ? limit : x;
}

/* (u' + 1) g' sigma(alpha g'), clamped (ops/experts.h) */
BL_HOST_DEVICE float bl_swiglu_clamped(float g, float u, float alpha, float limit)
{
    float gate = bl_clamp_above(g, limit), up = -bl_clamp_above(-bl_clamp_above(u, limit), limit);
    return gate / (1.0f + bl_exp(-alpha * gate)) * (up + 1.0f);
}

BL_HOST_DEVICE bl_swiglu_gradient bl_swiglu_clamped_gradient_of(float g, float u, float alpha,
                                                                float limit, float dh)
{
    float gate = bl_clamp_above(g, limit), up = -bl_clamp_above(-bl_clamp_above(u, limit), limit),
          sigma = 1.0f / (1.0f + bl_exp(-alpha * gate)),
          dg = dh * (up + 1.0f) * (sigma * (1.0f + alpha * gate * (1.0f - sigma))),
          du = dh * (gate * sigma);
    bl_swiglu_gradient d = {g > limit ? 0.0f : dg, u > limit || u < -limit ? 0.0f : du};
    return d;
}

typedef struct bl_normal {
    float density, below; /* phi(u), Phi(u) */
} bl_normal;

/* The normal distribution at u. The tail is exp(-u^2 / 2) z P(z), z = 1 / (1 + 0.3 |u|), P fitted
 * to a relative error of 1.5e-8 by tools/golden/ops/fit_gelu_tail.py: it is accurate where Phi is
 * small, too, which 1 + erf is not. */
BL_HOST_DEVICE bl_normal bl_normal_of(float u)
{
    float size = fabsf(u), z = 1.0f / (1.0f + 0.3f * size), density = bl_exp(-0.5f * u * u);
    float p = -0.0206279606f;
    p = p * z + 0.112460852f;
    p = p * z - 0.228275195f;
    p = p * z + 0.191870004f;
    p = p * z - 0.0794976577f;
    p = p * z + 0.0961984769f;
    p = p * z + 0.0783745497f;
    p = p * z + 0.110238828f;
    p = p * z + 0.11957138f;
    p = p * z + 0.119686715f;
    float tail = density * (p * z);
    bl_normal n = {density * 0.39894228f, u < 0.0f ? tail : 1.0f - tail};
    return n;
}

BL_HOST_DEVICE float bl_gelu_erf(float u)
{
    return u * bl_normal_of(u).below;
}

BL_HOST_DEVICE float bl_gelu_erf_gradient(float u, float dh)
{
    bl_normal n = bl_normal_of(u);
    return dh * (n.below + u * n.density);
}

/* sigma(2 c), sigma (1 - sigma), and u times 2 c's derivative; from exp(-|2 c|), so that neither
 * side of 0 cancels. From 16 on sigma is 0 or 1 and the cube of u may overflow: u is held there. */
typedef struct bl_gelu_gate {
    float sigma, both, slope;
} bl_gelu_gate;

BL_HOST_DEVICE bl_gelu_gate bl_gelu_gate_of(float u)
{
    float v = u < -16.0f ? -16.0f : u > 16.0f ? 16.0f : u, square = v * v;
    float small = bl_exp(-1.59576912f * fabsf(v) * (1.0f + 0.044715f * square)),
          large = 1.0f / (1.0f + small);
    bl_gelu_gate gate = {v < 0.0f ? small * large : large, small * large * large,
                         1.59576912f * v * (1.0f + 0.134145f * square)};
    return gate;
}

BL_HOST_DEVICE float bl_gelu_tanh(float u)
{
    return u * bl_gelu_gate_of(u).sigma;
}

BL_HOST_DEVICE float bl_gelu_tanh_gradient(float u, float dh)
{
    bl_gelu_gate gate = bl_gelu_gate_of(u);
    return dh * (gate.sigma + gate.slope * gate.both);
}

/* Channels of a head of d that RoPE rotates. */
BL_HOST_DEVICE int64_t bl_rope_width(int64_t d, int64_t d_rotated)
{
    return d_rotated > 0 ? d_rotated : d;
}

typedef struct bl_rope_pair {
    float a, b;
} bl_rope_pair;

/* (a, b) turned by the angle of these cosine and sine. */
BL_HOST_DEVICE bl_rope_pair bl_rope_rotate(float a, float b, float cosine, float sine)
{
    bl_rope_pair turned = {a * cosine - b * sine, b * cosine + a * sine};
    return turned;
}

/* Where row `row` of a norm begins: of dense rows of H channels, or of n_heads heads per token. */
BL_HOST_DEVICE int64_t bl_norm_row(int64_t row, int64_t H, int64_t n_heads, int64_t row_stride)
{
    return n_heads > 0 ? row / n_heads * row_stride + row % n_heads * H : row * H;
}

/* x rstd w: an element of RMSNorm. */
BL_HOST_DEVICE float bl_rmsnorm_element(float x, float rstd, float w)
{
    return x * rstd * w;
}

/* rstd (dy w - x along), along = rstd^2 mean(dy w x): an element of its gradient. */
BL_HOST_DEVICE float bl_rmsnorm_gradient_element(float x, float rstd, float w, float dy,
                                                 float along)
{
    return rstd * (dy * w - x * along);
}

/* (x - mean) rstd w + b: an element of LayerNorm. */
BL_HOST_DEVICE float bl_layernorm_element(float x, float mean, float rstd, float w, float b)
{
    return (x - mean) * rstd * w + b;
}

/* What the elements of a row of LayerNorm's gradient have in common: mean and rstd of the forward,
 * shift = mean(dy w), along = rstd^2 mean(dy w (x - mean)). */
typedef struct bl_layernorm_row {
    float mean, rstd, shift, along;
} bl_layernorm_row;

/* rstd (dy w - shift - (x - mean) along) */
BL_HOST_DEVICE float bl_layernorm_gradient_element(bl_layernorm_row row, float x, float w, float dy)
{
    return row.rstd * (dy * w - row.shift - (x - row.mean) * row.along);
}

/* Shared by AdamW's elements, computed once per call on the host. */
typedef struct bl_adamw_factors {
    float gain1, gain2; /* 1 - beta1, 1 - beta2 */
    float decay;        /* lr weight_decay */
    float step_size;    /* lr / (1 - beta1^step) */
    float inverse_root; /* 1 / sqrt(1 - beta2^step) */
    float eps;
} bl_adamw_factors;

static inline bl_adamw_factors bl_adamw_factors_of(int64_t step, double lr, double beta1,
                                                   double beta2, double eps, double weight_decay)
{
    bl_adamw_factors f = {(float)(1.0 - beta1),
                          (float)(1.0 - beta2),
                          (float)(lr * weight_decay),
                          (float)(lr / (1.0 - pow(beta1, (double)step))),
                          (float)(1.0 / sqrt(1.0 - pow(beta2, (double)step))),
                          (float)eps};
    return f;
}

/* The new moments. One factor each, whose relative error a moment does not amplify: beta2 in fp32
 * and 1 - beta2 would not add up to 1. */
BL_HOST_DEVICE void bl_adamw_moments(const bl_adamw_factors *f, float grad_scale, float grad,
                                     float *m, float *v)
{
    float g = grad * grad_scale;
    *m = *m + f->gain1 * (g - *m);
    *v = *v + f->gain2 * (g * g - *v);
}

/* The move is summed before it is taken from w: 1 - lr weight_decay would lose its digits. */
BL_HOST_DEVICE float bl_adamw_move(const bl_adamw_factors *f, float w, float m, float v)
{
    float quotient = m / (sqrtf(v) * f->inverse_root + f->eps);
    return w - (f->decay * w + f->step_size * quotient);
}

/* m and v are rounded before w moves by them. */
BL_HOST_DEVICE void bl_adamw_element(const bl_adamw_factors *f, float grad_scale, float grad,
                                     float *w, float *m, float *v)
{
    bl_adamw_moments(f, grad_scale, grad, m, v);
    *w = bl_adamw_move(f, *w, *m, *v);
}

/* The same with moments in bf16, which are rounded by the halves of `word` after w has moved. */
BL_HOST_DEVICE void bl_adamw_element_bf16(const bl_adamw_factors *f, float grad_scale, float grad,
                                          uint32_t word, float *w, uint16_t *m, uint16_t *v)
{
    float first = bl_bf16_to_f32(*m), second = bl_bf16_to_f32(*v);

    bl_adamw_moments(f, grad_scale, grad, &first, &second);
    *w = bl_adamw_move(f, *w, first, second);
    *m = bl_f32_to_bf16_random(first, word);
    *v = bl_f32_to_bf16_random(second, word >> 16);
}

/* The factor of gradients of this norm. A NaN norm gives NaN, as torch's clamp does; max_norm 0 is
 * no clipping. */
BL_HOST_DEVICE double bl_clip_factor(double max_norm, double norm)
{
    double factor = max_norm / (norm + 1e-6);
    return max_norm > 0.0 && !(factor > 1.0) ? factor : 1.0;
}

/* The document that holds token t (or, where documents are empty, the last one that starts at or
 * before t). */
BL_HOST_DEVICE int64_t bl_document_of(const int32_t *cu_seqlens, int64_t n_documents, int64_t t)
{
    int64_t low = 0, high = n_documents - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (cu_seqlens[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Floats from RoPE's tables to those of a document: the tables of long documents follow. */
BL_HOST_DEVICE int64_t bl_rope_table_offset(int64_t document_tokens, int64_t long_after,
                                            int64_t long_offset)
{
    return long_after > 0 && document_tokens > long_after ? long_offset : 0;
}

#endif
