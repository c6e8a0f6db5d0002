/* SPDX-License-Identifier: Apache-2.0 */
/* plan_data_internal.h -- what `ballast plan` takes from this machine: lengths of rows, and
 * measured rates. */
#ifndef BALLAST_CLI_PLAN_DATA_INTERNAL_H
#define BALLAST_CLI_PLAN_DATA_INTERNAL_H

#include "plan/case.h"

/* Reads the data that the configuration names, where train_file and the files that it needs exist,
 * and gives the plan the lengths of the rows. Otherwise the plan keeps its lengths. Errors of the
 * data as in a training. */
bl_status bl_cli_plan_read_data(bl_plan_case *c);

/* Of a case of this machine: where it computes on its processor, gives the plan the rates that were
 * measured now or before (plan/measure.h). Logs them with their scatter, or how uncertain those of
 * a preset are. */
bl_status bl_cli_plan_measure(bl_plan_case *c, bool wanted, bool again);

#endif
