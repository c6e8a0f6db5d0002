/* SPDX-License-Identifier: Apache-2.0 */
/* A YAML configuration of a training run. An accepted one is written out and must read back as the
 * same. */
#include <stdlib.h>

#include "fuzz.h"
#include "config/config.h"

static void check_round_trip(bl_config_command command, const bl_train_config *config)
{
    bl_train_config *again = NULL;
    char *difference = NULL;

    if (bl_train_config_write_resolved(config, fuzz_path("resolved.yaml")) != BL_OK) abort();
    if (bl_train_config_load(command, fuzz_path("resolved.yaml"), 0, NULL, &again) != BL_OK)
        abort();
    for (bl_option_effect effect = BL_EFFECT_NONE; effect <= BL_EFFECT_SOURCE; effect++) {
        if (bl_train_config_diff(config, again, effect, &difference) != BL_OK || difference[0])
            abort();
        free(difference);
    }
    bl_train_config_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static const bl_config_command commands[] = {BL_CONFIG_TRAIN, BL_CONFIG_EVAL};

    fuzz_write("config.yaml", (fuzz_part){bytes, n_bytes});
    for (size_t i = 0; i < 2; i++) {
        bl_train_config *config = NULL;
        bl_status st =
            bl_train_config_load(commands[i], fuzz_path("config.yaml"), 0, NULL, &config);
        fuzz_check(st);
        if (st == BL_OK) check_round_trip(commands[i], config);
        bl_train_config_free(config);
    }
    return 0;
}
