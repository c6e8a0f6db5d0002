/* SPDX-License-Identifier: Apache-2.0 */
/* ballast_ops.h -- the arithmetic of libballast, for programs that bring their own layers: FP8, the
 * product with a frozen matrix and its LoRA term, and the ops of a decoder layer. Includes
 * ballast.h. */
#ifndef BALLAST_OPS_H
#define BALLAST_OPS_H

#include "ballast.h"

#include "base/pool.h"
#include "fp8/fp8.h"
#include "linear/lora_linear.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

#endif
