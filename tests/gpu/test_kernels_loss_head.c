/* SPDX-License-Identifier: Apache-2.0 */
/* The loss head on CUDA against the CPU's, on a head whose values bf16 holds. */
#include "gpu_test.h"

#include "ops/loss_head.h"
#include "ops/cuda/ops_cuda.h"

/* rows: tokens; cols: the vocabulary; shift: the format of the head. More tokens than a chunk, more
 * rows than are dequantized at once, a vocabulary that is not a multiple of 8, one token. */
static const shape shapes[] = {{5, 300, BL_FORMAT_BF16},     {1, 8, BL_FORMAT_BF16},
                               {3, 2501, BL_FORMAT_FP8_ROW}, {1030, 40, BL_FORMAT_BF16},
                               {2, 2500, BL_FORMAT_F32},     {7, 1400, BL_FORMAT_FP8_BLOCK},
                               {0, 16, BL_FORMAT_BF16},      {4, 9001, BL_FORMAT_BF16}};

enum { H = 64, SEGMENTS = 2 };

typedef struct head {
    float *values; /* (V, H) */
    buffer codes, scales;
    bl_weight cpu, gpu;
} head;

static void encode_weight(bl_format format, float value, unsigned char *codes, int64_t i)
{
    uint16_t half = bl_f32_to_bf16(value);
    if (bl_format_has_scales(format))
        codes[i] = bl_f32_to_e4m3(value);
    else if (format == BL_FORMAT_F32)
        memcpy(codes + 4 * i, &value, 4);
    else
        memcpy(codes + 2 * i, &half, 2);
}

/* Two segments, the first one's rows a multiple of 128; E4M3 numbers with scales of powers of
 * two. */
static head head_create(gpu_test *t, int64_t V, bl_format format)
{
    head w = {.values = test_random_floats(V * H, 41)};
    size_t row_bytes = (size_t)bl_format_row_bytes(format, H);
    int64_t split = V / 2 / BL_FP8_BLOCK * BL_FP8_BLOCK;
    w.codes = buffer_create(t, (size_t)V * row_bytes, 0);
    w.scales = buffer_create(t, (size_t)V * 4, 0);
    for (int64_t i = 0; i < V; i++) {
        float scale = ldexpf(1.0f, (int)(i % 3));
        memcpy(w.scales.initial + 4 * i, &scale, 4);
    }
    for (int64_t i = 0; i < V * H; i++)
        encode_weight(format, bl_e4m3_to_f32(bl_f32_to_e4m3(w.values[i])), w.codes.initial, i);
    w.cpu = (bl_weight){.rows = V, .cols = H, .n_segments = SEGMENTS};
    for (int k = 0; k < SEGMENTS; k++) {
        int64_t row = k == 0 ? 0 : split,
                scale = format == BL_FORMAT_FP8_BLOCK ? row / BL_FP8_BLOCK : row;
        w.cpu.segment[k] = (bl_weight_segment){.format = format,
                                               .rows = k == 0 ? split : V - split,
                                               .codes = w.codes.initial + (size_t)row * row_bytes,
                                               .scales = (float *)(void *)w.scales.initial + scale};
        bl_fp8_dequantize(bl_device_pool(t->cpu.device), format, w.cpu.segment[k].codes,
                          w.cpu.segment[k].scales, w.cpu.segment[k].rows, H, w.values + row * H);
    }
    w.gpu = w.cpu;
    for (int k = 0; k < SEGMENTS; k++) {
        w.gpu.segment[k].codes =
            w.codes.gpu + ((const unsigned char *)w.cpu.segment[k].codes - w.codes.initial);
        w.gpu.segment[k].scales =
            (float *)(void *)(w.scales.gpu +
                              ((const unsigned char *)w.cpu.segment[k].scales - w.scales.initial));
    }
    return w;
}

static void head_free(gpu_test *t, head *w)
{
    free(w->values);
    buffer_free(t, &w->codes), buffer_free(t, &w->scales);
}

/* Logits: sums of H exact products in fp32 on both sides, 2 H u of the sum of magnitudes, at most
 * `logit`. A log- probability moves by twice that; exp's and the sums' own errors stay below 100 u
 * for logits within 40 of the largest; smaller ones do not count. */
typedef struct bounds {
    double *logp, *dx, *d_head; /* T; T x H; V x H */
} bounds;

static bounds bounds_of(const bl_loss_head_args *a, const float *values)
{
    bounds b = {test_doubles(a->T), test_doubles(a->T * H), test_doubles(a->V * H)};
    double *logits = test_doubles(a->V);
    for (int64_t t = 0; t < a->T; t++) {
        const float *x = (const float *)a->x.data + t * H;
        double logit = 0, sum = 0, factor = fabs(a->scale * (double)a->weights[t]);
        for (int64_t v = 0; v < a->V; v++) {
            double magnitude = 0;
            logits[v] = 0;
            for (int h = 0; h < H; h++) {
                logits[v] += (double)x[h] * (double)values[v * H + h];
                magnitude += fabs((double)x[h] * (double)values[v * H + h]);
            }
            sum += exp(logits[v]);
            logit = fmax(logit, 2 * H * U * magnitude);
        }
        b.logp[t] = 2 * logit + 100 * U;
        /* dlogits are rounded to bf16, then summed over V in fp32. */
        double relative = BF16 + 2 * b.logp[t] + 2 * (double)(a->V + a->T) * U;
        for (int64_t v = 0; v < a->V && factor > 0; v++) {
            double size = relative * factor * (exp(logits[v]) / sum + (v == a->targets[t]));
            for (int h = 0; h < H; h++) {
                b.dx[t * H + h] += size * fabs((double)values[v * H + h]);
                b.d_head[v * H + h] += size * fabs((double)x[h]);
            }
        }
    }
    free(logits);
    return b;
}

static bl_status launch(bl_stream *stream, const void *args)
{
    return bl_loss_head(stream, args);
}

static void check_logp(const buffer *logp, const float *want, const double *slack, int64_t T)
{
    for (int64_t i = 0; i < T; i++) {
        float got;
        memcpy(&got, logp->result + 4 * i, 4);
        if (!(fabs((double)got - (double)want[i]) <= slack[i] + 2 * U * fabs((double)want[i]))) {
            print_error("logp[%lld]: %.9g, not %.9g\n", (long long)i, (double)got, (double)want[i]);
            fail();
        }
    }
}

/* dlogits rounded to bf16, times x, summed over T in fp32, and added to fp32. */
static void check_head_gradient(const buffer *d_head, const float *want, const double *slack,
                                int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float got;
        memcpy(&got, d_head->result + 4 * i, 4);
        if (!(fabs((double)got - (double)want[i]) <= slack[i] + 2 * U * fabs((double)want[i]))) {
            print_error("d_head[%lld]: %.9g, not %.9g\n", (long long)i, (double)got,
                        (double)want[i]);
            fail();
        }
    }
}

static void check_loss_head(gpu_test *t, shape s)
{
    int64_t T = s.rows, V = s.cols;
    head w = head_create(t, V, (bl_format)s.shift);
    buffer x, d_head, dx = buffer_create(t, (size_t)(T * H) * 2, 0),
                      logp = buffer_create(t, (size_t)T * 4, 0);
    float *cd_head = f32_inputs(t, V * H, 0, 44, &d_head);
    float *cx = bf16_inputs(t, T * H, 0, 42, 1.0f, &x), *cdx = test_floats(T * H),
          *clogp = test_floats(T), *weights = test_floats(T);
    int32_t *targets = test_alloc(T, 4);
    for (int64_t i = 0; i < T; i++) {
        weights[i] = i % 4 == 1 ? 0.0f : i % 4 == 3 ? -0.5f : 1.0f;
        targets[i] = weights[i] == 0.0f ? -100 : (int32_t)(i * 7919 % V);
    }
    double before[1] = {3.0}, closs = before[0], got_loss;
    buffer gweights = bytes_input(t, weights, (size_t)T * 4),
           gtargets = bytes_input(t, targets, (size_t)T * 4),
           loss = bytes_input(t, before, sizeof before),
           scratch = buffer_create(t, ops_cuda_loss_head_scratch_bytes(T, H, V), 192);
    float *logits = test_alloc((int64_t)bl_loss_head_scratch_bytes(BL_DEVICE_CPU, T, H, V), 1);
    bl_loss_head_args cpu = {.T = T,
                             .H = H,
                             .V = V,
                             .head = w.cpu,
                             .x = bl_tensor_f32(cx),
                             .targets = targets,
                             .weights = weights,
                             .scale = 0.125,
                             .logits = logits,
                             .dx = bl_tensor_f32(cdx),
                             .logp = clogp,
                             .loss_sum = &closs,
                             .d_head = cd_head};
    gpu_ok(bl_loss_head(t->cpu.stream, &cpu));
    test_finish(t->cpu);
    bounds allowed = bounds_of(&cpu, w.values);

    bl_loss_head_args gpu = cpu;
    gpu.head = w.gpu;
    gpu.x = gpu_bf16(&x), gpu.targets = (int32_t *)(void *)gtargets.gpu,
    gpu.weights = (float *)(void *)gweights.gpu;
    gpu.logits = scratch.gpu, gpu.dx = gpu_bf16(&dx), gpu.logp = (float *)(void *)logp.gpu,
    gpu.loss_sum = (double *)(void *)loss.gpu, gpu.d_head = (float *)(void *)d_head.gpu;
    buffer_upload(t, &scratch);
    run_twice(
        t, launch, &gpu,
        (buffer *[]){&w.codes, &w.scales, &x, &gtargets, &gweights, &dx, &logp, &loss, &d_head}, 9);
    check_head_gradient(&d_head, cd_head, allowed.d_head, V * H);
    check_logp(&logp, clogp, allowed.logp, T);
    bf16_is_within("loss head dx", &dx, cdx, allowed.dx, U, T * H);
    double slack = 1e-12;
    for (int64_t i = 0; i < T; i++) slack += fabs((double)weights[i]) * allowed.logp[i];
    memcpy(&got_loss, loss.result, sizeof got_loss);
    assert_true(fabs(got_loss - closs) <= slack);

    gpu.dx = (bl_tensor){0}; /* forward only: the same numbers */
    gpu.d_head = NULL;
    unsigned char *with_gradient = test_alloc(T, 4), *apart = test_alloc(T * H, 2);
    memcpy(with_gradient, logp.result, (size_t)T * 4),
        memcpy(apart, dx.result, (size_t)(T * H) * 2);
    run_twice(t, launch, &gpu,
              (buffer *[]){&w.codes, &w.scales, &x, &gtargets, &gweights, &logp, &loss}, 7);
    same_bytes("logp without a gradient", &logp, with_gradient, (size_t)T * 4);
    gpu.dx = gpu_bf16(&x); /* in place, without the rest */
    gpu.logp = NULL, gpu.loss_sum = NULL;
    run_twice(t, launch, &gpu, (buffer *[]){&w.codes, &w.scales, &x, &gtargets, &gweights}, 5);
    same_bytes("dx over x", &x, apart, (size_t)(T * H) * 2);
    buffer_download(t, &scratch); /* its guards */

    free(cx), free(cdx), free(clogp), free(weights), free(targets), free(logits),
        free(with_gradient), free(apart);
    free(allowed.logp), free(allowed.dx), free(allowed.d_head), free(cd_head);
    head_free(t, &w);
    buffer *all[] = {&x, &dx, &logp, &gweights, &gtargets, &loss, &scratch, &d_head};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
}

/* A token that counts with a target outside the vocabulary: its logp and the loss are NaN, the
 * others are well. */
static void check_bad_target(gpu_test *t, shape s)
{
    if (s.rows < 2 || s.rows > 8) return;
    int64_t T = s.rows, V = s.cols;
    head w = head_create(t, V, (bl_format)s.shift);
    buffer x, logp = buffer_create(t, (size_t)T * 4, 0),
              scratch = buffer_create(t, ops_cuda_loss_head_scratch_bytes(T, H, V), 192);
    float *cx = bf16_inputs(t, T * H, 0, 43, 1.0f, &x), weights[8];
    int32_t targets[8] = {0};
    for (int i = 0; i < 8; i++) weights[i] = 1.0f;
    targets[1] = (int32_t)V;
    double before[1] = {0.0}, sum;
    buffer gweights = bytes_input(t, weights, (size_t)T * 4),
           gtargets = bytes_input(t, targets, (size_t)T * 4),
           loss = bytes_input(t, before, sizeof before);
    bl_loss_head_args gpu = {.T = T,
                             .H = H,
                             .V = V,
                             .head = w.gpu,
                             .x = gpu_bf16(&x),
                             .targets = (int32_t *)(void *)gtargets.gpu,
                             .weights = (float *)(void *)gweights.gpu,
                             .scale = 1.0,
                             .logits = scratch.gpu,
                             .logp = (float *)(void *)logp.gpu,
                             .loss_sum = (double *)(void *)loss.gpu};
    run_twice(t, launch, &gpu,
              (buffer *[]){&w.codes, &w.scales, &x, &gtargets, &gweights, &logp, &loss}, 7);
    for (int64_t i = 0; i < T; i++) {
        float got;
        memcpy(&got, logp.result + 4 * i, 4);
        assert_int_equal(isnan(got), i == 1);
    }
    memcpy(&sum, loss.result, sizeof sum);
    assert_true(isnan(sum));
    free(cx);
    head_free(t, &w);
    buffer *all[] = {&x, &logp, &scratch, &gweights, &gtargets, &loss};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
}

int main(void)
{
    static const kernel_case kernels[] = {{"loss_head", check_loss_head},
                                          {"a bad target", check_bad_target}};
    return run_kernels(kernels, (int)BL_COUNT(kernels), shapes, (int)BL_COUNT(shapes));
}
