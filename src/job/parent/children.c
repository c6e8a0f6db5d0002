/* SPDX-License-Identifier: Apache-2.0 */
/* children.c -- starts the ranks of a host by posix_spawn with a channel each, and collects their
 * messages and exits. */
#include "job/parent/children.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- starting ---- */

/* What is open here, and was not made to be closed, would stay open in every rank. */
static void close_all_on_exec(void)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;

    if (!folder) return;
    while ((entry = readdir(folder))) {
        int fd = atoi(entry->d_name); /* 0 of "." and ".." */
        if (fd > STDERR_FILENO) fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    closedir(folder);
}

/* This environment with a definition more; [n + 2], borrowed strings. */
static char **environment_with(char *definition)
{
    size_t n = 0, used = 0;

    while (environ[n]) n++;
    char **out = calloc(n + 2, sizeof *out);
    for (size_t i = 0; out && i < n; i++)
        if (!job_child_is(environ[i])) out[used++] = environ[i];
    if (out) out[used] = definition;
    return out;
}

typedef struct start {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
} start;

/* posix_spawn clears the flag that closes a descriptor when it is duplicated to itself. */
static void keep(start *s, int fd)
{
    if (fd >= 0) posix_spawn_file_actions_adddup2(&s->actions, fd, fd);
}

static void describe_start(start *s, const bl_launch_child *c, const sigset_t *mask)
{
    posix_spawn_file_actions_init(&s->actions);
    posix_spawn_file_actions_addopen(&s->actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    keep(s, c->control_fd);
    keep(s, c->line_fd);
    keep(s, c->bulk_fd);
    keep(s, c->memory_fd);
    for (int i = 0; i < c->n_ranks; i++) keep(s, c->sockets[i]);
    posix_spawnattr_init(&s->attributes);
    posix_spawnattr_setpgroup(&s->attributes, 0);
    posix_spawnattr_setsigmask(&s->attributes, mask);
    posix_spawnattr_setflags(&s->attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
}

static bl_status spawn(const bl_launch_child *c, char *const *argv, const sigset_t *mask,
                       pid_t *pid)
{
    start s;
    char *definition = job_child_format(c);
    char **environment = definition ? environment_with(definition) : NULL;

    if (!environment) {
        free(definition);
        return BL_FAIL(BL_ENOMEM, "the environment of rank %d", c->rank);
    }
    describe_start(&s, c, mask);
    int code = posix_spawn(pid, "/proc/self/exe", &s.actions, &s.attributes, argv, environment);
    posix_spawn_file_actions_destroy(&s.actions);
    posix_spawnattr_destroy(&s.attributes);
    free(environment);
    free(definition);
    errno = code;
    return code == 0 ? BL_OK : bl_fail_errno(BL_EIO, "rank %d could not be started", c->rank);
}

/* What all children have in common: memory files. */
typedef struct shared_files {
    int line_fd, bulk_fd, memory_fd;
} shared_files;

static bl_status create_files(shared_files *files, void **line)
{
    *files = (shared_files){memfd_create("ballast-line", MFD_CLOEXEC),
                            memfd_create("ballast-bulk", MFD_CLOEXEC),
                            memfd_create("ballast-host", MFD_CLOEXEC)};
    if (files->line_fd < 0 || files->bulk_fd < 0 || files->memory_fd < 0)
        return bl_fail_errno(BL_EIO, "the memory that ranks share: memfd_create");
    if (ftruncate(files->line_fd, 1) != 0) return bl_fail_errno(BL_EIO, "ftruncate");
    *line = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, files->line_fd, 0);
    if (*line != MAP_FAILED) return BL_OK;
    *line = NULL;
    return bl_fail_errno(BL_ENOMEM, "the memory that ranks share: mmap");
}

static void close_files(shared_files *files)
{
    close_fd(&files->line_fd);
    close_fd(&files->bulk_fd);
    close_fd(&files->memory_fd);
}

static bl_status start_child(job_host_links *links, int local, const shared_files *files,
                             char *const *argv, const sigset_t *mask, job_child *out)
{
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return bl_fail_errno(BL_EIO, "a socket of rank %d: socketpair",
                             links->first_on_host + local);
    bl_launch_child c = {.parent = (int)getpid(),
                         .rank = links->first_on_host + local,
                         .n_ranks = links->n_ranks,
                         .first_on_host = links->first_on_host,
                         .n_on_host = links->n_on_host,
                         .control_fd = ends[1],
                         .line_fd = files->line_fd,
                         .bulk_fd = files->bulk_fd,
                         .memory_fd = files->memory_fd,
                         .sockets = job_host_links_at(links, local, 0)};
    *out = (job_child){.rank = c.rank, .control_fd = ends[0]};
    bl_status st = spawn(&c, argv, mask, &out->pid);
    out->is_running = st == BL_OK;
    close(ends[1]);
    /* The child's own are gone when it is: that is how the others notice. */
    for (int rank = 0; rank < links->n_ranks; rank++)
        close_fd(job_host_links_at(links, local, rank));
    return st;
}

static bl_status start_all(job_host_links *links, char *const *argv, const sigset_t *mask,
                           job_children *out)
{
    shared_files files = {-1, -1, -1};

    bl_status st = create_files(&files, &out->line);
    close_all_on_exec();
    for (int i = 0; st == BL_OK && i < links->n_on_host; i++) {
        st = start_child(links, i, &files, argv, mask, &out->child[i]);
        out->n++;
        out->n_running += out->child[i].is_running;
    }
    close_files(&files);
    return st;
}

/* Of those that were killed; their status says nothing. */
static void wait_for_end(job_children *children)
{
    for (int i = 0; i < children->n; i++) {
        job_child *c = &children->child[i];
        while (c->is_running && waitpid(c->pid, &c->wait_status, 0) < 0 && errno == EINTR) continue;
        children->n_running -= c->is_running;
        c->is_running = false;
    }
}

bl_status job_children_start(job_host_links *links, char *const *argv, const sigset_t *mask,
                             job_children *out)
{
    *out = (job_children){.child = calloc((size_t)links->n_on_host, sizeof *out->child)};
    bl_status st = out->child ? start_all(links, argv, mask, out)
                              : BL_FAIL(BL_ENOMEM, "%d children", links->n_on_host);
    job_host_links_close(links);
    if (st != BL_OK) {
        job_children_kill(out);
        wait_for_end(out);
    }
    return st;
}

void job_children_free(job_children *children)
{
    for (int i = 0; i < children->n; i++) close_fd(&children->child[i].control_fd);
    free(children->child);
    /* The line's byte stays mapped: the log may read it until the process ends. */
    *children = (job_children){0};
}

/* ---- while they run ---- */

void job_children_reap(job_children *children)
{
    for (int i = 0; i < children->n; i++) {
        job_child *c = &children->child[i];
        if (!c->is_running || waitpid(c->pid, &c->wait_status, WNOHANG) != c->pid) continue;
        c->is_running = false;
        c->n_th = ++children->n_ended;
        children->n_running--;
    }
}

void job_children_signal(const job_children *children, int signal_number)
{
    for (int i = 0; i < children->n; i++)
        if (children->child[i].is_running) kill(children->child[i].pid, signal_number);
}

void job_children_kill(job_children *children)
{
    for (int i = 0; i < children->n; i++) {
        job_child *c = &children->child[i];
        if (!c->is_running) continue;
        c->is_ended_by_us = true;
        kill(c->pid, SIGKILL);
    }
}

bool job_children_read(const job_children *children, int i, bl_error *out)
{
    job_message message;
    ssize_t n = recv(children->child[i].control_fd, &message, sizeof message, MSG_DONTWAIT);

    if (n != (ssize_t)sizeof message) return false;
    *out = message.error;
    out->text[sizeof out->text - 1] = '\0';
    return true;
}
