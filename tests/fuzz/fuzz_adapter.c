/* SPDX-License-Identifier: Apache-2.0 */
/* A PEFT adapter for a base of two layers: adapter_config.json, then header and data of
 * adapter_model.safetensors. */
#include <stdlib.h>

#include "fuzz.h"
#include "store/peft.h"

static void read_factors(const bl_peft_adapter *adapter, const bl_peft_base *base)
{
    const bl_peft_config *config = bl_peft_get_config(adapter);

    for (int m = 0; m < base->modules.n; m++) {
        for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B && config->targets >> m & 1; f++) {
            int64_t width = f == BL_PEFT_A ? base->in_features[m] : base->out_features[m];
            float *values = malloc((size_t)(config->r * width) * sizeof *values);
            if (!values) abort();
            for (int64_t layer = 0; layer < base->n_layers; layer++)
                fuzz_check(bl_peft_read(adapter, layer, m, f, values));
            free(values);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    const bl_peft_base base = {
        .modules = {.layers = "model.layers",
                    .n = 7,
                    .path = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                             "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}},
        .n_layers = 2,
        .in_features = {8, 8, 8, 8, 8, 8, 12},
        .out_features = {8, 4, 4, 8, 12, 12, 8}};
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_peft_config config;
    bl_peft_adapter *adapter = NULL;

    fuzz_write("adapter_config.json", fuzz_next(&input));
    fuzz_part header = fuzz_next(&input), data = fuzz_next(&input);
    fuzz_write_safetensors("adapter_model.safetensors", header, data);
    bl_status st = bl_peft_load_config(fuzz_folder(), &base.modules, base.n_layers, &config);
    fuzz_check(st);
    if (st == BL_OK && (config.r < 1 || config.targets == 0)) abort();
    fuzz_check(bl_peft_open(fuzz_folder(), &base, &adapter));
    if (adapter) read_factors(adapter, &base);
    bl_peft_close(adapter);
    return 0;
}
