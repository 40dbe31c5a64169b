/* Every message of the cluster as a plain C struct: what machines exchange, what the codec puts on
 * the wire, what the simulator loses and doubles.
 *
 * Two planes share this list. Control: router <-> worker over libuv streams; the workers dial the
 * router. Data: prefill <-> decode over UCX active messages, next to the slabs that are put.
 * Pointers in a received message are borrowed until the handler returns.
 *
 * Identity. A process is its random 64-bit epoch, never its address. A request is (id, attempt):
 * the router draws a new attempt for each pair of workers it tries, and whatever still arrives
 * for an older attempt is dropped. A handoff is a ticket, unique within a decode epoch. An attempt
 * has n choices: sequences of one prompt, each with a seed of its own (td_choice_seed). */
#ifndef TD_PROTO_MSG_H
#define TD_PROTO_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/sampling.h"
#include "common/base/status.h"

enum {
    TD_PROTO_VERSION = 1,
    TD_NAME_MAX = 64,              /* "decode@0" and the like, with the final 0 */
    TD_TEXT_MAX = 400,             /* sentences, with the final 0 */
    TD_FRAME_BYTES_MAX = 16 << 20, /* 1,048,576 ids as varints and a little more */
    TD_MSG_ADDRESS_MAX = 4096,
    TD_RKEY_MAX = 1024,
    TD_LANDING_SLABS_MAX = 64,
    TD_PEER_OWN_MESSAGES = 64, /* greetings and beats that may wait on a data link */
    TD_TOKENS_PER_MSG_MAX = 64,
    TD_KV_FAMILIES_MAX = 8,
    TD_FIRST_TOKENS_MAX = TD_CHOICES_MAX,
};

enum td_role { TD_ROLE_ROUTER = 1, TD_ROLE_PREFILL = 2, TD_ROLE_DECODE = 3 };

struct td_key {       /* of a request, cluster-wide */
    uint64_t request; /* ascending in time: the greatest is the youngest */
    uint32_t attempt;
};

enum td_msg_type {
    /* control */
    TD_MSG_HELLO = 1,       /* worker -> router, first message of a link */
    TD_MSG_HELLO_REPLY = 2, /* router -> worker */
    TD_MSG_HEARTBEAT = 3,   /* both ways, every heartbeat_ms */
    TD_MSG_ADMIT = 4,       /* router -> decode */
    TD_MSG_ADMIT_REPLY = 5, /* decode -> router */
    TD_MSG_KEEP = 6,        /* router -> decode: the admission is still wanted */
    TD_MSG_PREFILL = 7,     /* router -> prefill */
    TD_MSG_TOKENS = 8,      /* worker -> router: token 0 from prefill, the rest from decode */
    TD_MSG_FINISHED = 9,    /* worker -> router: the answer is complete */
    TD_MSG_FAILED = 10,     /* worker -> router: this attempt cannot go on */
    TD_MSG_CANCEL = 11,     /* router -> worker; idempotent */
    TD_MSG_RELEASED = 12,   /* worker -> router: holds nothing for this key, of any choice */
    TD_MSG_LEDGER = 13,     /* worker -> router, with each heartbeat: who owns what */
    TD_MSG_MOVED = 14,      /* decode -> router -> every prefill: dial this address from now on */
    /* data */
    TD_MSG_PEER_HELLO = 32,   /* prefill -> decode */
    TD_MSG_PEER_WELCOME = 33, /* decode -> prefill: landing slabs, or a refusal */
    TD_MSG_PEER_BEAT = 34,    /* both ways */
    TD_MSG_SLAB = 35,         /* prefill -> decode: a slab was put and flushed */
    TD_MSG_CREDIT = 36,       /* decode -> prefill: the slab is free again */
    TD_MSG_MANIFEST = 37,     /* prefill -> decode: the handoff is complete */
    TD_MSG_VERDICT = 38,      /* decode -> prefill: handoff taken, or why not */
    TD_MSG_ABORT = 39,        /* both ways: this ticket is dead; nothing more will be sent for it */
};

/* ---- control ---- */

struct td_msg_hello {
    uint32_t version;
    enum td_role role;
    char name[TD_NAME_MAX];
    uint64_t epoch;
    uint64_t pid;
    uint64_t fingerprint; /* wire layout + model + dtypes */
    uint64_t numerics_id;
    char numerics[TD_TEXT_MAX];
    char model[TD_NAME_MAX];
    uint32_t max_context;        /* prompt + output, tokens */
    uint32_t max_running;        /* sequences */
    uint32_t pages, slots;       /* capacity */
    uint32_t page_tokens;        /* of a page; 0: 256 */
    uint32_t selection_max;      /* entries of one token's selection, all layers together */
    const uint8_t *xfer_address; /* decode: where prefill dials */
    size_t xfer_address_len;
    uint32_t xfer_number; /* counts the addresses that the process has had, from 0 */
    const char *settings; /* effective settings, "key = value\n" lines, for /v1/cluster */
    size_t settings_len;
};

struct td_msg_hello_reply {
    uint32_t version;
    uint64_t epoch; /* the router's */
    td_status status;
    char text[TD_TEXT_MAX]; /* why refused */
};

struct td_msg_heartbeat {
    uint64_t epoch, seq;
    /* from workers: load, for admission and routing */
    uint32_t running, waiting; /* sequences */
    uint64_t queued_tokens;    /* prompt tokens not yet computed */
    uint32_t free_pages, free_slots;
    uint64_t steps; /* engine steps so far: progress */
    bool busy;      /* the engine is in a step or could do one, so `steps` must advance. Not what
                     * waits for a handoff, which has clocks of its own */
};

struct td_msg_admit {
    struct td_key key;
    uint32_t n_prompt;
    uint32_t max_new; /* output limit of each choice, >= 1 */
    uint32_t n;       /* choices, at most TD_CHOICES_MAX; 0 reads as 1 */
    struct td_sampling sampling;
    const int32_t *ids;   /* [n_prompt] when decode shall prefill by itself; else NULL */
    uint64_t prompt_hash; /* td_prompt_hash of the ids: the manifest must show the same */
};

struct td_msg_admit_reply {
    struct td_key key;
    td_status status; /* OK, BUSY (see retry_ms), TOO_LONG, ... */
    char text[TD_TEXT_MAX];
    uint64_t ticket;
    uint32_t lease_ms, retry_ms;
};

struct td_msg_keep {
    struct td_key key;
};

struct td_msg_prefill {
    struct td_key key;
    uint32_t n_prompt, max_new;
    uint32_t n; /* choices, as in ADMIT: so many tokens 0 are sampled */
    struct td_sampling sampling;
    const int32_t *ids; /* [n_prompt] */
    uint64_t ticket;
    uint64_t decode_epoch;
    char decode_name[TD_NAME_MAX];
    const uint8_t *decode_address; /* UCX worker address */
    size_t decode_address_len;
    uint32_t decode_number; /* of the address */
};

struct td_msg_tokens {
    struct td_key key;
    uint32_t index; /* of tokens[0] in the answer; token 0 is the first after the prompt */
    uint32_t n;     /* 1..TD_TOKENS_PER_MSG_MAX */
    const struct td_token *tokens;
    uint32_t choice;                       /* 0..n-1 */
    const struct td_selection *selections; /* [n], or NULL: not wanted */
};

enum td_finish { TD_FINISH_STOP = 1, TD_FINISH_LENGTH = 2 };

struct td_msg_finished {
    struct td_key key;
    enum td_finish reason;
    uint32_t n_tokens; /* of the answer, end-of-text included when it was sampled */
    uint32_t choice;
};

struct td_msg_failed {
    struct td_key key;
    td_status status;
    char text[TD_TEXT_MAX];
    uint32_t only; /* 0: every choice; c + 1: choice c alone, the others go on */
};

struct td_msg_cancel {
    struct td_key key;
    uint32_t only; /* as in FAILED */
};

struct td_msg_released {
    struct td_key key;
    uint64_t queue_ns, compute_ns, transfer_ns; /* where the time went on this worker */
};

struct td_msg_ledger {
    uint32_t pages_free, pages_owned;
    uint32_t pages_shared; /* of the owned ones: held by several choices, counted once */
    uint32_t slots_free, slots_owned;
    uint32_t landing_free, landing_granted, landing_quarantined; /* decode */
    uint32_t send_free, send_busy;                               /* prefill */
    uint64_t handoffs_ok, handoffs_failed, bytes_moved, cancels;
    /* Of bytes_moved: flushed before the prompt's last chunk ended. */
    uint64_t bytes_before_last_chunk;
};

struct td_msg_moved {
    uint64_t epoch; /* of the decode worker, who stays the same */
    const uint8_t *xfer_address;
    size_t xfer_address_len;
    uint32_t xfer_number;
};

/* ---- data ---- */

struct td_msg_peer_hello {
    uint32_t version;
    char name[TD_NAME_MAX];
    uint64_t epoch, pid;   /* the prefill worker's */
    uint64_t decode_epoch; /* whom it means to talk to */
    uint64_t fingerprint, numerics_id;
    const uint8_t *xfer_address; /* for the way back */
    size_t xfer_address_len;
};

struct td_msg_peer_welcome {
    uint64_t epoch;         /* decode's */
    uint64_t prefill_epoch; /* echoed */
    td_status status;
    char text[TD_TEXT_MAX];
    uint64_t slab_bytes;
    uint32_t n_slabs;
    uint64_t slab_address[TD_LANDING_SLABS_MAX];
    const uint8_t *rkey;
    size_t rkey_len;
};

struct td_msg_peer_beat {
    uint64_t epoch, seq;
};

struct td_msg_slab {
    uint64_t epoch; /* the sender's */
    uint64_t ticket;
    uint32_t slab;        /* landing slab index */
    uint32_t first_block; /* index of the first block; n_blocks follow one another */
    uint32_t n_blocks;
    uint64_t bytes; /* wire blocks, one after the other */
};

struct td_msg_credit {
    uint64_t epoch; /* decode's */
    uint64_t ticket;
    uint32_t slab;
    uint32_t first_block; /* with the ticket: which use of the slab ended */
};

struct td_msg_family { /* of a manifest, by enum td_kv_family */
    uint64_t rows, bytes, checksum;
};

struct td_msg_manifest {
    uint64_t epoch, decode_epoch, ticket;
    uint32_t n_prompt, n_blocks;
    uint64_t prompt_hash, fingerprint;
    uint32_t n_families;
    struct td_msg_family family[TD_KV_FAMILIES_MAX];
    uint32_t n_first;
    struct td_token first[TD_FIRST_TOKENS_MAX]; /* [n_first] token 0 of each choice */
    uint64_t seed;
    uint32_t next_position; /* of the next token to sample */
};

struct td_msg_verdict {
    uint64_t epoch, ticket;
    td_status status;
    char text[TD_TEXT_MAX];
};

struct td_msg_abort {
    uint64_t epoch, ticket;
    td_status status;
    char text[TD_TEXT_MAX];
};

struct td_msg {
    enum td_msg_type type;
    union {
        struct td_msg_hello hello;
        struct td_msg_hello_reply hello_reply;
        struct td_msg_heartbeat heartbeat;
        struct td_msg_admit admit;
        struct td_msg_admit_reply admit_reply;
        struct td_msg_keep keep;
        struct td_msg_prefill prefill;
        struct td_msg_tokens tokens;
        struct td_msg_finished finished;
        struct td_msg_failed failed;
        struct td_msg_cancel cancel;
        struct td_msg_released released;
        struct td_msg_ledger ledger;
        struct td_msg_moved moved;
        struct td_msg_peer_hello peer_hello;
        struct td_msg_peer_welcome peer_welcome;
        struct td_msg_peer_beat peer_beat;
        struct td_msg_slab slab;
        struct td_msg_credit credit;
        struct td_msg_manifest manifest;
        struct td_msg_verdict verdict;
        struct td_msg_abort abort;
    };
};

#endif
