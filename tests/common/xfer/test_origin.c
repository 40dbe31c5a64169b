/* Why a process that packed some bytes cannot be reached is said as it is: gone, another one now,
 * or there and hidden from us. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/xfer/wire.h"

static struct td_xfer_origin myself(void) {
    struct td_xfer_envelope e = {0};
    uint8_t out[sizeof e + 8];
    size_t len;
    assert_int_equal(td_xfer_seal(&e, TD_XFER_KEY_MAGIC, "", 1, out, sizeof out, &len, NULL),
                     TD_OK);
    return e.origin;
}

static void test_gone(void **state) {
    (void)state;
    struct td_xfer_origin mine = myself(), other = mine;
    struct td_error err;
    assert_int_equal(td_xfer_origin_check(&mine, "address", &err), TD_OK);
    other.start++; /* its id belongs to another process now */
    assert_int_equal(td_xfer_origin_check(&other, "address", &err), TD_UNREACHABLE);
    assert_non_null(strstr(err.text, "has ended"));
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    siginfo_t info;
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    other.pid = (uint32_t)pid; /* a zombie is no process to talk to */
    assert_int_equal(td_xfer_origin_check(&other, "address", &err), TD_UNREACHABLE);
    assert_non_null(strstr(err.text, "has ended"));
    waitpid(pid, NULL, 0);
}

/* As a unit with PrivateUsers=yes sees us under ProtectProc=invisible: here, a /proc with nobody.
 */
static void test_hidden(void **state) {
    (void)state;
    struct td_xfer_origin mine = myself();
    int said[2];
    assert_int_equal(pipe(said), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct td_error err = {.text = ""};
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
            mount("none", "/proc", "tmpfs", 0, NULL) != 0)
            _exit(77);
        (void)!td_xfer_origin_check(&mine, "address", &err);
        _exit(write(said[1], err.text, sizeof err.text) == sizeof err.text ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) skip(); /* no namespaces for us */
    assert_int_equal(WEXITSTATUS(status), 0);
    char text[sizeof((struct td_error *)0)->text];
    assert_int_equal(read(said[0], text, sizeof text), sizeof text);
    assert_null(strstr(text, "has ended"));
    assert_non_null(strstr(text, "PrivateUsers="));
    close(said[0]);
    close(said[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gone), cmocka_unit_test(test_hidden)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
