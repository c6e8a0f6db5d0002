/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- declarations shared by the files of config/; for them only. */
#ifndef BALLAST_CONFIG_INTERNAL_H
#define BALLAST_CONFIG_INTERNAL_H

#include "config/config.h"

/* config.c: the tables and the struct they fill. */
bl_options config_bind(bl_config_command command, const bl_train_config *config);

/* What one of several runs takes of the words and the files. */
typedef struct config_choice {
    int file;               /* which of the line's files */
    int n_files;            /* found */
    bl_options_sweep sweep; /* of that file */
} config_choice;

enum { CONFIG_MAX_FILES = 64 };

/* config.c: bl_train_config_load of that file, for a training on the machine (NULL: this one). */
bl_status config_load_choice(const bl_config_machine *machine, int argc, char *const *argv,
                             config_choice *choice, bl_train_config **out);
/* config.c: the keys that a training requires. BL_EUSAGE names those that are missing. */
bl_status config_check_required(const bl_train_config *config);

/* config.c: reads a file into a configuration that already has values, and replaces them. */
bl_status config_read_file(const char *yaml_path, bl_train_config *config);
/* config.c: resolves save_total_limit, with a warning. */
void config_resolve_saving(bl_train_config *config);
/* config.c: replaces auto by the values for this machine and this version. */
bl_status config_resolve(bl_config_command command, bl_train_config *config);
/* config.c: checks that involve several keys, of a resolved configuration. */
bl_status config_validate(bl_config_command command, const bl_train_config *config);

/* config.c: resolves and validates for a training on some machine, which has GPUs with FP8, or a
 * CPU that multiplies bf16. BL_EUSAGE: `train` would reject it everywhere. */
bl_status config_accepts(bl_train_config *config, bool has_gpus);

/* runs.c: whether all runs over one base must have the same value of the key. */
bool config_is_common(const bl_option *option);

/* jobs.c: checks a configuration with `queue`. BL_EUSAGE: it lacks the model, or has a key that
 * belongs in a job's file. */
bl_status config_check_base(const bl_train_config *config);

/* config.c: whether a key was given that has another value than its default. */
bool config_differs(const bl_train_config *config, const char *key);

/* reports.c. BL_EUSAGE: a tracker that is not supported. */
bl_status config_check_reports(const bl_train_config *config);

/* full.c: resolves the keys of full fine-tuning that are auto, except those that a plan chooses.
 * Call it after device is resolved. */
void config_resolve_full(bl_train_config *config);
/* full.c: of a resolved configuration. BL_EUSAGE: a key that finetuning_type full does not
 * support. */
bl_status config_check_full(const bl_train_config *config);

/* device.c. BL_EUSAGE: an item that names no projection and no layer. */
bl_status config_check_modules(const bl_string_list *bf16_modules);

/* ranks.c: ranks, rank_processes, threads, and values derived from them, by how this process was
 * started. n_gpus: of this machine, for device cuda. BL_EUSAGE: numbers that do not fit
 * together. */
bl_status config_place_ranks(bl_train_config *config, int n_gpus);

/* What a machine's processors can multiply. */
typedef struct config_arithmetic {
    const char *gpu; /* its name */
    int capability;  /* 10 x major + minor */
    bool cpu_bf16;   /* the CPU multiplies bf16 */
} config_arithmetic;

/* device.c. Replaces auto by the device's dtype, and checks that the device supports *dtype: a
 * device of this machine, or a described one. With a warning, FP8 becomes bf16 on a GPU later than
 * Hopper. BL_EUSAGE: the device does not compute in it; BL_ELIMIT: FP8 on a GPU before Hopper. */
bl_status config_choose_dtype(bl_config_device device, const config_arithmetic *has,
                              bl_compute_dtype *dtype);

/* Cores for one of the n_on_host processes that a launcher has started on this host. This one is
 * bound to n_usable, its parent to n_starter, and its cgroup has n_allowed. Where all such sets
 * together fit in, each process has its set alone; otherwise it shares its set with the others.
 * At least 1. */
int64_t config_cores_of_task(int64_t n_usable, int64_t n_starter, int64_t n_allowed,
                             int64_t n_on_host);

/* Those of a rank's n_cores that the quota of CPU time of its container leaves it, which the
 * n_on_host ranks of this host share; -1: no quota. At least 1. */
int64_t config_cores_within(int64_t quota, int64_t n_cores, int64_t n_on_host);

/* Whether something carries the weights between GPUs of several processes. */
bool config_has_gpu_processes(void);

#endif
