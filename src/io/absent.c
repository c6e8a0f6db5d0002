/* SPDX-License-Identifier: Apache-2.0 */
/* The io_uring engine in a build without liburing. */
#include "io/reader_internal.h"

static bl_status start(bl_reader *reader)
{
    (void)reader;
    return BL_FAIL(BL_ELIMIT, "this program was built without liburing");
}

static void do_nothing(bl_reader *reader)
{
    (void)reader;
}

const bl_io_engine_api bl_io_engine_uring = {"uring", start, do_nothing, do_nothing};
