/* A CUDA driver with a card that has nothing but a size, for comfy-aimdo: tests/comfyui_dynamic_oracle.py builds it as
 * libcuda.so.1. It counts bytes, and refuses what does not fit. comfy-aimdo patches the entries of the four functions
 * with which PyTorch takes and gives back memory, so these are no tail calls and have some length. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define OUT_OF_MEMORY 2
#define RESERVED ((uint64_t)1 << 40) /* addresses for each reservation: no two meet */

static uint64_t total, used, reserved = RESERVED, taken = (uint64_t)1 << 24;
static struct {
    uint64_t address, bytes;
} held[1 << 16];
static int holds;

/* Begin with a card of `size` bytes. Other programs and the context have `others` of them. */
void card_begin(uint64_t size, uint64_t others) {
    total = size;
    used = others;
    holds = 0;
}

uint64_t card_used(void) { return used; }

static int take(uint64_t *address, uint64_t bytes) {
    uint64_t whole = (bytes + (2 << 20) - 1) & ~(uint64_t)((2 << 20) - 1);

    if (used + whole > total || holds == 1 << 16) {
        return OUT_OF_MEMORY;
    }
    used += whole;
    taken += whole + (2 << 20);
    held[holds].address = *address = taken;
    held[holds++].bytes = whole;
    return 0;
}

static int give(uint64_t address) {
    for (int i = 0; i < holds; i++) {
        if (held[i].address == address) {
            used -= held[i].bytes;
            held[i] = held[--holds];
            return 0;
        }
    }
    return 1;
}

int cuMemAlloc(uint64_t *address, size_t bytes) {
    volatile int found = take(address, bytes);
    return found;
}

int cuMemFree(uint64_t address) {
    volatile int found = give(address);
    return found;
}

int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
    volatile int found = take(address, bytes);
    (void)stream;
    return found;
}

int cuMemFreeAsync(uint64_t address, void *stream) {
    volatile int found = give(address);
    (void)stream;
    return found;
}

int cuMemAllocAsync_ptsz(uint64_t *address, size_t bytes, void *stream) {
    volatile int found = take(address, bytes);
    (void)stream;
    return found;
}

int cuMemFreeAsync_ptsz(uint64_t address, void *stream) {
    volatile int found = give(address);
    (void)stream;
    return found;
}

int cuMemCreate(uint64_t *handle, size_t bytes, const void *how, unsigned long long flags) {
    (void)how, (void)flags;
    if (used + bytes > total) {
        return OUT_OF_MEMORY;
    }
    used += bytes;
    *handle = bytes;
    return 0;
}

int cuMemRelease(uint64_t handle) {
    used -= handle;
    return 0;
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags) {
    (void)bytes, (void)alignment, (void)wanted, (void)flags;
    *address = reserved += RESERVED;
    return 0;
}

int cuMemGetInfo(size_t *available, size_t *size) {
    *available = total - used;
    *size = total;
    return 0;
}

int cuDeviceTotalMem(size_t *bytes, int device) {
    (void)device;
    *bytes = total;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuCtxGetDevice(int *device) {
    *device = 0;
    return 0;
}

int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)which, (void)device;
    *value = 0;
    return 0;
}

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "a card of bytes");
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "out of memory";
    return 0;
}

static int succeed(void) { return 0; }

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags, void *status) {
    static const struct {
        const char *name;
        void *address;
    } functions[] = {
        {"cuMemAlloc", (void *)cuMemAlloc},
        {"cuMemFree", (void *)cuMemFree},
        {"cuMemCreate", (void *)cuMemCreate},
        {"cuMemRelease", (void *)cuMemRelease},
        {"cuMemAddressReserve", (void *)cuMemAddressReserve},
        {"cuMemGetInfo", (void *)cuMemGetInfo},
        {"cuDeviceTotalMem", (void *)cuDeviceTotalMem},
        {"cuDeviceGet", (void *)cuDeviceGet},
        {"cuCtxGetDevice", (void *)cuCtxGetDevice},
        {"cuDeviceGetAttribute", (void *)cuDeviceGetAttribute},
        {"cuDeviceGetName", (void *)cuDeviceGetName},
        {"cuGetErrorString", (void *)cuGetErrorString},
    };
    (void)version, (void)status;
    *found = (void *)succeed; /* what only orders or maps */
    if (!strcmp(name, "cuMemAllocAsync")) {
        *found = flags & 2 ? (void *)cuMemAllocAsync_ptsz : (void *)cuMemAllocAsync;
    }
    if (!strcmp(name, "cuMemFreeAsync")) {
        *found = flags & 2 ? (void *)cuMemFreeAsync_ptsz : (void *)cuMemFreeAsync;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++) {
        if (!strcmp(name, functions[i].name)) {
            *found = functions[i].address;
        }
    }
    return 0;
}
