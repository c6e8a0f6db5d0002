/* SPDX-License-Identifier: Apache-2.0 */
/* cooperative_groups.h -- clusters; replaces CUDA's header. */
#ifndef BALLAST_TESTS_COOPERATIVE_GROUPS_H
#define BALLAST_TESTS_COOPERATIVE_GROUPS_H

namespace cooperative_groups
{

struct cluster_group {
    unsigned num_blocks() const { return emulated_cluster_blocks(); }
    unsigned block_rank() const { return emulated_cluster_rank(); }
    void sync() const { emulated_sync_cluster(); }
    template <typename T> T *map_shared_rank(T *mine, unsigned rank) const
    {
        return (T *)emulated_map_shared(mine, rank);
    }
};

static inline cluster_group this_cluster()
{
    return {};
}

} // namespace cooperative_groups

#endif
