/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c -- what NCCL and CUDA read from the environment, for ranks that are processes with
 * a GPU each. */
#include <stdlib.h>

#include "comm/nccl/nccl.h"

void bl_nccl_prepare_environment(void)
{
    /* A kernel that is loaded at its first use would wait for others while they wait for this
     * process's. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    /* Between GPUs of one NVSwitch NCCL sends and receives over 32 channels with each peer, about
     * 15 MB each: 3.3 GB on eight H100 (NCCL issue 1685), which a plan does not leave it. Eight are
     * a quarter, and LoRA's sums ask for no more. */
    setenv("NCCL_MAX_P2P_NCHANNELS", "8", 0);
}
