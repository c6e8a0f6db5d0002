/* SPDX-License-Identifier: Apache-2.0 */
/* load_rows.c -- some rows of stored weights, in the format they will be kept in. All that the jobs
 * need is one stream of ranges: while rows of one job are quantized, those that follow are being
 * read. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "fp8/grid.h"
#include "linear/base_load.h"
#include "model/rows.h"

/* A load of less than a second is not worth a line. */
static const double REPORT_S = 1.0;

struct bl_row_loader {
    bl_pool *pool;
    const bl_row_job *jobs;
    size_t n_jobs, next_job;
    bl_reader *reader;
    bl_io_range *ranges; /* of all jobs, in the order in which they are consumed */
    size_t n_ranges;
    void *bounce; /* for a range that is read in several chunks */
    size_t bounce_bytes;
    void *decoded; /* rows of a step, to be quantized */
    size_t decoded_bytes;
    void *turned; /* rows of a step, of a transposed matrix */
    size_t turned_bytes;
    bool reports;
    bool hashes; /* the current job, into `sum` */
    atomic_uint_fast64_t sum;
    int64_t n_bytes, n_bytes_done;
    double start_s, told_s;
};

static int64_t row_bytes(const bl_hf_weight *w)
{
    return w->codes->n_bytes / bl_max_i64(w->rows, 1);
}

static bl_status name_tensor(const bl_hf_weight *w, bl_status st)
{
    return st == BL_OK ? st
                       : bl_error_prefix(st, "%s: tensor %s", bl_safetensors_path(w->codes->file),
                                         w->codes->name);
}

/* ---- ranges: each step of a job reads one ---- */

static bool is_decoded(const bl_hf_weight *w)
{
    return bl_scale_is_decoded(w->scale_kind);
}

/* 4 bits that are held as they are stored. */
static bool is_kept(const bl_row_job *job)
{
    bl_format format;

    return bl_model_packed_format(&job->weight, &format) && format == job->format;
}

static bool is_quantized(const bl_row_job *job)
{
    if (is_kept(job)) return false;
    return (job->weight.scale_kind == BL_SCALE_NONE || is_decoded(&job->weight)) &&
           bl_format_has_scales(job->format);
}

/* Of a row as it is quantized. */
static int64_t source_bytes(const bl_hf_weight *w)
{
    return is_decoded(w) ? w->cols * (int64_t)sizeof(float) : row_bytes(w);
}

/* A step of a job. */
static bl_base_rows step_at(const bl_row_job *job, int64_t row)
{
    const bl_hf_weight *w = &job->weight;
    bool is_coded = is_quantized(job);
    int64_t bytes = is_coded ? source_bytes(w) : row_bytes(w);
    bl_base_rows step = {.row = row};

    if (w->n_transposed > 0)
        step.stop = bl_min_i64(job->end, bl_row_matrix_of(w, row) + bl_row_matrix_rows(w));
    else if (is_coded && bl_format_describe(job->format)->group_rows > 1)
        step = bl_base_rows_at(job->format, row, job->end, 1);
    else
        step.stop =
            bl_min_i64(job->end, row + bl_max_i64(1, BL_IO_CHUNK_BYTES / bl_max_i64(1, bytes)));
    step.dtype = w->codes->dtype;
    return step;
}

/* What a step reads of the tensor: its rows, or the whole matrix that has them as columns. */
static void find_range(const bl_hf_weight *w, const bl_base_rows *s, int64_t *offset,
                       int64_t *n_bytes)
{
    bool is_matrix = w->n_transposed > 0;

    *offset = (is_matrix ? bl_row_matrix_of(w, s->row) : s->row) * row_bytes(w);
    *n_bytes = (is_matrix ? bl_row_matrix_rows(w) : s->stop - s->row) * row_bytes(w);
}

static int file_index(const bl_hf_model *model, const bl_stored_tensor *tensor)
{
    int index = 0;
    while (bl_hf_file(model, (size_t)index) != tensor->file) index++;
    return index;
}

/* The ranges of all jobs; without memory for them they are only counted. */
static void list_ranges(bl_row_loader *loader, const bl_hf_model *model)
{
    loader->n_ranges = 0;
    for (size_t j = 0; j < loader->n_jobs; j++) {
        const bl_row_job *job = &loader->jobs[j];
        const bl_hf_weight *w = &job->weight;
        int file = loader->ranges ? file_index(model, w->codes) : 0;
        for (int64_t row = job->begin; row < job->end;) {
            bl_base_rows s = step_at(job, row);
            int64_t offset, n_bytes;
            find_range(w, &s, &offset, &n_bytes);
            if (loader->ranges)
                loader->ranges[loader->n_ranges] =
                    (bl_io_range){file, w->codes->offset_bytes + offset, n_bytes};
            loader->n_ranges++;
            row = s.stop;
        }
    }
}

static void tell(bl_row_loader *loader)
{
    double seconds = bl_now_s() - loader->start_s;

    if (loader->reports)
        bl_log_advance(&loader->told_s, "reading weights: %.2f of %.2f GB, %.2f GB/s",
                       (double)loader->n_bytes_done * 1e-9, (double)loader->n_bytes * 1e-9,
                       (double)loader->n_bytes_done * 1e-9 / seconds);
}

static bl_status take_chunk(bl_row_loader *loader, bl_io_chunk *chunk)
{
    BL_TRY(bl_reader_next(loader->reader, chunk));
    loader->n_bytes_done += (int64_t)chunk->n_bytes;
    tell(loader);
    return BL_OK;
}

static bl_status reserve(void **memory, size_t *size, int64_t n_bytes)
{
    if (n_bytes <= (int64_t)*size) return BL_OK;
    free(*memory);
    *memory = malloc((size_t)n_bytes);
    *size = *memory ? (size_t)n_bytes : 0;
    return *memory ? BL_OK
                   : BL_FAIL(BL_ENOMEM, "%lld bytes to read weights through", (long long)n_bytes);
}

/* The bytes of the next range, in one piece, until the next call. */
static bl_status take_range(bl_row_loader *loader, int64_t n_bytes, const void **bytes)
{
    bl_io_chunk chunk;

    BL_TRY(take_chunk(loader, &chunk));
    *bytes = chunk.bytes;
    if ((int64_t)chunk.n_bytes == n_bytes) return BL_OK;
    BL_TRY(reserve(&loader->bounce, &loader->bounce_bytes, n_bytes));
    *bytes = loader->bounce;
    for (int64_t at = 0;;) {
        memcpy((char *)loader->bounce + at, chunk.bytes, chunk.n_bytes);
        at += (int64_t)chunk.n_bytes;
        if (at == n_bytes) return BL_OK;
        BL_TRY(take_chunk(loader, &chunk));
    }
}

static bl_status take_step(bl_row_loader *loader, const bl_row_job *job, const bl_base_rows *s,
                           const void **bytes)
{
    const bl_hf_weight *w = &job->weight;
    int64_t offset, n_bytes;

    find_range(w, s, &offset, &n_bytes);
    BL_TRY(name_tensor(w, take_range(loader, n_bytes, bytes)));
    if (w->n_transposed == 0) return BL_OK;
    BL_TRY(reserve(&loader->turned, &loader->turned_bytes, (s->stop - s->row) * row_bytes(w)));
    size_t width = bl_dtype_bytes(w->codes->dtype);
    bl_rows_transpose(loader->pool, width, s->stop - s->row, w->cols, bl_row_matrix_rows(w),
                      (const char *)*bytes + (size_t)(s->row - bl_row_matrix_of(w, s->row)) * width,
                      loader->turned);
    *bytes = loader->turned;
    return BL_OK;
}

/* ---- checksums: a sum over rows, whatever their order and their reader ---- */

/* Rows of a step, by the piece. */
typedef struct hashed_rows {
    const char *bytes;
    int64_t n_rows, row_bytes;
    uint64_t seed; /* of the first of them; each next one's is one more */
    atomic_uint_fast64_t *sum;
} hashed_rows;

enum { HASH_BYTES = 256 << 10 };

static int64_t rows_a_piece(const hashed_rows *rows)
{
    return bl_max_i64(1, HASH_BYTES / bl_max_i64(1, rows->row_bytes));
}

static void hash_piece(void *arg, int64_t index, void *scratch)
{
    const hashed_rows *rows = arg;
    int64_t begin = index * rows_a_piece(rows),
            end = bl_min_i64(begin + rows_a_piece(rows), rows->n_rows);
    uint64_t sum = 0;

    (void)scratch;
    for (int64_t r = begin; r < end; r++)
        sum += XXH3_64bits_withSeed(rows->bytes + r * rows->row_bytes, (size_t)rows->row_bytes,
                                    rows->seed + (uint64_t)r);
    atomic_fetch_add_explicit(rows->sum, sum, memory_order_relaxed);
}

/* Rows [row, stop) of the weight as they are stored. */
static void add_rows(bl_row_loader *loader, const bl_hf_weight *w, int64_t row, int64_t stop,
                     const void *bytes)
{
    hashed_rows rows = {bytes, stop - row, row_bytes(w),
                        bl_model_tensor_seed(w->codes->name) + (uint64_t)row, &loader->sum};

    if (loader->hashes)
        bl_pool_run(loader->pool, bl_ceil_div(rows.n_rows, rows_a_piece(&rows)), hash_piece, &rows);
}

/* Scales [begin, end) of the weight. */
static void add_scales(bl_row_loader *loader, const bl_hf_weight *w, int64_t begin, int64_t end,
                       const float *scales)
{
    uint64_t seed = bl_model_tensor_seed(w->scale->name), sum = 0;

    for (int64_t i = begin; loader->hashes && i < end; i++)
        sum += XXH3_64bits_withSeed(&scales[i], sizeof *scales, seed + (uint64_t)i);
    loader->sum += sum;
}

uint64_t bl_model_tensor_seed(const char *name)
{
    return XXH3_64bits_withSeed(name, strlen(name), 0);
}

/* ---- jobs ---- */

/* Whether none of the n_bytes of weights is NaN or infinite: loops that the compiler can turn into
 * vectors. */
static bool all_finite(bl_dtype dtype, const unsigned char *bytes, size_t n_bytes)
{
    unsigned n_bad = 0;

    if (dtype == BL_F32) {
        for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
            uint32_t word;
            memcpy(&word, bytes + i, 4);
            n_bad |= (word & 0x7f800000u) == 0x7f800000u;
        }
    } else if (dtype == BL_BF16 || dtype == BL_F16) {
        const uint16_t exponent = dtype == BL_BF16 ? 0x7f80 : 0x7c00;
        for (size_t i = 0; i + 2 <= n_bytes; i += 2) {
            uint16_t word;
            memcpy(&word, bytes + i, 2);
            n_bad |= (word & exponent) == exponent;
        }
    } else if (dtype == BL_F8_E4M3) { /* codes of 4 bits are finite */
        for (size_t i = 0; i < n_bytes; i++) n_bad |= (bytes[i] & 0x7fu) == 0x7fu;
    }
    return n_bad == 0;
}

/* A chunk that is copied to its place in pieces, one per huge page. If several threads touched a
 * new page at once, the kernel would clear one for each and keep one. */
typedef struct placement {
    bl_dtype dtype;
    const unsigned char *from;
    unsigned char *to;
    size_t n_bytes;
    atomic_bool has_bad;
} placement;

enum { HUGE_PAGE_BYTES = 2 << 20, PLACE_BYTES = 256 << 10 };

/* The bytes of the first piece's huge page before that piece. */
static int64_t bytes_before(const placement *p)
{
    return (int64_t)((uintptr_t)p->to % HUGE_PAGE_BYTES);
}

static void place_piece(void *arg, int64_t index, void *scratch)
{
    placement *p = arg;
    int64_t begin = index * HUGE_PAGE_BYTES - bytes_before(p);
    int64_t end = bl_min_i64(begin + HUGE_PAGE_BYTES, (int64_t)p->n_bytes), n;

    (void)scratch;
    for (int64_t at = bl_max_i64(begin, 0); at < end;
         at += n) { /* looked at while it is in the cache */
        n = bl_min_i64(PLACE_BYTES, end - at);
        memcpy(p->to + at, p->from + at, (size_t)n);
        if (!all_finite(p->dtype, p->to + at, (size_t)n))
            atomic_store_explicit(&p->has_bad, true, memory_order_relaxed);
    }
}

/* Rows [begin, end) of a weight, one of which is not finite. */
static bl_status fail_at(const bl_hf_weight *w, int64_t begin, int64_t end, const void *bytes)
{
    bl_stored_tensor rows = *w->codes;

    rows.shape[rows.n_dims - 1] = w->cols;
    return bl_model_check_finite(&rows, begin, end, bytes);
}

/* Weights kept as stored: their bytes, after a look at each. */
static bl_status load_stored(bl_row_loader *loader, const bl_row_job *job)
{
    const bl_stored_tensor *tensor = job->weight.codes;
    int64_t width = row_bytes(&job->weight);
    bool has_bad = false;
    const void *bytes;

    for (int64_t row = job->begin; row < job->end;) {
        bl_base_rows s = step_at(job, row);
        BL_TRY(take_step(loader, job, &s, &bytes));
        add_rows(loader, &job->weight, row, s.stop, bytes);
        placement p = {tensor->dtype, bytes,
                       (unsigned char *)job->codes + (row - job->begin) * width,
                       (size_t)((s.stop - row) * width), false};
        bl_pool_run(loader->pool,
                    bl_ceil_div(bytes_before(&p) + (int64_t)p.n_bytes, HUGE_PAGE_BYTES),
                    place_piece, &p);
        has_bad = has_bad || p.has_bad;
        row = s.stop;
    }
    return has_bad ? fail_at(&job->weight, job->begin, job->end, job->codes) : BL_OK;
}

/* All scales of a quantized weight, followed by the zero points of one with 4 bits. Those whose
 * block begins among the job's rows are hashed. */
static bl_status read_scales(bl_row_loader *loader, const bl_row_job *job, float **out)
{
    const bl_hf_weight *w = &job->weight;
    bool has_zeros = w->packed && w->zero_point;
    int64_t first = bl_ceil_div(job->begin, w->block_rows) * w->scale_cols,
            last = bl_ceil_div(job->end, w->block_rows) * w->scale_cols,
            n = w->scale_rows * w->scale_cols;

    *out = malloc((size_t)(has_zeros ? 2 * n : n) * sizeof **out);
    if (!*out) return BL_FAIL(BL_ENOMEM, "scales of %s", w->codes->name);
    BL_TRY(bl_hf_read_scales(w, *out));
    add_scales(loader, w, first, last, *out);
    if (!has_zeros) return BL_OK;
    BL_TRY(bl_hf_read_zero_points(w, *out + n));
    add_scales(loader, w, n + first, n + last, *out);
    return BL_OK;
}

/* Codes as they are; of FP8 each scale for all groups of the format that it covers. */
static bl_status load_codes(bl_row_loader *loader, const bl_row_job *job)
{
    const bl_hf_weight *w = &job->weight;
    const bl_format_descriptor *f = bl_format_describe(job->format);
    float *stored = NULL, *to;

    BL_TRY(load_stored(loader, job));
    bl_status st = read_scales(loader, job, &stored);
    bool is_packed = is_kept(job);
    if (st == BL_OK && is_packed) st = bl_row_job_place_scales(job, stored);
    to = (float *)job->scales + bl_format_scale_index(job->format, job->begin, w->cols);
    for (int64_t r = job->begin; st == BL_OK && !is_packed && r < job->end; r += f->group_rows)
        for (int64_t c = 0; c < w->cols; c += f->group_cols ? f->group_cols : w->cols)
            *to++ = stored[r / w->block_rows * w->scale_cols + c / w->block_cols];
    free(stored);
    return st;
}

/* Rows of bf16 or f16 as fp32. */
static bl_status widen(const bl_hf_weight *w, const bl_base_rows *s, float *dst)
{
    size_t n = (size_t)((s->stop - s->row) * w->cols);

    bl_dtype_to_f32(w->codes->dtype, s->bytes, dst, n);
    return all_finite(BL_F32, (const unsigned char *)dst, n * sizeof *dst)
               ? BL_OK
               : fail_at(w, s->row, s->stop, s->bytes);
}

/* scales NULL: the weight is not in FP8. */
static bl_status decode(const bl_row_loader *loader, const bl_hf_weight *w, const float *scales,
                        const bl_base_rows *s, bl_dtype dtype, void *dst)
{
    if (!scales) return widen(w, s, dst);
    const bl_hf_packed *p = w->packed;
    bl_fp8_grid grid = {.scales = scales,
                        .n_cols = w->scale_cols,
                        .block_rows = w->block_rows,
                        .block_cols = w->block_cols,
                        .row_bytes = row_bytes(w)};
    if (p) {
        grid.book = p->book;
        grid.is_high_first = p->is_high_first;
        grid.is_flat = p->is_flat;
        if (w->zero_point) grid.zero_points = scales + w->scale_rows * w->scale_cols;
    }
    return name_tensor(
        w, bl_fp8_grid_decode(loader->pool, &grid, s->bytes, s->row, s->stop, w->cols, dtype, dst));
}

static bl_status load_decoded(bl_row_loader *loader, const bl_row_job *job, const float *scales)
{
    const bl_hf_weight *w = &job->weight;
    bl_dtype dtype = job->format == BL_FORMAT_BF16 ? BL_BF16 : BL_F32;
    int64_t width = w->cols * (int64_t)bl_dtype_bytes(dtype);

    for (int64_t row = job->begin; row < job->end;) {
        bl_base_rows s = step_at(job, row);
        BL_TRY(take_step(loader, job, &s, &s.bytes));
        add_rows(loader, w, s.row, s.stop, s.bytes);
        BL_TRY(
            decode(loader, w, scales, &s, dtype, (char *)job->codes + (row - job->begin) * width));
        row = s.stop;
    }
    return BL_OK;
}

/* scales: of a weight that is decoded first, else NULL. */
static bl_status quantize(bl_row_loader *loader, const bl_row_job *job, const float *scales)
{
    const bl_hf_weight *w = &job->weight;
    bl_base_job rows = {.format = job->format,
                        .cols = w->cols,
                        .begin = job->begin,
                        .end = job->end,
                        .codes = job->codes,
                        .scales = job->scales,
                        .largest_scales = job->largest_scales};

    for (int64_t row = job->begin; row < job->end;) {
        bl_base_rows s = step_at(job, row);
        BL_TRY(take_step(loader, job, &s, &s.bytes));
        add_rows(loader, w, s.row, s.stop, s.bytes);
        if (scales) {
            BL_TRY(reserve(&loader->decoded, &loader->decoded_bytes,
                           (s.stop - s.row) * source_bytes(w)));
            BL_TRY(decode(loader, w, scales, &s, BL_F32, loader->decoded));
            s.bytes = loader->decoded;
            s.dtype = BL_F32;
        }
        BL_TRY(name_tensor(w, bl_base_quantize(loader->pool, &rows, &s)));
        row = s.stop;
    }
    return BL_OK;
}

static bl_status run_decoded(bl_row_loader *loader, const bl_row_job *job)
{
    float *scales = NULL;
    bl_status st = read_scales(loader, job, &scales);

    if (st == BL_OK)
        st = is_quantized(job) ? quantize(loader, job, scales) : load_decoded(loader, job, scales);
    free(scales);
    return st;
}

static bl_status run_job(bl_row_loader *loader, const bl_row_job *job)
{
    if (job->begin >= job->end) return BL_OK;
    if (is_decoded(&job->weight) && !is_kept(job)) return run_decoded(loader, job);
    if (job->weight.scale_kind != BL_SCALE_NONE) return load_codes(loader, job);
    if (job->format == BL_FORMAT_F32 && job->weight.codes->dtype != BL_F32)
        return load_decoded(loader, job, NULL);
    return is_quantized(job) ? quantize(loader, job, NULL) : load_stored(loader, job);
}

bl_status bl_row_loader_next(bl_row_loader *loader, uint64_t *checksum)
{
    if (loader->next_job == loader->n_jobs)
        return BL_FAIL(BL_EINTERNAL, "no rows are left to load");
    loader->hashes = checksum != NULL;
    loader->sum = 0;
    BL_TRY(run_job(loader, &loader->jobs[loader->next_job++]));
    if (checksum) *checksum = loader->sum;
    return BL_OK;
}

/* ---- the loader ---- */

/* The loaders of a host share one queue. 64 MiB cover a disk's latency and the threads' work
 * between two chunks; more would take longer to get than to fill. */
static int64_t queue_depth(int n_readers)
{
    enum { MIN_DEPTH = 4, LOAD_DEPTH = 16 };
    return bl_max_i64(MIN_DEPTH, LOAD_DEPTH / n_readers);
}

int64_t bl_model_load_bytes(const bl_model_stored_size *stored, int n_shards)
{
    int64_t bounce = stored->row_bytes * BL_FP8_BLOCK, decoded = stored->decoded_row_bytes,
            buffers = queue_depth(n_shards) * (BL_IO_CHUNK_BYTES + 2 * BL_IO_ALIGN_BYTES),
            staging = BL_STAGING_BYTES;
    bool bounces = stored->is_in_blocks && bounce > BL_IO_CHUNK_BYTES;
    if (decoded > 0)
        decoded =
            bl_max_i64(BL_IO_CHUNK_BYTES, decoded * (stored->is_in_blocks ? BL_FP8_BLOCK : 1));

    return bl_min_i64(buffers, bl_ceil_div(stored->n_bytes, n_shards)) + (bounces ? bounce : 0) +
           decoded + 2 * stored->matrix_bytes + stored->scale_bytes + staging;
}

/* As deep a queue and as large requests as the ranges have a use for. */
static void choose_buffers(const bl_row_loader *loader, int n_readers, bl_reader_options *options)
{
    int64_t largest = 1, n_chunks = 0;

    for (size_t i = 0; i < loader->n_ranges; i++)
        largest = bl_max_i64(largest, loader->ranges[i].n_bytes);
    int64_t chunk = bl_min_i64(bl_round_up(largest, BL_IO_ALIGN_BYTES), BL_IO_CHUNK_BYTES);
    for (size_t i = 0; i < loader->n_ranges; i++)
        n_chunks += bl_ceil_div(loader->ranges[i].n_bytes, chunk);
    options->chunk_bytes = (size_t)chunk;
    options->queue_depth = (int)bl_min_i64(queue_depth(n_readers), bl_max_i64(n_chunks, 1));
}

bl_status bl_row_loader_create(const bl_hf_model *model, bl_io_files *files, bl_io_engine engine,
                               int n_readers, bl_pool *pool, const bl_row_job *jobs, size_t n_jobs,
                               bool reports, bl_row_loader **out)
{
    bl_status st = BL_OK;
    bl_reader_options options = {.engine = engine};

    *out = NULL;
    bl_row_loader *loader = calloc(1, sizeof *loader);
    if (!loader) return BL_FAIL(BL_ENOMEM, "a loader");
    loader->pool = pool;
    loader->jobs = jobs;
    loader->n_jobs = n_jobs;
    loader->reports = reports;
    loader->start_s = loader->told_s = bl_now_s();
    list_ranges(loader, model);
    loader->ranges = calloc(loader->n_ranges + 1, sizeof *loader->ranges);
    if (!loader->ranges) {
        st = BL_FAIL(BL_ENOMEM, "%zu ranges of weights", loader->n_ranges);
        goto done;
    }
    list_ranges(loader, model);
    for (size_t i = 0; i < loader->n_ranges; i++) loader->n_bytes += loader->ranges[i].n_bytes;
    choose_buffers(loader, n_readers, &options);
    BL_TRY_GOTO(st, done, bl_reader_create(&options, files, &loader->reader));
    BL_TRY_GOTO(st, done, bl_reader_stream(loader->reader, loader->ranges, loader->n_ranges));
    *out = loader;
    loader = NULL;
done:
    bl_row_loader_destroy(loader);
    return st;
}

static void report(bl_row_loader *loader)
{
    bl_reader_stats stats;
    double seconds = bl_now_s() - loader->start_s;

    bl_log_progress("%s", "");
    if (seconds < REPORT_S) return;
    bl_reader_get_stats(loader->reader, &stats);
    bl_log_info("weights read: %.2f GB in %.1f s, %.2f GB/s (%s, waited for %.1f s)",
                (double)loader->n_bytes_done * 1e-9, seconds,
                (double)loader->n_bytes_done * 1e-9 / seconds,
                bl_reader_engine_name(loader->reader), stats.wait_s);
}

void bl_row_loader_destroy(bl_row_loader *loader)
{
    if (!loader) return;
    if (loader->reports && loader->reader) report(loader);
    bl_reader_destroy(loader->reader);
    free(loader->ranges);
    free(loader->bounce);
    free(loader->decoded);
    free(loader->turned);
    free(loader);
}
