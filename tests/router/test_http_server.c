/* The HTTP server over real sockets: limits, clocks, order, slow and leaving clients. The server
 * runs in a thread of its own; the test is the client. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "router/http_server.h"
#include "router/sse.h"

enum { FLOOD_BYTES = 64 << 10, FLOODS = 64, LATER_MS = 30, BURST = 100, WAIT_MS = 60000 };

struct fixture {
    pthread_t thread;
    uv_loop_t loop;
    uv_async_t stop;
    struct td_http_server *server;
    struct td_http_limits limits;
    uint16_t port;
    atomic_int requests, gone, refused;
};

/* ---- the server's side ---- */

struct later {
    uv_timer_t timer;
    struct td_http_conn *c;
};

static void free_later(uv_handle_t *h) {
    free(h->data);
}

static void answer_later(uv_timer_t *t) {
    struct later *l = t->data;
    if (l->c) {
        struct td_http_conn *c = l->c;
        td_http_set_owner(c, NULL);
        td_http_reply(c, 200, "text/plain", "later", 5);
    }
    uv_close((uv_handle_t *)t, free_later);
}

static void start_later(struct fixture *f, struct td_http_conn *c) {
    struct later *l = calloc(1, sizeof *l);
    if (!l) abort();
    l->c = c;
    td_http_set_owner(c, l);
    uv_timer_init(&f->loop, &l->timer);
    l->timer.data = l;
    uv_timer_start(&l->timer, answer_later, LATER_MS, 0);
}

static void flood(struct td_http_conn *c) {
    static char block[FLOOD_BYTES];
    memset(block, 'f', sizeof block);
    td_http_begin(c, 200, "text/plain");
    for (int i = 0; i < FLOODS; i++)
        td_http_write(c, block, sizeof block);
}

static void events(struct td_http_conn *c) {
    struct td_json_out w = {0};
    td_http_begin(c, 200, TD_SSE_CONTENT_TYPE);
    td_sse_open(&w);
    td_json_text(&w, "a\nb");
    if (td_sse_send(c, &w) != TD_OK) abort();
    td_sse_keep_alive(c);
    td_sse_open(&w);
    td_json_u64(&w, 7);
    if (td_sse_send(c, &w) != TD_OK) abort();
    td_json_out_free(&w);
    td_sse_done(c);
}

static void on_request(void *user, struct td_http_conn *c) {
    struct fixture *f = user;
    const char *path = td_http_path(c);
    size_t n;
    atomic_fetch_add(&f->requests, 1);
    if (strcmp(path, "/later") == 0) {
        start_later(f, c);
    } else if (strcmp(path, "/hang") == 0) {
        td_http_set_owner(c, f);
    } else if (strcmp(path, "/flood") == 0) {
        td_http_set_owner(c, f);
        flood(c);
    } else if (strcmp(path, "/events") == 0) {
        events(c);
        td_http_end(c);
    } else if (strcmp(path, "/burst") == 0) {
        td_http_begin(c, 200, "text/plain");
        for (int i = 0; i < BURST; i++)
            td_http_write(c, "word ", 5);
        td_http_end(c);
    } else if (strcmp(path, "/abort") == 0) {
        events(c);
        td_http_abort(c);
    } else if (strcmp(path, "/header") == 0) {
        td_http_add_header(c, "X-Good", "fine");
        td_http_add_header(c, "X-Bad", "a\r\nSet-Cookie: stolen");
        const char *h = td_http_header(c, "x-test");
        td_http_reply(c, 200, "text/plain", h ? h : "(none)", strlen(h ? h : "(none)"));
    } else {
        char *body = td_http_take_body(c, &n);
        td_http_reply(c, 200, "text/plain", body ? body : "", n);
        free(body);
    }
}

static void on_gone(void *user, struct td_http_conn *c) {
    struct fixture *f = user;
    void *owner = td_http_owner(c);
    atomic_fetch_add(&f->gone, 1);
    if (owner != f) ((struct later *)owner)->c = NULL;
}

static void on_refused(void *user, struct td_http_conn *c, int status, const char *sentence) {
    struct fixture *f = user;
    atomic_fetch_add(&f->refused, 1);
    td_http_reply(c, status, "text/plain", sentence, strlen(sentence));
}

static void on_stop(uv_async_t *a) {
    struct fixture *f = a->data;
    td_http_server_stop(f->server);
    uv_close((uv_handle_t *)a, NULL);
}

static void *serve(void *arg) {
    struct fixture *f = arg;
    uv_run(&f->loop, UV_RUN_DEFAULT);
    return NULL;
}

static void start(struct fixture *f) {
    struct td_error err;
    struct td_http_handler h = {
        .user = f, .request = on_request, .gone = on_gone, .refused = on_refused};
    assert_int_equal(uv_loop_init(&f->loop), 0);
    uv_async_init(&f->loop, &f->stop, on_stop);
    f->stop.data = f;
    assert_int_equal(td_http_server_create(&f->loop, &f->limits, &h, &f->server, &err), TD_OK);
    assert_int_equal(td_http_server_listen(f->server, "127.0.0.1:0", &err), TD_OK);
    f->port = td_http_server_port(f->server);
    assert_int_equal(pthread_create(&f->thread, NULL, serve, f), 0);
}

static struct fixture *fixture(void) {
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    td_http_limits_defaults(&f->limits);
    f->limits.head_bytes = 1000;
    f->limits.body_bytes = 100000;
    return f;
}

static void finish(struct fixture *f) {
    uv_async_send(&f->stop);
    pthread_join(f->thread, NULL);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    td_http_server_destroy(f->server);
    free(f);
}

/* ---- the client's side ---- */

static int dial(struct fixture *f) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(f->port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void put(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        ssize_t k = send(fd, bytes, n, MSG_NOSIGNAL);
        if (k <= 0) return; /* refused and closed: the answer is read below */
        bytes += k;
        n -= (size_t)k;
    }
}

static void put_text(int fd, const char *text) {
    put(fd, text, strlen(text));
}

/* Reads until the server closes, or `until` was seen; the caller frees the text. */
static char *get(int fd, const char *until) {
    size_t cap = 1 << 16, n = 0;
    char *text = malloc(cap);
    assert_non_null(text);
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, WAIT_MS), 1); /* else the server hangs */
        if (n + 1 == cap) text = realloc(text, cap *= 2);
        ssize_t k = recv(fd, text + n, cap - n - 1, 0);
        if (k <= 0) break;
        n += (size_t)k;
        text[n] = 0;
        if (until && strstr(text, until)) break;
    }
    text[n] = 0;
    return text;
}

/* An exchange on its own connection, again when we spoke too late for a short idle clock. */
static void expect(struct fixture *f, const char *request, size_t n, const char *want) {
    char *text = NULL;
    do {
        free(text);
        int fd = dial(f);
        put(fd, request, n);
        text = get(fd, NULL);
        close(fd);
    } while (*text == 0);
    if (!strstr(text, want)) print_message("expected %s, found:\n%.300s\n", want, text);
    assert_non_null(strstr(text, want));
    free(text);
}

static void expect_text(struct fixture *f, const char *request, const char *want) {
    expect(f, request, strlen(request), want);
}

static void wait_for(atomic_int *v, int want) {
    uint64_t end = td_now_ns() + WAIT_MS * 1000000ull;
    while (atomic_load(v) < want && td_now_ns() < end)
        poll(NULL, 0, 1);
    assert_int_equal(atomic_load(v), want);
}

/* ---- tests ---- */

#define CLOSE "Connection: close\r\n"
#define GET(path) "GET " path " HTTP/1.1\r\nHost: x\r\n"

static void test_limits(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    static char big[200000];
    int n = snprintf(big, sizeof big, GET("/x") CLOSE "A: ");
    memset(big + n, 'a', 900);
    memcpy(big + n + 900, "\r\n\r\n", 5);
    expect_text(f, big, "HTTP/1.1 200 OK"); /* 900 and some: below 1000 */
    memset(big + n, 'a', 1000);
    memcpy(big + n + 1000, "\r\n\r\n", 5);
    expect_text(f, big, "HTTP/1.1 431 ");
    memset(big + n, ' ', 150000); /* white space is not kept, but does not go on for ever */
    memcpy(big + n + 150000, "\r\n\r\n", 5);
    expect_text(f, big, "HTTP/1.1 431 ");
    expect_text(f, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n",
                "the body is 100001 bytes long, the limit is 100000");
    n = snprintf(big, sizeof big,
                 "POST /x HTTP/1.1\r\nHost: x\r\n" CLOSE "Content-Length: 100000\r\n\r\n");
    memset(big + n, 'b', 100000);
    expect(f, big, (size_t)n + 100000, "Content-Length: 100000\r\n");
    n = snprintf(big, sizeof big,
                 "POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n186a1\r\n");
    memset(big + n, 'b', 100001);
    expect(f, big, (size_t)n + 100001, "HTTP/1.1 413 ");
    assert_int_equal(atomic_load(&f->refused), 4);
    finish(f);
}

/* Bodies of several connections together, while they arrive. */
static void test_bodies_together(void **state) {
    (void)state;
    struct fixture *f = fixture();
    f->limits.bodies_bytes = 150000;
    start(f);
    static char body[90000];
    static const char head[] = "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n";
    int a = dial(f), b = dial(f);
    put_text(a, head);
    put(a, body, sizeof body);
    put_text(b, head);
    put(b, body, sizeof body);
    /* Which of the two is refused depends on who is read first. */
    struct pollfd p[2] = {{.fd = a, .events = POLLIN}, {.fd = b, .events = POLLIN}};
    assert_true(poll(p, 2, WAIT_MS) > 0);
    int refused = p[0].revents ? a : b, other = p[0].revents ? b : a;
    char *text = get(refused, NULL);
    assert_non_null(strstr(text, "HTTP/1.1 503 "));
    free(text);
    put(other, body, 10000);
    text = get(other, "Content-Length: 100000\r\n");
    assert_non_null(strstr(text, "HTTP/1.1 200 OK"));
    free(text);
    close(a);
    close(b);
    /* Nothing stays counted. */
    for (int i = 0; i < 5; i++) {
        int fd = dial(f);
        put_text(fd, head);
        put(fd, body, 50000);
        close(fd);
    }
    expect_text(f, GET("/x") CLOSE "\r\n", "200 OK");
    int fd = dial(f);
    put_text(fd, head);
    put(fd, body, sizeof body);
    put(fd, body, 10000);
    free(get(fd, "200 OK"));
    close(fd);
    finish(f);
}

static void test_clocks(void **state) {
    (void)state;
    struct fixture *f = fixture();
    f->limits.idle_ms = 2000;
    f->limits.read_ms = 150;
    start(f);
    int fd = dial(f);
    char *text = get(fd, NULL); /* idle: closed without a word */
    assert_string_equal(text, "");
    free(text);
    close(fd);
    expect_text(f, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc", "HTTP/1.1 408 ");
    expect_text(f, GET("/x"), "HTTP/1.1 408 ");
    fd = dial(f); /* the clock starts again behind an answer */
    put_text(fd, GET("/x") "\r\n");
    text = get(fd, NULL);
    assert_non_null(strstr(text, "HTTP/1.1 200 OK"));
    assert_null(strstr(text, "408"));
    free(text);
    close(fd);
    finish(f);
}

static void test_pieces_and_order(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    static const char all[] =
        "\r\nPOST /echo?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nfirst" GET(
            "/later") "\r\n" GET("/header") "X-Test: tested\r\n\r\n"
                                            "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
                                            "chunked\r\n" CLOSE
                                            "\r\n3;a=b\r\nfou\r\n3\r\nrth\r\n0\r\nTrailer: "
                                            "t\r\n\r\n";
    for (size_t piece = 1; piece <= sizeof all; piece = piece < 8 ? piece + 1 : piece * 3) {
        int fd = dial(f);
        for (size_t i = 0; i < sizeof all - 1; i += piece)
            put(fd, all + i, i + piece < sizeof all ? piece : sizeof all - 1 - i);
        char *text = get(fd, NULL);
        const char *p = text;
        static const char *const order[] = {"\r\n\r\nfirst", "\r\n\r\nlater", "\r\n\r\ntested",
                                            "\r\n\r\nfourth"};
        for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
            p = strstr(p, order[i]);
            if (!p) print_message("piece %zu: no %s in\n%s\n", piece, order[i] + 4, text);
            assert_non_null(p);
        }
        assert_null(strstr(text, "stolen"));
        assert_non_null(strstr(text, "X-Good: fine\r\n"));
        free(text);
        close(fd);
    }
    finish(f);
}

/* More pipelined requests than may wait: reading stops, and goes on. */
static void test_long_pipeline(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    enum { N = 6, BODY = 50000 };
    int fd = dial(f);
    static char body[BODY];
    memset(body, 'p', sizeof body);
    for (int i = 0; i < N; i++) {
        put_text(fd, "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n");
        put_text(fd, i + 1 == N ? CLOSE "\r\n" : "\r\n");
        put(fd, body, sizeof body);
    }
    char *text = get(fd, NULL);
    int count = 0;
    for (char *p = text; (p = strstr(p, "\r\n\r\nlater")); p++)
        count++;
    assert_int_equal(count, N);
    free(text);
    close(fd);
    finish(f);
}

static void test_streams(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    int fd = dial(f);
    put_text(fd, GET("/events") CLOSE "\r\n");
    char *text = get(fd, NULL);
    static const char want[] = "\r\n\r\n"
                               "e\r\ndata: \"a\\nb\"\n\n\r\n"
                               "e\r\n: keep-alive\n\n\r\n"
                               "9\r\ndata: 7\n\n\r\n"
                               "e\r\ndata: [DONE]\n\n\r\n"
                               "0\r\n\r\n";
    assert_non_null(strstr(text, want));
    assert_non_null(strstr(text, "Content-Type: text/event-stream"));
    free(text);
    close(fd);
    fd = dial(f);
    put_text(fd, GET("/abort") "\r\n"); /* all that was written arrives, but not the end */
    text = get(fd, NULL);
    assert_non_null(strstr(text, "data: [DONE]\n\n\r\n"));
    assert_null(strstr(text, "0\r\n\r\n"));
    free(text);
    close(fd);
    expect_text(f, "GET /events HTTP/1.0\r\n\r\n", "\r\n\r\ndata: \"a\\nb\"\n\n: keep-alive");
    fd = dial(f);
    put_text(fd, "HEAD /header HTTP/1.1\r\nHost: x\r\n" CLOSE "\r\n");
    text = get(fd, NULL);
    assert_non_null(strstr(text, "Content-Length: 6\r\n"));
    assert_string_equal(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    free(text);
    close(fd);
    finish(f);
}

/* What a stream writes in one turn of the loop is one segment of TCP. */
static void test_burst(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    int fd = dial(f);
    put_text(fd, GET("/burst") "\r\n");
    char *text = get(fd, "\r\n0\r\n\r\n");
    int words = 0;
    for (const char *at = text; (at = strstr(at, "\r\n5\r\nword ")); at += 3)
        words++;
    assert_int_equal(words, BURST);
    struct { /* as linux/tcp.h goes on, which uv.h's netinet/tcp.h excludes */
        struct tcp_info head;
        uint64_t rates[4];
        uint32_t segs_out, segs_in, notsent, min_rtt, data_segs_in;
    } info;
    socklen_t len = sizeof info;
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len), 0);
    assert_int_equal(len, sizeof info);
    assert_int_equal(info.data_segs_in, 1);
    free(text);
    close(fd);
    finish(f);
}

static void test_client_leaves(void **state) {
    (void)state;
    struct fixture *f = fixture();
    start(f);
    int fd = dial(f), other = dial(f);
    put_text(fd, GET("/hang") "\r\n");
    put_text(other, GET("/later") "\r\n");
    wait_for(&f->requests, 2);
    close(fd);
    close(other);
    wait_for(&f->gone, 2);
    fd = dial(f); /* answered: nobody is gone */
    put_text(fd, GET("/later") CLOSE "\r\n");
    free(get(fd, NULL));
    close(fd);
    expect_text(f, GET("/x") CLOSE "\r\n", "200 OK");
    assert_int_equal(atomic_load(&f->gone), 2);
    finish(f);
}

/* A client that does not read: cut off by bytes, then by time; others are served meanwhile. */
static void test_slow_reader(void **state) {
    (void)state;
    for (int by_time = 0; by_time < 2; by_time++) {
        struct fixture *f = fixture();
        f->limits.queue_bytes = by_time ? 64 << 20 : 128 << 10;
        f->limits.write_ms = by_time ? 200 : 60000;
        start(f);
        int fd = dial(f), small = 4096;
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        put_text(fd, GET("/flood") "\r\n");
        wait_for(&f->requests, 1);
        expect_text(f, GET("/x") CLOSE "\r\n", "200 OK");
        wait_for(&f->gone, 1);
        close(fd);
        finish(f);
    }
}

static void test_too_many_connections(void **state) {
    (void)state;
    struct fixture *f = fixture();
    f->limits.connections = 2;
    start(f);
    int a = dial(f), b = dial(f);
    put_text(a, GET("/x") "\r\n");
    put_text(b, GET("/x") "\r\n");
    free(get(a, "200 OK"));
    free(get(b, "200 OK"));
    expect_text(f, GET("/x") "\r\n", "HTTP/1.1 503 ");
    close(a);
    close(b);
    finish(f);
}

/* Garbage, and requests with damaged bytes, in pieces: never a crash, always an answer or a close.
 */
static void test_garbage(void **state) {
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    struct fixture *f = fixture();
    f->limits.read_ms = f->limits.idle_ms = 100;
    f->limits.linger_ms = 50;
    start(f);
    static const char good[] = "POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
                               "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    for (int round = 0; round < 150; round++) {
        char bytes[sizeof good];
        memcpy(bytes, good, sizeof good);
        int damage = rand_r(&seed) % 4;
        for (int i = 0; i <= damage; i++)
            bytes[(size_t)rand_r(&seed) % (sizeof good - 1)] = (char)rand_r(&seed);
        if (round % 10 == 0)
            for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (char)rand_r(&seed);
        int fd = dial(f);
        size_t cut = (size_t)rand_r(&seed) % (sizeof good - 1);
        put(fd, bytes, cut);
        put(fd, bytes + cut, sizeof good - 1 - cut);
        if (round % 3) free(get(fd, NULL));
        close(fd);
    }
    expect_text(f, GET("/x") CLOSE "\r\n", "200 OK");
    finish(f);
}

static void test_addresses(void **state) {
    (void)state;
    static const char *const bad[] = {"",
                                      "8000",
                                      "127.0.0.1",
                                      "127.0.0.1:",
                                      "127.0.0.1:x",
                                      "127.0.0.1:70000",
                                      "[::1:80",
                                      "nowhere.example:80",
                                      ":80"};
    struct fixture *f = fixture();
    struct td_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uv_loop_t loop;
        struct td_http_handler h = {.user = f};
        uv_loop_init(&loop);
        assert_int_equal(td_http_server_create(&loop, &f->limits, &h, &f->server, &err), TD_OK);
        assert_int_equal(td_http_server_listen(f->server, bad[i], &err), TD_CONFIG);
        assert_non_null(strstr(err.text, "ADDRESS:PORT"));
        td_http_server_stop(f->server);
        uv_run(&loop, UV_RUN_DEFAULT);
        td_http_server_destroy(f->server);
        assert_int_equal(uv_loop_close(&loop), 0);
    }
    free(f);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN); /* what the server asks of its process */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_bodies_together),
        cmocka_unit_test(test_clocks),
        cmocka_unit_test(test_pieces_and_order),
        cmocka_unit_test(test_long_pipeline),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_burst),
        cmocka_unit_test(test_client_leaves),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_too_many_connections),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
