/* SPDX-License-Identifier: Apache-2.0 */
/* batch.c -- micro-batches in one block of host memory and its copy on the device: ids, targets,
 * positions, documents. */
#include "model/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "chat/template.h"

int64_t bl_batches_micro_bytes(int64_t T_max)
{
    int64_t per_token =
        4 * (int64_t)sizeof(int32_t) + (int64_t)sizeof(float) + (int64_t)sizeof(int64_t);
    return bl_round_up(T_max * per_token + (int64_t)sizeof(int32_t), 64);
}

/* The host memory that is filled in for the device's `memory`. */
static void *on_host(const bl_batches *b, const void *memory)
{
    return (char *)b->twin->host + ((const char *)memory - (const char *)b->twin->memory);
}

bl_status bl_batches_create(bl_device *device, int n_micro, int64_t T_max, bl_batches **out)
{
    int64_t micro_bytes = bl_batches_micro_bytes(T_max);

    *out = NULL;
    bl_batches *b = calloc(1, sizeof *b);
    if (b) b->micro = calloc((size_t)n_micro, sizeof *b->micro);
    if (!b || !b->micro) {
        free(b);
        return BL_FAIL(BL_ENOMEM, "%d micro-batches", n_micro);
    }
    b->n_micro = n_micro;
    b->T_max = T_max;
    bl_status st =
        bl_twin_create(device, (size_t)(n_micro * micro_bytes), "token batches", &b->twin);
    if (st != BL_OK) {
        bl_batches_destroy(b);
        return st;
    }
    for (int m = 0; m < n_micro; m++) {
        char *at =
            (char *)b->twin->memory + m * micro_bytes; /* widest type first: all are aligned */
        b->micro[m].sample = (int64_t *)at;
        b->micro[m].ids = (int32_t *)(b->micro[m].sample + T_max);
        b->micro[m].host_ids = on_host(b, b->micro[m].ids);
        b->micro[m].targets = b->micro[m].ids + T_max;
        b->micro[m].position = b->micro[m].targets + T_max;
        b->micro[m].cu_seqlens = b->micro[m].position + T_max;
        b->micro[m].weights = (float *)(b->micro[m].cu_seqlens + T_max + 1);
    }
    *out = b;
    return BL_OK;
}

void bl_batches_destroy(bl_batches *batches)
{
    if (!batches) return;
    bl_twin_destroy(batches->twin);
    free(batches->marks);
    free(batches->micro);
    free(batches);
}

void bl_batches_clear(bl_batches *batches)
{
    for (int m = 0; m < batches->n_micro; m++) {
        batches->micro[m].T = batches->micro[m].n_documents = 0;
        *(int32_t *)on_host(batches, batches->micro[m].cu_seqlens) = 0;
    }
    batches->n_tokens = batches->n_labels = 0;
}

bl_status bl_batches_keep_marks(bl_batches *batches, bool learns_prompt)
{
    batches->learns_prompt = learns_prompt;
    batches->marks = calloc((size_t)batches->n_micro, (size_t)batches->T_max + 1);
    return batches->marks ? BL_OK : BL_FAIL(BL_ENOMEM, "marks of preferences");
}

static uint8_t *marks_of(const bl_batches *b, int index)
{
    return b->marks + index * b->T_max;
}

bl_batch_view bl_batches_view(const bl_batches *b, int index)
{
    return (bl_batch_view){.ids = on_host(b, b->micro[index].ids),
                           .ends = on_host(b, b->micro[index].cu_seqlens),
                           .marks = b->marks ? marks_of(b, index) : NULL,
                           .samples = on_host(b, b->micro[index].sample)};
}

/* Of token t of a preference row, and its target where it is a chosen answer's prompt. */
static void mark(bl_batches *b, int index, const bl_sample *s, int64_t t, int64_t at)
{
    bl_micro_batch *micro = &b->micro[index];
    int document = s->document_ids ? s->document_ids[t] : 0;
    bool begins = t == 0 || (s->document_ids && s->document_ids[t - 1] != document),
         ends = t + 1 == s->n_tokens || (s->document_ids && s->document_ids[t + 1] != document);
    float *weights = on_host(b, micro->weights);
    uint8_t *out = &marks_of(b, index)[at];

    *out = weights[at] != 0.0f ? BL_MARK_ANSWER : 0;
    if (begins && s->is_desirable) *out |= BL_MARK_DESIRABLE;
    if (begins && s->begins_learned[document]) *out |= BL_MARK_BEGINS;
    if (!b->learns_prompt || *out & BL_MARK_ANSWER || ends || document != 0) return;
    *out |= BL_MARK_PROMPT;
    ((int32_t *)on_host(b, micro->targets))[at] = s->ids[t + 1];
    weights[at] = 1.0f;
    b->n_labels++;
}

static bl_status check_room(const bl_batches *batches, int index, int64_t n)
{
    int64_t T = batches->micro[index].T;

    if (T + n <= batches->T_max) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "a micro-batch of %lld tokens has no room for %lld more",
                   (long long)T, (long long)n);
}

/* The token after those of the micro-batch, `position` of its row. */
static void put_token(bl_batches *batches, int index, int64_t position, int32_t id, int32_t target,
                      float weight, int64_t sample)
{
    bl_micro_batch *b = &batches->micro[index];
    int64_t at = b->T++;

    ((int32_t *)on_host(batches, b->ids))[at] = id;
    ((int32_t *)on_host(batches, b->targets))[at] = weight != 0.0f ? target : 0;
    ((float *)on_host(batches, b->weights))[at] = weight;
    ((int32_t *)on_host(batches, b->position))[at] = (int32_t)position;
    ((int64_t *)on_host(batches, b->sample))[at] = sample;
    batches->n_labels += weight != 0.0f;
    batches->n_tokens++;
}

static void end_row(bl_batches *batches, int index)
{
    bl_micro_batch *b = &batches->micro[index];
    ((int32_t *)on_host(batches, b->cu_seqlens))[++b->n_documents] = (int32_t)b->T;
}

static void append_sample(bl_batches *batches, int index, const bl_sample *s, int64_t sample)
{
    bl_micro_batch *b = &batches->micro[index];
    int64_t n = (int64_t)s->n_tokens;

    for (int64_t t = 0; t < n; t++) {
        bool last = t + 1 == n;
        float weight = last || s->labels[t + 1] == BL_LABEL_MASKED ? 0.0f
                       : s->weights                                ? s->weights[t + 1]
                                                                   : 1.0f;
        if (t > 0 && s->document_ids && s->document_ids[t] != s->document_ids[t - 1])
            end_row(batches, index);
        put_token(batches, index, t, s->ids[t], last ? 0 : s->labels[t + 1], weight, sample);
        if (batches->marks) mark(batches, index, s, t, b->T - 1);
    }
    if (n > 0) end_row(batches, index);
}

bl_status bl_batches_append(bl_batches *batches, int index, const bl_dataset *dataset, int64_t row,
                            int64_t sample)
{
    bl_sample s;

    BL_TRY(bl_dataset_get(dataset, row, &s));
    bl_status st = check_room(batches, index, (int64_t)s.n_tokens);
    if (st == BL_OK) append_sample(batches, index, &s, sample);
    bl_sample_free(&s);
    return st;
}

bl_status bl_batches_append_row(bl_batches *batches, int index, const bl_batch_row *row,
                                int64_t sample)
{
    BL_TRY(check_room(batches, index, row->n));
    for (int64_t t = 0; t < row->n; t++) {
        float weight = row->targets[t] == BL_LABEL_MASKED ? 0.0f
                       : row->weights                     ? row->weights[t]
                                                          : 1.0f;
        if (row->is_marked && weight != 0.0f) weight = 1.0f;
        put_token(batches, index, t, row->ids[t], row->targets[t], weight, sample);
    }
    if (row->n > 0) end_row(batches, index);
    return BL_OK;
}

/* Tokens before the first of the answer. */
static int64_t prompt_tokens(const uint8_t *marks, int64_t n)
{
    int64_t t = 0;

    if (marks[0] & BL_MARK_BEGINS) return 0;
    while (t < n && !(marks[t] & BL_MARK_ANSWER)) t++;
    return bl_min_i64(t + 1, n);
}

/* The tokens of `out` from `first` on are a document. */
static void end_document(bl_batches *out, int index, int64_t first, int64_t n_prompt)
{
    bl_micro_batch *b = &out->micro[index];
    const int32_t *ids = on_host(out, b->ids);
    int32_t *targets = on_host(out, b->targets), *position = on_host(out, b->position);
    float *weights = on_host(out, b->weights);
    uint8_t *marks = marks_of(out, index);
    int64_t n = b->T - first;

    for (int64_t t = 0; t < n; t++) {
        bool is_answer = t + 1 < n && t + 1 >= n_prompt;
        targets[first + t] = is_answer ? ids[first + t + 1] : 0;
        weights[first + t] = is_answer ? 1.0f : 0.0f;
        position[first + t] = (int32_t)t;
        marks[first + t] = is_answer ? BL_MARK_ANSWER : 0;
    }
    if (n_prompt == 0) marks[first] |= BL_MARK_BEGINS;
    ((int32_t *)on_host(out, b->cu_seqlens))[++b->n_documents] = (int32_t)b->T;
}

void bl_batches_mismatch(const bl_batches *from, int index, int64_t max_tokens, bl_batches *out)
{
    const bl_batch_view v = bl_batches_view(from, index);
    int64_t n_documents = from->micro[index].n_documents;
    bl_micro_batch *b = &out->micro[index];
    int32_t *ids = on_host(out, b->ids);

    for (int64_t i = 0; i < n_documents; i++) {
        int64_t other = (i + n_documents - 1) % n_documents, at = v.ends[i],
                end = v.ends[other + 1];
        int64_t n_prompt = prompt_tokens(v.marks + at, v.ends[i + 1] - at), first = b->T,
                answer =
                    v.ends[other] + prompt_tokens(v.marks + v.ends[other], end - v.ends[other]),
                n_answer = bl_min_i64(end - answer, max_tokens - n_prompt);
        memcpy(ids + first, v.ids + at, (size_t)n_prompt * sizeof *ids);
        memcpy(ids + first + n_prompt, v.ids + answer, (size_t)n_answer * sizeof *ids);
        b->T += n_prompt + n_answer;
        end_document(out, index, first, n_prompt);
    }
    memset(on_host(out, b->sample), 0, (size_t)b->T * sizeof *b->sample);
}

void bl_batches_fill_zeros(bl_batches *batches, int index, int64_t T, int64_t longest)
{
    bl_micro_batch *b = &batches->micro[index];
    int32_t *position = on_host(batches, b->position), *ends = on_host(batches, b->cu_seqlens);
    float *weights = on_host(batches, b->weights);

    b->T = T;
    b->n_documents = 0;
    ends[0] = 0;
    memset(on_host(batches, b->sample), 0, (size_t)b->T * sizeof *b->sample);
    memset(on_host(batches, b->ids), 0, (size_t)b->T * sizeof *b->ids);
    memset(on_host(batches, b->targets), 0, (size_t)b->T * sizeof *b->targets);
    for (int64_t t = 0; t < b->T; t++) {
        weights[t] = 1.0f;
        position[t] = (int32_t)(t % longest);
        if (t + 1 == b->T || (t + 1) % longest == 0) ends[++b->n_documents] = (int32_t)(t + 1);
    }
}

/* The first n_bytes at `memory`. */
static bl_status upload(bl_batches *b, bl_stream *stream, const void *memory, int64_t n_bytes)
{
    size_t offset = (size_t)((const char *)memory - (const char *)b->twin->memory);
    return bl_twin_upload(b->twin, stream, offset, (size_t)n_bytes);
}

bl_status bl_batches_upload(bl_batches *batches, bl_stream *stream)
{
    for (int m = 0; m < batches->n_micro; m++) {
        const bl_micro_batch *b = &batches->micro[m];
        int64_t n_int32 = b->T * (int64_t)sizeof(int32_t);
        BL_TRY(upload(batches, stream, b->sample, b->T * (int64_t)sizeof *b->sample));
        BL_TRY(upload(batches, stream, b->ids, n_int32));
        BL_TRY(upload(batches, stream, b->targets, n_int32));
        BL_TRY(upload(batches, stream, b->position, n_int32));
        BL_TRY(upload(batches, stream, b->weights, b->T * (int64_t)sizeof *b->weights));
        BL_TRY(upload(batches, stream, b->cu_seqlens,
                      (b->n_documents + 1) * (int64_t)sizeof *b->cu_seqlens));
    }
    return BL_OK;
}
