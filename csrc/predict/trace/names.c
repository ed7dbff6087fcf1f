/* Numbered names (names.h). */
#include <string.h>

#include "names.h"

/* Returns: the bin of text, or the free one for it. */
static uint32_t *find(const vm_names *n, const char *text, size_t length) {
    uint64_t hash = length, word;
    const char *at = text;
    for (; length >= sizeof word; at += sizeof word, length -= sizeof word) {
        memcpy(&word, at, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    }
    for (word = 0; length--;) word = word << 8 | (unsigned char)*at++;
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    size_t i = (size_t)(hash >> 32) & (n->bins - 1);
    while (n->bin[i] && strcmp(vm_names_get(n, n->bin[i] - 1), text)) i = (i + 1) & (n->bins - 1);
    return &n->bin[i];
}

vm_status vm_names_add(vm_names *n, const char *text, uint32_t *number) {
    const size_t length = strlen(text) + 1;
    vm_status s;
    if (2 * (n->count + 1) > n->bins) {
        const size_t bins = n->bins ? 2 * n->bins : 128;
        if ((s = vm_scratch_widen(&n->bin, 0, bins, sizeof *n->bin))) return s;
        n->bins = bins;
        for (size_t i = 0; i < n->count; i++) {
            const char *name = vm_names_get(n, i);
            *find(n, name, strlen(name) + 1) = (uint32_t)i + 1;
        }
    }
    uint32_t *bin = find(n, text, length);
    *number = *bin - 1;
    if (*bin) return VM_OK;
    const size_t room = n->room - n->used < length ? 2 * (n->room + length) + 4096 : n->room;
    if (room > n->room && (s = vm_scratch_widen(&n->text, n->used, room, 1))) return s;
    n->room = room;
    if ((s = vm_scratch_grow(&n->at, n->count, sizeof *n->at))) return s;
    memcpy(n->text + n->used, text, length);
    n->at[n->count] = n->used;
    n->used += length;
    *number = (uint32_t)n->count++;
    *bin = *number + 1;
    return VM_OK;
}

bool vm_names_find(const vm_names *n, const char *text, uint32_t *number) {
    const uint32_t found = n->bins ? *find(n, text, strlen(text) + 1) : 0;
    if (found) *number = found - 1;
    return found;
}

void vm_names_free(vm_names *n) {
    vm_scratch_free(n->text);
    vm_scratch_free(n->at);
    vm_scratch_free(n->bin);
}
