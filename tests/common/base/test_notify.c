/* The service manager's side of common/base/notify: what arrives at NOTIFY_SOCKET, and when a
 * process that turns but does not advance stops being fed. */
#include "common/base/notify.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define SECOND 1000000000ull

static int manager = -1;
static char name[64];

/* A manager on an abstract socket, so that nothing is left behind. */
static int setup(void **state) {
    (void)state;
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(name, sizeof name, "@tandem-test-notify-%d", (int)getpid());
    memcpy(sa.sun_path + 1, name + 1, strlen(name) - 1);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return manager < 0 || bind(manager, (struct sockaddr *)&sa,
                               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name)));
}

static int teardown(void **state) {
    (void)state;
    return close(manager);
}

/* The next datagram, or "" when none waits. */
static const char *heard(void) {
    static char text[1024];
    ssize_t n = recv(manager, text, sizeof text - 1, MSG_DONTWAIT);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

static void open_with(struct td_notify *n, const char *usec) {
    struct td_error err;
    setenv("NOTIFY_SOCKET", name, 1);
    if (usec) setenv("WATCHDOG_USEC", usec, 1);
    assert_int_equal(td_notify_open(n, &err), TD_OK);
}

static void test_without_manager(void **state) {
    (void)state;
    struct td_notify n;
    setenv("WATCHDOG_USEC", "nonsense", 1); /* not ours without a socket */
    assert_int_equal(td_notify_open(&n, NULL), TD_OK);
    assert_int_equal(n.fd, -1);
    td_notify_ready(&n);
    td_notify_status(&n, "x");
    td_notify_alive(&n, SECOND, false, 0);
    td_notify_close(&n);
    assert_string_equal(heard(), "");
}

static void test_messages(void **state) {
    (void)state;
    struct td_notify n;
    open_with(&n, NULL);
    td_notify_ready(&n);
    assert_string_equal(heard(), "READY=1");
    td_notify_status(&n, "waiting for %s\nFDSTORE=1", "workers");
    assert_string_equal(heard(), "STATUS=waiting for workers"); /* one line, no second message */
    td_notify_status(&n, "waiting for workers");
    assert_string_equal(heard(), ""); /* nothing new */
    td_notify_status(&n, "serving");
    assert_string_equal(heard(), "STATUS=serving");
    td_notify_alive(&n, 100 * SECOND, false, 0);
    assert_string_equal(heard(), ""); /* nobody asked for signs of life */
    td_notify_stopping(&n);
    assert_string_equal(heard(), "STOPPING=1");
    td_notify_close(&n);
    td_notify_ready(&n);
    assert_string_equal(heard(), "");
}

static void test_long_status(void **state) {
    (void)state;
    struct td_notify n;
    char text[2 * TD_NOTIFY_STATUS_MAX];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    open_with(&n, NULL);
    td_notify_status(&n, "%s", text);
    assert_int_equal(strlen(heard()), strlen("STATUS=") + TD_NOTIFY_STATUS_MAX - 1);
    td_notify_close(&n);
}

static void test_watchdog_socket(void **state) {
    (void)state;
    struct td_notify n;
    open_with(&n, "3000000");
    assert_int_equal(n.watchdog.period_ns, SECOND);
    td_notify_alive(&n, 10 * SECOND, false, 0);
    assert_string_equal(heard(), "WATCHDOG=1");
    td_notify_alive(&n, 10 * SECOND + 1, false, 0);
    assert_string_equal(heard(), "");
    td_notify_alive(&n, 11 * SECOND, true, 0);
    assert_string_equal(heard(), ""); /* work, and no step */
    td_notify_alive(&n, 12 * SECOND, true, 1);
    assert_string_equal(heard(), "WATCHDOG=1");
    td_notify_close(&n);
}

static void test_watchdog_of_another_process(void **state) {
    (void)state;
    struct td_notify n;
    setenv("WATCHDOG_PID", "1", 1);
    open_with(&n, "3000000");
    assert_int_equal(n.watchdog.period_ns, 0);
    td_notify_close(&n);
}

/* Asked ten times a second. Idle: fed every third of the timeout. Busy with steps: likewise. Busy
 * without steps: not fed, however often it is asked, until a step ends. */
static void test_rule(void **state) {
    (void)state;
    struct td_watchdog w;
    uint64_t now = 5 * SECOND, steps = 7;
    int fed = 0;
    td_watchdog_init(&w, 30 * SECOND);
    for (int i = 0; i < 600; i++, now += SECOND / 10)
        fed += td_watchdog_due(&w, now, false, steps);
    assert_int_equal(fed, 6);
    for (int i = 0; i < 600; i++, now += SECOND / 10)
        fed += td_watchdog_due(&w, now, true, ++steps);
    assert_int_equal(fed, 12);
    for (int i = 0; i < 600; i++, now += SECOND / 10)
        fed += td_watchdog_due(&w, now, true, steps);
    assert_true(fed <= 13); /* the step that ended before the stall may count once */
    int before = fed;
    for (int i = 0; i < 600; i++, now += SECOND / 10)
        fed += td_watchdog_due(&w, now, true, steps);
    assert_int_equal(fed, before);
    assert_true(td_watchdog_due(&w, now, true, steps + 1));
    /* the first request after a long idle time is no stall: steps may stand still until then */
    td_watchdog_init(&w, 30 * SECOND);
    assert_true(td_watchdog_due(&w, now, false, 0));
    assert_false(td_watchdog_due(&w, now + 10 * SECOND, true, 0));
    assert_true(td_watchdog_due(&w, now + 11 * SECOND, true, 1));
    td_watchdog_init(&w, 0);
    assert_false(td_watchdog_due(&w, now, false, 0));
}

static void refused(const char *socket_name, const char *usec, const char *word) {
    struct td_notify n;
    struct td_error err = {0};
    setenv("NOTIFY_SOCKET", socket_name, 1);
    if (usec) setenv("WATCHDOG_USEC", usec, 1);
    assert_int_not_equal(td_notify_open(&n, &err), TD_OK);
    assert_non_null(strstr(err.text, word));
    assert_int_equal(n.fd, -1);
}

static void test_malformed(void **state) {
    (void)state;
    char longer[200];
    memset(longer, '/', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    refused("relative", NULL, "NOTIFY_SOCKET");
    refused("", NULL, "NOTIFY_SOCKET");
    refused("/", NULL, "NOTIFY_SOCKET");
    refused(longer, NULL, "NOTIFY_SOCKET");
    refused("/nonexistent/notify", NULL, "/nonexistent/notify");
    refused(name, "-1", "WATCHDOG_USEC");
    refused(name, "0", "WATCHDOG_USEC");
    refused(name, "12x", "WATCHDOG_USEC");
    refused(name, "99999999999999999999", "WATCHDOG_USEC");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_without_manager, setup, teardown),
        cmocka_unit_test_setup_teardown(test_messages, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_status, setup, teardown),
        cmocka_unit_test_setup_teardown(test_watchdog_socket, setup, teardown),
        cmocka_unit_test_setup_teardown(test_watchdog_of_another_process, setup, teardown),
        cmocka_unit_test_setup_teardown(test_rule, setup, teardown),
        cmocka_unit_test_setup_teardown(test_malformed, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
