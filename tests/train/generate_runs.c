/* SPDX-License-Identifier: Apache-2.0 */
/* generate_runs.c -- compares generation with an adapter on a GPU with the CPU's. */
#include "generate_runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trained/peft.h"
#include "trained/modules.h"
#include "base/sizes.h"
#include "model/generate.h"
#include "runs.h"

static void ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

typedef struct generation {
    bl_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_model_weights *weights;
    bl_base *base;
    bl_lora_layout lora;
    bl_tensor lora_weights;
    bl_generator *generator;
} generation;

static void close_generation(generation *g)
{
    bl_generator_destroy(g->generator);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->lora_weights.data);
    bl_base_destroy(g->base);
    bl_model_weights_free(g->weights);
    bl_stream_destroy(g->stream);
    bl_comm_destroy(g->comm);
    bl_device_destroy(g->device);
    bl_model_close(g->model);
}

/* The logits after `text`, given in pieces of `piece` tokens; the caller's. */
static float *continue_text(bool on_gpu, const char *model, const char *adapter,
                            const int32_t *text, int64_t n, int64_t piece, int64_t *vocab)
{
    generation g = {0};
    const float *logits = NULL;
    bool has_modules;

    ok(bl_model_open(model, BL_BASE_AUTO, n, &g.model));
    ok(bl_comm_create_local(1, 0.0, &g.comm));
    ok(on_gpu ? bl_device_create_cuda(0, &g.device) : bl_device_create_cpu(1, &g.device));
    if (on_gpu) ok(bl_device_start_workers(g.device, 2));
    ok(bl_stream_create(g.device, "compute", &g.stream));
    ok(bl_model_weights_load(g.model, g.device, g.comm, g.stream, NULL, &g.weights));
    ok(bl_base_create_resident(&g.weights->layout, g.weights->shards, &g.base));
    ok(bl_adapter_modules_use(g.weights, adapter, g.stream, &has_modules));
    ok(bl_lora_read_all(adapter, &g.model->config, g.device, &g.lora, &g.lora_weights));
    ok(bl_generator_create(g.device, g.stream, g.weights, g.base, &g.lora, g.lora_weights, n,
                           &g.generator));
    for (int64_t at = 0; at < n; at += piece)
        ok(bl_generator_extend(g.generator, text + at, bl_min_i64(piece, n - at), &logits));
    *vocab = g.model->config.vocab_size;
    float *copy = malloc((size_t)*vocab * sizeof *copy);
    assert_true(copy && logits);
    memcpy(copy, logits, (size_t)*vocab * sizeof *copy);
    close_generation(&g);
    return copy;
}

/* The largest difference, as a fraction of the largest logit. */
static double distance(const float *a, const float *b, int64_t n)
{
    double most = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
        largest = fmax(largest, fabs((double)b[i]));
    }
    return most / largest;
}

void generate_runs_check(const char *model, const char *adapter)
{
    static const int32_t text[] = {1, 17, 42, 5, 33, 60, 2, 8, 11, 90};
    int64_t n = BL_COUNT(text), vocab;
    float *cpu = continue_text(false, model, adapter, text, n, n, &vocab),
          *whole = continue_text(true, model, adapter, text, n, n, &vocab),
          *pieces = continue_text(true, model, adapter, text, n, 3, &vocab),
          *other = continue_text(true, model, adapter, text, n - 1, n, &vocab);

    assert_true(distance(whole, cpu, vocab) < 0.03);
    assert_true(distance(pieces, whole, vocab) < 0.03);
    assert_true(distance(other, whole, vocab) > 0.1); /* another text, other logits */
    free(cpu);
    free(whole);
    free(pieces);
    free(other);
}
