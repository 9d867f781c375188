/* NVML's session and system calls. */
#include "node.h"

#include <stdio.h>
#include <unistd.h>

API int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    lock();
    if (node_refresh())
        return leave(UNKNOWN);
    unsigned ms = node.init_ms;
    unlock();
    usleep(ms * 1000); /* without the lock: a slow driver holds up only those who ask for it */
    lock();
    if (node.init_code)
        return leave(node.init_code);
    for (const char *a = node.driver, *b = node.library; *a || *b; a++, b++)
        if (*a != *b)
            return leave(LIB_RM_VERSION_MISMATCH);
    if (!initialised++)
        node_look();
    return leave(SUCCESS);
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void)
{
    ENTER();
    initialised--;
    return leave(SUCCESS);
}

API const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case 16: return "GPU requires restart";
    case 17: return "The operating system has blocked the request.";
    case LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch.";
    case 19: return "In use by another client";
    case MEMORY: return "Insufficient Memory";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER();
    return leave(copy_text(version, length, node.driver));
}

API int nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    lock();
    node_refresh();
    return leave(copy_text(version, length, node.nvml));
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER();
    if (!version)
        return leave(INVALID_ARGUMENT);
    *version = (int)node.cuda;
    return leave(SUCCESS);
}

API int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char path[64], text[16] = "";
    ENTER();
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return leave(NOT_FOUND);
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    if (size && text[size - 1] == '\n')
        text[size - 1] = 0;
    return leave(copy_text(name, length, text));
}
