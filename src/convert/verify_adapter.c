/* SPDX-License-Identifier: Apache-2.0 */
/* verify_adapter.c -- an adapter's tensors as pairs of A and B, each with the base's matrix that it
 * changes. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arch/lora.h"
#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"
#include "store/peft.h"

enum { MAX_RANK = 1 << 16, MAX_MODULE_BYTES = BL_VERIFY_NAME_BYTES - 64 };

static const char prefix[] = "base_model.model.";

/* ---- adapter_config.json ---- */

static bl_status read_config(const char *dir, bl_verify_adapter *a)
{
    BL_TRY(bl_peft_load_any_keys(dir, &a->config_path, &a->config));
    const char *file = a->config_path;
    BL_TRY(bl_json_get_int(file, a->config, "r", BL_JSON_REQUIRED, 1, MAX_RANK, &a->r));
    BL_TRY(bl_json_get_real(file, a->config, "lora_alpha", BL_JSON_REQUIRED, 0, 1e9, &a->alpha));
    BL_TRY(bl_json_get_bool(file, a->config, "use_rslora", BL_JSON_OPTIONAL, &a->use_rslora));
    BL_TRY(
        bl_json_get_bool(file, a->config, "fan_in_fan_out", BL_JSON_OPTIONAL, &a->fan_in_fan_out));
    BL_TRY(bl_peft_numbers_read(file, a->config, "rank_pattern", &a->ranks));
    return bl_peft_numbers_read(file, a->config, "alpha_pattern", &a->alphas);
}

/* r and scale, by the name that PEFT gives the module or parameter. */
static bl_status choose_scale(const bl_verify_adapter *a, bl_pair *p)
{
    char name[BL_VERIFY_NAME_BYTES];
    double r = (double)a->r, alpha = a->alpha;

    snprintf(name, sizeof name, "%s", p->module);
    if (p->parameter) {
        char *end;
        while ((end = strstr(name, ".base_layer"))) *end = '\0';
        snprintf(name + strlen(name), sizeof name - strlen(name), ".%s", p->parameter);
    }
    BL_TRY(bl_peft_numbers_choose(&a->ranks, name, &r));
    BL_TRY(bl_peft_numbers_choose(&a->alphas, name, &alpha));
    if (r < 1 || r > MAX_RANK || r != floor(r))
        return BL_FAIL(BL_EINPUT, "%s: key rank_pattern: expected integers in [1, %d], got %g",
                       a->config_path, MAX_RANK, r);
    p->r = (int64_t)r;
    p->scale = bl_lora_scale(alpha, p->r, a->use_rslora);
    return BL_OK;
}

/* ---- pairs ---- */

typedef struct factor_end {
    const char *end;
    bool is_b, is_embedding;
} factor_end;

static const factor_end ends[] = {{".lora_A.weight", false, false},
                                  {".lora_B.weight", true, false},
                                  {".lora_embedding_A", false, true},
                                  {".lora_embedding_B", true, true}};

static const factor_end *factor_of(const char *name, size_t *n_module)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < BL_COUNT(ends); i++) {
        size_t n_end = strlen(ends[i].end);
        if (n <= n_end || strcmp(name + n - n_end, ends[i].end) != 0) continue;
        *n_module = n - n_end;
        return &ends[i];
    }
    return NULL;
}

static int compare_pairs(const void *a, const void *b)
{
    const bl_pair *x = a, *y = b;
    int order = strcmp(x->module, y->module);

    if (order == 0) order = x->is_embedding - y->is_embedding;
    return order ? order : (x->a == NULL) - (y->a == NULL);
}

/* One entry per factor; sorted, those of a module become one. */
static void join_pairs(bl_verify_adapter *a)
{
    size_t n = 0;

    qsort(a->pairs, a->n_pairs, sizeof *a->pairs, compare_pairs);
    for (size_t i = 0; i < a->n_pairs; i++) {
        bl_pair *last = n > 0 ? &a->pairs[n - 1] : NULL, *p = &a->pairs[i];
        if (last && strcmp(last->module, p->module) == 0 && last->is_embedding == p->is_embedding &&
            !last->b) {
            last->b = p->b;
            free(p->module);
        } else {
            a->pairs[n++] = *p;
        }
    }
    a->n_pairs = n;
}

static bl_status add_tensor(bl_verify *v, const bl_stored_tensor *t)
{
    bl_verify_adapter *a = &v->adapter;
    size_t n_prefix = sizeof prefix - 1, n_module;
    const factor_end *end = factor_of(t->name, &n_module);

    if (strncmp(t->name, prefix, n_prefix) != 0 || strstr(t->name, ".lora_A.default.") ||
        strstr(t->name, ".lora_B.default.") || (end && n_module <= n_prefix)) {
        bl_verify_fault(v, "name", t->name, "base_model.model.MODULE.lora_A.weight",
                        "a name that PEFT does not load");
        return BL_OK;
    }
    if (!end) {
        a->others[a->n_others++] = t;
        return BL_OK;
    }
    if (n_module - n_prefix > MAX_MODULE_BYTES)
        return BL_FAIL(BL_EINPUT, "%s: a tensor's name has more than %d bytes: %.60s...",
                       bl_safetensors_path(a->file), MAX_MODULE_BYTES, t->name);
    char *module = strndup(t->name + n_prefix, n_module - n_prefix);
    if (!module) return BL_FAIL(BL_ENOMEM, "the name %s", t->name);
    a->pairs[a->n_pairs++] = (bl_pair){.module = module,
                                       .a = end->is_b ? NULL : t,
                                       .b = end->is_b ? t : NULL,
                                       .is_embedding = end->is_embedding};
    return BL_OK;
}

static bl_status read_tensors(bl_verify *v)
{
    bl_verify_adapter *a = &v->adapter;
    size_t n = bl_safetensors_count(a->file);

    a->pairs = calloc(n + 1, sizeof *a->pairs);
    a->others = calloc(n + 1, sizeof *a->others);
    if (!a->pairs || !a->others) return BL_FAIL(BL_ENOMEM, "a list of %zu tensors", n);
    for (size_t i = 0; i < n; i++) BL_TRY(add_tensor(v, bl_safetensors_at(a->file, i)));
    join_pairs(a);
    return BL_OK;
}

/* ---- the base's matrix ---- */

static const bl_verify_block *find_embedding(const bl_verify *v)
{
    static const char *const names[] = {"model.embed_tokens.weight",
                                        "transformer.word_embeddings.weight",
                                        "transformer.wte.weight"};
    const bl_verify_block *block = NULL;

    for (size_t i = 0; i < BL_COUNT(names) && !block; i++)
        block = bl_verify_find(&v->base, names[i]);
    return block;
}

const bl_verify_block *bl_verify_find_weight(const bl_verify *v, const char *key, bool *is_tied)
{
    char name[BL_VERIFY_NAME_BYTES + 16];

    snprintf(name, sizeof name, "%s.weight", key);
    const bl_verify_block *block = bl_verify_find(&v->base, name);
    *is_tied = !block && v->base.is_tied && strcmp(key, "lm_head") == 0;
    return *is_tied ? find_embedding(v) : block;
}

void bl_verify_other_name(const bl_stored_tensor *tensor, char name[BL_VERIFY_NAME_BYTES])
{
    snprintf(name, BL_VERIFY_NAME_BYTES, "%s", tensor->name + sizeof prefix - 1);
    char *at = strstr(name, ".base_layer.");
    size_t n = strlen(".base_layer");
    if (at) memmove(at, at + n, strlen(at + n) + 1);
}

const bl_verify_block *bl_verify_find_other(const bl_verify *v, const char *name, bool *is_tied)
{
    char key[BL_VERIFY_NAME_BYTES];
    size_t n_end = strlen(".weight");

    *is_tied = false;
    if (!bl_verify_key(name, key)) return NULL;
    size_t n = strlen(key);
    if (n <= n_end || strcmp(key + n - n_end, ".weight") != 0) return bl_verify_find(&v->base, key);
    key[n - n_end] = '\0';
    return bl_verify_find_weight(v, key, is_tied);
}

static int64_t count_experts(const bl_verify *v, const char *format_head, const char *format_end)
{
    char key[BL_VERIFY_NAME_BYTES + 128];

    for (int64_t e = 0;; e++) {
        snprintf(key, sizeof key, "%s%" PRId64 "%s", format_head, e, format_end);
        if (!bl_verify_find(&v->base, key)) return e;
    }
}

/* Whether the shapes are those of the parameter with rows x cols for each expert, in either
 * layout. */
static bool fits(const bl_pair *p, int64_t rows, int64_t cols)
{
    if (!p->a || !p->b || p->a->n_dims != 2 || p->b->n_dims != 2) return false;
    int64_t in = p->a->shape[1], out = p->b->shape[0];
    return (in == cols && out == rows) || (in == rows && out == cols);
}

static bool has_module(const bl_verify_adapter *a, const char *module)
{
    for (size_t low = 0, high = a->n_pairs; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(module, a->pairs[middle].module);
        if (order == 0) return true;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return false;
}

/* Of gate_up_proj and down_proj the outer wrapper has the name of the module, the inner one a
 * "base_layer" more; a wrapper alone has the module's name, and shapes and target_parameters tell
 * which it is. */
static const char *choose_parameter(const bl_verify_adapter *a, const bl_pair *p, bool fits_up,
                                    bool fits_down)
{
    static const char up[] = "gate_up_proj", down[] = "down_proj";
    char inner[BL_VERIFY_NAME_BYTES];
    const json_t *list = json_object_get(a->config, "target_parameters"), *item;
    size_t i;
    bool names_up = false, names_down = false;

    snprintf(inner, sizeof inner, "%s.base_layer", p->module);
    if (strstr(p->module, ".base_layer")) return up;
    if (has_module(a, inner)) return down;
    if (fits_up != fits_down) return fits_up ? up : down;
    json_array_foreach(list, i, item)
    {
        const char *text = bl_json_text(item);
        names_up |= text && strstr(text, up);
        names_down |= text && strstr(text, down);
    }
    return names_up && !names_down ? up : down;
}

/* Stacked experts: gate_up_proj, down_proj. False: the base has no experts there. */
static bool find_experts(const bl_verify *v, bl_pair *p)
{
    char head[BL_VERIFY_NAME_BYTES + 8], name[BL_VERIFY_NAME_BYTES + 64];

    snprintf(head, sizeof head, "%s.", p->key);
    snprintf(name, sizeof name, "%s0.gate_proj.weight", head);
    const bl_verify_block *gate = bl_verify_find(&v->base, name);
    snprintf(name, sizeof name, "%s0.gate_up_proj", head);
    const bl_verify_block *up = bl_verify_find(&v->base, name);
    const char *end = up ? ".down_proj" : ".down_proj.weight";
    snprintf(name, sizeof name, "%s0%s", head, end);
    const bl_verify_block *down = bl_verify_find(&v->base, name);
    if (!(gate || up) || !down) return false;
    int64_t up_rows = up ? up->slice.rows : 2 * gate->slice.rows,
            up_cols = up ? up->slice.cols : gate->slice.cols;
    p->parameter = choose_parameter(&v->adapter, p, fits(p, up_rows, up_cols),
                                    fits(p, down->slice.rows, down->slice.cols));
    bool is_down = strcmp(p->parameter, "down_proj") == 0;
    p->rows = is_down ? down->slice.rows : up_rows;
    p->cols = is_down ? down->slice.cols : up_cols;
    p->n_experts = count_experts(v, head, end);
    return true;
}

static bool find_matrix(const bl_verify *v, bl_pair *p)
{
    char name[BL_VERIFY_NAME_BYTES + 64];
    bool is_tied;
    const bl_verify_block *block = bl_verify_find_weight(v, p->key, &is_tied);

    if (!block) {
        snprintf(name, sizeof name, "%s.weight[0]", p->key);
        block = bl_verify_find(&v->base, name);
        snprintf(name, sizeof name, "%s.weight[", p->key);
        p->parameter = block ? "weight" : NULL;
    }
    if (!block) return find_experts(v, p);
    p->rows = block->slice.rows;
    p->cols = block->slice.cols;
    p->n_experts = p->parameter ? count_experts(v, name, "]") : 1;
    return block->slice.tensor->n_dims == 2 || block->expert >= 0;
}

/* ---- shapes ---- */

static const char *shapes_text(const bl_pair *p, char text[2 * BL_SHAPE_TEXT_BYTES])
{
    char a[BL_SHAPE_TEXT_BYTES], b[BL_SHAPE_TEXT_BYTES];

    snprintf(text, 2 * BL_SHAPE_TEXT_BYTES, "A %.90s, B %.90s",
             bl_shape_text(p->a->n_dims, p->a->shape, a),
             bl_shape_text(p->b->n_dims, p->b->shape, b));
    return text;
}

static bool is_float(const bl_stored_tensor *t)
{
    return t->dtype == BL_F32 || t->dtype == BL_F16 || t->dtype == BL_BF16;
}

static void check_shapes(bl_verify *v, bl_pair *p)
{
    char expected[160], has[2 * BL_SHAPE_TEXT_BYTES];
    const char *name = p->a ? p->a->name : p->b->name;
    bool is_plain_transposed = p->is_embedding || (v->adapter.fan_in_fan_out && !p->parameter);
    int64_t in = is_plain_transposed ? p->rows : p->cols,
            out = is_plain_transposed ? p->cols : p->rows, r = p->n_experts * p->r;

    snprintf(expected, sizeof expected,
             "A [%" PRId64 ", %" PRId64 "], B [%" PRId64 ", %" PRId64 "]", r, in, out, r);
    if (!p->a || !p->b) {
        bl_verify_fault(v, "unpaired", name, expected, "%s alone", p->a ? "A" : "B");
        return;
    }
    const int64_t *a = p->a->shape, *b = p->b->shape;
    bool is_matrix = p->a->n_dims == 2 && p->b->n_dims == 2;
    bool is_last = is_matrix && a[1] == in && b[0] == out,
         is_first = is_matrix && p->parameter && a[1] == out && b[0] == in;
    if (!is_float(p->a) || !is_float(p->b)) {
        bl_verify_fault(v, "dtype", name, "F32, F16 or BF16", "A %s, B %s",
                        bl_dtype_name(p->a->dtype), bl_dtype_name(p->b->dtype));
    } else if (is_matrix && a[1] == r && b[0] == r && b[1] == in && a[0] == out &&
               !(a[0] == r && a[1] == in)) {
        bl_verify_fault(v, "swapped", name, expected, "A and B swapped: %s", shapes_text(p, has));
    } else if (!is_last && !is_first) {
        bl_verify_fault(v, "shape", name, expected, "%s", shapes_text(p, has));
    } else if (a[0] != r || b[1] != r) {
        bl_verify_fault(v, "rank", name, expected, "%s", shapes_text(p, has));
    } else {
        p->fits = true;
        p->is_transposed = is_plain_transposed || !is_last;
        p->is_ambiguous = is_last && is_first;
    }
}

/* ---- layouts of stacked experts ---- */

enum { LAYOUT_UNKNOWN = -1, LAYOUT_OLD, LAYOUT_0_19_0, LAYOUT_NEW, LAYOUT_EITHER };
static const char *const layouts[] = {"peft-0.17", "peft-0.19.0", "peft-0.19.1", "peft-any"};

/* Whether A's columns are the stored matrix's rows in PEFT 0.19.1 and later: for (E, in, out),
 * except Llama 4's. */
static bool is_new_transposed(const bl_verify *v, const bl_pair *p)
{
    char name[BL_VERIFY_NAME_BYTES + 64];

    snprintf(name, sizeof name, "%s.0.%s", p->key, p->parameter);
    const bl_verify_block *block = bl_verify_find(&v->base, name);
    return block && block->is_input_first && !v->base.is_llama4;
}

static int layout_of(const bl_verify *v, const bl_pair *p)
{
    bool is_new = p->is_transposed == is_new_transposed(v, p);

    if (!p->fits || p->is_ambiguous) return LAYOUT_UNKNOWN;
    if (is_new) return p->is_transposed ? LAYOUT_EITHER : LAYOUT_NEW;
    return p->is_transposed ? LAYOUT_OLD : LAYOUT_0_19_0;
}

static int layout_of_version(bl_verify *v)
{
    int version[3];

    if (!bl_peft_version(v->adapter.config, version)) {
        bl_verify_warning(v, "the experts' matrices are square and adapter_config.json has no "
                             "peft_version: the layout of PEFT 0.19.1 is assumed");
        return LAYOUT_NEW;
    }
    if (version[0] > 0 || version[1] > 19 || (version[1] == 19 && version[2] > 0))
        return LAYOUT_NEW;
    return version[1] == 19 ? LAYOUT_0_19_0 : LAYOUT_OLD;
}

/* All stacked experts have one layout; square ones have that of the others, or of the version. */
static void choose_layout(bl_verify *v)
{
    bl_verify_adapter *a = &v->adapter;
    int layout = LAYOUT_UNKNOWN;
    bool has_square = false;

    for (size_t i = 0; i < a->n_pairs; i++) {
        bl_pair *p = &a->pairs[i];
        if (!p->parameter || !p->fits) continue;
        int own = layout_of(v, p);
        has_square |= own == LAYOUT_UNKNOWN;
        if (own == LAYOUT_UNKNOWN || own == layout) continue;
        if (layout != LAYOUT_UNKNOWN) {
            bl_verify_fault(v, "layout", p->a->name, layouts[layout], "%s", layouts[own]);
            p->fits = false;
        } else {
            layout = own;
        }
    }
    if (has_square && layout == LAYOUT_UNKNOWN) layout = layout_of_version(v);
    for (size_t i = 0; i < a->n_pairs; i++) {
        bl_pair *p = &a->pairs[i];
        if (!p->parameter || !p->fits || !p->is_ambiguous) continue;
        bool is_new = is_new_transposed(v, p);
        p->is_transposed = layout == LAYOUT_NEW || layout == LAYOUT_EITHER ? is_new
                           : layout == LAYOUT_OLD                          ? true
                                                                           : !is_new;
    }
    if (layout != LAYOUT_UNKNOWN) a->layout = layouts[layout];
}

/* ---- values ---- */

static bl_status check_finite(bl_verify *v, const bl_stored_tensor *t, bool *has_nan,
                              bool *has_value)
{
    enum { PIECE = 1 << 14 };
    float values[PIECE];
    int64_t n = t->n_bytes / (int64_t)bl_dtype_bytes(t->dtype);

    if (!is_float(t)) return BL_OK;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t length = bl_min_i64(PIECE, n - at);
        BL_TRY(bl_stored_tensor_read_floats(t, at, length, values));
        for (int64_t i = 0; i < length; i++) {
            *has_value |= values[i] != 0;
            if (isfinite(values[i])) continue;
            bl_verify_fault(v, "nan", t->name, "finite values", "element %" PRId64 " is %g", at + i,
                            (double)values[i]);
            *has_nan = true;
            return BL_OK;
        }
    }
    return BL_OK;
}

static bl_status check_values(bl_verify *v)
{
    bool has_nan, is_any = false, has_b = false, is_trained = v->adapter.n_others > 0;

    for (size_t i = 0; i < v->adapter.n_pairs; i++) {
        bl_pair *p = &v->adapter.pairs[i];
        if (p->a) BL_TRY(check_finite(v, p->a, &p->has_nan, &is_any));
        if (p->b) BL_TRY(check_finite(v, p->b, &p->has_nan, &is_trained));
        has_b |= p->b != NULL;
    }
    for (size_t i = 0; i < v->adapter.n_others; i++)
        BL_TRY(check_finite(v, v->adapter.others[i], &has_nan, &is_any));
    if (has_b && !is_trained) bl_verify_warning(v, "every B is 0: the adapter changes nothing");
    return BL_OK;
}

/* ---- an adapter ---- */

static bl_status resolve(bl_verify *v, bl_pair *p)
{
    char key[BL_VERIFY_NAME_BYTES], *end;
    const char *name = p->a ? p->a->name : p->b->name;

    if (!bl_verify_key(p->module, key)) return BL_FAIL(BL_EINPUT, "%s: too long", name);
    while ((end = strstr(key, ".base_layer"))) *end = '\0';
    if (!(p->key = strdup(key))) return BL_FAIL(BL_ENOMEM, "the name %s", key);
    if (!find_matrix(v, p)) {
        bl_verify_fault(v, "no_module", name, "a weight of the base", "no such module");
        return BL_OK;
    }
    BL_TRY(choose_scale(&v->adapter, p));
    check_shapes(v, p);
    return BL_OK;
}

bl_status bl_verify_adapter_open(bl_verify *v)
{
    bl_verify_adapter *a = &v->adapter;
    char *path = NULL;

    BL_TRY(read_config(v->options->adapter, a));
    BL_TRY(bl_path_join(v->options->adapter, "adapter_model.safetensors", &path));
    bl_status st = bl_safetensors_open(path, &a->file);
    free(path);
    BL_TRY(st);
    BL_TRY(read_tensors(v));
    for (size_t i = 0; i < a->n_pairs; i++) BL_TRY(resolve(v, &a->pairs[i]));
    choose_layout(v);
    return check_values(v);
}

void bl_verify_adapter_close(bl_verify_adapter *a)
{
    for (size_t i = 0; i < a->n_pairs; i++) {
        free(a->pairs[i].module);
        free(a->pairs[i].key);
    }
    free(a->pairs);
    free(a->others);
    bl_peft_numbers_free(&a->ranks);
    bl_peft_numbers_free(&a->alphas);
    bl_safetensors_close(a->file);
    json_decref(a->config);
    free(a->config_path);
}
