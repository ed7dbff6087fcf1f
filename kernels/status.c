/* Status codes, and the message of this thread's last one. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

static _Thread_local char last_error[VM_SENTENCE];

void vm_end_whole(char *text) {
    size_t last = strlen(text), follow = 0;
    while (last && (text[--last] & 0xc0) == 0x80) follow++;
    const unsigned char first = (unsigned char)text[last];
    if (follow < (size_t)(first >= 0xc0) + (first >= 0xe0) + (first >= 0xf0)) text[last] = 0;
}

vm_status vm_fail(vm_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    vm_end_whole(last_error);
    return status;
}

const char *vm_error(void) { return last_error; }

vm_status vm_device_fail(const vm_device *device, vm_status status, const char *about) {
    char sentence[VM_SENTENCE];
    if (!status) return VM_OK;
    snprintf(sentence, sizeof sentence, "%s", device->error());
    return vm_fail(status, "%s%s%s", about ? about : "", about ? ": " : "", sentence);
}
