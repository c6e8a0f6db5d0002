/* SPDX-License-Identifier: Apache-2.0 */
/* feed.c -- a group's micro-batches on a device: tokens padded to whole tiles, first inputs
 * gathered on the host. */
#include "model/feed_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "device/staging.h"
#include "offload/transfer.h"
#include "ops/elementwise.h"

enum { ALIGNMENT_BYTES = 256 };

struct bl_feed {
    bl_device *device;
    const bl_model_weights *weights;
    bl_tensor table; /* of embeddings */
    bool pads;
    int64_t T_max; /* padded */
    char *arrays;  /* [max_group][array_bytes]: of padded micro-batches */
    /* Element i is the number of tokens in i tiles: where the padding's document ends. */
    int32_t *tile_ends;
    /* [max_group * T_max][H], pinned: embeddings in bf16; NULL: the device gathers them. */
    uint16_t *rows;
    bl_event *copied; /* what was copied from rows */
};

static bool pads(const bl_block_dims *dims)
{
    return dims->kind == BL_DEVICE_CUDA;
}

static int64_t tile_tokens(const bl_block_dims *dims)
{
    return bl_block_rows(dims, 1);
}

int64_t bl_feed_token_step(const bl_feed *feed)
{
    const bl_block_dims *dims = &feed->weights->dims;
    return feed->pads ? bl_block_rows(dims, bl_ceil_div(feed->T_max, BL_FEED_BUCKETS)) : 0;
}

/* Tokens that a micro-batch of T has in the layers. More than T_max stay more: an error. */
static int64_t padded_tokens(const bl_feed *feed, int64_t T)
{
    if (!feed->pads) return T;
    return T > feed->T_max ? T : bl_min_i64(bl_round_up(T, bl_feed_token_step(feed)), feed->T_max);
}

int64_t bl_feed_rows(const bl_feed *feed, int64_t T)
{
    return feed->pads ? padded_tokens(feed, T) : bl_block_rows(&feed->weights->dims, T);
}

/* The padded arrays of a micro-batch of T tokens at `memory`, the widest type first. Returns their
 * bytes. */
static int64_t place_arrays(char *memory, int64_t T, bl_micro_batch *out)
{
    int64_t at = 0;

    out->sample = (int64_t *)(void *)(memory + at);
    at += T * (int64_t)sizeof *out->sample;
    out->targets = (int32_t *)(void *)(memory + at);
    at += T * (int64_t)sizeof *out->targets;
    out->position = (int32_t *)(void *)(memory + at);
    at += T * (int64_t)sizeof *out->position;
    out->weights = (float *)(void *)(memory + at);
    at += T * (int64_t)sizeof *out->weights;
    out->cu_seqlens = (int32_t *)(void *)(memory + at);
    at += (T + 2) * (int64_t)sizeof *out->cu_seqlens; /* a document a token, and the padding's */
    return bl_round_up(at, ALIGNMENT_BYTES);
}

static int64_t array_bytes(int64_t T)
{
    static char nowhere[1];
    bl_micro_batch unused;
    return place_arrays(nowhere, T, &unused);
}

bl_feed_size bl_feed_measure(const bl_block_dims *dims, bool has_table, int64_t T_max,
                             int max_group)
{
    int64_t T = bl_block_rows(dims, T_max), n_ends = T / tile_tokens(dims) + 1;

    if (!pads(dims)) return (bl_feed_size){0};
    return (bl_feed_size){
        .device_bytes = max_group * array_bytes(T) +
                        bl_round_up(n_ends * (int64_t)sizeof(int32_t), ALIGNMENT_BYTES),
        .host_bytes = has_table ? 0 : max_group * T * dims->hidden * (int64_t)sizeof(uint16_t)};
}

static bl_status fill_tile_ends(bl_feed *feed)
{
    int64_t tile = tile_tokens(&feed->weights->dims), n = feed->T_max / tile + 1;
    bl_staging *staging;
    bl_status st = BL_OK;

    BL_TRY(bl_staging_create(feed->device, (size_t)n * sizeof(int32_t), "ends of tiles", &staging));
    int32_t *ends = staging->bytes;
    for (int64_t i = 0; i < n; i++) ends[i] = (int32_t)(i * tile);
    st = bl_staging_upload(staging, feed->tile_ends, ends, staging->n_bytes);
    bl_staging_destroy(staging);
    return st;
}

bl_status bl_feed_create(bl_device *device, const bl_model_weights *weights, int64_t T_max,
                         int max_group, void *memory, bl_feed **out)
{
    const bl_block_dims *dims = &weights->dims;
    const float *table = weights->tables[BL_TABLE_EMBEDDING]; /* an adapter's */
    bool has_table = weights->model->is_trained || table;
    bl_feed_size size = bl_feed_measure(dims, has_table, T_max, max_group);
    bl_status st = BL_OK;

    *out = NULL;
    bl_feed *feed = calloc(1, sizeof *feed);
    if (!feed) return BL_FAIL(BL_ENOMEM, "the feed of a pass");
    *feed =
        (bl_feed){.device = device,
                  .weights = weights,
                  .table = bl_tensor_of(weights->model->embedding, weights->model->embedding_dtype),
                  .pads = pads(dims),
                  .T_max = bl_block_rows(dims, T_max),
                  .arrays = memory};
    if (feed->pads) {
        feed->tile_ends = (int32_t *)(void *)(feed->arrays + max_group * array_bytes(feed->T_max));
        BL_TRY_GOTO(st, done, bl_event_create(device, &feed->copied));
        if (!has_table)
            BL_TRY_GOTO(st, done,
                        bl_device_alloc(device, BL_SPACE_HOST, (size_t)size.host_bytes,
                                        "embeddings of a group", (void **)&feed->rows));
        BL_TRY_GOTO(st, done, fill_tile_ends(feed));
    }
    if (table) bl_feed_set_table(feed, table, BL_F32);
    *out = feed;
    feed = NULL;
done:
    bl_feed_destroy(feed);
    return st;
}

void bl_feed_destroy(bl_feed *feed)
{
    if (!feed) return;
    bl_device_free(feed->device, BL_SPACE_HOST, feed->rows);
    bl_event_destroy(feed->copied);
    free(feed);
}

void bl_feed_set_table(bl_feed *feed, const void *rows, bl_dtype dtype)
{
    feed->table = bl_tensor_of(rows, dtype);
}

bl_status bl_feed_begin(bl_feed *feed)
{
    return feed->pads ? bl_event_synchronize(feed->copied) : BL_OK;
}

/* n elements of bytes_each, then zeros up to n_padded. */
static bl_status pad_array(bl_stream *stream, void *dst, const void *src, size_t bytes_each,
                           int64_t n, int64_t n_padded)
{
    size_t n_bytes = (size_t)n * bytes_each, n_zeros = (size_t)(n_padded - n) * bytes_each;

    BL_TRY(bl_stream_copy(stream, dst, src, n_bytes));
    return bl_stream_zero(stream, (char *)dst + n_bytes, n_zeros);
}

bl_status bl_feed_pad(bl_feed *feed, bl_stream *stream, int index, const bl_micro_batch *b,
                      bl_micro_batch *out)
{
    int64_t T = b->T, padded = padded_tokens(feed, T), n = b->n_documents;

    *out = *b;
    if (padded == T && T <= feed->T_max) return BL_OK;
    if (padded > feed->T_max || n > feed->T_max)
        return BL_FAIL(BL_EINTERNAL, "%lld tokens in %lld documents in a pass for %lld",
                       (long long)T, (long long)n, (long long)feed->T_max);
    place_arrays(feed->arrays + index * array_bytes(feed->T_max), feed->T_max, out);
    BL_TRY(pad_array(stream, out->sample, b->sample, sizeof *b->sample, T, padded));
    BL_TRY(pad_array(stream, out->position, b->position, sizeof *b->position, T, padded));
    BL_TRY(pad_array(stream, out->targets, b->targets, sizeof *b->targets, T, padded));
    BL_TRY(pad_array(stream, out->weights, b->weights, sizeof *b->weights, T, padded));
    BL_TRY(bl_stream_copy(stream, out->cu_seqlens, b->cu_seqlens,
                          (size_t)(n + 1) * sizeof *b->cu_seqlens));
    BL_TRY(bl_stream_copy(stream, out->cu_seqlens + n + 1,
                          feed->tile_ends + padded / tile_tokens(&feed->weights->dims),
                          sizeof *b->cu_seqlens));
    out->T = padded;
    out->n_documents = n + 1;
    return BL_OK;
}

/* ---- embeddings ---- */

enum { GATHER_ROWS = 64 }; /* of a worker's item */

typedef struct gather_task {
    bl_tensor table;
    const int32_t *ids;
    uint16_t *rows;
    int64_t T, H;
} gather_task;

/* The conversions of the device's bl_embedding, bit by bit. */
static void round_row(bl_tensor row, int64_t n, uint16_t *out)
{
    float values[256];

    for (int64_t begin = 0, count; begin < n; begin += count) {
        count = bl_min_i64(BL_COUNT(values), n - begin);
        bl_dtype_to_f32(row.dtype, bl_tensor_at(row, begin).data, values, (size_t)count);
        for (int64_t i = 0; i < count; i++) out[begin + i] = bl_f32_to_bf16(values[i]);
    }
}

static void gather_item(void *arg, int64_t index, void *scratch)
{
    const gather_task *task = arg;
    int64_t end = bl_min_i64(task->T, (index + 1) * GATHER_ROWS);

    (void)scratch;
    for (int64_t t = index * GATHER_ROWS; t < end; t++) {
        bl_tensor row = bl_tensor_at(task->table, task->ids[t] * task->H);
        uint16_t *out = task->rows + t * task->H;
        if (row.dtype == BL_BF16)
            memcpy(out, row.data, (size_t)task->H * sizeof *out);
        else
            round_row(row, task->H, out);
    }
}

static void gather_rows(bl_pool *workers, gather_task *task)
{
    int64_t n_items = bl_ceil_div(task->T, GATHER_ROWS);

    if (workers)
        bl_pool_run(workers, n_items, gather_item, task);
    else
        for (int64_t i = 0; i < n_items; i++) gather_item(task, i, NULL);
}

static bl_status embed(bl_feed *feed, bl_stream *stream, const bl_micro_batch *batch,
                       int64_t first_row, bl_tensor y)
{
    int64_t H = feed->weights->model->config.hidden_size, T = batch->T,
            padded = padded_tokens(feed, T);
    bl_tensor table = feed->table;

    if (!feed->rows) {
        BL_TRY(bl_embedding(
            stream,
            &(bl_embedding_args){.T = T, .H = H, .ids = batch->ids, .table = table, .y = y}));
        if (padded == T) return BL_OK;
        return bl_stream_zero(stream, bl_tensor_at(y, T * H).data,
                              bl_tensor_bytes(y, (padded - T) * H));
    }
    if (T > 0 && !batch->host_ids)
        return BL_FAIL(BL_EINTERNAL, "a micro-batch without ids in host memory");
    gather_task task = {table, batch->host_ids, feed->rows + first_row * H, T, H};
    if (!bl_transfer_is_simulated(feed->device)) { /* which has no table: the copy alone */
        gather_rows(bl_device_pool(feed->device), &task);
        memset(task.rows + T * H, 0, (size_t)((padded - T) * H) * sizeof *task.rows);
    }
    BL_TRY(bl_stream_copy(stream, y.data, task.rows, bl_tensor_bytes(y, padded * H)));
    return bl_event_record(feed->copied, stream);
}

bl_status bl_feed_embed(bl_feed *feed, bl_stream *stream, const bl_micro_batch *batch,
                        int64_t first_row, bl_tensor y)
{
    const bl_model_config *c = &feed->weights->model->config;
    int64_t T = padded_tokens(feed, batch->T);

    BL_TRY(embed(feed, stream, batch, first_row, y));
    if (c->embedding_multiplier == 0) return BL_OK;
    return bl_scale(stream, &(bl_scale_args){.n = T * c->hidden_size,
                                             .scale = (float)c->embedding_multiplier,
                                             .x = y,
                                             .y = y});
}
