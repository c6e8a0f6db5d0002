/* SPDX-License-Identifier: Apache-2.0 */
/* made_model.c -- tensors of made-up values in a checkpoint; made_model.h says which. */
#include "made_model.h"
#include "ops_test.h"
#include "tmp_dir.h"

#include "arch/config.h"
#include "arch/llama.h"
#include "store/safetensors.h"

enum { MAX_TENSORS = 64 };

typedef struct tensor_list {
    bl_stored_tensor_spec spec[MAX_TENSORS];
    char name[MAX_TENSORS][96];
    size_t n;
} tensor_list;

static void add(tensor_list *list, bl_dtype dtype, int n_dims, int64_t rows, int64_t cols,
                const char *format, int layer, const char *module)
{
    assert_true(list->n < MAX_TENSORS);
    snprintf(list->name[list->n], sizeof list->name[0], format, layer, module);
    list->spec[list->n] = (bl_stored_tensor_spec){list->name[list->n], dtype, n_dims, {rows, cols}};
    list->n++;
}

static void list_tensors(const made *m, const bl_model_config *config, tensor_list *list)
{
    for (int l = 0; l < LAYERS; l++) {
        for (int p = 0; p < BL_PROJECTIONS; p++) {
            const char *module = bl_llama_projections[p].module;
            int64_t rows, cols;
            bl_projection_shape(config, p, &rows, &cols);
            add(list, m->scales == BL_SCALE_NONE ? m->dtype : BL_F8_E4M3, 2, rows, cols,
                "model.layers.%d.%s.weight", l, module);
            if (m->scales == BL_SCALE_TENSOR)
                add(list, BL_F32, 1, 1, 0, "model.layers.%d.%s.weight_scale", l, module);
            if (m->scales == BL_SCALE_ROW)
                add(list, BL_F32, 2, rows, 1, "model.layers.%d.%s.weight_scale", l, module);
            if (m->scales == BL_SCALE_BLOCK)
                add(list, BL_F32, 2, bl_ceil_div(rows, 128), bl_ceil_div(cols, 128),
                    "model.layers.%d.%s.weight_scale", l, module);
            if (m->scales == BL_SCALE_GRID)
                add(list, BL_F32, 2, bl_ceil_div(rows, 48), bl_ceil_div(cols, 40),
                    "model.layers.%d.%s.weight_scale", l, module);
            if (m->scales == BL_SCALE_MX)
                add(list, BL_U8, 2, rows, bl_ceil_div(cols, 32), "model.layers.%d.%s.weight_scale",
                    l, module);
        }
        add(list, m->dtype, 1, HIDDEN, 0, "model.layers.%d.%s.weight", l, "input_layernorm");
        add(list, m->dtype, 1, HIDDEN, 0, "model.layers.%d.%s.weight", l,
            "post_attention_layernorm");
    }
    add(list, m->dtype, 1, HIDDEN, 0, "model.norm.weight", 0, "");
    if (m->has_embedding) add(list, m->dtype, 2, VOCAB, HIDDEN, "model.embed_tokens.weight", 0, "");
    if (m->has_head) add(list, m->dtype, 2, VOCAB, HIDDEN, "lm_head.weight", 0, "");
}

/* Values of one tensor: the same in every model, whatever the tensor's dtype and file.
 * The tied table is one by either name. */
static void *make_values(const made *m, const bl_stored_tensor_spec *spec, size_t *n_bytes)
{
    int64_t n = spec->shape[0] * (spec->n_dims == 2 ? spec->shape[1] : 1);
    uint64_t seed = 1;
    for (const char *c = m->tied && strcmp(spec->name, "lm_head.weight") == 0
                             ? "model.embed_tokens.weight"
                             : spec->name;
         *c; c++)
        seed = seed * 31 + (unsigned char)*c;
    float *values = test_random_floats(n, seed % 1000003);
    bool poisoned = m->poisoned && strcmp(spec->name, m->poisoned) == 0;
    *n_bytes = (size_t)n * bl_dtype_bytes(spec->dtype);
    uint8_t *bytes = test_alloc((int64_t)*n_bytes, 1);
    uint16_t *halves = (uint16_t *)bytes;
    bool is_scale = strstr(spec->name, "weight_scale") != NULL;
    for (int64_t i = 0; i < n; i++) {
        float value = is_scale                             ? 0.01f + fabsf(values[i])
                      : poisoned && i == m->poisoned_index ? NAN
                                                           : values[i];
        switch (spec->dtype) {
        case BL_F8_E4M3:
            bytes[i] = isnan(value) ? 0x7f : (uint8_t)((int)(value * 126.0f) & 0xfe);
            break;
        case BL_U8: /* E8M0: 2^-7 to 1 */
            bytes[i] = (uint8_t)(120 + (int)(value * 100) % 8);
            break;
        case BL_F16:
            halves[i] = bl_f32_to_f16(value);
            break;
        case BL_BF16:
            halves[i] = bl_f32_to_bf16(value);
            break;
        default:
            memcpy(bytes + 4 * i, &value, 4);
            break;
        }
    }
    free(values);
    return bytes;
}

const char *make_model(const made *m)
{
    static const char *const strategies[] = {"\"tensor\"",
                                             "\"tensor\"",
                                             "\"channel\"",
                                             "\"block\",\"block_structure\":[128,128]",
                                             "\"block\",\"block_structure\":[48,40]",
                                             "\"group\",\"group_size\":32"};
    const char *dir = tmp_subdir("model");
    char config_text[1024], quantization[256] = "";
    bl_safetensors_writer *writer;
    bl_model_config config;
    tensor_list list = {.n = 0};

    if (m->scales != BL_SCALE_NONE)
        snprintf(quantization, sizeof quantization,
                 ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_"
                 "groups\":{\"g\":"
                 "{\"weights\":"
                 "{\"strategy\":%s}}}}",
                 strategies[m->scales]);
    snprintf(config_text, sizeof config_text,
             "{\"model_type\":\"llama\",\"hidden_size\":%d,\"intermediate_size\":%d,\"num_"
             "attention_heads\":%d,"
             "\"num_key_value_heads\":%d,\"head_dim\":%d,\"vocab_size\":%d,\"num_hidden_layers\":%"
             "d,\"tie_word_"
             "embeddings\":%s%s}",
             HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS, m->tied ? "true" : "false",
             quantization);
    put_text("model/config.json", config_text);
    assert_int_equal(bl_model_config_load(dir, &config), BL_OK);
    list_tensors(m, &config, &list);
    assert_int_equal(bl_safetensors_create(tmp_path("model/model.safetensors"), list.spec, list.n,
                                           NULL, 0, &writer),
                     BL_OK);
    const size_t *order = bl_safetensors_writer_order(writer);
    for (size_t i = 0; i < list.n; i++) {
        size_t n_bytes;
        void *bytes = make_values(m, &list.spec[order[i]], &n_bytes);
        assert_int_equal(bl_safetensors_writer_append(writer, bytes, n_bytes), BL_OK);
        free(bytes);
    }
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    return dir;
}

bl_model *open_host(const char *dir, bl_base_format format)
{
    bl_model *model;
    bl_status st = bl_model_open(dir, format, 16, &model);
    if (st != BL_OK) print_error("%s\n", bl_error_text());
    assert_int_equal(st, BL_OK);
    return model;
}
