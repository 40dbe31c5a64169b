/* Packs every tensor once, at engine creation; the walk over the model runs twice (see bump.h). */
#include "kernels/packed.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/bump.h"
#include "kernels/model/random.h"
#include "kernels/rope_table.h"
#include "kernels/team.h"

/* Stored tensors are cut where their scales are: rows of FP8, and columns of all for alignment. */
enum { CUT = 128 };

struct packer {
    struct td_device *device;
    struct td_share share;
    struct td_bump bump;   /* device memory */
    struct td_bump arrays; /* host memory */
    float *row;            /* the widest row of the model, decoded */
    uint8_t *bf16;         /* per matrix of panels, in the order of the walk: held as bf16 */
    size_t matrices, room;
    bool failed; /* no memory for `bf16` */
};

/* Whether every value of the part is exact in bf16: by its format, or by looking. The first pass
 * looks, the second one remembers. */
static bool exact_part(struct packer *p, const struct td_weight *w, uint32_t row, uint32_t rows,
                       uint32_t col, uint32_t cols) {
    size_t i = p->matrices++;
    if (p->bump.base) return p->bf16[i];
    if (i >= p->room) {
        size_t room = p->room ? 2 * p->room : 1024;
        uint8_t *grown = realloc(p->bf16, room);
        if (!grown) {
            p->failed = true;
            p->matrices = 0;
            return false;
        }
        p->bf16 = grown;
        p->room = room;
    }
    bool exact = true;
    /* Without bytes what is sure by the format alone: powers of two scale FP8 and FP4. */
    bool values = w->data || w->random;
    if (!values) exact = w->format != TD_W_F32 && w->format != TD_W_NVFP4;
    for (uint32_t o = 0; exact && values && w->format != TD_W_BF16 && o < rows; o++) {
        td_weight_row(w, row + o, p->row);
        exact = td_matrix_exact(p->row + col, cols);
    }
    p->bf16[i] = exact;
    return exact;
}

/* Rows row..row+rows-1 and columns col..col+cols-1 of w as panels. */
static void pack_panels(struct packer *p, const struct td_weight *w, uint32_t row, uint32_t col,
                        struct td_matrix *m) {
    m->bf16 = exact_part(p, w, row, m->rows, col, m->cols);
    size_t bytes = td_matrix_bytes(m->rows, m->cols, m->bf16);
    void *to = td_bump_take(&p->bump, bytes);
    if (!to) return;
    memset(to, 0, bytes);
    m->panels = to;
    for (uint32_t o = 0; o < m->rows; o++) {
        td_weight_row(w, row + o, p->row);
        td_matrix_set_row(to, m->cols, m->bf16, o, p->row + col);
    }
}

/* A copy in device memory. */
static const void *put(struct packer *p, const void *from, size_t bytes) {
    void *to = td_bump_take(&p->bump, bytes);
    if (to) td_upload(p->device, to, from, bytes);
    return to;
}

/* Rows row.. and columns col.. of a tensor. */
struct cut {
    uint32_t row, rows, col, cols;
};

static struct cut whole(const struct td_weight *w) {
    return (struct cut){0, w->rows, 0, w->cols};
}

/* Of a tensor like w with other numbers of rows and columns, the bytes of its data or scales. */
static size_t bytes_of(const struct td_weight *w, bool scale, uint32_t rows, uint32_t cols) {
    const struct td_weight like = {.format = w->format, .rows = rows, .cols = cols};
    return scale ? td_weight_scale_bytes(&like) : td_weight_data_bytes(&like);
}

/* The data or scales of a cut in device memory: copied, or made there. */
static const void *put_cut(struct packer *p, const struct td_weight *w, bool scale,
                           const struct cut *c) {
    size_t width = bytes_of(w, scale, 1, c->cols), pitch = bytes_of(w, scale, 1, w->cols);
    if (width == 0 || c->rows == 0) return NULL;
    size_t rows = bytes_of(w, scale, c->rows, c->cols) / width; /* of FP8 scales a 128th */
    size_t from = bytes_of(w, scale, c->row, w->cols) + bytes_of(w, scale, 1, c->col);
    if (width == pitch) {
        width *= rows;
        rows = 1;
    }
    void *to = td_bump_take(&p->bump, width * rows);
    if (to && w->random) {
        struct td_random r = td_random_of(w, scale);
        p->device->backend->fill(p->device, &r, &(struct td_fill){to, from, width, rows, pitch});
    } else if (to) {
        const uint8_t *bytes = scale ? w->scale : w->data;
        struct td_copy copy = {to, bytes + from, width, rows, width, pitch};
        p->device->backend->upload(p->device, TD_LANE_STEP, &copy);
    }
    return to;
}

static uint32_t cut_up(uint32_t v, uint32_t most) {
    uint32_t up = (v + CUT - 1) / CUT * CUT;
    return up < most ? up : most;
}

/* A tensor where the device's kernels read it from: rows from `row` and columns from `col` on. */
struct part {
    struct td_weight stored;
    uint32_t row, col;
};

/* What of it `c` needs; where device memory is the host's the tensor as it is. */
static struct part store(struct packer *p, const struct td_weight *w, struct cut c) {
    struct part to = {.stored = *w};
    if (p->device->backend->host || w->format == TD_W_NONE) return to;
    uint32_t end_row = c.row + c.rows, end_col = cut_up(c.col + c.cols, w->cols);
    to.col = c.col / CUT * CUT;
    to.row = c.row;
    if (w->format == TD_W_FP8_BLOCK) {
        to.row = c.row / CUT * CUT;
        end_row = cut_up(end_row, w->rows);
    }
    c = (struct cut){to.row, end_row - to.row, to.col, end_col - to.col};
    to.stored.rows = c.rows;
    to.stored.cols = c.cols;
    to.stored.random = 0;
    to.stored.data = put_cut(p, w, false, &c);
    to.stored.scale = put_cut(p, w, true, &c);
    return to;
}

/* A cut of the whole tensor that lies inside `stored`. */
static struct td_matrix pack_part(struct packer *p, const struct part *stored, struct cut c) {
    struct td_matrix m = {.rows = c.rows, .cols = c.cols};
    if (p->device->backend->host) {
        pack_panels(p, &stored->stored, c.row, c.col, &m);
    } else {
        m.stored = stored->stored;
        m.row = c.row - stored->row;
        m.col = c.col - stored->col;
    }
    return m;
}

static struct td_matrix pack_cut(struct packer *p, const struct td_weight *w, struct cut c) {
    if (w->format == TD_W_NONE) return (struct td_matrix){0};
    struct part stored = store(p, w, c);
    return pack_part(p, &stored, c);
}

static struct td_matrix pack(struct packer *p, const struct td_weight *w) {
    return pack_cut(p, w, whole(w));
}

/* A matrix whose input is rounded in ref numerics if it is stored as FP8 or FP4. By the model's
 * rules that is not every quantised one: wo_a is expanded. */
static struct td_matrix rounding(struct td_matrix m, const struct td_weight *w) {
    m.fp8_input = w->format == TD_W_FP8_BLOCK || w->format == TD_W_FP4;
    m.input_scale = w->format == TD_W_NVFP4 ? w->input_scale : 0;
    return m;
}

static struct td_matrix pack_rounding(struct packer *p, const struct td_weight *w) {
    return rounding(pack(p, w), w);
}

/* Columns of all rows as plain fp32, row-major. */
static const float *pack_columns(struct packer *p, const struct td_weight *w, uint32_t col,
                                 uint32_t cols) {
    if (w->format == TD_W_NONE) return NULL;
    float *to = td_bump_take(&p->bump, (size_t)w->rows * cols * sizeof *to);
    for (uint32_t r = 0; to && r < w->rows; r++) {
        td_weight_row(w, r, p->row);
        td_upload(p->device, to + (size_t)r * cols, p->row + col, cols * sizeof *to);
    }
    return to;
}

static const float *pack_plain(struct packer *p, const struct td_weight *w) {
    return pack_columns(p, w, 0, w->cols);
}

static struct td_hc pack_hc(struct packer *p, const struct td_hc_weights *w) {
    return (struct td_hc){pack(p, &w->fn), pack_plain(p, &w->base), pack_plain(p, &w->scale)};
}

static struct td_packed_compressor pack_compressor(struct packer *p,
                                                   const struct td_compressor_weights *w) {
    return (struct td_packed_compressor){pack(p, &w->wkv), pack(p, &w->wgate),
                                         pack_plain(p, &w->ape), pack_plain(p, &w->norm)};
}

/* An array of matrices; entries are stored only in the second pass. */
static struct td_matrix *take_matrices(struct packer *p, uint32_t n) {
    return td_bump_take(&p->arrays, n * sizeof(struct td_matrix));
}

/* Its copy where kernels choose a matrix by index. */
static void mirror_matrices(struct packer *p, struct td_matrix *array, uint32_t n) {
    if (p->device->backend->host) return;
    const struct td_matrix *copy = put(p, array, n * sizeof *array);
    for (uint32_t i = 0; array && i < n; i++)
        array[i].device = copy + i;
}

static void set_matrix(struct td_matrix *array, uint32_t i, struct td_matrix m) {
    if (array) array[i] = m;
}

static void pack_experts(struct packer *p, const struct td_layer_weights *w, uint32_t layer,
                         struct td_packed_layer *to) {
    uint32_t n = p->share.experts;
    to->w1 = take_matrices(p, n);
    to->w3 = take_matrices(p, n);
    to->w2 = take_matrices(p, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct td_expert_weights *e = &w->experts[p->share.expert + i];
        (void)td_team_at(p->device->team, p->device->rank, "packing of experts", layer);
        set_matrix(to->w1, i, pack_rounding(p, &e->w1));
        set_matrix(to->w3, i, pack_rounding(p, &e->w3));
        set_matrix(to->w2, i, pack_rounding(p, &e->w2));
    }
    mirror_matrices(p, to->w1, n);
    mirror_matrices(p, to->w3, n);
    mirror_matrices(p, to->w2, n);
}

/* The rank's output groups: their rows of wo_a, their columns of wo_b. */
static void pack_groups(struct packer *p, const struct td_model_config *c,
                        const struct td_layer_weights *w, struct td_packed_layer *to) {
    uint32_t n = p->share.groups, lora = c->o_lora_rank, at = p->share.group * lora;
    struct cut rows = {at, n * lora, 0, w->wo_a.cols}, cols = {0, c->hidden, at, n * lora};
    to->wo_a = take_matrices(p, n);
    to->wo_b = take_matrices(p, n);
    struct part wo_a = store(p, &w->wo_a, rows), wo_b = store(p, &w->wo_b, cols);
    rows.rows = cols.cols = lora;
    for (uint32_t g = 0; g < n; g++, rows.row += lora, cols.col += lora) {
        set_matrix(to->wo_a, g, pack_part(p, &wo_a, rows));
        set_matrix(to->wo_b, g, rounding(pack_part(p, &wo_b, cols), &w->wo_b));
    }
}

static void pack_layer(struct packer *p, const struct td_model_config *c, uint32_t l,
                       const struct td_layer_weights *w, struct td_packed_layer *to) {
    const struct td_share *own = &p->share;
    (void)td_team_at(p->device->team, p->device->rank, "packing", l);
    to->kind = c->kind[l];
    to->attn_norm = pack_plain(p, &w->attn_norm);
    to->ffn_norm = pack_plain(p, &w->ffn_norm);
    to->hc_attn = pack_hc(p, &w->hc_attn);
    to->hc_ffn = pack_hc(p, &w->hc_ffn);
    to->wq_a = pack_rounding(p, &w->wq_a);
    to->q_norm = pack_plain(p, &w->q_norm);
    to->wq_b = rounding(
        pack_cut(p, &w->wq_b,
                 (struct cut){own->head * TD_HEAD_DIM, own->heads * TD_HEAD_DIM, 0, w->wq_b.cols}),
        &w->wq_b);
    to->wkv = pack_rounding(p, &w->wkv);
    to->kv_norm = pack_plain(p, &w->kv_norm);
    to->sink = pack_columns(p, &w->sink, own->head, own->heads);
    pack_groups(p, c, w, to);
    to->comp = pack_compressor(p, &w->comp);
    to->index_comp = pack_compressor(p, &w->index_comp);
    to->index_wq_b = pack_rounding(p, &w->index_wq_b);
    to->index_weights = pack(p, &w->index_weights_proj);
    to->gate = pack(p, &w->gate);
    to->gate_bias = pack_plain(p, &w->gate_bias);
    to->tid2eid = w->tid2eid;
    if (w->tid2eid && !p->device->backend->host)
        to->tid2eid =
            put(p, w->tid2eid, (size_t)c->vocab * c->experts_per_token * sizeof *w->tid2eid);
    to->shared =
        (struct td_packed_ffn){pack_rounding(p, &w->shared.w1), pack_rounding(p, &w->shared.w3),
                               pack_rounding(p, &w->shared.w2)};
    pack_experts(p, w, l, to);
}

/* Rows of the embedding, which is looked up and not multiplied. */
static struct td_weight store_rows(struct packer *p, const struct td_weight *w, struct cut c) {
    if (p->device->backend->host) return td_weight_rows(w, c.row, c.rows);
    return store(p, w, c).stored;
}

static void pack_model(struct packer *p, struct td_packed_model *to) {
    const struct td_model *m = to->model;
    struct cut own = {to->share.token, to->share.tokens, 0, m->config.hidden};
    p->share = to->share;
    to->embed = store_rows(p, &m->embed, own);
    for (uint32_t i = 0; i < 2; i++) {
        float freq[TD_ROPE_DIM / 2];
        td_rope_table(&m->config, i == 1, freq);
        to->freq[i] = put(p, freq, sizeof freq);
    }
    for (uint32_t l = 0; l < m->config.layers; l++)
        pack_layer(p, &m->config, l, &m->layer[l], &to->layer[l]);
    to->hc_head = pack_hc(p, &m->hc_head);
    to->norm = pack_plain(p, &m->norm);
    to->head = pack_cut(p, &m->head, own);
}

static uint32_t widest_row(const struct td_model_config *c) {
    uint32_t widest = c->hidden * TD_HC_STREAMS;
    uint32_t group = c->heads / c->o_groups * TD_HEAD_DIM, wo_b = c->o_groups * c->o_lora_rank;
    uint32_t inner = c->expert_inner * (c->shared_experts ? c->shared_experts : 1);
    widest = group > widest ? group : widest;
    widest = wo_b > widest ? wo_b : widest;
    widest = inner > widest ? inner : widest;
    widest = c->q_lora_rank > widest ? c->q_lora_rank : widest;
    widest = c->experts > widest ? c->experts : widest;
    return widest > TD_KV_CSA_STATE_DIM ? widest : TD_KV_CSA_STATE_DIM;
}

struct td_share td_share_of(const struct td_model_config *c, uint32_t rank, uint32_t ranks) {
    uint32_t r = ranks ? ranks : 1, groups = c->o_groups / r, each = c->heads / c->o_groups;
    struct td_share s = {.group = rank * groups, .groups = groups};
    s.head = s.group * each;
    s.heads = groups * each;
    s.expert = td_shard_expert(s.group, c->o_groups, c->experts);
    s.experts = td_shard_expert(s.group + groups, c->o_groups, c->experts) - s.expert;
    s.token = (uint32_t)((uint64_t)c->vocab * rank / r);
    s.tokens = (uint32_t)((uint64_t)c->vocab * (rank + 1) / r) - s.token;
    return s;
}

td_status td_packed_plan(const struct td_model *model, struct td_device *d,
                         struct td_packed_model **ret, struct td_error *err) {
    const struct td_model_config *c = &model->config;
    struct packer p = {.device = d, .row = malloc(widest_row(c) * sizeof(float))};
    struct td_packed_model *m = calloc(1, sizeof *m);
    if (m) m->device = d;
    if (m) m->layer = calloc(c->layers, sizeof *m->layer);
    bool ok = p.row && m && m->layer;
    if (ok) {
        m->model = model;
        m->share = td_share_of(c, d->rank, d->ranks);
        pack_model(&p, m);
        m->bytes = p.bump.used;
        m->array_bytes = p.arrays.used;
        m->bf16 = p.bf16;
    }
    free(p.row);
    if (!ok || p.failed) {
        td_packed_destroy(m);
        return td_fail(err, TD_NO_MEMORY, "no memory to pack a model of %u layers", c->layers);
    }
    *ret = m;
    return TD_OK;
}

td_status td_packed_fill(struct td_packed_model *m, struct td_error *err) {
    struct td_device *d = m->device;
    struct packer p = {.device = d, .bf16 = m->bf16};
    TD_TRY(d->backend->take(d, m->bytes, "weights", &m->memory, err));
    m->arrays = aligned_alloc(64, m->array_bytes);
    p.row = malloc(widest_row(&m->model->config) * sizeof(float));
    td_status st;
    if (m->arrays && p.row) {
        p.bump = (struct td_bump){m->memory, 0};
        p.arrays = (struct td_bump){m->arrays, 0};
        pack_model(&p, m);
        st = d->backend->wait(d, TD_LANE_STEP, err);
    } else {
        st = td_fail(err, TD_NO_MEMORY, "no memory for a table of %zu bytes", m->array_bytes);
    }
    free(p.row);
    return st;
}

void td_packed_destroy(struct td_packed_model *p) {
    if (!p) return;
    if (p->memory) p->device->backend->give(p->device, p->memory, p->bytes);
    free(p->arrays);
    free(p->bf16);
    free(p->layer);
    free(p);
}
