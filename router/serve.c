/* Start and end of the router. See serve.h. */
#include "router/serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/io/stream.h"
#include "router/serve_parts.h"

/* ---- the loading job ---- */

/* The probe is a conversation like a user's, long enough that more than one block of 256 tokens
 * moves between the workers. */
enum { PROBE_TOKENS = 300 };

static td_status encode_probe(struct td_serve *s, const char *text, size_t n) {
    struct td_chat_params p = {.thinking = s->defaults.thinking};
    struct td_chat_message m = {.role = TD_CHAT_USER, .content = text, .content_n = n};
    s->probe.n = 0;
    return td_chat_encode(&s->chat, &p, &m, 1, &s->probe, &s->load_error);
}

static td_status make_probe(struct td_serve *s) {
    static const char sentence[] =
        "The ship left the harbour at dawn, and its crew wrote down the wind, the tide and the "
        "depth below the keel every hour. ";
    enum { REPEATS_MAX = 64 };
    size_t n = sizeof sentence - 1;
    char *text = malloc(n * REPEATS_MAX);
    if (!text) return td_fail(&s->load_error, TD_NO_MEMORY, "probe: out of memory");
    td_status st = TD_OK;
    for (size_t i = 1; st == TD_OK && i <= REPEATS_MAX && s->probe.n < PROBE_TOKENS; i++) {
        memcpy(text + (i - 1) * n, sentence, n);
        st = encode_probe(s, text, i * n);
    }
    free(text);
    return st;
}

static td_status load_text(struct td_serve *s) {
    TD_TRY(td_tokenizer_load(s->config->model_dir, &s->tokenizer, &s->load_error));
    td_chat_init(&s->chat, s->tokenizer);
    TD_TRY(td_api_defaults_load(&s->defaults, s->config->model_dir, &s->load_error));
    return make_probe(s);
}

static void load(uv_work_t *work) {
    struct td_serve *s = work->data;
    s->load_status = load_text(s);
}

static void fail(struct td_serve *s, const struct td_error *err) {
    s->result = err->status;
    s->error = *err;
    td_err("%s", err->text);
    td_serve_stop(s);
}

/* The router has no engine: that its loop turns is its progress. */
static void tell_manager(struct td_serve *s, uint64_t now) {
    const char *why = td_serve_not_ready(s);
    td_notify_alive(&s->notify, now, false, 0);
    if (why) {
        td_notify_status(&s->notify, "not ready: %s", why);
    } else {
        td_notify_status(&s->notify, "serving on %s", s->config->router_listen);
    }
}

static void on_tick(void *user) {
    struct td_serve *s = user;
    uint64_t now = td_now_ns();
    tell_manager(s, now);
    TD_LIST_EACH_SAFE (&s->requests, it, tmp) {
        td_request_tick(TD_CONTAINER(it, struct td_request, link), now);
    }
}

static void loaded(uv_work_t *work, int status) {
    struct td_serve *s = work->data;
    struct td_error err;
    s->load_pending = false;
    if (s->phase == TD_SERVE_STOPPING || status == UV_ECANCELED) return;
    if (s->load_status != TD_OK) {
        fail(s, &s->load_error);
        return;
    }
    if (td_serve_start_flow(s, &err) != TD_OK) {
        fail(s, &err);
        return;
    }
    s->phase = TD_SERVE_RUNNING;
    td_timer_every(s->tick, TD_SERVE_TICK_MS);
    td_notify_ready(&s->notify);
    td_info("listening on %s (port %u)", s->config->router_listen, td_http_server_port(s->http));
    td_info("tokenizer loaded (%d tokens, %.2f s); waiting for workers",
            td_tokenizer_size(s->tokenizer), (double)(td_now_ns() - s->started_ns) * 1e-9);
}

/* ---- clients ---- */

static void on_gone(void *user, struct td_http_conn *c) {
    (void)user;
    struct td_conn_owner *o = td_http_owner(c);
    o->gone(o);
}

/* ---- life ---- */

static td_status name_model(struct td_serve *s, struct td_error *err) {
    const char *name = s->config->model_name;
    const char *dir = s->config->model_dir;
    size_t n = strlen(dir);
    if (n == 0)
        return td_fail(err, TD_CONFIG, "model.dir: expected a checkpoint folder, found none");
    while (n > 1 && dir[n - 1] == '/')
        n--;
    size_t from = n;
    while (from > 0 && dir[from - 1] != '/')
        from--;
    if (*name)
        n = strlen(name);
    else {
        name = dir + from;
        n -= from;
    }
    if (n == 0 || n >= sizeof s->model)
        return td_fail(err, TD_CONFIG, "model.name: expected 1 to %zu bytes, found %zu",
                       sizeof s->model - 1, n);
    memcpy(s->model, name, n);
    return TD_OK;
}

/* Before anything is opened: a router without it would let nobody in. */
static td_status load_key(struct td_serve *s, struct td_error *err) {
    const struct td_config *c = s->config;
    bool tcp;
    if (!c->router_control[0]) return TD_OK;
    TD_TRY(td_address_is_tcp(c->router_control, &tcp, err));
    if (!tcp)
        return td_fail(
            err, TD_CONFIG,
            "router.control: expected address:port (the Unix socket in run_dir is always "
            "there), found %s",
            c->router_control);
    if (!c->cluster_key_file[0])
        return td_fail(
            err, TD_CONFIG,
            "router.control: expected cluster_key_file, found none: processes that talk "
            "over TCP share a secret (head -c 32 /dev/urandom | base64 > FILE; chmod 600 "
            "FILE; the same on every host)");
    return td_cluster_key_load(c->cluster_key_file, &s->key, err);
}

static td_status open_access(struct td_serve *s, struct td_error *err) {
    const char *path = s->config->router_api_keys_file;
    s->access.origins = s->config->router_cors_origins;
    TD_TRY(td_access_origins_check(s->access.origins, err));
    if (!*path) return TD_OK;
    TD_TRY(td_api_keys_create(&s->access.keys, err));
    TD_TRY(td_api_keys_load(s->access.keys, path, err));
    td_info("%u clients' keys", td_api_keys_count(s->access.keys));
    return TD_OK;
}

void td_serve_reload(struct td_serve *s) {
    const char *path = s->config->router_api_keys_file;
    struct td_error err;
    if (s->phase == TD_SERVE_STOPPING) return;
    if (!s->access.keys)
        td_info("asked to read keys again, but router.api_keys_file names none");
    else if (td_api_keys_load(s->access.keys, path, &err) != TD_OK)
        td_err("%s; the keys from before hold", err.text);
    else
        td_info("%u clients' keys", td_api_keys_count(s->access.keys));
}

/* Clients never get the last descriptors: a worker whose link found none could not come back for as
 * long as they hold on. */
static uint32_t connections_max(const struct td_config *c) {
    /* Beside: links, also of workers being replaced, and what the process opens itself. */
    enum { BESIDE = 256, FEWEST = 16 };
    /* Room for people who watch, beside the requests that may be in flight. */
    rlim_t want = 4 * c->router_max_requests + 64, need = want + TD_HTTP_TURNED_AWAY_MAX + BESIDE;
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) != 0 || l.rlim_cur >= need) return (uint32_t)want;
    l.rlim_cur = need < l.rlim_max ? need : l.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &l); /* what holds then is asked for */
    if (getrlimit(RLIMIT_NOFILE, &l) != 0 || l.rlim_cur >= need) return (uint32_t)want;
    rlim_t beside = need - want;
    want = l.rlim_cur > beside + FEWEST ? l.rlim_cur - beside : FEWEST;
    td_warn("%llu open files allow %llu connections of clients", (unsigned long long)l.rlim_cur,
            (unsigned long long)want);
    return (uint32_t)want;
}

static td_status start(struct td_serve *s, struct td_error *err) {
    struct td_http_limits limits;
    struct td_http_handler handler = {
        .user = s, .request = td_route, .gone = on_gone, .refused = td_route_refused};
    TD_TRY(name_model(s, err));
    s->defaults = (struct td_api_defaults){
        .model = s->model,
        .thinking = s->config->router_thinking == TD_MODE_THINKING,
        .efforts =
            s->config->router_efforts == TD_EFFORT_TABLE_0731 ? TD_EFFORTS_0731 : TD_EFFORTS_APRIL,
        .max_new = (uint32_t)s->config->router_default_max_tokens,
    };
    if (getrandom(&s->epoch, sizeof s->epoch, 0) != sizeof s->epoch || s->epoch == 0)
        return td_fail(err, TD_IO, "no random numbers from the system");
    TD_TRY(load_key(s, err));
    TD_TRY(open_access(s, err));
    if (s->config->router_store_bytes)
        TD_TRY(td_response_store_create(s->config->router_store_bytes,
                                        (uint32_t)s->config->router_store_count, &s->responses,
                                        err));
    td_http_limits_defaults(&limits);
    limits.body_bytes = s->config->router_max_body;
    limits.connections = connections_max(s->config);
    TD_TRY(td_http_server_create(s->loop, &limits, &handler, &s->http, err));
    TD_TRY(td_http_server_listen(s->http, s->config->router_listen, err));
    if (td_timer_create(s->loop, on_tick, s, &s->tick) != TD_OK)
        return td_fail(err, TD_NO_MEMORY, "router: out of memory");
    s->load.data = s;
    if (uv_queue_work(s->loop, &s->load, load, loaded) != 0)
        return td_fail(err, TD_NO_MEMORY, "router: out of memory");
    s->load_pending = true;
    return TD_OK;
}

td_status td_serve_create(uv_loop_t *loop, const struct td_config *config, struct td_serve **ret,
                          struct td_error *err) {
    struct td_serve *s = calloc(1, sizeof *s);
    if (!s) return td_fail(err, TD_NO_MEMORY, "router: out of memory");
    s->loop = loop;
    s->config = config;
    s->started_ns = td_now_ns();
    s->started_wall_s = td_wall_s();
    td_list_init(&s->requests);
    td_list_init(&s->dead);
    if (td_notify_open(&s->notify, err) != TD_OK)
        td_warn("the service manager will not hear of us: %s", err->text);
    td_status st = start(s, err);
    if (st != TD_OK) {
        td_serve_stop(s);
        uv_run(loop, UV_RUN_DEFAULT); /* the close callbacks of what was opened */
        td_serve_destroy(s);
        return st;
    }
    *ret = s;
    return TD_OK;
}

void td_serve_stop(struct td_serve *s) {
    if (s->phase == TD_SERVE_STOPPING) return;
    s->phase = TD_SERVE_STOPPING;
    td_notify_stopping(&s->notify);
    if (s->load_pending) (void)uv_cancel((uv_req_t *)&s->load);
    /* First the cancels, so that they are flushed by the links. */
    TD_LIST_EACH_SAFE (&s->requests, it, tmp) {
        td_request_abandon(TD_CONTAINER(it, struct td_request, link));
    }
    if (s->http) td_http_server_stop(s->http);
    td_link_server_destroy(s->links);
    td_link_server_destroy(s->remote_links);
    s->links = s->remote_links = NULL;
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
        s->workers[i].conn = NULL;
    td_timer_destroy(s->deadline);
    td_timer_destroy(s->tick);
    s->deadline = s->tick = NULL;
}

td_status td_serve_result(const struct td_serve *s, struct td_error *err) {
    if (s->result != TD_OK && err) *err = s->error;
    return s->result;
}

void td_serve_destroy(struct td_serve *s) {
    if (!s) return;
    td_request_reap(s);
    td_response_store_destroy(s->responses);
    td_http_server_destroy(s->http);
    td_flow_destroy(s->flow);
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
        free(s->workers[i].settings);
    td_ids_free(&s->probe);
    td_tokenizer_destroy(s->tokenizer);
    td_json_out_free(&s->scratch);
    td_notify_close(&s->notify);
    td_cluster_key_free(s->key);
    td_api_keys_destroy(s->access.keys);
    free(s);
}
