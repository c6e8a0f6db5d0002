/* SPDX-License-Identifier: Apache-2.0 */
/* spill.c -- entry e is in slot e mod n_slots; a transfer stream moves entries to host memory and
 * back in stack order. */
#include "offload/spill.h"

#include <assert.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "offload/transfer.h"

enum { NO_ENTRY = -1 };

typedef enum slot_state { EMPTY, OPEN, KEPT, COMING, TAKEN } slot_state;

typedef struct spill_slot {
    char *memory;
    slot_state state;
    int64_t entry;   /* whose bytes are or will be here, or NO_ENTRY */
    bool is_moving;  /* compute has not waited for `moved` since it was recorded */
    bl_event *moved; /* at the end of the last transfer */
} spill_slot;

struct bl_spill {
    bl_spill_options options;
    int64_t n_rows; /* of each entry, in this round */
    bool keep;
    bool is_falling;     /* an entry has been taken in this round */
    int64_t top;         /* entries put and not dropped */
    int64_t n_out;       /* entries copied out in this round: 0..n_out - 1 */
    int64_t first_taken; /* entries before it are not taken in this round */
    bl_mover mover;      /* both ways on `copy` */
    spill_slot *slots;
    size_t *host_offset; /* [n_host] */
};

static spill_slot *slot_of(const bl_spill *spill, int64_t entry)
{
    return &spill->slots[entry % spill->options.n_slots];
}

static size_t entry_bytes(const bl_spill_options *o, int64_t entry)
{
    return (size_t)o->n_rows * o->row_bytes(o->user, entry);
}

/* Of the largest of its entries. */
static size_t slot_bytes(const bl_spill_options *o, int64_t slot)
{
    size_t most = 0;
    for (int64_t e = slot; e < o->n_entries; e += o->n_slots)
        if (entry_bytes(o, e) > most) most = entry_bytes(o, e);
    return most;
}

bl_spill_bytes bl_spill_measure(const bl_spill_options *o)
{
    bl_spill_bytes n = {0, 0};

    for (int64_t s = 0; s < o->n_slots; s++) n.slots += slot_bytes(o, s);
    for (int64_t e = 0; e < o->n_host; e++) n.host += entry_bytes(o, e);
    return n;
}

/* Slots and host copies, one after the other. */
static void place(bl_spill *spill)
{
    const bl_spill_options *o = &spill->options;
    size_t at = 0;

    for (int64_t s = 0; s < o->n_slots; at += slot_bytes(o, s++))
        spill->slots[s].memory = (char *)o->slots + at;
    at = 0;
    for (int64_t e = 0; e < o->n_host; at += entry_bytes(o, e++)) spill->host_offset[e] = at;
}

bl_status bl_spill_create(const bl_spill_options *options, bl_spill **out)
{
    bl_status st = BL_OK;
    const bl_spill_options *o = options;

    *out = NULL;
    if (o->n_slots < 1 || o->n_slots > o->n_entries || o->n_host > o->n_entries ||
        (o->n_host > 0 &&
         (o->n_host < o->n_entries - o->n_slots || !o->copy || o->copy == o->compute)))
        return BL_FAIL(BL_EINTERNAL, "a spill of %lld entries, %lld slots, %lld in host memory",
                       (long long)o->n_entries, (long long)o->n_slots, (long long)o->n_host);
    bl_spill *spill = calloc(1, sizeof *spill);
    if (!spill) return BL_FAIL(BL_ENOMEM, "a spill");
    spill->options = *o;
    spill->mover =
        (bl_mover){.device = o->device, .in = o->copy, .out = o->copy, .timeline = o->timeline};
    spill->slots = calloc((size_t)o->n_slots, sizeof *spill->slots);
    spill->host_offset = calloc((size_t)o->n_host + 1, sizeof *spill->host_offset);
    if (!spill->slots || !spill->host_offset) {
        st = BL_FAIL(BL_ENOMEM, "a spill of %lld slots", (long long)o->n_slots);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_mover_open(&spill->mover));
    for (int64_t s = 0; s < o->n_slots; s++) {
        spill->slots[s].entry = NO_ENTRY;
        BL_TRY_GOTO(st, done, bl_event_create(o->device, &spill->slots[s].moved));
    }
    place(spill);
    *out = spill;
    spill = NULL;
done:
    bl_spill_destroy(spill);
    return st;
}

void bl_spill_destroy(bl_spill *spill)
{
    if (!spill) return;
    bl_mover_close(&spill->mover);
    for (int64_t s = 0; spill->slots && s < spill->options.n_slots; s++)
        bl_event_destroy(spill->slots[s].moved);
    free(spill->slots);
    free(spill->host_offset);
    free(spill);
}

static bl_status broken(int64_t s, const spill_slot *slot, const char *invariant)
{
    return BL_FAIL(BL_EINTERNAL, "spill: slot %lld with entry %lld: %s", (long long)s,
                   (long long)slot->entry, invariant);
}

bl_status bl_spill_validate(const bl_spill *spill)
{
    const bl_spill_options *o = &spill->options;
    int64_t n_open = 0;

    for (int64_t s = 0; s < o->n_slots; s++) {
        const spill_slot *slot = &spill->slots[s];
        if (slot->entry == NO_ENTRY ? slot->state != EMPTY
                                    : slot->entry % o->n_slots != s || slot->entry >= o->n_entries)
            return broken(s, slot, "is not its place");
        if (slot->state == OPEN && (slot->entry != spill->top || spill->is_falling))
            return broken(s, slot, "open, but not the next");
        if (slot->state == TAKEN && slot->entry != spill->top - 1)
            return broken(s, slot, "taken, but not the newest");
        if (slot->state == COMING && !spill->is_falling)
            return broken(s, slot, "comes back before the first take");
        n_open += slot->state == OPEN;
    }
    if (!spill->keep) return BL_OK;
    int64_t first = spill->top + n_open - o->n_slots; /* of those in slots */
    if (first > spill->n_out)
        return BL_FAIL(BL_EINTERNAL, "spill: entry %lld lies nowhere", (long long)spill->n_out);
    for (int64_t e = bl_max_i64(first, spill->first_taken); e < spill->top; e++) {
        const spill_slot *slot = slot_of(spill, e);
        if (slot->entry != e || slot->state == EMPTY || slot->state == OPEN)
            return BL_FAIL(BL_EINTERNAL, "spill: entry %lld is not in its slot", (long long)e);
    }
    return BL_OK;
}

/* After each transition of a slot; in debug builds. */
static void check_state(const bl_spill *spill)
{
    assert(bl_spill_validate(spill) == BL_OK);
    (void)spill;
}

bl_status bl_spill_begin(bl_spill *spill, int64_t n_rows, bool keep)
{
    const bl_spill_options *o = &spill->options;

    if (n_rows > o->n_rows)
        return BL_FAIL(BL_EINTERNAL, "spill: %lld rows in entries of %lld", (long long)n_rows,
                       (long long)o->n_rows);
    if (keep && o->n_host < o->n_entries - o->n_slots)
        return BL_FAIL(BL_EINTERNAL, "spill: %lld slots cannot keep %lld entries",
                       (long long)o->n_slots, (long long)o->n_entries);
    for (int64_t s = 0; s < o->n_slots;
         s++) { /* is_moving stays: a round that was given up may have left transfers in flight */
        spill->slots[s].state = EMPTY;
        spill->slots[s].entry = NO_ENTRY;
    }
    spill->n_rows = n_rows;
    spill->keep = keep;
    spill->is_falling = false;
    spill->top = spill->n_out = spill->first_taken = 0;
    check_state(spill);
    return BL_OK;
}

void bl_spill_take_from(bl_spill *spill, int64_t first)
{
    spill->first_taken = first;
}

void *bl_spill_at(const bl_spill *spill, int64_t entry)
{
    return slot_of(spill, entry)->memory;
}

static char *host_copy(const bl_spill *spill, int64_t entry)
{
    return (char *)spill->options.host + spill->host_offset[entry];
}

static bl_status wrong_entry(const bl_spill *spill, const char *verb, int64_t entry)
{
    return BL_FAIL(BL_EINTERNAL, "spill: %s of entry %lld with %lld of %lld on the stack", verb,
                   (long long)entry, (long long)spill->top, (long long)spill->options.n_entries);
}

/* Between the entry's slot and its host copy, after all that compute has been given so far. */
static bl_status transfer(bl_spill *spill, int64_t entry, bool out)
{
    const bl_spill_options *o = &spill->options;
    spill_slot *slot = slot_of(spill, entry);
    const bl_place device = {.tier = BL_TIER_DEVICE, .memory = slot->memory},
                   host = {.tier = BL_TIER_HOST, .memory = host_copy(spill, entry)};
    const bl_move t = {.from = out ? device : host,
                       .to = out ? host : device,
                       .n_bytes = (size_t)spill->n_rows * o->row_bytes(o->user, entry),
                       .lane = BL_LANE_ACTIVATIONS,
                       .name = out ? "out" : "back",
                       .unit = entry,
                       .item = o->item};

    if (t.n_bytes == 0) return BL_OK;
    slot->is_moving = true;
    return bl_transfer_queue(&spill->mover, &t, o->compute, slot->moved);
}

/* Compute continues when the slot's last transfer has ended. */
static bl_status wait_for_transfer(bl_spill *spill, int64_t entry)
{
    const bl_spill_options *o = &spill->options;
    spill_slot *slot = slot_of(spill, entry);

    if (o->copy) BL_TRY(bl_stream_status(o->copy));
    if (!slot->is_moving) return BL_OK;
    slot->is_moving = false;
    return bl_timeline_wait(o->timeline, BL_LANE_ACTIVATIONS, "wait", entry, o->item, o->compute,
                            slot->moved);
}

bl_status bl_spill_reserve(bl_spill *spill, int64_t entry)
{
    spill_slot *slot = slot_of(spill, entry);

    if (entry < 0 || entry != spill->top || entry >= spill->options.n_entries ||
        spill->is_falling || slot->state == OPEN)
        return wrong_entry(spill, "reserve", entry);
    BL_TRY(wait_for_transfer(spill, entry)); /* invariant 5 */
    slot->state = OPEN;
    slot->entry = entry;
    check_state(spill);
    return BL_OK;
}

bl_status bl_spill_put(bl_spill *spill, int64_t entry)
{
    spill_slot *slot = slot_of(spill, entry);

    if (entry < 0 || entry != spill->top || slot->state != OPEN)
        return wrong_entry(spill, "put", entry);
    slot->state = KEPT;
    spill->top++;
    bool goes_out = spill->keep && entry < spill->options.n_host;
    if (goes_out) spill->n_out++;
    check_state(spill);
    return goes_out ? transfer(spill, entry, true) : BL_OK;
}

bl_status bl_spill_take(bl_spill *spill, int64_t entry)
{
    spill_slot *slot = slot_of(spill, entry);

    if (!spill->keep || entry < 0 || entry != spill->top - 1 ||
        (slot->state != KEPT && slot->state != COMING))
        return wrong_entry(spill, "take", entry);
    /* One that never left needs no wait: its transfer out may read it at the same time. */
    if (slot->state == COMING) BL_TRY(wait_for_transfer(spill, entry));
    slot->state = TAKEN;
    spill->is_falling = true;
    check_state(spill);
    return BL_OK;
}

bl_status bl_spill_drop(bl_spill *spill, int64_t entry)
{
    spill_slot *slot = slot_of(spill, entry);
    int64_t next = entry - spill->options.n_slots;

    if (entry < 0 || entry != spill->top - 1 || slot->state != TAKEN)
        return wrong_entry(spill, "drop", entry);
    slot->state = EMPTY;
    spill->top--;
    if (next >= spill->first_taken) {
        slot->state = COMING;
        slot->entry = next;
    }
    check_state(spill);
    return next < spill->first_taken ? BL_OK : transfer(spill, next, false);
}

const void *bl_spill_look(const bl_spill *spill, int64_t entry)
{
    if (entry < spill->n_out) return host_copy(spill, entry);
    return slot_of(spill, entry)->entry == entry ? bl_spill_at(spill, entry) : NULL;
}
