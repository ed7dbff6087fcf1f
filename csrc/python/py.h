/* The thin binding: check arguments, borrow pointers, release the GIL, one vm_ call, raise. No arithmetic here.
 * One file a type; py_module.c puts them together. */
#ifndef VM_PY_H
#define VM_PY_H

#include "py_shared.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL vaemem_core_array
#ifndef VM_PY_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "../vm.h"

/* Raises ValueError, MemoryError or OverflowError with vm_error()'s sentence. Returns NULL. */
PyObject *vm_py_raise(vm_status status);
/* An architecture as the dict that Python sees, and back; -1 with an exception set. */
PyObject *vm_py_arch_to_dict(const vm_arch *arch);
int vm_py_arch_from_dict(PyObject *dict, vm_arch *arch);
/* name: NULL or "" for the best usable one. NULL with an exception set. */
const vm_backend *vm_py_backend(const char *name);

/* py_allocator.c: raises allocator.OutOfMemoryError with vm_error()'s sentence and the figures. */
struct vm_talloc_oom;
void vm_py_raise_full(PyObject *allocator, const struct vm_talloc_oom *oom);

/* Each adds its part to the module; -1 with an exception set. */
int vm_py_add_model(PyObject *module);
int vm_py_add_kernels(PyObject *module);
int vm_py_add_allocator(PyObject *module);
int vm_py_add_unpickle(PyObject *module);
int vm_py_add_workspace(PyObject *module);
int vm_py_add_trace(PyObject *module);

#endif
