/* SPDX-License-Identifier: Apache-2.0 */
/* parent.c -- the parent while its ranks run: handles signals and error reports, and judges the end
 * (verdict.c).
 *
 * | event | the parent |
 * | first request to stop | passes it on; the ranks agree when to stop |
 * | second one, later than BL_LAUNCH_ONE_REQUEST_S | tells the other hosts' parents, and kills the
 *   ranks |
 * | ranks go by a request, before they take any | tells the other hosts' parents: theirs cannot
 *   know why |
 * | SIGTSTP | stops the ranks, then itself; when it continues, they do |
 * | a rank tells an error | keeps the first one: it is the job's; but a rank's own is better than
 *   what others say of it. Tells the other hosts' parents |
 * | a rank fails, or tells an error | gives the others LEFT_S to end, TOLD_S once the first has
 *   ended and the error is known, and kills those that do not |
 * | a rank ends well | gives the others the job's deadline and EXIT_S |
 * | a rank has closed its wire, so that all have | gives all exit_s, then kills those that hang in
 *   their exit: the job is done */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/host_name.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/sizes.h"
#include "comm/nccl/nccl.h"
#include "job/parent/hosts.h"
#include "job/parent/verdict.h"

/* EXIT_S: a rank that ends with the first one's may wait the deadline for another, and then for its
 * word (wire/thread.c). */
static const double LEFT_S = 5.0, TOLD_S = 1.0, EXIT_S = 4.0;

typedef struct parent {
    job_children children;
    bl_launch *launch; /* NULL: one host */
    double deadline_s; /* 0: none */
    double exit_s;
    struct pollfd *polled; /* [1 + n]: signals, and each child's socket */
    bl_error told;         /* by a child; status BL_OK: nothing yet */
    job_requests requests;
    double asked_s; /* when the signal that asked to stop came; all four BL_NEVER_S until then */
    double failed_s, ended_s, /* when the first child failed, and when the first one ended */
        done_s;               /* when the first one said that it has closed its wire */
} parent;

/* ---- messages ---- */

/* At once: the other parents' ranks leave with its exit code, or see this one's go, and say nothing
 * better. */
static void tell_other_parents(const parent *p, const bl_error *error)
{
    if (p->launch) bl_wire_abort(p->launch->wire, error);
}

static bl_status say_stopped(void)
{
    return BL_FAIL(BL_ESTOPPED,
                   "stopped at once on request; resume with --resume_from_checkpoint true");
}

/* Not agreed with the ranks of other hosts, as at a first request. */
static bl_status stop_all_hosts(const parent *p)
{
    bl_error error;

    bl_error_save(&error, say_stopped());
    tell_other_parents(p, &error);
    return bl_error_restore(&error);
}

/* ---- signals ---- */

static void list_signals(bool takes_requests, sigset_t *signals)
{
    sigemptyset(signals);
    if (takes_requests) {
        bl_stop_signals_list(signals);
        sigaddset(signals, BL_REPORT_SIGNAL);
    }
    sigaddset(signals, SIGCHLD);
    sigaddset(signals, SIGTSTP);
    sigaddset(signals, SIGCONT);
}

/* The ranks are in separate process groups, which the terminal does not stop. Where no shell would
 * continue it, the kernel ignores the signal. */
static void stop_and_continue(parent *p)
{
    sigset_t stop;

    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    job_children_signal(&p->children, SIGSTOP);
    raise(SIGTSTP);
    pthread_sigmask(SIG_UNBLOCK, &stop, NULL); /* stops here */
    pthread_sigmask(SIG_BLOCK, &stop, NULL);
    job_children_signal(&p->children, SIGCONT);
}

static void kill_left(parent *p)
{
    job_children_reap(&p->children); /* reap first: exited children are not killed */
    job_children_kill(&p->children);
}

static bool is_repeated(const parent *p, int signal_number, double now_s)
{
    return now_s - p->asked_s < BL_LAUNCH_ONE_REQUEST_S || bl_stop_signal_repeats(signal_number);
}

static void take_request(parent *p, int signal_number, double now_s)
{
    if (p->requests.asked == 0) {
        p->requests.asked = signal_number;
        p->asked_s = now_s;
        if (signal_number == SIGINT) bl_log_note_echo();
        job_children_signal(&p->children, signal_number);
    } else if (!is_repeated(p, signal_number, now_s)) {
        if (signal_number == SIGINT) bl_log_note_echo();
        p->requests.is_left_at_once = true;
        (void)stop_all_hosts(p);
        kill_left(p);
    }
}

static void take_signals(parent *p)
{
    struct signalfd_siginfo info;
    int numbers[16], n = 0;

    /* All that have come, before the first is answered: requests that came together are one,
     * however long this process is stopped. */
    while (n < (int)BL_COUNT(numbers) &&
           read(p->polled[0].fd, &info, sizeof info) == (ssize_t)sizeof info)
        numbers[n++] = (int)info.ssi_signo;
    double now_s = bl_now_s();
    for (int i = 0; i < n; i++) {
        int number = numbers[i];
        if (number == SIGTSTP)
            stop_and_continue(p);
        else if (number == SIGCONT || number == BL_REPORT_SIGNAL)
            job_children_signal(&p->children, number);
        else if (number != SIGCHLD)
            take_request(p, number, now_s);
    }
}

/* ---- children ---- */

/* Nothing, or what another rank or NCCL reports about a lost one. */
static bool is_indirect(const bl_error *told)
{
    return told->status == BL_OK || told->status == BL_ECANCELED || bl_wire_is_loss(told) ||
           bl_nccl_is_report(told);
}

static void note_report(parent *p, const bl_error *word)
{
    if (word->status == BL_OK) {
        if (p->done_s == BL_NEVER_S) p->done_s = bl_now_s();
    } else if (word->status == BL_ESTOPPED && !word->text[0]) {
        p->requests.is_stop_known = true;
    } else if (p->told.status == BL_OK || (is_indirect(&p->told) && !is_indirect(word))) {
        p->told = *word;
    }
}

static void read_reports(parent *p)
{
    bl_error word;

    for (int i = 0; i < p->children.n; i++)
        while (job_children_read(&p->children, i, &word)) note_report(p, &word);
    if (!is_indirect(&p->told) && p->told.status != BL_ESTOPPED) tell_other_parents(p, &p->told);
}

static bool has_failed(const job_child *c)
{
    return !c->is_running && !(WIFEXITED(c->wait_status) && WEXITSTATUS(c->wait_status) == 0);
}

static bool is_failed_elsewhere(const parent *p)
{
    bl_error error;
    if (!p->launch) return false;
    bl_wire_first_error(p->launch->wire, &error);
    return error.status != BL_OK;
}

/* Kills those that do not follow the first. */
static void kill_late_ranks(parent *p)
{
    double now = bl_now_s();

    job_children_reap(&p->children);
    bool fails =
        is_failed_elsewhere(p) || (p->told.status != BL_OK && p->told.status != BL_ESTOPPED);
    for (int i = 0; i < p->children.n; i++) fails |= has_failed(&p->children.child[i]);
    if (fails && p->failed_s == BL_NEVER_S) p->failed_s = now;
    if (p->children.n_ended > 0 && p->ended_s == BL_NEVER_S) p->ended_s = now;
    double ended_for_s = p->ended_s > BL_NEVER_S ? now - p->ended_s : 0.0;
    bool is_over = (fails && now - p->failed_s > LEFT_S) ||
                   (fails && p->told.status != BL_OK && ended_for_s > TOLD_S) ||
                   (p->deadline_s > 0.0 && ended_for_s > p->deadline_s + EXIT_S);
    bool is_done = !is_over && p->done_s > BL_NEVER_S && now - p->done_s > p->exit_s;
    p->requests.is_killed_in_exit |= is_done;
    if (is_over || is_done) kill_left(p);
}

static void watch_children(parent *p)
{
    enum { TICK_MS = 50 };

    while (p->children.n_running > 0) {
        bool has_clock = p->launch || p->ended_s > BL_NEVER_S || p->done_s > BL_NEVER_S ||
                         p->told.status != BL_OK;
        (void)poll(p->polled, 1 + (nfds_t)p->children.n, has_clock ? TICK_MS : -1);
        for (int i = 1; i <= p->children.n; i++) /* closed: nothing more will come */
            if (p->polled[i].revents & (POLLHUP | POLLERR)) p->polled[i].fd = -1;
        take_signals(p);
        read_reports(p);
        kill_late_ranks(p);
    }
    read_reports(p);
}

/* ---- the verdict ---- */

static void wait_for_other_parents(const parent *p, job_wait wait)
{
    static const double WAIT_S[] = {[JOB_SHORT_WAIT] = 1.5, [JOB_LONG_WAIT] = 15.0};
    const struct timespec pause = {0, 20 * 1000 * 1000};
    double until = bl_now_s() + WAIT_S[wait];

    while (!is_failed_elsewhere(p) && bl_now_s() < until) nanosleep(&pause, NULL);
}

/* "rank 3 (process 4711)", of several hosts "rank 3 (process 4711 on host b)" */
static void name_child(const parent *p, const job_child *c, char *text, size_t text_bytes)
{
    char host[64];

    if (!p->launch) {
        snprintf(text, text_bytes, "rank %d (process %d)", c->rank, (int)c->pid);
        return;
    }
    bl_host_name(host, sizeof host);
    snprintf(text, text_bytes, "rank %d (process %d on host %s)", c->rank, (int)c->pid, host);
}

static bl_status say_killed(const parent *p, const job_child *c)
{
    int number = WTERMSIG(c->wait_status);
    char name[128];

    name_child(p, c, name, sizeof name);
    return BL_FAIL(BL_ERANK, "%s was killed by signal %d (%s)%s", name, number, strsignal(number),
                   number == SIGKILL ? "; the system does that when memory runs out: see dmesg"
                                     : "");
}

static bl_status fail_late(const parent *p, const job_child *c)
{
    char name[128];

    name_child(p, c, name, sizeof name);
    return BL_FAIL(BL_ERANK, "%s did not end when the others did", name);
}

static bl_status warn_of_exit(const parent *p, const job_child *c)
{
    char name[128];

    name_child(p, c, name, sizeof name);
    bl_log_warning("%s had done all and hung in its exit; it was killed", name);
    return BL_OK;
}

static bl_status say_exited(const parent *p, const job_child *c)
{
    enum { NOT_LOADED = 127 }; /* of the dynamic loader */
    int code = WEXITSTATUS(c->wait_status);
    char name[128];

    name_child(p, c, name, sizeof name);
    if (code != NOT_LOADED)
        return BL_FAIL(BL_ERANK, "%s exited with code %d and did not say why", name, code);
    return BL_FAIL(BL_ELIMIT,
                   "%s did not start: the system could not load its program, probably for lack "
                   "of memory or by a limit (ulimit -v); allow more, or use fewer ranks",
                   name);
}

static bl_status judge(const parent *p)
{
    const job_child *first;
    job_evidence evidence = job_find_evidence(&p->children, &p->requests, &first);
    job_judgement judgement = job_judge(evidence, p->told.status == BL_OK ? JOB_NO_REPORT
                                                  : is_indirect(&p->told) ? JOB_INDIRECT_REPORT
                                                                          : JOB_REPORT);

    if (p->launch && judgement.wait != JOB_NO_WAIT) wait_for_other_parents(p, judgement.wait);
    switch (judgement.verdict) {
    case JOB_WARN_OF_EXIT:
        return warn_of_exit(p, first);
    case JOB_PRINT_REPORT:
        return bl_error_restore(&p->told);
    case JOB_PRINT_STOP:
        return say_stopped();
    case JOB_PRINT_STOP_TO_ALL:
        return stop_all_hosts(p);
    case JOB_PRINT_KILLED:
        return say_killed(p, first);
    case JOB_PRINT_EXITED:
        return say_exited(p, first);
    case JOB_PRINT_LATE:
        return fail_late(p, first);
    case JOB_SUCCESS:
        break;
    }
    return BL_OK;
}

/* ---- */

static bl_status open_parent(parent *p, const sigset_t *signals)
{
    p->polled = calloc(1 + (size_t)p->children.n, sizeof *p->polled);
    if (!p->polled) return BL_FAIL(BL_ENOMEM, "%d children", p->children.n);
    int fd = signalfd(-1, signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) return bl_fail_errno(BL_EIO, "signalfd");
    p->polled[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    for (int i = 0; i < p->children.n; i++)
        p->polled[1 + i] = (struct pollfd){.fd = p->children.child[i].control_fd, .events = POLLIN};
    return BL_OK;
}

static void close_parent(parent *p)
{
    if (p->polled && p->polled[0].fd > 0) close(p->polled[0].fd);
    free(p->polled);
    job_children_free(&p->children);
}

/* May take minutes, until the other hosts have connected. */
static bl_status connect_ranks(bl_launch *launch, int n_here, job_host_links *links)
{
    bl_status st = launch ? job_hosts_meet(launch, n_here, links)
                          : job_host_links_create(n_here, 0, n_here, links);
    if (st == BL_OK) st = job_host_links_connect(links);
    if (st != BL_OK) job_host_links_close(links);
    return st;
}

bl_status bl_launch_run_ranks(bl_launch *launch, const bl_launch_ranks *ranks)
{
    parent p = {.launch = launch,
                .deadline_s = ranks->deadline_s,
                .exit_s = ranks->exit_s,
                .asked_s = BL_NEVER_S,
                .failed_s = BL_NEVER_S,
                .ended_s = BL_NEVER_S,
                .done_s = BL_NEVER_S};
    job_host_links links;
    sigset_t signals, old;

    signal(SIGCHLD,
           SIG_DFL); /* inherited as ignored, it would make waiting for children impossible */
    BL_TRY(connect_ranks(launch, ranks->n_here,
                         &links)); /* until there are ranks, a signal ends this process */
    list_signals(ranks->takes_requests, &signals);
    pthread_sigmask(SIG_BLOCK, &signals, &old);
    bl_status st = job_children_start(&links, ranks->argv, &old, &p.children);
    if (st == BL_OK && (st = open_parent(&p, &signals)) != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        job_children_kill(&p.children);
        st = bl_error_restore(&error);
    }
    if (p.children.line) bl_log_share_line(p.children.line);
    if (st == BL_OK) {
        watch_children(&p);
        st = judge(&p);
    }
    close_parent(&p);
    return st;
}
