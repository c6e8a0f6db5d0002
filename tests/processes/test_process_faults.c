/* SPDX-License-Identifier: Apache-2.0 */
/* A small training of three processes under their parent, in which one rank is killed, stopped,
 * slowed down or made to fail, at each of its points in turn: before it begins, at every frame of
 * the wire (so at every collective: of the start, of each step, of evaluation, save and end), at
 * every call that writes files, and when it exits. Points are counted in a run in which nothing
 * happens (strike.h). After each
 *   - the parent ends in time, with the right code and one line of error that names the rank, and
 *     no other that only waits for it
 *   - no process is left
 *   - resumed, the run ends as the undisturbed one, bit for bit
 * A fault that lasts less than the deadline must have no effect.
 *
 * Without arguments a sample; "all": every point. Several jobs run at a time: most of them wait for
 * a deadline. On a loaded machine, or one that itself stalls, an innocent rank may miss the
 * deadline: the failure is printed, and the trial repeated. A defect fails each time. */
#include "mpi_job.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "strike.h"

enum { N_RANKS = 3, N_STEPS = 2, N_SLOTS = 8, MAX_TRIALS = 8192, MAX_TRIES = 4 };

/* The deadline is long enough that a loaded machine does not make an innocent rank late.
 * PROMISED_S: the limit in docs/reliability.md; ALLOWED_S: longer counts as a defect here, on a
 * machine whose processes may stall for seconds. */
static const double DEADLINE_S = 4.0, PROMISED_S = 5.0, ALLOWED_S = 20.0, HANG_S = 240.0;

static bool is_all; /* every point */

/* ---- the trials ---- */

typedef enum outcome {
    KILLED,   /* 7, and the rank is named */
    BROKEN,   /* 7, and one end of the connection is named */
    HARMLESS, /* 0 */
    OWN       /* the rank's own error, or it did not need the call */
} outcome;

typedef struct action {
    const char *where, *what; /* strike.h */
    double seconds;           /* 0: none */
    outcome outcome;
    int every,
        sample;  /* which points: one in so many, in a whole matrix and in the sample; 0: none */
    int resumes; /* one in so many of these is resumed */
} action;

/* clang-format off */
static const action actions[] = {
    {"begin", "kill", 0, KILLED, 1, 3, 1},
    {"begin", "stop", 0, KILLED, 1, 3, 1},
    {"wire", "kill", 0, KILLED, 1, 19, 1},
    {"wire", "torn", 0, KILLED, 4, 101, 1},
    {"wire", "stop", 0, KILLED, 1, 79, 8},
    {"wire", "slow", 60, KILLED, 1, 71, 8},
    {"wire", "pause", 60, KILLED, 4, 113, 8},
    {"wire", "slow", 1, HARMLESS, 4, 101, 0},
    {"wire", "pause", 1, HARMLESS, 4, 103, 0},
    {"wire", "fail", 0, BROKEN, 1, 47, 4},
    {"file", "kill", 0, KILLED, 1, 29, 1},
    {"file", "stop", 0, KILLED, 8, 91, 4},
    {"file", "fail", 0, OWN, 1, 29, 1},
    {"end", "kill", 0, KILLED, 1, 3, 1},
    {"end", "stop", 0, KILLED, 1, 3, 1},
};
/* clang-format on */

typedef struct trial {
    const action *action;
    int rank, n;
    bool resumes, is_resumed, is_used;
    bool is_wrong;
    int n_tries;
    double started_s;
    runs_child child;
    char output[GOLDEN_PATH_BYTES], struck[GOLDEN_PATH_BYTES];
} trial;

static struct {
    int n_points[N_RANKS][2]; /* of `wire` and of `file` */
    char whole[GOLDEN_PATH_BYTES];
    int n_trials, n_wrong, n_again, n_unreached, n_resumed, n_late;
    double longest_s; /* after the due time */
} book;

static void run_args(golden_args *args, const char *output)
{
    runs_standard(args, output, N_RANKS);
    runs_set(args, "rank_processes", "true");
    runs_set(args, "max_steps", "%d", N_STEPS);
    runs_set(args, "eval_steps", "2");
    runs_set(args, "step_deadline_s", "%g", DEADLINE_S);
    runs_set(args, "resume_from_checkpoint", "true");
}

/* With no strike: the run as it is. */
static void start(runs_child *child, const char *output, const char *strike, const char *struck)
{
    golden_args args = {0};

    run_args(&args, output);
    if (strike) {
        setenv("LD_PRELOAD", STRIKE_LIBRARY, 1);
        setenv(STRIKE_VARIABLE, strike, 1);
    }
    setenv(STRIKE_LOG_VARIABLE, struck, 1);
    *child = (runs_child){0};
    runs_start(child, "train", &args);
    unsetenv("LD_PRELOAD");
    unsetenv(STRIKE_VARIABLE);
    unsetenv(STRIKE_LOG_VARIABLE);
    golden_args_free(&args);
}

/* ---- counting ---- */

static int count_lines(const char *text, const char *begin)
{
    int n = 0;
    size_t length = strlen(begin);
    for (const char *at = text; at && *at; at = strchr(at, '\n'), at += at != NULL)
        n += strncmp(at, begin, length) == 0;
    return n;
}

static void count_points(void)
{
    snprintf(book.whole, sizeof book.whole, "%s", runs_path("whole"));
    for (int rank = 0; rank < N_RANKS; rank++) {
        const char *log = runs_path("points-%d", rank);
        char strike[32];
        runs_child child;

        assert_int_equal(bl_tree_remove(book.whole), BL_OK);
        snprintf(strike, sizeof strike, "%d:wire:0:count", rank);
        start(&child, book.whole, strike, log);
        assert_int_equal(runs_wait(&child, HANG_S), 0);
        char *text = runs_read(log, NULL);
        book.n_points[rank][0] = count_lines(text, "wire ");
        book.n_points[rank][1] = count_lines(text, "file ");
        assert_int_equal(count_lines(text, "begin "), 1);
        assert_int_equal(count_lines(text, "end "), 1);
        printf("rank %d: %d frames to its neighbor, %d calls that write files\n", rank,
               book.n_points[rank][0], book.n_points[rank][1]);
        assert_true(book.n_points[rank][0] > 100 && book.n_points[rank][1] > 10);
        free(text);
    }
}

/* ---- judging ---- */

__attribute__((format(printf, 2, 3))) static void complain(trial *t, const char *format, ...)
{
    char *log = bl_file_exists(t->child.log) ? runs_read(t->child.log, NULL) : NULL;
    va_list list;

    bool is_last = t->n_tries >= MAX_TRIES;
    if (!t->is_wrong) book.n_wrong += is_last;
    t->is_wrong = true;
    printf("WRONG, try %d of %d, %s of rank %d at %s %d%s: ", t->n_tries, MAX_TRIES,
           t->action->what, t->rank, t->action->where, t->n, t->is_resumed ? ", resumed" : "");
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    printf("\n%s", log ? log : "");
    free(log);
}

/* The ranks that the line names, as bits: "rank 1", "ranks 0, 2". */
static unsigned named_ranks(const char *line)
{
    unsigned ranks = 0;
    for (const char *at = line; (at = strstr(at, "rank")); at++) {
        const char *number = at + 4 + (at[4] == 's');
        while (*number == ' ' && isdigit((unsigned char)number[1])) {
            char *end;
            ranks |= 1u << (strtoul(number, &end, 10) & 31u);
            number = *end == ',' ? end + 1 : end;
        }
    }
    return ranks;
}

/* The one line of error; NULL: there is none, or more than one. */
static char *error_line(const trial *t)
{
    static const char start_of_line[] = "ballast: error: ";
    char *log = runs_read(t->child.log, NULL), *line = strstr(log, start_of_line), *copy = NULL;

    if (line && !strstr(line + 1, start_of_line) && strchr(line, '\n')) {
        *strchr(line, '\n') = '\0';
        copy = strdup(line);
    }
    free(log);
    return copy;
}

static void check_error(trial *t, int code)
{
    unsigned own = 1u << t->rank, next = 1u << (t->rank + 1) % N_RANKS;
    char *line = error_line(t);
    unsigned named = line ? named_ranks(line) : 0;

    if (!line)
        complain(t, "not one line of error");
    else if (t->action->outcome == OWN && (code != 4 || (named & ~own) || (t->rank > 0 && !named)))
        complain(t, "code %d, or another rank is named: %s", code, line);
    else if (t->action->outcome == KILLED && (code != 7 || named != own))
        complain(t, "code %d, or it does not name the rank alone: %s", code, line);
    else if (t->action->outcome == BROKEN &&
             (code != 7 || (named != own && named != next && named != (own | next))))
        complain(t, "code %d, or it does not name an end of the connection: %s", code, line);
    free(line);
}

/* How long after the strike, beyond the deadline where there is one to wait for. */
static void check_time(trial *t, double ended_s)
{
    bool waits = strcmp(t->action->what, "kill") != 0 && strcmp(t->action->what, "torn") != 0 &&
                 strcmp(t->action->what, "fail") != 0;
    char *text = runs_read(t->struck, NULL);
    double took_s = ended_s - atof(text) - (waits ? DEADLINE_S : 0.0);

    free(text);
    if (t->action->outcome == HARMLESS) return;
    if (took_s > book.longest_s) book.longest_s = took_s;
    book.n_late += took_s > PROMISED_S;
    if (took_s > ALLOWED_S) complain(t, "it took %.1f s", took_s);
}

static bool has_text(const char *path, const char *text)
{
    static char bytes[1 << 16];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, bytes, sizeof bytes);
    close(fd);
    return n > 0 && memmem(bytes, (size_t)n, text, strlen(text)) != NULL;
}

/* A process of the job: its environment has the trial's own path. Zombies have none. */
static int find_left(const trial *t)
{
    DIR *folder = opendir("/proc");
    const struct dirent *entry;
    int found = 0;

    assert_non_null(folder);
    while (!found && (entry = readdir(folder))) {
        char path[64];
        int pid = atoi(entry->d_name);
        if (pid <= 0) continue;
        snprintf(path, sizeof path, "/proc/%d/environ", pid);
        if (has_text(path, t->struck)) found = pid;
    }
    closedir(folder);
    return found;
}

static void check_gone(trial *t)
{
    double deadline = bl_now_s() + ALLOWED_S;
    int pid;
    while ((pid = find_left(t)) != 0 && bl_now_s() < deadline) runs_sleep_s(0.01);
    if (pid == 0) return;
    complain(t, "process %d is left", pid);
    kill(pid, SIGKILL);
}

/* ---- a trial's life ---- */

static void begin_trial(trial *t)
{
    char strike[64];
    int n_used = snprintf(strike, sizeof strike, "%d:%s:%d:%s", t->rank, t->action->where, t->n,
                          t->action->what);
    if (t->action->seconds > 0)
        snprintf(strike + n_used, sizeof strike - (size_t)n_used, "=%g", t->action->seconds);
    snprintf(t->output, sizeof t->output, "%s", runs_path("run-%d", book.n_trials));
    snprintf(t->struck, sizeof t->struck, "%s", runs_path("struck-%d.", book.n_trials));
    book.n_trials++;
    t->is_used = true;
    t->is_wrong = t->is_resumed = false;
    t->n_tries++;
    t->started_s = bl_now_s();
    start(&t->child, t->output, strike, t->struck);
}

static void end_trial(trial *t)
{
    assert_int_equal(bl_tree_remove(t->output), BL_OK);
    unlink(t->struck);
    unlink(t->child.log);
    t->is_used = false;
    if (!t->is_wrong || t->n_tries >= MAX_TRIES) return;
    book.n_again++;
    begin_trial(t);
}

static void check_same(trial *t)
{
    if (!runs_are_same(book.whole, t->output)) complain(t, "other bits");
}

static void take_end(trial *t)
{
    double ended_s = bl_now_s();
    int code = runs_wait(&t->child, HANG_S);

    if (t->is_resumed) {
        if (code != 0)
            complain(t, "code %d", code);
        else
            check_same(t);
        end_trial(t);
        return;
    }
    check_gone(t);
    bool is_struck = bl_file_exists(t->struck);
    book.n_unreached += !is_struck;
    if (is_struck) check_time(t, ended_s);
    bool may_succeed = !is_struck || t->action->outcome == HARMLESS || t->action->outcome == OWN;
    if (code == 0 && may_succeed)
        check_same(t);
    else if (t->action->outcome == HARMLESS)
        complain(t, "code %d", code);
    else
        check_error(t, code);
    if (code == 0 || !t->resumes || t->is_wrong) {
        end_trial(t);
        return;
    }
    book.n_resumed++;
    t->is_resumed = true;
    t->started_s = bl_now_s();
    start(&t->child, t->output, NULL, t->struck);
}

/* Whether its slot is free. */
static bool look_after(trial *t)
{
    if (t->is_used && (!runs_is_alive(&t->child) || bl_now_s() - t->started_s > HANG_S))
        take_end(t);
    return !t->is_used;
}

static void run_all(trial *slots, const trial *wanted, int n)
{
    int n_used = 0;

    for (int k = 0; k < n || n_used > 0; runs_sleep_s(0.005)) {
        n_used = 0;
        for (int i = 0; i < N_SLOTS; i++) {
            if (look_after(&slots[i]) && k < n) {
                slots[i] = wanted[k++];
                begin_trial(&slots[i]);
            }
            n_used += slots[i].is_used;
        }
    }
}

/* ---- the matrix ---- */

/* Points of all ranks in turn, as far as they have so many. */
static int list_points(const action *a, trial *out)
{
    static int offset; /* so that samples of different actions are of different ranks */
    int step = is_all ? a->every : a->sample, n = 0, most = N_RANKS, place = -1;

    if (step == 0) return 0;
    if (strcmp(a->where, "wire") == 0) place = 0;
    if (strcmp(a->where, "file") == 0) place = 1;
    for (int rank = 0; place >= 0 && rank < N_RANKS; rank++)
        if (book.n_points[rank][place] > most) most = book.n_points[rank][place];
    offset++;
    for (int point = 1 + (is_all ? 0 : 7 * offset % step); point <= most; point += step) {
        int rank = (point / step + offset) % N_RANKS;
        while (place >= 0 && point > book.n_points[rank][place]) rank = (rank + 1) % N_RANKS;
        out[n] = (trial){.action = a, .rank = rank, .n = place < 0 ? 1 : point};
        out[n].resumes = a->resumes > 0 && n % a->resumes == 0;
        n++;
    }
    return n;
}

static void test_points(void **state)
{
    static trial wanted[MAX_TRIALS], slots[N_SLOTS];
    int n = 0;
    double start_s = bl_now_s();

    (void)state;
    mpi_note_shared_memory();
    count_points();
    for (size_t i = 0; i < BL_COUNT(actions); i++) {
        assert_true(n + 2 * (book.n_points[0][0] + book.n_points[0][1]) < MAX_TRIALS);
        int n_points = list_points(&actions[i], wanted + n);
        printf("%-5s %-5s %5.0f s: %d points\n", actions[i].where, actions[i].what,
               actions[i].seconds, n_points);
        n += n_points;
    }
    run_all(slots, wanted, n);
    printf("%d strikes (%d not reached, %d again), %d runs resumed, %.0f s; the longest end took "
           "%.1f s "
           "after its due time, %d took more than %.0f s\n",
           n, book.n_unreached, book.n_again, book.n_resumed, bl_now_s() - start_s, book.longest_s,
           book.n_late, PROMISED_S);
    assert_int_equal(book.n_wrong, 0);
    assert_true(book.n_unreached <= n / 20);
    mpi_assert_shared_memory();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_points)};
    setvbuf(stdout, NULL, _IOLBF, 0);
    is_all = argc > 1 && strcmp(argv[1], "all") == 0;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
