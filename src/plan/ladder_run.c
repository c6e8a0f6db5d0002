/* SPDX-License-Identifier: Apache-2.0 */
/* ladder_run.c -- the rungs of the ladder as runs of Ballast: keys and planned memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/ladder_report.h"
#include "plan/search.h"

static int count_devices(const bl_ladder_case *c)
{
    return c->hardware->n_devices * c->hardware->n_hosts;
}

/* Full fine-tuning shards weights, gradients and state over all ranks. */
static bool is_other(const bl_ladder_case *c, const bl_strategy *s)
{
    return !s->lora && s->zero_stage < 3 && count_devices(c) > 1;
}

static void write_keys(const bl_ladder_case *c, const bl_strategy *s, char *out)
{
    int n_shards = !s->lora || s->shards_base ? count_devices(c) : 1;
    size_t n = 0;

    if (s->lora)
        n = (size_t)snprintf(out, BL_LADDER_KEYS_BYTES,
                             "--lora_r %lld --lora_target_modules all-linear --base_format %s ",
                             (long long)c->lora_r, s->fp8 ? "fp8_row" : "stored");
    else
        n = (size_t)snprintf(out, BL_LADDER_KEYS_BYTES,
                             "--finetuning_type full --learning_rate 1e-5 --optimizer_tier %s "
                             "--offload_compute_copy %s ",
                             s->offloads_state ? "host" : "device",
                             s->offloads_base ? "true" : "false");
    snprintf(out + n, BL_LADDER_KEYS_BYTES - n,
             "--offload_tier host --offload_ratio %d --shard_size %d --max_seq_length %lld "
             "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --visit_tokens %lld "
             "--ring_depth 2 --activation_checkpointing %s --activation_offload false",
             s->offloads_base, n_shards, (long long)c->length, (long long)c->length,
             s->checkpointing ? "full" : "none");
}

/* Splits `text` into arguments and plans the run. */
static bl_status plan_keys(const bl_ladder_case *c, char *text, bl_ladder_run *out)
{
    enum { MAX_WORDS = 48 };
    char *argv[MAX_WORDS] = {(char[]){"--model"}, (char *)(uintptr_t)c->model_path}, *rest = text;
    int argc = 2;
    bl_plan_choice choice;
    bl_plan_case planned;

    for (char *word; argc < MAX_WORDS && (word = strtok_r(rest, " ", &rest)); argc++)
        argv[argc] = word;
    bl_status st = bl_plan_case_open_on(&c->machine, c->length, argc, argv, &planned);
    if (st == BL_OK)
        st = bl_plan_search(&planned.input, bl_plan_auto_keys(planned.config), BL_PLAN_BY_SPEED,
                            &choice);
    if (st == BL_OK) {
        const bl_memory_ledger *m = &choice.best.plan.memory;
        out->device_bytes = m->device;
        out->host_bytes = m->total * bl_plan_processes_on_host(&planned.input.topology);
        out->fits = choice.n_fit > 0;
    }
    bl_plan_case_close(&planned);
    return st;
}

bl_status bl_ladder_plan(const bl_ladder_case *c, size_t rung, bl_ladder_run *out)
{
    const bl_strategy *s = &bl_ladder[rung].strategy;
    char text[BL_LADDER_KEYS_BYTES];

    *out = (bl_ladder_run){.fits = false};
    if (is_other(c, s)) {
        snprintf(out->reason, sizeof out->reason,
                 "full fine-tuning shards the weights over all ranks, as ZeRO-3");
        return BL_OK;
    }
    write_keys(c, s, out->keys);
    memcpy(text, out->keys, sizeof text);
    bl_status st = plan_keys(c, text, out);
    if (st != BL_EUSAGE) return st;
    snprintf(out->reason, sizeof out->reason, "%s", bl_error_text());
    out->keys[0] = '\0';
    return BL_OK;
}
