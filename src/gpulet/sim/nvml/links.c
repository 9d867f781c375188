/* NVML's calls about how GPUs reach each other. */
#include "node.h"

#include <stdio.h>
#include <string.h>

API int nvmlDeviceGetTopologyCommonAncestor(void *device, void *other, int *level)
{
    ENTER_GPU(device);
    struct gpu *second = as_gpu(other);
    if (!second)
        return leave(INVALID_ARGUMENT);
    if (second->lost)
        return leave(GPU_IS_LOST);
    *level = gpu->levels[gpu_number(second)];
    return leave(SUCCESS);
}

/* The GPU at the far end of a link, LINK_SWITCH, or LINK_NONE with the code to answer. */
static int far_end(const struct gpu *gpu, unsigned link, int *code)
{
    *code = link >= MAX_LINKS ? INVALID_ARGUMENT : link >= (unsigned)gpu->link_count ? NOT_SUPPORTED : SUCCESS;
    return *code ? LINK_NONE : gpu->links[link];
}

API int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{
    int code;
    ENTER_GPU(device);
    far_end(gpu, link, &code);
    if (!code)
        *active = 1;
    return leave(code);
}

API int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *version)
{
    int code;
    ENTER_GPU(device);
    far_end(gpu, link, &code);
    if (!code) /* V100: 2, A100: 3, H100: 4, B200: 5, numbered as nvmlNvlinkVersion_t */
        *version = gpu->arch_major >= 10 ? 7 : gpu->arch_major == 9 ? 6 : gpu->arch_major == 8 ? 5 : 2;
    return leave(code);
}

API int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, int capability, unsigned *result)
{
    enum { SLI_BRIDGE = 4, CAPABILITIES = 6 };
    int code;
    ENTER_GPU(device);
    if (capability < 0 || capability >= CAPABILITIES)
        return leave(INVALID_ARGUMENT);
    far_end(gpu, link, &code);
    if (!code)
        *result = capability != SLI_BRIDGE;
    return leave(code);
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *type)
{
    enum { GPU = 0, SWITCH = 2 };
    int code;
    ENTER_GPU(device);
    int end = far_end(gpu, link, &code);
    if (!code)
        *type = end == LINK_SWITCH ? SWITCH : GPU;
    return leave(code);
}

struct remote_pci { /* nvmlPciInfo_t */
    char bus_legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

/* NVSwitches are devices of a bus that no GPU of ours is on; a GPU's links are dealt out among four of them. */
static void switch_pci(unsigned link, struct remote_pci *pci)
{
    pci->bus = 0xfe;
    pci->device = link % 4;
    pci->id = 0x22a310de;
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:%02X.0", pci->bus, pci->device);
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct remote_pci *pci)
{
    int code;
    ENTER_GPU(device);
    int end = far_end(gpu, link, &code);
    if (code)
        return leave(code);
    memset(pci, 0, sizeof *pci);
    if (end == LINK_SWITCH)
        switch_pci(link, pci);
    else {
        const struct gpu *other = &node.gpus[end];
        pci->domain = other->bus_domain;
        pci->bus = other->bus_bus;
        pci->device = other->bus_device;
        pci->id = other->pci_device;
        pci->subsystem = other->pci_subsystem;
        copy_text(pci->bus_id, sizeof pci->bus_id, other->bus);
    }
    copy_text(pci->bus_legacy, sizeof pci->bus_legacy, pci->bus_id + 4);
    return leave(SUCCESS);
}

API int nvmlDeviceGetNvLinkRemotePciInfo(void *device, unsigned link, struct remote_pci *pci)
{
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

API int nvmlDeviceGetP2PStatus(void *device, void *other, int index, int *status)
{
    enum { NVLINK = 2, OK = 0, NOT = 5 };
    ENTER_GPU(device);
    struct gpu *second = as_gpu(other);
    if (!second)
        return leave(INVALID_ARGUMENT);
    int joined = 0, through_switch = 0;
    for (int i = 0; i < gpu->link_count; i++) {
        joined |= gpu->links[i] == gpu_number(second);
        through_switch |= gpu->links[i] == LINK_SWITCH;
    }
    for (int i = 0; through_switch && i < second->link_count; i++)
        joined |= second->links[i] == LINK_SWITCH;
    *status = index == NVLINK ? (joined ? OK : NOT) : OK;
    return leave(SUCCESS);
}

struct fabric_info { /* nvmlGpuFabricInfo_t */
    uint8_t cluster[16];
    int status;
    unsigned clique;
    uint8_t state;
};

static void fill_cluster(uint8_t cluster[16])
{
    unsigned digits = 0;
    memset(cluster, 0, 16);
    for (const char *at = node.fabric; *at && digits < 32; at++)
        if (*at != '-') {
            unsigned value = *at <= '9' ? (unsigned)(*at - '0') : (unsigned)((*at | 32) - 'a' + 10);
            cluster[digits / 2] = (uint8_t)(cluster[digits / 2] << 4 | value);
            digits++;
        }
}

API int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric_info *info)
{
    ENTER_GPU(device);
    info->status = SUCCESS;
    info->clique = node.clique;
    info->state = (uint8_t)node.fabric_state;
    fill_cluster(info->cluster);
    return leave(SUCCESS);
}

struct fabric_info_v { /* nvmlGpuFabricInfo_v2_t; v3 adds one byte behind it */
    unsigned version;
    uint8_t cluster[16];
    int status;
    unsigned clique;
    uint8_t state;
    unsigned health_mask;
};

API int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_info_v *info)
{
    ENTER_GPU(device);
    if (info->version != 0x02000024 && info->version != 0x03000028)
        return leave(ARGUMENT_VERSION_MISMATCH);
    info->status = SUCCESS;
    info->clique = node.clique;
    info->state = (uint8_t)node.fabric_state;
    info->health_mask = 0;
    fill_cluster(info->cluster);
    if (info->version == 0x03000028)
        ((uint8_t *)info)[sizeof *info] = 1; /* healthy */
    return leave(SUCCESS);
}
