/* SPDX-License-Identifier: Apache-2.0 */
/* json_memory.c -- jansson's allocator: a set of the blocks of the current parse, freed together
 * when memory runs out. */
#include "base/json_memory_internal.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* Blocks that a small document needs; the table of a row of text is not on the heap. */
enum { OWN_SLOTS = 128 };

/* A set of pointers: open addressing with linear probing, never more than half full. */
typedef struct block_set {
    void **slots;
    size_t n_slots, n_blocks; /* n_slots is a power of two */
    void *own[OWN_SLOTS];
} block_set;

typedef struct parse {
    block_set blocks; /* what this parse allocated and has not freed */
    jmp_buf ran_out;
} parse;

static _Thread_local bool ran_out;
static _Thread_local parse *running; /* NULL outside a parse */

/* ---- the set ---- */

static size_t first_slot(const block_set *set, const void *block)
{
    return (size_t)(((uintptr_t)block >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 32) &
           (set->n_slots - 1);
}

static size_t find_slot(const block_set *set, const void *block)
{
    size_t i = first_slot(set, block);

    while (set->slots[i] && set->slots[i] != block) i = (i + 1) & (set->n_slots - 1);
    return i;
}

static void free_slots(block_set *set)
{
    if (set->slots != set->own) free(set->slots);
}

static bool grow(block_set *set)
{
    block_set larger = {.n_slots = 2 * set->n_slots, .n_blocks = set->n_blocks};

    larger.slots = calloc(larger.n_slots, sizeof *larger.slots);
    if (!larger.slots) return false;
    for (size_t i = 0; i < set->n_slots; i++)
        if (set->slots[i]) larger.slots[find_slot(&larger, set->slots[i])] = set->slots[i];
    free_slots(set);
    set->slots = larger.slots;
    set->n_slots = larger.n_slots;
    return true;
}

static bool add(block_set *set, void *block)
{
    if (2 * set->n_blocks >= set->n_slots && !grow(set)) return false;
    set->slots[find_slot(set, block)] = block;
    set->n_blocks++;
    return true;
}

/* The slots after the one that becomes empty move up where their block would no longer be found. */
static void take_out(block_set *set, const void *block)
{
    size_t mask = set->n_slots - 1, hole = find_slot(set, block);

    if (!set->slots[hole]) return; /* another parse's */
    set->n_blocks--;
    for (size_t i = (hole + 1) & mask; set->slots[i]; i = (i + 1) & mask) {
        size_t wanted = first_slot(set, set->slots[i]);
        if (((i - wanted) & mask) < ((i - hole) & mask)) continue;
        set->slots[hole] = set->slots[i];
        hole = i;
    }
    set->slots[hole] = NULL;
}

/* ---- jansson's functions ---- */

void *bl_json_malloc(size_t n_bytes)
{
    void *memory = malloc(n_bytes);

    if (memory && running && !add(&running->blocks, memory)) {
        free(memory);
        memory = NULL;
    }
    if (memory) return memory;
    ran_out = true;
    if (running) longjmp(running->ran_out, 1);
    return NULL;
}

static void watched_free(void *memory)
{
    if (memory && running) take_out(&running->blocks, memory);
    free(memory);
}

static void set_allocator(void)
{
    json_set_alloc_funcs(bl_json_malloc, watched_free);
}

void bl_json_watch_memory(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_allocator);
    ran_out = false;
}

bool bl_json_ran_out(void)
{
    return ran_out;
}

/* ---- a parse ---- */

static void free_blocks(block_set *set)
{
    for (size_t i = 0; i < set->n_slots; i++) free(set->slots[i]);
}

json_t *bl_json_loadb(const char *text, size_t n_bytes, size_t flags, json_error_t *error)
{
    parse this = {.blocks = {.n_slots = OWN_SLOTS}};
    json_t *volatile document = NULL;

    this.blocks.slots = this.blocks.own;
    running = &this;
    if (setjmp(this.ran_out) == 0)
        document = json_loadb(text, n_bytes, flags, error);
    else
        free_blocks(&this.blocks);
    running = NULL;
    free_slots(&this.blocks);
    return document;
}
