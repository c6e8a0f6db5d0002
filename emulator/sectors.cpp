/* SPDX-License-Identifier: Apache-2.0 */
/* How accesses fill sectors of memory: a thread's n-th load or store goes with those of its
 * warp. */
#include <set>
#include <vector>

#include "grid.h"
#include "lock.h"

enum { SECTOR_BYTES = 32 };

static std::vector<std::vector<const char *>>
    accesses[2];                              /* of loads and stores, of each thread of the block */
static std::vector<unsigned> access_bytes[2]; /* of the n-th */
static double bytes_accessed, bytes_of_sectors;
static bool is_counting; /* a caller will ask */

void emulated_note_access(const void *p, unsigned bytes, bool is_store)
{
    if (!is_counting) return;
    unseen_work unseen;
    auto &of_threads = accesses[is_store];
    unsigned t = emulated_now.thread;
    if (of_threads.size() <= t) of_threads.resize(t + 1);
    auto &mine = of_threads[t];
    auto &sizes = access_bytes[is_store];
    if (sizes.size() <= mine.size()) sizes.push_back(bytes);
    mine.push_back((const char *)p);
}

extern "C" void emulated_forget_accesses(void)
{
    is_counting = true;
    bytes_accessed = bytes_of_sectors = 0;
    emulated_banks_forget();
}

extern "C" double emulated_share_of_sectors(void)
{
    return bytes_of_sectors > 0 ? bytes_accessed / bytes_of_sectors : 1;
}

static void count_sectors(bool is_store)
{
    auto &threads = accesses[is_store];
    for (size_t first = 0; first < threads.size(); first += EMULATED_WARP)
        for (size_t n = 0; n < access_bytes[is_store].size(); n++) {
            std::set<uintptr_t> sectors;
            for (size_t t = first; t < first + EMULATED_WARP && t < threads.size(); t++) {
                if (threads[t].size() <= n) continue;
                bytes_accessed += access_bytes[is_store][n];
                sectors.insert((uintptr_t)threads[t][n] / SECTOR_BYTES);
            }
            bytes_of_sectors += (double)(sectors.size() * SECTOR_BYTES);
        }
    for (auto &thread : threads) thread.clear();
    access_bytes[is_store].clear();
}

void emulated_count_sectors()
{
    count_sectors(false);
    count_sectors(true);
}
