/* SPDX-License-Identifier: Apache-2.0 */
/* status.h -- how a function says that it failed, and why.
 *
 * Every fallible function returns bl_status; outputs go through pointers. The place where a failure
 * is first seen calls BL_FAIL once, with the file, key, tensor or system call at fault; callers
 * pass the status on (BL_TRY, BL_TRY_GOTO). The text is kept per thread, so nothing is shared; a
 * stream or a communicator that carries a failure to another thread carries the text along
 * (bl_error_save, bl_error_restore). Library code never prints and never exits. */
#ifndef BALLAST_BASE_STATUS_H
#define BALLAST_BASE_STATUS_H

#include <stddef.h>

#include "base/api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bl_status {
    BL_OK = 0,
    BL_EUSAGE,      /* a wrong option, key or configuration value              exit 2 */
    BL_EINPUT,      /* a file whose content cannot be used                     exit 3 */
    BL_EIO,         /* the system refused to read or write                     exit 4 */
    BL_ENOMEM,      /* memory                                                  exit 4 */
    BL_ELIMIT,      /* disk space, a resource limit, a missing device          exit 4 */
    BL_ECHECKPOINT, /* a checkpoint that cannot be used                        exit 5 */
    BL_ENUMERIC,    /* NaN or infinity where there must be none                exit 6 */
    BL_ERANK,       /* a rank died or hung                                     exit 7 */
    BL_ECANCELED,   /* gave up because another rank or stream failed first     exit 7 */
    BL_ESTOPPED,    /* stopped on request, resumable                           exit 75 */
    BL_EINTERNAL    /* a bug of Ballast's                                      exit 1 */
} bl_status;

/* Longest text of an error, with its NUL; longer ones are cut. */
enum { BL_ERROR_TEXT_BYTES = 1024 };

/* A failure that can be carried from one thread to another. */
typedef struct bl_error {
    bl_status status;
    char text[BL_ERROR_TEXT_BYTES];
} bl_error;

/* The compiler checks arguments from first_index on against the format at text_index. */
#if defined(__GNUC__)
#define BL_PRINTF(text_index, first_index) __attribute__((format(printf, text_index, first_index)))
#else
#define BL_PRINTF(text_index, first_index)
#endif

/* Records `status` and the formatted text for this thread and returns `status`. Does not touch
 * errno. The text of BL_ENOMEM may be the object alone: "out of memory: " comes before it, in place
 * of an article, where "memory" is not in it. */
BL_API bl_status bl_fail(bl_status status, const char *format, ...) BL_PRINTF(2, 3);

/* As bl_fail, and appends ": " and strerror(errno). ENOMEM, ENOSPC, EDQUOT and EMFILE turn BL_EIO
 * into the status that fits. */
BL_API bl_status bl_fail_errno(bl_status status, const char *format, ...) BL_PRINTF(2, 3);

/* Puts the formatted text and ": " before the text recorded on this thread. Returns `status`
 * unchanged. */
BL_API bl_status bl_error_prefix(bl_status status, const char *format, ...) BL_PRINTF(2, 3);

/* The text of this thread's last failure; valid until its next one. Never NULL. */
BL_API const char *bl_error_text(void);

BL_API void bl_error_save(bl_error *out, bl_status status); /* copies this thread's text */
/* Sets this thread's text, returns error->status. */
BL_API bl_status bl_error_restore(const bl_error *error);

/* The process exit code of notes in docs/reliability.md. */
BL_API int bl_status_exit_code(bl_status status);

/* A short name: "ok", "usage", "input", ... */
BL_API const char *bl_status_name(bl_status status);

/* bl_fail, by the name that is searched for: every place where a failure is first seen. */
#define BL_FAIL(status, ...) bl_fail((status), __VA_ARGS__)

/* Returns the status of `call` from this function unless it is BL_OK. */
#define BL_TRY(call)                                                                               \
    do {                                                                                           \
        bl_status bl_try_status_ = (call);                                                         \
        if (bl_try_status_ != BL_OK) return bl_try_status_;                                        \
    } while (0)

/* st = the status of `call`; goes to `label` unless it is BL_OK. */
#define BL_TRY_GOTO(st, label, call)                                                               \
    do {                                                                                           \
        if (((st) = (call)) != BL_OK) goto label;                                                  \
    } while (0)

#ifdef __cplusplus
}
#endif

#endif
