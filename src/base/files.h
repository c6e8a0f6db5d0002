/* SPDX-License-Identifier: Apache-2.0 */
/* files.h -- files that other people made, and files that must survive a crash.
 *
 * Reading: only regular files; a read is whole or an error; EINTR and short reads are asked again.
 * Writing: a file appears under its name whole and on stable storage, or not at all. An fsync that
 * fails is never retried: the kernel may have dropped the dirty pages and would then report success
 * for lost data.
 *
 * Errors name path, offset and errno. BL_EINPUT: not there, not allowed, not a regular file, too
 * large. BL_EIO: the system could not read or write. BL_ELIMIT: no space, quota or descriptors
 * left. BL_ENOMEM. */
#ifndef BALLAST_BASE_FILES_H
#define BALLAST_BASE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* ---- reading ---- */

/* Opens a regular file for reading; a folder, FIFO, socket or device is refused by name, without
 * blocking on it. The caller closes *fd. n_bytes may be NULL. */
bl_status bl_file_open(const char *path, int *fd, int64_t *n_bytes);

/* dst[0..n_bytes) = the file's bytes from offset_bytes on. Any thread may read the same fd. A file
 * that ends earlier is BL_EIO. `path` only names the file in errors. */
bl_status bl_file_read_full(int fd, const char *path, void *dst, size_t n_bytes,
                            int64_t offset_bytes);

/* The whole file, at most max_bytes, in one block the caller frees, with a NUL after its
 * n_bytes. */
bl_status bl_file_read_all(const char *path, size_t max_bytes, void **bytes, size_t *n_bytes);

/* Moves *text past a byte order mark of UTF-8. Text in UTF-16 or UTF-32, which its mark tells, is
 * BL_EINPUT. */
bl_status bl_text_skip_mark(const char *path, const char **text, size_t *n_bytes);

/* Whether `path` is a directory, links followed; a missing path is an error, as in bl_file_open. */
bl_status bl_path_is_dir(const char *path, bool *is_dir);
/* Whether anything has that name, links followed; a failed check is an error, as in
 * bl_file_open. */
bl_status bl_path_exists(const char *path, bool *exists);
/* The same where an error may pass for absence. */
bool bl_file_exists(const char *path);

/* ---- writing ---- */

/* Writes all of src at offset_bytes. */
bl_status bl_file_write_full(int fd, const char *path, const void *src, size_t n_bytes,
                             int64_t offset_bytes);

bl_status bl_file_sync(int fd, const char *path); /* fsync; a failure is final */
/* Makes creations, renames and removals in the folder durable. */
bl_status bl_dir_sync(const char *path);

/* BL_EUSAGE when `path` exists and is not a regular file (links followed), or is a link into /proc:
 * a file renamed over a device, a FIFO or /dev/stdout would replace it. */
bl_status bl_file_check_output(const char *path);

/* A file under construction: the bytes go to "PATH.tmp", a new file; commit makes them durable and
 * renames. PATH passes bl_file_check_output. One thread a writer. */
typedef struct bl_writer bl_writer;

bl_status bl_writer_open(const char *path, bl_writer **out);
bl_status bl_writer_append(bl_writer *writer, const void *bytes, size_t n_bytes);
/* Writes at offset_bytes, wherever that is: for a file whose parts become known in another order.
 * All parts must have been put by the commit, each once; nothing is appended after the first. */
bl_status bl_writer_put(bl_writer *writer, int64_t offset_bytes, const void *bytes, size_t n_bytes);
int64_t bl_writer_bytes(const bl_writer *writer); /* appended and put so far */
/* fsync, rename, fsync of the folder. Frees the writer, also when it fails (PATH is then the old
 * file or the whole new one). */
bl_status bl_writer_commit(bl_writer *writer);
void bl_writer_abort(bl_writer *writer); /* removes PATH.tmp; NULL is fine */

bl_status bl_file_write_atomic(const char *path, const void *bytes, size_t n_bytes);

/* ---- folders ---- */

/* Creates parents, too; an existing directory is fine. BL_EINPUT: it, or a parent, exists and is
 * not a directory. */
bl_status bl_dir_create(const char *path);
/* The same, with BL_EIO where its parent does not exist: a removed directory stays removed. */
bl_status bl_dir_create_child(const char *path);
/* The same; the folder itself, when it is new, is for this user only (0700). */
bl_status bl_dir_create_private(const char *path);
/* BL_EUSAGE when another user than this process's or root owns the file or folder, or may write it.
 * Other users may write a sticky directory (/tmp): they cannot replace its entries. A missing path
 * passes. */
bl_status bl_path_check_private(const char *path);
/* Removes a file, or a folder and all in it. Links are not followed; an absent path is fine. */
bl_status bl_tree_remove(const char *path);
/* Disk space that bl_tree_remove would free: the blocks of all files without another name. 0 for a
 * missing path. */
int64_t bl_tree_bytes(const char *path);
/* Opens the directory after each of its parents in the path: a network file system then refreshes
 * its cache, also of missing names, which may be a minute old. Returns the directory's inode; 0: it
 * is missing, or may not be opened. */
uint64_t bl_dir_look_anew(const char *path);
/* Bytes that an unprivileged writer may still write there. */
bl_status bl_dir_free_bytes(const char *path, int64_t *n_bytes);
/* Whether its files are kept in memory (tmpfs, ramfs); false where the check fails. */
bool bl_dir_is_in_memory(const char *path);

/* The names in a folder except "." and "..", in byte order. Free with bl_names_free. */
bl_status bl_dir_list(const char *path, char ***names, size_t *n_names);
void bl_names_free(char **names, size_t n_names);

/* A folder's lock, held by one process of all hosts that share the file system; it dies with its
 * holder, so that a stale lock file never blocks. In use: BL_EUSAGE "PATH is in use by pid N on
 * HOST". The file (".ballast.lock") stays after a release, for those who look at the lock; only
 * bl_dir_lock_remove takes it away. A child of fork keeps the lock alive until it closes or execs.
 * A file system without locks causes a warning; other processes are not kept out.
 *
 * An entry of the lock's name that is not a lock (a link, a directory, another text) is BL_EUSAGE
 * and is not changed. */
typedef struct bl_dir_lock bl_dir_lock;

bl_status bl_dir_lock_acquire(const char *path, bl_dir_lock **out);
/* BL_EIO when the directory or its lock file is not the locked one any more: it was removed, and
 * another process may have made the present one. A failed check passes: the next write fails,
 * too. */
bl_status bl_dir_lock_check(const bl_dir_lock *lock);
/* The lock that another process of this job holds, only to be checked; *out is NULL when it is not
 * seen here. */
bl_status bl_dir_lock_look(const char *dir, bl_dir_lock **out);
void bl_dir_lock_release(bl_dir_lock *lock); /* NULL is fine */
/* As release, and without the file, of a folder whose lock no other process looks at: one that
 * opened the file before finds after locking that the name has another inode or none, and opens it
 * again. */
void bl_dir_lock_remove(bl_dir_lock *lock); /* NULL is fine */

/* ---- names ---- */

/* "dir/name", or name when dir is empty. The caller frees *out. */
bl_status bl_path_join(const char *dir, const char *name, char **out);
/* A printf into a new block that the caller frees. */
bl_status bl_text_format(char **out, const char *format, ...) BL_PRINTF(2, 3);
bool bl_text_ends_with(const char *text, const char *end);

#endif
