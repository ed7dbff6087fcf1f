/* Memory from the operating system, on Linux and on Windows. */
#ifndef VM_OS_H
#define VM_OS_H

#include <stddef.h>

/* Zeros, VM_ALIGN-aligned. From 1 MiB up a mapping, on Linux of huge pages. Returns: NULL if no memory is left. */
void *vm_os_take(size_t bytes);
void vm_os_give(void *block, size_t bytes); /* bytes: as taken */

#endif
