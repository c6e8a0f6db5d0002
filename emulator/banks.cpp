/* SPDX-License-Identifier: Apache-2.0 */
/* Bank conflicts of checked kernels. Shared memory has 32 banks of 4 bytes; a warp's access takes
 * as many passes as the bank with the most different words has of them. Accesses of 8 and 16 bytes
 * are made half a warp and a quarter of a warp at a time. A thread's n-th access since the last
 * barrier at an instruction goes with those of its warp there. Only the first clusters of each grid
 * are looked at: the others do the same. */
#include <unordered_map>

#include "grid.h"

enum { BANKS = 32, WORD = 4, CLUSTERS_SEEN = 4, WARPS_MAX = EMULATED_THREADS_MAX / EMULATED_WARP };

struct warp_access {
    unsigned bytes, lanes; /* a bit of each lane that takes part */
    uint32_t offset[EMULATED_WARP];
};

static std::unordered_map<uint64_t, warp_access> of_warp[WARPS_MAX]; /* by instruction and n */
static std::unordered_map<uint32_t, uint32_t> n_accesses[EMULATED_THREADS_MAX]; /* by instruction */
static bool has_noted; /* since it was counted */
static double passes, fewest_passes, worst = 1;

void emulated_banks_note(size_t offset, size_t bytes, uint32_t pc)
{
    unsigned t = emulated_now.thread, lane = t % EMULATED_WARP;
    if (emulated_now.n_finished >= CLUSTERS_SEEN || bytes > 16) return;
    has_noted = true;
    uint64_t n = n_accesses[t][pc]++;
    warp_access *a = &of_warp[t / EMULATED_WARP][n << 32 | pc];
    a->bytes = (unsigned)bytes;
    a->lanes |= 1u << lane;
    a->offset[lane] = (uint32_t)offset;
}

/* Of the lanes in `lanes`. */
static unsigned count_passes(const warp_access &a, unsigned lanes)
{
    uint32_t words[BANKS][EMULATED_WARP];
    unsigned n_words[BANKS] = {}, most = 0;
    for (unsigned lane = 0; lane < EMULATED_WARP; lane++)
        for (unsigned byte = 0; byte < a.bytes && lanes >> lane & 1; byte += WORD) {
            uint32_t word = (a.offset[lane] + byte) / WORD, bank = word % BANKS;
            uint32_t *end = words[bank] + n_words[bank];
            if (std::find(words[bank], end, word) != end) continue;
            *end = word;
            most = std::max(most, ++n_words[bank]);
        }
    return most;
}

void emulated_banks_count()
{
    if (!has_noted) return;
    has_noted = false;
    for (auto &accesses : of_warp) {
        for (auto &entry : accesses) {
            const warp_access &a = entry.second;
            unsigned at_once = EMULATED_WARP * WORD / std::max(a.bytes, (unsigned)WORD);
            unsigned n = 0, fewest = 0;
            for (unsigned first = 0; first < EMULATED_WARP; first += at_once) {
                unsigned mask = at_once == 32 ? ~0u : ((1u << at_once) - 1) << first;
                if ((a.lanes & mask) == 0) continue;
                n += count_passes(a, a.lanes & mask);
                fewest++;
            }
            passes += n;
            fewest_passes += fewest;
            worst = std::max(worst, (double)n / fewest);
        }
        accesses.clear();
    }
    for (unsigned t = 0; t < emulated_now.n_threads; t++) n_accesses[t].clear();
}

void emulated_banks_forget()
{
    passes = fewest_passes = 0;
    worst = 1;
}

extern "C" double emulated_bank_passes(void)
{
    return fewest_passes > 0 ? passes / fewest_passes : 1;
}

extern "C" double emulated_worst_bank_passes(void)
{
    return worst;
}
