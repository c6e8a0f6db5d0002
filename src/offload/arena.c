/* SPDX-License-Identifier: Apache-2.0 */
/* arena.c -- allocates, touches and pins the block, and gives out its pieces. Under
 * AddressSanitizer what has not been taken is poisoned, the rest of a piece's last page
 * included. */
#include "offload/arena.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "offload/arena_internal.h"
#include "offload/transfer.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAS_POISON 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_POISON 1
#endif
#endif
#ifdef HAS_POISON
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, size_bytes)   ((void)(memory), (void)(size_bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, size_bytes) ((void)(memory), (void)(size_bytes))
#endif

enum {
    HUGE_PAGE_BYTES = 2 << 20,
    /* an item of the threads: many huge pages, and enough items of a large arena to share */
    TOUCH_BYTES = 32 << 20,
    TOUCH_THREADS = 4, /* of a device that has none: the kernel clears about 10 GB/s in each */
    TOUCH_ITEMS = 256, /* at a time: a second or two, then progress is printed */
};

struct bl_arena {
    bl_device *device;
    char *memory;
    size_t size_bytes, taken_bytes;
    int node;
    bool is_pinned;
};

size_t bl_arena_piece_bytes(size_t n_bytes)
{
    size_t sum;
    if (bl_add_overflows(n_bytes, BL_DEVICE_ALIGNMENT_BYTES - 1, &sum)) return SIZE_MAX;
    return sum - sum % BL_DEVICE_ALIGNMENT_BYTES;
}

/* ---- the block ---- */

/* Whole pages that begin at a huge page's boundary: elsewhere the parts of huge pages at both ends
 * would stay small pages. What was mapped in excess to find the boundary is given back. */
static char *map_pages(size_t size_bytes)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE), mapped_bytes;
    if (bl_add_overflows(size_bytes, HUGE_PAGE_BYTES + page_bytes, &mapped_bytes)) return NULL;
    size_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
    mapped_bytes = size_bytes + HUGE_PAGE_BYTES;
    char *mapped =
        mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    size_t before = -(uintptr_t)mapped % HUGE_PAGE_BYTES, after = HUGE_PAGE_BYTES - before;
    if (before > 0) munmap(mapped, before);
    munmap(mapped + before + size_bytes, after);
    madvise(mapped + before, size_bytes, MADV_HUGEPAGE); /* a hint: may fail */
    return mapped + before;
}

/* The part of the arena that is touched from `first` on. */
typedef struct touched {
    const bl_arena *arena;
    int64_t first; /* item */
} touched;

static void touch_range(void *arg, int64_t index, void *scratch)
{
    const touched *t = arg;
    const bl_arena *arena = t->arena;
    size_t begin = (size_t)(t->first + index) * TOUCH_BYTES, end = arena->size_bytes;

    (void)scratch;
    if (end - begin > TOUCH_BYTES) end = begin + TOUCH_BYTES;
    for (size_t i = begin; i < end; i += BL_DEVICE_ALIGNMENT_BYTES)
        ((volatile char *)arena->memory)[i] = 0;
}

static bl_status touch(bl_arena *arena, const char *what)
{
    int64_t n_items = bl_ceil_div((int64_t)arena->size_bytes, TOUCH_BYTES);
    bl_pool *pool = bl_device_pool(arena->device), *own = NULL;
    double told_s = bl_now_s();
    bool has_told = false;

    if (!pool) {
        BL_TRY(bl_pool_create((int)bl_min_i64(bl_max_i64(n_items, 1), TOUCH_THREADS), &own));
        pool = own;
    }
    for (touched t = {arena, 0}; t.first < n_items; t.first += TOUCH_ITEMS) {
        bl_pool_run(pool, bl_min_i64(TOUCH_ITEMS, n_items - t.first), touch_range, &t);
        has_told |=
            bl_log_advance(&told_s, "%s: taking host memory, %.1f of %.1f GB", what,
                           (double)t.first * TOUCH_BYTES * 1e-9, (double)arena->size_bytes * 1e-9);
    }
    if (has_told) bl_log_progress("%s", "");
    bl_pool_destroy(own);
    return BL_OK;
}

/* A GPU copies from unpinned memory through a buffer of the driver, while the calling thread waits:
 * what should overlap would not. The CPU only loses the guarantee that nothing is swapped out. */
static bl_status pin(bl_arena *arena, const bl_arena_options *options)
{
    bl_status st = bl_device_pin(arena->device, arena->memory, arena->size_bytes);

    arena->is_pinned = st == BL_OK;
    if (st == BL_OK) return BL_OK;
    if (st != BL_ELIMIT || !bl_device_host_writes(arena->device))
        return bl_error_prefix(st, "%s", options->what);
    bl_log_warning("%s: %s; it stays unpinned, copies are slower", options->what, bl_error_text());
    return BL_OK;
}

/* Before a page is touched: afterwards the system would end a process instead of saying that there
 * is too little. */
static bl_status check_available(const bl_arena_options *options)
{
    int64_t available = bl_memory_available_bytes();

    if (available < 0 || options->size_bytes <= (size_t)available) return BL_OK;
    return BL_FAIL(BL_ENOMEM, "%s: %zu bytes of host memory are needed, %" PRId64 " are available",
                   options->what, options->size_bytes, available);
}

/* Addresses, which the device counts. */
static bl_status create_simulated(const bl_arena_options *options, bl_arena **out)
{
    size_t n_bytes = bl_arena_piece_bytes(options->size_bytes);
    bl_arena *arena = calloc(1, sizeof *arena);
    void *memory;

    if (!arena) return BL_FAIL(BL_ENOMEM, "%s: an arena", options->what);
    bl_status st = bl_device_alloc(options->device, BL_SPACE_HOST, n_bytes, options->what, &memory);
    if (st != BL_OK) {
        free(arena);
        return st;
    }
    *arena =
        (bl_arena){.device = options->device, .memory = memory, .size_bytes = n_bytes, .node = -1};
    *out = arena;
    return BL_OK;
}

bl_status bl_arena_create(const bl_arena_options *options, bl_arena **out)
{
    bl_status st = BL_OK;
    bl_arena *arena = NULL;

    *out = NULL;
    if (bl_transfer_is_simulated(options->device)) return create_simulated(options, out);
    BL_TRY(check_available(options));
    if (!(arena = calloc(1, sizeof *arena)))
        return BL_FAIL(BL_ENOMEM, "%s: an arena", options->what);
    *arena = (bl_arena){.device = options->device,
                        .size_bytes = bl_arena_piece_bytes(options->size_bytes),
                        .node = -1};
    /* An empty arena has a page, so that it has an address. */
    if (arena->size_bytes == 0) arena->size_bytes = BL_DEVICE_ALIGNMENT_BYTES;
    if (!(arena->memory = map_pages(arena->size_bytes))) {
        st = BL_FAIL(BL_ENOMEM,
                     "%s: the system refused %zu bytes of host memory, %" PRId64 " are available",
                     options->what, arena->size_bytes, bl_memory_available_bytes());
        goto done;
    }
    BL_TRY_GOTO(st, done,
                bl_arena_bind_memory(arena->memory, arena->size_bytes, options->node, options->what,
                                     &arena->node));
    BL_TRY_GOTO(st, done, touch(arena, options->what));
    if (options->pin) BL_TRY_GOTO(st, done, pin(arena, options));
    ASAN_POISON_MEMORY_REGION(arena->memory, arena->size_bytes);
    *out = arena;
    arena = NULL;
done:
    bl_arena_destroy(arena);
    return st;
}

void bl_arena_destroy(bl_arena *arena)
{
    if (!arena) return;
    if (bl_transfer_is_simulated(arena->device)) {
        bl_device_free(arena->device, BL_SPACE_HOST, arena->memory);
        free(arena);
        return;
    }
    if (arena->is_pinned) bl_device_unpin(arena->device, arena->memory, arena->size_bytes);
    if (arena->memory) {
        ASAN_UNPOISON_MEMORY_REGION(arena->memory, arena->size_bytes);
        munmap(arena->memory, arena->size_bytes);
    }
    free(arena);
}

void *bl_arena_take(bl_arena *arena, size_t n_bytes)
{
    size_t piece_bytes = bl_arena_piece_bytes(n_bytes);

    if (piece_bytes > arena->size_bytes - arena->taken_bytes) return NULL;
    char *piece = arena->memory + arena->taken_bytes;
    arena->taken_bytes += piece_bytes;
    assert(arena->taken_bytes <= arena->size_bytes &&
           arena->taken_bytes % BL_DEVICE_ALIGNMENT_BYTES == 0);
    /* a simulated arena is addresses alone, and its shadow would be memory */
    if (!bl_transfer_is_simulated(arena->device)) ASAN_UNPOISON_MEMORY_REGION(piece, n_bytes);
    return piece;
}

/* ---- what became of it ---- */

/* AnonHugePages of the mappings that hold the block. A mapping may be larger than the block, so its
 * part is at most the overlap. */
static size_t read_huge_bytes(uintptr_t begin, uintptr_t end)
{
    char line[512];
    size_t total = 0, overlap = 0, from, to, kib;
    FILE *file = fopen("/proc/self/smaps", "r");

    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%zx-%zx ", &from, &to) == 2) {
            from = from > begin ? from : begin;
            to = to < end ? to : end;
            overlap = from < to ? to - from : 0;
        } else if (sscanf(line, "AnonHugePages: %zu kB", &kib) == 1) {
            total += kib * 1024 < overlap ? kib * 1024 : overlap;
        }
    }
    fclose(file);
    return total;
}

void bl_arena_get_info(const bl_arena *arena, bl_arena_info *out)
{
    uintptr_t begin = (uintptr_t)arena->memory;

    *out = (bl_arena_info){.size_bytes = arena->size_bytes,
                           .taken_bytes = arena->taken_bytes,
                           .huge_bytes = read_huge_bytes(begin, begin + arena->size_bytes),
                           .node = arena->node,
                           .is_pinned = arena->is_pinned};
}

void *bl_arena_memory(const bl_arena *arena)
{
    return arena->memory;
}
