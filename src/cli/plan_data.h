/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BALLAST_CLI_PLAN_DATA_H
#define BALLAST_CLI_PLAN_DATA_H

#include "plan/case.h"

/* Reads the data that the configuration names, where train_file and what it needs are there, and gives the plan the
 * lengths of the rows. Else the plan keeps what it has. Errors of the data as a training's. */
bl_status bl_cli_plan_read_data(bl_plan_case *c);

#endif
