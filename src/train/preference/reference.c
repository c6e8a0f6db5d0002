/* SPDX-License-Identifier: Apache-2.0 */
/* reference.c -- sums of the reference in memory and in their file. */
#include "train/preference/reference.h"

#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "base/xxh3.h"

typedef struct header {
    char mark[16];
    XXH128_hash_t key;
    int64_t n;
    uint64_t checksum;
} header;
_Static_assert(sizeof(header) == 48 && sizeof BL_REFERENCE_MARK <= 16, "the layout of the file");

static int64_t count(const bl_reference_size *size)
{
    if (size->is_unpaired) return size->n_rows + 2 * size->n_validation + size->n_positions;
    return 2 * (size->n_rows + size->n_validation);
}

int64_t bl_reference_sums_bytes(const bl_reference_size *size)
{
    return count(size) * (int64_t)sizeof(double);
}

bl_status bl_reference_sums_create(const bl_reference_size *size, bl_reference_sums **out)
{
    int64_t n = count(size), per_row = size->is_unpaired ? 1 : 2;

    *out = NULL;
    bl_reference_sums *s = calloc(1, sizeof *s);
    if (!s) return BL_FAIL(BL_ENOMEM, "sums of the reference");
    *s = (bl_reference_sums){.size = *size, .n = n, .train = calloc((size_t)n + 1, sizeof(double))};
    if (!s->train) {
        free(s);
        return BL_FAIL(BL_ENOMEM, "%lld sums of the reference", (long long)n);
    }
    s->validation = s->train + per_row * size->n_rows;
    s->mismatched = s->validation + per_row * size->n_validation;
    s->validation_mismatched = s->mismatched + size->n_positions;
    *out = s;
    return BL_OK;
}

void bl_reference_sums_destroy(bl_reference_sums *s)
{
    if (!s) return;
    free(s->train);
    free(s);
}

static header describe(const char *key, const bl_reference_sums *s, const double *values)
{
    header h = {.mark = BL_REFERENCE_MARK,
                .key = XXH3_128bits(key, strlen(key)),
                .n = s->n,
                .checksum = XXH3_64bits(values, (size_t)s->n * sizeof *values)};
    return h;
}

/* bytes: a header, and what follows it. */
static bl_reference_found judge(const char *bytes, size_t n_bytes, const char *key,
                                bl_reference_sums *s)
{
    header found;

    if (n_bytes < sizeof found) return BL_REFERENCE_DAMAGED;
    memcpy(&found, bytes, sizeof found);
    const double *values = (const double *)(bytes + sizeof found);
    size_t n_sums = (n_bytes - sizeof found) / sizeof *values;
    if (memcmp(found.mark, (char[16]){BL_REFERENCE_MARK}, sizeof found.mark) != 0 ||
        (n_bytes - sizeof found) % sizeof *values != 0 || found.n != (int64_t)n_sums ||
        found.checksum != XXH3_64bits(values, n_sums * sizeof *values))
        return BL_REFERENCE_DAMAGED;
    header wanted = describe(key, s, values);
    if (found.n != s->n || !XXH128_isEqual(found.key, wanted.key)) return BL_REFERENCE_STALE;
    memcpy(s->train, values, n_sums * sizeof *values);
    return BL_REFERENCE_READ;
}

bl_status bl_reference_sums_read(const char *path, const char *key, bl_reference_sums *s,
                                 bl_reference_found *found)
{
    void *bytes;
    size_t n_bytes;
    bool exists;

    *found = BL_REFERENCE_ABSENT;
    BL_TRY(bl_path_exists(path, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_file_read_all(path, SIZE_MAX / 4, &bytes, &n_bytes));
    *found = judge(bytes, n_bytes, key, s);
    free(bytes);
    return BL_OK;
}

bl_status bl_reference_sums_write(const char *path, const char *key, const bl_reference_sums *s)
{
    bl_writer *writer;
    header h = describe(key, s, s->train);

    BL_TRY(bl_writer_open(path, &writer));
    bl_status st = bl_writer_append(writer, &h, sizeof h);
    if (st == BL_OK) st = bl_writer_append(writer, s->train, (size_t)s->n * sizeof *s->train);
    if (st == BL_OK) return bl_writer_commit(writer);
    bl_writer_abort(writer);
    return st;
}
