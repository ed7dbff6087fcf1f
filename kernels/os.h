/* Memory from the operating system, on Linux and on Windows. */
#ifndef VM_OS_H
#define VM_OS_H

#include <stddef.h>

/* Zeros, VM_ALIGN-aligned; from 1 MiB up a mapping of its own, on Linux advised to huge pages. NULL: no memory left. */
void *vm_os_take(size_t bytes);
void vm_os_give(void *block, size_t bytes); /* as many as were taken */

#endif
