/* The one typed configuration. Every setting is a row of the table below: key, C type, default,
 * help. A file and `--set key=value` fill it; nothing is read from the environment, so what
 * /v1/cluster and the start-up log show is what runs.
 *
 * File: lines `key = value`; `#` starts a comment; a line `[router]`, `[prefill]` or `[decode]`
 * (or with a name, `[decode@1]`) makes the keys below it hold for that role (instance) alone. */
#ifndef TD_COMMON_BASE_CONFIG_H
#define TD_COMMON_BASE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_CONFIG_STRING_MAX = 256 };

/* X(key, field, kind, default, a, b, help)
 *   kind S: string;  U: uint64 with range a..b;  B: bool (on|off);
 *   kind E: one of the words of `b` (a '|' list), stored as the word's index in it. */
#define TD_CONFIG_MAP(X)                                                                           \
    X("model.dir", model_dir, S, "", 0, 0, "checkpoint folder (config.json, *.safetensors, tokenizer.json)") \
    X("model.name", model_name, S, "", 0, 0, "name clients use; default: last part of model.dir")  \
    X("load_format", load_format, E, 0, 0, "checkpoint|random", "where weights come from; random: made from random.seed, config.json alone is read") \
    X("random.seed", random_seed, U, 1, 0, UINT64_MAX, "of random weights; equal seeds are equal models")  \
    X("random.format", random_format, E, 0, 0, "auto|bf16|fp4|nvfp4", "how random weights are stored; auto: what config.json says") \
    X("random.layers", random_layers, S, "", 0, 0, "compress ratios of a random model's layers, as 0,4,128,4; default: config.json's") \
    X("numerics", numerics, E, 0, 0, "auto|plain|ref", "rounding rules of the forward pass")        \
    X("index_key_dtype", index_key_dtype, E, 0, 0, "bf16|fp32|fp8|fp4", "how indexer keys are stored") \
    X("index_sim4", index_sim4, B, 0, 0, 0, "FP4 rounding of index q and keys before storing")     \
    X("nvfp4_activations", nvfp4_activations, B, 0, 0, 0, "FP4 rounding of what NVFP4 experts multiply, by the checkpoint's input_scale; needs numerics ref") \
    X("score_dtype", score_dtype, E, 0, 0, "fp32|bf16", "index scores")                            \
    X("kv_dtype", kv_dtype, E, 0, 0, "auto|bf16|fp8|fp32", "how window and compressed rows are stored") \
    X("kv_layout", kv_layout, E, 0, 0, "replicate|split", "entries and indexer keys of a worker's ranks: all on each, or shared by position; other bits, so for a pair the same") \
    X("index_topk", index_topk, U, 0, 0, 2048, "entries per query in CSA layers; 0: the checkpoint's") \
    X("force_ref", force_ref, S, "", 0, 0, "ops taken from the reference table: names, or all")     \
    X("max_context", max_context, U, 0, 0, 1048576, "tokens per sequence; 0: the checkpoint's limit") \
    X("max_running", max_running, U, 16, 1, 1024, "sequences with a slot")                         \
    X("pool_pages", pool_pages, U, 0, 0, 1u << 24, "pages of 256 tokens, of 256 x tp with kv_layout = split; 0: what mem_fraction leaves, on the CPU two full contexts' worth") \
    X("mem_fraction", mem_fraction, U, 90, 1, 100, "percent of a GPU's memory that a worker plans with; workers that share a GPU share it") \
    X("eager", eager, B, 0, 0, 0, "launch every kernel of a decode step anew in place of recorded steps (CUDA graphs)") \
    X("reserve_tokens", reserve_tokens, U, 4096, 1, 1048576, "output tokens decode reserves pages for at admission") \
    X("chunk_tokens", chunk_tokens, U, 512, 1, 16384, "most tokens in one engine step")            \
    X("grammar_mask_bytes", grammar_mask_bytes, U, 64u << 20, 1u << 20, 1ull << 36, "a worker's memory for masks of structured output computed before") \
    X("device", device, S, "cpu", 0, 0, "where a worker computes: cpu, cuda:N (its ranks on N and the next ones), or cuda:A,B,... for each rank") \
    X("tp", tp, U, 1, 1, 8, "tensor parallelism: ranks that share a worker's weights, 1, 2, 4 or 8")  \
    X("collective_timeout_ms", collective_timeout_ms, U, 60000, 100, 3600000, "silence of a worker's ranks after which it ends and says who is missing") \
    X("threads", threads, U, 0, 0, 256, "compute threads of a worker, shared by its ranks; 0: one per core") \
    X("slab_bytes", slab_bytes, U, 8u << 20, 65536, 1u << 28, "send and landing slab size; raised to hold a slot") \
    X("send_slabs", send_slabs, U, 2, 1, 64, "send slabs of a prefill worker")                     \
    X("landing_slabs", landing_slabs, U, 2, 1, 64, "landing slabs granted to each prefill peer")   \
    X("max_prefill_peers", max_prefill_peers, U, 4, 1, 64, "prefill workers a decode worker accepts") \
    X("cluster.prefill", cluster_prefill, U, 1, 0, 64, "prefill workers `tandem up` starts")        \
    X("cluster.decode", cluster_decode, U, 1, 1, 64, "decode workers `tandem up` starts")          \
    X("run_dir", run_dir, S, "/run/tandem", 0, 0, "sockets and the router's control address")      \
    X("router.control", router_control, S, "", 0, 0, "address:port of the router for workers of other hosts; needs cluster_key_file") \
    X("cluster_key_file", cluster_key_file, S, "", 0, 0, "secret all processes share when they talk over TCP; mode 0600") \
    X("lane", lane, E, 0, 0, "auto|shm|tcp", "how KV state travels; auto: tcp with router.control, else shared memory") \
    X("lane_device", lane_device, S, "", 0, 0, "network interface of the tcp lane; a private network") \
    X("router.listen", router_listen, S, "127.0.0.1:8000", 0, 0, "HTTP address:port")              \
    X("router.thinking", router_thinking, E, 0, 0, "thinking|chat", "mode when a request names none") \
    X("router.efforts", router_efforts, E, 0, 0, "april|0731", "what reasoning efforts mean: the checkpoint's revision") \
    X("router.colocate", router_colocate, B, 0, 0, 0, "let the decode worker prefill every prompt itself") \
    X("router.max_body", router_max_body, U, 8u << 20, 1024, 1u << 30, "bytes of a request body")  \
    X("router.max_requests", router_max_requests, U, 256, 1, 65536, "requests in flight before 429; n choices count n") \
    X("router.max_topk_requests", router_max_topk_requests, U, 8, 0, 65536, "requests with return_indexer_topk in flight before 429") \
    X("router.api_keys_file", router_api_keys_file, S, "", 0, 0, "keys of clients, a line NAME KEY [requests=N] [per_minute=N] each, mode 0600; SIGHUP reads it again; default: everybody may ask") \
    X("router.cors_origins", router_cors_origins, S, "", 0, 0, "origins whose pages may ask from a browser, separated by commas, or *") \
    X("router.store_bytes", router_store_bytes, U, 256u << 20, 0, 1ull << 40, "memory for responses that /v1/responses keeps, the oldest go first; 0: none are kept") \
    X("router.store_count", router_store_count, U, 10000, 1, 1u << 24, "responses that are kept")   \
    X("router.default_max_tokens", router_default_max_tokens, U, 4096, 1, 1048576, "output limit when a request names none") \
    X("heartbeat_ms", heartbeat_ms, U, 500, 10, 60000, "between heartbeats on every control link") \
    X("peer_timeout_ms", peer_timeout_ms, U, 5000, 50, 600000, "silence after which a peer is lost") \
    X("engine_timeout_ms", engine_timeout_ms, U, 30000, 100, 3600000, "a worker with work whose engine steps do not advance for so long is as good as down") \
    X("lease_ms", lease_ms, U, 10000, 100, 3600000, "an admission without news expires")           \
    X("transfer_timeout_ms", transfer_timeout_ms, U, 10000, 100, 3600000, "one slab's way to decode, and the manifest's answer") \
    X("queue_timeout_ms", queue_timeout_ms, U, 60000, 100, 3600000, "waiting for a pair of workers") \
    X("log_level", log_level, E, 1, 0, "debug|info|warn|error", "least level logged")

struct td_config {
#define TD_CONFIG_FIELD_S(field) char field[TD_CONFIG_STRING_MAX];
#define TD_CONFIG_FIELD_U(field) uint64_t field;
#define TD_CONFIG_FIELD_B(field) bool field;
#define TD_CONFIG_FIELD_E(field) uint32_t field;
#define X(key, field, kind, def, a, b, help) TD_CONFIG_FIELD_##kind(field)
    TD_CONFIG_MAP(X)
#undef X
};

/* Words of the enumerated settings, in the order of the table. */
enum { TD_LOAD_CHECKPOINT, TD_LOAD_RANDOM };
enum { TD_RANDOM_AUTO, TD_RANDOM_AS_BF16, TD_RANDOM_AS_FP4, TD_RANDOM_AS_NVFP4 };
enum { TD_NUMERICS_AUTO, TD_NUMERICS_PLAIN, TD_NUMERICS_REF };
enum { TD_KEY_BF16, TD_KEY_FP32, TD_KEY_FP8, TD_KEY_FP4 };
enum { TD_SCORE_FP32, TD_SCORE_BF16 };
enum { TD_ROW_AUTO, TD_ROW_BF16, TD_ROW_FP8, TD_ROW_FP32 };
enum { TD_LAYOUT_REPLICATE, TD_LAYOUT_SPLIT };
enum { TD_MODE_THINKING, TD_MODE_CHAT };
enum { TD_EFFORT_TABLE_APRIL, TD_EFFORT_TABLE_0731 };
enum { TD_LANE_AUTO, TD_LANE_SHM, TD_LANE_TCP };

void td_config_defaults(struct td_config *c);

/* Reads `path` for the role ("router", "prefill", "decode") and instance ("0"; "" for the router).
 * Unknown keys, bad values and unknown sections are errors that name file and line. */
TD_MUST_USE td_status td_config_load(struct td_config *c, const char *path, const char *role,
                                     const char *instance, struct td_error *err);

/* A line `[NAME]` of a file: for who must know which roles and instances it speaks of. */
struct td_config_section {
    char name[64]; /* "decode", "decode@1" */
    uint32_t line;
};
/* All of them in the file's order, up to `cap`; more are an error. Settings are not read. */
TD_MUST_USE td_status td_config_sections(const char *path, struct td_config_section *ret,
                                         uint32_t cap, uint32_t *ret_n, struct td_error *err);

/* Whether what stands below `[section]` holds for a process, as td_config_load decides it. */
bool td_config_section_holds(const char *section, const char *role, const char *instance);

/* One "key=value". */
TD_MUST_USE td_status td_config_set(struct td_config *c, const char *assignment,
                                    struct td_error *err);

/* Row i of the table as text, for logs and /v1/cluster; false past the last row. `value` must hold
 * TD_CONFIG_STRING_MAX bytes. */
bool td_config_row(const struct td_config *c, size_t i, const char **ret_key, char *value,
                   const char **ret_help);

#endif
