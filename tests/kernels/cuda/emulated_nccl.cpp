/* NCCL as far as kernels/cuda uses it, between host threads: what a group sends waits until it was
 * received. None with TD_EMULATE_NCCL=0. */
#include "tests/kernels/cuda/emulator.h"

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/nccl.h"

namespace {

struct letter {
    const void *from;
    size_t bytes;
    bool taken;
};
struct ring {
    std::mutex lock;
    std::condition_variable changed;
    std::map<std::pair<int, int>, std::list<letter *>> post; /* from, to */
    bool broken = false;
};
struct member {
    std::shared_ptr<ring> of;
    int rank;
};
struct part {
    bool send;
    const void *from;
    void *to;
    size_t bytes;
    int peer;
    member *comm;
};

std::mutex lock;
std::map<unsigned, std::shared_ptr<ring>> rings;
unsigned next_id;
thread_local std::vector<part> group;

int get_version(int *ret) {
    *ret = 0;
    return TD_NCCL_OK;
}
int get_id(struct td_nccl_id *ret) {
    std::lock_guard<std::mutex> l(lock);
    memset(ret, 0, sizeof *ret);
    memcpy(ret->internal, &++next_id, sizeof next_id);
    return TD_NCCL_OK;
}
int init_rank(void **ret, int, struct td_nccl_id id, int rank) {
    std::lock_guard<std::mutex> l(lock);
    unsigned i;
    memcpy(&i, id.internal, sizeof i);
    if (!rings[i]) rings[i] = std::make_shared<ring>();
    *ret = new member{rings[i], rank};
    return TD_NCCL_OK;
}
int destroy(void *comm) {
    delete (member *)comm;
    return TD_NCCL_OK;
}
/* The memory of a member that others are still using stays. */
int abort_comm(void *comm) {
    ring *r = ((member *)comm)->of.get();
    std::lock_guard<std::mutex> l(r->lock);
    r->broken = true;
    r->changed.notify_all();
    return TD_NCCL_OK;
}
int async_error(void *, int *ret) {
    *ret = TD_NCCL_OK;
    return TD_NCCL_OK;
}
const char *error_text(int) {
    return "an emulated error";
}
size_t size_of(int type) {
    return type == TD_NCCL_FLOATS ? 4 : 1;
}
int group_start(void) {
    group.clear();
    return TD_NCCL_OK;
}
int send(const void *from, size_t n, int type, int peer, void *comm, cudaStream_t s) {
    td_emulate_on(s, "a parcel");
    group.push_back({true, from, NULL, n * size_of(type), peer, (member *)comm});
    return TD_NCCL_OK;
}
int recv(void *to, size_t n, int type, int peer, void *comm, cudaStream_t s) {
    td_emulate_on(s, "a parcel");
    group.push_back({false, NULL, to, n * size_of(type), peer, (member *)comm});
    return TD_NCCL_OK;
}
void carry(std::vector<part> parts) {
    if (parts.empty()) return;
    std::shared_ptr<ring> r = parts[0].comm->of;
    int me = parts[0].comm->rank;
    std::list<letter> mine;
    std::unique_lock<std::mutex> l(r->lock);
    for (part &p : parts)
        if (p.send) {
            mine.push_back({p.from, p.bytes, false});
            r->post[{me, p.peer}].push_back(&mine.back());
        }
    r->changed.notify_all();
    for (part &p : parts) {
        if (p.send) continue;
        auto &box = r->post[{p.peer, me}];
        r->changed.wait(l, [&] { return r->broken || !box.empty(); });
        if (r->broken) break;
        letter *from = box.front();
        box.pop_front();
        if (from->bytes != p.bytes) abort();
        memcpy(p.to, from->from, p.bytes);
        from->taken = true;
        r->changed.notify_all();
    }
    for (letter &m : mine)
        r->changed.wait(l, [&] { return r->broken || m.taken; });
}
int group_end(void) {
    td_emulate_launch([parts = group] { carry(parts); });
    return TD_NCCL_OK;
}
int all_reduce(const void *, void *, size_t, int, int, void *, cudaStream_t) {
    return TD_NCCL_IN_PROGRESS; /* a yardstick: nobody needs it here */
}

} // namespace

const struct td_nccl *td_nccl_find(void) {
    static const struct td_nccl n = {get_version, get_id,      init_rank,  destroy,
                                     abort_comm,  async_error, error_text, group_start,
                                     group_end,   send,        recv,       all_reduce};
    const char *there = getenv("TD_EMULATE_NCCL");
    return there && strcmp(there, "0") == 0 ? NULL : &n;
}
