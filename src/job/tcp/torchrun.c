/* SPDX-License-Identifier: Apache-2.0 */
/* torchrun.c -- what torchrun's variables say about where its processes meet. */
#include <stdlib.h>
#include <string.h>

#include "job/tcp/tcp.h"

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; text && *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u; /* FNV-1a */
    return hash;
}

static bl_status read_port(uint16_t *port)
{
    const char *own = getenv("BALLAST_PORT"), *master = getenv("MASTER_PORT");
    const char *text = own ? own : master ? master : "";
    char *end;
    long value = strtol(text, &end, 10);

    if (!own) value++; /* torchrun's own store listens at MASTER_PORT */
    if (end == text || *end || value < 1 || value > 65535)
        return BL_FAIL(BL_EUSAGE,
                       "%s '%s': the port at which ranks meet is BALLAST_PORT, or the one after "
                       "MASTER_PORT",
                       own ? "BALLAST_PORT" : "MASTER_PORT", text);
    *port = (uint16_t)value;
    return BL_OK;
}

bl_status job_torchrun_connect(const bl_launch_info *info, const char *dir, double limit_s,
                               int *sockets)
{
    const char *secret = getenv("BALLAST_SECRET");
    job_rendezvous rendezvous = {.info = info,
                                 .address = getenv("MASTER_ADDR"),
                                 .port_key = "BALLAST_PORT, or MASTER_PORT + 1",
                                 .secret = secret && secret[0] ? secret : NULL,
                                 .dir = dir,
                                 .limit_s = limit_s};

    if (!rendezvous.address) return BL_FAIL(BL_EUSAGE, "MASTER_ADDR is not set: rank 0's host");
    BL_TRY(read_port(&rendezvous.port));
    /* Neighbors with other jobs do not mix, nor do their files. */
    rendezvous.job =
        hash_text(0xcbf29ce484222325u ^ rendezvous.port, getenv("TORCHELASTIC_RUN_ID"));
    return job_rendezvous_connect(&rendezvous, sockets);
}
