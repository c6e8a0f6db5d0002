/* SPDX-License-Identifier: Apache-2.0 */
/* cores.h -- how many threads of this process can run at once. */
#ifndef BALLAST_BASE_CORES_H
#define BALLAST_BASE_CORES_H

#include <stdint.h>
#include <sys/types.h>

/* Cores to which this thread is bound (sched_getaffinity); 1 where the system does not tell. */
int64_t bl_cores_bound(void);

/* Cores that this thread could be bound to: all of its cgroup's. Found by binding a thread made for
 * it. */
int64_t bl_cores_allowed(void);
/* Cores to which a process's first thread is bound; -1 where the system does not tell. */
int64_t bl_cores_of_process(pid_t process);

/* CPU time per time that this process may take, in cores, rounded up: the least quota of its cgroup
 * and of each of that one's parents (cgroup v2: cpu.max; v1: cpu.cfs_quota_us by
 * cpu.cfs_period_us). A container's limit: with more threads that compute, the kernel stops all of
 * them for the rest of each period. All processes of the cgroup share it. -1: no limit. */
int64_t bl_cores_quota(void);

/* bl_cores_quota with /proc and /sys below the directory `root`, for tests; "" is this system. */
int64_t bl_cores_quota_of(const char *root);

/* The lesser of the two; at least 1. */
int64_t bl_cores_usable(void);

/* The processor's name, as the system has it: "AMD EPYC"; "" where it does not tell. */
enum { BL_PROCESSOR_NAME_BYTES = 128 };
void bl_processor_name(char name[BL_PROCESSOR_NAME_BYTES]);

#endif
