/* SPDX-License-Identifier: Apache-2.0 */
/* parent.c -- what a parent does while its ranks run: waits, for signals and for their words, and says at the end how the job ended.
 *
 * | event | the parent |
 * | first request to stop | passes it on; the ranks agree when to stop |
 * | second one, later than BL_LAUNCH_ONE_REQUEST_S | tells the other hosts' parents, and kills the ranks |
 * | ranks go by a request, before they take any | tells the other hosts' parents: theirs cannot know why |
 * | SIGTSTP | stops the ranks, then itself; when it continues, they do |
 * | a rank tells an error | keeps the first one: it is the job's; but a rank's own is better than what others say of it. Tells the other hosts' parents |
 * | a rank fails, or tells an error | gives the others LEFT_S to end, TOLD_S once the first has ended and the error is told, and kills those that do not |
 * | a rank ends well | gives the others the job's deadline and EXIT_S |
 * | a rank has closed its wire, so that all have | gives all exit_s, then kills those that hang in their exit: the job is done */
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
#include "base/log.h"
#include "base/sizes.h"
#include "comm/nccl/nccl.h"
#include "job/parent/hosts.h"

/* EXIT_S: a rank that ends with the first one's may wait the deadline for another, and then for its word (wire/thread.c). */
static const double LEFT_S = 5.0, TOLD_S = 1.0, EXIT_S = 4.0;

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP};

typedef struct watch {
    job_children children;
    bl_launch *launch; /* NULL: one host */
    double deadline_s; /* 0: none */
    double exit_s;
    struct pollfd *polled; /* [1 + n]: signals, and each child's socket */
    bl_error told;         /* by a child; status BL_OK: nothing yet */
    int asked;             /* the signal that asked to stop; 0: none */
    double asked_s;        /* when */
    bool is_left_at_once;  /* it came twice */
    double failed_s,
        ended_s,        /* when the first child failed, and when the first one ended; 0: none has */
        done_s;         /* when the first one said that it has closed its wire */
    bool is_stop_known; /* a rank says that it stops, and those of all hosts know */
    bool is_killed_in_exit; /* those that were left exit_s later */
} watch;

/* ---- what is said ---- */

/* At once: the other parents' ranks leave with its exit code, or see this one's go, and say nothing better. */
static void tell_other_parents(const watch *w, const bl_error *error)
{
    if (w->launch) bl_wire_abort(w->launch->wire, error);
}

static bl_status say_stopped(void)
{
    return BL_FAIL(BL_ESTOPPED,
                   "stopped at once on request; resume with --resume_from_checkpoint true");
}

/* Not agreed with the ranks of other hosts, as at a first request. */
static bl_status stop_all_hosts(const watch *w)
{
    bl_error error;

    bl_error_save(&error, say_stopped());
    tell_other_parents(w, &error);
    return bl_error_restore(&error);
}

/* ---- signals ---- */

/* A closed terminal's SIGHUP stays ignored under nohup. */
static void list_signals(bool takes_requests, sigset_t *signals)
{
    struct sigaction action;

    sigemptyset(signals);
    sigaddset(signals, SIGCHLD);
    sigaddset(signals, SIGTSTP);
    sigaddset(signals, SIGCONT);
    for (size_t i = 0; takes_requests && i < BL_COUNT(stop_signals); i++) {
        int number = stop_signals[i];
        bool is_ignored = sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
        if (number != SIGHUP || !is_ignored) sigaddset(signals, number);
    }
}

/* The ranks are in process groups of their own, which the terminal does not stop. Where nobody would continue it (no shell), the kernel ignores
 * the signal. */
static void stop_and_continue(watch *w)
{
    sigset_t stop;

    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    job_children_signal(&w->children, SIGSTOP);
    raise(SIGTSTP);
    pthread_sigmask(SIG_UNBLOCK, &stop, NULL); /* stops here */
    pthread_sigmask(SIG_BLOCK, &stop, NULL);
    job_children_signal(&w->children, SIGCONT);
}

static void kill_left(watch *w)
{
    job_children_reap(&w->children); /* who has ended, has not been killed */
    job_children_kill(&w->children);
}

/* A terminal that closes sends SIGHUP, and so does its shell; the limit of CPU time sends SIGXCPU each second. */
static bool is_repeated(const watch *w, int signal_number, double now_s)
{
    return now_s - w->asked_s < BL_LAUNCH_ONE_REQUEST_S || signal_number == SIGXCPU ||
           signal_number == SIGHUP;
}

static void take_request(watch *w, int signal_number, double now_s)
{
    if (w->asked == 0) {
        w->asked = signal_number;
        w->asked_s = now_s;
        if (signal_number == SIGINT) bl_log_note_echo();
        job_children_signal(&w->children, signal_number);
    } else if (!is_repeated(w, signal_number, now_s)) {
        if (signal_number == SIGINT) bl_log_note_echo();
        w->is_left_at_once = true;
        (void)stop_all_hosts(w);
        kill_left(w);
    }
}

static void take_signals(watch *w)
{
    struct signalfd_siginfo info;
    int numbers[16], n = 0;

    /* All that have come, before the first is answered: requests that came together are one, however long this process stands still. */
    while (n < (int)BL_COUNT(numbers) &&
           read(w->polled[0].fd, &info, sizeof info) == (ssize_t)sizeof info)
        numbers[n++] = (int)info.ssi_signo;
    double now_s = bl_now_s();
    for (int i = 0; i < n; i++) {
        int number = numbers[i];
        if (number == SIGTSTP)
            stop_and_continue(w);
        else if (number == SIGCONT)
            job_children_signal(&w->children, SIGCONT);
        else if (number != SIGCHLD)
            take_request(w, number, now_s);
    }
}

/* ---- children ---- */

/* Nothing, or what others, or NCCL, say of a rank that has gone. */
static bool is_hearsay(const bl_error *told)
{
    return told->status == BL_OK || told->status == BL_ECANCELLED || bl_wire_is_loss(told) ||
           bl_nccl_is_report(told);
}

static void take_word(watch *w, const bl_error *word)
{
    if (word->status == BL_OK) {
        if (w->done_s == 0.0) w->done_s = bl_now_s();
    } else if (word->status == BL_ESTOPPED && !word->text[0]) {
        w->is_stop_known = true;
    } else if (w->told.status == BL_OK || (is_hearsay(&w->told) && !is_hearsay(word))) {
        w->told = *word;
    }
}

static void hear(watch *w)
{
    bl_error word;

    for (int i = 0; i < w->children.n; i++)
        while (job_children_hear(&w->children, i, &word)) take_word(w, &word);
    if (!is_hearsay(&w->told) && w->told.status != BL_ESTOPPED) tell_other_parents(w, &w->told);
}

static bool has_failed(const job_child *c)
{
    return !c->is_running && !(WIFEXITED(c->wait_status) && WEXITSTATUS(c->wait_status) == 0);
}

static bool is_failed_elsewhere(const watch *w)
{
    bl_error error;
    if (!w->launch) return false;
    bl_wire_first_error(w->launch->wire, &error);
    return error.status != BL_OK;
}

/* Kills those that do not follow the first. */
static void look_after(watch *w)
{
    double now = bl_now_s();

    job_children_reap(&w->children);
    bool fails =
        is_failed_elsewhere(w) || (w->told.status != BL_OK && w->told.status != BL_ESTOPPED);
    for (int i = 0; i < w->children.n; i++) fails |= has_failed(&w->children.child[i]);
    if (fails && w->failed_s == 0.0) w->failed_s = now;
    if (w->children.n_ended > 0 && w->ended_s == 0.0) w->ended_s = now;
    double ended_for_s = w->ended_s > 0.0 ? now - w->ended_s : 0.0;
    bool is_over = (fails && now - w->failed_s > LEFT_S) ||
                   (fails && w->told.status != BL_OK && ended_for_s > TOLD_S) ||
                   (w->deadline_s > 0.0 && ended_for_s > w->deadline_s + EXIT_S);
    bool is_done = !is_over && w->done_s > 0.0 && now - w->done_s > w->exit_s;
    w->is_killed_in_exit |= is_done;
    if (is_over || is_done) kill_left(w);
}

static void watch_children(watch *w)
{
    enum { TICK_MS = 50 };

    while (w->children.n_running > 0) {
        bool has_clock =
            w->launch || w->ended_s > 0.0 || w->done_s > 0.0 || w->told.status != BL_OK;
        (void)poll(w->polled, 1 + (nfds_t)w->children.n, has_clock ? TICK_MS : -1);
        for (int i = 1; i <= w->children.n; i++) /* closed: nothing more will come */
            if (w->polled[i].revents & (POLLHUP | POLLERR)) w->polled[i].fd = -1;
        take_signals(w);
        hear(w);
        look_after(w);
    }
    hear(w);
}

/* ---- the verdict ---- */

/* Of a job over several hosts, a parent to whom no rank has told the job's error hears first what the others know. One whose ranks only saw another
 * host's go is the last to speak: that one's parent may take LEFT_S and SILENT_S, and ranks with much pinned memory seconds to go. */
static void wait_for_other_parents(const watch *w, bool has_silent_rank)
{
    static const double SILENT_S = 1.5, PATIENCE_S = 15.0;
    const struct timespec pause = {0, 20 * 1000 * 1000};
    double until = bl_now_s() + (has_silent_rank ? SILENT_S : PATIENCE_S);

    while (!is_failed_elsewhere(w) && bl_now_s() < until) nanosleep(&pause, NULL);
}

/* Of those that `is_one`, the one that ended first; NULL: none. */
static const job_child *find_first(const watch *w, bool (*is_one)(const job_child *))
{
    const job_child *first = NULL;
    for (int i = 0; i < w->children.n; i++) {
        const job_child *c = &w->children.child[i];
        if (is_one(c) && (!first || c->n_th < first->n_th)) first = c;
    }
    return first;
}

static bool was_killed(const job_child *c)
{
    return !c->is_ended_by_us && WIFSIGNALED(c->wait_status);
}

static bool was_ended_by_us(const job_child *c)
{
    return c->is_ended_by_us && WIFSIGNALED(c->wait_status);
}

static bool has_exited_with(const job_child *c, bl_status st)
{
    return WIFEXITED(c->wait_status) && WEXITSTATUS(c->wait_status) == bl_status_exit_code(st);
}

static bool has_left(const job_child *c)
{
    return WIFEXITED(c->wait_status) && WEXITSTATUS(c->wait_status) != 0;
}

/* Not because another one was lost. */
static bool has_left_by_itself(const job_child *c)
{
    return has_left(c) && !has_exited_with(c, BL_ERANK);
}

/* "rank 3 (process 4711)", of several hosts "rank 3 (process 4711 on host b)" */
static void name_child(const watch *w, const job_child *c, char *text, size_t text_bytes)
{
    char host[64] = "?";

    if (!w->launch) {
        snprintf(text, text_bytes, "rank %d (process %d)", c->rank, (int)c->pid);
        return;
    }
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, text_bytes, "rank %d (process %d on host %s)", c->rank, (int)c->pid, host);
}

static bl_status say_killed(const watch *w, const job_child *c)
{
    int number = WTERMSIG(c->wait_status);
    char name[128];

    name_child(w, c, name, sizeof name);
    return BL_FAIL(BL_ERANK, "%s was killed by signal %d (%s)%s", name, number, strsignal(number),
                   number == SIGKILL ? "; the system does that when memory runs out: see dmesg"
                                     : "");
}

static bl_status say_late(const watch *w, const job_child *c)
{
    char name[128];

    name_child(w, c, name, sizeof name);
    return BL_FAIL(BL_ERANK, "%s did not end when the others did", name);
}

static bl_status warn_of_exit(const watch *w, const job_child *c)
{
    char name[128];

    name_child(w, c, name, sizeof name);
    bl_log_warning("%s had done all and hung in its exit; it was killed", name);
    return BL_OK;
}

/* A rank that left without a word, or went when it was asked to stop: before it had begun, by the signal; before it took requests, with a stop's exit
 * code. Of neither do the other hosts' ranks know more than that it has gone. */
static bl_status judge_silent(const watch *w, const job_child *killed, const job_child *left)
{
    enum { NOT_LOADED = 127 }; /* of the dynamic loader */
    char name[128];

    if (killed) {
        if (WTERMSIG(killed->wait_status) == w->asked) return stop_all_hosts(w);
        return say_killed(w, killed);
    }
    if (has_exited_with(left, BL_ESTOPPED))
        return w->is_stop_known ? say_stopped() : stop_all_hosts(w);
    name_child(w, left, name, sizeof name);
    if (WEXITSTATUS(left->wait_status) == NOT_LOADED)
        return BL_FAIL(BL_ELIMIT,
                       "%s did not start: the system could not load its program, probably for lack "
                       "of memory or by a limit (ulimit -v); allow more, or use fewer ranks",
                       name);
    return BL_FAIL(BL_ERANK, "%s exited with code %d and did not say why", name,
                   WEXITSTATUS(left->wait_status));
}

/* What a rank has said is the job's error; but the parent knows more than ranks that only saw another one go. */
static bl_status judge(const watch *w)
{
    const job_child *killed = find_first(w, was_killed), *odd = find_first(w, has_left_by_itself),
                    *left = odd ? odd : find_first(w, has_left),
                    *late = find_first(w, was_ended_by_us);
    bl_status told = w->told.status;
    bool knows_better = killed || odd, is_stop = odd && has_exited_with(odd, BL_ESTOPPED);

    if (w->is_left_at_once) return say_stopped();
    if (late && w->is_killed_in_exit && told == BL_OK && !killed && !left)
        return warn_of_exit(w, late);
    if (w->launch && is_hearsay(&w->told) && !killed && !is_stop && (left || late))
        wait_for_other_parents(w, odd);
    if (told != BL_OK && !(knows_better && is_hearsay(&w->told))) return bl_error_restore(&w->told);
    if (killed || left) return judge_silent(w, killed, left);
    return late ? say_late(w, late) : BL_OK;
}

/* ---- */

static bl_status open_watch(watch *w, const sigset_t *signals)
{
    w->polled = calloc(1 + (size_t)w->children.n, sizeof *w->polled);
    if (!w->polled) return BL_FAIL(BL_ENOMEM, "%d children", w->children.n);
    int fd = signalfd(-1, signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) return bl_fail_errno(BL_EIO, "signalfd");
    w->polled[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    for (int i = 0; i < w->children.n; i++)
        w->polled[1 + i] = (struct pollfd){.fd = w->children.child[i].control_fd, .events = POLLIN};
    return BL_OK;
}

static void close_watch(watch *w)
{
    if (w->polled && w->polled[0].fd > 0) close(w->polled[0].fd);
    free(w->polled);
    job_children_free(&w->children);
}

/* May take minutes, until the other hosts have come. */
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
    watch w = {.launch = launch, .deadline_s = ranks->deadline_s, .exit_s = ranks->exit_s};
    job_host_links links;
    sigset_t signals, old;

    signal(
        SIGCHLD,
        SIG_DFL); /* who started this process may have it ignored: then nobody can be waited for */
    BL_TRY(connect_ranks(launch, ranks->n_here,
                         &links)); /* until there are ranks, a signal ends this process */
    list_signals(ranks->takes_requests, &signals);
    pthread_sigmask(SIG_BLOCK, &signals, &old);
    bl_status st = job_children_start(&links, ranks->argv, &old, &w.children);
    if (st == BL_OK && (st = open_watch(&w, &signals)) != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        job_children_kill(&w.children);
        st = bl_error_restore(&error);
    }
    if (w.children.line) bl_log_share_line(w.children.line);
    if (st == BL_OK) {
        watch_children(&w);
        st = judge(&w);
    }
    close_watch(&w);
    return st;
}
