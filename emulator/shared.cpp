/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory. Static variables are in a section of the program, which holds one block's at a
 * time: those of a cluster are swapped. Dynamic memory is an arena per block of a cluster, between
 * guards. */
#include <stdlib.h>

#include <vector>

#include "grid.h"
#include "lock.h"

enum {
    GUARD_BYTES = 1024, /* on both sides of the dynamic part, which is so aligned */
    POISON = 0xff       /* no number */
};

struct asynchronous_copy {
    char *dst;
    const char *src;
    size_t bytes, n_valid;
    unsigned group;
    emulated_place place; /* dst's */
};

struct copies {
    std::vector<asynchronous_copy> on_their_way;
    unsigned n_committed;
};

extern char __start_emulated_shared[], __stop_emulated_shared[];
__shared__ char emulated_section_exists[1]; /* whatever is linked */

static std::vector<char> images[EMULATED_CLUSTER_MAX];
static char *arenas[EMULATED_CLUSTER_MAX];
static copies copies_of[EMULATED_CLUSTER_MAX][EMULATED_THREADS_MAX];
static unsigned n_on_their_way; /* of the cluster */
static bool has_groups;         /* some n_committed is not 0 */
static std::vector<unsigned char> is_pending[EMULATED_CLUSTER_MAX]
                                            [2]; /* bytes of static and dynamic memory */

size_t emulated_section_bytes()
{
    return (size_t)(__stop_emulated_shared - __start_emulated_shared);
}

static char *dynamic_of(unsigned rank)
{
    return arenas[rank] + GUARD_BYTES;
}

/* ---- a cluster's life ---- */

void emulated_shared_begin()
{
    const size_t arena_bytes = EMULATED_SHARED_MAX + 2 * GUARD_BYTES;
    for (unsigned rank = 0; rank < emulated_now.n_ranks; rank++) {
        if (!arenas[rank]) arenas[rank] = (char *)aligned_alloc(GUARD_BYTES, arena_bytes);
        memset(arenas[rank], POISON, emulated_now.grid.shared_bytes + 2 * GUARD_BYTES);
        if (emulated_now.n_ranks > 1) images[rank].assign(emulated_section_bytes(), (char)POISON);
    }
    if (has_groups)
        for (auto &of_block : copies_of)
            for (copies &of_thread : of_block) of_thread.n_committed = 0;
    has_groups = false;
    if (emulated_now.n_ranks == 1)
        memset(__start_emulated_shared, POISON, emulated_section_bytes());
}

void emulated_shared_enter()
{
    if (emulated_now.n_ranks > 1)
        memcpy(__start_emulated_shared, images[emulated_now.rank].data(), emulated_section_bytes());
}

/* Of a guard; its bytes are all the same where neighbors are. */
static bool is_poison(const unsigned char *guard)
{
    return guard[0] == POISON && memcmp(guard, guard + 1, GUARD_BYTES - 1) == 0;
}

void emulated_shared_leave()
{
    size_t bytes = emulated_now.grid.shared_bytes;
    const unsigned char *before = (unsigned char *)arenas[emulated_now.rank],
                        *behind = before + GUARD_BYTES + bytes;
    bool is_intact = is_poison(before) && is_poison(behind);
    for (int i = 0; i < GUARD_BYTES && !is_intact; i++) {
        if (before[i] != POISON)
            emulated_give_up("writes %d bytes before its dynamic shared memory", GUARD_BYTES - i);
        if (behind[i] != POISON)
            emulated_give_up("writes byte %zu of %zu bytes of dynamic shared memory",
                             bytes + (size_t)i, bytes);
    }
    if (emulated_now.n_ranks > 1)
        memcpy(images[emulated_now.rank].data(), __start_emulated_shared, emulated_section_bytes());
}

/* ---- places ---- */

void *emulated_dynamic_shared()
{
    return dynamic_of(emulated_now.rank);
}

emulated_place emulated_find_place(const char *p)
{
    if (p >= __start_emulated_shared && p < __stop_emulated_shared)
        return {true, false, emulated_now.rank, (size_t)(p - __start_emulated_shared)};
    for (unsigned rank = 0; rank < emulated_now.n_ranks; rank++) {
        const char *arena = arenas[rank], *image = images[rank].data();
        size_t arena_bytes = emulated_now.grid.shared_bytes + 2 * GUARD_BYTES;
        if (p >= arena && p < arena + arena_bytes)
            return {true, true, rank, (size_t)(p - dynamic_of(rank))};
        if (emulated_now.n_ranks > 1 && p >= image && p < image + emulated_section_bytes())
            return {true, false, rank, (size_t)(p - image)};
    }
    return {};
}

void *emulated_map_shared(void *mine, unsigned rank)
{
    emulated_place place = emulated_find_place((char *)mine);
    if (rank >= emulated_now.n_ranks)
        emulated_give_up("block %u of a cluster of %u", rank, emulated_now.n_ranks);
    if (!place.is_shared || place.rank != emulated_now.rank)
        emulated_give_up("%p is not in its shared memory", mine);
    if (rank == emulated_now.rank) return mine;
    return (place.is_dynamic ? dynamic_of(rank) : images[rank].data()) + place.offset;
}

/* ---- asynchronous copies ---- */

static void set_pending(const emulated_place &place, size_t bytes, bool value)
{
    n_on_their_way += value ? 1 : -1u;
    if (!emulated_is_checked()) return; /* nothing reads them */
    auto &pending = is_pending[place.rank][place.is_dynamic];
    pending.resize(place.is_dynamic ? (size_t)EMULATED_SHARED_MAX : emulated_section_bytes());
    std::fill_n(pending.begin() + (ptrdiff_t)place.offset, bytes, value);
}

static copies *my_copies()
{
    return &copies_of[emulated_now.rank][emulated_now.thread];
}

void emulated_copy_async(void *dst, const void *src, size_t bytes, size_t n_valid)
{
    if (bytes != 4 && bytes != 8 && bytes != 16)
        emulated_give_up("an asynchronous copy of %zu bytes", bytes);
    if (n_valid > bytes) emulated_give_up("%zu of %zu bytes of a copy", n_valid, bytes);
    if ((uintptr_t)dst % bytes != 0 || (uintptr_t)src % bytes != 0)
        emulated_give_up("an asynchronous copy of %zu bytes from %p to %p is not aligned", bytes,
                         src, dst);
    emulated_place place = emulated_find_place((char *)dst);
    if (!place.is_shared || place.rank != emulated_now.rank ||
        (place.is_dynamic && (ptrdiff_t)place.offset < 0) ||
        (place.is_dynamic && place.offset + bytes > emulated_now.grid.shared_bytes))
        emulated_give_up("an asynchronous copy to %p, which is not in its shared memory", dst);
    const void *pc = __builtin_return_address(0);
    if (n_valid > 0) emulated_tell(src, n_valid, false, pc);
    emulated_tell(dst, bytes, true, pc);
    unseen_work unseen;
    memset(dst, POISON, bytes);
    my_copies()->on_their_way.push_back(
        {(char *)dst, (const char *)src, bytes, n_valid, my_copies()->n_committed, place});
    set_pending(place, bytes, true);
}

void emulated_copy_async_commit()
{
    has_groups = true;
    my_copies()->n_committed++;
}

/* Those of groups below `n_groups` arrive. */
static void land_copies(unsigned n_groups, const void *pc)
{
    unseen_work unseen;
    auto &all = my_copies()->on_their_way;
    size_t n_left = 0;
    for (const asynchronous_copy &copy : all) {
        if (copy.group >= n_groups) {
            all[n_left++] = copy;
            continue;
        }
        set_pending(copy.place, copy.bytes, false);
        memcpy(copy.dst, copy.src, copy.n_valid);
        memset(copy.dst + copy.n_valid, 0, copy.bytes - copy.n_valid);
        emulated_tell(copy.dst, copy.bytes, true, pc);
    }
    all.resize(n_left);
}

void emulated_copy_async_wait(unsigned n_left)
{
    unsigned n_committed = my_copies()->n_committed;
    if (n_committed > n_left) land_copies(n_committed - n_left, __builtin_return_address(0));
}

void emulated_copy_async_wait_all()
{
    has_groups = true;
    land_copies(++my_copies()->n_committed, __builtin_return_address(0));
}

void emulated_shared_check_copies_end()
{
    if (n_on_their_way > 0 && !my_copies()->on_their_way.empty())
        emulated_give_up("ends before its asynchronous copies have arrived");
}

bool emulated_is_pending(const emulated_place &place, size_t bytes)
{
    if (n_on_their_way == 0) return false;
    const auto &pending = is_pending[place.rank][place.is_dynamic];
    for (size_t i = place.offset; i < place.offset + bytes && i < pending.size(); i++)
        if (pending[i]) return true;
    return false;
}
