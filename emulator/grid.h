/* SPDX-License-Identifier: Apache-2.0 */
/* grid.h -- the grid that runs, as the parts of the kernel emulator see it: emulate.cpp resumes
 * threads and queues grids, shared.cpp has shared memory and asynchronous copies, races.cpp and
 * sectors.cpp look at accesses. */
#ifndef BALLAST_TESTS_EMULATE_GRID_H
#define BALLAST_TESTS_EMULATE_GRID_H

#include "emulate.h"

enum { EMULATED_CLUSTER_MAX = 8, EMULATED_THREADS_MAX = 1024, EMULATED_SHARED_MAX = 227 << 10 };

struct emulated_state {
    emulated_grid grid;
    unsigned n_threads, n_ranks; /* of a block, of a cluster */
    unsigned cluster,
        n_finished; /* cluster: the one that runs, of the grid; clusters before it in time */
    unsigned rank,
        thread;     /* the block that runs, of its cluster; the thread, of its block, x first */
    bool in_thread; /* or the scheduler runs */
};
extern emulated_state emulated_now;

/* Ends the program with a line that names kernel, block and thread. */
[[noreturn]] void emulated_give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bounds of the threads' stacks. */
extern char *emulated_stacks, *emulated_stacks_end;

/* ---- shared.cpp ---- */

void emulated_shared_begin(); /* of a cluster: all is 0xff, no copy is in flight */
void emulated_shared_enter(); /* now.rank's static shared memory is where kernels look for it */
void emulated_shared_leave(); /* its image is kept; writes past the dynamic block end the program */
void emulated_shared_check_copies_end(); /* of a thread that ends */

struct emulated_place {
    bool is_shared, is_dynamic;
    unsigned rank;
    /* in the rank's static or dynamic shared memory; past the end of it: in its guards */
    size_t offset;
};
emulated_place emulated_find_place(const char *p);
size_t emulated_section_bytes();
bool emulated_is_pending(const emulated_place &place,
                         size_t bytes); /* a copy to some of them is in flight */

/* ---- races.cpp ---- */

void emulated_races_begin_grid();
void emulated_races_end_grid();
void emulated_races_begin_cluster();
enum class emulated_scope { warp, block, cluster };
void emulated_races_synchronized(
    emulated_scope scope); /* now's warp, block or cluster: what was before is before what comes */
/* Of the thread that runs. */
void emulated_accessed(const void *p, size_t bytes, bool is_store, const void *pc);

/* ---- hooks.cpp ---- */

/* An access that the emulator makes for the thread that runs; nothing where kernels do not tell of
 * theirs. */
void emulated_tell(const void *p, size_t bytes, bool is_store, const void *pc);
/* Whether kernels tell of their accesses, and the emulator looks at them itself. */
bool emulated_is_checked();

/* ---- sectors.cpp ---- */

/* Counts the accesses that the block's threads noted; all of them wait or have ended. */
void emulated_count_sectors();

/* ---- banks.cpp ---- */

void emulated_banks_note(size_t offset, size_t bytes,
                         uint32_t pc); /* an access to shared memory by the thread that runs */
void emulated_banks_count();           /* the block's threads wait for each other, or have ended */
void emulated_banks_forget();

#endif
