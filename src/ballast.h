/* SPDX-License-Identifier: Apache-2.0 */
/* ballast.h -- libballast: frozen weights in tiers, gathered just in time, with LoRA over them.
 *
 *   stack          linear/layer.h       LoRA linear layers over frozen, quantized, sharded weights
 *   pager          offload/pager.h      pages of device memory, host memory and disk, prefetched
 *   communicator   comm/comm.h          a rank of a group; of threads, of processes, of GPUs
 *   device         device/device.h      memory, streams and events of a CPU or a GPU
 *   file           store/safetensors.h  tensors that are read and written
 *   adapter        store/peft_keys.h    whether a PEFT adapter is plain LoRA
 *
 * ballast_ops.h has the arithmetic below the stack. The headers of both are installed.
 * libballast.so exports their functions that are marked BL_API (base/api.h), and no others;
 * tests/install includes each header alone. */
#ifndef BALLAST_H
#define BALLAST_H

#include "base/dtype.h"
#include "base/status.h"
#include "base/version.h"
#include "comm/comm.h"
#include "comm/nccl/nccl.h"
#include "device/device.h"
#include "device/tensor.h"
#include "device/timeline.h"
#include "job/processes.h"
#include "linear/layer.h"
#include "offload/pager.h"
#include "store/peft_keys.h"
#include "store/safetensors.h"

#endif
