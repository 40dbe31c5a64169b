/* libnvidia-ml.so.1 of emulated GPUs: all is well unless TD_NVML has words that say otherwise,
 * "NAME=VALUE" or "NAME=VALUE@GPU" (the names below); "-NAME" is a call that is not supported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What is said of `name` for a GPU, else `fine`; -1: the call fails. */
static long long said(const char *name, long gpu, long long fine) {
    char words[512], want[64];
    const char *all = getenv("TD_NVML");
    char *save = NULL;
    snprintf(words, sizeof words, "%s", all ? all : "");
    snprintf(want, sizeof want, "%s=", name);
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        if (w[0] == '-' && strcmp(w + 1, name) == 0) return -1;
        char *at = strchr(w, '@');
        if (at && strtol(at + 1, NULL, 10) != gpu) continue;
        if (strncmp(w, want, strlen(want)) == 0) return strtoll(w + strlen(want), NULL, 0);
    }
    return fine;
}

static long number_of(void *device) {
    return (long)(size_t)device - 1;
}

static int one(const char *name, void *device, unsigned *ret, unsigned fine) {
    long long v = said(name, number_of(device), fine);
    if (v < 0) return 3; /* not supported */
    *ret = (unsigned)v;
    return 0;
}

int nvmlInit_v2(void);
int nvmlShutdown(void);
const char *nvmlErrorString(int e);
int nvmlSystemGetDriverVersion(char *to, unsigned cap);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **ret);
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *ret);
int nvmlDeviceGetEccMode(void *d, unsigned *now, unsigned *later);
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int since, unsigned long long *ret);
int nvmlDeviceGetRemappedRows(void *d, unsigned *a, unsigned *b, unsigned *pending,
                              unsigned *failed);
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *ret);
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *ret);
int nvmlDeviceGetPowerManagementLimitConstraints(void *d, unsigned *least, unsigned *most);
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *ret);
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later);
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *list);
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *ret);
int nvmlDeviceGetP2PStatus(void *a, void *b, int kind, int *ret);

int nvmlInit_v2(void) {
    if (said("hang", -1, 0))
        for (;;)
            pause();
    return (int)said("init", -1, 0);
}
int nvmlShutdown(void) {
    return 0;
}
const char *nvmlErrorString(int e) {
    return e == 9 ? "Driver Not Loaded" : "an error";
}
int nvmlSystemGetDriverVersion(char *to, unsigned cap) {
    snprintf(to, cap, "580.65.06");
    return 0;
}
/* "0000:41:00.0" is emulated GPU 1. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **ret) {
    *ret = (void *)(size_t)(strtoul(bus + 5, NULL, 16) - 0x40 + 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *ret) {
    (void)d;
    ret[0] = 8ull << 30;
    ret[1] = 7ull << 30;
    ret[2] = 1ull << 30;
    return 0;
}
#define ONE(call, name, fine)                                                                      \
    int call(void *d, unsigned *ret);                                                              \
    int call(void *d, unsigned *ret) {                                                             \
        return one(name, d, ret, fine);                                                            \
    }
ONE(nvmlDeviceGetPersistenceMode, "persistence", 1)
ONE(nvmlDeviceGetEnforcedPowerLimit, "power", 600000)
ONE(nvmlDeviceGetPowerManagementDefaultLimit, "power_default", 600000)
ONE(nvmlDeviceGetCurrPcieLinkGeneration, "generation", 5)
ONE(nvmlDeviceGetMaxPcieLinkGeneration, "generation_max", 5)
ONE(nvmlDeviceGetCurrPcieLinkWidth, "lanes", 0) /* an emulation's rates are no link's */
ONE(nvmlDeviceGetMaxPcieLinkWidth, "lanes_max", 16)
ONE(nvmlDeviceGetComputeMode, "compute_mode", 0)

int nvmlDeviceGetEccMode(void *d, unsigned *now, unsigned *later) {
    return one("ecc", d, now, 1) || one("ecc", d, later, 1);
}
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int since, unsigned long long *ret) {
    long long v = said(since ? "ecc_ever" : "ecc_volatile", number_of(d), 0);
    if (v < 0 || kind != 1) return 3;
    *ret = (unsigned long long)v;
    return 0;
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *a, unsigned *b, unsigned *pending,
                              unsigned *failed) {
    *a = *b = 0;
    return one("pending", d, pending, 0) || one("failed", d, failed, 0);
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *ret) {
    (void)kind;
    return one("clock", d, ret, 1980);
}
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *ret) {
    (void)kind;
    return one("clock_max", d, ret, 1980);
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *d, unsigned *least, unsigned *most) {
    *least = 200000;
    return one("power_max", d, most, 600000);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *ret) {
    long long v = said("throttle", number_of(d), 1); /* idle */
    if (v < 0) return 3;
    *ret = (unsigned long long)v;
    return 0;
}
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) {
    *later = 0;
    return one("mig", d, now, 0);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *list) {
    long long pid = said("pid", number_of(d), 0);
    *n = pid > 0;
    if (pid > 0) memcpy(list, &(unsigned){(unsigned)pid}, sizeof(unsigned));
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *ret) {
    (void)a, (void)b;
    *ret = 30;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int kind, int *ret) {
    (void)b, (void)kind;
    *ret = (int)said("p2p", number_of(a), 0);
    return 0;
}
