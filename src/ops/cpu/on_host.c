/* SPDX-License-Identifier: Apache-2.0 */
/* on_host.c -- ops on host memory for any kind of device: the CPU's functions on the calling thread
 * and the device's workers. */
#include "ops/cpu/ops_cpu.h"

static bl_status check_workers(bl_stream *stream, const char *what)
{
    if (ops_pool(stream)) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "%s on the host: the device has no workers", what);
}

bl_status bl_adamw_on_host(bl_stream *stream, const bl_adamw_args *args)
{
    BL_TRY(ops_check_adamw(args));
    BL_TRY(check_workers(stream, "adamw"));
    return ops_cpu_adamw(stream, args);
}

bl_status bl_cast_on_host(bl_stream *stream, const bl_cast_args *args)
{
    BL_TRY(ops_check_cast(args));
    BL_TRY(check_workers(stream, "cast"));
    return ops_cpu_cast(stream, args);
}
