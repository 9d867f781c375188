/* NVML's calls about one GPU. */
#include "node.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER();
    if (!count)
        return leave(INVALID_ARGUMENT);
    *count = node_shown_count();
    return leave(SUCCESS);
}

API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static int hand_out(struct gpu *gpu, void **device, int missing)
{
    if (!gpu)
        return leave(missing);
    if (gpu->lost)
        return leave(GPU_IS_LOST);
    *device = gpu;
    return leave(SUCCESS);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    ENTER();
    return hand_out(node_shown(index), device, INVALID_ARGUMENT);
}

API int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    ENTER();
    struct gpu *gpu;
    for (unsigned i = 0; (gpu = node_shown(i)); i++) {
        if (!strcasecmp(gpu->uuid, uuid))
            return hand_out(gpu, device, NOT_FOUND);
        for (int j = 0; j < MAX_MIG && !gpu->lost; j++)
            if (mig_visible(&gpu->mig[j]) && !strcasecmp(gpu->mig[j].uuid, uuid)) {
                *device = &gpu->mig[j];
                return leave(SUCCESS);
            }
    }
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleBySerial(const char *serial, void **device)
{
    ENTER();
    struct gpu *gpu;
    for (unsigned i = 0; (gpu = node_shown(i)); i++)
        if (*gpu->serial && !strcmp(gpu->serial, serial))
            return hand_out(gpu, device, NOT_FOUND);
    return leave(NOT_FOUND);
}

/* "00000000:19:00.0" and "0000:19:00.0" name the same function: leading zeros of the domain don't count. */
static const char *without_zeros(const char *bus) { return bus + strspn(bus, "0"); }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
    ENTER();
    struct gpu *gpu;
    for (unsigned i = 0; (gpu = node_shown(i)); i++)
        if (!strcasecmp(without_zeros(gpu->bus), without_zeros(bus)))
            return hand_out(gpu, device, NOT_FOUND);
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleByPciBusId(const char *bus, void **device) { return nvmlDeviceGetHandleByPciBusId_v2(bus, device); }

/* A MIG device answers some questions in its parent's stead, and the rest with "invalid argument". */
API int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    lock();
    struct mig *mig = as_mig(device);
    if (initialised && mig)
        return leave(copy_text(uuid, length, mig->uuid));
    unlock();
    ENTER_GPU(device);
    return leave(copy_text(uuid, length, gpu->uuid));
}

API int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    lock();
    struct mig *mig = as_mig(device);
    if (initialised && mig) {
        const struct profile *profile = mig_profile(mig);
        char text[224], part[16] = "";
        if (mig->ci_slices != profile->slices)
            snprintf(part, sizeof part, "%uc.", mig->ci_slices);
        snprintf(text, sizeof text, "%s MIG %s%s", node.gpus[mig->gpu].name, part,
                 profile->name + (strncmp(profile->name, "MIG ", 4) ? 0 : 4));
        return leave(copy_text(name, length, text));
    }
    unlock();
    ENTER_GPU(device);
    return leave(copy_text(name, length, gpu->name));
}

#define NUMBER(function, value)                        \
    API int function(void *device, unsigned *answer)   \
    {                                                  \
        ENTER_GPU(device);                             \
        if (!answer)                                   \
            return leave(INVALID_ARGUMENT);            \
        *answer = (unsigned)(value);                   \
        return leave(SUCCESS);                         \
    }

NUMBER(nvmlDeviceGetIndex, gpu->shown_index)
NUMBER(nvmlDeviceGetMinorNumber, gpu->minor)
NUMBER(nvmlDeviceGetBrand, gpu->brand)
NUMBER(nvmlDeviceGetPersistenceMode, 1)
NUMBER(nvmlDeviceGetPowerUsage, 75000 + 1000 * (unsigned)gpu_number(gpu)) /* milliwatts */
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 700000)
NUMBER(nvmlDeviceGetPowerManagementLimit, 700000)
NUMBER(nvmlDeviceGetComputeMode, 0)
NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetPerformanceState, 0)
NUMBER(nvmlDeviceGetBoardId, (gpu->bus_bus << 8) | gpu->bus_device)
NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER(nvmlDeviceGetArchitecture, gpu->arch_major >= 10 ? 10 : gpu->arch_major == 9 ? 9 : gpu->arch_major == 8 ? (gpu->arch_minor == 9 ? 8 : 7) : gpu->arch_minor >= 5 ? 6 : 5)

#define TEXT(function, value)                                             \
    API int function(void *device, char *answer, unsigned length)         \
    {                                                                     \
        ENTER_GPU(device);                                                \
        if (!*(value))                                                    \
            return leave(NOT_SUPPORTED);                                  \
        return leave(copy_text(answer, length, value));                   \
    }

TEXT(nvmlDeviceGetSerial, gpu->serial)
TEXT(nvmlDeviceGetBoardPartNumber, gpu->board)
TEXT(nvmlDeviceGetVbiosVersion, gpu->vbios)

struct pci_info { /* nvmlPciInfo_t as of v3 */
    char bus_legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

struct pci_info_old { /* nvmlPciInfo_t before v3: the unversioned and the _v2 call */
    char bus_id[16];
    unsigned domain, bus, device, id, subsystem, reserved[4];
};

API int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *pci)
{
    ENTER_GPU(device);
    memset(pci, 0, sizeof *pci);
    *pci = (struct pci_info){.domain = gpu->bus_domain, .bus = gpu->bus_bus, .device = gpu->bus_device,
                             .id = gpu->pci_device, .subsystem = gpu->pci_subsystem};
    copy_text(pci->bus_id, sizeof pci->bus_id, gpu->bus);
    if (strlen(gpu->bus) > 4)
        copy_text(pci->bus_legacy, sizeof pci->bus_legacy, gpu->bus + 4);
    return leave(SUCCESS);
}

API int nvmlDeviceGetPciInfo_v2(void *device, struct pci_info_old *pci)
{
    struct pci_info now;
    int code = nvmlDeviceGetPciInfo_v3(device, &now);
    if (code)
        return code;
    *pci = (struct pci_info_old){.domain = now.domain, .bus = now.bus, .device = now.device, .id = now.id, .subsystem = now.subsystem};
    memcpy(pci->bus_id, now.bus_legacy, sizeof pci->bus_id);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo(void *device, struct pci_info_old *pci) { return nvmlDeviceGetPciInfo_v2(device, pci); }

static uint64_t memory_of(void *device, int *code)
{
    struct mig *mig = as_mig(device);
    struct gpu *gpu = mig ? &node.gpus[mig->gpu] : as_gpu(device);
    *code = !gpu ? INVALID_ARGUMENT : gpu->lost ? GPU_IS_LOST : SUCCESS;
    return *code ? 0 : mig ? mig_profile(mig)->memory_mib << 20 : gpu->memory;
}

API int nvmlDeviceGetMemoryInfo(void *device, uint64_t memory[3] /* total, free, used */)
{
    int code;
    ENTER();
    uint64_t total = memory_of(device, &code);
    if (!code)
        memory[0] = memory[1] = total, memory[2] = 0;
    return leave(code);
}

API int nvmlDeviceGetMemoryInfo_v2(void *device, uint64_t memory[5] /* version, total, reserved, free, used */)
{
    int code;
    ENTER();
    if ((uint32_t)memory[0] != (40u | 2u << 24))
        return leave(ARGUMENT_VERSION_MISMATCH);
    uint64_t total = memory_of(device, &code);
    if (!code)
        memory[1] = memory[3] = total, memory[2] = memory[4] = 0;
    return leave(code);
}

API int nvmlDeviceGetBAR1MemoryInfo(void *device, uint64_t memory[3])
{
    ENTER_GPU(device);
    memory[0] = memory[1] = 128ull << 30;
    memory[2] = 0;
    return leave(SUCCESS);
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    lock();
    struct mig *mig = as_mig(device);
    if (mig)
        device = &node.gpus[mig->gpu];
    unlock();
    ENTER_GPU(device);
    *major = (int)gpu->arch_major;
    *minor = (int)gpu->arch_minor;
    return leave(SUCCESS);
}

API int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2])
{
    ENTER_GPU(device);
    rates[0] = rates[1] = 0;
    return leave(SUCCESS);
}

API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius)
{
    ENTER_GPU(device);
    if (sensor)
        return leave(INVALID_ARGUMENT);
    *celsius = 30 + (unsigned)gpu_number(gpu) % 8;
    return leave(SUCCESS);
}

API int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending)
{
    ENTER_GPU(device);
    *current = *pending = 1;
    return leave(SUCCESS);
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos)
{
    (void)infos;
    ENTER_GPU(device);
    *count = 0;
    return leave(SUCCESS);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, void *infos)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

struct field_value { /* nvmlFieldValue_t */
    unsigned field, scope;
    int64_t timestamp, latency;
    unsigned type;
    int code;
    union { unsigned number; uint64_t wide; } value;
};

API int nvmlDeviceGetAddressingMode(void *device, unsigned mode[2] /* version, mode */)
{
    ENTER_GPU(device);
    if (!mode)
        return leave(INVALID_ARGUMENT);
    mode[1] = gpu->addressing;
    return leave(SUCCESS);
}

API int nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values)
{
    enum { RECOVERY_ACTION = 230, TYPE_UNSIGNED = 1 };
    ENTER_GPU(device);
    for (int i = 0; i < count; i++) {
        values[i].code = values[i].field == RECOVERY_ACTION ? SUCCESS : NOT_SUPPORTED;
        values[i].type = TYPE_UNSIGNED;
        values[i].value.wide = values[i].code ? 0 : gpu->recovery;
    }
    return leave(SUCCESS);
}
