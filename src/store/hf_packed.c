/* SPDX-License-Identifier: Apache-2.0 */
/* hf_packed.c -- weights of 4 bits: the tensors that belong together, found when a model is opened.
 *
 * compressed-tensors' layouts are those of its release 0.20.1 (compressors/), Model Optimizer's of
 * its export for vLLM, bitsandbytes' of its release 0.50.2 (functional.py, QuantState.as_dict). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/present.h"
#include "base/sizes.h"
#include "store/hf_internal.h"

enum { INT4_PER_WORD = 8, MX_GROUP = 32, NV_GROUP = 16, MAX_STATE_BYTES = 4096 };

static const char BLOCKS[] = "_blocks", SCALES[] = "_scales",
                  NF4_STATE[] = ".quant_state.bitsandbytes__nf4",
                  OTHER_STATE[] = ".quant_state.bitsandbytes__";

/* Of E2M1 ("OCP Microscaling Formats (MX)", revision 1.0, table 5), and of integers. */
static const float fp4_book[16] = {0,    .5f,  1,  1.5f,  2,  3,  4,  6,
                                   -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6},
                   int4_book[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* ---- parts ---- */

/* The tensor `weight``end`; NULL: none. */
static bl_status find_part(const bl_hf_model *model, const char *weight, const char *end,
                           const bl_stored_tensor **out)
{
    char *name = NULL;

    BL_TRY(bl_text_format(&name, "%s%s", weight, end));
    *out = bl_hf_find(model, name);
    free(name);
    return BL_OK;
}

static bl_status need_part(const bl_hf_model *model, const char *weight, const char *end,
                           uint32_t dtypes, const bl_stored_tensor **out)
{
    BL_TRY(find_part(model, weight, end, out));
    if (!*out) return BL_FAIL(BL_EINPUT, "tensor %s has 4 bits and no %s%s", weight, weight, end);
    return dtypes & BL_DTYPE_BIT((*out)->dtype)
               ? BL_OK
               : BL_FAIL(BL_EINPUT, "tensor %s has dtype %s, which is not read here", (*out)->name,
                         bl_dtype_name((*out)->dtype));
}

static int64_t count_elements(const bl_stored_tensor *t)
{
    return t->n_bytes / (int64_t)bl_dtype_bytes(t->dtype);
}

static bl_status check_count(const bl_stored_tensor *t, int64_t n)
{
    return count_elements(t) == n
               ? BL_OK
               : BL_FAIL(BL_EINPUT, "tensor %s has %" PRId64 " elements, expected %" PRId64,
                         t->name, count_elements(t), n);
}

static bl_status read_finite(const bl_stored_tensor *t, int64_t n, float *dst)
{
    BL_TRY(check_count(t, n));
    BL_TRY(bl_stored_tensor_read_f32(t, dst));
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(dst[i]))
            return BL_FAIL(BL_EINPUT, "tensor %s: element %" PRId64 " is not finite", t->name, i);
    return BL_OK;
}

/* The codes `stored` as a weight [rows, cols]. */
static void set_codes(bl_hf_packed *p, const bl_stored_tensor *stored, int64_t rows, int64_t cols)
{
    const char *name = p->codes.name;

    p->codes = *stored;
    p->codes.name = name;
    p->codes.dtype = BL_U8;
    p->codes.n_dims = 2;
    p->codes.shape[0] = rows;
    p->codes.shape[1] = cols;
    p->other[0] = stored;
}

/* ---- compressed-tensors, Model Optimizer ---- */

static bl_status fail_shape(const bl_stored_tensor *t, const char *why)
{
    char shape[BL_SHAPE_TEXT_BYTES];

    return BL_FAIL(BL_EINPUT, "tensor %s has shape %s, %s", t->name,
                   bl_shape_text(t->n_dims, t->shape, shape), why);
}

/* A row of zero points is the nibbles of the words of ceil(rows / 8) rows of words. Scales of four
 * dimensions are [rows, 1, cols, 1]. */
static bl_status check_zero_points(const bl_hf_packed *p)
{
    const bl_stored_tensor *zero = p->zero_point, *scale = p->scale;
    char shape[BL_SHAPE_TEXT_BYTES];
    int64_t rows = scale->n_dims > 0 ? scale->shape[0] : 1,
            cols = scale->n_dims > 1 ? scale->shape[scale->n_dims == 4 ? 2 : 1] : 1;

    if (scale->n_bytes > 0 && zero->n_dims == 2 &&
        zero->shape[0] == bl_ceil_div(rows, INT4_PER_WORD) && zero->shape[1] == cols)
        return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "tensor %s has shape %s, expected [%" PRId64 ", %" PRId64 "] for its scales",
                   zero->name, bl_shape_text(zero->n_dims, zero->shape, shape),
                   bl_ceil_div(rows, INT4_PER_WORD), cols);
}

static bl_status read_shape(const bl_stored_tensor *t, int64_t shape[2])
{
    int64_t words[2] = {0};
    int32_t narrow[2] = {0};
    bool is_wide = t->dtype == BL_I64;

    BL_TRY(check_count(t, 2));
    BL_TRY(bl_stored_tensor_read(t, 0, (size_t)t->n_bytes, is_wide ? (void *)words : narrow));
    for (int i = 0; i < 2; i++) {
        shape[i] = is_wide ? words[i] : narrow[i];
        if (shape[i] < 1 || shape[i] > INT32_MAX)
            return BL_FAIL(BL_EINPUT, "tensor %s: element %d is %" PRId64 ", which is no size",
                           t->name, i, shape[i]);
    }
    return BL_OK;
}

static bl_status describe_int4(const bl_hf_model *model, const bl_stored_tensor *stored,
                               bl_hf_packed *p)
{
    const char *weight = p->codes.name;
    const uint32_t floats = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16) | BL_DTYPE_BIT(BL_F16);
    int64_t shape[2] = {0};

    p->kind = BL_SCALE_INT4;
    memcpy(p->book, int4_book, sizeof p->book);
    BL_TRY(need_part(model, weight, "_shape", BL_DTYPE_BIT(BL_I64) | BL_DTYPE_BIT(BL_I32),
                     &p->other[1]));
    BL_TRY(need_part(model, weight, "_scale", floats, &p->scale));
    BL_TRY(read_shape(p->other[1], shape));
    if (stored->n_dims != 2 || stored->shape[0] != shape[0] ||
        stored->shape[1] != bl_ceil_div(shape[1], INT4_PER_WORD))
        return fail_shape(stored, "which is not 4 bits per element of its weight_shape");
    set_codes(p, stored, shape[0], shape[1]);
    BL_TRY(find_part(model, weight, "_zero_point", &p->zero_point));
    if (!p->zero_point && model->declared.has_asymmetric && !model->declared.has_symmetric)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has no zero points (%s_zero_point), but config.json's "
                       "quantization_config says symmetric: false",
                       weight, weight);
    if (!p->zero_point) return BL_OK;
    BL_TRY(need_part(model, weight, "_zero_point", BL_DTYPE_BIT(BL_I32), &p->zero_point));
    return check_zero_points(p);
}

/* U8, two codes each; second: the end of the name of the scale of scales, of NVFP4. */
static bl_status describe_fp4(const bl_hf_model *model, const bl_stored_tensor *stored,
                              const char *second, bl_hf_packed *p)
{
    const char *weight = p->codes.name;
    const uint32_t e8m0 = BL_DTYPE_BIT(BL_U8) | BL_DTYPE_BIT(BL_F8_E8M0);
    float value;

    memcpy(p->book, fp4_book, sizeof p->book);
    if (stored->n_dims != 2 || stored->n_bytes == 0) return fail_shape(stored, "expected a matrix");
    set_codes(p, stored, stored->shape[0], 2 * stored->shape[1]);
    BL_TRY(need_part(model, weight, "_scale", e8m0 | BL_DTYPE_BIT(BL_F8_E4M3), &p->scale));
    bool is_nv = p->scale->dtype == BL_F8_E4M3;
    p->kind = is_nv ? BL_SCALE_NVFP4 : BL_SCALE_MXFP4;
    p->group = is_nv ? NV_GROUP : MX_GROUP;
    if (!is_nv) return BL_OK;
    BL_TRY(need_part(model, weight, second, BL_DTYPE_BIT(BL_F32), &p->second));
    BL_TRY(read_finite(p->second, 1, &value));
    return value > 0 ? BL_OK
                     : BL_FAIL(BL_EINPUT, "tensor %s is %g; scales are positive", p->second->name,
                               (double)value);
}

/* ---- gpt-oss ---- */

/* Blocks (n, rows, groups, 16) and scales (n, rows, groups) of n matrices, in MXFP4. */
static bl_status describe_blocks(const bl_hf_model *model, const bl_stored_tensor *stored,
                                 bl_hf_packed *p)
{
    const int64_t *shape = stored->shape;

    p->kind = BL_SCALE_MXFP4;
    p->group = MX_GROUP;
    memcpy(p->book, fp4_book, sizeof p->book);
    if (stored->n_dims != 4 || stored->n_bytes == 0 || shape[3] != MX_GROUP / 2)
        return fail_shape(stored, "expected [matrices, rows, groups, 16]");
    BL_TRY(need_part(model, p->codes.name, SCALES, BL_DTYPE_BIT(BL_U8) | BL_DTYPE_BIT(BL_F8_E8M0),
                     &p->scale));
    if (p->scale->n_dims != 3 || memcmp(p->scale->shape, shape, 3 * sizeof *shape) != 0)
        return fail_shape(p->scale, "expected the first three dimensions of its blocks");
    set_codes(p, stored, shape[0], shape[1]);
    p->codes.n_dims = 3;
    p->codes.shape[2] = MX_GROUP * shape[2];
    return BL_OK;
}

/* ---- bitsandbytes ---- */

/* The JSON text of quant_state. */
static bl_status parse_state(const bl_stored_tensor *state, const json_t *root, bl_hf_packed *p,
                             int64_t shape[2], bool is_nested)
{
    static const bl_known_key keys[] = {{"quant_type", BL_KEY_USED, NULL, NULL},
                                        {"blocksize", BL_KEY_USED, NULL, NULL},
                                        {"shape", BL_KEY_USED, NULL, NULL},
                                        {"nested_blocksize", BL_KEY_USED, NULL, NULL},
                                        {"nested_offset", BL_KEY_USED, NULL, NULL}};
    /* of products: a value is code * scale in fp32 */
    const bl_key_table table = {keys, BL_COUNT(keys), NULL, "dtype nested_dtype"};
    const json_t *list = NULL;
    const char *type, *at = state->name;
    double offset = 0;

    BL_TRY(bl_json_check_object(at, root));
    BL_TRY(bl_keys_check(&table, at, root, NULL));
    BL_TRY(bl_json_get_string(at, root, "quant_type", BL_JSON_REQUIRED, &type));
    if (strcmp(type, "nf4") != 0)
        return bl_json_fail(at, "quant_type", "\"nf4\"", json_object_get(root, "quant_type"));
    BL_TRY(bl_json_get_int(at, root, "blocksize", BL_JSON_REQUIRED, 2, INT32_MAX, &p->group));
    BL_TRY(bl_json_get_array(at, root, "shape", BL_JSON_REQUIRED, &list));
    for (size_t i = 0; i < 2; i++) {
        const json_t *n = json_array_get(list, i);
        shape[i] = json_is_integer(n) ? json_integer_value(n) : 0;
        if (shape[i] < 1 || shape[i] > INT32_MAX || json_array_size(list) != 2)
            return bl_json_fail(at, "shape", "two positive integers", list);
    }
    if (!is_nested) return BL_OK;
    BL_TRY(bl_json_get_int(at, root, "nested_blocksize", BL_JSON_REQUIRED, 1, INT32_MAX,
                           &p->nested_group));
    BL_TRY(bl_json_get_real(at, root, "nested_offset", BL_JSON_REQUIRED, -3e38, 3e38, &offset));
    p->nested_offset = (float)offset;
    return BL_OK;
}

static bl_status read_state(const bl_stored_tensor *state, bl_hf_packed *p, int64_t shape[2],
                            bool is_nested)
{
    char text[MAX_STATE_BYTES];
    json_t *root = NULL;

    if (state->dtype != BL_U8 || state->n_bytes > MAX_STATE_BYTES)
        return BL_FAIL(BL_EINPUT, "tensor %s: expected at most %d bytes of JSON in U8", state->name,
                       (int)MAX_STATE_BYTES);
    BL_TRY(bl_stored_tensor_read(state, 0, (size_t)state->n_bytes, text));
    BL_TRY(bl_json_parse(state->name, 1, text, (size_t)state->n_bytes, &root));
    bl_status st = parse_state(state, root, p, shape, is_nested);
    json_decref(root);
    return st;
}

/* Blocks follow one another through the rows; where they end with each row, they are a grid. */
static bl_status describe_nf4(const bl_hf_model *model, const bl_stored_tensor *state,
                              bl_hf_packed *p)
{
    const char *weight = p->codes.name;
    const bl_stored_tensor *codes, *nested;
    int64_t shape[2], n_blocks;

    p->kind = BL_SCALE_NF4;
    p->is_high_first = true;
    p->other[1] = state;
    BL_TRY(find_part(model, weight, ".nested_absmax", &nested));
    BL_TRY(read_state(state, p, shape, nested != NULL));
    codes = bl_hf_find(model, weight);
    if (!codes) return BL_FAIL(BL_EINPUT, "tensor %s has no codes (%s)", state->name, weight);
    if (shape[1] % 2)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s: rows of %" PRId64 " codes of 4 bits do not begin at bytes: an "
                       "odd number of columns is not supported",
                       weight, shape[1]);
    /* whatever dtype the bytes are stored in (bnb_4bit_quant_storage) */
    if (codes->n_bytes != shape[0] * (shape[1] / 2))
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has %" PRId64 " bytes, expected %" PRId64 " for the shape "
                       "[%" PRId64 ", %" PRId64 "] of its quant_state",
                       weight, codes->n_bytes, shape[0] * (shape[1] / 2), shape[0], shape[1]);
    set_codes(p, codes, shape[0], shape[1]);
    p->is_flat = shape[1] % p->group != 0;
    n_blocks = bl_ceil_div(shape[0] * shape[1], p->group);
    BL_TRY(need_part(model, weight, ".quant_map", BL_DTYPE_BIT(BL_F32), &p->other[2]));
    BL_TRY(read_finite(p->other[2], 16, p->book));
    BL_TRY(need_part(model, weight, ".absmax", BL_DTYPE_BIT(nested ? BL_U8 : BL_F32), &p->scale));
    BL_TRY(check_count(p->scale, n_blocks));
    if (!nested) return BL_OK;
    BL_TRY(need_part(model, weight, ".nested_absmax", BL_DTYPE_BIT(BL_F32), &p->second));
    BL_TRY(check_count(p->second, bl_ceil_div(n_blocks, p->nested_group)));
    BL_TRY(need_part(model, weight, ".nested_quant_map", BL_DTYPE_BIT(BL_F32), &p->nested_map));
    return check_count(p->nested_map, 256);
}

/* ---- all of a model ---- */

/* "X.weight" of the tensor that makes it one of 4 bits, X of "X_blocks"; 0 characters: it does
 * not. */
static size_t weight_of(const bl_hf_model *model, const bl_stored_tensor *t)
{
    static const char packed[] = ".weight_packed", plain[] = ".weight";
    const char *state = strstr(t->name, OTHER_STATE);
    const bl_stored_tensor *second = NULL;
    size_t n = strlen(t->name);

    if (state) return (size_t)(state - t->name);
    if (t->dtype == BL_U8 && bl_text_ends_with(t->name, BLOCKS)) return n - strlen(BLOCKS);
    if (bl_text_ends_with(t->name, packed)) return n - strlen("_packed");
    if (t->dtype == BL_U8 && bl_text_ends_with(t->name, plain) &&
        find_part(model, t->name, "_scale_2", &second) == BL_OK && second)
        return n;
    return 0;
}

static bl_status describe(const bl_hf_model *model, const bl_stored_tensor *t, bl_hf_packed *p)
{
    const bl_stored_tensor *plain = bl_hf_find(model, p->codes.name);

    if (bl_text_ends_with(t->name, NF4_STATE)) return describe_nf4(model, t, p);
    if (strstr(t->name, OTHER_STATE))
        return BL_FAIL(BL_EINPUT,
                       "tensor %s: of bitsandbytes' 4 bits only NF4 is read; use the unquantized "
                       "checkpoint, or one in NF4",
                       t->name);
    if (plain == t) return describe_fp4(model, t, "_scale_2", p);
    if (plain)
        return BL_FAIL(BL_EINPUT, "tensor %s is stored twice, also as %s", plain->name, t->name);
    if (bl_text_ends_with(t->name, BLOCKS)) return describe_blocks(model, t, p);
    p->divides = true;
    if (t->dtype == BL_U8) return describe_fp4(model, t, "_global_scale", p);
    if (t->dtype == BL_I32) return describe_int4(model, t, p);
    return BL_FAIL(BL_EINPUT, "tensor %s has dtype %s, expected I32 or U8", t->name,
                   bl_dtype_name(t->dtype));
}

static int compare_packed(const void *a, const void *b)
{
    return strcmp(((const bl_hf_packed *)a)->codes.name, ((const bl_hf_packed *)b)->codes.name);
}

bl_status bl_hf_find_packed(bl_hf_model *model, bl_problems *problems)
{
    size_t n_max = 0;

    for (size_t i = 0; i < model->n_tensors; i++) n_max += weight_of(model, model->tensors[i]) > 0;
    model->packed = calloc(n_max + 1, sizeof *model->packed);
    if (!model->packed) return BL_FAIL(BL_ENOMEM, "out of memory: %zu weights of 4 bits", n_max);
    for (size_t i = 0; i < model->n_tensors; i++) {
        const bl_stored_tensor *t = model->tensors[i];
        bl_hf_packed *p = &model->packed[model->n_packed];
        char *name = NULL;
        size_t n = weight_of(model, t);
        if (n == 0) continue;
        BL_TRY(bl_text_format(&name, "%.*s", (int)n, t->name));
        *p = (bl_hf_packed){.codes = {.name = name}};
        model->n_packed++;
        bl_status st = describe(model, t, p);
        if (st == BL_EINPUT)
            bl_problems_add(problems, "%s", bl_error_text());
        else if (st != BL_OK)
            return st;
    }
    qsort(model->packed, model->n_packed, sizeof *model->packed, compare_packed);
    return BL_OK;
}

void bl_hf_free_packed(bl_hf_model *model)
{
    for (size_t i = 0; i < model->n_packed; i++) free((char *)model->packed[i].codes.name);
    free(model->packed);
}

const bl_hf_packed *bl_hf_packed_weight(const bl_hf_model *model, const char *name)
{
    const bl_hf_packed wanted = {.codes = {.name = name}};

    return bsearch(&wanted, model->packed, model->n_packed, sizeof wanted, compare_packed);
}

/* The part of a name that is the weight's: up to its last ".weight", or before BLOCKS or SCALES; 0:
 * there is none. */
static size_t name_of_part(const char *name)
{
    const char *end = NULL;

    if (bl_text_ends_with(name, BLOCKS) || bl_text_ends_with(name, SCALES))
        return strlen(name) - strlen(BLOCKS);
    for (const char *next = strstr(name, ".weight"); next; next = strstr(next + 1, ".weight"))
        end = next + strlen(".weight");
    return end ? (size_t)(end - name) : 0;
}

const bl_hf_packed *bl_hf_packed_of(const bl_hf_model *model, const bl_stored_tensor *t)
{
    size_t n = name_of_part(t->name);
    char *name = NULL;

    if (n == 0 || bl_text_format(&name, "%.*s", (int)n, t->name) != BL_OK) return NULL;
    const bl_hf_packed *p = bl_hf_packed_weight(model, name);
    free(name);
    if (!p) return NULL;
    const bl_stored_tensor *const parts[] = {p->scale,    p->zero_point, p->second,  p->nested_map,
                                             p->other[0], p->other[1],   p->other[2]};
    for (size_t i = 0; i < BL_COUNT(parts); i++)
        if (parts[i] == t) return p;
    return NULL;
}

const bl_stored_tensor *bl_hf_find_weight(const bl_hf_model *model, const char *name)
{
    const bl_hf_packed *p = bl_hf_packed_weight(model, name);

    return p ? &p->codes : bl_hf_find(model, name);
}

const bl_stored_tensor *bl_hf_weight_of_part(const bl_hf_model *model, const bl_stored_tensor *t)
{
    const bl_hf_packed *p = bl_hf_packed_of(model, t);

    return p ? &p->codes : NULL;
}

const bl_stored_tensor *bl_hf_resolve(const bl_hf_model *model, const bl_stored_tensor *t)
{
    const bl_hf_packed *p = bl_hf_packed_of(model, t);

    return !p ? t : p->other[0] == t ? &p->codes : NULL;
}

const bl_stored_tensor *bl_hf_quantized_at(const bl_hf_model *model, size_t index)
{
    const bl_stored_tensor *t = bl_hf_at(model, index), *weight = bl_hf_resolve(model, t);

    return weight && (weight != t || t->dtype == BL_F8_E4M3) ? weight : NULL;
}
