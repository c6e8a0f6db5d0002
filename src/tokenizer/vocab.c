/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary (strings by id, ids by string) and the merges (token pairs): two open-addressing
 * tables that are filled at load time and only read afterwards. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/sizes.h"
#include "tokenizer/internal.h"

static bl_status grow_ids(bl_strings *strings, size_t n_ids)
{
    size_t n = strings->n_ids ? strings->n_ids : 256;
    while (n < n_ids) n *= 2;
    uint32_t *offset = realloc(strings->offset, n * sizeof *offset);
    if (!offset) return BL_FAIL(BL_ENOMEM, "vocabulary of %zu ids", n);
    strings->offset = offset;
    int32_t *n_bytes = realloc(strings->n_bytes, n * sizeof *n_bytes);
    if (!n_bytes) return BL_FAIL(BL_ENOMEM, "vocabulary of %zu ids", n);
    strings->n_bytes = n_bytes;
    for (size_t i = strings->n_ids; i < n; i++) n_bytes[i] = -1;
    strings->n_ids = n;
    return BL_OK;
}

/* The slot that holds `text`, or the empty one where it belongs. */
static size_t find_slot(const bl_strings *strings, const char *text, size_t n_bytes)
{
    size_t i = (size_t)XXH3_64bits(text, n_bytes) & (strings->n_slots - 1);

    while (strings->slot[i]) {
        uint32_t id = strings->slot[i] - 1;
        if ((size_t)strings->n_bytes[id] == n_bytes &&
            !memcmp(strings->text.data + strings->offset[id], text, n_bytes))
            break;
        i = (i + 1) & (strings->n_slots - 1);
    }
    return i;
}

static bl_status grow_slots(bl_strings *strings)
{
    uint32_t *old = strings->slot;
    size_t n_old = strings->n_slots;

    strings->n_slots = n_old ? 2 * n_old : 512;
    if (!(strings->slot = calloc(strings->n_slots, sizeof *strings->slot))) {
        strings->slot = old;
        strings->n_slots = n_old;
        return BL_FAIL(BL_ENOMEM, "vocabulary table of %zu slots", 2 * n_old);
    }
    for (size_t i = 0; i < n_old; i++) {
        if (!old[i]) continue;
        uint32_t id = old[i] - 1;
        strings->slot[find_slot(strings, strings->text.data + strings->offset[id],
                                (size_t)strings->n_bytes[id])] = old[i];
    }
    free(old);
    return BL_OK;
}

bl_status bl_strings_set(bl_strings *strings, int32_t id, const char *text, size_t n_bytes)
{
    if ((size_t)id >= strings->n_ids) BL_TRY(grow_ids(strings, (size_t)id + 1));
    if (2 * (strings->n_used + 1) > strings->n_slots) BL_TRY(grow_slots(strings));
    if (strings->text.n + n_bytes + 1 > INT32_MAX)
        return BL_FAIL(BL_EINPUT, "vocabulary of more than 2 GiB of text");
    size_t offset = strings->text.n;
    BL_TRY(bl_bytes_append(&strings->text, text, n_bytes));
    BL_TRY(bl_bytes_append(&strings->text, "", 1));
    size_t slot = find_slot(strings, text, n_bytes);
    strings->offset[id] = (uint32_t)offset;
    strings->n_bytes[id] = (int32_t)n_bytes;
    strings->slot[slot] = (uint32_t)id + 1;
    strings->n_used++;
    return BL_OK;
}

int32_t bl_strings_find(const bl_strings *strings, const char *text, size_t n_bytes)
{
    return strings->n_slots ? (int32_t)strings->slot[find_slot(strings, text, n_bytes)] - 1 : -1;
}

const char *bl_strings_get(const bl_strings *strings, int32_t id, size_t *n_bytes)
{
    if (id < 0 || (size_t)id >= strings->n_ids || strings->n_bytes[id] < 0) return NULL;
    if (n_bytes) *n_bytes = (size_t)strings->n_bytes[id];
    return strings->text.data + strings->offset[id];
}

void bl_strings_free(bl_strings *strings)
{
    bl_bytes_free(&strings->text);
    free(strings->offset);
    free(strings->n_bytes);
    free(strings->slot);
    *strings = (bl_strings){0};
}

/* ---- merges ---- */

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static size_t merge_slot(const bl_merges *merges, uint64_t pair)
{
    uint64_t mixed = pair * 0x9e3779b97f4a7c15u;
    size_t i = (size_t)(mixed ^ mixed >> 32) & (merges->n_slots - 1);

    while (merges->slot[i].pair != pair && merges->slot[i].pair != UINT64_MAX)
        i = (i + 1) & (merges->n_slots - 1);
    return i;
}

bl_status bl_merges_create(bl_merges *merges, size_t n)
{
    size_t n_slots = 16, n_bytes;

    while (n_slots < 2 * n) n_slots *= 2;
    if (bl_mul_overflows(n_slots, sizeof *merges->slot, &n_bytes) ||
        !(merges->slot = malloc(n_bytes)))
        return BL_FAIL(BL_ENOMEM, "table of %zu merges", n);
    memset(merges->slot, 0xff, n_bytes);
    merges->n_slots = n_slots;
    return BL_OK;
}

void bl_merges_set(bl_merges *merges, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    uint64_t pair = pair_of(left, right);
    merges->slot[merge_slot(merges, pair)] = (bl_merge){.pair = pair, .rank = rank, .id = id};
}

const bl_merge *bl_merges_find(const bl_merges *merges, int32_t left, int32_t right)
{
    const bl_merge *merge = &merges->slot[merge_slot(merges, pair_of(left, right))];
    return merge->pair == UINT64_MAX ? NULL : merge;
}

void bl_merges_free(bl_merges *merges)
{
    free(merges->slot);
    *merges = (bl_merges){0};
}
