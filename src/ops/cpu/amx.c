/* SPDX-License-Identifier: Apache-2.0 */
/* amx.c -- CPUID, XGETBV and arch_prctl for AMX's tiles. */
#include "ops/cpu/amx.h"

#include <errno.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    OSXSAVE = 1 << 27, /* leaf 1, ecx */
    AMX_BF16 = 1 << 22,
    AMX_TILE = 1 << 24, /* leaf 7, edx */
    TILE_CONFIG = 1 << 17,
    TILE_DATA = 1 << 18, /* of XCR0 */
    LEAF_OF_PALETTES = 0x1d,
    PALETTE = 1,
    TILES = 8,
    ROWS = 16,
    ROW_BYTES = 64,
    REQUEST_PERMISSION = 0x1023,
    FEATURE = 18 /* arch_prctl: ARCH_REQ_XCOMP_PERM, tile data */
};

static uint32_t enabled_states(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool ops_amx_is_there(void)
{
    uint32_t eax, ebx, ecx, edx;
    const uint32_t states = TILE_CONFIG | TILE_DATA, features = AMX_BF16 | AMX_TILE;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & features) != features)
        return false;
    if ((enabled_states() & states) != states) return false;
    if (!__get_cpuid_count(LEAF_OF_PALETTES, PALETTE, &eax, &ebx, &ecx, &edx)) return false;
    return ebx >> 16 >= TILES && (ebx & 0xffff) >= ROW_BYTES && (ecx & 0xffff) >= ROWS;
}

int ops_amx_request(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, FEATURE) == 0 ? 0 : errno;
}
#else
bool ops_amx_is_there(void)
{
    return false;
}

int ops_amx_request(void)
{
    return ENOSYS;
}
#endif
