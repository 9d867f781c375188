/* The grammar of the description and of the control file: "node KEY VALUE..." and "gpu NUMBER KEY VALUE...", words
 * apart by one blank. What a later line says takes the place of what an earlier one said. */
#include "node.h"

#include <stdlib.h>
#include <string.h>

static const char *word(const char **at)
{
    static char buffer[4096];
    size_t size = 0;
    while (**at == ' ')
        ++*at;
    while (**at && **at != ' ' && size + 1 < sizeof buffer)
        buffer[size++] = *(*at)++;
    buffer[size] = 0;
    return buffer;
}

/* Not strtol or sscanf: recent headers turn those into names that older C libraries lack. */
static uint64_t number_of(const char *text, unsigned base)
{
    uint64_t value = 0;
    for (; *text; text++) {
        unsigned digit = *text <= '9' ? (unsigned)(*text - '0') : (unsigned)((*text | 32) - 'a' + 10);
        if (digit >= base)
            break;
        value = value * base + digit;
    }
    return value;
}

static uint64_t number(const char **at) { return number_of(word(at), 10); }
static unsigned hexadecimal(const char **at) { return (unsigned)number_of(word(at), 16); }

static void rest(char *to, size_t size, const char *at)
{
    while (*at == ' ')
        at++;
    copy_text(to, (unsigned)size, at);
}

static void node_line(const char *at)
{
    const char *key = word(&at);
    if (!strcmp(key, "driver"))
        rest(node.driver, sizeof node.driver, at);
    else if (!strcmp(key, "nvml"))
        rest(node.nvml, sizeof node.nvml, at);
    else if (!strcmp(key, "control"))
        rest(node.control, sizeof node.control, at);
    else if (!strcmp(key, "cuda"))
        node.cuda = (unsigned)number(&at);
    else if (!strcmp(key, "wsl"))
        node.wsl = (int)number(&at);
    else if (!strcmp(key, "fabric")) {
        node.fabric_state = (int)number(&at);
        node.clique = (unsigned)number(&at);
        rest(node.fabric, sizeof node.fabric, at);
    } else if (!strcmp(key, "fails"))
        node.init_code = (int)number(&at);
    else if (!strcmp(key, "takes"))
        node.init_ms = (unsigned)number(&at);
}

static void set_bus(struct gpu *gpu, const char *at)
{
    char text[32] = "";
    rest(text, sizeof text, at);
    for (size_t i = 0; i < sizeof text; i++) /* NVML writes capitals, the kernel small letters */
        gpu->bus[i] = (char)(text[i] >= 'a' && text[i] <= 'f' ? text[i] - 32 : text[i]);
    gpu->bus_domain = (unsigned)number_of(text, 16);
    if (strlen(text) >= 14) { /* 00000000:19:00.0 */
        gpu->bus_bus = (unsigned)number_of(text + 9, 16);
        gpu->bus_device = (unsigned)number_of(text + 12, 16);
    }
}

static void add_profile(struct gpu *gpu, const char *at)
{
    struct profile made = {.used = 1, .kind = (unsigned)number(&at)};
    if (made.kind >= MAX_PROFILES)
        return;
    unsigned *fields[] = {&made.id,       &made.slices,   &made.count, &made.sms, &made.copy,
                          &made.decoders, &made.encoders, &made.jpeg,  &made.ofa, &made.size};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        *fields[i] = (unsigned)number(&at);
    made.memory_mib = number(&at);
    rest(made.name, sizeof made.name, at);
    gpu->profiles[made.kind] = made;
}

static void add_mig(struct gpu *gpu, const char *at)
{
    unsigned slot = (unsigned)number(&at);
    struct mig made = {.used = 1, .gpu = gpu_number(gpu), .slot = (int)slot};
    if (slot >= MAX_MIG)
        return;
    copy_text(made.uuid, sizeof made.uuid, word(&at));
    unsigned *fields[] = {&made.gi,   &made.ci,     &made.gi_profile, &made.ci_slices, &made.start,
                          &made.size, &made.gi_cap, &made.ci_cap};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        *fields[i] = (unsigned)number(&at);
    gpu->mig[slot] = made;
}

static void add_fault(int gpu, const char *at)
{
    struct fault *grown = realloc(node.faults, (node.fault_count + 1) * sizeof *grown);
    if (!grown)
        return;
    struct fault made = {.gpu = gpu, .xid = (unsigned)number(&at), .gi = UINT32_MAX, .ci = UINT32_MAX};
    if (*at) {
        made.gi = (unsigned)number(&at);
        made.ci = (unsigned)number(&at);
    }
    node.faults = grown;
    node.faults[node.fault_count++] = made;
}

static void gpu_line(const char *at)
{
    unsigned index = (unsigned)number(&at);
    if (index >= MAX_GPUS)
        return;
    struct gpu *gpu = &node.gpus[index];
    const char *key = word(&at);
    gpu->used = 1;
    if (!strcmp(key, "minor"))
        gpu->minor = (unsigned)number(&at);
    else if (!strcmp(key, "uuid"))
        rest(gpu->uuid, sizeof gpu->uuid, at);
    else if (!strcmp(key, "name"))
        rest(gpu->name, sizeof gpu->name, at);
    else if (!strcmp(key, "serial"))
        rest(gpu->serial, sizeof gpu->serial, at);
    else if (!strcmp(key, "board"))
        rest(gpu->board, sizeof gpu->board, at);
    else if (!strcmp(key, "vbios"))
        rest(gpu->vbios, sizeof gpu->vbios, at);
    else if (!strcmp(key, "bus"))
        set_bus(gpu, at);
    else if (!strcmp(key, "pci")) {
        gpu->pci_device = hexadecimal(&at);
        gpu->pci_subsystem = hexadecimal(&at);
    } else if (!strcmp(key, "brand"))
        gpu->brand = (unsigned)number(&at);
    else if (!strcmp(key, "arch")) {
        gpu->arch_major = (unsigned)number(&at);
        gpu->arch_minor = (unsigned)number(&at);
    } else if (!strcmp(key, "addressing"))
        gpu->addressing = (unsigned)number(&at);
    else if (!strcmp(key, "memory"))
        gpu->memory = number(&at);
    else if (!strcmp(key, "levels"))
        for (int i = 0; *at && i < MAX_GPUS; i++)
            gpu->levels[i] = (int)number(&at);
    else if (!strcmp(key, "links"))
        for (gpu->link_count = 0; *at && gpu->link_count < MAX_LINKS; gpu->link_count++) {
            const char *end = word(&at);
            gpu->links[gpu->link_count] = *end == 's' ? LINK_SWITCH : (int)number_of(end, 10);
        }
    else if (!strcmp(key, "mode"))
        gpu->mig_mode = (int)number(&at);
    else if (!strcmp(key, "profile"))
        add_profile(gpu, at);
    else if (!strcmp(key, "nomig"))
        memset(gpu->mig, 0, sizeof gpu->mig);
    else if (!strcmp(key, "mig"))
        add_mig(gpu, at);
    else if (!strcmp(key, "xid"))
        add_fault((int)index, at);
    else if (!strcmp(key, "lost"))
        gpu->lost = 1;
    else if (!strcmp(key, "found"))
        gpu->lost = 0;
    else if (!strcmp(key, "recovery"))
        gpu->recovery = (unsigned)number(&at);
}

void node_parse(const char *text, size_t size)
{
    char line[4096];
    for (const char *end = text + size; text < end;) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        if (!stop)
            return; /* a line still being written */
        size_t length = (size_t)(stop - text);
        if (length < sizeof line) {
            memcpy(line, text, length);
            line[length] = 0;
            const char *at = line;
            const char *kind = word(&at);
            if (!strcmp(kind, "gpu"))
                gpu_line(at);
            else if (!strcmp(kind, "node"))
                node_line(at);
        }
        text = stop + 1;
    }
}
