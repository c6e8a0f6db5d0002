/* SPDX-License-Identifier: Apache-2.0 */
/* published.h -- the speeds that other systems published for LoRA on Llama 3.1 405B, and for every
 * weight of Llama 2 70B, explained: the time model is fed with what such a system does, and its
 * choices are replaced by Ballast's one after the other. docs/model.md has the sources. */
#ifndef BALLAST_PLAN_PUBLISHED_H
#define BALLAST_PLAN_PUBLISHED_H

#include <stdio.h>

#include "plan/time.h"

enum { BL_PUBLISHED_MAX_ROWS = 12 };

typedef struct bl_published_row {
    const char *change; /* the difference from the row before */
    bl_time_estimate time;
} bl_published_row;

typedef struct bl_published {
    int n_hosts;         /* of eight H100 each */
    double tokens_per_s; /* as published */
    int n_rows;          /* the first is the published system, the last Ballast */
    bl_published_row rows[BL_PUBLISHED_MAX_ROWS];
} bl_published;

/* n_hosts 1: three quarters of the base in host memory; 2: nothing. BL_ENOMEM. */
bl_status bl_published_explain(int n_hosts, bl_published *out);

/* A training of every weight of Llama 2 70B by FSDP on two hosts of eight A100. */
typedef struct bl_published_full {
    int n_steps;
    double hours, tokens_per_s, mfu; /* as published; the last two from its hours */
    int n_rows;                      /* as bl_published's; the last has 16 times the tokens */
    bl_published_row rows[BL_PUBLISHED_MAX_ROWS];
} bl_published_full;
bl_status bl_published_explain_full(bl_published_full *out);

/* A table of all three, at most 100 columns. */
bl_status bl_published_print(FILE *out);

#endif
