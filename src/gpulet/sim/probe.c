/* gpulet-probe: says in one line of JSON what a container really got. Runs as a container's first process.
 *
 *   gpulet-probe [--minors 0-7] [--hold] [--json-file FILE]
 *
 * devices    the NVIDIA device nodes in /dev
 * nvml       the GPUs and MIG devices that libnvidia-ml.so.1, found by its name, lists; nvml_error where it can't
 * opened     of the given minors of the NVIDIA major (195), those that the device cgroup lets through: the open works,
 *            or the kernel says that no driver is behind the node (ENXIO, ENODEV)
 * denied     those it refuses (EPERM, EACCES). A GPU without a node in /dev is tried through a node of our own, since
 *            what isolates a container is the cgroup, not the lack of a name
 * files      the mounts that concern the driver, with their flags
 * libraries  where the loader finds the two libraries that matter most
 *
 * --hold: stay until SIGTERM or SIGINT. Built with -DSTATIC it can't load libraries and says so.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#ifndef STATIC
#include <dlfcn.h>
#include <link.h>
#endif

enum { NVIDIA_MAJOR = 195, MAX_MINOR = 1 << 20, MAX_NAMES = 4096 };

static FILE *out;

static void text(const char *value)
{
    if (!value) {
        fputs("null", out);
        return;
    }
    putc('"', out);
    for (; *value; value++) {
        unsigned char c = (unsigned char)*value;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < ' ')
            fprintf(out, "\\u%04x", c);
        else
            putc(c, out);
    }
    putc('"', out);
}

/* --- device nodes --- */

static char *names[MAX_NAMES];
static int name_count;

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void look(const char *folder, int deeper)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    for (struct dirent *entry; (entry = readdir(dir));) {
        char *path;
        struct stat st;
        int wanted = deeper ? !strncmp(entry->d_name, "nvidia", 6) || !strcmp(entry->d_name, "dxg") : entry->d_name[0] != '.';
        if (!wanted || asprintf(&path, "%s/%s", folder, entry->d_name) < 0)
            continue;
        if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
            if (deeper)
                look(path, 0);
            free(path);
        } else if (name_count < MAX_NAMES)
            names[name_count++] = path;
    }
    closedir(dir);
}

static void devices(void)
{
    look("/dev", 1);
    qsort(names, (size_t)name_count, sizeof *names, by_text);
    fputs("\"devices\": [", out);
    for (int i = 0; i < name_count; i++) {
        fputs(i ? ", " : "", out);
        text(names[i]);
    }
    fputs("]", out);
}

/* 1: the cgroup lets it through, 0: refused, -1: can't be told. */
static int try_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd >= 0) {
        close(fd);
        return 1;
    }
    if (errno == ENXIO || errno == ENODEV)
        return 1;
    return errno == EPERM || errno == EACCES ? 0 : -1;
}

static int try_minor(int minor)
{
    static const char *const folders[] = {"/tmp", "/dev"};
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/dev/nvidia%d", minor);
    if (stat(path, &st) == 0 && S_ISCHR(st.st_mode))
        return try_open(path);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        struct statvfs fs;
        if (statvfs(folders[i], &fs) || fs.f_flag & (ST_NODEV | ST_RDONLY))
            continue;
        snprintf(path, sizeof path, "%s/.gpulet-probe-%d-%d", folders[i], (int)getpid(), minor);
        if (mknod(path, S_IFCHR | 0600, makedev(NVIDIA_MAJOR, minor)))
            return errno == EPERM || errno == EACCES ? 0 : -1;
        int answer = try_open(path);
        unlink(path);
        return answer;
    }
    return -1;
}

static void cgroup(int first, int last)
{
    for (int wanted = 1; wanted >= 0; wanted--) {
        int any = 0;
        fputs(wanted ? ", \"opened\": [" : "], \"denied\": [", out);
        for (int minor = first; minor <= last; minor++)
            if (try_minor(minor) == wanted)
                fprintf(out, "%s%d", any++ ? ", " : "", minor);
    }
    fputs("]", out);
}

/* --- NVML --- */

#ifdef STATIC
static void nvml(void) { fputs(", \"nvml\": [], \"nvml_error\": \"this probe is static and loads no library\"", out); }

static void libraries(void) { fputs(", \"libraries\": {\"libcuda.so.1\": null, \"libnvidia-ml.so.1\": null}", out); }
#else
static void one_device(int *any, const char *uuid, const char *name)
{
    fputs((*any)++ ? ", {\"uuid\": " : "{\"uuid\": ", out);
    text(uuid);
    fputs(", \"name\": ", out);
    text(name);
    putc('}', out);
}

static const char *list_devices(void *library, int *any)
{
    static char problem[256];
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*count_of)(unsigned *) = (int (*)(unsigned *))dlsym(library, "nvmlDeviceGetCount_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    int (*uuid_of)(void *, char *, unsigned) = (int (*)(void *, char *, unsigned))dlsym(library, "nvmlDeviceGetUUID");
    int (*name_of)(void *, char *, unsigned) = (int (*)(void *, char *, unsigned))dlsym(library, "nvmlDeviceGetName");
    int (*migs)(void *, unsigned *) = (int (*)(void *, unsigned *))dlsym(library, "nvmlDeviceGetMaxMigDeviceCount");
    int (*mig_by_index)(void *, unsigned, void **) = (int (*)(void *, unsigned, void **))dlsym(library, "nvmlDeviceGetMigDeviceHandleByIndex");
    const char *(*explain)(int) = (const char *(*)(int))dlsym(library, "nvmlErrorString");
    unsigned count = 0, slots = 0;
    if (!init || !count_of || !by_index || !uuid_of || !name_of || !explain)
        return "libnvidia-ml.so.1 lacks a function";
    int code = init();
    if (!code)
        code = count_of(&count);
    for (unsigned i = 0; !code && i < count; i++) {
        void *device, *mig;
        char uuid[96], name[96], mig_name[192];
        int one = by_index(i, &device);
        if (!one)
            one = uuid_of(device, uuid, sizeof uuid);
        if (!one)
            one = name_of(device, name, sizeof name);
        if (one) {
            snprintf(problem, sizeof problem, "GPU %u: %s", i, explain(one));
            continue;
        }
        one_device(any, uuid, name);
        if (!migs || !mig_by_index || migs(device, &slots))
            continue;
        for (unsigned j = 0; j < slots; j++)
            if (!mig_by_index(device, j, &mig) && !uuid_of(mig, uuid, sizeof uuid) && !name_of(mig, mig_name, sizeof mig_name))
                one_device(any, uuid, mig_name);
    }
    if (code)
        snprintf(problem, sizeof problem, "%s", explain(code));
    return *problem ? problem : NULL;
}

static void nvml(void)
{
    int any = 0;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    const char *problem = library ? NULL : dlerror();
    fputs(", \"nvml\": [", out);
    if (library)
        problem = list_devices(library, &any);
    fputs("], \"nvml_error\": ", out);
    text(problem);
}

static void libraries(void)
{
    static const char *const wanted[] = {"libcuda.so.1", "libnvidia-ml.so.1"};
    fputs(", \"libraries\": {", out);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct link_map *map = NULL;
        void *library = dlopen(wanted[i], RTLD_LAZY);
        if (library)
            dlinfo(library, RTLD_DI_LINKMAP, &map);
        fputs(i ? ", " : "", out);
        text(wanted[i]);
        fputs(": ", out);
        text(map ? map->l_name : NULL);
    }
    putc('}', out);
}
#endif

/* --- mounts and environment --- */

static int concerns_driver(const char *path)
{
    static const char *const marks[] = {"nvidia", "libcuda", "libnv", "/lib/firmware", "libGL", "libEGL", "ld.so.cache", "libdxcore"};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (strstr(path, marks[i]))
            return 1;
    return 0;
}

/* proc(5): blank, tab, newline and backslash stand as octal escapes. */
static void unescape(char *path)
{
    char *to = path;
    for (; *path; path++)
        if (path[0] == '\\' && path[1] && path[2] && path[3]) {
            *to++ = (char)((path[1] - '0') * 64 + (path[2] - '0') * 8 + path[3] - '0');
            path += 3;
        } else
            *to++ = *path;
    *to = 0;
}

static void mounts(void)
{
    char *line = NULL;
    size_t size = 0;
    int any = 0;
    FILE *file = fopen("/proc/self/mountinfo", "re");
    fputs(", \"files\": [", out);
    while (file && getline(&line, &size, file) > 0) {
        char *fields[6] = {0}, *at = line;
        for (int i = 0; i < 6 && at; i++)
            fields[i] = strsep(&at, " ");
        if (!fields[5])
            continue;
        unescape(fields[4]);
        if (!concerns_driver(fields[4]))
            continue;
        fputs(any++ ? ", {\"path\": " : "{\"path\": ", out);
        text(fields[4]);
        fputs(", \"flags\": [", out);
        char *flags = fields[5];
        for (char *flag; (flag = strsep(&flags, ","));) {
            text(flag);
            fputs(flags ? ", " : "", out);
        }
        fputs("]}", out);
    }
    fputs("]", out);
    if (file)
        fclose(file);
}

static void environment(void)
{
    fputs(", \"env\": {\"NVIDIA_VISIBLE_DEVICES\": ", out);
    text(getenv("NVIDIA_VISIBLE_DEVICES"));
    fputs(", \"CUDA_VISIBLE_DEVICES\": ", out);
    text(getenv("CUDA_VISIBLE_DEVICES"));
    fputs("}", out);
}

int main(int argc, char **argv)
{
    int first = 0, last = 63, hold = 0;
    const char *file = NULL;
    sigset_t stop;
    /* As a container's first process it gets no signal that it doesn't ask for: block before anybody may send one. */
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigaddset(&stop, SIGINT);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--hold"))
            hold = 1;
        else if (!strcmp(argv[i], "--json-file") && i + 1 < argc)
            file = argv[++i];
        else if (!strcmp(argv[i], "--minors") && i + 1 < argc) {
            char *end;
            first = (int)strtol(argv[++i], &end, 10);
            last = *end == '-' ? (int)strtol(end + 1, NULL, 10) : first;
            if (last >= MAX_MINOR)
                last = MAX_MINOR - 1;
        } else {
            fprintf(stderr, "usage: gpulet-probe [--minors FIRST-LAST] [--hold] [--json-file FILE]\n");
            return 2;
        }
    }
    if (hold)
        sigprocmask(SIG_BLOCK, &stop, NULL);
    char *line = NULL;
    size_t size = 0;
    out = open_memstream(&line, &size);
    if (!out)
        return 1;
    putc('{', out);
    devices();
    cgroup(first, last);
    nvml();
    libraries();
    mounts();
    environment();
    fputs("}\n", out);
    fclose(out);
    if (file) {
        FILE *copy = fopen(file, "we");
        if (!copy || fwrite(line, 1, size, copy) != size || fclose(copy)) {
            perror(file);
            return 1;
        }
    }
    if (fwrite(line, 1, size, stdout) != size || fflush(stdout))
        return 1;
    if (hold) {
        int signal;
        sigwait(&stop, &signal);
    }
    return 0;
}
