/* Status codes and the sentence behind the last one of this thread. */
#include <stdarg.h>
#include <stdio.h>

#include "vm.h"

static _Thread_local char last_error[VM_SENTENCE];

vm_status vm_fail(vm_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *vm_error(void) { return last_error; }

vm_status vm_said(const vm_device *device, vm_status status) {
    const char *sentence = status ? device->error() : last_error;
    return sentence == last_error ? status : vm_fail(status, "%s", sentence);
}
