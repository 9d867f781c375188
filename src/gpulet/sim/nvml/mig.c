/* NVML's calls about MIG: the devices, and the instances and profiles behind them. */
#include "node.h"

#include <string.h>

API int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    ENTER_GPU(device);
    if (gpu->mig_mode < 0)
        return leave(NOT_SUPPORTED);
    *current = *pending = (unsigned)gpu->mig_mode;
    return leave(SUCCESS);
}

API int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count)
{
    ENTER_GPU(device);
    *count = 0;
    for (int i = 0; gpu->mig_mode >= 0 && i < MAX_PROFILES; i++) /* as many as the smallest instances that fit */
        if (gpu->profiles[i].used && gpu->profiles[i].count > *count)
            *count = gpu->profiles[i].count;
    return leave(SUCCESS);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **handle)
{
    ENTER_GPU(device);
    if (gpu->mig_mode < 0)
        return leave(NOT_SUPPORTED);
    if (index >= MAX_MIG)
        return leave(INVALID_ARGUMENT);
    if (gpu->mig_mode != 1 || !mig_visible(&gpu->mig[index]))
        return leave(NOT_FOUND);
    *handle = &gpu->mig[index];
    return leave(SUCCESS);
}

API int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *answer)
{
    ENTER();
    *answer = as_mig(device) != NULL;
    return leave(*answer || as_gpu(device) ? SUCCESS : INVALID_ARGUMENT);
}

#define ENTER_MIG(handle)               \
    ENTER();                            \
    struct mig *mig = as_mig(handle);   \
    if (!mig)                           \
        return leave(INVALID_ARGUMENT); \
    if (node.gpus[mig->gpu].lost)       \
        return leave(GPU_IS_LOST)

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **parent)
{
    ENTER_MIG(device);
    *parent = &node.gpus[mig->gpu];
    return leave(SUCCESS);
}

API int nvmlDeviceGetGpuInstanceId(void *device, unsigned *id)
{
    ENTER_MIG(device);
    *id = mig->gi;
    return leave(SUCCESS);
}

API int nvmlDeviceGetComputeInstanceId(void *device, unsigned *id)
{
    ENTER_MIG(device);
    *id = mig->ci;
    return leave(SUCCESS);
}

struct attributes { /* nvmlDeviceAttributes_t */
    unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, gi_slices, ci_slices;
    uint64_t memory_mib;
};

API int nvmlDeviceGetAttributes_v2(void *device, struct attributes *answer)
{
    ENTER_MIG(device);
    const struct profile *profile = mig_profile(mig);
    *answer = (struct attributes){.multiprocessors = profile->sms * mig->ci_slices / (profile->slices ? profile->slices : 1),
                                  .copy = profile->copy,
                                  .decoders = profile->decoders,
                                  .encoders = profile->encoders,
                                  .jpeg = profile->jpeg,
                                  .ofa = profile->ofa,
                                  .gi_slices = profile->slices,
                                  .ci_slices = mig->ci_slices,
                                  .memory_mib = profile->memory_mib};
    return leave(SUCCESS);
}

API int nvmlDeviceGetAttributes(void *device, struct attributes *answer) { return nvmlDeviceGetAttributes_v2(device, answer); }

/* --- profiles --- */

struct gi_profile { /* nvmlGpuInstanceProfileInfo_t */
    unsigned id, p2p, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
    uint64_t memory_mib;
};

struct gi_profile_v2 {
    unsigned version, id, p2p, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
    uint64_t memory_mib;
    char name[96];
};

struct gi_profile_v3 { /* sets in `capabilities` what v2 had as p2p */
    unsigned version, id, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
    uint64_t memory_mib;
    char name[96];
    unsigned capabilities;
};

static const struct profile *find_profile(const struct gpu *gpu, unsigned kind, int *code)
{
    *code = kind >= MAX_PROFILES ? INVALID_ARGUMENT
            : gpu->mig_mode < 0 || !gpu->profiles[kind].used ? NOT_SUPPORTED : SUCCESS;
    return *code ? NULL : &gpu->profiles[kind];
}

API int nvmlDeviceGetGpuInstanceProfileInfo(void *device, unsigned kind, struct gi_profile *info)
{
    int code;
    ENTER_GPU(device);
    const struct profile *p = find_profile(gpu, kind, &code);
    if (!code)
        *info = (struct gi_profile){p->id, 0, p->slices, p->count, p->sms, p->copy, p->decoders, p->encoders,
                                    p->jpeg, p->ofa, p->memory_mib};
    return leave(code);
}

static int fill_v2(const struct profile *p, void *info)
{
    struct gi_profile_v2 *v2 = info;
    struct gi_profile_v3 *v3 = info;
    unsigned version = v2->version;
    if (version == (sizeof *v2 | 2u << 24)) {
        *v2 = (struct gi_profile_v2){version, p->id, 0, p->slices, p->count, p->sms, p->copy, p->decoders,
                                     p->encoders, p->jpeg, p->ofa, p->memory_mib, ""};
        return copy_text(v2->name, sizeof v2->name, p->name);
    }
    if (version == (sizeof *v3 | 3u << 24)) {
        *v3 = (struct gi_profile_v3){version, p->id, p->slices, p->count, p->sms, p->copy, p->decoders,
                                     p->encoders, p->jpeg, p->ofa, p->memory_mib, "", 0};
        return copy_text(v3->name, sizeof v3->name, p->name);
    }
    return ARGUMENT_VERSION_MISMATCH;
}

API int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned kind, void *info)
{
    int code;
    ENTER_GPU(device);
    const struct profile *p = find_profile(gpu, kind, &code);
    return leave(code ? code : fill_v2(p, info));
}

API int nvmlDeviceGetGpuInstanceProfileInfoByIdV(void *device, unsigned id, void *info)
{
    ENTER_GPU(device);
    for (int i = 0; i < MAX_PROFILES; i++)
        if (gpu->profiles[i].used && gpu->profiles[i].id == id)
            return leave(fill_v2(&gpu->profiles[i], info));
    return leave(gpu->mig_mode < 0 ? NOT_SUPPORTED : NOT_FOUND);
}

/* --- GPU instances: the handle is the first MIG device in them --- */

struct placement { unsigned start, size; };

static struct mig *find_instance(struct gpu *gpu, unsigned gi)
{
    for (int i = 0; i < MAX_MIG; i++)
        if (gpu->mig[i].used && gpu->mig[i].gi == gi)
            return &gpu->mig[i];
    return NULL;
}

API int nvmlDeviceGetGpuInstanceById(void *device, unsigned id, void **instance)
{
    ENTER_GPU(device);
    if (gpu->mig_mode < 0)
        return leave(NOT_SUPPORTED);
    *instance = find_instance(gpu, id);
    return leave(*instance ? SUCCESS : NOT_FOUND);
}

API int nvmlDeviceGetGpuInstances(void *device, unsigned profile_id, void **instances, unsigned *count)
{
    ENTER_GPU(device);
    if (gpu->mig_mode < 0)
        return leave(NOT_SUPPORTED);
    *count = 0;
    for (int i = 0; i < MAX_MIG; i++)
        if (gpu->mig[i].used && find_instance(gpu, gpu->mig[i].gi) == &gpu->mig[i] &&
            mig_profile(&gpu->mig[i])->id == profile_id)
            instances[(*count)++] = &gpu->mig[i];
    return leave(SUCCESS);
}

struct gi_info { /* nvmlGpuInstanceInfo_t */
    void *device;
    unsigned id, profile;
    struct placement placement;
};

API int nvmlGpuInstanceGetInfo(void *instance, struct gi_info *info)
{
    ENTER_MIG(instance);
    *info = (struct gi_info){&node.gpus[mig->gpu], mig->gi, mig_profile(mig)->id, {mig->start, mig->size}};
    return leave(SUCCESS);
}

/* --- compute instances: nvml.h numbers their profiles by slices --- */

static const unsigned CI_SLICES[] = {1, 2, 3, 4, 7, 8, 6, 1, 7};
enum { CI_PROFILES = sizeof CI_SLICES / sizeof *CI_SLICES, FIRST_VARIANT = 7 };

static unsigned ci_profile_of(unsigned slices)
{
    unsigned kind = 0;
    while (kind < FIRST_VARIANT && CI_SLICES[kind] != slices)
        kind++;
    return kind;
}

struct ci_profile { /* nvmlComputeInstanceProfileInfo_t */
    unsigned id, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
};

static int fill_ci_profile(const struct mig *mig, unsigned kind, unsigned engine, struct ci_profile *info)
{
    const struct profile *p = mig_profile(mig);
    if (kind >= CI_PROFILES || engine)
        return INVALID_ARGUMENT;
    if (kind >= FIRST_VARIANT || CI_SLICES[kind] > p->slices)
        return NOT_SUPPORTED;
    unsigned slices = CI_SLICES[kind];
    *info = (struct ci_profile){kind, slices, p->slices / slices, p->sms * slices / p->slices, p->copy, p->decoders,
                                p->encoders, p->jpeg, p->ofa};
    return SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, unsigned kind, unsigned engine, struct ci_profile *info)
{
    ENTER_MIG(instance);
    return leave(fill_ci_profile(mig, kind, engine, info));
}

struct ci_profile_v2 {
    unsigned version;
    struct ci_profile info;
    char name[96];
};

API int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned kind, unsigned engine, struct ci_profile_v2 *info)
{
    ENTER_MIG(instance);
    if (info->version != (sizeof *info | 2u << 24))
        return leave(ARGUMENT_VERSION_MISMATCH);
    int code = fill_ci_profile(mig, kind, engine, &info->info);
    if (!code)
        copy_text(info->name, sizeof info->name, mig_profile(mig)->name);
    return leave(code);
}

API int nvmlGpuInstanceGetComputeInstanceById(void *instance, unsigned id, void **compute)
{
    ENTER_MIG(instance);
    struct gpu *gpu = &node.gpus[mig->gpu];
    for (int i = 0; i < MAX_MIG; i++)
        if (gpu->mig[i].used && gpu->mig[i].gi == mig->gi && gpu->mig[i].ci == id) {
            *compute = &gpu->mig[i];
            return leave(SUCCESS);
        }
    return leave(NOT_FOUND);
}

struct ci_info { /* nvmlComputeInstanceInfo_t */
    void *device, *instance;
    unsigned id, profile;
    struct placement placement;
};

API int nvmlComputeInstanceGetInfo_v2(void *compute, struct ci_info *info)
{
    ENTER_MIG(compute);
    struct gpu *gpu = &node.gpus[mig->gpu];
    *info = (struct ci_info){gpu, find_instance(gpu, mig->gi), mig->ci, ci_profile_of(mig->ci_slices),
                             {mig->ci * mig->ci_slices, mig->ci_slices}};
    return leave(SUCCESS);
}

API int nvmlComputeInstanceGetInfo(void *compute, struct ci_info *info) { return nvmlComputeInstanceGetInfo_v2(compute, info); }
