/* Numbered names: each once, in order of first use. */
#ifndef VM_NAMES_H
#define VM_NAMES_H

#include "../../vm.h"

typedef struct vm_names {
    size_t count, used, room, bins;
    char *text;    /* [room], one name after another */
    size_t *at;    /* where each begins */
    uint32_t *bin; /* hash table, at most half full: number + 1, or 0 */
} vm_names;

/* *number: the number of text, which is copied if new. */
vm_status vm_names_add(vm_names *n, const char *text, uint32_t *number);
/* Returns: whether text has a number. */
bool vm_names_find(const vm_names *n, const char *text, uint32_t *number);
void vm_names_free(vm_names *n);

/* Borrowed until the next name is added. */
static inline const char *vm_names_get(const vm_names *n, size_t number) { return n->text + n->at[number]; }

#endif
