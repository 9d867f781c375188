/* The simulated node as the stand-in libnvidia-ml sees it: what the description says, which part of it this process
 * may see, and what the control file has changed since.
 *
 * Names, numbers and record layouts are those of the NVML C interface (nvml.h). Calls into libc are kept to symbols
 * that glibc has had for many years, so the one file also loads in older containers, and in musl ones.
 */
#ifndef GPULET_SIM_NODE_H
#define GPULET_SIM_NODE_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum nvml_return {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    MEMORY = 20,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum { MAX_GPUS = 64, MAX_LINKS = 36, MAX_MIG = 16, MAX_PROFILES = 18, LINK_NONE = -1, LINK_SWITCH = -2 };

/* One compute instance of a GPU instance, that is one MIG device; its address is also the handle of either instance. */
struct mig {
    int used, gpu, slot;
    char uuid[96];
    unsigned gi, ci, gi_profile, ci_slices, start, size, gi_cap, ci_cap;
};

/* A kind of GPU instance; `kind` is the NVML enumeration, `id` the driver's own number for it. */
struct profile {
    unsigned used, kind, id, slices, count, sms, copy, decoders, encoders, jpeg, ofa, size;
    uint64_t memory_mib;
    char name[96];
};

struct gpu {
    int used, visible, shown_index, lost;
    unsigned minor, pci_device, pci_subsystem, brand, arch_major, arch_minor, recovery;
    unsigned addressing; /* nvmlDeviceAddressingModeType_t: 0 none, 2 the processor's page tables */
    unsigned bus_domain, bus_bus, bus_device;
    int mig_mode; /* -1: this GPU can't do MIG */
    int levels[MAX_GPUS];
    int links[MAX_LINKS]; /* the GPU at the far end, LINK_SWITCH or LINK_NONE */
    int link_count;
    uint64_t memory;
    char uuid[96], name[96], bus[32], serial[32], board[32], vbios[32];
    struct profile profiles[MAX_PROFILES];
    struct mig mig[MAX_MIG];
};

/* A fault that waits to be delivered: one line of the control file. */
struct fault {
    int gpu;
    unsigned xid, gi, ci;
};

struct node {
    char driver[80], library[80], nvml[80], control[4096], root[4096], fabric[64];
    unsigned cuda;
    int wsl, init_code, fabric_state;
    unsigned init_ms, clique;
    struct gpu gpus[MAX_GPUS];
    struct fault *faults; /* every fault since the node was created, in order */
    size_t fault_count;
};

extern struct node node;
extern int initialised; /* nvmlInit calls not yet undone */

void lock(void);
void unlock(void);

/* Read the description if this is the first call, and the control file if it has changed. 0, or -1 without one. */
int node_refresh(void);

/* Take in lines of the description or the control file (grammar.c). A last line without its newline is left out: it is
 * still being written. */
void node_parse(const char *text, size_t size);

/* Decide which GPUs this process may see, by the device nodes beneath the library's root. */
void node_look(void);

/* Whether /dev/<name><number> is there and may be opened; the lack of a driver behind it doesn't count. A negative
 * number stands for none. */
int node_may_open(const char *name, int number);

/* The GPU shown under a number, NULL where there is none. */
struct gpu *node_shown(unsigned index);
unsigned node_shown_count(void);

/* What a handle given by a caller stands for; NULL where it is none of ours. */
struct gpu *as_gpu(void *handle);
struct mig *as_mig(void *handle);
struct profile *mig_profile(const struct mig *mig);
int mig_visible(const struct mig *mig);
int gpu_number(const struct gpu *gpu);

int copy_text(char *to, unsigned size, const char *text);

/* The start of nearly every call: hold the lock, and leave unless NVML was initialised. */
#define ENTER()                  \
    lock();                      \
    node_refresh();              \
    if (!initialised)            \
        return leave(UNINITIALIZED)
int leave(int code);

/* The same for a call on a physical GPU; `gpu` is set. */
#define ENTER_GPU(handle)                  \
    struct gpu *gpu;                       \
    ENTER();                               \
    gpu = as_gpu(handle);                  \
    if (!gpu)                              \
        return leave(INVALID_ARGUMENT);    \
    if (gpu->lost)                         \
        return leave(GPU_IS_LOST)

#endif
