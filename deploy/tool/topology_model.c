/* The model of a configuration against its workers: whether the planner takes their settings, ranks
 * included, and whether what it plans fits (topology_check.h). */
#include <string.h>

#include "deploy/tool/plan_worker.h"
#include "deploy/tool/topology_check.h"
#include "kernels/device.h"

static const double LARGEST = 4096e9; /* more than a card has */

/* Of the worker's first GPU, or 0. */
static double memory_of(const struct td_check *c, const struct td_topology_worker *w) {
    const struct td_backend *b = td_worker_plan_cuda();
    struct td_error ignored;
    uint64_t bytes, left;
    if (c->gpu_memory != 0) return c->gpu_memory;
    if (!b->memory || b->memory(w->gpu[0], &bytes, &left, &ignored) != TD_OK) return 0;
    return (double)bytes;
}

/* Whether the plan was compared with a card. */
static bool fits(struct td_check *c, const struct td_topology_worker *w,
                 const struct td_model_config *m, enum td_outline format) {
    struct td_worker_plan p;
    struct td_error err;
    double memory = w->gpus ? memory_of(c, w) : 0;
    bool known = !w->gpus || memory != 0;
    if (!known) memory = LARGEST; /* settings are checked all the same */
    const struct td_plan_asked asked = {.config = &w->config,
                                        .model = m,
                                        .format = format,
                                        .prefill = w->prefill,
                                        .ranks = w->ranks,
                                        .memory = (uint64_t)memory};
    if (td_plan_worker(&asked, &p, &err) != TD_OK)
        td_check_say(c, TD_FINDING_ERROR, w->name, "%s", err.text);
    return known;
}

/* The units' ProtectHome= hides these, whatever the modes of files say. */
static void hidden(struct td_check *c, const char *dir) {
    static const char *const hides[] = {"/home/", "/root/", "/run/user/"};
    for (size_t i = 0; i < sizeof hides / sizeof hides[0]; i++)
        if (strncmp(dir, hides[i], strlen(hides[i])) == 0)
            td_check_say(c, TD_FINDING_WARNING, "",
                         "model.dir: %s is hidden from the systemd units (ProtectHome): move it to "
                         "/var/lib/tandem, for example; `tandem up` is not concerned",
                         dir);
}

void td_check_model(struct td_check *c) {
    const struct td_topology *t = c->t;
    struct td_model_config m;
    enum td_outline format;
    struct td_error err;
    hidden(c, t->router.model_dir);
    if (t->workers == 0) return;
    if (td_model_config_from(&t->worker[0].config, &m, &format, &err) != TD_OK) {
        td_check_say(c, TD_FINDING_ERROR, "", "%s: name the checkpoint's folder in model.dir",
                     err.text);
        return;
    }
    bool compared = true;
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        if (w->ranks & (w->ranks - 1)) continue; /* told where devices are */
        compared &= fits(c, w, &m, format);
    }
    if (!compared)
        td_check_say(c, TD_FINDING_NOTE, "",
                     "whether the memory plans fit was not checked, since there is no GPU here to "
                     "ask: give --memory GB of one card, 96 for an RTX PRO 6000");
}
