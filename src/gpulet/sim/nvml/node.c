#define _GNU_SOURCE
#include "node.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/stat.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Behind the library's ELF image stand the description, its length (8 bytes, little endian) and this mark. */
static const char MARK[8] = {'G', 'P', 'U', 'L', 'E', 'T', 'S', '1'};

struct node node;
int initialised;

static char *description; /* NULL until read */
static size_t description_size;
static struct { uint64_t size, seconds, nanoseconds, inode; } control_seen;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }

int leave(int code)
{
    unlock();
    return code;
}

int copy_text(char *to, unsigned size, const char *text)
{
    size_t need = strlen(text) + 1;
    if (!to)
        return INVALID_ARGUMENT;
    if (need > size)
        return INSUFFICIENT_SIZE;
    memcpy(to, text, need);
    return SUCCESS;
}

/* --- where the description comes from --- */

static int find_self(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        uintptr_t here = (uintptr_t)&find_self;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && here >= start && here < start + info->dlpi_phdr[i].p_memsz) {
            copy_text(path, 4096, info->dlpi_name);
            return 1;
        }
    }
    return 0;
}

static char *read_file(const char *path, size_t *size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    off_t length = lseek(fd, 0, SEEK_END);
    char *bytes = length < 0 ? NULL : malloc((size_t)length + 1);
    size_t done = 0;
    while (bytes && done < (size_t)length) {
        ssize_t got = pread(fd, bytes + done, (size_t)length - done, (off_t)done);
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    close(fd);
    *size = done;
    return bytes;
}

/* The root is the folder above a lib, lib32 or lib64 in the library's path (and above usr where that comes before it):
 * the last one that has a dev folder beside it. The machine's own root where there is none, as when the driver's
 * files were mounted at a place of their own. */
static void set_root(const char *path)
{
    size_t best = 0;
    for (const char *at = path; (at = strchr(at, '/')); at++) {
        size_t length = strcspn(at + 1, "/");
        int is_lib = (length == 3 && !memcmp(at + 1, "lib", 3)) ||
                     (length == 5 && (!memcmp(at + 1, "lib64", 5) || !memcmp(at + 1, "lib32", 5)));
        if (!is_lib || at[1 + length] != '/')
            continue;
        size_t end = (size_t)(at - path);
        if (end >= 4 && !memcmp(path + end - 4, "/usr", 4))
            end -= 4;
        char dev[4096 + 8];
        snprintf(dev, sizeof dev, "%.*s/dev", (int)end, path);
        if (!access(dev, F_OK))
            best = end;
    }
    memcpy(node.root, path, best);
    node.root[best] = 0;
}

static int read_description(void)
{
    char path[4096] = "";
    size_t size = 0;
    uint64_t length = 0;
    dl_iterate_phdr(find_self, path);
    char *file = read_file(path, &size);
    if (file && size > 16 && !memcmp(file + size - 8, MARK, 8))
        memcpy(&length, file + size - 16, 8);
    if (!length || length > size - 16) {
        free(file);
        return -1;
    }
    description_size = (size_t)length;
    description = malloc(description_size);
    if (description)
        memcpy(description, file + size - 16 - description_size, description_size);
    free(file);
    if (!description)
        return -1;
    set_root(path);
    return 0;
}

/* Start again from the description and play the control file over it. Handles stay good: they point into `node`,
 * and what a process may see was settled when it initialised NVML. */
static void replay(void)
{
    struct { int visible, shown_index; } before[MAX_GPUS];
    for (int i = 0; i < MAX_GPUS; i++) {
        before[i].visible = node.gpus[i].visible;
        before[i].shown_index = node.gpus[i].shown_index;
    }
    memset(node.gpus, 0, sizeof node.gpus);
    for (int i = 0; i < MAX_GPUS; i++) {
        node.gpus[i].mig_mode = -1;
        node.gpus[i].visible = before[i].visible;
        node.gpus[i].shown_index = before[i].shown_index;
    }
    node.init_code = 0;
    node.init_ms = 0;
    node.fault_count = 0;
    node_parse(description, description_size);
    copy_text(node.library, sizeof node.library, node.driver);
    if (*node.control) {
        size_t size = 0;
        char *text = read_file(node.control, &size);
        if (text)
            node_parse(text, size);
        free(text);
    }
}

int node_refresh(void)
{
    int first = !description;
    if (first) {
        if (read_description())
            return -1;
        replay();
    }
    struct statx now = {0};
    /* Through syscall(): stat() became a symbol of its own in glibc 2.33 only, and statx() in 2.28. */
    syscall(SYS_statx, AT_FDCWD, node.control, 0, STATX_SIZE | STATX_MTIME | STATX_INO, &now);
    if (now.stx_size != control_seen.size || (uint64_t)now.stx_mtime.tv_sec != control_seen.seconds ||
        now.stx_mtime.tv_nsec != control_seen.nanoseconds || now.stx_ino != control_seen.inode) {
        control_seen.size = now.stx_size;
        control_seen.seconds = (uint64_t)now.stx_mtime.tv_sec;
        control_seen.nanoseconds = now.stx_mtime.tv_nsec;
        control_seen.inode = now.stx_ino;
        replay();
    }
    return 0;
}

/* --- what this process may see --- */

int node_may_open(const char *name, int number)
{
    char path[4096 + 64];
    int length = snprintf(path, sizeof path, "%s/dev/%s", node.root, name);
    if (number >= 0)
        snprintf(path + length, sizeof path - (size_t)length, "%d", number);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd >= 0) {
        close(fd);
        return 1;
    }
    return errno != EPERM && errno != EACCES && errno != ENOENT && errno != ENOTDIR;
}

void node_look(void)
{
    int shown = 0;
    for (int i = 0; i < MAX_GPUS; i++) {
        struct gpu *gpu = &node.gpus[i];
        gpu->visible = gpu->used && (node.wsl ? node_may_open("dxg", -1) : node_may_open("nvidia", (int)gpu->minor));
        gpu->shown_index = gpu->visible ? shown++ : -1;
    }
}

struct gpu *node_shown(unsigned index)
{
    for (int i = 0; i < MAX_GPUS; i++)
        if (node.gpus[i].visible && (unsigned)node.gpus[i].shown_index == index)
            return &node.gpus[i];
    return NULL;
}

unsigned node_shown_count(void)
{
    unsigned count = 0;
    for (int i = 0; i < MAX_GPUS; i++)
        count += node.gpus[i].visible != 0;
    return count;
}

int gpu_number(const struct gpu *gpu) { return (int)(gpu - node.gpus); }

struct gpu *as_gpu(void *handle)
{
    for (int i = 0; i < MAX_GPUS; i++)
        if (handle == &node.gpus[i] && node.gpus[i].visible)
            return &node.gpus[i];
    return NULL;
}

struct mig *as_mig(void *handle)
{
    for (int i = 0; i < MAX_GPUS; i++)
        for (int j = 0; j < MAX_MIG; j++)
            if (handle == &node.gpus[i].mig[j] && node.gpus[i].visible && node.gpus[i].mig[j].used)
                return &node.gpus[i].mig[j];
    return NULL;
}

struct profile *mig_profile(const struct mig *mig)
{
    return &node.gpus[mig->gpu].profiles[mig->gi_profile % MAX_PROFILES];
}

/* A MIG device needs both of its capability nodes, as with the real driver. */
int mig_visible(const struct mig *mig)
{
    return mig->used && node_may_open("nvidia-caps/nvidia-cap", (int)mig->gi_cap) &&
           node_may_open("nvidia-caps/nvidia-cap", (int)mig->ci_cap);
}
