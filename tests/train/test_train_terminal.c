/* SPDX-License-Identifier: Apache-2.0 */
/* Training at a terminal: on terminals of several widths the line of progress stays one line, and
 * Ctrl-C begins a new one. The test draws the child's output on a screen as a terminal does. */
#include "runs.h"

#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "train/metrics.h"

enum { EXIT_STOPPED = 75, MAX_ROWS = 400, MAX_COLUMNS = 256, MAX_BYTES = 1 << 20 };

static const double LIMIT_S = 600;

/* ---- a terminal ---- */

typedef struct terminal {
    int master, slave, columns;
    char *output; /* [MAX_BYTES], written by the child */
    size_t n_bytes;
    char row[MAX_ROWS][MAX_COLUMNS + 1];
    int at_row, at_column;
} terminal;

static bool sit_down(const int *slave)
{
    unsetenv("OMPI_COMM_WORLD_RANK");
    return setenv("TERM", "xterm", 1) == 0 && setsid() >= 0 && ioctl(*slave, TIOCSCTTY, 0) == 0 &&
           dup2(*slave, 0) >= 0 && dup2(*slave, 1) >= 0 && dup2(*slave, 2) >= 0;
}

static void start(terminal *t, runs_child *child, int columns, const golden_args *args)
{
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};

    *t = (terminal){.columns = columns, .output = calloc(1, MAX_BYTES)};
    assert_non_null(t->output);
    assert_int_equal(openpty(&t->master, &t->slave, NULL, NULL, &size), 0);
    *child = (runs_child){.prepare = sit_down, .arg = &t->slave};
    runs_start(child, "train", args);
    close(t->slave);
}

/* Reads for a moment; false at the end. */
static bool read_some(terminal *t)
{
    struct pollfd ready = {.fd = t->master, .events = POLLIN};

    if (poll(&ready, 1, 100) == 0) return true;
    ssize_t got = read(t->master, t->output + t->n_bytes, MAX_BYTES - 1 - t->n_bytes);
    if (got < 0 && errno == EINTR) return true;
    if (got <= 0) return false; /* EIO: no process has the terminal open */
    t->n_bytes += (size_t)got;
    t->output[t->n_bytes] = '\0';
    return true;
}

static void wait_for(terminal *t, const char *text)
{
    while (!strstr(t->output, text))
        if (!read_some(t)) fail_msg("no '%s' in: %s", text, t->output);
}

static void press_ctrl_c(const terminal *t)
{
    assert_int_equal(write(t->master, "\003", 1), 1);
}

static void put(terminal *t, char c)
{
    if (t->at_column == t->columns) { /* it wraps */
        t->at_column = 0;
        t->at_row++;
    }
    assert_true(t->at_row < MAX_ROWS);
    assert_true(c != '\033'); /* no colors: NO_COLOR changes nothing */
    char *row = t->row[t->at_row];
    for (int i = (int)strlen(row); i < t->at_column; i++) row[i] = ' ';
    row[t->at_column++] = c;
}

/* Plays all that was written on the screen. */
static void play(terminal *t)
{
    for (const char *c = t->output; *c; c++) {
        if (*c == '\r')
            t->at_column = 0;
        else if (*c == '\n')
            t->at_row++;
        else if (strncmp(c, "\033[K", 3) == 0) {
            memset(t->row[t->at_row] + t->at_column, 0, (size_t)(MAX_COLUMNS - t->at_column));
            c += 2;
        } else
            put(t, *c);
    }
}

static int finish(terminal *t, runs_child *child)
{
    while (read_some(t)) continue;
    close(t->master);
    int code = runs_wait(child, LIMIT_S);
    play(t);
    return code;
}

/* The only row that begins so; NULL: there is none. */
static const char *row_of(const terminal *t, const char *beginning)
{
    const char *found = NULL;
    for (int i = 0; i <= t->at_row; i++) {
        if (strncmp(t->row[i], beginning, strlen(beginning)) != 0) continue;
        if (found) fail_msg("two rows begin with '%s':\n%s\n%s", beginning, found, t->row[i]);
        found = t->row[i];
    }
    return found;
}

/* ---- tests ---- */

static void keys(golden_args *args, const char *output)
{
    runs_standard(args, output, 1);
    runs_unset(args, "validation_file");
    runs_set(args, "eval_strategy", "no");
}

/* The last line of progress of that step that was drawn; the caller frees it. */
static char *drawn(const terminal *t, const char *step)
{
    const char *found = NULL;
    char beginning[32];

    snprintf(beginning, sizeof beginning, "\r%s  ", step);
    for (const char *at = t->output; (at = strstr(at, beginning)) != NULL; at++)
        if (!strncmp(at + strcspn(at, "\033\n"), "\033[K", 3)) found = at + 1;
    if (!found) fail_msg("no progress of %s in: %s", step, t->output);
    return strndup(found, strcspn(found, "\033"));
}

static void expect_parts(const char *line, int columns, const char *const *with,
                         const char *without)
{
    if (strlen(line) >= (size_t)columns) fail_msg("%d columns: %s", columns, line);
    for (size_t k = 0; with[k]; k++)
        if (!strstr(line, with[k])) fail_msg("no '%s' in: %s", with[k], line);
    if (without && strstr(line, without)) fail_msg("'%s' in: %s", without, line);
}

/* Logged steps stay, whatever number of digits the tokens per second have; the line of progress
 * below them is taken away at the end. Memory is in MB or, with AddressSanitizer, in GB. */
static void test_steps_stay_above_progress(void **state)
{
    static const struct {
        int columns;
        const char *step[6], *no_step;
        const char *progress[9], *no_progress;
    } cases[] = {
        {200,
         {"  loss ", "  grad_norm ", "  lr ", " tokens/s  ", " left"},
         NULL,
         {"  87%  [######", ".]  ", "<", "  loss ", "  lr ", " tokens/s  ", "B"},
         NULL},
        {120,
         {"  loss ", "  grad_norm ", "  lr ", " tokens/s  ", " left"},
         NULL,
         {"  87%  [######", ".]  ", "<", "  loss ", "  lr ", " tokens/s  ", "B"},
         NULL},
        {80,
         {"  loss ", "  grad_norm ", "  lr ", " tokens/s"},
         "stalls",
         {"<", "  loss ", " tokens/s"},
         NULL},
        {40, {"  loss ", "  lr "}, "grad_norm", {"  87%  ", "<", "  loss "}, "  lr "},
        {20, {""}, "  loss", {""}, "  loss"},
    };
    static const char *const steps[] = {"step 3/8", "step 6/8", "step 8/8"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        runs_child child;
        terminal t;
        keys(&args, runs_path("width-%d", cases[i].columns));
        runs_set(&args, "logging_steps", "3");
        start(&t, &child, cases[i].columns, &args);
        assert_int_equal(finish(&t, &child), 0);
        for (size_t k = 0; k < BL_COUNT(steps); k++) {
            const char *row = row_of(&t, steps[k]);
            if (!row) fail_msg("no %s in: %s", steps[k], t.output);
            expect_parts(row, cases[i].columns, cases[i].step, cases[i].no_step);
        }
        char *progress = drawn(&t, "step 7/8");
        expect_parts(progress, cases[i].columns, cases[i].progress, cases[i].no_progress);
        assert_null(row_of(&t, "step 7/8"));
        assert_non_null(row_of(&t, "trained 8 steps,"));
        assert_non_null(row_of(&t, "adapter written to"));
        assert_non_null(strstr(t.output, "\n    ballast generate --model "));
        assert_int_equal(t.at_column, 0);
        free(progress);
        free(t.output);
        golden_args_free(&args);
    }
}

/* ---- in this process ---- */

/* The screen, all that was written so far. */
static void look(terminal *t)
{
    struct pollfd ready = {.fd = t->master, .events = POLLIN};

    while (poll(&ready, 1, 0) > 0 && read_some(t)) continue;
    memset(t->row, 0, sizeof t->row);
    t->at_row = t->at_column = 0;
    play(t);
}

static void step_to(bl_metrics *metrics, int64_t step, double disk_s, double gather_s)
{
    bl_step_metrics s = {.step = step,
                         .total_steps = 5000,
                         .loss = 1.25,
                         .grad_norm = 0.5,
                         .learning_rate = 1e-4,
                         .tokens = 123450,
                         .step_s = 10,
                         .n_fallbacks = -1};

    s.lanes[BL_LANE_DISK].stall_s = disk_s;
    s.lanes[BL_LANE_GATHER].stall_s = gather_s;
    assert_int_equal(bl_metrics_step(metrics, &s), BL_OK);
}

/* The last two rows after each of these: a step, a warning, a step, one without stalls, the end. */
enum { N_LOOKS = 5 };
typedef struct looks {
    char above[N_LOOKS][MAX_COLUMNS + 1], last[N_LOOKS][MAX_COLUMNS + 1];
} looks;

static void keep_look(terminal *t, looks *all, int i)
{
    look(t);
    snprintf(all->last[i], sizeof all->last[i], "%s", t->row[t->at_row]);
    snprintf(all->above[i], sizeof all->above[i], "%s", t->at_row ? t->row[t->at_row - 1] : "");
}

/* stderr is the terminal meanwhile: nothing is asserted. */
static bl_status look_at_steps(terminal *t, looks *all, const char *log)
{
    bl_metrics *metrics;
    int saved = dup(STDERR_FILENO);

    dup2(t->slave, STDERR_FILENO);
    bl_status st = bl_metrics_open(log, 0, 1000000, &metrics);
    if (st == BL_OK) {
        step_to(metrics, 1234, 1.2, 0.05);
        keep_look(t, all, 0);
        bl_log_warning("it is so");
        keep_look(t, all, 1);
        step_to(metrics, 1235, 1.2, 0.5);
        keep_look(t, all, 2);
        step_to(metrics, 1236, 0, 0);
        keep_look(t, all, 3);
        bl_metrics_close(metrics);
        keep_look(t, all, 4);
    }
    dup2(saved, STDERR_FILENO);
    close(saved);
    return st;
}

/* Long numbers. The most important parts are shown at 80 columns, all at 120. A warning and the end
 * of a run take the line away, and it returns below the warning. */
static void test_progress_line(void **state)
{
    static const struct {
        int columns;
        const char *with[4], *without;
    } cases[] = {
        {60, {"step 1234/5000  0:00<10:27:40  loss 1.2500  12345 tokens/s"}, "stalls"},
        {80,
         {"step 1234/5000  0:00<10:27:40  loss 1.2500  12345 tokens/s  stalls: disk 12 %"},
         "GB"},
        {120,
         {"step 1234/5000  24%  [", "  0:00<10:27:40  loss 1.2500  lr 1.0e-04  12345 tokens/s",
          "  stalls: disk 12 %"},
         NULL},
    };
    static const char WARNING[] = "warning: it is so";

    (void)state;
    setenv("TERM", "xterm", 1);
    unsetenv("OMPI_COMM_WORLD_RANK");
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)cases[i].columns};
        terminal t = {.columns = cases[i].columns, .output = calloc(1, MAX_BYTES)};
        static looks all;
        assert_non_null(t.output);
        assert_int_equal(openpty(&t.master, &t.slave, NULL, NULL, &size), 0);
        assert_int_equal(look_at_steps(&t, &all, runs_path("line-%zu", i)), BL_OK);
        close(t.slave);
        close(t.master);
        free(t.output);
        expect_parts(all.last[0], cases[i].columns, cases[i].with, cases[i].without);
        assert_string_equal(all.above[1], WARNING);
        assert_string_equal(all.last[1], "");
        assert_string_equal(all.above[2], WARNING);
        assert_non_null(strstr(all.last[2], "step 1235/5000  "));
        if (cases[i].columns >= 80) assert_non_null(strstr(all.last[2], "  stalls: 17 %"));
        assert_non_null(strstr(all.last[3], "step 1236/5000  "));
        assert_null(strstr(all.last[3], "stalls"));
        assert_string_equal(all.last[4], "");
        assert_string_equal(all.above[4], WARNING);
    }
}

/* Without a terminal: whole lines, and nothing that moves a cursor. */
static void test_plain_lines(void **state)
{
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    keys(&args, runs_path("plain"));
    runs_set(&args, "logging_steps", "4");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    char *log = runs_read(child.log, NULL);
    assert_null(strpbrk(log, "\r\033"));
    assert_non_null(strstr(log, "\nstep 4/8  loss "));
    assert_non_null(strstr(log, "\nstep 8/8  loss "));
    assert_null(strstr(log, "step 7/8"));
    free(log);
    golden_args_free(&args);
}

/* No word of the log is broken at the edge: every row is as long as its words allow. */
static void test_lines_break_between_words(void **state)
{
    golden_args args = {0};
    runs_child child;
    terminal t;
    char word[512];

    (void)state;
    keys(&args, runs_path("words"));
    start(&t, &child, 80, &args);
    assert_int_equal(finish(&t, &child), 0);
    const char *row = row_of(&t, "model: ");
    assert_non_null(row);
    assert_true(strlen(row) <= 80);
    assert_non_null(strstr(t.output, "1 rank x"));
    assert_null(strstr(t.output, "1 threads"));
    for (int i = 0; i < t.at_row; i++) {
        const char *next = t.row[i + 1];
        if (!strncmp(t.row[i], "    ballast generate --model ", 29)) break; /* to be copied */
        if (strlen(t.row[i]) < 80 || t.row[i][79] == ' ' || !strchr(t.row[i], ' ')) continue;
        /* a word may end at the edge: then the program has written a line break behind it */
        snprintf(word, sizeof word, "%s%.*s", strrchr(t.row[i], ' ') + 1, (int)strcspn(next, " "),
                 next);
        if (strstr(t.output, word)) fail_msg("broken inside a word:\n%s\n%s", t.row[i], next);
    }
    free(t.output);
    golden_args_free(&args);
}

/* Once: stops after the step. Twice: at once. Messages are on separate lines. */
static void test_ctrl_c(void **state)
{
    (void)state;
    for (int twice = 0; twice <= 1; twice++) {
        golden_args args = {0};
        runs_child child;
        terminal t;
        keys(&args, runs_path("interrupted-%d", twice));
        runs_set(&args, "max_steps", "1000000");
        if (twice) runs_set(&args, "gradient_accumulation_steps", "2000");
        if (twice) runs_set(&args, "visit_tokens", "1");
        start(&t, &child, 80, &args);
        wait_for(&t, "step 1/");
        press_ctrl_c(&t);
        wait_for(&t, "stopping after this step");
        if (twice) press_ctrl_c(&t);
        assert_int_equal(finish(&t, &child), EXIT_STOPPED);
        assert_non_null(row_of(&t, "Interrupt: stopping after this step"));
        const char *row = row_of(&t, "ballast: stopped ");
        if (!row) fail_msg("no reason at the beginning of a line: %s", t.output);
        assert_int_equal(t.at_column, 0);
        free(t.output);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_stay_above_progress),
        cmocka_unit_test(test_progress_line),
        cmocka_unit_test(test_plain_lines),
        cmocka_unit_test(test_lines_break_between_words),
        cmocka_unit_test(test_ctrl_c),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
