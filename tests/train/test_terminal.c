/* SPDX-License-Identifier: Apache-2.0 */
/* What a person sees who trains at a terminal: on terminals of several widths the line of progress stays one
 * line, and Ctrl-C begins a new one. The child's output is played on a screen as a terminal does. */
#include "runs.h"

#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/sizes.h"

enum { EXIT_STOPPED = 75, MAX_ROWS = 400, MAX_COLUMNS = 256, MAX_BYTES = 1 << 20 };

static const double LIMIT_S = 600;

/* ---- a terminal ---- */

typedef struct terminal {
    int master, slave, columns;
    char *output; /* [MAX_BYTES], what the child has written */
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
    if (got <= 0) return false; /* EIO: nobody has the terminal any more */
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
            if (t->at_column < t->columns) t->row[t->at_row][t->at_column] = '\0';
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

static void test_one_line_of_progress(void **state)
{
    /* Whatever number of digits the tokens per second have: 75 columns and more with lr, at most 71
     * without it; 62 and more with grad_norm. */
    static const struct {
        int columns;
        const char *with[5], *without;
    } cases[] = {
        {200, {"step 8/8  loss ", "  grad_norm ", "  lr ", " tokens/s  ", " left"}, "\n"},
        {80, {"step 8/8  loss ", "  grad_norm ", " tokens/s  ", " left", ""}, "stalls"},
        {72, {"step 8/8  loss ", "  grad_norm ", " tokens/s  ", " left", ""}, "  lr "},
        {60, {"step 8/8  loss ", " tokens/s  ", " left", "", ""}, "grad_norm"},
        {20, {"step 8/8", "", "", "", ""}, "loss"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        runs_child child;
        terminal t;
        keys(&args, runs_path("width-%d", cases[i].columns));
        start(&t, &child, cases[i].columns, &args);
        assert_int_equal(finish(&t, &child), 0);
        const char *row = row_of(&t, "step ");
        if (!row) fail_msg("no progress in: %s", t.output);
        if (strlen(row) >= (size_t)cases[i].columns)
            fail_msg("%d columns: %s", cases[i].columns, row);
        for (size_t k = 0; k < BL_COUNT(cases[i].with); k++)
            if (!strstr(row, cases[i].with[k])) fail_msg("no '%s' in: %s", cases[i].with[k], row);
        if (strstr(row, cases[i].without)) fail_msg("'%s' in: %s", cases[i].without, row);
        assert_int_equal(t.at_column, 0);
        free(t.output);
        golden_args_free(&args);
    }
}

/* Once: after the step. Twice: at once. What is said stands on lines of its own. */
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
        const char *row = row_of(&t, "ballast: error: stopped ");
        if (!row) fail_msg("no error at the beginning of a line: %s", t.output);
        assert_int_equal(t.at_column, 0);
        free(t.output);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_line_of_progress),
        cmocka_unit_test(test_ctrl_c),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
