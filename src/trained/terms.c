/* SPDX-License-Identifier: Apache-2.0 */
/* terms.c -- LoRA terms of the embedding and the head: their memory, their first values, and PEFT's
 * factors. */
#include "trained/terms_internal.h"

#include <math.h>
#include <stdlib.h>

#include "trained/peft.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

enum { FLOAT = sizeof(float) };

static bl_status allocate(bl_adapter_terms *terms)
{
    int64_t n = terms->layout->n_table_floats;
    bl_dtype act = bl_device_act(terms->device);

    BL_TRY(bl_device_alloc(terms->device, BL_SPACE_DEVICE, (size_t)n * FLOAT,
                           "LoRA weights of the embedding or the head", (void **)&terms->w));
    terms->copy = bl_tensor_of(terms->w, act);
    if (act == BL_F32) return BL_OK;
    terms->copy.data = NULL;
    return bl_device_alloc(terms->device, BL_SPACE_DEVICE, bl_tensor_bytes(terms->copy, n),
                           "LoRA weights of the embedding or the head to compute with",
                           &terms->copy.data);
}

bl_status bl_adapter_terms_create(bl_device *device, const bl_lora_layout *layout,
                                  bl_adapter_terms **out)
{
    bl_adapter_terms *terms = calloc(1, sizeof *terms);

    *out = NULL;
    if (!terms) return BL_FAIL(BL_ENOMEM, "LoRA terms of the embedding or the head");
    *terms = (bl_adapter_terms){.device = device, .layout = layout};
    bl_status st = allocate(terms);
    if (st != BL_OK) {
        bl_adapter_terms_destroy(terms);
        return st;
    }
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        if (layout->table_a[t] >= 0)
            terms->term[t] = (bl_table_term){.r = layout->options.r,
                                             .scale = layout->scale,
                                             .A = bl_tensor_at(terms->copy, layout->table_a[t]),
                                             .B = bl_tensor_at(terms->copy, layout->table_b[t])};
    *out = terms;
    return BL_OK;
}

bl_status trained_terms_train(bl_adapter_terms *terms)
{
    return bl_device_alloc(
        terms->device, BL_SPACE_DEVICE, (size_t)terms->layout->n_table_floats * FLOAT,
        "gradients of LoRA terms of the embedding or the head", (void **)&terms->grad);
}

void trained_terms_place(const bl_adapter_terms *terms, bl_model_table table,
                         bl_unit_gradients *out)
{
    const bl_lora_layout *layout = terms->layout;

    if (!terms->grad || layout->table_a[table] < 0) return;
    out->dA = terms->grad + layout->table_a[table];
    out->dB = terms->grad + layout->table_b[table];
}

void bl_adapter_terms_destroy(bl_adapter_terms *terms)
{
    if (!terms) return;
    if (terms->copy.data != terms->w)
        bl_device_free(terms->device, BL_SPACE_DEVICE, terms->copy.data);
    bl_device_free(terms->device, BL_SPACE_DEVICE, terms->w);
    bl_device_free(terms->device, BL_SPACE_DEVICE, terms->grad);
    free(terms);
}

const bl_table_term *bl_adapter_terms_list(const bl_adapter_terms *terms)
{
    return terms ? terms->term : NULL;
}

bl_status trained_terms_publish(const bl_adapter_terms *terms, bl_stream *stream)
{
    if (terms->copy.data == terms->w) return BL_OK;
    return bl_cast(stream, &(bl_cast_args){.n = terms->layout->n_table_floats,
                                           .x = bl_tensor_f32(terms->w),
                                           .y = terms->copy});
}

bl_status trained_terms_initialize(bl_adapter_terms *terms, uint64_t seed, bl_staging *staging)
{
    int64_t most = (int64_t)(staging->n_bytes / FLOAT), n_floats = terms->layout->n_table_floats;

    for (int64_t k = 0, n; k < n_floats; k += n) {
        n = bl_min_i64(most, n_floats - k);
        bl_lora_layout_initialize_tables(terms->layout, seed, k, n, staging->bytes);
        BL_TRY(bl_staging_upload(staging, terms->w + k, staging->bytes, (size_t)n * FLOAT));
    }
    return BL_OK;
}

/* ---- PEFT's factors ---- */

static bl_model_table table_of(int module)
{
    return module == BL_PEFT_EMBEDDING ? BL_TABLE_EMBEDDING : BL_TABLE_HEAD;
}

/* Floats before a factor in the tables' vector. */
static int64_t offset_of(const bl_lora_layout *layout, int module, bl_peft_factor factor)
{
    bl_model_table table = table_of(module);
    return factor == BL_PEFT_A ? layout->table_a[table] : layout->table_b[table];
}

int64_t trained_term_floats(const bl_lora_layout *layout, int module, bl_peft_factor factor)
{
    return bl_lora_table_floats(layout, table_of(module), factor);
}

/* dst (cols, rows) = src (rows, cols) transposed */
static void transpose(const float *src, int64_t rows, int64_t cols, float *dst)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++) dst[k * rows + i] = src[i * cols + k];
}

/* The embedding's A is (vocab, r) here and (r, vocab) in PEFT's file. */
static bool is_transposed(int module, bl_peft_factor factor)
{
    return module == BL_PEFT_EMBEDDING && factor == BL_PEFT_A;
}

/* Transposes the embedding's A piece by piece, without a second copy of the whole. */
bl_status trained_term_to_peft(const bl_lora_layout *layout, int module, bl_peft_factor factor,
                               trained_term_read_fn read, void *user, float *piece, int64_t n_piece,
                               float *dst)
{
    int64_t r = layout->options.r, vocab = layout->vocab, most = n_piece / r,
            offset = offset_of(layout, module, factor);

    if (!is_transposed(module, factor))
        return read(user, offset, trained_term_floats(layout, module, factor), dst);
    for (int64_t begin = 0, n; begin < vocab; begin += n) {
        n = bl_min_i64(most, vocab - begin);
        BL_TRY(read(user, offset + begin * r, n * r, piece));
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < r; k++) dst[k * vocab + begin + i] = piece[i * r + k];
    }
    return BL_OK;
}

/* Of a vector in device memory. */
typedef struct vector_source {
    const float *vector;
    bl_staging *staging;
} vector_source;

/* trained_term_read_fn */
static bl_status read_vector(void *user, int64_t begin, int64_t n, float *dst)
{
    const vector_source *from = user;
    return bl_staging_download(from->staging, dst, from->vector + begin, (size_t)n * FLOAT);
}

bl_status trained_terms_download(const bl_adapter_terms *terms, const float *vector, int module,
                                 bl_peft_factor factor, bl_staging *staging, float *dst)
{
    vector_source from = {vector, staging};
    return trained_term_to_peft(terms->layout, module, factor, read_vector, &from, staging->bytes,
                                (int64_t)(staging->n_bytes / FLOAT), dst);
}

static bl_status read_factor(bl_adapter_terms *terms, const bl_peft_adapter *adapter, int module,
                             bl_peft_factor factor, bl_staging *staging, float *values,
                             float *transposed)
{
    const bl_lora_layout *layout = terms->layout;
    int64_t n = trained_term_floats(layout, module, factor);
    const float *from = values;

    BL_TRY(bl_peft_read(adapter, 0, module, factor, values));
    if (is_transposed(module, factor)) {
        transpose(values, layout->options.r, layout->vocab, transposed);
        from = transposed;
    }
    return bl_staging_upload(staging, terms->w + offset_of(layout, module, factor), from,
                             (size_t)n * FLOAT);
}

static bl_status read_factors(bl_adapter_terms *terms, const bl_peft_adapter *adapter,
                              bl_staging *staging)
{
    const bl_lora_layout *layout = terms->layout;
    size_t n_bytes =
        (size_t)(layout->options.r * bl_max_i64(layout->vocab, layout->hidden)) * FLOAT;
    float *values = malloc(n_bytes), *transposed = malloc(n_bytes);
    bl_status st =
        values && transposed ? BL_OK : BL_FAIL(BL_ENOMEM, "%zu bytes of a factor", 2 * n_bytes);

    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++)
        for (int f = 0; f < 2 && st == BL_OK && layout->options.table[table_of(m)]; f++)
            st = read_factor(terms, adapter, m, (bl_peft_factor)f, staging, values, transposed);
    free(values);
    free(transposed);
    return st;
}

bl_status bl_adapter_terms_read(bl_adapter_terms *terms, const bl_model_config *config,
                                const char *dir, bl_staging *staging, bl_stream *stream)
{
    bl_peft_base base = bl_lora_peft_base(config);
    bl_peft_adapter *adapter;

    BL_TRY(bl_peft_open(dir, &base, &adapter));
    bl_status st = read_factors(terms, adapter, staging);
    bl_peft_close(adapter);
    return st == BL_OK ? trained_terms_publish(terms, stream) : st;
}

/* ---- frozen weights in an adapter ---- */

enum { PIECE = 1024 };

/* Whether a and b are equal, one of them possibly rounded to bf16. */
static bool is_same(float a, float b)
{
    return fabsf(a - b) <= 0x1p-8f * fmaxf(fabsf(a), fabsf(b));
}

static bl_status compare_piece(const bl_peft_adapter *adapter, int module,
                               const bl_stored_tensor *stored, int64_t begin, int64_t n,
                               const char *dir)
{
    float ours[PIECE], theirs[PIECE];

    BL_TRY(bl_peft_read_base_weight(adapter, module, begin, n, theirs));
    BL_TRY(bl_stored_tensor_read_floats(stored, begin, n, ours));
    for (int64_t i = 0; i < n; i++)
        if (!is_same(ours[i], theirs[i]))
            return BL_FAIL(
                BL_EINPUT,
                "%s: its frozen %s differs from the model's (element %lld is %g, not %g): "
                "PEFT would replace the model's weight, which is not supported; use the model "
                "that the adapter was trained on",
                dir, stored->name, (long long)(begin + i), (double)theirs[i], (double)ours[i]);
    return BL_OK;
}

/* A tied model may store its one weight under either name. */
static const bl_stored_tensor *find_stored(const bl_hf_model *files, const bl_model_config *config,
                                           int module)
{
    const bl_arch *arch = config->arch;
    bool is_head = module == BL_PEFT_HEAD;
    char name[BL_TENSOR_NAME_BYTES];

    bl_arch_module_tensor(is_head ? arch->head : arch->embedding, name);
    const bl_stored_tensor *found = bl_hf_find(files, name);
    if (found || !config->tie_word_embeddings) return found;
    bl_arch_module_tensor(is_head ? arch->embedding : arch->head, name);
    return bl_hf_find(files, name);
}

static bl_status compare_base(const bl_hf_model *files, const bl_model_config *config,
                              const bl_peft_adapter *adapter, int module, const char *dir)
{
    const bl_stored_tensor *stored = find_stored(files, config, module);
    int64_t n_floats = config->vocab_size * config->hidden_size;

    if (!stored)
        return BL_FAIL(BL_EINTERNAL, "%s: the model has no such tensor",
                       module == BL_PEFT_HEAD ? "head" : "embedding");
    for (int64_t begin = 0, n; begin < n_floats; begin += n) {
        n = bl_min_i64(PIECE, n_floats - begin);
        BL_TRY(compare_piece(adapter, module, stored, begin, n, dir));
    }
    return BL_OK;
}

bl_status bl_adapter_terms_check_base(const bl_hf_model *files, const bl_model_config *config,
                                      const char *dir)
{
    bl_peft_base base = bl_lora_peft_base(config);
    bl_peft_adapter *adapter;
    bl_status st = BL_OK;

    BL_TRY(bl_peft_open(dir, &base, &adapter));
    for (int m = BL_PEFT_EMBEDDING; st == BL_OK && m <= BL_PEFT_HEAD; m++)
        if (bl_peft_has_base_weight(adapter, m)) st = compare_base(files, config, adapter, m, dir);
    bl_peft_close(adapter);
    return st;
}
