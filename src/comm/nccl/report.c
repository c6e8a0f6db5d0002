/* SPDX-License-Identifier: Apache-2.0 */
/* What NCCL reports by itself, in words by which a parent knows it again. Part of every build. */
#include <string.h>

#include "comm/nccl/nccl.h"

static const char LOST[] = ": NCCL lost a rank in ", FAILED[] = ": NCCL failed in ";

bl_status bl_nccl_report(int rank, const char *host, bool is_loss, const char *where,
                         const char *why)
{
    return BL_FAIL(BL_ERANK, "rank %d on %s%s%s: %s", rank, host, is_loss ? LOST : FAILED, where,
                   why);
}

bool bl_nccl_is_report(const bl_error *error)
{
    return error->status == BL_ERANK && (strstr(error->text, LOST) || strstr(error->text, FAILED));
}
