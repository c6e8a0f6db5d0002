/* SPDX-License-Identifier: Apache-2.0 */
/* Which GPU each rank of the job has, and where: what NCCL says of two ranks with one GPU is an
 * error of some ranks and a hang of others, by timing. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/nccl/internal.h"
#include "base/host_name.h"
#include "device/cuda/stream.h"

struct comm_nccl_place {
    char host[64];
    char boot[40]; /* the kernel's boot id: hosts that were installed alike may have one name */
    char bus[16];  /* "0000:1B:00.0" */
};

static void read_boot_id(char *out, size_t n_bytes)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file) return; /* then the name has to do */
    out[fread(out, 1, n_bytes - 1, file)] = '\0';
    fclose(file);
}

static bl_status find_own(const comm_nccl *c, comm_nccl_place *out)
{
    *out = (comm_nccl_place){.host = ""};
    bl_host_name(out->host, sizeof out->host);
    read_boot_id(out->boot, sizeof out->boot);
    cudaError_t error = cudaDeviceGetPCIBusId(out->bus, (int)sizeof out->bus,
                                              bl_cuda_device_properties(c->job->device)->index);
    return error == cudaSuccess ? BL_OK : bl_cuda_fail("cudaDeviceGetPCIBusId", (int)error);
}

/* The same on all ranks. */
static bl_status check_own_gpus(const comm_nccl_place *places, int n)
{
    for (int a = 0; a < n; a++)
        for (int b = a + 1; b < n; b++)
            if (memcmp(&places[a], &places[b], sizeof places[a]) == 0)
                return BL_FAIL(BL_ELIMIT,
                               "ranks %d and %d have the same GPU, %s on %s; each needs one", a, b,
                               places[a].bus, places[a].host);
    return BL_OK;
}

bl_status comm_nccl_learn_places(comm_nccl *c)
{
    comm_nccl_place *places = calloc((size_t)c->base.size, sizeof *places);

    if (!places) return BL_FAIL(BL_ENOMEM, "a communicator of %d GPUs", c->base.size);
    c->job->places = places;
    BL_TRY(find_own(c, &places[c->base.rank]));
    if (c->base.size == 1) return BL_OK;
    BL_TRY(bl_comm_all_gather(c->host, c->job->host_stream, &places[c->base.rank], places,
                              sizeof *places));
    BL_TRY(bl_stream_synchronize(c->job->host_stream));
    return check_own_gpus(places, c->base.size);
}

static bool is_same_host(const comm_nccl *c, int a, int b)
{
    const comm_nccl_place *x = &c->job->places[c->job_ranks[a]],
                          *y = &c->job->places[c->job_ranks[b]];
    return strcmp(x->host, y->host) == 0 && strcmp(x->boot, y->boot) == 0;
}

bool comm_nccl_spans_hosts(const comm_nccl *c)
{
    for (int i = 1; i < c->base.size; i++)
        if (!is_same_host(c, 0, i)) return true;
    return false;
}

int comm_nccl_ranks_per_host(const comm_nccl *c)
{
    int n = 1;

    while (n < c->base.size && is_same_host(c, 0, n)) n++;
    for (int a = 0; a < c->base.size; a++)
        for (int b = a + 1; b < c->base.size; b++)
            if (is_same_host(c, a, b) != (a / n == b / n)) return 0;
    return n;
}
