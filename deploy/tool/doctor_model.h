/* The checkpoint folder as the roles need it: config.json, every shard with the bytes its own
 * header promises, index and shards in agreement, the tokenizer. Headers only: no weight is read.
 */
#ifndef TD_DEPLOY_TOOL_DOCTOR_MODEL_H
#define TD_DEPLOY_TOOL_DOCTOR_MODEL_H

#include "common/base/config.h"
#include "deploy/tool/doctor.h"

struct td_shard_facts {
    char name[256];
    int open_errno;           /* 0: it is there and can be read */
    uint64_t bytes, promised; /* of the file, and by its header; 0: the header cannot be read */
    char bad[200];            /* why not */
};

struct td_model_facts {
    char dir[TD_CONFIG_STRING_MAX];
    bool random;             /* load_format = random: config.json and the tokenizer alone */
    struct td_error config;  /* of config.json; status OK: fine */
    struct td_error index;   /* of the list of files */
    struct td_error tensors; /* of index and shards together; said when each is whole */
    struct td_error tokenizer;
    uint32_t vocab, tokens; /* of config.json; highest named token + 1 */
    uint32_t layers;
    struct td_shard_facts *shard; /* [shards] */
    size_t shards;
};

void td_model_look(const char *dir, bool random, struct td_model_facts *f);
void td_model_facts_free(struct td_model_facts *f);
void td_model_rules(const struct td_model_facts *f, struct td_report *r);

/* Bytes of a whole safetensors file by its header [n]; 0 and a sentence when it is none. */
uint64_t td_shard_promised(const char *header, uint64_t n, char *bad, size_t cap);

#endif
