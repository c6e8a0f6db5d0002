/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint of one file: manifest.json and the file "data". The manifest's checksum of itself is
 * corrected where it is JSON, so that inputs get past its check. First byte 'r': it is kept
 * unchanged. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/files.h"
#include "fuzz.h"
#include "store/checkpoint.h"

/* store/checkpoint.c: XXH3-64 of the compact dump without the key. */
static char *with_checksum(fuzz_part manifest)
{
    char text[17];
    json_t *root =
        json_loadb((const char *)manifest.bytes, manifest.n_bytes, JSON_REJECT_DUPLICATES, NULL);

    if (!json_is_object(root)) {
        json_decref(root);
        return NULL;
    }
    json_object_del(root, "xxh3_64");
    char *dump = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);
    if (!dump) abort();
    snprintf(text, sizeof text, "%016" PRIx64, (uint64_t)XXH3_64bits(dump, strlen(dump)));
    free(dump);
    json_object_set_new(root, "xxh3_64", json_string(text));
    dump = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return dump;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    const fuzz_part nothing = {(const uint8_t *)"", 0};
    int64_t step = -1;
    json_t *state = NULL;
    char *path = NULL;

    bool is_raw = fuzz_byte(&input) == 'r';
    fuzz_part manifest = fuzz_next(&input), data = fuzz_next(&input);
    char *fixed = is_raw ? NULL : with_checksum(manifest);
    if (fixed) manifest = (fuzz_part){(const uint8_t *)fixed, strlen(fixed)};
    fuzz_check(bl_dir_create(fuzz_path("run/step-7")));
    fuzz_write("run/step-7/manifest.json", manifest.bytes ? manifest : nothing);
    fuzz_write("run/step-7/data", data);
    free(fixed);

    bl_status st = bl_checkpoint_verify(fuzz_path("run/step-7"), &step, &state);
    fuzz_check(st);
    if (st == BL_OK && (step < 0 || !json_is_object(state))) abort();
    json_decref(state);
    fuzz_check(bl_checkpoint_latest(fuzz_path("run"), &path, &step, &state));
    if ((path != NULL) != (st == BL_OK)) abort();
    if (path) json_decref(state);
    free(path);
    return 0;
}
