/* SPDX-License-Identifier: Apache-2.0 */
/* peft_keys.h -- the keys of a PEFT adapter's adapter_config.json. */
#ifndef BALLAST_STORE_PEFT_KEYS_H
#define BALLAST_STORE_PEFT_KEYS_H

#include "base/api.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether adapter_config.json of the directory `dir` is plain LoRA, of any model: each key is read,
 * or has no effect. Values that are read (r, lora_alpha, target_modules, task_type, ...) are not
 * checked.
 * BL_EINPUT: no such file, not JSON, or "FILE: key K: reason" of another key with a value (aLoRA,
 * DoRA, a rank per layer, ...), BL_EIO, BL_ENOMEM. */
BL_API bl_status bl_peft_check_keys(const char *dir);

#ifdef __cplusplus
}
#endif

#endif
