/* See ends.h. Failures here end the test program: nothing can be tested without its ends. */
#include "tests/common/xfer/ends.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"

#define NEED(cond, ...)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: " #cond ": ", __FILE__, __LINE__);                             \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* UCX 1.13.1 loses 100 bytes when a greeting of a process that has ended makes it map a queue that
 * is gone (uct_mm_ep's constructor keeps its table on that path). What we could lose ourselves in
 * libuct shows in the tests that count mappings and descriptors. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) {
    return "leak:libuct.so\n";
}

static bool tcp;
static char key_text[64] = "the cluster key of all the tests here";

int ends_lane(int argc, char **argv) {
    struct td_error err;
    bool named = argc > 1 && (strcmp(argv[1], "tcp") == 0 || strcmp(argv[1], "shm") == 0);
    tcp = named && strcmp(argv[1], "tcp") == 0;
    NEED(td_xfer_env(tcp ? TD_XFER_TCP : TD_XFER_SHM, "lo", &err) == TD_OK, "%s", err.text);
    return named;
}

bool ends_tcp(void) {
    return tcp;
}

void ends_key(const char *text) {
    snprintf(key_text, sizeof key_text, "%s",
             *text ? text : "the cluster key of all the tests here");
}

static void on_stranger(void *user, const char *sentence) {
    struct end *e = user;
    e->strangers++;
    snprintf(e->sentence, sizeof e->sentence, "%s", sentence);
}

static void on_accept(void *user, struct td_xfer_peer *peer) {
    struct end *e = user;
    e->accepted++;
    e->peer = peer;
    if (e->on_accept) e->on_accept(e, peer);
}

static void on_message(void *user, struct td_xfer_peer *peer, const void *bytes, size_t len) {
    struct end *e = user;
    e->messages++;
    e->last_len = len;
    memcpy(e->last, bytes, len);
    if (e->echo && td_xfer_send(peer, bytes, len, UINT64_MAX) != TD_OK) e->echo_busy++;
    if (e->on_message) e->on_message(e, peer, bytes, len);
}

static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *sentence) {
    struct end *e = user;
    e->lost++;
    e->why = why;
    snprintf(e->sentence, sizeof e->sentence, "%s", sentence);
    if (e->on_lost) e->on_lost(e, peer);
}

static void on_renewed(void *user, td_status status, const char *sentence) {
    struct end *e = user;
    e->renewed++;
    e->renewed_status = status;
    if (status != TD_OK) snprintf(e->sentence, sizeof e->sentence, "%s", sentence);
}

static void on_closed(void *user, struct td_xfer_peer *peer) {
    struct end *e = user;
    e->closed++;
    if (e->peer == peer) e->peer = NULL;
}

void end_open(struct end *e, uint32_t max_peers, uint32_t sends_per_peer) {
    memset(e, 0, sizeof *e);
    struct td_xfer_options o = {.on_accept = on_accept,
                                .on_message = on_message,
                                .on_lost = on_lost,
                                .on_closed = on_closed,
                                .on_stranger = on_stranger,
                                .on_renewed = on_renewed,
                                .user = e,
                                .role = 1,
                                .epoch = 1,
                                .max_peers = max_peers,
                                .sends_per_peer = sends_per_peer};
    struct td_error err;
    struct td_cluster_key *key = NULL;
    if (tcp)
        NEED(td_cluster_key_make(key_text, strlen(key_text), &key, &err) == TD_OK, "%s", err.text);
    o.key = e->key = key;
    NEED(td_xfer_create(&o, &e->x, &err) == TD_OK, "%s", err.text);
}

void end_close(struct end *e) {
    td_xfer_destroy(e->x);
    td_cluster_key_free(e->key);
    e->x = NULL;
}

void end_connect(struct end *e, const void *address, size_t len) {
    struct td_error err;
    NEED(td_xfer_connect(e->x, address, len, &e->peer, &err) == TD_OK, "%s", err.text);
}

bool ends_run(struct end **ends, size_t n, bool (*done)(void *user), void *user, unsigned ms) {
    uint64_t stop = td_now_ns() + (uint64_t)ms * 1000000u;
    bool overslept = false;
    while (!done(user)) {
        if (td_now_ns() >= stop) return false;
        bool moved = false;
        for (size_t i = 0; i < n; i++) {
            bool did = td_xfer_progress(ends[i]->x);
            ends[i]->missed += did && overslept;
            moved |= did;
        }
        overslept = false;
        for (size_t i = 0; i < n; i++)
            if (ends[i]->expires) (void)td_xfer_expire(ends[i]->x, td_now_ns());
        if (moved || done(user)) continue;
        struct pollfd fds[8];
        int wait = 20;
        for (size_t i = 0; i < n; i++) {
            fds[i] = (struct pollfd){.fd = td_xfer_fd(ends[i]->x), .events = POLLIN};
            enum td_xfer_wait w = td_xfer_arm(ends[i]->x);
            if (w == TD_XFER_AGAIN) wait = 0;
            if (w == TD_XFER_POLL && wait > 1) wait = 1;
            if (w == TD_XFER_POLL) ends[i]->polls++;
        }
        if (wait) overslept = poll(fds, n, wait) == 0 && wait > 1;
    }
    return true;
}

static void want_done(struct td_xfer_req *req, td_status status) {
    struct want *w = req->user;
    w->done++;
    w->status = status;
}

static void want_quiet(struct td_xfer_req *req) {
    struct want *w = req->user;
    NEED(req->quiet && w->done == 1, "quiet without an answer");
    w->quiet++;
}

void want_init(struct want *w, uint64_t deadline_ns) {
    memset(w, 0, sizeof *w);
    w->req.deadline_ns = deadline_ns;
    w->req.on_done = want_done;
    w->req.on_quiet = want_quiet;
    w->req.user = w;
}

bool want_is_quiet(void *want) {
    return ((struct want *)want)->quiet > 0;
}

static uint64_t word(uint64_t seed, uint64_t i) {
    uint64_t v = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
    return v ^ (v >> 29);
}

void pattern_fill(void *p, size_t len, uint64_t seed) {
    for (size_t i = 0; i + 8 <= len; i += 8) {
        uint64_t v = word(seed, i);
        memcpy((char *)p + i, &v, 8);
    }
}

bool pattern_is(const void *p, size_t len, uint64_t seed) {
    for (size_t i = 0; i + 8 <= len; i += 8) {
        uint64_t v = word(seed, i);
        if (memcmp((const char *)p + i, &v, 8) != 0) return false;
    }
    return true;
}

unsigned descriptors(void) {
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static void read_all(int fd, void *p, size_t len) {
    for (size_t at = 0; at < len;) {
        ssize_t n = read(fd, (char *)p + at, len - at);
        NEED(n > 0, "the receiver ended early");
        at += (size_t)n;
    }
}

static void write_all(int fd, const void *p, size_t len) {
    for (size_t at = 0; at < len;) {
        ssize_t n = write(fd, (const char *)p + at, len - at);
        NEED(n > 0, "the test ended early");
        at += (size_t)n;
    }
}

void receiver_start(struct receiver *r) {
    sender_start(r, NULL, 0);
}

void sender_start(struct receiver *r, const void *address, size_t len) {
    memset(r, 0, sizeof *r);
    int out[2], in[2];
    NEED(pipe(out) == 0 && pipe(in) == 0, "no pipe");
    r->pid = fork();
    NEED(r->pid >= 0, "no process");
    if (r->pid == 0) {
        dup2(out[1], STDOUT_FILENO);
        dup2(in[0], STDIN_FILENO);
        close(out[0]);
        close(out[1]);
        close(in[0]);
        close(in[1]);
        execl("/proc/self/exe", "receiver", tcp ? "tcp" : "shm", "receiver", (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    close(in[0]);
    uint64_t address_len = len;
    write_all(in[1], &address_len, sizeof address_len);
    if (len) write_all(in[1], address, len);
    close(in[1]);
    read_all(out[0], &r->epoch, sizeof r->epoch);
    read_all(out[0], &r->address_len, sizeof r->address_len);
    read_all(out[0], &r->key_len, sizeof r->key_len);
    NEED(r->address_len <= sizeof r->address && r->key_len <= sizeof r->key, "sizes");
    read_all(out[0], r->address, r->address_len);
    read_all(out[0], r->key, r->key_len);
    close(out[0]);
}

void receiver_stop(struct receiver *r) {
    if (r->pid <= 0) return;
    kill(r->pid, SIGKILL);
    waitpid(r->pid, NULL, 0);
    r->pid = 0;
}

static struct td_xfer_region *region;
static uint64_t my_epoch;

static void admit(struct end *e, struct td_xfer_peer *peer) {
    (void)e;
    td_xfer_grant(peer, region, 0, RECEIVER_REGION);
}

static void obey(struct end *e, struct td_xfer_peer *peer, const void *bytes, size_t len) {
    struct order o;
    NEED(len == sizeof o, "an order of %zu bytes", len);
    memcpy(&o, bytes, sizeof o);
    if (o.op == OP_VERIFY)
        o.op = pattern_is((char *)td_xfer_region_base(region) + o.offset, o.len, o.seed) ? OP_OK
                                                                                         : OP_BAD;
    if (o.op == OP_HELLO) o.seed = e->missed;
    o.epoch = my_epoch;
    if (td_xfer_send(peer, &o, sizeof o, UINT64_MAX) != TD_OK) e->echo_busy++;
}

static bool never(void *user) {
    struct end *e = user;
    /* A lost link is closed, as a decode worker does; its successor is served meanwhile. */
    if (e->lost && e->peer && e->closed < e->lost) td_xfer_peer_close(e->peer);
    return false;
}

int receiver_main(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct td_error err;
    NEED(getrandom(&my_epoch, sizeof my_epoch, 0) == sizeof my_epoch, "no epoch");
    static struct end e;
    end_open(&e, 0, 0);
    e.on_message = obey;
    e.on_accept = admit;
    NEED(td_xfer_region_alloc(e.x, RECEIVER_REGION, &region, &err) == TD_OK, "%s", err.text);
    size_t len;
    const void *address = td_xfer_address(e.x, &len);
    uint64_t address_len = len;
    const void *key = td_xfer_region_key(region, &len);
    uint64_t key_len = len;
    write_all(STDOUT_FILENO, &my_epoch, sizeof my_epoch);
    write_all(STDOUT_FILENO, &address_len, sizeof address_len);
    write_all(STDOUT_FILENO, &key_len, sizeof key_len);
    write_all(STDOUT_FILENO, address, address_len);
    write_all(STDOUT_FILENO, key, key_len);
    uint64_t other_len;
    static uint8_t other[TD_XFER_ADDRESS_MAX];
    read_all(STDIN_FILENO, &other_len, sizeof other_len);
    NEED(other_len <= sizeof other, "an address of %llu bytes", (unsigned long long)other_len);
    if (other_len) {
        read_all(STDIN_FILENO, other, other_len);
        end_connect(&e, other, other_len);
        struct order o = {.op = OP_OK, .epoch = my_epoch};
        NEED(td_xfer_send(e.peer, &o, sizeof o, UINT64_MAX) == TD_OK, "no greeting");
    }
    struct end *ends[] = {&e};
    /* Longer than any test; a test that ends kills it. */
    ends_run(ends, 1, never, &e, 10 * ENDS_WAIT_MS);
    td_xfer_region_free(region);
    end_close(&e);
    return 0;
}
