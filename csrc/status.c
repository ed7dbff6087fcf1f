/* Status codes and the sentence behind the last one of this thread. */
#include <stdarg.h>
#include <stdio.h>

#include "vm.h"

static _Thread_local char last_error[512];

vm_status vm_fail(vm_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *vm_error(void) { return last_error; }

vm_status vm_multiply(size_t *out, size_t a, size_t b, const char *what) {
    if (__builtin_mul_overflow(a, b, out))
        return vm_fail(VM_EOVERFLOW, "%s: %zu x %zu does not fit in %zu bits", what, a, b, 8 * sizeof(size_t));
    return VM_OK;
}
