/* SPDX-License-Identifier: Apache-2.0 */
/* A model folder: config.json, model.safetensors.index.json, the header and the data of the shard
 * "model-00001-of-00002.safetensors", the same of "model-00002-of-00002.safetensors". Without an
 * index the first shard is model.safetensors. */
#include <stdlib.h>

#include "base/files.h"
#include "fuzz.h"
#include "arch/config.h"
#include "arch/rope.h"
#include "model/weights.h"
#include "store/hf_model.h"

enum { MAX_SCALES = 1 << 20, MAX_PAIRS = 1 << 11 };

static void write_shard(fuzz_input *input, const char *name)
{
    fuzz_part header = fuzz_next(input), data = fuzz_next(input);
    if (header.bytes) fuzz_write_safetensors(name, header, data);
}

static void write_folder(fuzz_input *input)
{
    static const char *const names[] = {"model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors", "model.safetensors"};
    const fuzz_part none = {0};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) fuzz_write(names[i], none);
    fuzz_write("config.json", fuzz_next(input));
    fuzz_part index = fuzz_next(input);
    if (index.n_bytes == 0) index = none;
    fuzz_write("model.safetensors.index.json", index);
    write_shard(input, index.bytes ? names[0] : names[2]);
    write_shard(input, names[1]);
}

static void read_weights(const bl_hf_model *model)
{
    for (size_t i = 0; i < bl_hf_count(model); i++) {
        bl_hf_weight weight;
        bl_status st = bl_hf_get_weight(model, bl_hf_at(model, i)->name, &weight);
        fuzz_check(st);
        if (st != BL_OK || weight.scale_kind == BL_SCALE_NONE ||
            weight.scale_rows > MAX_SCALES / weight.scale_cols)
            continue;
        float *scales = malloc((size_t)(weight.scale_rows * weight.scale_cols) * sizeof *scales);
        if (!scales) abort();
        fuzz_check(bl_hf_read_scales(&weight, scales));
        free(scales);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    double inverse[MAX_PAIRS];
    bl_model_config config;
    bl_hf_model *files = NULL;
    bl_model *model = NULL;

    write_folder(&input);
    bl_status st = bl_model_config_load(fuzz_folder(), &config);
    fuzz_check(st);
    if (st == BL_OK) {
        if (bl_model_config_n_params(&config) <= 0) abort();
        bl_model_rope_inv_freq(&config, false, inverse);
    }
    fuzz_check(bl_hf_open(fuzz_folder(), &files));
    if (files) {
        if (st == BL_OK) fuzz_check(bl_model_config_fit(&config, files));
        read_weights(files);
    }
    bl_hf_close(files);
    fuzz_check(bl_model_open(fuzz_folder(), BL_BASE_AUTO, 64, &model));
    bl_model_close(model);
    return 0;
}
