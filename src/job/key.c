/* SPDX-License-Identifier: Apache-2.0 */
/* key.c -- the secret of a job, made, read from a private file or derived, and HMAC-SHA256 under
 * it. */
#include "job/key_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sodium/crypto_auth_hmacsha256.h>
#include <sodium/utils.h>

#include "base/files.h"

_Static_assert(JOB_MAC_BYTES == crypto_auth_hmacsha256_BYTES, "HMAC-SHA256");
_Static_assert(JOB_KEY_BYTES == crypto_auth_hmacsha256_KEYBYTES, "HMAC-SHA256");

enum { SECRET_TEXT_BYTES = 2 * JOB_KEY_BYTES }; /* in hexadecimal */

bl_status job_random(void *bytes, size_t n_bytes)
{
    if (getrandom(bytes, n_bytes, 0) == (ssize_t)n_bytes) return BL_OK;
    return bl_fail_errno(BL_EIO, "random bytes: getrandom");
}

void job_mac_make(const job_key *key, const char *purpose, const job_bytes *parts, int n_parts,
                  job_mac *out)
{
    crypto_auth_hmacsha256_state state;

    crypto_auth_hmacsha256_init(&state, key->bytes, sizeof key->bytes);
    crypto_auth_hmacsha256_update(&state, (const unsigned char *)purpose, strlen(purpose) + 1);
    for (int i = 0; i < n_parts; i++)
        if (parts[i].n > 0) crypto_auth_hmacsha256_update(&state, parts[i].at, parts[i].n);
    crypto_auth_hmacsha256_final(&state, out->bytes);
    sodium_memzero(&state, sizeof state);
}

bool job_mac_equal(const job_mac *a, const job_mac *b)
{
    return sodium_memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

void job_key_of(const char *secret, job_key *out)
{
    static const job_key none = {{0}};
    job_mac mac;

    job_mac_make(&none, "ballast secret", &(job_bytes){secret, strlen(secret)}, 1, &mac);
    memcpy(out->bytes, mac.bytes, sizeof out->bytes);
}

void job_key_derive(const job_key *key, const uint8_t salt[JOB_KEY_BYTES], job_key *out)
{
    job_mac mac;

    job_mac_make(key, "ballast connections", &(job_bytes){salt, JOB_KEY_BYTES}, 1, &mac);
    memcpy(out->bytes, mac.bytes, sizeof out->bytes);
}

/* ---- the file ---- */

static bl_status name_file(const char *dir, uint64_t job, char **path)
{
    return bl_text_format(path, "%s/.ballast.secret-%016" PRIx64, dir, job);
}

static bl_status write_secret(const char *path, job_key *out)
{
    uint8_t bytes[JOB_KEY_BYTES];
    char text[SECRET_TEXT_BYTES + 1];

    BL_TRY(job_random(bytes, sizeof bytes));
    sodium_bin2hex(text, sizeof text, bytes, sizeof bytes);
    job_key_of(text, out);
    if (unlink(path) != 0 && errno != ENOENT)
        return bl_fail_errno(BL_EUSAGE,
                             "%s: remove this file, which is in the way of the job's secret", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return bl_fail_errno(BL_EIO, "%s: creating the job's secret", path);
    bl_status st = BL_OK;
    if (fchmod(fd, 0600) != 0 || write(fd, text, SECRET_TEXT_BYTES) != SECRET_TEXT_BYTES ||
        fsync(fd) != 0)
        st = bl_fail_errno(BL_EIO, "%s: writing the job's secret", path);
    close(fd);
    return st;
}

/* A configuration key names it: a file there that is not a directory is a wrong value. */
static bl_status create_dir(const char *dir)
{
    bl_error error;

    bl_error_save(&error, bl_dir_create(dir));
    if (error.status == BL_EINPUT) error.status = BL_EUSAGE;
    return bl_error_restore(&error);
}

bl_status job_secret_create(const char *dir, uint64_t job, char **path, job_key *out)
{
    *path = NULL;
    BL_TRY(create_dir(dir));
    BL_TRY(name_file(dir, job, path));
    bl_status st = write_secret(*path, out);
    if (st == BL_OK) return BL_OK;
    free(*path);
    *path = NULL;
    return st;
}

static bl_status check_owner(int fd, const char *path)
{
    struct stat info;

    if (fstat(fd, &info) != 0) return bl_fail_errno(BL_EIO, "%s: fstat", path);
    if (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0)
        return BL_FAIL(BL_EUSAGE,
                       "%s: the job's secret is not a file of this user that others cannot read; "
                       "remove it, or set BALLAST_SECRET on all ranks",
                       path);
    return BL_OK;
}

static bl_status read_secret(const char *path, job_key *out, bool *is_there)
{
    char text[SECRET_TEXT_BYTES + 1] = "";
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ESTALE)) return BL_OK;
    if (fd < 0) return bl_fail_errno(BL_EIO, "%s: opening the job's secret", path);
    bl_status st = check_owner(fd, path);
    if (st == BL_OK) *is_there = read(fd, text, SECRET_TEXT_BYTES) == SECRET_TEXT_BYTES;
    close(fd);
    if (*is_there) job_key_of(text, out);
    return st;
}

bl_status job_secret_read(const char *dir, uint64_t job, job_key *out, bool *is_there)
{
    char *path = NULL;

    *is_there = false;
    (void)bl_dir_look_anew(dir);
    BL_TRY(name_file(dir, job, &path));
    bl_status st = read_secret(path, out, is_there);
    free(path);
    return st;
}
