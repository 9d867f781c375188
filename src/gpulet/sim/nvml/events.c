/* NVML's events. A fault is a line of the control file; each event set remembers how far along that file it has come,
 * so every set in every process gets every fault that was written after the set asked for it. */
#include "node.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { XID_EVENT = 8, SUPPORTED = 1 | 2 | 4 | 8 | 16, POLL_US = 10000 };

struct set {
    uint64_t types[MAX_GPUS]; /* 0: that GPU isn't watched */
    size_t position[MAX_GPUS];
    struct set *next;
};

static struct set *sets;

static struct set *as_set(void *handle)
{
    for (struct set *set = sets; set; set = set->next)
        if (set == handle)
            return set;
    return NULL;
}

API int nvmlEventSetCreate(void **handle)
{
    ENTER();
    struct set *set = calloc(1, sizeof *set);
    if (!set)
        return leave(MEMORY);
    set->next = sets;
    sets = set;
    *handle = set;
    return leave(SUCCESS);
}

API int nvmlEventSetFree(void *handle)
{
    ENTER();
    for (struct set **at = &sets; *at; at = &(*at)->next)
        if (*at == handle) {
            *at = (*at)->next;
            free(handle);
            return leave(SUCCESS);
        }
    return leave(INVALID_ARGUMENT);
}

/* A MIG handle registers its parent: events carry the instance ids that tell the devices apart. */
API int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types)
{
    lock();
    struct mig *mig = as_mig(device);
    if (mig)
        device = &node.gpus[mig->gpu];
    unlock();
    ENTER_GPU(device);
    *types = node.wsl ? 0 : SUPPORTED;
    return leave(SUCCESS);
}

API int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *handle)
{
    lock();
    struct mig *mig = as_mig(device);
    if (mig)
        device = &node.gpus[mig->gpu];
    unlock();
    ENTER_GPU(device);
    struct set *set = as_set(handle);
    if (!set || types & ~(unsigned long long)SUPPORTED)
        return leave(set ? NOT_SUPPORTED : INVALID_ARGUMENT);
    if (node.wsl)
        return leave(NOT_SUPPORTED);
    int number = gpu_number(gpu);
    if (!set->types[number])
        set->position[number] = node.fault_count;
    set->types[number] |= types;
    return leave(SUCCESS);
}

struct event { /* nvmlEventData_t; the first call of that name knew no instances */
    void *device;
    unsigned long long type, data;
    unsigned gi, ci;
};

static int take(struct set *set, struct event *event)
{
    for (int i = 0; i < MAX_GPUS; i++) {
        if (!set->types[i])
            continue;
        while (set->position[i] < node.fault_count) {
            const struct fault *fault = &node.faults[set->position[i]++];
            if (fault->gpu != i || !(set->types[i] & XID_EVENT))
                continue;
            *event = (struct event){&node.gpus[i], XID_EVENT, fault->xid, fault->gi, fault->ci};
            return SUCCESS;
        }
    }
    /* As the driver does: once a watched GPU has gone, waiting on the whole set fails. */
    for (int i = 0; i < MAX_GPUS; i++)
        if (set->types[i] && node.gpus[i].lost)
            return GPU_IS_LOST;
    return TIMEOUT;
}

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

API int nvmlEventSetWait_v2(void *handle, struct event *event, unsigned timeout_ms)
{
    uint64_t end = now_ms() + timeout_ms;
    for (;;) {
        ENTER();
        struct set *set = as_set(handle);
        if (!set)
            return leave(INVALID_ARGUMENT);
        int code = take(set, event);
        if (code != TIMEOUT || now_ms() >= end)
            return leave(code);
        unlock();
        usleep(POLL_US);
    }
}

API int nvmlEventSetWait(void *handle, struct event *event, unsigned timeout_ms)
{
    struct event whole;
    int code = nvmlEventSetWait_v2(handle, &whole, timeout_ms);
    if (code == SUCCESS) {
        event->device = whole.device;
        event->type = whole.type;
        event->data = whole.data;
    }
    return code;
}
