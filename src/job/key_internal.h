/* SPDX-License-Identifier: Apache-2.0 */
/* key_internal.h -- the secret of a job, and the codes (HMAC-SHA256, libsodium) by which processes
 * prove that they know it. The secret never goes over a connection.
 *
 *   secret        text of BALLAST_SECRET, or of a file that rank 0 creates in a directory that all
 *                 ranks read
 *   key           of the secret or, between processes of one start, a random number of the job */
#ifndef BALLAST_JOB_KEY_INTERNAL_H
#define BALLAST_JOB_KEY_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { JOB_KEY_BYTES = 32, JOB_MAC_BYTES = 32, JOB_SECRET_MIN_BYTES = 16 };

typedef struct job_key {
    uint8_t bytes[JOB_KEY_BYTES];
} job_key;

typedef struct job_mac {
    uint8_t bytes[JOB_MAC_BYTES];
} job_mac;

typedef struct job_bytes {
    const void *at;
    size_t n;
} job_bytes;

/* Random bytes of the system. BL_EIO. */
bl_status job_random(void *bytes, size_t n_bytes);

/* The code of the parts, one after the other, for one purpose: no code is valid for another. Parts
 * have fixed sizes. */
void job_mac_make(const job_key *key, const char *purpose, const job_bytes *parts, int n_parts,
                  job_mac *out);
/* In a time that does not depend on the bytes. */
bool job_mac_equal(const job_mac *a, const job_mac *b);

/* The key of a secret text. */
void job_key_of(const char *secret, job_key *out);
/* Another key of the same secret, for one connection of all ranks: `salt` is random. */
void job_key_derive(const job_key *key, const uint8_t salt[JOB_KEY_BYTES], job_key *out);

/* A new secret in `dir`, which is created if need be, for the job of that number: *path is the
 * file, readable by its owner only, the caller's to remove and free. BL_EUSAGE: `dir` is a file, or
 * a file of that name is another user's. */
bl_status job_secret_create(const char *dir, uint64_t job, char **path, job_key *out);
/* What rank 0 has written there; *is_there false: nothing yet. Asks a network file system anew.
 * BL_EUSAGE: the file is another user's, or others may read it. */
bl_status job_secret_read(const char *dir, uint64_t job, job_key *out, bool *is_there);

#endif
