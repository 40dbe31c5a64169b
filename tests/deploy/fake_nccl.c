/* libnccl.so.2 of emulated GPUs, whose memory is the host's: sums on the host when a group ends.
 * TD_NCCL: "hang" in the sum, "stall" while communicators are made, "wrong" in one value, "fail".
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX = 64 };
static const float *from[MAX];
static float *to[MAX];
static size_t words;
static int queued;

static int is(const char *word) {
    const char *said = getenv("TD_NCCL");
    return said && strcmp(said, word) == 0;
}

int ncclGetVersion(int *version);
const char *ncclGetErrorString(int e);
int ncclCommInitAll(void **comm, int n, const int *gpus);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *x, void *y, size_t n, int type, int op, void *comm, void *stream);
int ncclCommDestroy(void *comm);
int ncclCommAbort(void *comm);

int ncclGetVersion(int *version) {
    *version = 22803;
    return 0;
}
const char *ncclGetErrorString(int e) {
    return e == 2 ? "unhandled system error" : "an error";
}
int ncclCommInitAll(void **comm, int n, const int *gpus) {
    (void)gpus;
    if (is("stall"))
        for (;;)
            pause();
    for (int i = 0; i < n; i++)
        comm[i] = malloc(1);
    return is("fail") ? 2 : 0;
}
int ncclGroupStart(void) {
    queued = 0;
    return 0;
}
int ncclAllReduce(const void *x, void *y, size_t n, int type, int op, void *comm, void *stream) {
    (void)comm, (void)stream;
    if (type != 7 || op != 0 || queued == MAX) return 4;
    from[queued] = x;
    to[queued++] = y;
    words = n;
    return 0;
}
int ncclGroupEnd(void) {
    if (is("hang"))
        for (;;)
            pause();
    for (size_t i = 0; i < words; i++) {
        float sum = 0;
        for (int k = 0; k < queued; k++)
            sum += from[k][i];
        for (int k = 0; k < queued; k++)
            to[k][i] = sum;
    }
    if (is("wrong")) to[queued - 1][words / 2] += 1;
    return 0;
}
int ncclCommDestroy(void *comm) {
    free(comm);
    return 0;
}
int ncclCommAbort(void *comm) {
    free(comm);
    return 0;
}
