/* From messages to turns: neighbouring user messages and results of tools are one turn, results
 * stand in the order of the calls they answer, and what the model does not see again is left out.
 */
#include <stdlib.h>
#include <string.h>

#include "common/text/chat_parts.h"

/* ---- order of results ---- */

struct ranked {
    struct td_chat_text id;
    size_t rank;
};

static int by_id(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    size_t n = x->id.n < y->id.n ? x->id.n : y->id.n;
    int c = n ? memcmp(x->id.p, y->id.p, n) : 0;
    if (c) return c;
    if (x->id.n != y->id.n) return x->id.n < y->id.n ? -1 : 1;
    return 0;
}

/* Equal ids: the last call counts, so it comes first. */
static int by_id_and_rank(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    int c = by_id(a, b);
    return c ? c : x->rank < y->rank ? 1 : x->rank > y->rank ? -1 : 0;
}

static int by_rank(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return x->id.n < y->id.n ? -1 : x->id.n > y->id.n; /* place in the turn, see sort_results */
}

static size_t rank_of(const struct td_chat_text *id, const struct ranked *calls, size_t n) {
    struct ranked key = {.id = *id};
    const struct ranked *hit = id->n ? bsearch(&key, calls, n, sizeof *calls, by_id) : NULL;
    while (hit && hit > calls && by_id(hit - 1, &key) == 0) {
        hit--;
    }
    return hit ? hit->rank : 0;
}

/* Puts the results of messages[at .. at + n) into the order of the calls of `asked`. */
static td_status sort_results(const struct td_chat_message *m, const struct td_chat_message *asked,
                              const struct td_chat_turn *turn, size_t *order,
                              struct td_error *err) {
    size_t results = 0;
    for (size_t i = turn->at; i < turn->at + turn->n; i++) {
        results += m[i].role == TD_CHAT_TOOL;
    }
    if (!asked || results < 2) return TD_OK;
    struct ranked *calls = malloc((asked->n_calls + results) * sizeof *calls);
    if (!calls) return td_fail(err, TD_NO_MEMORY, "prompt: no memory for its turns");
    struct ranked *sorted = calls + asked->n_calls;
    for (size_t i = 0; i < asked->n_calls; i++) {
        calls[i] = (struct ranked){asked->calls[i].id, i};
    }
    qsort(calls, asked->n_calls, sizeof *calls, by_id_and_rank);
    size_t k = 0;
    for (size_t i = turn->at; i < turn->at + turn->n; i++) {
        if (m[i].role != TD_CHAT_TOOL) continue;
        sorted[k].rank = rank_of(&m[i].call_id, calls, asked->n_calls);
        sorted[k++].id = (struct td_chat_text){NULL, i};
    }
    qsort(sorted, results, sizeof *sorted, by_rank);
    k = 0;
    for (size_t i = turn->at; i < turn->at + turn->n; i++) {
        if (m[i].role == TD_CHAT_TOOL) order[i] = sorted[k++].id.n;
    }
    free(calls);
    return TD_OK;
}

/* ---- turns ---- */

static bool is_users(enum td_chat_role role) {
    return role == TD_CHAT_USER || role == TD_CHAT_TOOL;
}

static td_status merge(const struct td_chat_message *m, size_t n, struct td_chat_turns *t,
                       struct td_error *err) {
    const struct td_chat_message *asked = NULL; /* the latest calls */
    for (size_t i = 0; i < n;) {
        struct td_chat_turn *turn = &t->turns[t->n++];
        *turn = (struct td_chat_turn){is_users(m[i].role) ? TD_CHAT_USER : m[i].role, i, 1};
        while (turn->role == TD_CHAT_USER && i + turn->n < n && is_users(m[i + turn->n].role)) {
            turn->n++;
        }
        if (turn->role == TD_CHAT_USER) TD_TRY(sort_results(m, asked, turn, t->order, err));
        if (turn->role == TD_CHAT_ASSISTANT && m[i].n_calls) asked = &m[i];
        i += turn->n;
    }
    return TD_OK;
}

static size_t find_last_user(const struct td_chat_turns *t) {
    for (size_t i = t->n; i-- > 0;) {
        enum td_chat_role role = t->turns[i].role;
        if (role == TD_CHAT_USER || role == TD_CHAT_DEVELOPER) return i;
    }
    return SIZE_MAX;
}

/* Developers before the last question go with the reasoning of their answers. */
static void drop_developers(struct td_chat_turns *t) {
    size_t kept = 0, last = t->last_user;
    if (last == SIZE_MAX) return;
    for (size_t i = 0; i < t->n; i++) {
        if (i < last && t->turns[i].role == TD_CHAT_DEVELOPER) continue;
        t->turns[kept++] = t->turns[i];
    }
    t->n = kept;
    t->last_user = find_last_user(t);
}

static td_status check(const struct td_chat_message *m, size_t n, bool *ret_tools,
                       struct td_error *err) {
    *ret_tools = false;
    for (size_t i = 0; i < n; i++) {
        if ((unsigned)m[i].role > TD_CHAT_REMINDER) {
            return td_fail(err, TD_INVALID, "message %zu: expected a role of 0..%d, found %d", i,
                           TD_CHAT_REMINDER, (int)m[i].role);
        }
        if (m[i].role == TD_CHAT_DEVELOPER && m[i].content_n == 0) {
            return td_fail(err, TD_INVALID,
                           "message %zu: expected content in a developer's message, found none", i);
        }
        bool may = m[i].role == TD_CHAT_SYSTEM || m[i].role == TD_CHAT_DEVELOPER;
        if (may && m[i].n_tools) *ret_tools = true;
    }
    return TD_OK;
}

td_status td_chat_turns_make(const struct td_chat_params *p, const struct td_chat_message *m,
                             size_t n, struct td_chat_turns *ret, struct td_error *err) {
    bool tools;
    TD_TRY(check(m, n, &tools, err));
    struct td_chat_turns t = {
        .turns = malloc(n * sizeof *t.turns),
        .order = malloc(n * sizeof *t.order),
        .drop = p->thinking && !p->keep_reasoning && !tools,
    };
    td_status st = TD_OK;
    if (!t.turns || !t.order) {
        st = td_fail(err, TD_NO_MEMORY, "prompt: no memory for its turns");
    } else {
        for (size_t i = 0; i < n; i++) {
            t.order[i] = i;
        }
        st = merge(m, n, &t, err);
    }
    if (st != TD_OK) {
        td_chat_turns_free(&t);
        return st;
    }
    t.last_user = find_last_user(&t);
    if (t.drop) drop_developers(&t);
    *ret = t;
    return TD_OK;
}

void td_chat_turns_free(struct td_chat_turns *t) {
    free(t->turns);
    free(t->order);
}
