/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.h -- rewrites a PEFT adapter with its routed experts in another layout. */
#ifndef BALLAST_CONVERT_ADAPTER_H
#define BALLAST_CONVERT_ADAPTER_H

#include "base/status.h"
#include "store/peft.h"

/* Writes the adapter in `source`, whose experts are in any layout, to the directory `target`, which
 * is created: tensors in fp32. model: the base's directory, whose config.json is read; NULL: that
 * which adapter_config.json names. layout: BL_PEFT_STACKED or BL_PEFT_PER_EXPERT. BL_EUSAGE: target
 * is source, or has an adapter; BL_EINPUT: no such base, or an adapter that does not fit it. */
bl_status bl_adapter_convert(const char *source, const char *target, const char *model,
                             bl_peft_layout layout);

#endif
