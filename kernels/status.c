/* Status codes, and the message of this thread's last one. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

static _Thread_local char last_error[VM_SENTENCE], last_parts[VM_SENTENCE];

void vm_end_whole(char *text) {
    size_t last = strlen(text), follow = 0;
    while (last && (text[--last] & 0xc0) == 0x80) follow++;
    const unsigned char first = (unsigned char)text[last];
    if (follow < (size_t)(first >= 0xc0) + (first >= 0xe0) + (first >= 0xf0)) text[last] = 0;
}

/* Makes a sentence of VM_EXPECTED_IN's parts. Returns whether all four are there: a full buffer may have cut them. */
static bool make_sentence(const char *parts, char sentence[VM_SENTENCE]) {
    static const char *const before[] = {"", ": ", ": expected ", ", got "};
    size_t length = 0;
    int i = 0;
    *sentence = 0;
    for (; i < 4 && parts; i++) {
        const char *end = i < 3 ? strstr(parts, VM_SPLIT) : NULL;
        const int bytes = end ? (int)(end - parts) : (int)strlen(parts);
        const char *link = i == 2 && !length ? "expected " : before[i];
        if (bytes && length < VM_SENTENCE)
            length += (size_t)snprintf(sentence + length, VM_SENTENCE - length, "%s%.*s", link, bytes, parts);
        parts = end ? end + 1 : NULL;
    }
    vm_end_whole(sentence);
    return i == 4;
}

vm_status vm_fail(vm_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_parts, sizeof last_parts, format, args);
    va_end(args);
    vm_end_whole(last_parts);
    if (!strstr(format, VM_SPLIT))
        strcpy(last_error, last_parts);
    else if (!make_sentence(last_parts, last_error))
        strcpy(last_parts, last_error);
    return status;
}

const char *vm_error(void) { return last_error; }

const char *vm_error_parts(void) { return last_parts; }

vm_status vm_device_fail(const vm_device *device, vm_status status, const char *about) {
    char sentence[VM_SENTENCE];
    if (!status) return VM_OK;
    snprintf(sentence, sizeof sentence, "%s", device->error());
    return vm_fail(status, "%s%s%s", about ? about : "", about ? ": " : "", sentence);
}
