/* See topk_json.h. */
#include "router/topk_json.h"

#include "common/kv/layout.h"

enum { ENTRY_TOKENS = TD_KV_PAGE_TOKENS / TD_KV_CSA_PER_PAGE };

uint64_t td_topk_token_bytes(uint32_t entries) {
    enum {
        TOKEN = 56, /* {"token_index":,"position":,"layers":[]}, and two numbers */
        LAYER = 40, /* {"layer":,"entries":[],"ranges":[]}, and a number */
        ENTRY = 26, /* its number, and a range of its own, with commas and brackets */
    };
    uint32_t layers = entries < TD_SELECTION_LAYERS_MAX ? entries : TD_SELECTION_LAYERS_MAX;
    return TOKEN + (uint64_t)layers * LAYER + (uint64_t)entries * ENTRY;
}

void td_topk_free(struct td_topk_json *t) {
    td_json_out_free(&t->ready);
    td_json_out_free(&t->held);
}

/* Entries that follow each other cover one range. */
static void ranges(struct td_json_out *w, const uint32_t *entry, uint32_t n) {
    td_json_open(w, '[');
    for (uint32_t i = 0; i < n;) {
        uint32_t first = i++;
        while (i < n && entry[i] == entry[i - 1] + 1)
            i++;
        td_json_open(w, '[');
        td_json_u64(w, (uint64_t)entry[first] * ENTRY_TOKENS);
        td_json_u64(w, (uint64_t)entry[i - 1] * ENTRY_TOKENS + ENTRY_TOKENS - 1);
        td_json_close(w, ']');
    }
    td_json_close(w, ']');
}

static void layer(struct td_json_out *w, uint32_t number, const uint32_t *entry, uint32_t n) {
    td_json_open(w, '{');
    td_json_key(w, "layer");
    td_json_u64(w, number);
    td_json_key(w, "entries");
    td_json_open(w, '[');
    for (uint32_t i = 0; i < n; i++)
        td_json_u64(w, entry[i]);
    td_json_close(w, ']');
    td_json_key(w, "ranges");
    ranges(w, entry, n);
    td_json_close(w, '}');
}

static void token(struct td_json_out *w, uint32_t index, uint32_t n_prompt,
                  const struct td_selection *s) {
    td_json_open(w, '{');
    td_json_key(w, "token_index");
    td_json_u64(w, index);
    td_json_key(w, "position");
    td_json_u64(w, (uint64_t)n_prompt + index - 1);
    td_json_key(w, "layers");
    td_json_open(w, '[');
    for (uint32_t l = 0, at = 0; l < s->n_layers; at += s->count[l++])
        layer(w, s->layer[l], s->entry + at, s->count[l]);
    td_json_close(w, ']');
    td_json_close(w, '}');
}

void td_topk_add(struct td_topk_json *t, const struct td_selection *s) {
    if (s != NULL) {
        token(&t->ready, t->next, t->n_prompt, s);
    } else if (t->held.n > 0) {
        td_json_value(&t->ready, t->held.p, t->held.n);
        t->ready.failed |= t->held.failed;
        td_json_out_reset(&t->held);
    }
    t->next++;
}

void td_topk_hold(struct td_topk_json *t, bool first, uint32_t index,
                  const struct td_selection *s) {
    if (first) td_json_out_reset(&t->held);
    token(&t->held, index, t->n_prompt, s);
}

void td_topk_write(struct td_topk_json *t, struct td_json_out *w) {
    td_json_key(w, "tandem");
    td_json_open(w, '{');
    td_json_key(w, "indexer_topk");
    td_json_open(w, '[');
    td_json_raw(w, t->ready.p, t->ready.n);
    td_json_close(w, ']');
    td_json_close(w, '}');
    w->failed |= t->ready.failed;
    td_json_out_reset(&t->ready);
}
