/* Clusters of needle_ab.h, one after the other: two at once would share the processors and tell
 * nothing about recall. */
#include "deploy/tool/needle_ab.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/tool/local.h"
#include "deploy/tool/needle_ask.h"

enum { START_TIMEOUT_S = 120, PATH_CAP = 128 };

struct value {
    char text[64];
    uint32_t found, asked;
};

static td_status free_port(int *ret, struct td_error *err) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 &&
              getsockname(fd, (struct sockaddr *)&a, &len) == 0;
    int why = errno;
    if (fd >= 0) close(fd);
    if (!ok) return td_fail(err, TD_IO, "a free port on 127.0.0.1: %s", strerror(why));
    *ret = ntohs(a.sin_port);
    return TD_OK;
}

static td_status write_config(const struct td_needle_ab *o, const char *key, const char *value,
                              const char *dir, const char *path, struct td_error *err) {
    int port = 0;
    TD_TRY(free_port(&port, err));
    char *model = realpath(o->model_dir, NULL);
    if (!model) return td_fail(err, TD_IO, "model %s: %s", o->model_dir, strerror(errno));
    FILE *f = fopen(path, "we");
    if (f) {
        fprintf(f,
                "model.dir = %s\nrun_dir = %s\nrouter.listen = 127.0.0.1:%d\nrouter.thinking = "
                "chat\n",
                model, dir, port);
        for (int i = 0; i < o->n_sets; i++)
            fprintf(f, "%s\n", o->set[i]);
        fprintf(f, "%s = %s\n", key, value);
    }
    free(model);
    if (!f || fclose(f) != 0) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    return TD_OK;
}

/* Wilson's interval: honest at 0 and 100 % and for few trials. */
static void interval(uint32_t found, uint32_t asked, double *ret_low, double *ret_high) {
    double z = 1.96, n = asked, p = found / n;
    double mid = (p + z * z / (2 * n)) / (1 + z * z / n);
    double half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n);
    *ret_low = mid - half;
    *ret_high = mid + half;
}

/* Two prompts at a time: while one is tokenised, handed off or decoded, the next one is computed.
 * Which prompts are asked does not depend on it. */
enum { ASKERS = 2 };

struct asking {
    const struct td_needle_ab *o;
    struct td_needle_target t;
    pthread_mutex_t lock; /* of all below */
    uint32_t next, found, asked;
    td_status status; /* of the first prompt without an answer */
    struct td_error err;
};

/* Prompt n of all: every length has its `trials`, of every depth. */
static struct td_needle_spec spec_of(const struct td_needle_ab *o, uint32_t n) {
    uint32_t i = n / o->trials, k = n % o->trials;
    return (struct td_needle_spec){.seed = o->seed + k * 7919 + (uint64_t)i * 104729,
                                   .tokens = o->lengths[i],
                                   .depth = (uint32_t)((uint64_t)k * 37 % 101),
                                   .look_alikes = o->look_alikes,
                                   .repeats = 1};
}

static void *ask_some(void *arg) {
    struct asking *a = arg;
    struct td_error err = {.text = ""};
    pthread_mutex_lock(&a->lock);
    while (a->status == TD_OK && a->next < (uint32_t)a->o->n_lengths * a->o->trials) {
        struct td_needle_spec spec = spec_of(a->o, a->next++);
        struct td_needle_result r;
        pthread_mutex_unlock(&a->lock);
        td_status st = td_needle_ask(&a->t, &spec, &r, &err);
        pthread_mutex_lock(&a->lock);
        if (st == TD_OK) {
            a->asked++;
            a->found += r.found;
        } else if (a->status == TD_OK) {
            a->status = st;
            a->err = err;
        }
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

static td_status ask_all(const struct td_needle_ab *o, const char *url, struct value *v,
                         struct td_error *err) {
    struct asking a = {.o = o, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t other[ASKERS - 1];
    int n = 0;
    TD_TRY(td_needle_target_init(&a.t, url, NULL, err));
    while (n < ASKERS - 1 && pthread_create(&other[n], NULL, ask_some, &a) == 0)
        n++;
    (void)ask_some(&a); /* this thread is one of them */
    while (n > 0)
        pthread_join(other[--n], NULL);
    td_needle_target_finish(&a.t);
    v->asked = a.asked;
    v->found = a.found;
    if (a.status != TD_OK) *err = a.err;
    return a.status;
}

static void remove_dir(const struct td_local *l, const char *dir) {
    char log[PATH_CAP + 64];
    for (int i = 0; i < l->procs.n; i++) {
        td_proc_log(&l->procs, i, log, sizeof log);
        unlink(log);
    }
    unlink(l->path);
    rmdir(dir);
}

/* One value's cluster. When it cannot be started its folder stays, since the logs say why. */
static td_status try_value(const struct td_needle_ab *o, const char *key, struct value *v,
                           struct td_error *err) {
    char dir[] = "/tmp/tandem-ab-XXXXXX", path[PATH_CAP];
    struct td_local l;
    int killed;
    if (!mkdtemp(dir)) return td_fail(err, TD_IO, "%s: %s", dir, strerror(errno));
    snprintf(path, sizeof path, "%s/tandem.conf", dir);
    td_status st = write_config(o, key, v->text, dir, path, err);
    if (st == TD_OK) st = td_local_load(&l, path, err);
    if (st != TD_OK) { /* nothing was started, so there is nothing to look at */
        unlink(path);
        rmdir(dir);
        return st;
    }
    TD_TRY(td_local_up(&l, START_TIMEOUT_S, err));
    st = ask_all(o, l.url, v, err);
    (void)td_local_down(&l, &killed);
    if (st == TD_OK) remove_dir(&l, dir);
    return st;
}

td_status td_needle_ab(const struct td_needle_ab *o, struct td_error *err) {
    static struct value values[TD_NEEDLE_AB_VALUES_MAX];
    char key[64];
    int n = 0;
    const char *eq = strchr(o->setting, '=');
    if (!eq || (size_t)(eq - o->setting) >= sizeof key)
        return td_fail(err, TD_INVALID, "--ab: expected key=value,value,..., found '%s'",
                       o->setting);
    snprintf(key, sizeof key, "%.*s", (int)(eq - o->setting), o->setting);
    for (const char *s = eq + 1;; s++) {
        size_t len = strcspn(s, ",");
        if (n == TD_NEEDLE_AB_VALUES_MAX || len == 0 || len >= sizeof values[0].text)
            return td_fail(err, TD_INVALID,
                           "--ab: expected at most %d values, none empty, found '%s'",
                           TD_NEEDLE_AB_VALUES_MAX, o->setting);
        snprintf(values[n++].text, sizeof values[0].text, "%.*s", (int)len, s);
        s += len;
        if (*s == '\0') break;
    }
    printf("%-24s %9s %9s  %s\n", key, "found", "recall", "95 % interval");
    for (int i = 0; i < n; i++) {
        double low, high;
        TD_TRY(try_value(o, key, &values[i], err));
        interval(values[i].found, values[i].asked, &low, &high);
        printf("%-24s %4u/%-4u %7.1f %%  %.1f .. %.1f %%\n", values[i].text, values[i].found,
               values[i].asked, 100.0 * values[i].found / values[i].asked, 100 * low, 100 * high);
        fflush(stdout);
    }
    return TD_OK;
}
