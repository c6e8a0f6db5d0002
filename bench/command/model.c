/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- writes a random model (config.json, model.safetensors) and rows of tokens, for
 * measurements that open files. */
#include "bench/command/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/safetensors.h"

enum { HEAD_DIM = 32, KV_HEADS = 2, PER_LAYER = 9, NAME_BYTES = 80, PATH_BYTES = 512 };

static const struct {
    const char *name;
    char rows, cols; /* h hidden, i inter, k of keys and values; 0: a norm */
} layer_tensors[PER_LAYER] = {
    {"self_attn.q_proj", 'h', 'h'},       {"self_attn.k_proj", 'k', 'h'},
    {"self_attn.v_proj", 'k', 'h'},       {"self_attn.o_proj", 'h', 'h'},
    {"mlp.gate_proj", 'i', 'h'},          {"mlp.up_proj", 'i', 'h'},
    {"mlp.down_proj", 'h', 'i'},          {"input_layernorm", 'h', 0},
    {"post_attention_layernorm", 'h', 0},
};

static int64_t extent(const bl_bench_model *m, char what)
{
    return what == 'h' ? m->hidden : what == 'i' ? m->inter : KV_HEADS * HEAD_DIM;
}

int64_t bl_bench_model_layer_weights(const bl_bench_model *m)
{
    int64_t n = 0;
    for (int t = 0; t < PER_LAYER; t++)
        if (layer_tensors[t].cols)
            n += extent(m, layer_tensors[t].rows) * extent(m, layer_tensors[t].cols);
    return n;
}

static bl_status write_config(const bl_bench_model *m, const char *dir)
{
    char path[PATH_BYTES], text[1024];

    snprintf(path, sizeof path, "%s/model/config.json", dir);
    int n = snprintf(
        text, sizeof text,
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"torch_dtype\": "
        "\"bfloat16\",\n"
        " \"hidden_act\": \"silu\", \"bos_token_id\": 1, \"eos_token_id\": 2, \"rms_norm_eps\": "
        "1e-05,\n"
        " \"attention_bias\": false, \"mlp_bias\": false, \"rope_theta\": 10000.0, "
        "\"rope_scaling\": null,\n"
        " \"tie_word_embeddings\": true, \"max_position_embeddings\": %lld, \"vocab_size\": %lld,\n"
        " \"hidden_size\": %lld, \"intermediate_size\": %lld, \"num_hidden_layers\": %lld,\n"
        " \"num_attention_heads\": %lld, \"num_key_value_heads\": %d, \"head_dim\": %d}\n",
        (long long)m->row_tokens, (long long)m->vocab, (long long)m->hidden, (long long)m->inter,
        (long long)m->layers, (long long)(m->hidden / HEAD_DIM), KV_HEADS, HEAD_DIM);
    return bl_file_write_atomic(path, text, (size_t)n);
}

/* The upper half of a float: bf16, cut off. */
static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Norms of one, weights in +-0.06, from an LCG (Knuth's MMIX constants). */
static bl_status append_tensor(bl_safetensors_writer *writer, const bl_stored_tensor_spec *spec,
                               uint64_t *random)
{
    enum { PIECE = 4096 };
    uint16_t piece[PIECE];
    int64_t n = spec->shape[0] * (spec->n_dims == 2 ? spec->shape[1] : 1);

    for (int64_t done = 0; done < n;) {
        int64_t count = bl_min_i64(PIECE, n - done);
        for (int64_t i = 0; i < count; i++) {
            *random = *random * 6364136223846793005u + 1442695040888963407u;
            float unit = (float)(int32_t)(*random >> 32) * 0x1p-31f;
            piece[i] = to_bf16(spec->n_dims == 2 ? unit * 0.06f : 1.0f);
        }
        BL_TRY(bl_safetensors_writer_append(writer, piece, (size_t)count * sizeof *piece));
        done += count;
    }
    return BL_OK;
}

static bl_status write_weights(const bl_bench_model *m, const char *dir)
{
    static const char *const metadata[] = {"format", "pt"};
    size_t n = (size_t)m->layers * PER_LAYER + 2, k = 0;
    bl_stored_tensor_spec *specs = calloc(n, sizeof *specs);
    char(*names)[NAME_BYTES] = calloc(n, sizeof *names), path[PATH_BYTES];
    bl_safetensors_writer *writer = NULL;
    uint64_t random = 1;
    bl_status st = BL_OK;

    if (!specs || !names) {
        st = BL_FAIL(BL_ENOMEM, "a model of %lld layers", (long long)m->layers);
        goto done;
    }
    for (int64_t l = 0; l < m->layers; l++)
        for (int t = 0; t < PER_LAYER; t++, k++) {
            bool is_norm = !layer_tensors[t].cols;
            snprintf(names[k], NAME_BYTES, "model.layers.%lld.%s.weight", (long long)l,
                     layer_tensors[t].name);
            specs[k] = (bl_stored_tensor_spec){
                names[k],
                BL_BF16,
                is_norm ? 1 : 2,
                {extent(m, layer_tensors[t].rows), is_norm ? 0 : extent(m, layer_tensors[t].cols)}};
        }
    specs[k++] = (bl_stored_tensor_spec){"model.norm.weight", BL_BF16, 1, {m->hidden}};
    specs[k++] =
        (bl_stored_tensor_spec){"model.embed_tokens.weight", BL_BF16, 2, {m->vocab, m->hidden}};
    snprintf(path, sizeof path, "%s/model/model.safetensors", dir);
    BL_TRY_GOTO(st, done, bl_safetensors_create(path, specs, n, metadata, 1, &writer));
    for (size_t i = 0; i < n; i++)
        BL_TRY_GOTO(st, done,
                    append_tensor(writer, &specs[bl_safetensors_writer_order(writer)[i]], &random));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    free(names);
    free(specs);
    return st;
}

static void write_ids(FILE *file, const bl_bench_model *m, int64_t row)
{
    uint64_t random = (uint64_t)row;
    for (int64_t t = 0; t < m->row_tokens; t++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        fprintf(file, "%s%u", t ? "," : "", (unsigned)((random >> 33) % (uint64_t)m->vocab));
    }
}

bl_status bl_bench_model_write_rows(const bl_bench_model *m, const char *dir)
{
    char path[PATH_BYTES];

    snprintf(path, sizeof path, "%s/train.jsonl", dir);
    FILE *file = fopen(path, "we");
    if (!file) return bl_fail_errno(BL_EIO, "open %s", path);
    for (int64_t row = 0; row < m->rows; row++) {
        fputs("{\"input_ids\":[", file);
        write_ids(file, m, row);
        fputs("],\"labels\":[", file);
        write_ids(file, m, row);
        fputs("]}\n", file);
    }
    bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed) return bl_fail_errno(BL_EIO, "write %s", path);
    return BL_OK;
}

bl_status bl_bench_model_write(const bl_bench_model *model, const char *dir)
{
    char path[PATH_BYTES];

    snprintf(path, sizeof path, "%s/model", dir);
    BL_TRY(bl_dir_create(path));
    BL_TRY(write_config(model, dir));
    BL_TRY(write_weights(model, dir));
    return bl_bench_model_write_rows(model, dir);
}
