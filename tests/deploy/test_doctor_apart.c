/* Doing things apart: items that hang, crash, give up or are killed are told from those that end,
 * every other one is still done, and nothing is left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/tool/doctor_apart.h"

enum { ITEMS = 8, LIMIT_MS = 4000 }; /* what is sound must end in it on a busy machine */

struct shared {
    int pid[ITEMS];
    char what[ITEMS]; /* 'o' fine, 'h' hangs, 'c' crashes, 'x' exits, 'z' exits as if all were well,
                         'l' leaves */
    int printed;
};

static bool item(void *arg, uint32_t i) {
    struct shared *s = arg;
    s->pid[i] = getpid();
    if (s->what[i] == 'h')
        for (;;)
            pause();
    if (s->what[i] == 'c') {
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    if (s->what[i] == 'x') _exit(3);
    if (s->what[i] == 'z') _exit(0);
    s->printed += (int)write(1, "x", 1);
    return s->what[i] != 'l';
}

static void run(struct shared *s, const char *what, struct td_apart_end *ends) {
    memset(s, 0, sizeof *s);
    memcpy(s->what, what, strlen(what));
    td_apart(item, s, (uint32_t)strlen(what), LIMIT_MS, ends);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
    assert_int_equal(errno, ECHILD);
}

static void each_ends_its_way(void **state) {
    (void)state;
    struct shared *s = td_apart_memory(sizeof *s);
    struct td_apart_end e[ITEMS];
    run(s, "oooo", e);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(e[i].how, TD_APART_DONE);
        assert_int_equal(s->pid[i], s->pid[0]); /* one process serves as long as all is well */
    }
    assert_int_not_equal(s->pid[0], getpid());
    assert_int_equal(s->printed, 4); /* into nothing */

    run(s, "ohcxlo", e);
    static const enum td_apart_how how[] = {TD_APART_DONE, TD_APART_LATE, TD_APART_DIED,
                                            TD_APART_DIED, TD_APART_DONE, TD_APART_DONE};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(e[i].how, how[i]);
        assert_false(e[i].stuck);
    }
    assert_int_equal(e[2].code, SIGABRT);
    assert_int_equal(e[3].code, -3);
    for (int i = 1; i < 6; i++) /* what went wrong has no heirs, but the first item's did well */
        if (i > 1) assert_int_not_equal(s->pid[i], s->pid[i - 1]);
    assert_int_equal(s->pid[1], s->pid[0]);

    run(s, "ozo", e);
    assert_int_equal(e[1].how, TD_APART_DIED);
    assert_int_equal(e[1].code, 0);
    assert_int_equal(e[2].how, TD_APART_DONE);
    run(s, "cz", e);
    assert_int_equal(e[1].how, TD_APART_DIED);
    run(s, "h", e);
    assert_int_equal(e[0].how, TD_APART_LATE);
    run(s, "ll", e);
    assert_int_equal(e[0].how, TD_APART_DONE);
    assert_int_equal(e[1].how, TD_APART_DONE);
    td_apart_memory_free(s, sizeof *s);
}

static struct td_apart_end shell(const char *script, char *out, size_t cap) {
    const char *const argv[] = {"/bin/sh", "-c", script, NULL};
    return td_apart_program(argv, LIMIT_MS, out, cap);
}

static void programs(void **state) {
    (void)state;
    char out[16];
    struct td_apart_end e = shell("echo one; echo two >&2", out, sizeof out);
    assert_int_equal(e.how, TD_APART_DONE);
    assert_string_equal(out, "one\ntwo\n");
    e = shell("echo a long line that is cut; exit 2", out, sizeof out);
    assert_int_equal(e.how, TD_APART_DIED);
    assert_int_equal(e.code, -2);
    assert_string_equal(out, "a long line tha");
    e = shell("kill -SEGV $$", out, sizeof out);
    assert_int_equal(e.how, TD_APART_DIED);
    assert_int_equal(e.code, SIGSEGV);
    e = shell("echo begun; exec sleep 60", out, sizeof out);
    assert_int_equal(e.how, TD_APART_LATE);
    assert_string_equal(out, "begun\n");
    e = shell("sleep 2 & echo gone", out, sizeof out); /* a heir keeps the pipe */
    assert_int_equal(e.how, TD_APART_DONE);
    const char *const none[] = {"/nonexistent/program", NULL};
    e = td_apart_program(none, LIMIT_MS, out, sizeof out);
    assert_int_equal(e.how, TD_APART_DIED);
    assert_int_equal(e.code, -127);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_ends_its_way),
                                       cmocka_unit_test(programs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
