/* SPDX-License-Identifier: Apache-2.0 */
/* pack.c -- samples packed into rows: an index over those of a file; the tokens stay where they
 * are. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include "data/internal.h"

#include "base/log.h"
#include "base/sizes.h"

enum { WINDOW = 8192 }; /* samples; a power of two */

struct bl_pack {
    const bl_samples *samples; /* the data set's */
    bl_packing packing;
    int64_t row_tokens, first, n; /* samples [first, first + n) */
    int64_t n_rows, n_tokens;
    /* Pack: [n_rows + 1], where a row's samples begin in `order`; concatenate: [n + 1], tokens
     * before a sample. */
    int64_t *start;
    uint32_t *order; /* pack: [n], samples row by row, counted from `first` */
    bl_index_memory start_memory, order_memory;
};

/* ---- pack: the index ---- */

/* First-fit over the bins of one window: a tree of the largest room below each node; bin b is leaf
 * WINDOW + b. */
typedef struct window {
    int32_t room[2 * WINDOW];
    int32_t bin[WINDOW]; /* of each sample */
    int32_t row[WINDOW]; /* of each bin: its number in file order; -1: none yet */
    struct {
        int32_t n_tokens, sample;
    } sorted[WINDOW];
} window;

static int by_length(const void *a, const void *b)
{
    const int32_t *x = a, *y = b; /* {n_tokens, sample} */
    if (x[0] != y[0]) return x[0] > y[0] ? -1 : 1;
    return x[1] < y[1] ? -1 : 1;
}

/* The first bin with room for n_tokens; there always is one, since there are as many bins as
 * samples. */
static int32_t place(window *w, int32_t n_tokens)
{
    int32_t node = 1;

    while (node < WINDOW) node = w->room[2 * node] >= n_tokens ? 2 * node : 2 * node + 1;
    w->room[node] -= n_tokens;
    for (int32_t at = node / 2; at >= 1; at /= 2)
        w->room[at] = w->room[2 * at] > w->room[2 * at + 1] ? w->room[2 * at] : w->room[2 * at + 1];
    return node - WINDOW;
}

/* Packs samples [begin, begin + n) and appends their rows to the index. */
static void pack_window(bl_pack *pack, window *w, int64_t begin, int32_t n)
{
    int64_t *start = pack->start + pack->n_rows; /* start[0] is set */
    int32_t n_rows = 0;

    for (int32_t i = 0; i < 2 * WINDOW; i++) w->room[i] = (int32_t)pack->row_tokens;
    for (int32_t i = 0; i < n; i++) {
        w->sorted[i].n_tokens =
            (int32_t)bl_samples_n_tokens(pack->samples, pack->first + begin + i);
        w->sorted[i].sample = i;
        w->row[i] = -1;
    }
    qsort(w->sorted, (size_t)n, sizeof w->sorted[0], by_length);
    for (int32_t i = 0; i < n; i++) w->bin[w->sorted[i].sample] = place(w, w->sorted[i].n_tokens);
    /* Rows by their first sample, then samples by number: start[row + 1] counts, becomes the place
     * to write, ends as the end. */
    for (int32_t i = 0; i < n; i++) {
        int32_t *row = &w->row[w->bin[i]];
        if (*row < 0) start[(*row = n_rows++) + 1] = 0;
        start[*row + 1]++;
    }
    int64_t at = start[0];
    for (int32_t row = 0; row < n_rows; row++) {
        int64_t n_samples = start[row + 1];
        start[row + 1] = at;
        at += n_samples;
    }
    for (int32_t i = 0; i < n; i++)
        pack->order[start[w->row[w->bin[i]] + 1]++] = (uint32_t)(begin + i);
    pack->n_rows += n_rows;
}

/* As many rows as there turned out to be. */
static void fit_start(bl_pack *pack)
{
    size_t n_bytes = (size_t)(pack->n_rows + 1) * sizeof *pack->start;
    int64_t *fitted = realloc(pack->start, n_bytes);

    if (!fitted) return;
    pack->start = pack->start_memory.bytes = fitted;
    pack->start_memory.n_bytes = n_bytes;
}

static bl_status index_pack(bl_pack *pack)
{
    for (int64_t i = 0; i < pack->n; i++) {
        int64_t n_tokens = bl_samples_n_tokens(pack->samples, pack->first + i);
        pack->n_tokens += n_tokens;
        if (n_tokens > pack->row_tokens)
            return BL_FAIL(BL_EUSAGE,
                           "%s: sample %" PRId64 " has %" PRId64 " tokens, a packed row %" PRId64
                           ": give max_seq_length",
                           pack->samples->path, pack->first + i, n_tokens, pack->row_tokens);
    }
    window *w = malloc(sizeof *w);
    pack->order = pack->order_memory.bytes = calloc((size_t)pack->n, sizeof *pack->order);
    pack->order_memory.n_bytes = (size_t)pack->n * sizeof *pack->order;
    if (!w || !pack->order) {
        free(w);
        return BL_FAIL(BL_ENOMEM, "%s: index of %" PRId64 " packed samples", pack->samples->path,
                       pack->n);
    }
    for (int64_t begin = 0; begin < pack->n; begin += WINDOW)
        pack_window(pack, w, begin, (int32_t)bl_min_i64(WINDOW, pack->n - begin));
    free(w);
    fit_start(pack);
    bl_log_info("%s: %" PRId64 " samples packed into %" PRId64 " rows of at most %" PRId64
                " tokens, %.1f %% full",
                pack->samples->path, pack->n, pack->n_rows, pack->row_tokens,
                100.0 * (double)pack->n_tokens / ((double)pack->n_rows * (double)pack->row_tokens));
    return BL_OK;
}

/* ---- concatenate: the index ---- */

static bl_status index_concatenate(bl_pack *pack)
{
    const char *path = pack->samples->path;
    int64_t total = 0;

    if (pack->samples->has_documents)
        return BL_FAIL(BL_EUSAGE,
                       "%s: packing concatenate would join the documents that document_ids keep "
                       "apart; use packing pack",
                       path);
    for (int64_t i = 0; i < pack->n; i++) {
        total += bl_samples_n_tokens(pack->samples, pack->first + i);
        pack->start[i + 1] = total;
    }
    pack->n_rows = total / pack->row_tokens;
    pack->n_tokens = pack->n_rows * pack->row_tokens;
    if (!pack->n_rows)
        return BL_FAIL(BL_EINPUT,
                       "%s: %" PRId64 " tokens do not fill one row of max_seq_length %" PRId64,
                       path, total, pack->row_tokens);
    bl_log_info("%s: %" PRId64 " samples concatenated into %" PRId64 " rows of %" PRId64
                " tokens; %" PRId64 " tokens at the end dropped",
                path, pack->n, pack->n_rows, pack->row_tokens, total - pack->n_tokens);
    return BL_OK;
}

/* ---- creation ---- */

uint64_t bl_pack_fingerprint(const bl_pack *pack)
{
    const uint64_t parts[] = {pack->samples->fingerprint, (uint64_t)pack->packing,
                              (uint64_t)pack->row_tokens, (uint64_t)pack->first, (uint64_t)pack->n};
    return XXH3_64bits(parts, sizeof parts);
}

static bl_status make_index(bl_pack *pack)
{
    size_t n_bytes = ((size_t)pack->n + 1) * sizeof *pack->start;

    pack->start = pack->start_memory.bytes = calloc(1, n_bytes);
    pack->start_memory.n_bytes = n_bytes;
    if (!pack->start)
        return BL_FAIL(BL_ENOMEM, "%s: index of %" PRId64 " samples", pack->samples->path, pack->n);
    return pack->packing == BL_PACKING_PACK ? index_pack(pack) : index_concatenate(pack);
}

/* The index that the first rank of the host has made, for all. */
static bl_status share_index(bl_pack *pack)
{
    bl_host_memory *host = pack->samples->host;

    if (bl_host_memory_size(host) == 1) return BL_OK;
    BL_TRY(bl_host_memory_tell(host, &pack->n_rows, sizeof pack->n_rows));
    BL_TRY(bl_index_share(host, "index of packed rows", &pack->start_memory));
    pack->start = pack->start_memory.bytes;
    if (pack->packing != BL_PACKING_PACK) return BL_OK;
    BL_TRY(bl_index_share(host, "order of packed samples", &pack->order_memory));
    pack->order = pack->order_memory.bytes;
    return BL_OK;
}

bl_status bl_pack_create(const bl_samples *samples, bl_packing packing, int64_t row_tokens,
                         int64_t first, int64_t n, bl_pack **out)
{
    *out = NULL;
    bl_pack *pack = calloc(1, sizeof *pack);
    if (!pack) return BL_FAIL(BL_ENOMEM, "%s: packed rows", samples->path);
    *pack = (bl_pack){
        .samples = samples, .packing = packing, .row_tokens = row_tokens, .first = first, .n = n};
    bl_status st = bl_host_memory_rank(samples->host) == 0 ? make_index(pack) : BL_OK;
    if (st == BL_OK) st = share_index(pack);
    if (st != BL_OK) {
        bl_pack_free(pack);
        return st;
    }
    *out = pack;
    return BL_OK;
}

void bl_pack_free(bl_pack *pack)
{
    if (!pack) return;
    bl_index_free(&pack->start_memory);
    bl_index_free(&pack->order_memory);
    free(pack);
}

/* ---- use ---- */

int64_t bl_pack_count(const bl_pack *pack)
{
    return pack->n_rows;
}

int64_t bl_pack_index_bytes(const bl_pack *pack)
{
    return (int64_t)(pack->start_memory.n_bytes + pack->order_memory.n_bytes);
}

int64_t bl_pack_n_tokens(const bl_pack *pack, int64_t index)
{
    int64_t n = 0;

    if (pack->packing == BL_PACKING_CONCATENATE) return pack->row_tokens;
    for (int64_t k = pack->start[index]; k < pack->start[index + 1]; k++)
        n += bl_samples_n_tokens(pack->samples, pack->first + pack->order[k]);
    return n;
}

static bl_status allocate_row(const bl_pack *pack, int64_t n_tokens, bl_sample *out)
{
    size_t n = (size_t)n_tokens;

    out->ids = malloc(n * sizeof *out->ids);
    out->labels = malloc(n * sizeof *out->labels);
    if (pack->packing == BL_PACKING_PACK) out->document_ids = malloc(n * sizeof *out->document_ids);
    if (!out->ids || !out->labels || (pack->packing == BL_PACKING_PACK && !out->document_ids))
        return BL_FAIL(BL_ENOMEM, "%s: a packed row of %zu tokens", pack->samples->path, n);
    return BL_OK;
}

/* Weights of a row of n_tokens; those of samples that brought none are 1. */
static bl_status copy_weights(const bl_sample *sample, int64_t from, int64_t n, int64_t n_tokens,
                              bl_sample *out)
{
    if (!sample->weights) return BL_OK;
    if (!out->weights) {
        if (!(out->weights = malloc((size_t)n_tokens * sizeof *out->weights)))
            return BL_FAIL(BL_ENOMEM, "weights of a packed row");
        for (int64_t t = 0; t < n_tokens; t++) out->weights[t] = 1;
    }
    memcpy(out->weights + out->n_tokens, sample->weights + from, (size_t)n * sizeof *out->weights);
    return BL_OK;
}

/* Appends tokens [from, from + n) of a sample to a row with room for n_tokens. */
static bl_status append_part(const bl_pack *pack, int64_t index, int64_t from, int64_t n,
                             int64_t n_tokens, bl_sample *out)
{
    bl_sample sample;
    int64_t at = out->n_tokens;

    BL_TRY(bl_samples_get(pack->samples, pack->first + index, &sample));
    memcpy(out->ids + at, sample.ids + from, (size_t)n * sizeof *out->ids);
    memcpy(out->labels + at, sample.labels + from, (size_t)n * sizeof *out->labels);
    bl_status st = copy_weights(&sample, from, n, n_tokens, out);
    if (pack->packing == BL_PACKING_PACK) {
        int32_t document = at ? out->document_ids[at - 1] + 1 : 0;
        for (int64_t t = 0; t < n; t++) {
            if (t && sample.document_ids)
                document += sample.document_ids[t] != sample.document_ids[t - 1];
            out->document_ids[at + t] = document;
        }
        out->labels[at] = BL_LABEL_MASKED;
    }
    out->n_tokens += n;
    bl_sample_free(&sample);
    return st;
}

/* The sample that token `token` of the stream belongs to. */
static int64_t find_sample(const bl_pack *pack, int64_t token)
{
    int64_t low = 0, high = pack->n; /* start[low] <= token < start[high] */

    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (pack->start[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static bl_status append_stream(const bl_pack *pack, int64_t index, bl_sample *out)
{
    int64_t token = index * pack->row_tokens, end = token + pack->row_tokens;

    for (int64_t sample = find_sample(pack, token); token < end; sample++) {
        int64_t from = token - pack->start[sample],
                n = bl_min_i64(end, pack->start[sample + 1]) - token;
        BL_TRY(append_part(pack, sample, from, n, pack->row_tokens, out));
        token += n;
    }
    return BL_OK;
}

bl_status bl_pack_get(const bl_pack *pack, int64_t index, bl_sample *out)
{
    int64_t n_tokens = bl_pack_n_tokens(pack, index);
    bl_status st = allocate_row(pack, n_tokens, out);

    if (st == BL_OK && pack->packing == BL_PACKING_CONCATENATE)
        st = append_stream(pack, index, out);
    if (pack->packing == BL_PACKING_PACK)
        for (int64_t k = pack->start[index]; st == BL_OK && k < pack->start[index + 1]; k++) {
            int64_t n = bl_samples_n_tokens(pack->samples, pack->first + pack->order[k]);
            st = append_part(pack, pack->order[k], 0, n, n_tokens, out);
        }
    if (st != BL_OK) bl_sample_free(out);
    return st;
}
