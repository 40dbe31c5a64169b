/* What goes into and comes out of the decode machine (decode/sched.h): the whole interface between
 * decisions and the shell that owns sockets, engine, UCX and clock. */
#ifndef TD_DECODE_EVENTS_H
#define TD_DECODE_EVENTS_H

#include "common/kv/wire.h"
#include "kernels/engine.h"
#include "proto/msg.h"

/* A data link as the shell numbers it: from 1, never reused in the process's life. */
typedef uint64_t td_link_id;

/* ---- events ---- */

enum td_decode_event_kind {
    TD_DECODE_MESSAGE,      /* router: ADMIT, KEEP, CANCEL; others are ignored */
    TD_DECODE_ROUTER_DOWN,  /* the control link is lost: everything of it is cancelled */
    TD_DECODE_STEP_DONE,    /* answer to STEP */
    TD_DECODE_UNPACKED,     /* answer to UNPACK */
    TD_DECODE_COPY_FAILED,  /* answer to a COPY that could not be done */
    TD_DECODE_PEER_MESSAGE, /* prefill: PEER_HELLO, SLAB, MANIFEST, ABORT, PEER_BEAT */
    TD_DECODE_PEER_LOST,    /* the link failed or was closed: nothing more comes from it, but its
                             * process may still write into its landing slabs */
    TD_DECODE_PEER_EXITED,  /* the process of a link is proven dead (pidfd): its writes are over */
    TD_DECODE_PEER_QUIET,   /* tcp lane: the link of a lost peer is closed here, so nothing of it
                               writes */
    TD_DECODE_TIMER,        /* td_decode_deadline() has come; spare ones are harmless */
};

struct td_decode_event {
    enum td_decode_event_kind kind;
    uint64_t now_ns;
    union {
        /* MESSAGE. Of an ADMIT with ids or a guide the shell passes copies of them that live until
         * FREE_IDS and FREE_GUIDE name them; exactly once, also when it is refused or a double. */
        const struct td_msg *msg;
        struct {
            td_status status;              /* not OK: the whole step failed, */
            const char *text;              /* and why; may be NULL */
            const struct td_token *tokens; /* [n_samples of the STEP] */
            /* [n_samples], meaningful where the sampling wants them; NULL: none does */
            const struct td_selection *selections;
            /* [n_samples] OK, or why this sequence alone has no token; NULL: all have */
            const struct td_error *failed;
        } step;
        struct {
            uint32_t landing_slab;
            td_status status; /* CORRUPT, STALE, ...: nothing of it counts */
            char text[TD_TEXT_MAX];
            const struct td_kv_block_header *headers; /* [n_blocks] as verified; NULL unless OK */
        } unpacked;
        struct {
            uint32_t to_slot;
            td_status status;
            const char *text;
        } copy;
        struct { /* PEER_* */
            td_link_id link;
            const struct td_msg *msg;
        } peer;
    };
};

/* ---- actions ---- */

/* One sampling of a step. The choices of one request sample their first token from one run. */
struct td_decode_sample {
    const struct td_sampling *sampling;
    uint32_t position; /* absolute, of the sampled token */
    uint32_t row;      /* whose logits: number of the run among those that want them; ascending */
    uint32_t slot;     /* the sequence's, */
    uint64_t owner;    /* and a number that no other one ever has */
    int32_t fed;       /* the token of the answer that the run feeds; -1: it feeds the prompt */
};

enum td_decode_action_kind {
    TD_DECODE_SEND,       /* msg to the router; dropped when there is no link */
    TD_DECODE_STEP,       /* run the engine and sample; one at a time; answer STEP_DONE */
    TD_DECODE_SEND_PEER,  /* msg on peer.link. In a PEER_WELCOME with status OK the shell fills in
                           * slab_address (of landing slabs peer.first_slab ...), rkey */
    TD_DECODE_CLOSE,      /* close peer.link; answer PEER_LOST (spare ones are harmless) */
    TD_DECODE_UNPACK,     /* verify and copy blocks of a landing slab; answer UNPACKED */
    TD_DECODE_COPY,       /* KV state for another choice; done before any later action */
    TD_DECODE_FREE_IDS,   /* the ids of one ADMIT are not needed any more */
    TD_DECODE_FREE_GUIDE, /* the same of its guide */
};

struct td_decode_action {
    enum td_decode_action_kind kind;
    union {
        struct td_msg msg; /* SEND */
        struct {
            /* Arrays of the machine, unchanged until STEP_DONE. */
            const struct td_run *runs; /* [n_runs] */
            uint32_t n_runs;
            const struct td_decode_sample *samples; /* [n_samples], one or more for every run with
                                                     * want_logits */
            uint32_t n_samples;
        } step;
        struct {
            td_link_id link;
            uint32_t first_slab; /* WELCOME: landing slabs are numbered over all peers */
            struct td_msg msg;
        } peer;
        struct {
            uint32_t landing_slab; /* over all peers */
            uint64_t bytes;
            struct td_kv_ticket ticket;
            uint32_t n_prompt, first_block, n_blocks;
            /* The sequence's pages from that of first_block on (td_kv_page_of_block); when the slot's
             * block is the last of these (index == page blocks of n_prompt) it goes to `slot`.
             * Unchanged until UNPACKED. */
            const uint32_t *pages;
            uint32_t slot;
        } unpack;
        struct {
            uint32_t from_slot, to_slot;
            bool page; /* the prompt's last page is not full: */
            uint32_t from_page, to_page;
        } copy;
        const int32_t *ids; /* FREE_IDS */
        const struct td_guide *guide;
    };
};

#endif
