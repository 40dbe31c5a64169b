/* Every rule of `tandem doctor` both ways: facts of a sound machine give no more than "ok" and
 * "skipped", and each fact spoiled alone gives the one verdict and sentence that it should, with a
 * cure wherever something is wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>

#include "deploy/tool/doctor_gpu.h"
#include "deploy/tool/doctor_host.h"
#include "deploy/tool/doctor_lane.h"
#include "deploy/tool/doctor_model.h"
#include "deploy/tool/doctor_roles.h"

#define GB 1000000000ull

static struct td_report report;

static void begin(void) {
    memset(&report, 0, sizeof report);
}

/* Nothing is wrong, and something was said. */
static void sound(void) {
    for (uint32_t i = 0; i < report.n; i++)
        if (report.finding[i].verdict > TD_SKIPPED)
            fail_msg("expected nothing wrong, found: %s", report.finding[i].text);
    assert_true(report.n > 0);
}

/* Exactly one finding that is not fine or skipped: of this verdict, with these words, cured. */
static void one(enum td_verdict v, const char *words) {
    const struct td_diagnosis *f = NULL;
    for (uint32_t i = 0; i < report.n; i++) {
        if (report.finding[i].verdict <= TD_SKIPPED) continue;
        if (f) fail_msg("two findings: %s; and: %s", f->text, report.finding[i].text);
        f = &report.finding[i];
    }
    if (!f) fail_msg("expected \"%s\", found nothing wrong", words);
    if (f->verdict != v || !strstr(f->text, words))
        fail_msg("expected \"%s\", found: %d %s", words, f->verdict, f->text);
    if (!f->cure[0]) fail_msg("no cure: %s", f->text);
}

/* A finding of this verdict with these words among others. */
static void among(enum td_verdict v, const char *words) {
    for (uint32_t i = 0; i < report.n; i++)
        if (report.finding[i].verdict == v && strstr(report.finding[i].text, words)) return;
    fail_msg("expected \"%s\" among %u findings", words, report.n);
}

/* ---- the host ---- */

static const struct td_host_facts good_host = {.memory = 64 * GB,
                                               .available = 60 * GB,
                                               .group_limit = UINT64_MAX,
                                               .memlock = UINT64_MAX,
                                               .files_soft = 1024,
                                               .files_hard = 65536,
                                               .shm_mounted = true,
                                               .shm_free = 30 * GB,
                                               .ptrace_scope = 1};
static const struct td_host_needs needs = {.shm = true,
                                           .gpus = true,
                                           .memory = 10 * GB,
                                           .pinned = GB / 10,
                                           .shm_bytes = GB / 10,
                                           .files = 1408};

#define HOST(change, verdict, words)                                                               \
    do {                                                                                           \
        struct td_host_facts f = good_host;                                                        \
        struct td_host_needs n = needs;                                                            \
        change;                                                                                    \
        begin();                                                                                   \
        td_host_rules(&f, &n, &report);                                                            \
        (verdict) == TD_FINE ? sound() : one(verdict, words);                                      \
    } while (0)

static void host_rules(void **state) {
    (void)state;
    HOST(, TD_FINE, "");
    HOST(n.memory = 65 * GB, TD_ERROR, "this machine has 64.00 GB");
    HOST(f.group_limit = 12 * GB;
         f.group_used = 3 * GB, TD_ERROR, "the control group allows 12.00");
    HOST(f.group_limit = 12 * GB; f.group_used = GB, TD_FINE, "");
    HOST(f.group_limit = 2 * GB; f.group_used = 3 * GB, TD_ERROR, "control group");
    HOST(f.group_limit = 12 * GB; f.group_used = 11 * GB; n.running = true, TD_FINE, "");
    HOST(f.available = 9 * GB, TD_WARNING, "are available now");
    HOST(f.available = 9 * GB; n.running = true, TD_FINE, "");
    HOST(f.huge_free = 7 * GB, TD_WARNING, "huge pages");
    HOST(f.huge_free = 6 * GB, TD_FINE, "");
    HOST(f.overcommit = 2, TD_WARNING, "overcommit");
    HOST(f.overcommit = 1, TD_FINE, "");
    HOST(f.files_hard = 1023, TD_ERROR, "expected at least 1024, found 1023");
    HOST(f.files_hard = 1407, TD_WARNING, "fewer connections");
    HOST(f.files_hard = 1408, TD_FINE, "");
    HOST(f.memlock = 8 << 20, TD_WARNING, "RLIMIT_MEMLOCK");
    HOST(f.memlock = 8 << 20; n.gpus = false, TD_FINE, "");
    HOST(f.shm_mounted = false, TD_ERROR, "found none");
    HOST(f.shm_errno = EACCES, TD_ERROR, "Permission denied");
    HOST(f.shm_mounted = false; n.shm = false, TD_FINE, "");
    HOST(f.shm_free = 64 << 20, TD_ERROR, "queues and slabs");
    HOST(f.shm_free = 64 << 20; n.running = true, TD_FINE, "");
    HOST(f.peer_fd = EACCES, TD_ERROR, "/proc/PID/fd");
    HOST(f.pidfd = ENOSYS, TD_ERROR, "pidfd_open");
    HOST(f.peer_fd = f.pidfd = EPERM; n.shm = false, TD_FINE, "");
    HOST(n.memory = 0, TD_FINE, "");
    among(TD_SKIPPED, "no worker could be planned");
}

static void run_dir(struct td_run_dir_facts f, bool units, enum td_verdict v, const char *words) {
    begin();
    td_run_dir_rules(&f, units, &report);
    v == TD_FINE ? sound() : one(v, words);
}

static void run_dir_rules(void **state) {
    (void)state;
    struct td_run_dir_facts good = {"/tmp/x", 0, true, true, false, 9 * GB}, f = good;
    run_dir(good, false, TD_FINE, "");
    f.writable = false;
    run_dir(f, false, TD_ERROR, "one that cannot");
    run_dir(f, true, TD_FINE, ""); /* looked at by another user than the units' */
    f = good;
    f.folder = false;
    run_dir(f, true, TD_ERROR, "another kind of file");
    f = good;
    f.stat_errno = ENOENT;
    run_dir(f, false, TD_ERROR, "No such file");
    run_dir(f, true, TD_FINE, "");
    f.parent_writable = true;
    run_dir(f, false, TD_FINE, "");
    f.stat_errno = EACCES;
    run_dir(f, true, TD_ERROR, "Permission denied");
    f = good;
    f.free = 99999999;
    run_dir(f, false, TD_WARNING, "free for logs");
    f = good;
    memset(f.path, 'a', 96); /* with /router.sock and the end of it: 109 bytes of 108 */
    f.path[96] = 0;
    run_dir(f, false, TD_ERROR, "expected at most 95 bytes, found 96");
    f.path[95] = 0;
    run_dir(f, false, TD_FINE, "");
}

static void key(struct td_key_facts f, enum td_verdict v, const char *words) {
    begin();
    td_key_rules(&f, &report);
    v == TD_FINE ? sound() : one(v, words);
}

static void key_rules(void **state) {
    (void)state;
    struct td_key_facts good = {.setting = "cluster_key_file", .path = "/k", .as = 7, .least = 32};
    good.stat.st_mode = S_IFREG | 0600;
    good.stat.st_uid = 7;
    good.stat.st_size = 45;
    struct td_key_facts f = good;
    key(good, TD_FINE, "");
    f.stat.st_mode = S_IFREG | 0640;
    f.stat.st_uid = 0;
    key(f, TD_FINE, "");
    f.stat.st_mode = S_IFREG | 0644;
    key(f, TD_ERROR, "found 0644");
    f.stat.st_mode = S_IFREG | 0660;
    key(f, TD_ERROR, "found 0660");
    f = good;
    f.stat.st_uid = 8;
    key(f, TD_ERROR, "found user 8");
    f = good;
    f.stat.st_mode = S_IFDIR | 0600;
    key(f, TD_ERROR, "regular file");
    f = good;
    f.stat.st_size = 31;
    key(f, TD_ERROR, "at least 32 bytes, found 31");
    f = good;
    f.open_errno = ENOENT;
    key(f, TD_ERROR, "No such file");
}

static void port(struct td_port_facts f, enum td_verdict v, const char *words) {
    begin();
    td_port_rules(&f, &report);
    v == TD_FINE ? sound() : one(v, words);
}

static void port_rules(void **state) {
    (void)state;
    struct td_port_facts good = {.setting = "router.listen", .address = "127.0.0.1:8000"}, f = good;
    port(good, TD_FINE, "");
    f.bind_errno = EADDRINUSE;
    f.holder = TD_HELD_BY_OURS;
    port(f, TD_FINE, "");
    f.holder = TD_HELD_BY_OTHERS;
    port(f, TD_ERROR, "held by another program");
    f.bind_errno = EACCES;
    port(f, TD_ERROR, "Permission denied");
    f.bind_errno = EADDRNOTAVAIL;
    port(f, TD_ERROR, "Cannot assign");
    f.elsewhere = true;
    port(f, TD_FINE, "");
    f = good;
    snprintf(f.bad, sizeof f.bad, "expected a numeric address");
    port(f, TD_ERROR, "numeric address");
}

static void unit(struct td_unit_facts f, enum td_verdict v, const char *words) {
    begin();
    td_unit_rules(&f, &report);
    v == TD_FINE ? sound() : one(v, words);
}

static void unit_rules(void **state) {
    (void)state;
    struct td_unit_facts good = {true, true, true, {true, true, true, true}}, f = good;
    unit(good, TD_FINE, "");
    f.unit[2] = false;
    unit(f, TD_ERROR, "tandem-decode@.service");
    f.installed = false;
    unit(f, TD_FINE, "");
    f.installed = true;
    f.systemd = false;
    unit(f, TD_FINE, "");
    f = good;
    f.user = false;
    unit(f, TD_ERROR, "user tandem");
}

/* ---- the model ---- */

#define MODEL(change, verdict, words)                                                              \
    do {                                                                                           \
        struct td_shard_facts s[2] = {{"a.safetensors", 0, 100, 100, ""},                          \
                                      {"b.safetensors", 0, 50, 50, ""}};                           \
        struct td_model_facts f = {                                                                \
            .dir = "/m", .vocab = 2048, .tokens = 2048, .layers = 6, .shard = s, .shards = 2};     \
        change;                                                                                    \
        begin();                                                                                   \
        td_model_rules(&f, &report);                                                               \
        (verdict) == TD_FINE ? sound() : one(verdict, words);                                      \
    } while (0)

static struct td_error sentence(td_status st, const char *text) {
    struct td_error e;
    (void)!td_fail(&e, st, "%s", text);
    return e;
}

static void model_rules(void **state) {
    (void)state;
    MODEL(, TD_FINE, "");
    MODEL(s[1].open_errno = ENOENT, TD_ERROR, "/m/b.safetensors: No such file");
    MODEL(s[0].open_errno = EACCES, TD_ERROR, "Permission denied");
    MODEL(s[0].bytes = 99, TD_ERROR, "expected 100 bytes by its own header, found 99");
    MODEL(s[0].bytes = 101, TD_WARNING, "found 101");
    MODEL(s[1].promised = 0; snprintf(s[1].bad, 200, "no header"), TD_ERROR, "no header");
    MODEL(f.tensors = sentence(TD_FORMAT, "tensor x twice"), TD_ERROR, "tensor x twice");
    MODEL(f.index = sentence(TD_NOT_FOUND, "none of them"), TD_ERROR, "none of them");
    MODEL(f.index = sentence(TD_NOT_FOUND, "none of them"); f.random = true, TD_FINE, "");
    MODEL(f.config = sentence(TD_FORMAT, "dim: missing"), TD_ERROR, "dim: missing");
    MODEL(f.tokenizer = sentence(TD_IO, "tokenizer.json: gone"), TD_ERROR, "tokenizer.json: gone");
    MODEL(f.tokens = 2049, TD_ERROR, "vocabulary of 2048, found 2049");
    /* Each broken shard is named. */
    struct td_shard_facts s[2] = {{"a", ENOENT, 0, 0, ""}, {"b", ENOENT, 0, 0, ""}};
    struct td_model_facts f = {.dir = "/m", .shard = s, .shards = 2};
    begin();
    td_model_rules(&f, &report);
    assert_int_equal(report.count[TD_ERROR], 2);
}

static void promised_bytes(void **state) {
    (void)state;
    static const char text[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                               "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
                               "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    char bad[200];
    assert_int_equal(td_shard_promised(text, sizeof text - 1, bad, sizeof bad),
                     8 + sizeof text - 1 + 12);
    assert_int_equal(td_shard_promised(text, 20, bad, sizeof bad), 0);
    assert_true(strstr(bad, "no JSON object") != NULL);
}

/* ---- lanes ---- */

#define LANE(change, verdict, words)                                                               \
    do {                                                                                           \
        struct td_lane_facts f = {.worker = "decode@0",                                            \
                                  .program = true,                                                 \
                                  .end = {TD_APART_DONE, 0, false},                                \
                                  .limit_s = 30,                                                   \
                                  .version = "1.13.1",                                             \
                                  .lane = "shm",                                                   \
                                  .links = "posix/memory"};                                        \
        change;                                                                                    \
        begin();                                                                                   \
        td_lane_rules(&f, &report);                                                                \
        (verdict) == TD_FINE ? sound() : one(verdict, words);                                      \
    } while (0)
#define TCP(a)                                                                                     \
    snprintf(f.lane, sizeof f.lane, "tcp"), snprintf(f.device, sizeof f.device, "eth1"),           \
        f.device_there = true, f.address = (a)

static void lane_rules(void **state) {
    (void)state;
    LANE(, TD_FINE, "");
    LANE(f.program = false, TD_FINE, "");
    LANE(f.end.how = TD_APART_LATE, TD_ERROR, "within 30 s");
    LANE(f.end = ((struct td_apart_end){TD_APART_DIED, 6, false}), TD_ERROR, "signal 6");
    LANE(f.end = ((struct td_apart_end){TD_APART_DIED, -127, false}), TD_ERROR, "exit code 127");
    LANE(f.end.how = TD_APART_DIED;
         snprintf(f.failed, 400, "lane_device: none"), TD_ERROR, "lane_device: none");
    static const uint32_t inside[] = {0x0a000001, 0xac100001, 0xac1fffff, 0xc0a80101, 0x64400001},
                          outside[] = {0x08080808, 0xac200001, 0xc0a90101, 0x64800001, 0x0b000001};
    for (int i = 0; i < 5; i++) {
        LANE(TCP(inside[i]), TD_FINE, "");
        LANE(TCP(outside[i]), TD_WARNING, "public address");
    }
    LANE(TCP(0x7f000001); f.device_loopback = true, TD_WARNING, "loopback");
}

static void lane_answers(void **state) {
    (void)state;
    char text[] =
        "version 1.19.0\ncomponents posix cuda_ipc tcp\nlane tcp\nfailed no such device\n";
    struct td_lane_facts f = {.gpus = true};
    td_lane_read(text, &f);
    assert_string_equal(f.version, "1.19.0");
    assert_string_equal(f.failed, "no such device");
    begin();
    td_lane_ucx_rules(&f, &report);
    among(TD_FINE, "it has cuda_ipc");
    snprintf(f.components, sizeof f.components, "posix cuda_ipcx");
    td_lane_ucx_rules(&f, &report);
    among(TD_FINE, "it has no cuda_ipc");
}

/* ---- roles ---- */

static void role(struct td_role_facts f, enum td_verdict v, const char *words) {
    begin();
    td_role_rules(&f, &report);
    v == TD_FINE ? sound() : one(v, words);
}

static void role_rules(void **state) {
    (void)state;
    struct td_role_facts good = {.name = "decode@0", .worker = true, .planned = true}, f = good;
    role(good, TD_FINE, "");
    f.plan = sentence(TD_NO_MEMORY, "max_context: too long");
    role(f, TD_ERROR, "max_context: too long");
    f.planned = false;
    role(f, TD_FINE, "");
    f.settings = sentence(TD_CONFIG, "device: expected cpu");
    role(f, TD_ERROR, "decode@0: device: expected cpu");
    assert_true(td_role_is(&good, "decode"));
    assert_false(td_role_is(&good, "dec"));
    struct td_roles all = {.loaded = sentence(TD_CONFIG, "f:3: unknown setting")};
    begin();
    td_roles_rules(&all, &report);
    one(TD_ERROR, "unknown setting");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_rules),     cmocka_unit_test(run_dir_rules),
        cmocka_unit_test(key_rules),      cmocka_unit_test(port_rules),
        cmocka_unit_test(unit_rules),     cmocka_unit_test(model_rules),
        cmocka_unit_test(promised_bytes), cmocka_unit_test(lane_rules),
        cmocka_unit_test(lane_answers),   cmocka_unit_test(role_rules),

    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
