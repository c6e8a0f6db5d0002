/* SPDX-License-Identifier: Apache-2.0 */
/* verify_index.c -- a checkpoint as a sorted list of matrices, whose keys do not depend on how the
 * experts are stored: one by one, or stacked. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"

enum { CONFIG_MAX_BYTES = 16 << 20, MAX_BLOCKS = 1 << 20 };

/* ---- keys ---- */

typedef struct renaming {
    const char *from, *to;
} renaming;

/* The text that begins at `at` and has n_from bytes becomes `to`. */
static bool replace(char key[BL_VERIFY_NAME_BYTES], char *at, size_t n_from, const char *to)
{
    size_t n_to = strlen(to), n_rest = strlen(at + n_from);

    if ((size_t)(at - key) + n_to + n_rest >= BL_VERIFY_NAME_BYTES) return false;
    memmove(at + n_to, at + n_from, n_rest + 1);
    memcpy(at, to, n_to);
    return true;
}

/* Whether `text` begins with digits and a point; *n: their bytes, without the point. */
static bool begins_with_number(const char *text, size_t *n)
{
    *n = strspn(text, "0123456789");
    return *n > 0 && text[*n] == '.';
}

bool bl_verify_is_packed(const bl_hf_model *model, const bl_stored_tensor *tensor)
{
    return model && bl_hf_find(model, tensor->name) != tensor;
}

bool bl_verify_key(const char *name, char key[BL_VERIFY_NAME_BYTES])
{
    static const renaming beginnings[] = {{"language_model.model.", "model."},
                                          {"model.language_model.", "model."},
                                          {"language_model.lm_head", "lm_head"}};
    static const renaming experts[] = {{"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}};
    size_t n;

    if (strlen(name) >= BL_VERIFY_NAME_BYTES) return false;
    strcpy(key, name);
    for (size_t i = 0; i < BL_COUNT(beginnings); i++) {
        n = strlen(beginnings[i].from);
        if (strncmp(key, beginnings[i].from, n) == 0 && !replace(key, key, n, beginnings[i].to))
            return false;
    }
    char *at = strstr(key, ".block_sparse_moe.");
    if (at && !replace(key, at, strlen(".block_sparse_moe."), ".mlp.")) return false;
    at = strstr(key, ".experts.");
    if (!at || !begins_with_number(at += strlen(".experts."), &n)) return true;
    at += n + 1;
    n = strcspn(at, ".");
    for (size_t i = 0; i < BL_COUNT(experts); i++)
        if (strlen(experts[i].from) == n && strncmp(at, experts[i].from, n) == 0)
            return replace(key, at, n, experts[i].to);
    return true;
}

void bl_verify_class(const char *key, char text[BL_VERIFY_NAME_BYTES])
{
    size_t n_digits, used = 0;

    for (const char *c = key; *c && used + 1 < BL_VERIFY_NAME_BYTES; c++) {
        text[used++] = *c;
        if (*c != '.' || !begins_with_number(c + 1, &n_digits)) continue;
        c += n_digits;
        if (used + 1 < BL_VERIFY_NAME_BYTES) text[used++] = '*';
    }
    text[used] = '\0';
}

int64_t bl_verify_layer(const char *key)
{
    static const char *const heads[] = {"layers.", "h."};
    size_t n;

    for (size_t i = 0; i < BL_COUNT(heads); i++) {
        const char *at = strstr(key, heads[i]);
        if (at && (at == key || at[-1] == '.') && begins_with_number(at + strlen(heads[i]), &n))
            return strtoll(at + strlen(heads[i]), NULL, 10);
    }
    return -1;
}

/* ---- blocks ---- */

static bl_status add_block(bl_verify_index *index, const char *key, int64_t expert,
                           bool is_input_first, bl_slice slice)
{
    if (index->n == MAX_BLOCKS)
        return BL_FAIL(BL_EINPUT, "%s: tensor %s: the model has more than %d matrices",
                       bl_safetensors_path(slice.tensor->file), slice.tensor->name, MAX_BLOCKS);
    if (index->n == index->capacity) {
        size_t capacity = index->capacity ? 2 * index->capacity : 256;
        bl_verify_block *blocks = realloc(index->blocks, capacity * sizeof *blocks);
        if (!blocks) return BL_FAIL(BL_ENOMEM, "a list of %zu tensors", capacity);
        index->blocks = blocks;
        index->capacity = capacity;
    }
    char *copy = strdup(key);
    if (!copy) return BL_FAIL(BL_ENOMEM, "the name %s", key);
    index->blocks[index->n++] = (bl_verify_block){copy, expert, is_input_first, slice};
    return BL_OK;
}

static bool ends_in(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* Scales describe stored codes, which are compared by value; frequencies of RoPE are computed. */
static bool is_skipped(const char *name)
{
    static const char *const ends[] = {".weight_scale",
                                       ".weight_scale_inv",
                                       ".weight_zero_point",
                                       ".input_scale",
                                       ".input_global_scale",
                                       ".output_scale",
                                       ".activation_scale",
                                       ".k_scale",
                                       ".v_scale",
                                       ".q_scale",
                                       ".inv_freq"};

    for (size_t i = 0; i < BL_COUNT(ends); i++)
        if (ends_in(name, ends[i])) return true;
    return false;
}

/* Whether stacked experts are (E, in, out): gate_up_proj (E, a, b) and down_proj (E, c, d) of one
 * layer tell, for either a = 2 d and b = c, or b = 2 c and a = d. */
static bool is_input_first(const bl_hf_model *model, const char *name, const char *end)
{
    char sibling[BL_VERIFY_NAME_BYTES];
    bool is_down = strcmp(end, "down_proj") == 0;

    if (strlen(name) + sizeof "gate_up_proj" >= sizeof sibling) return false;
    snprintf(sibling, sizeof sibling, "%.*s%s", (int)(strlen(name) - strlen(end)), name,
             is_down ? "gate_up_proj" : "down_proj");
    const bl_stored_tensor *this = bl_hf_find(model, name), *other = bl_hf_find(model, sibling);
    if (!other || other->n_dims != 3) return false;
    const int64_t *up = is_down ? other->shape : this->shape,
                  *down = is_down ? this->shape : other->shape;
    return up[1] == down[2] && up[2] == 2 * down[1];
}

/* gate_up_proj or down_proj of all experts; `head`: the key before it, with its point. */
static bl_status add_stacked(bl_verify_index *index, const bl_stored_tensor *t, const char *head,
                             const char *end)
{
    bool input_first = is_input_first(index->model, t->name, end),
         is_split = !input_first && strcmp(end, "gate_up_proj") == 0;
    char key[BL_VERIFY_NAME_BYTES + 48];
    int64_t rows = t->shape[1], half = rows / 2;

    for (int64_t e = 0; e < t->shape[0]; e++) {
        bl_slice slice = {t, e * rows, is_split ? half : rows, t->shape[2]};
        snprintf(key, sizeof key, "%s%" PRId64 ".%s%s", head, e, is_split ? "gate_proj" : end,
                 input_first ? "" : ".weight");
        BL_TRY(add_block(index, key, e, input_first, slice));
        if (!is_split) continue;
        snprintf(key, sizeof key, "%s%" PRId64 ".up_proj.weight", head, e);
        slice.first_row += half;
        BL_TRY(add_block(index, key, e, false, slice));
    }
    return BL_OK;
}

/* gpt-oss' MXFP4, (E, out, in), of (E, in, out). */
static bl_status add_mxfp4(bl_verify_index *index, const bl_stored_tensor *t, const char *head,
                           const char *end)
{
    char key[BL_VERIFY_NAME_BYTES + 48];

    for (int64_t e = 0; e < t->shape[0]; e++) {
        snprintf(key, sizeof key, "%s%" PRId64 ".%s", head, e, end);
        BL_TRY(add_block(index, key, e, true, (bl_slice){t, 0, t->shape[2], t->shape[1]}));
    }
    return BL_OK;
}

/* Experts of a module of another name: granitemoe's input_linear.weight. */
static bl_status add_experts(bl_verify_index *index, const bl_stored_tensor *t, const char *key)
{
    char of_expert[BL_VERIFY_NAME_BYTES + 24];

    for (int64_t e = 0; e < t->shape[0]; e++) {
        snprintf(of_expert, sizeof of_expert, "%s[%" PRId64 "]", key, e);
        BL_TRY(add_block(index, of_expert, e, false,
                         (bl_slice){t, e * t->shape[1], t->shape[1], t->shape[2]}));
    }
    return BL_OK;
}

static int64_t expert_of(const char *key)
{
    const char *at = strstr(key, ".experts.");
    size_t n;

    return at && begins_with_number(at + strlen(".experts."), &n)
               ? strtoll(at + strlen(".experts."), NULL, 10)
               : -1;
}

static bl_status add_tensor(bl_verify_index *index, const bl_stored_tensor *t)
{
    static const char *const stacked[] = {"gate_up_proj", "down_proj"};
    char key[BL_VERIFY_NAME_BYTES], end[64];
    bl_slice whole = {t, 0, 1, t->n_dims > 0 ? t->shape[t->n_dims - 1] : 1};

    if (is_skipped(t->name) || t->n_bytes == 0) return BL_OK;
    if (!bl_verify_key(t->name, key))
        return BL_FAIL(BL_EINPUT, "%s: a tensor's name has more than %d bytes: %.60s...",
                       bl_safetensors_path(t->file), BL_VERIFY_NAME_BYTES - 1, t->name);
    bool is_mxfp4 = t->n_dims == 3 && t->dtype == BL_U8;
    for (size_t i = 0; i < BL_COUNT(stacked) && t->n_dims == 3; i++) {
        snprintf(end, sizeof end, ".experts.%s", stacked[i]);
        if (!ends_in(key, end)) continue;
        key[strlen(key) - strlen(end) + strlen(".experts.")] = '\0';
        return is_mxfp4 ? add_mxfp4(index, t, key, stacked[i])
                        : add_stacked(index, t, key, stacked[i]);
    }
    if (t->n_dims == 3 && strstr(t->name, "moe") && ends_in(key, ".weight"))
        return add_experts(index, t, key);
    for (int i = 0; i + 1 < t->n_dims; i++) whole.rows *= t->shape[i];
    return add_block(index, key, expert_of(key), false, whole);
}

static int compare_blocks(const void *a, const void *b)
{
    return strcmp(((const bl_verify_block *)a)->key, ((const bl_verify_block *)b)->key);
}

const bl_verify_block *bl_verify_find(const bl_verify_index *index, const char *key)
{
    const bl_verify_block wanted = {.key = (char *)key};
    return bsearch(&wanted, index->blocks, index->n, sizeof *index->blocks, compare_blocks);
}

/* ---- a directory ---- */

/* What decides here; other keys are the architecture's. */
static bl_status read_config(const char *dir, bl_verify_index *index)
{
    char *path = NULL;
    json_t *root = NULL;

    index->n_layers = INT64_MAX;
    BL_TRY(bl_path_join(dir, "config.json", &path));
    bl_status st = bl_json_load(path, CONFIG_MAX_BYTES, &root);
    if (st == BL_OK) st = bl_json_check_object(path, root);
    const json_t *places[] = {root, st == BL_OK ? json_object_get(root, "text_config") : NULL};
    for (size_t i = 0; i < BL_COUNT(places) && st == BL_OK; i++) {
        if (!json_is_object(places[i])) continue;
        const char *type = bl_json_text(json_object_get(places[i], "model_type"));
        index->is_llama4 |= type && strncmp(type, "llama4", strlen("llama4")) == 0;
        st = bl_json_get_bool(path, places[i], "tie_word_embeddings", BL_JSON_OPTIONAL,
                              &index->is_tied);
        if (st == BL_OK)
            st = bl_json_get_int(path, places[i], "num_hidden_layers", BL_JSON_OPTIONAL, 1,
                                 INT64_MAX, &index->n_layers);
    }
    json_decref(root);
    free(path);
    return st;
}

bl_status bl_verify_index_open(const char *dir, bl_verify_index *out)
{
    BL_TRY(bl_hf_open(dir, &out->model));
    BL_TRY(read_config(dir, out));
    for (size_t i = 0; i < bl_hf_count(out->model); i++) {
        const bl_stored_tensor *t = bl_hf_resolve(out->model, bl_hf_at(out->model, i));
        if (t) BL_TRY(add_tensor(out, t));
    }
    qsort(out->blocks, out->n, sizeof *out->blocks, compare_blocks);
    for (size_t i = 1; i < out->n; i++)
        if (strcmp(out->blocks[i - 1].key, out->blocks[i].key) == 0)
            return BL_FAIL(BL_EINPUT, "%s: %s and %s are the same matrix", dir,
                           out->blocks[i - 1].slice.tensor->name,
                           out->blocks[i].slice.tensor->name);
    return BL_OK;
}

void bl_verify_index_close(bl_verify_index *index)
{
    for (size_t i = 0; i < index->n; i++) free(index->blocks[i].key);
    free(index->blocks);
    bl_hf_close(index->model);
}
