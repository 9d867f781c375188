/* A small nvidia-smi: lists what libnvidia-ml.so.1 shows. "-L" as the real one prints it; without options a table. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int call();

static void *library;

static call *function(const char *name) { return (call *)dlsym(library, name); }

static int list(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        void *gpu, *mig;
        char name[96] = "?", uuid[96] = "?";
        unsigned slots = 0;
        if (function("nvmlDeviceGetHandleByIndex_v2")(i, &gpu)) {
            printf("Unable to determine the device handle for gpu %u: GPU is lost\n", i);
            continue;
        }
        function("nvmlDeviceGetName")(gpu, name, (unsigned)sizeof name);
        function("nvmlDeviceGetUUID")(gpu, uuid, (unsigned)sizeof uuid);
        printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        function("nvmlDeviceGetMaxMigDeviceCount")(gpu, &slots);
        for (unsigned j = 0; j < slots; j++) {
            if (function("nvmlDeviceGetMigDeviceHandleByIndex")(gpu, j, &mig))
                continue;
            char whole[192] = "?";
            function("nvmlDeviceGetName")(mig, whole, (unsigned)sizeof whole);
            function("nvmlDeviceGetUUID")(mig, uuid, (unsigned)sizeof uuid);
            const char *profile = strstr(whole, " MIG ");
            printf("  MIG %-12s Device %2u: (UUID: %s)\n", profile ? profile + 5 : whole, j, uuid);
        }
    }
    return 0;
}

static int table(unsigned count)
{
    char driver[80] = "?";
    int cuda = 0;
    function("nvmlSystemGetDriverVersion")(driver, (unsigned)sizeof driver);
    function("nvmlSystemGetCudaDriverVersion")(&cuda);
    printf("NVIDIA-SMI (simulated)   Driver Version: %s   CUDA Version: %d.%d\n", driver, cuda / 1000, cuda % 1000 / 10);
    for (unsigned i = 0; i < count; i++) {
        void *gpu;
        char name[96] = "?";
        unsigned long long memory[3] = {0};
        unsigned degrees = 0, milliwatts = 0, utilisation[2] = {0};
        struct { char old[16]; unsigned numbers[5]; char bus[32]; } pci = {0};
        if (function("nvmlDeviceGetHandleByIndex_v2")(i, &gpu)) {
            printf("%3u  GPU is lost\n", i);
            continue;
        }
        function("nvmlDeviceGetName")(gpu, name, (unsigned)sizeof name);
        function("nvmlDeviceGetMemoryInfo")(gpu, memory);
        function("nvmlDeviceGetTemperature")(gpu, 0, &degrees);
        function("nvmlDeviceGetPowerUsage")(gpu, &milliwatts);
        function("nvmlDeviceGetUtilizationRates")(gpu, utilisation);
        function("nvmlDeviceGetPciInfo_v3")(gpu, &pci);
        printf("%3u  %-28s %s  %2uC  %3uW  %6lluMiB / %6lluMiB  %3u%%\n", i, name, pci.bus, degrees, milliwatts / 1000,
               memory[2] >> 20, memory[0] >> 20, utilisation[0]);
    }
    if (!count)
        puts("No devices were found");
    return 0;
}

int main(int argc, char **argv)
{
    unsigned count = 0;
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly installed and present in your system.");
        return 12;
    }
    int code = function("nvmlInit_v2")();
    if (!code)
        code = function("nvmlDeviceGetCount_v2")(&count);
    if (code) {
        const char *(*explain)(int) = (const char *(*)(int))dlsym(library, "nvmlErrorString");
        printf("Failed to initialize NVML: %s\n", explain(code));
        return code > 255 ? 255 : code;
    }
    return argc > 1 && !strcmp(argv[1], "-L") ? list(count) : table(count);
}
