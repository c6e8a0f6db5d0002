/* SPDX-License-Identifier: Apache-2.0 */
/* A page file of two pages: its list, and the bytes in front of its seal. The seal is corrected
 * where the list is JSON, so that inputs get past its check. First byte 'r': no seal is added. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "fuzz.h"
#include "offload/pages.h"

enum { N_PAGES = 2, SEAL_AT = 3 * BL_IO_ALIGN_BYTES, FILE_BYTES = SEAL_AT + BL_IO_ALIGN_BYTES };

/* offload/page_file.c: XXH3-64 of the compact dump. */
static void put_seal(fuzz_part list, char *seal)
{
    json_t *root = json_loadb((const char *)list.bytes, list.n_bytes,
                              JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    char *dump = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);

    if (dump)
        snprintf(seal, BL_IO_ALIGN_BYTES, "ballast-pages-2 %016" PRIx64 "\n",
                 (uint64_t)XXH3_64bits(dump, strlen(dump)));
    free(dump);
    json_decref(root);
}

static bl_device *the_device(void)
{
    static bl_device *device;

    if (device) return device;
    bl_log_set_silent(true);
    if (bl_device_create_cpu(1, &device) != BL_OK) abort();
    return device;
}

static bl_staging *the_staging(void)
{
    static bl_staging *staging;

    if (!staging && bl_staging_create(the_device(), 4096, "pages", &staging) != BL_OK) abort();
    return staging;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static const bl_page_spec specs[N_PAGES] = {{"a", 5000, BL_TIER_DISK}, {"b", 1, BL_TIER_DISK}};
    static char file[FILE_BYTES], found[5000];
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_pages *pages;

    bool is_raw = fuzz_byte(&input) == 'r';
    fuzz_part list = fuzz_next(&input), data = fuzz_next(&input);
    memset(file, 0, sizeof file);
    if (data.n_bytes > 0) memcpy(file, data.bytes, data.n_bytes < SEAL_AT ? data.n_bytes : SEAL_AT);
    if (!is_raw && list.bytes) put_seal(list, file + SEAL_AT);
    fuzz_write("base-0000000000001234-0-of-1.json", list);
    fuzz_write("base-0000000000001234-0-of-1.pages",
               (fuzz_part){(const uint8_t *)file, sizeof file});

    const bl_pages_options options = {
        .device = the_device(), .node = -1, .dir = fuzz_folder(), .key = 0x1234, .n_shards = 1};
    bl_status st = bl_pages_create(&options, N_PAGES, specs, &pages);
    fuzz_check(st);
    if (st != BL_OK) abort(); /* whatever the list is, it can be written anew */
    for (int64_t i = 0; i < N_PAGES && bl_pages_has_disk(pages); i++) {
        int64_t offset = bl_pages_offset(pages, i);
        if (offset < 0 || offset % BL_IO_ALIGN_BYTES != 0 ||
            offset + (int64_t)specs[i].n_bytes > SEAL_AT)
            abort();
        st = bl_pages_read(pages, i, the_staging(), found);
        fuzz_check(st);
        if (st == BL_OK && memcmp(found, file + offset, specs[i].n_bytes) != 0) abort();
    }
    bl_pages_destroy(pages);
    return 0;
}
