/* SPDX-License-Identifier: Apache-2.0 */
/* strike.c -- see strike.h. The functions here override those of the C library. */
/* The checked inline functions of libc collide with the functions that this file defines. */
#undef _FORTIFY_SOURCE
#include "strike.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/wire/peer.h"

#define EXPORT __attribute__((visibility("default")))
/* The C library's function of this name, as a pointer of the type of the one here. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

typedef enum place { AT_BEGIN, AT_WIRE, AT_FILE, AT_END, N_PLACES } place;

static const char *const place_names[N_PLACES] = {"begin", "wire", "file", "end"};

static struct {
    bool is_on; /* this process is the rank */
    place where;
    int n;
    char what[16];
    double seconds;
    int rank, n_ranks;
    int next_fd; /* the connection to the next rank */
    atomic_int counts[N_PLACES];
} strike;

/* ---- the request ---- */

static _Noreturn void refuse(const char *text)
{
    dprintf(STDERR_FILENO, STRIKE_VARIABLE "=%s: see tests/processes/strike.h\n", text);
    abort();
}

/* "... rank=1 ranks=3 ... sockets=5,-1,7" (job/environment.c). */
static bool read_child(void)
{
    const char *child = getenv("BALLAST_CHILD"), *rank = child ? strstr(child, " rank=") : NULL,
               *sockets = child ? strstr(child, "sockets=") : NULL;

    if (!rank || !sockets) return false;
    if (sscanf(rank, " rank=%d ranks=%d", &strike.rank, &strike.n_ranks) != 2) refuse(child);
    sockets += strlen("sockets=");
    for (int i = 0; i < (strike.rank + 1) % strike.n_ranks; i++) {
        sockets = strchr(sockets, ',');
        if (!sockets++) refuse(child);
    }
    strike.next_fd = atoi(sockets);
    return true;
}

static void read_strike(const char *text)
{
    char where[16];
    int rank;

    if (sscanf(text, "%d:%15[^:]:%d:%15[^=]=%lf", &rank, where, &strike.n, strike.what,
               &strike.seconds) < 4)
        refuse(text);
    for (strike.where = AT_BEGIN; strike.where < N_PLACES; strike.where++)
        if (strcmp(place_names[strike.where], where) == 0) break;
    if (strike.where == N_PLACES) refuse(text);
    strike.is_on = read_child() && rank == strike.rank;
}

static bool is_what(const char *word)
{
    return strcmp(strike.what, word) == 0;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    const char *path = getenv(STRIKE_LOG_VARIABLE);
    int fd =
        path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    char text[256];
    va_list list;

    if (fd < 0) return;
    va_start(list, format);
    int n = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    (void)syscall(SYS_write, fd, text, (size_t)n);
    syscall(SYS_close, fd);
}

/* ---- the blow ---- */

static int nap_signal(void)
{
    return SIGRTMIN + 7;
}

static void nap(int signal_number)
{
    struct timespec left = {(time_t)strike.seconds,
                            (long)(1e9 * (strike.seconds - (double)(time_t)strike.seconds))};
    int before = errno;

    (void)signal_number;
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
    errno = before;
}

static bool is_wire(int thread)
{
    char path[64], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", thread);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (fd < 0) return false;
    (void)!read(fd, name, sizeof name - 1);
    syscall(SYS_close, fd);
    return strcmp(name, "wire\n") == 0;
}

static void put_to_sleep(bool spares_wire)
{
    struct sigaction action = {.sa_handler = nap, .sa_flags = SA_RESTART};
    int self = (int)syscall(SYS_gettid);
    DIR *folder = opendir("/proc/self/task");
    const struct dirent *entry;

    sigaction(nap_signal(), &action, NULL);
    while (folder && (entry = readdir(folder))) {
        int thread = atoi(entry->d_name);
        if (thread <= 0 || thread == self || (spares_wire && is_wire(thread))) continue;
        syscall(SYS_tgkill, getpid(), thread, nap_signal());
    }
    if (folder) closedir(folder);
    if (!spares_wire || !is_wire(self)) nap(0);
}

/* Returns whether the call is to fail. */
static bool suffer(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    note("%.9f\n", (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    if (is_what("fail")) return true;
    if (is_what("stop"))
        kill(getpid(), SIGSTOP);
    else if (is_what("slow") || is_what("pause"))
        put_to_sleep(is_what("slow"));
    else
        kill(getpid(), SIGKILL);
    return false;
}

/* A point has come; returns whether the call is to fail. */
static bool pass(place where, const char *text)
{
    if (!strike.is_on) return false;
    int n = atomic_fetch_add(&strike.counts[where], 1) + 1;
    if (is_what("count")) note("%s %d %s\n", place_names[where], n, text);
    return where == strike.where && n == strike.n && !is_what("count") && suffer();
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv(STRIKE_VARIABLE);
    if (!text) return;
    read_strike(text);
    (void)pass(AT_BEGIN, "begin");
}

__attribute__((destructor)) static void end(void)
{
    (void)pass(AT_END, "exit");
}

EXPORT void _exit(int code)
{
    (void)pass(AT_END, "_exit");
    syscall(SYS_exit_group, code);
    __builtin_unreachable();
}

/* Threads that take no signals take this one. */
EXPORT int pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    sigset_t wanted;
    if (set) {
        wanted = *set;
        if (how != SIG_UNBLOCK) sigdelset(&wanted, nap_signal());
    }
    return REAL(pthread_sigmask)(how, set ? &wanted : NULL, old);
}

/* ---- the wire ---- */

/* Where the stream to the next rank is. Of the wire's thread. */
static struct {
    unsigned char header[sizeof(comm_frame)];
    size_t n_header, n_left; /* of the header, had; of the frame's bytes, to come */
    bool is_counted;         /* the frame whose first byte comes next */
} stream;

static const char *frame_name(uint32_t kind)
{
    switch (kind) {
    case COMM_FRAME_MESSAGE:
        return "MESSAGE";
    case COMM_FRAME_READY:
        return "READY";
    case COMM_FRAME_DATA:
        return "DATA";
    case COMM_FRAME_WORD:
        return "WORD";
    case COMM_FRAME_CLOSED:
        return "CLOSED";
    default:
        return "other";
    }
}

static size_t total_of(const struct msghdr *message)
{
    size_t n = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) n += message->msg_iov[i].iov_len;
    return n;
}

static unsigned char byte_at(const struct msghdr *message, size_t at)
{
    size_t i = 0;
    while (at >= message->msg_iov[i].iov_len) at -= message->msg_iov[i++].iov_len;
    return ((const unsigned char *)message->msg_iov[i].iov_base)[at];
}

/* The first n_bytes of it have gone out. */
static void follow(const struct msghdr *message, size_t n_bytes)
{
    for (size_t at = 0; at < n_bytes;) {
        if (stream.n_left > 0) {
            size_t n = stream.n_left < n_bytes - at ? stream.n_left : n_bytes - at;
            stream.n_left -= n;
            at += n;
            continue;
        }
        stream.header[stream.n_header++] = byte_at(message, at++);
        stream.is_counted = false;
        if (stream.n_header < sizeof stream.header) continue;
        comm_frame frame;
        memcpy(&frame, stream.header, sizeof frame);
        stream.n_left = frame.n_bytes;
        stream.n_header = 0;
    }
}

/* How many bytes there are before the next frame's first one; `most` when it is not in this
 * call. */
static size_t room_before_frame(size_t most)
{
    if (stream.n_header > 0) { /* the rest of a header goes alone */
        size_t n = sizeof stream.header - stream.n_header;
        return n < most ? n : most;
    }
    return stream.n_left < most ? stream.n_left : most;
}

static ssize_t send_part(int fd, const struct msghdr *message, size_t n_bytes, int flags)
{
    struct iovec parts[8];
    struct msghdr part = {.msg_iov = parts};

    for (size_t left = n_bytes, i = 0; left > 0 && i < 8; i++) {
        parts[i] = message->msg_iov[i];
        if (parts[i].iov_len > left) parts[i].iov_len = left;
        left -= parts[i].iov_len;
        part.msg_iovlen++;
    }
    return REAL(sendmsg)(fd, &part, flags);
}

static bool is_broken; /* the connection */

/* As that to a host that does not answer. The other end sees its end. */
static ssize_t fail_by_timeout(int fd)
{
    if (!is_broken) shutdown(fd, SHUT_RDWR);
    is_broken = true;
    errno = ETIMEDOUT;
    return -1;
}

EXPORT ssize_t recv(int fd, void *bytes, size_t n, int flags)
{
    if (is_broken && fd == strike.next_fd) return fail_by_timeout(fd);
    return recvfrom(fd, bytes, n, flags, NULL, NULL);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    size_t total = total_of(message);

    if (is_broken && fd == strike.next_fd) return fail_by_timeout(fd);
    if (!strike.is_on || fd != strike.next_fd || total == 0)
        return REAL(sendmsg)(fd, message, flags);
    size_t n = room_before_frame(total);
    if (n == 0) { /* a frame begins */
        comm_frame frame = {0};
        for (size_t i = 0; i < sizeof frame && i < total; i++)
            ((unsigned char *)&frame)[i] = byte_at(message, i);
        bool is_torn = is_what("torn") && strike.where == AT_WIRE && !stream.is_counted &&
                       atomic_load(&strike.counts[AT_WIRE]) + 1 == strike.n;
        if (is_torn && total >= sizeof frame) (void)send_part(fd, message, sizeof frame / 2, flags);
        bool is_struck = !stream.is_counted && pass(AT_WIRE, frame_name(frame.kind));
        if (is_struck) return fail_by_timeout(fd);
        stream.is_counted = true;
        n = sizeof frame + frame.n_bytes < total ? sizeof frame + frame.n_bytes : total;
    }
    ssize_t sent = send_part(fd, message, n, flags);
    if (sent > 0) follow(message, (size_t)sent);
    return sent;
}

/* ---- files ---- */

static bool fails(const char *text)
{
    if (!pass(AT_FILE, text)) return false;
    errno = EIO;
    return true;
}

EXPORT int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, int) : 0;
    va_end(list);
    if ((flags & O_ACCMODE) != O_RDONLY && fails("open")) return -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* An eventfd's do not fail, and the log's may. */
static bool is_file(int fd)
{
    struct stat info;
    return fd > STDERR_FILENO && fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

EXPORT ssize_t write(int fd, const void *bytes, size_t n)
{
    if (is_file(fd) && fails("write")) return -1;
    return syscall(SYS_write, fd, bytes, n);
}

EXPORT ssize_t pwrite(int fd, const void *bytes, size_t n, off_t offset)
{
    if (fails("pwrite")) return -1;
    return syscall(SYS_pwrite64, fd, bytes, n, offset);
}

EXPORT int fsync(int fd)
{
    return fails("fsync") ? -1 : (int)syscall(SYS_fsync, fd);
}

EXPORT int rename(const char *from, const char *to)
{
    return fails("rename") ? -1 : REAL(rename)(from, to);
}

EXPORT int mkdir(const char *path, mode_t mode)
{
    return fails("mkdir") ? -1 : REAL(mkdir)(path, mode);
}

EXPORT int unlink(const char *path)
{
    return fails("unlink") ? -1 : REAL(unlink)(path);
}

EXPORT int ftruncate(int fd, off_t n_bytes)
{
    return fails("ftruncate") ? -1 : REAL(ftruncate)(fd, n_bytes);
}
