/* The stand-in libdxcore.so of a WSL node: as many display adapters as ADAPTERS says, all served by the one driver
 * package whose folder STORE names. Structures and numbers are those of Windows' d3dkmthk.h, as its Linux subsystem has
 * them: a character of a string is a wchar_t, and a handle 32 bits wide.
 */
#include <stddef.h>
#include <string.h>
#include <wchar.h>

#ifndef ADAPTERS
#define ADAPTERS 1
#endif
#ifndef STORE
#define STORE "/usr/lib/wsl/drivers/none"
#endif
#define WIDE_(text) L##text
#define WIDE(text) WIDE_(text)
#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_PARAMETER = (int)0xc000000du, BUFFER_TOO_SMALL = (int)0xc0000023u }; /* NTSTATUS */
enum { FIRST_HANDLE = 0x40000000, WDDM_3_0 = 3000 };
enum { KMTQAITYPE_DRIVERVERSION = 13, KMTQAITYPE_QUERYREGISTRY = 48 };
enum { DRIVERSTOREPATH = 2 };                  /* D3DDDI_QUERYREGISTRY_TYPE */
enum { DONE = 0, BUFFER_OVERFLOW = 1, FAIL = 2 }; /* D3DDDI_QUERYREGISTRY_STATUS */

struct adapter { /* D3DKMT_ADAPTERINFO */
    unsigned handle, luid_low;
    int luid_high;
    unsigned sources, moves_preferred;
};

struct enum2 { /* D3DKMT_ENUMADAPTERS2 */
    unsigned count;
    struct adapter *adapters;
};

struct enum3 { /* D3DKMT_ENUMADAPTERS3: the filter only adds kinds that an Nvidia GPU isn't */
    unsigned long long filter;
    unsigned count;
    struct adapter *adapters;
};

struct query { /* D3DKMT_QUERYADAPTERINFO */
    unsigned handle;
    int type;
    void *data;
    unsigned size;
};

struct registry { /* D3DDDI_QUERYREGISTRY_INFO; the value stands from `output` on */
    unsigned type, flags;
    wchar_t name[260];
    unsigned value_type, physical_adapter, output_size, status;
    unsigned long long output;
};

/* Without an array the caller learns how many there are. */
static int list(unsigned *count, struct adapter *adapters)
{
    if (!adapters) {
        *count = ADAPTERS;
        return SUCCESS;
    }
    if (*count < ADAPTERS)
        return BUFFER_TOO_SMALL;
    for (unsigned i = 0; i < ADAPTERS; i++)
        adapters[i] = (struct adapter){FIRST_HANDLE + i, 0x1000 + i, 0, 0, 0};
    *count = ADAPTERS;
    return SUCCESS;
}

API int D3DKMTEnumAdapters2(struct enum2 *call) { return call ? list(&call->count, call->adapters) : INVALID_PARAMETER; }
API int D3DKMTEnumAdapters3(struct enum3 *call) { return call ? list(&call->count, call->adapters) : INVALID_PARAMETER; }

static int store_path(struct registry *answer, unsigned size)
{
    static const wchar_t path[] = WIDE(STORE);
    size_t bytes = sizeof path - sizeof *path;
    answer->output_size = (unsigned)bytes;
    answer->status = DONE;
    if (size < offsetof(struct registry, output) + bytes) {
        answer->status = BUFFER_OVERFLOW; /* a success all the same: the caller asks again with the room that it takes */
        return SUCCESS;
    }
    memcpy(&answer->output, path, bytes);
    return SUCCESS;
}

API int D3DKMTQueryAdapterInfo(const struct query *call)
{
    if (!call || !call->data || call->handle < FIRST_HANDLE || call->handle >= FIRST_HANDLE + ADAPTERS)
        return INVALID_PARAMETER;
    if (call->type == KMTQAITYPE_DRIVERVERSION && call->size >= sizeof(unsigned)) {
        *(unsigned *)call->data = WDDM_3_0;
        return SUCCESS;
    }
    struct registry *registry = call->data;
    if (call->type != KMTQAITYPE_QUERYREGISTRY || call->size < sizeof *registry)
        return INVALID_PARAMETER;
    if (registry->type == DRIVERSTOREPATH)
        return store_path(registry, call->size);
    registry->status = FAIL;
    return SUCCESS;
}

API int D3DKMTCloseAdapter(const unsigned *handle) { return handle ? SUCCESS : INVALID_PARAMETER; }
