/* SPDX-License-Identifier: Apache-2.0 */
/* placement.h -- which shards of a rank's frozen base are in which tier. */
#ifndef BALLAST_MODEL_PLACEMENT_H
#define BALLAST_MODEL_PLACEMENT_H

#include "arch/config.h"
#include "linear/base_load.h"
#include "offload/arena.h"
#include "offload/pages.h"
#include "offload/scratch.h"

/* ratio: the part of the base's bytes that is in `tier`, 0..1; the rest is in device memory. */
typedef struct bl_placement {
    double ratio;
    bl_tier tier;
    double host_part;       /* with BL_TIER_DISK: fraction of that part in host memory; 0..1 */
    bool places_copy;       /* trained weights: the bf16 copy is in the same tiers */
    const char *dir;        /* of page files; for BL_TIER_DISK */
    bool pin;               /* the host tier's memory */
    const char *gpu_bus_id; /* of the rank's GPU, whose NUMA node is the rank's; NULL: none */
    int index,
        /* this rank among the n ranks of its host: they are dealt out to its NUMA nodes; n 0: the
         * calling thread's node */
        n;
    /* What loading passes through on the way to memory the host cannot write, and to disk; 0: 32
     * MiB for the n ranks, but 4 MiB each. At least 128 rows are taken at a time, whatever they
     * need. */
    size_t staging_bytes;
    /* Asked before each piece that is loaded; true ends loading with BL_ESTOPPED. NULL: never. */
    bool (*stop)(void *user);
    void *stop_user;
} bl_placement;

/* staging_bytes, chosen. */
size_t bl_model_staging_bytes(const bl_placement *placement);

/* The tier of each page of the layout (bl_base_part_count of them; offload/tier.h says how they are
 * chosen). */
bl_status bl_placement_assign(const bl_base_layout *layout, const bl_placement *placement,
                              bl_tier *tiers);

/* The tier of each page of the bf16 copy of trained weights, one page per page of `weights`. */
bl_status bl_placement_assign_copy(const bl_base_layout *weights, const bl_placement *placement,
                                   bl_tier *tiers);

/* The sizes of a rank's pages, for plans; of the ring of ring_depth slots that they are loaded
 * through (device memory, 0 when nothing has to be loaded); of the buffers of the reader that loads
 * disk pages (host memory), which depend on placement->n; and of the buffer for pages that the host
 * cannot write itself (those on disk; on a GPU, device memory) while the model is loaded, before
 * the ring exists. */
typedef struct bl_placed_bytes {
    size_t device, host, disk, ring, reader, writing;
    size_t ring_used; /* of ring: bytes ever written, all that it takes on a CPU */
} bl_placed_bytes;
bl_status bl_placement_measure(const bl_base_layout *layout, const bl_placement *placement,
                               bl_device_kind kind, int ring_depth, bl_placed_bytes *out);
/* The same for the bf16 copy, whose pages are not written while the model is loaded. */
bl_status bl_placement_measure_copy(const bl_base_layout *weights, const bl_base_layout *copy,
                                    const bl_placement *placement, bl_device_kind kind,
                                    int ring_depth, bl_placed_bytes *out);

/* Requests that a rank's reader of pages keeps in the kernel: the n ranks of a host share one deep
 * queue. */
int bl_model_pager_queue_depth(int n);

/* The NUMA node that rank `index` of `n` ranks of this host belongs to: next to its GPU, if it has
 * one that says where it is (NULL: none), or as ranks are dealt out to nodes. -1: to none in
 * particular. */
int bl_model_node_of_rank(int index, int n, const char *gpu_bus_id);
/* Keeps the calling thread, and those it starts from now on, on the cores of that node: next to the
 * host tier's memory. Nothing happens where there is one node, or fewer ranks without GPU than
 * nodes. */
bl_status bl_model_bind_rank(int index, int n, const char *gpu_bus_id);

/* "model.layers.3.self_attn.q_proj+k_proj+v_proj", "model.layers.3.mlp.down_proj", "lm_head": what
 * a page holds this rank's rows of. */
void bl_model_page_name(const bl_model_config *config, const bl_base_walk *at,
                        char name[BL_PAGE_NAME_BYTES]);

#endif
