/* SPDX-License-Identifier: Apache-2.0 */
/* events.c -- writes event files: a few messages of Protocol Buffers, by hand, in TFRecord's
 * frame. */
#include "train/report/events.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "base/host_name.h"

struct bl_events {
    int fd;
    char *path;
    int64_t n_bytes;
};

/* Numbers of fields, in event.proto and summary.proto of TensorFlow. */
enum { EVENT_WALL_TIME = 1, EVENT_STEP, EVENT_FILE_VERSION, EVENT_SUMMARY = 5, EVENT_SESSION = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SIMPLE = 2, SESSION_STATUS = 1, SESSION_START = 1 };
/* How a field is written. */
typedef enum wire { WIRE_VARINT, WIRE_8_BYTES, WIRE_BYTES, WIRE_4_BYTES = 5 } wire;

/* A value: a tag, a float, and the head of each and of the message; an event: the values, and
 * fields of at most 10 bytes. */
enum { VALUE_BYTES = BL_EVENTS_MAX_TAG_BYTES + 16 };
enum { MAX_MESSAGE_BYTES = BL_EVENTS_MAX_SCALARS * VALUE_BYTES + 64 };
enum { HEAD_BYTES = 12, TAIL_BYTES = 4 };

typedef struct message {
    uint8_t bytes[MAX_MESSAGE_BYTES];
    size_t n;
} message;

/* ---- messages ---- */

static void put(message *m, const void *bytes, size_t n)
{
    assert(m->n + n <= sizeof m->bytes);
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static void put_varint(message *m, uint64_t value)
{
    for (; value >= 0x80; value >>= 7) put(m, &(uint8_t){(uint8_t)(value | 0x80)}, 1);
    put(m, &(uint8_t){(uint8_t)value}, 1);
}

static void put_field(message *m, int number, wire how)
{
    put_varint(m, (uint64_t)number << 3 | (uint64_t)how);
}

static void put_bytes(message *m, int number, const void *bytes, size_t n)
{
    put_field(m, number, WIRE_BYTES);
    put_varint(m, n);
    put(m, bytes, n);
}

/* Little-endian, as all machines that Ballast runs on. */
static void put_event(message *m, double wall_s, int64_t step)
{
    put_field(m, EVENT_WALL_TIME, WIRE_8_BYTES);
    put(m, &wall_s, sizeof wall_s);
    if (step == 0) return; /* the default */
    put_field(m, EVENT_STEP, WIRE_VARINT);
    put_varint(m, (uint64_t)step);
}

static void put_scalar(message *summary, const bl_scalar *scalar)
{
    float value = (float)scalar->value;
    message m = {.n = 0};

    put_bytes(&m, VALUE_TAG, scalar->tag, strlen(scalar->tag));
    put_field(&m, VALUE_SIMPLE, WIRE_4_BYTES);
    put(&m, &value, sizeof value);
    put_bytes(summary, SUMMARY_VALUE, m.bytes, m.n);
}

/* ---- records ---- */

static uint32_t checksum(const uint8_t *bytes, size_t n)
{
    const uint32_t CASTAGNOLI = 0x82f63b78;
    uint32_t crc = UINT32_MAX;

    for (size_t i = 0; i < n; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? CASTAGNOLI : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8;
}

static bl_status append(bl_events *e, const message *m)
{
    uint8_t record[HEAD_BYTES + MAX_MESSAGE_BYTES + TAIL_BYTES];
    uint64_t length = m->n;
    uint32_t sum;

    memcpy(record, &length, sizeof length);
    sum = checksum(record, sizeof length);
    memcpy(record + sizeof length, &sum, sizeof sum);
    memcpy(record + HEAD_BYTES, m->bytes, m->n);
    sum = checksum(m->bytes, m->n);
    memcpy(record + HEAD_BYTES + m->n, &sum, sizeof sum);
    size_t n = HEAD_BYTES + m->n + TAIL_BYTES;
    BL_TRY(bl_file_write_full(e->fd, e->path, record, n, e->n_bytes));
    e->n_bytes += (int64_t)n;
    return BL_OK;
}

/* ---- files ---- */

double bl_wall_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

bl_status bl_events_path(const char *dir, char **path)
{
    char host[256], name[320];

    bl_host_name(host, sizeof host);
    for (int i = 0;; i++) {
        snprintf(name, sizeof name, BL_EVENTS_NAME "%010lld.%s.%d.%d", (long long)bl_wall_s(), host,
                 (int)getpid(), i);
        BL_TRY(bl_path_join(dir, name, path));
        if (!bl_file_exists(*path)) return BL_OK;
        free(*path);
    }
}

static bl_status write_head(bl_events *e, int64_t first_step, double wall_s)
{
    static const char VERSION[] = "brain.Event:2";
    message version = {.n = 0}, session = {.n = 0}, start = {.n = 0};

    put_event(&version, wall_s, 0);
    put_bytes(&version, EVENT_FILE_VERSION, VERSION, strlen(VERSION));
    BL_TRY(append(e, &version));
    put_field(&session, SESSION_STATUS, WIRE_VARINT);
    put_varint(&session, SESSION_START);
    put_event(&start, wall_s, first_step);
    put_bytes(&start, EVENT_SESSION, session.bytes, session.n);
    return append(e, &start);
}

bl_status bl_events_open(const char *path, int64_t first_step, double wall_s, bl_events **out)
{
    *out = NULL;
    bl_events *e = calloc(1, sizeof *e);
    if (e) e->path = strdup(path);
    if (!e || !e->path) {
        free(e);
        return BL_FAIL(BL_ENOMEM, "the event file");
    }
    e->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    bl_status st = e->fd >= 0 ? BL_OK : bl_fail_errno(BL_EIO, "create %s", path);
    if (st == BL_OK) st = write_head(e, first_step, wall_s);
    if (st == BL_OK)
        *out = e;
    else
        bl_events_close(e);
    return st;
}

bl_status bl_events_add(bl_events *e, int64_t step, double wall_s, const bl_scalar *scalars,
                        size_t n)
{
    message summary = {.n = 0}, event = {.n = 0};

    assert(n <= BL_EVENTS_MAX_SCALARS);
    for (size_t i = 0; i < n; i++) put_scalar(&summary, &scalars[i]);
    put_event(&event, wall_s, step);
    put_bytes(&event, EVENT_SUMMARY, summary.bytes, summary.n);
    return append(e, &event);
}

void bl_events_close(bl_events *e)
{
    if (!e) return;
    if (e->fd >= 0) close(e->fd);
    free(e->path);
    free(e);
}
