/* libcuda.so.1, found at run time. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static vm_driver the_driver;
static bool loaded;

vm_status vm_driver_check(const vm_driver *d, CUresult result, const char *doing) {
    const char *name = NULL, *text = NULL;
    if (result == CUDA_SUCCESS) return VM_OK;
    if (d->GetErrorName(result, &name) || !name) name = "unknown error";
    if (d->GetErrorString(result, &text) || !text) text = "no description";
    return vm_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? VM_ENOMEM : VM_EDEVICE, "CUDA: %s: %s (%s, %d)", doing, text,
                   name, (int)result);
}

static vm_status load(const char *path) {
    const struct {
        const char *symbol;
        void *field;
    } entries[] = {
#define VM_DRIVER_ENTRY(NAME, SYMBOL, PARAMETERS) {SYMBOL, &the_driver.NAME},
        VM_DRIVER(VM_DRIVER_ENTRY)
#undef VM_DRIVER_ENTRY
    };
    void *library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return vm_fail(VM_EDEVICE, "CUDA: expected an NVIDIA driver, got %s", dlerror());
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *found = dlsym(library, entries[i].symbol);
        if (!found)
            return vm_fail(VM_EDEVICE, "CUDA: expected a driver with %s (CUDA 12.0 or later), got one without",
                           entries[i].symbol);
        memcpy(entries[i].field, &found, sizeof found);
    }
    const vm_driver *d = &the_driver;
    vm_status s;
    if ((s = vm_driver_check(d, d->Init(0), "starting the driver"))) return s;
    if ((s = vm_driver_check(d, d->DriverGetVersion(&the_driver.version), "asking the driver's version"))) return s;
    if (d->version < VM_DRIVER_LEAST)
        return vm_fail(VM_EDEVICE, "CUDA: expected a driver for CUDA %d.%d or later, got one for %d.%d",
                       VM_DRIVER_LEAST / 1000, VM_DRIVER_LEAST % 1000 / 10, d->version / 1000, d->version % 1000 / 10);
    return VM_OK;
}

const vm_driver *vm_driver_get(const char *path) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!loaded) loaded = load(path) == VM_OK;
    pthread_mutex_unlock(&lock);
    return loaded ? &the_driver : NULL;
}
