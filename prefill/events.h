/* What goes into and comes out of the prefill machine (prefill/sched.h): the whole interface
 * between decisions and the shell that owns sockets, engine, UCX and clock. */
#ifndef TD_PREFILL_EVENTS_H
#define TD_PREFILL_EVENTS_H

#include "common/kv/wire.h"
#include "kernels/engine.h"
#include "proto/msg.h"

/* ---- events ---- */

enum td_prefill_event_kind {
    TD_PREFILL_MESSAGE,      /* router: PREFILL, CANCEL, MOVED; others are ignored */
    TD_PREFILL_ROUTER_DOWN,  /* the control link is lost: everything of it is cancelled */
    TD_PREFILL_STEP_DONE,    /* answer to STEP */
    TD_PREFILL_PACKED,       /* answer to PACK */
    TD_PREFILL_PUT_DONE,     /* answer to PUT */
    TD_PREFILL_PUT_QUIET,    /* after a PUT_DONE with quiet == false: the send slab may be reused */
    TD_PREFILL_PEER_MESSAGE, /* decode: PEER_WELCOME, CREDIT, VERDICT, ABORT, PEER_BEAT */
    TD_PREFILL_PEER_LOST,    /* the data link failed, or CONNECT or SEND_PEER could not be done */
    TD_PREFILL_PEER_CLOSED,  /* answer to CLOSE: every put of this peer is quiet */
    TD_PREFILL_TIMER,        /* td_prefill_deadline() has come; spare ones are harmless */
};

struct td_prefill_event {
    enum td_prefill_event_kind kind;
    uint64_t now_ns;
    union {
        /* MESSAGE. Of a PREFILL the shell passes a copy of the ids and of the guide that lives
         * until FREE_IDS names both; this happens exactly once per PREFILL, also when it is refused
         * or a double. */
        const struct td_msg *msg;
        struct {
            td_status status;              /* not OK: the engine refused or failed this step, */
            const char *text;              /* and why; may be NULL */
            const struct td_token *tokens; /* [n_samples of the STEP] */
            const struct td_selection *selections; /* [n_samples], or NULL: nobody wants them */
        } step;
        struct {
            uint32_t send_slab;
            td_status status;
            uint64_t bytes; /* the blocks lie one after the other from the slab's start */
            const struct td_kv_block_header *headers; /* [n_blocks of the PACK] */
        } packed;
        struct {
            uint32_t send_slab;
            td_status status; /* OK: flushed, visible at the peer */
            bool quiet;       /* false: PUT_QUIET or PEER_CLOSED follows */
        } put;
        struct {            /* PEER_* */
            uint64_t epoch; /* of the decode worker */
            const struct td_msg *msg;
            td_status status; /* LOST */
        } peer;
    };
};

/* ---- actions ---- */

enum td_prefill_action_kind {
    TD_PREFILL_SEND,      /* msg to the router; dropped when there is no link */
    TD_PREFILL_STEP,      /* run the engine; one at a time; answer STEP_DONE */
    TD_PREFILL_CONNECT,   /* open a data link to peer.epoch at peer.address */
    TD_PREFILL_SEND_PEER, /* msg to peer.epoch. In PEER_HELLO the shell fills in what it owns: name,
                           * pid, xfer_address */
    TD_PREFILL_CLOSE,     /* close the data link; answer PEER_CLOSED */
    TD_PREFILL_PACK, /* blocks into a send slab, or at once into the landing slab that is theirs;
                      * answer PACKED */
    TD_PREFILL_PUT,  /* send slab into landing slab, then flush; answer PUT_DONE */
    TD_PREFILL_FREE_IDS, /* the ids and the guide of one PREFILL are not needed any more */
};

struct td_prefill_action {
    enum td_prefill_action_kind kind;
    union {
        struct td_msg msg; /* SEND */
        struct {
            /* All pointers stay valid and unchanged until STEP_DONE. */
            struct td_run run;
            uint32_t n_samples; /* with want_logits: token 0 of each choice; else 0 */
            const struct td_sampling *sampling; /* [n_samples] */
            uint32_t position;                  /* of the sampled tokens: n_prompt */
            uint64_t owner;                     /* a number that no other request ever has */
        } step;
        struct {
            uint64_t epoch;
            const uint8_t *address; /* CONNECT */
            size_t address_len;
            struct td_msg msg; /* SEND_PEER */
        } peer;
        struct {
            uint32_t send_slab;
            struct td_kv_ticket ticket;
            uint32_t n_prompt, first_block, n_blocks;
            /* The sequence's pages from that of first_block on (td_kv_page_of_block). slot_block: the
             * only block is the slot's and `slot` is meant. Both unchanged until PACKED. */
            const uint32_t *pages;
            bool slot_block;
            uint32_t slot;
            uint64_t epoch, remote_address, room; /* of the landing slab, as in `put`; its bytes */
        } pack;
        struct {
            uint64_t epoch;
            uint32_t send_slab, landing_slab;
            uint64_t remote_address; /* the landing slab's, from the WELCOME */
            uint64_t bytes;
            uint64_t deadline_ns;
        } put;
        struct { /* FREE_IDS */
            const int32_t *ids;
            const struct td_guide *guide;
        } lent;
    };
};

#endif
