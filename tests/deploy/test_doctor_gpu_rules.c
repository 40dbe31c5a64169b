/* The rules of `tandem doctor` about GPUs, both ways: a sound machine of two gives no more than
 * "ok" and "skipped", and each fact spoiled alone gives its one verdict and sentence, with a cure.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/tool/doctor_gpu.h"

#define GB 1000000000ull

static struct td_report report;
static const struct td_gpu_probe probe = {.built_for = "sm_90a sm_120a"};

static struct td_error sentence(td_status st, const char *text) {
    struct td_error e;
    (void)!td_fail(&e, st, "%s", text);
    return e;
}

static struct td_machine good(void) {
    struct td_machine m = {.probe = &probe,
                           .bytes = 64 << 20,
                           .times = 8,
                           .limit_ms = 30000,
                           .needed = true,
                           .timed = true,
                           .counted.end.how = TD_APART_DONE,
                           .nvml_asked.end.how = TD_APART_DONE,
                           .reduced.end.how = TD_APART_DONE,
                           .count = 2,
                           .n = 2,
                           .pairs = 1,
                           .ranks = 2,
                           .rank = {0, 1},
                           .reduce = {.stage = "done", .version = 22803}};
    for (uint32_t i = 0; i < 2; i++)
        m.gpu[i] = (struct td_gpu_facts){
            .index = i,
            .stage = "done",
            .opened.end.how = TD_APART_DONE,
            .timed.end.how = TD_APART_DONE,
            .seen = {.name = "RTX",
                     .bus = "0000:41:00.0",
                     .major = 12,
                     .bytes = 96 * GB,
                     .free = 95 * GB},
            .built = 120,
            .host = {.rate = {52, 53}},
            .generation_busy = 5,
            .nvml = {.there = true,
                     .persistence = 1,
                     .ecc = 1,
                     .ecc_pending = 1,
                     .power = 600,
                     .power_default = 600,
                     .power_max = 600,
                     .throttle = 1,
                     .generation = 1,
                     .generation_max = 5,
                     .lanes = 16,
                     .lanes_max = 16,
                     .clock = 300,
                     .clock_max = 2600},
            .pci = {.there = true, .node = 0, .near_cores = 8, .group = 3, .domain = "identity"},
            .planned = 80 * GB};
    m.pair[0] =
        (struct td_pair_facts){.a = 0,
                               .b = 1,
                               .asked.end.how = TD_APART_DONE,
                               .pair = {.peer = {true, true}, .rate = {50, 49}, .both = 95}};
    return m;
}

static void judge(const struct td_machine *m, enum td_verdict v, const char *words) {
    const struct td_diagnosis *f = NULL;
    memset(&report, 0, sizeof report);
    td_machine_rules(m, &report);
    for (uint32_t i = 0; i < report.n; i++) {
        const struct td_diagnosis *x = &report.finding[i];
        if (x->verdict <= TD_SKIPPED) continue;
        if (f) fail_msg("two findings: %s; and: %s", f->text, x->text);
        f = x;
    }
    if (v == TD_FINE) {
        if (f) fail_msg("expected nothing wrong, found: %s", f->text);
        return;
    }
    if (!f) fail_msg("expected \"%s\", found nothing wrong", words);
    if (f->verdict != v || !strstr(f->text, words))
        fail_msg("expected \"%s\", found: %d %s", words, f->verdict, f->text);
    if (!f->cure[0]) fail_msg("no cure: %s", f->text);
}

static bool said(enum td_verdict v, const char *words) {
    for (uint32_t i = 0; i < report.n; i++)
        if (report.finding[i].verdict == v && strstr(report.finding[i].text, words)) return true;
    return false;
}

#define GPU(change, verdict, words)                                                                \
    do {                                                                                           \
        struct td_machine m = good();                                                              \
        struct td_gpu_facts *g = &m.gpu[1];                                                        \
        struct td_nvml_facts *n = &g->nvml;                                                        \
        struct td_gpu_pair *p = &m.pair[0].pair;                                                   \
        (void)g, (void)n, (void)p;                                                                 \
        change;                                                                                    \
        judge(&m, verdict, words);                                                                 \
    } while (0)

static void whole_machine(void **state) {
    (void)state;
    GPU(, TD_FINE, "");
    GPU(m.counted.err = sentence(TD_CONFIG, "no GPU can be used"), TD_ERROR, "no GPU can be used");
    GPU(m.counted.err = sentence(TD_CONFIG, "no GPU"); m.needed = false, TD_FINE, "");
    GPU(m.counted.end.how = TD_APART_LATE; m.needed = false, TD_ERROR, "did not end within 30 s");
    GPU(m.nvml = sentence(TD_NOT_FOUND, "libnvidia-ml.so.1: none"), TD_FINE, "");
    GPU(m.nvml_asked.end.how = TD_APART_LATE, TD_ERROR, "NVML");
    GPU(m.timed = false; p->copied[0] = 1; m.reduce.wrong = 1, TD_FINE, "");
    assert_true(said(TD_SKIPPED, "--still"));
}

static void opening(void **state) {
    (void)state;
    GPU(g->opened.end.how = TD_APART_LATE; snprintf(g->stage, 40, "loading kernels"), TD_ERROR,
                                           "cuda:1 RTX: loading kernels did not end within 30 s");
    GPU(g->opened.end = ((struct td_apart_end){TD_APART_LATE, 0, true}), TD_ERROR,
        "cannot be killed");
    GPU(g->opened.end = ((struct td_apart_end){TD_APART_DIED, 11, false}), TD_ERROR, "signal 11");
    GPU(g->opened.end = ((struct td_apart_end){TD_APART_NEVER, 0, false}), TD_ERROR,
        "could not be begun");
    GPU(g->opened.err = sentence(TD_NO_KERNEL, "no image"), TD_ERROR,
        "no kernels for compute capability 12.0, only sm_90a sm_120a");
    GPU(g->opened.err = sentence(TD_IO, "cuda:1: unspecified"), TD_ERROR, "unspecified");
    GPU(g->wrong = 3, TD_ERROR, "a kernel gave 3 wrong values");
    /* What cannot be opened has no pairs, and its health is told all the same. */
    GPU(g->wrong = 3, TD_ERROR, "wrong");
    assert_true(said(TD_SKIPPED, "one of them does not work"));
}

static void memory(void **state) {
    (void)state;
    GPU(g->planned = 96 * GB, TD_ERROR, "will take 96.00 GB, 95.00 GB of 96.00 are free");
    GPU(g->planned = 96 * GB; m.running = true, TD_FINE, "");
    GPU(n->others = 2; n->other[0] = 77; n->other[1] = 78, TD_WARNING, "2 other processes");
    assert_true(said(TD_WARNING, " 77 78"));
}

static void health(void **state) {
    (void)state;
    GPU(n->ecc_volatile = 2, TD_ERROR, "2 uncorrected errors");
    GPU(n->rows_failed = 1, TD_ERROR, "a row could not be remapped");
    GPU(n->pages_pending = 1, TD_WARNING, "waits for a reset");
    GPU(n->ecc_ever = 5, TD_WARNING, "5 uncorrected memory errors so far");
    GPU(n->ecc = n->ecc_pending = 0, TD_WARNING, "ECC is off");
    GPU(n->ecc_pending = 0, TD_WARNING, "and off after a reboot");
    GPU(n->ecc = 0, TD_WARNING, "and on after a reboot");
    GPU(n->ecc = n->ecc_pending = -1;
        n->ecc_volatile = n->ecc_ever = n->pages_pending = -1, TD_FINE, "");
    GPU(n->throttle = 0x08, TD_WARNING, "hardware slowdown");
    GPU(n->throttle = 0x20, TD_WARNING, "heat");
    GPU(n->throttle = 0x40, TD_WARNING, "heat");
    GPU(n->throttle = 0x80, TD_WARNING, "brake");
    GPU(n->throttle = 0x01 | 0x02 | 0x04, TD_FINE, "");
    GPU(n->throttle = -1, TD_FINE, "");
    GPU(n->power = 539, TD_WARNING, "capped at 539 W of 600");
    GPU(n->power = 540, TD_FINE, "");
    GPU(n->persistence = 0, TD_WARNING, "persistence");
    GPU(n->persistence = -1, TD_FINE, "");
    GPU(n->compute_mode = 2, TD_ERROR, "prohibits");
    GPU(n->compute_mode = 3, TD_WARNING, "one process");
    GPU(n->mig = 1, TD_WARNING, "MIG");
    GPU(n->there = false; n->persistence = n->ecc = 0; n->ecc_volatile = 9, TD_FINE, "");
}

static void links(void **state) {
    (void)state;
    GPU(n->lanes = 8; g->host.rate[0] = g->host.rate[1] = 26;
        p->rate[0] = p->rate[1] = 26, TD_WARNING, "PCIe x8, it can x16");
    GPU(g->generation_busy = 4;
        g->host.rate[0] = g->host.rate[1] = 26, TD_WARNING, "generation 4 under load, it can 5");
    GPU(g->generation_busy = -1, TD_FINE, ""); /* idle links rest at generation 1 */
    GPU(g->host.rate[0] = 37, TD_WARNING, "less than 60 %");
    GPU(g->host.rate[1] = 37, TD_WARNING, "less than 60 %");
    GPU(g->host.rate[0] = 38.5, TD_FINE, "");
    GPU(g->host.rate[0] = 1; n->there = false, TD_FINE, "");
    /* Without NVML /sys knows the link. */
    GPU(n->there = false; g->pci.lanes = g->pci.lanes_max = 16; g->pci.generation_max = 5;
        g->host.rate[0] = 37, TD_WARNING, "less than 60 %");
    GPU(n->there = false; g->pci.lanes = 4; g->pci.lanes_max = 16, TD_WARNING, "PCIe x4");
    GPU(n->there = false;
        g->pci.generation_max = 6, TD_WARNING, "generation 5 under load, it can 6");
    GPU(g->host.wrong = 4, TD_ERROR, "4 of 16777216 words came back wrong");
    GPU(g->timed.end.how = TD_APART_LATE, TD_ERROR, "pinned memory did not end");
    GPU(g->timed.err = sentence(TD_IO, "copying: fault"), TD_ERROR, "fault");
    GPU(g->pci.near_cores = 0; g->pci.node = 1, TD_WARNING, "of NUMA node 1");
    GPU(g->pci.near_cores = -1, TD_FINE, "");
    assert_true(td_pcie_rate(5, 16) > 62 && td_pcie_rate(5, 16) < 64);
    assert_true(td_pcie_rate(-1, 16) == 0 && td_pcie_rate(4, -1) == 0 && td_pcie_rate(9, 16) == 0);
}

static void pairs(void **state) {
    (void)state;
    for (int way = 0; way < 2; way++) {
        GPU(p->copied[way] = 7, TD_ERROR, "7 copied, 0 stored by kernels, 0 loaded");
        GPU(p->stored[way] = 7, TD_ERROR, "0 copied, 7 stored");
        GPU(p->loaded[way] = 7, TD_ERROR, "7 loaded");
        assert_true(strstr(report.finding[report.n - 2].cure, "iommu=pt") != NULL);
        GPU(p->rate[way] = 30, TD_WARNING, way ? "less than half" : "less than half");
    }
    GPU(m.pair[0].asked.end.how = TD_APART_LATE, TD_ERROR, "copying between them did not end");
    GPU(m.pair[0].asked.end = ((struct td_apart_end){TD_APART_DIED, 7, false}), TD_ERROR,
        "signal 7");
    GPU(m.pair[0].asked.err = sentence(TD_IO, "illegal address"), TD_ERROR, "illegal address");
    GPU(p->rate[0] = 33; p->rate[1] = 48, TD_WARNING, "one way much slower");
    GPU(p->rate[0] = 34; p->rate[1] = 48, TD_FINE, "");
    GPU(p->rate[0] = 1; n->there = false, TD_FINE, ""); /* of links that nobody knows */
    GPU(p->peer[0] = p->peer[1] = false; p->rate[0] = p->rate[1] = 12;
        m.pair[0].p2p = 4, TD_WARNING, "no P2P (it is switched off in the driver)");
    assert_true(said(TD_FINE, "through the host"));
    GPU(p->peer[1] = false; m.pair[0].p2p = -1, TD_WARNING, "no P2P one way");
}

static void iommu(void **state) {
    (void)state;
    GPU(snprintf(g->pci.domain, 16, "DMA-FQ"), TD_WARNING, "the IOMMU translates");
    GPU(g->pci.redirecting = 2, TD_WARNING, "ACS above 1 of 2 GPUs");
    GPU(g->pci.redirecting = -1, TD_FINE, "");
    assert_true(said(TD_SKIPPED, "by root only"));
    GPU(m.n = 1; m.pairs = 0; snprintf(g->pci.domain, 16, "DMA");
        g->pci.redirecting = 2, TD_FINE, "");
}

static void sums(void **state) {
    (void)state;
    GPU(m.reduced.end.how = TD_APART_LATE;
        snprintf(m.reduce.stage, 40, "summing over the ranks"), TD_ERROR,
        "NCCL 2.28.3: summing over the ranks with 2 ranks did not end");
    GPU(m.reduced.err = sentence(TD_NOT_FOUND, "libnccl.so.2: none"), TD_WARNING, "libnccl.so.2");
    GPU(m.reduced.err = sentence(TD_NOT_FOUND, "libnccl.so.2: none"); m.ranks = 1, TD_FINE, "");
    GPU(m.reduced.err = sentence(TD_IO, "unhandled"), TD_ERROR, "unhandled");
    GPU(m.reduce.wrong = 1, TD_ERROR, "1 wrong values in a sum over 2 ranks");
}

/* ---- /sys ---- */

static void put(const char *root, const char *path, const char *text) {
    char at[500];
    snprintf(at, sizeof at, "%s/%s", root, path);
    for (char *c = at + strlen(root) + 1; (c = strchr(c, '/')); c++) {
        *c = 0;
        (void)mkdir(at, 0700);
        *c = '/';
    }
    FILE *f = fopen(at, "we");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* A configuration space with ACS as the second extended capability. */
static size_t with_acs(uint8_t *c, unsigned control) {
    memset(c, 0, 4096);
    c[0x100] = 1; /* AER at 0x100, the next at 0x148 */
    c[0x102] = 0x81;
    c[0x103] = 0x14;
    c[0x148] = 13;
    c[0x14a] = 1;
    c[0x14e] = (uint8_t)control;
    return 4096;
}

static void acs(void **state) {
    (void)state;
    uint8_t c[4096];
    assert_int_equal(td_acs_redirects(c, with_acs(c, 0x1d)), 1);
    assert_int_equal(td_acs_redirects(c, with_acs(c, 0x04)), 1);
    assert_int_equal(td_acs_redirects(c, with_acs(c, 0x08)), 1);
    assert_int_equal(td_acs_redirects(c, with_acs(c, 0x11)), 0); /* validation, upstream only */
    assert_int_equal(td_acs_redirects(c, 256), -1); /* what others than root may read */
    c[0x148] = 11;
    assert_int_equal(td_acs_redirects(c, 4096), 0); /* none */
    c[0x14b] = 0x10;                                /* a list that goes round */
    assert_int_equal(td_acs_redirects(c, 4096), 0);
}

static void sysfs(void **state) {
    (void)state;
    char root[] = "/tmp/tandem-doctor-XXXXXX", link[400], command[100];
    assert_non_null(mkdtemp(root));
    const char *gpu = "sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0";
    char path[260];
    snprintf(path, sizeof path, "%s/numa_node", gpu);
    put(root, path, "0\n");
    static const char *const link_text[][2] = {{"current_link_speed", "2.5 GT/s PCIe\n"},
                                               {"max_link_speed", "32.0 GT/s PCIe\n"},
                                               {"current_link_width", "8\n"},
                                               {"max_link_width", "16\n"}};
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", gpu, link_text[i][0]);
        put(root, path, link_text[i][1]);
    }
    snprintf(path, sizeof path, "%s/local_cpulist", gpu);
    put(root, path, "0-63,128-191\n");
    put(root, "sys/kernel/iommu_groups/31/type", "DMA-FQ\n");
    put(root, "sys/kernel/iommu_groups/7/type", "identity\n");
    put(root, "sys/bus/pci/devices/x", "");
    put(root, "proc/cmdline", "root=/dev/sda iommu=pt quiet amd_iommu=on iommuX=1\n");
    put(root, "proc/cpuinfo", "flags\t\t: fpu hypervisor avx\n");
    snprintf(path, sizeof path, "%s/%s", root, gpu);
    snprintf(link, sizeof link, "%s/sys/bus/pci/devices/0000:41:00.0", root);
    assert_int_equal(symlink(path, link), 0);
    snprintf(link, sizeof link, "%s/iommu_group", path);
    snprintf(path, sizeof path, "%s/sys/kernel/iommu_groups/31", root);
    assert_int_equal(symlink(path, link), 0);

    uint8_t c[4096];
    snprintf(path, sizeof path, "%s/sys/devices/pci0000:40/0000:40:01.0/config", root);
    FILE *f = fopen(path, "we");
    fwrite(c, 1, with_acs(c, 0x0c), f);
    fclose(f);

    struct td_pci_facts p;
    td_pci_look(root, "00000000:41:00.0", &p);
    assert_true(p.there);
    assert_int_equal(p.node, 0);
    assert_true(p.near_cores > 0);
    assert_int_equal(p.group, 31);
    assert_string_equal(p.domain, "DMA-FQ");
    assert_int_equal(p.bridges, 1);
    assert_int_equal(p.redirecting, 1);
    assert_int_equal(p.generation_max, 5);
    assert_int_equal(p.lanes, 8);
    assert_int_equal(p.lanes_max, 16);
    assert_int_equal(td_pci_generation(root, "0000:41:00.0"), 1);
    assert_int_equal(td_pci_generation(root, "0000:99:00.0"), -1);
    td_pci_look(root, "0000:99:00.0", &p);
    assert_false(p.there);
    assert_int_equal(p.node, -1);

    struct td_iommu_facts i;
    td_iommu_look(root, &i);
    assert_int_equal(i.groups, 2);
    assert_string_equal(i.words, "iommu=pt amd_iommu=on");
    assert_true(i.guest);
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_machine), cmocka_unit_test(opening), cmocka_unit_test(memory),
        cmocka_unit_test(health),        cmocka_unit_test(links),   cmocka_unit_test(pairs),
        cmocka_unit_test(iommu),         cmocka_unit_test(sums),    cmocka_unit_test(acs),
        cmocka_unit_test(sysfs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
